"""Gaps along the dimension of samples: where one row is not one usual step of time after the row before it.

A window of steps over a gap would pair a time with one that is further away than the others'. So samples whose window
crosses a gap are left out, unless the user says otherwise. Times count, whatever their calendar; other coordinates
(members, levels, lead times that are numbers) have no gaps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import num_rows_of, rows_of
from scidata.core.passes import usual_steps
from scidata.core.types import IntArray, Segments, Source
from scidata.errors import ConfigError
from scidata.grids.labels import known_labels, label_text, labels_of, seconds_of, stored_times
from scidata.grids.partition import selected_rows
from scidata.grids.sample_rows import SampleRows
from scidata.grids.series import Series
from scidata.grids.steps import FieldSteps

_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Where times do not follow each other in the usual step.

    - ``breaks``: ``(num_rows,)`` bool: whether a selected row is not one usual step after the one before it; the first
      never is.
    - ``is_regular``: whether there is a usual step: at least half of all are about as long. Else ``breaks`` has none.
    """

    breaks: npt.NDArray[np.bool_]
    text: str
    is_regular: bool = True

    @property
    def remedy(self) -> str:
        """The remedy that a message names."""
        if self.is_regular:
            return "gaps='skip' leaves out the samples whose steps reach over one"
        return "steps of a sample are neighbouring rows, whatever lies between; gaps='allow' says that this is meant"


def find_gaps(series: Series, selected: Segments, *, crosses: bool = True) -> Gaps | None:
    """Return gaps between selected rows of the dim of samples, if any; ``crosses``: files go on from each other."""
    found = times_of(series) if num_rows_of(selected) > 1 else None
    if found is None:
        return None
    (times, unit), rows = found, rows_of(selected)
    chosen = times[rows]
    steps = np.diff(chosen)
    if not np.isfinite(chosen).all() or not len(steps):
        return None
    follows = np.ones(len(chosen), np.bool_)
    follows[0] = False
    if not crosses:
        follows[1:] = np.diff(np.searchsorted(series.row_bounds, rows, side="right")) == 0
    breaks = follows & ~usual_steps(chosen, follows)
    if not breaks.any():
        return None
    dim = series.sample_dim
    if 2 * int(breaks.sum()) > int(follows.sum()):
        low, high = _length(steps[follows[1:]].min(), unit), _length(steps[follows[1:]].max(), unit)
        text = f"{dim!r} has no usual step, but steps from {low} to {high}"
        return Gaps(breaks=np.zeros_like(breaks), text=text, is_regular=False)
    return Gaps(breaks=breaks, text=_text(series, rows, steps, breaks, unit))


def _text(series: Series, rows: IntArray, steps: npt.NDArray[Any], breaks: npt.NDArray[Any], unit: str) -> str:
    """Say how many gaps there are, and where the first is; of times that come twice, too."""
    labels = known_labels(series, str(series.sample_dim))

    def named(k: int) -> str:
        return f"row {rows[k]}" if labels is None else label_text(labels[rows[k]])

    places, twice = np.flatnonzero(breaks), np.flatnonzero((steps == 0) & breaks[1:]) + 1
    gaps = places[steps[places - 1] != 0]
    usual = _length(np.median(steps[steps != 0]), unit)
    said = []
    if len(gaps):
        k = int(gaps[0])
        many = f"{len(gaps)} gaps in steps of {usual}, the first" if len(gaps) > 1 else f"a gap in steps of {usual},"
        said.append(f"{many} from {named(k - 1)} to {named(k)}")
    if len(twice):
        most = f" ({len(twice)} times come again)" if len(twice) > 1 else ""
        said.append(f"{named(int(twice[0]))} twice{most}")
    return f"{series.sample_dim!r} has {' and '.join(said)}"


def _length(step: float, unit: str) -> str:
    if unit:
        return f"{step:g} {unit}"
    name, size = next((name, size) for name, size in _UNITS if size == 1 or abs(step) >= size)
    return f"{step / size:g} {name}"


