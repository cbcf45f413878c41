"""Convolution and its transpose on any layout; channels are made whole first.

Each rank convolves the rows under its own outputs (``sliding`` says which those are), with the padding of sharded dims
fetched as filled rows, so every kernel stays torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import register_op
from scidata.shard.ops.align import align_parameters, bind, is_sharded, refuse_plain
from scidata.shard.ops.moving import moved_off
from scidata.shard.ops.sliding import Middle, Windows, check_rows, per_dim, under
from scidata.shard.rows.runs import FILLED, Runs
from scidata.shard.tensor import ShardTensor


def _spatial(func: Any, x: ShardTensor, weight: Tensor) -> tuple[ShardTensor, int, int]:
    """Return the input with its channels whole, the number of spatial dims and the first of them.

    Where channels are sharded another dim is instead, by one exchange. Collective then.
    """
    count = len(weight.shape) - 2
    first = x.spec.ndim - count
    if first not in (1, 2):
        raise RuntimeError(f"{func.__name__}: {x.spec.ndim} dims do not fit a weight of shape {tuple(weight.shape)}")
    return moved_off(x, [first - 1]) if first - 1 in x.spec.sharded else x, count, first


def _paddings(padding: Any, reach: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows below and above each spatial dim; "same" puts the odd one above, as torch does."""
    if padding == "same":
        if any(s != 1 for s in stride):
            raise RuntimeError("padding='same' is not supported for strided convolutions")
        return [((r - 1) // 2, r - 1 - (r - 1) // 2) for r in reach]
    widths = (0,) * len(reach) if padding == "valid" else per_dim(padding, len(reach))
    return [(p, p) for p in widths]


@register_op(F.conv1d, F.conv2d, F.conv3d)
def conv(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Convolve; rows are exchanged where a kernel reaches over a bound and the halo that is held is too narrow."""
    names = "input weight bias stride padding dilation groups"
    given = bind(names, args, kwargs, bias=None, stride=1, padding=0, dilation=1, groups=1)
    x, weight = given["input"], given["weight"]
    refuse_plain(func, x, weight)
    x, count, first = _spatial(func, x, weight)
    if not is_sharded(x):
        return func(**{**given, "input": x.local})  # type: ignore[no-any-return]
    spec = x.spec
    stride, dilation = per_dim(given["stride"], count), per_dim(given["dilation"], count)
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True))
    windows, left = Windows(x), [0] * count
    windows.keep(range(first))
    for s, (below, above) in enumerate(_paddings(given["padding"], reach, stride)):
        d = first + s
        extent = spec.global_shape[d]
        num_out = (extent + below + above - reach[s]) // stride[s] + 1
        check_rows(func, num_out, extent, spec)
        if d not in spec.sharded and below == above:
            left[s] = below  # torch's own
            windows.shape[d] = num_out
            continue
        middle = Middle(times=stride[s], plus=(reach[s] - 1) // 2 - below)
        windows.slide(d, num_out, middle, under(stride[s], below, reach[s], extent), reach[s])
    given["weight"], given["bias"] = align_parameters(func, x, weight, given["bias"])
    result = func(**{**given, "input": windows.fetch(), "padding": tuple(left)})
    return windows.finish(result, channels=first - 1)


def reached(stride: int, padding: int, reach: int, extent: int, place: dict[int, int]) -> Callable[[int, int], Runs]:
    """Return the input rows that reach outputs ``[start, stop)`` of a transposed convolution.

    Filled rows are added at both ends until the rows' outputs cover the interval; where these begin is put in
    ``place``, by ``start``.
    """

    def rows(start: int, stop: int) -> Runs:
        begin, end = start + padding, stop - 1 + padding  # in outputs before they are cropped
        low = min(-(-(begin - reach + 1) // stride), begin // stride)
        high = max(end // stride, -(-(end - reach + 1) // stride))
        place[start] = low * stride - padding
        needed = range(max(0, -(-(begin - reach + 1) // stride)), min(extent - 1, end // stride) + 1)
        if not needed:
            return ((FILLED, high - low + 1),)
        runs = (FILLED, needed.start - low), (needed.start, len(needed)), (FILLED, high + 1 - needed.stop)
        return tuple(run for run in runs if run[1])

    return rows


@register_op(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Transposed convolution: each rank computes its own outputs from the rows that reach them."""
    names = "input weight bias stride padding output_padding groups dilation"
    given = bind(names, args, kwargs, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)
    x, weight = given["input"], given["weight"]
    refuse_plain(func, x, weight)
    x, count, first = _spatial(func, x, weight)
    if not is_sharded(x):
        return func(**{**given, "input": x.local})  # type: ignore[no-any-return]
    spec = x.spec
    stride, dilation, padding, extra = (
        per_dim(given[name], count) for name in ("stride", "dilation", "padding", "output_padding")
    )
    windows, own, left, left_extra = Windows(x), {}, list(padding), list(extra)
    windows.keep(range(first))
    for s in range(count):
        d = first + s
        extent, reach = spec.global_shape[d], dilation[s] * (weight.shape[2 + s] - 1) + 1
        num_out = (extent - 1) * stride[s] - 2 * padding[s] + reach + extra[s]
        check_rows(func, num_out, extent, spec)
        if extra[s] >= max(stride[s], dilation[s]):
            raise RuntimeError(f"output padding {extra[s]} must be smaller than stride {stride[s]} or dilation")
        if d not in spec.sharded:
            windows.shape[d] = num_out
            continue
        place: dict[int, int] = {}
        middle = Middle(plus=padding[s] - (reach - 1) // 2, over=stride[s])
        start, rows = windows.slide(d, num_out, middle, reached(stride[s], padding[s], reach, extent, place), 1)
        own[d] = (start - place[start], rows) if rows else (0, 0)
        left[s] = left_extra[s] = 0
    given["weight"], given["bias"] = align_parameters(func, x, weight, given["bias"])
    given |= {"input": windows.fetch(), "padding": tuple(left), "output_padding": tuple(left_extra)}
    result = func(**given)
    for d, (begin, rows) in own.items():
        result = result.narrow(d, begin, rows)
    return windows.finish(result, channels=first - 1)
