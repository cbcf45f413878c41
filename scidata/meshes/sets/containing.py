"""Edges to each target from the corners of the cell of the source that contains it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, BoolArray, FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.ids import blocks
from scidata.meshes.order.neighbours import BLOCK_ROWS, make_tree
from scidata.meshes.sets.neighbours import join_edges
from scidata.meshes.sets.node_set import NodeSet, positions_of

if TYPE_CHECKING:
    from scipy.spatial import cKDTree

_SIZES = {5: (3,), 9: (4,), 7: (3, 4)}  # corners by VTK's type: triangles, quads, polygons of as many
_MAX_PAIRS = 1 << 19  # of targets and cells looked at together
_CANDIDATES = 8  # cells that are asked for at first; of a uniform mesh 3 to 6 could contain a point


def containing_cell_edges(source: NodeSet, target: NodeSet) -> IntArray:
    """Return an edge to each target from each corner of the source's cell that contains it.

    GraphCast's edges from mesh to grid (Lam et al., "Learning skillful medium-range global weather forecasting",
    Science 382, 2023, supplement 3). Its code takes the flat triangle that is nearest; here it is the one whose
    corners' directions enclose the target's, decided without rounding: they differ for targets on sides alone.

    - ``source``: with ``cells``: triangles and convex quads, on a sphere smaller than half of it, in either direction.
      Their sides are arcs of great circles. Repeated corners (quads at a pole) count once; cells without area contain
      nothing.
    - ``target``: in the same space; a target on a side or a corner belongs to the first of the cells there.

    Returns ``(2, num_edges)`` int64: sources, targets, by target, then source; 3 edges to a target in a triangle, as
    many as it has different nodes in a quad. Raises ConfigError: a source without cells or with others; cells that are
    not convex; targets outside all cells; sets in different spaces, or in space but not on a sphere.
    """
    cells = find_cells(source, target)
    inside = np.flatnonzero(cells >= 0)
    assert source.cells is not None  # find_cells has seen to it
    offsets, nodes = source.cells.offsets, source.cells.connectivity
    found = []
    for block in blocks(len(inside), BLOCK_ROWS):
        rows = inside[block]
        of_rows = cells[rows]
        sizes = offsets[of_rows + 1] - offsets[of_rows]
        for size in np.unique(sizes).tolist():
            some = sizes == size
            corners = np.sort(nodes[offsets[of_rows[some], None] + np.arange(size)], axis=1)
            new = np.ones(corners.shape, np.bool_)
            new[:, 1:] = corners[:, 1:] != corners[:, :-1]
            found.append(np.stack([corners[new], np.repeat(rows[some], new.sum(axis=1))]))
    return join_edges(found, num_targets=target.num_nodes, why="they lie outside all cells of the source")


def find_cells(source: NodeSet, target: NodeSet) -> IntArray:
    """Return the first of the source's cells that contains each target, ``(num_targets,)`` int64; -1 outside all."""
    start, end, tied = positions_of(source, target)
    if source.cells is None:
        raise ConfigError("the source has no cells that could contain a target; take nearest_edges or radius_edges")
    if not source.on_sphere:
        if start.shape[1] != 2:
            raise ConfigError("cells contain points of a plane or a sphere; these nodes have three coordinates")
        # the plane at height 1: a line in it is where it meets a plane through the origin, as an arc is on the sphere
        start, end = (np.column_stack([each, np.ones(len(each))]) for each in (start, end))
    cells = _Cells.of(source.cells, start)
    found = np.full(len(end), cells.num_cells, np.int64)
    for near in _by_size(cells, on_sphere=source.on_sphere, tied=tied):
        for rows in blocks(len(end), BLOCK_ROWS):
            np.minimum(found[rows], near.first_containing(end[rows]), out=found[rows])
    found[found == cells.num_cells] = -1
    return found


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """Triangles and quads.

    - ``places``: ``(num_nodes, 3)`` of all nodes.
    - ``corners``: ``(num_cells, 3 or 4)`` rows of ``places``; the last corner of a triangle is repeated among quads.
    - ``turn``: ``(num_cells,)``: 1 counter-clockwise, -1 clockwise, 0 without area.
    """

    places: FloatArray
    corners: IntArray
    turn: Signs

    @classmethod
    def of(cls, cells: RawCells, places: FloatArray) -> _Cells:
        sizes = np.diff(cells.offsets)
        fits = np.zeros(len(sizes), np.bool_)
        for code, allowed in _SIZES.items():
            fits |= (cells.cell_type == code) & np.isin(sizes, allowed)
        if not fits.all():
            wrong = np.flatnonzero(~fits)
            raise ConfigError(
                f"{len(wrong)} of {len(sizes)} cells are neither triangles nor quads (first: {wrong[:5].tolist()}, "
                f"with {sizes[wrong[:5]].tolist()} corners): split them into triangles, or take nearest_edges"
            )
        width = int(sizes.max()) if len(sizes) else 3
        place = np.minimum(np.arange(width), sizes[:, None] - 1)
        corners = cells.connectivity[cells.offsets[:-1, None] + place]
        return cls(places=places, corners=corners, turn=_turns(places, corners))

    @property
    def num_cells(self) -> int:
        return len(self.corners)

    def contain(self, cells: IntArray, points: FloatArray) -> BoolArray:
        """Say of each row whether that cell contains that point, its border included."""
        inside: BoolArray = self.turn[cells] != 0
        width = self.corners.shape[1]
        for at in range(width):
            rows = np.flatnonzero(inside)
            of_rows = cells[rows]
            here, after = self.places[self.corners[of_rows, at]], self.places[self.corners[of_rows, (at + 1) % width]]
            inside[rows] = orientations(here, after, points[rows]) * self.turn[of_rows] >= 0
        return inside


