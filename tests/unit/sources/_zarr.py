"""Shared by tests: ODD, V3, _places, _replaced."""

from __future__ import annotations

import copy
import functools

V3 = {
    "zarr_format": 3, "node_type": "array", "shape": [8, 8], "data_type": "float32", "fill_value": "NaN",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codecs": [{"name": "sharding_indexed", "configuration": {
        "chunk_shape": [2, 2], "index_location": "end",
        "codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}},
                   {"name": "bytes", "configuration": {"endian": "little"}},
                   {"name": "blosc", "configuration": {"cname": "lz4", "shuffle": "shuffle"}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]}}],
    "attributes": {"_FillValue": "AAAAAAAA+H8="}, "dimension_names": ["y", None], "storage_transformers": [],
}  # fmt: skip


def _places(value: object, path: tuple = ()) -> list[tuple]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, v in inner for p in _places(v, (*path, key)))]


ODD = [None, True, False, 0, -1, 1, 2**70, 1.5, float("nan"), "", "x", "C", "bytes", "0x", "<M8[s]", "|O"]
ODD += [
    [],
    {},
    [None],
    ["x"],
    [[]],
    [0, 0],
    [2**40] * 3,
    {"name": "x"},
    {"id": []},
    {"name": None},
    [{"name": "bytes"}],
]


def _replaced(good: dict, place: tuple, value: object) -> dict:
    meta = copy.deepcopy(good)
    holder = functools.reduce(lambda node, key: node[key], place[:-1], meta)
    holder[place[-1]] = value
    return meta
