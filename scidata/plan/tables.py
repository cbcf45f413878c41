"""The tables that follow from a cut and a destination, and their order once the places of the chunks are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scidata.core.types import ArrayLayout, ChunkRefs, IntArray
from scidata.plan.cut import Cut, Memo
from scidata.plan.pieces import DimPieces
from scidata.plan.spans import Reads, Spans, dest_strides, element_strides, gap_limits, group_reads, make_spans
from scidata.sources.bytes.files import is_url

__all__ = ["EncodedChunks", "Pattern", "Tables", "encoded_table", "find_tables", "known_tables", "spans_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedChunks:
    """Chunks that are fetched whole and decoded, in the order of their reads; arrays have one row per chunk.

    Attributes
    ----------
    chunk_row
        Row among the plan's chunks.
    nbytes
        Size when decoded.
    wanted
        Elements selected.
    direct
        bool: all of the chunk lands contiguous in the destination, so it can be decoded straight into it.
    dest
        Destination of its first element, in elements, where ``direct``.
    """

    chunk_row: IntArray
    nbytes: IntArray
    wanted: IntArray
    direct: npt.NDArray[np.bool_]
    dest: IntArray

    def take(self, order: IntArray) -> EncodedChunks:
        """Return the chunks in another order."""
        return EncodedChunks(**{name: getattr(self, name)[order] for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """Tables in the order of their reads: the same for every sample whose chunks lie in the same order and distances.

    Attributes
    ----------
    spans, reads
        Of raw chunks; ``reads`` start from the offset of the first chunk. None for encoded ones.
    encoded
        Encoded chunks.
    lowest, highest
        Least and greatest offset of raw chunks, from that of the first chunk.
    memo
        What the reader derives from the tables.
    """

    spans: Spans | None = None
    reads: Reads | None = None
    encoded: EncodedChunks | None = None
    lowest: int = 0
    highest: int = 0
    memo: Memo = field(default_factory=lambda: Memo(8))

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the reads of raw chunks fetch."""
        return 0 if self.reads is None else int(self.reads.nbytes.sum())

    def reads_from(self, offset: int) -> Reads:
        """Return the reads of raw chunks, the first of which begins at ``offset``."""
        reads = self.reads
        assert reads is not None
        return Reads(
            path_index=reads.path_index, offset=reads.offset + offset, nbytes=reads.nbytes, bounds=reads.bounds
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """What is known of a read before the places of its chunks: ``spans`` of raw chunks, or ``encoded`` ones."""

    cut: Cut
    spans: Spans | None
    encoded: EncodedChunks | None
    patterns: Memo = field(default_factory=lambda: Memo(2))

    def known_raw(self, refs: ChunkRefs) -> Pattern | None:
        """Return the pattern of raw chunks that lie and are sized as some did before, or None."""
        pattern: Pattern | None = self.patterns.find(_places(refs))
        return pattern

    def order_raw(self, refs: ChunkRefs) -> Pattern:
        """Return spans and reads of raw chunks."""

        def make() -> Pattern:
            spans = self.spans
            assert spans is not None
            chunk = self.cut.boxes.chunk_row[spans.box]
            relative = refs.offset - refs.offset[0]
            order, reads = group_reads(
                refs.path_index[chunk],
                relative[chunk] + spans.offset,
                spans.nbytes,
                direct=spans.direct,
                paths=refs.paths,
            )
            lowest, highest = int(relative.min()), int(relative.max())
            return Pattern(spans=spans.take(order), reads=reads, lowest=lowest, highest=highest)

        return self.patterns.get(_places(refs), make)

    def order_encoded(self, refs: ChunkRefs, max_decoded: int) -> tuple[Reads, Pattern]:
        """Return the reads of encoded chunks, of about ``max_decoded`` bytes each, and the chunks in their order."""
        order, reads = group_reads(
            refs.path_index,
            refs.offset,
            refs.nbytes,
            paths=refs.paths,
            decoded=self.cut.nbytes,
            max_decoded=max_decoded,
        )

        def make() -> Pattern:
            assert self.encoded is not None
            return Pattern(encoded=self.encoded.take(order))

        return reads, self.patterns.get((order.tobytes(), reads.bounds.tobytes()), make)


def _places(refs: ChunkRefs) -> tuple[bytes, ...]:
    """Return what plans of raw chunks have in common that differ in the offset of the first chunk alone."""
    offset = refs.offset
    return refs.path_index.tobytes(), (offset - offset[0]).tobytes(), refs.nbytes.tobytes()


def known_tables(layout: ArrayLayout, cut: Cut, out_shape: tuple[int, ...], paths: Sequence[str]) -> Tables | None:
    """Return the tables of a cut for one destination, if they were made before and kept."""
    tables: Tables | None = cut.memo.find((out_shape, not layout.codecs, any(map(is_url, paths))))
    return tables


def find_tables(layout: ArrayLayout, cut: Cut, out_shape: tuple[int, ...], paths: Sequence[str]) -> Tables:
    """Return the tables of a cut for one destination, kept with the cut."""
    raw, remote = not layout.codecs, any(map(is_url, paths))

    def make() -> Tables:
        rows = np.arange(len(cut.boxes.chunk_row))
        return Tables(
            cut=cut,
            spans=spans_of(layout, cut, cut.pieces, rows, out_shape, paths) if raw else None,
            encoded=None if raw else encoded_table(layout, cut, np.arange(len(cut.chunks)), out_shape),
        )

    return cut.memo.get((out_shape, raw, remote), make)


def spans_of(
    layout: ArrayLayout,
    cut: Cut,
    pieces: tuple[DimPieces, ...],
    rows: IntArray,
    out_shape: tuple[int, ...],
    paths: Sequence[str],
) -> Spans:
    """Return the spans of some boxes of raw chunks."""
    max_gap, _ = gap_limits(paths)
    shapes = cut.shapes if len(cut.shapes) == 1 else cut.shapes[cut.boxes.chunk_row[rows]]
    return make_spans(layout, pieces, cut.boxes, rows, shapes, out_shape, max_gap)


def encoded_table(layout: ArrayLayout, cut: Cut, rows: IntArray, out_shape: tuple[int, ...]) -> EncodedChunks:
    """Describe the encoded chunks ``rows``."""
    pieces, boxes = cut.pieces, cut.boxes
    nbytes = cut.nbytes[rows]
    count = boxes.gather(pieces, "count")
    elements = np.concatenate([[0], np.cumsum(count.prod(axis=1))])
    wanted = elements[boxes.bounds[rows + 1]] - elements[boxes.bounds[rows]]
    first_box = boxes.bounds[rows]
    direct = (boxes.bounds[rows + 1] - first_box == 1) & (wanted * layout.dtype.itemsize == nbytes)
    to = dest_strides(out_shape)
    sign = boxes.gather(pieces, "sign", first_box)
    count = count[first_box]
    strides = element_strides(cut.shapes if len(cut.shapes) == 1 else cut.shapes[rows], layout.axis_order)
    direct &= ((count == 1) | (to * sign == strides)).all(axis=1)
    dest = (boxes.gather(pieces, "dest", first_box) * to).sum(axis=1)
    return EncodedChunks(chunk_row=rows, nbytes=nbytes, wanted=wanted, direct=direct, dest=dest)
