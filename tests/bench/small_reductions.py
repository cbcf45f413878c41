"""What a sum of a small tensor costs a real rank of gloo as ranks are added: three ways, CPU and wall microseconds.

One exchange of all with all, whose values each rank adds up; gloo's own ring; and pairs of ranks, ``log2(ranks)``
messages. ``scidata.shard.comm.transport`` takes the first up to 16 ranks and 64 KiB of all, pairs beyond 16 ranks.
Medians of five turns.

    PYTHONPATH=. python tests/bench/small_reductions.py --ranks 4 8 16 32
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch
import torch.distributed as dist

from scidata.shard.comm import transport
from scidata.testing import run_ranks

#: (the most ranks that gather, the most bytes that are gathered or go by pairs)
WAYS = {"one exchange": (1 << 30, 1 << 30), "ring": (1 << 30, 0), "pairs": (1, 1 << 30)}


def seconds() -> tuple[float, float]:
    """Return processor time of all threads, and the time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, time.perf_counter()


def measure(rank: int, num_ranks: int, num_bytes: int, number: int) -> dict[str, tuple[float, float]]:
    """Return the microseconds of each way."""
    group, x = dist.group.WORLD, torch.ones(num_bytes // 4)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(5):
        for name, (transport._FEW, transport._AT_ONCE) in WAYS.items():
            transport.reduce(x, dist.ReduceOp.SUM, group)
            dist.barrier()
            cpu, wall = seconds()
            for _ in range(number):
                transport.reduce(x, dist.ReduceOp.SUM, group)
            found[name].append(tuple((b - a) / number * 1e6 for a, b in zip((cpu, wall), seconds(), strict=True)))
    return {name: tuple(statistics.median(each) for each in zip(*turns, strict=True)) for name, turns in found.items()}


def main() -> None:
    """Time all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=(4, 8, 16, 32))
    parser.add_argument("--bytes", type=int, nargs="+", default=(128, 16384))
    parser.add_argument("--number", type=int, default=20)
    options = parser.parse_args()
    print(f"| ranks | bytes | {' | '.join(f'{name}, CPU / wall µs' for name in WAYS)} |\n|---:|{'---:|' * 4}")
    for num_ranks in options.ranks:
        for num_bytes in options.bytes:
            each = run_ranks(measure, num_ranks, num_bytes, options.number, timeout=600)
            means = {name: [statistics.mean(rank[name][i] for rank in each) for i in (0, 1)] for name in WAYS}
            cells = " | ".join(f"{cpu:,.0f} / {wall:,.0f}" for cpu, wall in means.values())
            print(f"| {num_ranks} | {num_bytes} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
