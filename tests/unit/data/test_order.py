"""Orders as functions of (seed, epoch): weights, mixtures, groups of similar size."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
import tracemalloc
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scidata.core.types import BufferSpec
from scidata.data import combine
from scidata.data import order as order_module
from scidata.data.order import Mixture, Order
from scidata.data.sample import Sample
from scidata.device_mesh import init_mesh
from scidata.errors import ConfigError
from scidata.loader.data_loader import DataLoader
from scidata.loader.sampler import DistributedSampler
from scidata.testing import fake_group


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


def test_no_sample_without_weight_is_drawn_where_the_sum_rounds_up() -> None:
    """Random numbers below 1 times the smallest number there is are that number, half of the time."""
    assert order(3, weights=np.array([0, 5e-324, 0]), draws=50).entries(0).tolist() == [1] * 50


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


@pytest.mark.parametrize("max_listed", [order_module.MAX_LISTED, 1])
def test_the_data_sets_of_a_mixture_have_orders_of_their_own(monkeypatch, max_listed: int) -> None:
    """Or two of one length would show the samples of the same number side by side, in each epoch."""
    monkeypatch.setattr(order_module, "MAX_LISTED", max_listed)
    mixed = order(150, mixture=Mixture.of((50, 50, 50), (1, 1, 1), None))
    rows = [entries[entries // 50 == part] % 50 for entries in map(mixed.entries, range(3)) for part in range(3)]
    assert all(sorted(row) == list(range(50)) for row in rows)
    rows += [list(order(50).dealt(epoch, 0, 1, 50)) for epoch in range(3)]  # nor that of a data set alone
    assert len({tuple(row) for row in rows}) == len(rows)


def test_a_mixture_without_shuffling() -> None:
    plain = Order(num_samples=6, shuffle=False, seed=0, mixture=Mixture.of((2, 4), (1, 2), None))
    assert plain.entries(0).tolist() == [2, 0, 3, 4, 1, 5]


@pytest.mark.parametrize(
    ("num_samples", "takes"), [(1, (1, 0, 0)), (2, (1, 1, 0)), (7, (4, 2, 1)), (8, (4, 2, 2)), (10, (5, 3, 2))]
)
def test_the_largest_remainders_get_what_is_left(num_samples: int, takes: tuple[int, ...]) -> None:
    assert Mixture.of((10, 10, 10), (0.5, 0.3, 0.2), num_samples).takes == takes


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
        ((3, 2), (1,), None, "2 data sets need as many ratios, not 1"),
        ((3, 0), (1, 1), None, "data set 1 is empty"),
        ((3, 2), (1, 0), None, "positive"),
        ((3, 2), (1, float("nan")), None, "positive"),
        ((3, 2), (1, 1), 0, "an epoch of 0"),
    ],
)
def test_mixtures_that_make_no_sense(lengths, ratios, count, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture.of(lengths, ratios, count)


# -- orders that are listed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_listed_order_is_numpys_permutation_and_its_digest_that_of_int64(num_replicas: int) -> None:
    """Saved states hold this digest: other bytes, and no run resumes."""
    listed, count = order(50_000), 50_000 // num_replicas
    whole = np.random.default_rng(np.random.SeedSequence([3, 7])).permutation(50_000)
    assert listed.digest(7) == hashlib.sha256(whole.astype("<i8").tobytes()).hexdigest()[:16]
    assert list(listed.dealt(7, 2, num_replicas, count)) == np.roll(whole, -2)[::num_replicas][:count].tolist()
    assert np.array_equal(listed.entries(7), whole)
    assert listed.entries(7).dtype == np.int64


@pytest.mark.parametrize(("shuffle", "nbytes_each"), [(True, 4), (False, 0)])
def test_an_order_of_a_million_samples_is_gone_through_and_saved_in_blocks(shuffle: bool, nbytes_each: int) -> None:
    """Listed as Python's integers it took 52 MiB more; saved, 15 more."""
    sampler = DistributedSampler(range(1_000_000), shuffle=shuffle)
    tracemalloc.start()
    try:
        entries = iter(sampler)
        first = next(entries)
        state = sampler.state_dict()
        assert sum(entries) + first == 999_999 * 500_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000 * nbytes_each + (2 << 20)
        del entries
        assert tracemalloc.get_traced_memory()[0] < 2 << 20
        sampler.load_state_dict(state)
        assert next(iter(sampler)) == sampler.order()[1]
    finally:
        tracemalloc.stop()


