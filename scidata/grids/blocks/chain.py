"""Puts the stages of blocks in a row: memory, local disk, ranks of the node, files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from scidata.core.memory import ArrayPool
from scidata.core.types import Segments
from scidata.grids.blocks.from_source import SourceBlocks
from scidata.grids.blocks.layout import BlockLayout
from scidata.grids.blocks.node_shares import NodeShares
from scidata.grids.blocks.on_disk import DiskBlocks
from scidata.grids.blocks.on_node import NodeDecoder
from scidata.grids.blocks.pool import BlockPool
from scidata.grids.blocks.sizes import BlockSizes
from scidata.grids.blocks.worth import BlockWorth
from scidata.grids.parts import Field
from scidata.grids.planner import Planner
from scidata.grids.series import Series
from scidata.grids.steps import FieldSteps
from scidata.read.disk_cache import DiskCache
from scidata.read.threads import ReaderThreads


class BlockChain:
    """The stages of a reader; those that it has no use for are left out.

    - ``pool_bytes``, ``pool_fits``: of all blocks that are kept in memory; 0 keeps none. ``pool_fits``: and no more
      than samples in stored order, or of ``shuffle="blocks"``, need.
    - ``shares``: which chunks are decoded together with the other ranks of the node; None: none.
    - ``pool``, ``disk``, ``source``: the first stage, which reads samples; that on disk, if there is one; and the one
      behind that.
    """

    def __init__(
        self, series: Series, fields: Mapping[str, Field], planner: Planner, *, steps: FieldSteps,
        selected: Mapping[str, Segments], threads: ReaderThreads, pool_bytes: int,
        pool_fits: bool, shares: NodeShares | None, disk: DiskCache | None,
        share_of_patch: Callable[[str], tuple[float, int]] | None = None,
    ) -> None:  # fmt: skip
        self.layout, memory = BlockLayout(series, fields, selected), ArrayPool()
        worth = BlockWorth(self.layout, steps, has_disk=disk is not None, shares=shares, share_of_patch=share_of_patch)
        sharers = () if shares is None else shares.ranks.coordinates
        self.sizes = BlockSizes(self.layout, worth, planner, max_bytes=pool_bytes, fits=pool_fits, sharers=sharers)
        files = SourceBlocks(self.layout, planner, threads=threads, memory=memory)
        self.source = files if shares is None else NodeDecoder(files, self.layout, worth, shares, memory)
        self.disk = None if disk is None else DiskBlocks(self.source, self.sizes, planner, disk=disk, memory=memory)
        self.pool = BlockPool(self.disk or self.source, self.sizes, planner)
