"""What torch does, without scidata, where a process ends while a thread of gloo still has a tensor: SIGABRT.

    python -m tests.faults.torch_alone --times 20

Two ranks begin an all-reduce in the background, of a tensor that they do not keep, and raise, as a training step does
that fails between its gradients. The thread of gloo's lets go of the last reference to the tensor when the collective
has ended. That has a Python object, so the thread waits for the GIL (``ConcretePyInterpreterVTable::decref``). Where
the interpreter begins to end before the thread has got it, Python answers with ``pthread_exit``, whose unwinding meets
a destructor that may not throw: "terminate called without an active exception". The backtrace of a core (torch 2.13.0,
Python 3.11)::

    std::terminate() < __gxx_personality_v0 < _Unwind_ForcedUnwind < pthread_exit < PyThread_exit_thread < take_gil
    < pybind11::gil_scoped_acquire < ConcretePyInterpreterVTable::decref < c10::TensorImpl::decref_pyobject
    < c10d::ProcessGroupGloo::AsyncWork::~AsyncWork < c10d::ProcessGroupGloo::runLoop

As it is, that is a race of milliseconds: 7 of 104 ranks, on a busy machine (and 1 of 104 where ``dist.all_reduce(x)``
was waited for: the thread lets go a moment after it has woken who waits). ``--wide`` has rank 0 compute for a second
without letting the GIL go, as the very last thing before the interpreter ends, and rank 1 come to the collective then:
all runs abort. ``--scidata`` begins the group with
``scidata.init_mesh`` instead, which has nothing under way when the interpreter ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter

from tests.ports import free_port

SCRIPT = """
import atexit, os, pathlib, time
from tests.ports import free_port
ending = pathlib.Path({ending!r})
if {wide} and os.environ["RANK"] == "0":
    atexit.register(sum, range(5 * 10**7))  # registered first, so called last
    atexit.register(ending.touch)
import torch, torch.distributed as dist
if {scidata}:
    import scidata
    scidata.init_mesh(domain=2, device="cpu")
else:
    dist.init_process_group("gloo")
dist.barrier()
while {wide} and dist.get_rank() == 1 and not ending.exists():
    time.sleep(0.001)
def step():
    return dist.all_reduce(torch.ones(3), async_op=True)
step()
raise ValueError("the model is wrong")
"""


def main() -> None:
    """Count how ranks end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--scidata", action="store_true")
    options = parser.parse_args()
    ends: Counter[tuple[int, int, str]] = Counter()
    for _ in range(options.times):
        for rank, (code, error) in enumerate(two_ranks(wide=options.wide, scidata=options.scidata)):
            ends[rank, code, error.strip().rpartition("\n")[2]] += 1
    for (rank, code, last), count in sorted(ends.items()):
        print(f"rank {rank}: {count:4} of {options.times} ended with code {code}: {last}")


def two_ranks(*, wide: bool = False, scidata: bool = False) -> list[tuple[int, str]]:
    """Run the script on two ranks; return how each has ended, and what it has said."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(SCRIPT.format(ending=f"{folder}/ending", wide=wide, scidata=scidata))


def _run(script: str) -> list[tuple[int, str]]:
    port = str(free_port())
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [(rank.communicate(timeout=120)[1], rank.returncode)[::-1] for rank in ranks]


if __name__ == "__main__":
    main()
