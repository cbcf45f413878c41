"""Strided copies from a buffer to the destination, as few as there can be.

Neighbouring chunks land at even distances in the destination, so the copies of a whole row of chunks are one copy with
one more dimension: one call, and writes in the destination's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.types import IntArray

__all__ = ["Copies", "merge_copies"]


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies grouped by read, as Python values: indexing NumPy arrays one by one is slow.

    Read ``i`` has copies ``[bounds[i], bounds[i + 1])``. Offsets and strides are in bytes, from the read's buffer and
    from the destination's first byte.
    """

    bounds: list[int]
    shape: list[tuple[int, ...]]
    source: list[int]
    source_strides: list[tuple[int, ...]]
    dest: list[int]
    dest_strides: list[tuple[int, ...]]


#: Rounds of joining: tiles to rows of tiles, rows to blocks; the sharding codec writes in Morton order, which takes a
#: round for every doubling.
_MAX_ROUNDS = 10


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
    """Join copies of one read that have the same shape and strides and lie at even distances.

    Parameters
    ----------
    read, source, dest
        ``(num,)`` int64: the read (ascending), first source byte and first destination byte of each copy.
    shape, source_strides, dest_strides
        ``(num, ndim)`` int64.
    """
    if not ((np.diff(read) > 0) | (np.diff(dest) > 0)).all():  # neighbours in the destination have equal shapes
        order = np.lexsort((dest, read))
        read, source, dest = read[order], source[order], dest[order]
        shape, source_strides, dest_strides = shape[order], source_strides[order], dest_strides[order]
    for _ in range(_MAX_ROUNDS):
        if len(read) < 2:
            break
        # Copies that may be joined have everything but their places in common.
        alike = read[1:] == read[:-1]
        for table in (shape, source_strides, dest_strides):
            for column in table.T:  # ten times faster than a reduction along a short axis
                alike &= column[1:] == column[:-1]
        step = np.stack([np.diff(source), np.diff(dest)], axis=1)
        joins = alike & _is_commonest(step, alike)
        if 5 * np.count_nonzero(joins) < len(read):
            break
        first = np.flatnonzero(np.concatenate([[True], ~joins]))
        count = np.diff(np.append(first, len(read)))
        by = np.where((count > 1)[:, None], step[np.minimum(first, len(step) - 1)], 0)
        read, source, dest = read[first], source[first], dest[first]
        shape, source_strides, dest_strides = (
            np.column_stack([lead, table[first]])
            for lead, table in ((count, shape), (by[:, 0], source_strides), (by[:, 1], dest_strides))
        )
    return Copies(
        bounds=np.searchsorted(read, np.arange(num_reads + 1)).tolist(),
        shape=list(map(tuple, shape.tolist())),
        source=source.tolist(),
        source_strides=list(map(tuple, source_strides.tolist())),
        dest=dest.tolist(),
        dest_strides=list(map(tuple, dest_strides.tolist())),
    )


def _is_commonest(step: IntArray, among: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Say where the distance is the one that occurs most often ``among`` the rows given."""
    if not among.any():
        return among
    key = step[:, 0] * 1_000_003 + step[:, 1]
    _, first, count = np.unique(key[among], return_index=True, return_counts=True)
    best = step[among][first[np.argmax(count)]]
    commonest: npt.NDArray[np.bool_] = (step == best).all(axis=1)
    return commonest
