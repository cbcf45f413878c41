"""Message passing: gathers by node ids, scatters to nodes, and what the layers of a graph network need around them.

The rows of a tensor of edges are a set: their order is by rank, so that joining two such tensors joins them on each
rank. The owner of a node holds the edges that end there and the self-loop that a layer adds to it; so a gather of
sources exchanges ghosts once, and the rest is local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scidata.shard._transport import all_reduce_min, gather
from scidata.shard.collectives import all_reduce_sum, replicate_to_shards, slice_to_shard
from scidata.shard.graph import GhostExchange
from scidata.shard.ops import indexing  # noqa: F401 - its entries are extended here
from scidata.shard.ops.align import local_of, refuse_out, specs_of
from scidata.shard.ops.graph_extremes import extreme_over_ranks
from scidata.shard.ops.registry import HANDLERS, KEEPS_REPLICATED, Handler, find, register_op, unsupported
from scidata.shard.ops.shapes import argument, many, normal_dim
from scidata.shard.routed import ACCEPT_FILLED, FilledTensor, MovedTensor, RoutedIndex, node_spec
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor, _version

__all__ = ["extend_op", "take_rows"]

_REMEDY = "use sample.to_pyg(), whose edge_index knows its routes"


def extend_op(*functions: Any) -> Callable[[Handler], Handler]:
    """Ask the decorated handler first; where it returns NotImplemented the earlier handler answers."""

    def add(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = _first(handler, HANDLERS[function])
        return handler

    return add


def _first(handler: Handler, earlier: Handler) -> Handler:
    def both(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = handler(func, types, args, kwargs)
        return earlier(func, types, args, kwargs) if result is NotImplemented else result

    if earlier in KEEPS_REPLICATED:
        KEEPS_REPLICATED.add(both)
    ACCEPT_FILLED.add(both)
    return both


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardTensor) and not x._spec.is_replicated


# -- gathers -------------------------------------------------------------------------------------------------------


def with_ghosts(x: ShardTensor, dim: int, exchange: GhostExchange) -> Tensor:
    """Return owned rows and ghosts along ``dim``. Collective.

    Kept with ``x`` until it is written to, so that layers that gather one tensor twice exchange it once.
    """
    local = x._local
    if exchange.num_ghosts == 0:
        return local
    needs_grad = torch.is_grad_enabled() and local.requires_grad
    key = id(exchange), dim, id(local), _version(local), needs_grad
    held = x.__dict__.get("_with_ghosts")
    if held is not None and held[0] == key:
        return held[1]  # type: ignore[no-any-return]
    rows = local.movedim(dim, 0)
    padded = torch.cat([rows, exchange.ghosts_of(rows)]).movedim(0, dim)
    x.__dict__["_with_ghosts"] = key, padded, exchange, local  # the last two so that their ids stay theirs
    return padded


def _check_nodes(func: Any, x: ShardTensor, dim: int, index: RoutedIndex) -> None:
    axis = x._spec.axis_of_dim(dim)
    if len(x._spec.sharded) != 1 or axis is None or x._spec.sizes_of(axis) != index.exchange.node_sizes:
        raise unsupported(
            func,
            f"dim {dim} is not split as the nodes of the graph are, {index.exchange.node_sizes}",
            *specs_of([x, index]),
            remedy="redistribute() it to the bounds of the index map first",
        )


def take_rows(func: Any, x: Tensor, dim: int, index: ShardTensor) -> ShardTensor:
    """Take the rows of ``x`` at sharded global ids: one for each id, in the ids' layout. Collective for ghosts."""
    ispec = index._spec
    if ispec.ndim != 1 or index.dtype not in (torch.int64, torch.int32):
        raise unsupported(func, "a sharded index must have one dim and hold integers", ispec)
    (axis,) = ispec.sharded.values()
    if not _is_sharded(x):
        plain = local_of(x)
        dim = normal_dim(dim, plain.ndim)
        rows = replicate_to_shards(plain, [ispec.group(axis)]).index_select(dim, index._local)
        shape = list(plain.shape)
        spec = ispec
    else:
        assert isinstance(x, ShardTensor)
        spec, dim = x._spec, normal_dim(dim, x._spec.ndim)
        if not isinstance(index, RoutedIndex):
            raise unsupported(func, "the index has no routes", x._spec, ispec, remedy=_REMEDY)
        _check_nodes(func, x, dim, index)
        source = x._local if index.all_owned else with_ghosts(x, dim, index.exchange)
        rows = source.index_select(dim, index.local_ids)
        shape = list(spec.global_shape)
    shape[dim] = ispec.global_shape[0]
    return ShardTensor(
        rows, ispec.derive(shape, [dim if a == axis else None for a in range(len(ispec.axes))], ispec.sizes)
    )


