"""Reads any rank's part of windows of a table: its share of the rows in ``[t, t + window)``, and no others. No torch.

Rows are found by an index of times (:mod:`~scidata.store.raw_points.time_index`). A sample's rows are numbered from 0
on, as they follow each other in the table, or in several; a *piece* is those that lie in one.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import bounds_of, segments_of_slice
from scidata.core.cache import Cache
from scidata.core.checks import check_int, check_optional_int, nanoseconds, optional_module, refuse
from scidata.core.options import ONLY_GRIDS, SAMPLES, ReadOptions
from scidata.core.sample_source import SampleSource
from scidata.core.types import Array, ArrayLayout, FloatArray, IntArray
from scidata.errors import ConfigError, CorruptDataError, check_known
from scidata.meshes.formats.columns import ColumnsSource
from scidata.meshes.samples import RawSamples
from scidata.plan.array import ArrayPlan, exact_plan
from scidata.plan.totals import ReadPlan
from scidata.plan.windows import Windows, cut_windows, index_step
from scidata.read import Job
from scidata.sources.times import TimeColumn
from scidata.store.format.manifest import ArrayInfo, FieldInfo, SampleInfo
from scidata.store.format.places import is_store, join
from scidata.store.format.store import open_store
from scidata.store.raw_points.files import PointsFiles
from scidata.store.raw_points.reader import PointsPass, PointsReader, check_no_ghosts
from scidata.store.raw_points.time_index import HOUR, Table, index_tables, open_table
from scidata.store.reading.part import LocalTopology
from scidata.store.reading.rows import Others, RowAccess

_TIME = "\0time"  # paths of arrays that are no field's own
_TABLE = "\0table"
_TOPOLOGIES_BYTES = 32 << 10  # of bounds alone: some thousand windows


#: Rows of a table: a range, or sorted ids.
_Rows: TypeAlias = range | IntArray


class _Windows(PointsFiles):
    """Windows of tables as stored samples; sources, files and arrays are those of the tables, by the table's number."""

    windows: Windows
    time: TimeColumn
    num_rows: IntArray

    def sample(self, index: int) -> SampleInfo:
        """Describe a window."""
        num, name = int(self.num_rows[index]), self.time.label(int(self.windows.starts[index]))
        table = replace(self.file(0).info, index=index, num_samples=len(self.windows), name=name)
        dims = {field.path: field.entity_dim for field in table.fields.values()}
        arrays = {f"point/{self.time.layout.name}": ArrayInfo(shape=(num,), dtype="", digest="")}
        for path, info in table.arrays.items():
            dim = dims.get(path, 0)
            arrays[path] = replace(info, shape=(*info.shape[:dim], num, *info.shape[dim + 1 :]))
        return replace(table, counts={"point": num}, source_counts={"point": num}, arrays=arrays)

    def array(self, index: int, path: str) -> ArrayLayout:
        """Return the layout of a table's array: also of its times, and of that which has several columns."""
        source = self.source(index)
        if path == _TIME:
            return source.arrays[self.time.layout.name]
        if path == _TABLE:
            assert isinstance(source, ColumnsSource)
            return source.table
        return super().array(index, path)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Read:
    """An array that is read, the dim of its rows, and the columns of it that arrays are, by name; None: all of it."""

    path: str
    dim: int
    names: dict[str, int | None]

    @property
    def columns(self) -> list[int]:
        """The columns that are read, sorted."""
        return sorted({at for at in self.names.values() if at is not None})

    def plans(self, access: RowAccess, rows: _Rows) -> list[tuple[ArrayPlan, IntArray | None]]:
        """Plan some rows; with each plan which of the rows that it brings are wanted, None: all."""
        columns = self.columns
        others: Others = [(), segments_of_slice(columns, columns[-1] + 1)] if columns else None
        if not isinstance(rows, range):
            return list(access.plan_gather(self.path, rows, dim=self.dim, others=others))
        ends = np.array([rows.start]), np.array([rows.stop])
        return [(access.plan(self.path, *ends, dim=self.dim, others=others), None)]


