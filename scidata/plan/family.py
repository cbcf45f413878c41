"""Plans of selections that are alike but for the rows of some dimensions at which they begin: samples of a data set.

They share the cut and all tables that follow from it; a plan only says where it begins and where its chunks lie.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, Selection
from scidata.plan.array import ArrayPlan, Locate, plan_cut
from scidata.plan.cut import MAX_BOXES, Cut, Origin, find_cut

#: Boxes of the cuts that are kept, each of which counts as ``MAX_BOXES`` at least: 64 cuts (files of one series may
#: differ in length; rows inside a chunk), or a large one of some 20 MB with all its tables.
_MAX_KEPT = 64 * MAX_BOXES

_Place: TypeAlias = tuple[int, int]  # a chunk along a dimension, and a row in it


class PlanFamily:
    """Plans as :func:`~scidata.plan.array.plan_array` makes, several times as fast from the second one on. Thread-safe.

    Parameters
    ----------
    dims
        The dimensions along which selections move; those of the others are always the same.
    out_shape
        Shape of every destination.
    """

    def __init__(self, dims: tuple[int, ...], out_shape: tuple[int, ...]) -> None:
        self._dims, self.out_shape = dims, out_shape
        self._cuts: Cache[tuple[Cut, Origin, tuple[_Place, ...]]] = Cache(_MAX_KEPT)

    def plan(self, layout: ArrayLayout, selection: Selection, locate: Locate) -> ArrayPlan:
        """Plan a selection; ``locate`` is the source's.

        Raises the errors of :func:`~scidata.plan.array.plan_array` and of ``locate``.
        """
        alone = layout.edge_chunks_clipped or layout.fallback
        cut, origin = find_cut(layout, selection) if alone else self._find(layout, selection)
        return plan_cut(layout, selection, cut, origin, locate, self.out_shape)

    def _find(self, layout: ArrayLayout, selection: Selection) -> tuple[Cut, Origin]:
        """Return the cut and its origin, a kept cut where there is one."""
        key: list[Hashable] = [layout.geometry]
        places: list[_Place] = []
        for dim in self._dims:
            segments, size = selection[dim], layout.chunks[dim]
            if not segments:
                return find_cut(layout, selection)
            first = segments[0].start
            low = high = first
            for s in segments:
                last = s.start + (s.count - 1) * s.step
                low, high = min(low, s.start, last), max(high, s.start, last)
            if low < 0 or high >= layout.shape[dim]:
                return find_cut(layout, selection)  # which raises
            places.append(divmod(first, size))
            # inside one raw chunk everything moves alike; else a row further on is another row of a decoded chunk
            moves = not layout.codecs and low // size == high // size
            key.append(tuple([(s.start - first, s.count, s.step, s.offset) for s in segments]))
            key.append(None if moves else places[-1][1])
        cut, origin, then = self._kept(tuple(key), lambda: find_cut(layout, selection), tuple(places))
        for dim, (chunk, row), (chunk_then, row_then) in zip(self._dims, places, then, strict=True):
            if chunk != chunk_then or row != row_then:
                origin = origin.moved(dim, chunk - chunk_then, row - row_then)
        return cut, origin

    def _kept(
        self, key: Hashable, find: Callable[[], tuple[Cut, Origin]], places: tuple[_Place, ...]
    ) -> tuple[Cut, Origin, tuple[_Place, ...]]:
        found = self._cuts.get(key)
        if found is None:
            cut, origin = find()
            found = self._cuts.put(key, (cut, origin, places), max(MAX_BOXES, len(cut.boxes.chunk_row)))
        return found
