"""Plan the reads of one array by one rank: selections × chunks → byte ranges and destinations. Pure arithmetic, no I/O.

A plan is a function of its inputs alone (layout, selection, places of the chunks, destination shape), so it can be
made for any rank of any world size without starting it, and is stored as those inputs.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from scidata.core.types import ArrayLayout, ChunkRefs, IntArray, Selection, segment_table
from scidata.core.urls import is_url
from scidata.plan.chunk_tables import EncodedChunks, Pattern, check_refs, find_tables
from scidata.plan.cut import Boxes, Cut, Cuts, DimPieces, Origin, check_memory
from scidata.plan.spans import Reads, Spans

#: Plans kept for the next epoch: several thousand, for samples of 1 MB.
MAX_PLAN_BYTES = 32 << 20

_cuts = Cuts()

#: Finds chunks' byte locations by their coordinates ``(num, ndim)`` int64.
Locate: TypeAlias = Callable[[ArrayLayout, IntArray], ChunkRefs]


def chunks_needed(layout: ArrayLayout, selection: Selection) -> IntArray:
    """Return the coordinates of chunks that hold a selected element, ``(num, ndim)`` int64, in C order.

    Raises ConfigError: the selection does not fit the layout.
    """
    cut, origin = _cuts.find(layout, selection)
    return origin.move_chunks(cut.chunks)


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrayPlan:
    """The reads of one array and their destinations."""

    # layout, selection, refs, out_shape: the inputs. ``refs`` is None if the places of the chunks were not known (or
    # are not bytes: ``fallback``)
    layout: ArrayLayout
    selection: Selection
    out_shape: tuple[int, ...]
    refs: ChunkRefs | None
    # cut, origin: the selection cut along the chunk grid
    cut: Cut
    origin: Origin
    bytes_wanted: int  # bytes selected, in the stored dtype
    # bytes read from files, as the reader counts them; an estimate by decoded size if not ``exact``. Of large Blosc
    # chunks with few wanted elements the reader reads less; only their block tables tell how much
    bytes_fetched: int
    # bytes that come out of decoding whole chunks; raw chunks count the bytes fetched. Partial decoding lowers the
    # count that the reader reports
    bytes_decoded: int
    exact: bool  # True if every range is known
    remote: bool  # True if the chunks lie behind URLs
    pattern: Pattern  # the reader's tables, shared by plans that differ only in byte locations
    # span_reads, encoded_reads, absent: the reads, and the rows of ``chunks`` missing in the store
    span_reads: Reads | None
    encoded_reads: Reads | None
    absent: IntArray
    first_byte: int  # offset inside each chunk at which the spans of ``pattern`` begin

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
        """The boxes formed by the pieces."""
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
        """Approximate memory of the plan: a few objects, and tables with a row per chunk."""
        return (4 << 10) + 512 * self.num_chunks

    @property
    def num_reads(self) -> int:
        """Number of ranged reads; 0 if byte locations are unknown."""
        return sum(len(r.offset) for r in (self.span_reads, self.encoded_reads) if r is not None)

    def ranges(self) -> tuple[tuple[str, ...], IntArray]:
        """Return the paths, and the reads as ``(num_reads, 3)``: path index, first byte, bytes."""
        paths = self.refs.paths if self.refs is not None else ()
        tables = [
            np.stack([r.path_index, r.offset, r.nbytes], axis=1)
            for r in (self.span_reads, self.encoded_reads)
            if r is not None
        ]
        return paths, np.concatenate([np.empty((0, 3), np.int64), *tables])

    def to_json(self) -> dict[str, object]:
        """Return the plan as JSON values: inputs, sums and byte ranges."""
        return {
            **inputs_to_json(self.layout, self.selection, self.refs, self.out_shape),
            "bytes_wanted": self.bytes_wanted,
            "bytes_fetched": self.bytes_fetched,
            "bytes_decoded": self.bytes_decoded,
            "num_chunks": self.num_chunks,
            "exact": self.exact,
            "ranges": self.ranges()[1].tolist(),
        }


def plan_array(
    layout: ArrayLayout, selection: Selection, refs: ChunkRefs | Locate | None, *, out_shape: tuple[int, ...]
) -> ArrayPlan:
    """Plan the read of ``selection``.

    ``refs``: places of the chunks, a row for each row of :func:`chunks_needed`; or a source's ``locate``, which finds
    them. None: bytes are estimated from decoded sizes, and the plan is not ``exact``.
    ``out_shape``: shape of the destination, one dimension for each of the array's; the segments' offsets are relative
    to it.
    Raises ConfigError: selection, ``refs`` and ``out_shape`` do not fit.
    Raises CorruptDataError: a chunk's offset or size makes no sense.
    """
    cut, origin = _cuts.find(layout, selection)
    return plan_cut(layout, selection, cut, origin, refs, tuple(out_shape))


def plan_cut(
    layout: ArrayLayout,
    selection: Selection,
    cut: Cut,
    origin: Origin,
    refs: ChunkRefs | Locate | None,
    out_shape: tuple[int, ...],
) -> ArrayPlan:
    """Plan the read of a cut selection; otherwise as :func:`plan_array`."""
    try:
        if layout.fallback:
            refs = None
        elif callable(refs):
            refs = refs(layout, origin.move_chunks(cut.chunks))
        remote = refs is not None and any(map(is_url, refs.paths))
        if refs is not None:
            check_refs(layout, origin.move_chunks(cut.chunks), refs)
        tables = find_tables(layout, cut, out_shape, refs, remote)
        pattern, encoded_reads = tables.order(layout, refs)
        first_byte, span_reads = 0, None
        if pattern.spans is not None:
            first_byte = origin.first_byte(layout)
            span_reads = None if refs is None else pattern.reads_from(int(refs.offset[0]) + first_byte)
        is_exact = refs is not None and not (refs.unseen and bool((refs.nbytes[refs.path_index >= 0] == 0).any()))
        encoded_nbytes = tables.decoded_nbytes if encoded_reads is None else int(encoded_reads.nbytes.sum())
        return ArrayPlan(
            layout=layout, selection=selection, out_shape=out_shape, refs=refs, cut=cut, origin=origin,
            bytes_wanted=cut.num_wanted * layout.dtype.itemsize, bytes_fetched=pattern.nbytes + encoded_nbytes,
            bytes_decoded=pattern.nbytes + tables.decoded_nbytes, exact=is_exact, remote=remote,
            pattern=pattern, span_reads=span_reads, encoded_reads=encoded_reads, absent=tables.absent,
            first_byte=first_byte,
        )  # fmt: skip
    except (MemoryError, ValueError) as e:
        check_memory(layout, e)
        raise


def exact_plan(plan: ArrayPlan, locate: Locate) -> ArrayPlan:
    """Return a plan in which ``locate`` has found each chunk."""
    if plan.refs is None or not plan.refs.unseen:
        return plan
    return plan_array(plan.layout, plan.selection, locate, out_shape=plan.out_shape)


def moved_plan(
    plan: ArrayPlan, layout: ArrayLayout, chunks: Sequence[int], rows: Sequence[int], locate: Locate
) -> ArrayPlan:
    """Shift ``plan`` by a number of chunks, and of rows inside them, along each dimension."""
    by = [chunk * size + row for chunk, row, size in zip(chunks, rows, layout.chunks, strict=True)]
    selection = tuple(
        tuple(replace(s, start=s.start + n) for s in dim) if n else dim
        for dim, n in zip(plan.selection, by, strict=True)
    )
    return plan_array(layout, selection, locate, out_shape=plan.out_shape)


class PlanFamily:
    """Plans of samples that differ only in their first rows along some dimensions.

    They are those of :func:`plan_array`, several times as fast from the second one on. Thread-safe.

    ``dims``: the dimensions along which selections move; those of the others are always the same.
    ``out_shape``: shape of every destination.
    """

    def __init__(self, dims: tuple[int, ...], out_shape: tuple[int, ...]) -> None:
        self._cuts, self.out_shape = Cuts(dims), out_shape

    def plan(self, layout: ArrayLayout, selection: Selection, locate: Locate) -> ArrayPlan:
        """Plan a selection; ``locate`` is the source's.

        Raises the errors of :func:`plan_array` and of ``locate``.
        """
        return plan_cut(layout, selection, *self._cuts.find(layout, selection), locate, self.out_shape)


def _plain(value: Any) -> Any:
    """Convert descriptions, NumPy values and tuples to JSON values; dtypes to arguments of ``np.dtype``."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.dtype):
        return _plain(value.descr) if value.names else value.str
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _layout_to_json(layout: ArrayLayout) -> dict[str, Any]:
    """Return a layout without attributes, which decide nothing, and decoders; the fill value bit for bit in base64."""
    found: dict[str, Any] = _plain(layout)
    del found["attributes"]
    found["codecs"] = [{"name": codec.name, "config": _plain(codec.config)} for codec in layout.codecs]
    if layout.fill_value is not None:
        found["fill_value"] = base64.b64encode(layout.fill_value.astype(layout.dtype).tobytes()).decode()
    return found


def inputs_to_json(
    layout: ArrayLayout, selection: Selection, refs: ChunkRefs | None, out_shape: tuple[int, ...]
) -> dict[str, Any]:
    """Return the arguments of :func:`scidata.plan.array.plan_array`."""
    return {
        "layout": _layout_to_json(layout),
        "selection": [segment_table(segments).tolist() for segments in selection],
        "refs": _plain(refs),
        "out_shape": list(out_shape),
    }
