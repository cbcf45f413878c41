"""Every fault that a raw sample can have: found, counted, named, repaired or refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from scidata.meshes.geometry import Geometry, RawCells
from scidata.meshes.order.cells import edges_of_cells
from scidata.meshes.order.faces import crowded_faces
from scidata.meshes.order.faults import REMEDIES, check_sample, repair


def check(raw, num_nodes=None):
    return check_sample(raw, len(raw.points) if num_nodes is None else num_nodes)


def cells_of(lists, types):
    return RawCells(
        offsets=np.cumsum([0] + [len(c) for c in lists]),
        connectivity=np.array([n for c in lists for n in c], np.int64),
        cell_type=np.array(types, np.uint8),
    )


def raw_of(points=None, cells=None, edges=None):
    return Geometry(points=points, cells=cells, edge_index=edges)


def grid_mesh(side=4):
    """Quads of a square grid: (points, cells)."""
    rows = np.arange(side * side).reshape(side, side)
    quads = np.stack([rows[:-1, :-1], rows[1:, :-1], rows[1:, 1:], rows[:-1, 1:]], -1).reshape(-1, 4)
    points = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2).astype(float)
    return points, cells_of(quads.tolist(), [9] * len(quads))


def kinds(raw, **options):
    return {f.kind: (f.count, f.first_rows) for f in check(raw, **options)}


def test_sound_samples_have_no_findings():
    points, cells = grid_mesh()
    edges = edges_of_cells(cells, 16)
    assert check(raw_of(points, cells, edges)) == []
    assert check(raw_of(points)) == []
    assert check(raw_of(None, None, edges), num_nodes=16) == []
    assert check(raw_of(np.empty((0, 2)), cells_of([], []), np.empty((2, 0), np.int64))) == []


def test_each_fault_is_counted_and_named_with_its_first_rows():
    points, good = grid_mesh()
    points[[2, 7], [0, 1]] = np.nan, -np.inf
    lists = [good.connectivity[i * 4 : i * 4 + 4].tolist() for i in range(9)]
    lists[1][2] = -1  # lacks a node
    lists[3] = lists[3][:3]  # a quad of three nodes
    lists[4][0] = 16  # out of range
    lists[6][1] = np.int64(3_000_000_000).astype(np.int32)  # stored in 32 bits
    lists += [[0, 1], [], [5, 6, 9]]
    types = [9] * 9 + [7, 7, 7]
    edges = np.array([[0, 1, 0, 3, 5, 0, 99, -1], [1, 0, 1, 3, 6, 1, 0, 4]])
    found = check(raw_of(points, cells_of(lists, types), edges))
    assert {f.kind: (f.count, f.first_rows) for f in found} == {
        "nan_points": (2, (2, 7)),
        "missing_nodes": (2, (1, 3)),
        "cell_index_out_of_range": (1, (4,)),
        "small_faces": (2, (9, 10)),
        "edge_index_out_of_range": (2, (6, 7)),
        "duplicate_edges": (2, (2, 5)),
        "self_loops": (1, (3,)),
        "int32_overflow": (1, (6,)),
    }
    messages = {f.kind: f.message for f in found}
    assert messages["nan_points"].startswith("2 of 16 points have a NaN or infinite coordinate (first rows: [2, 7])")
    assert "2 of 8 edges" in messages["duplicate_edges"]
    assert "64 bits" in messages["int32_overflow"]
    assert [f.kind for f in found if not f.repairable] == ["int32_overflow"]


def test_only_the_first_five_rows_are_kept():
    edges = np.tile(np.arange(20), (2, 1))
    (found,) = check(raw_of(None, None, edges), num_nodes=20)
    assert (found.kind, found.count, found.first_rows) == ("self_loops", 20, (0, 1, 2, 3, 4))


def test_faces_between_more_than_two_cells():
    # three triangles on the edge 0-1, and a quad and a polygon that share an edge properly
    flat = cells_of([[0, 1, 2], [1, 0, 3], [0, 1, 4], [2, 3, 5, 6], [3, 2, 7]], [5, 5, 5, 9, 7])
    assert kinds(raw_of(np.zeros((8, 3)), flat)) == {"crowded_faces": (1, (0, 1, 2))}
    # three tets on the face 0-1-2; a wedge and a hexahedron that share a quad with each other only
    solid = cells_of(
        [[0, 1, 2, 3], [0, 2, 1, 4], [2, 1, 0, 5], [6, 7, 8, 9, 10, 11], [6, 7, 10, 9, 12, 13, 14, 15]],
        [10, 10, 10, 13, 12],
    )
    assert kinds(raw_of(np.zeros((16, 3)), solid)) == {"crowded_faces": (1, (0, 1, 2))}


SOLIDS = {
    10: [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)],
    11: [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)],
    12: [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)],
    13: [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)],
    14: [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0.5, 0.5, 1)],
}


@pytest.mark.parametrize("kind", sorted(SOLIDS))
def test_each_face_of_a_solid_is_a_facet_of_its_shape(kind):
    corners = np.array(SOLIDS[kind], float)
    planes = np.unique(ConvexHull(corners).equations.round(9), axis=0)
    facets = [np.flatnonzero(np.abs(corners @ p[:3] + p[3]) < 1e-7) for p in planes]
    for facet in facets:  # three copies of the cell that have this facet's nodes in common, and no others
        lists = []
        for copy in range(3):
            nodes = np.arange(len(corners)) + 100 * copy
            nodes[facet] = facet
            lists.append(nodes.tolist())
        raw = raw_of(np.zeros((300, 3)), cells_of(lists, [kind] * 3))
        assert kinds(raw) == {"crowded_faces": (1, (0, 1, 2))}, facet


def test_shared_faces_are_found_whatever_the_number_of_nodes():
    tets = np.array([[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5], [3, 4, 5, 0]])
    for num_nodes in (10, 1 << 21, 1 << 22, 1 << 32):  # more bits than three ids of a face have room for
        ids = (tets * (num_nodes // 10)).ravel()
        cells = RawCells(offsets=np.arange(5) * 4, connectivity=ids, cell_type=np.full(4, 10, np.uint8))
        count, cells = crowded_faces(cells, num_nodes)
        assert (count, cells.tolist()) == (1, [0, 1, 2])


def test_edges_of_pixels_run_round_them():
    # two pixels side by side, and triangles on the diagonal of one, then on the edge between them
    pixels = cells_of([[0, 1, 2, 3], [1, 4, 3, 5], [1, 2, 6], [1, 2, 7]], [8, 8, 5, 5])
    assert kinds(raw_of(np.zeros((8, 2)), pixels)) == {}
    shared = cells_of([[0, 1, 2, 3], [1, 4, 3, 5], [1, 3, 6]], [8, 8, 5])
    assert kinds(raw_of(np.zeros((7, 2)), shared)) == {"crowded_faces": (1, (0, 1, 2))}


def test_repairs_leave_out_what_is_broken_and_renumber_the_rest():
    points, good = grid_mesh()
    points[0] = np.nan
    lists = [good.connectivity[i * 4 : i * 4 + 4].tolist() for i in range(9)]
    lists[8][0] = -1
    raw = raw_of(points, cells_of(lists, [9] * 9), np.array([[0, 1, 4, 1, 3, 2], [1, 4, 1, 4, 3, 40]]))
    mended = repair(raw, check(raw), 16)
    assert mended.kept_nodes.tolist() == list(range(1, 16))
    assert np.array_equal(mended.geometry.points, points[1:])
    assert mended.kept_cells.tolist() == [1, 2, 3, 4, 5, 6, 7]
    original = mended.kept_nodes[mended.geometry.cells.connectivity].reshape(-1, 4)
    assert original.tolist() == lists[1:8]
    assert mended.geometry.cells.offsets.tolist() == list(range(0, 29, 4))
    assert mended.geometry.cells.cell_type.tolist() == [9] * 7
    assert mended.kept_edges.tolist() == [1, 2]
    assert mended.kept_nodes[mended.geometry.edge_index].tolist() == [[1, 4], [4, 1]]


def test_a_sound_sample_is_handed_back_as_it_is():
    points, cells = grid_mesh()
    edges = edges_of_cells(cells, 16)
    mended = repair(raw_of(points, cells, edges), [], 16)
    assert (mended.kept_nodes, mended.kept_cells, mended.kept_edges) == (None, None, None)
    assert mended.geometry.cells is cells
    assert mended.geometry.edge_index is edges


def test_edges_that_repeat_or_lead_to_themselves_are_dropped():
    raw = raw_of(None, None, np.array([[0, 0, 1], [1, 1, 1]]))
    findings = check(raw, 2)
    assert findings[-1].message.startswith("1 of 3 edges lead from a node to itself (first rows: [2])")
    assert repair(raw, findings, 2).geometry.edge_index.tolist() == [[0], [1]]


def test_nothing_repairs_ids_that_overflowed():
    wrapped = np.array([3_000_000_000]).astype(np.int32).astype(np.int64)
    (found,) = check(raw_of(None, None, np.array([wrapped, [0]])), 2)
    assert (found.kind, found.repairable) == ("int32_overflow", False)
    assert "64 bits" in found.message


def test_crowded_faces_are_kept_as_they_are():
    raw = raw_of(np.zeros((5, 3)), cells_of([[0, 1, 2], [1, 0, 3], [0, 1, 4]], [5, 5, 5]))
    (found,) = check(raw)
    assert found.message.startswith("1 faces lie between more than two cells")
    assert repair(raw, [found], 5).kept_cells is None


@settings(deadline=None)
@given(st.data())
def test_a_repaired_sample_has_no_findings_left(data):
    num_nodes = data.draw(st.integers(1, 8))
    values = st.floats(-1, 1) | st.sampled_from([np.nan, np.inf])
    points = np.array(data.draw(st.lists(st.tuples(values, values), min_size=num_nodes, max_size=num_nodes)))
    node = st.integers(-2, num_nodes + 1)
    lists = data.draw(st.lists(st.lists(node, max_size=5), max_size=8))
    types = [data.draw(st.sampled_from([5, 7, 9, 10])) for _ in lists]
    edges = np.array(data.draw(st.lists(st.tuples(node, node), max_size=12)), np.int64).reshape(-1, 2).T
    raw = raw_of(points, cells_of(lists, types), edges)
    findings = check(raw)
    assert {f.kind for f in findings} <= set(REMEDIES)
    mended = repair(raw, findings, num_nodes)
    assert {f.kind for f in check(mended.geometry)} <= {"crowded_faces"}
    # what was kept is what was there
    kept_nodes = np.arange(num_nodes) if mended.kept_nodes is None else mended.kept_nodes
    kept_cells = range(len(lists)) if mended.kept_cells is None else mended.kept_cells
    kept_edges = np.arange(edges.shape[1]) if mended.kept_edges is None else mended.kept_edges
    assert np.array_equal(kept_nodes[mended.geometry.cells.connectivity], [n for c in kept_cells for n in lists[c]])
    assert np.array_equal(kept_nodes[mended.geometry.edge_index], edges[:, kept_edges])
