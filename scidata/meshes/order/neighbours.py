"""Edges between points that lie close together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.positions import finite_points, unit_sphere

if TYPE_CHECKING:
    from scipy.spatial import cKDTree


def knn_edges(
    points: npt.ArrayLike, num_neighbours: int, *, on_sphere: bool = False, period: Sequence[float] | None = None
) -> IntArray:
    """Return an edge to each point from each of its nearest others.

    - ``points``: ``(num, 2)`` or ``(num, 3)``, finite; ``on_sphere``: longitude and latitude in degrees.
    - ``period``: width of the domain along each coordinate where it wraps, 0 where it does not: the nearest images
      count.
    - ``num_neighbours``: at most ``num - 1`` exist, and no more are returned.

    Returns ``(2, num * num_neighbours)`` int64: sources (the neighbours), destinations, by destination. Raises
    ConfigError: points that are no points, or a number of neighbours below 1.
    """
    array = unit_sphere(points) if on_sphere else finite_points(points)
    if num_neighbours < 1:
        raise ConfigError(f"edges need at least 1 neighbour, not {num_neighbours}")
    wanted = min(num_neighbours, len(array) - 1)
    if wanted < 1:
        return np.empty((2, 0), np.int64)
    tree = _tree(array, period)
    found = tree.query(tree.data, k=wanted + 1)[1].astype(np.int64)
    rows = np.arange(len(array), dtype=np.int64)
    # of points in one place, any may come first: leave out the point itself where it was found, else the farthest
    left_out = np.where((found == rows[:, None]).any(axis=1), np.argmax(found == rows[:, None], axis=1), wanted)
    keep = np.ones(found.shape, np.bool_)
    keep[rows, left_out] = False
    return np.stack([found[keep], np.repeat(rows, wanted)])


def radius_edges(
    points: npt.ArrayLike, radius: float, *, on_sphere: bool = False, period: Sequence[float] | None = None
) -> IntArray:
    """Return both directions of an edge between any two points that lie at most ``radius`` apart.

    - ``points``: ``(num, 2)`` or ``(num, 3)``, finite; ``on_sphere``: longitude and latitude in degrees.
    - ``radius``: in the points' units; on a sphere the angle in degrees.
    - ``period``: as in :func:`knn_edges`.

    Returns ``(2, num_edges)`` int64: sources, destinations. No self-loops. Raises ConfigError: points that are no
    points, or a radius that is not positive.
    """
    array = unit_sphere(points) if on_sphere else finite_points(points)
    if not (np.isfinite(radius) and radius > 0):
        raise ConfigError(f"the radius of edges must be positive and finite, not {radius}")
    if not len(array):
        return np.empty((2, 0), np.int64)
    reach = 2 * np.sin(np.deg2rad(min(radius, 180.0)) / 2) if on_sphere else radius
    pairs = _tree(array, period).query_pairs(reach, output_type="ndarray").astype(np.int64)
    return np.concatenate([pairs, pairs[:, ::-1]]).T


def _tree(points: AnyArray, period: Sequence[float] | None) -> cKDTree:
    inside, width = wrapped(points, period)
    return make_tree(inside, None if period is None else width)


def make_tree(points: AnyArray, width: FloatArray | None = None) -> cKDTree:
    """Return SciPy's tree of some points; ``width``: of a domain that wraps."""
    from scipy.spatial import cKDTree  # 0.2 s of CPU, which stores without radii and neighbours do not need

    return cKDTree(points, boxsize=width)


def wrapped(points: AnyArray, period: Sequence[float] | FloatArray | None) -> tuple[FloatArray, FloatArray]:
    """Return the images of points that lie in ``[0, width)``, and the width along each coordinate, 0 for none."""
    width = np.zeros(points.shape[1])
    if period is None:
        return points, width
    width[: len(period)] = period
    wraps = width > 0
    inside = points.astype(np.float64)
    inside[:, wraps] %= width[wraps]
    inside[:, wraps] *= inside[:, wraps] < width[wraps]  # just below 0, the remainder is rounded to the width
    return inside, width
