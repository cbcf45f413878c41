"""Stores whose rows of points lie in other arrays than one of each column, seen as if each column were an array.

Tables in one array, ``data`` ``(rows, columns)`` with names in the attribute ``colnames``, as WeatherGenerator has them
(https://github.com/ecmwf/WeatherGenerator, ``data_reader_obs.py``); and CF's discrete sampling geometries (appendix H):
contiguous and indexed ragged arrays, and orthogonal ones of series, whose rows are times by stations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import AnyArray, ArrayLayout, ChunkRefs, Files, IntArray, Source
from scidata.read.arrays import read_array
from scidata.sources.cf import NAMED_ANGLES, role_of

_VALUES = ("_FillValue", "missing_value", "scale_factor", "add_offset")
_CHUNK = 1 << 16  # rows that are read at once at most
_KINDS = "iufbM"


class RowsSource(ABC):
    """A store with *columns*, ``(rows,)`` arrays that are read from others; all else is the store's own.

    - ``columns``: by name.
    """

    _table = ""  # an array all of which is in the columns

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if not isinstance(vars(type(self)).get(name), cached_property)
        }

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, ArrayLayout]:
        """The columns by name."""

    @abstractmethod
    def _origin(self, name: str) -> ArrayLayout:
        """Return the array that a column is read from."""

    @abstractmethod
    def _rows(self, name: str, start: int, stop: int) -> AnyArray:
        """Read rows of a column, as they are stored."""

    @cached_property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """The columns, and the other arrays."""
        seen = {*self.columns, self._table}
        return {**self.columns, **{n: x for n, x in self._source.arrays.items() if n not in seen}}

    def _is_column(self, layout: ArrayLayout) -> bool:
        return layout.name in self.columns

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks; of columns say that all is there."""
        if not self._is_column(layout):
            return self._source.locate(layout, chunks)
        nowhere = np.zeros(len(chunks), np.int64)
        return ChunkRefs(paths=(str(self._source.path),), path_index=nowhere, offset=nowhere, nbytes=nowhere)

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: AnyArray) -> None:
        """Read some rows of a column, or a box of another array."""
        if not self._is_column(layout):
            self._source.read_box(layout, box, out)
            return
        start, stop, step = box[0].indices(layout.shape[0])
        out[...] = self._rows(layout.name, start, stop)[::step]

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Raise SourceChangedError if files are not those that were opened."""
        if not self._is_column(layout):
            self._source.check_unchanged(layout, paths)

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files | None:
        """Name the files of chunks; of a column those of all that it is read from."""
        if not self._is_column(layout):
            return self._source.files_of(layout, chunks)
        origin = self._origin(layout.name)
        return self._source.files_of(origin, all_chunks(origin))


def all_chunks(layout: ArrayLayout) -> IntArray:
    """Return the coordinates of all chunks of an array, ``(num, ndim)``."""
    return np.stack(np.unravel_index(np.arange(math.prod(layout.num_chunks)), layout.num_chunks), axis=1).astype(
        np.int64
    )


def _column(like: ArrayLayout, name: str, num_rows: int, dim: str, attributes: Mapping[str, Any]) -> ArrayLayout:
    return ArrayLayout(
        store=like.store, name=name, shape=(num_rows,), dims=(dim,), dtype=like.dtype, axis_order=(0,), fallback=True,
        chunks=(min(num_rows, _CHUNK),), fill_value=like.fill_value, attributes=attributes,
    )  # fmt: skip


class ColumnsSource(RowsSource):
    """A table in one array. Whoever wants several columns reads them at once, by :meth:`place`."""

    def __init__(self, source: Source, table: str, names: tuple[str, ...]) -> None:
        super().__init__(source)
        self._table, self._names = table, names

    @property
    def table(self) -> ArrayLayout:
        """The array that has the columns."""
        return self._source.arrays[self._table]

    @cached_property
    def columns(self) -> Mapping[str, ArrayLayout]:
        """The columns by name."""
        own = {key: self.table.attributes[key] for key in _VALUES if key in self.table.attributes}
        rows, dim = self.table.shape[0], self.table.dims[0]
        return {n: _column(self.table, n, rows, dim, {**own, **NAMED_ANGLES.get(n.lower(), {})}) for n in self._names}

    def place(self, name: str) -> int | None:
        """Return which column of the table an array is; None for other arrays."""
        return self._names.index(name) if name in self._names else None

    def _origin(self, name: str) -> ArrayLayout:
        return self.table

    def _rows(self, name: str, start: int, stop: int) -> AnyArray:
        at = self._names.index(name)
        return read_array(self._source, self.table, (slice(start, stop), slice(at, at + 1)))[:, 0]


class RaggedSource(RowsSource):
    """Features (profiles, stations) of other lengths, as columns of rows; one named like their dim numbers them."""

    def __init__(self, source: Source, said: ArrayLayout, rows: str) -> None:
        super().__init__(source)
        self._said, self._dim = said.name, rows

    @cached_property
    def _is_contiguous(self) -> bool:
        return "sample_dimension" in self._source.arrays[self._said].attributes

    @cached_property
    def _features(self) -> str:
        said = self._source.arrays[self._said]
        return said.dims[0] if self._is_contiguous else str(said.attributes["instance_dimension"])

    @cached_property
    def _bounds(self) -> IntArray:
        return bounds_of(read_array(self._source, self._source.arrays[self._said]).astype(np.int64))

    @cached_property
    def columns(self) -> Mapping[str, ArrayLayout]:
        """The columns by name."""
        arrays = self._source.arrays
        size = next(x.shape[0] for x in arrays.values() if x.dims[:1] == (self._dim,))
        number = _column(arrays[self._said], self._features, size, self._dim, {})
        found = {self._features: number} if self._features not in arrays else {}
        for name, x in arrays.items():
            if x.dims == (self._features,) and x.dtype.kind in _KINDS and name != self._said:
                found[name] = _column(x, name, size, self._dim, x.attributes)
        return found

    def _origin(self, name: str) -> ArrayLayout:
        return self._source.arrays[name if name in self._source.arrays else self._said]

    def _rows(self, name: str, start: int, stop: int) -> AnyArray:
        if self._is_contiguous:
            features = np.searchsorted(self._bounds, np.arange(start, stop), side="right") - 1
        else:
            features = read_array(self._source, self._source.arrays[self._said], (slice(start, stop),))
        if name not in self._source.arrays:
            return features
        first = int(features.min()) if len(features) else 0
        box = (slice(first, int(features.max()) + 1 if len(features) else 0),)
        return read_array(self._source, self._source.arrays[name], box)[features - first]


class SeriesSource(RowsSource):
    """Series of stations at the same times: rows are times by stations, so that they are sorted by time."""

    def __init__(self, source: Source, times: str, stations: str) -> None:
        super().__init__(source)
        self._times, self._stations = times, stations

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        sizes = {d: n for x in self._source.arrays.values() for d, n in zip(x.dims, x.shape, strict=True)}
        return sizes[self._times], sizes[self._stations]

    @cached_property
    def columns(self) -> Mapping[str, ArrayLayout]:
        """The columns by name."""
        dims, num = {self._times, self._stations}, math.prod(self._sizes)
        arrays = {
            n: x for n, x in self._source.arrays.items() if x.dims and set(x.dims) <= dims and x.dtype.kind in _KINDS
        }
        found = {name: _column(x, name, num, "row", x.attributes) for name, x in arrays.items()}
        if self._stations not in self._source.arrays:
            found[self._stations] = _column(_NUMBER, self._stations, num, "row", {})
        return found

    def _origin(self, name: str) -> ArrayLayout:
        return self._source.arrays[name if name in self._source.arrays else self._times]

    def _rows(self, name: str, start: int, stop: int) -> AnyArray:
        num = self._sizes[1]
        times = slice(start // num, -(-stop // num))
        if name not in self._source.arrays:
            return np.arange(start, stop) % num
        layout = self._source.arrays[name]
        values = read_array(self._source, layout, [times if dim == self._times else slice(None) for dim in layout.dims])
        if layout.dims == (self._times,):
            values = np.repeat(values, num)
        elif layout.dims == (self._stations,):
            values = np.tile(values, times.stop - times.start)
        elif layout.dims[0] == self._stations:
            values = values.T
        return values.reshape(-1)[start - times.start * num : stop - times.start * num]


_NUMBER = ArrayLayout(
    store="", name="", shape=(0,), dims=("row",), dtype=np.dtype(np.int64), chunks=(1,), axis_order=(0,)
)


def with_columns(source: Source) -> Source:
    """Return a store that shows its columns as arrays; any other store as it is."""
    for name, layout in source.arrays.items():
        said = layout.attributes.get("colnames")
        names = said if isinstance(said, list | tuple) else []
        if names and layout.shape[1:] == (len(names),) and len({n for n in names if isinstance(n, str)}) == len(names):
            return ColumnsSource(source, name, tuple(names))
        if len(layout.dims) == 1 and layout.attributes.keys() & {"sample_dimension", "instance_dimension"}:
            return RaggedSource(source, layout, str(layout.attributes.get("sample_dimension", layout.dims[0])))
    return _series(source) or source


def _series(source: Source) -> Source | None:
    """Return series of stations, each at all times; None if a store is none."""
    if str(source.attributes.get("featureType", "")).lower() not in ("timeseries", "timeseriesprofile"):
        return None
    one = [x for x in source.arrays.values() if len(x.dims) == 1]
    times, stations = ({x.dims[0] for x in one if role_of(x) in roles} for roles in (["T"], ["X", "Y"]))
    if len(times) != 1 or len(stations) != 1 or times == stations:
        return None
    return SeriesSource(source, times.pop(), stations.pop())
