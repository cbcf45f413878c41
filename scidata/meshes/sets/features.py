"""Features of edges that come from the places of their ends alone, as graph models of weather take them."""

from __future__ import annotations

import numpy as np

from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.ids import blocks
from scidata.meshes.sets.neighbours import longest_edge
from scidata.meshes.sets.node_set import NodeSet, positions_of, sin_cos

_BLOCK = 1 << 16


def edge_features(source: NodeSet, target: NodeSet, edge_index: IntArray) -> FloatArray:
    """Return the length of each edge and the way to its source as its target sees it: GraphCast's edge features.

    Defined in Lam et al., "Learning skillful medium-range global weather forecasting", Science 382, 2023, supplement 3:
    the space is turned until the target lies at longitude 0 and latitude 0, first about the axis, then along the
    meridian, and the source's position less the target's is taken; all divided by the length of the longest edge. Off
    the sphere nothing is turned, as in MeshGraphNets (Pfaff et al., "Learning mesh-based simulation with graph
    networks", ICLR 2021).

    Parameters
    ----------
    edge_index
        ``(2, num_edges)`` rows of ``source`` and ``target``.

    Returns
    -------
    features
        ``(num_edges, 4)`` float64: length of the chord; up, east and north of the source from the target. Off the
        sphere ``(num_edges, 1 + num_coordinates)``: length; each coordinate of the source less the target's.

    Raises
    ------
    ConfigError
        Edges out of range, or sets in different spaces.
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
