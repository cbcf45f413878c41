"""Ranks that read together: one that fails, reads something else, is slow or dies, and what the others make of it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import scidata
from scidata.core.types import BufferSpec
from scidata.data.sample import Sample
from scidata.errors import ConfigError, CorruptDataError, RankFailedError, ReadTimeoutError
from scidata.testing import RankError, run_ranks
from tests.dist._scripts import run_script

N = 40


class Numbers:
    """Sample i is the number i; reading may fail, or take its time, on one rank."""

    transform = None
    fingerprint = "numbers"

    def __init__(self, mesh: Any, *, bad: Mapping[int, set[int]] | None = None, slow: Mapping[int, Any] | None = None):
        self.mesh, self.dp_axis = mesh, "dp"
        self.rank = dist.get_rank()
        self.bad, self.slow = (bad or {}).get(self.rank, set()), (slow or {}).get(self.rank, {})

    def __len__(self) -> int:
        return N

    def __repr__(self) -> str:
        return f"Numbers({self.fingerprint})"

    def buffer_specs(self) -> dict[str, BufferSpec]:
        return {"x": BufferSpec(shape=(1,), dtype=np.dtype(np.int64))}

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> None:
        time.sleep(self.slow.get(index, 0))
        if index in self.bad:
            raise CorruptDataError(f"chunk {index} of x is damaged")
        out["x"][0] = index

    def assemble(self, local: Mapping[str, torch.Tensor], *, index: int | list[int], batched: bool) -> Sample:
        return Sample(local, dims={"x": ("batch",) * batched + ("i",)}, index=index)


def steps(loader: scidata.DataLoader, had: list[int], pause: float = 0.0) -> None:
    """Train: a collective in each step, as DDP has."""
    for batch in loader:
        total = batch["x"].sum()
        dist.all_reduce(total)
        had.append(int(batch["x"].sum()))
        time.sleep(pause)


def watchers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "scidata-watch"]


# -- a read fails ----------------------------------------------------------------------------------------------------


def one_fails(rank: int, num_ranks: int, dp: int) -> None:
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp)
    sample = 11  # the last rank reads it; others hear of it while they are some steps before it
    loader = scidata.DataLoader(Numbers(mesh, bad={num_ranks - 1: {sample}}), 1, num_workers=2, prefetch_factor=4)
    had: list[int] = []
    with pytest.raises((CorruptDataError, RankFailedError)) as caught:
        steps(loader, had, pause=0.25)
    step = sample // dp
    assert len(had) == step  # all at the same one, though no collective told them
    message = str(caught.value)
    if rank == num_ranks - 1:
        assert caught.type is CorruptDataError
    else:
        assert caught.type is RankFailedError
        assert caught.value.rank == num_ranks - 1
        assert f"rank {num_ranks - 1} failed in step {step}: scidata.errors.CorruptDataError: chunk" in message
        assert "while reading sample" in message
    dist.barrier()  # the group is as it was
    assert watchers() == []
    # and what went wrong is over
    loader.dataset.bad = set()
    had = []
    steps(loader, had)
    assert len(had) == -(-N // dp)
    assert watchers() == []


@pytest.mark.parametrize(("num_ranks", "dp"), [(2, 1), (4, 2), (3, 3)])
def test_a_read_that_fails_ends_all_ranks_at_the_same_step(num_ranks: int, dp: int) -> None:
    run_ranks(one_fails, num_ranks, dp)


def waits_in_next(rank: int, num_ranks: int) -> float:
    mesh = scidata.init_mesh(domain=num_ranks)
    ds = Numbers(mesh, bad={1: {3}}, slow={0: {3: 20.0}})
    loader = scidata.DataLoader(ds, 1, num_workers=1)
    began = time.monotonic()
    with pytest.raises((CorruptDataError, RankFailedError), match="chunk 3"):
        steps(loader, [])
    return time.monotonic() - began


def test_a_rank_that_waits_for_its_own_data_hears_of_it() -> None:
    assert max(run_ranks(waits_in_next, 2)) < 15


def ahead_of_the_end(rank: int, num_ranks: int) -> None:
    """A bad sample that was read ahead, and then not wanted, harms nobody."""
    mesh = scidata.init_mesh(domain=num_ranks)
    loader = scidata.DataLoader(Numbers(mesh, bad={1: {2}}), 1, num_workers=2, prefetch_factor=4)
    for _ in range(3):
        for step, _batch in enumerate(loader):
            time.sleep(0.4)
            if step == 1:
                break
        dist.barrier()


def test_an_error_that_nobody_comes_to() -> None:
    run_ranks(ahead_of_the_end, 2)


def transform_fails(rank: int, num_ranks: int) -> None:
    mesh = scidata.init_mesh(domain=num_ranks)
    ds = Numbers(mesh)
    if rank == 0:
        ds.transform = lambda sample: sample if sample.index < 4 else 1 / 0
    with pytest.raises((ZeroDivisionError, RankFailedError)) as caught:
        for _ in scidata.DataLoader(ds, batch_size=None):
            time.sleep(0.3 if rank else 0.1)
    assert rank == 0 or "rank 0 failed in step 4: ZeroDivisionError" in str(caught.value)


def test_an_error_of_a_transform_reaches_the_others() -> None:
    run_ranks(transform_fails, 2)


# -- bad samples are left out ----------------------------------------------------------------------------------------


def skips(rank: int, num_ranks: int, dp: int, batch_size: int | None, bad: dict[int, set[int]], workers: int) -> Any:
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp)
    loader = scidata.DataLoader(Numbers(mesh, bad=bad), batch_size, num_workers=workers, on_error="skip")
    rows = []
    for batch in loader:
        assert batch["x"].reshape(-1).tolist() == (batch.index if batch_size else [batch.index])
        dist.all_reduce(torch.zeros(1))
        rows.append(batch.index)
    place = loader.state_dict()["sampler"]
    assert place.get("consumed", place.get("received")) == 0  # the end, in spite of what is missing
    return rows, loader.stats()["skipped"]


@pytest.mark.parametrize("workers", [0, 2])
def test_skipping_is_the_same_on_all_ranks(workers: int) -> None:
    results = run_ranks(skips, 4, 2, 4, {1: {5, 8}, 2: {9}}, workers)
    assert results[0] == results[1]
    assert results[2] == results[3]
    # a step has 8 samples in a row, of which each dp rank takes every second; 8 is even, 5 and 9 odd
    assert results[0][0] == [[i for i in range(first, first + 8, 2) if i != 8] for first in range(0, N, 8)]
    assert results[2][0] == [[i for i in range(first + 1, first + 9, 2) if i != 9] for first in range(0, N, 8)]
    assert [skipped for _, skipped in results] == [1, 1, 1, 1]  # rank 1 never reads sample 5


@pytest.mark.parametrize("batch_size", [None, 1])
def test_an_empty_step_is_left_out_by_all(batch_size: int | None) -> None:
    results = run_ranks(skips, 3, 3, batch_size, {1: {7, 13}}, 2)
    for rank, (rows, skipped) in enumerate(results):
        expected = [
            i for i in [*range(rank, N, 3), *([] if rank == 0 else [rank - 1])] if i // 3 not in (2, 4) or i < 3
        ]
        assert [row if batch_size is None else row[0] for row in rows] == expected
        assert skipped == 2


# -- ranks disagree --------------------------------------------------------------------------------------------------


def disagrees(rank: int, num_ranks: int, how: str) -> str:
    mesh = scidata.init_mesh(domain=num_ranks)
    ds = Numbers(mesh)
    order = list(range(N))
    if how == "sample" and rank == 2:
        order[3] = 33
    if how == "data set" and rank == 2:
        ds.fingerprint = "others"
    with pytest.raises(ConfigError) as caught:
        for _ in scidata.DataLoader(ds, 1, sampler=order):
            time.sleep(0.2)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("how", ["sample", "data set"])
def test_ranks_that_read_something_else_are_found_out(how: str) -> None:
    messages = run_ranks(disagrees, 3, how)
    for message in messages:
        assert "ranks 0 and 2, which share their samples, read different ones" in message
        assert ("Numbers(others) (others)" in message) == (how == "data set")


def agree(rank: int, num_ranks: int) -> None:
    """Ranks of other dp places read other samples, and one rank may be far ahead."""
    mesh = scidata.init_mesh(dp=2, domain=2)
    loader = scidata.DataLoader(Numbers(mesh), 2, shuffle=True)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for step, _ in enumerate(loader):
            time.sleep(0.1 if rank == 3 and step < 5 else 0)
        dist.barrier()
    assert watchers() == []


def test_ranks_that_agree_are_left_alone() -> None:
    run_ranks(agree, 4)


# -- slow ranks ------------------------------------------------------------------------------------------------------


def is_slow(rank: int, num_ranks: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("scidata").addHandler(handler)
    mesh = scidata.init_mesh(domain=num_ranks)
    loader = scidata.DataLoader(Numbers(mesh, slow={1: {5: 8.0}}), 1, num_workers=1, timeout=2)
    had: list[int] = []
    with pytest.raises((ReadTimeoutError, RankFailedError), match=r"sample \[5\] \(step 5\).*timeout=2"):
        for batch in loader:
            had += batch.index
            time.sleep(0.3)
            while rank == 0 and len(had) == 5 and not lines:  # as in a collective
                time.sleep(0.05)
    return lines


def test_a_slow_rank_is_named_then_timed_out() -> None:
    lines = run_ranks(is_slow, 2)
    for rank in (0, 1):
        assert any("rank 1 has waited 1 s for sample [5] (step 5)" in line for line in lines[rank])


# -- ranks that die --------------------------------------------------------------------------------------------------


def dies(rank: int, num_ranks: int, victim: int) -> None:
    mesh = scidata.init_mesh(domain=num_ranks)
    with pytest.raises(
        RankFailedError, match=rf"rank {victim} \(process \d+ on .*\) has died, without a word"
    ) as caught:
        for step, _ in enumerate(scidata.DataLoader(Numbers(mesh), 1)):
            time.sleep(0.2)
            if rank == victim and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
    assert caught.value.rank == victim


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_others(victim: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(dies, 3, victim)
    assert list(caught.value.failures) == [victim]  # the others have passed their checks
    assert "exit code -9" in caught.value.failures[victim]


SCRIPT = """
import importlib.util, os, signal, time, scidata, torch, torch.distributed as dist
spec = importlib.util.spec_from_file_location("test_watch", {file!r})
tests = importlib.util.module_from_spec(spec); spec.loader.exec_module(tests)
mesh = scidata.init_mesh(domain=2)
victim, how, in_a_collective = {victim}, {how!r}, {in_a_collective}
for step, batch in enumerate(scidata.DataLoader(tests.Numbers(mesh), 1)):
    time.sleep(0.2)
    if step == 0:
        dist.barrier()  # or the one may be over before the other has started
    if step == 3 and dist.get_rank() == victim:
        time.sleep(0.5)
        if how == "error":
            raise ValueError("the model is wrong")
        os.kill(os.getpid(), signal.SIGKILL)
    if in_a_collective:
        dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow_for("error-1-False", "kill-0-False", "kill-1-True", "kill-0-True")
