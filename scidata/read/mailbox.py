"""Arrays that processes of one node hand to each other, through files in memory: whoever needs one first makes it.

There is no server and no collective. An array is a file; who holds its lock makes it, under another name, and renames
it. The kernel lets go of the lock of a process that dies, so the next one that looks makes the array instead. Who
waits longer than making it would take makes one for itself. A file goes when all who need it have taken it, or when
the bytes of all are too many: the oldest first.

Processes hold a lock on their folder while they live. A folder of which nobody does, because a whole job was killed,
is removed by the next that makes one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import multiprocessing.util
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from scidata.core.memory import empty

_HEADER = 4096  # bytes: a flag for each taker; the array begins on a page
_MAGIC = b"scidata1"
_FIRST_FLAG = 64
MAX_TAKERS = _HEADER - _FIRST_FLAG
_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.005  # s between two looks at what another process makes
_PATIENCE = 0.05  # s, and four times what making the last one took
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, instead of a fault for each
_PREFIX = "scidata-decoded-"

T = TypeVar("T")
Array = npt.NDArray[Any]


class Mailbox:
    """Arrays by key, made once by the processes that share the name. Thread-safe; pickles as its arguments.

    Parameters
    ----------
    name
        What tells these processes from others of the same user on this node.
    me
        This process's number among them, from 0 on.
    max_bytes
        Of all arrays that wait to be taken; and no more than half of what is free where such files lie.
    """

    def __init__(self, name: str, me: int, max_bytes: int) -> None:
        self._name, self._me, self._max_bytes = name, me, max_bytes
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._pid = 0
        self._seconds = 0.0  # that making the last one took

    def __reduce__(self) -> tuple[Any, ...]:
        return Mailbox, (self._name, self._me, self._max_bytes)

    def take(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        make: Callable[[Array], T],
        *,
        takers: Sequence[int],
        wait: bool = True,
    ) -> tuple[Array, T | None] | None:
        """Return an array, read-only where another process made it, and what ``make`` returned if this one did.

        Parameters
        ----------
        make
            Fills an array of this shape and dtype. Its errors are raised here; others then try for themselves.
        takers
            Numbers of the processes that will ask for it, this one included.
        wait
            False: return None where another process makes it right now.
        """
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        folder = self._open_folder()
        if folder is None or len(takers) < 2 or max(takers) >= MAX_TAKERS or not nbytes:
            return self._alone(shape, dtype, make)
        path = os.path.join(folder, hashlib.sha256(key.encode()).hexdigest()[:32])
        deadline, pause = time.monotonic() + _PATIENCE + 4 * self._seconds, _FIRST_PAUSE
        while True:
            memory = self._received(path, nbytes, takers)
            if memory is not None:
                return np.frombuffer(memory, dtype, nbytes // dtype.itemsize, _HEADER).reshape(shape), None
            with _claimed(path + ".lock") as mine:
                if mine and not os.path.exists(path):
                    return self._publish(path, shape, dtype, make, takers)
            if not wait:
                return None
            if time.monotonic() > deadline:
                return self._alone(shape, dtype, make)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def _alone(self, shape: tuple[int, ...], dtype: np.dtype[Any], make: Callable[[Array], T]) -> tuple[Array, T]:
        values = empty(shape, dtype)
        return values, self._timed(make, values)

    def _timed(self, make: Callable[[Array], T], values: Array) -> T:
        began = time.monotonic()
        made = make(values)
        self._seconds = time.monotonic() - began
        return made

    def _received(self, path: str, nbytes: int, takers: Sequence[int]) -> mmap.mmap | None:
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(fd).st_size != _HEADER + nbytes:
                return None
            memory = mmap.mmap(fd, _HEADER + nbytes, mmap.MAP_SHARED | _POPULATE, mmap.PROT_READ)
            self._sign(fd, path, takers)
            return memory
        finally:
            os.close(fd)

    def _sign(self, fd: int, path: str, takers: Sequence[int]) -> None:
        """Note that this process has it; who is the last removes it."""
        os.pwrite(fd, b"\1", _FIRST_FLAG + self._me)
        flags = os.pread(fd, MAX_TAKERS, _FIRST_FLAG)
        if all(flags[taker] for taker in takers):
            _unlink(path)

    def _publish(
        self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any], make: Callable[[Array], T], takers: Sequence[int]
    ) -> tuple[Array, T]:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        fd = self._new_file(path, _HEADER + nbytes)
        if fd is None:
            return self._alone(shape, dtype, make)
        try:
            memory = mmap.mmap(fd, _HEADER + nbytes, mmap.MAP_SHARED | _POPULATE)
            memory[: len(_MAGIC)] = _MAGIC
            values = np.frombuffer(memory, dtype, nbytes // dtype.itemsize, _HEADER).reshape(shape)
            made = self._timed(make, values)
            self._sign(fd, path, takers)
            os.rename(path + ".new", path)
            return values, made
        except BaseException:
            _unlink(path + ".new")
            raise
        finally:
            os.close(fd)

    def _new_file(self, path: str, nbytes: int) -> int | None:
        """Return an empty file whose memory is there already: later there would be a bus error, not an exception."""
        with contextlib.suppress(OSError, AttributeError):  # no folder any more, no memory, no such call (macOS)
            self._make_room(os.path.dirname(path), nbytes)
            fd = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                return fd
            except BaseException:
                os.close(fd)
                _unlink(path + ".new")
                raise
        return None

    def _make_room(self, folder: str, nbytes: int) -> None:
        space, found = os.statvfs(folder), []
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                found.append((status.st_mtime_ns, status.st_size, entry.path))
        held = sum(size for _, size, _ in found)
        most = min(self._max_bytes, held + space.f_bavail * space.f_frsize // 2)
        total = held + nbytes
        for _, size, path in sorted(found):
            if total <= most:
                return
            if not path.endswith((".lock", ".new", "alive")):
                _unlink(path)
                total -= size
        if total > most:
            raise OSError(errno.ENOSPC, "arrays that wait to be taken are as many as may be")

    def _open_folder(self) -> str | None:
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._folder, self._pid = _join(self._name), os.getpid()
        return self._folder


def _base() -> str:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


_alive: dict[str, tuple[int, int]] = {}  # by folder: the process, and its descriptor of the lock


def _join(name: str) -> str | None:
    """Return the folder of these processes, this one's from now on; None where there can be none."""
    folder = os.path.join(_base(), f"{_PREFIX}{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:24]}")
    if folder in _alive and _alive[folder][0] == os.getpid():
        return folder
    _sweep()
    for _ in range(100):
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
            status = os.stat(folder)
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                return None  # somebody else's: what lies there is not to be trusted
            fd = os.open(os.path.join(folder, "alive"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            continue  # removed meanwhile
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.path.exists(os.path.join(folder, "alive")) and _same(fd, os.path.join(folder, "alive")):
            _alive[folder] = os.getpid(), fd
            multiprocessing.util.Finalize(None, _leave, exitpriority=0)  # its children end without atexit
            return folder
        os.close(fd)
    return None


def _same(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def _sweep() -> None:
    """Remove folders of this user that no process uses."""
    for entry in os.scandir(_base()):
        if entry.name.startswith(f"{_PREFIX}{os.getuid()}-"):
            _remove_if_dead(entry.path)


def _remove_if_dead(folder: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(folder, "alive"), os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def _leave() -> None:
    for folder, (pid, fd) in list(_alive.items()):
        if pid == os.getpid():
            os.close(fd)
            _remove_if_dead(folder)
    _alive.clear()


@contextlib.contextmanager
def _claimed(path: str) -> Iterator[bool]:
    """Hold a lock, if nobody else does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True  # the folder was removed: publishing will fail, and the array is made for this process alone
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        yield False
        return
    try:
        yield True
    finally:
        _unlink(path)
        os.close(fd)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
