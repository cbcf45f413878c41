"""The CF conventions as far as reading needs them: packed values, and which axis an array describes. Pure metadata.

Times are not decoded: a time coordinate stays the number that is stored.
Conventions: https://cfconventions.org (sections 2.5.1 missing data, 4 coordinate types, 8.1 packed data).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from scidata.core.types import Array, ArrayLayout, Decoding
from scidata.errors import UnsupportedFormatError

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

_STANDARD_NAMES: dict[str, str] = {
    **dict.fromkeys(("time", "forecast_period", "forecast_reference_time"), "T"),
    **dict.fromkeys(("air_pressure", "height", "altitude", "depth", "model_level_number", "geopotential_height"), "Z"),
    **dict.fromkeys(("latitude", "grid_latitude", "projection_y_coordinate"), "Y"),
    **dict.fromkeys(("longitude", "grid_longitude", "projection_x_coordinate"), "X"),
}
_NAMES: dict[str, str] = {
    **dict.fromkeys(("time", "month", "valid_time", "step", "date", "forecast_time", "t"), "T"),
    **dict.fromkeys(
        ("level", "lev", "plev", "pressure", "isobaricinhpa", "pressure_level", "height", "depth", "altitude", "z"), "Z"
    ),
    **dict.fromkeys(("lat", "latitude", "latitudes", "y", "yc", "nav_lat", "rlat"), "Y"),
    **dict.fromkeys(("lon", "long", "longitude", "longitudes", "x", "xc", "nav_lon", "rlon"), "X"),
}
#: Attributes of longitudes and latitudes that only their names tell, of tables.
NAMED_ANGLES: Mapping[str, Mapping[str, str]] = {
    name: {"standard_name": full} for full in ("latitude", "longitude") for name in (full, full[:3])
}
_TIMES = frozenset(("time_step", "timestep", "time_counter", "nt", "ntime", "ntimes"))
_NORTH = re.compile(r"degrees?_?(north|n)$", re.IGNORECASE)
_EAST = re.compile(r"degrees?_?(east|e)$", re.IGNORECASE)
_SINCE = re.compile(r"\s*(\w+)\s+since\s+\S", re.IGNORECASE)  # "days since 1900-01-01"; "days accumulated" is no axis


def array_of(value: object) -> Array:
    """Return an attribute as an array; the empty text if it is none, such as lists of lists of other lengths."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        return np.asarray("")


def decoding_of(layout: ArrayLayout, dtype: np.dtype[np.generic] | None = None) -> Decoding | None:
    """Say how raw values become physical ones, as xarray's ``decode_cf`` does; None if they already are.

    Arithmetic happens in the target dtype: ``values = raw.astype(dtype); values *= scale; values += offset``, which
    is xarray's order, so results agree bit for bit while ``dtype`` is None. What xarray drops with a warning (a
    ``_FillValue`` of NaN on integers) is dropped here; a fill value that no stored value can equal masks nothing.
    Integer ``scale_factor`` or ``add_offset`` give float64 (xarray keeps integers, and fails on missing ones).

    - ``layout``: the array; its attributes are read in any format's form (NumPy scalars, Python numbers, text for
      numbers).
    - ``dtype``: floating dtype wanted for floating results. None: the dtype that xarray chooses. Integers without scale
      and fill value stay integers either way.

    Raises UnsupportedFormatError: ``scale_factor`` or ``add_offset`` is not one number.
    """
    key = "decoding", dtype
    if key not in layout.derived:
        layout.derived[key] = _decoding_of(layout, dtype)
    return layout.derived[key]


