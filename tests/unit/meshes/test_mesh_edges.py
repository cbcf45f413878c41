"""Fields on the edges of a mesh: each value follows to both directed edges, with the way that the file's edge runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import Delaunay

from scidata.core.options import ReadOptions
from scidata.errors import FieldMismatchError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import edges_of_cells
from scidata.meshes.order.faces import along_mesh_edges
from scidata.store.format.store import open_store, verify
from scidata.store.partitioning.partition import partition
from scidata.store.reading.reader import StoreReader

netCDF4 = pytest.importorskip("netCDF4", reason="writes the files")  # noqa: N816

DATA = Path(__file__).parents[3].parent / "shared" / "data"
MPAS = DATA / "mesh.QU.1920km.151026.nc"


def triangulation(num_nodes: int = 400, seed: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Return points, triangles and undirected edges, these in any order and direction."""
    rng = np.random.default_rng(seed)
    points = rng.random((num_nodes, 2))
    cells = Delaunay(points).simplices.astype(np.int64)
    pairs = np.unique(np.sort(np.concatenate([cells[:, [0, 1]], cells[:, [1, 2]], cells[:, [2, 0]]]), axis=1), axis=0)
    pairs = rng.permuted(rng.permutation(pairs), axis=1)
    return points, cells, pairs


def write_ugrid(
    path: Path, points: Any, cells: Any, pairs: Any, *, start: int = 0, transposed: bool = False, say_dim: bool = True
) -> Path:
    """Write a mesh with ``length`` on its edges and ``flow`` on them in 3 times."""
    with netCDF4.Dataset(path, "w") as nc:
        sizes = {"node": len(points), "face": len(cells), "edge": len(pairs), "three": 3, "two": 2, "time": 3}
        for name, size in sizes.items():
            nc.createDimension(name, size)
        mesh = nc.createVariable("mesh", "i4")
        mesh.setncatts({
            "cf_role": "mesh_topology", "topology_dimension": 2, "node_coordinates": "x y",
            "face_node_connectivity": "faces", "edge_node_connectivity": "edges", "face_dimension": "face",
        })  # fmt: skip
        if say_dim:
            mesh.edge_dimension = "edge"
        for name, dim, column in (("x", "node", points[:, 0]), ("y", "node", points[:, 1])):
            nc.createVariable(name, "f8", (dim,))[...] = column
        faces = nc.createVariable("faces", "i4", ("face", "three"))
        edges = nc.createVariable("edges", "i4", ("two", "edge") if transposed else ("edge", "two"), fill_value=-999)
        faces.start_index = edges.start_index = start
        faces[...] = cells + start
        edges[...] = (pairs + start).T if transposed else pairs + start
        nc.createVariable("length", "f4", ("edge",))[...] = np.arange(len(pairs)) + 0.5
        flow = nc.createVariable("flow", "f8", ("time", "edge"))
        flow.location = "edge"
        flow[...] = np.random.default_rng(1).standard_normal((3, len(pairs)))
    return path


