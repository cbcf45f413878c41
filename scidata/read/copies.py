"""Strided copies from a buffer to the destination, merged into as few as possible.

Neighbouring chunks land at even distances in the destination, so the copies of a whole row of chunks are one copy with
one more dimension: one call, and writes in the destination's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scidata.core.types import Array, BoolArray, ByteArray, IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Gather:
    """Copies of equal shape and stride done by one NumPy call: rows gathered across a file."""

    # shape, source_strides, dest_strides: shared by all copies; strides in bytes
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    dest_strides: tuple[int, ...]
    # source, dest: ``(num,)`` int64: first byte of each in buffer and destination
    source: IntArray
    dest: IntArray

    def run(self, buffer: ByteArray, out: ByteArray, dtype: np.dtype[np.generic]) -> None:
        """Copy values of ``dtype`` unchanged."""
        ndim, nbytes = len(self.shape), dtype.itemsize
        strides = list(zip(self.shape, self.source_strides, self.dest_strides, strict=True))
        while ndim and (strides[ndim - 1][0] == 1 or strides[ndim - 1][1] == nbytes == strides[ndim - 1][2]):
            ndim, nbytes = ndim - 1, nbytes * self.shape[ndim - 1]  # values contiguous in both are merged into one
        kind, shape = np.dtype(f"V{nbytes}"), self.shape[:ndim]
        from_, source = at_any_byte(buffer, kind, shape, self.source_strides[:ndim], self.source)
        to, dest = at_any_byte(out, kind, shape, self.dest_strides[:ndim], self.dest)
        to[dest] = from_[source]


def at_any_byte(
    data: ByteArray, dtype: np.dtype[np.generic], shape: Sequence[int], strides: Sequence[int], places: IntArray
) -> tuple[Array, IntArray]:
    """Return a view with an item of ``shape`` at every possible byte offset, and ``places`` as indices of it.

    Strides may be negative; items overlap.
    """
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    below, above = -sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    num = data.size - below - above - dtype.itemsize + 1
    view: Array = np.ndarray((num, *shape), dtype, data.data, below, (1, *strides))
    return view, places - below if below else places


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies grouped by read, as Python values: indexing single items of NumPy arrays is slow.

    Read ``i`` has copies ``[bounds[i], bounds[i + 1])``, and gathers. Offsets and strides are in bytes, from the read's
    buffer and from the destination's first byte.
    """

    gathers: dict[int, list[Gather]]
    bounds: list[int]
    shape: list[tuple[int, ...]]
    source: list[int]
    source_strides: list[tuple[int, ...]]
    dest: list[int]
    dest_strides: list[tuple[int, ...]]


#: From this many similar copies on, a gather is used: it costs as much as a few of them (measured).
_MIN_GATHER = 8

#: Rounds of joining: tiles to rows of tiles, rows to blocks; the sharding codec writes in Morton order, which needs a
#: round for each doubling.
_MAX_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class _Table:
    """Copies as columns: ``read``, ``source``, ``dest`` are ``(num,)`` int64, the others ``(num, ndim)`` int64."""

    read: IntArray
    source: IntArray
    dest: IntArray
    shape: IntArray
    source_strides: IntArray
    dest_strides: IntArray

    def rows(self, which: IntArray | BoolArray) -> _Table:
        """Return the given copies."""
        return _Table(*(getattr(self, name)[which] for name in self.__slots__))

    @property
    def form(self) -> IntArray:
        """Shapes and strides of the copies, without locations."""
        return np.concatenate([self.shape, self.source_strides, self.dest_strides], axis=1)


