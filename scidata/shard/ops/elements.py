"""Gather and scatter by index along any dim, with index and values split like the tensor or replicated.

Along a sharded dim, a gather fetches the whole dim, and a scatter its whole index and values: right for any index, at
the cost of their memory. Ids of a graph know better ways: see ``edges`` and ``scatter``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.comm.operators import in_range
from scidata.shard.graphs.routed import RoutedIndex
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.align import (
    align,
    finish,
    is_sharded,
    local_of,
    on_parts,
    refuse_without_dims,
    spec_of_layout,
    specs_of,
    write_to_plain,
)
from scidata.shard.ops.arguments import handles, normal_dim
from scidata.shard.ops.edges import gather_by_ids
from scidata.shard.ops.moving import beside, joined, whole_along
from scidata.shard.rows.edge_order import refuse_disorder
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import refuse_write_to_copy, written


def _labels(operands: Sequence[Tensor], dim: int) -> list[list[Hashable]]:
    """Give dims equal labels if any operand is sharded, but ``dim`` of the first operand its own."""
    shared = {d for spec in specs_of(operands) for d in spec.sharded}
    return [
        [("rows" if i else "target") if d == dim else d if d in shared else (i, d) for d in range(len(x.shape))]
        for i, x in enumerate(operands)
    ]


def _check_sharded_extents(func: TorchFunction, operands: Sequence[Tensor], dim: int) -> None:
    specs = specs_of(operands)
    for d in {d for spec in specs for d in spec.sharded} - {dim}:
        if len({x.shape[d] for x in operands if len(x.shape)}) > 1:
            shapes = [tuple(x.shape) for x in operands]
            raise unsupported(func, f"shapes {shapes} differ along the sharded dim {d}", *specs)


@handles("gather", any_order=True, accepts_filled=True)
def gather(func: TensorFunction, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Pick one element of a row for each entry of the index."""
    refuse_without_dims(func, x, index)
    dim = normal_dim(dim, len(x.shape))
    if isinstance(index, RoutedIndex):
        return gather_by_ids(func, x, dim, index)
    if is_sharded(x) and dim in x.spec.sharded:
        spec: ShardSpec = x.spec
        refuse_disorder(func, spec)
        axis, extent = spec.sharded[dim], index.shape[dim]
        if not isinstance(index, ShardTensor):
            sizes = spec.sizes_of(axis) if extent == x.shape[dim] else even_sizes(extent, spec.axes[axis].size)
            new = spec.along(axis, dim, index.shape, sizes)
            index = ShardTensor(index.narrow(dim, new.offsets[dim], new.local_shape[dim]), new)
        x = whole_along(x, dim)
    operands = [x, index]
    _check_sharded_extents(func, operands, dim)
    labels = _labels(operands, dim)
    extents = dict(zip(labels[1], index.shape, strict=True))
    return on_parts(func, lambda source, ids: source.gather(dim, ids), operands, labels, labels[1], extents)


# -- scatters ------------------------------------------------------------------------------------------------------


def scatter_along(
    func: TensorFunction,
    target: ShardTensor,
    dim: int,
    index: Tensor,
    src: Tensor | float | None,
    *rest: object,
    **named: object,
) -> Tensor:
    """Scatter to a sharded tensor by an index without routes: ``func(target, dim, index, src, ...)``.

    Rows of other ranks are written to one row more. With rows 0 to 3 on rank 0, ids (1, 6) become (1, 4) there: the
    second value goes to its spare row 4, which is cut off.
    """
    in_place = func.__name__.endswith("_")
    if not isinstance(src, Tensor):  # one number for all
        src, rest = None, (src, *rest)
    if in_place:
        refuse_write_to_copy(func, target)
    function = getattr(torch, func.__name__.rstrip("_"))
    dim = normal_dim(dim, target.spec.ndim)
    one_dim = "index" in func.__name__
    others = [index] if src is None else [index, src]
    if dim in target.spec.sharded or len({x.spec.order if is_sharded(x) else None for x in others}) > 1:
        refuse_disorder(func, *specs_of([target, *others]))
    given = [target, whole_along(index, 0 if one_dim else dim), *([] if src is None else [whole_along(src, dim)])]
    if in_place:  # others come to the layout of what is written to
        names = ["rows" if d == dim else d for d in range(target.spec.ndim)]
        given[1:] = [beside(x, names[: len(x.shape)], target.spec) for x in given[1:]]
    operands = [given[0], *given[2:]] if one_dim else given
    _check_sharded_extents(func, operands, dim)
    labels = _labels(operands, dim)
    locals_, layout, _ = align(func, operands, labels)
    if one_dim:
        locals_.insert(1, local_of(given[1]))
    part, ids, *values = locals_
    spec = spec_of_layout(layout, labels[0], target.spec.global_shape, target.spec)
    extent, size = spec.global_shape[dim], part.shape[dim]
    if src is None or 0 not in src.shape:  # torch looks at no ids then
        ids = in_range(ids, 0, extent, f"{func.__name__}: an index is out of bounds for dim {dim} with size {extent}")
    if dim in spec.sharded:
        ids = ids - spec.offsets[dim]
        mine = (ids >= 0) & (ids < size)
        ids = torch.where(mine, ids, size)
        if "reduce" in func.__name__ and values:  # others' NaN would have gradients here
            away = ~mine.view([-1 if d == dim else 1 for d in range(part.ndim)]) if one_dim else ~mine
            values = [values[0].masked_fill(away, 1)]
        spare = part.narrow(dim, 0, 0).new_ones([1 if d == dim else n for d, n in enumerate(part.shape)])
        result = function(joined([part, spare], dim), dim, ids, *values, *rest, **named).narrow(dim, 0, size)
    else:
        # autograd may keep the tensor that it reads, so the copy below must not go into that one
        result = function(part.clone() if in_place else part, dim, ids, *values, *rest, **named)
    if not in_place:
        return finish(result, spec)
    if spec != target.spec:
        raise unsupported(func, "the result has another layout than the tensor it is written to", *specs_of(given))
    target.local.copy_(result)
    written(target)
    return target


@handles(
    "scatter index_copy index_fill index_reduce scatter_ index_copy_ index_fill_ index_reduce_",
    keeps_replicated=True,
    any_order=True,
)
def write_at(
    func: TensorFunction,
    x: Tensor,
    dim: int,
    index: Tensor,
    *values: Tensor | float,
    src: Tensor | None = None,
    source: Tensor | None = None,
    value: Tensor | float | None = None,
    **options: object,
) -> Tensor:
    """Write values into the rows of a sharded tensor."""
    given = [*values, *(each for each in (src, source, value) if each is not None)]
    if is_sharded(x) and not isinstance(index, RoutedIndex):
        return scatter_along(func, x, dim, index, given[0], *given[1:], **options)
    if is_sharded(x):
        raise unsupported(func, "the ids are those of a graph", *specs_of([x, index, *given]))
    return write_to_plain(func, (x, dim, index, *given), options)
