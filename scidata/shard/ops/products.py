"""Products of vectors and matrices, and statistics made of them, as sums of products that have rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import cast

import torch
from torch import Tensor

from scidata.shard.ops.arguments import composes, handles, normal_dim, several


def _letters(count: int, start: int = 0) -> str:
    return "".join(chr(ord("a") + i) for i in range(start, start + count))


@handles(torch.tensordot)
def tensordot(a: Tensor, b: Tensor, dims: int | Tensor | Sequence[int | Sequence[int]] = 2) -> Tensor:
    """Sum products over dims of both."""
    if isinstance(dims, int):
        left, right = list(range(len(a.shape) - dims, len(a.shape))), list(range(dims))
    else:
        given: Sequence[int | Sequence[int]] = dims.tolist() if isinstance(dims, Tensor) else dims
        left, right = ([d] if isinstance(d, int) else [*d] for d in given)
    left, right = [normal_dim(d, len(a.shape)) for d in left], [normal_dim(d, len(b.shape)) for d in right]
    pairs = [(d, e) for d, e in zip(left, right, strict=True) if a.shape[d] != b.shape[e]]
    for d, e in pairs:  # one of them has one row, which goes with all of the other
        a = a.sum(d, keepdim=True) if b.shape[e] == 1 else a
        b = b.sum(e, keepdim=True) if a.shape[d] == 1 else b
    if [a.shape[d] for d in left] != [b.shape[d] for d in right]:
        raise RuntimeError(f"tensordot: dims {left} of {tuple(a.shape)} do not match dims {right} of {tuple(b.shape)}")
    ours, theirs = _letters(len(a.shape)), [*_letters(len(b.shape), len(a.shape))]
    for d, e in zip(left, right, strict=True):
        theirs[e] = ours[d]
    summed = {ours[d] for d in left}
    out = [c for c in (*ours, *theirs) if c not in summed]
    return torch.einsum(f"{ours},{''.join(theirs)}->{''.join(out)}", a, b)


@handles("kron")
def kron(input: Tensor, other: Tensor) -> Tensor:
    """Kronecker product."""
    ndim = max(len(input.shape), len(other.shape))
    first = input.reshape((1,) * (ndim - len(input.shape)) + tuple(input.shape))
    second = other.reshape((1,) * (ndim - len(other.shape)) + tuple(other.shape))
    shape = [n * m for n, m in zip(first.shape, second.shape, strict=True)]
    left = first.reshape([n for extent in first.shape for n in (extent, 1)])
    return (left * second.reshape([n for extent in second.shape for n in (1, extent)])).reshape(shape)


@handles("cross", any_order=True)
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
    """Cross product along a dim of three, by default the first such."""
    if dim is None:
        dim = next((d for d, n in enumerate(input.shape) if n == 3), None)
        if dim is None:
            raise RuntimeError(f"cross: no dim of {tuple(input.shape)} has three elements")
    return cast("Tensor", torch.linalg.cross(input, other, dim=dim))


@handles("renorm")
def renorm(input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Scale the slices along a dim whose norm is larger than ``maxnorm`` to that."""
    rest = [d for d in range(len(input.shape)) if d != normal_dim(dim, len(input.shape))]
    if not rest:
        raise RuntimeError("renorm: it takes a tensor of two dims at least")
    wide = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    large = torch.linalg.vector_norm(input.detach(), p, rest, keepdim=True, dtype=wide) > maxnorm
    norm = torch.linalg.vector_norm(input.where(large, 0), p, rest, keepdim=True, dtype=wide)  # others have no gradient
    return (input.to(wide) * torch.where(large, maxnorm / (norm + 1e-7), 1.0)).to(input.dtype)


@handles(torch.vander)
def vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:  # noqa: N803
    """Powers of each element, the highest first."""
    count = len(x) if N is None else N
    powers = [x**i for i in (range(count) if increasing else reversed(range(count)))]
    return torch.stack(powers, 1) if powers else x.unsqueeze(1)[:, :0]


@handles("cov")
def cov(
    input: Tensor, *, correction: float | Tensor = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Covariances of variables, the rows, over observations, the columns."""
    if input.dtype == torch.bool:
        raise RuntimeError("cov: it takes no bools")
    if aweights is not None and not aweights.is_floating_point():
        raise RuntimeError(f"cov: aweights must be floating point, not {aweights.dtype}")
    x = input if len(input.shape) > 1 else input.unsqueeze(0)
    given = [w for w in (fweights, aweights) if w is not None]
    count: int | Tensor = x.shape[1]
    if given:
        weights = given[0] * given[1] if len(given) > 1 else given[0]
        total = weights.sum()
        mean = (x * weights).sum(1, keepdim=True) / total
        count = total
        if aweights is not None:
            correction = correction * (weights * aweights).sum() / total
    else:
        mean = x.sum(1, keepdim=True) / count
    centred = x - mean
    right = centred * weights if given else centred
    product = centred @ (right.conj() if x.is_complex() else right).transpose(0, 1)
    freedom = count - correction
    freedom = freedom.clamp(min=0) if isinstance(freedom, Tensor) else max(freedom, 0)
    result = product / freedom
    return result.squeeze()


@handles("corrcoef")
def corrcoef(input: Tensor) -> Tensor:
    """Correlations of variables, the rows."""
    covariance = torch.cov(input)
    if not len(covariance.shape):
        return covariance / covariance
    deviation = covariance.diagonal().real.sqrt() if covariance.is_complex() else covariance.diagonal().sqrt()
    result = covariance / deviation.unsqueeze(1) / deviation
    return result if result.is_complex() else result.clamp(-1, 1)


@handles("aminmax")
def aminmax(input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Smallest and largest elements."""
    dims = () if dim is None else dim
    low, high = input.amin(dims, keepdim=keepdim), input.amax(dims, keepdim=keepdim)
    return torch.return_types.aminmax((low, high))


composes(
    {
        "inner": lambda input, other: (
            torch.tensordot(input, other, dims=([-1], [-1])) if len(input.shape) and len(other.shape) else input * other
        ),
        "vdot": lambda input, other: torch.dot(input.conj() if input.is_complex() else input, other),
        "dist": lambda input, other, p=2: torch.linalg.vector_norm(input - other, p),
        torch.linalg.multi_dot: lambda tensors: reduce(torch.matmul, tensors),
        torch.chain_matmul: lambda *matrices: torch.linalg.multi_dot(several(matrices)),
        torch.linalg.vander: lambda x, N=None: torch.stack([x**i for i in range(x.shape[-1] if N is None else N)], -1),  # noqa: N803
    }
)
