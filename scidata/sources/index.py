"""An index of many files: what opening found in each, as a few arrays, so that opening them again reads one file.

A row is a file: its name, size and times, and its *parts*, which are the file itself, its attributes, and each of its
arrays. A part has a text (JSON; equal ones are kept once, so files of one structure share theirs), some numbers (where
chunks lie), and values, where it is a coordinate. Texts become objects when a file is used.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from crc32c import crc32c

from scidata.core.types import AnyArray, ArrayLayout, Codec, IntArray
from scidata.errors import CorruptDataError
from scidata.sources.access.files import Version

_T = TypeVar("_T")
_MAGIC = b"sciindex"
_FORMAT = 2  # another one wherever sources describe files otherwise
_TABLES = {"versions": 3, "parts": 3}  # columns
_HEAD_NBYTES = 24  # magic, and the lengths of the description and of all of it
_FIRST_ARRAY = 2  # parts of the file and of its attributes come before

#: The dtype of values, and their bytes; or that of bytes without a meaning, and a digest, which tells values apart.
Values: TypeAlias = tuple[str, bytes]


class Part(NamedTuple):
    """A part of a file: its text, its numbers, its values if they are kept."""

    text: str
    numbers: Sequence[int] = ()
    values: Values | None = None


class FileRow(NamedTuple):
    """A row of an index."""

    name: str
    version: Version
    parts: Sequence[Part]


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """What a source has found in a file, as an index keeps it.

    - ``numbers``: of the file itself; they may differ between files that are alike in all else.
    - ``arrays``: layouts, with facts that JSON holds, and numbers.
    """

    format: str
    skipped: Mapping[str, str]
    attributes: Mapping[str, Any]
    arrays: Sequence[tuple[ArrayLayout, Mapping[str, object], Sequence[int]]]
    numbers: Sequence[int] = ()

    def parts(self, values: Mapping[str, Values]) -> list[Part]:
        """Return the parts of a row; ``values`` are those of coordinates."""
        head = {
            "format": self.format, "skipped": self.skipped, "names": [layout.name for layout, _, _ in self.arrays],
            "attributes": list(self.attributes),
        }  # fmt: skip
        arrays = [Part(text_of_layout(x, more), n, values.get(x.name)) for x, more, n in self.arrays]
        return [Part(json.dumps(head), self.numbers), Part(text_of_attributes(self.attributes)), *arrays]


def text_of_attributes(attributes: Mapping[str, Any]) -> str:
    """Return the text of the part of a file's attributes."""
    return json.dumps(_encoded(dict(attributes)))


def text_of_layout(layout: ArrayLayout, more: Mapping[str, object]) -> str:
    """Return the text of the part of an array."""
    return json.dumps(_of_layout(layout) | {"more": more})


class Head(NamedTuple):
    """What files of one structure share."""

    format: str
    skipped: dict[str, str]
    places: dict[str, int]  # of arrays among the parts
    attributes: tuple[str, ...]  # names


