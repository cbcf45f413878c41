"""Finds the chunks of arrays by the tables of a set."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ChunkRefs, IntArray
from scidata.core.urls import Url, is_url
from scidata.errors import CorruptDataError
from scidata.sources.access.fetches import run_each
from scidata.sources.access.files import files
from scidata.sources.access.in_memory import InMemoryUrl
from scidata.sources.references.tables import WHOLE, Tables
from scidata.sources.references.targets import Targets
from scidata.sources.zarr.chunks import check_sizes, checked_coordinates, flattened, grouped
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.shards import read_index

INLINE = "inline://"
_MAX_INDEX_BYTES = 2**26
_MAX_SIZES = 1 << 16


@dataclass(kw_only=True)
class _Files:
    """Where chunk files lie: as :class:`ChunkRefs`, with -1 bytes where there is none."""

    paths: list[str]
    path_index: IntArray
    offset: IntArray
    nbytes: IntArray


class ReferenceLocator:
    """Finds chunks, and opens the paths that it gives."""

    def __init__(self, tables: Tables, targets: Targets, records: Iterable[ArrayRecord]) -> None:
        self._tables, self._targets = tables, targets
        self._records = {record.prefix: record for record in records}
        self._indexes: Cache[IntArray] = Cache(_MAX_INDEX_BYTES, "lru")
        self._sizes: Cache[int] = Cache(_MAX_SIZES, "lru")

    def locate(self, record: ArrayRecord, chunks: IntArray) -> ChunkRefs:
        """Find the bytes of chunks, ``(num, ndim)`` int64 coordinates."""
        coordinates = checked_coordinates(record, chunks)
        found = self._find_shards(record, coordinates) if record.index else self.find_files(record, coordinates)
        refs = ChunkRefs(
            paths=tuple(map(str, found.paths)),
            path_index=found.path_index,
            offset=np.maximum(found.offset, 0),
            nbytes=np.maximum(found.nbytes, 0),
        )
        check_sizes(record, coordinates, found.nbytes, refs)
        return refs

    def find_files(self, record: ArrayRecord, coordinates: IntArray) -> _Files:
        """Find files of an array (chunks, or shards) by their coordinates."""
        linear = flattened(coordinates, record.num_files)
        found = _Files(paths=[], **{n: np.full(len(linear), -1, np.int64) for n in ("path_index", "offset", "nbytes")})
        known: dict[str, int] = {}
        for table, asked in self._tables.find(record, linear):
            rows = table.rows(linear[asked])
            positions, rows = asked[rows >= 0], rows[rows >= 0]
            found.offset[positions] = table.offset[rows]
            found.nbytes[positions] = table.nbytes[rows]
            for target, each in grouped(table.target[rows]):
                if target >= 0:
                    path = self._targets.resolve(table.names[target])
                    found.path_index[positions[each]] = known.setdefault(path, len(known))
                    continue
                for row in each.tolist():
                    key = record.key(coordinates[positions[row]].tolist())
                    found.path_index[positions[row]] = known.setdefault(INLINE + key, len(known))
        found.paths = list(known)
        whole = np.flatnonzero((found.nbytes == WHOLE) & (found.path_index >= 0))
        for i, size in self._sizes_of(found.paths, set(found.path_index[whole].tolist())).items():
            found.nbytes[whole[found.path_index[whole] == i]] = size
        return found

    def places_of(self, record: ArrayRecord, coordinates: IntArray) -> tuple[tuple[str, ...], bytes]:
        """Return the files and URLs that chunk files lie in, and a digest of where; of what is in the set, its bytes.

        Without those that never change, which takes no round trip to know.
        """
        found, content = self.find_files(record, coordinates), hashlib.sha256()
        names = [path.identity if isinstance(path, Url) else path for path in found.paths]
        for coordinate, at, *place in zip(
            coordinates.tolist(), *(c.tolist() for c in (found.path_index, found.offset, found.nbytes)), strict=True
        ):
            content.update(repr((coordinate, names[at] if at >= 0 else None, place)).encode())
            if at >= 0 and names[at].startswith(INLINE):
                content.update(self.read(record, coordinate) or b"")
        lasting = self._tables.lasting
        paths = [path for path in found.paths if not path.startswith(INLINE)]
        changing = [p for p in paths if not (lasting and isinstance(p, Url) and p.target.startswith(lasting))]
        return tuple(changing), content.digest()

    def _sizes_of(self, paths: Sequence[str], which: Iterable[int]) -> dict[int, int]:
        """Return the sizes of some of the paths; those of URLs are asked for side by side."""
        each = sorted(which)
        calls = [functools.partial(self._size_of, paths[i]) for i in each]
        remote = any(is_url(paths[i]) for i in each)
        return dict(zip(each, run_each(calls) if remote else [call() for call in calls], strict=True))

    def _size_of(self, path: str) -> int:
        size = self._sizes.get(path)
        return self._sizes.put(path, files().size(path)) if size is None else size

    def _find_shards(self, record: ArrayRecord, coordinates: IntArray) -> _Files:
        per_shard = tuple(s // c for s, c in zip(record.file_shape, record.layout.chunks, strict=True))
        shards, inside = np.divmod(coordinates, np.array(per_shard, np.int64))
        inner = flattened(inside, per_shard)
        linear = flattened(shards, record.num_files)
        groups = [rows for _, rows in grouped(linear)]
        found = self.find_files(record, shards[[rows[0] for rows in groups]] if groups else shards)
        out = _Files(
            paths=found.paths, **{n: np.full(len(linear), -1, np.int64) for n in ("path_index", "offset", "nbytes")}
        )
        there = [i for i in range(len(groups)) if found.nbytes[i] >= 0]
        calls = [functools.partial(self._index_of, record, found, i, int(linear[groups[i][0]])) for i in there]
        urls = any(map(is_url, found.paths))
        tables = run_each(calls) if urls else [call() for call in calls]
        for i, table in zip(there, tables, strict=True):
            rows = groups[i]
            entries = table[inner[rows]]
            present = entries[:, 0] >= 0
            out.path_index[rows] = np.where(present, found.path_index[i], -1)
            out.offset[rows] = np.where(present, entries[:, 0] + found.offset[i], -1)
            out.nbytes[rows] = entries[:, 1]
        return out

    def _index_of(self, record: ArrayRecord, found: _Files, i: int, linear: int) -> IntArray:
        assert record.index is not None
        table = self._indexes.get((record.prefix, linear))
        if table is None:
            path = found.paths[found.path_index[i]]
            table = read_index(self._opened(path), int(found.nbytes[i]), record.index, int(found.offset[i]))
            self._indexes.put((record.prefix, linear), table, table.nbytes)
        return table

    # -- what opens the paths ----------------------------------------------------------------------------------------

    def bind(self, path: str) -> Url:
        """Return the function that opens a given path, beside URLs."""
        return self._held(path) if path.startswith(INLINE) else self._targets.bind(path)

    def _opened(self, path: str) -> str:
        return self.bind(path) if is_url(path) else path

    def _held(self, path: str) -> InMemoryUrl:
        """Return the function that gives the bytes of a chunk file in the set itself."""
        key = folder = path.removeprefix(INLINE)
        while folder and folder not in self._records:
            folder = folder.rpartition("/")[0]
        record = self._records.get(folder)
        place = None if record is None else record.place_of(key)
        if record is not None and place is not None:
            linear = flattened(np.array([place], np.int64).reshape(1, -1), record.num_files)
            for table, _ in self._tables.find(record, linear):
                (row,) = table.rows(linear).tolist()
                if row >= 0 and table.target[row] < 0:
                    return InMemoryUrl(path, functools.partial(_part_of, table.inline[-1 - int(table.target[row])]))
        raise CorruptDataError(f"{path}: is no chunk that is in the set itself")

    def read(self, record: ArrayRecord, coordinate: list[int]) -> bytes | None:
        """Read a whole chunk file, None where there is none."""
        found = self.find_files(record, np.array([coordinate], np.int64).reshape(1, -1))
        if found.path_index[0] < 0:
            return None
        path = found.paths[0]
        return bytes(files().read(self._opened(path), int(found.offset[0]), int(found.nbytes[0])))


def _part_of(data: bytes, offset: int, nbytes: int) -> bytes:
    return data[offset : offset + nbytes]
