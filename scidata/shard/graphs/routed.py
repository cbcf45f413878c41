"""Tensors of a graph that is split over ranks: indices that know where their rows lie, and targets not yet laid out.

A ``RoutedIndex`` holds **global** node ids, so whatever is computed from its values is right; beside them it holds the
same ids in local numbering (owned nodes, then ghosts), so that gathers and scatters along it need no search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from scidata.core.index_map import IndexMap
from scidata.core.keywords import checked_keywords
from scidata.errors import ShardLayoutError, UnsupportedShardOp
from scidata.shard.comm.transport import gather
from scidata.shard.graphs.ghosts import GhostExchange, PendingHalo, _device_of, ghost_exchange, ghosts_key, graph_axis
from scidata.shard.op_table import HANDLERS, OF_THE_WHOLE, Handler, find, unsupported
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import tree_leaves, tree_map_only, version_of

# What only rearranges or copies: done to the ids in local numbering too.
_COPIES = find("clone detach contiguous to cuda cpu pin_memory", namespaces=(Tensor,))
_KEEPS_ROWS = {*_COPIES, torch.clone, torch.detach}
_MOVES = "view reshape expand expand_as unsqueeze squeeze flatten select unbind flip"
_FLIPS = {torch.flip, Tensor.flip}
_RESHAPES = {torch.reshape, torch.flatten, Tensor.view, Tensor.reshape, Tensor.flatten}
_REARRANGES = {*find(_MOVES, namespaces=(torch, Tensor)), Tensor.__getitem__}


class RoutedIndex(ShardTensor):
    """Node ids sharded by edges, with the way to each id's row.

    Attributes
    ----------
    exchange
        The ghosts of this rank and how they are filled.
    """

    __slots__ = ("_ids", "_ids_version", "_owned", "exchange")

    exchange: GhostExchange
    _ids: Tensor  # in local numbering, of the shape of the local part
    _owned: tuple[bool, ...]  # of each row of an edge_index, or of all: every id is owned by the rank that holds it
    _ids_version: int

    @staticmethod
    def __new__(
        cls, local: Tensor, spec: ShardSpec, *, exchange: GhostExchange, ids: Tensor, owned: Sequence[bool]
    ) -> RoutedIndex:
        """Wrap global ids and the same ids in local numbering; no checks."""
        self = ShardTensor.__new__(cls, local, spec)
        assert isinstance(self, RoutedIndex)
        self.exchange, self._ids, self._owned, self._ids_version = exchange, ids, tuple(owned), version_of(local)
        return self

    @property
    def local_ids(self) -> Tensor:
        """The ids in local numbering: owned nodes, then ghosts. Shape of the local part.

        Raises
        ------
        UnsupportedShardOp
            The ids were written to.
        """
        if self.is_written:
            raise UnsupportedShardOp(
                f"an edge index was written to after its routes were made ({self._spec}); make a new one instead"
            )
        return self._ids

    @property
    def is_written(self) -> bool:
        """Whether the ids were written to, so that there are no routes for what they are now."""
        return version_of(self._local) != self._ids_version

    def as_written(self) -> ShardTensor:
        """Return the index itself, or where its ids were written to what it is now: sharded numbers without routes."""
        return ShardTensor(self._local, self._spec, copied=self._copied) if self.is_written else self

    @property
    def all_owned(self) -> bool:
        """Whether every id is owned by the rank that holds it, on every rank."""
        return all(self._owned)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _any_written(args):
            args, kwargs = tree_map_only(RoutedIndex, RoutedIndex.as_written, (args, kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs)
        x = args[0] if args else None
        if func is torch.stack and isinstance(x, list | tuple) and all(isinstance(r, RoutedIndex) for r in x):
            rows = [ShardTensor(r.local_ids, r._spec) for r in x]
            twin = super().__torch_function__(func, types, (rows, *args[1:]), kwargs)
            return _rewrap(x[0], result, twin, [r.all_owned for r in x] if result._spec.dims == (1,) else (False,))
        if func is Tensor.record_stream and isinstance(x, RoutedIndex):
            x._ids.record_stream(*args[1:])
        if not isinstance(x, RoutedIndex) or (func not in _REARRANGES and func not in _KEEPS_ROWS):
            return result
        if result is x or isinstance(result, RoutedIndex) or not _rows_stay(func, x, args, kwargs or {}, result):
            return result
        twin = super().__torch_function__(func, types, (ShardTensor(x.local_ids, x._spec), *args[1:]), kwargs)
        if isinstance(result, tuple):
            owned = x._owned if len(x._owned) == len(result) else (x.all_owned,) * len(result)
            return tuple(_rewrap(x, r, t, (o,)) for r, t, o in zip(result, twin, owned, strict=True))
        return _rewrap(x, result, twin, _owned_after(func, x, args, result))

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutedIndex:
        result = RoutedIndex(
            self._local.clone(), self._spec, exchange=self.exchange, ids=self.local_ids.clone(), owned=self._owned
        )
        memo[id(self)] = result
        return result


def _any_written(values: Iterable[Any]) -> bool:
    return any(
        x.is_written if isinstance(x, RoutedIndex) else type(x) in (tuple, list) and _any_written(x) for x in values
    )


def _rows_stay(func: Any, x: RoutedIndex, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether ids stay with their ranks: another rank has other numbers for what it does not own."""
    if func in _KEEPS_ROWS:
        return True
    parts = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, ShardTensor)]
    if any(part._spec.is_replicated for part in parts):
        return False
    (dim,), spec = x._spec.sharded, x._spec
    if func is Tensor.__getitem__:
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(_keeps_rows(item, i, dim, spec) for i, item in enumerate(items))
    if func in _FLIPS:
        dims = [*args[1:], *kwargs.values()]
        dims = [*dims[0]] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
        return dim not in [d % spec.ndim for d in dims]
    if func in _RESHAPES:
        slower = [math.prod(part._spec.global_shape[: next(iter(part._spec.sharded))]) for part in parts]
        same = all(part._spec.sizes == spec.sizes for part in parts)
        return same and slower == [math.prod(spec.global_shape[:dim])] * len(parts)
    return True


