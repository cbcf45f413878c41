"""Files of NumPy, PyTorch, CAD and VTK: what they are taken for, and the values, against what their writers wrote."""

import copyreg
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import scidata
from scidata.core.options import ReadOptions
from scidata.data.raw_report import inspect_store
from scidata.errors import CorruptDataError, FieldMismatchError, ShortReadError, UnsupportedFormatError
from scidata.meshes.samples import read_samples
from scidata.sources import open_source
from scidata.sources.access.files import files
from scidata.store.raw_points.reader import PointsReader
from tests.real_layouts import make
from tests.unit._children import forked_torch_worker

__all__ = ["forked_torch_worker"]  # a fixture
forked = pytest.mark.usefixtures("forked_torch_worker")

# -- PyTorch before 1.6, PyTorch Geometric before 2.0 ------------------------------------------------------------


@forked
def test_files_of_torch_before_1_6(tmp_path):
    want = {"pos": torch.randn(40, 3), "pressure": torch.randn(40)}
    torch.save(want, tmp_path / "cloud.pt", _use_new_zipfile_serialization=False)
    ds = scidata.open_dataset(tmp_path / "cloud.pt")
    assert all(torch.equal(ds[0][name], value) for name, value in want.items())


class _OldPickler(pickle._Pickler):
    """Writes PyTorch Geometric's Data as versions before 2.0 did: its state are its tensors."""

    def save(self, obj, save_persistent_id=True):
        if type(obj).__name__ != "Data":
            return super().save(obj, save_persistent_id)
        return self.save_reduce(copyreg.__newobj__, (type(obj),), obj.to_dict(), obj=obj)


@forked
@pytest.mark.slow_for("True")
@pytest.mark.parametrize("is_zip", [False, True])
def test_graphs_of_pytorch_geometric_before_2(tmp_path, is_zip):
    data = pytest.importorskip("torch_geometric.data").Data(x=torch.ones(3, 2), edge_index=torch.ones(2, 4).long())
    module = types.ModuleType("old_pickle")
    module.Pickler, module.dump = _OldPickler, lambda obj, file, protocol: _OldPickler(file, protocol).dump(obj)
    torch.save(data, tmp_path / "old.pt", pickle_module=module, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnsupportedFormatError, match=r"before 2\.0 wrote it.*torch\.save the dict"):
        _ = open_source(tmp_path / "old.pt").arrays


# -- NumPy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_clouds_of_numpy(tmp_path, compressed):
    path = str(tmp_path / "cloud.npz")
    make.cloud_npz(path, compressed=compressed)
    assert inspect_store(path).kind == "points"
    ds = scidata.open_dataset(path)
    with np.load(path) as want:
        for name in ("pos", "pressure", "label"):
            assert np.array_equal(ds[0][name].numpy(), want[name]), name
        reader = PointsReader(path, num_parts=3)
        parts = [reader.read(0, part).fields for part in range(3)]
        for name in ("pos", "pressure", "label"):
            assert np.array_equal(np.concatenate([part[name] for part in parts]), want[name])
    if not compressed:  # each rank reads its rows, not the file
        reader = PointsReader(path, ReadOptions(fields=["pos"]), num_parts=3)
        assert sum(reader.plan(0, part).bytes_fetched for part in range(3)) == 90 * 3 * 8
    report = scidata.partition(path, str(tmp_path / "out"))
    assert report.counts == {"point": 90}


def test_one_array_of_numpy(tmp_path):
    fields, cloud = make.values(5, 2, 12, 8), np.random.default_rng(0).random((50, 2))
    np.save(tmp_path / "fields.npy", np.asfortranarray(fields))
    np.save(tmp_path / "cloud.npy", cloud)
    ds = scidata.open_dataset(tmp_path / "fields.npy")
    assert [np.array_equal(ds[i]["data"].numpy(), fields[i]) for i in range(5)] == [True] * 5
    assert np.array_equal(scidata.open_dataset(tmp_path / "cloud.npy")[0]["pos"].numpy(), cloud)


def test_damaged_files_of_numpy_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    make.cloud_npz(path, compressed=False)
    whole = path.read_bytes()
    np.save(tmp_path / "a.npy", make.values(100, 3))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-20])
    with pytest.raises(ShortReadError, match=r"'points'.*needs 1200 bytes, but has 1180; it is truncated"):
        _ = open_source(tmp_path / "a.npy").arrays
    np.savez(tmp_path / "objects.npz", pos=make.values(9, 3), names=np.array([{}, "b"], object))
    source = open_source(tmp_path / "objects.npz")
    assert set(source.arrays) == {"pos"}
    assert "never unpickled" in source.skipped["names"]
    for cut in (10, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:cut])
        files().forget(str(path))
        with pytest.raises((UnsupportedFormatError, CorruptDataError)):
            _ = open_source(path).arrays


