"""A picture of how a grid is cut: shards over the chunk grid, coloured by rank, halos hatched.

Needs matplotlib (extra ``plot``), which is imported when a picture is drawn and without any display.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scidata.core.types import IntArray
from scidata.data.pictures.canvas import (
    LEGEND_RANKS,
    Colours,
    add_legend,
    amplification_text,
    colours_of,
    load_matplotlib,
    new_figure,
    save_picture,
)
from scidata.data.pictures.grid_field import coordinate_of, label_of, plane_of, ranks_of_plane
from scidata.errors import ConfigError, OutputError, near_matches
from scidata.grids.partition import GridPartition, chunk_edges
from scidata.grids.reader import GridReader

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_FORMATS = ("png", "pdf", "svg", "jpg")
_MAX_LINES = 100  # chunk lines closer than this would blacken the picture
_MAX_COVER = 0.35  # of a shard: wider drawn halos would hide the shards
_MIN_HALO = 0.008  # of the plane: a halo of 2 rows in 721 would be invisible


@dataclass(frozen=True, kw_only=True, eq=False)
class PlotAxis:
    """One dimension of the picture."""

    dim: str | None  # None: a dimension missing in the data
    size: int
    chunk_edges: IntArray  # rows at which another chunk begins


def check_picture(path: str, *, overwrite: bool = False) -> None:
    """Raise if a picture cannot be written, before any work: check its format, its file and matplotlib."""
    suffix = os.path.splitext(path)[1].lstrip(".").lower()
    if suffix not in _FORMATS:
        hint = near_matches(suffix, _FORMATS, listed=False)
        raise ConfigError(f"{path}: a picture ends in {', '.join('.' + f for f in _FORMATS)}{hint}")
    if os.path.exists(path) and not overwrite:
        raise OutputError(f"{path}: exists; --overwrite replaces it")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise OutputError(f"{path}: there is no folder {folder}")
    load_matplotlib()


def draw_reader(
    reader: GridReader, path: str, *, ratios: Sequence[float | None] = (), overall: float | None = None
) -> None:
    """Draw the parts of all ranks of a domain, over the chunks of the first sharded field, and write the picture.

    A sharded dimension outside the plane is drawn at its first part only. ``ratios`` and ``overall`` are bytes fetched
    over bytes wanted, of each rank and of all.
    """
    partition = reader.partition
    sharded = [n for n in reader.fields if set(partition.axis_of_dim) <= set(reader.layout(n).dims)]
    layout = reader.layout((sharded or list(reader.fields))[0])
    chunks = {dim: n for dim, n in zip(layout.dims, layout.chunks, strict=True) if dim not in reader.sample_dims}
    plane = [
        PlotAxis(dim=dim, size=partition.sizes[dim], chunk_edges=chunk_edges(partition.selected[dim], chunks[dim]))
        for dim in plane_of(partition, {dim: partition.sizes[dim] for dim in chunks}) or list(chunks)[-1:]
    ]
    none = PlotAxis(dim=None, size=1, chunk_edges=np.empty(0, np.int64))
    vertical, horizontal = plane = [none] * (2 - len(plane)) + plane
    height, width = vertical.size, horizontal.size
    aspect = 0.12 if vertical.dim is None else min(max(height / width, 0.35), 1.6)
    figure = new_figure(9.4, max(7.5 * aspect, 1.2) + 1.3)
    axes = figure.add_subplot()
    axes.set(xlim=(0, width), ylim=(height, 0))
    ranks = ranks_of_plane(partition, (vertical.dim, horizontal.dim))
    colours, few = colours_of(len(ranks)), len(ranks) <= LEGEND_RANKS
    for (rank, coordinate), colour in zip(ranks, colours, strict=True):
        box = [_owned(partition, axis, coordinate) for axis in plane]
        _add_box(axes, box, facecolor=(*colour, 0.5), edgecolor="none")
        _add_box(axes, box, fill=False, edgecolor="0.15", lw=1.2 if few else 0.4, zorder=4)  # above the halos
        ratio = ratios[rank] if few and rank < len(ratios) else None
        _label(axes, box, str(rank) if ratio is None else f"{rank}  ({ratio:.2f})", (height, width), small=not few)
    notes = _chunk_lines(axes, vertical, horizontal)
    _ticks(axes.yaxis, reader, vertical)
    _ticks(axes.xaxis, reader, horizontal)
    title = f"{os.path.basename(reader.paths[0].rstrip('/'))}: {layout.name} over {partition.num_parts} ranks"
    axes.set_title(title, fontsize=10, loc="left")
    if text := amplification_text(ratios, overall):
        notes.append(text)
    marks = _draw_halos(axes, partition, plane, ranks, colours)
    if any(len(axis.chunk_edges) for axis in plane):
        from matplotlib.lines import Line2D

        marks.append(Line2D([], [], color="black", lw=0.8, ls=(0, (1, 2)), label="chunk edge"))
    add_legend(figure, 0.5 + 0.5 * colours, "0.15", *marks, notes=notes)  # as half transparent on white
    save_picture(figure, path, reader.paths)


def _owned(partition: GridPartition, axis: PlotAxis, coordinate: Mapping[str, int]) -> tuple[float, float]:
    return (0, axis.size) if axis.dim is None else partition.owned_rows(axis.dim, coordinate)


def _add_box(axes: Axes, box: Sequence[tuple[float, float]], **style: Any) -> None:
    from matplotlib.patches import Rectangle

    (top, bottom), (left, right) = box
    axes.add_patch(Rectangle((left, top), right - left, bottom - top, **style))


def _draw_halos(
    axes: Axes,
    partition: GridPartition,
    plane: Sequence[PlotAxis],
    ranks: Sequence[tuple[int, Mapping[str, int]]],
    colours: Colours,
) -> list[Artist]:
    """Hatch each rank's halo, or with many ranks only that of one in the middle; return the legend's mark."""
    from matplotlib.patches import Patch

    if not partition.halo:
        return []
    few, chosen, note = len(ranks) <= LEGEND_RANKS, range(len(ranks)), ", in the colour\nof its rank"
    if not few:  # all halos would cover the picture; one shows their width
        middle = _middle(partition, plane, [at for _, at in ranks])
        chosen = range(middle, middle + 1)
    widened, are_shown = False, not few or all(_leaves_room(partition, axis) for axis in plane)
    for i in chosen if are_shown else ():
        boxes, wide = _halo_boxes(partition, plane, ranks[i][1])
        widened |= wide
        for box in boxes:
            dark = tuple(0.75 * colours[i])
            _add_box(axes, box, facecolor=(1, 1, 1, 0.45), edgecolor=dark, hatch="////", lw=0.5)
    widths = ", ".join(f"{dim} {low}:{high}" for dim, (low, high) in partition.halo.items())
    label = f"halo{note if few else ''}\n{widths}" + ("" if few else f"\nof rank {ranks[chosen[0]][0]} alone")
    label += "\n(too narrow to draw)" if not are_shown else "\n(drawn wider)" if widened else ""
    return [Patch(facecolor="white", edgecolor="0.3", hatch="////", label=label)]


def _middle(partition: GridPartition, plane: Sequence[PlotAxis], places: Sequence[Mapping[str, int]]) -> int:
    """Return the rank that lies nearest the middle of the plane."""

    def distance(number: int) -> float:
        boxes = [(_owned(partition, axis, places[number]), axis.size) for axis in plane]
        return float(sum(abs((start + stop) / 2 - size / 2) / size for (start, stop), size in boxes))

    return min(range(len(places)), key=distance)


def _leaves_room(partition: GridPartition, axis: PlotAxis) -> bool:
    """Return True if halos, widened to be visible, leave most of every shard free."""
    if axis.dim is None or axis.dim not in partition.halo:
        return True
    sizes = np.diff(partition.bounds[axis.dim])
    drawn = max(_MIN_HALO * axis.size, min(max(partition.halo[axis.dim]), axis.size))
    return bool(drawn <= _MAX_COVER * sizes[sizes > 0].min() or drawn <= max(partition.halo[axis.dim]))


def _label(axes: Any, box: Sequence[tuple[float, float]], text: str, plane: tuple[int, int], *, small: bool) -> None:
    (top, bottom), (left, right) = box
    # a figure of 7 by about 5 inches: leave out numbers that would not fit their shard
    if (bottom - top) / plane[0] < 0.028 or (right - left) / plane[1] < 0.013 * max(2, len(text)):
        return
    size = 7 if small else 11
    axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=size, color="0.1")


def _halo_boxes(
    partition: GridPartition, plane: Sequence[PlotAxis], coordinate: Mapping[str, int]
) -> tuple[list[list[tuple[float, float]]], bool]:
    """Return the boxes of a rank's halo, and whether some were widened to be visible."""
    choices, widened = [], False
    for axis in plane:
        owned = _owned(partition, axis, coordinate)
        runs, wide = _halo_runs(partition, axis, coordinate)
        widened |= wide
        choices.append([(owned, True), *((run, False) for run in runs)])
    boxes = [[run for run, _ in pair] for pair in itertools.product(*choices) if not all(own for _, own in pair)]
    return [box for box in boxes if all(stop > start for start, stop in box)], widened


