"""Shapes in a picture of a mesh, a cloud or a graph, apart from their colours."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scidata.core.bounds import owners_of
from scidata.core.types import FloatArray, IntArray
from scidata.data.pictures.canvas import LEGEND_RANKS, Colours, add_legend, colours_of, new_figure
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.hetero import JOINT
from scidata.meshes.order.faces import surface_of
from scidata.meshes.order.positions import cell_centres, unit_sphere
from scidata.store.format.node_sets import relations_of, sets_of
from scidata.store.format.store import Store
from scidata.store.reading.part import SamplePart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import Collection
    from matplotlib.figure import Figure

_SHELL = 0.01  # of the radius: points in space that lie this close to a sphere about 0 are drawn as longitude, latitude
# corners of the VTK cell types that have an area, in order around the cell; a polygon (7) has all of its own
_CORNERS = {5: (0, 1, 2), 8: (0, 1, 3, 2), 9: (0, 1, 2, 3), 22: (0, 1, 2), 23: (0, 1, 2, 3), 28: (0, 1, 2, 3)}
_CORNERS |= {34: (0, 1, 2)}
_POLYGON = 7
EPS = 1e-6  # degrees
_MAX_NUMBERS = 128  # ranks: numbers of more would overlap


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
    """Return the coordinates at which points are drawn; ``on_sphere``: longitudes and latitudes, degrees."""
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
    """Bring longitudes into one turn, from 0 or -180 on, unless they span only a part of one."""
    lon, lat = lon_lat[:, 0], lon_lat[:, 1]
    labels = ("longitude (°)", "latitude (°)")
    if np.ptp(lon) <= 180:
        return Places(xy=lon_lat, labels=labels)
    start = 0.0 if lon.min() >= -EPS else -180.0
    turned = (lon - start + EPS) % 360 - EPS + start  # just below a full turn, by rounding, counts as 0
    return Places(xy=np.stack([turned, lat], axis=1), labels=labels, start=start)


def outlines(cells: RawCells) -> tuple[list[IntArray], IntArray]:
    """Return the corners, in order, of each cell that has an area in the plane, and the numbers of these cells."""
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
    """Make longitudes continuous, without jumps; close a cell around a pole along the pole's line."""
    lon, lat = polygon.T
    steps = (np.diff(lon, append=lon[:1]) + 180) % 360 - 180
    path = lon[0] + np.concatenate([[0.0], np.cumsum(steps)])
    if abs(path[-1] - path[0]) < 180:
        return np.stack([path[:-1], lat], axis=1)
    pole = float(np.copysign(90.0, lat.mean()))
    closed = np.concatenate([lat, [lat[0], pole, pole]])
    return np.stack([np.append(path, [path[-1], path[0]]), closed], axis=1)


def _open_pole(polygon: FloatArray) -> FloatArray:
    """Give a corner at a pole, whose longitude is arbitrary, the longitudes of both its neighbours."""
    at = np.flatnonzero(np.abs(polygon[:, 1]) > 90 - EPS)
    if len(at) != 1 or len(polygon) < 3:
        return polygon
    turned = np.roll(polygon, -int(at[0]), axis=0)
    latitude = turned[0, 1]
    ends = np.array([[turned[-1, 0], latitude], [turned[1, 0], latitude]])
    return np.concatenate([ends, turned[1:]])


def number_parts(axes: Axes, places: Places, bounds: IntArray, *, few: bool) -> None:
    """Write each rank on its part's row nearest the middle; ``few``: there is room for large numbers."""
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


_MAX_CELLS = 60_000
MAX_POINTS = 150_000  # more look alike at this size and take minutes to draw as vectors
TOWARDS = np.array([0.433, -0.75, 0.5])  # the viewer, in matplotlib's own view of space


