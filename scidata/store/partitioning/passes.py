"""One raw sample put in order in passes, block by block and bucket by bucket; these lie in memory, or on disk.

On disk, memory holds one block or bucket at a time, and what is looked up at random: the new id of each row and, where
cells are rows, the positions of nodes; where these have no room either, a map of a file. The result is that of
:func:`~scidata.store.partitioning.ordered.order_sample`, byte for byte: made edges are numbered as they would be sorted
in the source's ids, so they are sorted by these first, then by their new ones.

======================== ========================================= =================================================
pass                     reads                                     writes
======================== ========================================= =================================================
cells                    cells of the source, block by block       buckets of cells by owner, of edges by target (in
                                                                   the source's ids), of faces by word or lowest node
rows                     points, or centres of cells               their order, by keys or halves: see ``rows.py``
faces                    faces, bucket by bucket                   cells as rows: buckets of edges, as above
edges                    edges, bucket by bucket, each once; or    buckets of edges by target, in new ids
                         those of the source, block by block
order                    cells and edges, bucket by bucket         the arrays of the store, as spools
======================== ========================================= =================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np

from scidata.core.bounds import bounds_of
from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.formats.base import blocks_in_memory, damage_named
from scidata.meshes.geometry import RawCells
from scidata.meshes.order.cells import cell_owner, keys_of_edges, take_cells
from scidata.meshes.order.csr import CSR
from scidata.meshes.order.faces import (
    check_faces_known,
    count_crowded,
    crowded_words,
    face_words,
    faces_among,
    faces_of_cells,
    pairs_across,
)
from scidata.meshes.order.faults import REMEDIES, Finding, check_cells, check_ends, described_faults, sound_cells
from scidata.meshes.order.ids import (
    Keys,
    NodeIds,
    blocks,
    directed_words,
    id_bits,
    id_dtype,
    low_ids,
    pair_keys,
    run_starts,
    stable_sort,
    undirected_keys,
)
from scidata.meshes.order.positions import cell_centres
from scidata.meshes.sample import RawSample, SampleHeader, row_entity
from scidata.store.format.journal import Journal
from scidata.store.format.manifest import SampleHead
from scidata.store.format.spools import Buckets, Spool
from scidata.store.format.write import OrderedCells, OrderedSample
from scidata.store.partitioning.ordered import field_data_of, ordered_cells, weights_of
from scidata.store.partitioning.room import Room, bytes_in_memory, room_of
from scidata.store.partitioning.rows import order_rows

T = TypeVar("T")
_Spools: TypeAlias = dict[str, Spool]
#: Edges with new ids: targets, sources, and which of the given (or made) edges each is.
_Edges: TypeAlias = Iterator[tuple[NodeIds, NodeIds, IntArray]]

_ENTRY, _EDGE, _POINT = 150, 120, 64  # memory that a block takes for each node of its cells, its edges and points
_LARGE_CELL = 64  # nodes; meshes of few cells are read at once
_COST = 40  # memory that the cost of a row takes while costs are summed up
_LEAST_ROOM, _MOST_ROOMS = 64 << 20, 16  # of samples in memory: blocks and buckets are made for a part of it
_NONE = np.empty(0, np.int64)


def order_in_passes(
    header: SampleHeader,
    head_of: Callable[[RawSample, list[Finding]], SampleHead],
    *,
    by: str,
    weights: str | None,
    keep: Collection[str],
    journal: Journal,
    memory: int | None,
    tick: Callable[[float], None],
) -> OrderedSample:
    """Make a sample's edges, order its rows and number everything anew.

    ``header``: its metadata.
    ``head_of``: takes the sample without its topology, and all that is wrong with it; returns its description, or
    raises.
    ``by, weights``: as in :func:`~scidata.store.partitioning.ordered.order_sample`.
    ``keep``: kinds of faults that need not be looked for.
    ``journal``: of the steps that are done. Its folder is the caller's to remove: the arrays of the sample that is
    returned lie there; without one, in memory.
    ``memory``: bytes that the process may take; None: no limit.
    ``tick``: called with shares of the work, which add up to 1.
    Raises ConfigError: the rows' costs, or points with the same key, take more memory.
    """
    path, sizes, entity = header.topology.source.path, header.topology.sizes, header.entity
    with damage_named(path):
        source = header.topology.by_blocks() or blocks_in_memory(header.topology.load())
    counts = {} if entity == "cell" else {entity: sizes[entity]}
    counts |= {"cell": sizes["cell"]} if source.cells is not None else {}
    counts |= {"edge": sizes["edge"]} if header.edges == "edge_index" else {}
    if entity not in counts or (entity == "cell" and source.points is None):
        raise ConfigError(f"sample {header.name}: entity='cell', but it has no cells")
    num_nodes = sizes[row_entity(header.kind)]
    num_rows, allowed, folder = counts[entity], room_of(memory or 0), journal.folder
    if folder is not None and weights is not None and num_rows * _COST > allowed:
        raise ConfigError(
            f"sample {header.name}: costs of its {num_rows} rows take {num_rows * _COST} bytes, and memory={memory} "
            f"leaves {allowed}; leave weights out, or allow more"
        )
    # on disk, one half for what is looked up at random, the other for a block or bucket
    in_part = max(_LEAST_ROOM, bytes_in_memory(header, by) // _MOST_ROOMS)
    room = Room(journal, in_part if folder is None else allowed // 2)
    raw = header.described(counts=counts)
    faults = _Faults(num_nodes)
    points: Spool | None = None
    if source.points is not None:
        points = faults.step(journal, "points", partial(_spooled, path, source.points, num_nodes, room, faults))
    cells = None if source.cells is None else _Cells(path, source.cells, counts["cell"], faults, room, tick)
    made: Buckets | None = None
    if entity == "cell" and cells is not None and points is not None:
        points, faces = faults.step(journal, "centres", partial(_centres, cells, points, raw))
        made = faults.step(journal, "faces", partial(_across, cells, faces))
    # where the sample is refused any order will do: all that is wrong is looked for, and named
    by = "rows" if faults.spoil(keep) else by
    order, notes = journal.step("rows", partial(order_rows, raw, points, num_rows, by, room))
    new_ids: NodeIds = _NONE
    if cells is not None or source.edges is not None:
        new_ids = room.array(num_rows, id_dtype(num_rows))
        for rows in blocks(num_rows, 1 << 20):
            new_ids[order[rows]] = np.arange(rows.start, rows.stop)
    owned: tuple[Buckets, Buckets] | None = None
    csr: CSR | None = None
    if entity != "cell" and cells is not None:
        put = partial(_cells_of_nodes, cells, new_ids, make_edges=header.edges == "cells", keep=keep)
        owned, made = faults.step(journal, "cells", put)
    edges: _Edges | None = None
    if header.edges == "edge_index" and source.edges is not None:
        edges = _given_edges(_named(path, source.edges(room.block(_EDGE))), new_ids, faults)
        sort = partial(_csr, edges, counts["edge"], num_rows, room, faults)
        csr = CSR(**faults.step(journal, "edges", sort))  # type: ignore[arg-type]
    head = head_of(raw, faults.findings(counts))
    del source, cells, edges  # they may hold what was read
    if made is not None:
        sort = partial(_csr, _made_edges(made, new_ids, room), made.num_rows, num_rows, room, None)
        csr = CSR(**journal.step("edges", sort))  # type: ignore[arg-type]
    del new_ids
    tick(0.2)
    relations = {} if csr is None else {"edge": csr}
    in_order = {} if owned is None else journal.step("cells in order", partial(_cells_in_order, *owned, room))
    return OrderedSample(
        **replace(head, notes=(*head.notes, *notes)).head(),
        order=order,  # type: ignore[arg-type]
        pos=points if folder is not None or points is None else points[:],  # type: ignore[arg-type]
        weights=weights_of(raw, weights, relations, order, {}),  # type: ignore[arg-type]
        cells=None if owned is None else OrderedCells(**in_order),  # type: ignore[arg-type]
        source_counts=counts,
        fields=tuple(field_data_of(raw, name, each) for name, each in raw.fields.items()),
        relations=relations,
    )


class _Faults:
    """The rows of a sample that have faults, found block by block."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes, self.num_crowded = num_nodes, 0
        self.found: dict[str, list[IntArray]] = {kind: [] for kind in REMEDIES}

    def add(self, first: int = 0, **rows: IntArray) -> None:
        """Add rows by kind, counted from ``first`` on."""
        for kind, found in rows.items():
            if len(found):
                self.found[kind].append(found + first)

    def spoil(self, keep: Collection[str]) -> bool:
        """Whether there are others than those of some kinds."""
        return any(found and kind not in keep for kind, found in self.found.items())

    def step(self, journal: Journal, name: str, make: Callable[[], T]) -> T:
        """Do a step of a journal that adds rows, or take what an earlier run has found by then."""

        def made_and_found() -> tuple[T, dict[str, IntArray], int]:
            made = make()
            return made, {kind: np.concatenate(rows) for kind, rows in self.found.items() if rows}, self.num_crowded

        made, found, self.num_crowded = journal.step(name, made_and_found)
        self.found |= {kind: [rows] for kind, rows in found.items()}
        return made

    def findings(self, counts: Mapping[str, int]) -> list[Finding]:
        """Return the faults as findings of a sample with so many cells and edges."""
        every = {kind: np.unique(np.concatenate([_NONE, *found])) for kind, found in self.found.items()}
        faults = {kind: (len(rows), rows) for kind, rows in every.items()}
        faults["crowded_faces"] = self.num_crowded, every["crowded_faces"]
        return described_faults(faults, self.num_nodes, counts.get("cell", 0), counts.get("edge", 0))


