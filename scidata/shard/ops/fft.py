"""Fourier transforms along dims that are not sharded; along a sharded one every row meets every other, which raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scidata.shard.op_table import register_op, unsupported
from scidata.shard.ops.align import refuse_out, refuse_plain
from scidata.shard.ops.shapes import argument, keep_dims, normal_dim
from scidata.shard.tensor import ShardTensor

_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_MANY = tuple(f"{name}{kind}" for name in _ONE for kind in ("2", "n"))
_SHIFTS = ("fftshift", "ifftshift")


def _named(*names: str) -> list[Any]:
    return [getattr(torch.fft, name) for name in names]


def _dims(func: Any, spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the dims that are transformed."""
    name = func.__name__.removeprefix("fft_")
    if name in _SHIFTS:
        size, dim = None, argument(args, kwargs, 1, "dim")
    else:
        size = argument(args, kwargs, 1, "n" if name in _ONE else "s")
        dim = argument(args, kwargs, 2, "dim", -1 if name in _ONE else (-2, -1) if name.endswith("2") else None)
    if dim is None:
        count = spec.ndim if size is None else len(size)
        return list(range(spec.ndim - count, spec.ndim))
    return [normal_dim(d, spec.ndim) for d in (dim if isinstance(dim, tuple | list) else (dim,))]


@register_op(*_named(*_ONE, *_MANY, *_SHIFTS))
def fourier(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Transform dims that are not sharded."""
    x: ShardTensor = argument(args, kwargs, 0, "input")
    refuse_plain(func, x)
    refuse_out(func, kwargs, x._spec)
    rest = {name: value for name, value in kwargs.items() if name != "input"}
    for d in _dims(func, x._spec, args, kwargs):
        if d in x._spec.sharded:
            remedy = "shard another dim for the transform: redistribute() there and back"
            raise unsupported(func, f"dim {d} is sharded and would be transformed", x._spec, remedy=remedy)
    local = x._local
    empty = [d for d in x._spec.sharded if local.shape[d] == 0]
    for d in empty:  # some kernels take no empty batch
        shape = list(local.shape)
        shape[d] = 1
        local = torch.cat([local, local.new_zeros(shape)], d)
    result = func(local, *args[1:], **rest)
    for d in empty:
        result = result.narrow(d, 0, 0)
    return keep_dims(x, result)
