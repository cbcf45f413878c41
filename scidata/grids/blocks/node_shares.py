"""Which chunks the ranks of a node share, which rows each takes from them, and how often each would be decoded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scidata.core.bounds import rows_of, segments_of_slice
from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, BoolArray, IntArray, Segment, Segments, Selection, Source
from scidata.core.urls import is_url
from scidata.errors import CorruptDataError
from scidata.grids.partition import GridPartition
from scidata.read import blosc
from scidata.read.run_encoded import decodes_whole
from scidata.sources.access.files import files

_MAX_LOOKED_AT = 64  # chunks of a field, to tell how much of them ranks decode


#: Rows of each rank along each dimension, in the order of the rank's part; None along the dimension of samples.
RowsOfRanks = Sequence[Sequence[IntArray] | None]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Chunks that the same ranks need.

    - ``chunks``: their coordinates along each dimension; None along that of samples.
    - ``rows``: rows that any of the ranks needs along each dimension; empty along that of samples.
    - ``copies``: slices of one rank's part, and of those rows, that hold the same.
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


def cut_by_ranks(chunks: Sequence[int], rows: RowsOfRanks, me: int, num_ranks: int) -> NodeCut:
    """Sort the chunks that rank ``me`` needs by the other ranks that need them."""
    alone: list[Selection] = []
    shares: list[Share] = []
    every = frozenset(range(num_ranks))  # who need a field that has samples alone
    for group in itertools.product(*map(_by_takers, chunks, rows)):
        takers = every.intersection(*(ranks for ranks, _ in group if ranks is not None))
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


def _segments(to: IntArray, source: IntArray) -> Segments:
    """Split pairs of places into runs, in which the destination's follow each other."""
    runs: list[tuple[int, int, int, int]] = []
    places = zip(to.tolist(), source.tolist(), strict=True)
    for a, b in places:
        if runs:
            first, start, count, step = runs[-1]
            if a == first + count and b != start and (count == 1 or b == start + count * step):
                runs[-1] = first, start, count + 1, b - start if count == 1 else step
                continue
        runs.append((a, b, 1, 1))
    return tuple(Segment(start=start, count=num, step=step, offset=first) for first, start, num, step in runs)


def _slices(to: IntArray, source: IntArray) -> list[tuple[slice, slice]]:
    found = []
    for s in _segments(to, source):
        stop = s.start + s.count * s.step
        found.append((slice(s.offset, s.offset + s.count), slice(s.start, None if stop < 0 else stop, s.step)))
    return found


def touched_blocks(
    chunk: Sequence[int], axis_order: Sequence[int], rows: Sequence[IntArray], item: int, block: int, num_blocks: int
) -> BoolArray:
    """Return which blocks of ``block`` bytes of a chunk hold some of its elements, ``(num_blocks,)``; perhaps more.

    - ``rows``: wanted indices along each dimension, those of the chunk's elements their product.
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


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks of a domain that share a node.

    - ``name``: the same on all of them, and on no other processes of the node.
    - ``max_bytes``: of chunks that wait to be taken.
    """

    name: str
    coordinates: tuple[Mapping[str, int], ...]
    me: int
    max_bytes: int


def decodes_in_parts(layout: ArrayLayout) -> bool:
    """Whether a part of a chunk can be decoded alone: Blosc's blocks."""
    return len(layout.codecs) == 1 and layout.codecs[0].name == "blosc"


