"""A mesh that was read whole; of several files, connected at the points that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, BoolArray, IntArray
from scidata.errors import UnsupportedFormatError
from scidata.meshes.formats.arrays import DUPLICATE, GHOSTS
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import POLYHEDRON
from scidata.meshes.order.ids import ranges
from scidata.meshes.order.polyhedra import CellFaces, same_sets


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshData:
    """A mesh, or a cloud, all of which was read."""

    points: AnyArray  # ``(num_points, 2 or 3)``; of a grid with polyhedra its cells' centres
    cells: RawCells | None  # None of a cloud, and of a grid with polyhedra
    # point_data, cell_data: fields by name, one row for each point or cell
    point_data: Mapping[str, AnyArray]
    cell_data: Mapping[str, AnyArray]
    left_out: dict[str, str] = field(default_factory=dict)  # why fields of the file are not there
    # ``(2, num_edges)`` int64: cells that share a face, of a grid with polyhedra; else None
    edge_index: IntArray | None = None
    faces: Sequence[CellFaces] = ()  # of polyhedra among the cells, where these were asked for as they are

    # by VTK's group: of several files, of each point and cell the row that it became, -1 where it is a copy of none
    rows: Mapping[str, Sequence[IntArray]] = field(default_factory=dict)

    def corners(self) -> IntArray:
        """Return a node and a cell that has it, ``(2, num)``, of polyhedra by their faces, some more than once."""
        assert self.cells is not None
        own = np.diff(self.cells.offsets), self.cells.connectivity, np.arange(self.cells.num_cells)
        each = [(nodes, np.repeat(cell, sizes)) for sizes, nodes, cell in (own, *self.faces)]
        return np.concatenate(each, axis=1).astype(np.int64)


def marked(data: dict[str, AnyArray], num: int) -> dict[str, AnyArray]:
    """Return the fields of a piece with VTK's marks of copies, in place of those of VTK 6."""
    levels = data.pop("vtkGhostLevels", np.zeros(num))
    return {GHOSTS: (levels > 0).astype(np.uint8)} | data


def take_copies(data: dict[str, AnyArray]) -> BoolArray:
    """Say which rows are copies of those of other files; take the marks out."""
    marks = data[GHOSTS].astype(np.uint8)
    data[GHOSTS] = marks & ~np.uint8(DUPLICATE)
    return marks & DUPLICATE != 0


def of_faces(
    path: str, points: Sequence[AnyArray], faces: list[CellFaces], num_cells: int, ids: AnyArray | None = None
) -> MeshData:
    """Return the polyhedra of one or several parts by their faces; points of several parts are connected by ``ids``."""
    none = np.zeros(num_cells + 1, np.int64)
    cells = RawCells(offsets=none, connectivity=none[:0], cell_type=np.full(num_cells, POLYHEDRON, np.uint8))
    mesh = MeshData(points=np.concatenate(points), cells=cells, point_data={}, cell_data={})
    if len(points) > 1:
        first = bounds_of([*map(len, points)])
        marks = ({GHOSTS: np.zeros(num, np.uint8)} for num in (first[-1], num_cells))
        mesh, faces = connect(path, replace(mesh, point_data=next(marks), cell_data=next(marks)), faces, first, ids)
    return replace(mesh, faces=faces)


