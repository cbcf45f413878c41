"""A picture of how a stored sample is cut: cells or points coloured by rank, ghosts ringed in their reader's colour.

In the plane as it is; on the sphere as longitude and latitude; other clouds of three coordinates in perspective. Needs
matplotlib (extra ``plot``), which is imported when a picture is drawn and without any display.
"""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.cli.commands.plot_grid import LEGEND_RANKS, colours_of, load_matplotlib, new_figure, rank_handles
from scidata.core.bounds import owners_of
from scidata.core.types import IntArray
from scidata.errors import ConfigError
from scidata.store.format.store import Store
from scidata.store.reading.part import SamplePart

MAX_POINTS = 150_000  # more cannot be told apart at this size, and take minutes to draw as vectors
_MAX_GHOSTS = 50_000
_MAX_CELLS = 60_000
_SHELL = 0.01  # of the radius: points in space that lie this close to a sphere about 0 are drawn as longitude, latitude
# corners of the VTK cell types that have an area, in order around the cell; a polygon (7) has all of its own
_CORNERS = {5: (0, 1, 2), 8: (0, 1, 3, 2), 9: (0, 1, 2, 3), 22: (0, 1, 2), 23: (0, 1, 2, 3), 28: (0, 1, 2, 3)}
_CORNERS |= {34: (0, 1, 2)}
_POLYGON = 7
_EPS = 1e-6  # degrees
_MAX_EDGES = 60_000


@dataclass(frozen=True, kw_only=True, eq=False)
class _Places:
    """Coordinates to draw, ``(N, 2 | 3)``, and what they are."""

    xy: npt.NDArray[np.float64]
    labels: tuple[str, ...]
    start: float | None = None  # first longitude of the picture, where it goes around the sphere

    @property
    def in_space(self) -> bool:
        return len(self.labels) == 3


def draw_sample(store: Store, cut: SamplePart, ghosts: Sequence[IntArray], path: str) -> list[str]:
    """Draw the parts of a sample and write the picture.

    Parameters
    ----------
    cut
        From :meth:`scidata.store.reading.reader.StoreReader.partition_of`.
    ghosts
        For each rank the global ids of the rows that it has of others.
    path
        File to write; its suffix is the format.

    Returns
    -------
    notes
        What was left out.

    Raises
    ------
    ConfigError
        The store has no positions.
    MissingDependencyError
        matplotlib is not installed.
    """
    load_matplotlib()
    places = _places(store, cut.index, cut.entity)
    bounds, num_ranks = cut.bounds[cut.entity], cut.num_parts
    colours = np.array([colour[:3] for colour in colours_of(num_ranks)], np.float64)
    aspect = min(max(float(np.ptp(places.xy[:, 1]) / max(np.ptp(places.xy[:, 0]), 1e-300)), 0.3), 1.5)
    figure = new_figure(9.4, 7.5 if places.in_space else 7.5 * aspect + 1.2)
    axes: Any = figure.add_subplot(projection="3d" if places.in_space else None)
    axes.computed_zorder = False  # in space, the rings of ghosts would disappear among the rows
    notes: list[str] = []
    drew_cells = not places.in_space and _draw_cells(axes, store, cut, places, colours, notes)
    num_rows = len(places.xy)
    size = float(np.clip(1e5 / min(num_rows, MAX_POINTS), 0.5, 30))
    if not drew_cells:
        step = _step(num_rows, MAX_POINTS)
        rows = np.arange(0, num_rows, step)
        notes += _draw_edges(axes, store, cut, places, colours)
        owner = owners_of(bounds, rows)
        axes.scatter(
            *places.xy[rows].T, s=size, c=_pale(colours)[owner], lw=0, rasterized=True, zorder=2, **_flat(places)
        )
        if step > 1:
            notes.append(f"1 in {step} of {num_rows} {cut.entity}s is drawn")
    notes += _draw_ghosts(axes, places, ghosts, colours, size)
    _frame(axes, places)
    name = store.sample(cut.index).name
    axes.set_title(
        f"{os.path.basename(store.path.rstrip('/'))}: {name} over {num_ranks} ranks", fontsize=10, loc="left"
    )
    _legend(figure, axes, colours, notes, entity=cut.entity, any_ghosts=any(map(len, ghosts)))
    figure.savefig(path)
    return notes


