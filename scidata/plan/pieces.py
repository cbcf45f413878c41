"""Cut a selection along the chunk grid: pieces of each dimension, and the boxes that they make.

A *piece* is the part of one segment that lies in one chunk, along one dimension. Selection and chunk grid are both
products over the dimensions, so a table per dimension says everything; a *box* is one piece from each dimension. Pure
arithmetic, vectorised: an array may have 100,000 chunks, or a selection 20,000 segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scidata.core.types import IntArray, Segment, segment_table
from scidata.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class DimPieces:
    """The pieces of one dimension, by ascending chunk; all arrays ``(num_pieces,)`` int64."""

    # start, count, step: indices inside the chunk, always ascending (``step > 0``)
    start: IntArray
    count: IntArray
    step: IntArray
    # dest, sign: destination index of the first one, and +1 or -1: whether the next one lands after or before it
    dest: IntArray
    sign: IntArray
    chunk_row: IntArray  # row of the piece's chunk in ``chunks``
    chunks: IntArray  # ``(num,)`` the distinct chunk coordinates touched, ascending

    @property
    def num_wanted(self) -> int:
        """Rows selected."""
        return int(self.count.sum())

    def moved(self, chunk: int, row: int) -> DimPieces:
        """Return the same pieces ``chunk`` chunks and, inside each, ``row`` rows further on."""
        return replace(self, start=self.start + row, chunks=self.chunks + chunk)


def slice_of(first: int, count: int, sign: int) -> slice:
    """Return the slice that visits ``count`` indices from ``first`` on, upwards or downwards."""
    if sign > 0:
        return slice(first, first + count)
    stop = first - count
    return slice(first, stop if stop >= 0 else None, -1)


def cut_dim(segments: Sequence[Segment], size: int, chunk: int) -> DimPieces:
    """Cut the segments of one dimension at the chunk edges.

    Raises ConfigError: a segment reaches outside ``[0, size)`` or has step 0.
    """
    if len(segments) == 1 and (one := _one_piece(segments[0], size, chunk)) is not None:
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
    coordinate = low // chunk
    if (coordinate == high // chunk).all():  # each segment in one chunk
        first, stop = np.zeros_like(count), count
    else:
        sparse = step >= chunk  # then every row has its own chunk, and chunks in between have none
        num = np.where(sparse, count, high // chunk - coordinate + 1)
        segment = np.repeat(np.arange(len(table)), num)
        within = np.arange(int(num.sum())) - (np.cumsum(num) - num)[segment]
        low, count, step, sign, offset = (a[segment] for a in (low, count, step, sign, offset))
        sparse = sparse[segment]
        coordinate = np.where(sparse, low + within * step, (low // chunk + within) * chunk) // chunk
        first = np.where(sparse, within, np.maximum(0, -((low - coordinate * chunk) // step)))
        stop = np.where(sparse, within + 1, np.minimum(count, -((low - (coordinate + 1) * chunk) // step)))
    pieces = {
        "start": low + first * step - coordinate * chunk,
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


def _one_piece(s: Segment, size: int, chunk: int) -> DimPieces | None:
    """Cut a segment that lies in one chunk, as those of most dimensions do; None where there is more to do."""
    last = s.start + (s.count - 1) * s.step
    low, high = min(s.start, last), max(s.start, last)
    if s.count < 1 or s.step == 0 or s.offset < 0 or low < 0 or high >= size or low // chunk != high // chunk:
        return None
    to, by = (s.offset, 1) if s.step > 0 else (s.offset + s.count - 1, -1)
    values = np.array([[low % chunk], [s.count], [abs(s.step)], [to], [by], [0], [low // chunk]], np.int64)
    start, count, step, dest, sign, row, chunks = values
    return DimPieces(start=start, count=count, step=step, dest=dest, sign=sign, chunk_row=row, chunks=chunks)


def needed_chunks(pieces: Sequence[DimPieces]) -> IntArray:
    """Return the coordinates of the chunks touched, ``(num, ndim)``, in C order."""
    return _product([p.chunks for p in pieces])


def _product(columns: Sequence[IntArray]) -> IntArray:
    """Return each combination of a value of each column, ``(num, ndim)``, C order."""
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
        table = np.empty(piece.shape, np.int64, order="F")  # it is worked on by columns
        for dim, p in enumerate(pieces):
            values = getattr(p, name)
            table[:, dim] = values[0] if len(values) == 1 else values[piece[:, dim]]
        return table


def make_boxes(pieces: Sequence[DimPieces]) -> Boxes:
    """Multiply the pieces of all dimensions."""
    piece = _product([np.arange(len(p.count)) for p in pieces])
    num_boxes, num_chunks = len(piece), math.prod(len(p.chunks) for p in pieces)
    row = np.zeros(num_boxes, np.int64)
    for dim, p in enumerate(pieces):
        row = row * len(p.chunks) + p.chunk_row[piece[:, dim]]
    if num_boxes == num_chunks:  # one piece a chunk: already in order
        return Boxes(piece=piece, chunk_row=row, bounds=np.arange(num_chunks + 1))
    order = np.argsort(row, kind="stable")
    row = row[order]
    return Boxes(piece=piece[order], chunk_row=row, bounds=np.searchsorted(row, np.arange(num_chunks + 1)))
