"""Losses: each element compared with its target, then reduced over the global count.

Targets and weights lie beside the input or are plain: then they are sliced to the shards.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import align, bind, finish, is_sharded, local_of, spec_of_layout, specs_of
from scidata.shard.ops.arguments import normal_dim
from scidata.shard.ops.moments import HALF, widened
from scidata.shard.ops.moving import moved_off
from scidata.shard.ops.pointwise import elementwise
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor


@cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by name; ``size_average`` and ``reduce``, long deprecated, are refused."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if any(given.pop(name, None) is not None for name in ("size_average", "reduce")):
        raise unsupported(func, "size_average= and reduce=", *specs_of([*given.values()]), remedy="use reduction=")
    if given.get("reduction") not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{given.get('reduction')!r} is not a valid value for reduction")
    return given


def reduced(each: Tensor, reduction: str, weights: Tensor | None = None) -> Tensor:
    """Reduce elements over the whole; with weights, a mean is over their sum."""
    if reduction == "none":
        return each
    if reduction == "mean" and weights is None:
        return each.mean()
    if weights is None or reduction != "mean":
        return each.sum()
    dtype = torch.promote_types(each.dtype, torch.float32)  # the sum may be beyond float16, the mean is not
    mean: Tensor = each.sum(dtype=dtype) / weights.sum(dtype=dtype)
    return mean.to(each.dtype)


@register_op(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, any_order=True)
def regression_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compare with a target of the same layout, or a plain one; mean and sum are over the whole tensor."""
    given = bound(func, args, kwargs)
    reduction, weight = given.pop("reduction"), given.pop("weight", None)
    operands = given.pop("input"), given.pop("target")
    dtype = torch.result_type(*operands)
    if func is F.mse_loss and dtype in HALF and reduction == "mean" and weight is None:
        # in half precision, backward would double a difference, maybe to inf, before it is scaled
        operands = operands[0].float(), operands[1].float()
    each: Tensor = elementwise(func, types, operands, {**given, "reduction": "none"}).to(dtype)
    if weight is None:
        return reduced(each, reduction)
    if tuple(weight.shape) != tuple(each.shape):
        raise unsupported(
            func, f"weight {tuple(weight.shape)} differs from input {tuple(each.shape)}", *specs_of([each])
        )
    return reduced(each * weight, reduction, weight)


@register_op(
    F.soft_margin_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    any_order=True,
)
def other_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Losses whose weights, where they have any, do not count in the mean."""
    given = bound(func, args, kwargs)
    reduction = given.pop("reduction")
    first, second, *_ = given.values()
    if tuple(first.shape) != tuple(second.shape):
        raise unsupported(func, f"{tuple(first.shape)} and {tuple(second.shape)} differ", *specs_of([first, second]))
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    options = {name: value for name, value in given.items() if value is not None and name not in tensors}
    each: Tensor = elementwise(func, types, (), {**tensors, **options, "reduction": "none"})
    if reduction == "batchmean":
        mean: Tensor = each.sum() / first.shape[0]
        return mean
    return reduced(each, reduction)


# -- classes -------------------------------------------------------------------------------------------------------


def _class_labels(ndim: int) -> tuple[list[Hashable], list[Hashable]]:
    """Name the dims of scores ``(N, C, d1, ...)`` or ``(C,)``, and of class numbers ``(N, d1, ...)`` or ``()``."""
    rest: list[Hashable] = [*range(ndim - 1)]
    return ([*rest[:1], "class", *rest[1:]], rest) if ndim > 1 else (["class"], [])


def _pick(scores: Tensor, target: Tensor, axis: int | None, spec: ShardSpec, start: int, dim: int) -> Tensor:
    """Take each row's score of its class, which may be on another rank."""
    if axis is None:
        return scores.gather(dim, target.unsqueeze(dim)).squeeze(dim)
    local, size = target - start, scores.shape[dim]
    mine = (local >= 0) & (local < size)
    spare = torch.cat([scores, scores.new_zeros([1 if d == dim else n for d, n in enumerate(scores.shape)])], dim)
    picked = spare.gather(dim, torch.where(mine, local, size).unsqueeze(dim)).squeeze(dim)
    return all_reduce_sum(picked, spec.group(axis))


