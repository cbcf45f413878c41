"""Message passing: gathers by node ids and by masks, new tensors of edges, and joining them. Scatters are next door.

The rows of a tensor of edges are a set: their order is by rank, so that joining two such tensors joins them on each
rank. The owner of a node holds the edges that end there and the self-loop that a layer adds to it; so a gather of
sources exchanges ghosts once, and the rest is local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scidata.shard.comm.collectives import replicate_to_shards, slice_to_shard
from scidata.shard.graphs.ghosts import GhostExchange, PendingHalo, ghosts_key
from scidata.shard.graphs.routed import ACCEPT_FILLED, FilledTensor, RoutedIndex
from scidata.shard.op_table import HANDLERS, KEEPS_REPLICATED, Handler, find, register_op, unsupported
from scidata.shard.ops import indexing, joining, metadata  # noqa: F401 - their entries are extended here
from scidata.shard.ops.advanced import count_true, take_advanced
from scidata.shard.ops.align import local_of, refuse_out, specs_of
from scidata.shard.ops.shapes import argument, many, normal_dim
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor

__all__ = ["REMEDY", "check_nodes", "extend_op", "is_sharded", "start_exchange", "take_rows", "with_ghosts"]

REMEDY = "use sample.to_pyg(), whose edge_index knows its routes"


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

    both.__module__, both.__doc__ = earlier.__module__, earlier.__doc__  # its family in the docs
    if earlier in KEEPS_REPLICATED:
        KEEPS_REPLICATED.add(both)
    ACCEPT_FILLED.add(both)
    return both


def is_sharded(x: Any) -> bool:
    """Whether this is a ShardTensor that any axis shards."""
    return isinstance(x, ShardTensor) and not x._spec.is_replicated


# -- gathers -------------------------------------------------------------------------------------------------------


def with_ghosts(x: ShardTensor, dim: int, exchange: GhostExchange) -> Tensor:
    """Return owned rows and ghosts along ``dim``. Collective.

    Kept with ``x`` until it is written to, so that layers that gather one tensor twice exchange it once.
    """
    local = x._local
    if exchange.num_ghosts == 0:
        return local
    key = ghosts_key(x, dim, exchange)
    held = x.__dict__.get("_with_ghosts")
    if held is not None and held[0] == key and not isinstance(held[1], PendingHalo):
        return held[1]  # type: ignore[no-any-return]
    padded: Tensor
    if held is not None and held[0] == key:
        padded = held[1].wait()
    else:
        rows = local.movedim(dim, 0)
        padded = torch.cat([rows, exchange.ghosts_of(rows)]).movedim(0, dim)
    x.__dict__["_with_ghosts"] = key, padded, exchange, local  # the last two so that their ids stay theirs
    return padded


def start_exchange(x: Tensor, edge_index: Tensor) -> None:
    """Start to fetch the rows of ``x`` that gathers along ``edge_index`` will need; they wait for it. Collective.

    What is computed between this and the first gather from ``x`` overlaps with the exchange, and so does its backward.
    Nothing happens where there is nothing to exchange: for plain tensors, or where the rows are here already. So a
    model may call it and still run in one process. Second derivatives are not available; leave the call out for them.

    Parameters
    ----------
    x
        ``(num_nodes, ...)``.
    edge_index
        Of ``sample.to_pyg()``, or a row of it.

    Raises
    ------
    UnsupportedShardOp
        ``x`` is not split as the nodes of the graph are.
    """
    if not isinstance(x, ShardTensor) or not is_sharded(x) or not isinstance(edge_index, RoutedIndex):
        return
    check_nodes(start_exchange, x, 0, edge_index)
    exchange = edge_index.exchange
    key = ghosts_key(x, 0, exchange)
    held = x.__dict__.get("_with_ghosts")
    if exchange.num_ghosts == 0 or edge_index.all_owned or (held is not None and held[0] == key):
        return
    x.__dict__["_with_ghosts"] = key, PendingHalo(x._local, exchange), exchange, x._local


def check_nodes(func: Any, x: ShardTensor, dim: int, index: RoutedIndex) -> None:
    """Raise where a dim is not split as the nodes of the index's graph are."""
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
    if not is_sharded(x):
        plain = local_of(x)
        dim = normal_dim(dim, plain.ndim)
        rows = replicate_to_shards(plain, [ispec.group(axis)]).index_select(dim, index._local)
        shape = list(plain.shape)
        spec = ispec
    else:
        assert isinstance(x, ShardTensor)
        spec, dim = x._spec, normal_dim(dim, x._spec.ndim)
        if not isinstance(index, RoutedIndex):
            return take_advanced(func, x, {dim: index})  # type: ignore[return-value]
        check_nodes(func, x, dim, index)
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
    if not is_sharded(index):
        return NotImplemented
    refuse_out(func, kwargs, *specs_of([index]))
    return take_rows(func, argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "dim"), index)


