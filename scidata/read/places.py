"""Chunk locations of one read: the only difference between reads that share plans and tables."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import numpy as np

from scidata.core.checks import largest_encoded
from scidata.core.types import ChunkRefs, FindChunk, IntArray, Source
from scidata.core.urls import Url, is_url, url_of
from scidata.plan.array import ArrayPlan, Locate, moved_plan
from scidata.plan.chunk_tables import Tables
from scidata.plan.spans import Reads, dest_strides, element_strides

_FEW = 32  # chunks per read that are found one by one when matching another read's layout
#: Approximate memory of such a read's locations, and the share of each chunk.
_BYTES, _BYTES_A_CHUNK = 512, 256


def expecting(source: Source) -> Locate:
    """Return the lookup function for a read's chunks; behind URLs the read itself may find absent ones."""
    found: Locate = getattr(source, "expect", source.locate) if is_url(source.path) else source.locate
    return found


class Places:
    """Chunk locations of one read, and its plan, which names chunks in messages.

    Those of many samples are kept: each is one object, of which the garbage collector takes note.

    ``paths``: files and URLs as they are opened: a plan's own say nothing of credentials.
    ``raw``: first byte of each raw read.
    ``offset, nbytes``: first byte and bytes of each read of encoded chunks.
    ``begins, ends``: of each encoded chunk, in the bytes of its read.
    """

    __slots__ = ("_plan", "begins", "ends", "layout", "nbytes", "offset", "paths", "raw", "source")

    def __init__(self, source: Source, plan: ArrayPlan) -> None:
        self.source, self.layout = source, plan.layout
        self._plan: ArrayPlan | tuple[ArrayPlan, tuple[int, ...], tuple[int, ...]] = plan  # or another's, to be moved
        self.paths: Sequence[str] = ()
        self.raw: Sequence[int] = ()
        self.offset: Sequence[int] = ()
        self.nbytes: Sequence[int] = ()
        self.begins: Sequence[int] = ()
        self.ends: list[int] | tuple[int, ...] = ()

    @property
    def plan(self) -> ArrayPlan:
        """The plan; derived on first use if only moved from another read's."""
        plan = self._plan
        if isinstance(plan, tuple):
            first, by, rows = plan
            plan = self._plan = moved_plan(first, self.layout, by, rows or (0,) * len(by), expecting(self.source))
        return plan

    @property
    def refs(self) -> ChunkRefs:
        """Chunk locations as planned."""
        assert self.plan.refs is not None
        return self.plan.refs

    def where(self, chunk_row: int) -> str:
        """Return a chunk's name for messages."""
        chunk = tuple(self.plan.chunks[chunk_row].tolist())
        return f"{self.layout.store}: field {self.layout.name!r}, chunk {chunk}"

    def take(self, plan: ArrayPlan) -> None:
        """Take over the locations of a plan that has all of them."""
        self._plan, refs = plan, plan.refs
        if refs is None:
            return
        self.paths = refs.paths
        if plan.remote:
            own = self.source.path.bound if isinstance(self.source.path, Url) else url_of
            bind = getattr(self.source, "bind", own)  # of a source whose chunks lie in places of other owners
            self.paths = tuple(map(bind, refs.paths))
        if plan.span_reads is not None:
            self.raw = plan.span_reads.offset.tolist()
        if plan.encoded is not None and plan.encoded_reads is not None:
            self._take_encoded(plan.encoded.chunk_row, plan.encoded_reads, refs)

    def _take_encoded(self, rows: IntArray, reads: Reads, refs: ChunkRefs) -> None:
        begins = refs.offset[rows] - reads.offset.repeat(reads.bounds[1:] - reads.bounds[:-1])
        self.offset, self.nbytes = reads.offset.tolist(), reads.nbytes.tolist()
        self.begins, self.ends = begins.tolist(), (begins + refs.nbytes[rows]).tolist()


