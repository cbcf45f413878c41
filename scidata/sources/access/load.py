"""Load of a process: as many requests in flight as servers bear, as many bytes as memory may hold."""

from __future__ import annotations

import threading
import time

#: Bytes that requests in flight and unused answers may take together; one request of each read always may.
MAX_BYTES = 64 << 20
#: Requests in flight at first, at least, and at most.
FIRST_REQUESTS, MIN_REQUESTS, MAX_REQUESTS = 64, 4, 256

#: Answers that take so much longer than the quickest ones wait for others of our own, not for the way there.
_QUEUED = 1.5
_FORGET = 1.001  # the quickest one's time grows with each answer: ways change
_SMALL = 1 << 20  # bytes, of which an answer's time tells of the way, not of the line's width
_ONE_CUT = 1.0  # seconds, in which refusals are of one and the same crowd


class Load:
    """Requests in flight, and bytes in memory, of all reads.

    The number of requests follows the answers of servers: half as many where one asks to slow down (HTTP 429, 503), one
    more for each round of them that was answered, up to those of the beginning; beyond those where requests were held
    back and small ones were answered about as quickly as the quickest. (Additive increase, multiplicative decrease:
    Chiu and Jain, 1989; the times of answers as a sign of queues: Brakmo and Peterson's TCP Vegas, 1995.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._nbytes = 0
        self._most = float(FIRST_REQUESTS)
        self._held_back = 0  # answers still to come of requests that others had to wait for
        self._quickest = float("inf")
        self._cut = float("-inf")

    def add(self, nbytes: int, *, others: int, held: int) -> bool:
        """Count one more request, unless that is too much; the read that asks has ``others`` and ``held`` bytes."""
        with self._lock:
            if others and self._requests >= int(self._most):
                self._held_back = int(self._most)
                return False
            if held and self._nbytes + nbytes > MAX_BYTES:
                return False
            self._requests += 1
            self._nbytes += nbytes
            return True

    @property
    def nbytes(self) -> int:
        """Bytes in flight, or not used yet."""
        return self._nbytes

    @property
    def most_requests(self) -> int:
        """How many may be in flight now."""
        return int(self._most)

    def remove(self, *, requests: int = 0, nbytes: int = 0) -> None:
        """Count bytes that have arrived, or are used."""
        with self._lock:
            self._requests -= requests
            self._nbytes -= nbytes

    def answered(self, nbytes: int, seconds: float) -> None:
        """Record that a request succeeded, and its time."""
        with self._lock:
            step = 1 / int(self._most)
            if self._most < FIRST_REQUESTS:
                self._most += step
            elif nbytes <= _SMALL:
                self._quickest = min(self._quickest * _FORGET, seconds)
                self._held_back, held_back = max(0, self._held_back - 1), self._held_back
                if seconds > self._quickest * _QUEUED:
                    self._most = max(FIRST_REQUESTS, self._most - step)
                elif held_back:
                    self._most = min(MAX_REQUESTS, self._most + step)

    def refused(self) -> None:
        """Say that a server asked to slow down."""
        now = time.monotonic()
        with self._lock:
            if now - self._cut > _ONE_CUT:
                self._cut = now
                self._most = max(MIN_REQUESTS, self._most / 2)
