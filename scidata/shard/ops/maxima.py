"""Adaptive maximum pooling and the way back from maximum pooling: both know places by their flat global number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.op_table import TorchFunction, unsupported
from scidata.shard.ops.align import is_sharded, local_of, refuse_plain, specs_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import as_sharded
from scidata.shard.ops.pooling import (
    Extents,
    adaptive_windows,
    out_extents,
    placed,
    spatial,
    spread_windows,
    windows_of,
)
from scidata.shard.ops.reductions import extreme_along
from scidata.shard.ops.sliding import Middle, output_sizes
from scidata.shard.tensor import ShardTensor

_ADAPTIVE_WITH_INDICES = (
    F.adaptive_max_pool1d_with_indices,
    F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d_with_indices,
    torch.adaptive_max_pool1d,  # always returns both
)


@handles(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d, *_ADAPTIVE_WITH_INDICES)
def adaptive_max_pool(
    func: TorchFunction, x: ShardTensor, output_size: int | Sequence[int | None] | None, return_indices: bool = False
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Maximum of windows that divide each dim into so many; of equal ones the first counts, of NaN the last."""
    refuse_plain(func, x)
    spec, count = x.spec, spatial(func)
    extents, first = out_extents(x, output_size, count), spec.ndim - count
    with_indices = return_indices or func in _ADAPTIVE_WITH_INDICES
    result: Tensor = x
    places: Tensor | None = _places(x, first) if with_indices else None
    for d in reversed(range(first, spec.ndim)):  # the last first: each step keeps the first of equal ones
        if extents[d - first] != spec.global_shape[d]:
            result, places = _maximum(result, places, d, extents[d - first])
    return (result, places) if with_indices else result


def _places(x: ShardTensor, first: int) -> ShardTensor:
    """Number the elements of the spatial dims as torch does, in C order of the whole tensor."""
    spec = x.spec
    flat = torch.zeros(spec.local_shape, dtype=torch.int64, device=x.device)
    for d in range(first, spec.ndim):
        start, rows = spec.offsets[d], spec.local_shape[d]
        index = torch.arange(start, start + rows, device=x.device).view([-1 if i == d else 1 for i in range(spec.ndim)])
        flat = flat + index * math.prod(spec.global_shape[d + 1 :])
    return ShardTensor(flat, spec)


def _maximum(x: Tensor, places: Tensor | None, dim: int, num_out: int) -> tuple[Tensor, Tensor | None]:
    """Take the maxima of adaptive windows along one dim, and the places of these."""
    if num_out == 1 and isinstance(x, ShardTensor) and dim in x.spec.sharded:
        found, rows = extreme_along(x, dim, _last_missing, True)
        return found, None if places is None else _place_of_row(as_sharded(places, x.spec), dim, rows)
    (spread, extra), finish = _spread(x, dim, num_out)
    _, index = _last_missing(spread.detach(), dim + 1, True, extra)  # of equal ones the first, so never a filled one
    if places is not None:
        (beside, _), finish_places = _spread(places, dim, num_out)
        places = finish_places(beside.gather(dim + 1, index).squeeze(dim + 1))
    return finish(spread.gather(dim + 1, index).squeeze(dim + 1)), places


