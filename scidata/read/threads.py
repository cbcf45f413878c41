"""Reader threads, started on first use."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor


class ReaderThreads:
    """One pool per process, since threads do not survive a fork; pickles as the number of threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def executor(self) -> ThreadPoolExecutor | None:
        """Return this process's pool; None if the caller's thread is the only one."""
        if self._num_threads < 2:
            return None
        pool = self._pools.get(os.getpid())
        if pool is None:  # setdefault is atomic, and the pool that loses the race has started no thread
            pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="scidata-read")
            pool = self._pools.setdefault(os.getpid(), pool)
        return pool

    def close(self) -> None:
        """End this process's threads; the next use starts new ones."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.shutdown(wait=True)

    def __reduce__(self) -> tuple[object, ...]:
        return ReaderThreads, (self._num_threads,)
