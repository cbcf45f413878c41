"""Rows by their global numbers: each rank asks for runs of rows along one dim and gets them in one exchange.

All that slides over a dim is made of it: halos, the windows of convolutions and pooling, the rows that an interpolation
reads, padding. All ranks know all requests, so only rows travel, and none where every rank owns the rows that it asks
for. Backward adds the gradients of all copies of a row up where it is owned.

Sizes (3, 2): rank 0 owns rows 0 to 2, rank 1 rows 3 and 4. Rank 0 asks for its part with a halo of 1 and padding below,
``((FILLED, 1), (0, 4))``: a filled row, its own rows 0 to 2 as one piece, and row 3 as a piece of rank 1.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from scidata.core.bounds import bounds_of
from scidata.shard.comm.functions import linear
from scidata.shard.comm.transport import SUM_IN, Group, exchange, group_rank, with_dim

#: The start of a run of rows that nobody owns: they get the fill value.
FILLED = -1
#: ``(first global row, count)`` of consecutive rows, in the order in which they are wanted.
Runs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive rows of one rank that another holds a copy of (or itself)."""

    owner: int
    start: int  # row in the owner's part
    offset: int  # row in the holder's result
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsPlan:
    """The rows that move between the ranks along one dim, seen from one rank."""

    owned: int
    length: int
    sent: tuple[tuple[Piece, ...], ...]  # for each other rank: pieces of mine that it holds
    held: tuple[tuple[Piece, ...], ...]  # for each other rank: pieces of its that I hold
    kept: tuple[Piece, ...]  # pieces of mine that I hold
    filled: tuple[tuple[int, int], ...]  # offset and count
    moves: bool  # whether any rank holds a piece of another
    sent_counts: tuple[tuple[int, ...], ...]  # rows of each of these pieces
    held_counts: tuple[tuple[int, ...], ...]


def window_runs(start: int, stop: int, extent: int) -> Runs:
    """Return the rows ``[start, stop)`` of a dim of that extent, those outside it filled."""
    first, last = min(max(start, 0), extent), max(min(stop, extent), 0)
    runs = ((FILLED, min(stop, 0) - start), (first, last - first), (FILLED, stop - max(start, extent)))
    return tuple(run for run in runs if run[1] > 0)


def runs_of(rows: Sequence[int]) -> Runs:
    """Join a list of rows (``FILLED`` where there is none) to runs."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        start, count = runs[-1] if runs else (0, 0)
        follows = count and (row == start == FILLED or (start != FILLED and row == start + count))
        if follows:
            runs[-1] = start, count + 1
        else:
            runs.append((row, 1))
    return tuple(runs)


@lru_cache(maxsize=1024)
def edges_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return bounds as plain integers, kept: they are asked for in each layer of each step."""
    return tuple(bounds_of(sizes).tolist())


@lru_cache(maxsize=1024)
def parts_as_runs(sizes: tuple[int, ...]) -> tuple[Runs, ...]:
    """Return the rows of each part as one run."""
    return tuple(((first, size),) for first, size in zip(edges_of(sizes), sizes, strict=False))


def _pieces(edges: tuple[int, ...], runs: Runs) -> list[Piece]:
    """Cut the runs that one rank asks for at the owners' bounds."""
    pieces, offset = [], 0
    for begin, count in runs:
        if begin != FILLED:
            for owner in range(bisect_right(edges, begin) - 1, bisect_left(edges, begin + count)):
                first, last = max(begin, edges[owner]), min(begin + count, edges[owner + 1])
                if last > first:
                    place = offset + first - begin
                    pieces.append(Piece(owner=owner, start=first - edges[owner], offset=place, count=last - first))
        offset += count
    return pieces


