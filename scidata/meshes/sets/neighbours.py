"""Edges between two sets of nodes by distance: to each target from its nearest sources, or from all in a radius.

And the features of such edges: length and direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.ids import blocks
from scidata.meshes.order.neighbours import BLOCK_ROWS, MAX_PAIRS, distances_of, make_tree, nearest_rows
from scidata.meshes.sets.node_set import NodeSet, positions_of, sin_cos

if TYPE_CHECKING:
    from scipy.spatial import cKDTree


def nearest_edges(source: NodeSet, target: NodeSet, num_neighbours: int) -> IntArray:
    """Return an edge to each target from each of its nearest sources.

    The k-nearest-neighbour edges of AIFS (Lang et al., "AIFS - ECMWF's data-driven forecasting system",
    arXiv:2406.01465) and of Keisler, "Forecasting global weather with graph neural networks", arXiv:2202.07575.

    ``source, target``: distances are straight lines: through the sphere, where both are on one, which orders as arcs
    do. A set to itself has each node among its own nearest.
    ``num_neighbours``: sources of each target. Those whose distances differ by less than ``TIED`` are equally far, and
    of these the first rows are taken.

    Returns ``(2, target.num_nodes * num_neighbours)`` int64: sources, targets, by target, then source. Raises
    ConfigError: more neighbours than there are sources, or sets in different spaces.
    """
    start, end, tied = positions_of(source, target)
    if not 1 <= num_neighbours <= len(start):
        raise ConfigError(
            f"num_neighbours={num_neighbours}: each target needs between 1 and {len(start)} sources, of which there are"
            " so many"
        )
    tree = make_tree(start)
    edge_index = np.empty((2, len(end) * num_neighbours), np.int64)
    by_target = edge_index.reshape(2, len(end), num_neighbours)
    by_target[1] = np.arange(len(end))[:, None]
    for rows in blocks(len(end), BLOCK_ROWS):
        by_target[0, rows] = nearest_rows(tree, end[rows], num_neighbours, tied)
    return edge_index


def radius_edges(source: NodeSet, target: NodeSet, radius: float) -> IntArray:
    """Return an edge to each target from every source that lies at most ``radius`` away.

    GraphCast's edges from grid to mesh (Lam et al., "Learning skillful medium-range global weather forecasting",
    Science 382, 2023, supplement 3): its radius is ``0.6 * longest_edge(mesh, edges of the finest level)``. The cut-off
    edges of anemoi-graphs: theirs is a factor times the largest distance of a target from its nearest neighbour.

    ``radius``: a straight line in the points' units; on a sphere a chord of the unit sphere, 2 at most. An arc of ``a``
    degrees has the chord ``2 * sin(a / 2)``. What lies at the radius but for ``TIED`` is inside.

    Returns ``(2, num_edges)`` int64: sources, targets, by target, then source; a set to itself has self-loops. Raises
    ConfigError: a radius that is not positive and finite, targets without a source, or sets in different spaces.
    """
    if not (np.isfinite(radius) and radius > 0):
        raise ConfigError(f"the radius of edges must be positive and finite, not {radius}")
    start, end, tied = positions_of(source, target)
    if not len(start) or not len(end):
        return join_edges([], num_targets=len(end), why="there are no sources")
    tree = make_tree(start)
    found = [each for rows in blocks(len(end), BLOCK_ROWS) for each in pairs_in_radius(tree, end, rows, radius + tied)]
    return join_edges(
        found,
        num_targets=len(end),
        why=f"no source lies within the radius {radius:g}; the largest distance to the nearest source of any target is "
        "the smallest radius that serves all",
    )


def pairs_in_radius(tree: cKDTree, points: FloatArray, rows: slice, radius: float) -> Iterator[IntArray]:
    """Yield sources and targets ``(2, num)`` of pairs that are near, for blocks with not too many of them each."""
    part = make_tree(points[rows], tree.boxsize)
    reach = radius * (1 + 1e-9)  # which of the pairs that lie at the radius a tree returns depends on its blocks
    if part.n > 1 and part.count_neighbors(tree, reach) > MAX_PAIRS:
        middle = (rows.start + rows.stop) // 2
        yield from pairs_in_radius(tree, points, slice(rows.start, middle), radius)
        yield from pairs_in_radius(tree, points, slice(middle, rows.stop), radius)
        return
    pairs = part.sparse_distance_matrix(tree, reach, output_type="ndarray")
    near, at = pairs["j"].astype(np.int64), pairs["i"].astype(np.int64)
    inside = distances_of(tree.data[near], part.data[at], tree.boxsize) <= radius
    yield np.stack([near[inside], at[inside] + rows.start])


def join_edges(found: list[IntArray], *, num_targets: int, why: str) -> IntArray:
    """Return blocks of edges as one, by target, then source; the blocks are used up.

    Raises ConfigError: targets to which no edge leads.
    """
    reached = np.zeros(num_targets, np.bool_)
    for each in found:
        reached[each[1]] = True
    lonely = np.flatnonzero(~reached)
    if len(lonely):
        raise ConfigError(
            f"{len(lonely)} of {num_targets} targets have no source (first rows: {lonely[:5].tolist()}): {why}"
        )
    num_edges = sum(each.shape[1] for each in found)
    most = max((int(each[0].max()) for each in found if each.size), default=0)
    bits = np.uint64(most.bit_length())
    keys = np.empty(num_edges, np.uint64)
    end = num_edges
    while found:  # from the last: each block's memory is free before the next is looked at
        each = found.pop()
        key = keys[end - each.shape[1] : end]
        key[:] = each[1]
        key <<= bits
        key |= each[0].view(np.uint64)
        end -= each.shape[1]
    keys.sort()
    edge_index = np.empty((2, num_edges), np.int64)
    np.bitwise_and(keys, (np.uint64(1) << bits) - np.uint64(1), out=edge_index[0].view(np.uint64))
    np.right_shift(keys, bits, out=edge_index[1].view(np.uint64))
    return edge_index


def longest_edge(nodes: NodeSet, edge_index: IntArray, target: NodeSet | None = None) -> float:
    """Return the length of the longest edge, on a sphere as a chord: the unit of radii and features.

    ``nodes``: the set that the edges come from.
    ``edge_index``: ``(2, num_edges)`` rows of sources and targets.
    ``target``: the set that they lead to; the same one, if None.
    """
    start, end, _ = positions_of(nodes, nodes if target is None else target)
    longest = 0.0
    for rows in blocks(edge_index.shape[1], 1 << 17):
        source_rows, target_rows = edge_index[:, rows]
        longest = max(longest, float(distances_of(start[source_rows], end[target_rows]).max()))
    return longest


_BLOCK = 1 << 16


def edge_features(source: NodeSet, target: NodeSet, edge_index: IntArray) -> FloatArray:
    """Return the length of each edge and the way to its source as its target sees it: GraphCast's edge features.

    Defined in Lam et al., "Learning skillful medium-range global weather forecasting", Science 382, 2023, supplement 3:
    the space is turned until the target lies at longitude 0 and latitude 0, first about the axis, then along the
    meridian, and the source's position less the target's is taken; all divided by the length of the longest edge. Off
    the sphere nothing is turned, as in MeshGraphNets (Pfaff et al., "Learning mesh-based simulation with graph
    networks", ICLR 2021).

    ``edge_index``: ``(2, num_edges)`` rows of ``source`` and ``target``.

    Returns ``(num_edges, 4)`` float64: length of the chord; up, east and north of the source from the target. Off the
    sphere ``(num_edges, 1 + num_coordinates)``: length; each coordinate of the source less the target's. Raises
    ConfigError: edges out of range, or sets in different spaces.
    """
    start, end, _ = positions_of(source, target)
    _check_edges(source, target, edge_index)
    longest = longest_edge(source, edge_index, target) or 1.0
    out = np.empty((edge_index.shape[1], 1 + start.shape[1]))
    for rows in blocks(len(out), _BLOCK):
        source_rows, target_rows = edge_index[:, rows]
        away = start[source_rows] - end[target_rows]
        ways = _local(target.points[target_rows], away) if target.on_sphere else list(away.T)
        out[rows, 0] = np.sqrt(sum(way**2 for way in ways))
        for column, way in enumerate(ways, 1):
            out[rows, column] = way
        out[rows] /= longest
    return out


def _local(points: FloatArray, away: FloatArray) -> list[FloatArray]:
    """Return the parts of vectors ``(num, 3)`` that point up, east and north at points of a sphere."""
    (sin_lon, cos_lon), (sin_lat, cos_lat) = sin_cos(points[:, 0]), sin_cos(points[:, 1])
    x, y, z = away.T
    outward = cos_lon * x + sin_lon * y
    return [cos_lat * outward + sin_lat * z, cos_lon * y - sin_lon * x, cos_lat * z - sin_lat * outward]


def _check_edges(source: NodeSet, target: NodeSet, edge_index: IntArray) -> None:
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype.kind not in "iu":
        raise ConfigError(f"edges are (2, num_edges) integers, not {edge_index.dtype} of shape {edge_index.shape}")
    for rows, nodes, ends in ((edge_index[0], source, "sources"), (edge_index[1], target, "targets")):
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= nodes.num_nodes):
            num = int(((rows < 0) | (rows >= nodes.num_nodes)).sum())
            raise ConfigError(f"{num} edge {ends} are outside the {nodes.num_nodes} nodes")
