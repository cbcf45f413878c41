"""Reads JSON objects that may say anything: each value is checked as it is taken, and errors name its key. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NoReturn, TypeAlias, TypeGuard, TypeVar

from scidata.errors import CorruptDataError

MOST = 2**63 - 1  # rows, offsets and sizes are int64
_DEEPEST = 32  # of attributes and settings inside each other

T = TypeVar("T")


def damaged(where: str, problem: str) -> CorruptDataError:
    """Return the error about a problem somewhere in a file."""
    return CorruptDataError(f"{where}: {problem}; it is damaged: copy the store again, or write it again")


class Entry:
    """A JSON object that is being read; each method takes the value of a key, if it is of the kind that it returns.

    - ``where``, ``key``: the file and the sample, and the way to the object in it, for messages.
    - ``known``, ``optional``: all keys, and those of them that may be missing; of ``optional`` None all may, and others
      are taken, too.

    Raises CorruptDataError: a key that is missing or not known, or a value of another kind.
    """

    __slots__ = ("data", "key", "where")

    def __init__(
        self,
        data: Any,
        where: str,
        key: str,
        known: Collection[str] = (),
        optional: Collection[str] | None = (),
    ) -> None:
        self.data, self.where, self.key = data, where, key
        if not isinstance(data, dict):
            raise damaged(where, f"{key or 'it'} is {shown(data)}, but a JSON object was expected")
        every = set(known)
        if optional is None or data.keys() == every:
            return
        if missing := every - data.keys() - set(optional):
            self.fail(min(missing), "is missing")
        if unknown := data.keys() - every:
            self.fail(min(unknown), "is no key that this scidata knows here")

    def values(self, readers: Readers) -> dict[str, Any]:
        """Return the values of those keys that are there, each as its reader takes it."""
        return {key: read(self, key) for key, read in readers.items() if key in self.data}

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise for a key that has a problem."""
        path = f"{self.key}[{ascii(key)[:80]}]" if self.key else ascii(key)[:80]
        raise damaged(self.where, f"{path} {problem}")

    def wrong(self, key: str, expected: str) -> NoReturn:
        """Raise for a key that has another value than was expected."""
        self.fail(key, f"is {shown(self.data[key])}, but {expected} was expected")

    def _checked(self, key: str, fits: Callable[[object], bool], expected: str) -> Any:
        value = self.data[key]
        if not fits(value):
            self.wrong(key, expected)
        return value

    def _object(self, key: str) -> dict[str, Any]:
        return self._checked(key, lambda value: isinstance(value, dict), "a JSON object")

    def _list(self, key: str, fits: Callable[[object], bool], expected: str) -> tuple[Any, ...]:
        value = self.data[key]
        if not isinstance(value, list) or not all(map(fits, value)):
            self.wrong(key, expected)
        return tuple(value)

    def text(self, key: str) -> str:
        """Return text, which may name things."""
        value = self.data[key]
        if not isinstance(value, str) or "\0" in value:
            self.wrong(key, "text")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return text or None."""
        return None if self.data[key] is None else self.text(key)

    def flag(self, key: str) -> bool:
        """Return True or False."""
        return bool(self._checked(key, lambda value: isinstance(value, bool), "true or false"))

    def count(self, key: str) -> int:
        """Return a number of things: no less than none, no more than files can hold."""
        value = self.data[key]
        if not is_count(value):
            self.wrong(key, "a number of things")
        return int(value)

    def one_of(self, key: str, known: tuple[T, ...]) -> T:
        """Return one of some values."""
        fits = lambda value: not isinstance(value, list | dict) and value in known  # noqa: E731
        return self._checked(key, fits, " or ".join(map(repr, known)))

    def counts(self, key: str) -> tuple[int, ...]:
        """Return a shape, or other list of numbers of things."""
        value = self.data[key]
        numbers = isinstance(value, list) and {*map(type, value)} <= {int}
        if not numbers or (value and not 0 <= min(value) <= max(value) <= MOST):
            self.wrong(key, "a list of numbers of things")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts."""
        return self._list(key, lambda x: isinstance(x, str) and "\0" not in x, "a list of texts")

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers."""
        return self._list(key, is_number, "a list of numbers")

    def free(self, key: str) -> dict[str, Any]:
        """Return an object that users filled: attributes, settings."""
        value = self._object(key)
        if not _is_shallow(value, _DEEPEST):
            self.fail(key, f"is nested more than {_DEEPEST} deep")
        return value

    def each(self, key: str, read: Callable[[object, str, str], T]) -> dict[str, T]:
        """Return an object's entries, read by ``read(entry, where, key)``; its keys name arrays or entities."""
        found = self._object(key).items()
        return {name: read(item, self.where, f"{key!r}[{ascii(name)[:80]}]") for name, item in found}


def shown(value: object) -> str:
    """Return a value for a message, without anything that could be harmful to show."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > MOST:
        return f"an integer of {value.bit_length()} bits"
    return ascii(value[:40] if isinstance(value, str) else value)


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is a number of things."""
    return type(value) is int and 0 <= value <= MOST


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number."""
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) <= MOST)


def _is_shallow(value: object, depth: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(depth > 0 and _is_shallow(item, depth - 1) for item in items)


#: What takes the value of each key of an object.
Readers: TypeAlias = dict[str, Callable[[Entry, str], Any]]
