"""Arrays that processes of one node hand to each other through files in memory; the first that needs one makes it.

There is no server and no collective. An array is a file. The process that holds its lock makes it under another name,
and renames it. The kernel frees the lock of a process that dies, so the next one that looks makes the array instead. A
process that waits longer than making the array would take makes one for itself. When all takers have it, its file is
free for the next array of its size: pages of memory take longer to get than an array of half a megabyte to copy. A
file is only written again where no process holds its lock, as readers do while they copy. The oldest files go when
the bytes of all are too many.

Processes hold a lock on their folder while they live. A folder that no process locks, because a whole job was killed,
is removed by the next process that makes one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import mmap
import multiprocessing.util
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from scidata.core.cache import Cache
from scidata.core.memory import empty
from scidata.core.own_files import is_still, open_own
from scidata.core.types import Array

_HEADER = 4096  # bytes: the key, a flag for each taker; the array begins on a page
_MAGIC = b"scidata3"
_KEY = 16  # bytes
_FIRST_FLAG = 64
MAX_TAKERS = _HEADER - _FIRST_FLAG
_PAUSE = 0.0002  # s between two looks whether an array is there
_LOOK = 0.02  # s between two looks whether a process that makes an array is still there
_PATIENCE = 5.0  # s, and four times as long as the last one took: a busy machine may leave a rank without a core
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, instead of a fault for each
_PREFIX = "scidata-decoded-"
_FREE = "free"  # the folder of files that all takers have, named by their size
_MAX_MAPPED = 128 << 20  # bytes of files, and so many of them, that stay mapped until they are wanted again
_MAX_MAPS = 64

T = TypeVar("T")


class _Wanted(NamedTuple):
    key: bytes
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    takers: Sequence[int]

    @property
    def size(self) -> int:
        return _HEADER + math.prod(self.shape) * self.dtype.itemsize

    @property
    def head(self) -> bytes:
        return _MAGIC + self.key

    def view(self, memory: mmap.mmap, *, writeable: bool = False) -> Array:
        values = np.frombuffer(memory, self.dtype, math.prod(self.shape), _HEADER).reshape(self.shape)
        values.flags.writeable = writeable
        return values


class SharedArrays:
    """Arrays by key, made once by the processes that share the name. Thread-safe; pickles as its arguments.

    - ``name``: the same on these processes, and on no others of the same user on this node.
    - ``me``: this process's number among them, from 0 on.
    - ``max_bytes``: of all arrays that wait to be taken; and no more than half of the free space where such files lie.
    """

    def __init__(self, name: str, me: int, max_bytes: int) -> None:
        self._name, self._me, self._max_bytes = name, me, max_bytes
        self._folders: Cache[tuple[str | None]] = Cache(1)  # by process
        self._maps: Cache[mmap.mmap] = Cache(_MAX_MAPPED, "lru")  # by file
        self._seconds = 0.0  # that making the last one took

    def __reduce__(self) -> tuple[object, ...]:
        return SharedArrays, (self._name, self._me, self._max_bytes)

    def take(
        self,
        key: bytes,
        shape: tuple[int, ...],
        dtype: np.dtype[np.generic],
        make: Callable[[Array], T],
        use: Callable[[Array], None],
        *,
        takers: Sequence[int],
        wait: bool,
    ) -> tuple[bool, T | None]:
        """Have an array used; return whether it was, and the result of ``make`` if this process made it.

        - ``key``: at least 16 bytes of a digest.
        - ``make``: fills an array of this shape and dtype. Its errors are raised here; others then try for themselves.
        - ``use``: is called once with the array, which others read, too, and which is gone when it returns.
        - ``takers``: numbers of the processes that will ask for it, this one included.
        - ``wait``: false: use nothing where another process makes it right now.
        """
        (folder,) = self._folders.get_or_make(os.getpid(), lambda: (_join(self._name),), once=True)
        key = key[:_KEY]
        wanted = _Wanted(key, os.path.join(folder or "", key.hex()), shape, dtype, takers)
        if folder is None or len(takers) < 2 or max(takers) >= MAX_TAKERS or wanted.size == _HEADER:
            return True, self._alone(wanted, make, use)
        deadline = time.monotonic() + _PATIENCE + 4 * self._seconds
        while True:
            if self._received(wanted, use):
                return True, None
            with _claimed(wanted.path + ".lock") as mine:
                if mine and not os.path.exists(wanted.path):
                    return True, self._publish(wanted, folder, make, use)
            if not wait:
                return False, None
            if time.monotonic() > deadline:
                return True, self._alone(wanted, make, use)
            look = time.monotonic() + _LOOK
            time.sleep(_PAUSE)
            while time.monotonic() < look and not os.path.exists(wanted.path):
                time.sleep(_PAUSE)

    def _alone(self, wanted: _Wanted, make: Callable[[Array], T], use: Callable[[Array], None]) -> T:
        values = empty(wanted.shape, wanted.dtype)
        made = self._timed(make, values)
        use(values)
        return made

    def _timed(self, make: Callable[[Array], T], values: Array) -> T:
        began = time.monotonic()
        made = make(values)
        self._seconds = time.monotonic() - began
        return made

    def _received(self, wanted: _Wanted, use: Callable[[Array], None]) -> bool:
        try:
            fd = open_own(wanted.path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.pread(fd, len(wanted.head), 0) != wanted.head or os.fstat(fd).st_size != wanted.size:
                return False  # made anew between the two
            use(wanted.view(self._map(fd, wanted.size)))
            self._sign(fd, wanted)
        except BlockingIOError:
            return False  # being made anew
        finally:
            _let_go(fd)
        return True

    def _sign(self, fd: int, wanted: _Wanted) -> None:
        """Note that this process has an array; set its file free once all have."""
        os.pwrite(fd, b"\1", _FIRST_FLAG + self._me)
        flags = os.pread(fd, max(wanted.takers) + 1, _FIRST_FLAG)
        if all(flags[taker] for taker in wanted.takers):
            folder = os.path.dirname(wanted.path)
            with contextlib.suppress(OSError):  # another one did it at the same time, or it had to go
                os.rename(wanted.path, os.path.join(folder, _FREE, f"{wanted.size}-{uuid.uuid4().hex}"))

    def _map(self, fd: int, nbytes: int) -> mmap.mmap:
        status = os.fstat(fd)
        return self._maps.get_or_make(
            (status.st_dev, status.st_ino),
            lambda: mmap.mmap(fd, nbytes, mmap.MAP_SHARED | _POPULATE),
            lambda memory: max(len(memory), _MAX_MAPPED // _MAX_MAPS),
        )

    def _publish(self, wanted: _Wanted, folder: str, make: Callable[[Array], T], use: Callable[[Array], None]) -> T:
        """Make an array for all; for this process alone if there can be no file."""
        path = os.path.join(folder, f"{uuid.uuid4().hex}.new")
        file = self._new_file(wanted.size, folder, path)
        if file is None:
            return self._alone(wanted, make, use)
        fd, memory = file
        try:
            os.pwrite(fd, wanted.head.ljust(_FIRST_FLAG + max(wanted.takers) + 1, b"\0"), 0)  # nobody has it yet
            made = self._timed(make, wanted.view(memory, writeable=True))
            fcntl.flock(fd, fcntl.LOCK_SH)
            with contextlib.suppress(OSError):  # the folder was removed
                os.rename(path, wanted.path)
            use(wanted.view(memory))
            self._sign(fd, wanted)
        except BaseException:
            _unlink(path)
            raise
        finally:
            _let_go(fd)
        return made

    def _new_file(self, size: int, folder: str, path: str) -> tuple[int, mmap.mmap] | None:
        """Return a file for an array, with its lock, and its memory; one that all have taken if there is one."""
        free = os.path.join(folder, _FREE)
        with contextlib.suppress(OSError):  # no folder any more
            for name in [*(each for each in os.listdir(free) if each.startswith(f"{size}-")), None]:
                with contextlib.suppress(OSError, AttributeError):  # taken, or no memory, or no such call (macOS)
                    if name is None:
                        self._make_room(folder, size)
                    else:
                        os.rename(os.path.join(free, name), path)
                    return self._locked(path, size)
                _unlink(path)
        return None

    def _locked(self, path: str, size: int) -> tuple[int, mmap.mmap]:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not where someone takes it for a second time
            if os.fstat(fd).st_size < size:
                os.posix_fallocate(fd, 0, size)  # later there would be a bus error, not an exception
            return fd, self._map(fd, size)
        except BaseException:
            _let_go(fd)
            raise

    def _make_room(self, folder: str, nbytes: int) -> None:
        """Delete the oldest arrays until there is room for another, free files first."""
        space, found = os.statvfs(folder), []
        for is_free, entries in ((True, os.scandir(os.path.join(folder, _FREE))), (False, os.scandir(folder))):
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.name not in ("alive", _FREE):
                        status = entry.stat(follow_symlinks=False)
                        found.append((not is_free, status.st_mtime_ns, status.st_size, entry.path))
        held = sum(size for _, _, size, _ in found)
        most = min(self._max_bytes, held + space.f_bavail * space.f_frsize // 2) - nbytes
        for _, _, size, path in sorted(found):
            if held > most and not path.endswith((".lock", ".new")):
                _unlink(path)
                held -= size
        if held > most:
            raise OSError(errno.ENOSPC, "arrays that wait to be taken are as many as may be")


def _let_go(fd: int) -> None:
    """Close a file that may be mapped: the mapping has a descriptor, too, and the lock would stay with that."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _base() -> str:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


