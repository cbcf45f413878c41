"""Convolution and its transpose on any layout; channels are made whole first.

Each rank convolves the rows under its own outputs (``sliding`` says which those are), with the padding of sharded dims
fetched as filled rows, so every kernel stays torch's own.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import TensorFunction, TorchFunction
from scidata.shard.ops.align import align_parameters, is_sharded, refuse_plain
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moving import moved_off
from scidata.shard.ops.sliding import Extents, Windows, per_dim
from scidata.shard.tensor import ShardTensor


def _spatial(func: TorchFunction, x: ShardTensor, weight: Tensor) -> tuple[ShardTensor, int, int]:
    """Return the input with its channels whole, the number of spatial dims and the first of them.

    Where channels are sharded another dim is instead, by one exchange. Collective then.
    """
    refuse_plain(func, x, weight)
    count = len(weight.shape) - 2
    first = x.spec.ndim - count
    if first not in (1, 2):
        raise RuntimeError(f"{func.__name__}: {x.spec.ndim} dims do not fit a weight of shape {tuple(weight.shape)}")
    return moved_off(x, [first - 1]) if first - 1 in x.spec.sharded else x, count, first


def _paddings(padding: Extents | str, reach: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the rows below and above each spatial dim; "same" puts the odd one above, as torch does."""
    if padding == "same":
        if any(s != 1 for s in stride):
            raise RuntimeError("padding='same' is not supported for strided convolutions")
        return [((r - 1) // 2, r - 1 - (r - 1) // 2) for r in reach]
    widths = (0,) * len(reach) if isinstance(padding, str) else per_dim(padding, len(reach))
    return [(p, p) for p in widths]


@handles(F.conv1d, F.conv2d, F.conv3d)
def conv(
    func: TensorFunction,
    x: ShardTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extents = 1,
    padding: Extents | str = 0,
    dilation: Extents = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve; exchange rows if a kernel crosses a bound and the held halo is too narrow."""
    x, count, first = _spatial(func, x, weight)
    if not is_sharded(x):
        return func(x.local, weight, bias, stride, padding, dilation, groups)
    spec, stride, dilation = x.spec, per_dim(stride, count), per_dim(dilation, count)
    padding = padding if isinstance(padding, str) else per_dim(padding, count)

    def make() -> tuple[Windows, tuple[int, ...]]:
        reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True))
        windows, left = Windows(spec), [0] * count
        windows.keep(range(first))
        windows.shape[first - 1] = weight.shape[0]
        for s, (below, above) in enumerate(_paddings(padding, reach, stride)):
            num_out = (spec.global_shape[first + s] + below + above - reach[s]) // stride[s] + 1
            if not windows.resize(func, first + s, num_out) and below == above:
                left[s] = below  # torch's own
            else:
                windows.slide_under(first + s, num_out, reach[s], stride[s], below)
        return windows, tuple(left)

    key = "conv", weight.shape, stride, padding, dilation
    planned: tuple[Windows, tuple[int, ...]] = spec.plans.get_or_make(key, make)
    windows, left = planned
    return windows.finish(func(windows.fetch(x), *align_parameters(x, weight, bias), stride, left, dilation, groups))


@handles(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose(
    func: TensorFunction,
    x: ShardTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extents = 1,
    padding: Extents = 0,
    output_padding: Extents = 0,
    groups: int = 1,
    dilation: Extents = 1,
) -> Tensor:
    """Transposed convolution: each rank computes its own outputs from the rows that reach them."""
    x, count, first = _spatial(func, x, weight)
    if not is_sharded(x):
        return func(x.local, weight, bias, stride, padding, output_padding, groups, dilation)
    spec, stride, dilation = x.spec, per_dim(stride, count), per_dim(dilation, count)
    paddings = per_dim(padding, count), per_dim(output_padding, count)

    def make() -> tuple[Windows, tuple[int, ...], tuple[int, ...]]:
        windows, left, extra = Windows(spec), *map(list, paddings)
        windows.keep(range(first))
        windows.shape[first - 1] = weight.shape[1] * groups
        for s in range(count):
            reach = dilation[s] * (weight.shape[2 + s] - 1) + 1
            num_out = (spec.global_shape[first + s] - 1) * stride[s] - 2 * left[s] + reach + extra[s]
            is_split = windows.resize(func, first + s, num_out)
            if extra[s] >= max(stride[s], dilation[s]):
                raise RuntimeError(f"output padding {extra[s]} must be smaller than stride {stride[s]} or dilation")
            if is_split:
                windows.slide_back(first + s, num_out, reach, stride[s], left[s])
                left[s] = extra[s] = 0
        return windows, tuple(left), tuple(extra)

    key = "conv transposed", weight.shape, stride, paddings, dilation, groups
    planned: tuple[Windows, tuple[int, ...], tuple[int, ...]] = spec.plans.get_or_make(key, make)
    windows, left, extra = planned
    result = func(windows.fetch(x), *align_parameters(x, weight, bias), stride, left, extra, groups, dilation)
    return windows.finish(result)