class FileIndex:
    """Rows of files, as arrays. Pickles.

    - ``names``: of files, relative to the folder that the index is of, in order.
    - ``tables``: ``versions`` ``(num, 3)``; ``first_parts`` ``(num + 1,)``; ``parts`` ``(num_parts, 3)``: the text, the
      values or -1, and the first number; ``numbers``; ``value_ends`` and ``value_types``, a text each. All int64.
    """

    def __init__(
        self, names: list[str], texts: list[str], tables: Mapping[str, IntArray], values: bytes, where: str = ""
    ) -> None:
        self.names, self.texts, self.tables, self.values, self.where = names, texts, tables, values, where
        self._forget()

    def _forget(self) -> None:
        self._layouts: dict[int, tuple[ArrayLayout, dict[str, Any]]] = {}
        self._attributes: dict[int, dict[str, Any]] = {}
        self._heads: dict[int, Head] = {}

    def __getstate__(self) -> tuple[object, ...]:
        return self.names, self.texts, self.tables, self.values, self.where

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.names, self.texts, self.tables, self.values, self.where = state
        self._forget()

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    # -- parts as objects ------------------------------------------------------------------------------------------

    def _made(self, made: dict[int, _T], text: int, make: Callable[[Any], _T]) -> _T:
        found = made.get(text)
        if found is None:
            try:
                found = made[text] = make(json.loads(self.texts[text]))
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as e:
                raise CorruptDataError(f"{self.where}: is damaged ({e}); remove it, and make it again") from e
        return found

    def _text(self, part: int) -> int:
        return int(self.tables["parts"][part, 0])

    def head(self, part: int) -> Head:
        """Return the format and the names of a file."""
        return self._made(self._heads, self._text(part), _head)

    def attributes(self, part: int) -> dict[str, Any]:
        """Return the attributes of a file."""
        return self._made(self._attributes, self._text(part), _attributes)

    def layout(self, part: int) -> tuple[ArrayLayout, dict[str, Any]]:
        """Return a layout, of no store, and more facts of it; the same objects for equal ones."""
        return self._made(self._layouts, self._text(part), _layout)

    def numbers(self, part: int) -> IntArray:
        """Return the numbers of a part."""
        firsts = self.tables["parts"][part : part + 2, 2].tolist()
        return self.tables["numbers"][firsts[0] : firsts[1] if len(firsts) > 1 else None]

    def values_of(self, part: int) -> AnyArray | None:
        """Return the values of a part, or their digest, flat and read-only; None if neither is kept."""
        number = int(self.tables["parts"][part, 1])
        return None if number < 0 else np.frombuffer(self._bytes_of(number), self._dtype_of(number))

    def _bytes_of(self, number: int) -> bytes:
        begin, end = (int(self.tables["value_ends"][k]) if k >= 0 else 0 for k in (number - 1, number))
        return self.values[begin:end]

    def _dtype_of(self, number: int) -> np.dtype[Any]:
        return np.dtype(self.texts[int(self.tables["value_types"][number])])

    # -- many rows at once -------------------------------------------------------------------------------------------

    def kinds_of(self, rows: IntArray, names: Sequence[str], valued: Sequence[str]) -> IntArray:
        """Return equal numbers for rows that share their heads, the layouts of some arrays, and values of others."""
        parts = self.tables["parts"]
        columns = [parts[self.tables["first_parts"][rows], 0]]
        for name in dict.fromkeys([*names, *valued]):
            columns += [parts[self._parts_of(rows, name), k] for k in ((0, 1) if name in valued else (0,))]
        return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)

    def joined(self, rows: IntArray, name: str) -> AnyArray | None:
        """Return the values of a coordinate of some rows, one after the other; None if they are not all kept."""
        numbers = self.tables["parts"][self._parts_of(rows, name), 1]
        if not len(numbers) or numbers.min() < 0 or len(np.unique(self.tables["value_types"][numbers])) != 1:
            return None
        dtype = self._dtype_of(int(numbers[0]))
        return None if dtype.kind == "V" else np.frombuffer(b"".join(map(self._bytes_of, numbers.tolist())), dtype)

    def _parts_of(self, rows: IntArray, name: str) -> IntArray:
        first = self.tables["first_parts"][rows]
        heads = self.tables["parts"][first, 0]
        places = np.zeros(len(self.texts), np.int64)
        for head in np.unique(heads).tolist():
            places[head] = self._made(self._heads, head, _head).places.get(name, 0)
        return first + places[heads]

    # -- as rows, and as bytes ---------------------------------------------------------------------------------------

    def each(self) -> Iterator[FileRow]:
        """Yield all rows."""
        versions, first = self.tables["versions"].tolist(), self.tables["first_parts"].tolist()
        for row, name in enumerate(self.names):
            parts = []
            for k in range(first[row], first[row + 1]):
                values = self.values_of(k)
                kept = None if values is None else (values.dtype.str, values.tobytes())
                parts.append(Part(self.texts[self._text(k)], self.numbers(k).tolist(), kept))
            size, *times = versions[row]
            yield FileRow(name, (size, times[0], times[1]), parts)

    @classmethod
    def of(cls, rows: Iterable[FileRow]) -> FileIndex:
        """Make an index of rows."""
        names, versions, parts, first_parts = [], [], [], [0]
        texts: dict[str, int] = {}
        values: dict[Values, int] = {}
        numbers: list[int] = []
        for row in rows:
            names.append(row.name)
            versions.append(row.version)
            for part in row.parts:
                number = -1 if part.values is None else values.setdefault(part.values, len(values))
                parts.append((texts.setdefault(part.text, len(texts)), number, len(numbers)))
                numbers.extend(part.numbers)
            first_parts.append(len(parts))
        kinds = [texts.setdefault(dtype, len(texts)) for dtype, _ in values]
        tables: dict[str, Sequence[object]] = {
            "versions": versions, "parts": parts, "first_parts": first_parts, "numbers": numbers,
            "value_ends": np.cumsum([len(data) for _, data in values], dtype=np.int64).tolist(), "value_types": kinds,
        }  # fmt: skip
        arrays = {name: _table(name, np.array(table, np.int64)) for name, table in tables.items()}
        return cls(names, list(texts), arrays, b"".join(data for _, data in values))

    def to_bytes(self) -> bytes:
        """Return the content of a file: lengths, a description, tables, texts, values, and a checksum of all that."""
        blobs = ["\0".join(self.names).encode(errors="surrogateescape"), "\0".join(self.texts).encode(), self.values]
        body = [*(table.astype("<i8").tobytes() for table in self.tables.values()), *blobs]
        said = {
            "format": _FORMAT, "tables": {name: len(table) for name, table in self.tables.items()},
            "names": len(self.names), "texts": len(self.texts), "blobs": [len(blob) for blob in blobs],
        }  # fmt: skip
        text = json.dumps(said).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        total = _HEAD_NBYTES + len(text) + sum(map(len, body)) + 4
        data = b"".join([_MAGIC, len(text).to_bytes(8, "little"), total.to_bytes(8, "little"), text, *body])
        return data + crc32c(data).to_bytes(4, "little")

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> FileIndex:
        """Undo :meth:`to_bytes`. Raises CorruptDataError: it is none, of another version of scidata, or damaged."""
        if data[:8] != _MAGIC:
            raise CorruptDataError(f"{where}: is no index of scidata")
        length, total = (int.from_bytes(data[k : k + 8], "little") for k in (8, 16))
        if total != len(data) or crc32c(memoryview(data)[:-4]) != int.from_bytes(data[-4:], "little"):
            raise CorruptDataError(f"{where}: is damaged: {len(data)} bytes do not have the length and checksum in it")
        try:
            said = json.loads(data[_HEAD_NBYTES : _HEAD_NBYTES + length])
            if said["format"] != _FORMAT:
                raise CorruptDataError(f"{where}: was made by another version of scidata (format {said['format']})")
            place, tables = _HEAD_NBYTES + length, {}
            for name, rows in said["tables"].items():
                columns = _TABLES.get(name, 1)
                tables[name] = _table(name, np.frombuffer(data, "<i8", rows * columns, place).astype(np.int64))
                place += 8 * rows * columns
            blobs = []
            for nbytes in said["blobs"]:
                blobs.append(data[place : place + nbytes])
                place += nbytes
            names, texts = (x.decode(errors="surrogateescape").split("\0") if x else [] for x in blobs[:2])
            made = cls(names, texts, tables, blobs[2], where)
            if (len(names), len(texts), place) != (said["names"], said["texts"], len(data) - 4):
                raise ValueError("its parts have other lengths than it says")
            _check(made)
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise CorruptDataError(f"{where}: is damaged ({e})") from e
        return made


