"""A pass over all data of a field: blocks of rows in order, and which rows are one step apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from scidata.core.types import AnyArray, BoolArray, FloatArray, IntArray

#: Bytes of a field held at once in a pass, unless a chunk is larger.
PASS_BYTES = 128 << 20


class FieldPass(Protocol):
    """One rank's owned rows of a field over some samples, without halo and ghosts. Pickles.

    A *row* is one step along the field's sample dim; fields without that dim have one row, or one of each stored
    sample or trajectory. Rows are numbered in order. A tile is a part of each row, where a whole one with the others of
    its chunks would take too much memory.
    """

    name: str
    # dims: of a row; kept: dims along which all rows are alike, for statistics by index along them
    dims: tuple[str, ...]
    kept: tuple[str, ...]
    # dtype, units: as the field is read
    dtype: np.dtype[Any]
    units: str | None
    has_steps: bool  # whether any two rows may be one step apart
    # ``(num_blocks + 1,)`` int64: rows ``[bounds[b], bounds[b + 1])`` are read at once, so that chunks are decoded once
    bounds: IntArray
    is_step: BoolArray  # ``(num_rows,)`` bool: True if a row is one step after the previous row
    # rows that follow the one before them, but not one usual step later: over a gap in time; 0 by default
    num_skipped: int = 0
    num_tiles: int  # tiles of each row; 0 if the rank owns none of the field

    def read(self, tile: int, start: int, stop: int) -> AnyArray:
        """Read a block's rows, ``(stop - start, *row)``, decoded by the data set."""
        raise NotImplementedError

    def places(self, tile: int, dim: str) -> IntArray:
        """Return the indices of a tile's rows along ``dim`` in the whole field; all rows by default."""
        return np.arange(self.size(dim), dtype=np.int64)

    def size(self, dim: str) -> int:
        """Return the number of rows of the whole field along a dim."""
        raise NotImplementedError

    def labels(self, dim: str) -> Sequence[Any] | None:
        """Return row labels as plain numbers or text; None, the default, if there are none."""
        return None

    def span(self) -> tuple[str, str, str] | None:
        """Return the sample dim and the labels of its first and last row; None if there are no labels."""
        return None


def usual_steps(times: FloatArray, is_step: BoolArray) -> BoolArray:
    """Return ``is_step`` without steps over gaps, which differ from the median step by more than half of it.

    So months of 28 to 31 days are steps, and years with a leap day; a missing file is not, nor is a time that comes
    twice. Of two steps in the middle the shorter is the median: of 0, 6, 24, 30 hours, 6 hours are usual.
    """
    steps = np.diff(times, prepend=np.nan)
    among = steps[is_step & (steps != 0)]
    usual = among[np.argsort(np.abs(among))[(len(among) - 1) // 2]] if len(among) else np.nan
    if not np.isfinite(usual):
        return is_step
    return is_step & (np.abs(steps / usual - 1) < 0.5)


def merged_blocks(starts: IntArray, num_rows: int, at_once: int, apart: BoolArray) -> IntArray:
    """Return block bounds with neighbours merged up to ``at_once`` rows.

    ``starts``: first rows of the blocks that have to be read at once, sorted, from 0 on.
    ``apart``: of each, whether it must not be read with the one before it.
    """
    if not num_rows:
        return np.zeros(1, np.int64)
    bounds = [0]
    ends = np.append(starts[1:], num_rows).tolist()
    for start, end, alone in zip(starts.tolist(), ends, apart.tolist(), strict=True):
        if start > bounds[-1] and (alone or end - bounds[-1] > at_once):
            bounds.append(start)
        while end - bounds[-1] > at_once:  # exceeds memory: its chunks are decoded again
            bounds.append(bounds[-1] + at_once)
    if num_rows > bounds[-1]:
        bounds.append(num_rows)
    return np.array(bounds, np.int64)
