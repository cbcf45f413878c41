"""Edges, ghosts and cuts of random graphs and meshes against plain Python."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import Delaunay

from scidata.core.index_map import IndexMap
from scidata.errors import ConfigError, UnsupportedFormatError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import cell_owner, edges_of_cells
from scidata.meshes.order.csr import csr_from_edges, symmetrise
from scidata.meshes.order.cuts import cut_bounds, prefix_of
from scidata.meshes.order.hilbert import order_hilbert
from scidata.meshes.order.ids import low_ids, pair_keys
from scidata.meshes.order.neighbours import near_edges
from scidata.meshes.order.quality import measure_quality, quality_of_parts


@st.composite
def graphs(draw):
    """A directed graph: parallel edges, self-loops and isolated nodes too. (src, dst, num_nodes)"""
    num_nodes = draw(st.integers(1, 25))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=60))
    dtype = draw(st.sampled_from([np.int32, np.int64, np.uint32]))
    src, dst = np.array(edges, dtype).reshape(-1, 2).T
    return src, dst, num_nodes


@st.composite
def bounds_of(draw, num_nodes):
    num_parts = draw(st.integers(1, 6))
    inner = sorted(draw(st.lists(st.integers(0, num_nodes), min_size=num_parts - 1, max_size=num_parts - 1)))
    return np.array([0, *inner, num_nodes])


def mesh(num_points, dims, seed=0):
    """A Delaunay mesh of random points: (points, offsets, connectivity, cell_type)."""
    points = np.random.default_rng(seed).random((num_points, dims))
    cells = Delaunay(points).simplices
    types = np.full(len(cells), {2: 5, 3: 10}[dims], np.uint8)
    return points, np.arange(len(cells) + 1) * (dims + 1), cells.ravel().astype(np.int64), types


@settings(deadline=None)
@given(graphs())
def test_csr_holds_each_edge_once_by_destination_then_source(graph):
    src, dst, num_nodes = graph
    csr = csr_from_edges(src, dst, num_nodes)
    order = np.lexsort((src, dst))
    assert csr.edge_id.tolist() == order.tolist()  # lexsort is stable: parallel edges in their given order
    assert csr.src.tolist() == src[order].tolist()
    assert csr.dst().tolist() == dst[order].tolist()
    assert csr.src.dtype == csr.dst().dtype == np.int32
    assert (csr.num_nodes, csr.num_edges) == (num_nodes, len(src))
    assert csr.indptr.tolist() == [int((dst < i).sum()) for i in range(num_nodes + 1)]
    again = csr_from_edges(csr.src, csr.dst(), num_nodes)
    assert again.edge_id.tolist() == list(range(len(src)))


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("num_nodes", [3, 1 << 20, (1 << 23) + 1], ids=["few", "one word", "more than a word"])
def test_csr_of_more_edges_than_a_block(num_nodes, in_order):
    src, dst = np.random.default_rng(0).integers(0, num_nodes, (2, 100_000))
    order = np.lexsort((src, dst))
    if in_order:
        src, dst, order = src[order], dst[order], np.arange(len(src))
    csr = csr_from_edges(src, dst, num_nodes)
    assert np.array_equal(csr.edge_id, order)
    assert np.array_equal(csr.src, src[order])
    assert np.array_equal(np.diff(csr.indptr), np.bincount(dst, minlength=num_nodes))


@settings(deadline=None)
@given(graphs(), st.data())
def test_parts_of_a_csr_cover_the_edges_and_their_ghosts_are_the_sources_not_owned(graph, data):
    src, dst, num_nodes = graph
    csr = csr_from_edges(src, dst, num_nodes)
    bounds = data.draw(bounds_of(num_nodes))
    seen = []
    for part in range(len(bounds) - 1):
        start, stop = bounds[part], bounds[part + 1]
        edges = slice(csr.indptr[start], csr.indptr[stop])
        seen += csr.edge_id[edges].tolist()
        ghosts = np.setdiff1d(csr.src[edges], np.arange(start, stop))
        index_map = IndexMap(bounds=bounds, part=part, ghosts=ghosts)
        assert all(bounds[o] <= g < bounds[o + 1] for o, g in zip(index_map.owners, ghosts, strict=True))
        local = index_map.to_local(csr.src[edges])
        assert index_map.to_global(local).tolist() == csr.src[edges].tolist()
    assert sorted(seen) == list(range(len(src)))


@settings(deadline=None)
@given(graphs())
def test_symmetric_edges_are_both_directions_once(graph):
    src, dst, num_nodes = graph
    pairs = {(int(a), int(b)) for a, b in zip(src, dst, strict=True) if a != b}
    expected = sorted({(d, s) for s, d in pairs} | pairs)
    found = symmetrise(src, dst, num_nodes)
    assert found.dtype == np.int64
    assert list(zip(found[1].tolist(), found[0].tolist(), strict=True)) == expected  # by destination, then source


def test_ids_of_more_than_31_bits_are_packed_and_kept():
    num_nodes = 1 << 32
    ids = np.array([0, 5, (1 << 31) + 3, num_nodes - 1])
    low = low_ids(pair_keys(ids, ids[::-1], num_nodes), num_nodes)
    assert low.tolist() == ids[::-1].tolist()
    assert low.dtype == np.int64
    assert symmetrise(ids[2:3], ids[3:], num_nodes).tolist() == [
        [num_nodes - 1, (1 << 31) + 3],
        [(1 << 31) + 3, num_nodes - 1],
    ]


def test_edges_that_name_no_node_are_refused_with_their_rows():
    with pytest.raises(ConfigError, match=r"2 edge sources are outside the 3 nodes \(first edges: \[1, 2\]"):
        csr_from_edges([0, 3, -1], [0, 1, 2], 3)
    with pytest.raises(ConfigError, match="destinations"):
        csr_from_edges([0], [7], 3)
    with pytest.raises(ConfigError, match="2 edge sources but 1 destinations"):
        csr_from_edges([0, 1], [1], 3)
    with pytest.raises(ConfigError, match="integers"):
        csr_from_edges([0.0], [1.0], 3)
    with pytest.raises(ConfigError, match=r"2\*\*32"):
        csr_from_edges([0], [1], (1 << 32) + 1)


def edges_one_by_one(offsets, connectivity, edges):
    found = set()
    for cell, (start, stop) in enumerate(itertools.pairwise(offsets)):
        nodes = connectivity[start:stop]
        for a, b in edges(cell, len(nodes)):
            found |= {(int(nodes[a]), int(nodes[b])), (int(nodes[b]), int(nodes[a]))}
    return sorted({(d, s) for s, d in found if s != d})


def edges_of(offsets, nodes, types, num_nodes=None):
    nodes = np.asarray(nodes)
    cells = RawCells(offsets=np.asarray(offsets), connectivity=nodes, cell_type=np.asarray(types, np.uint8))
    return edges_of_cells(cells, int(nodes.max(initial=-1)) + 1 if num_nodes is None else num_nodes)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 15), min_size=0, max_size=7), max_size=12), st.lists(st.booleans(), min_size=12)
)
def test_edges_of_polygons_and_polylines_follow_their_nodes(cells, closed):
    offsets = np.cumsum([0] + [len(c) for c in cells])
    nodes = np.array([n for c in cells for n in c], np.int64)
    types = np.array([7 if closed[i] else 4 for i in range(len(cells))], np.uint8)

    def ring(cell, size):
        return [(i, (i + 1) % size) for i in range(size if closed[cell] else size - 1)]

    found = edges_of(offsets, nodes, types)
    assert list(zip(found[1].tolist(), found[0].tolist(), strict=True)) == edges_one_by_one(offsets, nodes, ring)
    owners = cell_owner(offsets, nodes)
    assert owners.tolist() == [min(c) if c else -1 for c in cells]


# Corners of one cell of each kind, in VTK's order: two of them are joined where they differ in one coordinate, or as
# said. That is a geometric definition, and shares nothing with the tables under test.
UNIT = {
    5: ([(0, 0), (1, 0), (0, 1)], 3),
    9: ([(0, 0), (1, 0), (1, 1), (0, 1)], 4),
    8: ([(0, 0), (1, 0), (0, 1), (1, 1)], 4),
    10: ([(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)], 6),
    12: ([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)], 12),
    11: ([(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)], 12),
    13: ([(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)], 9),
    14: ([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0.5, 0.5, 1)], 8),
}


def hull_edges(kind):
    """Pairs of corners whose middle lies on two facets' common border, found from the cell's geometry."""
    from scipy.spatial import ConvexHull

    corners = np.array(UNIT[kind][0], float)
    hull = ConvexHull(corners)
    planes = np.unique(hull.equations.round(9), axis=0)
    needed = corners.shape[1] - 1  # an edge lies in this many facets
    joined = set()
    for a in range(len(corners)):
        for b in range(a + 1, len(corners)):
            middle = (corners[a] + corners[b]) / 2
            if (np.abs(planes[:, :-1] @ middle + planes[:, -1]) < 1e-7).sum() >= needed:
                joined.add((a, b))
    return joined


@pytest.mark.parametrize("kind", sorted(UNIT))
def test_edges_of_each_cell_type_are_those_of_its_shape(kind):
    corners, count = UNIT[kind]
    found = edges_of([0, len(corners)], np.arange(len(corners)), [kind])
    joined = {(a, b) for a, b in found.T.tolist() if a < b}
    assert joined == hull_edges(kind)
    assert len(joined) == count


@pytest.mark.parametrize(("kind", "linear"), [(22, 5), (23, 9), (24, 10), (25, 12), (26, 13), (27, 14)])
def test_edges_of_quadratic_cells_run_over_the_middle_nodes(kind, linear):
    num_corners = len(UNIT[linear][0])
    size = num_corners + UNIT[linear][1]
    found = edges_of([0, size], np.arange(size), [kind])
    joined = {}
    for a, b in found.T.tolist():
        joined.setdefault(b, set()).add(a)
    over = {tuple(sorted(joined[m])) for m in range(num_corners, size)}
    assert over == hull_edges(linear)


def test_edges_of_mixed_cells_are_those_of_each_kind_together():
    # a quad, a triangle on it, a line, a vertex, a polygon; the 1-2 edge is shared
    cells = [(9, [0, 1, 2, 3]), (5, [1, 4, 2]), (3, [4, 5]), (1, [6]), (7, [3, 2, 7])]
    offsets = np.cumsum([0] + [len(nodes) for _, nodes in cells])
    found = edges_of(offsets, np.concatenate([n for _, n in cells]), [k for k, _ in cells], 8)
    one_way = {(a, b) for a, b in found.T.tolist() if a < b}
    assert one_way == {(0, 1), (1, 2), (2, 3), (0, 3), (1, 4), (2, 4), (4, 5), (2, 7), (3, 7)}
    assert found.shape[1] == 2 * len(one_way)


def test_cells_that_cannot_be_used_are_refused():
    with pytest.raises(ConfigError, match=r"outside the 3 nodes \(first cells: \[1\], values: \[3\]"):
        edges_of([0, 3, 6], [0, 1, 2, 1, 2, 3], [5, 5], 3)
    with pytest.raises(ConfigError, match="outside"):
        edges_of([0, 3], [0, 1, -1], [5], 3)
    with pytest.raises(ConfigError, match=r"cells of type tetra do not have 4 nodes \(first cells: \[0\]\)"):
        edges_of([0, 3], [0, 1, 2], [10], 3)
    with pytest.raises(UnsupportedFormatError, match=r"1 cells are of VTK type 42 \(polyhedron\)"):
        edges_of([0, 4], [0, 1, 2, 3], [42], 4)
    assert edges_of([0], np.empty(0, np.int64), np.empty(0, np.uint8)).shape == (2, 0)


@pytest.mark.parametrize("dims", [2, 3])
def test_edges_of_a_mesh_are_those_of_its_triangulation(dims):
    points, offsets, nodes, types = mesh(300, dims)
    indptr, neighbours = Delaunay(points).vertex_neighbor_vertices
    csr = csr_from_edges(*edges_of(offsets, nodes, types, 300), 300)
    assert np.array_equal(csr.indptr, indptr)
    for node in range(300):
        assert csr.src[indptr[node] : indptr[node + 1]].tolist() == sorted(neighbours[indptr[node] : indptr[node + 1]])


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 6), st.integers(0, 2**32 - 1), st.booleans())
def test_nearest_neighbours_are_the_nearest_others(num_points, num_neighbours, seed, duplicated):
    points = np.random.default_rng(seed).integers(0, 4 if duplicated else 10_000, (num_points, 2)).astype(float)
    src, dst = near_edges(points, "knn", num_neighbours)
    wanted = max(min(num_neighbours, num_points - 1), 0)
    assert dst.tolist() == np.repeat(np.arange(num_points), wanted).tolist()
    for point in range(num_points):
        mine = src[dst == point]
        assert point not in mine
        assert len(set(mine.tolist())) == wanted
        distances = np.linalg.norm(points - points[point], axis=1)
        nearest = np.sort(np.delete(distances, point))[:wanted]
        assert np.allclose(np.sort(distances[mine]), nearest)


def test_radius_edges_are_all_close_pairs():
    points = np.random.default_rng(0).random((120, 3))
    found = set(map(tuple, near_edges(points, "radius", 0.3).T.tolist()))
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    assert found == {(i, j) for i, j in np.argwhere(distances <= 0.3).tolist() if i != j}
    assert near_edges(points, "radius", 1e-9).shape == (2, 0)
    assert near_edges(points[:0], "radius", 1.0).shape == (2, 0)


def test_edges_between_points_of_a_sphere_cross_the_date_line():
    lonlat = np.array([[179.5, 0.0], [-179.5, 0.0], [170.0, 0.0]])
    assert set(map(tuple, near_edges(lonlat, "radius", 1.001, on_sphere=True).T.tolist())) == {(0, 1), (1, 0)}
    assert near_edges(lonlat, "radius", 0.999, on_sphere=True).shape == (2, 0)
    assert near_edges(lonlat, "knn", 1, on_sphere=True)[0].tolist() == [1, 0, 0]


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 25), st.integers(0, 2**32 - 1), st.sampled_from([(1.0, 0.0), (0.5, 2.0), (0.0, 0.7, 0.0)]))
def test_edges_across_a_periodic_border_are_those_of_the_nearest_images(num_points, seed, period):
    width = np.array(period)
    points = np.random.default_rng(seed).normal(0, 1, (num_points, len(period)))
    points[0, 0] = -1e-18  # its remainder is the width itself
    away = points[:, None] - points[None]
    away -= width * np.round(away / np.where(width > 0, width, np.inf))
    distances = np.linalg.norm(away, axis=2)
    found = near_edges(points, "radius", 0.3, period=period)
    expected = {(i, j) for i, j in np.argwhere(distances <= 0.3).tolist() if i != j}
    assert set(map(tuple, found.T.tolist())) == expected
    wanted = min(3, num_points - 1)
    src, dst = near_edges(points, "knn", 3, period=period)
    np.fill_diagonal(distances, np.inf)
    found = np.sort(distances[dst, src].reshape(-1, wanted))
    assert np.allclose(found, np.sort(distances, axis=1)[:, :wanted])


def test_arguments_of_neighbours_are_checked():
    points = np.zeros((3, 2))
    with pytest.raises(ConfigError, match="at least 1 neighbour"):
        near_edges(points, "knn", 0)
    for radius in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ConfigError, match="positive and finite"):
            near_edges(points, "radius", radius)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 60))
def test_cuts_balance_any_weights_over_any_number_of_parts(weights, num_parts):
    bounds = cut_bounds(prefix_of(weights), num_parts)
    assert bounds.dtype == np.int64
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), num_parts + 1)
    sizes = np.diff(bounds)
    assert (sizes >= 0).all()
    if num_parts >= len(weights):
        assert sizes.tolist() == [1] * len(weights) + [0] * (num_parts - len(weights))
        return
    assert (sizes >= 1).all()
    costs = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
    assert max(costs) <= sum(weights) / num_parts + max(weights)  # each cut is at the row nearest to its share
    if sum(weights) > 0 and len(weights) >= 4 * num_parts and len(set(weights)) == 1:
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 64), st.integers(0, 2**32 - 1))
def test_cuts_of_block_sums_are_close_to_those_of_rows(num_rows, num_parts, block, seed):
    weights = np.random.default_rng(seed).integers(1, 10, num_rows)
    rows = np.append(np.arange(0, num_rows, block), num_rows)
    prefix = prefix_of(weights)
    bounds = cut_bounds(prefix[rows], num_parts, rows=rows)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, num_rows, num_parts + 1)
    assert (np.diff(bounds) >= (1 if num_parts <= num_rows else 0)).all()
    exact = cut_bounds(prefix, num_parts)
    assert np.abs(bounds - exact).max() <= block + num_parts


def test_edges_are_balanced_by_cutting_the_index_pointer():
    _, offsets, nodes, types = mesh(3_000, 2)
    csr = csr_from_edges(*edges_of(offsets, nodes, types, 3_000), 3_000)
    for num_parts in (2, 7, 16):
        assert quality_of_parts(csr, cut_bounds(csr.indptr, num_parts)).edge_balance < 1.03


@pytest.mark.parametrize(
    ("prefix", "options", "words"),
    [
        ([0, 1], {"num_parts": 0}, "at least 1"),
        ([0, 2, 1], {}, "never decrease"),
        ([0, np.nan], {}, "finite"),
        ([], {}, "one entry per row"),
        ([0, 1, 2], {"rows": [0, 4]}, "one entry per row"),
        ([0, 1, 2], {"rows": [1, 4, 5]}, "start at row 0"),
    ],
)
def test_wrong_prefix_sums_are_refused(prefix, options, words):
    with pytest.raises(ConfigError, match=words):
        cut_bounds(prefix, **{"num_parts": 1} | options)


def test_wrong_weights_are_refused_with_their_rows():
    with pytest.raises(ConfigError, match=r"2 weights are negative, NaN or infinite \(first rows: \[1, 2\]\)"):
        prefix_of([1, -1, np.nan, 2])
    with pytest.raises(ConfigError, match="one value per row"):
        prefix_of([[1.0]])


@settings(deadline=None)
@given(graphs(), st.data())
def test_quality_counts_what_a_plain_count_gives(graph, data):
    src, dst, num_nodes = graph
    csr = csr_from_edges(src, dst, num_nodes)
    bounds = data.draw(bounds_of(num_nodes))
    num_parts = len(bounds) - 1
    owner = [next(p for p in range(num_parts) if bounds[p] <= n < bounds[p + 1]) for n in range(num_nodes)]
    cut = [(int(s), owner[d]) for s, d in zip(src, dst, strict=True) if owner[s] != owner[d]]
    found = quality_of_parts(csr, bounds)
    assert found.edge_cut == pytest.approx(len(cut) / len(src) if len(src) else 0)
    assert found.halo == pytest.approx(len(set(cut)) / num_nodes)
    neighbours = [len({owner[s] for s, p in cut if p == part}) for part in range(num_parts)]
    assert found.max_neighbours == max(neighbours)
    assert found.mean_neighbours == pytest.approx(np.mean(neighbours))
    assert found.balance == pytest.approx(np.diff(bounds).max() * num_parts / num_nodes)


def test_quality_of_a_graph_in_pieces():
    points = np.array([[0, 0], [1, 0], [2, 0], [2, 0], [5, 5], [2, 0]], float)
    csr = csr_from_edges([0, 2], [1, 3], 6)
    found = measure_quality(csr, points, num_parts=(1, 2, 10))
    assert (found.num_nodes, found.num_edges) == (6, 2)
    assert (found.num_components, found.num_isolated, found.num_duplicate_points) == (4, 2, 2)
    assert [p.num_parts for p in found.parts] == [1, 2, 10]
    assert found.parts[0].halo == 0
    assert (found.parts[1].halo, found.parts[1].edge_cut) == (1 / 6, 0.5)
    assert measure_quality(csr).num_duplicate_points is None
    empty = measure_quality(csr_from_edges(np.empty(0, int), np.empty(0, int), 0))
    assert (empty.num_components, empty.num_isolated, empty.parts[0].halo) == (0, 0, 0.0)


@pytest.mark.parametrize("dims", [2, 3])
def test_the_curve_makes_halos_of_a_mesh_small(dims):
    points, offsets, nodes, types = mesh(6_000, dims)
    edges = edges_of(offsets, nodes, types, 6_000)
    order, _ = order_hilbert(points)
    new_row = np.empty(6_000, np.int64)
    new_row[order] = np.arange(6_000)
    in_order = measure_quality(csr_from_edges(*new_row[edges], 6_000), points, num_parts=(8,))
    as_given = measure_quality(csr_from_edges(*edges, 6_000), points, num_parts=(8,))
    assert in_order.num_components == as_given.num_components == 1
    assert in_order.parts[0].halo < {2: 0.15, 3: 0.6}[dims]
    assert as_given.parts[0].halo > 3 * in_order.parts[0].halo
