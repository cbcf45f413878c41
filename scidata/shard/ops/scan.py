"""Along one dim, each element from the others of its row: softmax and cumulative sums, on any dim.

On a sharded dim each rank does its part; one number for each row and rank goes around.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.functions import call
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.comm.transport import Group, gather, with_dim
from scidata.shard.op_table import TensorFunction, find, unsupported
from scidata.shard.ops.align import Dtype, finish, refuse_out, write_to_plain
from scidata.shard.ops.arguments import handles, normal_dim
from scidata.shard.ops.moments import HALF, widened
from scidata.shard.ops.moving import there_and_back
from scidata.shard.tensor import ShardTensor


@handles(*find("softmax log_softmax"), F.softmin, any_order=True)
def softmax(
    func: TensorFunction, x: ShardTensor, dim: int | None = None, dtype: Dtype = None, *, _stacklevel: int = 3
) -> Tensor:
    """Softmax over one dim. Collective where it is sharded: one round of two numbers for each row and rank."""
    spec = x.spec
    if dim is None:
        raise unsupported(func, "it needs a dim", spec, remedy="give dim=")
    dim = normal_dim(dim, spec.ndim)
    local = -x.local if func is F.softmin else x.local
    local = local if dtype is None else local.to(dtype)
    if not local.is_floating_point():
        raise NotImplementedError(f"{func.__name__} of {local.dtype}; give dtype=torch.float32")
    log = "log" in func.__name__
    axis = spec.axis_of_dim(dim)
    if axis is None or spec.axes[axis].size == 1:
        return finish((torch.log_softmax if log else torch.softmax)(local, dim), spec)
    wide = widened(local)
    totals = _totals(wide.detach(), dim, len(spec.sizes_of(axis)), spec.group(axis))
    return ShardTensor(call(_Softmax, wide, totals, _How(dim, log, spec.group(axis))).to(local.dtype), spec)


def _totals(x: Tensor, dim: int, num_ranks: int, group: Group) -> Tensor:
    """Return the largest value of each row, and the sum of ``exp(x - largest)``, in one tensor. Collective.

    Their sum would have lost the second beside a large first. A row masked whole, or with inf, comes to NaN, as in
    torch.
    """
    row = x if x.shape[dim] else x.new_full(with_dim(x.shape, dim, 1), -math.inf)
    largest = row.amax(dim, keepdim=True)
    sums = (row - largest.masked_fill(largest == -math.inf, 0)).exp_().sum(dim, keepdim=True)
    peaks, sums = gather(torch.stack([largest, sums]), (1,) * num_ranks, dim + 1, group).unbind(0)
    largest = peaks.amax(dim, keepdim=True)
    return torch.stack([largest, (sums * (peaks - largest).exp_()).sum(dim, keepdim=True)])


class _How(NamedTuple):
    dim: int
    log: bool
    group: Group


class _SoftmaxContext(Protocol):
    """What autograd hands :class:`_Softmax` as ``ctx``."""

    how: _How
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def save_for_forward(self, *tensors: Tensor) -> None: ...


class _Softmax(Function):
    """Keeps its result, as torch's does, so that its input may be written to."""

    @staticmethod
    def forward(ctx: _SoftmaxContext, x: Tensor, totals: Tensor, how: _How) -> Tensor:
        shifted = x - totals[0]
        result = shifted.sub_(totals[1].log()) if how.log else shifted.exp_().div_(totals[1])
        ctx.save_for_backward(result)
        ctx.save_for_forward(result)
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: _SoftmaxContext, grad: Tensor) -> tuple[Tensor, None, None]:
        (result,), how = ctx.saved_tensors, ctx.how
        return grad - result.exp() * _of_all(grad, how) if how.log else _turned(result, grad, how), None, None

    @staticmethod
    def jvp(ctx: _SoftmaxContext, tangent: Tensor, totals: None, how: None) -> Tensor:
        (result,) = ctx.saved_tensors
        return tangent - _of_all(result.exp() * tangent, ctx.how) if ctx.how.log else _turned(result, tangent, ctx.how)


def _turned(result: Tensor, change: Tensor, how: _How) -> Tensor:
    """Apply the derivative of a softmax, which is symmetric. Collective."""
    return result * (change - _of_all(change * result, how))


def _of_all(x: Tensor, how: _How) -> Tensor:
    """Sum over a dim, for each rank's own part. Collective."""
    return replicate_to_shards(all_reduce_sum(x.sum(how.dim, keepdim=True), how.group), [how.group])


@handles("cumsum cumprod logcumsumexp")
def scan(func: TensorFunction, x: ShardTensor, dim: int, *, dtype: Dtype = None, out: Tensor | None = None) -> Tensor:
    """Accumulate along one dim. Sums along a sharded one start from those of the ranks before, else rows are moved.

    A rank with rows (1, 2, 3) sums them to (1, 3, 6); after a rank whose rows sum to 10 it adds 10 to each.
    """
    how = {} if dtype is None else {"dtype": dtype}
    if type(out) is Tensor:  # PyG's way to put a zero before the sums
        return write_to_plain(func, (x, dim), {**how, "out": out})
    refuse_out(func, {"out": out}, x.spec)
    spec, dim = x.spec, normal_dim(dim, x.spec.ndim)
    axis, run = spec.axis_of_dim(dim), getattr(torch, func.__name__)
    if axis is None or spec.axes[axis].size == 1:
        return finish(run(x.local, dim, **how), spec)
    if run is not torch.cumsum:  # their derivatives beside zeros and infinities are torch's own only on whole rows
        return there_and_back(x, [dim], lambda whole: run(whole, dim, **how))
    local = x.local if dtype is None else x.local.to(dtype)
    narrow = local.dtype in HALF
    sums = widened(local).cumsum(dim, **({} if narrow else how))
    # A rank's total is its last row. The others use it each for their own part, hence grad="sum".
    held = tuple(int(size > 0) for size in spec.sizes_of(axis))
    last = sums.narrow(dim, max(0, sums.shape[dim] - 1), held[spec.coordinate(axis)])
    totals = all_gather_v(last, held, dim, spec.group(axis), grad="sum")
    before = totals.narrow(dim, 0, sum(held[: spec.coordinate(axis)])).sum(dim, keepdim=True, dtype=sums.dtype)
    return ShardTensor((sums + before).to(local.dtype if narrow else sums.dtype), spec)
