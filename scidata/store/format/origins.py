"""Where a store's files are asked for when they are not kept: a server, or a folder of a network file system."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from scidata.core.urls import local_path
from scidata.sources.access.files import files
from scidata.sources.access.kept_urls import KeptUrl
from scidata.sources.access.mounts import is_on_network
from scidata.sources.access.remote import start
from scidata.sources.zarr.tree import LocalTree


class Origin(Protocol):
    """Where a store's files are asked for."""

    def start(self, url: KeptUrl, method: str, options: dict[str, Any], wanted: Callable[[], bool]) -> Future[Any]:
        """Begin a request, as :func:`scidata.sources.access.remote.start` does."""


class Server:
    """The server of a URL."""

    def start(self, url: KeptUrl, method: str, options: dict[str, Any], wanted: Callable[[], bool]) -> Future[Any]:
        """Ask the server."""
        return start(url.plain, method, options, wanted)


class Folder:
    """A folder of a network file system. Links that lead out of it are refused; whoever calls waits."""

    def __init__(self, root: str) -> None:
        self._tree = LocalTree(root, allow_external=False)

    def start(self, url: KeptUrl, method: str, options: dict[str, Any], wanted: Callable[[], bool]) -> Future[Any]:
        """Read the folder."""
        future: Future[Any] = Future()
        try:
            future.set_result(self._answer(method, url.key, **options))
        except Exception as e:
            future.set_exception(e)
        return future

    def _answer(self, method: str, key: str, *, offset: int = 0, nbytes: int = 0, most: int = 0) -> Any:
        path = self._tree.location(key)
        found = self._tree.get([key]).get(key) if method == "document" else int(self._tree.sizes([key])[0])
        if found is None or found == -1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if method == "info":
            return {"size": found, "type": "file"}
        return files().read(path, offset, nbytes) if method == "range" else found


def is_worth_it(path: str) -> bool:
    """Say whether reading a store takes a network: those on a local disk are read where they are."""
    local = local_path(path)
    return local is None or is_on_network(local)
