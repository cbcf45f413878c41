"""Writes through index tensors and masks on any dims.

Every rank writes the values that fall on its own part. An index or a mask that is sharded otherwise than the tensor
written to is gathered, and so are values along the dims that an index makes.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from scidata.shard.comm.collectives import slice_to_shard
from scidata.shard.comm.sums import replicate_to_shards
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.advanced import as_mask, check_mask, count_true, flat_rows, split_alike
from scidata.shard.ops.align import align, finish, is_sharded, local_of, specs_of, whole, write_to_plain
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.counting import alike, in_a_row
from scidata.shard.ops.moving import as_sharded, beside, to_layout
from scidata.shard.rows.edge_order import refuse_disorder
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import refuse_write_to_copy, written

T = TypeVar("T")


def fill_where(func: TorchFunction, target: ShardTensor, tensors: Mapping[int, Tensor], value: float | Tensor) -> bool:
    """Write one value where a mask is true; return False for other kinds of index."""
    (dim, mask), *rest = tensors.items()
    if rest or mask.dtype != torch.bool or (isinstance(value, Tensor) and value.ndim):
        return False
    if isinstance(mask, ShardTensor) and not split_alike(target.spec, dim, mask.spec):
        return False
    check_mask(target.spec, dim, mask)
    behind = target.spec.ndim - dim - len(mask.shape)
    target.masked_fill_(mask[(..., *[None] * behind)], value)
    return True


def write_through(
    func: TorchFunction,
    target: ShardTensor,
    tensors: Mapping[int, Tensor],
    value: float | Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """Write values through index tensors and masks, or add them, ``tensors`` by the first dim that each stands for.

    Of ``x[[0, 5, 6]] = (a, b, c)`` with rows 0 to 3 on rank 0 and 4 to 7 on rank 1, rank 0 writes a to its row 0, and
    rank 1 b and c to its rows 1 and 2.

    Collective if an index, or the values along one, are sharded.
    """
    refuse_write_to_copy(func, target)
    spec, indices = target.spec, _indices(func, target, tensors)
    dims = list(indices)
    if any(d in spec.sharded for d in dims):
        refuse_disorder(func, spec)
    shape = tuple(torch.broadcast_shapes(*(index.shape for index in indices.values())))  # type: ignore[no-untyped-call]
    flat = {d: flat_rows(index.expand(shape), d, spec.global_shape[d]) for d, index in indices.items()}
    place = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    labels: list[Hashable] = [d for d in range(spec.ndim) if d not in indices]
    labels[place:place] = [("index", i) for i in range(len(shape))]
    extents = dict(zip(labels[place : place + len(shape)], shape, strict=True)) | dict(enumerate(spec.global_shape))
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=target.dtype, device=target.device)
    value = without_ones(value, len(labels))
    labels_of_value = labels[max(0, len(labels) - value.ndim) :]
    if value.ndim > len(labels) or any(
        n not in (1, extents[label]) for n, label in zip(value.shape, labels_of_value, strict=True)
    ):
        raise RuntimeError(
            f"shape mismatch: values of shape {tuple(value.shape)} do not fit the indexed part, of shape "
            f"{tuple(extents[label] for label in labels)}"
        )
    value = beside(value, labels_of_value, spec)
    (part, values), _, _ = align(func, [target, value], [range(spec.ndim), labels_of_value])
    rest = [part.shape[d] for d in range(spec.ndim) if d not in indices]
    values = values.expand(*rest[:place], *shape, *rest[place:]).flatten(place, place + len(shape) - 1)
    local = {d: rows - spec.offsets[d] for d, rows in flat.items()}
    mine = reduce(operator.and_, [(rows >= 0) & (rows < part.shape[d]) for d, rows in local.items()])
    (chosen,) = mine.nonzero(as_tuple=True)
    local = {d: rows[chosen] for d, rows in local.items()}
    values = values.index_select(place, chosen.to(values.device)).to(part.dtype)
    if accumulate:
        rows = part.movedim(dims, list(range(len(dims))))
        rows.index_put_(tuple(local[d] for d in dims), values.movedim(place, 0), accumulate=True)
    else:
        part[tuple(local.get(d, slice(None)) for d in range(spec.ndim))] = values
    written(target)


def _indices(func: TorchFunction, target: ShardTensor, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return plain integer indices by the dim of each; masks are listed."""
    result: dict[int, Tensor] = {}
    for dim, given in tensors.items():
        index = whole(func, given)
        if index.dtype == torch.bool:
            check_mask(target.spec, dim, index)
            result |= {dim + i: rows for i, rows in enumerate(index.nonzero(as_tuple=True))}
        else:
            result[dim] = index
    return dict(sorted(result.items()))


