"""Cells of any shape by their faces: which cells lie beside each face, and where the cells' centres are.

Of a file that lists the faces of each cell by itself, faces of the same nodes are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from scidata.core.bounds import bounds_of, owners_of
from scidata.core.types import BoolArray, FloatArray, IntArray
from scidata.errors import CorruptDataError, UnsupportedFormatError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import CELL_NAMES, NUM_NODES, POLYHEDRON
from scidata.meshes.order.faces import SOLID_FACES
from scidata.meshes.order.ids import blocks, both_directions, ranges, undirected_keys

_BLOCK = 1 << 14  # faces at once: their points stay in the cache
_TINY = 1e-300  # volumes below it have no centre of mass
_CLOSED = 1e-6  # the areas of a closed cell's faces add up to 0, to this share of the area
_OPEN = 1e-3  # of a cell that lacks a face they do not; points are rounded in some files
#: Faces of three and of four nodes, by VTK's codes of tetrahedra, pyramids, wedges and hexahedra.
_SIDES = {10: (4, 0), 14: (4, 1), 13: (2, 3), 12: (0, 6)}
_SIZES = {kind: NUM_NODES[kind] for kind in SOLID_FACES} | {POLYHEDRON: -1}


@dataclass(frozen=True, kw_only=True, eq=False)
class Faces:
    """The faces of all cells, each once."""

    # offsets, nodes: the nodes of face ``i``, in order around it, are ``nodes[offsets[i] : offsets[i + 1]]``; int64, as
    # the others
    offsets: IntArray
    nodes: IntArray
    owner: IntArray  # ``(num_faces,)``: the cell that it belongs to
    neighbour: IntArray  # ``(num_faces,)``: the cell on the other side, -1 at the boundary

    def checked(self, where: str, num_nodes: int, num_cells: int, least: int = 3) -> Faces:
        """Raise CorruptDataError for faces of fewer than ``least`` nodes, and ids of no node or cell."""
        for ids, lowest, most, what in (
            (self.nodes, 0, num_nodes, "nodes"),
            (self.owner, 0, num_cells, "cells as owners"),
            (self.neighbour, -1, num_cells, "cells as neighbours"),
        ):
            wrong = np.flatnonzero((ids < lowest) | (ids >= most))
            if len(wrong):
                faces = owners_of(self.offsets, wrong[:3]) if ids is self.nodes else wrong[:3]
                raise CorruptDataError(
                    f"{where}: faces {faces.tolist()} name the {what} {ids[wrong[:3]].tolist()}, but there are {most} "
                    f"({len(wrong)} ids are wrong); copy it, or write it again"
                )
        small = np.flatnonzero(np.diff(self.offsets) < least)
        if len(small):
            raise CorruptDataError(
                f"{where}: {len(small)} faces have fewer than {least} nodes (first: {small[:3].tolist()}); copy it, or "
                "write it again"
            )
        return self

    def of_cells(self) -> CellFaces:
        """Return the faces of each cell: those between two cells twice."""
        inner = np.flatnonzero(self.neighbour >= 0)
        face = np.append(np.arange(len(self.owner)), inner)
        begins, ends = self.offsets[face], self.offsets[face + 1]
        return ends - begins, self.nodes[ranges(begins, ends)], np.append(self.owner, self.neighbour[inner])

    def edges(self, num_cells: int) -> IntArray:
        """Return the pairs of cells that share a face, both directions, each once, by (destination, source)."""
        inner = self.neighbour >= 0
        return both_directions(undirected_keys(self.owner[inner], self.neighbour[inner], num_cells), num_cells)

    def solids(self, num_cells: int) -> RawCells | None:
        """Return the cells by their corners, if all are tetrahedra, pyramids, wedges or hexahedra; else None.

        Faces run so that they are turned into their owner. A corner has three edges in such a cell, each in two faces:
        the sum of the nodes before and after it says which node lies across from a face.
        """
        sizes, inner = np.diff(self.offsets), np.flatnonzero(self.neighbour >= 0)
        face, cell = np.append(np.arange(len(sizes)), inner), np.append(self.owner, self.neighbour[inner])
        three, four = (np.bincount(cell[sizes[face] == size], minlength=num_cells) for size in (3, 4))
        kinds = np.select([(three == t) & (four == f) for t, f in _SIDES.values()], [*_SIDES])
        if not kinds.all() or sizes.max(initial=0) > 4:
            return None
        after = np.arange(1, len(self.nodes) + 1)
        after[self.offsets[1:] - 1] = self.offsets[:-1]
        around = self.nodes[after] + self.nodes[np.argsort(after)]
        at, most = ranges(self.offsets[face], self.offsets[face + 1]), int(self.nodes.max(initial=0)) + 1
        keys, back = np.unique(np.repeat(cell, sizes[face]) * most + self.nodes[at], return_inverse=True)
        total = np.bincount(back, around[at], len(keys)).astype(np.int64)
        every = np.bincount(keys // most, keys % most, num_cells).astype(np.int64)
        offsets = bounds_of([NUM_NODES[kind] for kind in kinds.tolist()])
        out = np.zeros(offsets[-1], np.int64)
        for kind, (_, num_four) in _SIDES.items():
            size = 4 if kind == 12 or num_four == 1 else 3
            rows, first = np.unique(
                np.where((kinds[cell] == kind) & (sizes[face] == size), cell, -1), return_index=True
            )
            rows, first = rows[rows >= 0], first[rows >= 0]
            base = self.nodes[self.offsets[face[first]][:, None] + np.arange(size)]
            turn = (self.neighbour[face[first]] == rows) != (kind == 13)  # of VTK's wedges it is turned outwards
            base[turn] = base[turn, ::-1]
            across = (every[rows] - base.sum(axis=1))[:, None]
            if NUM_NODES[kind] == 2 * size:
                place = np.minimum(np.searchsorted(keys, rows[:, None] * most + base), len(keys) - 1)
                across = total[place] // 2 - np.roll(base, 1, axis=1) - np.roll(base, -1, axis=1)
            out[offsets[rows][:, None] + np.arange(NUM_NODES[kind])] = np.append(base, across, axis=1)
        corners = np.repeat(np.arange(num_cells), np.diff(offsets)) * most + out
        fits = np.array_equal(np.sort(corners), keys)
        return RawCells(offsets=offsets, connectivity=out, cell_type=kinds.astype(np.uint8)) if fits else None

    def centres_and_volumes(
        self, points: FloatArray, num_cells: int, *, turned: bool = True, where: str = ""
    ) -> tuple[FloatArray, FloatArray]:
        """Return the centres, ``(num_cells, 3)``, and volumes of the cells, as OpenFOAM computes them.

        A face is cut into triangles around the mean of its nodes; its centre is their mean, weighted by area. A cell
        is cut into pyramids from its faces to the mean of their centres; its centre is that of these, weighted by
        volume. Of a cell without a volume it is the mean of its faces' centres.

        ``turned``: False if the nodes may run either way around a face, none of which has a neighbour: those of a
        cell that is not closed as they run are turned away from its middle. Raises CorruptDataError, which begins with
        ``where``: the faces of a cell leave it open.

        Source: OpenFOAM, ``primitiveMeshFaceCentresAndAreas.C`` and ``primitiveMeshCellCentresAndVols.C``.
        """
        centre, area = self._centres_and_areas(points)
        inner = np.flatnonzero(self.neighbour >= 0)
        sides: list[tuple[IntArray, IntArray | slice, float]] = [
            (self.owner, slice(None), 1.0),
            (self.neighbour[inner], inner, -1.0),
        ]
        counts = sum(np.bincount(cell, minlength=num_cells) for cell, _, _ in sides)
        middle = np.zeros((3, num_cells))
        for cell, faces, _ in sides:
            middle += _sums(cell, centre[:, faces], num_cells)
        middle /= np.maximum(counts, 1)
        size = np.linalg.norm(area, axis=0)
        total = sum(np.bincount(cell, size[faces], num_cells) for cell, faces, _ in sides)

        def opening() -> FloatArray:
            every = (sign * _sums(cell, area[:, faces], num_cells) for cell, faces, sign in sides)
            return np.linalg.norm(sum(every, np.zeros((3, 1))), axis=0)

        if not turned:
            inward = ((centre - middle[:, self.owner]) * area).sum(axis=0) < 0
            area[:, inward & (opening() > _CLOSED * total)[self.owner]] *= -1
        is_open = np.flatnonzero(opening() > _OPEN * total)
        if len(is_open):
            raise CorruptDataError(
                f"{where}: the faces of {len(is_open)} of {num_cells} cells do not enclose them (first: "
                f"{is_open[:3].tolist()}); some are missing, or named wrongly: copy it, or write it again"
            )
        volume, moment = np.zeros(num_cells), np.zeros((3, num_cells))
        for cell, faces, sign in sides:
            height = centre[:, faces] - middle[:, cell]
            pyramid = (area[:, faces] * height).sum(axis=0) * (sign / 3)
            volume += np.bincount(cell, pyramid, num_cells)
            height *= 0.75 * pyramid  # from the middle of the cell
            moment += _sums(cell, height, num_cells)
        there = np.abs(volume) > _TINY
        middle[:, there] += moment[:, there] / volume[there]
        return np.ascontiguousarray(middle.T), volume if turned else np.abs(volume)

    def _centres_and_areas(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return ``(3, num_faces)`` each; faces of as many nodes together."""
        coordinates, sizes = np.ascontiguousarray(points.T), np.diff(self.offsets)
        centre, area = np.empty((3, len(sizes))), np.empty((3, len(sizes)))
        for size in np.unique(sizes):
            every = np.flatnonzero(sizes == size)
            for block in blocks(len(every), _BLOCK):
                faces = every[block]
                here = coordinates[:, self.nodes[self.offsets[faces][:, None] + np.arange(size)]]
                mean = here.mean(axis=2, keepdims=True)
                there, inward = np.roll(here, -1, axis=2), mean - here
                x, y, z = there - here
                normal = np.stack(
                    [y * inward[2] - z * inward[1], z * inward[0] - x * inward[2], x * inward[1] - y * inward[0]]
                )
                weights = np.sqrt((normal * normal).sum(axis=0))
                total = weights.sum(axis=1)
                moment = (weights * (here + there + mean)).sum(axis=2)
                with np.errstate(divide="ignore", invalid="ignore"):
                    centre[:, faces] = np.where(total > _TINY, moment / (3 * total), mean[:, :, 0])
                area[:, faces] = normal.sum(axis=2) / 2
        return centre, area


