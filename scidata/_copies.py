"""Strided copies from a buffer to the destination, as few as there can be.

Neighbouring chunks land at even distances in the destination, so the copies of a whole row of chunks are one copy with
one more dimension: one call, and writes in the destination's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    num = len(read)
    step = np.zeros((num, 2), np.int64)
    step[1:, 0], step[1:, 1] = np.diff(source), np.diff(dest)
    unlike = np.ones(num, np.bool_)
    unlike[1:] = (
        (read[1:] != read[:-1])
        | (shape[1:] != shape[:-1]).any(axis=1)
        | (source_strides[1:] != source_strides[:-1]).any(axis=1)
        | (dest_strides[1:] != dest_strides[:-1]).any(axis=1)
    )
    change = unlike.copy()
    change[1:] |= (step[1:] != step[:-1]).any(axis=1)
    # A jump changes the distance twice, going and coming back: of consecutive changes every second one starts a run.
    index = np.arange(num)
    since = index - np.maximum.accumulate(np.where(change, -1, index))
    starts = unlike | (change & (since % 2 == 1))
    starts[:1] = True
    first = np.flatnonzero(starts)
    count = np.diff(np.append(first, num))
    by = step[np.minimum(first + 1, num - 1)] if num else step
    by[count == 1] = 0

    def joined(lead: IntArray, table: IntArray) -> list[tuple[int, ...]]:
        return list(map(tuple, np.concatenate([lead[:, None], table[first]], axis=1).tolist()))

    return Copies(
        bounds=np.searchsorted(read[first], np.arange(num_reads + 1)).tolist(),
        shape=joined(count, shape),
        source=source[first].tolist(),
        source_strides=joined(by[:, 0], source_strides),
        dest=dest[first].tolist(),
        dest_strides=joined(by[:, 1], dest_strides),
    )
