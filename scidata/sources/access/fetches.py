"""Many requests in flight at once, to hide round trips, within a bound on memory."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple, TypeVar, Unpack

from scidata.core.urls import Url
from scidata.sources.access.filesystems import current
from scidata.sources.access.kept_urls import KeptUrl, RequestOptions
from scidata.sources.access.remote import start

_T = TypeVar("_T")
_MAX_SIDE_BY_SIDE = 32  # threads of one call


class Range(NamedTuple):
    """A range of an object; or all of one of unknown size, with ``nbytes`` as the most that it may have."""

    url: Url
    offset: int
    nbytes: int
    is_first: bool = False

    @property
    def job(self) -> tuple[Url, str, RequestOptions]:
        """The request."""
        options = RequestOptions(offset=self.offset, nbytes=self.nbytes)
        return self.url, "first" if self.is_first else "range", options

    @property
    def expected(self) -> int:
        """Bytes that come, or at most."""
        known = self.url.seen.get(str(self.url)) if self.is_first else None
        return self.nbytes if known is None or known.size is None else min(known.size, self.nbytes)


class _Window:
    def __init__(self, jobs: Sequence[tuple[Url, str, RequestOptions]], nbytes: Sequence[int]) -> None:
        self._jobs, self._nbytes = jobs, nbytes
        self._lock = threading.Lock()
        self._arrived: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._next = self._taken = self._held = self._flying = 0
        self._futures: dict[int, Future[Any]] = {}
        self._closed = False
        self._lingering: set[int] = set()  # requests that could not be cancelled
        self._load = current().load
        self._advance()

    def _advance(self) -> None:
        while True:
            with self._lock:
                i = self._next
                if self._closed or i == len(self._jobs):
                    return
                if not self._load.add(self._nbytes[i], others=self._flying, held=self._held):
                    return  # until the next of this read's own has arrived, or is used
                self._next += 1
                self._flying += 1
                self._held += self._nbytes[i]
            began = time.monotonic()
            try:
                future = start(*self._jobs[i], wanted=lambda: not self._closed)
            except Exception as e:
                future = Future()
                future.set_exception(e)
            with self._lock:
                self._futures[i] = future
            future.add_done_callback(functools.partial(self._arrive, i, began))

    def _arrive(self, i: int, began: float, future: Future[Any]) -> None:
        with self._lock:
            self._flying -= 1
            self._futures.pop(i, None)
            lingered, closed = i in self._lingering, self._closed
        self._load.remove(requests=1, nbytes=self._nbytes[i] if lingered else 0)
        if closed or future.cancelled():  # of others' failure: an error from here would stand in front of that
            return
        error = future.exception()
        if error is None and not isinstance(self._jobs[i][0], KeptUrl):
            self._load.answered(self._nbytes[i], time.monotonic() - began)
        self._arrived.put((i, error or future.result()))

    def take(self) -> tuple[int, Any] | None:
        with self._lock:
            if self._closed or self._taken == len(self._jobs):
                return None
            self._taken += 1
        self._advance()
        item = self._arrived.get()
        if item is None:
            self._arrived.put(None)  # for the next thread that waits
        return item

    def release(self, i: int) -> None:
        with self._lock:
            if self._closed:
                return
            self._held -= self._nbytes[i]
        self._load.remove(nbytes=self._nbytes[i])
        self._advance()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            held, self._held, self._closed = self._held, 0, True
            futures = list(self._futures.items())
        for i, future in futures:
            if future.cancel():
                continue
            with self._lock:
                if i in self._futures:  # its bytes are in memory until it has ended
                    self._lingering.add(i)
                    held -= self._nbytes[i]
        self._load.remove(nbytes=held)
        self._arrived.put(None)


class Fetches(_Window):
    """Ranges on their way: as many at once as hide a round trip, as few as fit in a bounded memory."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        super().__init__([each.job for each in ranges], [each.expected for each in ranges])


def each(urls: Sequence[Url], method: str, **options: Unpack[RequestOptions]) -> list[Any]:
    """Call one of fsspec's methods on many URLs, side by side; return the results, or errors, in order."""
    found: list[Any] = [None] * len(urls)
    with closing(_Window([(url, method, options) for url in urls], [0] * len(urls))) as window:
        while (item := window.take()) is not None:
            found[item[0]] = item[1]
            window.release(item[0])
    return found


def run_each(calls: Sequence[Callable[[], _T]]) -> list[_T]:
    """Run functions that wait for requests side by side; return their results in order, or raise the first error."""
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(min(_MAX_SIDE_BY_SIDE, len(calls)), thread_name_prefix="scidata-request") as pool:
        return list(pool.map(lambda call: call(), calls))
