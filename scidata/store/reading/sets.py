"""Graphs between several node sets: where the parts of each set begin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import explicit_bounds
from scidata.core.types import IntArray
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.meshes.order.cuts import cut_bounds, equal_bounds
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.node_sets import relations_of, sets_of
from scidata.store.format.store import Store
from scidata.store.reading.rows import RowAccess


def checked_costs(store: Store, weights: object) -> str | dict[str, float]:
    """Return ``"edges"``, or what a row of each set costs: 0 where that is not said.

    Raises
    ------
    ConfigError, UnknownNameError
        Something else, no such set, or no number from 0 on.
    """
    if weights == "edges":
        return "edges"
    sets = sets_of(store.manifest.samples[0])
    if not isinstance(weights, Mapping):
        shown = ", ".join(f"{name!r}: 1" for name in sets)
        raise ConfigError(
            f"{store.path}: weights of a graph between node sets are None, 'edges' or a cost by set, {{{shown}}}, not "
            f"{weights!r}"
        )
    for name, cost in weights.items():
        if name not in sets:
            raise UnknownNameError(f"{store.path}: weights: no node set {name!r}{near_matches(str(name), sets)}")
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
            raise ConfigError(f"{store.path}: weights of {name!r}: a cost is a number from 0 on, not {cost!r}")
    return {name: float(cost) for name, cost in weights.items()}


def cut_sets(
    access: RowAccess, info: SampleInfo, num_parts: int, *, explicit: Any = None, weights: Any = None
) -> dict[str, IntArray]:
    """Return the bounds of all rows together, of each set and of each relation.

    Parameters
    ----------
    explicit
        Bounds by set, or of the rows of all sets together; None cuts these by ``weights``, evenly where that is None.
    """
    num_rows = info.counts[info.entity]
    if isinstance(explicit, Mapping):
        return _with_relations(access, info, _given_bounds(info, explicit, num_parts))
    if explicit is not None:
        joint = explicit_bounds(explicit, num_rows, num_parts)
    elif weights is None:
        joint = equal_bounds(num_rows, num_parts)
    else:
        joint = cut_bounds(_prefix(access, info, weights), num_parts)
    bounds = {info.entity: joint}
    cuts, back = np.unique(joint, return_inverse=True)
    for name in sets_of(info):
        bounds[name] = access.take(f"{name}/indptr", cuts)[back]
    return _with_relations(access, info, bounds)


def _given_bounds(info: SampleInfo, given: Mapping[str, Any], num_parts: int) -> dict[str, IntArray]:
    sets = sets_of(info)
    for name in given:
        if name not in sets:
            raise UnknownNameError(f"bounds: no node set {name!r}{near_matches(name, sets)}")
    if missing := [name for name in sets if name not in given]:
        raise ConfigError(f"bounds: none for node set {missing[0]!r}; give those of each of {', '.join(sets)}")
    bounds = {name: explicit_bounds(given[name], info.counts[name], num_parts) for name in sets}
    return {info.entity: np.sum([*bounds.values()], axis=0), **bounds}


def _prefix(access: RowAccess, info: SampleInfo, weights: str | Mapping[str, float]) -> npt.NDArray[np.float64]:
    """Return what all rows before each one cost together."""
    num_rows = info.counts[info.entity]
    prefix = np.zeros(num_rows + 1)
    if isinstance(weights, Mapping):
        for name, cost in weights.items():
            prefix += cost * access.rows(f"{name}/indptr", 0, num_rows + 1)
        return prefix
    for name, (_, _, target) in relations_of(info).items():  # an edge costs where it ends
        edges = access.rows(f"{name}/indptr", 0, info.counts[target] + 1)
        prefix += edges[access.rows(f"{target}/indptr", 0, num_rows + 1)]
    return prefix


def _with_relations(access: RowAccess, info: SampleInfo, bounds: Mapping[str, IntArray]) -> dict[str, IntArray]:
    """Add the bounds of the edges, which go with the node that they end at."""
    found = dict(bounds)
    for name, (_, _, target) in relations_of(info).items():
        cuts, back = np.unique(bounds[target], return_inverse=True)
        found[name] = access.take(f"{name}/indptr", cuts)[back]
    return found
