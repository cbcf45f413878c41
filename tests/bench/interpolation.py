"""What a field at points costs two ranks, in three ways: CPU milliseconds and bytes that a rank sends, in turns.

Points in each rank's part of the grid, with a halo of one row (``cut_like=``); points anywhere, so that cells are
fetched; and the field gathered, as a script without :func:`scidata.interpolate` would. Values, and values with
gradients of the field, for which a halo is not used. Medians of five turns of the slower rank.

    PYTHONPATH=. python tests/bench/interpolation.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata
from scidata.shard import HaloDim, ShardSpec, ShardTensor
from scidata.shard.comm.transport import count_sent
from scidata.shard.rows.runs import exchange_halo
from scidata.testing import run_ranks


def measure(rank: int, num_ranks: int, channels: int, rows: int, num: int) -> dict[str, tuple[float, int]]:
    """Return the milliseconds and bytes of each way."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    spec = ShardSpec.even(mesh, (Shard(1),), (channels, rows, 2 * rows))
    x = ShardTensor(torch.randn(spec.local_shape, generator=torch.Generator().manual_seed(rank)), spec)
    halo = {1: HaloDim(lo=0, hi=1)}
    padded = ShardTensor.from_padded(exchange_halo(x.local, spec, halo), spec, halo)
    leaf = x.clone().requires_grad_()
    first, count = spec.offsets[1], spec.local_shape[1]
    draw = torch.rand(num // num_ranks, 2, generator=torch.Generator().manual_seed(rank))
    own = draw * torch.tensor([min(count, rows - 1 - first), 2 * rows]) + torch.tensor([first, 0.0])
    anywhere = draw * torch.tensor([rows - 1, 2 * rows])
    period = (0, 2 * rows)

    def at(field: ShardTensor, places: Tensor) -> Tensor:
        points = ShardTensor.from_local(
            places, mesh, [Shard(0)], sharding_shapes={0: [tuple(places.shape)] * num_ranks}
        )
        return scidata.interpolate(field, points, period=period)

    def gathered(field: ShardTensor, places: Tensor) -> Tensor:
        whole = scidata.all_gather_v(field.to_local(), spec.sizes_of(0), 1, spec.group(0), grad="sum")
        return scidata.interpolate(whole, places, period=period)

    def backward(result: Tensor) -> None:
        result = result.to_local() if isinstance(result, ShardTensor) else result
        result.sum().backward()

    ways: dict[str, Callable[[], object]] = {
        "points follow the grid": lambda: at(padded, own),
        "points anywhere": lambda: at(x, anywhere),
        "field gathered": lambda: gathered(x, anywhere),
        "points follow the grid, and gradient": lambda: backward(at(leaf, own)),
        "points anywhere, and gradient": lambda: backward(at(leaf, anywhere)),
        "field gathered, and gradient": lambda: backward(gathered(leaf, anywhere)),
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for _ in range(6):
        for name, way in ways.items():
            leaf.grad = None
            dist.barrier()
            begun, sent = time.process_time(), count_sent()
            way()
            found[name].append((1e3 * (time.process_time() - begun), count_sent() - sent))
    return {name: (statistics.median(ms for ms, _ in turns[1:]), turns[-1][1]) for name, turns in found.items()}


def main() -> None:
    """Time all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=20)
    parser.add_argument("--rows", type=int, default=360)
    parser.add_argument("--points", type=int, default=50_000)
    options = parser.parse_args()
    each = run_ranks(measure, 2, options.channels, options.rows, options.points, timeout=600)
    print("| | CPU, ms | sent by a rank, bytes |\n|---|---:|---:|")
    for name in each[0]:
        print(f"| {name} | {max(rank[name][0] for rank in each):.0f} | {max(rank[name][1] for rank in each):,} |")


if __name__ == "__main__":
    main()
