"""Pooling over windows of fixed and adaptive size, on any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.align import finish, is_sharded, local_of, refuse_plain, specs_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moments import widened
from scidata.shard.ops.moving import (
    as_sharded,
    cut_to,
    gather_from_owners,
    moved_back,
    moved_off,
    to_layout,
    without_empty,
)
from scidata.shard.ops.reductions import extreme_along
from scidata.shard.ops.sliding import Extents, Middle, Windows, output_sizes, per_dim, row_values
from scidata.shard.rows.runs import Runs
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import unpooled_extents

_POOLS: tuple[TensorFunction, ...] = (torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)
_POOLS_BY_FLAG = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_POOLS_WITH_INDICES: list[Callable[..., tuple[Tensor, Tensor]]]
_FRACTIONAL: list[Callable[..., tuple[Tensor, Tensor]]]
_FRACTIONAL = [F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices]
_POOLS_WITH_INDICES = [getattr(F, f"max_pool{n}d_with_indices") for n in (1, 2, 3)]


def spatial(func: TorchFunction) -> int:
    """Return the number of spatial dims from the function's name."""
    return next(n for n in (1, 2, 3) if f"{n}d" in func.__name__)


def _num_out(extent: int, reach: int, stride: int, padding: int, ceil: bool) -> int:
    rows = (extent + 2 * padding - reach + (stride - 1 if ceil else 0)) // stride + 1
    # the last window must begin inside the dim or the padding below it
    return rows - 1 if ceil and (rows - 1) * stride >= extent + padding else rows


