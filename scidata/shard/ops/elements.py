"""Gathers and scatters by index along any dim, where index and values lie beside the tensor or on every rank.

Along a sharded dim, a gather fetches the whole dim, and a scatter its whole index and values: right for any index, at
the cost of their memory. Ids of a graph know better ways: see ``edges`` and ``scatter``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.graphs.routed import RoutedIndex
from scidata.shard.graphs.targets import accepts_filled
from scidata.shard.op_table import find, register_op, unsupported
from scidata.shard.ops.align import (
    align,
    bind,
    finish,
    is_sharded,
    local_of,
    refuse_out,
    refuse_without_dims,
    spec_of_layout,
    specs_of,
    whole_along,
    write_to_plain,
)
from scidata.shard.ops.arguments import argument, normal_dim
from scidata.shard.ops.edges import gather_by_ids
from scidata.shard.rows.edge_order import refuse_disorder
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import refuse_write_to_copy, written

_BOTH = (torch, Tensor)


def _labels(operands: Sequence[Tensor], dim: int) -> list[list[Hashable]]:
    """Name dims alike where any operand is sharded, and ``dim`` of the first operand apart from the others'."""
    shared = {d for spec in specs_of(operands) for d in spec.sharded}
    return [
        [("rows" if i else "target") if d == dim else d if d in shared else (i, d) for d in range(len(x.shape))]
        for i, x in enumerate(operands)
    ]


def _check_sharded_extents(func: Any, operands: Sequence[Tensor], dim: int) -> None:
    specs = specs_of(operands)
    for d in {d for spec in specs for d in spec.sharded} - {dim}:
        if len({x.shape[d] for x in operands if len(x.shape)}) > 1:
            shapes = [tuple(x.shape) for x in operands]
            raise unsupported(func, f"shapes {shapes} differ along the sharded dim {d}", *specs)


# -- gathers -------------------------------------------------------------------------------------------------------


@accepts_filled
@register_op(*find("gather", namespaces=_BOTH), any_order=True)
def gather(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pick one element of a row for each entry of the index."""
    x, index = argument(args, kwargs, 0, "input"), argument(args, kwargs, 2, "index")
    refuse_out(func, kwargs, *specs_of([x, index]))
    refuse_without_dims(func, x, index)
    dim = normal_dim(argument(args, kwargs, 1, "dim"), len(x.shape))
    if isinstance(index, RoutedIndex):
        return gather_by_ids(func, x, dim, index)
    return _gather(func, x, dim, index)


def _gather(func: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
    if is_sharded(x) and dim in x.spec.sharded:
        spec: ShardSpec = x.spec
        refuse_disorder(func, spec)
        axis, extent = spec.sharded[dim], index.shape[dim]
        if not isinstance(index, ShardTensor):
            sizes = spec.sizes_of(axis) if extent == x.shape[dim] else even_sizes(extent, spec.axes[axis].size)
            dims = [dim if a == axis else None for a in range(len(spec.axes))]
            new = spec.derive(tuple(index.shape), dims, [sizes] * len(dims))
            index = ShardTensor(index.narrow(dim, new.offsets[dim], new.local_shape[dim]), new)
        x = whole_along(x, dim)
    operands = [x, index]
    _check_sharded_extents(func, operands, dim)
    labels = _labels(operands, dim)
    (source, ids), layout, _ = align(func, operands, labels)
    return finish(source.gather(dim, ids), spec_of_layout(layout, labels[1], tuple(index.shape), specs_of(operands)[0]))


@register_op(*find("take_along_dim", namespaces=_BOTH), any_order=True)
def take_along_dim(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``gather`` with broadcasting of the other dims."""
    x, index = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "indices")
    refuse_out(func, kwargs, *specs_of([x, index]))
    dim = argument(args, kwargs, 2, "dim")
    if dim is None or len(x.shape) != len(index.shape):
        raise unsupported(func, "it needs a dim, and as many dims in both", *specs_of([x, index]))
    dim = normal_dim(dim, len(x.shape))
    index = index.remainder(max(x.shape[dim], 1))  # as torch takes any number here, and does not say so
    others = [torch.Size([*t.shape[:dim], *t.shape[dim + 1 :]]) for t in (x, index)]
    common = torch.broadcast_shapes(*others)  # type: ignore[no-untyped-call]
    x, index = (t.expand(*common[:dim], t.shape[dim], *common[dim:]) for t in (x, index))
    return _gather(func, x, dim, index)


