"""Whether two convolutions in a row gain from one halo of two rows, fetched before the first: ranks over gloo.

A UNet's double block, twice a 3x3 convolution, group norm and GELU, forward and backward, on plain tensors, so that
nothing but rows and messages differs. ``two halos``: a row before each convolution, as scidata does. ``one halo``: two
rows before the first, which computes the other rank's border row, too; statistics count own rows alone. ``own rows``:
no rows are sent, statistics are. ``scidata``: the two halos by ShardTensors. Milliseconds of CPU time of all ranks and
of wall time of rank 0, medians of turns, and ratios to two halos of the same turn, their quartiles in brackets. Python
calls and exchanges (there and back) are those of rank 0. In float64 all ways that send rows agree to 1e-12.

    PYTHONPATH=. python tests/bench/conv_pairs.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

import scidata
from scidata.core.bounds import bounds_of, even_sizes
from scidata.shard.comm.sums import all_reduce_sum, replicate_to_shards
from scidata.shard.rows import runs
from scidata.testing import run_ranks
from tests.bench.step_costs import ConvBlock, python_calls

#: Channels in and out, rows and columns of the whole: levels of UNets of 96 x 128 and of 256 x 384.
SHAPES = [(24, 24, 96, 128), (32, 32, 96, 128), (48, 96, 24, 32), (32, 32, 256, 384), (64, 128, 64, 96)]
WAYS = ("two halos", "one halo", "own rows", "scidata")


def block(way: str, net: ConvBlock, rows: int, mesh: Any) -> Callable[[Tensor], Tensor]:
    """Return the block on a rank's own rows."""
    group, rank = mesh.get_group(), mesh.get_local_rank()
    sizes = even_sizes(rows, mesh.size())
    bounds = bounds_of(sizes).tolist()

    def plan(width: int) -> runs.RunsPlan:
        """Plan to fetch that many rows on both sides; beyond the field's there is one of zeros."""
        ends = [(max(bounds[r] - width, -1), min(bounds[r + 1] + width, rows + 1)) for r in range(mesh.size())]
        return runs.plan_runs(sizes, rank, [runs.window_runs(*each, rows) for each in ends])

    halos = {width: plan(width) for width in (1, 2)}
    below, above = int(rank > 0), int(rank < mesh.size() - 1)  # rows of others that the first convolution computes

    def normed(x: Tensor, layer: Any, own: Tensor) -> Tensor:
        grouped, part = (each.unflatten(1, (layer.num_groups, -1)) for each in (x, own))  # type: ignore[no-untyped-call]
        sums = torch.stack([part.sum((2, 3, 4), keepdim=True), part.square().sum((2, 3, 4), keepdim=True)])
        count = part[0, 0, :, 0].numel() * rows
        mean, square = (replicate_to_shards(all_reduce_sum(sums, group), [group]) / count).unbind(0)
        result = ((grouped - mean) * torch.rsqrt(square - mean.square() + layer.eps)).flatten(1, 2)
        return F.gelu(result * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1))

    def run(x: Tensor) -> Tensor:
        first, first_norm, _, second, second_norm, _ = net
        if way == "one halo":
            x = F.conv2d(runs.fetch_runs(x, halos[2], 2, group), first.weight, first.bias, padding=(0, 1))
            x = normed(x, first_norm, x.narrow(2, below, sizes[rank]))
            x = F.pad(x, (0, 0, 1 - below, 1 - above)) if below + above < 2 else x
            x = F.conv2d(x, second.weight, second.bias, padding=(0, 1))
            return normed(x, second_norm, x)
        for conv, norm in ((first, first_norm), (second, second_norm)):
            halo = way == "two halos"
            x = runs.fetch_runs(x, halos[1], 2, group) if halo else x
            x = F.conv2d(x, conv.weight, conv.bias, padding=(0 if halo else 1, 1))
            x = normed(x, norm, x)
        return x

    return run


