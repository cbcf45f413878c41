"""Plans of arrays put together: what a rank reads of a sample, and what all ranks read of an array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scidata.core.types import ArrayLayout, ChunkRefs, IntArray, Selection
from scidata.plan.array import ArrayPlan, plan_array


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """What one rank reads for one sample: the plans of each field, one per file that holds a part of it."""

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
        """Bytes that come out of decoding."""
        return self._sum("bytes_decoded")

    @property
    def num_chunks(self) -> int:
        """Chunks touched."""
        return self._sum("num_chunks")

    @property
    def num_reads(self) -> int:
        """Ranged reads."""
        return self._sum("num_reads")

    @property
    def exact(self) -> bool:
        """True where the bytes are exact and not estimated."""
        return all(plan.exact for plans in self.fields.values() for plan in plans)

    @property
    def amplification(self) -> float:
        """Bytes fetched over bytes wanted; below 1 where compression saves more than chunks cost."""
        return self.bytes_fetched / self.bytes_wanted if self.bytes_wanted else 1.0

    @property
    def decode_amplification(self) -> float:
        """Bytes decoded over bytes wanted."""
        return self.bytes_decoded / self.bytes_wanted if self.bytes_wanted else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "index": self.index,
            "rank": self.rank,
            "fields": {name: [plan.to_json() for plan in plans] for name, plans in self.fields.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ReadPlan:
        """Make the plan again from :meth:`to_json`."""
        fields = {name: tuple(map(ArrayPlan.from_json, plans)) for name, plans in value["fields"].items()}
        return cls(index=int(value["index"]), rank=int(value["rank"]), fields=fields)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanSummary:
    """What every rank of a domain reads of one array.

    Attributes
    ----------
    bytes_wanted, bytes_fetched, bytes_decoded, num_chunks
        ``(num_ranks,)`` int64.
    shared_chunks
        Number of chunks that more than one rank reads.
    exact
        False where bytes are estimated from decoded sizes.
    """

    bytes_wanted: IntArray
    bytes_fetched: IntArray
    bytes_decoded: IntArray
    num_chunks: IntArray
    shared_chunks: int
    exact: bool

    @property
    def amplification(self) -> float:
        """Bytes that all ranks fetch over bytes that they want."""
        wanted = int(self.bytes_wanted.sum())
        return int(self.bytes_fetched.sum()) / wanted if wanted else 1.0


def summarize(
    layout: ArrayLayout,
    selection_of_rank: Callable[[int], Selection],
    num_ranks: int,
    refs: Callable[[IntArray], ChunkRefs] | None = None,
) -> PlanSummary:
    """Plan every rank in turn and keep the sums.

    Memory does not grow with ranks × chunks: one rank's plan at a time, and one byte per chunk of the array.

    Parameters
    ----------
    selection_of_rank
        The selection of a rank.
    refs
        Places of chunks by their coordinates (a source's ``locate``); None estimates bytes from decoded sizes.
    """
    sums = np.zeros((4, num_ranks), np.int64)
    readers = np.zeros(layout.num_chunks, np.uint8)  # how many ranks read a chunk, 2 meaning more than one
    exact = not layout.fallback and refs is not None
    locate = None if refs is None else lambda _, chunks: refs(chunks)
    for rank in range(num_ranks):
        selection = selection_of_rank(rank)
        shape = tuple(max((s.offset + s.count for s in dim), default=0) for dim in selection)
        plan = plan_array(layout, selection, locate, out_shape=shape)
        sums[:, rank] = plan.bytes_wanted, plan.bytes_fetched, plan.bytes_decoded, plan.num_chunks
        if plan.num_chunks:
            touched = np.ix_(*(p.chunks for p in plan.pieces))
            readers[touched] = np.minimum(readers[touched] + 1, 2)
    return PlanSummary(
        bytes_wanted=sums[0], bytes_fetched=sums[1], bytes_decoded=sums[2], num_chunks=sums[3],
        shared_chunks=int(np.count_nonzero(readers == 2)), exact=exact,
    )  # fmt: skip
