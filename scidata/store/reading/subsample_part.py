"""What an epoch's draw takes from a stored sample: rows, and the cells and edges between them.

Whose a node is, and how many cells or edges each part holds, follows from all that was drawn. So of meshes and graphs
every part reads the corners and in-edges of the whole draw (which are far less than the fields), of clouds only its own
rows. A field is read by its owner alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.index_map import IndexMap
from scidata.core.types import BoolArray, IntArray
from scidata.meshes.order.ids import contains, distinct, ranges
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.node_sets import folder_of_edges, relations_of, sets_of
from scidata.store.reading.part import LocalCells, LocalTopology, SamplePart
from scidata.store.reading.rows import RowAccess
from scidata.store.reading.subsample import Draw, Walk
from scidata.store.reading.topology import edges_into


@dataclass(frozen=True, kw_only=True, eq=False)
class _DrawnCells:
    """Drawn cells: their rows, and their corners as the store's nodes."""

    rows: IntArray
    offsets: IntArray
    corners: IntArray

    def take(self, kept: BoolArray) -> _DrawnCells:
        sizes = np.diff(self.offsets)
        corners = self.corners[np.repeat(kept, sizes)]
        return _DrawnCells(rows=self.rows[kept], offsets=bounds_of(sizes[kept]), corners=corners)


def drawn_part(
    access: RowAccess, info: SampleInfo, cut: SamplePart, part: int, draws: Mapping[str, Draw | Walk]
) -> LocalTopology:
    """Find what a part holds of draws of nodes, points or cells; of node sets that are not drawn from all rows.

    In its index maps, drawn row ``i`` is the ``i``-th of all that were drawn. Of drawn nodes: the cells all of whose
    corners, and the edges both of whose ends were drawn. Of drawn cells: their nodes, and the edges between these.
    """
    none = np.empty(0, np.int64)
    if set(cut.bounds) == {cut.entity}:
        bounds_of_draw, rows_here = draws[cut.entity].cut(cut.bounds[cut.entity], part)
        return LocalTopology(
            rows={cut.entity: rows_here},
            index_maps={cut.entity: IndexMap(bounds=bounds_of_draw, part=part, ghosts=none)},
        )
    drawn, cells = _drawn_nodes(access, info, draws)
    pairs = {}
    for relation, (source, _, target) in relations_of(info).items():
        starts, ends = drawn[source], drawn[target]
        rows, sources, targets = edges_into(access, ends, folder_of_edges(relation))
        kept = contains(starts, sources)
        drawn[relation] = rows[kept]
        pairs[relation] = [np.searchsorted(starts, sources[kept]), np.searchsorted(ends, targets[kept])]
    bounds = {name: np.searchsorted(rows, cut.bounds[name]).astype(np.int64) for name, rows in drawn.items()}
    own = {name: slice(*each[part : part + 2].tolist()) for name, each in bounds.items()}
    reached = {name: [none] for name in drawn}
    for relation, (source, _, _) in relations_of(info).items():
        pairs[relation] = [ends[own[relation]] for ends in pairs[relation]]
        reached[source].append(pairs[relation][0])
    offsets = corners = none
    if cells is not None:
        offsets = cells.offsets[own["cell"].start : own["cell"].stop + 1]
        corners = np.searchsorted(drawn[cut.entity], cells.corners[offsets[0] : offsets[-1]])
        reached[cut.entity].append(corners)
    if cut.entity not in bounds:  # all sets together
        bounds[cut.entity] = np.sum([bounds[name] for name in sets_of(info)], axis=0)
    maps = {}
    for name, each in bounds.items():
        rows = distinct(np.concatenate(reached.get(name, [none])))
        ghosts = rows[(rows < each[part]) | (rows >= each[part + 1])]
        maps[name] = IndexMap(bounds=each, part=part, ghosts=ghosts)
    rows_of = {name: rows[own[name]] for name, rows in drawn.items()}
    local_cells = None
    if cells is not None:
        types = access.gather("cell/type", rows_of["cell"])
        nodes = maps[cut.entity].to_local(corners)
        local_cells = LocalCells(offsets=offsets - offsets[0], connectivity=nodes, types=types)
    edges = {
        name: np.stack([maps[source].to_local(pairs[name][0]), maps[target].to_local(pairs[name][1])])
        for name, (source, _, target) in relations_of(info).items()
    }
    far = {name: each[:, :0] for name, each in edges.items()}
    return LocalTopology(rows=rows_of, index_maps=maps, relations=edges, far_relations=far, cells=local_cells)


def _drawn_nodes(
    access: RowAccess, info: SampleInfo, draws: Mapping[str, Draw | Walk]
) -> tuple[dict[str, IntArray], _DrawnCells | None]:
    """Return the rows drawn of each node set and of cells, and these cells."""
    if "cell/indptr" not in info.arrays:  # cells that have rows and edges of their own count as nodes
        every = {name: draws[name].rows() if name in draws else np.arange(info.counts[name]) for name in sets_of(info)}
        return every, None
    if "cell" in draws:
        cells = _read_cells(access, draws["cell"].rows())
        return {info.entity: distinct(cells.corners.copy()), "cell": cells.rows}, cells
    nodes = draws[info.entity].rows()
    cells = _read_cells(access, ranges(*access.pointers("cell/indptr", nodes)))
    inside = bounds_of(contains(nodes, cells.corners))[cells.offsets]
    cells = cells.take(np.diff(inside) == np.diff(cells.offsets))
    return {info.entity: nodes, "cell": cells.rows}, cells


def _read_cells(access: RowAccess, rows: IntArray) -> _DrawnCells:
    first, last = access.pointers("cell/offsets", rows)
    corners = access.gather("cell/connectivity", ranges(first, last)).astype(np.int64, copy=False)
    return _DrawnCells(rows=rows, offsets=bounds_of(last - first), corners=corners)
