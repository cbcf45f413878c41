"""The first stage of blocks: decoded rows in memory, so that each chunk is decoded once for all samples that need it.

Blocks are kept within so many bytes, the least recently used one goes first. Of threads that need the same block one
takes it from the next stage, the others wait. Which blocks are worth it: :mod:`scidata.grids.blocks.worth`.

Where chunks hold several trajectories, so do blocks, if there is room for them until the last of these trajectories is
read, in stored order or in that of ``shuffle="blocks"``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from scidata.core.cache import Cache, lock
from scidata.grids.blocks.key import BlockKey, BlockStage, BusyError, Rows, SampleRead, Wanted
from scidata.grids.blocks.sizes import BlockSizes, KeptFields
from scidata.grids.parts import Part
from scidata.grids.planner import Planner
from scidata.grids.sample_rows import Places
from scidata.read.context import NO_READ, ReadStats
from scidata.sources.access.fetches import run_each

_READS_BYTES = 16 << 20  # of the blocks that samples need, which are found once for each sample
_READ_BYTES = 1 << 10  # of one block of one sample, about


@dataclass(slots=True)
class _Block:
    values: Rows
    left: int


class _UnwantedError(Exception):
    """A block that was to be read ahead has been used already."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRead(Wanted):
    """A block that a sample needs, worth reading whole where ``enough`` samples do."""

    pool: BlockPool
    enough: int


#: The blocks that a sample needs, by field.
Reads: TypeAlias = Mapping[str, Sequence[BlockRead]]


