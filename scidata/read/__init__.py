"""Execute a plan into a preallocated buffer, on one or more threads. All decisions were made by the plan."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scidata.core import trace
from scidata.core.types import ArrayLayout, Decoding, FindChunk, Source
from scidata.errors import ConfigError, CorruptDataError
from scidata.plan.array import ArrayPlan, exact_plan, plan_array
from scidata.read.context import NO_READ, READ, ReadStats, Tally, Target
from scidata.read.execute import Execution
from scidata.read.pattern_tables import Task
from scidata.read.places import Alike, Places, expecting
from scidata.sources.access.fetches import Fetches
from scidata.sources.access.files import files
from scidata.sources.access.kept_urls import Came

#: Less work than this stays on the calling thread: waking another one costs 50-100 µs (measured).
_MIN_PARALLEL = 512 << 10
#: From this many bytes on, decoded or only copied, threads share the work from the start. For less,
#: others are woken once it proves slower than about a GB/s, as with a disk or a slow codec.
_MIN_AT_ONCE = 4 << 20
_MIN_AT_ONCE_RAW = 16 << 20
_WAKE_NS = 300_000
_BATCHES_PER_THREAD = 8


def read_plan(
    plan: ArrayPlan,
    out: npt.NDArray[np.generic],
    *,
    source: Source,
    decoding: Decoding | None = None,
    allow_missing: bool = False,
    executor: Executor | None = None,
) -> ReadStats:
    """Execute ``plan``: read its selection into ``out``.

    ``bytes_fetched`` of the result equals the plan's where that is exact, or is less: of large Blosc chunks only the
    blocks wanted are read.

    ``plan``: from :func:`scidata.plan.array.plan_array`. Places of chunks that it does not have are asked of
    ``source``.
    ``out``: ``plan.out_shape``, C-contiguous. Elements outside the plan's selection stay. Its dtype is the decoded one,
    the stored one in native byte order, or any other that values are then cast to once.
    ``decoding``: CF decoding to apply; None gives raw values.
    ``allow_missing``: read the fill value where a chunk is absent from the store.
    ``executor``: a ``ThreadPoolExecutor`` whose threads share the work with the calling one; None for this thread.

    Raises MissingChunkError, ShortReadError, ChecksumError, CorruptDataError: the store, the field and the chunk are
    named. Raises UnsupportedFormatError: a codec that needs the format's own library. Raises ConfigError: ``out`` does
    not fit the plan.
    """
    job = Job(plan, source, decoding, allow_missing=allow_missing)
    return read_plans([(job, out)], executor=executor)


class _Kind:
    """Jobs that share tables: their first plan, and how it is read."""

    __slots__ = ("alike", "allow_missing", "decoding", "plan", "ready")

    def __init__(self, plan: ArrayPlan, decoding: Decoding | None, allow_missing: bool) -> None:
        self.plan, self.decoding, self.allow_missing = plan, decoding, allow_missing
        self.ready: tuple[np.dtype[np.generic], Execution] | None = None
        self.alike: Alike | None = None  # set when a moved job is first requested


class Job(Places):
    """A plan with its read options (see :func:`read_plan`), reusable; prepared at the first read."""

    __slots__ = ("_kind", "bytes_wanted", "num_bytes", "out_shape")

    def __init__(
        self, plan: ArrayPlan, source: Source, decoding: Decoding | None = None, *, allow_missing: bool = False
    ) -> None:
        super().__init__(source, plan)
        self._kind = _Kind(plan, decoding, allow_missing)
        self.bytes_wanted, self.num_bytes, self.out_shape = plan.bytes_wanted, plan.num_bytes, plan.out_shape

    def moved(
        self, source: Source, layout: ArrayLayout, find: FindChunk, by: tuple[int, ...], rows: tuple[int, ...], num: int
    ) -> Job | None:
        """Return this job for other chunks of equal layout; None if the general path is needed.

        ``source, layout, find``: has those chunks, of equal geometry, codecs and decoding, and finds them.
        ``by, num``: they are so many chunks further along each dimension than those of the first of the kind, and so
        many in the grid's order.
        ``rows``: and the rows of raw chunks so many further on inside them; nothing where that is 0 for all dimensions.
        """
        kind = self._kind
        alike = kind.alike
        if alike is None:
            alike = kind.alike = Alike.of(kind.plan)
        if alike is None:
            return None
        job = object.__new__(Job)
        job.source, job.layout, job._plan, job._kind = source, layout, (kind.plan, by, rows), kind
        job.bytes_wanted, job.out_shape = self.bytes_wanted, self.out_shape
        job.num_bytes = alike.num_bytes
        job.raw = job.offset = job.nbytes = job.begins = job.ends = ()
        return job if alike.fill(job, find, num, rows) else None

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of decoded values, in native byte order."""
        decoding = self._kind.decoding
        return self.layout.dtype.newbyteorder("=") if decoding is None else decoding.dtype

    def exact_plan(self) -> ArrayPlan:
        """Return, and keep, the plan with each chunk's location and size, looked up if necessary."""
        plan = self.plan
        found = exact_plan(plan, self.source.locate)
        if found is not plan:
            self._plan, self._kind = found, _Kind(found, self._kind.decoding, self._kind.allow_missing)
            self.paths = ()  # and the other locations, which are looked up again
        return found

    def execution(self, dtype: np.dtype[np.generic]) -> Execution:
        """Return the execution for buffers of ``dtype``; raise errors found in chunk locations."""
        kind = self._kind
        plan, ready = kind.plan, kind.ready
        if not self.paths and self._plan is plan:
            if plan.refs is None and not plan.layout.fallback:
                plan = plan_array(plan.layout, plan.selection, expecting(self.source), out_shape=plan.out_shape)
            kind.plan = plan
            self.take(plan)
        if ready is None or ready[0] != dtype:
            decoding, allow_missing = kind.decoding, kind.allow_missing
            execution = Execution(plan, dtype, places=self, decoding=decoding, allow_missing=allow_missing)
            ready = kind.ready = dtype, execution
        return ready[1]