def _turns(places: FloatArray, corners: IntArray) -> Signs:
    """Return which way round the corners of each cell are; corners at one place turn neither way."""
    num, width = corners.shape
    turn = np.empty(num, np.int8)
    bent: list[int] = []
    for rows in blocks(num, BLOCK_ROWS):
        of_rows = [places[corners[rows, at]] for at in range(width)]
        signs = [orientations(of_rows[i], of_rows[(i + 1) % width], of_rows[(i + 2) % width]) for i in range(width)]
        left, right = (np.stack(signs) > 0).any(axis=0), (np.stack(signs) < 0).any(axis=0)
        bent += (rows.start + np.flatnonzero(left & right)).tolist()
        turn[rows] = left.astype(np.int8) - right.astype(np.int8)
    if bent:
        raise ConfigError(
            f"{len(bent)} of {num} cells are not convex, or larger than half of the sphere (first: {bent[:5]}): split "
            "them into triangles"
        )
    return turn


@dataclass(frozen=True, kw_only=True)
class _SizeClass:
    """Cells of about one size: each lies within ``reach`` of its centre, by which the tree finds it."""

    cells: _Cells
    rows: IntArray
    tree: cKDTree
    reach: float

    def first_containing(self, points: FloatArray) -> IntArray:
        """Return the first cell that contains each point; the number of all cells where none does."""
        found = np.full(len(points), self.cells.num_cells, np.int64)
        todo, width = np.arange(len(points)), _CANDIDATES
        while len(todo):
            width = min(width, self.tree.n)
            left, size = [], max(_MAX_PAIRS // width, 1)
            for part in blocks(len(todo), size):
                here = todo[part]
                near = self.tree.query(points[here], k=np.arange(1, width + 1), distance_upper_bound=self.reach)[1]
                whole = (near[:, -1] == self.tree.n) | (width == self.tree.n)  # there may be more than were asked for
                left.append(here[~whole])
                at, column = np.nonzero((near < self.tree.n) & whole[:, None])
                candidates = self.rows[near[at, column]]
                inside = self.cells.contain(candidates, points[here[at]])
                np.minimum.at(found, here[at[inside]], candidates[inside])
            todo, width = np.concatenate(left), 4 * width
        return found


def _by_size(cells: _Cells, *, on_sphere: bool, tied: float) -> Iterator[_SizeClass]:
    """Sort cells with area into classes of half the size each: a large one then slows down no small ones."""
    rows = np.flatnonzero(cells.turn)
    centres, reach = np.empty((len(rows), 3)), np.empty(len(rows))
    for here in blocks(len(rows), BLOCK_ROWS):
        corners = cells.places[cells.corners[rows[here]]]
        centre = corners.mean(axis=1)
        if on_sphere:  # the cap round it that reaches the corners contains the cell, if it is less than half
            centre /= np.sqrt((centre**2).sum(axis=1, keepdims=True))
        centres[here] = centre
        reach[here] = np.sqrt(((corners - centre[:, None]) ** 2).sum(axis=2).max(axis=1))
    if on_sphere:
        reach[~(reach < 1.4)] = 2.1
    reach = reach * (1 + 1e-9) + tied
    size_class = np.floor(np.log2(reach.max(initial=0.0) / reach)).astype(np.int64)
    for each in np.unique(size_class):
        some = np.flatnonzero(size_class == each)
        yield _SizeClass(cells=cells, rows=rows[some], tree=make_tree(centres[some]), reach=float(reach[some].max()))


Signs = npt.NDArray[np.int8]

# Products, differences and sums round at most five times on the way to each of the terms; 8 leaves room for the bound's
# own rounding. Below the second number products may have lost bits to underflow.
_ROUNDED = 8 * 2.0**-53
_TINY = 1e-280
_BLOCK = 1 << 14


def orientations(one: FloatArray, two: FloatArray, points: FloatArray) -> Signs:
    """Return the exact sign of ``det(one, two, point)``, rows ``(num, 3)``: 1 left of the way, seen from outside."""
    (ax, ay, az), (bx, by, bz), (px, py, pz) = one.T, two.T, points.T
    value, size = np.zeros(len(points)), np.zeros(len(points))
    for (u, v), (s, t), w in (((ay, az), (by, bz), px), ((az, ax), (bz, bx), py), ((ax, ay), (bx, by), pz)):
        first, second = u * t, v * s
        value += (first - second) * w
        size += (np.abs(first) + np.abs(second)) * np.abs(w)
    signs = np.sign(value).astype(np.int8)
    open_rows = np.flatnonzero(~(np.abs(value) > _ROUNDED * size + _TINY))
    # a point at an end of the way is on it: no arithmetic for the commonest case
    ends = (one[open_rows] == points[open_rows]).all(axis=1) | (two[open_rows] == points[open_rows]).all(axis=1)
    ends |= (one[open_rows] == two[open_rows]).all(axis=1)
    signs[open_rows[ends]] = 0
    rest = open_rows[~ends]
    for part in blocks(len(rest), _BLOCK):
        rows = rest[part]
        signs[rows] = _exact_signs(one[rows], two[rows], points[rows])
    return signs


def _exact_signs(one: FloatArray, two: FloatArray, points: FloatArray) -> Signs:
    a, b, p = _integers(one), _integers(two), _integers(points)
    value = (a[:, 1] * b[:, 2] - a[:, 2] * b[:, 1]) * p[:, 0]
    value += (a[:, 2] * b[:, 0] - a[:, 0] * b[:, 2]) * p[:, 1]
    value += (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) * p[:, 2]
    return (value > 0).astype(np.int8) - (value < 0).astype(np.int8)


def _integers(values: FloatArray) -> AnyArray:
    """Return whole numbers of any length in the ratios of the values of each row."""
    mantissa, exponent = np.frexp(values)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    exponent = np.where(whole == 0, np.iinfo(exponent.dtype).max, exponent)  # zeros say nothing about the common factor
    shift = np.where(whole == 0, 0, exponent - exponent.min(axis=1, keepdims=True))
    return np.asarray(whole.astype(object) << shift.astype(object))
