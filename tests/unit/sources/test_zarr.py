"""ZarrSource against zarr-python's own reads: a small reader decodes by hand what ``arrays`` and ``locate`` say."""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import math
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import xarray as xr
import zarr
from packaging.version import Version

from scidata.core.types import ArrayLayout, Codec, Source
from scidata.errors import (
    ChecksumError,
    ConfigError,
    CorruptDataError,
    RefusedError,
    ShortReadError,
    TooLargeError,
    UnknownNameError,
    UnsupportedFormatError,
)
from scidata.sources.access.files import files
from scidata.sources.zarr import tree as _zarr_tree
from scidata.sources.zarr.chunks import ChunkLocator
from scidata.sources.zarr.metadata import parse_v2, parse_v3
from scidata.sources.zarr.source import ZarrSource
from scidata.sources.zarr.values import cf_fill_value, fill_value_of
from tests.unit.sources._zarr import ODD, V3, _places, _replaced

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

VALUES = np.random.default_rng(0).integers(-100, 100, (7, 10)).astype("f4")  # 7 and 10: edge chunks are not full


def all_chunks(layout: ArrayLayout) -> np.ndarray:
    return np.array(list(np.ndindex(*layout.num_chunks)), np.int64).reshape(math.prod(layout.num_chunks), -1)


def decode(raw: bytearray, layout: ArrayLayout) -> np.ndarray:
    data = bytes(raw)
    for codec in reversed(layout.codecs):
        data = numcodecs.get_codec({"id": codec.name, **codec.config}).decode(data)
    stored = [layout.chunks[a] for a in layout.axis_order]
    return np.frombuffer(data, layout.dtype).reshape(stored).transpose(np.argsort(layout.axis_order))


def read(source: ZarrSource, name: str) -> np.ndarray:
    """Decode a whole array by hand, absent chunks as the fill value."""
    layout = source.arrays[name]
    chunks = all_chunks(layout)
    refs = source.locate(layout, chunks)
    out = np.empty(layout.shape, layout.dtype)
    for row, chunk in enumerate(chunks):
        box = tuple(
            slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(chunk, layout.chunks, layout.shape, strict=True)
        )
        if refs.path_index[row] < 0:
            out[box] = layout.fill_value
            continue
        raw = files().read(refs.paths[refs.path_index[row]], int(refs.offset[row]), int(refs.nbytes[row]))
        part = decode(raw, layout)
        out[box] = part[tuple(slice(0, b.stop - b.start) for b in box)]
    return out


def check(path: Path | str, name: str, expected: np.ndarray) -> ArrayLayout:
    """The array decodes by hand to what zarr-python reads, which is what was written."""
    source = ZarrSource(str(path))
    layout = source.arrays[name]
    assert not layout.fallback
    assert layout.shape == expected.shape
    oracle = zarr.open_group(str(path), mode="r")[name][...]
    np.testing.assert_array_equal(oracle, expected)
    np.testing.assert_array_equal(read(source, name), expected)
    boxed = np.empty(expected.shape, expected.dtype.newbyteorder("="))
    source.read_box(layout, tuple(slice(0, n) for n in expected.shape), boxed)
    np.testing.assert_array_equal(boxed, expected)
    return layout


def edit(path: Path, change: dict) -> None:
    meta = json.loads(path.read_text())
    meta.update(change)
    path.write_text(json.dumps(meta))


