"""Which chunks the ranks of a node share, and how often each would be decoded if they did not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scidata.core.bounds import rows_of
from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, IntArray, Segments, Source
from scidata.core.urls import is_url
from scidata.errors import CorruptDataError
from scidata.grids.blocks.shares import NodeCut, cut_by_ranks, touched_blocks
from scidata.grids.partition import GridPartition
from scidata.read import blosc
from scidata.read.run_encoded import decodes_whole
from scidata.sources.access.files import files

_MAX_LOOKED_AT = 64  # chunks of a field, to tell how much of them ranks decode


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks of a domain that share a node.

    Attributes
    ----------
    name
        The same on all of them, and on no other processes of the node.
    coordinates
        Of each its position along the axes of the domain.
    me
        Which of them this one is.
    max_bytes
        Of chunks that wait to be taken.
    """

    name: str
    coordinates: tuple[Mapping[str, int], ...]
    me: int
    max_bytes: int


def decodes_in_parts(layout: ArrayLayout) -> bool:
    """Whether a part of a chunk can be decoded alone: Blosc's blocks."""
    return len(layout.codecs) == 1 and layout.codecs[0].name == "blosc"


class NodeShares:
    """Which parts of a grid's chunks each rank of a node needs. Thread-safe.

    Parameters
    ----------
    partition, sample_dim
        How the grid is cut, and the dimension of samples, which is not.
    ranks
        The ranks that share.
    """

    def __init__(self, partition: GridPartition, sample_dim: str | None, ranks: NodeRanks) -> None:
        self.ranks, self.sample_dim, self._partition = ranks, sample_dim, partition
        self._cuts: Cache[NodeCut] = Cache(256)
        self._rows: Cache[list[IntArray]] = Cache(256)

    @property
    def me(self) -> int:
        """This rank's number among those of the node."""
        return self.ranks.me

    def is_mine(self, position: tuple[int, ...]) -> bool:
        """Whether a position along the axes of the domain is this rank's."""
        mine = self.ranks.coordinates[self.ranks.me]
        return position == tuple(map(mine.__getitem__, self._partition.axis_sizes))

    def cut(self, layout: ArrayLayout, trajectories: Mapping[str, Segments]) -> NodeCut:
        """Return the chunks of some trajectories that this rank takes alone, and those that it shares."""
        rows = tuple([(dim, s.start, s.count) for dim, (s,) in trajectories.items()])
        place = layout.geometry, layout.dims, rows
        return self._cuts.get_or_make(
            place, lambda: cut_by_ranks(layout.chunks, self._rows_of_ranks(layout, trajectories), self.ranks.me)
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
        for chunk in self._some_chunks(layout):
            inside = [
                None if each is None else [r[r // size == at] - at * size for r in each]
                for at, size, each in zip(chunk, layout.chunks, rows, strict=True)
            ]
            each_ranks = [
                [np.arange(c) if r is None else np.unique(r[k]) for c, r in zip(layout.chunks, inside, strict=True)]
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
        """Return the rows of each rank along each dimension but that of samples; of some trajectories, or of all."""
        partition, coordinates = self._partition, self.ranks.coordinates

        def rows_along(dim: str) -> list[IntArray]:
            if trajectories is not None and dim in trajectories:
                return [rows_of(trajectories[dim])] * len(coordinates)
            return self._rows.get_or_make(dim, lambda: [rows_of(partition.segments(dim, at)) for at in coordinates])

        return [None if dim == self.sample_dim else rows_along(dim) for dim in layout.dims]

    def _some_chunks(self, layout: ArrayLayout) -> list[tuple[int, ...]]:
        """Return some chunks that any rank needs, of the first samples."""
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
        """Return the header of one chunk; None where there is no chunk."""
        try:
            refs = source.locate(layout, np.array(self._some_chunks(layout), np.int64))
            at = int(np.flatnonzero(refs.path_index >= 0)[0])
            data = np.empty(blosc.HEADER_NBYTES, np.uint8)
            files().read_into(refs.paths[refs.path_index[at]], int(refs.offset[at]), [data])
            return blosc.read_header(data, None, encoded=int(refs.nbytes[at]))
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
