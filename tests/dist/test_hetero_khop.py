"""``to_pyg(khop=True)`` of graphs between several node sets: models on ghosts, without exchange, as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import scidata
from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, UnknownNameError, UnsupportedShardOp
from scidata.testing import run_ranks

gnn = pytest.importorskip("torch_geometric.nn", reason="its layers are what is tested")

IN, ON, OUT = ("grid", "to", "mesh"), ("mesh", "near", "mesh"), ("mesh", "to", "grid")
DEPTH = 2
HALO = {"grid__to__mesh": 1, "mesh__near__mesh": DEPTH, "mesh__to__grid": 1}
SIZES: tuple[dict[str, int], ...] = ({"grid": 90, "mesh": 40}, {"grid": 31, "mesh": 2})
#: Cuts of both samples, of which the second has a mesh of two nodes.
LAYOUTS: dict[int, list[Any]] = {
    1: ["even"],
    2: ["even", {0: {"grid": [0, 1, 90], "mesh": [0, 40, 40]}, 1: {"grid": [0, 31, 31], "mesh": [0, 0, 2]}}],
    3: ["even", {0: {"grid": [0, 9, 9, 90], "mesh": [0, 0, 1, 40]}, 1: {"grid": [0, 1, 2, 31], "mesh": [0, 2, 2, 2]}}],
}


def write_graph(path: Path, sizes: dict[str, int], *, seed: int) -> None:
    """Two sets along a line, with edges to what lies near."""
    random = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        for name, num in sizes.items():
            file[f"nodes/{name}/pos"] = np.stack([np.arange(num) / num, random.random(num)], axis=1)
        file["nodes/grid/u"] = random.normal(size=sizes["grid"])
        file["nodes/mesh/area"] = random.normal(size=(sizes["mesh"], 3))
        for source, relation, target in (IN, ON, OUT):
            start = random.integers(0, sizes[source], 3 * max(sizes.values()))
            end = start * sizes[target] // sizes[source] + random.integers(-1, 2, len(start))
            pairs = np.stack([start, np.clip(end, 0, sizes[target] - 1)])
            pairs = np.unique(pairs[:, (start != pairs[1]) | (source != target)], axis=1)
            file[f"edges/{source}__{relation}__{target}/edge_index"] = pairs
            file[f"edges/{source}__{relation}__{target}/length"] = random.normal(size=pairs.shape[1])


class Layer(nn.Module):
    """Messages of edges from one set to another."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.edge, self.node = nn.Linear(2 * dim + 1, dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, y: Tensor, edge_index: Tensor, length: Tensor) -> Tensor:
        told = self.edge(torch.cat([x[edge_index[0]], y[edge_index[1]], length[:, None]], 1)).tanh()
        return y + self.node(torch.cat([y, torch.zeros_like(y).index_add(0, edge_index[1], told)], 1))


class Net(nn.Module):
    """Encode, process, decode."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.embed = nn.ModuleDict({"grid": nn.Linear(3, dim), "mesh": nn.Linear(5, dim)})
        self.encode, self.decode = Layer(dim), Layer(dim)
        self.rounds = nn.ModuleList(Layer(dim) for _ in range(DEPTH))

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor], lengths: dict[Any, Tensor]) -> dict[str, Tensor]:
        grid, mesh = (self.embed[name](x[name]) for name in ("grid", "mesh"))
        mesh = self.encode(grid, mesh, edges[IN], lengths[IN])
        for layer in self.rounds:
            mesh = layer(mesh, mesh, edges[ON], lengths[ON])
        return {"grid": self.decode(mesh, grid, edges[OUT], lengths[OUT]), "mesh": mesh}


class OnData(nn.Module):
    """The same of a ``HeteroData``, of which the grid is what comes out."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, data: Any) -> Tensor:
        return self.net(data.x_dict, data.edge_index_dict, data.length_dict)["grid"]


