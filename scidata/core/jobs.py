"""Pieces of work done side by side, in spawned processes that end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from scidata.core.interrupts import ignore_interrupts, interrupts_held
from scidata.errors import SciDataError

Tick: TypeAlias = Callable[[float], None]

#: Does one piece of work and calls the function with the shares of it that are done; it and what it returns pickle.
Job: TypeAlias = Callable[[int, Tick], Any]


def run_jobs(job: Job, indices: Iterable[int], *, num_jobs: int, tick: Tick, work: str, after: str = "") -> list[Any]:
    """Call ``job(index, tick)`` for each index, in this process or in ``num_jobs`` others; return what they return.

    The first error ends the others and is raised here.

    Parameters
    ----------
    work
        What an index numbers, for the message about a process that has died: ``"sample"``.
    after
        What that message says in the end: how to go on.
    """
    todo = list(indices)
    if num_jobs <= 1 or len(todo) <= 1:
        return [job(index, tick) for index in todo]
    workers = _Workers(job, min(num_jobs, len(todo)), work, after)
    try:
        found = workers.run(todo, tick)
    finally:
        workers.end()
    return [found[index] for index in todo]


class _Workers:
    def __init__(self, job: Job, num: int, work: str, after: str) -> None:
        self._work, self._after = work, after
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Any, BaseProcess] = {}
        for _ in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            with interrupts_held():
                process.start()
            theirs.close()
            self._processes[ours] = process

    def run(self, todo: list[int], tick: Tick) -> dict[int, Any]:
        waiting = list(reversed(todo))
        found: dict[int, Any] = {}
        busy: dict[Any, int] = {}
        for connection in self._processes:
            busy[connection] = waiting.pop()
            connection.send(busy[connection])
        while busy:
            ready: list[Any] = wait(list(busy))
            for connection in ready:
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
                found[index] = value
                if waiting:
                    busy[connection] = waiting.pop()
                    connection.send(busy[connection])
                else:
                    del busy[connection]
        return found

    def _died(self, connection: Any, index: int) -> str:
        process = self._processes[connection]
        process.join(5)
        why = "if it was killed for memory, use fewer --jobs"
        if process.exitcode == 1:  # what it imports again is the caller's script
            why = "its error is above; a script that asks for jobs= does so below `if __name__ == '__main__':`"
        code = process.exitcode
        return f"the process that worked on {self._work} {index} ended with exit code {code}; {why}{self._after}"

    def end(self) -> None:
        for connection, process in self._processes.items():
            connection.close()
            process.terminate()
        for process in self._processes.values():
            process.join()
            process.close()


def _work(connection: Connection, job: Job) -> None:
    """Do the pieces of work that the parent names, until it closes the connection."""
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
            connection.send(("error", _sendable(error)))
        else:
            connection.send(("done", value))


def _end_with_parent() -> None:
    """End this process at once when the parent is gone: a new run may hold the output by now."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _sendable(error: Exception) -> Exception:
    """Return the error, or one that says the same where it does not pickle."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        return SciDataError(f"{type(error).__name__}: {error}")
    return error if isinstance(again, type(error)) else SciDataError(str(error))
