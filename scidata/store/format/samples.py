"""Descriptions of many samples: what differs between them in a table, a column each; what is the same, once. Pure.

Samples are a group where their descriptions differ in numbers, digests and free text alone. A group has its first
sample in full, and a column for each value in which another one differs from it. The table has a row for each sample,
with its numbers and digests side by side, so that one read brings them; then the texts of each column::

    group of each sample (uint32), if there are several; of each group: rows, texts of its columns

A row has int64, float64 (NaN if a figure is none), the 16 bytes of a digest, or the end of a text among those of its
column (int64). Texts are JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.cache import Cache
from scidata.core.types import AnyArray, IntArray
from scidata.errors import CorruptDataError
from scidata.store.format.manifest import SampleInfo, digest_of
from scidata.store.format.places import folder_of

#: Returns bytes of a table, from one place to another.
ReadTable: TypeAlias = Callable[[int, int], bytes]
#: The keys that lead to a value from a sample's description.
Way: TypeAlias = tuple[str | int, ...]


class Column(NamedTuple):
    """A value in which samples of a group may differ: the keys that lead to it, and its kind."""

    way: Way
    kind: str


KINDS = {"int": "<i8", "float": "<f8", "digest": "V16", "text": "<i8"}
TEXTS = ("name", "inputs", "notes", "values")  # and the attributes of fields
_NUMBERS = ("index", "num_samples", "counts", "source_counts", "arrays", "statistics", "bbox", "documents", "ghosts")
_DIGEST = re.compile("[0-9a-f]{32}").fullmatch
_HELD_BYTES = 64 << 20  # of a table, that stay in memory
_BLOCK_BYTES = 64 << 10  # that are read again at once, where it is larger
_PIECE_BYTES = 4 << 20  # of a table or of rows, that are checked at once


_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _json(value: object) -> bytes:
    return _encode(value).encode()


def _take_apart(data: Mapping[str, Any]) -> tuple[tuple[object, ...], list[bytes]]:
    """Return the columns of a sample's plain description with all that a group has in common, and its values."""
    shape: list[object] = []
    values: list[bytes] = []
    for key in sorted(data):
        value = data[key]
        if key in TEXTS:
            shape += [Column((key,), "text"), tuple(sorted(value)) if isinstance(value, dict) else ()]
            values.append(_json(value))
        elif key == "fields" and isinstance(value, dict):
            of_fields = _fields_apart(_json(value))
            shape += of_fields[0]
            values += of_fields[1]
        elif key in _NUMBERS:
            _walk(value, (key,), shape, values, may_lack=key == "statistics")
        elif key != "folder" or value != folder_of(int(data.get("index", 0))):
            shape += [key, _json(value)]
    return tuple(shape), values


@lru_cache(1)  # samples of one store nearly always have the same
def _fields_apart(text: bytes) -> tuple[list[object], list[bytes]]:
    """Return columns of the attributes of fields, with all else, and those attributes."""
    shape: list[object] = []
    values = []
    for path, field in json.loads(text).items():
        rest = {**field} if isinstance(field, dict) else {"": field}
        if "attributes" in rest:
            shape.append(Column(("fields", path, "attributes"), "text"))
            values.append(_json(rest.pop("attributes")))
        shape += [path, _json(rest)]
    return shape, values


def _walk(value: object, way: Way, shape: list[object], values: list[bytes], *, may_lack: bool) -> None:
    """Add the columns of the numbers and digests below a value, and those values themselves."""
    kind = type(value)
    if kind is int:
        shape.append(Column(way, "int"))
        values.append(struct.pack("<q", value))
    elif kind is float or (value is None and may_lack):
        shape.append(Column(way, "float"))
        values.append(struct.pack("<d", math.nan if value is None else value))
    elif isinstance(value, str) and _DIGEST(value):
        shape.append(Column(way, "digest"))
        values.append(bytes.fromhex(value))
    elif isinstance(value, dict):
        shape.append("{")
        for key in sorted(value):
            _walk(value[key], (*way, key), shape, values, may_lack=may_lack)
    elif isinstance(value, list):
        shape.append("[")
        for i, item in enumerate(value):
            _walk(item, (*way, i), shape, values, may_lack=may_lack)
    else:
        shape.append((way, value, kind))


