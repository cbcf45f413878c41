"""Clients of this process for objects: buckets of obstore, file systems of fsspec; and their threads."""

from __future__ import annotations

import copy
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from scidata.core.cache import Cache
from scidata.core.install import install_hint
from scidata.core.urls import Url
from scidata.errors import ConfigError, MissingDependencyError, near_matches
from scidata.sources.access.load import MAX_REQUESTS, Load
from scidata.sources.access.object_stores import Bucket, find, is_available
from scidata.sources.access.web import keep_secrets

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_MAX_FILESYSTEMS = 64

#: Extras that read the URLs of a scheme; ``cloud`` reads all others.
_EXTRAS = {"s3": "obstore", "s3a": "obstore", "gs": "obstore", "gcs": "obstore"}
_EXTRAS |= {"az": "obstore", "abfs": "obstore", "abfss": "obstore"}
#: Of file systems for which scidata has no extra.
_PACKAGES = {"adl": "pip install adlfs", "hf": "pip install huggingface_hub"}

_OPTIONS = ("key", "secret", "token", "anon", "profile", "endpoint_url", "client_kwargs", "config_kwargs", "project")


class Place(NamedTuple):
    """Where fsspec reads a URL: a file system, the path in it, and how that is spoken to."""

    fs: AbstractFileSystem
    path: str
    is_async: bool
    is_web: bool = False

    def run(self, call: str | Callable[..., object], *arguments: object, until: float, **options: object) -> Any:
        """Call a method of the file system, or a coroutine; until a time, where that is asynchronous."""
        if not self.is_async:
            return getattr(self.fs, str(call))(*arguments, **options)
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        function = getattr(self.fs, f"_{call}") if isinstance(call, str) else call
        try:
            return sync(self.fs.loop, function, *arguments, timeout=max(0.01, until - time.monotonic()), **options)
        except FSTimeoutError:
            raise TimeoutError from None


class FileSystems:
    """Clients of this process for objects, shared by its threads: file systems of fsspec, and obstore's buckets.

    fsspec itself makes one file system for each thread. These are scidata's own and not in fsspec's cache, so that
    their retries can be left to ``retry``: botocore, s3fs and scidata would multiply to a hundred requests otherwise.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._made: Cache[AbstractFileSystem] = Cache(_MAX_FILESYSTEMS)
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._buckets: dict[str, Bucket] = {}
        self.load = Load()
        self.answers: dict[object, Any] | None = None  # of requests, with versions, while ranks open data together

    def bucket(self, url: Url) -> tuple[Bucket, str] | None:
        """Return the bucket by which obstore reads a URL, and the key there; None if fsspec reads it."""
        return find(url, self._buckets)

    def find(self, url: Url) -> Place:
        """Return the file system of fsspec that reads a URL, and its path in it."""
        try:
            return self._find(url)
        except ImportError as e:
            scheme = url.target.partition("://")[0]
            extra = "cloud" if is_available() else _EXTRAS.get(scheme, "cloud")
            hint = _PACKAGES.get(scheme) or install_hint(extra)
            raise MissingDependencyError(
                f"{url}: {scheme}:// URLs need packages that are not here ({e}); {hint}"
            ) from e
        except TypeError as e:
            if (wrong := re.search("unexpected keyword argument '([^']*)'", str(e))) is None:
                raise
            near, scheme = near_matches(wrong[1], _OPTIONS, listed=False), url.target.partition(":")[0]
        raise ConfigError(f"{url}: storage_options has no {wrong[1]!r} for {scheme}://{near}")

    def _find(self, url: Url) -> Place:
        import fsspec
        from fsspec.core import _un_chain as un_chain

        url.check()
        options = copy.deepcopy(dict(url.options))  # fsspec changes nested ones
        options.pop("targets", None)  # for targets of a reference set, not for the set
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
        made = self._made.get_or_make(key, lambda: _make_filesystem(fsspec, protocol, kwargs), once=True)
        return Place(made, str(path), True, protocol in ("http", "https"))

    def pool(self, name: str) -> ThreadPoolExecutor:
        """Return threads: those that make requests, or those that look on disk first and then wait for the others."""
        with self._lock:
            if name not in self._pools:
                self._pools[name] = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix=f"scidata-{name}")
            return self._pools[name]

    def is_ending(self) -> bool:
        """Whether the interpreter ends, which waits for these threads: then nothing is worth another attempt."""
        try:
            self.pool("request").submit(int)
        except RuntimeError:
            return True
        return False


def _make_filesystem(fsspec: ModuleType, protocol: str, kwargs: dict[str, Any]) -> AbstractFileSystem:
    if protocol in ("s3", "s3a"):
        config = dict(kwargs.get("config_kwargs") or {})
        config.setdefault("max_pool_connections", MAX_REQUESTS)
        config.setdefault("retries", {"total_max_attempts": 1, "mode": "standard"})
        # listings are asked for once; a kept one would show an object's old size after it was replaced
        kwargs = {"use_listings_cache": False} | kwargs | {"config_kwargs": config}
    if protocol in ("http", "https"):
        client = dict(kwargs.get("client_kwargs") or {})
        client["middlewares"] = (*client.get("middlewares", ()), *kwargs.get("middlewares", ()), keep_secrets)
        kwargs = {name: value for name, value in kwargs.items() if name != "middlewares"} | {"client_kwargs": client}
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
