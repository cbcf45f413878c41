"""The differentiable sum over ranks, and its transpose."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from scidata.errors import ConfigError
from scidata.shard.comm.transport import (
    Group,
    call,
    group_size,
    reduce,
)


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce(x, dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_ReplicateToShards, grad, ctx.group), None


class _ReplicateToShards(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_AllReduceSum, grad, ctx.group), None


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Sum each rank's ``x``: a partial value becomes a replicated one. Backward: the identity. Collective.

    16-bit floats are added in float32.

    Raises
    ------
    ConfigError
        ``x`` is bool.
    """
    if x.dtype == torch.bool:
        raise ConfigError("a sum of bools over ranks is ambiguous; convert to an integer dtype first")
    if group_size(group) == 1:
        return x
    return call(_AllReduceSum, x, group)
