"""Draws the pictures of the pages from the library's own arithmetic: ``python docs/pictures.py FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from scidata.core.bounds import chunk_bounds, even_bounds, halo_widths, weighted_bounds
from scidata.meshes.order.curve import hilbert_keys

OF_RANK = ["#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860", "#da8bc3", "#8c8c8c"]
INK, FAINT = "#333333", "#bbbbbb"


def draw_all(folder: Path) -> None:
    """Write all pictures as SVG; those that are there are replaced."""
    folder.mkdir(exist_ok=True)
    mpl.rcParams |= {"font.size": 9, "svg.hashsalt": "scidata", "svg.fonttype": "none", "text.color": INK}
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight", facecolor="white")


def _axes(figure: Figure, *place: Any, x: tuple[float, float], y: tuple[float, float]) -> Any:
    axes = figure.add_subplot(*place)
    axes.set(xlim=x, ylim=y, aspect="equal")
    axes.axis("off")
    return axes


def _box(axes: Any, x: float, y: float, width: float, height: float, colour: str, **options: Any) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", **options))


def draw_mesh() -> Figure:
    """2 dp × 3 domain: samples, and which rank has which part."""
    figure = Figure(figsize=(6, 3.1))
    axes = _axes(figure, x=(-1.2, 9), y=(-0.3, 4.4))
    for dp in range(2):
        axes.text(4.4 * dp + 2, 3.75, f"dp {dp}: sample {'07'[dp]}", ha="center")
        for part in range(3):
            rank = 3 * dp + part
            _box(axes, 4.4 * dp, 2.4 - 1.2 * part, 4, 1.2, OF_RANK[part], alpha=0.75, linewidth=2)
            axes.text(4.4 * dp + 2, 3.0 - 1.2 * part, f"rank {rank}", ha="center", va="center", color="white")
    axes.annotate("", xy=(-0.35, 0), xytext=(-0.35, 3.6), arrowprops={"arrowstyle": "->", "color": INK})
    axes.text(-0.6, 1.8, "domain", rotation=90, ha="center", va="center")
    axes.annotate("", xy=(8.6, 4.25), xytext=(0, 4.25), arrowprops={"arrowstyle": "->", "color": INK})
    axes.text(-0.35, 4.25, "dp", ha="center", va="center")
    return figure


def draw_bounds() -> Figure:
    """Four ways to cut 20 rows in chunks of 8 over three ranks."""
    rows, parts = 20, 3
    ways = {
        'bounds="even"': even_bounds(rows, parts),
        'bounds="chunk"': chunk_bounds(rows, parts, edges=[0, 8, 16]),
        "align=5": even_bounds(rows, parts, align=5),
        "weights=": weighted_bounds(np.linspace(1, 4, rows), parts),
    }
    figure = Figure(figsize=(6.4, 2.4))
    axes = _axes(figure, x=(-5.2, 21), y=(-1.2, 7.2))
    for place, (name, bounds) in enumerate(ways.items()):
        y = 5.4 - 1.8 * place
        for part in range(parts):
            start, stop = int(bounds[part]), int(bounds[part + 1])
            for row in range(start, stop):
                _box(axes, row, y, 1, 1.1, OF_RANK[part], alpha=0.8, linewidth=0.7)
            axes.text(
                (start + stop) / 2, y + 0.5, f"{start}:{stop}", ha="center", va="center", color="white", fontsize=8
            )
        axes.text(-0.4, y + 0.5, name, ha="right", va="center", family="monospace", fontsize=8)
    for edge in (0, 8, 16, 20):
        axes.plot([edge, edge], [-0.3, 6.9], color=INK, linewidth=0.8, linestyle=":")
    axes.text(10, -1.0, "rows; dotted: edges of chunks", ha="center", fontsize=8)
    return figure


def draw_halo() -> Figure:
    """A halo of two rows, at a wall and at a wrapping border."""
    rows, parts = 12, 3
    bounds = even_bounds(rows, parts)
    figure = Figure(figsize=(6.4, 3.2))
    for place, periodic in enumerate((False, True)):
        axes = _axes(figure, 1, 2, 1 + place, x=(-1, 9.4), y=(-3.2, 15.6))
        axes.text(4, 15, "periodic" if periodic else "not periodic", ha="center")
        for part in range(parts):
            start, stop = int(bounds[part]), int(bounds[part + 1])
            below, above = halo_widths(bounds, part, lo=2, hi=2, periodic=periodic)
            x = 3.1 * part
            for row in range(start - below, stop + above):
                owned, owner = start <= row < stop, int(np.searchsorted(bounds, row % rows, side="right")) - 1
                y = rows - 1 - row
                _box(axes, x, y, 2.2, 1, OF_RANK[owner], alpha=0.9 if owned else 0.35, linewidth=0.8)
                axes.text(x + 1.1, y + 0.45, str(row % rows), ha="center", va="center", fontsize=7,
                          color="white" if owned else INK)  # fmt: skip
            axes.text(x + 1.1, -3.0, f"rank {part}", ha="center", fontsize=8)
    return figure


def draw_chunks() -> Figure:
    """Parts of three ranks over chunks of 8 rows."""
    rows, parts, edges = 20, 3, [0, 8, 16, 20]
    bounds = even_bounds(rows, parts)
    figure = Figure(figsize=(6.4, 2.1))
    axes = _axes(figure, x=(-4.6, 21), y=(-1.4, 6.2))
    for part in range(parts):
        start, stop, y = int(bounds[part]), int(bounds[part + 1]), 4.2 - 2 * part
        first = max(edge for edge in edges if edge <= start)
        last = min(edge for edge in edges if edge >= stop)
        _box(axes, first, y, last - first, 1.3, OF_RANK[part], alpha=0.25)
        _box(axes, start, y, stop - start, 1.3, OF_RANK[part], alpha=0.9)
        axes.text(
            (start + stop) / 2, y + 0.6, f"wanted {stop - start}", ha="center", va="center", color="white", fontsize=8
        )
        axes.text(-0.4, y + 0.6, f"rank {part} decodes {last - first}", ha="right", va="center", fontsize=8)
    for edge in edges:
        axes.plot([edge, edge], [-0.4, 5.8], color=INK, linewidth=0.8, linestyle=":")
    axes.text(10, -1.2, "rows; dotted: edges of chunks; pale: decoded and not wanted", ha="center", fontsize=8)
    return figure


def _points(number: int) -> Any:
    points = np.random.default_rng(3).random((number, 2))
    return points[np.argsort(hilbert_keys(points))]


def _triangles(points: Any) -> Any:
    from scipy.spatial import Delaunay

    return Delaunay(points).simplices


def draw_ghosts() -> Figure:
    """One part of a mesh, and its ghosts of one and two hops."""
    points = _points(70)
    triangles = _triangles(points)
    pairs = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])
    owner = np.repeat(np.arange(2), np.diff(even_bounds(len(points), 2)))
    hops = np.where(owner == 0, 0, 9)
    for hop in (1, 2):
        for a, b in (pairs.T, pairs.T[::-1]):
            near = b[(hops[a] < hop) & (hops[b] > hop)]
            hops[near] = hop
    figure = Figure(figsize=(5.2, 4.2))
    axes = _axes(figure, x=(-0.05, 1.05), y=(-0.12, 1.05))
    axes.triplot(*points.T, triangles, color=FAINT, linewidth=0.6)
    looks = {
        0: (OF_RANK[0], "owned by rank 0", 34),
        1: (OF_RANK[1], "ghosts, 1 hop", 30),
        2: ("#f2c49b", "ghosts, 2 hops", 26),
    }
    for hop, (colour, name, size) in looks.items():
        axes.scatter(*points[hops == hop].T, s=size, color=colour, label=name, zorder=3)
    axes.scatter(*points[hops == 9].T, s=12, color=FAINT, label="of rank 1 only", zorder=3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.04), ncols=4, frameon=False, fontsize=7, handletextpad=0.1)
    return figure


def draw_any_p() -> Figure:
    """Points in the curve's order, cut for 2, 3 and 8 ranks."""
    points = _points(400)
    figure = Figure(figsize=(7, 2.6))
    for place, parts in enumerate((1, 2, 3, 8)):
        axes = _axes(figure, 1, 4, 1 + place, x=(-0.04, 1.04), y=(-0.04, 1.2))
        if parts == 1:
            axes.plot(*points.T, color=INK, linewidth=0.5)
            axes.set_title("the store: an order", fontsize=9)
            continue
        bounds = even_bounds(len(points), parts)
        for part in range(parts):
            axes.scatter(*points[bounds[part] : bounds[part + 1]].T, s=5, color=OF_RANK[part])
        axes.set_title(f"cut for {parts} ranks", fontsize=9)
    figure.subplots_adjust(wspace=0.05)
    return figure


