"""Halo exchange along one dim: each rank's part grows by rows of its neighbours, differentiably.

Which rows a rank's halo holds is ``bounds.window``'s business, the same function that tells a reader what to read; here
the rows are only moved. Two dims are exchanged one after the other: the second exchange carries the corners.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from scidata.bounds import halo_widths, window
from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard._transport import Group, call, exchange, group_rank, group_size

__all__ = ["halo_exchange_dim", "halo_reduce_dim"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive rows of one rank that are part of another's halo (or of its own, where it wraps)."""

    owner: int
    start: int  # row in the owner's part
    offset: int  # row in the holder's padded part
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HaloPlan:
    """What moves between the ranks of one dim, seen from one rank."""

    below: int
    owned: int
    above: int
    sent: tuple[tuple[Piece, ...], ...]  # for each rank: pieces of mine that it holds
    held: tuple[tuple[Piece, ...], ...]  # for each rank: pieces of its that I hold

    @property
    def padded(self) -> int:
        """Rows with the halo."""
        return self.below + self.owned + self.above


def _pieces(bounds: tuple[int, ...], holder: int, lo: int, hi: int, periodic: bool) -> list[Piece]:
    """Return the halo of one rank, cut at the owners' bounds, in the order of its padded part."""
    below, _ = halo_widths(bounds, holder, lo=lo, hi=hi, periodic=periodic)
    owned = range(below, below + bounds[holder + 1] - bounds[holder])
    pieces = []
    for segment in window(bounds, holder, lo=lo, hi=hi, periodic=periodic):
        owners = range(bisect_right(bounds, segment.start) - 1, bisect_left(bounds, segment.start + segment.count))
        for owner in owners:
            first = max(segment.start, bounds[owner])
            last = min(segment.start + segment.count, bounds[owner + 1])
            start, offset = first - bounds[owner], segment.offset + first - segment.start
            # The owned rows lie inside a segment that may reach into the halo on both sides: leave them out.
            stop = offset + last - first
            for low, high in ((offset, min(stop, owned.start)), (max(offset, owned.stop), stop)):
                if high > low:
                    pieces.append(Piece(owner=owner, start=start + low - offset, offset=low, count=high - low))
    return sorted(pieces, key=lambda piece: piece.offset)


@lru_cache(maxsize=512)  # the layouts of one model; a plan is asked for in each layer of each step
def _plan(sizes: tuple[int, ...], rank: int, lo: int, hi: int, periodic: bool) -> HaloPlan:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    edges = tuple(bounds)
    everyone = range(len(sizes))
    sent = tuple(tuple(p for p in _pieces(edges, other, lo, hi, periodic) if p.owner == rank) for other in everyone)
    mine = _pieces(edges, rank, lo, hi, periodic)
    held = tuple(tuple(p for p in mine if p.owner == other) for other in everyone)
    below, above = halo_widths(edges, rank, lo=lo, hi=hi, periodic=periodic)
    return HaloPlan(below=below, owned=sizes[rank], above=above, sent=sent, held=held)


def _joined(rows: list[Tensor], like: Tensor, dim: int) -> Tensor:
    return torch.cat(rows, dim) if rows else like.narrow(dim, 0, 0)


def _shape(x: Tensor, dim: int, pieces: Sequence[Piece]) -> tuple[int, ...]:
    return (*x.shape[:dim], sum(p.count for p in pieces), *x.shape[dim + 1 :])


def _split(rows: Tensor, dim: int, pieces: Sequence[Piece]) -> list[tuple[Piece, Tensor]]:
    return list(zip(pieces, torch.split(rows, [p.count for p in pieces], dim), strict=True)) if pieces else []