def _class_loss(
    func: Any, scores: Tensor, target: Tensor, weight: Tensor | None, ignore: int, reduction: str, smoothing: float
) -> Tensor:
    """Negative log-likelihood of class numbers, from log-probabilities."""
    dim = 1 if len(scores.shape) > 1 else 0
    names, rows = _class_labels(len(scores.shape))
    num_classes = scores.shape[dim]
    if tuple(target.shape) != (*scores.shape[:dim], *scores.shape[dim + 1 :]):
        raise ValueError(f"scores {tuple(scores.shape)} need a target without dim {dim}, not {tuple(target.shape)}")
    if weight is not None and (weight.requires_grad or isinstance(weight, ShardTensor)):
        raise unsupported(func, "a weight that is sharded or requires grad", *specs_of([scores, target, weight]))
    (local, classes), layout, _ = align(func, [scores, target], [names, rows])
    spec = specs_of([scores, target])[0]
    kept = classes != ignore
    if bool((kept & ((classes < 0) | (classes >= num_classes))).any()):
        raise IndexError(f"{func.__name__}: a target is out of bounds for {num_classes} classes")
    classes = torch.where(kept, classes, 0)
    factor = kept.to(local.dtype) if weight is None else weight[classes] * kept
    axis, sizes = next(((a, e[1]) for a, e in enumerate(layout) if e is not None and e[0] == "class"), (None, ()))
    start = 0 if axis is None else sum(sizes[: spec.coordinate(axis)])  # the first class of this rank
    each = (-_pick(local, classes, axis, spec, start, dim) * factor).masked_fill(~kept, 0)
    if smoothing:
        if weight is not None:
            own = weight[start : start + local.shape[dim]]
            local = local * own.view([-1 if d == dim else 1 for d in range(local.ndim)])
        total = widened(local).sum(dim)
        total = (total if axis is None else all_reduce_sum(total, spec.group(axis))).to(local.dtype)
        smooth = -total.masked_fill(~kept, 0)
        each = (1 - smoothing) * each + smoothing / num_classes * smooth
    new = spec_of_layout(layout, rows, tuple(target.shape), spec)
    return reduced(finish(each, new), reduction, finish(factor, new))


def _wide(x: Tensor) -> Tensor:
    """Take 16-bit scores in float32 where autocast does."""
    return widened(x) if torch.is_autocast_enabled(x.device.type) else x


@register_op(F.nll_loss, any_order=True)
def nll_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Negative log-likelihood; rows, positions and classes may be sharded."""
    given = bound(func, args, kwargs)
    scores, target, weight = _wide(given["input"]), given["target"], given["weight"]
    return _class_loss(func, scores, target, weight, given["ignore_index"], given["reduction"], 0.0)


@register_op(F.cross_entropy, any_order=True)
def cross_entropy(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Cross entropy with class numbers or probabilities; rows, positions and classes may be sharded."""
    given = bound(func, args, kwargs)
    x, target, weight, smoothing = given["input"], given["target"], given["weight"], given["label_smoothing"]
    x, target = _wide(x), _wide(target)
    dim = 1 if len(x.shape) > 1 else 0
    scores = F.log_softmax(x, dim)
    if not target.is_floating_point():
        return _class_loss(func, scores, target, weight, given["ignore_index"], given["reduction"], smoothing)
    if tuple(target.shape) != tuple(x.shape):
        raise ValueError(f"class probabilities {tuple(target.shape)} need the shape of the scores {tuple(x.shape)}")
    if smoothing:
        target = target * (1 - smoothing) + smoothing / x.shape[dim]
    products = scores * target
    if weight is not None:
        products = products * weight.view([-1 if d == dim else 1 for d in range(len(x.shape))])
    each: Tensor = -products.sum(dim)
    result = reduced(each, "sum" if given["reduction"] == "mean" else given["reduction"])
    return result / each.numel() if given["reduction"] == "mean" else result


