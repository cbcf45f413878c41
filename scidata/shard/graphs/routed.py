"""Edge indices of a graph that is split over ranks, with the routes of the rows that they refer to.

A ``RoutedIndex`` holds **global** node ids, so whatever is computed from its values is right; beside them it holds the
same ids in local numbering (owned nodes, then ghosts), so that gathers and scatters along it need no search. The two
rows of an ``edge_index`` may be ids of two sets of nodes, each with ghosts of its own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from scidata.core.index_map import IndexMap
from scidata.core.keywords import checked_keywords
from scidata.errors import ShardLayoutError, UnsupportedShardOp
from scidata.shard.comm.transport import device_of, gather_rows
from scidata.shard.graphs.ghosts import GhostExchange, PendingHalo, ghost_exchange, ghosts_key, graph_axis, keep_ghosts
from scidata.shard.op_table import TorchFunction, Types, find, unsupported
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import tree_map_only, version_of

#: Source set, name and target set.
Relation: TypeAlias = tuple[str, str, str]
_ONE_SET: Relation = ("node", "edge", "node")

# What only rearranges or copies: done to the ids in local numbering too.
_COPIES = find("clone detach contiguous to cuda cpu pin_memory", namespaces=(Tensor,))
_KEEPS_ROWS = {*_COPIES, torch.clone, torch.detach}
_MOVES = "view reshape expand expand_as unsqueeze squeeze flatten select unbind flip"
_FLIPS = {torch.flip, Tensor.flip}
_RESHAPES = {torch.reshape, torch.flatten, Tensor.view, Tensor.reshape, Tensor.flatten}
_REARRANGES = {*find(_MOVES, namespaces=(torch, Tensor)), Tensor.__getitem__}


class RoutedIndex(ShardTensor):
    """Node ids sharded by edges, with the way to each id's row."""

    __slots__ = ("_ids", "_ids_version", "_owned", "exchanges")

    # the ghosts of this rank and how they are filled: of each row of an ``edge_index``, or of all ids
    exchanges: tuple[GhostExchange, ...]
    _ids: Tensor  # in local numbering, of the shape of the local part
    _owned: tuple[bool, ...]  # of each row of an edge_index, or of all: every id is owned by the rank that holds it
    _ids_version: int

    @staticmethod
    def __new__(
        cls, local: Tensor, spec: ShardSpec, *, exchanges: Sequence[GhostExchange], ids: Tensor, owned: Sequence[bool]
    ) -> RoutedIndex:
        """Wrap global ids and the same ids in local numbering; as many ``exchanges`` as ``owned``. No checks."""
        self = ShardTensor.__new__(cls, local, spec)
        assert isinstance(self, RoutedIndex)
        self.exchanges, self._owned = tuple(exchanges), tuple(owned)
        self._ids, self._ids_version = ids, version_of(local)
        return self

    @property
    def exchange(self) -> GhostExchange:
        """The ghost exchange of the node set, if all ids refer to one set."""
        first = self.exchanges[0]
        if any(other is not first for other in self.exchanges):
            raise UnsupportedShardOp(
                f"the rows of this edge index are ids of two sets of nodes ({self.spec}); use edge_index[0] for the "
                "sources and edge_index[1] for the targets"
            )
        return first

    @property
    def local_ids(self) -> Tensor:
        """The ids in local numbering: owned nodes, then ghosts. Shape of the local part."""
        if self.is_written:
            raise UnsupportedShardOp(
                f"an edge index was written to after its routes were made ({self.spec}); make a new one instead"
            )
        return self._ids

    @property
    def is_written(self) -> bool:
        """Whether the ids were written to, so that the routes are no longer valid."""
        return version_of(self.local) != self._ids_version

    def as_written(self) -> ShardTensor:
        """Return the index itself; if its ids were written to, a ShardTensor of numbers without routes."""
        return ShardTensor(self.local, self.spec, copied=self.copied) if self.is_written else self

    @property
    def _rows(self) -> tuple[tuple[GhostExchange, bool], ...]:
        """Exchange of each row's node set, or of all ids, and whether every id is owned by the rank that holds it."""
        return tuple(zip(self.exchanges, self._owned, strict=True))

    @property
    def all_owned(self) -> bool:
        """Whether every id is owned by the rank that holds it, on every rank."""
        return all(self._owned)

    @classmethod
    def __torch_function__(
        cls, func: TorchFunction, types: Types, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if _any_written(args):
            args, kwargs = tree_map_only(RoutedIndex, RoutedIndex.as_written, (args, kwargs or {}))
        x = args[0] if args else None
        if func is Tensor.__getitem__ and type(args[1]) is int and isinstance(x, RoutedIndex) and x.spec.dims == (1,):
            # sources or targets, which each layer takes several times
            kept: dict[object, object] = x.__dict__.setdefault("_kept_rows", {})
            if args[1] not in kept:
                kept[args[1]] = cls._answer(func, types, args, kwargs)
            return kept[args[1]]
        return cls._answer(func, types, args, kwargs)

    @classmethod
    def _answer(
        cls, func: TorchFunction, types: Types, args: tuple[object, ...], kwargs: dict[str, object] | None
    ) -> object:
        x = args[0] if args else None
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.stack and isinstance(x, list | tuple) and all(isinstance(r, RoutedIndex) for r in x):
            rows = [ShardTensor(r.local_ids, r.spec) for r in x]
            twin = super().__torch_function__(func, types, (rows, *args[1:]), kwargs)
            known = result.spec.dims == (1,) and all(len(r._rows) == 1 for r in x)
            return _rewrap(result, twin, [row for r in x for row in r._rows], known)
        if func is Tensor.record_stream and isinstance(x, RoutedIndex):
            record: TorchFunction = x._ids.record_stream
            record(*args[1:])
        if not isinstance(x, RoutedIndex) or (func not in _REARRANGES and func not in _KEEPS_ROWS):
            return result
        if result is x or isinstance(result, RoutedIndex) or not _rows_stay(func, x, args, kwargs or {}, result):
            return result
        twin = super().__torch_function__(func, types, (ShardTensor(x.local_ids, x.spec), *args[1:]), kwargs)
        if isinstance(result, tuple):
            if len(x._rows) == len(result) and x.spec.dims == (1,) and result[0].ndim == 1:  # unbind
                return tuple(_rewrap(r, t, (row,)) for r, t, row in zip(result, twin, x._rows, strict=True))
            return tuple(_rewrap(r, t, x._rows, False) for r, t in zip(result, twin, strict=True))
        left = _rows_after(func, x, args, kwargs or {}, result)
        return _rewrap(result, twin, x._rows if left is None else left, left is not None)

    def __deepcopy__(self, memo: dict[int, object]) -> RoutedIndex:
        result = RoutedIndex(
            self.local.clone(), self.spec, exchanges=self.exchanges, ids=self.local_ids.clone(), owned=self._owned
        )
        memo[id(self)] = result
        return result


def _any_written(values: Iterable[object]) -> bool:
    return any(
        x.is_written if isinstance(x, RoutedIndex) else (type(x) is tuple or type(x) is list) and _any_written(x)
        for x in values
    )


def _rows_stay(
    func: TorchFunction, x: RoutedIndex, args: tuple[object, ...], kwargs: dict[str, object], result: object
) -> bool:
    """Whether ids stay on their ranks: ranks number their ghosts differently."""
    if func in _KEEPS_ROWS:
        return True
    parts = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, ShardTensor)]
    if any(part.spec.is_replicated for part in parts):
        return False
    (dim,), spec = x.spec.sharded, x.spec
    if func is Tensor.__getitem__:
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(_keeps_rows(item, i, dim, spec) for i, item in enumerate(items))
    if func in _FLIPS:
        dims = [*args[1:], *kwargs.values()]
        dims = [*dims[0]] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
        return dim not in [d % spec.ndim for d in dims if isinstance(d, int)]
    if func in _RESHAPES:
        slower = [math.prod(part.spec.global_shape[: next(iter(part.spec.sharded))]) for part in parts]
        same = all(part.spec.sizes == spec.sizes for part in parts)
        return same and slower == [math.prod(spec.global_shape[:dim])] * len(parts)
    return True