_alive: dict[tuple[str, int], int] = {}  # by folder and process: its descriptor of the lock


def _join(name: str) -> str | None:
    folder = os.path.join(_base(), f"{_PREFIX}{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:24]}")
    if (folder, os.getpid()) in _alive:
        return folder
    _sweep()
    for _ in range(100):
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
            status = os.lstat(folder)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                return None  # another user's: its content is not to be trusted
            fd = open_own(os.path.join(folder, "alive"), os.O_RDWR | os.O_CREAT)
        except OSError:
            continue  # removed meanwhile
        fcntl.flock(fd, fcntl.LOCK_SH)
        if is_still(fd, os.path.join(folder, "alive")):
            os.makedirs(os.path.join(folder, _FREE), 0o700, exist_ok=True)
            if _alive.setdefault((folder, os.getpid()), fd) != fd:
                os.close(fd)  # another thread was first
                return folder
            multiprocessing.util.Finalize(None, _leave, exitpriority=0)  # its children end without atexit
            return folder
        os.close(fd)
    return None


def _sweep() -> None:
    for entry in os.scandir(_base()):
        if entry.name.startswith(f"{_PREFIX}{os.getuid()}-") and entry.is_dir(follow_symlinks=False):
            _remove_if_dead(entry.path)


def _remove_if_dead(folder: str) -> None:
    with contextlib.suppress(OSError):
        fd = open_own(os.path.join(folder, "alive"), os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_still(fd, os.path.join(folder, "alive")):
                return  # removed by another one meanwhile, and perhaps made anew
            gone = f"{folder}-{uuid.uuid4().hex}"  # at once: a process that joins now finds none of it
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)
        finally:
            os.close(fd)


def _leave() -> None:
    for (folder, pid), fd in list(_alive.items()):
        if pid == os.getpid():
            os.close(fd)
            _remove_if_dead(folder)
    _alive.clear()


@contextlib.contextmanager
def _claimed(path: str) -> Iterator[bool]:
    try:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
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
