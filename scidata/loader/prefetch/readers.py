"""The threads that read ahead, and the state that they share with the consumer: the inside of ``prefetcher``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from scidata.core import trace
from scidata.device_mesh.torch_internals import RLock, is_profiled, named
from scidata.loader.peers.ballot import Ballot
from scidata.loader.peers.session import Session
from scidata.loader.prefetch.ahead import ReadAhead
from scidata.loader.prefetch.buffers import Ring
from scidata.loader.prefetch.copiers import Copier, DeviceCopier
from scidata.loader.prefetch.workers import WorkerReader

#: Reads one sample, by its index, into the given arrays (or slot); returns a ReadStats, the bytes it fetched, or an
#: object that may have ``bytes_fetched``.
Fill: TypeAlias = Callable[[int, Any], object]

_JOIN_SECONDS = 5.0  # a read that hangs (a dead file system) must not hang the exit too
_BEGIN_SECONDS = 1.0  # for the first step of a thread


@dataclass(slots=True, eq=False)
class Work:
    """One item on its way through: queued, filled slot by slot, copied, handed over."""

    number: int
    item: list[int]
    remaining: int = field(init=False)
    buffers: Any = None  # a BufferSet or a SlotSet
    ticket: Any = None
    filled: bool = False
    started: bool = False  # the copy; the thread that sets it does it
    arrived: bool = False  # the consumer knows
    own: bool = False  # the consumer reads it
    error: BaseException | None = None
    error_slot: int = -1
    reads: list[tuple[object, float]] = field(default_factory=list)  # the result of each fill, and its seconds
    copy_seconds: float = 0.0
    bad: dict[int, BaseException] = field(default_factory=dict)  # places that may be left out

    def __post_init__(self) -> None:
        self.remaining = len(self.item)


@dataclass(eq=False, repr=False)
class Readers:
    """State shared by consumer and reader threads. Holds no :class:`Prefetcher`, so that dropping one ends its
    threads.
    """

    fill: Fill
    ring: Ring[Any]
    copier: Copier
    peers: Session | None
    ballot: Ballot | None
    ahead: ReadAhead | None = None
    join_seconds: float = _JOIN_SECONDS
    queue: SimpleQueue[Work | None] = field(default_factory=SimpleQueue)
    results: SimpleQueue[Work | None] = field(default_factory=SimpleQueue)
    closed: bool = False
    _copy_up_to: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turn: threading.Lock = field(default_factory=threading.Lock)  # buffers go in order, or the first could starve
    _work: Work | None = None
    _slot: int = 0

    def __post_init__(self) -> None:
        self.processes = self.fill if isinstance(self.fill, WorkerReader) else None

    def run(self) -> None:
        """Fill slots until closed: the body of a reader thread."""
        while (task := self._next_slot()) is not None:
            self._fill_slot(*task)
            del task  # or it would keep a device batch alive while this thread waits

    def read_now(self, work: Work) -> None:
        """Fill a whole item in the calling thread."""
        work.buffers = self.ring.acquire(len(work.item))
        for slot in range(len(work.item)):
            self._fill_slot(work, slot)

    def _next_slot(self) -> tuple[Work, int] | None:
        with self._turn:
            while self._work is None and not self.closed:
                self._work = self._next_work()
                self._slot = 0
            if self._work is None or self.closed:
                return None
            task = self._work, self._slot
            self._slot += 1
            if self._slot == len(self._work.item):
                self._work = None
            return task

    def _next_work(self) -> Work | None:
        work = self.queue.get()
        if work is None:
            return None
        try:
            work.buffers = self.ring.acquire(len(work.item), lambda: self.closed)
        except BaseException as e:  # no memory, say: the consumer raises it
            work.error = e
            self.results.put(work)
            return None
        return work if work.buffers is not None else None

    def _fill_slot(self, work: Work, slot: int) -> None:
        assert work.buffers is not None
        began = time.perf_counter_ns()
        error, found = None, None
        if work.error is None:
            try:
                found = self._traced_fill(work, slot) if trace.active else self._fill(work, slot)
            except BaseException as e:  # raised by the consumer, at this item's turn
                e.add_note(f"while reading sample {work.item[slot]} (number {slot} of batch {work.number})")
                error = e
        skip = self.ballot is not None and isinstance(error, Exception) and not isinstance(error, MemoryError)
        if error is not None and not skip and self.peers is not None and not self.closed:
            self.peers.failed(work.number, error, ahead=True)
        with self._lock:
            work.reads.append((found, (time.perf_counter_ns() - began) / 1e9))
            if error is not None and skip:
                work.bad[slot] = error
            elif error is not None and (work.error is None or slot < work.error_slot):
                work.error, work.error_slot = error, slot
            work.remaining -= 1
            work.filled = last = work.remaining == 0
        if last:
            if self.ballot is not None and work.error is None:
                self._vote(self.ballot, work)
            self.start_copy(work)
            work.arrived = work.own
            if not work.own:
                self.results.put(work)

    def _fill(self, work: Work, slot: int) -> object:
        trace.decode_range = partial(named, "decode") if is_profiled() else RLock
        with named("read"):
            return self.fill(work.item[slot], work.buffers.slot(slot))

    def _traced_fill(self, work: Work, slot: int) -> object:
        index = work.item[slot]
        trace.set_sample(index)
        try:
            with trace.span("sample", sample=index, batch=work.number):
                return self._fill(work, slot)
        finally:
            trace.set_sample(None)

    @staticmethod
    def _vote(ballot: Ballot, work: Work) -> None:
        try:
            ballot.vote(work.number, len(work.item), work.bad)
        except Exception as e:
            work.error = e

    def allow_copies(self, up_to: int) -> None:
        """Let the copies of items up to this number begin as soon as they are filled."""
        self._copy_up_to = up_to  # before the caller asks which are filled, as readers say so before they look here

    def start_copy(self, work: Work) -> None:
        """Begin the copy of a filled item that may be copied, once."""
        if work.started or not work.filled:
            return
        with self._lock:
            mine = work.filled and not work.started and work.error is None and work.number <= self._copy_up_to
            work.started = work.started or mine
        if mine:
            began = time.perf_counter_ns()
            try:
                with trace.span("begin copy", batch=work.number, bytes=work.buffers.nbytes), named("copy"):
                    work.ticket = self.copier.start(work.buffers)
            except BaseException as e:
                work.error = e
            work.copy_seconds = (time.perf_counter_ns() - began) / 1e9

    def release(self, work: Work) -> None:
        """Return the buffers of a dropped item."""
        if work.ticket is not None:
            self.copier.abandon(work.ticket)
        elif work.buffers is not None:
            self.ring.give_back(work.buffers)
        work.ticket = work.buffers = None

    def stop(self) -> None:
        """Stop all threads; takes no lock."""
        self.closed = True
        self.queue.put(None)
        self.ring.wake()
        self.results.put(None)
        if self.ahead is not None:
            self.ahead.stop()
        if self.processes is not None:
            self.processes.stop()


def _join(thread: threading.Thread, deadline: float) -> None:
    """Wait for the end of a thread, which an interrupt in its ``start()`` may have left without a first step."""
    begin = min(deadline, time.monotonic() + _BEGIN_SECONDS)
    while thread.ident is None and time.monotonic() < begin:
        time.sleep(0.001)
    if thread.ident is not None:
        thread.join(max(0.0, deadline - time.monotonic()))


def shut_down(readers: Readers, threads: list[threading.Thread], pending: deque[Work]) -> None:
    """End the threads, then return the buffers that are still on their way. Lock-free: see the module's docstring."""
    readers.stop()
    if threading.current_thread() not in threads:  # a collection may run on one of them, which holds a turn then
        deadline = time.monotonic() + readers.join_seconds
        for thread in threads:
            _join(thread, deadline)
    if readers.processes is not None:
        readers.processes.end()
    if any(thread.ident is None or thread.is_alive() for thread in threads):
        return  # it may still write to its buffers
    while pending:
        with contextlib.suppress(RuntimeError):  # of a device that has failed, of which the loop has heard
            readers.release(pending.popleft())
    if isinstance(readers.copier, DeviceCopier):
        with contextlib.suppress(RuntimeError):
            readers.copier.settle()
