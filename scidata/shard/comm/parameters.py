"""Parameters that are used together: their gradients are summed over ranks in one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from scidata.shard.comm.collectives import replicate_to_shards
from scidata.shard.comm.deferred import is_deferred
from scidata.shard.comm.transport import Group, group_size, reduce


class _SumAll(Function):
    @staticmethod
    def forward(ctx: Any, groups: Sequence[Group], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.groups = groups
        sums = list(parts)
        for dtype in dict.fromkeys(part.dtype for part in parts):
            chosen = [i for i, part in enumerate(parts) if part.dtype == dtype]
            flat = torch.cat([parts[i].detach().reshape(-1) for i in chosen])
            for group in groups:
                flat = reduce(flat, dist.ReduceOp.SUM, group)
            for i, each in zip(chosen, torch.split(flat, [parts[i].numel() for i in chosen]), strict=True):
                sums[i] = each.view(parts[i].shape)
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_ReplicateAll.apply(ctx.groups, *grads)  # type: ignore[no-untyped-call, unused-ignore]


class _ReplicateAll(Function):
    @staticmethod
    def forward(ctx: Any, groups: Sequence[Group], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.groups = groups
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *_SumAll.apply(ctx.groups, *grads)  # type: ignore[no-untyped-call, unused-ignore]


def replicate_all(values: Sequence[Tensor], groups: Sequence[Group]) -> list[Tensor]:
    """Say that replicated values meet shards: their gradients are summed over the groups together, in one collective
    for each group and dtype, once all are there.
    """
    return list(_ReplicateAll.apply(groups, *values))  # type: ignore[no-untyped-call, unused-ignore]


def replicate_parameters(values: Sequence[Tensor], groups: Sequence[Group]) -> list[Tensor]:
    """Do as :func:`replicate_all`, but leave out what a parallelized model sums by itself."""
    shared = [group for group in groups if group_size(group) > 1]
    if len(values) == 1 or not shared or any(is_deferred(value) for value in values):
        return [replicate_to_shards(value, groups) for value in values]
    return replicate_all(values, shared)
