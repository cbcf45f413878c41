"""Ghosts of irregular data: rows of other ranks, fetched by one exchange in each direction, differentiably.

An ``IndexMap`` says which global ids are ghosts here; the rows that each rank has to send are found once for each map,
by one exchange of ids, and kept. Local rows are the owned ones, then the ghosts in the map's order, which is the order
of their owners.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from scidata.core.cache import Cache
from scidata.core.index_map import IndexMap
from scidata.core.keywords import checked_keywords
from scidata.errors import ShardLayoutError, UnsupportedShardOp
from scidata.shard.axes import MeshAxis, mesh_axes
from scidata.shard.comm.collectives import Route, nonzero_counts, return_rows, send_rows, swap_counts
from scidata.shard.comm.functions import known
from scidata.shard.comm.operators import is_capturing
from scidata.shard.comm.transport import (
    Group,
    Transfer,
    device_of,
    exchange_rows,
    gather_rows,
    group_rank,
    group_size,
    start_rows,
)
from scidata.shard.spec import ShardSpec
from scidata.shard.tensor import ShardTensor
from scidata.shard.torch_internals import version_of


@dataclass(frozen=True, kw_only=True, eq=False)
class GhostExchange:
    """Rows that move between ranks to fill the ghosts of one index map."""

    index_map: IndexMap  # this rank's owned range and ghosts
    group: Group
    route: Route  # the owned rows that are ghosts of other ranks, on the CPU, and the ghosts that each sends here
    num_ghosts: int  # ghosts of all ranks together: where it is 0 nothing is ever exchanged
    nbytes: int  # memory of the largest rank, roughly; the same on all ranks
    _on_device: dict[torch.device, tuple[Route, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Rows that each rank owns."""
        return self.index_map.sizes

    def on(self, device: torch.device) -> tuple[Route, Tensor]:
        """Return the route, and the global id of each local row, on a device; kept there."""
        if device not in self._on_device:
            start, stop = self.index_map.owned
            ghosts = torch.from_numpy(np.asarray(self.index_map.ghosts, dtype=np.int64))
            to_global = torch.cat([torch.arange(start, stop), ghosts]).to(device)
            self._on_device[device] = self.route._replace(rows=self.route.rows.to(device)), to_global
        return self._on_device[device]

    def ghosts_of(self, x: Tensor) -> Tensor:
        """Fetch the ghosts' rows, ``(num_ghost, ...)``, from their owners. Collective; backward adds them up there."""
        if self.num_ghosts == 0:
            return x.narrow(0, 0, 0)
        return send_rows(x, self.on(x.device)[0], self.group)

    def add_ghosts(self, owned: Tensor, ghosts: Tensor) -> Tensor:
        """Add ghost rows to their owners' rows: the transpose of :meth:`ghosts_of`. Collective."""
        if self.num_ghosts == 0:
            return owned
        return owned + return_rows(ghosts, len(owned), self.on(owned.device)[0], self.group)


#: Exchanges of maps without a key, by group.
_OF_MAPS: WeakKeyDictionary[IndexMap, dict[int, GhostExchange]] = WeakKeyDictionary()

#: Exchanges of maps with a key, by key and group. All ranks must let go of the same ones, or one would wait for the
#: others: so the oldest goes first, however often it was used, and sizes are those of the largest rank.
KEPT: Cache[GhostExchange] = Cache(256 << 20)


def ghost_exchange(index_map: IndexMap, group: Group) -> GhostExchange:
    """Return the exchange of an index map: made at its first use, then kept as long as the map lives.

    Maps with a key share the exchange of their key, which is kept until 256 MiB of newer ones have been made.
    Collective if it is made. All ranks must use their maps in the same order.
    """
    number = id(group)  # the exchange holds the group, so that no other gets its id
    if index_map.key is not None:
        make, size = (lambda: _make_exchange(index_map, group)), (lambda made: min(made.nbytes, KEPT.max_size))
        return KEPT.get_or_make((index_map.key, number), make, size)
    of_map = _OF_MAPS.setdefault(index_map, {})
    if number not in of_map:
        of_map[number] = _make_exchange(index_map, group)
    return of_map[number]