def _only_index(index: Any) -> tuple[int, Any] | None:
    """Return the place of the one sharded tensor in an index whose other items take their dims whole."""
    items = index if isinstance(index, tuple) else (index,)
    places = [i for i, item in enumerate(items) if is_sharded(item)]
    if not places:
        return None
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
    if rows.dtype == torch.bool and (rows._spec.ndim > 1 or not _beside(x, dim, rows)):
        return NotImplemented
    return _take_where(func, x, dim, rows) if rows.dtype == torch.bool else take_rows(func, x, dim, rows)


def _beside(x: Any, dim: int, mask: ShardTensor) -> bool:
    """Whether the rows of ``x``, where it is sharded, lie where those of the mask do."""
    (axis,) = mask._spec.sharded.values()
    return not is_sharded(x) or (x._spec.dims[axis], x._spec.sizes[axis]) == (dim, mask._spec.sizes[axis])


def _take_where(func: Any, x: Tensor, dim: int, mask: ShardTensor) -> ShardTensor:
    spec = mask._spec
    (axis,) = spec.sharded.values()
    shape = tuple(x.shape)
    if spec.ndim != 1 or dim >= len(shape) or shape[dim] != spec.global_shape[0]:
        raise unsupported(func, f"the mask does not fit dim {dim} of shape {shape}", spec)
    if not is_sharded(x):
        plain = local_of(x)
        local = slice_to_shard(plain, spec.sizes_of(axis), dim, spec.group(axis))
        base = spec.derive(shape, [dim if a == axis else None for a in range(len(spec.axes))], spec.sizes)
    else:
        assert isinstance(x, ShardTensor)
        local, base = x._local, x._spec
        if base.axis_of_dim(dim) != axis or base.sizes_of(axis) != spec.sizes_of(axis):
            raise unsupported(func, "the mask is split differently", base, spec)
    counts = count_true(mask)
    items: tuple[Any, ...] = (*[slice(None)] * dim, mask._local)
    sizes = [counts if a == axis else s for a, s in enumerate(base.sizes)]
    rows = local[items]
    return ShardTensor(rows, base.derive((*shape[:dim], sum(counts), *shape[dim + 1 :]), base.dims, sizes))


@register_op(*find("gather", namespaces=(torch, Tensor)))
def gather_elements(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Gather elements of a tensor of nodes by ids that know their routes."""
    x, index = argument(args, kwargs, 0, "input"), argument(args, kwargs, 2, "index")
    dim = normal_dim(argument(args, kwargs, 1, "dim"), len(x.shape))
    if not isinstance(index, RoutedIndex) or not is_sharded(x) or list(index._spec.sharded) != [dim]:
        raise unsupported(func, "the index has no routes along this dim", *specs_of([x, index]), remedy=REMEDY)
    check_nodes(func, x, dim, index)
    source = x._local if index.all_owned else with_ghosts(x, dim, index.exchange)
    return ShardTensor(source.gather(dim, index.local_ids), index._spec)


# -- new tensors, and joining ----------------------------------------------------------------------------------------


@extend_op(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full)
def new_filled(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put off what a new tensor of edges will be: it may become one of nodes."""
    x = args[0]
    if not is_sharded(x) or x._spec.space is None or kwargs.get("requires_grad"):
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
    edges = next((x for x in tensors if is_sharded(x) and x._spec.space is not None), None)
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
    if is_sharded(x):
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
    if is_sharded(x) or (plain.numel() and not bool((plain == nodes).all())):
        raise unsupported(func, "an edge index is joined with edges other than the self-loop of each node", spec)
    count = exchange.node_sizes[exchange.index_map.part]
    return torch.arange(count, device=plain.device).expand(*plain.shape[:-1], count)
