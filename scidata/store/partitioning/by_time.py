"""Rows in the order of their times, ``order="time:dates"``: tables that are read in windows, and came unsorted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scidata.core.types import AnyArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.formats.base import ArrayReader, Box, RawField
from scidata.meshes.sample import HeteroHeader, RawSample, SampleHeader
from scidata.read.arrays import array_of
from scidata.sources.times import TimeColumn, time_column

TIME = "time"


def time_of(order: str) -> str | None:
    """Return the column of ``"time:dates"``; None of any other order."""
    name, _, column = order.partition(":")
    if name == TIME and not column:
        raise ConfigError(f"order={order!r}: name the column of times, such as 'time:dates'")
    return column if name == TIME else None


@dataclass(frozen=True, kw_only=True)
class _Times(ArrayReader):
    """A column of times as int64, the same in all files: since 1970, or, without units, as they are."""

    column: TimeColumn

    def __call__(self, box: Box) -> AnyArray:
        counts = self.counts(box[0]).reshape(-1, *self.layout.shape[1:])
        return counts // 1000 if self.column.calendar else counts

    def counts(self, rows: slice) -> IntArray:
        """Return rows as numbers that rise with time. Raises CorruptDataError: a row has no time."""
        values = super().__call__((rows, *[slice(None)] * (len(self.layout.shape) - 1)))
        return self.column.checked(values, rows.start or 0)


def with_times(header: SampleHeader | HeteroHeader, order: str) -> SampleHeader | HeteroHeader:
    """Return a sample with the column that its rows are sorted by as a field."""
    if (name := time_of(order)) is None:
        return header
    if isinstance(header, HeteroHeader) or header.kind != "points":
        raise ConfigError(f"sample {header.name}: order {order!r} is for points, not for a {header.kind}")
    column = time_column(array_of(header.topology.source, name))
    units = f"{'microseconds' if column.calendar else 'nanoseconds'} since 1970-01-01"
    said = ({"units": units} if column.is_time else {}) | ({"calendar": column.calendar} if column.calendar else {})
    field = RawField(
        name=name, entity=header.entity, dims=column.layout.dims, shape=column.layout.shape, entity_dim=0,
        dtype=np.dtype(np.int64), attributes=said,
        reader=_Times(source=header.topology.source, layout=column.layout, decode=False, column=column),
    )  # fmt: skip
    left_out = {other: why for other, why in header.left_out.items() if other != name}
    return replace(header, fields={**header.fields, name: field}, left_out=left_out)


def times_of(raw: RawSample, order: str, rows: slice) -> IntArray:
    """Return what some rows of a sample are sorted by."""
    reader = raw.fields[str(time_of(order))].reader
    assert isinstance(reader, _Times)
    return reader.counts(rows)


def order_by_time(raw: RawSample, order: str, kept: IntArray | None = None) -> IntArray:
    """Return the order of the rows of a sample, or of those that are kept; rows of one time stay in theirs."""
    times = times_of(raw, order, slice(0, raw.num_nodes))
    return np.argsort(times if kept is None else times[kept], kind="stable")
