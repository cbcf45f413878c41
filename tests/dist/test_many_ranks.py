"""One store for 2 to 64 ranks: each reads about its share, its ghosts and the rest of their chunks, and sends nothing."""

import h5py
import numpy as np
import pytest
import torch.distributed as dist

import scidata
from scidata.plan.spans import MAX_GAP
from scidata.store.format.store import open_store
from scidata.store.partitioning.partition import partition
from scidata.testing import fake_group
from tests._collectives import Collectives

SIDE = 320  # nodes along each edge of a square: 100 chunks


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    corner = (np.arange(SIDE - 1)[:, None] * SIDE + np.arange(SIDE - 1)).ravel()
    lower = np.stack([corner, corner + 1, corner + SIDE], axis=1)
    upper = np.stack([corner + 1, corner + SIDE + 1, corner + SIDE], axis=1)
    with h5py.File(folder / "raw.h5", "w") as file:
        file["points"] = np.stack(np.divmod(np.arange(SIDE**2), SIDE), axis=1) + 0.1 * rng.random((SIDE**2, 2))
        file["cells"] = np.concatenate([lower, upper]).astype("i4")
        file["node/u"] = rng.random((SIDE**2, 4))
        file["cell/area"] = rng.random(2 * len(lower))
    partition(folder / "raw.h5", folder / "store")
    return str(folder / "store")


def of_chunks(layout, ids):
    """Return the bytes of all chunks that hold these rows, checksums included."""
    num_rows = layout.chunks[0]
    return len(np.unique(ids // num_rows)) * (layout.chunk_nbytes + 4)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_a_rank_reads_its_share_and_sends_nothing(store, num_ranks):
    opened = open_store(store)
    fields = {"u": "node/u", "pos": "node/pos", "area": "cell/area"}
    index = ["csr/indptr", "csr/src", "cell/indptr", "cell/offsets", "cell/connectivity", "cell/type"]
    whole = sum(opened.array(0, path).nbytes for path in (*fields.values(), *index))
    for rank in sorted({0, 1, num_ranks // 2, num_ranks - 1}):
        with fake_group(num_ranks, rank), Collectives() as spy:
            mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
            ds = scidata.open_dataset(store, mesh, halo=2, ghosts="disk")
            assert ds.rank == rank
            spy.names.clear()
            sample, local, plan = ds[0], ds.read_local(0), ds.plan(0)
            held = {name: sample.with_ghosts(name) for name in sample}
            assert spy.names == []
            dist.barrier()
            assert spy.names, "the spy does not see collectives"
        rows = sample.index_map("node")
        assert 0 < rows.num_ghost < 12 * SIDE * 2 / np.sqrt(num_ranks)  # two rings round a patch, of a rough outline
        for name, path in fields.items():
            layout = opened.array(0, path)
            mine = sample.index_map(sample.entity_of(name))
            ids = mine.to_global(np.arange(mine.num_local))
            assert np.array_equal(held[name].numpy(), opened.read(0, path)[ids])
            fetched = sum(array.bytes_fetched for array in plan.fields[name])
            assert layout.nbytes * mine.num_local / mine.num_global <= fetched
            runs = 1 + np.count_nonzero(np.diff(np.unique(ids // layout.chunks[0])) > 1)
            assert fetched <= of_chunks(layout, ids) + (runs - 1) * MAX_GAP, (name, rank)
        assert local.stats.bytes_fetched == sum(sum(a.bytes_fetched for a in plan.fields[n]) for n in fields)
        # with the index arrays; of 64 ranks each has 1.6 chunks of nodes, and those of its neighbours for their ghosts
        assert plan.bytes_fetched <= {2: 1.2, 3: 1.4, 8: 2.1, 64: 10.0}[num_ranks] * whole / num_ranks
