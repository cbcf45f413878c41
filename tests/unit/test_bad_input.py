"""Damaged stores and wrong arguments, end to end: a clear error by name, and never a value that is not in the file."""

import json
import shutil

import h5py
import numpy as np
import pytest
import zarr

import scidata
from scidata.errors import (
    ChecksumError,
    CorruptDataError,
    FieldMismatchError,
    MissingChunkError,
    RefusedError,
    ShortReadError,
    UnknownNameError,
    UnsupportedFormatError,
)
from scidata.testing import make_grid


def read_all(path, **options):
    ds = scidata.open_dataset(str(path), **options)
    return [ds[i] for i in range(len(ds))]


@pytest.fixture
def grid(tmp_path):
    def make(fmt, **options):
        path = tmp_path / f"grid_{fmt}"
        wanted = make_grid(path, format=fmt, num_times=3, **options)
        read_all(path)  # whole as written
        return path, wanted

    return make


def truncate(path, keep=0.6):
    size = path.stat().st_size
    with path.open("r+b") as f:
        f.truncate(int(size * keep))


def test_truncated_netcdf3(grid):
    path, _ = grid("netcdf3")
    truncate(path)
    with pytest.raises(ShortReadError, match=r"grid_netcdf3.*(bytes|ends)"):
        read_all(path)


@pytest.mark.parametrize("fmt", ["hdf5", "hdf5_chunked", "netcdf4"])
def test_truncated_hdf5(grid, fmt):
    path, _ = grid(fmt)
    truncate(path)
    with pytest.raises(CorruptDataError, match=rf"grid_{fmt}"):
        read_all(path)


def chunk_files(path, field="u"):
    return sorted(p for p in (path / field).rglob("*") if p.is_file() and p.name[0].isdigit())


@pytest.mark.parametrize("fmt", ["zarr2", "zarr3", "zarr3_sharded"])
@pytest.mark.parametrize("compressed", [True, False])
def test_truncated_zarr_chunk(grid, fmt, compressed):
    path, _ = grid(fmt, compressed=compressed)
    truncate(chunk_files(path)[0], keep=0.5)
    with pytest.raises(CorruptDataError, match=rf"grid_{fmt}"):
        read_all(path)


@pytest.mark.parametrize("fmt", ["zarr2", "zarr3", "zarr3_sharded"])
def test_a_missing_chunk_is_not_the_fill_value(grid, fmt):
    path, wanted = grid(fmt)
    chunk_files(path)[0].unlink()
    with pytest.raises(MissingChunkError, match=rf"grid_{fmt}.*'?u'?.*allow_missing=True"):
        read_all(path)
    with pytest.raises(FileNotFoundError):  # the built-in kin
        read_all(path)
    samples = read_all(path, allow_missing=True)
    assert np.array_equal(samples[0]["v"], wanted["v"][0])
    assert not np.array_equal(samples[0]["u"], wanted["u"][0])


def test_a_missing_chunk_of_an_array_that_only_zarr_decodes(tmp_path):
    path = str(tmp_path / "delta.zarr")
    import numcodecs

    array = zarr.create_array(
        path, name="u", shape=(2, 8, 8), chunks=(1, 8, 8), dtype="<i4", zarr_format=2, filters=[numcodecs.Delta("<i4")]
    )
    array[...] = np.arange(128).reshape(2, 8, 8)
    assert np.array_equal(read_all(path)[1]["u"], np.arange(64, 128).reshape(8, 8))
    (tmp_path / "delta.zarr" / "u" / "1.0.0").unlink()
    with pytest.raises(MissingChunkError, match="u"):
        read_all(path)


def test_a_flipped_bit_under_crc32c(tmp_path):
    path = tmp_path / "checked.zarr"
    array = zarr.create_array(
        str(path),
        name="u",
        shape=(2, 8, 8),
        chunks=(1, 4, 8),
        dtype="f4",
        compressors=[zarr.codecs.Crc32cCodec()],
        dimension_names=("time", "y", "x"),
    )
    array[...] = np.random.default_rng(0).random((2, 8, 8), np.float32)
    read_all(path)
    chunk = next(p for p in (path / "u" / "c" / "1").rglob("0") if p.is_file())
    data = bytearray(chunk.read_bytes())
    data[17] ^= 4
    chunk.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"checked\.zarr.*u"):
        read_all(path)


def test_a_flipped_bit_under_fletcher32(tmp_path):
    path = tmp_path / "checked.h5"
    with h5py.File(path, "w") as f:
        f.create_dataset("u", data=np.random.default_rng(0).random((2, 8, 8)), chunks=(1, 8, 8), fletcher32=True)
        place = f["u"].id.get_chunk_info(1)
    read_all(path)
    data = bytearray(path.read_bytes())
    data[place.byte_offset + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"checked\.h5.*u"):
        read_all(path)


def test_an_unknown_codec(grid):
    path, wanted = grid("zarr3")
    metadata = json.loads((path / "u" / "zarr.json").read_text())
    metadata["codecs"][-1]["name"] = "zsdt"
    (path / "u" / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(UnsupportedFormatError, match="zsdt"):
        read_all(path, fields=["u"])
    assert np.array_equal(read_all(path)[0]["v"], wanted["v"][0])  # the other fields still open


def test_fields_that_disagree_in_shape(tmp_path):
    path = str(tmp_path / "two.zarr")
    group = zarr.open_group(path, mode="w")
    for name, rows in (("u", 8), ("v", 9)):
        group.create_array(name, shape=(2, rows, 4), dtype="f4", dimension_names=("time", "y", "x"))[...] = 1.0
    with pytest.raises(FieldMismatchError, match=r"disagree in shape: dimension 'y' has 8 rows in 'u' and 9 in 'v'"):
        scidata.open_dataset(path, fields=["u", "v"])
    assert scidata.open_dataset(path).fields == ("v",)  # by default those that agree with the largest


def test_unknown_names_and_paths(grid, tmp_path):
    path, _ = grid("zarr3")
    with pytest.raises(UnknownNameError, match=r"no field 'temp'; (there are|did you mean)"):
        scidata.open_dataset(str(path), fields=["temp"])
    with pytest.raises(UnknownNameError, match="'latitudes', which no field has; did you mean 'latitude'"):
        scidata.open_dataset(str(path), isel={"latitudes": 0})
    with pytest.raises(FileNotFoundError, match="grid_zarr"):
        scidata.open_dataset(str(tmp_path / "grid_zarrr3"))
    (tmp_path / "notes.txt").write_text("not a store")
    with pytest.raises(UnsupportedFormatError, match="begins with"):
        scidata.open_dataset(str(tmp_path / "notes.txt"))


def test_what_leads_out_of_the_store_is_refused(grid, tmp_path):
    path, _ = grid("zarr3")
    shutil.move(path / "u", tmp_path / "elsewhere")
    (path / "u").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="allow_external"):
        read_all(path, fields=["u"])
    read_all(path, fields=["u"], allow_external=True)
    with h5py.File(tmp_path / "virtual.h5", "w") as f:
        layout = h5py.VirtualLayout((2, 4, 4), "f4")
        layout[...] = h5py.VirtualSource(str(tmp_path / "other.h5"), "u", (2, 4, 4))
        f.create_virtual_dataset("u", layout)
    with pytest.raises(RefusedError, match="allow_external"):
        scidata.open_dataset(str(tmp_path / "virtual.h5"), fields=["u"])