# -- PyTorch Geometric ---------------------------------------------------------------------------------------------


@pytest.mark.slow_for("pyg_list")
@pytest.mark.parametrize("function", [make.pyg_data, make.pyg_list, make.pyg_processed])
def test_graphs_of_pytorch_geometric(tmp_path, function, request):
    if function is not make.pyg_data:
        request.getfixturevalue("forked_torch_worker")
    path, out = str(tmp_path / "data.pt"), str(tmp_path / "out")
    graphs = function(path)
    if len(graphs) > 1:
        with pytest.raises(UnsupportedFormatError, match=r"its 11 groups, 0 to 10, are samples.*data\.pt/\*'"):
            scidata.open_dataset(path)
        assert inspect_store(f"{path}/3").kind == "graph"
    several = len(graphs) > 1
    scidata.partition(f"{path}/*" if several else path, out, jobs=1 + (function is make.pyg_list), order="rows")
    ds = scidata.open_dataset(out)
    assert len(ds) == len(graphs)
    for i, graph in enumerate(graphs):
        sample = ds[i]
        order = sample.original_id("node")
        assert sample.num_nodes == graph.num_nodes
        for name in ("x", "y", "train_mask"):
            assert torch.equal(sample[name], graph[name][order]), name
        want = {tuple(pair): row for pair, row in zip(graph.edge_index.T.tolist(), graph.edge_attr, strict=True)}
        assert len(want) == sample.edge_index.shape[1]
        for pair, row in zip(order[sample.edge_index].T.tolist(), sample["edge_attr"], strict=True):
            assert torch.equal(want[tuple(pair)], row)
        again = sample.to_pyg()
        assert torch.equal(again.graph_label, graph.graph_label)
        assert again.name == "benzene"


def test_folders_with_splits_and_files_of_dgl_say_what_to_do(tmp_path):
    (tmp_path / "zinc/processed").mkdir(parents=True)
    for name in ("train.pt", "test.pt", "pre_filter.pt"):
        (tmp_path / "zinc/processed" / name).touch()
    for folder in (tmp_path / "zinc", tmp_path / "zinc/processed"):
        with pytest.raises(UnsupportedFormatError, match=r"several files, test\.pt, train\.pt: name one"):
            scidata.partition(folder, tmp_path / "out")
    (tmp_path / "graphs.bin").write_bytes(bytes.fromhex("3fa1b446f04f2edd") + bytes(100))
    with pytest.raises((UnsupportedFormatError, CorruptDataError), match=r"graphs\.bin: .*(DGL|process that reads it)"):
        inspect_store(tmp_path / "graphs.bin")


