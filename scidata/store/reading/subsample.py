"""Which rows of a sample an epoch draws: a pure function of seed, epoch, sample and sizes. NumPy only.

A draw is stratified: the rows, in the order of the file, are cut into strata, each gives its share (rounded at random),
and has a random stream of its own. So every row is equally likely, rows spread evenly over the file (and over space,
where it is in curve order), and so over the ranks, whose shares differ by little; a rank draws only the strata that it
owns rows of, and knows how much the others hold from the few strata that their bounds cut. Memory does not grow with
the sample.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scidata.core.checks import is_int
from scidata.core.types import IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.cuts import equal_bounds
from scidata.meshes.order.shuffle import by_grain

#: Instead of a number of rows: draw whole chunks.
CHUNK = "chunk"

# Rows of a stratum at least: a stream costs 30 µs, as much as drawing some hundred rows from it (measured).
_STRATUM_ROWS = 1 << 16
_STRATUM_BLOCKS = 16  # at least, or a dense draw would take nearly the same blocks each time
_MAX_WORD = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Subsample:
    """What is drawn of each sample; made by :func:`make_subsample`."""

    # rows to draw, by entity: of one, or of some node sets. A sample that has no more gives all of them
    counts: Mapping[str, int]
    block: int | str = 1  # rows that are drawn together, or ``"chunk"``
    seed: int = 0  # of the random stream, 0 or more

    def only_one(self, where: str) -> str:
        """Return the entity whose rows are drawn."""
        if len(self.counts) > 1:
            raise ConfigError(
                f"{where}: subsample={self.counts}: expected one entity and a number of rows, {{'point': 100_000}}; "
                "several are the node sets of a graph between several"
            )
        return next(iter(self.counts))

    def draw(
        self, entity: str, num_rows: int, *, epoch: int, index: int, chunk_rows: int, is_set: bool = False,
        leaf_rows: int | None = None,
    ) -> Draw | Walk:  # fmt: skip
        """Return the draw of one epoch from one sample of ``num_rows`` rows; each node set has a stream of its own.

        ``leaf_rows`` are those of the leaves of a shuffled store: then epochs walk through these.
        """
        if leaf_rows is not None:
            num_drawn = min(num_rows, self.counts[entity])
            return Walk(
                num_global=num_rows, num_drawn=num_drawn, leaf_rows=leaf_rows, epoch=epoch, key=(self.seed, index)
            )
        block = chunk_rows if self.block == CHUNK else int(self.block)
        key = (self.seed, epoch, index, *([zlib.crc32(entity.encode())] if is_set else []))
        return Draw(num_global=num_rows, num_wanted=self.counts[entity], block=max(1, block), key=key)

    @property
    def recipe(self) -> list[object]:
        """What decides the draws, as plain values."""
        (entity, num_rows), *others = self.counts.items()
        return [entity, num_rows, self.block, self.seed, *map(list, others)]


def make_subsample(subsample: Mapping[str, int] | None, *, block: int | str, seed: int) -> Subsample | None:
    """Check the user's choice; None if nothing is drawn."""
    if subsample is None:
        if block != 1 or seed != 0:
            name = "subsample_block" if block != 1 else "subsample_seed"
            raise ConfigError(
                f"{name} means nothing without subsample; say what to draw, with subsample={{'point': n}}"
            )
        return None
    if not isinstance(subsample, Mapping) or not subsample:
        raise ConfigError(f"subsample={subsample!r}: expected one entity and a number of rows, {{'point': 100_000}}")
    for entity, num_rows in subsample.items():
        if not is_int(num_rows) or num_rows < 1:
            raise ConfigError(f"subsample={{{entity!r}: {num_rows!r}}}: the number of rows is an integer, at least 1")
    if block != CHUNK and (not is_int(block) or int(block) < 1):
        raise ConfigError(f"subsample_block={block!r}: expected a number of rows, at least 1, or {CHUNK!r}")
    if not is_int(seed) or not 0 <= seed < _MAX_WORD:
        raise ConfigError(f"subsample_seed={seed!r}: expected an integer from 0 to 2**64 - 1")
    counts = {name: int(num) for name, num in subsample.items()}
    return Subsample(counts=counts, block=block if block == CHUNK else int(block), seed=int(seed))


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Rows drawn from ``[0, num_global)`` without replacement, in whole blocks."""

    num_global: int  # rows to draw from
    # rows to draw: rounded up to whole blocks, of which the last may be cut short by the end. No more than there are
    num_wanted: int
    block: int  # rows drawn together: blocks begin at its multiples
    key: tuple[int, ...]  # seed, epoch and index of the sample; of a node set also a number made of its name

    @property
    def is_all(self) -> bool:
        """Whether every row is drawn."""
        return self._num_drawn == self._num_blocks

    @property
    def _num_blocks(self) -> int:
        return -(-self.num_global // self.block)

    @property
    def _num_drawn(self) -> int:
        return min(self._num_blocks, -(-self.num_wanted // self.block))

    @property
    def _stratum(self) -> int:
        """Blocks of a stratum: enough for one of them to be drawn, on average."""
        fewest = max(_STRATUM_BLOCKS, _STRATUM_ROWS // self.block)
        return max(fewest, -(-self._num_blocks // self._num_drawn))

    def rows(self, start: int = 0, stop: int | None = None) -> IntArray:
        """Return the drawn rows in ``[start, stop)``, sorted, ``(num,)`` int64; default all of them."""
        stop = self.num_global if stop is None else stop
        if self.is_all or start >= stop:
            return np.arange(start, max(start, stop), dtype=np.int64)
        size = self._stratum * self.block
        offset = self._offset()
        strata = [self._rows_of(s, offset) for s in range(start // size, (stop - 1) // size + 1)]
        rows = np.concatenate(strata)
        first, last = np.searchsorted(rows, (start, stop))
        return rows[first:last]

    def cut(self, bounds: IntArray, part: int) -> tuple[IntArray, IntArray]:
        """Return how many rows each part has, as bounds, and those of one part; ``bounds`` are those of all rows."""
        return self.count_before(bounds), self.rows(*bounds[part : part + 2].tolist())

    def count_before(self, rows: IntArray) -> IntArray:
        """Return how many rows are drawn before each of some rows, from 0 to ``num_global``, ``(num,)`` int64."""
        if self.is_all:
            return np.asarray(rows, np.int64)
        size, offset = self._stratum * self.block, self._offset()
        counts = np.zeros(len(rows), np.int64)
        drawn: dict[int, IntArray] = {}
        for i, row in enumerate(np.asarray(rows).tolist()):
            if row == 0:
                continue
            s = (row - 1) // size  # the stratum of the row before it: the end lies in the last
            if s not in drawn:
                drawn[s] = self._rows_of(s, offset)
            # whole blocks: only the very last one can be short, and it lies in the last stratum
            before = self._blocks_before(s * self._stratum, offset) * self.block
            counts[i] = before + int(np.searchsorted(drawn[s], row))
        return counts

    def _offset(self) -> int:
        """Return the random part of the rounding of all shares, below the number of blocks."""
        return int(self._stream(0).integers(self._num_blocks))

    def _blocks_before(self, block: int, offset: int) -> int:
        """Return how many blocks are drawn before one that begins a stratum: in Python's integers, without overflow."""
        return (block * self._num_drawn + offset) // self._num_blocks

    def _rows_of(self, stratum: int, offset: int) -> IntArray:
        """Draw the rows of one stratum, sorted; past the end, too, where the last block is cut short by it."""
        first = stratum * self._stratum
        last = min(first + self._stratum, self._num_blocks)
        count = self._blocks_before(last, offset) - self._blocks_before(first, offset)
        chosen = self._stream(1 + stratum).choice(last - first, count, replace=False, shuffle=False)
        blocks = first + np.sort(chosen.astype(np.int64, copy=False))
        if self.block == 1:
            return blocks
        return (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)

    def _stream(self, number: int) -> np.random.Generator:
        return _stream_of(*self.key, number)


