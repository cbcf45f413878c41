"""The stage of blocks that ranks of a node share: each chunk is decoded by one of them, for all.

A block's chunks fall into *shares*, by the ranks that need them (:mod:`scidata.grids.blocks.node_shares`). The first
that needs a share decodes it into an array that others copy rows from (:mod:`scidata.grids.blocks.shared_arrays`).

Example: 3 ranks split 18 rows, chunks have 4 rows. Chunk 0 is rank 0's alone, so rank 0 reads it by itself. Chunk 1
(rows 4 to 7) is shared by ranks 0 and 1: one of them decodes it, rank 0 copies rows 4 and 5, rank 1 rows 6 and 7.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scidata.core.bounds import rows_of
from scidata.core.cache import Cache
from scidata.core.memory import ArrayPool
from scidata.core.types import ArrayLayout, Files, IntArray, Segments, Selection
from scidata.grids.blocks.from_source import SourceBlocks
from scidata.grids.blocks.key import BlockKey, BusyError, Rows, SampleRead
from scidata.grids.blocks.layout import BlockLayout
from scidata.grids.blocks.node_shares import NodeCut, NodeShares, Share
from scidata.grids.blocks.shared_arrays import SharedArrays
from scidata.grids.blocks.worth import BlockWorth
from scidata.read.context import NO_READ, ReadStats
from scidata.sources.access.validators import Validators

_MAX_FILES = 1 << 14  # shares whose files are kept by name


@dataclass(frozen=True, slots=True)
class _Block:
    key: BlockKey
    layout: ArrayLayout
    axis: int  # of samples
    samples: Segments
    cut: NodeCut
    out: Rows

    def with_samples(self, rows: Selection) -> Selection:
        return (*rows[: self.axis], self.samples, *rows[self.axis + 1 :])


class NodeDecoder:
    """Decodes the chunks of blocks together with the other ranks of the node. Thread-safe."""

    def __init__(
        self, following: SourceBlocks, layout: BlockLayout, worth: BlockWorth, shares: NodeShares, memory: ArrayPool
    ) -> None:
        self._next, self._layout, self._worth, self._shares = following, layout, worth, shares
        self._series, self._memory = layout.series, memory
        self._arrays = SharedArrays(shares.ranks.name, shares.ranks.me, shares.ranks.max_bytes)
        self._validators: Cache[Validators] = Cache(1 << 10)
        self._contents: Cache[bytes] = Cache(1024)
        self._files: Cache[tuple[Files | None]] = Cache(_MAX_FILES, "none")

    def read_into(self, sample: SampleRead, names: Sequence[str]) -> ReadStats:
        """Pass fields on: single rows are not worth handing over."""
        return self._next.read_into(sample, names)

    def clear(self) -> None:
        """Forget plans; arrays that other ranks may wait for stay."""
        self._files.clear()
        self._next.clear()

    def block(self, key: BlockKey, *, wait: bool = True) -> tuple[Rows, ReadStats]:
        """Return a block, each chunk decoded by one rank of the node, and the reads done here; busy ones come last."""
        if key.name not in self._worth.by_node or not self._shares.is_mine(key.part.position):
            return self._next.block(key, wait=wait)
        block = self._opened(key)
        shares, alone = block.cut.shares, block.cut.alone
        stats, busy = NO_READ, []
        ranks = self._shares.ranks
        first = ranks.me * len(shares) // len(ranks.coordinates)  # each rank begins with another share
        for k in itertools.chain(range(first, len(shares)), range(first)):
            took = self._take(block, k, wait=False)
            if took is None:
                busy.append(k)
            else:
                stats += took
        if busy and len(busy) == len(shares) and not alone and not wait:
            raise BusyError
        if alone:
            job, shape = self._next.job, block.out.shape
            jobs = [job(key, ("alone", k), block.with_samples(rows), shape) for k, rows in enumerate(alone)]
            stats += self._next.read([(each, block.out) for each in jobs])
        for k in busy:
            stats += self._take(block, k, wait=True) or NO_READ
        return block.out, stats

    def _opened(self, key: BlockKey) -> _Block:
        layout, selection, shape = self._layout.selection_of(key)
        axis = self._layout.axes[key.name]
        assert axis is not None  # fields without steps are not shared
        trajectories = {dim: selection[k] for k, dim in enumerate(layout.dims) if dim in self._series.outer}
        out = self._memory.empty(shape, self._layout.fields[key.name].dtype, keep=2)
        return _Block(key, layout, axis, selection[axis], self._shares.cut(layout, trajectories), out)

    def _take(self, block: _Block, k: int, *, wait: bool) -> ReadStats | None:
        """Copy this rank's rows of a share; return the statistics, None if another rank makes it now."""
        share = block.cut.shares[k]
        rows = block.with_samples(share.rows)
        shape = tuple([sum(s.count for s in each) for each in rows])

        def make(values: Rows) -> ReadStats:
            return self._next.read([(self._next.job(block.key, ("share", k), rows, shape), values)])

        def use(values: Rows) -> None:
            for to, where in share.copies:
                block.out[to] = values[where]

        version = self._version(block, share, k)
        takers = share.takers if version is not None else (self._shares.ranks.me,)
        name = hashlib.blake2b(
            self._content(block, share, k) + repr((block.samples, version)).encode(), digest_size=16
        ).digest()
        used, made = self._arrays.take(name, shape, block.out.dtype, make, use, takers=takers, wait=wait)
        return (made or NO_READ) if used else None

    def _content(self, block: _Block, share: Share, k: int) -> bytes:
        """Return a text, the same on all ranks, of all that decides a share's values but for samples and files."""
        key, layout = block.key, block.layout

        def find() -> bytes:
            rows = [share.rows[at] for at, dim in enumerate(layout.dims) if dim in self._series.outer]
            decoding = self._layout.fields[key.name].decodings[key.member]
            content = layout.store, layout.name, layout.geometry, rows, decoding, block.out.dtype, share.as_text()
            return repr(content).encode()

        return self._contents.get_or_make((key.name, key.member, key.num, k), find)

    def _version(self, block: _Block, share: Share, k: int) -> bytes | None:
        """Return a digest that changes where a file of the chunks is written anew: other ranks may have read it before.

        None if the source does not know its files: such chunks are not handed on.
        """
        source = self._series.sources[block.key.member]
        (files,) = self._files.get_or_make(
            (block.key, k), lambda: (source.files_of(block.layout, _chunks_of(block, share)),)
        )
        if files is None:
            return None
        return self._validators.get_or_make(source.path, lambda: Validators(source.path)).of(*files).digest


def _chunks_of(block: _Block, share: Share) -> IntArray:
    """Return the coordinates of the chunks that hold some samples of a share, ``(num, ndim)``."""
    rows = rows_of(block.samples)
    ids = [
        np.unique(rows // size) if each is None else each
        for size, each in zip(block.layout.chunks, share.chunks, strict=True)
    ]
    return np.stack(np.meshgrid(*ids, indexing="ij"), axis=-1).reshape(-1, len(ids)).astype(np.int64)