def _sums(cell: IntArray, values: FloatArray, num_cells: int) -> FloatArray:
    """Add up the values ``(3, num)`` of each cell: ``(3, num_cells)``."""
    return np.stack([np.bincount(cell, column, num_cells) for column in values])


#: Faces of cells, those between two cells twice: how many nodes each has, these nodes in order around it, and its cell.
CellFaces: TypeAlias = tuple[IntArray, IntArray, IntArray]


def join_polyhedra(
    where: str, points: FloatArray, cells: RawCells, faces: Sequence[CellFaces]
) -> tuple[FloatArray, FloatArray, IntArray]:
    """Return the centres, volumes and edges of cells, as those of :class:`Faces`; ``faces``: those of the polyhedra.

    Raises UnsupportedFormatError: cells that are no solids.
    Raises CorruptDataError: wrong ids of nodes; a polyhedron without faces; a face of more than two cells, or twice of
    one.
    """
    num_cells, every = cells.num_cells, [*faces, *_faces_of_solids(where, cells)]
    sizes, nodes, cell = map(np.concatenate, zip(*every, strict=True))
    sides = Faces(offsets=bounds_of(sizes), nodes=nodes, owner=cell, neighbour=np.full(len(cell), -1, np.int64))
    sides.checked(where, len(points), num_cells)
    bare = np.flatnonzero(np.bincount(cell, minlength=num_cells) == 0)
    if len(bare):
        raise CorruptDataError(f"{where}: {len(bare)} polyhedra have no faces (first: {int(bare[0])}); write it again")
    one, other = np.concatenate([_sharing(where, sides, size) for size in np.unique(sizes)], axis=1)
    centres, volumes = sides.centres_and_volumes(points, num_cells, turned=False, where=where)
    return centres, volumes, both_directions(undirected_keys(one, other, num_cells), num_cells)


