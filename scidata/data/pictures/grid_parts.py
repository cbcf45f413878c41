"""A picture of how a grid is cut: shards over the chunk grid, coloured by rank, halos hatched.

Needs matplotlib (extra ``plot``), which is imported when a picture is drawn and without any display.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray
from scidata.data.pictures.canvas import (
    LEGEND_RANKS,
    amplification_text,
    colours_of,
    load_matplotlib,
    new_figure,
    rank_handles,
    save_picture,
    text_handle,
)
from scidata.errors import ConfigError, OutputError, near_matches
from scidata.grids.partition import GridPartition, chunk_edges
from scidata.grids.reader import GridReader

_FORMATS = ("png", "pdf", "svg", "jpg")
_MAX_LINES = 100  # chunk lines closer than this would blacken the picture
_MAX_COVER = 0.35  # of a shard: wider drawn halos would hide the shards
_MIN_HALO = 0.008  # of the plane: a halo of 2 rows in 721 would be invisible


@dataclass(frozen=True, kw_only=True)
class PlotAxis:
    """One dimension of the picture.

    Attributes
    ----------
    dim
        Its name; None stands for a dimension that the data does not have.
    size
        Selected rows.
    chunk_edges
        Selected rows at which another chunk begins.
    values
        Coordinate of each selected row, ``(size,)``; None where there is none.
    units
        Of the coordinate.
    """

    dim: str | None
    size: int
    chunk_edges: IntArray
    values: npt.NDArray[Any] | None = None
    units: str | None = None

    @property
    def ascending(self) -> bool:
        """Whether the coordinate grows with the row."""
        return self.values is not None and len(self.values) > 1 and bool(self.values[-1] > self.values[0])


def plane_of(partition: GridPartition, dims: Sequence[str]) -> tuple[str | None, str | None]:
    """Choose the two dimensions to draw, vertical first: the sharded ones, filled up with the fastest varying."""
    chosen = [dim for dim in dims if dim in partition.axis_of_dim][:2]
    for dim in reversed(dims):
        if len(chosen) < 2 and dim not in chosen and partition.sizes[dim] > 1:
            chosen.append(dim)
    ordered = [dim for dim in dims if dim in chosen]
    if not ordered:
        return None, None
    return (None, ordered[0]) if len(ordered) == 1 else (ordered[0], ordered[1])


def check_picture(path: str, *, overwrite: bool = False) -> None:
    """Check arguments before the work is done.

    Raises
    ------
    ConfigError
        No picture format, or the file exists and ``overwrite`` is not given.
    MissingDependencyError
        matplotlib is not installed.
    """
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


def draw_partition(
    partition: GridPartition,
    vertical: PlotAxis,
    horizontal: PlotAxis,
    path: str,
    *,
    inputs: Sequence[str] = (),
    title: str = "",
    ratios: Sequence[float | None] = (),
    overall: float | None = None,
) -> None:
    """Draw the shards of every rank of a domain and write the picture.

    Parameters
    ----------
    vertical, horizontal
        The plane, from :func:`plane_of`. A sharded dimension outside it is drawn at its first part only.
    path
        File to write; its suffix is the format.
    inputs
        What is read, and must not be overwritten.
    ratios, overall
        Bytes fetched over bytes wanted, of each rank and of all.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    height, width = vertical.size, horizontal.size
    aspect = 0.12 if vertical.dim is None else min(max(height / width, 0.35), 1.6)
    legend = 1.9
    figure = new_figure(7.5 + legend, max(7.5 * aspect, 1.2) + 1.3)
    axes = figure.add_subplot()
    axes.set_xlim(0, width)
    axes.set_ylim((0, height) if vertical.ascending else (height, 0))
    if horizontal.values is not None and not horizontal.ascending and len(horizontal.values) > 1:
        axes.set_xlim(width, 0)
    axes.set_aspect("auto")

    ranks = _ranks_of_plane(partition, vertical.dim, horizontal.dim)
    colours = colours_of(len(ranks))
    few = len(ranks) <= LEGEND_RANKS
    for (rank, coordinate), colour in zip(ranks, colours, strict=True):
        box = [_owned(partition, axis, coordinate) for axis in (vertical, horizontal)]
        _fill(axes, box, colour, line=1.2 if few else 0.4)
        ratio = ratios[rank] if few and rank < len(ratios) else None
        _label(axes, box, str(rank) if ratio is None else f"{rank}  ({ratio:.2f})", (height, width), small=not few)
    # the halos of many ranks would cover everything: that of one says how wide they are
    chosen = range(len(ranks)) if few else [_middle(partition, (vertical, horizontal), ranks)]
    halo_note = "" if few else f"\nof rank {ranks[chosen[0]][0]} alone"
    halos_shown = not few or all(_leaves_room(partition, a) for a in (vertical, horizontal))
    widened = False
    for i in chosen if halos_shown else ():
        pieces, wide = _halo_boxes(partition, (vertical, horizontal), ranks[i][1])
        widened |= wide
        for piece in pieces:
            _hatch(axes, piece, colours[i])
    halo_note += "" if halos_shown and not widened else "\n(drawn wider)" if halos_shown else "\n(too narrow to draw)"
    notes = _chunk_lines(axes, vertical, horizontal)
    _ticks(axes.yaxis, axes.set_ylabel, vertical)
    _ticks(axes.xaxis, axes.set_xlabel, horizontal)
    axes.set_title(title, fontsize=10, loc="left")
    if text := amplification_text(ratios, overall):
        notes = [*notes, text]
    _legend(
        figure,
        partition,
        colours,
        notes,
        halo_note,
        any(len(a.chunk_edges) for a in (vertical, horizontal)),
    )
    save_picture(figure, path, inputs)


