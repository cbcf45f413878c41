"""Run the reads of raw chunks: bytes straight into the destination, or through scratch and a strided copy."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.plan.spans import Reads, Spans
from scidata.read.codecs import Scratch
from scidata.read.context import Context, ReadStats, thread_scratch
from scidata.read.copies import Copies, merge_copies
from scidata.types import IntArray

__all__ = ["RawRun"]


class RawRun:
    """The raw reads of one plan; :meth:`run` may be called from any thread, once per read."""

    def __init__(self, context: Context, spans: Spans, reads: Reads) -> None:
        self._context, self._spans, self._reads = context, spans, reads

    def run(self, row: int) -> ReadStats:
        """Do one read."""
        context, reads, scratch = self._context, self._reads, thread_scratch()
        nbytes = int(reads.nbytes[row])
        if self._direct[row]:
            self._read_direct(row, scratch)
        else:
            buffer = scratch.get("read", nbytes)
            context.fetch(reads, row, [buffer], self._chunk_of)
            context.copy(self._copies, row, buffer, scratch)
        return ReadStats(bytes_fetched=nbytes, bytes_decoded=nbytes, num_reads=1)

    @cached_property
    def _direct(self) -> npt.NDArray[np.bool_]:
        """Say which reads go straight to the destination; the spans of a read agree about it."""
        direct: npt.NDArray[np.bool_] = self._spans.direct[self._reads.bounds[:-1]] & self._context.convert.in_place
        return direct

    @cached_property
    def _offset(self) -> IntArray:
        """First byte of each span in its file."""
        offset: IntArray = self._context.refs.offset[self._chunk] + self._spans.offset
        return offset

    @cached_property
    def _chunk(self) -> IntArray:
        return self._context.plan.boxes.chunk_row[self._spans.box]

    @cached_property
    def _copies(self) -> Copies:
        spans, reads = self._spans, self._reads
        source, dest = self._context.box_strides
        read = np.repeat(np.arange(len(reads.offset)), np.diff(reads.bounds))
        return merge_copies(
            read=read,
            num_reads=len(reads.offset),
            shape=spans.count,
            source=self._offset - reads.offset[read],
            source_strides=source[spans.box],
            dest=spans.dest * self._context.out_item,
            dest_strides=dest[spans.box],
        )

    @cached_property
    def _targets(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Direct spans, joined where they adjoin on disk and in memory.

        Returns
        -------
        bounds, skip, begin, end
            Read ``i`` has targets ``[bounds[i], bounds[i + 1])``: bytes to skip before it, and its bytes in ``out``.
        """
        spans, reads, offset = self._spans, self._reads, self._offset
        begin = spans.dest * self._context.out_item
        end = begin + spans.nbytes
        skip = np.zeros_like(offset)
        skip[1:] = offset[1:] - offset[:-1] - spans.nbytes[:-1]
        skip[reads.bounds[:-1]] = 0
        starts = np.ones(len(offset), np.bool_)
        starts[1:] = (skip[1:] != 0) | (begin[1:] != end[:-1])
        starts[reads.bounds[:-1]] = True
        first = np.flatnonzero(starts)
        last = np.append(first[1:], len(offset)) - 1
        bounds = np.searchsorted(first, reads.bounds)
        return bounds.tolist(), skip[first].tolist(), begin[first].tolist(), end[last].tolist()

    def _read_direct(self, row: int, scratch: Scratch) -> None:
        bounds, skip, begin, end = self._targets
        context, targets = self._context, range(bounds[row], bounds[row + 1])
        buffers: list[Any] = []
        for i in targets:
            if skip[i]:
                buffers.append(scratch.get("gap", skip[i]))
            buffers.append(context.out_view[begin[i] : end[i]])
        context.fetch(self._reads, row, buffers, self._chunk_of)
        for i in targets:
            context.finish(begin[i], end[i], scratch)

    def _chunk_of(self, item: int) -> tuple[int, int]:
        return int(self._chunk[item]), int(self._offset[item] + self._spans.nbytes[item])
