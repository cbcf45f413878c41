"""Features of nodes and edges that come from their places alone, as graph models of weather take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from scidata.core.types import IntArray
from scidata.errors import ConfigError
from scidata.meshes.sets.neighbours import longest_edge
from scidata.meshes.sets.node_set import TIED, NodeSet, positions_of
from scidata.meshes.sets.sphere import Floats, sin_cos

_BLOCK = 1 << 16


def node_features(nodes: NodeSet, *, latitude: Literal["cosine", "sine"] = "cosine") -> Floats:
    """Return cosine of latitude, sine and cosine of longitude of each node: GraphCast's features of grid and mesh.

    Defined in Lam et al., "Learning skillful medium-range global weather forecasting", Science 382, 2023, supplement 3.
    The code that came with it takes the cosine of the angle from the pole, which is the sine of the latitude and tells
    the hemispheres apart (and the longitude's cosine before its sine): ``latitude="sine"``.

    Returns
    -------
    features
        ``(num_nodes, 3)`` float64.

    Raises
    ------
    ConfigError
        The nodes are not on a sphere, or ``latitude`` is something else.
    """
    _need_sphere(nodes)
    if latitude not in ("cosine", "sine"):
        raise ConfigError(f"latitude={latitude!r}: it is 'cosine' or 'sine'")
    (sin_lon, cos_lon), (sin_lat, cos_lat) = sin_cos(nodes.points[:, 0]), sin_cos(nodes.points[:, 1])
    return np.stack([cos_lat if latitude == "cosine" else sin_lat, sin_lon, cos_lon], axis=1)


def edge_features(source: NodeSet, target: NodeSet, edge_index: IntArray, *, longest: float | None = None) -> Floats:
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
    longest
        What lengths are divided by; None: :func:`~scidata.meshes.sets.neighbours.longest_edge` of these edges. Give it
        where parts of one set of edges are to be alike, or 1.

    Returns
    -------
    features
        ``(num_edges, 4)`` float64: length of the chord; up, east and north of the source from the target. Off the
        sphere ``(num_edges, 1 + num_coordinates)``: length; each coordinate of the source less the target's.

    Raises
    ------
    ConfigError
        A ``longest`` that is not positive, edges out of range, or sets in different spaces.
    """
    start, end, _ = positions_of(source, target)
    _check_edges(source, target, edge_index)
    if longest is None:
        longest = longest_edge(source, edge_index, target) or 1.0
    if not (np.isfinite(longest) and longest > 0):
        raise ConfigError(f"features are divided by the length of the longest edge, which cannot be {longest}")
    out = np.empty((edge_index.shape[1], 1 + start.shape[1]))
    for rows in _blocks(len(out)):
        source_rows, target_rows = edge_index[:, rows]
        away = start[source_rows] - end[target_rows]
        ways = _local(target.points[target_rows], away) if target.on_sphere else list(away.T)
        out[rows, 0] = np.sqrt(sum(way**2 for way in ways))
        for column, way in enumerate(ways, 1):
            out[rows, column] = way
        out[rows] /= longest
    return out


def great_circle_features(source: NodeSet, target: NodeSet, edge_index: IntArray) -> Floats:
    """Return the arc of each edge and its direction at the target: EdgeLength and EdgeDirection of anemoi-graphs.

    The direction is that of the source in the plane that touches the sphere at the north pole, once the space is turned
    along the target's meridian until the target lies there; its length is 1. Unlike the local frame of
    :func:`edge_features`, that plane keeps its axes for all targets: x points to where longitude 0 was.

    Returns
    -------
    features
        ``(num_edges, 3)`` float64: arc in radians, x and y. Of an edge between two nodes at one place all are 0. Not
        normalised.

    Raises
    ------
    ConfigError
        Sets that are not on a sphere, or edges out of range.
    """
    _need_sphere(source, target)
    _check_edges(source, target, edge_index)
    start, end, _ = positions_of(source, target)
    out = np.zeros((edge_index.shape[1], 3))
    for rows in _blocks(len(out)):
        source_rows, target_rows = edge_index[:, rows]
        away = start[source_rows] - end[target_rows]
        points = target.points[target_rows]
        _, east, north = _local(points, away)
        sin_lon, cos_lon = sin_cos(points[:, 0])
        x, y = -sin_lon * east - cos_lon * north, cos_lon * east - sin_lon * north
        south = points[:, 1] == -90  # no meridian leads north: anemoi-graphs turns about the x axis there
        x[south], y[south] = away[south, 0], -away[south, 1]
        size = np.hypot(x, y)
        chord = np.sqrt((away**2).sum(axis=1))
        out[rows, 0] = 2 * np.arcsin(np.minimum(chord / 2, 1.0))
        seen = size > TIED
        out[rows, 1][seen], out[rows, 2][seen] = x[seen] / size[seen], y[seen] / size[seen]
    return out


def _local(points: Floats, away: Floats) -> list[Floats]:
    """Return the parts of vectors ``(num, 3)`` that point up, east and north at points of a sphere."""
    (sin_lon, cos_lon), (sin_lat, cos_lat) = sin_cos(points[:, 0]), sin_cos(points[:, 1])
    x, y, z = away.T
    outward = cos_lon * x + sin_lon * y
    return [cos_lat * outward + sin_lat * z, cos_lon * y - sin_lon * x, cos_lat * z - sin_lat * outward]


def _need_sphere(*sets: NodeSet) -> None:
    if not all(each.on_sphere for each in sets):
        raise ConfigError("these features are of longitude and latitude; the nodes are not on a sphere")


def _check_edges(source: NodeSet, target: NodeSet, edge_index: IntArray) -> None:
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype.kind not in "iu":
        raise ConfigError(f"edges are (2, num_edges) integers, not {edge_index.dtype} of shape {edge_index.shape}")
    for rows, nodes, what in ((edge_index[0], source, "sources"), (edge_index[1], target, "targets")):
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= nodes.num_nodes):
            num = int(((rows < 0) | (rows >= nodes.num_nodes)).sum())
            raise ConfigError(f"{num} edge {what} are outside the {nodes.num_nodes} nodes")


def _blocks(num: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, num, _BLOCK))
