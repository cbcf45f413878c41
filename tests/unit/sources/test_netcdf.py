"""NetCDF sources against netCDF4, xarray and SciPy: names, dims, attributes and located bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numcodecs
import numpy as np
import pytest
from scipy.io import netcdf_file

from scidata.core.types import Source
from scidata.errors import ConfigError, CorruptDataError, ShortReadError, UnknownNameError, UnsupportedFormatError
from scidata.sources import open_source
from scidata.sources.access.files import files
from scidata.sources.netcdf import NetCDF3Source, NetCDF4Source
from scidata.sources.netcdf3 import read_header

netCDF4 = pytest.importorskip("netCDF4", reason="writes the files and is the oracle")  # noqa: N816

DATA = Path(__file__).parents[3].parent / "shared" / "data"
REAL = sorted(p.name for p in DATA.glob("*") if p.suffix in (".nc", ".ug"))
needs_data = pytest.mark.skipif(not REAL, reason="the real sample files are not beside the repository")
CLASSIC = {1: "NETCDF3_CLASSIC", 2: "NETCDF3_64BIT_OFFSET", 5: "NETCDF3_64BIT_DATA"}


def unshuffle(raw, size):
    whole = len(raw) // size * size  # HDF5 leaves bytes that do not fill an element where they are
    return np.frombuffer(raw[:whole], "u1").reshape(size, -1).T.tobytes() + raw[whole:]


def decode(raw, layout):
    for codec in reversed(layout.codecs):
        if codec.name == "shuffle":
            raw = unshuffle(raw, codec.config["elementsize"])
        else:
            raw = bytes({"zlib": numcodecs.Zlib, "fletcher32": numcodecs.Fletcher32}[codec.name]().decode(raw))
    return np.frombuffer(raw, layout.dtype).reshape(layout.chunks)


def assemble(source, name):
    """The whole array from the located bytes alone."""
    layout = source.arrays[name]
    assert not layout.fallback
    out = np.empty(layout.shape, layout.dtype)
    grid = list(itertools.product(*map(range, layout.num_chunks)))
    refs = source.locate(layout, np.array(grid, np.int64).reshape(len(grid), len(layout.shape)))
    for row, coord in enumerate(grid):
        box = tuple(slice(c * n, (c + 1) * n) for c, n in zip(coord, layout.chunks, strict=True))
        if refs.path_index[row] < 0:
            out[box] = layout.fill_value
            continue
        chunk = decode(bytes(files().read(refs.paths[0], int(refs.offset[row]), int(refs.nbytes[row]))), layout)
        out[box] = chunk[tuple(slice(0, n) for n in out[box].shape)]
    return out


def boxed(source, name, box=None):
    layout = source.arrays[name]
    box = box or tuple(slice(0, n) for n in layout.shape)
    out = np.full([len(range(*s.indices(n))) for s, n in zip(box, layout.shape, strict=True)], 77, layout.dtype)
    source.read_box(layout, box, out)
    return out


def variables_of(path):
    """What netCDF4 shows: ``{group/name: (dims, dtype, raw values, attributes)}`` of numeric variables."""
    found = {}
    with netCDF4.Dataset(path) as dataset:
        dataset.set_auto_maskandscale(False)
        groups = [("", dataset)]
        while groups:
            prefix, group = groups.pop(0)
            groups += [(f"{prefix}{name}/", child) for name, child in group.groups.items()]
            for name, variable in group.variables.items():
                if variable.dtype is not str and getattr(variable.dtype, "kind", "O") in "iuf":
                    attributes = {a: variable.getncattr(a) for a in variable.ncattrs()}
                    values = np.asarray(variable[...])
                    found[prefix + name] = (variable.dimensions, variable.dtype, values, attributes)
    return found


def assert_as_netcdf4(source, path):
    expected = variables_of(path)
    assert set(source.arrays) == set(expected)
    for name, (dims, dtype, data, attributes) in expected.items():
        layout = source.arrays[name]
        assert layout.dims == dims
        assert layout.shape == data.shape
        assert layout.dtype.newbyteorder("=") == np.dtype(dtype).newbyteorder("=")
        assert set(layout.attributes) == set(attributes)
        for key, value in attributes.items():
            ours = layout.attributes[key]
            np.testing.assert_array_equal(ours, value)
            if isinstance(value, np.generic):
                assert isinstance(ours, np.generic)
                assert ours.dtype == value.dtype
        native = data.astype(layout.dtype)
        assert assemble(source, name).tobytes() == native.tobytes()
        assert boxed(source, name).tobytes() == native.tobytes()


@needs_data
@pytest.mark.parametrize("name", REAL)
def test_real_files(name):
    source = open_source(DATA / name)
    assert isinstance(source, Source)
    magic = (DATA / name).read_bytes()[:3]
    assert source.format == ("netcdf3" if magic == b"CDF" else "netcdf4")
    assert_as_netcdf4(source, DATA / name)
    with netCDF4.Dataset(DATA / name) as dataset:
        assert set(source.attributes) == set(dataset.ncattrs()) - {"_NCProperties"}


# ---------------------------------------------------------------------------------------------------- NetCDF-4


@pytest.fixture
def netcdf4_path(tmp_path):
    rng = np.random.default_rng(0)
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as f:
        f.title = "made"
        for name, size in (("time", None), ("lat", 7), ("lon", 9), ("bare", 4)):
            f.createDimension(name, size)
        f.createVariable("lat", "f8", ("lat",))[:] = np.arange(7)
        f.createVariable("time", "i4", ("time",))[:] = np.arange(3)
        u = f.createVariable("u", "f4", ("time", "lat", "lon"), zlib=True, shuffle=True, fletcher32=True)
        u[:] = rng.standard_normal((3, 7, 9))
        u.units = "m s-1"
        u.valid_range = np.array([1, 2], "f4")
        p = f.createVariable("packed", "i2", ("lat", "lon"), fill_value=-5, chunksizes=(3, 4))
        p.set_auto_maskandscale(False)
        p.scale_factor = np.float32(0.1)
        p.add_offset = np.array([1.5])
        p[:] = rng.integers(-100, 100, (7, 9))
        f.createVariable("lon", "f4", ("lat",))[:] = 5.0  # named like a dimension that it does not lie on
        f.createVariable("big", ">i4", ("lat",), endian="big")[:] = np.arange(7)
        f.createVariable("plain", "i8", ("bare", "lon"), contiguous=True)[:] = np.arange(36).reshape(4, 9)
        f.createVariable("scalar", "f8")[:] = 2.5
        f.createVariable("name", str, ("bare",))[:] = np.array(["a", "b", "c", "d"], dtype=object)
        f.createVariable("flag", "S1", ("bare",))[:] = np.array([b"a"] * 4)
        g = f.createGroup("g")
        g.createDimension("depth", 2)
        g.createVariable("depth", "f4", ("depth",))[:] = [10, 20]
        g.createVariable("w", "f4", ("depth", "lat"))[:] = rng.standard_normal((2, 7))
        kind = f.createEnumType(np.int8, "kind_t", {"land": 0, "sea": 1})
        f.createVariable("kind", kind, ("bare",))[:] = [0, 1, 1, 0]
    return tmp_path / "a.nc"


def test_netcdf4_has_netcdf_names(netcdf4_path):
    source = open_source(netcdf4_path)
    assert isinstance(source, NetCDF4Source)
    assert source.attributes == {"title": "made"}
    expected = variables_of(netcdf4_path)
    with h5py.File(netcdf4_path) as f:
        assert "_nc4_non_coord_lon" in f
        assert "bare" in f
    assert set(source.arrays) == {*expected, "kind"}
    assert source.arrays["lon"].dims == ("lat",)
    assert source.arrays["g/w"].dims == ("depth", "lat")
    assert source.arrays["kind"].dtype == np.int8
    assert assemble(source, "kind").tolist() == [0, 1, 1, 0]
    assert set(source.skipped) == {"name", "flag"}
    assert source.arrays["packed"].fill_value == np.int16(-5)
    assert source.arrays["packed"].attributes["scale_factor"].dtype == np.float32
    assert {c.name for c in source.arrays["u"].codecs} == {"shuffle", "zlib", "fletcher32"}
    assert not source.arrays["u"].fallback
    for name, (dims, _, data, _) in expected.items():
        assert source.arrays[name].dims == dims
        native = data.astype(source.arrays[name].dtype)
        assert assemble(source, name).tobytes() == native.tobytes(), name
        assert boxed(source, name).tobytes() == native.tobytes(), name


def test_netcdf4_without_enums_is_netcdf4s_view_exactly(tmp_path):
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as f:
        f.createDimension("x", 5)
        f.createDimension("t", None)
        f.createVariable("t", "f8", ("t",))[:] = [1, 2]
        v = f.createVariable("v", "u2", ("t", "x"), fill_value=9, zlib=True)
        v[1, 2:] = 4
        v.flag_values = np.array([1, 2], "u2")
        v.long_name = "a value"
    assert_as_netcdf4(open_source(tmp_path / "a.nc"), tmp_path / "a.nc")


def test_variables_shorter_than_their_unlimited_dimension(tmp_path):
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as f:
        f.createDimension("t", None)
        f.createDimension("x", 3)
        f.createVariable("long", "f4", ("t", "x"))[:] = np.arange(33).reshape(11, 3)
        f.createVariable("short", "i4", ("t", "x"), chunksizes=(4, 2), fill_value=-7)[:6] = np.arange(18).reshape(6, 3)
        f.createVariable("none", "f8", ("t",), fill_value=-1.0)
    source = open_source(tmp_path / "a.nc")
    with h5py.File(tmp_path / "a.nc") as f:
        assert f["short"].shape == (6, 3)
    assert_as_netcdf4(source, tmp_path / "a.nc")
    assert source.arrays["short"].shape == (11, 3)
    refs = source.locate(source.arrays["short"], np.array([[0, 0], [1, 1], [2, 0]]))
    assert refs.path_index.tolist() == [0, 0, -1]
    whole = boxed(source, "short")
    for box in ((slice(1, 11, 3), slice(0, 3)), (slice(7, 9), slice(1, 2)), (slice(4, 6), slice(0, 3, 2))):
        np.testing.assert_array_equal(boxed(source, "short", box), whole[box])


def test_coordinates_of_several_dimensions(tmp_path):
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as f:
        for name, size in (("y", 3), ("x", 4), ("lat", 3)):
            f.createDimension(name, size)
        f.createVariable("lat", "f4", ("lat", "x"))[:] = 1  # a scale of two dimensions: nothing can be attached to it
        f.createVariable("u", "f4", ("y", "lat"))[:] = 2
        f.createVariable("x", "f4", ("x",))[:] = 3
    with h5py.File(tmp_path / "a.nc") as f:
        assert f["lat"].is_scale
    assert_as_netcdf4(open_source(tmp_path / "a.nc"), tmp_path / "a.nc")


def test_hdf5_without_scales_read_as_netcdf(tmp_path):
    with h5py.File(tmp_path / "a.nc", "w") as f:
        f["u"] = np.zeros((2, 3))
    source = open_source(tmp_path / "a.nc")
    assert source.format == "netcdf4"
    assert source.arrays["u"].dims == ("dim_0", "dim_1")


def test_written_by_xarray(tmp_path):
    xr = pytest.importorskip("xarray", reason="writes the file")
    u = np.random.default_rng(0).standard_normal((4, 5, 6)).astype("f4")
    dataset = xr.Dataset(
        {"u": (("time", "y", "x"), u), "mask": (("y", "x"), np.eye(5, 6, dtype="i1"))},
        coords={"time": np.arange(4), "y": np.arange(5.0), "lat": (("y", "x"), np.ones((5, 6)))},
    )
    dataset.to_netcdf(tmp_path / "a.nc", engine="netcdf4", encoding={"u": {"zlib": True, "chunksizes": (1, 5, 4)}})
    source = open_source(tmp_path / "a.nc")
    assert_as_netcdf4(source, tmp_path / "a.nc")
    assert source.arrays["u"].attributes["coordinates"] == "lat"


def test_netcdf4_pickles_and_refuses_damage(netcdf4_path, tmp_path):
    source = pickle.loads(pickle.dumps(open_source(netcdf4_path)))
    assert isinstance(source, NetCDF4Source)
    assert assemble(source, "scalar") == 2.5
    (tmp_path / "short.nc").write_bytes(netcdf4_path.read_bytes()[:-500])
    with pytest.raises(ShortReadError, match=r"short\.nc"):
        open_source(tmp_path / "short.nc").arrays  # noqa: B018
    layout = source.arrays["u"]
    with pytest.raises(UnknownNameError, match="did you mean 'packed'"):
        source.locate(dataclasses.replace(layout, name="paked"), np.zeros((1, 3), np.int64))


# ---------------------------------------------------------------------------------------------------- NetCDF-3


def write_classic(path, version, *, num_records=5, only_record=None):
    rng = np.random.default_rng(0)
    with netCDF4.Dataset(path, "w", format=CLASSIC[version]) as f:
        f.title = "made"
        f.levels = np.array([1, 2, 3], "i2")
        f.setncattr("factor", np.float32(0.5))
        for name, size in (("time", None), ("y", 3), ("x", 5)):
            f.createDimension(name, size)
        if only_record:
            v = f.createVariable("v", only_record, ("time", "x"))
            v[:] = rng.integers(0, 100, (num_records, 5))
            f.createVariable("fixed", "i1", ("x",))[:] = np.arange(5)
            return
        f.createVariable("text", "S1", ("y", "x"))[:] = np.array([list("abcde")] * 3, "S1")
        kinds = ["i1", "i2", "i4", "f4", "f8"] + (["u1", "u2", "u4", "i8", "u8"] if version == 5 else [])
        for kind in kinds:
            f.createVariable(f"fixed_{kind}", kind, ("y", "x"))[:] = rng.integers(0, 100, (3, 5))
            record = f.createVariable(f"record_{kind}", kind, ("time", "x"))
            record[:] = rng.integers(0, 100, (num_records, 5))
            record.note = "é" * 3
            record.one = np.array([7], "i2")
        f.createVariable("scalar", "f8")[:] = 2.5
        f.createVariable("time", "f8", ("time",))[:] = np.arange(num_records)


@pytest.mark.parametrize("version", CLASSIC)
def test_every_type_fixed_and_record(tmp_path, version):
    write_classic(tmp_path / "a.nc", version)
    assert (tmp_path / "a.nc").read_bytes()[3] == version
    source = open_source(tmp_path / "a.nc")
    assert isinstance(source, NetCDF3Source)
    assert isinstance(source, Source)
    assert_as_netcdf4(source, tmp_path / "a.nc")
    assert set(source.skipped) == {"text"}
    assert source.attributes["title"] == "made"
    assert source.attributes["levels"].tolist() == [1, 2, 3]
    assert source.attributes["factor"].dtype == np.float32
    assert source.arrays["record_i2"].chunks == (1, 5)
    assert source.arrays["fixed_i2"].chunks == (3, 5)
    assert source.arrays["record_i2"].dtype == np.dtype(">i2")
    box = (slice(1, 5, 2), slice(0, 5, 3))
    np.testing.assert_array_equal(boxed(source, "record_f4", box), boxed(source, "record_f4")[box])


@pytest.mark.parametrize("kind", ["i1", "i2", "f4"])
@pytest.mark.parametrize("version", CLASSIC)
def test_the_only_record_variable_is_not_padded(tmp_path, kind, version):
    write_classic(tmp_path / "a.nc", version, only_record=kind)
    source = open_source(tmp_path / "a.nc")
    assert_as_netcdf4(source, tmp_path / "a.nc")
    assert source.arrays["v"].chunks == (5, 5)  # records without gaps: one contiguous array


def test_written_by_scipy(tmp_path):
    rng = np.random.default_rng(0)
    for version in (1, 2):
        path = tmp_path / f"{version}.nc"
        with netcdf_file(path, "w", version=version) as f:
            f.createDimension("t", None)
            f.createDimension("x", 3)
            f.createVariable("a", "i2", ("t", "x"))[:] = rng.integers(0, 9, (4, 3))
            f.createVariable("b", "f8", ("x",))[:] = rng.standard_normal(3)
            f.createVariable("c", "i1", ("t",))[:] = [1, 2, 3, 4]
        source = open_source(path)
        with netcdf_file(path, mmap=False) as f:
            for name in "abc":
                assert assemble(source, name).tobytes() == f.variables[name][:].tobytes()
        assert_as_netcdf4(source, path)


@pytest.mark.parametrize("version", CLASSIC)
@pytest.mark.parametrize("only", [None, "i2"])
def test_streaming_counts_records_from_the_size(tmp_path, version, only):
    write_classic(tmp_path / "a.nc", version, only_record=only)
    raw = bytearray((tmp_path / "a.nc").read_bytes())
    width = 8 if version == 5 else 4
    raw[4 : 4 + width] = b"\xff" * width
    (tmp_path / "s.nc").write_bytes(raw)
    whole, streamed = open_source(tmp_path / "a.nc"), open_source(tmp_path / "s.nc")
    assert set(whole.arrays) == set(streamed.arrays)
    for name in whole.arrays:
        assert assemble(streamed, name).tobytes() == assemble(whole, name).tobytes()


def test_no_records_yet(tmp_path):
    write_classic(tmp_path / "a.nc", 1, num_records=0)
    source = open_source(tmp_path / "a.nc")
    assert source.arrays["record_i2"].shape == (0, 5)
    assert assemble(source, "record_i2").shape == boxed(source, "record_i2").shape == (0, 5)
    assert_as_netcdf4(source, tmp_path / "a.nc")


def test_an_empty_file(tmp_path):
    with netCDF4.Dataset(tmp_path / "a.nc", "w", format="NETCDF3_CLASSIC"):
        pass
    source = open_source(tmp_path / "a.nc")
    assert dict(source.arrays) == dict(source.attributes) == dict(source.skipped) == {}


@pytest.mark.parametrize("version", CLASSIC)
def test_truncation_names_the_variable_and_both_sizes(tmp_path, version):
    write_classic(tmp_path / "a.nc", version)
    raw = (tmp_path / "a.nc").read_bytes()
    (tmp_path / "s.nc").write_bytes(raw[:-40])
    with pytest.raises(
        ShortReadError, match=rf"s\.nc: variable '\w+' ends at byte \d+, but the file has {len(raw) - 40}"
    ):
        open_source(tmp_path / "s.nc").arrays  # noqa: B018


@pytest.mark.parametrize("version", CLASSIC)
def test_a_header_cut_anywhere_is_an_error_of_ours(tmp_path, version):
    write_classic(tmp_path / "a.nc", version)
    raw = (tmp_path / "a.nc").read_bytes()
    for size in range(4, len(raw) - 8, 7 if version == 1 else 41):
        (tmp_path / "s.nc").write_bytes(raw[:size])
        with pytest.raises(ShortReadError):
            read_header(str(tmp_path / "s.nc"))


@pytest.mark.parametrize("version", CLASSIC)
def test_damaged_headers_never_allocate_or_crash(tmp_path, version):
    write_classic(tmp_path / "a.nc", version)
    raw = (tmp_path / "a.nc").read_bytes()
    begin = min(v.begin for v in read_header(str(tmp_path / "a.nc")).variables)
    rng = np.random.default_rng(version)
    refused = 0
    for _ in range(150):
        bad = bytearray(raw)
        for position in rng.integers(4, begin, 3):
            bad[position] = rng.choice([0, 1, 127, 128, 255])
        (tmp_path / "s.nc").write_bytes(bad)
        try:
            header = read_header(str(tmp_path / "s.nc"))
        except CorruptDataError:
            refused += 1
            continue
        for v in header.variables:
            assert v.dtype.kind == "S" or v.row_nbytes <= len(raw) or not header.num_records
    assert refused > 20


def test_counts_are_checked_before_anything_is_made(tmp_path):
    head = b"CDF\x05" + struct.pack(">qiq", 0, 10, 1 << 60)
    (tmp_path / "a.nc").write_bytes(head + b"\0" * 100)
    with pytest.raises(ShortReadError, match="promises 1152921504606846976 dimensions"):
        read_header(str(tmp_path / "a.nc"))
    head = b"CDF\x01" + struct.pack(">iiiiiii", 0, 0, 0, 12, 1, 1 << 30, 0)
    (tmp_path / "b.nc").write_bytes(head + b"\0" * 100)
    with pytest.raises(ShortReadError, match="attribute name needs 1073741824 bytes"):
        read_header(str(tmp_path / "b.nc"))
    (tmp_path / "c.nc").write_bytes(b"CDF\x01" + struct.pack(">iii", 0, 11, 1) + b"\0" * 100)
    with pytest.raises(CorruptDataError, match="tag 11 where the dimension list"):
        read_header(str(tmp_path / "c.nc"))
    (tmp_path / "d.nc").write_bytes(b"CDF\x03" + b"\0" * 100)
    with pytest.raises(UnsupportedFormatError, match="not NetCDF-3"):
        read_header(str(tmp_path / "d.nc"))


@pytest.mark.parametrize("version", [2, 5])
def test_large_offsets_are_64_bit(tmp_path, version):
    """A sparse file of more than 4 GiB, made by moving the variables there."""
    path = tmp_path / "a.nc"
    write_classic(path, version, only_record="f4", num_records=0)
    begins = {v.name: v.begin for v in read_header(str(path)).variables}
    raw = bytearray(path.read_bytes())
    far = (5 << 30) + 8
    for name, begin in (("fixed", far), ("v", far + 8)):
        where = raw.rindex(struct.pack(">q", begins[name]))
        raw[where : where + 8] = struct.pack(">q", begin)
    path.write_bytes(raw)
    with path.open("r+b") as f:
        f.seek(far)
        f.write(bytes([9, 8, 7, 6, 5]))
    source = open_source(path)
    assert source.locate(source.arrays["fixed"], np.array([[0]])).offset.tolist() == [far]
    assert assemble(source, "fixed").tolist() == boxed(source, "fixed").tolist() == [9, 8, 7, 6, 5]
    os.truncate(path, far + 4)
    with pytest.raises(ShortReadError, match=f"'fixed' ends at byte {far + 5}, but the file has {far + 4}"):
        open_source(path).arrays  # noqa: B018


def write_few(path, version, *, records):
    """Write a file whose header is small, with attributes, text, and so many record variables."""
    with netCDF4.Dataset(path, "w", format=CLASSIC[version]) as f:
        f.n = np.array([1, 2], "i2")
        f.createDimension("t", None)
        f.createDimension("x", 3)
        f.createVariable("s", "S1", ("x",))[:] = np.array(list("abc"), "S1")
        f.createVariable("a", "i2", ("x",))[:] = [1, 2, 3]
        f.createVariable("b", "f8", ("x", "x"))[:] = np.arange(9.0).reshape(3, 3) / 7
        for i in range(records):
            f.createVariable(f"r{i}", "i2", ("t", "x"))[:] = 100 * i + np.arange(12).reshape(4, 3)


_FLIPS_READ_BY_C = """
import json, resource, signal, sys
import netCDF4
path, scratch, bits = sys.argv[1], sys.argv[2], range(*map(int, sys.argv[3:]))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
good = open(path, "rb").read()
for bit in bits:
    signal.alarm(5)
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    open(scratch, "wb").write(bad)
    found = None
    try:
        with netCDF4.Dataset(scratch) as f:
            f.set_auto_maskandscale(False)
            numbers = {n: v for n, v in f.variables.items() if v.dtype.kind != "S"}
            fits = all(v.size * v.dtype.itemsize <= len(good) for v in numbers.values())  # else zeros, by the gigabyte
            found = {n: [list(v.shape), v.dtype.newbyteorder("=").str, v[...].tobytes().hex() if fits else ""]
                     for n, v in numbers.items()}
            f.ncattrs()
    except Exception:
        found = None
    print(json.dumps(found), flush=True)
