"""One store, or several files that continue each other along one dimension (``era5_2015.nc, era5_2016.nc, …``).

Steps of a sample lie in a *member*: a file, or one trajectory of a file that holds several of them.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.sample_source import SampleSource
from scidata.core.types import AnyArray, ArrayLayout, IntArray, Segment, Segments, Source
from scidata.errors import FieldMismatchError
from scidata.read.arrays import array_of, decoded, read_array
from scidata.sources.cf import decoding_of
from scidata.sources.indexed import IndexedFiles

T = TypeVar("T")


class Series:
    """Stores that continue each other along one dimension, seen as one.

    Files must agree in fields, dims, dtype, shape and the coordinates of other dimensions. Only metadata and
    coordinates are read, so every rank raises the same.

    - ``outer``: dimensions that number trajectories, each with steps of its own. Files follow each other along the
      first of them, or else along ``sample_dim``.
    - ``firsts``: the first member of each; the members of a file are one after the other, the last of ``outer``
      fastest.
    - ``kinds``, ``examples``: the first file of each kind, and its store: all others are like one of them, as an index
      shows, but for their samples' coordinates and where their bytes lie.
    """

    def __init__(
        self,
        files: Sequence[Source],
        fields: Sequence[str],
        sample_dim: str | None,
        *,
        outer: Sequence[str] = (),
    ) -> None:
        self.files = files if isinstance(files, IndexedFiles) else tuple(files)
        self.sample_dim, self.outer = sample_dim, tuple(outer)
        self._along = self.outer[0] if outer else sample_dim
        self.fields = tuple(fields)
        if len(files) > 1 and self._along is None:
            raise FieldMismatchError(
                f"{len(files)} files have no dimension to follow each other along; name it with sample_dim"
            )
        self._layouts: dict[int, dict[str, ArrayLayout]] = {0: {name: array_of(files[0], name) for name in self.fields}}
        dims = {dim for layout in self._layouts[0].values() for dim in layout.dims}
        self._kinds = list(range(len(files)))
        if isinstance(files, IndexedFiles):
            along = {self._along, sample_dim}
            self._kinds = files.kinds([*self.fields, *sorted(dims & along)], sorted(dims - along))
        self.kinds = sorted(set(self._kinds))
        of_first = functools.cache(functools.partial(self._coordinate, 0))
        self._times: dict[int, AnyArray | None] = {}  # read once, while the file is open
        for f in self.kinds[1:]:
            self._layouts[f] = {name: array_of(self.files[f], name) for name in self.fields}
            self._check(f, of_first)
            if sample_dim is not None and not outer:
                self._times |= {each: self._coordinate(each, sample_dim) for each in {f, 0} - self._times.keys()}
        self.examples = [self.files[f] for f in self.kinds]
        num_files = len(self.files)
        self.lengths = bounds_of(self.of_files(lambda f: self.num_rows(self._along, f)))  # of files along it
        counts = self.of_files(lambda f: [self.num_rows(dim, f) for dim in self.outer])
        self.firsts: list[int] = bounds_of([math.prod(each) for each in counts])[:-1].tolist()
        self._members = [(f, at) for f in range(num_files) for at in itertools.product(*map(range, counts[f]))]
        self.sources: Sequence[Source] = self.by_file(self.files) if outer else self.files
        num_rows = self.of_files(lambda f: self.num_rows(sample_dim, f))
        self.row_bounds: IntArray = bounds_of([num_rows[f] for f, _ in self._members])
        self._row_bounds: list[int] = self.row_bounds.tolist()  # looked up one by one, where a list is faster
        self._check_order()

    def of_files(self, make: Callable[[int], T]) -> list[T]:
        """Return for each file what its number gives, which is asked for one file of each kind."""
        found = {f: make(f) for f in self.kinds}
        return [found[f] for f in self._kinds]

    def layouts(self, f: int) -> dict[str, ArrayLayout]:
        """Return the layouts of fields in the ``f``-th file."""
        found = self._layouts.get(f)
        if found is None:
            alike, path = self._layouts[self._kinds[f]], self._path(f)
            found = self._layouts[f] = {name: layout.in_store(path) for name, layout in alike.items()}
        return found

    def _path(self, f: int) -> str:
        return self.files.path(f) if isinstance(self.files, IndexedFiles) else self.files[f].path

    @property
    def paths(self) -> list[str]:
        """The path of each file."""
        return list(map(self._path, range(len(self.files))))

    def num_rows(self, dim: str | None, f: int = 0) -> int:
        """Return the rows of a dimension in the ``f``-th file, 1 where no field has it."""
        rows = {
            layout.shape[layout.dims.index(dim)]
            for layout in self.layouts(f).values()
            if dim is not None and dim in layout.dims
        }
        if len(rows) > 1:
            raise FieldMismatchError(
                f"{self.files[f].path}: fields disagree on the length of {dim!r}: {sorted(rows)}; "
                "choose fields that agree"
            )
        return rows.pop() if rows else 1

    def _check(self, f: int, of_first: Callable[[str], AnyArray | None]) -> None:
        here, path, first = self.layouts(f), self.files[f].path, self.files[0].path
        for name, wanted in self.layouts(0).items():
            found = here[name]
            for fact, a, b in (
                ("dims", wanted.dims, found.dims),
                ("dtype", str(wanted.dtype), str(found.dtype)),
                ("shape", self._static_shape(wanted), self._static_shape(found)),
            ):
                if a != b:
                    raise FieldMismatchError(
                        f"{path}: field {name!r} has {fact} {b}, but {first} has {a}; files of one series must agree"
                    )
        for dim in sorted({dim for layout in here.values() for dim in layout.dims} - {self._along, self.sample_dim}):
            one, other = of_first(dim), self._coordinate(f, dim)
            if one is not None and other is not None and not np.array_equal(one, other):
                raise FieldMismatchError(
                    f"{path}: coordinate {dim!r} differs from that of {first}; files of one series must lie on one grid"
                )

    def _static_shape(self, layout: ArrayLayout) -> tuple[int, ...]:
        return tuple(n for n, dim in zip(layout.shape, layout.dims, strict=True) if dim != self._along)

    def _coordinate(self, f: int, dim: str) -> AnyArray | None:
        layout = self.files[f].arrays.get(dim)
        if layout is None or layout.dims != (dim,):
            return None
        return read_array(self.files[f], layout, decoding=decoding_of(layout, None), allow_missing=True)

    def _check_order(self) -> None:
        """Refuse files whose sample coordinate runs backwards from one to the next, where each alone is sorted."""
        dim = self.sample_dim
        if len(self.files) == 1 or dim is None or self.outer:
            return
        units = {str(s.arrays[dim].attributes.get("units")) for s in self.examples if dim in s.arrays}
        if len(units) != 1 or (found := self._values(dim)) is None or not np.issubdtype(found[0].dtype, np.number):
            return
        values, bounds = found
        is_later = values[1:] > values[:-1]
        starts = bounds[1:-1][(np.diff(bounds)[1:] > 0) & (np.diff(bounds)[:-1] > 0)]  # of files after others with rows
        within = np.ones(len(is_later), np.bool_)
        within[bounds[1:-1][(bounds[1:-1] > 0) & (bounds[1:-1] < len(values))] - 1] = False
        overlaps = starts[values[starts] <= values[starts - 1]]  # of which missing times, NaN, are none
        if not is_later[within].all() or not len(overlaps):
            return
        start = int(overlaps[0])
        i = int(np.flatnonzero(bounds == start)[-1])
        raise FieldMismatchError(
            f"{self._path(i)}: {dim!r} begins at {values[start]}, not after the end {values[start - 1]} of "
            f"{self._path(i - 1)}; list the files in order, without overlap"
        )

    def _values(self, dim: str) -> tuple[AnyArray, IntArray] | None:
        files = self.files_along(dim)
        if self.is_uniform(dim) and isinstance(files, IndexedFiles) and (stored := files.joined(dim)) is not None:
            layout = self.examples[0].arrays[dim]
            return decoded(stored, decoding_of(layout, None)), self.lengths
        times = self._times if dim == self._along else {}
        found = [times[f] if f in times else self._coordinate(f, dim) for f in range(len(files))]
        known = [values for values in found if values is not None]
        return (np.concatenate(known), bounds_of(list(map(len, known)))) if len(known) == len(found) else None

    def is_uniform(self, dim: str) -> bool:
        """Return True if a coordinate along which files follow each other is stored alike in all, and has all rows."""
        return dim == self._along and self._is_uniform

    @functools.cached_property
    def _is_uniform(self) -> bool:
        dim = str(self._along)
        found = [source.arrays.get(dim) for source in self.examples]
        said = {(x.dims, x.dtype, repr(sorted(x.attributes.items()))) for x in found if x is not None}
        rows = [self.num_rows(dim, f) for f in self.kinds]
        return (
            None not in found
            and len(said) == 1
            and [x.shape for x in found if x is not None] == [(num,) for num in rows]
            and found[0] is not None
            and found[0].dims == (dim,)
        )

    def place_of(self, row: int) -> tuple[int, int]:
        """Return the member that holds row ``row`` of all members', and the row that it begins with."""
        i = bisect.bisect_right(self._row_bounds, row) - 1
        return i, self._row_bounds[i]

    def places_of(self, rows: Sequence[int]) -> dict[str, list[int]]:
        """Return where a sample's rows, of all members, lie along dims of samples, as :meth:`coordinate` has them."""
        if self.sample_dim is None:
            return {}
        if not self.outer:
            return {self.sample_dim: list(rows)}
        member, first = self.place_of(rows[0])
        file, at = self._members[member]
        place = {dim: [row] for dim, row in zip(self.outer, at, strict=True)}
        place[self._along or ""][0] += int(self.lengths[file])
        return place | {self.sample_dim: [row - first for row in rows]}

    def places_along(self, dim: str, rows: IntArray) -> IntArray:
        """Return where rows, one for each of many samples, lie along one of the dimensions of samples: ``(num,)``."""
        if not self.outer:
            return rows
        members = np.searchsorted(self.row_bounds, rows, side="right") - 1
        if dim == self.sample_dim:
            return rows - self.row_bounds[members]
        axis = self.outer.index(dim)
        at = [row[axis] + (self.lengths[file] if dim == self._along else 0) for file, row in self._members]
        return np.array(at, np.int64)[members]

    def layout_in(self, i: int, name: str) -> ArrayLayout:
        """Return a field's layout in the file of the ``i``-th member."""
        return self.layouts(self._members[i][0])[name]

    def source_of(self, row: int, time: object | None) -> SampleSource:
        """Return the file of row ``row`` of all members', and where in it that is; ``time`` is its label."""
        i, first = self.place_of(row)
        return SampleSource(self._path(self._members[i][0]), row - first, time, trajectory=self.trajectory_of(i))

    def space(self, i: int, segments: Mapping[str, Segments]) -> Mapping[str, Segments]:
        """Return rows by dimension together with those that name the ``i``-th member."""
        if not self.outer:
            return segments
        at = zip(self.outer, self._members[i][1], strict=True)
        return {**segments, **{dim: (Segment(start=row, count=1),) for dim, row in at}}

    def trajectory_of(self, i: int) -> dict[str, int]:
        """Return the row of the ``i``-th member along each dimension that numbers trajectories, in its file."""
        return dict(zip(self.outer, self._members[i][1], strict=True))

    def member_at(self, i: int, at: Mapping[str, int]) -> int:
        """Return the member of the ``i``-th's file that is the trajectory at these rows."""
        file = self._members[i][0]
        number = 0
        for dim in self.outer:
            number = number * self.num_rows(dim, file) + at[dim]
        return self.firsts[file] + number

    def first_along(self, dim: str, i: int) -> int:
        """Return how many rows of a dimension are in files before that of the ``i``-th member."""
        return int(self.lengths[self._members[i][0]]) if dim == self._along else 0

    def member_of(self, name: str, i: int) -> int:
        """Return the member by which a field's rows in the ``i``-th are known: one for all where they have the same."""
        if not self.outer:
            return i
        dims = self.layout_in(i, name).dims
        return self.member_at(i, {dim: row if dim in dims else 0 for dim, row in self.trajectory_of(i).items()})

    def moving(self, dims: Sequence[str]) -> tuple[int, ...]:
        """Return which of some dimensions differ from sample to sample."""
        return tuple(k for k, dim in enumerate(dims) if dim == self.sample_dim or dim in self.outer)

    def by_file(self, values: Sequence[T]) -> tuple[T, ...]:
        """Return a value of each file for each member."""
        return tuple(values[f] for f, _ in self._members)

    def combined(self, name: str) -> ArrayLayout:
        """Return a field's layout with the samples of all files."""
        layout = self.layouts(0)[name]
        if self._along not in layout.dims or len(self.files) == 1:
            return layout
        axis = layout.dims.index(str(self._along))
        return replace(layout, shape=(*layout.shape[:axis], int(self.lengths[-1]), *layout.shape[axis + 1 :]))

    def files_along(self, dim: str) -> Sequence[Source]:
        """Return the files that hold rows of a dimension: all of them of the one along which they follow each other."""
        return self.files if dim == self._along else self.files[:1]

    def coordinate(self, dim: str) -> AnyArray | None:
        """Return the values along a dimension over all files, or None if one has no coordinate variable."""
        found = self._values(dim)
        return None if found is None else found[0]

    def close(self) -> None:
        """Close every store; the next read opens it again."""
        for source in self.files.opened if isinstance(self.files, IndexedFiles) else self.files:
            source.close()
