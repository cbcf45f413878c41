"""Type checks of arguments; each error names the argument and the type that it takes.

Python's own duck typing lets many through: a string is a sequence of names, ``True`` an index, 0.5 rounds to 0.
"""

from __future__ import annotations

import datetime
import importlib
import math
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from types import ModuleType
from typing import SupportsIndex, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from scidata.core.install import install_hint
from scidata.core.memory import empty
from scidata.core.types import AnyArray, Empty, IntArray
from scidata.errors import ConfigError, MissingDependencyError, TooLargeError, near_matches


def as_index(index: SupportsIndex) -> int:
    """Return a sample's index as Python's integer."""
    try:
        return operator.index(index)
    except TypeError:
        raise TypeError(
            f"samples are numbered by integers, not by {index!r}; scidata.subset(dataset, indices) chooses several"
        ) from None


def sample_number(index: SupportsIndex, count: int) -> int:
    """Return a sample's index, counted from the front; IndexError if it is out of range."""
    number = as_index(index)
    if not -count <= number < count:
        raise IndexError(f"sample {number} is out of range: there are {count} samples")
    return number % count


def is_int(value: object) -> bool:
    """Return True if a value is an integer, Python's or NumPy's, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_int(name: str, value: object, *, least: int | None = None) -> int:
    """Return an integer, Python's or NumPy's, as Python's; refuse bools, floats and text."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{name}={value!r}: expected an integer, not {type(value).__name__}")
    if least is not None and value < least:
        raise ConfigError(f"{name} must {f'be at least {least}' if least else 'not be negative'}, not {value}")
    return int(value)


def check_optional_int(name: str, value: object, *, least: int | None = None) -> int | None:
    """Return an integer, or None if it is None."""
    return None if value is None else check_int(name, value, least=least)


def bytes_of(text: str) -> int | None:
    """Parse a size, ``"500G"``, ``"1.5TiB"`` or a number, in powers of 1024; None if it is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    number = 0 if found is None else int(float(found[1]) * 1024 ** " KMGTP".index(found[2].upper() or " "))
    return number or None


def check_bytes(name: str, value: object) -> int:
    """Return a size in bytes, given as a number or a text such as ``"8G"``."""
    if not isinstance(value, str):
        return check_int(name, value, least=1)
    if (number := bytes_of(value)) is None:
        raise ConfigError(f"{name}={value!r} is no number of bytes; expected '8G', '1.5T', or a number")
    return number


def check_flag(name: str, value: object) -> None:
    """Raise unless a value is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}={value!r}: expected True or False")


def names_of(name: str, value: object) -> list[str]:
    """Return one name or several as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence | set | frozenset | np.ndarray) or isinstance(value, bytes):
        raise ConfigError(f"{name}={value!r}: expected a name or a list of names")
    return list(value)


def check_steps(steps: object, what: str = "steps") -> tuple[int, ...]:
    """Return ``steps`` of a sample or field as integers."""
    if isinstance(steps, str | Mapping) or not isinstance(steps, Iterable):
        raise ConfigError(f"{what}={steps!r}: expected a tuple of offsets, such as (0,) or (0, 1)")
    found = tuple(check_int(what, step) for step in steps)
    if not found:
        raise ConfigError(f"{what} is empty; (0,) reads the sample itself")
    return found


def check_field_steps(steps: object) -> None:
    """Check ``steps``, for all fields or by field."""
    if not isinstance(steps, Mapping):
        check_steps(steps)
        return
    for name, each in steps.items():
        if not isinstance(name, str):
            raise ConfigError(f"steps names {name!r}: expected fields by name, such as {{'u': (-1, 0, 1)}}")
        check_steps(each, f"steps of {name!r}")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise unless a value is one of the choices; the error names near ones."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}{near_matches(value, choices)}")


def check_mapping(name: str, value: object, example: str) -> None:
    """Raise unless a value is a mapping or None."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r}: expected a mapping, such as {example}")


def check_function(name: str, value: object) -> None:
    """Raise unless a value is callable or None."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name}={value!r}: expected a function, not {type(value).__name__}")


def refuse(given: Mapping[str, bool], why: str) -> None:
    """Raise if arguments are given that have no effect here."""
    for name, present in given.items():
        if present:
            raise ConfigError(f"{name}: {why}; leave it out")


def optional_module(name: str, what: str, extra: str) -> ModuleType:
    """Import an optional package."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise MissingDependencyError(f"{what}; {install_hint(extra)}") from e


#: Exceptions of a failed allocation, also of one beyond the address space or mmap's limit.
NO_MEMORY = (MemoryError, ValueError, OverflowError, OSError)


def allocate(what: str, shape: tuple[int, ...], dtype: npt.DTypeLike, empty: Empty = empty) -> AnyArray:
    """Return an uninitialised array; ``what`` names its content in errors."""
    try:
        return empty(shape, dtype)
    except NO_MEMORY as e:
        raise too_large(what, shape, dtype) from e


def too_large(what: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> TooLargeError:
    """Return the error to raise when an allocation failed with one of ``NO_MEMORY``."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return TooLargeError(
        f"{what}: {shape} of {np.dtype(dtype)} take {nbytes} bytes, more than can be allocated; its metadata are "
        "damaged, or read less of it at once: more ranks, fewer fields, isel="
    )


_Nbytes = TypeVar("_Nbytes", int, IntArray)


def largest_encoded(nbytes: _Nbytes) -> _Nbytes:
    """Return the largest plausible encoded size of a chunk of ``nbytes``, or of each of several."""
    return 2 * nbytes + (64 << 10)


#: A time span, or a number in the keys' units if keys are not times.
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
    """Return a time span in nanoseconds; ``name`` is the argument's."""
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
