"""The location-independent part of a plan: cut once, and shared by samples that differ in their first row.

Consecutive samples of a data set want the same part of another row of the sample dimension. Counted from its first
chunk (and in a raw chunk from its first row) that is the same cut, so its tables are made once and kept in a small
cache; a plan only adds where the cut begins and where the chunks lie.

A *piece* is the part of one segment that lies in one chunk, along one dimension. Selection and chunk grid are both
products over the dimensions, so a table per dimension says everything; a *box* is one piece from each dimension. Pure
arithmetic, vectorised: an array may have 100,000 chunks, or a selection 20,000 segments.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, IntArray, Segment, Selection, segment_table
from scidata.errors import ConfigError, SciDataError, TooLargeError


@dataclass(frozen=True, kw_only=True, eq=False)
class DimPieces:
    """Pieces of one dimension by ascending chunk; all arrays ``(num_pieces,)`` int64."""

    # start, count, step: indices inside the chunk, always ascending (``step > 0``)
    start: IntArray
    count: IntArray
    step: IntArray
    # dest, sign: destination index of the first element, and +1 or -1, the direction of the next ones
    dest: IntArray
    sign: IntArray
    chunk_row: IntArray  # row of the piece's chunk in ``chunks``
    chunks: IntArray  # ``(num,)`` distinct touched chunk coordinates, ascending


def slice_of(first: int, count: int, sign: int) -> slice:
    """Return the slice of ``count`` indices from ``first`` on, ascending or descending."""
    if sign > 0:
        return slice(first, first + count)
    stop = first - count
    return slice(first, stop if stop >= 0 else None, -1)


def chunk_of(rows: IntArray, grid: int | IntArray) -> IntArray:
    """Return the chunk of each row; ``grid``: see :meth:`ArrayLayout.chunk_grid`."""
    return rows // grid if isinstance(grid, int) else np.searchsorted(grid, rows, side="right") - 1


def cut_dim(segments: Sequence[Segment], size: int, grid: int | IntArray) -> DimPieces:
    """Cut the segments of one dimension at the chunk edges; ``grid``: see :meth:`ArrayLayout.chunk_grid`."""
    chunk = grid if isinstance(grid, int) else int(np.diff(grid).max())
    if isinstance(grid, int) and len(segments) == 1 and (one := _one_piece(segments[0], size, chunk)) is not None:
        return one
    table = segment_table(segments)
    table = table[table[:, 1] > 0]
    start, count, step, offset = table.T
    last = start + (count - 1) * step
    low, high = np.minimum(start, last), np.maximum(start, last)
    bad = (low < 0) | (high >= size) | (step == 0) | (offset < 0)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise ConfigError(f"segment {table[i].tolist()} (start, count, step, offset) does not fit {size} rows")
    sign, step = np.sign(step), np.abs(step)
    coordinate, end = chunk_of(low, grid), chunk_of(high, grid)
    if (coordinate == end).all():  # each segment in one chunk
        first, stop = np.zeros_like(count), count
    else:
        sparse = step >= chunk  # then every row has its own chunk, and the chunks between have none
        num = np.where(sparse, count, end - coordinate + 1)
        segment = np.repeat(np.arange(len(table)), num)
        within = np.arange(int(num.sum())) - (np.cumsum(num) - num)[segment]
        low, count, step, sign, offset = (a[segment] for a in (low, count, step, sign, offset))
        sparse = sparse[segment]
        coordinate = np.where(
            sparse, chunk_of(low + np.where(sparse, within * step, 0), grid), coordinate[segment] + within
        )
        first = np.where(sparse, within, np.maximum(0, -((low - _begin_of(coordinate, grid)) // step)))
        stop = np.where(sparse, within + 1, np.minimum(count, -((low - _begin_of(coordinate + 1, grid)) // step)))
        if not isinstance(grid, int) and not (some := stop > first).all():  # steps can skip small chunks
            coordinate, first, stop, low, count, step, sign, offset = (
                a[some] for a in (coordinate, first, stop, low, count, step, sign, offset)
            )
    pieces = {
        "start": low + first * step - _begin_of(coordinate, grid),
        "count": stop - first,
        "step": step,
        "dest": np.where(sign > 0, offset + first, offset + count - 1 - first),
        "sign": sign,
    }
    if not (coordinate[1:] >= coordinate[:-1]).all():
        order = np.argsort(coordinate, kind="stable")
        coordinate, pieces = coordinate[order], {name: column[order] for name, column in pieces.items()}
    next_chunk = np.ones(len(coordinate), np.bool_)
    next_chunk[1:] = coordinate[1:] != coordinate[:-1]
    return DimPieces(**pieces, chunk_row=np.cumsum(next_chunk) - 1, chunks=coordinate[next_chunk])


def _begin_of(chunks: IntArray, grid: int | IntArray) -> IntArray:
    return chunks * grid if isinstance(grid, int) else grid[chunks]


def _one_piece(s: Segment, size: int, chunk: int) -> DimPieces | None:
    """Fast path: cut a segment inside one chunk; None if the segment needs the general case."""
    last = s.start + (s.count - 1) * s.step
    low, high = min(s.start, last), max(s.start, last)
    if s.count < 1 or s.step == 0 or s.offset < 0 or low < 0 or high >= size or low // chunk != high // chunk:
        return None
    to, by = (s.offset, 1) if s.step > 0 else (s.offset + s.count - 1, -1)
    values = np.array([[low % chunk], [s.count], [abs(s.step)], [to], [by], [0], [low // chunk]], np.int64)
    start, count, step, dest, sign, row, chunks = values
    return DimPieces(start=start, count=count, step=step, dest=dest, sign=sign, chunk_row=row, chunks=chunks)


def _product(columns: Sequence[IntArray]) -> IntArray:
    """Return the Cartesian product of the columns, ``(num, ndim)``, C order."""
    sizes, ndim = [len(column) for column in columns], len(columns)
    table = np.empty((*sizes, ndim), np.int64)
    for dim, column in enumerate(columns):
        table[..., dim] = column.reshape(-1, *(1,) * (ndim - 1 - dim))
    return table.reshape(math.prod(sizes), ndim)


@dataclass(frozen=True, kw_only=True, eq=False)
class Boxes:
    """The boxes of a selection, grouped by chunk."""

    piece: IntArray  # ``(num_boxes, ndim)`` int64, the piece of each dimension
    chunk_row: IntArray  # ``(num_boxes,)`` int64, row of the box's chunk among the needed chunks, ascending
    bounds: IntArray  # ``(num_chunks + 1,)`` int64: chunk row ``i`` has boxes ``[bounds[i], bounds[i + 1])``

    def gather(self, pieces: Sequence[DimPieces], name: str, rows: IntArray | slice = slice(None)) -> IntArray:
        """Return one attribute of the pieces as ``(num_boxes, ndim)``."""
        piece = self.piece[rows]
        table = np.empty(piece.shape, np.int64, order="F")  # column order, since it is processed by columns
        for dim, p in enumerate(pieces):
            values = getattr(p, name)
            table[:, dim] = values[0] if len(values) == 1 else values[piece[:, dim]]
        return table


def make_boxes(pieces: Sequence[DimPieces]) -> Boxes:
    """Combine the pieces of all dimensions into boxes."""
    piece = _product([np.arange(len(p.count)) for p in pieces])
    num_boxes, num_chunks = len(piece), math.prod(len(p.chunks) for p in pieces)
    row = np.zeros(num_boxes, np.int64)
    for dim, p in enumerate(pieces):
        row = row * len(p.chunks) + p.chunk_row[piece[:, dim]]
    if num_boxes == num_chunks:  # one piece per chunk: already in order
        return Boxes(piece=piece, chunk_row=row, bounds=np.arange(num_chunks + 1))
    order = np.argsort(row, kind="stable")
    row = row[order]
    return Boxes(piece=piece[order], chunk_row=row, bounds=np.searchsorted(row, np.arange(num_chunks + 1)))


#: Total boxes of cached cuts, each counted as at least 1024: 64 cuts (files of a series may differ in length,
#: samples in their row inside a chunk), or one large cut of about 20 MB with all tables.
_MIN_BOXES = 1024
_MAX_KEPT = 64 * _MIN_BOXES
_MAX_SEGMENTS = 16  # segments of a dimension: comparing more costs as much as cutting
_MAX_CHUNKS = 1 << 22  # chunks of one read: tables of more take a second and half a GB


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A selection cut at chunk edges; chunks and, in raw chunks, rows are relative to an :class:`Origin`."""

    # pieces, boxes: the pieces of each dimension, and the boxes formed by them
    pieces: tuple[DimPieces, ...]
    boxes: Boxes
    chunks: IntArray  # ``(num_chunks, ndim)`` coordinates, C order
    num_wanted: int  # elements selected
    # first and last destination index of each dimension, None if nothing is selected
    dest_range: tuple[tuple[int, int] | None, ...]
    # tables derived from this cut, by destination shape and by whether the chunks lie behind URLs
    tables: Cache[Any] = field(default_factory=lambda: Cache(4))


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Start of a cut: first chunk, and first row inside it, along each dimension."""

    chunk: tuple[int, ...]
    row: tuple[int, ...]

    def move_chunks(self, chunks: IntArray) -> IntArray:
        """Convert relative chunk coordinates to the array's."""
        return chunks + np.array(self.chunk, np.int64) if any(self.chunk) else chunks

    def move_pieces(self, pieces: tuple[DimPieces, ...]) -> tuple[DimPieces, ...]:
        """Convert relative pieces to the array's."""
        return tuple(
            replace(p, start=p.start + row, chunks=p.chunks + chunk) if chunk or row else p
            for p, chunk, row in zip(pieces, self.chunk, self.row, strict=True)
        )

    def first_byte(self, layout: ArrayLayout) -> int:
        """Return the cut's offset inside each chunk, in bytes."""
        first, stride = 0, layout.dtype.itemsize
        for dim in reversed(layout.axis_order):
            first, stride = first + self.row[dim] * stride, stride * layout.chunks[dim]
        return first


