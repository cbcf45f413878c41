"""Fields into the files of solvers, and polyhedra as VTU: what VTK's readers and ours find there."""

import os

import h5py
import numpy as np
import pytest

import scidata
from scidata.errors import ConfigError, UnsupportedFormatError
from scidata.meshes.order.faces import SOLID_FACES
from scidata.meshes.samples import read_samples

from . import _foam
from ._cgns import write_adf, write_hdf5
from ._fluent import write_case, write_results
from .test_cgns import block, three_zones
from .test_fluent import triangles_and_a_pentagon, turned_faces
from .test_polyhedra_and_polydata import _boxes, _grid


def write(folder, store, fields, **kwargs):
    """Write each sample's row numbers times a factor; return these fields in the source's order."""
    ds = scidata.open_dataset(str(store))
    out = {}
    with scidata.create(str(folder), like=ds, fields=fields, **kwargs) as writer:
        for index in range(len(ds)):
            for name, how in fields.items():
                num = len(ds.reader.original_id(index, 0, how["entity"]))
                values = np.random.default_rng(index).random((num, how.get("components", 1))).astype("f4")
                out[name, index] = values[:, 0] if how.get("components", 1) == 1 else values
            given = {
                name: out[name, index][ds.reader.original_id(index, 0, how["entity"])] for name, how in fields.items()
            }
            writer[index] = {name: scidata_tensor(values) for name, values in given.items()}
    return out


def scidata_tensor(values):
    import torch

    return torch.from_numpy(np.ascontiguousarray(values))


def test_cgns(tmp_path):
    points, cells = block()
    path, root = tmp_path / "m.cgns", three_zones(points, cells)
    write_hdf5(path, root)
    scidata.partition(path, tmp_path / "m.store")
    node, cell = {"entity": "node", "dtype": "float32"}, {"entity": "cell", "dtype": "float32"}
    fields = {"p": node, "V": node | {"components": 3}, "u": cell, "new": cell}
    found = write(tmp_path / "out", tmp_path / "m.store", fields)
    assert os.listdir(tmp_path / "out") == ["m.cgns"]
    old, sample = read_samples(path)[0], read_samples(tmp_path / "out/m.cgns")[0]
    np.testing.assert_array_equal(sample.points, old.points)
    np.testing.assert_array_equal(sample.cells.connectivity, old.cells.connectivity)
    for name in ("p", "u", "new"):  # u in the place of the source's
        np.testing.assert_array_equal(sample.fields[name].read(), found[name, 0])
    for i, x in enumerate("XYZ"):
        np.testing.assert_array_equal(sample.fields[f"V{x}"].read(), found["V", 0][:, i])
    vtk = pytest.importorskip("vtk")
    from vtkmodules.util.numpy_support import vtk_to_numpy

    reader = vtk.vtkCGNSReader()
    reader.SetFileName(str(tmp_path / "out/m.cgns"))
    reader.UpdateInformation()
    reader.EnableAllCellArrays()
    reader.EnableAllPointArrays()
    reader.Update()
    blocks = reader.GetOutput().GetBlock(0)
    zones = [blocks.GetBlock(i) for i in range(3)]
    assert [zone.GetCellData().HasArray("u") for zone in zones] == [1, 1, 1]
    for zone in zones:
        at = vtk_to_numpy(zone.GetPoints().GetData())
        row = np.array([int(np.flatnonzero((old.points == place).all(axis=1))[0]) for place in at])
        np.testing.assert_array_equal(vtk_to_numpy(zone.GetPointData().GetArray("p")), found["p", 0][row])
        np.testing.assert_array_equal(vtk_to_numpy(zone.GetPointData().GetArray("V")), found["V", 0][row])
    every = np.concatenate([vtk_to_numpy(zone.GetCellData().GetArray("new")) for zone in zones])
    np.testing.assert_array_equal(every, found["new", 0])
    with pytest.raises(ConfigError, match="32 letters"):
        write(tmp_path / "long", tmp_path / "m.store", {"n" * 33: node})
    write_adf(path, root)
    scidata.partition(path, tmp_path / "adf.store")
    with pytest.raises(UnsupportedFormatError, match=r"ADF.*adf2hdf"):
        write(tmp_path / "adf", tmp_path / "adf.store", {"p": node})


