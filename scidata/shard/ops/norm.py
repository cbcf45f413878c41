"""Normalisation with statistics of the whole tensor: batch, instance, group, layer and RMS norm, vectors of length one.

One round of communication where a dim that statistics are taken over is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.align import align_parameters, finish, plain_of, refuse_plain, to_axis
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moments import mean_of_squares, standardized, widened
from scidata.shard.ops.moving import there_and_back
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

Given = Tensor | None  # a parameter, or running statistics


def _scaled(result: Tensor, weight: Given, bias: Given, dtype: torch.dtype) -> Tensor:
    """Apply parameters that broadcast."""
    result = result if weight is None else result * weight
    return (result if bias is None else result + bias).to(dtype)


# -- channels ------------------------------------------------------------------------------------------------------


def _splits_channels(func: TorchFunction, x: ShardTensor, *others: Given) -> bool:
    """Whether the channels, dim 1, are sharded, so that other dims have to be; refuse an input without any."""
    refuse_plain(func, x, *others)
    if x.spec.ndim < 2:
        raise unsupported(func, "there are no channels (dim 1)", x.spec)
    return 1 in x.spec.sharded


def _of_channels(x: ShardTensor, weight: Given, bias: Given) -> tuple[Given, Given]:
    """Return parameters of each channel, whole on each rank, in a shape that broadcasts."""
    shape = [1, -1, *[1] * (x.spec.ndim - 2)]
    weight, bias = align_parameters(x, weight, bias)
    return None if weight is None else weight.view(shape), None if bias is None else bias.view(shape)


@torch.no_grad()
def _update(running: Given, new: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(new.detach().flatten().to(running.dtype), momentum)


@handles(F.batch_norm, any_order=True)
def batch_norm(
    func: TensorFunction,
    x: ShardTensor,
    running_mean: Given,
    running_var: Given,
    weight: Given = None,
    bias: Given = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel over all other dims. Collective in training; running statistics are one process's."""
    if _splits_channels(func, x, running_mean, running_var, weight, bias):
        rest = (running_mean, running_var, weight, bias, training, momentum, eps)
        return there_and_back(x, [1], lambda whole: func(whole, *rest))
    spec, local = x.spec, widened(x.local)
    weight, bias = _of_channels(x, weight, bias)
    if training:
        dims = [d for d in range(spec.ndim) if d != 1]
        count = math.prod(spec.global_shape[d] for d in dims)
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        if not count:  # running statistics stay as they are
            return finish(_scaled(local, weight, bias, x.dtype), spec)
        result, mean, var = standardized(local, spec, dims, spec.sharded, eps)
        _update(running_mean, mean, momentum)
        _update(running_var, var * (count / (count - 1)), momentum)
    else:
        running = _of_channels(x, running_mean, running_var)
        assert running[0] is not None
        assert running[1] is not None
        result = (local - running[0]) * torch.rsqrt(running[1] + eps)
    return finish(_scaled(result, weight, bias, x.dtype), spec)


