"""What torch's own means do for ranks that wait in a collective for one that meets a fault, beside scidata's watch.

    python -m tests.faults.torch_watches [--limit 25]

Three ranks all-reduce in a loop, each step behind one of torch's means:

gloo
    nothing; the group's timeout is ``--limit`` (torch's default: 30 minutes).
monitored_barrier
    ``dist.monitored_barrier(timeout=3 s)`` in each step.
store
    each rank sets a key of the step in the group's TCPStore, and waits for those of the others with a timeout of 3 s.
torchrun
    nothing in the step; the ranks are torchrun's.
scidata
    the steps are those of a loader with ``timeout=3``.

Rank 1 raises, raises and takes 5 s to end (as one does that saves a checkpoint), is killed, or is stopped. Printed:
how long after the fault each of the others had said so (or had ended, without a word), the last line of its error, and
what a step without a fault takes. Of scidata, ``rank_faults.py`` tries many more.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.rank_faults import write_data
from tests.ports import free_port

VICTIM, RANKS = 1, 3
WAYS = ("gloo", "monitored_barrier", "store", "torchrun", "scidata")
FAULTS = ("raise", "raise, end late", "kill", "stop")
SCRIPT = """
import datetime, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
fault, way, folder, limit = sys.argv[1:]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(limit)))
rank, num_ranks = dist.get_rank(), dist.get_world_size()
store, patience = dist.distributed_c10d._get_default_store(), datetime.timedelta(seconds=3)
pathlib.Path(folder, f"pid{rank}").write_text(str(os.getpid()))

def step(number):
    if way == "monitored_barrier":
        dist.monitored_barrier(timeout=patience)
    elif way == "store":
        store.set(f"{number}/{rank}", "")
        store.wait([f"{number}/{other}" for other in range(num_ranks)], patience)
    dist.all_reduce(torch.ones(3))

def fail():
    time.sleep(0.5)  # the others are in the step
    pathlib.Path(folder, "fault").write_text(str(time.time()))
    if fault == "raise":
        raise ValueError("the model is wrong")
    if fault == "raise, end late":
        try:
            raise ValueError("the model is wrong")
        finally:
            time.sleep(5)
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

numbers = range(10**9)
if way == "scidata":
    import scidata
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = scidata.open_dataset(folder + "/grid.zarr", mesh, shard={"lat": "domain"}, sample_dim="time")
    numbers = scidata.DataLoader(ds, batch_size=None, num_workers=1, timeout=3)
for number, _ in enumerate(numbers):
    if number == 20:
        dist.barrier()
        began = time.perf_counter()
    if number == 220 and rank == 0:
        pathlib.Path(folder, "cost").write_text(str((time.perf_counter() - began) / 200))
    if number == 220 and rank == 1:
        fail()
    step(number)
"""


def run(way: str, fault: str, limit: float) -> tuple[list[tuple[float, str]], float]:
    """Return what each of the others has said and how long after the fault, and the seconds of a step before it."""
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder, "grid.zarr"), num_times=240)
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        arguments = [str(script), fault, way, folder, str(limit)]
        common = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if way == "torchrun":
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            launch += ["--redirects", "2", "--log-dir", f"{folder}/logs"]
            launched = [subprocess.Popen([sys.executable, *launch, *arguments], env=common, stderr=subprocess.DEVNULL)]
        else:
            launched = _ranks(arguments, common, folder)
        others, ended = [number for number in range(RANKS) if number != VICTIM], dict[int, float]()
        while len(ended) < len(others) and not 0 < _number(folder, "fault") < time.time() - limit - 10:
            time.sleep(0.02)
            for process in launched:
                process.poll()
            for number in others:
                if number not in ended and _number(folder, "fault") and not _runs(_number(folder, f"pid{number}")):
                    ended[number] = time.time()
        _kill(folder, launched)
        said = [_last_words(folder, way, number) for number in others]
        fault_at = _number(folder, "fault")
        times = [at or ended.get(number, float("inf")) for number, (at, _) in zip(others, said, strict=True)]
        return [(at - fault_at, words) for at, (_, words) in zip(times, said, strict=True)], _number(folder, "cost")


def _ranks(arguments: list[str], common: dict[str, str], folder: str) -> list[subprocess.Popen[bytes]]:
    port = str(free_port())
    common = common | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    started = []
    for number in range(RANKS):
        with open(f"{folder}/stderr{number}", "wb") as file:
            environ = common | {"RANK": str(number), "LOCAL_RANK": str(number)}
            started.append(subprocess.Popen([sys.executable, *arguments], env=environ, stderr=file))
    return started


def _number(folder: str, name: str) -> float:
    path = Path(folder, name)
    return float(path.read_text() or 0) if path.exists() else 0.0


def _runs(pid: float) -> bool:
    try:
        state = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _kill(folder: str, launched: list[subprocess.Popen[bytes]]) -> None:
    pids = [int(_number(folder, f"pid{number}")) for number in range(RANKS)]
    for pid in pids:
        if _runs(pid):
            os.kill(pid, signal.SIGKILL)
    for process in launched:
        process.wait(60)


def _last_words(folder: str, way: str, number: int) -> tuple[float, str]:
    """Return when a rank has said its last line of an error (0: never), and that."""
    pattern = f"logs/*/attempt_0/{number}/stderr.log" if way == "torchrun" else f"stderr{number}"
    for path in Path(folder).glob(pattern):
        lines = [line for line in path.read_text(errors="replace").splitlines() if "Error" in line]
        if lines:
            return path.stat().st_mtime, lines[-1][:200]
    return 0.0, "nothing"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=25.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    for way in options.ways:
        costs = []
        for fault in FAULTS:
            found, cost = run(way, fault, options.limit)
            costs.append(cost)
            print(way, fault, sep=", ", flush=True)
            for seconds, words in found:
                print(f"    {seconds:5.1f} s: {words}", flush=True)
        print(f"{way}, a step: {1e6 * min(costs):.0f} us")


if __name__ == "__main__":
    main()