@pytest.mark.slow
def test_graphs_of_dgl_are_as_its_own_reader_has_them(tmp_path):
    script = """
import sys, dgl, torch
one = dgl.graph((torch.tensor([2, 0, 1, 2, 2]), torch.tensor([0, 1, 2, 0, 4])), num_nodes=6)  # an edge twice, 2 alone
one.ndata["x"], one.edata["w"] = torch.rand(6, 3), torch.arange(5.0)
two = dgl.graph((torch.arange(5), torch.arange(5).flip(0)), idtype=torch.int32)  # as many nodes as edges
two.ndata["x"], two.edata["w"] = torch.rand(5, 3), torch.arange(5.0)
dgl.save_graphs(sys.argv[1], [one, two], {"y": torch.tensor([[1.5, 2.0], [3.0, 4.0]])})
buys, sold = ("user", "buys", "item"), ("item", "sold_to", "user")
sets = dgl.heterograph({buys: ([0, 1, 1], [2, 0, 1]), sold: ([2, 0], [0, 1])}, {"user": 3, "item": 4})
sets.nodes["user"].data["a"], sets.edges[sold].data["w"] = torch.rand(3, 2), torch.rand(2)
dgl.save_graphs(sys.argv[2], [sets])
torch.save([[(g.edges(), dict(g.ndata), dict(g.edata)) for g in (one, two)], sets.nodes["user"].data["a"]], sys.argv[3])
"""
    pytest.importorskip("dgl")
    names = [str(tmp_path / name) for name in ("graphs.bin", "sets.bin", "want.pt")]
    environment = os.environ | {"DGLBACKEND": "pytorch"}
    subprocess.run([sys.executable, "-c", script, *names], check=True, env=environment)
    graphs, of_users = torch.load(names[2])
    keep = ("duplicate_edges", "self_loops")
    scidata.partition(f"{names[0]}/*", tmp_path / "out", order="rows", keep=keep)
    ds = scidata.open_dataset(tmp_path / "out")
    for i, (pairs, of_nodes, of_edges) in enumerate(graphs):
        sample = ds[i]
        order = sample.original_id("edge")
        assert torch.equal(sample["x"], of_nodes["x"])
        assert torch.equal(sample["w"], of_edges["w"][order])
        assert torch.equal(sample.edge_index, torch.stack(pairs)[:, order])
        assert sample.to_pyg().y.tolist() == [[1.5, 2.0], [3.0, 4.0]][i]
    scidata.partition(names[1], tmp_path / "sets", order="rows")
    sample = scidata.open_dataset(tmp_path / "sets")[0]
    assert torch.equal(sample["a"], of_users)
    assert sample.to_pyg()["item", "sold_to", "user"].edge_index.tolist() == [[2, 0], [0, 1]]
    whole = Path(names[0]).read_bytes()
    for cut in (20, len(whole) // 2, len(whole) - 3):
        Path(names[0]).write_bytes(whole[:cut])
        with pytest.raises((UnsupportedFormatError, CorruptDataError), match=r"graphs\.bin"):
            inspect_store(names[0])


@forked
def test_tensors_and_what_is_no_tensor(tmp_path):
    torch.save({"pos": torch.rand(50, 3), "u": torch.rand(50).bfloat16(), "note": "text"}, tmp_path / "cloud.pt")
    assert scidata.open_dataset(tmp_path / "cloud.pt")[0]["u"].dtype == torch.float32
    torch.save(torch.nn.Linear(2, 3), tmp_path / "model.pt")
    with pytest.raises(UnsupportedFormatError, match=r"it holds a torch\.nn\.modules\.linear\.Linear; save tensors"):
        scidata.open_dataset(tmp_path / "model.pt")


class Evil:
    def __reduce__(self):
        return open, ("/tmp/scidata-was-here", "w")


def test_nothing_in_a_file_is_run(tmp_path):
    torch.save(Evil(), tmp_path / "evil.pt")
    with pytest.raises(UnsupportedFormatError, match="weights_only"):
        inspect_store(tmp_path / "evil.pt")


# -- surfaces ------------------------------------------------------------------------------------------------------


def test_a_surface_of_cad(tmp_path):
    corners = make.stl(tmp_path / "body.stl")
    assert inspect_store(tmp_path / "body.stl").kind == "mesh"
    with pytest.raises(UnsupportedFormatError, match=r"a mesh that meshio reads.*scidata partition .* --kind mesh"):
        scidata.open_dataset(tmp_path / "body.stl")
    sample = read_samples(tmp_path / "body.stl")[0]
    assert len(sample.points) == 40  # corners that meet are one node
    assert np.array_equal(sample.points[sample.cells.connectivity].reshape(-1, 3, 3), corners)


@pytest.mark.parametrize("encoding", ["ascii", "binary", "base64", "raw", "raw-zlib"])
def test_a_surface_of_vtk(tmp_path, encoding):
    want = make.vtp(tmp_path / "surface.vtp", encoding)
    assert inspect_store(tmp_path / "surface.vtp").kind == "mesh"
    sample = read_samples(tmp_path / "surface.vtp")[0]
    assert np.array_equal(sample.points, want["Points"])
    # meshio puts cells of one size together; their fields go with them
    sizes, first = np.diff(want["offsets"], prepend=0), want["offsets"] - np.diff(want["offsets"], prepend=0)
    cells = {tuple(want["connectivity"][a : a + n]): row for a, n, row in zip(first, sizes, want["Area"], strict=True)}
    found = np.split(sample.cells.connectivity, sample.cells.offsets[1:-1])
    assert {tuple(c): a for c, a in zip(found, sample.fields["Area"].read(), strict=True)} == cells
    assert np.array_equal(sample.fields["Temperature"].read(), want["Temperature"])
    scidata.partition(tmp_path / "surface.vtp", tmp_path / "out")
    assert scidata.open_dataset(tmp_path / "out")[0]["Temperature"].shape == (12,)


def test_surfaces_that_are_not_read_say_why(tmp_path):
    path = tmp_path / "a.vtp"
    make.vtp(path, "raw-zlib")
    whole = path.read_bytes()
    for old, new, why in [
        (b'NumberOfLines="0"', b'NumberOfLines="4"', r"has 4 lines and 7 polygons; .* keep the polygons"),
        (b'NumberOfVerts="0"', b'NumberOfVerts="2"', r"has 2 vertices and 7 polygons; .* keep the polygons"),
        (
            b'NumberOfLines="0" NumberOfStrips="0" NumberOfPolys="7"',
            b'NumberOfLines="2" NumberOfStrips="0" NumberOfPolys="0"',
            r"has 2 lines; .* a network of lines is a graph",
        ),
        (b"ZLibData", b"SnappyData", "compressed by 'vtkSnappyDataCompressor'; read are vtkZLib"),
        (b'type="PolyData"', b'type="ImageData"', "of type 'ImageData', but the suffix .vtp is that of PolyData"),
    ]:
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(UnsupportedFormatError, match=why):
            read_samples(path)[0]
    begin = whole.index(b"   _") + 4
    path.write_bytes(whole[:begin] + b"\n</AppendedData></VTKFile>")
    with pytest.raises(CorruptDataError, match=r"array .* cannot be decoded \(it (begins at|ends)"):
        read_samples(path)[0]


COMPRESSORS = ("", "vtkZLibDataCompressor", "vtkLZ4DataCompressor", "vtkLZMADataCompressor")


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_strips_beside_polygons_are_triangles_with_the_strips_values(tmp_path, compressor, raw):
    area = np.array([1.0, 2.0, 3.0, 4.0])  # two polygons, two strips: the order of cell data
    parts = {"Polys": [(0, 1, 2), (2, 3, 4, 5)], "Strips": [(6, 7, 8, 9, 10), (1, 2, 3)]}
    points = make.vtp_of(tmp_path / "a.vtp", parts, {"Area": area}, compressor=compressor, raw=raw)
    sample = read_samples(tmp_path / "a.vtp")[0]
    cells = np.split(sample.cells.connectivity, sample.cells.offsets[1:-1])
    assert [tuple(c) for c in cells] == [(0, 1, 2), (2, 3, 4, 5), (6, 7, 8), (8, 7, 9), (8, 9, 10), (1, 2, 3)]
    assert sample.fields["Area"].read().tolist() == [1, 2, 3, 3, 3, 4]
    assert np.array_equal(sample.points, points)
    assert np.array_equal(sample.fields["Height"].read(), points[:, 2])


@pytest.mark.parametrize(
    ("vertices", "has_area"), [([(n,) for n in range(11, -1, -1)], True), ([(0, 1, 2)], False), ([], None)]
)
def test_vertices_alone_are_a_cloud(tmp_path, vertices, has_area):
    path, area = tmp_path / "a.vtp", np.arange(1.0 * len(vertices))
    points = make.vtp_of(path, {"Verts": vertices}, {"Area": area}, compressor="", raw=True)
    for kind in (None, "points"):
        header = read_samples(path, kind=kind).header(0)
        assert header.kind == "points"
        assert dict(header.topology.sizes) == {"point": 12}
    assert inspect_store(path).kind == "points"
    if has_area:  # each point has one vertex, from the last to the first
        assert np.array_equal(header.fields["Area"].read(), area[::-1])
    else:
        assert "not one for each point" in header.left_out["Area"]
    raw = scidata.open_dataset(path)[0]
    assert np.array_equal(raw["pos"], points)
    assert ("Area" in raw) == bool(has_area)
    with pytest.raises(FieldMismatchError, match=r"points without polygons, .* kind='mesh' was asked for"):
        read_samples(path, kind="mesh").header(0)
    scidata.partition(path, tmp_path / "out", order="rows")
    assert np.array_equal(scidata.open_dataset(tmp_path / "out")[0]["Height"], points[:, 2])
    scidata.partition(path, tmp_path / "graph", edges="knn:3")
    assert scidata.open_dataset(tmp_path / "graph").kind == "graph"


def test_the_nodes_of_a_surface_as_a_cloud(tmp_path):
    want = make.vtp(tmp_path / "a.vtp", "ascii")
    header = read_samples(tmp_path / "a.vtp", kind="points").header(0)
    assert "lives elsewhere than the points" in header.left_out["Area"]
    scidata.partition(tmp_path / "a.vtp", tmp_path / "out", kind="points", order="rows")
    ds = scidata.open_dataset(tmp_path / "out")
    assert (ds.kind, ds.fields) == ("points", ("pos", "Temperature"))
    assert np.array_equal(ds[0]["pos"], want["Points"])
    assert np.array_equal(ds[0]["Temperature"], want["Temperature"])


@pytest.mark.parametrize("compressor", COMPRESSORS[1:])
def test_damaged_blocks_are_named(tmp_path, compressor):
    path = tmp_path / "a.vtp"
    make.vtp_of(path, {"Polys": [(0, 1, 2)]}, {"Area": np.ones(1)}, compressor=compressor, raw=True)
    data = bytearray(path.read_bytes())
    begin = data.index(b"   _") + 4
    data[begin + 4 : begin + 8] = np.uint32(2**31).tobytes()  # the decoded size of the blocks
    data[begin + 8 : begin + 12] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match="array 'Height' cannot be decoded"):
        read_samples(path)[0]


