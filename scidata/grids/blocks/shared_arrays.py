"""Arrays that processes of one node hand to each other through files in memory; the first that needs one makes it.

There is no server and no collective. An array is a file. The process that holds its lock makes it under another name,
and renames it. The kernel frees the lock of a process that dies, so the next one that looks makes the array instead. A
process that waits longer than making the array would take makes one for itself. When all takers have it, its file is
free for the next array of its maker: pages of memory take longer to get than an array of half a megabyte to copy. A
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
import itertools
import math
import mmap
import multiprocessing.util
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from scidata.core.memory import empty
from scidata.core.own_files import open_own
from scidata.grids.blocks.futex import Futex

_HEADER = 4096  # bytes: key and free name, a flag for each taker; the array begins on a page
_MAGIC = b"scidata2"
_KEY = 16  # bytes
_FIRST_FLAG = 64
MAX_TAKERS = _HEADER - _FIRST_FLAG
_PAUSE = 0.0005  # s
_LOOK = 0.02  # s between two looks whether a process that makes an array is still there
_PATIENCE = 5.0  # s, and four times as long as the last one took: a busy machine may leave a rank without a core
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)  # all pages at once, instead of a fault for each
_PREFIX = "scidata-decoded-"
_MAX_MAPPED = 128 << 20  # bytes of files, and so many of them, that stay mapped until they are wanted again
_MAX_MAPS = 64
_ROOM = 64  # a part of the room that is left, before a process counts the arrays of all again
_MAX_OWN = 64  # files of a size that a process made and may find free

_numbers = itertools.count()  # of files that this process made, in any folder

T = TypeVar("T")
Array: TypeAlias = npt.NDArray[np.generic]


class _File(NamedTuple):
    """A file that an array is made in: the descriptor, which holds its lock, its memory, and its names."""

    fd: int
    memory: mmap.mmap
    path: str
    free: str


class _Wanted(NamedTuple):
    """An array that a process asks for: its name, and the processes that will ask for it."""

    key: bytes
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    takers: Sequence[int]

    @property
    def size(self) -> int:
        """Bytes of its file."""
        return _HEADER + math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: mmap.mmap, *, writeable: bool = False) -> Array:
        """Return the array in the memory of its file."""
        values = np.frombuffer(memory, self.dtype, math.prod(self.shape), _HEADER).reshape(self.shape)
        values.flags.writeable = writeable
        return values


class SharedArrays:
    """Arrays by key, made once by the processes that share the name. Thread-safe; pickles as its arguments.

    Parameters
    ----------
    name
        The same on these processes, and on no others of the same user on this node.
    me
        This process's number among them, from 0 on.
    max_bytes
        Of all arrays that wait to be taken; and no more than half of the free space where such files lie.
    """

    def __init__(self, name: str, me: int, max_bytes: int) -> None:
        self._name, self._me, self._max_bytes = name, me, max_bytes
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._futex: Futex | None = None
        self._pid = 0
        self._forget()

    def _forget(self) -> None:
        self._seconds = 0.0  # that making the last one took
        self._room = 0  # bytes of new files before the folder is looked at again
        self._own: dict[int, deque[str]] = {}  # free names of those that may be free, by size
        self._maps: OrderedDict[tuple[int, int], mmap.mmap] = OrderedDict()  # by file
        self._mapped = 0

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
        wait: bool = True,
    ) -> tuple[bool, T | None]:
        """Have an array used; return whether it was, and the result of ``make`` if this process made it.

        Parameters
        ----------
        key
            At least 16 bytes of a digest.
        make
            Fills an array of this shape and dtype. Its errors are raised here; others then try for themselves.
        use
            Is called once with the array, which others read, too, and which is gone when it returns.
        takers
            Numbers of the processes that will ask for it, this one included.
        wait
            False: use nothing where another process makes it right now.
        """
        folder, futex = self._open_folder()
        key = key[:_KEY]
        wanted = _Wanted(key, os.path.join(folder or "", key.hex()), shape, dtype, takers)
        if folder is None or futex is None or len(takers) < 2 or max(takers) >= MAX_TAKERS or wanted.size == _HEADER:
            return True, self._alone(wanted, make, use)
        deadline = time.monotonic() + _PATIENCE + 4 * self._seconds
        while True:
            heard = futex.heard(key)
            if self._received(wanted, use):
                return True, None
            with _claimed(wanted.path + ".lock") as mine:
                if mine and not os.path.exists(wanted.path):
                    file = self._new_file(folder, wanted.size)
                    if file is None:
                        return True, self._alone(wanted, make, use)
                    return True, self._publish(wanted, file, futex, make, use)
            if not wait:
                return False, None
            if time.monotonic() > deadline:
                return True, self._alone(wanted, make, use)
            if mine:
                time.sleep(_PAUSE)  # there is a file of this name with other content
            else:
                futex.wait(key, heard, _LOOK)

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

    # -- what others made --------------------------------------------------------------------------------------------

    def _received(self, wanted: _Wanted, use: Callable[[Array], None]) -> bool:
        try:
            fd = open_own(wanted.path, os.O_RDWR)
        except FileNotFoundError:
            return False
        free = None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            head = os.pread(fd, _FIRST_FLAG, 0)
            if head[: len(_MAGIC) + _KEY] != _MAGIC + wanted.key or os.fstat(fd).st_size != wanted.size:
                return False  # made anew between the two
            use(wanted.view(self._map(fd, wanted.size)))
            if self._sign(fd, wanted.takers):
                free = head[len(_MAGIC) + _KEY :].rstrip(b"\0").decode()
        except BlockingIOError:
            return False  # being made anew
        finally:
            _let_go(fd)
        if free is not None:
            self._set_free(wanted.path, free)
        return True

    def _sign(self, fd: int, takers: Sequence[int]) -> bool:
        """Note that this process has it; say whether all have."""
        os.pwrite(fd, b"\1", _FIRST_FLAG + self._me)
        flags = os.pread(fd, max(takers) + 1, _FIRST_FLAG)
        return all(flags[taker] for taker in takers)

    def _set_free(self, path: str, free: str) -> None:
        with contextlib.suppress(OSError):  # another one did it at the same time, or it had to go
            os.rename(path, os.path.join(os.path.dirname(path), free))

    def _map(self, fd: int, nbytes: int) -> mmap.mmap:
        """Return a file's memory: mapping it takes longer than copying out of it."""
        status = os.fstat(fd)
        place = status.st_dev, status.st_ino
        with self._lock:
            memory = self._maps.get(place)
            if memory is not None:
                self._maps.move_to_end(place)
                return memory
        memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | _POPULATE)
        gone = []
        with self._lock:
            if place not in self._maps:
                self._maps[place] = memory
                self._mapped += nbytes
            while self._mapped > _MAX_MAPPED or len(self._maps) > _MAX_MAPS:
                gone.append(self._maps.popitem(last=False)[1])
                self._mapped -= len(gone[-1])
        return memory

    # -- what this process makes -------------------------------------------------------------------------------------

    def _publish(
        self, wanted: _Wanted, file: _File, futex: Futex, make: Callable[[Array], T], use: Callable[[Array], None]
    ) -> T:
        everyone = False
        try:
            flags = bytes(max(wanted.takers) + 1)  # nobody has it yet
            os.pwrite(file.fd, (_MAGIC + wanted.key + file.free.encode()).ljust(_FIRST_FLAG, b"\0") + flags, 0)
            made = self._timed(make, wanted.view(file.memory, writeable=True))
            fcntl.flock(file.fd, fcntl.LOCK_SH)
            with contextlib.suppress(OSError):  # the folder was removed
                os.rename(file.path, wanted.path)
            futex.ring(wanted.key)
            use(wanted.view(file.memory))
            everyone = self._sign(file.fd, wanted.takers)
        except BaseException:
            _unlink(file.path)
            raise
        finally:
            _let_go(file.fd)
        self._remember(file.free, wanted.size)
        if everyone:
            self._set_free(wanted.path, file.free)
        return made

    def _remember(self, free: str, size: int) -> None:
        with self._lock:
            self._own.setdefault(size, deque(maxlen=_MAX_OWN)).append(free)

    def _new_file(self, folder: str, size: int) -> _File | None:
        """Return a file for an array, with its lock; one that all have taken where there is one."""
        for _ in range(2):
            with self._lock:
                own = self._own.get(size)
                free = own.popleft() if own else None
            if free is None:
                break
            path = os.path.join(folder, free + ".new")
            try:
                os.rename(os.path.join(folder, free), path)
            except OSError:  # not free yet, or it had to go
                self._remember(free, size)
                continue
            with contextlib.suppress(OSError):
                return self._locked(path, size, free, os.O_RDWR)
            _unlink(path)
        free = f"free-{os.getpid()}-{next(_numbers)}"
        path = os.path.join(folder, free + ".new")
        try:
            self._make_room(folder, size)
            return self._locked(path, size, free, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except (OSError, AttributeError):  # no folder any more, no memory, no such call (macOS)
            _unlink(path)
            return None

    def _locked(self, path: str, size: int, free: str, flags: int) -> _File:
        fd = open_own(path, flags)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not where someone takes it for a second time
            if flags & os.O_CREAT:
                os.posix_fallocate(fd, 0, size)  # later there would be a bus error, not an exception
            return _File(fd, self._map(fd, size), path, free)
        except BaseException:
            _let_go(fd)
            raise

    def _make_room(self, folder: str, nbytes: int) -> None:
        with self._lock:
            if nbytes <= self._room:
                self._room -= nbytes
                return
        space, found = os.statvfs(folder), []
        for entry in os.scandir(folder):
            if entry.name in ("alive", "futex"):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.append((not entry.name.startswith("free-"), status.st_mtime_ns, status.st_size, entry.path))
        held = sum(size for _, _, size, _ in found)
        most = min(self._max_bytes, held + space.f_bavail * space.f_frsize // 2)
        total = held + nbytes
        with self._lock:
            self._room = max(0, most - total) // _ROOM
        for _, _, size, path in sorted(found):
            if total <= most:
                return
            if not path.endswith((".lock", ".new")):
                _unlink(path)
                total -= size
        if total > most:
            raise OSError(errno.ENOSPC, "arrays that wait to be taken are as many as may be")

    def _open_folder(self) -> tuple[str | None, Futex | None]:
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._forget()
                    self._folder = _join(self._name)
                    self._futex = None
                    if self._folder is not None:
                        with contextlib.suppress(OSError):
                            self._futex = Futex(os.path.join(self._folder, "futex"))
                    self._pid = os.getpid()
        return self._folder, self._futex


def _let_go(fd: int) -> None:
    """Close a file that may be mapped: the mapping has a descriptor, too, and the lock would stay with that."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _base() -> str:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


_alive: dict[tuple[str, int], int] = {}  # by folder and process: its descriptor of the lock


def _join(name: str) -> str | None:
    """Return the folder of these processes, this one's from now on; None where there can be none."""
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
        if os.path.exists(os.path.join(folder, "alive")) and _same(fd, os.path.join(folder, "alive")):
            if _alive.setdefault((folder, os.getpid()), fd) != fd:
                os.close(fd)  # another thread was first
                return folder
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
        if entry.name.startswith(f"{_PREFIX}{os.getuid()}-") and entry.is_dir(follow_symlinks=False):
            _remove_if_dead(entry.path)


def _remove_if_dead(folder: str) -> None:
    with contextlib.suppress(OSError):
        fd = open_own(os.path.join(folder, "alive"), os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _same(fd, os.path.join(folder, "alive")):
                return  # removed by another one meanwhile, and perhaps made anew
            gone = f"{folder}-{uuid.uuid4().hex}"  # at once: who joins now finds none of it
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
    """Hold a lock, unless another process does."""
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
