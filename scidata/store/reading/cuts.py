"""Where the parts of a stored sample begin: evenly, by a cost of each row, or as the user says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from scidata.core.bounds import explicit_bounds
from scidata.core.options import Weights
from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError, UnknownNameError, check_known, near_matches
from scidata.meshes.order.cuts import cut_bounds, equal_bounds, prefix_of
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.node_sets import folder_of_edges, relations_of, sets_of
from scidata.store.format.store import Store
from scidata.store.format.write import BLOCK_ROWS
from scidata.store.reading.rows import RowAccess

#: Weights that are no field: costs of parts that ranks have measured.
MEASURED = "measured"


class PartCosts(NamedTuple):
    """Seconds that each part of a sample took, and the bounds that it was cut by."""

    bounds: tuple[int, ...]
    seconds: tuple[float, ...]


def checked_weights(store: Store, weights: Weights) -> str | FloatArray | dict[str, float] | None:
    """Check weights as far as the manifest alone can tell.

    Raises UnknownNameError, ConfigError: no such field, not one number per row, or edges that the store does not have.
    """
    manifest = store.manifest
    if weights is None or (isinstance(weights, str) and weights == MEASURED):
        return weights
    if manifest.kind == "hetero":
        return _checked_costs(store, weights)
    if isinstance(weights, Mapping):
        raise ConfigError(
            f"{store.path}: weights by set are for graphs between several node sets, not a {manifest.kind}"
        )
    if not isinstance(weights, str):
        return np.asarray(weights, np.float64)
    if weights == "edges":
        if "edge" not in manifest.entities:
            raise ConfigError(f"{store.path}: weights='edges', but the store has no edges")
        return weights
    name = weights.removeprefix(f"{manifest.entity}/")
    info = manifest.fields.get(f"{manifest.entity}/{name}")
    if info is None:
        known = [f.name for f in manifest.fields.values() if f.entity == manifest.entity]
        raise UnknownNameError(
            f"{store.path}: weights: no field {weights!r} of each {manifest.entity}"
            f"{near_matches(name, [*known, 'edges'])}"
        )
    if len(info.dims) != 1:
        raise ConfigError(f"{store.path}: weights are one number per {manifest.entity}; {weights!r} has {info.dims}")
    return name


def check_cut(bounds: object, weights: object, *, what: str, known: Sequence[str] = ("even",)) -> None:
    """Raise ConfigError unless bounds are named as they can be, and not given beside weights."""
    if weights is not None and not (isinstance(bounds, str) and bounds == "even"):
        raise ConfigError("weights and explicit bounds exclude each other: both say where to cut")
    if isinstance(bounds, str) and bounds not in known:
        names = ", ".join(map(repr, known))
        raise ConfigError(f"bounds={bounds!r}: {what} cut {names}, by weights, or by explicit bounds")


def bounds_of_sample(bounds: object, index: int) -> Any:
    """Return the bounds of one sample, given for all or by sample."""
    if not isinstance(bounds, Mapping) or all(isinstance(key, str) for key in bounds):  # those by node set
        return bounds
    if index not in bounds:
        raise ConfigError(f"bounds has no entry for sample {index}; it has {sorted(bounds)}")
    return bounds[index]


def _checked_costs(store: Store, weights: object) -> str | dict[str, float]:
    """Return ``"edges"``, or the cost of a row of each set: 0 if none is given."""
    if weights == "edges":
        return "edges"
    sets = sets_of(store.sample(0))
    if not isinstance(weights, Mapping):
        shown = ", ".join(f"{name!r}: 1" for name in sets)
        raise ConfigError(
            f"{store.path}: weights of a graph between node sets are None, 'edges' or a cost by set, {{{shown}}}, not "
            f"{weights!r}"
        )
    check_known(f"{store.path}: weights: no node set", weights, sets)
    for name, cost in weights.items():
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
            raise ConfigError(f"{store.path}: weights of {name!r}: a cost is a number from 0 on, not {cost!r}")
    return {name: float(cost) for name, cost in weights.items()}


def cut_sample(
    access: RowAccess, info: SampleInfo, num_parts: int, *, explicit: Any = None, weights: Any = None
) -> dict[str, IntArray]:
    """Return the bounds of each entity of one sample: of its rows, its node sets, its cells and its relations.

    The rows are cut, and all else follows: a cell goes with the lowest of its nodes, an edge with the node that it ends
    at. Weights that the store was written with are read from its prefix sums, one per block of rows; ``"edges"`` and
    fields otherwise from the whole array.

    - ``explicit``: bounds of the rows, or by node set; None cuts by ``weights``, evenly if that is None.

    Raises ConfigError: bounds that do not fit the sample, or weights that are no costs of its rows.
    """
    if isinstance(explicit, Mapping):
        bounds = _given_bounds(info, explicit, num_parts)
    else:
        bounds = {info.entity: _bounds_of_rows(access, info, num_parts, explicit, weights)}
        for name in sets_of(info):
            if name != info.entity:
                bounds[name] = _pointers_at(access, f"{name}/indptr", bounds[info.entity])
    if "cell/indptr" in info.arrays:
        bounds["cell"] = _pointers_at(access, "cell/indptr", bounds[info.entity])
    for name, (_, _, target) in relations_of(info).items():
        bounds[name] = _pointers_at(access, f"{folder_of_edges(name)}/indptr", bounds[target])
    return bounds


def _pointers_at(access: RowAccess, path: str, rows: IntArray) -> IntArray:
    """Read the entries of sorted rows, of which some may be equal."""
    each, back = np.unique(rows, return_inverse=True)
    return access.gather(path, each)[back]


def _given_bounds(info: SampleInfo, given: Mapping[str, Any], num_parts: int) -> dict[str, IntArray]:
    sets = sets_of(info)
    check_known("bounds: no node set", given, sets)
    if missing := [name for name in sets if name not in given]:
        raise ConfigError(f"bounds: none for node set {missing[0]!r}; give those of each of {', '.join(sets)}")
    bounds = {name: explicit_bounds(given[name], info.counts[name], num_parts) for name in sets}
    return {info.entity: np.sum([*bounds.values()], axis=0), **bounds}


def _bounds_of_rows(access: RowAccess, info: SampleInfo, num_parts: int, explicit: Any, weights: Any) -> IntArray:
    num_rows = info.counts[info.entity]
    if explicit is not None:
        return explicit_bounds(explicit, num_rows, num_parts)
    if weights is None:
        return equal_bounds(num_rows, num_parts)
    if isinstance(weights, Mapping):
        before = np.zeros(num_rows + 1)
        for name, cost in weights.items():
            before += cost * access.rows(f"{name}/indptr", 0, num_rows + 1)
        return cut_bounds(before, num_parts)
    if isinstance(weights, str):
        if weights == info.settings.get("weights") and info.kind != "hetero":
            marks = np.append(np.arange(0, num_rows, BLOCK_ROWS), num_rows)
            return cut_bounds(access.rows("blocks/weight_prefix", 0, len(marks)), num_parts, rows=marks)
        if weights == "edges":
            return cut_bounds(_edges_before(access, info), num_parts)
        return cut_bounds(prefix_of(access.rows(f"{info.entity}/{weights}", 0, num_rows)), num_parts)
    num_source = info.source_counts[info.entity]
    if weights.shape != (num_source,):
        raise ConfigError(
            f"sample {info.index} ({info.name}): weights of shape {weights.shape} for {num_source} {info.entity}s"
        )
    return cut_bounds(prefix_of(weights[access.rows(f"{info.entity}/original_id", 0, num_rows)]), num_parts)


def _edges_before(access: RowAccess, info: SampleInfo) -> FloatArray:
    """Return the number of edges that end at rows before each row, and of all."""
    num_rows = info.counts[info.entity]
    before = np.zeros(num_rows + 1)
    for name, (_, _, target) in relations_of(info).items():
        edges = access.rows(f"{folder_of_edges(name)}/indptr", 0, info.counts[target] + 1)
        before += edges if target == info.entity else edges[access.rows(f"{target}/indptr", 0, num_rows + 1)]
    return before
