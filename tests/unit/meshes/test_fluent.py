"""Fluent's cases and results in two and three dimensions, against the mesh that they were made of."""

import zlib

import h5py
import numpy as np
import pytest

from scidata import open_dataset, partition
from scidata.errors import CorruptDataError, FieldMismatchError, UnsupportedFormatError
from scidata.meshes.formats.meshio import MeshioSource
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.faces import SOLID_FACES, edges_across_faces
from scidata.meshes.samples import read_samples

from ._fluent import write_case, write_results
from .test_cgns import block


def turned_faces(sides, owners):
    """Return the faces between and around cells, whose sides are turned outwards: those between two cells first."""
    found = {}
    for nodes, cell in zip(sides, owners, strict=True):
        found.setdefault(tuple(sorted(nodes)), []).append((nodes[::-1], cell))  # towards the first of its cells
    every = sorted(found.values(), key=lambda each: -len(each))
    return [each[0][0] for each in every], [e[0][1] for e in every], [e[1][1] if len(e) > 1 else -1 for e in every]


def triangles_and_a_pentagon():
    points = np.array([[0, 0], [2, 0], [2, 1], [1, 2], [0, 1], [3, 2], [-1, 1]], float)
    return points, [[0, 1, 2, 3, 4], [2, 5, 3], [4, 3, 6], [0, 4, 6]]


def test_polygons_of_a_plane_with_results_beside(tmp_path):
    points, cells = triangles_and_a_pentagon()
    edges = [[a, b] for cell in cells for a, b in zip(cell, cell[1:] + cell[:1], strict=True)]
    faces, owner, neighbour = turned_faces(edges, [i for i, cell in enumerate(cells) for _ in cell])
    path = tmp_path / "a.cas.h5"
    faces = [each[::-1] for each in faces]  # edges have the first of their cells on the left
    write_case(path, points, faces, owner, neighbour, len(cells))
    fields = {"SV_P": np.arange(4.0, dtype="f4"), "SV_V": np.arange(8.0).reshape(4, 2)}
    write_results(tmp_path / "a.dat.h5", fields, phases=2)
    header = read_samples(path).header(0)
    sample = header.read()
    np.testing.assert_array_equal(sample.points, points)
    for nodes, cell in zip(np.split(sample.cells.connectivity, sample.cells.offsets[1:-1]), cells, strict=True):
        first = cell.index(nodes[0])
        assert nodes.tolist() == cell[first:] + cell[:first]
    assert header.paths == (str(path), str(tmp_path / "a.dat.h5"))
    assert header.left_out == {"SV_FLUX": "lives on faces"}
    for name, values in fields.items():
        for found in (sample.fields[name], sample.fields[f"phase-2_{name}"]):
            assert found.read().dtype == values.dtype
            np.testing.assert_array_equal(found.read(), values)
    partition(path, tmp_path / "a.store")
    ds = open_dataset(str(tmp_path / "a.store"))
    assert [each.name for each in ds.reader.store.sample(0).inputs] == ["a.cas.h5", "a.dat.h5"]
    rows = ds.reader.original_id(0, 0, "cell")
    np.testing.assert_array_equal(ds[0]["SV_P"].numpy(), fields["SV_P"][rows])
    for dat in ("run-1.dat.h5", "run-2.dat.h5"):  # several times of one case
        write_results(tmp_path / dat, fields)
    both = read_samples(str(tmp_path / "run-*.dat.h5"), mesh=path)[0]
    assert both.fields["SV_P"].shape == (2, 4)
    with pytest.raises(UnsupportedFormatError, match=r"run-1\.dat\.h5: has fields alone; name the mesh's file"):
        read_samples(tmp_path / "run-1.dat.h5")[0]
    write_results(tmp_path / "a.dat.h5", {"SV_P": np.arange(3.0)})
    with pytest.raises(FieldMismatchError, match=r"field 'cell/SV_P' .* 4"):
        read_samples(path, fields="SV_P")[0]


