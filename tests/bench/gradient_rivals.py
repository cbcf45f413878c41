"""Gradients of parameters by scidata's buckets, DDP and FSDP2: what is right in which training step, and what it costs.

    PYTHONPATH=. python tests/bench/gradient_rivals.py [--steps 40]

Right is what one process finds on whole samples, in float64; the figure is the largest relative error of a gradient.
DDP and FSDP2 get what they can be given: the group of all ranks of the mesh, and parameters whose sum over the domain
is left to the mean (``defer``); DDP a communication hook that sums in float32 or better, as the buckets do; FSDP2 what
``strategy="fsdp"`` does for it. Times are
medians over steps that take turns, of the slower rank, 2 ranks with one thread each.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import scidata
from scidata.shard.comm.sums import defer
from scidata.shard.comm.transport import SUM_IN
from scidata.shard.parallel.fsdp import _Carrier, _map, _pack, _unpack
from scidata.shard.tensor import ShardTensor
from scidata.testing import run_ranks
from tests.dist._training import Model, loss_of, part_of, sample

Loss = Callable[[Any, Any, int], Any]


def all_used(model: Any, x: Any, dp: int) -> Any:
    """Make use of all but one layer."""
    return loss_of(model, x)


def as_record(model: Any, x: Any, dp: int) -> Any:
    """Return what a model with a class of its own for outputs returns, and take the loss of that."""
    return loss_of(lambda x: model(x, as_record=True).values, x)


def by_parts(model: Any, x: Any, dp: int) -> Any:
    """Call layers of the model, not its forward."""
    inner = model.module.inner if isinstance(model, DistributedDataParallel) else model
    return (inner.head(inner.embed(x)) ** 2).mean()


def twice(model: Any, x: Any, dp: int) -> Any:
    """Call it twice before one backward, as a rollout does."""
    return loss_of(model, x) + loss_of(model, 2 * x)


def on_one_dp_rank(model: Any, x: Any, dp: int) -> Any:
    """Use the readout on the first dp rank only."""
    rows, pooled = model(x)
    return (rows**2).mean() + (pooled.square().sum() if dp == 0 else 0)


CASES: dict[str, tuple[Loss, int, int]] = {  # loss, ranks, domain ranks
    "a layer that nobody uses": (all_used, 2, 2),
    "a shard without rows": (all_used, 3, 3),
    "outputs in a record": (as_record, 2, 2),
    "layers called by themselves": (by_parts, 2, 2),
    "two calls, one backward": (twice, 2, 2),
    "a layer that one dp rank uses": (on_one_dp_rank, 4, 2),
}


class Record:
    """Outputs."""

    def __init__(self, values: Any) -> None:
        self.values = values


class Recording(Model):
    """The tests' model, which may return a record."""

    def forward(self, x: Any, as_record: bool = False) -> Any:
        """Return rows and pooled values."""
        out = super().forward(x)
        return Record(out) if as_record else out


def sums_wide(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP's in float32 or better."""
    flat = bucket.buffer().to(SUM_IN.get(bucket.buffer().dtype, bucket.buffer().dtype))
    future = dist.all_reduce(flat, group=group, async_op=True).get_future()
    return future.then(lambda done: (done.value()[0] / group.size()).to(bucket.buffer().dtype))


def deferred(model: nn.Module, mesh: Any) -> nn.Module:
    """Leave sums over the domain to the mean over the mesh."""
    groups = [mesh.get_group("domain")]
    for parameter in model.parameters():
        if parameter.requires_grad:
            defer(parameter, groups)
    return model


class Packing(nn.Module):
    """Hands shards on as their local parts: DDP applies an autograd function of its own to what comes out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return _map(ShardTensor, _pack, self.inner(*args, **kwargs))


def by_ddp(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """Wrap in DDP."""
    wrapped = DistributedDataParallel(Packing(deferred(model, mesh)), **options)
    wrapped.register_forward_hook(lambda _, args, output: _map(_Carrier, _unpack, output))
    wrapped.register_comm_hook(dist.group.WORLD, sums_wide)
    return wrapped


WAYS: dict[str, Callable[..., nn.Module]] = {
    "scidata": scidata.parallelize,
    "DDP": by_ddp,
    "DDP, find_unused": lambda model, mesh: by_ddp(model, mesh, find_unused_parameters=True),
    "FSDP2": lambda model, mesh: scidata.parallelize(model, mesh, strategy="fsdp"),
}


def is_right(rank: int, num_ranks: int, way: str, case: str) -> float | str:
    """Return the largest relative error of a gradient after two steps, or what is said."""
    loss, _, domain = CASES[case]
    mesh = scidata.init_mesh(domain=domain, device="cpu")
    dp, num_dp = mesh["dp"].get_local_rank(), mesh["dp"].size()
    alone = Recording()
    model = WAYS[way](copy.deepcopy(alone), mesh)
    try:
        for _ in range(2):  # DDP finds in the second step what the first has left over
            model.zero_grad()
            loss(model, part_of(sample(dp), mesh), dp).backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
    (sum(loss(alone, sample(index), index) for index in range(num_dp)) / num_dp).backward()
    errors = [
        _error(found.grad, expected.grad)
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True)
        if expected.grad is not None or found.grad is not None
    ]
    return max(errors)


def _error(found: Any, expected: Any) -> float:
    found = found.full_tensor() if isinstance(found, DTensor) else found
    if found is None or expected is None:
        return float("nan")  # None on one side only
    return float((found - expected).norm() / (1e-300 + expected.norm()))


def times(rank: int, num_ranks: int, num_steps: int) -> dict[str, list[float]]:
    """Return seconds and CPU seconds of each way's steps, in turns."""
    mesh = scidata.init_mesh(domain=2, device="cpu")
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.GELU())))
    models = {way: WAYS[way](copy.deepcopy(plain), mesh) for way in WAYS}
    x = scidata.scatter_tensor(torch.randn(512, 512), 0, mesh["domain"], (Shard(0),))
    found: dict[str, list[float]] = {f"{way}{kind}": [] for way in WAYS for kind in ("", ", CPU")}
    for step in range(num_steps + 3):
        for way, model in models.items():
            model.zero_grad()
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            (model(x) ** 2).mean().backward()
            if step >= 3:
                found[way].append(time.perf_counter() - began)
                found[f"{way}, CPU"].append(time.process_time() - worked)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    for case, (_, num_ranks, _) in CASES.items():
        print(case)
        for way in WAYS:
            try:
                found = run_ranks(is_right, num_ranks, way, case)[0]
            except Exception as error:
                found = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:150]}"
            print(f"  {way:20} {found if isinstance(found, str) else f'{found:.1e}'}", flush=True)
    found = run_ranks(times, 2, args.steps, timeout=300)
    for way in WAYS:
        step, cpu = (max(1e3 * statistics.median(rank[f"{way}{kind}"]) for rank in found) for kind in ("", ", CPU"))
        print(f"{way:20} {step:7.1f} ms a step, {cpu:7.1f} ms of CPU")


if __name__ == "__main__":
    main()
