"""Indexes of the times of tables: made by reading the column of times once, and kept beside the data or in a cache.

The hourly index that WeatherGenerator's tables have, ``idx_<begin>_<hours>``, is used as it is where it counts the rows
before each hour. In some it counts those of the full hour, too, so that it does not tell where that hour begins: then
an index is made.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scidata.core.own_files import make_own_folder, open_own, write_whole
from scidata.core.types import AnyArray, BoolArray, ByteArray, IntArray, Source
from scidata.core.urls import is_url
from scidata.errors import ConfigError, RefusedError
from scidata.meshes.formats.columns import all_chunks
from scidata.plan.windows import TimeIndex
from scidata.read.arrays import array_of, read_array
from scidata.sources.access.validators import Validators
from scidata.sources.cf import decoding_of
from scidata.sources.text import read_text
from scidata.sources.times import TimeColumn, time_column
from scidata.store.format.places import is_store

HOUR = 3600 * 10**9  # nanoseconds
_BLOCK_BYTES = 32 << 20  # of a column, read at once
_LISTED = re.compile(r"(?:.*/)?idx_(\d{12})_(\d+)")
_PROBES = 16  # hours of an index in the file that are looked at
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """The columns that say which rows are in a window; ``where``: values, or a closed slice, that rows must have."""

    source: Source
    time: TimeColumn
    where: Mapping[str, Any]
    allow_missing: bool

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.time.layout.shape[0]

    def column(self, name: str, start: int, stop: int) -> AnyArray:
        """Read rows of a column, decoded."""
        layout = array_of(self.source, name)
        decoding = decoding_of(layout)
        rows = (slice(start, stop),)
        return read_array(self.source, layout, rows, decoding=decoding, allow_missing=self.allow_missing)

    def times(self, start: int, stop: int) -> IntArray:
        """Read rows of the column of times. Raises CorruptDataError: a row has none."""
        layout = self.time.layout
        rows = (slice(start, stop), *[slice(None)] * (len(layout.shape) - 1))
        values = read_array(self.source, layout, rows, allow_missing=self.allow_missing)
        return self.time.checked(values, start)

    def kept(self, start: int, stop: int) -> BoolArray:
        """Say which of some rows are kept."""
        found = np.ones(stop - start, np.bool_)
        for name, wanted in self.where.items():
            text = self._texts.get(name)
            found &= _among(self.column(name, start, stop) if text is None else text[start:stop], wanted)
        return found

    @cached_property
    def _texts(self) -> dict[str, AnyArray]:
        found = dict[str, AnyArray]()
        for name in self.where.keys() - self.source.arrays.keys():
            _, found[name] = read_text(self.source, name) or ((), np.empty(0, np.str_))
            if found[name].shape != (self.num_rows,):
                raise ConfigError(f"{self.source.path}: where: {name!r} has no text of each of {self.num_rows} rows")
        return found


def open_table(source: Source, time: str, where: Mapping[str, Any] | None, *, allow_missing: bool) -> Table:
    """Describe a table by its metadata; raises if a column is not there, tells no times, or is no row's value."""
    column = time_column(array_of(source, time))
    for name, wanted in (where or {}).items():
        texts = not isinstance(wanted, slice) and all(isinstance(each, str) for each in np.ravel(wanted).tolist())
        if texts and name not in source.arrays and name in getattr(source, "skipped", {}):
            continue
        layout = array_of(source, name)
        if layout.shape != column.layout.shape[:1] or layout.dtype.kind not in "biuf":
            raise ConfigError(
                f"{source.path}: where: {name!r} has shape {layout.shape} and dtype {layout.dtype}; one number of each "
                f"of the {column.layout.shape[0]} rows was expected"
            )
        _check_wanted(name, wanted)
    return Table(source=source, time=column, where=where or {}, allow_missing=allow_missing)


def _check_wanted(name: str, wanted: Any) -> None:
    ends = [wanted.start, wanted.stop] if isinstance(wanted, slice) else np.ravel(wanted).tolist()
    numbers = [end for end in ends if end is not None]
    strided = isinstance(wanted, slice) and wanted.step is not None
    if strided or not all(isinstance(each, bool | int | float) for each in numbers):
        raise ConfigError(
            f"where of {name!r}: {wanted!r}: expected a number, several of them, or a slice of numbers without a step; "
            "windows are chosen by their time with sel="
        )


def _among(values: AnyArray, wanted: Any) -> BoolArray:
    if not isinstance(wanted, slice):
        return np.isin(values, np.ravel(wanted))
    found: BoolArray = values == values  # no value is missing
    found &= True if wanted.start is None else values >= wanted.start
    found &= True if wanted.stop is None else values <= wanted.stop
    return found


# -- making --------------------------------------------------------------------------------------------------------


