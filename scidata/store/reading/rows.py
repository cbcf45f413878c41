"""Reads rows of a stored sample's arrays, near ones together, and keeps the plans of its reads."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import num_rows_of
from scidata.core.checks import allocate
from scidata.core.types import (
    AnyArray,
    ArrayLayout,
    Empty,
    IntArray,
    Segment,
    Segments,
    SegmentTable,
    Selection,
    Source,
)
from scidata.meshes.order.ids import ranges
from scidata.plan.array import ArrayPlan, plan_array
from scidata.read import Job, read_plans
from scidata.read.context import NO_READ
from scidata.read.places import expecting
from scidata.store.format.manifest import SampleInfo

#: Rows between two wanted ones that are read along: finer runs cost more than these rows.
MAX_GAP = 64

# Between two scattered rows: a run costs 10-20 µs to plan and copy, as much as these (measured).
_MAX_GAP_BYTES = 8 << 10
_FEW = 16  # segments that are worth objects of their own
_SCRATCH_BYTES = 16 << 20  # scattered rows are read with those between them, in windows of this size

#: Segments of every dim of an array, of which that of the rows is not looked at; None: all.
Others: TypeAlias = Sequence[Segments] | None

#: How scattered rows of an array are read. Of each read its plan, and where the wanted rows lie among those that it
#: brings; None if all are wanted.
GatherPlan: TypeAlias = Sequence[tuple[ArrayPlan, IntArray | None]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """Sorted ranges of rows, merged where they lie close."""

    # starts, stops: ``(num_runs,)`` int64: the ranges that are read
    starts: IntArray
    stops: IntArray
    pick: IntArray | None  # where the wanted rows lie among those that are read; None if all are wanted


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


def in_order(rows: IntArray) -> tuple[IntArray, IntArray | None]:
    """Return rows sorted, and where each was among these; None if they were sorted."""
    if bool((rows[1:] >= rows[:-1]).all()):
        return rows, None
    order = np.argsort(rows)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return rows[order], back


class FieldPlan(NamedTuple):
    """The read of a part's rows of a field, the places of ghosts among the rows it brings, and the sample's shape."""

    job: Job
    pick: IntArray | None
    shape: tuple[int, ...]

    def num_bytes(self) -> int:
        """Return about how much memory it takes."""
        return self.job.plan.num_bytes + (0 if self.pick is None else self.pick.nbytes)


class StoredSamples(Protocol):
    """Samples whose arrays have rows: those of a :class:`~scidata.store.format.store.Store`, or files of points."""

    path: str

    @property
    def is_remote(self) -> bool: ...  # noqa: D102
    def sample(self, index: int) -> SampleInfo: ...  # noqa: D102
    def source(self, index: int) -> Source: ...  # noqa: D102
    def array(self, index: int, path: str) -> ArrayLayout: ...  # noqa: D102
    def job(self, index: int, plan: ArrayPlan) -> Job: ...  # noqa: D102
    def check_unchanged(self) -> None: ...  # noqa: D102
    def doubt(self, index: int) -> bool: ...  # noqa: D102
    def trust(self, index: int) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class RowAccess:
    """What one part of one sample reads, into arrays that ``empty`` makes.

    ``plans``: by the array's path, of everything that was read or planned.
    ``stats``: of everything that was read.
    """

    def __init__(
        self, store: StoredSamples, index: int, executor: Executor | None = None, empty: Empty = np.empty
    ) -> None:
        self._store, self._index, self._executor, self.empty = store, index, executor, empty
        self.plans: dict[str, list[ArrayPlan]] = {}
        self.stats = NO_READ

    def anew(self, empty: Empty) -> Self:
        """Return access to the same rows that has planned and read nothing yet."""
        other = copy.copy(self)
        other.plans, other.stats, other.empty = {}, NO_READ, empty
        return other

    def plan(
        self,
        path: str,
        starts: IntArray,
        stops: IntArray,
        *,
        dim: int = 0,
        others: Others = None,
    ) -> ArrayPlan:
        """Plan a read of ranges of rows along ``dim``, one after the other.

        ``others`` are the segments of every dim, of which that of ``dim`` is not looked at; default all rows.
        """
        layout = self._store.array(self._index, path)
        counts = stops - starts
        offsets = np.cumsum(counts) - counts
        table = np.stack([starts, counts, np.ones_like(counts), offsets], axis=1)[counts > 0]
        rows = SegmentTable(table) if len(table) > _FEW else tuple(SegmentTable(table))
        if others is None:
            others = [(Segment(start=0, count=n),) if n else () for n in layout.shape]
        selection: Selection = tuple(rows if d == dim else kept for d, kept in enumerate(others))
        shape = tuple(map(num_rows_of, selection))
        plan = plan_array(layout, selection, expecting(self._store.source(self._index)), out_shape=shape)
        self.plans.setdefault(path, []).append(plan)
        return plan

    def run(self, plan: ArrayPlan, dtype: npt.DTypeLike | None = None) -> AnyArray:
        """Run a plan of this object; return values in native byte order or as ``dtype``."""
        return self.run_each([(self.job(plan), dtype)])[0]

    def job(self, plan: ArrayPlan) -> Job:
        """Return a plan of this object as work that can be done any number of times."""
        return self._store.job(self._index, plan)

    def run_each(self, jobs: Sequence[tuple[Job, npt.DTypeLike | None]]) -> list[AnyArray]:
        """Run jobs, each into its dtype: behind a URL all their requests are on their way at once."""
        reads = [(job, self._empty(job.plan, job.dtype if d is None else np.dtype(d))) for job, d in jobs]
        self.stats += read_plans(reads, executor=self._executor)
        return [out for _, out in reads]

    def _empty(self, plan: ArrayPlan, dtype: np.dtype[Any]) -> AnyArray:
        return allocate(f"{plan.layout.store}: field {plan.layout.name!r}", plan.out_shape, dtype, self.empty)

    def rows(self, path: str, start: int, stop: int) -> AnyArray:
        """Read rows ``[start, stop)`` of the first dimension."""
        return self.run(self.plan(path, np.array([start]), np.array([stop])))

    def plan_gather(self, path: str, ids: IntArray, *, dim: int = 0, others: Others = None) -> GatherPlan:
        """Plan a read of scattered rows along ``dim``: sorted ids, each once.

        No chunk is fetched twice. Rows between close ones are read along and dropped, a window at a time, so that
        memory follows the rows that are wanted.
        """
        layout = self._store.array(self._index, path)
        chunk = max(1, layout.chunks[dim])
        row_nbytes = max(1, layout.nbytes // max(1, layout.shape[dim]))
        step = max(1, math.prod(layout.shape[dim + 1 :]) * layout.dtype.itemsize)
        gaps = np.diff(ids)
        # chunks that are decoded come whole: rows between those of one or of neighbouring chunks cost nothing
        apart = np.diff(ids // chunk) > 1 if layout.codecs else gaps > max(MAX_GAP, _MAX_GAP_BYTES // step)
        if bool((apart | (gaps == 1)).all()):
            windows = [ids]  # nothing to drop
        else:
            window = max(1, _SCRATCH_BYTES // row_nbytes // chunk) * chunk
            cuts = np.flatnonzero(np.diff(ids // window)) + 1
            apart[cuts - 1] = True
            windows = np.split(ids, cuts)
        first = np.concatenate([[True], apart])[: len(ids)]
        steps: list[tuple[ArrayPlan, IntArray | None]] = []
        at = 0
        for rows in windows:
            heads = np.flatnonzero(first[at : at + len(rows)])
            at += len(rows)
            starts, stops = rows[heads], rows[np.append(heads[1:], len(rows)) - 1] + 1 if len(rows) else rows
            plan = self.plan(path, starts, stops, dim=dim, others=others)
            pick = None
            if plan.out_shape[dim] != len(rows):
                offsets = np.cumsum(stops - starts) - (stops - starts)
                lengths = np.diff(np.append(heads, len(rows)))
                pick = rows + np.repeat(offsets - starts, lengths)
                plan = replace(plan, bytes_wanted=plan.bytes_wanted // plan.out_shape[dim] * len(rows))
                self.plans[path][-1] = plan
            steps.append((plan, pick))
        return steps

    def run_gather(self, gather: GatherPlan, dtype: npt.DTypeLike | None = None, *, dim: int = 0) -> AnyArray:
        """Run a plan of :meth:`plan_gather`; the rows are C-contiguous."""
        parts = []
        for plan, pick in gather:
            values = self.run(plan, dtype)
            parts.append(values if pick is None else values.take(pick, axis=dim))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim)

    def gather(self, path: str, ids: IntArray) -> AnyArray:
        """Read scattered rows of the first dimension: ids in any order, each once."""
        ids, back = in_order(ids)
        values = self.run_gather(self.plan_gather(path, ids))
        return values if back is None else values[back]

    def pointers(self, path: str, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Read entries ``i`` and ``i + 1`` of an array of offsets, for sorted ids ``i``, each once."""
        rows = np.union1d(ids, ids + 1)
        values = self.gather(path, rows).astype(np.int64, copy=False)
        at = np.searchsorted(rows, ids)
        return values[at], values[at + 1]
