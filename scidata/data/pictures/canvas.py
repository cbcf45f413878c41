"""Shared by all pictures: a figure without a display, colours of ranks, legends."""

from __future__ import annotations

import colorsys
import io
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from scidata.core.apart import check_apart
from scidata.core.checks import optional_module
from scidata.core.types import FloatArray

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

Colours: TypeAlias = FloatArray

LEGEND_RANKS = 16  # with more ranks, single colours look alike: each group of ranks gets a hue
_GROUPS = 8


def load_matplotlib() -> None:
    """Raise MissingDependencyError if matplotlib is not installed."""
    optional_module("matplotlib", "pictures need matplotlib", "plot")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches; it needs no display, and a notebook shows it."""
    load_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    figure = Picture(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_picture(figure: Figure, path: str | os.PathLike[str], inputs: Iterable[str]) -> None:
    """Write a figure to a file, in the format of the suffix; a link of that name is replaced, not followed."""
    path = os.path.expanduser(path)
    check_apart(path, inputs, "the picture")
    if os.path.islink(path):
        os.unlink(path)
    figure.savefig(path)


def rank_groups(count: int) -> list[range]:
    """Group consecutive ranks that share a hue; few ranks get one hue each."""
    num = count if count <= LEGEND_RANKS else _GROUPS
    edges = [count * i // num for i in range(num + 1)]
    return [range(first, stop) for first, stop in itertools.pairwise(edges)]


def colours_of(count: int) -> Colours:
    """Return the colours of ``count`` ranks, ``(count, 3)``, 0 to 1; neighbours differ; many share hues by group."""
    from matplotlib import colormaps

    if count <= LEGEND_RANKS:
        # tab20 has pairs of a dark and a light tone: the dark ones first, so that few ranks differ most
        return np.array([colormaps["tab20"](tone)[:3] for tone in (*range(0, 20, 2), *range(1, 20, 2))][:count])
    colours = []
    for group, hue in zip(rank_groups(count), range(0, 2 * _GROUPS, 2), strict=True):
        base = colorsys.rgb_to_hls(*colormaps["tab20"](hue)[:3])
        for i in range(len(group)):
            step = int(f"{i % 8:03b}"[::-1], 2) / 7  # 0, 4/7, 2/7, 6/7, …: far from the rank before
            colours.append(colorsys.hls_to_rgb(base[0], 0.32 + 0.5 * step, base[2]))
    return np.array(colours)


def add_legend(figure: Figure, tones: Colours, edge: str, *marks: Artist, notes: Iterable[str] = ()) -> None:
    """Add a legend: each rank, or groups of many ranks, in their ``tones``; then other marks, and lines of text."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = []
    for group in rank_groups(len(tones)):
        name = f"rank {group[0]}" if len(group) == 1 else f"ranks {group[0]} to {group[-1]}"
        middle = tones[group[0] + (2 if len(group) > 2 else 0)]  # a tone in the middle of the group's
        handles.append(Patch(facecolor=tuple(middle), edgecolor=edge, label=name))
    handles += [*marks, *(Line2D([], [], lw=0, label=text) for text in notes)]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)


def amplification_text(ratios: Sequence[float | None], overall: float | None) -> str | None:
    """Return the legend's line on bytes fetched over bytes wanted; None if nothing is wanted."""
    known = [(ratio, rank) for rank, ratio in enumerate(ratios) if ratio is not None]
    if overall is None or not known:
        return None
    most, rank = max(known)
    return f"read amplification\n(fetched / wanted):\nall {overall:.2f}\nmost {most:.2f}, rank {rank}"
