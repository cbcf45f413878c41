"""Uneven bounds and halo windows: the only module that splits a dimension.

``bounds`` is ``(num_parts + 1,)`` int64, non-decreasing, from 0 to ``num_global``; part ``p`` owns
``[bounds[p], bounds[p + 1])``. Reader, shards, sampler, CLI and tests all call these functions. Pure arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scidata.core.checks import NO_MEMORY, too_large
from scidata.core.types import IntArray, Segment, Segments, SegmentTable, segment_table
from scidata.errors import ConfigError

_MANY = 64  # from this many segments on, use a table


def _check_parts(num_global: int, num_parts: int, align: int) -> None:
    if num_parts < 1:
        raise ConfigError(f"number of parts must be at least 1, not {num_parts}")
    if align < 1:
        raise ConfigError(f"align must be at least 1, not {align}")
    if align > num_global:
        raise ConfigError(f"align={align} is more than the {num_global} rows; choose a smaller one")
    if num_global % align:
        raise ConfigError(
            f"align={align} does not divide the {num_global} rows: bounds would leave a part that is not a multiple; "
            f"crop to {num_global - num_global % align} rows with isel, or choose another align"
        )
    if num_parts > num_global // align:
        unit = "rows" if align == 1 else f"groups of {align} rows"
        raise ConfigError(
            f"{num_parts} parts of {num_global // align} {unit}: some ranks would be empty; use at most "
            f"{num_global // align} ranks on this axis, shard a longer dimension, or give explicit bounds"
        )


def even_bounds(num_global: int, num_parts: int, *, align: int = 1) -> IntArray:
    """Split as evenly as ``align`` allows; the first parts get the remainder.

    Raises ConfigError: more parts than (groups of ``align``) rows, or ``align`` does not divide ``num_global``.
    """
    _check_parts(num_global, num_parts, align)
    return align * bounds_of(even_sizes(num_global // align, num_parts))


def weighted_bounds(weights: npt.ArrayLike, num_parts: int, *, align: int = 1) -> IntArray:
    """Cut where the prefix sum of ``weights`` (one cost per row, ``>= 0``) passes each part's share.

    Every part gets at least one (group of ``align``) rows.
    """
    try:
        cost = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError("weights must be numbers, one per row") from None
    if cost.ndim != 1:
        raise ConfigError(f"weights must have one value per row, not shape {cost.shape}")
    if not np.all(np.isfinite(cost)) or np.any(cost < 0):
        wrong = int(np.flatnonzero(~(np.isfinite(cost) & (cost >= 0)))[0])
        raise ConfigError(f"weights must be finite and not negative: row {wrong} costs {cost[wrong]:g}")
    _check_parts(len(cost), num_parts, align)
    prefix = np.concatenate([[0.0], np.cumsum(cost.reshape(-1, align).sum(axis=1))])
    if prefix[-1] == 0:
        return even_bounds(len(cost), num_parts, align=align)
    targets = prefix[-1] * np.arange(1, num_parts) / num_parts
    upper = np.clip(np.searchsorted(prefix, targets), 1, len(prefix) - 1)
    nearer_below = targets - prefix[upper - 1] < prefix[upper] - targets
    return at_least_one_each(upper - nearer_below, len(prefix) - 1) * align


def chunk_bounds(
    num_global: int, num_parts: int, *, edges: npt.ArrayLike, align: int = 1, max_imbalance: float = 1.25
) -> IntArray:
    """Move even bounds to the nearest chunk edge, unless that unbalances the parts.

    ``edges``: rows at which a chunk begins, ``(num,)``; only multiples of ``align`` are used.
    ``max_imbalance``: the largest part over the mean part that is accepted; beyond it the even bounds come back.
    """
    even = even_bounds(num_global, num_parts, align=align)
    usable = np.unique(np.asarray(edges, dtype=np.int64))
    usable = usable[(usable > 0) & (usable < num_global) & (usable % align == 0)]
    if num_parts == 1 or len(usable) < num_parts - 1:
        return even
    cuts = np.empty(num_parts - 1, np.int64)
    first = 0
    for part in range(num_parts - 1):
        last = len(usable) - (num_parts - 2 - part)  # leave an edge for each remaining cut
        choices = usable[first:last]
        best = int(np.argmin(np.abs(choices - even[part + 1])))
        cuts[part] = choices[best]
        first += best + 1
    bounds = np.concatenate([[0], cuts, [num_global]]).astype(np.int64)
    imbalance = np.diff(bounds).max() * num_parts / num_global
    even_imbalance = np.diff(even).max() * num_parts / num_global
    return bounds if imbalance <= max(max_imbalance, even_imbalance) else even


def explicit_bounds(bounds: Sequence[int] | npt.ArrayLike, num_global: int, num_parts: int) -> IntArray:
    """Check the user's bounds. Empty parts are legal."""
    array = np.asarray(bounds)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"bounds must be a list of integers, not {bounds!r}")
    if len(array) != num_parts + 1:
        raise ConfigError(f"{num_parts} ranks need {num_parts + 1} bounds, not {len(array)}: {array.tolist()}")
    if (array[1:] < array[:-1]).any():  # unsigned differences would never be negative
        raise ConfigError(f"bounds must not decrease: {array.tolist()}")
    if array[0] != 0 or array[-1] != num_global:
        raise ConfigError(f"bounds must run from 0 to {num_global}, not from {array[0]} to {array[-1]}")
    return array.astype(np.int64)


