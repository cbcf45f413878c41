"""Scatters to rows that every rank holds (one for each graph of a batch): partial results reduced over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from scidata.shard._transport import call
from scidata.shard.collectives import all_reduce_max, all_reduce_min, all_reduce_sum

__all__ = ["extreme_over_ranks"]


class _ScatterExtreme(Function):
    """Extreme values that are known already; the gradient goes to all values that equal them, in equal shares."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, result: Tensor, ids: Tensor, share: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(ids, share)
        ctx.dim = dim
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ids, share = ctx.saved_tensors
        return grad.gather(ctx.dim, ids) * share, None, None, None, None


def extreme_over_ranks(
    rows: Tensor, dim: int, ids: Tensor, values: Tensor, reduce: str, group: dist.ProcessGroup
) -> Tensor:
    """Largest or smallest value for each row; rows that no rank has a value for keep theirs. Collective.

    ``rows`` is replicated and must not require grad; ``ids`` and ``values`` have one shape.
    """
    largest = reduce == "amax"
    limits = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
    neutral = (limits.min if largest else limits.max) if not values.is_floating_point() else None
    worst = (float("-inf") if largest else float("inf")) if neutral is None else neutral
    known, ones = values.detach(), torch.ones_like(values)
    best = torch.full_like(rows, worst).scatter_reduce_(dim, ids, known, reduce, include_self=False)
    best = all_reduce_max(best, group) if largest else all_reduce_min(best, group)
    counts = all_reduce_sum(torch.zeros_like(rows).scatter_add_(dim, ids, ones), group)
    result = torch.where(counts > 0, best, rows)
    if not values.requires_grad or not torch.is_grad_enabled():
        return result
    hits = (known == result.gather(dim, ids)).to(values.dtype)
    ties = all_reduce_sum(torch.zeros_like(rows).scatter_add_(dim, ids, hits), group)
    return call(_ScatterExtreme, values, result, ids, hits / ties.gather(dim, ids), dim)
