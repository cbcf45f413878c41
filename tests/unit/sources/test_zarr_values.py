"""Zarr v3's codecs of values, and grids of chunks in other words: metadata that zarr-python 3.4 wrote and read alike.

The arrays are written by the installed zarr-python as they are stored; then their metadata say what the values mean.
"""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import replace

import numcodecs
import numpy as np
import pytest
import zarr
from google_crc32c import value as crc32c

import scidata
from scidata.core.options import ReadOptions
from scidata.core.types import Segment
from scidata.errors import CorruptDataError, ShortReadError, UnsupportedFormatError
from scidata.grids.reader import GridReader
from scidata.plan.array import plan_array
from scidata.sources.zarr.source import ZarrSource


def _write(path, stored, dtype, codecs, *, endian="little", chunks=(1, 4, 5), shards=None, grid=None):
    group = zarr.open_group(path, mode="a")
    array = group.create_array(
        "x", shape=stored.shape, dtype=stored.dtype, chunks=chunks, shards=shards, filters=None, overwrite=True,
        serializer="auto" if shards else zarr.codecs.BytesCodec(endian=endian), dimension_names=["time", "lat", "lon"],
    )  # fmt: skip
    array[...] = stored
    file = path / "x" / "zarr.json"
    meta = json.loads(file.read_text())
    inside = meta["codecs"][0]["configuration"] if shards else meta
    inside["codecs"] = [*codecs, *inside["codecs"]]
    meta |= {"data_type": dtype, "fill_value": 0} | ({} if grid is None else {"chunk_grid": grid})
    file.write_text(json.dumps(meta))


def _read(path, **options):
    ds = scidata.open_dataset(path, fields=["x"], sample_dim="time", **options)
    return np.stack([ds[i]["x"].numpy() for i in range(len(ds))])


def _scale(offset, scale):
    return {"name": "scale_offset", "configuration": {"offset": offset, "scale": scale}}


def _cast(dtype, **more):
    return {"name": "cast_value", "configuration": {"data_type": dtype, **more}}


STORED = np.random.default_rng(0).integers(-1000, 1000, (4, 6, 8)).astype("i2")


@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("shards", [None, (2, 8, 10)])
def test_packed_values(tmp_path, endian, shards):
    stored = STORED.copy()
    stored[0, 0, :3] = -32768
    table = {"encode": [["NaN", -32768]], "decode": [[-32768, "NaN"]]}
    codecs = [_scale(50.0, 100.0), _cast("int16", scalar_map=table)]
    _write(tmp_path, stored, "float64", codecs, endian=endian, shards=shards)
    values = np.where(stored == -32768, np.nan, stored / np.float64(100) + 50)
    assert np.array_equal(_read(tmp_path), values, equal_nan=True)
    part = _read(tmp_path, isel={"lat": [5, 1], "lon": slice(1, 8, 3)})
    assert np.array_equal(part, values[:, [5, 1], 1::3], equal_nan=True)


def test_other_dtypes(tmp_path):
    _write(tmp_path, STORED, "float32", [_scale(5, 2), _cast("int16")])
    assert np.array_equal(_read(tmp_path), STORED / np.float32(2) + np.float32(5))
    _write(tmp_path, STORED.astype("f8") + 0.25, "int16", [_cast("float64")])
    assert np.array_equal(_read(tmp_path), STORED)  # to the nearest
    _write(tmp_path, STORED * np.int16(3), "int32", [_scale(7, 3), _cast("int16")])
    assert np.array_equal(_read(tmp_path), STORED.astype("i4") + 7)
    order = {"name": "transpose", "configuration": {"order": [2, 0, 1]}}
    _write(tmp_path, STORED, "float64", [_cast("int16"), order], endian="big", chunks=(1, 6, 8))
    wanted = STORED.reshape(4, 6, 8)
    bytes_first = np.stack([chunk.reshape(8, 1, 6).transpose(1, 2, 0)[0] for chunk in wanted])
    assert np.array_equal(_read(tmp_path), bytes_first)