def _keeps_rows(item: object, place: int, dim: int, spec: ShardSpec) -> bool:
    """Whether an item of an index takes each rank's own: a mask that lies beside, rows of a dim before the sharded."""
    if item is None or item is Ellipsis or isinstance(item, int | slice):
        return True
    theirs = item.spec if isinstance(item, ShardTensor) and not item.spec.is_replicated else None
    if isinstance(item, Tensor) and item.dtype == torch.bool and item.ndim == 1 and place == dim:
        return theirs is None or theirs.sizes == spec.sizes
    return theirs is None and place < dim and (not isinstance(item, Tensor) or item.dtype != torch.bool)


def _rewrap(result: object, twin: object, rows: Sequence[tuple[GhostExchange, bool]], known: bool = True) -> object:
    """Give a result the routes of its rows; if rows are not ``known`` one by one, the routes that all rows share.

    Ids of two sets without rows have no routes: they are sharded numbers, whose values are right.
    """
    if not isinstance(result, ShardTensor) or not isinstance(twin, ShardTensor) or result.dtype != torch.int64:
        return result
    exchanges, owned = zip(*rows, strict=True)
    if not known:
        if any(exchange is not exchanges[0] for exchange in exchanges):
            return result
        exchanges, owned = exchanges[:1], (all(owned),)
    return RoutedIndex(result.local, result.spec, exchanges=exchanges, ids=twin.local, owned=owned)