def step_of(way: str, shape: tuple[int, ...], mesh: Any, dtype: torch.dtype) -> tuple[Callable[[], None], list[Tensor]]:
    """Return a function that goes forward and backward, and the tensors whose gradients it finds."""
    inner, outer, rows, columns = shape
    torch.manual_seed(0)
    net = ConvBlock(inner, outer).to(dtype)
    x, weights = torch.randn(1, inner, rows, columns, dtype=dtype), torch.randn(1, outer, rows, columns, dtype=dtype)
    x, weights = (scidata.scatter_tensor(each, 0, mesh, [Shard(2)]) for each in (x, weights))
    if way == "scidata":
        scidata.parallelize(net, mesh)
    else:
        x, weights, net_of_rank = x.to_local(), weights.to_local(), block(way, net, rows, mesh)
    x = x.detach().clone().requires_grad_()
    run = net if way == "scidata" else net_of_rank

    def step() -> None:
        x.grad = None
        net.zero_grad()
        torch.autograd.backward((run(x) * weights).sum())

    return step, [x, *net.parameters()]


def count_exchanges(step: Callable[[], None]) -> int:
    """Return how often a step exchanges rows."""
    module: Any = runs
    plain, count = module.exchange, 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*args)

    module.exchange = counted
    try:
        step()
    finally:
        module.exchange = plain
    return count


def rank_main(
    rank: int, num_ranks: int, shape: tuple[int, ...], turns: int, number: int
) -> dict[str, tuple[list[float], list[float], int, int]]:
    """Measure on one rank."""
    torch.set_num_threads(1)
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")["domain"]
    check(shape, mesh)
    steps = {way: step_of(way, shape, mesh, torch.float32)[0] for way in WAYS}
    cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        for way, step in steps.items():
            dist.barrier()
            began, busy = time.perf_counter(), time.process_time()
            for _ in range(number):
                step()
            if turn:
                wall[way].append((time.perf_counter() - began) / number * 1e3)
                cpu[way].append((time.process_time() - busy) / number * 1e3)
    return {way: (cpu[way], wall[way], python_calls(steps[way]), count_exchanges(steps[way])) for way in WAYS}


def check(shape: tuple[int, ...], mesh: Any) -> None:
    """Hold gradients of the ways that send rows against each other; each rank has its share of those of weights."""
    found = {}
    for way in ("two halos", "one halo", "scidata"):
        step, tensors = step_of(way, shape, mesh, torch.float64)
        step()
        grads = [each.grad for each in tensors if each.grad is not None]
        own = grads[0].to_local() if way == "scidata" else grads[0]
        if way != "scidata":
            for each in grads[1:]:
                dist.all_reduce(each)
        found[way] = [own, *grads[1:]]
    for way in ("one halo", "scidata"):
        for a, b in zip(found["two halos"], found[way], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(a.abs().max()))


def main() -> None:
    """Print a row for each shape and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--number", type=int, default=10, help="steps of a turn")
    args = parser.parse_args()
    # freed memory is kept: how much a way gives back to the system, and faults in again, is chance
    os.environ |= dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(2**32))
    print("| channels, rows, columns | way | CPU, ms | ratio | wall, ms | ratio | Python calls | exchanges |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for shape in SHAPES:
        number = max(1, args.number * 96 * 128 // max(96 * 128, shape[2] * shape[3]))
        ranks = run_ranks(rank_main, args.ranks, shape, args.turns, number, timeout=1200)
        cpu = {way: [sum(turn) for turn in zip(*(rank[way][0] for rank in ranks), strict=True)] for way in WAYS}
        wall = {way: ranks[0][way][1] for way in WAYS}
        for way in WAYS:
            cells = [f"{statistics.median(t[way]):.2f} | {beside(t[way], t['two halos'])}" for t in (cpu, wall)]
            calls, exchanges = ranks[0][way][2:]
            label = "{} to {}, {}, {}".format(*shape)
            print(f"| {label} | {way} | {' | '.join(cells)} | {calls} | {exchanges} |", flush=True)


def beside(times: list[float], others: list[float]) -> str:
    """Return the median and the quartiles of ratios turn by turn."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times, others, strict=True)], n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
