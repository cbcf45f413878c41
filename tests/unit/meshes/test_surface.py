"""The surface of solid cells: its faces, which way they look, what cutting cells away lays open."""

import numpy as np
import pytest

from scidata.meshes.order.faces import surface_of

HEXAHEDRON = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]])


def block(n):
    """``n`` x ``n`` x ``n`` hexahedra: points, and cells as VTK has them."""
    number = lambda ijk: (ijk[..., 0] * (n + 1) + ijk[..., 1]) * (n + 1) + ijk[..., 2]  # noqa: E731
    points = np.stack(np.meshgrid(*[np.arange(n + 1)] * 3, indexing="ij"), axis=-1).reshape(-1, 3).astype(float)
    lows = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), axis=-1).reshape(-1, 1, 3)
    cells = number(lows + HEXAHEDRON)
    return points, np.arange(0, cells.size + 1, 8), cells.ravel(), np.full(len(cells), 12, np.uint8)


def test_a_block_of_hexahedra():
    points, offsets, nodes, types = block(3)
    whole = surface_of(offsets, nodes, types, np.arange(27))
    assert len(whole.cell) == 6 * 9
    assert 13 not in whole.cell, "the cell in the middle"
    centres = points[nodes.reshape(-1, 8)].mean(axis=1)
    seen = whole.facing(points, centres, np.array([1.0, 2.0, 3.0]))
    assert len(seen) == 3 * 9
    assert all((points[whole.corners[i]] == 3).all(axis=0).any() for i in seen)
    # without a corner cell: its three outer faces go, and the three behind it come
    cut = surface_of(offsets, nodes, types, np.arange(26))
    assert len(cut.cell) == 54
    assert len(cut.facing(points, centres, np.array([1.0, 1.0, 1.0]))) == 27
    assert set(cut.cell[(points[cut.corners] == 2).all(axis=1).any(axis=1)]) >= {25, 23, 17}


@pytest.mark.parametrize(
    ("kind", "corners", "faces"), [(10, 4, 4), (13, 6, 5), (14, 5, 5), (12, 8, 6), (11, 8, 6), (24, 10, 4), (26, 15, 5)]
)
def test_one_cell_of_each_kind(kind, corners, faces):
    found = surface_of(np.array([0, corners]), np.arange(corners), np.array([kind], np.uint8), np.array([0]))
    assert len(found.cell) == faces
    assert found.corners.max() < (4 if kind in (10, 24) else 6 if kind in (13, 26) else corners)


def test_two_tetrahedra_share_a_face_from_either_side():
    nodes = np.array([0, 1, 2, 3, 2, 1, 0, 4])
    found = surface_of(np.array([0, 4, 8]), nodes, np.array([10, 10], np.uint8), np.arange(2))
    assert len(found.cell) == 6
    assert not [face for face in found.corners if {*face.tolist()} == {0, 1, 2}]


def test_flat_cells_have_no_surface():
    found = surface_of(np.array([0, 3]), np.arange(3), np.array([5], np.uint8), np.array([0]))
    assert found.corners.shape == (0, 4)