def times_of(series: Series) -> tuple[npt.NDArray[np.float64], str] | None:
    """Return each row's time, as stored where all files count alike, and its unit, "" for seconds; None: no times."""
    dim = series.sample_dim
    if dim is None:
        return None
    if series.is_uniform(dim):
        found = [stored_times(series.files[0], dim, series.coordinate(dim))]
    else:
        found = [stored_times(source, dim) for source in series.files_along(dim)]
    known = [each for each in found if each is not None]
    if len(known) < len(found) or not known:
        return None
    since = {said for _, said in known}
    if len(since) == 1:
        values = np.concatenate([values for values, _ in known])
        if values.dtype.kind == "M":
            return seconds_of(values), ""
        return values.astype(np.float64), re.split(r"\s+since\b", since.pop().strip())[0]
    labels = known_labels(series, dim)
    return None if labels is None or labels.dtype.kind not in "MO" else (seconds_of(labels), "")


# -- dates that the data say are missing -----------------------------------------------------------------------------


def without_missing(
    series: Series, crop: Mapping[str, Any], sizes: Mapping[str, int], gaps: str
) -> tuple[dict[str, Any], str]:
    """Return a crop without the dates that a source names as ``missing_dates``, as anemoi's do; and a message."""
    dim = series.sample_dim
    if dim is None or gaps == "allow":
        return dict(crop), ""
    some = any("missing_dates" in source.attributes for source in series.examples)
    named = [date for source in series.files_along(dim) for date in _missing_dates(source)] if some else []
    labels = labels_of(series, dim) if named else None
    if labels is None or labels.dtype.kind != "M":
        return dict(crop), ""
    rows = rows_of(selected_rows(crop, sizes)[dim])
    missing = np.isin(labels[rows].astype("M8[s]"), np.array(named, "M8[s]"))
    if not missing.any():
        return dict(crop), ""
    num, first = int(missing.sum()), label_text(labels[rows][missing][0])
    says = f"{num} missing dates, the first {first}" if num > 1 else f"a missing date, {first}"
    text = f"{series.files[0].path}: has {says}"
    if gaps == "error" or missing.all():
        raise ConfigError(f"{text}; choose others with isel or sel, or read what is stored there with gaps='allow'")
    return {**crop, dim: rows[~missing].tolist()}, f"{text}, left out as its attribute missing_dates says"


def _missing_dates(source: Source) -> list[Any]:
    given = source.attributes.get("missing_dates")
    found = []
    for date in given if isinstance(given, list | tuple | np.ndarray) else ():
        try:
            found.append(np.datetime64(str(date).removesuffix("Z").removesuffix("+00:00"), "s"))
        except ValueError:
            continue
    return found


def rows_of_samples(
    series: Series, selected: Mapping[str, Segments], steps: FieldSteps, gaps: str
) -> tuple[SampleRows, str]:
    """Return the rows of each sample, without samples whose windows cross a gap; and a message."""
    where, dim = series.files[0].path, str(series.sample_dim)
    crosses = not any(hasattr(source, "group") for source in series.examples)  # no group goes on from another
    found = None
    if gaps != "allow" and max(0, *steps.every) > min(0, *steps.every):
        found = find_gaps(series, selected[dim], crosses=crosses)
    if found is not None and gaps == "error":
        raise ConfigError(f"{where}: {found.text}; {found.remedy}")
    made = SampleRows(series, selected, steps, crosses=crosses, breaks=None if found is None else found.breaks)
    shown = ",".join(map(str, steps.every))
    if not made.num:
        num_rows = num_rows_of(selected[dim]) if dim in selected else 1
        over = "" if found is None or not made.num_skipped else f", or over a gap: {found.text}"
        raise ConfigError(
            f"{where}: steps {shown} reach over more rows than the {num_rows} of {dim!r}{over}: there would be no "
            "sample"
        )
    if found is None:
        return made, ""
    if not found.is_regular:
        return made, f"{where}: {found.text}; {found.remedy}"
    left_out = f"{made.num_skipped} of {made.num + made.num_skipped} samples, whose steps {shown} reach over"
    one = " it, is" if made.num_skipped == 1 else " one, are"
    return made, f"{where}: {found.text}: {left_out}{one} left out (gaps='skip')" if made.num_skipped else ""
