"""What ``scidata plan`` computes for a partitioned store: the rows, ghosts, edges and bytes of every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scidata.core.types import IntArray
from scidata.meshes.hetero import relation_parts
from scidata.plan.totals import TOTALS, RankReads
from scidata.store.raw_points.reader import PointsReader
from scidata.store.reading.part import SamplePart
from scidata.store.reading.reader import StoreReader

Tick = Callable[[], None]
#: What a plan says of each relation and rank.
RELATION_TOTALS = ("num_ghosts", "num_cut_edges", "num_ghost_edges")


@dataclass(frozen=True, kw_only=True, eq=False)
class StorePlan(RankReads):
    """The reads of every rank of a domain for one sample of a store.

    Of fields and of the index arrays that say which rows, edges and cells are read.

    Attributes
    ----------
    reader, sample, cut
        What was planned, and where its parts begin.
    ghosts
        For each rank the sorted global ids that it needs of others.
    num_cut_edges
        ``(num_ranks,)`` int64: edges from a row of another rank to one of this rank's; None without edges.
    num_neighbours
        ``(num_ranks,)`` int64: ranks that it has ghosts from.
    by_relation
        Of a graph between several node sets, of each relation ``(3, num_ranks)`` int64: ghosts that its edges begin
        at, edges cut, and edges of others that a rank has, too. Sets that several relations begin in have ghosts in
        common, which ``ghosts`` counts once.
    """

    reader: StoreReader | PointsReader
    sample: int
    cut: SamplePart
    ghosts: tuple[IntArray, ...]
    num_cut_edges: IntArray | None
    num_neighbours: IntArray
    by_relation: Mapping[str, IntArray] = field(default_factory=dict)

    def num_owned(self, entity: str) -> IntArray:
        """Return the rows of an entity that each rank owns, ``(num_ranks,)`` int64."""
        owned: IntArray = np.diff(self.cut.bounds[entity])
        return owned

    def balance(self, entity: str) -> float:
        """Return the rows of the fullest rank over the mean."""
        owned = self.num_owned(entity)
        mean = float(owned.mean())
        return float(owned.max()) / mean if mean else 1.0

    def rank(self, rank: int) -> dict[str, Any]:
        """Describe one rank in plain values."""
        return {
            "rank": rank,
            "owned": {entity: list(self.cut.owned(entity, rank)) for entity in self.cut.bounds},
            "num_owned": {entity: int(self.num_owned(entity)[rank]) for entity in self.cut.bounds},
            "num_ghosts": len(self.ghosts[rank]),
            "num_neighbours": int(self.num_neighbours[rank]),
            "num_cut_edges": None if self.num_cut_edges is None else int(self.num_cut_edges[rank]),
            **self.sums(rank),
        }

    def totals(self) -> dict[str, Any]:
        """Describe all ranks together in plain values."""
        return {
            "num_owned": {entity: int(bounds[-1]) for entity, bounds in self.cut.bounds.items()},
            "num_ghosts": sum(map(len, self.ghosts)),
            "num_cut_edges": None if self.num_cut_edges is None else int(self.num_cut_edges.sum()),
            **self.sums(),
            "relations": {
                name: dict(zip(RELATION_TOTALS, each.sum(axis=1).tolist(), strict=True))
                for name, each in self.by_relation.items()
            },
            "balance": {entity: self.balance(entity) for entity in self.cut.bounds},
        }


def plan_store(reader: StoreReader, topology: StoreReader, sample: int = 0, *, tick: Tick | None = None) -> StorePlan:
    """Plan one sample for every rank of the reader's domain, one after the other.

    Which ghosts a rank has follows from the edges and positions that it reads, so these are read.

    Parameters
    ----------
    topology
        The same store, cut the same, without fields, whose samples are the stored ones.
    tick
        Called when a rank is done.
    """
    num_ranks = reader.num_parts
    sums = np.zeros((4, num_ranks), np.int64)
    neighbours, cut_edges = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    by_relation: dict[str, IntArray] = {}
    ghosts, exact, cut = [], True, reader.partition_of(sample)
    for rank in range(num_ranks):
        plan = reader.plan(sample, rank)
        sums[:, rank] = [getattr(plan, name) for name in TOTALS]
        exact &= plan.exact
        local = topology.read(cut.index, rank)
        maps = [local.index_maps[reader.entity]]
        if local.relations:
            maps = [rows for name, rows in local.index_maps.items() if name not in local.relations]
        ghosts.append(np.concatenate([rows.ghosts for rows in maps]))
        neighbours[rank] = np.count_nonzero(np.sum([rows.recv_counts for rows in maps], axis=0))
        for name, pairs in local.relations.items():
            num_owned = local.index_maps[(relation_parts(name) or ("",))[0]].num_owned
            far = local.far_relations[name]
            sources = np.unique(np.concatenate([pairs[0], far[0]]))
            num_cut = np.count_nonzero(pairs[0] >= num_owned)
            found = by_relation.setdefault(name, np.zeros((3, num_ranks), np.int64))
            found[:, rank] = np.count_nonzero(sources >= num_owned), num_cut, far.shape[1]
            cut_edges[rank] += num_cut
        if local.edge_index is not None:
            cut_edges[rank] = np.count_nonzero(local.edge_index[0] >= maps[0].num_owned)
        if tick is not None:
            tick()
    return StorePlan(
        reader=reader,
        sample=sample,
        cut=cut,
        ghosts=tuple(ghosts),
        num_cut_edges=cut_edges if "edge" in reader.entities or by_relation else None,
        by_relation=by_relation,
        num_neighbours=neighbours,
        **dict(zip(TOTALS, sums, strict=True)),
        exact=exact,
    )


def describe_store(plan: StorePlan, *, weights: object, dp: int | None) -> dict[str, Any]:
    """Describe what was planned in plain values: the data, the cut, and how samples spread over ``dp`` groups."""
    reader, index = plan.reader, plan.sample
    assert isinstance(reader, StoreReader)
    info = reader.sample_info(index)
    return {
        "path": reader.path,
        "kind": reader.kind,
        "fields": list(reader.fields),
        "global_shape": {name: list(reader.global_shape(name, index)) for name in reader.fields},
        "num_samples": reader.num_samples,
        "sample": index,
        "sample_dim": reader.numbering.sample_dim,
        "rows": reader.numbering.rows(index),
        "name": info.name,
        "counts": dict(info.counts),
        "domain": plan.num_ranks,
        "bounds": {entity: rows.tolist() for entity, rows in plan.cut.bounds.items()},
        "weights": weights,
        "halo": reader.halo,
        "num_hops": reader.num_hops,
        "layers": [list(layer) for layer in reader.layers],
        "ghosts": reader.ghosts,
        "dp": dp,
        "world_size": plan.num_ranks * (dp or 1),
        "samples_per_dp_rank": -(-reader.num_samples // (dp or 1)),
        "exact": plan.exact,
    }