def test_values_that_do_not_fit(tmp_path):
    _write(tmp_path, STORED.astype("f4") + 40000, "int16", [_cast("float32")])
    with pytest.raises(CorruptDataError, match="cast_value gives values that int16 does not hold"):
        _read(tmp_path)
    _write(tmp_path, STORED, "int16", [_scale(0, 7)])
    with pytest.raises(CorruptDataError, match="no multiples of the scale, 7"):
        _read(tmp_path)
    _write(tmp_path, STORED, "int16", [_cast("float32", rounding="towards-zero")])
    with pytest.raises(UnsupportedFormatError, match="cast_value"):
        _read(tmp_path)
    _write(tmp_path, STORED, "int16", [_scale("much", 7)])
    with pytest.raises(UnsupportedFormatError, match="much"):
        _read(tmp_path)


def test_chunks_of_one_size_by_another_name(tmp_path):
    for shapes, chunks in [([[2, 2], 4, 5], (2, 4, 5)), ([[[1, 4]], [3, [3, 1]], [8]], (1, 3, 8))]:
        grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": shapes}}
        _write(tmp_path, STORED, "int16", [], chunks=chunks, grid=grid)
        assert np.array_equal(_read(tmp_path), STORED)
    wrong = [([[2, 2], 4], "an entry for each"), ("all", "an entry for each"), ([[2], 4, 5], "that hold 4 rows")]
    wrong += [([[], 4, 5], "no sizes"), ([[[2, "x"]], 4, 5], "integers"), ([[1, 0, 3], 4, 5], "below 1")]
    wrong += [([[[1, 10**9]], 4, 5], "that hold 4 rows"), ([[[3, 1, 1]], 4, 5], "no sizes, or pairs")]
    for shapes, message in wrong:
        grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": shapes}}
        _write(tmp_path, STORED, "int16", [], grid=grid)
        with pytest.raises(UnsupportedFormatError, match=message):
            _read(tmp_path)


_GZIP = {"name": "gzip", "configuration": {"level": 1}}
_BLOSC = {"cname": "lz4", "clevel": 1, "shuffle": "shuffle", "typesize": 4, "blocksize": 64}
_ENCODERS = {
    "raw": ([], bytes),
    "gzip": ([_GZIP], lambda b: gzip.compress(b, 1)),
    "blosc": ([{"name": "blosc", "configuration": _BLOSC}], numcodecs.Blosc("lz4", 1, 1, 64).encode),
    "crc32c": ([{"name": "crc32c"}], lambda b: b + crc32c(b).to_bytes(4, "little")),
}


