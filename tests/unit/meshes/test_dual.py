"""Cells as rows: neighbours across faces, centres, and stores that balance cells."""

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import Delaunay

from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, UnknownNameError, UnsupportedFormatError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.faces import edges_across_faces
from scidata.meshes.order.positions import cell_centres
from scidata.meshes.samples import read_samples
from scidata.store.format.store import open_store, verify
from scidata.store.partitioning.partition import partition
from scidata.store.reading.reader import StoreReader

MPAS = Path(__file__).parents[3].parent / "shared" / "data" / "mesh.QU.1920km.151026.nc"


def cells_of(lists, types=None):
    offsets, nodes = np.cumsum([0, *map(len, lists)]), np.array([n for cell in lists for n in cell], np.int64)
    types = np.full(len(lists), 7, np.uint8) if types is None else np.array(types, np.uint8)
    return RawCells(offsets=offsets, connectivity=nodes, cell_type=types)


def pairs_of(cells, types, num_nodes=100):
    found = edges_across_faces(cells_of(cells, types), num_nodes)
    assert len(np.unique(found, axis=1).T) == len(found.T)
    return set(map(tuple, found.T.tolist()))


def both(*pairs):
    return {pair for a, b in pairs for pair in ((a, b), (b, a))}


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("num_nodes", [200, 1 << 22])  # beyond 2**21 three corners do not fit one word
def test_neighbours_of_a_triangulation(dims, num_nodes):
    mesh = Delaunay(np.random.default_rng(0).random((200, dims)))
    expected = {(int(n), i) for i, row in enumerate(mesh.neighbors) for n in row if n >= 0}
    assert pairs_of(mesh.simplices.tolist(), [5 if dims == 2 else 10] * len(mesh.simplices), num_nodes) == expected


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 11), min_size=3, max_size=6, unique=True), max_size=10))
def test_polygons_are_neighbours_where_they_share_an_edge(cells):
    edges = [{frozenset(e) for e in zip(c, c[1:] + c[:1], strict=True)} for c in cells]
    expected = [(a, b) for a, b in itertools.combinations(range(len(cells)), 2) if edges[a] & edges[b]]
    assert pairs_of(cells, [7] * len(cells)) == both(*expected)


def test_neighbours_of_mixed_cells():
    hexahedron, pyramid, tetra = [0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 8], [4, 5, 8, 9]
    assert pairs_of([hexahedron, pyramid, tetra], [12, 14, 10]) == both((0, 1), (1, 2))
    assert pairs_of([hexahedron, [4, 5, 6, 7]], [12, 9]) == set()  # a wall's face is no volume
    middles = [[0, 1, 2, 10, 11, 12], [1, 3, 2, 13, 14, 11]]  # quadratic triangles: corners, then middle nodes
    assert pairs_of([*middles, [3, 4, 5, 2, 13]], [22, 22, 7]) == both((0, 1))
    assert pairs_of([[0, 1], [1, 2], [0, 1, 2]], [3, 3, 5]) == set()
    assert pairs_of([[0, 1, 2], [1, 0, 3], [0, 1, 4]], [5, 5, 5]) == both((0, 1), (0, 2), (1, 2))
    assert pairs_of([], []) == set()
    with pytest.raises(UnsupportedFormatError, match=r"polyhedron.*edge_index of a graph"):
        pairs_of([[0, 1, 2, 3]], [42])


def test_centres_are_means_of_the_nearest_images():
    cells = cells_of([[0, 1, 2], [3, 0]])
    points = np.array([[0.1, 0.0], [0.9, 0.3], [0.2, 0.6], [0.8, 1.0]])
    assert np.allclose(cell_centres(points, cells), [[0.4, 0.3], [0.45, 0.5]])
    wrapped = cell_centres(points, cells, period=(1.0, 0.0))
    assert np.allclose(wrapped, [[0.2 / 3, 0.3], [0.95, 0.5]])
    assert cell_centres(points, cells_of([])).shape == (0, 2)


@pytest.mark.parametrize("east", [0.0, 360.0])
def test_centres_on_a_sphere(east):
    lon = np.array([178.0, -178.0, 180.0, 10.0, 100.0, -170.0, -80.0])
    lon = lon + east * (lon < 0)
    points = np.stack([lon, [10, 10, 10, 80, 80, 80, 80], np.arange(7.0)], axis=1)
    centres = cell_centres(points, cells_of([[0, 1, 2], [3, 4, 5, 6]]), on_sphere=True)
    assert abs(abs(centres[0, 0]) - 180) < 1e-9
    assert 10 < centres[0, 1] < 10.01
    assert centres[1, 1] == pytest.approx(90)
    assert centres[:, 2].tolist() == [1.0, 4.5]
    assert (centres[:, 0] >= 0).all() or not east


