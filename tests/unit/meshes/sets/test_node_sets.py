"""Generated node sets against published counts and figures, and what a node set refuses."""

from __future__ import annotations

import re
import sys
from fractions import Fraction

import numpy as np
import pytest
from scipy.special import roots_legendre

from scidata.errors import ConfigError, MissingDependencyError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import edges_of_cells
from scidata.meshes.sets.grids import gaussian_latitudes, healpix, lat_lon, latitude_longitude, reduced_gaussian
from scidata.meshes.sets.icosahedral import icosahedral, multi_mesh_edges
from scidata.meshes.sets.neighbours import longest_edge
from scidata.meshes.sets.node_set import NodeSet, degrees_of, sin_cos, unit_vectors
from tests.unit.meshes.sets._node_sets import N32


def pairs_of(edge_index):
    return set(map(tuple, edge_index.T.tolist()))


def ways_round(nodes):
    """Return the determinant of the first three different corners of each cell: positive where counter-clockwise."""
    places, cells = unit_vectors(nodes.points), nodes.cells
    corners = cells.connectivity.reshape(cells.num_cells, -1)
    return [np.linalg.det(places[corners[:, list(three)]]) for three in ((0, 1, 2), (2, -1, 0))[: corners.shape[1] - 2]]


# Lam et al. 2023, table 3 of the supplement: nodes, faces and directed edges of each level.
PUBLISHED = [(12, 20, 60), (42, 80, 240), (162, 320, 960), (642, 1280, 3840), (2562, 5120, 15360),
             (10242, 20480, 61440), (40962, 81920, 245760)]  # fmt: skip


@pytest.mark.parametrize("level", range(7))
def test_counts_of_each_level_are_the_published_ones(level):
    mesh, edges = icosahedral(level), multi_mesh_edges([level])
    assert (mesh.num_nodes, mesh.cells.num_cells, edges.shape[1]) == PUBLISHED[level]
    assert multi_mesh_edges(level).shape[1] == sum(edges for _, _, edges in PUBLISHED[: level + 1])
    assert np.array_equal(edges, edges_of_cells(mesh.cells, mesh.num_nodes))
    assert set(np.bincount(edges[1]).tolist()) == ({5, 6} if level else {5})
    assert ways_round(mesh)[0].min() > 0


def test_level_six_has_the_published_multi_mesh():
    assert multi_mesh_edges(6).shape == (2, 327_660)


def test_nodes_of_a_level_are_the_first_of_the_next():
    for level in range(4):
        coarse, fine = icosahedral(level), icosahedral(level + 1)
        there = fine.points[: coarse.num_nodes]  # NumPy 1.26's arctan2 differs in a bit by where in an array it is
        assert np.allclose(coarse.points, there, rtol=0, atol=1e-12)
        assert len(np.unique(np.round(unit_vectors(fine.points), 9), axis=0)) == fine.num_nodes


def test_a_face_lies_at_each_pole():
    up = unit_vectors(icosahedral(0).points)[:, 2]
    assert (up > up.max() - 1e-12).sum() == (up < up.min() + 1e-12).sum() == 3


def test_the_multi_mesh_is_the_union_of_its_levels_in_their_order():
    levels = [pairs_of(multi_mesh_edges([level])) for level in range(4)]
    assert pairs_of(multi_mesh_edges(3)) == set().union(*levels)
    assert pairs_of(multi_mesh_edges([1, 3])) == levels[1] | levels[3]
    edges = multi_mesh_edges(3)
    assert edges.shape[1] == len(pairs_of(edges))
    assert pairs_of(edges) == pairs_of(edges[::-1])
    assert np.array_equal(np.lexsort((edges[0], edges[1])), np.arange(edges.shape[1]))
    mesh = icosahedral(3)
    assert longest_edge(mesh, multi_mesh_edges([0])) == pytest.approx(1 / np.sin(np.deg2rad(72)))
    assert longest_edge(mesh, multi_mesh_edges([3])) < 0.2


@pytest.mark.parametrize("levels", [-1, 13, 2.5, [], [0, 0], [1, 20], "ab"])
def test_levels_out_of_range(levels):
    with pytest.raises(ConfigError, match="level"):
        multi_mesh_edges(levels)
    if not isinstance(levels, list):
        with pytest.raises(ConfigError, match="level"):
            icosahedral(levels)


