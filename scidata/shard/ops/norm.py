"""Normalisation: batch norm with the statistics of the whole tensor, and vectors scaled to length one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.collectives import replicate_to_shards
from scidata.shard.ops.align import align_parameters, finish, refuse_out, specs_of
from scidata.shard.ops.reductions import _count, _variance
from scidata.shard.ops.registry import register_op, unsupported
from scidata.shard.ops.shapes import argument, normal_dim, refuse_sharded
from scidata.shard.tensor import ShardTensor

_NAMES = "input running_mean running_var weight bias training momentum eps"


@register_op(F.batch_norm)
def batch_norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Normalise each channel (dim 1, not sharded) over all other dims. Collective in training."""
    given = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    given |= dict(zip(_NAMES.split(), args, strict=False)) | kwargs
    x = given["input"]
    if not isinstance(x, ShardTensor) or x._spec.is_replicated:
        raise unsupported(func, "a plain input meets sharded parameters", *specs_of(list(given.values())))
    spec, local = x._spec, x._local
    if spec.ndim < 2 or 1 in spec.sharded:
        raise unsupported(func, "the channels (dim 1) are sharded, or there are none", spec)
    mean, var = given["running_mean"], given["running_var"]
    weight, bias = align_parameters(func, x, given["weight"], given["bias"])
    dims = [d for d in range(spec.ndim) if d != 1]
    shape = [1, spec.global_shape[1], *[1] * (spec.ndim - 2)]
    if given["training"]:
        count = _count(spec, dims)
        if count <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        batch_var, batch_mean = _variance(x, dims, 0.0)
        if mean is not None:
            with torch.no_grad():
                momentum = given["momentum"]
                mean.lerp_(batch_mean.detach().flatten().to(mean.dtype), momentum)
                var.lerp_((batch_var.detach().flatten() * (count / (count - 1))).to(var.dtype), momentum)
        groups = [spec.group(axis) for axis in spec.sharded.values()]
        centre, spread = replicate_to_shards(batch_mean, groups), replicate_to_shards(batch_var, groups)
    else:
        centre, spread = (align_parameters(func, x, each)[0].view(shape) for each in (mean, var))
    result = (local - centre) * torch.rsqrt(spread + given["eps"])
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return finish(result.to(local.dtype), spec)


@register_op(F.normalize)
def normalize(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Scale vectors along dims that are not sharded."""
    x: ShardTensor = args[0]
    refuse_out(func, kwargs, x._spec)
    dim = argument(args, kwargs, 2, "dim", 1)
    for d in dim if isinstance(dim, tuple | list) else (dim,):
        refuse_sharded(func, x._spec, normal_dim(d, x._spec.ndim))
    return finish(func(x._local, *args[1:], **kwargs), x._spec)
