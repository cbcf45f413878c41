"""HDF5Source against h5py: every layout and filter decoded by hand from the located bytes."""

from __future__ import annotations

import bz2
import dataclasses
import itertools
import math
import os
import pickle
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import h5py
import numcodecs
import numpy as np
import pytest

from scidata.core.types import Source
from scidata.errors import (
    ConfigError,
    CorruptDataError,
    MissingDependencyError,
    RefusedError,
    ShortReadError,
    UnknownNameError,
    UnsupportedFormatError,
)
from scidata.read.arrays import read_array
from scidata.sources import open_source
from scidata.sources.access.files import files
from scidata.sources.hdf5.source import HDF5Source


def unshuffle(raw, size):
    whole = len(raw) // size * size  # HDF5 leaves bytes that do not fill an element where they are
    return np.frombuffer(raw[:whole], "u1").reshape(size, -1).T.tobytes() + raw[whole:]


CODECS = {
    "zlib": lambda raw, config: zlib.decompress(raw),
    "shuffle": lambda raw, config: unshuffle(raw, config["elementsize"]),
    "fletcher32": lambda raw, config: bytes(numcodecs.Fletcher32().decode(raw)),
    "bz2": lambda raw, config: bz2.decompress(raw),
    "blosc": lambda raw, config: numcodecs.Blosc().decode(raw),
    "zstd": lambda raw, config: numcodecs.Zstd().decode(raw),
}


def decode(raw, layout, skipped=0):
    for i, codec in reversed(list(enumerate(layout.codecs))):
        if not skipped >> i & 1:
            raw = bytes(CODECS[codec.name](raw, codec.config))
    return np.frombuffer(raw, layout.dtype).reshape(layout.chunks)


def assemble(source, name):
    """The whole array from the located bytes, without h5py."""
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
        raw = bytes(files().read(refs.paths[refs.path_index[row]], int(refs.offset[row]), int(refs.nbytes[row])))
        mask = 0 if refs.skipped_codecs is None else int(refs.skipped_codecs[row])
        chunk = decode(raw, layout, mask)
        out[box] = chunk[tuple(slice(0, n) for n in out[box].shape)]
    return out


def boxed(source, name, box=None):
    layout = source.arrays[name]
    box = box or tuple(slice(0, n) for n in layout.shape)
    shape = tuple(len(range(*s.indices(n))) for s, n in zip(box, layout.shape, strict=True))
    out = np.full(shape, 77, layout.dtype.newbyteorder("="))
    source.read_box(layout, box, out)
    return out


def values(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 50).astype(dtype)


def test_it_is_a_source(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["u"] = np.arange(3)
        f.attrs["title"] = "made"
        f.attrs["levels"] = [1, 2]
    source = open_source(tmp_path / "a.h5")
    assert isinstance(source, Source)
    assert isinstance(source, HDF5Source)
    assert source.format == "hdf5"
    assert source.attributes["title"] == "made"
    assert source.attributes["levels"].tolist() == [1, 2]


@pytest.mark.parametrize("dtype", ["f2", "f4", ">f8", "i1", ">i2", "u4", "i8", "?", "c8"])
@pytest.mark.parametrize("chunks", [None, (3, 4)])
def test_dtypes(tmp_path, dtype, chunks):
    data = values((7, 9), "f4").astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=data, chunks=chunks)
    source = HDF5Source(tmp_path / "a.h5")
    layout = source.arrays["u"]
    assert layout.dtype == data.dtype
    assert layout.dtype.metadata is None
    assert layout.chunks == (chunks or data.shape)
    np.testing.assert_array_equal(assemble(source, "u"), data)
    np.testing.assert_array_equal(boxed(source, "u"), data)


FILTERS = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "shuffle": {"shuffle": True},
    "shuffle gzip": {"shuffle": True, "compression": "gzip"},
    "fletcher": {"fletcher32": True},
    "shuffle gzip fletcher": {"shuffle": True, "compression": "gzip", "fletcher32": True},
}


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize(("dtype", "chunks"), [("f4", (3, 4)), ("i1", (3, 5)), ("u1", (1, 1)), (">i2", (1, 7))])
def test_filters_with_partial_edge_chunks(tmp_path, kind, dtype, chunks):
    data = values((10, 11), dtype)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=data, chunks=chunks, **FILTERS[kind])
    source = HDF5Source(tmp_path / "a.h5")
    assert not source.arrays["u"].fallback
    names = [c.name for c in source.arrays["u"].codecs]
    for part, name in (("shuffle", "shuffle"), ("gzip", "zlib"), ("fletcher", "fletcher32")):
        assert (part in kind) == (name in names)
    np.testing.assert_array_equal(assemble(source, "u"), data)
    np.testing.assert_array_equal(boxed(source, "u", (slice(1, 9, 3), slice(2, 11))), data[1:9:3, 2:11])


def plugin_filters():
    plugin = pytest.importorskip("hdf5plugin", reason="writes the plugin filters that are read here")
    plugin.register(force=True)  # netCDF4 brings plugins of its own, built for another HDF5
    return {
        "zstd": plugin.Zstd(),
        "blosc": plugin.Blosc(cname="lz4", shuffle=plugin.Blosc.SHUFFLE),
        "bz2": plugin.BZip2(),
        "lz4": plugin.LZ4(),
        "blosc2": plugin.Blosc2(),
    }


