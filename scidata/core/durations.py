"""Spans of time as users write them: ``"6h"``, ``"30 min"``, ``timedelta`` objects."""

from __future__ import annotations

import datetime
import re
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from scidata.errors import ConfigError

#: A span of time; a number, in the units of the keys, where these are no times.
Duration: TypeAlias = str | datetime.timedelta | np.timedelta64 | int | float

_SPAN = re.compile(r"\s*([+-]?\d+(?:\.\d+)?|)\s*([a-z]+)\s*", re.IGNORECASE)
_NANOSECONDS = {
    **dict.fromkeys(("ns", "nanosecond"), 1),
    **dict.fromkeys(("us", "µs", "microsecond"), 10**3),
    **dict.fromkeys(("ms", "millisecond"), 10**6),
    **dict.fromkeys(("s", "sec", "second"), 10**9),
    **dict.fromkeys(("min", "minute"), 60 * 10**9),
    **dict.fromkeys(("h", "hr", "hour"), 3600 * 10**9),
    **dict.fromkeys(("d", "day"), 86400 * 10**9),
    **dict.fromkeys(("w", "week"), 7 * 86400 * 10**9),
}


def nanoseconds(name: str, value: object) -> int:
    """Return a span of time in nanoseconds; ``name`` is that of the argument.

    Raises ConfigError: it is none: a number without a unit, a month or a year, which have no one length, or a part of a
    nanosecond.
    """
    if isinstance(value, datetime.timedelta):
        return (value // datetime.timedelta(microseconds=1)) * 1000
    if isinstance(value, np.timedelta64) and np.datetime_data(value)[0] not in ("Y", "M", "generic"):
        return int(value.astype("m8[ns]").astype(np.int64))
    match = _SPAN.fullmatch(value) if isinstance(value, str) else None
    unit = "" if match is None else match[2].lower()
    scale = _NANOSECONDS.get(unit, _NANOSECONDS.get(unit.removesuffix("s"), 0))
    span = Fraction(match[1] or 1) * scale if match is not None else Fraction()
    if not scale or span.denominator != 1:
        raise ConfigError(
            f"{name}={value!r}: expected a span of time in weeks, days, hours or less, such as '6h', '30min' or a "
            "timedelta"
        )
    return int(span)