# -- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compressor", "filters", "codecs"),
    [
        (None, None, []),
        (numcodecs.Blosc(cname="lz4", shuffle=1), None, ["blosc"]),
        (numcodecs.Zstd(3), None, ["zstd"]),
        (numcodecs.GZip(1), None, ["gzip"]),
        (numcodecs.Zlib(1), None, ["zlib"]),
        (numcodecs.LZ4(), None, ["lz4"]),
        (numcodecs.BZ2(1), None, ["bz2"]),
        (numcodecs.LZMA(preset=1), None, ["lzma"]),
        (numcodecs.Zlib(1), [numcodecs.Shuffle(4)], ["shuffle", "zlib"]),
        (None, [numcodecs.Fletcher32()], ["fletcher32"]),
        (numcodecs.Zlib(1), [numcodecs.BitRound(10)], ["zlib"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_v2_codecs(tmp_path, compressor, filters, codecs, order):
    g = zarr.open_group(tmp_path, mode="w", zarr_format=2)
    a = g.create_array(
        "u", shape=(7, 10), chunks=(3, 4), dtype="f4", compressors=compressor, filters=filters, order=order
    )
    a[:] = VALUES
    # zarr-python writes what a filter makes of an F-ordered chunk in C order and so reads other values back
    layout = check(tmp_path, "u", a[:] if filters and order == "F" else VALUES)
    assert [c.name for c in layout.codecs] == codecs
    assert layout.axis_order == ((0, 1) if order == "C" else (1, 0))
    assert ZarrSource(str(tmp_path)).format == "zarr2"


@pytest.mark.parametrize(
    ("compressors", "codecs"),
    [
        (None, []),
        (zarr.codecs.BloscCodec(cname="zstd", shuffle="bitshuffle"), ["blosc"]),
        (zarr.codecs.ZstdCodec(level=1, checksum=True), ["zstd"]),
        (zarr.codecs.GzipCodec(level=1), ["gzip"]),
        ([zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()], ["zstd", "crc32c"]),
        ([{"name": "numcodecs.shuffle", "configuration": {}}, {"name": "numcodecs.zlib", "configuration": {}}],
         ["shuffle", "zlib"]),
        ([{"name": "numcodecs.lz4", "configuration": {}}], ["lz4"]),
        ([{"name": "numcodecs.lzma", "configuration": {"preset": 1}}], ["lzma"]),
        ([{"name": "numcodecs.bz2", "configuration": {}}], ["bz2"]),
        ([{"name": "numcodecs.zstd", "configuration": {}}, {"name": "numcodecs.crc32c", "configuration": {}}],
         ["zstd", "crc32c"]),
        ([{"name": "numcodecs.fletcher32", "configuration": {}}], ["fletcher32"]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("sharded", [False, True])
def test_v3_codecs(tmp_path, compressors, codecs, sharded):
    g = zarr.open_group(tmp_path, mode="w")
    a = g.create_array(
        "u", shape=(7, 10), chunks=(2, 3), shards=(4, 6) if sharded else None, dtype="f4", compressors=compressors
    )
    a[:] = VALUES
    layout = check(tmp_path, "u", VALUES)
    assert [c.name for c in layout.codecs] == codecs
    assert layout.shards == ((4, 6) if sharded else None)
    assert layout.chunks == (2, 3)
    assert ZarrSource(str(tmp_path)).format == "zarr3"


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("index_endian", ["little", "big"])
def test_shard_indexes(tmp_path, location, checksum, index_endian):
    index_codecs = [zarr.codecs.BytesCodec(endian=index_endian)] + [zarr.codecs.Crc32cCodec()] * checksum
    sharding = zarr.codecs.ShardingCodec(
        chunk_shape=(2, 2),
        codecs=[zarr.codecs.TransposeCodec(order=(1, 0)), zarr.codecs.BytesCodec(endian="big")],
        index_codecs=index_codecs,
        index_location=location,
    )
    a = zarr.create(
        store=tmp_path, path="u", shape=(7, 10), chunks=(4, 6), dtype="f4", codecs=[sharding], zarr_format=3
    )
    values = VALUES.copy()
    values[:4, :4] = 0  # absent chunks inside a shard that is there
    a[:] = values
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    layout = check(tmp_path, "u", values)
    assert layout.axis_order == (1, 0)
    assert layout.dtype == np.dtype(">f4")
    source = ZarrSource(str(tmp_path))
    refs = source.locate(layout, np.array([[0, 0], [0, 2], [3, 4]]))
    assert refs.path_index.tolist() == [-1, 0, 1]
    assert refs.nbytes.tolist() == [0, 16, 16]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_v3_transpose_any_permutation(tmp_path, order):
    values = np.arange(5 * 4 * 3, dtype="i2").reshape(5, 4, 3)
    g = zarr.open_group(tmp_path, mode="w")
    steps = [zarr.codecs.TransposeCodec(order=order), zarr.codecs.TransposeCodec(order=(1, 0, 2))]
    g.create_array("u", shape=(5, 4, 3), chunks=(2, 3, 2), dtype="i2", filters=steps, compressors=None)[:] = values
    layout = check(tmp_path, "u", values)
    assert layout.axis_order == (order[1], order[0], order[2])


@pytest.mark.parametrize("dtype", [">f4", "<f8", ">i2", "u1", "?", ">c16", "<i8", "f2", ">u8"])
@pytest.mark.parametrize("version", [2, 3])
def test_dtypes(tmp_path, dtype, version):
    values = VALUES.astype(dtype)
    g = zarr.open_group(tmp_path, mode="w", zarr_format=version)
    serializer = {"serializer": zarr.codecs.BytesCodec(endian="big")} if version == 3 and dtype[0] == ">" else {}
    g.create_array("u", shape=(7, 10), chunks=(4, 4), dtype=dtype, compressors=None, fill_value=1, **serializer)[:] = (
        values
    )
    layout = check(tmp_path, "u", values)
    assert layout.dtype == np.dtype(dtype)
    assert layout.dtype.byteorder == np.dtype(dtype).byteorder
    assert layout.fill_value.dtype == np.dtype(dtype)
    assert layout.fill_value == 1


@pytest.mark.parametrize(
    ("version", "encoding", "file"),
    [
        (3, {"name": "default", "separator": "/"}, "u/c/1/2"),
        (3, {"name": "default", "separator": "."}, "u/c.1.2"),
        (3, {"name": "v2", "separator": "/"}, "u/1/2"),
        (3, {"name": "v2", "separator": "."}, "u/1.2"),
        (2, {"name": "v2", "separator": "/"}, "u/1/2"),
        (2, {"name": "v2", "separator": "."}, "u/1.2"),
    ],
)
def test_chunk_keys(tmp_path, version, encoding, file):
    g = zarr.open_group(tmp_path, mode="w", zarr_format=version)
    g.create_array("u", shape=(7, 10), chunks=(4, 4), dtype="f4", chunk_key_encoding=encoding)[:] = VALUES
    g.create_array("s", shape=(), dtype="f8", chunk_key_encoding=encoding)[...] = 3.5
    layout = check(tmp_path, "u", VALUES)
    refs = ZarrSource(str(tmp_path)).locate(layout, np.array([[1, 2]]))
    assert refs.paths == (f"{tmp_path}/{file}",)
    scalar = check(tmp_path, "s", np.array(3.5))
    assert (scalar.dims, scalar.chunks, scalar.num_chunks) == ((), (), ())


def test_missing_chunks_and_sizes(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    a = g.create_array("u", shape=(7, 10), chunks=(4, 4), dtype="f4", compressors=None, fill_value=-1)
    a[:4, :4] = 5
    source = ZarrSource(str(tmp_path))
    layout = source.arrays["u"]
    refs = source.locate(layout, all_chunks(layout))
    assert refs.path_index.tolist() == [0, -1, -1, -1, -1, -1]
    assert refs.nbytes.tolist() == [64, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(read(source, "u"), a[:])
    a[:] = 6  # a store that is rewritten is noticed only after close()
    assert source.locate(layout, np.array([[1, 1]])).path_index.tolist() == [-1]
    source.close()
    refs = source.locate(layout, np.array([[1, 1], [0, 0], [1, 1]]))
    assert [refs.paths[i][-5:] for i in refs.path_index] == ["c/1/1", "c/0/0", "c/1/1"]


def test_missing_shard_file(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    a = g.create_array("u", shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="f4", fill_value=np.nan)
    a[4:, :2] = 1
    source = ZarrSource(str(tmp_path))
    layout = source.arrays["u"]
    refs = source.locate(layout, np.array([[3, 0], [0, 0], [3, 1], [2, 0]]))
    assert (refs.path_index >= 0).tolist() == [True, False, False, True]
    assert refs.paths == (f"{tmp_path}/u/c/1/0",)
    np.testing.assert_array_equal(read(source, "u"), a[:])


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("consolidated", [True, False])
def test_nested_groups(tmp_path, version, consolidated):
    g = zarr.open_group(tmp_path, mode="w", zarr_format=version, attributes={"title": "t", "n": 3})
    for name in ["b", "a/x/u", "a/u", "z [1] 100%/ü"]:
        array = g.create_array(name, shape=(7, 10), chunks=(4, 4), dtype="f4", attributes={"units": name})
        array[:] = VALUES
    g.create_group("empty")
    (tmp_path / "a" / "not a node").mkdir()
    if consolidated:
        zarr.consolidate_metadata(tmp_path)
        for file in [*tmp_path.glob("*/**/zarr.json"), *tmp_path.glob("*/**/.z*")]:
            file.unlink()  # nothing else was read
    source = ZarrSource(str(tmp_path))
    assert isinstance(source, Source)
    assert list(source.arrays) == ["a/u", "a/x/u", "b", "z [1] 100%/ü"]
    assert source.attributes == {"title": "t", "n": 3}
    assert source.skipped == {}
    for name, layout in source.arrays.items():
        assert layout.attributes == {"units": name}
        assert layout.store == str(tmp_path)
        np.testing.assert_array_equal(read(source, name), VALUES)
    with pytest.raises(UnknownNameError, match="did you mean 'a/u'"):
        source.arrays["A/U"]
    if not consolidated:
        inner = ZarrSource(str(tmp_path / "a"))
        assert list(inner.arrays) == ["u", "x/u"]
        np.testing.assert_array_equal(read(inner, "x/u"), VALUES)
        alone = ZarrSource(tmp_path / "a" / "x" / "u")
        assert list(alone.arrays) == ["u"]
        assert alone.attributes == {}
        np.testing.assert_array_equal(read(alone, "u"), VALUES)
        out = np.zeros((2, 3))
        alone.read_box(alone.arrays["u"], (slice(1, 3), slice(0, 9, 4)), out)
        np.testing.assert_array_equal(out, VALUES[1:3, 0:9:4])


def test_consolidated_metadata_inside_consolidated_metadata(tmp_path):
    zarr.open_group(tmp_path, mode="w").create_array("a/u", shape=(2,), dtype="f4")
    group, array = (json.loads((tmp_path / f).read_text()) for f in ("a/zarr.json", "a/u/zarr.json"))
    group["consolidated_metadata"] = {"kind": "inline", "metadata": {"u": array}}
    edit(tmp_path / "zarr.json", {"consolidated_metadata": {"kind": "inline", "metadata": {"a": group}}})
    shutil.rmtree(tmp_path / "a")
    assert list(ZarrSource(str(tmp_path)).arrays) == ["a/u"]


def test_v3_wins_where_both_are(tmp_path):
    zarr.open_group(tmp_path, mode="w", zarr_format=2).create_array("old", shape=(2,), dtype="f4")
    zarr.open_group(tmp_path, mode="a", zarr_format=3)
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    zarr.create_array(tmp_path, name="new", shape=(2,), dtype="f4", zarr_format=3)
    assert list(ZarrSource(str(tmp_path)).arrays) == ["new"]


def test_dimension_names(tmp_path):
    g = zarr.open_group(tmp_path / "3", mode="w")
    g.create_array("named", shape=(2, 3), dtype="f4", dimension_names=["y", None])
    g.create_array("bare", shape=(2, 3), dtype="f4")
    arrays = ZarrSource(str(tmp_path / "3")).arrays
    assert arrays["named"].dims == ("y", "dim_1")
    assert arrays["bare"].dims == ("dim_0", "dim_1")
    g = zarr.open_group(tmp_path / "2", mode="w", zarr_format=2)
    g.create_array("xarray", shape=(2, 3), dtype="f4", attributes={"_ARRAY_DIMENSIONS": ["y", "x"], "units": "K"})
    g.create_array("nczarr", shape=(2, 3), dtype="f4", attributes={"_nczarr_array": {"dimrefs": ["/g/y", "/x"]}})
    g.create_array("wrong", shape=(2, 3), dtype="f4", attributes={"_ARRAY_DIMENSIONS": ["y"]})
    arrays = ZarrSource(str(tmp_path / "2")).arrays
    assert arrays["xarray"].dims == arrays["nczarr"].dims == ("y", "x")
    assert arrays["wrong"].dims == ("dim_0", "dim_1")
    assert arrays["xarray"].attributes == {"units": "K", "_FillValue": 0}
    assert arrays["nczarr"].attributes == {"_FillValue": 0}


# -- fill values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        ("NaN", "f4", np.nan),
        ("Infinity", ">f8", np.inf),
        ("-Infinity", "f2", -np.inf),
        ("0x3fc00000", "<f4", 1.5),
        ("AAAAAAAA+H8=", "f4", np.nan),
        ([1.5, "-Infinity"], "c8", complex(1.5, -np.inf)),
        (True, "?", True),
        (7.0, ">i4", 7),
        (2**64 - 1, "u8", 2**64 - 1),
        ("NaT", "M8[ns]", np.datetime64("NaT", "ns")),
        (5, "m8[s]", np.timedelta64(5, "s")),
    ],
)
def test_fill_values(value, dtype, expected):
    found = fill_value_of(value, np.dtype(dtype), "here")
    assert found.dtype == np.dtype(dtype)
    assert found.shape == ()
    np.testing.assert_array_equal(found[()], np.array(expected, dtype)[()])


def test_fill_value_keeps_its_bits():
    found = fill_value_of("0x7fc00123", np.dtype(">f4"), "here")
    assert found.tobytes() == bytes.fromhex("7fc00123")
    assert fill_value_of(None, np.dtype("f4"), "here") is None


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(300, "u1"), (1.5, "i4"), ("abc", "f4"), ("0x12345678ff", "f4"), ([1], "c8"), (2, "?"), ({}, "f8"), ("", "f4")],
)
def test_bad_fill_values(value, dtype):
    with pytest.raises(UnsupportedFormatError, match="here: fill value"):
        fill_value_of(value, np.dtype(dtype), "here")
    assert cf_fill_value(value, np.dtype(dtype)) == value


@pytest.mark.parametrize("version", [2, 3])
def test_cf_fill_value_is_what_xarray_reads(tmp_path, version):
    ds = xr.Dataset(
        {
            "packed": ("x", np.array([1.0, np.nan, 3.0]), {}, {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -99}),
            "plain": ("x", np.array([1.0, np.nan], "f4").repeat(2)[:3], {}, {"_FillValue": np.float32(1e20)}),
            "nans": ("x", np.array([1.0, np.nan, 2.0])),
            "count": ("x", np.arange(3)),
        }
    )
    ds.to_zarr(tmp_path, zarr_format=version, consolidated=False)
    raw = xr.open_zarr(tmp_path, consolidated=False, mask_and_scale=False)
    source = ZarrSource(str(tmp_path))
    for name, layout in source.arrays.items():
        theirs = raw[name].attrs.get("_FillValue")
        ours = layout.attributes.get("_FillValue")
        assert (theirs is None) == (ours is None), name
        if ours is not None:
            assert isinstance(ours, np.generic)
            assert ours.dtype == layout.dtype
            np.testing.assert_array_equal(ours, np.array(theirs, layout.dtype))
    assert source.arrays["packed"].attributes == {"scale_factor": 0.5, "_FillValue": np.int16(-99)}
    assert source.arrays["packed"].dims == ("x",)
    assert "_FillValue" not in source.arrays["count"].attributes


def test_v2_fill_value_of_an_array_without_dimensions_is_no_cf_fill_value(tmp_path):
    g = zarr.open_group(tmp_path, mode="w", zarr_format=2)
    g.create_array("u", shape=(3,), dtype="f4", fill_value=0)
    layout = ZarrSource(str(tmp_path)).arrays["u"]
    assert "_FillValue" not in layout.attributes
    assert layout.fill_value == 0


# -- what only zarr-python reads, and what nobody does --------------------------------------------------------------


def test_fallback_arrays(tmp_path):
    v2, v3, f8 = tmp_path / "2", tmp_path / "3", VALUES.astype("f8")
    g = zarr.open_group(v2, mode="w", zarr_format=2)
    scale = numcodecs.FixedScaleOffset(offset=-200, scale=1, dtype="f8", astype="u2")
    g.create_array("scaled", shape=(7, 10), chunks=(4, 4), dtype="f8", filters=[scale])[:] = f8
    g.create_array("delta", shape=(7, 10), chunks=(4, 4), dtype="f8", filters=[numcodecs.Delta("f8")])[:] = f8
    g = zarr.open_group(v3, mode="w")
    delta = {"name": "numcodecs.delta", "configuration": {"dtype": "<f8"}}
    g.create_array("delta", shape=(7, 10), chunks=(4, 4), dtype="f8", filters=[delta])[:] = f8
    sharding = zarr.codecs.ShardingCodec
    shards = {
        "nested": [sharding(chunk_shape=(4, 4), codecs=[sharding(chunk_shape=(2, 2))])],
        "around": [sharding(chunk_shape=(4, 4)), zarr.codecs.GzipCodec()],
    }
    if Version(zarr.__version__) < Version("3.1.6"):  # that writes neither of these
        shards = {}
    for name, codecs in shards.items():
        options = {"shape": (7, 10), "chunks": (8, 8), "dtype": "f8", "codecs": codecs, "zarr_format": 3}
        zarr.create(store=v3, path=name, **options)[:] = f8
    for path, names in [(v2, {"scaled", "delta"}), (v3, {"delta", *shards})]:
        source = ZarrSource(str(path))
        assert set(source.arrays) == names
        for name, layout in source.arrays.items():
            assert layout.fallback, name
            out = np.zeros((3, 5), "f4")
            source.read_box(layout, (slice(1, 7, 2), slice(5, 10)), out)
            np.testing.assert_array_equal(out, VALUES[1:7:2, 5:10])
            (path / name / ("c/0/0" if path == v3 else "0.0")).unlink()
            source.close()
            refs = source.locate(layout, all_chunks(layout))  # whole files, to tell which are absent
            assert refs.path_index.tolist() == [-1, *range(len(refs.paths))]


def test_read_box_of_a_damaged_chunk(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    g.create_array("u", shape=(4,), dtype="f8")[:] = 1
    (tmp_path / "u/c/0").write_bytes(b"not zstd")
    source = ZarrSource(str(tmp_path))
    with pytest.raises(CorruptDataError, match="'u'"):
        source.read_box(source.arrays["u"], (slice(0, 4),), np.zeros(4))
    with pytest.raises(ConfigError, match="does not fit"):
        source.read_box(source.arrays["u"], (slice(0, 4),), np.zeros(3))


def test_arrays_that_are_left_out(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    for name in ("good", "codec", "grid", "must", "transformers", "dtype"):
        g.create_array(name, shape=(4,), dtype="f8")[:] = 1
    g.create_array("text", shape=(2,), dtype=str)
    g.create_array("chars", shape=(2,), dtype="S4")
    edit(tmp_path / "codec/zarr.json", {"codecs": ["bytes", {"name": "acme.squeeze", "configuration": {}}]})
    edit(tmp_path / "grid/zarr.json", {"chunk_grid": {"name": "rectilinear", "configuration": {}}})
    edit(tmp_path / "must/zarr.json", {"novelty": {"must_understand": True}})
    edit(tmp_path / "good/zarr.json", {"novelty": {"must_understand": False}})
    edit(tmp_path / "transformers/zarr.json", {"storage_transformers": [{"name": "x"}]})
    edit(tmp_path / "dtype/zarr.json", {"data_type": "int2"})
    source = ZarrSource(str(tmp_path))
    assert list(source.arrays) == ["good"]
    assert sorted(source.skipped) == ["chars", "codec", "dtype", "grid", "must", "text", "transformers"]
    with pytest.raises(UnsupportedFormatError, match=r"'codec'.*acme\.squeeze"):
        source.arrays["codec"]
    with pytest.raises(UnsupportedFormatError, match="not a plain number"):
        source.arrays["text"]
    with pytest.raises(UnsupportedFormatError, match="int2"):
        source.arrays["dtype"]
    assert "codec" not in source.arrays
    assert source.arrays.get("codec") is None
    np.testing.assert_array_equal(read(source, "good"), np.ones(4))


def test_v2_arrays_that_are_left_out(tmp_path):
    g = zarr.open_group(tmp_path, mode="w", zarr_format=2)
    for name in ("good", "codec", "record", "object"):
        g.create_array(name, shape=(4,), dtype="f8")
    edit(tmp_path / "codec/.zarray", {"compressor": {"id": "acme"}})
    edit(tmp_path / "record/.zarray", {"dtype": [["a", "<f4"], ["b", "<i4"]]})
    edit(tmp_path / "object/.zarray", {"dtype": "|O", "filters": [{"id": "pickle"}], "fill_value": None})
    source = ZarrSource(str(tmp_path))
    assert list(source.arrays) == ["good"]
    for name, error, words in [
        ("codec", UnsupportedFormatError, "acme"),
        ("record", UnsupportedFormatError, "record"),
        ("object", RefusedError, "pickle"),
    ]:
        with pytest.raises(error, match=words):
            source.arrays[name]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1, 10]},
        {"shape": [2**62, 2**62]},
        {"shape": "7,10"},
        {"shape": [True, 10]},
        {"shape": [7.0, 10]},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 4]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [-4, 4]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**40, 4]}}},
        {"chunk_grid": None},
        {"codecs": []},
        {"codecs": [None]},
        {"codecs": [{"name": "transpose", "configuration": {"order": [0, 0]}}, "bytes"]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]},
        {"codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [3, 4], "codecs": ["bytes"]}}]},
        {"codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [0, 4]}}]},
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "../"}}},
        {"chunk_key_encoding": {"name": "hashed"}},
        {"dimension_names": ["x"]},
        {"dimension_names": ["x", 3]},
        {"dimension_names": ["x", ["y"]]},
        {"dimension_names": ["x", "a\0b"]},
        {"attributes": {"a": functools.reduce(lambda inner, _: [inner], range(100), [1])}},
        {"codecs": [functools.reduce(lambda inner, _: {"name": "x", "configuration": inner}, range(300), {})]},
        {"data_type": ["f4"]},
        {"fill_value": "x"},
        {"attributes": []},
    ],
    ids=str,
)
def test_metadata_that_makes_no_sense(tmp_path, change):
    zarr.open_group(tmp_path, mode="w").create_array("u", shape=(7, 10), chunks=(4, 4), dtype="f4")
    edit(tmp_path / "u/zarr.json", change)
    if change == {"attributes": []}:
        edit(tmp_path / "u/zarr.json", {"attributes": [1]})
    source = ZarrSource(str(tmp_path))
    assert list(source.arrays) == []
    with pytest.raises(UnsupportedFormatError, match="array 'u'"):
        source.arrays["u"]