# -- scatters ------------------------------------------------------------------------------------------------------


def _scatter(
    func: Any, target: ShardTensor, dim: int, index: Tensor, src: Tensor | None, rest: Sequence[Any], named: Any
) -> Tensor:
    """Do any function ``(target, dim, index, values, ...)``; rows of other ranks are written to one row more."""
    in_place = func.__name__.endswith("_")
    if in_place:
        refuse_write_to_copy(func, target)
    function = getattr(torch, func.__name__.rstrip("_"))
    dim = normal_dim(dim, target.spec.ndim)
    one_dim = "index" in func.__name__
    beside = [index] if src is None else [index, src]
    if dim in target.spec.sharded or len({x.spec.order if is_sharded(x) else None for x in beside}) > 1:
        refuse_disorder(func, *specs_of([target, *beside]))
    given = [target, whole_along(index, 0 if one_dim else dim), *([] if src is None else [whole_along(src, dim)])]
    operands = [given[0], *given[2:]] if one_dim else given
    _check_sharded_extents(func, operands, dim)
    labels = _labels(operands, dim)
    locals_, layout, _ = align(func, operands, labels)
    if one_dim:
        locals_.insert(1, local_of(given[1]))
    part, ids, *values = locals_
    spec = spec_of_layout(layout, labels[0], target.spec.global_shape, target.spec)
    extent, size = spec.global_shape[dim], part.shape[dim]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < extent:
        raise IndexError(f"{func.__name__}: an index is out of bounds for dim {dim} with size {extent}")
    if dim in spec.sharded:
        ids = ids - spec.offsets[dim]
        mine = (ids >= 0) & (ids < size)
        ids = torch.where(mine, ids, size)
        if "reduce" in func.__name__ and values:  # others' NaN would have gradients here
            away = ~mine.view([-1 if d == dim else 1 for d in range(part.ndim)]) if one_dim else ~mine
            values = [values[0].masked_fill(away, 1)]
        spare = part.narrow(dim, 0, 0).new_ones([1 if d == dim else n for d, n in enumerate(part.shape)])
        result = function(torch.cat([part, spare], dim), dim, ids, *values, *rest, **named).narrow(dim, 0, size)
    else:
        # autograd may keep what it reads, so that must not be what is written to below
        result = function(part.clone() if in_place else part, dim, ids, *values, *rest, **named)
    if not in_place:
        return finish(result, spec)
    if spec != target.spec:
        raise unsupported(func, "the result has another layout than the tensor it is written to", *specs_of(given))
    target.local.copy_(result)
    written(target)
    return target


def scatter_along(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[str]) -> Tensor:
    """Scatter to a sharded tensor by an index without routes; the values may be called any of the names given."""
    named, rest = bind(f"input dim index {values[0]}", args, kwargs), args[4:]
    target, dim, index = (named.pop(name, None) for name in ("input", "dim", "index"))
    src = next((named.pop(name) for name in values if name in named), None)
    refuse_out(func, named, *specs_of([target]))
    if not isinstance(src, Tensor):  # one number for all
        return _scatter(func, target, dim, index, None, [src, *rest], named)
    return _scatter(func, target, dim, index, src, rest, named)


@register_op(
    *find("scatter index_copy index_fill index_reduce", namespaces=_BOTH),
    *find("scatter_ index_copy_ index_fill_ index_reduce_", namespaces=(Tensor,)),
    keeps_replicated=True,
    any_order=True,
)
def write_at(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write values into the rows of a sharded tensor."""
    named = bind("input dim index", args, kwargs)
    target, index = named.get("input"), named.get("index")
    if is_sharded(target) and not isinstance(index, RoutedIndex):
        return scatter_along(func, args, kwargs, ("source", "src", "value"))
    if not isinstance(target, ShardTensor):
        return write_to_plain(func, args, kwargs)
    operands = [x for x in (*args, *kwargs.values()) if isinstance(x, ShardTensor)]
    if any(map(is_sharded, operands)):
        raise unsupported(func, "the ids are those of a graph", *specs_of(operands))
    in_place = func.__name__.endswith("_") and isinstance(target, ShardTensor)
    if in_place:
        refuse_write_to_copy(func, target)
    result = func(*map(local_of, args), **{name: local_of(x) for name, x in kwargs.items()})
    if in_place:
        written(target)
    return result
