"""Elements by their number in C order of the whole tensor, and writes through index tensors and masks by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scidata.shard.comm.collectives import slice_to_shard
from scidata.shard.comm.sums import replicate_to_shards
from scidata.shard.op_table import TensorFunction, TorchFunction, find, unsupported
from scidata.shard.ops.advanced import count_true
from scidata.shard.ops.align import finish, is_sharded, local_of, specs_of, to_layout, write_to_plain
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.counting import alike, in_a_row
from scidata.shard.ops.moving import as_sharded
from scidata.shard.ops.writing import put as write
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import refuse_write_to_copy

_BOTH = (torch, Tensor)


@handles(*find("take", namespaces=_BOTH))
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
    if not is_sharded(x):
        raise unsupported(func, "sharded values are written to a replicated tensor", *specs_of([x]))
    in_place: bool = func.__name__.endswith("_")
    if in_place:
        refuse_write_to_copy(func, x)
    return in_place


def _check_dtypes(func: TorchFunction, x: Tensor, source: object) -> None:
    if not isinstance(source, Tensor) or source.dtype != x.dtype:
        raise RuntimeError(f"{func.__name__}: values must have the dtype {x.dtype} of what they are written to")


@handles(*find("index_put index_put_", namespaces=_BOTH))
def index_put(
    func: TensorFunction, x: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Write values through index tensors and masks, or add them. Collective where one of these is sharded."""
    if not isinstance(x, ShardTensor):
        return write_to_plain(func, (x, indices, values, accumulate), {})
    target = x if _in_place(func, x) else x.clone()
    assert isinstance(target, ShardTensor)
    _check_dtypes(func, x, values)
    tensors, dim = {}, 0
    for index in indices:
        tensors[dim] = index
        dim += len(index.shape) if index.dtype == torch.bool else 1
    write(func, target, tensors, values, accumulate=bool(accumulate))
    return target


@handles(*find("put", namespaces=_BOTH), Tensor.put_)
def put(func: TensorFunction, x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Write values to elements by their number in C order, or add them. Collective."""
    if not isinstance(x, ShardTensor):
        return write_to_plain(func, (x, index, source, accumulate), {})
    in_place = _in_place(func, x)
    _check_dtypes(func, x, source)
    if index.shape.numel() != source.shape.numel():
        raise RuntimeError(f"put: {index.shape.numel()} places for {source.shape.numel()} values")
    line = in_a_row(x)[0].clone()
    assert isinstance(line, ShardTensor)
    write(func, line, {0: index.reshape(-1)}, source.reshape(-1), accumulate=bool(accumulate))
    result = to_layout(as_sharded(line.reshape(x.shape), x.spec), x.spec)
    return x.copy_(result) if in_place else result


@handles(torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_)
def masked_scatter(func: TensorFunction, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Write one value after the other where a mask is true, in C order. Collective."""
    if not isinstance(x, ShardTensor) and (func.__name__.endswith("_") or not is_sharded(mask)):
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