def _rows_after(
    func: TorchFunction, x: RoutedIndex, args: tuple[object, ...], kwargs: dict[str, object], result: object
) -> Sequence[tuple[GhostExchange, bool]] | None:
    """Return the rows of a result, None if unknown."""
    rows = x._rows
    if len(rows) == 1 or func in _KEEPS_ROWS:
        return rows
    if x.spec.dims != (1,):
        return None
    index = args[1] if len(args) > 1 else None
    if func is Tensor.__getitem__:
        first = index[0] if isinstance(index, tuple) and index else index
        if isinstance(first, int) and not isinstance(first, bool):
            return rows[first : first + 1 or None]
        if isinstance(first, slice):
            return rows[first] or None
        if isinstance(first, list) and first and all(type(row) is int for row in first):
            by_row = isinstance(result, ShardTensor) and result.spec.dims == (1,)
            return [rows[row] for row in first] if by_row else None
        return rows if first is Ellipsis and (not isinstance(index, tuple) or len(index) == 1 + (x.ndim > 1)) else None
    if func in (Tensor.select, torch.select) and len(args) == 3 and isinstance(args[2], int):
        # of the rows: one edge would be on all ranks
        return rows[args[2] : args[2] + 1 or None]
    if func in _FLIPS:  # of the rows, or of nothing: where edges change places there are no routes
        turned = [*args[1:], *kwargs.values()] not in ([()], [[]])
        return tuple(reversed(rows)) if turned else rows
    return rows if isinstance(result, ShardTensor) and result.shape == x.shape else None


# -- making them ---------------------------------------------------------------------------------------------------


def node_spec(like: ShardSpec, exchange: GhostExchange, shape: Sequence[int], dim: int) -> ShardSpec:
    """Return the layout of a tensor whose dim ``dim`` numbers the nodes of a graph."""
    return ShardSpec.on(like.device_mesh, (Shard(dim),), tuple(shape), (exchange.node_sizes,))


@dataclass(frozen=True, kw_only=True)
class BetweenSets:
    """Ghost exchanges of the source and target node sets of a relation, ``spec.exchange`` of its tensors.

    Equal if both exchanges are the same objects.
    """

    source: GhostExchange
    target: GhostExchange


