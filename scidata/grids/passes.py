"""Passes over all rows of a gridded field, as :mod:`scidata.core.passes` describes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from scidata.core.bounds import compose, num_rows_of, rows_of, segments_of_slice
from scidata.core.checks import allocate
from scidata.core.passes import PASS_BYTES, merged_blocks, usual_steps
from scidata.core.types import AnyArray, ArrayLayout, FloatArray, IntArray, Segment, Segments
from scidata.core.urls import Url
from scidata.grids.gaps import times_of
from scidata.grids.labels import known_labels, label_text, labels_of
from scidata.grids.partition import GridPartition, chunk_edges
from scidata.grids.parts import Field
from scidata.grids.sample_rows import SampleRows
from scidata.grids.series import Series
from scidata.plan.array import plan_array
from scidata.read import read_plan
from scidata.read.places import expecting
from scidata.read.threads import ReaderThreads

_SMALL_BYTES = 16 << 20  # blocks are put together up to it: each read has its cost


class GridPass:
    """One rank's rows of one field, over some samples; see :class:`~scidata.core.passes.FieldPass`.

    - ``field``, ``series``, ``partition``, ``sample_rows``, ``threads``, ``allow_missing``: the reader's.
    - ``samples``: ``(num,)`` int64. Each row counts once, also where windows of several samples share it.
    """

    def __init__(
        self,
        name: str,
        field: Field,
        *,
        series: Series,
        partition: GridPartition,
        sample_rows: SampleRows,
        samples: IntArray,
        coordinate: Mapping[str, int],
        threads: ReaderThreads,
        allow_missing: bool,
        max_bytes: int = PASS_BYTES,
    ) -> None:
        self.name, self._field, self._series, self._partition = name, field, series, partition
        self._threads, self._allow_missing = threads, allow_missing
        dim, dims = series.sample_dim, field.source_dims
        self.dims = tuple(d for d in dims if d != dim)
        self.kept = tuple(d for d in self.dims if d not in series.outer)
        layout, self.dtype = self._layout(0), field.dtype
        units = layout.attributes.get("units")
        self.units = units if isinstance(units, str) else None
        self._axis = dims.index(dim) if dim in dims else None
        self.has_steps = self._axis is not None
        positions = np.unique(sample_rows.positions_of(samples, name))
        rows = sample_rows.rows_at(positions)
        self._find_rows(rows, positions, sample_rows)
        self._owned = {d: partition.owned_rows(d, coordinate) for d in self.dims if d in partition.bounds}
        self._cut_tiles(coordinate, max_bytes)

    def _find_rows(self, rows: IntArray, positions: IntArray, sample_rows: SampleRows) -> None:
        """Find the member and the row in it of each row; those that several trajectories share once."""
        series = self._series
        members = np.searchsorted(series.row_bounds, rows, side="right") - 1
        local = rows - series.row_bounds[members]
        if series.outer:
            members = np.array([series.member_of(self.name, int(i)) for i in members], np.int64)
        elif self._axis is None:
            members = np.zeros_like(members)
        if self._axis is None:
            local = np.zeros_like(local)
        firsts = np.sort(np.unique(np.stack([members, local]), axis=1, return_index=True)[1])
        self._members, self._local = members[firsts], local[firsts]
        self.is_step = np.zeros(len(firsts), np.bool_)
        self.num_skipped = 0
        if self._axis is not None:
            follows = sample_rows.are_steps(positions[firsts])
            times = row_times(series)
            if times is not None:
                self.is_step = usual_steps(times[local[firsts] if series.outer else rows[firsts]], follows)
            else:
                self.is_step = follows
            self.num_skipped = int(follows.sum() - self.is_step.sum())

    def _cut_tiles(self, coordinate: Mapping[str, int], max_bytes: int) -> None:
        """Choose blocks of rows and tiles, so that each chunk is decoded once, within the memory."""
        layout, dims, item = self._layout(0), self._field.source_dims, self._field.dtype.itemsize
        row_bytes = item * math.prod(stop - start for start, stop in self._owned.values())
        encoded = bool(layout.codecs or layout.fallback or isinstance(self._series.sources[0].path, Url))
        together = 1 if self._axis is None or not encoded else min(layout.chunks[self._axis], layout.shape[self._axis])
        self._tiles = self._make_tiles(layout, -(-together * row_bytes // max_bytes))
        idle = [a for a in self._partition.axis_sizes if not any(self._partition.axis_of_dim.get(d) == a for d in dims)]
        mine = row_bytes > 0 and all(coordinate.get(axis, 0) == 0 for axis in idle)
        self.num_tiles = len(self._tiles) if mine and len(self._local) else 0
        blocks = np.stack([self._members, self._local // together])
        changes = np.any(np.diff(blocks, axis=1) != 0, axis=0)
        starts_of = np.concatenate([[0], np.flatnonzero(changes) + 1]).astype(np.int64)
        apart = np.concatenate([[True], np.diff(self._members)[starts_of[1:] - 1] != 0])
        tile_bytes = max(1, row_bytes // len(self._tiles))
        fits = together * tile_bytes <= 2 * max_bytes  # tiles are about as large as wanted; else chunks come again
        at_once = max(1, together if fits else max_bytes // tile_bytes, min(max_bytes, _SMALL_BYTES) // tile_bytes)
        self.bounds = merged_blocks(starts_of, len(self._local), at_once, apart)

    def _make_tiles(self, layout: ArrayLayout, wanted: int) -> list[dict[str, tuple[int, int]]]:
        """Cut the owned rows into about so many tiles, at edges of chunks; return each tile's range along each dim."""
        edges = {d: self._edges(d, layout.chunks[layout.dims.index(d)]) for d in self._owned}
        ranges = {}
        for dim in sorted(edges, key=lambda d: -len(edges[d])):
            starts, stop = edges[dim], self._owned[dim][1]
            firsts = starts[:: max(1, len(starts) // max(1, wanted))]
            ranges[dim] = list(zip(firsts, [*firsts[1:], stop], strict=True))
            wanted = -(-wanted // len(firsts))
        return [dict(zip(ranges, place, strict=True)) for place in itertools.product(*ranges.values())]

    def _edges(self, dim: str, chunk: int) -> list[int]:
        start, stop = self._owned[dim]
        inner = chunk_edges(self._partition.selected[dim], chunk)
        return [start, *inner[(inner > start) & (inner < stop)].tolist()]

    def _layout(self, i: int) -> ArrayLayout:
        return self._series.layout_in(i, self.name)

    def read(self, tile: int, start: int, stop: int) -> AnyArray:
        """Read rows of a block, ``(stop - start, *row)``, as the data set decodes them."""
        i = int(self._members[start])
        layout, source = self._layout(i), self._series.sources[i]
        segments = {d: self._segments(tile, d) for d in self._owned}
        space = self._series.space(i, segments)
        axis = self._axis
        rows = () if axis is None else segments_of_slice(self._local[start:stop].tolist(), layout.shape[axis])
        selection = tuple(rows if k == self._axis else space[d] for k, d in enumerate(layout.dims))
        shape = tuple(map(num_rows_of, selection))
        out = allocate(f"{source.path}: field {self.name!r}", shape, self._field.dtype)
        read_plan(
            plan_array(layout, selection, expecting(source), out_shape=shape),
            out,
            source=source,
            decoding=self._field.decodings[i],
            allow_missing=self._allow_missing,
            executor=self._threads.executor(),
        )
        return out[None] if self._axis is None else np.moveaxis(out, self._axis, 0)

    def _segments(self, tile: int, dim: str) -> Segments:
        first, end = self._tiles[tile][dim]
        return compose(self._partition.selected[dim], (Segment(start=first, count=end - first),))

    def places(self, tile: int, dim: str) -> IntArray:
        """Return which of the whole field's rows along ``dim`` a tile has."""
        return np.arange(*self._tiles[tile][dim], dtype=np.int64)

    def size(self, dim: str) -> int:
        """Return how many rows the whole field has along one of its dims."""
        return self._partition.sizes[dim]

    def labels(self, dim: str) -> list[Any] | None:
        """Return the labels of these rows, as plain numbers or text; None if nothing labels them."""
        return plain_labels(self._series, self._partition, dim)

    def span(self) -> tuple[str, str, str] | None:
        """Return the dim of samples, and the labels of the first row and the last; None if nothing labels them."""
        dim, series = self._series.sample_dim, self._series
        if dim is None or self._axis is None or not len(self._local):
            return None
        found = known_labels(series, dim)
        if found is None:
            return None
        rows = self._local + (0 if series.outer else series.row_bounds[self._members])
        first, last = (label_text(found[rows[at]]) for at in (0, -1))
        return dim, first, last


def plain_labels(series: Series, partition: GridPartition, dim: str) -> list[Any] | None:
    """Return the labels of the selected rows along a dim as plain numbers or text; None if nothing labels them."""
    found = labels_of(series, dim)
    if found is None:
        return None
    chosen = found[rows_of(partition.selected[dim])]
    return chosen.tolist() if chosen.dtype.kind in "iuf" else [str(label) for label in chosen]


def row_times(series: Series) -> FloatArray | None:
    """Return when each row along the sample dim is, in a unit of its own; None if nothing says so."""
    found = times_of(series)
    if found is not None or series.sample_dim is None:
        return None if found is None else found[0]
    labels = known_labels(series, series.sample_dim)
    return None if labels is None or labels.dtype.kind not in "iuf" else labels.astype(np.float64)
