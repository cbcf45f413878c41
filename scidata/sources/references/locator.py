"""Find the chunks of arrays by the tables of a reference set."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import IntArray
from scidata.core.urls import Url, is_url
from scidata.errors import CorruptDataError
from scidata.sources.access.fetches import run_each
from scidata.sources.access.files import files
from scidata.sources.access.kept_urls import KeptUrl, Reader
from scidata.sources.references.tables import WHOLE, Tables
from scidata.sources.references.targets import Targets
from scidata.sources.zarr.chunks import FileRanges, Locator, flattened, grouped
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.tree import Tree

INLINE = "inline://"
_MAX_SIZES = 1 << 16


class ReferenceLocator(Locator):
    """Finds chunks by the tables of a set, and opens the paths that it gives."""

    def __init__(self, tree: Tree, tables: Tables, targets: Targets, records: Iterable[ArrayRecord]) -> None:
        super().__init__(tree)
        self._tables, self._targets = tables, targets
        self._records = {record.prefix: record for record in records}
        self._sizes: Cache[int] = Cache(_MAX_SIZES, "lru")

    def access(self, record: ArrayRecord) -> dict[str, Any]:
        """Return where zarr-python finds an array: its documents and chunks, each read when it is asked for."""
        from zarr.core.buffer import Buffer, cpu
        from zarr.storage import MemoryStore

        tree, read = self._tree, self.read

        class Files(dict[str, Buffer]):
            def __missing__(self, key: str) -> Buffer:
                place = record.place_of(key)
                data = tree.get([key]).get(key) if place is None else read(record, place)
                if data is None:
                    raise KeyError(key)
                return cpu.Buffer.from_bytes(data)

        return {"store": MemoryStore(Files(), read_only=True), "path": record.prefix}

    def find_files(self, record: ArrayRecord, coordinates: IntArray) -> FileRanges:
        """Find files of an array (chunks, or shards) by their coordinates."""
        linear = flattened(coordinates, record.num_files)
        found = FileRanges.nowhere([], len(linear))
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
        """Return the files and URLs that chunk files lie in, and a digest of their places, or of inline bytes.

        Files that never change are left out, which takes no round trip to know.
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
        return self._sizes.get_or_make(path, lambda: files().size(path))

    # -- opening paths ----------------------------------------------------------------------------------------------

    def bind(self, path: str) -> Url:
        """Return the URL that reads a given path, beside URLs."""
        return self._held(path) if path.startswith(INLINE) else self._targets.bind(path)

    def opened(self, path: str) -> str:
        """Return the path or bound URL that opens a path of :meth:`find_files`."""
        return self.bind(path) if is_url(path) else path

    def _held(self, path: str) -> KeptUrl:
        """Return the URL that reads a chunk file in the set itself."""
        key = folder = path.removeprefix(INLINE)
        while folder and folder not in self._records:
            folder = folder.rpartition("/")[0]
        record = self._records.get(folder)
        place = None if record is None else record.place_of(key)
        if record is not None and place is not None:
            linear = flattened(np.array([place], np.int64).reshape(1, -1), record.num_files)
            rows = ((table, int(table.rows(linear)[0])) for table, _ in self._tables.find(record, linear))
            held = (t.inline[-1 - int(t.target[row])] for t, row in rows if row >= 0 and t.target[row] < 0)
            if (data := next(held, None)) is not None:
                return KeptUrl(Url(path, {}), Reader(lambda offset, nbytes: data[offset : offset + nbytes]))
        raise CorruptDataError(f"{path}: is no chunk that is in the set itself")

    def read(self, record: ArrayRecord, coordinate: list[int]) -> bytes | None:
        """Read a whole chunk file, None where there is none."""
        found = self.find_files(record, np.array([coordinate], np.int64).reshape(1, -1))
        if found.path_index[0] < 0:
            return None
        path = found.paths[0]
        return bytes(files().read(self.opened(path), int(found.offset[0]), int(found.nbytes[0])))
