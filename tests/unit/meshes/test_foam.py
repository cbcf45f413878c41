"""OpenFOAM's cases against the arrays that they were written of; foamlib reads what is written back."""

import shutil

import numpy as np
import pytest

import scidata
from scidata.errors import CorruptDataError, FieldMismatchError, UnsupportedFormatError
from scidata.meshes.formats.foam import FoamSource, write_field
from scidata.meshes.order.faces import edges_at_nodes
from scidata.meshes.samples import read_samples

from . import _foam

NUM = 5
U, P = np.random.default_rng(0).random((2, NUM, 3)), np.random.default_rng(1).random((2, NUM))


def _case(folder, *, binary=True, label=32):
    how = {"binary": binary, "label": label}
    _foam.write_mesh(folder / "constant" / "polyMesh", 0, NUM, **how)
    for time, u, p in zip(("0.5", "10"), U, P, strict=True):
        _foam.write_field(folder / time / "U", "volVectorField", u, **how)
        _foam.write_field(folder / time / "p", "volScalarField", p, **how)
    return folder


def _expected():
    x = np.arange(NUM + 1) ** 1.5
    pos = np.stack([(x[1:] + x[:-1]) / 2, np.full(NUM, 0.5), np.full(NUM, 0.5)], axis=1)
    one = np.arange(NUM - 1)
    return pos, np.diff(x), {*zip(one, one + 1, strict=True), *zip(one + 1, one, strict=True)}


@pytest.mark.parametrize(
    ("binary", "label", "packed"), [(True, 32, False), (True, 64, True), (False, 32, True), (False, 64, False)]
)
def test_reads_cells_edges_and_fields_by_time(tmp_path, binary, label, packed):
    case = _case(tmp_path / "case", binary=binary, label=label)
    if packed:
        _foam.pack(case)
    (case / "case.foam").touch()
    raw = read_samples(str(case / "case.foam"))[0]
    pos, volume, edges = _expected()
    assert (raw.kind, raw.entity, raw.sizes) == ("mesh", "cell", {"cell": NUM, "edge": 2 * NUM - 2})
    np.testing.assert_allclose(raw.points, pos, rtol=1e-14)
    np.testing.assert_allclose(raw.fields["volume"].read(), volume, rtol=1e-14)
    assert {*map(tuple, raw.edge_index.T.tolist())} == edges
    np.testing.assert_array_equal(raw.fields["U"].read(), U)
    np.testing.assert_array_equal(raw.fields["p"].read(slice(1, 5, 2)), P[:, 1:5:2])
    assert (raw.fields["U"].units, raw.values["time"].tolist()) == ("m s-1", [0.5, 10.0])
    one = read_samples(str(case / "10"))[0]  # a time by itself
    np.testing.assert_array_equal(one.fields["U"].read(), U[1])


def test_points_of_processors_are_joined(tmp_path):
    """By pointProcAddressing, else by place."""
    whole, case = FoamSource(str(_case(tmp_path / "whole"))).mesh(), tmp_path / "case"
    how = {"binary": True, "label": 32}
    meshes = [case / f"processor{number}" / "constant" / "polyMesh" for number in range(2)]
    for number, (mesh, first, num) in enumerate(zip(meshes, (0, 3), (3, NUM - 3), strict=True)):
        _foam.write_mesh(mesh, first, num, **how, between=(number, 1 - number))

    def check(num_points):
        mesh = FoamSource(str(case)).mesh()
        assert len(mesh.points) == num_points
        every = [{(cell, *x.points[node].round(9)) for node, cell in x.corners().T} for x in (mesh, whole)]
        assert every[0] == every[1]

    check(4 * (NUM + 1))
    edges = read_samples(str(case), entity="cell", edges="nodes")[0]
    pairs = edges_at_nodes(*edges.corners, 4 * (NUM + 1), NUM)
    assert {*map(tuple, pairs.T.tolist())} == {*map(tuple, edges.edge_index.T.tolist())} == _expected()[2]
    points = _foam.boxes(3, NUM - 3)[0] + 1e-12  # as if rounded in text
    (meshes[1] / "points").write_bytes(_foam.head("vectorField", "points", **how) + _foam.items(points, **how))
    check(4 * (NUM + 2))
    for mesh, ids in zip(meshes, (np.arange(16), np.arange(12, 24)), strict=True):
        (mesh / "pointProcAddressing").write_bytes(_foam.head("labelList", "p", **how) + _foam.items(ids, **how))
    check(4 * (NUM + 1))
    (meshes[0] / "pointProcAddressing").write_bytes(_foam.head("labelList", "p", **how) + _foam.items(ids, **how))
    with pytest.raises(CorruptDataError, match=r"processor0.*has 12 numbers of points, but there are 16"):
        FoamSource(str(case)).mesh()


