"""VTKHDF: fields over time on a fixed mesh, for ParaView.

The format: https://docs.vtk.org/en/latest/vtk_file_formats/vtkhdf_file_format. All steps of a field lie one after
another in one array, contiguously, so that ranks write their rows where they belong, as in any HDF5 file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import Array, FloatArray, IntArray
from scidata.data.output.fields import OutputField, OutputLayout
from scidata.data.output.flat_output import FlatOutput
from scidata.data.output.places import LocalPlace
from scidata.errors import ConfigError
from scidata.meshes.formats.vtk_write import with_faces
from scidata.meshes.geometry import Geometry, RawCells
from scidata.meshes.order.ids import ranges
from scidata.meshes.order.polyhedra import CellFaces
from scidata.meshes.order.positions import unit_sphere

ROOT = "VTKHDF"  # the group that holds all
#: The group of the fields of an entity.
GROUPS = {"node": "PointData", "point": "PointData", "cell": "CellData"}
_VERSION, _WITH_FACES = (2, 0), (2, 5)  # polyhedra came with 2.5


class VtkhdfOutput(FlatOutput):
    """A VTKHDF file of type UnstructuredGrid under construction.

    - ``geometry``: reads the mesh, in the source's order; called on one rank.
    """

    def __init__(self, place: LocalPlace, layout: OutputLayout, *, geometry: Callable[[], Geometry]) -> None:
        super().__init__(place, layout, kind="vtkhdf")
        self._geometry = geometry
        for field in layout.fields.values():
            if field.entity not in GROUPS or field.entity_dim != 0 or len(field.shape) > 2:
                raise ConfigError(
                    f"create: field {field.name!r} of {field.entity!r} has dims {', '.join(field.dims)}; VTKHDF holds "
                    "fields of nodes and cells, with their rows first and at most one dimension of components"
                )

    def create(self) -> None:
        """Make the file: the mesh, space for the fields, and the offset of each step. For one process."""
        import h5py

        layout, mesh = self._layout, self._geometry()
        if mesh.cells is None or mesh.points is None:
            raise ConfigError(f"{self._place.path}: the topology has no cells; VTKHDF is written of meshes")
        with h5py.File(self._place.target, "w") as file:
            root = file.create_group(ROOT)
            write_mesh(root, in_space(mesh.points, on_sphere=getattr(mesh, "on_sphere", False)), mesh.cells)
            self._make_steps(root)
            for field in layout.fields.values():
                self._make_array(file, field)

    def _make_steps(self, root: Any) -> None:
        layout, num = self._layout, self._layout.num_steps
        steps = root.create_group("Steps")
        steps.attrs["NSteps"] = num
        labels = [v.read() for v in layout.variables if v.dims == tuple(layout.step_dims)]
        steps["Values"] = np.asarray(labels[0] if labels else np.arange(num), np.float64)
        zeros = np.zeros(num, np.int64)
        steps["PartOffsets"], steps["PointOffsets"] = zeros, zeros
        steps["NumberOfParts"] = zeros + 1
        steps["CellOffsets"], steps["ConnectivityIdOffsets"] = zeros[:, None], zeros[:, None]
        for field in layout.fields.values():
            steps[f"{GROUPS[field.entity]}Offsets/{field.name}"] = np.arange(num, dtype=np.int64) * field.shape[0]

    def _name_of(self, field: OutputField) -> str:
        return f"{ROOT}/{GROUPS[field.entity]}/{field.name}"

    def _shape_of(self, field: OutputField) -> tuple[int, ...]:
        return (self._layout.num_steps * field.shape[0], *field.shape[1:])


def write_mesh(root: Any, points: FloatArray, cells: RawCells | None, faces: Sequence[CellFaces] = ()) -> None:
    """Write points, ``(num_points, 3)``, and cells; without cells, a vertex for each point.

    ``faces`` are those of polyhedra among the cells, each of which has its own.
    """
    import h5py

    cells = RawCells.of_kind(np.arange(len(points))[:, None], 1) if cells is None else cells
    of_faces: dict[str, IntArray] = {}
    if faces:
        cells = with_faces(cells, faces)[0]
        sizes, nodes, cell = map(np.concatenate, zip(*faces, strict=True))
        order = np.argsort(cell, kind="stable")
        begins, num = bounds_of(sizes)[:-1][order], len(cell)
        of_faces = {
            "FaceConnectivity": nodes[ranges(begins, begins + sizes[order])],
            "FaceOffsets": bounds_of(sizes[order]),
            "PolyhedronToFaces": np.arange(num),
            "PolyhedronOffsets": bounds_of(np.bincount(cell, minlength=cells.num_cells)),
            "NumberOfFaces": np.array([num]),
            "NumberOfPolyhedronToFaceIds": np.array([num]),
            "NumberOfFaceConnectivityIds": np.array([len(nodes)]),
        }
    root.attrs["Version"] = _WITH_FACES if faces else _VERSION
    root.attrs.create("Type", b"UnstructuredGrid", dtype=h5py.string_dtype("ascii", 16))
    counts = {"Points": len(points), "Cells": cells.num_cells, "ConnectivityIds": len(cells.connectivity)}
    for name, count in counts.items():
        root[f"NumberOf{name}"] = np.array([count], np.int64)
    root["Points"] = points
    root["Connectivity"], root["Offsets"] = cells.connectivity.astype(np.int64), cells.offsets.astype(np.int64)
    root["Types"] = cells.cell_type.astype(np.uint8)
    for name, values in of_faces.items():
        root[name] = values.astype(np.int64)


def in_space(points: Array, *, on_sphere: bool) -> FloatArray:
    """Return points ``(N, 3)``: longitude and latitude on the unit sphere, planar points at z = 0."""
    if on_sphere:
        return unit_sphere(points[:, :2])
    flat = np.zeros((len(points), 3))
    flat[:, : points.shape[1]] = points
    return flat
