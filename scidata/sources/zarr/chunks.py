"""Where the bytes of each chunk of a Zarr array lie: whole files, or ranges that the index of a shard names."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ChunkRefs, FindChunk, IntArray
from scidata.core.urls import Url, is_url
from scidata.errors import ConfigError, CorruptDataError, ShortReadError, TooLargeError
from scidata.sources.access.fetches import run_each
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.shards import first_index, read_index
from scidata.sources.zarr.tree import LocalTree, Tree

_SIZES_PER_BLOCK = 4096  # sizes of chunk files are cached in runs of the flattened chunk grid
_UNKNOWN = -2
_MAX_SIZE_BYTES = 2**24
_MAX_INDEX_BYTES = 2**26
_MAX_FILES = 2**20  # of one array that are looked for at once: two seconds, and more on a network


@dataclass(kw_only=True)
class FileRanges:
    """Where chunks, or their files, lie: as in :class:`ChunkRefs`, with -1 bytes if missing."""

    paths: list[str]
    path_index: IntArray
    offset: IntArray
    nbytes: IntArray

    @classmethod
    def nowhere(cls, paths: list[str], num: int) -> FileRanges:
        """Return places that are yet to be filled in."""
        return cls(paths=paths, **{name: np.full(num, -1, np.int64) for name in ("path_index", "offset", "nbytes")})


class Locator(ABC):
    """Finds the chunks of a store's arrays; remembers indexes of shards, as far as is bounded."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._indexes: Cache[IntArray] = Cache(_MAX_INDEX_BYTES, "lru")

    @abstractmethod
    def find_files(self, record: ArrayRecord, coordinates: IntArray) -> FileRanges:
        """Find files of an array (chunks, or shards) by their coordinates."""

    def access(self, record: ArrayRecord) -> dict[str, Any]:
        """Return where zarr-python finds an array."""
        where = self._tree.location(record.prefix)
        options = {"storage_options": copy.deepcopy(dict(where.options)) or None} if isinstance(where, Url) else {}
        return {"store": where.target if isinstance(where, Url) else where, **options}

    def expect(self, record: ArrayRecord, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks for a read, which may tell whether they are there: see :meth:`ZarrSource.expect`."""
        return self.locate(record, chunks)

    def opened(self, path: str) -> str:
        """Return the path or bound URL that opens a path of :meth:`find_files`."""
        return path

    def locate(self, record: ArrayRecord, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks, ``(num, ndim)`` int64 coordinates: see :meth:`ZarrSource.locate`."""
        coordinates = checked_coordinates(record, chunks)
        found = self._find_in_shards(record, coordinates) if record.index else self.find_files(record, coordinates)
        refs = _refs(found)
        check_sizes(record, coordinates, found.nbytes, refs)
        return refs

    def finder(self, record: ArrayRecord) -> FindChunk | None:
        """Return the function that finds one chunk, where that takes no request."""
        return None

    def _find_in_shards(self, record: ArrayRecord, coordinates: IntArray) -> FileRanges:
        per_shard = record.per_file
        shards, inside = np.divmod(coordinates, np.array(per_shard, np.int64))
        inner = flattened(inside, per_shard)
        groups = list(grouped(flattened(shards, record.num_files)))
        files = self.find_files(record, shards[np.array([rows[0] for _, rows in groups], np.int64)])
        there = np.flatnonzero(files.nbytes >= 0).tolist()
        calls = [functools.partial(self._index_of, record, files, i, groups[i][0]) for i in there]
        is_remote = any(map(is_url, files.paths))  # all latency
        found = FileRanges.nowhere(files.paths, len(coordinates))
        for i, table in zip(there, run_each(calls) if is_remote else [call() for call in calls], strict=True):
            rows = groups[i][1]
            begin, found.nbytes[rows] = table[inner[rows]].T
            found.path_index[rows] = np.where(begin >= 0, files.path_index[i], -1)
            found.offset[rows] = begin + files.offset[i]
        return found

    def _index_of(self, record: ArrayRecord, files: FileRanges, i: int, number: int) -> IntArray:
        assert record.index is not None
        key = record.prefix, number
        table = self._indexes.get(key)
        if table is None:
            path = self.opened(files.paths[files.path_index[i]])
            table = read_index(path, int(files.nbytes[i]), record.index, int(files.offset[i]))
            self._indexes.put(key, table, table.nbytes)
        return table


class ChunkLocator(Locator):
    """Finds chunks whose files lie in the store's own tree; remembers their sizes, as far as is bounded."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._sizes: Cache[IntArray] = Cache(_MAX_SIZE_BYTES, "lru")

    def finder(self, record: ArrayRecord) -> FindChunk | None:
        """Return the function that finds one chunk of a local store, and opens its file: it is read next."""
        tree, grid, expected = self._tree, record.layout.num_chunks, record.fixed_nbytes
        if not isinstance(tree, LocalTree) or record.layout.fallback or record.layout.edges:
            return None
        if record.index is not None:
            return functools.partial(self._find_inside, record)
        path = f"{tree.location('').replace('%', '%%')}/{record.key_template}"
        path = (path % tuple(["\0" if n > 1 else "0" for n in grid])).replace("%", "%%").replace("\0", "%s")
        cut = [n for n in grid if n > 1]
        open_size, last = tree.open_size, (-1, np.empty(0, np.int64))

        def find(number: int) -> tuple[str, int, int] | None:
            nonlocal last
            name = path % (number if len(cut) == 1 else _coordinates_of(number, cut))
            (block, at), known = divmod(number, _SIZES_PER_BLOCK), last
            if block != known[0]:  # block and sizes in one, as threads share them
                known = last = block, self._known(record, block)
            sizes = known[1]
            size = sizes.item(at)
            if size == _UNKNOWN:
                size = sizes[at] = open_size(name)
            return (name, 0, size) if size > 0 and expected in (None, size) else None

        return find

    def _find_inside(self, record: ArrayRecord, number: int) -> tuple[str, int, int] | None:
        """Find a chunk in its shard; None if the shard's index has not been read."""
        file, shard, inner, expected = list[int](), 0, 0, record.fixed_nbytes
        chunk = _coordinates_of(number, record.layout.num_chunks)
        for c, per, n in zip(chunk, record.per_file, record.num_files, strict=True):
            file.append(c // per)
            shard, inner = shard * n + c // per, inner * per + c % per
        table = self._indexes.get((record.prefix, shard))
        begin, size = (-1, -1) if table is None else table[inner].tolist()
        return (self._tree.location(record.key(file)), begin, size) if size > 0 and expected in (None, size) else None

    def expect(self, record: ArrayRecord, chunks: IntArray) -> ChunkRefs:
        """Name the files of chunks; only those that are not there, as is known, are absent."""
        if record.index is not None or record.layout.edges or not self._tree.reads_tell or len(chunks) > _MAX_FILES:
            return self.locate(record, chunks)
        coordinates = checked_coordinates(record, chunks)
        sizes = self._known_sizes(record, flattened(coordinates, record.num_files))
        if not (sizes == _UNKNOWN).any():
            return self.locate(record, chunks)
        sizes[sizes == _UNKNOWN] = record.fixed_nbytes or 0
        found = self._places(record, coordinates, sizes)
        check_sizes(record, coordinates, np.where(sizes == 0, -1, sizes), refs := _refs(found))
        return replace(refs, unseen=True)

    def note_absent(self, record: ArrayRecord, chunk: IntArray) -> None:
        """Take in that a read has found no chunk."""
        number = int(flattened(chunk.reshape(1, -1), record.num_files)[0])
        self._known(record, number // _SIZES_PER_BLOCK)[number % _SIZES_PER_BLOCK] = -1

    def find_files(self, record: ArrayRecord, coordinates: IntArray) -> FileRanges:
        """Find files of an array (chunks, or shards) by their coordinates."""
        if record.index is not None and self._tree.reads_tell:
            self._read_indexes(record, coordinates)
        return self._places(record, coordinates, self._sizes_of(record, coordinates))

    def _places(self, record: ArrayRecord, coordinates: IntArray, sizes: IntArray) -> FileRanges:
        present = sizes >= 0
        return FileRanges(
            paths=list(map(self._tree.location, record.keys(coordinates[present]))),
            path_index=np.where(present, np.cumsum(present) - 1, -1),
            offset=np.zeros(len(sizes), np.int64),
            nbytes=sizes,
        )

    def _read_indexes(self, record: ArrayRecord, shards: IntArray) -> None:
        """Read the indexes of shards about which nothing is known yet: the answers tell their sizes, too."""
        linear = flattened(shards, record.num_files)
        missing = np.flatnonzero(self._known_sizes(record, linear) == _UNKNOWN)
        if len(missing) > _MAX_FILES:
            return

        def read(row: int) -> None:
            assert record.index is not None
            number, size = int(linear[row]), -1
            path = self._tree.location(record.key(shards[row].tolist()))
            with contextlib.suppress(FileNotFoundError):
                size, table = first_index(path, record.index)
                self._indexes.put((record.prefix, number), table, table.nbytes)
            self._known(record, number // _SIZES_PER_BLOCK)[number % _SIZES_PER_BLOCK] = size

        run_each([functools.partial(read, row) for row in missing.tolist()])

    def _known_sizes(self, record: ArrayRecord, linear: IntArray) -> IntArray:
        sizes = np.full(len(linear), _UNKNOWN, np.int64)
        for block, rows in grouped(linear // _SIZES_PER_BLOCK):
            known = self._sizes.get((record.prefix, block))
            if known is not None:
                sizes[rows] = known[linear[rows] % _SIZES_PER_BLOCK]
        return sizes

    def _sizes_of(self, record: ArrayRecord, coordinates: IntArray) -> IntArray:
        linear = flattened(coordinates, record.num_files)
        sizes = self._known_sizes(record, linear)
        missing = np.flatnonzero(sizes == _UNKNOWN)
        if len(missing) == 0:
            return sizes
        if len(missing) > _MAX_FILES:
            layout = record.layout
            raise TooLargeError(
                f"{layout.store}: array {layout.name!r} of shape {layout.shape} has its chunks in files of shape "
                f"{record.file_shape}: {len(missing)} at once are too many to be looked for (at most {_MAX_FILES}); "
                "its metadata are damaged, or write it with larger chunks or shards, or read less at once"
            )
        sizes[missing] = self._tree.sizes(record.keys(coordinates[missing]))
        for block, rows in grouped(linear[missing] // _SIZES_PER_BLOCK):
            self._known(record, block)[linear[missing[rows]] % _SIZES_PER_BLOCK] = sizes[missing[rows]]
        return sizes

    def _known(self, record: ArrayRecord, block: int) -> IntArray:
        known = self._sizes.get((record.prefix, block))
        if known is None:
            known = np.full(_SIZES_PER_BLOCK, _UNKNOWN, np.int64)
            self._sizes.put((record.prefix, block), known, known.nbytes)
        return known


def _refs(found: FileRanges) -> ChunkRefs:
    return ChunkRefs(
        paths=tuple(map(str, found.paths)),
        path_index=found.path_index,
        offset=np.maximum(found.offset, 0),
        nbytes=np.maximum(found.nbytes, 0),
    )


def checked_coordinates(record: ArrayRecord, chunks: IntArray) -> IntArray:
    """Return chunk coordinates, or raise ConfigError where some lie outside the grid."""
    layout, grid, coordinates = record.layout, record.grid, np.asarray(chunks, np.int64)
    if coordinates.ndim != 2 or coordinates.shape[1] != len(grid):
        raise ConfigError(f"chunk coordinates must have shape (num, {len(grid)}), not {coordinates.shape}")
    if (coordinates < 0).any() or (coordinates >= grid).any():
        raise ConfigError(f"{layout.store}: array {layout.name!r} has a grid of {tuple(grid)} chunks; some lie outside")
    return coordinates


def _coordinates_of(number: int, grid: Sequence[int]) -> tuple[int, ...]:
    coordinates = []
    for n in reversed(grid):
        number, at = divmod(number, n)
        coordinates.append(at)
    return tuple(reversed(coordinates))


def flattened(coordinates: IntArray, grid: tuple[int, ...]) -> IntArray:
    """Flatten coordinates in C order; unlike ``ravel_multi_index``, also of no dimensions."""
    strides = np.array([math.prod(grid[i + 1 :]) for i in range(len(grid))], np.int64)
    linear: IntArray = coordinates @ strides
    return linear


def grouped(ids: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yield each distinct id with the rows that have it."""
    if len(ids) and (ids == ids[0]).all():
        yield int(ids[0]), np.arange(len(ids))
        return
    order = np.argsort(ids, kind="stable")
    distinct, starts = np.unique(ids[order], return_index=True)
    yield from zip(distinct.tolist(), np.split(order, starts[1:]), strict=True) if len(ids) else ()


def check_sizes(record: ArrayRecord, coordinates: IntArray, sizes: IntArray, refs: ChunkRefs) -> None:
    """Check encoded sizes (-1: absent) against the sizes that the codecs allow."""
    expected = record.fixed_nbytes
    wrong = (sizes == 0) if expected is None else (sizes >= 0) & (sizes != expected)
    if record.layout.fallback or not wrong.any():
        return
    row = int(np.flatnonzero(wrong)[0])
    path = refs.paths[refs.path_index[row]]
    error = ShortReadError if expected is None or sizes[row] < expected else CorruptDataError
    raise error(
        f"{path}: chunk {tuple(coordinates[row].tolist())} of array {record.layout.name!r} has {sizes[row]} bytes, "
        f"but {'some' if expected is None else expected} were expected; "
        "the file is truncated or damaged: copy or write it again"
    )