def test_fluent(tmp_path):
    points, cells = triangles_and_a_pentagon()
    edges = [[a, b] for cell in cells for a, b in zip(cell, cell[1:] + cell[:1], strict=True)]
    faces, owner, neighbour = turned_faces(edges, [i for i, cell in enumerate(cells) for _ in cell])
    for name in ("a", "bare"):
        path = tmp_path / f"{name}.cas.h5"
        write_case(path, points, [each[::-1] for each in faces], owner, neighbour, len(cells))
    write_results(tmp_path / "a.dat.h5", {"SV_P": np.arange(4.0), "SV_T": np.arange(4.0) + 300}, phases=2)
    scidata.partition([tmp_path / f"{name}.cas.h5" for name in ("a", "bare")], tmp_path / "a.store", fields=[])
    cell = {"entity": "cell", "dtype": "float32"}
    found = write(tmp_path / "out", tmp_path / "a.store", {"SV_P": cell, "phase-2_SV_T": cell, "force": cell})
    assert sorted(os.listdir(tmp_path / "out")) == ["a.cas.h5", "a.dat.h5", "bare.cas.h5", "bare.dat.h5"]
    assert os.readlink(tmp_path / "out/a.cas.h5") == "../a.cas.h5"
    for index, name in enumerate(("a", "bare")):
        sample = read_samples(tmp_path / "out" / f"{name}.cas.h5")[0]
        for field in ("SV_P", "force", "phase-2_SV_T"):
            np.testing.assert_array_equal(sample.fields[field].read(), found[field, index])
    np.testing.assert_array_equal(read_samples(tmp_path / "out/a.cas.h5")[0].fields["SV_T"].read(), np.arange(4) + 300)
    with h5py.File(tmp_path / "out/a.dat.h5") as h5:
        assert h5["results/1/phase-1/cells/fields"][0] == b"SV_P;SV_T;force;"
        assert "residuals" in h5["results"]
    for dat in ("run-1.dat.h5", "run-2.dat.h5"):
        write_results(tmp_path / dat, {"SV_P": np.arange(4.0)})
    scidata.partition(str(tmp_path / "run-*.dat.h5"), tmp_path / "run.store", mesh=tmp_path / "a.cas.h5")
    found = write(tmp_path / "run", tmp_path / "run.store", {"SV_P": cell})
    names = sorted(name for name in os.listdir(tmp_path / "run") if name.endswith(".dat.h5"))
    assert len(names) == 2
    for index, name in enumerate(names):
        sample = read_samples(tmp_path / "run" / name.replace(".dat.", ".cas."))[0]
        np.testing.assert_array_equal(sample.fields["SV_P"].read(), found["SV_P", index])
    with pytest.raises(ConfigError, match="fields of cells"):
        write(tmp_path / "no", tmp_path / "run.store", {"p": {"entity": "node", "dtype": "float32"}})


@pytest.mark.parametrize("source", ["vtu", "fluent", "openfoam"])
def test_polyhedra_as_vtu(tmp_path, source):
    pyvista, vtk = pytest.importorskip("pyvista"), pytest.importorskip("vtk")
    points, cells = _boxes(np.random.default_rng(0))
    if source == "vtu":
        path = tmp_path / "m.vtu"
        pyvista.wrap(_grid(vtk, points, cells, solid=(0, 9, 26))).save(path)
        num_faces = np.full(27, 6)
    elif source == "fluent":
        path, sides = tmp_path / "m.msh.h5", cells[:, np.array(SOLID_FACES[12])].reshape(-1, 4)
        faces, *both = turned_faces(sides.tolist(), np.repeat(np.arange(27), 6))
        owner, neighbour = (np.where(np.array(each) < 0, -1, np.array(each) // 3) for each in both)
        kept = np.flatnonzero(owner != neighbour)  # hexahedra in rows of three
        write_case(path, points, [faces[i] for i in kept], owner[kept], neighbour[kept], 9)
        num_faces = np.full(9, 14)
    else:
        path = tmp_path / "m"
        for number, (first, num) in enumerate(((0, 3), (3, 2))):
            between = (number, 1 - number)
            _foam.write_mesh(path / f"processor{number}/constant/polyMesh", first, num, binary=True, label=32,
                             between=between)  # fmt: skip
            rows = path / f"processor{number}/constant/polyMesh/cellProcAddressing"
            ids = np.arange(first, first + num)[::-1] if number else np.arange(3)
            rows.write_bytes(_foam.head("labelList", "cellProcAddressing", binary=True, label=32)
                             + _foam.items(ids, binary=True, label=32))  # fmt: skip
            _foam.write_field(path / f"processor{number}/1/p", "volScalarField", ids * 1.0, binary=True, label=32)
        num_faces = np.full(5, 6)
    scidata.partition(path, tmp_path / "m.store", entity="cell")
    field = {"entity": "cell", "dtype": "float32", "components": 3}
    found = write(tmp_path / "out", tmp_path / "m.store", {"f": field}, format="vtu")
    (name,) = [os.path.join(base, each) for base, _, names in os.walk(tmp_path / "out") for each in names]
    grid, sample = pyvista.read(name), read_samples(path, entity="cell")[0]
    np.testing.assert_array_equal(grid.cell_data["f"], found["f", 0])
    assert [grid.GetCell(i).GetNumberOfFaces() for i in range(grid.n_cells)] == num_faces.tolist()
    volumes = sample.fields["volume"].read()
    np.testing.assert_allclose(np.abs(grid.compute_cell_sizes()["Volume"]), volumes, rtol=0.1)  # faces are warped
    again = read_samples(name, entity="cell")[0]
    np.testing.assert_allclose(again.fields["volume"].read(), volumes, rtol=1e-12)
    np.testing.assert_allclose(again.points, sample.points, rtol=1e-12)
    if source != "openfoam":  # whose processors lie side by side
        np.testing.assert_array_equal(grid.points, points)
        np.testing.assert_array_equal(again.edge_index, sample.edge_index)
    if source == "vtu":
        assert grid.celltypes.tolist() == pyvista.read(path).celltypes.tolist()
