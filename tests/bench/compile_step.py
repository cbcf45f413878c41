"""What compiled steps cost, beside eager ones and one process: CPU time, Python calls, collectives, bytes.

A step is forward, loss, backward and optimizer, on CPUs over gloo, one thread a rank. The ways take turns in the same
processes: one process on the whole sample, eager and by ``torch.compile``, while the others wait; and all ranks, eager,
by ``scidata.compile`` and by torch's DTensor. CPU time is the sum over ranks, median of ``--repeats`` turns, each the
mean of ``--steps`` steps; ratios are to one process compiled, or to it eager if torch cannot compile it. Calls are
those of Python functions in one step of rank 0, bytes are those that it sends.

    PYTHONPATH=. python tests/bench/compile_step.py --ranks 2 4
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import scidata
import scidata.shard.comm.transport
from scidata.shard.comm.transport import count_sent
from scidata.shard.compile import regions_of
from scidata.testing import run_ranks
from tests.bench.step_bytes import GRAPHS, make, training_of
from tests.bench.step_costs import MODELS, Model, UNet, ViTBlock, python_calls

WAYS = ("one process", "one process, compiled", "ranks", "ranks, compiled", "DTensor")
#: Beside the small ones: sizes at which a rank has some tens of ms of work.
LARGE = {
    "UNet, 256 x 384": Model(partial(UNet, 32), (1, 4, 256, 384), 2),
    "ViT, 4 blocks, 4,096 tokens": Model(lambda: nn.Sequential(*[ViTBlock(256, 8) for _ in "1234"]), (1, 4096, 256), 1),
}
ALL = MODELS | LARGE
HEADER = (
    "| model | ranks | one process, ms | compiled, ms | ranks, ratio | ranks compiled, ratio | DTensor, ratio "
    "| Python calls | collectives, MB | graphs |\n|---|---:|---:|---:|---:|---:|---|---:|---:|---|"
)


def step_of(name: str, way: str, mesh: Any, backend: str, folder: str) -> tuple[nn.Module, Callable[[], None]]:
    """Return a model, and a function that takes one step of training, on samples that are the same each time."""
    torch.manual_seed(0)
    loss: Callable[[], torch.Tensor]
    if name in GRAPHS:
        training = training_of(name, mesh["domain"].size(), folder)
        is_alone = way.startswith("one process")
        net = training.single if is_alone else training.model
        ds = training.normalised(training.open(None)) if is_alone else training.data
        batch, run = scidata.collate([ds[0]]), compiled(net, way, backend)
        loss = partial(training.loss, run, batch)
        if way == "DTensor":
            raise NotImplementedError("no graphs")
    else:
        net, loss = of_tensors(ALL[name], way, mesh, backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        optimizer.step()

    return net, step


def of_tensors(model: Model, way: str, mesh: Any, backend: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a model and its loss, on a tensor that is cut along one dim."""
    net, x, y = model.make(), torch.randn(model.shape), torch.randn(model.shape)
    if way.startswith("ranks"):
        scidata.parallelize(net, mesh)
        x, y = (scidata.scatter_tensor(each, 0, mesh["domain"], [Shard(model.dim)]) for each in (x, y))
    if way == "DTensor":  # the input's rows on the ranks, weights on all; torch says what is sent
        distribute_module(net, mesh["domain"])
        x, y = (distribute_tensor(each, mesh["domain"], [Shard(model.dim)]) for each in (x, y))
    run = compiled(net, way, backend)
    return net, lambda: F.mse_loss(run(x), y)


def compiled(net: nn.Module, way: str, backend: str) -> Any:
    """Return what is called in one way of the comparison."""
    if way == "one process, compiled":
        return torch.compile(net, backend=backend)
    return scidata.compile(net, backend=backend) if way == "ranks, compiled" else net


def collectives_of(step: Callable[[], None]) -> tuple[int, int]:
    """Return how many collectives of scidata's a step calls, and the bytes that this rank sends."""
    transport: Any = scidata.shard.comm.transport
    plain, count, sent = transport.compare, 0, count_sent()

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        plain(*args)

    transport.compare = counted
    try:
        step()
    finally:
        transport.compare = plain
    return count, count_sent() - sent


def rank_main(
    rank: int, num_ranks: int, names: list[str], folder: str, backend: str, repeats: int, steps: int
) -> dict[str, Any]:
    """Measure on one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    found: dict[str, Any] = {}
    for name in names:
        made: dict[str, tuple[nn.Module, Callable[[], None]]] = {}
        refused: dict[str, str] = {}
        for way in WAYS:
            try:
                step = step_of(name, way, mesh, backend, folder)
                if way in ("one process, compiled", "DTensor"):
                    step[1]()
                made[way] = step
            except Exception as e:  # on all ranks alike
                if way not in ("one process, compiled", "DTensor"):
                    raise
                refused[way] = f"{type(e).__name__}: {str(e).splitlines()[0][:60]}"
        cpu: dict[str, list[float]] = {way: [] for way in made}
        for turn in range(repeats + 1):  # the first is a rehearsal, in which graphs are compiled
            for way, (_, step) in made.items():
                dist.barrier()
                began = time.process_time()
                if not way.startswith("one process") or rank == 0:
                    for _ in range(steps if turn else 3):
                        step()
                if turn:
                    cpu[way].append((time.process_time() - began) / steps)
        calls = {way: python_calls(step) for way, (_, step) in made.items() if way.startswith("ranks")}
        graphs = [str(region) for region in regions_of(made["ranks, compiled"][0])]
        found[name] = cpu, calls, collectives_of(made["ranks, compiled"][1]), graphs, refused
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=[*ALL, *GRAPHS], choices=[*ALL, *GRAPHS])
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    # freed memory is kept: how much a way gives back to the system, and faults in again, is chance
    os.environ |= dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**32))
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        make(args.models, folder)
        measure(args, folder)


def measure(args: argparse.Namespace, folder: str) -> None:
    """Run all ranks, and print a row for each model."""
    for num_ranks in args.ranks:
        given = args.models, folder, args.backend, args.repeats, args.steps
        ranks = run_ranks(rank_main, num_ranks, *given, timeout=3600)
        for name in args.models:
            of_ranks = [way for way in ranks[0][name][0] if way in WAYS[2:]]
            cpu = {way: [sum(each) for each in zip(*(r[name][0][way] for r in ranks), strict=True)] for way in of_ranks}
            one = {way: ranks[0][name][0][way] for way in WAYS[:2] if way in ranks[0][name][0]}
            median = {way: statistics.median(times) for way, times in (one | cpu).items()}
            calls, (count, sent), lines, refused = ranks[0][name][1:]
            base = median.get(WAYS[1], median[WAYS[0]])
            compiled = refused.get(WAYS[1]) or f"{1e3 * base:.1f}"
            by_torch = refused.get("DTensor") or f"{median['DTensor'] / base:.2f}"
            print(
                f"| {name} | {num_ranks} | {1e3 * median[WAYS[0]]:.1f} | {compiled} | {median['ranks'] / base:.2f} "
                f"| {median['ranks, compiled'] / base:.2f} | {by_torch} "
                f"| {calls['ranks']} -> {calls['ranks, compiled']} "
                f"| {count}, {sent / 1e6:.2f} | {' / '.join(lines)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
