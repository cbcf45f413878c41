"""Other mesh formats (Gmsh, SU2, …) through meshio, legacy VTK through vtk, extras; VTP, VTU, CGNS, Fluent without.

A file is read whole; fields are then views of its arrays.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.checks import optional_module
from scidata.core.types import AnyArray, ArrayLayout, IntArray, Source
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    FieldMismatchError,
    RefusedError,
    UnsupportedFormatError,
)
from scidata.meshes.formats.arrays import GHOSTS, check_ghosts, join_cells, polygon_types
from scidata.meshes.formats.base import Options, RawTopology, field_of
from scidata.meshes.formats.cgns import is_cgns, read_cgns
from scidata.meshes.formats.fluent import is_results, read_fluent
from scidata.meshes.formats.foam import FoamSource, is_case
from scidata.meshes.formats.mesh_data import MeshData
from scidata.meshes.formats.outside import check_outside
from scidata.meshes.formats.points import made_into_graph
from scidata.meshes.formats.vtk_pieces import SUFFIXES as VTK_SUFFIXES
from scidata.meshes.formats.vtk_pieces import read_files, read_vtk
from scidata.meshes.formats.vtkhdf import has_faces, read_with_faces
from scidata.meshes.geometry import Geometry, RawCells
from scidata.meshes.order.cells import CELL_NAMES, FOR_POLYHEDRA
from scidata.sources import open_source
from scidata.sources.collections import PARALLEL, parts_of
from scidata.sources.file_source import WholeFileSource, layout_in_memory
from scidata.sources.kinds import MESHES_IN_HDF5, check_no_mesh

#: VTK's codes by meshio's names, which are VTK's for linear cells.
_CODES = {CELL_NAMES[code]: code for code in (1, 3, 5, 9, 10, 12, 13, 14)} | {
    "line3": 21,
    "triangle6": 22,
    "quad8": 23,
    "tetra10": 24,
    "hexahedron20": 25,
    "wedge15": 26,
    "pyramid13": 27,
    "quad9": 28,
    "hexahedron27": 29,
    "quad6": 30,
    "triangle7": 34,
}

#: Suffixes of the formats that meshio is asked for.
_SUFFIXES = (
    *(".msh", ".su2", ".vtk", ".vtu", ".vtp", ".inp", ".med", ".xdmf", ".xmf", ".obj", ".off", ".stl", ".ply"),
    *PARALLEL,
    *(".mesh", ".meshb", ".bdf", ".nas", ".fem", ".post", ".tec", ".dat", ".ugrid", ".avs", ".mdpa", ".ele", ".node"),
    *(".f3grid", ".xml", ".h5m", *MESHES_IN_HDF5),
)
#: Formats whose readers loop as often as the file says; a process costs a second, which the others need not pay.
_COUNTED = (
    *(".msh", ".mesh", ".meshb", ".ply", ".su2", ".vol", ".avs"),
    *(".ugrid", ".f3grid", ".ele", ".node", ".post", ".dato"),
)
_HEAD = 1 << 16  # bytes of a file that say how it is written
_LEAST_SECONDS, _BYTES_A_SECOND = 6, 100_000  # of processor time: the imports, and a tenth of meshio's slowest reader


def is_known(path: str, kind: str | None = None) -> bool:
    """Whether a file is of a format that is read here, by its suffix; of these VTP alone has clouds."""
    return path.lower().endswith(_SUFFIXES) and (kind in (None, "mesh") or _is_vtp(path))


def _is_vtp(path: str) -> bool:
    return path.lower().endswith((".vtp", ".pvtp"))


def _is_vtk_xml(path: str) -> bool:
    return path.lower().endswith((*VTK_SUFFIXES, *PARALLEL))


def open_any(path: str, *, allow_external: bool = False) -> Source:
    """Open a source of any format, by meshio if it is none of ours."""
    try:
        check_no_mesh(path)
        return open_source(path, allow_external=allow_external)
    except UnsupportedFormatError:
        if is_case(path):
            return FoamSource(path)
        if not is_known(path) or os.path.isdir(path):
            raise
        return MeshioSource(path, allow_external=allow_external)


class MeshioSource(WholeFileSource[MeshData]):
    """A file that meshio reads, as a source: its arrays are ``point/<name>`` and ``cell/<name>``.

    ``path``: a local file. Read at the first use, once per process; a pickle holds the path and options alone.
    ``allow_external``: also read other files outside the folder of this one (XDMF's data items, external links,
    included files).
    """

    def __init__(self, path: str, *, allow_external: bool = False) -> None:
        super().__init__(path)
        self.allow_external = allow_external

    @property
    def format(self) -> str:
        """``"meshio"``, ``"CGNS"``, ``"vtu"``, ``"vtp"`` (surfaces), ``"vtp points"`` (clouds)."""
        if not _is_vtp(self.path):
            names = (name for suffix, name in MESHES_IN_HDF5.items() if self.path.lower().endswith(suffix))
            return "vtu" if _is_vtk_xml(self.path) else next(names, "meshio")
        return "vtp points" if self.mesh.cells is None else "vtp"

    @property
    def mesh(self) -> MeshData:
        """Points, cells and fields.

        Raises MissingDependencyError: meshio is not installed.
        Raises UnsupportedFormatError: it cannot read the file.
        Raises RefusedError: the file leads out of its folder, or declares XML entities.
        """
        return self._read()

    def _parse(self) -> MeshData:
        mesh = _read(self.path, allow_external=self.allow_external)
        of_points, of_cells = dict(mesh.point_data), dict(mesh.cell_data)
        for fields in (of_points, of_cells):
            if GHOSTS in fields:  # VTK's mark; where it marks none, it is no field
                check_ghosts(self.path, GHOSTS, fields.pop(GHOSTS), of_cells=fields is of_cells)
        return replace(mesh, point_data=of_points, cell_data=of_cells)

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Fields of points and cells, by name."""
        dims = {
            name: (name.split("/")[0], *(f"dim_{i}" for i in range(1, x.ndim))) for name, x in self._values().items()
        }
        return {name: layout_in_memory(self.path, name, x, dims[name]) for name, x in self._values().items()}

    @property
    def skipped(self) -> Mapping[str, str]:
        """Why fields of the file are not among its arrays."""
        return self.mesh.left_out

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> None:
        """Return None: some formats lead to other files."""

    def _values(self) -> dict[str, AnyArray]:
        of_points = {f"point/{name}": values for name, values in self.mesh.point_data.items()}
        return of_points | {f"cell/{name}": values for name, values in self.mesh.cell_data.items()}


