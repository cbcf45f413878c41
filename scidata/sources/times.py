"""Times that count from a date, as ``datetime64``: whole numbers of plain units here, all others by xarray.

Columns are decoded by the line through two of their times.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.checks import optional_module
from scidata.core.types import AnyArray, ArrayLayout, BoolArray, IntArray
from scidata.errors import CorruptDataError, FieldMismatchError, UnsupportedFormatError, visible
from scidata.sources.cf import decoding_of, is_time

_SINCE = re.compile(
    r"\s*([a-z]+)\s+since\s+(\d{4})-(\d\d?)-(\d\d?)(?:[T ](\d\d?):(\d\d?)(?::(\d\d?)(?:\.0*)?)?)?\s*(?:Z|UTC)?\s*",
    re.IGNORECASE,
)
_UNITS = {"day": 86400 * 10**9, "hour": 3600 * 10**9, "minute": 60 * 10**9, "second": 10**9, "millisecond": 10**6}
_UNITS |= {name: _UNITS[unit] for name, unit in {"d": "day", "h": "hour", "hr": "hour", "min": "minute"}.items()}
_UNITS |= {"sec": 10**9, "s": 10**9, "microsecond": 1000, "nanosecond": 1}
_GREGORIAN = ("standard", "gregorian", "proleptic_gregorian")


def decode_times(
    path: str, name: str, attributes: Mapping[str, Any], values: npt.NDArray[Any], remedy: str
) -> npt.NDArray[Any]:
    """Return numbers that count since a date as ``datetime64``, or objects of cftime in the calendars of models."""
    said = {key: str(attributes[key]) for key in ("units", "calendar") if key in attributes}
    if (plain := _plain(values, **said)) is not None:
        return plain
    xarray = optional_module("xarray", f"{path}: times of {name!r} are decoded by xarray", "xarray")
    try:
        decoded = xarray.decode_cf(xarray.Dataset(coords={name: (name, values, said)}))
        found: npt.NDArray[Any] = np.asarray(decoded[name].values)
    except (ValueError, OverflowError, ImportError) as e:
        raise UnsupportedFormatError(f"{path}: {_not_decoded(name, said, str(e.__cause__ or e))}; {remedy}") from e
    return found


def _plain(values: npt.NDArray[Any], units: str = "", calendar: str = "standard") -> npt.NDArray[Any] | None:
    """Decode whole numbers since a date on which all calendars of ``datetime64`` agree; xarray takes 1 s to load."""
    found = _SINCE.fullmatch(units)
    unit = None if found is None else _UNITS.get(found[1].lower()) or _UNITS.get(found[1].lower().removesuffix("s"))
    if found is None or unit is None or values.dtype.kind not in "iu" or calendar.lower() not in _GREGORIAN:
        return None
    try:
        year, month, day, hour, minute, second = [int(part) for part in found.groups("0")[1:]]
        start = datetime(year, month, day, hour, minute, second)
    except ValueError:
        return None
    most = max(-int(values.min(initial=0)), int(values.max(initial=0)))
    if not 1700 <= year <= 2200 or most * unit > 2**62:
        return None
    return np.asarray(np.datetime64(start, "ns") + values.astype(np.int64) * np.timedelta64(unit, "ns"))


def _not_decoded(name: str, said: Mapping[str, str], why: str) -> str:
    """Name the times that cannot be decoded, and the reason."""
    units, calendar = said.get("units", ""), said.get("calendar")
    if re.match(r"\s*(months?|years?)\b", units, re.IGNORECASE):
        reason = "whose length is not the same everywhere in this calendar"
    elif re.search(r"since\s+0+-", units):
        reason = "and there is no year 0 in this calendar"
    else:
        reason = f"which xarray and cftime do not decode ({visible(' '.join(why.split())[:120])})"
    named = "" if calendar is None else f" in calendar {calendar!r}"
    return visible(f"times of {name!r} count {units!r}{named}, {reason}")


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeColumn:
    """A column of times as int64: nanoseconds since 1970, or, where they are integers without units, these.

    - ``calendar``: that of the nanoseconds, where it has other days than ``datetime64``; else empty.
    - ``layout``: as stored: ``(N,)``, or ``(N, 1)``.
    - ``origin``, ``step``: of stored value ``-shift``, and from one to the next.
    - ``shift``: added to stored values, which may count from a date that ``datetime64`` in nanoseconds lacks.
    """

    layout: ArrayLayout
    origin: int = 0
    step: int = 1
    shift: int = 0
    is_time: bool = True
    missing: tuple[Any, ...] = ()
    calendar: str = ""

    def counts(self, values: AnyArray) -> tuple[IntArray, BoolArray]:
        """Return stored values as counts, and which of them are times; others are 0."""
        if values.dtype.kind == "M":
            coarse = values.astype("M8[s]").astype(np.int64)
            far = np.iinfo(np.int64).max // 10**9
            valid = (-far < coarse) & (coarse < far)  # which leaves out NaT
            return np.where(valid, values, np.datetime64(0, "s")).astype("M8[ns]").astype(np.int64), valid
        limit = (np.iinfo(np.int64).max - abs(self.origin)) / self.step
        near = np.abs(values.astype(np.float64) + self.shift) < limit
        valid = np.isfinite(values) & near & ~np.isin(values, self.missing)
        sound = np.where(valid, values, values.dtype.type(0))
        whole = np.floor(sound).astype(np.int64)  # apart, since the sum has more digits than a float
        parts = (
            np.rint((sound - whole).astype(np.float64) * self.step).astype(np.int64) if sound.dtype.kind == "f" else 0
        )
        return np.where(valid, self.origin + (whole + self.shift) * self.step + parts, 0), valid

    def checked(self, values: AnyArray, first: int) -> IntArray:
        """Return stored values, of rows from ``first`` on, as counts. Raises CorruptDataError: a row has no time."""
        values = values.reshape(-1)
        counts, valid = self.counts(values)
        if not valid.all():
            row = int(np.argmin(valid))
            raise CorruptDataError(
                f"{self.layout.store}: row {first + row} has no time: {self.layout.name!r} is {values[row]} there; "
                "leave such rows, and those outside of the years 1678 to 2261, out of a copy"
            )
        return counts

    def labels(self, counts: IntArray) -> AnyArray:
        """Return counts as ``datetime64``, objects of cftime, or as they are if they are no times."""
        if self.calendar:
            cftime = optional_module("cftime", f"times of the calendar {self.calendar!r}", "xarray")
            return np.asarray(cftime.num2date(counts // 1000, "microseconds since 1970-01-01", self.calendar), object)
        return counts.astype("M8[ns]") if self.is_time else counts

    def label(self, count: int) -> str:
        """Return a count as text."""
        return str(self.labels(np.array([count]))[0]).removesuffix(".000000000").replace(" ", "T")


def time_column(layout: ArrayLayout) -> TimeColumn:
    """Describe a column of times by its metadata."""
    where = f"{layout.store}: time {layout.name!r}"
    if layout.shape[1:] not in ((), (1,)) or not layout.shape:
        raise FieldMismatchError(f"{where} has shape {layout.shape}; one time of each row was expected")
    if layout.dtype.kind == "M":
        return TimeColumn(layout=layout)
    decoding = None if layout.dtype.kind not in "iuf" else decoding_of(layout)
    packed = decoding is not None and (decoding.scale is not None or decoding.offset is not None)
    if layout.dtype.kind not in "iuf" or packed or (layout.dtype.kind == "f" and not is_time(layout.attributes)):
        raise FieldMismatchError(
            f"{where} of dtype {layout.dtype} and units {layout.attributes.get('units', '')!r} tells no times: "
            "expected datetime64, numbers with units such as 'seconds since 1970-01-01', or integers"
        )
    missing = () if decoding is None else decoding.fill_values
    if not is_time(layout.attributes):
        return TimeColumn(layout=layout, is_time=False, missing=missing)
    remedy = "write datetime64, or mend the attributes of a copy"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unable to decode time axis")  # of xarray: the date that is counted from
        ends = decode_times(layout.store, layout.name, layout.attributes, np.array([0, 1]), remedy)
    if ends.dtype.kind == "M":
        origin, one = ends.astype("M8[ns]").astype(np.int64).tolist()
        return TimeColumn(layout=layout, origin=origin, step=one - origin, missing=missing)
    first, second = ends.tolist()  # of cftime; a date before 1678, of times that may be later
    epoch = first.replace(year=1970, month=1, day=1, hour=0, minute=0, second=0, microsecond=0)
    origin, step = (1000 * (span // timedelta(microseconds=1)) for span in (first - epoch, second - first))
    calendar = "" if first.calendar in _GREGORIAN else first.calendar
    shift = origin // step
    return TimeColumn(layout=layout, origin=origin % step, step=step, shift=shift, missing=missing, calendar=calendar)
