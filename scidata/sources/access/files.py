"""Byte ranges of local files and of URLs: the only place that opens data files for raw reads.

A local path is read with ``preadv`` into the caller's buffer through a bounded cache of descriptors; anything with a
scheme (``s3://``, ``https://``, ``memory://``) goes through fsspec's ranged reads. Both raise the same errors, and both
try again where a failure may pass by itself (:mod:`scidata.sources.access.retry`).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import fcntl
import os
import resource
import struct
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

from scidata.core.urls import Url, absolute, is_url, local_path, url_of
from scidata.errors import ShortReadError, SourceChangedError
from scidata.sources.access import retry
from scidata.sources.access.answers import size_in
from scidata.sources.access.kept_urls import KeptUrl
from scidata.sources.access.remote import checks_versions, fetch, request
from scidata.sources.access.retry import is_transient

_T = TypeVar("_T")
_MAX_OPEN = 256  # a thousand-file store must not run into the usual limit of 1,024 descriptors
_SEVERAL = 16  # files open at once, from which on there will be many
_OTHERS = 64  # descriptors that the process may have besides
_IOV_MAX = 1024  # Linux's limit on buffers in one preadv
_WAITS_FOR_DESCRIPTOR = (0, 0.001, 0.01, 0.1)  # seconds; a read of a chunk takes less
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # waits for no FIFO: reads fail
_OPENAT2, _AT_FDCWD, _NO_SYMLINKS = 437, -100, 4  # of Linux
_HOW = struct.pack("QQQ", _FLAGS, 0, _NO_SYMLINKS)
_MAX_VERSIONS = 1 << 16  # files of a data set of which versions are kept: some 15 MB

#: Bytes of a file, when it was last changed, and when its inode was, which no program sets back; in ns. Not the inode's
#: number: FUSE file systems number files anew.
Version: TypeAlias = tuple[int, int, int]


def version_at(path: str) -> Version:
    """Return the version of the local file that has this name now."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _url(path: str) -> Url:
    url = url_of(path)
    assert isinstance(url, Url)
    return url