def _last_missing(x: Tensor, dim: int, keepdim: bool, extra: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Take the largest of a dim, kept, of equal ones the first, but of NaN the last, as pooling does: not ``extra``."""
    value, index = x.max(dim, keepdim=keepdim)
    missing = value.isnan()
    if missing.any():
        rows = torch.arange(x.shape[dim], device=x.device).view([-1 if d == dim else 1 for d in range(x.ndim)])
        hits = x.isnan() if extra is None else x.isnan() & ~extra
        index = torch.where(missing, (hits * rows).amax(dim, keepdim=keepdim), index)
    return value, index


def _spread(x: Tensor, dim: int, num_out: int) -> tuple[tuple[Tensor, Tensor | None], Callable[[Tensor], Tensor]]:
    """Lay adaptive windows side by side along a new dim; also return a function that wraps one number for each."""
    if not isinstance(x, ShardTensor):
        return spread_windows(x, dim, windows_of(0, num_out, x.shape[dim], num_out)), lambda result: result
    windows, bounds = adaptive_windows(x, dim, num_out)
    return spread_windows(windows.fetch(), dim, bounds), windows.finish


def _place_of_row(places: ShardTensor, dim: int, rows: Tensor) -> Tensor:
    """Return the places in one row of a sharded dim for each other index; the rank that has it says so. Collective."""
    spec = places.spec
    axis, size = spec.sharded[dim], spec.local_shape[dim]
    index = local_of(rows) - spec.offsets[dim]
    mine = (index >= 0) & (index < size)
    found = places.local.gather(dim, index.clamp(0, size - 1)) if size else torch.zeros_like(index)
    found = all_reduce_sum(found.masked_fill(~mine, 0), spec.group(axis))
    return ShardTensor(found, rows.spec) if isinstance(rows, ShardTensor) else found


# -- the way back --------------------------------------------------------------------------------------------------


@handles(F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
def max_unpool(
    func: TorchFunction,
    x: ShardTensor,
    indices: Tensor,
    kernel_size: Extents,
    stride: Extents | None = None,
    padding: Extents = 0,
    output_size: Sequence[int] | None = None,
) -> Tensor:
    """Put values where their indices say, zeros elsewhere. Collective: values travel along the sharded spatial dims.

    With 2 x 4 outputs of which rank 0 has columns 0 and 1, value 5 with index 6 belongs to row 1 and column 2: rank 1
    puts it at its own place (1, 0), rank 0 into a slot that is cut off.
    """
    refuse_plain(func, x, indices)
    spec, count = x.spec, spatial(func)
    if not is_sharded(indices):
        raise unsupported(func, "plain indices of a sharded input", spec, remedy="use the indices of max_pool")
    if indices.spec != spec:
        raise unsupported(func, "input and indices are split differently", *specs_of([x, indices]))
    first = spec.ndim - count
    shape = list(spec.global_shape)
    shape[first:] = _unpooled(shape[first:], *placed(count, kernel_size, stride, padding), output_size)
    sizes, values, ids = list(spec.sizes), x.local, indices.local
    for d, axis in spec.sharded.items():
        if d >= first:
            values = all_gather_v(values, spec.sizes_of(axis), d, spec.group(axis), grad="sum")
            ids = all_gather_v(ids, spec.sizes_of(axis), d, spec.group(axis))
            sizes[axis] = output_sizes(spec, d, shape[d], Middle(over=max(1, -(-shape[d] // spec.global_shape[d]))))
    total = math.prod(shape[first:])
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < total:
        raise RuntimeError(f"{func.__name__}: an index is out of range for output size {shape[first:]}")
    new = spec.resize(shape, sizes)
    return ShardTensor(_placed(values, ids, shape[first:], new.offsets[first:], new.local_shape), new)


def _unpooled(
    extents: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    asked: Sequence[int] | None,
) -> list[int]:
    default = [(n - 1) * s + k - 2 * p for n, k, s, p in zip(extents, kernel, stride, padding, strict=True)]
    if asked is None:
        return default
    found = [int(n) for n in asked][-len(extents) :]
    for n, own, step in zip(found, default, stride, strict=True):
        if not own - step < n < own + step:
            raise ValueError(f"invalid output_size {found}: each must be within one stride of {default}")
    return found


def _placed(values: Tensor, ids: Tensor, whole: Sequence[int], start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Put values into this rank's part, whose first element is ``start``; one slot more takes those of other ranks."""
    lead, own = values.shape[: values.ndim - len(whole)], shape[len(shape) - len(whole) :]
    mine, flat = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    for place, first, size in zip(torch.unravel_index(ids, tuple(whole)), start, own, strict=True):
        mine &= (place >= first) & (place < first + size)
        flat = flat * size + place - first
    slots = math.prod(own)
    flat = torch.where(mine, flat, slots).flatten(len(lead))
    result = values.new_zeros((*lead, slots + 1)).scatter(-1, flat, values.flatten(len(lead)))
    return result[..., :slots].reshape(*lead, *own)