def connect(
    path: str, mesh: MeshData, faces: list[CellFaces], first: IntArray, ids: AnyArray | None
) -> tuple[MeshData, list[CellFaces]]:
    """Leave out the copies of cells, and the points of these alone; points of several files at one place become one.

    ``ids``: what says which points are one, in place of their positions. Of several, the values are those of the first
    that is not marked as a copy.
    """
    cells, num, of_file = mesh.cells, len(mesh.points), np.repeat(np.arange(len(first) - 1), np.diff(first))
    assert cells is not None
    of_points, of_cells = dict(mesh.point_data), dict(mesh.cell_data)
    is_copy, own = take_copies(of_points), ~take_copies(of_cells)
    keys = np.asarray(mesh.points.T if ids is None else ids[None])
    order = np.lexsort(keys)  # in each place the files in their order
    differs = np.insert((keys[:, order[1:]] != keys[:, order[:-1]]).any(axis=0), 0, True)
    begins, place = np.flatnonzero(differs), np.cumsum(differs) - 1
    twice = np.insert(of_file[order[1:]] == of_file[order[:-1]], 0, False) & ~differs
    unclear = np.bincount(place[twice], minlength=len(begins)) > 0
    unclear &= of_file[order[begins]] != of_file[order[np.append(begins[1:], num) - 1]]
    one = np.empty(num, np.int64)
    best = np.minimum.reduceat(order + num * is_copy[order], begins) % num
    one[order] = np.where(unclear[place], order, best[place])
    left_out = dict(mesh.left_out)
    if unclear.any():
        left_out[f"points at {int(unclear.sum())} places"] = (
            "several of one file lie there, so that they are not joined with those of other files: write GlobalIds"
        )

    def used(nodes: IntArray) -> BoolArray:
        found = np.zeros(num, bool)
        found[one[nodes[(nodes >= 0) & (nodes < num)]]] = True
        return found

    begins, ends = cells.offsets[:-1][own], cells.offsets[1:][own]
    nodes = cells.connectivity[ranges(begins, ends)]
    stays = np.zeros(num, bool)
    stays[one] = True
    stays &= used(nodes) | ~used(cells.connectivity)
    alone = is_copy & used(nodes) & (np.bincount(one, minlength=num) == 1)
    if alone.any():
        raise UnsupportedFormatError(
            f"{path}: {int(alone.sum())} points are marked as copies of other files' (first: "
            f"{int(np.flatnonzero(alone)[0])}), which have none at their places; write GlobalIds (vtkGenerateGlobalIds)"
        )
    new = (np.cumsum(stays) - 1)[one]

    def renamed(nodes: IntArray) -> IntArray:  # wrong ones are left for checks to name
        fits = (nodes >= 0) & (nodes < num)
        return np.where(fits, new[np.where(fits, nodes, 0)], nodes)

    left = []
    for sizes, nodes_of_faces, cell in faces:
        is_own = own[cell]
        nodes_left = nodes_of_faces[np.repeat(is_own, sizes)]
        left.append((sizes[is_own], renamed(nodes_left), (np.cumsum(own) - 1)[cell[is_own]]))
    joined = RawCells(offsets=bounds_of(ends - begins), connectivity=renamed(nodes), cell_type=cells.cell_type[own])
    rows = {
        "PointData": [np.where(stays[one], new, -1)],
        "CellData": [_rows_of(cells, renamed(cells.connectivity), own)],
    }
    of_points, of_cells = (
        {n: x[is_left] for n, x in each.items()} for each, is_left in ((of_points, stays), (of_cells, own))
    )
    return MeshData(
        points=mesh.points[stays], cells=joined, point_data=of_points, cell_data=of_cells, left_out=left_out, rows=rows
    ), left


def _rows_of(cells: RawCells, nodes: IntArray, own: BoolArray) -> IntArray:
    """Return the row that each cell became, or of a copy that of the own cell of the same nodes; -1 without one."""
    rows, sizes = np.where(own, np.cumsum(own) - 1, -1), np.diff(cells.offsets)
    for size in np.unique(sizes[~own]):
        some = np.flatnonzero(sizes == size)
        some = some[np.argsort(~own[some], kind="stable")]
        order, same = same_sets(nodes[cells.offsets[some][:, None] + np.arange(size)])
        first = np.maximum.accumulate(np.where(np.insert(same, 0, False), 0, np.arange(len(order))))
        here = some[order]
        rows[here] = np.where(own[here], rows[here], rows[some[order[first]]])
    return rows