@register_op(*[getattr(F, name) for name in ["linear_cross_entropy"] if hasattr(F, name)])  # of newer torch
def linear_cross_entropy(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Cross entropy of a linear layer's scores; ``options=``, how many rows are done at a time, changes no value."""
    given = bound(func, args, kwargs)
    x, weight, bias = given["input"], given["linear_weight"], given["linear_bias"]
    shape = (*x.shape[:-1], *weight.shape[:-1])
    if given["ignore_index"] is not None and tuple(given["target"].shape) == shape:
        raise RuntimeError("ignore_index cannot be specified when target contains probabilities")
    ignore = -100 if given["ignore_index"] is None else given["ignore_index"]
    how = {name: given[name] for name in ("weight", "reduction", "label_smoothing")}
    scores = F.linear(x, weight.reshape(-1, weight.shape[-1]), None if bias is None else bias.reshape(-1))
    return F.cross_entropy(scores.reshape(shape), given["target"], ignore_index=ignore, **how)


@register_op(F.ctc_loss)
def ctc_loss(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Each sequence against its target. Collective where steps or classes are sharded: sequences are instead."""
    given = bound(func, args, kwargs)
    scores = given["log_probs"]
    if len(scores.shape) != 3:
        raise unsupported(func, "a sequence without a batch", *specs_of([*given.values()]), remedy="use unsqueeze(1)")
    names = ("targets", "input_lengths", "target_lengths")
    targets, *counts = (x.full_tensor() if isinstance(x, ShardTensor) else x for x in map(given.__getitem__, names))
    steps, labels = (torch.as_tensor(each) for each in counts)
    num_steps, num_rows, _ = scores.shape
    if not len(steps) == len(labels) == num_rows or any(n > num_steps for n in steps.tolist()):
        raise RuntimeError(f"ctc_loss: {steps} steps and {labels} labels for scores of shape {tuple(scores.shape)}")
    x: Any = moved_off(scores, [0, 2]) if is_sharded(scores) else scores
    how = {"blank": given["blank"], "zero_infinity": given["zero_infinity"]}
    if not is_sharded(x):
        return F.ctc_loss(local_of(x), targets, steps, labels, reduction=given["reduction"], **how)
    start, count = x.spec.offsets[1], x.spec.local_shape[1]
    first, last = (start, start + count) if targets.ndim > 1 else (labels[:n].sum() for n in (start, start + count))
    own = slice(start, start + count)
    local = x.local.sum((0, 2))  # where there are none
    if count:
        local = F.ctc_loss(x.local, targets[first:last], steps[own], labels[own], reduction="none", **how)
    each: Tensor = ShardTensor(local, x.spec.without([0, 2]))
    if given["reduction"] == "mean":
        each = each / labels.to(local.device).clamp(min=1)
    return reduced(each, given["reduction"])


@register_op(F.cosine_similarity, any_order=True)
def cosine_similarity(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Cosine of the angle between vectors along any dim."""
    given = bind("x1 x2 dim eps", args, kwargs, dim=1, eps=1e-8)
    pair = [given["x1"], given["x2"]]
    ndim = max(len(x.shape) for x in pair)
    pair = [x[(None,) * (ndim - len(x.shape))] if len(x.shape) < ndim else x for x in pair]
    dim = normal_dim(given["dim"], ndim)
    units = []
    for x, other in (pair, reversed(pair)):
        repeats = other.shape[dim] if x.shape[dim] == 1 else 1  # lengths are those of the vectors after broadcasting
        norm = torch.linalg.vector_norm(x, 2, dim, True) * math.sqrt(repeats)
        low = norm.detach() < given["eps"]  # torch raises short lengths to eps, and their gradient passes
        units.append(x / torch.where(low, norm + (given["eps"] - norm.detach()), norm))
    cosine: Tensor = (units[0] * units[1]).sum(dim)
    return cosine
