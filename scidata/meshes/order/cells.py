"""Edges of cells, and the owner of a cell. Cell types are VTK's numbers, node orders VTK's too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import bounds_of, owners_of
from scidata.core.types import AnyArray, IntArray
from scidata.errors import ConfigError, UnsupportedFormatError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.ids import Keys, NodeIds, both_directions, ranges, undirected_keys

CELL_NAMES = {
    1: "vertex", 2: "poly-vertex", 3: "line", 4: "poly-line", 5: "triangle", 6: "triangle strip", 7: "polygon",
    8: "pixel", 9: "quad", 10: "tetra", 11: "voxel", 12: "hexahedron", 13: "wedge", 14: "pyramid",
    21: "quadratic edge", 22: "quadratic triangle", 23: "quadratic quad", 24: "quadratic tetra",
    25: "quadratic hexahedron", 26: "quadratic wedge", 27: "quadratic pyramid", 42: "polyhedron",
}  # fmt: skip

POLYGON, POLYHEDRON = 7, 42

#: What to do about polyhedra.
FOR_POLYHEDRA = (
    "split them into tetrahedra (ParaView: filter Tetrahedralize), or, for finite volumes, write the cells as nodes of "
    "a graph: pos, their centres, and edge_index, the pairs that share a face (OpenFOAM: owner and neighbour)"
)

#: Nodes of the cell types that have a fixed number of them.
NUM_NODES = {1: 1, 3: 2, 5: 3, 8: 4, 9: 4, 10: 4, 11: 8, 12: 8, 13: 6, 14: 5,
             21: 3, 22: 6, 23: 8, 24: 10, 25: 20, 26: 15, 27: 13}  # fmt: skip

_TETRA = ((0, 1), (1, 2), (2, 0), (0, 3), (1, 3), (2, 3))
_HEXAHEDRON = ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7))
_WEDGE = ((0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3), (0, 3), (1, 4), (2, 5))
_PYRAMID = ((0, 1), (1, 2), (2, 3), (3, 0), (0, 4), (1, 4), (2, 4), (3, 4))

_EDGES: dict[int, tuple[tuple[int, int], ...]] = {
    1: (),
    3: ((0, 1),),
    5: ((0, 1), (1, 2), (2, 0)),
    8: ((0, 1), (1, 3), (3, 2), (2, 0)),
    9: ((0, 1), (1, 2), (2, 3), (3, 0)),
    10: _TETRA,
    11: ((0, 1), (1, 3), (3, 2), (2, 0), (4, 5), (5, 7), (7, 6), (6, 4), (0, 4), (1, 5), (2, 6), (3, 7)),
    12: _HEXAHEDRON,
    13: _WEDGE,
    14: _PYRAMID,
}

# Quadratic cells: each edge of the linear cell runs over a node of its own, in the order of VTK's edges (a wedge's
# come in that order too). Linear type, number of its nodes.
_LINEAR = {21: (3, 2), 22: (5, 3), 23: (9, 4), 24: (10, 4), 25: (12, 8), 26: (13, 6), 27: (14, 5)}


def edges_of_cells(cells: RawCells, num_nodes: int) -> IntArray:
    """Return the edges of the cells, both directions, each once, by (destination, source).

    A polygon's edges join nodes that follow each other, the last and the first too; a quadratic cell's edges run over
    their middle nodes. Returns ``(2, num_edges)`` int64: sources, destinations. Raises ConfigError: a node out of
    range, or a cell whose number of nodes is not that of its type; UnsupportedFormatError: cell types without a known
    set of edges (polyhedra, Lagrange cells).
    """
    nodes = cells.connectivity
    if not len(nodes):
        return np.empty((2, 0), np.int64)
    if int(nodes.min()) < 0 or int(nodes.max()) >= num_nodes:
        bad = np.flatnonzero((nodes < 0) | (nodes >= num_nodes))
        first = owners_of(cells.offsets, bad[:5])
        raise ConfigError(
            f"{len(bad)} entries of the connectivity are outside the {num_nodes} nodes (first cells: {first.tolist()}, "
            f"values: {nodes[bad[:5]].tolist()})"
        )
    return both_directions(keys_of_edges(cells, num_nodes), num_nodes)


def keys_of_edges(cells: RawCells, num_nodes: int) -> Keys:
    """Return the edges of all cells as words, each cell's own, so that shared edges come more than once."""
    pairs = [pair for kind in np.unique(cells.cell_type) for pair in _edges_of_type(int(kind), cells)]
    keys = np.empty(sum(len(one) for one, _ in pairs), np.uint64)
    done = 0
    for one, other in pairs:
        undirected_keys(one, other, num_nodes, out=keys[done : done + len(one)])
        done += len(one)
    return keys