def columns_of(data: Mapping[str, Any]) -> list[Column]:
    """Return the columns that samples which begin a group like this one may have."""
    return _columns(_take_apart(data)[0])


def _columns(shape: Sequence[object]) -> list[Column]:
    return [each for each in shape if isinstance(each, Column)]


class _Values:
    """The values of a column, of samples in order; of equal ones the first alone, but for the index."""

    def __init__(self, column: Column, first: bytes) -> None:
        self.first, self.is_text, self.num = first, column.kind == "text", 0
        self.folds = column.way != ("index",)
        self.data = bytearray()
        self.ends = array("q")

    def add(self, value: bytes) -> None:
        self.num += 1
        if not self.data:
            if self.folds and value == self.first:
                return
            self.data += self.first * (self.num - 1)
            size = len(self.first)
            self.ends.extend(range(size, size * self.num, size) if self.is_text else ())
        self.data += value
        if self.is_text:
            self.ends.append(len(self.data))


class Gathered:
    """Descriptions of samples, as they are added: plain data of JSON, each checked by whoever reads them."""

    def __init__(self) -> None:
        self._groups: dict[tuple[object, ...], tuple[int, dict[str, Any], list[_Values]]] = {}
        self._order = array("I")

    def add(self, data: Any) -> bool:
        """Add a sample; return True if it begins a group."""
        try:
            shape, values = _take_apart(data)
        except (struct.error, ValueError, TypeError) as e:
            raise ValueError(str(e)) from e
        group = self._groups.get(shape)
        if is_new := group is None:
            new = list(map(_Values, _columns(shape), values))
            group = self._groups[shape] = len(self._groups), data, new
        self._order.append(group[0])
        for column, value in zip(group[2], values, strict=True):
            column.add(value)
        return is_new

    def described(self) -> tuple[dict[str, Any], bytes]:
        """Return what a manifest says of all samples, and their table."""
        parts = [np.array(self._order, "<u4").tobytes()] if len(self._groups) > 1 else []
        groups = []
        for shape, (_, first, values) in self._groups.items():
            varied = [(c, v) for c, v in zip(_columns(shape), values, strict=True) if v.data]
            rows = np.zeros(values[0].num, row_dtype([column for column, _ in varied]))
            for i, (column, each) in enumerate(varied):
                rows[str(i)] = np.frombuffer(each.ends if each.is_text else each.data, KINDS[column.kind])
            texts = [bytes(each.data) for _, each in varied if each.is_text]
            parts += [rows.tobytes(), *texts]
            columns = [list(column.way) for column, _ in varied]
            groups.append({"num": len(rows), "first": first, "columns": columns, "texts": list(map(len, texts))})
        table = b"".join(parts)
        return {"groups": groups, "nbytes": len(table), "digest": digest_of(table)}, table


def row_dtype(columns: Sequence[Column]) -> np.dtype[np.void]:
    """Return the dtype of a row: the number of each column is the name of its field."""
    return np.dtype([(str(i), KINDS[kind]) for i, (_, kind) in enumerate(columns)])


