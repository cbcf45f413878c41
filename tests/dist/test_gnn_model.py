"""The example's MeshGraphNet on awkward parts: gradients of one process, by exchange and by k-hop ghosts.

Even parts, parts of one node and empty ones; an isolated node, a node without in-edges, an edge that is there twice.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scidata.shard.graphs.ghosts import _Flight
from scidata.shard.graphs.parts import call_on_parts
from scidata.testing import run_ranks
from tests.dist._graphs import LAYOUTS, NUM_NODES, khop_part_of, part_of, parts_of, whole_edges
from tests.dist._pyg import to_pyg

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="torch_geometric is not installed (extra 'pyg')"
)
DEPTH = 3


def example() -> Any:
    """Load the example as a module."""
    path = Path(__file__).parents[2] / "examples" / "train_gnn.py"
    spec = importlib.util.spec_from_file_location("train_gnn", path)
    assert spec
    assert spec.loader
    sys.modules["train_gnn"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(loss: torch.Tensor, net: torch.nn.Module) -> list[torch.Tensor]:
    assert type(loss) is torch.Tensor
    net.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def check(rank: int, num_ranks: int) -> None:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(0)
    net = example().MeshGraphNet(3, 2, 2, dim=8, depth=DEPTH).double()
    edges = whole_edges()
    x, y = torch.randn(NUM_NODES, 3).double(), torch.randn(NUM_NODES, 2).double()
    attr = torch.randn(edges.shape[1], 2).double()
    expected = gradients((net(x, edges, attr) - y).square().mean(), net)
    assert len(expected) == 1 + len(list(net.parameters()))
    for sizes in LAYOUTS[num_ranks]:
        part = part_of(edges, sizes, rank)
        node, edge = {"x": x[part.nodes], "y": y[part.nodes]}, {"edge_attr": attr[part.edges]}
        data = to_pyg(part.edge_index, part.index_map, mesh, node=node, edge=edge)
        by_exchange = gradients((net(data.x, data.edge_index, data.edge_attr) - data.y).square().mean(), net)

        deep, near, ids = khop_part_of(edges, sizes, rank, DEPTH)
        held = x[torch.from_numpy(deep.to_global(range(deep.num_local)))]
        rows = call_on_parts(net, parts_of(deep, near, DEPTH, mesh), held, near, attr[ids])
        by_hops = gradients((rows - data.y).square().mean(), net)
        for found in (by_exchange, by_hops):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, s=sizes: f"{s}: {m}")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_of_one_process(num_ranks: int) -> None:
    run_ranks(check, num_ranks)


def order_of_work(rank: int, num_ranks: int) -> list[str]:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    net = example().MeshGraphNet(3, 2, 2, dim=8, depth=2).double()
    part = part_of(whole_edges(), LAYOUTS[num_ranks][0], rank)
    num_edges = part.edge_index.shape[1]
    data = to_pyg(
        part.edge_index,
        part.index_map,
        mesh,
        node={"x": torch.randn(part.index_map.num_owned, 3).double()},
        edge={"edge_attr": torch.randn(num_edges, 2).double()},
    )
    log: list[str] = []
    for layer in net.rounds:
        for name in ("source", "edge", "target"):
            getattr(layer, name).register_forward_hook(lambda *_, name=name: log.append(name))
    exchange, wait = dist.all_to_all_single, _Flight.land

    def started(*args: Any, **kwargs: Any) -> Any:
        log.append("exchange starts" if kwargs.get("async_op") else "exchange")
        return exchange(*args, **kwargs)

    def landed(flight: _Flight) -> Any:
        log.append("ghosts wanted")
        return wait(flight)

    dist.all_to_all_single, _Flight.land = started, landed
    try:
        net(data.x, data.edge_index, data.edge_attr)
    finally:
        dist.all_to_all_single, _Flight.land = exchange, wait
    return log


def test_exchange_runs_beside_the_work_on_edges_and_targets() -> None:
    one_round = ["source", "exchange starts", "edge", "target", "ghosts wanted"]
    assert run_ranks(order_of_work, 2) == [one_round * 2] * 2
