"""A set of nodes with places: generators make them, and edges between two sets are found from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scidata.core.types import FloatArray
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.ids import blocks
from scidata.meshes.order.neighbours import TIED
from scidata.meshes.order.positions import finite_points

_BLOCK = 1 << 16


def sin_cos(degrees: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return sine and cosine of angles in degrees, of the same bits wherever the angles are mirror images.

    The angle is reduced to 45 degrees around the nearest multiple of 90, which is exact in degrees, before it becomes
    radians: so the poles are at one point each, 360 is 0, and distances that are equal by symmetry come out equal.
    """
    whole = np.fmod(degrees, 360.0)
    quarter = np.rint(whole / 90.0)
    rest = np.deg2rad(whole - 90.0 * quarter)
    sine, cosine = np.sin(rest), np.cos(rest)
    turn = quarter.astype(np.int64) & 3
    odd, back = (turn & 1).astype(np.bool_), turn >= 2
    cosine_back = (turn == 1) | (turn == 2)
    # adding 0 leaves no negative zero: -0.0 and 0.0 would send arctan2 to opposite sides
    sines = np.where(odd, cosine, sine) * np.where(back, -1.0, 1.0) + 0.0
    cosines = np.where(odd, sine, cosine) * np.where(cosine_back, -1.0, 1.0) + 0.0
    return sines, cosines


def unit_vectors(points: FloatArray) -> FloatArray:
    """Return ``(num, 3)`` points of the unit sphere for ``(num, 2)`` longitude and latitude in degrees."""
    out = np.empty((len(points), 3))
    for rows in blocks(len(points), _BLOCK):
        (sin_lon, cos_lon), (sin_lat, cos_lat) = sin_cos(points[rows, 0]), sin_cos(points[rows, 1])
        out[rows, 0] = cos_lat * cos_lon
        out[rows, 1] = cos_lat * sin_lon
        out[rows, 2] = sin_lat
    return out


def degrees_of(vectors: FloatArray) -> FloatArray:
    """Return ``(num, 2)`` longitude in [0, 360) and latitude in degrees of ``(num, 3)`` vectors of any length."""
    x, y, z = vectors.T
    out = np.empty((len(vectors), 2))
    out[:, 0] = np.rad2deg(np.arctan2(y, x)) % 360.0
    out[:, 0] *= out[:, 0] < 360.0  # of the smallest negative angle the remainder is rounded to 360
    out[:, 1] = np.rad2deg(np.arctan2(z, np.hypot(x, y)))
    return out


# Latitudes may be beyond the poles by that many degrees: 90 in radians of float32 is 90.0000025.
_BEYOND = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeSet:
    """Nodes of one kind, with their places.

    - ``points``: ``(num_nodes, 2)`` float64 longitude and latitude in degrees where ``on_sphere``, else ``(num_nodes, 2
      or 3)`` coordinates.
    - ``on_sphere``: true where ``points`` are longitude and latitude.
    - ``cells``: triangles or quads of the set, counter-clockwise seen from outside; None if it has none.

    Raises ConfigError: points of another shape, NaN or infinite, latitudes beyond the poles, or cells that do not fit.
    """

    points: FloatArray
    on_sphere: bool
    cells: RawCells | None = None

    def __post_init__(self) -> None:
        points = finite_points(self.points).astype(np.float64, copy=False)
        object.__setattr__(self, "points", points)
        num = len(points)
        if self.on_sphere:
            if points.shape[1] != 2:
                raise ConfigError(
                    f"nodes on a sphere are (num, 2) longitude and latitude in degrees, not {points.shape}"
                )
            if num and float(np.abs(points[:, 1]).max()) > 90 + _BEYOND:
                rows = np.flatnonzero(np.abs(points[:, 1]) > 90 + _BEYOND)
                raise ConfigError(
                    f"{len(rows)} of {num} nodes have a latitude beyond 90 degrees (columns are longitude, latitude; "
                    f"first rows: {rows[:5].tolist()}): drop or mend them"
                )
        nodes = None if self.cells is None else self.cells.connectivity
        if nodes is not None and len(nodes) and (int(nodes.min()) < 0 or int(nodes.max()) >= num):
            outside = int(((nodes < 0) | (nodes >= num)).sum())
            raise ConfigError(f"{outside} corners of cells are outside the {num} nodes")

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.points)

    def positions(self) -> FloatArray:
        """Return where distances are measured: ``(num_nodes, 3)`` on the unit sphere, or ``points`` as they are."""
        return unit_vectors(self.points) if self.on_sphere else self.points


def positions_of(source: NodeSet, target: NodeSet) -> tuple[FloatArray, FloatArray, float]:
    """Return the positions of two sets, and by how much distances between them may differ and count as equal."""
    if source.on_sphere != target.on_sphere:
        one, other = ("source", "target") if source.on_sphere else ("target", "source")
        raise ConfigError(
            f"edges join sets in one space, but the {one} is on a sphere and the {other} is not: give both as "
            "longitude and latitude, or both as coordinates"
        )
    start = source.positions()
    end = start if target is source else target.positions()
    if start.shape[1] != end.shape[1]:
        raise ConfigError(f"the source has {start.shape[1]} coordinates, the target {end.shape[1]}: give both as many")
    if source.on_sphere:
        return start, end, TIED
    largest = max((float(np.abs(each).max()) for each in (start, end) if each.size), default=0.0)
    return start, end, TIED * largest