def check_memory(layout: ArrayLayout, error: Exception) -> None:
    """Raise TooLargeError if a plan ran out of memory: the array has too many chunks or runs."""
    too_big = isinstance(error, MemoryError) or "Maximum allowed" in str(error) or "is too big" in str(error)  # NumPy's
    if too_big and not isinstance(error, SciDataError):
        raise TooLargeError(
            f"{layout.store}: field {layout.name!r} of shape {layout.shape} in chunks of {layout.chunks}: planning "
            "the selection takes more than there is memory for; its metadata are damaged, or read less at once"
        ) from error


_Place: TypeAlias = tuple[int, int]  # a chunk along a dimension, and a row inside it


class Cuts:
    """Cache of cuts, each valid for all selections that differ from it only in their first rows.

    Thread-safe.

    ``dims``: the dimensions along which selections move, where those of the others are always the same; None: along
    all.
    """

    def __init__(self, dims: tuple[int, ...] | None = None) -> None:
        self._dims = dims
        self._kept: Cache[tuple[Cut, tuple[_Place, ...]]] = Cache(_MAX_KEPT)

    def find(self, layout: ArrayLayout, selection: Selection) -> tuple[Cut, Origin]:
        """Return a cut of ``selection``, new or cached, relative to its origin."""
        # Of [10, 12) in chunks of 4 rows the place is (2, 2): chunk 2, row 2 in it. The cut made for it serves
        # [18, 20), place (4, 2), with its origin 2 chunks on; in raw chunks also [17, 19), place (4, 1), 2 chunks on
        # and 1 row back. Where chunks are decoded, a row further on is another row of a chunk: a cut of its own.
        if len(selection) != len(layout.shape):
            raise ConfigError(
                f"{layout.store}: field {layout.name!r} has {len(layout.shape)} dimensions {layout.dims}, "
                f"but the selection has {len(selection)}"
            )
        at_start = Origin(chunk=(0,) * len(selection), row=(0,) * len(selection))
        dims = range(len(selection)) if self._dims is None else self._dims
        if layout.edges:  # other chunks are further on
            return _make_cut(layout, selection), at_start
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
        grids = map(layout.chunk_grid, range(len(selection)))
        pieces = tuple(cut_dim(*dim) for dim in zip(selection, layout.shape, grids, strict=True))
        _check_number(layout, math.prod(len(p.chunks) for p in pieces))
        return Cut(
            pieces=pieces,
            boxes=make_boxes(pieces),
            chunks=_product([p.chunks for p in pieces]),
            num_wanted=math.prod(int(p.count.sum()) for p in pieces),
            dest_range=tuple(map(_dest_range, pieces)),
        )
    except (MemoryError, ValueError) as e:
        check_memory(layout, e)
        raise


def _least_chunks(segments: Sequence[Segment], size: int, chunk: int) -> int:
    """Return a lower bound of the number of touched chunks, without a table of them."""
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
