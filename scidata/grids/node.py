"""Chunks that several ranks of one node need: decoded by one of them, for all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import segments_of_slice
from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, Decoding, Source
from scidata.grids.partition import GridPartition
from scidata.plan.array import ArrayPlan
from scidata.plan.family import PlanFamily
from scidata.plan.pieces import cut_dim, slice_of
from scidata.read import Job, read_plans
from scidata.read.context import ReadStats
from scidata.read.mailbox import Mailbox
from scidata.read.threads import ReaderThreads
from scidata.sources.access.validators import Validators

_WORTH = 1.1  # times the whole that the ranks of a node would decode, each by itself


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


class SharedChunks:
    """Reads parts of a field out of whole chunks, each of which one rank of the node decodes. Thread-safe.

    Parameters
    ----------
    partition, sample_dim
        How the grid is cut, and the dimension that is not.
    ranks
        Those who share.
    """

    def __init__(
        self,
        partition: GridPartition,
        sample_dim: str | None,
        ranks: NodeRanks,
        *,
        threads: ReaderThreads,
        allow_missing: bool,
    ) -> None:
        self._partition, self._sample_dim, self._ranks = partition, sample_dim, ranks
        self._threads, self._allow_missing = threads, allow_missing
        self._mailbox = Mailbox(ranks.name, ranks.me, ranks.max_bytes)
        self._validators: dict[str, Validators] = {}
        self._families: Cache[PlanFamily] = Cache(1024)
        self._known_takers: Cache[list[int]] = Cache(1 << 16)
        self._cuts: dict[tuple[str, int, int, int], frozenset[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_validators": {}}

    def is_worth_it(self, layout: ArrayLayout) -> bool:
        """Whether ranks would decode the same chunks of a field."""
        if not (layout.codecs or layout.fallback) or decodes_in_parts(layout):
            return False
        return self.times_decoded(layout) > _WORTH

    def times_decoded(self, layout: ArrayLayout) -> float:
        """Return how many times as much as there is these ranks decode of a field, each by itself."""
        dims = [d for d in range(len(layout.dims)) if layout.dims[d] != self._sample_dim]
        each = [[self._touched(layout, d, k) for d in dims] for k in range(len(self._ranks.coordinates))]
        apart = sum(math.prod(map(len, touched)) for touched in each)
        together = math.prod(len(frozenset().union(*touched)) for touched in zip(*each, strict=True))
        return apart / max(1, together)

    def _touched(self, layout: ArrayLayout, d: int, rank: int) -> frozenset[int]:
        """Return which chunks along a dimension a rank needs."""
        dim, size, chunk = layout.dims[d], layout.shape[d], layout.chunks[d]
        found = self._cuts.get((dim, size, chunk, rank))
        if found is None:
            segments = self._partition.segments(dim, self._ranks.coordinates[rank])
            found = frozenset(cut_dim(segments, size, chunk).chunks.tolist())
            self._cuts[dim, size, chunk, rank] = found
        return found

    def _version(self, source: Source, layout: ArrayLayout, chunk: Sequence[int]) -> bytes | None:
        """Return what changes where the file of a chunk is written anew: another rank may have read it before.

        None where nobody knows: such chunks are not handed on.
        """
        paths = source.files_of(layout, np.array([chunk], np.int64))
        if paths is None:
            revision = getattr(source, "revision", None)
            return None if revision is None else str(revision).encode()
        validators = self._validators.get(source.path)
        if validators is None:
            validators = self._validators.setdefault(source.path, Validators(source.path))
        return validators.of(paths).digest

    def _takers(self, layout: ArrayLayout, chunk: Sequence[int]) -> list[int]:
        return [
            rank
            for rank in range(len(self._ranks.coordinates))
            if all(
                layout.dims[d] == self._sample_dim or at in self._touched(layout, d, rank) for d, at in enumerate(chunk)
            )
        ]

    def read(self, plan: ArrayPlan, source: Source, decoding: Decoding | None, out: npt.NDArray[Any]) -> ReadStats:
        """Read what ``plan`` says into ``out``; return what this rank read for it, for others too.

        Chunks that another rank decodes right now come last.
        """
        stats = ReadStats()
        coming = [(row, tuple(chunk)) for row, chunk in enumerate(plan.chunks.tolist())]
        for wait in (False, True):
            left = []
            for row, chunk in coming:
                took = self._read_chunk(plan, row, chunk, source, decoding, out, wait=wait)
                if took is None:
                    left.append((row, chunk))
                else:
                    stats += took
            coming = left
        return stats

    def _read_chunk(
        self,
        plan: ArrayPlan,
        row: int,
        chunk: tuple[int, ...],
        source: Source,
        decoding: Decoding | None,
        out: npt.NDArray[Any],
        *,
        wait: bool,
    ) -> ReadStats | None:
        layout = plan.layout
        box = [slice(k * c, min((k + 1) * c, n)) for k, c, n in zip(chunk, layout.chunks, layout.shape, strict=True)]
        shape = tuple(s.stop - s.start for s in box)

        moving = tuple(k for k, dim in enumerate(layout.dims) if dim == self._sample_dim)
        place = tuple(at for k, at in enumerate(chunk) if k not in moving)

        def make(values: npt.NDArray[Any]) -> ReadStats:
            selection = tuple(segments_of_slice(s, n) for s, n in zip(box, layout.shape, strict=True))
            family = self._families.get_or_make((layout.geometry, place, shape), lambda: PlanFamily(moving, shape))
            job = Job(
                family.plan(layout, selection, source.locate), source, decoding, allow_missing=self._allow_missing
            )
            return read_plans([(job, values)], executor=self._threads.executor())

        version = self._version(source, layout, chunk)
        key = repr((layout.store, layout.name, version, chunk, decoding, str(out.dtype)))
        takers = self._known_takers.get_or_make((layout.geometry, place), lambda: self._takers(layout, chunk))
        if version is None:
            takers = [self._ranks.me]
        took = self._mailbox.take(key, shape, out.dtype, make, takers=takers, wait=wait)
        if took is None:
            return None
        values, stats = took
        boxes, target = plan.boxes, out.reshape(plan.out_shape)
        for b in range(int(boxes.bounds[row]), int(boxes.bounds[row + 1])):
            pieces = list(zip(plan.pieces, boxes.piece[b].tolist(), strict=True))
            to = tuple(slice_of(int(p.dest[i]), int(p.count[i]), int(p.sign[i])) for p, i in pieces)
            start = [(int(p.start[i]), int(p.count[i]), int(p.step[i])) for p, i in pieces]
            target[to] = values[tuple(slice(s, s + (n - 1) * step + 1, step) for s, n, step in start)]
        return stats or ReadStats()
