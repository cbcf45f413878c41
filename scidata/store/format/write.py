"""Write samples of a store: under a temporary name, synced, then renamed, so that a sample is whole or not there.

Layout of a sample, a Zarr v3 group (``node`` is ``point`` for point clouds; where cells are the rows it is ``cell``,
and there are no lists of cells)::

    node/original_id (N,), node/pos (N, ndim), node/<field>
    cell/offsets (C + 1,), cell/connectivity, cell/type (C,), cell/original_id (C,), cell/indptr (N + 1,), cell/<field>
    csr/indptr (N + 1,), csr/src (E,), csr/edge_id (E,), edge/<field>
    blocks/bbox (B, 2, ndim), blocks/weight_prefix (B + 1,), blocks/touched_indptr (B + 1,), blocks/touched_by
    checksums (chunks,)  # the crc32c of every chunk of the others, see checksums.py

Rows are in the store's order and ids in its numbering; ``original_id`` and ``edge_id`` are the source's rows: those of
mesh edges, twice each, where fields on them came along (``edge/orientation`` is then the way of each). Cells
are sorted by their owner, the lowest-numbered of their nodes: node ``i`` owns cells
``[cell/indptr[i], cell/indptr[i + 1])``. Cells that are owned by nodes of the blocks
``blocks/touched_by[blocks/touched_indptr[b] : blocks/touched_indptr[b + 1]]`` have nodes in block ``b``.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scidata.core.own_files import sync
from scidata.core.types import AnyArray, Array, ByteArray, FloatArray, IntArray
from scidata.errors import ConfigError
from scidata.meshes.order.csr import CSR
from scidata.meshes.order.ids import id_dtype
from scidata.meshes.order.positions import unit_sphere
from scidata.meshes.order.quality import GhostCounts, count_ghosts
from scidata.store.format.arrays import CHUNK_ROWS, Reordered, write_array
from scidata.store.format.checksums import Checksums, write_checksums
from scidata.store.format.documents import digest_documents, sample_document
from scidata.store.format.durable import remove, sync_folder
from scidata.store.format.journal import Journal
from scidata.store.format.manifest import (
    CHECKSUMS,
    ArrayInfo,
    FieldInfo,
    RunningStatistics,
    SampleHead,
    SampleInfo,
    StoredMoments,
    plain,
)
from scidata.store.format.node_sets import folder_of_edges
from scidata.store.format.places import folder_of
from scidata.store.format.spools import Spool

BLOCK_ROWS = 512
_CELLS = 1 << 18  # looked at together
_LIST_CHUNK_ROWS = 8192  # of arrays with several entries per entity: about 1024 entities' worth
MAX_FIELD_BYTES = 256 << 20
_NO_ROOM = {  # errors of writing: their text, and the remedy
    errno.ENOSPC: ("no space left", "free some space"),
    errno.EDQUOT: ("no space left", "free some space"),
    errno.EFBIG: ("a file became too large for its file system, or for `ulimit -f`,", "raise the limit"),
}
_NO_NAMES = {"", ".", "..", "zarr.json"}
_NO_CHARACTERS = re.compile("[\\\\\0\ud800-\udfff]")  # Zarr takes a backslash for a slash
_LONGEST_NAME = 255  # bytes, on any file system in use


@dataclass(frozen=True, kw_only=True)
class FieldData:
    """A field to be written.

    - ``read``: reads a box of the source: one slice with step 1 per dimension.
    - ``rows``: the source's row of each stored row; None: that of the entity's rows.
    """

    info: FieldInfo
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], Array]
    rows: IntArray | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class OrderedCells:
    """Cells in the store's order: ``connectivity`` holds new node ids, ``original_id`` source rows."""

    offsets: IntArray
    connectivity: AnyArray
    cell_type: ByteArray
    original_id: IntArray
    indptr: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class OrderedSet:
    """One of several node sets in the store's order.

    - ``indptr``: ``(rows of all sets + 1,)`` int64: how many of the set come before each row of all sets together.
    """

    order: IntArray
    indptr: IntArray
    pos: npt.NDArray[np.floating[Any]] | None


class _Indexed(NamedTuple):
    """An array in memory, or a spool: in its final order, or in that of ``rows``.

    ``is_list`` with several entries per entity; ``dtype`` where it is written as another.
    """

    path: str
    values: AnyArray
    dims: tuple[str, ...]
    rows: IntArray | None = None
    is_list: bool = False
    dtype: npt.DTypeLike | None = None


