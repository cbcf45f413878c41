"""Time windows of time-sorted tables: each window's rows, from an index of times. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import ByteArray, IntArray
from scidata.errors import ConfigError

_MOST = 1 << 27  # windows per data set: 3 GiB of tables


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeIndex:
    """Table rows by time bins ``[bin * step, (bin + 1) * step)``, in time order."""

    step: int  # bin width in time units (nanoseconds)
    bins: IntArray  # ``(num,)`` int64: sorted numbers of the non-empty bins
    # rows, kept_rows: ``(num + 1,)`` int64 row offsets of the bins, for all rows and for kept
    # rows
    rows: IntArray
    kept_rows: IntArray
    kept: ByteArray | None = None  # one bit per row, lowest first: 1 if kept. None: all are kept
    # ``(num_rows,)`` int64: table row numbers in time order; None if the table is sorted by time
    order: IntArray | None = None

    @property
    def num_rows(self) -> int:
        """Number of table rows."""
        return int(self.rows[-1])

    def kept_ids(self, start: int, stop: int) -> IntArray:
        """Return the sorted table row numbers of the kept rows among ``[start, stop)``."""
        ids = np.arange(start, stop, dtype=np.int64)
        if self.kept is not None:
            first = start // 8
            bits = np.unpackbits(self.kept[first : -(-stop // 8)], bitorder="little")
            ids = start + np.flatnonzero(bits[start - 8 * first : stop - 8 * first])
        return ids if self.order is None else np.sort(self.order[ids])


class Piece(NamedTuple):
    """Rows ``[low, high)`` of a table; ``num`` of them are kept."""

    table: int
    low: int
    high: int
    num: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Windows ``[start, start + length)`` over consecutive tables."""

    indices: Sequence[TimeIndex]  # of each table
    starts: IntArray  # ``(num,)`` int64, sorted
    # length, every: window length, and distance between window starts
    length: int
    every: int
    firsts: IntArray  # ``(num + 1,)`` int64: piece offsets of the windows
    # tables, lows, highs, counts: ``(num_pieces,)`` int64, the columns of each :class:`Piece`
    tables: IntArray
    lows: IntArray
    highs: IntArray
    counts: IntArray

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_rows(self) -> IntArray:
        """Number of rows of each window, ``(num,)`` int64."""
        return np.diff(bounds_of(self.counts)[self.firsts])

    def pieces(self, window: int) -> list[Piece]:
        """Return a window's pieces in table order."""
        own = slice(*self.firsts[window : window + 2].tolist())
        columns = (self.tables[own], self.lows[own], self.highs[own], self.counts[own])
        return list(map(Piece, *(column.tolist() for column in columns)))

    def disjoint(self) -> Windows:
        """Return windows with the same starts and no common rows."""
        return _windows(self.indices, self.starts, min(self.length, self.every), self.every)


def index_step(length: int, every: int, usual: int) -> int:
    """Return a bin width that has window starts and ends on bin edges: ``usual`` if that fits."""
    return math.gcd(length, every, usual)


def cut_windows(
    indices: Sequence[TimeIndex], length: int, every: int, *, first: int | None = None, last: int | None = None
) -> Windows:
    """Cut tables into windows that start at multiples of ``every``.

    The first holds the first row of all, the last begins no later than the last one. So do those between ``first`` and
    ``last``, both included, if they are given.
    """
    some = [index for index in indices if len(index.bins)]
    if not some:
        raise ConfigError("there is no row, hence no window")
    low = min(int(index.bins[0]) * index.step for index in some) // every
    high = max((int(index.bins[-1]) + 1) * index.step - 1 for index in some) // every
    low = low if first is None else max(low, -(-first // every))
    high = high if last is None else min(high, last // every)
    if high - low >= _MOST:
        raise ConfigError(
            f"{high - low + 1} windows, of at most {_MOST}: longer ones, from every= on, or a part, by sel="
        )
    if high < low:
        raise ConfigError("no window begins there")
    return _windows(indices, np.arange(low, high + 1, dtype=np.int64) * every, length, every)


def _windows(indices: Sequence[TimeIndex], starts: IntArray, length: int, every: int) -> Windows:
    found = [_pieces(table, index, starts, length) for table, index in enumerate(indices) if len(index.bins)]
    numbers, tables, lows, highs, counts = np.concatenate(found, axis=1)
    order = np.argsort(numbers, kind="stable")
    firsts = np.searchsorted(numbers[order], np.arange(len(starts) + 1)).astype(np.int64)
    rest = (tables[order], lows[order], highs[order], counts[order])
    of = dict(zip(("tables", "lows", "highs", "counts"), rest, strict=True))
    return Windows(indices=indices, starts=starts, length=length, every=every, firsts=firsts, **of)


def _pieces(table: int, index: TimeIndex, starts: IntArray, length: int) -> IntArray:
    """Return window, table, low, high and count of a table's pieces, ``(5, num)``."""
    near = slice(*np.searchsorted(starts, [index.bins[0] * index.step - length, (index.bins[-1] + 1) * index.step]))
    low, high = (np.searchsorted(index.bins, times // index.step) for times in (starts[near], starts[near] + length))
    counts = index.kept_rows[high] - index.kept_rows[low]
    some = np.flatnonzero(counts)
    numbers = some + near.start
    own = (numbers, np.full_like(numbers, table), index.rows[low[some]], index.rows[high[some]], counts[some])
    return np.stack(own).astype(np.int64)
