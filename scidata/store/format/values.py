"""Values of a whole graph or mesh in a store's manifest: exact, whatever their dtype and shape. Pure."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from scidata.store.format.entries import Entry


def encode_values(values: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return arrays as their bytes, and anything else as JSON, by name."""
    return {name: _encoded(value) for name, value in values.items()}


def _encoded(value: object) -> dict[str, object]:
    if not isinstance(value, np.ndarray):
        return {"json": json.dumps(value)}
    value = value.astype(value.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}


def decode_values(encoded: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Undo :func:`encode_values`."""
    return {name: _decoded(entry) for name, entry in encoded.items()}


def _decoded(entry: Mapping[str, Any]) -> Any:
    if "json" in entry:
        return json.loads(entry["json"])
    values = np.frombuffer(base64.b64decode(entry["data"]), np.dtype(entry["dtype"])).reshape(entry["shape"])
    return values.astype(values.dtype.newbyteorder("="))


def check_value(value: object, where: str, key: str) -> dict[str, object]:
    """Return a value of a manifest that can be decoded, or raise CorruptDataError."""
    keys = ("json", "dtype", "shape", "data")
    entry = Entry(value, where, key, keys, optional=keys)
    try:
        _decoded(entry.data)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError):
        entry.fail("data", "is no value of a graph")
    shape = entry.data.get("shape", [])
    if "json" not in entry.data and math.prod(shape) < 0:
        entry.fail("shape", "is no shape")
    return dict(entry.data)
