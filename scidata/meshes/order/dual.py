"""The cells of a mesh as rows of their own: where they lie, and which are neighbours across a face."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray
from scidata.meshes.order.faces import pairs_across_faces
from scidata.meshes.order.ids import both_directions, undirected_keys
from scidata.meshes.order.positions import unit_sphere


def edges_across_faces(
    offsets: IntArray, connectivity: IntArray, cell_type: npt.NDArray[np.generic], num_nodes: int
) -> IntArray:
    """Return the edges between cells that share a face, both directions, each once, by (destination, source).

    The faces of flat cells are their edges. Cells of different dimensions share none, and cells without an area have
    no edges.

    Parameters
    ----------
    offsets, connectivity, cell_type
        As in :func:`scidata.meshes.order.cells.edges_of_cells`, all nodes in range.

    Returns
    -------
    edge_index
        ``(2, num_edges)`` int64: source and destination cells.

    Raises
    ------
    UnsupportedFormatError
        Cell types whose faces are not known (polyhedra, strips).
    """
    one, other = pairs_across_faces(offsets, connectivity, cell_type, num_nodes)
    return both_directions(undirected_keys(one, other, len(cell_type)), len(cell_type))


def cell_centres(
    points: npt.NDArray[np.float64],
    offsets: IntArray,
    connectivity: IntArray,
    *,
    on_sphere: bool = False,
    period: Sequence[float] | None = None,
) -> npt.NDArray[np.float64]:
    """Return the mean of each cell's nodes.

    Parameters
    ----------
    points
        ``(num_nodes, 2 or 3)``; ``on_sphere``: longitude and latitude in degrees, and height where there is a third.
        The mean is then that on the unit sphere, and longitudes are from 0 on where those of the nodes are.
    offsets, connectivity
        Cells as lists of nodes in range, at least one each.
    period
        Width of the domain along each coordinate where it wraps, else 0: nodes count at their image nearest to the
        cell's first node.

    Returns
    -------
    centres
        ``(num_cells, 2 or 3)``, in the coordinates of the points.
    """
    if len(offsets) < 2:
        return np.empty((0, points.shape[1]))
    if on_sphere:
        mean = _means(unit_sphere(points[:, :2]), offsets, connectivity, None)
        lon = np.rad2deg(np.arctan2(mean[:, 1], mean[:, 0]))
        lat = np.rad2deg(np.arctan2(mean[:, 2], np.hypot(mean[:, 0], mean[:, 1])))
        columns = [lon % 360 if points[:, 0].min() >= 0 else lon, lat]
        if points.shape[1] > 2:
            columns.append(_means(points[:, 2:], offsets, connectivity, None)[:, 0])
        return np.stack(columns, axis=1)
    return _means(points, offsets, connectivity, period)


def _means(
    points: npt.NDArray[np.float64], offsets: IntArray, connectivity: IntArray, period: Sequence[float] | None
) -> npt.NDArray[np.float64]:
    sizes = np.diff(offsets)
    first = points[connectivity[offsets[:-1]]]
    means = np.empty_like(first)
    for axis in range(points.shape[1]):  # one at a time: a third of the memory
        away = points[connectivity, axis] - np.repeat(first[:, axis], sizes)
        width = 0.0 if period is None or axis >= len(period) else period[axis]
        if width:
            away -= width * np.round(away / width)
        means[:, axis] = first[:, axis] + np.add.reduceat(away, offsets[:-1]) / sizes
    return means
