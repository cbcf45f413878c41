"""Areas, normals and volumes of cells, or of the nodes that share them.

A flat cell has the vector area ``sum of (p[i] - p[0]) x (p[i + 1] - p[0]) / 2`` over its corners (Newell's), whose
length is its area and whose direction its normal: exact for planar polygons, convex or not. A solid's volume is the sum
of the tetrahedra between its first node and the triangles of its faces: exact where faces are planar. Middle nodes of
quadratic cells are left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from scidata.core.checks import names_of
from scidata.core.types import BoolArray, FloatArray, IntArray
from scidata.errors import ConfigError, UnsupportedFormatError, check_known
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import CELL_NAMES
from scidata.meshes.order.faces import SOLID_FACES
from scidata.meshes.order.ids import ranges
from scidata.sources.paths import expand_paths

#: What :func:`measures_of_cells` may return.
SIZES = ("area", "normal", "volume")
#: Names the boundary of a sample's own solid cells, in place of the file of a surface.
BOUNDARY = "boundary"
#: What of the geometry of rows a user asks for: see :func:`scidata.partition`.
AskedGeometry: TypeAlias = bool | str | Sequence[str] | Mapping[str, object] | None

_FLAT_CORNERS = {5: 3, 8: 4, 9: 4, 22: 3, 23: 4}  # of quadratic ones the corners, which come first
_VOXEL = (0, 1, 3, 2, 4, 5, 7, 6)  # the corners of a hexahedron, whose faces all look outwards
_THIN = (1, 2, 3, 4, 21)


def as_geometry(geometry: AskedGeometry) -> dict[str, str] | None:
    """Return what of the geometry is asked for, by name: of ``sdf`` its surface, else ``""``; None: the default.

    Raises UnknownNameError: there is no such geometry; ConfigError: ``sdf`` without a surface.
    """
    if geometry is None or isinstance(geometry, bool):
        return None if geometry is None else dict.fromkeys(SIZES if geometry else (), "")
    named: Mapping[str, object] = geometry if isinstance(geometry, Mapping) else {}
    if named is not geometry:
        each = [one.strip() for one in ",".join(map(str, names_of("geometry", geometry))).split(",")]
        named = dict(one.partition("=")[::2] for one in each if one not in ("", "none"))
    check_known("geometry: there is no", named, (*SIZES, "curvature", "sdf"))
    found = {name: "" for name, of in named.items() if of is not False}
    if "sdf" in found:
        if named["sdf"] in ("", True, None):
            raise ConfigError("geometry: sdf is the distance from a surface: name it, sdf=car.stl or sdf=boundary")
        found["sdf"] = str(named["sdf"])
    return found


def surface_of_sample(asked: Mapping[str, str] | None, name: str, path: str) -> tuple[str, ...]:
    """Return the one file of the surface from which distances of a sample are asked for; ``()`` if it has none."""
    pattern = (asked or {}).get("sdf", BOUNDARY)
    said = pattern.replace("{name}", name).replace("{folder}", os.path.dirname(path) or ".")
    paths = () if pattern == BOUNDARY else expand_paths(said)
    if len(paths) > 1:
        raise ConfigError(f"sample {name}: geometry: sdf={said!r} leads to {len(paths)} files; one is expected")
    return paths


def measures_of_cells(points: FloatArray, cells: RawCells) -> dict[str, FloatArray]:
    """Return the size of each cell, and the normals of flat ones.

    ``area`` ``(num_cells,)`` and, of points in space, ``normal`` ``(num_cells, 3)``, of unit length by the order of the
    corners, where there are flat cells; ``volume`` ``(num_cells,)`` where there are solids; 0 for other cells. Points
    are not those of a sphere or of a domain that wraps. Polyhedra raise UnsupportedFormatError.
    """
    flat, solid = np.isin(cells.cell_type, (7, *_FLAT_CORNERS)), np.isin(cells.cell_type, tuple(SOLID_FACES))
    _refuse(cells, flat | solid, "no area or volume is computed; leave it out with geometry=False")
    found = {}
    space = points if points.shape[1] == 3 else np.pad(points, ((0, 0), (0, 1)))
    if flat.any() or not solid.any():
        vectors = _vector_areas(space, cells)
        found["area"] = np.linalg.norm(vectors, axis=1)
        if points.shape[1] == 3:
            found["normal"] = _unit(vectors)
    if solid.any():
        found["volume"] = _volumes(space, cells)
    return found


def measures_of_nodes(points: FloatArray, cells: RawCells) -> dict[str, FloatArray]:
    """Return the share of each node in the cells around it: an equal part of a cell for each of its nodes.

    So ``area`` and ``volume`` have the same sum as those of cells; ``normal`` is the direction of summed vector areas.
    """
    found = measures_of_cells(points, cells)
    if "normal" in found:
        found["normal"] *= found["area"][:, None]
    sizes = np.diff(cells.offsets)
    share = np.repeat(1 / np.maximum(sizes, 1), sizes)
    made = {}
    for name, values in found.items():
        columns = np.repeat(values.reshape(len(sizes), -1), sizes, axis=0) * share[:, None]
        sums = [np.bincount(cells.connectivity, column, minlength=len(points)) for column in columns.T]
        made[name] = _unit(np.stack(sums, axis=1)) if name == "normal" else np.asarray(sums[0], np.float64)
    return made


def _unit(vectors: FloatArray) -> FloatArray:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)


def _refuse(cells: RawCells, known: BoolArray, why: str) -> None:
    """Raise UnsupportedFormatError for cells that are neither known, nor lines or vertices."""
    other = ~(known | np.isin(cells.cell_type, _THIN))
    if other.any():
        kind = int(cells.cell_type[np.argmax(other)])
        raise UnsupportedFormatError(
            f"{int(other.sum())} cells are of VTK type {kind} ({CELL_NAMES.get(kind, 'unknown')}), of which {why}"
        )


def triangles_of(cells: RawCells) -> IntArray:
    """Return the triangles ``(num, 3)`` of a surface; UnsupportedFormatError: other cells than linear flat ones."""
    known = np.isin(cells.cell_type, (5, 7, 8, 9))
    _refuse(cells, known, "no surface is made; extract it, or convert them to triangles, quads or polygons")
    return _fans(cells)[0]


def _fans(cells: RawCells) -> tuple[IntArray, IntArray]:
    """Cut flat cells into triangles ``(num, 3)`` from their first corner, ``(num,)``: the cell of each."""
    sizes, starts = np.where(cells.cell_type == 7, np.diff(cells.offsets), 0), cells.offsets[:-1]
    for kind, size in _FLAT_CORNERS.items():
        sizes[cells.cell_type == kind] = size
    pixels, counts = starts[cells.cell_type == 8], np.maximum(sizes - 2, 0)
    nodes = cells.connectivity.copy()
    nodes[pixels + 2], nodes[pixels + 3] = nodes[pixels + 3], nodes[pixels + 2]
    second = ranges(starts + 1, starts + 1 + counts)
    corners = np.stack([np.repeat(starts, counts), second, second + 1], axis=1)
    return nodes[corners], np.repeat(np.arange(cells.num_cells), counts)


def _vector_areas(points: FloatArray, cells: RawCells) -> FloatArray:
    """Return ``(num_cells, 3)``, 0 for cells that are not flat."""
    triangles, cell = _fans(cells)
    each = _fan(points, triangles) / 2
    return np.stack([np.bincount(cell, column, cells.num_cells) for column in each.T], axis=1)


def _fan(points: FloatArray, corners: IntArray) -> FloatArray:
    """Return twice the vector area of each polygon of ``corners`` ``(num, size)``."""
    away = points[corners[:, 1:]] - points[corners[:, :1]]
    return np.cross(away[:, :-1], away[:, 1:]).sum(axis=1)


def _volumes(points: FloatArray, cells: RawCells) -> FloatArray:
    volumes = np.zeros(cells.num_cells)
    for kind, faces in SOLID_FACES.items():
        rows = np.flatnonzero(cells.cell_type == kind)
        starts = cells.offsets[rows]
        first = points[cells.connectivity[starts]]
        for face in (SOLID_FACES[12] if kind == 11 else faces) if len(rows) else ():
            places = [_VOXEL[corner] for corner in face] if kind == 11 else face
            corners = cells.connectivity[starts[:, None] + np.array(places)]
            volumes[rows] += ((points[corners[:, 0]] - first) * _fan(points, corners)).sum(axis=1) / 6
    return np.abs(volumes)
