"""Counts of values, and one answer for a whole tensor: each rank has its own, which are added up or asked for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from scidata.shard.comm.transport import all_reduce_max
from scidata.shard.op_table import find, register_op, unsupported
from scidata.shard.ops.align import bind, finish, is_sharded, local_of, refuse_out, specs_of
from scidata.shard.ops.counting import alike
from scidata.shard.rows.ordered import least_over, sum_over
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import coo_to_csr

_BOTH = (torch, Tensor)


def _beside(func: Any, x: Tensor, other: Any) -> tuple[ShardTensor, Tensor | None]:
    """Bring weights to the layout of what they belong to."""
    if other is None:
        assert isinstance(x, ShardTensor)
        return x, None
    if tuple(x.shape) != tuple(other.shape):
        raise RuntimeError(f"{func.__name__}: shapes {tuple(x.shape)} and {tuple(other.shape)} differ")
    values, weights = alike(func, [x.detach(), other.detach()])
    return values, weights.local


def _total(found: Tensor, x: ShardTensor) -> Tensor:
    for group in x.spec.shard_groups:
        found = sum_over(found, group)
    return found


def _range_of(x: ShardTensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value, NaN where any is. Collective."""
    groups, local = x.spec.shard_groups, x.local.detach().reshape(-1)
    if not len(local):
        limits = torch.finfo(local.dtype) if local.is_floating_point() else torch.iinfo(local.dtype)
        largest, least = local.new_full((), limits.max), local.new_full((), limits.min)
        if local.is_floating_point():
            largest, least = largest * 2, least * 2  # infinite
        low, high = largest, least
    else:
        low, high = local.aminmax()
    for group in groups:
        high = all_reduce_max(high, group)
    return least_over(low, groups), high


@register_op(*find("bincount", namespaces=_BOTH), any_order=True)
def bincount(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Count how often each number occurs, or sum up its weights: plain, the same on each rank. Collective."""
    given = bind("input weights minlength", args, kwargs, weights=None, minlength=0)
    x, weights = _beside(func, given["input"], given["weights"])
    if x.spec.ndim != 1 or x.local.is_floating_point() or x.local.is_complex() or x.dtype == torch.bool:
        raise RuntimeError("bincount: it takes integers of one dim")
    length = int(given["minlength"])
    if length < 0:
        raise RuntimeError("bincount: minlength must not be negative")
    if x.spec.global_shape[0]:
        low, high = _range_of(x)
        if low < 0:
            raise RuntimeError("bincount: it takes no negative numbers")
        length = max(length, int(high) + 1)
    found = torch.bincount(x.local, weights, minlength=length)
    if weights is not None and x.spec.global_shape[0] and not len(x.local):  # there torch forgets the weights' dtype
        found = found.to(weights.dtype if weights.dtype == torch.float32 else torch.float64)
    return _total(found, x)


@register_op(coo_to_csr, any_order=True)
def ends_of_numbers(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Say where each number ends in a sorted row of them, after a 0: plain, the same on each rank. Collective."""
    given = bind("input size", args, kwargs, out_int32=False)
    counts = torch.bincount(given["input"], minlength=given["size"])
    ends = torch.cat([counts.new_zeros(1), counts[: given["size"]].cumsum(0)])
    return ends.int() if given["out_int32"] else ends


@register_op(*find("histc", namespaces=_BOTH), any_order=True)
def histc(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Count the values in bins of equal width: plain, the same on each rank. Collective."""
    given = bind("input bins min max", args, kwargs, bins=100, min=0, max=0)
    x: ShardTensor = given["input"]
    refuse_out(func, kwargs, x.spec)
    low, high = given["min"], given["max"]
    if low == high and x.spec.global_size.numel():
        low, high = (value.item() for value in _range_of(x))
        _check_range(func, low, high)
    if low == high:
        low, high = low - 1, high + 1
    return _total(torch.histc(x.local.detach(), given["bins"], low, high), x)


def _check_range(func: Any, low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise RuntimeError(f"{func.__name__}: range of [{low}, {high}] is not finite")


@register_op(*find("histogram", namespaces=_BOTH), any_order=True)
def histogram(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count the values in bins, or sum up their weights: plain, the same on each rank. Collective."""
    given = bind("input bins", args, kwargs, weight=None, density=False, range=None)
    refuse_out(func, kwargs, *specs_of([given["input"]]))
    if is_sharded(given["bins"]):
        raise unsupported(func, "the edges of bins are sharded", given["bins"].spec, remedy="use full_tensor()")
    x, weights = _beside(func, given["input"], given["weight"])
    bins = local_of(given["bins"])
    options: dict[str, Any] = {}
    if not isinstance(bins, Tensor):
        options["range"] = given["range"]
        if options["range"] is None and x.spec.global_size.numel():
            low, high = options["range"] = [value.item() for value in _range_of(x)]
            _check_range(func, low, high)
    counts, edges = torch.histogram(x.local.detach(), bins, weight=weights, **options)
    counts = _total(counts, x)
    if given["density"]:
        counts = counts / (counts.sum() * edges.diff())
    return torch.return_types.histogram((counts, edges))


@register_op(torch.isin)
def isin(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Say which elements are among others, which are gathered where they are sharded beside sharded elements."""
    given = bind("elements test_elements", args, kwargs)
    refuse_out(func, kwargs, *specs_of([*given.values()]))
    alias = {"element": "elements", "test_element": "test_elements"}
    given = {alias.get(name, name): value for name, value in given.items()}
    elements, others = given.pop("elements"), given.pop("test_elements")
    if is_sharded(elements):
        others = others.full_tensor() if isinstance(others, ShardTensor) else others
        return finish(func(elements.local, others, **given), elements.spec)
    inverted = bool(given.pop("invert", False))
    given.pop("assume_unique", None)  # of parts it would be no promise for all
    found = _total(func(local_of(elements), others.local.reshape(-1), **given).long(), others) > 0
    return ~found if inverted else found


# -- one answer ----------------------------------------------------------------------------------------------------


@register_op(*find("equal", namespaces=_BOTH), any_order=True)
def equal(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors have one shape and the same elements; the same answer on each rank. Collective."""
    given = bind("input other", args, kwargs)
    x, other = given["input"].detach(), given["other"].detach()
    return tuple(x.shape) == tuple(other.shape) and bool((x == other).all())


@register_op(*find("allclose", namespaces=_BOTH), any_order=True)
def allclose(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all elements of two tensors are close; the same answer on each rank. Collective."""
    given = bind("input other rtol atol equal_nan", args, kwargs)
    x, other = given.pop("input").detach(), given.pop("other").detach()
    return bool(torch.isclose(x, other, **given).all())


@register_op(*find("is_nonzero", namespaces=_BOTH), any_order=True)
def is_nonzero(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the only element is not zero. Collective."""
    return bool(args[0] if args else kwargs["input"])


@register_op(*find("nanmean", namespaces=_BOTH), any_order=True)
def nanmean(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Mean of what is not NaN."""
    given = bind("input dim keepdim", args, kwargs, dim=None, keepdim=False)
    x, dtype = given["input"], given.get("dtype")
    refuse_out(func, kwargs, x.spec)
    if not (x.local.is_floating_point() or x.local.is_complex()):
        raise RuntimeError(f"nanmean: expected floating point or complex numbers, not {x.dtype}")
    dims = {"dim": given["dim"], "keepdim": given["keepdim"]}
    count = (~x.detach().isnan()).sum(**dims)
    total: Tensor = torch.nansum(x, **dims, **({} if dtype is None else {"dtype": dtype})) / count
    return total
