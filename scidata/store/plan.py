"""The reads of every rank of a domain, of a sample of a store or of raw points: rows, ghosts, edges and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray
from scidata.core.urls import public_text
from scidata.errors import ConfigError
from scidata.meshes.hetero import relation_parts
from scidata.meshes.order.quality import expected_ghosts
from scidata.plan.totals import TOTALS, RankReads
from scidata.read.inflate import decoder_text
from scidata.store.raw_points.reader import PointsReader
from scidata.store.reading.part import LocalTopology, SamplePart
from scidata.store.reading.reader import StoreReader

Tick = Callable[[], None]
#: Counts of a plan for each relation and rank.
RELATION_TOTALS = ("num_ghosts", "num_cut_edges", "num_ghost_edges")


@dataclass(frozen=True, kw_only=True, eq=False)
class StorePlan(RankReads):
    """The reads of every rank of a domain for one sample of a store.

    Of fields and of the index arrays that say which rows, edges and cells are read.

    - ``reader``, ``sample``, ``cut``: the sample that was planned, and where its parts begin.
    - ``ghosts``: for each rank the sorted global ids that it needs of others.
    - ``num_cut_edges``: ``(num_ranks,)`` int64: edges from a row of another rank to one of this rank's; None without
      edges.
    - ``num_neighbours``: ``(num_ranks,)`` int64: ranks that it has ghosts from.
    - ``by_relation``: of a graph between several node sets, of each relation ``(3, num_ranks)`` int64: ghosts that its
      edges begin at, edges cut, and edges of others that a rank has, too. Sets that several relations begin in have
      ghosts in common, which ``ghosts`` counts once.
    - ``notes``: why figures are estimated, and which library decodes zlib and gzip.
    """

    reader: StoreReader | PointsReader
    sample: int
    cut: SamplePart
    ghosts: tuple[IntArray, ...]
    num_cut_edges: IntArray | None
    num_neighbours: IntArray
    by_relation: Mapping[str, IntArray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def num_owned(self, entity: str) -> IntArray:
        """Return the rows of an entity that each rank owns, ``(num_ranks,)`` int64."""
        return np.diff(self.cut.bounds[entity])

    def balance(self, entity: str) -> float:
        """Return the rows of the fullest rank over the mean."""
        owned = self.num_owned(entity)
        mean = float(owned.mean())
        return float(owned.max()) / mean if mean else 1.0

    def rank(self, rank: int) -> dict[str, object]:
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

    def totals(self) -> dict[str, object]:
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

    def about(self, dp: int | None = None) -> dict[str, object]:
        """Describe the plan in plain values: the data, the cut, and how samples spread over ``dp`` groups."""
        reader, index = self.reader, self.sample
        weights = reader.options.weights
        found: dict[str, object] = {
            "path": public_text(str(reader.path)),
            "kind": reader.kind,
            "fields": list(reader.fields),
            "global_shape": {name: list(reader.global_shape(name, index)) for name in reader.fields},
            "num_samples": reader.num_samples,
            "sample": index,
            "sample_dim": reader.numbering.sample_dim,
            "rows": reader.numbering.rows(index),
            "name": reader.sample_info(index).name,
            "counts": dict(reader.sample_info(index).counts),
            "domain": self.num_ranks,
            "bounds": {entity: rows.tolist() for entity, rows in self.cut.bounds.items()},
            "weights": weights if isinstance(weights, str | None) else "given",
            "halo": reader.halo,
            "num_hops": reader.num_hops,
            "ghosts": reader.ghosts,
            "dp": dp,
            "world_size": self.num_ranks * (dp or 1),
            "samples_per_dp_rank": -(-reader.num_samples // (dp or 1)),
            "exact": self.exact,
            "notes": list(self.notes),
        }
        is_raw = isinstance(reader, PointsReader)
        return found | ({"raw": True} if is_raw else {"layers": list(map(list, reader.layers))})


def plan_store(reader: StoreReader | PointsReader, sample: int = 0, *, tick: Tick | None = None) -> StorePlan:
    """Plan one sample for every rank, one after the other; edges and positions are read, for the ghosts."""
    num_ranks, cut = reader.num_parts, reader.partition_of(sample)
    sums = np.zeros((len(TOTALS), num_ranks), np.int64)
    exact, needs = True, []
    for rank in range(num_ranks):
        plan = reader.plan(sample, rank)
        sums[:, rank] = [getattr(plan, name) for name in TOTALS]
        exact &= plan.exact
        needs.append(_needs_of(reader.topology(sample, rank), reader.entity))
        if tick is not None:
            tick()
    relations = needs[0].by_relation
    inflated = decoder_text(each.layout for plans in plan.fields.values() for each in plans)
    return StorePlan(
        reader=reader,
        sample=sample,
        cut=cut,
        ghosts=tuple(each.ghosts for each in needs),
        num_cut_edges=np.array([each.num_cut for each in needs]) if "edge" in reader.entities or relations else None,
        by_relation={name: np.array([each.by_relation[name] for each in needs]).T for name in relations},
        num_neighbours=np.array([each.num_neighbours for each in needs]),
        **dict(zip(TOTALS, sums, strict=True)),
        exact=exact,
        notes=tuple(filter(None, ("" if exact else "some sizes are estimated from decoded sizes", inflated))),
    )


def forecast_ghosts(reader: StoreReader, sample: int = 0) -> list[dict[str, int]]:
    """Return the ghosts of some numbers of ranks, and of the reader's own, from what was counted when it was written.

    No edges are read. Rows by number of ranks: ``domain``, ``num_ghosts``, ``most_of_a_rank``, and whether these were
    ``counted``, or lie between numbers that were. Of meshes they were up to 20 % off in all, 23 % of the fullest rank.

    Raises ConfigError: another cut than into equal parts, more than one hop, or a sample of which none were counted.
    """
    info, own = reader.sample_info(sample), reader.num_parts
    options, where = reader.options, f"{reader.path}: sample {sample}"
    if options.weights is not None or options.bounds != "even" or reader.num_hops > 1 or reader.ghost_cells:
        raise ConfigError(f"{where}: ghosts were counted for equal parts and one hop; plan others by their edges")
    if expected_ghosts(info.ghosts, own) is None:
        said = f"of {min(map(int, info.ghosts))} to {max(map(int, info.ghosts))} parts" if info.ghosts else "of none"
        raise ConfigError(f"{where}: ghosts were counted {said}; plan {own} ranks by their edges, or write it anew")
    found = []
    for parts in sorted({own, *(int(each) for each in info.ghosts if not int(each) & (int(each) - 1))}):
        total, most = expected_ghosts(info.ghosts, parts) or (0, 0)
        counted = str(parts) in info.ghosts
        found.append({"domain": parts, "num_ghosts": total, "most_of_a_rank": most, "counted": counted})
    return found


class _Needs(NamedTuple):
    """A rank's needs of others: see :class:`StorePlan`; of each relation ghosts, edges cut, and edges of others."""

    ghosts: IntArray
    num_neighbours: int
    num_cut: int
    by_relation: Mapping[str, tuple[int, int, int]]


def _needs_of(local: LocalTopology, entity: str) -> _Needs:
    """Count the ghosts of a part, the ranks that own them, and the edges that begin at one."""
    maps = [rows for name, rows in local.index_maps.items() if name not in local.relations]
    by_relation = {}
    for name, pairs in local.relations.items():
        num_owned = local.index_maps[(relation_parts(name) or (entity,))[0]].num_owned
        far = local.far_relations[name]
        sources = np.unique(np.concatenate([pairs[0], far[0]]))
        by_relation[name] = _count(sources >= num_owned), _count(pairs[0] >= num_owned), far.shape[1]
    return _Needs(
        ghosts=np.concatenate([rows.ghosts for rows in maps]),
        num_neighbours=_count(np.sum([rows.recv_counts for rows in maps], axis=0)),
        num_cut=sum(num_cut for _, num_cut, _ in by_relation.values()),
        by_relation={name: each for name, each in by_relation.items() if name != "edge"},
    )


def _count(values: npt.ArrayLike) -> int:
    return int(np.count_nonzero(values))
