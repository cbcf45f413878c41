"""Decoded rows that samples share: each chunk that holds several steps is decoded once for all samples that need it.

A *block* is what one rank needs of the chunks that hold the same steps of a field: all its rows there, halo included,
decoded. Blocks are kept within so many bytes, the least recently used one goes first. Of threads that need the same
block one reads it, the others wait.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, IntArray, Segment
from scidata.grids.parts import Field, Part
from scidata.grids.series import Series
from scidata.plan.array import plan_array
from scidata.read import Job, read_plans
from scidata.read.context import ReadStats
from scidata.read.threads import ReaderThreads
from scidata.sources.access.fetches import run_each

_TRIED = 32  # blocks of each field that are read until it is asked whether they were used enough
_ENOUGH = 0.25  # of their rows: of Blosc chunks, reading one step alone decodes no more than a part
_ALONE = 1024  # samples that are read alone then, until blocks are tried again


def steps_per_block(layout: ArrayLayout, sample_dim: str | None) -> int:
    """Return how many steps a chunk holds that has to be decoded for any of them; 1 where no decoding is shared."""
    if sample_dim not in layout.dims or not (layout.codecs or layout.fallback):
        return 1
    axis = layout.dims.index(str(sample_dim))
    return min(layout.chunks[axis], layout.shape[axis])


class SharedRows:
    """The decoded rows of a reader's fields that are kept for other samples. Thread-safe; pickles empty.

    Parameters
    ----------
    series, fields
        The reader's.
    steps
        Of a sample.
    max_bytes
        Of all blocks that are kept; 0 keeps none.
    """

    def __init__(
        self,
        series: Series,
        fields: Mapping[str, Field],
        *,
        steps: Sequence[int],
        max_bytes: int,
        threads: ReaderThreads,
        allow_missing: bool,
    ) -> None:
        self.max_bytes = max_bytes
        self._series, self._fields, self._steps = series, fields, steps
        self._threads, self._allow_missing = threads, allow_missing
        self._blocks: Cache[npt.NDArray[Any]] = Cache(max_bytes, "lru")
        self._lock = threading.Lock()
        self._num_read = self._alone = 0
        self._surplus = 0.0  # rows that were used, less those that should have been

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept now."""
        return self._blocks.size

    def clear(self) -> None:
        """Let go of all blocks."""
        self._blocks.clear()

    @functools.cached_property
    def steps_per_block(self) -> dict[str, int]:
        """Steps of a block of each field; 1 where samples share none."""
        files, dim = range(len(self._series.sources)), self._series.sample_dim
        return {
            name: max(steps_per_block(self._series.layout_in(i, name), dim) for i in files) for name in self._fields
        }

    def blocks_of(self, rows: IntArray) -> IntArray:
        """Return numbers, from 0 on, of the blocks that rows of all files, one after the other, lie in."""
        bounds = self._series.row_bounds
        files = np.searchsorted(bounds, rows, side="right") - 1
        places = np.stack([files, (rows - bounds[files]) // max(self.steps_per_block.values())])
        numbers: IntArray = np.unique(places, axis=1, return_inverse=True)[1].astype(np.int64)
        return numbers

    def bytes_of_sample(self, part: Part) -> int:
        """Return the bytes of all blocks that one sample may need."""
        return self._bytes(part, lambda size: min(len(self._steps), -(-self._reach // size) + 1))

    def bytes_of_block(self, part: Part) -> int:
        """Return the bytes of all blocks that the samples of one of the longest may need, in any order."""
        longest = max(self.steps_per_block.values())
        return self._bytes(part, lambda size: -(-longest // size) + -(-self._reach // size))

    @property
    def _reach(self) -> int:
        return max(self._steps) - min(self._steps)

    def _bytes(self, part: Part, count: Callable[[int], int]) -> int:
        sizes = {name: size for name, size in self.steps_per_block.items() if size > 1}
        return sum(count(size) * size * self._bytes_of_step(name, part) for name, size in sizes.items())

    def _bytes_of_step(self, name: str, part: Part) -> int:
        shape = part.families[name].out_shape
        return math.prod(shape) // len(self._steps) * self._fields[name].dtype.itemsize

    def fields_of(self, part: Part, out: Mapping[str, npt.NDArray[Any]]) -> tuple[str, ...]:
        """Return the fields to be read by blocks: none where a sample needs more of them than are kept.

        And none for a while where few rows of the last blocks were used, as in a full shuffle.
        """
        if not self.max_bytes or self.bytes_of_sample(part) > self.max_bytes or not self._is_worth_it():
            return ()
        return tuple(
            name for name, size in self.steps_per_block.items() if size > 1 and out[name].shape == part.shapes[name]
        )

    def _is_worth_it(self) -> bool:
        with self._lock:
            if self._alone:
                self._alone -= 1
            elif self._num_read > _TRIED * len(self._fields):
                self._alone = _ALONE if self._surplus < 0 else 0
                self._num_read, self._surplus = 0, 0.0
            return not self._alone

    def read_into(
        self,
        names: Sequence[str],
        places: Sequence[tuple[int, tuple[Segment, ...]]],
        part: Part,
        out: Mapping[str, npt.NDArray[Any]],
        *,
        side_by_side: bool,
    ) -> ReadStats:
        """Copy a sample's rows, ``places`` in the files, of some fields; return what had to be read for it.

        ``side_by_side``: fields on threads of their own, because reads of blocks take round trips.
        """
        copies = [functools.partial(self._copy, name, places, part, out[name]) for name in names]
        found = run_each(copies) if side_by_side else [copy() for copy in copies]
        return sum(itertools.chain.from_iterable(found), start=ReadStats())

    def _copy(
        self, name: str, places: Sequence[tuple[int, tuple[Segment, ...]]], part: Part, out: npt.NDArray[Any]
    ) -> list[ReadStats]:
        axis = self._fields[name].source_dims.index(str(self._series.sample_dim))
        values = np.moveaxis(out.reshape(part.families[name].out_shape), axis, 0)
        stats: list[ReadStats] = []
        size, start, block = self.steps_per_block[name], -1, None
        for i, segments in places:
            start = -1
            for row, place in [(s.start + k * s.step, s.offset + k) for s in segments for k in range(s.count)]:
                if block is None or row - row % size != start:
                    start = row - row % size
                    block = np.moveaxis(self._block(name, i, start, part, stats), axis, 0)
                values[place] = block[row - start]
        return stats

    def _block(self, name: str, i: int, start: int, part: Part, stats: list[ReadStats]) -> npt.NDArray[Any]:
        """Return a block of a file, from its first row on."""
        fresh: list[ReadStats] = []

        def make() -> npt.NDArray[Any]:
            values, took = self._read(name, i, start, part)
            fresh.append(took)
            return values

        key = part.position, name, i, start
        block = self._blocks.get_or_make(key, make, lambda values: values.nbytes, once=True)
        with self._lock:
            self._num_read += len(fresh)
            self._surplus += 1 - _ENOUGH * self.steps_per_block[name] * len(fresh)
        stats += fresh
        return block

    def _read(self, name: str, i: int, start: int, part: Part) -> tuple[npt.NDArray[Any], ReadStats]:
        field, source, layout = self._fields[name], self._series.sources[i], self._series.layout_in(i, name)
        axis, shape = field.source_dims.index(str(self._series.sample_dim)), part.families[name].out_shape
        count = min(self.steps_per_block[name], layout.shape[axis] - start)
        rows = (Segment(start=start, count=count),)
        selection = tuple(rows if d == axis else part.segments[dim] for d, dim in enumerate(field.source_dims))
        plan = plan_array(layout, selection, source.locate, out_shape=(*shape[:axis], count, *shape[axis + 1 :]))
        values = np.empty(plan.out_shape, field.dtype)
        job = Job(plan, source, field.decodings[i], allow_missing=self._allow_missing)
        return values, read_plans([(job, values)], executor=self._threads.executor())
