"""Layers: normalisation over dims that are not sharded, convolution of whole patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.ops.align import align_parameters, finish, specs_of
from scidata.shard.ops.registry import register_op, unsupported
from scidata.shard.tensor import ShardTensor


def _bind(names: str, args: Sequence[Any], kwargs: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    return {**defaults, **dict(zip(names.split(), args, strict=False)), **kwargs}


def _refuse_plain(func: Any, x: Any, *others: Any) -> None:
    if not isinstance(x, ShardTensor) or x._spec.is_replicated:
        specs = specs_of([x, *others])
        raise unsupported(func, "a plain input meets sharded parameters", *specs, remedy="use full_tensor()")


@register_op(F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
def layer_norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Normalise over trailing dims that are not sharded."""
    x, shape, *rest = (*args, *kwargs.values()) if len(args) < 2 else args
    rest_by_name = kwargs if len(args) >= 2 else {}
    _refuse_plain(func, x, *rest, *rest_by_name.values())
    spec = x._spec
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    for d in range(spec.ndim - len(shape), spec.ndim):
        if d in spec.sharded:
            raise unsupported(func, f"it normalises over dim {d}, which is sharded", spec)
    is_tensor = [isinstance(r, Tensor) for r in rest]
    new_rest = [align_parameters(func, x, r)[0] if t else r for r, t in zip(rest, is_tensor, strict=True)]
    named = {k: align_parameters(func, x, v)[0] if isinstance(v, Tensor) else v for k, v in rest_by_name.items()}
    return finish(func(x._local, shape, *new_rest, **named), spec)


# -- convolution ---------------------------------------------------------------------------------------------------


def _per_dim(value: Any, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)


@register_op(F.conv1d, F.conv2d, F.conv3d)
def conv(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Convolve where no kernel reaches over a bound: patches (stride = kernel) and 1×1 kernels."""
    given = _bind(
        "input weight bias stride padding dilation groups", args, kwargs, bias=None, stride=1, padding=0, dilation=1
    )
    x, weight = given["input"], given["weight"]
    _refuse_plain(func, x, weight)
    spec, count = x._spec, len(weight.shape) - 2
    first = spec.ndim - count  # of the spatial dims
    kernel, stride = tuple(weight.shape[2:]), _per_dim(given["stride"], count)
    dilation = _per_dim(given["dilation"], count)
    for d, axis in spec.sharded.items():
        if d == first - 1:
            raise unsupported(func, "the channels are sharded", spec)
        if d < first:
            continue
        s = d - first
        padding = given["padding"] if isinstance(given["padding"], str) else _per_dim(given["padding"], count)[s]
        clear = padding in (0, "valid") or (padding == "same" and kernel[s] == 1)
        if kernel[s] != stride[s] or not clear or (dilation[s] != 1 and kernel[s] != 1):
            reason = (
                f"kernel {kernel[s]}, stride {stride[s]}, padding {padding} along the sharded dim {d} reach over bounds"
            )
            raise unsupported(func, reason, spec)
        if any(size % stride[s] for size in spec.sizes_of(axis)):
            raise unsupported(
                func,
                f"the sizes along dim {d} are no multiples of the patch size {stride[s]}",
                spec,
                remedy=f"open the dataset with align={stride[s]}, or redistribute() to such sizes",
            )
    given["weight"], given["bias"] = align_parameters(func, x, weight, given["bias"])
    local = x._local
    empty = [d for d in range(first, spec.ndim) if local.shape[d] == 0]
    for d in empty:  # torch convolves no empty parts: one patch of zeros goes in, and its result is cut off
        zeros = list(local.shape)
        zeros[d] = kernel[d - first]
        local = torch.cat([local, local.new_zeros(zeros)], d)
    result = func(**{**given, "input": local})
    for d in empty:
        result = result.narrow(d, 0, 0)
    shape, sizes = list(result.shape), list(spec.sizes)
    for d, axis in spec.sharded.items():
        step = stride[d - first] if d >= first else 1
        sizes[axis] = tuple(size // step for size in spec.sizes_of(axis))
        shape[d] = spec.global_shape[d] // step
    return finish(result, spec.derive(shape, spec.dims, sizes))
