"""What a ShardTensor costs in Python: microseconds to make one and to dispatch an operation, beside plain torch.

CPU time of one process that pretends to be rank 0 of 2 (nothing is communicated), tensors of 84 elements, so that what
is left is overhead. Interleaved, median of ``--repeats``. PhysicsNeMo's ShardTensor is timed too where it is installed.

    PYTHONPATH=. python tests/bench/shard_ops.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import fake_group


@cache
def _plain(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.rand(shape, device=device)


OPS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + x,
    "add a number": lambda x: x + 1,
    "add a plain row": lambda x: x + _plain(x.device, 6),
    "relu": torch.relu,
    "reshape": lambda x: x.reshape(2, -1, 2, 3),
    "permute": lambda x: x.permute(1, 0, 2),
    "transpose": lambda x: x.transpose(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "x[0]": lambda x: x[0],
    "slice, sharded dim": lambda x: x[:, 1:3],
    "sum, unsharded dim": lambda x: x.sum(2),
    "softmax": lambda x: x.softmax(-1),
    "linear": lambda x: F.linear(x, _plain(x.device, 4, 6)),
    "cat": lambda x: torch.cat([x, x], 2),
}


def physicsnemo_of(local: torch.Tensor, mesh: Any) -> Any:
    """Return a maker of PhysicsNeMo's ShardTensor, None where it is not installed."""
    try:
        from physicsnemo.domain_parallel import ShardTensor as Theirs
    except ImportError:
        return None
    shapes = {0: (torch.Size((2, 4, 6)), torch.Size((2, 3, 6)))}
    return lambda: Theirs.from_local(local, mesh, [Shard(1)], sharding_shapes=shapes)


def microseconds(function: Callable[[], Any], number: int) -> float:
    """CPU time of one call."""
    start = time.process_time()
    for _ in range(number):
        function()
    return (time.process_time() - start) / number * 1e6


def measure(number: int, repeats: int, device: str = "cpu") -> dict[str, list[float]]:
    """Return µs of each job: plain torch's, scidata's, and PhysicsNeMo's where it has one."""
    with fake_group(2), torch.no_grad():
        mesh = init_device_mesh(device, (2,), mesh_dim_names=("domain",))
        spec = ShardSpec.even(mesh, [Shard(1)], (2, 7, 6))
        local = torch.rand(spec.local_shape, device=device)
        shapes = {0: ((2, 4, 6), (2, 3, 6))}
        x, theirs = ShardTensor(local, spec), physicsnemo_of(local, mesh)
        jobs: dict[str, list[Callable[[], Any]]] = {
            "make, of a spec": [local.detach, lambda: ShardTensor(local, spec)],
            "make, from_local": [
                local.detach,
                lambda: ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes=shapes),
                *([] if theirs is None else [theirs]),
            ],
        }
        for name, op in OPS.items():
            jobs[name] = [lambda op=op: op(local), lambda op=op: op(x)]  # type: ignore[misc]
        times: dict[str, list[list[float]]] = {name: [[] for _ in functions] for name, functions in jobs.items()}
        for turn in range(repeats + 1):
            for name, functions in jobs.items():
                for i, function in enumerate(functions):
                    took = microseconds(function, number)
                    if turn:  # the first one warms up
                        times[name][i].append(took)
    return {name: [statistics.median(each) for each in samples] for name, samples in times.items()}


def main() -> None:
    """Time all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':22}{'plain':>10}{'scidata':>10}{'added':>10}{'':>4}PhysicsNeMo")
    for name, (plain, ours, *other) in measure(options.number, options.repeats, options.device).items():
        print(f"{name:22}{plain:10.1f}{ours:10.1f}{ours - plain:10.1f}{'':>4}{f'{other[0]:.1f}' if other else '-'}")


if __name__ == "__main__":
    main()
