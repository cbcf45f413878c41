"""``NeighborLoader`` and ``ClusterLoader``: subgraphs of a partitioned store around each rank's own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from scidata.core.checks import check_int
from scidata.core.keywords import checked_keywords
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.irregular_sample import IrregularSample
from scidata.data.to_pyg import Columns
from scidata.errors import ConfigError, check_known
from scidata.loader.batches import Batches
from scidata.loader.data_loader import DataLoader
from scidata.loader.sampler import DistributedSampler
from scidata.loader.subgraphs import Subgraphs
from scidata.store.reading.reader import StoreReader


class NeighborLoader(DataLoader[Any]):
    """Subgraphs around seed nodes of one large graph, as torch_geometric's ``NeighborLoader`` samples them.

    Each rank of the dp and domain axes has its own seeds, of the rows that it owns, which it holds in memory; rows and
    edges beyond them are read from the store. Every seed comes once an epoch; all ranks take as many steps, so that one
    with fewer seeds has smaller batches, or empty ones: reduce sums over seeds, not means. Collective when it is made.

    A batch is a ``torch_geometric.data.Data`` of plain tensors: fields, ``edge_index`` in the numbers of its nodes, of
    which the first ``batch_size`` are the seeds, then those of each hop; ``n_id`` and ``e_id``, their rows in the
    source; ``num_sampled_nodes`` and ``num_sampled_edges``, for ``trim_to_layer``. The rest is as of
    :class:`scidata.DataLoader`, but that the next epoch follows by itself, and that a saved state is one of as many
    ranks.

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
    x, y, edge_attr : str, Sequence[str] or None, optional
        Fields that are put side by side, as in :meth:`IrregularSample.to_pyg`.
    transform : Callable or None, optional
        Called with each ``Data``.
    num_workers : int, default 2
        Threads that read ahead, as of :class:`scidata.DataLoader`; so are the next four.
    prefetch_factor : int or None, optional
        Batches in flight in all, default 2.
    device : torch.device or str or int or None, optional
        Where batches are copied to.
    pin_memory : bool, default False
        Read into page-locked memory.
    timeout : float, default 0
        Seconds that a batch may take; 0 for as long as it takes.

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

    sampler: DistributedSampler
    _num_clusters: int | None = None  # of this rank, in place of seeds

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
        x: Columns | None = None,
        y: Columns | None = None,
        edge_attr: Columns | None = None,
        transform: Callable[[Any], Any] | None = None,
        num_workers: int = 2,
        prefetch_factor: int | None = None,
        device: torch.device | str | int | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
    ) -> None:
        name, reader = type(self).__name__, dataset.reader
        if not isinstance(reader, StoreReader) or "edge" not in reader.entities or reader.subsample is not None:
            raise ConfigError(
                f"{name}: {getattr(reader, 'path', dataset)} is no store of one node set with edges, read whole; "
                "write one with scidata partition --edges, and open it without subsample="
            )
        if dataset.transform is not None:
            raise ConfigError(f"{name}: the data set's transform is of whole samples; give the loader one of Data")
        check_known(f"{name}: no subgraph_type", [subgraph_type], ("directional", "induced"))
        seeds = input_nodes
        if seeds is not None and not isinstance(seeds, str):
            given = np.asarray(seeds)
            seeds = np.unique(np.flatnonzero(given) if given.dtype.kind == "b" else given)
        subgraphs: Any = Subgraphs(
            dataset, range(len(dataset))[index], [check_int("num_neighbors", n, least=-1) for n in num_neighbors],
            check_int("batch_size", batch_size, least=1), seeds=seeds, num_clusters=self._num_clusters,
            seed=check_int("seed", seed, least=0), shuffle=bool(shuffle), replace=bool(replace),
            induced=subgraph_type == "induced",
        )  # fmt: skip
        columns: dict[str, Any] = {"x": x, "y": y, "edge_attr": edge_attr}

        def to_data(sample: IrregularSample[Any]) -> Any:
            data = sample.to_pyg(**columns)
            return data if transform is None else transform(data)

        super().__init__(
            subgraphs, None, num_workers=num_workers, collate_fn=to_data, device=device,
            sampler=DistributedSampler(subgraphs, dataset.mesh, dp=None, shuffle=False, seed=seed, check=False),
            pin_memory=pin_memory, timeout=timeout, prefetch_factor=prefetch_factor,
        )  # fmt: skip

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; without this call, epochs follow one another.

        Parameters
        ----------
        epoch : int
            Its number, which the order of seeds and the draws depend on; the next iteration begins there.
        """
        self.sampler.ended = -1
        super().set_epoch(epoch)

    def __iter__(self) -> Batches[Any]:  # type: ignore[override]  # an iterator, but none of torch's
        """Begin the rest of a resumed epoch, or the next whole one."""
        if self.sampler.ended == self.sampler.epoch:
            self.set_epoch(self.sampler.epoch + 1)
        return super().__iter__()


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
        Those of :class:`NeighborLoader` but ``num_neighbors``, ``input_nodes``, ``replace`` and ``subgraph_type``.

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