class Stock(nn.Module):
    """Two layers along all relations, by PyG's own means; GraphConv's target has the set's own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            gnn.HeteroConv({
                IN: gnn.SAGEConv(sizes, 6),
                ON: gnn.GraphConv(sizes[1], 6),
                OUT: gnn.GATConv(sizes[::-1], 6, add_self_loops=False),
            })
            for sizes in ((3, 5), (6, 6))
        )  # fmt: skip

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> dict[str, Tensor]:
        for layer in self.layers:
            x = {name: each.tanh() for name, each in layer(x, edges).items()}
        return x


class Transformer(nn.Module):
    """HGT, which joins the rows of all sets, and so gathers them where they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        meta = ["grid", "mesh"], [IN, ON, OUT]
        self.layers = nn.ModuleList([gnn.HGTConv({"grid": 3, "mesh": 5}, 4, meta, 2), gnn.HGTConv(4, 4, meta, 2)])

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x, edges)
        return x


def made(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return (OnData(Net()) if kind is OnData else kind()).double()


def results_of(kind: type[nn.Module], model: nn.Module, sample: Any) -> tuple[dict[str, Any], Any]:
    data = sample.to_pyg(x={"grid": ["u", "grid/pos"], "mesh": ["area", "mesh/pos"]}, khop=True)
    lengths = {of: data[of].length for of in data.edge_types}
    if kind is OnData:
        return {"grid": sample.call_on_parts(model, data, rows_of="grid")}, data
    if kind is Net:
        return sample.call_on_parts(model, data.x_dict, data.edge_index_dict, lengths), data
    return sample.call_on_parts(model, data.x_dict, data.edge_index_dict), data


def loss_of(kind: type[nn.Module], model: nn.Module, sample: Any) -> Tensor:
    found, data = results_of(kind, model, sample)
    total: Any = 0.0
    for name, rows in found.items():
        per_row = rows.square().sum(1, keepdim=True)
        total = total + gnn.global_mean_pool(per_row, data[name].batch, len(sample.index)).square().sum()
    return total


def sent(mesh: Any) -> int:
    """Collectives so far."""
    groups = [dist.group.WORLD, *(mesh.get_group(i) for i in range(mesh.ndim))]
    return sum(group._get_sequence_number_for_group() for group in {id(g): g for g in groups}.values())


def without_exchange(rank: int, num_ranks: int, store: str) -> None:
    whole: Any = scidata.open_dataset(store)
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    kinds: list[tuple[type[nn.Module], Any]] = [
        (Net, HALO),
        (OnData, [IN, *["mesh__near__mesh"] * DEPTH, OUT]),
        (Stock, 2),
        (Transformer, 2),
    ]
    for kind, halo in kinds:
        model = made(kind)
        loss = loss_of(kind, model, scidata.collate([whole[0], whole[1]]))
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        for bounds in LAYOUTS[num_ranks]:
            for ghosts in ("disk", "exchange") if kind is Net else ("disk",):
                ds: Any = scidata.open_dataset(store, mesh, bounds=bounds, halo=halo, ghosts=ghosts)
                twin = scidata.parallelize(made(kind), mesh)
                for step in range(2):
                    twin.zero_grad()
                    before = sent(mesh)
                    batch = scidata.collate([ds[0], ds[1]])
                    results_of(kind, twin, batch)
                    if ghosts == "disk" and bounds == "even":  # elsewhere too few ghosts for the check to see anything
                        assert (sent(mesh) > before) == (step == 0 and num_ranks > 1)  # once, the check
                    found = loss_of(kind, twin, batch)
                    found.backward()
                    assert abs(found - loss) <= 1e-12 * abs(loss)
                    for parameter, grad in zip(twin.parameters(), grads, strict=True):
                        if grad is None:  # of what HGT has and does not use
                            assert parameter.grad is None or not parameter.grad.any()
                            continue
                        scale = float(grad.abs().max())
                        torch.testing.assert_close(parameter.grad, grad, rtol=1e-10, atol=1e-12 * scale)
    ds = scidata.open_dataset(store, mesh, halo=HALO)
    (batch,) = scidata.DataLoader(ds, batch_size=2, num_workers=0)
    for name, edges in scidata.collate([ds[0], ds[1]]).edge_index_dict_with_ghosts.items():
        assert torch.equal(batch.edge_index_dict_with_ghosts[name], edges)
    if num_ranks > 1:
        check_narrow(store, mesh)


def check_narrow(store: str, mesh: Any) -> None:
    """What is too narrow raises, and so does a result of nobody knows which set."""
    for halo in (1, {**HALO, "mesh__near__mesh": DEPTH - 1}, {"mesh__near__mesh": DEPTH, "mesh__to__grid": 1}):
        narrow: Any = scidata.open_dataset(store, mesh, halo=halo)
        with pytest.raises(UnsupportedShardOp, match=r"Net looks at nodes further away than layers along .*mesh__to"):
            loss_of(Net, made(Net), scidata.collate([narrow[0], narrow[1]]))
    sample: Any = scidata.open_dataset(store, mesh, halo=HALO)[0]
    with pytest.raises(UnsupportedShardOp, match="rows_of="):
        sample.call_on_parts(made(OnData), with_lengths(sample))
    with pytest.raises(UnknownNameError, match="did you mean 'grid'"):
        sample.call_on_parts(made(OnData), with_lengths(sample), rows_of="gird")


def with_lengths(sample: Any) -> Any:
    return sample.to_pyg(x={"grid": ["u", "grid/pos"], "mesh": ["area", "mesh/pos"]}, khop=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("hetero_khop")
    for i, sizes in enumerate(SIZES):
        write_graph(folder / f"{i}.h5", sizes, seed=i)
    scidata.partition([folder / "0.h5", folder / "1.h5"], folder / "store")
    return str(folder / "store")


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loss_and_gradients_of_one_process(store: str, num_ranks: int) -> None:
    run_ranks(without_exchange, num_ranks, store, timeout=150)


def test_ghosts_are_what_layers_need(store: str) -> None:
    """By brute force: rows and edges, from the last layer back, of each part."""
    from scidata.store.reading.reader import StoreReader

    whole = StoreReader(store).read(0, 0)
    for halo in (HALO, 2, {"mesh__to__grid": 1}, [("grid__to__mesh", "mesh__near__mesh")] * 2, 0):
        reader = StoreReader(store, ReadOptions(halo=halo, ghosts="exchange"), num_parts=3)
        for part in range(3):
            local = reader.read(0, part)
            maps = local.index_maps
            needed = {name: set(range(*maps[name].owned)) for name in ("grid", "mesh")}
            edges: dict[str, set[int]] = {name: set() for name in whole.relations}
            own: dict[str, set[int]] = {name: set(range(*maps[name].owned)) for name in whole.relations}
            for layer in reversed(reader.layers):
                before = {name: set(rows) for name, rows in needed.items()}
                for name in layer:
                    source, _, target = name.split("__")
                    into = [i for i, end in enumerate(whole.relations[name][1].tolist()) if end in needed[target]]
                    edges[name] |= set(into)
                    before[source] |= set(whole.relations[name][0, into].tolist())
                needed = before
            for name, every in edges.items():
                needed[name.split("__")[0]] |= set(whole.relations[name][0, sorted(own[name])].tolist())
                assert maps[name].ghosts.tolist() == sorted(every - own[name])
                both = np.concatenate([local.relations[name], local.far_relations[name]], axis=1)
                ends = np.stack([maps[of].to_global(x) for of, x in zip(name.split("__")[::2], both, strict=True)])
                assert np.array_equal(ends, whole.relations[name][:, [*sorted(own[name]), *sorted(every - own[name])]])
            for name in ("grid", "mesh"):
                assert maps[name].ghosts.tolist() == sorted(needed[name] - set(range(*maps[name].owned)))


@pytest.mark.parametrize(
    ("halo", "error", "said"),
    [
        ({"grid__to__mash": 1}, UnknownNameError, "did you mean 'grid__to__mesh'"),
        ({"grid__to__mesh": -1}, ConfigError, "a number of layers, at least 0, not -1"),
        ({"grid__to__mesh": 1.5}, ConfigError, "not 1.5"),
        ([("grid", "to", "moon")], UnknownNameError, "no relation 'grid__to__moon'"),
        ([3], ConfigError, "a layer is a relation, or several, not 3"),
        (0.5, ConfigError, "a whole number of layers along all relations"),
        (True, ConfigError, "a whole number of layers"),
        ("grid__to__mesh", ConfigError, "a whole number of layers"),
    ],
)
def test_halos_that_cannot_be(store: str, halo: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        scidata.open_dataset(store, scidata.init_mesh(domain=1), halo=halo)
    assert said in str(caught.value)
