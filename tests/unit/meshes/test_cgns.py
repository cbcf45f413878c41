"""CGNS of several zones and of polyhedra, as HDF5 and ADF, against the whole mesh, and VTK's reader."""

import numpy as np
import pytest

from scidata.data.output.sample_formats import NEW, ONTO, SourceFile
from scidata.errors import CorruptDataError, UnsupportedFormatError
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.faces import SOLID_FACES, edges_across_faces
from scidata.meshes.order.polyhedra import Faces
from scidata.meshes.samples import read_samples
from tests.unit.meshes._cgns import (
    Tree,
    array,
    one_to_one,
    section,
    structured,
    tree,
    unstructured,
    write_adf,
    write_hdf5,
)
from tests.unit.meshes.test_polyhedra_and_polydata import new_array

NI, NJ, NK = 4, 3, 2  # cells
CORNERS = np.array([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)])


def block():
    """Return points ``(NI + 1, NJ + 1, NK + 1, 3)`` that are moved a little, and the hexahedra, i fastest."""
    rng = np.random.default_rng(0)
    at = np.stack(np.meshgrid(*[np.arange(n + 1.0) for n in (NI, NJ, NK)], indexing="ij"), -1)
    first = np.stack(np.meshgrid(*[np.arange(n) for n in (NI, NJ, NK)], indexing="ij"), -1).reshape(-1, 3, order="F")
    cells = (first[:, None] + CORNERS) @ [1, NI + 1, (NI + 1) * (NJ + 1)]
    return at + 0.2 * rng.random(at.shape), cells


def solution(location, **fields):
    return Tree("FlowSolution_t", None, GridLocation=Tree("GridLocation_t", location),
                **{name: array(values) for name, values in fields.items()})  # fmt: skip


def three_zones(points, cells):
    """Two structured zones, the second with its indices turned, and one of hexahedra with a surface of its own.

    They meet at i = 1 by ranges of nodes, and at i = 3 by lists of faces.
    """
    a, b = points[:2], points[1:4].transpose(2, 0, 1, 3)[:, ::-1]  # b: (k, -i, j)
    c = points[3:].reshape(-1, 3, order="F")
    at = np.stack(np.meshgrid([0], np.arange(NJ), np.arange(NK), indexing="ij"), -1).reshape(-1, 3, order="F")
    own = (at[:, None] + CORNERS) @ [1, 2, 2 * (NJ + 1)] + 1
    faces = own[:, [0, 3, 7, 4]]  # at its i = 0
    j, k = np.meshgrid(np.arange(1, NJ + 1), np.arange(1, NK + 1))
    list_b = array(np.stack([k.ravel(), np.ones(NJ * NK, int), j.ravel()]), "IndexArray_t")
    list_c = array(np.arange(7, 13)[None], "IndexArray_t")
    u = cells[:, 0] + 0.5
    of_a, of_c = np.arange(len(u)) % NI == 0, np.arange(len(u)) % NI == 3
    u_b = u.reshape(NI, NJ, NK, order="F")[1:3].transpose(2, 0, 1)[:, ::-1]
    zones = {
        "a": structured(
            a, S=solution("CellCenter", u=u[of_a].reshape(1, NJ, NK, order="F"), only_a=u[of_a]),
            C=Tree("ZoneGridConnectivity_t", ab=one_to_one(
                "b", PointRange=array([[2, 2], [1, NJ + 1], [1, NK + 1]], "IndexRange_t"),
                PointRangeDonor=array([[1, NK + 1], [3, 3], [1, NJ + 1]], "IndexRange_t"),
                Transform=Tree('"int[IndexDimension]"', np.array([-2, 3, 1], "i4"))),
            )),
        "b": structured(
            b, S=solution("CellCenter", u=u_b),
            C=Tree("ZoneGridConnectivity_t", bc=one_to_one(
                "c", "GridConnectivity_t", GridLocation=Tree("GridLocation_t", "JFaceCenter"), PointList=list_b,
                PointListDonor=list_c)),
        ),
        "c": unstructured(
            c, NJ * NK, Hexa=section(17, 1, own.ravel(), NJ * NK), Side=section(7, 7, faces.ravel(), NJ * NK),
            S=solution("CellCenter", u=u[of_c]),
            C=Tree("ZoneGridConnectivity_t", cb=one_to_one(
                "b", "GridConnectivity_t", GridLocation=Tree("GridLocation_t", "FaceCenter"), PointList=list_c,
                PointListDonor=list_b)),
        ),
    }  # fmt: skip
    return tree({"Base": Tree("CGNSBase_t", np.array([3, 3], "i4"), **zones)})


