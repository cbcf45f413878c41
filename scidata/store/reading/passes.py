"""Passes over all rows of a field of a store, as :mod:`scidata.core.passes` describes them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from scidata.core.bounds import num_rows_of, segments_of_slice
from scidata.core.passes import PASS_BYTES, FieldPass, merged_blocks
from scidata.core.types import Array, BoolArray, IntArray
from scidata.read.threads import ReaderThreads
from scidata.store.format.manifest import FieldInfo
from scidata.store.reading.numbering import Numbering
from scidata.store.reading.part import SamplePart
from scidata.store.reading.rows import RowAccess


class StorePass(FieldPass):
    """One part's rows of one field, over some samples; see :class:`~scidata.core.passes.FieldPass`.

    Parameters
    ----------
    info, dtype, numbering, threads
        The reader's.
    samples
        ``(num,)`` int64. Each time of a stored sample counts once; a field without times once a stored sample.
    part, num_parts, cut
        The number of the part, of how many, and the function that cuts a stored sample.
    """

    def __init__(
        self,
        name: str,
        info: FieldInfo,
        dtype: np.dtype[np.generic],
        *,
        numbering: Numbering,
        samples: IntArray,
        part: int,
        num_parts: int,
        cut: Callable[[int], SamplePart],
        threads: ReaderThreads,
        max_bytes: int = PASS_BYTES,
    ) -> None:
        self.name, self._info, self._dtype, self._numbering = name, info, dtype, numbering
        self._part, self._num_parts, self._cut, self._threads = part, num_parts, cut, threads
        has_times = numbering.sample_dim in info.dims
        self._axis = info.dims.index(str(numbering.sample_dim)) if has_times else None
        self.dims = tuple(d for k, d in enumerate(info.dims) if k != self._axis)
        self.kept = tuple(d for k, d in enumerate(info.dims) if k not in (self._axis, info.entity_dim))
        self.dtype, self.units, self.has_steps = dtype, info.units, has_times
        found = {place if has_times else (place[0], 0) for i in samples.tolist() for place in numbering.times(i)}
        rows = np.array(sorted(found), np.int64).reshape(-1, 2)
        self._stored, self._times = rows[:, 0], rows[:, 1]
        self.is_step = np.zeros(len(rows), np.bool_)
        if has_times:
            self.is_step[1:] = (np.diff(self._stored) == 0) & (np.diff(self._times) == 1)
        apart = np.concatenate([[True], np.diff(self._stored) != 0])[: len(rows)]
        self._cut_tiles(apart, max_bytes)

    def _cut_tiles(self, apart: BoolArray, max_bytes: int) -> None:
        most = max((self._row_bytes(i) for i in np.unique(self._stored).tolist()), default=1)
        self.num_tiles, at_once = 1, max(1, max_bytes // max(1, most))
        num_rows = len(self._stored)
        starts = np.arange(num_rows)
        if self._axis is not None and self._axis > self._info.entity_dim:  # chunks have all times of some rows
            at_once, starts, apart = num_rows, np.flatnonzero(apart), apart[apart]
            longest = int(np.bincount(self._stored).max(initial=0))
            self.num_tiles = max(1, -(-most * longest // max_bytes))
        self.bounds = merged_blocks(starts, num_rows, max(1, at_once), apart)

    def _shape(self, stored: int) -> tuple[int, ...]:
        return self._numbering.store.sample(stored).arrays[self._info.path].shape

    def _row_bytes(self, stored: int) -> int:
        """Return the bytes of one row, about: where parts begin exactly takes reading, which may fail on one rank."""
        shape = self._shape(stored)
        others = math.prod(n for k, n in enumerate(shape) if k != self._axis)
        return -(-others // self._num_parts) * self._dtype.itemsize

    def read(self, tile: int, start: int, stop: int) -> Array:
        """Read rows of a block, ``(stop - start, *row)``."""
        stored, info = int(self._stored[start]), self._info
        first, end = self._cut(stored).owned(info.entity, self._part)
        bounds = [first + (end - first) * k // self.num_tiles for k in (tile, tile + 1)]
        times = [] if self._axis is None else self._numbering.times_at(stored, self._times[start:stop]).tolist()
        others = self._numbering.segments_at(info, stored, times)
        access = RowAccess(self._numbering.store, stored, self._threads.executor())
        starts, stops = (np.array([row], np.int64) for row in bounds)
        plan = access.plan(info.path, starts, stops, dim=info.entity_dim, others=others)
        values = access.run(plan, self._dtype)
        return values[None] if self._axis is None else np.moveaxis(values, self._axis, 0)

    def size(self, dim: str) -> int:
        """Return how many rows the field has along a dim other than its entity's."""
        axis = self._info.dims.index(dim)
        stored = int(self._stored[0]) if len(self._stored) else 0
        return num_rows_of(segments_of_slice(self._numbering.isel.get(dim, slice(None)), self._shape(stored)[axis]))
