"""Who writes which rows: all of them, once, in whole units, after exchanges that both sides know."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scidata.core.types import IntArray
from scidata.plan.owners import common_box, exchange_of, whole_units, within, writer_bounds
from tests.unit.shard.test_many_ranks import counted


@st.composite
def cuts(draw: st.DrawFn) -> IntArray:
    num_rows = draw(st.integers(0, 40))
    inner = sorted(draw(st.lists(st.integers(0, num_rows), max_size=5)))
    return np.array([0, *inner, num_rows], np.int64)


@given(cuts(), st.integers(1, 50))
def test_units_are_written_whole_by_who_has_most_of_them(bounds: IntArray, unit: int) -> None:
    found = writer_bounds(bounds, unit)
    num_rows = bounds[-1]
    assert found[0] == 0
    assert found[-1] == num_rows
    assert (np.diff(found) >= 0).all()
    assert all(cut % unit == 0 or cut == num_rows for cut in found)
    for start in range(0, int(num_rows), unit):
        stop = min(start + unit, int(num_rows))
        held = [max(0, min(b, stop) - max(a, start)) for a, b in itertools.pairwise(bounds.tolist())]
        (writer,) = [i for i, (a, b) in enumerate(itertools.pairwise(found.tolist())) if a <= start < b]
        assert held[writer] == max(held)


def test_nothing_moves_where_bounds_lie_on_edges() -> None:
    bounds = np.array([0, 8, 8, 20, 21])
    assert writer_bounds(bounds, 4).tolist() == bounds.tolist()
    exchange = exchange_of((21,), (4,), (4,), [(0, bounds)], 2)
    assert exchange.held == exchange.written
    assert exchange.sends == exchange.receives == ((2, (slice(8, 20),)),)


@given(cuts(), cuts(), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_what_is_sent_is_what_is_received(rows: IntArray, columns: IntArray, high: int, wide: int, both: bool) -> None:
    shape, parts = (int(rows[-1]), int(columns[-1])), (len(rows) - 1, len(columns) - 1)
    values = np.arange(shape[0] * shape[1]).reshape(shape)
    splits = [(0, rows), (1, columns) if both else None]  # or the same along the second axis
    exchanges = [exchange_of(shape, (high, wide), parts, splits, part) for part in range(parts[0] * parts[1])]
    sent = {
        (x.part, to, str(box)): values[box][...] if x.held is None else values[x.held][within(box, x.held)]
        for x in exchanges
        for to, box in x.sends
    }
    out, times = np.full(shape, -1), np.zeros(shape, int)
    for x in exchanges:
        if x.written is None:
            assert not both
            assert x.part % parts[1]
            continue
        mine = np.full(x.shape, -1)
        for source, box in x.receives:
            mine[within(box, x.written)] = sent.pop((source, x.part, str(box)))
        out[x.written] = mine
        times[x.written] += 1
    assert not sent
    assert (out == values).all()
    assert (times == 1).all()


@given(cuts(), cuts(), st.integers(1, 9), st.integers(1, 9))
def test_units_that_nobody_else_has_a_part_in(rows: IntArray, columns: IntArray, high: int, wide: int) -> None:
    shape, units, parts = (int(rows[-1]), int(columns[-1])), (high, wide), (len(rows) - 1, len(columns) - 1)
    for part in range(parts[0] * parts[1]):
        x = exchange_of(shape, units, parts, [(0, rows), (1, columns)], part)
        assert x.written is not None
        inner, others = whole_units(common_box(x.held, x.written), x.written, units)
        held, times, wanted = (np.zeros(shape, int) for _ in range(3))
        held[x.held], wanted[x.written] = 1, 1
        for box in (*others, *([] if inner is None else [inner])):
            times[box] += 1
            for cut, unit, size in zip(box, units, shape, strict=True):
                is_whole = cut.start % unit == 0 and (cut.stop % unit == 0 or cut.stop == size)
                assert is_whole or not times[box].size
        assert (times == wanted).all()
        assert inner is None or held[inner].all()
        for i in range(0, shape[0], high):  # and of those that lie in what is held none is among the others
            for j in range(0, shape[1], wide):
                unit = slice(i, i + high), slice(j, j + wide)
                assert (held[unit].all() and wanted[unit].all()) == (common_box(unit, inner) is not None)


@pytest.mark.parametrize(("part", "is_held"), [(0, True), (1, False)])
def test_a_single_value_is_written_by_the_first(part: int, is_held: bool) -> None:
    exchange = exchange_of((), (), (2,), [None], part)
    assert (exchange.held is not None) == is_held
    assert exchange.receives == (((0, ()),) if is_held else ())


def test_a_part_looks_at_its_neighbours_only() -> None:
    calls = []
    for num_parts in (2, 64, 2048):
        bounds = np.arange(num_parts + 1) * 10
        arguments = (8, 10 * num_parts), (1, 7), (num_parts,), [(1, bounds)], 1
        calls.append(counted(lambda arguments=arguments: exchange_of(*arguments)))
        assert len(exchange_of(*arguments).sends) <= 3
    assert max(calls) <= 1.3 * calls[0]
