"""Byte ranges of local files and of URLs: the only place that opens data files for raw reads.

A local path is read with ``preadv`` into the caller's buffer through a bounded cache of descriptors; anything with a
scheme (``s3://``, ``https://``, ``memory://``) goes through fsspec's ranged reads. Both raise the same errors.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from scidata.errors import MissingDependencyError, ShortReadError

__all__ = ["FileCache", "files", "is_url"]

_MAX_OPEN = 256  # a thousand-file store must not run into the usual limit of 1,024 descriptors
_IOV_MAX = 1024  # Linux's limit on buffers in one preadv


def is_url(path: str) -> bool:
    """Say whether ``path`` is read through fsspec."""
    return "://" in path


def _filesystem(url: str) -> Any:
    try:
        import fsspec
    except ImportError as e:
        raise MissingDependencyError(f"{url}: URLs need fsspec; pip install 'scidata[cloud]'") from e
    return fsspec.core.url_to_fs(url)


class _Handle:
    """An open descriptor that closes when the last user lets go, so eviction never closes under a reader."""

    __slots__ = ("fd",)

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):  # not where opening failed
            os.close(self.fd)


class FileCache:
    """Thread-safe reads of byte ranges, with a bounded number of open descriptors."""

    def __init__(self, max_open: int = _MAX_OPEN) -> None:
        self._max_open = max_open
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _handle(self, path: str) -> _Handle:
        with self._lock:
            handle = self._handles.get(path)
            if handle is not None:
                self._handles.move_to_end(path)
                return handle
        handle = _Handle(path)
        with self._lock:
            self._handles[path] = handle
            while len(self._handles) > self._max_open:
                self._handles.popitem(last=False)
        return handle

    def size(self, path: str) -> int:
        """Return the size in bytes; raises FileNotFoundError."""
        if is_url(path):
            fs, key = _filesystem(path)
            return int(fs.size(key))
        return os.stat(path).st_size

    def read(self, path: str, offset: int, nbytes: int) -> bytearray:
        """Return ``nbytes`` bytes from ``offset``.

        Raises
        ------
        FileNotFoundError
            The file is not there.
        ShortReadError
            The file ends before ``offset + nbytes``.
        """
        buffer = bytearray(nbytes)
        self.read_into(path, offset, [memoryview(buffer)])
        return buffer

    def read_at_once(self, path: str, offset: int, view: memoryview) -> bool:
        """Fill one view of bytes of a local file by one call, if that works; if not, :meth:`read_into` says why."""
        if is_url(path):
            return False
        try:
            return os.preadv(self._handle(path).fd, (view,), offset) == len(view)
        except OSError:
            return False

    def read_into(self, path: str, offset: int, buffers: Sequence[Any]) -> None:
        """Fill writable C-contiguous byte buffers, one after the other, from ``offset`` on.

        Raises the same errors as :meth:`read`.
        """
        views = [memoryview(b).cast("B") for b in buffers]
        wanted = sum(len(v) for v in views)
        if wanted == 0:
            return
        if is_url(path):
            self._read_url(path, offset, views, wanted)
            return
        handle = self._handle(path)
        done = 0
        while views:
            count = os.preadv(handle.fd, views[:_IOV_MAX], offset + done)
            if count == 0:
                raise ShortReadError(
                    f"{path}: ends at byte {offset + done}, but {wanted} bytes from {offset} on were expected; "
                    "the file is truncated: copy or write it again"
                )
            done += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views and count:
                views[0] = views[0][count:]

    def _read_url(self, path: str, offset: int, views: list[memoryview], wanted: int) -> None:
        fs, key = _filesystem(path)
        data = fs.cat_file(key, start=offset, end=offset + wanted)
        if len(data) != wanted:
            raise ShortReadError(
                f"{path}: gave {len(data)} bytes from {offset} on, but {wanted} were expected; "
                "the object is truncated: upload it again"
            )
        done = 0
        for view in views:
            view[:] = data[done : done + len(view)]
            done += len(view)

    def forget(self, path: str) -> None:
        """Forget the descriptors of a file, or of all files below a folder.

        A store written again at the same path has new files behind the old names.
        """
        with self._lock:
            for known in [k for k in self._handles if k == path or k.startswith(path.rstrip("/") + "/")]:
                del self._handles[known]

    def close(self) -> None:
        """Forget every open descriptor; readers in progress keep theirs until they end."""
        with self._lock:
            self._handles.clear()


_cache = FileCache()


def files() -> FileCache:
    """Return this process's cache; a forked process gets a fresh one, so that descriptors and locks are its own."""
    global _cache  # noqa: PLW0603 - one per process is the point
    if _cache._pid != os.getpid():
        _cache = FileCache()
    return _cache
