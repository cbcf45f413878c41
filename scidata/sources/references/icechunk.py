"""Icechunk repositories: metadata and the places of chunks come from the library, bytes through scidata's own reads."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from scidata.core.install import install_hint
from scidata.core.types import IntArray
from scidata.core.urls import Url, absolute, local_path, url_of
from scidata.errors import ConfigError, CorruptDataError, MissingDependencyError, UnsupportedFormatError
from scidata.sources.access.fetches import each
from scidata.sources.references.tables import DocumentTree, Table, make_table
from scidata.sources.zarr.chunks import flattened
from scidata.sources.zarr.metadata import ArrayRecord

_SUFFIX = re.compile(r"(?P<path>.+)@(?P<kind>branch|tag|snapshot)=(?P<name>[^@]+)", re.DOTALL)
_CHUNK_ID = re.compile(r"\w+", re.ASCII)
_NATIVE, _VIRTUAL, _INLINE = 1, 2, 3  # icechunk.ChunkType
_NO_SUCH = ("RefNotFoundError", "SnapshotNotFoundError", "InvalidInputError")
_T = TypeVar("_T")


def split_version(path: str) -> tuple[str, tuple[str, str] | None]:
    """Split ``repo@branch=main`` into the repository and its version; a path that exists is not split."""
    found = _SUFFIX.fullmatch(path.target if isinstance(path, Url) else path)
    if found is None or (not isinstance(path, Url) and os.path.lexists(os.path.expanduser(path))):
        return path, None
    store = Url(found["path"], path.options, seen=path.seen) if isinstance(path, Url) else found["path"]
    return store, (found["kind"], found["name"])


def is_repository(path: str) -> bool:
    """Return True if there is an Icechunk repository, of either format, at a path or URL."""
    url = url_of(path)
    if not isinstance(url, Url) or (local := local_path(url)) is not None:
        folder = os.path.expanduser(path if not isinstance(url, Url) else str(local))
        if not os.path.isdir(os.path.join(folder, "snapshots")):
            return False
        return os.path.isfile(os.path.join(folder, "repo")) or os.path.isdir(os.path.join(folder, "refs"))
    repo, main = each([url.at("repo"), url.at("refs/branch.main/ref.json")], "info")
    return any(not isinstance(info, Exception) and info.get("type") != "directory" for info in (repo, main))


def _run(call: Callable[[], Awaitable[_T]]) -> _T:
    """Wait for a coroutine in a thread of its own: this one may have an event loop."""
    done: Future[_T] = Future()

    async def wait() -> _T:
        return await call()

    def run() -> None:
        try:
            done.set_result(asyncio.run(wait()))
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True, name="scidata-icechunk").start()
    return done.result()


class Repository:
    """One snapshot of a repository, by default ``main``'s last; the path may name another, or a branch or tag."""

    def __init__(self, path: str, snapshot: str | None) -> None:
        self._path = path
        self._store, version = split_version(path)
        kind, name = ("snapshot", snapshot) if snapshot is not None else version or ("branch", "main")
        self._tables: dict[str, Table] = {}
        icechunk = _library(path)
        repository = self._call(lambda: icechunk.Repository.open(_storage(icechunk, self._store)))
        chosen = {"snapshot_id" if kind == "snapshot" else kind: name}
        self._session, said = self._try(lambda: repository.readonly_session(**chosen))
        if said is not None and type(said).__name__ in _NO_SUCH:
            branches, tags = (sorted(self._call(call)) for call in (repository.list_branches, repository.list_tags))
            raise ConfigError(
                f"{path}: the repository has no {kind} {name!r}; it has branches {branches[:20]} and tags {tags[:20]}"
            )
        if said is not None:
            raise self._error(said)
        self.snapshot = str(self._session.snapshot_id)
        self.lasting = self._chunks_folder() + "/"  # each chunk has a random name of its own

    def _try(self, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        _check_process(self._path)
        try:
            return call(), None
        except Exception as e:
            return None, e

    def _call(self, call: Callable[[], Any]) -> Any:
        found, error = self._try(call)
        if error is not None:
            raise self._error(error)
        return found

    def _error(self, error: Exception) -> Exception:
        said = str(error).strip().split("\n")[0]
        said = self._store.public(said) if isinstance(self._store, Url) else said
        kind = FileNotFoundError if type(error).__name__ == "RepositoryNotFoundError" else OSError
        return kind(f"{self._path}: Icechunk could not read it ({type(error).__name__}: {said})")

    # -- metadata ----------------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return those documents that there are."""
        values = self._call(lambda: _run(lambda: _get(self._session.store, keys)))
        return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

    def folders(self, key: str) -> list[str]:
        """Return the groups and arrays in a group, sorted."""
        names = self._call(lambda: _run(lambda: _list(self._session.store, key)))
        return sorted(f"{key}/{name}" if key else name for name in names if name != "zarr.json")

    # -- places ------------------------------------------------------------------------------------------------------

    def find(self, record: ArrayRecord, linear: IntArray) -> Iterator[tuple[Table, IntArray]]:
        """Return the table of an array."""
        table = self._tables.get(record.prefix)
        if table is None:
            batches = self._call(lambda: _run(lambda: _places(self._session.store, f"/{record.prefix}")))
            table = self._tables[record.prefix] = _table(record, batches, self._chunks_folder())
        yield table, np.arange(len(linear))

    def _chunks_folder(self) -> str:
        where = self._store.at("chunks") if isinstance(self._store, Url) else os.path.abspath(self._store) + "/chunks"
        return where.target if isinstance(where, Url) else where


async def _get(store: Any, keys: Sequence[str]) -> list[bytes | None]:
    from zarr.core.buffer import default_buffer_prototype

    prototype = default_buffer_prototype()
    found = await asyncio.gather(*(store.get(key, prototype) for key in keys))
    return [None if value is None else value.to_bytes() for value in found]


async def _list(store: Any, folder: str) -> list[str]:
    return [name async for name in store.list_dir(folder)]


async def _places(store: Any, path: str) -> list[tuple[Any, ...]]:
    return [batch async for batch in store.array_chunk_iterator(path)]


def _table(record: ArrayRecord, batches: Sequence[tuple[Any, ...]], folder: str) -> Table:
    """Join the library's lists of an array's chunks; those outside its present shape do not count."""
    grid = np.array(record.num_files, np.int64)
    columns: list[tuple[IntArray, ...]] = []
    names: dict[str, int] = {}
    inline: list[bytes] = []
    for coordinates, kinds, paths, offsets, lengths, held in batches:
        target = np.empty(len(kinds), np.int64)
        for row, (kind, path) in enumerate(zip(kinds.tolist(), paths, strict=True)):
            if kind == _INLINE:
                inline.append(bytes(held[row]))
                target[row] = -len(inline)
                continue
            if kind not in (_NATIVE, _VIRTUAL) or (kind == _NATIVE and not _CHUNK_ID.fullmatch(path)):
                raise CorruptDataError(f"{record.layout.store}: array {record.layout.name!r} has a chunk at {path!r}")
            target[row] = names.setdefault(f"{folder}/{path}" if kind == _NATIVE else path, len(names))
        places = np.asarray(coordinates, np.int64).reshape(len(kinds), len(grid))
        inside = (places < grid).all(axis=1)
        linear = flattened(places, record.num_files)
        columns.append(tuple(c[inside] for c in (linear, target, offsets.astype(np.int64), lengths.astype(np.int64))))
    empty = np.zeros(0, np.int64)
    linear, target, offset, nbytes = (np.concatenate([empty, *c]) for c in zip(*columns, strict=True)) if columns else (
        (empty,) * 4
    )  # fmt: skip
    if len(offset) and min(offset.min(), nbytes.min()) < 0:
        raise CorruptDataError(f"{record.layout.store}: array {record.layout.name!r} has a chunk beyond any file's end")
    return make_table(linear, target, offset, nbytes, list(names), inline)


class RepositoryTree(DocumentTree):
    """The metadata of a snapshot, which are read when they are asked for, and kept."""

    def __init__(self, store: str, repository: Repository) -> None:
        self._documents: dict[str, bytes] = {}
        super().__init__(store, self._documents)
        self._repository = repository

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return those documents that there are."""
        wanted = [key for key in keys if key.rpartition("/")[2] == "zarr.json" and key not in self._documents]
        if wanted:
            self._documents |= self._repository.get(wanted)
        return super().get(keys)

    def folders(self, key: str) -> list[str]:
        """Return the groups and arrays in a group, sorted."""
        return self._repository.folders(key)


_used_by: int | None = None  # the process whose threads Icechunk works with


def _check_process(path: str) -> None:
    """Refuse to call Icechunk in a fork of a process that has used it: its threads are not there, and it would wait."""
    global _used_by  # noqa: PLW0603 - one per process, as Icechunk's threads are
    if _used_by is None:
        _used_by = os.getpid()
    if _used_by != os.getpid():
        raise ConfigError(
            f"{path}: Icechunk cannot be used in a forked process; start it by 'spawn' "
            "(multiprocessing_context='spawn'), or use scidata.DataLoader"
        )


def _library(path: str) -> Any:
    try:
        import icechunk
    except ImportError as e:
        raise MissingDependencyError(
            f"{path}: Icechunk repositories need icechunk, and that Python 3.12; {install_hint('icechunk')}"
        ) from e
    if not hasattr(icechunk.IcechunkStore, "array_chunk_iterator"):
        raise MissingDependencyError(
            f"{path}: icechunk {icechunk.__version__} does not say where chunks lie, as 2.3 does; "
            "pip install -U 'icechunk>=2.3', which needs Python 3.12"
        )
    return icechunk


# -- storage ---------------------------------------------------------------------------------------------------------


def _storage(icechunk: Any, store: str) -> Any:
    path = local_path(store)
    if path is not None:
        return icechunk.local_filesystem_storage(absolute(path))
    assert isinstance(store, Url)
    scheme, _, rest = store.target.partition("://")
    bucket, _, prefix = rest.partition("/")
    options = {name: value for name, value in store.options.items() if name != "targets"}
    if scheme in ("s3", "s3a"):
        return icechunk.s3_storage(bucket=bucket, prefix=prefix or None, **_s3(options))
    if scheme in ("gs", "gcs"):
        return icechunk.gcs_storage(bucket=bucket, prefix=prefix or None, **_gcs(options, store))
    if scheme in ("http", "https") and not options:
        return icechunk.http_storage(store.target)
    raise UnsupportedFormatError(
        f"{store}: Icechunk repositories are read from local folders, s3://, gs://, and https:// without options"
    )


def _s3(options: Mapping[str, Any]) -> dict[str, Any]:
    client = options.get("client_kwargs") or {}
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    found = {
        "region": client.get("region_name") or options.get("region_name") or options.get("region"),
        "endpoint_url": endpoint,
        "allow_http": str(endpoint).startswith("http://"),
        "force_path_style": endpoint is not None,
        "access_key_id": options.get("key") or client.get("aws_access_key_id"),
        "secret_access_key": options.get("secret") or client.get("aws_secret_access_key"),
        "session_token": options.get("token") or client.get("aws_session_token"),
        "anonymous": True if options.get("anon") else None,
    }
    found["from_env"] = None if found["anonymous"] or found["access_key_id"] else True
    return found


def _gcs(options: Mapping[str, Any], store: Url) -> dict[str, Any]:
    token = options.get("token")
    if token == "anon":
        return {"anonymous": True}
    if token is None or token == "google_default":
        return {"from_env": True}
    if isinstance(token, str) and os.path.isfile(token):
        return {"service_account_file": token}
    raise UnsupportedFormatError(
        f"{store}: of gs:// Icechunk takes storage_options={{'token': 'anon'}}, the path of a service account's file, "
        "or none for the credentials of the environment"
    )
