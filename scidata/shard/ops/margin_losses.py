"""Losses that compare scores with margins, and distances with each other; Gaussian likelihood."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import align, finish, is_sharded, local_of, spec_of_layout, specs_of, whole_along
from scidata.shard.ops.losses import bound, reduced


@register_op(F.gaussian_nll_loss, any_order=True)
def gaussian_nll_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Negative log-likelihood of a normal distribution whose variances are given."""
    given = bound(func, args, kwargs)
    x, target, var = given["input"], given["target"], given["var"]
    if isinstance(var, float):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(x)
    elif bool((var < 0).any()):
        raise ValueError("var has negative entry/entries")
    if tuple(var.shape) != tuple(x.shape):
        if tuple(var.shape) == tuple(x.shape[:-1]):
            var = var.unsqueeze(-1)
        elif [n for m, n in zip(x.shape, var.shape, strict=False) if m != n] != [1] or len(var.shape) != len(x.shape):
            raise ValueError("var is of incorrect size")
    low = var.detach() < given["eps"]
    var = torch.where(low, var + (given["eps"] - var.detach()), var)  # raised to eps, and the gradient passes
    each: Any = 0.5 * (torch.log(var) + (x - target) ** 2 / var)
    return reduced(each + 0.5 * math.log(2 * math.pi) if given["full"] else each, given["reduction"])


@register_op(F.margin_ranking_loss, any_order=True)
def margin_ranking_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Which of two scores should be the larger, by a margin."""
    given = bound(func, args, kwargs)
    first, second, target = given["input1"], given["input2"], given["target"]
    if len({len(x.shape) for x in (first, second, target)}) > 1:
        raise RuntimeError("margin_ranking_loss: the tensors need the same number of dims")
    return reduced((-target * (first - second) + given["margin"]).clamp_min(0), given["reduction"])


@register_op(F.hinge_embedding_loss, any_order=True)
def hinge_embedding_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Distances that should be small where the target is 1, and above a margin where it is -1."""
    given = bound(func, args, kwargs)
    x, target = given["input"], given["target"]
    far = torch.where(target != 1, (given["margin"] - x).clamp_min(0), 0)
    near = torch.where(target != -1, x, 0)
    return reduced(far + near, given["reduction"])


@register_op(F.cosine_embedding_loss, any_order=True)
def cosine_embedding_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Vectors that should point the same way where the target is 1, and apart where it is -1."""
    given = bound(func, args, kwargs)
    first, second, target = given["input1"], given["input2"], given["target"]
    dims = len(first.shape), len(second.shape), len(target.shape)
    if dims not in ((2, 2, 1), (1, 1, 0)):
        raise RuntimeError(f"cosine_embedding_loss: tensors of {dims} dims, not of 2, 2 and 1 or 1, 1 and 0")
    eps = 1e-12  # torch's, below the square root
    lengths = ((first * first).sum(-1) + eps) * ((second * second).sum(-1) + eps)
    cosine = (first * second).sum(-1) / torch.sqrt(lengths)
    near = torch.where(target == 1, 1 - cosine, 0)
    far = torch.where(target == -1, (cosine - given["margin"]).clamp_min(0), 0)
    return reduced(near + far, given["reduction"])


def _triplets(given: dict[str, Any], distance: Any) -> Tensor:
    """Compare the distance to what should be near with that to what should be far."""
    anchor, positive, negative = given["anchor"], given["positive"], given["negative"]
    if len({len(x.shape) for x in (anchor, positive, negative)}) > 1:
        raise RuntimeError("the anchor, positive and negative tensors need the same number of dims")
    if given["margin"] <= 0:
        raise ValueError(f"margin must be greater than 0, got {given['margin']}")
    near, far = distance(anchor, positive), distance(anchor, negative)
    if given["swap"]:
        far = torch.minimum(far, distance(positive, negative))
    return reduced((near - far + given["margin"]).clamp_min(0), given["reduction"])


@register_op(F.triplet_margin_loss, any_order=True)
def triplet_margin_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Rows that should be nearer to one row than to another, by a margin."""
    given = bound(func, args, kwargs)
    return _triplets(given, lambda a, b: F.pairwise_distance(a, b, given["p"], given["eps"]))


@register_op(F.triplet_margin_with_distance_loss)
def triplet_margin_with_distance(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Do the same with any distance."""
    given = bound(func, args, kwargs)
    return _triplets(given, given["distance_function"] or F.pairwise_distance)


@register_op(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Logistic loss of each class, averaged over the classes."""
    given = bound(func, args, kwargs)
    x, target, weight = given["input"], given["target"], given["weight"]
    each: Any = -(target * F.logsigmoid(x) + (1 - target) * F.logsigmoid(-x))
    each = each if weight is None else each * weight
    return reduced(each.sum(-1) / x.shape[-1], given["reduction"])


@register_op(F.multi_margin_loss, F.multilabel_margin_loss)
def margins_of_classes(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Scores of each row's classes against those of the others: rows may be sharded, classes are gathered."""
    given = bound(func, args, kwargs)
    x, target, reduction = given["input"], given["target"], given["reduction"]
    x = whole_along(x, -1)
    target = whole_along(target, -1) if len(target.shape) == len(x.shape) else target
    names: list[Hashable] = ["row", "class"] if len(x.shape) == 2 else ["class"]
    if len(x.shape) not in (1, 2) or len(target.shape) > len(x.shape) or 0 in x.shape:
        raise unsupported(func, f"shapes {tuple(x.shape)} and {tuple(target.shape)}", *specs_of([x, target]))
    operands, labels = [x, target], [names, names[: len(target.shape)]]
    if given.get("weight") is not None:
        operands, labels = [*operands, given["weight"]], [*labels, ["class"]]
    if not any(map(is_sharded, operands)):
        return func(**{**given, **dict(zip(("input", "target", "weight"), map(local_of, operands), strict=False))})  # type: ignore[no-any-return]
    locals_, layout, _ = align(func, operands, labels)
    given |= dict(zip(("input", "target", "weight"), locals_, strict=False))
    spec = spec_of_layout(layout, names[:-1], tuple(x.shape[:-1]), specs_of(operands)[0])
    return reduced(finish(func(**{**given, "reduction": "none"}), spec), reduction)
