"""Tables in one array, ``data`` ``(rows, columns)`` with the names of its columns in the attribute ``colnames``.

As WeatherGenerator has them: https://github.com/ecmwf/WeatherGenerator (``data_reader_obs.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from scidata.core.types import AnyArray, ArrayLayout, ChunkRefs, IntArray, Source
from scidata.read.arrays import read_array
from scidata.sources.cf import NAMED_ANGLES

_VALUES = ("_FillValue", "missing_value", "scale_factor", "add_offset")


class ColumnsSource:
    """A store with each column of its table as an array of its own, ``(rows,)``; see ``Source`` of ``core/types``.

    A column is read as a box of the table; whoever wants several reads them at once, by :meth:`place`.
    """

    def __init__(self, source: Source, table: str, names: tuple[str, ...]) -> None:
        self._source, self._table, self._names = source, table, names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)

    @cached_property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """The columns, and the other arrays."""
        others = {name: layout for name, layout in self._source.arrays.items() if name != self._table}
        return {name: _column(self.table, name) for name in self._names} | others

    @property
    def table(self) -> ArrayLayout:
        """The array that has the columns."""
        return self._source.arrays[self._table]

    def place(self, name: str) -> int | None:
        """Return which column of the table an array is; None for other arrays."""
        return self._names.index(name) if name in self._names and name in self.arrays else None

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks: of a column those of the table that hold it."""
        at = self.place(layout.name) if layout.fallback else None
        if at is None:
            return self._source.locate(layout, chunks)
        along = np.full_like(chunks, at // self.table.chunks[1])
        return self._source.locate(self.table, np.concatenate([chunks, along], axis=1))

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: AnyArray) -> None:
        """Read some rows of a column, or a box of another array."""
        at = self.place(layout.name) if layout.fallback else None
        if at is None:
            self._source.read_box(layout, box, out)
        else:
            out[...] = read_array(self._source, self.table, (*box, slice(at, at + 1)))[:, 0]

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Raise SourceChangedError where files are not those that were opened."""
        self._source.check_unchanged(self.table if self.place(layout.name) is not None else layout, paths)


def with_columns(source: Source) -> Source:
    """Return a store that shows the columns of its table as arrays; any other store as it is."""
    for name, layout in source.arrays.items():
        names = layout.attributes.get("colnames")
        if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
            continue
        if layout.shape[1:] == (len(names),) and len(set(names)) == len(names):
            return ColumnsSource(source, name, tuple(names))
    return source


def _column(table: ArrayLayout, name: str) -> ArrayLayout:
    attributes = {key: table.attributes[key] for key in _VALUES if key in table.attributes}
    attributes |= NAMED_ANGLES.get(name.lower(), {})
    return ArrayLayout(
        store=table.store, name=name, shape=table.shape[:1], dims=table.dims[:1], dtype=table.dtype,
        chunks=table.chunks[:1], axis_order=(0,), fill_value=table.fill_value, attributes=attributes, fallback=True,
    )  # fmt: skip
