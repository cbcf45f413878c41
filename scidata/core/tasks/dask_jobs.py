"""Pieces of work as tasks of dask.distributed: on the workers of a cluster, which may come, go and die meanwhile.

A task is a batch of pieces. It ends after :data:`BATCH_S` and says what it has done, and the rest goes into other
tasks: so neither pieces of milliseconds nor those of hours need anything known of them beforehand. What a worker that
died had not reported is done again by another, as Dask does it.
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
from typing import Any

from scidata.core.install import install_hint
from scidata.core.tasks.dask_worker import Batch, remote
from scidata.core.tasks.work import Tick, Work
from scidata.errors import ClusterError, ConfigError, MissingDependencyError, SciDataError

BATCH_S = 2.0  # of a task: what is lost with a worker, and long beside the milliseconds that a task costs
CONNECT_S = 30.0
_MANY = 256  # tasks at the beginning: enough for adaptive clusters to see how much there is to do
_WAVES = 8  # or so many for each thread
_PARTS = 32  # of a stretch: each costs a chunk that is decoded twice
_UNITS = 8  # of a stretch that a part should have
_TRIES = 3  # of a piece that fails for what may be one machine's trouble
_TROUBLE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_POLL_S = 0.02
_LONELY_S = 30.0  # without a worker, after which a warning says so


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as e:
        raise MissingDependencyError(f"dask.distributed is not installed ({e}): {install_hint('dask')}") from e
    return distributed


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Return a client of the scheduler at an address, or of that which wrote a scheduler file.

    Raises
    ------
    ClusterError
        None answers.
    MissingDependencyError
        distributed is not installed.
    """
    distributed = _distributed()
    target = _address(address)
    try:
        client = distributed.Client(target, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TypeError, ImportError) as e:  # no answer, or TLS is not set up
        raise ClusterError(f"{address}: no scheduler answers there ({e}); look whether it runs, and where") from e
    with client:
        yield client


