"""Which chunks of a field several ranks need, and which rows each takes from them: pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import segments_of_slice
from scidata.core.types import IntArray, Segment, Segments, Selection

#: Rows of each rank along each dimension, in the order of the rank's part; None along the dimension of samples.
RowsOfRanks = Sequence[Sequence[IntArray] | None]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Chunks that the same ranks need.

    Attributes
    ----------
    takers
        The ranks.
    chunks
        Their coordinates along each dimension; None along that of samples.
    rows
        Rows that any of the ranks needs along each dimension; empty along that of samples.
    copies
        Slices of one rank's part, and of those rows, that hold the same.
    """

    takers: tuple[int, ...]
    chunks: tuple[IntArray | None, ...]
    rows: tuple[Segments, ...]
    copies: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]

    def as_text(self) -> str:
        """Return a text that differs between shares of a field, the same on all ranks."""
        return repr((self.takers, [None if ids is None else ids.tolist() for ids in self.chunks]))


@dataclass(frozen=True, kw_only=True)
class NodeCut:
    """One rank's part of a field: selections that no other rank needs (without rows of samples), and shares."""

    alone: tuple[Selection, ...]
    shares: tuple[Share, ...]


def cut_by_ranks(chunks: Sequence[int], rows: RowsOfRanks, me: int) -> NodeCut:
    """Sort the chunks that rank ``me`` needs by the other ranks that need them.

    Parameters
    ----------
    chunks
        Rows of a chunk along each dimension.
    """
    alone: list[Selection] = []
    shares: list[Share] = []
    for group in itertools.product(*map(_by_takers, chunks, rows)):
        takers = frozenset.intersection(*(ranks for ranks, _ in group if ranks is not None))
        if me not in takers:
            continue
        here = [
            None if each is None else [np.flatnonzero(np.isin(r // size, ids)) for r in each]
            for size, each, (_, ids) in zip(chunks, rows, group, strict=True)
        ]
        if takers == {me}:
            alone.append(
                tuple(
                    () if each is None or found is None else _segments(found[me], each[me][found[me]])
                    for each, found in zip(rows, here, strict=True)
                )
            )
            continue
        wanted: list[Segments] = []
        copies: list[list[tuple[slice, slice]]] = []
        for each, found in zip(rows, here, strict=True):
            if each is None or found is None:
                wanted.append(())
                copies.append([(slice(None), slice(None))])
                continue
            union = np.unique(np.concatenate([each[rank][found[rank]] for rank in takers]))
            wanted.append(segments_of_slice(union.tolist(), int(union[-1]) + 1))
            copies.append(_slices(found[me], np.searchsorted(union, each[me][found[me]])))
        pairs = [tuple(zip(*both, strict=True)) for both in itertools.product(*copies)]
        shares.append(
            Share(
                takers=tuple(sorted(takers)),
                chunks=tuple(None if ranks is None else ids for ranks, ids in group),
                rows=tuple(wanted),
                copies=tuple((to, source) for to, source in pairs),
            )
        )
    return NodeCut(alone=tuple(alone), shares=tuple(shares))


def _by_takers(size: int, rows: Sequence[IntArray] | None) -> list[tuple[frozenset[int] | None, IntArray]]:
    """Return the chunks along a dimension by the ranks that need them."""
    if rows is None:
        return [(None, np.empty(0, np.int64))]
    takers: dict[int, set[int]] = {}
    for rank, each in enumerate(rows):
        for chunk in np.unique(each // size).tolist():
            takers.setdefault(chunk, set()).add(rank)
    found: dict[frozenset[int], list[int]] = {}
    for chunk in sorted(takers):
        found.setdefault(frozenset(takers[chunk]), []).append(chunk)
    return [(ranks, np.array(ids, np.int64)) for ranks, ids in found.items()]


def _runs(to: IntArray, source: IntArray) -> list[tuple[int, int, int, int]]:
    """Split pairs of places into runs: first of both, number, step of the source; the destination's is 1."""
    runs: list[tuple[int, int, int, int]] = []
    places = zip(to.tolist(), source.tolist(), strict=True)
    for a, b in places:
        if runs:
            first, start, count, step = runs[-1]
            if a == first + count and b != start and (count == 1 or b == start + count * step):
                runs[-1] = first, start, count + 1, b - start if count == 1 else step
                continue
        runs.append((a, b, 1, 1))
    return runs


def _segments(to: IntArray, source: IntArray) -> Segments:
    return tuple(
        Segment(start=start, count=count, step=step, offset=first) for first, start, count, step in _runs(to, source)
    )


def _slices(to: IntArray, source: IntArray) -> list[tuple[slice, slice]]:
    found = []
    for first, start, count, step in _runs(to, source):
        stop = start + count * step
        found.append((slice(first, first + count), slice(start, None if stop < 0 else stop, step)))
    return found


def touched_blocks(
    chunk: Sequence[int], axis_order: Sequence[int], rows: Sequence[IntArray], item: int, block: int, num_blocks: int
) -> npt.NDArray[np.bool_]:
    """Return which blocks of ``block`` bytes of a chunk hold some of its elements, ``(num_blocks,)``; perhaps more.

    Parameters
    ----------
    chunk
        Its shape.
    rows
        Wanted indices along each dimension, those of the chunk's elements their product.
    """
    needed = np.zeros(num_blocks + 1, np.int64)
    if all(len(r) for r in rows):
        strides = [item] * len(chunk)
        for d, after in itertools.pairwise(reversed(axis_order)):
            strides[after] = strides[d] * chunk[d]
        begin = np.zeros(1, np.int64)
        for d in axis_order[:-1]:
            begin = (begin[:, None] + rows[d] * strides[d]).reshape(-1)
        inner = rows[axis_order[-1]] * item if len(axis_order) else np.zeros(1, np.int64)
        np.add.at(needed, (begin + inner.min()) // block, 1)
        np.add.at(needed, (begin + inner.max() + item - 1) // block + 1, -1)
    return np.cumsum(needed)[:-1] > 0
