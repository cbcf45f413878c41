"""Keys of samples: times, numbers or texts, in a form in which those of several data sets compare. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.errors import ConfigError

Keys: TypeAlias = npt.NDArray[Any]

_NS = np.array([np.iinfo(np.int64).min + 1, np.iinfo(np.int64).max], "M8[ns]").astype("M8[s]")  # without NaT


def as_keys(values: Keys) -> Keys:
    """Return times as ``datetime64[ns]`` where that reaches them, lengths of time as ``timedelta64[ns]``; text as str.

    Other times stay as they are: ``datetime64`` of coarser units, objects of cftime.
    """
    if values.dtype.kind == "M":
        seconds = values[~np.isnat(values)].astype("M8[s]")
        return values.astype("M8[ns]") if ((seconds > _NS[0]) & (seconds < _NS[1])).all() else values
    if values.dtype.kind == "m":
        return values.astype("m8[ns]")
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "backslashreplace")
    if values.dtype.kind in "OT" and all(isinstance(value, str) for value in values.tolist()):
        return values.astype(str)
    return values


def joined_keys(parts: Sequence[Keys]) -> Keys:
    """Return keys one after the other; of data sets that have no common kind of key, an error."""
    kinds = {_kind(part): part for part in parts if len(part)}
    if len(kinds) > 1:
        raise ConfigError(f"keys of data sets are {' and '.join(sorted(kinds))}, which do not compare")
    return np.concatenate(parts)


def _kind(keys: Keys) -> str:
    """Return what keys are, in words."""
    if keys.dtype.kind == "O":
        return f"times of the calendar {getattr(keys[0], 'calendar', type(keys[0]).__name__)!r}"
    return {"M": "times", "m": "lengths of time", "U": "texts"}.get(keys.dtype.kind, "numbers")
