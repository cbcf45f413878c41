"""Moments of a field's values, and of its differences between steps, gathered in one pass."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scidata.core.moments import Moments, State
from scidata.core.passes import FieldPass
from scidata.core.types import AnyArray, BoolArray, IntArray
from scidata.core.urls import is_url
from scidata.errors import ConfigError
from scidata.sources.paths import check_seen

_MANY = 1 << 12  # numbers of a cell in one row: of fewer, several rows are taken together


class FieldMoments(NamedTuple):
    """Moments of a field's values and of its differences from one step to the next, by cell."""

    values: Moments
    differences: Moments

    @classmethod
    def empty(cls, num_cells: int) -> FieldMoments:
        """Return moments of no data."""
        return cls(Moments(num_cells), Moments(num_cells))

    def merge(self, other: FieldMoments, cells: IntArray | None = None) -> None:
        """Add the moments of other data for the same cells or a subset."""
        for own, more in zip(self, other, strict=True):
            own.merge(more, cells)

    def state(self) -> list[State]:
        """Return all moments as plain values."""
        return [each.state() for each in self]

    @classmethod
    def of(cls, state: Iterable[State]) -> FieldMoments:
        """Rebuild the moments from :meth:`state`."""
        return cls(*map(Moments.of, state))


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretch:
    """Blocks ``[first, last)`` of a pass, and the statistics to gather from them. Pickles."""

    rows: FieldPass
    by: Sequence[str]
    differences: bool
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.rows.bounds[self.last] - self.rows.bounds[self.first])

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of cells along each of ``by``."""
        return tuple(self.rows.size(dim) for dim in self.by)

    def gather(self, tick: Callable[[float], None] | None = None) -> FieldMoments:
        """Read the blocks in order, each once; ``tick`` is called with the rows that are done."""
        total = FieldMoments.empty(math.prod(self.shape))
        for tile in range(self.rows.num_tiles):
            cells = self._cells(tile)
            found = FieldMoments.empty(len(cells))
            for rows in self._gather_tile(tile, found):
                if tick is not None:
                    tick(rows / self.rows.num_tiles)
            total.merge(found, cells)
        if tick is not None and not self.rows.num_tiles:
            tick(self.num_rows)
        return total

    def _cells(self, tile: int) -> IntArray:
        places = [self.rows.places(tile, dim) for dim in self.by]
        cells = np.zeros((1,), np.int64)
        for size, at in zip(self.shape, places, strict=True):
            cells = (cells[:, None] * size + at).reshape(-1)
        return cells

    def _gather_tile(self, tile: int, found: FieldMoments) -> Iterator[int]:
        bounds, is_step = self.rows.bounds, self.rows.is_step
        before: AnyArray | None = None
        for block in range(self.first, self.last):
            start, stop = int(bounds[block]), int(bounds[block + 1])
            if self.differences and before is None and is_step[start]:  # the step into this stretch is its own
                before = self._cellwise(self.rows.read(tile, start - 1, start))
            values = self._cellwise(self.rows.read(tile, start, stop))
            self._add(found, values, before, is_step[start:stop])
            more = self.differences and block + 1 < self.last and is_step[stop]
            before = values[-1:].copy() if more else None
            yield stop - start

    def _cellwise(self, values: AnyArray) -> AnyArray:
        axes = [1 + self.rows.dims.index(dim) for dim in self.by]
        moved = np.moveaxis(values, axes, range(1, len(axes) + 1))
        num_cells = math.prod(moved.shape[1 : len(axes) + 1])
        return moved.reshape(len(values), num_cells, math.prod(moved.shape[len(axes) + 1 :]))

    def _add(self, found: FieldMoments, values: AnyArray, before: AnyArray | None, is_step: BoolArray) -> None:
        together = max(1, _MANY // max(1, values.shape[2]))
        for first in range(0, len(values), together):
            found.values.add(_by_cell(values[first : first + together]))
        if not self.differences:
            return
        if before is not None:
            found.differences.add(values[0], before[0])
        later = np.flatnonzero(is_step[1:]) + 1
        for first in range(0, len(later), together):
            rows = later[first : first + together]
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            if span.stop - span.start == len(rows):  # views
                now, then = values[span], values[span.start - 1 : span.stop - 1]
            else:
                now, then = values[rows], values[rows - 1]
            found.differences.add(_by_cell(now), _by_cell(then))


def _by_cell(values: AnyArray) -> AnyArray:
    """Return ``(rows, cells, num)`` as ``(cells, rows * num)``; of a single row without a copy."""
    return values[0] if len(values) == 1 else values.swapaxes(0, 1).reshape(values.shape[1], -1)


def gather_one(stretches: Sequence[Stretch], index: int, tick: Callable[[float], None]) -> FieldMoments:
    """Gather one of several stretches, in any process; loads no torch."""
    return stretches[index].gather(tick)


def check_paths(paths: Sequence[str], folder: str) -> None:
    """Raise ConfigError or FileNotFoundError if this process cannot see the data that a process in ``folder`` has
    opened, on any machine.
    """
    for path in paths:
        if not is_url(path) and not os.path.isabs(path) and os.path.realpath(folder) != os.path.realpath(os.getcwd()):
            raise ConfigError(
                f"it works in {os.getcwd()}, and the data were opened by a path relative to {folder}, {path}; open "
                "them by an absolute path"
            )
    check_seen(paths, "data")


def cut_evenly(bounds: IntArray, num_parts: int, part: int) -> tuple[int, int]:
    """Return the first and the end block of one part, if blocks are cut into parts of about equally many rows."""
    wanted = bounds[-1] * np.array([part, part + 1]) / num_parts
    first, last = np.searchsorted(bounds, wanted).tolist()
    return int(first), int(last)
