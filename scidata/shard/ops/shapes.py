"""Functions that only rearrange dims: permutations, dims of extent 1, expansion.

All follow one idea: find the new place and sizes of each sharded dim, then do the same to the local part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.core.types import IntArray
from scidata.shard.op_table import REFUSES, TensorFunction, TorchFunction, find, getters, register_op, unsupported
from scidata.shard.ops.align import Dims, align, finish, specs_of
from scidata.shard.ops.arguments import handles, integers, normal_dim
from scidata.shard.ops.moving import as_sharded
from scidata.shard.rows.redistribute import RowPlan, move_rows, plan_rows
from scidata.shard.spec import UNKNOWN, ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import Copy, Whole, become


def derived(x: ShardTensor, local: Tensor, spec: ShardSpec) -> Tensor:
    """Wrap a part that shares memory with ``x``."""
    if x.copied is not None:  # also where it is replicated: writes to it have to reach the original
        return ShardTensor(local, spec, copied=x.copied)
    return finish(local, spec)


def keep_dims(x: ShardTensor, part: Tensor) -> Tensor:
    """Wrap a part that differs from ``x`` along unsharded dims only, with the same number of dims."""
    shape = list(part.shape)
    for d in x.spec.sharded:
        shape[d] = x.spec.global_shape[d]
    return derived(x, part, x.spec.derive(shape, x.spec.dims, x.spec.sizes))


# -- permutations ------------------------------------------------------------------------------------------------


def _permute(x: ShardTensor, order: Sequence[int]) -> Tensor:
    spec = x.spec

    def make() -> ShardSpec:
        return spec.move_dims([spec.global_shape[d] for d in order], {d: i for i, d in enumerate(order)})

    return derived(x, x.local.permute(*order), spec.plans.get_or_make(("permute", *order), make))


@handles(*find("permute"), any_order=True)
def permute(x: ShardTensor, *order: int | Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Reorder all dims."""
    new = [normal_dim(d, x.spec.ndim) for d in integers(*order, *dims)]
    if sorted(new) != list(range(x.spec.ndim)):
        raise RuntimeError(f"permute: {new} is not an order of {x.spec.ndim} dims")
    return _permute(x, new)


@handles("transpose swapaxes swapdims", any_order=True)
def transpose(x: ShardTensor, dim0: int, dim1: int) -> Tensor:
    """Swap two dims."""
    order = list(range(x.spec.ndim))
    a, b = normal_dim(dim0, len(order)), normal_dim(dim1, len(order))
    order[a], order[b] = b, a
    return _permute(x, order)


@handles(torch.t, Tensor.t, *getters("T mT"), torch.adjoint, Tensor.adjoint, any_order=True)
def transpose_matrix(func: TensorFunction, x: ShardTensor) -> Tensor:
    """Swap the last two dims."""
    ndim = x.spec.ndim
    if func in (torch.adjoint, Tensor.adjoint) and x.local.is_complex():
        raise unsupported(func, "complex tensors are not supported here", x.spec, remedy="use transpose(-2, -1).conj()")
    if ndim != 2 and ndim != 1 and func in (torch.t, Tensor.t, *getters("T")):
        raise unsupported(func, f"it wants 2 dims, not {ndim}", x.spec, remedy="use transpose() or permute()")
    return _permute(x, [*range(ndim - 2), ndim - 1, ndim - 2] if ndim > 1 else [0])


