"""The part of :mod:`scidata.core.tasks.dask_jobs` that runs on the workers of a Dask cluster: a batch of pieces."""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

from scidata.core.tasks.work import Job, T, sendable
from scidata.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Worker

_TELL_S = 1.0  # between reports of how far a piece is
_here = threading.local()  # each thread of a worker has a job of its own, as a process would
_checking = threading.Lock()
_checked: list[str] = []  # the runs that this process was found fit for, the latest ones


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as workers need to know it: the version of the client, and the check and job of the work, pickled."""

    name: str
    version: str
    check: bytes
    job: bytes


@dataclass(kw_only=True)
class Batch(Generic[T]):
    """The pieces of a batch that were done, and the one that ended it."""

    # of each piece: its number, the value that the job returned, and the sum of the shares it told
    done: list[tuple[int, T, float]] = field(default_factory=list)
    # the piece that ended the batch: its number, the error, and the traceback as text
    failed: tuple[int, Exception, str] | None = None


class CancelledHere(BaseException):
    """The client has cancelled the task: nobody waits for its result."""


def published(run: Run) -> Run:
    """Return the run: the result of a task is sent once to each worker, and made again where a worker dies with it."""
    return run


def do_batch(
    run: Run, key: tuple[str, int, int], indices: Sequence[int], trouble: frozenset[int]
) -> Batch[object] | None:
    """Do pieces in order, as the task ``key``, until one fails; None if the client has cancelled the task.

    Raises OSError: its ``errno`` is one of ``trouble``: Dask tries the batch again.
    """
    from distributed import get_worker

    batch: Batch[object] = Batch()
    for index in indices:
        tell = _Tell(get_worker(), run.name, key, index)
        try:
            tell.raise_if_cancelled()
            batch.done.append((index, _job_of(run)(index, tell), tell.total))
        except CancelledHere:
            return None
        except Exception as e:
            if getattr(e, "errno", None) in trouble:
                raise
            batch.failed = index, sendable(e), traceback.format_exc()
            break
    return batch


def _job_of(run: Run) -> Job[object]:
    """Return the job of a run, which each thread unpickles once."""
    if getattr(_here, "run", None) != run.name:
        where, why = prober()(run.version, run.name, run.check)
        if why is not None:
            raise ClusterError(f"worker {where} cannot do this: {why}")
        _here.run, _here.job = run.name, pickle.loads(run.job)
    return _here.job


class _Tell:
    """Takes the shares of a piece that are done, tells the client of long ones, and ends pieces that it gave up."""

    def __init__(self, worker: Worker, run: str, key: tuple[str, int, int], index: int) -> None:
        self._worker, self._run, self._key, self._index = worker, run, key, index
        self._told = time.monotonic()
        self.total = 0.0

    def __call__(self, share: float) -> None:
        self.total += share
        now = time.monotonic()
        if now - self._told >= _TELL_S:
            self._told = now
            self.raise_if_cancelled()
            self._worker.log_event(self._run, [self._index, self.total])

    def raise_if_cancelled(self) -> None:
        """Raise if the client has cancelled the task: Dask lets one that has begun run to its end."""
        task = self._worker.state.tasks.get(self._key)
        if task is None or task.state == "cancelled":
            raise CancelledHere


def unfit(run: str, check: bytes) -> str | None:
    """Return the reason why this process is unfit for a run; None if it is fit, or was found so before."""
    with _checking:
        if run not in _checked:
            try:
                pickle.loads(check)()
            except Exception as e:
                return str(e) or type(e).__name__
            _checked.append(run)
            del _checked[:-8]
    return None


def prober() -> Callable[[str, str, bytes], tuple[str, str | None]]:
    """Return a function that names the worker it is called on, and says why it cannot do a run, or None.

    Being made here, it is pickled with its code: a worker without scidata answers, too, and says so.
    """

    def probe(version: str, run: str, check: bytes, dask_worker: Worker | None = None) -> tuple[str, str | None]:
        import importlib
        import socket

        from distributed import get_worker

        worker = get_worker() if dask_worker is None else dask_worker  # Client.run gives it, and tasks ask
        where = f"{worker.address} on {socket.gethostname()}"
        try:
            found = importlib.import_module("scidata").__version__
        except ImportError as e:
            return where, f"it cannot import scidata ({e}); install scidata {version} where workers run"
        if found != version:
            return where, f"it has scidata {found}, and the client {version}; install the same version on both"
        return where, importlib.import_module("scidata.core.tasks.dask_worker").unfit(run, check)

    return probe
