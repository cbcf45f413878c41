"""Interpolation, and pixels moved between channels and space.

Along a dim every mode is a sum of one, two or four input rows with weights that torch's kernels compute from the whole
extent. Along sharded dims those rows are fetched and summed here; the other dims are left to torch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import bind, finish, is_sharded, refuse_plain
from scidata.shard.ops.moving import as_sharded, cut_to, moved_off, there_and_back, without_empty
from scidata.shard.ops.pooling import adaptive_average
from scidata.shard.ops.sliding import Middle, Windows
from scidata.shard.rows.runs import Runs
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import kernels

_AREA = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_NUM_SPATIAL = {"linear": (1,), "bilinear": (2,), "trilinear": (3,), "bicubic": (2,)}
_CUBIC = -0.75  # torch's


def _nearest_rows(
    extent: int, num_out: int, scale: float | None, mode: str, count: int, device: torch.device
) -> Tensor:
    """Ask torch's own kernel, whose rounding is in float32 and differs with the number of dims, what it copies."""
    rows = torch.arange(extent, dtype=torch.float64, device=device).view(1, 1, extent, *[1] * (count - 1))
    ones = [1] * (count - 1)
    how: dict[str, Any] = {"size": [num_out, *ones]} if scale is None else {"scale_factor": [scale, *map(float, ones)]}
    return F.interpolate(rows, mode=mode, **how).view(-1, 1).long()


def _near(distance: Tensor) -> Tensor:
    return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1


def _far(distance: Tensor) -> Tensor:
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC


