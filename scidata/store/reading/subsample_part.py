"""What an epoch's draw takes from a stored sample: rows, and the cells and edges between them.

Whose a node is, and how many cells or edges each part holds, follows from all that was drawn. So of meshes and graphs
every part reads the corners and in-edges of the whole draw (which are far less than the fields), of clouds only its own
rows. Fields are read by those who own them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import bounds_of
from scidata.core.index_map import IndexMap
from scidata.core.types import IntArray
from scidata.meshes.order.ids import contains, ranges
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.node_sets import relations_of, sets_of
from scidata.store.reading.part import LocalCells, LocalTopology, SamplePart
from scidata.store.reading.rows import RowAccess
from scidata.store.reading.subsample import Draw


@dataclass(frozen=True, kw_only=True, eq=False)
class _DrawnCells:
    """Drawn cells: their rows, and their corners as the store's nodes."""

    rows: IntArray
    offsets: IntArray
    corners: IntArray

    def take(self, kept: npt.NDArray[np.bool_]) -> _DrawnCells:
        sizes = np.diff(self.offsets)
        corners = self.corners[np.repeat(kept, sizes)]
        return _DrawnCells(rows=self.rows[kept], offsets=bounds_of(sizes[kept]), corners=corners)


def drawn_part(access: RowAccess, cut: SamplePart, part: int, draw: Draw, entity: str) -> LocalTopology:
    """Find what a part holds of a draw of an entity's rows: nodes, points or cells.

    In its index maps, drawn row ``i`` is the ``i``-th of all that were drawn.

    Cells that have rows and edges of their own (``entity="cell"`` in the store) count as nodes here.
    Of drawn nodes: the cells all of whose corners, and the edges both of whose ends were drawn. Of drawn cells: their
    nodes, and the edges between these.
    """
    main = cut.entity
    if set(cut.bounds) == {main}:
        rows = draw.rows(*cut.owned(main, part))
        bounds = draw.count_before(cut.bounds[main])
        return LocalTopology(rows={main: rows}, index_maps={main: _index_map(bounds, part)})
    every = draw.rows()
    cells = None
    if entity != main:
        cells = _read_cells(access, every)
        nodes = np.unique(cells.corners)
    else:
        nodes = every
        if "cell" in cut.bounds and main != "cell":
            cells = _read_cells(access, ranges(*access.pointers("cell/indptr", nodes)))
            inside = bounds_of(contains(nodes, cells.corners))[cells.offsets]
            cells = cells.take(np.diff(inside) == np.diff(cells.offsets))
    drawn = {main: nodes} | ({} if cells is None else {"cell": cells.rows})
    src = np.empty(0, np.int64)
    dst = src
    if "edge" in cut.bounds:
        drawn["edge"], src, dst = edges_between(access, "csr", nodes, nodes)
    return _part_of(access, cut, part, drawn, cells, src, dst)


def _part_of(
    access: RowAccess,
    cut: SamplePart,
    part: int,
    drawn: Mapping[str, IntArray],
    cells: _DrawnCells | None,
    src: IntArray,
    dst: IntArray,
) -> LocalTopology:
    """Take a part of the whole draw; ``src`` and ``dst`` are drawn rows."""
    nodes = drawn[cut.entity]
    bounds = {name: np.searchsorted(rows, cut.bounds[name]).astype(np.int64) for name, rows in drawn.items()}
    own = {name: slice(int(b[part]), int(b[part + 1])) for name, b in bounds.items()}
    needed = [np.empty(0, np.int64)]
    if "edge" in own:
        src, dst = src[own["edge"]], dst[own["edge"]]
        needed.append(src)
    corners = offsets = np.empty(0, np.int64)
    if cells is not None:
        first, last = own["cell"].start, own["cell"].stop
        offsets = cells.offsets[first : last + 1]
        corners = np.searchsorted(nodes, cells.corners[offsets[0] : offsets[-1]])
        needed.append(corners)
    reached = np.unique(np.concatenate(needed))
    ghosts = reached[(reached < own[cut.entity].start) | (reached >= own[cut.entity].stop)]
    maps = {name: _index_map(b, part, ghosts if name == cut.entity else None) for name, b in bounds.items()}
    local = maps[cut.entity].to_local
    rows = {name: drawn[name][own[name]] for name in drawn}
    local_cells = None
    if cells is not None:
        types = access.gather("cell/type", rows["cell"])
        local_cells = LocalCells(offsets=offsets - offsets[0], connectivity=local(corners), types=types)
    edges = {"edge": np.stack([local(src), local(dst)])} if "edge" in own else {}
    far = {name: each[:, :0] for name, each in edges.items()}
    return LocalTopology(rows=rows, index_maps=maps, relations=edges, far_relations=far, cells=local_cells)


