"""Run the reads of one plan into one destination: the inner loops of the reader.

Everything per chunk is computed for all chunks at once with NumPy beforehand; what is left in the loops is one
``preadv`` per read, one decode per chunk and one copy per box that is not already in its place.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata import _blosc
from scidata._convert import Converter
from scidata._files import files
from scidata._pieces import slice_of
from scidata._spans import Reads, chunk_shapes, dest_strides, element_strides
from scidata.codecs import Pipeline, Scratch, check_crc32c, largest_encoded
from scidata.errors import ChecksumError, CorruptDataError, MissingChunkError, ShortReadError
from scidata.plan import ArrayPlan
from scidata.types import ChunkRefs, Decoding, IntArray, Source

__all__ = ["Execution", "ReadStats", "Task"]

#: Blosc blocks are decoded alone where at most this part of a chunk is wanted, and the chunk is worth the bookkeeping.
_PARTIAL_FRACTION = 0.75
_PARTIAL_MIN = 64 << 10

_thread = threading.local()


def _scratch() -> Scratch:
    """Return this thread's buffers; they live as long as the thread, since fresh pages cost more than the read."""
    scratch: Scratch | None = getattr(_thread, "scratch", None)
    if scratch is None:
        scratch = _thread.scratch = Scratch()
    return scratch


@dataclass(frozen=True, kw_only=True)
class ReadStats:
    """What a read did: bytes read from files, bytes that came out of decoding, ranged reads, chunks."""

    bytes_fetched: int = 0
    bytes_decoded: int = 0
    num_reads: int = 0
    num_chunks: int = 0

    def __add__(self, other: ReadStats) -> ReadStats:
        return ReadStats(
            bytes_fetched=self.bytes_fetched + other.bytes_fetched,
            bytes_decoded=self.bytes_decoded + other.bytes_decoded,
            num_reads=self.num_reads + other.num_reads,
            num_chunks=self.num_chunks + other.num_chunks,
        )


#: A unit of work: which table ("span", "encoded", "box") and which row.
Task = tuple[str, int]


@dataclass(frozen=True)
class _Copies:
    """Strided copies from a buffer to the destination, as Python values: indexing NumPy arrays one by one is slow."""

    shape: list[tuple[int, ...]]
    source_offset: list[int]
    source_strides: list[tuple[int, ...]]
    dest_offset: list[int]
    dest_strides: list[tuple[int, ...]]


