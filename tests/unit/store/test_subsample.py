"""What an epoch draws: a pure function, the same for any number of parts, and what is read of it is the source's."""

import itertools

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scidata
from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, UnknownNameError
from scidata.loader.data_loader import DataLoader
from scidata.meshes.samples import read_samples
from scidata.store.partitioning.partition import partition
from scidata.store.reading.reader import StoreReader
from scidata.store.reading.subsample import Draw, make_subsample
from scidata.testing import make_grid
from tests.writers import triangulation, write_hdf5

POINTS = 9000


def make_draw(num_global, num_wanted, block=1, key=(0, 0, 0)):
    return Draw(num_global=num_global, num_wanted=num_wanted, block=block, key=key)


# -- drawing ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    num_global=st.one_of(st.integers(0, 300), st.integers(100_000, 10**12)),
    num_wanted=st.integers(1, 400),
    block=st.sampled_from([1, 2, 7, 64, 1024]),
    key=st.tuples(*[st.integers(0, 2**64 - 1)] * 2, st.integers(0, 10**6)),
    cuts=st.lists(st.floats(0, 1), max_size=6),
)
def test_a_draw_is_whole_blocks_of_distinct_rows_and_any_parts_make_it_up(num_global, num_wanted, block, key, cuts):
    draw = make_draw(num_global, num_wanted, block, key)
    rows = draw.rows()
    assert rows.dtype == np.int64
    assert (np.diff(rows) > 0).all()
    blocks = np.unique(rows // block)
    whole = (blocks[:, None] * block + np.arange(block)).reshape(-1)
    assert np.array_equal(rows, whole[whole < num_global])
    assert len(blocks) == min(-(-num_wanted // block), -(-num_global // block))
    if block == 1:
        assert len(rows) == min(num_wanted, num_global)
    bounds = np.array([0, *sorted(int(c * num_global) for c in cuts), num_global], np.int64)
    parts = [draw.rows(a, b) for a, b in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), rows)
    assert np.array_equal(np.diff(draw.count_before(bounds)), [len(p) for p in parts])


@pytest.mark.parametrize(
    ("num_global", "num_wanted", "block"), [(40, 7, 1), (200_000, 5, 1), (103, 30, 7), (50, 48, 1)]
)
def test_every_row_is_equally_likely(num_global, num_wanted, block):
    epochs = 800
    hits = np.zeros(num_global)
    for epoch in range(epochs):
        hits[make_draw(num_global, num_wanted, block, (5, epoch, 0)).rows()] += 1
    p = -(-num_wanted // block) / -(-num_global // block)
    bins = np.add.reduceat(hits, np.arange(0, num_global, max(block, num_global // 40)))
    sizes = np.diff(np.append(np.arange(0, num_global, max(block, num_global // 40)), num_global))
    spread = np.sqrt(epochs * p * (1 - p) * sizes * block)  # of independent rows (blocks): strata only lower it
    assert (np.abs(bins - epochs * p * sizes) < 5 * spread).all()


def test_every_pair_can_be_drawn_together():
    together = np.zeros((10, 10), int)
    for epoch in range(600):
        rows = make_draw(10, 3, key=(1, epoch, 2)).rows()
        together[np.ix_(rows, rows)] += 1
    pairs = together[np.triu_indices(10, 1)]
    assert abs(pairs - 600 * 3 / 45).max() < 5 * np.sqrt(600 * 3 / 45)


def test_parts_of_equal_size_get_equal_shares():
    counts = np.diff(make_draw(10**8, 10**5).count_before(np.linspace(0, 10**8, 65).astype(np.int64)))
    assert counts.max() - counts.min() < 5 * np.sqrt(1.05 * (1 << 16) * 1e-3)  # what the two strata that are cut vary
    blocks = np.diff(make_draw(10**8, 10**5, 1024).count_before(np.linspace(0, 10**8, 9).astype(np.int64)))
    assert blocks.max() - blocks.min() <= 3 * 1024


def test_seed_epoch_and_sample_each_make_another_draw():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 2**32, 0), (2**32 + 1, 0, 0)]
    draws = {key: make_draw(10_000, 50, key=key).rows().tobytes() for key in keys}
    assert len(set(draws.values())) == len(keys)
    assert all(make_draw(10_000, 50, key=key).rows().tobytes() == rows for key, rows in draws.items())


@pytest.mark.parametrize(
    ("subsample", "block", "seed", "words"),
    [
        ({}, 1, 0, "one entity"),
        (100, 1, 0, "one entity"),
        ({"point": 0}, 1, 0, "at least 1"),
        ({"point": 0.5}, 1, 0, "an integer"),
        ({"point": True}, 1, 0, "an integer"),
        ({"point": 5}, 0, 0, "subsample_block=0"),
        ({"point": 5}, "chunks", 0, "subsample_block='chunks'"),
        ({"point": 5}, 1, -1, "subsample_seed=-1"),
        (None, 8, 0, "subsample_block means nothing"),
        (None, 1, 8, "subsample_seed means nothing"),
    ],
)
def test_what_is_no_subsample(subsample, block, seed, words):
    with pytest.raises(ConfigError, match=words):
        make_subsample(subsample, block=block, seed=seed)


# -- stores ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cloud")
    rng = np.random.default_rng(0)
    raws = []
    for i, count in enumerate((POINTS, 300)):
        raws.append(str(folder / f"{i}.h5"))
        fields = {"points": rng.random((count, 3)), "u": rng.standard_normal((count, 2)).astype("f4")}
        write_hdf5(raws[-1], fields | {"point/history": rng.standard_normal((3, count))})
    partition(raws, folder / "store", kind="points")
    return raws, str(folder / "store")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    rng = np.random.default_rng(1)
    arrays = triangulation(rng.random((2500, 2))) | {"u": rng.standard_normal((2500, 2))}
    write_hdf5(folder / "mesh.h5", arrays | {"area": rng.random(len(arrays["cells"]))})
    partition(str(folder / "mesh.h5"), folder / "store")
    return str(folder / "mesh.h5"), str(folder / "store")


def random_bounds(num_rows, num_parts, rng):
    """Uneven bounds, with empty parts among them."""
    return np.sort(np.r_[0, 0, rng.integers(0, num_rows + 1, max(num_parts - 2, 0)), num_rows][-(num_parts + 1) :])


def reader_of(store, subsample, block=1, seed=0, num_parts=1, **options):
    options = ReadOptions(subsample=subsample, subsample_block=block, subsample_seed=seed, **options)
    return StoreReader(store, options, num_parts=num_parts)


def joined(reader, parts, name, *, ids=False):
    """The rows of all parts, one after the other, along dim 0."""
    info = reader.info(name)
    pieces = []
    for p, part in enumerate(parts):
        assert part.index_maps[info.entity].num_owned == len(part.rows[info.entity])
        if ids:
            pieces.append(reader.original_id(part.index, p, info.entity, rows=part.rows[info.entity]))
        else:
            pieces.append(np.moveaxis(part.fields[name], info.entity_dim, 0))
            assert len(pieces[-1]) == part.index_maps[info.entity].num_owned
    return np.concatenate(pieces)


def source_rows(raw, reader, name):
    values = raw.points if name == "pos" else raw.fields[name].read()
    return np.moveaxis(values, reader.info(name).entity_dim, 0)


def read_parts(reader, index=0, epoch=0):
    """All parts; that the plan says what was read, and that all parts agree on who has how much."""
    parts = [reader.read(index, p, epoch=epoch) for p in range(reader.num_parts)]
    once = sum(plan.bytes_fetched for plans in reader._partition(index)[1].values() for plan in plans)
    for p, part in enumerate(parts):
        plan = reader.plan(index, p, epoch=epoch)
        assert plan.exact
        assert plan.bytes_fetched == part.stats.bytes_fetched + once
        for entity, rows in part.index_maps.items():
            assert np.array_equal(rows.bounds, parts[0].index_maps[entity].bounds)
            assert rows.part == p
            assert rows.num_owned == len(part.rows[entity])
    return parts


@pytest.mark.parametrize("block", [1, 40, "chunk"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_of_a_cloud_make_up_the_draw_of_one_process(cloud, num_parts, block):
    raws, store = cloud
    rng = np.random.default_rng(num_parts)
    bounds = {0: random_bounds(POINTS, num_parts, rng), 1: random_bounds(300, num_parts, rng)}
    one = reader_of(store, {"point": 1000}, block)
    many = reader_of(store, {"point": 1000}, block, num_parts=num_parts, bounds=bounds)
    seen = []
    for index, epoch in [(0, 0), (0, 3), (1, 0)]:
        raw, whole = read_samples(raws[index], kind="points")[0], one.read(index, 0, epoch=epoch)
        parts = read_parts(many, index, epoch)
        for name in many.fields:
            ids = joined(many, parts, name, ids=True)
            values = joined(many, parts, name)
            assert np.array_equal(values, np.moveaxis(whole.fields[name], one.info(name).entity_dim, 0))
            assert np.array_equal(values, source_rows(raw, many, name)[ids]), name
            expected = {1: 1000, 40: 1000, "chunk": 1024}[block] if index == 0 else 300
            assert len(ids) == len(np.unique(ids))
            assert len(ids) == expected or (block == "chunk" and len(ids) == expected - (-POINTS) % 1024)  # the last
            assert many.global_shape(name, index, epoch=epoch)[many.info(name).entity_dim] == len(ids)
        seen.append(ids.tobytes())
    assert seen[0] != seen[1], "two epochs drew the same"


def test_a_block_of_chunks_reads_little_and_each_rank_its_share(cloud):
    whole = StoreReader(cloud[1]).plan(0).bytes_fetched
    chunks = reader_of(cloud[1], {"point": 1024}, "chunk")
    assert chunks.plan(0).bytes_fetched < 0.14 * whole  # one chunk of nine
    assert chunks.plan(0).amplification < 1.01
    many = reader_of(cloud[1], {"point": 4096}, "chunk", num_parts=3)
    shares = [many.plan(0, p).bytes_fetched for p in range(3)]
    wanted = [many.plan(0, p).bytes_wanted for p in range(3)]
    alone = reader_of(cloud[1], {"point": 4096}, "chunk").plan(0).bytes_fetched
    assert sum(wanted) * 1.01 + 2 * whole * 1024 / POINTS * 1.01 > sum(shares)  # two bounds cut a chunk each
    assert max(shares) < 0.7 * alone


def test_rows_read_no_chunk_twice(cloud):
    whole = StoreReader(cloud[1]).plan(0).bytes_fetched
    assert reader_of(cloud[1], {"point": 5000}).plan(0).bytes_fetched == whole
    scattered = reader_of(cloud[1], {"point": 900}).plan(0)
    assert scattered.bytes_wanted == 900 * (3 * 8 + 2 * 4 + 3 * 8)
    assert scattered.amplification > 9
    few = reader_of(cloud[1], {"point": 2}).plan(0)
    assert few.bytes_fetched < 0.3 * whole


@pytest.mark.parametrize("entity", ["node", "cell"])
@pytest.mark.parametrize("block", [1, 50])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_of_a_mesh_make_up_the_draw_of_one_process(mesh, num_parts, block, entity):
    raw = read_samples(mesh[0])[0]
    bounds = random_bounds(2500, num_parts, np.random.default_rng(num_parts))
    one = reader_of(mesh[1], {entity: 700}, block, seed=3)
    many = reader_of(mesh[1], {entity: 700}, block, seed=3, num_parts=num_parts, bounds=bounds)
    whole, parts = one.read(0, 0, epoch=1), read_parts(many, epoch=1)
    for name in many.fields:
        ids, values = joined(many, parts, name, ids=True), joined(many, parts, name)
        assert np.array_equal(values, joined(one, [whole], name)), name
        assert np.array_equal(values, source_rows(raw, many, name)[ids]), name
    nodes, cells = joined(many, parts, "u", ids=True), joined(many, parts, "area", ids=True)
    drawn, total = {"node": (nodes, 2500), "cell": (cells, len(raw.cells.offsets) - 1)}[entity]
    assert len(drawn) in (700, 700 - (-total) % block)  # the last block may be short
    corners = raw.cells.connectivity.reshape(-1, 3)
    inside = np.isin(corners, nodes).all(axis=1)
    if entity == "cell":
        assert np.array_equal(np.sort(nodes), np.unique(corners[cells]))
    else:
        assert np.array_equal(np.sort(cells), np.flatnonzero(inside))
    found, pairs = [], []
    for part in parts:
        rows = part.index_maps["node"]
        to_source = nodes[rows.to_global(np.arange(rows.num_local))]
        own = part.cells
        assert np.array_equal(np.diff(own.offsets), np.full(part.index_maps["cell"].num_owned, 3))
        found.append(to_source[own.connectivity].reshape(-1, 3))
        assert (part.relations["edge"][1] < rows.num_owned).all()
        assert part.relations["edge"].shape[1] == part.index_maps["edge"].num_owned
        assert (np.diff(part.relations["edge"][1]) >= 0).all()
        pairs.append(to_source[part.relations["edge"]])
    assert np.array_equal(np.concatenate(found), corners[cells])
    sides = np.sort(np.concatenate([corners[:, [0, 1]], corners[:, [1, 2]], corners[:, [2, 0]]]), axis=1)
    sides = np.unique(sides[np.isin(sides, nodes).all(axis=1)], axis=0)
    expected = np.concatenate([sides, sides[:, ::-1]])
    pairs = np.concatenate(pairs, axis=1).T
    assert len(pairs) == len(expected)
    assert np.array_equal(np.unique(pairs, axis=0), np.unique(expected, axis=0))


def test_edges_between_drawn_nodes_of_a_graph_keep_their_values(tmp_path):
    rng = np.random.default_rng(4)
    with h5py.File(tmp_path / "graph.h5", "w") as file:
        file["edge_index"] = rng.integers(0, 400, (2, 3000))
        file["node/x"] = rng.random(500)
        file["edge/w"] = rng.random((3000, 2))
    partition(tmp_path / "graph.h5", tmp_path / "store", kind="graph", order="rows", keep="self_loops,duplicate_edges")
    raw = read_samples(str(tmp_path / "graph.h5"))[0]
    reader = reader_of(tmp_path / "store", {"node": 120}, num_parts=3, bounds=[0, 7, 7, 500])
    parts = read_parts(reader)
    nodes, edges = joined(reader, parts, "x", ids=True), joined(reader, parts, "w", ids=True)
    assert np.array_equal(joined(reader, parts, "w"), raw.fields["w"].read()[edges])
    assert np.array_equal(np.sort(edges), np.flatnonzero(np.isin(raw.edge_index, nodes).all(axis=0)))
    pairs = [nodes[part.index_maps["node"].to_global(part.relations["edge"])] for part in parts]
    assert np.array_equal(np.concatenate(pairs, axis=1), raw.edge_index[:, edges])


def test_cells_with_rows_of_their_own_and_the_faces_between_them(mesh, tmp_path):
    partition(mesh[0], tmp_path / "cells", entity="cell")
    whole = StoreReader(tmp_path / "cells").read(0, 0)
    ids = StoreReader(tmp_path / "cells").original_id(0, 0, "cell")
    reader = reader_of(tmp_path / "cells", {"cell": 900}, num_parts=3, bounds=[0, 11, 11, len(ids)])
    parts = read_parts(reader)
    cells = joined(reader, parts, "area", ids=True)
    assert len(cells) == 900
    with h5py.File(mesh[0]) as file:
        assert np.array_equal(joined(reader, parts, "area"), file["area"][...][cells])
    pairs = [cells[part.index_maps["cell"].to_global(part.relations["edge"])] for part in parts]
    every = ids[whole.relations["edge"]]
    assert np.array_equal(np.concatenate(pairs, axis=1), every[:, np.isin(every, cells).all(axis=0)])


@pytest.mark.parametrize(
    ("subsample", "options", "error", "words"),
    [
        ({"node": 5}, {}, UnknownNameError, "draws rows of point"),
        ({"edge": 5}, {}, UnknownNameError, "edges follow the rows"),
        ({"point": 5, "cell": 5}, {}, ConfigError, "expected one entity"),
        ({"point": 5}, {"halo": 0.1}, ConfigError, "halo=0.1 means nothing with subsample"),
    ],
)
def test_what_cannot_be_drawn_from_a_store(cloud, subsample, options, error, words):
    with pytest.raises(error, match=words):
        reader_of(cloud[1], subsample, **options)


def test_grids_are_not_drawn_from(tmp_path):
    make_grid(str(tmp_path / "grid.zarr"))
    with pytest.raises(ConfigError, match="crop or stride"):
        scidata.open_dataset(str(tmp_path / "grid.zarr"), subsample={"point": 3})


# -- epochs ----------------------------------------------------------------------------------------------------------


def ids_of(samples):
    return [sample.original_id("point").tolist() for sample in samples]


def test_epochs_reach_the_loader_and_the_threads_that_read_ahead(cloud):
    ds = scidata.open_dataset(cloud[1], subsample={"point": 50}, subsample_seed=9)
    assert ds.fingerprint != scidata.open_dataset(cloud[1], subsample={"point": 50}).fingerprint
    expected = {}
    for epoch in range(3):
        ds.set_epoch(epoch)
        assert ds.epoch == epoch
        assert ds.global_shape("u") == (50, 2)
        expected[epoch] = ids_of(ds[i] for i in range(2))
    assert len({str(rows) for rows in expected.values()}) == 3
    loader = DataLoader(ds, batch_size=None, sampler=[0, 1] * 6, num_workers=2, prefetch_factor=2)
    for epoch in (0, 2, 1, 0):
        loader.set_epoch(epoch)
        assert ids_of(loader) == expected[epoch] * 6
    # the next epoch is set while threads of this one still read
    batches = iter(loader)
    first = next(batches)
    loader.set_epoch(1)
    assert ids_of([first, *batches]) == expected[0] * 6
    assert ids_of(loader) == expected[1] * 6
    with pytest.raises(ConfigError, match="must not be negative"):
        ds.set_epoch(-1)


def test_a_batch_unites_what_was_drawn(cloud):
    ds = scidata.open_dataset(cloud[1], subsample={"point": 50})
    (batch,) = DataLoader(ds, batch_size=2)
    samples = [ds[0], ds[1]]
    assert torch.equal(batch["u"], torch.cat([s["u"] for s in samples]))
    assert batch.original_id("point").tolist() == [i for ids in ids_of(samples) for i in ids]
