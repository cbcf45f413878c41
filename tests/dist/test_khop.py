"""``to_pyg(khop=True)`` of samples of a store: a model on ghosts, without exchange, with one process's gradients."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import scidata
from scidata.errors import ConfigError, UnsupportedShardOp
from scidata.store.partitioning.partition import partition
from scidata.testing import run_ranks
from tests.writers import write_hdf5

gnn = pytest.importorskip("torch_geometric.nn", reason="its layers are what is tested")
trim_to_layer = pytest.importorskip("torch_geometric.utils").trim_to_layer

SIZES = (90, 31)
FIELDS = ["u", "p", "target", "w"]
#: Cuts of both samples; one-node and empty parts.
LAYOUTS = {
    1: ["even"],
    2: ["even", {0: [0, 1, 90], 1: [0, 31, 31]}],
    3: ["even", {0: [0, 44, 44, 90], 1: [0, 1, 2, 31]}],
}


def write_graph(path: Path, num_nodes: int, seed: int) -> str:
    """A long graph, with isolated nodes."""
    rng = np.random.default_rng(seed)
    src = rng.integers(2, num_nodes, 4 * num_nodes)
    dst = np.clip(src + rng.integers(-2, 3, src.shape), 2, num_nodes - 1)
    edges = np.unique(np.stack([src, dst])[:, src != dst], axis=1)
    arrays = {"pos": np.stack([np.arange(num_nodes), rng.random(num_nodes)], 1), "edge_index": edges}
    for name, width in {"u": 3, "p": 1, "target": 2}.items():
        arrays[f"node/{name}"] = rng.standard_normal((num_nodes, width))
    arrays["edge/w"] = rng.standard_normal((edges.shape[1], 2))
    return write_hdf5(path, arrays)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("khop")
    partition([write_graph(folder / f"{i}.h5", n, i) for i, n in enumerate(SIZES)], folder / "store", kind="graph")
    return str(folder / "store")


class Net(nn.Module):
    """Three hops: GCNConv looks at the degrees of its sources."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.GCNConv(4, 6), gnn.GINEConv(nn.Linear(6, 2), edge_dim=2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).tanh(), edge_index, edge_attr)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def loss_of(model: nn.Module, sample: scidata.IrregularSample) -> Tensor:
    data = sample.to_pyg(x=["u", "p"], y="target", edge_attr="w", khop=True)
    out = sample.call_on_parts(model, data.x, data.edge_index, data.edge_attr)
    error = (out - data.y).square().sum(1, keepdim=True)
    return gnn.global_mean_pool(error, data.batch, len(sample.index)).square().sum()


def sent(mesh: DeviceMesh) -> int:
    """Collectives so far."""
    groups = [dist.group.WORLD, *(mesh.get_group(i) for i in range(mesh.ndim))]
    return sum(group._get_sequence_number_for_group() for group in {id(g): g for g in groups}.values())


def without_exchange(rank: int, num_ranks: int, path: str) -> None:
    whole = scidata.open_dataset(path, fields=FIELDS)
    model = net()
    loss = loss_of(model, scidata.collate([whole[0], whole[1]]))
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    for bounds, ghosts in itertools.product(LAYOUTS[num_ranks], ("disk", "exchange")):
        ds = scidata.open_dataset(path, mesh, fields=FIELDS, bounds=bounds, halo=3, ghosts=ghosts)
        twin = scidata.parallelize(net(), mesh)
        for step in range(2):
            twin.zero_grad()
            before = sent(mesh)
            batch = scidata.collate([ds[0], ds[1]])
            data = batch.to_pyg(x=["u", "p"], y="target", edge_attr="w", khop=True)
            batch.call_on_parts(twin, data.x, data.edge_index, data.edge_attr)
            after = sent(mesh)
            if ghosts == "disk" and bounds == "even":  # elsewhere too few ghosts for the check to see anything
                assert (after > before) == (step == 0 and num_ranks > 1)  # once, the check
            assert isinstance(data.y, scidata.ShardTensor)
            assert type(data.x) is Tensor
            assert len(data.x) == data.num_nodes == batch.index_map("node").num_local
            assert len(data.edge_attr) == data.edge_index.shape[1]
            found = loss_of(twin, batch)
            found.backward()
            assert abs(found - loss) <= 1e-12 * abs(loss)
            for parameter, grad in zip(twin.parameters(), grads, strict=True):
                torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))
    if num_ranks > 1:
        narrow = scidata.open_dataset(path, mesh, fields=FIELDS, halo=2)
        with pytest.raises(UnsupportedShardOp, match="Net looks at nodes more than 2 hops away"):
            loss_of(net(), scidata.collate([narrow[0], narrow[1]]))


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loss_and_gradients_of_one_process(store: str, num_ranks: int) -> None:
    run_ranks(without_exchange, num_ranks, store, timeout=150)