@lru_cache(maxsize=1024)  # the layouts of one model; a plan is asked for in each layer of each step
def _plan(sizes: tuple[int, ...], rank: int, wanted: tuple[Runs, ...]) -> RunsPlan:
    edges = edges_of(sizes)
    by_holder = [_pieces(edges, runs) for runs in wanted]
    ranks, mine = range(len(sizes)), by_holder[rank]
    offsets = accumulate((count for _, count in wanted[rank]), initial=0)
    sent = tuple(tuple(p for p in by_holder[r] if p.owner == rank and r != rank) for r in ranks)
    held = tuple(tuple(p for p in mine if p.owner == r != rank) for r in ranks)
    return RunsPlan(
        owned=sizes[rank],
        length=sum(count for _, count in wanted[rank]),
        sent=sent,
        held=held,
        kept=tuple(p for p in mine if p.owner == rank),
        filled=tuple((at, n) for at, (begin, n) in zip(offsets, wanted[rank], strict=False) if begin == FILLED),
        moves=any(p.owner != holder for holder, pieces in enumerate(by_holder) for p in pieces),
        sent_counts=tuple(tuple(p.count for p in pieces) for pieces in sent),
        held_counts=tuple(tuple(p.count for p in pieces) for pieces in held),
    )


def runs_move(sizes: tuple[int, ...], wanted: tuple[Runs, ...]) -> bool:
    """Whether any rank asks for rows of another; the same on every rank."""
    return _plan(sizes, 0, wanted).moves


def _collect(local: Tensor, plan: RunsPlan, dim: int, group: Group, fill: float = 0.0) -> Tensor:
    result = local.new_empty(with_dim(local.shape, dim, plan.length))
    for offset, count in plan.filled:
        result.narrow(dim, offset, count).fill_(fill)
    for piece in plan.kept:
        result.narrow(dim, piece.offset, piece.count).copy_(local.narrow(dim, piece.start, piece.count))
    if not plan.moves:
        return result
    nothing = local.narrow(dim, 0, 0)
    parts = [
        torch.cat([local.narrow(dim, p.start, p.count) for p in pieces], dim) if pieces else nothing
        for pieces in plan.sent
    ]
    received = exchange(parts, [with_dim(local.shape, dim, sum(each)) for each in plan.held_counts], group)
    for rows, pieces, counts in zip(received, plan.held, plan.held_counts, strict=True):
        for piece, values in zip(pieces, rows.split_with_sizes(counts, dim) if pieces else (), strict=True):
            result.narrow(dim, piece.offset, piece.count).copy_(values)
    return result


def _add_up(held: Tensor, plan: RunsPlan, dim: int, group: Group) -> Tensor:
    local = held.new_zeros(with_dim(held.shape, dim, plan.owned), dtype=SUM_IN.get(held.dtype, held.dtype))
    for piece in plan.kept:
        local.narrow(dim, piece.start, piece.count).add_(held.narrow(dim, piece.offset, piece.count))
    if not plan.moves:
        return local.to(held.dtype)
    nothing = held.narrow(dim, 0, 0)
    parts = [
        torch.cat([held.narrow(dim, p.offset, p.count) for p in pieces], dim) if pieces else nothing
        for pieces in plan.held
    ]
    received = exchange(parts, [with_dim(held.shape, dim, sum(each)) for each in plan.sent_counts], group)
    for rows, pieces, counts in zip(received, plan.sent, plan.sent_counts, strict=True):
        for piece, values in zip(pieces, rows.split_with_sizes(counts, dim) if pieces else (), strict=True):
            local.narrow(dim, piece.start, piece.count).add_(values)
    return local.to(held.dtype)


def fetch_runs(
    local: Tensor, sizes: tuple[int, ...], dim: int, wanted: tuple[Runs, ...], group: Group, *, fill: float = 0.0
) -> Tensor:
    """Return the rows ``wanted[rank]``, this rank's, in their order. Collective where any rank asks for another's.

    Parameters
    ----------
    local
        The own part, ``sizes[rank]`` rows along ``dim`` (not negative); the other dims are the same on all ranks.
    wanted
        Runs that each rank of the group asks for; rows may repeat and come in any order.
    fill
        The value of ``FILLED`` rows.
    """
    plan = _plan(sizes, group_rank(group), wanted)
    if not plan.moves and not plan.filled and len(plan.kept) == 1:
        (piece,) = plan.kept
        return local if piece.count == plan.owned else local.narrow(dim, piece.start, piece.count)
    return linear(partial(_collect, fill=fill), _add_up, local, plan, dim, group, linear_part=_collect)