@extend_op(*find("index_select", namespaces=(torch, Tensor)))
def index_select(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather by a sharded index."""
    index = argument(args, kwargs, 2, "index")
    if not _is_sharded(index):
        return NotImplemented
    refuse_out(func, kwargs, *specs_of([index]))
    return take_rows(func, argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "dim"), index)


def _only_index(index: Any) -> tuple[int, Any] | None:
    """Return the place of the one sharded tensor in an index whose other items take their dims whole."""
    items = index if isinstance(index, tuple) else (index,)
    places = [i for i, item in enumerate(items) if _is_sharded(item)]
    whole = all(isinstance(item, slice) and item == slice(None) for i, item in enumerate(items) if i not in places)
    return (places[0], items[places[0]]) if len(places) == 1 and whole else None


@extend_op(Tensor.__getitem__)
def getitem(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index by sharded ids, or by a sharded mask."""
    x, index = args
    found = _only_index(index)
    if found is None:
        return NotImplemented
    dim, rows = found
    return _take_where(func, x, dim, rows) if rows.dtype == torch.bool else take_rows(func, x, dim, rows)


def _count_true(mask: ShardTensor) -> tuple[int, ...]:
    """Return how many are true on each rank; kept with the mask. Collective at the first use."""
    held: tuple[int, tuple[int, ...]] | None = mask.__dict__.get("_true_counts")
    if held is None or held[0] != _version(mask._local):
        (axis,) = mask._spec.sharded.values()
        mine = mask._local.sum().view(1)
        sizes = mask._spec.sizes_of(axis)
        counts = gather(mine, (1,) * len(sizes), 0, mask._spec.group(axis)) if len(sizes) > 1 else mine
        held = mask.__dict__["_true_counts"] = _version(mask._local), tuple(counts.tolist())
    return held[1]


def _take_where(func: Any, x: Tensor, dim: int, mask: ShardTensor) -> ShardTensor:
    spec = mask._spec
    (axis,) = spec.sharded.values()
    shape = tuple(x.shape)
    if spec.ndim != 1 or dim >= len(shape) or shape[dim] != spec.global_shape[0]:
        raise unsupported(func, f"the mask does not fit dim {dim} of shape {shape}", spec)
    if not _is_sharded(x):
        plain = local_of(x)
        local = slice_to_shard(plain, spec.sizes_of(axis), dim, spec.group(axis))
        base = spec.derive(shape, [dim if a == axis else None for a in range(len(spec.axes))], spec.sizes)
    else:
        assert isinstance(x, ShardTensor)
        local, base = x._local, x._spec
        if base.axis_of_dim(dim) != axis or base.sizes_of(axis) != spec.sizes_of(axis):
            raise unsupported(func, "the mask is split differently", base, spec)
    counts = _count_true(mask)
    items: tuple[Any, ...] = (*[slice(None)] * dim, mask._local)
    sizes = [counts if a == axis else s for a, s in enumerate(base.sizes)]
    rows = local[items]
    return ShardTensor(rows, base.derive((*shape[:dim], sum(counts), *shape[dim + 1 :]), base.dims, sizes))


@register_op(*find("gather", namespaces=(torch, Tensor)))
def gather_elements(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Gather elements of a tensor of nodes by ids that know their routes."""
    x, index = argument(args, kwargs, 0, "input"), argument(args, kwargs, 2, "index")
    dim = normal_dim(argument(args, kwargs, 1, "dim"), len(x.shape))
    if not isinstance(index, RoutedIndex) or not _is_sharded(x) or list(index._spec.sharded) != [dim]:
        raise unsupported(func, "the index has no routes along this dim", *specs_of([x, index]), remedy=_REMEDY)
    _check_nodes(func, x, dim, index)
    source = x._local if index.all_owned else with_ghosts(x, dim, index.exchange)
    return ShardTensor(source.gather(dim, index.local_ids), index._spec)


# -- new tensors, and joining ----------------------------------------------------------------------------------------


@extend_op(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full)
def new_filled(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put off what a new tensor of edges will be: it may become one of nodes."""
    x = args[0]
    if not _is_sharded(x) or x._spec.space is None or kwargs.get("requires_grad"):
        return NotImplemented
    options = {"dtype": kwargs.get("dtype") or x.dtype, "device": kwargs.get("device") or x.device}
    if func is Tensor.new_full:
        size = tuple(argument(args, kwargs, 1, "size"))
        value = argument(args, kwargs, 2, "fill_value")
    else:
        size, value = many(args, kwargs, "size"), int(func is Tensor.new_ones)
    if not size or isinstance(value, Tensor):
        return NotImplemented
    constant = torch.full((), value, **options).expand(size)
    nothing = [None] * len(x._spec.axes)
    return FilledTensor(constant, x._spec.derive(size, nothing, nothing))


@extend_op(torch.cat, torch.concat, torch.concatenate)
def cat(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Join tensors of edges, and one row for each node (self-loops), along the sharded dim: on each rank."""
    tensors = list(argument(args, kwargs, 0, "tensors"))
    edges = next((x for x in tensors if _is_sharded(x) and x._spec.space is not None), None)
    if edges is None:
        return NotImplemented
    spec: ShardSpec = edges._spec
    dim = normal_dim(argument(args, kwargs, 1, "dim", kwargs.get("axis", 0)), spec.ndim)
    axis = spec.axis_of_dim(dim)
    if axis is None:
        return NotImplemented
    refuse_out(func, kwargs, spec)
    exchange: GhostExchange = spec.space
    parts = [_part_of(func, x, dim, axis, spec) for x in tensors]
    sizes = [sum(each) for each in zip(*(sizes for _, sizes in parts), strict=True)]
    local = torch.cat([part for part, _ in parts], dim)
    shape = (*spec.global_shape[:dim], sum(sizes), *spec.global_shape[dim + 1 :])
    new = spec.derive(shape, spec.dims, [sizes if a == axis else s for a, s in enumerate(spec.sizes)])
    if not any(isinstance(x, RoutedIndex) for x in tensors):
        return ShardTensor(local, new)
    ids = torch.cat([_ids_of(func, x, spec, exchange) for x in tensors], dim)
    routed = [x for x in tensors if isinstance(x, RoutedIndex)]
    owned = [all(flags) for flags in zip(*(x._owned for x in routed), strict=True)]
    return RoutedIndex(local, new, exchange=exchange, ids=ids, owned=owned)


def _part_of(func: Any, x: Tensor, dim: int, axis: int, spec: ShardSpec) -> tuple[Tensor, tuple[int, ...]]:
    """Return the local part and the sizes of one of the tensors to join."""
    if _is_sharded(x):
        assert isinstance(x, ShardTensor)
        if x._spec.dims != spec.dims:
            raise unsupported(func, "the tensors are sharded along different dims", spec, x._spec)
        return x._local, x._spec.sizes_of(axis)
    plain, sizes = local_of(x), spec.space.node_sizes
    if plain.ndim == 1 and len(plain) == 0 and spec.ndim > 1:
        return plain, (0,) * len(sizes)
    if plain.ndim != spec.ndim or plain.shape[dim] != sum(sizes):
        raise unsupported(
            func,
            f"edges are joined with a plain tensor of shape {tuple(plain.shape)}; only one row for each of the "
            f"{sum(sizes)} nodes has an owner",
            spec,
        )
    return slice_to_shard(plain, sizes, dim, spec.group(axis)), sizes


def _ids_of(func: Any, x: Tensor, spec: ShardSpec, exchange: GhostExchange) -> Tensor:
    """Return the ids in local numbering of an edge index to join: routed, or plain self-loops of every node."""
    if isinstance(x, RoutedIndex):
        return x.local_ids
    plain = local_of(x)
    nodes = torch.arange(sum(exchange.node_sizes), device=plain.device)
    if _is_sharded(x) or (plain.numel() and not bool((plain == nodes).all())):
        raise unsupported(func, "an edge index is joined with edges other than the self-loop of each node", spec)
    count = exchange.node_sizes[exchange.index_map.part]
    return torch.arange(count, device=plain.device).expand(*plain.shape[:-1], count)


# -- scatters ------------------------------------------------------------------------------------------------------


def _owned_everywhere(index: RoutedIndex) -> bool:
    """Whether no rank's ids are ghosts: by contract, or found out and kept. Collective at the first use."""
    if index.all_owned:
        return True
    if "_no_ghosts" not in index.__dict__:
        (axis,) = index._spec.sharded.values()
        owned = (index.local_ids < index.exchange.index_map.num_owned).all().to(torch.int64).view(1)
        index.__dict__["_no_ghosts"] = bool(all_reduce_min(owned, index._spec.group(axis)).item())
    return bool(index.__dict__["_no_ghosts"])


@extend_op(Tensor.__setitem__)
def setitem(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write to rows of nodes at ids whose owners write them."""
    target, index, value = args
    if not isinstance(index, RoutedIndex):
        return NotImplemented
    operands = specs_of([target, index, value])
    if index._spec.ndim != 1 or not _owned_everywhere(index) or not isinstance(target, ShardTensor):
        raise unsupported(func, "it writes at ids that are not owned, or to a tensor that is not sharded", *operands)
    base, spec = _node_part(func, target, 0, index)
    if isinstance(value, Tensor) and value.ndim:
        value = _rows_like(func, value, 0, index)
    base[index.local_ids] = local_of(value)
    _write(func, target, base, spec)
    return None


def _node_part(func: Any, target: Tensor, dim: int, index: RoutedIndex) -> tuple[Tensor, ShardSpec]:
    """Return a fresh copy of this rank's rows of a tensor of nodes, whatever it is now, and their layout."""
    if _is_sharded(target):
        assert isinstance(target, ShardTensor)
        _check_nodes(func, target, dim, index)
        return target._local.clone(), target._spec
    spec = node_spec(index._spec, index.exchange, tuple(target.shape), dim)
    (axis,) = spec.sharded.values()
    plain = local_of(target)
    if plain.requires_grad:
        return slice_to_shard(plain, spec.sizes_of(axis), dim, spec.group(axis)).clone(), spec
    part = plain.narrow(dim, spec.offsets[dim], spec.local_shape[dim])
    return part.clone(memory_format=torch.contiguous_format), spec


def _rows_like(func: Any, src: Tensor, dim: int, index: ShardTensor) -> Tensor:
    """Return this rank's rows of ``src``, one for each id along ``dim``."""
    (axis,) = index._spec.sharded.values()
    (index_dim,) = index._spec.sharded
    sizes = index._spec.sizes_of(axis)
    if _is_sharded(src):
        assert isinstance(src, ShardTensor)
        if src._spec.sharded != {dim: axis} or src._spec.sizes_of(axis) != sizes:
            raise unsupported(func, "the values are split differently from their index", src._spec, index._spec)
        return src._local
    plain = local_of(src)
    if plain.shape[dim] != index._spec.global_shape[index_dim]:
        raise unsupported(func, f"{plain.shape[dim]} rows for {index._spec.global_shape[index_dim]} ids", index._spec)
    return slice_to_shard(plain, sizes, dim, index._spec.group(axis))


def _write(func: Any, target: Tensor, result: Tensor, spec: ShardSpec) -> Tensor:
    """Make ``target`` hold the result, in place."""
    if isinstance(target, FilledTensor) and target._spec.is_replicated:
        target.decide(result, spec)
        return target
    if isinstance(target, ShardTensor) and not target._spec.is_replicated:
        if target._copied:
            raise unsupported(func, "this tensor is a copy where torch would have made a view", spec)
        target._local.copy_(result)
        return target
    if isinstance(target, ShardTensor):
        raise unsupported(func, "a replicated ShardTensor cannot take messages of nodes in place", target._spec)
    wrapped = ShardTensor(result, spec)
    MovedTensor.become(target, wrapped)
    return wrapped


Compute = Callable[[Tensor, Tensor, Tensor], Tensor]  # (target rows, to be written to; ids; values) -> target rows


def _to_nodes(
    func: Any, target: Tensor, dim: int, index: RoutedIndex, src: Tensor, compute: Compute, adds: bool
) -> tuple[Tensor, ShardSpec]:
    """Scatter to nodes: where they are owned, at once; sums for ghosts are sent to their owners."""
    base, spec = _node_part(func, target, dim, index)
    values, exchange = _rows_like(func, src, dim, index), index.exchange
    if index.all_owned or exchange.num_ghosts == 0 or (not adds and _owned_everywhere(index)):
        return compute(base, index.local_ids, values), spec
    if not adds:
        raise unsupported(
            func, "only sums can be scattered to nodes that other ranks own", index._spec, remedy="scatter to targets"
        )
    num_owned, num_ghost = base.shape[dim], exchange.index_map.num_ghost
    empty = base.new_zeros((*base.shape[:dim], num_owned + num_ghost, *base.shape[dim + 1 :]))
    sums = compute(empty, index.local_ids, values).movedim(dim, 0)
    total = exchange.add_ghosts(sums[:num_owned], sums[num_owned:])
    return base + total.movedim(0, dim), spec


def _to_all(
    func: Any, target: Tensor, dim: int, index: ShardTensor, src: Tensor, compute: Compute, reduce: str
) -> Tensor:
    """Scatter to rows that every rank holds: each scatters its own values, then ranks reduce."""
    if _is_sharded(target):
        raise unsupported(func, "the index has no routes", *specs_of([target, index]), remedy=_REMEDY)
    base, values = local_of(target), _rows_like(func, src, dim, index)
    (axis,) = index._spec.sharded.values()
    group = index._spec.group(axis)
    if reduce == "sum":
        empty = torch.zeros_like(base, memory_format=torch.contiguous_format)
        return base + all_reduce_sum(compute(empty, index._local, values), group)
    if reduce in ("amax", "amin"):
        return extreme_over_ranks(base.contiguous(), dim, index._local, values, reduce, group)
    raise unsupported(func, f"reduce={reduce!r} to rows that all ranks hold", index._spec)


def _scatter(
    func: Any, target: Tensor, dim: int, index: Tensor, src: Tensor, compute: Compute, reduce: str = "sum"
) -> Tensor:
    specs = specs_of([target, index, src])
    if not isinstance(index, ShardTensor) or index._spec.is_replicated or not isinstance(src, Tensor):
        raise unsupported(func, "the index is not sharded, but what it scatters is", *specs, remedy=_REMEDY)
    dim = normal_dim(dim, len(target.shape))
    if list(index._spec.sharded) != [dim if index._spec.ndim > 1 else 0]:
        raise unsupported(func, f"the index is sharded along another dim than {dim}", *specs)
    in_place = func.__name__.endswith("_")
    if isinstance(index, RoutedIndex) and target.shape[dim] == sum(index.exchange.node_sizes):
        result, spec = _to_nodes(func, target, dim, index, src, compute, reduce == "sum")
        return _write(func, target, result, spec) if in_place else ShardTensor(result, spec)
    result = _to_all(func, target, dim, index, src, compute, reduce)
    if not in_place:
        return result
    plain: Tensor = target.settled() if isinstance(target, FilledTensor) else local_of(target)
    plain.copy_(result)
    return plain


@register_op(*find("scatter_add scatter_add_", namespaces=(Tensor,)), torch.scatter_add, keeps_replicated=True)
def scatter_add(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add values to rows by id."""
    target, dim, index, src = (
        argument(args, kwargs, i, name) for i, name in enumerate(("input", "dim", "index", "src"))
    )
    _refuse_shapes(func, index, src)

    def compute(rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        return rows.scatter_add_(dim, ids, values)

    return _scatter(func, target, dim, index, src, compute)


@register_op(*find("scatter_reduce scatter_reduce_", namespaces=(Tensor,)), torch.scatter_reduce, keeps_replicated=True)
def scatter_reduce(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce values to rows by id."""
    names = ("input", "dim", "index", "src", "reduce")
    target, dim, index, src, reduce = (argument(args, kwargs, i, name) for i, name in enumerate(names))
    include_self = kwargs.get("include_self", True)
    _refuse_shapes(func, index, src)

    def compute(rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        return rows.scatter_reduce_(dim, ids, values, reduce, include_self=include_self)

    routed = isinstance(index, RoutedIndex) and target.shape[normal_dim(dim, len(target.shape))] == sum(
        index.exchange.node_sizes
    )
    if include_self and not routed and reduce != "sum":
        raise unsupported(func, f"include_self=True with reduce={reduce!r}", *specs_of([target, index, src]))
    if not include_self and reduce == "sum":  # rows without values keep theirs, the others start anew
        raise unsupported(func, "include_self=False with reduce='sum'", *specs_of([target, index, src]))
    return _scatter(func, target, dim, index, src, compute, reduce)


@register_op(*find("index_add index_add_", namespaces=(Tensor,)), torch.index_add, keeps_replicated=True)
def index_add(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add rows to rows by id."""
    names = ("input", "dim", "index", "source")
    target, dim, index, src = (argument(args, kwargs, i, name) for i, name in enumerate(names))
    alpha = kwargs.get("alpha", 1)
    if len(index.shape) != 1:
        raise unsupported(func, "the index must have one dim", *specs_of([target, index, src]))

    def compute(rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        return rows.index_add_(dim, ids, values, alpha=alpha)

    return _scatter(func, target, dim, index, src, compute)


def _refuse_shapes(func: Any, index: Tensor, src: Any) -> None:
    if not isinstance(src, Tensor) or tuple(index.shape) != tuple(src.shape):
        shapes = tuple(index.shape), tuple(getattr(src, "shape", ()))
        raise unsupported(func, f"index and values of different shapes {shapes}", *specs_of([index, src]))


for _handler in (scatter_add, scatter_reduce, index_add):
    ACCEPT_FILLED.add(_handler)