def test_polyhedra_are_rows_joined_across_faces(tmp_path):
    points, cells = block()
    points = points.reshape(-1, 3, order="F")
    sides = cells[:, np.array(SOLID_FACES[12])].reshape(-1, 4)
    faces, *both = turned_faces(sides.tolist(), np.repeat(np.arange(24), 6))
    owner, neighbour = (np.where(np.array(each) < 0, -1, np.array(each) // 2) for each in both)  # hexahedra in pairs
    kept = np.flatnonzero(owner != neighbour)
    path = tmp_path / "a.msh.h5"
    write_case(path, points, [faces[i] for i in kept], owner[kept], neighbour[kept], 12)
    with pytest.raises(UnsupportedFormatError, match="entity='cell'"):
        read_samples(path)[0]
    sample = read_samples(path, entity="cell")[0]
    pairs = edges_across_faces(RawCells.of_kind(cells, 12), len(points)) // 2
    assert {*map(tuple, sample.edge_index.T)} == {*map(tuple, pairs[:, pairs[0] != pairs[1]].T)}
    corners = points[cells].reshape(12, 16, 3)
    box = corners.max(axis=1) - corners.min(axis=1)
    volumes = sample.fields["volume"].read()
    assert (volumes > 0).all()
    assert (volumes < box.prod(axis=1)).all()
    assert volumes.sum() > 0.9 * 24
    assert (np.abs(sample.points - corners.mean(axis=1)) < 0.1).all()


def test_solids_have_their_corners(tmp_path):
    points, cells = block()
    points, cells = points.reshape(-1, 3, order="F"), [*cells.tolist()]
    more = np.array([[0.5, 0.5, -0.6], [1.6, 0.5, -0.3], [-0.7, 0.1, 0.5], [-0.7, 0.9, 0.5]])  # below and left
    n, a = len(points), cells[0]
    cells += [[*a[3::-1], n], [a[1], a[2], n, n + 1], [a[0], n + 2, a[4], a[3], n + 3, a[7]]]
    codes = {4: 10, 5: 14, 6: 13, 8: 12}
    sides, points = [], np.concatenate([points, more])
    for row, nodes in enumerate(cells):
        middle = points[nodes].mean(axis=0)
        for face in (np.array(nodes)[list(each)] for each in SOLID_FACES[codes[len(nodes)]]):
            x, y, z = points[face[:3]]
            outward = np.cross(y - x, z - x) @ (x - middle) > 0
            sides.append((face[:: 1 if outward else -1].tolist(), row))
    path = tmp_path / "a.msh.h5"
    write_case(path, points, *turned_faces(*zip(*sides, strict=True)), len(cells))
    sample = read_samples(path)[0]
    np.testing.assert_array_equal(sample.points, points)
    found = np.split(sample.cells.connectivity, sample.cells.offsets[1:-1])
    assert sample.cells.cell_type.tolist() == [codes[len(nodes)] for nodes in cells]
    for mine, nodes in zip(found, cells, strict=True):
        assert {*mine.tolist()} == {*nodes}
        base = 4 if len(nodes) in (5, 8) else 3
        x, y, z = points[mine[[0, 1, 2]]]
        height = np.cross(y - x, z - x) @ (points[mine[base]] - x)
        assert (height > 0) != (len(nodes) == 6)  # as VTK has them
        edges = {
            frozenset((face[i - 1], face[i])) for face, row in sides if cells[row] is nodes for i in range(len(face))
        }
        if len(nodes) in (6, 8):
            assert all(
                frozenset(pair) in edges for pair in zip(mine[:base].tolist(), mine[base:].tolist(), strict=True)
            )
    partition(path, tmp_path / "a.store")
    assert open_dataset(str(tmp_path / "a.store"))[0].num_nodes == len(points)
    rows = read_samples(path, entity="cell")[0]
    assert rows.sizes["cell"] == len(cells)


def damaged(path, change):
    points, cells = block()
    points = points.reshape(-1, 3, order="F")
    sides = cells[:, np.array(SOLID_FACES[12])].reshape(-1, 4)
    write_case(path, points, *turned_faces(sides.tolist(), np.repeat(np.arange(24), 6)), 24)
    with h5py.File(path, "r+") as file:
        change(file["meshes/1"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: m["faces/c0/1"].__setitem__(0, 25), CorruptDataError, "name the cells as owners"),
        (lambda m: m["faces/c0/1"].__setitem__(0, 20), CorruptDataError, "do not enclose them"),
        (lambda m: m["faces/nodes/1/nodes"].__setitem__(0, 0), CorruptDataError, "name the nodes"),
        (lambda m: m["faces/nodes/1/nnodes"].__setitem__(0, 5), CorruptDataError, "nodes of"),
        (lambda m: m["nodes/coords/1"].attrs.__setitem__("minId", [2]), CorruptDataError, "some twice"),
        (lambda m: m["nodes/coords"].__delitem__("1"), CorruptDataError, "has no values of 57 of 60 ids"),
        (lambda m: m.attrs.__setitem__("cellCount", [0]), UnsupportedFormatError, "1 meshes with 0 cells"),
        (lambda m: m.attrs.__setitem__("dimension", [2]), CorruptDataError, "do not make one ring"),
        (lambda m: m.create_group("cells/tree"), UnsupportedFormatError, "cells or faces in 'tree'"),
        (lambda m: m.attrs.__delitem__("nodeCount"), CorruptDataError, "nodeCount"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path, change, error, message):
    path = tmp_path / "a.cas.h5"
    damaged(path, change)
    with pytest.raises(error, match=rf"a\.cas\.h5.*{message}"):
        read_samples(path, entity="cell")[0]


def test_chunks_that_store_far_more_than_they_hold(tmp_path):
    """HDF5 itself would unpack all of it."""
    path = tmp_path / "a.dat.h5"
    write_results(path, {"SV_P": np.zeros(4)})
    with h5py.File(path, "r+") as file:
        where = "results/1/phase-1/cells/SV_P/3"
        dataset = file.create_dataset(where, (4,), "f8", chunks=(4,), compression="gzip")
        dataset.id.write_direct_chunk((0,), zlib.compress(bytes(1 << 27), 1))
    with pytest.raises(UnsupportedFormatError, match=r"a\.dat\.h5: .*SV_P/3' .* claims 32 bytes, but \d{6} are stored"):
        MeshioSource(str(path)).mesh  # noqa: B018