def directed(store: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return source and destination of each stored edge in the file's numbering."""
    opened = open_store(store)
    ids = opened.read(0, "node/original_id")
    dst = np.repeat(ids, np.diff(opened.read(0, "csr/indptr")))
    return ids[opened.read(0, "csr/src")], dst


@pytest.mark.parametrize(("start", "transposed", "say_dim"), [(0, False, False), (1, True, True)])
def test_values_follow_to_both_directions(tmp_path: Path, start: int, transposed: bool, say_dim: bool) -> None:
    points, cells, pairs = triangulation()
    raw = write_ugrid(tmp_path / "m.nc", points, cells, pairs, start=start, transposed=transposed, say_dim=say_dim)
    report = partition(raw, tmp_path / "s", max_field_bytes=2000)
    assert report.notes == {}
    assert verify(tmp_path / "s") is None
    store, (src, dst) = open_store(tmp_path / "s"), directed(tmp_path / "s")
    row = {frozenset(pair): i for i, pair in enumerate(pairs.tolist())}
    rows = np.array([row[frozenset(pair)] for pair in zip(src.tolist(), dst.tolist(), strict=True)])
    assert np.array_equal(np.bincount(rows), np.full(len(pairs), 2))
    assert np.array_equal(store.read(0, "csr/edge_id"), rows)
    assert np.array_equal(store.read(0, "edge/length"), rows.astype("f4") + 0.5)
    sign = store.read(0, "edge/orientation")
    assert sign.dtype == np.int8
    assert np.array_equal(sign, np.where(pairs[rows, 0] == src, 1, -1))
    assert store.manifest.fields["edge/flow"].entity_dim == 1
    with netCDF4.Dataset(raw) as nc:
        assert np.array_equal(store.read(0, "edge/flow"), nc["flow"][...].data[:, rows])
    reader = StoreReader(str(tmp_path / "s"), ReadOptions(halo=2, ghosts="exchange"), num_parts=3)
    parts = [reader.read(0, part).fields["length"] for part in range(3)]
    owned = [reader.partition_of(0).owned("edge", part) for part in range(3)]
    kept = [part[: stop - start] for part, (start, stop) in zip(parts, owned, strict=True)]
    assert np.array_equal(np.concatenate(kept), rows.astype("f4") + 0.5)


def test_fields_that_are_not_chosen_ask_nothing_of_the_edges(tmp_path: Path) -> None:
    points, cells, pairs = triangulation(50)
    raw = write_ugrid(tmp_path / "m.nc", points, cells, pairs[5:])
    with pytest.raises(FieldMismatchError, match=r"sample m: 10 of \d+ edges of the cells have no mesh edge.*--fields"):
        partition(raw, tmp_path / "s")
    partition(raw, tmp_path / "s", fields=(), overwrite=True)
    assert not open_store(tmp_path / "s").manifest.fields
    twice = write_ugrid(tmp_path / "twice.nc", points, cells, np.concatenate([pairs, pairs[3:4, ::-1]]))
    with pytest.raises(FieldMismatchError, match=r"2 of .* more than one mesh edge"):
        partition(twice, tmp_path / "s", overwrite=True)


def test_edges_of_no_cell_and_repairs(tmp_path: Path) -> None:
    points, cells, pairs = triangulation(60)
    points[7] = np.nan
    cells = cells[~(cells == 11).all(axis=1)]
    far = np.array([[0, 0], [2, -1], [0, 10**6]])  # from a node to itself, to none, out of range
    raw = write_ugrid(tmp_path / "m.nc", points, cells, np.concatenate([far, pairs]), start=1)
    report = partition(raw, tmp_path / "s", repair="nan_points")
    lost = int((pairs == 7).any(axis=1).sum()) + 3
    assert any(note.startswith(f"{lost} edges of the mesh belong to no cell") for note in report.notes["m"])
    src, dst = directed(tmp_path / "s")
    ids = open_store(tmp_path / "s").read(0, "csr/edge_id") - 3
    assert np.array_equal(np.sort(pairs[ids], axis=1), np.sort(np.stack([src, dst], axis=1), axis=1))
    assert verify(tmp_path / "s") is None


def test_each_edge_once_where_the_files_own_are_asked_for(tmp_path: Path) -> None:
    points, cells, pairs = triangulation(50)
    partition(write_ugrid(tmp_path / "m.nc", points, cells, pairs), tmp_path / "s", edges="edge_index")
    store, (src, dst) = open_store(tmp_path / "s"), directed(tmp_path / "s")
    assert np.array_equal(pairs[store.read(0, "csr/edge_id")], np.stack([src, dst], axis=1))
    assert "edge/orientation" not in store.manifest.fields


def test_flow_through_the_edges_of_the_real_mesh(tmp_path: Path) -> None:
    """``normalVelocity`` is positive from the first to the second of ``cellsOnEdge``: to the right of the edge."""
    if not MPAS.is_file():
        pytest.skip("the real sample files are not beside the repository")
    partition(MPAS, tmp_path / "s")
    assert verify(tmp_path / "s") is None
    store, (src, dst) = open_store(tmp_path / "s"), directed(tmp_path / "s")
    assert {"edge/dvEdge", "edge/angleEdge", "edge/orientation"} <= set(store.manifest.fields)
    with netCDF4.Dataset(MPAS) as nc:
        arrays = {name: nc[name][...].data for name in nc.variables}
    row = store.read(0, "csr/edge_id")
    assert np.array_equal(store.read(0, "edge/dvEdge"), arrays["dvEdge"][row])
    assert {*map(frozenset, (arrays["verticesOnEdge"] - 1).tolist())} == {
        *map(frozenset, np.stack([src, dst], 1).tolist())
    }
    vertices, cells = (np.stack([arrays[f"{c}{what}"] for c in "xyz"], axis=1) for what in ("Vertex", "Cell"))
    way = vertices[dst] - vertices[src]
    up = vertices[src] + vertices[dst]
    normal = np.diff(cells[arrays["cellsOnEdge"][row] - 1], axis=1)[:, 0]
    right = np.sign((np.cross(way, up) * normal).sum(axis=1))
    assert np.array_equal(store.read(0, "edge/orientation"), right)


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 40), st.integers(0, 2**32 - 1))
def test_along_mesh_edges_of_random_polygons(num_nodes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, min(num_nodes, 6) + 1, rng.integers(0, 8))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    corners = [rng.choice(num_nodes, size, replace=False) for size in sizes]
    connectivity = np.concatenate([np.empty(0, np.int64), *corners])
    cells = RawCells(offsets=offsets, connectivity=connectivity, cell_type=np.full(len(sizes), 7, np.uint8))
    edges = edges_of_cells(cells, num_nodes)
    undirected = edges[:, edges[0] < edges[1]]
    mesh = rng.permuted(rng.permutation(undirected, axis=1), axis=0)
    along = along_mesh_edges(edges, mesh, num_nodes, "here")
    first, second = mesh[:, along.rows]
    assert np.array_equal(np.where(along.orientation == 1, first, second), edges[0])
    assert np.array_equal(np.where(along.orientation == 1, second, first), edges[1])
    assert along.num_unused == 0
