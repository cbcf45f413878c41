"""How many requests are in flight: what servers answer decides."""

import pytest

from scidata.sources.access.load import FIRST_REQUESTS, MAX_REQUESTS, MIN_REQUESTS, Load


def fill(load):
    """Start as many requests as may be."""
    count = 0
    while load.add(0, others=count, held=0):
        count += 1
    return count


def answer(load, count, seconds, nbytes=1000):
    for _ in range(count):
        load.remove(requests=1)
        load.answered(nbytes, seconds)


def round_of(load, seconds, nbytes=1000):
    count = fill(load)
    answer(load, count, seconds, nbytes)
    return count


def test_quick_answers_make_more_of_them():
    load = Load()
    assert [round_of(load, 0.1) for _ in range(4)] == [FIRST_REQUESTS + i for i in range(4)]
    for _ in range(2 * MAX_REQUESTS):
        round_of(load, 0.1)
    assert round_of(load, 0.1) == MAX_REQUESTS


def test_queues_and_large_ranges_make_no_more():
    load = Load()
    answer(load, fill(load), 0.1)
    for seconds in (0.2, 0.3):
        round_of(load, seconds)
        assert load.most_requests == FIRST_REQUESTS
    large = Load()
    for _ in range(4):
        assert round_of(large, 0.1, nbytes=8 << 20) == FIRST_REQUESTS


def test_a_way_that_became_longer_is_learnt():
    load = Load()
    round_of(load, 0.1)
    rounds = 0
    while load.most_requests <= FIRST_REQUESTS + 4:
        round_of(load, 1.0)
        rounds += 1
        assert rounds < 200


def test_where_few_are_wanted_nothing_changes():
    load = Load()
    for _ in range(1000):
        assert load.add(0, others=0, held=0)
        answer(load, 1, 0.1)
    assert load.most_requests == FIRST_REQUESTS


def test_refusals_halve_them_once_for_all_in_flight(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    load = Load()
    for _ in range(50):
        load.refused()
    assert load.most_requests == FIRST_REQUESTS // 2
    for _ in range(20):
        now += 2
        load.refused()
    assert fill(load) == load.most_requests == MIN_REQUESTS
    answer(load, MIN_REQUESTS, 9.9)  # slow, but not refused
    assert load.most_requests == pytest.approx(MIN_REQUESTS + 1, abs=1)
    for _ in range(FIRST_REQUESTS):
        round_of(load, 9.9)
    assert load.most_requests >= FIRST_REQUESTS
