"""VTKHDF files of type UnstructuredGrid or PolyData: pieces, which are joined, over time where the mesh stays as it is.

The format: https://docs.vtk.org/en/latest/vtk_file_formats/vtkhdf_file_format. Points that pieces share are not
merged: each piece has its own. PolyData is a mesh of polygons and strips' triangles, or a cloud, as VTP is. Ghost cells
and meshes that change in time are refused, polyhedra over time, too; else these are read whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import h5py
import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, ArrayLayout, ByteArray, FloatArray, IntArray, Source
from scidata.errors import CorruptDataError, UnsupportedFormatError, check_known
from scidata.meshes.formats.arrays import (
    GHOSTS,
    TRIANGLE,
    as_indices,
    at_once,
    check_ghosts,
    join_cells,
    nodes_of_piece,
    polygon_types,
)
from scidata.meshes.formats.base import (
    ArrayReader,
    Blocks,
    Box,
    Options,
    RawField,
    RawTopology,
    Reader,
    base_name,
    field_of,
    read_values,
)
from scidata.meshes.formats.mesh_data import MeshData
from scidata.meshes.formats.points import made_into_graph
from scidata.meshes.formats.vtk_pieces import faces_by_number, is_surface, polyhedra_as_rows, triangles_of_strips
from scidata.meshes.geometry import Geometry, RawCells
from scidata.meshes.order.cells import FOR_POLYHEDRA, POLYHEDRON
from scidata.meshes.order.ids import blocks
from scidata.meshes.order.polyhedra import CellFaces
from scidata.sources import open_source
from scidata.sources.hdf5.walk import attribute_of, damage_as_corrupt_data, open_h5, plain_value
from scidata.sources.kinds import VTKHDF_ROOT as _ROOT

_LISTS = {"Verts": "Vertices/", "Lines": "Lines/", "Polys": "Polygons/", "Strips": "Strips/"}  # VTP's names, and these
#: Faces of each cell, faces of each polyhedron, nodes of each face.
_OF_FACES = "PolyhedronOffsets", "PolyhedronToFaces", "FaceOffsets", "FaceConnectivity"


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """A list of cells: the group that has it, and how many cells and connectivity ids each piece has in it."""

    group: str
    cells: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class VTKHDFTopology(RawTopology):
    """A grid, surface or cloud, by the points of each piece and the lists of cells."""

    piece_points: tuple[int, ...]
    lists: tuple[_Cells, ...]

    def load(self) -> Geometry:
        """Read points and cells, joining pieces."""
        points = next(self._points(max(sum(self.piece_points), 1)))
        if self.kind != "mesh":
            return Geometry(points=points)
        return Geometry(points=points, cells=join_cells(list(self._cells(max(self.sizes["cell"], 1)))))

    def by_blocks(self) -> Blocks:
        """Describe how points and cells are read some at a time, of one piece after the other."""
        return Blocks(points=self._points, cells=self._cells if self.kind == "mesh" else None)

    def _points(self, num: int) -> Iterator[FloatArray]:
        layout, num_points = self.source.arrays[f"{_ROOT}/Points"], sum(self.piece_points)
        for rows in blocks(num_points, at_once(layout, num)) if num_points else [slice(0, 0)]:
            yield self._read("Points", rows).astype(np.float64)

    def _types(self) -> ByteArray:
        """Read the types of all cells (of a surface there are none), and look for what is not read."""
        is_grid = not self.lists[0].group
        types = self._read("Types")[: sum(self.lists[0].cells)].astype(np.uint8) if is_grid else np.empty(0, np.uint8)
        if (types == POLYHEDRON).any() and not lists_faces(self.source):
            row = int(np.flatnonzero(types == POLYHEDRON)[0])
            raise UnsupportedFormatError(
                f"{self.source.path}: cell {row} is a polyhedron, as are {int((types == POLYHEDRON).sum())} of "
                f"{len(types)} cells, which are not read; {FOR_POLYHEDRA}"
            )
        for group in ("CellData", "PointData"):
            name = f"{_ROOT}/{group}/{GHOSTS}"
            if name in self.source.arrays and 0 not in self.source.arrays[name].shape:
                values = read_values(self.source, name, self.options)
                check_ghosts(self.source.path, name, values, of_cells=group == "CellData")
        return types

    def faces(self, types: ByteArray) -> list[CellFaces]:
        """Read the faces of the polyhedra of each piece; ``types``: those of all cells."""
        names = "NumberOfPolyhedronToFaceIds", "NumberOfFaces", "NumberOfFaceConnectivityIds"
        counts = [_counts(self.source, name, self.options).tolist() for name in names]
        found, firsts, first_point = list[CellFaces](), [0] * 4, 0
        pieces = zip(self.lists[0].cells, self.piece_points, *counts, strict=True)
        for piece, (num_cells, num_points, num, num_faces, num_ids) in enumerate(pieces):
            lengths, where = (num_cells + 1, num, num_faces + 1, num_ids), f"{self.source.path}: piece {piece}"
            each = zip(_OF_FACES, firsts, lengths, strict=True)
            of_cell, face, of_face, nodes = (self._indices(name, slice(at, at + length)) for name, at, length in each)
            if (have := (len(of_cell), len(face), len(of_face), len(nodes))) != lengths:
                raise CorruptDataError(f"{where}: {', '.join(_OF_FACES)} have {have} entries, but {lengths} were said")
            first_cell = firsts[0] - piece
            polyhedra = np.flatnonzero(types[first_cell : first_cell + num_cells] == POLYHEDRON)
            sizes, nodes, of_each = faces_by_number(where, of_cell, face, of_face, nodes, polyhedra)
            nodes = nodes_of_piece(nodes, num_points, first_point)
            found.append((sizes, nodes, np.repeat(polyhedra + first_cell, of_each)))
            firsts, first_point = [a + b for a, b in zip(firsts, lengths, strict=True)], first_point + num_points
        return found

    def _cells(self, num: int) -> Iterator[RawCells]:
        """Read at most ``num`` cells at a time; each piece has offsets from 0 on, one more than cells."""
        types, firsts = self._types(), [(bounds_of(each.cells), bounds_of(each.ids)) for each in self.lists]
        for piece, first_point in enumerate(bounds_of(self.piece_points)[:-1].tolist()):
            for each, (cells, ids) in zip(self.lists, firsts, strict=True):
                first = int(cells[piece]), int(ids[piece])
                yield from self._cells_of(each, piece, first_point, first, num, types)

    def _cells_of(
        self, each: _Cells, piece: int, first_point: int, first: tuple[int, int], num: int, types: ByteArray
    ) -> Iterator[RawCells]:
        group, num_cells, num_ids = each.group, each.cells[piece], each.ids[piece]
        first_cell, first_id = first
        num = at_once(self.source.arrays[f"{_ROOT}/{group}Connectivity"], num, num_rows=sum(each.cells))
        for rows in blocks(num_cells, num) if num_cells else [slice(0, 0)]:
            row = first_cell + piece + rows.start
            offsets = self._indices(f"{group}Offsets", slice(row, row + rows.stop - rows.start + 1))
            ends = [*offsets[: rows.start == 0], *offsets[len(offsets) - (rows.stop == num_cells) :]]
            right = [0] * (rows.start == 0) + [num_ids] * (rows.stop == num_cells)
            if ends != right or (np.diff(offsets) < 0).any() or offsets[0] < 0 or offsets[-1] > num_ids:
                row -= rows.start
                every = self._indices(f"{group}Offsets", slice(row, row + num_cells + 1))
                raise CorruptDataError(
                    f"{self.source.path}: field 'VTKHDF/{group}Offsets': piece {piece} must have {num_cells + 1} "
                    f"offsets that rise from 0 to {num_ids}; found {len(every)}, from {every[:1].tolist()} to "
                    f"{every[-1:].tolist()}"
                )
            here = slice(first_id + int(offsets[0]), first_id + int(offsets[-1]))
            nodes, offsets = self._indices(f"{group}Connectivity", here), offsets - offsets[0]
            nodes = nodes_of_piece(nodes, self.piece_points[piece], first_point)
            if group == _LISTS["Strips"]:
                yield RawCells.of_kind(triangles_of_strips(np.diff(offsets), nodes)[0], TRIANGLE)
                continue
            of_list = polygon_types(offsets) if group else types[first_cell + rows.start : first_cell + rows.stop]
            yield RawCells(offsets=offsets, connectivity=nodes, cell_type=of_list)

    def _read(self, name: str, rows: slice = slice(None)) -> AnyArray:
        return read_values(self.source, f"{_ROOT}/{name}", self.options, decode=False, box=(rows,))

    def _indices(self, name: str, rows: slice) -> IntArray:
        return as_indices(self._read(name, rows), f"{self.source.path}: field 'VTKHDF/{name}'")


@dataclass(frozen=True, kw_only=True)
class StepsReader:
    """Reads ``(time, rows, …)`` of an array in which the rows of one step follow those of another."""

    array: ArrayReader
    first_rows: tuple[int, ...]
    num_rows: int

    def __call__(self, box: Box) -> AnyArray:
        """Return the values of a box."""
        rows = range(*box[1].indices(self.num_rows))
        steps = self.first_rows[box[0]]
        tail = [len(range(*s.indices(n))) for s, n in zip(box[2:], self.array.layout.shape[1:], strict=True)]
        out = np.empty((len(steps), len(rows), *tail), self.array.dtype)
        for values, first in zip(out, steps, strict=True):
            values[...] = self.array((slice(first + rows.start, first + rows.stop, rows.step), *box[2:]))
        return out


@dataclass(frozen=True, kw_only=True)
class RowsReader:
    """Reads an array of cells by triangle, ``rows`` being the cell of each."""

    array: Reader
    rows: IntArray
    dim: int

    def __call__(self, box: Box) -> AnyArray:
        """Return the values of a box."""
        rows = self.rows[box[self.dim]]
        cells = slice(int(rows.min()), int(rows.max()) + 1) if len(rows) else slice(0, 0)
        return self.array((*box[: self.dim], cells, *box[self.dim + 1 :])).take(rows - cells.start, self.dim)


def open_topology(source: Source, options: Options) -> VTKHDFTopology:
    """Describe the grid of a file.

    Raises UnsupportedFormatError: another type of VTKHDF, or a mesh that changes in time.
    Raises UnknownNameError: a part of the format is not there.
    """
    groups, arrays = ("",) if _type_of(source) == "UnstructuredGrid" else tuple(_LISTS.values()), source.arrays
    names = [f"{group}{name}" for group in groups for name in ("NumberOfCells", "NumberOfConnectivityIds")]
    needed = [*names, *(f"{group}{name}" for group in groups for name in ("Connectivity", "Offsets"))]
    needed += ["NumberOfPoints", "Points", *([] if groups[0] else ["Types"])]
    check_known(f"{source.path}: no", [f"{_ROOT}/{name}" for name in needed], arrays, ", which its type has")
    counts = [_counts(source, name, options) for name in ("NumberOfPoints", *names)]
    if len({len(c) for c in counts}) != 1:
        raise CorruptDataError(f"{source.path}: the NumberOf… arrays have {[len(c) for c in counts]} pieces")
    steps, pieces = _steps(source, options, counts)
    points, *rest = (tuple(c[pieces].tolist()) for c in counts)
    lists = [_Cells(group=g, cells=c, ids=i) for g, c, i in zip(groups, rest[::2], rest[1::2], strict=True)]
    totals = [("", "points", sum(points), "Points")]
    for each in lists:
        num = sum(each.cells)  # each piece has one offset more than cells
        totals += [(each.group, "cells", num, "Types")] if not each.group else []
        totals += [(each.group, "connectivity ids", sum(each.ids), "Connectivity")]
        totals += [(each.group, "offsets", num + len(points), "Offsets")]
    for group, counted, total, name in totals:
        said = arrays[f"{_ROOT}/{group}{name}"].shape
        if (found := said[0]) < total or len(said) > 1 + (name == "Points"):
            raise CorruptDataError(
                f"{source.path}: field '{_ROOT}/{group}{name}' has {found} rows, but the pieces have {total} {counted}"
                f" (shape {said})"
            )
    kind, entity, triangles = "mesh", "node", None
    if groups[0]:
        num_cells = {name: sum(each.cells) for name, each in zip(_LISTS, lists, strict=True)}
        if not is_surface(source.path, num_cells):
            kind, entity = ("graph", "node") if made_into_graph(options) else ("points", "point")
        lists = lists[2:]
        triangles = _triangles_of(source, lists, options) if num_cells["Strips"] else None
    sizes = {entity: sum(points), "cell": sum(sum(each.cells) for each in lists)}
    fields, left_out = _fields(source, options, sizes, steps)
    if kind != "mesh":
        del sizes["cell"]
        of_cells = [name for name, field in fields.items() if field.entity == "cell"]
        left_out |= {base_name(name): "lives on vertices; write it on the points" for name in of_cells}
        fields = {name: field for name, field in fields.items() if name not in of_cells}
    elif triangles is not None:
        sizes["cell"] = len(triangles)
        for name, field in fields.items():
            if field.entity == "cell":
                dim, shape = field.entity_dim, list(field.shape)
                shape[dim] = len(triangles)
                reader = RowsReader(array=field.reader, rows=triangles, dim=dim)
                fields[name] = replace(field, shape=tuple(shape), reader=reader)
    return VTKHDFTopology(
        source=source,
        options=options,
        kind=kind,
        sizes=sizes,
        not_fields=frozenset(name for name in arrays if name.startswith(f"{_ROOT}/")),
        fields=fields,
        left_out=left_out,
        piece_points=points,
        lists=tuple(lists),
    )


def lists_faces(source: Source) -> bool:
    """Whether a VTKHDF file has polyhedra."""
    layout = source.arrays.get(f"{_ROOT}/PolyhedronToFaces")
    return layout is not None and layout.shape[0] > 0


def has_faces(path: str) -> bool:
    """Whether a file is VTKHDF with polyhedra."""
    return os.path.isfile(path) and h5py.is_hdf5(path) and lists_faces(open_source(path))


def read_with_faces(path: str, *, as_rows: bool) -> MeshData:
    """Return the grid of a file that has polyhedra: its cells as rows, or as they are, with their faces.

    Raises UnsupportedFormatError: it has steps in time, or is a surface.
    """
    topology = open_topology(source := open_source(path), Options())
    if topology.lists[0].group or any(name.startswith(f"{_ROOT}/Steps/") for name in source.arrays):
        raise UnsupportedFormatError(f"{path}: has polyhedra in a surface, or steps in time; write one grid per step")
    points = next(topology._points(max(topology.sizes["node"], 1)))
    cells = join_cells(list(topology._cells(max(topology.sizes["cell"], 1))))
    faces = topology.faces(cells.cell_type)
    if not as_rows:
        return MeshData(points=points, cells=cells, point_data={}, cell_data={}, faces=faces)
    every = {base_name(name): each for name, each in (topology.fields or {}).items()}
    of_cells = {name: each.read() for name, each in every.items() if each.entity == "cell"}
    return polyhedra_as_rows(path, points, cells, faces, every.keys() - of_cells, of_cells, topology.left_out)


def _triangles_of(source: Source, lists: Sequence[_Cells], options: Options) -> IntArray:
    """Return the row of cell data of each polygon and each strip's triangle, in their order."""
    polygons, strips = lists
    offsets = as_indices(read_values(source, f"{_ROOT}/{strips.group}Offsets", options), f"{source.path}: strips")
    rows, first, at = [], 0, 0
    for num_polygons, num, num_ids in zip(polygons.cells, strips.cells, strips.ids, strict=True):
        own = np.maximum.accumulate(offsets[at : at + num + 1]).clip(0, num_ids)  # wrong ones raise with the cells
        counts = np.maximum(np.diff(own) - 2, 0)
        rows += [np.arange(num_polygons) + first, np.repeat(np.arange(num) + first + num_polygons, counts)]
        first, at = first + num_polygons + num, at + num + 1
    return np.concatenate(rows)


