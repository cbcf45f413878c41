"""Scatters by node ids: to the nodes of a graph, or to rows that every rank holds (one for each graph of a batch).

Each rank holds the edges that end at its nodes, so a scatter to targets is local; sums to sources that other ranks own
are sent there. Where every rank holds the result, partial results are reduced over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from scidata.shard.comm.collectives import all_gather_v
from scidata.shard.comm.functions import known
from scidata.shard.comm.operators import in_range, is_capturing
from scidata.shard.comm.sums import all_reduce_sum
from scidata.shard.comm.transport import all_reduce_max, all_reduce_min, group_size
from scidata.shard.graphs.routed import RoutedIndex
from scidata.shard.graphs.targets import FilledTensor
from scidata.shard.op_table import TensorFunction, TorchFunction, op_name, unsupported
from scidata.shard.ops.align import (
    align,
    finish,
    is_sharded,
    local_of,
    refuse_without_dims,
    spec_of_layout,
    specs_of,
    write_to_plain,
)
from scidata.shard.ops.arguments import handles, normal_dim
from scidata.shard.ops.edges import REMEDY, node_part, owned_everywhere, rows_like, write_to
from scidata.shard.ops.elements import scatter_along
from scidata.shard.ops.moments import widened
from scidata.shard.sizes import ones
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import refuse_write_to_copy, written

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]  # (target rows, to be written to; ids; values) -> target rows


def _to_nodes(
    func: TorchFunction, target: Tensor, dim: int, index: RoutedIndex, src: Tensor, compute: Compute, adds: bool
) -> tuple[Tensor, ShardSpec]:
    """Scatter to nodes: directly where they are owned; sums for ghosts are sent to their owners.

    A rank that owns nodes 0 to 4 and has two ghosts adds up seven rows. It sends the last two to their owners, and adds
    the rows that others send for its own nodes.
    """
    base, spec = node_part(func, target, dim, index)
    values, exchange = rows_like(func, src, dim, index), index.exchange
    if index.all_owned or exchange.num_ghosts == 0 or (not adds and owned_everywhere(index)):
        return compute(base, index.local_ids, values), spec
    if not adds:
        raise unsupported(
            func, "only sums can be scattered to nodes that other ranks own", index.spec, remedy="scatter to targets"
        )
    num_owned, num_ghost = base.shape[dim], exchange.index_map.num_ghost
    empty = base.new_zeros((*base.shape[:dim], num_owned + num_ghost, *base.shape[dim + 1 :]))
    sums = compute(empty, index.local_ids, values).movedim(dim, 0)
    total = exchange.add_ghosts(sums[:num_owned], sums[num_owned:])
    return base + total.movedim(0, dim), spec


def _fault_of(ids: Tensor, num_rows: int, group: dist.ProcessGroup) -> str | None:
    """Describe the fault of a rank's ids, which may be valid on others. Skipped on a GPU, which would have to
    synchronise.
    """
    if ids.device.type != "cpu" or ids.numel() == 0 or group_size(group) == 1:
        return None
    once = ids[tuple(slice(1) if step == 0 else slice(None) for step in ids.stride())]  # each of an expanded index
    low, high = (int(x) for x in once.aminmax())
    return None if low >= 0 and high < num_rows else f"ids from {low} to {high} for {num_rows} rows"


def _sum_over_ranks(func: TorchFunction, part: Tensor, fault: str | None, group: dist.ProcessGroup) -> Tensor:
    """Add up parts; on the CPU the ranks' faults travel with them, so that every rank raises. Collective.

    Raises IndexError: on every rank, where the ids of one are out of range.
    """
    if part.device.type != "cpu" or group_size(group) == 1:
        return all_reduce_sum(part, group)
    total = all_reduce_sum(torch.cat([part.reshape(-1), part.new_full((1,), fault is not None)]), group)
    message = f"{op_name(func)}: {fault or 'ids of another rank are out of range'}; give a larger size"
    if is_capturing():
        in_range(total[-1:].detach(), 0, 1, message)
    elif total[-1].item():
        raise IndexError(message)
    return total[:-1].view(part.shape)


def _extreme_over_ranks(
    func: TorchFunction,
    rows: Tensor,
    dim: int,
    ids: Tensor,
    values: Tensor,
    *,
    reduce: str,
    fault: str | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Maximum or minimum over ranks for each row; rows without values keep theirs. Collective.

    ``rows`` is replicated and must not require grad; ``ids`` and ``values`` have one shape.
    """
    largest = reduce == "amax"
    limits = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
    neutral = (limits.min if largest else limits.max) if not values.is_floating_point() else None
    worst = (float("-inf") if largest else float("inf")) if neutral is None else neutral
    plain, ones = values.detach(), torch.ones_like(values)
    best = torch.full_like(rows, worst).scatter_reduce_(dim, ids, plain, reduce, include_self=False)
    best = all_reduce_max(best, group) if largest else all_reduce_min(best, group)
    counts = _sum_over_ranks(func, torch.zeros_like(rows).scatter_add_(dim, ids, ones), fault, group)
    result = torch.where(counts > 0, best, rows)
    if not values.requires_grad or not torch.is_grad_enabled():
        return result
    hits = (plain == result.gather(dim, ids)).to(values.dtype)
    ties = all_reduce_sum(torch.zeros_like(rows).scatter_add_(dim, ids, hits), group)
    ties = ties + (rows == result)  # torch also counts the old value, although that is left out
    # to all values that equal the extreme one, in equal shares
    share = hits / ties.gather(dim, ids)
    return known(values, result, lambda grad, ids, share: grad.gather(dim, ids) * share, ids, share)


