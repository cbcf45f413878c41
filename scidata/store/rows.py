"""Reads rows of a stored sample's arrays, near ones together, and keeps the plans of what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.partition._ids import ranges
from scidata.plan import ArrayPlan, chunks_needed, plan_array
from scidata.read import ReadStats, read_plan
from scidata.store import Store
from scidata.types import ArrayLayout, IntArray, Segment

__all__ = ["MAX_GAP", "RowAccess", "Runs", "merge_ranges"]

#: Rows between two wanted ones that are read along: finer runs cost more than these rows.
MAX_GAP = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """Sorted ranges of rows, merged where they lie close.

    Attributes
    ----------
    starts, stops
        ``(num_runs,)`` int64: what is read.
    pick
        Where the wanted rows lie among those that are read; None where all are wanted.
    """

    starts: IntArray
    stops: IntArray
    pick: IntArray | None

    @property
    def num_rows(self) -> int:
        """Rows that are read."""
        return int((self.stops - self.starts).sum())


def merge_ranges(starts: IntArray, stops: IntArray, *, max_gap: int = MAX_GAP) -> Runs:
    """Merge sorted, disjoint ranges ``[starts[i], stops[i])`` whose gaps are at most ``max_gap`` rows."""
    some = stops > starts
    starts, stops = starts[some], stops[some]
    if not len(starts):
        return Runs(starts=starts, stops=stops, pick=None)
    gaps = starts[1:] - stops[:-1]
    first = np.flatnonzero(np.concatenate([[True], gaps > max_gap]))
    last = np.append(first[1:], len(starts)) - 1
    run_starts, run_stops = starts[first], stops[last]
    pick = None
    if not bool(((gaps == 0) | (gaps > max_gap)).all()):
        run = np.repeat(np.arange(len(first)), last - first + 1)
        offsets = np.cumsum(run_stops - run_starts) - (run_stops - run_starts)
        shift = (offsets - run_starts)[run]
        pick = ranges(starts + shift, stops + shift)
    return Runs(starts=run_starts, stops=run_stops, pick=pick)


class RowAccess:
    """What one part of one sample reads.

    Attributes
    ----------
    plans
        By the array's path, of everything that was read or planned.
    stats
        Of everything that was read.
    """

    def __init__(self, store: Store, index: int, executor: Executor | None = None) -> None:
        self._store, self._index, self._executor = store, index, executor
        self.plans: dict[str, list[ArrayPlan]] = {}
        self.stats = ReadStats()

    def layout(self, path: str) -> ArrayLayout:
        """Return an array's layout."""
        return self._store.array(self._index, path)

    def plan(
        self,
        path: str,
        starts: IntArray,
        stops: IntArray,
        *,
        dim: int = 0,
        others: Sequence[tuple[Segment, ...]] | None = None,
    ) -> ArrayPlan:
        """Plan a read of ranges of rows along ``dim``, one after the other.

        ``others`` are the segments of every dim, of which that of ``dim`` is not looked at; default all rows.
        """
        layout, source = self.layout(path), self._store.source(self._index)
        counts = stops - starts
        offsets = np.cumsum(counts) - counts
        rows = tuple(
            Segment(start=start, count=count, offset=offset)
            for start, count, offset in zip(starts.tolist(), counts.tolist(), offsets.tolist(), strict=True)
            if count
        )
        if others is None:
            others = [(Segment(start=0, count=n),) if n else () for n in layout.shape]
        selection = tuple(rows if d == dim else kept for d, kept in enumerate(others))
        shape = tuple(sum(segment.count for segment in kept) for kept in selection)
        refs = None if layout.fallback else source.locate(layout, chunks_needed(layout, selection))
        plan = plan_array(layout, selection, refs, out_shape=shape)
        self.plans.setdefault(path, []).append(plan)
        return plan

    def run(self, plan: ArrayPlan, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
        """Read what a plan of this object says, in native byte order or as ``dtype``."""
        kind = plan.layout.dtype.newbyteorder("=") if dtype is None else np.dtype(dtype)
        out = np.empty(plan.out_shape, kind)
        self.stats += read_plan(plan, out, source=self._store.source(self._index), executor=self._executor)
        return out

    def rows(self, path: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Read rows ``[start, stop)`` of the first dimension."""
        return self.run(self.plan(path, np.array([start]), np.array([stop])))

    def ranges(self, path: str, starts: IntArray, stops: IntArray) -> npt.NDArray[Any]:
        """Read sorted, disjoint ranges of rows, those that lie close at once; return the wanted rows alone."""
        runs = merge_ranges(starts, stops)
        values = self.run(self.plan(path, runs.starts, runs.stops))
        return values if runs.pick is None else values[runs.pick]

    def take(self, path: str, ids: IntArray) -> npt.NDArray[Any]:
        """Read the rows of sorted ids, each once."""
        return self.ranges(path, ids, ids + 1)