def _decoding_of(layout: ArrayLayout, dtype: np.dtype[np.generic] | None) -> Decoding | None:
    raw = layout.dtype.newbyteorder("=")
    if raw.kind == "c":
        said = (np.ravel(array_of(layout.attributes.get(name, ()))) for name in ("_FillValue", "missing_value"))
        missing = tuple(raw.type(each) for values in said if values.dtype.kind in "biufc" for each in values)
        return Decoding(dtype=raw, fill_values=missing) if missing else None
    if raw.kind not in "iuf":
        return None
    viewed = _unsigned_view(raw, layout.attributes)
    seen = viewed or raw
    scale = _number(layout, "scale_factor")
    offset = _number(layout, "add_offset")
    has_fill, fills = _fill_values(layout, raw, viewed)
    if scale is not None or offset is not None:
        # after a fill value of NaN only, xarray scales floats in the dtype that they have
        keeps = seen.kind == "f" and not fills and has_fill
        target = seen if keeps else _packed_dtype(seen, scale, offset)
    elif seen.kind == "f":
        target = seen
    elif has_fill:
        target = np.dtype(np.float32 if seen.itemsize <= 2 else np.float64)
    else:
        return Decoding(dtype=seen, view_as=_as_ordered(viewed, layout)) if viewed else None
    if dtype is not None:
        target = np.dtype(dtype).newbyteorder("=")
    if scale is None and offset is None and not fills and target == seen:
        return None
    return Decoding(
        dtype=target,
        scale=None if scale is None else float(scale),
        offset=None if offset is None else float(offset),
        fill_values=fills,
        view_as=_as_ordered(viewed, layout),
    )


def _unsigned_view(raw: np.dtype[np.generic], attributes: Mapping[str, object]) -> np.dtype[np.generic] | None:
    flag = attributes.get("_Unsigned")
    if not isinstance(flag, str):
        return None
    if raw.kind == "i" and flag == "true":
        return np.dtype(f"u{raw.itemsize}")
    if raw.kind == "u" and flag == "false":
        return np.dtype(f"i{raw.itemsize}")
    return None


def _as_ordered(viewed: np.dtype[np.generic] | None, layout: ArrayLayout) -> np.dtype[np.generic] | None:
    return None if viewed is None else viewed.newbyteorder("=" if layout.dtype.isnative else "S")


def _number(layout: ArrayLayout, name: str) -> np.generic | None:
    value = layout.attributes.get(name)
    if value is None:
        return None
    array = array_of(value)
    if array.dtype.kind in "US" and array.size == 1:
        try:
            array = np.asarray(float(array.item()))
        except ValueError:
            array = np.asarray("")
    if array.size != 1 or array.dtype.kind not in "iuf":
        raise UnsupportedFormatError(
            f"{layout.store}: field {layout.name!r}: {name} is {value!r}, but one number was expected; "
            "correct the attribute or read with decode=False"
        )
    return array.reshape(-1)[0]


def _packed_dtype(
    raw: np.dtype[np.generic], scale: np.generic | None, offset: np.generic | None
) -> np.dtype[np.generic]:
    """Choose the dtype of unpacked values: xarray's rule (``xarray.coding.variables._choose_float_dtype``)."""
    if scale is not None and offset is not None and scale.dtype == offset.dtype and scale.dtype in _FLOATS:
        wide = raw.kind in "iu" and raw.itemsize == 4
        return np.dtype(np.float64) if wide else scale.dtype.newbyteorder("=")
    if offset is None and scale is not None and scale.dtype.kind == "f":
        return scale.dtype.newbyteorder("=")
    return np.dtype(np.float64)


def _fill_values(
    layout: ArrayLayout, raw: np.dtype[np.generic], viewed: np.dtype[np.generic] | None
) -> tuple[bool, tuple[np.generic, ...]]:
    """Return whether any fill attribute counts, and the stored values (as viewed) that mean missing."""
    has_fill = False
    found: dict[int | float, np.generic] = {}
    for name in ("_FillValue", "missing_value"):
        value = layout.attributes.get(name)
        if value is None:
            continue
        given = np.ravel(array_of(value))
        if given.dtype.kind not in "biuf":
            given = _parsed(given)
        given = given[~np.isnan(given)] if given.dtype.kind == "f" else given
        if not len(given) and raw.kind in "iu":
            continue  # not of the variable's type: xarray drops the attribute
        has_fill = True
        for item in given:
            stored = _as_stored(item, raw, viewed if name == "_FillValue" else None, viewed or raw)
            if stored is not None:
                found[stored.item()] = stored
    return has_fill, tuple(found.values())


