"""Targets of references, and the options that open them: somebody else's set decides which files this process reads.

Without leave, a set leads to files below its own folder, or to objects of its own bucket or host. ``allow_external``
opens everything else, without the credentials of the set; ``storage_options={"targets": {prefix: options}}`` opens all
below a prefix, with the options given for it.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
import stat
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from scidata.core.urls import Seen, Url, absolute, is_url, local_path, public_text
from scidata.errors import ConfigError, RefusedError
from scidata.sources.access.files import Versions, files
from scidata.sources.access.kept_urls import KeptUrl, Reader

TARGETS = "targets"
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs"}
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")  # as clients compare them, which do not all know FILE:// for file://
_MAX_FOLDERS = 1 << 16


class Targets:
    """Resolves the references of one set.

    - ``store``: the set, for messages; a URL's options are those of its own bucket or host.
    - ``folder``: local: below it references may lead. Relative ones begin there.
    """

    def __init__(self, store: str, folder: str, *, allow_external: bool, seen: Seen, versions: Versions) -> None:
        self._store, self._allow_external, self._versions = store, allow_external, versions
        options = dict(store.options) if isinstance(store, Url) else {}
        self._prefixes = _checked_prefixes(options.pop(TARGETS, {}), store)
        self._options, self._seen = options, store.seen if isinstance(store, Url) else seen
        self._folder = local_path(folder)
        self._url = folder if self._folder is None and isinstance(folder, Url) else None
        if self._folder is not None:
            self._folder = absolute(self._folder)
            self._real = os.path.realpath(self._folder)
        self._folders: dict[str, str] = {}
        self._secret: dict[str, Url] = {}  # URLs with hidden parts, by their public text

    def resolve(self, name: str) -> str:
        """Return the local path or URL that a reference names."""
        if "\0" in name or "::" in name or not name:
            raise RefusedError(f"{self._store}: refers to {public_text(name)!r}, which is neither a path nor a URL")
        path = local_path(name)
        if path is not None and (self._url is None or os.path.isabs(path) or is_url(name)):
            return self._local(path)
        return self._remote(name if path is None else self._below(path))

    def _below(self, path: str) -> str:
        """Return the URL of a relative path, which may go up in the bucket or host."""
        assert self._url is not None
        parts = urlsplit(self._url.target)
        return f"{parts.scheme}://{parts.netloc}{posixpath.normpath(f'/{parts.path}/{path}'.replace('//', '/'))}"

    def _refused(self, name: str, why: str) -> RefusedError:
        as_url = "" if isinstance(self._store, Url) else f" (and the set as file://{os.path.abspath(self._store)})"
        return RefusedError(
            f"{self._store}: refers to {public_text(name)}, {why}; if you trust the set, open it with "
            f"allow_external=True, or name trusted places: storage_options={{'targets': {{prefix: options}}}}{as_url}"
        )

    # -- local -------------------------------------------------------------------------------------------------------

    def _local(self, path: str) -> str:
        if self._folder is not None:
            path = os.path.join(self._folder, path)
        real = self._real_path(path)
        if self._folder is None or not _is_below(real, self._real):
            named = any(
                _is_below(real, os.path.realpath(place))
                for prefix in self._prefixes
                if (place := local_path(prefix)) is not None
            )
            if not (named or self._allow_external):
                where = self._folder or "its own bucket or host"
                led = "" if real == os.path.abspath(path) else f" (which is {real})"
                raise self._refused(path + led, f"a local file outside {where}")
        return real

    def _real_path(self, path: str) -> str:
        """Return a path without links. Folders are looked at once, files each."""
        folder, name = os.path.split(path)
        real = self._folders.get(folder)
        if real is None:
            if len(self._folders) >= _MAX_FOLDERS:
                self._folders.clear()
            real = self._folders[folder] = os.path.realpath(folder)
        found = os.path.join(real, name)
        try:
            mode = os.lstat(found).st_mode
            if name in ("", ".", "..") or stat.S_ISLNK(mode):
                found = os.path.realpath(found)
                mode = os.stat(found).st_mode
        except OSError:  # reading it raises the reason
            return os.path.realpath(found)
        if not stat.S_ISREG(mode):
            raise RefusedError(f"{self._store}: refers to {path}, which is no regular file")
        return found

    # -- URLs --------------------------------------------------------------------------------------------------------

    def _remote(self, target: str) -> Url:
        dots = any(part in (".", "..") for part in unquote(target).split("/"))
        if dots or "\\" in target or not target.isprintable() or not _SCHEME.match(target):
            raise RefusedError(f"{self._store}: refers to {public_text(target)!r}, which is not written as URLs are")
        own = self._url is not None and _host(self._url.target) == _host(target)
        prefix = max((p for p in self._prefixes if _is_below(_plain(target), _plain(p))), key=len, default=None)
        if not own and prefix is None and not self._allow_external:
            raise self._refused(target, f"which lies outside {'its own bucket or host' if self._url else self._folder}")
        options = self._prefixes[prefix] if prefix is not None else self._options if own else {}
        url = Url(target, options, seen=self._seen)
        if str(url) != target and self._secret.setdefault(url, url).target != target:
            raise ConfigError(
                f"{self._store}: two references to {url} differ only in their query or user, which may be secret, so "
                "that messages and plans could not tell them apart; give the objects paths of their own"
            )
        return url

    def bind(self, path: str) -> Url:
        """Return the function that opens a path of :meth:`resolve`, or its text, beside URLs."""
        if is_url(path):
            return self._secret.get(path) or self._remote(path)
        return KeptUrl(Url(f"file://{path}", {}), Reader(functools.partial(self._read, path)))

    def _read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Read of a local file; beside URLs nobody else looks whether it was replaced."""
        data = bytes(files().read(path, offset, nbytes))
        self._versions.check([path])
        return data


def _checked_prefixes(prefixes: object, store: str) -> dict[str, Mapping[str, Any]]:
    if not isinstance(prefixes, Mapping) or not all(
        isinstance(p, str) and is_url(p) and isinstance(o, Mapping) for p, o in prefixes.items()
    ):
        raise ConfigError(
            f"{store}: storage_options={{'targets': …}} must be options by URL prefix, such as "
            "{'s3://bucket/folder': {'anon': True}} or {'file:///data': {}}"
        )
    return dict(prefixes)


def _host(url: str) -> tuple[str, str]:
    """Return the key of a bucket or host: its credentials may be used there, and nowhere else."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2] if parts.scheme in ("http", "https") else parts.netloc
    return _ALIASES.get(parts.scheme, parts.scheme), host.lower()


def _plain(url: str) -> str:
    return "://".join(_host(url)) + urlsplit(url).path


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