def test_decomposed_is_put_together_and_written_back(tmp_path):
    foamlib = pytest.importorskip("foamlib")
    whole = read_samples(str(_case(tmp_path / "whole")))[0]
    case = tmp_path / "case"
    rows = np.arange(3), np.arange(3, NUM)
    how = {"binary": True, "label": 32}
    for number, own in enumerate(rows):
        mesh = case / f"processor{number}" / "constant" / "polyMesh"
        _foam.write_mesh(mesh, int(own[0]), len(own), **how, between=(number, 1 - number))
        (mesh / "cellProcAddressing").write_bytes(_foam.head("labelList", "c", **how) + _foam.items(own, **how))
        _foam.write_field(case / f"processor{number}" / "10" / "U", "volVectorField", U[1][own], **how)
    raw = read_samples(str(case))[0]
    np.testing.assert_array_equal(raw.points, whole.points)
    assert {*map(tuple, raw.edge_index.T.tolist())} == {*map(tuple, whole.edge_index.T.tolist())}
    np.testing.assert_array_equal(raw.fields["U"].read(), U[1:])
    write_field(str(case), "10", "U_model", U[0], like="U")
    np.testing.assert_array_equal(read_samples(str(case))[0].fields["U_model"].read()[0], U[0])
    text = (case / "processor1" / "10" / "U_model").read_bytes()
    assert b"[0 1 -1 0 0 0 0]" in text
    assert b"type processor" in text
    for binary in (True, False):
        plain = _case(tmp_path / f"plain{binary}", binary=binary)
        write_field(str(plain), "10", "p_model", P[0], like="p")
        np.testing.assert_array_equal(foamlib.FoamFieldFile(plain / "10" / "p_model").internal_field, P[0])


def test_store_has_the_sources_rows(tmp_path):
    scidata.partition([_case(tmp_path / "case")], tmp_path / "store")
    ds = scidata.open_dataset(tmp_path / "store", scidata.init_mesh())
    assert len(ds) == 2
    rows = ds[1].original_id("cell").to_local().numpy()
    np.testing.assert_array_equal(ds[1]["U"].to_local().numpy(), U[1][rows])


def _read_all(case):
    for field in read_samples(str(case))[0].fields.values():
        field.read()


def _cut(path, num=20):
    path.write_bytes(path.read_bytes()[:-num])


def _head(path, num):
    path.write_bytes(path.read_bytes()[:num])


@pytest.mark.parametrize("binary", [True, False])
def test_damage_is_named(tmp_path, binary):
    how = {"binary": binary, "label": 32}
    sound = _case(tmp_path / "sound", binary=binary)
    owner = _foam.boxes(0, NUM)[2]

    def damaged(name, change, match, error=CorruptDataError):
        case = tmp_path / name
        shutil.copytree(sound, case)
        change(case / "constant" / "polyMesh")
        with pytest.raises(error, match=match):
            _read_all(case)

    def owners(ids):
        return lambda mesh: (mesh / "owner").write_bytes(
            _foam.head("labelList", "owner", **how) + _foam.items(ids, **how)
        )

    damaged("cut", lambda mesh: _cut(mesh / "points"), "points: ")
    damaged("gone", lambda mesh: (mesh / "faces").unlink(), "faces: is not there")
    damaged("short", owners(owner[:-1]), f"has {len(owner)} faces, {len(owner) - 1} owners")
    damaged("range", owners(np.where(np.arange(len(owner)) == 3, -7, owner)), r"faces \[3\] name the cells as owners")
    damaged("field", lambda mesh: _cut(mesh.parents[1] / "10" / "U", 90), "U: ")
    for num, match in ((0, "has no header as it has at other times"), (200, "ends before internalField")):
        damaged(f"head{num}", lambda mesh, num=num: _head(mesh.parents[1] / "0.5" / "U", num), f"0.5/U: {match}")
    damaged(
        "other", lambda mesh: _foam.write_field(mesh.parents[1] / "10" / "p", "volScalarField", P[0, :3], **how),
        "3 values, but the mesh has 5 cells", FieldMismatchError,
    )  # fmt: skip
    damaged(
        "moving",
        lambda mesh: shutil.copytree(mesh, mesh.parents[1] / "10" / "polyMesh"),
        "move",
        UnsupportedFormatError,
    )
    with pytest.raises(UnsupportedFormatError, match="no case"):
        FoamSource(str(tmp_path))
