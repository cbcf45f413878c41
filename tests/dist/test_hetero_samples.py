"""Graphs between several node sets: from files through a store to samples, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.errors import ConfigError, CorruptDataError, FieldMismatchError, UnknownNameError, UnsupportedFormatError
from scidata.store.format.store import verify
from scidata.testing import run_ranks
from tests.dist._hetero import RELATIONS, write_graph


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("hetero")
    for i, sizes in enumerate(({"grid": 50, "mesh": 17}, {"grid": 31, "mesh": 2})):
        write_graph(path / f"graph{i}.h5", sizes, seed=i)
    for order in ("hilbert", "rcb", "metis", "rows"):
        scidata.partition([path / "graph0.h5", path / "graph1.h5"], path / f"{order}.store", order=order)
        assert verify(str(path / f"{order}.store")) is None
    return path


def check_samples(rank: int, num_ranks: int, folder: str) -> list[int]:
    """Compare samples of all cuts with the file; return the owned rows of each set by order."""
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    sizes = []
    for order in ("hilbert", "rcb", "metis", "rows"):
        store = f"{folder}/{order}.store"
        whole: Any = scidata.open_dataset(store)
        assert len(whole) == 8
        cuts: list[dict[str, Any]] = [{}, {"weights": "edges"}, {"weights": {"grid": 1, "mesh": 5}}]
        if num_ranks == 3:
            cuts.append({"bounds": {"grid": [0, 0, 20, 31], "mesh": [0, 1, 1, 2]}, "isel": None})
        for cut in cuts:
            ds: Any = scidata.open_dataset(store, mesh, **cut)
            for index in (1, 6) if "bounds" not in cut else (6,):
                if "bounds" in cut:  # of the second graph alone
                    ds = scidata.open_dataset(store, mesh, bounds={0: "even", 1: cut["bounds"]})
                check_sample(ds[index], whole[index], f"{folder}/graph{index // 4}.h5", index % 4)
        sample = scidata.open_dataset(store, mesh)[0]
        sizes += [sample.index_map(name).num_owned for name in ("grid", "mesh")]  # type: ignore[union-attr]
    return sizes


def check_sample(sample: Any, whole: Any, path: str, time: int) -> None:
    for name in whole:
        assert torch.equal(sample[name].full_tensor(), whole[name])
    with h5py.File(path) as file:
        rows = whole.original_id("grid")
        assert torch.equal(whole["u"], torch.from_numpy(file["nodes/grid/u"][time])[rows])
        for (source, name, target), pairs in sample.edge_index_dict.items():
            relation = f"{source}__{name}__{target}"
            own, end = sample.index_map(source), sample.index_map(target)
            assert (pairs[1] < end.num_owned).all()
            edge = sample.original_id(relation).to_local()
            given = torch.from_numpy(file[f"edges/{relation}/edge_index"][:])[:, edge]
            found = [
                whole.original_id(source)[torch.from_numpy(own.to_global(pairs[0].numpy()))],
                whole.original_id(target)[torch.from_numpy(end.to_global(pairs[1].numpy()))],
            ]
            assert torch.equal(torch.stack(found), given)
            length = torch.from_numpy(file[f"edges/{relation}/length"][:])[edge]
            assert torch.equal(sample[f"{relation}/length"].to_local(), length)


@pytest.mark.slow_for("1", "2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_samples_are_the_file(folder: Path, num_ranks: int) -> None:
    found = np.array(run_ranks(check_samples, num_ranks, str(folder)))
    assert found.sum(axis=0).tolist() == [50, 17] * 4
    assert found.sum(axis=1).max() - found.sum(axis=1).min() <= 4  # rows of all sets together


def read_ghosts(rank: int, num_ranks: int, folder: str) -> list[str]:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    store = f"{folder}/hilbert.store"
    whole: Any = scidata.open_dataset(store)
    by_disk: Any = scidata.open_dataset(store, mesh, halo=1, ghosts="disk")
    by_exchange: Any = scidata.open_dataset(store, mesh, halo=1)
    for index in range(8):
        sample, other = by_disk[index], by_exchange[index]
        for name, entity in (("u", "grid"), ("area", "mesh"), ("grid/pos", "grid")):
            rows = sample.index_map(entity)
            expected = whole[index][name][torch.from_numpy(rows.to_global(np.arange(rows.num_local)))]
            assert torch.equal(sample.with_ghosts(name), expected)
            assert torch.equal(other.with_ghosts(name), expected)
    batch: Any = scidata.collate([by_exchange[0], by_exchange[5]])
    both = [by_exchange[0], by_exchange[5]]
    for name, num in (("grid", 81), ("mesh", 19)):
        assert batch.index_map(name).num_global == num
        numbers = batch[f"{name}/batch"].full_tensor()
        assert torch.bincount(numbers).tolist() == [s.index_map(name).num_global for s in both]
    for edge_type, pairs in batch.edge_index_dict.items():
        ends = [batch.with_ghosts(f"{of}/batch")[row] for of, row in zip(edge_type[::2], pairs, strict=True)]
        assert torch.equal(*ends)  # no edge leads from one graph to another
        values = batch.with_ghosts(f"{edge_type[0]}/pos")[pairs[0]]
        each = [s.with_ghosts(f"{edge_type[0]}/pos")[s.edge_index_dict[edge_type][0]] for s in both]
        assert torch.equal(values, torch.cat(each))
    loader = scidata.DataLoader(by_exchange, batch_size=2, num_workers=0)
    return [str(tuple(x["u"].shape)) for x in loader]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ghosts_batches_and_the_loader(folder: Path, num_ranks: int) -> None:
    assert run_ranks(read_ghosts, num_ranks, str(folder))[0] == ["(100,)", "(100,)", "(62,)", "(62,)"]


def test_weights_count_edges_in_the_joint_order(tmp_path: Path) -> None:
    write_graph(tmp_path / "graph.h5", {"grid": 700, "mesh": 60})
    scidata.partition(tmp_path / "graph.h5", tmp_path / "store", weights="edges")
    group: Any = zarr.open_group(tmp_path / "store" / "sample-000000.zarr", mode="r")
    expected = np.zeros(760)
    for relation in RELATIONS:
        target = relation.split("__")[2]
        expected[np.flatnonzero(np.diff(group[f"{target}/indptr"][:]))] += np.diff(group[f"{relation}/indptr"][:])
    prefix = group["blocks/weight_prefix"][:]
    assert prefix.tolist() == [0, expected[:512].sum(), expected.sum()]


def test_hetero_data_of_pyg(tmp_path: Path) -> None:
    geometric = pytest.importorskip("torch_geometric.data")
    data = geometric.HeteroData()
    data["paper"].x = torch.randn(9, 3)
    data["author"].num_nodes = 4
    data["author", "writes", "paper"].edge_index = torch.stack([torch.arange(9) % 4, torch.arange(9)])
    data["author", "writes", "paper"].edge_attr = torch.randn(9, 2)
    torch.save(data, tmp_path / "graph.pt")
    with pytest.raises(ConfigError, match="needs coordinates, and node set"):
        scidata.partition(tmp_path / "graph.pt", tmp_path / "a.store")
    scidata.partition(tmp_path / "graph.pt", tmp_path / "graph.store", order="metis")
    sample: Any = scidata.open_dataset(tmp_path / "graph.store")[0]
    found = sample.to_pyg()
    assert found.node_types == ["author", "paper"]
    assert found.edge_types == [("author", "writes", "paper")]
    paper, author = sample.original_id("paper"), sample.original_id("author")
    assert torch.equal(found["paper"].x, data["paper"].x[paper])
    assert found["author"].num_nodes == 4
    edges = sample.original_id("author__writes__paper")
    ends = found["author", "writes", "paper"].edge_index
    assert torch.equal(torch.stack([author[ends[0]], paper[ends[1]]]), data.edge_index_dict[ends_of()][:, edges])
    chosen = sample.to_pyg(y={"paper": "x"}, edge_attr={ends_of(): "edge_attr"})
    assert torch.equal(chosen["paper"].y, found["paper"].x)
    assert "x" not in chosen["paper"]
    with pytest.raises(UnknownNameError, match="did you mean 'paper'"):
        sample.to_pyg(x={"papr": "x"})


def ends_of() -> tuple[str, str, str]:
    return "author", "writes", "paper"


def change(path: Path, name: str, values: Any) -> None:
    with h5py.File(path, "a") as file:
        if name in file:
            del file[name]
        if values is not None:
            file[name] = values


@pytest.mark.parametrize(
    ("name", "values", "error", "said"),
    [
        ("edges/grid__to__mesh/edge_index", [[0, 60], [0, 1]], CorruptDataError, "not among the 50 of grid or the 17"),
        ("edges/grid__to__mesh/edge_index", [[0, 1], [0, -2]], CorruptDataError, "1 of 2 edges"),
        ("edges/grid__to__mesh/edge_index", [[0, 0], [1, 1]], CorruptDataError, "repeat an earlier one"),
        ("edges/mesh__near__mesh/edge_index", [[3, 0], [3, 1]], CorruptDataError, "from a node to itself"),
        ("edges/grid__to__moon/edge_index", [[0], [0]], CorruptDataError, "no node set 'moon'"),
        ("edges/grid__to__mesh/edge_index", [[0], [1], [2]], FieldMismatchError, "(2, num_edges)"),
        ("edges/grid_to_mesh/edge_index", [[0], [0]], FieldMismatchError, "says not of which node sets"),
        ("edges/grid__to__mesh/weight", np.zeros(7), FieldMismatchError, "(7,), and no dimension of 114 rows"),
        ("nodes/mesh/depth", np.zeros((4, 16)), FieldMismatchError, "(4, 16), and no dimension of 17 rows"),
        ("edges/grid__to__mesh/edge_index", [[0.5], [0]], CorruptDataError, "no integers"),
        ("nodes/mesh/pos", None, ConfigError, "node set 'mesh' has none"),
        ("nodes/mesh/pos", np.full((17, 2), np.nan), CorruptDataError, "17 of 17 points"),
        ("nodes/mesh/pos", np.zeros((17, 3)), ConfigError, "2 and 3 coordinates"),
        ("nodes/joint/pos", np.zeros((4, 2)), ConfigError, "'joint' is a name that scidata has"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, name: str, values: Any, error: type[Exception], said: str) -> None:
    path = tmp_path / "graph.h5"
    write_graph(path, {"grid": 50, "mesh": 17})
    for each in RELATIONS if "edges" in name else ():
        change(path, f"edges/{each}/length", None)
    if name == "nodes/mesh/pos" and values is None:
        change(path, "nodes/mesh/num_nodes", 17)
    change(path, name, None if values is None else np.array(values))
    with pytest.raises(error) as caught:
        scidata.partition(path, tmp_path / "out.store")
    assert said in str(caught.value)
    result = CliRunner().invoke(app, ["partition", str(path), str(tmp_path / "out.store")])
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.output.split())
    assert not (tmp_path / "out.store" / "manifest.json").exists()


def test_repairs(tmp_path: Path) -> None:
    path = tmp_path / "graph.h5"
    write_graph(path, {"grid": 50, "mesh": 17})
    with h5py.File(path, "a") as file:
        file["nodes/grid/pos"][7] = np.nan
        pairs, lengths = file["edges/grid__to__mesh/edge_index"][:], file["edges/grid__to__mesh/length"][:]
        pairs[1, 3] = 99
        file["edges/grid__to__mesh/edge_index"][...] = pairs
    scidata.partition(path, tmp_path / "out.store", repair="all")
    assert verify(str(tmp_path / "out.store")) is None
    sample: Any = scidata.open_dataset(tmp_path / "out.store")[0]
    rows = sample.original_id("grid")
    assert sorted(rows.tolist()) == [i for i in range(50) if i != 7]
    edges = sample.original_id("grid__to__mesh")
    expected = [i for i in range(pairs.shape[1]) if i != 3 and pairs[0, i] != 7]
    assert sorted(edges.tolist()) == expected
    assert np.array_equal(sample["grid__to__mesh/length"].numpy(), lengths[edges.numpy()])


def read_with_wrong_options(rank: int, num_ranks: int, folder: str) -> None:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    for options, said in (
        ({"halo": 2.5}, "whole number of layers"),
        ({"weights": {"gird": 1}}, "did you mean 'grid'"),
        ({"weights": "u"}, "a cost by set"),
        ({"weights": {"grid": -1}}, "from 0 on"),
        ({"bounds": {"grid": [0, 50]}}, "none for node set 'mesh'"),
        ({"fields": ["pos"]}, "grid/pos"),
    ):
        with pytest.raises((ConfigError, UnknownNameError)) as caught:
            scidata.open_dataset(f"{folder}/hilbert.store", mesh, **options)[0]  # type: ignore[call-overload]
        assert said in str(caught.value)


def test_options_that_cannot_be(folder: Path) -> None:
    run_ranks(read_with_wrong_options, 1, str(folder))


def test_the_command_line(folder: Path, tmp_path: Path) -> None:
    graph, store = str(folder / "graph0.h5"), str(tmp_path / "out.store")
    for command, said in (
        (["inspect", graph], "kind: hetero"), (["partition", "--dry-run", graph, store], "mesh__near__mesh"),
        (["partition", graph, store], "17 mesh,"), (["verify", store], "17 mesh,"), (["inspect", store], "grid__to__mesh"),
        (["plan", store, "--domain", "3", "--halo", "grid__to__mesh=1,mesh__near__mesh=2"], "mesh__near__mesh >"), (["stats", store], "mesh__to__grid/length"),
    ):  # fmt: skip
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (command, result.output)
        assert said in result.output
    with pytest.raises(UnsupportedFormatError, match="OUT --kind hetero"):
        scidata.open_dataset(graph)


def train_on_parts(rank: int, num_ranks: int, folder: str) -> list[Any]:
    """Gradients of a stock model on a stored graph."""
    nn = pytest.importorskip("torch_geometric.nn")
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    found = []
    both: list[dict[str, Any]] = [{}, {"halo": 1, "ghosts": "disk"}, {"subsample": {"grid": 30, "mesh": 9}}]
    for options in both:
        ds: Any = scidata.open_dataset(f"{folder}/hilbert.store", mesh, weights={"grid": 1, "mesh": 4}, **options)
        data = ds[1].to_pyg(x={"grid": ["u", "grid/pos"], "mesh": ["area", "mesh/pos"]})
        torch.manual_seed(0)
        layers = [
            nn.HeteroConv({
                ("grid", "to", "mesh"): nn.SAGEConv(sizes, 6),
                ("mesh", "near", "mesh"): nn.GraphConv(sizes[1], 6),
                ("mesh", "to", "grid"): nn.GATConv(sizes[::-1], 6, add_self_loops=False),
            }).double()
            for sizes in ((3, 5), (6, 6))
        ]  # fmt: skip
        x = data.x_dict
        for layer in layers:
            x = {name: each.tanh() for name, each in layer(x, data.edge_index_dict).items()}
        loss: Any = sum((each**2).sum() for each in x.values())
        loss.backward()
        gradients = [p.grad for layer in layers for p in layer.parameters()]
        found.append([float(loss.detach()), *(gradient.tolist() for gradient in gradients)])
    return found


@pytest.fixture(scope="module")
def one_process(folder: Path) -> Any:
    return run_ranks(train_on_parts, 1, str(folder))[0]


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_stock_layers_have_the_gradients_of_one_process(folder: Path, one_process: Any, num_ranks: int) -> None:
    for found in run_ranks(train_on_parts, num_ranks, str(folder), timeout=120):
        for ours, theirs in zip(found, one_process, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
