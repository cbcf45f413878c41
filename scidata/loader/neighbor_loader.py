"""``NeighborLoader`` and ``ClusterLoader``: subgraphs of a partitioned store, of each rank's own rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scidata.core.checks import check_int
from scidata.core.index_map import IndexMap
from scidata.core.keywords import checked_keywords
from scidata.core.types import Array, IntArray
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.irregular_sample import IrregularSample
from scidata.data.local_fields import apply_locally
from scidata.data.measured import from_all
from scidata.data.to_pyg import Columns
from scidata.data.topology import Place, Relation, Topology, as_tensor, edge_type
from scidata.device_mesh.mesh import axis_rank, axis_size
from scidata.errors import ConfigError, check_known
from scidata.meshes.order.cuts import equal_bounds
from scidata.meshes.order.ids import ranges
from scidata.store.reading.neighbourhoods import StoredGraph
from scidata.store.reading.reader import StoreReader

_VERSION = 1
_SUBGRAPHS = ("directional", "induced")


class NeighborLoader:
    """Subgraphs around seed nodes of one large graph, as torch_geometric's ``NeighborLoader`` samples them.

    Each rank of the dp and domain axes has its own seeds, of the rows that it owns, which it holds in memory; rows and
    edges beyond them are read from the store. Every seed comes once an epoch; all ranks take as many steps, so that one
    with fewer seeds has smaller batches, or empty ones: reduce sums over seeds, not means. Collective when it is made.

    A batch is a ``torch_geometric.data.Data`` of plain tensors: fields, ``edge_index`` in the numbers of its nodes, of
    which the first ``batch_size`` are the seeds, then those of each hop; ``n_id`` and ``e_id``, their rows in the
    source; ``num_sampled_nodes`` and ``num_sampled_edges``, for ``trim_to_layer``. A run goes on with
    :meth:`state_dict`; the next epoch follows by itself.

    Parameters
    ----------
    dataset : IrregularDataset
        A store of a graph or mesh with edges, of one node set.
    num_neighbors : Sequence[int]
        Edges that are drawn into each node, hop by hop, at most; -1: all.
    input_nodes : str, array_like or None, optional
        The seeds: nodes by their rows in the source, a mask over these, or a field that says which; default all.
    index : int, default 0
        The sample.
    batch_size : int, default 1
        Seeds of a batch, at most.
    shuffle : bool, default False
        Draw the order of seeds anew in each epoch.
    replace : bool, default False
        Draw edges with replacement.
    subgraph_type : str, default "directional"
        ``"directional"``: the drawn edges; ``"induced"``: all edges between the nodes.
    seed : int, default 0
        Orders and draws are a function of it, the epoch, the step and the number of ranks.
    num_workers : int, default 1
        Threads that sample ahead; 0: none.
    prefetch_factor : int, default 2
        Batches that each thread is ahead.
    x, y, edge_attr : str, Sequence[str] or None, optional
        Fields that are put side by side, as in :meth:`IrregularSample.to_pyg`.
    transform : Callable or None, optional
        Called with each ``Data``.

    Raises
    ------
    ConfigError
        A data set without stored edges, of several node sets, or of drawn rows; seeds that the graph does not have.
    UnknownNameError
        No such field or type of subgraph.

    Examples
    --------
    >>> import h5py
    >>> import numpy as np
    >>> ids = np.arange(6)
    >>> with h5py.File("ring.h5", "w") as file:  # six nodes in a ring, edges both ways
    ...     file["edge_index"] = np.stack([np.r_[ids, (ids + 1) % 6], np.r_[(ids + 1) % 6, ids]])
    ...     file["speed"] = ids.astype("f4")
    >>> _ = scidata.partition("ring.h5", "ring.store", order="rows")
    >>> loader = scidata.NeighborLoader(scidata.open_dataset("ring.store"), [2], input_nodes=[1, 4], x="speed")
    >>> for batch in loader:
    ...     print(batch.n_id.tolist(), batch.edge_index.tolist())
    [1, 0, 2] [[1, 2], [0, 0]]
    [4, 3, 5] [[1, 2], [0, 0]]
    """

    @checked_keywords
    def __init__(
        self,
        dataset: IrregularDataset[Any],
        num_neighbors: Sequence[int],
        input_nodes: str | npt.ArrayLike | None = None,
        *,
        index: int = 0,
        batch_size: int = 1,
        shuffle: bool = False,
        replace: bool = False,
        subgraph_type: str = "directional",
        seed: int = 0,
        num_workers: int = 1,
        prefetch_factor: int = 2,
        x: Columns | None = None,
        y: Columns | None = None,
        edge_attr: Columns | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        ds, name, reader = dataset, type(self).__name__, dataset.reader
        if not isinstance(reader, StoreReader) or "edge" not in reader.entities or reader.subsample is not None:
            raise ConfigError(
                f"{name}: {reader.path} is no store of one node set with edges, read whole; write one with scidata "
                "partition --edges, and open it without subsample="
            )
        if ds.transform is not None:
            raise ConfigError(f"{name}: the data set's transform is of whole samples; give the loader one of Data")
        check_known(f"{name}: no subgraph_type", [subgraph_type], _SUBGRAPHS)
        self.dataset, self.batch_size, self.shuffle = ds, check_int("batch_size", batch_size, least=1), bool(shuffle)
        self.seed, self.num_workers = check_int("seed", seed), check_int("num_workers", num_workers)
        self.prefetch_factor, self.transform = check_int("prefetch_factor", prefetch_factor, least=1), transform
        self._nums = [check_int("num_neighbors", num, least=-1) for num in num_neighbors]
        self._how = {"replace": bool(replace), "induced": subgraph_type == "induced"}
        self._columns: dict[str, Any] = {"x": x, "y": y, "edge_attr": edge_attr}
        self._index = range(len(ds))[index]
        self._graph = StoredGraph(reader, self._index, ds.read_local(self._index), self._finish)
        self._dp = axis_rank(ds.mesh, ds.dp_axis), axis_size(ds.mesh, ds.dp_axis)
        # units of rows that come together: seeds, or clusters
        self._starts, self._stops = self._units(input_nodes)
        counts = dict(from_all([((ds.rank, self._dp[0]), len(self._starts))], ds.mesh))
        self._check_found(input_nodes, sum(num for (_, dp), num in counts.items() if dp == 0))
        own = [len(range(dp, num, self._dp[1])) for (_, dp), num in counts.items()]
        self._num_steps = -(-max(own) // self.batch_size)
        units = [[*rank, num] for rank, num in sorted(counts.items())]
        self._run = {"seed": self.seed, "batch_size": self.batch_size, "units": units}
        self._epoch = self._step = 0
        self._counts = dict.fromkeys(("batches", "nodes", "nodes_beyond", "bytes_fetched"), 0)

    def _finish(self, fields: dict[str, Array]) -> None:
        self.dataset._normalise_locally(fields)
        apply_locally(self.dataset.local_transform, fields)

    def _units(self, input_nodes: str | npt.ArrayLike | None) -> tuple[IntArray, IntArray]:
        """Return the first row of each unit of this rank's rows, and the one after its last."""
        graph, rows = self._graph, np.arange(*self._graph.rows.owned)
        if isinstance(input_nodes, str):
            fields = graph.fields(graph.entity, rows, graph.access())
            check_known("NeighborLoader: input_nodes: no field of nodes", [input_nodes], fields)
            rows = rows[fields[input_nodes].astype(np.bool_)]
        elif input_nodes is not None:
            rows = rows[np.isin(graph.ids[graph.entity], _as_ids(input_nodes))]
        return rows, rows + 1

    def _check_found(self, input_nodes: str | npt.ArrayLike | None, found: int) -> None:
        if input_nodes is None or isinstance(input_nodes, str):
            return
        if (asked := len(np.unique(_as_ids(input_nodes)))) != found:
            raise ConfigError(
                f"NeighborLoader: of {asked} input_nodes, the graph has {found}; they are rows of its source"
            )

    def __len__(self) -> int:
        """Return how many batches an epoch has, the same on all ranks."""
        return self._num_steps

    def _seeds(self, epoch: int, step: int) -> IntArray:
        order = np.arange(len(self._starts))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch, self.dataset.rank]).permutation(len(order))
        order = order[self._dp[0] :: self._dp[1]]
        if -(-len(order) // self.batch_size) == self._num_steps:
            chosen = order[step * self.batch_size : (step + 1) * self.batch_size]
        else:  # fewer than others have: as many steps, of less each
            chosen = order[len(order) * step // self._num_steps : len(order) * (step + 1) // self._num_steps]
        return ranges(self._starts[chosen], self._stops[chosen])

    def _read(self, epoch: int, step: int) -> Any:
        seeds, graph, ds = self._seeds(epoch, step), self._graph, self.dataset
        random, access = np.random.default_rng([self.seed, epoch, ds.rank, self._dp[0], step]), graph.access()
        found = graph.draw(seeds, self._nums, random, access, **self._how)
        rows = {graph.entity: found.nodes, "edge": found.edges}
        read = {entity: graph.fields(entity, ids, access) for entity, ids in rows.items()}
        ids = {entity: torch.from_numpy(values.pop("original_id")) for entity, values in read.items()}
        maps = {e: IndexMap(bounds=np.array([0, len(n)]), part=0, ghosts=n[:0]) for e, n in rows.items()}
        edges = torch.from_numpy(found.edge_index)
        relation = Relation(edge_type("edge", graph.entity), edges, edges[:, :0])
        fields = {n: ds._cast(as_tensor(values)) for each in read.values() for n, values in each.items()}
        places = {name: Place(entity, 0) for entity, each in read.items() for name in each}
        sample = IrregularSample(
            fields,
            dims={name: (p.entity, *(d for i, d in enumerate(ds.dims(name)) if i != ds.place(name).dim))
                  for name, p in places.items()},
            index=self._index,
            places=places,
            topology=Topology(entity=graph.entity, index_maps=maps, relations={"edge": relation}, cells=None,
                              device_mesh=None, read_ids=lambda entity: ids[entity].numpy()),
            graph_values=ds.reader.graph_values(self._index),
        )  # fmt: skip
        data: Any = sample.to_pyg(**self._columns)
        data.n_id, data.e_id, data.batch_size = ids[graph.entity], ids["edge"], len(seeds)
        data.num_sampled_nodes, data.num_sampled_edges = found.num_nodes, found.num_edges
        start, stop = graph.rows.owned
        beyond = int(((found.nodes < start) | (found.nodes >= stop)).sum())
        return data, (1, len(found.nodes), beyond, access.stats.bytes_fetched)

    def __iter__(self) -> Iterator[Any]:
        """Go through the rest of a resumed epoch, or a whole one."""
        epoch, first = self._epoch, self._step
        pending: deque[Future[Any]] = deque()
        threads = ThreadPoolExecutor(max(1, self.num_workers), thread_name_prefix="scidata-neighbours")
        ahead = self.num_workers * self.prefetch_factor
        try:
            for step in range(first, self._num_steps):
                for later in range(step + len(pending), min(step + ahead + 1, self._num_steps)):
                    pending.append(threads.submit(self._read, epoch, later))
                data, counts = pending.popleft().result()
                self._counts = {name: old + n for (name, old), n in zip(self._counts.items(), counts, strict=True)}
                self._epoch, self._step = epoch, step + 1
                yield data if self.transform is None else self.transform(data)
        finally:
            threads.shutdown(cancel_futures=True)
        self._epoch, self._step = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin there; without it, epochs follow one another.

        Parameters
        ----------
        epoch : int
            From 0; the same on every rank.

        Examples
        --------
        >>> loader.set_epoch(3)
        """
        self._epoch, self._step = check_int("epoch", epoch), 0

    def stats(self) -> dict[str, int]:
        """Return what was handed out so far: batches, nodes, those of them that other ranks own, and bytes fetched.

        Examples
        --------
        >>> loader.stats()["nodes"]
        6
        """
        return dict(self._counts)

    def state_dict(self) -> dict[str, Any]:
        """Return where to go on: after the batch that came last.

        Examples
        --------
        >>> loader.load_state_dict(loader.state_dict())
        """
        return {"version": _VERSION, "epoch": self._epoch, "step": self._step, "run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there, on ranks of any number at the begin of an epoch, else on as many as before.

        Parameters
        ----------
        state : Mapping[str, Any]
            As :meth:`state_dict` had it.

        Raises
        ------
        ConfigError
            It is of another version, or in the middle of an epoch of other seeds, batches or ranks.

        Examples
        --------
        >>> loader.load_state_dict(loader.state_dict())
        """
        if state.get("version") != _VERSION or (state["step"] and state["run"] != self._run):
            raise ConfigError(
                f"{type(self).__name__}: a state of version {state.get('version')} in step {state.get('step')} of "
                f"{state.get('run')}, for {self._run}: go on with as many ranks, seeds and batches, or in a new epoch"
            )
        self._epoch, self._step = int(state["epoch"]), int(state["step"])


class ClusterLoader(NeighborLoader):
    """Subgraphs of whole clusters, as torch_geometric's ``ClusterData`` and ``ClusterLoader`` have them (Cluster-GCN).

    Clusters are stretches of a rank's rows, which lie together in the store's order: ``order="metis"`` cuts few edges.
    A batch has the nodes of ``batch_size`` clusters and all edges between them. The rest is as of
    :class:`NeighborLoader`.

    Parameters
    ----------
    dataset : IrregularDataset
        A store of a graph or mesh with edges, of one node set.
    num_parts : int
        Clusters of the whole graph; each domain rank has an equal share, rounded up.
    **options : Any
        ``index``, ``batch_size`` (clusters), ``shuffle``, ``seed``, ``num_workers``, ``prefetch_factor``, ``x``, ``y``,
        ``edge_attr`` and ``transform`` of :class:`NeighborLoader`.

    Examples
    --------
    >>> import h5py
    >>> import numpy as np
    >>> ids = np.arange(6)
    >>> with h5py.File("ring.h5", "w") as file:  # six nodes in a ring, edges both ways
    ...     file["edge_index"] = np.stack([np.r_[ids, (ids + 1) % 6], np.r_[(ids + 1) % 6, ids]])
    >>> _ = scidata.partition("ring.h5", "ring.store", order="rows")
    >>> loader = scidata.ClusterLoader(scidata.open_dataset("ring.store"), 2)
    >>> [(batch.n_id.tolist(), batch.num_edges) for batch in loader]
    [([0, 1, 2], 4), ([3, 4, 5], 4)]
    """

    def __init__(self, dataset: IrregularDataset[Any], num_parts: int, **options: Any) -> None:
        self._num_clusters = -(-check_int("num_parts", num_parts, least=1) // dataset.reader.num_parts)
        super().__init__(dataset, [], subgraph_type="induced", **options)

    def _units(self, input_nodes: str | npt.ArrayLike | None) -> tuple[IntArray, IntArray]:
        bounds = self._graph.rows.owned[0] + equal_bounds(self._graph.rows.num_owned, self._num_clusters)
        return bounds[:-1], bounds[1:]


def _as_ids(nodes: npt.ArrayLike) -> IntArray:
    given = np.asarray(nodes)
    return np.flatnonzero(given) if given.dtype.kind == "b" else given.astype(np.int64)