def _keeps_rows(item: Any, place: int, dim: int, spec: ShardSpec) -> bool:
    """Whether an item of an index takes each rank's own: a mask that lies beside, rows of a dim before the sharded."""
    if item is None or item is Ellipsis or isinstance(item, int | slice):
        return True
    theirs = item._spec if isinstance(item, ShardTensor) and not item._spec.is_replicated else None
    if isinstance(item, Tensor) and item.dtype == torch.bool and item.ndim == 1 and place == dim:
        return theirs is None or theirs.sizes == spec.sizes
    return theirs is None and place < dim and (not isinstance(item, Tensor) or item.dtype != torch.bool)


def _rewrap(x: RoutedIndex, result: Any, twin: Any, owned: Sequence[bool]) -> Any:
    if not isinstance(result, ShardTensor) or result.dtype != torch.int64:
        return result
    return RoutedIndex(result._local, result._spec, exchange=x.exchange, ids=twin._local, owned=owned)


def _owned_after(func: Any, x: RoutedIndex, args: tuple[Any, ...], result: Any) -> tuple[bool, ...]:
    if len(x._owned) == 1 or func in _KEEPS_ROWS:
        return x._owned
    index = args[1] if len(args) > 1 else None
    if func is Tensor.__getitem__:
        first = index[0] if isinstance(index, tuple) else index
        if isinstance(first, int):
            return (x._owned[first],)
        if isinstance(first, slice) and first == slice(None):
            return x._owned
    if func in (Tensor.flip, torch.flip) and x._spec.dims == (1,):
        return tuple(reversed(x._owned))
    return (x.all_owned,)


# -- targets -------------------------------------------------------------------------------------------------------