def _type_of(source: Source) -> str:
    """Read the type among the group's attributes, which sources do not give."""
    with open_h5(source.path, guarded=True) as h5, damage_as_corrupt_data(f"{source.path}: attributes of {_ROOT}"):
        root = h5[_ROOT]
        name = plain_value(attribute_of(root, "Type")) if "Type" in root.attrs else ""
        version = np.asarray(attribute_of(root, "Version") if "Version" in root.attrs else ()).tolist()
    if name not in ("UnstructuredGrid", "PolyData") or not version:
        raise UnsupportedFormatError(
            f"{source.path}: VTKHDF of type {name!r} and version {version}; UnstructuredGrid and PolyData are read: "
            "convert it (ParaView: Append Datasets), or write the plain layout"
        )
    return str(name)


def _counts(source: Source, name: str, options: Options) -> IntArray:
    counts = as_indices(read_values(source, f"{_ROOT}/{name}", options), f"{source.path}: field '{_ROOT}/{name}'")
    if counts.ndim != 1 or (counts.size and counts.min() < 0):
        raise CorruptDataError(f"{source.path}: field '{_ROOT}/{name}' must hold one count per piece, not {counts}")
    return counts


def _steps(source: Source, options: Options, counts: list[IntArray]) -> tuple[int | None, slice]:
    """Return the number of time steps (None without time), and which pieces are those of the mesh."""
    name = f"{_ROOT}/Steps/Values"
    if name not in source.arrays:
        return None, slice(None)
    num_steps = source.arrays[name].shape[0]
    offsets = _steps_array(source, "PartOffsets", options, default=0)
    parts = _steps_array(source, "NumberOfParts", options, default=len(counts[0]))
    # a step may count its pieces anew, as long as they are as many, as large, and lie at the same place
    meshes = {
        tuple(tuple(c[first : first + num].tolist()) for c in counts)
        for first, num in zip(offsets.tolist(), parts.tolist(), strict=False)
    }
    moving = [
        n
        for n in ("PointOffsets", "CellOffsets", "ConnectivityIdOffsets")
        if _steps_array(source, n, options, default=0).any()
    ]
    if moving or len(meshes) > 1:
        raise UnsupportedFormatError(
            f"{source.path}: the mesh changes from step to step ({', '.join(moving) or 'NumberOfParts'}); "
            "write one file per step, each of which is then a sample"
        )
    return num_steps, slice(0, int(parts[0])) if num_steps else slice(None)