def draw_reader(
    reader: GridReader, path: str, *, ratios: Sequence[float | None] = (), overall: float | None = None
) -> None:
    """Draw the cut of a data set over the chunks of its first sharded field; see :func:`draw_partition`."""
    sharded = [n for n in reader.fields if set(reader.partition.axis_of_dim) <= set(reader.layout(n).dims)]
    layout = reader.layout((sharded or list(reader.fields))[0])
    dims = [dim for dim in layout.dims if dim not in reader.sample_dims]
    chunks = dict(zip(layout.dims, layout.chunks, strict=True))
    none = PlotAxis(dim=None, size=1, chunk_edges=np.empty(0, np.int64))

    def axis_of(dim: str | None) -> PlotAxis:
        if dim is None:
            return none
        coordinate = reader.sources[0].arrays.get(dim)
        units = None if coordinate is None else coordinate.attributes.get("units")
        return PlotAxis(
            dim=dim,
            size=reader.partition.sizes[dim],
            chunk_edges=chunk_edges(reader.partition.selected[dim], chunks[dim]),
            values=reader.coordinate(dim),
            units=None if units is None else str(units),
        )

    vertical, horizontal = map(axis_of, plane_of(reader.partition, dims))
    title = f"{os.path.basename(reader.paths[0].rstrip('/'))}: {layout.name} over {reader.partition.num_parts} ranks"
    draw_partition(
        reader.partition, vertical, horizontal, path, inputs=reader.paths, title=title, ratios=ratios, overall=overall
    )


def _ranks_of_plane(partition: GridPartition, *dims: str | None) -> list[tuple[int, dict[str, int]]]:
    """Ranks whose part differs within the plane, with their place along each axis."""
    shown = {axis for dim, axis in partition.axis_of_dim.items() if dim in dims}
    every = ((rank, partition.coordinate(rank)) for rank in range(partition.num_parts))
    return [(rank, at) for rank, at in every if all(i == 0 for axis, i in at.items() if axis not in shown)]


def _middle(partition: GridPartition, plane: Sequence[PlotAxis], ranks: Sequence[tuple[int, dict[str, int]]]) -> int:
    """Return which of the ranks lies nearest the middle of the plane."""

    def distance(place: int) -> float:
        boxes = [(_owned(partition, axis, ranks[place][1]), axis.size) for axis in plane]
        return float(sum(abs((start + stop) / 2 - size / 2) / size for (start, stop), size in boxes))

    return min(range(len(ranks)), key=distance)


