"""Functions whose result size depends on values, such as ``nonzero`` and ``unique``: an exchange gives each rank's
count.

They come in C order of the whole, split by the rank that has them; where dim 0 is not sharded, it is for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scidata.core.bounds import even_sizes
from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.functions import known
from scidata.shard.comm.transport import Group, gather, group_rank
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.advanced import count_true
from scidata.shard.ops.align import (
    Dims,
    Dtype,
    align,
    finish,
    is_sharded,
    local_of,
    map_local,
    plain_of,
    spec_of_layout,
    specs_of,
)
from scidata.shard.ops.arguments import composes, handles, normal_dim
from scidata.shard.ops.moving import as_sharded, replicated, sharded_on, to_layout
from scidata.shard.ops.sorting import sort_line
from scidata.shard.rows.ordered import counts_of, total_over
from scidata.shard.sizes import facts_of
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import coo_to_csr


def split_along(x: ShardTensor, dim: int) -> tuple[ShardTensor, int]:
    """Shard only one dim, evenly if it was unsharded; return the mesh axis too. Collective if the layout changes."""
    spec = x.spec
    axis = spec.sharded.get(dim, max(spec.sharded.values(), key=lambda a: spec.axes[a].size))
    x = replicated(x, set(spec.sharded.values()) - {axis})
    if spec.dims[axis] == dim:
        return x, axis
    return sharded_on(x, axis, dim, even_sizes(x.shape[dim], spec.axes[axis].size)), axis


def in_a_row(x: ShardTensor) -> tuple[ShardTensor, int]:
    """Flatten in C order; rows of dim 0 stay together if there are some for each rank. Collective."""
    spec = x.spec
    if 0 not in spec.sharded and spec.global_shape[0] >= max(2, *(spec.axes[a].size for a in spec.sharded.values())):
        x, _ = split_along(x, 0)
    flat = as_sharded(x.reshape(-1), spec)
    if is_sharded(flat):
        return split_along(flat, 0)
    axis = min(spec.sharded.values())  # its sharded dim had one row
    return sharded_on(flat, axis, 0, even_sizes(flat.shape[0], spec.axes[axis].size)), axis


def _rows(local: Tensor, like: ShardSpec, axis: int, counts: tuple[int, ...], dim: int = 0) -> ShardTensor:
    """Wrap rows with these ``counts`` on the ranks along one axis, replicated along the others."""
    shape = (*local.shape[:dim], sum(counts), *local.shape[dim + 1 :])
    return ShardTensor(local, like.along(axis, dim, shape, counts))


# -- where something is --------------------------------------------------------------------------------------------


@handles("nonzero argwhere")
def nonzero(
    func: Callable[..., Tensor | tuple[Tensor, ...]], x: ShardTensor, *, as_tuple: bool = False
) -> Tensor | tuple[Tensor, ...]:
    """List the global places of elements that are not zero. Collective."""
    spec = x.spec
    if 0 in spec.global_shape:
        return func(x.full_tensor(), **({"as_tuple": True} if as_tuple else {}))
    line, axis = in_a_row(map_local(x, Tensor.detach))
    own = x.local.dtype == torch.bool and [*spec.sharded] == [0] and spec.global_shape[0] > 1  # so flat as it lies
    counts = count_true(x if own else ShardTensor(line.local != 0, line.spec))
    flat = line.local.nonzero().squeeze(1) + line.spec.offsets[0]
    places = torch.unravel_index(flat, spec.global_shape)
    if as_tuple:
        return tuple(_rows(place, spec, axis, counts) for place in places)
    result = _rows(torch.stack(places, 1), spec, axis, counts)
    if spec.ndim > 1 and sum(counts) > 1:
        result.global_strides = (1, sum(counts))  # torch has one dim after the other
    return result


@handles("masked_select")
def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """Take the elements where a mask is true, both broadcast. Collective."""
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_select: the mask must be of bools, not {mask.dtype}")
    x, where = alike(torch.masked_select, [input, mask])
    return x[where]


def alike(func: TorchFunction, operands: list[Tensor]) -> list[ShardTensor]:
    """Broadcast tensors, and bring them to one layout. Collective if layouts differ."""
    ndim = max(len(x.shape) for x in operands)
    labels = [range(ndim - len(x.shape), ndim) for x in operands]
    parts, layout, extents = align(func, operands, labels)
    spec = spec_of_layout(layout, range(ndim), [extents[d] for d in range(ndim)], specs_of(operands)[0])
    return [ShardTensor(part.expand(spec.local_shape), spec) for part in parts]


# -- distinct values -----------------------------------------------------------------------------------------------


def _starts(rows: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
    """Mark rows that differ from the previous row, which may be another rank's; the first row is marked."""
    held = facts_of(sizes).held
    lasts = gather(rows[-1:], held, 0, group) if len(held) > 1 else rows[-1:]
    before = sum(held[: group_rank(group)])
    seen = torch.cat([lasts[before - 1 : before] if before else rows[:0], rows])
    differs = (seen[1:] != seen[:-1]).flatten(1).any(1) if rows.ndim > 1 else seen[1:] != seen[:-1]
    return differs if before or not len(rows) else torch.cat([differs.new_ones(1), differs])