def _flat(places: _Places) -> dict[str, bool]:
    """Keep colours as they are also in space, where matplotlib fades them with distance."""
    return {"depthshade": False} if places.in_space else {}


def _pale(colours: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return lighter colours, on which the rings of ghosts stand out."""
    return 0.55 * colours + 0.45


def _step(num: int, most: int) -> int:
    """Return the stride that keeps at most ``most``: along the curve it thins everywhere alike."""
    return max(1, -(-num // most))


def _places(store: Store, index: int, entity: str) -> _Places:
    info = store.sample(index)
    if f"{entity}/pos" not in info.arrays:
        raise ConfigError(f"{store.path}: sample {index} has no positions to draw; leave out --plot")
    points = store.read(index, f"{entity}/pos").astype(np.float64)
    if not len(points):
        raise ConfigError(f"{store.path}: sample {index} is empty: there is nothing to draw")
    if info.on_sphere:
        return _around_sphere(points)
    if points.shape[1] == 3:
        radius = np.linalg.norm(points, axis=1)
        if np.ptp(radius) <= _SHELL * radius.max() and bool((np.abs(points.mean(axis=0)) < 0.5 * radius.max()).all()):
            lat = np.arcsin(np.clip(points[:, 2] / radius, -1, 1))
            return _around_sphere(np.rad2deg(np.stack([np.arctan2(points[:, 1], points[:, 0]), lat], axis=1)))
        if np.ptp(points[:, 2]) == 0:
            points = points[:, :2]
    return _Places(xy=points, labels=("x", "y", "z")[: points.shape[1]])


def _around_sphere(lon_lat: npt.NDArray[np.float64]) -> _Places:
    """Bring longitudes into one turn, from 0 or -180 on, unless they span a part of one only."""
    lon, lat = lon_lat[:, 0], lon_lat[:, 1]
    labels = ("longitude (°)", "latitude (°)")
    if np.ptp(lon) <= 180:
        return _Places(xy=lon_lat, labels=labels)
    start = 0.0 if lon.min() >= -_EPS else -180.0
    turned = (lon - start + _EPS) % 360 - _EPS + start  # what rounding left just below a full turn counts as 0
    return _Places(xy=np.stack([turned, lat], axis=1), labels=labels, start=start)


def _draw_cells(
    axes: Any, store: Store, cut: SamplePart, places: _Places, colours: npt.NDArray[np.float64], notes: list[str]
) -> bool:
    """Fill the cells of a flat mesh with the colour of their owner; say whether they were drawn."""
    from matplotlib.collections import PolyCollection

    info = store.sample(cut.index)
    num_cells = info.counts.get("cell", 0)
    if not num_cells or cut.entity == "cell":
        return False
    if num_cells > _MAX_CELLS:
        notes.append(f"{num_cells} cells are too many to draw: their {cut.entity}s are shown")
        return False
    corners, cells = _outlines(store, cut.index)
    if not len(cells) or len(cells) < num_cells:
        notes.append(
            f"{num_cells - len(cells)} of {num_cells} cells have no area in the plane: {cut.entity}s are shown"
        )
        return False
    polygons = [places.xy[ids] for ids in corners]
    if places.start is not None:
        polygons, cells = _unrolled(polygons, cells, places.start)
    rank = owners_of(cut.bounds["cell"], cells)
    line = 0.25 if num_cells < 20_000 else 0.0
    fill = _pale(colours)[rank]
    axes.add_collection(
        PolyCollection(polygons, facecolors=fill, edgecolors="white" if line else fill, lw=line or 0.1, rasterized=True)
    )
    return True


def _outlines(store: Store, index: int) -> tuple[list[IntArray], IntArray]:
    """Return the corners of each cell that has an area in the plane, in order around it, and which cells these are."""
    offsets, types = store.read(index, "cell/offsets").astype(np.int64), store.read(index, "cell/type")
    nodes = store.read(index, "cell/connectivity").astype(np.int64)
    outlines: list[IntArray] = []
    found: list[IntArray] = []
    for kind in np.unique(types).tolist():
        cells = np.flatnonzero(types == kind)
        if kind == _POLYGON:
            outlines += [nodes[offsets[i] : offsets[i + 1]] for i in cells]
        elif kind in _CORNERS:
            outlines += list(nodes[offsets[cells][:, None] + np.array(_CORNERS[kind])])
        else:
            continue
        found.append(cells)
    return outlines, np.concatenate(found) if found else np.empty(0, np.int64)


def _unrolled(
    polygons: list[npt.NDArray[np.float64]], cells: IntArray, start: float
) -> tuple[list[npt.NDArray[np.float64]], IntArray]:
    """Unroll cells of the sphere: at a pole up to its line, and across the first meridian at both sides of the map."""
    made, kept = [], []
    for polygon, cell in zip(polygons, cells.tolist(), strict=True):
        flat = _around_pole(_open_pole(polygon))
        lon = flat[:, 0]
        shifts = [0.0]
        shifts += [360.0] if lon.min() < start - _EPS else []
        shifts += [-360.0] if lon.max() > start + 360 + _EPS else []
        for shift in shifts:
            made.append(np.stack([lon + shift, flat[:, 1]], axis=1))
            kept.append(cell)
    return made, np.array(kept, np.int64)


def _around_pole(polygon: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Make longitudes follow each other without jumps; a cell that goes around a pole is closed along its line."""
    lon, lat = polygon.T
    steps = (np.diff(lon, append=lon[:1]) + 180) % 360 - 180
    path = lon[0] + np.concatenate([[0.0], np.cumsum(steps)])
    if abs(path[-1] - path[0]) < 180:
        return np.stack([path[:-1], lat], axis=1)
    pole = float(np.copysign(90.0, lat.mean()))
    closed = np.concatenate([lat, [lat[0], pole, pole]])
    return np.stack([np.append(path, [path[-1], path[0]]), closed], axis=1)


def _open_pole(polygon: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Give a corner at a pole, whose longitude means nothing, those of both its neighbours."""
    at = np.flatnonzero(np.abs(polygon[:, 1]) > 90 - _EPS)
    if len(at) != 1 or len(polygon) < 3:
        return polygon
    turned = np.roll(polygon, -int(at[0]), axis=0)
    latitude = turned[0, 1]
    ends = np.array([[turned[-1, 0], latitude], [turned[1, 0], latitude]])
    return np.concatenate([ends, turned[1:]])


def _draw_edges(
    axes: Any, store: Store, cut: SamplePart, places: _Places, colours: npt.NDArray[np.float64]
) -> list[str]:
    """Draw edges in the colour of the rank that owns them, but for those that leave the picture at one side."""
    info = store.sample(cut.index)
    if "edge" not in info.counts or not info.counts["edge"]:
        return []
    from matplotlib.collections import LineCollection
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    indptr, src = store.read(cut.index, "csr/indptr"), store.read(cut.index, "csr/src")
    step = _step(len(src), _MAX_EDGES)
    rows = np.arange(0, len(src), step)
    dst = owners_of(indptr, rows)
    ends = np.stack([places.xy[src[rows]], places.xy[dst]], axis=1)
    inside = np.ones(len(rows), np.bool_)
    if places.start is not None:
        inside = np.abs(ends[:, 0, 0] - ends[:, 1, 0]) < 180
    elif store.manifest.period is not None:
        inside = (np.abs(ends[:, 0] - ends[:, 1]) < 0.5 * np.ptp(places.xy, axis=0)).all(axis=1)
    rank = owners_of(cut.bounds[cut.entity], dst[inside])
    lines: Any = Line3DCollection if places.in_space else LineCollection
    axes.add_collection(lines(ends[inside], colors=_pale(colours)[rank], lw=0.4, rasterized=True, zorder=1))
    return [f"1 in {step} of {len(src)} edges is drawn"] if step > 1 else []


def _draw_ghosts(
    axes: Any,
    places: _Places,
    ghosts: Sequence[IntArray],
    colours: npt.NDArray[np.float64],
    size: float,
) -> list[str]:
    """Ring each ghost in the colour of the rank that has it; those of several ranks get one ring outside the other.

    Of many ranks, whose colours are too like their neighbours', all rings are dark.
    """
    total = sum(map(len, ghosts))
    if not total:
        return []
    step = _step(total, _MAX_GHOSTS)
    rings = np.zeros(len(places.xy), np.int32)  # that each row has already
    ids = np.concatenate([np.asarray(rows, np.int64)[::step] for rows in ghosts])
    rank = np.repeat(np.arange(len(ghosts)), [len(rows[::step]) for rows in ghosts])
    order = np.zeros(len(ids), np.int32)
    for start, stop in itertools.pairwise(np.searchsorted(rank, np.arange(len(ghosts) + 1)).tolist()):
        order[start:stop] = rings[ids[start:stop]]
        rings[ids[start:stop]] += 1
    width = float(np.clip(2.2 * size, 2, 26))
    dark = 0.8 * colours if len(colours) <= LEGEND_RANKS else np.full_like(colours, 0.15)
    axes.scatter(
        *places.xy[ids].T,
        s=width * (1 + 0.7 * order) ** 2,
        facecolors="none",
        edgecolors=dark[rank],
        lw=0.7 if width > 8 else 0.45,
        rasterized=True,
        zorder=3,
        **_flat(places),
    )
    return [f"1 in {step} of {total} ghosts is drawn"] if step > 1 else []


def _frame(axes: Any, places: _Places) -> None:
    axes.set_xlabel(places.labels[0])
    axes.set_ylabel(places.labels[1])
    low, high = places.xy.min(axis=0), places.xy.max(axis=0)
    if places.in_space:
        axes.set_zlabel(places.labels[2])
        axes.set_box_aspect(np.maximum(high - low, 0.02 * (high - low).max() or 1.0))
        return
    axes.set_aspect("equal")
    if places.start is None:
        margin = 0.02 * (high - low)
        axes.set(xlim=(low[0] - margin[0], high[0] + margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
        return
    from matplotlib.ticker import MultipleLocator

    axes.set(xlim=(places.start, places.start + 360), ylim=(-90, 90) if high[1] - low[1] > 120 else (low[1], high[1]))
    axes.xaxis.set_major_locator(MultipleLocator(30))
    axes.yaxis.set_major_locator(MultipleLocator(30 if high[1] - low[1] > 60 else 10))


def _legend(
    figure: Any,
    axes: Any,
    colours: npt.NDArray[np.float64],
    notes: Sequence[str],
    *,
    entity: str,
    any_ghosts: bool,
) -> None:
    from matplotlib.lines import Line2D

    ranks, shown = range(len(colours)), list(map(tuple, _pale(colours).tolist()))
    handles = rank_handles(figure, axes, ranks, shown, "0.3", pad=0.01, fraction=0.04, shrink=0.8)
    if any_ghosts:
        whose = ", in the\ncolour of the rank\nthat needs it" if handles else "\nof some rank"
        label = f"ghost {entity}{whose}"
        handles.append(
            Line2D(
                [], [], label=label, marker="o", markerfacecolor="none", markeredgecolor="0.3", ls="none", markersize=5
            )
        )
    handles += [Line2D([], [], lw=0, label=textwrap.fill(note, 24)) for note in notes]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
