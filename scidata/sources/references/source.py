"""Reference sets and Icechunk repositories as sources: Zarr whose chunks are ranges of other files."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from scidata.core.types import ArrayLayout, Files, IntArray
from scidata.core.urls import Seen, Url, is_url, local_path, url_of
from scidata.errors import ConfigError
from scidata.sources.access.files import version_at
from scidata.sources.references.icechunk import Repository, RepositoryTree, is_repository, split_version
from scidata.sources.references.kerchunk import JsonSet
from scidata.sources.references.locator import ReferenceLocator
from scidata.sources.references.parquet import ParquetSet
from scidata.sources.references.tables import DocumentTree
from scidata.sources.references.targets import Targets
from scidata.sources.zarr.source import State, ZarrSource, chunk_files
from scidata.sources.zarr.tree import Tree, open_tree
from scidata.sources.zarr.walk import find_arrays

_Set = JsonSet | ParquetSet | Repository


class ReferenceSource(ZarrSource):
    """A reference set of kerchunk or VirtualiZarr, in JSON or Parquet, or one snapshot of an Icechunk repository.

    Parameters
    ----------
    path
        The JSON file, the folder of Parquet files, or the repository: ``repo``, ``repo@branch=dev``, ``repo@tag=v1``,
        ``repo@snapshot=…``; default the last snapshot of the branch ``main`` when this process first looks. It stays
        at that one, and goes there in other processes that it is pickled to.
    kind
        ``"kerchunk"``, ``"kerchunk-parquet"`` or ``"icechunk"``.
    allow_external
        Follow references to anywhere. Refused otherwise: targets outside the folder of the set, its bucket or host.
        ``storage_options={"targets": {prefix: options}}`` names other allowed targets, and the options that open them.
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
        """Raise SourceChangedError where a file that chunks lie in is not the one that was first read."""
        self._chunks.check(path for path in paths if not is_url(path))


def _folder_of(path: str) -> str:
    """Return where a set lies: without the query of a URL, which is the set's own."""
    local = local_path(path)
    if local is not None:
        return os.path.dirname(os.path.abspath(os.path.expanduser(local)))
    assert isinstance(path, Url)
    parts = urlsplit(path.target)
    return Url(
        f"{parts.scheme}://{parts.netloc}{posixpath.dirname(parts.path.rstrip('/'))}", path.options, seen=path.seen
    )


def open_repository(path: str, *, allow_external: bool) -> ReferenceSource | None:
    """Open an Icechunk repository, None where there is none.

    Raises
    ------
    ConfigError
        The path names a branch, tag or snapshot, and is no repository.
    """
    store, version = split_version(path)
    if is_repository(url_of(store)):
        return ReferenceSource(path, kind="icechunk", allow_external=allow_external)
    if version is not None:
        raise ConfigError(f"{path}: {store} is no Icechunk repository, which alone has a {version[0]}")
    return None