def _lengths(starts: Tensor, end: int, counts: tuple[int, ...], group: Group) -> Tensor:
    """Return the distance from each start to the next one, which may be another rank's, or to the end."""
    held = facts_of(counts).held
    firsts = gather(starts[:1], held, 0, group) if len(held) > 1 else starts[:1]
    after = sum(held[: group_rank(group) + 1])
    following = torch.cat([starts, firsts[after:], starts.new_full((1,), end)])[1 : len(starts) + 1]
    return following - starts


def _of_runs(
    x: ShardTensor, dim: int, axis: int, weights: Tensor | None = None
) -> tuple[ShardTensor, ShardTensor, ShardTensor]:
    """Keep the first row of each run of equal ones; return these, the number of each row's run, and lengths of runs.

    ``weights``: how often each row counts.
    """
    spec = x.spec
    sizes, _, group = spec.parts(dim)
    rows = x.local.movedim(dim, 0)
    starts = _starts(rows, sizes, group)
    counts = counts_of(int(starts.sum()), group, rows.device)
    kept = rows[starts].movedim(0, dim)
    ends = (torch.ones_like(starts, dtype=torch.int64) if weights is None else weights).cumsum(0)
    totals = counts_of(int(ends[-1]) if len(ends) else 0, group, rows.device)
    rank = group_rank(group)
    runs = starts.cumsum(0) - 1 + sum(counts[:rank])
    begins = torch.cat([ends.new_zeros(1), ends])[:-1][starts] + sum(totals[:rank])
    lengths = _lengths(begins, sum(totals), counts, group)
    return _rows(kept, spec, axis, counts, dim), _rows(runs, spec, axis, sizes), _rows(lengths, spec, axis, counts)


