"""Activations that are not elementwise: with a parameter for each channel, of two halves, or drawn."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.nn.functional as F
from torch import Tensor

from scidata.shard.op_table import TensorFunction, unsupported
from scidata.shard.ops.align import on_parts, specs_of
from scidata.shard.ops.arguments import handles, normal_dim
from scidata.shard.tensor import ShardTensor


@handles(F.prelu, Tensor.prelu, any_order=True)
def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """Scale negative elements by a learned number, or by one for each channel (dim 1)."""
    shape, own = tuple(input.shape), tuple(weight.shape)
    channels = shape[1] if len(shape) > 1 else 1
    if len(own) > 1 or (own not in ((), (1,)) and own != (channels,)):
        raise RuntimeError(f"prelu: a weight of shape {own} does not fit an input of shape {shape}")
    name: Hashable = 1 if own == (channels,) and len(shape) > 1 else "weight"
    dims = range(len(shape))
    return on_parts(F.prelu, F.prelu, [input, weight], [dims, [name] * len(own)], dims)


@handles(F.glu)
def glu(input: ShardTensor, dim: int = -1) -> Tensor:
    """Half of a dim, gated by the other half."""
    spec = input.spec
    dim = normal_dim(dim, spec.ndim)
    if spec.global_shape[dim] % 2:
        raise RuntimeError(f"glu: dim {dim} of size {spec.global_shape[dim]} has no halves")
    half = spec.global_shape[dim] // 2
    if dim not in spec.sharded:
        return ShardTensor(F.glu(input.local, dim), spec.with_rows(dim, half))
    first, second = input.split(half, dim)  # type: ignore[no-untyped-call]
    result: Tensor = first * second.sigmoid()
    return result


@handles(F.rrelu, torch.rrelu)
def rrelu(
    func: TensorFunction, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *drawn: bool, **named: bool
) -> Tensor:
    """Leaky ReLU by the middle of the slopes; drawn ones are refused."""
    if any((*drawn, *named.values())):
        raise unsupported(func, "training=True or inplace=True", *specs_of([x]))
    return F.leaky_relu(x, (lower + upper) / 2)
