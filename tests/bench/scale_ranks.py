"""What an operation costs one rank as ranks are added: microseconds forward and backward, and the ratio to two ranks.

One process pretends to be a rank in the middle of P (nothing is communicated), four rows a rank whatever P, in the
steady state: layouts and plans are kept. A cost that does not grow with P says that only neighbours are dealt with.
Medians of ``--repeats``.

    PYTHONPATH=. python tests/bench/scale_ranks.py
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import fake_group

RANKS = (2, 8, 64, 512, 2048)
ROWS = 4  # of each rank
KERNEL, DOWN, LINEAR = torch.rand(4, 4, 3, 3), torch.rand(4, 4, 2, 2), torch.rand(4, 8)
SCALE = torch.rand(4)


def all_gather(x: Any) -> Any:
    """Do as torch does without scidata: the pretended group copies a part to the place of each rank."""
    part = x.local.detach()[0, 0].contiguous()
    whole = part.new_empty((dist.get_world_size() * len(part), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part)
    return x.local * 1


#: Of an image (1, 4, rows, 8) that is split along its rows.
OPS: dict[str, Callable[[Any], Any]] = {
    "conv 3x3": lambda x: F.conv2d(x, KERNEL, padding=1),
    "conv, stride 2": lambda x: F.conv2d(x, DOWN, stride=2),
    "conv, transposed": lambda x: F.conv_transpose2d(x, DOWN, stride=2),
    "max pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2, 4)),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad, circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "roll": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(2),
    "x[:, :, i]": lambda x: x[:, :, 5],
    "x[:, :, 1:-1]": lambda x: x[:, :, 1:-1],
    "x[:, :, ::2]": lambda x: x[:, :, ::2],
    "cat": lambda x: torch.cat([x, x], 2),
    "reshape": lambda x: x.reshape(1, 4, -1),
    "reshape, rows": lambda x: x.reshape(1, 2, -1, 16),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "add": lambda x: x + x,
    "relu": torch.relu,
    "linear": lambda x: F.linear(x, LINEAR),
    "sum": lambda x: x.sum(2),
    "mean": lambda x: x.mean(),
    "var": lambda x: x.var(2),
    "amax": lambda x: x.amax(2),
    "softmax": lambda x: x.softmax(2),
    "cumsum": lambda x: x.cumsum(2),
    "group norm": lambda x: F.group_norm(x, 2, SCALE, SCALE),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "mse loss": lambda x: F.mse_loss(x, x * 2),
    "gather": lambda x: x.redistribute(placements=[Replicate()]),
    "torch's all-gather alone": all_gather,
}


def image(mesh: Any, num_ranks: int) -> ShardTensor:
    """Return this rank's rows of an image."""
    spec = ShardSpec.even(mesh, [Shard(2)], (1, 4, ROWS * num_ranks, 8))
    return ShardTensor(torch.rand(spec.local_shape), spec)


def leaf(x: ShardTensor) -> ShardTensor:
    """Return the same tensor, to be differentiated by."""
    return x.detach().requires_grad_()


def times(op: Callable[[Any], Any], x: ShardTensor, number: int) -> tuple[float, float]:
    """Return microseconds of processor time of one forward pass, and of one backward pass."""
    forward = backward = 0.0
    for _ in range(number):
        given = leaf(x)
        start = time.process_time_ns()
        result = op(given)
        middle = time.process_time_ns()
        result = result.local if isinstance(result, ShardTensor) else result
        gradient = torch.ones_like(result)
        begin = time.process_time_ns()
        result.backward(gradient)
        backward += time.process_time_ns() - begin
        forward += middle - start
    return forward / number / 1e3, backward / number / 1e3


def main() -> None:
    """Time all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--rank", type=int, default=0, help="the first, and with 2 ranks any, has one neighbour")
    parser.add_argument("--only", help="operations with this in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = [name for name in OPS if not options.only or options.only in name]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for num_ranks in options.ranks:
        with fake_group(num_ranks, options.rank):
            mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
            x = image(mesh, num_ranks)
            for name in names:
                times(OPS[name], x, 2)  # plans are made
                took = [times(OPS[name], x, options.number) for _ in range(options.repeats)]
                found[name].append((statistics.median(t[0] for t in took), statistics.median(t[1] for t in took)))
    last = options.ranks[-1]
    heads = [f"{p}" for p in options.ranks] + [f"{last} / {options.ranks[0]}"]
    print(f"| µs at P = | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    for way, title in enumerate(("forward", "backward")):
        for name, each in found.items():
            took = [t[way] for t in each]
            cells = [f"{t:,.0f}" for t in took] + [f"{took[-1] / took[0]:.2f}"]
            print(f"| {name}, {title} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
