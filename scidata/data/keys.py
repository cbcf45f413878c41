"""Sample keys (times, numbers or texts) and how samples of several data sets match by them. Pure arithmetic."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.checks import nanoseconds, optional_module
from scidata.core.types import BoolArray, IntArray
from scidata.errors import ConfigError
from scidata.grids.labels import label_text

Keys: TypeAlias = npt.NDArray[Any]

_NS = np.array([np.iinfo(np.int64).min + 1, np.iinfo(np.int64).max], "M8[ns]").astype("M8[s]")  # without NaT
_ALIASES = {"gregorian": "standard", "365_day": "noleap", "366_day": "all_leap"}
_REFORM = -12_219_292_800_000_000  # µs from 1970 back to 1582-10-15: from then on both calendars agree
_ALIKE = {"standard", "proleptic_gregorian"}


def as_keys(values: npt.ArrayLike) -> Keys:
    """Convert times to ``datetime64[ns]`` if they are in its range, durations to ``timedelta64[ns]``, text to str.

    Other times stay as they are: ``datetime64`` of coarser units, objects of cftime.
    """
    keys = np.asarray(values)
    if keys.dtype.kind in "OT" and len(keys):
        for kind, dtype in ((str, "U"), (datetime.datetime, "M8[us]")):
            if all(isinstance(value, kind) for value in keys.tolist()):
                keys = keys.astype(dtype)
    if keys.dtype.kind == "M":
        seconds = keys[~np.isnat(keys)].astype("M8[s]")
        return keys.astype("M8[ns]") if ((seconds > _NS[0]) & (seconds < _NS[1])).all() else keys
    if keys.dtype.kind == "m":
        return keys.astype("m8[ns]")
    if other := [value for value in keys.tolist() if not hasattr(value, "calendar")] if keys.dtype.kind == "O" else []:
        raise ConfigError(f"keys of samples are times, numbers or texts, not {type(other[0]).__name__}")
    return np.char.decode(keys, "utf-8", "backslashreplace") if keys.dtype.kind == "S" else keys


def joined_keys(parts: Sequence[Keys]) -> Keys:
    """Concatenate keys; raise if the data sets' keys have no common kind."""
    kinds = {_kind(part): part for part in parts if len(part)}
    if len(kinds) > 1:
        raise ConfigError(f"keys of data sets are {' and '.join(sorted(kinds))}, which do not compare")
    return np.concatenate(parts)


def _kind(keys: Keys) -> str:
    if keys.dtype.kind == "O":
        return f"times of the calendar {_calendar(keys)!r}"
    return {"M": "times", "m": "lengths of time", "U": "texts"}.get(keys.dtype.kind, "numbers")


def _calendar(keys: Keys) -> str:
    return " and ".join(sorted({_ALIASES.get(key.calendar, key.calendar) for key in keys}))


# -- as numbers that compare -----------------------------------------------------------------------------------------


class _Scale(NamedTuple):
    """Keys of all data sets as numbers (times in multiples of some nanoseconds) or as texts."""

    values: dict[str, Keys]
    unit: int | None
    is_text: bool

    def length(self, name: str, value: object) -> Any:
        """Convert an offset or a tolerance to the keys' unit."""
        if self.is_text:
            raise ConfigError(f"{name}={value!r}: keys are texts, between which there is no distance; leave it out")
        if self.unit is not None:
            return nanoseconds(name, value) // self.unit
        if isinstance(value, int | float | np.integer | np.floating) and np.isfinite(value):
            return value
        raise ConfigError(f"{name}={value!r}: keys are numbers, and so are distances between them")


def _comparable(keys: Mapping[str, Keys]) -> _Scale:
    """Convert the keys of all data sets to one form.

    Raises ConfigError: times, numbers and texts do not compare, nor do times of calendars that have other days.
    """
    kinds = {name: "times" if (kind := _kind(own)).startswith("times") else kind for name, own in keys.items()}
    (first, kind), *others = kinds.items()
    for name, other in others:
        if other != kind and len(keys[name]) and len(keys[first]):
            raise ConfigError(
                f"join: keys of {first!r} are {kind}, and keys of {name!r} are {other}, which do not compare; "
                f"name others, or give a function that makes them: on={{{name!r}: lambda ds: …}}"
            )
    if kind != "times" or all(own.dtype == np.dtype("M8[ns]") for own in keys.values()):
        whole = {name: own.astype(np.int64) if own.dtype.kind in "Mmbu" else own for name, own in keys.items()}
        return _Scale(whole, None if kind in ("numbers", "texts") else 1, is_text=kind == "texts")
    return _Scale(_microseconds(keys), 1000, is_text=False)


def _microseconds(keys: Mapping[str, Keys]) -> dict[str, Keys]:
    """Return times as µs since 1970, ``(num,)`` int64; all calendars must have the same days."""
    calendars = {name: _calendar(own) if own.dtype.kind == "O" else "proleptic_gregorian" for name, own in keys.items()}
    found = {}
    for name, own in keys.items():
        if own.dtype.kind == "O" and len(own):
            cftime = optional_module("cftime", f"join: times of the calendar {calendars[name]!r}", "xarray")
            since = "microseconds since 1970-01-01"
            found[name] = np.asarray(cftime.date2num(own, since, calendars[name]), np.int64)
        else:
            found[name] = own.astype("M8[us]").astype(np.int64)
    several = {calendars[name]: name for name in keys if len(keys[name])}
    if len(several) > 1 and not (several.keys() <= _ALIKE and all((own >= _REFORM).all() for own in found.values())):
        shown = " and ".join(f"{calendar!r} ({name!r})" for calendar, name in sorted(several.items()))
        raise ConfigError(
            f"join: times of the calendars {shown} do not compare: a day of one is none of the other's; give a "
            "function that makes keys which do, on={…: lambda ds: …}"
        )
    return found