class _Cells:
    """The cells of a sample, block by block, each checked."""

    def __init__(
        self, path: str, read: Callable[[int], Iterator[RawCells]], num: int, faults: _Faults, room: Room,
        tick: Callable[[float], None],
    ) -> None:  # fmt: skip
        self.num, self.num_nodes, self.faults, self.room = num, faults.num_nodes, faults, room
        self._path, self._read, self._tick = path, read, tick

    def __iter__(self) -> Iterator[tuple[int, RawCells, IntArray | None]]:
        """Yield the first row of each block, its cells without faults, and their rows in it: None: all of them."""
        first = 0
        for cells in self._blocks():
            rows = dict.fromkeys(REMEDIES, _NONE)
            rows["int32_overflow"] = check_cells(cells, self.num_nodes, rows)
            self.faults.add(first, **rows)
            yield first, *sound_cells(cells, rows)
            first += cells.num_cells
            self._tick(0.8 * cells.num_cells / max(self.num, 1))

    def _blocks(self) -> Iterator[RawCells]:
        entries = num = self.room.block(_ENTRY)
        if self.num > entries // _LARGE_CELL:  # by the size of the first ones
            some = next(_named(self._path, self._read(min(1024, entries))))
            num = max(1, entries * some.num_cells // max(len(some.connectivity), 1))
        yield from _named(self._path, self._read(num))

    def among(self, suspects: Keys) -> tuple[int, IntArray]:
        """Return the number of faces with more than two cells among those of some words, and these cells."""
        found, self._tick = [], lambda share: None
        for first, sound, kept in self:
            faces, owners = faces_among(sound, suspects)
            found.append((faces, (owners if kept is None else kept[owners]) + first))
        return count_crowded(found)


def _spooled(
    path: str, read: Callable[[int], Iterator[FloatArray]], num: int, room: Room, faults: _Faults
) -> Spool | None:
    """Read points, and look for NaN."""
    points: Spool | None = None
    for block in _named(path, read(room.block(_POINT))):
        points = room.spool((block.dtype, block.shape[1:]), num) if points is None else points
        faults.add(len(points), nan_points=np.flatnonzero(~np.isfinite(block).all(axis=1)))
        points.append(block)
    return points


def _named(path: str, items: Iterator[T]) -> Iterator[T]:
    """Yield what is read of a file, whose damage is named."""
    while True:
        with damage_named(path):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _cells_of_nodes(
    cells: _Cells, new_ids: NodeIds, *, make_edges: bool, keep: Collection[str]
) -> tuple[tuple[Buckets, Buckets], Buckets | None]:
    """Put cells into buckets by owner, and their nodes; and their edges by target in the source's ids."""
    num_nodes, room, faults = cells.num_nodes, cells.room, cells.faults
    words: Buckets | None = None
    owned: tuple[Buckets, Buckets] | None = None
    edges: Buckets | None = None
    for first, sound, kept in cells:
        share = cells.num / max(sound.num_cells, 1)
        if "crowded_faces" not in keep:
            found = face_words(sound)
            found.sort()
            words = words or room.buckets(2**32, share * found.nbytes, [np.uint64], shift=32)
            words.put_sorted(found, found)
        if owned is None:
            nbytes = share * (13 * sound.num_cells + len(sound.connectivity) * new_ids.itemsize)
            owned = (
                room.buckets(len(new_ids), nbytes, [np.int32, np.uint8, np.int64]),
                room.buckets(len(new_ids), nbytes, [new_ids.dtype]),
            )
        if kept is None:  # else the sample is refused, or made in memory
            nodes = new_ids[sound.connectivity]
            rows, cuts = owned[0].split(cell_owner(sound.offsets, nodes))
            offsets, nodes = take_cells(sound.offsets, nodes, rows)
            owned[0].put(cuts, np.diff(offsets), sound.cell_type[rows], rows + first)
            owned[1].put(offsets[cuts], nodes)
            if make_edges:
                edges = _add_edges(edges, keys_of_edges(sound, num_nodes), num_nodes, share, room)
    if words is not None:
        suspects = np.concatenate([np.empty(0, np.uint64), *(crowded_words(found) for (found,) in words.taken())])
        if len(suspects):
            faults.num_crowded, rows = cells.among(np.sort(suspects))
            faults.add(crowded_faces=rows)
    if owned is None:
        num = len(new_ids)
        owned = room.buckets(num, 0, [np.int32, np.uint8, np.int64]), room.buckets(num, 0, [new_ids.dtype])
    if make_edges and edges is None:
        edges = room.buckets(1, 0, [np.uint64])
    return owned, edges


def _centres(cells: _Cells, nodes: Spool, raw: RawSample) -> tuple[Spool, Buckets | None]:
    """Return the centres of cells, and buckets of their faces by lowest node."""
    num_nodes, room, faults = cells.num_nodes, cells.room, cells.faults
    points = nodes.at_random(room.nbytes)
    centres = room.spool((np.float64, points.shape[1:]), cells.num)
    dtype = id_dtype(max(num_nodes, cells.num))
    faces: Buckets | None = None
    for first, sound, kept in cells:
        check_faces_known(sound)
        if kept is None and not faults.found["nan_points"]:  # else the sample is refused, or made in memory
            centres.append(cell_centres(points, sound, on_sphere=raw.on_sphere, period=raw.period))
        corners, owners = faces_of_cells(sound, dtype)
        owners = (owners if kept is None else kept[owners].astype(dtype)) + dtype.type(first)
        share = cells.num / max(sound.num_cells, 1)
        faces = faces or room.buckets(num_nodes, share * 4 * owners.nbytes, [dtype] * 4)
        rows, cuts = faces.split(corners[0])
        faces.put(cuts, *(each[rows] for each in (*corners, owners)))
    return centres, faces


def _across(cells: _Cells, faces: Buckets | None) -> Buckets:
    """Return buckets of the edges across faces by target."""
    num_nodes, room, faults = cells.num_nodes, cells.room, cells.faults
    edges: Buckets | None = None
    for *lowest, cell in () if faces is None else faces.taken():
        pairs, num_crowded, crowded = pairs_across(np.stack(lowest), cell, num_nodes)
        faults.num_crowded += num_crowded
        faults.add(crowded_faces=crowded)
        edges = _add_edges(edges, undirected_keys(pairs[0], pairs[1], cells.num), cells.num, len(faces or ()), room)
    return edges or room.buckets(1, 0, [np.uint64])


def _add_edges(edges: Buckets | None, keys: Keys, num_rows: int, share: float, room: Room) -> Buckets:
    """Put both directions of edges into buckets by target; ``share`` times as many are expected in all."""
    words = directed_words(keys, num_rows)
    edges = edges or room.buckets(num_rows, share * words.nbytes, [np.uint64], shift=id_bits(num_rows))
    edges.put_sorted(words, words)
    return edges


def _made_edges(made: Buckets, new_ids: NodeIds, room: Room) -> _Edges:
    """Yield edges, each once, in the order of their targets and sources in the source's ids, which numbers them."""
    num_bits, done = np.uint64(id_bits(len(new_ids))), 0
    for (every,) in made.taken():
        every.sort()
        words = every[run_starts(every)]
        for rows in blocks(len(words), room.block(_EDGE)):
            targets, sources = words[rows] >> num_bits, low_ids(words[rows], len(new_ids))
            yield new_ids[targets], new_ids[sources], np.arange(done + rows.start, done + rows.stop)
        done += len(words)


def _given_edges(given: Iterator[IntArray], new_ids: NodeIds, faults: _Faults) -> _Edges:
    """Yield the edges that the source has, those whose ends are in range."""
    first = 0
    for pairs in given:
        rows = dict.fromkeys(REMEDIES, _NONE)
        rows["int32_overflow"], sound = check_ends(pairs, len(new_ids), rows)
        faults.add(first, **rows)
        yield new_ids[pairs[1, sound]], new_ids[pairs[0, sound]], np.arange(first, first + pairs.shape[1])[sound]
        first += pairs.shape[1]


def _csr(edges: _Edges, most: int, num_rows: int, room: Room, faults: _Faults | None) -> _Spools:
    """Sort edges by new targets and sources, in buckets by target; repeated ones are added to ``faults``."""
    num_bits, dtype = id_bits(num_rows), id_dtype(most)
    buckets = room.buckets(num_rows, most * (8 + dtype.itemsize), [np.uint64, dtype])
    for targets, sources, ids in edges:
        rows, cuts = buckets.split(targets)
        buckets.put(cuts, pair_keys(targets, sources, num_rows)[rows], ids[rows])
    indptr, src, edge_id = (room.spool(kind) for kind in (np.int64, id_dtype(num_rows), np.int64))
    indptr.append(np.zeros(1))
    for (low, high), (words, numbers) in zip(pairwise(buckets.bounds.tolist()), buckets.taken(), strict=True):
        np.subtract(words, np.uint64(low << num_bits), out=words)
        keys, order = stable_sort(words, id_bits(high - low) + num_bits, overwrite=True)
        ids = numbers[order]
        if faults is not None:
            faults.add(duplicate_edges=ids[~run_starts(keys)].astype(np.int64))
        src.append(low_ids(keys, num_rows))
        targets = np.right_shift(keys, np.uint64(num_bits), out=keys).view(np.int64)
        indptr.append(np.cumsum(np.bincount(targets, minlength=high - low)) + len(edge_id))
        edge_id.append(ids)
    return {"indptr": indptr, "src": src, "edge_id": edge_id}


def _cells_in_order(owned: Buckets, nodes_of: Buckets, room: Room) -> _Spools:
    """Sort cells by owner, bucket by bucket."""
    made = {"offsets": np.int64, "cell_type": np.uint8, "original_id": np.int64, "indptr": np.int64}
    spools = {name: room.spool(dtype) for name, dtype in made.items()}
    connectivity: Spool | None = None
    spools["offsets"].append(np.zeros(1))
    for (low, high), (sizes, types, rows), (nodes,) in zip(
        pairwise(owned.bounds.tolist()), owned.taken(), nodes_of.taken(), strict=True
    ):
        connectivity = room.spool(nodes.dtype) if connectivity is None else connectivity
        raw = RawCells(offsets=bounds_of(sizes), connectivity=nodes, cell_type=types)
        found = ordered_cells(raw, low, high - low)
        spools["indptr"].append(found.indptr[low > 0 :] + len(spools["original_id"]))
        spools["offsets"].append(found.offsets[1:] + len(connectivity))
        spools["cell_type"].append(found.cell_type)
        spools["original_id"].append(rows[found.original_id])
        connectivity.append(found.connectivity)
    assert connectivity is not None
    return {"connectivity": connectivity, **spools}