def _make_exchange(index_map: IndexMap, group: Group) -> GhostExchange:
    if is_capturing():
        raise UnsupportedShardOp("routes are made, and kept for other steps, while a step is captured")
    num_ranks, rank = group_size(group), group_rank(group)
    bounds = np.ascontiguousarray(index_map.bounds, dtype=np.int64)
    counts = np.asarray(index_map.recv_counts, dtype=np.int64)
    device, fits = device_of(group), len(counts) == num_ranks
    wanted, pairs = swap_counts(torch.from_numpy(counts if fits else np.zeros(num_ranks, np.int64)).to(device), group)
    wanted = wanted.cpu()
    header = [len(bounds) - 1, index_map.part, zlib.crc32(bounds.tobytes()), int(counts.sum()), int(wanted.sum())]
    table = gather_rows(torch.tensor(header, device=device), group).cpu().numpy()
    parts, place, checksums, received, sent = table.T
    if (parts != num_ranks).any() or (place != np.arange(num_ranks)).any():
        raise ShardLayoutError(
            f"the ranks of a group of {num_ranks} hold parts {place.tolist()} of index maps of {parts.tolist()} parts; "
            f"rank r must hold part r of a map of {num_ranks} parts"
        )
    if (checksums != checksums[0]).any() or counts[rank]:
        raise ShardLayoutError("the ranks' index maps have different bounds; make them from one set of bounds")
    # indices of sent rows and ids of local rows, on the CPU and a device; the map itself
    rows_held = int((2 * np.diff(bounds) + 2 * sent + 4 * received).max()) + 2 * len(bounds)
    ghosts = torch.from_numpy(np.asarray(index_map.ghosts, dtype=np.int64)).to(device)
    held, asked = nonzero_counts(counts), nonzero_counts(wanted)
    ids = exchange_rows(ghosts, held, asked, group, pairs).cpu()
    return GhostExchange(
        index_map=replace(index_map),  # a copy: the map may go before the exchange, and the exchange goes with it
        group=group,
        route=Route(ids - index_map.owned[0], asked, held, pairs),
        num_ghosts=int(received.sum()),
        nbytes=8 * rows_held,
    )


@checked_keywords
def halo_exchange(x: Tensor, index_map: IndexMap, group: Group) -> Tensor:
    """Return this rank's owned rows followed by its ghosts, ``(num_local, ...)``. Collective.

    One all-to-all forward; one backward, that adds the ghosts' gradients up where the rows are owned. The
    first use of an index map costs one more exchange, of ids.

    Parameters
    ----------
    index_map : IndexMap
        The map of the rows: ``sample.index_map("node")``.
    x : Tensor
        The owned part, ``(num_owned, ...)``, or a ShardTensor sharded along dim 0.
    group : ProcessGroup
        The domain group; None or a group of one communicates nothing.

    Raises
    ------
    ShardLayoutError
        Rows that do not fit the map, or maps that do not fit each other (on every rank).

    Examples
    --------
    On each of two ranks:

    >>> mesh = scidata.init_mesh(domain=2)
    >>> group = mesh["domain"].get_group()
    >>> import numpy as np
    >>> rank = mesh.get_rank()
    >>> rows = scidata.IndexMap(bounds=np.array([0, 3, 5]), part=rank, ghosts=np.array([[3], [2]][rank]))
    >>> owned = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0]][rank])
    >>> scidata.halo_exchange(owned, rows, group).tolist() == [[0, 1, 2, 3], [3, 4, 2]][rank]
    True
    """
    if not isinstance(x, Tensor) or not isinstance(index_map, IndexMap):
        raise ShardLayoutError(
            f"expected a tensor and an IndexMap, not {type(x).__name__} and {type(index_map).__name__}; "
            "sample.index_map('node') has one"
        )
    local = x.to_local() if isinstance(x, ShardTensor) else x
    if local.ndim == 0 or len(local) != index_map.num_owned:
        raise ShardLayoutError(
            f"part {index_map.part} owns {index_map.num_owned} rows, but the tensor's part has shape "
            f"{tuple(local.shape)}; shard it along dim 0 by the index map's bounds"
        )
    return torch.cat([local, ghost_exchange(index_map, group).ghosts_of(local)])


# -- the same in two steps, so that work on owned rows can run meanwhile ------------------------------------------


class _Flight:
    """Rows under way, forward and backward. Holds no tensor of the graph, which would make a cycle."""

    def __init__(self, plan: GhostExchange) -> None:
        self.plan = plan
        self.transfer: Transfer | None = None
        self.received: Tensor | None = None

    def send(self, rows: Tensor, *, back: bool) -> Tensor:
        """Start an exchange and return the tensor that it fills."""
        _, sent, held, pairs = self.plan.route
        ways = (held, sent) if back else (sent, held)
        self.transfer, self.received = start_rows(rows, *ways, self.plan.group, pairs)
        return self.received

    def land(self) -> Tensor | None:
        """Wait, and return the received rows; None if nothing is under way."""
        if self.transfer is None:
            return None
        self.transfer.wait()
        received, self.transfer, self.received = self.received, None, None
        return received