@pytest.mark.parametrize("form", ["hdf5", "adf", "adf-b"])
def test_zones_are_the_mesh_that_they_were_cut_from(tmp_path, form):
    points, cells = block()
    path, root = tmp_path / "m.cgns", three_zones(points, cells)
    write_hdf5(path, root) if form == "hdf5" else write_adf(path, root, binary=form == "adf-b")
    header = read_samples(path).header(0)
    sample, flat = header.read(), points.reshape(-1, 3, order="F")
    assert dict(sample.sizes) == {"node": len(flat), "cell": len(cells)}
    assert header.left_out == {"only_a": "only some of the zones have it"}
    number = {tuple(point): i for i, point in enumerate(flat)}
    new = np.array([number[tuple(point)] for point in sample.points])  # bit for bit
    found = np.sort(new[sample.cells.connectivity.reshape(-1, 8)], axis=1)
    row = {tuple(np.sort(nodes)): i for i, nodes in enumerate(cells)}
    of_cell = np.array([row[tuple(nodes)] for nodes in found])
    assert sorted(of_cell) == list(range(len(cells)))
    np.testing.assert_array_equal(sample.fields["u"].read(), cells[of_cell, 0] + 0.5)
    _compare_with_vtk(path, sample)
    del root["Base"]["a"]["C"]
    write_hdf5(path, root)  # side by side
    assert read_samples(path)[0].sizes["node"] == len(flat) + (NJ + 1) * (NK + 1)


def _compare_with_vtk(path, sample):
    vtk = pytest.importorskip("vtk")
    from vtkmodules.util.numpy_support import vtk_to_numpy

    reader = vtk.vtkCGNSReader()
    reader.SetFileName(str(path))
    reader.UpdateInformation()
    reader.EnableAllCellArrays()
    reader.Update()
    blocks, done = reader.GetOutput().GetBlock(0), 0
    for zone in [blocks.GetBlock(i) for i in range(blocks.GetNumberOfBlocks())]:
        places = vtk_to_numpy(zone.GetPoints().GetData())
        values = vtk_to_numpy(zone.GetCellData().GetArray("u"))
        for cell in range(zone.GetNumberOfCells()):
            ids = zone.GetCell(cell).GetPointIds()
            nodes = sample.cells.connectivity[sample.cells.offsets[done + cell] :][: ids.GetNumberOfIds()]
            np.testing.assert_array_equal(
                places[[ids.GetId(i) for i in range(ids.GetNumberOfIds())]], sample.points[nodes]
            )
        done += len(values)
        np.testing.assert_array_equal(values, sample.fields["u"].read()[done - len(values) : done])
    assert done == sample.sizes["cell"]


