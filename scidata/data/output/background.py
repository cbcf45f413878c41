"""The writing thread, behind a queue of at most a few steps."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

JobT = TypeVar("JobT")

_JOIN_SECONDS = 5.0
_CHECK_SECONDS = 0.5
_NICE = 10  # with few cores the loop has priority: it waits for all ranks at each step
# After a step the loop often begins a collective: where cores are few, a rank that is held up there holds up all of
# them, for longer than this.
_HEAD_START = 0.003  # s


class Background(Generic[JobT]):
    """Runs jobs one after another in a thread; the first error ends it.

    - ``run``: called in the thread with each job.
    - ``failed``: called there with the error that ends it.
    - ``check``: called several times a second while a caller waits; raises if waiting is in vain.
    - ``max_waiting``: unfinished jobs; :meth:`put` waits while there are as many.
    """

    def __init__(
        self, run: Callable[[JobT], None], failed: Callable[[BaseException], None],
        check: Callable[[], None] = lambda: None, *, max_waiting: int,
    ) -> None:  # fmt: skip
        self._run, self._failed, self._check, self._max = run, failed, check, max_waiting
        self._changed = threading.Condition()
        self._jobs: deque[JobT] = deque()
        self._at_work, self._ends = False, False
        self._begins = 0.0  # when the next job may
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="scidata-write", daemon=True)
        self._thread.start()

    def put(self, job: JobT) -> None:
        """Queue a job as soon as there is room. Raises the error that ended the thread."""
        self._wait_for(lambda: len(self._jobs) + self._at_work < self._max)
        with self._changed:
            self._raise()
            if not (self._jobs or self._at_work):
                self._begins = time.monotonic() + _HEAD_START
            self._jobs.append(job)
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all jobs are done. Raises the error that ended the thread."""
        self._wait_for(lambda: not (self._jobs or self._at_work))
        self._raise()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self.error is not None or condition(), _CHECK_SECONDS):
                    return
            self._check()

    def stop(self, error: BaseException | None = None) -> None:
        """End the thread and drop waiting jobs."""
        with self._changed:
            self._ends = True
            self._jobs.clear()
            if self.error is None:
                self.error = error
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def fail(self, error: BaseException) -> None:
        """End the thread with an error, if it is the first one."""
        with self._changed:
            if self._ends or self.error is not None:
                return
            self.error = error
            self._changed.notify_all()
        self._failed(error)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    @property
    def _is_over(self) -> bool:
        return self._ends or self.error is not None

    def _work(self) -> None:
        if sys.platform == "linux":  # only here, threads have priorities, which new threads inherit
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._jobs)
                self._changed.wait_for(lambda: self._is_over, self._begins - time.monotonic())
                if self._is_over:
                    return
                job = self._jobs.popleft()
                self._at_work = True
            try:
                self._run(job)
            except BaseException as e:
                self.fail(e)
                return
            finally:
                del job  # its buffers
                with self._changed:
                    self._at_work = False
                    self._changed.notify_all()
