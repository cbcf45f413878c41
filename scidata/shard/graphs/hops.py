"""Hops between ghosts and owned rows, and rows and edges in that order: those that only early layers need come last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from scidata.core.index_map import IndexMap
from scidata.errors import ConfigError
from scidata.shard.torch_internals import tree_leaves, tree_map_only

_T = TypeVar("_T")


class HopCounts(list[int]):
    """Rows or edges by hops, as PyTorch Geometric's ``trim_to_layer`` takes them; no other list is of this class."""


def counted(arguments: object) -> bool:
    """Whether there are counts by hops among arguments."""
    return HopCounts in map(type, tree_leaves(arguments))


def check_counts(arguments: object, num_rows: int, num_edges: int) -> None:
    """Make sure that counts by hops are those of a graph of this size; a check of the model is made but once."""
    for counts in tree_leaves(arguments):
        if isinstance(counts, HopCounts) and sum(counts) not in (num_rows, num_edges):
            raise ConfigError(
                f"call_on_parts: counts by hops of {sum(counts)} rows or edges, but the sample has {num_rows} rows "
                f"and {num_edges} edges; take both from one to_pyg(khop=True, by_hop=True)"
            )


def untrimmed(arguments: _T) -> _T:
    """Return arguments with counts by which nothing is left out."""
    found: _T = tree_map_only(HopCounts, lambda counts: HopCounts([0] * len(counts)), arguments)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class HopOrder:
    """A rank's rows by hops, and its edges by those of their targets, each otherwise in the order that it had.

    Attributes
    ----------
    rows, edges
        ``(num_local,)`` and ``(num_edges,)`` int64: which row, and which edge, comes where.
    edge_index
        The edges in this order, in the numbers of the rows in this order.
    num_rows, num_edges
        Rows of 0, 1, … ``num_hops`` hops; edges that end 0, 1, … ``num_hops - 1`` hops away.
    """

    rows: Tensor
    edges: Tensor
    edge_index: Tensor
    num_rows: HopCounts
    num_edges: HopCounts


def hop_order(rows: IndexMap, edge_index: Tensor, num_hops: int) -> HopOrder:
    """Find the order of hops, against the edges from the owned rows; see :class:`HopOrder`."""
    hops = torch.full((rows.num_local,), num_hops, device=edge_index.device)
    hops[: rows.num_owned] = 0
    source, target = edge_index
    for hop in range(1, num_hops):
        reached = source[hops[target] < hop]
        hops[reached] = hops[reached].clamp(max=hop)
    ends = hops[target]
    by_row, by_edge = hops.argsort(stable=True), ends.argsort(stable=True)
    place = torch.empty_like(by_row)
    place[by_row] = torch.arange(len(by_row), device=place.device)
    return HopOrder(
        rows=by_row,
        edges=by_edge,
        edge_index=place[edge_index[:, by_edge]],
        num_rows=HopCounts(torch.bincount(hops, minlength=num_hops + 1).tolist()),
        num_edges=HopCounts(torch.bincount(ends, minlength=num_hops).tolist()),
    )
