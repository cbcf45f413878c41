"""Execute reads of encoded chunks: decode into the destination, or into scratch and copy."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import numpy as np

from scidata.core import trace
from scidata.core.types import BoolArray, IntArray
from scidata.errors import ChecksumError, CorruptDataError
from scidata.plan.chunk_tables import EncodedChunks
from scidata.plan.spans import Reads, dest_strides
from scidata.read import blosc
from scidata.read.blosc import Bytes
from scidata.read.codecs import Pipeline, Scratch, check_crc32c, pipeline_of
from scidata.read.context import COPY, DECODE, READ, ByteBuffer, Context, Tally, Target, thread_scratch
from scidata.read.copies import Copies, merge_copies
from scidata.read.pattern_tables import EncodedTables
from scidata.read.places import Places
from scidata.sources.access.files import files

#: Blosc blocks are decoded individually if at most this share of a chunk is wanted and the chunk is large enough.
_PARTIAL_FRACTION = 0.75
_PARTIAL_MIN = 64 << 10

#: For encoded chunks at least this large, only the wanted blocks are read, after the block table: another
#: read costs some microseconds, and over a network a round trip.
_BLOCKWISE_MIN = 256 << 10
_HEAD = 4 << 10  # header and table of a thousand blocks


def decodes_whole(wanted: int, nbytes: int) -> bool:
    """Return True if a Blosc chunk of ``nbytes`` is decoded whole when this many of its bytes are wanted."""
    return wanted > _PARTIAL_FRACTION * nbytes or nbytes < _PARTIAL_MIN


class EncodedRun:
    """A plan's reads of encoded chunks; :meth:`run` may be called from any thread, once per read."""

    def __init__(self, context: Context, chunks: EncodedChunks, reads: Reads, places: Places) -> None:
        self._context, self._chunks, self._reads = context, chunks, reads
        self._path_index, self._bounds = reads.path_index.tolist(), reads.bounds.tolist()
        self._pipelines = self._make_pipelines()
        kinds = set(self._pipelines)
        self._in_place = all(p.is_crc32c for p in kinds)  # decoding only checks, without a decoded copy
        self._is_blosc = all(p.is_blosc for p in kinds)
        refs = context.refs
        self._sums: list[int] | None = None if refs.checksums is None else refs.checksums[chunks.chunk_row].tolist()
        # offset of each chunk in the bytes read, for chunks copied from there
        place = np.array(places.begins, np.int64) if self._in_place else None
        key = None if place is None else place.tobytes()
        self._tables = context.tables.encoded.get_or_make(key, lambda: self._make_tables(place))

    def _make_tables(self, place: IntArray | None) -> EncodedTables:
        context, chunks, reads = self._context, self._chunks, self._reads
        direct = chunks.direct & context.convert.in_place
        total = np.concatenate([[0], np.cumsum(np.where(direct, 0, chunks.nbytes))])
        if place is None:
            place = total[:-1] - np.repeat(total[reads.bounds[:-1]], np.diff(reads.bounds))
        few = (chunks.wanted * context.item <= _PARTIAL_FRACTION * chunks.nbytes) & (chunks.nbytes >= _PARTIAL_MIN)
        box_source = self._make_box_source()
        return EncodedTables(
            direct=direct.tolist(),
            dest=(chunks.dest * context.out_item).tolist(),
            slot=place.tolist(),
            room=(total[reads.bounds[1:]] - total[reads.bounds[:-1]]).tolist(),
            few=few.tolist(),
            box_source=box_source,
            copies=None if direct.all() else self._make_copies(np.flatnonzero(~direct), box_source, place),
        )

    def _make_pipelines(self) -> list[Pipeline]:
        chunks, skipped = self._chunks, self._context.refs.skipped_codecs
        masks = [0] * len(chunks.nbytes) if skipped is None else skipped[chunks.chunk_row].tolist()
        keys, codecs = list(zip(masks, chunks.nbytes.tolist(), strict=True)), self._context.layout.codecs
        made = {key: pipeline_of(codecs, *key) for key in set(keys)}
        return [made[key] for key in keys]

    def run(self, row: int, target: Target, tally: Tally) -> None:
        """Do one read.

        Chunks go one of three ways: of large Blosc chunks only the wanted blocks are read; chunks that only carry a
        checksum are read straight into place; of all others the bytes are read, then decoded. A chunk that is wanted
        whole and lies in the destination as it is stored is decoded there (``direct``); the others are decoded into
        scratch, from where the wanted boxes are copied.
        """
        context, tables, places, scratch = self._context, self._tables, target.places, thread_scratch()
        first, stop, nbytes = self._bounds[row], self._bounds[row + 1], places.nbytes[row]
        if not nbytes:  # the whole file, in its actual size
            data = target.arrived["encoded", row]
            nbytes = 0 if isinstance(data, Exception) else len(data)
            assert isinstance(places.ends, list)
            places.ends[first] = nbytes
        items, few, direct = range(first, stop), tables.few[first:stop], tables.direct[first:stop]
        if all(few) and not context.is_remote and all(self._reads_blocks(i, places) for i in items):
            self._run_blocks(row, items, target, scratch, tally)
            return
        tally.fetched += nbytes
        tally.num_reads += 1
        if self._in_place:
            self._read_checked(row, items, target, scratch, tally)
            return
        now = time.perf_counter_ns()
        buffer = scratch.get("read", nbytes)
        self._fetch(row, [buffer.data], target)
        now = tally.mark(READ, now, nbytes)
        values = scratch.get("values", tables.room[row])
        with trace.decode_range():
            if self._is_blosc and not any(few) and not any(direct):
                decoded = self._decode_blosc(items, buffer, values, tables.slot, places)
            elif self._is_blosc and all(direct) and context.convert.trivial:
                decoded = self._decode_blosc(items, buffer, target.out_bytes, tables.dest, places)
            else:
                decoded = self._decode_each(items, buffer, values, target, scratch)
        now = tally.mark(DECODE, now, decoded)
        tally.decoded += decoded
        if tables.copies is not None:
            context.copy(tables.copies, row, values, target, scratch)
            tally.mark(COPY, now, decoded)

    def _fetch(self, row: int, buffers: list[ByteBuffer], target: Target, skip: int = 0) -> None:
        """Read one read's bytes from ``skip`` on."""
        path, offset = target.places.paths[self._path_index[row]], target.places.offset[row] + skip
        if target.arrived or not files().read_at_once(path, offset, *buffers):
            chunks = functools.partial(self._chunks_of, row)
            self._context.fetch(("encoded", row), path, offset, buffers, chunks, target)

    def _decode_blosc(self, items: range, buffer: Bytes, into: Bytes, place: list[int], places: Places) -> int:
        """Decode whole, possibly small, chunks in the fewest steps."""
        decoder, pipelines, begin, end = blosc.Decoder(buffer, into), self._pipelines, places.begins, places.ends
        decoded = 0
        for i in items:
            nbytes = pipelines[i].nbytes
            try:
                decoder.decode(begin[i], end[i], place[i], nbytes)
            except CorruptDataError as e:
                raise self._named(i, e, places) from e
            decoded += nbytes
        return decoded

    def _decode_each(self, items: range, buffer: Bytes, values: Bytes, target: Target, scratch: Scratch) -> int:
        decoded, places = 0, target.places
        for i in items:
            try:
                decoded += self._decode(i, buffer[places.begins[i] : places.ends[i]], values, target, scratch)
            except CorruptDataError as e:
                raise self._named(i, e, places) from e
        return decoded

    def _decode(self, i: int, data: Bytes, values: Bytes, target: Target, scratch: Scratch) -> int:
        """Decode one chunk into place; return the number of decoded bytes."""
        context, tables, pipeline = self._context, self._tables, self._pipelines[i]
        if tables.direct[i]:
            begin = tables.dest[i]
            end = begin + pipeline.nbytes
            pipeline.decode(data, target.out_bytes[begin:end], scratch)
            context.finish(begin, end, target, scratch)
        else:
            dest = values[tables.slot[i] : tables.slot[i] + pipeline.nbytes]
            if tables.few[i] and pipeline.is_blosc:
                header = blosc.read_header(data, dest.size)
                return blosc.decode_blocks(data, header, self._needed_blocks(i, header), dest)
            pipeline.decode(data, dest, scratch)
        return pipeline.nbytes

    def _read_checked(self, row: int, items: range, target: Target, scratch: Scratch, tally: Tally) -> None:
        """Read chunks with only a checksum: whole ones straight into place, with checksums beside."""
        context, tables, places = self._context, self._tables, target.places
        begins, ends, now = places.begins, places.ends, time.perf_counter_ns()
        sums, values = scratch.get("sums", 4 * len(items)), scratch.get("read", places.nbytes[row])
        out, aside, beside = target.out_view, values.data, sums.data
        buffers: list[ByteBuffer] = []
        bodies: list[memoryview] = []
        at = 0
        for k, i in enumerate(items):
            begin, size = begins[i], self._pipelines[i].nbytes
            if begin > at:
                buffers.append(scratch.get("gap", begin - at))
            at = ends[i]
            if at - begin != size + 4:
                error = CorruptDataError(f"it has {at - begin} bytes, but {size + 4} were expected")
                raise self._named(i, error, places)
            start = tables.dest[i] if tables.direct[i] else begin
            body = (out if tables.direct[i] else aside)[start : start + size]
            bodies.append(body)
            buffers += (body, beside[4 * k : 4 * k + 4])
        self._fetch(row, buffers, target)
        now = tally.mark(READ, now, at)
        decoded = 0
        found = sums.view("<u4").tolist()
        for i, body, stored in zip(items, bodies, found, strict=True):
            try:
                check_crc32c(body, stored)
            except CorruptDataError as e:
                raise self._named(i, e, places) from e
            decoded += len(body)
            if tables.direct[i]:
                context.finish(tables.dest[i], tables.dest[i] + len(body), target, scratch)
        if self._sums is not None and found != self._sums[items.start : items.stop]:  # sound, but not these chunks
            i, carried = next((i, crc) for i, crc in zip(items, found, strict=True) if crc != self._sums[i])
            message = (
                f"carries the crc32c checksum {carried:#010x}, but {self._sums[i]:#010x} was recorded for it: the "
                "bytes of another chunk, array or sample lie in its place"
            )
            raise self._named(i, ChecksumError(message), places)
        now = tally.mark(DECODE, now, decoded)
        tally.decoded += decoded
        if tables.copies is not None:
            context.copy(tables.copies, row, values, target, scratch)
            tally.mark(COPY, now, decoded)

    def _make_box_source(self) -> IntArray:
        plan, (strides, _) = self._context.plan, self._context.box_strides
        step = plan.boxes.gather(plan.pieces, "step")
        return (plan.boxes.gather(plan.pieces, "start") * (strides // step)).sum(axis=1)

    def _make_copies(self, copied: IntArray, box_source: IntArray, place: IntArray) -> Copies:
        """Return the copies for the chunks ``copied``, in read order."""
        context, reads = self._context, self._reads
        plan, (source_strides, strides) = context.plan, context.box_strides
        bounds, rows = plan.boxes.bounds, self._chunks.chunk_row[copied]
        count = bounds[rows + 1] - bounds[rows]
        item = np.repeat(copied, count)
        box = np.repeat(bounds[rows], count) + np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
        to = dest_strides(plan.out_shape) * context.out_item
        read = np.repeat(np.arange(len(reads.offset)), np.diff(reads.bounds))
        return merge_copies(
            read=read[item],
            num_reads=len(reads.offset),
            shape=plan.boxes.gather(plan.pieces, "count", box),
            source=box_source[box] + place[item],
            source_strides=source_strides[box],
            dest=(plan.boxes.gather(plan.pieces, "dest", box) * to).sum(axis=1),
            dest_strides=strides[box],
        )

    def _reads_blocks(self, i: int, places: Places) -> bool:
        """Return True if reading only a chunk's wanted Blosc blocks pays off."""
        return self._pipelines[i].is_blosc and places.ends[i] - places.begins[i] >= _BLOCKWISE_MIN

    def _run_blocks(self, row: int, items: range, target: Target, scratch: Scratch, tally: Tally) -> None:
        """Do one read of chunks with only some blocks read and decoded."""
        values = scratch.get("values", self._tables.room[row])
        for i in items:
            slot = self._tables.slot[i]
            try:
                self._read_blocks(row, i, values[slot : slot + self._pipelines[i].nbytes], target, scratch, tally)
            except CorruptDataError as e:
                raise self._named(i, e, target.places) from e
        if self._tables.copies is not None:
            now = time.perf_counter_ns()
            self._context.copy(self._tables.copies, row, values, target, scratch)
            tally.mark(COPY, now, values.size)

    def _read_blocks(self, row: int, i: int, dest: Bytes, target: Target, scratch: Scratch, tally: Tally) -> None:
        """Read one chunk's block table, then the wanted blocks, each into its place in a shared buffer."""
        now = time.perf_counter_ns()
        begin = target.places.begins[i]
        encoded = target.places.ends[i] - begin
        data = scratch.get("read", encoded)
        ranges = [[0, _HEAD]]

        def fetch(start: int, stop: int) -> None:
            self._fetch(row, [data.data[start:stop]], target, skip=begin + start)

        fetch(0, _HEAD)
        header = blosc.read_header(data[:_HEAD], dest.size, encoded=encoded)
        read = _HEAD
        if blosc.table_nbytes(header) > read:
            ranges.append([read, blosc.table_nbytes(header)])
            fetch(*ranges[-1])
            read = ranges[-1][1]
        needed = self._needed_blocks(i, header)
        for start, stop in blosc.block_ranges(data, header, needed, encoded):
            if stop > read:
                ranges.append([max(start, read), stop])
                fetch(*ranges[-1])
        fetched = sum(stop - start for start, stop in ranges)
        tally.fetched += fetched
        tally.num_reads += len(ranges)
        now = tally.mark(READ, now, fetched)
        with trace.decode_range():
            decoded = blosc.decode_blocks(data, header, needed, dest)
        tally.mark(DECODE, now, decoded)
        tally.decoded += decoded

    def _needed_blocks(self, i: int, header: blosc.ChunkHeader) -> BoolArray:
        """Return the Blosc blocks of a chunk with a wanted element: ``(num_blocks,)`` bool."""
        known = self._tables.blocks.get((i, header.blocksize))
        if known is not None:
            return known
        context, row = self._context, int(self._chunks.chunk_row[i])
        needed = np.zeros(header.num_blocks, np.bool_)
        boxes, pieces = context.plan.boxes, context.plan.pieces
        part = slice(int(boxes.bounds[row]), int(boxes.bounds[row + 1]))
        shapes = boxes.gather(pieces, "count", part).tolist()
        strides = context.box_strides[0][part].tolist()
        for shape, steps, offset in zip(shapes, strides, self._tables.box_source[part].tolist(), strict=True):
            _mark_blocks(needed, header.blocksize, context.item, shape, offset, steps)
        blosc.add_neighbour(needed, header)
        self._tables.blocks[i, header.blocksize] = needed
        return needed

    def _chunks_of(self, row: int, places: Places) -> Iterator[tuple[int, int]]:
        refs = places.refs
        for chunk in self._chunks.chunk_row[self._bounds[row] : self._bounds[row + 1]].tolist():
            yield chunk, int(refs.offset[chunk] + refs.nbytes[chunk])

    def _named(self, item: int, error: CorruptDataError, places: Places) -> CorruptDataError:
        where = places.where(int(self._chunks.chunk_row[item]))
        return type(error)(f"{where}: {error}; the file is damaged: copy or write it again")


def _mark_blocks(
    needed: BoolArray, blocksize: int, item: int, shape: list[int], offset: int, strides: list[int]
) -> None:
    """Mark the blocks that a strided box of a chunk touches."""
    extent = item
    outer: list[tuple[int, int]] = []
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n == 1:
            continue
        if not outer and stride - extent < blocksize:  # no whole block fits between two rows
            extent += (n - 1) * stride
        else:
            outer.append((stride, n))
    starts = np.array([offset], np.int64)
    for stride, n in outer:
        starts = (starts[:, None] + stride * np.arange(n)).reshape(-1)
    first, last = starts // blocksize, (starts + extent - 1) // blocksize
    edges = np.bincount(first, minlength=len(needed) + 1) - np.bincount(last + 1, minlength=len(needed) + 1)
    needed |= np.cumsum(edges)[:-1] > 0