class Drawing:
    """Shapes in a picture of a sample, apart from their colours: polygons of visible cells, else points."""

    def __init__(self, places: Places, shapes: RawCells | None) -> None:
        self.places = places
        self.polygons: list[FloatArray] = []
        self.corners: IntArray | Sequence[IntArray] = ()  # nodes of each polygon
        self.cells: IntArray = np.empty(0, np.int64)  # of which each polygon is
        self.left_out = ""  # why no cells are drawn
        self.cut_away = False  # whether the octant nearest the viewer is cut away
        if shapes is None or not shapes.num_cells:
            return
        if not places.in_space and shapes.num_cells > _MAX_CELLS:
            self.left_out = f"{shapes.num_cells} cells are too many to draw"
            return
        self._find(shapes)
        if len(self.cells) > _MAX_CELLS:
            self.left_out = f"{len(self.cells)} faces in sight are too many to draw"
            self.polygons, self.corners, self.cells = [], (), self.cells[:0]

    def _find(self, shapes: RawCells) -> None:
        xy = self.places.xy
        if self.places.in_space:
            centres, middle = cell_centres(xy, shapes), (xy.min(axis=0) + xy.max(axis=0)) / 2
            # the octant of the whole that is nearest the viewer is cut away
            kept = np.flatnonzero(~((centres - middle) * np.sign(TOWARDS) > 0).all(axis=1))
            surface = surface_of(shapes.offsets, shapes.connectivity, shapes.cell_type, kept)
            facing = surface.facing(xy, centres, TOWARDS)
            if len(facing):
                self.corners, self.cells = surface.corners[facing], surface.cell[facing]
                self.polygons = list(xy[self.corners])
                self.cut_away = True
                return
        corners, cells = outlines(shapes)
        polygons = [xy[ids] for ids in corners]
        if self.places.start is None:
            self.polygons, self.corners, self.cells = polygons, corners, cells
            return
        self.polygons, numbers = unrolled(polygons, np.arange(len(cells)), self.places.start)
        self.corners, self.cells = [corners[i] for i in numbers], cells[numbers]

    def axes(self, figure: Figure, place: tuple[int, int, int]) -> Axes:
        """Add axes that show all places."""
        places = self.places
        axes: Axes = figure.add_subplot(*place, projection="3d" if places.in_space else None)
        low, high = places.xy.min(axis=0), places.xy.max(axis=0)
        axes.set_xlabel(places.labels[0])
        axes.set_ylabel(places.labels[1])
        if places.in_space:
            solid: Any = axes
            solid.set_zlabel(places.labels[2])
            solid.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), zlim=(low[2], high[2]))
            solid.set_box_aspect(np.maximum(high - low, 0.02 * (high - low).max() or 1.0))
            return axes
        axes.set_aspect("equal")
        margin = 0.02 * (high - low)
        if places.start is None:
            axes.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
            return axes
        from matplotlib.ticker import MultipleLocator

        tall = high[1] - low[1]
        axes.set(xlim=(places.start, places.start + 360), ylim=(-90, 90) if tall > 120 else (low[1], high[1]))
        axes.xaxis.set_major_locator(MultipleLocator(30))
        axes.yaxis.set_major_locator(MultipleLocator(30 if tall > 60 else 10))
        return axes

    def draw(self, axes: Axes, values: FloatArray, *, of_cells: bool) -> ScalarMappable:
        """Draw values of rows, or of cells; return the artist for a colour bar."""
        from matplotlib.cm import ScalarMappable

        if len(self.cells):
            shown = values[self.cells] if of_cells else np.array([values[ids].mean() for ids in self.corners])
            mappable, masked = ScalarMappable(), np.ma.masked_invalid(shown)
            mappable.set_array(masked)
            self.fill(axes, mappable.to_rgba(masked))
            return mappable
        if of_cells:
            raise ConfigError("plot: the cells are too many, or have no faces, to draw a field of theirs")
        return self._sample(axes, values)

    def draw_ranks(self, axes: Axes, colours: Colours, owner: IntArray, of_cells: IntArray | None) -> None:
        """Draw rows, or cells, in the colour of their rank."""
        if len(self.cells) and of_cells is not None:
            self.fill(axes, colours[of_cells[self.cells]])
            return
        self._sample(axes, colours[owner])

    def _sample(self, axes: Axes, values: FloatArray) -> ScalarMappable:
        """Draw a point for each row, or for every n-th of many."""
        num = len(self.places.xy)
        rows = np.arange(0, num, stride(num, MAX_POINTS))
        size = float(np.clip(6e4 / max(1, min(num, MAX_POINTS)), 0.5, 30))
        return self.scatter(axes, rows, c=values[rows], s=size, lw=0)

    def scatter(self, axes: Any, rows: IntArray, **style: Any) -> ScalarMappable:
        """Draw points at some rows; in 3D without depth shading, which would change their colours."""
        flat = {"depthshade": False} if self.places.in_space else {}
        return axes.scatter(*self.places.xy[rows].T, rasterized=True, **flat, **style)

    def fill(self, axes: Axes, colours: FloatArray, *, line: float = 0.0) -> None:
        """Fill each polygon with its colour, with white lines of some width between them."""
        from matplotlib.collections import PolyCollection
        from mpl_toolkits.mplot3d.art3d import Poly3DCollection

        kind: Any = Poly3DCollection if self.places.in_space else PolyCollection
        self._add(
            axes, kind(self.polygons, facecolors=colours, edgecolors="white" if line else colours, lw=line or 0.1)
        )

    def lines(self, axes: Axes, ends: FloatArray, **style: Any) -> None:
        """Draw lines between ends ``(num, 2, coordinates)``."""
        from matplotlib.collections import LineCollection
        from mpl_toolkits.mplot3d.art3d import Line3DCollection

        kind: Any = Line3DCollection if self.places.in_space else LineCollection
        self._add(axes, kind(ends, lw=0.4, **style))

    def _add(self, axes: Any, made: Collection) -> None:
        made.set_rasterized(True)
        if self.places.in_space:
            axes.add_collection3d(made, autolim=False)
        else:
            axes.add_collection(made)


