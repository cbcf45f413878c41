"""The part of a plan that does not depend on places: cut once, shared by all samples that differ in a row.

Consecutive samples of a data set want the same part of another row of the sample dimension. Counted from its first
chunk (and in a raw chunk from its first row) that is the same cut, so its tables are made once and kept in a small
cache; a plan only adds where the cut begins and where the chunks lie.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, IntArray, Segment, Segments, Selection
from scidata.errors import ConfigError, SciDataError, TooLargeError
from scidata.plan.pieces import Boxes, DimPieces, cut_dim, make_boxes, needed_chunks
from scidata.plan.spans import chunk_shapes

#: Limits of the cache: cuts, boxes of one of them, segments of a dimension (more cost as much to compare as to cut).
_MAX_CUTS = 64
MAX_BOXES = 1024
_MAX_SEGMENTS = 16
_MAX_CHUNKS = 1 << 22  # of one read: tables of them take a second and half a GB

_T = TypeVar("_T")
_P = ParamSpec("_P")


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A selection cut along the chunk grid; chunks and, in raw chunks, rows count from an :class:`Origin`.

    Attributes
    ----------
    pieces, boxes
        The pieces of each dimension, and the boxes that they make.
    chunks
        ``(num_chunks, ndim)`` coordinates, C order.
    shapes
        ``(num_chunks, ndim)``, or ``(1, ndim)`` where all are equal: shapes as stored.
    nbytes
        ``(num_chunks,)`` decoded sizes.
    num_wanted
        Elements selected.
    dest_range
        First and last destination index of each dimension, None where nothing is selected.
    tables
        What follows from this cut for a destination, by its shape and whether the chunks lie behind URLs.
    """

    pieces: tuple[DimPieces, ...]
    boxes: Boxes
    chunks: IntArray
    shapes: IntArray
    nbytes: IntArray
    num_wanted: int
    dest_range: tuple[tuple[int, int] | None, ...]
    tables: Cache[Any] = field(default_factory=lambda: Cache(4))


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a cut begins: its first chunk, and the first row inside it, along each dimension."""

    chunk: tuple[int, ...]
    row: tuple[int, ...]

    def move_chunks(self, chunks: IntArray) -> IntArray:
        """Return chunk coordinates of the array."""
        return chunks + np.array(self.chunk, np.int64) if any(self.chunk) else chunks

    def moved(self, dim: int, chunks: int, rows: int) -> Origin:
        """Return the origin some chunks and, inside each, some rows further along ``dim``."""
        chunk, row = self.chunk, self.row
        return Origin(
            chunk=(*chunk[:dim], chunk[dim] + chunks, *chunk[dim + 1 :]),
            row=(*row[:dim], row[dim] + rows, *row[dim + 1 :]),
        )

    def move_pieces(self, pieces: tuple[DimPieces, ...]) -> tuple[DimPieces, ...]:
        """Return the pieces of the array."""
        return tuple(
            p.moved(chunk, row) if chunk or row else p
            for p, chunk, row in zip(pieces, self.chunk, self.row, strict=True)
        )

    def first_byte(self, layout: ArrayLayout) -> int:
        """Return how far into each chunk the cut begins, in bytes."""
        first, stride = 0, layout.dtype.itemsize
        for dim in reversed(layout.axis_order):
            first, stride = first + self.row[dim] * stride, stride * layout.chunks[dim]
        return first


def within_memory(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Name the array, the first argument, for whose plan there is not enough memory: it has too many chunks or runs."""

    @functools.wraps(function)
    def wrapped(*args: _P.args, **options: _P.kwargs) -> _T:
        try:
            return function(*args, **options)
        except (MemoryError, ValueError) as e:
            too_big = isinstance(e, MemoryError) or "Maximum allowed" in str(e) or "is too big" in str(e)  # NumPy's
            if isinstance(e, SciDataError) or not too_big:
                raise
            layout: Any = args[0]
            raise TooLargeError(
                f"{layout.store}: field {layout.name!r} of shape {layout.shape} in chunks of {layout.chunks}: planning "
                "what is selected takes more than there is memory for; its metadata are damaged, or read less at once"
            ) from e

    return wrapped


