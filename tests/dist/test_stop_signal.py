"""A signal to one rank, or to all: loops end after the same step on every rank."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import scidata
from scidata.device_mesh import stop_signal
from scidata.errors import ConfigError, RankFailedError
from scidata.testing import RankError, run_ranks
from tests.ports import free_port

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


def _on_one_rank(rank, num_ranks):
    stop_signal._PATIENCE = 0.5
    scidata.init_mesh(dp=num_ranks)
    if rank == 0:
        stop = scidata.StopSignal()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(ConfigError, match="asked to stop, but rank 1 has no StopSignal: make one on each rank"):
            while not stop.reached():
                time.sleep(0.01)
    dist.barrier()


def test_made_on_one_rank():
    run_ranks(_on_one_rank, 2)


def _before_the_mesh(rank, num_ranks, port):
    """It would stop one rank alone."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    stop = scidata.StopSignal()
    scidata.init_mesh(dp=num_ranks)
    with pytest.raises(ConfigError, match="make it after init_mesh"):
        stop.reached()


def test_made_before_the_mesh():
    run_ranks(_before_the_mesh, 2, str(free_port()), backend=None)


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["SIGTERM", signal.SIGKILL, 0, 1000, 1.5, None, [signal.SIGUSR1]])
def test_what_is_no_signal_leaves_handlers(number):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ConfigError, match="give signals such as"):
        scidata.StopSignal(signal.SIGUSR1, number)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_another_thread_makes_none():
    found = []

    def make():
        with pytest.raises(ConfigError, match="in the main thread"):
            scidata.StopSignal()
        found.append(True)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert found


def test_handlers_around_it():
    """A StopSignal around another one hears its signals, too; a handler of the user's is back at the end."""
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with pytest.raises(KeyError), scidata.StopSignal() as outer:
            with scidata.StopSignal(signal.SIGUSR1, signal.SIGUSR1) as inner:
                signal.raise_signal(signal.SIGUSR1)
                assert inner.reached()
            assert outer.reached()
            raise KeyError
        assert not came
        signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_forks_end_by_sigterm():
    """As multiprocessing's ``terminate()`` ends them; what SLURM sends to all processes leaves them alone."""
    with scidata.StopSignal():
        fork = multiprocessing.get_context("fork")
        begun = fork.Event()
        process = fork.Process(target=_waits, args=(begun,))
        process.start()
        assert begun.wait(10)  # Python forgets signals that come before
        os.kill(process.pid, signal.SIGUSR1)
        process.terminate()
        process.join(10)
        assert process.exitcode == -signal.SIGTERM


def _waits(begun):
    begun.set()
    time.sleep(20)
