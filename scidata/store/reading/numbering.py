"""Numbers of samples, and the times and levels that each has of fields' other dims. Pure metadata.

A stored sample is one topology. Where its fields have a time, each of its times is a sample of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scidata.core.bounds import bounds_of, num_rows_of, rows_of, segments_of_slice
from scidata.core.checks import check_steps as checked_offsets
from scidata.core.options import DEFAULTS, Crop, ReadOptions
from scidata.core.types import AnyArray, IntArray, Selection
from scidata.errors import ConfigError, FieldMismatchError, SciDataError, check_known
from scidata.sources.cf import names_time
from scidata.store.format.manifest import FieldInfo, StoredMoments, merge_statistics, statistics_of
from scidata.store.format.store import Store
from scidata.store.reading.rows import StoredSamples

#: The dim that ``scidata partition --mesh`` makes of fields that lie in several files and have no time.
_JOINED = "sample"


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbering:
    """Samples are numbered by stored sample, then by row along ``sample_dim``, for which every step exists.

    - ``sample_dim``: dim whose rows are samples; None if each stored sample is one.
    - ``steps``: offsets along it. One step drops the dim, several keep it.
    - ``isel``: crop, stride, index or indices of dims, ``sample_dim`` among them.
    - ``firsts``: number of the first sample of each stored one, and of all samples.
    """

    store: StoredSamples
    firsts: Sequence[int]
    sample_dim: str | None = None
    steps: tuple[int, ...] = (0,)
    isel: Mapping[str, Any] = field(default_factory=dict)
    _sizes: tuple[int, ...] = field(default=(), repr=False)  # rows along sample_dim of each stored sample

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.firsts[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the stored sample of a sample, and which of its samples it is."""
        num = self.num_samples
        if not -num <= index < num:
            along = "" if self.sample_dim is None else f" along {self.sample_dim!r} with steps {self.steps}"
            raise IndexError(f"{self.store.path}: sample {index} is out of range: there are {num} samples{along}")
        index %= num
        stored = bisect.bisect_right(self.firsts, index) - 1
        return stored, index - self.firsts[stored]

    def rows(self, index: int) -> list[int]:
        """Return the rows along ``sample_dim`` of a sample, one per step; ``[]`` if there is no such dim."""
        if self.sample_dim is None:
            return []
        stored, places = zip(*self.times(index), strict=True)
        return self.times_at(stored[0], np.array(places)).tolist()

    def times(self, index: int) -> list[tuple[int, int]]:
        """Return the stored sample of a sample, and the place of each of its steps among the times that are kept."""
        stored, row = self.locate(index)
        if self.sample_dim is None:
            return [(stored, 0)]
        first = row - min(0, *self.steps)
        return [(stored, first + step) for step in self.steps]

    def times_at(self, stored: int, places: IntArray) -> IntArray:
        """Return the rows along ``sample_dim`` of a stored sample at some of those places."""
        return _kept_rows(self.isel.get(str(self.sample_dim), slice(None)), self._sizes[stored])[places]

    def dims(self, info: FieldInfo) -> tuple[str, ...]:
        """Return the dims of a field in a sample."""
        return tuple(d for i, d in enumerate(info.dims) if not self._dropped(info, i))

    def steps_of(self, info: FieldInfo | None) -> tuple[int, ...]:
        """Return the steps that a sample has of a field, of an unknown one all: none of one without times."""
        return self.steps if info is None or self.sample_dim in _free_dims(info) else ()

    def entity_dim(self, info: FieldInfo) -> int:
        """Return which of them is the entity's."""
        return sum(not self._dropped(info, i) for i in range(info.entity_dim))

    def is_shared(self, info: FieldInfo, index: int) -> bool:
        """Whether other samples of the same stored one have the same values: a field without times."""
        stored, _ = self.locate(index)
        return self.sample_dim not in info.dims and self.firsts[stored + 1] - self.firsts[stored] > 1

    def shape(self, info: FieldInfo, index: int) -> tuple[int, ...]:
        """Return the shape of a field in a sample."""
        counts = map(num_rows_of, self.segments(info, index))
        return tuple(n for i, n in enumerate(counts) if not self._dropped(info, i))

    def segments(self, info: FieldInfo, index: int) -> Selection:
        """Return a sample's rows along each dim of the stored field: all those of the entity's."""
        return self.segments_at(info, self.locate(index)[0], self.rows(index))

    def segments_at(self, info: FieldInfo, stored: int, rows: list[int]) -> Selection:
        """Return the same of some rows along ``sample_dim`` of a stored sample."""
        chosen = {**self.isel} if self.sample_dim is None else {**self.isel, self.sample_dim: rows}
        crops = [chosen.get(dim, slice(None)) for dim in info.dims]
        crops[info.entity_dim] = slice(None)
        return tuple(map(segments_of_slice, crops, self.store.sample(stored).arrays[info.path].shape))

    def statistics(self, info: FieldInfo, figures: StoredMoments) -> StoredMoments:
        """Return the figures of the components that samples have; over all times, also where ``isel`` leaves some."""
        tail = range(info.entity_dim + 1, len(info.dims))
        if not any(info.dims[i] == self.sample_dim or info.dims[i] in self.isel for i in tail):
            return figures
        shape = tuple(self.store.sample(0).arrays[info.path].shape[i] for i in tail)
        parts = _as_arrays(figures, shape)
        for axis in reversed(range(len(tail))):
            dim = info.dims[tail[axis]]
            if dim == self.sample_dim:
                times = [statistics_of([x.take(t, axis) for x in parts]) for t in range(shape[axis])]
                left = parts[0].take(0, axis)
                parts = _as_arrays(merge_statistics(times, left.size), left.shape)
                if len(self.steps) > 1:
                    parts = [np.repeat(np.expand_dims(x, axis), len(self.steps), axis) for x in parts]
            elif dim in self.isel:
                rows = _kept_rows(self.isel[dim], shape[axis])
                parts = [x.take(rows[0] if self._dropped(info, tail[axis]) else rows, axis) for x in parts]
        return statistics_of(parts)

    def describe(self, infos: Sequence[FieldInfo]) -> list[object]:
        """Return all that decides the samples of some fields, as plain values for a digest."""
        kept = None if self.sample_dim is None else self.isel.get(self.sample_dim, slice(None))
        times = [] if kept is None else [_kept_rows(kept, size).tolist() for size in self._sizes]
        some = self.num_samples > 0
        crops = {
            info.path: [
                [(s.start, s.count, s.step) for s in segments]
                for i, segments in enumerate(self.segments(info, 0))
                if i != info.entity_dim and info.dims[i] != self.sample_dim
            ]
            for info in (infos if some else ())
        }
        return [self.sample_dim, self.steps, times, crops]

    def _dropped(self, info: FieldInfo, i: int) -> bool:
        if i == info.entity_dim:
            return False
        if info.dims[i] == self.sample_dim:
            return len(self.steps) == 1
        return isinstance(self.isel.get(info.dims[i]), int | np.integer)


