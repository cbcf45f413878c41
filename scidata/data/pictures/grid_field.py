"""A field of a gridded sample, with lines between the ranks' parts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scidata.core.types import AnyArray, FloatArray
from scidata.data.pictures.canvas import LEGEND_RANKS, new_figure, save_picture
from scidata.errors import ConfigError, check_known
from scidata.grids.partition import GridPartition
from scidata.grids.reader import GridReader
from scidata.sources.cf import role_of_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_CELLS = 1200  # along a dimension: a picture has no more pixels
_MAX_NUMBERS = 128


def draw_grid(
    reader: GridReader, index: int, field: str | None, isel: Mapping[str, int] | None, *, parts: bool, path: str | None
) -> Figure:
    """Draw a plane of a field of one whole sample, which this process reads; return the figure."""
    name = max(reader.fields, key=lambda each: len(reader.dims(each))) if field is None else field
    check_known("plot: no field", [name], reader.fields)
    dims, values = reader.dims(name), _whole(reader, index, name)
    plane = _plane(reader, dims, values.shape, isel or {})
    rest = {dim: (isel or {}).get(dim, 0) for dim in dims if dim not in plane}
    taken = values[tuple(_row(dim, rest, values.shape, dims) if dim in rest else slice(None) for dim in dims)]
    image = taken if taken.ndim == 2 else taken[None, :]
    vertical, horizontal = plane if len(plane) == 2 else (None, plane[0])
    edges = [_edges(reader, dim, size) for dim, size in zip((vertical, horizontal), image.shape, strict=True)]

    figure = new_figure(9.0, 9.0 * min(max(image.shape[0] / image.shape[1], 0.25), 1.2) + 0.8)
    axes, shift = _axes(figure, reader, vertical, horizontal, edges[1])
    steps = [max(1, -(-size // _MAX_CELLS)) for size in image.shape]
    rows, columns = (np.append(e[:-1:step], e[-1]) for e, step in zip(edges, steps, strict=True))
    shown = np.ma.masked_invalid(image[:: steps[0], :: steps[1]].astype(np.float64))
    mesh = axes.pcolormesh(columns - shift, rows, shown, rasterized=True)
    units = reader.layout(name).attributes.get("units")
    figure.colorbar(mesh, ax=axes, label=f"{name} ({units})" if units else name, shrink=0.8)
    if parts and reader.partition.num_parts > 1:
        _draw_parts(axes, reader, vertical, horizontal, edges[0], edges[1] - shift)
    at = ", ".join(f"{dim} {row}" for dim, row in rest.items())
    ranks = f" over {reader.partition.num_parts} ranks" if parts and reader.partition.num_parts > 1 else ""
    title = f"{os.path.basename(reader.paths[0].rstrip('/'))}: {name}, sample {index}{f', {at}' if at else ''}{ranks}"
    axes.set_title(title, fontsize=10, loc="left")
    if path is not None:
        save_picture(figure, path, reader.paths)
    return figure


def _whole(reader: GridReader, index: int, name: str) -> AnyArray:
    """Read a field of all ranks, as a reader of one part."""
    options = replace(reader.options, shard=None, bounds="even", weights=None, align=1, halo=0, periodic=())
    with closing(GridReader(reader.paths, options)) as alone:
        spec = alone.buffer_specs({})[name]
        values = np.empty(spec.shape, spec.dtype)
        alone.read_into(index, {name: values}, {})
        return values


def _plane(
    reader: GridReader, dims: tuple[str, ...], shape: tuple[int, ...], isel: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the drawn dimensions, vertical first."""
    check_known("plot: isel names dimension", isel, dims)
    sizes = {dim: size for dim, size in zip(dims, shape, strict=True) if dim not in isel}
    chosen = plane_of(reader.partition, sizes)
    if not chosen:
        raise ConfigError(f"plot: {dict(zip(dims, shape, strict=True))} has no dimension of several rows to draw")
    return chosen