def write_unlike(path, values, sizes, codec, *, order=None):
    """Write chunks of these sizes as the specification has them; the last ones reach past the end."""
    entries, encode = _ENCODERS[codec]
    turn = [] if order is None else [{"name": "transpose", "configuration": {"order": order}}]
    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": sizes}}
    meta = {
        "zarr_format": 3, "node_type": "array", "shape": values.shape, "data_type": "float32", "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default"}, "fill_value": 0, "dimension_names": ["time", "lat", "lon"],
        "codecs": [*turn, {"name": "bytes", "configuration": {"endian": "little"}}, *entries],
    }  # fmt: skip
    (path / "x").mkdir(parents=True, exist_ok=True)
    (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (path / "x" / "zarr.json").write_text(json.dumps(meta))
    sizes = [s if isinstance(s, list) else [s] * -(-n // s) for s, n in zip(sizes, values.shape, strict=True)]
    for place in itertools.product(*[range(len(s)) for s in sizes]):
        begins = [sum(s[:k]) for s, k in zip(sizes, place, strict=True)]
        chunk = np.full([s[k] for s, k in zip(sizes, place, strict=True)], 7, "<f4")
        part = values[tuple(slice(b, b + n) for b, n in zip(begins, chunk.shape, strict=True))]
        chunk[tuple(map(slice, part.shape))] = part
        file = path / "x" / "c" / "/".join(map(str, place))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode(np.ascontiguousarray(chunk.transpose(order or (0, 1, 2))).tobytes()))


def _random_sizes(rng, num):
    if rng.random() < 0.2:
        return int(rng.integers(1, num + 1))
    cuts = np.unique(rng.integers(1, num, int(rng.integers(1, 5))))
    return np.diff([0, *cuts, num + int(rng.integers(0, 3))]).tolist()


@pytest.mark.parametrize("codec", _ENCODERS)
def test_chunks_that_differ_in_size(tmp_path, codec):
    rng = np.random.default_rng(3)
    for case in range(4):
        values = rng.normal(size=(9, 17, 23)).astype("f4")
        sizes = [_random_sizes(rng, n) for n in values.shape]
        order = [None, [2, 1, 0], [1, 2, 0], [0, 2, 1]][case]
        path = tmp_path / str(case)
        write_unlike(path, values, sizes, codec, order=order)
        assert np.array_equal(_read(path), values), sizes
        crop = {"lat": slice(16, 2, -3), "lon": sorted(rng.choice(23, 7, replace=False).tolist())}
        assert np.array_equal(_read(path, isel=crop), values[:, 16:2:-3][..., crop["lon"]]), sizes
        ways = ReadOptions(sample_dim="time", steps=(0, 2), shard={"lat": "domain"}, halo={"lat": 2})
        for bounds in ("even", "chunk"):
            reader = GridReader(path, replace(ways, bounds=bounds), axis_sizes={"domain": 3})
            at = reader.partition.bounds["lat"].tolist()
            for index, rank in itertools.product((0, 3, 6), range(3)):
                place = {"domain": rank}
                found = {name: np.empty(x.shape, x.dtype) for name, x in reader.buffer_specs(place).items()}
                stats = reader.read_into(index, found, place)
                rows = slice(max(0, at[rank] - 2), at[rank + 1] + 2)
                expected = values[[index, index + 2], rows if at[rank] < at[rank + 1] else slice(0)]
                assert np.array_equal(found["x"].reshape(expected.shape), expected), (sizes, bounds, index, rank)
                assert codec == "raw" or stats.bytes_decoded >= expected.nbytes
        loader = scidata.DataLoader(scidata.open_dataset(path, sample_dim="time"), shuffle="blocks", batch_size=2)
        drawn = sorted(float(v) for batch in loader for v in batch["x"][:, 3, 4])
        assert drawn == sorted(values[:, 3, 4].tolist())


def test_only_chunks_that_hold_a_row_are_read(tmp_path):
    values = np.arange(9 * 17 * 23, dtype="f4").reshape(9, 17, 23)
    write_unlike(tmp_path, values, [1, [5, 7, 6], [20, 3]], "raw")
    layout = (source := ZarrSource(str(tmp_path))).arrays["x"]
    selection = ((Segment(start=2, count=1),), (Segment(start=1, count=3, step=6),), (Segment(start=19, count=2),))
    plan = plan_array(layout, selection, source.locate, out_shape=(1, 3, 2))
    assert plan.chunks.tolist() == [[2, k, j] for k in range(3) for j in range(2)]
    assert plan.bytes_wanted == plan.bytes_fetched == 24
    assert layout.num_chunks == (9, 3, 2)
    ways = ReadOptions(sample_dim="time", shard={"lat": "domain"}, bounds="chunk")
    assert GridReader(tmp_path, ways, axis_sizes={"domain": 3}).partition.bounds["lat"].tolist() == [0, 5, 12, 17]
    (tmp_path / "x/c/2/1/0").write_bytes(b"short")
    with pytest.raises(ShortReadError, match=r"chunk \(2, 1, 0\): it has 5 bytes, but 560 were expected"):
        _read(tmp_path)