@handles(F.instance_norm, any_order=True)
def instance_norm(
    func: TensorFunction,
    x: ShardTensor,
    running_mean: Given = None,
    running_var: Given = None,
    weight: Given = None,
    bias: Given = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel of each sample over the spatial dims; running statistics are means over the batch."""
    if _splits_channels(func, x, running_mean, running_var, weight, bias):
        rest = (running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        return there_and_back(x, [1], lambda whole: func(whole, *rest))
    if not use_input_stats:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training=False, eps=eps)
    spec, local = x.spec, widened(x.local)
    weight, bias = _of_channels(x, weight, bias)
    dims = list(range(2, spec.ndim))
    count = math.prod(spec.global_shape[d] for d in dims)
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {tuple(x.shape)}")
    result, mean, var = standardized(local, spec, dims, spec.sharded, eps)
    if running_mean is not None:
        both = torch.stack([_batch_mean(mean, spec), _batch_mean(var, spec) * (count / (count - 1))])
        for axis in [spec.sharded[0]] if 0 in spec.sharded else []:
            both = all_reduce_sum(both, spec.group(axis))
        _update(running_mean, both[0], momentum)
        _update(running_var, both[1], momentum)
    return finish(_scaled(result, weight, bias, x.dtype), spec)


def _batch_mean(value: Tensor, spec: ShardSpec) -> Tensor:
    """Return this rank's part of the mean over samples, ``(channels,)``."""
    return value.detach().flatten(1).sum(0) / spec.global_shape[0]


@handles(F.group_norm, torch.group_norm, any_order=True)
def group_norm(
    func: TensorFunction,
    x: ShardTensor,
    num_groups: int,
    weight: Given = None,
    bias: Given = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalise groups of channels over themselves and the spatial dims."""
    if _splits_channels(func, x, weight, bias):
        return there_and_back(x, [1], lambda whole: func(whole, num_groups, weight, bias, eps))
    spec = x.spec
    if spec.global_shape[1] % num_groups:
        raise RuntimeError(f"group_norm: {spec.global_shape[1]} channels are no multiple of {num_groups} groups")
    per_group = math.prod(spec.global_shape) // num_groups
    if per_group == 1 and func is F.group_norm:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    if spec.sharded.keys() <= {0}:  # torch's own asks F.group_norm's question of one rank's samples
        return finish(torch.group_norm(x.local, num_groups, *align_parameters(x, weight, bias), eps), spec)
    weight, bias = _of_channels(x, weight, bias)
    local: Tensor = widened(x.local).unflatten(1, (num_groups, -1))  # type: ignore[no-untyped-call]
    sharded = {d + (d > 1): axis for d, axis in spec.sharded.items()}
    result = standardized(local, spec, range(2, local.ndim), sharded, eps)[0]
    return finish(_scaled(result.flatten(1, 2), weight, bias, x.dtype), spec)


# -- trailing dims -------------------------------------------------------------------------------------------------


def _trailing(func: TorchFunction, x: ShardTensor, shape: int | Sequence[int], *others: Given) -> range:
    """Return the dims that a norm is taken over."""
    refuse_plain(func, x, *others)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    first = x.spec.ndim - len(shape)
    if x.spec.global_shape[first:] != shape or not shape:
        raise RuntimeError(f"{func.__name__}: normalized_shape {shape} is not the end of {x.spec.global_shape}")
    return range(first, x.spec.ndim)


def _cut(x: ShardTensor, dims: range, parameter: Given) -> Given:
    """Cut a parameter of the shape of the trailing dims to this rank's part of them."""
    parameter = plain_of(parameter)
    if parameter is not None:
        for d, axis in x.spec.sharded.items():
            parameter = to_axis(parameter, dims, (d, x.spec.sizes_of(axis)), x.spec, axis)
    return parameter


@handles(F.layer_norm, torch.layer_norm, any_order=True)
def layer_norm(
    func: TensorFunction,
    x: ShardTensor,
    normalized_shape: int | Sequence[int],
    weight: Given = None,
    bias: Given = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Normalise over trailing dims."""
    dims, spec = _trailing(func, x, normalized_shape, weight, bias), x.spec
    if spec.sharded.keys().isdisjoint(dims):
        shape = spec.global_shape[dims.start :]
        return finish(F.layer_norm(x.local, shape, *align_parameters(x, weight, bias), eps), spec)
    weight, bias = _cut(x, dims, weight), _cut(x, dims, bias)
    result = standardized(widened(x.local), spec, dims, spec.sharded, eps)[0]
    return finish(_scaled(result, weight, bias, x.dtype), spec)


@handles(F.rms_norm, torch.rms_norm, any_order=True)
def rms_norm(
    func: TensorFunction,
    x: ShardTensor,
    normalized_shape: int | Sequence[int],
    weight: Given = None,
    eps: float | None = None,
) -> Tensor:
    """Divide by the root of the mean square over trailing dims."""
    dims, spec = _trailing(func, x, normalized_shape, weight), x.spec
    weight = _cut(x, dims, weight)
    if spec.sharded.keys().isdisjoint(dims):
        return finish(F.rms_norm(x.local, spec.global_shape[dims.start :], weight, eps), spec)
    local = widened(x.local)
    eps = torch.finfo(local.dtype).eps if eps is None else eps
    result = local * torch.rsqrt(mean_of_squares(local, spec, dims) + eps)
    return finish(_scaled(result, weight, None, x.dtype), spec)