def plane_of(partition: GridPartition, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Choose up to two dimensions of several rows, in their order: split ones first, then the last ones."""
    free = [dim for dim, size in sizes.items() if size > 1]
    chosen = [dim for dim in free if dim in partition.axis_of_dim][:2]
    chosen += [dim for dim in reversed(free) if dim not in chosen][: 2 - len(chosen)]
    return tuple(dim for dim in sizes if dim in chosen)


def ranks_of_plane(partition: GridPartition, dims: Collection[str | None]) -> list[tuple[int, dict[str, int]]]:
    """Return the ranks whose parts differ along some dims, the first along all other dims, and the place of each."""
    shown = {axis for dim, axis in partition.axis_of_dim.items() if dim in dims}
    every = ((rank, partition.coordinate(rank)) for rank in range(partition.num_parts))
    return [(rank, at) for rank, at in every if all(i == 0 for axis, i in at.items() if axis not in shown)]


def coordinate_of(reader: GridReader, dim: str | None) -> FloatArray | None:
    """Return the coordinate of each row; None if it is missing or not monotonic."""
    values = None if dim is None else reader.coordinate(dim)
    if values is None or len(values) < 2 or not np.issubdtype(values.dtype, np.number):
        return None
    steps = np.diff(values.astype(np.float64))
    is_ordered = np.isfinite(steps).all() and ((steps > 0).all() or (steps < 0).all())
    return values.astype(np.float64) if is_ordered else None


def label_of(reader: GridReader, dim: str) -> str:
    """Return the label of an axis: the coordinate and its units, or row numbers."""
    if coordinate_of(reader, dim) is None:
        return f"{dim} (row)"
    coordinate = reader.sources[0].arrays.get(dim)
    units = None if coordinate is None else coordinate.attributes.get("units")
    return f"{dim} ({units})" if units else dim


def _row(dim: str, rest: Mapping[str, int], shape: tuple[int, ...], dims: tuple[str, ...]) -> int:
    row, size = rest[dim], shape[dims.index(dim)]
    if not isinstance(row, int | np.integer) or not -size <= row < size:
        raise ConfigError(f"plot: isel of {dim!r}: {row!r} is no row of {size}")
    return int(row)


def _edges(reader: GridReader, dim: str | None, size: int) -> FloatArray:
    """Return the edges of cells along a dimension, ``(size + 1,)``: around its coordinate, else around row numbers."""
    centres = coordinate_of(reader, dim)
    if centres is None or len(centres) != size:
        return np.arange(size + 1.0)
    steps, middles = np.diff(centres), (centres[1:] + centres[:-1]) / 2
    edges = np.concatenate([[centres[0] - steps[0] / 2], middles, [centres[-1] + steps[-1] / 2]])
    return np.clip(edges, -90, 90) if dim is not None and role_of_name(dim) == "Y" and abs(edges).max() < 95 else edges


def _axes(
    figure: Figure, reader: GridReader, vertical: str | None, horizontal: str, columns: FloatArray
) -> tuple[Axes, float]:
    """Return axes, and the number subtracted from the horizontal coordinate on them."""
    is_map = vertical is not None and (role_of_name(vertical), role_of_name(horizontal)) == ("Y", "X")
    has_degrees = is_map and np.ptp(columns) <= 361 and reader.coordinate(horizontal) is not None
    if has_degrees and (found := map_axes(figure, columns.max())) is not None:
        return found
    axes = figure.add_subplot()
    axes.set_xlabel(label_of(reader, horizontal))
    if vertical is None:
        axes.set_yticks([])
    else:
        axes.set_ylabel(label_of(reader, vertical))
        if coordinate_of(reader, vertical) is None:
            axes.invert_yaxis()  # rows from above, as a matrix is written
    return axes, 0.0


def _draw_parts(
    axes: Axes, reader: GridReader, vertical: str | None, horizontal: str, rows: FloatArray, columns: FloatArray
) -> None:
    """Draw lines between parts, and the rank on each part."""
    from matplotlib.patheffects import withStroke

    partition = reader.partition
    few = partition.num_parts <= LEGEND_RANKS
    cased = [withStroke(linewidth=2.2, foreground="white")]
    style: dict[str, Any] = {"lw": 0.9, "path_effects": cased} if few else {"lw": 0.35, "alpha": 0.7}
    cuts = {
        dim: partition.bounds[dim] for dim in (vertical, horizontal) if dim is not None and dim in partition.axis_of_dim
    }
    for dim, bounds in cuts.items():
        line, edges = (axes.axhline, rows) if dim == vertical else (axes.axvline, columns)
        for bound in bounds[1:-1]:
            line(edges[int(bound)], color="black", **style)
    every = 1 if few or len(cuts) > 1 else -(-partition.num_parts // LEGEND_RANKS)  # only some thin stripes get numbers
    if partition.num_parts > _MAX_NUMBERS * every or not cuts:
        return
    for rank, at in ranks_of_plane(partition, cuts)[::every]:
        middle = [
            (edges[start] + edges[stop]) / 2
            for edges, (start, stop) in (
                (rows, partition.owned_rows(vertical, at) if vertical in cuts and vertical else (0, len(rows) - 1)),
                (columns, partition.owned_rows(horizontal, at) if horizontal in cuts else (0, len(columns) - 1)),
            )
        ]
        if every > 1:  # at the side, to cover the least
            place = 1 if vertical in cuts else 0
            low, high = (columns[0], columns[-1]) if place else (rows[0], rows[-1])
            middle[place] = low + 0.02 * (high - low)
        size = 11 if few else 7
        axes.text(middle[1], middle[0], str(rank), ha="center", va="center", fontsize=size, path_effects=cased)


def map_axes(figure: Figure, east: float) -> tuple[Axes, float] | None:
    """Return cartopy's axes up to ``east`` degrees, and their middle longitude; None without it. No downloads."""
    if importlib.util.find_spec("cartopy") is None:
        return None
    from cartopy.crs import PlateCarree

    centre = 180.0 if east > 180 + 1e-6 else 0.0
    axes = figure.add_subplot(projection=PlateCarree(central_longitude=centre))
    if _has_coastlines():
        axes.coastlines("110m", lw=0.6, color="0.3")
    lines = axes.gridlines(draw_labels=True, lw=0.3, color="0.6", alpha=0.5)
    lines.top_labels = lines.right_labels = False
    return axes, centre


def _has_coastlines() -> bool:
    from cartopy import config

    name = os.path.join("shapefiles", "natural_earth", "physical", "ne_110m_coastline.shp")
    folders = (config.get(key) for key in ("pre_existing_data_dir", "data_dir", "repo_data_dir"))
    return any(folder and os.path.isfile(os.path.join(folder, name)) for folder in map(str, folders))