class FilledTensor(ShardTensor):
    """A constant of global shape that takes no memory until it is used.

    What ``messages.new_zeros(shape)`` gives: whether it is to be sharded by nodes or whole on each rank shows only
    when something is scattered into it. In everything else it is a plain tensor.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler in OF_THE_WHOLE or (handler in _ACCEPT_FILLED and _meets_shards(args, kwargs)):
            return super().__torch_function__(func, types, args, kwargs)
        new_args, new_kwargs = tree_map_only(FilledTensor, FilledTensor.settled, (args, kwargs or {}))
        return func(*new_args, **new_kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> FilledTensor:
        """Set whether gradients are kept, in place."""
        self.settled()
        super().requires_grad_(requires_grad)
        return self

    def settled(self) -> Tensor:
        """Return the tensor that this one is by now: a ShardTensor of nodes, or a plain one in memory."""
        if not self._spec.is_replicated:
            return ShardTensor(self._local, self._spec)
        self._local = self._local.contiguous()
        return self._local

    def decide(self, local: Tensor, spec: ShardSpec) -> None:
        """Be sharded from now on.

        Raises
        ------
        UnsupportedShardOp
            It was made to require grad, which the sharded tensor would not carry on.
        """
        if self._local.requires_grad:
            raise UnsupportedShardOp("a leaf that requires grad cannot take messages of a sharded graph in place")
        self._local, self._spec = local, spec


def _meets_shards(args: Any, kwargs: Any) -> bool:
    return any(isinstance(x, ShardTensor) and not x._spec.is_replicated for x in tree_leaves((args, kwargs)))


#: Handlers that take a FilledTensor as it is, where it meets shards.
_ACCEPT_FILLED: set[Handler] = set()


def accepts_filled(handler: Handler) -> Handler:
    """Say of a handler that it takes a FilledTensor as it is: it may decide what that becomes."""
    _ACCEPT_FILLED.add(handler)
    return handler


class MovedTensor(Tensor):
    """What becomes of a plain tensor that messages were scattered into in place: it stands for the sharded result."""

    _result: Tensor

    @classmethod
    def become(cls, target: Tensor, result: Tensor) -> None:
        """Turn ``target`` into a stand-in for ``result``.

        Raises
        ------
        UnsupportedShardOp
            ``target`` is a parameter, a leaf that requires grad or a tensor of another class.
        """
        if type(target) is not Tensor or target.requires_grad:
            raise UnsupportedShardOp(
                "a parameter or a tensor that requires grad cannot take messages of a sharded graph in place; "
                "use the form without underscore"
            )
        target.__class__ = cls
        assert isinstance(target, MovedTensor)
        target._result = result

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        new_args, new_kwargs = tree_map_only(MovedTensor, lambda x: x.__dict__["_result"], (args, kwargs or {}))
        return func(*new_args, **new_kwargs)


# -- making them ---------------------------------------------------------------------------------------------------


def node_spec(like: ShardSpec, exchange: GhostExchange, shape: Sequence[int], dim: int) -> ShardSpec:
    """Return the layout of a tensor whose dim ``dim`` is the nodes of a graph."""
    return ShardSpec.on(like.device_mesh, (Shard(dim),), tuple(shape), (exchange.node_sizes,))


def route_edges(
    edge_index: Tensor, index_map: IndexMap, device_mesh: DeviceMesh, *, edge_sizes: Sequence[int] | None = None
) -> RoutedIndex:
    """Make an ``edge_index`` of global shape ``(2, num_edges)`` from this rank's edges. Collective.

    Parameters
    ----------
    edge_index
        ``(2, num_local_edges)`` int64 in local numbering: sources among owned nodes and ghosts, targets owned.
    device_mesh
        One axis, the domain.
    edge_sizes
        Edges of each rank, checked; found by the same exchange where not given.

    Raises
    ------
    ShardLayoutError
        On every rank: ids out of range on one, targets that are not owned, or sizes that are not so.
    """
    axis = graph_axis(device_mesh)
    exchange = ghost_exchange(index_map, axis.group)
    fault = _fault_of(edge_index, index_map)
    mine = torch.tensor([[edge_index.shape[-1], fault]], device=_device_of(axis.group))
    table = gather(mine, (1,) * axis.size, 0, axis.group).tolist() if axis.size > 1 else mine.tolist()
    for rank, (_, code) in enumerate(table):
        if code:
            raise ShardLayoutError(f"rank {rank}: {_FAULTS[code]}; pass sample.edge_index, which is numbered so")
    sizes = tuple(int(size) for size, _ in table)
    if edge_sizes is not None and tuple(edge_sizes) != sizes:
        raise ShardLayoutError(f"edge_sizes says {tuple(edge_sizes)}, but the ranks hold {sizes} edges")
    spec = ShardSpec(
        device_mesh=device_mesh,
        placements=(Shard(1),),
        global_shape=(2, sum(sizes)),
        sizes=(sizes,),
        axes=(axis,),
        exchange=exchange,
        edge_parts=(sizes,),
    )
    ids = edge_index.to(torch.int64)
    to_global = exchange.on(ids.device)[1]
    return RoutedIndex(to_global[ids], spec, exchange=exchange, ids=ids, owned=(False, True))


_FAULTS = {
    1: "edge_index must be an integer tensor of shape (2, num_local_edges)",
    2: "edge_index holds sources that are neither owned nor ghosts",
    3: "edge_index holds targets that are not owned",
}


def _fault_of(edge_index: Tensor, index_map: IndexMap) -> int:
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or edge_index.is_floating_point():
        return 1
    if edge_index.numel() == 0:
        return 0
    (low, first), (high, last) = edge_index.amin(1).tolist(), edge_index.amax(1).tolist()
    if low < 0 or high >= index_map.num_owned + index_map.num_ghost:
        return 2
    return 3 if first < 0 or last >= index_map.num_owned else 0


def edge_tensor(local: Tensor, edge_index: RoutedIndex) -> ShardTensor:
    """Wrap a tensor of this rank's edges, ``(num_local_edges, ...)``, in the order of ``edge_index``.

    Raises
    ------
    ShardLayoutError
        Another number of rows.
    """
    spec = edge_index._spec
    if local.ndim == 0 or len(local) != spec.local_shape[1]:
        raise ShardLayoutError(
            f"an edge field has shape {tuple(local.shape)}, but this rank holds {spec.local_shape[1]} edges"
        )
    shape = (spec.global_shape[1], *local.shape[1:])
    return ShardTensor(local, spec.derive(shape, (0,), spec.sizes))


# -- along them --------------------------------------------------------------------------------------------------------


def check_nodes(func: Any, x: ShardTensor, dim: int, index: RoutedIndex) -> None:
    """Raise where a dim is not split as the nodes of the index's graph are."""
    axis = x._spec.axis_of_dim(dim)
    if len(x._spec.sharded) != 1 or axis is None or x._spec.sizes_of(axis) != index.exchange.node_sizes:
        raise unsupported(
            func,
            f"dim {dim} is not split as the nodes of the graph are, {index.exchange.node_sizes}",
            x._spec,
            index._spec,
            remedy="redistribute() it to the bounds of the index map first",
        )


@checked_keywords
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
    if not isinstance(x, ShardTensor) or x._spec.is_replicated or not isinstance(edge_index, RoutedIndex):
        return
    check_nodes(start_exchange, x, 0, edge_index)
    exchange = edge_index.exchange
    key = ghosts_key(x, 0, exchange)
    held = x.__dict__.get("_with_ghosts")
    if exchange.num_ghosts == 0 or edge_index.all_owned or (held is not None and held[0] == key):
        return
    x.__dict__["_with_ghosts"] = key, PendingHalo(x._local, exchange), exchange, x._local