@pytest.mark.parametrize("form", ["nface", "inline", "parents"])
def test_polyhedra_of_two_zones(tmp_path, form):
    """Faces by NFACE_n, or by the cells beside them; lengths between the nodes as before version 3.4."""
    points, cells = block()
    flat = points.reshape(-1, 3, order="F")
    zones = {}
    for name, rows in (("a", slice(0, 12)), ("b", slice(12, 24))):
        nodes, own = np.unique(cells[rows], return_inverse=True)
        own = own.reshape(-1, 8)
        sides, owner = own[:, np.array(SOLID_FACES[12])].reshape(-1, 4), np.repeat(np.arange(12), 6)
        _, first, face = np.unique(np.sort(sides, axis=1), axis=0, return_index=True, return_inverse=True)
        is_first = first[face] == np.arange(len(sides))
        parents = np.zeros((len(first), 2), int)
        parents[face[is_first], 0], parents[face[~is_first], 1] = owner[is_first] + 1, owner[~is_first] + 1
        parents[parents > 0] += len(first)
        of_cells, ngon = (np.where(is_first, 1, -1) * (face.ravel() + 1)).reshape(12, 6), sides[first] + 1
        elements = {}
        if form == "inline":
            elements["N"] = section(22, 1, np.insert(ngon, 0, 4, axis=1).ravel(), len(first))
            elements["F"] = section(23, len(first) + 1, np.insert(of_cells, 0, 6, axis=1).ravel(), 12)
        else:
            elements["N"] = section(
                22, 1, ngon.ravel(), len(first), np.arange(len(first) + 1) * 4, ParentElements=array(parents)
            )
        if form == "nface":
            elements["F"] = section(23, len(first) + 1, of_cells.ravel(), 12, np.arange(13) * 6)
        shared = np.flatnonzero(np.isin(nodes, np.intersect1d(cells[:12], cells[12:]))) + 1
        zones[name] = nodes, shared, elements
    (_, in_a, _), (_, in_b, _) = zones.values()
    joins = {"a": ("b", in_a, in_b), "b": ("a", in_b, in_a)}
    root = tree({"Base": Tree("CGNSBase_t", np.array([3, 3], "i4"), **{
        name: unstructured(
            flat[nodes], 12, **elements, S=solution("CellCenter", u=np.arange(12.0) + 12 * (name == "b")),
            C=Tree("ZoneGridConnectivity_t", c=one_to_one(
                joins[name][0], "GridConnectivity_t", PointList=array(joins[name][1][None], "IndexArray_t"),
                PointListDonor=array(joins[name][2][None][:, ::-1], "IndexArray_t"))),
        )
        for name, (nodes, _, elements) in zones.items()
    })}, 3.3 if form == "inline" else 4.2)  # fmt: skip
    path = tmp_path / "m.cgns"
    write_hdf5(path, root)
    with pytest.raises(UnsupportedFormatError, match=r"polyhedra.*entity='cell'"):
        read_samples(path)[0]
    sample = read_samples(path, entity="cell")[0]
    everything = np.concatenate([cells[:, list(face)] for face in SOLID_FACES[12]])
    faces = Faces(
        offsets=np.arange(len(everything) + 1) * 4, nodes=everything.ravel(), owner=np.tile(np.arange(24), 6),
        neighbour=np.full(144, -1),
    )  # fmt: skip
    centres, volumes = faces.centres_and_volumes(flat, 24)
    np.testing.assert_array_equal(sample.edge_index, edges_across_faces(RawCells.of_kind(cells, 12), len(flat)))
    np.testing.assert_allclose(sample.points, centres, rtol=1e-13)
    np.testing.assert_allclose(sample.fields["volume"].read(), volumes, rtol=1e-13)
    np.testing.assert_array_equal(sample.fields["u"].read(), np.arange(24.0))
    ONTO[".cgns"](SourceFile(path=str(path)), str(tmp_path / "out.cgns"), [new_array("cell", volumes)], False)
    written = read_samples(tmp_path / "out.cgns", entity="cell")[0]
    np.testing.assert_array_equal(written.fields["new"].read(), volumes)
    NEW["vtu"][1](SourceFile(path=str(path)), str(tmp_path / "out.vtu"), [new_array("cell", volumes)], False)
    again = read_samples(tmp_path / "out.vtu", entity="cell")[0]
    np.testing.assert_array_equal(again.edge_index, sample.edge_index)
    np.testing.assert_allclose(again.points, sample.points, rtol=1e-13)


def cube():
    """Return the section of the faces of a hexahedron."""
    return section(22, 1, np.ravel(SOLID_FACES[12]) + 1, 6, np.arange(7) * 4)