def _table(name: str, flat: IntArray) -> IntArray:
    return flat.reshape(-1, _TABLES[name]) if name in _TABLES else flat


def _check(index: FileIndex) -> None:
    """Raise ValueError if tables name what is not there."""
    tables, num = index.tables, len(index.names)
    texts, values, numbers = tables["parts"].T
    ends, first = tables["value_ends"], tables["first_parts"]
    checks = (
        len(tables["versions"]) == num and len(first) == num + 1 and first[0] == 0 and first[-1] == len(texts),
        bool((np.diff(first) >= _FIRST_ARRAY).all()),
        not len(texts) or (texts.min() >= 0 and texts.max() < len(index.texts)),
        not len(texts) or (values.min() >= -1 and values.max() < len(ends)),
        not len(texts) or (numbers[0] == 0 and numbers[-1] <= len(tables["numbers"])),
        bool((np.diff(numbers) >= 0).all()),
        len(tables["value_types"]) == len(ends) and (not len(ends) or ends[0] >= 0),
        bool((np.diff(ends) >= 0).all()) and (int(ends[-1]) if len(ends) else 0) == len(index.values),
    )
    if not all(checks):
        raise ValueError("its tables contradict each other")


class KeptFile:
    """A row of an index, whose file is as it was. Pickles, with the index."""

    __slots__ = ("_first", "head", "index")

    def __init__(self, index: FileIndex, row: int) -> None:
        self.index, self._first = index, int(index.tables["first_parts"][row])
        self.head = index.head(self._first)

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of the file."""
        return self.index.attributes(self._first + 1)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the file itself."""
        return self.index.numbers(self._first).tolist()

    def layout(self, name: str) -> tuple[ArrayLayout, dict[str, Any]]:
        """Return a layout, of no store, and more facts."""
        return self.index.layout(self._first + self.head.places[name])

    def numbers_of(self, name: str) -> IntArray:
        """Return the numbers of an array."""
        return self.index.numbers(self._first + self.head.places[name])

    def values_of(self, name: str) -> AnyArray | None:
        """Return the values of a coordinate, as stored, in native byte order; None if they are not kept."""
        place = self.head.places.get(name)
        found = None if place is None else self.index.values_of(self._first + place)
        return None if found is None or found.dtype.kind == "V" else found