class Table:
    """A table's bytes, in memory up to a bound, else read again and compared; raises CorruptDataError."""

    def __init__(self, nbytes: int, read: ReadTable, digest: str, where: str) -> None:
        self.nbytes, self._read_table, self._where = nbytes, read, where
        self._blocks: Cache[bytes] = Cache(_HELD_BYTES, "lru")
        self._sums: list[int] = []
        found = hashlib.blake2b(digest_size=16)
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = read(start, min(start + _PIECE_BYTES, nbytes))
            found.update(piece)
            for block in (piece[i : i + _BLOCK_BYTES] for i in range(0, len(piece), _BLOCK_BYTES)):
                self._blocks.put(len(self._sums), block, len(block))
                self._sums.append(zlib.crc32(block))
        if found.hexdigest() != digest:
            raise CorruptDataError(
                f"{where}: the table of samples does not match its digest: it is damaged, or another store's; copy the "
                "store again"
            )

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes of it. Raises CorruptDataError: they are others than they were."""
        first, last = start // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES)
        blocks = [self._blocks.get_or_make(i, partial(self._block, i), len) for i in range(first, last)]
        return b"".join(blocks)[start - first * _BLOCK_BYTES :][: stop - start]

    def _block(self, i: int) -> bytes:
        block = self._read_table(i * _BLOCK_BYTES, min((i + 1) * _BLOCK_BYTES, self.nbytes))
        if zlib.crc32(block) != self._sums[i]:
            raise CorruptDataError(
                f"{self._where}: the table of samples changed while the store was open: open it again, once writing "
                "has ended"
            )
        return block


class Group:
    """Samples that differ in the values of ``columns`` alone.

    - ``num``, ``first``, ``columns``, ``texts``: as in a manifest: samples, the description of the first, and bytes of
      the texts of each column of them.
    - ``start``: where its rows begin in the table.
    """

    def __init__(
        self, num: int, first: SampleInfo, columns: Sequence[Column], texts: Sequence[int], table: Table, start: int
    ) -> None:
        self.num, self.first, self.columns, self._table, self._start = num, first, columns, table, start
        self.dtype = row_dtype(columns)
        ends = itertools.accumulate(texts, initial=start + num * self.dtype.itemsize)
        self.places = {way: i for i, (way, _) in enumerate(columns)}
        of_texts = [i for i, (_, kind) in enumerate(columns) if kind == "text"]
        self.texts = dict(zip(of_texts, itertools.pairwise(ends), strict=True))
        self.stop = start + num * self.dtype.itemsize + sum(texts)
        self._holes: dict[str | int, Any] = {"folder": len(columns)}
        for i, (way, _) in enumerate(columns):
            inner = self._holes
            for key in way[:-1]:
                inner = inner.setdefault(key, {})
            inner[way[-1]] = i

    def rows(self, start: int, stop: int) -> npt.NDArray[np.void]:
        """Return some rows of the table."""
        size = self.dtype.itemsize
        return np.frombuffer(self._table.read(self._start + start * size, self._start + stop * size), self.dtype)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, npt.NDArray[np.void]]]:
        """Yield rows, as many at once as have a few MiB, and the number of the first."""
        step = max(1, _PIECE_BYTES // self.dtype.itemsize)
        stop = self.num if stop is None else stop
        for first in range(start, stop, step):
            yield first, self.rows(first, min(first + step, stop))

    def column(self, way: Way, start: int = 0, stop: int | None = None) -> AnyArray:
        """Return a value of some samples, ``(stop - start,)``; digests as text."""
        stop = self.num if stop is None else stop
        i = self.places.get(way)
        if i is None:
            value = value_at(self.first, way)
            return np.full(stop - start, value, object if isinstance(value, str) else None)
        found = np.empty(stop - start, KINDS[self.columns[i].kind])
        for first, rows in self.pieces(start, stop):
            found[first - start :][: len(rows)] = rows[str(i)]
        return np.array([x.hex() for x in found.tolist()], object) if found.dtype.kind == "V" else found

    def sizes(self, path: str) -> IntArray:
        """Return the number of values of an array in each sample."""
        shape = [self.column(("arrays", path, "shape", i)) for i in range(len(self.first.arrays[path].shape))]
        return math.prod(shape, start=np.ones(self.num, np.int64))

    def nbytes(self) -> npt.NDArray[np.object_]:
        """Return the bytes of all arrays of each sample, decoded, which no 64 bits may hold."""
        total = np.zeros(self.num, object)
        for path, info in self.first.arrays.items():
            total += self.sizes(path).astype(object) * np.dtype(info.dtype).itemsize
        return total

    def sample(self, row: int, read_text: Callable[[Way, bytes], object]) -> SampleInfo:
        """Return the description of a sample."""
        rows = self.rows(max(0, row - 1), row + 1).tolist()
        values = list(rows[-1])
        for i, (way, kind) in enumerate(self.columns):
            if kind == "digest":
                values[i] = values[i].hex()
            elif kind == "text":
                begin = self.texts[i][0]
                start = rows[0][i] if row else 0
                values[i] = read_text(way, bytes(self._table.read(begin + start, begin + values[i])))
        info: SampleInfo = _filled(self.first, self._holes, [*values, folder_of(values[self.places[("index",)]])])
        return info


def value_at(info: SampleInfo, way: Way) -> Any:
    """Return the value of a sample's description that keys lead to."""
    found: Any = info
    for key in way:
        found = getattr(found, str(key)) if hasattr(found, "__dataclass_fields__") else found[key]
    return found


