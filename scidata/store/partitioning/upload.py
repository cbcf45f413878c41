"""A finished store to an object store: its samples first, the manifest, without which it does not open, last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable

from scidata.core.tasks.work import in_threads
from scidata.core.urls import Url
from scidata.errors import ConfigError, OutputError
from scidata.sources.access.remote import change, place_of
from scidata.sources.unfinished import SUFFIX
from scidata.store.format.places import MANIFEST, TABLE

_THREADS = 8  # objects that are sent at once


class RemoteFolder:
    """A folder of an object store, through fsspec; raises MissingDependencyError where a package for it is missing."""

    def __init__(self, url: Url) -> None:
        self.url, place = url, place_of(url)
        if place.is_web:
            raise ConfigError(f"{url}: web servers take no stores; write to a folder, or to s3://, gs:// or az://")
        self._name = place.path.rstrip("/")

    def _find(self, name: str) -> list[str]:
        """Return the objects below a name; their own names."""
        found: list[str] = change(self.url, "find", name)
        return sorted(each[len(name) + 1 :] for each in found)

    def check_free(self, *, overwrite: bool) -> None:
        """Raise OutputError if something lies there that is not to be replaced, or is no store."""
        found = self._find(self._name)
        foreign = [name for name in found if name not in (MANIFEST, TABLE) and not name.startswith("sample-")]
        if foreign:
            raise OutputError(f"{self.url}: holds {foreign[0]!r}, which is no part of a scidata store; choose another")
        if found and not overwrite:
            raise OutputError(f"{self.url}: a store is there, or begins to; --overwrite replaces it")

    def check_writable(self) -> None:
        """Send an empty object, and remove it: no bucket and no right to write are found before hours of work."""
        name = f"{self._name}{SUFFIX}/writable"
        change(self.url, "pipe_file", name, b"")
        with contextlib.suppress(PermissionError):
            change(self.url, "rm", [name])

    def upload(self, folder: str) -> None:
        """Send a finished store. One that is there stays until the new one lies beside it, as ``OUT.unfinished``."""
        files = [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]
        paths = {os.path.relpath(path, folder): path for path in files}
        old, beside = self._find(self._name), self._name + SUFFIX
        to = beside if MANIFEST in old else self._name

        def send(name: str, how: str = "put_file", source: str = "", to: str = to) -> None:
            nbytes = _THREADS * os.path.getsize(paths[name])  # the others share the line
            change(self.url.at(name), how, source or paths[name], f"{to}/{name}", nbytes=nbytes)

        self._remove(beside, self._find(beside))  # of a run that was killed
        _each(send, paths)
        if to == beside:
            send(MANIFEST)
            self._remove(self._name, [MANIFEST])
            _each(lambda name: send(name, "cp_file", f"{beside}/{name}", self._name), paths)
        self._remove(self._name, set(old) - set(paths) - {MANIFEST})
        send(MANIFEST, to=self._name)
        self._remove(beside, self._find(beside))

    def _remove(self, below: str, names: Iterable[str]) -> None:
        if each := [f"{below}/{name}" for name in sorted(names)]:
            change(self.url, "rm", each)


def _each(call: Callable[[str], object], names: Iterable[str]) -> None:
    """Call for each name but the manifest's, in threads."""
    in_threads(call, sorted(set(names) - {MANIFEST}), _THREADS, lambda name, done: None)
