"""Halos: each rank's part grows by rows of its neighbours, by a differentiable exchange, or as it was read.

``bounds.window`` names the rows of a rank's halo, for readers too; here the rows are only moved. Two dims are exchanged
one after the other: the second exchange carries the corners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from scidata.core.bounds import bounds_of, halo_widths, window
from scidata.errors import ShardLayoutError
from scidata.shard.comm.transport import Group, group_rank
from scidata.shard.rows.runs import Runs, fetch_runs, plan_runs
from scidata.shard.sizes import facts_of
from scidata.shard.spec import HaloDim, ShardSpec


def halo_runs(
    sizes: tuple[int, ...], lo: int, hi: int, periodic: bool, before: int = 0, after: int = 0
) -> tuple[Runs, ...]:
    """Return the global rows of each rank's part together with its halo."""
    bounds, widths = bounds_of(sizes), HaloDim(lo=lo, hi=hi, periodic=periodic, before=before, after=after)
    windows = (window(bounds, part, **vars(widths)) for part in range(len(sizes)))
    return tuple(tuple((segment.start, segment.count) for segment in segments) for segments in windows)


def halo_exchange_dim(
    local: Tensor, sizes: tuple[int, ...], dim: int, lo: int, hi: int, periodic: bool, group: Group
) -> Tensor:
    """Return the own part with up to ``lo`` rows below and ``hi`` rows above it. Collective, if any rank has a halo.

    The halo wraps in a ``periodic`` dim, else it clips at the edges; wider than a neighbour's part, it reaches the next
    one. An empty part gets none. Backward adds the gradients of all copies of a row up where it is owned.
    """
    if not lo and not hi:
        return local
    rank = group_rank(group)
    key, make = (rank, lo, hi, periodic), lambda: plan_runs(sizes, rank, halo_runs(sizes, lo, hi, periodic))
    return fetch_runs(local, facts_of(sizes).plans.get_or_make(key, make), dim, group)


# -- parts with their halo in memory -------------------------------------------------------------------------------


def halo_dims(
    halo: Mapping[int, int | tuple[int, int]], periodic: Sequence[int], spec: ShardSpec
) -> dict[int, HaloDim]:
    """Return widths as users type them, ``{dim: width or (lo, hi)}`` and the dims that wrap, by dims from 0 on."""
    wraps, wanted = {dim % spec.ndim for dim in periodic}, {}
    for dim, width in halo.items():
        lo, hi = (width, width) if isinstance(width, int) else width
        wanted[dim % spec.ndim] = HaloDim(lo=lo, hi=hi, periodic=dim % spec.ndim in wraps)
    return wanted


def owned_of(padded: Tensor, spec: ShardSpec, halo: Mapping[int, HaloDim]) -> Tensor:
    """Return the owned rows of a part that holds its halo, as a view."""
    shape, below = list(spec.local_shape), {}
    for dim, widths in halo.items():
        below[dim], above = halo_widths(*spec.dim_bounds(dim), **vars(widths))
        shape[dim] += below[dim] + above
    if tuple(padded.shape) != tuple(shape):
        raise ShardLayoutError(
            f"the padded part has shape {tuple(padded.shape)}, but owned {spec.local_shape} and halo {dict(halo)} make "
            f"{tuple(shape)} ({spec})"
        )
    owned = padded
    for dim, start in below.items():
        owned = owned.narrow(dim, start, spec.local_shape[dim])
    return owned


def exchange_halo(local: Tensor, spec: ShardSpec, halo: Mapping[int, HaloDim]) -> Tensor:
    """Return the owned rows with their halo along each dim. Collective, differentiable."""
    for dim, widths in halo.items():
        if widths.before or widths.after:
            raise ShardLayoutError(
                "this tensor's halo reaches beyond the edges of a patch, into rows that no rank owns, and was not "
                "kept: take local_with_halo() before the operation that dropped it, or give widths of rows inside the "
                "patch, local_with_halo({dim: 1})"
            )
        sizes, _, group = spec.parts(dim)
        local = halo_exchange_dim(local, sizes, dim, widths.lo, widths.hi, widths.periodic, group)
    return local
