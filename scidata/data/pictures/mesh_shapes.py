"""Where rows and cells of meshes and clouds lie in a picture: the plane, the sphere as a map, space."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scidata.core.types import FloatArray, IntArray
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.positions import unit_sphere

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHELL = 0.01  # of the radius: points in space that lie this close to a sphere about 0 are drawn as longitude, latitude
# corners of the VTK cell types that have an area, in order around the cell; a polygon (7) has all of its own
_CORNERS = {5: (0, 1, 2), 8: (0, 1, 3, 2), 9: (0, 1, 2, 3), 22: (0, 1, 2), 23: (0, 1, 2, 3), 28: (0, 1, 2, 3)}
_CORNERS |= {34: (0, 1, 2)}
_POLYGON = 7
EPS = 1e-6  # degrees
_MAX_NUMBERS = 128  # ranks: of more, their numbers would lie over each other


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Coordinates to draw, ``(N, 2 | 3)``, and their names."""

    xy: FloatArray
    labels: tuple[str, ...]
    start: float | None = None  # first longitude of the picture, where it goes around the sphere

    @property
    def in_space(self) -> bool:
        """Whether there are three coordinates."""
        return len(self.labels) == 3

    @property
    def aspect(self) -> float:
        """Height over width."""
        return float(np.ptp(self.xy[:, 1]) / max(np.ptp(self.xy[:, 0]), 1e-300))


def places_of(points: FloatArray, *, on_sphere: bool) -> Places:
    """Return where points are drawn; ``on_sphere``: they are longitudes and latitudes, degrees."""
    if on_sphere:
        return _around_sphere(points)
    if points.shape[1] == 3:
        radius = np.linalg.norm(points, axis=1)
        if np.ptp(radius) <= _SHELL * radius.max() and bool((np.abs(points.mean(axis=0)) < 0.5 * radius.max()).all()):
            lat = np.arcsin(np.clip(points[:, 2] / radius, -1, 1))
            return _around_sphere(np.rad2deg(np.stack([np.arctan2(points[:, 1], points[:, 0]), lat], axis=1)))
        if np.ptp(points[:, 2]) == 0:
            points = points[:, :2]
    return Places(xy=points, labels=("x", "y", "z")[: points.shape[1]])


def _around_sphere(lon_lat: FloatArray) -> Places:
    """Bring longitudes into one turn, from 0 or -180 on, unless they span a part of one only."""
    lon, lat = lon_lat[:, 0], lon_lat[:, 1]
    labels = ("longitude (°)", "latitude (°)")
    if np.ptp(lon) <= 180:
        return Places(xy=lon_lat, labels=labels)
    start = 0.0 if lon.min() >= -EPS else -180.0
    turned = (lon - start + EPS) % 360 - EPS + start  # just below a full turn, by rounding, counts as 0
    return Places(xy=np.stack([turned, lat], axis=1), labels=labels, start=start)


def outlines(cells: RawCells) -> tuple[list[IntArray], IntArray]:
    """Return the corners of each cell that has an area in the plane, in order around it, and which cells these are."""
    offsets, nodes, types = cells.offsets, cells.connectivity, cells.cell_type
    rings: list[IntArray] = []
    found: list[IntArray] = []
    for kind in np.unique(types).tolist():
        rows = np.flatnonzero(types == kind)
        if kind == _POLYGON:
            rings += [nodes[offsets[i] : offsets[i + 1]] for i in rows]
        elif kind in _CORNERS:
            rings += list(nodes[offsets[rows][:, None] + np.array(_CORNERS[kind])])
        else:
            continue
        found.append(rows)
    return rings, np.concatenate(found) if found else np.empty(0, np.int64)


def unrolled(polygons: list[FloatArray], cells: IntArray, start: float) -> tuple[list[FloatArray], IntArray]:
    """Unroll cells of the sphere: at a pole up to its line, and across the first meridian at both sides of the map."""
    made, kept = [], []
    for polygon, cell in zip(polygons, cells.tolist(), strict=True):
        flat = _around_pole(_open_pole(polygon))
        lon = flat[:, 0]
        shifts = [0.0]
        shifts += [360.0] if lon.min() < start - EPS else []
        shifts += [-360.0] if lon.max() > start + 360 + EPS else []
        for shift in shifts:
            made.append(np.stack([lon + shift, flat[:, 1]], axis=1))
            kept.append(cell)
    return made, np.array(kept, np.int64)


def _around_pole(polygon: FloatArray) -> FloatArray:
    """Make longitudes follow each other without jumps; a cell that goes around a pole is closed along its line."""
    lon, lat = polygon.T
    steps = (np.diff(lon, append=lon[:1]) + 180) % 360 - 180
    path = lon[0] + np.concatenate([[0.0], np.cumsum(steps)])
    if abs(path[-1] - path[0]) < 180:
        return np.stack([path[:-1], lat], axis=1)
    pole = float(np.copysign(90.0, lat.mean()))
    closed = np.concatenate([lat, [lat[0], pole, pole]])
    return np.stack([np.append(path, [path[-1], path[0]]), closed], axis=1)


def _open_pole(polygon: FloatArray) -> FloatArray:
    """Give a corner at a pole, whose longitude means nothing, those of both its neighbours."""
    at = np.flatnonzero(np.abs(polygon[:, 1]) > 90 - EPS)
    if len(at) != 1 or len(polygon) < 3:
        return polygon
    turned = np.roll(polygon, -int(at[0]), axis=0)
    latitude = turned[0, 1]
    ends = np.array([[turned[-1, 0], latitude], [turned[1, 0], latitude]])
    return np.concatenate([ends, turned[1:]])


def number_parts(axes: Axes, places: Places, bounds: IntArray, *, few: bool) -> None:
    """Write the rank on the row of each part that is nearest its middle: on the map, the middle in space.

    ``few``: there is room for large numbers.
    """
    from matplotlib.patheffects import withStroke

    if len(bounds) - 1 > _MAX_NUMBERS:
        return
    for rank, (first, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        if stop > first:
            own = places.xy[first:stop]
            points = own if places.start is None else unit_sphere(own)
            x, y = own[np.argmin(np.linalg.norm(points - points.mean(axis=0), axis=1))]
            halo = [withStroke(linewidth=2, foreground="white")]
            size, side = 11 if few else 7, "center"
            if places.start is not None:  # not over the border of the map
                side = "left" if x < places.start + 5 else "right" if x > places.start + 355 else side
            axes.text(x, y, str(rank), ha=side, va="center", fontsize=size, zorder=6, path_effects=halo)