def points_reader(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], options: ReadOptions, *, num_parts: int = 1
) -> PointsReader:
    """Return the reader of raw points: of windows of a table, where the options name its times."""
    if options.time is None:
        return PointsReader(path, options, num_parts=num_parts)
    if isinstance(path, str | os.PathLike) and is_store(path):
        path, fields = _tables_of(os.fspath(path), options.time)
        options = options if options.fields is not None else replace(options, fields=fields)
    return WindowsReader(path, options, num_parts=num_parts)


def _tables_of(path: str, time: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the tables in a store of points, and their columns."""
    store = open_store(path)
    if store.manifest.kind != "points":
        raise ConfigError(
            f"{path}: time={time!r} reads tables in windows, and its samples are of kind {store.manifest.kind}"
        )
    names = [field.name for field in store.manifest.fields.values()]
    tables = [join(path, f"{store.sample(index).folder}/point") for index in range(len(store))]
    return tables, tuple(dict.fromkeys(["pos", *(name for name in names if name != time), time]))


class WindowsReader(PointsReader):
    """Windows of tables of points that are sorted by time.

    - ``path``: a table, or a list or glob of them, which follow each other.
    - ``options``: as of :class:`PointsReader`, and ``time``, ``window``, ``every``, ``where``; ``sel`` of the column of
      times chooses windows by their begin.
    - ``windows``: the rows of each sample.
    """

    windows: Windows
    files: _Windows
    _column: TimeColumn
    _columns: Sequence[TimeColumn]

    def _files_of(self, samples: RawSamples, options: ReadOptions) -> PointsFiles:
        return _Windows(samples, options)

    def _check(self, options: ReadOptions, shown: str) -> None:
        assert options.time is not None
        self.time = options.time
        none = "means nothing for windows of a table"
        options.refuse(*(name for name in (*ONLY_GRIDS, *SAMPLES, "edges") if name != "sel"), why=none)
        refuse({"pool_bytes": bool(options.pool_bytes), "decode": options.by_node}, none)
        check_known("sel: windows have no", options.sel or (), [self.time])
        check_no_ghosts(options, shown)

    def _all_fields(self) -> Mapping[str, FieldInfo]:
        """Return the fields of the tables, and the time: since the window's begin, in seconds."""
        self._column = self._table(0).time
        pos, dtype = self.files.infos["pos"], np.dtype(np.float64 if self._dtype is None else self._dtype)
        attributes = {"units": "s"} if self._column.is_time else {}
        time = FieldInfo(
            name=self.time, entity="point", dtype=dtype.str, dims=pos.dims[:1], entity_dim=0, attributes=attributes
        )
        return {**self.files.infos, self.time: time}

    def _table(self, index: int) -> Table:
        options = self.options
        return open_table(self.files.source(index), self.time, options.where, allow_missing=options.allow_missing)

    def _number_samples(self) -> None:
        options, tables = self.options, [self._table(index) for index in range(len(self.files))]
        self._columns = [table.time for table in tables]  # which may count from other dates
        for table in tables:
            if (table.time.is_time, table.time.calendar) != (self._column.is_time, self._column.calendar):
                raise ConfigError(
                    f"{table.source.path}: {self.time!r} has units, or none, or a calendar unlike that of {self.path}"
                )
        length = self._span("window", options.window)
        every = length if options.every is None else self._span("every", options.every)
        indices = index_tables(tables, index_step(length, every, HOUR * self._column.is_time), options.cache_dir)
        try:
            cut = functools.partial(cut_windows, indices, length, every)
            self._take(cut(**(self._chosen_days(cut().starts) if self._column.calendar else self._chosen())))
        except ConfigError as e:
            raise ConfigError(f"{self.path}: {e}") from None

    def _span(self, name: str, value: object) -> int:
        found = nanoseconds(name, value) if self._column.is_time else check_int(name, value)
        if found <= 0:
            raise ConfigError(f"{name}={value!r}: must be more than 0")
        return found

    def _chosen_days(self, starts: IntArray) -> dict[str, int | None]:
        """Return what :meth:`_chosen` does, of begins that are days of another calendar, as xarray slices them."""
        wanted = self._asked()
        if wanted == slice(None):
            return {}
        xarray = optional_module("xarray", f"sel of {self.time!r}", "xarray")
        try:
            starts = starts[xarray.CFTimeIndex(self._column.labels(starts)).slice_indexer(wanted.start, wanted.stop)]
        except (ValueError, TypeError, KeyError) as e:
            raise ConfigError(f"sel of {self.time!r}: {wanted} are no times of its calendar ({e})") from None
        return {"first": int(starts[0]), "last": int(starts[-1])} if len(starts) else {"first": 1, "last": 0}

    def _asked(self) -> slice:
        wanted = (self.options.sel or {}).get(self.time, slice(None))
        if not isinstance(wanted, slice) or wanted.step is not None:
            raise ConfigError(f"sel of {self.time!r}: expected a slice, such as slice('2019', '2021-06-30')")
        return wanted

    def _chosen(self) -> dict[str, int | None]:
        """Return the first and the last begin of windows that ``sel`` asks for."""
        wanted = self._asked()
        ends = {"first": wanted.start, "last": wanted.stop}
        what = f"end of sel of {self.time!r}"
        if not self._column.is_time:
            return {name: check_optional_int(what, end) for name, end in ends.items()}
        found: dict[str, int | None] = {}
        for name, end in ends.items():
            try:
                date = None if end is None else np.datetime64(str(end) if isinstance(end, int) else end)
            except (ValueError, TypeError) as e:
                raise ConfigError(f"{what}: {end!r} is no time ({e}); expected such as '2021-06-30'") from None
            rest = int(name == "last" and isinstance(end, str | int))  # a day, or a year, holds all of it, as in xarray
            found[name] = None if date is None else int((date + rest).astype("M8[ns]").astype(np.int64)) - rest
        return found

    def _take(self, windows: Windows) -> None:
        """Have samples be these windows."""
        self.windows, self._counts = windows, windows.num_rows
        self._firsts = bounds_of(np.array([index.num_rows for index in windows.indices]))
        self._partitions = Cache(self._partitions.max_size, "lru")
        self.topologies = Cache(_TOPOLOGIES_BYTES, "lru")
        self.files = copy.copy(self.files)
        self.files.windows, self.files.time, self.files.num_rows = windows, self._column, self._counts
        self._number_stored(self.files, len(windows))

    # -- contents ------------------------------------------------------------------------------------------------

    def counts(self, entity: str) -> IntArray:
        """Return the rows of each window, ``(num_samples,)`` int64."""
        self._check_entity(entity)
        return self._counts

    def sample_keys(self, on: str) -> npt.NDArray[Any]:
        """Return the begin of each window, ``(num_samples,)``: times, or integers. ``"time"`` means it, too."""
        check_known(f"{self.path}: no key of samples", [on], [self.time, "time"])
        return self._column.labels(self.windows.starts)

    def sources_of(self, index: int, step: int | None = None) -> tuple[SampleSource, ...]:
        """Return the rows of each table that a window lies in; of an empty one none of the first table."""
        window = self.numbering.locate(index)[0]
        begin = self._column.labels(self.windows.starts[window : window + 1])[0]
        rows = self._rows(window, range(self._num_rows(window))) or [(0, range(0))]
        ends = [(table, (int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0)) for table, own in rows]
        return tuple(SampleSource(self.paths[table], window, begin, own) for table, own in ends)

    def fingerprint(self) -> str:
        """Return a digest of windows, rows and fields."""
        content: dict[str, object] = {
            "windows": [self.windows.starts.tolist(), self.windows.length, self._counts.tolist()],
            "where": repr(sorted((self.options.where or {}).items())),
            "fields": {name: [self.dims(name), str(self.dtype(name))] for name in self.fields},
            "subsample": None,
        }
        return self._digest(content)

    def field_pass(self, name: str, samples: IntArray, rank: int = 0) -> PointsPass:
        """Return a pass over the rows of a field in some samples, each row once: windows end where the next begins.

        Not of times, which count from the begin of each window that a row is in.
        """
        reader = copy.copy(self)
        if name != self.time:
            reader._take(self.windows.disjoint())
        return PointsPass(reader, self._known(name), samples, self._checked_part(rank))

    # -- cutting and rows ----------------------------------------------------------------------------------------

    def _num_rows(self, stored: int) -> int:
        return int(self._counts[stored])

    def _chunk_edges(self, stored: int) -> IntArray:
        found, before = [np.empty(0, np.int64)], 0
        for table, rows in self._rows(stored, range(self._num_rows(stored))):
            chunk = self.files.file(table).chunk_rows
            if chunk:
                edges = np.arange(rows[0] // chunk * chunk, rows[-1] + 1, chunk)
                found.append(before + np.searchsorted(np.asarray(rows), edges))
            before += len(rows)
        return np.concatenate(found)

    def _costs(self, stored: int) -> FloatArray:
        num_rows, weights = self._num_rows(stored), self.options.weights
        rows = self._rows(stored, range(num_rows))
        if not isinstance(weights, str):
            return self._checked_costs(np.asarray(weights), int(self._firsts[-1]), self.path)[self._ids(rows)]
        reader = copy.copy(self)
        reader.fields = (self._known(weights),)
        values = reader._values(RowAccess(self.files, 0, self._threads.executor()), stored, rows)[weights]
        return self._checked_costs(values, num_rows, self.path)

    def _chunk_rows(self, stored: int) -> int:
        return self.files.file(0).chunk_rows or super()._chunk_rows(0)

    def _rows(self, window: int, wanted: _Rows) -> list[tuple[int, _Rows]]:
        """Return where some rows of a window lie: tables, and rows of each."""
        found: list[tuple[int, _Rows]] = []
        before = 0
        for table, low, high, num in self.windows.pieces(window):
            index = self.windows.indices[table]
            ids = range(low, high) if index.order is None and num == high - low else index.kept_ids(low, high)
            picked: _Rows
            if isinstance(wanted, range):
                picked = ids[max(wanted.start - before, 0) : max(wanted.stop - before, 0)]
            else:
                own = wanted[slice(*np.searchsorted(wanted, [before, before + num]))] - before
                picked = low + own if isinstance(ids, range) else ids[own]
            before += num
            if len(picked):
                found.append((table, picked))
        return found

    def _ids(self, rows: Sequence[tuple[int, _Rows]]) -> IntArray:
        """Return rows as those of all tables, one after another."""
        return np.concatenate([np.empty(0, np.int64), *(self._firsts[table] + np.asarray(own) for table, own in rows)])

    def _rows_of(self, window: int, topology: LocalTopology) -> list[tuple[int, _Rows]]:
        drawn = topology.rows
        return self._rows(window, range(*topology.index_maps["point"].owned) if drawn is None else drawn["point"])

    def original_id(self, index: int, part: int, entity: str, *, rows: IntArray | None = None) -> IntArray:
        """Return the row in the table, or in all of them, of each row that a part owns, ``(num_owned,)`` int64."""
        self._check_entity(entity)
        own = range(*self.partition_of(index).owned(entity, self._checked_part(part))) if rows is None else rows
        return self._ids(self._rows(self.numbering.locate(index)[0], own))

    # -- reading -------------------------------------------------------------------------------------------------

    def plan(self, index: int, rank: int = 0, *, epoch: int = 0) -> ReadPlan:
        """Plan one sample for one rank, by the index of times (weights named by a field are read)."""
        cut, access = self._opened(index)
        part = self._checked_part(rank)
        drawn = self.subsample is not None
        topology = self._drawn(access, cut, index, part, epoch) if drawn else self._topology(access, cut, part)
        found: dict[str, list[ArrayPlan]] = {name: [] for name in self.fields}
        for table, rows in self._rows_of(cut.index, topology):
            own = RowAccess(self.files, table)
            for read in self._reads_of(table):
                first = "pos" if next(iter(read.names)).startswith("pos/") else next(iter(read.names))
                name = self.files.array(table, read.path).name if read.columns else first
                plans = [exact_plan(plan, self.files.source(table).locate) for plan, _ in read.plans(own, rows)]
                found[name] = found.get(name, []) + plans
        return self._planned(cut.index, rank, found)

    def _reads_of(self, table: int) -> list[_Read]:
        """Return the arrays of a table that the fields are read from, an array of several columns once."""
        source, file = self.files.source(table), self.files.file(table)
        found: dict[str, _Read] = {}
        for array in (each for name in self.fields for each in (file.positions if name == "pos" else (name,))):
            info = file.info.fields.get(array)
            path, dim = (f"point/{array}", 0) if info is None else (info.path, info.entity_dim)
            path = _TIME if array == self.time else path
            at = source.place(self.files.array(table, path).name) if isinstance(source, ColumnsSource) else None
            path = path if at is None else _TABLE
            found.setdefault(path, _Read(path=path, dim=dim, names={})).names[array] = at
        return list(found.values())

    def _read_fields(self, access: RowAccess, index: int, topology: LocalTopology, stored: int) -> Mapping[str, Array]:
        return self._values(access, stored, self._rows_of(stored, topology))

    def _values(self, access: RowAccess, window: int, rows: Sequence[tuple[int, _Rows]]) -> dict[str, Array]:
        """Read rows of all fields, all requests at once."""
        jobs: list[tuple[Job, npt.DTypeLike | None]] = []
        reads: list[tuple[int, _Read, IntArray | None]] = []
        for table, own in rows:
            source = self.files.source(table)
            for read in self._reads_of(table):
                for plan, pick in read.plans(RowAccess(self.files, table), own):
                    job = self.files.job(table, plan, as_stored=read.path == _TABLE)
                    if read.path == _TIME:
                        job = Job(plan, source, allow_missing=self.options.allow_missing)
                    jobs.append((job, None))
                    reads.append((table, read, pick))
        parts: dict[str, list[Array]] = {}
        for (table, read, pick), values in zip(reads, access.run_each(jobs), strict=True):
            taken = values if pick is None else values.take(pick, axis=read.dim)
            columns = read.columns
            for array, at in read.names.items():
                found = taken if at is None else taken[:, columns.index(at)]
                found = self._since_begin(found, table, window) if array == self.time else found
                parts.setdefault(array, []).append(found)
        return {name: self._field(access, name, window, parts) for name in self.fields}

    def _field(self, access: RowAccess, name: str, window: int, parts: Mapping[str, list[Array]]) -> Array:
        """Put the parts of a field together, in memory of a batch."""
        dim, dtype = self.entity_dim(name), self.dtype(name)
        if name == "pos":
            file = self.files.file(0)
            found = [
                file.joined(columns, dtype)
                for columns in zip(*(parts.get(array, []) for array in file.positions), strict=True)
            ]
        else:
            found = parts.get(name, [])
        if len(found) == 1 and found[0].dtype == dtype and found[0].flags.c_contiguous:
            return found[0]
        num = sum(values.shape[dim] for values in found)
        shape = list(self.global_shape(name, window))
        shape[dim] = num
        out = access.empty(tuple(shape), dtype)
        return np.concatenate(found, axis=dim, out=out, casting="same_kind") if found else out

    def _since_begin(self, values: Array, table: int, window: int) -> FloatArray:
        """Return times as seconds since a window's begin; raise where they are those of another one."""
        begin, column = int(self.windows.starts[window]), self._columns[table]
        counts, valid = column.counts(values.reshape(-1))
        after = counts - begin
        wrong = ~valid | (after < 0) | (after >= self.windows.length)
        if wrong.any():
            first, other = column.label(begin), column.label(int(counts[np.argmax(wrong)]))
            raise CorruptDataError(
                f"{self.paths[table]}: window {window} from {first} on: has rows of other times, such as {other}; "
                "its index of times is of other rows: remove it, and open the table again"
            )
        return after / (1e9 if column.is_time else 1.0)
