"""Normalisation with statistics of the whole tensor: batch, instance and group norm, and vectors of length one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import align_parameters, bind, finish, refuse_out, refuse_plain
from scidata.shard.ops.arguments import argument, normal_dim
from scidata.shard.ops.moments import standardized, widened
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

_STATISTICS = "input running_mean running_var weight bias"


def _input(func: Any, given: dict[str, Any]) -> ShardTensor:
    """Return the input; its channels, dim 1, must not be sharded."""
    x = given["input"]
    refuse_plain(func, x, *given.values())
    if x.spec.ndim < 2 or 1 in x.spec.sharded:
        raise unsupported(func, "the channels (dim 1) are sharded, or there are none", x.spec)
    return x  # type: ignore[no-any-return]


def _scaled(result: Tensor, weight: Tensor | None, bias: Tensor | None, local: Tensor) -> Tensor:
    """Apply the parameters of each channel."""
    shape = [1, -1, *[1] * (result.ndim - 2)]
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result.to(local.dtype)


@torch.no_grad()
def _update(running: Tensor | None, new: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(new.detach().flatten().to(running.dtype), momentum)


@register_op(F.batch_norm, any_order=True)
def batch_norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Normalise each channel over all other dims. Collective in training; running statistics are one process's."""
    given = bind(f"{_STATISTICS} training momentum eps", args, kwargs, weight=None, bias=None, training=False)
    given = {"momentum": 0.1, "eps": 1e-5, **given}
    x = _input(func, given)
    spec, local = x.spec, widened(x.local)
    weight, bias = align_parameters(func, x, given["weight"], given["bias"])
    if given["training"]:
        dims = [d for d in range(spec.ndim) if d != 1]
        count = math.prod(spec.global_shape[d] for d in dims)
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        if not count:  # running statistics stay as they are
            return finish(_scaled(local, weight, bias, x.local), spec)
        result, mean, var = standardized(local, spec, dims, spec.sharded, given["eps"])
        _update(given["running_mean"], mean, given["momentum"])
        _update(given["running_var"], var * (count / (count - 1)), given["momentum"])
    else:
        shape = [1, -1, *[1] * (spec.ndim - 2)]
        running = align_parameters(func, x, given["running_mean"], given["running_var"])
        mean, var = (each.view(shape) for each in running)
        result = (local - mean) * torch.rsqrt(var + given["eps"])
    return finish(_scaled(result, weight, bias, x.local), spec)


@register_op(F.instance_norm, any_order=True)
def instance_norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Normalise each channel of each sample over the spatial dims; running statistics are means over the batch."""
    given = bind(f"{_STATISTICS} use_input_stats momentum eps", args, kwargs, running_mean=None, running_var=None)
    given = {"weight": None, "bias": None, "use_input_stats": True, "momentum": 0.1, "eps": 1e-5, **given}
    x = _input(func, given)
    if not given["use_input_stats"]:
        names = ("running_mean", "running_var", "weight", "bias", "eps")
        return F.batch_norm(x, **{name: given[name] for name in names}, training=False)
    spec, local = x.spec, widened(x.local)
    weight, bias = align_parameters(func, x, given["weight"], given["bias"])
    dims = list(range(2, spec.ndim))
    count = math.prod(spec.global_shape[d] for d in dims)
    if count <= 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {tuple(x.shape)}")
    result, mean, var = standardized(local, spec, dims, spec.sharded, given["eps"])
    if given["running_mean"] is not None:
        both = torch.stack([_batch_mean(mean, spec), _batch_mean(var, spec) * (count / (count - 1))])
        for axis in [spec.sharded[0]] if 0 in spec.sharded else []:
            both = all_reduce_sum(both, spec.group(axis))
        _update(given["running_mean"], both[0], given["momentum"])
        _update(given["running_var"], both[1], given["momentum"])
    return finish(_scaled(result, weight, bias, x.local), spec)


def _batch_mean(value: Tensor, spec: ShardSpec) -> Tensor:
    """Return this rank's part of the mean over samples, ``(channels,)``."""
    return value.detach().flatten(1).sum(0) / spec.global_shape[0]


@register_op(F.group_norm, torch.group_norm, any_order=True)
def group_norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Normalise groups of channels over themselves and the spatial dims."""
    given = bind("input num_groups weight bias eps", args, kwargs, weight=None, bias=None, eps=1e-5)
    x = _input(func, given)
    spec, groups = x.spec, given["num_groups"]
    weight, bias = align_parameters(func, x, given["weight"], given["bias"])
    if spec.global_shape[1] % groups:
        raise RuntimeError(f"group_norm: {spec.global_shape[1]} channels are no multiple of {groups} groups")
    if all(d == 0 for d in spec.sharded):
        return finish(F.group_norm(x.local, groups, weight, bias, given["eps"]), spec)
    local: Tensor = widened(x.local).unflatten(1, (groups, -1))  # type: ignore[no-untyped-call]
    sharded = {d + (d > 1): axis for d, axis in spec.sharded.items()}
    result = standardized(local, spec, range(2, local.ndim), sharded, given["eps"])[0]
    return finish(_scaled(result.flatten(1, 2), weight, bias, x.local), spec)


@register_op(F.normalize, any_order=True)
def normalize(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Scale vectors along any dims to length one."""
    x: ShardTensor = argument(args, kwargs, 0, "input")
    refuse_out(func, kwargs, x.spec)
    p, dim, eps = (argument(args, kwargs, *which) for which in ((1, "p", 2.0), (2, "dim", 1), (3, "eps", 1e-12)))
    dims: Sequence[int] = dim if isinstance(dim, tuple | list) else (dim,)
    if not any(normal_dim(d, x.spec.ndim) in x.spec.sharded for d in dims):
        return finish(func(x.local, p, dim, eps), x.spec)
    lengths: Tensor = x.norm(p, dim, keepdim=True).clamp_min(eps)
    return x / lengths
