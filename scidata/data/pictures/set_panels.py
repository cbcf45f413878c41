"""Graphs between several node sets in a picture: a panel for each set, its rows coloured by rank, and the edges cut."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from scidata.core.bounds import owners_of
from scidata.core.types import FloatArray, IntArray
from scidata.data.pictures.canvas import LEGEND_RANKS, add_legend, colours_of, new_figure
from scidata.data.pictures.drawing import Drawing, Places, number_parts, places_of, stride
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.hetero import JOINT
from scidata.store.format.node_sets import relations_of, sets_of
from scidata.store.format.store import Store
from scidata.store.reading.part import SamplePart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_EDGES = 20_000  # of a panel: more are a grey plane
_POLAR = 75.0  # latitude beyond which a line between two longitudes is nothing like the edge
_WIDE = 0.75  # panels that are flatter than that lie below each other, and so are larger


def places_of_sets(store: Store, index: int) -> dict[str, Places]:
    """Return where the rows of each set are drawn, all in the same frame.

    Raises
    ------
    ConfigError
        A set has no positions, or has rows of other coordinates; there are no rows.
    """
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
    """A figure with a panel for each set, and ``num_before`` others of the same size before them.

    A mesh, a cloud or a graph of one set has one; of a mesh, ``shapes`` are the cells.
    """

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
        """Draw the rows of each set by rank, the edges that end there and begin in another part, and a legend.

        ``said`` are more lines of the legend. Return a note for each thing that was left out.
        """
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
        """Return the ends of edges to a set from other parts, ``(num, 2, coordinates)``, and how many there are.

        Of many some, and on a map those that can be drawn there.
        """
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
            every = every[(across < 180) & ~(polar & (across > 30))]  # those that leave the map, or go around a pole
        return every[:: stride(len(every), _MAX_EDGES)], num_cut, num_edges