def stride(num: int, most: int) -> int:
    """Return the stride that keeps at most ``most`` rows; along the curve it thins evenly in space."""
    return max(1, -(-num // most))


def places_in_store(store: Store, index: int, entity: str) -> Places:
    """Return the coordinates at which the rows of a stored sample are drawn."""
    info = store.sample(index)
    if f"{entity}/pos" not in info.arrays:
        raise ConfigError(f"{store.path}: sample {index} has no positions to draw")
    points = store.read(index, f"{entity}/pos").astype(np.float64)
    if not len(points):
        raise ConfigError(f"{store.path}: sample {index} is empty: there is nothing to draw")
    return places_of(points, on_sphere=info.on_sphere)


def shapes_in_store(store: Store, index: int, entity: str) -> RawCells | None:
    """Return the cells of a stored sample whose rows are nodes; None if it has no cells."""
    if entity != "node" or not store.sample(index).counts.get("cell", 0):
        return None
    return RawCells(
        offsets=store.read(index, "cell/offsets").astype(np.int64),
        connectivity=store.read(index, "cell/connectivity").astype(np.int64),
        cell_type=store.read(index, "cell/type"),
    )


_MAX_EDGES = 20_000  # of a panel: more are a grey plane
_POLAR = 75.0  # latitude beyond which a straight line differs much from the edge
_WIDE = 0.75  # flatter panels are stacked vertically, which makes them larger


def places_of_sets(store: Store, index: int) -> dict[str, Places]:
    """Return the coordinates at which the rows of each set are drawn, all in the same frame."""
    info = store.sample(index)
    sets = sets_of(info)
    without = [name for name in sets if f"{name}/pos" not in info.arrays]
    if without:
        raise ConfigError(f"{store.path}: sample {index}: node set {without[0]!r} has no positions to draw")
    points = [store.read(index, f"{name}/pos").astype(np.float64) for name in sets]
    if not sum(map(len, points)):
        raise ConfigError(f"{store.path}: sample {index} is empty: there is nothing to draw")
    every = places_of(np.concatenate(points), on_sphere=info.on_sphere)
    split = np.split(every.xy, np.cumsum([len(each) for each in points])[:-1])
    return {name: Places(xy=xy, labels=every.labels, start=every.start) for name, xy in zip(sets, split, strict=True)}


class SetPanels:
    """A figure with a panel for each node set, after ``num_before`` others; ``shapes`` are the cells of a mesh."""

    def __init__(self, places: Mapping[str, Places], shapes: RawCells | None = None, *, num_before: int = 0) -> None:
        self.places, self._shapes = places, shapes
        self.drawings = {name: Drawing(each, shapes) for name, each in places.items()}
        # all in one frame, so that an edge from one set to another has its place
        several = list(places.values())
        self._frame = Drawing(replace(several[0], xy=np.concatenate([each.xy for each in several])), None)
        num = num_before + len(places)
        aspect = min(max(self._frame.places.aspect, 0.25), 1.5)
        self._columns = 1 if aspect < _WIDE and not self._frame.places.in_space and num < 4 else min(num, 2)
        self._rows = -(-num // self._columns)
        self._num_before = num_before
        width = 8.2 if self._columns == 1 else 6.0
        high = (width - 0.6) * (0.9 if self._frame.places.in_space else aspect) + 1.0
        self.figure = new_figure(self._columns * width + 1.8, self._rows * high)

    def axes(self, number: int) -> Axes:
        """Return the axes of one panel, from 0 on."""
        return self._frame.axes(self.figure, (self._rows, self._columns, number + 1))

    def draw(self, store: Store | None, cut: SamplePart, said: Sequence[str] = ()) -> list[str]:
        """Draw rows by rank, edges from other parts, a legend and ``said``; return a note for each omission."""
        from matplotlib.lines import Line2D

        colours, notes, marks, shapes = colours_of(cut.num_parts), [], [], self._shapes
        of_cells = None if shapes is None else owners_of(cut.bounds["cell"], np.arange(shapes.num_cells))
        for number, (name, places) in enumerate(self.places.items()):
            axes = self.axes(self._num_before + number)
            owner, share = owners_of(cut.bounds[name], np.arange(len(places.xy))), ""
            self.drawings[name].draw_ranks(axes, colours, owner, of_cells)
            if store is not None and cut.entity == JOINT:
                ends, num_cut, num_edges = self._cut_edges(store, cut, name)
                if len(ends):
                    opacity = float(np.clip(800 / len(ends), 0.12, 0.6))
                    self.drawings[name].lines(axes, ends, colors="0.15", alpha=opacity, zorder=3)
                notes += [f"{name}: {len(ends)} of {num_cut} edges cut are drawn"] if len(ends) < num_cut else []
                share = f", {num_cut} of {num_edges} edges that end here are cut" if num_edges else ""
                marks = [Line2D([], [], color="0.15", lw=0.6, alpha=0.6, label="edge from\nanother part")]
            if not places.in_space:
                number_parts(axes, places, cut.bounds[name], few=cut.num_parts <= LEGEND_RANKS)
            axes.set_title(f"{name}: {len(places.xy)} rows over {cut.num_parts} ranks{share}", fontsize=9, loc="left")
        lines = [*(textwrap.fill(note, 24) for note in notes), *said]
        add_legend(self.figure, colours, "0.3", *marks, notes=lines)
        return notes

    def _cut_edges(self, store: Store, cut: SamplePart, name: str) -> tuple[FloatArray, int, int]:
        """Return the ends of some edges from other parts, ``(num, 2, coordinates)``, and how many there are."""
        info = store.sample(cut.index)
        ends, num_cut, num_edges = [], 0, 0
        for relation, (source, _, target) in relations_of(info).items():
            if target != name:
                continue
            indptr: IntArray = store.read(cut.index, f"{relation}/indptr").astype(np.int64)
            src = store.read(cut.index, f"{relation}/src").astype(np.int64)
            dst = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
            apart = owners_of(cut.bounds[source], src) != owners_of(cut.bounds[target], dst)
            num_cut, num_edges = num_cut + int(apart.sum()), num_edges + len(src)
            ends.append(np.stack([self.places[source].xy[src[apart]], self.places[target].xy[dst[apart]]], axis=1))
        every = np.concatenate([np.empty((0, 2, self.places[name].xy.shape[1])), *ends])
        if self.places[name].start is not None:
            across, polar = np.abs(np.diff(every[:, :, 0], axis=1)[:, 0]), np.abs(every[:, :, 1]).max(axis=1) > _POLAR
            every = every[(across < 180) & ~(polar & (across > 30))]  # drop edges across the border or a pole
        return every[:: stride(len(every), _MAX_EDGES)], num_cut, num_edges