V2 = {
    "zarr_format": 2, "shape": [8, 8], "chunks": [4, 4], "dtype": "<f4", "fill_value": "NaN", "order": "C",
    "dimension_separator": "/", "filters": [{"id": "shuffle", "elementsize": 4}],
    "compressor": {"id": "zlib", "level": 1}, "_NCZARR_ARRAY": {"dimrefs": ["/y", "/x"]},
}  # fmt: skip


@pytest.mark.parametrize(("good", "parse"), [(V2, parse_v2), (V3, parse_v3)])
def test_any_metadata_is_described_or_refused(good, parse):
    described = 0
    for place, value in itertools.product(_places(good)[1:], ODD):
        described += _described_or_refused(_replaced(good, place, value), parse)
    assert described > 100  # neither everything nor nothing


def _described_or_refused(meta: dict, parse: Callable) -> bool:
    arguments = (meta,) if parse is parse_v3 else (meta, {"_FillValue": 1})
    try:
        record = parse(*arguments, store="s", name="n", prefix="n")
    except (UnsupportedFormatError, RefusedError):
        return False
    layout = record.layout
    ndim = len(layout.shape)
    assert ndim == len(layout.dims) == len(layout.chunks) == len(layout.axis_order)
    assert sorted(layout.axis_order) == list(range(ndim))
    assert min(layout.chunks, default=1) > 0
    assert all(isinstance(d, str) for d in layout.dims)
    if not layout.fallback:
        for codec in layout.codecs:
            numcodecs.get_codec({"id": codec.name, **codec.config})
    assert record.keys(np.zeros((1, ndim), np.int64))[0].startswith("n/")
    return True


