"""Arrays added to VTK's XML files, and new files, as VTK itself reads them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scidata.errors import ConfigError, UnsupportedFormatError
from scidata.meshes.formats.vtk_pieces import read_vtk
from scidata.meshes.formats.vtk_write import add_to_vtk, write_vtk
from scidata.meshes.geometry import RawCells

TETRAHEDRA = RawCells.of_kind(np.array([[0, 1, 2, 3], [1, 2, 3, 4]]), 10)
MIXED = RawCells(
    offsets=np.array([0, 3, 7]), connectivity=np.array([0, 1, 2, 1, 2, 3, 4]), cell_type=np.array([5, 9], np.uint8)
)
POINTS = np.random.default_rng(0).random((5, 3))
DTYPES = ("f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "?")


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("suffix", [".vtp", ".vtu"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str, is_packed: bool) -> None:
    kind = {".vtp": "PolyData", ".vtu": "UnstructuredGrid"}[suffix]
    rng = np.random.default_rng(1)
    arrays = {code: rng.integers(0, 2, (5, 3)).astype(code) for code in DTYPES}
    large = {"large": rng.integers(0, 5, (2, 200_000)).astype("f8")}  # of several blocks
    for number, cells in enumerate((MIXED, None) if suffix == ".vtp" else (TETRAHEDRA, MIXED, None)):
        path, again = tmp_path / f"{number}{suffix}", tmp_path / f"more{number}{suffix}"
        cell_data = {} if cells is None else large
        write_vtk(str(path), kind, POINTS, cells, arrays, cell_data, is_packed=is_packed)
        more = {"f4": arrays["f4"] + 1, "one": POINTS[:, 0]}
        add_to_vtk(str(path), path.read_bytes(), str(again), more, {n: -x for n, x in cell_data.items()})
        for file, of_points, sign in ((path, arrays, 1), (again, arrays | more, -1)):
            found = read_vtk(str(file), file.read_bytes())
            assert (found.points == POINTS).all()
            assert found.points.dtype == POINTS.dtype
            if cells is not None:
                assert found.cells is not None
                assert (found.cells.connectivity == cells.connectivity).all()
                assert (found.cells.offsets == cells.offsets).all()
                assert (found.cell_data["large"] == sign * large["large"]).all()
            assert set(found.point_data) == set(of_points)
            for name, values in of_points.items():
                assert (found.point_data[name] == values).all()
    with pytest.raises(ConfigError, match="3 rows, but the file has 5"):
        add_to_vtk(str(path), path.read_bytes(), str(again), {"few": np.zeros(3)}, {})


def test_a_volume_is_no_polydata(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match="format='vtu'"):
        write_vtk(str(tmp_path / "x.vtp"), "PolyData", POINTS, TETRAHEDRA, {}, {})


def test_files_as_vtk_writes_and_reads_them(tmp_path: Path) -> None:
    io: Any = pytest.importorskip("vtkmodules.vtkIOXML")
    from vtkmodules.util.numpy_support import numpy_to_vtk, vtk_to_numpy
    from vtkmodules.vtkFiltersSources import vtkSphereSource

    source = vtkSphereSource()
    source.SetThetaResolution(9)
    source.Update()
    surface = source.GetOutput()
    num_points, num_cells = surface.GetNumberOfPoints(), surface.GetNumberOfCells()
    rng = np.random.default_rng(0)
    old = rng.random(num_points)
    array = numpy_to_vtk(old)
    array.SetName("old")
    surface.GetPointData().AddArray(array)
    nodes = {"cp": rng.random(num_points).astype("f4"), "wss": rng.random((num_points, 3))}
    cells = {
        "q": rng.integers(0, 9, num_cells),
        "w": rng.random((num_cells, (1 << 17) // num_cells + 1)),
    }  # of two blocks
    vtk_points = vtk_to_numpy(surface.GetPoints().GetData())
    faces = vtk_to_numpy(surface.GetPolys().GetConnectivityArray())

    def check(path: Path, reader: Any, *, has_old: bool) -> None:
        reader.SetFileName(str(path))
        reader.Update()
        found = reader.GetOutput()
        assert (vtk_to_numpy(found.GetPoints().GetData()) == vtk_points).all()
        lists = found.GetPolys() if hasattr(found, "GetPolys") else found.GetCells()
        assert (vtk_to_numpy(lists.GetConnectivityArray()) == faces).all()
        for data, arrays in ((found.GetPointData(), nodes), (found.GetCellData(), cells)):
            for name, values in arrays.items():
                assert (vtk_to_numpy(data.GetArray(name)) == values).all()
        if has_old:
            assert (vtk_to_numpy(found.GetPointData().GetArray("old")) == old).all()

    for number, (mode, packer, order, word) in enumerate(
        product(("Ascii", "Binary", "Appended", "Base64"), ("None", "ZLib", "LZ4", "LZMA"), (0, 1), (32, 64))
    ):
        writer = io.vtkXMLPolyDataWriter()
        path, made = tmp_path / f"{number}.vtp", tmp_path / f"made{number}.vtp"
        writer.SetFileName(str(path))
        writer.SetInputData(surface)
        getattr(writer, f"SetDataModeTo{mode.replace('Base64', 'Appended')}")()
        writer.SetEncodeAppendedData(mode == "Base64")
        getattr(writer, f"SetCompressorTypeTo{packer}")()
        writer.SetByteOrder(order)
        writer.SetHeaderType(word)
        assert writer.Write()
        add_to_vtk(str(path), path.read_bytes(), str(made), nodes, cells)
        check(made, io.vtkXMLPolyDataReader(), has_old=True)
        made.unlink()
    raw = read_vtk(str(path), path.read_bytes())
    for is_packed in (False, True):
        for suffix, kind, reader in (
            (".vtp", "PolyData", io.vtkXMLPolyDataReader()),
            (".vtu", "UnstructuredGrid", io.vtkXMLUnstructuredGridReader()),
        ):
            new = tmp_path / f"new{is_packed}{suffix}"
            write_vtk(str(new), kind, raw.points, raw.cells, nodes, cells, is_packed=is_packed)
            check(new, reader, has_old=False)
