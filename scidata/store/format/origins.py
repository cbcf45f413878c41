"""Where a store's files are asked for when they are not kept: a server, or a folder of a network file system."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from scidata.core.urls import local_path
from scidata.sources.access.answers import Info
from scidata.sources.access.files import files
from scidata.sources.access.kept_urls import KeptUrl, RequestOptions
from scidata.sources.access.mounts import is_on_network
from scidata.sources.access.remote import start
from scidata.sources.zarr.tree import LocalTree


class Server:
    """The server of a URL."""

    def start(self, url: KeptUrl, method: str, options: RequestOptions, wanted: Callable[[], bool]) -> Future[Any]:
        """Ask the server."""
        return start(url.plain, method, options, wanted)


class Folder:
    """A folder of a network file system. Links that lead out of it are refused; whoever calls waits."""

    def __init__(self, root: str) -> None:
        self._tree = LocalTree(root, allow_external=False)

    def start(self, url: KeptUrl, method: str, options: RequestOptions, wanted: Callable[[], bool]) -> Future[Any]:
        """Read the folder."""
        future: Future[Any] = Future()
        try:
            future.set_result(self._answer(method, url.key, options))
        except Exception as e:
            future.set_exception(e)
        return future

    def _answer(self, method: str, key: str, options: RequestOptions) -> Info | bytes | bytearray:
        path = self._tree.location(key)
        document = self._tree.get([key]).get(key) if method == "document" else None
        size = -1 if method == "document" else int(self._tree.sizes([key])[0])
        if document is None and size == -1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if document is not None:
            return document
        if method == "info":
            return Info(size=size, type="file")
        return files().read(path, options["offset"], options["nbytes"])


def is_worth_it(path: str) -> bool:
    """Say whether reading a store takes a network: those on a local disk are read where they are."""
    local = local_path(path)
    return local is None or is_on_network(local)