def _owned(partition: GridPartition, axis: PlotAxis, coordinate: Mapping[str, int]) -> tuple[float, float]:
    return (0, axis.size) if axis.dim is None else partition.owned_rows(axis.dim, coordinate)


def _fill(axes: Any, box: Sequence[tuple[float, float]], colour: Any, *, line: float) -> None:
    from matplotlib.patches import Rectangle

    (top, bottom), (left, right) = box
    corner, size = (left, top), (right - left, bottom - top)
    axes.add_patch(Rectangle(corner, *size, facecolor=(*colour[:3], 0.5), edgecolor="none"))
    axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="0.15", lw=line, zorder=4))  # above the halos


def _leaves_room(partition: GridPartition, axis: PlotAxis) -> bool:
    """Say whether halos, widened to be seen, leave most of every shard free."""
    if axis.dim is None or axis.dim not in partition.halo:
        return True
    sizes = np.diff(partition.bounds[axis.dim])
    drawn = max(_MIN_HALO * axis.size, min(max(partition.halo[axis.dim]), axis.size))
    return bool(drawn <= _MAX_COVER * sizes[sizes > 0].min() or drawn <= max(partition.halo[axis.dim]))


def _hatch(axes: Any, box: Sequence[tuple[float, float]], colour: Any) -> None:
    from matplotlib.patches import Rectangle

    (top, bottom), (left, right) = box
    dark = tuple(0.75 * part for part in colour[:3])
    axes.add_patch(
        Rectangle(
            (left, top), right - left, bottom - top, facecolor=(1, 1, 1, 0.45), edgecolor=dark, hatch="////", lw=0.5
        )
    )


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
    """Return the boxes of a rank's halo, and whether some were widened to be seen."""
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


def _ticks(ticker: Any, set_label: Any, axis: PlotAxis) -> None:
    from matplotlib.ticker import MaxNLocator

    if axis.dim is None:
        ticker.set_ticks([])
        return
    if axis.values is None or not _is_monotonic(axis.values):
        ticker.set_major_locator(MaxNLocator(nbins=8, integer=True))
        set_label(f"{axis.dim} (row)")
        return
    # round values of the coordinate, wherever their rows lie; a row is drawn from its index to the next, so its
    # value belongs to the middle
    values, rows = axis.values.astype(np.float64), np.arange(axis.size) + 0.5
    low, high = sorted((values[0], values[-1]))
    ticks = [v for v in MaxNLocator(nbins=8, steps=[1, 1.5, 2, 3, 5, 10]).tick_values(low, high) if low <= v <= high]
    order = slice(None) if axis.ascending else slice(None, None, -1)
    ticker.set_ticks(np.interp(ticks, values[order], rows[order]), [f"{v:g}" for v in ticks])
    set_label(f"{axis.dim} ({axis.units})" if axis.units else axis.dim)


def _is_monotonic(values: npt.NDArray[Any]) -> bool:
    if not np.issubdtype(values.dtype, np.number) or len(values) < 2 or not np.all(np.isfinite(values)):
        return False
    steps = np.diff(values.astype(np.float64))
    return bool(np.all(steps > 0) or np.all(steps < 0))


def _legend(
    figure: Any,
    partition: GridPartition,
    colours: Sequence[Any],
    notes: Sequence[str],
    halo_note: str,
    has_edges: bool,
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    pale = [tuple(0.5 + 0.5 * part for part in colour[:3]) for colour in colours]  # as half transparent on white
    handles = rank_handles(pale, "0.15")
    if partition.halo:
        widths = ", ".join(f"{dim} {lo}:{hi}" for dim, (lo, hi) in partition.halo.items())
        whose = ", in the colour\nof its rank" if len(colours) <= LEGEND_RANKS else ""
        label = f"halo{whose}\n{widths}{halo_note}"
        handles.append(Patch(facecolor="white", edgecolor="0.3", hatch="////", label=label))
    if has_edges:
        handles.append(Line2D([], [], color="black", lw=0.8, ls=(0, (1, 2)), label="chunk edge"))
    handles += map(text_handle, notes)
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
