"""One store, or several files that continue each other along one dimension (``era5_2015.nc, era5_2016.nc, …``)."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import bounds_of
from scidata.core.types import ArrayLayout, IntArray, Segment, Source
from scidata.errors import FieldMismatchError
from scidata.read.whole import array_of, read_array
from scidata.sources import open_source
from scidata.sources.cf import decoding_of


class Series:
    """Stores that continue each other along ``sample_dim``, seen as one.

    Parameters
    ----------
    paths
        At least one; in the order of the samples.
    fields
        The arrays that must agree.
    sample_dim
        The dimension along which files follow each other; None for a single store without one.

    Raises
    ------
    FieldMismatchError
        Files disagree in fields, dims, dtype, shape or in the coordinates of another dimension. Only metadata and
        coordinates are read, so every rank raises the same.
    """

    def __init__(
        self,
        paths: Sequence[str],
        fields: Sequence[str],
        sample_dim: str | None,
        *,
        first: Source | None = None,
        allow_external: bool = False,
    ) -> None:
        self.sources: tuple[Source, ...] = tuple(
            first if i == 0 and first is not None else open_source(path, allow_external=allow_external)
            for i, path in enumerate(paths)
        )
        self.sample_dim = sample_dim
        self.fields = tuple(fields)
        if len(paths) > 1 and sample_dim is None:
            raise FieldMismatchError(
                f"{len(paths)} files have no dimension to follow each other along; name it with sample_dim"
            )
        layouts = [{name: array_of(source, name) for name in self.fields} for source in self.sources]
        self._layouts: tuple[dict[str, ArrayLayout], ...] = tuple(layouts)
        for i in range(1, len(self.sources)):
            self._check(i)
        self.row_bounds: IntArray = bounds_of([self._num_rows(i) for i in range(len(paths))])
        self._row_bounds: list[int] = self.row_bounds.tolist()  # looked up one by one, where a list is faster
        self._check_order()

    def _num_rows(self, i: int) -> int:
        rows = {
            layout.shape[layout.dims.index(self.sample_dim)]
            for layout in self._layouts[i].values()
            if self.sample_dim is not None and self.sample_dim in layout.dims
        }
        if len(rows) > 1:
            raise FieldMismatchError(
                f"{self.sources[i].path}: fields disagree on the length of {self.sample_dim!r}: {sorted(rows)}; "
                "choose fields that agree"
            )
        return rows.pop() if rows else 1

    def _check(self, i: int) -> None:
        """Compare file ``i`` with the first."""
        here, path, first = self._layouts[i], self.sources[i].path, self.sources[0].path
        for name, wanted in self._layouts[0].items():
            found = here[name]
            for what, a, b in (
                ("dims", wanted.dims, found.dims),
                ("dtype", str(wanted.dtype), str(found.dtype)),
                ("shape", self._static_shape(wanted), self._static_shape(found)),
            ):
                if a != b:
                    raise FieldMismatchError(
                        f"{path}: field {name!r} has {what} {b}, but {first} has {a}; files of one series must agree"
                    )
        for dim in sorted({dim for layout in here.values() for dim in layout.dims} - {self.sample_dim}):
            one, other = self._coordinate(0, dim), self._coordinate(i, dim)
            if one is not None and other is not None and not np.array_equal(one, other):
                raise FieldMismatchError(
                    f"{path}: coordinate {dim!r} differs from that of {first}; files of one series must lie on one grid"
                )

    def _static_shape(self, layout: ArrayLayout) -> tuple[int, ...]:
        return tuple(n for n, dim in zip(layout.shape, layout.dims, strict=True) if dim != self.sample_dim)

    def _coordinate(self, i: int, dim: str) -> npt.NDArray[Any] | None:
        layout = self.sources[i].arrays.get(dim)
        if layout is None or layout.dims != (dim,):
            return None
        return read_array(self.sources[i], layout, decoding=decoding_of(layout, None), allow_missing=True)

    def _check_order(self) -> None:
        """Refuse files whose sample coordinate runs backwards from one to the next, where each alone is sorted."""
        if len(self.sources) == 1 or self.sample_dim is None:
            return
        units = {
            str(s.arrays[self.sample_dim].attributes.get("units")) for s in self.sources if self.sample_dim in s.arrays
        }
        values = [self._coordinate(i, self.sample_dim) for i in range(len(self.sources))]
        if len(units) != 1 or any(v is None or not np.issubdtype(v.dtype, np.number) for v in values):
            return
        known = [v for v in values if v is not None]
        if not all(np.all(np.diff(v) > 0) for v in known):
            return
        for i in range(1, len(known)):
            if len(known[i]) and len(known[i - 1]) and known[i][0] <= known[i - 1][-1]:
                raise FieldMismatchError(
                    f"{self.sources[i].path}: {self.sample_dim!r} begins at {known[i][0]}, not after the end "
                    f"{known[i - 1][-1]} of {self.sources[i - 1].path}; list the files in order, without overlap"
                )

    def place_of(self, row: int) -> tuple[int, int]:
        """Return the position of the file that holds sample row ``row``, and the row that it begins with."""
        i = bisect.bisect_right(self._row_bounds, row) - 1
        return i, self._row_bounds[i]

    def layout_in(self, i: int, name: str) -> ArrayLayout:
        """Return a field's layout in the ``i``-th file."""
        return self._layouts[i][name]

    def combined(self, name: str) -> ArrayLayout:
        """Return a field's layout with the samples of all files."""
        layout = self._layouts[0][name]
        if self.sample_dim not in layout.dims or len(self.sources) == 1:
            return layout
        axis = layout.dims.index(str(self.sample_dim))
        return replace(layout, shape=(*layout.shape[:axis], int(self.row_bounds[-1]), *layout.shape[axis + 1 :]))

    def coordinate(self, dim: str) -> npt.NDArray[Any] | None:
        """Return the values along a dimension over all files, or None where it has no coordinate variable."""
        if dim != self.sample_dim:
            return self._coordinate(0, dim)
        values = [self._coordinate(i, dim) for i in range(len(self.sources))]
        present = [v for v in values if v is not None]
        return np.concatenate(present) if len(present) == len(values) else None

    def close(self) -> None:
        """Close every store; the next read opens it again."""
        for source in self.sources:
            source.close()


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Merge single rows that follow each other in the source and in the destination."""
    runs: list[Segment] = []
    for segment in segments:
        last = runs[-1] if runs else None
        if last and segment.start == last.start + last.count and segment.offset == last.offset + last.count:
            runs[-1] = Segment(start=last.start, count=last.count + 1, offset=last.offset)
        else:
            runs.append(segment)
    return tuple(runs)
