"""Tables as Parquet and Arrow (IPC, Feather): columns as arrays, read by pyarrow, a column of a row group at a time."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scidata.core.cache import Cache
from scidata.core.checks import optional_module
from scidata.core.types import AnyArray, ArrayLayout, ChunkRefs, IntArray
from scidata.core.urls import is_url
from scidata.errors import CorruptDataError, SciDataError, UnsupportedFormatError
from scidata.sources.access.url_file import UrlFile
from scidata.sources.cf import NAMED_ANGLES
from scidata.sources.file_source import FileSource

if TYPE_CHECKING:
    import pyarrow

_KEPT = 128 << 20

#: Decoded columns of row groups, of all tables: windows that follow each other lie in the same group.
_columns: Cache[AnyArray] = Cache(_KEPT, "lru")


@dataclass(frozen=True, kw_only=True)
class _Contents:
    arrays: Mapping[str, ArrayLayout]
    skipped: Mapping[str, str]
    bounds: tuple[int, ...]
    names: tuple[str, ...]
    metadata: Any = None


class TableSource(FileSource[_Contents]):
    """A Parquet or Arrow file; columns of numbers and times are its arrays. Values that are missing are NaN or NaT.

    Integers and truth values that lack some are floating numbers: float32 of up to 16 bits, else float64.
    """

    attributes: Mapping[str, Any] = {}

    def __init__(self, path: str, kind: str) -> None:
        super().__init__(path)
        self.format = kind

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every column of numbers or times."""
        return self._read().arrays

    @property
    def skipped(self) -> Mapping[str, str]:
        """Why others are none."""
        return self._read().skipped

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Say that all is there; which bytes of the file it comes from, only pyarrow knows."""
        nowhere = np.zeros(len(chunks), np.int64)
        return ChunkRefs(paths=(str(self.path),), path_index=nowhere, offset=nowhere, nbytes=nowhere)

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: AnyArray) -> None:
        """Read some rows of a column, from the row groups that have them."""
        bounds = self._read().bounds
        start, stop, step = box[0].indices(layout.shape[0])
        values = np.empty(stop - start, layout.dtype)
        for group in range(bisect.bisect_right(bounds, start) - 1, bisect.bisect_left(bounds, stop)):
            first, end = max(start, bounds[group]), min(stop, bounds[group + 1])
            if end > first:
                column = self._column(layout, group, bounds[group + 1] - bounds[group])
                values[first - start : end - start] = column[first - bounds[group] : end - bounds[group]]
        out[...] = values[::step]

    def read_text(self, name: str) -> tuple[tuple[str, ...], AnyArray] | None:
        """Read a column of text, or of categories: its dims, and its values, empty if one is missing; or None."""
        if name not in self.skipped or self._read().names.count(name) > 1:
            return None
        with self._file() as file:
            column = (file.read([name]) if self.format == "parquet" else file.read_all()).column(name)
            if "string" not in str(column.type):
                return None
            return ("row",), column.cast("string").fill_null("").to_numpy().astype(np.str_)

    def _column(self, layout: ArrayLayout, group: int, num_rows: int) -> AnyArray:
        def make() -> AnyArray:
            with self._file(layout.name) as file:
                if self.format == "parquet":
                    column = file.read_row_group(group, columns=[layout.name], use_threads=False).column(0)
                else:
                    column = file.get_batch(group).column(0)
                if column.null_count and layout.dtype.kind not in "fM":
                    raise UnsupportedFormatError(
                        f"{self.path}: column {layout.name!r} of {layout.dtype} lacks values in row group {group}, and "
                        "the file has no statistics that tell so; write them, or floating numbers"
                    )
                if str(column.type) == "bool" and layout.dtype.kind == "f":
                    column = column.cast("int8")
                found = np.asarray(column.to_numpy(**({} if self.format == "parquet" else {"zero_copy_only": False})))
            if len(found) != num_rows:
                raise CorruptDataError(f"{self.path}: row group {group} has {len(found)} rows, not {num_rows}")
            return found.astype(layout.dtype, copy=False)

        key = self.path, self.version(), layout.name, group
        return _columns.get_or_make(key, make, lambda column: column.nbytes, once=True)

    @contextmanager
    def _file(self, column: str | None = None) -> Iterator[Any]:
        """Open the file, for one of its columns or for its description; damage is named."""
        pyarrow = optional_module("pyarrow", f"{self.path}: tables as Parquet and Arrow need pyarrow", "parquet")
        known = None if column is None else self._read()
        try:
            with UrlFile(self.path) if is_url(self.path) else pyarrow.OSFile(self.path) as stream:
                if self.format == "parquet":
                    parquet = optional_module("pyarrow.parquet", self.path, "parquet")
                    yield parquet.ParquetFile(stream, metadata=None if known is None else known.metadata)
                    return
                one = None if column is None or known is None else [known.names.index(column)]
                yield pyarrow.ipc.open_file(stream, options=pyarrow.ipc.IpcReadOptions(included_fields=one))
        except (SciDataError, MemoryError):
            raise
        except Exception as e:  # of damage pyarrow raises anything
            said = str(e).split("\n")[0]
            raise CorruptDataError(
                f"{self.path}: is no whole {self.format} file ({said}); copy or write it again"
            ) from e

    def _parse(self) -> _Contents:
        metadata, lacking = None, set[str]()
        with self._file() as file:
            if self.format == "parquet":
                metadata, schema = file.metadata, file.schema_arrow
                groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
                kinds = [metadata.schema.column(k).physical_type for k in range(metadata.num_columns)]
                whole = [k for k, kind in enumerate(kinds) if kind in ("BOOLEAN", "INT32", "INT64")]
                sizes = [group.num_rows for group in groups]
                for column in (group.column(k) for group in groups for k in whole):
                    if column.statistics is not None and column.statistics.null_count:
                        lacking.add(column.path_in_schema)
            else:
                schema, sizes = file.schema, list[int]()
                for batch in map(file.get_batch, range(file.num_record_batches)):
                    sizes.append(batch.num_rows)
                    lacking |= {x.name for x, column in zip(schema, batch.columns, strict=True) if column.null_count}
        bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
        arrays, skipped = {}, {}
        for column in schema:
            dtype = _dtype_of(column.type)
            if dtype is not None and dtype.kind in "biu" and column.name in lacking:
                dtype = np.result_type(dtype, np.float32)
            if dtype is None or schema.names.count(column.name) > 1:
                skipped[column.name] = f"is a column of {column.type}, or one of several of this name"
                continue
            said = {
                key.decode(): text.decode("utf-8", "replace")
                for key, text in (column.metadata or {}).items()
                if b":" not in key
            }
            arrays[column.name] = ArrayLayout(
                store=str(self.path), name=column.name, shape=(bounds[-1],), dims=("row",), dtype=dtype,
                chunks=(max(sizes, default=0),), axis_order=(0,), fallback=True,
                attributes={**NAMED_ANGLES.get(column.name.lower(), {}), **said},
            )  # fmt: skip
        return _Contents(
            arrays=arrays, skipped=skipped, bounds=tuple(bounds), names=tuple(schema.names), metadata=metadata
        )


def _dtype_of(kind: pyarrow.DataType) -> np.dtype[Any] | None:
    if str(kind).startswith(("timestamp", "date")):
        unit = getattr(kind, "unit", "s")
        return np.dtype(f"M8[{unit}]")  # stored as UTC where it has a time zone
    try:
        dtype = np.dtype(kind.to_pandas_dtype())
    except (NotImplementedError, TypeError):
        return None
    return dtype if dtype.kind in "biuf" else None
