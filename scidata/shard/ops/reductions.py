"""Reductions: a local part, then one number per rank, then the same over ranks.

Sums are reduced; everything else gathers one row from each rank that owns anything, so empty parts need no neutral
element, NaN propagates and gradients follow by composition. A result that is replicated on all axes is a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.functions import known
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.op_table import find, register_op, unsupported
from scidata.shard.ops.align import dims_of, finish, numbered_alike, operands_of, refuse_out, specs_of
from scidata.shard.ops.moments import deviations, weighted, widened
from scidata.shard.ops.reduced import of_norm, of_prod
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import has_dual_level

_BOTH = (torch, Tensor)
_Reduce = Callable[..., Tensor]  # of a tensor, dim and keepdim


def _options(names: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bind arguments after the first by name; ``axis`` and ``keepdims`` are NumPy's names."""
    bound = dict(zip(names.split(), args[1:], strict=False))
    alias = {"axis": "dim", "keepdims": "keepdim"}
    return {**bound, **{alias.get(name, name): value for name, value in kwargs.items() if name != "input"}}


def _input(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardTensor:
    x = args[0] if args else kwargs["input"]
    refuse_out(func, kwargs, *specs_of([x]))
    if not isinstance(x, ShardTensor) or any(isinstance(other, ShardTensor) for other in args[1:]):
        raise unsupported(func, "several sharded arguments", *specs_of(operands_of(args, kwargs)[0]))
    return x


def _parsed(
    func: Any, names: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[ShardTensor, dict[str, Any], tuple[int, ...], bool]:
    """Return the input, the other arguments by name, the dims that are reduced, and whether they stay."""
    x, options = _input(func, args, kwargs), _options(names, args, kwargs)
    return x, options, dims_of(func, options.get("dim"), x.spec), bool(options.get("keepdim"))


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
    result = local.reshape([n for d, n in enumerate(local.shape) if d not in dims])
    # a view that is a leaf takes a write to another view of the same for one to a leaf that requires grad
    return result if result.requires_grad else result.clone()


def _finish(x: ShardTensor, kept: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return finish(_drop(kept, dims, keepdim), _reduced_spec(x.spec, dims, keepdim))


def _over_ranks(x: ShardTensor, local: Tensor, dim: int, reduce: _Reduce) -> Tensor:
    """Reduce one dim, kept with extent 1: locally, then over the ranks that have any rows of it."""
    axis = x.spec.axis_of_dim(dim)
    rows = () if axis is None else tuple(int(size > 0) for size in x.spec.sizes_of(axis))
    if local.shape[dim] or not any(rows):  # without any rows, as one process does
        local = reduce(local, dim=dim, keepdim=True)
    if axis is None or not any(rows):
        return local
    return reduce(all_gather_v(local, rows, dim, x.spec.group(axis)), dim=dim, keepdim=True)


def _fold(x: ShardTensor, local: Tensor, dims: Sequence[int], reduce: _Reduce) -> Tensor:
    """Reduce several dims one by one, for reductions that allow it. Dims that are not sharded first."""
    for dim in sorted(dims, key=lambda d: d in x.spec.sharded):
        local = _over_ranks(x, local, dim, reduce)
    return local


def _sum_kept(x: ShardTensor, local: Tensor, dims: Sequence[int], add: Callable[..., Tensor] = torch.sum) -> Tensor:
    """Sum a tensor of the layout of ``x``; the reduced dims stay, with extent 1."""
    total = add(local, tuple(dims), keepdim=True) if dims else local
    for axis in _axes(x.spec, dims):
        total = all_reduce_sum(total, x.spec.group(axis))
    return total


def _weighted(
    x: ShardTensor, local: Tensor, value: Tensor, dims: Sequence[int], weights: Callable[..., Tensor]
) -> Tensor:
    """Give a value that was computed without autograd its derivatives by each element: ``weights(part, value)``."""
    return weighted(local, value, weights, dims, [x.spec.group(axis) for axis in _axes(x.spec, dims)], by_value=True)


def _differentiated(local: Tensor) -> bool:
    """Whether anything is, or may be, differentiated."""
    return (local.requires_grad and torch.is_grad_enabled()) or has_dual_level()


def _count(spec: ShardSpec, dims: Sequence[int]) -> int:
    return math.prod(spec.global_shape[d] for d in dims)


# -- sums and means ------------------------------------------------------------------------------------------------


def _wide(local: Tensor, dtype: torch.dtype | None, *, integers: bool) -> tuple[Tensor, torch.dtype]:
    """Return the tensor in the dtype to add in, and the dtype of the result. 16-bit floats are added in float32."""
    out = dtype or (torch.int64 if integers and not (local.is_floating_point() or local.is_complex()) else local.dtype)
    return widened(local.to(out)), out


def _here(func: Any, x: ShardTensor, options: Mapping[str, Any], dims: Sequence[int], keepdim: bool) -> Any:
    """Reduce dims that are not sharded: torch's own function on the part."""
    found, new = func(x.local, **options), _reduced_spec(x.spec, dims, keepdim)
    return tuple(finish(each, new) for each in found) if isinstance(found, tuple) else finish(found, new)


@register_op(*find("sum nansum", namespaces=_BOTH), any_order=True)
def sum_(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sum over any dims."""
    x, options, dims, keepdim = _parsed(func, "dim keepdim dtype", args, kwargs)
    if not _axes(x.spec, dims):
        return _here(func, x, options, dims, keepdim)
    local, dtype = _wide(x.local, options.get("dtype"), integers=True)
    add = torch.nansum if "nansum" in func.__name__ else torch.sum
    return _finish(x, _sum_kept(x, local, dims, add).to(dtype), dims, keepdim)


@register_op(*find("mean", namespaces=_BOTH), any_order=True)
def mean(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mean over any dims: owners' sums over the global count."""
    x, options, dims, keepdim = _parsed(func, "dim keepdim dtype", args, kwargs)
    if not _axes(x.spec, dims):
        return _here(func, x, options, dims, keepdim)
    local, dtype = _wide(x.local, options.get("dtype"), integers=False)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean: the dtype must be floating point or complex, not {dtype}; pass dtype=")
    return _finish(x, (_sum_kept(x, local, dims) / _count(x.spec, dims)).to(dtype), dims, keepdim)


def _variance(x: ShardTensor, dims: Sequence[int], correction: float) -> tuple[Tensor, Tensor]:
    """Variance and mean, reduced dims kept."""
    if x.local.is_complex():
        raise unsupported(torch.var, "complex tensors", x.spec)
    local, _ = _wide(x.local, None, integers=False)
    count = _count(x.spec, dims)
    if count > correction:
        found, groups = deviations(local.detach(), x.spec, dims, x.spec.sharded)
        pivot, factor = found[0], 2 / (count - correction)
        rest = weighted(local, found[1], lambda x: torch.full_like(x, 1 / count), dims, groups)
        value = found[2] / (count - correction)
        value = weighted(local, value, lambda x, m: (x - pivot - m) * factor, dims, groups, rest)
        return value, pivot + rest + (found[2] - found[2])  # where the variance is NaN, so is torch's mean beside it
    # torch's gradient treats the mean as fixed, which only shows (inf, not NaN) where no degree of freedom is left
    centre = _sum_kept(x, local, dims) / count
    squares = _sum_kept(x, (local - centre.detach()).square(), dims)
    infinite = squares / torch.tensor(0.0, dtype=local.dtype)
    if count == correction:
        return infinite, centre
    left = squares / (count - correction)  # negative: torch takes 0 for it in the value, but not in the gradient
    return infinite.detach() + (left - left.detach()), centre


@register_op(*find("var std", namespaces=_BOTH), torch.var_mean, torch.std_mean, any_order=True)
def var(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Variance and standard deviation over any dims, with torch's ``correction`` (or ``unbiased``)."""
    names = "unbiased" if len(args) > 1 and isinstance(args[1], bool) else "dim unbiased keepdim"
    x, options, dims, keepdim = _parsed(func, names, args, kwargs)
    if x.local.is_complex():
        return _complex_variance(func.__name__, x, args[1:], kwargs)
    if not x.local.is_floating_point():
        raise RuntimeError(f"{func.__name__}: only floating point tensors have one, not {x.local.dtype}")
    given = options.get("correction")
    correction = given if given is not None else float(options.get("unbiased", True))
    if not _axes(x.spec, dims):
        return _here(func, x, options, dims, keepdim)
    result, centre = _variance(x, dims, correction)
    if "std" in func.__name__:
        zero = result == 0  # the gradient of sqrt at 0 is infinite; torch's std takes 0 there
        result = torch.where(zero, result, result.masked_fill(zero, 1).sqrt())
        result = result.masked_fill(zero, 0)
    final = _finish(x, result.to(x.local.dtype), dims, keepdim)
    return (final, _finish(x, centre.to(x.local.dtype), dims, keepdim)) if "mean" in func.__name__ else final


def _complex_variance(name: str, x: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Add up those of real and imaginary part."""
    options = {key: value for key, value in kwargs.items() if key != "input"}
    (real, mean), (imag, other) = (torch.var_mean(part, *args, **options) for part in (x.real, x.imag))
    found = real + imag
    if "std" in name:
        zero = found == 0
        found = found.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
    return (found, torch.complex(mean, other)) if "mean" in name else found


# -- extremes ------------------------------------------------------------------------------------------------------


def extreme(x: ShardTensor, dims: Sequence[int], largest: bool, *, missing: bool) -> Tensor:
    """``amax`` or ``amin`` over dims, kept; the gradient goes to all elements that equal it, in equal shares.

    ``missing``: of a value that is NaN, to those that are NaN, as in ``max`` of all; else NaN to all.
    """
    local = x.local.detach()
    value = _fold(x, local, dims, torch.amax if largest else torch.amin)
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


@register_op(*find("amax amin", namespaces=_BOTH), any_order=True)
def amax(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Extreme values over any dims."""
    x, _, dims, keepdim = _parsed(func, "dim keepdim", args, kwargs)
    return _finish(x, extreme(x, dims, "amax" in func.__name__, missing=False), dims, keepdim)


def _arg_extreme(x: ShardTensor, dim: int, reduce: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Extreme values along one dim and their global index, of equal ones as ``reduce`` chooses; the dim is kept."""
    spec, local = x.spec, x.local.detach()
    axis = spec.axis_of_dim(dim)
    if axis is None:
        value, index = reduce(local, dim, keepdim=True)
        return value, index
    sizes = spec.sizes_of(axis)
    rows = tuple(int(size > 0) for size in sizes)
    if local.shape[dim]:
        value, index = reduce(local, dim, keepdim=True)
        index = index + spec.offsets[dim]
    else:
        value, index = local, local.to(torch.int64)
    values = all_gather_v(value, rows, dim, spec.group(axis))
    indices = all_gather_v(index, rows, dim, spec.group(axis))
    value, rank = reduce(values, dim, keepdim=True)  # torch gives the first, and ranks are in order of rows
    return value, indices.gather(dim, rank)


def extreme_along(x: ShardTensor, dim: int, reduce: Callable[..., Any], keepdim: bool) -> tuple[Tensor, Tensor]:
    """Extreme values along one dim, to whose elements alone the gradient goes, and their global index. Collective."""
    value, index = _arg_extreme(x, dim, reduce)
    if x.local.requires_grad and torch.is_grad_enabled():
        value = known(x.local, value, partial(_to_row, x.spec, dim), index)
    return _finish(x, value, [dim], keepdim), _finish(x, index, [dim], keepdim)


def _to_row(spec: ShardSpec, dim: int, grad: Tensor, index: Tensor) -> Tensor:
    """Give the gradient of a value to the element at its global index along ``dim`` alone."""
    start = spec.offsets[dim]
    rows = torch.arange(start, start + spec.local_shape[dim], device=grad.device)
    return torch.where(rows.view([-1 if d == dim else 1 for d in range(spec.ndim)]) == index, grad, 0)


@register_op(*find("max min", namespaces=_BOTH), any_order=True)
def max_(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Extreme value of all, or values and global indices along one dim; with a second tensor, elementwise."""
    others = [*args[1:], *kwargs.values()]
    if any(isinstance(other, Tensor) for other in others):
        function = torch.maximum if func.__name__ == "max" else torch.minimum
        return function(args[0], args[1] if len(args) > 1 else kwargs["other"])
    x, options, dims, keepdim = _parsed(func, "dim keepdim", args, kwargs)
    largest = func.__name__ == "max"
    if options.get("dim") is None:
        return _finish(x, extreme(x, dims, largest, missing=True), dims, False)
    (dim,) = dims
    result = extreme_along(numbered_alike(func, x, dims), dim, torch.max if largest else torch.min, keepdim)
    return (torch.return_types.max if largest else torch.return_types.min)(result)


@register_op(*find("argmax argmin", namespaces=_BOTH), any_order=True)
def argmax(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Global index of the extreme value, the first of equal ones: along one dim, or in the flattened tensor."""
    x, options, dims, keepdim = _parsed(func, "dim keepdim", args, kwargs)
    x = numbered_alike(func, x, dims)
    reduce, spec = torch.max if "argmax" in func.__name__ else torch.min, x.spec
    if options.get("dim") is not None:
        (dim,) = dims
        return _finish(x, _arg_extreme(x, dim, reduce)[1], [dim], keepdim)
    # one dim after the other, the last first: each step keeps the first of equal ones in C order
    if not spec.ndim or 0 in spec.global_shape:
        raise unsupported(func, "there is nothing to take the index of", spec)
    index, stride = torch.zeros((), dtype=torch.int64), 1
    for dim in reversed(range(spec.ndim)):
        value, place = _arg_extreme(x, dim, reduce)
        index = _take(x, index, dim, place) + place * stride
        stride *= spec.global_shape[dim]
        x = ShardTensor(value, _reduced_spec(x.spec, [dim], True))
    return _drop(index, range(spec.ndim), keepdim)


def _take(x: ShardTensor, index: Tensor, dim: int, place: Tensor) -> Tensor:
    """Take ``index``, of the layout of ``x``, at the global rows ``place`` of a dim."""
    axis = x.spec.axis_of_dim(dim)
    if index.ndim == 0:
        return index
    if axis is not None:
        index = all_gather_v(index, x.spec.sizes_of(axis), dim, x.spec.group(axis))
    return index.gather(dim, place)


# -- the rest ------------------------------------------------------------------------------------------------------


@register_op(*find("any all", namespaces=_BOTH), any_order=True)
def any_(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Whether any, or all, elements are true."""
    x, options, dims, keepdim = _parsed(func, "dim keepdim", args, kwargs)
    if options.get("dim") in ((), []):
        raise unsupported(func, "an empty dim", x.spec, remedy="leave dim out, or compare with 0")
    wanted = x.local != 0 if func.__name__ == "any" else x.local == 0
    found = _sum_kept(x, wanted.to(torch.int64), dims) > 0
    result = found if func.__name__ == "any" else ~found
    return _finish(x, result.to(torch.uint8) if x.local.dtype == torch.uint8 else result, dims, keepdim)


@register_op(*find("count_nonzero", namespaces=_BOTH), any_order=True)
def count_nonzero(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Number of elements that are not zero."""
    x, _, dims, _ = _parsed(func, "dim", args, kwargs)
    return _finish(x, _sum_kept(x, (x.local != 0).to(torch.int64), dims), dims, False)


@register_op(*find("prod", namespaces=_BOTH), any_order=True)
def prod(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Product over one dim or all."""
    x, options, dims, keepdim = _parsed(func, "dim keepdim dtype", args, kwargs)
    local, dtype = _wide(x.local, options.get("dtype"), integers=True)
    product = _fold(x, local.detach(), dims, torch.prod)
    product = _weighted(x, local, product, dims, partial(of_prod, x.spec, dims, options.get("dim") is None))
    return _finish(x, product.to(dtype), dims, keepdim)


@register_op(*find("logsumexp"), any_order=True)
def logsumexp(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """log(sum(exp(x))) without overflow."""
    x, _, dims, keepdim = _parsed(func, "dim keepdim", args, kwargs)
    exact = not (x.local.is_floating_point() or x.local.is_complex())
    local = x.local.to(torch.get_default_dtype()) if exact else widened(x.local)
    value = _fold(x, local.detach(), dims, torch.logsumexp)
    result = _weighted(x, local, value, dims, lambda part, total: (part - total).exp())
    return _finish(x, result if exact else result.to(x.local.dtype), dims, keepdim)


@register_op(*find("norm", namespaces=_BOTH), torch.linalg.vector_norm, any_order=True)
def norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Vector norms over any dims."""
    vector = func is torch.linalg.vector_norm
    names = "ord dim keepdim dtype" if vector else "p dim keepdim dtype"
    x, options, dims, keepdim = _parsed(func, names, args, kwargs)
    order = options.get("ord", 2) if vector else options.get("p", "fro")
    order = 2 if order in ("fro", None) else order
    if order == "nuc" and not vector:
        return cast("Tensor", torch.linalg.matrix_norm(x, "nuc", dims, keepdim, dtype=options.get("dtype")))
    if not isinstance(order, int | float):
        raise unsupported(func, f"p={order!r} is a matrix norm", x.spec, remedy="use a number, or full_tensor()")
    if x.local.is_complex():
        raise unsupported(func, "complex tensors", x.spec, remedy="take abs() first")
    local, dtype = _wide(x.local, options.get("dtype"), integers=False)
    if not local.is_floating_point():
        raise RuntimeError(f"norm: expected floating point or complex numbers, not {local.dtype}; pass dtype=")
    if order == 0:
        result = torch.linalg.vector_norm(local, 0, dims, keepdim=True)
        for axis in _axes(x.spec, dims):
            result = all_reduce_sum(result, x.spec.group(axis))
        return _finish(x, result.to(dtype), dims, keepdim)
    held = [d for d in dims if local.shape[d] or not x.spec.global_shape[d]]
    part = torch.linalg.vector_norm(local.detach(), order, held, keepdim=True) if held else local.detach()
    reduce = partial(torch.linalg.vector_norm, ord=order)  # of the ranks' norms in float64, as each is a root already
    result = _fold(x, part.double(), [d for d in dims if d in x.spec.sharded], reduce).to(local.dtype)
    if math.isfinite(order):
        result = _weighted(x, local, result, dims, partial(of_norm, order))
    elif _differentiated(local):
        hits = (local.detach().abs() == result) | local.detach().isnan()
        count = _sum_kept(x, hits.long(), dims)
        result = _weighted(x, local, result, dims, lambda part, norm: part.sgn() * hits / count)
    return _finish(x, result.to(dtype), dims, keepdim)
