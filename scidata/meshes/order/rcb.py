"""Order by recursive coordinate bisection: always along the longest side, halves of equal size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray
from scidata.meshes.order.curve import BITS, hilbert_keys
from scidata.meshes.order.positions import finite_points, middle_box, robust_box, unit_sphere
from scidata.meshes.order.sort import stable_sort

# Rows below which a half is not halved again but put in Hilbert order.
_LEAF = 4096


def order_rcb(points: npt.ArrayLike, *, on_sphere: bool = False, levels: int | None = None) -> IntArray:
    """Return an order of which each of ``2**level`` equal cuts is a box of recursive coordinate bisection.

    Each half is longest-side first and split at the median, so the scale of the coordinates does not matter and an
    outlier does no harm. Neighbouring boxes follow each other (a reflected Gray code of the halves), so that cuts at
    other numbers of parts are compact too; the last boxes are in Hilbert order inside.

    Parameters
    ----------
    points
        ``(num, 2)`` or ``(num, 3)``, finite; ``on_sphere``: longitude and latitude in degrees.
    levels
        How often to bisect; default until a box has at most 4096 rows.

    Returns
    -------
    order
        ``(num,)`` int64: the old row at each new row.

    Raises
    ------
    ConfigError
        Another shape, or a coordinate that is NaN or infinite.
    """
    array = unit_sphere(points) if on_sphere else finite_points(points)
    num = len(array)
    if levels is None:
        levels = max(-(-num // _LEAF) - 1, 0).bit_length()
    order = np.arange(num, dtype=np.int64)
    coordinates = array.T.astype(np.float64, order="C")  # a copy: its columns move with the rows
    boxes = [(0, num, levels, False)]
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


def _halves(coordinates: npt.NDArray[np.float64], num_first: int, *, upper_first: bool) -> IntArray:
    """Return the rows of ``(axes, num)`` points, one side of the longest axis before the other."""
    lower, upper = middle_box(coordinates.T)  # without the ends: one outlier would decide for all
    sides = upper * 0.5 - lower * 0.5  # halved: finite for any coordinates
    if not sides.any():
        sides = coordinates.max(axis=1) * 0.5 - coordinates.min(axis=1) * 0.5
    along = coordinates[int(np.argmax(sides))]
    num_lower = len(along) - num_first if upper_first else num_first
    median = np.partition(along, num_lower)[num_lower]  # then ties go by row, on every machine
    in_lower = along < median
    in_lower[np.flatnonzero(along == median)[: num_lower - int(in_lower.sum())]] = True
    lower, upper = np.flatnonzero(in_lower), np.flatnonzero(~in_lower)
    return np.concatenate([upper, lower] if upper_first else [lower, upper])
