"""Polyhedra of VTU, and PolyData of VTKHDF, as VTK's own writers write them."""

import re
import shutil

import h5py
import numpy as np
import pytest

from scidata.data.output.fields import OutputField
from scidata.data.output.packing import Packing
from scidata.data.output.sample_formats import NEW, ONTO, NewArray, SourceFile
from scidata.errors import CorruptDataError, FieldMismatchError, UnsupportedFormatError
from scidata.meshes.formats.arrays import join_cells
from scidata.meshes.formats.vtk_write import write_vtk
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.faces import SOLID_FACES, edges_across_faces
from scidata.meshes.order.polyhedra import Faces
from scidata.meshes.samples import read_samples

SIDE = 3


def _boxes(rng):
    """Return points and hexahedra of a block whose points are moved a little."""
    at = np.stack(np.meshgrid(*[np.arange(SIDE + 1)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    first = at[(at < SIDE).all(axis=1)]
    corners = np.array([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)])
    cells = (first[:, None] + corners) @ [(SIDE + 1) ** 2, SIDE + 1, 1]
    return at + 0.2 * rng.random(at.shape), cells


def _grid(vtk, points, cells, *, solid=(), turned=()):
    """Return hexahedra as polyhedra, but those that stay solid; some faces turned around."""
    grid, at = vtk.vtkUnstructuredGrid(), vtk.vtkPoints()
    at.SetDataTypeToDouble()
    for point in points:
        at.InsertNextPoint(*point)
    grid.SetPoints(at)
    for number, nodes in enumerate(cells):
        if number in solid:
            grid.InsertNextCell(12, 8, nodes.tolist())
            continue
        stream = vtk.vtkIdList()
        stream.InsertNextId(6)
        for place, face in enumerate(SOLID_FACES[12]):
            step = -1 if (number + place) % 5 in turned else 1
            for value in (4, *nodes[list(face)][::step].tolist()):
                stream.InsertNextId(value)
        grid.InsertNextCell(42, stream)
    return grid


def _add(vtk, of, values):
    from vtkmodules.util.numpy_support import numpy_to_vtk

    array = numpy_to_vtk(values, deep=True)
    array.SetName("v")
    of.AddArray(array)


def _older(text):
    """Write the faces of ASCII as VTK did before 9.4."""

    def numbers(name):
        return np.array(re.search(rf'Name="{name}".*?>(.*?)</DataArray>', text, re.DOTALL)[1].split(), int)

    faces = np.split(numbers("face_connectivity"), numbers("face_offsets")[:-1])
    stream, ends, done = [], [], 0
    for stop in numbers("polyhedron_offsets"):
        own = [faces[i] for i in numbers("polyhedron_to_faces")[done:stop]]
        stream += [len(own), *(v for face in own for v in (len(face), *face))] if own else []
        ends.append(len(stream) if own else -1)
        done = stop
    begin = text.index('<DataArray type="Int64" Name="face_connectivity"')
    arrays = [
        f'<DataArray type="Int64" Name="{name}" format="ascii">{" ".join(map(str, values))}</DataArray>'
        for name, values in (("faces", stream), ("faceoffsets", ends))
    ]
    begun = re.sub('version="2.*?"', 'version="1.0"', text[:begin], count=1)  # by which VTK chooses the layout
    return begun + "".join(arrays) + text[text.index("</Cells>") :]


def test_hexahedra_as_polyhedra(tmp_path):
    vtk, rng = pytest.importorskip("vtk"), np.random.default_rng(0)
    points, cells = _boxes(rng)
    hexahedra = _grid(vtk, points, cells, solid=range(27))
    path, values = tmp_path / "m.vtu", rng.random(27)

    def write(grid, mode="Appended"):
        _add(vtk, grid.GetCellData(), values)
        _add(vtk, grid.GetPointData(), np.arange(64.0))
        writer = vtk.vtkXMLUnstructuredGridWriter()
        writer.SetInputData(grid)
        writer.SetFileName(str(path))
        getattr(writer, f"SetDataModeTo{mode}")()
        writer.Write()

    write(hexahedra)
    plain = read_samples(path)[0]
    edges = edges_across_faces(plain.cells, 64)
    sides = [cells[:, list(face)] for face in SOLID_FACES[12]]
    faces = Faces(
        offsets=np.arange(6 * 27 + 1) * 4,
        nodes=np.concatenate(sides).reshape(-1),
        owner=np.tile(np.arange(27), 6),
        neighbour=np.full(6 * 27, -1),
    )
    centres, volumes = faces.centres_and_volumes(points, 27)  # OpenFOAM's
    for kwargs, older in (
        ({}, False),
        ({"solid": (0, 9, 26)}, False),
        ({"solid": (0, 9, 26)}, True),
        ({"turned": (1, 3)}, True),
    ):
        write(_grid(vtk, points, cells, **kwargs), "Ascii" if older else "Appended")
        if older:
            path.write_text(_older(path.read_text()))
        sample = read_samples(path, entity="cell")[0]
        assert (sample.sizes, sample.entity) == ({"cell": 27, "edge": 108}, "cell")
        np.testing.assert_array_equal(sample.edge_index, edges)
        np.testing.assert_allclose(sample.points, centres, rtol=1e-13)
        np.testing.assert_allclose(sample.fields["volume"].read(), volumes, rtol=1e-13)
        np.testing.assert_array_equal(sample.fields["v"].read(), values)
        with pytest.raises(UnsupportedFormatError, match=r"polyhedra.*entity='cell'"):
            read_samples(path)[0]
    ONTO[".vtu"](SourceFile(path=str(path)), str(tmp_path / "out.vtu"), [new_array("cell", volumes)], False)
    reader = vtk.vtkXMLUnstructuredGridReader()
    reader.SetFileName(str(tmp_path / "out.vtu"))
    reader.Update()
    assert reader.GetOutput().GetCell(5).GetNumberOfFaces() == 6
    written = [reader.GetOutput().GetCellData().GetArray("new").GetValue(i) for i in range(27)]
    np.testing.assert_array_equal(written, volumes)
    text = path.read_text()
    for old, new in (
        (r'(Name="faces" format="ascii">6) 4', r"\1 5"),
        (r'(Name="faces" format="ascii">)6', r"\g<1>-3"),
        (r"31 62", "31 20"),
    ):
        path.write_text(changed := re.sub(old, new, text, count=1))
        assert changed != text
        with pytest.raises(CorruptDataError, match=r"m\.vtu.*'faces' and 'faceoffsets' do not fit"):
            read_samples(path, entity="cell")[0]


def _same_polyhedra(path, other, num_pieces=1):
    """Say that a file has the rows, edges, volumes and values of each of some pieces that are those of another."""
    one, whole = (read_samples(each, entity="cell")[0] for each in (path, other))
    edges = [whole.edge_index + 27 * piece for piece in range(num_pieces)]
    np.testing.assert_array_equal(one.edge_index, np.concatenate(edges, axis=1))
    np.testing.assert_array_equal(one.points, np.tile(whole.points, (num_pieces, 1)))
    for name in ("v", "volume"):
        np.testing.assert_array_equal(one.fields[name].read(), np.tile(whole.fields[name].read(), num_pieces))


def test_polyhedra_of_vtkhdf(tmp_path):
    """Written here and read; each list of theirs damaged; VTK's reader, and its writer's files, of two pieces, too."""
    rng, path, source = np.random.default_rng(0), tmp_path / "m.vtkhdf", tmp_path / "m.vtu"
    points, cells = _boxes(rng)
    is_solid = np.isin(np.arange(27), (0, 9, 26))
    raw = RawCells(
        offsets=np.append(0, np.cumsum(8 * is_solid)), connectivity=cells[is_solid].ravel(),
        cell_type=np.where(is_solid, 12, 42).astype("u1"),
    )  # fmt: skip
    sides = cells[~is_solid][:, np.array(SOLID_FACES[12])]
    faces = np.full(24 * 6, 4), sides.ravel(), np.repeat(np.flatnonzero(~is_solid), 6)
    values = rng.random(27)
    write_vtk(str(source), "UnstructuredGrid", points, raw, {}, {"v": values}, faces=[faces])
    NEW["vtkhdf"][1](SourceFile(path=str(source)), str(path), [new_array("cell", values)], False)
    with h5py.File(path, "r+") as file:
        file.move("VTKHDF/CellData/new", "VTKHDF/CellData/v")
        file["VTKHDF/PointData/u"] = np.arange(64.0)
    _same_polyhedra(path, source)
    assert "nodes" in read_samples(path, entity="cell").header(0).left_out["u"]
    with pytest.raises(UnsupportedFormatError, match=r"polyhedra.*entity='cell'"):
        read_samples(path)[0]
    ONTO[".vtkhdf"](SourceFile(path=str(path)), str(tmp_path / "copy.vtkhdf"), [new_array("cell", values)], False)
    NEW["vtu"][1](
        SourceFile(path=str(tmp_path / "copy.vtkhdf")), str(tmp_path / "copy.vtu"), [new_array("cell", values)], False
    )
    np.testing.assert_array_equal(read_samples(tmp_path / "copy.vtkhdf", entity="cell")[0].fields["new"].read(), values)
    np.testing.assert_array_equal(
        read_samples(tmp_path / "copy.vtu", entity="cell")[0].edge_index,
        read_samples(source, entity="cell")[0].edge_index,
    )
    for name, value in (
        ("PolyhedronToFaces", 10**6), ("PolyhedronOffsets", 145), ("FaceOffsets", -1), ("FaceConnectivity", 64),
        ("NumberOfFaces", 145),
    ):  # fmt: skip
        shutil.copy(path, bad := tmp_path / "bad.vtkhdf")
        with h5py.File(bad, "r+") as file:
            file[f"VTKHDF/{name}"][0] = value
        with pytest.raises(CorruptDataError, match="bad"):
            read_samples(bad, entity="cell")[0]
    with h5py.File(path, "r+") as file:
        file["VTKHDF/Steps/Values"] = [0.0]
    with pytest.raises(UnsupportedFormatError, match="one grid per step"):
        read_samples(path, entity="cell")[0]
    vtk = pytest.importorskip("vtk")
    reader = vtk.vtkHDFReader()
    reader.SetFileName(str(tmp_path / "copy.vtkhdf"))
    reader.Update()
    grid = reader.GetOutputDataObject(0)
    assert [grid.GetCell(number).GetNumberOfFaces() for number in range(27)] == [6] * 27
    for number, solid in enumerate(is_solid):
        for side in range(6 if not solid else 0):
            face = grid.GetCell(number).GetFace(side).GetPointIds()
            own = cells[number][list(SOLID_FACES[12][side])]
            assert [face.GetId(k) for k in range(4)] == own.tolist()
    pieces, writer = vtk.vtkPartitionedDataSet(), vtk.vtkHDFWriter()
    for piece in range(2):
        pieces.SetPartition(piece, _grid(vtk, points, cells, solid=(0, 9, 26)))
        _add(vtk, pieces.GetPartition(piece).GetCellData(), values)
    writer.SetInputData(pieces)
    writer.SetFileName(str(tmp_path / "two.vtkhdf"))
    assert writer.Write() == 1
    _same_polyhedra(tmp_path / "two.vtkhdf", source, 2)


def _surface(vtk, rng, polygons, strips=((0, 2, 4, 6, 8), (1, 3, 5)), vertices=()):
    surface, points = vtk.vtkPolyData(), vtk.vtkPoints()
    for point in rng.random((9, 3)):
        points.InsertNextPoint(*point)
    surface.SetPoints(points)
    for name, rows in (("Polys", polygons), ("Strips", strips), ("Verts", vertices)):
        cells = vtk.vtkCellArray()
        for row in rows:
            cells.InsertNextCell(len(row), row)
        getattr(surface, f"Set{name}")(cells)
    _add(vtk, surface.GetPointData(), rng.random((9, 3)))
    _add(vtk, surface.GetCellData(), rng.random(surface.GetNumberOfCells()))
    return surface


def _write(vtk, data, path):
    writer = vtk.vtkHDFWriter() if path.suffix == ".vtkhdf" else vtk.vtkXMLPolyDataWriter()
    writer.SetInputDataObject(data)
    writer.SetFileName(str(path))
    writer.Write()
    del writer  # which closes the file
    return read_samples(path)[0]


def _repeat(path):
    """Give a file of VTK's three steps, as VTK 9.7 counts them."""
    with h5py.File(path, "r+") as file:
        root = file["VTKHDF"]
        steps = root.create_group("Steps")
        steps["Values"] = np.arange(3.0)
        parts = len(root["NumberOfPoints"])
        steps["NumberOfParts"], steps["PartOffsets"] = np.full(3, parts), np.zeros(3, int)
        steps["PointOffsets"], steps["CellOffsets"] = np.zeros(3, int), np.zeros((3, 4), int)
        values = root["CellData/v"][...]
        del root["CellData/v"]
        root["CellData/v"] = np.concatenate([values, values + 1, values + 2])
        steps["CellDataOffsets/v"] = np.arange(4) * len(values)


def test_polydata_of_vtkhdf(tmp_path):
    vtk, rng = pytest.importorskip("vtk"), np.random.default_rng(1)
    parts, of_vtp = vtk.vtkPartitionedDataSet(), []
    for number, polygons in enumerate((((0, 1, 2), (1, 2, 3, 4), (4, 5, 6, 7, 8)), ((1, 2, 3, 4),))):
        parts.SetPartition(number, surface := _surface(vtk, rng, polygons))
        of_vtp.append(_write(vtk, surface, tmp_path / f"{number}.vtp"))
    path = tmp_path / "m.vtkhdf"
    sample = _write(vtk, parts, path)
    assert (sample.kind, sample.sizes) == ("mesh", {"node": 18, "cell": 7 + 5})
    np.testing.assert_array_equal(sample.points, np.concatenate([each.points for each in of_vtp]))
    nodes = np.concatenate([of_vtp[0].cells.connectivity, of_vtp[1].cells.connectivity + 9])
    by_blocks = read_samples(path).header(0).topology.by_blocks().cells(2)
    for cells in (sample.cells, join_cells(list(by_blocks))):
        np.testing.assert_array_equal(cells.connectivity, nodes)
        np.testing.assert_array_equal(cells.cell_type, np.concatenate([each.cells.cell_type for each in of_vtp]))
    for name in ("node/v", "cell/v"):
        values = np.concatenate([each.fields[name].read() for each in of_vtp])
        np.testing.assert_array_equal(sample.fields[name].read(), values)
        np.testing.assert_array_equal(sample.fields[name].read(slice(2, 11, 3)), values[2:11:3])
    with pytest.raises(UnsupportedFormatError, match="triangle strips"):
        ONTO[".vtkhdf"](
            SourceFile(path=str(path)), str(tmp_path / "out.vtkhdf"), [new_array("cell", np.ones(12))], False
        )
    shutil.copy(path, path := tmp_path / "steps.vtkhdf")  # the other is held open
    _repeat(path)
    over = read_samples(path, fields=["cell/v"])[0].fields["cell/v"]
    assert (over.dims, over.shape) == (("time", "cell"), (3, 12))
    np.testing.assert_array_equal(over.read(slice(1, 9)), np.stack([values + i for i in range(3)])[:, 1:9])


def new_array(entity, values):
    shape = values.shape
    field = OutputField(
        name="new", dims=(entity,), shape=shape, packing=Packing(dtype=values.dtype), chunks=shape, entity=entity
    )
    return NewArray(field=field, values=values)


def test_clouds_and_fields_written_onto_polydata(tmp_path):
    vtk, rng = pytest.importorskip("vtk"), np.random.default_rng(2)
    path = tmp_path / "cloud.vtkhdf"
    cloud = _write(vtk, _surface(vtk, rng, (), (), [(i,) for i in range(9)]), path)
    assert (cloud.kind, cloud.sizes, list(cloud.fields)) == ("points", {"point": 9}, ["v"])
    assert read_samples(path, edges="knn:2")[0].kind == "graph"
    with pytest.raises(FieldMismatchError, match="cloud"):
        read_samples(path, kind="mesh")[0]
    with pytest.raises(UnsupportedFormatError, match="1 vertices and 1 polygons"):
        _write(vtk, _surface(vtk, rng, [(0, 1, 2)], (), [(5,)]), tmp_path / "both.vtkhdf")
    surface = _surface(vtk, rng, [(0, 1, 2), (3, 4, 5, 6)], ())
    _write(vtk, surface, path := tmp_path / "surface.vtkhdf")
    ONTO[".vtkhdf"](
        SourceFile(path=str(path)), str(tmp_path / "out.vtkhdf"), [new_array("cell", np.arange(2.0))], False
    )
    reader = vtk.vtkHDFReader()
    reader.SetFileName(str(tmp_path / "out.vtkhdf"))
    reader.Update()
    found = reader.GetOutputDataObject(0)
    assert [found.GetCellData().GetArray("new").GetValue(i) for i in range(2)] == [0, 1]
    assert found.GetNumberOfPolys() == 2
