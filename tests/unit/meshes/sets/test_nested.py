"""``scidata.cutout``: which points of a globe a limited area covers, and the share of the sphere of each point."""

import numpy as np
import pytest
from scipy.spatial import ConvexHull

import scidata
from scidata.errors import ConfigError
from scidata.meshes.sets.grids import lat_lon, reduced_gaussian
from scidata.meshes.sets.node_set import degrees_of, unit_vectors

GLOBE = np.linspace(89.5, -89.5, 180)[:, None], np.arange(0.25, 360, 1)


def turned(points, lat, lon):
    """Turn a sphere so that (0, 0) comes to a place; columns are longitude, latitude."""
    a, b = np.deg2rad([lon, -lat])
    turn = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])
    tilt = np.array([[np.cos(b), 0, np.sin(b)], [0, 1, 0], [-np.sin(b), 0, np.cos(b)]])
    return degrees_of(unit_vectors(points) @ (turn @ tilt).T)


def differs(around, exact):
    """The largest distance from the area of points about which the two disagree: those beside its edges may."""
    wrong = around.kept == exact
    return around.distance[wrong].max() if wrong.any() else 0.0


@pytest.mark.parametrize("box", [(40, 60, 0, 30), (-70, -20, 150, 250), (30, 75, -20, 60)])
def test_boxes_of_a_regular_grid(box):
    south, north, west, east = box
    lat, lon = np.linspace(south, north, 61), np.linspace(west, east, 61)
    around = scidata.cutout((lat[:, None], lon), GLOBE)
    lats, lons = np.broadcast_arrays(*GLOBE)
    exact = (lats > south) & (lats < north) & (np.remainder(lons - west, 360) < east - west)
    assert around.kept.shape == (180, 360)
    assert (around.kept != exact).mean() > 0.999
    assert differs(around, exact) < 0.2
    assert np.array_equal(around.rows, np.flatnonzero(around.kept))
    assert around.points.shape == (61 * 61 + len(around.rows), 2)


@pytest.mark.parametrize("place", [(90, 0), (-65, 179), (10, 300)])
def test_rotated_grids_and_lists_of_points(place):
    """A grid with a pole in it, or over the date line: inside is what is inside before it is turned."""
    rows, columns = np.meshgrid(np.linspace(-8, 8, 33), np.linspace(-12, 12, 49), indexing="ij")
    lon, lat = turned(np.stack([columns.ravel(), rows.ravel()], 1), *place).T
    shuffled = np.random.default_rng(0).permutation(len(lat))
    lats, lons = (each.ravel() for each in np.broadcast_arrays(*GLOBE))
    inside = scidata.cutout((rows, columns), tuple(turned(np.stack([lons, lats], 1), 0, 0).T[::-1]))
    globe = turned(np.stack([lons, lats], 1), *place).T[::-1]
    for inner in ((lat.reshape(rows.shape), lon.reshape(rows.shape)), (lat[shuffled], lon[shuffled])):
        around = scidata.cutout(inner, globe)
        assert np.array_equal(around.kept, inside.kept)
    assert (~around.kept).sum() == 16 * 24


def test_concave_areas():
    lat, lon = np.meshgrid(np.arange(0, 21, 0.5), np.arange(0, 21, 0.5), indexing="ij")
    corner = (lat > 10) & (lon > 10)
    around = scidata.cutout((lat[~corner], lon[~corner]), GLOBE)
    lats, lons = np.broadcast_arrays(*GLOBE)
    exact = (lats > 0) & (lats < 20.5) & (lons < 20.5) & ~((lats > 10) & (lons > 10))
    assert differs(around, exact) < 0.5


def test_weights_are_shares_of_the_sphere():
    around = scidata.cutout((np.linspace(40, 60, 41)[:, None], np.linspace(0, 30, 61)), lat_lon(5).points.T[::-1])
    assert around.weights.sum() == pytest.approx(1, abs=1e-12)
    assert around.weights.min() > 0
    inner = around.weights[: 41 * 61].reshape(41, 61)
    exact = np.sin(np.deg2rad(50.25)) - np.sin(np.deg2rad(49.75))
    assert inner[20, 30] == pytest.approx(exact / 2 * 0.5 / 360, rel=1e-4)
    poles = np.abs(around.points[41 * 61 :, 1]) == 90
    cap = around.weights[41 * 61 :][poles]
    assert len(cap) == 2 * 72
    assert np.ptp(cap) == 0  # a pole's area is shared by its points
    assert cap.sum() == pytest.approx(1 - np.sin(np.deg2rad(87.5)), rel=1e-2)


def test_the_union_covers_the_sphere_once():
    globe = reduced_gaussian("O32").points.T[::-1]
    around = scidata.cutout((np.linspace(40, 60, 41)[:, None], np.linspace(350, 380, 61)), globe)
    assert ConvexHull(unit_vectors(around.points)).volume == pytest.approx(4 / 3 * np.pi, rel=2e-3)
    near = around.ring(3)
    assert near.sum() > 10
    assert not (near & ~around.kept).any()
    assert (around.distance[near] <= 3).all()
    fewer = scidata.cutout((np.linspace(40, 60, 41)[:, None], np.linspace(350, 380, 61)), globe, min_distance=3)
    assert np.array_equal(fewer.kept, around.kept & (around.distance >= 3))


def test_gaps_wider_than_half_the_globe_are_no_limit():
    ring = np.linspace(40, 60, 3)[:, None], np.linspace(0, 60, 7)
    kept = [scidata.cutout(ring, GLOBE, max_gap=gap).kept for gap in (1, 90, 180, 360, np.inf)]
    assert kept[0].sum() > kept[1].sum()
    assert all(np.array_equal(own, kept[1]) for own in kept[2:])


def test_messages():
    for name, value in [("min_distance", -1), ("min_distance", "1"), ("max_gap", np.nan), ("max_gap", "3")]:
        with pytest.raises(ConfigError, match=f"{name}=.*expected degrees"):
            scidata.cutout((np.arange(3), np.arange(3) ** 2), GLOBE, **{name: value})
    with pytest.raises(ConfigError, match="ring: width='5': expected degrees"):
        scidata.cutout((np.array([[40.0], [60]]), np.array([0.0, 30])), GLOBE).ring("5")
    with pytest.raises(ConfigError, match=r"inner: .*pass \(lat, lon\) of each point"):
        scidata.cutout((np.zeros(3), np.zeros(4)), GLOBE)
    with pytest.raises(ConfigError, match="inner has no points"):
        scidata.cutout(([], []), GLOBE)
    with pytest.raises(ConfigError, match="2 points lie on one line"):
        scidata.cutout((np.zeros(2), np.arange(2)), GLOBE)
    with pytest.raises(ConfigError, match="latitude beyond 90"):
        scidata.cutout((np.arange(95, 98), np.arange(3)), GLOBE)
    with pytest.raises(ConfigError, match="lie on one line"):
        scidata.cutout((np.zeros(5), np.arange(5)), GLOBE)
