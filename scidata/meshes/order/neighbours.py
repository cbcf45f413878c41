"""Edges between points that lie close together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.ids import blocks
from scidata.meshes.order.positions import finite_points, unit_sphere

if TYPE_CHECKING:
    from scipy.spatial import cKDTree

BLOCK_ROWS = 1 << 14  # of targets at once
MAX_PAIRS = 1 << 21  # found at once: 100 MB in SciPy's result and the edges made of it
#: Distances that differ by less are taken for equal, as a share of the unit sphere's radius or of the largest
#: coordinate: rounding makes 1e-15 of it, and must not tell nodes apart that are equally far by symmetry.
TIED = 1e-12


def near_edges(
    points: npt.ArrayLike, rule: str, number: float, *, on_sphere: bool = False, period: Sequence[float] | None = None
) -> IntArray:
    """Return an edge to each point from its nearest others (``"knn"``), or from all others in a ``"radius"``.

    - ``points``: ``(num, 2)`` or ``(num, 3)``, finite; ``on_sphere``: longitude and latitude in degrees.
    - ``number``: of neighbours, or fewer if there are no more points; or how far, on a sphere in degrees.
    - ``period``: width of the domain along each coordinate where it wraps, 0 if it does not: the nearest images
      count.

    Returns ``(2, num_edges)`` int64: sources, destinations; nearest ones by destination. No self-loops. Raises
    ConfigError: points that are no points, or a number that is not positive.
    """
    array = unit_sphere(points) if on_sphere else finite_points(points)
    if not (np.isfinite(number) and number > 0) or (rule == "knn" and number < 1):
        raise ConfigError(f"{rule}:{number}: expected at least 1 neighbour, or a radius that is positive and finite")
    if len(array) < 2:
        return np.empty((2, 0), np.int64)
    inside, width = wrapped(array, period)
    tree = make_tree(inside, width)
    if rule == "knn":
        largest = 1.0 if on_sphere else float(np.abs(array).max())
        return nearest_others(tree, slice(0, len(array)), int(number), TIED * largest)
    pairs = tree.query_pairs(chord(number) if on_sphere else number, output_type="ndarray").astype(np.int64)
    return np.concatenate([pairs, pairs[:, ::-1]]).T


def nearest_others(tree: cKDTree, own: slice, num: int, tied: float) -> IntArray:
    """Return the edges ``(2, num_edges)`` to the ``own`` points of a tree from their nearest others, by target."""
    found = [np.empty((2, 0), np.int64)]
    num = min(num + 1, tree.n)
    for rows in blocks(own.stop - own.start, BLOCK_ROWS) if own.stop > own.start else ():
        at = np.arange(rows.start, rows.stop) + own.start
        near = nearest_rows(tree, tree.data[at], num, tied)
        itself = near == at[:, None]
        itself[~itself.any(axis=1), -1] = True  # so many points in one place that it is not among the first
        found.append(np.stack([near[~itself], np.repeat(at, num - 1)]))
    return np.concatenate(found, axis=1)


def nearest_rows(tree: cKDTree, points: FloatArray, num: int, tied: float) -> IntArray:
    """Return the nearest rows of a tree, ``(num_points, num)``, ascending; of those equally far the first."""
    found = np.empty((len(points), num), np.int64)
    todo, width = np.arange(len(points)), num + 2
    while len(todo):
        width = min(width, tree.n)
        left = []
        for part in blocks(len(todo), max(MAX_PAIRS // width, 1)):
            rows = todo[part]
            far, near = tree.query(points[rows], k=np.arange(1, width + 1))
            distance = distances_of(tree.data[near], points[rows, None], tree.boxsize)
            last = np.partition(distance, num - 1, axis=1)[:, num - 1 : num]
            # a source that the tree left out could still be as far as the last that is taken
            whole = (far[:, -1] > last[:, 0] + 2 * tied) | (width == tree.n)
            group = np.where(distance < last - tied, 0, np.where(distance <= last + tied, 1, 2))
            keys = np.sort(group * tree.n + near, axis=1)[whole, :num]
            found[rows[whole]] = np.sort(keys % tree.n, axis=1)
            left.append(rows[~whole])
        todo, width = np.concatenate(left), 4 * width
    return found


def distances_of(one: FloatArray, other: FloatArray, width: FloatArray | None = None) -> FloatArray:
    """Return distances along the last dimension, to nearest images in a ``width``, of the same bits in any block."""
    total = np.zeros(np.broadcast_shapes(one.shape[:-1], other.shape[:-1]))
    for column in range(one.shape[-1]):
        away = one[..., column] - other[..., column]
        if width is not None and width[column]:
            away = np.minimum(np.abs(away), width[column] - np.abs(away))
        total += away**2
    return np.sqrt(total, out=total)


def chord(degrees: float) -> float:
    """Return how far apart the ends of an arc of the unit sphere lie."""
    return float(2 * np.sin(np.deg2rad(min(degrees, 180.0)) / 2))


def make_tree(points: AnyArray, width: FloatArray | None = None) -> cKDTree:
    """Return SciPy's tree of some points; ``width``: of a domain that wraps."""
    from scipy.spatial import cKDTree  # 0.2 s of CPU, which stores without radii and neighbours do not need

    return cKDTree(points, boxsize=width if width is not None and width.any() else None)


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
