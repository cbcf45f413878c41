"""A field of a mesh, a cloud or a graph, and beside it the part of each rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import owners_of
from scidata.data.pictures.canvas import add_legend, check_field, colours_of, new_figure, save_picture
from scidata.data.pictures.drawing import Drawing, places_in_store, shapes_in_store
from scidata.data.pictures.mesh_shapes import Places, Shapes, places_of
from scidata.data.pictures.set_panels import SetPanels, places_of_sets
from scidata.errors import ConfigError
from scidata.meshes.hetero import JOINT, is_relation
from scidata.store.reading.reader import StoreReader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scidata.store.raw_points.reader import PointsReader
    from scidata.store.reading.part import LocalPart, SamplePart


def draw_mesh(
    reader: StoreReader | PointsReader, index: int, field: str | None, *, parts: bool, path: str | None
) -> Figure:
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
    if cut.entity == JOINT and isinstance(reader, StoreReader):
        figure = _draw_sets(reader, cut, index, name, parts=parts)
    else:
        figure = _draw_rows(reader, cut, index, name, parts=parts)
    if path is not None:
        save_picture(figure, path, [reader.path])
    return figure


def _draw_rows(reader: StoreReader | PointsReader, cut: SamplePart, index: int, name: str, *, parts: bool) -> Figure:
    """Draw a field of nodes, points or cells, and beside it the ranks' parts."""
    read = [reader.read(index, part) for part in range(cut.num_parts)]
    entity = reader.info(name).entity
    values, rows = _column(reader, read, name), cut.entity
    places, shapes = _positions(reader, read, cut)
    if entity not in (rows, "cell") or (entity == "cell" and rows != "cell" and shapes is None):
        raise ConfigError(f"plot: field {name!r} lives on {entity}s, which have no place in a picture")

    several = parts and cut.num_parts > 1
    high = 5.4 if places.in_space else min(max(5.6 * places.aspect, 1.8), 6.5) + 1.1
    figure = new_figure(7.2 * (1 + several) + 1.2, high)
    drawn = Drawing(places, shapes)
    axes = drawn.axes(figure, (1, 1 + several, 1))
    artist = drawn.draw(axes, values, of_cells=entity == "cell" and rows != "cell")
    figure.colorbar(artist, ax=axes, label=_label(reader, name), shrink=0.8)
    axes.set_title(f"{os.path.basename(str(reader.path).rstrip('/'))}: {name}, sample {index}", fontsize=10, loc="left")
    if several:
        beside = drawn.axes(figure, (1, 2, 2))
        owner = owners_of(cut.bounds[rows], np.arange(len(places.xy)))
        colours = colours_of(cut.num_parts)
        of_cells = owners_of(cut.bounds["cell"], np.arange(len(shapes))) if shapes is not None else None
        drawn.draw_ranks(beside, colours, owner, of_cells)
        beside.set_title(f"{cut.num_parts} ranks", fontsize=10, loc="left")
        add_legend(figure, colours, "0.3")
    return figure


def _draw_sets(reader: StoreReader, cut: SamplePart, index: int, name: str, *, parts: bool) -> Figure:
    """Draw a field of one node set, and beside it the ranks' parts of each set."""
    entity = reader.info(name).entity
    places = places_of_sets(reader.store, cut.index)
    if entity not in places:
        raise ConfigError(f"plot: field {name!r} lives on the edges of {entity}, which have no place in a picture")
    several = parts and cut.num_parts > 1
    panels = SetPanels(places if several else {entity: places[entity]}, num_before=int(several))
    read = [reader.read(index, part) for part in range(cut.num_parts)]
    axes = panels.axes(0)
    artist = Drawing(places[entity], None).draw(axes, _column(reader, read, name), of_cells=False)
    panels.figure.colorbar(artist, ax=axes, label=_label(reader, name), shrink=0.8)
    axes.set_title(f"{os.path.basename(str(reader.path).rstrip('/'))}: {name}, sample {index}", fontsize=9, loc="left")
    if several:
        panels.draw(reader.store, cut)
    return panels.figure


def _label(reader: StoreReader | PointsReader, name: str) -> str:
    unit = reader.info(name).units
    return f"{name} ({unit})" if unit else name


def _chosen(reader: StoreReader | PointsReader, field: str | None) -> str:
    names: list[str] = [name for name in reader.fields if name.rpartition("/")[2] != "pos"]
    if field is not None:
        check_field(field, reader.fields)
        return field
    if not names:
        raise ConfigError("plot: there is no field but the positions; name one that is read")
    of_rows = [name for name in names if reader.info(name).entity == reader.entity]
    of_sets = [name for name in names if reader.entity == JOINT and not is_relation(reader.info(name).entity)]
    return next(iter([*of_rows, *of_sets, *names]))


def _column(reader: StoreReader | PointsReader, read: list[LocalPart], name: str) -> npt.NDArray[np.float64]:
    """Return one value of a field for each row, all ranks' after each other."""
    entity, dim = reader.info(name).entity, reader.entity_dim(name)
    owned = [np.moveaxis(p.fields[name], dim, 0)[: p.index_maps[entity].num_owned] for p in read]
    rows = np.concatenate(owned).astype(np.float64)
    column: npt.NDArray[np.float64] = rows.reshape(len(rows), -1)[:, 0] if rows.size else rows.reshape(len(rows))
    return column


def _positions(
    reader: StoreReader | PointsReader, read: list[LocalPart], cut: SamplePart
) -> tuple[Places, Shapes | None]:
    """Return where rows lie, and the cells of a mesh whose rows are nodes."""
    store = getattr(reader, "store", None)
    if store is None:
        if "pos" not in reader.fields:
            raise ConfigError("plot: the positions are not read; open the data with the field 'pos', too")
        points = np.concatenate([p.fields["pos"][: p.index_maps[cut.entity].num_owned] for p in read])
        return places_of(points.astype(np.float64), on_sphere=False), None
    return places_in_store(store, cut.index, cut.entity), shapes_in_store(store, cut.index, cut.entity)
