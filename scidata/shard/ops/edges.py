"""Tensors of a graph's edges, and ids and masks that are sharded: how rows are taken, joined and written.

The rows of a tensor of edges are a set: their order is by rank, so that joining two such tensors joins them on each
rank. The owner of a node holds the edges that end there and the self-loop that a layer adds to it; so a gather of
sources exchanges ghosts once, and the rest is local.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from scidata.shard.comm.collectives import slice_to_shard
from scidata.shard.comm.operators import copied
from scidata.shard.comm.sums import replicate_to_shards
from scidata.shard.comm.transport import all_reduce_min
from scidata.shard.graphs.ghosts import GhostExchange, with_ghosts
from scidata.shard.graphs.routed import BetweenSets, RoutedIndex, check_nodes, node_spec
from scidata.shard.graphs.targets import FilledTensor, MovedTensor
from scidata.shard.op_table import TensorFunction, TorchFunction, unsupported
from scidata.shard.ops.advanced import count_true, places_of, split_alike, take_advanced, true_parts
from scidata.shard.ops.align import is_sharded, local_of, specs_of
from scidata.shard.ops.arguments import normal_dim
from scidata.shard.ops.moving import joined
from scidata.shard.rows.edge_order import as_joined, in_one_order, refuse_disorder
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.views import refuse_write_to_copy, written

T = TypeVar("T")

REMEDY = "use sample.to_pyg(), whose edge_index knows its routes"


# -- gathers -------------------------------------------------------------------------------------------------------


def take_rows(func: TorchFunction, x: Tensor, dim: int, index: ShardTensor) -> Tensor:
    """Take the rows of ``x`` at sharded global ids: one for each id, in the ids' layout. Collective for ghosts."""
    if index.dtype not in (torch.int64, torch.int32):
        raise unsupported(func, "a sharded index must hold integers", index.spec)
    old, ispec = x.shape, index.spec
    dim = normal_dim(dim, len(old))
    if not isinstance(index, RoutedIndex):
        return take_advanced(func, x, {dim: index})
    ((split, axis),) = ispec.sharded.items()
    if is_sharded(x):
        check_nodes(func, x, dim, index)
        source, ids = x.local if index.all_owned else with_ghosts(x, dim, index.exchange), index.local_ids
    else:
        source, ids = replicate_to_shards(local_of(x), [ispec.group(axis)]), index.local
    rows = source.index_select(dim, ids.reshape(-1))
    if ids.ndim != 1:
        rows = rows.view(*rows.shape[:dim], *ids.shape, *rows.shape[dim + 1 :])
    return ShardTensor(rows, ispec.along(axis, dim + split, (*old[:dim], *ispec.global_shape, *old[dim + 1 :])))


def only_index(items: Sequence[object]) -> tuple[int, ShardTensor] | None:
    """Return the position of the only sharded tensor in an index whose other items are full slices."""
    sharded = [(i, item) for i, item in enumerate(items) if is_sharded(item)]
    if len(sharded) != 1:
        return None
    others = [item for i, item in enumerate(items) if i != sharded[0][0]]
    return sharded[0] if all(isinstance(item, slice) and item == slice(None) for item in others) else None


def lies_beside(x: object, dim: int, mask: ShardTensor) -> bool:
    """Whether a sharded mask has one dim, and rows of a sharded ``x`` are split like it."""
    return mask.spec.ndim == 1 and (not is_sharded(x) or split_alike(x.spec, dim, mask.spec))


def _beside(func: TorchFunction, x: Tensor, dim: int, mask: ShardTensor) -> tuple[Tensor, ShardSpec]:
    """Return this rank's rows of ``x`` beside the mask, and the layout of all that lie so."""
    spec = mask.spec
    (axis,) = spec.sharded.values()
    shape = tuple(x.shape)
    if dim >= len(shape) or shape[dim] != spec.global_shape[0]:
        raise unsupported(func, f"the mask does not fit dim {dim} of shape {shape}", spec)
    if is_sharded(x):
        local, base = x.local, x.spec
    else:
        whole = as_joined(func, local_of(x), dim, spec)
        local = slice_to_shard(whole, spec.sizes_of(axis), dim, spec.group(axis))
        base = spec.along(axis, dim, shape)
    return local, base


def take_where(func: TorchFunction, x: Tensor, dim: int, mask: ShardTensor) -> ShardTensor:
    """Select rows of ``x`` by a sharded mask split like them: each rank keeps its own."""
    local, base = _beside(func, x, dim, mask)
    spec = base.with_rows(dim, count_true(mask)).with_true_parts(true_parts(mask))
    index: tuple[slice | Tensor, ...] = (*[slice(None)] * dim, *places_of(mask.local))
    return ShardTensor(local[index], spec)


def gather_by_ids(func: TorchFunction, x: Tensor, dim: int, index: RoutedIndex) -> Tensor:
    """Gather elements of a tensor of nodes by ids that know their routes. Collective for ghosts."""
    if not is_sharded(x) or list(index.spec.sharded) != [dim]:
        raise unsupported(func, "the index has no routes along this dim", *specs_of([x, index]), remedy=REMEDY)
    check_nodes(func, x, dim, index)
    source = x.local if index.all_owned else with_ghosts(x, dim, index.exchange)
    return ShardTensor(source.gather(dim, index.local_ids), index.spec)


