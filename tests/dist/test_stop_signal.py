"""A signal to one rank, or to all: loops end after the same step on every rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import scidata
from scidata.errors import RankFailedError
from scidata.testing import RankError, run_ranks

NUM_STEPS = 40


def _train(rank, num_ranks, to, kind, meets):
    """Return the step that the loop ends after, and whether the signal's handler is the old one again."""
    scidata.init_mesh(dp=num_ranks)
    before, last = signal.getsignal(kind), None
    with scidata.StopSignal() as stop:
        for step in range(1, NUM_STEPS + 1):
            if step == 3 and rank in to:
                os.kill(os.getpid(), kind)
            time.sleep(0.01 * (1 + rank))
            if meets:  # else the ranks are apart
                dist.all_reduce(torch.ones(1))
            if stop.reached():
                last = step
                break
    return last, signal.getsignal(kind) == before


@pytest.mark.parametrize("meets", [True, False], ids=["in step", "apart"])
@pytest.mark.parametrize(("to", "kind"), [((0,), signal.SIGUSR1), ((1,), signal.SIGTERM), ((0, 1), signal.SIGUSR1)])
def test_ranks_stop_after_the_same_step(to, kind, meets):
    found = run_ranks(_train, 2, to, kind, meets)
    assert len({last for last, _ in found}) == 1
    assert found[0][0] is not None
    assert 3 <= found[0][0] < NUM_STEPS
    assert all(restored for _, restored in found)


def test_no_signal_and_no_stop():
    assert run_ranks(_train, 2, (), signal.SIGUSR1, True) == [(None, True)] * 2


def _late(rank, num_ranks):
    """A signal in the last step, which a rank that has done it all does not hear of in time."""
    scidata.init_mesh(dp=num_ranks)
    with scidata.StopSignal() as stop:
        if rank == 0:
            return [stop.reached() for _ in range(3)]
        stop.reached()
        stop.reached()
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGUSR1)
        return [stop.reached()]


def test_a_signal_in_the_last_step():
    assert run_ranks(_late, 2) == [[False] * 3, [False]]


def _dies(rank, num_ranks):
    scidata.init_mesh(dp=num_ranks)
    stop = scidata.StopSignal()
    if rank == 1:
        raise ValueError("a fault of rank 1")
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not stop.reached():
        time.sleep(0.01)


def test_a_rank_that_has_failed_is_named():
    with pytest.raises((RankError, RankFailedError), match="a fault of rank 1"):
        run_ranks(_dies, 2)