class PointsOfMesh(MeshioSource):
    """The points of such a file and their fields, as a cloud; its cells, and what lives on them, are passed over."""

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """The points, and fields by name."""
        dims = ("point", *(f"dim_{i}" for i in range(1, 9)))
        return {name: layout_in_memory(self.path, name, x, dims[: x.ndim]) for name, x in self._values().items()}

    @property
    def skipped(self) -> Mapping[str, str]:
        """Why fields of the file are not among its arrays."""
        return {**super().skipped, **dict.fromkeys(self.mesh.cell_data, "lives on cells, but the rows are points")}

    def _values(self) -> dict[str, AnyArray]:
        if self.mesh.edge_index is not None:
            raise UnsupportedFormatError(
                f"{self.path}: has polyhedra, whose points are not read by themselves: scidata partition --kind points "
                "--entity cell takes the cells"
            )
        return {**self.mesh.point_data, "points": self.mesh.points}


class MeshioTopology(RawTopology):
    """A mesh that meshio read."""

    def load(self) -> Geometry:
        """Return points and cells."""
        assert isinstance(self.source, MeshioSource)
        mesh, corners = self.source.mesh, None
        if self.cells_are_rows and self.options.edges == "nodes":
            corners = _read(self.source.path, allow_external=self.source.allow_external, as_rows=False).corners()
        points = np.asarray(mesh.points, np.float64)
        return Geometry(points=points, cells=mesh.cells, edge_index=mesh.edge_index, corners=corners)


def _block(path: str, kind: str, data: Any) -> RawCells:
    """Return the cells of a block; polygons may be lists of their own lengths."""
    if kind.startswith("polygon"):
        rows = [np.asarray(row, np.int64) for row in data]
        offsets = bounds_of([len(row) for row in rows])
        nodes = np.concatenate([np.empty(0, np.int64), *rows])
        return RawCells(offsets=offsets, connectivity=nodes, cell_type=polygon_types(offsets))
    if kind not in _CODES:
        raise UnsupportedFormatError(
            f"{path}: has cells of type {kind!r}, which are not read; read are polygons and {', '.join(_CODES)}"
        )
    return RawCells.of_kind(np.asarray(data, np.int64), _CODES[kind])


def _check_regular(path: str) -> None:
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe waits for whoever writes to it
        raise RefusedError(f"{path}: not a regular file (a pipe, socket or device); name a file")


