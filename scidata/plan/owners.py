"""Assign each chunk to one writing rank, for any bounds of the parts. Pure arithmetic.

Ranks hold contiguous rows of each dimension; a file's chunks, or shards, begin elsewhere. Each is written by the rank
that holds most of its rows. So ranks exchange a strip along each bound that is no chunk's edge, and nothing where
bounds lie on edges. The rows that a rank writes are contiguous along each dimension, as are those that it holds.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scidata.core.types import IntArray

Box = tuple[slice, ...]


def writer_bounds(bounds: IntArray, unit: int) -> IntArray:
    """Return the bounds of the rows that each part writes, on multiples of ``unit`` rows.

    A unit that several parts hold is written by the one that holds most of its rows, the first of several such.

    Parameters
    ----------
    bounds
        ``(parts + 1,)`` int64: part ``i`` holds rows ``[bounds[i], bounds[i + 1])``.

    Examples
    --------
    >>> writer_bounds(np.array([0, 5, 8, 20]), 4).tolist()
    [0, 4, 8, 20]
    """
    found, inner = bounds.copy(), np.flatnonzero(bounds[1:-1] % unit) + 1
    if not len(inner):
        return found
    at = bounds[inner]
    start = at // unit * unit
    stop = np.minimum(start + unit, bounds[-1])
    firsts = np.flatnonzero(np.diff(start, prepend=-1))  # part bounds inside one unit
    group = np.cumsum(np.diff(start, prepend=-1) > 0) - 1
    before = at - np.maximum(bounds[inner - 1], start)  # rows of the unit in the part that ends here
    most, lasts = np.maximum.reduceat(before, firsts), np.append(firsts[1:], len(inner)) - 1
    winners = inner[lasts]  # the part that begins at the last bound, unless an earlier one has as many rows
    which = np.flatnonzero(before == most[group])
    which = which[np.unique(group[which], return_index=True)[1]]
    winners = np.where(most >= (stop - at)[lasts], inner[which] - 1, winners)
    found[inner] = np.where(winners[group] >= inner, start, stop)
    return found


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Boxes of an array that one rank holds, writes, and exchanges before writing."""

    part: int
    # held, written: global boxes; None if it is another part's: of an array that is the same along an axis
    held: Box | None
    written: Box | None
    # sends, receives: a part and a global box, ordered by part; includes itself if it keeps rows
    sends: tuple[tuple[int, Box], ...]
    receives: tuple[tuple[int, Box], ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the written box."""
        return tuple(rows.stop - rows.start for rows in self.written or ())


def exchange_of(
    shape: Sequence[int], units: Sequence[int], parts: Sequence[int], splits: Sequence[tuple[int, IntArray] | None],
    part: int,
) -> Exchange:  # fmt: skip
    """Return the boxes that one part of a domain holds, writes, sends and receives.

    ``shape, units``: of the array, and of the units that are written whole.
    ``parts``: number of parts along each axis of the domain.
    ``splits``: for each axis the dimension that it splits and the bounds of the parts along it; None if the array is
    the same along the axis: then it is the first part's there.
    ``part``: number of the part, the last axis varying fastest.
    """
    holds = [None if split is None else split[1] for split in splits]
    writes = [None if split is None else writer_bounds(split[1], units[split[0]]) for split in splits]
    strides = [math.prod(parts[axis + 1 :]) for axis in range(len(parts))]
    place = [part // stride % num for stride, num in zip(strides, parts, strict=True)]

    def box(place: Sequence[int], cuts: Sequence[IntArray | None]) -> Box | None:
        found = [slice(0, size) for size in shape]
        for index, split, each in zip(place, splits, cuts, strict=True):
            if split is not None and each is not None:
                found[split[0]] = slice(int(each[index]), int(each[index + 1]))
            elif index:
                return None
        return tuple(found)

    def near(own: Box | None, cuts: Sequence[IntArray | None]) -> Iterator[tuple[int, Box]]:
        """Yield the parts whose rows overlap a box, and the overlaps."""
        ranges = [range(1)] * len(parts)
        for axis, (split, each) in enumerate(zip(splits, cuts, strict=True)):
            if split is not None and each is not None and own is not None:
                rows = own[split[0]]
                ranges[axis] = range(*np.searchsorted(each, [rows.start + 1, rows.stop]) - [1, 0])
        for other in itertools.product(*ranges):
            if (common := common_box(own, box(other, cuts))) is not None:
                yield sum(map(operator.mul, other, strides)), common

    held, written = box(place, holds), box(place, writes)
    return Exchange(
        part=part, held=held, written=written, sends=tuple(near(held, writes)), receives=tuple(near(written, holds))
    )


def whole_units(own: Box | None, written: Box, units: Sequence[int]) -> tuple[Box | None, tuple[Box, ...]]:
    """Split a rank's written box into units that the rank holds entirely, and the rest.

    Parameters
    ----------
    own
        The global box of ``written`` that this rank holds itself; None if there is none.

    Returns
    -------
    tuple
        The units that lie in ``own``, a box, None if there are none; and boxes of all others.

    Examples
    --------
    >>> whole_units((slice(5, 12),), (slice(4, 12),), (4,))
    ((slice(8, 12, None),), ((slice(4, 8, None),),))
    """
    if own is None:
        return None, (written,)
    inner: list[slice] = []
    for mine, all_, unit in zip(own, written, units, strict=True):
        stop = mine.stop if mine.stop == all_.stop else mine.stop // unit * unit  # the last unit may be short
        inner.append(slice(-(-mine.start // unit) * unit, stop))
    if any(rows.start >= rows.stop for rows in inner):
        return None, (written,)
    rest, others = list(written), []
    for dim, rows in enumerate(inner):
        for start, stop in ((rest[dim].start, rows.start), (rows.stop, rest[dim].stop)):
            if start < stop:
                others.append((*rest[:dim], slice(start, stop), *rest[dim + 1 :]))
        rest[dim] = rows
    return tuple(inner), tuple(others)


def common_box(first: Box | None, second: Box | None) -> Box | None:
    """Return the intersection of two boxes; None if empty. A box without dimensions is one value."""
    if first is None or second is None:
        return None
    rows = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(first, second, strict=True)]
    return tuple(slice(*each) for each in rows) if all(start < stop for start, stop in rows) else None


def within(box: Box, outer: Box) -> Box:
    """Convert a global box to the numbering of a box that contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))
