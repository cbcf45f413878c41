"""Fourier transforms along any dims, and the parts of complex numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scidata.shard.op_table import find, getters, register_op
from scidata.shard.ops.align import refuse_out, refuse_plain, to_layout
from scidata.shard.ops.arguments import argument, normal_dim
from scidata.shard.ops.moving import cut_to, moved_off, there_and_back, without_empty
from scidata.shard.ops.shapes import derived
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import Copy

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


@register_op(*_named(*_ONE, *_MANY))
def fourier(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Transform any dims. Collective where one is sharded: another dim is for the time being, one exchange each way."""
    x: ShardTensor = argument(args, kwargs, 0, "input")
    refuse_plain(func, x)
    refuse_out(func, kwargs, x.spec)
    rest = {name: value for name, value in kwargs.items() if name != "input"}
    dims = _dims(func, x.spec, args, kwargs)
    if any(d in x.spec.sharded for d in dims):
        return there_and_back(x, dims, lambda moved: func(moved, *args[1:], **rest))
    result = func(without_empty(x.local, x.spec), *args[1:], **rest)
    shape = [n if d in x.spec.sharded else result.shape[d] for d, n in enumerate(x.spec.global_shape)]
    spec = x.spec.derive(shape, x.spec.dims, x.spec.sizes)
    return ShardTensor(cut_to(result, spec), spec)


@register_op(*_named(*_SHIFTS))
def shift(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Bring the zero frequency to the middle, or back: rolls by half. Collective along sharded dims."""
    x: ShardTensor = argument(args, kwargs, 0, "input")
    dims = _dims(func, x.spec, args, kwargs)
    halves = [x.spec.global_shape[d] // 2 for d in dims]
    inverse = func is torch.fft.ifftshift
    return torch.roll(x, [-half if inverse else half for half in halves], dims)


# -- complex numbers -----------------------------------------------------------------------------------------------


@register_op(*find("real imag conj", namespaces=(torch, Tensor)), *getters("real imag"))
def parts_of_complex(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Take a part of complex numbers, or their conjugates, as views."""
    x: ShardTensor = args[0] if args else kwargs["input"]
    return derived(x, func(x.local), x.spec)


@register_op(torch.view_as_real)
def view_as_real(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """See complex numbers as pairs along a new last dim."""
    x: ShardTensor = args[0] if args else kwargs["input"]
    spec, pairs = x.spec, torch.view_as_real(x.local)
    if pairs.requires_grad and not pairs.numel():  # backward sees the gradient as complex, as below
        pairs.register_hook(_compact)  # type: ignore[no-untyped-call, unused-ignore]
    return derived(x, pairs, spec.derive((*spec.global_shape, 2), spec.dims, spec.sizes))


def _compact(part: Tensor) -> Tensor:
    """Copy a part without elements: it may have any strides, of which torch sees only some as complex."""
    return part if part.numel() else part.clone(memory_format=torch.contiguous_format)


@register_op(torch.view_as_complex)
def view_as_complex(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """See pairs along the last dim as complex numbers. Collective where that dim is sharded."""
    x: ShardTensor = args[0] if args else kwargs["input"]
    last = x.spec.ndim - 1
    if last not in x.spec.sharded:
        return derived(x, torch.view_as_complex(_compact(x.local)), x.spec.without([last]))

    def take() -> Tensor:
        return torch.view_as_complex(_compact(moved_off(x, [last]).local.contiguous()))

    def put() -> None:
        x.copy_(to_layout(ShardTensor(torch.view_as_real(local), moved.spec), x.spec))

    moved = moved_off(x, [last])
    local = torch.view_as_complex(_compact(moved.local.contiguous()))
    return ShardTensor(local, moved.spec.without([last]), copied=Copy(x, local, take, put))
