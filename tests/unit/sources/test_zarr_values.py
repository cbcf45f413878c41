"""Zarr v3's codecs of values, and grids of chunks in other words: metadata that zarr-python 3.4 wrote and read alike.

The arrays are written by the installed zarr-python as they are stored; then their metadata say what the values mean.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import zarr

import scidata
from scidata.errors import CorruptDataError, UnsupportedFormatError


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
    for shapes in ([[1, 3], 4, 5], [[2, 2], 4], "all", [[2], 4, 5], [[], 4, 5], [[[2, "x"]], 4, 5]):
        grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": shapes}}
        _write(tmp_path, STORED, "int16", [], grid=grid)
        with pytest.raises(UnsupportedFormatError, match=r"'rectilinear' is not regular; its chunks differ in size"):
            _read(tmp_path)