class Trimmed(nn.Module):
    """Three layers, each without what those after it do not need; ``skip`` leaves it out too early."""

    def __init__(self, skip: int = 0, layers: int = 3) -> None:
        super().__init__()
        self.skip = skip
        self.layers = nn.ModuleList(gnn.GINEConv(nn.Linear(4, 4), edge_dim=2) for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, *by_hop: list[int]) -> Tensor:
        for i, layer in enumerate(self.layers):
            if by_hop:
                x, edge_index, edge_attr = trim_to_layer(i + self.skip, *by_hop, x, edge_index, edge_attr)
            x = layer(x, edge_index, edge_attr).tanh()
        return x


def trimmed(**options: int) -> Trimmed:
    torch.manual_seed(0)
    return Trimmed(**options).double()


def by_hops(rank: int, num_ranks: int, path: str) -> None:
    whole = scidata.open_dataset(path, fields=FIELDS)
    batch = scidata.collate([whole[0], whole[1]])
    data = batch.to_pyg(x=["u", "p"], y="target", edge_attr="w", khop=True, by_hop=True)
    assert "num_sampled_nodes" not in data  # nothing to leave out
    model, sage = trimmed(), gnn.GraphSAGE(4, 5, num_layers=3, out_channels=2).double()
    twins = [copy.deepcopy(each) for each in (model, sage)]

    def gradients(models: list[nn.Module], outs: list[Tensor]) -> list[Tensor]:
        loss = sum(out.square().sum() for out in outs)
        loss.backward()
        return [p.grad for each in models for p in each.parameters()]

    expected = gradients([model, sage], [model(data.x, data.edge_index, data.edge_attr), sage(data.x, data.edge_index)])
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    for bounds in reversed(LAYOUTS[num_ranks]):  # the even one last, for what raises
        ds = scidata.open_dataset(path, mesh, fields=FIELDS, bounds=bounds, halo=3, ghosts="disk")
        batch = scidata.collate([ds[0], ds[1]])
        data = batch.to_pyg(x=["u", "p"], y="target", edge_attr="w", khop=True, by_hop=True)
        rows, counts = batch.index_map("node"), (data.num_sampled_nodes, data.num_sampled_edges)
        assert (counts[0][0], sum(counts[0]), len(counts[0])) == (rows.num_owned, rows.num_local, 4)
        assert (sum(counts[1]), len(counts[1])) == (data.edge_index.shape[1], 3)
        for twin in twins:
            twin.zero_grad()
        outs = [
            batch.call_on_parts(twins[0], data.x, data.edge_index, data.edge_attr, *counts),
            batch.call_on_parts(
                twins[1],
                data.x,
                data.edge_index,
                num_sampled_nodes_per_hop=counts[0],
                num_sampled_edges_per_hop=counts[1],
            ),
        ]
        for grad, found in zip(expected, gradients(twins, outs), strict=True):
            torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-12 * float(grad.abs().max()))
    if num_ranks == 1:
        return
    given = data.x, data.edge_index, data.edge_attr
    with pytest.raises(UnsupportedShardOp, match="Trimmed leaves out rows or edges"):
        batch.call_on_parts(trimmed(skip=1), *given, *counts)
    with pytest.raises(UnsupportedShardOp, match=r"more than 3 hops away|of which there may be 3"):
        batch.call_on_parts(trimmed(layers=4), *given, *counts)
    with pytest.raises(UnsupportedShardOp, match="Trimmed looks at nodes more than 3 hops away"):
        batch.call_on_parts(trimmed(layers=4), *given)
    with pytest.raises(UnsupportedShardOp, match="its counts by hops are another"):
        batch.call_on_parts(trimmed(), data.x, batch.edge_index_with_ghosts, data.edge_attr, *counts)
    other = ds[0].to_pyg(x=["u", "p"], khop=True, by_hop=True)
    with pytest.raises(ConfigError, match="counts by hops of"):  # of a model that was checked, too
        batch.call_on_parts(twins[0], *given, other.num_sampled_nodes, other.num_sampled_edges)
    with pytest.raises(UnsupportedShardOp, match="row for each"):
        batch.call_on_parts(trimmed(), *given, *map(list, counts))  # of another order, for all that is known


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_layers_leave_out_what_later_ones_do_not_need(store: str, num_ranks: int) -> None:
    run_ranks(by_hops, num_ranks, store, timeout=150)


def test_a_cloud_has_no_hops(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["points"] = np.random.default_rng(0).random((50, 3))
    partition(tmp_path / "raw.h5", tmp_path / "store", kind="points")
    with pytest.raises(ConfigError, match="has no edges"):
        scidata.open_dataset(str(tmp_path / "store"))[0].to_pyg(khop=True)
