"""Run jobs in this process, or in parallel in spawned ones that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic

from scidata.core.interrupts import ignore_interrupts, interrupts_held
from scidata.core.tasks.work import Job, T, Tick, Work, sendable
from scidata.errors import SciDataError


class Processes:
    """A :class:`scidata.core.tasks.work.Executor` of ``num_jobs`` processes; one job runs in this process."""

    is_remote = False

    def __init__(self, num_jobs: int) -> None:
        self._num_jobs = num_jobs

    def num_parts(self, num_units: int) -> int:
        """Return one part per process."""
        return self._num_jobs

    def run(
        self, work: Work[T], indices: Sequence[int], *, tick: Tick, take: Callable[[int, T], None] | None = None
    ) -> None:
        """Run jobs by number; the first error ends the others and is raised here."""
        take = take or (lambda index, value: None)
        if self._num_jobs <= 1 or len(indices) <= 1:
            for index in indices:
                take(index, work.job(index, tick))
            return
        workers = _Workers(work, min(self._num_jobs, len(indices)))
        try:
            workers.run(indices, tick, take)
        finally:
            workers.end()


class _Workers(Generic[T]):
    def __init__(self, work: Work[T], num: int) -> None:
        self._work = work
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, BaseProcess] = {}
        for _ in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, work.job), daemon=True)
            with interrupts_held():
                process.start()
            theirs.close()
            self._processes[ours] = process

    def run(self, todo: Sequence[int], tick: Tick, take: Callable[[int, T], None]) -> None:
        waiting = list(reversed(todo))
        busy: dict[Connection, int] = {}
        for connection in self._processes:
            busy[connection] = waiting.pop()
            connection.send(busy[connection])
        while busy:
            ready = wait(list(busy))
            for connection in [each for each in busy if each in ready]:
                index = busy[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError):
                    raise SciDataError(self._died(connection, index)) from None
                if kind == "error":
                    raise value
                if kind == "share":
                    tick(value)
                    continue
                if waiting:
                    busy[connection] = waiting.pop()
                    connection.send(busy[connection])
                else:
                    del busy[connection]
                take(index, value)

    def _died(self, connection: Connection, index: int) -> str:
        process = self._processes[connection]
        process.join(5)
        why = "if it was killed for memory, use fewer --jobs"
        if process.exitcode == 1:  # it imports the caller's script again
            why = "its error is above; a script that asks for jobs= does so below `if __name__ == '__main__':`"
        code = process.exitcode
        named = self._work.named(index)
        return f"the process that worked on {named} ended with exit code {code}; {why}{self._work.after}"

    def end(self) -> None:
        for connection, process in self._processes.items():
            connection.close()
            process.kill()
        for process in self._processes.values():
            process.join()
            process.close()


def _work(connection: Connection, job: Job[object]) -> None:
    """Do the pieces that the parent sends until it closes the connection."""
    ignore_interrupts()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            index = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            value = job(index, lambda share: connection.send(("share", share)))
        except Exception as error:
            connection.send(("error", sendable(error)))
        else:
            connection.send(("done", value))


def _end_with_parent() -> None:
    """Exit at once when the parent is gone: a new run may own the output by then."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
