"""Coordinates as the orders need them: checked, on the unit sphere, of cells as rows of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, FloatArray
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.ids import blocks

#: Lower and upper corner, ``(dims,)`` each.
Box: TypeAlias = tuple[AnyArray, AnyArray]

_BLOCK = 1 << 20
_SAMPLE = 4096


def finite_points(points: npt.ArrayLike) -> AnyArray:
    """Return the points as an array, unchanged, after checking shape and values."""
    array = np.asarray(points)
    if array.ndim != 2 or array.shape[1] not in (2, 3) or array.dtype.kind not in "iuf":
        raise ConfigError(f"points must be (num, 2) or (num, 3) real numbers, not {array.dtype} of shape {array.shape}")
    bad: list[int] = []
    count = 0
    for block in blocks(len(array), _BLOCK):
        rows = np.flatnonzero(~np.isfinite(array[block]).all(axis=1))
        count += len(rows)
        bad += (block.start + rows[: 5 - len(bad)]).tolist()
    if count:
        raise ConfigError(
            f"{count} of {len(array)} points have a NaN or infinite coordinate (first rows: {bad}): drop or "
            "mend these rows first"
        )
    return array


def unit_sphere(points: npt.ArrayLike) -> FloatArray:
    """Turn ``(num, 2)`` longitude and latitude in degrees into ``(num, 3)`` float64 points of the unit sphere."""
    array = finite_points(points)
    if array.shape[1] != 2:
        raise ConfigError(f"points on a sphere are (num, 2) longitude and latitude in degrees, not {array.shape}")
    lon, lat = np.deg2rad(array.astype(np.float64)).T
    return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)


def num_duplicates(points: AnyArray) -> int:
    """Count the points whose coordinates an earlier one has already."""
    by_value = points[np.lexsort(tuple(points.T))]
    return int(np.all(by_value[1:] == by_value[:-1], axis=1).sum())


def middle_box(points: AnyArray) -> Box:
    """Return a box that holds the middle 96 % of each axis, of a sample of the points."""
    sample = np.sort(points[:: -(-len(points) // _SAMPLE)].astype(np.float64), axis=0)
    left_out = min(max(len(sample) // 50, 1), (len(sample) - 1) // 2)
    return sample[left_out], sample[-1 - left_out]


def longest_axis(points: AnyArray) -> int:
    """Return the axis along which the middle ones of the points are farthest apart; an outlier does not decide."""
    lower, upper = middle_box(points)
    sides = upper * 0.5 - lower * 0.5  # halved: finite for any coordinates
    if not sides.any():
        sides = points.max(axis=0) * 0.5 - points.min(axis=0) * 0.5
    return int(np.argmax(sides))


def robust_box(points: AnyArray) -> Box:
    """Return the bounding box of the points, but for those that lie farther off than the middle ones are apart."""
    lower, upper = middle_box(points)
    with np.errstate(over="ignore"):
        reach = upper - lower
        return np.maximum(points.min(axis=0), lower - reach), np.minimum(points.max(axis=0), upper + reach)


def cell_centres(
    points: FloatArray, cells: RawCells, *, on_sphere: bool = False, period: Sequence[float] | None = None
) -> FloatArray:
    """Return the mean of each cell's nodes.

    - ``points``: ``(num_nodes, 2 or 3)``; ``on_sphere``: longitude and latitude in degrees, and height where there is a
      third. The mean is then that on the unit sphere, and longitudes are from 0 on where those of the nodes are.
    - ``cells``: all nodes in range, at least one each.
    - ``period``: width of the domain along each coordinate where it wraps, else 0: nodes count at their image nearest
      to the cell's first node.

    Returns ``(num_cells, 2 or 3)``, in the coordinates of the points.
    """
    if not cells.num_cells:
        return np.empty((0, points.shape[1]))
    if on_sphere:
        mean = _means(unit_sphere(points[:, :2]), cells, None)
        lon = np.rad2deg(np.arctan2(mean[:, 1], mean[:, 0]))
        lat = np.rad2deg(np.arctan2(mean[:, 2], np.hypot(mean[:, 0], mean[:, 1])))
        columns = [lon % 360 if points[:, 0].min() >= 0 else lon, lat]
        if points.shape[1] > 2:
            columns.append(_means(points[:, 2:], cells, None)[:, 0])
        return np.stack(columns, axis=1)
    return _means(points, cells, period)


def _means(points: FloatArray, cells: RawCells, period: Sequence[float] | None) -> FloatArray:
    offsets, connectivity = cells.offsets, cells.connectivity
    sizes = np.diff(offsets)
    first = points[connectivity[offsets[:-1]]]
    means = np.empty_like(first)
    for axis in range(points.shape[1]):  # one at a time: a third of the memory
        away = points[connectivity, axis] - np.repeat(first[:, axis], sizes)
        width = 0.0 if period is None or axis >= len(period) else period[axis]
        if width:
            away -= width * np.round(away / width)
        means[:, axis] = first[:, axis] + np.add.reduceat(away, offsets[:-1]) / sizes
    return means