@pytest.mark.parametrize("name", ["zstd", "blosc", "bz2"])
def test_plugin_filters_that_numcodecs_decodes(tmp_path, name):
    data = values((50, 40), "f4").round(0)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=data, chunks=(17, 16), **plugin_filters()[name])
    source = HDF5Source(tmp_path / "a.h5")
    assert [c.name for c in source.arrays["u"].codecs] == [name]
    np.testing.assert_array_equal(assemble(source, "u"), data)


@pytest.mark.parametrize("name", ["lz4", "blosc2"])
def test_plugin_filters_that_only_hdf5_decodes(tmp_path, name):
    data = values((50, 40), "f4").round(0)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=data, chunks=(17, 16), **plugin_filters()[name])
    source = HDF5Source(tmp_path / "a.h5")
    layout = source.arrays["u"]
    assert layout.fallback
    assert layout.codecs[0].name.startswith("hdf5:32")
    np.testing.assert_array_equal(boxed(source, "u"), data)
    assert source.locate(layout, np.zeros((1, 2), np.int64)).nbytes[0] > 0  # there, though only HDF5 decodes it


@pytest.mark.parametrize("options", [{"compression": "lzf"}, {"scaleoffset": 0}], ids=str)
def test_own_filters_of_hdf5_fall_back(tmp_path, options):
    data = values((50, 40), "i4")
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=data, chunks=(17, 16), **options)
    source = HDF5Source(tmp_path / "a.h5")
    assert source.arrays["u"].fallback
    np.testing.assert_array_equal(boxed(source, "u"), data)


def test_a_filter_that_is_nowhere_is_named(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_filter(511, h5py.h5z.FLAG_OPTIONAL, (1,))
        h5py.h5d.create(f.id, b"u", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((8,)), plist)
        f["u"].id.write_direct_chunk((0,), b"x" * 16)
    source = HDF5Source(tmp_path / "a.h5")
    assert source.arrays["u"].fallback
    with pytest.raises(MissingDependencyError, match=r"'u'.*511.*hdf5plugin"):
        boxed(source, "u")


def test_filters_of_the_plugin_package_are_registered_when_needed(tmp_path):
    data = values((20, 30), "f4").round(0)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=data, chunks=(7, 16), **plugin_filters()["lz4"])
    code = (
        "import sys, numpy as np; from scidata.sources.hdf5.source import HDF5Source\n"
        "s = HDF5Source(sys.argv[1]); a = s.arrays['u']; assert 'hdf5plugin' not in sys.modules\n"
        "out = np.empty(a.shape, 'f4'); s.read_box(a, (slice(None),) * 2, out); assert 'hdf5plugin' in sys.modules\n"
        "print(float(out.astype('f8').sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.h5"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == data.astype("f8").sum()


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2"])
def test_a_checksum_before_the_shuffle_as_netcdf_puts_it(tmp_path, dtype):
    data = values((10, 11), dtype)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((3, 5))
        plist.set_fletcher32()
        plist.set_shuffle()
        plist.set_deflate(4)
        kind, space = h5py.h5t.py_create(data.dtype), h5py.h5s.create_simple(data.shape)
        h5py.h5d.create(f.id, b"u", kind, space, plist)
        f["u"][:] = data
    source = HDF5Source(tmp_path / "a.h5")
    assert [c.name for c in source.arrays["u"].codecs] == ["fletcher32", "shuffle", "zlib"]
    np.testing.assert_array_equal(assemble(source, "u"), data)


def test_filter_masks_of_single_chunks(tmp_path):
    data = values((6, 8), "i4")
    with h5py.File(tmp_path / "a.h5", "w") as f:
        u = f.create_dataset("u", shape=(6, 8), dtype="i4", chunks=(3, 4), shuffle=True, compression="gzip")
        shuffled = numcodecs.Shuffle(4)
        for (i, j), mask in {(0, 0): 0, (0, 4): 1, (3, 0): 2, (3, 4): 3}.items():
            raw = np.ascontiguousarray(data[i : i + 3, j : j + 4]).tobytes()
            raw = raw if mask & 1 else bytes(shuffled.encode(raw))
            raw = raw if mask & 2 else zlib.compress(raw)
            u.id.write_direct_chunk((i, j), raw, mask)
    source = HDF5Source(tmp_path / "a.h5")
    layout = source.arrays["u"]
    refs = source.locate(layout, np.array([[1, 1], [0, 0], [0, 1], [1, 0]]))
    assert refs.skipped_codecs is not None
    assert refs.skipped_codecs.tolist() == [3, 0, 1, 2]
    assert refs.skipped_codecs.dtype == np.uint32
    np.testing.assert_array_equal(assemble(source, "u"), data)
    np.testing.assert_array_equal(boxed(source, "u"), data)
    assert source.locate(layout, np.array([[0, 0]])).skipped_codecs is None


@pytest.mark.parametrize("block", [512, 4096])
def test_user_block(tmp_path, block):
    data = values((9, 10), "f8")
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=block) as f:
        f["contiguous"] = data
        f.create_dataset("chunked", data=data, chunks=(4, 4))
        f.create_dataset("packed", data=data, chunks=(4, 4), compression="gzip")
    with (tmp_path / "a.h5").open("r+b") as f:
        f.write(b"#!/bin/sh\n")
    source = open_source(tmp_path / "a.h5")
    assert source.format == "hdf5"
    for name in ("contiguous", "chunked", "packed"):
        np.testing.assert_array_equal(assemble(source, name), data)
    lone = source.locate(source.arrays["chunked"], np.array([[2, 1]]))
    raw = np.frombuffer(files().read(source.path, int(lone.offset[0]), 128), "f8").reshape(4, 4)
    np.testing.assert_array_equal(raw[:1], data[8:9, 4:8])


