"""Killed anywhere and resumed on other ranks: orders by weight, by size, mixed, joined and cut; worker processes."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

import scidata
from scidata.errors import ConfigError
from scidata.loader.data_loader import DataLoader
from scidata.loader.sampler import DistributedSampler
from scidata.testing.ranks import fork_server
from tests.unit.loader._orders import Readable
from tests.unit.loader._resume import numbers, place, run_all, through_json

EPOCH = 1


def make(kind: str, mesh: Any, *, drop_last: bool = False) -> tuple[Any, DistributedSampler]:
    """Return a data set and a sampler of some kind; without a mesh they are the oracle's."""
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "check": False, "drop_last": drop_last}
    parts = [Readable(count, mesh, fingerprint=str(count)) for count in (11, 7, 16)]
    if kind.startswith("blocks"):
        options |= {"shuffle": "blocks", "window": 4}
        kind = kind.removeprefix("blocks of ")
    if kind == "blocks":
        return parts[2], DistributedSampler(parts[2], mesh, **options)
    if kind == "weights":
        return parts[2], DistributedSampler(parts[2], mesh, weights=np.arange(16) % 5, num_samples=29, **options)
    if kind == "sizes":
        return parts[2], DistributedSampler(parts[2], mesh, sizes=(np.arange(16) * 7) % 16, group=6, **options)
    combined = {
        "mix": lambda: scidata.mix(parts, [3, 1, 2]),
        "long mix": lambda: scidata.mix(parts[:2], [1, 4], num_samples=31),
        "concat": lambda: scidata.concat(*parts),
        "subset": lambda: scidata.subset(scidata.concat(*parts), list(range(30, 3, -2))),
        "in order": lambda: scidata.concat(*parts[:2]),
    }[kind]()
    if kind == "in order":
        options["shuffle"] = False
    return combined, DistributedSampler(combined, mesh, **options)


def within(ds: Any, index: int) -> int:
    """Return a sample's number in the data set that it is of in the end."""
    while hasattr(ds, "locate"):
        part, index = ds.locate(index)
        ds = ds.datasets[part]
    return index


KINDS = ["weights", "sizes", "mix", "long mix", "concat", "subset", "in order", "blocks"]
KINDS += [f"blocks of {kind}" for kind in ("weights", "long mix", "concat", "subset")]


def order_of(kind: str) -> list[int]:
    _, sampler = make(kind, None)
    sampler.set_epoch(EPOCH)
    return sampler.order().tolist()


def run(
    kind: str,
    state: Any,
    batches: int | None,
    *,
    dp: int,
    domain: int,
    batch: int | None,
    workers: int,
    drop_last: bool,
) -> tuple[Any, list[int]]:
    """Run a data set of some kind; see :func:`run_all`."""

    def loader_of(mesh: Any) -> DataLoader:
        ds, sampler = make(kind, mesh, drop_last=drop_last)
        return DataLoader(ds, batch, sampler=sampler, num_workers=workers, watch=False)

    def rows_of(loader: DataLoader, sample: Any) -> list[int]:
        index = sample.index if batch is not None else [sample.index]
        assert [within(loader.dataset, i) for i in index] == numbers(sample)
        return index

    return run_all(loader_of, state, batches, dp=dp, domain=domain, epoch=EPOCH, rows_of=rows_of)


RUN = st.fixed_dictionaries(
    {
        "dp": st.integers(1, 4),
        "domain": st.integers(1, 2),
        "batch": st.none() | st.integers(1, 4),
        "workers": st.sampled_from([0, 0, 0, 0, 0, 0, 0, 2]),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    runs=st.lists(st.tuples(RUN, st.integers(1, 5)), min_size=1, max_size=3),
    last=RUN,
    drop_last=st.booleans(),
)
def test_killed_anywhere(kind: str, runs: list[Any], last: Any, drop_last: bool) -> None:
    expected, state, seen = order_of(kind), None, []
    widest = 1
    for shape, batches in [*runs, (last, None)]:
        widest = max(widest, shape["dp"])
        state, more = run(kind, state, batches, **shape, drop_last=drop_last)
        seen += more
        if state["sampler"]["epoch"] > EPOCH:
            break
        assert state["sampler"]["consumed"] == len(seen)
    whole = len(expected)
    if drop_last:
        assert seen == expected[: len(seen)]
        assert whole - len(seen) < widest
    else:
        assert seen[:whole] == expected
        assert seen[whole:] == expected[: len(seen) - whole]
        assert len(seen) - whole < widest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["plain", "drop_last", "batch_sampler", "no batch", "sampler drops"])