def _read(path: str, *, allow_external: bool, as_rows: bool = True) -> MeshData:
    if _is_vtk_xml(path):
        files = {}
        for part in parts_of(path):
            _check_regular(part)
            check_outside(part, allow_external=allow_external)
            with open(part, "rb") as file:
                files[part] = file.read()
        return read_files(path, files, as_rows=as_rows)
    _check_regular(path)
    if _is_for_vtk(path) and importlib.util.find_spec("vtkmodules") is not None:
        check_outside(path, allow_external=allow_external)
        return _read_by_vtk(path)
    if path.lower().endswith(tuple(MESHES_IN_HDF5)):
        check_outside(path, allow_external=allow_external)
        if not path.lower().endswith(".cgns"):
            return read_fluent(path, as_rows=as_rows)
        if is_cgns(path):
            return read_cgns(path, as_rows=as_rows)
    if has_faces(path):
        check_outside(path, allow_external=allow_external)
        return read_with_faces(path, as_rows=as_rows)
    needs = f"{path}: is no Zarr, HDF5 or NetCDF; other mesh formats need meshio"
    meshio: Any = optional_module("meshio", needs, "meshio")
    check_outside(path, allow_external=allow_external)
    apart = os.path.splitext(path)[1].lower() in _COUNTED
    try:
        printed = io.StringIO()  # its reasons, before it ends the program
        # meshio may take text for a count at first
        with np.errstate(over="ignore"), contextlib.redirect_stdout(printed):
            of_obj = path.lower().endswith(".obj")
            mesh = _read_apart(path) if apart else _read_obj(path, meshio) if of_obj else meshio.read(path)
    except (UnsupportedFormatError, CorruptDataError):
        raise
    except (Exception, SystemExit) as e:  # readers raise nearly anything, and some end the program
        why = " ".join(printed.getvalue().split()) if isinstance(e, SystemExit) else e
        remedy = (
            "save it as .vtp (PolyData), or install vtk (extra [vtk]), which reads it"
            if "POLYDATA" in str(why)
            else "convert it"
        )
        raise UnsupportedFormatError(
            f"{path}: meshio cannot read it: {why}; {remedy}, or write the plain layout"
        ) from e
    points = np.asarray(mesh.points)
    if points.ndim != 2 or points.shape[1] not in (2, 3):
        raise CorruptDataError(f"{path}: has points of shape {points.shape}, but (N, 2) or (N, 3) was expected")
    return MeshData(  # the blocks of cells and of their fields joined
        points=points,
        cells=join_cells([_block(path, block.type, block.data) for block in mesh.cells]),
        point_data={name: np.asarray(values) for name, values in mesh.point_data.items()},
        cell_data={
            name: np.concatenate([np.asarray(b) for b in blocks]) if blocks else np.empty(0)
            for name, blocks in mesh.cell_data.items()
        },
    )


def read_polyhedra(path: str, region: str | None = None) -> MeshData | None:
    """Return the cells of a file, or case, with their faces where there are polyhedra; None of other formats."""
    if is_case(path):
        return FoamSource(path, region).mesh()
    if not (_is_vtk_xml(path) or path.lower().endswith(tuple(MESHES_IN_HDF5)) or has_faces(path)):
        return None
    return _read(path, allow_external=False, as_rows=False)


def _read_obj(path: str, meshio: Any) -> Any:
    """Read OBJ; its normals and textures, which are of faces' corners, only if all go by their points' numbers."""
    with open(path, "rb") as file:
        lines = [line.split() for line in file]
    num = {kind: sum(line[:1] == [kind] for line in lines) for kind in (b"v", b"vn", b"vt")}
    corners = [corner.split(b"/") for line in lines if line[:1] == [b"f"] for corner in line[1:]]
    if {num[b"vn"], num[b"vt"]} <= {0, num[b"v"]} and all({*each} <= {each[0], b""} for each in corners):
        return meshio.read(path)
    kept = [[word.split(b"/")[0] for word in line] for line in lines if line[:1] in ([b"v"], [b"f"], [b"g"])]
    with tempfile.NamedTemporaryFile(suffix=".obj") as file:
        file.writelines(b" ".join(line) + b"\n" for line in kept)
        file.flush()
        return meshio.read(file.name)


def _is_for_vtk(path: str) -> bool:
    """Whether a file is legacy VTK with binary arrays, or polygons as text; grids as text are meshio's."""
    if not path.lower().endswith(".vtk"):
        return False
    with open(path, "rb") as file:
        lines = file.read(_HEAD).split(b"\n", 3)
    return len(lines) > 3 and (
        lines[2].strip().upper() == b"BINARY" or re.match(rb"\s*DATASET\s+POLYDATA\b", lines[3], re.I) is not None
    )


