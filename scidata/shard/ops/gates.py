"""Activations that are not elementwise: with a parameter for each channel, of two halves, or drawn."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import align, bind, finish, spec_of_layout, specs_of
from scidata.shard.ops.arguments import argument, normal_dim
from scidata.shard.tensor import ShardTensor


@register_op(F.prelu, Tensor.prelu, any_order=True)
def prelu(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Scale what is negative by a learned number, or by one for each channel (dim 1)."""
    given = bind("input weight", args, kwargs)
    operands = [given["input"], given["weight"]]
    shape, weight = tuple(operands[0].shape), tuple(operands[1].shape)
    channels = shape[1] if len(shape) > 1 else 1
    if len(weight) > 1 or (weight not in ((), (1,)) and weight != (channels,)):
        raise RuntimeError(f"prelu: a weight of shape {weight} does not fit an input of shape {shape}")
    name: Hashable = 1 if weight == (channels,) and len(shape) > 1 else "weight"
    labels: list[list[Hashable]] = [[*range(len(shape))], [name] * len(weight)]
    locals_, layout, _ = align(func, operands, labels)
    return finish(F.prelu(*locals_), spec_of_layout(layout, labels[0], shape, specs_of(operands)[0]))


@register_op(F.glu)
def glu(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Half of a dim, gated by the other half."""
    x: ShardTensor = argument(args, kwargs, 0, "input")
    spec, dim = x.spec, normal_dim(argument(args, kwargs, 1, "dim", -1), x.spec.ndim)
    if spec.global_shape[dim] % 2:
        raise RuntimeError(f"glu: dim {dim} of size {spec.global_shape[dim]} has no halves")
    half = spec.global_shape[dim] // 2
    if dim not in spec.sharded:
        shape = [half if d == dim else n for d, n in enumerate(spec.global_shape)]
        return finish(F.glu(x.local, dim), spec.derive(shape, spec.dims, spec.sizes))
    first, second = x.split(half, dim)  # type: ignore[no-untyped-call]
    result: Tensor = first * second.sigmoid()
    return result


@register_op(F.rrelu, torch.rrelu)
def rrelu(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Leaky ReLU by the middle of the slopes; drawn ones are refused."""
    given = bind("input lower upper training", args, kwargs, lower=1 / 8, upper=1 / 3, training=False)
    if given["training"] or given.get("inplace"):
        raise unsupported(func, "training=True or inplace=True", *specs_of([given["input"]]))
    return F.leaky_relu(given["input"], (given["lower"] + given["upper"]) / 2)


@register_op(F.gumbel_softmax)
def gumbel_softmax(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Softmax of scores with drawn noise: that which one process draws."""
    given = bind("logits tau hard eps dim", args, kwargs, tau=1, hard=False, dim=-1)
    scores: Any = given["logits"]
    noise = torch.zeros_like(scores, memory_format=torch.contiguous_format, requires_grad=False).exponential_()
    soft: Any = ((scores - noise.log()) / given["tau"]).softmax(given["dim"])
    if not given["hard"]:
        return soft  # type: ignore[no-any-return]
    best = soft.max(given["dim"], keepdim=True)[1]
    places = torch.arange(soft.shape[given["dim"]], device=soft.device)
    shape = [-1 if d == normal_dim(given["dim"], soft.ndim) else 1 for d in range(soft.ndim)]
    hard: Any = (best == places.view(shape)).to(soft.dtype)
    return hard - soft.detach() + soft  # type: ignore[no-any-return]
