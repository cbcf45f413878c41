"""Softmax and cumulative functions along any dim.

On a sharded dim each rank does its part; one number for each row and rank goes around.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.functions import known
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.comm.transport import Group, all_reduce_max, gathered_to_reduce, with_dim
from scidata.shard.op_table import TensorFunction, find, unsupported
from scidata.shard.ops.align import Dtype, finish, write_to_plain
from scidata.shard.ops.arguments import handles, normal_dim
from scidata.shard.ops.moments import HALF, widened
from scidata.shard.ops.moving import there_and_back
from scidata.shard.rows.ordered import sum_over
from scidata.shard.sizes import facts_of, ones
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import is_plain


@handles(*find("softmax log_softmax"), F.softmin, any_order=True)
def softmax(
    func: TensorFunction, x: ShardTensor, dim: int | None = None, dtype: Dtype = None, *, _stacklevel: int = 3
) -> Tensor:
    """Softmax over one dim. Collective if it is sharded: two numbers for each row and rank, at once or in turn."""
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
    return ShardTensor(_from_totals(wide, totals, dim, log, spec.group(axis)).to(local.dtype), spec)


def _totals(x: Tensor, dim: int, num_ranks: int, group: Group) -> Tensor:
    """Return each row's maximum and its sum of ``exp(x - maximum)``, in one tensor. Collective.

    Their sum would have lost the second beside a large first. A row masked whole, or with inf, comes to NaN, as in
    torch.
    """
    row = x if x.shape[dim] else x.new_full(with_dim(x.shape, dim, 1), -math.inf)
    largest = row.amax(dim, keepdim=True)
    sums = (row - largest.masked_fill(largest == -math.inf, 0)).exp_().sum(dim, keepdim=True)
    parts, rest = gathered_to_reduce(torch.stack([largest, sums]), ones(num_ranks), dim + 1, group)
    peaks, sums = parts.unbind(0)
    largest = all_reduce_max(peaks.amax(dim, keepdim=True), rest)
    return torch.stack([largest, sum_over((sums * (peaks - largest).exp_()).sum(dim, keepdim=True), rest)])


def _from_totals(x: Tensor, totals: Tensor, dim: int, log: bool, group: Group) -> Tensor:
    """Return a softmax, or its logarithm. Collective in backward."""

    def compute(x: Tensor) -> Tensor:
        shifted = x - totals[0]
        return shifted.sub_(totals[1].log()) if log else shifted.exp_().div_(totals[1])

    def of_all(x: Tensor) -> Tensor:
        return replicate_to_shards(all_reduce_sum(x.sum(dim, keepdim=True), group), [group])

    def gradient(grad: Tensor, result: Tensor) -> Tensor:
        return grad - result.exp() * of_all(grad) if log else result * (grad - of_all(grad * result))

    def tangent(change: Tensor, result: Tensor) -> Tensor:  # that of a softmax is symmetric
        return change - of_all(result.exp() * change) if log else gradient(change, result)

    return known(x, compute, gradient, tangent=tangent, keeps_result=True)


@handles("cumsum cumprod logcumsumexp")
def scan(func: TensorFunction, x: ShardTensor, dim: int, *, dtype: Dtype = None, out: Tensor | None = None) -> Tensor:
    """Accumulate along one dim. Sums along a sharded dim start from the previous ranks' sums; other functions move
    rows.

    A rank with rows (1, 2, 3) sums them to (1, 3, 6); after a rank whose rows sum to 10 it adds 10 to each.
    """
    how = {} if dtype is None else {"dtype": dtype}
    if is_plain(out):  # PyG's way to put a zero before the sums
        return write_to_plain(func, (x, dim), {**how, "out": out})
    spec, dim = x.spec, normal_dim(dim, x.spec.ndim)
    axis, run = spec.axis_of_dim(dim), getattr(torch, func.__name__)

    def on_lines(local: Tensor) -> Tensor:
        # of no elements torch's gradients have no graph, for which other ranks wait in the next backward pass
        is_alone = not local.numel() and spec.global_size.numel() and run is not torch.cumsum
        result: Tensor = run(local * local if is_alone else local, dim, **how)
        return result

    if axis is None or spec.axes[axis].size == 1:
        return finish(on_lines(x.local), spec)
    if run is not torch.cumsum:  # their derivatives beside zeros and infinities are torch's own only on whole rows
        return there_and_back(x, [dim], on_lines)
    local = x.local if dtype is None else x.local.to(dtype)
    narrow = local.dtype in HALF
    sums = widened(local).cumsum(dim, **({} if narrow else how))
    # A rank's total is its last row. The others use it each for their own part, hence grad="sum".
    held = facts_of(spec.sizes_of(axis)).held
    last = sums.narrow(dim, max(0, sums.shape[dim] - 1), held[spec.coordinate(axis)])
    totals = all_gather_v(last, held, dim, spec.group(axis), grad="sum")
    num_before = int(facts_of(held).bounds[spec.coordinate(axis)])
    before = totals.narrow(dim, 0, num_before).sum(dim, keepdim=True, dtype=sums.dtype)
    return ShardTensor((sums + before).to(local.dtype if narrow else sums.dtype), spec)