class Execution:
    """One plan, one destination. Tasks may run on any threads, each task once."""

    def __init__(
        self,
        plan: ArrayPlan,
        out: npt.NDArray[Any],
        *,
        source: Source,
        decoding: Decoding | None,
    ) -> None:
        self.plan, self.source = plan, source
        self.layout = plan.layout
        self.convert = Converter(plan.layout, decoding, out.dtype)
        self._out = out.reshape(-1)
        self._out_bytes: npt.NDArray[np.uint8] = self._out.view(np.uint8) if out.size else np.empty(0, np.uint8)
        self._out_view = self._out_bytes.data
        self._item, self._out_item = plan.layout.dtype.itemsize, out.dtype.itemsize
        self._pipelines: dict[tuple[int, int], Pipeline] = {}

    # -- what there is to do -------------------------------------------------------------------------------------

    def tasks(self) -> tuple[list[Task], IntArray]:
        """Return the tasks and the bytes that each moves or decodes."""
        plan = self.plan
        if self.layout.fallback:
            sizes = plan.boxes.gather(plan.pieces, "count").prod(axis=1) * self._item
            return [("box", i) for i in range(len(sizes))], sizes
        tasks: list[Task] = []
        costs = [np.empty(0, np.int64)]
        if plan.span_reads is not None:
            tasks += [("span", i) for i in range(len(plan.span_reads.nbytes))]
            costs.append(plan.span_reads.nbytes)
        if plan.encoded_reads is not None and plan.encoded is not None:
            tasks += [("encoded", i) for i in range(len(plan.encoded_reads.nbytes))]
            costs.append(np.add.reduceat(plan.encoded.nbytes, plan.encoded_reads.bounds[:-1]))
        return tasks, np.concatenate(costs)

    def run(self, task: Task) -> ReadStats:
        """Do one task."""
        kind, row = task
        if kind == "span":
            return self._run_spans(row)
        return self._run_encoded(row) if kind == "encoded" else self._run_box(row)

    # -- names for messages --------------------------------------------------------------------------------------

    def _where(self, chunk_row: int) -> str:
        chunk = tuple(self.plan.chunks[chunk_row].tolist())
        return f"{self.layout.store}: field {self.layout.name!r}, chunk {chunk}"

    def _path(self, path_index: int) -> str:
        return self._refs.paths[path_index]

    @cached_property
    def _refs(self) -> ChunkRefs:
        assert self.plan.refs is not None
        return self.plan.refs

    def check(self, *, allow_missing: bool) -> None:
        """Check what the places of the chunks say by themselves, before anything is read.

        Raises
        ------
        MissingChunkError, ShortReadError, CorruptDataError
        """
        plan = self.plan
        if len(plan.absent) and not allow_missing:
            more = f" (and {len(plan.absent) - 1} more)" if len(plan.absent) > 1 else ""
            raise MissingChunkError(
                f"{self._where(int(plan.absent[0]))}: the store does not have it{more}; copy the store again, or "
                "give allow_missing=True if absent chunks stand for the fill value"
            )
        if plan.spans is not None:
            rows = np.unique(plan.boxes.chunk_row[plan.spans.box])
            expected = self._chunk_nbytes(rows)
            found = self._refs.nbytes[rows]
            for i in np.flatnonzero(found != expected)[:1].tolist():
                kind = ShortReadError if found[i] < expected[i] else CorruptDataError
                raise kind(
                    f"{self._where(int(rows[i]))}: it has {found[i]} bytes, but {expected[i]} were expected; "
                    "the file is damaged: copy or write it again"
                )
        if plan.encoded is not None:
            self._check_encoded(plan.encoded.chunk_row, plan.encoded.nbytes)

    def _chunk_nbytes(self, rows: IntArray) -> IntArray:
        shapes = chunk_shapes(self.layout, self.plan.chunks[rows])
        return np.broadcast_to(shapes.prod(axis=1) * self._item, (len(rows),))

    def _check_encoded(self, rows: IntArray, decoded: IntArray) -> None:
        found = self._refs.nbytes[rows]
        for i in np.flatnonzero(found > 2 * decoded + largest_encoded(0))[:1].tolist():
            raise CorruptDataError(
                f"{self._where(int(rows[i]))}: {found[i]} encoded bytes for {decoded[i]} decoded ones make no sense; "
                "the store's index is damaged: copy or write it again"
            )

    # -- absent chunks and arrays that only their own library reads ---------------------------------------------

    def fill_absent(self) -> None:
        """Write the fill value where chunks are absent."""
        plan = self.plan
        if not len(plan.absent):
            return
        fill = self.layout.fill_value if self.layout.fill_value is not None else np.zeros((), self.layout.dtype)
        raw = fill.astype(self.layout.dtype).reshape(1).view(self.convert.stored)
        out = self._out.reshape(plan.out_shape)
        value = np.empty(1, out.dtype)
        self.convert.copy(value, raw, _scratch())
        for row in plan.absent.tolist():
            for box in range(int(plan.boxes.bounds[row]), int(plan.boxes.bounds[row + 1])):
                out[self._dest_slices(box)] = value[0]

    def _dest_slices(self, box: int) -> tuple[slice, ...]:
        return tuple(
            slice_of(int(p.dest[i]), int(p.count[i]), int(p.sign[i]))
            for p, i in zip(self.plan.pieces, self.plan.boxes.piece[box].tolist(), strict=True)
        )

    def _run_box(self, box: int) -> ReadStats:
        plan, layout = self.plan, self.layout
        place = []
        for p, i, chunk in zip(plan.pieces, plan.boxes.piece[box].tolist(), layout.chunks, strict=True):
            start, step = int(p.chunks[p.chunk_row[i]]) * chunk + int(p.start[i]), int(p.step[i])
            place.append(slice(start, start + (int(p.count[i]) - 1) * step + 1, step))
        piece = self._out.reshape(plan.out_shape)[self._dest_slices(box)]
        nbytes = piece.size * self._item
        scratch = _scratch()
        raw = scratch.get("read", nbytes).view(layout.dtype).reshape(piece.shape)
        self.source.read_box(layout, tuple(place), raw)
        self.convert.copy(piece, raw.view(self.convert.stored), scratch)
        return ReadStats(bytes_fetched=nbytes, bytes_decoded=nbytes, num_reads=1, num_chunks=1)

    # -- raw chunks ----------------------------------------------------------------------------------------------

    @cached_property
    def _box_tables(self) -> tuple[IntArray, IntArray]:
        """Strides in bytes of every box, in its chunk and in the destination: ``(num_boxes, ndim)`` each."""
        plan = self.plan
        shapes = chunk_shapes(self.layout, plan.chunks)
        strides = element_strides(shapes, self.layout.axis_order) * self._item
        if len(shapes) > 1:
            strides = strides[plan.boxes.chunk_row]
        to = dest_strides(plan.out_shape) * self._out_item
        return (
            strides * plan.boxes.gather(plan.pieces, "step"),
            to * plan.boxes.gather(plan.pieces, "sign"),
        )

    @cached_property
    def _span_copies(self) -> _Copies:
        assert self.plan.spans is not None
        spans, reads = self.plan.spans, self._span_reads
        source, dest = self._box_tables
        chunk = self.plan.boxes.chunk_row[spans.box]
        read = np.repeat(reads.offset, np.diff(reads.bounds))
        return _Copies(
            shape=_tuples(spans.count),
            source_offset=(self._refs.offset[chunk] + spans.offset - read).tolist(),
            source_strides=_tuples(source[spans.box]),
            dest_offset=(spans.dest * self._out_item).tolist(),
            dest_strides=_tuples(dest[spans.box]),
        )

    @cached_property
    def _span_reads(self) -> Reads:
        assert self.plan.span_reads is not None
        return self.plan.span_reads

    @cached_property
    def _span_targets(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Direct spans, joined where they adjoin on disk and in memory.

        Returns
        -------
        bounds, skip, begin, end
            Read ``i`` has targets ``[bounds[i], bounds[i + 1])``: bytes to skip before it, and its bytes in ``out``.
        """
        assert self.plan.spans is not None
        spans, reads = self.plan.spans, self._span_reads
        offset = self._refs.offset[self.plan.boxes.chunk_row[spans.box]] + spans.offset
        begin = spans.dest * self._item
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

    @cached_property
    def _direct_reads(self) -> list[bool]:
        """Say which reads of raw chunks go straight to the destination; spans of a read agree about it."""
        assert self.plan.spans is not None
        return (self.plan.spans.direct[self._span_reads.bounds[:-1]] & self.convert.in_place).tolist()

    def _run_spans(self, row: int) -> ReadStats:
        reads, scratch = self._span_reads, _scratch()
        nbytes = int(reads.nbytes[row])
        chunks = int(reads.bounds[row + 1] - reads.bounds[row])
        if self._direct_reads[row]:
            self._read_direct(row, scratch)
        else:
            buffer = scratch.get("read", nbytes)
            self._fetch(reads, row, [buffer], self._span_chunk)
            for i in range(int(reads.bounds[row]), int(reads.bounds[row + 1])):
                self._copy(self._span_copies, i, buffer, scratch)
        return ReadStats(bytes_fetched=nbytes, bytes_decoded=nbytes, num_reads=1, num_chunks=chunks)

    def _read_direct(self, row: int, scratch: Scratch) -> None:
        bounds, skip, begin, end = self._span_targets
        view, targets = self._out_view, range(bounds[row], bounds[row + 1])
        buffers: list[Any] = []
        for i in targets:
            if skip[i]:
                buffers.append(scratch.get("gap", skip[i]))
            buffers.append(view[begin[i] : end[i]])
        self._fetch(self._span_reads, row, buffers, self._span_chunk)
        if not self.convert.trivial:
            for i in targets:
                self.convert.finish(self._out[begin[i] // self._out_item : end[i] // self._out_item], scratch)

    def _span_chunk(self, item: int) -> tuple[int, int]:
        """Return the chunk row of a span and the end of its bytes in the file."""
        assert self.plan.spans is not None
        spans = self.plan.spans
        chunk = int(self.plan.boxes.chunk_row[spans.box[item]])
        return chunk, int(self._refs.offset[chunk] + spans.offset[item] + spans.nbytes[item])

    def _copy(self, copies: _Copies, i: int, buffer: npt.NDArray[np.uint8], scratch: Scratch) -> None:
        shape = copies.shape[i]
        raw: npt.NDArray[Any] = np.ndarray(
            shape, self.convert.stored, buffer, copies.source_offset[i], copies.source_strides[i]
        )
        piece: npt.NDArray[Any] = np.ndarray(
            shape, self.convert.dtype, self._out_bytes, copies.dest_offset[i], copies.dest_strides[i]
        )
        self.convert.copy(piece, raw, scratch)

    def _fetch(self, reads: Reads, row: int, buffers: list[Any], chunk_of: Any) -> None:
        path, offset = self._path(int(reads.path_index[row])), int(reads.offset[row])
        try:
            files().read_into(path, offset, buffers)
        except FileNotFoundError as e:
            chunk, _ = chunk_of(int(reads.bounds[row]))
            raise MissingChunkError(
                f"{self._where(chunk)}: {path} is not there; it was there when the store was opened: copy it again"
            ) from e
        except ShortReadError as e:
            size = files().size(path)
            items = range(int(reads.bounds[row]), int(reads.bounds[row + 1]))
            chunk = next((c for c, end in map(chunk_of, items) if end > size), chunk_of(items[0])[0])
            raise ShortReadError(f"{self._where(chunk)}: {e}") from e

    # -- encoded chunks ------------------------------------------------------------------------------------------

    @cached_property
    def _encoded_tables(self) -> tuple[list[int], list[int], list[int], list[bool], list[int], list[Pipeline]]:
        """Chunk row, begin and end in the read, straight to the destination or not, destination byte, pipeline."""
        assert self.plan.encoded is not None
        assert self.plan.encoded_reads is not None
        table, reads = self.plan.encoded, self.plan.encoded_reads
        begin = self._refs.offset[table.chunk_row] - np.repeat(reads.offset, np.diff(reads.bounds))
        end = begin + self._refs.nbytes[table.chunk_row]
        direct = table.direct & self.convert.in_place
        skipped = self._refs.skipped_codecs
        if skipped is None and len(table.nbytes) and (table.nbytes == table.nbytes[0]).all():
            pipelines = [self._pipeline(0, int(table.nbytes[0]))] * len(table.nbytes)
        else:
            masks = [0] * len(table.nbytes) if skipped is None else skipped[table.chunk_row].tolist()
            pipelines = [self._pipeline(*key) for key in zip(masks, table.nbytes.tolist(), strict=True)]
        return (
            table.chunk_row.tolist(), begin.tolist(), end.tolist(), direct.tolist(),
            (table.dest * self._out_item).tolist(), pipelines,
        )  # fmt: skip

    def _pipeline(self, skipped: int, nbytes: int) -> Pipeline:
        key = skipped, nbytes
        if key not in self._pipelines:
            codecs = tuple(c for i, c in enumerate(self.layout.codecs) if not skipped >> i & 1)
            self._pipelines[key] = Pipeline(codecs, nbytes)
        return self._pipelines[key]

    @cached_property
    def _box_copies(self) -> _Copies:
        """Copies of all boxes out of their decoded chunks."""
        plan = self.plan
        source, dest = self._box_tables
        to = dest_strides(plan.out_shape) * self._out_item
        step = plan.boxes.gather(plan.pieces, "step")
        return _Copies(
            shape=_tuples(plan.boxes.gather(plan.pieces, "count")),
            source_offset=(plan.boxes.gather(plan.pieces, "start") * (source // step)).sum(axis=1).tolist(),
            source_strides=_tuples(source),
            dest_offset=(plan.boxes.gather(plan.pieces, "dest") * to).sum(axis=1).tolist(),
            dest_strides=_tuples(dest),
        )

    @cached_property
    def _few_wanted(self) -> list[bool]:
        """Say of which chunks so little is wanted that decoding single blocks may pay."""
        assert self.plan.encoded is not None
        table = self.plan.encoded
        few = table.wanted * self._item <= _PARTIAL_FRACTION * table.nbytes
        return (few & (table.nbytes >= _PARTIAL_MIN)).tolist()

    @cached_property
    def _box_bounds(self) -> list[int]:
        return self.plan.boxes.bounds.tolist()

    def _encoded_chunk(self, item: int) -> tuple[int, int]:
        row = self._encoded_tables[0][item]
        return row, int(self._refs.offset[row] + self._refs.nbytes[row])

    def _run_encoded(self, row: int) -> ReadStats:
        assert self.plan.encoded_reads is not None
        reads, scratch = self.plan.encoded_reads, _scratch()
        nbytes, items = int(reads.nbytes[row]), range(int(reads.bounds[row]), int(reads.bounds[row + 1]))
        _, _, _, direct, _, pipelines = self._encoded_tables
        if all(direct[i] and pipelines[i].is_crc32c for i in items):
            decoded = self._read_checked(reads, row, items, scratch)
        else:
            buffer = scratch.get("read", nbytes)
            self._fetch(reads, row, [buffer], self._encoded_chunk)
            decoded = sum(self._decode(i, buffer, scratch) for i in items)
        return ReadStats(bytes_fetched=nbytes, bytes_decoded=decoded, num_reads=1, num_chunks=len(items))

    def _read_checked(self, reads: Reads, row: int, items: range, scratch: Scratch) -> int:
        """Read chunks that only carry a checksum straight into place, and the checksums beside."""
        rows, begin, end, _, dest, pipelines = self._encoded_tables
        sums = scratch.get("sums", 4 * len(items))
        buffers: list[Any] = []
        at = 0
        for k, i in enumerate(items):
            if begin[i] > at:
                buffers.append(scratch.get("gap", begin[i] - at))
            at = end[i]
            if end[i] - begin[i] != pipelines[i].encoded_size:
                raise CorruptDataError(
                    f"{self._where(rows[i])}: it has {end[i] - begin[i]} bytes, but {pipelines[i].encoded_size} "
                    "were expected; the file is damaged: copy or write it again"
                )
            buffers += (self._out_view[dest[i] : dest[i] + pipelines[i].nbytes], sums[4 * k : 4 * k + 4])
        self._fetch(reads, row, buffers, self._encoded_chunk)
        stored, decoded = sums.view("<u4").tolist(), 0
        for k, i in enumerate(items):
            nbytes = pipelines[i].nbytes
            try:
                check_crc32c(self._out_bytes[dest[i] : dest[i] + nbytes], stored[k])
            except ChecksumError as e:
                raise self._named(rows[i], e) from e
            if not self.convert.trivial:
                first = dest[i] // self._out_item
                self.convert.finish(self._out[first : first + nbytes // self._item], scratch)
            decoded += nbytes
        return decoded

    def _named(self, chunk_row: int, error: CorruptDataError) -> CorruptDataError:
        return type(error)(f"{self._where(chunk_row)}: {error}; the file is damaged: copy or write it again")

    def _decode(self, i: int, buffer: npt.NDArray[np.uint8], scratch: Scratch) -> int:
        rows, begin, end, direct, dest, pipelines = self._encoded_tables
        row, pipeline, data = rows[i], pipelines[i], buffer[begin[i] : end[i]]
        try:
            if direct[i]:
                pipeline.decode(data, self._out_bytes[dest[i] : dest[i] + pipeline.nbytes], scratch)
                if not self.convert.trivial:
                    first = dest[i] // self._out_item
                    self.convert.finish(self._out[first : first + pipeline.nbytes // self._item], scratch)
                return pipeline.nbytes
            boxes = range(self._box_bounds[row], self._box_bounds[row + 1])
            decoded = pipeline.nbytes
            if self._few_wanted[i] and pipeline.is_blosc:
                chunk, decoded = self._decode_blocks(data, pipeline.nbytes, boxes, scratch)
            else:
                chunk = pipeline.decode(data, None, scratch)
        except CorruptDataError as e:
            raise self._named(row, e) from e
        for box in boxes:
            self._copy(self._box_copies, box, chunk, scratch)
        return decoded

    def _decode_blocks(
        self, data: npt.NDArray[np.uint8], nbytes: int, boxes: range, scratch: Scratch
    ) -> tuple[npt.NDArray[np.uint8], int]:
        """Decode the Blosc blocks that hold a wanted element."""
        header = _blosc.read_header(data, nbytes)
        chunk = scratch.get("decoded", nbytes)
        needed = np.zeros(header.num_blocks, np.bool_)
        copies = self._box_copies
        for box in boxes:
            _mark_blocks(
                needed, header.blocksize, self._item,
                copies.shape[box], copies.source_offset[box], copies.source_strides[box],
            )  # fmt: skip
        if needed.all():
            _blosc.decode(data, chunk)
            return chunk, nbytes
        return chunk, _blosc.decode_blocks(data, header, needed, chunk)


def _mark_blocks(
    needed: npt.NDArray[np.bool_],
    blocksize: int,
    item: int,
    shape: tuple[int, ...],
    offset: int,
    strides: tuple[int, ...],
) -> None:
    """Mark the blocks that a strided box of a chunk touches."""
    extent, outer = item, []
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


def _tuples(table: IntArray) -> list[tuple[int, ...]]:
    return list(map(tuple, table.tolist()))
