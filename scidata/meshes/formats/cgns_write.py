"""CGNS, added to: fields of nodes and cells as solutions of the zones of a file that is HDF5.

Source: the Standard Interface Data Structures, and the CGNS library's layout of nodes in HDF5.
"""

from __future__ import annotations

from collections.abc import Mapping

import h5py
import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, IntArray
from scidata.errors import ConfigError, RefusedError, UnsupportedFormatError
from scidata.meshes.formats.cgns import read_zones

_KINDS = {"f4": "R4", "f8": "R8", "i4": "I4", "i8": "I8"}
_MOST_LETTERS = 32


def add_to_cgns(path: str, target: str, point_data: Mapping[str, AnyArray], cell_data: Mapping[str, AnyArray]) -> None:
    """Add fields to ``target``, a copy of the file ``path``: ``(num_rows,)``, or a solution array a component.

    Those of several components get ``X``, ``Y``, ``Z`` behind their names, or ``_0``, ``_1``, ... They go into
    the solution that has one of the name, else the first of the place, else a new ``ScidataVertex`` or
    ``ScidataCellCenter``.

    Raises UnsupportedFormatError: ADF, or zones that count other elements as cells. Raises RefusedError: links.
    """
    if not h5py.is_hdf5(path):
        raise UnsupportedFormatError(f"{path}: is ADF, to which nothing is added; convert it by adf2hdf")
    zones, _, new = read_zones(path, {})
    at_node, at_cell = (bounds_of(n) for n in ([len(z.points) for z in zones], [z.cells.num_cells for z in zones]))
    with h5py.File(target, "r+") as h5:
        for number, zone in enumerate(zones):
            if any(isinstance(h5.get(name, getlink=True), h5py.ExternalLink | h5py.SoftLink) or " link" in h5[name]
                   for name in (zone.name.partition("/")[0], zone.name)):  # fmt: skip
                raise RefusedError(f"{zone.where}: is a link, and is not written through; put the zone into the file")
            sizes = np.ravel(h5[zone.name][" data"][()]).astype(np.int64).reshape(3, -1)
            if cell_data and zone.cells.num_cells != int(np.prod(sizes[1])):
                raise UnsupportedFormatError(f"{zone.where}: counts its boundaries as cells; give create(format='vtu')")
            for location, fields, rows, shape in (
                ("Vertex", point_data, new[at_node[number] : at_node[number + 1]], sizes[0]),
                ("CellCenter", cell_data, np.arange(at_cell[number], at_cell[number + 1]), sizes[1]),
            ):
                for name, values in fields.items():
                    _put(h5[zone.name], location, name, values[rows], shape)


def _put(zone: h5py.Group, location: str, name: str, values: AnyArray, shape: IntArray) -> None:
    if values.ndim > 1 and values.shape[1] > 1:
        ends = "XYZ" if values.shape[1] == 3 else [f"_{i}" for i in range(values.shape[1])]
        for end, column in zip(ends, values.T, strict=True):
            _put(zone, location, name + end, column, shape)
        return
    if len(name) > _MOST_LETTERS or "/" in name:
        raise ConfigError(
            f"{zone.file.filename}: {name!r}: names in CGNS have {_MOST_LETTERS} letters at most, and no /"
        )
    code = values.dtype.str[1:]
    if code not in _KINDS:
        values = values.astype(np.float32 if code == "f2" else np.int64 if code in ("u4", "u8") else np.int32)
    # readers may take a second solution of a location for another time
    solutions = [each for each in zone.values() if _is_solution(each, location)]
    solution = next((each for each in solutions if name in each), solutions[0] if solutions else None)
    if solution is None:
        solution = _node(zone, f"Scidata{location}", "FlowSolution_t")
        _node(solution, "GridLocation", "GridLocation_t", np.frombuffer(location.encode(), "i1"))
    if name in solution:
        del solution[name]
    _node(solution, name, "DataArray_t", values.reshape(shape[::-1]))


def _is_solution(node: h5py.Group, location: str) -> bool:
    """Whether a node is a solution of a location that has all of a zone's own nodes or cells, and no others."""
    if node.attrs.get("label", b"") != b"FlowSolution_t" or {"Rind", "PointList", "PointRange"} & {*node}:
        return False
    there = node["GridLocation/ data"][()].astype("u1").tobytes().decode() if "GridLocation" in node else "Vertex"
    return there.strip(" \0") == location


def _node(parent: h5py.Group, name: str, label: str, values: AnyArray | None = None) -> h5py.Group:
    node = parent.create_group(name, track_order=True)
    kind = "MT" if values is None else "C1" if values.dtype == np.int8 else _KINDS[values.dtype.str[1:]]
    for key, text, size in (("name", name, 33), ("label", label, 33), ("type", kind, 3)):
        node.attrs.create(key, np.bytes_(text.encode()), dtype=h5py.string_dtype("ascii", size))
    node.attrs["flags"] = np.array([1], "i4")
    if values is not None:
        node[" data"] = values
    return node
