"""A picture of how a stored sample is cut: cells or points coloured by rank, ghosts ringed in their reader's colour.

In the plane as it is; on the sphere as longitude and latitude; other clouds of three coordinates in perspective. Needs
matplotlib (extra ``plot``), which is imported when a picture is drawn and without any display.
"""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scidata.core.bounds import owners_of
from scidata.core.types import FloatArray, IntArray
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
from scidata.data.pictures.drawing import (
    MAX_POINTS,
    TOWARDS,
    Drawing,
    SetPanels,
    number_parts,
    places_in_store,
    places_of_sets,
    shapes_in_store,
    stride,
)
from scidata.meshes.hetero import JOINT
from scidata.store.format.store import Store
from scidata.store.reading.part import SamplePart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_GHOSTS = 50_000
_MAX_EDGES = 60_000


def draw_sample(
    store: Store,
    cut: SamplePart,
    ghosts: Sequence[IntArray],
    path: str,
    *,
    ratios: Sequence[float | None] = (),
    overall: float | None = None,
) -> list[str]:
    """Draw the parts of a sample and write the picture.

    - ``ghosts``: for each rank the global ids of the rows that it has of others.
    - ``ratios``, ``overall``: bytes fetched over bytes wanted, of each rank and of all.

    Returns a note for each thing that was left out.
    """
    load_matplotlib()
    from matplotlib.lines import Line2D

    title = f"{os.path.basename(store.path.rstrip('/'))}: {store.sample(cut.index).name} over {cut.num_parts} ranks"
    reads = [text] if (text := amplification_text(ratios, overall)) else []
    if cut.entity == JOINT:  # a panel for each node set
        panels = SetPanels(places_of_sets(store, cut.index))
        notes = panels.draw(store, cut, reads)
        panels.figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        save_picture(panels.figure, path, [store.path])
        return notes
    places = places_in_store(store, cut.index, cut.entity)
    drawing = Drawing(places, shapes_in_store(store, cut.index, cut.entity))
    figure = new_figure(9.4, 7.5 if places.in_space else 7.5 * min(max(places.aspect, 0.3), 1.5) + 1.2)
    axes: Any = drawing.axes(figure, (1, 1, 1))
    axes.computed_zorder = False  # in space, the rings of ghosts would disappear among the rows
    colours, few = colours_of(cut.num_parts), cut.num_parts <= LEGEND_RANKS
    num_rows, num_cells = len(places.xy), store.sample(cut.index).counts.get("cell", 0)
    size = float(np.clip(1e5 / min(num_rows, MAX_POINTS), 0.5, 30))
    notes = [f"{drawing.left_out}: {cut.entity}s are shown"] if drawing.left_out else []
    thin = 0 if places.in_space or drawing.left_out else num_cells - len(np.unique(drawing.cells))
    if thin and cut.entity == "node":
        notes.append(f"{thin} of {num_cells} cells have no area in the plane: {cut.entity}s are shown")
    seen: IntArray | None = None  # rows that can be seen; None: all
    if len(drawing.cells) and not thin:
        notes += ["what is nearest the viewer is cut away"] if drawing.cut_away else []
        seen = np.unique(np.concatenate(list(drawing.corners))) if places.in_space else None
        fill = _pale(colours)[owners_of(cut.bounds["cell"], drawing.cells)]
        fill = fill * _light(drawing.polygons)[:, None] if places.in_space else fill
        drawing.fill(axes, fill, line=0.25 if len(drawing.cells) < 20_000 else 0.0)
    else:
        step = stride(num_rows, MAX_POINTS)
        rows = np.arange(0, num_rows, step)
        notes += _draw_edges(axes, store, cut, drawing, colours)
        drawing.scatter(axes, rows, s=size, c=_pale(colours)[owners_of(cut.bounds[cut.entity], rows)], lw=0, zorder=2)
        notes += [f"1 in {step} of {num_rows} {cut.entity}s is drawn"] if step > 1 else []
    shown, of_rank = _ghosts_shown(ghosts, seen)
    notes += _draw_ghosts(axes, drawing, shown, colours, size)
    if not places.in_space:
        number_parts(axes, places, cut.bounds[cut.entity], few=few)
    axes.set_title(title, fontsize=10, loc="left")
    mark = ", in the\ncolour of the rank\nthat needs it"
    if of_rank is not None:
        mark = f"s\nof rank {of_rank} alone,\nwhich has {len(ghosts[of_rank])}"
    label = f"ghost {cut.entity}{mark}"
    ring = Line2D([], [], label=label, ls="none", marker="o", mfc="none", mec="0.3", ms=5)
    marks = [ring] if any(map(len, shown)) else []
    add_legend(figure, _pale(colours), "0.3", *marks, notes=[*(textwrap.fill(note, 24) for note in notes), *reads])
    save_picture(figure, path, [store.path])
    return notes


