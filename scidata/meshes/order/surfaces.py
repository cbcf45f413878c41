"""Curvature of surfaces, and the signed distance from them. Polygons are cut into triangles from their first corner."""

from __future__ import annotations

import numpy as np

from scidata.core.checks import optional_module
from scidata.core.types import BoolArray, FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.faces import surface_of
from scidata.meshes.order.ids import blocks
from scidata.meshes.order.measures import triangles_of
from scidata.meshes.order.positions import cell_centres

_BLOCK = 1 << 20  # points whose distance is computed at once


def curvature_of_nodes(points: FloatArray, cells: RawCells) -> FloatArray:
    """Return the mean curvature of a surface at its nodes, ``(num_nodes,)``, in one over the unit of ``points``.

    Half the length of the Laplacian of the positions, by cotangents over mixed Voronoi areas: Meyer, Desbrun, Schroeder
    and Barr, "Discrete differential-geometry operators for triangulated 2-manifolds", 2003, equations 8 to 10. Positive
    where the surface bends away from its normals, which the corners give: 1 / R of a sphere whose normals look out.
    NaN if it is not defined: at a border, where more than two cells or cells of opposite normals meet in an edge,
    and at nodes of no cell. ``points``: ``(num_nodes, 3)``. Raises UnsupportedFormatError: cells that are not flat, or
    quadratic.
    """
    triangles = triangles_of(cells)
    total = np.zeros((7, len(points)))  # of each node: its Laplacian, its normal, its area
    corners = [points[triangles[:, k]] for k in range(3)]
    vector = np.cross(corners[1] - corners[0], corners[2] - corners[0])  # twice the area long
    twice = np.linalg.norm(vector, axis=1)
    dots = [((corners[k - 2] - corners[k]) * (corners[k - 1] - corners[k])).sum(axis=1) for k in range(3)]
    cotangents = [np.divide(dot, twice, out=np.zeros_like(dot), where=twice > 0) for dot in dots]
    is_obtuse = np.min(dots, axis=0) < 0
    for k in range(3):
        one, other = corners[k] - corners[k - 1], corners[k] - corners[k - 2]  # the edges at this corner
        flow = cotangents[k - 2][:, None] * one + cotangents[k - 1][:, None] * other
        area = (cotangents[k - 2] * (one * one).sum(axis=1) + cotangents[k - 1] * (other * other).sum(axis=1)) / 8
        area = np.where(is_obtuse, twice * np.where(dots[k] < 0, 2, 1) / 8, area)
        total += [np.bincount(triangles[:, k], column, len(points)) for column in (*flow.T, *vector.T, area)]
    laplacian, normal, area = total[:3], total[3:6], total[6]
    curvature = np.linalg.norm(laplacian, axis=0) * np.where((laplacian * normal).sum(axis=0) < 0, -1, 1)
    is_defined = np.bincount(triangles.ravel(), minlength=len(points)) > 0
    is_defined[_unpaired(triangles, len(points)).ravel()] = False
    return np.divide(curvature, 4 * area, out=np.full(len(points), np.nan), where=is_defined & (area > 0))


def curvature_of_cells(points: FloatArray, cells: RawCells) -> FloatArray:
    """Return the mean over each cell's corners that have a curvature; NaN where none has."""
    at_nodes = curvature_of_nodes(points, cells)
    there = ~np.isnan(at_nodes)
    mean, share = cell_centres(np.stack([np.where(there, at_nodes, 0), there], axis=1), cells).T
    return np.divide(mean, share, out=np.full(len(mean), np.nan), where=share > 0)


def signed_distance(at: FloatArray, points: FloatArray, triangles: IntArray, where: str) -> FloatArray:
    """Return how far each of ``at`` ``(num, 3)`` is from a closed surface, ``(num,)``, negative inside.

    Distances are exact. The sign is that of the angle-weighted pseudonormal at the nearest point: Baerentzen and
    Aanaes, "Signed distance computation using the angle weighted pseudonormal", 2005, as VTK computes it.
    ``points, triangles``: ``(num_points, 3)`` and ``(num_triangles, 3)``; points in one place count as one. The surface
    may look out or in, and have several parts, but not cross itself. Raises ConfigError: no inside, as it is open, or
    its triangles disagree about where that is; MissingDependencyError: VTK is not there.
    """
    places, same = np.unique(points, axis=0, return_inverse=True)
    triangles = same.reshape(-1)[triangles]
    triangles = triangles[(triangles != np.roll(triangles, 1, axis=1)).all(axis=1)]
    wrong = _unpaired(triangles, len(places))
    if len(wrong) or not len(triangles):
        first = (
            f", the first from {places[wrong[0, 0]].tolist()} to {places[wrong[0, 1]].tolist()}" if len(wrong) else ""
        )
        raise ConfigError(
            f"{where}: sdf: the surface has no inside: {len(wrong)} edges of its {len(triangles)} triangles are not "
            f"between two that look to the same side{first}; close its holes, and turn its triangles alike"
        )
    a, b, c = (places[triangles[:, k]] - places[0] for k in range(3))
    if (np.cross(a, b) * c).sum() < 0:
        triangles = triangles[:, ::-1]
    core, model, filters, arrays = (
        optional_module(f"vtkmodules.{name}", "geometry={'sdf': ...} needs VTK", "vtk")
        for name in ("vtkCommonCore", "vtkCommonDataModel", "vtkFiltersCore", "util.numpy_support")
    )
    surface, nodes, faces = model.vtkPolyData(), core.vtkPoints(), model.vtkCellArray()
    nodes.SetData(arrays.numpy_to_vtk(places))
    corners = np.ascontiguousarray(triangles.ravel(), np.int64)
    faces.SetData(3, arrays.numpy_to_vtk(corners, array_type=core.vtkIdTypeArray().GetDataType()))
    surface.SetPoints(nodes)
    surface.SetPolys(faces)
    distance = filters.vtkImplicitPolyDataDistance()
    distance.SetInput(surface)
    found = np.empty(len(at))
    for rows in blocks(len(at), _BLOCK):
        out = core.vtkDoubleArray()
        distance.FunctionValue(arrays.numpy_to_vtk(np.ascontiguousarray(at[rows], np.float64)), out)
        found[rows] = arrays.vtk_to_numpy(out)
    return found


def border_of(cells: RawCells) -> IntArray:
    """Return the triangles ``(num, 3)`` of the faces that solid cells share with no other."""
    corners = surface_of(cells.offsets, cells.connectivity, cells.cell_type, np.arange(cells.num_cells)).corners
    return np.concatenate([corners[:, :3], corners[corners[:, 3] != corners[:, 2]][:, [0, 2, 3]]])


def _unpaired(triangles: IntArray, num_nodes: int) -> IntArray:
    """Return the directed edges ``(num, 2)`` that do not run once each way, so that there is no one side of them."""
    ends = np.concatenate([triangles[:, [k, k - 2]] for k in range(3)])
    keys, counts = np.unique(ends[:, 0] * num_nodes + ends[:, 1], return_counts=True)
    start, end = keys // num_nodes, keys % num_nodes
    back = end * num_nodes + start
    at = np.minimum(np.searchsorted(keys, back), len(keys) - 1)
    wrong: BoolArray = (counts != 1) | (keys[at] != back) | (counts[at] != 1)
    return np.stack([start[wrong], end[wrong]], axis=1)
