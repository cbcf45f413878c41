"""Derivatives of reductions by each element, as torch's own formulas have them: from the part and the value of all.

By composition, a step per rank, an infinite total would make NaN of the derivatives by all rows of its rank. Here the
infinite element alone gets it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.rows.ordered import sum_over
from scidata.shard.spec import ShardSpec


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
    zeros = (local.detach() == 0).sum()
    for group in spec.shard_groups:
        zeros = sum_over(zeros, group)
    if not zeros:
        return product / local
    return torch.zeros_like(local) if whole and zeros > 1 else _of_others(spec, dims, local)


def _of_others(spec: ShardSpec, dims: Sequence[int], local: Tensor) -> Tensor:
    """Multiply for each element all others of its row. Collective."""
    kept = [d for d in range(local.ndim) if d not in dims]
    rows = local.permute(*kept, *dims).flatten(len(kept))
    ones = torch.ones_like(rows[..., :1])  # none where there is no row
    before = torch.cat([ones, rows[..., :-1]], -1).cumprod(-1)
    after = torch.cat([ones, rows.flip(-1)[..., :-1]], -1).cumprod(-1).flip(-1)
    others, total = before * after, rows.prod(-1, keepdim=True)
    for axis in (spec.sharded[d] for d in dims if d in spec.sharded):
        num_ranks, rank = spec.axes[axis].size, spec.coordinate(axis)
        totals = all_gather_v(total, (1,) * num_ranks, rows.ndim - 1, spec.group(axis), grad="sum")
        rest = torch.cat([totals[..., :rank], totals[..., rank + 1 :]], -1)
        others, total = others * rest.prod(-1, keepdim=True), totals.prod(-1, keepdim=True)
    back = [(*kept, *dims).index(d) for d in range(local.ndim)]
    return others.reshape([local.shape[d] for d in (*kept, *dims)]).permute(back)