@within_memory
def find_cut(layout: ArrayLayout, selection: Selection) -> tuple[Cut, Origin]:
    """Cut ``selection``, or find the same cut from another origin.

    Raises
    ------
    ConfigError
        The selection does not fit the layout.
    """
    if len(selection) != len(layout.shape):
        raise ConfigError(
            f"{layout.store}: field {layout.name!r} has {len(layout.shape)} dimensions {layout.dims}, "
            f"but the selection has {len(selection)}"
        )
    at_start = Origin(chunk=(0,) * len(selection), row=(0,) * len(selection))
    extents = [_extent(*dim) for dim in zip(selection, layout.shape, strict=True)]
    known = [e for e in extents if e is not None]
    if len(known) < len(extents):
        return _make_cut(layout, selection), at_start
    ranges = [(low // c, high // c) for (low, high), c in zip(known, layout.chunks, strict=True)]
    if math.prod(len(s) * (b - a + 1) for s, (a, b) in zip(selection, ranges, strict=True)) > MAX_BOXES:
        return _make_cut(layout, selection), at_start
    if layout.edge_chunks_clipped:  # the chunks' shapes depend on where they are
        return _kept_cut(layout, tuple(map(tuple, selection))), at_start
    moves = not layout.codecs and not layout.fallback
    origin = Origin(
        chunk=tuple(a for a, _ in ranges),
        row=tuple(
            low - a * c if moves and a == b else 0
            for (low, _), (a, b), c in zip(known, ranges, layout.chunks, strict=True)
        ),
    )
    shifts = [a * c + row for a, c, row in zip(origin.chunk, layout.chunks, origin.row, strict=True)]
    return _kept_cut(layout, tuple(map(_moved_down, selection, shifts))), origin


def _extent(segments: Sequence[Segment], size: int) -> tuple[int, int] | None:
    """Return the first and last row, or None where segments are none, many, empty or wrong."""
    if not 0 < len(segments) <= _MAX_SEGMENTS:
        return None
    low, high = size, -1
    for s in segments:
        last = s.start + (s.count - 1) * s.step
        low, high = min(low, s.start, last), max(high, s.start, last)
        if s.count < 1 or s.step == 0 or s.offset < 0:
            return None
    return (low, high) if low >= 0 and high < size else None


def _moved_down(segments: Segments, shift: int) -> tuple[Segment, ...]:
    if shift == 0:
        return tuple(segments)
    return tuple(Segment(start=s.start - shift, count=s.count, step=s.step, offset=s.offset) for s in segments)


_cuts: Cache[Cut] = Cache(_MAX_CUTS)


def _kept_cut(layout: ArrayLayout, selection: Selection) -> Cut:
    key = layout.geometry, selection
    cut = _cuts.get(key)
    if cut is not None:
        return cut
    cut = _make_cut(layout, selection)
    for p in cut.pieces:
        for name in p.__dataclass_fields__:
            getattr(p, name).setflags(write=False)  # shared by many plans
    for table in (cut.chunks, cut.boxes.piece, cut.boxes.chunk_row, cut.boxes.bounds):
        table.setflags(write=False)
    return _cuts.put(key, cut)


def _make_cut(layout: ArrayLayout, selection: Selection) -> Cut:
    _check_number(layout, math.prod(map(_least_chunks, selection, layout.shape, layout.chunks)))
    pieces = tuple(cut_dim(*dim) for dim in zip(selection, layout.shape, layout.chunks, strict=True))
    _check_number(layout, math.prod(len(p.chunks) for p in pieces))
    chunks = needed_chunks(pieces)
    shapes = chunk_shapes(layout, chunks)
    return Cut(
        pieces=pieces,
        boxes=make_boxes(pieces),
        chunks=chunks,
        shapes=shapes,
        nbytes=np.broadcast_to(shapes.prod(axis=1) * layout.dtype.itemsize, (len(chunks),)),
        num_wanted=math.prod(p.num_wanted for p in pieces),
        dest_range=tuple(map(_dest_range, pieces)),
    )


def _least_chunks(segments: Sequence[Segment], size: int, chunk: int) -> int:
    """Return a number of chunks that are touched at least, found without a table of them; 0 where that takes one."""
    if _extent(segments, size) is None:
        return 0 if segments else 1
    return max(min(s.count, (s.count - 1) * abs(s.step) // chunk + 1) for s in segments)


def _check_number(layout: ArrayLayout, num_chunks: int) -> None:
    if num_chunks > _MAX_CHUNKS:
        raise TooLargeError(
            f"{layout.store}: field {layout.name!r} of shape {layout.shape} in chunks of {layout.chunks}: what is "
            f"selected lies in {num_chunks} of them or more, and one read takes at most {_MAX_CHUNKS}; its metadata "
            "are damaged, or write it with larger chunks, or read less at once"
        )


def _dest_range(p: DimPieces) -> tuple[int, int] | None:
    if not len(p.dest):
        return None
    near = np.where(p.sign > 0, p.dest, p.dest - p.count + 1)
    return int(near.min()), int((near + p.count - 1).max())
