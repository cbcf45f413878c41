"""Interpolation, and pixels moved between channels and space.

Along a dim every mode is a sum of one, two or four input rows with weights that torch's kernels compute from the whole
extent. Along sharded dims those rows are fetched and summed here; the other dims are left to torch's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.operators import is_capturing
from scidata.shard.op_table import TensorFunction, unsupported
from scidata.shard.ops.align import apart, finish, refuse_plain
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import as_sharded, cut_to, there_and_back, without_empty
from scidata.shard.ops.pooling import adaptive_average
from scidata.shard.ops.sliding import Middle, Windows
from scidata.shard.rows.runs import Runs
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import inferring, kernels

_AREA = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_NUM_SPATIAL = {"linear": (1,), "bilinear": (2,), "trilinear": (3,), "bicubic": (2,)}
_CUBIC = -0.75  # torch's


def _nearest_rows(
    extent: int, num_out: int, scale: float | None, mode: str, count: int, device: torch.device
) -> Tensor:
    """Return the row that torch copies to each output row: its own kernel rounds in float32, by the number of dims."""
    rows = torch.arange(extent, dtype=torch.float64, device=device).view(1, 1, extent, *[1] * (count - 1))
    ones = [1] * (count - 1)
    factors = None if scale is None else [scale, *map(float, ones)]
    return F.interpolate(rows, None if factors else [num_out, *ones], factors, mode).view(-1, 1).long()


def _near(distance: Tensor) -> Tensor:
    return ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1


def _far(distance: Tensor) -> Tensor:
    return ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC


_Make: TypeAlias = Callable[[], tuple[Tensor, Tensor | None]]


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
    """Return the input rows of each output row, ``(num_out, taps)`` int64, and their weights; None for weight one.

    Linear, from 2 rows to 4: outputs lie at -0.25, 0.25, 0.75 and 1.25 between rows 0 and 1. So their rows are (0, 1),
    their weights (1, 0), (0.75, 0.25), (0.25, 0.75); the last is row 1 alone.
    """
    if mode.startswith("nearest"):
        return _nearest_rows(extent, num_out, scale, mode, count, device), None
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # torch's kernels compute places in it
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


def _own_taps(make: _Make, start: int, count: int) -> tuple[Tensor, Tensor | None]:
    """Return the taps of a rank's outputs, from its first fetched row on, and their weights."""
    taps, weights = make()
    own = slice(start, start + count) if count else slice(0, 1)  # a rank without outputs computes one on a filled row
    low = taps[own].amin() if count else taps[own]
    return taps[own] - low, None if weights is None else weights[own]


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