def route_edges(edge_index: Tensor, index_map: IndexMap, device_mesh: DeviceMesh) -> RoutedIndex:
    """Make an ``edge_index`` of edges among the nodes of one set. Collective; see :func:`route_relations`."""
    edges, _ = route_relations({_ONE_SET: edge_index}, {_ONE_SET[0]: index_map}, device_mesh)
    return edges[_ONE_SET]


def route_relations(
    relations: Mapping[Relation, Tensor],
    index_maps: Mapping[str, IndexMap],
    device_mesh: DeviceMesh,
    fields: Sequence[tuple[str, bool]] = (),
) -> tuple[dict[Relation, RoutedIndex], dict[str, GhostExchange]]:
    """Make an ``edge_index`` ``(2, num_edges)`` of each relation, and an exchange of ghosts of each set. Collective.

    ``relations``: ``(2, num_local_edges)`` integers in local numbering by relation: sources among the owned nodes and
    ghosts of their set, targets owned nodes of theirs. The same relations on all ranks.
    ``index_maps``: the index map of each set. One map has the ghosts of all relations that start at its set, so that a
    tensor is exchanged once for all.
    ``device_mesh``: one axis, the domain.
    ``fields``: fields that go with the edges, the same on all ranks, and whether this rank's part of each fits.
    Raises ShardLayoutError: on every rank: ids out of range on one, targets that are not owned, fields that do not fit.
    """
    axis, ordered = graph_axis(device_mesh), sorted(relations)
    exchanges = {name: ghost_exchange(rows, axis.group) for name, rows in sorted(index_maps.items())}
    faults = [(" ".join(r), edge_fault(relations[r], index_maps[r[0]], index_maps[r[2]])) for r in ordered]
    faults += [(name, 0 if fits else _UNFIT) for name, fits in fields]
    place, fault = next(((i, code) for i, (_, code) in enumerate(faults) if code), (0, 0))
    named = zlib.crc32(repr([name for name, _ in faults]).encode())
    counts = [relations[each].shape[-1] if relations[each].ndim else 0 for each in ordered]
    row = torch.tensor([named, place, fault, *counts], device=device_of(axis.group))
    table = gather_rows(row, axis.group).cpu().numpy()
    if (table[:, 0] != table[0, 0]).any():
        raise ShardLayoutError("the ranks give different relations or fields; give all of them on each rank")
    for rank in np.flatnonzero(table[:, 2])[:1].tolist():
        at, code = table[rank, 1:3].tolist()
        if code == _UNFIT:
            raise ShardLayoutError(f"rank {rank}: {faults[at][0]}: {_FAULTS[code]}")
        raise ShardLayoutError(
            f"rank {rank}: {_FAULTS[code]} ({faults[at][0]}); pass sample.edge_index, which is numbered so"
        )
    edges = {}
    for number, relation in enumerate(ordered, 3):
        sizes, pair = tuple(table[:, number].tolist()), (exchanges[relation[0]], exchanges[relation[2]])
        spec = ShardSpec(
            device_mesh=device_mesh,
            placements=(Shard(1),),
            global_shape=(2, sum(sizes)),
            sizes=(sizes,),
            axes=(axis,),
            exchange=pair[0] if pair[0] is pair[1] else BetweenSets(source=pair[0], target=pair[1]),
            edge_parts=(sizes,),
        )
        ids = relations[relation].to(torch.int64)
        known = torch.stack([each.on(ids.device)[1][row] for each, row in zip(pair, ids, strict=True)])
        edges[relation] = RoutedIndex(known, spec, exchanges=pair, ids=ids, owned=(False, True))
    return {relation: edges[relation] for relation in relations}, exchanges


_UNFIT = 4
#: Faults of a rank's edges and fields by number, so that the others can be told.
_FAULTS = {
    1: "edge_index must be an integer tensor of shape (2, num_local_edges)",
    2: "edge_index holds sources that are neither owned nor ghosts",
    3: "edge_index holds targets that are not owned",
    _UNFIT: "its rows are not the owned rows and, where given, ghosts of its index map, or the edges of edge_index",
}


