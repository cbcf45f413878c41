"""Rows drawn around seed rows, hop by hop along the edges that end at them, of what a part has in memory or reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scidata.core.types import AnyArray, Array, IntArray
from scidata.meshes.order.ids import contains, ranges
from scidata.store.reading.part import LocalPart, LocalTopology
from scidata.store.reading.reader import StoreReader
from scidata.store.reading.rows import RowAccess


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbourhood:
    """Rows around seeds, which come first, then each hop's, and edges; both as rows of the store."""

    nodes: IntArray
    edges: IntArray
    edge_index: IntArray  # ``(2, num_edges)`` int64: places of sources and targets among ``nodes``
    # of the seeds and of each hop; of each hop
    num_nodes: list[int]
    num_edges: list[int]


class StoredGraph:
    """A sample with one node set, of which a part was read already; what lies beyond it is read when it is needed.

    ``finish`` is called with fields that were read, as it was with the part's.
    """

    def __init__(
        self, reader: StoreReader, index: int, part: LocalPart, finish: Callable[[dict[str, Array]], None]
    ) -> None:
        self._reader, self._index, self._part, self._finish = reader, index, part, finish
        self.entity, self.rows = part.part.entity, part.index_maps[part.part.entity]
        self._starts = {name: part.part.owned(name, self.rows.part)[0] for name in (self.entity, "edge")}
        source, target = part.relations["edge"]
        ends = self._starts["edge"] + np.cumsum(np.bincount(target, minlength=self.rows.num_owned))
        self._pointers = np.stack([np.append(self._starts["edge"], ends[:-1])[: len(ends)], ends], axis=1)
        self._sources = self.rows.to_global(source)
        self.ids = {name: reader.original_id(index, self.rows.part, name) for name in self._starts}

    def access(self) -> RowAccess:
        """Return access to the sample, which counts what it reads."""
        return self._reader.cut_of(self._part.part.index)[1]

    def draw(
        self, seeds: IntArray, nums: Sequence[int], random: np.random.Generator, access: RowAccess, *,
        replace: bool = False, induced: bool = False,
    ) -> Neighbourhood:  # fmt: skip
        """Draw at most so many edges (-1: all) into each row that a hop was the first to reach.

        ``induced``: have all edges between the rows instead.
        """
        reached, hops, edges, targets, sources = np.sort(seeds), [seeds], [seeds[:0]], [seeds[:0]], [seeds[:0]]
        for num in nums:
            drawn, into, out_of = self._edges_into(hops[-1], num, random, access, replace)
            hops.append(np.setdiff1d(out_of, reached))
            reached = np.union1d(reached, hops[-1])
            edges, targets, sources = [*edges, drawn], [*targets, into], [*sources, out_of]
        if induced:
            drawn, into, out_of = self._edges_into(reached, -1, random, access, replace)
            kept = contains(reached, out_of)
            edges, targets, sources = [drawn[kept]], [into[kept]], [out_of[kept]]
        nodes = np.concatenate(hops)
        order = np.argsort(nodes)
        ends = np.stack([np.concatenate(sources), np.concatenate(targets)])
        return Neighbourhood(
            nodes=nodes, edges=np.concatenate(edges), edge_index=order[np.searchsorted(nodes[order], ends)],
            num_nodes=[len(hop) for hop in hops], num_edges=[len(hop) for hop in edges[1:]],
        )  # fmt: skip

    def fields(self, entity: str, ids: IntArray, access: RowAccess) -> dict[str, Array]:
        """Return the rows of each field of an entity, along dim 0; ``original_id`` among them."""
        names = [name for name in self._part.fields if self._reader.info(name).entity == entity]

        def beyond(ids: IntArray) -> dict[str, Array]:
            topology = LocalTopology(index_maps={}, rows={entity: ids})
            read = self._reader.read_rows(access, names, self._index, topology)
            self._finish(read)
            return read | {"original_id": self._reader.original_id(self._index, 0, entity, rows=ids)}

        held = {name: self._part.fields[name] for name in names} | {"original_id": self.ids[entity]}
        dims = {name: self._reader.entity_dim(name) for name in names} | {"original_id": 0}
        return self._picked(entity, ids, held, dims, beyond)

    def _picked(
        self, entity: str, ids: IntArray, held: dict[str, Any], dims: dict[str, int],
        beyond: Callable[[IntArray], dict[str, Any]],
    ) -> dict[str, Any]:  # fmt: skip
        """Return rows of arrays: held, or else ``beyond``, which is called with sorted ids, each once."""
        rows = self._part.index_maps[entity]
        at = np.asarray(ids) - self._starts[entity]
        here = (at >= 0) & (at < rows.num_owned)
        missing, back = np.unique(ids[~here], return_inverse=True)
        read = beyond(missing) if len(missing) else {}
        found = {}
        for name, values in held.items():
            rows_first = np.moveaxis(values, dims[name], 0)
            found[name] = np.empty((len(ids), *rows_first.shape[1:]), values.dtype)
            found[name][here] = rows_first[at[here]]
            if len(missing):
                found[name][~here] = np.moveaxis(read[name], dims[name], 0)[back]
        return found

    def _edges_into(
        self, rows: IntArray, num: int, random: np.random.Generator, access: RowAccess, replace: bool
    ) -> tuple[IntArray, IntArray, AnyArray]:
        """Draw edges that end at some rows; return them, and the rows where they end and begin."""
        pointers = self._picked(self.entity, rows, {"": self._pointers}, {"": 0},
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
        source = self._picked(
            "edge", edges, {"": self._sources}, {"": 0}, lambda ids: {"": access.gather("csr/src", ids)}
        )
        return edges, rows[row], source[""]
