"""How fields are cut into blocks: which rows of which file each holds. Counts only, nothing is read."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, IntArray, Segment, Segments, Selection
from scidata.grids.blocks.key import BlockKey, Patch, Rows
from scidata.grids.parts import Field, Part
from scidata.grids.sample_rows import Places
from scidata.grids.series import Series


def must_decode(layout: ArrayLayout) -> bool:
    """Whether the chunks of an array have to be decoded."""
    return bool(layout.codecs or layout.fallback)


@dataclass(frozen=True, slots=True)
class Together:
    """Members of a file that are read together of a field.

    - ``member``: the first of them, by which they are known.
    - ``segments``: their rows along the dimensions that number trajectories, of those that the field has.
    """

    member: int
    members: tuple[int, ...]
    segments: Mapping[str, Segments]

    @property
    def num(self) -> int:
        """Trajectories."""
        return math.prod(segment.count for (segment,) in self.segments.values())


class BlockLayout:
    """Where blocks lie in the files of a series. Thread-safe.

    - ``selected``: rows of each dimension after the crop. Trajectories between those that are left out are known alone.
    - ``axes``: which dimension of each field is that of samples; None of a field that is without it.
    """

    def __init__(self, series: Series, fields: Mapping[str, Field], selected: Mapping[str, Segments]) -> None:
        self.series, self.fields = series, fields
        runs = {dim: _run_of(selected[dim]) for dim in series.outer}
        self._runs = {dim: run for dim, run in runs.items() if run is not None}
        self._together: Cache[Together] = Cache(1 << 16)
        dims, dim = {name: field.source_dims for name, field in fields.items()}, series.sample_dim
        self.axes = {name: own.index(dim) if dim in own else None for name, own in dims.items()}

    @functools.cached_property
    def steps_per_block(self) -> dict[str, int]:
        """Steps of a block of each field; 1 where chunks share no decoding."""
        return {name: max(self.series.of_files(functools.partial(self._steps_in, name))) for name in self.fields}

    def _steps_in(self, name: str, f: int) -> int:
        layout, axis = self.series.layouts(f)[name], self.axes[name]
        return 1 if axis is None or not must_decode(layout) else min(layout.chunks[axis], layout.shape[axis])

    def rows_first(self, name: str, values: Rows) -> Rows:
        """View a field's values, dims in the source's order, with the steps first; a field without steps has one."""
        axis = self.axes[name]
        return values[None] if axis is None else values if axis == 0 else np.moveaxis(values, axis, 0)

    def rows_back(self, name: str, values: Rows) -> Rows:
        """View values with the steps first as the source has them."""
        axis = self.axes[name]
        return values[0] if axis is None else np.moveaxis(values, 0, axis)

    def cuts_of(self, name: str, patch: Patch) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Return which rows of a step of a patch's field are which of the whole's: slices of either."""
        dims = [dim for dim in self.fields[name].source_dims if dim != self.series.sample_dim]
        every = [(slice(None), slice(None))]
        pairs = [
            [(slice(s.offset, s.offset + s.count), slice(s.start, s.start + s.count)) for s in patch.rows[dim]]
            if dim in patch.rows
            else every
            for dim in dims
        ]
        return [(tuple(to for to, _ in each), tuple(own for _, own in each)) for each in itertools.product(*pairs)]

    # -- trajectories that are decoded together ----------------------------------------------------------------------

    def together(self, name: str, i: int, *, alone: bool) -> Together:
        """Return the members read together with the ``i``-th, the first if all are alike; ``alone``: itself."""
        key = name, i, alone
        found = self._together.get(key)
        if found is None:
            found = self._find(name, i, alone=alone)
            for each in (i, *found.members):  # one for all, which each lists
                self._together.put((name, each, alone), found)
        return found

    def most(self, name: str) -> int:
        """Return how many trajectories a chunk of a field holds that is decoded for any of them, at most."""
        found = 1
        for f in self.series.kinds:
            layout = self.series.layouts(f)[name]
            here = [(layout.chunks[k], layout.shape[k], dim) for k, dim in enumerate(layout.dims) if dim in self._runs]
            if must_decode(layout):
                found = max(found, math.prod(min(chunk, n, len(self._runs[dim])) for chunk, n, dim in here))
        return found

    def _find(self, name: str, i: int, *, alone: bool) -> Together:
        layout, at = self.series.layout_in(i, name), self.series.trajectory_of(i)
        first, segments = {}, {}
        for dim, row in at.items():
            if dim not in layout.dims:
                first[dim] = 0
                continue
            k = layout.dims.index(dim)
            begin, end = row, row + 1
            if dim in self._runs and not alone and must_decode(layout):
                run, shift = self._runs[dim], self.series.first_along(dim, i)
                begin = max(row - row % layout.chunks[k], run.start - shift)
                end = min(row - row % layout.chunks[k] + layout.chunks[k], layout.shape[k], run.stop - shift)
            first[dim] = begin
            segments[dim] = (Segment(start=begin, count=end - begin),)
        runs = {dim: range(s.start, s.start + s.count) for dim, (s,) in segments.items()}
        places = itertools.product(*(runs.get(dim, (row,)) for dim, row in first.items()))
        members = tuple(self.series.member_at(i, dict(zip(first, place, strict=True))) for place in places)
        return Together(members[0], members, segments)

    # -- rows of blocks ----------------------------------------------------------------------------------------------

    def place_in(self, name: str, i: int, together: Together) -> tuple[slice, ...]:
        """Return where a trajectory lies in blocks that hold several."""
        at = self.series.trajectory_of(i)
        first = {dim: at[dim] - segment.start for dim, (segment,) in together.segments.items()}
        dims = self.fields[name].source_dims
        return tuple([slice(first[dim], first[dim] + 1) if dim in first else slice(None) for dim in dims])

    def selection_of(self, key: BlockKey) -> tuple[ArrayLayout, Selection, tuple[int, ...]]:
        """Return the array that a block is of, its selection there, and its shape."""
        part, name, i, _, start = key
        dims, layout, axis = self.fields[name].source_dims, self.series.layout_in(i, name), self.axes[name]
        runs = self.together(name, i, alone=key.num == 1).segments
        shape = [runs[d][0].count if d in runs else n for d, n in zip(dims, part.families[name].out_shape, strict=True)]
        space = {**part.segments, **runs}
        if axis is None:
            return layout, tuple(space[d] for d in dims), tuple(shape)
        shape[axis] = count = min(self.steps_per_block[name], layout.shape[axis] - start)
        rows = (Segment(start=start, count=count),)
        return layout, tuple(rows if k == axis else space[d] for k, d in enumerate(dims)), tuple(shape)

    def shape_of(self, key: BlockKey) -> tuple[int, ...]:
        """Return the shape of a block with its steps first."""
        return self.steps_first(key.name, self.selection_of(key)[2])

    def steps_first(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape, dims in the source's order, with the steps first; a field without steps has one."""
        axis = self.axes[name]
        return (1, *shape) if axis is None else (shape[axis], *shape[:axis], *shape[axis + 1 :])

    def rows_of(self, name: str, places: Places) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """Return which rows of which blocks a sample needs.

        By member and first row of the block: pairs of a row there and its place in the field of the sample. Steps 6
        and 9, of chunks of 8, are ``{(0, 0): [(6, 0)], (0, 8): [(1, 1)]}``.
        """
        if self.axes[name] is None:
            return {(places.member if self.series.outer else 0, 0): [(0, 0)]}
        size, found = self.steps_per_block[name], dict[tuple[int, int], list[tuple[int, int]]]()
        for i, segments in places.of(name):
            for row, place in [(s.start + k * s.step, s.offset + k) for s in segments for k in range(s.count)]:
                found.setdefault((i, row - row % size), []).append((row % size, place))
        return found

    def alone(self, name: str, rows: IntArray, part: Part) -> list[BlockKey]:
        """Return the blocks of one trajectory each that rows of all members lie in, sorted by member and first row."""
        bounds, size = self.series.row_bounds, self.steps_per_block[name]
        members = np.searchsorted(bounds, rows, side="right") - 1
        starts = rows - bounds[members]
        starts -= starts if self.axes[name] is None else starts % size
        known = np.array([self.together(name, i, alone=True).member for i in range(len(bounds) - 1)])
        pairs: Sequence[tuple[int, int]] = np.unique(np.stack([known[members], starts], axis=1), axis=0).tolist()
        return [BlockKey(part, name, i, 1, start) for i, start in pairs]


def _run_of(segments: Segments) -> range | None:
    rows = [range(s.start, s.start + s.count * s.step, s.step) for s in segments if s.count]
    every = np.concatenate([np.array(each) for each in rows]) if rows else np.empty(0, np.int64)
    if not len(every) or (np.diff(every) != 1).any():
        return None
    return range(int(every[0]), int(every[-1]) + 1)
