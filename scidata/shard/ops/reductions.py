"""Reductions: a local part, then one number per rank, then the same over ranks.

Sums are reduced; everything else gathers one row from each rank that owns anything, so empty parts need no neutral
element, NaN propagates and gradients follow by composition. A result that is replicated on all axes is a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.comm.transport import call
from scidata.shard.op_table import find, register_op, unsupported
from scidata.shard.ops.align import dims_of, finish, operands_of, refuse_out, specs_of
from scidata.shard.ops.moments import deviations
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

_BOTH = (torch, Tensor)
_HALF = (torch.float16, torch.bfloat16)


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


def _axes(spec: ShardSpec, dims: Sequence[int]) -> list[int]:
    return [spec.sharded[d] for d in dims if d in spec.sharded]


def _reduced_spec(spec: ShardSpec, dims: Sequence[int], keepdim: bool) -> ShardSpec:
    key = ("reduce", tuple(dims), keepdim)
    found: ShardSpec | None = spec.plans.get(key)
    return spec.plans.put(key, _without(spec, dims, keepdim)) if found is None else found


def _without(spec: ShardSpec, dims: Sequence[int], keepdim: bool) -> ShardSpec:
    kept = [d for d in range(spec.ndim) if keepdim or d not in dims]
    shape = [1 if d in dims else spec.global_shape[d] for d in kept]
    new = [None if d is None or d in dims else kept.index(d) for d in spec.dims]
    return spec.derive(shape, new, spec.sizes)


def _drop(local: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Drop the reduced dims, of extent 1."""
    if keepdim or not dims:
        return local
    return local.reshape([n for d, n in enumerate(local.shape) if d not in dims])