# -- new tensors, and joining ----------------------------------------------------------------------------------------


def new_filled(x: Tensor, size: tuple[int, ...], make: TensorFunction) -> FilledTensor | None:
    """Make a constant from a tensor of edges whose layout, plain or of nodes, is decided later. None if it can only be
    plain.

    ``make`` gets a size, and returns a tensor of one value.
    """
    if not is_sharded(x) or x.spec.exchange is None or not size or (constant := make(())).requires_grad:
        return None
    return FilledTensor(constant.expand(size), x.spec.replicated(size))


def joins_on_each_rank(tensors: Sequence[Tensor], dim: int, spec: ShardSpec) -> bool:
    """Whether all are edges, or have one row for each node (self-loops), or none: each rank has its own of them."""
    if isinstance(spec.exchange, BetweenSets):
        return True
    num_nodes = sum(spec.exchange.node_sizes)
    plain = [tuple(x.shape) for x in tensors if not is_sharded(x)]
    return all(0 in shape or (len(shape) == spec.ndim and shape[dim] == num_nodes) for shape in plain)


def as_numbers(func: TorchFunction, x: Tensor) -> Tensor:
    """Return edges as any other sharded rows, in the order of one process. Collective if they have another."""
    if not is_sharded(x):
        return local_of(x)
    part, spec = (x.local, x.spec) if x.spec.in_order else in_one_order(func, x.local, x.spec)
    return ShardTensor(part, replace(spec, exchange=None, edge_parts=None))


def join_edges(func: TorchFunction, tensors: Sequence[Tensor], dim: int, spec: ShardSpec) -> ShardTensor:
    """Join tensors of edges, and one row for each node (self-loops), along the sharded dim: on each rank."""
    axis, exchange = spec.sharded[dim], spec.exchange
    parts = [_part_of(func, x, dim, axis, spec) for x in tensors]
    sizes = [sum(each) for each in zip(*(sizes for _, sizes in parts), strict=True)]
    local = joined([part for part, _ in parts], dim)
    known = [_edge_parts(x, own) for x, (_, own) in zip(tensors, parts, strict=True)]
    together = None if None in known else [part for each in known if each is not None for part in each]
    new = spec.with_rows(dim, sizes).with_edge_parts(together)
    routed = [x for x in tensors if isinstance(x, RoutedIndex)]
    plain = [x for x in tensors if not is_sharded(x) and x.numel()]
    if not routed or (not plain and not _share_routes(tensors)):
        return ShardTensor(local, new)
    ids = torch.cat([_ids_of(func, x, spec, exchange) for x in tensors], dim)
    owned = [all(flags) for flags in zip(*(x._owned for x in routed), strict=True)]
    return RoutedIndex(local, new, exchanges=routed[0].exchanges, ids=ids, owned=owned)


def _share_routes(tensors: Sequence[Tensor]) -> bool:
    """Whether all index tensors refer to the same node sets; otherwise only values can be concatenated."""
    exchanges = [x.exchanges if isinstance(x, RoutedIndex) else None for x in tensors if x.numel()]
    return all(each is not None and each == exchanges[0] for each in exchanges)


