"""Gradients of parameters, whose sum over the domain is left to whoever averages them over dp.

A parameter that meets shards has its gradient summed over the domain at each use, one collective a use. Where the
gradients of a model are averaged over all ranks of its mesh afterwards, that mean can do both: each rank multiplies
its share by the number of shards, so that the mean over the domain is their sum, and what met no shard, the same on
each rank, is its own mean.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.comm.transport import Group, call, group_size
from scidata.shard.torch_internals import is_accumulated

_DEFERRED: dict[int, weakref.ref[Tensor]] = {}  # by id: a tensor's own equality is elementwise


def defer(parameter: Tensor) -> None:
    """Leave the sum over the domain to the mean over the mesh, for all later uses of this leaf."""
    if not is_deferred(parameter):
        key = id(parameter)
        _DEFERRED[key] = weakref.ref(parameter, lambda ref: _DEFERRED.pop(key) if _DEFERRED.get(key) is ref else None)


def is_deferred(x: Tensor) -> bool:
    """Whether :func:`defer` was called for this very tensor."""
    ref = _DEFERRED.get(id(x))
    return ref is not None and ref() is x


class _ReplicateDeferred(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: tuple[Group, ...]) -> Tensor:
        ctx.groups = groups
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if is_accumulated(ctx):
            return grad * math.prod(group_size(group) for group in ctx.groups), None
        # the gradient goes to autograd.grad: nobody averages it
        for group in ctx.groups:
            grad = all_reduce_sum(grad, group)
        return grad, None


def replicate_deferred(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """Do as ``replicate_to_shards`` for a deferred leaf: without communication where its ``.grad`` is averaged."""
    return call(_ReplicateDeferred, x, tuple(groups))
