"""Files that claim, or pack, far more than they should hold: refused before memory is taken, and damage is noticed."""

import base64
import io
import json
import struct
import tracemalloc
import zipfile
import zlib
from contextlib import contextmanager

import h5py
import numpy as np
import pytest
import torch
import zarr

from scidata.core.options import ReadOptions
from scidata.data.raw_report import inspect_store
from scidata.errors import CorruptDataError
from scidata.grids.plan import plan_grid
from scidata.grids.reader import GridReader
from scidata.interop import torch_worker
from scidata.meshes.samples import read_samples
from scidata.sources import numpy_files, open_source
from tests.unit._children import forked_torch_worker

__all__ = ["forked_torch_worker"]  # a fixture

TOTAL = 1 << 28  # bytes that a bomb would take


@contextmanager
def at_most(nbytes):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def array(name, kind, values, *, sizes=None, components=1):
    """A DataArray packed by zlib; ``sizes``: number of blocks and size of each that its header claims."""
    packed = zlib.compress(np.ascontiguousarray(values))
    num, size = sizes or (1, np.asarray(values).nbytes)
    header = struct.pack(f"<{3 + num}Q", num, size, 0, *[len(packed)] * num)
    text = (base64.b64encode(header) + base64.b64encode(packed * num)).decode()
    return (
        f'<DataArray type="{kind}" Name="{name}" NumberOfComponents="{components}" format="binary">{text}</DataArray>'
    )


def vtk(kind, field):
    cells = array("connectivity", "Int64", np.arange(3)) + array("offsets", "Int64", np.array([3]))
    cells += array("types", "UInt8", np.array([5], "u1")) if kind == "UnstructuredGrid" else ""
    counts, group = ("NumberOfCells", "Cells") if kind == "UnstructuredGrid" else ("NumberOfPolys", "Polys")
    points = array("p", "Float32", np.eye(3, dtype="f4"), components=3)
    return (
        f'<VTKFile type="{kind}" byte_order="LittleEndian" header_type="UInt64" compressor="vtkZLibDataCompressor">'
        f'<{kind}><Piece NumberOfPoints="3" {counts}="1"><PointData>{field}</PointData><Points>{points}</Points>'
        f"<{group}>{cells}</{group}></Piece></{kind}></VTKFile>"
    )


