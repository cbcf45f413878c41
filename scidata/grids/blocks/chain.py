"""Puts the stages of blocks in a row: memory, local disk, ranks of the node, files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scidata.core.memory import ArrayPool
from scidata.core.types import Segments
from scidata.grids.blocks.from_source import SourceBlocks
from scidata.grids.blocks.key import BlockStage
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


@dataclass(frozen=True, kw_only=True)
class BlockChain:
    """The stages of a reader: the first, which reads samples; that on disk, if there is one; the stage behind that."""

    pool: BlockPool
    disk: DiskBlocks | None
    source: BlockStage
    layout: BlockLayout
    sizes: BlockSizes


def make_chain(
    series: Series, fields: Mapping[str, Field], planner: Planner, *, steps: FieldSteps,
    selected: Mapping[str, Segments], threads: ReaderThreads, allow_missing: bool, pool_bytes: int, pool_fits: bool,
    shares: NodeShares | None, disk: DiskCache | None,
) -> BlockChain:  # fmt: skip
    """Return the stages of a reader; those that it has no use for are left out.

    Parameters
    ----------
    selected
        Rows along each dimension that the crop leaves.
    pool_bytes, pool_fits
        Of all blocks that are kept in memory; 0 keeps none. ``pool_fits``: and no more than samples in stored order,
        or of ``shuffle="blocks"``, need.
    shares
        Which chunks are decoded together with the other ranks of the node; None: none.
    disk
        Where blocks are kept for other epochs and runs, too; None: nowhere.
    """
    layout, memory = BlockLayout(series, fields, selected), ArrayPool()
    worth = BlockWorth(layout, steps, has_disk=disk is not None, shares=shares)
    sharers = () if shares is None else shares.ranks.coordinates
    sizes = BlockSizes(layout, worth, planner, max_bytes=pool_bytes, fits=pool_fits, sharers=sharers)
    files = SourceBlocks(layout, planner, threads=threads, memory=memory)
    source = files if shares is None else NodeDecoder(files, layout, worth, shares, memory)
    on_disk = None if disk is None else DiskBlocks(source, sizes, planner, disk=disk, memory=memory)
    pool = BlockPool(on_disk or source, sizes, planner)
    return BlockChain(pool=pool, disk=on_disk, source=source, layout=layout, sizes=sizes)