@lru_cache(maxsize=512)
def _taps(
    extent: int,
    num_out: int,
    scale: float | None,
    mode: str,
    align: bool,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Return the rows that each output row is made of, ``(num_out, taps)`` int64, and their weights; None is one."""
    if mode.startswith("nearest"):
        return _nearest_rows(extent, num_out, scale, mode, count, device), None
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # what torch's kernels compute places in
    rows = torch.arange(num_out, dtype=wide, device=device)
    if num_out == extent and mode != "bicubic":
        place = rows  # whatever the scale: so do torch's kernels
    elif align:
        place = rows * torch.tensor((extent - 1) / (num_out - 1) if num_out > 1 else 0.0, dtype=wide)
    else:
        step = torch.tensor(extent / num_out if scale is None else 1.0 / scale, dtype=wide)
        place = (rows + 0.5) * step - 0.5
    if mode == "bicubic":
        first = place.floor().clamp(max=extent - 1)
        t = (place - first).clamp(0, 1)
        weights = torch.stack([_far(t + 1), _near(t), _near(1 - t), _far(2 - t)], 1)
        taps = first.long()[:, None] + torch.arange(-1, 3, device=device)
        return taps.clamp(0, extent - 1), weights.to(dtype)
    place = place.clamp(min=0)
    low = place.long().clamp(max=extent - 1)
    t = (place - low).clamp(0, 1)
    return torch.stack([low, (low + 1).clamp(max=extent - 1)], 1), torch.stack([1 - t, t], 1).to(dtype)


def _combined(local: Tensor, dim: int, taps: Tensor, weights: Tensor | None) -> Tensor:
    """Sum weighted rows along a dim."""
    if weights is None:
        return local.index_select(dim, taps[:, 0])
    shape = [-1 if d == dim else 1 for d in range(local.ndim)]
    columns = list(zip(taps.unbind(1), weights.unbind(1), strict=True))
    total = local.index_select(dim, columns[0][0]) * columns[0][1].view(shape)
    for rows, weight in columns[1:]:
        total = total + local.index_select(dim, rows) * weight.view(shape)
    return total


def _extents(
    x: ShardTensor, size: Any, factor: Any, recompute: Any, count: int
) -> tuple[list[int], list[float] | None]:
    """Return the output extents, and the scale factors where the kernels use them instead of the extents' ratio."""
    extents = x.spec.global_shape[2:]
    if (size is None) == (factor is None):
        raise ValueError("give one of size and scale_factor")
    if size is not None:
        sizes = [int(n) for n in size] if isinstance(size, list | tuple) else [int(size)] * count
        if len(sizes) != count:
            raise ValueError(f"size {size} does not have one number for each of {count} spatial dims")
        return sizes, None
    factors = [float(f) for f in factor] if isinstance(factor, list | tuple) else [float(factor)] * count
    if len(factors) != count:
        raise ValueError(f"scale_factor {factor} does not have one number for each of {count} spatial dims")
    return [math.floor(n * f) for n, f in zip(extents, factors, strict=True)], None if recompute else factors


@register_op(F.interpolate)
def interpolate(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Resample the spatial dims."""
    names = "input size scale_factor mode align_corners recompute_scale_factor antialias"
    given = bind(names, args, kwargs, size=None, scale_factor=None, mode="nearest", align_corners=None)
    x, mode, align = given["input"], given["mode"], bool(given["align_corners"])
    refuse_plain(func, x)
    spec, count = x.spec, x.spec.ndim - 2
    if given.get("antialias"):
        rest = {name: value for name, value in given.items() if name != "input"}
        return _antialiased(x, lambda part: F.interpolate(part, **rest))
    recompute = given.get("recompute_scale_factor") or mode == "area"
    sizes, factors = _extents(x, given["size"], given["scale_factor"], recompute, count)
    if min(sizes, default=0) < 1:
        raise RuntimeError(f"interpolate: input {spec.global_shape[2:]} gives no rows: {sizes}")
    if mode == "area":
        return adaptive_average(func, x, sizes, _AREA[count - 1])
    allowed = _NUM_SPATIAL.get(mode, (1, 2, 3) if mode in ("nearest", "nearest-exact") else ())
    if count not in allowed:
        raise NotImplementedError(f"interpolate: mode {mode!r} with {count} spatial dims")
    if not x.local.is_floating_point() and not mode.startswith("nearest"):
        raise unsupported(func, f"mode {mode!r} of {x.local.dtype}", spec, remedy="convert to a floating dtype first")
    return _resample(x, sizes, factors, mode, align, given["align_corners"])


@register_op(*kernels("_upsample_bilinear2d_aa", "default", "vec"))
def upsample_antialiased(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Do as ``F.interpolate`` with ``antialias=True``."""
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("self", None) or kwargs.pop("input"), ())
    return _antialiased(x, lambda part: func(part, *rest, **kwargs))


def _antialiased(x: ShardTensor, resample: Callable[[Tensor], Tensor]) -> Tensor:
    """Resample by filters that are as wide as the factor. Collective where the spatial dims are sharded."""
    dims = range(2, x.spec.ndim)
    if any(d in x.spec.sharded for d in dims):
        return there_and_back(x, dims, lambda moved: _antialiased(as_sharded(moved, x.spec), resample))
    part = resample(without_empty(x.local, x.spec))
    spec = x.spec.derive((*x.spec.global_shape[:2], *part.shape[2:]), x.spec.dims, x.spec.sizes)
    return finish(cut_to(part, spec), spec)


def _resample(
    x: ShardTensor, sizes: Sequence[int], factors: Sequence[float] | None, mode: str, align: bool, given: bool | None
) -> Tensor:
    spec, windows, sums = x.spec, Windows(x), []
    windows.keep([d for d in range(spec.ndim) if d < 2 or sizes[d - 2] == spec.global_shape[d]])
    for s, num_out in enumerate(sizes):
        d, extent = 2 + s, spec.global_shape[2 + s]
        windows.shape[d] = num_out
        if d not in spec.sharded or (num_out == extent and (factors is None or factors[s] == 1)):
            continue
        scale = None if factors is None else factors[s]
        taps, weights = _taps(extent, num_out, scale, mode, align, len(sizes), x.local.dtype, x.local.device)
        first, last = taps.amin(1).tolist(), taps.amax(1).tolist()

        def rows(start: int, stop: int, first: list[int] = first, last: list[int] = last) -> Runs:
            low, high = min(first[start:stop]), max(last[start:stop])
            return ((low, high + 1 - low),)

        start, count = windows.slide(d, num_out, Middle(2 * extent, extent, 2 * num_out), rows, 1)
        own = slice(start, start + count) if count else slice(0, 1)
        low = min(first[own]) if count else taps[own]
        sums.append((d, taps[own] - low, None if weights is None else weights[own]))
    local = windows.fetch()
    for d, own_taps, own_weights in sums:
        local = _combined(local, d, own_taps, own_weights)
    rest = [d for d in range(2, spec.ndim) if d not in spec.sharded]
    if any(windows.shape[d] != spec.global_shape[d] or (factors and factors[d - 2] != 1) for d in rest):
        how: dict[str, Any] = {"mode": mode, "align_corners": given}
        if factors is None:
            how["size"] = [sizes[d - 2] if d in rest else local.shape[d] for d in range(2, spec.ndim)]
        else:
            how["scale_factor"] = [factors[d - 2] if d in rest else 1.0 for d in range(2, spec.ndim)]
        local = F.interpolate(local, **how)
    return windows.finish(local)


# -- channels to pixels and back ------------------------------------------------------------------------------------


@register_op(F.pixel_shuffle, F.pixel_unshuffle)
def pixel_shuffle(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Move groups of channels to blocks of pixels, or back; where channels are sharded, another dim is instead."""
    up = func is F.pixel_shuffle
    given = bind("input upscale_factor" if up else "input downscale_factor", args, kwargs)
    x, factor = given["input"], int(given["upscale_factor" if up else "downscale_factor"])
    if x.spec.ndim - 3 in x.spec.sharded:
        x = moved_off(x, [x.spec.ndim - 3])
    if not is_sharded(x):
        return func(x.local, factor)  # type: ignore[no-any-return]
    spec = x.spec
    windows, own = Windows(x), {}
    windows.keep(range(spec.ndim - 3))
    for d in (spec.ndim - 2, spec.ndim - 1):
        extent = spec.global_shape[d]
        windows.shape[d] = extent * factor if up else extent // factor
        if d not in spec.sharded:
            continue
        if not up and extent % factor:
            raise RuntimeError(f"pixel_unshuffle: {extent} rows are no multiple of {factor}")
        if up:
            rows = lambda start, stop: ((start // factor, -(-stop // factor) - start // factor),)  # noqa: E731
            start, count = windows.slide(d, extent * factor, Middle(over=factor), rows, 1)
            own[d] = start % factor, count
        else:
            rows = lambda start, stop: ((start * factor, (stop - start) * factor),)  # noqa: E731
            windows.slide(d, extent // factor, Middle(factor, (factor - 1) // 2), rows, factor)
    result = func(windows.fetch(), factor)
    for d, (start, count) in own.items():
        result = result.narrow(d, start, count) if count else result
    return windows.finish(result, channels=spec.ndim - 3)