def _faces_of_solids(where: str, cells: RawCells) -> Iterator[CellFaces]:
    """Yield the faces of the cells that are no polyhedra, by their corners."""
    sizes = np.where(cells.cell_type == POLYHEDRON, -1, np.diff(cells.offsets))
    wrong = np.flatnonzero(sizes != np.array([_SIZES.get(kind, 0) for kind in range(256)])[cells.cell_type])
    if len(wrong):
        kind, size = int(cells.cell_type[wrong[0]]), int(sizes[wrong[0]])
        raise UnsupportedFormatError(
            f"{where}: cell {int(wrong[0])} is of VTK type {kind} ({CELL_NAMES.get(kind, 'unknown')}) with {size} "
            "nodes; beside polyhedra are read solids: keep these (ParaView: Extract Cells By Type)"
        )
    for kind, faces in SOLID_FACES.items():
        rows = np.flatnonzero(cells.cell_type == kind)
        for face in faces:
            nodes = cells.connectivity[cells.offsets[rows][:, None] + np.array(face)]
            yield np.full(len(rows), len(face)), nodes.reshape(-1), rows


def same_sets(nodes: IntArray) -> tuple[IntArray, BoolArray]:
    """Return an order in which rows of the same nodes follow each other, and which are those of the one before."""
    sets = np.sort(nodes, axis=1)
    order = np.lexsort(sets.T)
    return order, (sets[order[1:]] == sets[order[:-1]]).all(axis=1)


def _sharing(where: str, sides: Faces, size: int) -> IntArray:
    """Return both cells, ``(2, num)``, of each pair of faces that have the same nodes, of those of some size."""
    every = np.flatnonzero(np.diff(sides.offsets) == size)
    order, same = same_sets(sides.nodes[sides.offsets[every][:, None] + np.arange(size)])
    cell = sides.owner[every[order]]
    if (crowded := int((same[1:] & same[:-1]).sum() + (same & (cell[1:] == cell[:-1])).sum())) > 0:
        raise CorruptDataError(
            f"{where}: {crowded} faces of {size} nodes lie between more than two cells, or twice on one; write it again"
        )
    return np.stack([cell[:-1][same], cell[1:][same]])