def test_truncated_metadata_names_the_file(tmp_path):
    zarr.open_group(tmp_path, mode="w").create_array("u", shape=(7, 10), dtype="f4")
    for file in [tmp_path / "u/zarr.json", tmp_path / "zarr.json"]:
        file.write_bytes(file.read_bytes()[:-7])
        with pytest.raises(UnsupportedFormatError, match=f"{file}: not valid JSON"):
            list(ZarrSource(str(tmp_path)).arrays)
    (tmp_path / "zarr.json").write_text("[" * 100_000)
    with pytest.raises(UnsupportedFormatError, match="not valid JSON"):
        list(ZarrSource(str(tmp_path)).arrays)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("where", ["value", "name"])
def test_half_characters_are_refused(tmp_path, version, where):
    zarr.open_group(tmp_path, mode="w", zarr_format=version).create_array("u", shape=(7, 10), dtype="f4")
    file = tmp_path / ("u/zarr.json" if version == 3 else "u/.zattrs")
    whole = {"long_name": "\U0001f30d"}  # which JSON spells with two halves
    wrong = {"long_name": "\ud83c"} if where == "value" else {"\udf0d": "globe"}
    for attributes in (whole, wrong):
        file.write_text("{}") if version == 2 else None
        edit(file, {"attributes": attributes} if version == 3 else attributes)
        if attributes is whole:
            assert ZarrSource(str(tmp_path)).arrays["u"].attributes["long_name"] == "\U0001f30d"
    with pytest.raises(UnsupportedFormatError, match=f"{file}: not valid JSON in UTF-8"):
        list(ZarrSource(str(tmp_path)).arrays)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UnsupportedFormatError, match=f"{file}: not valid JSON in UTF-8"):
        list(ZarrSource(str(tmp_path)).arrays)


