"""The file systems of fsspec that this process asks."""

from __future__ import annotations

import copy
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from scidata.core.install import install_hint
from scidata.core.urls import Url
from scidata.errors import ConfigError, MissingDependencyError, near_matches
from scidata.sources.access.load import MAX_REQUESTS, Load
from scidata.sources.access.object_stores import ObjectStores, stores_of
from scidata.sources.access.web_session import with_redirects

NUM_THREADS = 32  # for file systems of fsspec that are not asynchronous
_MAX_FILESYSTEMS = 64


#: Of file systems for which scidata has no extra.
_PACKAGES = dict.fromkeys(("az", "abfs", "abfss", "adl"), "pip install adlfs") | {"hf": "pip install huggingface_hub"}


class Place(NamedTuple):
    """Where a URL leads: a file system of fsspec, the path in it, and obstore's stores that may read there, too."""

    fs: Any
    path: str
    is_async: bool
    stores: ObjectStores | None = None


class FileSystems:
    """fsspec's file systems of this process, shared by its threads: fsspec itself makes one for each thread.

    They are scidata's own and not in fsspec's cache, so that their retries can be left to ``retry``: botocore, s3fs and
    scidata would multiply to a hundred requests otherwise.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._made: dict[str, tuple[Any, ObjectStores | None]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._store_pool: ThreadPoolExecutor | None = None
        self._keeper_pool: ThreadPoolExecutor | None = None
        self.load = Load()

    def find(self, url: Url) -> Place:
        """Return the file system of a URL, and its path in it.

        Raises
        ------
        MissingDependencyError
            A package is not installed that reads such URLs.
        """
        try:
            return self._find(url)
        except ImportError as e:
            scheme = url.target.partition("://")[0]
            hint = _PACKAGES.get(scheme) or install_hint("gcs" if scheme in ("gs", "gcs") else "cloud")
            raise MissingDependencyError(
                f"{url}: {scheme}:// URLs need packages that are not here ({e}); {hint}"
            ) from e

    def _find(self, url: Url) -> Place:
        import fsspec
        from fsspec.core import _un_chain as un_chain

        url.check()
        options = copy.deepcopy(dict(url.options))  # fsspec changes nested ones
        options.pop("targets", None)  # of what a set refers to (scidata.sources.references), not of the set itself
        if "::" in url.target:
            fs, path = fsspec.core.url_to_fs(url.target, **options)
            return Place(fs, str(path), False)
        scheme = url.target.partition("://")[0]
        if scheme not in fsspec.available_protocols():
            near = near_matches(scheme, ("s3", "gs", "https", "http", "az", "abfs", "file"), listed=False)
            raise ConfigError(f"{url}: nothing reads {scheme}:// URLs{near or '; s3://, gs:// and https:// are read'}")
        ((path, protocol, kwargs),) = un_chain(url.target, options)
        if not fsspec.get_filesystem_class(protocol).async_impl:
            return Place(fsspec.filesystem(protocol, **kwargs), str(path), False)
        key = f"{protocol} {fsspec.utils.tokenize(kwargs)}"
        made = self._made.get(key)
        if made is None:
            with self._lock:
                made = self._made.get(key)
                if made is None:
                    if len(self._made) >= _MAX_FILESYSTEMS:
                        self._made.clear()
                    fs = _make_filesystem(fsspec, protocol, kwargs)
                    made = self._made[key] = fs, stores_of(fs, kwargs)
        return Place(made[0], str(path), True, made[1])

    def pool(self) -> ThreadPoolExecutor:
        """Return the threads that ask file systems which are not asynchronous."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="scidata-request")
            return self._pool

    def store_pool(self) -> ThreadPoolExecutor:
        """Return the threads that wait for obstore's answers."""
        with self._lock:
            if self._store_pool is None:
                self._store_pool = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="scidata-object")
            return self._store_pool

    def keeper_pool(self) -> ThreadPoolExecutor:
        """Return the threads that look on disk first, and wait for the others where nothing is there."""
        with self._lock:
            if self._keeper_pool is None:
                self._keeper_pool = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="scidata-kept")
            return self._keeper_pool

    def is_ending(self) -> bool:
        """Whether the interpreter ends, which waits for these threads: then nothing is worth another attempt."""
        try:
            self.store_pool().submit(int)
        except RuntimeError:
            return True
        return False


def _make_filesystem(fsspec: Any, protocol: str, kwargs: dict[str, Any]) -> Any:
    if protocol in ("s3", "s3a"):
        config = dict(kwargs.get("config_kwargs") or {})
        config.setdefault("max_pool_connections", MAX_REQUESTS)
        config.setdefault("retries", {"total_max_attempts": 1, "mode": "standard"})
        # listings are asked for once; a kept one would show an object's old size after it was replaced
        kwargs = {"use_listings_cache": False} | kwargs | {"config_kwargs": config}
    if protocol in ("http", "https"):
        get_client = kwargs.get("get_client", fsspec.implementations.http.get_client)
        kwargs = kwargs | {"get_client": with_redirects(get_client)}
    fs = fsspec.filesystem(protocol, skip_instance_cache=True, **kwargs)
    if hasattr(fs, "retries"):
        fs.retries = 1
    if hasattr(fs, "set_session"):  # once, before many requests each make one
        fsspec.asyn.sync(fs.loop, fs.set_session)
    return fs


_filesystems = FileSystems()


def current() -> FileSystems:
    """Return this process's."""
    global _filesystems  # noqa: PLW0603 - one per process: connections do not survive a fork
    if _filesystems.pid != os.getpid():
        _filesystems = FileSystems()
    return _filesystems
