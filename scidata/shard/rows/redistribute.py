"""Rows of a sharded dim by their global number: one exchange brings each rank the rows that it asks for.

Where every rank knows the whole list (a roll, a flip, an index tensor that all hold) nothing but the rows travels. Rows
by ids that only their rank knows are asked for first. Gradients go back the same way and are added where they came
from, as in ``indexed_all_to_all_v``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from scidata.core.bounds import bounds_of, owners_of
from scidata.core.types import IntArray
from scidata.shard.axes import of_mesh
from scidata.shard.comm.collectives import Route, nonzero_counts, send_rows, swap_counts
from scidata.shard.comm.transport import Counts, Group, exchange_rows, group_rank, group_size
from scidata.shard.sizes import facts_of
from scidata.shard.spec import ShardSpec

_T = TypeVar("_T")
_MANY = 1 << 20  # runs of elements that a reshape moves


class RowPlan(NamedTuple):
    """Which rows one rank sends to each other one, and where those that it gets go."""

    route: Route
    order: Tensor  # for each row of my new part: its place among those received, in rank order
    stays: bool  # no rank needs another's rows


def _as_plan(holders: IntArray, rows: IntArray, owners: IntArray, pairs: int | None, stays: bool) -> RowPlan:
    """Make a plan.

    ``holders, rows``: the ranks that get rows of mine, in their order, and these rows, in the order of the holder's new
    part.
    ``owners``: the owner of each row of my new part; it sends its rows in the order of that part. Rows of owners 1, 0,
    1 arrive as those of 0, then of 1: ``order`` is 1, 0, 2.
    """
    order = np.empty(len(owners), dtype=np.int64)
    order[np.argsort(owners, kind="stable")] = np.arange(len(owners))
    sent = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
    route = Route(sent, _counted(holders), _counted(owners), pairs)
    return RowPlan(route, torch.from_numpy(order), stays)


def _counted(ranks: IntArray) -> Counts:
    return list(zip(*map(IntArray.tolist, np.unique(ranks, return_counts=True)), strict=True))


def plan_listed(index: IntArray, sizes: Sequence[int], new_sizes: Sequence[int], rank: int) -> RowPlan:
    """Plan a new part list: ``index`` has the old global row of each new row, and is the same on each rank."""
    bounds, new = facts_of(sizes).bounds, facts_of(new_sizes).bounds
    owners = owners_of(bounds, index)
    mine = np.flatnonzero(owners == rank)
    holders = np.repeat(np.arange(len(new_sizes)), new_sizes)
    pairs = _num_pairs(owners, holders, len(sizes))
    return _as_plan(holders[mine], index[mine] - bounds[rank], owners[new[rank] : new[rank + 1]], pairs, pairs == 0)


def _num_pairs(owners: IntArray, holders: IntArray, num_ranks: int) -> int:
    """Return how many pairs there are of an owner and another holder."""
    moved = owners != holders
    return len(np.unique(owners[moved] * num_ranks + holders[moved]))


def plan_rows(
    spec: ShardSpec,
    dim: int,
    build: Callable[..., IntArray],
    args: tuple[Hashable, ...],
    sizes: Callable[[], tuple[int, ...]] | None = None,
) -> tuple[RowPlan, ShardSpec]:
    """Plan the rows ``build(extent, *args)`` of a sharded dim, split into ``sizes()``, by default as they were.

    Kept with the layout; also returns that of the result. All that ``sizes`` depends on is in ``args``.
    """

    def make() -> tuple[RowPlan, ShardSpec]:
        old, rank, _ = spec.parts(dim)
        new = old if sizes is None else sizes()
        return plan_listed(build(spec.global_shape[dim], *args), old, new, rank), spec.with_rows(dim, new)

    return kept_rows((spec,), ("rows", dim, build, args), make)


def kept_rows(specs: Sequence[ShardSpec], key: tuple[Hashable, ...], make: Callable[[], _T]) -> _T:
    """Return a plan that lists rows, kept for the next call with tensors of these layouts."""
    if any(spec.exchange is not None for spec in specs):  # layouts of a graph go with its tensors
        return make()
    kept, full = of_mesh(specs[0].device_mesh).rows, (*key, *map(id, specs))
    found: tuple[object, _T] | None = kept.get(full)
    if found is None:
        found = kept.put(full, (specs, make()))  # with the layouts, so that their ids stay theirs
    return found[1]


def plan_reshape(
    old: tuple[int, int], sizes: tuple[int, ...], new: tuple[int, int], new_sizes: tuple[int, ...], rank: int
) -> RowPlan:
    """Plan from dims ``(outer, sharded, inner)`` to others, all flat in C order; ``old``, ``new``: (outer, inner)."""
    bounds, new_bounds, extent, new_extent = bounds_of(sizes), bounds_of(new_sizes), sum(sizes), sum(new_sizes)
    held = _elements(old, extent, bounds[rank], bounds[rank + 1])
    holders = owners_of(new_bounds, held // new[1] % new_extent)
    rows = np.argsort(holders, kind="stable")
    wanted = _elements(new, new_extent, new_bounds[rank], new_bounds[rank + 1])
    pairs = None  # of very many runs of elements, not worth finding out
    if (old[0] + new[0]) * len(sizes) < _MANY:
        starts = np.union1d(_starts(old, extent, bounds), _starts(new, new_extent, new_bounds))
        there = owners_of(bounds, starts // old[1] % extent)
        pairs = _num_pairs(there, owners_of(new_bounds, starts // new[1] % new_extent), len(sizes))
    return _as_plan(holders[rows], rows, owners_of(bounds, wanted // old[1] % extent), pairs, False)


def _starts(shape: tuple[int, int], extent: int, bounds: IntArray) -> IntArray:
    """Return the flat numbers of elements with which parts of the middle one of three dims begin."""
    outer, inner = shape
    found: IntArray = ((np.arange(outer)[:, None] * extent + bounds[:-1]) * inner).reshape(-1)
    return found[found < outer * extent * inner]


def _elements(shape: tuple[int, int], extent: int, start: int, stop: int) -> IntArray:
    """Return the flat numbers of some rows of the middle one of three dims."""
    outer, inner = shape
    rows = np.arange(outer)[:, None, None] * extent + np.arange(start, stop)[:, None]
    return (rows * inner + np.arange(inner)).reshape(-1)


def move_rows(local: Tensor, plan: RowPlan, dim: int, group: Group) -> Tensor:
    """Return the new part. Collective, unless every row stays; differentiable, twice too."""
    route = plan.route._replace(rows=plan.route.rows.to(local.device))
    if plan.stays:
        return local.index_select(dim, route.rows)
    rows = send_rows(local.movedim(dim, 0), route, group)
    return rows.movedim(0, dim).index_select(dim, plan.order.to(local.device))  # last, so that it is no view


def fetch_rows(local: Tensor, ids: Tensor, sizes: Sequence[int], dim: int, group: Group) -> Tensor:
    """Return the rows at global ``ids``, ``(num,)`` integers that differ by rank. Collective, three rounds.

    An id out of range raises on every rank.
    """
    num_ranks, extent = group_size(group), sum(sizes)
    ids = torch.where(ids < 0, ids + extent, ids).to(torch.int64)
    bounds = torch.from_numpy(facts_of(sizes).bounds).to(ids.device)
    owners = torch.searchsorted(bounds, ids, right=True) - 1  # owners_of, on the device
    bad = bool(((ids < 0) | (ids >= extent)).any())
    counts = torch.full((num_ranks,), -1, device=ids.device) if bad else torch.bincount(owners, minlength=num_ranks)
    asked, pairs = swap_counts(counts, group)
    if bool((asked < 0).any()):
        raise IndexError(f"an index is out of range for dim {dim} of extent {extent}")
    order = torch.argsort(owners, stable=True)
    received, sent = nonzero_counts(counts.cpu()), nonzero_counts(asked.cpu())
    index = exchange_rows(ids[order], received, sent, group, pairs) - bounds[group_rank(group)]
    rows = send_rows(local.movedim(dim, 0), Route(index, sent, received, pairs), group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return rows.movedim(0, dim).index_select(dim, place)
