"""Edges by destination, and the ghosts that they bring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import bounds_of
from scidata.core.types import IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.ids import (
    NodeIds,
    blocks,
    both_directions,
    id_bits,
    id_dtype,
    low_ids,
    node_ids,
    pair_keys,
    stable_sort,
    undirected_keys,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class CSR:
    """The directed edges of a graph, by destination, then by source, then as they were given.

    - ``indptr``: ``(num_nodes + 1,)`` int64: the edges to node ``i`` are ``[indptr[i], indptr[i + 1])``.
    - ``src``: ``(num_edges,)`` source of each edge: int32 where ``num_nodes`` fits, else int64.
    - ``edge_id``: ``(num_edges,)`` int64: which of the given edges it is.
    """

    indptr: IntArray
    src: NodeIds
    edge_id: IntArray

    @property
    def num_nodes(self) -> int:
        """Number of nodes, isolated ones included."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Number of directed edges."""
        return len(self.src)

    def dst(self) -> NodeIds:
        """Return the destination of each edge, in the dtype of ``src``."""
        nodes = np.arange(self.num_nodes, dtype=np.int64).repeat(np.diff(self.indptr))
        return nodes.astype(np.int32) if self.src.dtype == np.int32 else nodes


def csr_from_edges(src: npt.ArrayLike, dst: npt.ArrayLike, num_nodes: int) -> CSR:
    """Sort directed edges by (destination, source); parallel edges and self-loops are kept, in their given order."""
    source, target = node_ids(src, num_nodes, "sources"), node_ids(dst, num_nodes, "destinations")
    if len(source) != len(target):
        raise ConfigError(f"{len(source)} edge sources but {len(target)} destinations: one of each is needed per edge")
    if 2 * id_bits(num_nodes) + max(len(source) - 1, 0).bit_length() <= 64:
        return _csr_of_words(source, target, num_nodes)
    keys = pair_keys(target, source, num_nodes)
    if bool((keys[1:] >= keys[:-1]).all()):
        edge_id = np.arange(len(keys), dtype=np.int64)
    else:
        keys, edge_id = stable_sort(keys, 2 * id_bits(num_nodes), overwrite=True)
    return CSR(
        indptr=bounds_of(np.bincount(target, minlength=num_nodes)), src=low_ids(keys, num_nodes), edge_id=edge_id
    )


def _csr_of_words(source: NodeIds, target: NodeIds, num_nodes: int) -> CSR:
    """Sort edges that fit into a word each, as :func:`stable_sort`; the words' own memory becomes ``edge_id``."""
    # A word is destination | source | row. Among 4 nodes (2 bits) and 3 edges (2 bits) edge 2, from 1 to 3, is
    # 11 01 10. Sorted words are the edges by destination, then source, then row; each part is masked out again.
    num_bits, row_bits = np.uint64(id_bits(num_nodes)), np.uint64(max(len(source) - 1, 0).bit_length())
    words = np.empty(len(source), np.uint64)
    in_order, before = True, np.uint64(0)
    for rows in blocks(len(words)):
        word = words[rows]
        word[:] = target[rows]
        word <<= num_bits
        word |= source[rows].astype(np.uint64)
        word <<= row_bits
        word |= np.arange(rows.start, rows.stop, dtype=np.uint64)
        in_order = in_order and bool(word[0] >= before) and bool((word[1:] > word[:-1]).all())
        before = word[-1]
    if not in_order:
        words.sort()
    indptr = np.zeros(num_nodes + 1, np.int64)
    src: NodeIds = np.empty(len(words), id_dtype(num_nodes))
    for rows in blocks(len(words)):
        word = words[rows]
        pair = word >> row_bits
        src[rows] = pair & ((np.uint64(1) << num_bits) - np.uint64(1))
        pair >>= num_bits
        first = int(pair[0])
        here = np.bincount((pair - pair[0]).view(np.int64))
        indptr[first + 1 : first + 1 + len(here)] += here
        word &= (np.uint64(1) << row_bits) - np.uint64(1)
    np.cumsum(indptr, out=indptr)
    return CSR(indptr=indptr, src=src, edge_id=words.view(np.int64))


def symmetrise(src: npt.ArrayLike, dst: npt.ArrayLike, num_nodes: int) -> IntArray:
    """Return both directions of edges once, no self-loops, by (destination, source): ``(2, num_edges)`` int64."""
    source, target = node_ids(src, num_nodes, "sources"), node_ids(dst, num_nodes, "destinations")
    return both_directions(undirected_keys(source, target, num_nodes), num_nodes)
