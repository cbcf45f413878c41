"""Other formats through meshio; where it is not installed, what the error says."""

import pickle
import sys

import h5py
import numpy as np
import pytest

from scidata.errors import ConfigError, MissingDependencyError, UnknownNameError, UnsupportedFormatError
from scidata.topology import read_samples

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
    with pytest.raises(MissingDependencyError, match=r"m\.su2.*pip install 'scidata\[meshio\]'"):
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


def test_faces_of_a_plane(tmp_path, meshio):
    path = tmp_path / "m.su2"
    path.write_text(SU2)
    sample = read_samples(str(path))[0]
    assert sample.points.shape == (5, 2)
    assert sorted(sample.cells.cell_type.tolist()) == [5, 9]


def test_what_meshio_cannot_read(tmp_path, meshio):
    path = tmp_path / "m.vtu"
    path.write_text("<VTKFile type='UnstructuredGrid'>")
    with pytest.raises(UnsupportedFormatError, match=r"m\.vtu: meshio cannot read it"):
        read_samples(str(path))[0]


def quads(base):
    base["Zone1/GridElements/ data"][0] = 7


def another_zone(base):
    base.create_group("Zone2").attrs["label"] = np.bytes_("Zone_t")


def another_name(base):
    base.move("Zone1", "Zone")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (quads, "has elements of CGNS type 7"),
        (another_zone, "has 2 zones"),
        (another_name, "meshio cannot read it.*of CGNS it reads tetrahedra"),
    ],
)
def test_cgns_that_meshio_would_read_wrongly(tmp_path, meshio, change, message):
    path = str(tmp_path / "m.cgns")
    meshio.Mesh(np.random.default_rng(0).random((4, 3)), [("tetra", [[0, 1, 2, 3]])]).write(path)
    with h5py.File(path, "a") as file:
        file["Base/Zone1/GridElements/ data"] = np.array([10, 0], "i4")  # as other writers say what they are
        file["Base"].create_group("Family")
    assert read_samples(path)[0].cells.connectivity.tolist() == [0, 1, 2, 3]
    with h5py.File(path, "a") as file:
        change(file["Base"])
    with pytest.raises(UnsupportedFormatError, match=message):
        read_samples(path)[0]