@dataclass(frozen=True, kw_only=True)
class OrderedSample(SampleHead):
    """One sample whose rows have got their order; ``pos`` and ``weights`` are still in the source's.

    ``order``, ``cells.original_id`` and the ``edge_id`` of relations are the source's rows: of ``source_counts`` rows,
    where a repair left some out; else all of them. The edges of one node set are the relation ``edge``.
    """

    order: IntArray
    pos: npt.NDArray[np.floating[Any]] | None
    weights: FloatArray | None
    cells: OrderedCells | None
    fields: tuple[FieldData, ...]
    source_counts: Mapping[str, int] = field(default_factory=dict)
    sets: Mapping[str, OrderedSet] = field(default_factory=dict)
    relations: Mapping[str, CSR] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each entity."""
        return {entity: len(rows) for entity, rows in self.source_rows.items()}

    @property
    def source_rows(self) -> dict[str, IntArray]:
        """The source's row of each row, by entity."""
        rows = {self.entity: self.order}
        if self.cells is not None:
            rows["cell"] = self.cells.original_id
        rows |= {name: each.order for name, each in self.sets.items()}
        return rows | {name: each.edge_id for name, each in self.relations.items()}

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on disk, but for metadata and checksums (well below 2 %)."""
        total = 1
        for array in self.index_arrays():
            num = len(array.values) if array.rows is None else len(array.rows)
            total += num * math.prod(array.values.shape[1:]) * np.dtype(array.dtype or array.values.dtype).itemsize
        for data in self.fields:
            row = math.prod(data.shape) // max(1, data.shape[data.info.entity_dim]) * np.dtype(data.info.dtype).itemsize
            total += row * len(self.rows_of(data))
        return total

    def index_arrays(self) -> Iterator[_Indexed]:
        """Yield the arrays besides fields and blocks."""
        yield _Indexed(f"{self.entity}/original_id", self.order, (self.entity,))
        if self.pos is not None:
            yield _Indexed(f"{self.entity}/pos", self.pos, (self.entity, "xyz"), rows=self.order)
        cells = self.cells
        if cells is not None:
            dtype = id_dtype(len(self.order))  # half the bytes to read
            yield _Indexed("cell/connectivity", cells.connectivity, ("corner",), is_list=True, dtype=dtype)
            yield _Indexed("cell/offsets", cells.offsets, ("cell_edge",))
            yield _Indexed("cell/type", cells.cell_type, ("cell",))
            yield _Indexed("cell/original_id", cells.original_id, ("cell",))
            yield _Indexed("cell/indptr", cells.indptr, (f"{self.entity}_edge",))
        for name, one in self.sets.items():
            yield _Indexed(f"{name}/indptr", one.indptr, ("joint_edge",))
            yield _Indexed(f"{name}/original_id", one.order, (name,))
            if one.pos is not None:
                yield _Indexed(f"{name}/pos", one.pos, (name, "xyz"), rows=one.order)
        for name, edges in self.relations.items():
            folder, targets = folder_of_edges(name), self.entity if name == "edge" else name
            yield _Indexed(f"{folder}/indptr", edges.indptr, (f"{targets}_edge",))
            yield _Indexed(f"{folder}/src", edges.src, (name,), is_list=True)
            yield _Indexed(f"{folder}/edge_id", edges.edge_id, (name,), is_list=True)

    def rows_of(self, data: FieldData) -> IntArray:
        """Return the source's row of each stored row of a field."""
        rows = self.source_rows.get(data.info.entity) if data.rows is None else data.rows
        if rows is not None:
            return rows
        entity = data.info.entity
        raise ConfigError(f"sample {self.name}: a field lives on {entity!r}, but there are {', '.join(self.counts)}")


def search_space(pos: Array, *, on_sphere: bool) -> FloatArray:
    """Return positions in which distances are Euclidean: longitude, latitude (, height) in degrees go to the unit
    sphere, without the height."""
    return unit_sphere(pos[:, :2]) if on_sphere else np.asarray(pos, np.float64)


