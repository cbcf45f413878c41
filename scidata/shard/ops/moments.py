"""Mean and variance over any dims of a sharded tensor, in one round for each mesh axis, or of many ranks two.

Each rank takes the mean of its own rows and their squared deviations from it; these are merged (Chan, Golub and
LeVeque, 1983), which is as exact as two passes over the whole.

Derivatives are torch's own formulas of each element and the value of all: by composition, a step per rank, an infinite
total would make NaN of the derivatives by all rows of its rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

import torch
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.functions import known
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.comm.transport import Group, gathered_to_reduce
from scidata.shard.rows.ordered import sum_over, total_over
from scidata.shard.sizes import facts_of, ones
from scidata.shard.spec import ShardSpec

HALF = (torch.float16, torch.bfloat16)


def widened(local: Tensor) -> Tensor:
    """Return the tensor in the dtype that statistics are taken in."""
    return local.float() if local.dtype in HALF else local


def weighted(
    local: Tensor,
    value: Tensor,
    weights: Callable[..., Tensor],
    dims: Sequence[int],
    groups: Sequence[Group],
    *saved: Tensor,
    by_value: bool = False,
) -> Tensor:
    """Return the value of a reduction over ``dims``, these kept, that was computed without autograd.

    Its derivative by each element is ``weights(local, *saved)``, or ``weights(local, value, *saved)``: as torch has it
    also beside infinities, where the derivatives of the steps that ranks take would be NaN everywhere. The values are
    replicated.
    """

    def slopes(kept: Sequence[Tensor]) -> Tensor:
        x, rest = (kept[1], kept[:1]) if by_value else (kept[0], kept[1:])
        return weights(x, *[replicate_to_shards(each, groups) for each in rest])

    def gradient(grad: Tensor, *kept: Tensor) -> Tensor:
        return replicate_to_shards(grad, groups) * slopes(kept)

    def tangent(change: Tensor, *kept: Tensor) -> Tensor:
        return reduce(all_reduce_sum, groups, (slopes(kept) * change).sum(tuple(dims), keepdim=True))

    return known(local, value, gradient, local, *saved, tangent=tangent, keeps_result=by_value)


def _merged(parts: Tensor, counts: Tensor, total: int, others: Group) -> Tensor:
    """Merge each rank's pivot, mean less the pivot and sum of squared deviations, ``(ranks, 3, ...)``.

    Of ``others``, each has only its own; then it is collective.

    With counts 2 and 1, means 1 and 4 and squares 2 and 0, the mean is (2 * 1 + 1 * 4) / 3 = 2; the squares are those
    within ranks and those of their means, (2 + 2 * 1) + (0 + 1 * 4) = 8: rows 0, 2 and 4 have deviations -2, 0 and 2.
    """
    wide = parts.to(torch.float64)  # a number for each row and rank
    weights = counts.to(wide.device).view([-1] + [1] * (parts.ndim - 2))
    means = wide[:, 0] + wide[:, 1]
    mean = sum_over((weights * means).sum(0), others) / max(total, 1)
    squares = sum_over((wide[:, 2] + weights * (means - mean).square()).sum(0), others)
    pivot = mean.masked_fill(~mean.isfinite(), 0).to(parts.dtype).to(wide.dtype)
    return torch.stack([pivot, mean - pivot, squares]).to(parts.dtype)


def standardized(
    local: Tensor, spec: ShardSpec, dims: Sequence[int], sharded: Mapping[int, int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Take the mean over ``dims`` off and divide by the deviation. Collective.

    Also returns the mean and the biased variance, with ``dims`` kept.
    """
    if not local.is_floating_point():
        raise NotImplementedError(f"norms are not implemented for {local.dtype}; convert to a floating dtype first")
    pivot, both, groups = deviations(local, spec, dims, sharded)
    mean, squares = replicate_to_shards(both, groups).unbind(0)
    count = math.prod(facts_of(spec.sizes_of(sharded[d])).total if d in sharded else local.shape[d] for d in dims)
    var = squares / max(count, 1)
    return (local - pivot - mean) * torch.rsqrt(var + eps), pivot + mean, var


