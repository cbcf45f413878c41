"""Parts from one layout to another: gathers, cuts and exchanges of what overlaps. Knows no ShardTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v, slice_to_shard
from scidata.shard.comm.functions import linear
from scidata.shard.comm.transport import Group, exchange, group_rank, group_size, with_dim
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
    axes wait for each other (two that swap their dims), one of them is gathered.
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
    """Change what one mesh axis shards."""
    (old_dim, old_sizes), (new_dim, new_sizes) = old, new
    if old_dim is None or old_sizes is None:
        return slice_to_shard(local, new_sizes or (), new_dim or 0, group)
    if new_dim is None or new_sizes is None:
        return all_gather_v(local, old_sizes, old_dim, group)
    if group_size(group) == 1:
        return local
    return linear(_resharded, _resharded_back, local, (old_dim, old_sizes), (new_dim, new_sizes), group)


def _resharded(x: Tensor, old: SharedDim, new: SharedDim, group: Group) -> Tensor:
    """Each rank sends each other one what of its part that one is to hold."""
    (old_dim, old_sizes), (new_dim, new_sizes) = old, new
    rank, ranks = group_rank(group), range(len(old_sizes))
    if old_dim == new_dim:
        sent, got = _overlaps(old_sizes, new_sizes, rank), _overlaps(new_sizes, old_sizes, rank)
        parts = [x.narrow(old_dim, start, count) for start, count in sent]
        shapes = [with_dim(x.shape, old_dim, count) for _, count in got]
    else:
        parts = list(torch.split(x, list(new_sizes), new_dim))
        cut = with_dim(x.shape, new_dim, new_sizes[rank])
        shapes = [with_dim(cut, old_dim, old_sizes[p]) for p in ranks]
    return torch.cat(exchange(parts, shapes, group), old_dim)


def _resharded_back(x: Tensor, old: SharedDim, new: SharedDim, group: Group) -> Tensor:
    return _resharded(x, new, old, group)


def _overlaps(mine: Sequence[int], theirs: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Return (first row in my part, number of rows) of what each rank's part shares with mine."""
    low, result, start = sum(mine[:rank]), [], 0
    high = low + mine[rank]
    for size in theirs:
        first, last = max(low, start), min(high, start + size)
        result.append((first - low, last - first) if last > first else (0, 0))
        start += size
    return result
