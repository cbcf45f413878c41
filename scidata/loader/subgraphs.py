"""Subgraphs around rows of one large graph, hop by hop along the edges that end at them, as samples of a loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from scidata.core.index_map import IndexMap
from scidata.core.types import AnyArray, Array, Empty, IntArray
from scidata.data.irregular_dataset import IrregularDataset
from scidata.data.irregular_sample import IrregularSample
from scidata.data.measured import from_all
from scidata.device_mesh.board import record_error
from scidata.device_mesh.mesh import axis_rank, axis_size
from scidata.errors import ConfigError, check_known
from scidata.meshes.order.cuts import equal_bounds
from scidata.meshes.order.ids import contains, ranges
from scidata.store.reading.part import LocalPart, LocalTopology, SamplePart
from scidata.store.reading.reader import StoreReader
from scidata.store.reading.rows import RowAccess


class Subgraphs:
    """The subgraph of each step of an epoch around seeds of this rank. Construction is collective.

    This rank's part of the sample is read at once; what lies beyond it when it is needed.
    ``seeds``: rows of the source, sorted, each once, or a field that says which; None: all.
    ``num_clusters``: draw that many stretches of own rows, each as a whole, in place of seeds.
    ``replace``, ``induced``: draw edges with replacement; have all edges between the rows.
    """

    dp_axis = transform = None  # a step is one of all ranks

    def __init__(
        self, ds: IrregularDataset[Any], index: int, num_neighbors: Sequence[int], batch_size: int, *,
        seeds: str | AnyArray | None, num_clusters: int | None, seed: int, shuffle: bool, **how: bool,
    ) -> None:  # fmt: skip
        self.mesh, self.rank, self.epoch, self._ds = ds.mesh, ds.rank, 0, ds
        self._nums, self._size, self._seed, self._shuffle = list(num_neighbors), batch_size, seed, shuffle
        self._how, self._index, self._reader = how, index, cast(StoreReader, ds.reader)
        alone = StoreReader(self._reader.path, self._reader.options, store=self._reader.store)
        self._plain = IrregularDataset[torch.Tensor](alone, None, (), dp_axis=None, dtype=ds.dtype, transform=None)
        try:
            self._read_part(ds.read_local(index))
            self._starts, self._stops = self._units(seeds, num_clusters)
        except Exception as e:
            record_error(e)  # the others may wait for this rank's number of seeds
            raise
        self._dp = axis_rank(ds.mesh, ds.dp_axis), axis_size(ds.mesh, ds.dp_axis)
        counts = sorted(set(from_all([(ds.rank, len(self._starts))], ds.mesh)))
        self._num_steps = -(-max(-(-num // self._dp[1]) for _, num in counts) // batch_size)
        found, asked = sum(num for _, num in counts), "all" if seeds is None or isinstance(seeds, str) else len(seeds)
        if asked not in ("all", found) or not found:
            raise ConfigError(
                f"of {asked} input_nodes, the graph has {found}; they are rows of its source, or a mask over all rows"
            )
        recipe = [ds.fingerprint, index, self._nums, batch_size, seed, shuffle, how]
        self.fingerprint = f"{recipe} on {self._dp[1]} dp ranks of parts {counts}"

    def _read_part(self, part: LocalPart) -> None:
        self._part, self._entity, self._rows = part, part.part.entity, part.index_maps[part.part.entity]
        self._firsts = {name: part.part.owned(name, self._rows.part)[0] for name in (self._entity, "edge")}
        source, target = part.relations["edge"]
        ends = self._firsts["edge"] + np.cumsum(np.bincount(target, minlength=self._rows.num_owned))
        self._pointers = np.stack([np.append(self._firsts["edge"], ends[:-1])[: len(ends)], ends], axis=1)
        self._sources = self._rows.to_global(source)
        self._ids = {name: self._reader.original_id(self._index, self._rows.part, name) for name in self._firsts}

    def _units(self, seeds: str | AnyArray | None, num_clusters: int | None) -> tuple[IntArray, IntArray]:
        """Return the first row of each seed or cluster, and the one after its last."""
        rows = np.arange(*self._rows.owned)
        if num_clusters is not None:
            bounds = self._rows.owned[0] + equal_bounds(len(rows), num_clusters)
            return bounds[:-1], bounds[1:]
        if isinstance(seeds, str):
            fields = self._fields(self._entity, rows, self._access())
            check_known("input_nodes: no field of nodes", [seeds], fields)
            rows = rows[fields[seeds].astype(np.bool_)]
        elif seeds is not None:
            rows = rows[contains(seeds, self._ids[self._entity])]
        return rows, rows + 1

    # -- as a data set -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._num_steps

    def __repr__(self) -> str:
        return f"{self._num_steps} steps of subgraphs"

    def set_epoch(self, epoch: int) -> None:
        """Draw anew from the next iteration on."""
        self.epoch = epoch

    def epoch_reader(self, epoch: int | None = None, *, empty: Empty = np.empty) -> Callable[[int], LocalPart]:
        """Return :meth:`read_local` of an epoch, default the present one."""
        return partial(self.read_local, epoch=self.epoch if epoch is None else epoch)

    def read_local(self, step: int, *, epoch: int) -> LocalPart:
        """Draw the subgraph of a step: a whole sample, the seeds first, then the rows of each hop."""
        order = np.arange(len(self._starts))
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch, self.rank]).permutation(len(order))
        order = order[self._dp[0] :: self._dp[1]]
        chosen = order[step * self._size : (step + 1) * self._size]
        if -(-len(order) // self._size) < self._num_steps:  # fewer than others have: as many steps, of less each
            chosen = order[len(order) * step // self._num_steps : len(order) * (step + 1) // self._num_steps]
        random = np.random.default_rng([self._seed, epoch, self.rank, self._dp[0], step])
        return self._draw(ranges(self._starts[chosen], self._stops[chosen]), random, **self._how)

    def assemble(self, part: LocalPart, *, index: int) -> IrregularSample[torch.Tensor]:
        """Wrap a subgraph: plain tensors, on this rank alone."""
        return self._plain.assemble(part, index=part.index)

    # -- drawing -----------------------------------------------------------------------------------------------------

    def _access(self) -> RowAccess:
        return self._reader.cut_of(self._part.part.index)[1]

    def _draw(self, seeds: IntArray, random: np.random.Generator, *, replace: bool, induced: bool) -> LocalPart:
        access, hops, reached, none = self._access(), [seeds], np.sort(seeds), seeds[:0]
        drawn = [(none, none, none)]
        for num in self._nums:  # into the rows that the hop before was the first to reach
            drawn.append(self._edges_into(hops[-1], num, random, access, replace))
            hops.append(np.setdiff1d(drawn[-1][2], reached))
            reached = np.union1d(reached, hops[-1])
        if induced:
            every = self._edges_into(reached, -1, random, access, replace=False)
            kept = contains(reached, every[2])
            drawn = [(none, none, none), tuple(each[kept] for each in every)]  # type: ignore[list-item]
        nodes, (edges, into, out_of) = np.concatenate(hops), map(np.concatenate, zip(*drawn, strict=True))
        order, rows = np.argsort(nodes), {self._entity: nodes, "edge": edges}
        edge_index = order[np.searchsorted(nodes, np.stack([out_of, into]), sorter=order)]
        read = {entity: self._fields(entity, ids, access) for entity, ids in rows.items()}
        n_id, e_id = (fields.pop("original_id") for fields in read.values())
        bounds = {entity: np.array([0, len(ids)]) for entity, ids in rows.items()}
        return LocalPart(
            index=self._index,
            part=SamplePart(index=self._part.part.index, entity=self._entity, bounds=bounds),
            fields={name: values for fields in read.values() for name, values in fields.items()},
            stats=access.stats,
            index_maps={name: IndexMap(bounds=each, part=0, ghosts=none) for name, each in bounds.items()},
            relations={"edge": edge_index},
            far_relations={"edge": edge_index[:, :0]},
            rows=rows,
            values={  # the attributes that torch_geometric's loaders add to a Data
                "n_id": n_id, "e_id": e_id, "batch_size": len(seeds), "num_sampled_nodes": [len(hop) for hop in hops],
                "num_sampled_edges": [len(hop[0]) for hop in drawn[1:]],
            },
        )  # fmt: skip

    def _edges_into(
        self, rows: IntArray, num: int, random: np.random.Generator, access: RowAccess, replace: bool
    ) -> tuple[IntArray, IntArray, AnyArray]:
        """Draw ``num`` edges that end at each row (-1: all); return the edges, their target rows and their source
        rows.
        """
        pointers = self._picked(self._entity, rows, {"": (self._pointers, 0)},
                                lambda ids: {"": np.stack(access.pointers("csr/indptr", ids), axis=1)})[""]  # fmt: skip
        first, sizes = pointers[:, 0], pointers[:, 1] - pointers[:, 0]
        takes = sizes if num < 0 else np.where(sizes > 0, num, 0) if replace else np.minimum(sizes, num)
        row = np.repeat(np.arange(len(rows)), takes)
        if replace and num >= 0:
            edges = first[row] + (random.random(len(row)) * sizes[row]).astype(np.int64)
        else:
            edges = ranges(first, first + sizes)
            if (takes < sizes).any():  # the first of each row's, in random order
                of = np.repeat(np.arange(len(rows)), sizes)
                edges = edges[np.lexsort((random.random(len(edges)), of))]
                edges = edges[ranges(np.zeros_like(sizes), sizes) < takes[of]]
        source = self._picked("edge", edges, {"": (self._sources, 0)}, lambda ids: {"": access.gather("csr/src", ids)})
        return edges, rows[row], source[""]

    def _fields(self, entity: str, ids: IntArray, access: RowAccess) -> dict[str, Array]:
        """Return the rows of each field of an entity, and of ``original_id``."""
        reader, index = self._reader, self._index
        names = [name for name in self._part.fields if reader.info(name).entity == entity]

        def beyond(ids: IntArray) -> dict[str, Array]:
            read = reader.read_rows(access, names, index, LocalTopology(index_maps={}, rows={entity: ids}))
            self._ds._finish_locally(read)
            return read | {"original_id": reader.original_id(index, 0, entity, rows=ids)}

        held = {name: (self._part.fields[name], reader.entity_dim(name)) for name in names}
        return self._picked(entity, ids, held | {"original_id": (self._ids[entity], 0)}, beyond)

    def _picked(
        self, entity: str, ids: IntArray, held: Mapping[str, tuple[Any, int]],
        beyond: Callable[[IntArray], Mapping[str, Any]],
    ) -> dict[str, Any]:  # fmt: skip
        """Return rows of arrays along a dim each: held, or else ``beyond``, which gets sorted ids, each once."""
        at = np.asarray(ids) - self._firsts[entity]
        here = (at >= 0) & (at < self._part.index_maps[entity].num_owned)
        missing, back = np.unique(ids[~here], return_inverse=True)
        read = beyond(missing) if len(missing) else {}
        found = {}
        for name, (values, dim) in held.items():
            rows = np.moveaxis(values, dim, 0)
            out = np.empty((len(ids), *rows.shape[1:]), values.dtype)
            out[here] = rows[at[here]]
            if read:
                out[~here] = np.moveaxis(read[name], dim, 0)[back]
            found[name] = np.moveaxis(out, 0, dim)
        return found