#: A requested read: its job and buffer.
_Wanted: TypeAlias = tuple[Execution, Job, npt.NDArray[np.generic]]
#: One run of a plan: its execution, and its destination.
_Run: TypeAlias = tuple[Execution, Target]


def read_plans(jobs: Sequence[tuple[Job, npt.NDArray[np.generic]]], *, executor: Executor | None = None) -> ReadStats:
    """Read plans into a buffer each; plans behind URLs share their round trips.

    Raises the errors of :func:`read_plan`.
    """
    wanted: list[_Wanted] = []
    are_remote, are_whole = False, trace.active is None
    for job, out in jobs:
        if out.shape != job.out_shape or not out.flags.c_contiguous or not out.flags.writeable:
            raise ConfigError(
                f"{job.plan.layout.name!r}: the buffer must be writable, C-contiguous and of shape {job.out_shape}, "
                f"not {out.shape}"
            )
        if job.bytes_wanted:
            execution = job.execution(out.dtype)
            wanted.append((execution, job, out))
            are_remote |= execution.is_remote
            are_whole &= execution.is_whole
    threads = 1 if executor is None else _num_threads(executor)  # counting processors takes 40 µs
    stats = _read_whole(wanted, threads) if are_whole else NO_READ
    runs: list[_Run] = []
    for execution, job, out in wanted[stats.num_reads :]:  # a failed one raises here
        runs.append((execution, execution.begin(out, job)))
    try:
        if runs:
            more = (_run_remote if are_remote else _run_local)(runs, executor, threads)
            stats = stats + more if stats.num_reads else more
    except CorruptDataError:
        _check_unchanged(wanted)  # that is the cause, and copying the file again would not help
        raise
    _check_unchanged(wanted)
    return stats


def _read_whole(wanted: Sequence[_Wanted], threads: int) -> ReadStats:
    """Do reads that each fill a buffer, until one fails or should be shared by threads."""
    # the layers of the general path would cost as much as reading 50 kB
    total, nbytes, began = sum([execution.cost for execution, _, _ in wanted]), 0, time.perf_counter_ns()
    is_shared = threads > 1 and total >= _MIN_PARALLEL
    if is_shared and total >= _MIN_AT_ONCE_RAW:
        return NO_READ
    tally, pace, read_at_once = Tally(), _Pace() if is_shared else None, files().read_at_once
    for execution, job, out in wanted:
        is_late = pace is not None and pace.is_slow(nbytes)
        if is_late or not read_at_once(job.paths[0], job.raw[0], out.reshape(-1).view(np.uint8)):
            break
        tally.num_reads += 1
        nbytes += execution.cost
    tally.fetched = tally.decoded = nbytes
    tally.mark(READ, began, nbytes)
    return tally.stats()


def _check_unchanged(read: Sequence[_Wanted]) -> None:
    """Raise SourceChangedError if files that were read differ from those opened."""
    checked = set()
    for execution, job, _ in read:
        key = id(job.source), job.paths or job.layout.name
        if not execution.is_remote and key not in checked:  # fields of one file check it once
            checked.add(key)
            job.source.check_unchanged(job.layout, job.paths)


def _run_remote(runs: Sequence[_Run], executor: Executor | None, threads: int) -> ReadStats:
    """Execute local reads, then those of URLs."""
    stats = _run_local([run for run in runs if not run[0].is_remote], executor, threads)
    remote = [(run, task) for run in runs if run[0].is_remote for task in run[0].tasks]
    if not remote:  # all chunks were absent
        return stats
    fetched = _Fetched(remote)
    try:
        return stats + _share(fetched.work, executor, min(threads, len(remote)))
    finally:
        fetched.close()


