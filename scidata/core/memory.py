"""Array memory of any size that is reused after the last view of an array is gone.

Blocks come back from destructors, which run anywhere, so nothing on that path takes a lock; see
:mod:`scidata.loader.prefetch.buffers`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import queue
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.cache import lock

_LINE = 64  # bytes of a cache line
_UNALIGNED = 64 << 10  # smaller arrays need not be aligned
_HUGE = 2 << 20  # bytes of a huge page, on most machines
_SLAB = 32 << 20  # mapped at once; untouched pages are free
_SMALL = 256 << 10  # smaller ones come from the C library's heap, which reuses memory itself


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised array like ``numpy.empty``, laid out for fast file reads.

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


def _trim() -> None:
    """Return free pages of the C library's heap to the system.

    c-blosc takes a megabyte from it for each chunk, and glibc (2.36) may leave a hole in the place of each, as small
    objects lie in the way: 62 MiB of them beside 477 MiB of kept rows. It takes 0.8 ms for those of 32 MiB of rows.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def available_memory() -> int:
    """Return the bytes of memory available on this machine."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _map(nbytes: int) -> mmap.mmap:
    """Map ``nbytes`` of memory, on huge pages if the system has them.

    First read of 100 MB into it, CPU time on a 2-core Xeon: 35 ms with huge pages, 60 ms without, 23 ms when reused.
    Touching the pages beforehand only adds a pass over them (75 ms), so the first read does it.
    """
    # Linux aligns a mapping to huge pages if its length is a multiple of them
    memory = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # include the last page if three quarters are used: 10 MB took 398 more faults and 0.5 ms without
    if pages := (nbytes + _HUGE // 4) // _HUGE:
        with contextlib.suppress(OSError):  # the kernel lacks huge pages: use ordinary ones
            memory.madvise(mmap.MADV_HUGEPAGE, 0, pages * _HUGE)
    return memory


class _Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """A pool's memory block; the type stops NumPy's search for the base array of a view.

    Else that were this array, and not the one that is lent.

    ``slab, begin``: the mapping that it is cut from, and where. Its pages go back to the system with it; the mapping,
    with the last block.
    """

    slab: mmap.mmap | None = None  # views of this type lack the attribute
    begin = 0

    def __del__(self, advice: int = mmap.MADV_DONTNEED) -> None:  # mmap may be gone at interpreter exit
        if self.slab is not None:
            self.slab.madvise(advice, self.begin, self.nbytes)


class Lent(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory lent by a pool, for ``np.ndarray(shape, dtype, lent, begin)``: returned with the last such array."""

    pool: weakref.ref[ArrayPool] | None = None  # views of this type lack the attribute
    block: _Block | None = None  # to be reused

    def __del__(self) -> None:
        pool = None if self.pool is None else self.pool()
        if pool is not None:
            pool._came_back(self)


class ArrayPool:
    """Allocates arrays like ``numpy.empty`` from reused blocks. Thread-safe; pickles without its blocks.

    ``max_free``: bytes that may lie free at once; more is let go.
    ``max_total``: bytes that may lie free or be given away; free ones beyond are let go.
    ``num_allocated``: blocks made, ever.
    ``given``: bytes of what was given away and is still seen, by its id.
    ``awaited``: queues of those that wait for something given away to come back: they get None.
    """

    def __init__(self, max_free: int = 0) -> None:
        self.max_free = max_free
        self.num_allocated = 0
        self._largest = 0
        self._free: deque[_Block] = deque()
        self._slab: mmap.mmap | None = None  # new blocks are cut from it in order
        self._cut = 0  # bytes used of the slab
        self._slabs: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # slabs with live blocks
        self._most_slabs = 1
        self._self = weakref.ref(self)
        self.max_total = math.inf
        self.given: dict[int, int] = {}
        self.awaited: set[queue.SimpleQueue[None]] = set()

    @property
    def free_bytes(self) -> int:
        """Bytes in free blocks."""
        return sum(block.nbytes for block in self._free.copy())

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, keep: int = 0) -> npt.NDArray[Any]:
        """Return an uninitialised array, whose memory is reused when no view, tensors included, is left.

        ``keep``: so many arrays of this size may lie free from now on.
        """
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        self.max_free = max(self.max_free, keep * nbytes)
        if nbytes < _SMALL:
            return empty(shape, kind)
        return np.ndarray(shape, kind, self.lend(nbytes))

    def lend(self, nbytes: int) -> Lent:
        """Return at least ``nbytes`` uninitialised bytes, for several arrays that are returned together."""
        block = self._block(nbytes) if nbytes >= _SMALL else empty((nbytes,), np.uint8).view(_Block)
        lent = block.view(Lent)
        lent.pool, lent.block = self._self, block
        return lent

    def _block(self, nbytes: int) -> _Block:
        try:
            block = self._free.pop()  # the last one returned: mostly still in the CPU caches
        except IndexError:
            pass
        else:
            if nbytes <= block.nbytes <= 2 * nbytes:
                return block
            self._free.append(block)
        most = self._most_slabs
        with lock:
            found = self._take(nbytes)
            block = self._new(self._size_of_new(nbytes)) if found is None else found
        if self._most_slabs > most:
            _trim()
        return block

    def _take(self, nbytes: int) -> _Block | None:
        """Return a free block of suitable size; if there is none, evict blocks to make room."""
        passed = []
        found = None
        while found is None and self._free:
            try:
                block = self._free.pop()
            except IndexError:
                break
            if nbytes <= block.nbytes <= 2 * nbytes:
                found = block
            else:
                passed.append(block)
        if found is None:  # the new block will need this room when it is returned
            while passed and sum(block.nbytes for block in passed) + nbytes > self.max_free:
                passed.pop()  # the oldest
        self._free.extend(reversed(passed))
        return found

    def _size_of_new(self, nbytes: int) -> int:
        """Return a new block's size: the largest array of about this size, since untouched memory is free."""
        self.num_allocated += 1
        self._largest = max(self._largest, nbytes)
        return self._largest if self._largest <= 2 * nbytes else nbytes + nbytes // 16

    def _new(self, nbytes: int) -> _Block:
        """Cut a block from the current slab, so that huge pages hold several; a large block gets its own mapping."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
            return empty((nbytes,), np.uint8).view(_Block)
        slab, begin = self._slab, self._cut
        if 4 * nbytes > _SLAB:
            slab, begin = _map(nbytes), 0
        else:
            if slab is None or begin + nbytes > _SLAB:
                slab, begin = _map(_SLAB), 0
            self._slab, self._cut = slab, begin + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slabs.add(slab)
        self._most_slabs = max(self._most_slabs, len(self._slabs))
        block = _Block((nbytes,), np.uint8, slab, begin)
        block.slab, block.begin = slab, begin
        return block

    def give(self, lent: Lent) -> None:
        """Count bytes as lent until they are returned."""
        self.given[id(lent)] = lent.nbytes

    def _came_back(self, lent: Lent) -> None:
        was_given = self.given.pop(id(lent), None) is not None
        if lent.block is not None and lent.nbytes >= _SMALL:
            free = lent.nbytes
            for block in self._free.copy():  # during a copy, garbage collection returns no blocks
                free += block.nbytes
            if free <= self.max_free and free + sum(self.given.copy().values()) <= self.max_total:
                self._free.append(lent.block)
        if was_given and self.awaited:
            for waiting in self.awaited.copy():
                waiting.put(None)

    def clear(self) -> None:
        """Release all free blocks."""
        self._free.clear()
        self._slab = None

    def __reduce__(self) -> tuple[object, ...]:
        return ArrayPool, (self.max_free,)
