"""Functions that take parts: splitting, selecting and indexing along dims that are not sharded."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scidata.shard.ops.align import operands_of, refuse_out, specs_of
from scidata.shard.ops.registry import find, register_op, unsupported
from scidata.shard.ops.shapes import argument, derived, keep_dims, many, normal_dim, refuse_sharded
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor


@register_op(*find("chunk split tensor_split unsafe_chunk unsafe_split split_with_sizes", namespaces=(torch, Tensor)))
def split(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Cut along a dim that is not sharded."""
    x: ShardTensor = args[0]
    refuse_sharded(func, x._spec, normal_dim(argument(args, kwargs, 2, "dim", 0), x._spec.ndim))
    return tuple(keep_dims(x, part) for part in func(x._local, *args[1:], **kwargs))


@register_op(*find("narrow index_select", namespaces=(torch, Tensor)))
def narrow(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Keep some rows of a dim that is not sharded."""
    x = args[0]
    refuse_out(func, kwargs, *specs_of(args))
    if not isinstance(x, ShardTensor) or any(isinstance(a, ShardTensor) for a in (*args[1:], *kwargs.values())):
        raise unsupported(func, "the index is sharded", *specs_of((*args, *kwargs.values())))
    refuse_sharded(func, x._spec, normal_dim(argument(args, kwargs, 1, "dim", 0), x._spec.ndim))
    return keep_dims(x, func(x._local, *args[1:], **kwargs))


@register_op(*find("roll flip", namespaces=(torch, Tensor)), *find("fliplr flipud", namespaces=(torch, Tensor)))
def move_rows(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Roll or flip along dims that are not sharded."""
    x, spec = args[0], args[0]._spec
    name = func.__name__
    if name == "roll":
        dims = argument(args, kwargs, 2, "dims", ())
    elif name == "flip":
        dims = many(args, kwargs, "dims")
    else:
        dims = (1,) if name == "fliplr" else (0,)
    chosen = tuple(dims) if isinstance(dims, tuple | list) else (dims,)
    for d in chosen or (range(spec.ndim) if name == "roll" else ()):  # roll without dims flattens
        refuse_sharded(func, spec, normal_dim(d, spec.ndim))
    return keep_dims(x, func(x._local, *args[1:], **kwargs))


@register_op(*find("select unbind", namespaces=(torch, Tensor)))
def select(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take one row, or all rows one by one, of a dim that is not sharded."""
    x, spec = args[0], args[0]._spec
    dim = normal_dim(argument(args, kwargs, 1, "dim", 0), spec.ndim)
    refuse_sharded(func, spec, dim)
    shape = (*spec.global_shape[:dim], *spec.global_shape[dim + 1 :])
    new = spec.move_dims(shape, {d: d - (d > dim) for d in range(spec.ndim) if d != dim})
    result = func(x._local, *args[1:], **kwargs)
    if isinstance(result, Tensor):
        return derived(x, result, new)
    return tuple(derived(x, part, new) for part in result)


class _Index(NamedTuple):
    """An index as it applies to the local part, and where each old dim that is kept goes."""

    items: tuple[Any, ...]
    new_dim: dict[int, int]
    advanced: bool


def _local_index(func: Any, spec: ShardSpec, index: Any) -> _Index:
    """Check an index against the layout. Sharded dims must be taken whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(item is not None and item is not Ellipsis for item in items)
    if consumed > spec.ndim:
        raise IndexError(f"too many indices: {consumed} for a tensor of {spec.ndim} dims")
    places = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(places) > 1:
        raise IndexError("an index can only have a single Ellipsis ('...')")
    at = places[0] if places else len(items)
    items[at : at + 1] = [slice(None)] * (spec.ndim - consumed)
    old, new, advanced = 0, 0, 0
    new_dim: dict[int, int] = {}
    for item in items:
        if item is None:
            new += 1
            continue
        whole = isinstance(item, slice) and item.indices(spec.global_shape[old]) == (0, spec.global_shape[old], 1)
        if old in spec.sharded and not whole:
            raise unsupported(func, f"dim {old} is sharded and indexed with {item!r}", spec)
        if isinstance(item, slice):
            new_dim[old] = new
            new += 1
        elif isinstance(item, Tensor | list | bool):
            rows = torch.as_tensor(item)
            advanced += 1
            if rows.dtype == torch.bool or isinstance(item, ShardTensor) or rows.ndim == 0 or advanced > 1:
                raise unsupported(
                    func, "it takes a mask, a sharded index or several index tensors", spec, remedy="use torch.where"
                )
            new += rows.ndim
        elif not isinstance(item, int | np.integer):
            raise unsupported(func, f"the index {item!r} is not supported", spec)
        old += 1
    ints = any(isinstance(item, int | np.integer) for item in items)
    if advanced and (ints or any(item is None for item in items)):
        raise unsupported(func, "an index tensor beside integers or None", spec, remedy="index in two steps")
    whole_items = [slice(None) if isinstance(item, slice) and item == slice(0, None, None) else item for item in items]
    return _Index(tuple(whole_items), new_dim, bool(advanced))


def _localise(spec: ShardSpec, index: _Index) -> tuple[Any, ...]:
    """Take sharded dims whole: their slices are written for the global extent."""
    old, items = 0, []
    for item in index.items:
        items.append(slice(None) if item is not None and old in spec.sharded else item)
        old += item is not None
    return tuple(items)


@register_op(Tensor.__getitem__)
def getitem(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Index dims that are not sharded: integers, slices, None, Ellipsis, one integer tensor."""
    x, index = args
    if not isinstance(x, ShardTensor):
        raise unsupported(func, "the index is sharded", *specs_of(operands_of(args, kwargs)[0]))
    spec = x._spec
    checked = _local_index(func, spec, index)
    part = x._local[_localise(spec, checked)]
    shape = list(part.shape)
    for d in spec.sharded:
        shape[checked.new_dim[d]] = spec.global_shape[d]
    return derived(x, part, spec.move_dims(shape, checked.new_dim))


@register_op(Tensor.__setitem__)
def setitem(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write to rows of dims that are not sharded."""
    x, index, value = args
    if not isinstance(x, ShardTensor):
        raise unsupported(func, "a plain tensor cannot take sharded values", *specs_of(operands_of(args, kwargs)[0]))
    part = getitem(Tensor.__getitem__, types, (x, index), {})
    if _local_index(func, x._spec, index).advanced:
        raise unsupported(func, "it writes through an index tensor", x._spec, remedy="use slices, or torch.where")
    part.copy_(value) if isinstance(value, Tensor) else part.fill_(value)
