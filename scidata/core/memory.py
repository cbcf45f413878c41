"""Memory for arrays of any size, used again when the last view of an array is gone.

Blocks come back from destructors, which run anywhere, so nothing on that path takes a lock; see
:mod:`scidata.loader.prefetch.buffers`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_LINE = 64  # bytes of a cache line
_UNALIGNED = 64 << 10  # smaller arrays need not be aligned
_HUGE = 4 << 20  # from this size on, ask for huge pages
_SMALL = 256 << 10  # smaller ones come from the C library's heap, which uses its memory again by itself


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised array, as ``numpy.empty`` does, that a file is read into at full speed.

    The C library puts a large block 16 bytes behind the begin of a page. A file's pages lie at the begin, and of copies
    from there to 16 bytes further, which is what ``preadv`` does, some CPUs take each store for one that the next load
    must wait for: 4 MB take 0.52 ms CPU time, and 0.22 ms at the begin of a cache line (AMD EPYC).
    """
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < _UNALIGNED:
        return np.empty(shape, kind)
    memory = np.empty(nbytes + _LINE, np.uint8)
    start = -memory.__array_interface__["data"][0] % _LINE
    return memory[start : start + nbytes].view(kind).reshape(shape)


def host_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return ``nbytes`` of uninitialised memory, on huge pages where the system has them.

    First read of 100 MB into it, CPU time on a 2-core Xeon: 35 ms with huge pages, 60 ms without, 23 ms when reused.
    Touching the pages beforehand only adds a pass over them (75 ms), so the first read does it.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if nbytes < _HUGE or advice is None:
        return empty((nbytes,), np.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them: ordinary pages do
        memory.madvise(advice)
    return np.frombuffer(memory, np.uint8)


def available_memory() -> int:
    """Return the bytes of memory that are available on this machine."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class _Holder:
    """What an array of a block is made from: every view of it keeps this alive, and so the block out of the pool.

    Not an array, nor a subclass: NumPy makes views of views refer to the first array that owns memory.
    """

    __slots__ = ("__array_interface__", "_block", "_pool")

    def __init__(self, pool: ArrayPool, block: npt.NDArray[np.uint8], nbytes: int) -> None:
        self._pool, self._block = weakref.ref(pool), block
        self.__array_interface__ = block[:nbytes].__array_interface__

    def __del__(self) -> None:
        pool = self._pool()
        if pool is not None:
            pool._came_back(self._block)


class ArrayPool:
    """Makes arrays like ``numpy.empty``, on blocks that were let go before. Thread-safe; pickles without its blocks.

    Attributes
    ----------
    max_free
        Bytes that may lie free at once; more is let go.
    max_total
        Bytes that may lie free or be given away; free ones beyond are let go.
    num_allocated
        Blocks made, ever.
    given
        Bytes of each array that was given away and is still seen.
    when_back
        A weak reference to a function that is called when such an array is gone.
    """

    def __init__(self, max_free: int = 0) -> None:
        self.max_free = max_free
        self.num_allocated = 0
        self._largest = 0
        self._free: deque[npt.NDArray[np.uint8]] = deque()
        self._lock = threading.Lock()
        self.max_total = math.inf
        self.given: dict[object, int] = {}
        self.when_back: Callable[[], Callable[[], None] | None] = lambda: None

    @property
    def free_bytes(self) -> int:
        """Bytes that lie free."""
        # copy(), for amid it no collection of garbage brings blocks back
        return sum(block.nbytes for block in self._free.copy())

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, keep: int = 0) -> npt.NDArray[Any]:
        """Return an uninitialised array. Its memory is used again once no view of it is left, tensors included.

        ``keep``: so many arrays of this size may lie free from now on.
        """
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        self.max_free = max(self.max_free, keep * nbytes)
        if nbytes < _SMALL:
            return empty(shape, kind)
        with self._lock:
            block = self._take(nbytes)
            size = self._size_of_new(nbytes) if block is None else 0
        if block is None:
            block = host_memory(size)
        array: npt.NDArray[Any] = np.asarray(_Holder(self, block, nbytes)).view(kind).reshape(shape)
        return array

    def _take(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return a free block that is large enough, and not much too large; where there is none, make room for one."""
        passed = []
        found = None
        while found is None and self._free:
            try:
                block = self._free.pop()  # the last that came back: most of it is in the processor's caches
            except IndexError:
                break
            if nbytes <= block.nbytes <= 2 * nbytes:
                found = block
            else:
                passed.append(block)
        if found is None:  # the one that is made now will want its place here
            while passed and sum(block.nbytes for block in passed) + nbytes > self.max_free:
                passed.pop()  # the oldest
        self._free.extend(reversed(passed))
        return found

    def _size_of_new(self, nbytes: int) -> int:
        """Return how large a block to make, for the largest array of about this size: untouched, it costs nothing."""
        self.num_allocated += 1
        self._largest = max(self._largest, nbytes)
        return self._largest if self._largest <= 2 * nbytes else nbytes + nbytes // 16

    def _came_back(self, block: npt.NDArray[np.uint8]) -> None:
        free = self.free_bytes + block.nbytes
        if free <= self.max_free and free + sum(self.given.copy().values()) <= self.max_total:
            self._free.append(block)

    def give(self, array: npt.NDArray[Any]) -> None:
        """Count an array among those that were given away, until no view of it is left."""
        while isinstance(array.base, np.ndarray):  # the one that all views refer to
            array = array.base
        token = object()
        self.given[token] = array.nbytes
        weakref.finalize(array, _gone, weakref.ref(self), token).atexit = False

    def clear(self) -> None:
        """Let go of the blocks that lie free."""
        self._free.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return ArrayPool, (self.max_free,)


def _gone(of: weakref.ref[ArrayPool], token: object) -> None:
    """Take note that an array is gone, just before its block comes back."""
    pool = of()
    if pool is not None:
        pool.given.pop(token, None)
        call = pool.when_back()
        if call is not None:
            call()