def index_table(table: Table, step: int) -> TimeIndex:
    """Read a table's times, and the columns that decide which rows are kept, once; warn of rows that are late."""
    if (found := _listed(table, step)) is not None:
        return found
    made, size = _Made(step), _block_rows(table)
    for start in range(0, table.num_rows, size):
        stop = min(start + size, table.num_rows)
        times = table.times(start, stop)
        if (late := _late_row(times, made.last)) is not None:
            _warn_late(table, start + late)
            return _unsorted(table, step)
        made.add(times, table.kept(start, stop) if table.where else None)
    return made.index()


class _Made:
    """An index that is made block by block, of whole bytes of bits."""

    def __init__(self, step: int) -> None:
        self._step, self._num, self._num_kept = step, 0, 0
        self.last: int | None = None
        self._columns: list[IntArray] = [np.empty((3, 0), np.int64)]
        self._kept: list[ByteArray] = []

    def add(self, times: IntArray, kept: BoolArray | None) -> None:
        bins = times // self._step
        begins = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1 if self.last is None else self.last // self._step))
        before = np.arange(len(times) + 1) if kept is None else np.concatenate([[0], np.cumsum(kept)])
        self._columns.append(np.stack([bins[begins], self._num + begins, self._num_kept + before[begins]]))
        self.last, self._num, self._num_kept = int(times[-1]), self._num + len(times), self._num_kept + int(before[-1])
        if kept is not None:
            self._kept.append(np.packbits(kept, bitorder="little"))

    def index(self, order: IntArray | None = None) -> TimeIndex:
        bins, rows, kept_rows = np.concatenate([*self._columns, [[0], [self._num], [self._num_kept]]], axis=1)
        kept = np.concatenate(self._kept) if self._kept else None
        return TimeIndex(step=self._step, bins=bins[:-1], rows=rows, kept_rows=kept_rows, kept=kept, order=order)


