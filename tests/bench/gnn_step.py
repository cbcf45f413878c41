"""Step time of the example's MeshGraphNet: one process, ranks that exchange ghosts, ranks that compute them.

    PYTHONPATH=. python tests/bench/gnn_step.py --nodes 20000 --ranks 2

A step is forward, loss and backward of one sample that has been read, and the sum of gradients. The ways take turns,
round after round, in the same processes, one thread each. Wall time is that of the slowest rank, CPU time the sum over
ranks; figures are medians over the rounds, ratios those of each round. While one process works alone, the others wait
without using the CPU. ``own rows`` is the floor: each rank's rows and edges as plain tensors, sources that others own
replaced by some of its own, nothing sent.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from pipelines import flow_graph
from scidata.testing import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gnn.py"
WAYS = ("one process", "own rows", "exchange", "k-hop")


def example() -> Any:
    """Load the example as a module."""
    spec = importlib.util.spec_from_file_location("train_gnn", EXAMPLE)
    assert spec
    assert spec.loader
    sys.modules["train_gnn"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step_of(way: str, path: str, mesh: Any, dim: int, depth: int) -> tuple[Callable[[], None], dict[str, int]]:
    """Return a function that takes one step, and how much this rank holds."""
    khop, fields = way == "k-hop", [*flow_graph.INPUTS, *flow_graph.TARGETS]
    options = {"halo": depth} if khop else {}
    ds = flow_graph.open_graph(path, None if way == "one process" else mesh, fields=fields, **options)
    sample = scidata.collate([ds[0]])
    torch.manual_seed(0)
    channels = flow_graph.num_channels(ds, flow_graph.INPUTS), flow_graph.num_edge_channels(ds), 3
    model = example().MeshGraphNet(*channels, dim=dim, depth=depth)
    if way in ("exchange", "k-hop"):
        scidata.parallelize(model, mesh)
    data = sample.to_pyg(x=flow_graph.INPUTS, y=flow_graph.TARGETS, khop=khop, by_hop=khop)
    given = [data.x, data.edge_index, flow_graph.relative_positions(ds, data)]
    given += [data.num_sampled_nodes, data.num_sampled_edges] if khop else []

    target = data.y
    if way == "own rows":
        num_owned = sample.index_map("node").num_owned
        given = [data.x.to_local(), sample.edge_index % num_owned, given[2].to_local()]
        target = target.to_local()

    def step() -> None:
        model.zero_grad()
        out = sample.call_on_parts(model, *given) if khop else model(*given)
        (out - target).square().mean().backward()

    edges = sample.edge_index_with_ghosts if khop else sample.edge_index
    return step, {"rows": sample.index_map("node").num_local, "edges": edges.shape[1]}


def rank_main(rank: int, num_ranks: int, path: str, dim: int, depth: int, repeats: int) -> dict[str, Any]:
    """Measure on one rank."""
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    steps = {way: step_of(way, path, mesh, dim, depth) for way in WAYS}
    found: dict[str, Any] = {way: {"wall": [], "cpu": [], **held} for way, (_, held) in steps.items()}
    for number in range(repeats + 1):  # the first is a rehearsal
        for way, (step, _) in steps.items():
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            if way != "one process" or rank == 0:
                step()
            if number:
                found[way]["wall"].append(time.perf_counter() - began)
                found[way]["cpu"].append(time.process_time() - cpu)
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    # freed memory is kept: how much a way gives back to the system, and faults in again, is chance; read at the start
    # of a process
    os.environ |= dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**32))
    with tempfile.TemporaryDirectory() as folder:
        raw, store = f"{folder}/raw", f"{folder}/flow.store"
        flow_graph.make(raw, num_samples=1, num_nodes=args.nodes)
        flow_graph.convert(raw, store)
        given = store, args.dim, args.depth, args.repeats
        ranks = run_ranks(rank_main, args.ranks, *given, timeout=3600)
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        of = [r[way] for r in ranks[:1]] if way == "one process" else [r[way] for r in ranks]
        wall = [max(each) for each in zip(*(r["wall"] for r in of), strict=True)]
        cpu = [sum(each) for each in zip(*(r["cpu"] for r in of), strict=True)]
        alone = rows[0] if rows else {"wall": wall, "cpu": cpu}
        row = {"way": way, "ranks": len(of), "wall": wall, "cpu": cpu}
        for name, times in (("wall", wall), ("cpu", cpu)):
            row[f"{name}_s"] = statistics.median(times)
            row[f"{name}_ratio"] = statistics.median(a / b for a, b in zip(times, alone[name], strict=True))
        rows.append(row | {key: max(r[key] for r in of) for key in ("rows", "edges")})
    if args.json:
        print(json.dumps({"options": vars(args), "results": rows}))
        return
    print(f"{'way':<12}{'ranks':>6}{'wall ms':>10}{'ratio':>7}{'CPU ms':>10}{'ratio':>7}{'rows':>9}{'edges':>9}")
    for r in rows:
        print(
            f"{r['way']:<12}{r['ranks']:>6}{1e3 * r['wall_s']:>10.0f}{r['wall_ratio']:>7.2f}"
            f"{1e3 * r['cpu_s']:>10.0f}{r['cpu_ratio']:>7.2f}{r['rows']:>9}{r['edges']:>9}"
        )


if __name__ == "__main__":
    main()