def _pad(local: Tensor, plan: HaloPlan, dim: int, group: Group) -> Tensor:
    rank = group_rank(group)
    padded = local.new_empty((*local.shape[:dim], plan.padded, *local.shape[dim + 1 :]))
    padded.narrow(dim, plan.below, plan.owned).copy_(local)
    for piece in plan.held[rank]:
        padded.narrow(dim, piece.offset, piece.count).copy_(local.narrow(dim, piece.start, piece.count))
    if len(plan.sent) == 1:
        return padded
    sent = [() if other == rank else pieces for other, pieces in enumerate(plan.sent)]
    held = [() if other == rank else pieces for other, pieces in enumerate(plan.held)]
    parts = [_joined([local.narrow(dim, p.start, p.count) for p in pieces], local, dim) for pieces in sent]
    received = exchange(parts, [_shape(local, dim, pieces) for pieces in held], group)
    for rows, pieces in zip(received, held, strict=True):
        for piece, values in _split(rows, dim, pieces):
            padded.narrow(dim, piece.offset, piece.count).copy_(values)
    return padded


def _fold(padded: Tensor, plan: HaloPlan, dim: int, group: Group) -> Tensor:
    rank = group_rank(group)
    local = padded.narrow(dim, plan.below, plan.owned).clone()
    for piece in plan.held[rank]:
        local.narrow(dim, piece.start, piece.count).add_(padded.narrow(dim, piece.offset, piece.count))
    if len(plan.sent) == 1:
        return local
    held = [() if other == rank else pieces for other, pieces in enumerate(plan.held)]
    sent = [() if other == rank else pieces for other, pieces in enumerate(plan.sent)]
    parts = [_joined([padded.narrow(dim, p.offset, p.count) for p in pieces], padded, dim) for pieces in held]
    received = exchange(parts, [_shape(padded, dim, pieces) for pieces in sent], group)
    for rows, pieces in zip(received, sent, strict=True):
        for piece, values in _split(rows, dim, pieces):
            local.narrow(dim, piece.start, piece.count).add_(values)
    return local


class _Pad(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, plan: HaloPlan, dim: int, group: Group) -> Tensor:
        ctx.how = plan, dim, group
        return _pad(local.detach(), plan, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_Fold, grad, *ctx.how), None, None, None


class _Fold(Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, plan: HaloPlan, dim: int, group: Group) -> Tensor:
        ctx.how = plan, dim, group
        return _fold(padded.detach(), plan, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return call(_Pad, grad, *ctx.how), None, None, None


def _checked_plan(
    x: Tensor, sizes: Sequence[int], dim: int, lo: int, hi: int, periodic: bool, group: Group
) -> tuple[HaloPlan, int]:
    parts = tuple(int(size) for size in sizes)
    if len(parts) != group_size(group):
        raise ShardLayoutError(f"{len(parts)} sizes {parts} were given for a group of {group_size(group)} ranks")
    if min(parts) < 0:
        raise ShardLayoutError(f"sizes must not be negative: {parts}")
    if lo < 0 or hi < 0:
        raise ConfigError(f"halo widths must not be negative: ({lo}, {hi})")
    if not -x.ndim <= dim < x.ndim:
        raise ShardLayoutError(f"dim {dim} is out of range for a tensor of shape {tuple(x.shape)}")
    return _plan(parts, group_rank(group), int(lo), int(hi), bool(periodic)), dim % x.ndim


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
    plan, dim = _checked_plan(local, sizes, dim, lo, hi, periodic, group)
    if local.shape[dim] != plan.owned:
        raise ShardLayoutError(
            f"rank {group_rank(group)} holds {local.shape[dim]} rows along dim {dim}, but sizes {tuple(sizes)} give it "
            f"{plan.owned}"
        )
    if lo == hi == 0:
        return local
    return call(_Pad, local, plan, dim, group)


def halo_reduce_dim(
    padded: Tensor, sizes: Sequence[int], dim: int, lo: int, hi: int, periodic: bool, group: Group
) -> Tensor:
    """Add what each rank holds in its halo to the rows' owners, and return the owned part. Collective.

    The transpose of :func:`halo_exchange_dim`, with the same arguments: what a scatter into neighbours (a transposed
    convolution) ends with. Backward is a halo exchange.
    """
    plan, dim = _checked_plan(padded, sizes, dim, lo, hi, periodic, group)
    if padded.shape[dim] != plan.padded:
        raise ShardLayoutError(
            f"rank {group_rank(group)} holds {padded.shape[dim]} rows along dim {dim}, but its part of sizes "
            f"{tuple(sizes)} with its halo has {plan.padded}"
        )
    if lo == hi == 0:
        return padded
    return call(_Fold, padded, plan, dim, group)