def placed(
    count: int, kernel_size: Extents, stride: Extents | None, padding: Extents
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return kernel, stride and padding of each spatial dim."""
    kernel, pad = per_dim(kernel_size, count), per_dim(padding, count)
    for width, size in zip(pad, kernel, strict=True):
        if width > size // 2:
            raise RuntimeError(f"pad should be at most half of kernel size, but got pad={width}, kernel_size={size}")
    return kernel, per_dim(stride, count) if stride not in (None, (), []) else kernel, pad


# -- windows of fixed size -----------------------------------------------------------------------------------------


@handles(*_POOLS, *_POOLS_BY_FLAG, *_POOLS_WITH_INDICES)
def max_pool(
    func: TensorFunction, x: ShardTensor, kernel_size: Extents, stride: Extents | None = None, padding: Extents = 0,
    dilation: Extents = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Maximum of each window; indices are those of the whole tensor.

    torch's kernel numbers the elements of the rows that this rank has fetched: it says place 3 of rows 5 to 9. These
    numbers are taken apart by dim, moved by the first row, here to row 8, and put together by the whole extents.
    """
    refuse_plain(func, x)
    with_indices, count, spec = return_indices or "indices" in func.__name__, spatial(func), x.spec
    kernel, stride, padding = placed(count, kernel_size, stride, padding)
    dilation = per_dim(dilation, count)
    first = spec.ndim - count

    def make() -> tuple[Windows, tuple[int, ...], tuple[int, ...]]:
        windows, left, starts = Windows(spec), list(padding), [0] * count
        windows.keep(range(first))
        for s in range(count):
            d, reach = first + s, dilation[s] * (kernel[s] - 1) + 1
            num_out = _num_out(spec.global_shape[d], reach, stride[s], padding[s], ceil_mode)
            if windows.resize(func, d, num_out):
                start, _ = windows.slide_under(d, num_out, reach, stride[s], padding[s])
                starts[s], left[s] = start * stride[s] - padding[s], 0
        return windows, tuple(left), tuple(starts)

    key = "max pool", kernel, stride, padding, dilation, ceil_mode
    planned: tuple[Windows, tuple[int, ...], tuple[int, ...]] = spec.plans.get_or_make(key, make)
    windows, left, starts = planned
    local, filled = windows.fetch(x, float("-inf")), windows.fills
    if not (with_indices or filled):
        return windows.finish(_POOLS[count - 1](local, kernel, stride, left, dilation, ceil_mode))
    result, indices = _POOLS_WITH_INDICES[count - 1](local, kernel, stride, left, dilation, ceil_mode)
    places = list(torch.unravel_index(indices, local.shape[first:]))
    if filled:  # where all is -inf, torch takes the first row of the window, and no padding
        masked = result.detach() == -math.inf
        for s in range(count):
            d = first + s
            offsets = torch.arange(places[s].shape[d], device=local.device) * stride[s] + starts[s] - left[s]
            before = -(offsets.clamp(max=0) // dilation[s]) * dilation[s]  # steps to the first row that is none of it
            rows = (offsets + before - starts[s]).view([-1 if i == d else 1 for i in range(spec.ndim)])
            places[s] = torch.where(masked, rows, places[s])
        result = _at(local, places, first)
    if not with_indices:
        return windows.finish(result)
    flat = torch.zeros_like(indices)
    for s, place in enumerate(places):
        flat = flat * spec.global_shape[first + s] + place + starts[s]
    return windows.finish(result), windows.finish(flat)


def _at(local: Tensor, places: Sequence[Tensor], first: int) -> Tensor:
    """Take the elements at these places of the dims from ``first`` on."""
    flat = torch.zeros_like(places[0])
    for place, extent in zip(places, local.shape[first:], strict=True):
        flat = flat * extent + place
    return local.flatten(first).gather(-1, flat.flatten(first)).view(flat.shape)


@handles(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
def avg_pool(
    func: TensorFunction, x: ShardTensor, kernel_size: Extents, stride: Extents | None = None, padding: Extents = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Mean of each window: sums of the rows in it, over torch's count of them."""
    refuse_plain(func, x)
    count, spec = spatial(func), x.spec
    kernel, stride, padding = placed(count, kernel_size, stride, padding)
    first, windows, divisors = spec.ndim - count, Windows(spec), []
    windows.keep(range(first))
    for s, (k, step, pad) in enumerate(zip(kernel, stride, padding, strict=True)):
        extent = spec.global_shape[first + s]
        num_out = _num_out(extent, k, step, pad, ceil_mode)
        windows.resize(func, first + s, num_out)
        start, rows = windows.slide_under(first + s, num_out, k, step, pad)
        lowest, highest = (-pad, extent + pad) if count_include_pad else (0, extent)
        begins = [o * step - pad for o in range(start, start + max(rows, 1))]
        divisors.append([min(b + k, highest) - max(b, lowest) for b in begins])
    total = _window_sums(widened(windows.fetch(x)), kernel, stride)
    if divisor_override is not None:
        total = total / divisor_override
    elif all(set(counts) == {k} for counts, k in zip(divisors, kernel, strict=True)):
        total = total / math.prod(kernel)
    else:
        for s, counts in enumerate(divisors):
            total = total / row_values([max(n, 1) for n in counts], first + s, total)
    return windows.finish(total.to(x.dtype))


def _window_sums(local: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    if len(kernel) == 3:
        return F.avg_pool3d(local, tuple(kernel), tuple(stride), divisor_override=1)
    if len(kernel) == 2:
        return F.avg_pool2d(local, tuple(kernel), tuple(stride), divisor_override=1)
    flat = F.avg_pool2d(local.unsqueeze(-2), (1, *kernel), (1, *stride), divisor_override=1)
    return flat.squeeze(-2)


# -- windows that divide a dim into so many ------------------------------------------------------------------------


def out_extents(x: ShardTensor, output_size: int | Sequence[int | None] | None, count: int) -> list[int]:
    """Return the extents that adaptive pooling gives the spatial dims; None keeps one."""
    asked = [output_size] * count if output_size is None or isinstance(output_size, int) else list(output_size)
    asked = asked * count if len(asked) == 1 else asked
    shape = x.spec.global_shape[x.spec.ndim - count :]
    return [int(n) if n is not None else extent for n, extent in zip(asked, shape, strict=True)]


class _Spread(NamedTuple):
    """Adaptive windows along a dim, side by side along a new dim after it."""

    values: Tensor
    extra: Tensor | None  # a mask of rows that only fill windows of fewer rows, by their first
    wrap: Callable[[Tensor], Tensor]  # takes one number for each window to a result


def _spread(x: Tensor, dim: int, num_out: int) -> _Spread:
    """Lay the windows of a dim side by side: of 5 rows, 2 windows are rows 0 to 2 and 2 to 4."""
    extent = x.shape[dim]

    def bounds_of(start: int, stop: int) -> list[tuple[int, int]]:
        return [(o * extent // num_out, -(-(o + 1) * extent // num_out)) for o in range(start, stop)]

    def rows(start: int, stop: int) -> Runs:
        inside = bounds_of(start, stop)
        return ((inside[0][0], inside[-1][1] - inside[0][0]),)

    start, count, local = 0, num_out, x
    wrap: Callable[[Tensor], Tensor] = lambda result: result  # noqa: E731
    if isinstance(x, ShardTensor):
        windows = Windows(x.spec)
        start, count = windows.slide(dim, num_out, Middle(2 * extent, extent, 2 * num_out), rows, 1, ("spread",))
        local, wrap = windows.fetch(x), windows.finish
    bounds = bounds_of(start, start + count) or [(0, 1)]
    low, longest = bounds[0][0], max(stop - start for start, stop in bounds)
    places = torch.tensor([[*range(a, b), *[a] * (longest - b + a)] for a, b in bounds], device=local.device) - low
    taken = local.index_select(dim, places.flatten())
    values = taken.view(*local.shape[:dim], *places.shape, *local.shape[dim + 1 :])
    if all(b - a == longest for a, b in bounds):
        return _Spread(values, None, wrap)
    extra = torch.tensor([[a + i >= b for i in range(longest)] for a, b in bounds], device=local.device)
    return _Spread(values, extra.view([1] * dim + list(extra.shape) + [1] * (local.ndim - dim - 1)), wrap)


def _average(x: ShardTensor, dim: int, num_out: int) -> Tensor:
    if num_out == 1:
        return x.mean(dim, keepdim=True)
    values, extra, wrap = _spread(x, dim, num_out)
    wide = widened(values)
    mean = wide.mean(dim + 1) if extra is None else wide.masked_fill(extra, 0).sum(dim + 1) / (~extra).sum(dim + 1)
    return wrap(mean.to(x.dtype))


def adaptive_average(x: ShardTensor, extents: Sequence[int], pool: TensorFunction) -> Tensor:
    """Average over adaptive windows, dim by dim; one row of a sharded dim is its mean, on every rank."""
    spec, first = x.spec, x.spec.ndim - len(extents)
    dims = [d for d in range(first, spec.ndim) if extents[d - first] != spec.global_shape[d]]
    if all(d < first for d in spec.sharded):
        windows = Windows(spec)
        windows.keep(range(first))
        windows.shape[first:] = extents
        return windows.finish(pool(windows.fetch(x), tuple(extents)))
    result: Tensor = x
    for d in sorted(dims, key=lambda d: d in spec.sharded):  # the others first, so that less is sent
        result = _average(as_sharded(result, spec), d, extents[d - first])
    return result if dims else x.clone()


@handles(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
def adaptive_avg_pool(func: TensorFunction, x: ShardTensor, output_size: int | Sequence[int | None] | None) -> Tensor:
    """Mean of windows that divide each dim into so many."""
    refuse_plain(func, x)
    return adaptive_average(x, out_extents(x, output_size, spatial(func)), func)


# -- adaptive maxima, and the way back from maximum pooling ----------------------------------------------------------


_ADAPTIVE_WITH_INDICES = [getattr(F, f"adaptive_max_pool{n}d_with_indices") for n in (1, 2, 3)]
_ADAPTIVE_WITH_INDICES.append(torch.adaptive_max_pool1d)  # always returns both


@handles(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d, *_ADAPTIVE_WITH_INDICES)
def adaptive_max_pool(
    func: TorchFunction, x: ShardTensor, output_size: int | Sequence[int | None] | None, return_indices: bool = False
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Maximum of windows that divide each dim evenly; the first of equal elements counts, the last NaN."""
    refuse_plain(func, x)
    spec, count = x.spec, spatial(func)
    extents, first = out_extents(x, output_size, count), spec.ndim - count
    with_indices = return_indices or func in _ADAPTIVE_WITH_INDICES
    result: Tensor = x
    places: Tensor | None = _places(x, first) if with_indices else None
    for d in reversed(range(first, spec.ndim)):  # the last first: each step keeps the first of equal ones
        if extents[d - first] != spec.global_shape[d]:
            result, places = _maximum(result, places, d, extents[d - first])
    result = x.clone() if result is x else result
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
        found, rows = extreme_along(x, dim, _last_missing, True, last_missing=True)
        if places is not None:
            own = as_sharded(places, x.spec).local
            group = x.spec.group(x.spec.sharded[dim])
            place = gather_from_owners(own, dim, local_of(rows), x.spec.offsets[dim], group)
            places = ShardTensor(place, rows.spec) if isinstance(rows, ShardTensor) else place
        return found, places
    values, extra, wrap = _spread(x, dim, num_out)
    _, index = _last_missing(values.detach(), dim + 1, True, extra)  # of equal ones the first, so never a filled one
    if places is not None:
        beside = _spread(places, dim, num_out)
        places = beside.wrap(beside.values.gather(dim + 1, index).squeeze(dim + 1))
    return wrap(values.gather(dim + 1, index).squeeze(dim + 1)), places


def _last_missing(x: Tensor, dim: int, keepdim: bool, extra: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the maximum along a dim and its index: the first of equal ones, but the last NaN outside ``extra``."""
    value, index = x.max(dim, keepdim=keepdim)
    missing = value.isnan()
    if missing.any():
        rows = torch.arange(x.shape[dim], device=x.device).view([-1 if d == dim else 1 for d in range(x.ndim)])
        hits = x.isnan() if extra is None else x.isnan() & ~extra
        index = torch.where(missing, (hits * rows).amax(dim, keepdim=keepdim), index)
    return value, index


# -- the way back --------------------------------------------------------------------------------------------------


@handles(F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)
def max_unpool(
    func: TorchFunction, x: ShardTensor, indices: Tensor, kernel_size: Extents, stride: Extents | None = None,
    padding: Extents = 0, output_size: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Put values at their indices, zeros elsewhere. Collective: values travel along the sharded spatial dims.

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
    shape[first:] = unpooled_extents(x, *placed(count, kernel_size, stride, padding), output_size)
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


@handles(*[getattr(F, f"fractional_max_pool{n}{suffix}") for n in ("2d", "3d") for suffix in ("", "_with_indices")])
def fractional_max_pool(
    func: TorchFunction, x: ShardTensor, kernel_size: Extents, output_size: Extents | None = None,
    output_ratio: float | Sequence[float] | None = None, return_indices: bool = False,
    _random_samples: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Maximum of windows whose places are drawn for each channel, on whole channels meanwhile. Collective."""
    refuse_plain(func, x)
    count, spec = spatial(func), x.spec
    first = spec.ndim - count
    lead = (1, *spec.global_shape[:1]) if first == 1 else spec.global_shape[:2]
    samples = _random_samples
    if samples is None:
        samples = torch.rand(*lead, count, dtype=x.dtype, device=x.device)
    dims = range(first, spec.ndim)
    whole = moved_off(x, dims)
    places = [None if d is None else d + 2 - first for d in whole.spec.dims]
    own = to_layout(as_sharded(samples, spec), spec.derive(samples.shape, places, whole.spec.sizes))
    local = without_empty(whole.local, whole.spec)
    pool = _FRACTIONAL[count - 2]
    found = pool(local, kernel_size, output_size, output_ratio, _random_samples=without_empty(own.local, own.spec))
    new = whole.spec.derive((*spec.global_shape[:first], *found[0].shape[first:]), whole.spec.dims, whole.spec.sizes)
    results = [moved_back(ShardTensor(cut_to(part, new), new), dims, spec) for part in found]
    finished = [finish(part.local, part.spec) for part in results]
    return (finished[0], finished[1]) if return_indices or "indices" in func.__name__ else finished[0]
