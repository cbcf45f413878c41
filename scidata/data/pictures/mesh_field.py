"""A field of a mesh, a cloud or a graph, and beside it who has which part."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import owners_of
from scidata.core.types import IntArray
from scidata.data.pictures.figures import colours_of, new_figure, rank_handles
from scidata.data.pictures.mesh_shapes import Places, Shapes, in_view, outlines, places_of, unrolled
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.meshes.surface import surface_of

if TYPE_CHECKING:
    from scidata.store.reading.part import LocalPart

_MAX_CELLS = 60_000
_MAX_POINTS = 150_000


def draw_mesh(reader: Any, index: int, field: str | None, *, parts: bool, path: str | None) -> Any:
    """Draw a field of one whole sample, which this process reads part by part; return the figure.

    Of fields with several components the first is drawn.

    Parameters
    ----------
    reader
        Of a store, or of raw points.

    Raises
    ------
    UnknownNameError, ConfigError
        No such field, one of edges, no positions; data that are drawn from anew each epoch.
    """
    if reader.subsample is not None:
        raise ConfigError("plot: the rows are drawn anew in each epoch; open the data without subsample to see all")
    name = _chosen(reader, field)
    cut = reader.partition_of(index)
    read = [reader.read(index, part) for part in range(cut.num_parts)]
    entity = reader.info(name).entity
    values, rows = _column(reader, read, name), cut.entity
    places, shapes = _positions(reader, read, cut)
    if entity not in (rows, "cell") or (entity == "cell" and rows != "cell" and shapes is None):
        raise ConfigError(f"plot: field {name!r} lives on {entity}s, which have no place in a picture")

    several = parts and cut.num_parts > 1
    across, up = np.ptp(places.xy[:, 0]), np.ptp(places.xy[:, 1])
    high = 5.4 if places.in_space else min(max(5.6 * up / max(across, 1e-300), 1.8), 6.5) + 1.1
    figure = new_figure(7.2 * (1 + several) + 1.2, high)
    drawn = _Drawing(places, shapes)
    unit = reader.info(name).units
    label = f"{name} ({unit})" if unit else name
    axes = drawn.axes(figure, (1, 1 + several, 1))
    artist = drawn.draw(axes, values, of_cells=entity == "cell" and rows != "cell")
    figure.colorbar(artist, ax=axes, label=label, shrink=0.8)
    axes.set_title(f"{os.path.basename(str(reader.path).rstrip('/'))}: {name}, sample {index}", fontsize=10, loc="left")
    if several:
        beside = drawn.axes(figure, (1, 2, 2))
        owner = owners_of(cut.bounds[rows], np.arange(len(places.xy)))
        colours = np.array([colour[:3] for colour in colours_of(cut.num_parts)])
        of_cells = owners_of(cut.bounds["cell"], np.arange(len(shapes))) if shapes is not None else None
        drawn.draw_ranks(beside, colours, owner, of_cells)
        beside.set_title(f"{cut.num_parts} ranks", fontsize=10, loc="left")
        figure.legend(
            handles=rank_handles(list(map(tuple, colours)), "0.3"), loc="outside right upper", fontsize=8, frameon=False
        )
    if path is not None:
        figure.savefig(path)
    return figure


def _chosen(reader: Any, field: str | None) -> str:
    names: list[str] = [name for name in reader.fields if name != "pos"]
    if field is not None:
        if field not in reader.fields:
            raise UnknownNameError(f"plot: no field {field!r}{near_matches(field, reader.fields)}")
        return field
    if not names:
        raise ConfigError("plot: there is no field but the positions; name one that is read")
    return next((name for name in names if reader.info(name).entity == reader.entity), names[0])


def _column(reader: Any, read: list[LocalPart], name: str) -> npt.NDArray[np.float64]:
    """Return one value of a field for each row, all ranks' after each other."""
    entity, dim = reader.info(name).entity, reader.entity_dim(name)
    owned = [np.moveaxis(p.fields[name], dim, 0)[: p.index_maps[entity].num_owned] for p in read]
    rows = np.concatenate(owned).astype(np.float64)
    column: npt.NDArray[np.float64] = rows.reshape(len(rows), -1)[:, 0] if rows.size else rows.reshape(len(rows))
    return column


def _positions(reader: Any, read: list[LocalPart], cut: Any) -> tuple[Places, Shapes | None]:
    """Return where rows lie, and the cells of a mesh whose rows are nodes."""
    store = getattr(reader, "store", None)
    if store is None:
        if "pos" not in reader.fields:
            raise ConfigError("plot: the positions are not read; open the data with the field 'pos', too")
        points = np.concatenate([p.fields["pos"][: p.index_maps[cut.entity].num_owned] for p in read])
        return places_of(points.astype(np.float64), on_sphere=False), None
    info = store.sample(cut.index)
    if f"{cut.entity}/pos" not in info.arrays:
        raise ConfigError(f"plot: {store.path} has no positions")
    points = store.read(cut.index, f"{cut.entity}/pos").astype(np.float64)
    shapes = None
    if cut.entity == "node" and info.counts.get("cell", 0):
        shapes = Shapes(
            offsets=store.read(cut.index, "cell/offsets").astype(np.int64),
            connectivity=store.read(cut.index, "cell/connectivity").astype(np.int64),
            types=store.read(cut.index, "cell/type"),
        )
    return places_of(points, on_sphere=info.on_sphere), shapes


