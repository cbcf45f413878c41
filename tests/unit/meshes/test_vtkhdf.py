"""VTKHDF unstructured grids, written as the format's document says: pieces, steps, and what is refused."""

import pickle

import h5py
import numpy as np
import pytest

import scidata
from scidata.errors import CorruptDataError, UnknownNameError, UnsupportedFormatError
from scidata.meshes.samples import read_samples
from tests.unit.meshes._vtkhdf import write


@pytest.mark.parametrize("compressed", [False, True])
def test_pieces_are_joined(tmp_path, compressed):
    path, data = write(tmp_path / "m.vtkhdf", compressed=compressed)
    sample = pickle.loads(pickle.dumps(read_samples(path)))[0]
    assert (sample.kind, sample.sizes, sample.on_sphere) == ("mesh", {"node": 14, "cell": 3}, False)
    assert np.array_equal(sample.points, data["points"].astype("f4"))
    assert sample.cells.offsets.tolist() == [0, 4, 10, 18]
    assert sample.cells.connectivity.tolist() == [0, 1, 2, 3, 1, 2, 3, 4, 5, 0, 13, 12, 11, 10, 9, 8, 7, 6]
    assert sample.cells.cell_type.tolist() == [10, 13, 12]
    assert {n: f.entity for n, f in sample.fields.items()} == {
        "v": "node",
        "c": "cell",
        "node/p": "node",
        "cell/p": "cell",
    }
    assert np.array_equal(sample.fields["v"].read(slice(3, 12, 4)), data["v"][3:12:4])
    assert np.array_equal(sample.fields["node/p"].read(), data["p"])
    assert sample.fields["cell/p"].read(slice(1, 3)).tolist() == [1, 2]
    assert "total" in sample.left_out


@pytest.mark.parametrize(("node", "fault"), [(5, "name a node that is not among the 15"), (-1, "lack a node")])
@pytest.mark.parametrize("suffix", [".vtkhdf", ".vtu"])
def test_no_piece_takes_the_nodes_of_another(tmp_path, suffix, node, fault):
    points, rows = np.random.default_rng(0).random((3, 5, 3)), np.array([[0, 1, 2, 3, 0, 1, 2, 4]] * 3)
    rows[1, 7] = node
    path = tmp_path / f"m{suffix}"
    if suffix == ".vtu":
        text = " ".join
        pieces = text(
            '<Piece NumberOfPoints="5" NumberOfCells="2"><Points><DataArray type="Float64" NumberOfComponents="3" '
            f'format="ascii">{text(map(str, own.ravel()))}</DataArray></Points><Cells>'
            f'<DataArray type="Int64" Name="connectivity" format="ascii">{text(map(str, nodes))}</DataArray>'
            '<DataArray type="Int64" Name="offsets" format="ascii">4 8</DataArray>'
            '<DataArray type="UInt8" Name="types" format="ascii">10 10</DataArray></Cells></Piece>'
            for own, nodes in zip(points, rows, strict=True)
        )
        kind = "UnstructuredGrid"
        path.write_text(f'<VTKFile type="{kind}" byte_order="LittleEndian"><{kind}>{pieces}</{kind}></VTKFile>')
    else:
        with h5py.File(path, "w") as file:
            group = file.create_group("VTKHDF")
            group.attrs.update(Version=[2, 0], Type=np.bytes_("UnstructuredGrid"))
            for name, num in (("Points", 5), ("Cells", 2), ("ConnectivityIds", 8)):
                group[f"NumberOf{name}"] = [num] * 3
            group["Points"], group["Connectivity"] = points.reshape(15, 3), rows.ravel()
            group["Offsets"], group["Types"] = [0, 4, 8] * 3, np.full(6, 10, "u1")
    with pytest.raises(CorruptDataError, match=rf"1 of 6 cells {fault}.*first rows: \[3\]"):
        scidata.partition(path, tmp_path / "out.store")


def test_steps_of_one_mesh(tmp_path):
    path, data = write(tmp_path / "m.vtkhdf", steps=4)
    sample = read_samples(path)[0]
    v, c = sample.fields["v"], sample.fields["c"]
    assert (v.dims[:2], v.shape, v.entity_dim, v.dtype) == (("time", "node"), (4, 14, 3), 1, np.dtype("f8"))
    expected = data["v"].reshape(4, 14, 3)[::-1]
    assert np.array_equal(v.read(), expected)
    assert np.array_equal(v.read(slice(2, 11, 3)), expected[:, 2:11:3])
    assert np.array_equal(v.read_box((slice(1, 4, 2), slice(0, 5), slice(1, 2))), expected[1:4:2, :5, 1:2])
    assert np.array_equal(c.read(slice(1, 3)), data["c"].reshape(4, 3)[:, 1:3])