def _address(text: str) -> str:
    """Return the address that a text is, or that is in the scheduler file that it names.

    Checked here: of a client that does not know what an address means, closing takes a minute.
    """
    found: Any = text
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
    """An :class:`scidata.core.tasks.work.Executor` of a cluster's workers.

    Parameters
    ----------
    client
        A ``distributed.Client``, which stays open.

    Raises
    ------
    ConfigError
        It is none, is asynchronous, or is closed.
    """

    is_remote = True

    def __init__(self, client: Any) -> None:
        distributed = _distributed()
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
        """Return more parts than there are threads, so that workers that come later have some, but no tiny ones."""
        threads = int(sum(self._client.nthreads().values()))
        return max(1, min(num_units, max(threads, min(max(_PARTS, 4 * threads), num_units // _UNITS))))

    def run(
        self, work: Work, indices: Sequence[int], *, tick: Tick, take: Callable[[int, Any], None] | None = None
    ) -> None:
        """Do the pieces with these numbers; the first error ends the others and is raised here.

        Raises
        ------
        ClusterError
            A worker that cannot do the work, workers that died of it, or the connection to the scheduler is lost.
        """
        if indices:
            take = take or (lambda index, value: None)
            _Run(self._client, work, tick, take, connection=self._connection).run(indices)


class _Run:
    """One call of :meth:`Cluster.run`."""

    def __init__(
        self, client: Any, work: Work, tick: Tick, take: Callable[[int, Any], None], *, connection: Any
    ) -> None:
        self._client, self._work, self._tick, self._take = client, work, tick, take
        self._connection = connection  # of before the work was prepared, which may take long
        self._version = importlib.import_module("scidata").__version__  # not imported above: it leads to torch
        self._name = f"scidata-{work.name}-{uuid.uuid4().hex[:12]}"
        self._remote = remote()
        self._check = pickle.dumps(work.check)
        self._batches: dict[Any, list[int]] = {}  # of the futures that are awaited
        self._num_tasks = 0
        self._finished: set[int] = set()
        self._seconds = 0.0  # that these took
        self._told: dict[int, float] = {}  # shares of those under way
        self._events: deque[list[Any]] = deque()
        self._failures: dict[int, int] = {}
        self._suspects: deque[int] = deque()  # pieces that workers died of, or of another that was in line there
        self._tried: set[int] = set()  # those of them that were given another try
        self._trial: Any = None  # the future of the latest try

    def run(self, indices: Sequence[int]) -> None:
        self._check_connection()
        try:
            with self._published():
                threads = self._probe()
                self._most = max(_MANY, _WAVES * threads)
                self._wait(indices)
        except SciDataError:
            raise
        except (Exception, TaskCancelled) as e:  # of a client without scheduler, any kind
            if self._is_connected and not isinstance(e, CancelledError | TaskCancelled):
                raise
            raise self._lost() from e

    @contextmanager
    def _published(self) -> Iterator[None]:
        """Have the job where workers find it, also those that come later: on the scheduler."""
        from distributed import Variable

        job = Variable(self._name, client=self._client)
        job.set((self._check, pickle.dumps(self._work.job)))
        self._client.subscribe_topic(self._name, lambda event: self._events.append(event[1]))
        try:
            yield
        finally:
            if self._is_connected:  # another scheduler knows nothing of this, and is waited for
                with suppress(Exception):  # what ended the run is what is raised
                    self._client.cancel(list(self._batches))
                    self._client.unsubscribe_topic(self._name)
                    job.delete()

    def _probe(self) -> int:
        """Raise where a worker that is there cannot do the work; return how many threads all of them have."""
        answers = self._client.run(
            self._remote, self._version, "check_here", self._name, self._check, on_error="return"
        )
        for worker, answer in sorted(answers.items()):
            if isinstance(answer, OSError):  # it left meanwhile
                continue
            if isinstance(answer, Exception):
                raise ClusterError(f"worker {worker} cannot be asked: {type(answer).__name__}: {answer}") from answer
            self._found(*answer)
        return int(sum(self._client.nthreads().values()))

    def _found(self, where: str, why: str | None, found: Any) -> Any:
        """Return what a worker has returned."""
        if why is not None:
            raise ClusterError(f"worker {where} cannot do this: {why}{self._work.after}")
        return found

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _submit(self, indices: Sequence[int], most: int | None = None) -> list[Any]:
        """Make tasks of pieces, ``most`` in each; by default as many as take :data:`BATCH_S`, where that is known."""
        if not indices:
            return []
        size = most or math.ceil(len(indices) / self._most)
        if most is None and self._finished and self._seconds:
            size = max(1, int(BATCH_S * len(self._finished) / self._seconds))
        batches = [list(indices[first : first + size]) for first in range(0, len(indices), size)]
        keys = [(self._name, self._num_tasks + number) for number in range(len(batches))]
        self._num_tasks += len(batches)
        same = [self._version, "do_batch", self._name]
        futures = self._client.map(
            self._remote, *([each] * len(keys) for each in same), keys, batches, [BATCH_S] * len(keys),
            key=keys, pure=False,
        )  # fmt: skip
        self._batches.update(zip(futures, batches, strict=True))
        return list(futures)

    def _wait(self, indices: Sequence[int]) -> None:
        from distributed import as_completed

        waiting = as_completed(loop=self._client.loop)
        waiting.update(self._submit(indices))
        lonely = time.monotonic() + _LONELY_S
        while self._batches:
            self._check_connection()
            ready = waiting.next_batch(block=False)
            if ready or self._events:
                lonely = time.monotonic() + _LONELY_S
            while self._events:
                self._told_of(*self._events.popleft())
            if ready:
                waiting.update(self._collect(ready))
            elif time.monotonic() < lonely:
                time.sleep(_POLL_S)
            else:
                lonely = time.monotonic() + 20 * _LONELY_S
                if not self._client.nthreads():
                    warnings.warn(
                        f"the cluster has no worker, and nothing was done for {_LONELY_S:.0f} s; waiting", stacklevel=2
                    )

    def _collect(self, ready: Sequence[Any]) -> list[Any]:
        """Take in what tasks that have ended say; return those to wait for."""
        more: list[Any] = []
        for future in ready:
            status, result = future.status, None
            if status == "finished":
                try:
                    result = future.result(timeout=CONNECT_S)
                except TimeoutError:
                    status = "lost"
            if status in ("pending", "lost"):  # its result went with a worker: it is done again
                more.append(future)
                continue
            batch = self._batches.pop(future)
            error = future.exception() if status == "error" else None
            future.release()  # an error's traceback holds it: it would be done again where its worker dies later
            if error is not None:
                more += self._isolate(error, batch)
            elif result is not None:
                more += self._take_in(self._found(*result), batch)
            else:
                raise self._lost()
        return more + self._try_suspect()

    def _take_in(self, batch: Batch, indices: Sequence[int]) -> list[Any]:
        for index, value, ticked in batch.done:
            self._finished.add(index)
            self._take(index, value)
            self._tick(ticked - self._told.pop(index, 0.0))
        self._seconds += batch.seconds
        rest = [index for index in indices if index not in self._finished]
        if batch.failed is not None:
            self._retry_or_raise(*batch.failed)
        return self._submit(rest)

    def _told_of(self, index: int, total: float) -> None:
        """Take in how far a piece is; one that is done again tells the same shares again."""
        before = self._told.get(index, 0.0)
        if index not in self._finished and total > before:
            self._told[index] = total
            self._tick(total - before)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _retry_or_raise(self, index: int, error: Exception, trace: str) -> None:
        self._failures[index] = self._failures.get(index, 0) + 1
        if getattr(error, "errno", None) in _TROUBLE and self._failures[index] < _TRIES:
            return
        error.add_note(f"in {self._work.named(index)}, on a worker:\n{trace}")
        raise error

    def _isolate(self, error: BaseException, indices: Sequence[int]) -> list[Any]:
        """Do the pieces of a batch that workers died of one by one, single ones once more, and then raise.

        Dask counts the death of a worker against all tasks that it was given, also those that it had not begun.
        """
        from distributed.scheduler import KilledWorker

        rest = [index for index in indices if index not in self._finished]
        if not isinstance(error, KilledWorker):
            raise ClusterError(f"a task failed on {self._work.named(indices[0])}: {error}") from error
        if len(rest) > 1:
            return self._submit(rest, most=1)
        if rest[0] not in self._tried:
            self._suspects.append(rest[0])
            return []
        raise ClusterError(
            f"{error.allowed_failures + 1} workers died while they worked on {self._work.named(rest[0])}; if they were "
            f"killed for memory, give workers more of it, or fewer threads{self._work.after}"
        ) from error

    def _try_suspect(self) -> list[Any]:
        """Do a suspect again, while no other one is: so what workers die of is not in line with it."""
        if not self._suspects or self._trial in self._batches:
            return []
        index = self._suspects.popleft()
        self._tried.add(index)
        futures = self._submit([index])
        self._trial = futures[0]
        return futures

    @property
    def _is_connected(self) -> bool:
        """Whether the client has the scheduler still that the run began with: it goes on with another by itself."""
        return self._client.status == "running" and self._client.scheduler_comm is self._connection

    def _check_connection(self) -> None:
        """Raise where the scheduler has ended, or was restarted, and knows nothing of the tasks.

        Their futures say so as well, but not those that are sent while the client connects anew.
        """
        if not self._is_connected:
            raise self._lost()

    def _lost(self) -> ClusterError:
        address = getattr(self._client.scheduler, "address", None) or "of the client"
        return ClusterError(
            f"the scheduler {address} has lost the run: it was restarted or has ended, or somebody cancelled the "
            f"tasks{self._work.after}"
        )