@handles("movedim moveaxis", any_order=True)
def movedim(x: ShardTensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Move dims to other places, the rest keep their order."""
    ndim = x.spec.ndim
    take, put = ([normal_dim(d, ndim) for d in integers(given)] for given in (source, destination))
    if len(take) != len(put) or len(set(take)) != len(take) or len(set(put)) != len(put):
        raise RuntimeError(f"movedim: cannot move dims {take} to {put}")
    rest = iter(d for d in range(ndim) if d not in take)
    return _permute(x, [take[put.index(i)] if i in put else next(rest) for i in range(ndim)])


@handles("squeeze", any_order=True)
def squeeze(x: ShardTensor, dim: Dims = None) -> Tensor:
    """Drop dims of global extent 1."""
    shape = x.spec.global_shape
    asked = range(len(shape)) if dim is None else integers(dim)
    dropped = {d for d in (normal_dim(d, len(shape)) for d in asked) if shape[d] == 1}
    if any(d in x.spec.sharded for d in dropped):  # one rank has it: all get a copy
        return x[tuple(0 if d in dropped else slice(None) for d in range(len(shape)))]
    part = x.local.squeeze(tuple(dropped)) if dropped else x.local.view_as(x.local)
    return derived(x, part, x.spec.without(dropped))


@handles("unsqueeze", any_order=True)
def unsqueeze(x: ShardTensor, dim: int) -> Tensor:
    """Add a dim of extent 1."""
    shape = x.spec.global_shape
    dim = normal_dim(dim, len(shape) + 1)
    new_dim = {d: d + (d >= dim) for d in range(len(shape))}
    return derived(x, x.local.unsqueeze(dim), x.spec.move_dims((*shape[:dim], 1, *shape[dim:]), new_dim))


def _expand(x: ShardTensor, shape: Sequence[int], like: ShardSpec | None = None) -> Tensor:
    """Expand; a sharded dim of extent 1 is split as in ``like``, else evenly."""
    spec = x.spec
    added = len(shape) - spec.ndim
    if added < 0:
        raise RuntimeError(f"expand: {list(shape)} has fewer dims than the tensor's {spec.ndim}")
    old = (*[1] * added, *spec.global_shape)
    new = [n if s == -1 else s for s, n in zip(shape, old, strict=True)]
    sizes = list(spec.sizes)
    plans: list[tuple[int, int, RowPlan]] = []
    for d, axis in spec.sharded.items():
        if new[d + added] != spec.global_shape[d]:
            if spec.global_shape[d] != 1:
                raise RuntimeError(f"expand: dim {d} of extent {spec.global_shape[d]} cannot become {new[d + added]}")
            same = like is not None and like.dims[axis] == d + added
            parts = like.sizes_of(axis) if same and like else even_sizes(new[d + added], spec.axes[axis].size)
            sizes[axis] = parts
            plans.append((d, axis, plan_rows(spec, d, _repeated, (parts,), partial(tuple, parts))[0]))
    result = spec.derive(new, [None if d is None else d + added for d in spec.dims], sizes)

    def take() -> Tensor:
        local = x.local
        for d, axis, plan in plans:
            local = move_rows(local, plan, d, spec.group(axis))
        return local

    if not plans:
        found = derived(x, x.local.expand(result.local_shape), result)
        is_expanded = x.global_strides is UNKNOWN and old != (*new,)
        if is_expanded and isinstance(found, ShardTensor) and not isinstance(found.copied, Copy):
            found.copied = Whole(-1)  # torch refuses writes to any of it where a rank has elements
        return found
    local = take()
    return finish(local.expand(result.local_shape), result, copied=Copy(x, local, take))


def _repeated(extent: int, sizes: tuple[int, ...]) -> IntArray:
    return np.zeros(sum(sizes), dtype=np.int64)


@handles("expand broadcast_to", any_order=True)
def expand(
    x: ShardTensor,
    *sizes: int | Sequence[int],
    size: Sequence[int] = (),
    shape: Sequence[int] = (),
    implicit: bool = False,
) -> Tensor:
    """Repeat dims of extent 1: without a copy, except a sharded one."""
    return _expand(x, integers(*sizes, *size, *shape))


@handles(Tensor.expand_as, any_order=True)
def expand_as(func: TensorFunction, x: Tensor, other: Tensor) -> Tensor:
    """Expand to another tensor's global shape; a plain tensor expands to the shards of the other."""
    if isinstance(x, ShardTensor):
        return _expand(x, tuple(other.shape), other.spec if isinstance(other, ShardTensor) else None)
    assert isinstance(other, ShardTensor)
    ndim = other.spec.ndim
    (part, _), _, _ = align(func, [x, other], [range(ndim - n, ndim) for n in (x.ndim, ndim)])
    return finish(part.expand(other.spec.local_shape), other.spec)


# -- in place ----------------------------------------------------------------------------------------------------


@handles(
    *find("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_", namespaces=(Tensor,)),
    keeps_replicated=True,
    any_order=True,
)
def change_shape(func: TensorFunction, x: ShardTensor, *args: object, **kwargs: object) -> Tensor:
    """Turn the tensor into its own view; earlier copies of it are refused if they are written to later."""
    if type(x) is not ShardTensor or x.spec.exchange is not None:
        raise unsupported(func, "ids of a graph keep their shape", x.spec, remedy="assign the result")
    if x.local.is_leaf and x.local.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{func.__name__}: a leaf that requires grad is changed in place")
    result: Tensor = getattr(x, func.__name__.rstrip("_"))(*args, **kwargs)
    new = as_sharded(result, x.spec)
    if new is not x and new.copied is not x.copied:
        raise unsupported(func, "the rows would change ranks", x.spec, remedy="assign the result")
    if new is not x and x.local.requires_grad and not torch.is_grad_enabled():
        if not x.local.is_leaf:
            raise unsupported(func, "its graph would be lost", x.spec, remedy="do that outside of torch.no_grad()")
        new.local = new.local.detach().requires_grad_()
    if new is not x:
        become(x, new.like(new.local, new.spec, new.copied, new.global_strides))
    return x


@register_op(*find("as_strided_ resize_ resize_as_", namespaces=(Tensor,)), keeps_replicated=True, any_order=True)
def change_size(func: TorchFunction, types: object, args: Sequence[object], kwargs: Mapping[str, object]) -> NoReturn:
    """Raise: a layout's size is fixed, also if it is replicated."""
    remedy = "make a new tensor"
    raise unsupported(func, "the size of a ShardTensor does not change in place", *specs_of(args), remedy=remedy)


REFUSES.add(change_size)
