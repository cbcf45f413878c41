"""Rows of a sharded dim by global number: one exchange brings each rank the rows that it asks for.

Where every rank knows the whole list (a roll, a flip, an index tensor that all hold) nothing but the rows travels. Rows
by ids that only their rank knows are asked for first. Gradients go back the same way and are added where they came
from, as in ``indexed_all_to_all_v``.

Parts come from one layout to another by gathers, cuts and exchanges of the rows that overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from scidata.core.bounds import bounds_of, owners_of
from scidata.core.types import IntArray
from scidata.shard.axes import of_mesh
from scidata.shard.comm.collectives import Route, all_gather_v, nonzero_counts, send_rows, slice_to_shard, swap_counts
from scidata.shard.comm.functions import linear
from scidata.shard.comm.transport import Counts, Group, exchange_rows, group_rank, group_size, with_dim
from scidata.shard.rows.runs import fetch_runs, parts_as_runs, plan_runs
from scidata.shard.sizes import facts_of
from scidata.shard.spec import ShardSpec

_T = TypeVar("_T")
_MANY = 1 << 20  # runs of elements that a reshape moves


class RowPlan(NamedTuple):
    """Rows that one rank sends to each other rank, and destinations of the received ones."""

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
    """Plan a new order of rows: ``index`` has the old global row of each new row, equal on all ranks."""
    bounds, new = facts_of(sizes).bounds, facts_of(new_sizes).bounds
    owners = owners_of(bounds, index)
    mine = np.flatnonzero(owners == rank)
    holders = np.repeat(np.arange(len(new_sizes)), new_sizes)
    pairs = _num_pairs(owners, holders, len(sizes))
    return _as_plan(holders[mine], index[mine] - bounds[rank], owners[new[rank] : new[rank + 1]], pairs, pairs == 0)


def _num_pairs(owners: IntArray, holders: IntArray, num_ranks: int) -> int:
    """Return the number of pairs of an owner and another holder."""
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
    """Plan a reshape of dims ``(outer, sharded, inner)``, flat in C order; ``old``, ``new``: (outer, inner)."""
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


SharedDim: TypeAlias = tuple[int, tuple[int, ...]]  # a dim and the sizes of its parts
Place: TypeAlias = tuple[int | None, tuple[int, ...] | None]  # the same, or that a mesh axis replicates


def gather_full(local: Tensor, spec: ShardSpec) -> Tensor:
    """Return the whole tensor; backward keeps the own part of a replicated gradient. Collective."""
    for dim, axis in spec.sharded.items():
        local = all_gather_v(local, spec.sizes_of(axis), dim, spec.group(axis))
    return local


def change_layout(local: Tensor, old: ShardSpec, new: ShardSpec) -> Tensor:
    """Bring a part to another layout: one exchange of the overlapping pieces for each mesh axis that changes.

    Collective; the gradient takes the way back. An axis waits for its new dim until no other axis shards it; where
    axes wait for each other (two that swap their dims), one of them is gathered. From ``(Shard(0), Shard(1))`` to
    ``(Shard(1), Replicate())``: axis 0 waits for dim 1, so axis 1 is gathered first, then axis 0 moves to dim 1.
    """
    now = [*zip(old.dims, old.sizes, strict=True)]
    goal = [*zip(new.dims, new.sizes, strict=True)]
    while True:
        waiting = [axis for axis in range(len(goal)) if now[axis] != goal[axis]]
        if not waiting:
            return local
        taken = {axis: {dim for other, (dim, _) in enumerate(now) if other != axis} for axis in waiting}
        ready = [axis for axis in waiting if goal[axis][0] is None or goal[axis][0] not in taken[axis]]
        # cutting first and gathering last keeps the parts small
        ready.sort(key=lambda axis: (goal[axis][0] is None, now[axis][0] is not None))
        axis = ready[0] if ready else waiting[0]
        step = goal[axis] if ready else (None, None)
        local = _move_axis(local, now[axis], step, old.group(axis))
        now[axis] = step


def _move_axis(local: Tensor, old: Place, new: Place, group: Group) -> Tensor:
    """Change the dim or the sizes that one mesh axis shards."""
    (old_dim, old_sizes), (new_dim, new_sizes) = old, new
    if old_dim is None or old_sizes is None:
        return slice_to_shard(local, new_sizes or (), new_dim or 0, group)
    if new_dim is None or new_sizes is None:
        return all_gather_v(local, old_sizes, old_dim, group)
    if group_size(group) == 1:
        return local
    if old_dim == new_dim:
        rank = group_rank(group)
        key, make = (rank, facts_of(new_sizes)), lambda: plan_runs(old_sizes, rank, parts_as_runs(new_sizes))
        return fetch_runs(local, facts_of(old_sizes).plans.get_or_make(key, make), old_dim, group)
    back = lambda x, old, new, group: _exchanged(x, new, old, group)  # noqa: E731
    return linear(_exchanged, back, local, (old_dim, old_sizes), (new_dim, new_sizes), group)


def _exchanged(x: Tensor, old: SharedDim, new: SharedDim, group: Group) -> Tensor:
    """Split another dim: each rank cuts its part along ``new``, and joins the pieces that it gets along ``old``.

    Rows split as (2, 1) and then columns as (1, 2), on rank 0: its (2, 3) part is cut to (2, 1), which stays, and
    (2, 2), which goes to rank 1; with the (1, 1) of rank 1 its new part is (3, 1).
    """
    (old_dim, old_sizes), (new_dim, new_sizes) = old, new
    before, after = facts_of(old_sizes), facts_of(new_sizes)
    cut = with_dim(x.shape, new_dim, new_sizes[group_rank(group)])
    # ranks with parts of one size together: layouts that are as even as possible have two sizes
    pieces = [
        x.narrow(new_dim, int(after.bounds[first]), num * size)
        .reshape(*x.shape[:new_dim], num, size, *x.shape[new_dim + 1 :])
        .movedim(new_dim, 0)
        for first, num, size in after.runs
    ]
    row, new_row = math.prod(with_dim(x.shape, new_dim, 1)), math.prod(with_dim(cut, old_dim, 1))
    sent = nonzero_counts([size * row for size in new_sizes])
    held = nonzero_counts([size * new_row for size in old_sizes])
    pairs = sum(before.held) * sum(after.held)
    received = exchange_rows(torch.cat([piece.reshape(-1) for piece in pieces]), sent, held, group, pairs)
    blocks = torch.split(received, [num * size * new_row for _, num, size in before.runs])
    shaped = [
        block.view(num, *with_dim(cut, old_dim, size)).movedim(0, old_dim).flatten(old_dim, old_dim + 1)
        for block, (_, num, size) in zip(blocks, before.runs, strict=True)
    ]
    return torch.cat(shaped, old_dim)
