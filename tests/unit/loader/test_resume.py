"""Saving the place in an epoch and going on, in the loader, the sampler and torch's and torchdata's own loaders."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from scidata.errors import ConfigError
from scidata.loader.data_loader import DataLoader
from scidata.loader.sampler import DistributedSampler
from tests.unit.loader._resume import Numbers, numbers, run_all, through_json


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("scidata-reader")]


# -- any number of ranks, killed anywhere ----------------------------------------------------------------------------


def run_for(
    state: dict[str, Any] | None,
    batches: int | None,
    *,
    dp: int,
    domain: int,
    batch: int | None,
    workers: int,
    **order: Any,
) -> tuple[dict[str, Any], list[int]]:
    """Run numbers in some order."""

    def loader_of(mesh: Any) -> DataLoader:
        ds = Numbers(order["count"], mesh)
        options = {"shuffle": order["shuffle"], "seed": 7, "drop_last": order["drop_last"]}
        sampler = DistributedSampler(ds, mesh, check=False, **options)
        drop_last = order["drop_last"] and batch is not None
        return DataLoader(ds, batch, sampler=sampler, num_workers=workers, drop_last=drop_last, watch=False)

    return run_all(
        loader_of,
        state,
        batches,
        dp=dp,
        domain=domain,
        epoch=order["epoch"],
        rows_of=lambda _, sample: numbers(sample),
    )


RUN = st.fixed_dictionaries(
    {
        "dp": st.integers(1, 4),
        "domain": st.integers(1, 2),
        "batch": st.none() | st.integers(1, 4),
        "workers": st.sampled_from([0, 0, 0, 0, 0, 2]),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    runs=st.lists(st.tuples(RUN, st.integers(1, 5)), min_size=1, max_size=3),
    last=RUN,
    count=st.integers(5, 40),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_killed_anywhere_and_resumed_on_any_ranks(runs, last, count, shuffle, drop_last, epoch) -> None:
    order = {"count": count, "shuffle": shuffle, "drop_last": drop_last, "epoch": epoch}
    whole = DistributedSampler(range(count), shuffle=shuffle, seed=7)
    whole.set_epoch(epoch)
    expected, state, seen = list(whole), None, []
    most = 0
    for run, batches in [*runs, (last, None)]:
        most = max(most, run["dp"])
        state, more = run_for(state, batches, **run, **order)
        seen += more
        if state["sampler"]["epoch"] > epoch:
            break
        assert state["sampler"]["consumed"] == len(seen)
    assert (state["sampler"]["epoch"], state["sampler"]["consumed"]) == (epoch + 1, 0)
    if drop_last:
        assert seen == expected[: len(seen)]
        assert count - len(seen) < run["dp"] * (run["batch"] or 1)
    else:
        assert seen[:count] == expected
        assert seen[count:] == expected[: len(seen) - count]  # filled up, by less than a round
        assert len(seen) - count < most


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_same_global_batches_on_any_ranks(drop_last: bool) -> None:
    order = {"count": 53, "shuffle": True, "drop_last": drop_last, "epoch": 1}
    shapes = [(1, 1, 12), (2, 1, 6), (3, 2, 4), (4, 1, 3), (6, 1, 2)]
    wholes = [run_for(None, None, dp=dp, domain=d, batch=b, workers=0, **order)[1] for dp, d, b in shapes]
    for whole in wholes:
        assert whole[:48] == wholes[0][:48]
        assert len(whole) == 48 if drop_last else set(whole) == set(range(53))
    state, first = run_for(None, 2, dp=2, domain=1, batch=6, workers=0, **order)
    for dp, domain, batch in shapes:
        rest = run_for(state, None, dp=dp, domain=domain, batch=batch, workers=0, **order)[1]
        assert first + rest[:24] == wholes[0][:48]


# -- one loader ------------------------------------------------------------------------------------------------------


def shuffled(count: int = 11, **options: Any) -> DataLoader:
    ds = Numbers(count, fingerprint=options.pop("fingerprint", "numbers"))
    batch_size = options.pop("batch_size", 2)
    return DataLoader(ds, batch_size, sampler=DistributedSampler(ds, seed=5), **options)


def test_counts_what_the_loop_has_received_not_what_was_read_ahead() -> None:
    loader = shuffled(100, prefetch_factor=8)
    iterator = iter(loader)
    first = numbers(next(iterator))
    while len(loader.dataset.reads) < 10:
        pass
    assert loader.state_dict()["sampler"]["consumed"] == 2
    assert loader.sampler.state_dict()["consumed"] > 2  # the sampler's own: what it dealt
    again = shuffled(100)
    again.load_state_dict(loader.state_dict())
    iterator.close()
    assert first + [i for b in again for i in numbers(b)] == list(loader.sampler)


def test_the_next_epoch_is_whole() -> None:
    loader = shuffled()
    state = None
    for number, _ in enumerate(loader):
        if number == 2:
            state = loader.state_dict()
            break
    again = shuffled()
    again.load_state_dict(state)
    assert len(again) == 6
    assert len([i for b in again for i in numbers(b)]) == 5
    assert again.state_dict()["sampler"] | {"order": ""} == state["sampler"] | {"epoch": 1, "consumed": 0, "order": ""}
    assert sorted(i for b in again for i in numbers(b)) == list(range(11))
    again.set_epoch(1)
    third = shuffled()
    third.load_state_dict(again.state_dict())
    assert [numbers(b) for b in third] == [numbers(b) for b in again]


def test_at_the_last_batch_the_rest_is_empty_and_the_epoch_after_it_whole() -> None:
    loader, state = shuffled(), None
    for _ in loader:
        state = loader.state_dict()
    again = shuffled()
    again.load_state_dict(state)
    again.set_epoch(0)  # as a loop over epochs does
    assert list(again) == []
    assert len(list(again)) == 6


def test_another_epoch_forgets_the_place() -> None:
    loader = shuffled()
    next(iter(loader))
    state = loader.state_dict()
    loader.set_epoch(1)
    assert (loader.state_dict()["sampler"]["epoch"], loader.state_dict()["sampler"]["consumed"]) == (1, 0)
    again = shuffled()
    again.load_state_dict(state)
    again.set_epoch(4)
    assert len([i for b in again for i in numbers(b)]) == 11
    assert shuffled().state_dict()["sampler"]["consumed"] == 0


def test_a_loaded_state_is_saved_again_before_anything_is_read() -> None:
    loader = shuffled()
    next(iter(loader))
    again = shuffled()
    again.load_state_dict(loader.state_dict())
    assert again.state_dict() == loader.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", ["ours", "another"])
def test_before_the_first_batch_of_a_resumed_epoch_it_is_still_where_it_was(sampler: str, workers: int) -> None:
    """An iterator that has begun, and reads ahead, has handed out nothing."""

    def make() -> DataLoader:
        options: dict[str, Any] = {"num_workers": workers}
        return shuffled(**options) if sampler == "ours" else DataLoader(Numbers(20), 2, sampler=Evens(), **options)

    loader = make()
    expected = [numbers(batch) for batch in loader]
    next(iter(loader))
    state = through_json(loader.state_dict())
    again = make()
    again.load_state_dict(state)
    iterator = iter(again)
    assert again.state_dict() == state
    third = make()
    third.load_state_dict(through_json(again.state_dict()))
    assert [numbers(b) for b in third] == [numbers(b) for b in iterator] == expected[1:]


def test_an_error_does_not_count_as_the_end() -> None:
    loader = shuffled()
    iterator = iter(loader)
    next(iterator)
    loader.dataset.transform = lambda s: 1 / 0
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert (loader.state_dict()["sampler"]["epoch"], loader.state_dict()["sampler"]["consumed"]) == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "other"}, "another data set"),
        ({"version": 2}, "version 2, and this scidata knows up to 1"),
        ({"version": None}, "not one that"),
        ({"sampler": {"version": 9}}, "version 9"),
        ({"sampler": {"seed": 6}}, "another seed: seed was 6 and is 5"),
        ({"sampler": {"shuffle": False}}, "another shuffle"),
        ({"sampler": {"drop_last": True}}, "another drop_last"),
        ({"sampler": {"samples": 12}}, "another data set: samples was 12 and is 11"),
        ({"sampler": {"fingerprint": "x"}}, "another data set"),
        ({"sampler": {"order": "0"}}, "another order of epoch 0"),
        ({"sampler": {"consumed": -1}}, "consumed must be"),
        ({"sampler": {"epoch": True}}, "epoch must be"),
    ],
)
def test_other_states_are_refused(change: dict[str, Any], message: str) -> None:
    loader = shuffled()
    state = loader.state_dict()
    inner = change.get("sampler", {})
    state = state | change | {"sampler": state["sampler"] | inner}
    with pytest.raises(ConfigError, match=message):
        loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="not one that"):
        loader.load_state_dict({"epoch": 1})


WILD: list[Any] = [None, -1, 10**30, 2**63, 1.5, float("nan"), True, "x", [1], {"a": 1}, b"x", np.arange(2), object()]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": False}, {"sampler": DistributedSampler(range(11))}])
def test_wild_states_are_refused_or_begin(options: dict[str, Any]) -> None:
    """A state comes from a file, which may hold anything: what is wrong is named, and nothing else goes wrong."""
    make = lambda: DataLoader(Numbers(11), 2, **options)  # noqa: E731
    state = make().state_dict()
    wild = [value for value in WILD if not isinstance(value, dict)]
    changed: list[Any] = [*WILD, *(state | {name: value} for name in state for value in WILD)]
    changed += [state | {"sampler": state["sampler"] | {name: value}} for name in state["sampler"] for value in wild]
    for each in changed:
        with contextlib.suppress(ConfigError):
            loader = make()
            loader.load_state_dict(each)
            list(loader)


def test_other_weights_are_another_order() -> None:
    first, other = (DistributedSampler(range(9), weights=np.arange(9) ** p) for p in (1, 2))
    assert set(first) <= set(range(1, 9))
    with pytest.raises(ConfigError, match="weights"):
        other.load_state_dict(first.state_dict())


# -- other samplers --------------------------------------------------------------------------------------------------


class Evens:
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 20, 2))

    def __len__(self) -> int:
        return 10


SAMPLERS = {
    "none": lambda ds: {"batch_size": 3},
    "no batches": lambda ds: {"batch_size": None},
    "own": lambda ds: {"batch_size": 3, "sampler": Evens()},
    "batches": lambda ds: {"batch_sampler": [[1, 2], [3], [4, 5, 6], [7, 8]]},
    "torch's batches": lambda ds: {"batch_sampler": BatchSampler(Evens(), 4, True)},
    "torch's shuffle": lambda ds: {"batch_size": 3, "shuffle": True},
    "torch's distributed": lambda ds: {
        "batch_size": 3,
        "sampler": torch.utils.data.DistributedSampler(ds, num_replicas=2, rank=1),
    },
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_any_sampler_resumes(kind: str, workers: int) -> None:
    def make() -> DataLoader:
        ds = Numbers(20)
        return DataLoader(ds, num_workers=workers, **SAMPLERS[kind](ds))

    torch.manual_seed(2)
    loader = make()
    batches, states = [], []
    for batch in loader:
        batches.append(numbers(batch))
        states.append(through_json(loader.state_dict()))
    for number in range(len(batches)):
        again = make()
        again.load_state_dict(states[number])
        assert [numbers(b) for b in again] == batches[number + 1 :]
        assert len(list(again)) == len(again) == len(batches)
    done = make()
    done.load_state_dict(loader.state_dict())
    assert len(list(done)) == len(batches)


def test_torchs_shuffle_is_still_torchs() -> None:
    torch.manual_seed(4)
    ours = [numbers(b) for b in DataLoader(Numbers(9), 2, shuffle=True)]
    torch.manual_seed(4)
    assert [i for batch in ours for i in batch] == list(torch.utils.data.RandomSampler(range(9)))


def test_a_sampler_that_changed_its_mind_is_found_out() -> None:
    loader = DataLoader(Numbers(9), 2, sampler=[3, 1, 4, 1, 5])
    next(iter(loader))
    changed = DataLoader(Numbers(9), 2, sampler=[3, 2, 4, 1, 5])
    changed.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="list does not begin with the 2 samples"):
        iter(changed)
    batches = DataLoader(Numbers(9), batch_sampler=[[3, 1, 4], [1, 5]])
    batches.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="same sampler and batches"):
        iter(batches)
    with pytest.raises(ConfigError, match="not one that"):
        shuffled(9).load_state_dict(loader.state_dict())


# -- torch and torchdata ---------------------------------------------------------------------------------------------


def test_distributed_checkpoint(tmp_path) -> None:
    loader = shuffled()
    iterator = iter(loader)
    had = numbers(next(iterator)) + numbers(next(iterator))
    dcp.save({"loader": loader}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    iterator.close()
    again = shuffled(batch_size=3)
    dcp.load({"loader": again}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    assert had + [i for b in again for i in numbers(b)] == list(loader.sampler)
    plain = DataLoader(Numbers(11), 2, shuffle=True)
    next(iter(plain))
    dcp.save({"loader": plain}, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    other = DataLoader(Numbers(11), 2, shuffle=True)
    dcp.load({"loader": other}, checkpoint_id=str(tmp_path / "d"), no_dist=True)
    assert len(list(other)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_resumes_the_sampler(workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        sampler = DistributedSampler(range(23), seed=5)
        options = {"multiprocessing_context": "fork"} if workers else {}  # spawning takes seconds a worker
        return torchdata.StatefulDataLoader(range(23), batch_size=2, sampler=sampler, num_workers=workers, **options)

    loader = make()
    batches, states = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    assert sorted(i for b in batches for i in b) == list(range(23))
    for number in (0, 4, 10, 11):
        again = make()
        again.load_state_dict(states[number])
        assert [b.tolist() for b in again] == batches[number + 1 :]
        assert [b.tolist() for b in again] == batches