def most_open() -> int:
    """Return the number of descriptors to keep: a quarter of the process's limit, which others use too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if soft == resource.RLIM_INFINITY else max(8, min(_MAX_OPEN, soft // 4))


def retried(path: str, call: Callable[[], _T]) -> _T:
    """Call until it does not fail for a passing reason, as :class:`scidata.sources.access.retry.Retry` says."""
    return retry.RETRY.run(path, call)


def _linux_syscall() -> Callable[[int, int, bytes, bytes, int], int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    function.restype = ctypes.c_long
    return function


_syscall = _linux_syscall()


def open_unlinked(path: str) -> int:
    """Open a file by an absolute path; Linux (5.6) fails where part of it is a link, and Python has no such call."""
    name = path.encode(errors="surrogateescape")
    number = -1 if _syscall is None else _syscall(_OPENAT2, _AT_FDCWD, name, _HOW, len(_HOW))
    if number < 0:
        error = ctypes.get_errno() or errno.ENOSYS
        raise OSError(error, os.strerror(error), path)
    return number


class _Handle:
    """An open descriptor that closes when the last user lets go, so eviction never closes under a reader.

    Its number never leaves it. Whoever had only the number could read after another thread has let the handle go: the
    kernel gives the number to the next file that is opened, and the bytes would be that file's, without an error.
    """

    __slots__ = ("_descriptor", "_unlinked")

    def __init__(self, path: str, real: str = "") -> None:
        self._unlinked = real
        try:
            self._descriptor = open_unlinked(real) if real else os.open(path, _FLAGS)
        except OSError:
            if not real:
                raise
            self._unlinked, self._descriptor = "", os.open(path, _FLAGS | os.O_NOFOLLOW)

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        return os.preadv(self._descriptor, views, offset)  # this frame's self keeps it open

    def status(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def status_at(self, real: str) -> os.stat_result | None:
        is_there = self._unlinked == real or os.readlink(f"/proc/self/fd/{self._descriptor}") == real
        return os.fstat(self._descriptor) if is_there else None

    def is_locked(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def reserve(self, number: int) -> None:
        """Have Linux make room for this many descriptors at once.

        In a process with threads its table doubles at 64, 128 and 256, and whoever opens a file then waits some 7 ms
        each time, until no processor looks at the old one (``expand_fdtable``: ``synchronize_rcu``).
        """
        with contextlib.suppress(OSError):  # more than the process may have
            os.close(fcntl.fcntl(self._descriptor, fcntl.F_DUPFD_CLOEXEC, number))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end, os may be gone
        if hasattr(self, "_descriptor"):  # not where opening failed
            close(self._descriptor)


class FileCache:
    """Thread-safe reads of byte ranges, with a bounded number of open descriptors."""

    def __init__(self, max_open: int | None = None) -> None:
        self._max_open = most_open() if max_open is None else max_open
        self._handles: OrderedDict[str, _Handle] = OrderedDict()
        self._has_reserved = False
        self._lock = threading.Lock()

    def _handle(self, path: str, real: str = "") -> _Handle:
        handles = self._handles
        handle = handles.get(path)  # one step, which needs no lock
        if handle is not None:
            try:  # noqa: SIM105 - a context manager takes longer than this
                handles.move_to_end(path)
            except KeyError:  # another thread has just dropped it
                pass
            return handle
        try:
            handle = _Handle(path, real)
        except OSError as e:
            handle = self._open_again(path, real, e)
        with self._lock:
            handle = handles.setdefault(path, handle)  # of two threads both read the same file
            while len(handles) > self._max_open:
                handles.popitem(last=False)
            is_first_of_many = len(handles) == _SEVERAL and not self._has_reserved
            self._has_reserved |= is_first_of_many
        if is_first_of_many:
            handle.reserve(self._max_open + _OTHERS)
        return handle

    def _open_again(self, path: str, real: str, error: OSError) -> _Handle:
        """Where the process has no descriptor left, keep fewer from now on, and open once readers release some."""
        for wait in _WAITS_FOR_DESCRIPTOR:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise error
            with self._lock:
                self._max_open = max(1, min(self._max_open, len(self._handles)) // 2)
                self._handles.clear()
            time.sleep(wait)
            try:
                return _Handle(path, real)
            except OSError as e:
                error = e
        raise error

    def version(self, path: str) -> Version:
        """Return the version of a local file, as reads get it."""
        handle = self._handles.get(path)  # as in status(), without a layer between
        status = os.stat(path) if handle is None else handle.status()
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def status(self, path: str) -> os.stat_result:
        """Return the status of a local file: of the open one, if it is open, not of a file that took its name since."""
        handle = self._handles.get(path)  # one step, which needs no lock
        return os.stat(path) if handle is None else handle.status()

    def opened(self, path: str, real: str) -> os.stat_result | None:
        """Open a local file that is read next; return its status, or None if links lead elsewhere than ``real``."""
        return self._handle(path, real).status_at(real)

    def is_locked(self, path: str) -> bool:
        """Return True if a program that writes a local file holds its lock; False if a file system has no locks."""
        return self._handle(path).is_locked()

    def open_size(self, path: str) -> int:
        """Return the size as :meth:`size` does, of a file that is read next: a local one is opened for that now."""
        return self.size(path) if is_url(path) else int(retried(path, lambda: self._handle(path).status().st_size))

    def size(self, path: str) -> int:
        """Return the size in bytes; raises FileNotFoundError. Of a local file that is open, no path is looked up."""
        if not is_url(path):
            return int(retried(path, lambda: self.status(path).st_size))
        url = _url(path)
        known = None if isinstance(url, KeptUrl) or not checks_versions(url) else url.seen.get(str(url))
        if known is not None and known.size is not None:  # each read compares it
            return known.size
        info = request(url, "info")
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, f"{path}: a folder, where an object was expected")
        return size_in(info, path)

    def read(self, path: str, offset: int, nbytes: int) -> bytearray:
        """Return ``nbytes`` bytes from ``offset``; raises FileNotFoundError, or ShortReadError at the file's end."""
        buffer = bytearray(nbytes)
        self.read_into(path, offset, [memoryview(buffer)])
        return buffer

    def read_at_once(self, path: str, offset: int, *views: Any) -> bool:
        """Fill views of bytes of a local file by one call, if that works; if not, :meth:`read_into` says why."""
        if "://" in path:
            return False
        try:
            return self._handle(path).read(views, offset) == sum(map(len, views))
        except OSError:
            return False

    def read_each(self, path: str, offsets: Sequence[int], views: Iterable[memoryview]) -> int:
        """Do as :meth:`read_at_once` for several ranges of one file; return how many came before one that failed."""
        if is_url(path):
            return 0
        done = 0
        with contextlib.suppress(OSError):
            read = self._handle(path).read
            for offset, view in zip(offsets, views, strict=True):
                if read((view,), offset) != len(view):
                    break
                done += 1
        return done

    def read_into(self, path: str, offset: int, buffers: Sequence[Any]) -> None:
        """Fill C-contiguous byte buffers, one after the other, from ``offset`` on; raises as :meth:`read`."""
        views = [memoryview(b).cast("B") for b in buffers]
        wanted = sum(len(v) for v in views)
        if wanted == 0:
            return
        if is_url(path):
            scatter(fetch(_url(path), offset, wanted), views)
            return
        try:
            self._read_local(path, offset, list(views), wanted)
        except OSError as e:
            if not is_transient(e):
                raise
            self.forget(path)  # after ESTALE the descriptor is no good any more; opening anew costs little

            def again() -> None:
                try:
                    self._read_local(path, offset, list(views), wanted)
                except OSError:
                    self.forget(path)
                    raise

            retry.RETRY.run(path, again, failed=e)

    def _read_local(self, path: str, offset: int, views: list[memoryview], wanted: int) -> None:
        handle = self._handle(path)
        done = 0
        while views:
            count = handle.read(views[:_IOV_MAX], offset + done)
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

    def forget(self, path: str) -> None:
        """Forget the descriptors of a file, or of all below a folder: a store written again has new files there."""
        local = local_path(path)
        names = {str(path)} if local is None else {str(path), absolute(local)}
        with self._lock:
            folders = tuple(name.rstrip("/") + "/" for name in names)
            for known in [k for k in self._handles if k in names or k.startswith(folders)]:
                del self._handles[known]

    def forget_each(self, paths: Iterable[str]) -> None:
        """Forget the descriptors of many files, named as they were opened."""
        names = frozenset(paths)
        with self._lock:
            for known in [name for name in self._handles if name in names]:
                del self._handles[known]

    def close(self) -> None:
        """Forget every open descriptor; readers in progress keep theirs until they end."""
        with self._lock:
            self._handles.clear()