"""


def flips_read_by_c(path, scratch, bits):
    """Return what netCDF4 gives for each flipped bit: None where it refuses the file, or ends its process over it."""
    found = []
    while len(found) < len(bits):
        arguments = map(str, [path, scratch, bits[len(found)], bits.stop, bits.step])
        child = subprocess.run(  # noqa: PLW1510 - it may crash, which is an answer too
            [sys.executable, "-c", _FLIPS_READ_BY_C, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        found += [json.loads(line) for line in child.stdout.splitlines()]
        if child.returncode:
            found.append(None)
    return found


def read_as_c(path):
    source = open_source(path)
    values = {name: assemble(source, name) for name in source.arrays}
    return {n: [list(v.shape), v.dtype.newbyteorder("=").str, v.astype(v.dtype.newbyteorder("=")).tobytes().hex()]
            for n, v in values.items()}  # fmt: skip


@pytest.mark.slow_for("1-1-1", "5-2-1", "2-2-1")
@pytest.mark.parametrize(("version", "records", "step"), [(1, 1, 3), (1, 1, 1), (2, 2, 1), (5, 2, 1)])
def test_a_flipped_bit_of_the_header_is_refused_where_c_refuses_it(tmp_path, version, records, step):
    """Each bit, or some of each byte: what the C library refuses is refused, or read as the whole; else both agree."""
    path, scratch = tmp_path / "a.nc", tmp_path / "s.nc"
    write_few(path, version, records=records)
    good, whole = path.read_bytes(), read_as_c(path)
    num_bits = 8 * min(v.begin for v in read_header(str(path)).variables)
    wrong, refused = [], 0
    bits = range(0, num_bits, step)
    for bit, of_c in zip(bits, flips_read_by_c(path, tmp_path / "c.nc", bits), strict=True):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        scratch.write_bytes(bad)
        try:
            found = read_as_c(scratch)
        except (CorruptDataError, UnsupportedFormatError):
            refused += 1
            continue
        if found != (whole if of_c is None else of_c):
            wrong.append((bit // 8, bit % 8, of_c is None))
    assert wrong == []
    assert refused > len(bits) / 4


def test_variables_out_of_their_order_are_refused(tmp_path):
    path = tmp_path / "a.nc"
    write_few(path, 2, records=2)
    good = path.read_bytes()
    begins = {v.name: v.begin for v in read_header(str(path)).variables}
    for name, begin, message in [
        ("s", 8, r"'s' begins at byte 8, but the header ends at"),
        ("b", begins["b"] - 4, r"'b' begins at byte \d+, but variable 'a' before it ends at"),
        ("r0", begins["b"] + 8, r"'r0' begins at byte \d+, but variable 'b' before it"),
        ("r1", begins["r1"] + 4, r"the first record of variable 'r1' ends at byte \d+, but the next one of 'r0'"),
    ]:
        moved = good.replace(struct.pack(">q", begins[name]), struct.pack(">q", begin))
        path.write_bytes(moved + bytes(8))  # so that nothing ends beyond the file
        with pytest.raises(CorruptDataError, match=rf"a\.nc: .*{message}"):
            read_header(str(path))


@pytest.mark.parametrize(("name", "message"), [(b"\xffb", "is not UTF-8"), (b"b\0", "holds a NUL")])
def test_names_that_are_none_are_refused(tmp_path, name, message):
    path = tmp_path / "a.nc"
    write_few(path, 1, records=0)
    good = path.read_bytes()
    length = struct.pack(">i", 1)
    path.write_bytes(good.replace(length + b"b\0\0\0", struct.pack(">i", 2) + name + b"\0\0"))
    with pytest.raises(CorruptDataError, match=rf"a\.nc: the header's variable name .* {message}"):
        read_header(str(path))


def test_netcdf3_pickles_closes_and_names_mistakes(tmp_path):
    write_classic(tmp_path / "a.nc", 2)
    source = open_source(tmp_path / "a.nc")
    expected = assemble(source, "record_f8")
    assert len(pickle.dumps(source)) < 300
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(assemble(again, "record_f8"), expected)
    source.close()
    np.testing.assert_array_equal(assemble(source, "record_f8"), expected)
    layout = source.arrays["record_f8"]
    for coord in ([5, 0], [-1, 0], [0, 1]):
        with pytest.raises(ConfigError, match="outside of the grid"):
            source.locate(layout, np.array([coord]))
    with pytest.raises(UnknownNameError, match="did you mean 'record_f8'"):
        source.locate(dataclasses.replace(layout, name="record_f9"), np.array([[0, 0]]))


def test_netcdf3_over_a_url(tmp_path):
    fsspec = pytest.importorskip("fsspec", reason="reads URLs")
    write_classic(tmp_path / "a.nc", 2)
    url = f"memory://{tmp_path.name}/a.nc"
    with fsspec.open(url, "wb") as f:
        f.write((tmp_path / "a.nc").read_bytes())
    local, remote = open_source(tmp_path / "a.nc"), open_source(url)
    assert remote.format == "netcdf3"
    for name in local.arrays:
        assert assemble(remote, name).tobytes() == assemble(local, name).tobytes()
        assert boxed(remote, name).tobytes() == assemble(local, name).tobytes()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_and_a_forked_child_agree(tmp_path):
    write_classic(tmp_path / "a.nc", 1)
    source = open_source(tmp_path / "a.nc")
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: assemble(source, "record_i4").tobytes(), range(40)))
    assert len(set(results)) == 1
    child = os.fork()
    if child == 0:
        os._exit(0 if assemble(source, "record_i4").tobytes() == results[0] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
