"""Orders as functions of (seed, epoch): weights, mixtures, groups of similar size."""

from __future__ import annotations

import numpy as np
import pytest

from scidata.errors import ConfigError
from scidata.order import Mixture, Order


def order(count: int = 100, **options) -> Order:
    return Order(num_samples=count, shuffle=True, seed=3, **options)


def test_weights_decide_how_often() -> None:
    weights = np.r_[0.0, np.ones(48), 4.0, 0.0]
    drawn = order(51, weights=weights, draws=20_000)
    entries = drawn.entries(0)
    counts = np.bincount(entries, minlength=51)
    assert len(entries) == len(drawn) == 20_000
    assert counts[0] == counts[50] == 0
    assert counts[49] / counts[1:49].mean() == pytest.approx(4, rel=0.1)
    assert np.array_equal(entries, drawn.entries(0))
    assert not np.array_equal(entries, drawn.entries(1))


def test_every_stretch_of_a_mixture_has_the_ratio() -> None:
    mixture = Mixture.of((70, 30, 500), (7, 3, 10), None)
    assert mixture.takes == (70, 30, 100)
    entries = order(600, mixture=mixture).entries(0)
    part = np.digitize(entries, [70, 100])
    for number, share in enumerate((0.35, 0.15, 0.5)):
        held = np.cumsum(part == number)
        assert np.abs(held - share * np.arange(1, 201)).max() <= 1
    assert sorted(entries[part == 0]) == list(range(70))


def test_a_mixture_goes_through_all_of_a_data_set_before_it_repeats() -> None:
    mixed = order(12, mixture=Mixture.of((5, 7), (1, 1), 6))
    takes = [mixed.entries(epoch) for epoch in range(35)]
    for start, length in ((0, 5), (5, 7)):
        row = np.concatenate([e[(e >= start) & (e < start + length)] for e in takes])
        assert len(row) == 105
        for begin in range(0, 105, length):
            assert sorted(row[begin : begin + length]) == list(range(start, start + length))
    repeated = order(12, mixture=Mixture.of((5, 7), (1, 1), 24)).entries(4)
    assert np.bincount(repeated, minlength=12).tolist() == pytest.approx([12 / 5] * 5 + [12 / 7] * 7, abs=1.3)


def test_a_mixture_without_shuffling() -> None:
    plain = Order(num_samples=6, shuffle=False, seed=0, mixture=Mixture.of((2, 4), (1, 2), None))
    assert plain.entries(0).tolist() == [2, 0, 3, 4, 1, 5]


@pytest.mark.parametrize("seed", range(3))
def test_takes_add_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(50):
        parts = int(rng.integers(1, 6))
        lengths, ratios = rng.integers(3, 50, parts), rng.random(parts) + 0.1
        mixture = Mixture.of(tuple(lengths.tolist()), tuple(ratios.tolist()), None)
        assert all(take <= length for take, length in zip(mixture.takes, lengths, strict=True))
        shares = ratios / ratios.sum() * sum(mixture.takes)
        assert np.abs(np.array(mixture.takes) - shares).max() < 1


def test_groups_have_similar_sizes_and_lose_nothing() -> None:
    sizes = np.random.default_rng(0).lognormal(size=1003)
    grouped = order(1003, sizes=sizes, group=8)
    spread = {}
    for name, entries in {"grouped": grouped.entries(0), "plain": order(1003).entries(0)}.items():
        assert sorted(entries) == list(range(1003))
        groups = sizes[entries][:1000].reshape(-1, 8)
        spread[name] = float((groups.max(1) / groups.mean(1)).mean())
    assert spread["grouped"] < 1.3 < spread["plain"]
    assert not np.array_equal(grouped.entries(0), grouped.entries(1))
    by_group = {frozenset(g) for g in grouped.entries(0)[:1000].reshape(-1, 8).tolist()}
    assert len(by_group & {frozenset(g) for g in grouped.entries(1)[:1000].reshape(-1, 8).tolist()}) < 5


@pytest.mark.parametrize(
    ("lengths", "ratios", "count", "message"),
    [
        ((), (), None, "0 data sets"),
        ((3, 0), (1, 1), None, "data set 1 is empty"),
        ((3, 2), (1, 0), None, "positive"),
        ((3, 2), (1, float("nan")), None, "positive"),
        ((3, 2), (1, 1), 0, "an epoch of 0"),
    ],
)
def test_mixtures_that_make_no_sense(lengths, ratios, count, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture.of(lengths, ratios, count)