def deviations(
    local: Tensor, spec: ShardSpec, dims: Sequence[int], sharded: Mapping[int, int]
) -> tuple[Tensor, Tensor, list[Group]]:
    """Return mean and sum of squared deviations over ``dims``, these kept, as replicated values. Collective.

    The mean is in two parts, as one number of the dtype would be too coarse to compare ranks' means where the mean is
    large beside the deviations: a pivot, which is near it and has no gradient, and the rest.

    ``sharded`` has the mesh axis of each sharded dim of ``local``, which may be another view than that of ``spec``.
    Returns the pivot; the mean less the pivot and the squares, ``(2, ...)``; and the groups that they were merged over.
    """
    extents = {d: local.shape[d] for d in dims}
    count, x = max(math.prod(extents.values()), 1), local.detach()
    pivot = x.sum(tuple(dims), keepdim=True) / count
    pivot = pivot.masked_fill(~pivot.isfinite(), 0)
    shifted = x - pivot
    # their corrected two-pass algorithm: the pivot is the mean but for its rounding, so that nothing is lost
    mean = shifted.sum(tuple(dims), keepdim=True) / count
    squares = shifted.square().sum(tuple(dims), keepdim=True) - count * mean.square()
    found = torch.stack([pivot, mean, squares.clamp_min(0)])
    groups: list[Group] = []
    for dim, axis in sharded.items():
        if dim not in extents:
            continue
        rest = math.prod(n for d, n in extents.items() if d != dim)
        sizes, group = facts_of(spec.sizes_of(axis)), spec.group(axis)
        parts, others = gathered_to_reduce(found[None], ones(len(sizes.sizes)), 0, group)
        counts: Tensor = sizes.plans.get_or_make("counts", partial(torch.tensor, sizes.sizes, dtype=torch.float64))
        counts = counts if others is None else counts[spec.coordinate(axis)]
        found = _merged(parts, counts * rest, sizes.total * rest, others)
        extents[dim] = sizes.total
        groups.append(group)
    pivot, total = found[0], max(math.prod(extents.values()), 1)

    def gradient(grad: Tensor, both: Tensor, x: Tensor) -> Tensor:
        (by_mean, by_squares), (mean, _) = (replicate_to_shards(each, groups).unbind(0) for each in (grad, both))
        return torch.addcmul(by_mean / total, by_squares * 2, x - pivot - mean)

    def tangent(change: Tensor, both: Tensor, x: Tensor) -> Tensor:
        mean, _ = replicate_to_shards(both, groups).unbind(0)
        sums = torch.stack([change / total, 2 * (x - pivot - mean) * change]).sum([d + 1 for d in dims], keepdim=True)
        return reduce(all_reduce_sum, groups, sums)

    return pivot, known(local, found[1:], gradient, local, tangent=tangent, keeps_result=True), groups


def mean_of_squares(local: Tensor, spec: ShardSpec, dims: Sequence[int]) -> Tensor:
    """Return the mean square over ``dims``, these kept, as a replicated value that meets shards. Collective."""
    groups = [spec.group(axis) for dim, axis in spec.sharded.items() if dim in dims]
    total = reduce(all_reduce_sum, groups, local.square().sum(tuple(dims), keepdim=True))
    return replicate_to_shards(total, groups) / math.prod(spec.global_shape[d] for d in dims)


def of_norm(order: float, local: Tensor, norm: Tensor) -> Tensor:
    """Differentiate a norm of finite order: where it is 0, the derivatives are."""
    if order == 1:
        return local.sgn()
    zero = norm == 0
    if order == 2:
        return (local / norm).masked_fill(zero, 0)
    if order < 1:
        return local.sgn() * local.abs().pow(order - 1).masked_fill(local == 0, 0) * norm.pow(1 - order)
    slopes = local.sgn() * local.abs().pow(order - 1) if order < 2 else local * local.abs().pow(order - 2)
    return slopes * norm.pow(order - 1).reciprocal().masked_fill(zero, 0)


def of_prod(spec: ShardSpec, dims: Sequence[int], whole: bool, local: Tensor, product: Tensor) -> Tensor:
    """Divide a product by each factor; where any of the tensor is 0, multiply the others. Collective.

    ``whole``: it is the product of all elements.
    """
    zeros = total_over((local.detach() == 0).sum(), spec.shard_groups)
    if not zeros:
        return product / local
    return torch.zeros_like(local) if whole and zeros > 1 else _of_others(spec, dims, local)


def _of_others(spec: ShardSpec, dims: Sequence[int], local: Tensor) -> Tensor:
    """Multiply for each element all others of its row. Collective."""
    kept = [d for d in range(local.ndim) if d not in dims]
    rows = local.permute(*kept, *dims).flatten(len(kept))
    first = torch.ones_like(rows[..., :1])  # none where there is no row
    before = torch.cat([first, rows[..., :-1]], -1).cumprod(-1)
    after = torch.cat([first, rows.flip(-1)[..., :-1]], -1).cumprod(-1).flip(-1)
    others, total = before * after, rows.prod(-1, keepdim=True)
    for axis in (spec.sharded[d] for d in dims if d in spec.sharded):
        num_ranks, rank = spec.axes[axis].size, spec.coordinate(axis)
        totals = all_gather_v(total, ones(num_ranks), rows.ndim - 1, spec.group(axis), grad="sum")
        rest = torch.cat([totals[..., :rank], totals[..., rank + 1 :]], -1)
        others, total = others * rest.prod(-1, keepdim=True), totals.prod(-1, keepdim=True)
    back = [(*kept, *dims).index(d) for d in range(local.ndim)]
    return others.reshape([local.shape[d] for d in (*kept, *dims)]).permute(back)