def _finish(x: ShardTensor, kept: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return finish(_drop(kept, dims, keepdim), _reduced_spec(x._spec, dims, keepdim))


def _over_ranks(x: ShardTensor, local: Tensor, dim: int, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce one dim, kept with extent 1: locally, then over the ranks that have any rows of it."""
    axis = x._spec.axis_of_dim(dim)
    if axis is None:
        return reduce(local, dim)
    sizes = x._spec.sizes_of(axis)
    rows = tuple(int(size > 0) for size in sizes)
    if local.shape[dim]:
        local = reduce(local, dim)
    if sum(rows) == 0:  # as one process does with no rows
        return reduce(local, dim)
    return reduce(all_gather_v(local, rows, dim, x._spec.group(axis)), dim)


def _fold(x: ShardTensor, local: Tensor, dims: Sequence[int], reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce several dims one by one, for reductions that allow it. Dims that are not sharded first."""
    for dim in sorted(dims, key=lambda d: d in x._spec.sharded):
        local = _over_ranks(x, local, dim, reduce)
    return local


def _sum_kept(x: ShardTensor, local: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum a tensor of the layout of ``x``; the reduced dims stay, with extent 1."""
    total = local.sum(tuple(dims), keepdim=True) if dims else local
    for axis in _axes(x._spec, dims):
        total = all_reduce_sum(total, x._spec.group(axis))
    return total


def _count(spec: ShardSpec, dims: Sequence[int]) -> int:
    return math.prod(spec.global_shape[d] for d in dims)


# -- sums and means ------------------------------------------------------------------------------------------------


def _wide(local: Tensor, dtype: torch.dtype | None, *, integers: bool) -> tuple[Tensor, torch.dtype]:
    """Return the tensor in the dtype to add in, and the dtype of the result. 16-bit floats are added in float32."""
    out = dtype or (torch.int64 if integers and not (local.is_floating_point() or local.is_complex()) else local.dtype)
    if out in _HALF:
        return local.to(out).float(), out
    return local.to(out), out


def _here(func: Any, x: ShardTensor, options: Mapping[str, Any], dims: Sequence[int], keepdim: bool) -> Tensor:
    """Reduce dims that are not sharded: torch's own function on the part."""
    return finish(func(x._local, **options), _reduced_spec(x._spec, dims, keepdim))


@register_op(*find("sum nansum", namespaces=_BOTH))
def sum_(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Sum over any dims."""
    x = _input(func, args, kwargs)
    options = _options("dim keepdim dtype", args, kwargs)
    dims, keepdim = dims_of(func, options.get("dim"), x._spec), bool(options.get("keepdim"))
    if not _axes(x._spec, dims):
        return _here(func, x, options, dims, keepdim)
    local, dtype = _wide(x._local, options.get("dtype"), integers=True)
    if "nansum" in func.__name__:
        local = local.masked_fill(local.isnan(), 0)
    return _finish(x, _sum_kept(x, local, dims).to(dtype), dims, keepdim)


@register_op(*find("mean", namespaces=_BOTH))
def mean(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Mean over any dims: owners' sums over the global count."""
    x = _input(func, args, kwargs)
    options = _options("dim keepdim dtype", args, kwargs)
    dims, keepdim = dims_of(func, options.get("dim"), x._spec), bool(options.get("keepdim"))
    if not _axes(x._spec, dims):
        return _here(func, x, options, dims, keepdim)
    local, dtype = _wide(x._local, options.get("dtype"), integers=False)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"mean: the dtype must be floating point or complex, not {dtype}; pass dtype=")
    return _finish(x, (_sum_kept(x, local, dims) / _count(x._spec, dims)).to(dtype), dims, keepdim)


def _variance(x: ShardTensor, dims: Sequence[int], correction: float) -> tuple[Tensor, Tensor]:
    """Variance and mean, reduced dims kept."""
    if x._local.is_complex():
        raise unsupported(torch.var, "complex tensors", x._spec)
    local, _ = _wide(x._local, None, integers=False)
    count = _count(x._spec, dims)
    if count > correction:
        centre, squares = deviations(local, x._spec, dims, x._spec.sharded)[0].unbind(0)
        return squares / (count - correction), centre
    # torch's gradient treats the mean as fixed, which only shows (inf, not NaN) where no degree of freedom is left
    centre = _sum_kept(x, local, dims) / count
    squares = _sum_kept(x, (local - centre.detach()).square(), dims)
    infinite = squares / torch.tensor(0.0, dtype=local.dtype)
    if count == correction:
        return infinite, centre
    left = squares / (count - correction)  # negative: torch takes 0 for it in the value, but not in the gradient
    return infinite.detach() + (left - left.detach()), centre


@register_op(*find("var std", namespaces=_BOTH), torch.var_mean, torch.std_mean)
def var(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Variance and standard deviation over any dims, with torch's ``correction`` (or ``unbiased``)."""
    x = _input(func, args, kwargs)
    if not x._local.is_floating_point():
        raise RuntimeError(f"{func.__name__}: only floating point tensors have one, not {x._local.dtype}")
    if len(args) > 1 and isinstance(args[1], bool):
        options = _options("unbiased", args, kwargs)
    else:
        options = _options("dim unbiased keepdim", args, kwargs)
    dims, keepdim = dims_of(func, options.get("dim"), x._spec), bool(options.get("keepdim"))
    given = options.get("correction")
    correction = given if given is not None else float(options.get("unbiased", True))
    if not _axes(x._spec, dims):
        found, new = func(x._local, **options), _reduced_spec(x._spec, dims, keepdim)
        return tuple(finish(each, new) for each in found) if isinstance(found, tuple) else finish(found, new)
    result, centre = _variance(x, dims, correction)
    if "std" in func.__name__:
        zero = result == 0  # the gradient of sqrt at 0 is infinite; torch's std takes 0 there
        result = torch.where(zero, result, result.masked_fill(zero, 1).sqrt())
        result = result.masked_fill(zero, 0)
    final = _finish(x, result.to(x._local.dtype), dims, keepdim)
    return (final, _finish(x, centre.to(x._local.dtype), dims, keepdim)) if "mean" in func.__name__ else final


# -- extremes ------------------------------------------------------------------------------------------------------


class _Extreme(Function):
    """An extreme value that is known already; its gradient goes to all elements that equal it, in equal shares."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (share,) = ctx.saved_tensors
        return grad * share, None, None


def extreme(x: ShardTensor, local: Tensor, dims: Sequence[int], reduce: Any) -> Tensor:
    """``amax`` or ``amin`` over dims, kept."""
    value = _fold(x, local.detach(), dims, lambda part, dim: reduce(part, dim, keepdim=True))
    if not local.requires_grad or not torch.is_grad_enabled():
        return value
    ties = (local.detach() == value).to(local.dtype)
    return call(_Extreme, local, value, ties / _sum_kept(x, ties, dims))


@register_op(*find("amax amin", namespaces=_BOTH))
def amax(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Extreme values over any dims."""
    x = _input(func, args, kwargs)
    options = _options("dim keepdim", args, kwargs)
    dims, keepdim = dims_of(func, options.get("dim"), x._spec), bool(options.get("keepdim"))
    reduce = torch.amax if "amax" in func.__name__ else torch.amin
    return _finish(x, extreme(x, x._local, dims, reduce), dims, keepdim)


def _arg_extreme(x: ShardTensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Extreme values along one dim and their global index, the first of equal ones; the dim is kept."""
    spec, local, reduce = x._spec, x._local.detach(), torch.max if largest else torch.min
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


class _Pick(Function):
    """Values whose global index along ``dim`` is known; the gradient goes to that element alone."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor, index: Tensor, dim: int, offset: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.place = local.shape, dim, offset
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        shape, dim, offset = ctx.place
        rows = torch.arange(offset, offset + shape[dim], device=grad.device)
        rows = rows.view([-1 if d == dim else 1 for d in range(len(shape))])
        return torch.where(rows == index, grad, 0), None, None, None, None


@register_op(*find("max min", namespaces=_BOTH))
def max_(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Extreme value of all, or values and global indices along one dim; with a second tensor, elementwise."""
    others = [*args[1:], *kwargs.values()]
    if any(isinstance(other, Tensor) for other in others):
        function = torch.maximum if func.__name__ == "max" else torch.minimum
        return function(args[0], args[1] if len(args) > 1 else kwargs["other"])
    x = _input(func, args, kwargs)
    options = _options("dim keepdim", args, kwargs)
    largest, spec = func.__name__ == "max", x._spec
    if options.get("dim") is None:
        reduce = torch.amax if largest else torch.amin
        dims = range(spec.ndim)
        return _finish(x, extreme(x, x._local, dims, reduce), dims, False)
    (dim,) = dims_of(func, options["dim"], spec)
    value, index = _arg_extreme(x, dim, largest)
    if x._local.requires_grad and torch.is_grad_enabled():
        value = call(_Pick, x._local, value, index, dim, spec.offsets[dim])
    keepdim = bool(options.get("keepdim"))
    result = _finish(x, value, [dim], keepdim), _finish(x, index, [dim], keepdim)
    return (torch.return_types.max if largest else torch.return_types.min)(result)


@register_op(*find("argmax argmin", namespaces=_BOTH))
def argmax(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Global index of the extreme value, the first of equal ones: along one dim, or in the flattened tensor."""
    x = _input(func, args, kwargs)
    options = _options("dim keepdim", args, kwargs)
    keepdim, largest, spec = bool(options.get("keepdim")), "argmax" in func.__name__, x._spec
    if options.get("dim") is not None:
        (dim,) = dims_of(func, options["dim"], spec)
        return _finish(x, _arg_extreme(x, dim, largest)[1], [dim], keepdim)
    # one dim after the other, the last first: each step keeps the first of equal ones in C order
    if not spec.ndim or 0 in spec.global_shape:
        raise unsupported(func, "there is nothing to take the index of", spec)
    index, stride = torch.zeros((), dtype=torch.int64), 1
    for dim in reversed(range(spec.ndim)):
        value, place = _arg_extreme(x, dim, largest)
        index = _take(x, index, dim, place) + place * stride
        stride *= spec.global_shape[dim]
        x = ShardTensor(value, _reduced_spec(x._spec, [dim], True))
    return _drop(index, range(spec.ndim), keepdim)


def _take(x: ShardTensor, index: Tensor, dim: int, place: Tensor) -> Tensor:
    """Take ``index``, of the layout of ``x``, at the global rows ``place`` of a dim."""
    axis = x._spec.axis_of_dim(dim)
    if index.ndim == 0:
        return index
    if axis is not None:
        index = all_gather_v(index, x._spec.sizes_of(axis), dim, x._spec.group(axis))
    return index.gather(dim, place)


# -- the rest ------------------------------------------------------------------------------------------------------


@register_op(*find("any all", namespaces=_BOTH))
def any_(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Whether any, or all, elements are true."""
    x = _input(func, args, kwargs)
    options = _options("dim keepdim", args, kwargs)
    dims, keepdim = dims_of(func, options.get("dim"), x._spec), bool(options.get("keepdim"))
    if options.get("dim") in ((), []):
        raise unsupported(func, "an empty dim", x._spec, remedy="leave dim out, or compare with 0")
    wanted = x._local != 0 if func.__name__ == "any" else x._local == 0
    found = _sum_kept(x, wanted.to(torch.int64), dims) > 0
    result = found if func.__name__ == "any" else ~found
    return _finish(x, result.to(torch.uint8) if x._local.dtype == torch.uint8 else result, dims, keepdim)


@register_op(*find("count_nonzero", namespaces=_BOTH))
def count_nonzero(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Number of elements that are not zero."""
    x = _input(func, args, kwargs)
    dims = dims_of(func, _options("dim", args, kwargs).get("dim"), x._spec)
    return _finish(x, _sum_kept(x, (x._local != 0).to(torch.int64), dims), dims, False)


@register_op(*find("prod", namespaces=_BOTH))
def prod(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Product over one dim or all."""
    x = _input(func, args, kwargs)
    options = _options("dim keepdim dtype", args, kwargs)
    dims, keepdim = dims_of(func, options.get("dim"), x._spec), bool(options.get("keepdim"))
    local, dtype = _wide(x._local, options.get("dtype"), integers=True)
    product = _fold(x, local, dims, lambda part, dim: part.prod(dim, keepdim=True))
    return _finish(x, product.to(dtype), dims, keepdim)


@register_op(*find("logsumexp"))
def logsumexp(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """log(sum(exp(x))) without overflow."""
    x = _input(func, args, kwargs)
    options = _options("dim keepdim", args, kwargs)
    dims, keepdim = dims_of(func, options.get("dim"), x._spec), bool(options.get("keepdim"))
    local, _ = _wide(x._local, None, integers=False)
    result = _fold(x, local, dims, lambda part, dim: part.logsumexp(dim, keepdim=True))
    return _finish(x, result.to(x._local.dtype) if x._local.is_floating_point() else result, dims, keepdim)


@register_op(*find("norm", namespaces=_BOTH), torch.linalg.vector_norm)
def norm(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Vector norms over any dims."""
    x = _input(func, args, kwargs)
    vector = func is torch.linalg.vector_norm
    options = _options("ord dim keepdim dtype" if vector else "p dim keepdim dtype", args, kwargs)
    order = options.get("ord", 2) if vector else options.get("p", "fro")
    order = 2 if order in ("fro", None) else order
    if not isinstance(order, int | float):
        raise unsupported(func, f"p={order!r} is a matrix norm", x._spec, remedy="use a number, or full_tensor()")
    dims, keepdim = dims_of(func, options.get("dim"), x._spec), bool(options.get("keepdim"))
    if x._local.is_complex():
        raise unsupported(func, "complex tensors", x._spec, remedy="take abs() first")
    local, dtype = _wide(x._local, options.get("dtype"), integers=False)
    if abs(order) == math.inf:
        result = extreme(x, local.abs(), dims, torch.amax if order > 0 else torch.amin)
    elif order == 0:
        result = torch.linalg.vector_norm(local, 0, dims, keepdim=True)
        for axis in _axes(x._spec, dims):
            result = all_reduce_sum(result, x._spec.group(axis))
    elif order > 0:
        inside = _sum_free(local, dims, order, x)
        result = _fold(x, inside, [d for d in dims if d in x._spec.sharded], _norm_along(order))
    else:
        raise unsupported(func, f"p={order} is negative", x._spec)
    return _finish(x, result.to(dtype), dims, keepdim)


def _norm_along(order: float) -> Callable[[Tensor, int], Tensor]:
    return lambda part, dim: torch.linalg.vector_norm(part, order, dim, keepdim=True)


def _sum_free(local: Tensor, dims: Sequence[int], order: float, x: ShardTensor) -> Tensor:
    """Take the norm over the dims that are not sharded."""
    free = tuple(d for d in dims if d not in x._spec.sharded)
    return torch.linalg.vector_norm(local, order, free, keepdim=True) if free else local
