"""Faces of cells, and how many cells lie on each: edges of flat cells, triangles and quads of solid ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scidata.partition._ids import id_bits
from scidata.partition._sort import Keys, run_starts, stable_sort
from scidata.partition.cells import rings
from scidata.types import IntArray

__all__ = ["crowded_faces"]

_FLAT = (5, 7, 8, 9)

# Faces of the linear solids, VTK's node order; a quadratic solid has the corners of its linear one.
_TETRA = ((0, 1, 3), (1, 2, 3), (2, 0, 3), (0, 2, 1))
_HEXAHEDRON = ((0, 4, 7, 3), (1, 2, 6, 5), (0, 1, 5, 4), (3, 7, 6, 2), (0, 3, 2, 1), (4, 5, 6, 7))
_WEDGE = ((0, 1, 2), (3, 5, 4), (0, 3, 4, 1), (1, 4, 5, 2), (2, 5, 3, 0))
_PYRAMID = ((0, 3, 2, 1), (0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 0, 4))
_VOXEL = ((0, 2, 6, 4), (1, 3, 7, 5), (0, 1, 5, 4), (2, 3, 7, 6), (0, 1, 3, 2), (4, 5, 7, 6))
_FACES = {
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


def crowded_faces(
    offsets: IntArray, connectivity: IntArray, cell_type: npt.NDArray[np.generic], num_nodes: int
) -> tuple[int, IntArray]:
    """Return the number of faces with more than two cells, and those cells, sorted.

    All nodes must be in range, and cells have the nodes of their type. Cells of other types are left out.
    """
    found, cells = [0], [np.empty(0, np.int64)]
    for keys, owners in (
        _edges_of_flat(offsets, connectivity, cell_type, num_nodes),
        _faces_of_solid(offsets, connectivity, cell_type, num_nodes),
    ):
        in_order, order = stable_sort(keys, 64)
        begins = np.flatnonzero(run_starts(in_order))
        counts = np.diff(np.append(begins, len(in_order)))
        crowded = np.repeat(counts > 2, counts)
        found.append(int((counts > 2).sum()))
        cells.append(owners[order[crowded]])
    return sum(found), np.unique(np.concatenate(cells))


def _edges_of_flat(
    offsets: IntArray, nodes: IntArray, cell_type: npt.NDArray[np.generic], num_nodes: int
) -> tuple[Keys, IntArray]:
    pixels = offsets[np.flatnonzero(cell_type == 8)]
    if len(pixels):  # their nodes run in rows, not round
        nodes = nodes.copy()
        last = pixels[:, None] + np.array([2, 3])
        nodes[last] = nodes[last[:, ::-1]]
    cells = np.flatnonzero(np.isin(cell_type, _FLAT))
    one, other = rings(offsets[cells], offsets[cells + 1])
    return _words(np.stack([nodes[one], nodes[other]]), num_nodes), np.repeat(cells, np.diff(offsets)[cells])


def _faces_of_solid(
    offsets: IntArray, nodes: IntArray, cell_type: npt.NDArray[np.generic], num_nodes: int
) -> tuple[Keys, IntArray]:
    triples, owners = [np.empty((3, 0), np.int64)], [np.empty(0, np.int64)]
    for kind, faces in _FACES.items():
        cells = np.flatnonzero(cell_type == kind)
        for face in faces if len(cells) else ():
            corners = np.sort(nodes[offsets[cells] + np.array(face)[:, None]], axis=0)
            triples.append(corners[:3])  # two faces of one mesh do not share three corners
            owners.append(cells)
    return _words(np.concatenate(triples, axis=1), num_nodes), np.concatenate(owners)


def _words(corners: IntArray, num_nodes: int) -> Keys:
    """Pack the sorted corners of faces into one word each, the same for the same corners only."""
    first, second, *rest = np.sort(corners, axis=0).astype(np.uint64)
    bits = id_bits(num_nodes)
    words: Keys = (first << np.uint64(bits)) | second
    used = 2 * bits
    for corner in rest:
        if used + bits > 64:  # number the pairs there are instead
            words = np.unique(words, return_inverse=True)[1].astype(np.uint64)
        words = (words << np.uint64(bits)) | corner
    return words
