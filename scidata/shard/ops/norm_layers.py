"""Layer and RMS norm over any trailing dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import register_op
from scidata.shard.ops.align import align_parameters, bind, finish, refuse_plain, to_axis
from scidata.shard.ops.moments import mean_of_squares, standardized, widened
from scidata.shard.tensor import ShardTensor


def _parameter(func: Any, x: ShardTensor, given: Any, dims: Sequence[int]) -> Tensor | None:
    """Cut a parameter of the shape of the trailing dims to this rank's part of them."""
    if given is None:
        return None
    parameter: Tensor = given.full_tensor() if isinstance(given, ShardTensor) else given
    for d, axis in x.spec.sharded.items():
        parameter = to_axis(parameter, dims, (d, x.spec.sizes_of(axis)), x.spec, axis)
    return parameter


def _trailing(func: Any, x: ShardTensor, shape: Any) -> tuple[tuple[int, ...], list[int]]:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    ndim = x.spec.ndim
    if x.spec.global_shape[ndim - len(shape) :] != shape or not shape:
        raise RuntimeError(f"{func.__name__}: normalized_shape {shape} is not the end of {x.spec.global_shape}")
    return shape, list(range(ndim - len(shape), ndim))


@register_op(F.layer_norm, torch.layer_norm, any_order=True)
def layer_norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Normalise over trailing dims; one round where any of them is sharded."""
    given = bind("input normalized_shape weight bias eps", args, kwargs, weight=None, bias=None, eps=1e-5)
    x = given["input"]
    refuse_plain(func, x, *given.values())
    shape, dims = _trailing(func, x, given["normalized_shape"])
    if not any(d in x.spec.sharded for d in dims):
        weight, bias = align_parameters(func, x, given["weight"], given["bias"])
        return finish(F.layer_norm(x.local, shape, weight, bias, given["eps"]), x.spec)
    weight, bias = (_parameter(func, x, given[name], dims) for name in ("weight", "bias"))
    local = widened(x.local)
    result = standardized(local, x.spec, dims, x.spec.sharded, given["eps"])[0]
    result = result if weight is None else result * weight
    result = result if bias is None else result + bias
    return finish(result.to(x.local.dtype), x.spec)


@register_op(F.rms_norm, torch.rms_norm, any_order=True)
def rms_norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Divide by the root of the mean square over trailing dims; one round where any of them is sharded."""
    given = bind("input normalized_shape weight eps", args, kwargs, weight=None, eps=None)
    x = given["input"]
    refuse_plain(func, x, *given.values())
    shape, dims = _trailing(func, x, given["normalized_shape"])
    weight = _parameter(func, x, given["weight"], dims)
    if not any(d in x.spec.sharded for d in dims):
        return finish(F.rms_norm(x.local, shape, weight, given["eps"]), x.spec)
    eps = torch.finfo(x.local.dtype).eps if given["eps"] is None else given["eps"]
    local = widened(x.local)
    result = local * torch.rsqrt(mean_of_squares(local, x.spec, dims) + eps)
    result = result if weight is None else result * weight
    return finish(result.to(x.local.dtype), x.spec)
