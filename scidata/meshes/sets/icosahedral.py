"""Refined icosahedra, and the edges of several of their levels at once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np

from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.csr import symmetrise
from scidata.meshes.sets.node_set import NodeSet, degrees_of

#: 168 M nodes; a level more is four times as many.
MAX_LEVEL = 12
_TRIANGLE = 5
_GOLDEN = (1 + 5**0.5) / 2


def icosahedral(level: int) -> NodeSet:
    """Return the nodes and triangles of an icosahedron whose faces were each split in four ``level`` times.

    New nodes are the middles of edges, moved out to the sphere, as in the mesh of GraphCast (Lam et al., "Learning
    skillful medium-range global weather forecasting", Science 382, 2023, supplement 3), which has the middle of a face
    at each pole too.

    - ``level``: 0 to 12.

    Returns ``10 * 4**level + 2`` nodes, ``20 * 4**level`` triangles. The nodes of a lower level are the first ones, in
    the same order; those that a level adds are in the order of the nodes they lie between.
    """
    _check_levels([level])
    points, faces = _icosahedron()
    (x, y, z), cosine, sine = points.T, np.cos(_TILT), np.sin(_TILT)
    points = np.stack([cosine * x - sine * z, y, sine * x + cosine * z], axis=1)  # turned about the y axis, x to z
    for _ in range(level):
        faces, parents = _split(faces, len(points))
        middles = points[parents[0]] + points[parents[1]]
        middles /= np.sqrt((middles * middles).sum(axis=1, keepdims=True))
        points = np.concatenate([points, middles])
    return NodeSet(points=degrees_of(points), on_sphere=True, cells=RawCells.of_kind(faces, _TRIANGLE))


def multi_mesh_edges(levels: Iterable[int] | int) -> IntArray:
    """Return the edges of several levels of a refined icosahedron together: GraphCast's multi-mesh.

    Defined in Lam et al., "Learning skillful medium-range global weather forecasting", Science 382, 2023, supplement 3:
    the nodes are those of the finest level, whose first ones are the nodes of each coarser level.

    - ``levels``: the levels whose edges are taken; one number ``L`` stands for 0 to ``L``.

    Returns ``(2, num_edges)`` int64: sources, targets, both directions, by target, then source: ``60 * 4**l`` of level
    ``l``. Levels share no edge. Rows are those of :func:`icosahedral` at the highest level or above.
    """
    if not isinstance(levels, Iterable):
        _check_levels([levels])
        levels = range(levels + 1)
    wanted = list(levels)
    _check_levels(wanted)
    points, faces = _icosahedron()
    num_nodes, pairs = len(points), []
    for level in range(max(wanted) + 1):
        finer, sides = _split(faces, num_nodes)
        if level in wanted:
            pairs.append(sides)
        faces, num_nodes = finer, num_nodes + sides.shape[1]
    every = np.concatenate(pairs, axis=1)
    return symmetrise(every[0], every[1], num_nodes)


def _check_levels(levels: list[int]) -> None:
    wrong = [each for each in levels if not isinstance(each, int | np.integer) or not 0 <= each <= MAX_LEVEL]
    if wrong or not levels:
        raise ConfigError(f"levels of an icosahedron are whole numbers from 0 to {MAX_LEVEL}, not {wrong or levels}")
    if len(set(levels)) < len(levels):
        raise ConfigError(f"each level's edges are taken once, but {levels} names one twice")


def _icosahedron() -> tuple[FloatArray, IntArray]:
    """Return the 12 vertices, of length 1, and the 20 faces, counter-clockwise from outside, ordered by vertex."""
    flat = [(0.0, one, two) for two in (_GOLDEN, -_GOLDEN) for one in (1.0, -1.0)]
    points = np.array([np.roll(each, turn) for turn in range(3) for each in flat]) / np.hypot(1, _GOLDEN)
    side = 2 / np.hypot(1, _GOLDEN)
    faces = []
    for a, b, c in combinations(range(12), 3):
        corners = points[[a, b, c]]
        if np.allclose(np.linalg.norm(corners - np.roll(corners, 1, axis=0), axis=1), side):
            faces.append((a, b, c) if np.linalg.det(corners) > 0 else (a, c, b))
    return points, np.array(faces, np.int64)


# The vertices (0, 1, g), (0, -1, g) and (g, 0, 1) are a face; turned by this angle, its middle lies over the pole.
_TILT = float(np.arctan2(_GOLDEN, 2 * _GOLDEN + 1))


def _split(faces: IntArray, num_nodes: int) -> tuple[IntArray, IntArray]:
    """Split triangles in four; return these, and the nodes ``(2, num_edges)`` between which each new node lies."""
    ends = np.roll(faces, -1, axis=1)
    keys = np.minimum(faces, ends) * num_nodes + np.maximum(faces, ends)
    distinct, place = np.unique(keys, return_inverse=True)
    middle = num_nodes + place.reshape(faces.shape)
    (a, b, c), (ab, bc, ca) = faces.T, middle.T
    children = np.stack([a, ab, ca, b, bc, ab, c, ca, bc, ab, bc, ca], axis=1)
    return children.reshape(-1, 3), np.stack(np.divmod(distinct, num_nodes))