def test_lengths_are_equal_on_all_ranks_and_true(kind: str, how: str) -> None:
    for dp, domain in [(1, 1), (2, 2), (3, 1), (5, 1)]:
        lengths = set()
        for rank in range(dp * domain):
            ds, sampler = make(kind, place(rank, dp, domain), drop_last=how == "sampler drops")
            options: dict[str, Any] = {
                "plain": {"batch_size": 3, "sampler": sampler},
                "drop_last": {"batch_size": 3, "sampler": sampler, "drop_last": True},
                "batch_sampler": {"batch_sampler": BatchSampler(sampler, 4, False)},
                "no batch": {"batch_size": None, "sampler": sampler},
                "sampler drops": {"batch_size": 2, "sampler": sampler},
            }[how]
            loader = DataLoader(ds, num_workers=0, watch=False, **options)
            lengths.add(len(loader))
            assert len(list(loader)) == len(loader)
        assert len(lengths) == 1


def test_worker_processes_resume(tmp_path: Path) -> None:
    """Persistent ones, other numbers of them, left in the middle; nothing read ahead is lost."""
    data = np.arange(24, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    zarr.open_group(str(tmp_path / "t.zarr"), mode="w").create_array(
        "t", data=data, chunks=(1, 3), dimension_names=["time", "lat"], fill_value=-1
    )
    parts = [
        scidata.open_dataset(str(tmp_path / "t.zarr"), isel={"time": rows}) for rows in (slice(0, 15), slice(15, 24))
    ]
    ds = scidata.mix(parts, [2, 1])

    def loader(batch: int, **options: Any) -> DataLoader:
        return DataLoader(ds, batch, sampler=DistributedSampler(ds, seed=4), **options)

    def rows(batches: Any) -> list[int]:
        return [int(value) for batch in batches for value in batch["t"][:, 0]]

    processes = {"workers": "process", "persistent_workers": True, "prefetch_factor": 3}
    processes |= {"multiprocessing_context": fork_server()}
    whole = rows(loader(1, num_workers=0))
    first = loader(2, num_workers=1, **processes)
    iterator = iter(first)
    seen = rows([next(iterator), next(iterator), next(iterator)])
    state = through_json(first.state_dict())
    iterator.close()
    second = loader(4, num_workers=2, **processes)
    second.load_state_dict(state)
    iterator = iter(second)
    seen += rows([next(iterator)])
    state = through_json(second.state_dict())
    iterator.close()
    first.load_state_dict(state)  # in the processes that have lived on
    seen += rows(first)
    assert seen == whole
    first.set_epoch(1)
    plain = loader(2, num_workers=0)
    plain.set_epoch(1)
    assert rows(first) == rows(plain)
    del first, second, iterator
    gc.collect()


@pytest.mark.parametrize(("dp", "window"), [(1, 8), (2, 8), (3, 9), (5, 10), (8, 8), (12, 12)])
def test_the_default_window_has_each_block_read_by_one_rank(dp: int, window: int) -> None:
    ds = Readable(600, None)
    ranks = [DistributedSampler(ds, place(r, dp, 1), shuffle="blocks", check=False) for r in range(dp)]
    assert {(each.window, each.ranks_per_block, each.blocks_at_once) for each in ranks} == {(window, 1, window // dp)}
    of_ranks = [{index // 3 for index in itertools.islice(each, 500 // dp)} for each in ranks]
    assert len(set.union(*of_ranks)) == sum(map(len, of_ranks))
    shared = DistributedSampler(ds, place(0, dp, 1), shuffle="blocks", window=2 * window + 1, check=False)
    assert (shared.ranks_per_block, shared.blocks_at_once) == (dp, 2 * window + 1)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_resumed_run_keeps_the_window_that_it_began_with(dp: int) -> None:
    ds = Readable(600, None)
    began = DistributedSampler(ds, place(0, 3, 1), shuffle="blocks", check=False)
    began.set_epoch(EPOCH)
    state, expected = through_json(began.state_dict(consumed=36)), began.order()[36:].tolist()
    ranks = [DistributedSampler(ds, place(r, dp, 1), shuffle="blocks", check=False) for r in range(dp)]
    for each in ranks:
        each.load_state_dict(state)
        assert each.window == 9
    assert [index for step in zip(*ranks, strict=True) for index in step] == expected
    began.set_epoch(EPOCH + 1)
    ranks[0].set_epoch(EPOCH + 1)
    assert ranks[0].order()[:600].tolist() == began.order().tolist()
    assert ranks[0].state_dict()["order"] == began.state_dict()["order"]
    given = DistributedSampler(ds, place(0, dp, 1), shuffle="blocks", window=8, check=False)
    with pytest.raises(ConfigError, match="shuffle was 'blocks, 9 at a time' and is 'blocks, 8 at a time'"):
        given.load_state_dict(state)
