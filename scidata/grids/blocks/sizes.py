"""How large blocks of decoded rows are: which rows of which fields they hold, and how many bytes of them are kept.

Counts only: from chunks, codecs, steps and trajectories; nothing is read. What a block is, and what keeps them:
:mod:`scidata.grids.blocks.pool`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, IntArray
from scidata.core.urls import Url
from scidata.grids.blocks.on_disk import DiskBlocks
from scidata.grids.blocks.on_node import NodeDecoder, decodes_in_parts
from scidata.grids.blocks.trajectories import Together, Trajectories
from scidata.grids.parts import Field, Part
from scidata.grids.series import Series
from scidata.grids.steps import FieldSteps

_ENOUGH = 0.5  # of a block's rows: of Blosc chunks one step decodes a part, of about twice its size
_LEAST = 3  # blocks of samples for which there is room, at least, where they hold several trajectories
_MAX_AT_ONCE = 256 << 20  # bytes of several trajectories' blocks that are decoded to go to disk
#: Blocks beside those that samples are taken of in turn: of three samples that the loader has on their way, and the
#: next one. With one beside, some were thrown out before they had served, and threads waited for room.
BLOCKS_BESIDE = 4
#: Blocks of which DistributedSampler(shuffle="blocks") takes samples in turn by default, and those kept for it.
BLOCKS_AT_ONCE = 8
KEPT_BLOCKS = BLOCKS_AT_ONCE + BLOCKS_BESIDE
_LEAST_TOGETHER = 8  # steps of a block of samples, of all its trajectories, where windows make neighbours share some
_PER_EDGE = 10  # chunks of a stretch for each that the one beside it needs, too: so few are decoded twice
_T = TypeVar("_T")


def _found_once(find: Callable[[BlockSizes, Part], _T]) -> Callable[[BlockSizes, Part], _T]:
    """Keep what is found of a part: samples ask for it one by one, and parts of a data set do not change."""

    @functools.wraps(find)
    def kept(self: BlockSizes, part: Part) -> _T:
        found: _T = self._known.get_or_make((find.__name__, part.position), lambda: find(self, part))
        return found

    return kept


def steps_per_block(layout: ArrayLayout, sample_dim: str | None) -> int:
    """Return how many steps a chunk holds that has to be decoded for any of them; 1 where no decoding is shared."""
    if sample_dim not in layout.dims or not (layout.codecs or layout.fallback):
        return 1
    axis = layout.dims.index(str(sample_dim))
    return min(layout.chunks[axis], layout.shape[axis])


class BlockSizes:
    """Of which fields a reader's samples share blocks, and how large these are. Thread-safe.

    Parameters
    ----------
    series, fields
        The reader's.
    steps
        Of a sample.
    trajectories
        Which of them chunks hold together.
    max_bytes, fits
        Of all blocks that are kept, see :class:`scidata.grids.blocks.pool.BlockPool`.
    node, node_parts
        Decodes chunks together with the other ranks of the node; and returns the parts of all of these, who have to
        decode the same trajectories together.
    kept
        The blocks on disk.
    """

    def __init__(
        self,
        series: Series,
        fields: Mapping[str, Field],
        *,
        steps: FieldSteps,
        trajectories: Trajectories,
        max_bytes: int,
        fits: bool,
        node: NodeDecoder | None,
        node_parts: Callable[[], Sequence[Part]],
        kept: DiskBlocks,
    ) -> None:
        self._series, self._fields, self._steps = series, fields, steps
        self._trajectories, self._node, self._kept = trajectories, node, kept
        self._node_parts = node_parts
        self._limit, self._fits = max_bytes, fits
        self._max_bytes: int | None = None
        self._known: Cache[Any] = Cache(1 << 12)

    def max_bytes(self, part: Part) -> int:
        """Return how many bytes of blocks are kept of a rank's part; of the first that is asked for."""
        if self._max_bytes is None:
            self._max_bytes = self._room(part)
        return self._max_bytes

    def _room(self, part: Part) -> int:
        if not self._fits:
            return self._limit
        window = KEPT_BLOCKS * self.bytes_of_block(part) if self.shared_steps else 0
        fixed = self._bytes_of_fixed(part, self._most) * (KEPT_BLOCKS if self._series.outer else 1)
        return min(max(window, self.bytes_of_trajectories(part)) + fixed, self._limit)

    @functools.cached_property
    def steps_per_block(self) -> dict[str, int]:
        """Steps of a block of each field; 1 where chunks share no decoding."""
        firsts, dim = self._series.firsts, self._series.sample_dim
        return {
            name: max(steps_per_block(self._series.layout_in(i, name), dim) for i in firsts) for name in self._fields
        }

    @functools.cached_property
    def steps_in_order(self) -> int:
        """Steps of a block of samples, which come in random order.

        Those of the longest chunks; where these are of a few steps, and neighbours share some, of several chunks.
        """
        longest = max(self.steps_per_block.values())
        return longest * (-(-_LEAST_TOGETHER // (longest * self.most_trajectories)) if self._edge else 1)

    @functools.cached_property
    def steps_in_stretch(self) -> int:
        """Steps of the blocks of samples that an order by blocks goes through one after the other."""
        longest, size = max(self.steps_per_block.values()), self.steps_in_order
        edge = -(-self._edge // longest) * longest
        return max(1, -(-_PER_EDGE * edge // size)) * size

    @functools.cached_property
    def _edge(self) -> int:
        """Steps beyond a block of samples that its samples need: of windows, and of chunks that end elsewhere."""
        longest = max(self.steps_per_block.values())
        shared = self.shared_steps.items()
        return max(
            (self._steps.reach(name, every=True) + (size if longest % size else 0) for name, size in shared), default=0
        )

    @functools.cached_property
    def shared_steps(self) -> dict[str, int]:
        """Steps of a block of the fields of which samples share some: by their chunks, or because windows overlap."""
        sizes = list(self.steps_per_block.items())
        first = 0 if self._node is None else self._node.me % max(1, len(sizes))  # ranks begin with different fields
        return {
            name: size
            for name, size in sizes[first:] + sizes[:first]
            if size > 1
            or (self._most[name] > 1 and name not in self.fixed)
            or name in self.by_node
            or (self._steps.num(name) > 1 and self._is_costly(self._series.layout_in(0, name)))
        }

    @functools.cached_property
    def by_node(self) -> frozenset[str]:
        """Fields whose chunks the ranks of this node decode for each other."""
        node, source = self._node, self._series.sources[0]
        if node is None:
            return frozenset()
        return frozenset(name for name in self._fields if node.is_worth_it(self._series.layout_in(0, name), source))

    def _is_costly(self, layout: ArrayLayout) -> bool:
        has_rows = self._series.sample_dim in layout.dims
        return has_rows and self._takes_time(layout)

    def _takes_time(self, layout: ArrayLayout) -> bool:
        return bool(layout.codecs or layout.fallback or isinstance(self._series.sources[0].path, Url))

    @functools.cached_property
    def fixed(self) -> frozenset[str]:
        """Fields that are the same in all samples, or in all of a trajectory, and take fetching or decoding."""
        dim = self._series.sample_dim
        return frozenset(
            name
            for name, field in self._fields.items()
            if dim is not None and dim not in field.source_dims and self._takes_time(self._series.layout_in(0, name))
        )

    @_found_once
    def bytes_of_fixed(self, part: Part) -> int:
        """Return the bytes of the fields that are the same, of as many trajectories as blocks hold."""
        return self._bytes_of_fixed(part, self.num_together(part))

    def _bytes_of_fixed(self, part: Part, num: Mapping[str, int]) -> int:
        sizes = (
            num[name] * math.prod(part.families[name].out_shape) * self._fields[name].dtype.itemsize
            for name in self.fixed
        )
        return sum(sizes)

    @functools.cached_property
    def _most(self) -> dict[str, int]:
        """Trajectories of a block of each field, at most; one where the others' are kept on disk meanwhile."""
        alone = self._kept.fields
        return {name: 1 if name in alone else self._trajectories.most(name) for name in self._fields}

    @_found_once
    def num_together(self, part: Part) -> Mapping[str, int]:
        """Return how many trajectories blocks of each field hold of a rank's part."""
        return self._most if self._holds_several(part) else dict.fromkeys(self._fields, 1)

    @_found_once
    def _holds_several(self, part: Part) -> bool:
        """Whether there is room for blocks of several trajectories until all of these are read: with all who share."""
        if max(self._most.values()) == 1:
            return False
        return all(map(self._has_room, [part, *self._sharers]))

    def _has_room(self, part: Part) -> bool:
        least = min(_LEAST * self.bytes_of_block(part), self.bytes_of_trajectories(part))
        return least + self._bytes_of_fixed(part, self._most) <= self._room(part)

    @property
    def _sharers(self) -> Sequence[Part]:
        return self._node_parts() if self.by_node else ()

    @_found_once
    def bytes_of_trajectories(self, part: Part) -> int:
        """Return the bytes of all blocks of trajectories whose chunks are the same; 0 where each has its own."""
        if max(self._most.values()) == 1:
            return 0
        rows = int(np.diff(self._series.row_bounds).max())
        return self._bytes(part, lambda _, size: -(-rows // size), self._most)

    @property
    def most_trajectories(self) -> int:
        """Trajectories of a block, at most."""
        return max(self._most.values())

    def bytes_in_order(self, part: Part) -> int:
        """Return the bytes that decode each chunk once in stored order."""
        return max(3 * self.bytes_of_sample(part), self.bytes_of_trajectories(part) + self.bytes_of_sample(part))

    def together(self, name: str, i: int, part: Part) -> Together:
        """Return the trajectories of a field that a block holds with the ``i``-th."""
        return self._trajectories.of(name, i, alone=self._most[name] == 1 or not self._holds_several(part))

    def at_once(self, name: str, i: int, part: Part) -> Together:
        """Return the trajectories of a field that are decoded with the ``i``-th, where all of them go to disk."""
        fits = self._known.get_or_make((name, part.position, "at once"), lambda: self._fits_at_once(name, part))
        return self._trajectories.of(name, i, alone=not fits)

    def _fits_at_once(self, name: str, part: Part) -> bool:
        num = self.steps_per_block[name] * self._trajectories.most(name)
        return num * max(self._bytes_of_step(name, each) for each in [part, *self._sharers]) <= _MAX_AT_ONCE

    @functools.cached_property
    def enough(self) -> dict[str, int]:
        """Samples that must use a block of each field for it to be worth reading."""
        enough = {}
        for name, size in self.shared_steps.items():
            in_parts = decodes_in_parts(self._series.layout_in(0, name))
            shared = name in self.by_node
            few = shared and size == 1 if in_parts else shared or size > 1 or self._most[name] > 1
            enough[name] = 1 if few else max(2, math.ceil(_ENOUGH * size))
        return enough

    def blocks_of(self, rows: IntArray) -> IntArray:
        """Return numbers, from 0 on, of the blocks that rows of all members, one after the other, lie in."""
        return self._numbers(rows, self.steps_in_order)

    def stretches_of(self, rows: IntArray) -> IntArray:
        """Return numbers, from 0 on, of the stretches of blocks that rows of all members lie in."""
        return self._numbers(rows, self.steps_in_stretch)

    def _numbers(self, rows: IntArray, size: int) -> IntArray:
        bounds = self._series.row_bounds
        members = np.searchsorted(bounds, rows, side="right") - 1
        most = max(self._fields, key=self._trajectories.most)
        firsts = np.array([self._trajectories.of(most, i, alone=False).member for i in range(len(bounds) - 1)])
        of_each = int(np.diff(bounds).max(initial=0)) // size + 1
        places = firsts[members] * of_each + (rows - bounds[members]) // size
        numbers: IntArray = np.unique(places, return_inverse=True)[1].astype(np.int64)
        return numbers

    @_found_once
    def bytes_of_sample(self, part: Part) -> int:
        """Return the bytes of all blocks that one sample may need."""
        num = self.num_together(part)
        steps = self._steps
        return self._bytes(part, lambda name, n: min(steps.num(name), -(-steps.reach(name) // n) + 1), num)

    @_found_once
    def bytes_of_block(self, part: Part) -> int:
        """Return the bytes of all blocks that samples which an order by blocks keeps together may need."""
        longest = self.steps_in_order
        return self._bytes(
            part, lambda name, n: -(-longest // n) + -(-self._steps.reach(name, every=True) // n), self._most
        )

    @_found_once
    def bytes_of_all(self, part: Part) -> int:
        """Return the bytes of all blocks of all samples."""
        num_rows = int(self._series.row_bounds[-1])
        return self._bytes(part, lambda _, size: -(-num_rows // size))

    def _bytes(self, part: Part, count: Callable[[str, int], int], num: Mapping[str, int] | None = None) -> int:
        """Return the bytes of so many blocks of each field, each of ``num`` trajectories."""
        return sum(
            (1 if num is None else num[name]) * count(name, size) * size * self._bytes_of_step(name, part)
            for name, size in self.shared_steps.items()
        )

    def nbytes(self, name: str, part: Part) -> int:
        """Return the bytes of one block of a field."""
        return self.num_together(part)[name] * self.shared_steps[name] * self._bytes_of_step(name, part)

    def _bytes_of_step(self, name: str, part: Part) -> int:
        shape = part.families[name].out_shape
        return math.prod(shape) // self._steps.num(name) * self._fields[name].dtype.itemsize
