"""What a user may ask of a store: checked, from its manifest alone."""

from __future__ import annotations

import numpy as np

from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.meshes.hetero import is_relation
from scidata.store.format.manifest import FieldInfo
from scidata.store.format.node_sets import sets_of
from scidata.store.format.store import Store
from scidata.store.reading.subsample import Subsample


def checked_halo(store: Store, halo: object) -> float:
    """Return the number of hops, or the radius, if the store has what that needs.

    Raises
    ------
    ConfigError
        No number, negative, hops that are not whole, or a store without edges or positions.
    """
    kind = store.manifest.kind
    numbers = int | float | np.integer | np.floating
    if not isinstance(halo, numbers) or isinstance(halo, bool) or not np.isfinite(halo) or halo < 0:
        what = "a radius" if kind == "points" else "a number of hops"
        raise ConfigError(f"halo={halo!r}: a halo of {kind} is {what}, at least 0")
    if kind == "points":
        if halo and not _has_positions(store):
            raise ConfigError(f"{store.path}: halo={halo} is a radius, and the store has no positions")
        return float(halo)
    if halo != int(halo):
        raise ConfigError(f"halo={halo}: the halo of a {kind} is a whole number of hops along its edges")
    if halo and "edge" not in store.manifest.entities:
        raise ConfigError(f"{store.path}: halo={halo} needs edges, and the store has none; write it again with --edges")
    return int(halo)


def checked_ghosts(ghosts: str | None, halo: float) -> str:
    """Return how the values of ghosts come: by default from disk, where there is a halo.

    Raises
    ------
    ConfigError
        None of the ways, or ghosts without a halo.
    """
    if ghosts is None:
        return "disk" if halo else "exchange"
    if ghosts not in ("disk", "exchange"):
        hint = near_matches(str(ghosts), ("disk", "exchange"), listed=False)
        raise ConfigError(f"ghosts must be 'disk' or 'exchange', not {ghosts!r}{hint}")
    if ghosts == "disk" and not halo:
        raise ConfigError("ghosts='disk' reads the rows of a halo: say how wide, with halo=1 say")
    return ghosts


def checked_subsample(store: Store, subsample: Subsample | None) -> Subsample | None:
    """Return it, if the store has the rows that it draws.

    Raises
    ------
    UnknownNameError
        An entity that is not there, or edges, which follow their nodes.
    """
    if subsample is None:
        return None
    if store.manifest.kind == "hetero":
        sets = sets_of(store.manifest.samples[0])
        for name in subsample.counts:
            if name not in sets:
                follow = "; edges follow the rows that are drawn" if is_relation(name) else near_matches(name, sets)
                raise UnknownNameError(
                    f"{store.path}: subsample draws rows of {' or '.join(sets)}, not of {name!r}{follow}"
                )
        return subsample
    subsample.only_one(store.path)
    drawable = [entity for entity in store.manifest.entities if entity in (store.manifest.entity, "cell")]
    if subsample.entity not in drawable:
        follow = "; edges follow the nodes that are drawn" if subsample.entity == "edge" else ""
        raise UnknownNameError(
            f"{store.path}: subsample draws rows of {' or '.join(drawable)}, not of {subsample.entity!r}"
            f"{follow or near_matches(subsample.entity, drawable)}"
        )
    return subsample


def named_fields(store: Store) -> dict[str, FieldInfo]:
    """Return the fields by the names that users type: with the entity where several have a field of that name."""
    manifest = store.manifest
    infos = list(manifest.fields.values())
    placed = [manifest.entity] if _has_positions(store) else []
    for entity in sets_of(manifest.samples[0]) if manifest.samples else ():
        if all(f"{entity}/pos" in sample.arrays for sample in manifest.samples):
            placed.append(entity)
    for entity in reversed(placed if manifest.samples else []):
        array = manifest.samples[0].arrays[f"{entity}/pos"]
        infos.insert(0, FieldInfo(name="pos", entity=entity, dtype=array.dtype, dims=(entity, "xyz"), entity_dim=0))
    names = [info.name for info in infos]
    return {info.name if names.count(info.name) == 1 else info.path: info for info in infos}


def _has_positions(store: Store) -> bool:
    return all(sample.block_space is not None for sample in store.manifest.samples)
