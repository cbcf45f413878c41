"""Exchanges of some ranks with few others each, which send and receive by themselves: as one process computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata
from scidata.core.index_map import IndexMap
from scidata.device_mesh.torch_internals import num_started
from scidata.errors import CorruptDataError, RankFailedError
from scidata.shard import ShardSpec
from scidata.shard.comm.transport import count_sent
from scidata.shard.graphs.ghosts import PendingHalo, ghost_exchange, halo_exchange
from scidata.shard.rows.runs import halo_exchange_dim
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests._collectives import Collectives
from tests.dist.test_watch_collectives import BAD, Rows

ROWS = 19
#: Even, uneven, with parts without rows at the ends and in the middle.
LAYOUTS = {
    5: [(7, 0, 5, 0, 7), (0, 9, 0, 10, 0)],
    8: [(3, 3, 3, 2, 2, 2, 2, 2), (1, 5, 1, 1, 4, 1, 5, 1), (0, 6, 0, 4, 1, 0, 8, 0)],
}
KERNEL = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WIDE = torch.randn(2, 2, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
BACK = torch.randn(2, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

OPS: dict[str, Callable[[Any], Any]] = {
    "conv": lambda x: F.conv2d(x, KERNEL, padding=1),
    "conv, beyond the neighbour": lambda x: F.conv2d(x, WIDE, padding=(4, 1)),
    "conv, transposed": lambda x: F.conv_transpose2d(x, BACK, stride=2, padding=1),
    "pools": lambda x: [F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, (7, 2))],
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 2, 3, 5), mode="circular"),
    "roll": lambda x: [x.roll(2, 2), x.roll((-7, 1), (2, 3))],
    "flip": lambda x: x.flip(2),
    "rows": lambda x: [x[:, :, 7], x[:, :, -1], x[:, :, ::3], x[:, :, torch.tensor([18, 0, 3])]],
    "cat": lambda x: torch.cat([x, x * 2], 2),
    "reshape": lambda x: [x.reshape(1, -1), x.permute(2, 0, 1, 3).reshape(38, 4)],
    "sort": lambda x: [x.sort(2)[0], x.cumsum(2), x.softmax(2), x.var(2)],
    "columns": lambda x: [torch.fft.fft(x, dim=2).abs(), x.cumprod(2)],
}


def of_gradient(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The sum of squares of a gradient that has a graph: its own gradient is a second derivative."""

    def function(x: Any) -> Any:
        y = op(x)
        (grad,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
        return (grad * grad).sum()

    return function


def check_ops(rank: int, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(0)
    x = torch.randn(1, 2, ROWS, 4, dtype=torch.float64, requires_grad=True)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(2)], x.shape, {0: sizes})
        with Collectives() as spy:
            shard_of(x, spec).roll(1, 2)
        assert not any("alltoall" in name for name in spy.names), (sizes, spy.names)
        for name, op in OPS.items():
            try:
                assert_like_one_process(op, [x], [spec])
            except BaseException as error:
                raise AssertionError(f"{name}: {sizes}") from error
        for name in ("conv", "conv, beyond the neighbour", "interpolate", "pad", "roll", "reshape"):
            again = OPS[name] if name not in ("roll", "reshape") else lambda x, name=name: OPS[name](x)[0]
            try:
                assert_like_one_process(of_gradient(again), [x], [spec], rtol=1e-10)
            except BaseException as error:
                raise AssertionError(f"{name}, second derivative: {sizes}") from error
        check_halos(rank, sizes)
    assert len({tuple(sorted(each.items())) for each in all_started(num_ranks)}) == 1


def check_halos(rank: int, sizes: tuple[int, ...]) -> None:
    """Halos that wrap, wider than a part, or than some."""
    group = dist.group.WORLD
    whole = torch.arange(ROWS, dtype=torch.float64)
    start = sum(sizes[:rank])
    for lo, hi in ((1, 1), (6, 0), (2, 9)):
        own = whole[start : start + sizes[rank]].clone().requires_grad_()
        found = halo_exchange_dim(own, sizes, 0, lo, hi, True, group)
        rows = torch.arange(start - lo, start + sizes[rank] + hi) % ROWS if sizes[rank] else torch.arange(0)
        assert torch.equal(found, whole[rows]), (sizes, lo, hi)
        found.sum().backward()
        held = torch.zeros(ROWS, dtype=torch.float64)
        for other, size in enumerate(sizes):
            first = sum(sizes[:other])
            for row in range(first - lo, first + size + hi) if size else ():
                held[row % ROWS] += 1
        assert torch.equal(own.grad, held[start : start + sizes[rank]]), (sizes, lo, hi)


