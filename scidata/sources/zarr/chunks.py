"""Where the bytes of each chunk of a Zarr array lie: whole files, or ranges that the index of a shard names."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from scidata.core.cache import Cache
from scidata.core.types import ChunkRefs, IntArray
from scidata.core.urls import Url
from scidata.errors import ConfigError, CorruptDataError, ShortReadError, TooLargeError
from scidata.sources.access.fetches import run_each
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.shards import read_index
from scidata.sources.zarr.tree import Tree

_SIZES_PER_BLOCK = 4096  # sizes of chunk files are cached in runs of the flattened chunk grid
_FEW = 32  # chunks that are found one by one in less time than NumPy's calls take
_UNKNOWN = -2
_MAX_SIZE_BYTES = 2**24
_MAX_INDEX_BYTES = 2**26
_MAX_FILES = 2**20  # of one array that are looked for at once: a second or two, and more on a network
_MANY_FILES = 2**16  # looked for one by one sooner than a folder is listed, however many files it has


class ChunkLocator:
    """Finds the chunks of a store's arrays; remembers sizes of files and indexes of shards, as far as is bounded."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._sizes: Cache[IntArray] = Cache(_MAX_SIZE_BYTES, "lru")
        self._indexes: Cache[IntArray] = Cache(_MAX_INDEX_BYTES, "lru")

    def locate(self, record: ArrayRecord, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks, ``(num, ndim)`` int64 coordinates: see :meth:`ZarrSource.locate`."""
        if record.index is None and len(chunks) <= _FEW and (refs := self._locate_few(record, chunks)) is not None:
            return refs
        coordinates = checked_coordinates(record, chunks)
        return self._locate_sharded(record, coordinates) if record.index else self._locate_files(record, coordinates)

    def _locate_few(self, record: ArrayRecord, chunks: IntArray) -> ChunkRefs | None:
        """Find a few chunks whose sizes are right; None where there is another one, or anything to say."""
        layout, expected = record.layout, record.fixed_nbytes
        grid = layout.num_chunks
        if chunks.ndim != 2 or chunks.shape[1] != len(grid):
            return None
        keys: list[str] = []
        sizes: list[int] = []
        unknown: list[tuple[int, int]] = []
        known, block = None, -1
        for chunk in chunks.tolist():
            number = 0
            for c, n in zip(chunk, grid, strict=True):
                if not 0 <= c < n:
                    return None
                number = number * n + c
            if number // _SIZES_PER_BLOCK != block:
                block = number // _SIZES_PER_BLOCK
                known = self._sizes.get((record.prefix, block))
            size = _UNKNOWN if known is None else int(known[number % _SIZES_PER_BLOCK])
            if size == _UNKNOWN:
                unknown.append((len(keys), number))
            keys.append(record.key(chunk))
            sizes.append(size)
        if unknown:
            found = self._tree.sizes([keys[i] for i, _ in unknown]).tolist()
            for (i, number), size in zip(unknown, found, strict=True):
                sizes[i] = self._known(record, number // _SIZES_PER_BLOCK)[number % _SIZES_PER_BLOCK] = size
        if min(sizes, default=1) <= 0 or (expected is not None and set(sizes) - {expected}):
            return None
        return ChunkRefs(
            paths=tuple(map(str, map(self._tree.location, keys))),
            path_index=np.arange(len(keys)),
            offset=np.zeros(len(keys), np.int64),
            nbytes=np.array(sizes, np.int64),
        )

    def _locate_files(self, record: ArrayRecord, coordinates: IntArray) -> ChunkRefs:
        sizes = self._sizes_of(record, coordinates)
        present = sizes >= 0
        keys = record.keys(coordinates[present])
        refs = ChunkRefs(
            paths=tuple(str(self._tree.location(key)) for key in keys),
            path_index=np.where(present, np.cumsum(present) - 1, -1),
            offset=np.zeros(len(sizes), np.int64),
            nbytes=np.maximum(sizes, 0),
        )
        check_sizes(record, coordinates, sizes, refs)
        return refs

    def _locate_sharded(self, record: ArrayRecord, coordinates: IntArray) -> ChunkRefs:
        per_shard = tuple(s // c for s, c in zip(record.file_shape, record.layout.chunks, strict=True))
        shards, inside = np.divmod(coordinates, np.array(per_shard, np.int64))
        inner = flattened(inside, per_shard)
        groups = list(grouped(flattened(shards, record.num_files)))
        firsts = np.array([rows[0] for _, rows in groups], np.int64)
        numbers = np.array([number for number, _ in groups], np.int64)
        entries = np.full((len(coordinates), 2), -1, np.int64)
        path_index = np.full(len(coordinates), -1, np.int64)
        paths: list[str] = []
        for (path, table), (_, rows) in zip(self._indexes_of(record, shards[firsts], numbers), groups, strict=True):
            if table is None:
                continue
            entries[rows] = table[inner[rows]]
            path_index[rows] = np.where(entries[rows, 0] >= 0, len(paths), -1)
            paths.append(str(path))
        refs = ChunkRefs(
            paths=tuple(paths),
            path_index=path_index,
            offset=np.maximum(entries[:, 0], 0),
            nbytes=np.maximum(entries[:, 1], 0),
        )
        check_sizes(record, coordinates, entries[:, 1], refs)
        return refs

    def _indexes_of(self, record: ArrayRecord, shards: IntArray, linear: IntArray) -> list[tuple[str, IntArray | None]]:
        """Return path and index of each shard; None where there is no such file."""
        assert record.index is not None
        spec = record.index
        sizes = self._sizes_of(record, shards)
        paths = list(map(self._tree.location, record.keys(shards)))

        def load(position: int) -> IntArray | None:
            if sizes[position] < 0:
                return None
            key = (record.prefix, int(linear[position]))
            table = self._indexes.get(key)
            if table is None:
                table = read_index(paths[position], int(sizes[position]), spec)
                self._indexes.put(key, table, table.nbytes)
            return table

        if len(paths) > 1 and isinstance(paths[0], Url):  # all latency
            return list(zip(paths, run_each([functools.partial(load, i) for i in range(len(paths))]), strict=True))
        return [(path, load(i)) for i, path in enumerate(paths)]

    def _sizes_of(self, record: ArrayRecord, coordinates: IntArray) -> IntArray:
        """Return the size of each file, -1 where absent, through the cache."""
        linear = flattened(coordinates, record.num_files)
        sizes = np.full(len(linear), _UNKNOWN, np.int64)
        for block, rows in grouped(linear // _SIZES_PER_BLOCK):
            known = self._sizes.get((record.prefix, block))
            if known is not None:
                sizes[rows] = known[linear[rows] % _SIZES_PER_BLOCK]
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
        there = missing[self._are_listed(record, linear[missing])] if len(missing) > _MANY_FILES else missing
        sizes[missing] = -1
        sizes[there] = self._tree.sizes(record.keys(coordinates[there]))
        for block, rows in grouped(linear[missing] // _SIZES_PER_BLOCK):
            self._known(record, block)[linear[missing[rows]] % _SIZES_PER_BLOCK] = sizes[missing[rows]]
        return sizes

    def _known(self, record: ArrayRecord, block: int) -> IntArray:
        """Return the sizes of a run of the flattened grid that are known, to be added to."""
        known = self._sizes.get((record.prefix, block))
        if known is None:
            known = np.full(_SIZES_PER_BLOCK, _UNKNOWN, np.int64)
            self._sizes.put((record.prefix, block), known, known.nbytes)
        return known

    def _are_listed(self, record: ArrayRecord, linear: IntArray) -> npt.NDArray[np.bool_]:
        """Say of which files there is a name in the array's folder: of most of so many there is none."""
        names = self._tree.names(record.prefix, lambda name: name.isdecimal() or name == record.key_start)
        if names is None:
            return np.ones(len(linear), np.bool_)
        found = [place for name in names if (place := record.coordinate_of(name)) is not None]
        return np.isin(
            linear, flattened(np.array(found, np.int64).reshape(-1, len(record.num_files)), record.num_files)
        )


def checked_coordinates(record: ArrayRecord, chunks: IntArray) -> IntArray:
    """Return chunk coordinates, or raise ConfigError where some lie outside the grid."""
    layout, grid, coordinates = record.layout, record.grid, np.asarray(chunks, np.int64)
    if coordinates.ndim != 2 or coordinates.shape[1] != len(grid):
        raise ConfigError(f"chunk coordinates must have shape (num, {len(grid)}), not {coordinates.shape}")
    if (coordinates < 0).any() or (coordinates >= grid).any():
        raise ConfigError(f"{layout.store}: array {layout.name!r} has a grid of {tuple(grid)} chunks; some lie outside")
    return coordinates


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
    """Check encoded sizes (-1: absent) against what the codecs can have given."""
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
