"""Ghosts of one part of a stored sample: by hops along its edges, by its cells, or within a radius."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.spatial import cKDTree

from scidata.core.types import IntArray
from scidata.meshes.order.csr import grow_ghosts
from scidata.meshes.order.ids import NodeIds, ranges
from scidata.meshes.order.neighbours import wrapped
from scidata.store.format.write import BLOCK_ROWS, search_space
from scidata.store.reading.rows import RowAccess

_FINE_ROWS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class HopGhosts:
    """Nodes that reach a part, and the edges that lead there.

    Attributes
    ----------
    nodes
        ``(num,)`` int64 sorted global ids, none of them owned.
    src, dst
        Of the part's own edges, global ids, in the store's order.
    far_edges
        ``(num,)`` int64 sorted rows of the edges that end at ghosts less than all hops away.
    far_src, far_dst
        Of those, global ids.
    """

    nodes: IntArray
    src: NodeIds
    dst: IntArray
    far_edges: IntArray
    far_src: NodeIds
    far_dst: IntArray


def hop_ghosts(access: RowAccess, start: int, stop: int, num_hops: int) -> HopGhosts:
    """Follow the edges back from the owned nodes ``[start, stop)``, reading only the rows on the way."""
    indptr = access.rows("csr/indptr", start, stop + 1)
    src = access.rows("csr/src", int(indptr[0]), int(indptr[-1]))
    steps: list[tuple[IntArray, NodeIds, IntArray]] = []

    def sources_of(nodes: IntArray) -> NodeIds:
        if not len(nodes):
            return src[:0]
        steps.append(edges_into(access, nodes, "csr"))
        return steps[-1][1]

    nodes = grow_ghosts(src, sources_of, start, stop, num_hops) if stop > start else np.empty(0, np.int64)
    far_edges = np.concatenate([np.empty(0, np.int64), *(edges for edges, _, _ in steps)])
    order = np.argsort(far_edges, kind="stable")
    return HopGhosts(
        nodes=nodes,
        src=src,
        dst=np.repeat(np.arange(start, stop, dtype=np.int64), np.diff(indptr)),
        far_edges=far_edges[order],
        far_src=np.concatenate([np.empty(0, src.dtype), *(found for _, found, _ in steps)])[order],
        far_dst=np.concatenate([np.empty(0, np.int64), *(ends for _, _, ends in steps)])[order],
    )


def edges_into(access: RowAccess, nodes: IntArray, group: str) -> tuple[IntArray, NodeIds, IntArray]:
    """Read the edges that end at some nodes, sorted ids, at least one: their rows, sources and targets.

    ``group`` is where their ``indptr`` and ``src`` lie.
    """
    # an id and the next: neighbours share a row, so the ranges are made disjoint first
    cut = np.flatnonzero(np.diff(nodes) > 1) + 1
    heads, tails = nodes[np.concatenate([[0], cut])], nodes[np.append(cut, len(nodes)) - 1]
    rows = access.ranges(f"{group}/indptr", heads, tails + 2)
    lengths = tails - heads + 1
    at = ranges(np.cumsum(lengths + 1) - lengths - 1, np.cumsum(lengths + 1) - 1)
    first, last = rows[at], rows[at + 1]
    found = access.ranges(f"{group}/src", first, last)
    return ranges(first, last), found, np.repeat(nodes, last - first)


def radius_ghosts(
    access: RowAccess,
    path: str,
    start: int,
    stop: int,
    num_rows: int,
    radius: float,
    *,
    on_sphere: bool,
    period: Sequence[float] | None = None,
) -> IntArray:
    """Return the rows outside ``[start, stop)`` at most ``radius`` away from one inside, sorted.

    The bounding boxes of blocks say which rows can be: only their positions are read.

    Parameters
    ----------
    path
        Of the positions.
    radius
        In their unit; on a sphere the angle in degrees.
    period
        Width of the domain along each coordinate where it wraps, 0 where it does not: distances are those of the
        nearest images.
    """
    if start == stop or stop - start == num_rows:
        return np.empty(0, np.int64)
    reach = float(2 * np.sin(np.deg2rad(min(radius, 180.0)) / 2)) if on_sphere else float(radius)
    own = search_space(access.rows(path, start, stop), on_sphere=on_sphere)
    images, width = wrapped(own, period)
    tree = cKDTree(images, boxsize=width if width.any() else None)
    boxes = access.rows("blocks/bbox", 0, -(-num_rows // BLOCK_ROWS))
    blocks = np.arange(len(boxes), dtype=np.int64)
    blocks = blocks[(blocks * BLOCK_ROWS < start) | (np.minimum((blocks + 1) * BLOCK_ROWS, num_rows) > stop)]
    near = blocks[_near(boxes[blocks], own, tree, reach, width)]
    starts, stops = near * BLOCK_ROWS, np.minimum((near + 1) * BLOCK_ROWS, num_rows)
    # a block that the part's bounds cut has rows before or after them
    first = np.concatenate([starts, np.maximum(starts, stop)])
    last = np.concatenate([np.minimum(stops, start), stops])
    some = last > first
    first, last = first[some], last[some]
    rows = ranges(first, last)
    points = search_space(access.ranges(path, first, last), on_sphere=on_sphere)
    if not len(rows):
        return rows
    distance = tree.query(wrapped(points, period)[0], distance_upper_bound=np.nextafter(reach, np.inf))[0]
    within: IntArray = rows[distance <= reach]
    return within


def _near(
    boxes: npt.NDArray[Any],
    points: npt.NDArray[np.float64],
    tree: cKDTree,
    reach: float,
    width: npt.NDArray[np.float64],
) -> npt.NDArray[np.bool_]:
    """Say which boxes can hold a point at most ``reach`` away from one of ``points``, those of the tree."""
    if not len(boxes):
        return np.empty(0, np.bool_)
    center, half = boxes.mean(axis=1), np.linalg.norm(boxes[:, 1] - boxes[:, 0], axis=1) / 2
    slack = 1e-9 * (float(np.abs(boxes).max()) + reach)  # rounding
    near: npt.NDArray[np.bool_] = tree.query(wrapped(center, width)[0])[0] <= reach + half + slack
    # balls about boxes are too large: those that are left are held against small boxes of the part's own points
    starts = np.arange(0, len(points), _FINE_ROWS)
    low, high = np.minimum.reduceat(points, starts), np.maximum.reduceat(points, starts)
    for i in np.flatnonzero(near):
        gaps = _gaps(low, high, boxes[i], width)
        near[i] = np.sqrt((gaps * gaps).sum(axis=1).min()) <= reach + slack
    return near


def _gaps(
    low: npt.NDArray[np.float64], high: npt.NDArray[np.float64], box: npt.NDArray[Any], width: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return how far boxes lie from ``box`` along each coordinate, or from its nearest image; 0 where they meet."""
    apart = np.abs((low + high) / 2 - box.mean(axis=0))
    wraps = width > 0
    apart[:, wraps] = np.abs(apart[:, wraps] - width[wraps] * np.round(apart[:, wraps] / width[wraps]))
    gaps: npt.NDArray[np.float64] = np.maximum(apart - (high - low) / 2 - (box[1] - box[0]) / 2, 0.0)
    return gaps
