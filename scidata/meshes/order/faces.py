"""Faces of cells, which cells lie on each, and which edge of the mesh each directed edge runs along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.types import ByteArray, FloatArray, IntArray
from scidata.errors import FieldMismatchError, UnsupportedFormatError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import CELL_NAMES, rings
from scidata.meshes.order.ids import (
    Keys,
    both_directions,
    id_bits,
    pair_keys,
    ranges,
    run_starts,
    stable_sort,
    undirected_keys,
)

_FLAT = (5, 7, 8, 9)
# Quadratic flat cells: their corners come first. Number of these.
_FLAT_CORNERS = {22: 3, 23: 4}
# Cells without an area have no faces, so no neighbours across one.
_THIN = (1, 2, 3, 4, 21)

# Faces of the linear solids, VTK's node order; a quadratic solid has the corners of its linear one.
_TETRA = ((0, 1, 3), (1, 2, 3), (2, 0, 3), (0, 2, 1))
_HEXAHEDRON = ((0, 4, 7, 3), (1, 2, 6, 5), (0, 1, 5, 4), (3, 7, 6, 2), (0, 3, 2, 1), (4, 5, 6, 7))
_WEDGE = ((0, 1, 2), (3, 5, 4), (0, 3, 4, 1), (1, 4, 5, 2), (2, 5, 3, 0))
_PYRAMID = ((0, 3, 2, 1), (0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 0, 4))
_VOXEL = ((0, 2, 6, 4), (1, 3, 7, 5), (0, 1, 5, 4), (2, 3, 7, 6), (0, 1, 3, 2), (4, 5, 7, 6))
#: By VTK's code of the cell.
SOLID_FACES = {
    10: _TETRA,
    11: _VOXEL,
    12: _HEXAHEDRON,
    13: _WEDGE,
    14: _PYRAMID,
    24: _TETRA,
    25: _HEXAHEDRON,
    26: _WEDGE,
    27: _PYRAMID,
}


def crowded_faces(cells: RawCells, num_nodes: int) -> tuple[int, IntArray]:
    """Return the number of faces with more than two cells, and those cells, sorted.

    All nodes must be in range, and cells have the nodes of their type. Cells of other types are left out.
    """
    found, crowded = 0, [np.empty(0, np.int64)]
    for faces_of in (_edges_of_flat, _faces_of_solid):
        keys, owners_of = faces_of(cells, num_nodes)
        in_order = np.sort(keys)
        if (in_order[2:] == in_order[:-2]).any():  # as a rule there are none, and whose they are need not be asked
            del in_order
            owners, counts = _by_face(keys, owners_of())
            found += int((counts > 2).sum())
            crowded.append(owners[np.repeat(counts > 2, counts)])
    return found, np.unique(np.concatenate(crowded))


def edges_across_faces(cells: RawCells, num_nodes: int) -> IntArray:
    """Return the edges between cells that share a face, both directions, each once, by (destination, source).

    The faces of flat cells are their edges. Cells of different dimensions share none, and cells without an area have
    no edges. All nodes must be in range.

    Returns
    -------
    edge_index
        ``(2, num_edges)`` int64: source and destination cells.

    Raises
    ------
    UnsupportedFormatError
        Cell types whose faces are not known (polyhedra, strips).
    """
    known = (*_FLAT, *_FLAT_CORNERS, *_THIN, *SOLID_FACES)
    other = np.unique(cells.cell_type[~np.isin(cells.cell_type, known)])
    if len(other):
        names = ", ".join(CELL_NAMES.get(int(kind), f"VTK type {int(kind)}") for kind in other)
        raise UnsupportedFormatError(
            f"cells with faces that scidata does not know ({names}): give the pairs of neighbouring cells as the "
            "edge_index of a graph whose nodes are the cells"
        )
    ones, others = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for faces_of in (_edges_of_flat, _faces_of_solid):
        keys, owners_of = faces_of(cells, num_nodes)
        owners, counts = _by_face(keys, owners_of())
        last = np.cumsum(counts)
        for step in range(1, int(counts.max(initial=0))):  # once, where no face has more than two cells
            first = ranges(last - counts, np.maximum(last - step, last - counts))
            ones.append(owners[first])
            others.append(owners[first + step])
    keys = undirected_keys(np.concatenate(ones), np.concatenate(others), cells.num_cells)
    return both_directions(keys, cells.num_cells)


def _by_face(keys: Keys, owners: IntArray) -> tuple[IntArray, IntArray]:
    """Return the cells on each face, face by face, and how many they are."""
    in_order, order = stable_sort(keys, 64)
    begins = np.flatnonzero(run_starts(in_order))
    return owners[order], np.diff(np.append(begins, len(in_order)))


def _edges_of_flat(cells: RawCells, num_nodes: int) -> tuple[Keys, Callable[[], IntArray]]:
    """Return a word for each edge of the flat cells, and a function that gives the cell of each."""
    offsets, nodes, cell_type = cells.offsets, cells.connectivity, cells.cell_type
    pixels = offsets[np.flatnonzero(cell_type == 8)]
    if len(pixels):  # their nodes run in rows, not round
        nodes = nodes.copy()
        last = pixels[:, None] + np.array([2, 3])
        nodes[last] = nodes[last[:, ::-1]]
    flat = np.flatnonzero(np.isin(cell_type, (*_FLAT, *_FLAT_CORNERS)))
    sizes = np.diff(offsets)[flat]
    for kind, corners in _FLAT_CORNERS.items():
        sizes[cell_type[flat] == kind] = corners
    one, other = rings(offsets[flat], offsets[flat] + sizes)
    return undirected_keys(nodes[one], nodes[other], num_nodes), lambda: np.repeat(flat, sizes)


def _faces_of_solid(cells: RawCells, num_nodes: int) -> tuple[Keys, Callable[[], IntArray]]:
    """Return a word for each face of the solid cells, and a function that gives the cell of each."""
    triples, owners = [np.empty((3, 0), np.int64)], [np.empty(0, np.int64)]
    for kind, faces in SOLID_FACES.items():
        rows = np.flatnonzero(cells.cell_type == kind)
        for face in faces if len(rows) else ():
            corners = np.sort(cells.connectivity[cells.offsets[rows] + np.array(face)[:, None]], axis=0)
            triples.append(corners[:3])  # two faces of one mesh do not share three corners
            owners.append(rows)
    return _words(np.concatenate(triples, axis=1), num_nodes), lambda: np.concatenate(owners)


def _words(corners: IntArray, num_nodes: int) -> Keys:
    """Pack the three corners of faces, sorted, into one word each, the same for the same corners only."""
    bits = id_bits(num_nodes)
    words = pair_keys(corners[0], corners[1], num_nodes)
    if 3 * bits > 64:  # number the pairs there are instead
        in_order, order = stable_sort(words, 2 * bits)
        words[order] = np.cumsum(run_starts(in_order)).view(np.uint64)
    words <<= np.uint64(bits)
    words |= corners[2].view(np.uint64)
    return words


@dataclass(frozen=True, kw_only=True, eq=False)
class Surface:
    """Faces with three or four corners, in order around each.

    Attributes
    ----------
    corners
        ``(num_faces, 4)`` int64 nodes; a triangle has its last corner twice.
    cell
        ``(num_faces,)`` int64: the cell that each is a face of.
    """

    corners: IntArray
    cell: IntArray

    def facing(self, points: FloatArray, centres: FloatArray, view: FloatArray) -> IntArray:
        """Return the faces, as numbers, whose outer side is seen from the direction ``view``, ``(3,)``.

        ``centres`` are those of all cells, ``(num_cells, 3)``.
        """
        a, b, c = (points[self.corners[:, k]] for k in range(3))
        normal = np.cross(b - a, c - a)
        middle = points[self.corners].mean(axis=1)
        outward = np.sign(((middle - centres[self.cell]) * normal).sum(axis=1))
        return np.flatnonzero(outward * (normal @ view) > 0)


def surface_of(offsets: IntArray, connectivity: IntArray, types: ByteArray, kept: IntArray) -> Surface:
    """Return the surface of the solid cells among ``kept``, ``(num,)`` int64: outer faces, and those to cells left out.

    Cells are as VTK has them: corners of cell ``i`` at ``connectivity[offsets[i] : offsets[i + 1]]``. Other cells than
    linear and quadratic tetrahedra, hexahedra, voxels, wedges and pyramids have no faces here.
    """
    corners: list[IntArray] = [np.empty((0, 4), np.int64)]
    owners: list[IntArray] = [np.empty(0, np.int64)]
    for kind, faces in SOLID_FACES.items():
        cells = kept[types[kept] == kind]
        for face in faces if len(cells) else ():
            found = connectivity[offsets[cells][:, None] + np.array(face)]
            corners.append(found if len(face) == 4 else np.concatenate([found, found[:, -1:]], axis=1))
            owners.append(cells)
    every, cell = np.concatenate(corners).astype(np.int64), np.concatenate(owners)
    if not len(every):
        return Surface(corners=every, cell=cell)
    # a triangle has its last corner twice, which may be another from the other side: compare without it
    twice = every[:, 3] == every[:, 2]
    keys = np.where(twice[:, None], np.sort(every[:, :3], axis=1)[:, [0, 1, 2, 2]], np.sort(every, axis=1))
    _, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
    outer = np.sort(first[counts == 1])
    return Surface(corners=every[outer], cell=cell[outer])


@dataclass(frozen=True, kw_only=True, eq=False)
class AlongMesh:
    """The mesh edge of each directed edge.

    Attributes
    ----------
    rows
        ``(num_edges,)`` int64: its row in the source.
    orientation
        ``(num_edges,)`` int8: 1 where the directed edge runs as the mesh edge does, from its first node to its
        second; -1 where it runs against it.
    num_unused
        Mesh edges that no directed edge runs along.
    """

    rows: IntArray
    orientation: npt.NDArray[np.int8]
    num_unused: int


def along_mesh_edges(edge_index: IntArray, mesh_edges: IntArray, num_nodes: int, where: str) -> AlongMesh:
    """Find the mesh edge between the two nodes of each directed edge.

    Parameters
    ----------
    edge_index
        ``(2, num_edges)``: sources and destinations, in range.
    mesh_edges
        ``(2, num_mesh_edges)``: first and second node, as the file has them; rows that name no two nodes match none.
    where
        What to name in errors.

    Raises
    ------
    FieldMismatchError
        A directed edge has no mesh edge between its nodes, or more than one.
    """
    low, high = mesh_edges.min(axis=0), mesh_edges.max(axis=0)
    usable = np.flatnonzero((low >= 0) & (high < num_nodes) & (low < high))
    keys, order = stable_sort(pair_keys(low[usable], high[usable], num_nodes), 2 * id_bits(num_nodes))
    src, dst = edge_index
    wanted = pair_keys(np.minimum(src, dst), np.maximum(src, dst), num_nodes)
    first = np.searchsorted(keys, wanted)
    found = first < len(keys)
    found[found] = keys[first[found]] == wanted[found]
    again = np.append(~run_starts(keys)[1:], False) if len(keys) else np.empty(0, np.bool_)
    twice = found.copy()
    twice[found] = again[first[found]]
    for wrong, how in ((~found, "no"), (twice, "more than one")):
        rows = np.flatnonzero(wrong)
        if len(rows):
            pairs = edge_index[:, rows[:3]].T.tolist()
            raise FieldMismatchError(
                f"{where}: {len(rows)} of {len(src)} edges of the cells have {how} mesh edge between their nodes (the "
                f"first join nodes {pairs}), so that fields on mesh edges cannot follow them; choose other fields "
                "with --fields, or take the file's edges as they are with --edges edge_index"
            )
    rows = usable[order[first]]
    used = np.zeros(mesh_edges.shape[1], np.bool_)
    used[rows] = True
    return AlongMesh(
        rows=rows,
        orientation=np.where(mesh_edges[0, rows] == src, 1, -1).astype(np.int8),
        num_unused=int(len(used) - used.sum()),
    )