def _filled(first: Any, holes: Any, values: Sequence[object]) -> Any:
    """Return a description with other values in some places; all else is the first one's."""
    if isinstance(holes, int):
        return values[holes]
    if isinstance(first, tuple):
        return tuple([_filled(x, holes[i], values) if i in holes else x for i, x in enumerate(first)])
    if isinstance(first, dict):
        return {**first, **{key: _filled(first[key], hole, values) for key, hole in holes.items()}}
    found = object.__new__(type(first))  # without looking at each field again, as replace() does: a third of the time
    found.__dict__.update(first.__dict__)
    found.__dict__.update({key: _filled(getattr(first, key), hole, values) for key, hole in holes.items()})
    return found


class Samples:
    """The descriptions of a store's samples, in their order; each is made when it is asked for.

    - ``order``: the group of each sample, uint32; None if there is one group.
    - ``read_text``: reads a text of a sample: the way to it, its JSON, and the sample for messages.
    """

    def __init__(
        self,
        said: Mapping[str, object],
        table: Table,
        groups: Sequence[Group],
        order: npt.NDArray[np.uint32] | None,
        read_text: Callable[[Way, bytes, str], object],
        where: str,
    ) -> None:
        self.said, self.table = said, table
        self.groups, self._order, self._read_text, self._where = groups, order, read_text, where
        self._num = sum(group.num for group in groups)

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[SampleInfo]:
        return map(self.__getitem__, range(self._num))

    def __getitem__(self, index: int) -> SampleInfo:
        if not 0 <= index < self._num:
            raise IndexError(index)
        group, row = (0, index) if self._order is None else (int(self._order[index]), int(self._rows[index]))
        where = f"{self._where}: sample {index}"
        return self.groups[group].sample(row, lambda way, text: self._read_text(way, text, where))

    @cached_property
    def _rows(self) -> IntArray:
        """The row of each sample among those of its group."""
        rows = np.empty(self._num, np.int64)
        for i, group in enumerate(self.groups):
            rows[self._order == i] = np.arange(group.num)
        return rows

    def index_of(self, group: int, row: int) -> int:
        """Return the number of the sample that a row of a group describes."""
        return row if self._order is None else int(np.flatnonzero(self._order == group)[row])

    def firsts(self) -> list[SampleInfo]:
        """Return the first sample of each group: all others differ from one of them in numbers and free text alone."""
        return [group.first for group in self.groups]

    def noted(self) -> Iterator[SampleInfo]:
        """Yield the samples that have notes for their maker, and maybe others."""
        found = [i for i, group in enumerate(self.groups) if group.first.notes or ("notes",) in group.places]
        rows: Iterable[int] = range(self._num if found else 0)
        if self._order is not None:
            rows = np.flatnonzero(np.isin(self._order, found)).tolist()
        return map(self.__getitem__, rows)

    def column(self, *way: str | int, start: int = 0, stop: int | None = None) -> AnyArray:
        """Return a value of some samples, ``(stop - start,)``: of all by default."""
        return self._joined(lambda group, first, last: group.column(way, first, last), start, stop)

    def sizes(self, path: str) -> IntArray:
        """Return the number of values of an array in each sample."""
        return self._joined(lambda group, *_: group.sizes(path))

    def nbytes(self) -> list[int]:
        """Return the bytes of all arrays of each sample, decoded."""
        return self._joined(lambda group, *_: group.nbytes()).tolist() if self.groups else []

    def counts(self) -> dict[str, int]:
        """Return the rows of each entity over all samples."""
        entities = sorted({entity for first in self.firsts() for entity in first.counts})
        return {entity: sum(self.column("counts", entity).tolist()) for entity in entities}

    def _joined(self, of: Callable[[Group, int, int], AnyArray], start: int = 0, stop: int | None = None) -> AnyArray:
        """Return values of samples in their order, from those that a group gives of its rows from one to another."""
        stop = self._num if stop is None else stop
        if self._order is None:
            return of(self.groups[0], start, stop)
        order = self._order[start:stop]
        found: dict[int, AnyArray] = {}
        for i in np.unique(order).tolist():
            rows = self._rows[start:stop][order == i]
            found[i] = of(self.groups[i], int(rows[0]), int(rows[-1]) + 1)
        every = np.empty(stop - start, np.result_type(*found.values()))
        for i, values in found.items():
            every[order == i] = values
        return every