def test_elements_and_what_is_refused(tmp_path):
    """MIXED with and without offsets, nodes on edges in VTK's order, boundaries left out; faults are named."""
    path, points = tmp_path / "m.cgns", np.random.default_rng(1).random((40, 3))

    def write(*sections, num=2, **more):
        zone = unstructured(points, num, **{f"s{i}": each for i, each in enumerate(sections)}, **more)
        write_hdf5(path, tree({"Base": Tree("CGNSBase_t", np.array([3, 3], "i4"), Zone=zone)}))

    mixed = [10, 1, 2, 3, 4, 5, 1, 2, 3, 14, *range(5, 11)]
    for starts in ([0, 5, 9, 16], None):
        write(section(20, 1, mixed, 3, starts), section(5, 4, [1, 2, 3], 1))
        cells = read_samples(path)[0].cells
        assert (cells.cell_type.tolist(), cells.connectivity.tolist()) == ([10, 13], [*range(4), *range(4, 10)])
    write(section(18, 3, np.arange(1, 21), 1), section(15, 2, np.arange(1, 16), 1))
    cells = read_samples(path)[0].cells
    assert cells.connectivity[:15].tolist() == [*range(9), 12, 13, 14, 9, 10, 11]
    assert cells.connectivity[15:].tolist() == [*range(12), 16, 17, 18, 19, 12, 13, 14, 15]
    lost = one_to_one("Lost", PointList=array([[1]], "IndexArray_t"), PointListDonor=array([[1]], "IndexArray_t"))
    tetra = section(10, 1, range(1, 9), 2)
    for sections, more, error, message in (
        ([section(19, 1, np.arange(1, 28), 1)], {}, UnsupportedFormatError, "elements of CGNS' type 19"),
        ([section(10, 1, range(1, 8), 2)], {}, CorruptDataError, "2 elements with 7 nodes"),
        ([section(10, 1, range(1, 13), 3)], {}, CorruptDataError, "has 3 cells, but says 2"),
        ([tetra], {"C": Tree("ZoneGridConnectivity_t", c=lost)}, CorruptDataError, "leads to zone Base/Lost"),
        ([tetra], {"G": Tree("GridCoordinates_t")}, UnsupportedFormatError, "has 2 grids"),
        ([tetra], {"S": solution("Vertex", u=np.arange(3.0))}, CorruptDataError, r"u has 3 values, expected \[40\]"),
        ([section(23, 1, [1, -9], 2, [0, 1, 2])], {}, CorruptDataError, "elements up to 9, some of which it lacks"),
        *(
            ([section(20, 1, [10, 1, 2, 3, 4, 10, 1, 2, 3, 5], 2, starts)], {}, CorruptDataError, "does not fit")
            for starts in ([5, 0, 10], [0, -5, 10], [0, 5, 9])
        ),
        ([section(22, 1, range(1, 8), 2, [0, 9, 7])], {}, CorruptDataError, "does not fit"),
        ([section(10, 1, [1.5, *range(2, 9)], 2)], {}, CorruptDataError, "no integers"),
        ([section(10, 1, range(1, 5), 1)] * 2, {}, CorruptDataError, "two sections .* of the same numbers"),
        ([cube()], {"F": section(23, 7, range(1, 6), 1, [0, 5]), "num": 1}, CorruptDataError, "do not enclose them"),
    ):
        write(*sections, **more)
        with pytest.raises(error, match=rf"m\.cgns.*({message})"):
            read_samples(path, entity="cell")[0]
    write(tetra, S=solution("FaceCenter", u=np.arange(3.0)))
    assert read_samples(path).header(0).left_out == {"u": "lives at FaceCenter"}
    zone = unstructured(points, 2, T=tetra)
    for node in (0, 41):  # which in the list of all nodes is the other zone's
        wrong = unstructured(points, 2, T=section(10, 1, [*range(1, 8), node], 2))
        write_hdf5(path, tree({"Base": Tree("CGNSBase_t", np.array([3, 3], "i4"), a=zone, b=wrong, c=zone)}))
        with pytest.raises(CorruptDataError, match=rf"m\.cgns.*zone Base/b.*node {node}, but has 40 nodes"):
            read_samples(path)[0]
    path.write_bytes(b"\0" * 100)
    with pytest.raises(UnsupportedFormatError, match="neither HDF5 nor ADF"):
        read_samples(path)[0]


def test_interfaces_on_an_axis_and_of_damaged_points(tmp_path):
    """Nodes that all lie at one place are joined as the ranges pair them, here turned; NaN, and counts, are named."""
    path, points = tmp_path / "m.cgns", np.stack(np.meshgrid(*[[0.0, 1.0]] * 3, indexing="ij"), -1)

    def write(a, b):
        ends = {x: array([[x, x], [1, 2], [1, 2]], "IndexRange_t") for x in (1, 2)}
        turn = Tree('"int[IndexDimension]"', np.array([1, 3, 2], "i4"))
        joined = one_to_one("b", PointRange=ends[2], PointRangeDonor=ends[1], Transform=turn)
        zone = structured(a, C=Tree("ZoneGridConnectivity_t", ab=joined))
        write_hdf5(path, tree({"Base": Tree("CGNSBase_t", np.array([3, 3], "i4"), a=zone, b=structured(b))}))

    a, b = points.copy(), points + np.array([1.0, 0, 0])
    a[1] = b[0] = [1.0, 0, 0]
    write(a, b)
    nodes = read_samples(path)[0].cells.connectivity.reshape(2, 8)
    assert nodes[1, [0, 3, 7, 4]].tolist() == nodes[0, [1, 5, 6, 2]].tolist()  # at j, k of the one k, j of the other
    assert len(np.unique(nodes)) == 12
    b[0, 1, 1, 2] = np.nan
    write(a, b)
    with pytest.raises(CorruptDataError, match=r"m\.cgns: zone Base/a: interface ab: a coordinate .* NaN"):
        read_samples(path)[0]
    zone = structured(points)
    zone.values[0, 1] = 0
    write_hdf5(path, tree({"Base": Tree("CGNSBase_t", np.array([3, 3], "i4"), Zone=zone)}))
    with pytest.raises(CorruptDataError, match=r"says \[0, 1, 1\] cells between \[2, 2, 2\] nodes"):
        read_samples(path)[0]
