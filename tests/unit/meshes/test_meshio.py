"""Other formats through meshio; where it is not installed, what the error says."""

import os
import pickle
import sys

import h5py
import numpy as np
import pytest

from scidata.errors import (
    ConfigError,
    CorruptDataError,
    MissingDependencyError,
    RefusedError,
    UnknownNameError,
    UnsupportedFormatError,
)
from scidata.meshes.formats.meshio import MeshioSource
from scidata.meshes.samples import read_samples

POINTS = np.random.default_rng(0).random((6, 3))
SU2 = """NDIME= 2
NELEM= 2
5 0 1 2 0
9 1 3 4 2 1
NPOIN= 5
0.0 0.0 0
1.0 0.0 1
1.0 1.0 2
2.0 0.0 3
2.0 1.0 4
NMARK= 0
"""


def test_without_meshio(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "meshio", None)  # as an import finds it that is not installed
    path = tmp_path / "m.su2"
    path.write_text(SU2)
    with pytest.raises(MissingDependencyError, match=r"m\.su2.*pip install 'meshio>="):
        read_samples(str(path))[0]


def test_what_is_no_mesh_keeps_its_own_error(tmp_path):
    path = tmp_path / "m.txt"
    path.write_text("hello")
    with pytest.raises(UnsupportedFormatError, match=r"m\.txt: begins with b'hello'"):
        read_samples(str(path))[0]
    with pytest.raises(FileNotFoundError, match=r"m\.su2: there is no such file.*'m\.txt'"):
        read_samples(str(tmp_path / "m.su2"))[0]


@pytest.fixture
def meshio():
    return pytest.importorskip("meshio", reason="the extra that reads other mesh formats")


@pytest.mark.parametrize("suffix", ["vtu", "vtk"])
def test_cells_and_fields(tmp_path, meshio, suffix):
    path = str(tmp_path / f"m.{suffix}")
    u, k = np.arange(18.0).reshape(6, 3), [np.array([1.5]), np.array([2.5, 3.5])]
    cells = [("hexahedron", [[0, 1, 2, 3, 4, 5, 0, 1]]), ("tetra", [[0, 1, 2, 3], [2, 3, 4, 5]])]
    meshio.Mesh(POINTS, cells, point_data={"u": u, "k": np.arange(6.0)}, cell_data={"k": k}).write(path)
    sample = pickle.loads(pickle.dumps(read_samples(path)))[0]
    assert (sample.kind, sample.sizes) == ("mesh", {"node": 6, "cell": 3})
    assert np.array_equal(sample.points, POINTS)
    assert sample.cells.offsets.tolist() == [0, 8, 12, 16]
    assert sample.cells.cell_type.tolist() == [12, 10, 10]
    assert sample.cells.connectivity.tolist() == [n for _, rows in cells for row in rows for n in row]
    assert {"u", "node/k", "cell/k"} <= set(sample.fields)
    assert np.array_equal(sample.fields["u"].read(slice(1, 6, 2)), u[1::2])
    assert sample.fields["cell/k"].read().tolist() == [1.5, 2.5, 3.5]
    assert list(read_samples(path, fields="u")[0].fields) == ["u"]
    with pytest.raises(UnknownNameError, match=r"no field 'v'"):
        read_samples(path, fields="v")[0]
    with pytest.raises(ConfigError, match="points="):
        read_samples(path, points="x,y")[0]


def test_gmsh(tmp_path, meshio):
    path = str(tmp_path / "m.msh")
    cells = [("tetra", [[0, 1, 2, 3], [2, 3, 4, 5]])]
    meshio.Mesh(POINTS, cells, point_data={"u": POINTS[:, 0]}, cell_data={"k": [[1.5, 2.5]]}).write(
        path, file_format="gmsh"
    )
    sample = read_samples(path)[0]
    assert sample.cells.connectivity.tolist() == [0, 1, 2, 3, 2, 3, 4, 5]
    assert np.array_equal(sample.fields["u"].read(slice(2, 4)), POINTS[2:4, 0])
    assert sample.fields["k"].read().tolist() == [1.5, 2.5]