def test_era5s_grid():
    grid = lat_lon(0.25)
    assert grid.num_nodes == 1_038_240
    assert grid.points[0].tolist() == [0, 90]
    assert grid.points[-1].tolist() == [359.75, -90]
    assert grid.cells.num_cells == 720 * 1440


@pytest.mark.parametrize("turn_lat", [1, -1])
@pytest.mark.parametrize("turn_lon", [1, -1])
def test_quads_are_counter_clockwise_and_closed_round_the_globe(turn_lat, turn_lon):
    lats, lons = np.linspace(-75, 75, 6)[::turn_lat], np.arange(0, 360, 30)[::turn_lon]
    grid = latitude_longitude(lats, lons)
    assert grid.cells.num_cells == 5 * 12
    assert min(each.min() for each in ways_round(grid)) > 0
    region = latitude_longitude(lats, lons[:7])
    assert region.cells.num_cells == 5 * 6
    assert min(each.min() for each in ways_round(region)) > 0


@pytest.mark.parametrize(
    ("lats", "lons", "said"),
    [
        ([0, 1, 1], [0, 1], "latitudes .* increase or decrease"),
        ([0, 1], [350, 0, 10], "begin where they jump"),
        ([0, np.nan], [0, 1], "finite"),
        ([], [0, 1], "finite"),
        ([0, 1], [0, 180, 370], "more than 360"),
        ([0, 91], [0, 1], "beyond 90"),
    ],
)
def test_grids_that_are_none(lats, lons, said):
    with pytest.raises(ConfigError, match=said):
        latitude_longitude(lats, lons)


@pytest.mark.parametrize("step", [0.7, 0, -1, 400])
def test_spacings_that_do_not_divide(step):
    with pytest.raises(ConfigError, match="divide 180"):
        lat_lon(step)


def test_one_latitude_has_no_cells():
    grid = latitude_longitude([10], [0, 1, 2])
    assert grid.cells is None
    assert grid.num_nodes == 3


# ECMWF's documentation of its grids
@pytest.mark.parametrize(("name", "num"), [("O96", 40_320), ("O320", 421_120), ("o1280", 6_599_680), ("F32", 8_192)])
def test_gaussian_grids_have_the_published_number_of_points(name, num):
    grid = reduced_gaussian(name)
    assert grid.num_nodes == num


def test_an_octahedral_grid_by_its_definition():
    grid = reduced_gaussian("O4")
    lats, counts = np.unique(-grid.points[:, 1], return_counts=True)
    assert counts.tolist() == [20, 24, 28, 32, 32, 28, 24, 20]
    assert np.allclose(np.sin(np.deg2rad(lats)), np.polynomial.legendre.leggauss(8)[0], atol=1e-15)
    assert grid.points[:20, 0].tolist() == (np.arange(20) * 18.0).tolist()


@pytest.mark.parametrize("num", [2, 8, 192, 640, 2560])
def test_gaussian_latitudes(num):
    sines, theirs = gaussian_latitudes(num)[::-1], roots_legendre(num)[0]
    assert np.allclose(np.rad2deg(np.arcsin(sines)), np.rad2deg(np.arcsin(theirs)), rtol=0, atol=1e-11)


def test_latitudes_of_n32_are_those_that_ecmwf_publishes():
    lats = np.rad2deg(np.arcsin(gaussian_latitudes(64)))
    assert np.allclose(lats[:4], [87.8638, 85.0965, 82.3129, 79.5256], atol=5e-5)


def test_a_classical_grid_through_its_list():
    assert reduced_gaussian("n32", pl=N32 + N32[::-1]).num_nodes == 6114


@pytest.mark.parametrize(
    ("name", "pl", "said"),
    [
        ("N32", None, "give pl="),
        ("N32", N32[:-1], "64 latitudes"),
        ("N32", [0, *N32[1:], *N32], "positive"),
        ("96", None, "no Gaussian grid"),
        ("O0", None, "no Gaussian grid"),
        ("X12", None, "no Gaussian grid"),
    ],
)
def test_gaussian_grids_that_are_none(name, pl, said):
    with pytest.raises(ConfigError, match=said):
        reduced_gaussian(name, pl)


