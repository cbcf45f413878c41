"""Losses: each element compared with its target, then reduced over the global count.

Targets and weights lie beside the input or are plain: then they are sliced to the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.operators import in_range, is_capturing
from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.op_table import TensorFunction, unsupported
from scidata.shard.ops.align import align, finish, is_sharded, local_of, on_parts, plain_of, spec_of_layout, specs_of
from scidata.shard.ops.arguments import Run, handles, normal_dim
from scidata.shard.ops.moments import HALF, widened
from scidata.shard.ops.moving import gather_from_owners, moved_off, whole_along
from scidata.shard.ops.pointwise import elementwise
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import definition_of


def loss(*functions: object, any_order: bool = False, reduces: bool = False) -> Callable[[Run], Run]:
    """Register a loss; ``size_average`` and ``reduce``, long deprecated, are refused.

    The decorated function returns the loss of each element, unless it ``reduces`` by itself.
    """

    def add(run: Run) -> Run:
        @handles(*functions, any_order=any_order)
        @wraps(run)
        def checked(
            func: TensorFunction,
            *args: object,
            size_average: object = None,
            reduce: object = None,
            reduction: str = "mean",
            **kwargs: object,
        ) -> object:
            if size_average is not None or reduce is not None:
                specs = specs_of([*args, *kwargs.values()])
                raise unsupported(func, "size_average= and reduce=", *specs, remedy="use reduction=")
            if reduction not in ("none", "mean", "sum", "batchmean"):
                raise ValueError(f"{reduction!r} is not a valid value for reduction")
            if reduces:
                return run(func, *args, reduction=reduction, **kwargs)
            each = run(func, *args, **kwargs)
            assert isinstance(each, Tensor)
            return reduced(each, reduction)

        return run

    return add


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


@loss(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, any_order=True, reduces=True)
def regression_loss(
    func: TensorFunction,
    x: Tensor,
    target: Tensor,
    reduction: str = "mean",
    weight: Tensor | None = None,
    **options: float,
) -> Tensor:
    """Compare with a target of the same layout, or a plain one; mean and sum are over the whole tensor."""
    dtype = torch.result_type(x, target)
    if func is F.mse_loss and dtype in HALF and reduction == "mean" and weight is None:
        # in half precision, backward would double a difference, maybe to inf, before it is scaled
        x, target = x.float(), target.float()
    each: Tensor = elementwise(func, (), (x, target), {**options, "reduction": "none"}).to(dtype)
    if weight is None:
        return reduced(each, reduction)
    if tuple(weight.shape) != tuple(each.shape):
        raise unsupported(
            func, f"weight {tuple(weight.shape)} differs from input {tuple(each.shape)}", *specs_of([each])
        )
    return reduced(each * weight, reduction, weight)


@loss(
    F.soft_margin_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    any_order=True,
    reduces=True,
)
def other_loss(
    func: TensorFunction, x: Tensor, target: Tensor, reduction: str = "mean", **options: Tensor | float | None
) -> Tensor:
    """Losses whose weights, where they have any, do not count in the mean."""
    if tuple(x.shape) != tuple(target.shape):
        raise unsupported(func, f"{tuple(x.shape)} and {tuple(target.shape)} differ", *specs_of([x, target]))
    given = {name: value for name, value in options.items() if value is not None}
    each: Tensor = elementwise(func, (), (x, target), {**given, "reduction": "none"})
    return each.sum() / x.shape[0] if reduction == "batchmean" else reduced(each, reduction)


# -- classes -------------------------------------------------------------------------------------------------------


class _Classes(TypedDict):
    """How a loss of classes weighs rows and reduces them: torch always gives all."""

    weight: Tensor | None
    ignore_index: int
    reduction: str


def _class_loss(func: TensorFunction, scores: Tensor, target: Tensor, smoothing: float, how: _Classes) -> Tensor:
    """Negative log-likelihood of class numbers, from log-probabilities."""
    weight, ignore = how["weight"], how["ignore_index"]
    dim = 1 if len(scores.shape) > 1 else 0
    rows: list[Hashable] = [*range(len(scores.shape) - 1)]
    names = [*rows[:dim], "class", *rows[dim:]]  # scores (N, C, d1, ...) or (C,), class numbers (N, d1, ...) or ()
    num_classes = scores.shape[dim]
    if tuple(target.shape) != (*scores.shape[:dim], *scores.shape[dim + 1 :]):
        raise ValueError(f"scores {tuple(scores.shape)} need a target without dim {dim}, not {tuple(target.shape)}")
    if weight is not None and (weight.requires_grad or isinstance(weight, ShardTensor)):
        raise unsupported(func, "a weight that is sharded or requires grad", *specs_of([scores, target, weight]))
    (local, classes), layout, _ = align(func, [scores, target], [names, rows])
    spec = specs_of([scores, target])[0]
    kept = classes != ignore
    fault = f"{func.__name__}: a target is out of bounds for {num_classes} classes"
    classes = in_range(torch.where(kept, classes, 0), 0, num_classes, fault)
    factor = kept.to(local.dtype) if weight is None else weight[classes] * kept
    axis, sizes = next(((a, e[1]) for a, e in enumerate(layout) if e is not None and e[0] == "class"), (None, ()))
    start = 0 if axis is None else sum(sizes[: spec.coordinate(axis)])  # the first class of this rank
    index = classes.unsqueeze(dim)
    picked = (
        local.gather(dim, index) if axis is None else gather_from_owners(local, dim, index, start, spec.group(axis))
    )
    each = (-picked.squeeze(dim) * factor).masked_fill(~kept, 0)
    if smoothing:
        if weight is not None:
            own = weight[start : start + local.shape[dim]]
            local = local * own.view([-1 if d == dim else 1 for d in range(local.ndim)])
        total = widened(local).sum(dim)
        total = (total if axis is None else all_reduce_sum(total, spec.group(axis))).to(local.dtype)
        smooth = -total.masked_fill(~kept, 0)
        each = (1 - smoothing) * each + smoothing / num_classes * smooth
    new = spec_of_layout(layout, rows, tuple(target.shape), spec)
    return reduced(finish(each, new), how["reduction"], finish(factor, new))


def _wide(x: Tensor) -> Tensor:
    """Convert 16-bit scores to float32 if autocast does."""
    return widened(x) if torch.is_autocast_enabled(x.device.type) else x


@loss(F.nll_loss, any_order=True, reduces=True)
def nll_loss(func: TensorFunction, x: Tensor, target: Tensor, **how: Unpack[_Classes]) -> Tensor:
    """Negative log-likelihood; rows, positions and classes may be sharded."""
    return _class_loss(func, _wide(x), target, 0.0, how)


@loss(F.cross_entropy, any_order=True, reduces=True)
def cross_entropy(
    func: TensorFunction, x: Tensor, target: Tensor, label_smoothing: float = 0.0, **how: Unpack[_Classes]
) -> Tensor:
    """Cross entropy with class numbers or probabilities; rows, positions and classes may be sharded."""
    weight, reduction = how["weight"], how["reduction"]
    x, target = _wide(x), _wide(target)
    dim = 1 if len(x.shape) > 1 else 0
    scores = F.log_softmax(x, dim)
    if not target.is_floating_point():
        return _class_loss(func, scores, target, label_smoothing, how)
    if tuple(target.shape) != tuple(x.shape):
        raise ValueError(f"class probabilities {tuple(target.shape)} need the shape of the scores {tuple(x.shape)}")
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[dim]
    products = scores * target
    if weight is not None:
        products = products * weight.view([-1 if d == dim else 1 for d in range(len(x.shape))])
    each: Tensor = -products.sum(dim)
    result = reduced(each, "sum" if reduction == "mean" else reduction)
    return result / each.numel() if reduction == "mean" else result


@loss(F.ctc_loss, reduces=True)
def ctc_loss(
    func: TensorFunction,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Each sequence against its target. Collective if steps or classes are sharded: sequences are instead."""
    if len(log_probs.shape) != 3:
        specs = specs_of([log_probs, targets, input_lengths, target_lengths])
        raise unsupported(func, "a sequence without a batch", *specs, remedy="use unsqueeze(1)")
    targets = plain_of(targets)
    steps, labels = (torch.as_tensor(plain_of(each)) for each in (input_lengths, target_lengths))
    num_steps, num_rows, _ = log_probs.shape
    if not len(steps) == len(labels) == num_rows or any(n > num_steps for n in steps.tolist()):
        raise RuntimeError(f"ctc_loss: {steps} steps and {labels} labels for scores of shape {tuple(log_probs.shape)}")
    x = moved_off(log_probs, [0, 2]) if is_sharded(log_probs) else log_probs
    if not is_sharded(x):
        return F.ctc_loss(local_of(x), targets, steps, labels, blank, reduction, zero_infinity)
    start, count = x.spec.offsets[1], x.spec.local_shape[1]
    first, last = (start, start + count) if targets.ndim > 1 else (labels[:n].sum() for n in (start, start + count))
    own = slice(start, start + count)
    local = x.local.sum((0, 2))  # where there are none
    if count:
        local = F.ctc_loss(x.local, targets[first:last], steps[own], labels[own], blank, "none", zero_infinity)
    each: Tensor = ShardTensor(local, x.spec.without([0, 2]))
    if reduction == "mean":
        each = each / labels.to(local.device).clamp(min=1)
    return reduced(each, reduction)


