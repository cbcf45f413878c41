"""Which rank writes which rows: every chunk by one rank, whole, wherever the bounds of the parts lie. Pure arithmetic.

Ranks hold contiguous rows of each dimension; a file's chunks, or shards, begin elsewhere. Each is written by the rank
that holds most of its rows. So ranks exchange a strip along each bound that is no chunk's edge, and nothing where
bounds lie on edges. The rows that a rank writes are contiguous along each dimension, as are those that it holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
    num_rows, found = int(bounds[-1]), bounds.copy()
    for part in range(1, len(bounds) - 1):
        start = int(bounds[part]) // unit * unit
        if start == bounds[part]:
            continue
        stop = min(start + unit, num_rows)
        first, last = np.searchsorted(bounds, start, "right") - 1, np.searchsorted(bounds, stop)  # parts that hold any
        held = np.minimum(bounds[first + 1 : last + 1], stop) - np.maximum(bounds[first:last], start)
        found[part] = start if first + int(held.argmax()) >= part else stop
    return found


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The boxes of an array that one rank holds, writes, and sends and receives before it writes.

    Attributes
    ----------
    held, written
        Global boxes; None where it is another part's: of an array that is the same along an axis.
    sends, receives
        A part and a global box, in the order of the parts; its own among them where it keeps something.
    """

    part: int
    held: Box | None
    written: Box | None
    sends: tuple[tuple[int, Box], ...]
    receives: tuple[tuple[int, Box], ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box that is written."""
        return tuple(rows.stop - rows.start for rows in self.written or ())


def exchange_of(
    shape: Sequence[int], units: Sequence[int], parts: Sequence[int], splits: Sequence[tuple[int, IntArray] | None],
    part: int,
) -> Exchange:  # fmt: skip
    """Return the boxes of an array that a part of a domain holds, writes, sends and receives.

    Parameters
    ----------
    shape, units
        Of the array, and of the units that are written whole.
    parts
        Number of parts along each axis of the domain.
    splits
        For each axis the dimension that it splits and the bounds of the parts along it; None where the array is the
        same along the axis: then it is the first part's there.
    part
        Number of the part, the last axis varying fastest.
    """
    ends = [[(0, size)] for size in shape]
    writes = [[(0, size)] for size in shape]
    for split in splits:
        if split is not None:
            dim, bounds = split
            ends[dim] = _ranges(bounds)
            writes[dim] = _ranges(writer_bounds(bounds, units[dim]))
    places = list(itertools.product(*map(range, parts)))

    def box(place: tuple[int, ...], ranges: list[list[tuple[int, int]]]) -> Box | None:
        at = [0] * len(shape)
        for index, split in zip(place, splits, strict=True):
            if split is not None:
                at[split[0]] = index
            elif index:
                return None
        return tuple(slice(*each[i]) for each, i in zip(ranges, at, strict=True))

    own, others = places[part], list(enumerate(places))
    held, written = box(own, ends), box(own, writes)
    sends = [(i, common) for i, at in others if (common := common_box(held, box(at, writes))) is not None]
    receives = [(i, common) for i, at in others if (common := common_box(box(at, ends), written)) is not None]
    return Exchange(part=part, held=held, written=written, sends=tuple(sends), receives=tuple(receives))


def whole_units(own: Box | None, written: Box, units: Sequence[int]) -> tuple[Box | None, tuple[Box, ...]]:
    """Split a rank's box to write into the units that it holds whole itself, and all others.

    Parameters
    ----------
    own
        The global box of ``written`` that this rank holds itself; None where there is none.

    Returns
    -------
    tuple
        The units that lie in ``own``, a box, None where there are none; and boxes of all others.

    Examples
    --------
    >>> whole_units((slice(5, 12),), (slice(4, 12),), (4,))
    ((slice(8, 12, None),), ((slice(4, 8, None),),))
    """
    if own is None:
        return None, (written,)
    inner: list[slice] = []
    for mine, all_, unit in zip(own, written, units, strict=True):
        stop = mine.stop if mine.stop == all_.stop else mine.stop // unit * unit  # the last unit may be a short one
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
    """Return the intersection of two boxes; None where it is empty. A box without dimensions is one value."""
    if first is None or second is None:
        return None
    rows = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(first, second, strict=True)]
    return tuple(slice(*each) for each in rows) if all(start < stop for start, stop in rows) else None


def within(box: Box, outer: Box) -> Box:
    """Return a global box in the numbering of one that contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def _ranges(bounds: IntArray) -> list[tuple[int, int]]:
    return list(itertools.pairwise(bounds.tolist()))
