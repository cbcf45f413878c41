"""Reductions: over the local part, then over the ranks' results.

Sums are reduced. Of few ranks, everything else gathers one row from each that owns anything; of many, it is reduced,
and ranks without rows give its neutral element. Gradients are those of the value. A result that is replicated on all
axes is a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from scidata.shard.comm.functions import known
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.comm.transport import (
    Group,
    all_reduce_max,
    all_reduce_min,
    all_reduce_product,
    gather,
    gathers_to_reduce,
    with_dim,
)
from scidata.shard.op_table import TensorFunction, find, unsupported
from scidata.shard.ops.align import Dims, Dtype, dims_of, finish, numbered_alike
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.moments import deviations, of_norm, of_prod, weighted, widened
from scidata.shard.rows.ordered import LARGEST, least_over, sum_over
from scidata.shard.sizes import facts_of
from scidata.shard.spec import ShardSpec, row_major
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import has_dual_level

Extreme = Callable[..., tuple[Tensor, Tensor]]  # torch.max or torch.min along a dim


class _Reduction(NamedTuple):
    """A reduction along a dim, its counterpart over ranks, and its value for a rank without rows."""

    along: TensorFunction
    ranks: Callable[[Tensor, Group], Tensor]
    neutral: Callable[[torch.dtype], float]


def _least(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _largest(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _log_of_sum(logs: Tensor, group: Group) -> Tensor:
    top = all_reduce_max(logs, group)
    top = top.masked_fill(top.isinf(), 0)
    return sum_over((logs - top).exp_(), group).log_().add_(top)


_MAX, _MIN = _Reduction(torch.amax, all_reduce_max, _least), _Reduction(torch.amin, all_reduce_min, _largest)
_PROD = _Reduction(torch.prod, all_reduce_product, lambda dtype: 1)
_LOG_SUM = _Reduction(torch.logsumexp, _log_of_sum, _least)


def _norm(order: float) -> _Reduction:
    """Norms of norms."""
    along = partial(torch.linalg.vector_norm, ord=order)
    if math.isinf(order):
        return (_MAX if order > 0 else _MIN)._replace(along=along)

    def of_ranks(norms: Tensor, group: Group) -> Tensor:
        return sum_over(norms.pow(order), group).pow(1 / order)

    return _Reduction(along, of_ranks, lambda dtype: 0 if order > 0 else math.inf)


def _axes(spec: ShardSpec, dims: Sequence[int]) -> list[int]:
    return [spec.sharded[d] for d in dims if d in spec.sharded]


def _reduced_spec(spec: ShardSpec, dims: Sequence[int], keepdim: bool) -> ShardSpec:
    key = ("reduce", tuple(dims), keepdim)
    found: ShardSpec | None = spec.plans.get(key)
    return spec.plans.put(key, spec.without(dims, keepdim=keepdim)) if found is None else found


def _drop(local: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Drop the reduced dims, of extent 1."""
    if keepdim or not dims:
        return local
    # a copy, since torch's result is no view: autograd treats writes to a view, and to views of it, differently
    return local.reshape([n for d, n in enumerate(local.shape) if d not in dims]).clone()


