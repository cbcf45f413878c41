"""Features of edges by their definition: turned frames, invariances."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from scidata.errors import ConfigError
from scidata.meshes.sets import neighbours
from scidata.meshes.sets.grids import lat_lon
from scidata.meshes.sets.icosahedral import icosahedral, multi_mesh_edges
from scidata.meshes.sets.neighbours import edge_features, longest_edge, nearest_edges
from scidata.meshes.sets.node_set import NodeSet, degrees_of, unit_vectors


@pytest.fixture(scope="module")
def sets():
    grid, mesh = lat_lon(10), icosahedral(3)
    return grid, mesh, nearest_edges(grid, mesh, 3), nearest_edges(mesh, grid, 3)


def test_the_frame_is_the_space_turned_until_the_target_is_at_0_0(sets):
    grid, mesh, _, edges = sets
    found = edge_features(mesh, grid, edges) * longest_edge(mesh, edges, grid)
    lon, lat = grid.points[edges[1]].T
    turn = Rotation.from_euler("y", lat[:, None], degrees=True) * Rotation.from_euler("z", -lon[:, None], degrees=True)
    assert np.allclose(turn.apply(unit_vectors(grid.points[edges[1]])), [1, 0, 0], rtol=0, atol=1e-14)
    away = turn.apply(unit_vectors(mesh.points[edges[0]])) - [1, 0, 0]
    assert np.allclose(found[:, 1:], away, rtol=0, atol=1e-13)
    assert np.allclose(found[:, 0], np.linalg.norm(away, axis=1), rtol=1e-12)


def test_directions_read_as_up_east_and_north():
    one = NodeSet(points=np.array([[40.0, 30]]), on_sphere=True)
    around = NodeSet(points=np.array([[40.001, 30], [40, 30.001], [39.999, 30], [40, 29.999]]), on_sphere=True)
    found = edge_features(around, one, np.array([[0, 1, 2, 3], [0, 0, 0, 0]]))[:, 2:]
    assert np.array_equal(np.argmax(np.abs(found), axis=1), [0, 1, 0, 1])
    assert np.sign(found[[0, 1, 2, 3], [0, 1, 0, 1]]).tolist() == [1, 1, -1, -1]


def test_the_longest_edge_is_the_unit(sets):
    grid, mesh, edges, _ = sets
    found = edge_features(grid, mesh, edges)
    assert found[:, 0].max() == pytest.approx(1, rel=1e-15)


def test_turning_the_globe_about_its_axis_changes_nothing(sets):
    grid, mesh, edges, _ = sets
    turned = [NodeSet(points=each.points + np.array([123.456, 0]), on_sphere=True) for each in (grid, mesh)]
    assert np.allclose(edge_features(*turned, edges), edge_features(grid, mesh, edges), rtol=0, atol=1e-12)


def test_any_turn_keeps_length_and_height_and_horizontal_size(sets):
    grid, mesh, edges, _ = sets
    turn = Rotation.from_rotvec([0.3, -1.1, 0.7])
    turned = [NodeSet(points=degrees_of(turn.apply(each.positions())), on_sphere=True) for each in (grid, mesh)]
    before, after = edge_features(grid, mesh, edges), edge_features(*turned, edges)
    assert np.allclose(before[:, :2], after[:, :2], rtol=0, atol=1e-11)
    assert np.allclose(np.hypot(*before[:, 2:].T), np.hypot(*after[:, 2:].T), rtol=0, atol=1e-11)


def test_both_ends_of_an_edge_see_the_same_length_and_height():
    mesh, edges = icosahedral(2), multi_mesh_edges(2)
    there, back = edge_features(mesh, mesh, edges), edge_features(mesh, mesh, edges[::-1])
    assert np.allclose(there[:, :2], back[:, :2], rtol=0, atol=1e-14)


def test_edges_between_nodes_at_one_place_are_0():
    poles = NodeSet(points=np.array([[0.0, 90], [123, 90], [50, 20]]), on_sphere=True)
    edges = np.array([[0, 1, 2, 0], [1, 0, 2, 2]])
    assert not edge_features(poles, poles, edges)[:3].any()
    assert not edge_features(poles, poles, edges[:, :3]).any()  # no edge is longer than 0: nothing to divide by


def test_on_a_plane_nothing_is_turned():
    one = NodeSet(points=np.array([[0.0, 0], [3, 4]]), on_sphere=False)
    assert edge_features(one, one, np.array([[1, 0], [0, 1]])).tolist() == [[1, 0.6, 0.8], [1, -0.6, -0.8]]


def test_no_block_size_changes_anything(sets, monkeypatch):
    grid, mesh, edges, _ = sets
    before = edge_features(grid, mesh, edges)
    monkeypatch.setattr(neighbours, "_BLOCK", 7)
    assert np.array_equal(edge_features(grid, mesh, edges), before)


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([[0, 10**6], [0, 0]], "1 edge sources are outside"),
        ([[0, 1], [0, -1]], "1 edge targets are outside"),
        ([[0.5], [0.5]], "integers"),
        ([[0, 1]], "integers"),
    ],
)
def test_edges_that_are_none(sets, edges, said):
    with pytest.raises(ConfigError, match=said):
        edge_features(*sets[:2], np.array(edges))
