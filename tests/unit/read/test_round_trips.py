"""Each kind of sample, from each format, and random ones: partitioned, verified, read by any number of ranks."""

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import Delaunay

from scidata.errors import FieldMismatchError
from scidata.meshes.samples import read_samples
from scidata.store.format.store import open_store, verify
from scidata.store.partitioning.partition import partition
from tests.unit._parts import check_round_trip, random_bounds

FORMATS = ["zarr2", "zarr3", "hdf5", "netcdf4", "netcdf3"]
RNG = np.random.default_rng(7)
XY, XYZ = RNG.random((60, 2)), RNG.random((40, 3))
TRIANGLES, TETS = Delaunay(XY).simplices.astype("i4"), Delaunay(XYZ).simplices.astype("i4")


def plain(kind, format):
    def write(path):
        from tests.writers import write_arrays as write_plain

        arrays, dims = {"points": XY, "u": RNG.random((60, 3)).astype("f4")}, {"points": ["n", "xy"], "u": ["n", "k"]}
        if kind == "mesh":
            arrays |= {"cells": TRIANGLES, "area": RNG.random(len(TRIANGLES))}
            dims |= {"cells": ["c", "three"], "area": ["c"]}
        if kind == "graph":
            arrays |= {"edge_index": RNG.integers(0, 50, (2, 200)).astype("i4"), "flux": RNG.random((200, 2))}
            dims |= {"edge_index": ["two", "e"], "flux": ["e", "two"]}
        return write_plain(path / "raw", format, arrays, dims=dims)

    return write


def ugrid(path):
    from tests.unit.meshes._ugrid import write_mesh

    return write_mesh(path / "raw.nc", cells=TRIANGLES.tolist(), points=XY, start=1)


def mpas(path):
    from tests.writers import write_mpas as write_plane

    return write_plane(path / "raw.nc")


def exodus(path):
    from tests.unit.meshes._exodus import write as write_exodus

    return write_exodus(path / "raw.exo", "NETCDF4")[0]


def vtkhdf(path):
    from tests.unit.meshes._vtkhdf import write as write_vtkhdf

    half = len(TETS) // 2
    pieces = [(rows.tolist(), [10] * len(rows), 40) for rows in (TETS[:half], TETS[half:])]
    return write_vtkhdf(path / "raw.vtkhdf", steps=2, pieces=pieces)[0]


def vtu(path):
    meshio = pytest.importorskip("meshio", reason="the extra that reads other mesh formats")
    data = {"point_data": {"u": RNG.random((40, 3))}, "cell_data": {"k": [RNG.random(len(TETS))]}}
    meshio.Mesh(XYZ, [("tetra", TETS)], **data).write(str(path / "raw.vtu"))
    return str(path / "raw.vtu")


def by_meshio(suffix):
    def write(path):
        meshio = pytest.importorskip("meshio", reason="the extra that reads other mesh formats")
        options = {"file_format": "gmsh"} if suffix == "msh" else {}
        meshio.Mesh(XYZ, [("tetra", TETS)]).write(str(path / f"raw.{suffix}"), **options)
        return str(path / f"raw.{suffix}")

    return write


def torus(path):
    """Quads that wrap in x and in y, with every edge between their nodes in both directions and its length."""
    rows = np.arange(48).reshape(6, 8)
    right, up = np.roll(rows, -1, axis=1), np.roll(rows, -1, axis=0)
    corners = np.stack([rows, right, np.roll(right, -1, axis=0), up], axis=-1).reshape(-1, 4)
    pairs = np.concatenate([np.stack([rows.ravel(), next_.ravel()]) for next_ in (right, up)], axis=1)
    with h5py.File(path / "raw.h5", "w") as file:
        file["points"] = np.stack(np.meshgrid(np.arange(8) / 8, np.arange(6) / 3), axis=-1).reshape(-1, 2)
        file["points"].attrs["period"] = [1.0, 2.0]
        file["cells"], file["edge_index"] = corners, np.concatenate([pairs, pairs[::-1]], axis=1)
        file["edge/length"] = np.tile(np.repeat([1 / 8, 1 / 3], 48), 2)
        file["node/u"], file["cell/k"] = RNG.random(48), RNG.random(48)
    return str(path / "raw.h5")


INPUTS = {f"{kind}-{format}": (plain(kind, format), {}) for kind in ("mesh", "points", "graph") for format in FORMATS}
INPUTS |= {write.__name__: (write, {}) for write in (ugrid, mpas, exodus, vtkhdf, vtu)}
INPUTS |= {f"{write.__name__}-cells": (write, {"entity": "cell"}) for write in (ugrid, mpas, exodus, vtkhdf, vtu)}
INPUTS |= {suffix: (by_meshio(suffix), {}) for suffix in ("su2", "msh", "cgns")}
INPUTS["points-knn"] = (plain("points", "hdf5"), {"edges": "knn:4"})
INPUTS["points-radius"] = (plain("points", "hdf5"), {"edges": "radius:0.2"})
INPUTS |= {f"torus-{rule}": (torus, {"edges": rule}) for rule in ("cells", "edge_index")}
INPUTS |= {f"torus-{rule}": (torus, {"edges": rule, "kind": "graph"}) for rule in ("knn:4", "radius:0.3")}
INPUTS["torus-as-cells"] = (torus, {"entity": "cell"})
INPUTS["cells-knn"] = (plain("mesh", "hdf5"), {"entity": "cell", "edges": "knn:3"})