def test_healpix():
    pytest.importorskip("astropy_healpix")
    nested = healpix(8)
    assert nested.num_nodes == 768
    # Gorski et al. 2005, equation 4: on the first ring z = 1 - 1 / (3 nside^2)
    assert nested.points[:, 1].max() == pytest.approx(np.rad2deg(np.arcsin(1 - 1 / 192)))
    parents = unit_vectors(nested.points).reshape(192, 4, 3).mean(axis=1)  # four in a row are the parts of one
    coarse = unit_vectors(healpix(4).points)
    assert (np.argmax(parents @ coarse.T, axis=1) == np.arange(192)).all()


@pytest.mark.parametrize("nside", [0, 6, 5, 2.0, -1, 1 << 20])
def test_healpix_that_is_none(nside):
    with pytest.raises(ConfigError, match="nside"):
        healpix(nside)


def test_healpix_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "astropy_healpix", None)
    with pytest.raises(MissingDependencyError, match=re.escape("pip install 'astropy-healpix")):
        healpix(4)


CELL = RawCells(offsets=np.array([0, 3]), connectivity=np.array([0, 1, 2]), cell_type=np.array([5], np.uint8))


@pytest.mark.parametrize(
    ("points", "more", "said"),
    [
        ([[0, 0], [np.nan, 1]], {}, r"1 of 2 points have a NaN.*first rows: \[1\]"),
        ([[0, 0], [0, np.inf]], {"on_sphere": False}, "1 of 2 points have a NaN or infinite"),
        ([[0, 0], [10, 100.0]], {}, "1 of 2 nodes have a latitude beyond 90"),
        ([[0, 0, 1.0]], {}, "longitude and latitude"),
        ([1.0, 2.0], {}, "(num, 2) or (num, 3)"),
        ([["a", "b"]], {}, "real numbers"),
        ([[0, 0.0]] * 2, {"cells": CELL}, "1 corners of cells are outside the 2 nodes"),
    ],
)
def test_node_sets_that_are_none(points, more, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace(")", r"\)") if "\\" not in said else said):
        NodeSet(points=np.array(points), **{"on_sphere": True, **more})


def test_a_pole_in_radians_of_float32_is_a_pole():
    assert NodeSet(points=np.rad2deg(np.array([[0, np.float32(np.pi / 2)]], np.float64)), on_sphere=True).num_nodes == 1


def test_places_are_the_same_wherever_the_angle_is_the_same():
    lons = np.array([0.0, 30, 45, 90, 123.4375, 180, 270, 359.75])
    lats = np.array([-90.0, -45, -0.25, 0, 60, 89.75, 90])
    points = np.stack(np.meshgrid(lons, lats), axis=-1).reshape(-1, 2)
    there = unit_vectors(points)
    assert np.array_equal(there, unit_vectors(points + np.array([360, 0])))
    assert np.array_equal(there, unit_vectors(points - [360, 0]))
    assert np.array_equal(there * [1, -1, 1], unit_vectors(points * [-1, 1]))
    assert np.array_equal(there * [1, 1, -1], unit_vectors(points * [1, -1]))
    assert np.array_equal(np.unique(there[points[:, 1] == 90], axis=0), [[0, 0, 1]])
    lon, lat = np.deg2rad(points).T
    plain = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)
    assert np.allclose(there, plain, rtol=0, atol=4e-16)


def test_sines_and_cosines_at_round_angles():
    sine, cosine = sin_cos(np.arange(-720.0, 721, 90))
    assert np.array_equal(sine, np.resize([0, 1, 0, -1], 17))
    assert np.array_equal(cosine, np.resize([1, 0, -1, 0], 17))
    assert sin_cos(np.array([45.0]))[0] == sin_cos(np.array([135.0]))[0]


def test_there_and_back():
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.uniform(0, 360, 1000), rng.uniform(-90, 90, 1000)])
    assert np.allclose(degrees_of(unit_vectors(points)), points, rtol=0, atol=1e-11)
    tiny = degrees_of(np.array([[1.0, -1e-18, 0.0]]))
    assert 0 <= tiny[0, 0] < 360
    assert Fraction(float(tiny[0, 1])) == 0
