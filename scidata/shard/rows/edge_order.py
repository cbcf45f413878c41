"""Order of edges: edges that each rank joins by itself (edges, then self-loops) are not in the order of one process.

Two ranks with 2 and 1 edges and 1 self-loop each: rank 0 holds ``e0 e1 l0``, rank 1 ``e2 l1``, but one process holds
``e0 e1 e2 l0 l1``. By rank, its rows are 0 1 3, 2 4.

A plain tensor with a row for each edge is in one process's order, so its rows are brought to the order of the ranks
before they are cut. Functions that take rows by their number, or go along them, get the edges in the order of one
process, by one exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from scidata.shard.op_table import TorchFunction, unsupported
from scidata.shard.rows.redistribute import move_rows, plan_listed
from scidata.shard.spec import ShardSpec


def as_joined(func: TorchFunction, x: Tensor, dim: int, spec: ShardSpec) -> Tensor:
    """Bring a plain tensor, with a row along ``dim`` for each edge of ``spec``, to the order of the ranks."""
    if spec.in_order:
        return x
    if spec.edge_parts is not None:
        return x.index_select(dim, _rows_by_rank(spec.edge_parts).to(x.device))
    if x.requires_grad or not bool((x == x.narrow(dim, 0, 1)).all()):  # the same on all ranks, so all raise
        refuse_disorder(func, spec)
    return x


def as_in_one_process(whole: Tensor, spec: ShardSpec) -> Tensor:
    """Bring edges gathered rank by rank to the order of one process, if it is known."""
    if spec.edge_parts is None or spec.in_order:
        return whole
    (dim,) = spec.sharded
    return whole.index_select(dim, _rows_by_rank(spec.edge_parts).argsort().to(whole.device))


def places_by_rank(func: TorchFunction, rows: Tensor, spec: ShardSpec) -> Tensor:
    """Map edge numbers in one process, from 0 on, to places in the concatenation of the ranks' edges."""
    if spec.edge_parts is None or spec.in_order:
        refuse_disorder(func, spec)
        return rows
    return _rows_by_rank(spec.edge_parts).argsort().to(rows.device)[rows]


def in_one_order(func: TorchFunction, local: Tensor, spec: ShardSpec) -> tuple[Tensor, ShardSpec]:
    """Reorder a part of edges as in one process; the number of edges on each rank stays. Collective."""
    if spec.edge_parts is None or spec.in_order:
        refuse_disorder(func, spec)
        return local, spec
    ((dim, axis),) = spec.sharded.items()
    sizes = spec.sizes_of(axis)
    plan = plan_listed(_rows_by_rank(spec.edge_parts).argsort().numpy(), sizes, sizes, spec.coordinate(axis))
    return move_rows(local, plan, dim, spec.group(axis)), spec.with_edge_parts((sizes,))


def refuse_disorder(func: TorchFunction, *specs: ShardSpec) -> None:
    """Raise if edges are not in the order of one process and the order matters."""
    if not all(spec.in_order for spec in specs):
        reason = "these edges were joined on each rank by itself, so that their order is not that of one process"
        raise unsupported(func, reason, *specs, remedy="make it of edge_index, by its methods and functions")


def edge_runs(parts: Sequence[Sequence[int]], rank: int) -> list[tuple[int, int]]:
    """Return a rank's edges in one process as runs (first, number), one for each edge part."""
    starts = accumulate(map(sum, parts), initial=0)
    return [(start + sum(sizes[:rank]), sizes[rank]) for start, sizes in zip(starts, parts, strict=False)]


def cut_edges(parts: Sequence[Sequence[int]], rank: int, start: int, stop: int) -> tuple[slice, list[tuple[int, ...]]]:
    """Return the slice of a rank's edges that one process has from ``start`` to ``stop``, and how many of each part."""
    kept: list[tuple[int, ...]] = []
    begin, before, low = None, 0, 0
    for sizes in parts:
        ends = [*accumulate(sizes, initial=low)]
        bounds = [(max(start, a), max(start, a, min(stop, b))) for a, b in pairwise(ends)]
        counts = tuple(b - a for a, b in bounds)
        if begin is None and counts[rank]:
            begin = before + bounds[rank][0] - ends[rank]
        kept.append(counts)
        before, low = before + sizes[rank], ends[-1]
    begin = begin or 0
    return slice(begin, begin + sum(counts[rank] for counts in kept)), kept


@lru_cache(maxsize=64)
def _rows_by_rank(parts: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return which rows each rank has, one rank after the other, in numbers of one process."""
    runs = [run for rank in range(len(parts[0])) for run in edge_runs(parts, rank)]
    return torch.cat([torch.arange(first, first + rows) for first, rows in runs])
