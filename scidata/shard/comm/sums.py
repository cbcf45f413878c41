"""Sums over ranks; the gradient of a replicated value: the sum of the gradients from all shards that it meets.

One value's gradient is summed at each use, those of parameters that are used together in one collective. Where the
gradients of a model are averaged over all ranks of its mesh afterwards, that mean can do it too, and the sum is put
off: each rank multiplies its share by the number of shards, so that the mean over the domain is their sum; a value that
met no shard, the same on each rank, is its own mean. Gradients of what is computed from such parameters alone (a slice,
a complex view) take the same way: what brings them to the parameters is linear, and alike on all ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from scidata.errors import ConfigError
from scidata.shard.comm.functions import call, linear, linear_together
from scidata.shard.comm.operators import is_capturing
from scidata.shard.comm.transport import Group, group_size, reduce
from scidata.shard.torch_internals import is_accumulated, is_looked_at


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
    """Let a replicated value meet shards: identity forward, sum over each group backward.

    So the ``.grad`` of a plain parameter is the full gradient on each rank. Collective in backward,
    except for parameters of a parallelized model, whose sums are those of ``parallelize``.
    """
    put_off = deferral(x)
    if put_off is not None:
        return replicate_deferred(x, groups, put_off)
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


def replicate_all(values: Sequence[Tensor], groups: Sequence[Group]) -> list[Tensor]:
    """Let replicated values meet shards: their gradients are summed over the groups, in one collective per group and
    dtype, once all have arrived.
    """
    same = lambda *values: tuple(value.view_as(value) for value in values)  # noqa: E731
    return list(linear_together(same, partial(_sum_all, groups), values))


def replicate_parameters(values: Sequence[Tensor], groups: Sequence[Group]) -> list[Tensor]:
    """Like :func:`replicate_all`, without the values that a parallelized model sums by itself."""
    if len(values) == 1 or any(deferral(value) is not None for value in values):
        return [replicate_to_shards(value, groups) for value in values]
    shared = [group for group in groups if group_size(group) > 1]
    return replicate_all(values, shared) if shared else list(values)


# -- put off -------------------------------------------------------------------------------------------------------

# by id, as a tensor's own equality is elementwise: the leaf, and the names of the groups whose sum is put off
_DEFERRED: dict[int, tuple[weakref.ref[Tensor], frozenset[str]]] = {}
_NODES: dict[Node, frozenset[str]] = {}  # of non-leaves: parameters of a step that is being captured
_num = [0]  # of calls of `defer`
_MOST_NODES = 64  # of a graph between a value and its parameters: those of more are summed at once


def defer(parameter: Tensor, groups: Iterable[dist.ProcessGroup | str]) -> None:
    """Leave the sums over these groups to the mean over the mesh, for all later uses of this leaf.

    The ``to_local()`` of a leaf that is a DTensor can be given, too.
    """
    _num[0] += 1
    key, node = id(parameter), parameter.grad_fn

    def forget(ref: weakref.ref[Tensor]) -> None:
        if key in _DEFERRED and _DEFERRED[key][0] is ref:
            del _DEFERRED[key]
            if node is not None:
                _NODES.pop(node, None)

    names = frozenset(group if isinstance(group, str) else group.group_name for group in groups)
    _DEFERRED[key] = weakref.ref(parameter, forget), names
    if node is not None:
        _NODES[node] = names


def num_deferred() -> int:
    """Return how often :func:`defer` was called: if unchanged, earlier answers still hold."""
    return _num[0]


def deferred_groups(x: Tensor) -> frozenset[str] | None:
    """Return the names of the groups that :func:`defer` was called with for this very tensor, or None."""
    found = _DEFERRED.get(id(x))
    return found[1] if found is not None and found[0]() is x else None


class Deferral(NamedTuple):
    """Groups over which the sum of a value's gradient is deferred, by name, and a leaf whose gradient is averaged
    instead.
    """

    groups: frozenset[str]
    leaf: Node | None  # None: the value itself


def deferral(x: Tensor) -> Deferral | None:
    """Return the deferral of a value's gradient sum: of a deferred leaf, or of a value made of such leaves only.

    None if it is not: where nothing was deferred, or the value's own gradient will be looked at.
    """
    if not _DEFERRED:
        return None
    groups = deferred_groups(x)
    if groups is not None:
        return Deferral(groups, None)
    node = None if x.is_leaf or is_looked_at(x) else x.grad_fn
    return None if node is None else _made_of_leaves(node)


def _made_of_leaves(node: Node) -> Deferral | None:
    """Walk to the leaves; None if one is not deferred, or at a custom function, which may have met other ranks."""
    found: Deferral | None = None
    ahead, seen = [node], {node}
    for node in ahead:
        if isinstance(node, BackwardCFunction) or len(seen) > _MOST_NODES:
            return None
        leaf: Tensor | None = getattr(node, "variable", None)
        groups = _NODES.get(node) if leaf is None else deferred_groups(leaf)
        if groups is None and (leaf is not None or not node.next_functions):
            return None
        if groups is not None:
            found = Deferral(groups if found is None else groups & found.groups, node)
            continue
        behind = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= behind
        ahead += behind
    return found


class _ReplicateDeferred(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: tuple[Group, ...], leaf: Node | None) -> Tensor:
        ctx.groups, ctx.leaf = groups, leaf
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if is_capturing() or is_accumulated(ctx.leaf or ctx):
            return grad * math.prod(group_size(group) for group in ctx.groups), None, None
        # the gradient goes to autograd.grad and is not averaged
        for group in ctx.groups:
            grad = all_reduce_sum(grad, group)
        return grad, None, None


def replicate_deferred(x: Tensor, groups: Sequence[Group], put_off: Deferral) -> Tensor:
    """Like ``replicate_to_shards`` with deferred sums: without communication if a ``.grad`` is averaged."""
    later = [group for group in groups if group is not None and group.group_name in put_off.groups]
    x = call(_ReplicateDeferred, x, tuple(later), put_off.leaf) if later else x.view_as(x)
    now = [group for group in groups if group not in later]
    return replicate_to_shards(x, now) if now else x