def test_folders_whose_names_are_not_utf8(tmp_path):
    zarr.open_group(tmp_path, mode="w").create_array("u", shape=(7, 10), dtype="f4")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    with pytest.raises(UnsupportedFormatError, match=r"has a folder '\\udcff' whose name is not UTF-8"):
        list(ZarrSource(str(tmp_path)).arrays)


@pytest.mark.parametrize("url", [False, True])
@pytest.mark.parametrize("name", ["zarr.json", "u/zarr.json"])
def test_metadata_documents_that_are_too_large(tmp_path, url, name):
    zarr.open_group(tmp_path, mode="w").create_array("u", shape=(7, 10), dtype="f4")
    os.truncate(tmp_path / name, 2**26 + 1)  # sparse
    if url:
        fsspec = pytest.importorskip("fsspec", reason="reads URLs")
        fsspec.filesystem("memory").put(str(tmp_path), f"/{tmp_path.name}_large", recursive=True)
    path = f"memory://{tmp_path.name}_large" if url else str(tmp_path)
    with pytest.raises(
        UnsupportedFormatError, match=rf"{name}: has 67108865 bytes, but at most 67108864 of one metadata"
    ):
        list(ZarrSource(path).arrays)


def test_no_store(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such store"):
        ZarrSource(str(tmp_path / "absent")).arrays  # noqa: B018
    with pytest.raises(UnsupportedFormatError, match=r"none of zarr\.json"):
        ZarrSource(str(tmp_path)).arrays  # noqa: B018
    with pytest.raises(FileNotFoundError, match="no such store"):
        ZarrSource("memory://absent-store").arrays  # noqa: B018


# -- damage ---------------------------------------------------------------------------------------------------------


def sharded_store(path: Path, location: str = "end", *, checksum: bool = True) -> Path:
    codec = zarr.codecs.ShardingCodec(
        chunk_shape=(2, 2),
        index_location=location,
        index_codecs=[zarr.codecs.BytesCodec()] + [zarr.codecs.Crc32cCodec()] * checksum,
    )
    a = zarr.create(store=path, shape=(4, 4), chunks=(4, 4), dtype="f4", codecs=[codec], zarr_format=3)
    a[:] = np.arange(1, 17).reshape(4, 4)
    return path / "c/0/0"


def locate_all(path: Path) -> None:
    source = ZarrSource(str(path))
    (layout,) = source.arrays.values()
    source.locate(layout, all_chunks(layout))


@pytest.mark.parametrize("location", ["start", "end"])
def test_corrupt_shard_index(tmp_path, location):
    shard = sharded_store(tmp_path, location)
    raw = bytearray(shard.read_bytes())
    raw[3 if location == "start" else -60] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ChecksumError, match=f"{shard}: shard index has crc32c"):
        locate_all(tmp_path)