def _chosen(x: Tensor, result: Tensor, *rest: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """Return the results that were asked for; as in torch, backward from distinct values raises."""
    if x.requires_grad and torch.is_grad_enabled():
        local = known(local_of(x), local_of(result), _refuse_gradient)
        like = result if isinstance(result, ShardTensor) else None
        result = local if like is None else ShardTensor(local, like.spec, global_strides=like.global_strides)
    asked = [each for each in rest if each is not None]
    return (result, *asked) if asked else result


def _refuse_gradient(grad: Tensor) -> Tensor:
    raise NotImplementedError("the derivative for 'unique' is not implemented; take unique() of x.detach()")


@handles(torch.unique_consecutive, Tensor.unique_consecutive)
def unique_consecutive(
    input: ShardTensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Keep the first of each run of equal elements, or rows of a dim. Collective."""
    spec, x = input.spec, map_local(input, Tensor.detach)
    if 0 in spec.global_shape:
        return torch.unique_consecutive(x.full_tensor(), return_inverse, return_counts, dim)
    if dim is None:
        line, axis = in_a_row(x)
        result, inverse, counts = _of_runs(line, 0, axis)
        inverse = to_layout(as_sharded(inverse.reshape(x.shape), spec), spec) if return_inverse else inverse
    else:
        dim = normal_dim(dim, spec.ndim)
        split, axis = split_along(x, dim)
        result, inverse, counts = _of_runs(split, dim, axis)
        # torch has the rows of a dim one after the other
        moved = torch.empty(result.shape, device="meta").movedim(dim, 0).contiguous().movedim(0, dim)
        result.global_strides = None if moved.is_contiguous() else moved.stride()
    return _chosen(input, result, inverse if return_inverse else None, counts if return_counts else None)


@handles(torch.unique, Tensor.unique)
def unique(
    input: ShardTensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False,
    dim: int | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """List the distinct values, or rows of a dim, in order: values split by rank, rows on each. Collective.

    Each rank finds its own first; those of all ranks are sorted where they lie. Rows are gathered.
    """
    spec, x = input.spec, map_local(input, Tensor.detach)
    if 0 in spec.global_shape:
        return torch.unique(x.full_tensor(), sorted, return_inverse, return_counts, dim)
    result, inverse, counts = _unique_values(x) if dim is None else _unique_rows(x, normal_dim(dim, spec.ndim))
    return _chosen(input, result, inverse() if return_inverse else None, counts if return_counts else None)


Unique = tuple[Tensor, Callable[[], Tensor], Tensor]  # values, the number of each element's value on demand, counts


def _unique_values(x: ShardTensor) -> Unique:
    """Find distinct values, with ranks that hold (3, 1, 3) and (1, 2), say.

    Their own are (1, 3) with counts (1, 2) and (1, 2) with (1, 1). Sorted over ranks these are (1, 1 | 2, 3), runs of
    equal ones are (1 | 2, 3), and counts of runs are added up: (2 | 1, 2).
    """
    spec = x.spec
    axis = max(spec.sharded.values(), key=lambda a: spec.axes[a].size)
    x = replicated(x, set(spec.sharded.values()) - {axis})
    own, inverse, counts = torch.unique(x.local, return_inverse=True, return_counts=True)
    line = _rows(own, spec, axis, counts_of(len(own), spec.group(axis), own.device))
    values, places = sort_line(line)
    result, numbers, lengths = _of_runs(values, 0, axis, local_of(ShardTensor(counts, line.spec)[places]))

    def back() -> Tensor:
        ranks = local_of(numbers[sort_line(places)[1]])  # where each of my own went
        return to_layout(ShardTensor(ranks[inverse], x.spec), spec)

    return result, back, lengths


def _unique_rows(x: ShardTensor, dim: int) -> Unique:
    x, axis = split_along(x, dim)
    spec = x.spec
    sizes, rank, group = spec.parts(dim)
    own, inverse, counts = torch.unique(x.local, dim=dim, return_inverse=True, return_counts=True)
    found = counts_of(own.shape[dim], group, own.device)
    rows = all_gather_v(own, found, dim, group)
    weights = all_gather_v(counts, found, 0, group)
    result, numbers = torch.unique(rows, dim=dim, return_inverse=True)
    total = weights.new_zeros(result.shape[dim]).index_add_(0, numbers, weights)
    mine = numbers[sum(found[:rank]) :][: found[rank]]
    return result, lambda: _rows(mine[inverse], spec, axis, sizes), total


# -- counts of values, and one answer for a whole tensor -------------------------------------------------------------


def _beside(func: TorchFunction, x: Tensor, other: Tensor | None) -> tuple[ShardTensor, Tensor | None]:
    """Bring weights to the layout of the values that they belong to."""
    if other is None:
        assert isinstance(x, ShardTensor)
        return x, None
    if tuple(x.shape) != tuple(other.shape):
        raise RuntimeError(f"{func.__name__}: shapes {tuple(x.shape)} and {tuple(other.shape)} differ")
    values, weights = alike(func, [x.detach(), other.detach()])
    return values, weights.local


@handles("bincount", any_order=True)
def bincount(func: TensorFunction, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Count how often each number occurs, or sum up its weights: plain, the same on each rank. Collective."""
    x, weights = _beside(func, input, weights)
    if x.spec.ndim != 1 or x.local.is_floating_point() or x.local.is_complex() or x.dtype == torch.bool:
        raise RuntimeError("bincount: it takes integers of one dim")
    length = int(minlength)
    if length < 0:
        raise RuntimeError("bincount: minlength must not be negative")
    if x.spec.global_shape[0]:
        low, high = torch.aminmax(x.detach())
        if low < 0:
            raise RuntimeError("bincount: it takes no negative numbers")
        length = max(length, int(high) + 1)
    found = torch.bincount(x.local, weights, minlength=length)
    if weights is not None and x.spec.global_shape[0] and not len(x.local):  # there torch forgets the weights' dtype
        found = found.to(weights.dtype if weights.dtype == torch.float32 else torch.float64)
    return total_over(found, x.spec.shard_groups)


@handles(coo_to_csr, any_order=True)
def ends_of_numbers(input: Tensor, size: int, *, out_int32: bool = False) -> Tensor:
    """Return a 0 and the end of each number's run in sorted numbers: plain, equal on each rank. Collective."""
    counts = torch.bincount(input, minlength=size)
    ends = torch.cat([counts.new_zeros(1), counts[:size].cumsum(0)])
    return ends.int() if out_int32 else ends


@handles("histc", any_order=True)
def histc(func: TensorFunction, x: ShardTensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count the values in bins of equal width: plain, the same on each rank. Collective."""
    low, high = min, max
    if low == high and x.spec.global_size.numel():
        low, high = _finite_range(func, x)
    if low == high:
        low, high = low - 1, high + 1
    return total_over(torch.histc(x.local.detach(), bins, low, high), x.spec.shard_groups)


def _finite_range(func: TorchFunction, x: ShardTensor) -> tuple[float, float]:
    """Return the least and the largest value. Collective."""
    low, high = (value.item() for value in torch.aminmax(x.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise RuntimeError(f"{func.__name__}: range of [{low}, {high}] is not finite")
    return low, high


@handles("histogram", any_order=True)
def histogram(
    func: Callable[..., tuple[Tensor, Tensor]], input: Tensor, bins: int | Sequence[int] | Tensor, *,
    range: tuple[float, float] | None = None, weight: Tensor | None = None, density: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Count the values in bins, or sum up their weights: plain, the same on each rank. Collective."""
    if is_sharded(bins):
        raise unsupported(func, "the edges of bins are sharded", bins.spec, remedy="use full_tensor()")
    x, weights = _beside(func, input, weight)
    options: dict[str, tuple[float, float] | None] = {}
    if not isinstance(bins, Tensor):
        own = _finite_range(func, x) if range is None and x.spec.global_size.numel() else range
        options["range"] = own
    counts, edges = func(x.local.detach(), local_of(bins), weight=weights, **options)
    counts = total_over(counts, x.spec.shard_groups)
    if density:
        counts = counts / (counts.sum() * edges.diff())
    return torch.return_types.histogram((counts, edges))


@handles(torch.histogramdd, any_order=True)
def histogramdd(
    func: Callable[..., tuple[Tensor, Sequence[Tensor]]], input: Tensor, bins: int | Sequence[int] | Sequence[Tensor],
    range: Sequence[float] | None = None, weight: Tensor | None = None, density: bool = False,
) -> tuple[Tensor, Sequence[Tensor]]:  # fmt: skip
    """Count rows of numbers in boxes, or sum up their weights: plain, the same on each rank. Collective."""
    x, weights = _beside(func, input, None if weight is None else weight[..., None].expand(input.shape))
    if x.spec.ndim - 1 in x.spec.sharded or any(map(is_sharded, [bins] if isinstance(bins, int) else bins)):
        raise unsupported(func, "the numbers of a row are on several ranks, or edges of bins", *specs_of([x, bins]))
    if range is None and x.spec.global_size.numel():
        rows = x.detach().flatten(0, -2)
        range = torch.stack([torch.amin(rows, 0), torch.amax(rows, 0)], 1).view(-1).tolist()
    weights = None if weights is None else weights[..., 0].contiguous()
    counts, edges = func(x.local.detach(), bins, range=range, weight=weights)
    counts = total_over(counts, x.spec.shard_groups)
    if density:
        counts = counts / counts.sum()
        for dim, own in enumerate(edges):
            counts = counts / own.diff().view(-1, *[1] * (len(edges) - 1 - dim))
    return torch.return_types.histogramdd((counts, tuple(edges)))


@handles(torch.isin)
def isin(
    func: TensorFunction, *operands: Tensor | float, assume_unique: bool = False, invert: bool = False, **named: float
) -> Tensor:
    """Test elements for membership; test elements are gathered if both are sharded."""
    first = [named.pop(name) for name in ("elements", "element") if name in named]
    given = [*first, *operands, *named.values()]
    elements, others = given[0], given[1]
    if is_sharded(elements):
        found = func(elements.local, plain_of(others), assume_unique=assume_unique, invert=invert)
        return finish(found, elements.spec)
    assert isinstance(others, ShardTensor)
    # of parts ``assume_unique`` would be no promise for all
    found = total_over(func(local_of(elements), others.local.reshape(-1)).long(), others.spec.shard_groups) > 0
    return ~found if invert else found


# -- one answer ----------------------------------------------------------------------------------------------------


composes(
    {
        "equal": lambda input, other: (
            tuple(input.shape) == tuple(other.shape) and bool((input.detach() == other.detach()).all())
        ),
        "allclose": lambda input, other, rtol=1e-5, atol=1e-8, equal_nan=False: bool(
            torch.isclose(input.detach(), other.detach(), rtol, atol, equal_nan).all()
        ),
        "is_nonzero": lambda input: input.__bool__(),
    },
    any_order=True,
)


@handles("nanmean", any_order=True)
def nanmean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None) -> Tensor:
    """Mean of all that is not NaN."""
    if not (input.is_floating_point() or input.is_complex()):
        raise RuntimeError(f"nanmean: expected floating point or complex numbers, not {input.dtype}")
    count = (~input.detach().isnan()).sum(dim, keepdim)
    return torch.nansum(input, dim, keepdim, dtype=dtype) / count
