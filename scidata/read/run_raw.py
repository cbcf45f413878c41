"""Execute reads of raw chunks: bytes into the destination, or through scratch and a strided copy."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from scidata.core.types import BoolArray, ByteArray, IntArray
from scidata.errors import CorruptDataError, ShortReadError
from scidata.plan.spans import MAX_SPAN, MIN_DIRECT, Reads, Spans
from scidata.read.codecs import Scratch
from scidata.read.context import COPY, READ, ByteBuffer, Context, Tally, Target, thread_scratch
from scidata.read.copies import Copies, merge_copies
from scidata.read.pattern_tables import RawTables
from scidata.read.places import Places
from scidata.sources.access.files import files

#: Number of pieces of a read, or of reads, from which NumPy calls pay off.
_MANY = 32
#: Larger reads are not grouped: the cost of a separate copy is small for them.
_MAX_GROUPED = 256 << 10


class RawRun:
    """A plan's raw reads; :meth:`run` may be called from any thread, once per group of reads."""

    def __init__(self, context: Context, reads: Reads, places: Places) -> None:
        self._context, self._reads = context, reads
        tables = context.tables.raw
        if tables is None:
            self._check_sizes(places)
            tables = context.tables.raw = self._make_tables(reads)
        self._tables = tables

    @property
    def costs(self) -> list[int]:
        """Bytes of each group."""
        return self._tables.room

    @property
    def is_whole(self) -> bool:
        """Whether one read of a local file fills the destination."""
        context, tables = self._context, self._tables
        nbytes = math.prod(context.plan.out_shape) * context.out_item
        return not context.is_remote and tables.direct == [True] and tables.single == [slice(0, nbytes)]

    def run(self, groups: Sequence[int], target: Target, tally: Tally) -> None:
        """Do the given groups of reads."""
        tables = self._tables
        nbytes = sum(map(tables.room.__getitem__, groups))
        tally.fetched += nbytes
        tally.decoded += nbytes
        rows = list(map(tables.groups.__getitem__, groups))  # first one of each
        if not all(map(tables.direct.__getitem__, rows)) or not self._context.convert.trivial:
            for group in groups:  # other stages are between
                self._run_one(group, target, tally)
            return
        began = time.perf_counter_ns()
        tally.num_reads += len(rows)
        paths, offset, out, single = target.places.paths, target.places.raw, target.out_view, tables.single
        path_index, read_at_once = tables.path_index, files().read_at_once
        for row in rows:
            # fast path of the common case: Python calls would cost a tenth of a read of 512 KiB
            whole = single[row]
            if whole is None or not read_at_once(paths[path_index[row]], offset[row], out[whole]):
                self._read_direct(row, target, thread_scratch())
        tally.mark(READ, began, nbytes)

    def _run_one(self, group: int, target: Target, tally: Tally) -> None:
        context, tables, scratch = self._context, self._tables, thread_scratch()
        row, nbytes = tables.groups[group], tables.room[group]
        tally.num_reads += tables.groups[group + 1] - row
        now = time.perf_counter_ns()
        if tables.direct[row]:
            self._read_direct(row, target, scratch)
            now = tally.mark(READ, now, nbytes)
            if context.convert.trivial:
                return
            for i in range(tables.bounds[row], tables.bounds[row + 1]):
                context.finish(tables.begin[i], tables.end[i], target, scratch)
        else:
            assert tables.copies is not None
            buffer = scratch.get("read", nbytes)
            self._read_group(row, tables.groups[group + 1], buffer, target)
            now = tally.mark(READ, now, nbytes)
            context.copy(tables.copies, group, buffer, target, scratch)
        tally.mark(COPY, now, nbytes)

    def _read_group(self, first: int, stop: int, buffer: ByteArray, target: Target) -> None:
        place, view, places = self._tables.place, buffer.data, target.places
        if not target.arrived:
            path = places.paths[self._tables.path_index[first]]
            first += files().read_each(path, places.raw[first:stop], map(view.__getitem__, place[first:stop]))
        for row in range(first, stop):  # a read that failed above raises here with the chunk's name
            self._fetch(row, [buffer[place[row]]], target)

    def _fetch(self, row: int, buffers: list[ByteBuffer], target: Target) -> None:
        path, offset = target.places.paths[self._tables.path_index[row]], target.places.raw[row]
        self._context.fetch(("raw", row), path, offset, buffers, functools.partial(self._chunks_of, row), target)

    @functools.cached_property
    def _spans(self) -> Spans:
        spans = self._context.plan.spans
        assert spans is not None
        return spans

    @functools.cached_property
    def _chunk(self) -> IntArray:
        return self._context.plan.boxes.chunk_row[self._spans.box]

    def _check_sizes(self, places: Places) -> None:
        """Check raw chunk sizes, once per pattern, since a pattern fixes them."""
        context, rows = self._context, np.unique(self._chunk)
        shapes = context.layout.chunk_shapes(context.plan.cut.chunks[rows])
        found = context.refs.nbytes[rows]
        expected = np.broadcast_to(shapes.prod(axis=-1) * context.item, len(found))
        for i in np.flatnonzero(found != expected)[:1].tolist():
            kind = ShortReadError if found[i] < expected[i] else CorruptDataError
            raise kind(
                f"{places.where(int(rows[i]))}: it has {found[i]} bytes, but {expected[i]} were expected; "
                "the file is damaged: copy or write it again"
            )

    def _make_tables(self, reads: Reads) -> RawTables:
        spans, context = self._spans, self._context
        offset: IntArray = context.refs.offset[self._chunk] + spans.offset  # first byte of each span in its file
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
        bounds = np.searchsorted(first, reads.bounds)
        direct = spans.direct[reads.bounds[:-1]] & context.convert.in_place
        if not context.is_remote:  # many small pieces are copied faster than read in place
            num = np.diff(bounds)
            wanted = np.add.reduceat(spans.nbytes, reads.bounds[:-1])
            direct &= (wanted >= MIN_DIRECT * num) | ((num < _MANY) & (len(num) < _MANY))
        groups, place = self._group(direct)
        begins, ends = begin[first].tolist(), end[last].tolist()
        return RawTables(
            path_index=reads.path_index.tolist(),
            direct=direct.tolist(),
            single=[
                slice(begins[a], ends[a]) if is_direct and b == a + 1 else None
                for is_direct, a, b in zip(direct.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            ],
            bounds=bounds.tolist(),
            skip=skip[first].tolist(),
            begin=begins,
            end=ends,
            groups=groups.tolist(),
            room=np.add.reduceat(reads.nbytes, groups[:-1]).tolist(),
            place=list(map(slice, place.tolist(), (place + reads.nbytes).tolist())),
            copies=None if direct.all() else self._make_copies(offset, direct, groups, place),
        )

    def _group(self, direct: BoolArray) -> tuple[IntArray, IntArray]:
        """Return the bounds of read groups, and each read's first byte in its group's buffer."""
        reads, num = self._reads, len(direct)
        total = np.cumsum(reads.nbytes)
        before = total - reads.nbytes
        alone = direct | (reads.nbytes > _MAX_GROUPED) | self._context.is_remote
        starts = np.ones(num, np.bool_)
        starts[1:] = alone[1:] | alone[:-1] | (reads.path_index[1:] != reads.path_index[:-1])
        starts[1:] |= before[1:] // MAX_SPAN != before[:-1] // MAX_SPAN
        first = np.flatnonzero(starts)
        groups = np.append(first, num)
        return groups, before - np.repeat(before[first], np.diff(groups))

    def _make_copies(self, offset: IntArray, direct: BoolArray, groups: IntArray, place: IntArray) -> Copies:
        spans, reads = self._spans, self._reads
        source, dest = self._context.box_strides
        read = np.repeat(np.arange(len(reads.offset)), np.diff(reads.bounds))
        rows = np.flatnonzero(~direct[read])
        read, box = read[rows], spans.box[rows]
        return merge_copies(
            read=np.searchsorted(groups, read, side="right") - 1,
            num_reads=len(groups) - 1,
            shape=spans.count[rows],
            source=offset[rows] - reads.offset[read] + place[read],
            source_strides=source[box],
            dest=spans.dest[rows] * self._context.out_item,
            dest_strides=dest[box],
        )

    def _read_direct(self, row: int, target: Target, scratch: Scratch) -> None:
        tables = self._tables
        buffers: list[ByteBuffer] = []
        for i in range(tables.bounds[row], tables.bounds[row + 1]):
            if tables.skip[i]:
                buffers.append(scratch.get("gap", tables.skip[i]))
            buffers.append(target.out_view[tables.begin[i] : tables.end[i]])
        self._fetch(row, buffers, target)

    def _chunks_of(self, row: int, places: Places) -> Iterator[tuple[int, int]]:
        spans = places.plan.spans
        assert spans is not None
        for item in range(int(self._reads.bounds[row]), int(self._reads.bounds[row + 1])):
            chunk = int(self._chunk[item])
            yield chunk, int(places.refs.offset[chunk] + spans.offset[item] + spans.nbytes[item])
