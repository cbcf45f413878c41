"""Rows by global number: each rank asks for runs of rows along one dim and gets them in one exchange.

All that slides over a dim is made of it: halos, the windows of convolutions and pooling, the rows that an interpolation
reads, padding. All ranks know all requests, so only rows travel, between the ranks that hold and want them. Backward
adds the gradients of all copies of a row up where it is owned.

Sizes (3, 2): rank 0 owns rows 0 to 2, rank 1 rows 3 and 4. Rank 0 asks for its part with a halo of 1 and padding below,
``((FILLED, 1), (0, 4))``: a filled row, its own rows 0 to 2 as one piece, and row 3 as a piece of rank 1.

``bounds.window`` names the rows of a rank's halo, by which its part grows, for readers too; here the rows are only
moved. Two dims are exchanged one after the other: the second exchange carries the corners.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from scidata.core.bounds import bounds_of, halo_widths, window
from scidata.errors import ShardLayoutError
from scidata.shard.comm.functions import linear
from scidata.shard.comm.transport import SUM_IN, Group, exchange, group_rank, with_dim
from scidata.shard.sizes import facts_of
from scidata.shard.spec import HaloDim, ShardSpec

#: The start of a run of rows that nobody owns: they get the fill value.
FILLED = -1
#: ``(first global row, count)`` of consecutive rows, in the order in which they are wanted.
Runs: TypeAlias = tuple[tuple[int, int], ...]


class Way(NamedTuple):
    """Rows that move along one dim, seen from one rank. A run is ``(first row, count)``, here of the rank's tensors."""

    length: int  # of the result
    kept: tuple[tuple[int, int, int], ...]  # rows that stay here: from, to, count
    sent: tuple[tuple[int, Runs], ...]  # ranks that get rows of mine, and which runs
    placed: tuple[tuple[int, Runs], ...]  # ranks that rows come from, and the runs of the result where they go


class RunsPlan(NamedTuple):
    """Rows that move between the ranks along one dim, seen from one rank, forward and backward."""

    there: Way
    back: Way
    filled: Runs  # of the result
    pairs: int  # of a rank and another that gets rows of it, among all ranks
    fills: bool  # whether any rank has filled rows


def window_runs(start: int, stop: int, extent: int) -> Runs:
    """Return runs for the rows ``[start, stop)`` of a dim of that extent; rows outside are filled."""
    first, last = min(max(start, 0), extent), max(min(stop, extent), 0)
    runs = ((FILLED, min(stop, 0) - start), (first, last - first), (FILLED, stop - max(start, extent)))
    return tuple(run for run in runs if run[1] > 0)


def runs_of(rows: Sequence[int]) -> Runs:
    """Join a list of rows (``FILLED`` for missing ones) to runs."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        start, count = runs[-1] if runs else (0, 0)
        follows = count and (row == start == FILLED or (start != FILLED and row == start + count))
        if follows:
            runs[-1] = start, count + 1
        else:
            runs.append((row, 1))
    return tuple(runs)


def edges_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return bounds as plain integers."""
    return tuple(facts_of(sizes).bounds.tolist())


def parts_as_runs(sizes: tuple[int, ...]) -> tuple[Runs, ...]:
    """Return the rows of each part as one run."""
    return tuple(((first, size),) for first, size in zip(edges_of(sizes), sizes, strict=False))


def _pieces(edges: tuple[int, ...], runs: Runs) -> list[tuple[int, int, int, int]]:
    """Cut the runs that one rank asks for at the owners' bounds: owner, row of its part, row of the result, count."""
    pieces, offset = [], 0
    for begin, count in runs:
        if begin != FILLED:
            for owner in range(bisect_right(edges, begin) - 1, bisect_left(edges, begin + count)):
                first, last = max(begin, edges[owner]), min(begin + count, edges[owner + 1])
                if last > first:
                    pieces.append((owner, first - edges[owner], offset + first - begin, last - first))
        offset += count
    return pieces


