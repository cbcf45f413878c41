"""Data types and fill values as Zarr's JSON spells them, both formats. Pure."""

from __future__ import annotations

import base64
import binascii
import re
import struct

import numpy as np

from scidata.core.types import Array
from scidata.errors import UnsupportedFormatError

_NUMBER_V3 = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_NOT_NUMBER_V3 = re.compile(
    r"r\d+|raw_bytes|string|bytes|variable_length_(bytes|utf8)|null_terminated_bytes|fixed_length_utf32|struct(ured)?"
)
_NUMBER_V2 = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16|[mM]8(\[\d*[A-Za-zμ]+\])?)")
_TEXT_V3 = ("string", "variable_length_utf8", "fixed_length_utf32", "null_terminated_bytes")
_DATETIME_V3 = {"numpy.datetime64": "M8", "numpy.timedelta64": "m8"}
_DATETIME_UNIT = re.compile(r"generic|[YMWDhms]|ms|us|μs|ns|ps|fs|as")

_NO_VALUE = (ValueError, TypeError, OverflowError, struct.error, binascii.Error)  # errors of converting a value


def dtype_v2(spec: object, where: str) -> np.dtype[np.generic]:
    """Return the dtype of a v2 ``dtype`` entry, byte order included."""
    if not isinstance(spec, str) or spec.startswith(("{", "[")):
        raise UnsupportedFormatError(f"{where}: dtype {spec!r} is a record; only plain numbers are read")
    if not _NUMBER_V2.fullmatch(spec):
        kind = "object dtype (refused: reading it runs a pickle or a text codec)" if spec.endswith("O") else "dtype"
        raise UnsupportedFormatError(f"{where}: {kind} {spec!r} is not a plain number; only numbers are read")
    return np.dtype(spec)


def dtype_v3(spec: object, where: str) -> np.dtype[np.generic]:
    """Return the native dtype of a v3 ``data_type`` entry; its byte order is the ``bytes`` codec's business."""
    found = named(spec)
    if found is None:
        raise UnsupportedFormatError(f"{where}: data type {spec!r} is not understood")
    name, config = found
    if _NUMBER_V3.fullmatch(name) and not config:
        return np.dtype(name)
    if name in _DATETIME_V3:
        unit, factor = config.get("unit", "generic"), config.get("scale_factor", 1)
        if isinstance(unit, str) and _DATETIME_UNIT.fullmatch(unit) and isinstance(factor, int) and factor > 0:
            return np.dtype(_DATETIME_V3[name] + ("" if unit == "generic" else f"[{factor}{unit}]"))
    kind = "is not a plain number" if _NOT_NUMBER_V3.fullmatch(name) else "is not known"
    raise UnsupportedFormatError(f"{where}: data type {name!r} {kind}; only numbers are read")


def text_as_bytes(meta: object) -> dict[str, object] | None:
    """Return an array's metadata as if its texts were bytes; None if they are no texts, or nothing tells so."""
    if not isinstance(meta, dict):
        return None
    if (found := named(meta.get("data_type"))) is not None and found[0] in _TEXT_V3:
        return {**meta, "data_type": "uint8", "fill_value": 0}
    filters = meta.get("filters")
    is_text = meta.get("dtype") == "|O" and isinstance(filters, list) and filters == [{"id": "vlen-utf8"}]
    if is_text or re.fullmatch(r"[<>|][SU][1-9]\d*", str(meta.get("dtype"))):
        return {**meta, "dtype": "|u1", "fill_value": None}
    return None


def named(entry: object) -> tuple[str, dict[str, object]] | None:
    """Split ``{"name": ..., "configuration": {...}}``, or a bare name; None if it is neither."""
    name: object = entry
    config: object = {}
    if isinstance(entry, dict):
        name, config = entry.get("name"), entry.get("configuration") or {}
    return (name, config) if isinstance(name, str) and isinstance(config, dict) else None


def check_named(entry: object, part: str, where: str) -> tuple[str, dict[str, object]]:
    """Return what :func:`named` does."""
    found = named(entry)
    if found is None:
        raise UnsupportedFormatError(f"{where}: {part} {entry!r} has no name and configuration")
    return found


def _bits(text: str, itemsize: int) -> Array:
    raw = bytes.fromhex(text[2:].rjust(2 * itemsize, "0"))
    if len(raw) != itemsize:
        raise ValueError(text)
    return np.frombuffer(raw, f">f{itemsize}").reshape(())


def _float(value: object, dtype: np.dtype[np.generic]) -> Array:
    """Numbers, ``"NaN"``, ``"-Infinity"``, ``"0x7fc00001"`` (bits, v3), base64 of a float64 (as xarray writes)."""
    if isinstance(value, str) and value[:2].lower() == "0x":
        return _bits(value, dtype.itemsize).astype(dtype)
    number: float
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            (number,) = struct.unpack("<d", base64.b64decode(value, validate=True))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    else:
        raise ValueError(value)
    with np.errstate(over="ignore"):
        return np.array(number, dtype)


def _integer(value: object) -> int:
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise ValueError(value)


def _convert(value: object, dtype: np.dtype[np.generic]) -> Array:
    match dtype.kind:
        case "f":
            return _float(value, dtype)
        case "c":
            parts = value if isinstance(value, list) else [value, 0]
            if len(parts) != 2:
                raise ValueError(value)
            part = np.dtype(f"f{dtype.itemsize // 2}")
            pair = np.array([_float(p, part) for p in parts], part)  # by bytes: 1j * nan would spoil the real part
            return pair.view(dtype.newbyteorder("=")).reshape(()).astype(dtype)
        case "b":
            number = _integer(value)
            if number not in (0, 1):
                raise ValueError(value)
            return np.array(bool(number))
        case "m" | "M":
            raw = np.iinfo(np.int64).min if value == "NaT" else _integer(value)
            return np.array(raw, np.int64).view(dtype.newbyteorder("=")).astype(dtype)
        case _:
            number = _integer(value)
            info = np.iinfo(dtype.str)
            if not info.min <= number <= info.max:
                raise ValueError(value)
            return np.array(number, dtype)


def fill_value_of(value: object, dtype: np.dtype[np.generic], where: str) -> Array | None:
    """Return the metadata's fill value as a 0-d array of ``dtype``; None if there is none."""
    if value is None:
        return None
    try:
        return _convert(value, dtype)
    except _NO_VALUE as e:
        raise UnsupportedFormatError(f"{where}: fill value {value!r} does not fit its dtype {dtype}") from e


def cf_fill_value(value: object, dtype: np.dtype[np.generic]) -> object:
    """Return ``_FillValue`` as a native scalar of ``dtype``, as xarray decodes it; as it is if it is none."""
    native = dtype.newbyteorder("=")
    try:
        return _convert(value, native)[()]
    except _NO_VALUE:
        return value
