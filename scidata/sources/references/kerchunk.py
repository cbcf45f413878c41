"""Reference sets in JSON, versions 0 and 1: as kerchunk, VirtualiZarr and fsspec write them."""

from __future__ import annotations

import ast
import itertools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from scidata.core.types import IntArray
from scidata.core.urls import Url, url_of
from scidata.errors import CorruptDataError, TooLargeError, UnsupportedFormatError
from scidata.sources.access.files import files
from scidata.sources.access.remote import request
from scidata.sources.references.tables import DOCUMENTS, WHOLE, Table, checked_range, decoded_inline, make_table
from scidata.sources.zarr.chunks import flattened
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.walk import read_json

_PART = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_MAX_TEXT = 1 << 14  # of one URL
_MAX_EXPRESSION = 200
_MAX_GENERATED = 1 << 20
_MAX_NUMBER = 2**63
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip

_Value: TypeAlias = str | int


class Templates:
    """The templates of a set, by name: ``{{u}}``, ``{{f(c='a')}}``, ``{{(i + 1) * 1000}}``.

    The specification takes them for Jinja's, a language in which a set could do anything. Sets use only these:
    names, calls of a template with named arguments, and arithmetic on whole numbers.
    """

    def __init__(self, raw: object, where: str) -> None:
        self._where = where
        if not isinstance(raw, dict) or not all(isinstance(v, str) and len(v) <= _MAX_TEXT for v in raw.values()):
            raise UnsupportedFormatError(f"{where}: templates must be texts of at most {_MAX_TEXT} characters by name")
        self._texts: dict[str, str] = raw

    def fill(self, text: str, values: Mapping[str, _Value] | None = None) -> str:
        """Return a text with the expressions in ``{{ }}`` evaluated; ``values`` are the variables of a generator."""
        if "{{" not in text:
            return text
        filled = _PART.sub(lambda found: str(self._evaluate(found[1], values or {})), text)
        if len(filled) > _MAX_TEXT:
            raise self._error(text[:80], f"gives more than {_MAX_TEXT} characters")
        return filled

    def _error(self, text: str, why: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(f"{self._where}: template {text!r} {why}; write the references out")

    def _evaluate(self, text: str, values: Mapping[str, _Value]) -> _Value:
        if len(text) > _MAX_EXPRESSION:
            raise self._error(text[:80], "is too long")
        try:
            return self._value(ast.parse(text.strip(), mode="eval").body, values)
        except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError, ZeroDivisionError):
            raise self._error(text, "is no name, call or arithmetic") from None

    def _value(self, node: ast.expr, values: Mapping[str, _Value]) -> _Value:
        match node:
            case ast.Constant(value=str() | int() as value) if not isinstance(value, bool):
                return value
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.Name(id=name) if "{{" not in self._texts.get(name, "{{"):
                return self._texts[name]
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if name in self._texts:
                given = {k.arg: self._value(k.value, values) for k in keywords if k.arg is not None}
                return _PART.sub(lambda found: str(given[found[1].strip()]), self._texts[name])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand, values)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                found = _OPERATIONS[type(op)](self._number(left, values), self._number(right, values))
                if abs(found) < _MAX_NUMBER:
                    return found
        raise ValueError(node)

    def _number(self, node: ast.expr, values: Mapping[str, _Value]) -> int:
        value = self._value(node, values)
        if not isinstance(value, int):
            raise ValueError(value)
        return value

    def generated(self, entries: object) -> Iterator[tuple[str, list[Any]]]:
        """Yield the keys and references that the generators of a set (``gen``) stand for."""
        total = 0
        for entry in entries if isinstance(entries, list) else [entries]:
            texts = {n: entry.get(n) for n in ("key", "url", "offset", "length")} if isinstance(entry, dict) else {}
            dimensions = entry.get("dimensions") if isinstance(entry, dict) else None
            present = {n: v for n, v in texts.items() if v is not None}
            if (
                not isinstance(dimensions, dict)
                or not {"key", "url"} <= present.keys()
                or ("offset" in present) != ("length" in present)
                or not all(isinstance(v, str | int) for v in present.values())
            ):
                raise UnsupportedFormatError(f"{self._where}: generator {str(entry)[:200]} is not understood")
            steps = {str(name): self._steps(values) for name, values in dimensions.items()}
            total += math.prod(map(len, steps.values()))
            if total > _MAX_GENERATED:
                raise UnsupportedFormatError(
                    f"{self._where}: generators of more than {_MAX_GENERATED} references; write the set as Parquet"
                )
            for values in itertools.product(*steps.values()):
                at: dict[str, _Value] = dict(zip(steps, values, strict=True))
                filled = {name: self.fill(str(text), at) for name, text in present.items()}
                where = [self._whole(filled[n]) for n in ("offset", "length") if n in filled]
                yield filled["key"], [filled["url"], *where]

    def _whole(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise self._error(text[:80], "should give a whole number") from None

    def _steps(self, values: object) -> Sequence[_Value]:
        if isinstance(values, list) and all(isinstance(v, str | int) for v in values):
            return values
        if isinstance(values, dict):
            numbers = [values.get("start", 0), values.get("stop"), values.get("step", 1)]
            if all(isinstance(n, int) and abs(n) < 2**31 for n in numbers) and numbers[2]:
                return range(*numbers)
        raise UnsupportedFormatError(f"{self._where}: a generator's dimension {str(values)[:80]} is not understood")


_MAX_BYTES = 1 << 27  # of one document; as objects it is up to twenty times as large while it is read
_MAX_TEXT_BYTES = 1 << 28  # of all paths together, which templates can make long


class JsonSet:
    """A reference set in memory: the metadata, and the tables of its arrays once these are known.

    Raises UnsupportedFormatError: it is no reference set, or one of an unknown version, or is not JSON; TooLargeError:
    it is larger than is read; CorruptDataError: a reference that makes no sense.
    """

    lasting = ""

    def __init__(self, path: str) -> None:
        self._path = path
        document = read_json(_read(path), path)
        version = document.get("version", 0)
        if version not in (0, 1):
            raise UnsupportedFormatError(f"{path}: a reference set of version {version!r}; 0 and 1 are read")
        refs = document.get("refs") if version else document
        if not isinstance(refs, dict):
            raise UnsupportedFormatError(f"{path}: has no 'refs', which sets of version 1 have")
        templates = Templates(document.get("templates") or {}, path) if version else None
        if templates is not None:
            refs.update(templates.generated(document.get("gen") or []))
        self._templates = templates
        self.documents: dict[str, bytes] = {}
        self._refs: dict[str, Any] = {}
        for key, value in refs.items():
            if key.rpartition("/")[2] in DOCUMENTS:
                self.documents[key] = self._document(key, value)
            else:
                self._refs[key] = value
        if not any(key in self.documents for key in DOCUMENTS):
            raise UnsupportedFormatError(
                f"{path}: JSON without {' or '.join(DOCUMENTS)} at its top is no reference set, and nothing else that "
                "scidata reads"
            )
        self._tables: dict[str, Table] = {}

    def _document(self, key: str, value: object) -> bytes:
        if isinstance(value, str):
            return decoded_inline(value.encode("utf-8", "surrogatepass"), f"{self._path}: {key!r}")
        if isinstance(value, dict):
            return json.dumps(value).encode()
        raise UnsupportedFormatError(
            f"{self._path}: {key!r} is a reference, but metadata must be in the set itself; write the set again"
        )

    def attach(self, records: Iterable[ArrayRecord]) -> None:
        """Make the tables of the arrays and let the references go; CorruptDataError of those that make no sense."""
        arrays = {record.prefix: _Rows(record) for record in records}
        names: dict[str, int] = {}
        num_bytes = 0
        for key, value in self._refs.items():
            rows = _array_of(key, arrays)
            if rows is None:
                continue  # of an array that is not read
            where = f"{self._path}: {key!r}"
            if isinstance(value, str):
                rows.inline.append(decoded_inline(value.encode("utf-8", "surrogatepass"), where))
                rows.add(key, -len(rows.inline), 0, len(rows.inline[-1]), where)
                continue
            name, offset, nbytes = self._reference(value, where)
            if name not in names:
                num_bytes += len(name)
                if num_bytes > _MAX_TEXT_BYTES:
                    raise TooLargeError(f"{self._path}: its paths take more than {_MAX_TEXT_BYTES} bytes")
            rows.add(key, names.setdefault(name, len(names)), offset, nbytes, where)
        self._refs = {}
        distinct = list(names)
        self._tables = {prefix: rows.table(distinct) for prefix, rows in arrays.items()}

    def _reference(self, value: object, where: str) -> tuple[str, int, int]:
        if not isinstance(value, list) or len(value) not in (1, 3) or not isinstance(value[0], str):
            raise CorruptDataError(
                f"{where}: is {str(value)[:80]}, but a text, [path] or [path, offset, length] was expected; the set is "
                "damaged: write it again"
            )
        name = value[0] if self._templates is None else self._templates.fill(value[0])
        return (name, *(checked_range(value[1], value[2], where) if len(value) == 3 else (0, WHOLE)))

    def find(self, record: ArrayRecord, linear: IntArray) -> Iterable[tuple[Table, IntArray]]:
        """Return the table of an array."""
        return [(self._tables[record.prefix], np.arange(len(linear)))]


class _Rows:
    def __init__(self, record: ArrayRecord) -> None:
        self._record = record
        self._places: list[list[int]] = []
        self._rows: list[tuple[int, int, int]] = []
        self.inline: list[bytes] = []

    def add(self, key: str, target: int, offset: int, nbytes: int, where: str) -> None:
        record, place = self._record, self._record.place_of(key)
        if place is None:
            raise CorruptDataError(
                f"{where} is no chunk of array {record.layout.name!r}, which has a grid of {record.num_files}; the set "
                "is damaged: write it again"
            )
        self._places.append(place)
        self._rows.append((target, offset, nbytes))

    def table(self, names: list[str]) -> Table:
        grid = self._record.num_files
        places = np.array(self._places, np.int64).reshape(len(self._places), len(grid))
        target, offset, nbytes = np.array(self._rows, np.int64).reshape(-1, 3).T
        return make_table(flattened(places, grid), target, offset, nbytes, names, self.inline)


def _array_of(key: str, arrays: Mapping[str, _Rows]) -> _Rows | None:
    folder = key
    while folder:
        folder = folder.rpartition("/")[0]
        if folder in arrays:
            return arrays[folder]
    return None


def _read(path: str) -> bytes:
    if isinstance(url := url_of(path), Url):
        return request(url, "document", most=_MAX_BYTES)
    size = files().size(path)
    if size > _MAX_BYTES:
        raise TooLargeError(
            f"{path}: a reference set of {size} bytes, but at most {_MAX_BYTES} of JSON are read, since every process "
            "holds it whole; write it as Parquet (kerchunk.df.refs_to_dataframe, or virtualize.to_kerchunk(format="
            "'parquet'))"
        )
    return bytes(files().read(path, 0, size))