def _finish(x: ShardTensor, kept: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return finish(_drop(kept, dims, keepdim), _reduced_spec(x.spec, dims, keepdim))


def _over_ranks(x: ShardTensor, local: Tensor, dim: int, over: _Reduction) -> Tensor:
    """Reduce one dim, kept with extent 1: locally, then over the ranks that have any rows of it."""
    axis = x.spec.axis_of_dim(dim)
    rows = () if axis is None else facts_of(x.spec.sizes_of(axis)).held
    has_rows = bool(local.shape[dim])
    if has_rows or not any(rows):  # without any rows, as one process does
        local = over.along(local, dim=dim, keepdim=True)
    if axis is None or not any(rows):
        return local
    group = x.spec.group(axis)
    if len(rows) == 1:
        return local
    if gathers_to_reduce(len(rows)) or local.is_complex():  # which backends do not multiply or compare
        return over.along(gather(local, rows, dim, group), dim=dim, keepdim=True)
    own = local if has_rows else local.new_full(with_dim(local.shape, dim, 1), over.neutral(local.dtype))
    return over.ranks(own, group)


def _fold(x: ShardTensor, local: Tensor, dims: Sequence[int], over: _Reduction) -> Tensor:
    """Reduce several dims one by one, for reductions that allow it. Dims that are not sharded first."""
    for dim in sorted(dims, key=lambda d: d in x.spec.sharded):
        local = _over_ranks(x, local, dim, over)
    return local


def _sum_kept(x: ShardTensor, local: Tensor, dims: Sequence[int], add: TensorFunction = torch.sum) -> Tensor:
    """Sum a tensor of the layout of ``x``; the reduced dims stay, with extent 1."""
    total = add(local, dim=tuple(dims), keepdim=True) if dims else local
    for axis in _axes(x.spec, dims):
        total = all_reduce_sum(total, x.spec.group(axis))
    return total


def _weighted(x: ShardTensor, local: Tensor, value: Tensor, dims: Sequence[int], weights: TensorFunction) -> Tensor:
    """Give a value that was computed without autograd its derivatives by each element: ``weights(part, value)``."""
    return weighted(local, value, weights, dims, [x.spec.group(axis) for axis in _axes(x.spec, dims)], by_value=True)


def _differentiated(local: Tensor) -> bool:
    """Whether anything is, or may be, differentiated."""
    return (local.requires_grad and torch.is_grad_enabled()) or has_dual_level()


def _count(spec: ShardSpec, dims: Sequence[int]) -> int:
    return math.prod(spec.global_shape[d] for d in dims)


# -- sums and means ------------------------------------------------------------------------------------------------


def _wide(local: Tensor, dtype: Dtype, *, integers: bool) -> tuple[Tensor, torch.dtype]:
    """Return the tensor in the dtype to add in, and the dtype of the result. 16-bit floats are added in float32."""
    out = dtype or (torch.int64 if integers and not (local.is_floating_point() or local.is_complex()) else local.dtype)
    return widened(local.to(out)), out


@handles("sum nansum mean", any_order=True)
def sum_(
    func: TensorFunction, x: ShardTensor, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None
) -> Tensor:
    """Sum over any dims, or take the mean: owners' sums over the global count."""
    dims, name = dims_of(dim, x.spec), func.__name__
    if not _axes(x.spec, dims):
        return finish(func(x.local, dims, keepdim, dtype=dtype), _reduced_spec(x.spec, dims, keepdim))
    local, out = _wide(x.local, dtype, integers=name != "mean")
    if name == "mean" and not (out.is_floating_point or out.is_complex):
        raise RuntimeError(f"mean: the dtype must be floating point or complex, not {out}; pass dtype=")
    total = _sum_kept(x, local, dims, torch.nansum if name == "nansum" else torch.sum)
    return _finish(x, (total / _count(x.spec, dims) if name == "mean" else total).to(out), dims, keepdim)


def _variance(x: ShardTensor, dims: Sequence[int], correction: float) -> tuple[Tensor, Tensor]:
    """Variance and mean, reduced dims kept."""
    if x.local.is_complex():
        raise unsupported(torch.var, "complex tensors", x.spec)
    local, _ = _wide(x.local, None, integers=False)
    count = _count(x.spec, dims)
    if count > correction:
        pivot, both, _ = deviations(local, x.spec, dims, x.spec.sharded)
        mean, squares = both.unbind(0)
        missing = squares.detach() - squares.detach()  # where the variance is NaN, so is torch's mean beside it
        return squares / (count - correction), pivot + mean + missing
    # torch's gradient treats the mean as fixed, which only shows (inf, not NaN) where no degree of freedom is left
    centre = _sum_kept(x, local, dims) / count
    squares = _sum_kept(x, (local - centre.detach()).square(), dims)
    infinite = squares / torch.tensor(0.0, dtype=local.dtype)
    if count == correction:
        return infinite, centre
    left = squares / (count - correction)  # negative: torch takes 0 for it in the value, but not in the gradient
    return infinite.detach() + (left - left.detach()), centre


@handles("var std", torch.var_mean, torch.std_mean, any_order=True)
def var(
    func: Callable[..., Tensor | tuple[Tensor, ...]],
    x: ShardTensor,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Variance and standard deviation over any dims, with torch's ``correction`` (or ``unbiased``)."""
    if isinstance(dim, bool):  # torch.var(x, False)
        unbiased, dim = dim, None
    name, dims, less = func.__name__, dims_of(dim, x.spec), unbiased if correction is None else correction
    if x.local.is_complex():
        return _complex_variance(name, x, dims, less, keepdim)
    if not x.local.is_floating_point():
        raise RuntimeError(f"{name}: only floating point tensors have one, not {x.local.dtype}")
    if not _axes(x.spec, dims):
        found, new = func(x.local, dims, correction=less, keepdim=keepdim), _reduced_spec(x.spec, dims, keepdim)
        return finish(found, new) if isinstance(found, Tensor) else tuple(finish(each, new) for each in found)
    result, centre = _variance(x, dims, less)
    final = _finish(x, (_root(result) if "std" in name else result).to(x.local.dtype), dims, keepdim)
    return (final, _finish(x, centre.to(x.local.dtype), dims, keepdim)) if "mean" in name else final


def _root(variance: Tensor) -> Tensor:
    """Square root; torch's std has a gradient of 0 at 0, where it would be infinite."""
    zero = variance == 0
    return variance.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _complex_variance(
    name: str, x: Tensor, dims: Sequence[int], correction: float, keepdim: bool
) -> Tensor | tuple[Tensor, ...]:
    """Add the variances of real and imaginary part."""
    (real, mean), (imag, other) = (
        torch.var_mean(part, tuple(dims), correction=correction, keepdim=keepdim) for part in (x.real, x.imag)
    )
    found = _root(real + imag) if "std" in name else real + imag
    return (found, torch.complex(mean, other)) if "mean" in name else found


# -- extremes ------------------------------------------------------------------------------------------------------


def extreme(x: ShardTensor, dims: Sequence[int], largest: bool, *, missing: bool) -> Tensor:
    """``amax`` or ``amin`` over dims, kept; the gradient goes to all elements that equal it, in equal shares.

    ``missing``: of a value that is NaN, to those that are NaN, as in ``max`` of all; else NaN to all.
    """
    local = x.local.detach()
    value = _fold(x, local, dims, _MAX if largest else _MIN)
    if not _differentiated(x.local):
        return value
    hits = (local == value) | (local.isnan() & value.isnan() if missing else False)
    count = _sum_kept(x, hits.long(), dims)
    if not missing:
        return _weighted(x, x.local, value, dims, lambda part, value: hits.to(part.dtype) / count)
    groups = [x.spec.group(axis) for axis in _axes(x.spec, dims)]
    return known(
        x.local, value, lambda grad, hits: torch.where(hits, replicate_to_shards(grad, groups) / count, 0), hits
    )


@handles("amax amin", any_order=True)
def amax(func: TensorFunction, x: ShardTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Extreme values over any dims."""
    dims = dims_of(dim, x.spec)
    return _finish(x, extreme(x, dims, "amax" in func.__name__, missing=False), dims, keepdim)


def _arg_extreme(x: ShardTensor, dim: int, reduce: Extreme, *, last_missing: bool = False) -> tuple[Tensor, Tensor]:
    """Extreme values along one dim and their global index, the first of equal ones; the dim is kept.

    ``reduce`` does so on one rank; ``last_missing`` where it takes the last NaN.
    """
    spec, local = x.spec, x.local.detach()
    axis, over = spec.axis_of_dim(dim), _MIN if reduce is torch.min else _MAX
    if axis is None or spec.axes[axis].size == 1 or not spec.global_shape[dim]:
        return reduce(local, dim, keepdim=True)
    if local.shape[dim]:
        own, index = reduce(local, dim, keepdim=True)
        index = index + spec.offsets[dim]
    else:
        own = local.new_full(with_dim(local.shape, dim, 1), over.neutral(local.dtype))
        index = torch.full_like(own, LARGEST, dtype=torch.int64)
    group = spec.group(axis)
    value = over.ranks(own, group)
    sign = torch.where(value.isnan(), -1, 1) if last_missing else 1
    hits = ((own == value) | (own.isnan() & value.isnan())) & (index != LARGEST)
    return value, all_reduce_min(torch.where(hits, index * sign, LARGEST), group) * sign


def extreme_along(
    x: ShardTensor, dim: int, reduce: Extreme, keepdim: bool, *, last_missing: bool = False
) -> tuple[Tensor, Tensor]:
    """Extreme values along one dim and their global index; the gradient goes to these elements only. Collective."""
    value, index = _arg_extreme(x, dim, reduce, last_missing=last_missing)
    if x.local.requires_grad and torch.is_grad_enabled():
        value = known(x.local, value, partial(_to_row, x.spec, dim), index)
    return _finish(x, value, [dim], keepdim), _finish(x, index, [dim], keepdim)


def _to_row(spec: ShardSpec, dim: int, grad: Tensor, index: Tensor) -> Tensor:
    """Give the gradient of a value to the element at its global index along ``dim`` alone."""
    start = spec.offsets[dim]
    rows = torch.arange(start, start + spec.local_shape[dim], device=grad.device)
    return torch.where(rows.view([-1 if d == dim else 1 for d in range(spec.ndim)]) == index, grad, 0)


@handles("max min", any_order=True)
def max_(
    func: TensorFunction,
    x: Tensor,
    dim: int | Tensor | None = None,
    keepdim: bool = False,
    *,
    other: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Extreme value of all, or values and global indices along one dim; with a second tensor, elementwise."""
    largest, other = func.__name__ == "max", dim if isinstance(dim, Tensor) else other
    if other is not None or not isinstance(x, ShardTensor) or isinstance(dim, Tensor):
        assert other is not None
        return (torch.maximum if largest else torch.minimum)(x, other)
    dims = dims_of(dim, x.spec)
    if dim is None:
        return _finish(x, extreme(x, dims, largest, missing=True), dims, False)
    result = extreme_along(numbered_alike(func, x, dims), dims[0], torch.max if largest else torch.min, keepdim)
    return (torch.return_types.max if largest else torch.return_types.min)(result)


@handles("argmax argmin", any_order=True)
def argmax(func: TensorFunction, x: ShardTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Global index of the extreme value, the first of equal ones: along one dim, or in the flattened tensor."""
    dims = dims_of(dim, x.spec)
    x = numbered_alike(func, x, dims)
    reduce: Extreme = torch.max if "argmax" in func.__name__ else torch.min
    spec = x.spec
    if dim is not None:
        return _finish(x, _arg_extreme(x, dims[0], reduce)[1], dims, keepdim)
    if not spec.ndim or 0 in spec.global_shape:
        raise unsupported(func, "there is nothing to take the index of", spec)
    local = x.local.detach()
    value = _fold(x, local, dims, _MAX if reduce is torch.max else _MIN)
    hits = ((local == value) | (local.isnan() & value.isnan())).reshape(-1)
    return _drop(least_over(number_of(spec, hits), spec.shard_groups).reshape([1] * spec.ndim), dims, keepdim)


def number_of(spec: ShardSpec, hits: Tensor) -> Tensor:
    """Number the first of some elements of this rank's part in C order of the whole; the largest number for none."""
    if not len(hits):
        return hits.new_full((), LARGEST, dtype=torch.int64)
    first, number = hits.int().argmax(), hits.new_zeros((), dtype=torch.int64)
    for start, extent, size, row in zip(
        spec.offsets, spec.global_shape, spec.local_shape, row_major(spec.local_shape), strict=True
    ):
        number = number * extent + first // row % size + start
    return torch.where(hits.any(), number, LARGEST)


# -- the rest ------------------------------------------------------------------------------------------------------


@handles("any all", any_order=True)
def any_(func: TensorFunction, x: ShardTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Whether any, or all, elements are true."""
    if dim is not None and not isinstance(dim, int) and not len(dim):
        raise unsupported(func, "an empty dim", x.spec, remedy="leave dim out, or compare with 0")
    dims, is_any = dims_of(dim, x.spec), func.__name__ == "any"
    found = _sum_kept(x, (x.local != 0 if is_any else x.local == 0).to(torch.int64), dims) > 0
    result = found if is_any else ~found
    return _finish(x, result.to(torch.uint8) if x.local.dtype == torch.uint8 else result, dims, keepdim)


@handles("count_nonzero", any_order=True)
def count_nonzero(x: ShardTensor, dim: Dims = None) -> Tensor:
    """Number of elements that are not zero."""
    dims = dims_of(dim, x.spec)
    return _finish(x, _sum_kept(x, (x.local != 0).to(torch.int64), dims), dims, False)


@handles("prod", any_order=True)
def prod(x: ShardTensor, dim: int | None = None, keepdim: bool = False, *, dtype: Dtype = None) -> Tensor:
    """Product over one dim or all."""
    dims = dims_of(dim, x.spec)
    local, out = _wide(x.local, dtype, integers=True)
    product = _fold(x, local.detach(), dims, _PROD)
    product = _weighted(x, local, product, dims, partial(of_prod, x.spec, dims, dim is None))
    return _finish(x, product.to(out), dims, keepdim)


@handles(*find("logsumexp"), any_order=True)
def logsumexp(x: ShardTensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))) without overflow."""
    dims = dims_of(dim, x.spec)
    exact = not (x.local.is_floating_point() or x.local.is_complex())
    local = x.local.to(torch.get_default_dtype()) if exact else widened(x.local)
    value = _fold(x, local.detach(), dims, _LOG_SUM)
    result = _weighted(x, local, value, dims, lambda part, total: (part - total).exp())
    return _finish(x, result if exact else result.to(x.local.dtype), dims, keepdim)


Order = float | str | None


@handles("norm", any_order=True)
def norm(
    func: TensorFunction, x: ShardTensor, p: Order = "fro", dim: Dims = None, keepdim: bool = False, dtype: Dtype = None
) -> Tensor:
    """Vector norms over any dims, and the nuclear norm of matrices."""
    if p == "nuc":
        return torch.linalg.matrix_norm(x, "nuc", dims_of(dim, x.spec), keepdim, dtype=dtype)
    return vector_norm(func, x, p, dim, keepdim, dtype=dtype)


@handles(torch.linalg.vector_norm, any_order=True)
def vector_norm(
    func: TensorFunction,
    x: ShardTensor,
    ord: Order = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Dtype = None,
) -> Tensor:
    """Vector norms over any dims."""
    dims, order = dims_of(dim, x.spec), 2 if ord in ("fro", None) else ord
    if not isinstance(order, int | float):
        raise unsupported(func, f"p={order!r} is a matrix norm", x.spec, remedy="use a number, or full_tensor()")
    if x.local.is_complex():
        real = None if dtype is None else torch.empty((), dtype=dtype).abs().dtype
        return torch.linalg.vector_norm(x.abs(), 2 if ord in ("fro", None) else ord, dim, keepdim, dtype=real)
    local, out = _wide(x.local, dtype, integers=False)
    if not local.is_floating_point():
        raise RuntimeError(f"norm: expected floating point or complex numbers, not {local.dtype}; pass dtype=")
    if order == 0:
        count = _sum_kept(x, local, dims, partial(torch.linalg.vector_norm, ord=0))
        return _finish(x, count.to(out), dims, keepdim)
    held = [d for d in dims if local.shape[d] or not x.spec.global_shape[d]]
    part = torch.linalg.vector_norm(local.detach(), order, held, keepdim=True) if held else local.detach()
    # in float64, as each rank's norm is a root already
    result = _fold(x, part.double(), [d for d in dims if d in x.spec.sharded], _norm(order)).to(local.dtype)
    if math.isfinite(order):
        result = _weighted(x, local, result, dims, partial(of_norm, order))
    elif _differentiated(local):
        hits = (local.detach().abs() == result) | local.detach().isnan()
        count = _sum_kept(x, hits.long(), dims)
        result = _weighted(x, local, result, dims, lambda part, norm: part.sgn() * hits / count)
    return _finish(x, result.to(out), dims, keepdim)
