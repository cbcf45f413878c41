"""Fourier transforms along any dims, and the parts of complex numbers."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import torch
from torch import Tensor

from scidata.shard.op_table import TensorFunction, find, getters
from scidata.shard.ops.align import Dims, refuse_plain
from scidata.shard.ops.arguments import handles, normal_dim
from scidata.shard.ops.moving import cut_to, moved_off, there_and_back, to_layout, without_empty
from scidata.shard.ops.shapes import derived
from scidata.shard.ops.spectra import Blank, Spectrum, spectrum
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import Copy, compact, compact_gradient

_ONE = "fft ifft rfft irfft hfft ihfft"
_TWO, _MANY = ([f"{name}{kind}" for name in _ONE.split()] for kind in ("2", "n"))


def _dims(spec: ShardSpec, size: int | Sequence[int] | None, dim: Dims) -> list[int]:
    """Return the transformed dims: by default the last ones, as many as there are sizes, or all."""
    if dim is None:
        count = len(size) if isinstance(size, Sequence) else spec.ndim
        return list(range(spec.ndim - count, spec.ndim))
    return [normal_dim(d, spec.ndim) for d in ((dim,) if isinstance(dim, int) else dim)]


@handles(*find([*_ONE.split(), *_TWO, *_MANY], namespaces=(torch.fft,)))
def fourier(
    func: TensorFunction,
    x: ShardTensor,
    size: int | Sequence[int] | None = None,
    dim: Dims | EllipsisType = ...,
    norm: str | None = None,
    *,
    n: int | None = None,
    s: Sequence[int] | None = None,
) -> Tensor:
    """Transform dims. Collective if one is sharded: another dim is sharded meanwhile, one exchange each way."""
    size = n if n is not None else s if s is not None else size
    if isinstance(dim, EllipsisType):
        dim = (-2, -1) if func.__name__.endswith("2") else None if func.__name__.endswith("n") else -1
    refuse_plain(func, x)
    dims = _dims(x.spec, size, dim)
    found = _of_columns(func, x, size, dims, norm)
    if found is not None:
        return found
    if any(d in x.spec.sharded for d in dims):
        return there_and_back(x, dims, lambda moved: func(moved, size, dim, norm))
    result = func(without_empty(x.local, x.spec), size, dim, norm)
    shape = [n if d in x.spec.sharded else result.shape[d] for d, n in enumerate(x.spec.global_shape)]
    spec = x.spec.derive(shape, x.spec.dims, x.spec.sizes)
    return ShardTensor(cut_to(result, spec), spec)


def _of_columns(
    func: TensorFunction, x: ShardTensor, size: int | Sequence[int] | None, dims: Sequence[int], norm: str | None
) -> Tensor | None:
    """Transform several dims and send only the wanted columns; None if these cannot be known."""
    kind = func.__name__.removeprefix("fft_").removesuffix("2").removesuffix("n")
    if len(dims) < 2 or len({*dims}) < len(dims) or kind not in ("fft", "rfft", "ifft", "irfft"):
        return None
    given = [None] * len(dims) if size is None else list(size) if isinstance(size, Sequence) else []
    if len(given) != len(dims) or any(n is not None and n < 1 for n in given):
        return None
    sizes = dict(zip(dims, given, strict=True))
    if kind in ("fft", "rfft"):
        return spectrum(x, kind, sizes, norm)
    if not isinstance(x, Blank):
        return None
    full = 2 * (x.shape[dims[-1]] - 1) if kind == "irfft" else x.shape[dims[-1]]
    lengths = {d: n or (full if d == dims[-1] else x.shape[d]) for d, n in sizes.items()}
    return x.transformed(kind, lengths, norm)


@handles(torch.fft.fftshift, torch.fft.ifftshift)
def shift(func: TensorFunction, x: ShardTensor, dim: Dims = None) -> Tensor:
    """Bring the zero frequency to the middle, or back: rolls by half. Collective along sharded dims."""
    dims, sign = _dims(x.spec, None, dim), -1 if func is torch.fft.ifftshift else 1
    if isinstance(x, Spectrum | Blank) and x.computed is None and (torch.is_grad_enabled() or not x.requires_grad):
        return x.shifted(func, dims)
    return torch.roll(x, [sign * (x.spec.global_shape[d] // 2) for d in dims], dims)


@handles("real imag conj", *getters("real imag"))
def parts_of_complex(func: TensorFunction, x: ShardTensor) -> Tensor:
    """Return real part, imaginary part or conjugates of complex numbers as views."""
    return derived(x, func(x.local), x.spec)


@handles(torch.view_as_real)
def view_as_real(x: ShardTensor) -> Tensor:
    """See complex numbers as pairs along a new last dim."""
    spec, pairs = x.spec, torch.view_as_real(x.local)
    if pairs.requires_grad and not pairs.numel():
        compact_gradient(pairs)
    return derived(x, pairs, spec.derive((*spec.global_shape, 2), spec.dims, spec.sizes))


@handles(torch.view_as_complex)
def view_as_complex(x: ShardTensor) -> Tensor:
    """View pairs along the last dim as complex numbers. Collective if that dim is sharded."""
    last = x.spec.ndim - 1
    if last not in x.spec.sharded:
        return derived(x, torch.view_as_complex(compact(x.local)), x.spec.without([last]))

    def take() -> Tensor:
        return torch.view_as_complex(compact(moved_off(x, [last]).local.contiguous()))

    def put() -> None:
        x.copy_(to_layout(ShardTensor(torch.view_as_real(local), moved.spec), x.spec))

    moved = moved_off(x, [last])
    local = torch.view_as_complex(compact(moved.local.contiguous()))
    return ShardTensor(local, moved.spec.without([last]), copied=Copy(x, local, take, put))
