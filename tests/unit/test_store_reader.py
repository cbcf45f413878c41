"""Parts of a store, for any number of ranks: put together they are the input, and every ghost is its owner's row."""

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.spatial import Delaunay, cKDTree

from scidata.errors import ConfigError, UnknownNameError
from scidata.partition._points import unit_sphere
from scidata.partition.graph import khop_ghosts
from scidata.partitioning import partition
from scidata.store import open_store
from scidata.store_reader import StoreReader
from scidata.topology import read_samples

DATA = Path(__file__).parents[2].parent / "shared" / "data"


def write_mesh(path, num_nodes=1700, seed=0):
    """A triangulation with fields on nodes and cells, one of them with time before the nodes."""
    rng = np.random.default_rng(seed)
    points = rng.random((num_nodes, 2))
    with h5py.File(path, "w") as file:
        file["points"] = points
        file["cells"] = Delaunay(points).simplices.astype("i4")
        file["u"] = rng.standard_normal((num_nodes, 3)).astype("f4")
        file["cost"] = rng.integers(0, 9, num_nodes).astype("f8")
        file["area"] = rng.random(len(file["cells"]))
        file["node/history"] = rng.standard_normal((3, num_nodes, 2))
    return str(path)


def write_graph(path, num_nodes=900, num_edges=4000, seed=1):
    """A directed graph: isolated nodes, parallel edges, fields on nodes and edges."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["points"] = rng.random((num_nodes, 3))
        file["edge_index"] = rng.integers(0, num_nodes * 3 // 4, (2, num_edges))
        file["x"] = rng.standard_normal((num_nodes, 2))
        file["edge_attr"] = rng.standard_normal((num_edges, 2)).astype("f4")
    return str(path)


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


def random_bounds(num_rows, num_parts, rng):
    """Uneven bounds, with empty parts among them."""
    return np.sort(np.r_[0, rng.integers(0, num_rows + 1, num_parts - 1), num_rows])


def check_round_trip(raw_path, store, num_parts, *, bounds="even", halo=1, sample=None, **options):
    """Read every part and put owned rows, edges and cells back where the source has them."""
    raw = sample if sample is not None else read_samples(raw_path)[0]
    reader = StoreReader(store, num_parts=num_parts, bounds=bounds, halo=halo, ghosts="disk", **options)
    parts = [reader.read(0, p) for p in range(num_parts)]
    for p, part in enumerate(parts):
        fresh = StoreReader(store, num_parts=num_parts, bounds=bounds, halo=halo, ghosts="disk", **options)
        assert fresh.plan(0, p).exact
        cut = sum(x.bytes_fetched for plans in fresh._partition(0)[1].values() for x in plans)
        assert fresh.plan(0, p).bytes_fetched == part.stats.bytes_fetched + cut
    owned = {e: np.concatenate([reader.original_id(0, p, e) for p in range(num_parts)]) for e in reader.entities}
    for entity, ids in owned.items():
        assert np.array_equal(np.sort(ids), np.arange(len(ids))), f"{entity}: a row is missing or there twice"
    for name in reader.fields:
        info = reader.info(name)
        pieces = []
        for part in parts:
            rows = part.index_maps[info.entity]
            values = np.moveaxis(part.fields[name], info.entity_dim, 0)
            assert len(values) == rows.num_local
            pieces.append(values[: rows.num_owned])
        stored = np.concatenate(pieces)
        expected = np.moveaxis(raw.points if name == "pos" else raw.fields[name].read(), info.entity_dim, 0)
        back = np.empty_like(stored)
        back[owned[info.entity]] = stored
        assert back.astype(expected.dtype).tobytes() == np.ascontiguousarray(expected).tobytes(), name
        for part in parts:
            rows = part.index_maps[info.entity]
            values = np.moveaxis(part.fields[name], info.entity_dim, 0)
            assert np.array_equal(values[rows.num_owned :], stored[rows.ghosts], equal_nan=True), name
    check_edges(reader, parts, owned, raw)
    check_cells(reader, parts, owned, raw)
    return reader, parts


def check_edges(reader, parts, owned, raw):
    if "edge" not in reader.entities:
        return
    nodes, pairs = owned[reader.entity], []
    whole = open_store(reader.path)
    indptr, src = whole.read(0, "csr/indptr"), whole.read(0, "csr/src")
    for p, part in enumerate(parts):
        rows, edges = part.index_maps[reader.entity], part.index_maps["edge"]
        assert part.edge_index.shape == (2, edges.num_owned)
        assert not part.edge_index.size or part.edge_index[1].max() < rows.num_owned
        assert np.all(np.diff(part.edge_index[1]) >= 0)
        pairs.append(nodes[rows.to_global(part.edge_index)])
        hops = khop_ghosts(indptr, src, *rows.owned, reader.num_hops)
        assert np.isin(hops, rows.ghosts).all()
        inner = khop_ghosts(indptr, src, *rows.owned, reader.num_hops - 1)
        far = np.concatenate([np.arange(indptr[i], indptr[i + 1]) for i in inner] or [np.empty(0, int)])
        assert np.array_equal(edges.ghosts, far)
        dst = np.searchsorted(indptr, far, side="right") - 1
        assert np.array_equal(rows.to_global(part.far_edge_index), np.stack([src[far], dst]))
    pairs = np.concatenate(pairs, axis=1)
    if raw.edges == "edge_index":
        assert np.array_equal(pairs, raw.edge_index[:, owned["edge"]])
    else:
        assert len(np.unique(pairs, axis=1).T) == pairs.shape[1]


def check_cells(reader, parts, owned, raw):
    if "cell" not in reader.entities:
        return
    nodes = owned[reader.entity]
    for p, part in enumerate(parts):
        rows = part.index_maps[reader.entity]
        for i, cell in enumerate(reader.original_id(0, p, "cell")):
            corners = part.cells.connectivity[part.cells.offsets[i] : part.cells.offsets[i + 1]]
            a, b = raw.cells.offsets[cell : cell + 2]
            assert np.array_equal(nodes[rows.to_global(corners)], raw.cells.connectivity[a:b])
            assert part.cells.types[i] == raw.cells.cell_type[cell]


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
    for num_parts in (1, 3, 7):
        bounds = random_bounds(raw.num_nodes, num_parts, rng)
        check_round_trip(None, str(tmp_path / "store"), num_parts, bounds=bounds, halo=2, sample=raw)


@pytest.mark.parametrize("num_parts", range(1, 8))
def test_parts_of_a_graph_are_the_input(graph, num_parts):
    rng = np.random.default_rng(num_parts)
    check_round_trip(*graph, num_parts, bounds=random_bounds(900, num_parts, rng), halo=1 + num_parts % 3)
    check_round_trip(*graph, num_parts, weights="edges")