@pytest.mark.parametrize("suffix", ["vtk", "vtu", "msh"])
def test_a_pipe_is_not_waited_for(tmp_path, meshio, suffix):
    os.mkfifo(tmp_path / f"m.{suffix}")
    (tmp_path / f"zero.{suffix}").symlink_to("/dev/zero")
    for name in ("m", "zero"):
        with pytest.raises(RefusedError, match=rf"{name}\.{suffix}: not a regular file"):
            list(read_samples(str(tmp_path / f"{name}.{suffix}")))


def test_faces_of_a_plane(tmp_path, meshio):
    path = tmp_path / "m.su2"
    path.write_text(SU2)
    sample = read_samples(str(path))[0]
    assert sample.points.shape == (5, 2)
    assert sorted(sample.cells.cell_type.tolist()) == [5, 9]


def test_what_meshio_cannot_read(tmp_path, meshio):
    path = tmp_path / "m.vtk"
    path.write_text("# vtk DataFile Version 4.2\nhello")
    with pytest.raises(UnsupportedFormatError, match=r"m\.vtk: (meshio|VTK) cannot read it"):
        read_samples(str(path))[0]


def test_vtu_that_is_none(tmp_path):
    path = tmp_path / "m.vtu"
    path.write_text("<VTKFile type='UnstructuredGrid'>")
    with pytest.raises(CorruptDataError, match=r"m\.vtu: is not well-formed XML"):
        read_samples(str(path))[0]
    path.write_text("<VTKFile type='PolyData'></VTKFile>")
    with pytest.raises(UnsupportedFormatError, match=r"type 'PolyData', but the suffix \.vtu is that of Unstr"):
        read_samples(str(path))[0]


def test_vtu_of_other_cells(tmp_path):
    """Wedges keep VTK's order of nodes; a polyhedron without faces, and no types, are damage."""
    data = (
        '<VTKFile type="UnstructuredGrid"><UnstructuredGrid><Piece NumberOfPoints="6" NumberOfCells="1"><Points>'
        f'<DataArray type="Float64" NumberOfComponents="3" format="ascii">{"0 1 2 " * 6}</DataArray></Points><Cells>'
        '<DataArray type="Int64" Name="connectivity" format="ascii">5 4 3 2 1 0</DataArray>'
        '<DataArray type="Int64" Name="offsets" format="ascii">6</DataArray>'
        '<DataArray type="UInt8" Name="types" format="ascii">13</DataArray>'
        "</Cells></Piece></UnstructuredGrid></VTKFile>"
    )
    path = tmp_path / "m.vtu"
    path.write_text(data)
    cells = read_samples(str(path))[0].cells
    assert (cells.connectivity.tolist(), cells.cell_type.tolist()) == ([5, 4, 3, 2, 1, 0], [13])
    path.write_text(data.replace(">13<", ">42<"))
    with pytest.raises(CorruptDataError, match=r"Cells has no array 'faceoffsets'"):
        read_samples(str(path))[0]
    path.write_text(data.replace("types", "kinds"))
    with pytest.raises(CorruptDataError, match=r"Cells has no array 'types'"):
        read_samples(str(path))[0]


# ------------------------------------------------------------------------------------ what a file leads to, or hides


@pytest.fixture
def xdmf(tmp_path, meshio):
    """A mesh in XDMF with its arrays in HDF5 beside it, as meshio and FEniCS write them."""
    folder = tmp_path / "mesh"
    folder.mkdir()
    path = folder / "m.xdmf"
    meshio.Mesh(POINTS, [("tetra", [[0, 1, 2, 3], [2, 3, 4, 5]])], point_data={"u": POINTS[:, 0]}).write(path)
    return path