def write_sample(
    store: str,
    sample: OrderedSample,
    *,
    max_field_bytes: int = MAX_FIELD_BYTES,
    tick: Callable[[float], None] | None = None,
    journal: Journal | None = None,
) -> SampleInfo:
    """Write one sample into the folder ``store``; it appears there whole, under its final name, or not at all.

    Memory: the sample's order, positions, edges and cells; one field of up to ``max_field_bytes`` (larger ones go
    through a scratch folder beside the sample); a few copies of a shard of 32 MiB.

    - ``tick``: called after every shard with the share of the sample that it was; the shares add up to 1.
    - ``journal``: of steps in the scratch folder, to which each array is one more.

    Raises ConfigError: a field with the name of one of the store's own arrays, or on an entity that the sample lacks;
    OSError: also where the disk is full: files of this sample are removed.
    """
    _check_names(sample)
    final = os.path.join(store, folder_of(sample.index))
    temporary = os.path.join(store, f".tmp-{folder_of(sample.index)}")
    scratch = scratch_of(store, sample.index)
    journal = journal or Journal(None, "")
    journal.step("nothing is written yet", lambda: remove(temporary))
    if journal.folder is None:  # else the folder is the journal's, with the spools of the sample
        remove(scratch)
        os.makedirs(scratch, mode=0o700)
    try:
        with no_room_named(store, sample.index, sample.name):
            info = _SampleWriter(temporary, scratch, sample, max_field_bytes, tick, journal).write()
            sync_folder(temporary)
            os.rename(temporary, final)
            remove(scratch)
            sync(store)
    except BaseException as e:
        if journal.folder is None or isinstance(e, Exception):  # else it is interrupted, and may go on
            remove(temporary, scratch)
        raise
    return info


@contextlib.contextmanager
def no_room_named(store: str, index: int, name: str) -> Iterator[None]:
    """Say of errors of a full disk which sample they came with, and what to do."""
    try:
        yield
    except OSError as e:
        if e.errno not in _NO_ROOM:
            raise
        problem, remedy = _NO_ROOM[e.errno]
        raise OSError(
            e.errno,
            f"{problem} while writing sample {index} ({name}); the samples before it are whole: {remedy} and run again "
            "with --resume, or write to another disk",
            store,
        ) from e


def scratch_of(store: str, index: int) -> str:
    """Return the folder of what does not fit in memory while a sample is made; it goes when the sample is written."""
    return os.path.join(store, f".tmp-{folder_of(index)}.scratch")


def _check_names(sample: OrderedSample) -> None:
    """Refuse fields that cannot be arrays of the sample's group, or not all of them at once."""
    paths = {data.info.path for data in sample.fields}
    own = {array.path for array in sample.index_arrays()} | {f"{name}/pos" for name in (sample.entity, *sample.sets)}
    seen: set[str] = set()
    for data in sample.fields:
        info = data.info
        parts = info.name.split("/")
        above = next((p for p in itertools.accumulate(info.path.split("/")[:-1], "{}/{}".format) if p in paths), None)
        if info.path in seen:
            why = "comes twice"
        elif f"{info.entity}/{parts[0]}" in own:
            why = "comes with the name of one of the store's own arrays"
        elif above is not None:
            why = f"lies inside another one, {above!r}"
        elif any(part in _NO_NAMES or len(part.encode("utf-8", "replace")) > _LONGEST_NAME for part in parts):
            why = "has a name that cannot be that of a folder"
        elif _NO_CHARACTERS.search(info.name):
            why = "has a name that Zarr cannot hold, with a backslash, a NUL or what is no UTF-8"
        else:
            seen.add(info.path)
            continue
        raise ConfigError(
            f"sample {sample.name}: field {info.name[:200]!a} on {info.entity} {why}; leave it out, or rename it in "
            "the source"
        )


