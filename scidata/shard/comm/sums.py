"""Sums over ranks; the gradient of a replicated value: the sum of the gradients from all shards that it meets.

One value's gradient is summed at each use, those of parameters that are used together in one collective. Where the
gradients of a model are averaged over all ranks of its mesh afterwards, that mean can do it too, and the sum is put
off: each rank multiplies its share by the number of shards, so that the mean over the domain is their sum; a value that
met no shard, the same on each rank, is its own mean.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from scidata.errors import ConfigError
from scidata.shard.comm.functions import call, linear, linear_together
from scidata.shard.comm.transport import Group, group_size, reduce
from scidata.shard.torch_internals import is_accumulated


def _sum(x: Tensor, group: Group) -> Tensor:
    return reduce(x, dist.ReduceOp.SUM, group)


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Sum each rank's ``x``: a partial value becomes a replicated one. Backward: the identity. Collective.

    16-bit floats are added in float32.
    """
    if x.dtype == torch.bool:
        raise ConfigError("a sum of bools over ranks is ambiguous; convert to an integer dtype first")
    if group_size(group) == 1:
        return x
    return linear(_sum, _same, x, group)


def replicate_to_shards(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """Say that a replicated value meets shards: forward the identity, backward a sum over each group.

    So the ``.grad`` of a plain parameter is the full gradient on each rank. Collective in backward,
    except for parameters of a parallelized model, whose sums are those of ``parallelize``.
    """
    if is_deferred(x):
        return replicate_deferred(x, groups)
    for group in groups:
        if group_size(group) > 1 and (x.is_floating_point() or x.is_complex()):
            x = linear(_same, _sum, x, group)
    return x


# -- several at once -----------------------------------------------------------------------------------------------


def _sum_all(groups: Sequence[Group], *parts: Tensor) -> tuple[Tensor, ...]:
    sums = list(parts)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        chosen = [i for i, part in enumerate(parts) if part.dtype == dtype]
        flat = torch.cat([parts[i].detach().reshape(-1) for i in chosen])
        for group in groups:
            flat = _sum(flat, group)
        for i, each in zip(chosen, torch.split(flat, [parts[i].numel() for i in chosen]), strict=True):
            sums[i] = each.view(parts[i].shape)
    return tuple(sums)


def _same_all(*values: Tensor) -> tuple[Tensor, ...]:
    return tuple(value.view_as(value) for value in values)


def replicate_all(values: Sequence[Tensor], groups: Sequence[Group]) -> list[Tensor]:
    """Say that replicated values meet shards: their gradients are summed over the groups together, in one collective
    for each group and dtype, once all are there.
    """
    return list(linear_together(_same_all, partial(_sum_all, groups), values))


def replicate_parameters(values: Sequence[Tensor], groups: Sequence[Group]) -> list[Tensor]:
    """Do as :func:`replicate_all`, without the values that a parallelized model sums by itself."""
    if len(values) == 1 or any(map(is_deferred, values)):
        return [replicate_to_shards(value, groups) for value in values]
    shared = [group for group in groups if group_size(group) > 1]
    return replicate_all(values, shared) if shared else list(values)


# -- put off -------------------------------------------------------------------------------------------------------

# by id, as a tensor's own equality is elementwise: the leaf, and the names of the groups whose sum is put off
_DEFERRED: dict[int, tuple[weakref.ref[Tensor], frozenset[str]]] = {}


def defer(parameter: Tensor, groups: Iterable[dist.ProcessGroup | str]) -> None:
    """Leave the sums over these groups to the mean over the mesh, for all later uses of this leaf.

    The ``to_local()`` of a leaf that is a DTensor can be given, too.
    """
    key = id(parameter)

    def forget(ref: weakref.ref[Tensor]) -> None:
        if key in _DEFERRED and _DEFERRED[key][0] is ref:
            del _DEFERRED[key]

    names = frozenset(group if isinstance(group, str) else group.group_name for group in groups)
    _DEFERRED[key] = weakref.ref(parameter, forget), names


def deferred_groups(x: Tensor) -> frozenset[str] | None:
    """Return the names of the groups that :func:`defer` was called with for this very tensor, or None."""
    found = _DEFERRED.get(id(x))
    return found[1] if found is not None and found[0]() is x else None


def is_deferred(x: Tensor) -> bool:
    """Whether :func:`defer` was called for this very tensor."""
    return deferred_groups(x) is not None


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
    names = deferred_groups(x) or ()
    later = [group for group in groups if group is not None and group.group_name in names]
    x = call(_ReplicateDeferred, x, tuple(later)) if later else x.view_as(x)
    now = [group for group in groups if group not in later]
    return replicate_to_shards(x, now) if now else x