class _Drawing:
    """What is drawn of a sample, whatever its colours: polygons of cells in sight, else points."""

    def __init__(self, places: Places, shapes: Shapes | None) -> None:
        self.places = places
        self.polygons: list[npt.NDArray[np.float64]] = []
        self.corners: Any = ()  # nodes of each polygon
        self.cells: IntArray = np.empty(0, np.int64)  # of which each polygon is
        if shapes is not None and len(shapes):
            self._find(shapes)
        if len(self.cells) > _MAX_CELLS:
            self.polygons, self.corners, self.cells = [], (), self.cells[:0]

    def _find(self, shapes: Shapes) -> None:
        xy = self.places.xy
        if self.places.in_space:
            towards = np.array([0.43, -0.75, 0.5])  # matplotlib's own view
            centres = shapes.centres(xy)
            kept = np.flatnonzero(~in_view(self.places, centres, towards))
            surface = surface_of(shapes.offsets, shapes.connectivity, shapes.types, kept)
            facing = surface.facing(xy, centres, towards)
            if len(facing):
                self.corners, self.cells = surface.corners[facing], surface.cell[facing]
                self.polygons = list(xy[self.corners])
                return
        corners, cells = outlines(shapes)
        polygons = [xy[ids] for ids in corners]
        if self.places.start is None:
            self.polygons, self.corners, self.cells = polygons, corners, cells
            return
        self.polygons, numbers = unrolled(polygons, np.arange(len(cells)), self.places.start)
        self.corners, self.cells = [corners[i] for i in numbers], cells[numbers]

    def axes(self, figure: Any, place: tuple[int, int, int]) -> Any:
        places = self.places
        axes = figure.add_subplot(*place, projection="3d" if places.in_space else None)
        low, high = places.xy.min(axis=0), places.xy.max(axis=0)
        axes.set_xlabel(places.labels[0])
        axes.set_ylabel(places.labels[1])
        if places.in_space:
            axes.set_zlabel(places.labels[2])
            axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), zlim=(low[2], high[2]))
            axes.set_box_aspect(np.maximum(high - low, 0.02 * (high - low).max() or 1.0))
            return axes
        axes.set_aspect("equal")
        margin = 0.02 * (high - low)
        if places.start is not None:
            axes.set(xlim=(places.start, places.start + 360), ylim=(-90, 90))
        else:
            axes.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
        return axes

    def draw(self, axes: Any, values: npt.NDArray[np.float64], *, of_cells: bool) -> Any:
        """Draw values of rows, or of cells; return what a colour bar is of."""
        if len(self.cells):
            shown = values[self.cells] if of_cells else np.array([values[ids].mean() for ids in self.corners])
            return self._add_coloured(axes, np.ma.masked_invalid(shown))
        if of_cells:
            raise ConfigError("plot: the cells are too many, or have no faces, to draw a field of theirs")
        step = max(1, -(-len(values) // _MAX_POINTS))
        return axes.scatter(*self.places.xy[::step].T, c=values[::step], s=self._size, lw=0, rasterized=True)

    def draw_ranks(
        self, axes: Any, colours: npt.NDArray[np.float64], owner: IntArray, of_cells: IntArray | None
    ) -> None:
        """Draw rows, or cells, in the colour of their rank."""
        if len(self.cells) and of_cells is not None:
            self._add(axes, colours[of_cells[self.cells]])
            return
        step = max(1, -(-len(owner) // _MAX_POINTS))
        axes.scatter(*self.places.xy[::step].T, c=colours[owner[::step]], s=self._size, lw=0, rasterized=True)

    @property
    def _size(self) -> float:
        return float(np.clip(6e4 / max(1, min(len(self.places.xy), _MAX_POINTS)), 0.5, 30))

    def _add_coloured(self, axes: Any, values: Any) -> Any:
        from matplotlib.cm import ScalarMappable

        mappable = ScalarMappable()
        mappable.set_array(values)
        self._add(axes, mappable.to_rgba(values))
        return mappable

    def _add(self, axes: Any, fill: Any) -> None:
        from matplotlib.collections import PolyCollection
        from mpl_toolkits.mplot3d.art3d import Poly3DCollection

        kind: Any = Poly3DCollection if self.places.in_space else PolyCollection
        made = kind(self.polygons, facecolors=fill, edgecolors=fill, lw=0.1)
        made.set_rasterized(True)
        if self.places.in_space:
            axes.add_collection3d(made, autolim=False)
        else:
            axes.add_collection(made)