class _SampleWriter:
    def __init__(
        self,
        folder: str,
        scratch: str,
        sample: OrderedSample,
        max_field_bytes: int,
        tick: Callable[[float], None] | None,
        journal: Journal,
    ) -> None:
        self._folder, self._scratch, self._sample, self._max_bytes = folder, scratch, sample, max_field_bytes
        self._tick, self._total, self._done, self._journal = tick, sample.nbytes, 0.0, journal
        self._arrays: dict[str, ArrayInfo] = {}
        self._statistics: dict[str, StoredMoments] = {}
        self._checksums: dict[str, Checksums] = {}

    def write(self) -> SampleInfo:
        import zarr

        sample = self._sample
        self._group = zarr.open_group(self._folder, mode="a", zarr_format=3)
        if self._journal.is_resumed:  # a kill may have left half of Zarr's metadata, under a name of its own
            halves = glob.glob(os.path.join(glob.escape(self._folder), "**", "*.partial"), recursive=True)
            remove(*halves, os.path.join(self._folder, CHECKSUMS))
        for array in sample.index_arrays():
            self._put(array)
        bbox = self._write_blocks()
        for data in sample.fields:
            self._write_field(data)
        self._arrays[CHECKSUMS] = write_checksums(self._group, self._checksums)
        info = SampleInfo(
            **sample.head(),
            folder=folder_of(sample.index),
            counts=sample.counts,
            source_counts={**sample.counts, **sample.source_counts},
            bbox=bbox,
            block_space=None if sample.pos is None else ("unit_sphere" if sample.on_sphere else "pos"),
            arrays=self._arrays,
            fields={data.info.path: data.info for data in sample.fields},
            statistics=self._statistics,
            ghosts=self._journal.step("ghosts", self._count_ghosts),
            documents=digest_documents(self._folder, self._arrays),
        )
        with open(os.path.join(self._folder, "zarr.json"), "w", encoding="utf-8") as file:
            file.write(sample_document(info))
        if self._tick is not None:
            self._tick(1.0 - self._done)
        return info

    def _wrote(self, num_bytes: int) -> None:
        if self._tick is not None:
            share = min(num_bytes / self._total, 1.0 - self._done)  # the size is an estimate
            self._done += share
            self._tick(share)

    def _put(self, array: _Indexed) -> None:
        values, rows = array.values, array.rows
        read: Any = values.__getitem__ if rows is None else lambda box: values[rows[box[0]], *box[1:]]
        if isinstance(values, Spool) and rows is not None:
            layout = {"source_shape": values.shape, "dtype": values.dtype, "entity_dim": 0}
            read = self._reordered(values.__getitem__, rows, **layout)
        self._write_array(
            array.path,
            read,
            shape=values.shape if rows is None else (len(rows), *values.shape[1:]),
            dtype=array.dtype or values.dtype,
            dims=array.dims,
            attributes={"units": "degrees"} if self._sample.on_sphere and array.path.endswith("/pos") else {},
            chunk_rows=_LIST_CHUNK_ROWS if array.is_list else CHUNK_ROWS,
        )

    def _write_array(
        self, path: str, read: Callable[[tuple[slice, ...]], Array], statistics: RunningStatistics | None = None,
        **layout: Any,
    ) -> None:  # fmt: skip
        sums: dict[str, Checksums] = {}
        done = self._done

        def write() -> tuple[dict[str, Any], Checksums, dict[str, Any] | None]:
            remove(os.path.join(self._folder, path))  # half of it, of a run that was killed
            how = {"tick": self._wrote, "checksums": sums, "statistics": statistics, **layout}
            info = write_array(self._group, path, read, **how)
            remove(os.path.join(self._scratch, "field"))
            if self._journal.folder is not None:
                sync_folder(os.path.join(self._folder, path))
            return vars(info), sums[path], None if statistics is None else vars(statistics.result())

        info, self._checksums[path], figures = self._journal.step(path, write)
        self._arrays[path] = ArrayInfo(**info)
        if figures is not None:
            self._statistics[path] = StoredMoments(**figures)
        if self._done == done:  # an earlier run has written it
            self._wrote(math.prod(info["shape"]) * np.dtype(info["dtype"]).itemsize)

    def _write_blocks(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Write the costs and bounding boxes of blocks; return the bounding box of all."""
        sample, order = self._sample, self._sample.order
        marks = np.append(np.arange(0, len(order), BLOCK_ROWS), len(order))
        prefix = marks.astype(np.float64)
        if sample.weights is not None:
            prefix = np.concatenate([[0.0], np.cumsum(sample.weights[order[:]])])[marks]
        self._put(_Indexed("blocks/weight_prefix", prefix, ("block_edge",)))
        if (cells := sample.cells) is not None:
            found = touched_blocks(cells.offsets, cells.connectivity.__getitem__, len(order))
            self._put(_Indexed("blocks/touched_indptr", found[0], ("block_edge",)))
            self._put(_Indexed("blocks/touched_by", found[1], ("touching",)))
        if sample.pos is None:
            return None
        pos: Any = sample.pos
        stored: Any = self._group[f"{sample.entity}/pos"] if isinstance(pos, Spool) else None
        read = (lambda rows: pos[order[rows]]) if stored is None else stored.__getitem__
        boxes = _block_boxes(read, len(order), on_sphere=sample.on_sphere)
        self._put(_Indexed("blocks/bbox", boxes, ("block", "corner", "xyz")))
        if not len(order):
            return None
        boxes = _block_boxes(read, len(order), on_sphere=False) if sample.on_sphere else boxes
        return tuple(boxes[:, 0].min(axis=0).tolist()), tuple(boxes[:, 1].max(axis=0).tolist())

    def _count_ghosts(self) -> GhostCounts:
        """Count the sources of edges, and corners of cells, that equal parts have of each other."""
        edges, cells = self._sample.relations.get("edge"), self._sample.cells
        lists = [] if edges is None else [([edges.indptr], edges.src)]
        lists += [] if cells is None else [([cells.indptr, cells.offsets], cells.connectivity)]

        def needed(first: int, last: int) -> AnyArray:
            rows = []
            for pointers, values in lists:
                start, stop = first, last
                for each in pointers:
                    start, stop = (int(each[at : at + 1][0]) for at in (start, stop))
                rows.append(values[start:stop])
            return np.concatenate(rows)

        return count_ghosts(len(self._sample.order), needed) if lists else {}

    def _write_field(self, data: FieldData) -> None:
        info, order = data.info, self._sample.rows_of(data)
        dim, dtype = info.entity_dim, np.dtype(info.dtype)
        shape = (*data.shape[:dim], len(order), *data.shape[dim + 1 :])
        statistics = None
        if dtype.kind in "fiub":
            components = int(np.prod(shape[dim + 1 :])) if shape[dim + 1 :] else None
            statistics = RunningStatistics(components)
        read = self._reordered(data.read, order, source_shape=data.shape, dtype=dtype, entity_dim=dim)
        said = plain({**info.attributes, **({} if info.units is None else {"units": info.units})})
        dims = info.dims  # tables of points, which are read as such, too, have their rows along one
        dims = (*dims[:dim], info.entity, *dims[dim + 1 :]) if self._sample.kind == "points" else dims
        layout = {"dims": dims, "entity_dim": dim, "attributes": said}
        self._write_array(info.path, read, statistics, shape=shape, dtype=dtype, **layout)

    def _reordered(self, read: Callable[[tuple[slice, ...]], Array], order: IntArray, **layout: Any) -> Reordered:
        return Reordered(read, order, scratch=os.path.join(self._scratch, "field"), max_bytes=self._max_bytes, **layout)


def touched_blocks(offsets: IntArray, nodes: Callable[[slice], AnyArray], num_rows: int) -> tuple[IntArray, IntArray]:
    """Return for each block of nodes, as CSR, the blocks before it that own cells which have nodes in it, ascending."""
    num_blocks, num_cells = -(-num_rows // BLOCK_ROWS), len(offsets) - 1
    found = [np.empty(0, np.int64)]
    for first in range(0, num_cells, _CELLS):
        starts = offsets[first : min(first + _CELLS, num_cells) + 1]
        block = nodes(slice(int(starts[0]), int(starts[-1]))) // BLOCK_ROWS
        own = np.repeat(np.minimum.reduceat(block, starts[:-1] - starts[0]), np.diff(starts))
        others = block != own
        found.append(np.unique(block[others].astype(np.int64) * num_blocks + own[others]))
    keys = np.unique(np.concatenate(found))
    return np.searchsorted(keys, np.arange(num_blocks + 1) * num_blocks), keys % max(num_blocks, 1)


def _block_boxes(read: Callable[[slice], Array], num_rows: int, *, on_sphere: bool) -> FloatArray:
    """Return ``(num_blocks, 2, ndim)`` lower and upper corners of runs of ``BLOCK_ROWS`` rows, in search space."""
    step, boxes = 1024 * BLOCK_ROWS, []
    for first in range(0, num_rows or 1, step):
        points = search_space(read(slice(first, min(first + step, num_rows))), on_sphere=on_sphere)
        starts = np.arange(0, len(points), BLOCK_ROWS)
        boxes.append(np.stack([np.minimum.reduceat(points, starts), np.maximum.reduceat(points, starts)], axis=1))
    return np.concatenate(boxes)
