"""Meshes in several files: parallel files of VTK (``.pvtu``, ``.pvtp``) and times of a ``.pvd`` of several parts."""

import os
import shutil

import numpy as np
import pytest
import torch

import scidata
from scidata.errors import RefusedError, SciDataError, UnsupportedFormatError
from scidata.meshes.formats.vtk_write import write_vtk
from scidata.meshes.geometry import RawCells
from scidata.meshes.samples import read_samples
from scidata.store.partitioning.partition import partition

NX, NY = 7, 5
POINTS = np.stack(np.meshgrid(np.arange(NX), np.arange(NY), indexing="ij"), -1).reshape(-1, 2) * [0.1, 0.3]
POINTS = np.c_[POINTS, np.sin(POINTS.sum(axis=1))]
FIRST = (np.arange(NX - 1)[:, None] * NY + np.arange(NY - 1)).ravel()
QUADS = FIRST[:, None] + [0, NY, NY + 1, 1]
OWNER = np.minimum(FIRST // NY // 2, 2)  # piece of each cell


def write_pieces(folder, *, suffix="vtu", dtype=np.float64, shift=0.0, ids=False, ghosts=True):
    """Write three pieces with their neighbours' cells as ghosts, and the file that names them; return its name."""
    folder.mkdir(exist_ok=True)
    kind, names = "UnstructuredGrid" if suffix == "vtu" else "PolyData", []
    for piece in range(3):
        nodes = np.unique(QUADS[piece == OWNER])
        near = np.isin(QUADS, nodes).any(axis=1) if ghosts else piece == OWNER
        cells = np.flatnonzero(near)
        cells = np.r_[cells[OWNER[cells] != piece], cells[OWNER[cells] == piece]]  # copies first
        nodes = np.unique(QUADS[cells])[::-1]
        new = np.empty(len(POINTS), int)
        new[nodes] = np.arange(len(nodes))
        first_piece = np.full(len(POINTS), 3)
        np.minimum.at(first_piece, QUADS, OWNER[:, None])
        of_points = {"u": nodes * 1.5, "vtkGhostType": (first_piece[nodes] != piece).astype("u1")}
        of_points["u"][of_points["vtkGhostType"] > 0] = -1  # of a solver that did not update them
        if ids:
            of_points["id"] = nodes
        of_cells = {"c": cells.astype("f4"), "vtkGhostType": (OWNER[cells] != piece).astype("u1")}
        points = (POINTS[nodes] + shift * piece).astype(dtype)
        names.append(f"p_{piece}.{suffix}")
        write_vtk(str(folder / names[-1]), kind, points, RawCells.of_kind(new[QUADS[cells]], 9), of_points, of_cells)
        if ids:
            data = (folder / names[-1]).read_bytes()
            (folder / names[-1]).write_bytes(data.replace(b"<PointData>", b'<PointData GlobalIds="id">'))
    arrays = '<PDataArray type="Float64" Name="u"/><PDataArray type="UInt8" Name="vtkGhostType"/>'
    cells = arrays.replace("Float64", "Float32").replace('"u"', '"c"')
    pieces = "".join(f'<Piece Source="{name}"/>' for name in names)
    text = f'<PDataArray type="Float{8 * np.dtype(dtype).itemsize}" NumberOfComponents="3"/>'
    (folder / f"m.p{suffix}").write_text(
        f'<VTKFile type="P{kind}" version="1.0" byte_order="LittleEndian" header_type="UInt64"><P{kind}>'
        f"<PPointData>{arrays}</PPointData><PCellData>{cells}</PCellData><PPoints>{text}</PPoints>{pieces}"
        f"</P{kind}></VTKFile>"
    )
    return folder / f"m.p{suffix}"


def check_whole(sample):
    """Compare a sample with the mesh that was cut, cell by cell."""
    assert (sample.sizes["node"], sample.sizes["cell"]) == (len(POINTS), len(QUADS))
    ids = np.rint(sample.fields["u"].read() / 1.5).astype(int)
    np.testing.assert_array_equal(np.sort(ids), np.arange(len(POINTS)))
    cells = sample.fields["c"].read().astype(int)
    np.testing.assert_array_equal(ids[sample.cells.connectivity].reshape(-1, 4), QUADS[cells])
    np.testing.assert_array_equal(cells, np.concatenate([np.flatnonzero(piece == OWNER) for piece in range(3)]))
    assert not {"vtkGhostType", "cell/vtkGhostType"} & set(sample.fields)
    return ids


def read_by_vtk(path):
    import pyvista
    import vtk

    if path.suffix == ".pvtu":
        return pyvista.read(path)
    reader = vtk.vtkXMLPPolyDataReader()
    reader.SetFileName(str(path))
    reader.Update()
    return pyvista.wrap(reader.GetOutput())


@pytest.mark.parametrize("suffix", ["vtu", "vtp"])
def test_parallel_files(tmp_path, suffix):
    pyvista = pytest.importorskip("pyvista")
    path = write_pieces(tmp_path / "a", suffix=suffix)
    (sample,) = [read_samples(path)[0]]
    np.testing.assert_array_equal(sample.points, POINTS[check_whole(sample)])
    whole = read_by_vtk(path)  # which keeps copies, and points of each piece
    assert whole.n_cells > len(QUADS)
    own = whole.cell_data["vtkGhostType"] == 0
    np.testing.assert_array_equal(whole.cell_data["c"][own], sample.fields["c"].read())
    centres = np.add.reduceat(sample.points[sample.cells.connectivity], sample.cells.offsets[:-1]) / 4
    np.testing.assert_allclose(whole.cell_centers().points[own], centres, rtol=1e-13)
    # by ids, where positions differ; else it is told
    check_whole(read_samples(write_pieces(tmp_path / "b", suffix=suffix, shift=1e-9, ids=True))[0])
    with pytest.raises(UnsupportedFormatError, match=r"marked as copies of other files'.*GlobalIds"):
        read_samples(write_pieces(tmp_path / "c", suffix=suffix, shift=1e-9))[0]
    # to a store, back to one new file, in the order that was read, or into copies of the pieces
    partition(str(path), tmp_path / "m.store")
    ds = scidata.open_dataset(str(tmp_path / "m.store"))
    with scidata.create(str(tmp_path / "pieces"), like=ds, fields={"u2": {"like": "u"}, "c2": {"like": "c"}}) as writer:
        writer[0] = {"u2": ds[0]["u"] * 2, "c2": ds[0]["c"] + 1}
    pieces = [f"{piece}_p_{piece}.{suffix}" for piece in range(3)]
    assert sorted(os.listdir(tmp_path / "pieces")) == ["m", f"m.p{suffix}"]
    assert sorted(os.listdir(tmp_path / "pieces" / "m")) == pieces
    found = read_by_vtk(tmp_path / "pieces" / f"m.p{suffix}")
    np.testing.assert_array_equal(found.points, whole.points)
    for name in ("u", "vtkGhostType"):
        np.testing.assert_array_equal(found.point_data[name], whole.point_data[name])
    np.testing.assert_array_equal(found.cell_data["c2"], found.cell_data["c"] + 1)  # of ghost cells, too
    is_copy = found.point_data["vtkGhostType"] > 0
    np.testing.assert_array_equal(found.point_data["u2"][~is_copy], found.point_data["u"][~is_copy] * 2)
    at = {tuple(point): value for point, value in zip(sample.points, sample.fields["u"].read() * 2, strict=True)}
    assert [at[tuple(point)] for point in found.points] == found.point_data["u2"].tolist()
    again = read_samples(tmp_path / "pieces" / f"m.p{suffix}")[0]
    np.testing.assert_array_equal(again.fields["u2"].read(), sample.fields["u"].read() * 2)
    with scidata.create(str(tmp_path / "out"), like=ds, fields=["u", "c"], format=suffix) as writer:
        writer[0] = {"u": ds[0]["u"] * 2, "c": ds[0]["c"]}
    assert os.listdir(tmp_path / "out") == [f"m.{suffix}"]
    found = pyvista.read(tmp_path / "out" / f"m.{suffix}")
    np.testing.assert_array_equal(found.points, sample.points)
    np.testing.assert_array_equal(found.point_data["u"], sample.fields["u"].read() * 2)
    np.testing.assert_array_equal(found.cell_data["c"], sample.fields["c"].read())
    shutil.rmtree(tmp_path / "out")
    data = (tmp_path / "a" / f"p_1.{suffix}").read_bytes()
    (tmp_path / "a" / f"p_1.{suffix}").write_bytes(data[:-40] + b"0" + data[-39:])
    with pytest.raises(SciDataError, match=r"not the file that the store was made of"):  # noqa: SIM117
        with scidata.create(str(tmp_path / "out"), like=ds, fields=["u"]) as writer:
            writer[0] = {"u": ds[0]["u"]}
    path.write_text(path.read_text().replace("p_0", "../b/p_0"))
    with pytest.raises(RefusedError, match="not in its folder"):
        read_samples(path)[0]


def test_parts_of_times(tmp_path):
    """Of a collection with ParaView's parts each time is a sample; of several files, or of pieces of their own."""
    write_pieces(tmp_path / "a", ghosts=False)
    write_pieces(tmp_path / "b", dtype=np.float32)
    lines = [f'<DataSet timestep="{time}" part="{i}" file="{folder}/p_{i}.vtu"/>'
             for folder, time in (("a", 0.5), ("b", -2)) for i in range(3)]  # fmt: skip
    lines.append('<DataSet timestep="7" file="b/m.pvtu"/>')
    path = tmp_path / "run.pvd"
    path.write_text(f'<VTKFile type="Collection"><Collection>{"".join(lines)}</Collection></VTKFile>')
    samples = read_samples(path)
    assert len(samples) == 3
    for sample in samples:
        check_whole(sample)
    assert len(samples.inputs(1)) == 4
    partition(str(path), tmp_path / "run.store")
    ds = scidata.open_dataset(str(tmp_path / "run.store"))
    with scidata.create(str(tmp_path / "out"), like=ds, fields=["u"]) as writer:
        for i in range(3):
            writer[i] = {"u": ds[i]["u"] + i}
    names = ["0_p_0", "0_p_0.pvtu", "1_p_0", "1_p_0.pvtu", "b_m", "b_m.pvtu", "series.pvd"]
    assert sorted(os.listdir(tmp_path / "out")) == names
    for written, sample, i in zip(read_samples(tmp_path / "out/series.pvd"), samples, range(3), strict=True):
        np.testing.assert_array_equal(written.points, sample.points)
        np.testing.assert_array_equal(written.fields["u"].read(), sample.fields["u"].read() + i)
    cloud = scidata.open_dataset(str(path), kind="points")
    assert [len(each["u"]) for each in cloud] == [len(POINTS)] * 3
    assert torch.equal(torch.sort(cloud[0]["u"]).values, torch.arange(len(POINTS)) * 1.5)


def test_points_twice_in_a_file(tmp_path):
    """Where a file has two points at one place (a slit), nothing says which of them another file's is: both stay."""
    points = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [1, 1, 0]], "f8")
    for i, (at, x) in enumerate((([0, 1, 2, 3, 4], 0), ([1, 2], 1))):
        cells = RawCells.of_kind(np.array([[0, 1, 2], [0, 2, 3], [0, 3, 4]] if i == 0 else [[0, 1, 2]]), 5)
        own = points[at] if i == 0 else np.r_[points[at], [[2, 0, 0]]]
        write_vtk(str(tmp_path / f"{i}.vtp"), "PolyData", own, cells, {"x": np.full(len(own), x)}, {})
    lines = "".join(f'<DataSet timestep="0" file="{i}.vtp"/>' for i in range(2))
    (tmp_path / "r.pvd").write_text(f'<VTKFile type="Collection"><Collection>{lines}</Collection></VTKFile>')
    header = read_samples(tmp_path / "r.pvd").header(0)
    assert header.topology.sizes == {"node": 7, "cell": 4}
    assert "several of one file lie there" in header.left_out["points at 1 places"]