def _block_rows(table: Table) -> int:
    """Return how many rows are read at once: whole chunks of times, and whole bytes of bits."""
    layout = table.time.layout
    chunk = max(1, layout.chunks[0])
    return -(-max(1, _BLOCK_BYTES // layout.dtype.itemsize // chunk) * chunk // 8) * 8


def _late_row(times: IntArray, last: int | None) -> int | None:
    is_late = times < np.concatenate([times[:1] if last is None else [last], times[:-1]])
    return int(np.argmax(is_late)) if is_late.any() else None


def _unsorted(table: Table, step: int) -> TimeIndex:
    """Index a table with all of its times in memory."""
    times, made = table.times(0, table.num_rows), _Made(step)
    order = np.argsort(times, kind="stable")
    made.add(times[order], table.kept(0, table.num_rows)[order] if table.where else None)
    return made.index(order)


def _warn_late(table: Table, row: int) -> None:
    before, late = map(table.time.label, table.times(row - 1, row + 1).tolist())
    warnings.warn(
        f"{table.source.path}: row {row} is late: {table.time.layout.name!r} is {late} there, after {before} in row "
        f"{row - 1}; rows of windows are gathered from where they lie, by an index of 8 bytes a row; of many late rows "
        f"sort the table once: scidata partition TABLE OUT --order time:{table.time.layout.name}",
        stacklevel=2,
    )


def _listed(table: Table, step: int) -> TimeIndex | None:
    """Return the index that the file has, if it is one of the rows before each of its times."""
    if table.where or not table.time.is_time or table.time.calendar:
        return None
    for name, layout in table.source.arrays.items():
        match = _LISTED.fullmatch(name)
        if match is None or len(layout.shape) != 1 or layout.dtype.kind not in "iu" or not layout.shape[0]:
            continue
        digits = match[1]
        date = f"{digits[:4]}-{digits[4:6]}-{digits[6:8]}T{digits[8:10]}:{digits[10:]}"
        try:
            begin = int(np.datetime64(date, "ns").astype(np.int64))
        except ValueError:
            continue
        width = int(match[2]) * HOUR
        if not width or step % width or begin % width:
            continue
        counts = read_array(table.source, layout).astype(np.int64)
        edges = np.append(counts, table.num_rows)
        if counts[0] == 0 and (np.diff(edges) >= 0).all() and _counts_before(table, counts, begin, width):
            some = np.flatnonzero(np.diff(edges))
            rows = np.append(counts[some], table.num_rows)
            return TimeIndex(step=width, bins=some + begin // width, rows=rows, kept_rows=rows)
    return None


def _counts_before(table: Table, counts: IntArray, begin: int, width: int) -> bool:
    """Return True if an index counts the rows before its times, by the rows on either side of some of them."""
    inner = np.flatnonzero((counts > 0) & (counts < table.num_rows) & (np.diff(counts, prepend=0) > 0))
    if not len(inner):
        return False
    for number in inner[np.unique(np.linspace(0, len(inner) - 1, _PROBES).astype(int))].tolist():
        row = int(counts[number])
        before, after = table.times(row - 1, row + 1).tolist()
        if not before < begin + number * width <= after:
            return False
    last = int(table.times(table.num_rows - 1, table.num_rows)[0])
    return last < begin + len(counts) * width  # later rows would count as those of the last hour


# -- keeping -------------------------------------------------------------------------------------------------------


def index_tables(tables: Sequence[Table], step: int, cache_dir: str | os.PathLike[str] | None) -> list[TimeIndex]:
    """Return the index of each table: kept ones of files that are as they were, and others made and kept."""
    place = _place(tables, step, cache_dir)
    known = {} if place is None else _load(place, step)
    keys = [_key(table) for table in tables]
    found = [known.get(key) if key else None for key in keys]
    made = [index_table(table, step) if index is None else index for table, index in zip(tables, found, strict=True)]
    new = {key: index for key, index in zip(keys, made, strict=True) if key}
    if place is not None and new.keys() - known.keys():
        _keep(place, new)
    return made


def _place(tables: Sequence[Table], step: int, cache_dir: str | os.PathLike[str] | None) -> str | None:
    """Return the file of an index; None if there is no folder for it: behind a URL."""
    first = tables[0]
    if cache_dir is None and is_url(first.source.path):
        return None
    path = first.source.path if is_url(first.source.path) else os.path.abspath(first.source.path)
    said = json.dumps([path, len(tables) > 1, first.time.layout.name, step, repr(sorted(first.where.items()))])
    name = hashlib.sha256(said.encode()).hexdigest()[:32]
    if cache_dir is None:
        folder = os.path.dirname(path.rstrip("/"))
        if is_store(above := os.path.dirname(folder)):  # of a sample in it, which holds nothing else
            folder = os.path.dirname(above)
        return os.path.join(folder, f".scidata-times-{name[:12]}")
    return os.path.join(os.path.abspath(os.path.expanduser(os.fspath(cache_dir))), "scidata-index", f"{name}.times")


def _key(table: Table) -> str:
    """Return a digest of the files that the columns lie in; empty if it is not known, or they are just written."""
    source = table.source
    texts = []
    for name in (table.time.layout.name, *table.where):
        if name not in source.arrays:  # text: of a file as a whole, or not known
            if source.format.startswith("zarr"):
                return ""
            continue
        layout = source.arrays[name]
        try:
            named = source.files_of(layout, all_chunks(layout))
            if named is None:
                return ""
            validator = Validators(source.path).of(named.paths, named.places)
        except OSError:
            return ""
        if not validator.digest or validator.settles_in:
            return ""
        texts.append(f"{name} {layout.shape} {layout.dtype} {sorted(map(str, layout.attributes.items()))}")
        texts.append(validator.digest.hex())
    return hashlib.sha256("\n".join([source.path, *texts]).encode()).hexdigest()


def _load(place: str, step: int) -> dict[str, TimeIndex]:
    """Read kept indexes by the keys of their tables; none if there is no file, or it is damaged, which is said."""
    try:
        with open(open_own(place, os.O_RDONLY), "rb") as file:
            data = np.load(io.BytesIO(file.read()), allow_pickle=False)
        head = json.loads(data["head"].tobytes())
        keys = head["keys"] if head["format"] == _FORMAT else []
        return {key: _checked(data, number, step) for number, key in enumerate(keys)}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, RefusedError, ValueError, LookupError, TypeError, MemoryError, zipfile.BadZipFile) as e:
        warnings.warn(f"{place}: the index of times is not used, and made again: {e}", stacklevel=2)
        return {}


def _checked(data: Any, number: int, step: int) -> TimeIndex:
    bins, rows, kept_rows = (data[f"{name}{number}"] for name in ("bins", "rows", "kept_rows"))
    kept, order = (data.get(f"{name}{number}") for name in ("kept", "order"))
    sound = len(rows) == len(kept_rows) == len(bins) + 1 and bins.dtype == rows.dtype == kept_rows.dtype == np.int64
    num = int(rows[-1])
    if not sound or any(x is not None and len(x) != n for x, n in ((kept, -(-num // 8)), (order, num))):
        raise ValueError("its tables do not fit together")
    return TimeIndex(step=step, bins=bins, rows=rows, kept_rows=kept_rows, kept=kept, order=order)


def _keep(place: str, indices: Mapping[str, TimeIndex]) -> None:
    head = json.dumps({"format": _FORMAT, "keys": list(indices)}).encode()
    arrays: dict[str, Any] = {"head": np.frombuffer(head, np.uint8)}
    for number, index in enumerate(indices.values()):
        arrays |= {f"{name}{number}": x for name, x in vars(index).items() if isinstance(x, np.ndarray)}
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    try:
        if not os.path.isdir(folder := os.path.dirname(place)):
            make_own_folder(folder)
        write_whole(place, packed.getvalue())
    except (OSError, RefusedError) as e:
        warnings.warn(
            f"{place}: the index of times cannot be kept ({e}), and is made by each process; name a folder with "
            "cache_dir=",
            stacklevel=2,
        )
