"""The part of a plan that does not depend on places: cut once, shared by all samples that differ in a row.

Consecutive samples of a data set want the same part of another row of the sample dimension. Counted from its first
chunk (and in a raw chunk from its first row) that is the same cut, so its tables are made once and kept in a small
cache; a plan only adds where the cut begins and where the chunks lie.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, IntArray, Segment, Selection
from scidata.errors import ConfigError, SciDataError, TooLargeError
from scidata.plan.pieces import Boxes, DimPieces, cut_dim, make_boxes, needed_chunks

#: Boxes of the cuts that are kept, each of which counts as 1024 at least: 64 cuts (files of one series may differ in
#: length; rows inside a chunk), or a large one of some 20 MB with all its tables.
_MIN_BOXES = 1024
_MAX_KEPT = 64 * _MIN_BOXES
_MAX_SEGMENTS = 16  # of a dimension: more cost as much to compare as to cut
_MAX_CHUNKS = 1 << 22  # of one read: tables of them take a second and half a GB


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A selection cut along the chunk grid; chunks and, in raw chunks, rows count from an :class:`Origin`."""

    # pieces, boxes: the pieces of each dimension, and the boxes that they make
    pieces: tuple[DimPieces, ...]
    boxes: Boxes
    chunks: IntArray  # ``(num_chunks, ndim)`` coordinates, C order
    num_wanted: int  # elements selected
    # first and last destination index of each dimension, None where nothing is selected
    dest_range: tuple[tuple[int, int] | None, ...]
    # what follows from this cut for a destination, by its shape and whether the chunks lie behind URLs
    tables: Cache[Any] = field(default_factory=lambda: Cache(4))


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a cut begins: its first chunk, and the first row inside it, along each dimension."""

    chunk: tuple[int, ...]
    row: tuple[int, ...]

    def move_chunks(self, chunks: IntArray) -> IntArray:
        """Return chunk coordinates of the array."""
        return chunks + np.array(self.chunk, np.int64) if any(self.chunk) else chunks

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


def check_memory(layout: ArrayLayout, error: Exception) -> None:
    """Raise TooLargeError where a plan failed as there is not enough memory: the array has too many chunks or runs."""
    too_big = isinstance(error, MemoryError) or "Maximum allowed" in str(error) or "is too big" in str(error)  # NumPy's
    if too_big and not isinstance(error, SciDataError):
        raise TooLargeError(
            f"{layout.store}: field {layout.name!r} of shape {layout.shape} in chunks of {layout.chunks}: planning "
            "the selection takes more than there is memory for; its metadata are damaged, or read less at once"
        ) from error


_Place: TypeAlias = tuple[int, int]  # a chunk along a dimension, and a row in it


class Cuts:
    """Cuts that were made, each of which serves all selections that differ from it in the rows at which they begin.

    Thread-safe.

    ``dims``: the dimensions along which selections move, where those of the others are always the same; None: along
    all.
    """

    def __init__(self, dims: tuple[int, ...] | None = None) -> None:
        self._dims = dims
        self._kept: Cache[tuple[Cut, tuple[_Place, ...]]] = Cache(_MAX_KEPT)

    def find(self, layout: ArrayLayout, selection: Selection) -> tuple[Cut, Origin]:
        """Cut ``selection``, or find the same cut from another origin.

        Raises ConfigError: the selection does not fit the layout.
        """
        # Of [10, 12) in chunks of 4 rows the place is (2, 2): chunk 2, row 2 in it. The cut that was made for it serves
        # [18, 20), place (4, 2), with its origin 2 chunks on; in raw chunks also [17, 19), place (4, 1), 2 chunks on
        # and 1 row back. Where chunks are decoded, a row further on is another row of a chunk: a cut of its own.
        if len(selection) != len(layout.shape):
            raise ConfigError(
                f"{layout.store}: field {layout.name!r} has {len(layout.shape)} dimensions {layout.dims}, "
                f"but the selection has {len(selection)}"
            )
        at_start = Origin(chunk=(0,) * len(selection), row=(0,) * len(selection))
        dims = range(len(selection)) if self._dims is None else self._dims
        key: list[Hashable] = [layout.geometry]
        places: list[_Place] = []
        for dim in dims:
            segments, size = selection[dim], layout.chunks[dim]
            if not segments or (self._dims is None and len(segments) > _MAX_SEGMENTS):
                return _make_cut(layout, selection), at_start
            first = segments[0].start
            low = high = first
            for s in segments:
                last = s.start + (s.count - 1) * s.step
                low, high = min(low, s.start, last), max(high, s.start, last)
            if low < 0 or high >= layout.shape[dim]:
                return _make_cut(layout, selection), at_start  # which raises
            places.append(divmod(first, size))
            moves = not layout.codecs and not layout.fallback and low // size == high // size
            key.append(tuple([(s.start - first, s.count, s.step, s.offset) for s in segments]))
            key.append(None if moves else places[-1][1])
        found = self._kept.get(tuple(key))
        if found is None:
            cut = _make_cut(layout, selection)
            found = self._kept.put(tuple(key), (cut, tuple(places)), max(_MIN_BOXES, len(cut.boxes.chunk_row)))
        chunk, row = list(at_start.chunk), list(at_start.row)
        for dim, now, then in zip(dims, places, found[1], strict=True):
            chunk[dim], row[dim] = now[0] - then[0], now[1] - then[1]
        return found[0], Origin(chunk=tuple(chunk), row=tuple(row))


def _make_cut(layout: ArrayLayout, selection: Selection) -> Cut:
    _check_number(layout, math.prod(map(_least_chunks, selection, layout.shape, layout.chunks)))
    try:
        pieces = tuple(cut_dim(*dim) for dim in zip(selection, layout.shape, layout.chunks, strict=True))
        _check_number(layout, math.prod(len(p.chunks) for p in pieces))
        return Cut(
            pieces=pieces,
            boxes=make_boxes(pieces),
            chunks=needed_chunks(pieces),
            num_wanted=math.prod(p.num_wanted for p in pieces),
            dest_range=tuple(map(_dest_range, pieces)),
        )
    except (MemoryError, ValueError) as e:
        check_memory(layout, e)
        raise


def _least_chunks(segments: Sequence[Segment], size: int, chunk: int) -> int:
    """Return a number of chunks that are touched at least, found without a table of them."""
    few = segments[:_MAX_SEGMENTS]
    return max([1, *(min(s.count, size, (s.count - 1) * abs(s.step) // max(chunk, 1) + 1) for s in few)])


def _check_number(layout: ArrayLayout, num_chunks: int) -> None:
    if num_chunks > _MAX_CHUNKS:
        raise TooLargeError(
            f"{layout.store}: field {layout.name!r} of shape {layout.shape} in chunks of {layout.chunks}: the "
            f"selection lies in {num_chunks} of them or more, and one read takes at most {_MAX_CHUNKS}; its metadata "
            "are damaged, or write it with larger chunks, or read less at once"
        )


def _dest_range(p: DimPieces) -> tuple[int, int] | None:
    if not len(p.dest):
        return None
    near = np.where(p.sign > 0, p.dest, p.dest - p.count + 1)
    return int(near.min()), int((near + p.count - 1).max())
