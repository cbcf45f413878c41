"""Which edge of the mesh each directed edge runs along: values on mesh edges follow to both directions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray
from scidata.errors import FieldMismatchError
from scidata.meshes.order.ids import id_bits, pair_keys, run_starts, stable_sort


@dataclass(frozen=True, kw_only=True, eq=False)
class AlongMesh:
    """The mesh edge of each directed edge.

    Attributes
    ----------
    rows
        ``(num_edges,)`` int64: its row in the source.
    orientation
        ``(num_edges,)`` int8: 1 where the directed edge runs as the mesh edge does, from its first node to its
        second; -1 where it runs against it.
    num_unused
        Mesh edges that no directed edge runs along.
    """

    rows: IntArray
    orientation: npt.NDArray[np.int8]
    num_unused: int


def along_mesh_edges(edge_index: IntArray, mesh_edges: IntArray, num_nodes: int, where: str) -> AlongMesh:
    """Find the mesh edge between the two nodes of each directed edge.

    Parameters
    ----------
    edge_index
        ``(2, num_edges)``: sources and destinations, in range.
    mesh_edges
        ``(2, num_mesh_edges)``: first and second node, as the file has them; rows that name no two nodes match none.
    where
        What to name in errors.

    Raises
    ------
    FieldMismatchError
        A directed edge has no mesh edge between its nodes, or more than one.
    """
    low, high = mesh_edges.min(axis=0), mesh_edges.max(axis=0)
    usable = np.flatnonzero((low >= 0) & (high < num_nodes) & (low < high))
    keys, order = stable_sort(pair_keys(low[usable], high[usable], num_nodes), 2 * id_bits(num_nodes))
    src, dst = edge_index
    wanted = pair_keys(np.minimum(src, dst), np.maximum(src, dst), num_nodes)
    first = np.searchsorted(keys, wanted)
    found = first < len(keys)
    found[found] = keys[first[found]] == wanted[found]
    again = np.append(~run_starts(keys)[1:], False) if len(keys) else np.empty(0, np.bool_)
    twice = found.copy()
    twice[found] = again[first[found]]
    for wrong, how in ((~found, "no"), (twice, "more than one")):
        rows = np.flatnonzero(wrong)
        if len(rows):
            pairs = edge_index[:, rows[:3]].T.tolist()
            raise FieldMismatchError(
                f"{where}: {len(rows)} of {len(src)} edges of the cells have {how} mesh edge between their nodes (the "
                f"first join nodes {pairs}), so that fields on mesh edges cannot follow them; choose other fields "
                "with --fields, or take the file's edges as they are with --edges edge_index"
            )
    rows = usable[order[first]]
    used = np.zeros(mesh_edges.shape[1], np.bool_)
    used[rows] = True
    return AlongMesh(
        rows=rows,
        orientation=np.where(mesh_edges[0, rows] == src, 1, -1).astype(np.int8),
        num_unused=int(len(used) - used.sum()),
    )
