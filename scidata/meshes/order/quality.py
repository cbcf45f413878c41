"""How good an order is: balance, edge cut and halos at a few numbers of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core.types import AnyArray, IntArray
from scidata.meshes.order.csr import CSR
from scidata.meshes.order.cuts import equal_bounds
from scidata.meshes.order.ids import distinct
from scidata.meshes.order.positions import num_duplicates

#: Numbers of parts whose ghosts are counted. The odd ones are for those in between: with a power of 2 the parts of a
#: curve, or of halves, are near to cubes, and have fewer ghosts than one part more or less.
_POWERS = tuple(8 << k for k in range(8))
_ODD = tuple(round(p * 2**0.5) for p in _POWERS[:-1])
_LEAST_ROWS = 512  # of a part whose ghosts are counted
_BATCH = 1 << 20  # ghosts that are looked at together
_MOST_OPEN = 1 << 23  # ghosts of a part that is not whole yet

#: By the number of parts, as text: ghosts of all parts together, and of the one that has most.
GhostCounts: TypeAlias = Mapping[str, tuple[int, ...]]


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
    keys = distinct(keys)  # each ghost of each part once
    holders, ghosts = np.divmod(keys, max(num_nodes, 1))
    owned = np.diff(bounds)
    halo = np.bincount(holders, minlength=num_parts)
    pairs = distinct(holders * num_parts + part[ghosts])
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


def count_ghosts(num_rows: int, needed: Callable[[int, int], AnyArray]) -> GhostCounts:
    """Count the ghosts of some numbers of equal parts, in one pass over the rows.

    ``needed(first, last)`` returns the rows that rows ``[first, last)`` need. Left out are numbers of parts that have
    fewer than 512 rows, or so many ghosts that memory would have to be made for them.
    """
    cuts = {parts: equal_bounds(num_rows, parts) for parts in (*_POWERS, *_ODD) if parts * _LEAST_ROWS <= num_rows}
    marks = np.unique(np.concatenate([np.array([0, num_rows]), *cuts.values()]))
    ghosts = {parts: np.zeros(parts, np.int64) for parts in cuts}
    begun = dict.fromkeys(cuts, np.empty(0, np.int64))  # part * num_rows + ghost, of the part that is not whole yet
    batch: list[AnyArray] = []
    since = num = 0
    for i, (first, last) in enumerate(pairwise(marks.tolist() if cuts else ())):
        rows = needed(first, last)
        batch.append(distinct(rows[(rows < first) | (rows >= last)]))
        num += len(batch[-1])
        if last < num_rows and num < _BATCH:
            continue
        rows, sizes, num = np.concatenate(batch).astype(np.int64), [*map(len, batch)], 0
        for parts, bounds in [*cuts.items()]:
            of = np.repeat(np.searchsorted(bounds, marks[since : i + 1], side="right") - 1, sizes)
            away = (rows < bounds[of]) | (rows >= bounds[of + 1])
            keys = distinct(np.concatenate([begun[parts], of[away] * num_rows + rows[away]]))
            whole = np.searchsorted(keys, (np.searchsorted(bounds, last, side="right") - 1) * num_rows)
            ghosts[parts] += np.bincount(keys[:whole] // num_rows, minlength=parts)
            begun[parts] = keys[whole:]
            if len(keys) - whole > _MOST_OPEN:
                del cuts[parts], ghosts[parts]
        batch, since = [], i + 1
    return {str(parts): (int(each.sum()), int(each.max())) for parts, each in sorted(ghosts.items())}


def expected_ghosts(counted: GhostCounts, num_parts: int) -> tuple[int, int] | None:
    """Return the ghosts of equal parts, and of the one that has most, from those that were counted.

    Exact where this number was; else between two that are not powers of 2, in logarithms. None: out of their range.
    """
    if exact := counted.get(str(num_parts)):
        return exact[0], exact[1]
    known = sorted(map(int, counted))
    odd = [parts for parts in known if parts in _ODD]
    odd = odd if len(odd) > 1 else known
    if len(odd) < 2 or not _POWERS[0] <= num_parts <= known[-1]:
        return None
    k = min(max(int(np.searchsorted(odd, num_parts)) - 1, 0), len(odd) - 2)
    low, high = np.log(np.maximum([counted[str(parts)] for parts in odd[k : k + 2]], 1))
    share = np.log(num_parts / odd[k]) / np.log(odd[k + 1] / odd[k])
    total, most = np.exp(low + (high - low) * share)
    return round(float(total)), round(float(most))


def _num_components(csr: CSR) -> int:
    if not csr.num_nodes:
        return 0
    from scipy.sparse import csgraph, csr_matrix  # 0.1 s of CPU

    ones = np.ones(csr.num_edges, np.int8)
    matrix = csr_matrix((ones, csr.src, csr.indptr), shape=(csr.num_nodes, csr.num_nodes))
    return int(csgraph.connected_components(matrix, directed=True, connection="weak", return_labels=False))
