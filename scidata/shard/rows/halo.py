"""Halo exchange along one dim: each rank's part grows by rows of its neighbours, differentiably.

Which rows a rank's halo holds is ``bounds.window``'s business, the same function that tells a reader what to read; here
the rows are only moved. Two dims are exchanged one after the other: the second exchange carries the corners.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from torch import Tensor

from scidata.core.bounds import window
from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard.comm.transport import Group, group_rank, group_size
from scidata.shard.rows.runs import Runs, fetch_runs, return_runs

__all__ = ["halo_exchange_dim", "halo_reduce_dim", "halo_runs"]


@lru_cache(maxsize=512)
def halo_runs(sizes: tuple[int, ...], lo: int, hi: int, periodic: bool) -> tuple[Runs, ...]:
    """Return the global rows of each rank's part together with its halo."""
    bounds = (0, *accumulate(sizes))
    windows = (window(bounds, part, lo=lo, hi=hi, periodic=periodic) for part in range(len(sizes)))
    return tuple(tuple((segment.start, segment.count) for segment in segments) for segments in windows)


def _checked(
    x: Tensor, sizes: Sequence[int], dim: int, lo: int, hi: int, periodic: bool, group: Group
) -> tuple[tuple[int, ...], tuple[Runs, ...], int]:
    parts = tuple(int(size) for size in sizes)
    if len(parts) != group_size(group):
        raise ShardLayoutError(f"{len(parts)} sizes {parts} were given for a group of {group_size(group)} ranks")
    if min(parts) < 0:
        raise ShardLayoutError(f"sizes must not be negative: {parts}")
    if lo < 0 or hi < 0:
        raise ConfigError(f"halo widths must not be negative: ({lo}, {hi})")
    if not -x.ndim <= dim < x.ndim:
        raise ShardLayoutError(f"dim {dim} is out of range for a tensor of shape {tuple(x.shape)}")
    return parts, halo_runs(parts, int(lo), int(hi), bool(periodic)), dim % x.ndim


def halo_exchange_dim(
    local: Tensor, sizes: Sequence[int], dim: int, lo: int, hi: int, periodic: bool, group: Group
) -> Tensor:
    """Return the own part with up to ``lo`` rows below and ``hi`` rows above it. Collective, if any rank has a halo.

    Backward adds the gradients of all copies of a row up where it is owned.

    Parameters
    ----------
    local
        The own part, ``sizes[rank]`` rows along ``dim``; the other dims are the same on all ranks of the group.
    lo, hi
        Halo widths. A halo may be wider than a neighbour's part: it then reaches the next one.
    periodic
        Whether the dim wraps; otherwise the halo clips at the edges. An empty part gets no halo.

    Raises
    ------
    ShardLayoutError
        Sizes that do not fit the group or the part.
    ConfigError
        Negative widths.
    """
    parts, wanted, dim = _checked(local, sizes, dim, lo, hi, periodic, group)
    rank = group_rank(group)
    if local.shape[dim] != parts[rank]:
        raise ShardLayoutError(
            f"rank {rank} holds {local.shape[dim]} rows along dim {dim}, but sizes {parts} give it {parts[rank]}"
        )
    return local if lo == hi == 0 else fetch_runs(local, parts, dim, wanted, group)


def halo_reduce_dim(
    padded: Tensor, sizes: Sequence[int], dim: int, lo: int, hi: int, periodic: bool, group: Group
) -> Tensor:
    """Add what each rank holds in its halo to the rows' owners, and return the owned part. Collective.

    The transpose of :func:`halo_exchange_dim`, with the same arguments: what a scatter into neighbours (a transposed
    convolution) ends with. Backward is a halo exchange.
    """
    parts, wanted, dim = _checked(padded, sizes, dim, lo, hi, periodic, group)
    rank = group_rank(group)
    held = sum(count for _, count in wanted[rank])
    if padded.shape[dim] != held:
        raise ShardLayoutError(
            f"rank {rank} holds {padded.shape[dim]} rows along dim {dim}, but its part of sizes {parts} with its halo "
            f"has {held}"
        )
    return padded if lo == hi == 0 else return_runs(padded, parts, dim, wanted, group)
