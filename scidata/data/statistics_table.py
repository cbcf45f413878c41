"""``Statistics``: those of each field over the samples of a data set, for normalising. No torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scidata.core.html import card
from scidata.core.moments import RoundedMoments
from scidata.data.field_statistics import FieldStatistics, StatisticsOfFields, span
from scidata.data.statistics_json import load, save
from scidata.errors import UnknownNameError, near_matches


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics(StatisticsOfFields, Mapping[str, FieldStatistics]):
    """Statistics of each field, by name: ``stats["u"].mean``. Made by :func:`scidata.statistics`, or :meth:`load`.

    Attributes
    ----------
    fields
        By name.
    labels
        Labels of the rows along each dim that statistics are kept by: numbers or text; None where it has none.
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
        return cls(**vars(load(os.fspath(path))))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Return a record of plain numbers for each field and each row of the dims that it is kept by."""
        for name, found in self.items():
            for place in np.ndindex(found.count.shape):
                labels = {dim: self.labels.get(dim) for dim in found.dims}
                labelled = {d: at if (n := labels[d]) is None else n[at] for d, at in zip(labels, place, strict=True)}
                record = {"field": name, "units": found.units} | labelled | _numbers(found.values, place)
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


def _numbers(moments: RoundedMoments, place: Sequence[int]) -> dict[str, object]:
    return {part.name: getattr(moments, part.name)[tuple(place)].item() for part in dataclasses.fields(moments)}
