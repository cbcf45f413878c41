"""Joined samples of several data sets, and the parts of them that a rank reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from scidata.core.sample_source import SampleSource
from scidata.core.types import AnyArray
from scidata.data.sample import Sample
from scidata.errors import UnknownNameError, near_matches
from scidata.read.context import NO_READ, ReadStats


class JoinedSample(Mapping[str, Any]):
    """One sample, or batch, of each data set of a :class:`JoinedDataset`, by name.

    Attributes
    ----------
    key
        The key that they have in common, ``numpy.datetime64`` say; of a batch an array of them.
    index : int or list[int]
        The number in the joined data set, or those of a batch.

    Examples
    --------
    >>> from scidata.testing import make_grid
    >>> _ = make_grid("era5.zarr", num_times=4, num_lat=7, num_lon=8)
    >>> ds = scidata.open_dataset("era5.zarr", fields=["u"])
    >>> sample = scidata.join({"now": ds, "next": ds}, on="time", at={"next": "6h"})[1]
    >>> list(sample), sample.index, str(sample.key), str(sample["next"].source[0].time)
    (['now', 'next'], 1, '2020-01-01T06:00:00.000000000', '2020-01-01T12:00:00.000000000')
    """

    def __init__(self, parts: Mapping[str, Any], *, key: object, index: int | list[int]) -> None:
        self._parts = dict(parts)
        self.key, self.index = key, index

    def __getitem__(self, name: str) -> Any:
        try:
            return self._parts[name]
        except KeyError:
            raise UnknownNameError(f"the sample has no part {name!r}{near_matches(name, self._parts)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def source(self) -> tuple[SampleSource, ...]:
        """Sources of the values, part by part: see :attr:`Sample.source`."""
        return tuple([source for part in self.values() for source in getattr(part, "source", ())])

    def replace(self, parts: Mapping[str, object]) -> Self:
        """Return a sample with these parts added or replaced.

        Parameters
        ----------
        parts : Mapping[str, object]
            By name.

        Examples
        --------
        >>> list(sample.replace({"mean": sample["now"]["u"].mean()}))
        ['now', 'next', 'mean']
        """
        return type(self)({**self._parts, **parts}, key=self.key, index=self.index)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return a sample with ``to`` called on each part with these arguments."""
        return self.replace({n: x.to(*args, **kwargs) if hasattr(x, "to") else x for n, x in self.items()})

    def seed_generator(self, seed: int, epoch: int) -> None:
        """Set the seed and epoch of the parts' ``generator``; for loaders."""
        for part in self.values():
            if isinstance(part, Sample | JoinedSample):
                part.seed_generator(seed, epoch)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {part!r}" for name, part in self.items())
        return f"JoinedSample(index={self.index}, key={self.key}, {parts})"


def flat(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return values by ``"part/field"``."""
    return {f"{name}/{key}": value for name, part in parts.items() for key, value in part.items()}


def by_part(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Undo :func:`flat`."""
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in values.items():
        name, _, rest = key.partition("/")
        found[name][rest] = value
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedPart:
    """One rank's part of the samples of all data sets, by name, as each data set assembles it."""

    index: int
    parts: Mapping[str, Any]
    number: int | list[int] | None = None  # in a data set that is made of the join
    stats: ReadStats = field(default=NO_READ)

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of all parts, by ``"part/field"``."""
        return flat({name: getattr(part, "fields", part) for name, part in self.parts.items()})

    def arrays(self) -> dict[str, AnyArray]:
        """Return all arrays that become tensors, by the names that :meth:`with_arrays` takes."""
        return flat({name: _arrays_of(part) for name, part in self.parts.items()})

    def with_arrays(self, arrays: Mapping[str, Any]) -> JoinedPart:
        """Return the part with :meth:`arrays` replaced, by tensors for example."""
        own, parts = by_part(arrays, list(self.parts)), dict(self.parts)
        for name, part in self.parts.items():
            if isinstance(part, Mapping):
                parts[name] = own[name]
            elif hasattr(part, "with_arrays"):
                parts[name] = part.with_arrays(own[name])
        return replace(self, parts=parts)


def _arrays_of(part: Any) -> Mapping[str, AnyArray]:
    if isinstance(part, Mapping):
        return {key: np.asarray(values, order="C") for key, values in part.items()}
    found: Mapping[str, AnyArray] = part.arrays() if hasattr(part, "arrays") else {}
    return found
