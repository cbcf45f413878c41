"""A data set of PyTorch Geometric, partitioned by its folder: every attribute comes back, and a graph's target trains."""

from pathlib import Path
from typing import Any

import pytest
import torch

import scidata
from scidata.sources.groups import samples_of_folder
from scidata.testing import run_ranks
from tests.unit._children import fork_torch_worker

pytest.importorskip("torch_geometric")


def graph(num_nodes: int, num_edges: int) -> Any:
    """A graph with every sort of attribute; without self-loops and edges that are there twice."""
    from torch_geometric.data import Data

    every = torch.combinations(torch.arange(num_nodes)).T
    edges = torch.cat([every, every.flip(0)], dim=1)
    edges = edges[:, torch.randperm(edges.shape[1])[:num_edges]]
    return Data(
        x=torch.rand(num_nodes, 3, dtype=torch.float64), pos=torch.rand(num_nodes, 3, dtype=torch.float64),
        edge_index=edges, edge_attr=torch.rand(edges.shape[1], 4, dtype=torch.float64),
        bond=torch.arange(edges.shape[1]), y=torch.rand(1, 2, dtype=torch.float64), train_mask=torch.rand(num_nodes) > 0.5,
        z=torch.arange(num_nodes), smiles=f"C{num_nodes}", u=torch.rand(1, dtype=torch.float64), tags=["a", num_nodes],
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five graphs, of which one has one node, one has none, and one has no edges, as ``InMemoryDataset`` keeps them."""
    from torch_geometric.data import InMemoryDataset

    path = tmp_path_factory.mktemp("met")
    (path / "root/processed").mkdir(parents=True)
    torch.manual_seed(0)
    graphs = [graph(7, 12), graph(1, 0), graph(0, 0), graph(5, 0), graph(4, 9)]
    InMemoryDataset.save(graphs, str(path / "root/processed/data.pt"))
    torch.save(None, path / "root/processed/pre_filter.pt")
    torch.save(graphs, path / "graphs.pt")
    with pytest.MonkeyPatch.context() as patch:
        fork_torch_worker(patch)
        assert len(samples_of_folder(str(path / "root"))) == 5
        report = scidata.partition(path / "root", path / "root.store")
    assert not any(report.notes.values())
    return path


def model() -> Any:
    from torch_geometric.nn import GraphConv

    torch.manual_seed(1)
    return torch.nn.ModuleList([GraphConv(3, 8), GraphConv(8, 8), torch.nn.Linear(8, 2)]).double()


def loss_of(net: Any, data: Any, batch: Any, num_graphs: int) -> Any:
    from torch_geometric.nn import global_add_pool

    x = net[1](net[0](data.x, data.edge_index).relu(), data.edge_index).relu()
    return torch.nn.functional.mse_loss(net[2](global_add_pool(x, batch, size=num_graphs)), data.y)


def read(rank: int, size: int, folder: str) -> list[torch.Tensor]:
    mesh = scidata.init_mesh(domain=size)
    ds = scidata.open_dataset(f"{folder}/root.store", mesh)
    graphs = torch.load(f"{folder}/graphs.pt", weights_only=False)
    whole = lambda x: x.full_tensor() if isinstance(x, scidata.ShardTensor) else x  # noqa: E731
    for i, want in enumerate(graphs):
        sample = ds[i]
        made, rows = sample.to_pyg(), whole(sample.original_id("node"))
        edges, values = whole(sample.original_id("edge")), {name: whole(made[name]) for name in made.keys()}  # noqa: SIM118
        assert values.pop("num_nodes") == want.num_nodes
        assert set(values) == set(want.keys())
        for name, value in values.items():
            if name == "edge_index":
                assert torch.equal(rows[value], want.edge_index[:, edges])
            elif isinstance(value, torch.Tensor):
                order = (
                    rows if name in ("x", "pos", "z", "train_mask") else edges if name in ("edge_attr", "bond") else ...
                )
                assert value.dtype == want[name].dtype, name
                assert torch.equal(value, want[name][order]), name
            else:
                assert value == want[name], name
    net = scidata.parallelize(model(), mesh)
    for batch in scidata.DataLoader(ds, batch_size=5, num_workers=0):
        data = batch.to_pyg()
        assert data.smiles == [each.smiles for each in graphs]
        loss_of(net, data, data.batch, 5).backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_data_set_of_graphs_comes_back_and_trains_on_graph_targets(folder: Path, num_ranks: int) -> None:
    from torch_geometric.data import Batch

    whole = Batch.from_data_list(torch.load(folder / "graphs.pt", weights_only=False))
    net = model()
    loss_of(net, whole, whole.batch, 5).backward()
    for grads in run_ranks(read, num_ranks, str(folder), timeout=300):
        for got, p in zip(grads, net.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad, rtol=1e-12, atol=1e-14)