def draw_message_passing() -> Figure:
    """Two ranks and two layers, on nodes in a row: what is held, computed and sent."""
    figure = Figure(figsize=(7, 3.0))
    for place, way in enumerate(
        ("exchange: ghosts of 1 hop, sent in each layer", "k-hop: ghosts of 2 hops, read once")
    ):
        axes = _axes(figure, 1, 2, 1 + place, x=(-2.3, 11.4), y=(-1.9, 7.6))
        axes.text(4.6, 7.0, way, ha="center", fontsize=8.5)
        for rank, centre in ((0, 0.0), (1, 6.0)):
            nodes = [0, 1, 2, 3] if rank == 0 else [4, 5, 6, 7]
            for layer, name in enumerate(("input", "layer 1", "layer 2")):
                y = 5.2 - 2.6 * layer
                reach = [1, 1, 0][layer] if place == 0 else [2, 1, 0][layer]
                held = [*nodes, *range(4, 4 + reach)] if rank == 0 else [*range(4 - reach, 4), *nodes]
                for node in held:
                    x = centre + 0.8 * (node if rank == 0 else node - 3)
                    owner = node // 4
                    sent = place == 0 and owner != rank
                    axes.scatter(x, y, s=75, color=OF_RANK[owner], alpha=0.4 if owner != rank else 1, zorder=3,
                                 edgecolors=INK if sent else "none", linewidths=1.2)  # fmt: skip
                    axes.text(x, y - 0.02, str(node), ha="center", va="center", fontsize=6, color="white", zorder=4)
                if rank == 0:
                    axes.text(-0.9, y, name, ha="right", va="center", fontsize=8)
            axes.text(centre + (1.2 if rank == 0 else 2.0), -1.6, f"rank {rank}", ha="center", fontsize=8)
        note = (
            "outlined: sent by the owner before the layer"
            if place == 0
            else "pale: computed on both ranks; nothing is sent"
        )
        axes.text(4.6, -2.6, note, ha="center", fontsize=7.5)
    figure.subplots_adjust(wspace=0.02)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "mesh": draw_mesh,
    "bounds": draw_bounds,
    "halo": draw_halo,
    "chunks": draw_chunks,
    "ghosts": draw_ghosts,
    "any_p": draw_any_p,
    "message_passing": draw_message_passing,
}

if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