@handles(F.cosine_similarity, any_order=True)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Cosine of the angle between vectors along any dim."""
    ndim = max(len(x1.shape), len(x2.shape))
    pair = [x[(None,) * (ndim - len(x.shape))] if len(x.shape) < ndim else x for x in (x1, x2)]
    dim = normal_dim(dim, ndim)
    units = []
    for x, other in (pair, reversed(pair)):
        repeats = other.shape[dim] if x.shape[dim] == 1 else 1  # lengths are those of the vectors after broadcasting
        norm = torch.linalg.vector_norm(x, 2, dim, True) * math.sqrt(repeats)
        low = norm.detach() < eps  # torch raises short lengths to eps, and their gradient passes
        units.append(x / torch.where(low, norm + (eps - norm.detach()), norm))
    return (units[0] * units[1]).sum(dim)


# -- margins -------------------------------------------------------------------------------------------------------


@loss(F.cosine_embedding_loss, any_order=True)
def cosine_embedding_loss(
    func: TensorFunction, input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0
) -> Tensor:
    """Cosine embedding loss: vectors should align where the target is 1, and differ where it is -1."""
    dims = len(input1.shape), len(input2.shape), len(target.shape)
    if dims not in ((2, 2, 1), (1, 1, 0)):
        raise RuntimeError(f"cosine_embedding_loss: tensors of {dims} dims, not of 2, 2 and 1 or 1, 1 and 0")
    eps = 1e-12  # torch's, below the square root
    lengths = ((input1 * input1).sum(-1) + eps) * ((input2 * input2).sum(-1) + eps)
    cosine = (input1 * input2).sum(-1) / torch.sqrt(lengths)
    near = torch.where(target == 1, 1 - cosine, 0)
    far = torch.where(target == -1, (cosine - margin).clamp_min(0), 0)
    return near + far


@loss(
    *(F.gaussian_nll_loss, F.multilabel_soft_margin_loss, F.margin_ranking_loss, F.hinge_embedding_loss),
    *(F.triplet_margin_loss, F.triplet_margin_with_distance_loss),
    any_order=True,
    reduces=True,
)
def defined_loss(func: TensorFunction, *operands: Tensor, **options: object) -> Tensor:
    """Run torch's own Python definition of a loss."""
    return definition_of(func)(*operands, **options)