def _run_local(runs: list[_Run], executor: Executor | None, threads: int) -> ReadStats:
    num_tasks = len(runs[0][0].tasks) if len(runs) == 1 else sum([len(execution.tasks) for execution, _ in runs])
    if threads > 1 and num_tasks > 1:
        raw = sum([execution.cost for execution, _ in runs if execution.is_raw])
        total = sum([execution.cost for execution, _ in runs])
        at_once = total - raw >= _MIN_AT_ONCE or raw >= _MIN_AT_ONCE_RAW
        if total >= _MIN_PARALLEL and (at_once or num_tasks > 2):  # with two tasks, a woken thread would find none
            work = _Batches(_batches(runs, total / (_BATCHES_PER_THREAD * threads)), at_once=at_once)
            return _share(work.work, executor, threads if at_once else min(threads, -(-total // _MIN_PARALLEL)))
    tally = Tally()
    for execution, target in runs:
        execution.run(execution.tasks, target, tally)
    return tally.stats()


def _num_threads(executor: Executor) -> int:
    return int(getattr(executor, "_max_workers", 0) or os.cpu_count() or 1)


def _batches(runs: list[_Run], nbytes: float) -> list[tuple[_Run, list[Task], int]]:
    """Split tasks into batches of about ``nbytes``; neighbours on disk stay together."""
    batches = []
    for run in runs:
        tasks, first, cost = run[0].tasks, 0, 0
        for i, more in enumerate(run[0].costs):
            cost += more
            if cost >= nbytes or i + 1 == len(tasks):
                batches.append((run, tasks[first : i + 1], cost))
                first, cost = i + 1, 0
    return batches


#: Work shared by threads: each runs it until nothing is left; the first error ends it. It calls the given
#: function once, when other threads should help.
_Work: TypeAlias = Callable[[Callable[[], None] | None], ReadStats]


class _Batches:
    """Batches of tasks, taken by several threads in turn."""

    def __init__(self, batches: list[tuple[_Run, list[Task], int]], *, at_once: bool) -> None:
        self._batches = iter(batches)
        self._lock = threading.Lock()
        self._failed = False
        self._at_once = at_once

    def work(self, wake: Callable[[], None] | None) -> ReadStats:
        tally, done = Tally(), 0
        pace = None if self._at_once else _Pace()
        while not self._failed:
            if wake is not None and (pace is None or pace.is_slow(done)):
                wake()
                wake = None
            with self._lock:
                batch = next(self._batches, None)
            if batch is None:
                break
            (execution, target), tasks, cost = batch
            try:
                execution.run(tasks, target, tally)
            except BaseException:
                self._failed = True
                raise
            done += cost
        return tally.stats()


# only Linux counts by thread; elsewhere other threads' waits count too, and too many are woken
_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class _Pace:
    """This thread's speed since creation, without time spent waiting for a busy processor."""

    def __init__(self) -> None:
        self._began = time.perf_counter_ns()
        self._cpu = time.thread_time_ns()
        self._waits = resource.getrusage(_WHO).ru_nvcsw

    def is_slow(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` took long, in waiting for them or in processing."""
        due = _WAKE_NS + nbytes
        if time.perf_counter_ns() - self._began < due:
            return False
        waited = resource.getrusage(_WHO).ru_nvcsw > self._waits
        return waited or time.thread_time_ns() - self._cpu > due


class _Fetched:
    """Tasks whose bytes are fetched concurrently; threads decode whichever has arrived."""

    def __init__(self, tasks: list[tuple[_Run, Task]]) -> None:
        self._tasks = tasks
        self._fetches = Fetches([execution.range_of(task, target.places) for (execution, target), task in tasks])

    def work(self, wake: Callable[[], None] | None) -> ReadStats:
        if wake is not None:
            wake()
        tally = Tally()
        while (item := self._fetches.take()) is not None:
            number, data = item
            (execution, target), task = self._tasks[number]
            if isinstance(data, Came):  # counted by the task as one request for all of it
                tally.fetched += data.num_fetched - len(data.data)
                tally.num_reads += data.num_requests - 1
                data = data.data
            try:
                execution.run_fetched(task, data, target, tally)
            except BaseException:
                self.close()
                raise
            self._fetches.release(number)
        return tally.stats()

    def close(self) -> None:
        self._fetches.close()


def _share(work: _Work, executor: Executor | None, threads: int) -> ReadStats:
    """Share work between this thread and the executor's.

    This thread works too, and gives up helpers that never started once nothing is left: so a read from inside one of
    the executor's own threads cannot wait for itself.
    """
    helpers: list[Future[ReadStats]] = []

    def wake() -> None:
        if executor is not None:
            helpers.extend(executor.submit(work, None) for _ in range(threads - 1))

    error: BaseException | None = None
    stats = NO_READ
    try:
        stats += work(wake)
    except BaseException as e:
        error = e
    for helper in helpers:
        if helper.cancel():
            continue
        try:
            stats += helper.result()
        except BaseException as e:
            error = error or e
    if error is not None:
        raise error
    return stats
