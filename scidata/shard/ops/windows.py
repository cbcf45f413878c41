"""Windows as elements: ``Tensor.unfold``, image to columns and back, normalisation over neighbouring channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.memory import strides_of
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.align import apart, finish, refuse_plain
from scidata.shard.ops.arguments import composes, handles, normal_dim
from scidata.shard.ops.moving import as_sharded, moved_off
from scidata.shard.ops.shapes import derived
from scidata.shard.ops.sliding import Extents, Windows, per_dim
from scidata.shard.spec import UNKNOWN, Strides
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import shares_memory
from scidata.shard.views import Copy

composes(
    {
        torch.unfold_copy: lambda input, *args, **named: input.unfold(*args, **named).clone(
            memory_format=torch.contiguous_format
        )
    }
)


@handles(Tensor.unfold)
def unfold(func: TensorFunction, x: ShardTensor, dimension: int, size: int, step: int) -> Tensor:
    """Lay the windows of a dim along a new last dim; exchange rows if a window crosses a bound."""
    spec, dim, size, step = x.spec, normal_dim(dimension, x.spec.ndim), int(size), int(step)
    extent = spec.global_shape[dim]
    if not 0 <= size <= extent or step <= 0:
        raise RuntimeError(f"unfold: windows of {size} rows with step {step} do not fit dim {dim} of size {extent}")
    num_out = (extent - size) // step + 1
    if dim not in spec.sharded:
        shape = [*spec.global_shape[:dim], num_out, *spec.global_shape[dim + 1 :], size]
        return derived(x, x.local.unfold(dim, size, step), spec.derive(shape, spec.dims, spec.sizes))
    if size == 0:
        raise unsupported(func, "windows of no rows", spec)
    windows = Windows(spec)
    windows.slide_under(dim, num_out, size, step)
    windows.shape.append(size)

    def take() -> Tensor:
        rows = windows.fetch(x)
        return rows.clone() if shares_memory(rows, x.local) else rows

    rows = take()  # windows are views of them: each row is brought up to date once
    return ShardTensor(windows.own(rows.unfold(dim, size, step)), windows.layout, copied=Copy(x, rows, take))


@handles("as_strided")
def as_strided(
    func: TorchFunction, input: ShardTensor, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:  # fmt: skip
    """Take elements by their places in memory, counted from the tensor's first, where its strides are known.

    A stride steps through the rows of a dim, or of dims that lie one after the other; two strides of one dim make
    windows, which are copies that cannot be written to. Collective where the dim is sharded.
    """
    if 0 in size:
        return input.reshape(-1)[:0].reshape(*size)
    runs = _runs_of(input.spec.global_shape, strides_of(input), size, stride) if storage_offset is None else None
    if runs is None:
        raise unsupported(
            func, "it takes elements at an offset, beside the tensor's own or in an unknown order", input.spec
        )
    shape, inner = input.spec.global_shape, [d for run in runs for d in run.dims]
    x: Tensor = input.permute(*inner, *(d for d in range(len(shape)) if d not in inner)).reshape([r.rows for r in runs])
    kept: list[int] = []  # the dim of the result that each dim of x is
    for dim, run in reversed(list(enumerate(runs))):
        if not run.taken:
            x = x.select(dim, 0)
            continue
        taken, at = sorted(run.taken, key=lambda each: -each[1]), dim
        for i, (d, far) in enumerate(taken[:-1]):
            reach = sum((size[e] - 1) * near for e, near in taken[i + 1 :]) + 1
            x, at = x.narrow(at, 0, (size[d] - 1) * far + reach).unfold(at, reach, far), x.ndim
        last, step = taken[-1]
        x = x[(slice(None),) * at + (slice(0, (size[last] - 1) * step + 1, step),)]
        kept = [taken[0][0], *kept, *(d for d, _ in taken[1:])]
    x = x.permute([kept.index(d) for d in sorted(kept)])
    for d in range(len(size)):
        if d not in kept:
            x = x.unsqueeze(d)
    return x.expand(*size)


class _Run(NamedTuple):
    """Dims that lie one after the other in memory, the outermost first, and the strides that step through them."""

    dims: list[int]
    rows: int
    step: int
    taken: list[tuple[int, int]]  # dims of the result, and how many rows each steps

    def reach(self, size: Sequence[int]) -> int:
        return sum((size[d] - 1) * rows for d, rows in self.taken) + 1


def _runs_of(shape: Sequence[int], strides: Strides, size: Sequence[int], stride: Sequence[int]) -> list[_Run] | None:
    """Return runs of dims, the outermost first, in whose rows the strides step; None if they leave the tensor."""
    if strides is UNKNOWN or 0 in shape or any(n > 1 and not s for n, s in zip(shape, strides, strict=True)):
        return None
    runs = [_Run([d], shape[d], strides[d], []) for d in range(len(shape)) if shape[d] > 1]
    runs.sort(key=lambda run: -run.step)
    while True:
        for run in runs:
            run.taken.clear()
        for d, (n, step) in enumerate(zip(size, stride, strict=True)):
            if n > 1 and step:
                fitting = next((run for run in runs if step % run.step == 0), None)
                if fitting is None:
                    return None
                fitting.taken.append((d, step // fitting.step))
        far = next((i for i, run in enumerate(runs) if run.reach(size) > run.rows), None)
        if far is None:
            return runs
        if not far or runs[far - 1].step != runs[far].rows * runs[far].step:
            return None
        outer, inner = runs[far - 1 : far + 1]
        runs[far - 1 : far + 1] = [_Run(outer.dims + inner.dims, outer.rows * inner.rows, inner.step, [])]


# -- columns -------------------------------------------------------------------------------------------------------


def _batched(func: TorchFunction, x: Tensor, ndim: int) -> ShardTensor:
    refuse_plain(func, x)
    if len(x.shape) not in (ndim - 1, ndim):
        raise RuntimeError(f"{func.__name__}: expected {ndim - 1} or {ndim} dims, but got {tuple(x.shape)}")
    result = x if len(x.shape) == ndim else x[None]
    assert isinstance(result, ShardTensor)
    return result


@handles(F.unfold)
def to_columns(
    func: TensorFunction, given: Tensor, kernel_size: Extents, dilation: Extents = 1, padding: Extents = 0,
    stride: Extents = 1,
) -> Tensor:  # fmt: skip
    """Lay the blocks under a kernel side by side as columns."""
    x, kernel, dilation = _batched(func, given, 4), per_dim(kernel_size, 2), per_dim(dilation, 2)
    stride, left = per_dim(stride, 2), list(per_dim(padding, 2))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    windows = Windows(x.spec)
    windows.keep(range(2))
    for s in range(2):
        num_out = (x.spec.global_shape[2 + s] + 2 * left[s] - reach[s]) // stride[s] + 1
        if windows.resize(func, 2 + s, num_out):
            windows.slide_under(2 + s, num_out, reach[s], stride[s], left[s])
            left[s] = 0
    local = windows.fetch(x)
    rows = [(local.shape[2 + s] + 2 * left[s] - reach[s]) // stride[s] + 1 for s in range(2)]
    columns = F.unfold(local, kernel, dilation, tuple(left), stride)
    blocks = columns.view(*local.shape[:2], math.prod(kernel), *rows).movedim(2, 4)
    windows.shape.append(math.prod(kernel))
    result = ShardTensor(windows.own(blocks), windows.layout).movedim(4, 2).flatten(3, 4).flatten(1, 2)
    return apart(result if len(given.shape) == 4 else result[0], given)


@handles(F.fold)
def from_columns(
    func: TensorFunction, given: Tensor, output_size: Extents, kernel_size: Extents, dilation: Extents = 1,
    padding: Extents = 0, stride: Extents = 1,
) -> Tensor:  # fmt: skip
    """Add columns at their blocks' positions: each rank computes its own pixels, from the blocks that reach them."""
    x, extents, kernel = _batched(func, given, 3), per_dim(output_size, 2), per_dim(kernel_size, 2)
    dilation, left, stride = per_dim(dilation, 2), list(per_dim(padding, 2)), per_dim(stride, 2)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    rows = [(extents[s] + 2 * left[s] - reach[s]) // stride[s] + 1 for s in range(2)]
    if x.shape[2] != math.prod(rows) or min(rows) < 1 or x.shape[1] % math.prod(kernel):
        raise RuntimeError(f"fold: {tuple(x.shape)} does not fit blocks {tuple(rows)} of a kernel {kernel}")
    blocks = x.reshape(x.shape[0], x.shape[1] // math.prod(kernel), math.prod(kernel), *rows).movedim(2, 4)
    x = moved_off(as_sharded(blocks, x.spec), [4])  # whole windows: (samples, channels, rows, columns, kernel)
    windows, covered = Windows(x.spec), list(extents)
    windows.keep(range(2))
    for s in range(2):
        windows.shape[2 + s] = extents[s]
        if 2 + s in x.spec.sharded:
            windows.slide_back(2 + s, extents[s], reach[s], stride[s], left[s])
            left[s] = 0
    local = windows.fetch(x)
    for s in range(2):
        if 2 + s in x.spec.sharded:
            covered[s] = (local.shape[2 + s] - 1) * stride[s] + reach[s]
    columns = local.movedim(4, 2).flatten(3, 4).flatten(1, 2)
    pixels = windows.own(F.fold(columns, tuple(covered), kernel, dilation, tuple(left), stride))
    result = finish(pixels, x.spec.derive(windows.shape[:4], x.spec.dims, windows.sizes))
    return apart(result if len(given.shape) == 3 else result[0], given)


@handles(torch.channel_shuffle, F.native_channel_shuffle)
def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    """Take the channels of groups in turns."""
    channels = input.shape[1] if len(input.shape) > 2 else 0
    if groups <= 0 or len(input.shape) < 3 or channels % groups:
        raise RuntimeError(f"channel_shuffle: {groups} groups do not divide the channels of {tuple(input.shape)}")
    parted: Tensor = input.unflatten(1, (groups, channels // groups))  # type: ignore[no-untyped-call]
    return apart(parted.transpose(1, 2).flatten(1, 2), input)
