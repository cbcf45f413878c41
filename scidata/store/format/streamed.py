"""JSON objects of which one key holds a long list, whose items are parsed one at a time.

A document that is made to do harm takes twenty times its size as Python's objects (``[[],[],[],...``). So nothing is
parsed at once that is larger than a bound, and of the list's items no more than where they begin is kept.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from typing import NoReturn

#: Characters of a value of one key, or of an item: some thousand arrays of a sample.
MAX_VALUE = 8 << 20
_SPACE = re.compile(r"[ \t\n\r]*")


def refuse_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN and infinity, which Python's parser of JSON takes."""
    raise ValueError(f"{constant} is no JSON")


_decoder = json.JSONDecoder(parse_constant=refuse_constant)


class Items:
    """The items of a list in a text, each parsed when it is asked for: as objects they take several times as much."""

    def __init__(self, text: str, starts: array[int]) -> None:
        self._text, self._starts = text, starts

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[object]:
        return (_decoder.raw_decode(self._text, start)[0] for start in self._starts)


class _Reader:
    """Goes through a text."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self._window, self._begin = text[: 2 * MAX_VALUE], 0  # a part of the text, and where that begins

    def peek(self) -> str:
        """Return the next character that is no white space; nothing at the end."""
        found = _SPACE.match(self.text, self.at)
        self.at = self.at if found is None else found.end()
        return self.text[self.at : self.at + 1]

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            raise ValueError(f"{expected!r} expected at character {self.at}")
        self.at += 1

    def value(self) -> object:
        self.peek()
        if self.at - self._begin > MAX_VALUE:
            self._window, self._begin = self.text[self.at : self.at + 2 * MAX_VALUE], self.at
        value, end = _decoder.raw_decode(self._window, self.at - self._begin)
        self.at = self._begin + end
        return value

    def members(self, key: str) -> dict[str, object]:
        """Go through an object; the list that is its ``key`` comes as items."""
        found: dict[str, object] = {}
        self.take("{")
        while self.peek() != "}":
            if found:
                self.take(",")
            if self.peek() != '"':
                raise ValueError(f"a key expected at character {self.at}")
            name = str(self.value())
            self.take(":")
            found[name] = (self.items() or []) if name == key and self.peek() == "[" else self.value()
        self.take("}")
        return found

    def items(self) -> Items:
        """Go through a list."""
        starts = array("q")
        self.take("[")
        while self.peek() != "]":
            if starts:
                self.take(",")
                self.peek()
            starts.append(self.at)
            if not self.value():
                raise ValueError(f"an item that says something expected at character {starts[-1]}")
        self.take("]")
        return Items(self.text, starts)


def parse_object(text: str, key: str) -> object:
    """Parse a document; where it is an object whose ``key`` is a list, that comes as :class:`Items`.

    Raises ValueError: it is no JSON, has a NaN or an infinity, an empty item in the list, or a value of more than
    ``MAX_VALUE`` characters; RecursionError: it is nested too deep.
    """
    reader = _Reader(text)
    found = reader.members(key) if reader.peek() == "{" else reader.value()
    if reader.peek():
        raise ValueError(f"more follows it, at character {reader.at}")
    return found