def number_samples(store: Store, infos: Sequence[FieldInfo], options: ReadOptions = DEFAULTS) -> Numbering:
    """Number the samples of a store.

    - ``infos``: the fields that are read.
    - ``options``: ``sample_dim``: a dim of some field of the store; None: the one of ``infos`` whose name says time,
      else ``"sample"`` where the store was made of several files' fields, else none; False: none. ``steps`` and
      ``isel`` as in :func:`scidata.open_dataset`.

    Raises UnknownNameError, ConfigError, FieldMismatchError: no such dim, steps without one, a crop of an entity, or
    fields that differ in their number of times.
    """
    asked = options.sample_dim
    if not isinstance(asked, str | int | None):
        raise ConfigError(
            f"sample_dim={asked!r}: {store.path} is a store, whose stored samples are the trajectories; name the "
            "dimension of steps alone"
        )
    offsets = checked_offsets(options.steps)
    chosen = _sample_dim(store, infos, asked)
    if chosen is None and offsets != (0,):
        raise ConfigError(
            f"{store.path}: steps={offsets} are offsets along a dimension, and no field that is read has a time; name "
            "the dimension with sample_dim"
        )
    crop = _checked_crop(store, infos, options.isel or {}, chosen)
    sizes: tuple[int, ...] = ()
    firsts: Sequence[int] = range(len(store) + 1)
    if chosen is not None:
        sizes = _times(store, infos, chosen)
        lost = max(0, *offsets) - min(0, *offsets)
        kept = {size: len(_kept_rows(crop.get(chosen, slice(None)), size)) for size in set(sizes)}
        counts = np.array([max(0, kept[size] - lost) for size in sizes], np.int64)
        if sizes and not counts.any():
            raise ConfigError(
                f"{store.path}: steps {','.join(map(str, offsets))} reach over more rows than any stored sample has of "
                f"{chosen!r}, at most {max(kept.values())}: there would be no sample"
            )
        firsts = bounds_of(counts).tolist()
    return Numbering(store=store, sample_dim=chosen, steps=offsets, isel=crop, firsts=firsts, _sizes=sizes)


