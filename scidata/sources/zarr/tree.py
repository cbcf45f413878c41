"""The files of a Zarr store, local or by URL: small metadata files, folders, sizes. Reads no chunk.

A local tree refuses symbolic links that lead out of the store. Folders are checked once each, files by the same
``lstat`` that finds their size, so the check costs no extra call per chunk. A chunk that is read next is opened, and
tells size and links by its descriptor.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from scidata.core.types import IntArray
from scidata.core.urls import Url, absolute, local_path, url_of
from scidata.errors import RefusedError, UnsupportedFormatError
from scidata.sources.access.answers import check_document, size_in
from scidata.sources.access.fetches import each
from scidata.sources.access.files import Versions, files, retried
from scidata.sources.access.first_reads import GONE, MAX_METADATA_BYTES, NOT_THERE, read_documents
from scidata.sources.access.kept_urls import KeptUrl
from scidata.sources.access.remote import checks_versions, request

_MAX_CHECKED_FOLDERS = 100_000
_T = TypeVar("_T")


class Tree(Protocol):
    """Files by key: ``/``-separated paths relative to the store."""

    def exists(self) -> bool:
        """Return True if there is anything at the store's path."""

    def location(self, key: str) -> str:
        """Return the path or URL of a key."""

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of those small files that exist."""

    def folders(self, key: str) -> list[str]:
        """Return the keys of the folders in a folder, sorted."""

    def sizes(self, keys: Sequence[str]) -> IntArray:
        """Return the size of each file, -1 if missing."""

    @property
    def reads_tell(self) -> bool:
        """Whether a read of a file says how large it is, and of which version: nobody need ask before."""


def open_tree(path: str, *, allow_external: bool, versions: Versions | None = None) -> Tree:
    """Return the tree at a path or URL; ``file://`` is a local path, unless its bytes are kept elsewhere.

    ``versions``: told of each file of chunks that is opened.
    """
    local = None if isinstance(path, KeptUrl) else local_path(path)
    return UrlTree(path) if local is None else LocalTree(local, allow_external=allow_external, versions=versions)


class LocalTree:
    """A folder of this machine."""

    def __init__(self, root: str, *, allow_external: bool, versions: Versions | None = None) -> None:
        self._root = absolute(root)
        self._real = os.path.realpath(self._root)
        self._allow_external, self._versions = allow_external, versions
        self._checked: set[str] = set()

    def exists(self) -> bool:
        """Return True if there is anything at the store's path."""
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
        unknown = []
        while key and key not in self._checked:
            unknown.append(key)
            key = key.rpartition("/")[0]
        while unknown:
            key = unknown.pop()
            path = f"{self._root}/{key}"
            if os.path.islink(path):
                self._check_link(path)
            if len(self._checked) >= _MAX_CHECKED_FOLDERS:
                self._checked.clear()
            self._checked.add(key)

    def _stat(self, key: str) -> os.stat_result | None:
        parent = key.rpartition("/")[0]
        if parent not in self._checked:
            self._check_folder(parent)
        path = f"{self._root}/{key}" if key else self._root
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                self._check_link(path)
                status = os.stat(path)
        except GONE:
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
            check_document(self.location(key), status.st_size, MAX_METADATA_BYTES)
            found[key] = retried(self.location(key), functools.partial(self._read, key))
        return found

    def _read(self, key: str) -> bytes:
        with open(self.location(key), "rb") as file:
            return file.read(MAX_METADATA_BYTES)

    def folders(self, key: str) -> list[str]:
        """Return the keys of the folders in a folder, sorted; refuses a link that makes a loop."""
        self._check_folder(key)
        found = []
        with os.scandir(self.location(key)) as entries:
            for entry in entries:
                if not entry.is_dir():
                    continue
                _check_name(self.location(key), entry.name)
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
        """Return the size of each file, -1 if missing."""
        return np.fromiter(map(self.size, keys), np.int64, len(keys))

    def size(self, key: str) -> int:
        """Return the size of one file, -1 if missing."""
        status = self._stat(key)
        return -1 if status is None else status.st_size

    def open_size(self, path: str) -> int:
        """Return the size of the file at a location, -1 if missing, and open it: it is read next."""
        root, real = self._root, self._real
        try:
            status = files().opened(path, path if root == real else real + path[len(root) :])
        except OSError:
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            return self.size(path[len(root) + 1 :])
        if self._versions is not None:
            self._versions.opened(path, status)
        return status.st_size

    @property
    def reads_tell(self) -> bool:
        """False: asking costs little."""
        return False


class UrlTree:
    """Whatever fsspec reaches."""

    def __init__(self, url: str) -> None:
        found = url_of(url)
        assert isinstance(found, Url)
        self._url = found

    def exists(self) -> bool:
        """Return True if there is anything at the store's URL."""
        return self._infos([""]) != [None]

    def location(self, key: str) -> str:
        """Return the URL of a key."""
        return self._url.at(key)

    def _infos(self, keys: Sequence[str]) -> list[Any]:
        return list(map(_if_there, each([self._url.at(key) for key in keys], "info")))

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of those small files that exist."""
        found = read_documents([self._url.at(key) for key in keys], MAX_METADATA_BYTES)
        return {key: content for key, content in zip(keys, map(_if_there, found), strict=True) if content is not None}

    def folders(self, key: str) -> list[str]:
        """Return the keys of the folders in a folder, sorted."""
        entries: Any = None
        with contextlib.suppress(*GONE, NotImplementedError):  # it holds metadata, so it is there; a web server, say
            entries = request(self._url.at(key), "ls")
        if entries is None:
            raise UnsupportedFormatError(
                f"{self.location(key)}: this folder cannot be listed; write consolidated metadata into the store, or "
                "open an array of it by its own URL"
            )
        names = [str(e["name"]).rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]
        return sorted(f"{key}/{name}" if key else name for name in names if name)

    def sizes(self, keys: Sequence[str]) -> IntArray:
        """Return the size of each object, -1 if missing."""
        found = self._infos(keys)
        return np.fromiter(map(self._size_of, keys, found), np.int64, len(keys))

    @property
    def reads_tell(self) -> bool:
        """Whether the answer of a server to a read does."""
        return not isinstance(self._url, KeptUrl) and checks_versions(self._url)

    def _size_of(self, key: str, info: Any) -> int:
        is_object = info is not None and info.get("type") != "directory"
        return size_in(info, self.location(key)) if is_object else -1


def _if_there(found: _T | Exception) -> _T | None:
    """Return an answer, None if there is nothing; errors other than "not there" must not look like absence."""
    if isinstance(found, Exception) and not isinstance(found, NOT_THERE):
        raise found
    return None if isinstance(found, Exception) else found


def _check_name(where: str, name: str) -> None:
    """Refuse the name of a folder that is no text: no message could show it."""
    try:
        name.encode()
    except UnicodeEncodeError as e:
        raise UnsupportedFormatError(f"{where}: has a folder {name!a} whose name is not UTF-8; rename it") from e
