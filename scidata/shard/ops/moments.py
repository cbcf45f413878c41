"""Mean and variance over any dims of a sharded tensor, in one round for each mesh axis.

Each rank takes the mean of its own rows and their squared deviations from it; these are gathered and merged (Chan,
Golub and LeVeque, 1983), which is as exact as two passes over the whole. Composed of differentiable parts, so that
gradients, second ones too, follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.comm.transport import Group
from scidata.shard.spec import ShardSpec

_HALF = (torch.float16, torch.bfloat16)


def widened(local: Tensor) -> Tensor:
    """Return the tensor in the dtype that statistics are taken in."""
    return local.float() if local.dtype in _HALF else local


def _merged(parts: Tensor, counts: Sequence[int]) -> Tensor:
    """Merge ``(ranks, 2, ...)`` means and sums of squared deviations of so many elements each."""
    weights = torch.tensor(counts, dtype=parts.dtype, device=parts.device).view([-1] + [1] * (parts.ndim - 2))
    means, squares = parts.unbind(1)
    mean = (weights * means).sum(0) / max(sum(counts), 1)
    return torch.stack([mean, (squares + weights * (means - mean).square()).sum(0)])


def moments(local: Tensor, spec: ShardSpec, dims: Sequence[int], sharded: Mapping[int, int]) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over ``dims``, these kept, as what each rank's part meets. Collective."""
    pair, groups = deviations(local, spec, dims, sharded)
    mean, squares = replicate_to_shards(pair, groups).unbind(0)
    count = math.prod(sum(spec.sizes_of(sharded[d])) if d in sharded else local.shape[d] for d in dims)
    return mean, squares / max(count, 1)


def deviations(
    local: Tensor, spec: ShardSpec, dims: Sequence[int], sharded: Mapping[int, int]
) -> tuple[Tensor, list[Group]]:
    """Return mean and sum of squared deviations over ``dims``, these kept, in one tensor, replicated. Collective.

    Parameters
    ----------
    local
        The own part, in the dtype to compute in.
    sharded
        Mesh axis of each sharded dim of ``local``, which may be another view than that of ``spec``.

    Returns
    -------
    pair, groups
        ``(2, ...)``; the groups over which they were merged.
    """
    extents = {d: local.shape[d] for d in dims}
    mean = local.sum(tuple(dims), keepdim=True) / max(math.prod(extents.values()), 1)
    pair = torch.stack([mean, (local - mean).square().sum(tuple(dims), keepdim=True)])
    groups: list[Group] = []
    for dim, axis in sharded.items():
        if dim not in extents:
            continue
        rest = math.prod(n for d, n in extents.items() if d != dim)
        sizes, group = spec.sizes_of(axis), spec.group(axis)
        parts = all_gather_v(pair[None], (1,) * len(sizes), 0, group)
        pair = _merged(parts, [size * rest for size in sizes])
        extents[dim] = sum(sizes)
        groups.append(group)
    return pair, groups


def mean_of_squares(local: Tensor, spec: ShardSpec, dims: Sequence[int]) -> Tensor:
    """Return the mean square over ``dims``, these kept, as what each rank's part meets. Collective."""
    total, groups = local.square().sum(tuple(dims), keepdim=True), []
    for dim, axis in spec.sharded.items():
        if dim in dims:
            groups.append(spec.group(axis))
            total = all_reduce_sum(total, spec.group(axis))
    return replicate_to_shards(total, groups) / math.prod(spec.global_shape[d] for d in dims)