def _parsed(given: Array) -> Array:
    values = []
    for text in map(str, given.tolist()):
        try:
            values.append(float(text))
        except ValueError:
            continue
    return np.array(values)


def _as_stored(
    item: np.generic, raw: np.dtype[np.generic], viewed: np.dtype[np.generic] | None, seen: np.dtype[np.generic]
) -> np.generic | None:
    """Return a fill value as a scalar of the dtype that is compared with, None if no stored value equals it.

    ``viewed`` is given for a fill value that was written in the stored dtype and is viewed like the data.
    """
    exact = item.item()
    if seen.kind == "f":
        with np.errstate(over="ignore"):
            value = np.array(exact, seen)
        same = bool(value == item)
        return value.reshape(1)[0] if same else None
    if not np.isfinite(exact) or exact != int(exact):
        return None
    for dtype in (seen,) if viewed is None else (raw, seen):
        limits = np.iinfo(dtype.str)
        if limits.min <= exact <= limits.max:
            return np.array(int(exact), dtype).view(seen).reshape(1)[0]
    return None


def role_of(layout: ArrayLayout) -> str | None:
    """Say which axis a coordinate is, "T", "Z", "Y", "X" or None, by CF's attributes, then common names."""
    attributes = {k: v.strip() for k, v in layout.attributes.items() if isinstance(v, str)}
    axis = attributes.get("axis", "").upper()
    if axis in ("T", "Z", "Y", "X"):
        return axis
    standard = attributes.get("standard_name", "").lower()
    if standard in _STANDARD_NAMES:
        return _STANDARD_NAMES[standard]
    if standard.startswith(("atmosphere_", "ocean_")) and standard.endswith("_coordinate"):
        return "Z"
    units = attributes.get("units", "")
    if _NORTH.match(units):
        return "Y"
    if _EAST.match(units):
        return "X"
    if _SINCE.match(units):
        return "T"
    if attributes.get("positive", "").lower() in ("up", "down"):
        return "Z"
    return role_of_name(layout.name)


def is_time(attributes: Mapping[str, object]) -> bool:
    """Whether numbers count time since a date."""
    return _SINCE.match(str(attributes.get("units", ""))) is not None


def tells_time(layout: ArrayLayout) -> bool:
    """Whether values are times: ``datetime64``, or numbers that count from a date."""
    return layout.dtype.kind == "M" or (layout.dtype.kind in "iuf" and is_time(layout.attributes))


def role_of_name(name: str) -> str | None:
    """Say which axis an array or dimension describes by its name alone."""
    return _NAMES.get(name.rsplit("/", 1)[-1].lower())


def names_time(dim: str) -> bool:
    """Return True if a dimension's name alone says that it is time."""
    return _NAMES.get(dim.lower()) == "T" or dim.lower() in _TIMES


def is_coordinate(layout: ArrayLayout, arrays: Mapping[str, ArrayLayout]) -> bool:
    """Say whether an array locates values: named like its one dim, or by ``coordinates`` or ``bounds`` of its group."""
    return layout.dims == (layout.name.rpartition("/")[2],) or named_as(layout, arrays) is not None


def named_as(layout: ArrayLayout, arrays: Mapping[str, ArrayLayout]) -> str | None:
    """Return by which attribute an array of its group names it, ``coordinates`` or ``bounds``; None if none does."""
    group, _, base = layout.name.rpartition("/")
    for name, other in arrays.items():
        if name.rpartition("/")[0] != group and group:
            continue
        for key in ("coordinates", "bounds"):
            text = other.attributes.get(key)
            if isinstance(text, str) and (base in text.split() or layout.name in text.split()):
                return key
    return None
