"""A finished store to an object store: its samples first, the manifest, without which it does not open, last."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec

from scidata.core.checks import optional_module
from scidata.core.urls import Url
from scidata.errors import OutputError
from scidata.sources.access.outcomes import clean_error
from scidata.store.format.places import MANIFEST, TABLE

_P = ParamSpec("_P")
_THREADS = 8  # objects that are sent at once


def _public(method: Callable[Concatenate[RemoteFolder, _P], None]) -> Callable[Concatenate[RemoteFolder, _P], None]:
    """Have errors of clients name the URL, without its secrets."""

    @functools.wraps(method)
    def call(self: RemoteFolder, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            return method(self, *args, **kwargs)
        except Exception as e:
            error = clean_error(self.url, e)
        raise error

    return call


class RemoteFolder:
    """A folder of an object store, through fsspec; raises MissingDependencyError where a package for it is missing."""

    @_public
    def __init__(self, url: Url) -> None:
        self.url = url
        fsspec = optional_module("fsspec", f"{url}: URLs need fsspec", "cloud")
        url.check()
        found: tuple[Any, str] = fsspec.core.url_to_fs(url.target.rstrip("/"), **dict(url.options))
        self._fs, self._name = found

    @_public
    def check_free(self, *, overwrite: bool) -> None:
        """Raise OutputError where something lies there that is not to be replaced, or is no store."""
        found = {name[len(self._name) + 1 :] for name in self._fs.find(self._name)}
        foreign = [name for name in sorted(found) if name not in (MANIFEST, TABLE) and not name.startswith("sample-")]
        if foreign:
            raise OutputError(f"{self.url}: holds {foreign[0]!r}, which is no part of a scidata store; choose another")
        if found and not overwrite:
            raise OutputError(f"{self.url}: a store is there, or begins to; --overwrite replaces it")

    @_public
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