def all_started(num_ranks: int) -> list[dict[str, int]]:
    """Return how many collectives each rank has begun in each group: the watch of hung ones compares these."""
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, num_started())
    return found


@pytest.mark.slow_for("8")
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_operations(num_ranks: int) -> None:
    run_ranks(check_ops, num_ranks, timeout=240)


def check_graph(rank: int, num_ranks: int) -> None:
    """Two ghosts on either side in a ring of nodes, one rank without nodes."""
    group, sizes = dist.group.WORLD, [4] * (num_ranks - 1) + [0]
    bounds = np.r_[0, np.cumsum(sizes)]
    num_nodes, (start, stop) = int(bounds[-1]), bounds[rank : rank + 2]
    beside = np.r_[start - 2 : start, stop : stop + 2] % num_nodes if sizes[rank] else np.zeros(0, np.int64)
    rows = IndexMap(bounds=bounds, part=rank, ghosts=np.unique(beside))
    plan = ghost_exchange(rows, group)
    assert (plan.num_ghosts, plan.route.pairs) == (4 * (num_ranks - 1), 2 * (num_ranks - 1))
    assert len(plan.route.sent) == len(plan.route.held) == (2 if sizes[rank] else 0)
    whole = torch.randn(num_nodes, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.from_numpy(np.r_[start:stop, rows.ghosts])
    for exchange in (halo_exchange, lambda x, rows, group: PendingHalo(x, ghost_exchange(rows, group)).wait()):
        own = whole[start:stop].clone().requires_grad_()
        sent = count_sent()
        with Collectives() as spy:
            found = exchange(own, rows, group)
            found.square().sum().backward()
        assert not any("alltoall" in name for name in spy.names), spy.names
        assert count_sent() - sent == 2 * 4 * 24 * bool(sizes[rank])
        assert torch.equal(found, whole[ids])
        torch.testing.assert_close(own.grad, 4 * whole[start:stop], rtol=1e-12, atol=1e-12)  # its own, and one copy
    assert len({tuple(sorted(each.items())) for each in all_started(num_ranks)}) == 1


def test_ghosts() -> None:
    run_ranks(check_graph, 8)


def check_rooted(rank: int, num_ranks: int) -> None:
    group, sizes = dist.group.WORLD, (2, 0, 1, 3, 0)
    part = torch.full((sizes[rank],), float(rank), requires_grad=True)
    with Collectives() as spy:
        whole = scidata.gather_v(part, sizes=sizes, dim=0, dst=2, group=group)
        back = scidata.scatter_v(whole if rank == 2 else None, sizes=sizes, dim=0, src=2, group=group)
    assert not any("alltoall" in name for name in spy.names), spy.names
    assert torch.equal(back.detach(), part.detach())
    assert whole.tolist() == ([0, 0, 2, 3, 3, 3] if rank == 2 else [])


def test_to_a_root_and_back() -> None:
    run_ranks(check_rooted, 5)


def check_failure(rank: int, num_ranks: int, folder: str) -> None:
    """Each rank gets a row of the one before it, and the last one fails: all hear of it, also who does not wait for it."""
    mesh = scidata.init_mesh(domain=num_ranks)
    loader = scidata.DataLoader(Rows(mesh, "error", folder), 1, num_workers=0)
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises((RankFailedError, CorruptDataError)) as caught:
        for i, batch in enumerate(loader):
            if i == BAD:
                Path(folder, str(rank)).touch()
            local, shapes = batch["x"], {0: ((1, 3),) * num_ranks}
            rows = scidata.ShardTensor.from_local(local, mesh["domain"], [Shard(0)], sharding_shapes=shapes)
            with Collectives() as spy:
                rows.roll(1, 0)
            assert not any("alltoall" in name for name in spy.names), spy.names
    if rank == num_ranks - 1:
        assert caught.type is CorruptDataError
        store.wait([f"back/{other}" for other in range(rank)])
    else:
        assert caught.type is RankFailedError
        assert caught.value.rank == num_ranks - 1
        store.set(f"back/{rank}", "")


def test_a_failure_ends_the_waiting_of_neighbours_and_of_theirs(tmp_path: Path) -> None:
    run_ranks(check_failure, 5, str(tmp_path))
