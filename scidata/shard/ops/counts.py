"""Counts of values, and one answer for a whole tensor: each rank has its own, which are combined."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scidata.shard.comm.transport import all_reduce_max
from scidata.shard.op_table import TensorFunction, TorchFunction, find, unsupported
from scidata.shard.ops.align import Dims, Dtype, finish, is_sharded, local_of, plain_of
from scidata.shard.ops.arguments import handles
from scidata.shard.ops.counting import alike
from scidata.shard.rows.ordered import least_over, sum_over
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import coo_to_csr

_BOTH = (torch, Tensor)


def _beside(func: TorchFunction, x: Tensor, other: Tensor | None) -> tuple[ShardTensor, Tensor | None]:
    """Bring weights to the layout of the values that they belong to."""
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


@handles(*find("bincount", namespaces=_BOTH), any_order=True)
def bincount(func: TensorFunction, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Count how often each number occurs, or sum up its weights: plain, the same on each rank. Collective."""
    x, weights = _beside(func, input, weights)
    if x.spec.ndim != 1 or x.local.is_floating_point() or x.local.is_complex() or x.dtype == torch.bool:
        raise RuntimeError("bincount: it takes integers of one dim")
    length = int(minlength)
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


@handles(coo_to_csr, any_order=True)
def ends_of_numbers(input: Tensor, size: int, *, out_int32: bool = False) -> Tensor:
    """Say where each number ends in a sorted row of them, after a 0: plain, the same on each rank. Collective."""
    counts = torch.bincount(input, minlength=size)
    ends = torch.cat([counts.new_zeros(1), counts[:size].cumsum(0)])
    return ends.int() if out_int32 else ends


@handles(*find("histc", namespaces=_BOTH), any_order=True)
def histc(func: TensorFunction, x: ShardTensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count the values in bins of equal width: plain, the same on each rank. Collective."""
    low, high = min, max
    if low == high and x.spec.global_size.numel():
        low, high = _finite_range(func, x)
    if low == high:
        low, high = low - 1, high + 1
    return _total(torch.histc(x.local.detach(), bins, low, high), x)


def _finite_range(func: TorchFunction, x: ShardTensor) -> tuple[float, float]:
    """Return the least and the largest value. Collective."""
    low, high = (value.item() for value in _range_of(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise RuntimeError(f"{func.__name__}: range of [{low}, {high}] is not finite")
    return low, high


@handles(*find("histogram", namespaces=_BOTH), any_order=True)
def histogram(
    func: Callable[..., tuple[Tensor, Tensor]],
    input: Tensor,
    bins: int | Sequence[int] | Tensor,
    *,
    range: tuple[float, float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """Count the values in bins, or sum up their weights: plain, the same on each rank. Collective."""
    if is_sharded(bins):
        raise unsupported(func, "the edges of bins are sharded", bins.spec, remedy="use full_tensor()")
    x, weights = _beside(func, input, weight)
    options: dict[str, tuple[float, float] | None] = {}
    if not isinstance(bins, Tensor):
        own = _finite_range(func, x) if range is None and x.spec.global_size.numel() else range
        options["range"] = own
    counts, edges = func(x.local.detach(), local_of(bins), weight=weights, **options)
    counts = _total(counts, x)
    if density:
        counts = counts / (counts.sum() * edges.diff())
    return torch.return_types.histogram((counts, edges))


@handles(torch.isin)
def isin(
    func: TensorFunction, *operands: Tensor | float, assume_unique: bool = False, invert: bool = False, **named: float
) -> Tensor:
    """Say which elements are among others, which are gathered where they are sharded beside sharded elements."""
    first = [named.pop(name) for name in ("elements", "element") if name in named]
    given = [*first, *operands, *named.values()]
    elements, others = given[0], given[1]
    if is_sharded(elements):
        found = func(elements.local, plain_of(others), assume_unique=assume_unique, invert=invert)
        return finish(found, elements.spec)
    assert isinstance(others, ShardTensor)
    # of parts ``assume_unique`` would be no promise for all
    found = _total(func(local_of(elements), others.local.reshape(-1)).long(), others) > 0
    return ~found if invert else found


# -- one answer ----------------------------------------------------------------------------------------------------


@handles(*find("equal", namespaces=_BOTH), any_order=True)
def equal(input: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape and the same elements; the same answer on each rank. Collective."""
    return tuple(input.shape) == tuple(other.shape) and bool((input.detach() == other.detach()).all())


@handles(*find("allclose", namespaces=_BOTH), any_order=True)
def allclose(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Whether all elements of two tensors are close; the same answer on each rank. Collective."""
    return bool(torch.isclose(input.detach(), other.detach(), rtol, atol, equal_nan).all())


@handles(*find("is_nonzero", namespaces=_BOTH), any_order=True)
def is_nonzero(input: Tensor) -> bool:
    """Whether the only element is not zero. Collective."""
    return bool(input)


@handles(*find("nanmean", namespaces=_BOTH), any_order=True)
def nanmean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None) -> Tensor:
    """Mean of all that is not NaN."""
    if not (input.is_floating_point() or input.is_complex()):
        raise RuntimeError(f"nanmean: expected floating point or complex numbers, not {input.dtype}")
    count = (~input.detach().isnan()).sum(dim, keepdim)
    return torch.nansum(input, dim, keepdim, dtype=dtype) / count