@pytest.mark.parametrize("compressor", ["None", "ZLib", "LZ4", "LZMA"])
@pytest.mark.parametrize("mode", ["Ascii", "Binary", "Appended", "Raw"])
@pytest.mark.parametrize("wide", [False, True])
def test_surfaces_of_vtk_itself(tmp_path, mode, compressor, wide):
    vtk = pytest.importorskip("vtk")
    from vtkmodules.util.numpy_support import vtk_to_numpy

    strip = vtk.vtkStripper()  # polygons that become strips, and some that stay
    sphere = vtk.vtkSphereSource()
    strip.SetInputConnection(sphere.GetOutputPort())
    strip.Update()
    writer = vtk.vtkXMLPolyDataWriter()
    writer.SetInputData(strip.GetOutput())
    writer.SetFileName(str(tmp_path / "a.vtp"))
    getattr(writer, f"SetDataModeTo{'Appended' if mode == 'Raw' else mode}")()
    writer.SetEncodeAppendedData(mode != "Raw")
    getattr(writer, f"SetCompressorTypeTo{compressor}")()
    writer.SetBlockSize(256)
    if wide:
        writer.SetHeaderTypeToUInt64()
        writer.SetByteOrderToBigEndian()
    assert writer.Write()
    cut = vtk.vtkTriangleFilter()
    cut.SetInputConnection(strip.GetOutputPort())
    cut.Update()
    sample = read_samples(tmp_path / "a.vtp")[0]
    want = vtk_to_numpy(cut.GetOutput().GetPolys().GetConnectivityArray()).reshape(-1, 3)
    assert sorted(map(tuple, sample.cells.connectivity.reshape(-1, 3))) == sorted(map(tuple, want))
    normals = vtk_to_numpy(strip.GetOutput().GetPointData().GetArray("Normals"))
    assert np.array_equal(sample.fields["Normals"].read(), normals)