def edge_fault(edge_index: Tensor, source_map: IndexMap, target_map: IndexMap) -> int:
    """Return the fault of this rank's edges, a key of ``_FAULTS``; 0 for none."""
    integers = not (edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool)
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or not integers:
        return 1
    if edge_index.numel() == 0:
        return 0
    (low, first), (high, last) = edge_index.amin(1).tolist(), edge_index.amax(1).tolist()
    if low < 0 or high >= source_map.num_local:
        return 2
    return 3 if first < 0 or last >= target_map.num_owned else 0


def edge_tensor(local: Tensor, edge_index: RoutedIndex) -> ShardTensor:
    """Wrap a tensor of this rank's edges, ``(num_local_edges, ...)``, in the order of ``edge_index``."""
    spec = edge_index.spec
    return ShardTensor(local, spec.derive((spec.global_shape[1], *local.shape[1:]), (0,), spec.sizes))


# -- along them --------------------------------------------------------------------------------------------------------


def check_nodes(func: TorchFunction, x: ShardTensor, dim: int, index: RoutedIndex) -> None:
    """Raise if a dim is not split like the nodes of the index's graph."""
    axis = x.spec.axis_of_dim(dim)
    if len(x.spec.sharded) != 1 or axis is None or x.spec.sizes_of(axis) != index.exchange.node_sizes:
        raise unsupported(
            func,
            f"dim {dim} is not split as the nodes of the graph are, {index.exchange.node_sizes}",
            x.spec,
            index.spec,
            remedy="redistribute() it to the bounds of the index map first",
        )


@checked_keywords
def start_exchange(x: Tensor, edge_index: Tensor) -> None:
    """Start to fetch the rows of ``x`` that gathers along ``edge_index`` will need; they wait for it. Collective.

    Work between this call and the first gather from ``x`` overlaps with the exchange, and so does its backward.
    Nothing happens where there is nothing to exchange: for plain tensors, or where the rows are here already. So a
    model may call it and still run in one process. Second derivatives are not available; leave the call out for them.

    Parameters
    ----------
    x : Tensor
        ``(num_nodes, ...)``.
    edge_index : Tensor
        ``edge_index`` of ``sample.to_pyg()``, or a row of it. Between two node sets, ``x`` is of the source set.

    Raises
    ------
    UnsupportedShardOp
        ``x`` is not split as the nodes of the graph are.

    Examples
    --------
    >>> import h5py
    >>> import numpy as np
    >>> ids = np.arange(6)
    >>> with h5py.File("ring.h5", "w") as file:  # six nodes in a ring, edges both ways
    ...     file["pos"] = np.stack([np.cos(ids * np.pi / 3), np.sin(ids * np.pi / 3)], axis=1)
    ...     file["edge_index"] = np.stack([np.r_[ids, (ids + 1) % 6], np.r_[(ids + 1) % 6, ids]])
    ...     file["speed"] = ids.astype("f4")
    >>> _ = scidata.partition("ring.h5", "ring.store", order="rows")

    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> data = scidata.open_dataset("ring.store", mesh)[0].to_pyg(x="speed")
    >>> scidata.start_exchange(data.x, data.edge_index)
    >>> own = data.x * 2  # meanwhile
    >>> gathered = data.x[data.edge_index[0]]  # waits for it
    >>> gathered.sum()  # each node has two edges
    tensor(30.)
    """
    if not isinstance(x, ShardTensor) or x.spec.is_replicated or not isinstance(edge_index, RoutedIndex):
        return
    sources = edge_index[0] if edge_index.ndim > 1 else edge_index
    assert isinstance(sources, RoutedIndex)
    check_nodes(start_exchange, x, 0, sources)
    exchange = sources.exchange
    held = x.__dict__.get("_with_ghosts")
    is_here = held is not None and held[0] == ghosts_key(x, 0, exchange)
    if exchange.num_ghosts and not sources.all_owned and not is_here:
        keep_ghosts(x, PendingHalo(x.local, exchange), exchange)
