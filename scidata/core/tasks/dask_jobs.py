"""Run jobs as tasks of dask.distributed on a cluster's workers, which may join, leave and die meanwhile.

A task is a batch of pieces: one, if there are few. Dask does a task again that was with a worker that died, or that
failed for the file system's sake.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import pickle
import re
import time
import uuid
import warnings
from asyncio import CancelledError as TaskCancelled
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Generic

from scidata.core.checks import check_int, optional_module
from scidata.core.tasks.dask_worker import Batch, Run, do_batch, prober, published
from scidata.core.tasks.processes import Processes
from scidata.core.tasks.work import Executor, T, Tick, Work
from scidata.errors import ClusterError, ConfigError, SciDataError

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_S = 30.0
_MANY = 256  # tasks, so that adaptive clusters see the amount of work
_WAVES = 8  # or this many per thread
_PARTS = 32  # of a stretch: each costs a chunk that is decoded twice
_UNITS = 8  # of a stretch that a part should have
_RETRIES = 2  # attempts of a piece, whose failure may be one machine's fault
_TROUBLE = frozenset((errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH))
_POLL_S = 0.02
_LONELY_S = 30.0  # seconds without a worker before a warning


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """Return a client of the scheduler at an address or named in a scheduler file.

    Raises MissingDependencyError: distributed is not installed.
    """
    distributed = optional_module("distributed", "dask.distributed is not installed", "dask")
    target = _address(address)
    try:
        client = distributed.Client(target, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TypeError, ImportError) as e:  # no answer, or TLS is not configured
        raise ClusterError(f"{address}: no scheduler answers there ({e}); look whether it runs, and where") from e
    with client:
        yield client


def _address(text: str) -> str:
    """Return an address, or read it from a scheduler file.

    Checked here: a client that does not understand an address takes a minute to close.
    """
    found: object = text
    if os.path.isfile(text):
        with open(text, encoding="utf-8", errors="replace") as file, suppress(ValueError, TypeError, LookupError):
            found = json.load(file)["address"]
    if isinstance(found, str) and re.fullmatch(r"((tcp|tls|ucx|ws|wss)://)?[^/\s]+:\d+", found):
        return found
    raise ClusterError(
        f"{text}: neither the address of a scheduler nor a scheduler file; give the address that `dask scheduler` "
        "prints, tcp://host:8786 say, or the file that --scheduler-file has it write"
    )


class Cluster:
    """A :class:`scidata.core.tasks.work.Executor` on a Dask cluster.

    ``client``: a ``distributed.Client``, which stays open.
    """

    is_remote = True

    def __init__(self, client: object) -> None:
        distributed = optional_module("distributed", "dask.distributed is not installed", "dask")
        if not isinstance(client, distributed.Client):
            raise ConfigError(
                f"client: expected a distributed.Client, not {type(client).__name__}; distributed.Client(address) "
                "makes one"
            )
        if client.asynchronous:
            raise ConfigError("client: it is asynchronous, which this call is not; make one without asynchronous=True")
        if client.status != "running":
            raise ConfigError(f"client: it is {client.status}, not connected to a scheduler; make a new one")
        self._client, self._connection = client, client.scheduler_comm

    def num_parts(self, num_units: int) -> int:
        """Return more parts than threads, so that late workers get some, but no tiny parts."""
        threads = int(sum(self._client.nthreads().values()))
        return max(1, min(num_units, max(threads, min(max(_PARTS, 4 * threads), num_units // _UNITS))))

    def run(
        self, work: Work[T], indices: Sequence[int], *, tick: Tick, take: Callable[[int, T], None] | None = None
    ) -> None:
        """Run jobs by number; the first error cancels the others and is raised here.

        Raises ClusterError: a worker that cannot do the work, workers that died of it, or the connection to the
        scheduler is lost.
        """
        if indices:
            take = take or (lambda index, value: None)
            _Run(self._client, work, tick, take, connection=self._connection).run(indices)


class _Run(Generic[T]):
    """One call of :meth:`Cluster.run`."""

    def __init__(
        self, client: Client, work: Work[T], tick: Tick, take: Callable[[int, T], None], *, connection: object
    ) -> None:
        self._client, self._work, self._tick, self._take = client, work, tick, take
        self._connection = connection  # taken before the work was prepared, which may take long
        self._run = Run(
            name=f"scidata-{work.name}-{uuid.uuid4().hex[:12]}",
            version=importlib.import_module("scidata").__version__,  # not imported above, since it imports torch
            check=pickle.dumps(work.check),
            job=pickle.dumps(work.job),
        )
        self._futures: list[Future[object]] = []  # results that the scheduler keeps for the run
        self._told: dict[int, float] = {}  # finished shares of running pieces
        self._events: deque[tuple[int, float]] = deque()

    def run(self, indices: Sequence[int]) -> None:
        if not self._is_connected:
            raise self._lost()
        try:
            threads = self._probe()
            self._client.subscribe_topic(self._run.name, lambda event: self._events.append((event[1][0], event[1][1])))
            try:
                size = math.ceil(len(indices) / max(_MANY, _WAVES * threads))
                suspects = self._do([indices[i : i + size] for i in range(0, len(indices), size)], 0)
                # Workers died of these, or of another in line there: Dask counts a death against all tasks that the
                # worker was given. Each is done once more with no other one in line.
                for attempt, index in enumerate(suspects, 1):
                    self._do([[index]], attempt)
            finally:
                if self._is_connected:  # a new scheduler does not know this run, and the call would wait for it
                    with suppress(Exception):  # the error that ended the run is the one to raise
                        self._client.cancel(self._futures)
                        self._client.unsubscribe_topic(self._run.name)
        except SciDataError:
            raise
        except (Exception, TaskCancelled) as e:  # a client without a scheduler raises any kind
            if self._is_connected and not isinstance(e, CancelledError | TaskCancelled):
                raise
            raise self._lost() from e

    def _probe(self) -> int:
        """Raise if any present worker cannot do the work; return the number of threads of all workers."""
        run = self._run
        answers = self._client.run(prober(), run.version, run.name, run.check, on_error="return")
        for worker, answer in sorted(answers.items()):
            if isinstance(answer, OSError):  # the worker left meanwhile
                continue
            if isinstance(answer, Exception):
                raise ClusterError(f"worker {worker} cannot be asked: {type(answer).__name__}: {answer}") from answer
            where, why = answer
            if why is not None:
                raise ClusterError(f"worker {where} cannot do this: {why}{self._work.after}")
        return int(sum(self._client.nthreads().values()))

    def _do(self, batches: Sequence[Sequence[int]], attempt: int) -> list[int]:
        """Run batches of pieces; return the pieces during which workers died in the first attempt."""
        from distributed import as_completed

        client, name = self._client, self._run.name
        # a task of a group of its own: Dask queues a group of tasks, of which none depends on many, for any worker
        run = client.submit(published, self._run, key=f"{name}-job-{attempt}", pure=False)
        keys = [(name, attempt, number) for number in range(len(batches))]
        futures = client.map(
            do_batch, [run] * len(keys), keys, batches, trouble=_TROUBLE, key=keys, retries=_RETRIES, pure=False
        )
        self._futures += [run, *futures]
        awaited = dict(zip(futures, batches, strict=True))
        waiting = as_completed(futures, loop=client.loop, with_results=True, raise_errors=False)
        suspects: list[int] = []
        lonely = time.monotonic() + _LONELY_S
        while awaited:
            if not self._is_connected:  # futures report it too, except those sent while the client reconnects
                raise self._lost()
            ready = waiting.next_batch(block=False)
            if ready or self._events:
                lonely = time.monotonic() + _LONELY_S
            while self._events:
                index, total = self._events.popleft()
                told = self._told.get(index, 0.0)
                if total > told:  # a repeated piece reports the same shares again
                    self._told[index] = total
                    self._tick(total - told)
            for future, result in ready:
                batch = awaited.pop(future)
                if future.status == "error":
                    suspects += self._suspects(future.exception(), batch, attempt)
                elif isinstance(result, Batch):
                    self._take_in(result)
                else:
                    raise self._lost()
                future.release()
            if not ready and time.monotonic() < lonely:
                time.sleep(_POLL_S)
            elif not ready:
                lonely = time.monotonic() + 20 * _LONELY_S
                if not client.nthreads():
                    warnings.warn(
                        f"the cluster has no worker, and nothing was done for {_LONELY_S:.0f} s; waiting", stacklevel=2
                    )
        return suspects

    def _take_in(self, batch: Batch[T]) -> None:
        for index, value, ticked in batch.done:
            self._take(index, value)
            self._tick(ticked - self._told.get(index, 0.0))
            self._told[index] = math.inf  # its events may arrive later
        if batch.failed is not None:
            index, error, trace = batch.failed
            if isinstance(error, ClusterError):
                raise ClusterError(f"{error}{self._work.after}")
            error.add_note(f"in {self._work.named(index)}, on a worker:\n{trace}")
            raise error

    def _suspects(self, error: BaseException, batch: Sequence[int], attempt: int) -> Sequence[int]:
        """Return a task's pieces if workers died during it in the first attempt; raise other errors."""
        from distributed.scheduler import KilledWorker

        named = self._work.named(batch[0])
        if not isinstance(error, KilledWorker):
            if isinstance(error, OSError):
                error.add_note(f"in {named} or soon after, on a worker, {_RETRIES + 1} times")
                raise error
            raise ClusterError(f"a task failed on {named}: {type(error).__name__}: {error}") from error
        if attempt == 0:
            return batch
        raise ClusterError(
            f"{error.allowed_failures + 1} workers died while they worked on {named}; if they were "
            f"killed for memory, give workers more of it, or fewer threads{self._work.after}"
        ) from error

    @property
    def _is_connected(self) -> bool:
        """Whether the client still has this run's scheduler; a client reconnects to another one by itself."""
        return self._client.status == "running" and self._client.scheduler_comm is self._connection

    def _lost(self) -> ClusterError:
        address = getattr(self._client.scheduler, "address", None) or "of the client"
        return ClusterError(
            f"the scheduler {address} has lost the run: it was restarted or has ended, or somebody cancelled the "
            f"tasks{self._work.after}"
        )


def executor_of(jobs: int, client: object) -> Executor:
    """Return an executor: ``jobs`` processes, or the workers of ``client``'s cluster.

    Raises MissingDependencyError: ``client`` is given, and distributed is not installed.
    """
    jobs = check_int("jobs", jobs, least=1)
    if client is None:
        return Processes(jobs)
    if jobs > 1:
        raise ConfigError(f"jobs={jobs}: excludes client=, whose cluster has its own processes; give one of the two")
    return Cluster(client)
