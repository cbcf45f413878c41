"""A field of a mesh, a cloud or a graph, beside the ranks' parts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from scidata.core.types import FloatArray
from scidata.data.pictures.canvas import save_picture
from scidata.data.pictures.drawing import Places, SetPanels, places_in_store, places_of, places_of_sets, shapes_in_store
from scidata.errors import ConfigError, check_known
from scidata.meshes.geometry import RawCells
from scidata.meshes.hetero import JOINT, is_relation
from scidata.store.reading.reader import StoreReader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scidata.store.raw_points.reader import PointsReader
    from scidata.store.reading.part import LocalPart, SamplePart


def draw_mesh(
    reader: StoreReader | PointsReader, index: int, field: str | None, *, parts: bool, path: str | None
) -> Figure:
    """Draw a field's first component for one whole sample, read here part by part; return the figure."""
    if reader.subsample is not None:
        raise ConfigError("plot: the rows are drawn anew in each epoch; open the data without subsample to see all")
    name = _chosen(reader, field)
    cut, entity, shapes = reader.partition_of(index), reader.info(name).entity, None
    read = [reader.read(index, part) for part in range(cut.num_parts)]
    if cut.entity == JOINT and isinstance(reader, StoreReader):
        places = places_of_sets(reader.store, cut.index)
        if entity not in places:
            raise ConfigError(f"plot: field {name!r} lives on the edges of {entity}, which have no place in a picture")
    else:
        positions, shapes = _positions(reader, read, cut)
        places = {cut.entity: positions}
        if entity not in (cut.entity, "cell") or (entity != cut.entity and shapes is None):
            raise ConfigError(f"plot: field {name!r} lives on {entity}s, which have no place in a picture")
    several, rows = parts and cut.num_parts > 1, entity if entity in places else cut.entity
    panels = SetPanels(places if several else {rows: places[rows]}, shapes, num_before=int(several))
    axes, units = panels.axes(0), reader.info(name).units
    artist = panels.drawings[rows].draw(axes, _column(reader, read, name), of_cells=rows != entity)
    panels.figure.colorbar(artist, ax=axes, label=f"{name} ({units})" if units else name, shrink=0.8)
    axes.set_title(f"{os.path.basename(str(reader.path).rstrip('/'))}: {name}, sample {index}", fontsize=9, loc="left")
    if several:
        panels.draw(reader.store if isinstance(reader, StoreReader) else None, cut)
    if path is not None:
        save_picture(panels.figure, path, [reader.path])
    return panels.figure


def _chosen(reader: StoreReader | PointsReader, field: str | None) -> str:
    names: list[str] = [name for name in reader.fields if name.rpartition("/")[2] != "pos"]
    if field is not None:
        check_known("plot: no field", [field], reader.fields)
        return field
    if not names:
        raise ConfigError("plot: there is no field but the positions; name one that is read")
    of_rows = [name for name in names if reader.info(name).entity == reader.entity]
    of_sets = [name for name in names if reader.entity == JOINT and not is_relation(reader.info(name).entity)]
    return next(iter([*of_rows, *of_sets, *names]))


def _column(reader: StoreReader | PointsReader, read: list[LocalPart], name: str) -> FloatArray:
    entity, dim = reader.info(name).entity, reader.entity_dim(name)
    owned = [np.moveaxis(p.fields[name], dim, 0)[: p.index_maps[entity].num_owned] for p in read]
    rows = np.concatenate(owned).astype(np.float64)
    return rows.reshape(len(rows), -1)[:, 0] if rows.size else rows.reshape(len(rows))


def _positions(
    reader: StoreReader | PointsReader, read: list[LocalPart], cut: SamplePart
) -> tuple[Places, RawCells | None]:
    """Return the rows' coordinates, and the cells of a mesh whose rows are nodes."""
    if not isinstance(reader, StoreReader):
        if "pos" not in reader.fields:
            raise ConfigError("plot: the positions are not read; open the data with the field 'pos', too")
        points = np.concatenate([p.fields["pos"][: p.index_maps[cut.entity].num_owned] for p in read])
        return places_of(points.astype(np.float64), on_sphere=False), None
    places = places_in_store(reader.store, cut.index, cut.entity)
    return places, shapes_in_store(reader.store, cut.index, cut.entity)
