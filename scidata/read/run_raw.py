"""Run the reads of raw chunks: bytes straight into the destination, or through scratch and a strided copy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scidata._files import files
from scidata.plan.spans import Reads, Spans
from scidata.read.codecs import Scratch
from scidata.read.context import COPY, READ, Context, Tally, thread_scratch
from scidata.read.copies import Copies, merge_copies
from scidata.types import IntArray

__all__ = ["RawRun"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tables:
    """Where the reads of a pattern land; lists, because single items of arrays are slow to get.

    Attributes
    ----------
    path_index, nbytes
        Of each read.
    direct
        Which reads go straight to the destination; the spans of a read agree about it.
    single
        The bytes of ``out`` that a direct read fills, where they are one run; else None.
    bounds, skip, begin, end
        Direct spans, joined where they adjoin on disk and in memory: read ``i`` has ``[bounds[i], bounds[i + 1])``,
        with bytes to skip before each, and its bytes in ``out``.
    copies
        For the other reads.
    """

    path_index: list[int]
    nbytes: list[int]
    direct: list[bool]
    single: list[slice | None]
    bounds: list[int]
    skip: list[int]
    begin: list[int]
    end: list[int]
    copies: Copies | None


class RawRun:
    """The raw reads of one plan; :meth:`run` may be called from any thread, once for each read."""

    def __init__(self, context: Context, reads: Reads) -> None:
        self._context, self._reads = context, reads
        self._tables = context.plan.pattern.memo.get(("raw", *context.kind), self._make_tables)
        self._offset = reads.offset.tolist()

    def run(self, rows: Sequence[int], tally: Tally) -> None:
        """Do some reads."""
        tables = self._tables
        nbytes = sum(map(tables.nbytes.__getitem__, rows))
        tally.fetched += nbytes
        tally.decoded += nbytes
        tally.num_reads += len(rows)
        if not all(map(tables.direct.__getitem__, rows)) or not self._context.convert.trivial:
            for row in rows:  # other stages lie between
                self._run_one(row, tally)
            return
        began = time.perf_counter_ns()
        paths, path_index, out, single = (
            self._context.paths, tables.path_index, self._context.out_view, tables.single,
        )  # fmt: skip
        read_at_once = files().read_at_once
        for row in rows:
            # the common case without a layer between: Python's calls would cost a tenth of a read of 512 KiB
            whole = single[row]
            if whole is None or not read_at_once(paths[path_index[row]], self._offset[row], out[whole]):
                self._read_direct(row, thread_scratch())
        tally.mark(READ, began, nbytes)

    def _run_one(self, row: int, tally: Tally) -> None:
        context, scratch, nbytes = self._context, thread_scratch(), self._tables.nbytes[row]
        now = time.perf_counter_ns()
        if self._tables.direct[row]:
            self._read_direct(row, scratch)
            now = tally.mark(READ, now, nbytes)
            if context.convert.trivial:
                return
            for i in range(self._tables.bounds[row], self._tables.bounds[row + 1]):
                context.finish(self._tables.begin[i], self._tables.end[i], scratch)
        else:
            assert self._tables.copies is not None
            buffer = scratch.get("read", nbytes)
            context.fetch(self._reads, row, [buffer], self._chunk_of)
            now = tally.mark(READ, now, nbytes)
            context.copy(self._tables.copies, row, buffer, scratch)
        tally.mark(COPY, now, nbytes)

    @cached_property
    def _spans(self) -> Spans:
        spans = self._context.plan.spans
        assert spans is not None
        return spans

    @cached_property
    def _chunk(self) -> IntArray:
        return self._context.plan.boxes.chunk_row[self._spans.box]

    def _make_tables(self) -> _Tables:
        spans, reads, context = self._spans, self._reads, self._context
        offset: IntArray = context.refs.offset[self._chunk] + spans.offset  # first byte of each span in its file
        direct = (spans.direct[reads.bounds[:-1]] & context.convert.in_place).tolist()
        begin = spans.dest * context.out_item
        end = begin + spans.nbytes
        skip = np.zeros_like(offset)
        skip[1:] = offset[1:] - offset[:-1] - spans.nbytes[:-1]
        skip[reads.bounds[:-1]] = 0
        starts = np.ones(len(offset), np.bool_)
        starts[1:] = (skip[1:] != 0) | (begin[1:] != end[:-1])
        starts[reads.bounds[:-1]] = True
        first = np.flatnonzero(starts)
        last = np.append(first[1:], len(offset)) - 1
        bounds = np.searchsorted(first, reads.bounds).tolist()
        begins, ends = begin[first].tolist(), end[last].tolist()
        return _Tables(
            path_index=reads.path_index.tolist(),
            nbytes=reads.nbytes.tolist(),
            direct=direct,
            single=[
                slice(begins[a], ends[a]) if is_direct and b == a + 1 else None
                for is_direct, a, b in zip(direct, bounds[:-1], bounds[1:], strict=True)
            ],
            bounds=bounds,
            skip=skip[first].tolist(),
            begin=begins,
            end=ends,
            copies=None if all(direct) else self._make_copies(offset),
        )

    def _make_copies(self, offset: IntArray) -> Copies:
        spans, reads = self._spans, self._reads
        source, dest = self._context.box_strides
        read = np.repeat(np.arange(len(reads.offset)), np.diff(reads.bounds))
        return merge_copies(
            read=read,
            num_reads=len(reads.offset),
            shape=spans.count,
            source=offset - reads.offset[read],
            source_strides=source[spans.box],
            dest=spans.dest * self._context.out_item,
            dest_strides=dest[spans.box],
        )

    def _read_direct(self, row: int, scratch: Scratch) -> None:
        tables, context = self._tables, self._context
        targets = range(tables.bounds[row], tables.bounds[row + 1])
        buffers: list[Any] = []
        for i in targets:
            if tables.skip[i]:
                buffers.append(scratch.get("gap", tables.skip[i]))
            buffers.append(context.out_view[tables.begin[i] : tables.end[i]])
        context.fetch(self._reads, row, buffers, self._chunk_of)

    def _chunk_of(self, item: int) -> tuple[int, int]:
        chunk = int(self._chunk[item])
        return chunk, int(self._context.refs.offset[chunk] + self._spans.offset[item] + self._spans.nbytes[item])
