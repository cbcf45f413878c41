"""Order along a Hilbert curve, which notices when the coordinates leave it too few different keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scidata.partition._curve import BITS, hilbert_keys
from scidata.partition._points import finite_points, unit_sphere
from scidata.partition._sort import run_starts, stable_sort
from scidata.partition.rcb import order_rcb
from scidata.types import IntArray

__all__ = ["hilbert_keys", "order_hilbert"]

# Share of the distinct points that may share a key with another before the order counts as collapsed.
_MAX_COLLAPSED = 0.01


def order_hilbert(points: npt.ArrayLike, *, on_sphere: bool = False) -> tuple[IntArray, list[str]]:
    """Return the order of the points along a Hilbert curve, and what there is to say about it.

    Where an outlier stretches the bounding box so far that many different points fall into one cell of the curve, the
    curve's order would be arbitrary among them: the order is then that of :func:`order_rcb`, and a note says so.

    Parameters
    ----------
    points
        ``(num, 2)`` or ``(num, 3)``, finite; ``on_sphere``: longitude and latitude in degrees.

    Returns
    -------
    order
        ``(num,)`` int64: the old row at each new row. Points with equal keys stay in the order of their rows.
    notes
        Sentences for the user; empty where nothing is unusual.

    Raises
    ------
    ConfigError
        Another shape, or a coordinate that is NaN or infinite.
    """
    array = unit_sphere(points) if on_sphere else finite_points(points)
    keys, order = stable_sort(hilbert_keys(array), array.shape[1] * BITS[array.shape[1]])
    starts = run_starts(keys)
    if starts.all():
        return order, []
    shared = np.flatnonzero(~starts | ~np.append(starts[1:], True))  # rows in runs of equal keys
    num_shared_keys = int(starts[shared].sum())
    num_shared_points = _num_distinct(array[order[shared]])
    num_repeated = len(shared) - num_shared_points
    num_distinct = len(array) - num_repeated
    notes = []
    if num_repeated > _MAX_COLLAPSED * len(array):
        notes.append(
            f"{num_repeated} of {len(array)} points repeat the coordinates of another; if they should differ, the "
            f"coordinates were rounded (float32 with a large offset, for one): subtract the offset before storing"
        )
    lost = num_shared_points - num_shared_keys
    if lost > _MAX_COLLAPSED * num_distinct:
        notes.append(
            f"{lost} of {num_distinct} distinct points share the Hilbert key of another, because a few points lie far "
            f"from the rest ({_span(array)}): ordered by recursive coordinate bisection instead"
        )
        order = order_rcb(array)
    return order, notes


def _num_distinct(points: npt.NDArray[np.generic]) -> int:
    """Count the distinct rows."""
    by_value = points[np.lexsort(tuple(points.T))]
    return 1 + int(np.any(by_value[1:] != by_value[:-1], axis=1).sum()) if len(by_value) else 0


def _span(points: npt.NDArray[np.generic]) -> str:
    """Describe the axis that is stretched most: its range and that of the middle 98 % of the points."""
    array = points.astype(np.float64)
    low, first, last, high = np.quantile(array, [0.0, 0.01, 0.99, 1.0], axis=0)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        axis = int(np.nanargmax(np.where(high > low, (high / 2 - low / 2) / (last / 2 - first / 2), 0)))
    return (
        f"axis {axis} runs from {low[axis]:.6g} to {high[axis]:.6g}, and 98 % of the points lie between "
        f"{first[axis]:.6g} and {last[axis]:.6g}"
    )
