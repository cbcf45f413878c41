"""Chunks that several ranks of one node need: decoded by one of them, for all."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import rows_of
from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, Decoding, Files, IntArray, Segments, Selection, Source
from scidata.core.urls import is_url
from scidata.errors import CorruptDataError
from scidata.grids.blocks.shared_arrays import SharedArrays
from scidata.grids.blocks.shares import NodeCut, Share, cut_by_ranks, touched_blocks
from scidata.grids.partition import GridPartition
from scidata.plan.array import MAX_PLAN_BYTES
from scidata.plan.family import PlanFamily
from scidata.read import Job, blosc, read_plans
from scidata.read.context import ReadStats
from scidata.read.run_encoded import decodes_whole
from scidata.read.threads import ReaderThreads
from scidata.sources.access.files import files
from scidata.sources.access.validators import Validators

_WORTH = 1.1  # times the whole that the ranks of a node would decode, each by itself
_MAX_FILES = 1 << 14  # shares whose files are kept by name
_MAX_LOOKED_AT = 64  # chunks of a field, to tell how much of them ranks decode


class BusyError(Exception):
    """Another rank makes all that is wanted right now."""


def decodes_in_parts(layout: ArrayLayout) -> bool:
    """Whether a part of a chunk can be decoded alone: Blosc's blocks."""
    return len(layout.codecs) == 1 and layout.codecs[0].name == "blosc"


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks of a domain that share a node.

    Attributes
    ----------
    name
        What they have in common, and no other processes of the node.
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


