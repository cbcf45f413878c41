"""A small graph with all that is awkward, and how it is cut, for the tests of message passing."""

from dataclasses import dataclass

import numpy as np
import torch

from scidata.core.index_map import IndexMap
from scidata.shard.graphs.local_graph import LocalGraph

#: Sizes of the parts of the 11 nodes: even, one node, empty.
LAYOUTS = {1: [(11,)], 2: [(6, 5), (10, 1), (0, 11)], 3: [(4, 4, 3), (5, 1, 5), (6, 0, 5)], 4: [(3, 0, 1, 7)]}
NUM_NODES = 11


def whole_edges():
    """Edges by destination; node 3 is isolated, node 8 has no in-edges, one edge is there twice."""
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, NUM_NODES, (2, 40))
    keep = (src != 3) & (dst != 3) & (dst != 8)
    src, dst = np.r_[src[keep], 5, 5, 6], np.r_[dst[keep], 0, 0, 6]
    order = np.lexsort((src, dst))
    return torch.from_numpy(np.stack([src[order], dst[order]]))


@dataclass(frozen=True, kw_only=True)
class Part:
    index_map: IndexMap
    edge_index: torch.Tensor  # (2, num_local_edges), local numbering
    edges: slice  # of the whole edges

    @property
    def nodes(self):
        return slice(*self.index_map.owned)


def part_of(edge_index, sizes, rank):
    """The edges that end at this rank's nodes, and the sources among them that it does not own."""
    bounds = np.r_[0, np.cumsum(sizes)].astype(np.int64)
    src, dst = edge_index.numpy()
    first, last = np.searchsorted(dst, bounds[rank : rank + 2])
    mine = src[first:last]
    ghosts = np.unique(mine[(mine < bounds[rank]) | (mine >= bounds[rank + 1])])
    index_map = IndexMap(bounds=bounds, part=rank, ghosts=ghosts)
    local = np.stack([index_map.to_local(mine), index_map.to_local(dst[first:last])])
    return Part(index_map=index_map, edge_index=torch.from_numpy(local), edges=slice(first, last))


def khop_part_of(edge_index, sizes, rank, hops):
    """Ghosts ``hops`` deep and all edges that end less deep: what needs no exchange between layers."""
    bounds = np.r_[0, np.cumsum(sizes)].astype(np.int64)
    src, dst = edge_index.numpy()
    held = np.zeros(NUM_NODES, bool)
    held[bounds[rank] : bounds[rank + 1]] = True
    for _ in range(hops):
        inner = held.copy()
        held[src[inner[dst]]] = True
    ghosts = np.flatnonzero(held)
    ghosts = ghosts[(ghosts < bounds[rank]) | (ghosts >= bounds[rank + 1])]
    index_map = IndexMap(bounds=bounds, part=rank, ghosts=ghosts)
    edges = np.flatnonzero(inner[dst])
    local = np.stack([index_map.to_local(src[edges]), index_map.to_local(dst[edges])])
    return index_map, torch.from_numpy(local), torch.from_numpy(edges)


def parts_of(index_map, local_edges, hops, device_mesh):
    """What ``call_on_parts`` takes of :func:`khop_part_of`."""
    near = ("node", "near", "node")
    return LocalGraph(
        index_maps={"node": index_map}, edges={near: local_edges}, layers=((near,),) * hops, device_mesh=device_mesh
    )
