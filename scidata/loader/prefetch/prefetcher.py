"""Read ahead in threads into reused buffers, and copy to the GPU beside the computation. Knows no format.

The parts, from the inside out: a :class:`Ring` bounds how many batches there are at a time, a copier
(:class:`HostCopier`, :class:`DeviceCopier`) turns filled places into tensors, a :class:`Prefetcher` keeps reader
threads filling places ahead of the one that asks. They meet at four promises:

* a batch that the user keeps stays valid for ever: its memory is used again when the last view of it dies;
* memory follows the batches that are kept: ``prefetch + 1``, plus one for each batch kept beyond the current one;
* memory is written again only after its copy's event;
* leaving early, by whatever way, ends the threads.

The threads are ended by a finalizer, which may run in the middle of a collection on a thread that holds a lock. So
that path takes none: it sets a flag and wakes sleepers through ``SimpleQueue.put``, which is reentrant by promise.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from scidata.core import trace
from scidata.device_mesh.torch_internals import named
from scidata.errors import ConfigError, ReadTimeoutError
from scidata.loader.peers.ballot import Ballot
from scidata.loader.peers.session import Session
from scidata.loader.prefetch.ahead import ReadAhead, without_frames
from scidata.loader.prefetch.buffers import Batch, Ring
from scidata.loader.prefetch.copiers import Copier, HostCopier
from scidata.loader.prefetch.depth import Depth
from scidata.loader.prefetch.own_reads import OwnReads
from scidata.loader.prefetch.readers import Fill, Readers, Work, shut_down
from scidata.loader.stats import PrefetchStats

_SLOW_SECONDS = 30.0  # s after which a wait gives a warning if there is no timeout

_log = logging.getLogger("scidata")


class Prefetcher(Iterator[tuple[list[int], Batch]]):
    """Iterate over items (lists of sample indices), reading ahead in threads; gives ``(item, tensors)`` in order.

    ``tensors`` hold the samples of an item side by side: ``(len(item), *shape)`` a field; with a :class:`SlotSet` they
    are the list of parts that ``fill`` put into the slots. At most ``prefetch`` items are being read or lie ready while
    the consumer works on another. The items' iterator runs in the consumer's thread.

    - ``fill``: reads one sample; called from several threads at once. An error it raises comes out of ``next()`` when
      it is that item's turn, with its own traceback and a note that names the sample; the items before it come first.
    - ``ring``: its limit is set to ``prefetch``; of one Prefetcher.
    - ``prefetch``: items in flight; taken as 1 at least where there are threads. A :class:`Depth` adapts.
    - ``timeout``: seconds that an item may be waited for, 0 for ever; half of them, or 30, are warned of.
    - ``peers``: told of a read that fails, at once; asked before each item whether another rank has failed.
    - ``ballot``: samples that cannot be read are left out as it decides; default: they end the iteration.
    - ``ahead``: reads the blocks that samples share, in as many threads besides; the items are its own.
    - ``own_reads``: says whether the caller of ``next()`` reads for itself, though there are threads; default: never.
    - ``taken``: the indices that the last ``next()`` has used up, with those that were left out.
    """

    def __init__(
        self,
        items: Iterable[Sequence[int]],
        fill: Fill,
        ring: Ring[Any],
        *,
        num_workers: int = 2,
        prefetch: int | Depth = 2,
        copier: Copier | None = None,
        stats: PrefetchStats | None = None,
        timeout: float = 0.0,
        peers: Session | None = None,
        ballot: Ballot | None = None,
        ahead: ReadAhead | None = None,
        own_reads: OwnReads | None = None,
    ) -> None:
        self._own_reads = own_reads if num_workers else None
        if self._own_reads is not None:
            self._own_reads.begin()
        self.taken: list[int] = []
        self._asked = 0.0
        self._timeout = timeout
        self._peers = peers
        self._ballot = ballot
        self.stats = PrefetchStats() if stats is None else stats
        self._items = iter(items)
        self._exhausted = False
        self._num_items = 0
        self._num_workers = num_workers
        depth = prefetch if isinstance(prefetch, Depth) else Depth(max(1, prefetch))
        self._depth = depth if num_workers else Depth(0)
        self._ring = ring
        self._readers = Readers(fill, ring, copier or HostCopier(ring), peers, ballot, ahead)
        self._pending: deque[Work] = deque()
        self._threads: list[threading.Thread] = []
        self._started: set[str] = set()  # kinds of them
        self._finalizer = weakref.finalize(self, shut_down, self._readers, self._threads, self._pending)

    def __next__(self) -> tuple[list[int], Batch]:
        """Return the next item's indices and tensors."""
        if not self._finalizer.alive:
            raise StopIteration
        self._asked, self.taken = time.perf_counter(), []
        try:
            while True:
                item, tensors = self._one()
                if item:
                    return item, tensors
                del tensors  # all of it was left out
        except BaseException:  # the end, an error, an interrupt
            self.close()
            raise

    def close(self) -> None:
        """End the threads and return the buffers; the iteration is over. Also happens when this is let go."""
        self._finalizer()

    def waker(self) -> Callable[[], None]:
        """Return a function that makes a waiting ``next()`` ask its peers, from any thread; this can die meanwhile."""
        results = self._readers.results
        return lambda: results.put(None)

    def _one(self) -> tuple[list[int], Batch]:
        if self._pending:
            read = [work.filled for work in self._pending]
            self._depth.step(waiting=not read[0], spare=all(read))
        self._ring.fit(max(1, self._depth.now))
        self._submit()
        if not self._pending:
            raise StopIteration
        head = self._pending[0]
        self._readers.allow_copies(head.number + 1)
        if not head.own:  # which is alone, and not read yet
            self.stats.num_ready += sum([work.filled for work in self._pending])
            for work in list(self._pending)[:2]:
                self._readers.start_copy(work)
        self._await(head)
        return self._hand_over(head)

    def _submit(self) -> None:
        """Queue items until ``prefetch`` of them are in flight besides the one asked for."""
        own = not self._num_workers or (self._own_reads is not None and self._own_reads.now)
        ahead = self._readers.ahead
        while not self._exhausted and len(self._pending) <= (0 if own else self._depth.now):
            work = self._pull()
            if work is None:
                return
            work.own = own
            self._pending.append(work)
            if work.error is None and not own:
                self._start_threads("reader", self._readers.run)
                self._readers.queue.put(work)
            if ahead is not None and ahead.has_begun:
                self._start_threads("ahead", ahead.run)

    def _pull(self) -> Work | None:
        number = self._num_items
        self._num_items += 1
        try:
            item = list(next(self._items))
            if not item:
                raise ConfigError(f"batch {number} has no samples: the batch sampler gave an empty list")
        except StopIteration:
            self._exhausted = True
            return None
        except Exception as e:  # the sampler's: raised when it is this item's turn
            self._exhausted = True
            work = Work(number, [])
            work.error, work.arrived = without_frames(e), True
            return work
        return Work(number, item)

    def _start_threads(self, kind: str, body: Callable[[], None]) -> None:
        if kind in self._started:
            return
        self._started.add(kind)
        for number in range(self._num_workers):
            thread = threading.Thread(target=body, name=f"scidata-{kind}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _await(self, head: Work) -> None:
        began, warned = time.perf_counter(), False
        with trace.span("wait", batch=head.number), named("wait"):
            if head.own and not head.arrived:
                self._readers.read_now(head)
                if self._readers.closed:  # by another thread
                    raise StopIteration
            while not head.arrived:
                warned = self._receive(head, time.perf_counter() - began, warned)
            if not head.started:  # filled before it was allowed
                self._readers.start_copy(head)
        self.stats.wait_seconds += time.perf_counter() - began

    def _receive(self, head: Work, waited: float, warned: bool) -> bool:
        """Wait for something to arrive; return whether the user was told that it takes long."""
        first = self._timeout / 2 or _SLOW_SECONDS
        limit = self._timeout if warned else first
        try:
            work = self._readers.results.get(timeout=max(0.0, limit - waited) if limit else None)
        except queue.Empty:
            text = f"has waited {limit:g} s for sample {head.item} (step {head.number}), which is still being read"
            if warned:
                self._readers.join_seconds = 0.0  # a thread that hangs there does not hang this one
                error: Exception = ReadTimeoutError(f"the loader {text}: timeout={self._timeout:g}")
                if self._peers is not None:
                    error = self._peers.timed_out(head.number, error)
                raise error from None
            if self._peers is not None:
                self._peers.slow(head.number, text)
            else:
                _log.warning("the loader %s", text)
            return True
        if work is not None:
            work.arrived = True
        elif self._readers.closed:  # by another thread
            raise StopIteration
        else:
            self._check_peers(head.number)
        return warned

    def _check_peers(self, number: int) -> None:
        if self._peers is not None:
            try:
                self._peers.check(number)
            except BaseException:
                self._readers.join_seconds = 0.5
                raise

    def _hand_over(self, head: Work) -> tuple[list[int], Batch]:
        if head.error is not None:
            error, head.error = head.error, None  # no cycle through its traceback, which would keep the buffers
            if self._peers is not None:
                self._peers.failed(head.number, error)
            try:
                if isinstance(error, StopIteration):  # would end the epoch without a word
                    raise RuntimeError("reading raised StopIteration") from error
                raise error
            finally:
                del error
        if self._peers is not None:
            self._check_peers(head.number)
        size, stats = len(head.item), self.stats
        dropped = self._ballot.dropped(head.number, size) if self._ballot is not None else ()
        assert head.buffers is not None
        nbytes = head.buffers.nbytes
        self._depth.observe_size(nbytes)
        self.taken += head.item
        stats.skipped += len(dropped)
        stats.batches += len(dropped) < size
        stats.samples += size - len(dropped)
        stats.bytes += nbytes
        stats.copy_seconds += head.copy_seconds
        read = 0.0
        for found, seconds in head.reads:
            stats.count_read(found, seconds)
            read += seconds
        if self._own_reads is not None:
            self._own_reads.step(asked=self._asked, at=time.perf_counter(), read=read, own=head.own)
        self._pending.popleft()
        ticket, head.ticket, head.buffers = head.ticket, None, None
        tensors = self._readers.copier.finish(ticket)
        if not dropped:
            return head.item, tensors
        kept = [row for row in range(size) if row not in dropped]
        return [head.item[row] for row in kept], _rows(tensors, kept)


def _rows(tensors: Batch, kept: list[int]) -> Batch:
    if isinstance(tensors, Mapping):
        return {name: tensor[kept] for name, tensor in tensors.items()}
    return [tensors[row] for row in kept]
