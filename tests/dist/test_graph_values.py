"""Values of a whole graph: kept exactly, the same on every rank, back in PyTorch Geometric's containers."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import scidata
from scidata.errors import FieldMismatchError, UnknownNameError
from scidata.store.format.store import verify
from scidata.testing import run_ranks


def write_graph(path: Path, *, number: int = 0) -> None:
    with h5py.File(path, "w") as file:
        file["edge_index"] = np.array([[0, 1, 1, 2], [1, 0, 2, 1]])
        file["num_nodes"] = 7 + number  # the last nodes have no edges
        file["node/x"] = np.arange(7.0 + number)
        file["graph/y"] = np.array([[np.nan, np.inf, 1e-300, number]])
        file["graph/u"] = np.float32(1 + number)
        file["graph/n"] = np.array([2**63 - 1])
        file["graph/large"] = np.zeros(1 << 14)


def write_sets(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["nodes/a/x"], file["nodes/b/num_nodes"] = np.arange(4.0), np.array([3])
        file["edges/a__to__b/edge_index"] = np.array([[0, 1], [1, 2]])
        file["graph/y"], file["graph/a/z"], file["graph/a__to__b/t"] = np.ones(2), np.arange(3), np.zeros((1, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values")
    for number in range(2):
        write_graph(path / f"g{number}.h5", number=number)
    scidata.partition(sorted(path.glob("g*.h5")), path / "graph.store", order="rows")
    write_sets(path / "sets.h5")
    report = scidata.partition(path / "sets.h5", path / "sets.store", order="rows")
    assert not any(report.notes.values())
    return path


def read(rank: int, size: int, folder: str) -> int:
    mesh = scidata.init_mesh(domain=size)
    torch_geometric = pytest.importorskip("torch_geometric")
    ds = scidata.open_dataset(f"{folder}/graph.store", mesh, halo=1)
    for i in range(2):
        sample = ds[i]
        assert sample.num_nodes == 7 + i
        assert set(sample.graph_values) == {"y", "u", "n"}
        for data in (sample.to_pyg(), sample.to_pyg(khop=True), sample.to(torch.float32).to_pyg()):
            y = data.y.double()
            assert y.shape == (1, 4)
            assert y[0, 0].isnan()
            assert y[0, 3] == i
            assert data.u == 1 + i
            assert data.u.ndim == 0
        assert sample.to_pyg().n.tolist() == [2**63 - 1]
        assert float(sample.to_pyg(y="x").y.sum()) == sum(range(7 + i))  # what is asked for is before a value
    (batch,) = scidata.DataLoader(ds, batch_size=2, num_workers=0)
    assert batch.graph_values["y"][:, 3].tolist() == [0, 1]
    assert batch.to_pyg().u.tolist() == [1, 2]
    sets: Any = scidata.open_dataset(f"{folder}/sets.store", mesh)[0]
    for data in (sets.to_pyg(), sets.to_pyg(khop=True)):
        assert isinstance(data, torch_geometric.data.HeteroData)
        assert data.y.tolist() == [1, 1]
        assert data["a"].z.tolist() == [0, 1, 2]
        assert data["a", "to", "b"].t.shape == (1, 4)
    return rank


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_values_of_a_graph_come_back(folder: Path, num_ranks: int) -> None:
    assert run_ranks(read, num_ranks, str(folder)) == list(range(num_ranks))


def test_values_that_are_too_large_or_not_chosen_and_samples_that_differ(folder: Path, tmp_path: Path) -> None:
    report = scidata.partition(folder / "g0.h5", tmp_path / "a.store", order="rows", fields=["x", "u"])
    assert set(scidata.open_dataset(tmp_path / "a.store")[0].graph_values) == {"u"}
    report = scidata.partition(folder / "g0.h5", tmp_path / "b.store", order="rows")
    assert "graph/large (takes 131072 bytes; values of the whole take 65536 at most" in str(report.notes)
    with h5py.File(tmp_path / "row.h5", "w") as file:
        file["edge_index"], file["x"] = np.array([[0, 1], [1, 0]]), np.arange(4.0)
        file["num_nodes"], file["y"], file["series"] = 4, np.zeros((1, 4)), np.zeros((3, 4))
    report = scidata.partition(tmp_path / "row.h5", tmp_path / "row.store", order="rows")
    assert "may be one step of a field or a value of the whole" in str(report.notes)
    assert set(scidata.open_dataset(tmp_path / "row.store").fields) == {"x", "series"}
    with pytest.raises(UnknownNameError, match="no field 'v'"):
        scidata.partition(folder / "g0.h5", tmp_path / "c.store", order="rows", fields=["v"])
    with h5py.File(tmp_path / "g2.h5", "w") as file:
        file["edge_index"], file["node/x"] = np.array([[0, 1], [1, 0]]), np.arange(2.0)
    with pytest.raises(FieldMismatchError, match="values of the whole"):
        scidata.partition([folder / "g0.h5", tmp_path / "g2.h5"], tmp_path / "d.store", order="rows")
    verify(tmp_path / "b.store")
