"""Trajectories whose rows lie in the same chunks of a field, which blocks of decoded rows hold together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import Segment, Segments
from scidata.grids.series import Series


@dataclass(frozen=True, slots=True)
class Together:
    """Members of a file that are read together of a field.

    Attributes
    ----------
    member
        The first of them, by which they are known.
    members
        All of them.
    segments
        Their rows along the dimensions that number trajectories, of those that the field has.
    """

    member: int
    members: tuple[int, ...]
    segments: Mapping[str, Segments]

    @property
    def num(self) -> int:
        """Trajectories."""
        return math.prod(segment.count for (segment,) in self.segments.values())


class Trajectories:
    """Which trajectories of a series are decoded together, by field. Thread-safe.

    Parameters
    ----------
    series
        With the dimensions that number trajectories.
    selected
        Rows of each dimension after the crop. Trajectories between those that are left out are known alone.
    """

    def __init__(self, series: Series, selected: Mapping[str, Segments]) -> None:
        self._series = series
        runs = {dim: _run_of(selected[dim]) for dim in series.outer}
        self._runs = {dim: run for dim, run in runs.items() if run is not None}
        self._known: Cache[Together] = Cache(1 << 16)

    def of(self, name: str, i: int, *, alone: bool) -> Together:
        """Return the members that are read together with the ``i``-th; ``alone``: itself.

        Of a field without a dimension of trajectories, which is the same in all of them, the first has it.
        """
        key = name, i, alone
        found = self._known.get(key)
        if found is None:
            found = self._find(name, i, alone=alone)
            for each in (i, *found.members):  # one for all, which each lists
                self._known.put((name, each, alone), found)
        return found

    def most(self, name: str) -> int:
        """Return how many trajectories a chunk of a field holds that is decoded for any of them, at most."""
        found = 1
        for i in self._series.firsts:
            layout = self._series.layout_in(i, name)
            here = [(layout.chunks[k], layout.shape[k], dim) for k, dim in enumerate(layout.dims) if dim in self._runs]
            if layout.codecs or layout.fallback:
                lengths = [min(chunk, n, len(self._runs[dim])) for chunk, n, dim in here]
                found = max(found, math.prod(lengths))
        return found

    def _find(self, name: str, i: int, *, alone: bool) -> Together:
        layout, at = self._series.layout_in(i, name), self._series.trajectory_of(i)
        first, segments = {}, {}
        for dim, row in at.items():
            if dim not in layout.dims:
                first[dim] = 0
                continue
            k = layout.dims.index(dim)
            begin, end = row, row + 1
            if dim in self._runs and not alone and (layout.codecs or layout.fallback):
                run, shift = self._runs[dim], self._series.first_along(dim, i)
                begin = max(row - row % layout.chunks[k], run.start - shift)
                end = min(row - row % layout.chunks[k] + layout.chunks[k], layout.shape[k], run.stop - shift)
            first[dim] = begin
            segments[dim] = (Segment(start=begin, count=end - begin),)
        runs = {dim: range(s.start, s.start + s.count) for dim, (s,) in segments.items()}
        places = itertools.product(*(runs.get(dim, (row,)) for dim, row in first.items()))
        members = tuple(self._series.member_at(i, dict(zip(first, place, strict=True))) for place in places)
        return Together(members[0], members, segments)


def _run_of(segments: Segments) -> range | None:
    """Return rows that follow each other, None where some are left out or they are in another order."""
    rows = [range(s.start, s.start + s.count * s.step, s.step) for s in segments if s.count]
    every = np.concatenate([np.array(each) for each in rows]) if rows else np.empty(0, np.int64)
    if not len(every) or (np.diff(every) != 1).any():
        return None
    return range(int(every[0]), int(every[-1]) + 1)