def _ghosts_shown(ghosts: Sequence[IntArray], seen: IntArray | None) -> tuple[list[IntArray], int | None]:
    """Return the ghosts to ring: visible ones, and with many ranks only those of the rank with most."""
    visible = [rows if seen is None else np.intersect1d(rows, seen) for rows in ghosts]
    if len(ghosts) <= LEGEND_RANKS or not any(map(len, visible)):
        return visible, None
    most = max(range(len(visible)), key=lambda rank: len(visible[rank]))
    return [rows if rank == most else rows[:0] for rank, rows in enumerate(visible)], most


def _pale(colours: FloatArray) -> FloatArray:
    return 0.55 * colours + 0.45


def _light(polygons: Sequence[FloatArray]) -> FloatArray:
    """Return the brightness of faces, 0.75 to 1: highest for faces towards the viewer."""
    first = np.array([polygon[:3] for polygon in polygons])
    normal = np.cross(first[:, 1] - first[:, 0], first[:, 2] - first[:, 0])
    length = np.linalg.norm(normal, axis=1)
    return 0.75 + 0.25 * np.abs(normal @ TOWARDS) / np.where(length > 0, length, 1)


def _draw_edges(axes: Axes, store: Store, cut: SamplePart, drawing: Drawing, colours: Colours) -> list[str]:
    """Draw edges in the colour of their owner, except those that leave the picture at one side."""
    if not store.sample(cut.index).counts.get("edge", 0):
        return []
    indptr, src, places = store.read(cut.index, "csr/indptr"), store.read(cut.index, "csr/src"), drawing.places
    step = stride(len(src), _MAX_EDGES)
    rows = np.arange(0, len(src), step)
    dst = owners_of(indptr, rows)
    ends = np.stack([places.xy[src[rows]], places.xy[dst]], axis=1)
    inside = np.ones(len(rows), np.bool_)
    if places.start is not None:
        inside = np.abs(ends[:, 0, 0] - ends[:, 1, 0]) < 180
    elif store.manifest.period is not None:
        inside = (np.abs(ends[:, 0] - ends[:, 1]) < 0.5 * np.ptp(places.xy, axis=0)).all(axis=1)
    rank = owners_of(cut.bounds[cut.entity], dst[inside])
    drawing.lines(axes, ends[inside], colors=_pale(colours)[rank], zorder=1)
    return [f"1 in {step} of {len(src)} edges is drawn"] if step > 1 else []


def _draw_ghosts(axes: Axes, drawing: Drawing, ghosts: Sequence[IntArray], colours: Colours, size: float) -> list[str]:
    """Ring each ghost in the colour of the rank that reads it; ghosts of several ranks get concentric rings."""
    total = sum(map(len, ghosts))
    if not total:
        return []
    step = stride(total, _MAX_GHOSTS)
    rings = np.zeros(len(drawing.places.xy), np.int32)  # that each row has already
    ids = np.concatenate([np.asarray(rows, np.int64)[::step] for rows in ghosts])
    rank = np.repeat(np.arange(len(ghosts)), [len(rows[::step]) for rows in ghosts])
    order = np.zeros(len(ids), np.int32)
    for start, stop in itertools.pairwise(np.searchsorted(rank, np.arange(len(ghosts) + 1)).tolist()):
        order[start:stop] = rings[ids[start:stop]]
        rings[ids[start:stop]] += 1
    width = float(np.clip(2.2 * size, 2, 26))
    dark = 0.8 * colours if len(colours) <= LEGEND_RANKS else np.full_like(colours, 0.1)
    drawing.scatter(
        axes, ids, s=width * (1 + 0.7 * order) ** 2, facecolors="none", edgecolors=dark[rank],
        lw=0.7 if width > 8 else 0.45, zorder=3,
    )  # fmt: skip
    return [f"1 in {step} of {total} ghosts is drawn"] if step > 1 else []