def halo_widths(
    bounds: npt.ArrayLike, part: int, *, lo: int, hi: int, periodic: bool, before: int = 0, after: int = 0
) -> tuple[int, int]:
    """Return the widths of the halo of ``part`` below and above, clipped at non-periodic edges.

    ``before`` and ``after``: rows that there are beyond the edges, of a patch of a larger grid. An empty part has no
    halo: there is nothing that it could be the halo of.
    """
    if lo < 0 or hi < 0:
        raise ConfigError(f"halo widths must not be negative: ({lo}, {hi})")
    array = np.asarray(bounds)
    start, stop, num_global = int(array[part]), int(array[part + 1]), int(array[-1])
    if start == stop:
        return 0, 0
    if periodic:
        return lo, hi
    return min(lo, start + before), min(hi, num_global - stop + after)


def window(
    bounds: npt.ArrayLike, part: int, *, lo: int = 0, hi: int = 0, periodic: bool = False, before: int = 0,
    after: int = 0,
) -> tuple[Segment, ...]:  # fmt: skip
    """Return the rows of ``part`` with its halo as segments of ``[0, num_global)``.

    A periodic halo wraps, also several times where it is wider than the whole dimension. Rows ``before`` the first one
    have negative numbers, those ``after`` the last go on from it.
    """
    array = np.asarray(bounds)
    below, above = halo_widths(array, part, lo=lo, hi=hi, periodic=periodic, before=before, after=after)
    start, stop = int(array[part]) - below, int(array[part + 1]) + above
    if not periodic:
        return (Segment(start=start, count=stop - start),) if stop > start else ()
    return wrapped(start, stop, int(array[-1]))


def wrapped(first: int, stop: int, num_global: int) -> tuple[Segment, ...]:
    """Return rows ``[first, stop)``, which may pass the edges, as segments of ``[0, num_global)``."""
    position, remaining, offset = first, stop - first, 0
    segments = []
    while remaining > 0:
        start = position % num_global
        count = min(remaining, num_global - start)
        segments.append(Segment(start=start, count=count, offset=offset))
        position, remaining, offset = position + count, remaining - count, offset + count
    return tuple(segments)


def segments_of_slice(selection: slice | int | Sequence[int], num_rows: int) -> Segments:
    """Turn a crop, stride, index, list of indices or mask of one dimension into segments."""
    if isinstance(selection, slice):
        if selection.step == 0:
            raise ConfigError("a stride of 0 selects nothing; use a positive or negative step")
        try:
            rows = range(*selection.indices(num_rows))
        except TypeError:
            raise ConfigError(f"{selection} does not run from integer to integer") from None
        return (Segment(start=rows.start, count=len(rows), step=rows.step),) if len(rows) else ()
    array = _indices(selection, num_rows)
    outside = np.flatnonzero((array < -num_rows) | (array >= num_rows))
    if len(outside):
        raise ConfigError(f"index {int(array[outside[0]])} is out of range for {num_rows} rows")
    table = _runs(np.where(array < 0, array + num_rows, array))
    return SegmentTable(table) if len(table) > _MANY else tuple(SegmentTable(table))


def _indices(selection: object, num_rows: int) -> IntArray:
    array = np.asarray(selection)
    if array.dtype == np.bool_ and array.shape == (num_rows,):
        array = np.flatnonzero(array)
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        what = f"a mask of shape {array.shape}" if array.dtype == np.bool_ else repr(selection)
        raise ConfigError(
            f"{what} selects nothing of {num_rows} rows: expected a slice, an index, a list of indices, or a mask with "
            "a value for each row"
        )
    if array.dtype.kind == "u":
        array = np.minimum(array, num_rows)  # stays out of range, and does not overflow int64
    return array.reshape(-1).astype(np.int64)


