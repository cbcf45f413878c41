"""Combined plans: a rank's reads for a sample, and all ranks' reads of an array."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scidata.core.html import card, nbytes
from scidata.core.types import ArrayLayout, ChunkRefs, IntArray, Selection
from scidata.plan.array import ArrayPlan, plan_array

#: Counts of each rank's plan; see :class:`RankReads`.
TOTALS = ("bytes_wanted", "bytes_fetched", "bytes_decoded", "num_chunks")


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """One rank's reads for one sample: the plans of each field, one per file with a part of it."""

    index: int
    rank: int
    fields: Mapping[str, tuple[ArrayPlan, ...]]

    def _sum(self, name: str) -> int:
        return sum(int(getattr(plan, name)) for plans in self.fields.values() for plan in plans)

    @property
    def bytes_wanted(self) -> int:
        """Bytes selected, in the stored dtypes."""
        return self._sum("bytes_wanted")

    @property
    def bytes_fetched(self) -> int:
        """Bytes read from files."""
        return self._sum("bytes_fetched")

    @property
    def bytes_decoded(self) -> int:
        """Bytes after decoding."""
        return self._sum("bytes_decoded")

    @property
    def num_chunks(self) -> int:
        """Number of touched chunks."""
        return self._sum("num_chunks")

    @property
    def num_reads(self) -> int:
        """Number of ranged reads."""
        return self._sum("num_reads")

    @property
    def exact(self) -> bool:
        """True if byte counts are exact, not estimated."""
        return all(plan.exact for plans in self.fields.values() for plan in plans)

    @property
    def amplification(self) -> float:
        """Bytes fetched over bytes wanted; below 1 if compression saves more than whole chunks cost."""
        return self.bytes_fetched / self.bytes_wanted if self.bytes_wanted else 1.0

    @property
    def decode_amplification(self) -> float:
        """Bytes decoded over bytes wanted."""
        return self.bytes_decoded / self.bytes_wanted if self.bytes_wanted else 1.0

    @property
    def note(self) -> str:
        """Name the fields read by a library or function, whose bytes are unknown; empty if there are none."""
        names = [name for name, plans in self.fields.items() if any(plan.layout.fallback for plan in plans)]
        why = "read by a function that tells no byte ranges, taken as whole chunks"
        return f"{', '.join(names)}: {why}" if names else ""

    def __repr__(self) -> str:
        about = "" if self.exact else "about "
        return (
            f"ReadPlan(sample {self.index}, rank {self.rank}: {about}{nbytes(self.bytes_fetched)} fetched for "
            f"{nbytes(self.bytes_wanted)} wanted ({self.amplification:.2f} of it) in {self.num_reads} reads of "
            f"{self.num_chunks} chunks; {self.note or ', '.join(self.fields)})"
        )

    def _repr_html_(self) -> str:
        rows = [_row(name, plans) for name, plans in self.fields.items()]
        every = [plan for plans in self.fields.values() for plan in plans]
        columns = ("field", "wanted", "fetched", "decoded", "fetched/wanted", "chunks")
        facts = {"sample": self.index, "rank": self.rank, "reads": self.num_reads}
        return card("ReadPlan" if self.exact else "ReadPlan, estimated", facts, columns, [*rows, _row("all", every)])

    def to_json(self) -> dict[str, object]:
        """Return the plan as JSON values."""
        return {
            "index": self.index,
            "rank": self.rank,
            "fields": {name: [plan.to_json() for plan in plans] for name, plans in self.fields.items()},
        }


def _row(name: str, plans: Sequence[ArrayPlan]) -> tuple[Any, ...]:
    """Return a field's row of the notebook table."""
    wanted, fetched, decoded, chunks = (sum(int(getattr(plan, figure)) for plan in plans) for figure in TOTALS)
    ratio = f"{fetched / wanted:.2f}" if wanted else "-"
    return (name, *map(nbytes, (wanted, fetched, decoded)), ratio, chunks)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankReads:
    """The reads of every rank of a domain."""

    # bytes_wanted, bytes_fetched, bytes_decoded, num_chunks: ``(num_ranks,)`` int64
    bytes_wanted: IntArray
    bytes_fetched: IntArray
    bytes_decoded: IntArray
    num_chunks: IntArray
    exact: bool  # False if bytes are estimated from decoded sizes

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the domain."""
        return len(self.bytes_wanted)

    def sums(self, rank: int | None = None) -> dict[str, Any]:
        """Return the sums of one rank, or of all, and bytes read and decoded over bytes wanted.

        The two amplifications are None if nothing is wanted.
        """
        of = slice(None) if rank is None else slice(rank, rank + 1)
        sums: dict[str, Any] = {name: int(getattr(self, name)[of].sum()) for name in TOTALS}
        wanted = sums["bytes_wanted"]
        for name, count in (("amplification", "bytes_fetched"), ("decode_amplification", "bytes_decoded")):
            sums[name] = sums[count] / wanted if wanted else None
        return sums


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanSummary(RankReads):
    """The reads of every rank of a grid's domain; ``shared_chunks``: number of chunks read by more than one rank."""

    shared_chunks: int


def summarize(
    layout: ArrayLayout,
    selection_of_rank: Callable[[int], Selection],
    num_ranks: int,
    refs: Callable[[IntArray], ChunkRefs] | None = None,
) -> PlanSummary:
    """Plan every rank in turn and return the sums.

    Memory does not grow with ranks × chunks: one rank's plan at a time, and the numbers of the chunks that ranks read.

    ``refs``: places of chunks by their coordinates (a source's ``locate``); None estimates bytes from decoded sizes.
    """
    sums = np.zeros((4, num_ranks), np.int64)
    read, shared = set[tuple[int, ...]](), set[tuple[int, ...]]()  # chunks read by any rank, and by more than one
    exact = not layout.fallback and refs is not None
    locate = None if refs is None else lambda _, chunks: refs(chunks)
    for rank in range(num_ranks):
        selection = selection_of_rank(rank)
        shape = tuple(max((s.offset + s.count for s in dim), default=0) for dim in selection)
        plan = plan_array(layout, selection, locate, out_shape=shape)
        sums[:, rank] = [getattr(plan, name) for name in TOTALS]
        if plan.num_chunks:
            touched = list(itertools.product(*(p.chunks.tolist() for p in plan.pieces)))
            shared.update(read.intersection(touched))
            read.update(touched)
    return PlanSummary(**dict(zip(TOTALS, sums, strict=True)), shared_chunks=len(shared), exact=exact)