def _stream_of(*numbers: int) -> np.random.Generator:
    # Two words for each number: SeedSequence fills up with zeros and splits large numbers, so that plain lists of
    # different lengths or sizes could give the same stream.
    words = np.array(numbers, np.uint64).view(np.uint32)
    return np.random.default_rng(np.random.SeedSequence(words.tolist()))


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Rows drawn from a shuffled store: each epoch goes on where the one before ended, and from the end to the begin.

    So every row is drawn once before any is drawn again. Leaves that an epoch takes whole cost what they hold; of the
    first and the last, which it shares with its neighbours, it takes rows at random. Rows are in the order of
    :func:`scidata.meshes.order.shuffle.by_grain`, so that parts of it read whole chunks and lie together in space. The
    key, seed and index of the sample, decides where the walk begins.
    """

    num_global: int
    num_drawn: int
    leaf_rows: int
    epoch: int
    key: tuple[int, int]

    def rows(self) -> IntArray:
        """Return the drawn rows, ``(num_drawn,)`` int64."""
        num, size = self.num_global, self.leaf_rows
        if self.num_drawn == num:
            return by_grain(np.arange(num), num, size)
        begin = int(_stream_of(*self.key, 0).integers(-(-num // size))) * size
        first = (begin + self.epoch * self.num_drawn) % num
        end = first + self.num_drawn
        found = [
            self._of_leaf(leaf, start, stop)
            for start, stop in ((first, min(end, num)), (0, end - num))
            for leaf in range(start // size, -(-stop // size))
        ]
        return by_grain(np.concatenate(found), num, size)

    def _of_leaf(self, leaf: int, start: int, stop: int) -> IntArray:
        """Return the rows of one leaf whose places in the walk lie in ``[start, stop)``, sorted."""
        first = leaf * self.leaf_rows
        last = min(first + self.leaf_rows, self.num_global)
        if start <= first and last <= stop:
            return np.arange(first, last)
        places = _stream_of(*self.key, 1 + leaf).permutation(last - first)
        return first + np.sort(places[max(start - first, 0) : stop - first])

    def cut(self, bounds: IntArray, part: int) -> tuple[IntArray, IntArray]:
        """Return how many rows each part has, as bounds: as many as the others; and those of one part."""
        even = equal_bounds(self.num_drawn, len(bounds) - 1)
        return even, self.rows()[slice(*even[part : part + 2].tolist())]
