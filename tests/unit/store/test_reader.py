"""Parts of a store, for any number of ranks: put together they are the input, and every ghost is its owner's row."""

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree

from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, UnknownNameError
from scidata.meshes.order.positions import unit_sphere
from scidata.meshes.samples import read_samples
from scidata.store.partitioning.partition import partition
from scidata.store.reading.reader import StoreReader
from tests.unit._parts import check_round_trip, random_bounds
from tests.writers import triangulation, write_hdf5

DATA = Path(__file__).parents[3].parent / "shared" / "data"


def write_mesh(path, num_nodes=1700, seed=0):
    """A triangulation with fields on nodes and cells, one of them with time before the nodes."""
    rng = np.random.default_rng(seed)
    mesh = triangulation(rng.random((num_nodes, 2)))
    fields = {
        "u": rng.standard_normal((num_nodes, 3)).astype("f4"),
        "cost": rng.integers(0, 9, num_nodes).astype("f8"),
        "area": rng.random(len(mesh["cells"])),
        "node/history": rng.standard_normal((3, num_nodes, 2)),
    }
    return write_hdf5(path, mesh | fields)


def write_graph(path, num_nodes=900, num_edges=4000, seed=1):
    """A directed graph: isolated nodes, parallel edges, fields on nodes and edges."""
    rng = np.random.default_rng(seed)
    arrays = {
        "points": rng.random((num_nodes, 3)),
        "edge_index": rng.integers(0, num_nodes * 3 // 4, (2, num_edges)),
        "x": rng.standard_normal((num_nodes, 2)),
        "edge_attr": rng.standard_normal((num_edges, 2)).astype("f4"),
    }
    return write_hdf5(path, arrays)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    raw = write_mesh(folder / "mesh.h5")
    partition(raw, folder / "store")
    return raw, str(folder / "store")


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    raw = write_graph(folder / "graph.h5")
    partition(raw, folder / "store", kind="graph", keep="self_loops,duplicate_edges")
    return raw, str(folder / "store")


@pytest.mark.parametrize("num_parts", range(1, 8))
def test_parts_of_a_mesh_are_the_input(mesh, num_parts):
    rng = np.random.default_rng(num_parts)
    check_round_trip(*mesh, num_parts, bounds=random_bounds(1700, num_parts, rng), halo=1 + num_parts % 3)
    check_round_trip(*mesh, num_parts, weights=rng.random(1700))


def real_files():
    files = [("mesh.QU.1920km.151026.nc", None), ("geoflow_grid.nc", "geoflow_v1.nc"), ("outCSne30.ug", None)]
    return [(DATA / first, None if other is None else DATA / other) for first, other in files]


@pytest.mark.parametrize(("first", "other"), real_files(), ids=lambda p: getattr(p, "name", ""))
def test_parts_of_real_meshes_are_the_input(first, other, tmp_path):
    if not first.exists():
        pytest.skip("the real sample files are not beside the repository")
    mesh = None if other is None else str(first)
    inputs = str(first if other is None else other)
    partition(inputs, tmp_path / "store", mesh=mesh)
    raw = read_samples(inputs, mesh=mesh)[0]
    rng = np.random.default_rng(5)
    bounds = random_bounds(raw.num_nodes, 5, rng)
    check_round_trip(None, str(tmp_path / "store"), 5, bounds=bounds, halo=2, sample=raw)


@pytest.mark.parametrize("num_parts", range(1, 8))
def test_parts_of_a_graph_are_the_input(graph, num_parts):
    rng = np.random.default_rng(num_parts)
    check_round_trip(*graph, num_parts, bounds=random_bounds(900, num_parts, rng), halo=1 + num_parts % 3)
    check_round_trip(*graph, num_parts, weights="edges")


@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_any_graph_in_any_parts_is_the_input(data, tmp_path_factory):
    num_nodes = data.draw(st.integers(1, 15))
    num_edges = data.draw(st.integers(0, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    folder = tmp_path_factory.mktemp("any")
    with h5py.File(folder / "raw.h5", "w") as file:
        file["points"] = rng.random((num_nodes, 2))
        file["edge_index"] = rng.integers(0, data.draw(st.integers(1, num_nodes)), (2, num_edges))
        file["node/x"] = rng.standard_normal((num_nodes, 2))
        file["edge/w"] = rng.random(num_edges)
    partition(folder / "raw.h5", folder / "store", kind="graph", keep="self_loops,duplicate_edges")
    num_parts = data.draw(st.integers(1, 7))
    bounds = random_bounds(num_nodes, num_parts, rng)
    halo = data.draw(st.integers(1, 4))
    check_round_trip(str(folder / "raw.h5"), str(folder / "store"), num_parts, bounds=bounds, halo=halo)
    check_round_trip(str(folder / "raw.h5"), str(folder / "store"), 2 * num_nodes + 1)  # more parts than rows


def write_cloud(path, sphere=False, num_points=6000):
    rng = np.random.default_rng(3)
    points = rng.random((num_points, 3))
    points[: num_points // 2] *= 0.1  # a cluster
    if sphere:
        points = np.stack(
            [rng.uniform(-180, 180, num_points), np.rad2deg(np.arcsin(rng.uniform(-1, 1, num_points)))], 1
        )
    arrays = {"points": points, "u": rng.standard_normal((num_points, 2)).astype("f4")}
    return write_hdf5(path, arrays, attributes={"points": {"units": "degrees"}} if sphere else None)


@pytest.mark.parametrize("sphere", [False, True])
def test_points_within_a_radius_are_ghosts(tmp_path, sphere):
    raw = write_cloud(tmp_path / "cloud.h5", sphere)
    store = str(tmp_path / "store")
    partition(raw, store, kind="points")
    sample = read_samples(raw, kind="points")[0]
    assert sample.on_sphere == sphere
    radius = 6.0 if sphere else 0.04
    rng = np.random.default_rng(0)
    for num_parts in (1, 2, 5):
        bounds = random_bounds(6000, num_parts, rng)
        _, parts = check_round_trip(None, store, num_parts, bounds=bounds, halo=radius, sample=sample)
        pos = np.concatenate([p.fields["pos"][: p.index_maps["point"].num_owned] for p in parts])
        space = unit_sphere(pos) if sphere else pos
        reach = 2 * np.sin(np.deg2rad(radius) / 2) if sphere else radius
        tree = cKDTree(space)
        for part in parts:
            rows = part.index_maps["point"]
            start, stop = rows.owned
            near = tree.query_ball_point(space[start:stop], reach)
            expected = np.unique(np.concatenate([*near, []]).astype(int))
            expected = expected[(expected < start) | (expected >= stop)]
            assert np.array_equal(rows.ghosts, expected)


@pytest.mark.parametrize(
    ("period", "radius"), [((1.0, 0.0, 0.0), 0.05), ((1.0, 2.0, 0.5), 0.05), ((1.0, 2.0, 0.5), 0.4)]
)
def test_ghosts_across_a_border_that_wraps_are_those_of_the_nearest_images(tmp_path, period, radius):
    rng = np.random.default_rng(4)
    points = rng.random((3000, 3)) * [1, 2, 0.5]
    points[:300] += rng.integers(-2, 3, (300, 3)) * np.array(period)  # some are given as images far off
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["points"] = points
        file["points"].attrs["period"] = period
        file["u"] = rng.standard_normal(3000)
    partition(tmp_path / "raw.h5", tmp_path / "store", kind="points")
    width = np.array(period)
    for num_parts in (1, 2, 5):
        bounds = random_bounds(3000, num_parts, rng)
        reader = StoreReader(
            tmp_path / "store", ReadOptions(bounds=bounds, halo=radius, ghosts="disk"), num_parts=num_parts
        )
        parts = [reader.read(0, p) for p in range(num_parts)]
        pos, u = (reader.store.read(0, f"point/{name}") for name in ("pos", "u"))
        for part in parts:
            rows = part.index_maps["point"]
            start, stop = rows.owned
            expected = []
            for i in np.r_[:start, stop:3000]:
                apart = pos[start:stop] - pos[i]
                apart -= width * np.round(apart / np.where(width > 0, width, np.inf))
                if start < stop and np.linalg.norm(apart, axis=1).min() <= radius:
                    expected.append(i)
            assert np.array_equal(rows.ghosts, expected)
            assert np.array_equal(part.fields["u"][rows.num_owned :], u[rows.ghosts])


def test_blocks_rule_out_most_points_also_where_the_domain_wraps(tmp_path):
    points = np.random.default_rng(0).random((120000, 2))
    with h5py.File(tmp_path / "raw.h5", "w") as file:
        file["points"] = points
        file["points"].attrs["period"] = [1.0, 1.0]
    partition(tmp_path / "raw.h5", tmp_path / "store", kind="points")
    reader = StoreReader(tmp_path / "store", ReadOptions(halo=0.004, ghosts="disk"), num_parts=10)
    whole = reader.store.array(0, "point/pos").nbytes
    fetched = [sum(x.bytes_fetched for x in reader.plan(0, p).fields["point/pos"]) for p in range(10)]
    assert max(fetched) < whole / 2
    assert all(0 < reader.read(0, p).index_maps["point"].num_ghost < 2000 for p in range(10))


def test_blocks_rule_out_most_points(tmp_path):
    raw = write_cloud(tmp_path / "cloud.h5", True, 60000)
    partition(raw, tmp_path / "store", kind="points")
    reader = StoreReader(tmp_path / "store", ReadOptions(halo=0.3, fields="u", ghosts="disk"), num_parts=12)
    whole = reader.store.array(0, "point/pos").nbytes
    fetched = [sum(x.bytes_fetched for x in reader.plan(0, p).fields["point/pos"]) for p in range(12)]
    assert max(fetched) < whole / 2  # a twelfth is its own; the rest is a shell of chunks around it


def test_weights_move_the_bounds(mesh):
    raw, store = mesh
    cost = np.asarray(read_samples(raw)[0].fields["cost"].read())
    by_name = StoreReader(store, ReadOptions(weights="cost"), num_parts=4).partition_of(0).bounds["node"]
    given_ = StoreReader(store, ReadOptions(weights=cost), num_parts=4).partition_of(0).bounds["node"]
    assert np.array_equal(by_name, given_)
    reader = StoreReader(store, ReadOptions(weights=cost), num_parts=4)
    sums = [cost[reader.original_id(0, p, "node")].sum() for p in range(4)]
    assert max(sums) - min(sums) <= 2 * cost.max()
    edges = StoreReader(store, ReadOptions(weights="edges"), num_parts=4).partition_of(0).bounds["edge"]
    assert np.diff(edges).max() - np.diff(edges).min() <= 60


def test_the_prefix_sums_of_the_store_are_used(tmp_path):
    raw = write_mesh(tmp_path / "mesh.h5")
    partition(raw, tmp_path / "store", weights="edges")
    reader = StoreReader(tmp_path / "store", ReadOptions(weights="edges"), num_parts=4)
    edges = np.diff(reader.partition_of(0).bounds["edge"])
    assert edges.max() / edges.mean() < 1.05
    assert "blocks/weight_prefix" in reader.plan(0).fields


def test_a_reader_pickles_and_a_part_does(mesh):
    reader = StoreReader(mesh[1], ReadOptions(halo=1, ghosts="disk"), num_parts=2)
    again = pickle.loads(pickle.dumps(reader))
    one, other = reader.read(0, 1), pickle.loads(pickle.dumps(again.read(0, 1)))
    assert np.array_equal(one.fields["u"], other.fields["u"])
    assert np.array_equal(one.relations["edge"], other.relations["edge"])
    assert reader.fingerprint() == again.fingerprint()
    reader.close()
    assert np.array_equal(reader.read(0, 1).fields["u"], one.fields["u"])


def test_a_choice_of_fields_and_dtype(mesh):
    reader = StoreReader(mesh[1], ReadOptions(fields=["u", "node/cost"], dtype="f4"), num_parts=3)
    assert reader.fields == ("u", "cost")
    assert reader.read(0, 2).fields["cost"].dtype == np.float32
    assert reader.global_shape("u", 0) == (1700, 3)
    assert not {"node/pos", "cell/area", "node/original_id"} & set(reader.plan(0).fields)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fields": ["U"]}, UnknownNameError, "did you mean 'u'"),
        ({"halo": 1.5}, ConfigError, "whole number of hops"),
        ({"halo": {"node": 1}}, ConfigError, "a number of hops"),
        ({"halo": -1}, ConfigError, "at least 0"),
        ({"ghosts": "disk"}, ConfigError, "say how wide"),
        ({"ghosts": "disc"}, ConfigError, "'disk' or 'exchange'"),
        ({"bounds": "chunk"}, ConfigError, "cut 'even'"),
        ({"bounds": [0, 1700], "weights": "edges"}, ConfigError, "exclude each other"),
        ({"weights": "cots"}, UnknownNameError, "did you mean 'cost'"),
        ({"weights": "u"}, ConfigError, "one number per node"),
    ],
)
def test_arguments_that_cannot_be_honoured(mesh, options, error, words):
    with pytest.raises(error, match=words):
        StoreReader(mesh[1], ReadOptions(**options))


def test_no_parts_are_refused(mesh):
    with pytest.raises(ConfigError, match="at least 1"):
        StoreReader(mesh[1], num_parts=0)


def test_what_is_out_of_range(mesh):
    reader = StoreReader(mesh[1], ReadOptions(bounds={0: [0, 3, 1700]}), num_parts=2)
    with pytest.raises(IndexError, match="sample 1 is out of range"):
        reader.read(1, 0)
    with pytest.raises(ConfigError, match="rank 2 does not exist"):
        reader.plan(0, 2)
    with pytest.raises(UnknownNameError, match="no entity 'nodes'; did you mean 'node'"):
        reader.original_id(0, 0, "nodes")
    with pytest.raises(ConfigError, match="must run from 0 to 1700"):
        StoreReader(mesh[1], ReadOptions(bounds=[0, 3, 1701]), num_parts=2).read(0, 0)