@handles(*[getattr(F, name) for name in ["linear_cross_entropy"] if hasattr(F, name)])  # of newer torch
def linear_cross_entropy(func: TensorFunction, *operands: Tensor, options: object = None, **named: object) -> Tensor:
    """Cross entropy of a linear layer's scores; ``options=``, how many rows are done at a time, changes no value."""
    return definition_of(func)(*operands, **named)


@loss(F.multi_margin_loss, F.multilabel_margin_loss)
def margins_of_classes(
    func: TensorFunction, x: Tensor, target: Tensor, weight: Tensor | None = None, **options: float
) -> Tensor:
    """Scores of each row's classes against those of the others: rows may be sharded, classes are gathered.

    torch's compiler has formulas of its own for them, which differ: of NaN, and of -1 between classes.
    """
    if is_capturing():
        raise unsupported(func, "torch's compiler computes it otherwise than its kernel", *specs_of([x, target]))
    x = whole_along(x, -1)
    target = whole_along(target, -1) if len(target.shape) == len(x.shape) else target
    names: list[Hashable] = ["row", "class"] if len(x.shape) == 2 else ["class"]
    if len(x.shape) not in (1, 2) or len(target.shape) > len(x.shape) or 0 in x.shape:
        raise unsupported(func, f"shapes {tuple(x.shape)} and {tuple(target.shape)}", *specs_of([x, target]))
    operands, labels = [x, target], [names, names[: len(target.shape)]]
    if weight is not None:
        operands, labels = [*operands, weight], [*labels, ["class"]]

    def compute(x: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
        given = {"weight": weights[0]} if weights else {}
        return func(x, target, reduction="none", **given, **options)

    return on_parts(func, compute, operands, labels, names[:-1])
