"""How many bytes blocks take, how many of them are kept in memory, and which samples share some. Nothing is read."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import IntArray
from scidata.grids.blocks.layout import BlockLayout, Together
from scidata.grids.blocks.worth import BlockWorth
from scidata.grids.parts import Part
from scidata.grids.planner import Planner

_LEAST = 3  # blocks of samples for which there is room, at least, where they hold several trajectories
_MAX_AT_ONCE = 256 << 20  # bytes of several trajectories' blocks that are decoded to go to disk
#: Blocks beside those that samples are taken of in turn: of three samples that the loader has on their way, and the
#: next one. With one beside, some were thrown out before they had served, and threads waited for room.
BLOCKS_BESIDE = 4
#: Blocks of which DistributedSampler(shuffle="blocks") takes samples in turn by default, and those kept for it.
BLOCKS_AT_ONCE = 8
KEPT_BLOCKS = BLOCKS_AT_ONCE + BLOCKS_BESIDE
_LEAST_TOGETHER = 8  # steps of a block of samples, of all its trajectories, where windows make neighbours share some
_ALL_STEPS = 1 << 62
_PER_EDGE = 10  # chunks of a stretch for each that the one beside it needs, too: so few are decoded twice


class KeptFields(NamedTuple):
    """Fields whose blocks memory has room for: those that samples share, and those that are the same in all."""

    shared: frozenset[str]
    fixed: frozenset[str]


#: Bytes of blocks that data sets of this process keep at most.
_kept: weakref.WeakKeyDictionary[BlockSizes, int] = weakref.WeakKeyDictionary()


class BlockSizes:
    """How large the blocks of a reader's fields are. Thread-safe.

    - ``max_bytes``, ``fits``: of all blocks that are kept in memory, see :class:`scidata.grids.blocks.pool.BlockPool`.
    - ``planner``, ``sharers``: knows the parts of ranks; and the places of those of the node, which decode the same
      trajectories together.
    """

    def __init__(
        self, layout: BlockLayout, worth: BlockWorth, planner: Planner, *, max_bytes: int, fits: bool,
        sharers: Sequence[Mapping[str, int]],
    ) -> None:  # fmt: skip
        self.layout, self.worth, self.steps = layout, worth, worth.steps
        self.limit, self.fits = max_bytes, fits
        self._series, self._planner, self._sharers = layout.series, planner, sharers
        self._of_parts: Cache[PartSizes] = Cache(1 << 10)
        self._max_bytes: int | None = None
        self._process = os.getpid()

    def of(self, part: Part) -> PartSizes:
        """Return the sizes of the blocks of a rank's part."""
        found = self._of_parts.get(part)
        return self._of_parts.put(part, PartSizes(self, part)) if found is None else found

    def max_bytes(self, part: Part) -> int:
        """Return how many bytes of blocks are kept of a rank's part; of the first that is asked for."""
        if self._max_bytes is None:
            _kept[self] = self._max_bytes = self.of(part).room
        return self._max_bytes

    @property
    def left(self) -> int:
        """Return the bytes that other data sets of this process, which share them, leave; 0 in a worker process."""
        return self.limit - sum(_kept.values()) if self._process == os.getpid() else 0

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_max_bytes": None}

    @property
    def sharers(self) -> Sequence[Part]:
        """Parts of the ranks that decode chunks for each other."""
        return [self._planner.part_of(each) for each in self._sharers] if self.worth.by_node else ()

    @property
    def most_trajectories(self) -> int:
        """Trajectories of a block, at most."""
        return max(self.worth.most.values())

    # -- samples that share blocks -----------------------------------------------------------------------------------

    @functools.cached_property
    def steps_in_order(self) -> int:
        """Steps of a block of samples, in random order: of the longest chunk, or of several short ones."""
        longest = max(self.layout.steps_per_block.values())
        return longest * (-(-_LEAST_TOGETHER // (longest * self.most_trajectories)) if self._edge else 1)

    @functools.cached_property
    def steps_in_stretch(self) -> int:
        """Steps of the blocks of samples that an order by blocks goes through one after the other."""
        longest, size = max(self.layout.steps_per_block.values()), self.steps_in_order
        edge = -(-self._edge // longest) * longest
        return max(1, -(-_PER_EDGE * edge // size)) * size

    @functools.cached_property
    def _edge(self) -> int:
        """Steps beyond a block of samples that its samples need: of windows, and of chunks that end elsewhere."""
        longest = max(self.layout.steps_per_block.values())
        shared = self.worth.shared_steps.items()
        return max(
            (self.steps.reach(name, every=True) + (size if longest % size else 0) for name, size in shared), default=0
        )

    def numbers_of(self, rows: IntArray, size: int) -> IntArray:
        """Return numbers, from 0 on, of the blocks of ``size`` steps that rows of all members, in a row, lie in."""
        bounds = self._series.row_bounds
        members = np.searchsorted(bounds, rows, side="right") - 1
        most = max(self.layout.fields, key=self.layout.most)
        firsts = np.array([self.layout.together(most, i, alone=False).member for i in range(len(bounds) - 1)])
        places = firsts[members] * bounds[-1] + (rows - bounds[members]) // size
        return np.unique(places, return_inverse=True)[1].astype(np.int64)


class PartSizes:
    """How large the blocks of one rank's part are, and how many there is room for."""

    def __init__(self, sizes: BlockSizes, part: Part) -> None:
        self._sizes, self._part = sizes, part
        self._layout, self._worth, self._steps = sizes.layout, sizes.worth, sizes.steps

    # -- room in memory ------------------------------------------------------------------------------------

    @functools.cached_property
    def room(self) -> int:
        """Bytes of blocks that are kept at most; where they are to fit, all, or enough for stored and random blocks."""
        if not self._sizes.fits:
            return self._sizes.limit
        window = KEPT_BLOCKS * self.bytes_of_block if self._worth.shared_steps else 0
        fixed = self._bytes_of_fixed(self._worth.most) * (KEPT_BLOCKS if self._layout.series.outer else 1)
        least = min(max(window, self._bytes_of_trajectories) + fixed, self._sizes.limit)
        return max(least, self.bytes_of_all) if self.bytes_of_all <= self._sizes.left else least

    @functools.cached_property
    def keeps_all(self) -> bool:
        """Whether there is room for all blocks of all samples, so that later epochs decode nothing."""
        return self.bytes_of_all <= self._sizes.max_bytes(self._part)

    @functools.cached_property
    def kept_fields(self) -> KeptFields:
        """The fields of which the blocks of one sample fit into memory."""
        if not (self._worth.shared_steps or self._worth.fixed):
            return KeptFields(frozenset(), frozenset())
        sample, fixed = self.bytes_of_sample, self._bytes_of_fixed(self._num_together)
        most = self._sizes.max_bytes(self._part)
        return KeptFields(
            frozenset(self._worth.shared_steps if 0 < sample <= most else ()),
            frozenset(self._worth.fixed if fixed > 0 and fixed + sample <= most else ()),
        )

    @functools.cached_property
    def _num_together(self) -> Mapping[str, int]:
        """How many trajectories blocks of each field hold."""
        return self._worth.most if self._holds_several else dict.fromkeys(self._layout.fields, 1)

    @functools.cached_property
    def _holds_several(self) -> bool:
        """Whether all ranks that share have room for blocks of several trajectories until all of these are read."""
        return all(each.has_room for each in [self, *map(self._sizes.of, self._sizes.sharers)])

    @property
    def has_room(self) -> bool:
        """Whether some blocks of several trajectories each fit into memory."""
        least = min(_LEAST * self.bytes_of_block, self._bytes_of_trajectories)
        return least + self._bytes_of_fixed(self._worth.most) <= self.room

    def together(self, name: str, i: int) -> Together:
        """Return the trajectories of a field that a block holds with the ``i``-th."""
        alone = self._worth.most[name] == 1 or not self._holds_several
        return self._layout.together(name, i, alone=alone)

    def at_once(self, name: str, i: int) -> Together:
        """Return the trajectories of a field that are decoded with the ``i``-th, where all of them go to disk."""
        return self._layout.together(name, i, alone=not self._fit_at_once[name])

    @functools.cached_property
    def _fit_at_once(self) -> dict[str, bool]:
        layout, parts = self._layout, [self, *map(self._sizes.of, self._sizes.sharers)]
        steps = {name: layout.steps_per_block[name] * layout.most(name) for name in layout.fields}
        return {n: max(part.bytes_of_step(n) for part in parts) * num <= _MAX_AT_ONCE for n, num in steps.items()}

    # -- bytes -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _bytes_of_trajectories(self) -> int:
        """The bytes of all blocks of trajectories whose chunks are the same; 0 if each has its own."""
        if self._sizes.most_trajectories == 1:
            return 0
        rows = int(np.diff(self._layout.series.row_bounds).max())
        return self._bytes(lambda _, size: -(-rows // size), self._worth.most)

    @property
    def bytes_in_order(self) -> int:
        """The bytes that decode each chunk once in stored order."""
        return max(3 * self.bytes_of_sample, self._bytes_of_trajectories + self.bytes_of_sample)

    @functools.cached_property
    def bytes_of_sample(self) -> int:
        """The bytes of all blocks that one sample may need."""
        steps = self._steps
        return self._bytes(lambda name, n: min(steps.num(name), -(-steps.reach(name) // n) + 1), self._num_together)

    @functools.cached_property
    def bytes_of_block(self) -> int:
        """The bytes of all blocks that samples which an order by blocks keeps together may need."""
        longest, reach = self._sizes.steps_in_order, functools.partial(self._steps.reach, every=True)
        most = {name: -(-self._sizes.most_trajectories // num) * num for name, num in self._worth.most.items()}
        return self._bytes(lambda name, n: -(-longest // n) + -(-reach(name) // n), most)

    @functools.cached_property
    def bytes_of_all(self) -> int:
        """The bytes of all blocks of all samples, and of what is the same in them."""
        fixed = {
            name: self._num_blocks(name, _ALL_STEPS) if self._layout.series.outer else 1 for name in self._worth.fixed
        }
        most = self._worth.most
        return self._bytes(self._num_blocks, most) + sum(
            most[name] * num * self.bytes_of_step(name) for name, num in fixed.items()
        )

    def _num_blocks(self, name: str, size: int) -> int:
        rows = np.diff(self._layout.series.row_bounds)
        if self._worth.most[name] > 1:
            rows = rows[np.unique([self._layout.together(name, i, alone=False).member for i in range(len(rows))])]
        return int((-(-rows // size)).sum())

    def _bytes(self, count: Callable[[str, int], int], num: Mapping[str, int]) -> int:
        """Return the bytes of so many blocks of each field that samples share, each of ``num`` trajectories."""
        return sum(
            num[name] * count(name, size) * size * self.bytes_of_step(name)
            for name, size in self._worth.shared_steps.items()
        )

    def _bytes_of_fixed(self, num: Mapping[str, int]) -> int:
        return sum(num[name] * self.bytes_of_step(name) for name in self._worth.fixed)

    def nbytes(self, name: str) -> int:
        """Return the bytes of one block of a field."""
        return self._num_together[name] * self._layout.steps_per_block[name] * self.bytes_of_step(name)

    def bytes_of_step(self, name: str) -> int:
        """Return the bytes of one step of a field, of one trajectory."""
        steps = 1 if self._layout.axes[name] is None else self._steps.num(name)
        return math.prod(self._part.families[name].out_shape) // steps * self._layout.fields[name].dtype.itemsize