class Versions:
    """The versions of the local files that a source reads, as first seen: a file that has another one was replaced.

    Offsets that were found in one version mean nothing in another, and samples of two versions do not mix. Thread-safe;
    pickles.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Version] = {}
        self._opened: dict[str, Version] = {}

    def __getstate__(self) -> dict[str, object]:
        return {"_seen": self._seen.copy(), "_opened": {}}  # other threads add to it

    def of(self, path: str) -> Version | None:
        """Return the version of a file as it was first seen; None if it was not."""
        return self._seen.get(path)

    def opened(self, path: str, status: os.stat_result) -> None:
        """Take in the status of a file that is open, and read next: its first check need not ask for it again."""
        if len(self._opened) < _MAX_VERSIONS:
            self._opened[path] = status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def note(self, path: str, found: Version) -> None:
        """Take in the version of a file that is about to be read."""
        known = self._seen.get(path)
        if known is None and len(self._seen) < _MAX_VERSIONS:
            known = self._seen.setdefault(path, found)
        if known not in (None, found):
            raise SourceChangedError(
                f"{path}: it was replaced or changed while it was in use: {_shown(known)} when it was first read, "
                f"{_shown(found)} now; open the data set again, in all processes, once it changes no more"
            )

    def note_opened(self, path: str) -> None:
        """Take in the version of a local file that is described next: at first, of the open one; later, by its name."""
        if path in self._seen:
            self.note(path, version_at(path))
        else:
            files().open_size(path)
            self.note(path, files().version(path))

    def check(
        self, paths: Iterable[str], before_new: Callable[[str], None] = lambda name: None, name: str = ""
    ) -> None:
        """Raise if files that were just read, as they are open, are not of the known versions.

        Of URLs nothing is known here; a file that is gone says so when it is opened again. ``before_new`` is called
        once, with ``name``, before the first that was not known is taken in.
        """
        version, seen, opened, are_new = files().version, self._seen, self._opened, False
        for path in paths:
            try:
                found = opened.pop(path, None) or version(path)
            except (FileNotFoundError, NotADirectoryError):  # or it is no file, but names some
                continue
            known = seen.get(path)
            if known == found:
                continue
            if known is None and not are_new:
                before_new(name)
                are_new = True
            if known is not None or len(seen) >= _MAX_VERSIONS or seen.setdefault(path, found) != found:
                self.note(path, found)


def _shown(version: Version) -> str:
    size, *times = version
    content, inode = (f"{datetime.datetime.fromtimestamp(ns / 1e9, datetime.UTC):%Y-%m-%d %H:%M:%S.%f}" for ns in times)
    return f"{size} bytes of {content} UTC (inode {inode})"


def scatter(data: bytes | memoryview, buffers: Sequence[Any]) -> None:
    """Copy bytes into buffers, one after the other."""
    done = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        view[:] = data[done : done + len(view)] if done or len(view) < len(data) else data
        done += len(view)


_cache = FileCache()


def _renew() -> None:
    global _cache  # noqa: PLW0603 - one per process is the point
    _cache = FileCache()


os.register_at_fork(after_in_child=_renew)


def files() -> FileCache:
    """Return this process's cache; a forked process gets a fresh one, so that descriptors and locks are its own."""
    return _cache