def without_ones(value: T, ndim: int) -> T | Tensor:
    """Drop leading dims of extent 1 beyond ``ndim``, as torch does with values that are assigned."""
    if isinstance(value, Tensor) and len(value.shape) > ndim and value.shape[0] == 1:
        return without_ones(value.squeeze(0), ndim)
    return value


def overwrite(target: ShardTensor, value: Tensor) -> None:
    """Copy values that broadcast. Collective if they are split differently."""
    ndim = len(target.shape)
    if len(value.shape) <= ndim:
        value = beside(value, range(ndim - len(value.shape), ndim), target.spec)
    target.copy_(value)


@handles("take")
def take(input: Tensor, index: Tensor) -> Tensor:
    """Take elements by their number in C order. Collective."""
    if not is_sharded(input):
        assert isinstance(index, ShardTensor)
        whole = replicate_to_shards(local_of(input), index.spec.shard_groups)
        return ShardTensor(torch.take(whole, index.local), index.spec)
    line, _ = in_a_row(input)
    if not is_sharded(index):
        return line[local_of(index).reshape(-1)].reshape(tuple(index.shape))
    rows, _ = in_a_row(index)
    return to_layout(as_sharded(line[rows].reshape(index.shape), index.spec), index.spec)


# -- writing ------------------------------------------------------------------------------------------------------


def _in_place(func: TorchFunction, x: Tensor) -> bool:
    """Whether a function writes to its first argument."""
    in_place: bool = func.__name__.endswith("_")
    if in_place:
        refuse_write_to_copy(func, x)
    return in_place


def _check_dtypes(func: TorchFunction, x: Tensor, source: object) -> None:
    if not isinstance(source, Tensor) or source.dtype != x.dtype:
        raise RuntimeError(
            f"{func.__name__}: values must have the dtype {x.dtype} of the tensor that they are written to"
        )


@handles("index_put index_put_")
def index_put(
    func: TensorFunction, x: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Write or add values through index tensors and masks. Collective if one of these is sharded."""
    if not is_sharded(x):
        return write_to_plain(func, (x, indices, values, accumulate), {})
    target = x if _in_place(func, x) else x.clone()
    assert isinstance(target, ShardTensor)
    _check_dtypes(func, x, values)
    tensors, dim = {}, 0
    for index in map(as_mask, indices):
        tensors[dim] = index
        dim += len(index.shape) if index.dtype == torch.bool else 1
    write_through(func, target, tensors, values, accumulate=bool(accumulate))
    return target


@handles("put", Tensor.put_)
def put(func: TensorFunction, x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Write or add values at element numbers in C order. Collective."""
    if not is_sharded(x):
        return write_to_plain(func, (x, index, source, accumulate), {})
    in_place = _in_place(func, x)
    _check_dtypes(func, x, source)
    if index.shape.numel() != source.shape.numel():
        raise RuntimeError(f"put: {index.shape.numel()} places for {source.shape.numel()} values")
    line = in_a_row(x)[0].clone()
    assert isinstance(line, ShardTensor)
    write_through(func, line, {0: index.reshape(-1)}, source.reshape(-1), accumulate=bool(accumulate))
    result = to_layout(as_sharded(line.reshape(x.shape), x.spec), x.spec)
    return x.copy_(result) if in_place else result


@handles(torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_)
def masked_scatter(func: TensorFunction, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Write values in order where a mask is true, in C order. Collective."""
    if not is_sharded(x) and (func.__name__.endswith("_") or not is_sharded(mask)):
        return write_to_plain(func, (x, mask, source), {})
    in_place = func.__name__.endswith("_") and _in_place(func, x)
    _check_dtypes(func, x, source)
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_scatter: the mask must be of bools, not {mask.dtype}")
    values, where = alike(func, [x, mask])
    if not is_sharded(values):
        raise unsupported(func, "only the values are sharded", *specs_of([x, mask, source]))
    (line, axis), (chosen, _) = in_a_row(values), in_a_row(where)
    counts = count_true(chosen)
    if source.shape.numel() < sum(counts):
        raise RuntimeError(f"masked_scatter: {source.shape.numel()} values for {sum(counts)} places")
    if is_sharded(source):
        wanted = as_sharded(in_a_row(source)[0][: sum(counts)], line.spec)
        own = wanted.redistribute(placements=line.placements, sizes={axis: counts}).local
    else:
        own = slice_to_shard(local_of(source).reshape(-1)[: sum(counts)], counts, 0, line.spec.group(axis))
    written = ShardTensor(line.local.masked_scatter(chosen.local, own), line.spec).reshape(values.shape)
    result = to_layout(as_sharded(written, values.spec), values.spec)
    return x.copy_(result) if in_place else finish(result.local, result.spec)
