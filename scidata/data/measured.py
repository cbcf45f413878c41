"""Measured times of the ranks' parts of stored samples, used to cut the parts of the next epoch or run.

Of each stored sample there are the bounds that it was cut by and the seconds of each part. Between two bounds the cost
counts as even, so that any number of ranks cuts the same prefix sum of it, and so does a run that goes on elsewhere.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.types import IntArray
from scidata.device_mesh import groups
from scidata.device_mesh.board import call_with_timeout, common_postings, has_peers
from scidata.errors import ConfigError, RankFailedError
from scidata.meshes.order.cuts import balanced_bounds
from scidata.store.reading.cuts import PartCosts

if TYPE_CHECKING:
    from scidata.store.reading.reader import StoreReader

_VERSION = 1
_T = TypeVar("_T")
_KEY = "rebalance"  # the rank that waits in a rebalance, and its place
_ALIKE = "it is collective: all ranks call it, at the same places"


@functools.cache
def name_ranks_alone() -> None:
    """Make collective timeouts name the rank that waits in a rebalance without the others."""
    groups.add_explainer(_reason)


def _reason() -> RankFailedError | None:
    found = call_with_timeout(1.0, lambda: common_postings().find(_KEY)) if has_peers() else None
    return None if found is None else RankFailedError(f"rank {found[0]} waits in {found[1]}; {_ALIKE}", found[0])


def check_seconds(seconds: object) -> float:
    """Return seconds as a number; raise ConfigError if they are no finite number >= 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float | np.number) or not 0 <= seconds < math.inf:
        raise ConfigError(f"measure: seconds={seconds!r}: expected a number from 0 on, what this rank's own work took")
    return float(seconds)


def shares(
    reader: StoreReader, rank: int, index: int | list[int] | None, seconds: float, bounds: IntArray | None
) -> dict[int, float]:
    """Split seconds over the stored samples of a batch by the rows that a rank owns of each.

    None if its ``bounds`` differ from the reader's: costs of parts read before a rebalance would mislead.
    """
    if index is None:
        raise ConfigError("measure: the sample has no index, so that nothing says which one it is; give its number")
    stored = [reader.numbering.locate(each)[0] for each in (index if isinstance(index, list) else [index])]
    cuts = [reader.measured_bounds(each) for each in stored]
    if bounds is not None and not np.array_equal(np.sum(cuts, axis=0), bounds):
        return {}
    rows = [int(np.diff(cut)[rank]) for cut in cuts]
    found: defaultdict[int, float] = defaultdict(float)
    for each, own in zip(stored, rows, strict=True):
        found[each] += seconds * own / sum(rows) if sum(rows) else seconds / len(rows)
    return found


def gathered(
    measured: Mapping[int, float], mesh: DeviceMesh | None, rank: int, num_parts: int, when: str
) -> dict[int, list[float]]:
    """Return the seconds of all parts of each stored sample whose parts were all measured. Collective over the mesh.

    Where several data-parallel ranks measured a part, its mean. ``when`` is the same on all ranks, or ConfigError.
    """
    own = dist.get_rank() if dist.is_initialized() else 0
    if has_peers():
        common_postings().post(_KEY, [own, when])
    records = from_all([(rank, dict(measured), own, when)], mesh)
    by_part: defaultdict[int, list[list[float]]] = defaultdict(lambda: [[] for _ in range(num_parts)])
    if has_peers():
        common_postings().remove(_KEY)
    if len(places := {at: one for _, _, one, at in records}) > 1:
        raise ConfigError(f"{', '.join(f'rank {one} has come to {at}' for at, one in places.items())}; {_ALIKE}")
    for part, seconds, _, _ in records:
        for stored, value in seconds.items():
            by_part[stored][part].append(value)
    means = {
        stored: [sum(each) / len(each) for each in parts] for stored, parts in sorted(by_part.items()) if all(parts)
    }
    return {stored: parts for stored, parts in means.items() if sum(parts) > 0}


def from_all(records: list[_T], mesh: DeviceMesh | None) -> list[_T]:
    """Gather the records of all ranks, also of ranks with equal parts. Collective over the mesh."""
    for axis in range(0 if mesh is None else mesh.ndim):
        assert mesh is not None
        found: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(found, records, group=mesh.get_group(axis))
        records = [record for each in found for record in each]
    return records


def costs_to_json(costs: Mapping[int, PartCosts]) -> dict[str, Any]:
    """Convert costs to JSON values."""
    samples = {str(n): {"bounds": list(each.bounds), "seconds": list(each.seconds)} for n, each in costs.items()}
    return {"version": _VERSION, "samples": samples}


def costs_from_json(found: Any, sizes: Sequence[int]) -> dict[int, PartCosts]:
    """Read saved costs of a store whose samples have these numbers of rows; raise ConfigError if they do not fit."""
    if (
        not isinstance(found, Mapping)
        or found.get("version") != _VERSION
        or not isinstance(found.get("samples"), Mapping)
    ):
        raise ConfigError(f"load_costs: expected costs as ds.costs has them, of version {_VERSION}, not {found!r:.200}")
    costs = {}
    for name, each in found["samples"].items():
        try:
            made = PartCosts(tuple(map(int, each["bounds"])), tuple(map(float, each["seconds"])))
            stored, num = int(name), made.bounds[-1]
            balanced_bounds(made.bounds, made.seconds)
        except (ConfigError, IndexError, KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"load_costs: sample {name}: these are no costs: {each!r:.200}") from e
        if not 0 <= stored < len(sizes) or sizes[stored] != num:
            there = f"{sizes[stored]} rows" if 0 <= stored < len(sizes) else f"no such sample, of {len(sizes)}"
            raise ConfigError(f"load_costs: sample {stored} had {num} rows, and the store has {there}; it is another")
        costs[stored] = made
    return costs