def _steps_array(source: Source, name: str, options: Options, *, default: int) -> IntArray:
    full = f"{_ROOT}/Steps/{name}"
    num_steps = source.arrays[f"{_ROOT}/Steps/Values"].shape[0]
    if full not in source.arrays:
        return np.full(num_steps, default, np.int64)
    values = as_indices(read_values(source, full, options), f"{source.path}: field {full!r}")
    if values.shape[:1] != (num_steps,) or (values.size and values.min() < 0):
        raise CorruptDataError(
            f"{source.path}: field {full!r} has shape {values.shape}, but one value (0 or more) for each of "
            f"{num_steps} steps was expected"
        )
    return values


def _fields(
    source: Source, options: Options, sizes: dict[str, int], steps: int | None
) -> tuple[dict[str, RawField], dict[str, str]]:
    found: dict[str, RawField] = {}
    left_out: dict[str, str] = {}
    for path, layout in source.arrays.items():
        parts = path.split("/")
        if len(parts) != 3 or parts[0] != _ROOT or parts[1] not in ("PointData", "CellData", "FieldData"):
            continue
        if parts[1] == "FieldData" or parts[2] == GHOSTS:
            left_out[parts[2]] = "lives on neither points nor cells"
            continue
        entity = next(iter(sizes)) if parts[1] == "PointData" else "cell"
        field = _field(source, layout, entity, sizes[entity], steps, options, f"{entity}/{parts[2]}")
        if isinstance(field, str):
            left_out[parts[2]] = field
        else:
            found[field.name] = field
    return found, left_out


