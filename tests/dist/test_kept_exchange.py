"""Who sends what is found once per topology, whatever each rank keeps of what it read."""

import importlib

import numpy as np
import pytest
import torch
import torch.distributed as dist

import scidata
from scidata.errors import UnsupportedShardOp
from scidata.shard.graphs.ghosts import ghost_exchange
from scidata.store.partitioning.partition import partition
from scidata.testing import run_ranks
from tests.writers import triangulation, write_hdf5


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange")
    for case in range(2):
        rng = np.random.default_rng(case)
        mesh = triangulation(rng.random((150, 2)))
        fields = {"node/u": rng.standard_normal((3, 150))}
        write_hdf5(folder / f"case{case}.h5", mesh | fields, {"node/u": ["time"]})
    partition(sorted(folder.glob("*.h5")), folder / "store")
    return str(folder / "store")


def calls(mesh):
    return mesh.get_group("domain")._get_sequence_number_for_group()


def once_per_topology(rank, num_ranks, path):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    group = mesh.get_group("domain")
    # rank 0 keeps nothing, the others all: what is collective must not depend on it
    ds = scidata.open_dataset(path, mesh, halo=1, ghosts="exchange", cache_bytes=0 if rank == 0 else None)
    disk = scidata.open_dataset(path, mesh, halo=1)
    cost, kept = [], []
    for index in (0, 1, 3, 2, 4, 0):
        sample = ds[index]
        before = calls(mesh)
        found = sample.with_ghosts("u")
        cost.append(calls(mesh) - before)
        assert torch.equal(found, disk[index].with_ghosts("u"))
        kept.append(sample)
    assert cost[0] == cost[2] > 1  # the first of each topology
    assert {cost[i] for i in (1, 3, 4, 5)} == {1}
    batches = [scidata.collate([ds[i], ds[j]]) for i, j in ((0, 4), (1, 5), (3, 0))]
    cost = []
    for batch in batches:
        before = calls(mesh)
        batch.with_ghosts("u")
        cost.append(calls(mesh) - before)
    assert cost[1] == 1 < cost[0] == cost[2]
    exchanges = [ghost_exchange(s.index_map("node"), group) for s in (kept[0], kept[2])]
    assert exchanges[0] is ghost_exchange(kept[1].index_map("node"), group)
    graph = importlib.import_module("scidata.shard.graphs.ghosts")  # scidata.shard.ops has a module of that name, too
    graph.KEPT.max_size = exchanges[0].nbytes + exchanges[1].nbytes
    fresh = scidata.open_dataset(path, mesh, halo=1, ghosts="exchange", cache_bytes=0 if rank == 1 else None)
    for index in (0, 1, 3, 0, 4, 1, 3):  # ranks evict alike, or one would hang here
        assert torch.equal(fresh[index].with_ghosts("u"), disk[index].with_ghosts("u"))
        assert graph.KEPT.size <= graph.KEPT.max_size
    sizes = [None] * num_ranks
    dist.all_gather_object(sizes, [e.nbytes for e in graph.KEPT._entries.values()])
    assert all(size == sizes[0] for size in sizes)
    assert exchanges[0].nbytes >= 8 * kept[0].index_map("node").num_local


def test_exchanges_are_made_once_per_topology(store):
    run_ranks(once_per_topology, 3, store, timeout=120)


def test_an_exchange_goes_with_a_map_that_has_no_key():
    graph = importlib.import_module("scidata.shard.graphs.ghosts")
    rows = scidata.IndexMap(bounds=np.array([0, 3]), part=0, ghosts=np.array([], dtype=np.int64))
    exchange = graph.ghost_exchange(rows, None)
    assert graph.ghost_exchange(rows, None) is exchange
    before = len(graph._OF_MAPS)
    del rows
    assert len(graph._OF_MAPS) == before - 1


def kept_rows(rank, num_ranks, path):
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    data, whole = (scidata.open_dataset(path, on)[0].to_pyg(x="u") for on in (mesh, None))
    sources = data.edge_index[0]
    assert data.edge_index[0] is sources
    for index in (data.edge_index, whole.edge_index):
        index[:, :3] = 0  # what was taken before shows it, as a view does
        index[0].mul_(1)
    ends = whole.edge_index[0].clone()
    assert torch.equal(sources.to_local(), data.edge_index.to_local()[0])
    found = data.x[data.edge_index[0]].sum()
    assert torch.allclose(found.full_tensor() if hasattr(found, "full_tensor") else found, whole.x[ends].sum())
    with pytest.raises(UnsupportedShardOp):
        sources.unsqueeze_(0)
    assert data.edge_index[0].shape == ends.shape


def test_rows_of_an_edge_index_are_kept_and_stay_views(store):
    pytest.importorskip("torch_geometric")
    run_ranks(kept_rows, 2, store)