def _runs(rows: IntArray) -> IntArray:
    """Split rows into arithmetic runs: ``(num, 4)`` int64 as in a SegmentTable.

    Two rows alone are a run only if one follows the other: of scattered rows, pairs would gain nothing.
    """
    if not len(rows):
        return np.empty((0, 4), np.int64)
    step = np.diff(rows)
    begins = np.ones(len(step), np.bool_)  # links between rows at which the step changes
    begins[1:] = step[1:] != step[:-1]
    length = np.diff(np.append(np.flatnonzero(begins), len(step)))
    linked = (np.repeat(length, length) > 1) | (np.abs(step) == 1)
    linked &= step != 0
    linked[1:] &= ~(begins[1:] & linked[:-1])  # a row between two runs belongs to the first
    first = np.flatnonzero(np.concatenate([[True], ~linked]))
    count = np.diff(np.append(first, len(rows)))
    by = np.where(count > 1, np.append(step, 1)[first], 1)
    return np.stack([rows[first], count, by, first], axis=1)


def rows_of(segments: Sequence[Segment]) -> IntArray:
    """Return the rows of all segments in order, ``(num,)`` int64."""
    start, count, step, _ = segment_table(segments).T
    num = int(count.sum())
    try:
        within = np.arange(num) - np.repeat(np.cumsum(count) - count, count)
        rows: IntArray = np.repeat(start, count) + within * np.repeat(step, count)
    except NO_MEMORY as e:
        raise too_large("numbers of a dimension's rows", (num,), np.int64) from e
    return rows


def num_rows_of(segments: Sequence[Segment]) -> int:
    """Return the number of rows in segments."""
    if isinstance(segments, SegmentTable):
        return int(segments.table[:, 1].sum())
    return sum(s.count for s in segments)


def compose(outer: Segments, inner: Sequence[Segment]) -> Segments:
    """Apply ``inner``, of step 1, to the rows that ``outer`` selected: segments of the source, offsets of ``inner``.

    ``outer`` is a global crop or stride, ``inner`` a rank's window in the selected rows. Of rows 0 2 4 | 10 11 12, two
    segments, the window from 1 to 5 has 2 4 | 10 11.
    """
    if not isinstance(outer, SegmentTable):  # plain Python is faster for a few
        few = []
        for part, s in itertools.product(inner, outer):
            at, stop = max(s.offset, part.start), min(s.offset + s.count, part.start + part.count)
            start, offset = s.start + (at - s.offset) * s.step, part.offset + at - part.start
            few += [Segment(start=start, count=stop - at, step=s.step, offset=offset)] if stop > at else []
        return tuple(few)
    start, count, step, offset = outer.table.T
    tables = [np.empty((0, 4), np.int64)]
    for part in inner:
        lower = np.maximum(offset, part.start)
        upper = np.minimum(offset + count, part.start + part.count)
        columns = [start + (lower - offset) * step, upper - lower, step, part.offset + lower - part.start]
        tables.append(np.stack(columns, axis=1)[upper > lower])
    return SegmentTable(np.concatenate(tables))


def bounds_of(sizes: npt.ArrayLike) -> IntArray:
    """Return the ``(num + 1,)`` int64 bounds of parts, or row offsets, of these sizes."""
    array = np.asarray(sizes)
    bounds = np.zeros(len(array) + 1, np.int64)
    np.cumsum(array, dtype=np.int64, out=bounds[1:])
    return bounds


def sizes_of(bounds: npt.ArrayLike) -> tuple[int, ...]:
    """Return the number of rows of each part."""
    return tuple(np.diff(np.asarray(bounds)).tolist())


@lru_cache(maxsize=128)
def even_sizes(num_rows: int, num_parts: int) -> tuple[int, ...]:
    """Split evenly, longer parts first, as :func:`even_bounds` does; here parts may be empty."""
    size, rest = divmod(num_rows, num_parts)
    return (size + 1,) * rest + (size,) * (num_parts - rest)


def chunk_sizes(num_rows: int, num_parts: int) -> tuple[int, ...]:
    """Return the sizes of ``torch.chunk``'s parts, and zeros for the parts that it omits."""
    size = -(-num_rows // num_parts)
    return tuple(min(size, max(0, num_rows - size * part)) for part in range(num_parts))


def owners_of(bounds: npt.ArrayLike, rows: npt.ArrayLike) -> IntArray:
    """Return the part that owns each row, int64. Of equal bounds the last counts, since empty parts own nothing."""
    return np.searchsorted(np.asarray(bounds), rows, side="right").astype(np.int64, copy=False) - 1


def at_least_one_each(cuts: npt.ArrayLike, num_rows: int) -> IntArray:
    """Move the cuts as little as possible so that each part has a row, and return the bounds.

    ``cuts``: ``(num_parts - 1,)`` rows where parts after the first begin, sorted or not; ``num_parts <= num_rows``.
    """
    wanted = np.asarray(cuts)
    parts = np.arange(1, len(wanted) + 1)
    moved = np.maximum.accumulate(np.maximum(wanted, parts) - parts) + parts  # from the left
    moved = np.minimum(moved, num_rows - parts[::-1])  # and from the right
    return np.concatenate([[0], moved, [num_rows]]).astype(np.int64)