def test_steps_that_count_their_pieces_anew(tmp_path):
    def repeat(root):
        for name in ("NumberOfPoints", "NumberOfCells", "NumberOfConnectivityIds"):
            values = np.tile(root[name][...], 3)
            del root[name]
            root[name] = values
        root["Steps/PartOffsets"][...] = [0, 2, 4]

    path, data = write(tmp_path / "m.vtkhdf", steps=3, change=repeat)
    sample = read_samples(path)[0]
    assert sample.sizes == {"node": 14, "cell": 3}
    assert np.array_equal(sample.fields["v"].read(), data["v"].reshape(3, 14, 3)[::-1])


def grow(root):
    root["Steps/NumberOfParts"][1] = 1


def few_steps(root):
    del root["Steps/PointOffsets"]
    root["Steps/PointOffsets"] = [0]


def move(root):
    root["Steps/PointOffsets"][1] = 14


def shift_offsets(root):
    root["Offsets"][3] = 1


def drop_types(root):
    del root["Types"]


def shorten(root):
    del root["PointData/v"]
    root["PointData/v"] = np.zeros((3, 3))


def polyhedron(root):
    root["Types"][1] = 42


def short_steps(root):
    root["Steps/PointDataOffsets/v"][0] = 1000


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "ImageData"}, UnsupportedFormatError, "type 'ImageData'"),
        ({"ghosts": True}, UnsupportedFormatError, "vtkGhostType.*1 of 3 cells as ghosts"),
        ({"steps": 2, "change": move}, UnsupportedFormatError, r"changes from step to step \(PointOffsets\)"),
        ({"steps": 2, "change": grow}, UnsupportedFormatError, r"changes from step to step \(NumberOfParts\)"),
        ({"steps": 2, "change": few_steps}, CorruptDataError, r"'VTKHDF/Steps/PointOffsets' has shape \(1,\).*2 steps"),
        ({"change": shift_offsets}, CorruptDataError, "'VTKHDF/Offsets': piece 1 must have 2 offsets"),
        ({"change": drop_types}, UnknownNameError, "no 'VTKHDF/Types'"),
        ({"change": shorten}, CorruptDataError, r"'VTKHDF/PointData/v' has shape \(3, 3\), but 14 rows"),
        ({"change": polyhedron}, UnsupportedFormatError, "cell 1 is a polyhedron"),
        ({"steps": 2, "change": short_steps}, CorruptDataError, "'VTKHDF/PointData/v' has 28 rows.*1014"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, options, error, message):
    path, _ = write(tmp_path / "m.vtkhdf", **options)
    with pytest.raises(error, match=r"m\.vtkhdf.*" + message):
        read_samples(path)[0]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("NumberOfPoints", "Points"),
        ("NumberOfCells", "Types"),
        ("NumberOfConnectivityIds", "Connectivity"),
    ],
)
def test_counts_are_checked_before_anything_is_made(tmp_path, name, what):
    def claim(root):
        root[name][1] = 2**50

    path, _ = write(tmp_path / "a.vtkhdf", change=claim)
    with pytest.raises(CorruptDataError, match=rf"field 'VTKHDF/{what}' has \d+ rows, but the pieces have 11258999"):
        read_samples(path).header(0)


def test_columns_are_no_lists(tmp_path):
    def turn(root):
        values = root["Connectivity"][:][:, None]
        del root["Connectivity"]
        root["Connectivity"] = values

    path, _ = write(tmp_path / "a.vtkhdf", change=turn)
    with pytest.raises(CorruptDataError, match=r"field 'VTKHDF/Connectivity' .*\(shape \(\d+, 1\)\)"):
        read_samples(path).header(0)


def test_a_type_that_is_no_text(tmp_path):
    def bad(root):
        root.attrs["Type"] = np.bytes_(b"Unstructured\xffGrid")

    path, _ = write(tmp_path / "a.vtkhdf", change=bad)
    with pytest.raises(UnsupportedFormatError, match="VTKHDF of type 'Unstructured\ufffdGrid'") as raised:
        read_samples(path).header(0)
    str(raised.value).encode()
