"""``Statistics``: figures of each field over the samples of a data set, for normalising. No torch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.html import card
from scidata.core.moments import RoundedMoments
from scidata.errors import UnknownNameError, near_matches

Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]

#: What labels the rows along a dim; None where nothing does.
Labels: TypeAlias = tuple[float | int | str, ...] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class FieldStatistics:
    """Figures of one field: arrays of shape ``()``, or one number for each row of the dims they are kept by.

    Attributes
    ----------
    dims
        The dims of the arrays.
    values, differences
        Figures of the values, and of the differences from one step to the next; None where there are none. Each has
        ``count``, ``missing`` and ``infinite`` (int64), ``mean``, ``std``, ``min``, ``max`` (float64, NaN where
        ``count`` is 0). ``std`` is the population's (``ddof=0``). Missing is NaN, also of decoded fill values; it and
        infinite numbers are counted, and enter nothing else.
    skipped
        Pairs of rows that follow each other but are not one usual step apart, so that they make no difference.
    units, dtype
        Of the field, as it was read; None where they are not known.
    """

    dims: tuple[str, ...]
    values: RoundedMoments
    differences: RoundedMoments | None = None
    skipped: int = 0
    units: str | None = None
    dtype: str | None = None

    @property
    def count(self) -> Counts:
        """Finite values."""
        return self.values.count

    @property
    def missing(self) -> Counts:
        """Values that are NaN."""
        return self.values.missing

    @property
    def infinite(self) -> Counts:
        """Values that are infinite."""
        return self.values.infinite

    @property
    def mean(self) -> Floats:
        """Mean of the finite values."""
        return self.values.mean

    @property
    def std(self) -> Floats:
        """Their standard deviation, of the population."""
        return self.values.std

    @property
    def min(self) -> Floats:
        """The least of them."""
        return self.values.min

    @property
    def max(self) -> Floats:
        """The greatest of them."""
        return self.values.max

    def _of_steps(self, name: str) -> Any:
        if self.differences is None:
            raise UnknownNameError("these statistics have no differences from one step to the next")
        return getattr(self.differences, name)

    @property
    def difference_count(self) -> Counts:
        """Differences between two finite values, one step apart."""
        return self._of_steps("count")  # type: ignore[no-any-return]

    @property
    def difference_mean(self) -> Floats:
        """Mean of these differences."""
        return self._of_steps("mean")  # type: ignore[no-any-return]

    @property
    def difference_std(self) -> Floats:
        """Their standard deviation, of the population."""
        return self._of_steps("std")  # type: ignore[no-any-return]

    @property
    def difference_min(self) -> Floats:
        """The least of them."""
        return self._of_steps("min")  # type: ignore[no-any-return]

    @property
    def difference_max(self) -> Floats:
        """The greatest of them."""
        return self._of_steps("max")  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        by = f" by {', '.join(self.dims)}" if self.dims else ""
        return f"FieldStatistics({int(self.count.sum())} values{by}, mean {_span(self.mean)}, std {_span(self.std)})"


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics(Mapping[str, FieldStatistics]):
    """Figures of each field, by name: ``stats["u"].mean``. Made by :func:`scidata.statistics`, or :meth:`load`.

    Attributes
    ----------
    fields
        By name.
    labels
        What labels the rows along each dim that figures are kept by: numbers or text; None where nothing does.
    path
        Where the data lie.
    period
        Of what samples the figures are: ``samples``, their number, and of data along a dim its ``dim``, with ``rows``,
        ``first`` and ``last``, as text.
    fingerprint
        The data set's: a digest of what decides its samples.
    source
        ``"data"``, or ``"store"`` where figures were taken from what the data have of themselves.

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
    period: Mapping[str, Any] = field(default_factory=dict)
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
        """Write JSON that people can read too; numbers come back bit for bit. Of several ranks let one do it.

        Raises
        ------
        OutputError
            The file is there already, and is not to be overwritten.
        """
        from scidata.data.statistics_json import save

        save(self, os.fspath(path), overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read what :meth:`save` wrote.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        UnsupportedFormatError
            It is no JSON of statistics, or of a later version; the place of the fault is named.
        """
        from scidata.data.statistics_json import load

        return load(os.fspath(path))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Return a record of plain numbers for each field and each row of the dims that its figures are kept by."""
        for name, found in self.items():
            for place in np.ndindex(found.count.shape):
                labelled = {dim: self._label(dim, at) for dim, at in zip(found.dims, place, strict=True)}
                record = {"field": name, "units": found.units} | labelled | _numbers(found.values, place)
                if found.differences is not None:
                    steps = _numbers(found.differences, place)
                    record |= {f"difference_{key}": value for key, value in steps.items()}
                    record |= {"skipped": found.skipped}
                yield record

    def _label(self, dim: str, at: int) -> float | int | str:
        labels = self.labels.get(dim)
        return at if labels is None else labels[at]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: mean {_span(x.mean)}, std {_span(x.std)}" for name, x in self.items())
        return f"Statistics({self.path!r}, {self.period.get('samples', '?')} samples; {shown})"

    def _repr_html_(self) -> str:
        columns = ("field", "by", "count", "missing", "mean", "std", "min", "max", "std of differences")
        rows = [
            (
                *(name, ", ".join(x.dims) or "-", int(x.count.sum()), int(x.missing.sum())),
                *(_span(array) for array in (x.mean, x.std, x.min, x.max)),
                "-" if x.differences is None else _span(x.difference_std),
            )
            for name, x in self.items()
        ]
        return card("Statistics", {"path": self.path} | dict(self.period), columns, rows)


def _numbers(figures: RoundedMoments, place: Sequence[int]) -> dict[str, Any]:
    return {part.name: getattr(figures, part.name)[tuple(place)].item() for part in dataclasses.fields(figures)}


def _span(values: Floats) -> str:
    """Return a number, or the least and the greatest of several."""
    known = values[np.isfinite(values)]
    if not known.size:
        return "nan"
    low, high = float(known.min()), float(known.max())
    return f"{low:.6g}" if low == high or math.isclose(low, high, rel_tol=1e-6) else f"{low:.4g} to {high:.4g}"
