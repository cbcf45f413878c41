"""The Hilbert curve against its definition, and the orders against what they promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scidata.errors import ConfigError
from scidata.meshes.order.curve import hilbert_keys, keys_of_cells
from scidata.meshes.order.hilbert import order_hilbert, order_rcb
from scidata.meshes.order.ids import contains, stable_sort
from scidata.meshes.order.positions import robust_box

coordinates = st.floats(-1e3, 1e3, width=32)
clouds = st.sampled_from([2, 3]).flatmap(
    lambda dims: hnp.arrays(np.float64, st.tuples(st.integers(0, 40), st.just(dims)), elements=coordinates)
)


@pytest.mark.parametrize(("num_axes", "num_bits"), [(2, b) for b in range(1, 9)] + [(3, b) for b in range(1, 6)])
def test_the_curve_visits_every_cell_of_a_grid_in_single_steps(num_axes, num_bits):
    cells = np.indices((1 << num_bits,) * num_axes).reshape(num_axes, -1)
    keys = keys_of_cells(cells, num_bits)
    order = np.argsort(keys)
    assert np.array_equal(keys[order], np.arange(cells.shape[1], dtype=np.uint64))
    assert (np.abs(np.diff(cells[:, order], axis=1)).sum(axis=0) == 1).all()


def skilling(cell, num_bits):
    """The transform as published, for one cell."""
    x, axes = list(cell), len(cell)
    q = 1 << (num_bits - 1)
    while q > 1:
        for i in range(axes):
            if x[i] & q:
                x[0] ^= q - 1
            else:
                t = (x[0] ^ x[i]) & (q - 1)
                x[0] ^= t
                x[i] ^= t
        q >>= 1
    for i in range(1, axes):
        x[i] ^= x[i - 1]
    t, q = 0, 1 << (num_bits - 1)
    while q > 1:
        if x[-1] & q:
            t ^= q - 1
        q >>= 1
    key = 0
    for bit in reversed(range(num_bits)):
        for value in x:
            key = (key << 1) | (((value ^ t) >> bit) & 1)
    return key


@settings(deadline=None)
@given(st.data())
def test_keys_are_those_of_skillings_transform(data):
    num_axes, num_bits = data.draw(st.sampled_from([(2, 31), (3, 21)]))
    cell = data.draw(st.lists(st.integers(0, (1 << num_bits) - 1), min_size=num_axes, max_size=num_axes))
    assert int(keys_of_cells(np.array(cell)[:, None], num_bits)[0]) == skilling(cell, num_bits)


@pytest.mark.parametrize("num_axes", [2, 3])
def test_keys_of_points_on_a_grid_follow_the_curve(num_axes):
    # 33 lines: the bounding box ends on the last, so that each of the others lies at the start of a cell of the curve
    side = 32
    points = np.stack(np.meshgrid(*[np.arange(side + 1.0)] * num_axes, indexing="ij"), -1).reshape(-1, num_axes)
    points = points[(points < side).all(axis=1) | (points == side).all(axis=1)]
    points[:-1] += 0.5
    order = np.argsort(hilbert_keys(points))
    walked = points[order[order != len(points) - 1]]
    assert (np.abs(np.diff(walked, axis=0)).sum(axis=1) == 1).all()


@settings(deadline=None)
@given(clouds)
def test_orders_are_permutations_and_do_not_depend_on_scale(points):
    for order in (order_hilbert(points)[0], order_rcb(points), order_rcb(points, levels=3)):
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(len(points)))
    assert np.array_equal(order_hilbert(points * 4.0)[0], order_hilbert(points)[0])
    assert np.array_equal(hilbert_keys(points), hilbert_keys(points.astype(np.float32)))


@settings(deadline=None)
@given(hnp.arrays(np.uint64, st.integers(0, 60), elements=st.integers(0, 63)), st.integers(6, 64))
def test_stable_sort_is_stable_also_where_the_row_displaces_bits(low, num_bits):
    keys = low << np.uint64(num_bits - 6) | (low & np.uint64(3 if num_bits > 8 else 0))
    in_order, order = stable_sort(keys, num_bits)
    assert np.array_equal(order, np.argsort(keys, kind="stable"))
    assert np.array_equal(in_order, np.sort(keys))


def halo(points, order, num_parts):
    """Share of points with a neighbour (nearest six) in another part."""
    from scipy.spatial import cKDTree

    part = np.empty(len(points), np.int64)
    part[order] = np.arange(len(points)) * num_parts // len(points)
    near = cKDTree(points).query(points, k=7)[1]
    return (part[near] != part[:, None]).any(axis=1).mean()


@pytest.mark.parametrize("num_axes", [2, 3])
@pytest.mark.parametrize("make", [lambda p: order_hilbert(p)[0], order_rcb])
def test_orders_keep_neighbours_together(num_axes, make):
    points = np.random.default_rng(0).random((12_000, num_axes))
    assert halo(points, make(points), 8) < {2: 0.12, 3: 0.4}[num_axes]
    assert halo(points, make(points), 7) < {2: 0.14, 3: 0.42}[num_axes]
    assert halo(points, np.arange(12_000), 8) > 0.95  # what the figures above are to be seen against


def test_rcb_halves_are_boxes_at_every_level():
    points = np.random.default_rng(1).random((4096, 2)) * [4.0, 1.0]
    order = order_rcb(points, levels=3)
    for level in (1, 2, 3):
        parts = points[order].reshape(1 << level, -1, 2)
        areas = np.prod(parts.max(axis=1) - parts.min(axis=1), axis=1)
        assert areas.sum() <= 4.0  # boxes that overlapped would cover more than the whole
    left, right = points[order].reshape(2, -1, 2)
    assert left[:, 0].max() <= right[:, 0].min()  # the longest side first


def test_boxes_of_rcb_that_follow_each_other_touch():
    points = np.random.default_rng(1).random((4096, 2)) * [1.2, 1.0]  # halved along axis 0, then along axis 1
    quarters = points[order_rcb(points, levels=2)].reshape(4, 1024, 2)
    second, third = quarters[1], quarters[2]
    assert second[:, 0].max() <= third[:, 0].min()
    assert min(second[:, 1].min(), third[:, 1].min()) > 0.4  # both on the same side of axis 1


@pytest.mark.parametrize("num_axes", [2, 3])
@pytest.mark.parametrize("outlier", [1e9, -1e9, 1e300])
def test_an_outlier_does_not_collapse_the_order(num_axes, outlier):
    points = np.random.default_rng(2).random((10_000, num_axes))
    points[77] = outlier
    order, notes = order_hilbert(points)
    assert sorted(order.tolist()) == list(range(10_000))
    assert len(notes) == 1
    assert "the box of the others" in notes[0]
    assert f"{outlier:.6g}" in notes[0]
    rest = np.delete(points, 77, axis=0)
    without = np.delete(np.arange(10_000), 77)
    position = np.empty(10_000, np.int64)
    position[order] = np.arange(10_000)
    assert halo(rest, np.argsort(position[without]), 8) < {2: 0.14, 3: 0.42}[num_axes]


@pytest.mark.parametrize("num_axes", [2, 3])
def test_clusters_far_apart_are_bisected(num_axes):
    points = np.random.default_rng(2).random((16_000, num_axes))
    points[8_000:] += 1e12
    order, notes = order_hilbert(points)
    assert sorted(order.tolist()) == list(range(16_000))
    assert "recursive coordinate bisection" in notes[0]
    first = order[:8_000]
    assert (first < 8_000).all() or (first >= 8_000).all()
    assert halo(points, order, 8) < {2: 0.12, 3: 0.4}[num_axes]


@pytest.mark.parametrize("num_axes", [2, 3])
def test_bisection_is_not_misled_by_outliers(num_axes):
    points = np.random.default_rng(2).random((10_000, num_axes))
    points[:3] = [[1e9] * num_axes, [-1e9] * num_axes, [1e30] * num_axes]
    order = order_rcb(points)
    assert sorted(order.tolist()) == list(range(10_000))
    assert halo(points, order, 8) < {2: 0.14, 3: 0.42}[num_axes]


def test_an_outlier_that_leaves_enough_keys_changes_nothing():
    points = np.random.default_rng(2).random((2_000, 2))
    points[5] = 1e3
    assert order_hilbert(points)[1] == []


def test_a_large_offset_in_float32_keeps_what_the_coordinates_still_say():
    cells = np.indices((32, 32)).reshape(2, -1).T
    points = (cells + 4e6).astype(np.float32)  # exact: every point is its own, but few bits are left for a scale
    order, notes = order_hilbert(points)
    assert notes == []
    assert np.array_equal(order, order_hilbert(cells)[0])


def test_coordinates_that_were_rounded_together_are_reported():
    points = (np.random.default_rng(3).random((5_000, 3)) + 1e7).astype(np.float32)
    order, notes = order_hilbert(points)
    assert sorted(order.tolist()) == list(range(5_000))
    assert len(notes) == 1
    assert "repeat the coordinates" in notes[0]
    assert "subtract the offset" in notes[0]


def test_points_in_one_place_keep_their_order():
    order, notes = order_hilbert(np.ones((6, 3)))
    assert order.tolist() == list(range(6))
    assert "5 of 6 points repeat" in notes[0]


@pytest.mark.parametrize("make", [order_hilbert, order_rcb, hilbert_keys])
def test_points_that_have_no_place_are_refused(make):
    points = np.zeros((9, 2))
    points[[3, 7], 1] = np.nan, np.inf
    with pytest.raises(ConfigError, match=r"2 of 9 points have a NaN or infinite coordinate \(first rows: \[3, 7\]\)"):
        make(points)
    for wrong in (np.zeros((4, 1)), np.zeros((4, 4)), np.zeros(4), np.zeros((4, 2), complex), np.array([["a", "b"]])):
        with pytest.raises(ConfigError, match="real numbers"):
            make(wrong)


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(
        np.float64, st.tuples(st.integers(1, 20), st.just(2)), elements=st.floats(allow_nan=False, allow_infinity=False)
    )
)
def test_any_finite_coordinates_have_an_order(points):
    for order in (order_hilbert(points)[0], order_rcb(points, levels=2)):
        assert sorted(order.tolist()) == list(range(len(points)))


@pytest.mark.parametrize(
    "make", [lambda p: order_hilbert(p, on_sphere=True)[0], lambda p: order_rcb(p, on_sphere=True)]
)
def test_the_date_line_and_the_poles_are_no_borders_on_a_sphere(make):
    rng = np.random.default_rng(4)
    lonlat = np.stack([rng.uniform(-180, 180, 8_000), np.rad2deg(np.arcsin(rng.uniform(-1, 1, 8_000)))], axis=1)
    shifted = lonlat + np.array([360.0, 0.0])
    assert np.mean(make(lonlat) == make(shifted)) > 0.99  # rounding may move a point across a cell
    lon, lat = np.deg2rad(lonlat).T
    xyz = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)
    assert halo(xyz, make(lonlat), 8) < 0.2
    with pytest.raises(ConfigError, match="longitude and latitude"):
        order_hilbert(xyz, on_sphere=True)


@pytest.mark.parametrize("step", [15, 5])
def test_the_poles_of_a_grid_are_no_reason_for_another_order(step: int) -> None:
    """A row of a grid at a pole is one place, of as many points as there are longitudes, which rounding keeps apart."""
    lon, lat = np.meshgrid(np.arange(0, 360, step), np.arange(90, -91, -step))
    points = np.stack([lon.ravel(), lat.ravel()], axis=1).astype(np.float64)
    order, notes = order_hilbert(points, on_sphere=True)
    assert notes == []
    assert sorted(order) == list(range(len(points)))
    everywhere = np.concatenate([points, np.repeat(points[[90]], 60, axis=0) + np.linspace(0, 1e-11, 60)[:, None]])
    assert "share the Hilbert key" in " ".join(order_hilbert(everywhere, on_sphere=True)[1])


@pytest.mark.parametrize("num_axes", [2, 3])
def test_corners_of_the_box_are_the_corners_of_the_curve(num_axes):
    corners, num_bits = np.indices((2,) * num_axes).reshape(num_axes, -1).T, {2: 31, 3: 21}[num_axes]
    largest = (1 << num_bits) - 1
    assert hilbert_keys(corners).tolist() == [skilling((corner * largest).tolist(), num_bits) for corner in corners]


def test_boxes_of_at_most_4096_rows_are_not_bisected():
    points = np.random.default_rng(0).random((8193, 2))
    for num, levels in ((4096, 0), (4097, 1), (8192, 1), (8193, 2)):
        assert np.array_equal(order_rcb(points[:num]), order_rcb(points[:num], levels=levels))
    for half in np.split(order_rcb(points[:4000], levels=1), 2):  # a box that is not bisected is in Hilbert order
        keys = hilbert_keys(points[half], box=robust_box(points[half]))
        assert (keys[1:] >= keys[:-1]).all()


def test_small_boxes():
    assert order_rcb(np.array([[1.0, 1], [0, 0]])).tolist() == [1, 0]
    line = np.array([[x, 0.0] for x in range(6)])
    assert order_rcb(line, levels=2).tolist()[3] == 5  # the right half of three, upper side first: 5, then 3 and 4


@pytest.mark.parametrize("offset", [10.0, -10.0])
def test_the_longest_side_is_cut_wherever_it_lies(offset):
    points = np.random.default_rng(0).random((1000, 2)) * [0.5, 1] + [offset, 0]
    first, last = np.split(points[order_rcb(points, levels=1), 1], 2)
    assert first.max() <= last.min()
    rare = np.full((100, 2), [offset, 0.0])  # nearly all in one place: the few others decide, ties go by row
    rare[[3, 4], 1], rare[7, 0] = (-3, 2.9), offset + 1
    assert sorted(order_rcb(rare, levels=1)[:50].tolist()) == [row for row in range(51) if row != 4]


@pytest.mark.parametrize("outlier", [1e5, -1e5])
def test_the_note_names_the_axis_of_the_outlier(outlier):
    points = np.random.default_rng(0).random((100_000, 3)) + np.array([1e6, 0, 0])
    points[5, 1] = outlier
    (note,) = order_hilbert(points)[1]
    assert "axis 1 runs from" in note


def test_one_point_in_a_hundred_may_repeat_another():
    points = np.random.default_rng(0).random((200, 2))
    points[[0, 1]] = points[[2, 3]]
    assert order_hilbert(points)[1] == []


@pytest.mark.parametrize("num_lost", [3, 40])
def test_stable_sort_where_bits_that_differ_are_displaced(num_lost):
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 4, 1000, np.uint64) << np.uint64(61) | rng.integers(0, 1 << num_lost, 1000, np.uint64)
    assert np.array_equal(stable_sort(keys, 63)[1], np.argsort(keys, kind="stable"))


def test_ids_among_sorted_ones():
    assert contains(np.array([2, 5]), np.array([1, 2, 5, 9])).tolist() == [False, True, True, False]
    assert contains(np.empty(0, np.int64), np.array([1])).tolist() == [False]
