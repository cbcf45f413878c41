"""Rows of a sharded dim by their global number: one exchange brings each rank the rows that it asks for.

Where every rank knows the whole list (a roll, a flip, an index tensor that all hold) nothing but the rows travels. Rows
by ids that only their rank knows are asked for first. Gradients go back the same way and are added where they came
from, as in ``indexed_all_to_all_v``, which moves the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from scidata.core.bounds import bounds_of, owners_of
from scidata.core.types import IntArray
from scidata.shard.comm.collectives import indexed_all_to_all_v
from scidata.shard.comm.transport import Group, exchange, gather_rows, group_rank, group_size


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """Which rows one rank sends to each other one, and where those that it gets go."""

    send: tuple[Tensor, ...]  # for each rank: rows of my part, in the order of its new part
    counts: tuple[int, ...]  # rows that each rank sends me
    order: Tensor  # for each row of my new part: its place among those received, in rank order
    stays: bool  # no rank needs another's rows


def _as_plan(send: Sequence[IntArray], owners: IntArray, stays: bool) -> RowPlan:
    """``owners``: the owner of each row of my new part; it sends its rows in the order of that part.

    Rows of owners 1, 0, 1 arrive as those of 0, then of 1: ``order`` is 1, 0, 2."""
    order = np.empty(len(owners), dtype=np.int64)
    order[np.argsort(owners, kind="stable")] = np.arange(len(owners))
    return RowPlan(
        send=tuple(torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)) for rows in send),
        counts=tuple(np.bincount(owners, minlength=len(send)).tolist()),
        order=torch.from_numpy(order),
        stays=stays,
    )


def plan_listed(index: IntArray, sizes: Sequence[int], new_sizes: Sequence[int], rank: int) -> RowPlan:
    """Plan a new part list: ``index`` has the old global row of each new row, and is the same on each rank."""
    bounds, new = bounds_of(sizes), bounds_of(new_sizes)
    owners = owners_of(bounds, index)
    mine = owners == rank
    holders = np.repeat(np.arange(len(new_sizes)), new_sizes)
    send = [index[mine & (holders == holder)] - bounds[rank] for holder in range(len(sizes))]
    return _as_plan(send, owners[new[rank] : new[rank + 1]], bool((owners == holders).all()))


@lru_cache(maxsize=32)  # the index tensors of one model's rolls and flips, asked for in each layer of each step
def plan_rows(
    build: Callable[..., IntArray], args: Hashable, sizes: tuple[int, ...], new_sizes: tuple[int, ...], rank: int
) -> RowPlan:
    """Plan ``build(num_rows, *args)``, kept for the next call."""
    assert isinstance(args, tuple)
    return plan_listed(build(sum(sizes), *args), sizes, new_sizes, rank)


@lru_cache(maxsize=32)
def plan_reshape(
    old: tuple[int, int], sizes: tuple[int, ...], new: tuple[int, int], new_sizes: tuple[int, ...], rank: int
) -> RowPlan:
    """Plan from dims ``(outer, sharded, inner)`` to others, all flat in C order; ``old``, ``new``: (outer, inner)."""
    bounds, new_bounds, extent, new_extent = bounds_of(sizes), bounds_of(new_sizes), sum(sizes), sum(new_sizes)
    held = _elements(old, extent, bounds[rank], bounds[rank + 1])
    holders = owners_of(new_bounds, held // new[1] % new_extent)
    send = [np.flatnonzero(holders == holder) for holder in range(len(sizes))]
    wanted = _elements(new, new_extent, new_bounds[rank], new_bounds[rank + 1])
    return _as_plan(send, owners_of(bounds, wanted // old[1] % extent), False)


def _elements(shape: tuple[int, int], extent: int, start: int, stop: int) -> IntArray:
    """Return the flat numbers of some rows of the middle one of three dims."""
    outer, inner = shape
    rows = np.arange(outer)[:, None, None] * extent + np.arange(start, stop)[:, None]
    found: IntArray = (rows * inner + np.arange(inner)).reshape(-1)
    return found


def move_rows(local: Tensor, plan: RowPlan, dim: int, group: Group) -> Tensor:
    """Return the new part. Collective, unless every row stays; differentiable, twice too."""
    if plan.stays:
        return local.index_select(dim, plan.send[group_rank(group)].to(local.device))
    rows = indexed_all_to_all_v(local.movedim(dim, 0), plan.send, plan.counts, group)
    return rows.movedim(0, dim).index_select(dim, plan.order.to(local.device))  # last, so that it is no view


def fetch_rows(local: Tensor, ids: Tensor, sizes: Sequence[int], dim: int, group: Group) -> Tensor:
    """Return the rows at global ``ids``, ``(num,)`` integers that differ by rank. Collective, three rounds.

    An id out of range raises on every rank.
    """
    num_ranks, extent = group_size(group), sum(sizes)
    ids = torch.where(ids < 0, ids + extent, ids).to(torch.int64)
    bounds = torch.from_numpy(bounds_of(sizes)).to(ids.device)
    owners = torch.searchsorted(bounds, ids, right=True) - 1  # owners_of, on the device
    bad = bool(((ids < 0) | (ids >= extent)).any())
    counts = torch.full((num_ranks,), -1, device=ids.device) if bad else torch.bincount(owners, minlength=num_ranks)
    table = gather_rows(counts, group)
    if bool((table < 0).any()):
        raise IndexError(f"an index is out of range for dim {dim} of extent {extent}")
    order = torch.argsort(owners, stable=True)
    received, asked = table[group_rank(group)].tolist(), table[:, group_rank(group)].tolist()
    wanted = exchange(torch.split(ids[order], received), [(count,) for count in asked], group)
    send = [rows - bounds[group_rank(group)] for rows in wanted]
    rows = indexed_all_to_all_v(local.movedim(dim, 0), send, received, group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return rows.movedim(0, dim).index_select(dim, place)