def test_truncated_shards(tmp_path):
    shard = sharded_store(tmp_path / "start", "start")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ShortReadError, match=f"{shard}: chunk 3 of the shard"):
        locate_all(tmp_path / "start")
    shard = sharded_store(tmp_path / "end")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ChecksumError, match=str(shard)):
        locate_all(tmp_path / "end")
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(ShortReadError, match=r"has 20 bytes, but its index of 4 chunks alone takes 68"):
        locate_all(tmp_path / "end")


def test_hostile_shard_index(tmp_path):
    shard = sharded_store(tmp_path / "u", checksum=False)
    data = shard.read_bytes()[:-64]
    for offset, nbytes in [(0, 2**63), (2**64 - 8, 16), (2**64 - 1, 8), (0, 2**64 - 1), (len(data) + 65, 0)]:
        shard.write_bytes(data + np.array([offset, nbytes] * 4, "<u8").tobytes())
        with pytest.raises(ShortReadError, match="chunk 0 of the shard"):
            locate_all(tmp_path / "u")
    meta = tmp_path / "u/zarr.json"
    # the index is not allocated first: 268 MB of it, and 4 GiB in a (sparse) file that is long enough
    for side, error, message in [
        (2**13, ShortReadError, "index of 16777216 chunks alone takes 268435456"),
        (2**15, UnsupportedFormatError, "a shard of 268435456 chunks, but at most 16777216 are read"),
    ]:
        edit(
            meta, {"shape": [side] * 2, "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [side] * 2}}}
        )
        source = ZarrSource(str(tmp_path / "u"))
        if side > 2**13:
            os.truncate(shard, 2**33)
        with pytest.raises(error, match=message):
            source.locate(source.arrays["u"], np.array([[0, 0]]))


def test_chunks_of_impossible_size(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    g.create_array("raw", shape=(4,), dtype="f8", compressors=None)[:] = 1
    g.create_array("crc", shape=(4,), dtype="f8", compressors=zarr.codecs.Crc32cCodec())[:] = 1
    g.create_array("zstd", shape=(4,), dtype="f8")[:] = 1
    for name, size, error in [
        ("raw", 31, ShortReadError),
        ("raw", 33, CorruptDataError),
        ("crc", 32, ShortReadError),
        ("zstd", 0, ShortReadError),
    ]:
        (tmp_path / name / "c/0").write_bytes(bytes(size))
        source = ZarrSource(str(tmp_path))
        with pytest.raises(error, match=rf"{name}/c/0: chunk \(0,\) of array '{name}' has {size} bytes"):
            source.locate(source.arrays[name], np.array([[0]]))


def test_coordinates_outside_the_grid(tmp_path):
    zarr.open_group(tmp_path, mode="w").create_array("u", shape=(7, 10), chunks=(4, 4), dtype="f4")
    source = ZarrSource(str(tmp_path))
    for chunks in ([[0, 3]], [[-1, 0]], [[0]], [0, 0]):
        with pytest.raises(ConfigError):
            source.locate(source.arrays["u"], np.array(chunks))
    assert len(source.locate(source.arrays["u"], np.zeros((0, 2), np.int64)).path_index) == 0


# -- hostile stores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("key", ["../secret", "/etc", "a/../../b", "a//b", "."])
def test_names_that_leave_the_store(tmp_path, version, key):
    g = zarr.open_group(tmp_path, mode="w", zarr_format=version)
    g.create_array("u", shape=(4,), dtype="f8")
    zarr.consolidate_metadata(tmp_path)
    file = tmp_path / (".zmetadata" if version == 2 else "zarr.json")
    old, new = ('"u/.zarray"', f'"{key}/.zarray"') if version == 2 else ('"u":', f'"{key}":')
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(RefusedError, match="not a path inside the store"):
        ZarrSource(str(tmp_path)).arrays  # noqa: B018


def test_links_out_of_the_store(tmp_path):
    store, outside = tmp_path / "s", tmp_path / "outside"
    zarr.open_group(outside, mode="w").create_array("u", shape=(4, 4), chunks=(2, 2), dtype="f8")[:] = 1
    for link in ["group", "group/u", "group/u/c", "group/u/c/1", "group/u/c/1/0", "group/u/zarr.json"]:
        shutil.rmtree(store, ignore_errors=True)
        zarr.open_group(store, mode="w").create_array("group/u", shape=(4, 4), chunks=(2, 2), dtype="f8")[:] = 2
        path, target = store / link, outside / link.removeprefix("group").lstrip("/")
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(target)

        def use(source: ZarrSource) -> None:
            layout = source.arrays["group/u"]
            source.locate(layout, all_chunks(layout))

        with pytest.raises(RefusedError, match="allow_external=True"):
            use(ZarrSource(str(store)))
        use(ZarrSource(str(store), allow_external=True))
    zarr.open_group(store, mode="w").create_array("u", shape=(4,), dtype="f8")[:] = 2
    (store / "u/c/0").unlink()
    (store / "u/c/0").symlink_to(outside / "u/c/0/0")
    source = ZarrSource(str(store))
    with pytest.raises(RefusedError, match="allow_external=True"):
        source.read_box(source.arrays["u"], (slice(0, 4),), np.zeros(4))


def test_links_inside_the_store(tmp_path):
    g = zarr.open_group(tmp_path / "s", mode="w")
    g.create_array("a/u", shape=(7, 10), chunks=(4, 4), dtype="f4")[:] = VALUES
    (tmp_path / "s/same").symlink_to("a")
    (tmp_path / "entry").symlink_to("s")  # the store itself may be reached by a link
    source = ZarrSource(str(tmp_path / "entry"))
    assert list(source.arrays) == ["a/u", "same/u"]
    np.testing.assert_array_equal(read(source, "same/u"), VALUES)
    (tmp_path / "elsewhere/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/below")
    (tmp_path / "elsewhere/t").symlink_to(tmp_path / "s")
    source = ZarrSource(str(tmp_path / "link/../t"))  # elsewhere/t, as for the system
    np.testing.assert_array_equal(read(source, "a/u"), VALUES)
    (tmp_path / "s/a/loop").symlink_to("..")
    with pytest.raises(RefusedError, match="a loop"):
        list(ZarrSource(str(tmp_path / "s")).arrays)


def test_pipe_in_place_of_a_chunk(tmp_path):
    zarr.open_group(tmp_path, mode="w").create_array("u", shape=(4,), dtype="f8")
    (tmp_path / "u/c").mkdir()
    os.mkfifo(tmp_path / "u/c/0")  # opening it would wait for ever
    source = ZarrSource(str(tmp_path))
    with pytest.raises(RefusedError, match="not a regular file"):
        source.locate(source.arrays["u"], np.array([[0]]))


def test_pickle_is_refused_however_deep(tmp_path):
    zarr.open_group(tmp_path, mode="w").create_array("u", shape=(4,), chunks=(2,), shards=(4,), dtype="f8")
    meta = json.loads((tmp_path / "u/zarr.json").read_text())
    meta["codecs"][0]["configuration"]["codecs"].append({"name": "numcodecs.pickle", "configuration": {}})
    (tmp_path / "u/zarr.json").write_text(json.dumps(meta))
    source = ZarrSource(str(tmp_path))
    with pytest.raises(RefusedError, match="pickle"):
        source.arrays["u"]
    zarr.open_group(tmp_path / "2", mode="w", zarr_format=2).create_array("u", shape=(4,), dtype="f8")
    edit(tmp_path / "2/u/.zarray", {"filters": [{"id": "pickle"}]})
    assert "pickle" in ZarrSource(str(tmp_path / "2")).skipped["u"]


# -- processes, threads, URLs, scale --------------------------------------------------------------------------------


def _read_in_child(source: ZarrSource, queue: object) -> None:
    layout = source.arrays["delta"]
    out = np.zeros((7, 10), "f4")
    source.read_box(layout, (slice(0, 7), slice(0, 10)), out)
    queue.put((read(source, "u").tolist(), out.tolist()))


def test_pickle_and_fork(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    g.create_array("u", shape=(7, 10), chunks=(2, 2), shards=(4, 4), dtype="f4")[:] = VALUES
    delta = {"name": "numcodecs.delta", "configuration": {"dtype": "<f4"}}
    g.create_array("delta", shape=(7, 10), dtype="f4", filters=[delta])[:] = VALUES
    source = ZarrSource(str(tmp_path), allow_external=True)
    read(source, "u")
    again = pickle.loads(pickle.dumps(source))
    assert (again.path, again.allow_external) == (str(tmp_path), True)
    np.testing.assert_array_equal(read(again, "u"), VALUES)
    assert len(pickle.dumps(source)) < 1000  # path and options, no caches
    out = np.zeros((7, 10), "f4")
    source.read_box(source.arrays["delta"], (slice(0, 7), slice(0, 10)), out)  # zarr's event loop runs in this process
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork beside threads
        child = context.Process(target=_read_in_child, args=(source, queue))
        source.close()  # so that the child has to open
        source._states._making[os.getpid(), os.getpid()] = Future()  # as another thread does: no child waits for that
        child.start()
        source._states._making.clear()
    try:
        assert queue.get(timeout=60) == (VALUES.tolist(), VALUES.tolist())
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()


def test_threads(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    g.create_array("u", shape=(7, 10), chunks=(1, 1), shards=(2, 2), dtype="f4")[:] = VALUES
    source = ZarrSource(str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: read(source, "u"), range(8)):
            np.testing.assert_array_equal(found, VALUES)


@pytest.mark.parametrize("scheme", ["memory", "file"])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("consolidated", [True, False])
def test_urls(tmp_path, scheme, version, consolidated):
    url = f"file://{tmp_path}" if scheme == "file" else f"memory://{uuid.uuid4().hex}/s"
    place = tmp_path if scheme == "file" else url
    g = zarr.open_group(place, mode="w", zarr_format=version, attributes={"title": "t"})
    g.create_array("a/u", shape=(7, 10), chunks=(4, 4), dtype="f4")[:4] = VALUES[:4]
    if version == 3:
        g.create_array("a/s", shape=(7, 10), chunks=(2, 2), shards=(4, 4), dtype="f4")[:4] = VALUES[:4]
    if consolidated:
        zarr.consolidate_metadata(g.store)
    source = ZarrSource(url)
    assert source.attributes == {"title": "t"}
    assert list(source.arrays) == (["a/s", "a/u"] if version == 3 else ["a/u"])
    expected = np.where(np.arange(7)[:, None] < 4, VALUES, 0)
    for name, layout in source.arrays.items():
        np.testing.assert_array_equal(read(source, name), expected)
        assert layout.store == url
        assert -1 in source.locate(layout, all_chunks(layout)).path_index
        out = np.zeros((7, 10), "f4")
        source.read_box(layout, (slice(0, 7), slice(0, 10)), out)
        np.testing.assert_array_equal(out, expected)
    if scheme == "memory":
        assert ZarrSource(url + "/a/u").arrays["u"].shape == (7, 10)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/store.zarr/", "s3://bucket/store.zarr/u/c/0"),
        ("simplecache::s3://bucket/s", "simplecache::s3://bucket/s/u/c/0"),
        ("zip://::file:///tmp/x.zip", "zip://u/c/0::file:///tmp/x.zip"),
    ],
)
def test_location_in_chained_urls(url, expected):
    tree = _zarr_tree.UrlTree(url)
    assert tree.location("u/c/0") == expected


def test_store_in_a_zip_file(tmp_path):
    zarr.open_group(tmp_path / "s", mode="w").create_array("g/u", shape=(7, 10), chunks=(4, 4), dtype="f4")[:] = VALUES
    shutil.make_archive(str(tmp_path / "s"), "zip", tmp_path / "s")
    source = ZarrSource(f"zip://::file://{tmp_path}/s.zip")
    np.testing.assert_array_equal(read(source, "g/u"), VALUES)


class _PlainServer(http.server.SimpleHTTPRequestHandler):
    def list_directory(self, path):
        self.send_error(404)

    def log_message(self, *args):
        pass


def test_http_without_listing(tmp_path):
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    g = zarr.open_group(tmp_path, mode="w")
    g.create_array("g/u", shape=(7, 10), chunks=(4, 4), dtype="f4", compressors=None)[:4] = VALUES[:4]
    handler = functools.partial(_PlainServer, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(UnsupportedFormatError, match="consolidated metadata"):
            ZarrSource(url).arrays  # noqa: B018
        alone = ZarrSource(f"{url}/g/u")
        zarr.consolidate_metadata(tmp_path)
        source = ZarrSource(url)
        for layout, used in [(source.arrays["g/u"], source), (alone.arrays["u"], alone)]:
            refs = used.locate(layout, all_chunks(layout))
            assert refs.path_index.tolist() == [0, 1, 2, -1, -1, -1]
            assert refs.nbytes.tolist() == [64, 64, 64, 0, 0, 0]
            assert refs.paths[1] == f"{url}/g/u/c/0/1"
        server.shutdown()


def test_many_small_chunks_in_shards(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    g.create_array("u", shape=(300, 400), chunks=(1, 1), shards=(100, 200), dtype="u1", compressors=None)
    values = (np.arange(120_000) % 251 + 1).astype("u1").reshape(300, 400)
    for row, column in np.ndindex(3, 2):  # by hand: zarr-python takes half a minute to write them
        order = np.random.default_rng(row).permutation(20_000)  # where each chunk lies in its file
        data = np.empty(20_000, "u1")
        data[order] = values[row * 100 : row * 100 + 100, column * 200 : column * 200 + 200].ravel()
        index = np.stack([order, np.ones_like(order)], axis=1).astype("<u8").tobytes()
        shard = tmp_path / f"u/c/{row}/{column}"
        shard.parent.mkdir(parents=True, exist_ok=True)
        shard.write_bytes(data.tobytes() + bytes(numcodecs.CRC32C().encode(index)))
    np.testing.assert_array_equal(g["u"][99:101, 199:201], values[99:101, 199:201])
    source = ZarrSource(str(tmp_path))
    layout = source.arrays["u"]
    refs = source.locate(layout, all_chunks(layout)[::-1])
    assert len(refs.paths) == 6
    found = np.empty(120_000, "u1")
    for i, path in enumerate(refs.paths):
        rows = refs.path_index == i
        found[rows] = np.fromfile(path, "u1")[refs.offset[rows]]
    np.testing.assert_array_equal(found[::-1].reshape(300, 400), values)
    assert refs.nbytes.tolist() == [1] * 120_000


def test_cache_of_sizes_spans_blocks(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    a = g.create_array("u", shape=(9000,), chunks=(1,), dtype="u1", compressors=None, fill_value=0)
    a[4000:4200] = 1
    source = ZarrSource(str(tmp_path))
    layout = source.arrays["u"]
    for rows in ([4199, 8999, 0, 4096, 4095], [4199, 4200, 4000, 3999]):
        refs = source.locate(layout, np.array(rows)[:, None])
        assert (refs.path_index >= 0).tolist() == [4000 <= r < 4200 for r in rows]
        assert [int(refs.paths[i].rpartition("/")[2]) for i in refs.path_index if i >= 0] == [
            r for r in rows if 4000 <= r < 4200
        ]


def test_opening_imports_no_heavy_package(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    g.create_array("u", shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="f4")[:] = 1
    code = (
        "import sys, numpy as np; from scidata.sources.zarr.source import ZarrSource; s = ZarrSource(sys.argv[1]); "
        "s.locate(s.arrays['u'], np.zeros((1, 2), int)); "
        "print(sorted({'torch', 'dask', 'xarray', 'zarr', 'fsspec', 'netCDF4'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True, env=env, timeout=99
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_codec_arguments_are_numcodecs(tmp_path):
    g = zarr.open_group(tmp_path, mode="w")
    blosc = zarr.codecs.BloscCodec(cname="zstd", clevel=2, shuffle="bitshuffle", typesize=4)
    g.create_array("u", shape=(4,), dtype="f4", compressors=blosc)
    (codec,) = ZarrSource(str(tmp_path)).arrays["u"].codecs
    assert codec == Codec(name="blosc", config={"cname": "zstd", "clevel": 2, "shuffle": 2, "blocksize": 0})


@pytest.mark.parametrize(("kind", "separator"), [("v2", "."), ("v2", "/"), ("default", "."), ("default", "/")])
def test_very_many_files(tmp_path, kind, separator):
    """Most of them are absent; too many to be looked for at all are refused."""
    group = zarr.open_group(tmp_path, mode="w", zarr_format=2 if kind == "v2" else 3)
    encoding = {"name": kind, "separator": separator}
    array = group.create_array("u", shape=(40_000, 2), chunks=(1, 1), dtype="u1", chunk_key_encoding=encoding)
    array[30_000:30_003, 1] = [7, 8, 9]
    source = ZarrSource(str(tmp_path))
    layout = source.arrays["u"]
    chunks = np.stack([np.repeat(np.arange(40_000), 2), np.tile([0, 1], 40_000)], axis=1)
    refs = source.locate(layout, chunks)
    assert np.flatnonzero(refs.path_index >= 0).tolist() == [60_001, 60_003, 60_005]
    huge = group.create_array("v", shape=(2**22 + 1,), chunks=(1,), dtype="u1")
    layout = ZarrSource(str(tmp_path)).arrays["v"]
    with pytest.raises(TooLargeError, match=r"'v'.*too many to be looked for"):
        ZarrSource(str(tmp_path)).locate(layout, np.arange(huge.shape[0])[:, None])


def test_threads_that_find_the_first_chunk_together(tmp_path, monkeypatch):
    zarr.create_array(tmp_path / "a.zarr", shape=(4, 6), chunks=(1, 6), dtype="f4", compressors=None)[:] = 1
    source = ZarrSource(str(tmp_path / "a.zarr"))
    (layout,) = source.arrays.values()
    find, known = source.finder(layout), ChunkLocator._known
    with ThreadPoolExecutor(1) as other:

        def meanwhile(*arguments):
            monkeypatch.setattr(ChunkLocator, "_known", known)
            assert other.submit(find, 1).result()[1:] == (0, 24)
            return known(*arguments)

        monkeypatch.setattr(ChunkLocator, "_known", meanwhile)
        assert find(2)[1:] == (0, 24)