def _field(
    source: Source, layout: ArrayLayout, entity: str, size: int, steps: int | None, options: Options, name: str
) -> RawField | str:
    if not layout.shape or layout.shape[0] < size:
        raise CorruptDataError(
            f"{source.path}: field {layout.name!r} has shape {layout.shape}, but {size} rows were expected, "
            f"one per {entity}"
        )
    tail = layout.shape[1:]
    tail_dims = tuple(f"dim_{i + 1}" for i in range(len(tail)))
    group, _, base = layout.name.rpartition("/")
    offsets = f"{_ROOT}/Steps/{group.rpartition('/')[2]}Offsets/{base}"
    if steps is None:
        if layout.shape[0] != size:
            return f"has {layout.shape[0]} rows, but there are {size} {entity}s"
        return field_of(source, layout, entity, 0, options, name=name)
    if offsets in source.arrays:
        first = as_indices(read_values(source, offsets, options), f"{source.path}: {offsets!r}")
        first = first[:-1] if len(first) == steps + 1 else first  # VTK 9.7 writes the end, too
    else:
        first = np.zeros(steps, np.int64) if layout.shape[0] == size else np.arange(steps, dtype=np.int64) * size
    if len(first) != steps or (steps and (first.min() < 0 or first.max() + size > layout.shape[0])):
        raise CorruptDataError(
            f"{source.path}: field {layout.name!r} has {layout.shape[0]} rows, but its {len(first)} offsets and "
            f"{steps} steps of {size} {entity}s need {int(first.max(initial=0)) + size}"
        )
    array = ArrayReader(source=source, layout=layout, allow_missing=options.allow_missing)
    return RawField(
        name=name,
        entity=entity,
        dims=("time", entity, *tail_dims),
        shape=(steps, size, *tail),
        entity_dim=1,
        dtype=array.dtype,
        reader=StepsReader(array=array, first_rows=tuple(first.tolist()), num_rows=size),
        attributes=layout.attributes,
    )
