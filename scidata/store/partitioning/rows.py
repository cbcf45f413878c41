"""Rows put in order over disk, as :mod:`scidata.meshes.order.hilbert` puts them in order in memory, row for row.

The sort by Hilbert keys is one of buckets, whose bounds are keys of some rows. Recursive bisection goes over halves in
files until one has room in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from scidata.core.types import AnyArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.hetero import RawSet
from scidata.meshes.order.curve import BITS, hilbert_keys
from scidata.meshes.order.hilbert import bisected, count_at_poles, curve_or_boxes, levels_of
from scidata.meshes.order.ids import Keys, blocks, id_dtype, run_starts, stable_sort
from scidata.meshes.order.positions import Box, finite_points, longest_axis, num_duplicates, unit_sphere
from scidata.meshes.sample import RawSample
from scidata.store.format.spools import Buckets, Spool
from scidata.store.partitioning.by_time import order_by_time, time_of, times_of
from scidata.store.partitioning.ordered import order_of
from scidata.store.partitioning.room import Room

_POINT = 160  # memory that a block takes for each point
_KEY, _SORTED, _HALVED = 40, 60, 100  # of a time that is read, a row that is sorted by its key, or bisected
_SOME = 1 << 16  # points that say what keys there are


def order_rows(
    raw: RawSample, points: Spool | None, num_rows: int, by: str, room: Room
) -> tuple[IntArray | Spool, list[str]]:
    """Return the order of the rows of a sample, over disk where the room has a folder, and remarks on it.

    Raises ConfigError: more points share one key than memory has room for.
    """
    if time_of(by) is not None:
        in_memory = room.folder is None or not num_rows
        return order_by_time(raw, by) if in_memory else _by_time(raw, num_rows, by, room), []
    if room.folder is None or not num_rows or by == "rows" or points is None:
        positions = None if points is None else points[:]
        return order_of(raw, {raw.entity: RawSet(num_nodes=num_rows, points=positions)}, {}, by)
    given = _Points(points, room, on_sphere=raw.on_sphere)
    if by == "rcb":
        return _in_boxes(given, room), []

    def along_curve(box: Box | None) -> tuple[Spool, int, int]:
        return _along_curve(raw.name, given, box, room)

    return curve_or_boxes(given, given.at_poles, along_curve, lambda: _in_boxes(given, room))  # type: ignore[arg-type]


class _Points:
    """Points in a spool, in the space of the orders, which ask for parts of them; and some of them, at random."""

    def __init__(self, spool: Spool, room: Room, *, on_sphere: bool = False) -> None:
        self._spool, self._on_sphere, self._num_block = spool, on_sphere, room.block(_POINT)
        self.at_poles = np.zeros(2, np.int64)
        some, ends, rng = list[AnyArray](), list[AnyArray](), np.random.default_rng(0)
        for rows, array in self.by_blocks():
            some.append(array[rng.integers(0, len(array), -(-_SOME * len(array) // len(spool)))])
            ends += [array.min(axis=0), array.max(axis=0)]
            self.at_poles += count_at_poles(spool[rows]) if on_sphere else 0
        self.some, self._ends = np.concatenate(some), np.array(ends)

    def _seen(self, array: AnyArray) -> AnyArray:
        return unit_sphere(array[:, :2]) if self._on_sphere else finite_points(array)

    def __len__(self) -> int:
        return len(self._spool)

    def __getitem__(self, rows: slice | IntArray) -> AnyArray:
        return self._seen(self._spool.at_random(0)[rows])

    def min(self, axis: int) -> AnyArray:
        return np.asarray(self._ends.min(axis=axis))

    def max(self, axis: int) -> AnyArray:
        return np.asarray(self._ends.max(axis=axis))

    def by_blocks(self) -> Iterator[tuple[slice, AnyArray]]:
        """Yield the rows of each block, and its points."""
        for rows in blocks(len(self), self._num_block):
            yield rows, self._seen(self._spool[rows])


def _by_time(raw: RawSample, num_rows: int, by: str, room: Room) -> Spool:
    """Return the order of the times of rows, which are read twice."""

    def every_key() -> Iterator[tuple[slice, Keys]]:
        for rows in blocks(num_rows, room.block(_KEY)):
            yield rows, times_of(raw, by, rows).view(np.uint64) ^ np.uint64(1 << 63)  # as signed numbers rise

    rng = np.random.default_rng(0)
    some = [keys[rng.integers(0, len(keys), -(-_SOME * len(keys) // num_rows))] for _, keys in every_key()]
    buckets = _in_buckets(raw.name, every_key(), np.concatenate(some), num_rows, 64, "rows have the same time", room)
    every = room.spool(np.int64)
    for keys, numbers in buckets.taken():
        every.append(numbers[stable_sort(keys, 64)[1]])
    return every


def _in_buckets(
    name: str, every: Iterator[tuple[slice, Keys]], some: Keys, num_rows: int, num_bits: int, alike: str, room: Room
) -> Buckets:
    """Put keys below ``2**num_bits``, and their rows, into buckets, whose bounds are some of the keys."""
    dtype = id_dtype(num_rows)
    nbytes = num_rows * (8 + dtype.itemsize)
    buckets = room.buckets(1, nbytes, [np.uint64, dtype], shift=num_bits, some=np.sort(some))
    for rows, keys in every:
        order, cuts = buckets.split(keys)
        buckets.put(cuts, keys[order], order + rows.start)
    if buckets.most_rows * _SORTED > room.nbytes:
        raise ConfigError(
            f"sample {name}: {buckets.most_rows} of its {num_rows} {alike}, and take more memory than is allowed while "
            f"they are sorted; {'use --order rcb, or ' * alike.startswith('points')}allow more"
        )
    return buckets


def _along_curve(name: str, points: _Points, box: Box | None, room: Room) -> tuple[Spool, int, int]:
    """Return the order, the number of distinct points that share the key of another, and of distinct points."""
    box = (points.min(0), points.max(0)) if box is None else box
    num_bits = points.some.shape[1] * BITS[points.some.shape[1]]
    keys_of = partial(hilbert_keys, box=box)
    every_key = ((rows, keys_of(block)) for rows, block in points.by_blocks())
    alike = "points share keys of the Hilbert curve, or repeat each other"
    buckets = _in_buckets(name, every_key, keys_of(points.some), len(points), num_bits, alike, room)
    every, num_lost, num_repeated = room.spool(np.int64), 0, 0
    for keys, numbers in buckets.taken():
        in_order, order = stable_sort(keys, num_bits)
        ids, starts = numbers[order], run_starts(in_order)
        every.append(ids)
        shared = np.flatnonzero(~starts | ~np.append(starts[1:], True))  # rows in runs of equal keys
        if len(shared):
            repeated = num_duplicates(points[ids[shared]])
            num_repeated += repeated
            num_lost += len(shared) - repeated - int(starts[shared].sum())
    return every, num_lost, len(points) - num_repeated


def _in_boxes(points: _Points, room: Room) -> Spool:
    """Return the order of recursive bisection: larger boxes are halved in files, the first half first."""
    every, ids, places = room.spool(np.int64), room.spool(np.int64), room.spool((np.float64, points.some.shape[1:]))
    for rows, block in points.by_blocks():
        ids.append(np.arange(rows.start, rows.stop))
        places.append(block)
    pending = [(ids, places, levels_of(len(points)), False)]
    while pending:
        ids, places, level, reverse = pending.pop()
        if not level or len(ids) * _HALVED <= room.nbytes:
            every.append(ids[:][bisected(np.ascontiguousarray(places[:].T), level, upper_first=reverse)])
        else:
            lower, upper = _halves(ids, places, room, upper_first=reverse)
            first, last = (upper, lower) if reverse else (lower, upper)
            pending += [(*last, level - 1, True), (*first, level - 1, False)]
        ids.remove()
        places.remove()
    return every


def _halves(ids: Spool, places: Spool, room: Room, *, upper_first: bool) -> list[tuple[Spool, Spool]]:
    """Put the points on either side of the median of the longest axis into two pieces; ties go by row."""
    points, num_lower = _Points(places, room), len(ids) // 2
    num_lower = len(ids) - num_lower if upper_first else num_lower
    axis, along = longest_axis(points), room.array(len(ids), np.float64)  # type: ignore[arg-type]
    for rows, block in points.by_blocks():
        along[rows] = block[:, axis]
    along.partition(num_lower)
    median = along[num_lower]
    num_ties = num_lower - int((along[:num_lower] < median).sum())
    halves = [(room.spool(np.int64), room.spool((np.float64, places.shape[1:]))) for _ in range(2)]
    for rows, block in points.by_blocks():
        in_lower, ties = block[:, axis] < median, np.flatnonzero(block[:, axis] == median)[:num_ties]
        in_lower[ties] = True
        num_ties -= len(ties)
        for (numbers, there), chosen in zip(halves, (in_lower, ~in_lower), strict=True):
            numbers.append(ids[rows][chosen])
            there.append(block[chosen])
    return halves
