"""``start_exchange``: the same results and gradients, as many exchanges, and local work between start and end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import scidata
from scidata.errors import UnsupportedShardOp
from scidata.shard.graphs.ghosts import node_tensor
from scidata.shard.graphs.routed import route_edges
from scidata.shard.rows.redistribute import gather_full
from scidata.testing import run_ranks
from tests.dist._graphs import LAYOUTS, NUM_NODES, part_of, whole_edges
from tests.dist._pyg import to_pyg

pytest.importorskip("torch_geometric", reason="to_pyg needs torch_geometric (extra 'pyg')")


def layer(x: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor, log: list[str]) -> torch.Tensor:
    """Messages of a projection; ``log`` gets when the local work was done."""
    h = x @ weight
    scidata.start_exchange(h, edges)
    log.append("local work")
    target = (x * x)[edges[1]]
    scidata.start_exchange(h, edges)  # under way already
    messages = torch.tanh(h[edges[0]] + target) + h[edges[0]]
    return torch.zeros_like(x).index_add(0, edges[1], messages)


def check(rank: int, num_ranks: int, sizes: tuple[int, ...]) -> list[str]:
    torch.manual_seed(0)
    edges = whole_edges()
    x, weight = torch.randn(NUM_NODES, 4).double(), torch.randn(4, 4).double().requires_grad_()
    part = part_of(edges, sizes, rank)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    data = to_pyg(part.edge_index, part.index_map, mesh, node={"x": x[part.nodes].clone().requires_grad_()})
    x.requires_grad_()
    whole = layer(layer(x, edges, weight, []), edges, weight, [])
    whole.square().sum().backward()
    expected, weight.grad = weight.grad, None

    log: list[str] = []
    original = dist.all_to_all_single

    def spy(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 2:  # not of parts that are all as long, as small sums are
            log.append("exchange, async" if kwargs.get("async_op") else "exchange")
        return original(*args, **kwargs)

    dist.all_to_all_single = spy
    try:
        found = layer(layer(data.x, data.edge_index, weight, log), data.edge_index, weight, log)
        forward = list(log)
        found.square().sum().backward()
    finally:
        dist.all_to_all_single = original
    torch.testing.assert_close(gather_full(found.local, found.spec), whole.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)
    grad = data.x.grad
    local = grad.to_local() if isinstance(grad, scidata.ShardTensor) else grad
    torch.testing.assert_close(local, x.grad[part.nodes], rtol=1e-12, atol=1e-12)
    exchanges = sum(size > 0 for size in sizes) > 1
    assert log[len(forward) :] == ["exchange, async"] * 2 * exchanges
    if num_ranks > 1:
        other = scidata.ShardTensor.from_local(
            torch.ones(3, 2), mesh, [Shard(0)], sharding_shapes={0: [(3, 2)] * num_ranks}
        )
        with pytest.raises(UnsupportedShardOp, match="not split as the nodes"):
            scidata.start_exchange(other, data.edge_index)
    return forward


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_as_in_one_process_with_one_exchange_each_way(num_ranks: int) -> None:
    for sizes in LAYOUTS[num_ranks]:
        expected = ["exchange, async", "local work"] * 2 if sum(s > 0 for s in sizes) > 1 else ["local work"] * 2
        assert run_ranks(check, num_ranks, sizes) == [expected] * num_ranks


def test_plain_tensors_pass() -> None:
    x = torch.ones(3, 2)
    scidata.start_exchange(x, torch.tensor([[0, 1], [1, 2]]))


class Late:
    """An exchange that is done when it is waited for, and not a moment before."""

    def __init__(self, log: list[str], name: str, exchange: Any, received: torch.Tensor) -> None:
        self.log, self.name, self.exchange, self.received = log, name, exchange, received

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        self.exchange(self.received)


def check_order(rank: int, num_ranks: int, order: tuple[int, ...]) -> None:
    """Exchanges under way at the same time, ended in any order: each brings its own rows, forward and back."""
    mesh, edges, log = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",)), whole_edges(), []
    part = part_of(edges, LAYOUTS[num_ranks][0], rank)
    e = route_edges(part.edge_index, part.index_map, mesh)
    torch.manual_seed(0)
    plain = [torch.randn(NUM_NODES, width).double().requires_grad_() for width in (1, 2, 3)]
    leaves = [node_tensor(x.detach()[part.nodes].clone().requires_grad_(), part.index_map, mesh) for x in plain]

    def loss(xs: Any, edges: Any) -> Any:
        for x in xs:
            scidata.start_exchange(x, edges)
        return sum((i + 1) * (xs[i][edges[0]] ** 3).sum() for i in order)

    original = dist.all_to_all_single
    num_rows = [len(e[0].exchange.route.rows)]  # that are sent

    def late(received: torch.Tensor, sent: torch.Tensor, *sizes: Any, async_op: bool = False, **how: Any) -> Any:
        if not async_op:
            return original(received, sent, *sizes, **how)
        name = f"{len(sent) // (8 * num_rows[-1])}"  # bytes
        log.append(f"start {name}")
        received.fill_(255)  # NaN
        return Late(log, name, lambda into: original(into, sent, *sizes, **how), received)

    dist.all_to_all_single = late
    try:
        found = loss(leaves, e)
        ended = [f"wait {i + 1}" for i in order]
        assert log == ["start 1", "start 2", "start 3", *ended]
        log.clear()
        num_rows.append(part.index_map.num_ghost)
        found.backward()
    finally:
        dist.all_to_all_single = original
    expected = loss(plain, edges)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(leaves, plain, strict=True):
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad[part.nodes], rtol=1e-12, atol=1e-12)
    # what ended last comes first, and is waited for where its exchange was started
    assert [line for line in log if line.startswith("start")] == [f"start {i + 1}" for i in reversed(order)]
    assert sorted(log) == sorted(f"{what} {i}" for what in ("start", "wait") for i in (1, 2, 3))
    assert all(log.index(f"start {i}") < log.index(f"wait {i}") for i in (1, 2, 3))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_exchanges_end_in_any_order(order: tuple[int, ...]) -> None:
    for num_ranks in (2, 3):
        run_ranks(check_order, num_ranks, order)