class BlockPool:
    """Decoded rows of fields, kept for other samples; behind URLs read on own threads. Thread-safe; pickles empty."""

    def __init__(self, following: BlockStage, sizes: BlockSizes, planner: Planner) -> None:
        self._next, self._layout, self._planner = following, sizes.layout, planner
        self.sizes, self.worth = sizes, sizes.worth
        self._blocks: Cache[_Block] = Cache(0, "lru")
        self._reads: Cache[Reads] = Cache(_READS_BYTES, "none")
        self._uncounted: deque[ReadStats] = deque()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_uncounted": deque()}

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept now."""
        return self._blocks.size

    def max_bytes(self, part: Part) -> int:
        """Return how many bytes of blocks are kept of a rank's part."""
        most = self.sizes.max_bytes(part)
        self._blocks.max_size = self.worth.touched.max_size = most
        return most

    def clear(self) -> None:
        """Free all blocks in memory; those on disk stay."""
        self._blocks.clear()
        self._reads.clear()
        self._next.clear()

    # -- which samples come next -------------------------------------------------------------------------------------

    def reads_of(self, part: Part, index: int) -> Reads:
        """Return the blocks that a sample needs of each field that is cut into blocks."""
        found = self._reads.get((part, index))
        if found is None:
            self.max_bytes(part)  # known before anything is kept
            places = self._planner.places_of(index)
            found = {name: self._find(name, part, places) for name in self.worth.fields}
            self._reads.put((part, index), found, _READ_BYTES * sum(map(len, found.values())))
        return found

    def _find(self, name: str, part: Part, places: Places) -> list[BlockRead]:
        sizes, found = self.sizes.of(part), []
        nbytes, enough = sizes.nbytes(name), 1 if sizes.keeps_all else self.worth.enough.get(name, 1)
        for (i, start), rows in self._layout.rows_of(name, places).items():
            together = sizes.together(name, i)
            inside = self._layout.place_in(name, i, together) if together.num > 1 else None
            key = BlockKey(part, name, together.member, together.num, start)
            found.append(BlockRead(key, nbytes, inside, tuple(rows), self, enough))
        return found

    def shared_reads(self, part: Part, index: int) -> list[BlockRead]:
        """Return the blocks that a sample shares with others; none if there is no room for those of one sample."""
        shared, _ = self.sizes.of(part).kept_fields
        return [each for name, reads in self.reads_of(part, index).items() if name in shared for each in reads]

    def is_kept(self, key: BlockKey) -> bool:
        """Whether a block is there; it is the last to go then."""
        return self._blocks.get(key) is not None

    def give_up(self, key: BlockKey) -> None:
        """Say that no use of a block is in sight: it stays while there is room for all, or others still need it."""
        block = self._blocks.get(key)
        if block is not None and block.left <= 0 and not self.sizes.of(key.part).keeps_all:
            self._blocks.drop(key)
        else:
            self._blocks.demote(key)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_into(self, sample: SampleRead, names: Sequence[str]) -> ReadStats:
        """Copy a sample's rows of the fields that are worth keeping; pass the others on."""
        kept = self.sizes.of(sample.part).kept_fields
        if not (kept.shared or kept.fixed or self.worth.on_disk):
            return self._next.read_into(sample, names)
        reads = self.reads_of(sample.part, sample.number)
        mine, stats = [], NO_READ
        for name in reads:
            if name in names and self._is_mine(name, reads[name], sample, kept):
                mine.append(functools.partial(self._copy, name, reads[name], sample))
        if mine:
            found = run_each(mine) if self._planner.is_remote else [copy() for copy in mine]
            stats = sum(itertools.chain(self._ahead(), *found), start=NO_READ)
        done = {copy.args[0] for copy in mine}
        others = [name for name in names if name not in done]
        return stats + self._next.read_into(sample._replace(wanted=reads), others)

    def _is_mine(self, name: str, reads: Sequence[BlockRead], sample: SampleRead, kept: KeptFields) -> bool:
        out, (shared, fixed), patch = sample.out[name], kept, sample.patch
        if out.shape != (sample.part if patch is None else patch.part).shapes[name]:
            return False
        if patch is not None and (name in self.worth.on_disk or (name in shared and reads[0].enough == 1)):
            return out.size > 0
        if name in shared:
            return self.worth.are_worth_reading(reads, [self.is_kept(read.key) for read in reads])
        return name in fixed and not sample.once and out.size > 0

    def _ahead(self) -> Iterator[ReadStats]:
        """Take the statistics of blocks read ahead since the last sample; of several threads each takes some."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._uncounted.popleft()

    def _copy(self, name: str, reads: Sequence[BlockRead], sample: SampleRead) -> list[ReadStats]:
        patch = sample.patch
        out = sample.out[name].reshape((sample.part if patch is None else patch.part).families[name].out_shape)
        values, stats = self._layout.rows_first(name, out), list[ReadStats]()
        cuts = [] if patch is None else self._layout.cuts_of(name, patch)
        for read in reads:
            block = self._block(read.key, stats)
            with lock:
                block.left -= len(read.rows)
            whole = block.values if read.inside is None else block.values[read.inside]
            rows = self._layout.rows_first(name, whole)
            for row, place in read.rows:
                if patch is None:
                    values[place] = rows[row]
                for to, own in cuts:
                    values[place, ...][to] = rows[row, ...][own]
        return stats

    def read_ahead(self, key: BlockKey, *, wait: bool = True) -> bool:
        """Read a block, unless kept; the next sample counts the read. False: no ``wait`` for a rank that decodes it."""
        stats: list[ReadStats] = []
        try:
            self._block(key, stats, wait=wait, ahead=True)
        except BusyError:
            return False
        except Exception:  # the sample that needs it reads it again, and fails at its turn
            return True
        self._uncounted.extend(stats)
        return True

    def _block(self, key: BlockKey, stats: list[ReadStats], *, wait: bool = True, ahead: bool = False) -> _Block:
        """Return a block; add its reads to ``stats``. ``ahead``: raises _UnwantedError where it was used meanwhile."""
        block = self._blocks.get(key)
        if block is not None:
            return block
        fresh: list[ReadStats] = []

        def make() -> _Block:
            if ahead and not self.worth.is_wanted(key):  # asked here: a sample that needs it now waits for this call
                raise _UnwantedError
            values, took = self._next.block(key, wait=wait)
            fresh.append(took)
            return _Block(values, self._num_uses(key))

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

    def _num_uses(self, key: BlockKey) -> int:
        """Return how many rows of a block samples take: each has some of its steps, and each row is in some samples."""
        return key.num * self._layout.steps_per_block[key.name] * self.sizes.steps.num(key.name)
