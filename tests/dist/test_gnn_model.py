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
from torch.distributed.device_mesh import init_device_mesh

from scidata.interop.pyg import to_pyg
from scidata.shard.graph import call_on_parts, node_tensor
from scidata.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode has no path of the tests
from _graphs import LAYOUTS, NUM_NODES, khop_part_of, part_of, whole_edges

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
        rows = call_on_parts(net, mesh, held, near, attr[ids])[: deep.num_owned]
        by_hops = gradients((node_tensor(rows, deep, mesh) - data.y).square().mean(), net)
        for found in (by_exchange, by_hops):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, s=sizes: f"{s}: {m}")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_of_one_process(num_ranks: int) -> None:
    run_ranks(check, num_ranks)