@pytest.mark.parametrize("name", INPUTS)
def test_parts_of_any_input_are_the_input(tmp_path, name):
    write, options = INPUTS[name]
    if "netcdf" in name or name.split("-")[0] in ("ugrid", "mpas", "exodus"):
        pytest.importorskip("netCDF4", reason="writes the files")
    source, store = write(tmp_path), str(tmp_path / "store")
    kept = "self_loops,duplicate_edges,crowded_faces"
    partition(source, store, order="rcb" if name.endswith("zarr3") else "hilbert", keep=kept, **options)
    assert verify(store) is None
    raw = read_samples(source, **options)[0]
    rng = np.random.default_rng(len(name))
    of_many_formats = name.split("-")[-1] in FORMATS and not name.endswith("hdf5")  # whose stores are alike
    for num_parts in (1, 4, 7) if of_many_formats else range(1, 8):
        halo = 0.3 if raw.kind == "points" else 1 + num_parts % 2
        weights = rng.random(raw.sizes[raw.entity])
        check_round_trip(None, store, num_parts, halo=halo, weights=weights, sample=raw)


def lengths_of(store, period):
    """Return the length of every edge to the nearest image of its source, and whether it crosses the border."""
    pos, src = store.read(0, f"{store.manifest.entity}/pos"), store.read(0, "csr/src")
    dst = np.repeat(np.arange(len(pos)), np.diff(store.read(0, "csr/indptr")))
    turns = np.round((pos[src] - pos[dst]) / period)
    return np.linalg.norm(pos[src] - pos[dst] - turns * period, axis=1), turns.any(axis=1)


@pytest.mark.parametrize("options", [{"edges": "edge_index"}, {"edges": "cells"}, {"entity": "cell"}])
def test_a_mesh_that_wraps_keeps_its_edges_across_the_border(tmp_path, options):
    partition(torus(tmp_path), tmp_path / "store", **options)
    store = open_store(tmp_path / "store")
    assert store.manifest.period == (1.0, 2.0)
    lengths, crosses = lengths_of(store, np.array([1.0, 2.0]))
    assert (len(lengths), crosses.sum()) == (4 * 48, 2 * (6 + 8))
    assert np.allclose(np.minimum(abs(lengths - 1 / 8), abs(lengths - 1 / 3)), 0)
    if "edge/length" in store.manifest.fields:
        assert np.allclose(lengths, store.read(0, "edge/length"))


def test_a_period_that_is_none_is_refused(tmp_path):
    for period in ([1.0], [1.0, -1.0], [1.0, np.inf], "xy"):
        with h5py.File(torus(tmp_path), "a") as file:
            file["points"].attrs["period"] = period
        with pytest.raises(FieldMismatchError, match="attribute period of points"):
            read_samples(str(tmp_path / "raw.h5"))[0]


@st.composite
def meshes(draw):
    """Polygons, triangles and lines on any nodes, some of which no cell has: (points, offsets, connectivity, types)."""
    num_nodes = draw(st.integers(3, 14))
    node = st.integers(0, num_nodes - 1)
    sizes = {3: (2, 2), 5: (3, 3), 9: (4, 4), 7: (3, 6)}
    cells, types = [], draw(st.lists(st.sampled_from(list(sizes)), min_size=1, max_size=12))
    for kind in types:
        low, high = (min(size, num_nodes) for size in sizes[kind])
        cells.append(draw(st.lists(node, min_size=low, max_size=high, unique=True)))
    types = [kind if len(cell) >= sizes[kind][0] else 7 for kind, cell in zip(types, cells, strict=True)]
    grid = st.tuples(st.integers(0, 4), st.integers(0, 4))  # coarse: points that coincide
    points = draw(st.lists(grid, min_size=num_nodes, max_size=num_nodes))
    return np.array(points, np.float64), np.cumsum([0, *map(len, cells)]), np.concatenate(cells), np.array(types, "u1")


@given(mesh=meshes(), data=st.data())
@settings(max_examples=12, deadline=None)
def test_any_mesh_in_any_parts_is_the_input(mesh, data, tmp_path_factory):
    points, offsets, connectivity, types = mesh
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    folder = tmp_path_factory.mktemp("any")
    with h5py.File(folder / "raw.h5", "w") as file:
        file["points"], file["cells/offsets"], file["cells/connectivity"] = points, offsets, connectivity
        file["cells/types"] = types
        file["node/u"] = rng.standard_normal((len(points), 2))
        file["cell/k"] = rng.integers(0, 9, len(types)).astype("f4")
    order = data.draw(st.sampled_from(["hilbert", "rcb", "rows"]))
    options = {"entity": data.draw(st.sampled_from([None, "cell"]))}
    store = str(folder / "store")
    partition(folder / "raw.h5", store, order=order, keep="crowded_faces", **options)
    assert verify(store) is None
    raw = read_samples(str(folder / "raw.h5"), **options)[0]
    num_rows, num_parts = raw.sizes[raw.entity], data.draw(st.integers(1, 7))
    halo = data.draw(st.integers(1, 3))
    bounds = random_bounds(num_rows, num_parts, rng)
    check_round_trip(None, store, num_parts, bounds=bounds, halo=halo, sample=raw)
    check_round_trip(None, store, num_parts, weights=rng.random(num_rows), halo=halo, sample=raw)
    check_round_trip(None, store, num_rows + 2, sample=raw)  # more parts than rows