@dataclass(frozen=True, eq=False)
class OnDemand(Mapping[str, _T], Generic[_T]):
    """A mapping whose values are made when they are asked for."""

    names: Mapping[str, object]
    make: Callable[[str], _T]
    _found: dict[str, _T] = field(default_factory=dict)

    def __getitem__(self, name: str) -> _T:
        found = self._found.get(name)
        if found is None:
            if name not in self.names:
                raise KeyError(name)
            found = self._found[name] = self.make(name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


# -- JSON --------------------------------------------------------------------------------------------------------------


def _head(said: Any) -> Head:
    places = {str(name): _FIRST_ARRAY + k for k, name in enumerate(said["names"])}
    return Head(str(said["format"]), dict(said["skipped"]), places, tuple(said["attributes"]))


def _attributes(said: Any) -> dict[str, Any]:
    return {name: _decoded(value) for name, value in said.items()}


def _layout(said: Any) -> tuple[ArrayLayout, dict[str, Any]]:
    dtype = np.dtype(said["dtype"])
    if dtype.kind not in "biufcS":  # bytes of a file are no objects
        raise ValueError(f"an array has dtype {dtype}")
    layout = ArrayLayout(
        store="", name=said["name"], shape=tuple(said["shape"]), dims=tuple(said["dims"]),
        dtype=dtype, chunks=tuple(said["chunks"]), axis_order=tuple(said["axis_order"]),
        codecs=tuple(Codec(name=name, config={k: _tuple(v) for k, v in x.items()}) for name, x in said["codecs"]),
        fill_value=None if said["fill"] is None else np.asarray(_decoded(said["fill"])),
        attributes=_attributes(said["attributes"]), fallback=bool(said["fallback"]),
    )  # fmt: skip
    assert layout.geometry  # which twins get, too
    return layout, said["more"]


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _of_layout(layout: ArrayLayout) -> dict[str, object]:
    return {
        "name": layout.name, "shape": layout.shape, "dims": layout.dims, "dtype": layout.dtype.str,
        "chunks": layout.chunks, "axis_order": layout.axis_order, "fallback": layout.fallback,
        "codecs": [(codec.name, codec.config) for codec in layout.codecs],
        "fill": None if layout.fill_value is None else _encoded(layout.fill_value),
        "attributes": _encoded(dict(layout.attributes)),
    }  # fmt: skip


def _encoded(value: Any) -> Any:
    """Return numbers of NumPy as their bytes, and dicts of them, as JSON has them."""
    if isinstance(value, dict):
        return {name: _encoded(each) for name, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        return {"dtype": array.dtype.str, "shape": array.shape, "data": data, "scalar": isinstance(value, np.generic)}
    return value


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    array = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array[()] if value["scalar"] else array
