"""Tables derived from a cut and a destination, and their order once chunk locations are known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, BoolArray, ChunkRefs, IntArray
from scidata.errors import ConfigError, CorruptDataError
from scidata.plan.cut import Cut
from scidata.plan.spans import (
    Reads,
    Spans,
    decoded_limit,
    dest_strides,
    element_strides,
    gap_limits,
    group_reads,
    make_spans,
)

_MAX_OFFSET = 1 << 60  # bound that keeps sums of file offsets in int64


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedChunks:
    """Chunks that are fetched and decoded whole, in the order of their reads; one array row per chunk."""

    chunk_row: IntArray  # index among the plan's chunks
    nbytes: IntArray  # decoded size
    wanted: IntArray  # elements selected
    # bool: the whole chunk is contiguous in the destination, so that it is decoded straight into it
    direct: BoolArray
    dest: IntArray  # destination of the first element, in elements, if ``direct``

    def take(self, order: IntArray) -> EncodedChunks:
        """Return the chunks reordered."""
        return EncodedChunks(**{name: getattr(self, name)[order] for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """Tables in read order, shared by samples whose chunks have equal order and distances."""

    # spans, reads: of raw chunks; ``reads`` start from the offset of the first chunk, and are None if places are
    # unknown
    spans: Spans | None = None
    reads: Reads | None = None
    nbytes: int = 0  # bytes of the reads of raw chunks, or of the spans if there are none
    encoded: EncodedChunks | None = None  # encoded chunks

    def reads_from(self, offset: int) -> Reads | None:
        """Return the reads of raw chunks if the first begins at ``offset``."""
        return None if self.reads is None else replace(self.reads, offset=self.reads.offset + offset)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """Tables of a read that are independent of chunk locations, and the location patterns found so far."""

    cut: Cut
    # spans, encoded: of raw and of encoded chunks; None if there are none
    spans: Spans | None
    encoded: EncodedChunks | None
    absent: IntArray  # ``(num,)`` rows of the chunks missing in the store
    decoded_nbytes: int  # sum of the encoded chunks' decoded sizes
    remote: bool  # whether the chunks lie behind URLs
    patterns: Cache[Pattern] = field(default_factory=lambda: Cache(2))

    def order(self, layout: ArrayLayout, refs: ChunkRefs | None) -> tuple[Pattern, Reads | None]:
        """Return the tables in read order, and the reads of encoded chunks."""
        # Chunk locations are known only now. Raw and encoded chunks are sorted into reads separately. If a sample's
        # chunks are laid out like those of an earlier one, say 4 MB further on in the same files, it reuses that
        # one's pattern: the key is the locations relative to the first chunk.
        spans, encoded = self.spans, self.encoded
        if refs is None:
            nbytes = 0 if spans is None else int(spans.nbytes.sum())
            return Pattern(spans=spans, encoded=encoded, nbytes=nbytes), None
        if encoded is None:
            places = refs.path_index, refs.offset - refs.offset[:1], refs.nbytes
            return self.patterns.get_or_make(tuple(x.tobytes() for x in places), lambda: self._order_spans(refs)), None
        rows = encoded.chunk_row
        order, reads = group_reads(
            refs.path_index[rows], refs.offset[rows], refs.nbytes[rows],
            remote=self.remote, decoded=encoded.nbytes, max_decoded=decoded_limit(layout),
        )  # fmt: skip
        if spans is not None:
            return replace(self._order_spans(refs), encoded=encoded.take(order)), reads
        key = order.tobytes(), reads.bounds.tobytes()
        return self.patterns.get_or_make(key, lambda: Pattern(encoded=encoded.take(order))), reads

    def _order_spans(self, refs: ChunkRefs) -> Pattern:
        spans = self.spans
        if spans is None:
            return Pattern()
        chunk = self.cut.boxes.chunk_row[spans.box]
        relative = refs.offset - refs.offset[0]
        order, reads = group_reads(
            refs.path_index[chunk], relative[chunk] + spans.offset, spans.nbytes,
            remote=self.remote, direct=spans.direct,
        )  # fmt: skip
        return Pattern(spans=spans.take(order), reads=reads, nbytes=int(reads.nbytes.sum()))


def check_refs(layout: ArrayLayout, chunks: IntArray, refs: ChunkRefs) -> None:
    """Raise ConfigError if the number of locations differs from that of chunks, CorruptDataError if any is invalid."""
    if not len(chunks) == len(refs.path_index) == len(refs.offset) == len(refs.nbytes):
        raise ConfigError(f"{layout.name!r}: {len(refs.path_index)} places for {len(chunks)} chunks")
    both = refs.offset | refs.nbytes  # "or" of the two: negative if either is, and large if either is
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


def find_tables(
    layout: ArrayLayout, cut: Cut, out_shape: tuple[int, ...], refs: ChunkRefs | None, remote: bool
) -> Tables:
    """Return a cut's tables for one destination; cached with the cut if all chunks are of one kind and present.

    Raises ConfigError: the selection does not fit the destination.
    """
    if layout.fallback:
        _check_destination(layout, cut, out_shape)
        none, nbytes = np.empty(0, np.int64), len(cut.chunks) * layout.chunk_nbytes
        return Tables(cut=cut, spans=None, encoded=None, absent=none, decoded_nbytes=nbytes, remote=remote)
    is_raw = np.full(len(cut.chunks), not layout.codecs)
    skipped = None if refs is None or not layout.codecs else refs.skipped_codecs
    if refs is None or (skipped is None and len(is_raw) and int(refs.path_index.min()) >= 0):
        key = out_shape, remote
        tables: Tables | None = cut.tables.get(key)
        if tables is None:
            tables = cut.tables.put(key, _make_tables(layout, cut, out_shape, is_raw, ~is_raw, remote))
        return tables
    if skipped is not None:
        everything = (1 << len(layout.codecs)) - 1
        is_raw = (skipped & everything) == everything
    present = refs.path_index >= 0
    return _make_tables(layout, cut, out_shape, present & is_raw, present & ~is_raw, remote)


def _make_tables(
    layout: ArrayLayout, cut: Cut, out_shape: tuple[int, ...], is_raw: BoolArray, is_encoded: BoolArray, remote: bool
) -> Tables:
    _check_destination(layout, cut, out_shape)
    boxes, rows = np.flatnonzero(is_raw[cut.boxes.chunk_row]), np.flatnonzero(is_encoded)
    max_gap, _ = gap_limits(remote)
    encoded = _encoded_table(layout, cut, rows, out_shape) if len(rows) else None
    return Tables(
        cut=cut,
        spans=make_spans(layout, cut, boxes, out_shape, max_gap) if len(boxes) else None,
        encoded=encoded,
        absent=np.flatnonzero(~(is_raw | is_encoded)),
        decoded_nbytes=0 if encoded is None else int(encoded.nbytes.sum()),
        remote=remote,
    )


def _check_destination(layout: ArrayLayout, cut: Cut, out_shape: tuple[int, ...]) -> None:
    if len(out_shape) != len(layout.shape):
        raise ConfigError(f"{layout.name!r}: a destination of shape {out_shape} for dimensions {layout.dims}")
    for rows, size, dim in zip(cut.dest_range, out_shape, layout.dims, strict=True):
        if rows is not None and (rows[0] < 0 or rows[1] >= size):
            raise ConfigError(
                f"{layout.name!r}: rows {rows[0]} to {rows[1]} of {dim!r} do not fit a destination of {size}"
            )


def _encoded_table(layout: ArrayLayout, cut: Cut, rows: IntArray, out_shape: tuple[int, ...]) -> EncodedChunks:
    """Describe the encoded chunks ``rows``."""
    pieces, boxes = cut.pieces, cut.boxes
    nbytes = np.broadcast_to(layout.chunk_shapes(cut.chunks[rows]).prod(axis=-1) * layout.dtype.itemsize, len(rows))
    count = boxes.gather(pieces, "count")
    elements = np.concatenate([[0], np.cumsum(count.prod(axis=1))])
    wanted = elements[boxes.bounds[rows + 1]] - elements[boxes.bounds[rows]]
    first_box = boxes.bounds[rows]
    direct = (boxes.bounds[rows + 1] - first_box == 1) & (wanted * layout.dtype.itemsize == nbytes)
    to = dest_strides(out_shape)
    sign = boxes.gather(pieces, "sign", first_box)
    count = count[first_box]
    direct &= ((count == 1) | (to * sign == element_strides(layout, cut.chunks[rows]))).all(axis=1)
    dest = (boxes.gather(pieces, "dest", first_box) * to).sum(axis=1)
    return EncodedChunks(chunk_row=rows, nbytes=nbytes, wanted=wanted, direct=direct, dest=dest)