def merge_copies(
    *,
    read: IntArray,
    num_reads: int,
    shape: IntArray,
    source: IntArray,
    source_strides: IntArray,
    dest: IntArray,
    dest_strides: IntArray,
) -> Copies:
    """Join copies of one read that have equal shape and strides at even distances.

    Example: four tiles of ``(2, 2)`` lie one after the other in a read, 16 bytes each, and side by side in the
    destination, 8 bytes apart. They become one copy of shape ``(4, 2, 2)`` with first strides 16 and 8. Copies that
    are alike but at uneven distances become a gather, from ``_MIN_GATHER`` on.

    ``read, source, dest``: ``(num,)`` int64: the read (ascending), first source byte and first destination byte of each
    copy.
    ``shape, source_strides, dest_strides``: ``(num, ndim)`` int64.
    """
    table = _Table(read, source, dest, shape, source_strides, dest_strides)
    if not ((np.diff(read) > 0) | (np.diff(dest) > 0)).all():  # neighbours in the destination need equal shapes
        table = table.rows(np.lexsort((dest, read)))
    for _ in range(_MAX_ROUNDS):
        joined = _joined(table)
        if joined is None:
            break
        table = joined
    table, gathers = _gathered(table)
    return Copies(
        gathers=gathers,
        bounds=np.searchsorted(table.read, np.arange(num_reads + 1)).tolist(),
        shape=list(map(tuple, table.shape.tolist())),
        source=table.source.tolist(),
        source_strides=list(map(tuple, table.source_strides.tolist())),
        dest=table.dest.tolist(),
        dest_strides=list(map(tuple, table.dest_strides.tolist())),
    )


def _joined(table: _Table) -> _Table | None:
    """Join neighbours at the commonest distance into copies with one more dimension; None if few could be joined."""
    num = len(table.read)
    if num < 2:
        return None
    # Joinable copies differ only in location.
    alike = table.read[1:] == table.read[:-1]
    for column in table.form.T:  # ten times faster than a reduction along a short axis
        alike &= column[1:] == column[:-1]
    step = np.stack([np.diff(table.source), np.diff(table.dest)], axis=1)
    joins = alike & _is_commonest(step, alike)
    if 5 * np.count_nonzero(joins) < num:
        return None
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    count = np.diff(np.append(first, num))
    by = np.where((count > 1)[:, None], step[np.minimum(first, len(step) - 1)], 0)
    rows = table.rows(first)
    return replace(
        rows,
        shape=np.column_stack([count, rows.shape]),
        source_strides=np.column_stack([by[:, 0], rows.source_strides]),
        dest_strides=np.column_stack([by[:, 1], rows.dest_strides]),
    )


def _gathered(table: _Table) -> tuple[_Table, dict[int, list[Gather]]]:
    """Extract similar copies of a read if there are many: return the others, and the gathers by read."""
    read, gathers = table.read, dict[int, list[Gather]]()
    if len(read) < _MIN_GATHER * (1 + np.count_nonzero(read[1:] != read[:-1])):
        return table, gathers
    columns = [read, *(column for column in table.form.T if (column != column[0]).any())]
    order = np.lexsort(columns[::-1])
    starts = np.ones(len(read), np.bool_)
    starts[1:] = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
    first = np.flatnonzero(starts)
    kept = np.ones(len(read), np.bool_)
    for a, b in zip(first.tolist(), np.append(first[1:], len(read)).tolist(), strict=True):
        if b - a < _MIN_GATHER:
            continue
        rows, one = order[a:b], int(order[a])
        kept[rows] = False
        gathers.setdefault(int(read[one]), []).append(
            Gather(
                shape=tuple(table.shape[one].tolist()),
                source_strides=tuple(table.source_strides[one].tolist()),
                dest_strides=tuple(table.dest_strides[one].tolist()),
                source=table.source[rows],
                dest=table.dest[rows],
            )
        )
    return table.rows(kept), gathers


def _is_commonest(step: IntArray, among: BoolArray) -> BoolArray:
    """Return which distances equal the most frequent one ``among`` the given rows."""
    if not among.any():
        return among
    key = step[:, 0] * 1_000_003 + step[:, 1]
    _, first, count = np.unique(key[among], return_index=True, return_counts=True)
    best = step[among][first[np.argmax(count)]]
    return (step == best).all(axis=1)
