"""Coordinates as people read them: times decoded, selection by value, hints for an index out of range."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import rows_of
from scidata.core.cache import Cache
from scidata.core.checks import optional_module
from scidata.core.options import Crop
from scidata.core.sample_source import SampleSource
from scidata.core.types import ArrayLayout, IntArray, Segments, Source
from scidata.errors import ConfigError, TooLargeError, UnknownNameError, near_matches, visible
from scidata.grids.partition import per_dim, resolve_dim, selected_rows
from scidata.grids.series import Series
from scidata.grids.steps import FieldSteps
from scidata.read.arrays import read_array
from scidata.sources.cf import decoding_of, is_time, tells_time
from scidata.sources.text import read_text
from scidata.sources.times import decode_times

_SHOWN = 3  # labels at either end
_TIMES_AS_TEXT = ("Times", "xtime")  # WRF's, which has no XTIME before 3.8 or one without units; MPAS's
_TIME_AS_TEXT = re.compile(r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d$")  # 2015-01-01_06:00:00


class Labels:
    """Labels of the rows of a grid, times decoded; None along dims that nothing labels."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._known: Cache[tuple[npt.NDArray[Any] | None]] = Cache(1 << 10)

    def _of(self, dim: str) -> npt.NDArray[Any] | None:
        return self._known.get_or_make(dim, lambda: (labels_of(self._series, dim),))[0]

    def local(self, dim: str, rows: Segments) -> npt.NDArray[Any] | None:
        """Return those of some of the source's rows along a dimension."""
        values = self._of(dim)
        return None if values is None else values[rows_of(rows)]

    def of_sample(self, rows: Sequence[int], steps: FieldSteps) -> dict[str, npt.NDArray[Any]]:
        """Return a sample's labels by dim: ``()`` of one step, else ``(steps,)``; ``"u_time"`` where fields differ."""
        found = {}
        sample_dim = self._series.sample_dim
        for dim, places in self._series.places_of(rows).items():
            values = self._of(dim)
            if values is not None:
                several = dim == sample_dim and len(steps.every) > 1
                found[dim] = np.asarray(values[places if several else places[0]])
        for name in steps.by_field if sample_dim in found else ():
            own = steps.places(name)
            found[f"{name}_{sample_dim}"] = np.asarray(found[str(sample_dim)][own if len(own) > 1 else own[0]])
        return found

    def of_samples(self, name: str, rows: IntArray) -> npt.NDArray[Any]:
        """Return the value of each sample, ``(num,)``: its label, or that of an array on dimensions of samples alone.

        ``rows`` are those of the samples, one each. Raises ConfigError: nothing of that name has a value for each
        sample.
        """
        series = self._series
        dims = [dim for dim in (*series.outer, series.sample_dim) if dim is not None]
        along = {dim: series.places_along(dim, rows) for dim in dims}
        if name in along and (labels := self._of(name)) is not None:
            return labels[along[name]]
        first = series.files[0].arrays
        known = [key for key, x in first.items() if x.dims and set(x.dims) <= along.keys()]
        text = None if name in first else read_text(series.files[0], name)
        own = text[0] if text is not None else first[name].dims if name in first else None
        if own is None or not set(own) <= along.keys():
            known = list(dict.fromkeys([*(dim for dim in dims if self._of(dim) is not None), *known]))
            raise ConfigError(
                f"{series.files[0].path}: {name!r} has no value for each sample{near_matches(name, known)}"
            )
        found = []
        for source in series.files_along(own[0] if own else ""):
            if text is not None:
                text = read_text(source, name)
                if text is None or text[0] != own:
                    raise ConfigError(f"{source.path}: {name!r} is no text along {own}, as in other files")
                found.append(text[1])
                continue
            layout = source.arrays[name]
            values = read_array(source, layout, decoding=decoding_of(layout, None), allow_missing=True)
            found.append(_decoded(source, name, layout.attributes, values.reshape(-1)).reshape(values.shape))
        every = np.concatenate(found) if len(found) > 1 else found[0]
        return np.broadcast_to(every[tuple(along[dim] for dim in own)], rows.shape)

    def _known_of(self, dim: str) -> npt.NDArray[Any] | None:
        return self._known.get_or_make(("known", dim), lambda: (known_labels(self._series, dim),))[0]

    def sources_of(self, rows: Sequence[int]) -> tuple[SampleSource, ...]:
        """Return file, row and label of each of a sample's rows: along the last dimension of samples that has labels.

        None if nothing labels them, or times cannot be decoded here.
        """
        series, times = self._series, list[object]([None] * len(rows))
        for dim, places in reversed(series.places_of(rows).items()):
            labels = self._known_of(dim)
            if labels is not None:
                times = [labels[row] for row in places] * (len(rows) // len(places))
                break
        return tuple(map(series.source_of, rows, times))


def chosen_rows(series: Series, isel: Crop, sel: Crop, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the rows that are asked for of each dimension, by number or by label, as numbers."""
    crop = per_dim(isel, list(sizes), list(sizes), "isel")
    labelled = rows_labelled(series, sel, sizes)
    if twice := crop.keys() & labelled.keys():
        raise ConfigError(f"isel and sel both choose rows of {min(twice)!r}; give one of them")
    for dim, rows in crop.items():
        try:
            selected_rows({dim: rows}, {dim: sizes[dim]})
        except ConfigError as e:
            raise ConfigError(f"{e}{meant(series, dim, rows)}") from None
    return crop | labelled


def labels_of(series: Series, dim: str) -> npt.NDArray[Any] | None:
    """Return the values along a dimension over all files, None if nothing labels it.

    That is its coordinate variable, or else the only array of times on it alone (WRF's ``XTIME``, anemoi's ``dates``),
    times as text (WRF's ``Times``, MPAS's ``xtime``), text of the dimension's name, or a list of as many names among
    the attributes (anemoi's ``variables`` of the dimension ``variable``). Times that say since when they count are
    ``datetime64``, or objects of cftime where the calendar or the year is none of theirs; so is text, unless it has
    days that the calendar lacks (30 February): then labels are the text. Files may count from different dates.
    """
    files = series.files_along(dim)
    if series.is_uniform(dim) and (values := series.coordinate(dim)) is not None:
        return _decoded(files[0], dim, files[0].arrays[dim].attributes, values)
    found = [_labels_in(source, dim) for source in files]
    known = [labels for labels in found if labels is not None]
    return np.concatenate(known) if len(known) == len(found) else None


def known_labels(series: Series, dim: str) -> npt.NDArray[Any] | None:
    """Return the values along a dimension; None if nothing labels it, or times cannot be decoded here."""
    try:
        return labels_of(series, dim)
    except (ImportError, ValueError, TypeError, OverflowError):
        return None


def seconds_of(times: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return times, ``datetime64`` or objects of cftime, as seconds after the first."""
    if times.dtype.kind == "M":
        seconds: npt.NDArray[np.float64] = (times - times[:1]) / np.timedelta64(1, "s")
        return seconds
    return np.array([(time - times[0]).total_seconds() for time in times], np.float64)


def label_text(label: object) -> str:
    """Return a label as text, a time without the zeros at its end."""
    return str(label).removesuffix(".000000000")


def stored_times(
    source: Source, dim: str, known: npt.NDArray[Any] | None = None
) -> tuple[npt.NDArray[Any], str] | None:
    """Return the times of rows along a dimension as they are stored, and their units and calendar.

    ``datetime64``, or numbers since a date; None if nothing tells times. ``known``: its coordinate, where it was
    read before.
    """
    layout = _labelling(source, dim)
    if layout is None:
        written = _written_times(source, dim)
        return None if written is None or written.dtype.kind != "M" else (written, "")
    if not tells_time(layout):
        return None
    values = known
    if values is None:
        values = read_array(source, layout, decoding=decoding_of(layout, None), allow_missing=True)
    said = (layout.attributes.get("units", ""), layout.attributes.get("calendar", ""))
    return values, "" if values.dtype.kind == "M" else " ".join(map(str, said))


def _labelling(source: Source, dim: str) -> ArrayLayout | None:
    """Return the array of one dimension that labels it: its coordinate variable, or the only one of times."""
    layout = source.arrays.get(dim)
    if layout is not None and layout.dims == (dim,):
        return layout
    times = [x for x in source.arrays.values() if x.dims == (dim,) and tells_time(x)]
    return times[0] if len(times) == 1 else None


def _labels_in(source: Source, dim: str) -> npt.NDArray[Any] | None:
    layout = _labelling(source, dim)
    if layout is None:
        written = _written_times(source, dim)
        texts = _texts_in(source, dim, dim) if written is None else written
        return _names_in(source, dim) if texts is None else texts
    values = read_array(source, layout, decoding=decoding_of(layout, None), allow_missing=True)
    return _decoded(source, dim, layout.attributes, values)


def _written_times(source: Source, dim: str) -> npt.NDArray[Any] | None:
    """Return times that are stored as text, ``(rows,)`` datetime64[s]; as text if the calendar is not NumPy's."""
    for name in _TIMES_AS_TEXT:
        texts = _texts_in(source, name, dim)
        if texts is not None and all(map(_TIME_AS_TEXT.match, texts)):
            try:
                return np.char.replace(texts, "_", "T").astype("M8[s]")
            except ValueError:
                return texts
    return None


def _texts_in(source: Source, name: str, dim: str) -> npt.NDArray[np.str_] | None:
    with contextlib.suppress(TooLargeError):  # then nothing labels them
        found = read_text(source, name)
        return found[1] if found is not None and found[0] == (dim,) else None
    return None


def _names_in(source: Source, dim: str) -> npt.NDArray[Any] | None:
    names = source.attributes.get(f"{dim}s")
    sizes = {n for x in source.arrays.values() for d, n in zip(x.dims, x.shape, strict=True) if d == dim}
    if isinstance(names, list | tuple) and sizes == {len(names)} and all(isinstance(name, str) for name in names):
        return np.array(names)
    return None


def _decoded(source: Source, dim: str, attributes: Mapping[str, Any], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not is_time(attributes):
        return values
    shown = visible(repr(dim))
    remedy = f"choose rows by number (isel), read {shown} as a field (fields=), or mend the attributes of a copy"
    return decode_times(source.path, dim, attributes, values, remedy)


def rows_labelled(series: Series, sel: Mapping[Any, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Translate ``sel`` to ``isel``: labels, lists of labels and slices of them, as ``xarray`` takes them."""
    crop: dict[str, Any] = {}
    for name, wanted in sel.items():
        dim = resolve_dim(name, list(sizes), "sel")
        labels = labels_of(series, dim)
        if labels is None:
            raise ConfigError(f"sel names {dim!r}, which has no coordinate; select its rows by number with isel")
        xarray = optional_module("xarray", f"sel={{{dim!r}: …}} needs xarray", "xarray")
        rows = xarray.DataArray(np.arange(len(labels)), coords={dim: labels}, dims=dim)
        turns = _turns(labels) if isinstance(wanted, slice) else ""
        try:
            found = rows.sel({dim: wanted}).values
        except (KeyError, TypeError, ValueError, IndexError) as e:
            if turns:
                raise ConfigError(_of_turned(dim, labels, wanted, turns)) from None
            why = visible(str(e)).split(" Try setting")[0] or type(e).__name__  # sel has no method, as xarray's has
            why = "" if "not all values found in index" in why else f" ({why})"  # which says no more than this does
            raise UnknownNameError(
                f"sel of {dim!r}: no label is {_text(wanted)}{why}; it has {_shown(labels)}"
            ) from None
        if not found.size:
            if turns:
                raise ConfigError(_of_turned(dim, labels, wanted, turns))
            turned = isinstance(wanted, slice) and wanted.start is not None and wanted.stop is not None
            descends = turned and len(labels) > 1 and labels[0] > labels[-1]
            hint = f"; labels descend: slice({wanted.stop!r}, {wanted.start!r})" if descends else ""
            raise ConfigError(f"sel of {dim!r}: nothing lies in {_text(wanted)}; it has {_shown(labels)}{hint}")
        crop[dim] = int(found) if found.ndim == 0 else _as_slice(found)
    return crop


def _turns(labels: npt.NDArray[Any]) -> str:
    """Say where labels that rise, or fall, stop doing so; nothing where they do throughout, or are no numbers."""
    if labels.dtype.kind not in "iuf" or len(labels) < 3:
        return ""
    rises = labels[1:] > labels[:-1]
    most = 2 * np.count_nonzero(rises) >= len(rises)
    breaks = np.flatnonzero(rises != most)
    return f"{labels[breaks[0]]} is followed by {labels[breaks[0] + 1]}" if 0 < len(breaks) < len(rises) else ""


def _of_turned(dim: str, labels: npt.NDArray[Any], wanted: slice, turns: str) -> str:
    """Say which rows a slice of labels that wrap around could have meant."""
    low, high = (None if end is None else float(end) for end in (wanted.start, wanted.stop))
    low, high = min(labels) if low is None else low, max(labels) if high is None else high
    offsets = (labels - low) % 360 if "lon" in dim.lower() else labels - low  # 350 is -10, as a longitude
    if "lon" in dim.lower() and high < low:
        high += 360
    rows = np.flatnonzero((offsets >= 0) & (offsets <= high - low))
    before = f"sel of {dim!r}: {_text(wanted)} is no range of rows, since labels wrap around: {turns}; "
    if not len(rows):
        return f"{before}choose rows by number, isel={{{dim!r}: …}}; it has {_shown(labels)}"
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    if len(runs) == 2 and rows[0] == 0 and rows[-1] == len(labels) - 1:
        runs.reverse()  # from the last rows on to the first
    ranges = ", ".join(f"*range({run[0]}, {run[-1] + 1})" for run in runs)
    return f"{before}these are its rows by number: isel={{{dim!r}: [{ranges}]}}"


def meant(series: Series, dim: str, given: object) -> str:
    """Say, behind an error about rows, which labels the dimension has, and how to select by them."""
    labels = known_labels(series, dim)
    if labels is None or not len(labels):
        return ""
    selection = visible(f"{{{dim!r}: {given!r}}}")
    return f"; rows are numbers from 0 on, labelled {_shown(labels)}: sel={selection} selects by label"


def _as_slice(rows: npt.NDArray[np.int64]) -> slice | list[int]:
    steps = np.diff(rows)
    if len(rows) > 1 and steps[0] > 0 and (steps == steps[0]).all():
        return slice(int(rows[0]), int(rows[-1]) + 1, int(steps[0]))
    return [int(row) for row in rows]


def _text(label: object) -> str:
    if isinstance(label, slice):
        ends = (label.start, label.stop, label.step)[: 2 if label.step is None else 3]
        return visible(":".join("" if end is None else str(end) for end in ends))
    return visible(repr(label))


def _shown(labels: npt.NDArray[Any]) -> str:
    """Show the first and last labels, times without the zeros at their end."""
    middle = ["…"] if len(labels) > 2 * _SHOWN else []
    last = labels[max(_SHOWN, len(labels) - _SHOWN) :]
    return ", ".join([*map(label_text, labels[:_SHOWN]), *middle, *map(label_text, last)])
