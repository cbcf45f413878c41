"""Parts from one layout to another, by gathers, cuts and exchanges of the rows that overlap. Knows no ShardTensor."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v, nonzero_counts, slice_to_shard
from scidata.shard.comm.functions import linear
from scidata.shard.comm.transport import Group, exchange_rows, group_rank, group_size, with_dim
from scidata.shard.rows.runs import fetch_runs, parts_as_runs, plan_runs
from scidata.shard.sizes import facts_of
from scidata.shard.spec import ShardSpec

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
