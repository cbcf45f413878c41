"""Decoded rows that samples share: each chunk that holds several steps is decoded once for all samples that need it.

A *block* is what one rank needs of the chunks that hold the same steps of a field: all its rows there, halo included,
decoded. Blocks are kept within so many bytes, the least recently used one goes first. Of threads that need the same
block one reads it, the others wait.

Whether a block is worth reading whole depends on how many of its rows will be used. Of most codecs one row costs as
much as the whole chunk; of Blosc, and of windows over chunks of one step, less. A loader knows which samples come next,
and says which blocks it wants (:class:`BlockRead`). Where nobody does, a block is read when a second sample needs it.

Where chunks hold several trajectories, so do blocks, if there is room for them until the last of these trajectories is
read, in stored order or in that of ``shuffle="blocks"``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.cache import Cache, lock
from scidata.grids.blocks.on_disk import DiskBlocks
from scidata.grids.blocks.on_node import BusyError, NodeDecoder
from scidata.grids.blocks.sizes import BlockSizes
from scidata.grids.blocks.source import BlockReader
from scidata.grids.blocks.trajectories import Trajectories
from scidata.grids.parts import Field, Part
from scidata.grids.series import Series
from scidata.grids.steps import FieldSteps, Places
from scidata.read.context import NO_READ, ReadStats
from scidata.read.disk_cache import DiskCache
from scidata.read.threads import ReaderThreads
from scidata.sources.access.fetches import run_each

#: Position of the rank, field, member, first row.
_Key: TypeAlias = tuple[tuple[int, ...], str, int, int]

_READS_BYTES = 16 << 20  # of what samples need of which blocks, which is found once for each
_READ_BYTES = 1 << 10  # of one block of one sample, about


@dataclass(slots=True)
class _Block:
    """Decoded rows, and how often samples have yet to take one of them, if each of them comes."""

    values: npt.NDArray[Any]
    left: int


class _UnwantedError(Exception):
    """A block that was to be read ahead has been used already."""


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A block that a sample needs, for whoever knows which samples come next.

    Attributes
    ----------
    nbytes
        Of the block.
    enough
        Samples that must need it for the block to be worth reading whole.
    member, inside
        The member of the series that the sample lies in, and where that lies in a block that holds several; None: it
        is all of it.
    rows
        Of each of the sample's rows that are in the block: which it is there, and its place in the field.
    """

    pool: BlockPool
    key: _Key
    part: Part
    nbytes: int
    enough: int
    member: int
    inside: tuple[slice, ...] | None
    rows: tuple[tuple[int, int], ...]

    @property
    def room(self) -> int:
        """Bytes that the pool keeps."""
        return self.pool.max_bytes(self.part)

    @property
    def samples_nbytes(self) -> int:
        """Bytes of all that a block of samples shares."""
        return self.pool.sizes.bytes_of_block(self.part)

    def is_kept(self) -> bool:
        """Whether the block is there; it is the last to go then."""
        return self.pool.is_kept(self.key)

    def give_up(self) -> None:
        """Say that no use of the block is in sight."""
        self.pool.give_up(self.key, self.part)

    def load(self, *, wait: bool = True) -> bool:
        """Read the block, unless it is kept; samples that need it then wait for it. Errors are left to them.

        Return false, ``wait`` being so, where another rank of the node decodes it right now.
        """
        try:
            self.pool.read_ahead(self.key, self.part, wait=wait)
        except BusyError:
            return False
        except Exception:  # the sample that needs it reads it again, and fails at its turn
            return True
        return True


#: The blocks that a sample needs, by field.
Reads: TypeAlias = Mapping[str, Sequence[BlockRead]]


