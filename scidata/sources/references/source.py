"""Reference sets and Icechunk repositories as sources: Zarr whose chunks are ranges of other files."""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, Files, IntArray
from scidata.core.urls import Seen, Url, absolute, is_url, local_path, url_of
from scidata.errors import ConfigError, CorruptDataError
from scidata.sources.access.fetches import run_each
from scidata.sources.access.files import files, version_at
from scidata.sources.access.kept_urls import KeptUrl, Reader
from scidata.sources.references.icechunk import Repository, RepositoryTree, is_repository, split_version
from scidata.sources.references.kerchunk import JsonSet
from scidata.sources.references.parquet import ParquetSet
from scidata.sources.references.tables import WHOLE, DocumentTree, Tables
from scidata.sources.references.targets import Targets
from scidata.sources.zarr.chunks import FileRanges, Locator, flattened, grouped
from scidata.sources.zarr.metadata import ArrayRecord
from scidata.sources.zarr.source import State, ZarrSource, chunk_files
from scidata.sources.zarr.tree import Tree, open_tree
from scidata.sources.zarr.walk import find_arrays

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
        """Return the files of chunks, but for lasting ones, and a digest of their places or inline bytes."""
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
        """Read a whole chunk file, None if there is none."""
        found = self.find_files(record, np.array([coordinate], np.int64).reshape(1, -1))
        if found.path_index[0] < 0:
            return None
        path = found.paths[0]
        return bytes(files().read(self.opened(path), int(found.offset[0]), int(found.nbytes[0])))


_Set = JsonSet | ParquetSet | Repository


class ReferenceSource(ZarrSource):
    """A reference set of kerchunk or VirtualiZarr, in JSON or Parquet, or one snapshot of an Icechunk repository.

    - ``path``: the JSON file, the folder of Parquet files, or the repository: ``repo``, ``repo@branch=dev``,
      ``repo@tag=v1``, ``repo@snapshot=…``; default the last snapshot of the branch ``main`` when this process first
      looks. It stays at that one, and goes there in other processes that it is pickled to.
    - ``allow_external``: follow references to anywhere. Refused otherwise: targets outside the folder of the set, its
      bucket or host. ``storage_options={"targets": {prefix: options}}`` names other allowed targets, and the options
      that open them.
    """

    def __init__(self, path: str | os.PathLike[str], *, kind: str, allow_external: bool = False) -> None:
        super().__init__(path, allow_external=allow_external)
        self._kind = kind
        self._seen = Seen()
        self._snapshot: str | None = None

    def __repr__(self) -> str:
        return f"ReferenceSource({self.path!r}, kind={self._kind!r})"

    def __getstate__(self) -> dict[str, Any]:
        if self._kind == "icechunk":
            self._open()  # so that all processes have the same snapshot
        own = {"kind": self._kind, "seen": self._seen, "snapshot": self._snapshot, "chunks": self._chunks}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        ReferenceSource.__init__(self, state["path"], kind=state["kind"], allow_external=state["allow_external"])
        self._metadata, self._chunks, self._seen = state["metadata"], state["chunks"], state["seen"]
        self._snapshot = state["snapshot"]

    def _open(self) -> State:
        if self._kind == "icechunk" and self._state is not None:  # a fork cannot ask Icechunk again
            return self._state
        return super()._open()

    def _make_state(self) -> State:
        make = {"icechunk": self._make_icechunk, "kerchunk-parquet": self._make_parquet, "kerchunk": self._make_json}
        held, tree, folder = make[self._kind]()
        targets = Targets(self.path, folder, allow_external=self.allow_external, seen=self._seen, versions=self._chunks)
        contents = find_arrays(tree, str(self.path))
        records = contents.records.values()
        if isinstance(held, JsonSet):
            held.attach(records)
        return State(tree, self.path, contents, ReferenceLocator(tree, held, targets, records))

    @property
    def _locator(self) -> ReferenceLocator:
        locator = self._open().chunks
        assert isinstance(locator, ReferenceLocator)
        return locator

    def _make_json(self) -> tuple[_Set, Tree, str]:
        local = local_path(self.path)
        if local is not None:
            self._metadata.note(local, version_at(local))
        held = JsonSet(self.path if local is None else local)
        return held, DocumentTree(self.path, held.documents), _folder_of(self.path)

    def _make_parquet(self) -> tuple[_Set, Tree, str]:
        local = local_path(self.path)

        def check() -> None:
            if local is not None:
                summary = os.path.join(os.path.expanduser(local), ".zmetadata")
                self._metadata.note(summary, version_at(summary))

        check()
        held = ParquetSet(open_tree(self.path, allow_external=self.allow_external), check)
        return held, DocumentTree(self.path, held.documents), _folder_of(self.path)

    def _make_icechunk(self) -> tuple[_Set, Tree, str]:
        store, _ = split_version(self.path)
        held = Repository(self.path, self._snapshot)
        self._snapshot = held.snapshot
        return held, RepositoryTree(self.path, held), store

    @property
    def format(self) -> str:
        """``"kerchunk"``, ``"kerchunk-parquet"`` or ``"icechunk"``."""
        return self._kind

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files:
        """Name the files and URLs that chunks lie in, of those that may change, and where in these."""
        record = self._record(self._open(), layout.name)
        return Files(*self._locator.places_of(record, chunk_files(layout, chunks)))

    @property
    def revision(self) -> str | None:
        """The snapshot of an Icechunk repository; None of other sets."""
        self._open()
        return self._snapshot

    @property
    def pinned_path(self) -> str:
        """The path that opens the same again, whatever is committed meanwhile: ``repo@snapshot=…``."""
        revision = self.revision
        return self.path if revision is None else f"{split_version(self.path)[0]}@snapshot={revision}"

    def bind(self, path: str) -> Url:
        """Return the function that opens a path of :meth:`locate`, where some of them are URLs."""
        return self._locator.bind(path)

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Raise SourceChangedError if a file that chunks lie in is not the one that was first read."""
        self._chunks.check(path for path in paths if not is_url(path))


def _folder_of(path: str) -> str:
    local = local_path(path)
    if local is not None:
        return os.path.dirname(absolute(local))
    assert isinstance(path, Url)
    parts = urlsplit(path.target)
    return Url(
        f"{parts.scheme}://{parts.netloc}{posixpath.dirname(parts.path.rstrip('/'))}", path.options, seen=path.seen
    )


def open_repository(path: str, *, allow_external: bool) -> ReferenceSource | None:
    """Open an Icechunk repository, None if there is none."""
    store, version = split_version(path)
    if is_repository(url_of(store)):
        return ReferenceSource(path, kind="icechunk", allow_external=allow_external)
    if version is not None:
        raise ConfigError(f"{path}: {store} is no Icechunk repository, which alone has a {version[0]}")
    return None
