"""Sampled neighbourhoods of a partitioned graph on real ranks, against the whole graph on one process."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import scidata
from scidata.device_mesh import board
from scidata.errors import ConfigError, RankFailedError, ShortReadError, UnknownNameError
from scidata.testing import run_ranks
from tests.writers import write_hdf5

pytest.importorskip("torch_geometric")
NODES, HUB = 300, 7


def graph():
    """Edges by target; one node has an edge from every other, one has none."""
    rng = np.random.default_rng(0)
    pairs = np.unique(rng.integers(0, NODES - 1, (1500, 2)), axis=0)
    pairs = np.concatenate([pairs, [[n, HUB] for n in range(NODES - 1)]])
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).T
    edges = rng.standard_normal((pairs.shape[1], 3))
    return pairs, rng.random((NODES, 3)), rng.standard_normal((NODES, 4)), edges, rng.random(NODES) < 0.4


def levels():
    return np.arange(2.0 * NODES).reshape(2, NODES)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampled")
    pairs, pos, u, edges, train = graph()
    write_hdf5(folder / "g.h5", {"edge_index": pairs, "pos": pos, "u": u, "w": edges, "train": train, "h": levels()})
    scidata.partition(folder / "g.h5", folder / "store")
    return str(folder / "store")


def model():
    from torch_geometric.nn import GINEConv, Sequential

    torch.manual_seed(0)
    layers = [(GINEConv(torch.nn.Linear(4, 4), edge_dim=3), "x, edge_index, edge_attr -> x") for _ in range(2)]
    return Sequential("x, edge_index, edge_attr", layers).double()


def on_the_whole():
    pairs, _, u, edges, _ = graph()
    with torch.no_grad():
        return model()(torch.from_numpy(u), torch.from_numpy(pairs), torch.from_numpy(edges)).numpy()


def epoch(rank, num_ranks, path, dp):
    """One epoch of whole neighbourhoods: seeds, the model's rows of these; the other half of the next, resumed."""
    mesh = scidata.init_mesh(dp=dp, domain=num_ranks // dp, device="cpu")
    ds = scidata.open_dataset(path, mesh)
    made = lambda **more: scidata.NeighborLoader(  # noqa: E731
        ds, more.pop("nums", [-1, -1]), batch_size=20, x="u", edge_attr="w", shuffle=True, **more
    )
    from torch_geometric.utils import k_hop_subgraph

    loader, layers, found = made(input_nodes="train", num_workers=rank), model(), []
    with torch.no_grad():
        for batch in loader:
            assert np.array_equal(batch.pos.numpy(), graph()[1][batch.n_id])
            assert np.array_equal(batch.h.numpy(), levels()[:, batch.n_id].T)
            assert np.array_equal(batch.edge_attr.numpy(), graph()[3][batch.e_id])
            seeds, pairs = batch.n_id[: batch.batch_size], torch.from_numpy(graph()[0])
            assert torch.equal(
                batch.n_id.sort()[0], k_hop_subgraph(seeds, 2, pairs, num_nodes=NODES)[0]
            )  # as PyG finds them
            assert torch.equal(
                batch.e_id.sort()[0],
                torch.isin(pairs[1], k_hop_subgraph(seeds, 1, pairs, num_nodes=NODES)[0]).argwhere()[:, 0],
            )
            assert np.array_equal(batch.n_id[batch.edge_index].numpy(), graph()[0][:, batch.e_id])
            out = layers(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
            found.append((batch.n_id[: batch.batch_size].tolist(), out.numpy()))
    assert len(found) == len(loader)
    few, again = made(nums=[3, 2]), made(nums=[3, 2], num_workers=0)
    for _ in zip(range(2), few, strict=False):
        state = few.state_dict()
    rest = [batch.n_id.tolist() for batch in made(nums=[3, 2])]
    again.load_state_dict(state)
    assert [batch.n_id.tolist() for batch in again] == rest[2:]
    assert [batch.n_id.tolist() for batch in again] != rest  # the next epoch
    assert again.state_dict()["sampler"] == few.state_dict()["sampler"] | {"epoch": 2, "consumed": 0}
    assert (loader.stats()["bytes_fetched"] > 0) == (num_ranks // dp > 1)
    for wrong in ([3, NODES], np.zeros(NODES, bool), np.ones(NODES + 1, bool)):
        with pytest.raises(ConfigError, match="input_nodes, the graph has"):
            made(input_nodes=wrong)
    return found, len(rest)


@pytest.mark.parametrize(("num_ranks", "dp"), [(1, 1), (2, 1), (3, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_whole_neighbourhoods_give_the_rows_of_one_process(store, num_ranks, dp):
    expected, ranks = on_the_whole(), run_ranks(epoch, num_ranks, store, dp)
    seeds = np.concatenate([ids for found, _ in ranks for ids, _ in found])
    assert np.array_equal(np.sort(seeds), np.flatnonzero(graph()[4]))  # each once
    for found, num_steps in ranks:
        assert (len(found), num_steps) == (len(ranks[0][0]), ranks[0][1])
        for ids, out in found:
            np.testing.assert_allclose(out, expected[ids], rtol=1e-12, atol=1e-12)


def fails(rank, num_ranks, path, when):
    """Rank 1 alone meets a fault: of its arguments when the loader is made, or of what it reads beyond its rows."""
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    own = shutil.copytree(path, f"{path}_{when}_{rank}")
    began, wrong = time.monotonic(), "trian" if rank and when == "made" else None
    with pytest.raises((UnknownNameError, ShortReadError, RankFailedError), match=r"trian|csr/src") as caught:
        loader = scidata.NeighborLoader(scidata.open_dataset(own, mesh), [-1, -1], wrong, batch_size=9)
        for file in Path(own).rglob("csr/src/c/*") if rank else ():
            file.write_bytes(b"")
        for _ in loader:
            dist.barrier()
    assert (caught.type is RankFailedError) == (rank == 0)
    posts = board.common_postings()
    posts.wait(["told"]) if rank else posts.post("told", 1)
    return time.monotonic() - began


@pytest.mark.parametrize("when", ["made", "read"])
def test_a_fault_on_one_rank_ends_all(store, when):
    assert max(run_ranks(fails, 2, store, when)) < 10


def test_draws_are_within_what_was_asked(store):
    from torch_geometric.utils import k_hop_subgraph

    ds, (pairs, *_) = scidata.open_dataset(store), graph()
    degrees = np.bincount(pairs[1], minlength=NODES)
    batches = list(scidata.NeighborLoader(ds, [4, 2], input_nodes=[HUB, NODES - 1, 3], batch_size=3, shuffle=True))
    again = list(
        scidata.NeighborLoader(ds, [4, 2], input_nodes=[HUB, NODES - 1, 3], batch_size=3, shuffle=True, seed=1)
    )
    (batch,) = batches
    assert batch.n_id.tolist() != again[0].n_id.tolist()
    into = np.bincount(batch.edge_index[1], minlength=batch.num_nodes)
    hops = np.repeat(np.arange(3), batch.num_sampled_nodes)
    asked = np.array([4, 2, 0])[hops]
    assert np.array_equal(into, np.minimum(degrees[batch.n_id], asked))
    assert len(np.unique(batch.e_id)) == batch.num_edges == sum(batch.num_sampled_edges)
    (batch,) = scidata.NeighborLoader(ds, [4, 2], input_nodes=[HUB, NODES - 1], batch_size=2, replace=True)
    assert np.bincount(batch.edge_index[1], minlength=batch.num_nodes)[:2].tolist() in ([4, 0], [0, 4])
    counts = np.zeros(NODES)
    for seed in range(40):  # the hub's in-edges are drawn equally often
        (batch,) = scidata.NeighborLoader(ds, [20], input_nodes=[HUB], seed=seed, num_workers=0)
        counts[batch.n_id[1:]] += 1
    assert (counts > 0).sum() > 250
    assert 340 < counts[: NODES // 2].sum() < 460  # of 800, deviation 14
    seeds = torch.tensor([5, 9, 20])
    (batch,) = scidata.NeighborLoader(ds, [-1], input_nodes=seeds, batch_size=3, subgraph_type="induced")
    nodes, _, _, inside = k_hop_subgraph(seeds, 1, torch.from_numpy(pairs), num_nodes=NODES)
    assert torch.equal(batch.n_id.sort()[0], nodes)
    assert torch.equal(batch.e_id.sort()[0], inside.argwhere()[:, 0])
    masked = np.zeros(NODES, bool)
    masked[[5, 9]] = True
    (batch,) = scidata.NeighborLoader(ds, [], input_nodes=masked, batch_size=5, subgraph_type="induced")
    assert sorted(batch.n_id.tolist()) == [5, 9]


def test_clusters_have_all_edges_among_their_rows(store):
    ds, (pairs, *_) = scidata.open_dataset(store), graph()
    loader = scidata.ClusterLoader(ds, 7, batch_size=2, shuffle=True, x="u")
    assert len(loader) == 4
    seen = []
    for batch in loader:
        inside = np.isin(pairs, batch.n_id).all(axis=0)
        assert np.array_equal(np.sort(batch.e_id), np.flatnonzero(inside))
        seen += batch.n_id.tolist()
    assert sorted(seen) == list(range(NODES))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"subgraph_type": "bidirectional"}, UnknownNameError, "bidirectional"),
        ({"batch_size": 0}, ConfigError, "batch_size"),
        ({"num_neighbors": [-2]}, ConfigError, "num_neighbors"),
        ({"num_neighbours": [2]}, TypeError, "num_neighbors"),
        ({"input_nodes": "trai"}, UnknownNameError, "train"),
    ],
)
def test_what_means_nothing(store, options, error, words):
    with pytest.raises(error, match=words):
        scidata.NeighborLoader(scidata.open_dataset(store), **{"num_neighbors": [2]} | options)
