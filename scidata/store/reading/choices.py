"""What a user may ask of a store: checked, from its manifest alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from scidata.core.checks import is_int
from scidata.errors import ConfigError, UnknownNameError, check_known, near_matches
from scidata.meshes.hetero import SEPARATOR, is_relation
from scidata.store.format.manifest import ACROSS, FieldInfo
from scidata.store.format.node_sets import relations_of, sets_of
from scidata.store.format.store import Store
from scidata.store.reading.subsample import Subsample

#: Of each layer of a model, in their order, the relations that it follows.
Layers: TypeAlias = tuple[tuple[str, ...], ...]


#: The halo of all cells that have an owned node.
CELLS = "cells"


def checked_halo(store: Store, halo: object) -> float:
    """Return the number of hops, or the radius, if the store has the edges or positions for it."""
    kind, others = store.manifest.kind, ""
    of_cells = store.manifest.entity == "cell"
    if kind == "mesh":
        if isinstance(halo, str) and halo == CELLS:
            if of_cells and f"edge/{ACROSS}" not in store.manifest.fields:
                raise ConfigError(
                    f"{store.path}: halo={CELLS!r} needs the cells that share nodes, and its edges are others; write "
                    "it again with edges='nodes' (--edges nodes)"
                )
            return 1
        others = f", or {CELLS!r}{near_matches(str(halo), (CELLS,), listed=False)}"
    numbers = int | float | np.integer | np.floating
    if not isinstance(halo, numbers) or isinstance(halo, bool) or not np.isfinite(halo) or halo < 0:
        unit = "a radius" if kind == "points" else "a number of hops"
        unit += " along edges between cells" if of_cells and kind == "mesh" else ""
        raise ConfigError(f"halo={halo!r}: a halo of {kind} is {unit}, at least 0{others}")
    if kind == "points":
        if halo and any(sample.block_space is None for sample in store.manifest.samples.firsts()):
            raise ConfigError(f"{store.path}: halo={halo} is a radius, and the store has no positions")
        return float(halo)
    if halo != int(halo):
        raise ConfigError(f"halo={halo}: the halo of a {kind} is a whole number of hops along its edges")
    if halo and "edge" not in store.manifest.entities:
        raise ConfigError(f"{store.path}: halo={halo} needs edges, and the store has none; write it again with --edges")
    return int(halo)


def checked_layers(store: Store, halo: Any) -> Layers:
    """Return the layers that a halo is wide enough for: none where it is 0.

    - ``halo``: how many layers, each along all relations; ``{relation: how many}``, or relations one after the other,
      in the order of the layers. Several relations of one layer are given together: ``[("a__to__b", "b__to__a"),
      ...]``.
    """
    known = tuple(relations_of(store.sample(0)))
    if is_int(halo) and halo >= 0:
        return (known,) * int(halo)
    if isinstance(halo, Mapping):
        for name, count in halo.items():
            if not is_int(count) or count < 0:
                raise ConfigError(f"halo={halo!r}: {name!r} needs a number of layers, at least 0, not {count!r}")
        return tuple(layer for name, count in halo.items() for layer in [_layer(store, name, known)] * int(count))
    if isinstance(halo, Sequence) and not isinstance(halo, str):
        return tuple(_layer(store, each, known) for each in halo)
    example = known[0] if known else "grid__to__mesh"
    raise ConfigError(
        f"halo={halo!r}: of a graph between several node sets, a whole number of layers along all relations, or which "
        f"relations the layers of a model follow, in their order: {{{example!r}: 1}} or [{example!r}]"
    )


def _layer(store: Store, given: object, known: Collection[str]) -> tuple[str, ...]:
    """Return the relations of a layer: one, by its name or the three of it, or several."""
    is_triple = isinstance(given, tuple) and len(given) == 3 and not any(is_relation(str(part)) for part in given)
    several = [given] if is_triple or isinstance(given, str) else given
    if not isinstance(several, Collection) or not several:
        raise ConfigError(f"{store.path}: halo: a layer is a relation, or several, not {given!r}")
    names = [SEPARATOR.join(map(str, each)) if isinstance(each, tuple) else str(each) for each in several]
    check_known(f"{store.path}: halo: no relation", names, known)
    return tuple(dict.fromkeys(names))


def checked_ghosts(ghosts: str | None, halo: float) -> str:
    """Return how the values of ghosts come: by default from disk, where there is a halo."""
    if ghosts is None:
        return "disk" if halo else "exchange"
    if ghosts not in ("disk", "exchange"):
        hint = near_matches(str(ghosts), ("disk", "exchange"), listed=False)
        raise ConfigError(f"ghosts must be 'disk' or 'exchange', not {ghosts!r}{hint}")
    if ghosts == "disk" and not halo:
        raise ConfigError("ghosts='disk' reads the rows of a halo: say how wide, with halo=1 say")
    return ghosts


def check_subsample(store: Store, subsample: Subsample) -> None:
    """Check that the store has the rows that are drawn."""
    if store.manifest.kind != "hetero":
        subsample.only_one(store.path)
    sets = sets_of(store.sample(0))
    drawable = [each for each in store.manifest.entities if each in (*sets, "cell")]
    for name in subsample.counts:
        if name not in drawable:
            follow = "; edges follow the rows that are drawn" if name == "edge" or is_relation(name) else ""
            raise UnknownNameError(
                f"{store.path}: subsample draws rows of {' or '.join(drawable)}, not of {name!r}"
                f"{follow or near_matches(name, drawable)}"
            )


def named_fields(store: Store) -> dict[str, FieldInfo]:
    """Return the fields by the names that users type: with the entity where several have a field of that name."""
    manifest = store.manifest
    infos = list(manifest.fields.values())
    firsts = manifest.samples.firsts()
    sets = sets_of(firsts[0])
    placed = [name for name in sets if all(f"{name}/pos" in sample.arrays for sample in firsts)]
    for entity in reversed(placed):
        array = firsts[0].arrays[f"{entity}/pos"]
        infos.insert(0, FieldInfo(name="pos", entity=entity, dtype=array.dtype, dims=(entity, "xyz"), entity_dim=0))
    names = [info.name for info in infos]
    return {info.name if names.count(info.name) == 1 else info.path: info for info in infos}
