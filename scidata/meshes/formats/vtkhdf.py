"""VTKHDF files of type UnstructuredGrid: one or more pieces, which are joined, over time where the mesh stays as it is.

The format: https://docs.vtk.org/en/latest/vtk_file_formats/vtkhdf_file_format. Points that pieces share are not
merged: each piece has its own. Polyhedra, ghost cells and meshes that change in time are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scidata.core.types import AnyArray, ArrayLayout, ByteArray, FloatArray, IntArray, Source
from scidata.errors import CorruptDataError, UnsupportedFormatError, check_known
from scidata.meshes.formats.arrays import GHOSTS, as_indices, at_once, check_ghosts, join_cells
from scidata.meshes.formats.base import (
    ArrayReader,
    Blocks,
    Box,
    Options,
    RawField,
    RawTopology,
    field_of,
    read_values,
)
from scidata.meshes.geometry import Geometry, RawCells
from scidata.meshes.order.cells import FOR_POLYHEDRA, POLYHEDRON
from scidata.meshes.order.ids import blocks
from scidata.sources.hdf5.walk import attribute_of, damage_as_corrupt_data, open_h5, plain_value
from scidata.sources.kinds import VTKHDF_ROOT as _ROOT

_NEEDED = ("NumberOfPoints", "NumberOfCells", "NumberOfConnectivityIds", "Points", "Connectivity", "Offsets", "Types")


@dataclass(frozen=True, kw_only=True)
class VTKHDFTopology(RawTopology):
    """An unstructured grid. The three tuples give the points, cells and connectivity of each piece."""

    piece_points: tuple[int, ...]
    piece_cells: tuple[int, ...]
    piece_ids: tuple[int, ...]

    def load(self) -> Geometry:
        """Read points and cells, joining pieces."""
        return Geometry(points=self._points(), cells=join_cells(list(self._cells(max(self.sizes["cell"], 1)))))

    def by_blocks(self) -> Blocks:
        """Describe how points and cells are read some at a time, of one piece after the other."""
        return Blocks(points=self._points, cells=self._cells)

    def _points(self) -> FloatArray:
        return self._read("Points")[: sum(self.piece_points)].astype(np.float64)

    def _types(self) -> ByteArray:
        """Read the types of all cells, and look for what is not read."""
        types = self._read("Types")[: sum(self.piece_cells)].astype(np.uint8)
        if (types == POLYHEDRON).any():
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

    def _cells(self, num: int) -> Iterator[RawCells]:
        """Read at most ``num`` cells at a time; each piece has offsets from 0 on, one more than cells."""
        types = self._types()
        first_cell = first_id = first_point = 0
        num = at_once(self.source.arrays[f"{_ROOT}/Connectivity"], num, num_rows=self.sizes["cell"])
        for piece, num_cells in enumerate(self.piece_cells):
            num_ids = self.piece_ids[piece]
            for rows in blocks(num_cells, num) if num_cells else [slice(0, 0)]:
                row = first_cell + piece + rows.start
                offsets = self._indices("Offsets", slice(row, row + rows.stop - rows.start + 1))
                ends = [*offsets[: rows.start == 0], *offsets[len(offsets) - (rows.stop == num_cells) :]]
                right = [0] * (rows.start == 0) + [num_ids] * (rows.stop == num_cells)
                if ends != right or (np.diff(offsets) < 0).any() or offsets[0] < 0 or offsets[-1] > num_ids:
                    row -= rows.start
                    every = self._indices("Offsets", slice(row, row + num_cells + 1))
                    raise CorruptDataError(
                        f"{self.source.path}: field 'VTKHDF/Offsets': piece {piece} must have {num_cells + 1} offsets "
                        f"that rise from 0 to {num_ids}; found {len(every)}, from {every[:1].tolist()} to "
                        f"{every[-1:].tolist()}"
                    )
                here = slice(first_id + int(offsets[0]), first_id + int(offsets[-1]))
                yield RawCells(
                    offsets=offsets - offsets[0],
                    connectivity=self._indices("Connectivity", here) + first_point,
                    cell_type=types[first_cell + rows.start : first_cell + rows.stop],
                )
            first_cell, first_id = first_cell + num_cells, first_id + num_ids
            first_point += self.piece_points[piece]

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


def open_topology(source: Source, options: Options) -> VTKHDFTopology:
    """Describe the grid of a file.

    Raises
    ------
    UnsupportedFormatError
        Another type of VTKHDF, or a mesh that changes in time.
    UnknownNameError
        A part of the format is not there.
    """
    _check_type(source)
    arrays = source.arrays
    needed = [f"{_ROOT}/{name}" for name in _NEEDED]
    check_known(f"{source.path}: no", needed, arrays, ", which an UnstructuredGrid has")
    counts = [_counts(source, name, options) for name in _NEEDED[:3]]
    if len({len(c) for c in counts}) != 1:
        raise CorruptDataError(f"{source.path}: the three NumberOf… arrays have {[len(c) for c in counts]} pieces")
    steps, pieces = _steps(source, options, counts)
    points, cells, ids = (tuple(c[pieces].tolist()) for c in counts)
    num_offsets = sum(cells) + len(cells)  # each piece has one more than cells
    for counted, total, name in (
        ("points", sum(points), "Points"),
        ("cells", sum(cells), "Types"),
        ("connectivity ids", sum(ids), "Connectivity"),
        ("offsets", num_offsets, "Offsets"),
    ):
        if arrays[f"{_ROOT}/{name}"].shape[0] < total:
            raise CorruptDataError(
                f"{source.path}: field '{_ROOT}/{name}' has {arrays[f'{_ROOT}/{name}'].shape[0]} rows, but the pieces "
                f"have {total} {counted}"
            )
    sizes = {"node": sum(points), "cell": sum(cells)}
    fields, left_out = _fields(source, options, sizes, steps)
    return VTKHDFTopology(
        source=source,
        options=options,
        sizes=sizes,
        not_fields=frozenset(name for name in arrays if name.startswith(f"{_ROOT}/")),
        fields=fields,
        left_out=left_out,
        piece_points=points,
        piece_cells=cells,
        piece_ids=ids,
    )


def _check_type(source: Source) -> None:
    """Read the group's attributes, which sources do not give."""
    with open_h5(source.path, guarded=True) as h5, damage_as_corrupt_data(f"{source.path}: attributes of {_ROOT}"):
        root = h5[_ROOT]
        name = plain_value(attribute_of(root, "Type")) if "Type" in root.attrs else ""
        version = np.asarray(attribute_of(root, "Version") if "Version" in root.attrs else ()).tolist()
    if name != "UnstructuredGrid" or not version:
        raise UnsupportedFormatError(
            f"{source.path}: VTKHDF of type {name!r} and version {version}; only UnstructuredGrid is read: convert it "
            "with vtkUnstructuredGrid (ParaView: Append Datasets), or write the plain layout"
        )


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
        entity = "node" if parts[1] == "PointData" else "cell"
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
