"""A limited area inside a coarser globe, whose points there are left out, and the share of the sphere of each point."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scidata.core.keywords import checked_keywords
from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.neighbours import TIED, make_tree
from scidata.meshes.sets.node_set import NodeSet

Degrees = tuple[npt.ArrayLike, npt.ArrayLike]
# Triangles with sides this many times longer than the median one's longest span gaps, not cells.
_LONG = 2.0
_SAME = 1e-9  # degrees between points that are one


@dataclass(frozen=True, kw_only=True, eq=False)
class Cutout:
    """A limited area and the points of a globe outside of it. Made by :func:`scidata.cutout`.

    Attributes
    ----------
    inner, outer
        ``(num, 2)`` longitude and latitude of all points, in the order in which they were given.
    kept
        Whether each point of the globe stays, in the shape in which these were given.
    distance
        Degrees from each point of the globe to the nearest of the limited area, in the same shape.

    Examples
    --------
    >>> import numpy as np
    >>> globe = np.linspace(90, -90, 19)[:, None], np.arange(0, 360, 10)
    >>> around = scidata.cutout((np.linspace(40, 60, 21)[:, None], np.linspace(0, 30, 31)), globe)
    >>> around.kept.shape, len(around.rows), len(around.points), float(around.weights.sum().round(9))
    ((19, 36), 672, 1323, 1.0)
    """

    inner: NodeSet
    outer: NodeSet
    kept: npt.NDArray[np.bool_] = field(repr=False)
    distance: FloatArray = field(repr=False)

    @property
    def rows(self) -> IntArray:
        """The points of the globe that stay, as rows of it: for ``isel={"cell": rows}``."""
        return np.flatnonzero(self.kept)

    @property
    def points(self) -> FloatArray:
        """``(num, 2)`` longitude and latitude of the union: the limited area, then the globe's rows that stay."""
        return np.concatenate([self.inner.points, self.outer.points[self.rows]])

    @cached_property
    def weights(self) -> FloatArray:
        """``(num,)``: the share of the sphere that lies nearest to each point of the union; together 1."""
        from scipy.spatial import SphericalVoronoi

        places = NodeSet(points=self.points, on_sphere=True).positions()
        # a pole is many points of a grid, which share its area
        _, first, which = np.unique(places.round(10), axis=0, return_index=True, return_inverse=True)
        which = which.reshape(-1)
        areas = SphericalVoronoi(places[first], threshold=1e-12).calculate_areas() / (4 * np.pi)
        shares: FloatArray = (areas / np.bincount(which))[which]
        return shares

    def ring(self, width: float) -> npt.NDArray[np.bool_]:
        """Return which points of the globe stay and lie within ``width`` degrees of the limited area: its boundary.

        Parameters
        ----------
        width : float
            Degrees along the sphere.

        Examples
        --------
        >>> int(around.ring(10).sum())
        12
        """
        _check_degrees("ring: width", width)
        return self.kept & (self.distance <= width)


def _check_degrees(name: str, degrees: object) -> None:
    if not isinstance(degrees, int | float | np.number) or not degrees >= 0:
        raise ConfigError(f"{name}={degrees!r}: expected degrees, not negative")


def _set(places: Degrees, name: str) -> tuple[NodeSet, tuple[int, ...]]:
    try:
        lat, lon = np.broadcast_arrays(*(np.asarray(each, np.float64) for each in places))
    except ValueError as e:
        raise ConfigError(
            f"cutout: {name}: {e}; pass (lat, lon) of each point, or (lat[:, None], lon) of a grid"
        ) from None
    if not lat.size:
        raise ConfigError(f"cutout: {name} has no points")
    if not lat.size:
        raise ConfigError(f"cutout: {name} has no points")
    return NodeSet(points=np.stack([lon.reshape(-1), lat.reshape(-1)], 1), on_sphere=True), lat.shape


def _inside(inner: FloatArray, outer: FloatArray, max_gap: float | None) -> npt.NDArray[np.bool_]:
    """Return which unit vectors lie in a triangle between neighbouring ones of ``inner``.

    Triangles are Delaunay's in the stereographic projection from the middle, without those that span its concave
    edges (alpha shapes: Edelsbrunner et al., IEEE Trans. Inf. Theory 29, 1983).
    """
    from scipy.spatial import Delaunay, QhullError

    middle = inner.mean(0) / np.linalg.norm(inner.mean(0))
    side = np.linalg.svd(middle[None])[2][1:]  # two directions at right angles to it
    inside = outer @ middle > (inner @ middle).min() - TIED  # of the cap around the area
    flat, found = ((x @ side.T) / (1 + x @ middle)[:, None] for x in (inner, outer[inside]))
    try:
        triangles = Delaunay(flat)
    except QhullError:
        raise ConfigError(f"cutout: inner: its {len(inner)} points lie on one line and span no area") from None
    corners = inner[triangles.simplices]
    longest = np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=2).max(1)
    limit = _LONG * np.median(longest) if max_gap is None else 2 * np.sin(np.deg2rad(min(max_gap, 180)) / 2)
    which = triangles.find_simplex(found, tol=1e-9)
    inside[inside] = (which >= 0) & (longest <= limit)[which]
    return inside


@checked_keywords
def cutout(inner: Degrees, outer: Degrees, *, min_distance: float = 0.0, max_gap: float | None = None) -> Cutout:
    """Leave the points of a globe out that lie in a limited area: nested grids, as anemoi's ``cutout``.

    Parameters
    ----------
    inner : tuple[array_like, array_like]
        Latitudes and longitudes of the limited area's points in degrees: two arrays that broadcast, ``(num,)`` or
        ``(rows, columns)`` each, or ``(lat[:, None], lon)`` of a regular grid.
    outer : tuple[array_like, array_like]
        Those of the globe, or of any other set around it.
    min_distance : float, default 0.0
        Points of the globe that are nearer than so many degrees to a point of the limited area are left out, too.
    max_gap : float or None, optional
        Degrees that two neighbours in the limited area are at most apart; wider gaps are outside of it. Default: twice
        the longest side of the median triangle between neighbours.

    Returns
    -------
    Cutout
        Its ``rows`` and ``kept`` are the points that stay, ``points`` and ``weights`` those of the union, ``ring(5)``
        the boundary.

    Raises
    ------
    ConfigError
        Latitudes and longitudes that do not broadcast, or are not finite; a limited area without any area.

    Examples
    --------
    >>> import numpy as np
    >>> region = np.linspace(40, 60, 21)[:, None], np.linspace(0, 30, 31)
    >>> around = scidata.cutout(region, (np.linspace(90, -90, 19)[:, None], np.arange(0, 360, 10)))
    >>> int((~around.kept).sum())  # rows at 60, 50 and 40 degrees, columns at 0, 10, 20 and 30
    12
    """
    _check_degrees("cutout: min_distance", min_distance)
    _check_degrees("cutout: max_gap", 0.0 if max_gap is None else max_gap)
    (own, _), (others, shape) = _set(inner, "inner"), _set(outer, "outer")
    chord, _ = make_tree(own.positions()).query(others.positions())
    distance = np.rad2deg(2 * np.arcsin(np.minimum(chord / 2, 1.0)))
    left_out = _inside(own.positions(), others.positions(), max_gap) | (distance < max(min_distance, _SAME))
    return Cutout(inner=own, outer=others, kept=~left_out.reshape(shape), distance=distance.reshape(shape))
