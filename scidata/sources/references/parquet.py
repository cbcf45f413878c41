"""Reference sets in Parquet: one table for so many chunks of an array, of which those are read that are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from scidata.core.cache import Cache
from scidata.core.install import install_hint
from scidata.core.types import IntArray
from scidata.errors import CorruptDataError, MissingDependencyError, SciDataError, UnsupportedFormatError
from scidata.sources.references.tables import WHOLE, Table, checked_range, decoded_inline
from scidata.sources.zarr.chunks import grouped
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.tree import Tree
from scidata.sources.zarr.walk import read_json

if TYPE_CHECKING:
    import pyarrow

_SUMMARY = ".zmetadata"
_MAX_RECORD = 1 << 22  # rows of one table
_MAX_DECODED = 1 << 28  # bytes of one
_MAX_KEPT = 1 << 26
_COLUMNS = ("path", "offset", "size", "raw")


class ParquetSet:
    """A reference set in a folder of Parquet files.

    - ``check``: raises where the set was written again since it was opened: tables of two versions do not mix.

    Raises UnsupportedFormatError: its ``.zmetadata`` are no JSON, or do not say how long its tables are.
    """

    lasting = ""

    def __init__(self, tree: Tree, check: Callable[[], None]) -> None:
        self._tree, self._check = tree, check
        where = tree.location(_SUMMARY)
        found = tree.get([_SUMMARY])
        if _SUMMARY not in found:
            raise FileNotFoundError(f"{where}: there is no such file; the reference set is incomplete: write it again")
        summary = read_json(found[_SUMMARY], where)
        size = summary.get("record_size")
        if not isinstance(size, int) or not 1 <= size <= _MAX_RECORD:
            raise UnsupportedFormatError(f"{where}: record_size {size!r} is no number between 1 and {_MAX_RECORD}")
        self._record_size = size
        metadata = summary.get("metadata")
        entries = metadata if isinstance(metadata, dict) else {}
        self.documents = {key: json.dumps(value).encode() for key, value in entries.items()} | found
        self._tables: Cache[Table] = Cache(_MAX_KEPT, "lru")

    def find(self, record: ArrayRecord, linear: IntArray) -> Iterator[tuple[Table, IntArray]]:
        """Read those tables that have the files."""
        for block, rows in grouped(linear // self._record_size):
            table = self._tables.get((record.prefix, block))
            if table is None:
                table = self._read(record.prefix, block)
                self._tables.put((record.prefix, block), table, table.size)
            yield table, rows

    def _read(self, prefix: str, block: int) -> Table:
        key = f"{prefix}/refs.{block}.parq" if prefix else f"refs.{block}.parq"
        where = self._tree.location(key)
        raw = self._tree.get([key]).get(key)
        self._check()
        try:
            columns = {} if raw is None else _read_columns(raw, self._record_size, where)
            return _table_of(columns, block * self._record_size, where)
        except SciDataError:
            raise
        except Exception as e:  # of damage pyarrow raises anything
            said = str(e).split("\n")[0]
        raise CorruptDataError(f"{where}: is no whole Parquet file ({said}); copy or write the set again")


def _read_columns(raw: bytes, most: int, where: str) -> dict[str, pyarrow.ChunkedArray]:
    """Return the columns, texts as dictionaries: one long text in every row takes no more memory than in the file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as e:
        raise MissingDependencyError(
            f"{where}: reference sets in Parquet need pyarrow; {install_hint('references')}"
        ) from e
    head = parquet.read_metadata(pyarrow.BufferReader(raw))
    kinds = {column.name: column.physical_type for column in map(head.schema.column, range(head.num_columns))}
    # not by its columns: of damaged statistics in these pyarrow ends the process
    nbytes = sum(head.row_group(i).total_byte_size for i in range(head.num_row_groups))
    if head.num_rows > most or nbytes > _MAX_DECODED:
        raise CorruptDataError(
            f"{where}: claims {head.num_rows} rows and {nbytes} bytes, but at most {most} rows and {_MAX_DECODED} "
            "bytes were expected; the set is damaged: write it again"
        )
    texts = [name for name in ("path", "raw") if kinds.get(name) == "BYTE_ARRAY"]
    file = parquet.ParquetFile(pyarrow.BufferReader(raw), read_dictionary=texts)
    table = file.read(columns=[name for name in _COLUMNS if name in kinds])
    return {name: table.column(name) for name in table.column_names}


def _table_of(columns: Mapping[str, pyarrow.ChunkedArray], first: int, where: str) -> Table:
    num = min((len(column) for column in columns.values()), default=0)
    path, names = _texts(columns.get("path"), num, where)
    raw, values = _texts(columns.get("raw"), num, where)
    numbers = [_numbers(columns.get(name), num, where) for name in ("offset", "size")]
    there = np.flatnonzero((path >= 0) | (raw >= 0))
    path, raw = path[there], raw[there]
    offset, nbytes = (column[there] for column in numbers)
    bad = (offset < 0) | (nbytes < 0) | (offset > 2**62) | (nbytes > 2**62)
    if bad.any():
        row = int(bad.argmax())
        checked_range(int(offset[row]), int(nbytes[row]), f"{where}: row {there[row]}")
    inline = [decoded_inline(_as_bytes(value), where) for value in values]
    lengths = np.array([len(value) for value in inline] or [0], np.int64)
    whole = (offset == 0) & (nbytes == 0)
    is_inline = raw >= 0
    return Table(
        linear=first + there,
        target=np.where(is_inline, -1 - raw, path),
        offset=np.where(is_inline, 0, offset),
        nbytes=np.where(is_inline, lengths[np.maximum(raw, 0)], np.where(whole, WHOLE, nbytes)),
        names=[name if isinstance(name, str) else _as_bytes(name).decode("utf-8", "surrogateescape") for name in names],
        inline=inline,
    )


def _texts(column: pyarrow.ChunkedArray | None, num: int, where: str) -> tuple[IntArray, list[str | bytes]]:
    import pyarrow

    if column is None or pyarrow.types.is_null(column.type) or num == 0:
        return np.full(num, -1, np.int64), []
    if not pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    kind = column.type.value_type
    if pyarrow.types.is_null(kind):
        return np.full(num, -1, np.int64), []
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_binary(kind)):
        raise CorruptDataError(f"{where}: has {kind} where texts were expected; the set is damaged: write it again")
    joined = column.unify_dictionaries().combine_chunks()
    if isinstance(joined, pyarrow.ChunkedArray):
        joined = joined.chunk(0)
    index: IntArray = joined.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return index, joined.dictionary.to_pylist()


def _numbers(column: pyarrow.ChunkedArray | None, num: int, where: str) -> IntArray:
    import pyarrow

    if column is None or num == 0:
        return np.zeros(num, np.int64)
    if not pyarrow.types.is_integer(column.type):
        raise CorruptDataError(f"{where}: has {column.type} where whole numbers were expected; the set is damaged")
    return column.fill_null(0).to_numpy().astype(np.int64)


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