def _halo_runs(
    partition: GridPartition, axis: PlotAxis, coordinate: Mapping[str, int]
) -> tuple[list[tuple[float, float]], bool]:
    if axis.dim is None or axis.dim not in partition.halo:
        return [], False
    below, above = partition.halo_rows(axis.dim, coordinate)
    start, stop = partition.owned_rows(axis.dim, coordinate)
    least = _MIN_HALO * axis.size
    runs: list[tuple[float, float]] = []
    widened = False
    for first, count, upward in ((start - below, below, False), (stop, above, True)):
        rows = np.arange(first, first + count) % axis.size
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):  # where it wraps
            if not len(run):
                continue
            low, high = float(run[0]), float(run[-1] + 1)
            if high - low < least:  # widen away from the shard that it touches
                widened = True
                low, high = (low, low + least) if upward else (high - least, high)
            runs.append((max(0.0, low), min(float(axis.size), high)))
    return runs, widened


def _chunk_lines(axes: Any, vertical: PlotAxis, horizontal: PlotAxis) -> list[str]:
    """Draw the chunk grid; return the reason if it could not be drawn."""
    notes = []
    for axis, line in ((vertical, axes.axhline), (horizontal, axes.axvline)):
        if len(axis.chunk_edges) > _MAX_LINES:
            notes.append(f"{axis.dim}: {len(axis.chunk_edges) + 1} chunks,\ntoo many to draw")
            continue
        for edge in axis.chunk_edges:
            line(edge, color="black", lw=0.6, ls=(0, (1, 2)), zorder=3)
    return notes


def _ticks(ticker: Any, reader: GridReader, axis: PlotAxis) -> None:
    """Label an axis of rows by round values of the coordinate, or by row numbers."""
    from matplotlib.ticker import MaxNLocator

    if axis.dim is None:
        ticker.set_ticks([])
        return
    ticker.axes.set(**{f"{ticker.axis_name}label": label_of(reader, axis.dim)})
    values = coordinate_of(reader, axis.dim)
    if values is None:
        ticker.set_major_locator(MaxNLocator(nbins=8, integer=True))
        return
    low, high = sorted((values[0], values[-1]))
    ticks = [v for v in MaxNLocator(nbins=8, steps=[1, 1.5, 2, 3, 5, 10]).tick_values(low, high) if low <= v <= high]
    rises = bool(values[-1] > values[0])
    order, rows = slice(None, None, 1 if rises else -1), np.arange(axis.size) + 0.5  # the middle of each row
    ticker.set_ticks(np.interp(ticks, values[order], rows[order]), [f"{v:g}" for v in ticks])
    ticker.set_inverted(not rises)
