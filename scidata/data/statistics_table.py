"""``Statistics``: ``FieldStatistics`` of each field over the samples of a data set, for normalising. No torch.

As a JSON file they are written whole or not at all, and read with every size and type checked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from scidata.core.apart import check_apart
from scidata.core.html import card
from scidata.core.moments import RoundedMoments
from scidata.core.own_files import write_whole
from scidata.core.types import FloatArray, IntArray
from scidata.core.urls import public_text
from scidata.errors import OutputError, UnknownNameError, UnsupportedFormatError, near_matches
from scidata.store.format.streamed import refuse_constant

#: Labels of the rows along a dim; None where it has none.
Labels: TypeAlias = tuple[float | int | str, ...] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FieldStatistics(RoundedMoments):
    """Statistics of one field: arrays of shape ``()``, or one number per row of the kept dims.

    - ``count``, ``missing``, ``infinite``: int64: numbers of finite values, of NaN (also from decoded fill values), and
      of infinite values.
    - ``mean``, ``std``, ``min``, ``max``: float64, of the finite values; NaN where ``count`` is 0. ``std`` is the
      population's (``ddof=0``).
    - ``differences``: the same of the differences from one step to the next; None if there are none.
    - ``skipped``: pairs of rows that follow each other but are not one usual step apart, so that they make no
      difference.
    - ``units``, ``dtype``: of the field, as it was read; None if they are not known.
    """

    dims: tuple[str, ...]
    differences: RoundedMoments | None = None
    skipped: int = 0
    units: str | None = None
    dtype: str | None = None

    @property
    def _steps(self) -> RoundedMoments:
        if self.differences is None:
            raise UnknownNameError("these statistics have no differences from one step to the next")
        return self.differences

    @property
    def difference_count(self) -> IntArray:
        """Number of differences between two finite values one step apart."""
        return self._steps.count

    @property
    def difference_mean(self) -> FloatArray:
        """Mean of these differences."""
        return self._steps.mean

    @property
    def difference_std(self) -> FloatArray:
        """Population standard deviation of these differences."""
        return self._steps.std

    @property
    def difference_min(self) -> FloatArray:
        """Smallest of these differences."""
        return self._steps.min

    @property
    def difference_max(self) -> FloatArray:
        """Largest of these differences."""
        return self._steps.max

    def __repr__(self) -> str:
        by = f" by {', '.join(self.dims)}" if self.dims else ""
        return f"FieldStatistics({int(self.count.sum())} values{by}, mean {span(self.mean)}, std {span(self.std)})"


def span(values: FloatArray) -> str:
    """Return a number, or the smallest and the largest of several."""
    known = values[np.isfinite(values)]
    if not known.size:
        return "nan"
    low, high = float(known.min()), float(known.max())
    return f"{low:.6g}" if low == high or math.isclose(low, high, rel_tol=1e-6) else f"{low:.4g} to {high:.4g}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics(Mapping[str, FieldStatistics]):
    """Statistics of each field, by name: ``stats["u"].mean``. Made by :func:`scidata.statistics`, or :meth:`load`.

    Attributes
    ----------
    fields
        By name.
    labels
        Labels of the rows along each dim that statistics are kept by: numbers or text; None if it has none.
    path
        Where the data lie.
    period
        The samples that went in: ``samples``, their number, and for data along a dim its ``dim``, with ``rows``,
        ``first`` and ``last``, as text.
    fingerprint
        The data set's: a digest of all that decides its samples.
    source
        ``"data"``, or ``"store"`` where they were stored with the data.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> wanted = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> stats = scidata.statistics(scidata.open_dataset("era5.zarr"), by="level")
    >>> list(stats), stats["u"].dims, stats["u"].mean.shape, stats.labels["level"]
    (['t', 'u', 'v'], ('level',), (3,), (1000, 550, 100))
    >>> stats["u"].count.tolist(), bool(abs(stats["u"].mean[0] - wanted["u"][:, 0].mean(dtype="f8")) < 1e-14)
    ([224, 224, 224], True)
    """

    fields: Mapping[str, FieldStatistics]
    labels: Mapping[str, Labels] = field(default_factory=dict)
    path: str = ""
    period: Mapping[str, object] = field(default_factory=dict)
    fingerprint: str = ""
    source: str = "data"

    def __getitem__(self, name: str) -> FieldStatistics:
        try:
            return self.fields[name]
        except KeyError:
            raise UnknownNameError(f"no statistics of field {name!r}{near_matches(name, self.fields)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write readable JSON; numbers are restored bit for bit. Call it on one rank only.

        Parameters
        ----------
        path : str or PathLike
            The file.
        overwrite : bool, default False
            Replace a file that is there.

        Raises
        ------
        OutputError
            The file is there already, and is not to be overwritten.

        Examples
        --------
        >>> stats.save("era5.json")
        """
        name = os.path.expanduser(os.fspath(path))
        check_place(name, [self.path], overwrite=overwrite)
        text = public_text("\n".join(_lines(as_plain(self), ""))) + "\n"
        write_whole(name, text.encode(), durable=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read a file that :meth:`save` wrote.

        Parameters
        ----------
        path : str or PathLike
            A file that :meth:`save` wrote.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        UnsupportedFormatError
            It is no JSON of statistics, or of a later version; the place of the fault is named.

        Examples
        --------
        >>> stats.save("again.json")
        >>> bool((scidata.Statistics.load("again.json")["u"].mean == stats["u"].mean).all())
        True
        """
        name = os.path.expanduser(os.fspath(path))
        if os.path.getsize(name) > _MAX_BYTES:
            raise UnsupportedFormatError(f"{name}: {os.path.getsize(name)} bytes are more than statistics take")
        with open(name, encoding="utf-8") as file:
            try:
                data = json.load(file, parse_constant=refuse_constant)
            except (ValueError, RecursionError) as e:
                raise UnsupportedFormatError(f"{name}: no JSON ({e}); write it with Statistics.save") from None
        return _Reading(name).statistics(data)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Return a record of plain numbers for each field and each row of its kept dims.

        Examples
        --------
        >>> len(list(stats.rows())) > 0
        True
        """
        for name, found in self.items():
            for place in np.ndindex(found.count.shape):
                labels = {dim: self.labels.get(dim) for dim in found.dims}
                labelled = {d: at if (n := labels[d]) is None else n[at] for d, at in zip(labels, place, strict=True)}
                record = {"field": name, "units": found.units} | labelled | _numbers(found, place)
                if found.differences is not None:
                    steps = _numbers(found.differences, place)
                    record |= {f"difference_{key}": value for key, value in steps.items()}
                    record |= {"skipped": found.skipped}
                yield record

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: mean {span(x.mean)}, std {span(x.std)}" for name, x in self.items())
        return f"Statistics({self.path!r}, {self.period.get('samples', '?')} samples; {shown})"

    def _repr_html_(self) -> str:
        columns = ("field", "by", "count", "missing", "mean", "std", "min", "max", "std of differences")
        rows = [
            (
                *(name, ", ".join(x.dims) or "-", int(x.count.sum()), int(x.missing.sum())),
                *(span(array) for array in (x.mean, x.std, x.min, x.max)),
                "-" if x.differences is None else span(x.difference_std),
            )
            for name, x in self.items()
        ]
        return card("Statistics", {"path": self.path} | dict(self.period), columns, rows)


def _numbers(moments: RoundedMoments, place: tuple[int, ...]) -> dict[str, object]:
    return {name: array[place].item() for name, array in moments.parts().items()}


_FORMAT, _VERSION = "scidata statistics", 1
_MAX_BYTES = 256 << 20


T = TypeVar("T")


def check_place(path: str, inputs: Iterable[str], *, overwrite: bool) -> None:
    """Raise OutputError if a file evidently cannot be written, or lies in an input."""
    if os.path.isdir(path):
        raise OutputError(f"{path}: is a folder; name a file in it, {os.path.join(path, 'stats.json')} say")
    check_apart(path, inputs, "the file of statistics")
    if os.path.exists(path) and not overwrite:
        raise OutputError(f"{path} is there already; remove it, or overwrite it with overwrite=True")
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        raise OutputError(f"{path}: there is no folder {folder}; make it first")


def as_plain(stats: Statistics) -> dict[str, object]:
    """Return statistics as JSON values; NaN becomes None."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "path": stats.path,
        "fingerprint": stats.fingerprint,
        "source": stats.source,
        "period": dict(stats.period),
        "std": "of the population (ddof=0)",
        "labels": {dim: None if labels is None else list(labels) for dim, labels in stats.labels.items()},
        "fields": {name: _plain_field(found) for name, found in stats.fields.items()},
    }


def _plain_field(found: FieldStatistics) -> dict[str, object]:
    about = {"dims": list(found.dims), "shape": list(found.count.shape), "units": found.units, "dtype": found.dtype}
    differences = None
    if found.differences is not None:
        differences = {"skipped": found.skipped} | _plain_moments(found.differences)
    return about | {"values": _plain_moments(found), "differences": differences}


def _plain_moments(moments: RoundedMoments) -> dict[str, object]:
    parts = moments.parts().items()
    return {name: np.where(np.isfinite(array), array.astype(object), np.array(None)).tolist() for name, array in parts}


def _lines(value: object, indent: str) -> list[str]:
    if not isinstance(value, Mapping) or not value:
        return [json.dumps(value, allow_nan=False, ensure_ascii=True)]
    lines = ["{"]
    for number, (key, item) in enumerate(value.items(), 1):
        first, *more = _lines(item, indent + " ")
        inner = [f"{indent} {json.dumps(str(key))}: {first}", *more]
        lines += [*inner[:-1], inner[-1] + ("," if number < len(value) else "")]
    return [*lines, indent + "}"]


# -- reading -----------------------------------------------------------------------------------------------------------


class _Reading:
    """Checks a file's content; errors name the place of a fault."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _check(self, is_right: bool, where: str, expected: str, found: object) -> None:
        if not is_right:
            shown = repr(found)
            shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
            raise UnsupportedFormatError(f"{self._path}: {where}: expected {expected}, found {shown}")

    def _get(self, data: Mapping[str, object], key: str, kind: type[T], where: str = "", also: str = "") -> T:
        value = data.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            self._check(False, f"{where}{key}", f"{_WORDS[kind]}{also}", value)
        return value  # type: ignore[return-value]  # of this kind

    def _get_or_none(self, data: Mapping[str, object], key: str, kind: type[T], where: str) -> T | None:
        return None if data.get(key) is None else self._get(data, key, kind, where, " or null")

    def statistics(self, data: object) -> Statistics:
        data = data if isinstance(data, dict) else {"format": data}
        self._check(data.get("format") == _FORMAT, "format", repr(_FORMAT), data.get("format"))
        version = self._get(data, "version", int)
        self._check(version == _VERSION, "version", f"{_VERSION}, which this scidata knows", version)
        labels = {dim: self._labels(dim, x) for dim, x in self._get(data, "labels", dict).items()}
        fields, period = self._get(data, "fields", dict), self._get(data, "period", dict)
        for key, value in period.items():
            is_right = isinstance(value, str | int | None) and not isinstance(value, bool)
            self._check(is_right, f"period.{key}", "text or an integer", value)
        return Statistics(
            fields={name: self._field(fields, name, labels) for name in fields},
            labels=labels,
            path=self._get(data, "path", str),
            period=period,
            fingerprint=self._get(data, "fingerprint", str),
            source=self._get(data, "source", str),
        )

    def _labels(self, dim: str, labels: object) -> Labels:
        if labels is None:
            return None
        found = labels if isinstance(labels, list) else [None]
        is_right = all(isinstance(x, str | int | float) and x is not True for x in found)
        self._check(is_right, f"labels.{dim}", "a list of numbers or text", labels)
        return tuple(found)

    def _field(self, fields: dict[str, object], name: str, labels: Mapping[str, Labels]) -> FieldStatistics:
        data, where = self._get(fields, name, dict, "fields."), f"fields.{name}."
        dims, shape = self._get(data, "dims", list, where), self._get(data, "shape", list, where)
        are_names = all(isinstance(dim, str) for dim in dims) and len(set(dims)) == len(dims)
        self._check(are_names, f"{where}dims", "names of dims", dims)
        are_sizes = len(shape) == len(dims) and all(type(size) is int and size >= 0 for size in shape)
        self._check(are_sizes, f"{where}shape", "a size of each dim", shape)
        for dim, size in zip(dims, shape, strict=True):
            num = size if (known := labels.get(dim)) is None else len(known)
            self._check(num == size, f"labels.{dim}", f"{size} labels, as many as {name!r} has rows", num)
        differences, steps = self._get_or_none(data, "differences", dict, where), f"{where}differences."
        return FieldStatistics(
            **self._moments(self._get(data, "values", dict, where), tuple(shape), f"{where}values.").parts(),
            dims=tuple(dims),
            differences=None if differences is None else self._moments(differences, tuple(shape), steps),
            skipped=0 if differences is None else self._get(differences, "skipped", int, steps),
            units=self._get_or_none(data, "units", str, where),
            dtype=self._get_or_none(data, "dtype", str, where),
        )

    def _moments(self, data: dict[str, object], shape: tuple[int, ...], where: str) -> RoundedMoments:
        arrays: dict[str, Any] = {}
        for name in RoundedMoments.__dataclass_fields__:
            is_count, given = name in ("count", "missing", "infinite"), data.get(name)
            place, flat = f"{where}{name}", np.array(given, object).ravel().tolist()
            allowed = (int,) if is_count else (int, float, type(None))
            are_numbers = all(isinstance(x, allowed) and not isinstance(x, bool) for x in flat)
            self._check(are_numbers, place, "numbers", given)
            try:
                numbers = np.array([math.nan if x is None else x for x in flat], np.int64 if is_count else np.float64)
                arrays[name] = numbers.reshape(shape)
            except (ValueError, OverflowError):
                self._check(False, place, f"numbers of shape {shape}", given)
            self._check(not is_count or bool((arrays[name] >= 0).all()), place, "no negative number", given)
        return RoundedMoments(**arrays)


_WORDS: dict[type, str] = {dict: "an object", list: "a list", str: "text", int: "an integer"}