def cell_owner(offsets: npt.ArrayLike, connectivity: npt.ArrayLike) -> IntArray:
    """Return the lowest-numbered node of each cell, whose owner owns the cell; -1 for a cell without nodes."""
    starts, nodes = np.asarray(offsets, np.int64), np.asarray(connectivity)
    lowest = np.full(len(starts) - 1, -1, np.int64)
    filled = np.flatnonzero(starts[1:] > starts[:-1])
    if len(filled):  # empty cells take no entries, so the next filled cell begins where the last one ended
        lowest[filled] = np.minimum.reduceat(nodes, starts[filled])
    return lowest


def take_cells(offsets: IntArray, connectivity: AnyArray, rows: IntArray) -> tuple[IntArray, AnyArray]:
    """Return the offsets and the nodes of some cells, in the order of ``rows``."""
    num, size = len(offsets) - 1, (len(connectivity) // max(len(offsets) - 1, 1))
    if num * size == len(connectivity) and (np.diff(offsets) == size).all():  # faster, in half the memory
        taken = connectivity.reshape(num, size)[rows].reshape(-1) if size else connectivity[:0]
        return np.arange(len(rows) + 1, dtype=np.int64) * size, taken
    starts, stops = offsets[:-1][rows], offsets[1:][rows]
    return bounds_of(stops - starts), connectivity[ranges(starts, stops)]


def _edges_of_type(kind: int, cells: RawCells) -> list[tuple[NodeIds, NodeIds]]:
    """Return both ends of the edges of all cells of one type, edge by edge of the type; views if they can be."""
    if kind == POLYGON or kind == 4:
        rows = np.flatnonzero(cells.cell_type == kind)  # each node and the next; the last and the first of a polygon
        entries, following = rings(cells.offsets[rows], cells.offsets[rows + 1])
        if kind != POLYGON:
            inner = following > entries
            entries, following = entries[inner], following[inner]
        return [(cells.connectivity[entries], cells.connectivity[following])]
    if kind == 2:
        return []
    if kind not in NUM_NODES:
        num, name = int((cells.cell_type == kind).sum()), CELL_NAMES.get(kind, "unknown")
        raise UnsupportedFormatError(
            f"{num} cells are of VTK type {kind} ({name}), whose edges scidata does not know; "
            f"{FOR_POLYHEDRA if kind == POLYHEDRON else 'convert them to linear cells'}"
        )
    corners = _corners(kind, cells)
    columns = _EDGES.get(kind, ())
    if kind in _LINEAR:
        linear, first_middle = _LINEAR[kind]
        columns = tuple(half for i, (a, b) in enumerate(_EDGES[linear], first_middle) for half in ((a, i), (i, b)))
    return [(corners[:, a], corners[:, b]) for a, b in columns]


def _corners(kind: int, cells: RawCells) -> NodeIds:
    """Return ``(num, nodes of the type)``: the nodes of all cells of a type of fixed size."""
    size = NUM_NODES[kind]
    offsets, nodes = cells.offsets, cells.connectivity
    rows = np.flatnonzero(cells.cell_type == kind)
    bad = rows[np.diff(offsets)[rows] != size]
    if len(bad):
        raise ConfigError(
            f"{len(bad)} cells of type {CELL_NAMES[kind]} do not have {size} nodes (first cells: {bad[:5].tolist()})"
        )
    if len(rows) == cells.num_cells:  # one type only: no gather
        return nodes[offsets[0] : offsets[-1]].reshape(-1, size)
    return nodes[offsets[rows][:, None] + np.arange(size)]


def rings(starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray]:
    """Return every entry of the ranges ``[starts[i], stops[i])``, and the one that follows it round its range."""
    entries = ranges(starts, stops)
    following = entries + 1
    filled = stops > starts
    following[np.cumsum(stops - starts)[filled] - 1] = starts[filled]
    return entries, following