def _to_all(
    func: TorchFunction, target: Tensor, dim: int, index: ShardTensor, src: Tensor, compute: Compute, reduce: str
) -> Tensor:
    """Scatter to rows that every rank holds: each scatters its own values, then ranks reduce."""
    if is_sharded(target):
        raise unsupported(func, "the index has no routes", *specs_of([target, index]), remedy=REMEDY)
    base, values = local_of(target), rows_like(func, src, dim, index)
    (axis,) = index.spec.sharded.values()
    group, ids = index.spec.group(axis), index.local
    fault = _fault_of(ids, base.shape[dim], group) if values.numel() else None
    if fault is not None:
        ids, values = ids.narrow(dim if ids.ndim > 1 else 0, 0, 0), values.narrow(dim, 0, 0)
    if reduce == "sum":
        values = widened(values)  # sums of ranks, too, are rounded once
        empty = torch.zeros_like(base, dtype=values.dtype, memory_format=torch.contiguous_format)
        return base + _sum_over_ranks(func, compute(empty, ids, values), fault, group).to(base.dtype)
    if reduce in ("amax", "amin"):
        return _extreme_over_ranks(func, base.contiguous(), dim, ids, values, reduce=reduce, fault=fault, group=group)
    if reduce == "prod":
        own = compute(torch.ones_like(base, memory_format=torch.contiguous_format), ids, values)
        _sum_over_ranks(func, base.new_zeros(1), fault, group)
        parts = all_gather_v(own[None], ones(group_size(group)), 0, group)
        return base.clone() * parts.prod(0)  # base may be written to
    raise unsupported(func, f"reduce={reduce!r} to rows that all ranks hold", index.spec)


def _from_parts(func: TorchFunction, target: Tensor, dim: int, index: Tensor, src: Tensor, compute: Compute) -> Tensor:
    """Add sharded values to rows that every rank holds, by an index that lies beside them or on every rank.

    Each rank adds up its own values; where ``dim`` is sharded, ranks add up these sums. Collective.
    """
    names: list[Hashable] = ["values" if d == dim else d for d in range(len(src.shape))]
    (ids, values), layout, _ = align(
        func, [index, src], [names if len(index.shape) == len(names) else ["values"], names]
    )
    first = next(iter(specs_of([index, src])))
    groups = [first.group(axis) for axis, entry in enumerate(layout) if entry is not None and entry[0] == "values"]
    sharded = {entry[0] for entry in layout if entry is not None}
    shape = [values.shape[d] if d in sharded else n for d, n in enumerate(target.shape)]
    own = widened(values) if groups else values
    fault = _fault_of(ids, target.shape[dim], groups[0]) if groups and own.numel() else None
    if fault is not None:
        ids, own = ids.narrow(dim if ids.ndim > 1 else 0, 0, 0), own.narrow(dim, 0, 0)
    sums = compute(own.new_zeros(shape), ids, own)
    for group in groups:
        sums = _sum_over_ranks(func, sums, fault, group)
    names[dim] = "target"
    sums = finish(sums.to(values.dtype), spec_of_layout(layout, names, target.shape, first))
    return target.add_(sums) if func.__name__.endswith("_") else target + sums


def _scatter(
    func: TorchFunction, target: Tensor, dim: int, index: Tensor, src: Tensor, compute: Compute, reduce: str = "sum"
) -> Tensor:
    shape = target.shape
    dim = normal_dim(dim, len(shape))
    if not isinstance(index, ShardTensor) or list(index.spec.sharded) != [dim if index.spec.ndim > 1 else 0]:
        raise unsupported(
            func, "the index is not sharded as its values", *specs_of([target, index, src]), remedy=REMEDY
        )
    in_place = func.__name__.endswith("_")
    if isinstance(index, RoutedIndex) and shape[dim] == sum(index.exchange.node_sizes):
        result, spec = _to_nodes(func, target, dim, index, src, compute, reduce == "sum")
        return write_to(func, target, result, spec) if in_place else ShardTensor(result, spec)
    result = _to_all(func, target, dim, index, src, compute, reduce)
    if not in_place:
        return result
    refuse_write_to_copy(func, target)
    plain: Tensor = target.settled() if isinstance(target, FilledTensor) else local_of(target)
    plain.copy_(result)
    if isinstance(target, ShardTensor):
        written(target)
    return plain