class BlockPool:
    """The decoded rows of a reader's fields that are kept for other samples. Thread-safe; pickles empty.

    Parameters
    ----------
    series, fields
        The reader's.
    steps
        Of a sample.
    trajectories
        Which of them chunks hold together.
    node, node_parts
        Decodes chunks together with the other ranks of the node; and returns the parts of all of these.
    max_bytes, fits
        Of all blocks that are kept; 0 keeps none. ``fits``: and no more than samples in stored order, or of
        ``shuffle="blocks"``, need.
    disk
        Where blocks are kept for other epochs and runs, too; None: nowhere.

    Attributes
    ----------
    kept
        The blocks on disk.
    reader
        Reads blocks.
    sizes
        Of which fields there are blocks, and how large they are.
    wanted
        Keys of blocks that are worth reading, a set from each of those who know which samples come next. Where there
        is one, others are not read. Changed by single operations that are atomic, so that a finalizer may.
    """

    def __init__(
        self,
        series: Series,
        fields: Mapping[str, Field],
        *,
        steps: FieldSteps,
        trajectories: Trajectories,
        max_bytes: int,
        fits: bool = False,
        threads: ReaderThreads,
        allow_missing: bool,
        node: NodeDecoder | None = None,
        node_parts: Callable[[], Sequence[Part]] = tuple,
        disk: DiskCache | None = None,
    ) -> None:
        self._series, self._fields, self._steps = series, fields, steps
        self._blocks: Cache[_Block] = Cache(max_bytes, "lru")
        self._reads: Cache[Reads] = Cache(_READS_BYTES, "none")
        self.kept = DiskBlocks(self, series, fields, disk=disk, allow_missing=allow_missing)
        self.sizes = BlockSizes(
            series, fields, steps=steps, trajectories=trajectories, max_bytes=max_bytes, fits=fits, node=node,
            node_parts=node_parts, kept=self.kept,
        )  # fmt: skip
        self.reader = BlockReader(series, fields, self.sizes, threads=threads, allow_missing=allow_missing, node=node)
        self.wanted: dict[int, set[_Key]] = {}
        self._uncounted: deque[ReadStats] = deque()
        self._touched: Cache[bool] = Cache(
            max_bytes or 0, "lru"
        )  # blocks of which a row was read alone, as many as could be kept

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"wanted": {}, "_uncounted": deque()}

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept now."""
        return self._blocks.size

    def max_bytes(self, part: Part) -> int:
        """Return how many bytes of blocks are kept of a rank's part."""
        most = self.sizes.max_bytes(part)
        self._blocks.max_size = self._touched.max_size = most
        return most

    def clear(self) -> None:
        """Let go of all blocks in memory; those on disk stay."""
        self._blocks.clear()
        self._reads.clear()
        self.reader.clear()
        self.kept.forget()

    # -- which samples come next -------------------------------------------------------------------------------------

    def is_of_use(self, part: Part) -> bool:
        """Whether there are blocks that samples of a rank's part share, and room for those of one sample."""
        return bool(self.sizes.shared_steps) and 0 < self.sizes.bytes_of_sample(part) <= self.max_bytes(part)

    def reads_of(self, part: Part, index: int, places_of: Callable[[int], Places]) -> Reads:
        """Return the blocks that a sample needs, by field; ``places_of`` finds its rows, if that was not done yet."""
        found = self._reads.get((part.position, index))
        if found is None:
            places = places_of(index)
            found = {name: self._find(name, size, part, places) for name, size in self.sizes.shared_steps.items()}
            self._reads.put((part.position, index), found, _READ_BYTES * sum(map(len, found.values())))
        return found

    def _find(self, name: str, size: int, part: Part, places: Places) -> list[BlockRead]:
        rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, segments in places.of(name):
            for row, place in [(s.start + k * s.step, s.offset + k) for s in segments for k in range(s.count)]:
                rows.setdefault((i, row - row % size), []).append((row % size, place))
        nbytes, enough, found = self.sizes.nbytes(name, part), self.sizes.enough[name], []
        for (i, start), each in rows.items():
            together = self.sizes.together(name, i, part)
            inside = self.reader.place_in(name, i, together) if together.num > 1 else None
            key = part.position, name, together.member, start
            found.append(BlockRead(self, key, part, nbytes, enough, i, inside, tuple(each)))
        return found

    def is_kept(self, key: _Key) -> bool:
        """Whether a block is there; it is the last to go then."""
        return self._blocks.get(key) is not None

    def give_up(self, key: _Key, part: Part) -> None:
        """Say that no use of a block is in sight: it is kept for the next epoch only where there is room for all.

        One that others than the samples so far need stays while there is room: in an order by blocks they come.
        """
        block = self._blocks.get(key)
        if block is not None and block.left <= 0 and self.sizes.bytes_of_all(part) > self.max_bytes(part):
            self._blocks.drop(key)
        else:
            self._blocks.demote(key)

    # -- reading -----------------------------------------------------------------------------------------------------

    def fields_of(self, part: Part, reads: Reads, out: Mapping[str, npt.NDArray[Any]]) -> tuple[str, ...]:
        """Return the fields to be read by blocks."""
        fields = []
        for name, each in reads.items():
            if name in out and out[name].shape == part.shapes[name] and self._are_worth_it(each, part):
                fields.append(name)
        return tuple(fields)

    def _are_worth_it(self, reads: Sequence[BlockRead], part: Part) -> bool:
        keys = [read.key for read in reads]
        kept = list(map(self.is_kept, keys))
        wanted = list(self.wanted.values())
        if wanted:
            # where others need one block, others of this order need the one beside it, or will have needed it
            return any(kept) or any(key in each for key in keys for each in wanted)
        known = [self._touched.get(key) is not None for key in keys]
        for key in keys:
            self._touched.put(key, True, self.sizes.nbytes(key[1], part))
        return any(kept) or all(known)  # where one is kept, the order is one that stays close

    def fixed_of(self, part: Part, out: Mapping[str, npt.NDArray[Any]]) -> tuple[str, ...]:
        """Return the fields that are kept for all samples: none where there is no room beside what one sample needs."""
        if not self.sizes.fixed:
            return ()
        wanted = self.sizes.bytes_of_fixed(part) + (self.sizes.bytes_of_sample(part) if self.sizes.shared_steps else 0)
        if not 0 < wanted <= self.max_bytes(part):
            return ()
        return tuple([n for n in self.sizes.fixed if n in out and out[n].shape == part.shapes[n] and out[n].size])

    def read_fixed(
        self, names: Sequence[str], places: Places, part: Part, out: Mapping[str, npt.NDArray[Any]]
    ) -> ReadStats:
        """Copy fields that are kept for all samples; return what had to be read for it."""
        stats: list[ReadStats] = []
        for name in names:
            i = places.member
            together = self.sizes.together(name, i, part)
            block = self._block((part.position, name, together.member, 0), part, stats).values
            block = block[self.reader.place_in(name, i, together)]
            out[name].reshape(block.shape)[...] = block
        return sum(stats, start=NO_READ)

    def read_into(
        self,
        names: Sequence[str],
        reads: Reads,
        part: Part,
        out: Mapping[str, npt.NDArray[Any]],
        *,
        side_by_side: bool,
    ) -> ReadStats:
        """Copy a sample's rows of some fields; return what had to be read for it.

        ``side_by_side``: fields on threads of their own, because reads of blocks take round trips.
        """
        if side_by_side:
            found = run_each([functools.partial(self._copy, name, reads[name], part, out[name]) for name in names])
        else:
            found = [self._copy(name, reads[name], part, out[name]) for name in names]
        return sum(itertools.chain(self._ahead(), *found), start=NO_READ)

    def _ahead(self) -> Iterator[ReadStats]:
        """Take what reading ahead took since the last sample; of several threads each takes some of it."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._uncounted.popleft()

    def _copy(self, name: str, reads: Sequence[BlockRead], part: Part, out: npt.NDArray[Any]) -> list[ReadStats]:
        axis = self._fields[name].source_dims.index(str(self._series.sample_dim))
        values = _rows_first(out.reshape(part.families[name].out_shape), axis)
        stats: list[ReadStats] = []
        for read in reads:
            block = self._block(read.key, part, stats)
            with lock:
                block.left -= len(read.rows)
            rows = _rows_first(block.values if read.inside is None else block.values[read.inside], axis)
            for row, place in read.rows:
                values[place] = rows[row]
        return stats

    def read_ahead(self, key: _Key, part: Part, *, wait: bool = True) -> None:
        """Read a block, unless it is kept; what that took is counted with the next sample.

        Raises BusyError, ``wait`` being false, where another rank decodes it right now.
        """
        stats: list[ReadStats] = []
        self._block(key, part, stats, wait=wait, ahead=True)
        self._uncounted.extend(stats)

    def _is_unwanted(self, key: _Key) -> bool:
        wanted = list(self.wanted.values())
        return bool(wanted) and not any(key in each for each in wanted)

    def _block(
        self, key: _Key, part: Part, stats: list[ReadStats], *, wait: bool = True, ahead: bool = False
    ) -> _Block:
        """Return a block of a file, from its first row on; add what had to be read to ``stats``.

        ``ahead`` of its use: raises _UnwantedError where it has been used, and given up, meanwhile.
        """
        block = self._blocks.get(key)
        if block is not None:
            return block
        fresh: list[ReadStats] = []

        def make() -> _Block:
            if ahead and self._is_unwanted(key):  # asked here, where whoever needs it now waits for it
                raise _UnwantedError
            if key[1] in self.kept.fields:
                values, took = self.kept.block(*key[1:], part)
            else:
                values, took = self.reader.read_block(*key[1:], part, wait=wait)
            fresh.append(took)
            return _Block(values, self._num_uses(key, part))

        while True:
            try:
                block = self._blocks.get_or_make(key, make, lambda made: made.values.nbytes, once=True)
            except _UnwantedError:
                if ahead:
                    raise
                continue
            except BusyError:
                if wait:
                    continue  # it was another thread's turn to make it, which would not wait
                raise
            stats += fresh
            return block

    def _num_uses(self, key: _Key, part: Part) -> int:
        """Return how many rows of a block samples take: each has some of its steps, and each row is in some samples."""
        _, name, i, _ = key
        return self.sizes.together(name, i, part).num * self.sizes.steps_per_block[name] * self._steps.num(name)


def _rows_first(values: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    return values if axis == 0 else np.moveaxis(values, axis, 0)