class NodeShares:
    """Which parts of a grid's chunks each rank of a node needs. Thread-safe."""

    def __init__(self, partition: GridPartition, sample_dim: str | None, ranks: NodeRanks) -> None:
        self.ranks, self.sample_dim, self._partition = ranks, sample_dim, partition
        self._cuts: Cache[NodeCut] = Cache(256)
        self._rows: Cache[list[IntArray]] = Cache(256)

    def is_mine(self, position: tuple[int, ...]) -> bool:
        """Whether a position along the axes of the domain is this rank's."""
        mine = self.ranks.coordinates[self.ranks.me]
        return position == tuple(map(mine.__getitem__, self._partition.axis_sizes))

    def cut(self, layout: ArrayLayout, trajectories: Mapping[str, Segments]) -> NodeCut:
        """Return the chunks of some trajectories that this rank takes alone, and those that it shares."""
        rows = tuple([(dim, s.start, s.count) for dim, (s,) in trajectories.items()])
        place = layout.geometry, layout.dims, rows
        me, num = self.ranks.me, len(self.ranks.coordinates)
        return self._cuts.get_or_make(
            place, lambda: cut_by_ranks(layout.chunks, self._rows_of_ranks(layout, trajectories), me, num)
        )

    def times_decoded(self, layout: ArrayLayout, source: Source) -> float:
        """Return how many times as much as is needed these ranks decode of a field, each by itself.

        Example: 4 ranks split the rows of chunks that hold whole fields; each decodes all of them, so it is 4.0. Of
        Blosc chunks, only some blocks of which are decoded where few are needed, a chunk's header is read.
        """
        if decodes_in_parts(layout) and not is_url(source.path):  # a URL's chunks are fetched whole
            apart, together = self._parts_decoded(layout, source)
        else:
            touched = [None if each is None else [np.unique(r // c) for r in each] for c, each in self._by_dim(layout)]
            known = [each for each in touched if each is not None]
            apart = sum(math.prod(len(each[k]) for each in known) for k in range(len(self.ranks.coordinates)))
            together = math.prod(len(np.unique(np.concatenate(each))) for each in known)
        return apart / together if together else 1.0

    def _parts_decoded(self, layout: ArrayLayout, source: Source) -> tuple[float, float]:
        """Return how much of some Blosc chunks the ranks decode, each by itself, and how much is needed by any."""
        apart = together = 0.0
        rows, header = self._rows_of_ranks(layout), self._some_header(layout, source)
        whole = [(Segment(start=0, count=min(c, n)),) for c, n in zip(layout.chunks, layout.shape, strict=True)]
        for chunk in self._some_chunks(layout):
            inside = [
                None if each is None else [r[r // size == at] - at * size for r in each]
                for at, size, each in zip(chunk, layout.chunks, rows, strict=True)
            ]
            each_ranks = [
                [rows_of(every) if r is None else np.unique(r[k]) for every, r in zip(whole, inside, strict=True)]
                for k in range(len(self.ranks.coordinates))
            ]
            of_any = [np.unique(np.concatenate(r)) for r in zip(*each_ranks, strict=True)]
            apart += sum(_part_decoded(layout, r, header) for r in each_ranks)
            together += _part_decoded(layout, of_any, header)
        return apart, together

    def _by_dim(self, layout: ArrayLayout) -> list[tuple[int, list[IntArray] | None]]:
        return list(zip(layout.chunks, self._rows_of_ranks(layout), strict=True))

    def _rows_of_ranks(
        self, layout: ArrayLayout, trajectories: Mapping[str, Segments] | None = None
    ) -> list[list[IntArray] | None]:
        partition, coordinates = self._partition, self.ranks.coordinates

        def rows_along(dim: str) -> list[IntArray]:
            if trajectories is not None and dim in trajectories:
                return [rows_of(trajectories[dim])] * len(coordinates)
            return self._rows.get_or_make(dim, lambda: [rows_of(partition.segments(dim, at)) for at in coordinates])

        return [None if dim == self.sample_dim else rows_along(dim) for dim in layout.dims]

    def _some_chunks(self, layout: ArrayLayout) -> list[tuple[int, ...]]:
        ids = [
            [0] if each is None else np.unique(np.concatenate(each) // size).tolist()
            for size, each in self._by_dim(layout)
        ]
        count = math.prod(map(len, ids))
        if not count:
            return []
        picked = np.unique(np.linspace(0, count - 1, min(count, _MAX_LOOKED_AT)).astype(np.int64))
        return [
            tuple(each[int(at)] for each, at in zip(ids, place, strict=True))
            for place in zip(*np.unravel_index(picked, tuple(map(len, ids))), strict=True)
        ]

    def _some_header(self, layout: ArrayLayout, source: Source) -> blosc.ChunkHeader | None:
        try:
            refs = source.locate(layout, np.array(self._some_chunks(layout), np.int64))
            at = int(np.flatnonzero(refs.path_index >= 0)[0])
            data = np.empty(blosc.HEADER_NBYTES, np.uint8)
            files().read_into(refs.paths[refs.path_index[at]], int(refs.offset[at]), [data])
            return blosc.read_header(data, layout.chunk_nbytes, encoded=int(refs.nbytes[at]))
        except (OSError, IndexError, CorruptDataError):  # the read of the chunk reports it
            return None


def _part_decoded(layout: ArrayLayout, rows: Sequence[IntArray], header: blosc.ChunkHeader | None) -> float:
    """Return which part of a Blosc chunk is decoded for some of its rows."""
    wanted = math.prod(map(len, rows))
    if not wanted or header is None or decodes_whole(wanted * layout.dtype.itemsize, layout.chunk_nbytes):
        return float(wanted > 0)
    item, blocks = layout.dtype.itemsize, (header.blocksize, header.num_blocks)
    needed = touched_blocks(layout.chunks, layout.axis_order, rows, item, *blocks)
    blosc.add_neighbour(needed, header)
    return min(1.0, float(needed.sum()) * header.blocksize / layout.chunk_nbytes)