def _read_by_vtk(path: str) -> MeshData:
    """Read a file by VTK; it comes here as VTP or VTU."""
    try:
        mesh: MeshData = _read_apart(path, "vtk")
    except (ValueError, OSError) as e:
        if isinstance(e, UnsupportedFormatError | CorruptDataError):
            raise
        raise UnsupportedFormatError(f"{path}: VTK cannot read it: {e}; convert it, or write the plain layout") from e
    if mesh.cells is None:
        raise UnsupportedFormatError(f"{path}: has points without cells, which are read of .vtp; save it as that")
    return mesh


def _read_apart(path: str, package: str = "meshio") -> Any:
    """Read a file in a process of its own, which a damaged count cannot hold for longer than its size explains."""
    seconds = _LEAST_SECONDS + os.path.getsize(path) // _BYTES_A_SECOND
    with tempfile.TemporaryDirectory(prefix="scidata-meshio-") as folder:
        worker = os.path.join(os.path.dirname(__file__), "meshio_worker.py")
        # -P: the worker's folder, which has a meshio.py too, is not searched for modules
        command = [sys.executable, "-P", worker, os.path.abspath(path), folder, str(seconds), package]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if os.path.exists(error := os.path.join(folder, "error")):
            with open(error, encoding="utf-8") as file:
                raise ValueError(file.read())
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise TimeoutError(f"it was not through after {seconds} s of processor time: a count in it is damaged")
        if done.returncode:
            raise ChildProcessError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        for suffix in VTK_SUFFIXES if package == "vtk" else ():
            if os.path.exists(written := f"{folder}/mesh{suffix}"):
                with open(written, "rb") as file:
                    return read_vtk(path, file.read(), suffix)
        with open(os.path.join(folder, "mesh"), "rb") as file:  # which the worker wrote, not whoever made the mesh
            return pickle.load(file)


def open_topology(
    path: str, options: Options, kind: str | None = None, *, entity: str | None = None, allow_external: bool = False
) -> MeshioTopology:
    """Describe the mesh of a file, or, where it is VTP, the cloud; reads all of it. Polyhedra need ``entity="cell"``.

    Raises FieldMismatchError: it is not of the kind that is asked for.
    Raises MissingDependencyError, UnsupportedFormatError: meshio is not installed, or cannot read the file; or it has
    polyhedra, and rows are to be its nodes.
    Raises RefusedError: the file leads out of its folder, and ``allow_external`` is not set; or it declares XML
    entities.
    """
    source = MeshioSource(path, allow_external=allow_external)
    if is_results(path):
        raise UnsupportedFormatError(f"{path}: has fields alone; name the mesh's file: mesh='….cas.h5' (--mesh)")
    if options.points is not None:
        raise ConfigError(f"{path}: points= names arrays of Zarr, HDF5 and NetCDF; this file has its own: leave it out")
    is_cloud = source.format == "vtp points"
    entity_of = {"point": "node", "cell": "cell"}
    num_points, sizes = len(source.mesh.points), {}
    by_faces = source.mesh.edge_index is not None
    if is_cloud:
        check_cloud(path, kind, options)
        entity_of["point"] = "node" if made_into_graph(options) else "point"
        sizes = {entity_of["point"]: num_points}
    elif kind not in (None, "mesh"):
        raise FieldMismatchError(f"{path}: has cells, which make it a mesh, not {kind!r}; say kind='mesh', or nothing")
    elif by_faces and entity != "cell":
        raise UnsupportedFormatError(
            f"{path}: has polyhedra, whose nodes are not joined; say entity='cell' (--entity cell) for its cells as "
            f"rows, joined across faces; or {FOR_POLYHEDRA.partition(', or,')[0]}"
        )
    elif by_faces:
        sizes = {"cell": num_points}
    else:
        sizes = {"node": num_points, "cell": 0 if source.mesh.cells is None else source.mesh.cells.num_cells}
    fields = {}
    for full, layout in source.arrays.items():
        group, _, base = full.partition("/")
        name = f"{entity_of[group]}/{base}"
        fields[name] = field_of(source, layout, entity_of[group], 0, options, name=name)
    return MeshioTopology(
        source=source,
        options=options,
        kind="mesh" if not is_cloud else "graph" if made_into_graph(options) else "points",
        sizes=sizes,
        fields=fields,
        left_out=source.mesh.left_out,
        cells_are_rows=by_faces,
    )


def check_cloud(path: str, kind: str | None, options: Options) -> None:
    """Refuse options that need cells, or edges, where there are points alone."""
    if kind == "mesh" or options.edges == "cells" or (kind == "graph" and not made_into_graph(options)):
        asked = f"kind={kind!r}" if kind in ("mesh", "graph") else f"edges={options.edges!r}"
        raise FieldMismatchError(
            f"{path}: has points without polygons, which make it a cloud, but {asked} was asked for; say "
            "kind='points', or make edges with edges='knn:8' or 'radius:...'"
        )