def edit_text(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_xdmf_with_hdf5_beside_it(xdmf):
    assert "m.h5:" in xdmf.read_text()
    sample = pickle.loads(pickle.dumps(read_samples(str(xdmf))))[0]
    assert np.array_equal(sample.points, POINTS)
    assert np.array_equal(sample.fields["u"].read(), POINTS[:, 0])
    (xdmf.parent / "data").mkdir()
    (xdmf.parent / "m.h5").rename(xdmf.parent / "data" / "m.h5")
    edit_text(xdmf, "m.h5:", "data/m.h5:")
    assert np.array_equal(read_samples(str(xdmf))[0].points, POINTS)


@pytest.mark.parametrize("way", ["absolute", "..", "link"])
def test_xdmf_that_leads_out_of_its_folder(xdmf, way):
    outside = xdmf.parent.parent / "secret.h5"
    (xdmf.parent / "m.h5").rename(outside)
    if way == "link":
        (xdmf.parent / "m.h5").symlink_to(outside)
    else:
        edit_text(xdmf, "m.h5:", f"{outside}:" if way == "absolute" else "../secret.h5:")
    with pytest.raises(RefusedError, match=r"m\.xdmf: names the file .*secret\.h5.*allow_external=True"):
        read_samples(str(xdmf))[0]
    assert np.array_equal(read_samples(str(xdmf), allow_external=True)[0].points, POINTS)


def test_xdmf_whose_numbers_lie_in_a_binary_file(tmp_path, meshio, monkeypatch):
    monkeypatch.chdir(tmp_path)  # meshio writes and finds them in the current folder
    mesh = meshio.Mesh(POINTS, [("tetra", [[0, 1, 2, 3]])])
    meshio.xdmf.write("m.xdmf", mesh, data_format="Binary")
    assert np.array_equal(read_samples(str(tmp_path / "m.xdmf"))[0].points, POINTS)
    (tmp_path / "deep").mkdir()
    (tmp_path / "m.xdmf").rename(tmp_path / "deep" / "m.xdmf")
    with pytest.raises(RefusedError, match="out of the folder of the mesh"):
        read_samples(str(tmp_path / "deep" / "m.xdmf"))[0]


@pytest.mark.parametrize("kind", ["link", "virtual", "storage"])
def test_hdf5_of_xdmf_that_leads_elsewhere(xdmf, kind):
    inner, outside = xdmf.parent / "m.h5", xdmf.parent.parent / "secret.h5"
    outside.write_bytes(inner.read_bytes())
    with h5py.File(inner, "a") as f:
        name = next(name for name in f if f[name].shape == POINTS.shape)
        del f[name]
        if kind == "link":
            f[name] = h5py.ExternalLink(str(outside), name)
        elif kind == "virtual":
            layout = h5py.VirtualLayout(POINTS.shape, "f8")
            layout[...] = h5py.VirtualSource(str(outside), name, POINTS.shape)
            f.create_virtual_dataset(name, layout)
        else:
            raw = xdmf.parent.parent / "raw"
            raw.write_bytes(POINTS.tobytes())
            f.create_dataset(name, POINTS.shape, "f8", external=[(str(raw), 0, POINTS.nbytes)])
    with pytest.raises(RefusedError, match=r"m\.h5: .*lies in another file .*allow_external=True"):
        read_samples(str(xdmf))[0]
    assert np.array_equal(read_samples(str(xdmf), allow_external=True)[0].points, POINTS)


def test_med_with_an_external_link(tmp_path, meshio):
    path, outside = tmp_path / "m.med", tmp_path / "secret.h5"
    meshio.Mesh(POINTS, [("tetra", [[0, 1, 2, 3]])]).write(path)
    assert read_samples(str(path))[0].sizes["cell"] == 1
    outside.write_bytes(path.read_bytes())
    with h5py.File(path, "a") as f:
        del f["ENS_MAA"]
        f["ENS_MAA"] = h5py.ExternalLink(str(outside), "ENS_MAA")
    with pytest.raises(RefusedError, match=r"m\.med: 'ENS_MAA' lies in another file"):
        read_samples(str(path))[0]
    assert read_samples(str(path), allow_external=True)[0].sizes["cell"] == 1


def test_hdf5_of_xdmf_that_claims_what_it_does_not_hold(xdmf):
    with h5py.File(xdmf.parent / "m.h5", "a") as f:
        name = next(name for name in f if f[name].shape == POINTS.shape)
        del f[name]
        f.create_dataset(name, (2**40, 3), "f8", chunks=(1024, 3))
    with pytest.raises(UnsupportedFormatError, match=r"m\.h5: .*claims 26388279066624 bytes, but 0 are stored"):
        read_samples(str(xdmf))[0]


LAUGHS = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>\n'
FOREIGN = '<!DOCTYPE x [<!ENTITY a SYSTEM "/etc/hostname">]>\n'


@pytest.mark.parametrize("suffix", ["xdmf", "vtu", "xml"])
@pytest.mark.parametrize("declared", [LAUGHS, FOREIGN])
def test_xml_entities_are_refused(tmp_path, meshio, suffix, declared):
    path = tmp_path / f"m.{suffix}"
    meshio.Mesh(POINTS, [("tetra", [[0, 1, 2, 3]])]).write(path)
    assert read_samples(str(path))[0].sizes["cell"] == 1
    head, _, rest = path.read_text().partition("?>\n") if path.read_text().startswith("<?xml") else ("", "", "")
    path.write_text(f"{head}?>\n{declared}{rest}" if head else declared + path.read_text())
    with pytest.raises(RefusedError, match=rf"m\.{suffix}: declares the XML entity 'a'"):
        read_samples(str(path))[0]


def test_the_document_type_that_xdmf_writers_name(xdmf):
    xdmf.write_text('<?xml version="1.0"?>\n<!DOCTYPE Xdmf SYSTEM "Xdmf.dtd" []>\n' + xdmf.read_text())
    assert np.array_equal(read_samples(str(xdmf))[0].points, POINTS)


def test_xml_that_is_too_large(xdmf, monkeypatch):
    monkeypatch.setattr("scidata.meshes.formats.outside._MAX_XML_BYTES", 100)
    with pytest.raises(UnsupportedFormatError, match=r"m\.xdmf: has \d+ bytes, but at most 100 of XML"):
        read_samples(str(xdmf))[0]


def test_xml_that_is_cut(xdmf):
    xdmf.write_bytes(xdmf.read_bytes()[:-20])
    with pytest.raises(CorruptDataError, match=r"m\.xdmf: is not well-formed XML"):
        read_samples(str(xdmf))[0]


ABAQUS = "*NODE\n1, 0.,0.,0.\n2, 1.,0.,0.\n3, 0.,1.,0.\n4, 0.,0.,1.\n*ELEMENT, TYPE=C3D4\n1, 1,2,3,4\n"


def test_abaqus_includes(tmp_path, meshio):
    folder = tmp_path / "mesh"
    folder.mkdir()
    path = folder / "m.inp"
    (folder / "part.inp").write_text(ABAQUS)
    path.write_text("*INCLUDE, INPUT=part.inp\n")
    assert read_samples(str(path))[0].sizes["cell"] == 1
    (folder / "part.inp").rename(tmp_path / "part.inp")
    for name in ("../part.inp", str(tmp_path / "part.inp")):
        path.write_text(f"*include, input={name}\n")
        with pytest.raises(RefusedError, match=r"m\.inp: names the file .*part\.inp"):
            read_samples(str(path))[0]
        assert read_samples(str(path), allow_external=True)[0].sizes["cell"] == 1
    path.write_text("*INCLUDE, INPUT=m.inp\n")
    with pytest.raises(RefusedError, match=r"includes 'm\.inp' twice, or in a circle"):
        read_samples(str(path))[0]


def test_tetgen_whose_other_file_is_a_link_out(tmp_path, meshio):
    folder = tmp_path / "mesh"
    folder.mkdir()
    meshio.Mesh(POINTS, [("tetra", [[0, 1, 2, 3]])]).write(folder / "m.node")
    assert read_samples(str(folder / "m.node"))[0].sizes["cell"] == 1
    (folder / "m.ele").rename(tmp_path / "m.ele")
    (folder / "m.ele").symlink_to(tmp_path / "m.ele")
    with pytest.raises(RefusedError, match=r"m\.node: names the file 'm\.ele'"):
        read_samples(str(folder / "m.node"))[0]


@pytest.mark.parametrize("suffix", [".msh", ".su2", ".ply"])
def test_a_process_of_its_own_gives_the_same(meshio, tmp_path, suffix):
    """Formats that are read apart give what meshio gives here."""
    points = np.random.default_rng(0).random((5, 2 if suffix == ".su2" else 3))
    cells = [("triangle", np.array([[0, 1, 2], [1, 2, 3]])), ("quad", np.array([[0, 1, 3, 4]]))]
    data = {} if suffix in (".su2", ".ply") else {"t": np.arange(5.0)}
    path = str(tmp_path / f"mesh{suffix}")
    meshio.write(path, meshio.Mesh(points, cells, point_data=data))
    found, wanted = MeshioSource(path).mesh, meshio.read(path)
    assert np.array_equal(found.points, wanted.points)
    assert found.cells.connectivity.tolist() == [n for c in wanted.cells for row in c.data for n in row]
    assert found.cells.cell_type.tolist() == [{"triangle": 5, "quad": 9}[c.type] for c in wanted.cells for _ in c.data]
    assert found.point_data.keys() == wanted.point_data.keys()
    assert all(np.array_equal(found.point_data[name], wanted.point_data[name]) for name in wanted.point_data)


def test_a_count_without_end(meshio, tmp_path, monkeypatch):
    """A reader that loops as often as the file says ends with the processor time that its size explains."""
    monkeypatch.setattr("scidata.meshes.formats.meshio._LEAST_SECONDS", 2)
    path = tmp_path / "mesh.msh"
    cells = [("triangle", np.array([[0, 1, 2]]))]
    meshio.write(path, meshio.Mesh(np.eye(3), cells, cell_data={"t": [np.zeros(1)]}), file_format="gmsh")
    raw = path.read_bytes()
    assert raw.count(b"$ElementData\n1\n") == 1
    path.write_bytes(raw.replace(b"$ElementData\n1\n", b"$ElementData\n1099511627776\n"))
    with pytest.raises(UnsupportedFormatError, match=r"mesh\.msh: .*not through after 2 s of processor time"):
        _ = MeshioSource(str(path)).mesh


@pytest.mark.parametrize(
    ("where", "bits", "said"),
    [
        ("PointData", 1, "marks 1 of 4 points as ghosts"), ("CellData", 1, "marks 1 of 2 cells as ghosts"),
        ("PointData", 2, "1 of 4 points as hidden"), ("CellData", 32, "1 of 2 cells as hidden"), ("CellData", 0, ""),
        ("CellData", 16, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["vtp", "vtu"])
def test_ghosts_of_vtk_are_no_rows(tmp_path, suffix, where, bits, said):
    num = 4 if where == "PointData" else 2
    flags = " ".join(["0"] * (num - 1) + [str(bits)])
    array = f'<DataArray type="UInt8" Name="vtkGhostType" format="ascii">{flags}</DataArray>'
    data = f"<{where}>{array}</{where}>"
    array_of_points = (
        '<DataArray type="Float64" NumberOfComponents="3" format="ascii">0 0 0 1 0 0 1 1 0 0 1 0</DataArray>'
    )
    points = f"<Points>{array_of_points}</Points>"
    lists = (
        '<DataArray type="Int64" Name="connectivity" format="ascii">0 1 2 0 2 3</DataArray>'
        '<DataArray type="Int64" Name="offsets" format="ascii">3 6</DataArray>'
    )
    types = '<DataArray type="UInt8" Name="types" format="ascii">5 5</DataArray>'
    kind, count, cells = "PolyData", "NumberOfPolys", f"<Polys>{lists}</Polys>"
    if suffix == "vtu":
        kind, count, cells = "UnstructuredGrid", "NumberOfCells", f"<Cells>{lists}{types}</Cells>"
    path = tmp_path / f"mesh.{suffix}"
    path.write_text(
        f'<?xml version="1.0"?><VTKFile type="{kind}" version="1.0" byte_order="LittleEndian"><{kind}>'
        f'<Piece NumberOfPoints="4" {count}="2">{points}{cells}{data}</Piece></{kind}></VTKFile>'
    )
    if not said:
        (sample,) = read_samples(path)
        assert not sample.fields
        return
    with pytest.raises(UnsupportedFormatError, match=said):
        read_samples(path)[0]


def test_binary_legacy_polydata_by_vtk(tmp_path):
    pytest.importorskip("vtkmodules")
    points, values = np.random.default_rng(0).random((4, 3)), np.array([0.1, 0.7])

    def array(of, dtype):
        return np.asarray(of, dtype).tobytes()

    path = tmp_path / "m.vtk"
    parts = (
        b"# vtk DataFile Version 3.0\nx\nBINARY\nDATASET POLYDATA",
        b"POINTS 4 double", array(points, ">f8"), b"POLYGONS 2 8", array([3, 0, 1, 2, 3, 0, 2, 3], ">i4"),
        b"CELL_DATA 2\nSCALARS p double 1\nLOOKUP_TABLE default", array(values, ">f8"),
    )  # fmt: skip
    path.write_bytes(b"\n".join(parts) + b"\n")
    raw = read_samples(path)[0]
    np.testing.assert_array_equal(raw.points, points)
    np.testing.assert_array_equal(raw.cells.connectivity, [0, 1, 2, 0, 2, 3])
    np.testing.assert_array_equal(raw.fields["p"].read(), values)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises((UnsupportedFormatError, CorruptDataError), match=r"m\.vtk"):
        read_samples(path)[0].fields["p"].read()


def test_legacy_polydata_as_text_by_vtk(tmp_path):
    pytest.importorskip("vtkmodules")
    path = tmp_path / "m.vtk"
    text = (
        "# vtk DataFile Version 3.0\nx\nASCII\nDATASET POLYDATA\nPOINTS 4 float\n0 0 0 1 0 0 1 1 0 0 1 0\n"
        "POLYGONS 2 8\n3 0 1 2\n3 0 2 3\nCELL_DATA 2\nSCALARS p double 1\nLOOKUP_TABLE default\n0.1 0.7\n"
        "POINT_DATA 4\nVECTORS u float\n0 0 1 0 0 2 0 0 3 0 0 4\n"
    )
    path.write_text(text)
    raw = read_samples(path)[0]
    np.testing.assert_array_equal(raw.cells.connectivity, [0, 1, 2, 0, 2, 3])
    np.testing.assert_array_equal(raw.fields["p"].read(), [0.1, 0.7])
    np.testing.assert_array_equal(raw.fields["u"].read()[:, 2], [1, 2, 3, 4])
    assert set(raw.fields) == {"p", "u"}
    for rest in ("0 3 0 0 4\n", "VECTORS u"):  # cut off here VTK makes up the rest
        path.write_text(text[: text.index(rest) + (9 if rest == "VECTORS u" else 0)])
        with pytest.raises(UnsupportedFormatError, match=r"m\.vtk: VTK cannot read it"):
            read_samples(path)[0]


def test_normals_of_corners_are_none_of_points(tmp_path):
    path, points = tmp_path / "m.obj", "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 1 1 0\n"
    one = "vn 0 0 1\n"
    for text, fields in (
        (f"{points}{4 * one}f 1//1 2//2 3//3\nf 2//2 4//4 3//3\n", {"obj:vn", "obj:group_ids"}),
        (f"{points}{4 * one}f 1//2 2//2 3//3\nf 2//2 4//4 3//3\n", {"obj:group_ids"}),  # of other corners
        (f"{points}{one}vt 0 0\nf 1/1/1 2/1/1 3/1/1\nf 2/1/1 4/1/1 3/1/1\n", {"obj:group_ids"}),
    ):
        path.write_text(text)
        sample = read_samples(path)[0]
        assert sample.cells.connectivity.tolist() == [0, 1, 2, 1, 3, 2]
        assert set(sample.fields) == fields


def test_zones_of_su2_lie_side_by_side(tmp_path):
    zone = "NDIME= 2\nNELEM= 1\n5 0 1 2 0\nNPOIN= 3\n{x} 0 0\n1 0 1\n0 1 2\nNMARK= 0\n"
    path = tmp_path / "m.su2"
    path.write_text(f"NZONE= 2\nIZONE= 1\n{zone.format(x=0)}IZONE= 2\n{zone.format(x=7)}")
    sample = read_samples(path)[0]
    assert sample.points.tolist() == [[0, 0], [1, 0], [0, 1], [7, 0], [1, 0], [0, 1]]
    assert sample.cells.connectivity.tolist() == [0, 1, 2, 3, 4, 5]
    assert sample.fields["zone"].read().tolist() == [0, 1]
    path.write_text(f"NZONE= 2\nIZONE= 1\n{zone.format(x=0)}")
    with pytest.raises(UnsupportedFormatError, match="1 of 2 zones"):
        read_samples(path)[0]