# -- which samples belong together -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """Which samples of several data sets have the same key.

    - ``rows``: by data set, ``(num,)`` int64: its sample of each key, -1 where it has none.
    - ``keys``: ``(num,)``: those of the first data set, without its offset.
    """

    rows: Mapping[str, IntArray]
    keys: Keys
    texts: tuple[str, ...]


def match_keys(
    keys: Mapping[str, Keys], *, keep_all: bool, at: Mapping[str, object], tolerance: object | None
) -> Match:
    """Find the samples of the other data sets that have the keys of the first one, in its order.

    - ``keep_all``: keep keys of the first that others lack; else only keys that all have.
    - ``at``: offsets by data set: take its sample of ``key + offset``.
    - ``tolerance``: largest difference of matching keys; the nearest counts, the lower one of two equally near. None:
      keys must be equal.

    Raises ConfigError: keys that do not compare; a key that several samples of another data set than the first have.
    """
    scale = _comparable(keys)
    offsets = {name: scale.length(f"at[{name!r}]", given) for name, given in at.items()}
    reach = None if tolerance is None else scale.length("tolerance", tolerance)
    if reach is not None and reach < 0:
        raise ConfigError(f"tolerance={tolerance!r}: must not be negative")
    values = {name: own - offsets[name] if name in offsets else own for name, own in scale.values.items()}
    first, *others = keys
    known = {name: ~_is_none(own) for name, own in keys.items()}
    rows = {first: np.arange(len(keys[first]))}
    for name in others:
        rows[name], places = np.full(len(keys[first]), -1), np.flatnonzero(known[name])
        rows[name][known[first]] = _rows_of(name, values[first][known[first]], keys[name], values[name], places, reach)
    has_all = np.all([own >= 0 for own in rows.values()], axis=0)
    kept = known[first] & (has_all | keep_all)
    chosen = {name: own[kept] for name, own in rows.items()}
    texts = tuple(_left_out(name, keys[name], known[name], chosen[name]) for name in keys)
    lacking = [_lacking(name, keys[first], known[first] & (rows[name] < 0)) for name in others]
    return Match(rows=chosen, keys=_moved(keys[first][kept], at.get(first)), texts=(*texts, *filter(None, lacking)))


def _rows_of(name: str, wanted: Keys, keys: Keys, values: Keys, places: IntArray, reach: float | None) -> IntArray:
    """Return the sample that has each wanted key, or the nearest within reach; -1 if there is none."""
    order = places[np.argsort(values[places], kind="stable")]
    if not len(order):
        return np.full(len(wanted), -1)
    ordered = values[order]
    after = np.searchsorted(ordered, wanted)
    before, after = np.maximum(after - 1, 0), np.minimum(after, len(order) - 1)
    if reach is None:
        found, hits = after, ordered[after] == wanted
    else:
        below, above = np.abs(ordered[before] - wanted), np.abs(ordered[after] - wanted)
        found, hits = np.where(below <= above, before, after), np.minimum(below, above) <= reach
    again = np.append(ordered[1:] == ordered[:-1], False)
    for place in np.flatnonzero(hits & (again[found] | np.roll(again, 1)[found]))[:1]:
        twice = order[ordered == ordered[found[place]]]
        raise ConfigError(
            f"join: {len(twice)} samples of {name!r} have the key {label_text(keys[twice[0]])}: {twice[:4].tolist()}; "
            "which of them is meant? Take some of them (scidata.subset), or put that data set first: keys of the first "
            "may come again"
        )
    return np.where(hits, order[found], -1)


def _is_none(keys: Keys) -> BoolArray:
    return keys != keys if keys.dtype.kind in "fMm" else np.zeros(len(keys), np.bool_)


def _moved(keys: Keys, offset: object) -> Keys:
    """Subtract its offset from the first data set's keys."""
    if offset is None:
        return keys
    if keys.dtype.kind not in "MmO":
        moved: Keys = keys - np.asarray(offset)
        return moved
    span = np.timedelta64(nanoseconds("at", offset), "ns")
    whole = span.astype("m8[us]")
    return keys - (whole.item() if keys.dtype.kind == "O" else span if "[ns]" in keys.dtype.str else whole)


def _left_out(name: str, keys: Keys, known: BoolArray, rows: IntArray) -> str:
    """Describe how many samples of a data set are left out, and the key of the first."""
    unused = np.ones(len(keys), np.bool_)
    unused[rows[rows >= 0]] = False
    num = int(unused.sum())
    text = f"{name!r}: {len(keys) - num} of {len(keys)} samples"
    if num:
        text += f"; {num} left out, the first {label_text(keys[np.flatnonzero(unused)[0]])}"
    lost = int((~known).sum())
    return text + (f", {lost} of them without a key" if lost else "")


def _lacking(name: str, keys: Keys, lacks: BoolArray) -> str:
    """Describe how many keys of the first data set another lacks, and the first of them."""
    num = int(lacks.sum())
    some = "the key" if num == 1 else f"{num} keys, the first"
    return f"no sample of {name!r} for {some} {label_text(keys[lacks][0])}" if num else ""
