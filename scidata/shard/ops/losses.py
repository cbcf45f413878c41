"""Losses: each element compared with its target, then reduced over the global count."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from scidata.shard.ops.align import specs_of
from scidata.shard.ops.pointwise import elementwise
from scidata.shard.ops.registry import register_op, unsupported


@register_op(
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.soft_margin_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)
def loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compare with a target of the same layout, or a plain one; mean and sum are over the whole tensor."""
    options = dict(kwargs)
    reduction = options.pop("reduction", "mean")
    specs = specs_of([*args, *kwargs.values()])
    for name in ("weight", "pos_weight", "size_average", "reduce"):
        if options.pop(name, None) is not None:
            raise unsupported(func, f"{name}= is not supported", *specs, remedy="multiply before you reduce")
    operands = [*args[:2], *(options.pop(name) for name in ("input", "target") if name in options)]
    if len(args) > 2 or len(operands) != 2:
        raise unsupported(func, "options are taken by name only", *specs, remedy="name the options")
    if tuple(operands[0].shape) != tuple(operands[1].shape):
        raise unsupported(
            func, f"input {tuple(operands[0].shape)} and target {tuple(operands[1].shape)} differ", *specs
        )
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction")
    each: Tensor = elementwise(func, types, tuple(operands), {**options, "reduction": "none"})
    if reduction == "none":
        return each
    total: Tensor = each.mean() if reduction == "mean" else each.sum()
    return total