class NodeDecoder:
    """Reads a rank's part of blocks of samples, of which each chunk is decoded by one rank of the node. Thread-safe.

    Parameters
    ----------
    partition, sample_dim, outer
        How the grid is cut, and the dimensions that are not: of steps, and those that number trajectories.
    ranks
        Those who share.
    """

    def __init__(
        self,
        partition: GridPartition,
        sample_dim: str | None,
        ranks: NodeRanks,
        *,
        outer: Sequence[str] = (),
        threads: ReaderThreads,
        allow_missing: bool,
    ) -> None:
        self._partition, self._sample_dim, self._ranks, self._outer = partition, sample_dim, ranks, tuple(outer)
        self._threads, self._allow_missing = threads, allow_missing
        self._arrays = SharedArrays(ranks.name, ranks.me, ranks.max_bytes)
        self._validators: dict[str, Validators] = {}
        self._families: Cache[PlanFamily] = Cache(1024)
        self._keys: Cache[bytes] = Cache(1024)
        self._cuts: Cache[NodeCut] = Cache(256)
        self._rows: Cache[list[IntArray]] = Cache(256)
        self._jobs: Cache[Job] = Cache(MAX_PLAN_BYTES, "none")
        self._files: Cache[tuple[Files | None]] = Cache(_MAX_FILES, "none")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_validators": {}}

    @property
    def me(self) -> int:
        """This rank's number among those of the node."""
        return self._ranks.me

    def is_mine(self, position: tuple[int, ...]) -> bool:
        """Whether a position along the axes of the domain is this rank's."""
        mine = self._ranks.coordinates[self._ranks.me]
        return position == tuple(map(mine.__getitem__, self._partition.axis_sizes))

    # -- whether it is worth it --------------------------------------------------------------------------------------

    def is_worth_it(self, layout: ArrayLayout, source: Source) -> bool:
        """Whether ranks would decode the same of a field more than once."""
        if self._sample_dim not in layout.dims or not (layout.codecs or layout.fallback):
            return False
        return self.times_decoded(layout, source) > _WORTH

    def times_decoded(self, layout: ArrayLayout, source: Source) -> float:
        """Return how many times as much as is needed these ranks decode of a field, each by itself.

        Of Blosc chunks, only some blocks of which are decoded where few are needed, a chunk's header is read.
        """
        apart = together = 0.0
        rows = self._rows_of_ranks(layout)
        if not decodes_in_parts(layout) or is_url(source.path):  # a URL's chunks are fetched whole
            touched = [None if each is None else [np.unique(r // c) for r in each] for c, each in self._by_dim(layout)]
            known = [each for each in touched if each is not None]
            apart = sum(math.prod(len(each[k]) for each in known) for k in range(len(self._ranks.coordinates)))
            together = math.prod(len(np.unique(np.concatenate(each))) for each in known)
        else:
            header = self._some_header(layout, source)
            for chunk in self._some_chunks(layout):
                inside = [
                    None if each is None else [r[r // size == at] - at * size for r in each]
                    for at, size, each in zip(chunk, layout.chunks, rows, strict=True)
                ]
                each_ranks = [
                    [np.arange(c) if r is None else np.unique(r[k]) for c, r in zip(layout.chunks, inside, strict=True)]
                    for k in range(len(self._ranks.coordinates))
                ]
                of_any = [np.unique(np.concatenate(r)) for r in zip(*each_ranks, strict=True)]
                apart += sum(_part_decoded(layout, r, header) for r in each_ranks)
                together += _part_decoded(layout, of_any, header)
        return apart / together if together else 1.0

    def _by_dim(self, layout: ArrayLayout) -> list[tuple[int, list[IntArray] | None]]:
        return list(zip(layout.chunks, self._rows_of_ranks(layout), strict=True))

    def _rows_of_ranks(
        self, layout: ArrayLayout, trajectories: Mapping[str, Segments] | None = None
    ) -> list[list[IntArray] | None]:
        """Return the rows of each rank along each dimension but that of samples; of some trajectories, or of all."""
        partition, coordinates = self._partition, self._ranks.coordinates

        def rows_along(dim: str) -> list[IntArray]:
            if trajectories is not None and dim in trajectories:
                return [rows_of(trajectories[dim])] * len(coordinates)
            return self._rows.get_or_make(dim, lambda: [rows_of(partition.segments(dim, at)) for at in coordinates])

        return [None if dim == self._sample_dim else rows_along(dim) for dim in layout.dims]

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
        """Return what a chunk says of its blocks; None where none is there."""
        try:
            refs = source.locate(layout, np.array(self._some_chunks(layout), np.int64))
            at = int(np.flatnonzero(refs.path_index >= 0)[0])
            data = np.empty(blosc.HEADER_NBYTES, np.uint8)
            files().read_into(refs.paths[refs.path_index[at]], int(refs.offset[at]), [data])
            return blosc.read_header(data, None, encoded=int(refs.nbytes[at]))
        except (OSError, IndexError, CorruptDataError):  # whoever reads it says so
            return None

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(
        self,
        layout: ArrayLayout,
        selection: Selection,
        source: Source,
        decoding: Decoding | None,
        out: npt.NDArray[Any],
        *,
        wait: bool = True,
    ) -> ReadStats:
        """Read this rank's part of some samples into ``out``; return what was read for it, for others too.

        What another rank decodes right now comes last.

        Raises
        ------
        BusyError
            All of it is being made by others, and ``wait`` is false.
        """
        axis = layout.dims.index(str(self._sample_dim))
        trajectories = {dim: selection[k] for k, dim in enumerate(layout.dims) if dim in self._outer}
        part = repr([(s.start, s.count) for (s,) in trajectories.values()]) if trajectories else ""
        place = layout.geometry, layout.dims, part
        cut = self._cuts.get_or_make(
            place, lambda: cut_by_ranks(layout.chunks, self._rows_of_ranks(layout, trajectories), self._ranks.me)
        )
        stats, busy = ReadStats(), []
        first = self._ranks.me * len(cut.shares) // len(self._ranks.coordinates)  # each begins with another one
        numbers = range(len(cut.shares))
        for k in itertools.chain(numbers[first:], numbers[:first]):
            took = self._take(layout, selection[axis], source, decoding, out, cut.shares[k], f"{part}{k}", wait=False)
            if took is None:
                busy.append(k)
            else:
                stats += took
        if busy and len(busy) == len(cut.shares) and not cut.alone and not wait:
            raise BusyError
        if cut.alone:
            jobs = [
                (
                    self._job(
                        layout,
                        (*rows[:axis], selection[axis], *rows[axis + 1 :]),
                        axis,
                        out.shape,
                        source,
                        decoding,
                        f"alone {part}{k}",
                    ),
                    out,
                )
                for k, rows in enumerate(cut.alone)
            ]
            stats += read_plans(jobs, executor=self._threads.executor())
        for k in busy:
            took = self._take(layout, selection[axis], source, decoding, out, cut.shares[k], f"{part}{k}", wait=True)
            stats += took or ReadStats()
        return stats

    def _job(
        self,
        layout: ArrayLayout,
        rows: Selection,
        axis: int,
        shape: tuple[int, ...],
        source: Source,
        decoding: Decoding | None,
        part: str,
    ) -> Job:
        """Plan a read of some samples, or find what an earlier epoch planned."""
        place = layout.store, layout.name, layout.geometry, rows[axis], part
        job = self._jobs.get(place)
        if job is None:
            family = self._families.get_or_make(
                (layout.geometry, layout.dims, shape, part), lambda: PlanFamily((axis,), shape)
            )
            plan = family.plan(layout, rows, source.locate)
            job = Job(plan, source, decoding, allow_missing=self._allow_missing)
            self._jobs.put(place, job, plan.num_bytes)
        return job

    def _take(
        self,
        layout: ArrayLayout,
        samples: Segments,
        source: Source,
        decoding: Decoding | None,
        out: npt.NDArray[Any],
        share: Share,
        number: str,
        *,
        wait: bool,
    ) -> ReadStats | None:
        """Copy what this rank needs of a share; return what was read for it, None where another rank makes it."""
        axis = layout.dims.index(str(self._sample_dim))
        rows = (*share.rows[:axis], samples, *share.rows[axis + 1 :])
        shape = tuple(sum(s.count for s in each) for each in rows)

        def make(values: npt.NDArray[Any]) -> ReadStats:
            job = self._job(layout, rows, axis, shape, source, decoding, f"share {number}")
            return read_plans([(job, values)], executor=self._threads.executor())

        def use(values: npt.NDArray[Any]) -> None:
            for to, where in share.copies:
                out[to] = values[where]

        version = self._version(source, layout, share, number, samples)
        takers = share.takers if version is not None else (self._ranks.me,)
        trajectories = [rows[k] for k, dim in enumerate(layout.dims) if dim in self._outer]  # chunks may hold others
        content = layout.store, layout.name, layout.geometry, trajectories
        always = self._keys.get_or_make(
            (layout.store, layout.name, layout.geometry, number, decoding, out.dtype),
            lambda: repr((*content, decoding, out.dtype, share.as_text())).encode(),
        )
        key = hashlib.blake2b(always + repr((samples, version)).encode(), digest_size=16).digest()
        used, made = self._arrays.take(key, shape, out.dtype, make, use, takers=takers, wait=wait)
        return (made or ReadStats()) if used else None

    def _version(
        self, source: Source, layout: ArrayLayout, share: Share, number: str, samples: Segments
    ) -> bytes | None:
        """Return what changes where a file of the chunks is written anew: another rank may have read it before.

        None where nobody knows: such chunks are not handed on.
        """
        place = layout.store, layout.name, layout.geometry, number, samples
        (files,) = self._files.get_or_make(
            place, lambda: (source.files_of(layout, _chunks_of(layout, share, samples)),)
        )
        if files is None:
            return None
        validators = self._validators.get(source.path)
        if validators is None:
            validators = self._validators.setdefault(source.path, Validators(source.path))
        return validators.of(*files).digest


def _chunks_of(layout: ArrayLayout, share: Share, samples: Segments) -> IntArray:
    """Return the coordinates of the chunks that hold some samples of a share, ``(num, ndim)``."""
    rows = rows_of(samples)
    ids = [
        np.unique(rows // size) if each is None else each
        for size, each in zip(layout.chunks, share.chunks, strict=True)
    ]
    found: IntArray = np.stack(np.meshgrid(*ids, indexing="ij"), axis=-1).reshape(-1, len(ids)).astype(np.int64)
    return found


def _part_decoded(layout: ArrayLayout, rows: Sequence[IntArray], header: blosc.ChunkHeader | None) -> float:
    """Return which part of a Blosc chunk is decoded for some of its rows."""
    wanted = math.prod(map(len, rows))
    if not wanted or header is None or decodes_whole(wanted * layout.dtype.itemsize, layout.chunk_nbytes):
        return float(wanted > 0)
    item, blocks = layout.dtype.itemsize, (header.blocksize, header.num_blocks)
    needed = touched_blocks(layout.chunks, layout.axis_order, rows, item, *blocks)
    blosc.add_neighbour(needed, header)
    return min(1.0, float(needed.sum()) * header.blocksize / layout.chunk_nbytes)