def test_offsets_are_shifted_for_releases_that_leave_the_user_block_out(tmp_path, monkeypatch):
    """This HDF5 counts from the start of the file; what is added for one that does not is exactly the user block."""
    from scidata.sources.hdf5 import layout as _hdf5_layout

    assert _hdf5_layout._offsets_include_user_block()
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as f:
        f.create_dataset("u", data=np.arange(8), chunks=(4,))
    right = HDF5Source(tmp_path / "a.h5")
    there = right.locate(right.arrays["u"], np.array([[1]])).offset
    monkeypatch.setattr(_hdf5_layout, "_offsets_include_user_block", lambda: False)
    with h5py.File(tmp_path / "a.h5") as f:
        assert _hdf5_layout.chunk_index(f, "u", right.arrays["u"]).places[0, 1] == there[0] + 1024


def test_chunks_never_written_are_absent(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("some", shape=(100, 20), dtype="f4", chunks=(10, 10), fillvalue=-5)[35:40, 12] = 1
        f.create_dataset("none", shape=(100,), dtype="i2", chunks=(10,), fillvalue=9)
        f.create_dataset("contiguous", shape=(100,), dtype="i2", fillvalue=3)
    source = HDF5Source(tmp_path / "a.h5")
    refs = source.locate(source.arrays["some"], np.array([[0, 0], [3, 1], [3, 0]]))
    assert refs.path_index.tolist() == [-1, 0, -1]
    assert refs.nbytes.tolist() == [0, 400, 0]
    assert source.arrays["some"].fill_value == np.float32(-5)
    with h5py.File(tmp_path / "a.h5") as f:
        for name in f:
            np.testing.assert_array_equal(assemble(source, name), f[name][:])
            np.testing.assert_array_equal(boxed(source, name), f[name][:])


def test_a_grown_and_a_shrunk_dataset(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        u = f.create_dataset("u", data=np.arange(40).reshape(8, 5), chunks=(3, 2), maxshape=(None, None))
        u.resize((11, 7))
        u[10, 6] = -1
        v = f.create_dataset("v", data=np.arange(40).reshape(8, 5), chunks=(3, 2), maxshape=(None, None))
        v.resize((4, 3))
    source = HDF5Source(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as f:
        for name in f:
            np.testing.assert_array_equal(assemble(source, name), f[name][:])


def test_huge_grids_of_few_chunks(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        u = f.create_dataset("u", shape=(3_000_000, 4), dtype="i4", chunks=(2, 4), compression="gzip")
        u[1000:1002] = 7
        u[2_999_999] = 8
    source = HDF5Source(tmp_path / "a.h5")
    layout = source.arrays["u"]
    chunks = np.array([[1_499_999, 0], [500, 0], [501, 0]])
    few = source.locate(layout, chunks)
    assert few.path_index.tolist() == [0, 0, -1]
    raw = zlib.decompress(files().read(source.path, int(few.offset[0]), int(few.nbytes[0])))
    assert np.frombuffer(raw, "i4").tolist() == [0] * 4 + [8] * 4


# by kind of index: B-trees of version 1, or the newest format's, and the dims that are unlimited
INDICES = {
    "B-tree 1": ("earliest", (None, None)),
    "B-tree 2": ("latest", (None, None)),
    "fixed array": ("latest", (144, 219)),
    "extensible array": ("latest", (None, 219)),
    "extensible array, other dim": ("latest", (150, None)),
    "implicit": ("latest", (144, 219)),
}


@pytest.mark.parametrize("block", [0, 1024])
@pytest.mark.parametrize("kind", INDICES)
def test_few_of_many_chunks_are_looked_up(tmp_path, kind, block):
    libver, maxshape = INDICES[kind]
    data = values((144, 219), "i2")  # 72 x 73 chunks
    with h5py.File(tmp_path / "a.h5", "w", libver=libver, userblock_size=block) as f:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((2, 3))
        if kind == "implicit":
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        else:
            plist.set_deflate(1)
        space = h5py.h5s.create_simple(data.shape, tuple(h5py.h5s.UNLIMITED if n is None else n for n in maxshape))
        h5py.h5d.create(f.id, b"u", h5py.h5t.py_create(data.dtype), space, plist)
        f["u"][...] = data
        if kind != "implicit":
            f["u"].id.write_direct_chunk((10, 12), np.full((2, 3), 5, "i2").tobytes(), 1)
            data[10:12, 12:15] = 5
    source, listed = HDF5Source(tmp_path / "a.h5"), HDF5Source(tmp_path / "a.h5")
    layout = source.arrays["u"]
    chunks = np.array([[70, 72], [5, 4], [0, 0], [5, 4], [33, 71]])
    few, find = source.locate(layout, chunks), source.finder(layout)
    for (i, j), offset, nbytes in zip(chunks[:3].tolist(), few.offset.tolist(), few.nbytes.tolist(), strict=False):
        assert find(i * 73 + j) == (None if (i, j) == (5, 4) and kind != "implicit" else (source.path, offset, nbytes))
    assert find(73) is not None
    assert read_array(source, layout, [slice(10, 11), slice(12, 13)]) == data[10, 12]
    assert not source._indices  # they were not listed
    assert sum(map(len, source._looked_up.values())) == 5
    np.testing.assert_array_equal(assemble(listed, "u"), data)
    assert listed._indices
    from_list = listed.locate(layout, chunks)
    for name in ("offset", "nbytes", "path_index", "skipped_codecs"):
        np.testing.assert_array_equal(getattr(few, name), getattr(from_list, name))
    np.testing.assert_array_equal(assemble(source, "u"), data)
    assert find(72) == listed.finder(layout)(72)
    again = pickle.loads(pickle.dumps(source))
    assert again.locate(layout, chunks).offset.tolist() == few.offset.tolist()


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_looked_up_chunks_that_are_not_there(tmp_path, libver):
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as f:
        u = f.create_dataset("u", shape=(50_000,), dtype="i4", chunks=(10,), maxshape=(None,), fillvalue=-1)
        u[20:30] = 7
    source = HDF5Source(tmp_path / "a.h5")
    layout = source.arrays["u"]
    assert source.finder(layout)(2) is not None
    assert not source._indices
    assert source.finder(layout)(3) is None
    assert source.locate(layout, np.array([[2], [1], [4999]])).path_index.tolist() == [0, -1, -1]
    assert read_array(source, layout, [slice(15, 25)], allow_missing=True).tolist() == [-1] * 5 + [7] * 5


def test_a_damaged_node_is_named_where_chunks_are_looked_up(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as f:
        f.create_dataset("u", data=np.arange(50_000), chunks=(10,))
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    at = [i for i in range(len(raw)) if raw[i : i + 4] == b"TREE" and raw[i + 4] == 1]
    for i in at:
        raw[i : i + 4] = b"EERT"
    (tmp_path / "a.h5").write_bytes(raw)
    source = HDF5Source(tmp_path / "a.h5")
    with pytest.raises(CorruptDataError, match="the index of its chunks"):
        source.locate(source.arrays["u"], np.array([[7]]))


def test_compact_scalar_and_empty_arrays(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(f.id, b"compact", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((8,)), plist)
        f["compact"][:] = np.arange(8)
        f["scalar"] = 2.5
        f["none"] = np.zeros((0, 3))
        f["null"] = h5py.Empty("f4")
    source = HDF5Source(tmp_path / "a.h5")
    assert source.arrays["compact"].fallback
    np.testing.assert_array_equal(boxed(source, "compact", (slice(1, 8, 2),)), [1, 3, 5, 7])
    assert source.arrays["scalar"].shape == ()
    assert assemble(source, "scalar") == boxed(source, "scalar") == 2.5
    assert assemble(source, "none").shape == (0, 3)
    assert boxed(source, "none").shape == (0, 3)
    assert "null" not in source.arrays
    assert "empty" in source.skipped["null"]


def test_types_that_are_left_out_and_types_that_are_converted(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["text"] = "hello"
        f["fixed"] = np.array([b"abc"])
        f["vlen"] = np.array([np.arange(2), np.arange(3)], dtype=object).astype(h5py.vlen_dtype("i4"))
        f["compound"] = np.zeros(3, [("a", "i4"), ("b", "f4")])
        f["block"] = np.zeros(3, np.dtype(("i4", (2,)))).reshape(6)
        f.create_dataset("arrays", shape=(3,), dtype=np.dtype(("i4", (2,))))
        f["reference"] = f["fixed"].ref
        f.create_dataset("enum", data=[2, 1], dtype=h5py.enum_dtype({"a": 1, "b": 2}, basetype=">i2"))
        odd = h5py.h5t.NATIVE_INT32.copy()
        odd.set_precision(17)
        h5py.h5d.create(f.id, b"odd", odd, h5py.h5s.create_simple((3,)))
        f["odd"][:] = [1, -2, 3]
    source = HDF5Source(tmp_path / "a.h5")
    assert set(source.arrays) == {"block", "enum", "odd"}
    assert set(source.skipped) == {"text", "fixed", "vlen", "compound", "arrays", "reference"}
    assert all(source.skipped.values())
    assert source.arrays["enum"].dtype == np.dtype(">i2")
    assert assemble(source, "enum").tolist() == boxed(source, "enum").tolist() == [2, 1]
    assert source.arrays["odd"].fallback  # 17 bits in four bytes: its bytes are no int32
    assert boxed(source, "odd").tolist() == [1, -2, 3]
    with pytest.raises(RefusedError, match="compound"):
        source.locate(dataclasses.replace(source.arrays["enum"], name="compound"), [])


def test_groups_links_and_order(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", track_order=True) as f:
        f["z"] = np.arange(3)
        group = f.create_group("g", track_order=True)
        group["b"] = np.arange(4)
        group["a"] = np.arange(5)
        group["loop"] = f  # hard links: a cycle
        f["again"] = group
        f["twin"] = f["z"]
        f["soft"] = h5py.SoftLink("/g/a")
        f["nowhere"] = h5py.SoftLink("/missing")
    source = HDF5Source(tmp_path / "a.h5")
    assert list(source.arrays) == ["z", "g/b", "g/a", "twin"]
    assert "'/g/a'" in source.skipped["soft"]
    assert "nowhere" in source.skipped
    assert assemble(source, "g/a").tolist() == list(range(5))
    with pytest.raises(UnknownNameError, match="did you mean 'g/a'"):
        source.locate(type(source.arrays["z"])(**{**vars(source.arrays["z"]), "name": "G/a"}), [[0]])


def test_dimension_names(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["lat"] = np.arange(3.0)
        f["lat"].make_scale("latitude")
        u = f.create_dataset("g/u", data=np.zeros((3, 4, 5, 2)))
        u.dims[0].attach_scale(f["lat"])
        u.dims[1].label = "lon"
        u.dims[3].label = "pair"
        u.attrs["units"] = "m s-1"
        u.attrs["one"] = np.array([3], "i2")
        u.attrs["names"] = np.array(["a", "b"], dtype=h5py.string_dtype())
    source = HDF5Source(tmp_path / "a.h5")
    assert source.arrays["g/u"].dims == ("lat", "lon", "dim_2", "pair")
    assert source.arrays["lat"].dims == ("lat",)
    attributes = source.arrays["g/u"].attributes
    assert set(attributes) == {"units", "one", "names"}
    assert attributes["one"].dtype == np.int16
    assert attributes["one"] == 3
    assert attributes["names"] == ["a", "b"]
    assert source.arrays["lat"].attributes == {}


@pytest.fixture
def outside(tmp_path):
    """A file whose values lie elsewhere in every way that HDF5 has."""
    (tmp_path / "in").mkdir()
    (tmp_path / "raw.bin").write_bytes(np.arange(6, dtype="i4").tobytes())
    with h5py.File(tmp_path / "other.h5", "w") as f:
        f["x"] = np.arange(6, dtype="i4") * 10
        f["g/y"] = np.arange(3, dtype="i4")
    with h5py.File(tmp_path / "in" / "a.h5", "w") as f:
        f["own"] = np.arange(2)
        f.create_dataset("external", shape=(6,), dtype="i4", external=[(str(tmp_path / "raw.bin"), 0, 24)])
        virtual = h5py.VirtualLayout(shape=(6,), dtype="i4")
        virtual[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", shape=(6,))
        f.create_virtual_dataset("virtual", virtual)
        f["link"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/x")
        f["tree"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/g")
        f["lost"] = h5py.ExternalLink(str(tmp_path / "missing.h5"), "/x")
        f["through"] = h5py.SoftLink("/tree/y")
    return tmp_path / "in" / "a.h5"


def test_what_lies_outside_is_refused(outside):
    source = open_source(outside)
    assert list(source.arrays) == ["own"]
    assert set(source.skipped) == {"external", "virtual", "link", "tree", "lost", "through"}
    for name in ("external", "virtual", "link", "tree"):
        assert "allow_external=True" in source.skipped[name]
    asked = type(source.arrays["own"])(**{**vars(source.arrays["own"]), "name": "virtual"})
    with pytest.raises(RefusedError, match=r"'virtual' is not read.*allow_external=True"):
        source.read_box(asked, (slice(0, 2),), np.empty(2))


def test_what_lies_outside_is_read_by_hdf5_when_allowed(outside):
    source = open_source(outside, allow_external=True)
    assert set(source.arrays) == {"own", "external", "virtual", "link", "tree/y"}
    assert set(source.skipped) == {"lost", "through"}
    assert boxed(source, "external").tolist() == list(range(6))
    assert boxed(source, "virtual").tolist() == boxed(source, "link").tolist() == list(range(0, 60, 10))
    assert boxed(source, "tree/y").tolist() == [0, 1, 2]
    assert all(source.arrays[n].fallback for n in ("external", "virtual", "link", "tree/y"))


def test_truncated_and_damaged_files(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["u"] = np.arange(10_000)
        f.create_dataset("v", data=np.arange(1000), chunks=(100,), compression="gzip", fletcher32=True)
    whole = (tmp_path / "a.h5").read_bytes()
    (tmp_path / "short.h5").write_bytes(whole[:-2000])
    with pytest.raises(ShortReadError, match=r"short\.h5.*truncated"):
        HDF5Source(tmp_path / "short.h5").arrays  # noqa: B018
    (tmp_path / "header.h5").write_bytes(whole[:20] + b"\xff" * 60 + whole[80:])
    with pytest.raises(CorruptDataError, match=r"header\.h5"):
        HDF5Source(tmp_path / "header.h5").arrays  # noqa: B018
    source = HDF5Source(tmp_path / "a.h5")
    refs = source.locate(source.arrays["v"], np.array([[5]]))
    bad = bytearray(whole)
    bad[int(refs.offset[0]) + 20] ^= 255
    (tmp_path / "bad.h5").write_bytes(bad)
    damaged = HDF5Source(tmp_path / "bad.h5")
    with pytest.raises(CorruptDataError, match=r"bad\.h5: field 'v'"):
        boxed(damaged, "v")
    with pytest.raises((RuntimeError, zlib.error)):
        assemble(damaged, "v")


@pytest.mark.parametrize("chunks", [None, (2500,)])
def test_data_beyond_the_end_is_named(tmp_path, chunks):
    """A file that was cut and whose superblock was patched, so that HDF5 itself finds nothing wrong."""
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=np.arange(10_000), chunks=chunks)
    whole = bytearray((tmp_path / "a.h5").read_bytes())
    assert whole[8] == 0  # superblock version 0 keeps the end of file at byte 40
    whole[40:48] = struct.pack("<Q", len(whole) - 1000)
    (tmp_path / "cut.h5").write_bytes(whole[:-1000])
    source = HDF5Source(tmp_path / "cut.h5")
    if chunks is None:
        with pytest.raises(CorruptDataError, match=r"cut\.h5: object 'u' cannot be opened"):
            source.arrays  # noqa: B018
        return
    with pytest.raises(ShortReadError, match=r"cut\.h5: field 'u': chunk \(3,\) ends at byte \d+, but the file has"):
        source.locate(source.arrays["u"], np.arange(4)[:, None])
    assert source.locate(source.arrays["u"], np.array([[0]])).path_index.tolist() == [0]


def test_chunks_outside_of_the_grid_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=np.arange(100), chunks=(10,))
    source = HDF5Source(tmp_path / "a.h5")
    for coord in (10, -1):
        with pytest.raises(ConfigError, match="outside of the grid"):
            source.locate(source.arrays["u"], np.array([[coord]]))
    assert source.locate(source.arrays["u"], np.zeros((0, 1), np.int64)).offset.shape == (0,)


def test_unfiltered_chunks_of_the_wrong_size_are_corrupt(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        u = f.create_dataset("u", shape=(16,), dtype="i4", chunks=(8,), compression="gzip")
        u[:] = 1
    source = HDF5Source(tmp_path / "a.h5")
    packed = source.arrays["u"]
    claimed = type(packed)(**{**vars(packed), "codecs": ()})
    with pytest.raises(ShortReadError, match=r"field 'u'.*32"):
        read_array(source, claimed)


def test_read_box_into_views_and_other_dtypes(tmp_path):
    data = values((10, 11), ">f8")
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=data, chunks=(3, 4))
    source = HDF5Source(tmp_path / "a.h5")
    out = np.zeros((11, 10), "f4").T
    source.read_box(source.arrays["u"], (slice(0, 10), slice(0, 11)), out)
    np.testing.assert_array_equal(out, data.astype("f4"))


def test_pickles_as_path_and_options(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=np.arange(100), chunks=(10,))
    source = HDF5Source(tmp_path / "a.h5", allow_external=True)
    assemble(source, "u")
    raw = pickle.dumps(source)
    assert len(raw) < 400
    again = pickle.loads(raw)
    assert (again.path, again.allow_external) == (source.path, True)
    np.testing.assert_array_equal(assemble(again, "u"), np.arange(100))
    source.close()
    np.testing.assert_array_equal(boxed(source, "u"), np.arange(100))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reopens_even_while_a_thread_held_the_lock(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=np.arange(100), chunks=(10,), compression="gzip")
        f.create_dataset("v", data=np.arange(100), chunks=(10,), compression="lzf")
    source = HDF5Source(tmp_path / "a.h5")
    assemble(source, "u")
    boxed(source, "v")
    source._session().lock.acquire()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fresh = assemble(source, "u").tolist() == boxed(source, "v").tolist() == list(range(100))
            status = 0 if fresh and len(source._sessions) == 2 else 2
        finally:
            os._exit(status)
    source._session().lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert boxed(source, "v").tolist() == list(range(100))


def test_threads_agree(tmp_path):
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "a.h5", "w") as f:
        for i in range(6):
            f.create_dataset(f"u{i}", data=rng.standard_normal((60, 50)), chunks=(7, 9), compression="gzip")
    one = HDF5Source(tmp_path / "a.h5")
    shared = HDF5Source(tmp_path / "a.h5")
    grids = {n: np.argwhere(np.ones(a.num_chunks, bool)) for n, a in one.arrays.items()}
    expected = {n: one.locate(one.arrays[n], grids[n]).offset for n in grids}

    def work(turn):
        name = f"u{turn % 6}"
        found = shared.locate(shared.arrays[name], grids[name]).offset
        whole = boxed(shared, name, (slice(0, 60, 7), slice(0, 50)))
        return np.array_equal(found, expected[name]) and math.isfinite(whole.sum())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(96)))
    assert len(shared._sessions) == 1


def test_a_file_that_is_being_written_is_refused_with_the_reason(tmp_path):
    code = (
        "import h5py, sys; f = h5py.File(sys.argv[1], 'w'); f['u'] = 1; f.flush(); print('open', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "a.h5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(BlockingIOError, match=r"a\.h5: is being written by another process"):
            HDF5Source(tmp_path / "a.h5").arrays  # noqa: B018
        writer.communicate("\n", timeout=30)
    assert list(HDF5Source(tmp_path / "a.h5").arrays) == ["u"]


def test_a_daemon_thread_that_holds_a_file_behind_a_url_lets_python_end(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        h5["v"] = np.arange(6.0)
    code = """
import sys, threading, time
from fsspec.implementations.memory import MemoryFileSystem
from scidata.read.arrays import read_array
from scidata.sources import open_source
MemoryFileSystem().pipe("/a.h5", open(sys.argv[1], "rb").read())
source = open_source("memory://a.h5")
print(read_array(source, source.arrays["v"]))
threading.Thread(target=lambda held: time.sleep(60), args=[source], daemon=True).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.h5"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_over_a_url(tmp_path):
    fsspec = pytest.importorskip("fsspec", reason="reads URLs")
    data = values((20, 30), "f4")
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f.create_dataset("u", data=data, chunks=(6, 7), compression="gzip", shuffle=True)
        f["v"] = data
        f.create_dataset("many", data=data.repeat(10, 0), chunks=(1, 1))
    url = f"memory://{tmp_path.name}/a.h5"
    with fsspec.open(url, "wb") as f:
        f.write((tmp_path / "a.h5").read_bytes())
    source = open_source(url)
    assert source.format == "hdf5"
    np.testing.assert_array_equal(assemble(source, "u"), data)
    np.testing.assert_array_equal(assemble(source, "v"), data)
    np.testing.assert_array_equal(boxed(source, "u"), data)
    assert read_array(source, source.arrays["many"], [slice(195, 196), slice(3, 5)]).tolist() == [
        data[19, 3:5].tolist()
    ]
    assert "many" not in source._indices
    with pytest.raises(FileNotFoundError):
        open_source(f"memory://{tmp_path.name}/b.h5")


# ---------------------------------------------------------------------------------------------- open_source


def test_unknown_content_is_named(tmp_path):
    (tmp_path / "a.h5").write_bytes(b"BUFR\0\0\0\2")
    with pytest.raises(UnsupportedFormatError, match=r"begins with b'BUFR.*Zarr v2 and v3 folders, HDF5, NetCDF-4"):
        open_source(tmp_path / "a.h5")
    (tmp_path / "empty.nc").write_bytes(b"")
    with pytest.raises(UnsupportedFormatError, match="is empty"):
        open_source(tmp_path / "empty.nc")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.nc").write_bytes(b"")
    with pytest.raises(UnsupportedFormatError, match=r"no Zarr store \(it holds \['b\.nc'\]\).*glob"):
        open_source(tmp_path / "folder")


def test_absent_paths_name_what_is_near(tmp_path):
    (tmp_path / "era5_2019.h5").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"era5_2018\.h5: .*did you mean 'era5_2019\.h5'"):
        open_source(tmp_path / "era5_2018.h5")
    with pytest.raises(FileNotFoundError, match="no folder"):
        open_source(tmp_path / "nothing" / "a.h5")


def test_the_format_is_found_by_content_not_by_name(tmp_path):
    with h5py.File(tmp_path / "plain.zarr", "w") as f:
        f["u"] = 1
    assert open_source(tmp_path / "plain.zarr").format == "hdf5"
    with h5py.File(tmp_path / "marked.h5", "w") as f:
        f["g/x"] = np.arange(3)
        f["g/x"].attrs["_Netcdf4Dimid"] = np.int32(0)
    assert open_source(tmp_path / "marked.h5").format == "netcdf4"
    with h5py.File(tmp_path / "written.bin", "w") as f:
        f.attrs["_NCProperties"] = b"version=2"
    assert open_source(tmp_path / "written.bin").format == "netcdf4"


def test_attributes_are_looked_at_before_they_are_read(tmp_path, monkeypatch):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as f:
        f.create_dataset("u", data=np.arange(4.0)).attrs["notes"] = np.zeros(1000)
    assert HDF5Source(path).arrays["u"].attributes["notes"].shape == (1000,)
    # a dataspace of 2**60 values, as a flipped bit leaves it
    data = path.read_bytes()
    at = data.index(struct.pack("<Q", 1000))
    path.write_bytes(data[:at] + struct.pack("<Q", 1000 + 2**50) + data[at + 8 :])
    with pytest.raises(CorruptDataError, match=r"a\.h5"):
        HDF5Source(path).arrays  # noqa: B018
    path.write_bytes(data)
    monkeypatch.setattr("scidata.sources.hdf5.walk._MAX_ATTRIBUTE_BYTES", 7999)
    with pytest.raises(CorruptDataError, match=r"'u': attribute 'notes' claims 8000 bytes, but at most 7999 are read"):
        HDF5Source(path).arrays  # noqa: B018


def test_a_huge_attribute_is_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as f:  # in a heap of its own, where it may have gigabytes
        f.create_dataset("u", data=np.arange(4.0)).attrs["notes"] = np.zeros(2**26 + 8, np.uint8)
    with pytest.raises(CorruptDataError, match=r"'u': attribute 'notes' claims 67108872 bytes, but at most 67108864"):
        HDF5Source(path).arrays  # noqa: B018


def test_names_and_text_that_are_not_utf8(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as f:
        f["good"] = np.arange(4.0)
        f["good"].attrs["units"] = "metres"
        f["good"].attrs["tail_name"] = 1
        f["good"].attrs["fixed"] = np.bytes_(b"caf_")
        f["left_out"] = np.arange(4.0)
        f["folder_x/v"] = np.arange(4.0)
    data = path.read_bytes()
    for old, new in [(b"metres", b"m\xfftres"), (b"tail_name", b"tail\xffname"), (b"caf_", b"caf\xe9")]:
        assert data.count(old) == 1
        data = data.replace(old, new)
    data = data.replace(b"left_out", b"left\xffout").replace(b"folder_x", b"folder\xffx")
    path.write_bytes(data)
    source = HDF5Source(path)
    assert list(source.arrays) == ["good"]
    assert dict(source.arrays["good"].attributes) == {"units": "m\ufffdtres", "fixed": "caf\ufffd"}
    assert source.skipped == dict.fromkeys([r"'left\udcffout'", r"'folder\udcffx'"], "its name is not UTF-8")
    with pytest.raises(UnknownNameError) as raised:
        source.read_box(dataclasses.replace(source.arrays["good"], name="left_out"), (), np.empty(4))
    str(raised.value).encode()


def heaps(data):
    """Yield the place of the size of each object in each global heap: index, references, reserved, size, bytes."""
    at = data.find(b"GCOL")
    while at >= 0:
        place, end = at + 16, at + int.from_bytes(data[at + 8 : at + 16], "little")
        while place + 16 <= end:
            index, nbytes = struct.unpack("<H6xQ", data[place : place + 16])
            yield index, place + 8
            place += 16 + -(-nbytes // 8) * 8 if index else nbytes
        at = data.find(b"GCOL", at + 1)


_OPEN = "import sys; from scidata.sources import open_source; print(open_source(sys.argv[1]).arrays)"


@pytest.mark.parametrize("damage", ["nothing is free", "wraps to itself", "wraps back"])
def test_a_damaged_global_heap_does_not_hold_hdf5_for_ever(tmp_path, damage):
    """h5py never comes back from the first two (HDF5 2.0 does not move on there), so scidata opens them in a child."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as f:
        for i in range(3):
            f.create_dataset(f"u{i}", data=np.arange(4.0)).attrs["long"] = f"text {i} " * 40
    assert HDF5Source(path).arrays["u2"].attributes["long"] == "text 2 " * 40
    data = bytearray(path.read_bytes())
    objects = list(heaps(data))
    assert len(objects) == 4  # three texts, and what is free
    free, (_, first) = next(place for index, place in objects if index == 0), objects[0]
    place, nbytes = {
        "nothing is free": (free, 0),
        "wraps to itself": (first, 2**64 - 16),
        "wraps back": (objects[1][1], 2**64 - 16 - (objects[1][1] - first)),
    }[damage]
    data[place : place + 8] = struct.pack("<Q", nbytes)
    path.write_bytes(data)
    command = [sys.executable, "-c", _OPEN, str(path)]
    child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert child.returncode == 1
    assert f"CorruptDataError: {path}: the global heap at byte" in child.stderr
    assert f"an object of {nbytes} bytes" in child.stderr


@pytest.mark.skipif(np.dtype("g").itemsize <= 8, reason="long doubles are doubles here")
def test_numbers_that_torch_does_not_have_are_left_out(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as h5:
        h5["long"] = np.ones((2, 3), "g")
        h5["u"] = np.ones((2, 3), "f8")
    source = open_source(tmp_path / "a.h5")
    assert list(source.arrays) == ["u"]
    assert "at most 64 bits" in source.skipped["long"]


@pytest.mark.parametrize("libver", ["latest", "earliest"])
@pytest.mark.parametrize("maxshape", [(4, None, 6), (8, 4, None), (None, 4, 6)])
@pytest.mark.parametrize("rows", [slice(None), slice(0, 1), slice(1, 3)], ids=["all", "first", "some"])
def test_an_unlimited_dimension_may_have_any_place(tmp_path, libver, maxshape, rows):
    values = np.zeros((4, 4, 6))
    values[rows] = np.arange(1, 97.0).reshape(4, 4, 6)[rows]
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        dset = file.create_dataset("a", (4, 4, 6), "f8", chunks=(1, 2, 3), maxshape=maxshape)
        dset[rows] = values[rows]
    source = open_source(tmp_path / "a.h5")
    np.testing.assert_array_equal(read_array(source, source.arrays["a"], allow_missing=True), values)
    found = read_array(source, source.arrays["a"], [slice(*rows.indices(4)), slice(None), slice(None)])
    np.testing.assert_array_equal(found, values[rows])