def test_saving_the_place_within_an_epoch_makes_no_other_list(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = Order._made
    monkeypatch.setattr(Order, "_made", lambda self, epoch: made.append(epoch) or make(self, epoch))
    sampler = DistributedSampler(range(100))
    entries = iter(sampler)
    next(entries)
    state = sampler.state_dict()
    assert made == [0]
    again = pickle.loads(pickle.dumps(sampler))
    assert again.state_dict() == state


def test_a_list_that_a_saved_place_needs_serves_the_next_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = Order._made
    monkeypatch.setattr(Order, "_made", lambda self, epoch: made.append(epoch) or make(self, epoch))
    sampler, resumed = DistributedSampler(range(100)), DistributedSampler(range(100))
    expected = list(sampler)
    next_epoch = sampler.state_dict(epoch=1, consumed=0)  # as a loader saves it at the end of an epoch
    sampler.set_epoch(1)
    assert sorted(sampler) == sorted(expected)
    assert made == [0, 1]
    resumed.load_state_dict(next_epoch)
    assert list(pickle.loads(pickle.dumps(resumed))) == list(resumed) == list(sampler)
    assert made == [0, 1, 1, 1, 1]  # of load_state_dict and its iteration one; of the copy, and of the first again
    assert "_kept" not in vars(resumed._order)


# -- orders that are not listed ------------------------------------------------------------------------------------

HUGE = 2**40


class Many:
    """A data set of so many samples that nothing may list them; a sample is its number."""

    mesh = dp_axis = transform = None

    def __init__(self, count: int = HUGE) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def buffer_specs(self):
        return {"number": BufferSpec(shape=(), dtype=np.dtype("i8"))}

    def read_into(self, index, out) -> int:
        out["number"][...] = index
        return 8

    def read_local(self, index):
        return {"number": torch.tensor(index)}

    def assemble(self, local, *, index, batched=False):
        return Sample(local, dims={"number": ()}, index=index)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 5000), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_an_order_that_is_not_listed_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    with mock.patch.object(order_module, "MAX_LISTED", 0):
        entries = Order(num_samples=count, shuffle=True, seed=seed)
        assert not entries.listed
        dealt = list(entries.dealt(epoch, 0, 1, count))
        assert sorted(dealt) == list(range(count))
        assert list(entries.dealt(epoch, count // 2, 3, count)) == [
            dealt[(count // 2 + 3 * i) % count] for i in range(count)
        ]
        plain = Order(num_samples=count, shuffle=False, seed=seed)
        assert list(plain.dealt(epoch, 0, 1, count)) == list(range(count))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("more", [-1, 0, 1, order_module._BLOCK + 3])
def test_an_order_that_is_not_listed_ends_where_its_blocks_do_not(monkeypatch, shuffle: bool, more: int) -> None:
    monkeypatch.setattr(order_module, "MAX_LISTED", 0)
    count = order_module._BLOCK + more
    entries = Order(num_samples=count, shuffle=shuffle, seed=1)
    dealt = list(entries.dealt(2, 0, 1, count))
    assert sorted(dealt) == list(range(count))
    assert shuffle or dealt == list(range(count))
    assert list(entries.dealt(2, count - 2, 3, count)) == [dealt[(count - 2 + 3 * i) % count] for i in range(count)]


def test_an_order_that_is_not_listed_is_a_shuffle(monkeypatch) -> None:
    """Entries, displacements and neighbours' distances are spread as those of a uniform permutation are."""
    monkeypatch.setattr(order_module, "MAX_LISTED", 0)
    count, bins = 100_003, 64
    epochs = [np.array(list(order(count).dealt(epoch, 0, 1, count))) for epoch in range(3)]
    for entries in epochs:
        position = np.arange(count)
        rows = np.histogram2d(position, entries, bins=(8, 8), range=((0, count), (0, count)))[0]
        shifts = np.bincount((entries - position) % count * bins // count, minlength=bins)
        steps = np.bincount(np.diff(entries) % count * bins // count, minlength=bins)
        low_bits = np.bincount((entries[:-1] & 7) * 8 + (entries[1:] & 7), minlength=64)
        for observed in (rows.ravel(), shifts, steps, low_bits):
            expected = observed.sum() / len(observed)
            chi_square = float(((observed - expected) ** 2 / expected).sum())
            assert 20 < chi_square < 130  # 63 degrees of freedom: beyond 130 once in 10^6
    assert abs(np.corrcoef(epochs[0], epochs[1])[0, 1]) < 0.02
    # a cycle's mean length and fixed points, of which a permutation has one on average
    assert sum(int((entries == np.arange(count)).sum()) for entries in epochs) < 12


def test_orders_up_to_the_limit_are_what_they_were() -> None:
    assert order_module.MAX_LISTED == 1 << 24  # saved places were made with it
    assert [order((1 << 24) + more).listed for more in (0, 1)] == [True, False]
    drawn = list(order(1000).dealt(4, 0, 1, 1000))
    assert drawn == np.random.default_rng(np.random.SeedSequence([3, 4])).permutation(1000).tolist()


@pytest.mark.parametrize(
    ("digest", "count", "options"),
    [
        ("d08ff133b77f5fd5", 50, {}),
        ("ae146c8dceb1ecbf", HUGE, {}),
        ("d511fc15cd70a1b9", HUGE - 12345, {}),
        ("5e82bba26ab9a471", 50, {"weights": np.arange(50) % 7, "draws": 80}),
        ("a799d372e33ad794", 60, {"mixture": Mixture(lengths=(20, 40), takes=(30, 15))}),
        ("3ffb57e69d0d4d4c", 500, {"sizes": np.arange(500) * 37 % 101, "group": 4}),
        ("d7de77e693ed577b", 500, {"blocks": np.arange(500) // 3, "lanes": 4}),
        ("0ec96e67e8e273a9", 500, {"blocks": np.arange(500) // 3, "stretches": np.arange(500) // 30, "lanes": 3}),
        (
            "b8703fc8de44c61e",
            60,
            {"blocks": np.arange(60) // 3, "lanes": 2, "mixture": Mixture(lengths=(20, 40), takes=(30, 15))},
        ),
    ],
)
def test_saved_places_fit_the_orders_of_later_versions(digest: str, count: int, options: dict[str, Any]) -> None:
    assert order(count, **options).digest(1) == digest


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_huge_sampler_deals_and_resumes(drop_last: bool) -> None:
    sampler = DistributedSampler(Many(), seed=5, drop_last=drop_last)
    assert len(sampler) == HUGE
    first = list(itertools.islice(sampler, 1000))
    assert len(set(first)) == 1000
    assert 0 <= min(first) < HUGE // 20
    assert HUGE - HUGE // 20 < max(first) < HUGE
    begun = iter(sampler)
    for _ in range(400):
        next(begun)
    state = json.loads(json.dumps(sampler.state_dict()))
    assert state["consumed"] == 400
    resumed = DistributedSampler(Many(), seed=5, drop_last=drop_last)
    resumed.load_state_dict(state)
    assert list(itertools.islice(resumed, 600)) == first[400:]
    other = DistributedSampler(Many(HUGE - 1), seed=5, drop_last=drop_last)
    with pytest.raises(ConfigError, match="another data set"):
        other.load_state_dict(state)
    resumed.set_epoch(1)
    assert not set(itertools.islice(resumed, 1000)) & set(first)
    with pytest.raises(ConfigError, match="iterate"):
        sampler.order()


def test_a_huge_sampler_in_order_wraps_at_the_end() -> None:
    """The last step is filled with the first entries, or dropped, as in a short order."""
    sizes = {}
    for drop_last in (False, True):
        for rank in (1, 2):
            with fake_group(3, rank=rank):
                sampler = DistributedSampler(
                    Many(), init_mesh(domain=1), shuffle=False, drop_last=drop_last, check=False
                )
                sampler.load_state_dict(sampler.state_dict(consumed=HUGE - HUGE % 3 - 3))
                sizes[drop_last, rank] = list(iter(sampler))  # list() alone would make room for len()
    assert HUGE % 3 == 1
    assert sizes[True, 1] == [HUGE - 3]
    assert sizes[False, 1] == [HUGE - 3, 0]
    assert sizes[False, 2] == [HUGE - 2, 1]


def test_dp_ranks_share_a_huge_order() -> None:
    alone = list(itertools.islice(DistributedSampler(Many(), seed=1), 30))
    for rank in range(3):
        with fake_group(3, rank=rank):
            sampler = DistributedSampler(Many(), init_mesh(domain=1), seed=1, check=False)
            assert len(sampler) == -(-HUGE // 3)
            assert list(itertools.islice(sampler, 10)) == alone[rank::3]


def test_a_loader_of_a_huge_data_set() -> None:
    loader = DataLoader(Many(), batch_size=4, shuffle=True, num_workers=1)
    batches = iter(loader)
    got = [next(batches)["number"].tolist() for _ in range(5)]
    state = loader.state_dict()
    rest = [next(batches)["number"].tolist() for _ in range(5)]
    again = DataLoader(Many(), batch_size=4, shuffle=True, num_workers=1)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert [b["number"].tolist() for b in itertools.islice(again, 5)] == rest
    assert len({i for batch in got + rest for i in batch}) == 40


def test_huge_weights_sizes_and_subsets_are_refused_before_anything_is_allocated() -> None:
    weights = np.broadcast_to(1.0, (HUGE,))
    with pytest.raises(ConfigError, match="leave weights and sizes out"):
        DistributedSampler(Many(), weights=weights)
    with pytest.raises(ConfigError, match="leave weights and sizes out"):
        DistributedSampler(Many(), sizes=weights, group=4)
    with pytest.raises(ConfigError, match=f"num_samples={HUGE}"):
        DistributedSampler(Many(10), weights=np.ones(10), num_samples=HUGE)
    with pytest.raises(ConfigError, match="isel="):
        combine.subset(Many(), range(0, HUGE, 2))
    with pytest.raises(ConfigError, match="num_samples="):
        combine.mix([Many(), Many()], [1, 1])
    assert combine.subset(Many(), range(0, HUGE, HUGE // 4)).locate(3) == (0, 3 * HUGE // 4)


def test_huge_data_sets_one_after_another_and_mixed() -> None:
    both = combine.concat(Many(), Many(10), Many(0), Many())
    assert len(both) == 2 * HUGE + 10
    assert both.locate(HUGE - 1) == (0, HUGE - 1)
    assert both.locate(HUGE + 9) == (1, 9)
    assert both.locate(HUGE + 10) == (3, 0)
    assert both.locate(-1) == (3, HUGE - 1)
    assert both.fingerprint != combine.concat(Many(), Many(11), Many(0), Many()).fingerprint
    mixed = combine.mix([Many(), Many(10)], [3, 1], num_samples=40)
    sampler = DistributedSampler(mixed)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        entries = np.array(list(sampler))
        assert len(set(entries[entries < HUGE])) == 30
        assert sorted(entries[entries >= HUGE] - HUGE) == list(range(10))
        epochs.append(set(entries[entries < HUGE].tolist()))
    assert not epochs[0] & epochs[1]
