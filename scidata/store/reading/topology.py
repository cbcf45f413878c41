"""_Edges, cells and ghosts of one part of a stored sample, in local numbering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scidata.core.index_map import IndexMap
from scidata.core.types import AnyArray, BoolArray, FloatArray, IntArray
from scidata.meshes.order.ids import NodeIds, distinct, ranges
from scidata.meshes.order.neighbours import chord, make_tree, wrapped
from scidata.store.format.manifest import SampleInfo
from scidata.store.format.node_sets import folder_of_edges, relations_of, sets_of
from scidata.store.format.write import BLOCK_ROWS, search_space
from scidata.store.reading.choices import Layers
from scidata.store.reading.part import Identity, LocalCells, LocalTopology, SamplePart
from scidata.store.reading.rows import RowAccess

if TYPE_CHECKING:
    from scipy.spatial import cKDTree

_BLOCKS = 256  # of rows whose cells are looked at together
_FINE_ROWS = 64  # of a part, in one of the boxes that blocks are held against

#: Rows, sources and targets of edges.
_Edges: TypeAlias = tuple[IntArray, NodeIds, IntArray]


def read_topology(
    access: RowAccess,
    info: SampleInfo,
    cut: SamplePart,
    part: int,
    *,
    layers: Layers,
    radius: float,
    ghost_cells: bool,
    token: str,
) -> LocalTopology:
    """Read a part's edges and cells, and find its ghosts.

    A part holds all that it needs to compute its rows through some layers without exchange. From the last layer back:
    to know some rows after a layer, their edges of its relations are needed, and before it the rows where these begin.
    A set's ghosts are the rows needed of it before the first layer, and the sources of all edges that end at owned
    rows: so that one exchange of a set's rows serves all relations, too.

    In a chain of nodes 0 1 2 3 with edges from each to the next, of which a part owns node 3, two layers need nodes 2
    and 1: the part's own edge is 2 to 3, and its far one 1 to 2.

    ``layers``: of each layer, its relations.
    ``radius``: of points: their ghosts are all rows within it; 0 if there is none.
    ``ghost_cells``: also hold the cells of others that have an owned node.
    ``token``: names the data set, for the keys of the index maps.
    """
    ends = {name: (source, target) for name, (source, _, target) in relations_of(info).items()}
    own = {name: _own_edges(access, cut, part, name, target) for name, (_, target) in ends.items()}
    far: dict[str, list[_Edges]] = {name: [] for name in ends}
    reached = {name: [_others(cut, part, ends[name][0], src)] for name, (src, _) in own.items()}
    none = np.empty(0, np.int64)
    needed = dict.fromkeys(sets_of(info), none)  # rows of others, of each set
    complete = dict.fromkeys(ends, none)  # of the target's, those all of whose edges are here
    for layer in reversed(layers):
        sources: dict[str, list[NodeIds]] = {name: [rows] for name, rows in needed.items()}
        for name in layer:
            source, target = ends[name]
            new = np.setdiff1d(needed[target], complete[name], assume_unique=True)
            if len(new):
                far[name].append(edges_into(access, new, folder_of_edges(name)))
                reached[name].append(_others(cut, part, source, far[name][-1][1]))
                complete[name] = needed[target]
            sources[source] += reached[name]
        needed = {name: distinct(np.concatenate(rows)) for name, rows in sources.items()}
    ghosts: dict[str, list[NodeIds]] = {name: [rows] for name, rows in needed.items()}
    for name, (source, _) in ends.items():
        ghosts[source].append(reached[name][0])
    if radius:
        reach = chord(radius) if info.block_space == "unit_sphere" else float(radius)
        ghosts[cut.entity].append(rows_within(access, info, *cut.owned(cut.entity, part), reach))
    cells = _own_cells(access, cut, part) if "cell/indptr" in info.arrays else None
    if cells is not None:
        ghosts[cut.entity].append(_others(cut, part, cut.entity, cells.connectivity))
    far_cells = None
    if ghost_cells:
        rows, far_cells = _cells_of_others(access, info, *cut.owned(cut.entity, part))
        ghosts["cell"] = [rows]
        ghosts[cut.entity].append(_others(cut, part, cut.entity, far_cells.connectivity))
    ordered = {name: _by_row(steps) for name, steps in far.items()}
    held: dict[str, IntArray] = {name: distinct(np.concatenate(rows)) for name, rows in ghosts.items()}
    held |= {name: rows for name, (rows, _, _) in ordered.items()}
    maps = {
        name: IndexMap(bounds=bounds, part=part, ghosts=held.get(name, none), key=(token, cut.index, part, name))
        for name, bounds in cut.bounds.items()
    }
    relations, far_relations = {}, {}
    for name, (source, target) in ends.items():
        relations[name] = np.stack([maps[source].to_local(own[name][0]), own[name][1]])
        _, src, dst = ordered[name]
        far_relations[name] = np.stack([maps[source].to_local(src), maps[target].to_local(dst)])
    of_cells: dict[str, Any] = {
        name: None if each is None else replace(each, connectivity=maps[cut.entity].to_local(each.connectivity))
        for name, each in (("cells", cells), ("far_cells", far_cells))
    }
    return LocalTopology(
        index_maps=maps, relations=relations, far_relations=far_relations, **of_cells, identity=Identity()
    )


def _own_edges(access: RowAccess, cut: SamplePart, part: int, name: str, target: str) -> tuple[NodeIds, IntArray]:
    """Read the sources of the edges that end at owned rows, and these rows, counted from the part's first."""
    (first, last), folder = cut.owned(target, part), folder_of_edges(name)
    indptr = access.rows(f"{folder}/indptr", first, last + 1)
    src = access.rows(f"{folder}/src", int(indptr[0]), int(indptr[-1]))
    return src, np.repeat(np.arange(last - first, dtype=np.int64), np.diff(indptr))


