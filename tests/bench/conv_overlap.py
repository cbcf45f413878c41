"""Whether a convolution gains from computing its interior while its halo is on its way: two ranks over gloo.

``exchange, then all``: what scidata does. ``interior meanwhile``: the exchange is started, the interior convolved, the
exchange waited for, the rows at the border convolved, and both joined. ``exchange alone``: the most there is to gain.
Milliseconds of wall and CPU time of rank 0: medians of interleaved rounds, and the least.

    PYTHONPATH=. python tests/bench/conv_overlap.py
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from scidata.testing import run_ranks

SHAPES = [(16, 32, 64), (32, 128, 128), (32, 256, 256)]  # channels, rows and columns of a rank
ROUNDS, NUMBER = 8, 3


def measure(rank: int, num_ranks: int, channels: int, rows: int, columns: int) -> dict[str, list[float]]:
    """Time the three on one shape."""
    torch.set_num_threads(1)
    x, weight = torch.rand(1, channels, rows, columns), torch.rand(channels, channels, 3, 3)
    border = rows - 1 if rank == 0 else 0

    def exchange(async_op: bool = False) -> tuple[torch.Tensor, Any]:
        sent = x[:, :, border].contiguous().view(-1)
        counts = [0, len(sent)] if rank == 0 else [len(sent), 0]
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, counts, counts, async_op=async_op)
        return received.view(1, channels, 1, columns), work

    def joined(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.cat([own, other] if rank == 0 else [other, own], 2)

    def at_once() -> torch.Tensor:
        return F.conv2d(joined(x, exchange()[0]), weight, padding=(0, 1))

    def meanwhile() -> torch.Tensor:
        row, work = exchange(async_op=True)
        interior = F.conv2d(x, weight, padding=(0, 1))
        work.wait()
        edge = x[:, :, -2:] if rank == 0 else x[:, :, :2]
        return joined(interior, F.conv2d(joined(edge, row), weight, padding=(0, 1)))

    torch.testing.assert_close(at_once(), meanwhile(), rtol=1e-4, atol=1e-4)
    ways = {"exchange, then all": at_once, "interior meanwhile": meanwhile, "exchange alone": exchange}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, function in ways.items():
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(NUMBER):
                function()
            if turn:
                wall[name].append((time.perf_counter() - start) / NUMBER * 1e3)
                cpu[name].append((time.process_time() - busy) / NUMBER * 1e3)
    return {name: [statistics.median(wall[name]), min(wall[name]), statistics.median(cpu[name])] for name in ways}


def main() -> None:
    """Print one row for each shape and way."""
    for shape in SHAPES:
        for name, (median, least, busy) in run_ranks(measure, 2, *shape)[0].items():
            print(f"{shape!s:18}{name:22}wall {median:8.2f} (least {least:.2f}), CPU {busy:.2f} ms")


if __name__ == "__main__":
    main()