@pytest.mark.parametrize(("kind", "suffix"), [("PolyData", "vtp"), ("UnstructuredGrid", "vtu")])
def test_vtk_arrays_that_claim_or_hold_more_than_their_piece(tmp_path, kind, suffix):
    pytest.importorskip("meshio", reason="reads VTU")
    path = str(tmp_path / f"mesh.{suffix}")
    block = np.zeros(1 << 20, "f4")
    good = np.array([1, 2, 3], "f4")
    for field, why in (
        (array("t", "Float32", block, sizes=(TOTAL // block.nbytes, block.nbytes)), "3 rows take 12"),
        (array("t", "Float32", np.zeros(TOTAL // 16, "f4"), sizes=(1, 12)), "more bytes where 12 were expected"),
        (array("t", "Float32", good), None),
    ):
        with open(path, "w") as file:
            file.write(vtk(kind, field))
        with at_most(TOTAL // 4):
            if why is None:
                assert read_samples(path)[0].fields["t"].read().ravel().tolist() == [1, 2, 3]
                continue
            with pytest.raises(CorruptDataError, match=f"array 't' cannot be decoded.*{why}"):
                read_samples(path).header(0)


def test_large_packed_arrays_of_numpy_are_read_in_pieces(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, big=np.zeros((64, TOTAL // 64), "u1"))
    source = open_source(str(path))
    monkeypatch.setattr(numpy_files, "_KEPT", TOTAL // 2)
    out = np.ones((1, 10), "u1")
    with at_most(TOTAL // 4):
        source.read_box(source.arrays["big"], (slice(40, 41), slice(5, 15)), out)
    assert not out.any()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    "box", [np.s_[0:5, 0:7, 0:3], np.s_[1:5:2, 2:7:3, 1:2], np.s_[4:5, 0:1, 0:3], np.s_[2:2, 0:7, :3]]
)
def test_pieces_are_what_numpy_reads(tmp_path, monkeypatch, order, box):
    values = np.asarray(np.arange(105.0).reshape(5, 7, 3), order=order)
    np.savez_compressed(tmp_path / "a.npz", x=values)
    monkeypatch.setattr(numpy_files, "_KEPT", 0)
    monkeypatch.setattr(numpy_files, "_PIECE", 400)
    source = open_source(str(tmp_path / "a.npz"))
    out = np.empty(values[box].shape)
    source.read_box(source.arrays["x"], box, out)
    assert np.array_equal(out, values[box])
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[data.index(b"PK\x01\x02") + 16] ^= 1  # the checksum
    (tmp_path / "b.npz").write_bytes(data)
    source = open_source(str(tmp_path / "b.npz"))
    with pytest.raises(CorruptDataError, match="CRC"):
        source.read_box(source.arrays["x"], box, out)


def test_archives_that_claim_what_deflate_cannot_hold(tmp_path):
    values = io.BytesIO()
    np.lib.format.write_array_header_1_0(values, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", values.getvalue())
    data = bytearray((tmp_path / "a.npz").read_bytes())
    for mark, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        begin = data.index(mark) + at
        data[begin : begin + 4] = struct.pack("<I", (1 << 32) - 2)
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"x\.npy claims 4294967294 bytes in"):
        open_source(str(tmp_path / "a.npz")).arrays  # noqa: B018


def test_tensors_that_stand_for_more_than_their_file(tmp_path):
    side = 1 << 18
    few = torch.ones(4).expand(3, 4)
    sparse = torch.sparse_coo_tensor(
        torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (side, side), check_invariants=True
    )
    for big in (torch.zeros(1).expand(side * side), sparse):
        torch.save({"x": few, "big": big}, tmp_path / "a.pt")
        most = torch_worker.check_archive(str(tmp_path / "a.pt"))
        with pytest.raises(ValueError, match=r"tensor 'big' of shape .* far more values than the file has"):
            torch_worker.write_arrays(str(tmp_path / "a.pt"), str(tmp_path), most)


@pytest.mark.usefixtures("forked_torch_worker")
def test_flipped_bits_of_torch_files_are_noticed(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"x": torch.arange(8.0)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(np.arange(1, 5, dtype="f4").tobytes())
    data[at + 2] ^= 16
    damaged = tmp_path / "b.pt"
    damaged.write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"b\.pt: entry '.*/data/0' does not match its checksum"):
        open_source(str(damaged)).arrays  # noqa: B018
    torch.serialization.set_crc32_options(False)  # such files have zeros for checksums
    try:
        torch.save({"x": torch.arange(8.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    torch_worker.check_archive(str(path))


def test_a_dimension_without_times_is_not_numbered_to_look_for_gaps(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        u = file.create_dataset("u", shape=(1 << 40, 4, 6), chunks=(1024, 4, 6), dtype="f4")
        for dim, name in zip(u.dims, ("time", "lat", "lon"), strict=True):
            dim.label = name
    with at_most(1 << 20):
        assert inspect_store(str(tmp_path / "a.h5")).num_samples == 1 << 40


def test_chunks_that_claim_more_rows_than_their_array_has_are_planned(tmp_path):
    zarr.create_array(tmp_path / "a.zarr", shape=(8, 6), chunks=(8, 6), dtype="f4", zarr_format=2)[:] = 1
    meta = json.loads((tmp_path / "a.zarr/.zarray").read_text())
    meta |= {"chunks": [1 << 30, 6], "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}}
    (tmp_path / "a.zarr/.zarray").write_text(json.dumps(meta))
    options = ReadOptions(num_threads=1, shard={"dim_1": "domain"}, sample_dim="dim_0")
    reader = GridReader(str(tmp_path / "a.zarr"), options, axis_sizes={"domain": 3})
    with at_most(1 << 24):
        assert plan_grid(reader).num_ranks == 3