@pytest.mark.parametrize("in_a_collective", [False, True])
@pytest.mark.parametrize(("how", "victim"), [("error", 1), ("kill", 0), ("kill", 1)])
def test_scripts_hear_of_each_other(tmp_path: Path, how: str, victim: int, in_a_collective: bool) -> None:
    """Started by hand, as by srun, where no launcher ends the others; rank 0 keeps the store, and is killed with it."""
    script = SCRIPT.format(how=how, victim=victim, in_a_collective=in_a_collective, file=__file__)
    outputs = [said for _, said, _ in run_script(tmp_path, script, 2)]
    victims, other = outputs[victim], outputs[1 - victim]
    if how == "error":
        assert ": ValueError: the model is wrong" in victims  # torch has put "[rank1]: " before
        reason = "rank 1 failed in step 3: ValueError: the model is wrong"
    else:
        assert victims == ""
        reason = f"rank {victim}" if victim == 0 else "rank 1 (process"  # with rank 0 the store may be gone
    if in_a_collective:  # torch may be faster in saying that the other is gone; then the reason comes after it
        assert reason in other
    else:
        assert "RankFailedError: " in other
        assert reason in other.split("RankFailedError: ")[1]


FINISHED_FIRST = """
import importlib.util, time, scidata, torch.distributed as dist
spec = importlib.util.spec_from_file_location("test_watch", {file!r})
tests = importlib.util.module_from_spec(spec); spec.loader.exec_module(tests)
mesh = scidata.init_mesh(domain=2)
for batch in scidata.DataLoader(tests.Numbers(mesh), 1):
    time.sleep(0.05 * dist.get_rank())
dist.destroy_process_group()
"""


def test_a_script_that_destroys_its_groups_and_is_through_first(tmp_path: Path) -> None:
    """Rank 0 keeps the store, and ends while rank 1 is in its loop, two seconds long: nothing has failed."""
    ranks = run_script(tmp_path, FINISHED_FIRST.format(file=__file__), 2)
    assert [(code, said) for code, said, _ in ranks] == [(0, ""), (0, "")]
