"""One raw sample put in order in passes, block by block and bucket by bucket; these lie in memory, or on disk.

On disk, memory holds what the rows take (positions, their order, their new ids) and one block or bucket at a time. The
result is that of :func:`~scidata.store.partitioning.ordered.order_sample`, byte for byte: made edges are numbered as
they would be sorted in the source's ids, so they are sorted by these first, then by their new ones.

======================== ========================================= =================================================
pass                     reads                                     writes
======================== ========================================= =================================================
cells                    cells of the source, block by block       buckets of cells by owner, of edges by target (in
                                                                   the source's ids), of faces by word or lowest node
faces                    faces, bucket by bucket                   cells as rows: buckets of edges, as above
edges                    edges, bucket by bucket, each once; or    buckets of edges by target, in new ids
                         those of the source, block by block
order                    cells and edges, bucket by bucket         the arrays of the store, as spools
======================== ========================================= =================================================
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from scidata.core.bounds import bounds_of
from scidata.core.types import FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.formats.base import blocks_in_memory, damage_named
from scidata.meshes.geometry import RawCells
from scidata.meshes.hetero import RawSet
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
from scidata.meshes.sample import HeteroHeader, RawSample, SampleHeader, row_entity
from scidata.store.format.manifest import SampleHead
from scidata.store.format.spools import Buckets, Spool
from scidata.store.format.write import OrderedCells, OrderedSample
from scidata.store.partitioning.ordered import field_data_of, order_of, ordered_cells, weights_of

T = TypeVar("T")
#: Edges with new ids: targets, sources, and which of the given (or made) edges each is.
_Edges: TypeAlias = Iterator[tuple[NodeIds, NodeIds, IntArray]]

_PROGRAM = 384 << 20  # what scidata and its libraries take, and the shards on their way to disk
_MOST_BUCKETS = 256
_PARTS = 32  # buckets that would fill the memory; sorting one takes some times its size, and they differ in size
_ENTRY, _EDGE = 150, 120  # memory that a block takes for each node of its cells, and for each of its edges
_MOST_IN_BLOCK = 4 << 20  # of these: larger blocks are not faster
_CORNERS = ("cells", "connectivity", "cells_connectivity")  # names of arrays of the nodes of cells
_LARGE_CELL = 64  # nodes; meshes of few cells are read at once
_LEAST_ROOM, _MOST_ROOMS = 64 << 20, 16  # of samples in memory: blocks and buckets are made for a part of it
_NONE = np.empty(0, np.int64)


def room_of(memory: int) -> int:
    """Return how much of the memory that a process may take is left for the arrays of a sample."""
    return max(memory - _PROGRAM, memory // 2)


def bytes_in_memory(header: SampleHeader | HeteroHeader, order: str) -> int:
    """Estimate the memory that the arrays of a sample take when it is put in order in memory.

    By ``tests/bench/partition_memory.py`` 50 bytes for each node of a cell, as many for each edge of the source.
    """
    if isinstance(header, HeteroHeader):
        return 50 * sum(num or 0 for num in header.sizes.values())
    sizes = header.topology.sizes
    edges = sizes.get("edge", 0) if header.edges == "edge_index" else 0
    arrays = header.topology.source.arrays
    corners = [
        math.prod(layout.shape) for name, layout in arrays.items() if name.rpartition("/")[2].lower() in _CORNERS
    ]
    corners.append(4 * sizes.get("cell", 0))
    rows = max(rows_bytes(sizes.get(header.entity, 0), 3, order))
    return rows + 50 * (edges + (max(corners) if "cell" in sizes else 0))


def rows_bytes(num_rows: int, num_axes: int, order: str) -> tuple[int, int]:
    """Return the memory that rows take while they are put in order, and from then on."""
    sorting = {"hilbert": 8 * num_axes + 40, "rcb": 16 * num_axes + 32}.get(order, 8 * num_axes + 16)
    return num_rows * sorting, num_rows * (8 * num_axes + 12)


def why_not(header: SampleHeader | HeteroHeader, order: str) -> str | None:
    """Return why a sample cannot be put in order in passes; None where it can."""
    if isinstance(header, HeteroHeader) or header.topology.cells_are_rows:
        return "its node sets, or faces, are read whole"
    if order == "metis":
        return "order 'metis' needs all edges at once; use hilbert or rcb"
    if header.edges not in ((None, "faces") if header.entity == "cell" else (None, "cells", "edge_index")):
        return f"edges={header.edges!r} are made of all rows at once"
    return "fields live on mesh edges; leave them out with fields=" if header.on_mesh_edges else None


def order_in_passes(
    header: SampleHeader,
    head_of: Callable[[RawSample, list[Finding]], SampleHead],
    *,
    by: str,
    weights: str | None,
    keep: Collection[str],
    folder: str | None,
    memory: int | None,
    tick: Callable[[float], None],
) -> OrderedSample:
    """Make a sample's edges, order its rows and number everything anew.

    Parameters
    ----------
    header
        Its metadata.
    head_of
        Takes the sample without its topology, and all that is wrong with it; returns its description, or raises.
    by, weights
        As in :func:`~scidata.store.partitioning.ordered.order_sample`.
    keep
        Kinds of faults that need not be looked for.
    folder
        Exists, and is the caller's to remove: the arrays of the sample that is returned lie there. None: in memory.
    memory
        Bytes that the process may take; None: no limit.
    tick
        Called with shares of the work, which add up to 1.

    Raises
    ------
    ConfigError
        The rows alone take more memory.
    """
    path, sizes, entity = header.topology.source.path, header.topology.sizes, header.entity
    with damage_named(path):
        source = header.topology.by_blocks() or blocks_in_memory(header.topology.load())
        points = source.points()
    counts = {} if entity == "cell" else {entity: sizes[entity]}
    counts |= {"cell": sizes["cell"]} if source.cells is not None else {}
    counts |= {"edge": sizes["edge"]} if header.edges == "edge_index" else {}
    if entity not in counts or (entity == "cell" and points is None):
        raise ConfigError(f"sample {header.name}: entity='cell', but it has no cells")
    num_nodes = sizes[row_entity(header.kind)]
    num_rows, num_axes = counts[entity], 0 if points is None else points.shape[1]
    sorting, kept = rows_bytes(num_rows, num_axes, by)
    sorting += points.nbytes if entity == "cell" and points is not None else 0
    least = max(sorting, kept * 3 // 2)
    in_memory = folder is None or memory is None
    part = max(_LEAST_ROOM, bytes_in_memory(header, by) // _MOST_ROOMS)
    room = _Room(folder, part if in_memory else room_of(memory or 0) - kept)
    if not in_memory and least > room_of(memory or 0):
        raise ConfigError(
            f"sample {header.name}: its {num_rows} rows alone take {sorting} bytes while they are put in order by "
            f"{by!r}, and memory={memory} leaves {room_of(memory or 0)}; allow {min(least + _PROGRAM, 2 * least)}"
        )
    raw = header.described(counts=counts)
    faults = _Faults(num_nodes)
    if points is not None:
        faults.add(nan_points=np.flatnonzero(~np.isfinite(points).all(axis=1)))
    cells = None if source.cells is None else _Cells(path, source.cells, counts["cell"], faults, room, tick)
    made: Buckets | None = None
    if entity == "cell" and cells is not None and points is not None:
        points, made = _cells_as_rows(cells, points, raw)
    order, notes = np.arange(num_rows), list[str]()
    if not any(faults.found.values()):  # else all that is wrong is looked for, and named
        order, notes = order_of(raw, {entity: RawSet(num_nodes=num_rows, points=points)}, {}, by)
    new_ids: NodeIds = np.empty(num_rows, id_dtype(num_rows))
    new_ids[order] = np.arange(num_rows)
    owned: tuple[Buckets, Buckets] | None = None
    csr: CSR | None = None
    if entity != "cell" and cells is not None:
        owned, made = _cells_of_nodes(cells, new_ids, make_edges=header.edges == "cells", keep=keep)
    if header.edges == "edge_index" and source.edges is not None:
        given = _named(path, source.edges(room.block(_EDGE)))
        csr = _csr(_given_edges(given, new_ids, faults), counts["edge"], num_rows, room, faults)
    head = head_of(raw, faults.findings(counts))
    del source, cells  # they may hold what was read
    if made is not None:
        csr = _csr(_made_edges(made, new_ids, room), made.num_rows, num_rows, room, None)
    del new_ids
    tick(0.2)
    relations = {} if csr is None else {"edge": csr}
    return OrderedSample(
        **replace(head, notes=(*head.notes, *notes)).head(),
        order=order,
        pos=points,
        weights=weights_of(raw, weights, relations, order, {}),
        cells=None if owned is None else _cells_in_order(*owned, room),
        source_counts=counts,
        fields=tuple(field_data_of(raw, name, each) for name, each in raw.fields.items()),
        relations=relations,
    )


class _Room:
    """A folder for buckets and spools, or none, and the memory that one of them at a time may take."""

    def __init__(self, folder: str | None, nbytes: int) -> None:
        self._folder, self._nbytes, self._num = folder, nbytes, 0

    def block(self, entry: int) -> int:
        """Return how many entries of so many bytes make a block."""
        return min(max(self._nbytes // (2 * entry), 1), _MOST_IN_BLOCK)

    def spool(self, dtype: npt.DTypeLike) -> Spool:
        return Spool(self._path(), dtype)

    def buckets(self, num: int, nbytes: float, dtypes: list[npt.DTypeLike], shift: int = 0) -> Buckets:
        """Return buckets for ``nbytes`` of rows, by numbers below ``num << shift``."""
        num_buckets = min(_MOST_BUCKETS, max(1, num), int(nbytes * _PARTS / self._nbytes) + 1)
        bounds = [num * i // num_buckets << shift for i in range(num_buckets)] + [min(num << shift, 2**64 - 1)]
        return Buckets(self._path(), np.array(bounds, np.uint64 if shift else np.int64), dtypes)

    def _path(self) -> str | None:
        self._num += 1
        return None if self._folder is None else os.path.join(self._folder, str(self._num))


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

    def findings(self, counts: Mapping[str, int]) -> list[Finding]:
        """Return the faults as findings of a sample with so many cells and edges."""
        every = {kind: np.unique(np.concatenate([_NONE, *found])) for kind, found in self.found.items()}
        faults = {kind: (len(rows), rows) for kind, rows in every.items()}
        faults["crowded_faces"] = self.num_crowded, every["crowded_faces"]
        return described_faults(faults, self.num_nodes, counts.get("cell", 0), counts.get("edge", 0))


class _Cells:
    """The cells of a sample, block by block, each checked."""

    def __init__(
        self, path: str, read: Callable[[int], Iterator[RawCells]], num: int, faults: _Faults, room: _Room,
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
        owned = room.buckets(1, 0, [np.int32, np.uint8, np.int64]), room.buckets(1, 0, [new_ids.dtype])
    if make_edges and edges is None:
        edges = room.buckets(1, 0, [np.uint64])
    return owned, edges


def _cells_as_rows(cells: _Cells, points: FloatArray, raw: RawSample) -> tuple[FloatArray, Buckets]:
    """Return the centres of cells, and buckets of the edges across their faces by target."""
    num_nodes, room, faults = cells.num_nodes, cells.room, cells.faults
    centres = np.full((cells.num, points.shape[1]), np.nan)
    dtype = id_dtype(max(num_nodes, cells.num))
    faces: Buckets | None = None
    for first, sound, kept in cells:
        check_faces_known(sound)
        if kept is None and not faults.found["nan_points"]:
            here = slice(first, first + sound.num_cells)
            centres[here] = cell_centres(points, sound, on_sphere=raw.on_sphere, period=raw.period)
        corners, owners = faces_of_cells(sound, dtype)
        owners = (owners if kept is None else kept[owners].astype(dtype)) + dtype.type(first)
        share = cells.num / max(sound.num_cells, 1)
        faces = faces or room.buckets(num_nodes, share * 4 * owners.nbytes, [dtype] * 4)
        rows, cuts = faces.split(corners[0])
        faces.put(cuts, *(each[rows] for each in (*corners, owners)))
    edges: Buckets | None = None
    for *lowest, cell in () if faces is None else faces.taken():
        pairs, num_crowded, crowded = pairs_across(np.stack(lowest), cell, num_nodes)
        faults.num_crowded += num_crowded
        faults.add(crowded_faces=crowded)
        edges = _add_edges(edges, undirected_keys(pairs[0], pairs[1], cells.num), cells.num, len(faces or ()), room)
    return centres, edges or room.buckets(1, 0, [np.uint64])


def _add_edges(edges: Buckets | None, keys: Keys, num_rows: int, share: float, room: _Room) -> Buckets:
    """Put both directions of edges into buckets by target; ``share`` times as many are expected in all."""
    words = directed_words(keys, num_rows)
    edges = edges or room.buckets(num_rows, share * words.nbytes, [np.uint64], shift=id_bits(num_rows))
    edges.put_sorted(words, words)
    return edges


def _made_edges(made: Buckets, new_ids: NodeIds, room: _Room) -> _Edges:
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


def _csr(edges: _Edges, most: int, num_rows: int, room: _Room, faults: _Faults | None) -> CSR:
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
    return CSR(indptr=indptr, src=src, edge_id=edge_id)  # type: ignore[arg-type]


def _cells_in_order(owned: Buckets, nodes_of: Buckets, room: _Room) -> OrderedCells:
    """Sort cells by owner, bucket by bucket."""
    made = {"offsets": np.int64, "cell_type": np.uint8, "original_id": np.int64, "indptr": np.int64}
    spools = {name: room.spool(dtype) for name, dtype in made.items()}
    connectivity: Spool | None = None
    spools["offsets"].append(np.zeros(1))
    for (low, high), (sizes, types, rows), (nodes,) in zip(
        pairwise(owned.bounds.tolist()), owned.taken(), nodes_of.taken(), strict=True
    ):
        connectivity = connectivity or room.spool(nodes.dtype)
        raw = RawCells(offsets=bounds_of(sizes), connectivity=nodes, cell_type=types)
        found = ordered_cells(raw, low, high - low)
        spools["indptr"].append(found.indptr[low > 0 :] + len(spools["original_id"]))
        spools["offsets"].append(found.offsets[1:] + len(connectivity))
        spools["cell_type"].append(found.cell_type)
        spools["original_id"].append(rows[found.original_id])
        connectivity.append(found.connectivity)
    return OrderedCells(connectivity=connectivity, **spools)  # type: ignore[arg-type]