def write_volumes(path):
    """A tet mesh with fields of its cells and one of its nodes."""
    rng = np.random.default_rng(0)
    points = rng.random((300, 3))
    cells = Delaunay(points).simplices
    with h5py.File(path, "w") as file:
        file["points"], file["cells"] = points, cells
        file["cells"].attrs["cell_type"] = "tetra"
        file["cell/p"], file["cell/cost"] = rng.random((len(cells), 2)), points[cells, 0].mean(axis=1)
        file["node/u"] = rng.random(300)
    return str(path), points, cells


@pytest.mark.parametrize("order", ["hilbert", "rcb", "metis"])
def test_fields_of_cells_are_cut_evenly(tmp_path, order):
    if order == "metis":
        pytest.importorskip("pymetis")
    source = write_volumes(tmp_path / "raw.h5")[0]
    partition(source, tmp_path / "s", entity="cell", order=order)
    assert verify(tmp_path / "s") is None
    manifest = open_store(tmp_path / "s").manifest
    assert (manifest.kind, manifest.entity, manifest.entities) == ("mesh", "cell", ("cell", "edge"))
    assert set(manifest.fields) == {"cell/p", "cell/cost"}
    reader = StoreReader(tmp_path / "s", num_parts=7)
    counts = np.diff(reader.partition_of(0).bounds["cell"])
    assert counts.max() - counts.min() <= 1
    assert reader.read(0, 3).cells is None
    with h5py.File(source) as file:
        cost = file["cell/cost"][...]
    bounds = StoreReader(tmp_path / "s", ReadOptions(weights="cost"), num_parts=7).partition_of(0).bounds["cell"]
    ids = np.split(open_store(tmp_path / "s").read(0, "cell/original_id"), bounds[1:-1])
    assert all(abs(cost[part].sum() - cost.sum() / 7) <= cost.max() for part in ids)
    assert np.ptp(list(map(len, ids))) > 20


def test_broken_cells_are_left_out(tmp_path):
    source, points, cells = write_volumes(tmp_path / "raw.h5")
    with h5py.File(source, "a") as file:
        file["points"][cells[5, 0]] = np.nan
        file["cells"][9, 1] = 300
    partition(source, tmp_path / "s", entity="cell", repair="all", weights="cost")
    assert verify(tmp_path / "s") is None
    store = open_store(tmp_path / "s")
    left = np.setdiff1d(np.arange(len(cells)), np.append(np.flatnonzero((cells == cells[5, 0]).any(axis=1)), 9))
    ids = store.read(0, "cell/original_id")
    assert np.array_equal(np.sort(ids), left)
    assert np.allclose(store.read(0, "cell/pos"), points[cells[ids]].mean(axis=1))
    with h5py.File(source) as file:
        assert np.array_equal(store.read(0, "cell/p"), file["cell/p"][...][ids])
        assert store.read(0, "blocks/weight_prefix")[-1] == pytest.approx(file["cell/cost"][...][ids].sum())


def test_neighbours_of_the_real_mpas_mesh_are_its_own(tmp_path):
    netCDF4 = pytest.importorskip("netCDF4", reason="reads the oracle")
    if not MPAS.exists():
        pytest.skip("the real sample files are not beside the repository")
    with netCDF4.Dataset(MPAS) as nc:
        pairs = np.asarray(nc["cellsOnEdge"][...]) - 1
        centres = np.stack([np.asarray(nc[f"{c}Cell"][...]) for c in "xyz"], axis=1)
    partition(MPAS, tmp_path / "s", entity="cell")
    store = open_store(tmp_path / "s")
    ids, src = store.read(0, "cell/original_id"), store.read(0, "csr/src")
    dst = np.repeat(np.arange(len(ids)), np.diff(store.read(0, "csr/indptr")))
    assert set(zip(ids[src].tolist(), ids[dst].tolist(), strict=True)) == both(*map(tuple, pairs.tolist()))
    lon, lat = np.deg2rad(store.read(0, "cell/pos")).T
    found = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)
    away = np.linalg.norm(found - centres[ids] / np.linalg.norm(centres[ids], axis=1)[:, None], axis=1)
    assert away.max() < 0.02  # cells are 0.3 wide


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"entity": "cells"}, "entity must be 'cell'"),
        ({"entity": "cell", "kind": "graph"}, "only a mesh has cells"),
        ({"entity": "cell", "edges": "cells"}, "do not go together"),
        ({"entity": "cell", "edges": "edge_index"}, "do not go together"),
        ({"edges": "faces"}, "do not go together"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        partition(write_volumes(tmp_path / "raw.h5")[0], tmp_path / "s", **options)


def test_fields_of_nodes_say_why_they_are_left_out(tmp_path):
    source = write_volumes(tmp_path / "raw.h5")[0]
    assert "rows are cells" in read_samples(source, entity="cell")[0].left_out["u"]
    with pytest.raises(UnsupportedFormatError, match="'u' is not read: lives on the nodes"):
        read_samples(source, entity="cell", fields="u")[0]
    with pytest.raises(UnknownNameError, match="no field 'q'"):
        partition(source, tmp_path / "s", entity="cell", weights="q")
