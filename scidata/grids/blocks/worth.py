"""The one place that decides which blocks are worth keeping: in memory, on disk, or made for other ranks of the node.

A block costs something to make (chunks are decoded, or fetched), and something to keep. It is worth it where samples
share it: chunks hold several steps or trajectories, windows of steps overlap, or a field is the same in all samples.
On disk it serves other epochs and runs, so there it is enough that it costs something to make.

Whether a block is worth reading whole depends on how many of its rows will be used, too. Of most codecs one row costs
as much as the whole chunk; of Blosc, and of windows over chunks of one step, less. A loader knows which samples come
next, and says which blocks it wants. Where nobody does, a block is read when a second sample needs it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, Source
from scidata.core.urls import Url, local_path
from scidata.grids.blocks.key import BlockKey, Wanted
from scidata.grids.blocks.layout import BlockLayout, must_decode
from scidata.grids.blocks.node_shares import NodeShares, decodes_in_parts
from scidata.grids.steps import FieldSteps
from scidata.sources.access.mounts import is_on_network

_ENOUGH = 0.5  # of a block's rows: of Blosc chunks one step decodes a part, of about twice its size
_WORTH = 1.1  # times the whole that the ranks of a node would decode, each by itself


def is_worth_sharing(shares: NodeShares, layout: ArrayLayout, source: Source) -> bool:
    """Whether the ranks of a node would decode the same of an array more than once, each by itself."""
    if shares.sample_dim not in layout.dims or not must_decode(layout) or layout.edges:
        return False
    return shares.times_decoded(layout, source) > _WORTH


class BlockWorth:
    """Which blocks of a reader are worth keeping, and where. Thread-safe; pickles without ``wanted``.

    - ``shares``: which chunks the ranks of the node share; None: they decode by themselves.
    - ``share_of_patch``: which share of a block a patch decodes by itself, and how many patches a sample has; None
      if there are none.
    - ``wanted``: keys of blocks that are worth reading, a set from each loader that knows which samples come next.
      Where there is one, others are not read. Changed by single operations that are atomic, so that a finalizer may.
    - ``touched``: blocks of which a row was read alone, as many as could be kept.
    """

    def __init__(
        self, layout: BlockLayout, steps: FieldSteps, *, has_disk: bool, shares: NodeShares | None,
        share_of_patch: Callable[[str], tuple[float, int]] | None = None,
    ) -> None:  # fmt: skip
        self._share_of_patch = share_of_patch
        self._layout, self.steps, self._has_disk, self._shares = layout, steps, has_disk, shares
        self._series = layout.series
        self.wanted: dict[int, set[BlockKey]] = {}
        self.touched: Cache[bool] = Cache(0, "lru")

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"wanted": {}}

    # -- by field ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def shared_steps(self) -> dict[str, int]:
        """Steps of a block of the fields of which samples share some: by their chunks, or because windows overlap."""
        sizes = list(self._layout.steps_per_block.items())
        first = (
            0 if self._shares is None else self._shares.ranks.me % max(1, len(sizes))
        )  # ranks begin with different fields
        return {name: size for name, size in sizes[first:] + sizes[:first] if self._is_shared(name, size)}

    def _is_shared(self, name: str, size: int) -> bool:
        if self._share_of_patch is not None:
            share, num = self._share_of_patch(name)
            return self._layout.axes[name] is not None and self._takes_time(name) and size * num * share > _WORTH
        if size > 1 or name in self.by_node or (self.most[name] > 1 and name not in self.fixed):
            return True
        return self._layout.axes[name] is not None and self.steps.num(name) > 1 and self._takes_time(name)

    @functools.cached_property
    def fixed(self) -> frozenset[str]:
        """Fields that are the same in all samples, or in all of a trajectory, and take fetching or decoding."""
        if self._series.sample_dim is None:
            return frozenset()
        return frozenset(n for n in self._layout.fields if self._layout.axes[n] is None and self._takes_time(n))

    @functools.cached_property
    def on_disk(self) -> frozenset[str]:
        """Fields whose blocks are kept on disk: they take decoding, or come over a network, mounts included."""
        if not self._has_disk:
            return frozenset()
        return frozenset(name for name in self._layout.fields if self._gains_by_disk(name))

    @functools.cached_property
    def by_node(self) -> frozenset[str]:
        """Fields whose chunks the ranks of this node decode for each other."""
        shares, source = self._shares, self._series.sources[0]
        if shares is None:
            return frozenset()
        layouts = {name: self._series.layout_in(0, name) for name in self._layout.fields}
        return frozenset(name for name, layout in layouts.items() if is_worth_sharing(shares, layout, source))

    @functools.cached_property
    def fields(self) -> tuple[str, ...]:
        """All fields that are cut into blocks, in the order in which a sample's are read."""
        return tuple(dict.fromkeys([*self.shared_steps, *self.fixed, *self.on_disk]))

    @functools.cached_property
    def most(self) -> dict[str, int]:
        """Trajectories of a block of each field, at most; one where the others' are kept on disk meanwhile."""
        layout = self._layout
        return {name: 1 if name in self.on_disk else layout.most(name) for name in layout.fields}

    @functools.cached_property
    def enough(self) -> dict[str, int]:
        """Samples that must use a block of each field for it to be worth reading."""
        enough = {}
        for name, size in self.shared_steps.items():
            if self._share_of_patch is not None:
                enough[name] = math.ceil(1 / self._share_of_patch(name)[0])
                continue
            in_parts = decodes_in_parts(self._series.layout_in(0, name))
            shared = name in self.by_node
            few = shared and size == 1 if in_parts else shared or size > 1 or self.most[name] > 1
            enough[name] = 1 if few else max(2, math.ceil(_ENOUGH * size))
        return enough

    def _takes_time(self, name: str) -> bool:
        return must_decode(self._series.layout_in(0, name)) or isinstance(self._series.sources[0].path, Url)

    def _gains_by_disk(self, name: str) -> bool:
        for f in self._series.kinds:
            layout = self._series.layouts(f)[name]
            first = np.zeros((min(1, math.prod(layout.shape)), len(layout.shape)), np.int64)
            if must_decode(layout) or _is_far(layout.store):
                return True
            files = self._series.files[f].files_of(layout, first)  # others lie where those of the first chunk do
            if files is not None and any(map(_is_far, files.paths)):
                return True
        return False

    # -- by block ----------------------------------------------------------------------------------------------------

    def is_wanted(self, key: BlockKey) -> bool:
        """Whether a sample that comes next needs a block; true where no loader knows which ones come."""
        wanted = list(self.wanted.values())
        return not wanted or any(key in each for each in wanted)

    def are_worth_reading(self, blocks: Sequence[Wanted], kept: Sequence[bool]) -> bool:
        """Whether to read the blocks of a field that a sample needs; ``kept`` says which of them are in memory."""
        keys, wanted = [block.key for block in blocks], list(self.wanted.values())
        if wanted:
            # where others need one block, others of this order need the one beside it, or will have needed it
            return any(kept) or any(key in each for key in keys for each in wanted)
        known = [self.touched.get(key) is not None for key in keys]
        for block in blocks:
            self.touched.put(block.key, True, block.nbytes)
        return any(kept) or all(known)  # where one is kept, the order is one that stays close


def _is_far(path: str) -> bool:
    local = local_path(path)
    return local is None or is_on_network(local)