def plan_runs(sizes: tuple[int, ...], rank: int, wanted: Sequence[Runs]) -> RunsPlan:
    """Plan the exchange in which each rank gets the runs that it wants; part ``rank`` is this one's.

    Takes a step for each rank, so it is to be kept: with the layout (``ShardSpec.plans``) by the few numbers that the
    requests follow from.
    """
    edges = edges_of(sizes)
    own, pairs = _pieces(edges, wanted[rank]), 0
    sent: dict[int, Runs] = {}
    placed: dict[int, Runs] = {}
    for holder, runs in enumerate(wanted):
        pieces = own if holder == rank else _pieces(edges, runs)
        owners = {owner for owner, *_ in pieces}
        pairs += len(owners - {holder})
        if holder != rank and rank in owners:
            sent[holder] = tuple([(start, n) for owner, start, _, n in pieces if owner == rank])
    for owner in sorted({owner for owner, *_ in own} - {rank}):
        placed[owner] = tuple([(place, n) for each, _, place, n in own if each == owner])
    kept = tuple([(start, place, n) for owner, start, place, n in own if owner == rank])
    *offsets, length = accumulate((count for _, count in wanted[rank]), initial=0)
    return RunsPlan(
        there=Way(length, kept, tuple(sent.items()), tuple(placed.items())),
        back=Way(
            sizes[rank],
            tuple((place, start, n) for start, place, n in kept),
            tuple(placed.items()),
            tuple(sent.items()),
        ),
        filled=tuple((at, n) for at, (begin, n) in zip(offsets, wanted[rank], strict=True) if begin == FILLED),
        pairs=pairs,
        fills=any(begin == FILLED for runs in wanted for begin, _ in runs),
    )


def _move(x: Tensor, plan: RunsPlan, dim: int, group: Group, *, fill: float = 0.0) -> Tensor:
    """Return the rows that this rank asked for."""
    way = plan.there
    pieces = [(place, x.narrow(dim, start, count)) for start, place, count in way.kept]
    pieces += [(place, x.new_full(with_dim(x.shape, dim, count), fill)) for place, count in plan.filled]
    pieces += _received(x, way, plan, dim, group)
    pieces.sort(key=itemgetter(0))
    return torch.cat([rows for _, rows in pieces], dim) if pieces else x.narrow(dim, 0, 0).clone()


def _back(x: Tensor, plan: RunsPlan, dim: int, group: Group) -> Tensor:
    """Add the copies of this rank's own rows up, in a wide dtype."""
    way, wide = plan.back, SUM_IN.get(x.dtype, x.dtype)
    kept = [(place, x.narrow(dim, start, count)) for start, place, count in way.kept]
    if len(kept) == 1 and kept[0][1].shape[dim] == way.length:
        result = kept.pop()[1].to(wide, memory_format=torch.contiguous_format, copy=True)
    else:
        result = x.new_zeros(with_dim(x.shape, dim, way.length), dtype=wide)
    for place, rows in kept + _received(x, way, plan, dim, group):
        result.narrow(dim, place, rows.shape[dim]).add_(rows)
    return result.to(x.dtype)


def _received(x: Tensor, way: Way, plan: RunsPlan, dim: int, group: Group) -> list[tuple[int, Tensor]]:
    """Exchange rows, and return the received ones with their places in the result."""
    if not plan.pairs:
        return []
    parts, shapes, before, after = [], [], x.shape[:dim], x.shape[dim + 1 :]
    for rank, runs in way.sent:
        pieces = [x.narrow(dim, *run) for run in runs]
        parts.append((rank, pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)))
    for rank, runs in way.placed:
        shapes.append((rank, (*before, sum([n for _, n in runs]), *after)))
    received = exchange(x, parts, shapes, group, plan.pairs)
    found = []
    for rows, (_, runs) in zip(received, way.placed, strict=True):
        start = 0
        for place, count in runs:
            found.append((place, rows.narrow(dim, start, count)))
            start += count
    return found


def fetch_runs(local: Tensor, plan: RunsPlan, dim: int, group: Group, *, fill: float = 0.0) -> Tensor:
    """Return the rows that this rank wants, in their order. Collective if any rank wants another's rows.

    ``local``: the own part; along the other dims the parts of all ranks are alike. ``dim`` is not negative.
    ``plan``: of :func:`plan_runs`; rows may repeat and come in any order.
    ``fill``: the value of ``FILLED`` rows.
    """
    if not plan.pairs and not plan.filled and len(plan.there.kept) == 1:
        ((start, _, count),) = plan.there.kept
        return local if count == plan.back.length else local.narrow(dim, start, count)
    return linear(partial(_move, fill=fill), _back, local, plan, dim, group, linear_part=_move)


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
