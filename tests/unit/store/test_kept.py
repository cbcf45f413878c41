"""Edges and cells that are kept between reads: once per topology, never more than the bound, safe with threads."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import scidata
from scidata.core.options import ReadOptions
from scidata.errors import ConfigError
from scidata.store.partitioning.partition import partition
from scidata.store.reading.reader import StoreReader
from scidata.store.reading.rows import RowAccess
from tests.writers import triangulation, write_hdf5

INDEX_ARRAYS = ("csr/indptr", "csr/src", "cell/offsets", "cell/connectivity", "cell/type")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Three meshes with four times each."""
    folder = tmp_path_factory.mktemp("kept")
    for case in range(3):
        rng = np.random.default_rng(case)
        mesh = triangulation(rng.random((400, 2)))
        fields = {"node/u": rng.standard_normal((4, 400))}
        write_hdf5(folder / f"case{case}.h5", mesh | fields, {"node/u": ["time"]})
    partition(sorted(folder.glob("*.h5")), folder / "store")
    return str(folder / "store")


def test_a_topology_is_read_once_for_all_its_times(store):
    reader = StoreReader(store, ReadOptions(halo=1, ghosts="disk"), num_parts=2)
    first, second = reader.read(0, 1), reader.read(1, 1)
    assert second.relations["edge"] is first.relations["edge"]
    assert second.index_maps["node"] is first.index_maps["node"]
    plan = reader.plan(1, 1)  # of a first read
    assert second.stats.bytes_fetched == plan.fields["u"][0].bytes_fetched < first.stats.bytes_fetched
    assert any(plan.fields[path][0].bytes_fetched for path in INDEX_ARRAYS)
    other = reader.read(4, 1)
    assert other.relations["edge"] is not first.relations["edge"]
    assert reader.read(3, 0).relations["edge"] is not first.relations["edge"]
    assert not np.array_equal(first.fields["u"], second.fields["u"])
    again = pickle.loads(pickle.dumps(reader))
    assert len(again.topologies) == 0
    assert np.array_equal(again.read(1, 1).relations["edge"], second.relations["edge"])
    assert again.read(1, 1).index_maps["node"].key == second.index_maps["node"].key


@pytest.mark.parametrize("ghosts", ["disk", "exchange"])
def test_a_field_without_times_is_read_once_for_all_of_them(store, monkeypatch, ghosts):
    options = ReadOptions(halo=1, ghosts=ghosts)
    kept, anew = (StoreReader(store, each, num_parts=2) for each in (options, replace(options, cache_bytes=0)))
    first = kept.read(0, 1)
    for index, of_others in ((1, False), (3, False), (4, True), (0, False), (-1, True)):
        expected = anew.read(index, 1)
        found = kept.read(index, 1)
        read_too = found.stats.bytes_fetched == expected.stats.bytes_fetched
        assert read_too == of_others
        for name, values in expected.fields.items():
            assert np.array_equal(found.fields[name], values)
        assert first.fields["pos"] is not found.fields["pos"]
        found.fields["pos"][:] = -1  # a user's in-place transform
    assert np.array_equal(pickle.loads(pickle.dumps(kept)).read(1, 1).fields["pos"], first.fields["pos"])
    before = kept.read(1, 1).stats.bytes_fetched
    monkeypatch.setattr(RowAccess, "anew", None)  # what is not kept is read straight into the memory that is given
    anew.read(1, 1)
    kept.close()  # lets them go
    monkeypatch.undo()
    assert kept.read(1, 1).stats.bytes_fetched > before


def test_fields_are_planned_once(store, monkeypatch):
    planned, plan = [], RowAccess.plan
    monkeypatch.setattr(
        RowAccess, "plan", lambda self, path, *a, **o: planned.append(path) or plan(self, path, *a, **o)
    )
    options = ReadOptions(halo=1, ghosts="disk", fields=["u"])
    reader, anew = (StoreReader(store, each, num_parts=2) for each in (options, replace(options, cache_bytes=0)))
    parts = [(index, part) for index in (0, 1, -1, 4) for part in (0, 1)]
    first = [reader.read(*which).fields["u"] for which in parts]
    assert planned.count("node/u") == len(parts)
    again = [reader.read(index % reader.num_samples, part).fields["u"] for index, part in parts]
    assert planned.count("node/u") == len(parts)
    for which, one, two in zip(parts, first, again, strict=True):
        assert np.array_equal(one, two)
        assert np.array_equal(one, anew.read(*which).fields["u"])
    assert planned.count("node/u") == 2 * len(parts)
    reader.close()
    reader.read(0, 0)
    assert planned.count("node/u") == 2 * len(parts) + 1


def test_no_more_than_the_bound_is_kept(store):
    reader = StoreReader(store, ReadOptions(halo=1, ghosts="exchange"), num_parts=2)
    for index in range(reader.num_samples):
        reader.read(index, 0)
    assert len(reader.topologies) == 3
    held = reader.topologies.size
    part = reader.read(0, 0)
    cells = part.cells
    arrays = [part.relations["edge"], part.far_relations["edge"], cells.offsets, cells.connectivity, cells.types]
    assert held / 3 > sum(a.nbytes for a in arrays)
    for bound, number in ((held - 1, 2), (held // 3 // 2, 0), (0, 0)):
        small = StoreReader(store, ReadOptions(halo=1, cache_bytes=bound, ghosts="exchange"), num_parts=2)
        for index in (0, 4, 8, 1, 5, 9):
            assert np.array_equal(small.read(index, 0).relations["edge"], reader.read(index, 0).relations["edge"])
            assert small.topologies.size <= bound
        assert len(small.topologies) == number
    with pytest.raises(ConfigError, match="must not be negative"):
        StoreReader(store, ReadOptions(cache_bytes=-1))


def test_threads_share_what_is_kept(store):
    reader = StoreReader(store, ReadOptions(halo=2, ghosts="disk", cache_bytes=20_000), num_parts=2)
    wanted = [StoreReader(store, ReadOptions(halo=2, ghosts="disk"), num_parts=2).read(i, i % 2) for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: reader.read(i % 12, i % 2), range(36)))
    for i, part in enumerate(found):
        assert np.array_equal(part.relations["edge"], wanted[i % 12].relations["edge"])
        assert np.array_equal(part.fields["u"], wanted[i % 12].fields["u"])
    assert reader.topologies.size <= 20_000


def test_what_samples_share_is_not_to_be_written_to(store):
    ds = scidata.open_dataset(store)
    assert ds[1].edge_index is ds[0].edge_index
    mine = ds[0].edge_index.clone()
    mine += 1
    assert ds[2]["u"].shape == (400,)
    ds[0].edge_index[0, 0] = 3
    with pytest.raises(ConfigError, match="clone"):
        ds[1]
    alone = scidata.open_dataset(store, cache_bytes=0)
    alone[0].edge_index[0, 0] = 399
    assert alone[1].edge_index[0, 0] == mine[0, 0] - 1
    with pytest.raises(ConfigError, match="nothing for grids"):
        scidata.open_dataset(str(store) + "/sample-000000.zarr", cache_bytes=1)
