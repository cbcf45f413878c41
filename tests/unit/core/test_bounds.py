"""Bounds, windows and segments against plain NumPy indexing."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scidata.core import bounds
from scidata.core.bounds import (
    at_least_one_each,
    bounds_of,
    chunk_bounds,
    compose,
    even_bounds,
    even_sizes,
    explicit_bounds,
    halo_widths,
    owners_of,
    segments_of_slice,
    sizes_of,
    weighted_bounds,
    window,
)
from scidata.core.types import Segment, SegmentTable
from scidata.errors import ConfigError, TooLargeError


def rows_of(segments):
    """The rows that segments select, placed by their offsets; fails where they overlap or leave a gap."""
    total = sum(s.count for s in segments)
    rows = np.full(total, -1)
    for s in segments:
        assert np.all(rows[s.offset : s.offset + s.count] == -1)
        rows[s.offset : s.offset + s.count] = s.start + s.step * np.arange(s.count)
    assert total == 0 or rows.min() >= 0
    return rows


@pytest.mark.parametrize("count", [1 << 45, 1 << 62])
def test_more_rows_than_there_is_memory_for_are_refused_by_name(count):
    with pytest.raises(TooLargeError, match=rf"\({count},\) of int64 take {8 * count} bytes.*metadata are damaged"):
        bounds.rows_of((Segment(start=0, count=count),))


def test_even_bounds_give_the_remainder_to_the_first_parts():
    assert even_bounds(10, 4).tolist() == [0, 3, 6, 8, 10]
    assert even_bounds(240, 7, align=8).tolist() == [0, 40, 80, 112, 144, 176, 208, 240]


@pytest.mark.parametrize(
    ("num_global", "num_parts", "align", "words"),
    [
        (3, 4, 1, "at most 3 ranks"),
        (241, 2, 8, "crop to 240"),
        (16, 3, 8, "groups of 8"),
        (16, 0, 1, "at least 1"),
        (16, 2, 0, "align must be"),
    ],
)
def test_even_bounds_refuse(num_global, num_parts, align, words):
    with pytest.raises(ConfigError, match=words):
        even_bounds(num_global, num_parts, align=align)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([0, 5], "3 ranks need 4 bounds, not 2"),
        ([0, 6, 5, 10], "must not decrease"),
        (np.array([0, 6, 5, 10], "u8"), "must not decrease"),  # where 5 - 6 is a large number
        ([1, 3, 5, 10], "from 0 to 10, not from 1"),
        ([0, 3, 5, 9], "not from 0 to 9"),
        ([0, 3.5, 5, 10], "list of integers"),
    ],
)
def test_explicit_bounds_refuse(bounds, words):
    with pytest.raises(ConfigError, match=words):
        explicit_bounds(bounds, 10, 3)


def test_explicit_bounds_may_leave_parts_empty():
    assert explicit_bounds([0, 0, 10, 10], 10, 3).tolist() == [0, 0, 10, 10]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 8))
def test_weighted_bounds_balance(weights, num_parts):
    if num_parts > len(weights):
        with pytest.raises(ConfigError):
            weighted_bounds(weights, num_parts)
        return
    bounds = weighted_bounds(weights, num_parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    assert np.all(np.diff(bounds) >= 1)
    sums = np.add.reduceat(np.asarray(weights), bounds[:-1])
    if num_parts * max(weights) <= sum(weights):  # else one heavy row, or the floor of one row a part, decides
        assert sums.max() <= sum(weights) / num_parts + max(weights)


def test_weighted_bounds_follow_the_weights():
    assert weighted_bounds([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], 2).tolist() == [0, 1, 10]
    assert weighted_bounds([1, 1, 1, 1, 1, 1, 6, 6], 2, align=2).tolist() == [0, 6, 8]
    with pytest.raises(ConfigError, match="finite"):
        weighted_bounds([1, float("nan")], 2)
    with pytest.raises(ConfigError, match="not negative"):
        weighted_bounds([1, -1], 2)


def test_chunk_bounds_move_to_edges_unless_unbalanced():
    assert chunk_bounds(100, 4, edges=range(0, 100, 24)).tolist() == [0, 24, 48, 72, 100]
    assert chunk_bounds(100, 4, edges=[10, 11, 12]).tolist() == even_bounds(100, 4).tolist()  # too uneven
    assert chunk_bounds(100, 4, edges=[50]).tolist() == even_bounds(100, 4).tolist()  # too few edges
    assert chunk_bounds(96, 2, edges=[45, 48], align=16).tolist() == [0, 48, 96]


def test_chunk_bounds_take_the_nearest_edge():
    assert chunk_bounds(100, 2, edges=[40, 52, 55]).tolist() == [0, 52, 100]
    assert chunk_bounds(100, 2, edges=[38]).tolist() == [0, 38, 100]  # 1.24 times the mean, within the default
    assert chunk_bounds(100, 2, edges=[37]).tolist() == [0, 50, 100]  # 1.26


def test_chunk_bounds_take_an_edge_once():
    found = chunk_bounds(100, 4, edges=[25, 74, 90, 95], max_imbalance=2)
    assert found.tolist() == [0, 25, 74, 90, 100]  # 74 is nearest to 50 and to 75
    assert chunk_bounds(99, 3, edges=[49, 90], max_imbalance=2).tolist() == [
        0,
        49,
        90,
        99,
    ]  # 49 is nearest to both cuts
    assert chunk_bounds(100, 4, edges=[1, 2, 99], max_imbalance=4).tolist() == [0, 1, 2, 99, 100]  # one left for each


def test_chunk_bounds_may_be_as_uneven_as_even_ones():
    assert chunk_bounds(3, 2, edges=[1]).tolist() == [0, 1, 3]  # parts of 1.5 rows: 2 is 1.33 times the mean
    assert chunk_bounds(4, 2, edges=[1], max_imbalance=1.5).tolist() == [0, 1, 4]
    assert chunk_bounds(4, 2, edges=[1], max_imbalance=1.49).tolist() == [0, 2, 4]


@given(
    st.integers(1, 60), st.integers(1, 6), st.lists(st.integers(-5, 70), max_size=12), st.integers(1, 3),
    st.sampled_from([1.0, 1.25, 2.0, 9.0]),
)  # fmt: skip
def test_chunk_bounds_are_edges_or_even(num_groups, num_parts, edges, align, max_imbalance):
    num_global = align * max(num_groups, num_parts)
    found = chunk_bounds(num_global, num_parts, edges=edges, align=align, max_imbalance=max_imbalance)
    even = even_bounds(num_global, num_parts, align=align)
    assert np.all(np.diff(found) > 0)
    assert (found[0], found[-1], len(found)) == (0, num_global, num_parts + 1)
    largest, mean = np.diff(found).max(), num_global / num_parts
    assert found.tolist() == even.tolist() or set(found[1:-1].tolist()) <= {e for e in edges if e % align == 0}
    assert largest <= max(max_imbalance * mean, np.diff(even).max()) + 1e-9


def test_of_two_cuts_that_balance_as_well_the_later_is_taken():
    assert weighted_bounds([1, 2, 1], 2).tolist() == [0, 2, 3]
    assert weighted_bounds([1, 2, 1, 1, 2, 1], 4).tolist() == [0, 2, 3, 5, 6]


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(lambda s: sum(s) > 0),
    st.integers(0, 15),
    st.integers(0, 15),
    st.booleans(),
)
def test_window_equals_padding(sizes, lo, hi, periodic):
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    num_global = int(bounds[-1])
    for part, size in enumerate(sizes):
        rows = rows_of(window(bounds, part, lo=lo, hi=hi, periodic=periodic))
        wanted = np.arange(bounds[part] - lo, bounds[part + 1] + hi)
        wanted = wanted % num_global if periodic else wanted[(wanted >= 0) & (wanted < num_global)]
        if size == 0:
            wanted = wanted[:0]
        assert rows.tolist() == wanted.tolist()
        below, above = halo_widths(bounds, part, lo=lo, hi=hi, periodic=periodic)
        assert len(rows) == size + below + above
        assert rows[below : below + size].tolist() == list(range(bounds[part], bounds[part + 1]))


def test_negative_halo_is_refused():
    with pytest.raises(ConfigError, match="negative"):
        window([0, 4], 0, lo=-1, hi=0)


SLICES = st.builds(
    slice,
    st.none() | st.integers(-25, 25),
    st.none() | st.integers(-25, 25),
    st.none() | st.sampled_from([-3, -1, 1, 2, 5]),
)


@given(SLICES | st.lists(st.integers(-20, 19), min_size=1, max_size=12) | st.integers(-20, 19), st.data())
def test_compose_equals_indexing_twice(selection, data):
    source = np.arange(100, 120)
    outer = segments_of_slice(selection, 20)
    selected = np.atleast_1d(source[selection])
    assert source[rows_of(outer)].tolist() == selected.tolist()
    if not len(selected):
        return
    inner_slice = data.draw(SLICES.filter(lambda each: each.step in (None, 1)))
    inner = segments_of_slice(inner_slice, len(selected))
    assert source[rows_of(compose(outer, inner))].tolist() == selected[inner_slice].tolist()


def test_segments_refuse_what_is_out_of_range():
    with pytest.raises(ConfigError, match="index 20 is out of range for 20"):
        segments_of_slice([3, 20], 20)
    with pytest.raises(ConfigError, match="index 20 is out of range for 20"):
        segments_of_slice(np.array([3, 2**64 - 1], np.uint64), 20)  # not -1
    with pytest.raises(ConfigError, match="stride of 0"):
        segments_of_slice(slice(0, 4, 0), 20)
    with pytest.raises(ConfigError, match=r"0.5 selects nothing of 20 rows: expected .* a value for each row"):
        segments_of_slice(0.5, 20)
    with pytest.raises(ConfigError, match=r"a mask of shape \(19,\) selects nothing of 20 rows"):
        segments_of_slice(np.ones(19, bool), 20)


@given(
    st.lists(st.integers(-50, 49) | st.integers(0, 3), max_size=30),
    st.integers(0, 4),
    st.integers(0, 200),
    st.integers(0, 200),
)
def test_lists_of_indices_long_and_short(indices, repeats, start, count):
    indices = (indices + list(range(10, 20)) + [40, 37, 34, 30, 30]) * repeats + indices
    found = segments_of_slice(indices, 50)
    assert isinstance(found, tuple if len(found) <= 64 else SegmentTable)
    wanted = np.arange(50)[indices] if indices else np.empty(0, int)
    assert bounds.rows_of(found).tolist() == rows_of(found).tolist() == wanted.tolist()
    assert bounds.num_rows_of(found) == len(indices)
    assert all(s.step != 0 and s.count > 0 for s in found)
    rows = range(len(indices))[start : start + count]
    inner = (Segment(start=rows.start, count=len(rows)),) if len(rows) else ()
    assert rows_of(compose(found, inner)).tolist() == wanted[start : start + count].tolist()


def test_runs_of_a_list():
    found = segments_of_slice([3, 4, 5, 9, 7, 5, 5, 5, 2], 10)
    assert [(s.start, s.count, s.step, s.offset) for s in found] == [
        (3, 3, 1, 0), (9, 3, -2, 3), (5, 1, 1, 6), (5, 1, 1, 7), (2, 1, 1, 8),
    ]  # fmt: skip
    assert segments_of_slice([8, 7, 2, 5], 10) == (  # two rows are a run only where one follows the other
        Segment(start=8, count=2, step=-1), Segment(start=2, count=1, offset=2), Segment(start=5, count=1, offset=3),
    )  # fmt: skip
    assert segments_of_slice([], 10) == segments_of_slice(slice(3, 3), 10) == ()
    for nothing in ("3", b"3", "", [0.5], [[1]], np.zeros(9, bool), None):
        with pytest.raises(ConfigError, match="selects nothing of 10 rows"):
            segments_of_slice(nothing, 10)


@pytest.mark.parametrize("step", [1, 3, -2])
def test_windows_that_begin_and_end_inside_the_runs_of_a_long_list(step):
    chosen = (np.arange(100)[:, None] * 50 + 20 + step * np.arange(5)).reshape(-1)
    outer = segments_of_slice(chosen, 5000)
    assert isinstance(outer, SegmentTable)
    assert len(outer) == 100
    for start, count in itertools.product((0, 3, 247), (1, 2, 5, 9, 250)):
        inner = segments_of_slice(slice(start, start + count), 500)
        assert rows_of(compose(outer, inner)).tolist() == chosen[start : start + count].tolist()


def test_a_long_list_composed_with_a_window_that_wraps():
    rows = np.random.default_rng(0).permutation(500)
    found = compose(segments_of_slice(rows.tolist(), 500), window([0, 100, 500], 0, lo=7, hi=3, periodic=True))
    assert isinstance(found, SegmentTable)
    assert rows_of(found).tolist() == np.concatenate([rows[-7:], rows[:103]]).tolist()
    assert [found[1], *found[2:4]] == list(found)[1:4]


def test_bounds_of_sizes_and_owners_of_rows():
    ends = bounds_of([2, 0, 3, 0])
    assert (ends.tolist(), ends.dtype) == ([0, 2, 2, 5, 5], np.int64)
    assert bounds_of([]).tolist() == [0]
    assert owners_of(ends, range(5)).tolist() == [0, 0, 2, 2, 2]  # empty parts own nothing
    assert owners_of(ends, []).tolist() == []


@given(st.lists(st.integers(-5, 30), max_size=8), st.integers(0, 10))
def test_at_least_one_each(cuts, more):
    num_rows = len(cuts) + 1 + more
    bounds = at_least_one_each(np.array(cuts, np.int64), num_rows)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, num_rows, len(cuts) + 2)
    assert (np.diff(bounds) >= 1).all()
    assert at_least_one_each(bounds[1:-1], num_rows).tolist() == bounds.tolist()  # what is right stays


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_sizes_and_bounds_are_each_others_inverse(sizes):
    bounds = bounds_of(sizes)
    assert bounds.dtype == np.int64
    assert bounds.tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    assert sizes_of(bounds) == tuple(sizes)
    owners = [part for part, size in enumerate(sizes) for _ in range(size)]
    assert owners_of(bounds, np.arange(bounds[-1])).tolist() == owners


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_sizes_are_those_of_even_bounds_where_every_part_has_a_row(num_rows, num_parts):
    sizes = even_sizes(num_rows, num_parts)
    assert sum(sizes) == num_rows
    assert len(sizes) == num_parts
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    if num_parts <= num_rows:
        assert sizes == sizes_of(even_bounds(num_rows, num_parts))
