"""Faults of a raw mesh, cloud or graph: found all at once, named with the first rows, and repaired.

Repairs never guess: they leave out unusable rows, and return the rows that were kept, so that fields can follow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from scidata.core.bounds import owners_of
from scidata.core.types import BoolArray, IntArray
from scidata.meshes.geometry import Geometry, RawCells
from scidata.meshes.order.cells import NUM_NODES, POLYGON, take_cells
from scidata.meshes.order.faces import crowded_faces
from scidata.meshes.order.ids import id_bits, pair_keys, run_starts, stable_sort

#: The repair of each kind of finding; None if there is none.
REMEDIES: dict[str, str | None] = {
    "nan_points": "drop these points, and the cells and edges on them",
    "missing_nodes": "drop these cells",
    "cell_index_out_of_range": "drop these cells",
    "small_faces": "drop these cells",
    "crowded_faces": "keep them as they are: nothing that scidata does needs two cells at most",
    "edge_index_out_of_range": "drop these edges",
    "duplicate_edges": "keep the first of each and drop the others",
    "self_loops": "drop these edges",
    "int32_overflow": None,
}

# Ids below this are no markers of a missing node but ids above 2**31 that were stored in 32 bits.
_WRAPPED = -(1 << 30)

_OF_CELLS = ("missing_nodes", "cell_index_out_of_range", "small_faces")
_OF_EDGES = ("edge_index_out_of_range", "duplicate_edges", "self_loops")


@dataclass(frozen=True, kw_only=True, eq=False)
class Finding:
    """One kind of fault.

    - ``kind``: a key of :data:`REMEDIES`.
    - ``count``: how many rows, cells, faces or edges it concerns.
    - ``rows``: rows of points, cells or edges, sorted, int64.
    - ``message``: a sentence for the user.
    - ``entity``: the set or relation whose rows they are, in a graph between several sets.
    """

    kind: str
    count: int
    rows: IntArray
    message: str
    entity: str = ""

    @property
    def first_rows(self) -> tuple[int, ...]:
        """At most five of the rows."""
        return tuple(self.rows[:5].tolist())

    @property
    def repairable(self) -> bool:
        """Whether :func:`repair` can do something about it."""
        return REMEDIES[self.kind] is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class Repaired:
    """The arrays of a sample after repair, and the rows of the raw sample that were kept (None: all of them)."""

    geometry: Geometry
    kept_nodes: IntArray | None
    kept_cells: IntArray | None
    kept_edges: IntArray | None


_SENTENCES = {
    "nan_points": "{count} of {nodes} points have a NaN or infinite coordinate",
    "missing_nodes": "{count} of {cells} cells lack a node, or have another number of nodes than their type",
    "cell_index_out_of_range": "{count} of {cells} cells name a node that is not among the {nodes}",
    "small_faces": "{count} of {cells} cells are polygons of fewer than three nodes",
    "crowded_faces": "{count} faces lie between more than two cells",
    "edge_index_out_of_range": "{count} of {edges} edges name a node that is not among the {nodes}",
    "duplicate_edges": "{count} of {edges} edges repeat an earlier one",
    "self_loops": "{count} of {edges} edges lead from a node to itself",
    "int32_overflow": "{count} cells or edges name a node above 2**31 that was stored in 32 bits",
}


def check_sample(raw: Geometry, num_nodes: int) -> list[Finding]:
    """Find all faults of a raw sample.

    Returns one entry per kind of fault, in the order of :data:`REMEDIES`; empty for a sound sample.
    """
    cells = 0 if raw.cells is None else raw.cells.num_cells
    edges = 0 if raw.edge_index is None else raw.edge_index.shape[1]
    return described_faults(_faults(raw, num_nodes), num_nodes, cells, edges)


def described_faults(faults: Mapping[str, _Fault], num_nodes: int, cells: int, edges: int) -> list[Finding]:
    """Return the number of faults of every kind, and their rows, as findings of a sample of so many cells and edges."""
    found = []
    for kind, remedy in REMEDIES.items():
        count, rows = faults[kind]
        if count:
            sentence = _SENTENCES[kind].format(count=count, nodes=num_nodes, cells=cells, edges=edges)
            todo = f"{remedy} (--repair {kind})" if remedy else "write the ids again in 64 bits"
            if kind == "crowded_faces":
                todo = f"nothing in scidata needs two at most: take them as they are, --keep {kind}"
            message = f"{sentence} (first rows: {rows[:5].tolist()}); {todo}"
            found.append(Finding(kind=kind, count=count, rows=rows, message=message))
    return found


def repair(raw: Geometry, findings: Collection[Finding], num_nodes: int) -> Repaired:
    """Leave out faulty rows; ``findings`` are those of :func:`check_sample`, all that it repairs."""
    faulty = dict.fromkeys(REMEDIES, _NONE) | {found.kind: found.rows for found in findings}
    keep_nodes = np.ones(num_nodes, np.bool_)
    keep_nodes[faulty["nan_points"]] = False
    new_row = np.cumsum(keep_nodes) - 1
    cells, kept_cells = _repair_cells(raw.cells, faulty, keep_nodes, new_row)
    edges, kept_edges = _repair_edges(raw.edge_index, faulty, keep_nodes, new_row)
    points = None if raw.points is None else raw.points[keep_nodes]
    return Repaired(
        geometry=Geometry(points=points, cells=cells, edge_index=edges),
        kept_nodes=None if keep_nodes.all() else np.flatnonzero(keep_nodes),
        kept_cells=kept_cells,
        kept_edges=kept_edges,
    )


_Fault: TypeAlias = tuple[int, IntArray]
_NONE = np.empty(0, np.int64)


def _faults(raw: Geometry, num_nodes: int) -> dict[str, _Fault]:
    """Return the number of faults of every kind, and their rows, sorted."""
    rows = dict.fromkeys(REMEDIES, _NONE)
    if raw.points is not None:
        rows["nan_points"] = np.flatnonzero(~np.isfinite(raw.points).all(axis=1))
    overflows = [_NONE]
    num_crowded = 0
    if raw.cells is not None:
        overflows.append(check_cells(raw.cells, num_nodes, rows))
        sound, kept = sound_cells(raw.cells, rows)
        num_crowded, crowded = crowded_faces(sound, num_nodes)
        rows["crowded_faces"] = crowded if kept is None else kept[crowded]
    if raw.edge_index is not None:
        overflows.append(_check_edges(raw.edge_index, num_nodes, rows))
    rows["int32_overflow"] = np.concatenate(overflows)
    return {kind: (num_crowded if kind == "crowded_faces" else len(found), found) for kind, found in rows.items()}


def _without(rows: dict[str, IntArray], kinds: Collection[str], num_rows: int) -> BoolArray:
    """Say which rows have none of some faults."""
    sound = np.ones(num_rows, np.bool_)
    for kind in kinds:
        sound[rows[kind]] = False
    return sound


def check_cells(cells: RawCells, num_nodes: int, rows: dict[str, IntArray]) -> IntArray:
    """Fill in the faulty cells; return those whose ids overflowed."""
    sizes = np.diff(cells.offsets)
    expected = np.zeros(256, np.int64)
    expected[list(NUM_NODES)] = list(NUM_NODES.values())
    wanted = expected[cells.cell_type]
    ids = cells.connectivity

    def cells_with(entries: BoolArray) -> IntArray:
        return np.unique(owners_of(cells.offsets, np.flatnonzero(entries)))

    missing = np.zeros(len(sizes), np.bool_)
    missing[cells_with((ids < 0) & (ids > _WRAPPED))] = True
    missing |= (wanted > 0) & (sizes != wanted)
    rows["missing_nodes"] = np.flatnonzero(missing)
    rows["cell_index_out_of_range"] = cells_with(ids >= num_nodes)
    rows["small_faces"] = np.flatnonzero((cells.cell_type == POLYGON) & (sizes < 3))
    return cells_with(ids <= _WRAPPED)


def sound_cells(cells: RawCells, rows: dict[str, IntArray]) -> tuple[RawCells, IntArray | None]:
    """Return the cells that :func:`check_cells` found nothing wrong with, and which these are; None: all of them."""
    sound = _without(rows, _OF_CELLS, cells.num_cells)
    wrapped = cells.connectivity <= _WRAPPED
    if wrapped.any():
        sound[owners_of(cells.offsets, np.flatnonzero(wrapped))] = False
    if sound.all():  # no copy
        return cells, None
    kept = np.flatnonzero(sound)
    return _select(cells, kept), kept


def _check_edges(edge_index: IntArray, num_nodes: int, rows: dict[str, IntArray]) -> IntArray:
    """Fill in the faulty edges; return those whose ids overflowed."""
    wrapped, sound = check_ends(edge_index, num_nodes, rows)
    src, dst = edge_index[:, sound]
    rows_of = (lambda found: found) if isinstance(sound, slice) else sound.__getitem__
    keys = pair_keys(dst, src, num_nodes)
    if not run_starts(np.sort(keys)).all():
        keys, order = stable_sort(keys, 2 * id_bits(num_nodes), overwrite=True)
        rows["duplicate_edges"] = np.sort(rows_of(order[~run_starts(keys)]))  # stable: the first of each is none
    return wrapped


def check_ends(edge_index: IntArray, num_nodes: int, rows: dict[str, IntArray]) -> tuple[IntArray, IntArray | slice]:
    """Fill in what edges are out of range, or loops; return those whose ids overflowed, and those with sound ends."""
    src, dst = edge_index
    wrapped = (src <= _WRAPPED) | (dst <= _WRAPPED)
    outside = (src < 0) | (dst < 0) | (src >= num_nodes) | (dst >= num_nodes)
    rows["edge_index_out_of_range"] = np.flatnonzero(outside & ~wrapped)
    sound = np.flatnonzero(~outside) if outside.any() else slice(None)
    loops = np.flatnonzero(src[sound] == dst[sound])
    rows["self_loops"] = loops if isinstance(sound, slice) else sound[loops]
    return np.flatnonzero(wrapped), sound


def _repair_cells(
    cells: RawCells | None, faulty: dict[str, IntArray], keep_nodes: BoolArray, new_row: IntArray
) -> tuple[RawCells | None, IntArray | None]:
    """Return the cells, and those that were kept."""
    if cells is None:
        return None, None
    keep = _without(faulty, _OF_CELLS, cells.num_cells)
    if not keep_nodes.all():
        in_range = np.clip(cells.connectivity, 0, len(keep_nodes) - 1)
        on_dropped = np.flatnonzero(~keep_nodes[in_range])
        keep[owners_of(cells.offsets, on_dropped)] = False
    if keep.all():
        return cells if keep_nodes.all() else replace(cells, connectivity=new_row[cells.connectivity]), None
    kept = np.flatnonzero(keep)
    some = _select(cells, kept)
    return replace(some, connectivity=new_row[some.connectivity]), kept


def _select(cells: RawCells, kept: IntArray) -> RawCells:
    offsets, connectivity = take_cells(cells.offsets, cells.connectivity, kept)
    return RawCells(offsets=offsets, connectivity=connectivity, cell_type=cells.cell_type[kept])


def _repair_edges(
    edge_index: IntArray | None, faulty: dict[str, IntArray], keep_nodes: BoolArray, new_row: IntArray
) -> tuple[IntArray | None, IntArray | None]:
    """Return the edges, and those that were kept."""
    if edge_index is None:
        return None, None
    keep = _without(faulty, _OF_EDGES, edge_index.shape[1])
    kept = np.flatnonzero(keep)
    kept = kept[keep_nodes[edge_index[:, kept]].all(axis=0)]
    if len(kept) == len(keep):
        return edge_index if keep_nodes.all() else new_row[edge_index], None
    return new_row[edge_index[:, kept]], kept
