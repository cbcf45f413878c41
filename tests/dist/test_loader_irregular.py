"""``DataLoader`` on a real store and real ranks: samples, unions, and that nothing communicates."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import scidata
from scidata.testing import run_ranks
from tests.writers import write_hdf5

SIZES = (23, 9, 40, 1, 17)


def raw(index: int) -> dict[str, np.ndarray]:
    """A ring of nodes with a chord from each, and a value on every node and edge."""
    count = SIZES[index]
    nodes = np.arange(count)
    edges = np.stack([np.r_[nodes, nodes], np.r_[(nodes + 1) % count, (nodes * 7 + 3) % count]])
    edges = np.unique(edges[:, edges[0] != edges[1]], axis=1)
    rng = np.random.default_rng(index)
    fields = {"node/u": rng.standard_normal((count, 2)), "edge/w": rng.standard_normal(edges.shape[1])}
    return {"edge_index": edges, "pos": rng.random((count, 2)), **fields}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("loader")
    for index in range(len(SIZES)):
        write_hdf5(folder / f"{index}.h5", raw(index))
    scidata.partition([str(folder / f"{i}.h5") for i in range(len(SIZES))], str(folder / "store"), kind="graph")
    return str(folder / "store")


def full(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, scidata.ShardTensor) else x


def check_sample(sample: Any) -> None:
    """Every node's values, and what its in-edges bring, are the file's."""
    expected = raw(sample.index)
    ids = full(sample.original_id("node"))
    u = np.empty_like(expected["node/u"])
    u[ids] = full(sample["u"])
    assert np.array_equal(u, expected["node/u"])
    w = np.empty_like(expected["edge/w"])
    w[full(sample.original_id("edge"))] = full(sample["w"])
    assert np.array_equal(w, expected["edge/w"])


def received(data: Any) -> torch.Tensor:
    """What each node gets from its neighbours, weighted."""
    source, target = data.edge_index[0], data.edge_index[1]
    return torch.zeros_like(data.u).index_add(0, target, data.u[source] * data.w.unsqueeze(1))


def check_batch(batch: Any) -> None:
    """The union gives every sample what it gets alone."""
    data = batch.to_pyg()
    sums = torch.zeros(len(batch.index), 2, dtype=torch.float64)
    sums = sums.index_add(0, data.batch, received(data).square())
    for row, index in enumerate(batch.index):
        one = raw(index)
        source, target = one["edge_index"]
        alone = np.zeros_like(one["node/u"])
        np.add.at(alone, target, one["node/u"][source] * one["edge/w"][:, None])
        np.testing.assert_allclose(full(sums)[row].numpy(), (alone**2).sum(axis=0), rtol=1e-12, atol=1e-12)
    assert batch.num_nodes == sum(SIZES[i] for i in batch.index)


def one_domain(rank: int, num_ranks: int, path: str) -> None:
    mesh = scidata.init_mesh(domain=num_ranks)
    for options in ({}, {"halo": 1}):
        ds = scidata.open_dataset(path, mesh, **options)
        loader = scidata.DataLoader(ds, batch_size=None)
        for step, sample in enumerate(loader):
            assert sample.index == step
            check_sample(sample)
        for num_workers in (0, 2):
            batches = list(scidata.DataLoader(ds, 2, num_workers=num_workers))
            assert [batch.index for batch in batches] == [[0, 1], [2, 3], [4]]
            for batch in batches:
                check_batch(batch)
    stats = loader.stats()
    assert (stats["batches"], stats["samples"]) == (5, 5)
    assert stats["bytes_fetched"] > stats["bytes"] > 0
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("scidata-reader")]


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_samples_and_unions_on_one_domain(store: str, num_ranks: int) -> None:
    pytest.importorskip("torch_geometric", reason="to_pyg needs torch_geometric (extra 'pyg')")
    run_ranks(one_domain, num_ranks, store)


def test_without_a_mesh(store: str) -> None:
    pytest.importorskip("torch_geometric", reason="to_pyg needs torch_geometric (extra 'pyg')")
    ds = scidata.open_dataset(store)
    for sample in scidata.DataLoader(ds, batch_size=None):
        check_sample(sample)
    for batch in scidata.DataLoader(ds, 3):
        check_batch(batch)


def two_domains(rank: int, num_ranks: int, path: str) -> list[list[int]]:
    mesh = scidata.init_mesh(dp=2, domain=num_ranks // 2)
    loader = scidata.DataLoader(scidata.open_dataset(path, mesh), 2, True)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([index for batch in loader for index in batch.index])
    return epochs


def test_domains_share_the_samples(store: str) -> None:
    epochs = run_ranks(two_domains, 4, store)
    assert epochs[0] == epochs[1]  # one domain, one order
    assert epochs[2] == epochs[3]
    for first, second in zip(epochs[0], epochs[2], strict=True):
        assert set(first) | set(second) == set(range(len(SIZES)))


def alone(rank: int, num_ranks: int, path: str) -> None:
    ds = scidata.open_dataset(path, scidata.init_mesh(domain=num_ranks), halo=1)
    if rank == 0:  # the others never come: a collective would hang, and fail the test at its timeout
        for batch in scidata.DataLoader(ds, 2):
            assert len(batch.with_ghosts("u")) == batch.index_map("node").num_local
    dist.barrier()


def test_a_rank_iterates_without_the_others(store: str) -> None:
    run_ranks(alone, 2, store, timeout=40)


def broken(rank: int, num_ranks: int, path: str) -> str:
    ds = scidata.open_dataset(path, scidata.init_mesh(domain=num_ranks))
    iterator = iter(scidata.DataLoader(ds, batch_size=None))
    assert next(iterator).index == 0
    with pytest.raises(scidata.errors.SciDataError) as caught:
        list(iterator)
    assert not [t for t in threading.enumerate() if t.name.startswith("scidata-reader")]
    # the other rank's error, where that one was first
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_a_damaged_sample_raises_in_its_turn(store: str, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(store, tmp_path / "copy")
    (chunk,) = [
        p for p in (copy / "sample-000001.zarr" / "node" / "u").rglob("*") if p.name != "zarr.json" and p.is_file()
    ]
    chunk.write_bytes(bytes(chunk.stat().st_size))
    for note in run_ranks(broken, 2, str(copy)):
        assert "sample 1 (number 0 of batch 1)" in note


def test_counts_of_rows_for_samplers(store: str) -> None:
    ds = scidata.open_dataset(store)
    assert ds.counts().tolist() == list(SIZES)
    assert ds.counts("edge").tolist() == [raw(i)["edge_index"].shape[1] for i in range(len(SIZES))]
    with pytest.raises(scidata.errors.UnknownNameError, match="'face'"):
        ds.counts("face")
    sampler = scidata.DistributedSampler(ds, sizes=ds.counts(), group=2)
    assert sorted(sampler) == list(range(5))
