"""The worker side of :mod:`scidata.core.tasks.dask_jobs`: run a batch of pieces."""

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

_TELL_S = 1.0  # seconds between progress reports of a piece
_here = threading.local()  # each worker thread has its own job, as a process would
_checking = threading.Lock()
_checked: list[str] = []  # latest runs that this process passed the check for


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as sent to workers: the client's version, and the work's pickled check and job."""

    name: str
    version: str
    check: bytes
    job: bytes


@dataclass(kw_only=True)
class Batch(Generic[T]):
    """The finished pieces of a batch, and the one that ended it."""

    # of each piece: number, return value of the job, and sum of its reported shares
    done: list[tuple[int, T, float]] = field(default_factory=list)
    # the piece that ended the batch: number, error, and traceback as text
    failed: tuple[int, Exception, str] | None = None


class CancelledHere(BaseException):
    """The client cancelled this task, so that nothing waits for its result."""


def published(run: Run) -> Run:
    """Return the run as a task's result, sent once per worker and recomputed if a worker dies with it."""
    return run


def do_batch(
    run: Run, key: tuple[str, int, int], indices: Sequence[int], trouble: frozenset[int]
) -> Batch[object] | None:
    """Do pieces in order, as the task ``key``, until one fails; None if the client cancelled the task.

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
    """Return a run's job, unpickled once per thread."""
    if getattr(_here, "run", None) != run.name:
        where, why = prober()(run.version, run.name, run.check)
        if why is not None:
            raise ClusterError(f"worker {where} cannot do this: {why}")
        _here.run, _here.job = run.name, pickle.loads(run.job)
    return _here.job


class _Tell:
    """Receives a piece's progress, reports long pieces to the client, and stops cancelled ones."""

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
        """Raise if the client cancelled the task: Dask does not interrupt running tasks."""
        task = self._worker.state.tasks.get(self._key)
        if task is None or task.state == "cancelled":
            raise CancelledHere


def unfit(run: str, check: bytes) -> str | None:
    """Return the reason why this process cannot do a run; None if it can, or passed the check before."""
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
    """Return a function that names its worker, and the reason why that cannot do a run, or None.

    Being made here, it is pickled with its code: a worker without scidata answers, too, and says so.
    """

    def probe(version: str, run: str, check: bytes, dask_worker: Worker | None = None) -> tuple[str, str | None]:
        import importlib
        import socket

        from distributed import get_worker

        worker = get_worker() if dask_worker is None else dask_worker  # Client.run passes it, and tasks call for it
        where = f"{worker.address} on {socket.gethostname()}"
        try:
            found = importlib.import_module("scidata").__version__
        except ImportError as e:
            return where, f"it cannot import scidata ({e}); install scidata {version} where workers run"
        if found != version:
            return where, f"it has scidata {found}, and the client {version}; install the same version on both"
        return where, importlib.import_module("scidata.core.tasks.dask_worker").unfit(run, check)

    return probe