def _own_cells(access: RowAccess, cut: SamplePart, part: int) -> LocalCells:
    """Read the cells that a part owns, with the store's nodes."""
    first, last = cut.owned("cell", part)
    offsets = access.rows("cell/offsets", first, last + 1)
    corners = access.rows("cell/connectivity", int(offsets[0]), int(offsets[-1]))
    return LocalCells(offsets=offsets - offsets[0], connectivity=corners, types=access.rows("cell/type", first, last))


def _cells_of_others(access: RowAccess, info: SampleInfo, first: int, stop: int) -> tuple[IntArray, LocalCells]:
    """Read the cells that rows before ``first`` own and that have a node in ``[first, stop)``, and their numbers."""
    blocks = np.arange(-(-first // BLOCK_ROWS) if stop > first else 0)
    if len(blocks) and "blocks/touched_by" in info.arrays:  # older stores lack it: all cells before are looked at
        ends = access.rows("blocks/touched_indptr", first // BLOCK_ROWS, -(-stop // BLOCK_ROWS) + 1)
        touching = access.rows("blocks/touched_by", int(ends[0]), int(ends[-1]))
        blocks = np.unique(np.append(touching, first // BLOCK_ROWS))
        blocks = blocks[blocks * BLOCK_ROWS < first]
    none = np.empty(0, np.int64)
    found: list[tuple[AnyArray, ...]] = [(none, none, none, np.empty(0, np.uint8))]
    for some in np.array_split(blocks, -(-len(blocks) // _BLOCKS)) if len(blocks) else ():
        low, high = some * BLOCK_ROWS, np.minimum((some + 1) * BLOCK_ROWS, first)
        ends = np.union1d(low, high)
        cells = ranges(*access.gather("cell/indptr", ends)[np.searchsorted(ends, [low, high])])
        if len(cells):
            starts, stops = access.pointers("cell/offsets", cells)
            sizes, corners = stops - starts, access.gather("cell/connectivity", ranges(starts, stops))
            kept = np.logical_or.reduceat((corners >= first) & (corners < stop), np.cumsum(sizes) - sizes)
            types = access.gather("cell/type", cells)[kept]
            found.append((cells[kept], sizes[kept], corners[np.repeat(kept, sizes)], types))
    rows, sizes, nodes, types = map(np.concatenate, zip(*found, strict=True))
    return rows, LocalCells(offsets=np.append(0, np.cumsum(sizes)), connectivity=nodes.astype(np.int64), types=types)


def edges_into(access: RowAccess, nodes: IntArray, folder: str) -> _Edges:
    """Read the edges that end at some nodes, sorted ids; ``folder`` is where their ``indptr`` and ``src`` lie."""
    first, last = access.pointers(f"{folder}/indptr", nodes)
    rows = ranges(first, last)
    return rows, access.gather(f"{folder}/src", rows), np.repeat(nodes, last - first)


def _others(cut: SamplePart, part: int, name: str, rows: NodeIds) -> IntArray:
    """Return those rows of a set that others own, sorted, each once."""
    start, stop = cut.owned(name, part)
    return distinct(rows[(rows < start) | (rows >= stop)]).astype(np.int64)


def _by_row(steps: Sequence[_Edges]) -> tuple[IntArray, IntArray, IntArray]:
    """Return edges that were found step by step, in the order of their rows."""
    rows, src, dst = (np.concatenate([np.empty(0, np.int64), *(step[i] for step in steps)]) for i in range(3))
    order = np.argsort(rows)
    return rows[order], src[order], dst[order]


def rows_within(access: RowAccess, info: SampleInfo, start: int, stop: int, reach: float) -> IntArray:
    """Return the rows outside ``[start, stop)`` at most ``reach`` away from one inside, sorted.

    The bounding boxes of blocks say which rows can be: only their positions are read. Distances are those of the
    nearest images where the domain wraps; on a sphere those of its chords, where it has the radius 1.
    """
    path, num_rows, on_sphere = f"{info.entity}/pos", info.counts[info.entity], info.block_space == "unit_sphere"
    if start == stop or stop - start == num_rows:
        return np.empty(0, np.int64)
    own = search_space(access.rows(path, start, stop), on_sphere=on_sphere)
    images, width = wrapped(own, info.period)
    tree = make_tree(images, width)
    boxes = access.rows("blocks/bbox", 0, -(-num_rows // BLOCK_ROWS))
    blocks = np.arange(len(boxes), dtype=np.int64)
    blocks = blocks[(blocks * BLOCK_ROWS < start) | (np.minimum((blocks + 1) * BLOCK_ROWS, num_rows) > stop)]
    near = blocks[_near(boxes[blocks], own, tree, reach, width)]
    starts, stops = near * BLOCK_ROWS, np.minimum((near + 1) * BLOCK_ROWS, num_rows)
    # a block that the part's bounds cut has rows before or after them
    first = np.concatenate([starts, np.maximum(starts, stop)])
    last = np.concatenate([np.minimum(stops, start), stops])
    some = last > first
    first, last = first[some], last[some]
    rows = ranges(first, last)
    points = search_space(access.gather(path, rows), on_sphere=on_sphere)
    if not len(rows):
        return rows
    distance = tree.query(wrapped(points, info.period)[0], distance_upper_bound=np.nextafter(reach, np.inf))[0]
    return rows[distance <= reach]


def _near(boxes: AnyArray, points: FloatArray, tree: cKDTree, reach: float, width: FloatArray) -> BoolArray:
    """Say which boxes can hold a point at most ``reach`` away from one of ``points``, those of the tree."""
    if not len(boxes):
        return np.empty(0, np.bool_)
    center, half = boxes.mean(axis=1), np.linalg.norm(boxes[:, 1] - boxes[:, 0], axis=1) / 2
    slack = 1e-9 * (float(np.abs(boxes).max()) + reach)  # rounding
    near: BoolArray = tree.query(wrapped(center, width)[0])[0] <= reach + half + slack
    # balls about boxes are too large: those that are left are held against small boxes of the part's own points
    starts = np.arange(0, len(points), _FINE_ROWS)
    low, high = np.minimum.reduceat(points, starts), np.maximum.reduceat(points, starts)
    for i in np.flatnonzero(near):
        gaps = _gaps(low, high, boxes[i], width)
        near[i] = np.sqrt((gaps * gaps).sum(axis=1).min()) <= reach + slack
    return near


def _gaps(low: FloatArray, high: FloatArray, box: AnyArray, width: FloatArray) -> FloatArray:
    """Return how far boxes lie from ``box`` along each coordinate, or from its nearest image; 0 if they meet."""
    apart = np.abs((low + high) / 2 - box.mean(axis=0))
    wraps = width > 0
    apart[:, wraps] = np.abs(apart[:, wraps] - width[wraps] * np.round(apart[:, wraps] / width[wraps]))
    return np.maximum(apart - (high - low) / 2 - (box[1] - box[0]) / 2, 0.0)