class PendingHalo:
    """An exchange under way; :meth:`wait` returns the result of :func:`halo_exchange`.

    Forward sends rows here, and :meth:`wait` receives them; backward the other way round.
    """

    def __init__(self, local: Tensor, plan: GhostExchange) -> None:
        flight, num_owned = _Flight(plan), len(local)

        def send(x: Tensor) -> Tensor:
            return flight.send(x.index_select(0, plan.on(x.device)[0].rows), back=False)

        def receive_back(grad: Tensor) -> Tensor:  # in place of a gradient that is all zeros
            rows = flight.land()
            assert rows is not None
            sums = rows.new_zeros((num_owned, *rows.shape[1:]))
            return sums.index_add_(0, plan.on(rows.device)[0].rows, rows)

        self._local, self._flight = local, flight
        self._ghosts = known(local, send, receive_back) if plan.num_ghosts else None

    def wait(self) -> Tensor:
        """Return owned rows and ghosts, ``(num_local, ...)``, once the ghosts are there."""
        ghosts, flight = self._ghosts, self._flight
        if ghosts is None:
            return self._local

        def receive(x: Tensor) -> Tensor:
            flight.land()
            return x.view_as(x)

        def send_back(grad: Tensor) -> Tensor:
            flight.send(grad.contiguous(), back=True)
            return grad.new_zeros(()).expand(grad.shape)

        return torch.cat([self._local, known(ghosts, receive, send_back)])


# -- tensors of nodes ----------------------------------------------------------------------------------------------


def graph_axis(device_mesh: DeviceMesh) -> MeshAxis:
    """Return the only axis of a graph's mesh; raises ShardLayoutError if there are more."""
    axes = mesh_axes(device_mesh)
    if len(axes) != 1:
        raise ShardLayoutError(
            f"a graph is sharded over one mesh axis, not over {[axis.name for axis in axes]}; pass e.g. mesh['domain']"
        )
    return axes[0]


def node_tensor(owned: Tensor, index_map: IndexMap, device_mesh: DeviceMesh) -> ShardTensor:
    """Wrap the owned rows, ``(num_owned, ...)``, of a tensor sharded along dim 0 by the index map. No communication."""
    graph_axis(device_mesh)
    global_shape = (index_map.num_global, *owned.shape[1:])
    return ShardTensor(owned, ShardSpec.on(device_mesh, (Shard(0),), global_shape, (index_map.sizes,)))


def keep_ghosts(x: ShardTensor, held: Tensor | PendingHalo, exchange: GhostExchange, dim: int = 0) -> None:
    """Let gathers from ``x`` use ghosts that are present or under way: ``held`` has owned rows, then ghosts.

    On all ranks or on none. Once ``x`` is written to, or requires grad, ghosts are exchanged.
    """
    x.__dict__["_with_ghosts"] = ghosts_key(x, dim, exchange), held, exchange, x.local  # so that their ids stay theirs


def held_ghosts(x: ShardTensor) -> tuple[Tensor, int, GhostExchange] | None:
    """Return the owned rows and ghosts kept with ``x``, their dim and exchange, while they are valid."""
    found = x.__dict__.get("_with_ghosts")
    if found is None or found[0] != ghosts_key(x, found[0][1], found[2]):
        return None
    dim: int = found[0][1]
    return with_ghosts(x, dim, found[2]), dim, found[2]


def ghosts_key(x: ShardTensor, dim: int, exchange: GhostExchange) -> tuple[int, ...]:
    """Return a key that stays equal while fetched ghosts are valid."""
    local = x.local
    return id(exchange), dim, id(local), version_of(local), int(torch.is_grad_enabled() and local.requires_grad)


def with_ghosts(x: ShardTensor, dim: int, exchange: GhostExchange) -> Tensor:
    """Return owned rows and ghosts along ``dim``. Collective.

    Kept with ``x`` until it is written to, so that layers that gather one tensor twice exchange it once.
    """
    local = x.local
    if exchange.num_ghosts == 0:
        return local
    key = ghosts_key(x, dim, exchange)
    held = x.__dict__.get("_with_ghosts")
    padded: Tensor
    if held is None or held[0] != key:
        rows = local.movedim(dim, 0)
        padded = torch.cat([rows, exchange.ghosts_of(rows)]).movedim(0, dim)
    elif isinstance(held[1], PendingHalo):
        padded = held[1].wait()
    else:
        return held[1]
    keep_ghosts(x, padded, exchange, dim)
    return padded
