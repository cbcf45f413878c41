"""Windows as elements: ``Tensor.unfold``, image to columns and back, normalisation over neighbouring channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import bind, finish, refuse_out, refuse_plain, specs_of
from scidata.shard.ops.arguments import normal_dim
from scidata.shard.ops.conv import reached
from scidata.shard.ops.moving import moved_off
from scidata.shard.ops.shapes import derived
from scidata.shard.ops.sliding import Middle, Windows, check_rows, per_dim, under
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import shares_memory
from scidata.shard.views import Copy


@register_op(Tensor.unfold, torch.unfold_copy)
def unfold(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Lay the windows of a dim along a new last dim; rows are exchanged where a window reaches over a bound."""
    given = bind("input dimension size step", args, kwargs)
    refuse_out(func, kwargs, *specs_of(args))
    if func is not Tensor.unfold:
        view: Tensor = given["input"].unfold(given["dimension"], given["size"], given["step"])
        return view.clone(memory_format=torch.contiguous_format)
    x, size, step = given["input"], int(given["size"]), int(given["step"])
    spec, dim = x.spec, normal_dim(given["dimension"], x.spec.ndim)
    extent = spec.global_shape[dim]
    if not 0 <= size <= extent or step <= 0:
        raise RuntimeError(f"unfold: windows of {size} rows with step {step} do not fit dim {dim} of size {extent}")
    num_out = (extent - size) // step + 1
    if dim not in spec.sharded:
        shape = [*spec.global_shape[:dim], num_out, *spec.global_shape[dim + 1 :], size]
        return derived(x, x.local.unfold(dim, size, step), spec.derive(shape, spec.dims, spec.sizes))
    if size == 0:
        raise unsupported(func, "windows of no rows", spec)
    windows = Windows(x)
    windows.slide(dim, num_out, Middle(times=step, plus=(size - 1) // 2), under(step, 0, size, extent), size)
    windows.shape.append(size)

    def take() -> Tensor:
        local = windows.fetch().unfold(dim, size, step)
        local = local.clone() if shares_memory(local, x.local) else local
        for empty in windows.empty:
            local = local.narrow(empty, 0, 0)
        return local

    local = take()
    return ShardTensor(local, spec.resize(windows.shape, windows.sizes), copied=Copy(x, local, take))


# -- columns -------------------------------------------------------------------------------------------------------


def _settings(given: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return kernel, dilation, padding and stride of both spatial dims."""
    return tuple(per_dim(given[name], 2) for name in ("kernel_size", "dilation", "padding", "stride"))


def _apart(x: Tensor) -> Tensor:
    """Return a tensor just made as one of its own: no copy of what it was reshaped from."""
    return finish(x.local, x.spec) if isinstance(x, ShardTensor) else x


def _batched(func: Any, x: Tensor, ndim: int) -> Any:
    if len(x.shape) not in (ndim - 1, ndim):
        raise RuntimeError(f"{func.__name__}: expected {ndim - 1} or {ndim} dims, but got {tuple(x.shape)}")
    return x if len(x.shape) == ndim else x[None]


@register_op(F.unfold)
def to_columns(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Lay the blocks under a kernel side by side as columns."""
    names = "input kernel_size dilation padding stride"
    given = bind(names, args, kwargs, dilation=1, padding=0, stride=1)
    refuse_plain(func, given["input"])
    kernel, dilation, padding, stride = _settings(given)
    x = _batched(func, given["input"], 4)
    spec, windows, left = x.spec, Windows(x), list(padding)
    windows.keep(range(2))
    for s in range(2):
        d, reach = 2 + s, dilation[s] * (kernel[s] - 1) + 1
        extent = spec.global_shape[d]
        num_out = (extent + 2 * padding[s] - reach) // stride[s] + 1
        check_rows(func, num_out, extent, spec)
        windows.shape[d] = num_out
        if d in spec.sharded:
            middle = Middle(times=stride[s], plus=(reach - 1) // 2 - padding[s])
            windows.slide(d, num_out, middle, under(stride[s], padding[s], reach, extent), reach)
            left[s] = 0
    local = windows.fetch()
    rows = [(local.shape[2 + s] + 2 * left[s] - dilation[s] * (kernel[s] - 1) - 1) // stride[s] + 1 for s in range(2)]
    columns = F.unfold(local, kernel, dilation, tuple(left), stride)
    blocks = columns.view(*local.shape[:2], math.prod(kernel), *rows).movedim(2, 4)
    for d in windows.empty:
        blocks = blocks.narrow(d, 0, 0)
    shape = [*windows.shape, math.prod(kernel)]
    result: Any = ShardTensor(blocks, spec.resize(shape, windows.sizes)).movedim(4, 2).flatten(3, 4).flatten(1, 2)
    return _apart(result if len(given["input"].shape) == 4 else result[0])


@register_op(F.fold)
def from_columns(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Add columns up where their blocks lie: each rank its own pixels, from the blocks that reach them."""
    names = "input output_size kernel_size dilation padding stride"
    given = bind(names, args, kwargs, dilation=1, padding=0, stride=1)
    refuse_plain(func, given["input"])
    kernel, dilation, padding, stride = _settings(given)
    x, extents = _batched(func, given["input"], 3), per_dim(given["output_size"], 2)
    reach = [dilation[s] * (kernel[s] - 1) + 1 for s in range(2)]
    rows = [(extents[s] + 2 * padding[s] - reach[s]) // stride[s] + 1 for s in range(2)]
    if x.shape[2] != math.prod(rows) or min(rows) < 1 or x.shape[1] % math.prod(kernel):
        raise RuntimeError(f"fold: {tuple(x.shape)} does not fit blocks {tuple(rows)} of a kernel {kernel}")
    blocks = x.reshape(x.shape[0], x.shape[1] // math.prod(kernel), math.prod(kernel), *rows).movedim(2, 4)
    blocks = moved_off(blocks, [4]) if isinstance(blocks, ShardTensor) else blocks  # whole windows
    result: Any = _added_up(blocks, extents, kernel, dilation, padding, stride)
    return _apart(result if len(given["input"].shape) == 3 else result[0])


def _added_up(
    x: Any,
    extents: Sequence[int],
    kernel: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    """Fold blocks ``(samples, channels, rows, columns, kernel)``, of which the kernel is not sharded."""
    spec, windows, own = x.spec, Windows(x), {}
    windows.keep(range(2))
    covered, left = list(extents), list(padding)
    for s in range(2):
        d, reach = 2 + s, dilation[s] * (kernel[s] - 1) + 1
        windows.shape[d] = extents[s]
        if d not in spec.sharded:
            continue
        place: dict[int, int] = {}
        middle = Middle(plus=padding[s] - (reach - 1) // 2, over=stride[s])
        needed = reached(stride[s], padding[s], reach, spec.global_shape[d], place)
        start, count = windows.slide(d, extents[s], middle, needed, 1)
        own[d] = (start - place[start], count) if count else (0, 0)
        left[s] = 0
    local = windows.fetch()
    for s in range(2):
        if 2 + s in spec.sharded:
            covered[s] = (local.shape[2 + s] - 1) * stride[s] + dilation[s] * (kernel[s] - 1) + 1
    columns = local.movedim(4, 2).flatten(3, 4).flatten(1, 2)
    result = F.fold(columns, tuple(covered), kernel, dilation, tuple(left), stride)
    for d, (start, count) in own.items():
        result = result.narrow(d, start, count)
    for d in windows.empty:
        result = result.narrow(d, 0, 0)
    return finish(result, spec.derive(windows.shape[:4], spec.dims, windows.sizes))


# -- channels ------------------------------------------------------------------------------------------------------


@register_op(F.local_response_norm)
def local_response_norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Divide by the mean square of neighbouring channels."""
    given = bind("input size alpha beta k", args, kwargs, alpha=1e-4, beta=0.75, k=1.0)
    x, size = given["input"], given["size"]
    if len(x.shape) < 3:
        raise ValueError(f"expected 3 dims or more, but got {len(x.shape)}")
    if 1 not in x.spec.sharded and 0 not in x.spec.local_shape:
        return finish(func(x.local, size, given["alpha"], given["beta"], given["k"]), x.spec)
    around = [0, 0] * (len(x.shape) - 2) + [size // 2, (size - 1) // 2]
    squares: Any = F.pad(x * x, around).unfold(1, size, 1).mean(-1)
    result: Tensor = x / (squares * given["alpha"] + given["k"]) ** given["beta"]
    return result


@register_op(torch.channel_shuffle, F.native_channel_shuffle)
def channel_shuffle(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Take the channels of groups in turns."""
    given = bind("input groups", args, kwargs)
    x, groups = given["input"], int(given["groups"])
    channels = x.shape[1] if len(x.shape) > 2 else 0
    if groups <= 0 or len(x.shape) < 3 or channels % groups:
        raise RuntimeError(f"channel_shuffle: {groups} groups do not divide the channels of {tuple(x.shape)}")
    shuffled: Any = x.unflatten(1, (groups, channels // groups)).transpose(1, 2).flatten(1, 2)
    return _apart(shuffled)