@handles(
    "scatter_add scatter_reduce index_add scatter_add_ scatter_reduce_ index_add_",
    keeps_replicated=True,
    any_order=True,
    accepts_filled=True,
)
def scatter(
    func: TensorFunction,
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor | None = None,
    reduce: str = "sum",
    *,
    source: Tensor | None = None,
    include_self: bool = True,
    alpha: float = 1,
) -> Tensor:
    """Add values to rows by id, or reduce them."""
    kind, values = func.__name__.rstrip("_"), source if src is None else src
    options: dict[str, object] = {"alpha": alpha} if kind == "index_add" else {}
    options |= {"reduce": reduce, "include_self": include_self} if kind == "scatter_reduce" else {}
    write: TensorFunction = getattr(Tensor, f"{kind}_")

    def compute(rows: Tensor, ids: Tensor, own: Tensor) -> Tensor:
        return write(rows, dim, ids, own, **options)

    for each in (x, values):
        if each is not None:
            refuse_without_dims(func, each, index)
    if not isinstance(index, RoutedIndex):
        if is_sharded(x):
            return scatter_along(func, x, dim, index, values, **options)
        reduces = kind == "scatter_reduce" and (reduce == "mean" or include_self != (reduce in ("sum", "prod")))
        if values is not None and (reduces or not _lies_along(dim, index, values)):
            parts = is_sharded(index) or is_sharded(values)
            if parts and kind != "scatter_reduce" and _fits(x.shape, dim, index.shape, values):
                return _from_parts(func, x, normal_dim(dim, len(x.shape)), index, values, compute)
            return write_to_plain(func, (x, dim, index, values), options)
    if kind == "index_add" and len(index.shape) != 1:
        raise unsupported(func, "the index must have one dim", *specs_of([x, index, values]))
    if values is None or (kind != "index_add" and tuple(index.shape) != tuple(values.shape)):
        shapes = tuple(index.shape), tuple(getattr(values, "shape", ()))
        raise unsupported(func, f"index and values of different shapes {shapes}", *specs_of([index, values]))
    if kind == "scatter_reduce":
        # with include_self=False rows without values keep theirs, the others start anew
        routed = isinstance(index, RoutedIndex) and x.shape[dim] == sum(index.exchange.node_sizes)
        adds = reduce in ("sum", "prod")
        if include_self != adds and not (include_self and routed):
            reason = f"include_self={include_self} with reduce={reduce!r}"
            raise unsupported(func, reason, *specs_of([x, index, values]))
    return _scatter(func, x, dim, index, values, compute, reduce)


def _lies_along(dim: int, index: Tensor, values: Tensor) -> bool:
    """Whether an index is sharded along the dim that it numbers, with its values split alike or not at all."""
    if not is_sharded(index) or list(index.spec.sharded) != [dim % len(values.shape) if index.spec.ndim > 1 else 0]:
        return False
    (axis,) = index.spec.sharded.values()
    alike = {dim % len(values.shape): axis}
    return not is_sharded(values) or (
        values.spec.sharded == alike and values.spec.sizes_of(axis) == index.spec.sizes_of(axis)
    )


def _fits(shape: Sequence[int], dim: int, index: Sequence[int], values: Tensor) -> bool:
    """Whether values have the extents of their target along sharded dims except ``dim``, and of their index."""
    if len(values.shape) != len(shape) or (len(index) > 1 and tuple(index) != tuple(values.shape)):
        return False
    return all(values.shape[d] == n or d == dim % len(shape) for d, n in enumerate(shape))


@handles("torch_scatter.scatter_max", "torch_scatter.scatter_min")
def extreme(
    func: TensorFunction, src: Tensor, index: Tensor, dim: int, out: object = None, num: int | None = None
) -> tuple[Tensor, Tensor]:
    """Take the maximum or minimum of each id, and the first row that has it. Collective."""
    if out is not None:
        raise unsupported(func, "it writes to a tensor that is given", *specs_of([src, index]))
    dim, is_max = normal_dim(dim, src.ndim), func.__name__ == "scatter_max"
    column = [-1 if d == dim else 1 for d in range(src.ndim)]
    index = (index.view(column) if index.ndim == 1 else index).expand_as(src)
    rows, count = torch.arange(src.shape[dim], device=src.device).view(column).expand(src.shape), src.shape[dim]
    num = (int(index.max()) + 1 if index.numel() else 0) if num is None else num
    shape = (*src.shape[:dim], num, *src.shape[dim + 1 :])
    with torch.no_grad():
        # its kernel begins at the last finite number, so that what is beyond that, and NaN, counts as no row
        limits = torch.finfo(src.dtype) if src.is_floating_point() else torch.iinfo(src.dtype)
        last = limits.min if is_max else limits.max
        valid = src > last if is_max else src < last
        known, kind = torch.where(valid, src, last), "amax" if is_max else "amin"
        best = src.new_zeros(shape).scatter_reduce(dim, index, known, kind, include_self=False)
        first = torch.where(valid & (src == best.gather(dim, index)), rows, count)
        first = first.new_full(shape, count).scatter_reduce(dim, index, first, "amin")
        chosen = rows == first.gather(dim, index)
    return src.new_zeros(shape).scatter_add(dim, index, torch.where(chosen, src, 0)), first