def _read_cells(access: RowAccess, rows: IntArray) -> _DrawnCells:
    first, last = access.pointers("cell/offsets", rows)
    corners = access.gather("cell/connectivity", ranges(first, last)).astype(np.int64, copy=False)
    return _DrawnCells(rows=rows, offsets=bounds_of(last - first), corners=corners)


def edges_between(
    access: RowAccess, group: str, starts: IntArray, ends: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the rows of the edges from some nodes to some, sorted ids, and these nodes as places among those.

    ``group`` is where their ``indptr`` and ``src`` lie.
    """
    first, last = access.pointers(f"{group}/indptr", ends)
    rows = ranges(first, last)
    sources = access.gather(f"{group}/src", rows).astype(np.int64, copy=False)
    kept = contains(starts, sources)
    targets = np.repeat(np.arange(len(ends), dtype=np.int64), last - first)
    return rows[kept], np.searchsorted(starts, sources[kept]), targets[kept]


def drawn_sets(
    access: RowAccess, info: SampleInfo, cut: SamplePart, part: int, draws: Mapping[str, Draw]
) -> LocalTopology:
    """Find what a part holds of draws from some node sets of a graph between several: of the others all rows are there.

    The edges both of whose ends were drawn are kept. How many of them each part holds follows from all that was drawn,
    so every part reads the in-edges of the whole draw.
    """
    none = np.empty(0, np.int64)
    drawn = {name: draws[name].rows() if name in draws else np.arange(info.counts[name]) for name in sets_of(info)}
    ghosts = {name: [none] for name in drawn}
    edges: dict[str, tuple[IntArray, IntArray]] = {}
    bounds = {name: np.searchsorted(rows, cut.bounds[name]).astype(np.int64) for name, rows in drawn.items()}
    own = {name: rows[slice(*bounds[name][part : part + 2])] for name, rows in drawn.items()}
    for relation, (source, _, target) in relations_of(info).items():
        rows, src, dst = edges_between(access, relation, drawn[source], drawn[target])
        bounds[relation] = np.searchsorted(rows, cut.bounds[relation]).astype(np.int64)
        held = slice(*bounds[relation][part : part + 2])
        own[relation], src, dst = rows[held], src[held], dst[held]
        start, stop = bounds[source][part : part + 2]
        ghosts[source].append(src[(src < start) | (src >= stop)])
        edges[relation] = src, dst
    bounds[cut.entity] = np.sum([bounds[name] for name in drawn], axis=0)
    maps = {
        name: _index_map(each, part, np.unique(np.concatenate(ghosts.get(name, [none]))))
        for name, each in bounds.items()
    }
    pairs = {
        name: np.stack([maps[source].to_local(edges[name][0]), maps[target].to_local(edges[name][1])])
        for name, (source, _, target) in relations_of(info).items()
    }
    far = {name: each[:, :0] for name, each in pairs.items()}
    return LocalTopology(rows=own, index_maps=maps, relations=pairs, far_relations=far)


def _index_map(bounds: IntArray, part: int, ghosts: IntArray | None = None) -> IndexMap:
    return IndexMap(bounds=bounds, part=part, ghosts=np.empty(0, np.int64) if ghosts is None else ghosts)
