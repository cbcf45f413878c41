"""What samples share is read before the first of them is: chunks that hold many steps take as long as many samples.

Reader threads fill the buffers of the next few samples. A chunk of forty steps is needed by all of those at once, and
by none before: the loop would wait for it. So the order is looked at further ahead, and threads of their own read the
blocks that are coming, while readers copy rows from those that are there.
"""

from __future__ import annotations

import queue
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from scidata.grids.blocks.key import BlockKey
from scidata.grids.blocks.pool import BlockPool, BlockRead

_MAX_SAMPLES = 1024  # looked at ahead of the samples being read
_EARLY = 4  # times the blocks of one item are read before the first that needs them: new ones come in turns

_Reads: TypeAlias = list[BlockRead]  # of one item


class ReadAhead(Iterator[list[int]]):
    """Passes on the items of an order, and has blocks that samples share read ahead while memory allows.

    Iterated by one thread; :meth:`run` is the body of others.

    - ``reads_of``: returns the blocks that a sample shares with others.
    - ``in_flight``: items that may be read at once, or lie ready: their shared blocks are kept for so long.
    - ``has_begun``: whether there was something to read: not where all is kept from an earlier epoch.
    """

    def __init__(
        self, items: Iterator[list[int]], reads_of: Callable[[int], Sequence[BlockRead]], in_flight: int
    ) -> None:
        self._items, self._reads_of, self._in_flight = items, reads_of, in_flight
        self._coming: deque[tuple[list[int], _Reads]] = deque()
        self._num_samples = 0
        self._given: deque[_Reads] = deque()
        self._next: tuple[list[int], _Reads] | None = None  # pulled, but there is no room for it yet
        self._end: Exception | None = None
        self._uses: Counter[BlockKey] = Counter()  # in any pool: no two readers have the same part
        self._held: Counter[BlockPool] = Counter()  # bytes
        self._wanted: dict[BlockPool, set[BlockKey]] = {}
        self._due: deque[BlockRead] = deque()  # wanted, but too early yet
        self._early: set[BlockKey] = set()  # being read, or read, for items that were not given yet
        self._most = 0  # blocks of one item
        self._queue: queue.SimpleQueue[BlockRead | None] = queue.SimpleQueue()
        self._closed = self.has_begun = False

    def __next__(self) -> list[int]:
        """Return the next item."""
        while len(self._given) > self._in_flight:
            self._forget(self._given.popleft())
        while (not self._coming or self._num_samples < _MAX_SAMPLES) and self._pull():
            pass
        if not self._coming:
            error, self._end = self._end or StopIteration(), StopIteration()
            try:
                raise error
            finally:
                del error  # no cycle through its traceback
        item, reads = self._coming.popleft()
        self._num_samples -= len(item)
        self._given.append(reads)
        if self._early:
            self._early.difference_update([read.key for read in reads])
        self._begin_reads()
        return item

    def _begin_reads(self) -> None:
        """Have blocks read that are wanted, not much sooner than needed: their memory is that of blocks let go."""
        while self._due and len(self._early) < _EARLY * self._most:
            read = self._due.popleft()
            if self._uses[read.key] and not read.pool.is_kept(read.key):
                self._early.add(read.key)
                self._queue.put(read)
                self.has_begun = True

    def run(self) -> None:
        """Read blocks until the end: the body of a thread."""
        later: deque[BlockRead] = deque()  # others make them right now: there may be something else to do
        while True:
            try:
                read, wait = self._queue.get(block=not later), False
            except queue.Empty:
                read, wait = later.popleft(), True
            if read is None or self._closed:
                break
            is_needed = read.key in self._uses  # readers may have read it themselves, and be done
            if is_needed and not read.pool.read_ahead(read.key, wait=wait):
                later.append(read)
        self._queue.put(None)  # for the next thread

    def stop(self) -> None:
        """Stop the threads; takes no lock."""
        self._closed = True
        for pool in list(self._wanted):
            pool.worth.wanted.pop(id(self), None)
        self._queue.put(None)

    def _pull(self) -> bool:
        """Look at one more item; return whether there was one, and room for its shared blocks."""
        if self._next is None and self._end is None:
            try:
                item = next(self._items)
            except Exception as e:  # raised when it is its turn; an interrupt is at once
                self._end = without_frames(e)
            else:
                self._next = item, [read for index in item for read in self._shared_by(index)]
        if self._next is None or (self._coming and not self._fits(self._next[1])):
            return False
        item, reads = self._next
        self._next = None
        self._coming.append((item, reads))
        self._num_samples += len(item)
        self._most = max(self._most, len(reads))
        for read in reads:
            self._note(read)
        return True

    def _shared_by(self, index: int) -> Sequence[BlockRead]:
        try:
            return self._reads_of(index)
        except Exception:  # no such sample: its reader raises the error
            return ()

    def _fits(self, reads: _Reads) -> bool:
        more: Counter[BlockPool] = Counter()
        for read in {read.key: read for read in reads if not self._uses[read.key]}.values():
            more[read.pool] += read.nbytes
            if self._held[read.pool] + more[read.pool] > read.pool.max_bytes(read.key.part):
                return False
        return True

    def _note(self, read: BlockRead) -> None:
        key, pool = read.key, read.pool
        if pool not in self._wanted:
            self._wanted[pool] = pool.worth.wanted[id(self)] = set()
        if not self._uses[key]:
            self._held[pool] += read.nbytes
        self._uses[key] += 1
        if self._uses[key] == read.enough:
            self._wanted[pool].add(key)
            if not pool.is_kept(key):
                self._due.append(read)

    def _forget(self, reads: _Reads) -> None:
        for read in reads:
            key, pool = read.key, read.pool
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self._held[pool] -= read.nbytes
                self._wanted[pool].discard(key)
                pool.give_up(key)


def without_frames(error: Exception) -> Exception:
    """Return the error with its traceback as text and no references to frames, which would hold the iteration."""
    if not isinstance(error, StopIteration):
        error.add_note("".join(["raised here, ahead of its turn:\n", *traceback.format_tb(error.__traceback__)]))
    return error.with_traceback(None)
