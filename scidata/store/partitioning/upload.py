"""A finished store to an object store: its samples first, the manifest, without which it does not open, last."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scidata.core.checks import optional_module
from scidata.core.urls import Url
from scidata.errors import OutputError
from scidata.store.format.places import MANIFEST, TABLE

_THREADS = 8  # objects that are sent at once


class RemoteFolder:
    """A folder of an object store, through fsspec; raises MissingDependencyError where a package for it is missing."""

    def __init__(self, url: Url) -> None:
        self._url = url
        fsspec = optional_module("fsspec", f"{url}: URLs need fsspec", "cloud")
        found: tuple[Any, str] = fsspec.core.url_to_fs(url.target.rstrip("/"), **dict(url.options))
        self._fs, self._name = found

    def check_free(self, *, overwrite: bool) -> None:
        """Raise OutputError where something lies there that is not to be replaced, or is no store."""
        found = {name[len(self._name) + 1 :] for name in self._fs.find(self._name)}
        foreign = [name for name in sorted(found) if name not in (MANIFEST, TABLE) and not name.startswith("sample-")]
        if foreign:
            raise OutputError(f"{self._url}: holds {foreign[0]!r}, which is no part of a scidata store; choose another")
        if found and not overwrite:
            raise OutputError(f"{self._url}: a store is there, or begins to; --overwrite replaces it")

    def upload(self, folder: str) -> None:
        """Send all files of a finished store in the place of what is there, which is gone once this begins."""
        if self._fs.exists(f"{self._name}/{MANIFEST}"):
            self._fs.rm_file(f"{self._name}/{MANIFEST}")
        files = [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]
        names = {os.path.relpath(path, folder): path for path in files}
        manifest = names.pop(MANIFEST)
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(lambda name: self._fs.put_file(names[name], f"{self._name}/{name}"), sorted(names)):
                pass
        old = [name for name in self._fs.find(self._name) if name[len(self._name) + 1 :] not in names]
        if old:  # of the store that was there
            self._fs.rm(old)
        self._fs.put_file(manifest, f"{self._name}/{MANIFEST}")
