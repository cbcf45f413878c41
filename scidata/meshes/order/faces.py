"""Faces of cells, which cells lie on each, and which edge of the mesh each directed edge runs along."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, ByteArray, FloatArray, IntArray
from scidata.errors import FieldMismatchError, UnsupportedFormatError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import CELL_NAMES, rings
from scidata.meshes.order.ids import (
    Keys,
    NodeIds,
    blocks,
    both_directions,
    contains,
    distinct,
    id_bits,
    id_dtype,
    low_ids,
    pair_keys,
    ranges,
    run_starts,
    stable_sort,
    undirected_keys,
)

_PART = 1 << 22  # faces that are sorted at once
_FLAT = (5, 7, 8, 9)
# Quadratic flat cells: their corners come first. Number of these.
_FLAT_CORNERS = {22: 3, 23: 4}
_IS_FLAT = np.zeros(256, np.bool_)
_IS_FLAT[[*_FLAT, *_FLAT_CORNERS]] = True
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
    suspects = crowded_words(face_words(cells))
    return count_crowded([faces_among(cells, suspects)] if len(suspects) else [])


def face_words(cells: RawCells) -> Keys:
    """Return a word for each face of the cells: the same for the same face, and seldom for two faces."""
    words = [np.empty(0, np.uint64), *(_hashed(face) for face, _ in _faces(cells))]
    return np.concatenate(words)


def crowded_words(words: Keys) -> Keys:
    """Return those that come more than twice, once each, and sort ``words`` in place."""
    words.sort()
    return np.unique(words[2:][words[2:] == words[:-2]])


def faces_among(cells: RawCells, suspects: Keys) -> tuple[IntArray, IntArray]:
    """Return the faces whose words are among sorted ones, ``(num, 3)``: their lowest corners; and the cell of each."""
    found, owners = [np.empty((3, 0), np.int64)], [np.empty(0, np.int64)]
    for face, cell in _faces(cells):
        rows = np.flatnonzero(contains(suspects, _hashed(face)))
        found.append(np.stack([each[rows] for each in face]))
        owners.append(cell[rows])
    return np.concatenate(found, axis=1).T, np.concatenate(owners)


def count_crowded(found: Sequence[tuple[IntArray, IntArray]]) -> tuple[int, IntArray]:
    """Return the number of faces with more than two cells among those of :func:`faces_among`, and the cells, sorted."""
    if not found:
        return 0, np.empty(0, np.int64)
    faces, owners = (np.concatenate(each) for each in zip(*found, strict=True))
    _, which, counts = np.unique(faces, axis=0, return_inverse=True, return_counts=True)
    return int((counts > 2).sum()), np.unique(owners[counts[which.ravel()] > 2])


def _hashed(face: Sequence[IntArray]) -> Keys:
    """Mix three corners into a word each (the steps of splitmix64's output: Steele et al., OOPSLA 2014)."""
    word = face[0].astype(np.uint64)
    for corner in face[1:]:
        word *= np.uint64(0x9E3779B97F4A7C15)
        word += corner.astype(np.uint64)
        word ^= word >> np.uint64(30)
        word *= np.uint64(0xBF58476D1CE4E5B9)
        word ^= word >> np.uint64(27)
        word *= np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
    return word


def _faces(cells: RawCells) -> Iterator[tuple[tuple[IntArray, IntArray, IntArray], IntArray]]:
    """Yield the faces of the cells, some at a time, by their three lowest corners, and the cell of each.

    Two faces of one mesh do not share three corners. The faces of flat cells are their edges, with -1 as the third.
    """
    one, other, sizes, flat = _edges_of_flat(cells)
    owners = np.repeat(flat, sizes)
    for rows in blocks(len(one)):
        a, b = one[rows], other[rows]
        yield (np.minimum(a, b), np.maximum(a, b), np.full(len(a), -1, a.dtype)), owners[rows]
    for kind, faces in SOLID_FACES.items():
        of_kind = np.flatnonzero(cells.cell_type == kind)
        for rows in blocks(len(of_kind)):
            starts = cells.offsets[of_kind[rows]]
            corner = [cells.connectivity[starts + i] for i in range(max(map(max, faces)) + 1)]
            for face in faces:
                yield _lowest_three([corner[i] for i in face]), of_kind[rows]


def _lowest_three(corners: Sequence[IntArray]) -> tuple[IntArray, IntArray, IntArray]:
    """Return the three lowest of three or four numbers, in order: NumPy sorts short columns ten times slower."""
    a, b = np.minimum(*corners[:2]), np.maximum(*corners[:2])
    if len(corners) == 3:
        c = corners[2]
        return np.minimum(a, c), np.maximum(a, np.minimum(b, c)), np.maximum(b, c)
    c, d = np.minimum(*corners[2:]), np.maximum(*corners[2:])
    middle, other = np.maximum(a, c), np.minimum(b, d)
    return np.minimum(a, c), np.minimum(middle, other), np.maximum(middle, other)


def edges_across_faces(cells: RawCells, num_nodes: int) -> IntArray:
    """Return the edges between cells that share a face, both directions, each once, by (destination, source).

    The faces of flat cells are their edges. Cells of different dimensions share none, and cells without an area have
    no edges. All nodes must be in range.

    Returns ``(2, num_edges)`` int64: source and destination cells. Raises UnsupportedFormatError: cell types whose
    faces are not known (polyhedra, strips).
    """
    check_faces_known(cells)
    faces, owners = faces_of_cells(cells, id_dtype(max(num_nodes, cells.num_cells)))
    pairs = [np.empty((2, 0), owners.dtype)]
    num_parts = max(1, len(owners) // _PART)  # a part at a time: memory for the sorting of one
    bounds = np.arange(num_parts + 1) * max(num_nodes, 1) // num_parts
    for low, high in itertools.pairwise(bounds.tolist()):
        rows = np.flatnonzero((faces[0] >= low) & (faces[0] < high)) if num_parts > 1 else slice(None)
        pairs.append(pairs_across(faces[:, rows], owners[rows], num_nodes)[0])
    del faces, owners
    ones, others = np.concatenate(pairs, axis=1)
    return both_directions(undirected_keys(ones, others, cells.num_cells), cells.num_cells)


def check_faces_known(cells: RawCells) -> None:
    """Raise UnsupportedFormatError for cell types whose faces are not known."""
    known = np.zeros(256, np.bool_)
    known[[*_FLAT, *_FLAT_CORNERS, *_THIN, *SOLID_FACES]] = True
    other = np.unique(cells.cell_type[~known[cells.cell_type]])
    if len(other):
        names = ", ".join(CELL_NAMES.get(int(kind), f"VTK type {int(kind)}") for kind in other)
        raise UnsupportedFormatError(
            f"cells with faces that scidata does not know ({names}): give the pairs of neighbouring cells as the "
            "edge_index of a graph whose nodes are the cells"
        )


def faces_of_cells(cells: RawCells, dtype: np.dtype[Any]) -> tuple[NodeIds, NodeIds]:
    """Return all faces, ``(3, num)``: their lowest corners, -1 for the third of an edge; and the cell of each."""
    num = int(_edges_of_flat(cells)[2].sum())
    num += sum(len(faces) * int((cells.cell_type == kind).sum()) for kind, faces in SOLID_FACES.items())
    found: NodeIds = np.empty((3, num), dtype)
    owners: NodeIds = np.empty(num, dtype)
    done = 0
    for face, cell in _faces(cells):
        here = slice(done, done + len(cell))
        for out, corner in zip(found, face, strict=True):
            out[here] = corner
        owners[here] = cell
        done = here.stop
    return found, owners


def pairs_across(faces: NodeIds, owners: NodeIds, num_nodes: int) -> tuple[AnyArray, int, AnyArray]:
    """Return each pair of cells that share a face, ``(2, num)``, some more than once; and what is crowded.

    That is the number of faces with more than two cells, and these cells, some more than once.
    """
    in_order, order = stable_sort(_words(faces, num_nodes), 64, overwrite=True)
    cells, begins = owners[order], np.flatnonzero(run_starts(in_order))
    del in_order, order
    counts = np.diff(np.append(begins, len(cells)))
    pairs = [np.empty((2, 0), owners.dtype), *(np.stack(each) for each in _pairs(cells, begins, counts))]
    crowded = counts > 2
    return np.concatenate(pairs, axis=1), int(crowded.sum()), cells[np.repeat(crowded, counts)]


def _pairs(cells: NodeIds, begins: IntArray, counts: IntArray) -> Iterator[tuple[NodeIds, NodeIds]]:
    """Yield both cells of each two in a group, those so many places apart together; once, where no group has three."""
    for step in range(1, int(counts.max(initial=0))):
        first = ranges(begins, np.maximum(begins + counts - step, begins))
        yield cells[first], cells[first + step]


def edges_at_nodes(nodes: NodeIds, owners: NodeIds, num_nodes: int, num_cells: int) -> IntArray:
    """Return the pairs of cells that share a node, both directions, each once, by (destination, source).

    ``nodes, owners``: a node and a cell that has it, in any order, some more than once.
    """
    most = max(num_nodes, num_cells)
    words = distinct(pair_keys(nodes, owners, most))
    begins = np.flatnonzero(run_starts(words >> np.uint64(id_bits(most))))
    every = _pairs(low_ids(words, most), begins, np.diff(np.append(begins, len(words))))
    keys = [np.empty(0, np.uint64), *(undirected_keys(one, other, num_cells) for one, other in every)]
    return both_directions(np.concatenate(keys), num_cells)


def _edges_of_flat(cells: RawCells) -> tuple[NodeIds, NodeIds, IntArray, IntArray]:
    """Return both ends of each edge of the flat cells, how many edges each cell has, and these cells."""
    offsets, nodes, cell_type = cells.offsets, cells.connectivity, cells.cell_type
    pixels = offsets[np.flatnonzero(cell_type == 8)]
    if len(pixels):  # their nodes run in rows, not round
        nodes = nodes.copy()
        last = pixels[:, None] + np.array([2, 3])
        nodes[last] = nodes[last[:, ::-1]]
    flat = np.flatnonzero(_IS_FLAT[cell_type])
    sizes = offsets[flat + 1] - offsets[flat]
    for kind, corners in _FLAT_CORNERS.items():
        sizes[cell_type[flat] == kind] = corners
    one, other = rings(offsets[flat], offsets[flat] + sizes)
    return nodes[one], nodes[other], sizes, flat


def _words(corners: NodeIds, num_nodes: int) -> Keys:
    """Pack the three corners of faces into one word each, the same for the same corners only."""
    bits = id_bits(num_nodes + 1)
    words = pair_keys(corners[0], corners[1], num_nodes + 1)
    if 3 * bits > 64:  # number the pairs there are instead
        in_order, order = stable_sort(words, 2 * bits)
        words[order] = np.cumsum(run_starts(in_order)).view(np.uint64)
    words <<= np.uint64(bits)
    for rows in blocks(len(words)):
        words[rows] |= (corners[2][rows] + 1).astype(np.uint64)
    return words


@dataclass(frozen=True, kw_only=True, eq=False)
class Surface:
    """Faces with three or four corners, in order around each."""

    corners: IntArray  # ``(num_faces, 4)`` int64 nodes; a triangle has its last corner twice
    cell: IntArray  # ``(num_faces,)`` int64: the cell that each is a face of

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
    """The mesh edge of each directed edge."""

    rows: IntArray  # ``(num_edges,)`` int64: its row in the source
    # ``(num_edges,)`` int8: 1 where the directed edge runs as the mesh edge does, from its first node to its second; -1
    # where it runs against it
    orientation: npt.NDArray[np.int8]
    num_unused: int  # mesh edges that no directed edge runs along


def along_mesh_edges(edge_index: IntArray, mesh_edges: IntArray, num_nodes: int, where: str) -> AlongMesh:
    """Find the mesh edge between the two nodes of each directed edge.

    ``edge_index``: ``(2, num_edges)``: sources and destinations, in range.
    ``mesh_edges``: ``(2, num_mesh_edges)``: first and second node, as the file has them; rows that name no two nodes
    match none.
    ``where``: what to name in errors.
    Raises FieldMismatchError: a directed edge has no mesh edge between its nodes, or more than one.
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
