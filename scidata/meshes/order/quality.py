"""How good an order is: balance, edge cut and halos at a few numbers of parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray
from scidata.meshes.order.csr import CSR
from scidata.meshes.order.cuts import equal_bounds
from scidata.meshes.order.ids import run_starts
from scidata.meshes.order.positions import num_duplicates


@dataclass(frozen=True, kw_only=True)
class PartQuality:
    """Balance, edge cut and halos at one number of parts.

    - ``num_parts``: how many parts.
    - ``balance``, ``edge_balance``: nodes and edges of the largest part over the mean part; 1 is perfect.
    - ``edge_cut``: share of the edges whose ends lie in different parts.
    - ``halo``: 1-hop ghosts of all parts over the number of nodes.
    - ``max_halo``: the largest ratio of ghosts to owned nodes of a part.
    - ``mean_neighbours``, ``max_neighbours``: parts that a part has ghosts from.
    """

    num_parts: int
    balance: float
    edge_balance: float
    edge_cut: float
    halo: float
    max_halo: float
    mean_neighbours: float
    max_neighbours: int


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A graph in its order.

    - ``num_nodes``, ``num_edges``: nodes and directed edges.
    - ``num_components``: connected components, edge directions ignored; isolated nodes are one each.
    - ``num_isolated``: nodes without any edge.
    - ``num_duplicate_points``: points whose coordinates an earlier point has already; None without coordinates.
    - ``parts``: one entry per number of parts.
    """

    num_nodes: int
    num_edges: int
    num_components: int
    num_isolated: int
    num_duplicate_points: int | None
    parts: tuple[PartQuality, ...]


def measure_quality(csr: CSR, points: npt.ArrayLike | None = None, *, num_parts: Iterable[int] = (2, 8, 64)) -> Quality:
    """Measure a graph whose nodes are in their final order, cut into parts of equal numbers of nodes.

    - ``csr``: its edges.
    - ``points``: ``(num_nodes, dims)`` coordinates, to count duplicates.
    - ``num_parts``: the numbers of parts to measure.
    """
    degree = np.diff(csr.indptr) + np.bincount(csr.src, minlength=csr.num_nodes)
    return Quality(
        num_nodes=csr.num_nodes,
        num_edges=csr.num_edges,
        num_components=_num_components(csr),
        num_isolated=int((degree == 0).sum()),
        num_duplicate_points=None if points is None else num_duplicates(np.asarray(points)),
        parts=tuple(quality_of_parts(csr, equal_bounds(csr.num_nodes, parts)) for parts in num_parts),
    )


def quality_of_parts(csr: CSR, bounds: IntArray) -> PartQuality:
    """Measure one choice of bounds."""
    src, dst = csr.src, csr.dst()
    num_nodes, num_edges, num_parts = csr.num_nodes, csr.num_edges, len(bounds) - 1
    part = np.repeat(np.arange(num_parts, dtype=np.int32), np.diff(bounds))
    to, whence = part[dst], part[src]
    cut = np.flatnonzero(to != whence)
    keys = to[cut].astype(np.int64) * max(num_nodes, 1) + src[cut]
    keys.sort()
    keys = keys[run_starts(keys)]  # each ghost of each part once
    holders, ghosts = np.divmod(keys, max(num_nodes, 1))
    owned = np.diff(bounds)
    halo = np.bincount(holders, minlength=num_parts)
    pairs = np.unique(holders * num_parts + part[ghosts])
    neighbours = np.bincount(pairs // num_parts, minlength=num_parts)
    edges = np.bincount(to, minlength=num_parts)
    return PartQuality(
        num_parts=num_parts,
        balance=float(owned.max() * num_parts / num_nodes) if num_nodes else 1.0,
        edge_balance=float(edges.max() * num_parts / num_edges) if num_edges else 1.0,
        edge_cut=len(cut) / num_edges if num_edges else 0.0,
        halo=len(keys) / num_nodes if num_nodes else 0.0,
        max_halo=float((halo / np.maximum(owned, 1)).max()),
        mean_neighbours=float(neighbours.mean()),
        max_neighbours=int(neighbours.max()),
    )


def _num_components(csr: CSR) -> int:
    if not csr.num_nodes:
        return 0
    from scipy.sparse import csgraph, csr_matrix  # 0.1 s of CPU

    ones = np.ones(csr.num_edges, np.int8)
    matrix = csr_matrix((ones, csr.src, csr.indptr), shape=(csr.num_nodes, csr.num_nodes))
    return int(csgraph.connected_components(matrix, directed=True, connection="weak", return_labels=False))