class Alike:
    """The chunks of a plan whose tables also serve reads of equal layout, if all chunks are local and present.

    ``are_apart``: whether each chunk is a read of its own: the only one, or in a file of its own.
    ``num_bytes``: about the memory that the places of one read take.
    """

    def __init__(self, plan: ArrayPlan, refs: ChunkRefs) -> None:
        self._plan, self._numbers = plan, (plan.chunks @ dest_strides(plan.layout.num_chunks)).tolist()
        self._path_index, self._num_paths = refs.path_index.tolist(), len(refs.paths)
        self._relative = tuple((refs.offset - refs.offset[0]).tolist())
        self._first = int(refs.offset[0])
        self._raw: list[int] | None = None if plan.span_reads is None else plan.span_reads.offset.tolist()
        self._strides: list[int] = (element_strides(plan.layout, plan.chunks) * plan.layout.dtype.itemsize).tolist()
        num = len(self._numbers)
        self._most, self._zeros = largest_encoded(plan.layout.chunk_nbytes), (0,) * num
        self._size = plan.layout.chunk_nbytes  # of raw chunks
        self._is_one = num == 1
        self.num_bytes = _BYTES + _BYTES_A_CHUNK * num
        self.are_apart = num == 1 or self._path_index == list(range(num))

    @classmethod
    def of(cls, plan: ArrayPlan) -> Alike | None:
        """Describe a plan's chunks; None if they are many, of several kinds, or of invalid size."""
        refs = plan.refs
        if refs is None or plan.remote or not 0 < plan.num_chunks <= _FEW or len(plan.absent):
            return None
        if refs.skipped_codecs is not None or refs.checksums is not None or plan.layout.edges:
            return None
        nbytes, sizes = plan.layout.chunk_nbytes, refs.nbytes.tolist()
        least, most = (nbytes, nbytes) if plan.span_reads is not None else (0, largest_encoded(nbytes))
        if min(sizes) < least or max(sizes) > most:
            return None
        found = cls(plan, refs)
        # chunks read in place have tables by their offsets in the bytes read
        is_in_place = bool(plan.layout.codecs) and all(codec.name == "crc32c" for codec in plan.layout.codecs)
        return None if is_in_place and not found.are_apart else found

    def fill(self, places: Places, find: FindChunk, num: int, rows: Sequence[int]) -> bool:
        """Find the chunks ``num`` further on in grid order; False if their layout differs.

        Also where there is something to say of one. ``rows``: raw chunks are read so many rows further on inside.
        """
        if self._is_one and (self._raw is None or len(self._raw) == 1):  # the most frequent case, in the fewest steps
            place = find(self._numbers[0] + num)
            if place is None:
                return False
            path, first, size = place
            places.paths = (path,)
            if self._raw is None:
                places.offset, places.nbytes, places.begins, places.ends = (first,), (size,), self._zeros, (size,)
                return size <= self._most
            by = sum(map(mul, rows, self._strides)) if rows else 0
            places.raw = (self._raw[0] + first - self._first + by,)
            return size == self._size
        found = [find(number + num) for number in self._numbers]
        if None in found:
            return False
        paths, offset, nbytes = zip(*found, strict=True)
        places.paths = names = tuple(dict.fromkeys(paths))
        alike = len(names) == self._num_paths
        if not alike or not (self.are_apart or [*map(names.index, paths)] == self._path_index):
            return False
        if self._raw is not None:
            return self._fill_raw(places, offset, nbytes, rows)
        return max(nbytes) <= self._most and self._fill_encoded(places, offset, nbytes)

    def _fill_raw(self, places: Places, offset: tuple[int, ...], nbytes: tuple[int, ...], rows: Sequence[int]) -> bool:
        first = offset[0]
        if {*nbytes} != {self._size} or tuple(map((-first).__add__, offset)) != self._relative:
            return False
        by = first - self._first + sum(map(mul, rows, self._strides))
        places.raw = tuple(map(by.__add__, self._raw or ()))
        return True

    def _fill_encoded(self, places: Places, offset: tuple[int, ...], nbytes: tuple[int, ...]) -> bool:
        if self.are_apart:
            places.offset, places.nbytes, places.begins = offset, nbytes, self._zeros
            places.ends = places.nbytes
            return True
        plan, index = self._plan, np.array(self._path_index, np.int64)
        refs = ChunkRefs(paths=tuple(places.paths), path_index=index, offset=np.array(offset), nbytes=np.array(nbytes))
        tables: Tables | None = plan.cut.tables.get((plan.out_shape, False))
        if tables is None or tables.encoded is None:
            return False
        pattern, reads = tables.order(plan.layout, refs)
        if pattern is not plan.pattern or pattern.encoded is None or reads is None:
            return False
        places._take_encoded(pattern.encoded.chunk_row, reads, refs)
        return True
