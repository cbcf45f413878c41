"""Edges between sets against brute force: nearest and radius with ties, cells by rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scidata.errors import ConfigError
from scidata.meshes import order
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.neighbours import TIED
from scidata.meshes.sets import containing, neighbours
from scidata.meshes.sets.containing import containing_cell_edges, find_cells, orientations
from scidata.meshes.sets.grids import lat_lon, latitude_longitude
from scidata.meshes.sets.icosahedral import icosahedral, multi_mesh_edges
from scidata.meshes.sets.neighbours import longest_edge, nearest_edges, radius_edges
from scidata.meshes.sets.node_set import NodeSet, degrees_of, unit_vectors

# round angles make ties; the poles and both sides of the date line are among them
angles = st.one_of(st.integers(-24, 48).map(lambda i: 15.0 * i), st.floats(-360, 720))
latitudes = st.one_of(st.integers(-6, 6).map(lambda i: 15.0 * i), st.floats(-90, 90))
on_spheres = st.lists(st.tuples(angles, latitudes), min_size=1, max_size=40).map(
    lambda rows: NodeSet(points=np.array(rows), on_sphere=True)
)
planes = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 40), st.just(2)), elements=st.integers(-5, 5).map(float) | st.floats(-9, 9)
).map(lambda points: NodeSet(points=points, on_sphere=False))


def distances(source, target):
    return np.sqrt(((target.positions()[:, None] - source.positions()[None]) ** 2).sum(axis=2))


def tie(source, target):
    sets = (source, target)
    return TIED if source.on_sphere else TIED * max(float(np.abs(each.points).max()) for each in sets)


def nearest_by_brute_force(source, target, num):
    found = []
    for row, far in enumerate(distances(source, target)):
        last, tied = np.sort(far)[num - 1], tie(source, target)
        inner = np.flatnonzero(far < last - tied).tolist()
        level = np.flatnonzero(np.abs(far - last) <= tied).tolist()
        found += [(each, row) for each in sorted(inner + level[: num - len(inner)])]
    return found


def test_symmetric_ties_go_to_the_first_rows():
    """A node in the middle of four, of which two are asked for: by rows, however rounding falls."""
    target = NodeSet(points=np.array([[10.0 * i, 0.0] for i in range(36)]), on_sphere=True)
    around = np.concatenate([target.points + step for step in ([3, 3], [-3, 3], [3, -3], [-3, -3])])
    shuffled = np.random.default_rng(0).permutation(144)
    edges = nearest_edges(NodeSet(points=around[shuffled], on_sphere=True), target, 2)
    rows = np.argsort(shuffled).reshape(4, 36).T
    assert np.array_equal(edges[0].reshape(36, 2), np.sort(rows, axis=1)[:, :2])


def test_what_lies_at_the_radius_is_inside_however_rounding_falls():
    target = NodeSet(points=np.array([[10.0 * i + 0.1, 0.0] for i in range(36)]), on_sphere=True)
    around = np.concatenate([target.points + step for step in ([3, 3], [-3, 3], [3, -3], [-3, -3])])
    source = NodeSet(points=around, on_sphere=True)
    far = np.sort(distances(source, target), axis=1)[:, :4]
    assert far.min() < far.max()  # equal, but for rounding
    assert radius_edges(source, target, float(far.min())).shape == (2, 4 * 36)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.tuples(on_spheres, on_spheres), st.tuples(planes, planes)), st.data())
def test_nearest_is_what_brute_force_finds(sets, data):
    source, target = sets
    num = data.draw(st.integers(1, source.num_nodes))
    found = nearest_edges(source, target, num)
    assert list(map(tuple, found.T.tolist())) == nearest_by_brute_force(source, target, num)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.tuples(on_spheres, on_spheres), st.tuples(planes, planes)), st.data())
def test_radius_is_what_brute_force_finds(sets, data):
    source, target = sets
    far = distances(source, target)
    radius = data.draw(st.sampled_from(far.ravel().tolist()) | st.floats(1e-3, 2.5))  # also just as far as one is
    if radius <= 0:
        return
    at, near = np.nonzero(far <= radius + tie(source, target))
    lonely = np.flatnonzero((far > radius + tie(source, target)).all(axis=1))
    if not len(lonely):
        assert np.array_equal(radius_edges(source, target, radius), [near, at])
        return
    with pytest.raises(ConfigError, match=rf"{len(lonely)} of {target.num_nodes} targets .*\[{lonely[0]}"):
        radius_edges(source, target, radius)


def test_a_pole_of_many_nodes_among_the_sources():
    """More sources at one place than are asked for at first."""
    grid, mesh = lat_lon(2), NodeSet(points=np.array([[7.0, 90], [10, 20]]), on_sphere=True)
    edges = nearest_edges(grid, mesh, 3)
    assert list(map(tuple, edges.T.tolist())) == nearest_by_brute_force(grid, mesh, 3)
    assert edges[0][edges[1] == 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_no_block_size_changes_anything(rows, monkeypatch):
    grid, mesh = lat_lon(5), icosahedral(3)
    radius = 0.6 * longest_edge(mesh, multi_mesh_edges([3]))
    before = [
        radius_edges(grid, mesh, radius), nearest_edges(mesh, grid, 4), containing_cell_edges(mesh, grid),
        containing_cell_edges(grid, mesh), radius_edges(mesh, mesh, longest_edge(mesh, multi_mesh_edges([3]))),
    ]  # fmt: skip
    for module in (neighbours, order.neighbours, containing):
        monkeypatch.setattr(module, "BLOCK_ROWS", rows)
    for module in (neighbours, order.neighbours):
        monkeypatch.setattr(module, "MAX_PAIRS", 10 * rows)
    monkeypatch.setattr(containing, "_MAX_PAIRS", 10 * rows)
    monkeypatch.setattr(containing, "_BLOCK", rows)
    after = [
        radius_edges(grid, mesh, radius), nearest_edges(mesh, grid, 4), containing_cell_edges(mesh, grid),
        containing_cell_edges(grid, mesh), radius_edges(mesh, mesh, longest_edge(mesh, multi_mesh_edges([3]))),
    ]  # fmt: skip
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one, other)


def test_the_longest_edge_lies_in_its_own_radius():
    mesh = icosahedral(4)
    edges = multi_mesh_edges([4])
    radius = longest_edge(mesh, edges)
    inside = set(map(tuple, radius_edges(mesh, mesh, radius).T.tolist()))
    assert inside >= set(map(tuple, edges.T.tolist()))


def test_graphcasts_radius_reaches_from_each_grid_node():
    """Its factor of 0.6 is above 1 / sqrt(3), the farthest that a point of a triangle can be from all corners."""
    grid, mesh = lat_lon(1), icosahedral(5)
    edges = radius_edges(grid, mesh, 0.6 * longest_edge(mesh, multi_mesh_edges([5])))
    assert len(np.unique(edges[0])) == grid.num_nodes
    assert len(np.unique(edges[1])) == mesh.num_nodes


@pytest.mark.parametrize("num", [0, 5, -1])
def test_more_neighbours_than_sources(num):
    with pytest.raises(ConfigError, match="between 1 and 4"):
        nearest_edges(NodeSet(points=np.zeros((4, 2)), on_sphere=True), icosahedral(0), num)


@pytest.mark.parametrize("radius", [0, -1, np.nan, np.inf])
def test_radii_that_are_none(radius):
    with pytest.raises(ConfigError, match="positive and finite"):
        radius_edges(icosahedral(0), icosahedral(0), radius)


def test_sets_in_different_spaces():
    flat, high = (NodeSet(points=np.zeros((5, n)), on_sphere=False) for n in (2, 3))
    for find in (lambda s, t: nearest_edges(s, t, 1), lambda s, t: radius_edges(s, t, 1), containing_cell_edges):
        with pytest.raises(ConfigError, match="the source is on a sphere and the target is not"):
            find(icosahedral(0), flat)
        with pytest.raises(ConfigError, match="the target is on a sphere"):
            find(flat, icosahedral(0))
        with pytest.raises(ConfigError, match="2 coordinates, the target 3"):
            find(flat, high)


def test_empty_sets():
    nothing, mesh = NodeSet(points=np.empty((0, 2)), on_sphere=True), icosahedral(0)
    assert radius_edges(mesh, nothing, 1).shape == (2, 0)
    assert nearest_edges(mesh, nothing, 2).shape == (2, 0)
    assert containing_cell_edges(mesh, nothing).shape == (2, 0)
    with pytest.raises(ConfigError, match="12 of 12 targets"):
        radius_edges(nothing, mesh, 1)


# -- cells ---------------------------------------------------------------------------------------------------------


def exact_sign(a, b, p):
    (ax, ay, az), (bx, by, bz), (px, py, pz) = ([Fraction(float(x)) for x in each] for each in (a, b, p))
    value = (ay * bz - az * by) * px + (az * bx - ax * bz) * py + (ax * by - ay * bx) * pz
    return (value > 0) - (value < 0)


def cells_by_brute_force(source, target):
    """Return the first cell that holds each target, by rational arithmetic."""
    start, end = source.positions(), target.positions()
    if not source.on_sphere:
        start, end = (np.column_stack([each, np.ones(len(each))]) for each in (start, end))
    offsets, nodes = source.cells.offsets, source.cells.connectivity
    found = []
    for point in end:
        first = -1
        for cell in range(source.cells.num_cells):
            corners = nodes[offsets[cell] : offsets[cell + 1]]
            sides = [exact_sign(start[a], start[b], point) for a, b in zip(corners, np.roll(corners, -1), strict=True)]
            if min(sides) >= 0:  # counter-clockwise cells
                first = cell
                break
        found.append(first)
    return found


def degenerate_targets(nodes, rng):
    """Return points in no special place, on corners, on middles of sides, and a hair beside these."""
    places = unit_vectors(nodes.points)
    corners = nodes.cells.connectivity.reshape(nodes.cells.num_cells, -1)
    some = rng.choice(len(corners), 6)
    middles = degrees_of((places[corners[some, 0]] + places[corners[some, 1]]) / 2)
    points = np.concatenate([
        np.column_stack([rng.uniform(-360, 360, 8), rng.uniform(-90, 90, 8)]),
        nodes.points[corners[some, 0]], middles, np.nextafter(middles, 400), np.nextafter(middles, -400),
        [[0, 90], [77, -90], [180, 0], [-180, 0], [360, 10]],
    ])  # fmt: skip
    return NodeSet(points=np.clip(points, [-400, -90], [400, 90]), on_sphere=True)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_containing_triangles_by_rational_arithmetic(level):
    mesh = icosahedral(level)
    targets = degenerate_targets(mesh, np.random.default_rng(level))
    assert find_cells(mesh, targets).tolist() == cells_by_brute_force(mesh, targets)


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize(("num_lat", "num_lon"), [(7, 12), (3, 4), (13, 5)])
def test_containing_quads_of_a_grid_with_its_poles(num_lat, num_lon, turn):
    grid = latitude_longitude(np.linspace(90, -90, num_lat)[::turn], np.arange(num_lon) * 360.0 / num_lon)
    targets = degenerate_targets(grid, np.random.default_rng(0))
    found = find_cells(grid, targets)
    assert found.tolist() == cells_by_brute_force(grid, targets)
    assert found.min() >= 0
    edges = containing_cell_edges(grid, targets)
    assert np.bincount(edges[1]).tolist() == [4] * targets.num_nodes


@settings(max_examples=60, deadline=None)
@given(planes.filter(lambda nodes: nodes.num_nodes < 20))
def test_containing_cells_of_a_plane(targets):
    x, y = np.meshgrid(np.arange(-6.0, 7, 3), np.arange(-6.0, 7, 3))
    points, row = np.column_stack([x.ravel(), y.ravel()]), np.arange(25).reshape(5, 5)
    quads = np.stack([row[:-1, :-1], row[:-1, 1:], row[1:, 1:], row[1:, :-1]], axis=-1).reshape(-1, 4)
    # the first half as triangles, in one set with the quads of the rest
    corners = [quads[:8, :3], quads[:8, [0, 2, 3]], quads[8:]]
    sizes = np.repeat([3, 3, 4], 8)
    cells = RawCells(
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        connectivity=np.concatenate([each.ravel() for each in corners]),
        cell_type=np.where(sizes == 3, 5, 9).astype(np.uint8),
    )
    source = NodeSet(points=points, on_sphere=False, cells=cells)
    found = find_cells(source, targets)
    assert found.tolist() == cells_by_brute_force(source, targets)
    outside = (np.abs(targets.points) > 6).any(axis=1)
    assert np.array_equal(found < 0, outside)
    if not outside.any():
        assert np.bincount(containing_cell_edges(source, targets)[1]).tolist() == sizes[found].tolist()
    else:
        with pytest.raises(ConfigError, match=f"{outside.sum()} of {len(outside)} targets .* outside all cells"):
            containing_cell_edges(source, targets)


def test_cells_of_very_different_sizes_in_either_direction():
    """One triangle of many is a thousand times as large; every second one is clockwise."""
    rng = np.random.default_rng(1)
    big = np.array([[0.0, 0], [1000, 0], [0, 1000]])
    at = rng.uniform(-50, -1, (200, 2))
    small = (at[:, None] + np.array([[0, 0], [0.5, 0], [0, 0.5]])).reshape(-1, 2)
    corners = np.arange(603).reshape(-1, 3)
    corners[::2] = corners[::2, ::-1]
    cells = RawCells(offsets=np.arange(0, 604, 3), connectivity=corners.ravel(), cell_type=np.full(201, 5, np.uint8))
    source = NodeSet(points=np.concatenate([big, small]), on_sphere=False, cells=cells)
    targets = NodeSet(points=np.concatenate([at + 0.1, [[300, 300], [-1, 5]]]), on_sphere=False)
    flipped = RawCells(
        offsets=cells.offsets,
        connectivity=np.concatenate([row if i % 2 else row[::-1] for i, row in enumerate(corners)]),
        cell_type=cells.cell_type,
    )
    expected = cells_by_brute_force(NodeSet(points=source.points, on_sphere=False, cells=flipped), targets)
    assert find_cells(source, targets).tolist() == expected
    assert expected[-2:] == [0, -1]


def test_corners_of_a_polar_quad_count_once_each_as_nodes():
    """Two corners of a quad at the pole are two nodes of the grid: both send."""
    grid = lat_lon(30)
    edges = containing_cell_edges(grid, NodeSet(points=np.array([[10.0, 80]]), on_sphere=True))
    assert edges[0].tolist() == [0, 1, 12, 13]


def quad(points, corners=(0, 1, 2, 3), code=9, on_sphere=False):
    cells = RawCells(
        offsets=np.array([0, len(corners)]), connectivity=np.array(corners), cell_type=np.array([code], np.uint8)
    )
    return NodeSet(points=np.array(points, float), on_sphere=on_sphere, cells=cells)


SQUARE = [[0, 0], [4, 0], [4, 4], [0, 4], [2, 1]]
INSIDE = NodeSet(points=np.array([[3.0, 2]]), on_sphere=False)


def test_cells_that_contain_nothing_or_are_refused():
    assert find_cells(quad(SQUARE), INSIDE).tolist() == [0]
    assert find_cells(quad(SQUARE, (3, 2, 1, 0)), INSIDE).tolist() == [0]
    on_it = NodeSet(points=np.array([[2.0, 0]]), on_sphere=False)
    assert find_cells(quad(SQUARE, (0, 1, 1), 5), on_it).tolist() == [-1]  # no area
    for corners, code, said in (
        ((0, 1, 2, 4), 9, "not convex"),
        ((0, 2, 1, 3), 9, "not convex"),
        ((0, 1, 2), 9, "neither triangles nor quads"),
        ((0, 1, 2, 3, 4), 7, "5.* corners"),
        ((0, 1, 2, 3), 10, "neither triangles nor quads"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_cells(quad(SQUARE, corners, code), INSIDE)
    with pytest.raises(ConfigError, match="no cells"):
        find_cells(INSIDE, INSIDE)
    space = NodeSet(points=np.zeros((2, 3)), on_sphere=False)
    with pytest.raises(ConfigError, match="three coordinates"):
        find_cells(quad([[0, 0, 0]] * 4), space)


def test_a_large_triangle_of_a_sphere():
    """A corner is more than a quarter of the globe from its middle: no cap round that would be convex."""
    source = quad([[0, 0], [175, 5], [185, 5]], (0, 1, 2), 5, on_sphere=True)
    targets = lat_lon(5)
    assert find_cells(source, targets).tolist() == cells_by_brute_force(source, targets)
    assert (find_cells(source, targets) == 0).any()


coordinates = st.integers(-3, 3).map(float) | st.floats(-2, 2, allow_subnormal=True)
rows = hnp.arrays(np.float64, (4, 3), elements=coordinates)


@settings(max_examples=300, deadline=None)
@given(rows, rows, rows, st.booleans())
def test_orientations_are_exact(one, two, points, in_line):
    if in_line:  # close to a multiple of the others: what rounding decides
        points = one * 0.75 + two * 0.125
    expected = [exact_sign(a, b, p) for a, b, p in zip(one, two, points, strict=True)]
    assert orientations(one, two, points).tolist() == expected


def test_plain_arithmetic_would_be_wrong_where_orientations_are_exact():
    rng = np.random.default_rng(0)
    one, two = rng.standard_normal((2, 2000, 3))
    points = one * 0.7 + two * 0.3
    plain = np.sign((np.cross(one, two) * points).sum(axis=1))
    exact = [exact_sign(a, b, p) for a, b, p in zip(one, two, points, strict=True)]
    assert (plain != exact).sum() > 100
    assert orientations(one, two, points).tolist() == exact
