"""Order along a Hilbert curve, which notices when the coordinates leave it too few different keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, FloatArray, IntArray
from scidata.meshes.order.curve import BITS, hilbert_keys
from scidata.meshes.order.ids import run_starts, stable_sort
from scidata.meshes.order.positions import Box, finite_points, longest_axis, num_duplicates, robust_box, unit_sphere

T = TypeVar("T")

# Share of the distinct points that may share a key with another before the order counts as collapsed.
_MAX_COLLAPSED = 0.01


def order_hilbert(points: npt.ArrayLike, *, on_sphere: bool = False) -> tuple[IntArray, list[str]]:
    """Return the order of the points along a Hilbert curve, and notes about it.

    Where an outlier stretches the bounding box so far that many different points fall into one cell of the curve, the
    curve's order would be arbitrary among them. Then the curve fills the box of the other points, outliers moved to its
    border; and if that does not help either (clusters far apart), the order is that of :func:`order_rcb`. A note
    says so.

    Parameters
    ----------
    points
        ``(num, 2)`` or ``(num, 3)``, finite; ``on_sphere``: longitude and latitude in degrees.

    Returns
    -------
    order
        ``(num,)`` int64: the old row at each new row. Points with equal keys stay in the order of their rows.
    notes
        Sentences for the user; empty if nothing is unusual.
    """
    array = unit_sphere(points) if on_sphere else finite_points(points)
    at_poles = count_at_poles(np.asarray(points)) if on_sphere else 0
    return curve_or_boxes(array, at_poles, lambda box: _along_curve(array, box), lambda: order_rcb(array))


def count_at_poles(points: AnyArray) -> IntArray:
    """Count the points at each pole, by longitude and latitude."""
    return np.array([(points[:, 1] == pole).sum() for pole in (-90, 90)])


def curve_or_boxes(
    points: AnyArray,
    at_poles: IntArray | int,
    along_curve: Callable[[Box | None], tuple[T, int, int]],
    in_boxes: Callable[[], T],
) -> tuple[T, list[str]]:
    """Choose between the orders that two functions make, as :func:`_along_curve` and :func:`order_rcb` do.

    Of the points their number, their ends and some of them are asked for.
    """
    order, num_lost, num_distinct = along_curve(None)
    # a grid has a whole row of points at each pole, which on the unit sphere differ by rounding alone: no reason to
    # order all the others in another way
    num_lost = max(0, num_lost - int(np.maximum(np.subtract(at_poles, 1), 0).sum()))
    notes = []
    num_repeated = len(points) - num_distinct
    if num_repeated > _MAX_COLLAPSED * len(points):
        notes.append(
            f"{num_repeated} of {len(points)} points repeat the coordinates of another; if they should differ, the "
            f"coordinates were rounded (float32 with a large offset, for one): subtract the offset before storing"
        )
    if num_lost > _MAX_COLLAPSED * num_distinct:
        box = robust_box(points)
        order, still_lost, _ = along_curve(box)
        instead = "ordered along the curve through the box of the others instead"
        if still_lost > _MAX_COLLAPSED * num_distinct:
            order = in_boxes()
            instead = "ordered by recursive coordinate bisection instead"
        notes.append(
            f"{num_lost} of {num_distinct} distinct points share the Hilbert key of another, because some points lie "
            f"far from the rest ({_stretched(points, box)}): {instead}"
        )
    return order, notes


def _along_curve(points: AnyArray, box: Box | None) -> tuple[IntArray, int, int]:
    """Return the order, the number of distinct points that share the key of another, and of distinct points."""
    keys, order = stable_sort(hilbert_keys(points, box=box), points.shape[1] * BITS[points.shape[1]])
    starts = run_starts(keys)
    shared = np.flatnonzero(~starts | ~np.append(starts[1:], True))  # rows in runs of equal keys
    num_repeated = num_duplicates(points[order[shared]])
    return order, len(shared) - num_repeated - int(starts[shared].sum()), len(points) - num_repeated


def _stretched(points: AnyArray, box: Box) -> str:
    """Describe the axis that is stretched most."""
    low, high = points.min(axis=0).astype(np.float64), points.max(axis=0).astype(np.float64)
    first, last = box
    with np.errstate(over="ignore"):
        axis = int(np.argmax((first - low) + (high - last)))
    return (
        f"axis {axis} runs from {low[axis]:.6g} to {high[axis]:.6g}, nearly all points lie between {first[axis]:.6g} "
        f"and {last[axis]:.6g}"
    )


# Rows below which a half is not halved again but put in Hilbert order.
_LEAF = 4096


def order_rcb(points: npt.ArrayLike, *, on_sphere: bool = False, levels: int | None = None) -> IntArray:
    """Return an order of which each of ``2**level`` equal cuts is a box of recursive coordinate bisection.

    Each half is longest-side first and split at the median, so the scale of the coordinates does not matter and an
    outlier does no harm. Neighbouring boxes follow each other (a reflected Gray code of the halves), so that cuts at
    other numbers of parts are compact too; the last boxes are in Hilbert order inside.

    - ``points``: ``(num, 2)`` or ``(num, 3)``, finite; ``on_sphere``: longitude and latitude in degrees.
    - ``levels``: how often to bisect; default until a box has at most 4096 rows.

    Returns ``(num,)`` int64: the old row at each new row.
    """
    array = unit_sphere(points) if on_sphere else finite_points(points)
    coordinates = array.T.astype(np.float64, order="C")  # a copy: its columns move with the rows
    return bisected(coordinates, levels_of(len(array)) if levels is None else levels)


def levels_of(num: int) -> int:
    """Return how often so many points are bisected."""
    return max(-(-num // _LEAF) - 1, 0).bit_length()


def bisected(coordinates: FloatArray, levels: int, *, upper_first: bool = False) -> IntArray:
    """Return the order of ``(axes, num)`` points in a box that is to be bisected so many times; they move with it."""
    num = coordinates.shape[1]
    order = np.arange(num, dtype=np.int64)
    boxes = [(0, num, levels, upper_first)]
    while boxes:
        start, stop, level, reverse = boxes.pop()
        here = coordinates[:, start:stop]
        if stop - start < 2:
            continue
        if level == 0:  # a last box, in Hilbert order; outliers at its border
            keys = hilbert_keys(here.T, box=robust_box(here.T))
            order[start:stop] = order[start:stop][stable_sort(keys, len(here) * BITS[len(here)])[1]]
            continue
        middle = (start + stop) // 2
        inside = _halves(here, middle - start, upper_first=reverse)
        order[start:stop] = order[start:stop][inside]
        for along in here:  # one axis at a time: twice as fast as a gather of columns
            along[:] = along.take(inside)
        boxes += [(start, middle, level - 1, False), (middle, stop, level - 1, True)]
    return order


def _halves(coordinates: FloatArray, num_first: int, *, upper_first: bool) -> IntArray:
    """Return the rows of ``(axes, num)`` points, one side of the longest axis before the other."""
    along = coordinates[longest_axis(coordinates.T)]
    num_lower = len(along) - num_first if upper_first else num_first
    median = np.partition(along, num_lower)[num_lower]  # then ties go by row, on every machine
    in_lower = along < median
    in_lower[np.flatnonzero(along == median)[: num_lower - int(in_lower.sum())]] = True
    lower, upper = np.flatnonzero(in_lower), np.flatnonzero(~in_lower)
    return np.concatenate([upper, lower] if upper_first else [lower, upper])