@handles(F.interpolate)
def interpolate(
    func: TensorFunction,
    x: ShardTensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Resample the spatial dims."""
    refuse_plain(func, x)
    spec, count = x.spec, x.spec.ndim - 2
    given = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    if antialias:
        return _antialiased(x, lambda part: F.interpolate(part, *given))
    if not x.local.is_floating_point() and not mode.startswith("nearest"):
        raise unsupported(func, f"mode {mode!r} of {x.local.dtype}", spec, remedy="convert to a floating dtype first")
    allowed = _NUM_SPATIAL.get(mode, (1, 2, 3) if mode in ("nearest", "nearest-exact", "area") else ())
    if count not in allowed:
        raise NotImplementedError(f"interpolate: mode {mode!r} with {count} spatial dims")
    with inferring(fake=False):  # torch raises where something does not fit; of other modes it infers slowly
        like = torch.empty((1, 1, *spec.global_shape[2:]), device="meta")  # its inference fails for no samples
        sizes = F.interpolate(like, size, scale_factor, recompute_scale_factor=recompute_scale_factor).shape[2:]
    if mode == "area":
        return adaptive_average(x, sizes, _AREA[count - 1])
    factors = None
    if scale_factor is not None and not recompute_scale_factor:  # the kernels use them, not the extents' ratio
        factors = [float(f) for f in (scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * count)]
    return _resample(x, sizes, factors, mode, align_corners)


@handles(*kernels("_upsample_bilinear2d_aa", "default", "vec"))
def upsample_antialiased(func: TensorFunction, x: ShardTensor, *args: object, **kwargs: object) -> Tensor:
    """Do as ``F.interpolate`` with ``antialias=True``."""
    return _antialiased(x, lambda part: func(part, *args, **kwargs))


def _antialiased(x: ShardTensor, resample: Callable[[Tensor], Tensor]) -> Tensor:
    """Resample by filters as wide as the factor. Collective if the spatial dims are sharded."""
    dims = range(2, x.spec.ndim)
    if any(d in x.spec.sharded for d in dims):
        return there_and_back(x, dims, lambda moved: _antialiased(as_sharded(moved, x.spec), resample))
    part = resample(without_empty(x.local, x.spec))
    spec = x.spec.derive((*x.spec.global_shape[:2], *part.shape[2:]), x.spec.dims, x.spec.sizes)
    return finish(cut_to(part, spec), spec)


def _resample(
    x: ShardTensor, sizes: Sequence[int], factors: Sequence[float] | None, mode: str, align_corners: bool | None
) -> Tensor:
    spec, windows, sums = x.spec, Windows(x.spec), []
    kept = [n == extent and f != 1 for n, extent, f in zip(sizes, spec.global_shape[2:], factors or (), strict=False)]
    if any(kept) and is_capturing():  # where its kernel copies
        raise unsupported(F.interpolate, "torch's compiler resamples by a scale that leaves an extent as it is", spec)
    windows.keep([d for d in range(spec.ndim) if d < 2 or sizes[d - 2] == spec.global_shape[d]])
    for s, num_out in enumerate(sizes):
        d, extent = 2 + s, spec.global_shape[2 + s]
        windows.shape[d] = num_out
        if d not in spec.sharded or (num_out == extent and (factors is None or factors[s] == 1)):
            continue
        scale = None if factors is None else factors[s]
        how = mode, bool(align_corners), len(sizes), x.local.dtype, x.local.device
        make = partial(_taps, extent, num_out, scale, *how)

        def rows(start: int, stop: int, make: _Make = make) -> Runs:
            low, high = make()[0][start:stop].aminmax()
            return ((int(low), int(high - low) + 1),)

        middle, key = Middle(2 * extent, extent, 2 * num_out), ("taps", scale, *how)
        start, count = windows.slide(d, num_out, middle, rows, 1, key)
        own = spec.plans.get_or_make((d, num_out, *key), partial(_own_taps, make, start, count))
        sums.append((d, *own))
    local = windows.fetch(x)
    for d, own_taps, own_weights in sums:
        local = _combined(local, d, own_taps, own_weights)
    rest = [d for d in range(2, spec.ndim) if d not in spec.sharded]
    if any(windows.shape[d] != spec.global_shape[d] or (factors and factors[d - 2] != 1) for d in rest):
        dims = range(2, spec.ndim)
        size = [sizes[d - 2] if d in rest else local.shape[d] for d in dims] if factors is None else None
        scales = None if factors is None else [factors[d - 2] if d in rest else 1.0 for d in dims]
        local = F.interpolate(local, size, scales, mode, align_corners)
    return apart(windows.finish(local), x)  # of the same extents nothing is fetched


@handles(F.pixel_shuffle, F.pixel_unshuffle)
def move_pixels(func: TensorFunction, x: ShardTensor, *given: int, **named: int) -> Tensor:
    """Move groups of channels to blocks of pixels, or back."""
    (r,) = (*given, *named.values())
    *batch, channels, rows, columns = x.spec.global_shape
    n = len(batch)
    if func is F.pixel_shuffle:
        blocks, order = x.reshape(*batch, channels // r**2, r, r, rows, columns), (n + 3, n + 1, n + 4, n + 2)
        shape = channels // r**2, rows * r, columns * r
    else:
        blocks, order = x.reshape(*batch, channels, rows // r, r, columns // r, r), (n + 2, n + 4, n + 1, n + 3)
        shape = channels * r**2, rows // r, columns // r
    return apart(blocks.permute(*range(n + 1), *order).reshape(*batch, *shape), x)
