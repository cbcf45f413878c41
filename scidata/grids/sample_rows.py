"""Which rows of the files each sample is: of one dimension, or of windows in each of several trajectories."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from scidata.core.bounds import rows_of
from scidata.core.types import BoolArray, IntArray, Segment, Segments
from scidata.grids.series import Series
from scidata.grids.steps import FieldSteps

#: Rows of a sample in members of a series (files, or trajectories in one), by their numbers.
Runs: TypeAlias = Sequence[tuple[int, tuple[Segment, ...]]]


class SampleRows:
    """The rows of samples, in the numbering of all members of a series, one after the other.

    Samples are numbered with the trajectories in their order, and inside each from its first window to its last.

    - ``steps``: of a sample, those of all fields; a negative one needs rows before it.
    - ``crosses``: whether steps go on from one file into the next.
    - ``breaks``: ``(num_rows,)`` bool: selected rows to which no window goes on from the row before; None for none.
    - ``num``: samples for which every step exists.
    - ``num_skipped``: those that are left out because their windows cross ``breaks``.
    """

    def __init__(
        self,
        series: Series,
        selected: Mapping[str, Segments],
        steps: FieldSteps,
        *,
        crosses: bool,
        breaks: BoolArray | None = None,
    ) -> None:
        self._steps, self._trajectories = steps, None
        self._selected = None if series.sample_dim is None else selected[series.sample_dim]
        num_rows = 1 if self._selected is None else sum(s.count for s in self._selected)
        self._num_rows, self._crosses, self._row_bounds = num_rows, crosses, series.row_bounds
        low, high = min(0, *steps.every), max(0, *steps.every)
        self._starts: Sequence[int] = range(-low, max(-low, num_rows - high))
        if self._selected is not None and not crosses:
            self._starts = self._unbroken(low, high, self._other_members())
        num = len(self._starts)
        if breaks is not None and breaks.any():
            self._starts = self._unbroken(low, high, breaks)
        self._per_trajectory = len(self._starts)
        self.num, self.num_skipped = self._per_trajectory, num - self._per_trajectory
        if series.outer:
            self._trajectories = _first_rows(series, [rows_of(selected[dim]) for dim in series.outer])
            self.num *= len(self._trajectories)
            self.num_skipped *= len(self._trajectories)

    def _unbroken(self, low: int, high: int, breaks: BoolArray) -> list[int]:
        starts, before = np.array(self._starts, np.int64), np.cumsum(breaks)
        return starts[before[starts + high] == before[starts + low]].tolist()

    def _other_members(self) -> BoolArray:
        members = np.searchsorted(self._row_bounds, rows_of(self._selected or ()), side="right")
        return np.diff(members, prepend=members[:1]) != 0

    def start_of(self, index: int) -> Callable[[int], int]:
        """Return a function that gives the row of a sample at each step."""
        if self._selected is None:
            return lambda step: 0
        first = 0
        if self._trajectories is not None:
            trajectory, index = divmod(index, self._per_trajectory)
            first = int(self._trajectories[trajectory])
        start = self._starts[index]
        if len(self._selected) == 1 and (run := self._selected[0]).step == 1:  # most often: without a layer between
            return (first + run.start + start - run.offset).__add__
        return lambda step: first + self._row(start + step)

    def _row(self, position: int) -> int:
        segments = self._selected or ()
        segment = segments[bisect.bisect_right(segments, position, key=lambda s: s.offset) - 1]
        return segment.start + segment.step * (position - segment.offset)

    # -- all rows, numbered in the order of trajectories and steps: for passes over the data -------------------------

    def positions_of(self, samples: IntArray, name: str) -> IntArray:
        """Return the positions of a field's rows of some samples among all selected rows, ``(num, steps)`` int64."""
        return self._positions(samples, self._steps.of(name))

    def _positions(self, samples: IntArray, steps: Sequence[int]) -> IntArray:
        if self._selected is None:
            return np.zeros((len(samples), 1), np.int64)
        trajectory, at = np.divmod(samples, max(1, self._per_trajectory))
        firsts = trajectory * self._num_rows + np.asarray(self._starts, np.int64)[at]
        return firsts[:, None] + np.asarray(steps, np.int64)

    def rows_at(self, positions: IntArray) -> IntArray:
        """Return the rows at some positions, ``(num,)`` int64."""
        if self._selected is None:
            return np.zeros(len(positions), np.int64)
        trajectory, at = np.divmod(positions, self._num_rows)
        rows = rows_of(self._selected)[at]
        return rows if self._trajectories is None else self._trajectories[trajectory] + rows

    def are_steps(self, positions: IntArray) -> BoolArray:
        """Return of each position whether its row is one step after the row at the position before: ``(num,)``."""
        found = np.zeros(len(positions), np.bool_)
        if self._selected is None or len(positions) < 2:
            return found
        next_to = np.diff(positions) == 1
        next_to &= positions[1:] % self._num_rows != 0  # another trajectory begins
        if not self._crosses:
            members = np.searchsorted(self._row_bounds, self.rows_at(positions), side="right")
            next_to &= members[1:] == members[:-1]
        found[1:] = next_to
        return found

    def at(self, step: int) -> IntArray:
        """Return the row of each sample that lies some steps after its own, ``(num,)`` int64."""
        return self.rows_at(self._positions(np.arange(self.num), (step,))[:, 0])


def _first_rows(series: Series, trajectories: Sequence[IntArray]) -> IntArray:
    others = [series.num_rows(dim) for dim in series.outer[1:]]
    sizes = [math.prod(others[k:]) for k in range(len(others) + 1)]
    numbers: IntArray = functools.reduce(np.add.outer, [n * size for n, size in zip(trajectories, sizes, strict=True)])
    return series.row_bounds[numbers.reshape(-1)]


class Places:
    """Where the rows of one sample lie, by field."""

    __slots__ = ("_by_steps", "_row_at", "_series", "_steps")

    def __init__(self, series: Series, steps: FieldSteps, sample_rows: SampleRows, index: int) -> None:
        self._series, self._steps = series, steps
        self._row_at = sample_rows.start_of(index)
        self._by_steps: dict[tuple[int, ...], Runs] = {}

    @property
    def member(self) -> int:
        """The member of the series that a sample lies in, the first where it lies in several."""
        return self._series.place_of(self._row_at(self._steps.every[0]))[0]

    def of(self, name: str) -> Runs:
        """Return the rows of a field along the sample dimension."""
        steps = self._steps.of(name)
        found = self._by_steps.get(steps)
        if found is None:
            found = self._by_steps[steps] = self._find(list(map(self._row_at, steps)))
        return found

    def _find(self, rows: Sequence[int]) -> Runs:
        if len(rows) == 1:
            i, first = self._series.place_of(rows[0])
            return [(i, (Segment(start=rows[0] - first, count=1),))]
        by_member: dict[int, list[Segment]] = {}
        for offset, row in enumerate(rows):
            i, first = self._series.place_of(row)
            by_member.setdefault(i, []).append(Segment(start=row - first, count=1, offset=offset))
        return [(i, joined(segments)) for i, segments in by_member.items()]


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Merge single rows that follow each other in the source and in the destination."""
    runs: list[Segment] = []
    for segment in segments:
        last = runs[-1] if runs else None
        if last and segment.start == last.start + last.count and segment.offset == last.offset + last.count:
            runs[-1] = Segment(start=last.start, count=last.count + 1, offset=last.offset)
        else:
            runs.append(segment)
    return tuple(runs)
