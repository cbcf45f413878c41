"""Selections × chunks → byte ranges: what one rank reads of one array, and where it lands. Pure arithmetic, no I/O.

A plan is a function of its inputs alone (layout, selection, places of the chunks, destination shape), so it can be
made for any rank of any world size without starting it, and is stored as those inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.types import ArrayLayout, ChunkRefs, IntArray, Selection
from scidata.errors import ConfigError, CorruptDataError
from scidata.plan import as_json
from scidata.plan.cut import Cut, Origin, find_cut, within_memory
from scidata.plan.pieces import Boxes, DimPieces
from scidata.plan.spans import Reads, Spans, decoded_limit, group_reads
from scidata.plan.tables import EncodedChunks, Pattern, Tables, encoded_table, find_tables, known_tables, spans_of

__all__ = [
    "ArrayPlan",
    "EncodedChunks",
    "chunks_needed",
    "plan_array",
    "plan_cut",
]

_MAX_OFFSET = 1 << 60  # sums of file offsets stay inside int64
_NONE: IntArray = np.empty(0, np.int64)
_NONE.setflags(write=False)


def chunks_needed(layout: ArrayLayout, selection: Selection) -> IntArray:
    """Return the coordinates of the chunks that hold a selected element, ``(num, ndim)`` int64, in C order.

    Raises
    ------
    ConfigError
        The selection does not fit the layout.
    """
    cut, origin = find_cut(layout, selection)
    return origin.move_chunks(cut.chunks)


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrayPlan:
    """What is read of one array and where it lands.

    Attributes
    ----------
    layout, selection, refs, out_shape
        The inputs. ``refs`` is None where the places of the chunks were not known (or are not bytes: ``fallback``).
    cut, origin
        The selection cut along the chunk grid.
    bytes_wanted
        Bytes selected, in the stored dtype.
    bytes_fetched
        Bytes read from files: exactly what the reader reads, or an estimate by decoded size where not ``exact``. Of
        large Blosc chunks of which little is wanted the reader reads less: where their blocks lie only they know.
    bytes_decoded
        Bytes that come out of decoding whole chunks; raw chunks count the bytes fetched. Partial decoding lowers what
        the reader reports.
    exact
        True where every range is known.
    span_reads, encoded_reads, absent
        The reads, and the rows of ``chunks`` that the store does not have.
    pattern
        The tables that the reader works from. Shared by plans that are alike but for places: the reader keeps there
        what it derives from them.
    first_byte
        How far into each chunk the spans of ``pattern`` begin.
    """

    layout: ArrayLayout
    selection: Selection
    out_shape: tuple[int, ...]
    refs: ChunkRefs | None
    cut: Cut
    origin: Origin
    bytes_wanted: int
    bytes_fetched: int
    bytes_decoded: int
    exact: bool
    pattern: Pattern
    span_reads: Reads | None = None
    encoded_reads: Reads | None = None
    absent: IntArray = field(default_factory=lambda: _NONE)
    first_byte: int = 0

    @cached_property
    def chunks(self) -> IntArray:
        """Coordinates of the chunks needed, ``(num_chunks, ndim)``, C order."""
        return self.origin.move_chunks(self.cut.chunks)

    @cached_property
    def pieces(self) -> tuple[DimPieces, ...]:
        """The pieces of each dimension."""
        return self.origin.move_pieces(self.cut.pieces)

    @property
    def boxes(self) -> Boxes:
        """The boxes that the pieces make."""
        return self.cut.boxes

    @cached_property
    def spans(self) -> Spans | None:
        """Byte ranges of raw chunks, in the order of ``span_reads``."""
        spans, first = self.pattern.spans, self.first_byte
        return replace(spans, offset=spans.offset + first) if spans is not None and first else spans

    @property
    def encoded(self) -> EncodedChunks | None:
        """Encoded chunks, in the order of ``encoded_reads``."""
        return self.pattern.encoded

    @property
    def num_chunks(self) -> int:
        """Number of chunks touched."""
        return len(self.cut.chunks)

    @property
    def num_bytes(self) -> int:
        """About the memory that a plan takes: some objects, and tables with a row for each chunk."""
        return (4 << 10) + 512 * self.num_chunks

    @property
    def num_reads(self) -> int:
        """Number of ranged reads; 0 where places are unknown."""
        return sum(len(r.offset) for r in (self.span_reads, self.encoded_reads) if r is not None)

    def ranges(self) -> tuple[tuple[str, ...], IntArray]:
        """Return the paths, and every read as rows of (path index, first byte, bytes): ``(num_reads, 3)``."""
        paths = self.refs.paths if self.refs is not None else ()
        tables = [
            np.stack([r.path_index, r.offset, r.nbytes], axis=1)
            for r in (self.span_reads, self.encoded_reads)
            if r is not None
        ]
        return paths, np.concatenate([np.empty((0, 3), np.int64), *tables])

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values: the inputs, the sums and the byte ranges."""
        return {
            **as_json.inputs_to_json(self.layout, self.selection, self.refs, self.out_shape),
            "bytes_wanted": self.bytes_wanted,
            "bytes_fetched": self.bytes_fetched,
            "bytes_decoded": self.bytes_decoded,
            "num_chunks": self.num_chunks,
            "exact": self.exact,
            "ranges": self.ranges()[1].tolist(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ArrayPlan:
        """Make the plan again from :meth:`to_json`; the layout's attributes are not kept."""
        layout, selection, refs, out_shape = as_json.inputs_from_json(value)
        return plan_array(layout, selection, refs, out_shape=out_shape)


def plan_array(
    layout: ArrayLayout, selection: Selection, refs: ChunkRefs | None, *, out_shape: tuple[int, ...]
) -> ArrayPlan:
    """Plan the read of ``selection``.

    Parameters
    ----------
    layout, selection
        What the array is, and the segments wanted of each dimension.
    refs
        Places of the chunks, a row for each row of :func:`chunks_needed`. None: bytes are estimated from decoded
        sizes, and the plan is not ``exact``.
    out_shape
        Shape of the destination, one dimension for each of the array's; the segments' offsets are relative to it.

    Raises
    ------
    ConfigError
        Selection, ``refs`` and ``out_shape`` do not fit.
    CorruptDataError
        A chunk's offset or size makes no sense.
    """
    cut, origin = find_cut(layout, selection)
    return plan_cut(layout, selection, cut, origin, refs, tuple(out_shape))


@within_memory
def plan_cut(
    layout: ArrayLayout,
    selection: Selection,
    cut: Cut,
    origin: Origin,
    refs: ChunkRefs | None,
    out_shape: tuple[int, ...],
) -> ArrayPlan:
    """Plan the read of a selection that is cut already; otherwise as :func:`plan_array`."""
    plan = functools.partial(
        ArrayPlan, layout=layout, selection=selection, out_shape=out_shape, cut=cut, origin=origin,
        bytes_wanted=cut.num_wanted * layout.dtype.itemsize,
    )  # fmt: skip
    whole = refs is not None and len(cut.chunks) > 0 and refs.skipped_codecs is None and not layout.fallback
    if refs is not None and whole and not layout.codecs:
        tables = known_tables(layout, cut, out_shape, refs.paths)
        pattern = None if tables is None else tables.known_raw(refs)
        start = int(refs.offset[0])
        if pattern is not None and start + pattern.lowest >= 0 and start + pattern.highest <= _MAX_OFFSET:
            return _plan_raw(plan, layout, origin, refs, pattern)
    _check_destination(layout, cut, out_shape)
    if layout.fallback:
        total = cut.total_nbytes
        return plan(refs=None, bytes_fetched=total, bytes_decoded=total, exact=False, pattern=Pattern())
    if refs is not None:
        _check_refs(layout, origin.move_chunks(cut.chunks), refs)
        if whole and int(refs.path_index.min()) >= 0:
            tables = find_tables(layout, cut, out_shape, refs.paths)
            if layout.codecs:
                return _plan_encoded(plan, layout, cut, refs, tables)
            return _plan_raw(plan, layout, origin, refs, tables.order_raw(refs))
    return _plan_mixed(plan, layout, cut, origin.move_pieces(cut.pieces), refs, out_shape)


def _plan_raw(
    plan: Callable[..., ArrayPlan], layout: ArrayLayout, origin: Origin, refs: ChunkRefs, pattern: Pattern
) -> ArrayPlan:
    """Plan raw chunks that are all there."""
    first = origin.first_byte(layout)
    return plan(
        refs=refs, span_reads=pattern.reads_from(int(refs.offset[0]) + first), pattern=pattern, first_byte=first,
        bytes_fetched=pattern.nbytes, bytes_decoded=pattern.nbytes, exact=True,
    )  # fmt: skip


def _plan_encoded(
    plan: Callable[..., ArrayPlan], layout: ArrayLayout, cut: Cut, refs: ChunkRefs, tables: Tables
) -> ArrayPlan:
    """Plan chunks that are all there, and all encoded alike."""
    reads, pattern = tables.order_encoded(refs, decoded_limit(layout))
    return plan(
        refs=refs, encoded_reads=reads, pattern=pattern, bytes_fetched=int(reads.nbytes.sum()),
        bytes_decoded=cut.total_nbytes, exact=True,
    )  # fmt: skip


def _plan_mixed(
    plan: Callable[..., ArrayPlan],
    layout: ArrayLayout,
    cut: Cut,
    pieces: tuple[DimPieces, ...],
    refs: ChunkRefs | None,
    out_shape: tuple[int, ...],
) -> ArrayPlan:
    """Plan chunks of which some are absent, or raw where others are encoded; or of unknown places."""
    boxes = cut.boxes
    is_raw, present = _kinds(layout, refs, len(cut.chunks))
    rows = np.flatnonzero(present & ~is_raw)
    boxes_raw = np.flatnonzero((is_raw & present)[boxes.chunk_row])
    spans = encoded = span_reads = encoded_reads = None
    raw_bytes = encoded_bytes = 0
    if len(boxes_raw):
        spans = spans_of(layout, cut, pieces, boxes_raw, out_shape, refs.paths if refs is not None else ())
        raw_bytes = int(spans.nbytes.sum())
        if refs is not None:
            chunk = boxes.chunk_row[spans.box]
            order, span_reads = group_reads(
                refs.path_index[chunk], refs.offset[chunk] + spans.offset, spans.nbytes,
                direct=spans.direct, paths=refs.paths,
            )  # fmt: skip
            spans, raw_bytes = spans.take(order), int(span_reads.nbytes.sum())
    if len(rows):
        encoded = encoded_table(layout, cut, rows, out_shape)
        encoded_bytes = int(encoded.nbytes.sum())
        if refs is not None:
            place = refs.path_index[rows], refs.offset[rows], refs.nbytes[rows]
            order, encoded_reads = group_reads(
                *place, paths=refs.paths, decoded=encoded.nbytes, max_decoded=decoded_limit(layout)
            )
            encoded, encoded_bytes = encoded.take(order), int(encoded_reads.nbytes.sum())
    return plan(
        refs=refs, span_reads=span_reads, encoded_reads=encoded_reads, pattern=Pattern(spans=spans, encoded=encoded),
        absent=np.flatnonzero(~present), bytes_fetched=raw_bytes + encoded_bytes,
        bytes_decoded=raw_bytes + int(cut.nbytes[rows].sum()), exact=refs is not None,
    )  # fmt: skip


def _check_destination(layout: ArrayLayout, cut: Cut, out_shape: tuple[int, ...]) -> None:
    if len(out_shape) != len(layout.shape):
        raise ConfigError(f"{layout.name!r}: a destination of shape {out_shape} for dimensions {layout.dims}")
    for reach, size, dim in zip(cut.reach, out_shape, layout.dims, strict=True):
        if reach is not None and (reach[0] < 0 or reach[1] >= size):
            raise ConfigError(
                f"{layout.name!r}: rows {reach[0]} to {reach[1]} of {dim!r} do not fit a destination of {size}"
            )


def _check_refs(layout: ArrayLayout, chunks: IntArray, refs: ChunkRefs) -> None:
    if not len(chunks) == len(refs.path_index) == len(refs.offset) == len(refs.nbytes):
        raise ConfigError(f"{layout.name!r}: {len(refs.path_index)} places for {len(chunks)} chunks")
    both = refs.offset | refs.nbytes  # negative where either is, and large where either is
    if not len(both) or (both.min() >= 0 and both.max() <= _MAX_OFFSET and refs.path_index.max() < len(refs.paths)):
        return
    bad = (refs.path_index >= 0) & (
        (refs.offset < 0) | (refs.nbytes < 0) | (refs.offset > _MAX_OFFSET) | (refs.nbytes > _MAX_OFFSET)
    )
    bad |= refs.path_index >= len(refs.paths)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise CorruptDataError(
            f"{layout.store}: field {layout.name!r}, chunk {tuple(chunks[i].tolist())}: offset {refs.offset[i]} and "
            f"size {refs.nbytes[i]} make no sense; the store's index is damaged: copy or write it again"
        )


def _kinds(
    layout: ArrayLayout, refs: ChunkRefs | None, num: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Say which chunks are plain bytes, and which exist."""
    is_raw = np.full(num, not layout.codecs)
    if refs is None:
        return is_raw, np.ones(num, np.bool_)
    if layout.codecs and refs.skipped_codecs is not None:
        everything = (1 << len(layout.codecs)) - 1
        is_raw = (refs.skipped_codecs & everything) == everything
    return is_raw, refs.path_index >= 0