def _free_dims(info: FieldInfo) -> list[str]:
    return [dim for i, dim in enumerate(info.dims) if i != info.entity_dim]


def _sample_dim(store: Store, infos: Sequence[FieldInfo], asked: str | int | None) -> str | None:
    if asked is None:
        dims = [dim for info in infos for dim in _free_dims(info)]
        return next((d for d in dims if names_time(d)), _JOINED if _JOINED in dims else None)
    if asked is False:
        return None
    known = list(dict.fromkeys(dim for info in store.manifest.fields.values() for dim in _free_dims(info)))
    if not isinstance(asked, str):
        raise ConfigError(f"sample_dim={asked!r}: name the dimension; the fields of {store.path} have {known}")
    check_known(f"{store.path}: sample_dim names dimension", [asked], known, ", which no field has besides its rows")
    return asked


def _times(store: Store, infos: Sequence[FieldInfo], sample_dim: str) -> tuple[int, ...]:
    """Return the rows along ``sample_dim`` of each stored sample."""
    fields = [info for info in infos if sample_dim in _free_dims(info)] or store.manifest.fields.values()
    places = [(f.path, i) for f in fields for i, d in enumerate(f.dims) if d == sample_dim and i != f.entity_dim]
    samples = store.manifest.samples
    sizes = {path: samples.column("arrays", path, "shape", i) for path, i in places}
    first = next(iter(sizes.values()))
    for other in sizes.values():
        for index in np.flatnonzero(other != first)[:1].tolist():
            sample, found = store.sample(index), {path: int(each[index]) for path, each in sizes.items()}
            raise FieldMismatchError(
                f"{store.path}: sample {sample.index} ({sample.name}): fields differ in how many {sample_dim!r} they "
                f"have: {found}; write them to stores of their own, or read them whole with sample_dim=False"
            )
    return tuple(first.tolist())


def _checked_crop(store: Store, infos: Sequence[FieldInfo], isel: Crop, sample_dim: str | None) -> dict[str, Any]:
    known = list(dict.fromkeys(dim for info in infos for dim in _free_dims(info)))
    rows = {info.dims[info.entity_dim] for info in infos} | set(store.manifest.entities)
    for dim, crop in isel.items():
        if dim not in known and dim != sample_dim:
            if dim in rows:
                raise ConfigError(
                    f"{store.path}: isel of {dim!r}: rows of a store are cut by rank, not cropped; write a store of "
                    "the part that is wanted"
                )
            check_known(f"{store.path}: isel: no field has a dimension", [dim], known)
        for path, size in _sizes_of(store, infos, str(dim)):
            try:
                empty = not len(_kept_rows(crop, size))
            except SciDataError as e:
                raise ConfigError(f"{store.path}: isel of {dim!r} in field {path!r}: {e}") from e
            if empty:
                raise ConfigError(f"{store.path}: isel leaves no rows of {dim!r}, of which {path!r} has {size}")
    return {str(dim): crop for dim, crop in isel.items()}


def _sizes_of(store: Store, infos: Sequence[FieldInfo], dim: str) -> list[tuple[str, int]]:
    places = [(f.path, i) for f in infos for i, d in enumerate(f.dims) if d == dim and i != f.entity_dim]
    column = store.manifest.samples.column
    return sorted({(path, n) for path, i in places for n in np.unique(column("arrays", path, "shape", i)).tolist()})


def _as_arrays(figures: StoredMoments, shape: Sequence[int]) -> list[AnyArray]:
    return [np.reshape(x, shape) for x in (figures.count, figures.mean, figures.std, figures.min, figures.max)]


def _kept_rows(selection: slice | int | Sequence[int], size: int) -> IntArray:
    return rows_of(segments_of_slice(selection, size))
