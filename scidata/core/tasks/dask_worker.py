"""What a worker of a Dask cluster does of :mod:`scidata.core.tasks.dask_jobs`: a batch of pieces of work."""

from __future__ import annotations

import functools
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from scidata.core.tasks.work import Job, sendable

_FETCH_S = 60.0  # of a scheduler that is slow to answer
_TELL_S = 1.0  # between reports of how far a piece is
_here = threading.local()  # each thread of a worker has what it works with to itself, as a process would
_checking = threading.Lock()
_checked: list[str] = []  # the runs that this process was found fit for, the latest ones


@dataclass(kw_only=True)
class Batch:
    """What came of a batch.

    Attributes
    ----------
    done
        Of each piece that was done: its number, what the job returned, and the sum of the shares it told.
    failed
        The piece that ended the batch: its number, the error, and the traceback as text.
    seconds
        That the pieces of ``done`` took.
    """

    done: list[tuple[int, Any, float]] = field(default_factory=list)
    failed: tuple[int, Exception, str] | None = None
    seconds: float = 0.0


class CancelledHere(BaseException):
    """The client has cancelled the batch: nobody waits for what it would return."""


class UnfitError(Exception):
    """This worker cannot do the work; the message says why."""


def check_here(run: str, check: bytes) -> None:
    """Raise what this process lacks for a run, unless it was found fit before.

    Raises
    ------
    UnfitError
    """
    with _checking:
        if run in _checked:
            return
        try:
            pickle.loads(check)()
        except Exception as e:
            raise UnfitError(str(e) or type(e).__name__) from e
        _checked.append(run)
        del _checked[:-8]


def do_batch(run: str, key: Any, indices: Sequence[int], seconds: float) -> Batch:
    """Do pieces in order until ``seconds`` have passed, at least one; those that are not in the result were not done.

    Parameters
    ----------
    run
        The name of the variable, on the scheduler, that holds the pickled check and job.
    key
        Of the task that this is.
    """
    from distributed import get_worker

    worker = get_worker()
    batch = Batch()
    try:
        job = _job_of(run, functools.partial(_raise_if_cancelled, worker, key))
    except CancelledHere:
        return batch
    began = now = time.monotonic()
    for index in indices:
        if batch.done and now - began > seconds:
            break
        tell = _Tell(worker, run, key, index)
        try:
            _raise_if_cancelled(worker, key)
            value = job(index, tell)
        except CancelledHere:
            break
        except Exception as e:
            batch.failed = index, sendable(e), traceback.format_exc()
            break
        now = time.monotonic()
        batch.seconds = now - began
        batch.done.append((index, value, tell.total))
    return batch


def _job_of(run: str, raise_if_cancelled: Callable[[], None]) -> Job:
    """Return the job of a run, which this thread fetches once."""
    if getattr(_here, "run", None) != run:
        check, job = _published(run, raise_if_cancelled)
        check_here(run, check)
        _here.run, _here.job = run, pickle.loads(job)
    found: Job = _here.job
    return found


def _published(run: str, raise_if_cancelled: Callable[[], None]) -> tuple[bytes, bytes]:
    """Return what the variable of a run holds; of a run that was given up it is gone, and waiting for it of no use."""
    from distributed import Variable

    deadline = time.monotonic() + _FETCH_S
    while True:
        raise_if_cancelled()
        try:
            found: tuple[bytes, bytes] = Variable(run).get(timeout=1)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
        else:
            return found


class _Tell:
    """Takes the shares of a piece that are done: the client hears of those of long ones, and ends what it gave up."""

    def __init__(self, worker: Any, run: str, key: Any, index: int) -> None:
        self._worker, self._run, self._key, self._index = worker, run, key, index
        self._told = time.monotonic()
        self.total = 0.0

    def __call__(self, share: float) -> None:
        self.total += share
        now = time.monotonic()
        if now - self._told >= _TELL_S:
            self._told = now
            _raise_if_cancelled(self._worker, self._key)
            self._worker.log_event(self._run, [self._index, self.total])


def _raise_if_cancelled(worker: Any, key: Any) -> None:
    """Raise where the client has cancelled the task: Dask lets one that has begun run to its end."""
    task = worker.state.tasks.get(key)
    if task is None or task.state == "cancelled":
        raise CancelledHere


#: Called on workers as ``remote(version, name, *arguments)``: returns where that was, what is wrong there or None, and
#: what the function of this module returned.
Remote = Callable[..., tuple[str, str | None, Any]]


def remote() -> Remote:
    """Return a function that calls one of this module on a worker whose scidata is of the same version.

    Being made here, it is pickled with its code: a worker without scidata answers, too, and says so.
    """

    def call(version: str, name: str, *args: Any, dask_worker: Any = None) -> tuple[str, str | None, Any]:
        import importlib
        import socket

        from distributed import get_worker

        worker = get_worker() if dask_worker is None else dask_worker  # Client.run gives it, and tasks ask
        where = f"{worker.address} on {socket.gethostname()}"
        try:
            found = importlib.import_module("scidata").__version__
        except ImportError as e:
            return where, f"it cannot import scidata ({e}); install scidata {version} where workers run", None
        if found != version:
            return where, f"it has scidata {found}, and the client {version}; install the same version on both", None
        module = importlib.import_module("scidata.core.tasks.dask_worker")
        try:
            return where, None, getattr(module, name)(*args)
        except module.UnfitError as e:
            return where, str(e), None

    return call
