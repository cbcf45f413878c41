"""The files of a Zarr store, local or by URL: small metadata files, folders, sizes. Reads no chunk.

A local tree refuses symbolic links that lead out of the store. Folders are checked once each, files by the same
``lstat`` that finds their size, so the check costs no extra call per chunk.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from scidata._files import is_url
from scidata.errors import MissingDependencyError, RefusedError, UnsupportedFormatError
from scidata.types import IntArray

__all__ = ["LocalTree", "Tree", "UrlTree", "open_tree"]

_MAX_METADATA_BYTES = 2**30
_MAX_CHECKED_FOLDERS = 100_000
_URL_THREADS = 32  # requests in flight: sizes of objects are all latency
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Tree(Protocol):
    """Files by key: ``/``-separated paths relative to the store."""

    def exists(self) -> bool:
        """Say whether there is anything at the store's path."""
        ...

    def location(self, key: str) -> str:
        """Return the path or URL of a key."""
        ...

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of those small files that exist."""
        ...

    def folders(self, key: str) -> list[str]:
        """Return the keys of the folders in a folder, sorted."""
        ...

    def sizes(self, keys: Sequence[str]) -> IntArray:
        """Return the size of each file, -1 where there is none."""
        ...


def open_tree(path: str, *, allow_external: bool) -> Tree:
    """Return the tree at a path or URL; ``file://`` is a local path."""
    for scheme in ("file://", "local://"):
        if path.startswith(scheme) and "::" not in path:
            return LocalTree(path.removeprefix(scheme), allow_external=allow_external)
    return UrlTree(path) if is_url(path) else LocalTree(path, allow_external=allow_external)


class LocalTree:
    """A folder of this machine."""

    def __init__(self, root: str, *, allow_external: bool) -> None:
        self._root = os.path.abspath(os.path.expanduser(root))
        self._real = os.path.realpath(self._root)
        self._allow_external = allow_external
        self._checked: set[str] = set()

    def exists(self) -> bool:
        """Say whether there is anything at the store's path."""
        return os.path.exists(self._root)

    def location(self, key: str) -> str:
        """Return the path of a key."""
        return f"{self._root}/{key}" if key else self._root

    def _check_link(self, path: str) -> None:
        target = os.path.realpath(path)
        inside = target == self._real or target.startswith(self._real.rstrip("/") + "/")
        if not inside and not self._allow_external:
            raise RefusedError(
                f"{path}: this link leads to {target}, out of the store {self._root}; "
                "if you trust the store, open it with allow_external=True"
            )

    def _check_folder(self, key: str) -> None:
        """Check each folder on the way to ``key``, once; a folder that is not there is no link."""
        if key in self._checked or not key:
            return
        self._check_folder(key.rpartition("/")[0])
        path = self.location(key)
        if os.path.islink(path):
            self._check_link(path)
        if len(self._checked) >= _MAX_CHECKED_FOLDERS:
            self._checked.clear()
        self._checked.add(key)

    def _stat(self, key: str) -> os.stat_result | None:
        """Return a regular file's status; opening a pipe or device instead would block or worse."""
        parent = key.rpartition("/")[0]
        if parent not in self._checked:
            self._check_folder(parent)
        path = self.location(key)
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                self._check_link(path)
                status = os.stat(path)
        except _GONE:
            return None
        if stat.S_ISDIR(status.st_mode):
            return None
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError(f"{path}: not a regular file (a pipe, socket or device); remove it from the store")
        return status

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of those small files that exist."""
        found = {}
        for key in keys:
            status = self._stat(key)
            if status is None:
                continue
            if status.st_size > _MAX_METADATA_BYTES:
                raise UnsupportedFormatError(f"{self.location(key)}: {status.st_size} bytes is too much for metadata")
            with open(self.location(key), "rb") as file:
                found[key] = file.read(_MAX_METADATA_BYTES)
        return found

    def folders(self, key: str) -> list[str]:
        """Return the keys of the folders in a folder, sorted; refuses a link that makes a loop."""
        self._check_folder(key)
        found = []
        with os.scandir(self.location(key)) as entries:
            for entry in entries:
                if not entry.is_dir():
                    continue
                child = f"{key}/{entry.name}" if key else entry.name
                if entry.is_symlink():
                    self._check_link(entry.path)
                    self._check_loop(child)
                found.append(child)
        return sorted(found)

    def _check_loop(self, key: str) -> None:
        target, parts = os.path.realpath(self.location(key)), key.split("/")
        above = (os.path.realpath(self.location("/".join(parts[:i]))) for i in range(len(parts)))
        if target in above:
            raise RefusedError(f"{self.location(key)}: this link leads back to {target}, a loop; remove it")

    def sizes(self, keys: Sequence[str]) -> IntArray:
        """Return the size of each file, -1 where there is none."""
        statuses = map(self._stat, keys)
        return np.fromiter((-1 if s is None else s.st_size for s in statuses), np.int64, len(keys))


class UrlTree:
    """Whatever fsspec reaches."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as e:
            raise MissingDependencyError(f"{url}: URLs need fsspec; pip install 'scidata[cloud]'") from e
        self._url = url
        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")

    def exists(self) -> bool:
        """Say whether there is anything at the store's URL."""
        return bool(self._fs.exists(self._root))

    def location(self, key: str) -> str:
        """Return the URL of a key; in a chained URL (``cache::s3://...``) the first part with a path takes it."""
        parts = self._url.split("::")
        at = next(i for i, part in enumerate(parts) if "://" in part)
        if key:
            parts[at] = parts[at].rstrip("/") + "/" + key if not parts[at].endswith("://") else parts[at] + key
        return "::".join(parts)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/") if self._root else key

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of those small files that exist."""
        # cat() would take a '[' in a name as a pattern; errors other than "not there" must not look like absence
        contents = self._fs.cat_ranges([self._path(k) for k in keys], None, None, on_error="return")
        found = {}
        for key, content in zip(keys, contents, strict=True):
            if isinstance(content, (*_GONE, KeyError)):
                continue
            if isinstance(content, BaseException):
                raise content
            found[key] = bytes(content)
        return found

    def folders(self, key: str) -> list[str]:
        """Return the keys of the folders in a folder, sorted."""
        try:
            entries = self._fs.ls(self._path(key), detail=True)
        except (*_GONE, NotImplementedError) as e:  # it holds metadata, so it is there; a plain web server, say
            raise UnsupportedFormatError(
                f"{self.location(key)}: this folder cannot be listed; write consolidated metadata into the store, or "
                "open an array of it by its own URL"
            ) from e
        names = [str(e["name"]).rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]
        return sorted(f"{key}/{name}" if key else name for name in names if name)

    def _size(self, key: str) -> int:
        try:
            info = self._fs.info(self._path(key))
        except (*_GONE, KeyError):
            return -1
        return int(info["size"]) if info.get("type") != "directory" else -1

    def sizes(self, keys: Sequence[str]) -> IntArray:
        """Return the size of each object, -1 where there is none."""
        if len(keys) < 2:
            return np.array([self._size(k) for k in keys], np.int64)
        with ThreadPoolExecutor(min(_URL_THREADS, len(keys))) as pool:
            return np.fromiter(pool.map(self._size, keys), np.int64, len(keys))