def test_raw_arrays_of_many_sizes_are_never_mixed_up(tmp_path):
    """meshio alone takes one array for another where an offset that it changed meets one that it looks for."""
    for num_points in range(12, 72):
        want = make.vtp(tmp_path / "a.vtp", "raw", num_points=num_points)
        fields = read_samples(tmp_path / "a.vtp")[0].fields
        assert np.array_equal(fields["Temperature"].read(), want["Temperature"])
        assert sorted(fields["Area"].read()) == sorted(want["Area"])


def test_a_cloud_in_hdf5_is_planned_as_it_opens(tmp_path):
    from typer.testing import CliRunner

    from scidata.cli.app import app

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["pos"], file["u"] = make.values(90, 3), make.values(90)
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "a.h5"), "--domain", "3", "--json"])
    assert done.exit_code == 0, done.output
    assert '"kind": "points"' in done.output
    assert '"point": [0, 30, 60, 90]' in " ".join(done.output.split()).replace("[ ", "[").replace(" ]", "]")
    for options, why in [(["--halo", "2"], "put them in order once"), (["--plot", "a.png"], "draws grids and stores")]:
        done = CliRunner().invoke(app, ["plan", str(tmp_path / "a.h5"), "--domain", "3", *options])
        assert done.exit_code == 2
        assert why in " ".join(done.output.split())


def test_clouds_of_numpy_behind_a_url(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    make.cloud_npz(tmp_path / "a.npz", compressed=False)
    fsspec.filesystem("memory").pipe("/clouds/a.npz", (tmp_path / "a.npz").read_bytes())
    with np.load(tmp_path / "a.npz") as want:
        assert np.array_equal(scidata.open_dataset("memory://clouds/a.npz")[0]["pressure"].numpy(), want["pressure"])
