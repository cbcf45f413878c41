"""Statistics stored with the data: in a store's manifest, and in anemoi's arrays by variable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scidata.core.bounds import rows_of
from scidata.core.moments import RoundedMoments
from scidata.core.types import AnyArray, IntArray
from scidata.data.statistics_table import FieldStatistics, Labels
from scidata.grids.labels import labels_of
from scidata.read.arrays import read_array

if TYPE_CHECKING:
    from scidata.grids.reader import GridReader
    from scidata.store.reading.reader import StoreReader


_LARGEST_MEAN = 100  # in deviations
_ANEMOI = {"mean": "mean", "std": "stdev", "min": "minimum", "max": "maximum"}


def statistics_of_store(
    reader: StoreReader, name: str, samples: IntArray, by: Sequence[str], *, differences: bool, exactly: bool
) -> FieldStatistics | None:
    """Return a field's statistics from a store's manifest if they answer the question, else None.

    It is of all samples, times and rows, as they are stored, and counts the finite values; ``exactly`` asks for all
    values to be finite, since it does not tell missing ones from infinite ones, and for means that are not far away in
    deviations, since they were rounded before they were merged.
    """
    info, numbering, manifest = reader.info(name), reader.numbering, reader.store.manifest
    found = manifest.statistics.get(info.path)
    tail = info.dims[info.entity_dim + 1 :]
    has_times = numbering.sample_dim in info.dims
    cropped = any(d in numbering.isel for d in info.dims if d not in tail or d == numbering.sample_dim)
    as_stored = reader.dtype(name) == np.dtype(info.dtype).newbyteorder("=")
    if found is None or len(samples) != reader.num_samples or cropped or not as_stored or (has_times and differences):
        return None
    shape = reader.store.sample(0).arrays[info.path].shape[info.entity_dim + 1 :]
    parts = {part: np.reshape(getattr(found, part), shape) for part in ("count", "mean", "std", "min", "max")}
    size = np.full(shape, sum(manifest.samples.sizes(info.path).tolist()) // max(1, math.prod(shape)))
    rows = [range(n) for n in shape]
    for axis, dim in enumerate(tail):
        if dim in numbering.isel:
            kept = np.atleast_1d(np.arange(shape[axis])[numbering.isel[dim]])
            parts, size = {part: x.take(kept, axis) for part, x in parts.items()}, size.take(kept, axis)
            rows[axis] = range(len(kept))
    kept_by = tuple(dim for dim in by if dim in tail)
    order = [tail.index(dim) for dim in kept_by]
    others = [axis for axis in range(len(tail)) if axis not in order]
    width = tuple(len(rows[axis]) for axis in order)
    flat = {part: x.transpose(*order, *others).reshape(*width, -1) for part, x in parts.items()}
    figures = _merged(flat, size.transpose(*order, *others).reshape(*width, -1).sum(axis=-1))
    if exactly and (figures.missing.any() or not _is_precise(parts["mean"], figures)):
        return None
    return FieldStatistics(**figures.parts(), dims=kept_by, units=info.units, dtype=str(reader.dtype(name)))


def _is_precise(means: AnyArray, figures: RoundedMoments) -> bool:
    """Whether statistics merged from rounded parts are exact to 1e-12.

    The rounding of the means enters the deviation: of values around 1e6 that differ by 1, it was 5e-12.
    """
    return bool(figures.count.all() and np.nanmax(np.abs(means), initial=0.0) <= _LARGEST_MEAN * figures.std.min())


def _merged(parts: dict[str, AnyArray], size: AnyArray) -> RoundedMoments:
    """Merge statistics along the last axis (Chan, Golub, LeVeque 1983); ``size`` counts all values, finite or not."""
    count = parts["count"].astype(np.int64)
    some, total = count > 0, count.sum(axis=-1)
    mean, std = (np.where(some, parts[part], 0.0) for part in ("mean", "std"))
    with np.errstate(invalid="ignore", divide="ignore"):
        middle = np.where(total > 0, (count * mean).sum(axis=-1) / total, np.nan)
        away = np.where(some, mean - middle[..., None], 0.0)
        deviation = np.sqrt((count * (std * std + away * away)).sum(axis=-1) / total)
    low = np.where(some, parts["min"], np.inf).min(axis=-1, initial=np.inf)
    high = np.where(some, parts["max"], -np.inf).max(axis=-1, initial=-np.inf)
    known = total > 0
    return RoundedMoments(
        count=np.asarray(total),
        missing=np.asarray(size - total, np.int64),
        infinite=np.zeros(total.shape, np.int64),
        mean=np.asarray(middle),
        std=np.asarray(deviation),
        min=np.where(known, low, np.nan),
        max=np.where(known, high, np.nan),
    )


def statistics_of_anemoi(reader: GridReader, name: str) -> tuple[FieldStatistics, Labels] | None:
    """Return anemoi-datasets' statistics of a field's variables, of its chosen period, with labels; None if missing."""
    source, layout = reader.sources[0], reader.layout(name)
    dim = "variable"
    arrays = {part: source.arrays.get(there) for part, there in _ANEMOI.items()}
    if dim not in layout.dims or any(x is None or x.dims != (dim,) for x in arrays.values()):
        return None
    rows = rows_of(reader.partition.selected[dim])
    values: dict[str, Any] = {
        part: read_array(source, x).astype(np.float64)[rows] for part, x in arrays.items() if x is not None
    }
    counted = source.arrays.get("count")
    size = layout.shape[layout.dims.index(dim)]
    if counted is not None and counted.dims == (dim,):
        count = read_array(source, counted).astype(np.int64)[rows]
    else:
        count = np.full(len(rows), math.prod(layout.shape) // max(1, size))
    nothing = np.zeros(len(rows), np.int64)
    labels = labels_of(reader.series, dim)
    found = FieldStatistics(
        **values, dims=(dim,), count=count, missing=nothing, infinite=nothing.copy(),
        dtype=str(layout.dtype.newbyteorder("=")),
    )  # fmt: skip
    return found, None if labels is None else tuple(str(label) for label in labels[rows])


def period_of_anemoi(reader: GridReader) -> Mapping[str, object]:
    """Return the period of stored statistics, if the data name it."""
    attributes = reader.sources[0].attributes
    ends = {"first": "statistics_start_date", "last": "statistics_end_date"}
    return {"dim": reader.sample_dim} | {key: str(attributes[name]) for key, name in ends.items() if name in attributes}
