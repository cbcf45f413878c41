"""Shapes in a picture of a mesh, a cloud or a graph, apart from their colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scidata.core.types import FloatArray, IntArray
from scidata.data.pictures.canvas import Colours
from scidata.data.pictures.mesh_shapes import Places, outlines, places_of, unrolled
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.faces import surface_of
from scidata.meshes.order.positions import cell_centres
from scidata.store.format.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import Collection
    from matplotlib.figure import Figure

_MAX_CELLS = 60_000
MAX_POINTS = 150_000  # more cannot be told apart at this size, and take minutes to draw as vectors
TOWARDS = np.array([0.433, -0.75, 0.5])  # the viewer, in matplotlib's own view of space


class Drawing:
    """Shapes in a picture of a sample, apart from their colours: polygons of cells in sight, else points."""

    def __init__(self, places: Places, shapes: RawCells | None) -> None:
        self.places = places
        self.polygons: list[FloatArray] = []
        self.corners: IntArray | Sequence[IntArray] = ()  # nodes of each polygon
        self.cells: IntArray = np.empty(0, np.int64)  # of which each polygon is
        self.left_out = ""  # why no cells are drawn
        self.cut_away = False  # whether the octant nearest the viewer is
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
        """Draw a point for each row, or for some of many."""
        num = len(self.places.xy)
        rows = np.arange(0, num, stride(num, MAX_POINTS))
        size = float(np.clip(6e4 / max(1, min(num, MAX_POINTS)), 0.5, 30))
        return self.scatter(axes, rows, c=values[rows], s=size, lw=0)

    def scatter(self, axes: Any, rows: IntArray, **style: Any) -> ScalarMappable:
        """Draw points at some rows, in space without the fading by distance that would change their colours."""
        flat = {"depthshade": False} if self.places.in_space else {}
        drawn: ScalarMappable = axes.scatter(*self.places.xy[rows].T, rasterized=True, **flat, **style)
        return drawn

    def fill(self, axes: Axes, colours: FloatArray, *, line: float = 0.0) -> None:
        """Draw the polygons in a colour each, with white lines of some width between them."""
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
    """Return the stride that keeps at most ``most``: along the curve it thins everywhere alike."""
    return max(1, -(-num // most))


def places_in_store(store: Store, index: int, entity: str) -> Places:
    """Return where the rows of a stored sample are drawn.

    Raises
    ------
    ConfigError
        The store has no positions, or the sample has no rows.
    """
    info = store.sample(index)
    if f"{entity}/pos" not in info.arrays:
        raise ConfigError(f"{store.path}: sample {index} has no positions to draw")
    points = store.read(index, f"{entity}/pos").astype(np.float64)
    if not len(points):
        raise ConfigError(f"{store.path}: sample {index} is empty: there is nothing to draw")
    return places_of(points, on_sphere=info.on_sphere)


def shapes_in_store(store: Store, index: int, entity: str) -> RawCells | None:
    """Return the cells of a stored sample whose rows are nodes; None where it has none."""
    if entity != "node" or not store.sample(index).counts.get("cell", 0):
        return None
    return RawCells(
        offsets=store.read(index, "cell/offsets").astype(np.int64),
        connectivity=store.read(index, "cell/connectivity").astype(np.int64),
        cell_type=store.read(index, "cell/type"),
    )
