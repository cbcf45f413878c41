"""Step time and memory of the example's GraphCast: one process and ranks, with activations kept and recomputed.

    PYTHONPATH=. python tests/bench/graphcast_step.py --step 2 --ranks 2

A step is forward, loss and backward of one sample that has been read. The ways take turns, round after round, in the
same processes, one thread each; times are medians over the rounds: wall of the slowest rank, CPU the sum over ranks.
Memory is by how much the resident set of the largest rank grows in a step at most (Linux: VmHWM, reset before it).
While one process works alone, the others wait without using the CPU.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import scidata
from pipelines import graphcast
from scidata.testing import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALONE = "one process"
KINDS = ("kept", "recomputed")


def step_of(folder: str, alone: bool, given: list[str], num_ranks: int) -> tuple[Callable[[], None], dict[str, int]]:
    """Return a function that takes one step, and how much this rank holds."""
    sys.path.insert(0, str(EXAMPLES))
    script = importlib.import_module("train_graphcast")
    _, args = script.arguments(["--data", folder, "--domain", str(num_ranks), "--device", "cpu", "--check", *given])
    training = script.Training(args)
    training.normalise()
    training.build(measure=True)
    ds = training.normalised(training.open(None)) if alone else training.data
    batch = scidata.collate([ds[0]])
    model = training.single if alone else training.model  # parallelized models wait for the others
    dtype = {"none": None, "bf16": torch.bfloat16}[args.amp]

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = training.loss(model, batch)
        loss.backward()

    grid, mesh = (batch.index_map(name) for name in ("grid", "mesh"))
    edges = sum(ends.shape[1] for ends in batch.edge_index_dict.values())
    return step, {
        "grid": grid.num_owned,
        "mesh": mesh.num_owned,
        "ghosts": grid.num_ghost + mesh.num_ghost,
        "edges": edges,
    }


def status(name: str) -> float:
    """Return a figure of ``/proc/self/status``, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def growth(step: Callable[[], None]) -> float:
    """Return by how much a step makes the process grow, MiB."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def rank_main(rank: int, num_ranks: int, folder: str, given: list[str], repeats: int) -> dict[str, Any]:
    """Measure on one rank."""
    ways = [(where, kind) for where in (ALONE, "ranks") for kind in KINDS]
    found: dict[str, Any] = {}
    steps = {}
    for where, kind in ways:
        more = ["--recompute"] if kind == "recomputed" else []
        steps[f"{where}, {kind}"], held = step_of(folder, where == ALONE, [*given, *more], num_ranks)
        found[f"{where}, {kind}"] = {"wall": [], "cpu": [], "mib": 0.0, **held}
    for number in range(repeats + 2):  # a rehearsal, memory, then times
        for way, step in steps.items():
            dist.barrier()
            if way.startswith(ALONE) and rank:
                continue
            if number == 1:
                found[way]["mib"] = growth(step)
                continue
            began, cpu = time.perf_counter(), time.process_time()
            step()
            if number:
                found[way]["wall"].append(time.perf_counter() - began)
                found[way]["cpu"].append(time.process_time() - cpu)
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=2.0, help="of the grid, degrees")
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rollout", type=int, default=1)
    parser.add_argument("--amp", choices=["none", "bf16"], default="none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # large blocks go back to the system at once, so that memory is what is in use; read when a process starts
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
    given = [word for name in ("dim", "depth", "rollout", "amp") for word in (f"--{name}", str(getattr(args, name)))]
    with tempfile.TemporaryDirectory() as folder:
        shape = round(180 / args.step) + 1, round(360 / args.step)
        graphcast.make(f"{folder}/waves", num_times=args.rollout + 3, num_levels=args.levels, shape=shape)
        ranks = run_ranks(rank_main, args.ranks, f"{folder}/waves", given, args.repeats, timeout=3600)
    rows = []
    for way in ranks[0]:
        of = [r[way] for r in ranks if r[way]["wall"]]
        wall = statistics.median(max(each) for each in zip(*(r["wall"] for r in of), strict=True))
        cpu = statistics.median(sum(each) for each in zip(*(r["cpu"] for r in of), strict=True))
        largest = {key: max(r[key] for r in of) for key in ("mib", "grid", "mesh", "ghosts", "edges")}
        rows.append({"way": way.replace("ranks", f"{len(of)} ranks"), "wall_s": wall, "cpu_s": cpu, **largest})
    if args.json:
        print(json.dumps({"options": vars(args), "results": rows}))
        return
    print(f"{'way':<26}{'wall ms':>9}{'CPU ms':>9}{'MiB':>7}{'grid':>9}{'mesh':>7}{'ghosts':>8}{'edges':>9}")
    for r in rows:
        print(
            f"{r['way']:<26}{1e3 * r['wall_s']:>9.0f}{1e3 * r['cpu_s']:>9.0f}{r['mib']:>7.0f}{r['grid']:>9}"
            f"{r['mesh']:>7}{r['ghosts']:>8}{r['edges']:>9}"
        )


if __name__ == "__main__":
    main()