def _edge_parts(x: Tensor, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Return the edge parts that a tensor was joined from; one row per node is a part of its own."""
    return x.spec.edge_parts if is_sharded(x) and not x.spec.in_order else (sizes,)


def _part_of(func: TorchFunction, x: Tensor, dim: int, axis: int, spec: ShardSpec) -> tuple[Tensor, tuple[int, ...]]:
    """Return the local part and the sizes of one of the tensors to join."""
    if is_sharded(x):
        if x.spec.dims != spec.dims:
            raise unsupported(func, "the tensors are sharded along different dims", spec, x.spec)
        return x.local, x.spec.sizes_of(axis)
    plain = local_of(x)
    if not plain.numel():
        return plain, (0,) * len(spec.sizes_of(axis))
    if isinstance(spec.exchange, BetweenSets):
        raise unsupported(
            func,
            "edges between two sets of nodes are joined with plain rows, as self-loops are",
            spec,
            remedy="pass add_self_loops=False to layers between sets",
        )
    sizes = spec.exchange.node_sizes
    return slice_to_shard(plain, sizes, dim, spec.group(axis)), sizes


def _ids_of(func: TorchFunction, x: Tensor, spec: ShardSpec, exchange: GhostExchange) -> Tensor:
    """Return the ids in local numbering of an edge index to join: routed, or plain self-loops of every node."""
    if isinstance(x, RoutedIndex):
        return x.local_ids
    plain = local_of(x)
    if not is_sharded(x) and not plain.numel():
        return plain
    nodes = torch.arange(sum(exchange.node_sizes), device=plain.device)
    if is_sharded(x) or not bool((plain == nodes).all()):
        raise unsupported(func, "an edge index is joined with edges other than the self-loop of each node", spec)
    count = exchange.node_sizes[exchange.index_map.part]
    return torch.arange(count, device=plain.device).expand(*plain.shape[:-1], count)


# -- writing to rows of nodes, and where a mask is true --------------------------------------------------------------


def owned_everywhere(index: RoutedIndex) -> bool:
    """Whether no rank's ids are ghosts: by contract, or checked once and cached. Collective at the first use."""
    if index.all_owned:
        return True
    if "_no_ghosts" not in index.__dict__:
        (axis,) = index.spec.sharded.values()
        owned = (index.local_ids < index.exchange.index_map.num_owned).all().to(torch.int64).view(1)
        index.__dict__["_no_ghosts"] = bool(all_reduce_min(owned, index.spec.group(axis)).item())
    return bool(index.__dict__["_no_ghosts"])


def set_where(func: TorchFunction, target: Tensor, mask: ShardTensor, value: float | Tensor) -> bool:
    """Write where a sharded mask is true, on each rank; return False if this is not possible."""
    if not lies_beside(target, 0, mask):
        return False
    plain = isinstance(value, Tensor) and bool(value.ndim) and not is_sharded(value)
    if not is_sharded(target) or target.copied is not None or (plain and mask.spec.exchange is not None):
        raise unsupported(func, "it writes plain values, or to a tensor that cannot take them", mask.spec)
    local, base = _beside(func, target, 0, mask)
    if plain:
        return False
    if isinstance(value, ShardTensor):
        spec = base.with_rows(0, count_true(mask)).with_true_parts(true_parts(mask))
        if value.spec != spec:
            return False
    local[places_of(mask.local) if isinstance(value, Tensor) else mask.local] = _met(value, target.spec)
    written(target)
    return True


def _met(value: T, spec: ShardSpec) -> T | Tensor:
    """Return this rank's part of a value to write; gradients of a replicated number are summed."""
    if isinstance(value, Tensor) and not is_sharded(value):
        return replicate_to_shards(local_of(value), spec.shard_groups)
    return local_of(value)


def set_rows(func: TorchFunction, target: Tensor, index: RoutedIndex, value: float | Tensor) -> None:
    """Write rows of nodes at ids; their owners write them."""
    operands = specs_of([target, index, value])
    if index.spec.ndim != 1 or not owned_everywhere(index) or not isinstance(target, ShardTensor):
        raise unsupported(func, "it writes at ids that are not owned, or to a tensor that is not sharded", *operands)
    base, spec = node_part(func, target, 0, index)
    if isinstance(value, Tensor) and value.ndim:
        base[index.local_ids] = rows_like(func, value, 0, index)
    else:
        base[index.local_ids] = _met(value, spec)
    write_to(func, target, base, spec)


def node_part(func: TorchFunction, target: Tensor, dim: int, index: RoutedIndex) -> tuple[Tensor, ShardSpec]:
    """Return a fresh copy of this rank's rows of a tensor of nodes, plain or sharded, and their layout."""
    if is_sharded(target):
        check_nodes(func, target, dim, index)
        return target.local.clone(), target.spec
    shape = tuple(target.shape)
    spec = node_spec(index.spec, index.exchange, shape, dim)
    (axis,) = spec.sharded.values()
    plain = local_of(target)
    if plain.requires_grad:
        return slice_to_shard(plain, spec.sizes_of(axis), dim, spec.group(axis)).clone(), spec
    part = plain.narrow(dim, spec.offsets[dim], spec.local_shape[dim])
    return copied(part), spec


def rows_like(func: TorchFunction, src: Tensor, dim: int, index: ShardTensor) -> Tensor:
    """Return this rank's rows of ``src``, one for each id along ``dim``."""
    (axis,) = index.spec.sharded.values()
    (index_dim,) = index.spec.sharded
    sizes = index.spec.sizes_of(axis)
    if is_sharded(src):
        if src.spec.sharded != {dim: axis} or src.spec.sizes_of(axis) != sizes:
            raise unsupported(func, "the values are split differently from their index", src.spec, index.spec)
        if src.spec.order != index.spec.order:
            refuse_disorder(func, src.spec, index.spec)
        return src.local
    plain = local_of(src)
    if plain.shape[dim] != index.spec.global_shape[index_dim]:
        raise unsupported(func, f"{plain.shape[dim]} rows for {index.spec.global_shape[index_dim]} ids", index.spec)
    return slice_to_shard(as_joined(func, plain, dim, index.spec), sizes, dim, index.spec.group(axis))


def write_to(func: TorchFunction, target: Tensor, result: Tensor, spec: ShardSpec) -> Tensor:
    """Make ``target`` hold the result, in place."""
    if isinstance(target, FilledTensor) and target.spec.is_replicated:
        target.decide(result, spec)
        return target
    if isinstance(target, ShardTensor) and not target.spec.is_replicated:
        refuse_write_to_copy(func, target)
        target.local.copy_(result)
        written(target)
        return target
    if isinstance(target, ShardTensor):
        raise unsupported(func, "a replicated ShardTensor cannot take messages of nodes in place", target.spec)
    wrapped = ShardTensor(result, spec)
    MovedTensor.become(target, wrapped)
    return wrapped
