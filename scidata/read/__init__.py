"""Run a plan into a preallocated buffer, on one thread or several. No decisions are left to make here."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata._files import is_url
from scidata.errors import ConfigError
from scidata.plan import ArrayPlan, plan_array
from scidata.read.context import ReadStats
from scidata.read.execute import Execution, Task
from scidata.types import Decoding, IntArray, Source

__all__ = ["ReadStats", "read_plan"]

#: Less work than this is done on the calling thread: waking another one costs 50-100 µs (measured).
_MIN_PARALLEL = 512 << 10
_BATCHES_PER_THREAD = 8


def read_plan(
    plan: ArrayPlan,
    out: npt.NDArray[Any],
    *,
    source: Source,
    decoding: Decoding | None = None,
    allow_missing: bool = False,
    executor: Executor | None = None,
) -> ReadStats:
    """Read what ``plan`` says into ``out``.

    Parameters
    ----------
    plan
        From :func:`scidata.plan.plan_array`. Places of chunks that it does not have are asked of ``source``.
    out
        ``plan.out_shape``, C-contiguous. Elements outside the plan's selection keep what they held. Its dtype is the
        decoded one, the stored one in native byte order, or any other that values are then cast to once.
    source
        The store that ``plan.layout`` came from.
    decoding
        CF decoding to apply; None gives raw values.
    allow_missing
        Read the fill value where a chunk is absent from the store.
    executor
        A ``ThreadPoolExecutor`` whose threads share the work with the calling one; None for this thread alone.

    Returns
    -------
    ReadStats
        ``bytes_fetched`` equals the plan's where that is exact, or is less: of large Blosc chunks only the blocks
        wanted are read.

    Raises
    ------
    MissingChunkError, ShortReadError, ChecksumError, CorruptDataError
        The store, the field and the chunk are named.
    UnsupportedFormatError
        A codec that needs the format's own library.
    ConfigError
        ``out`` does not fit the plan.
    """
    if out.shape != plan.out_shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise ConfigError(
            f"{plan.layout.name!r}: the buffer must be writable, C-contiguous and of shape {plan.out_shape}, "
            f"not {out.shape}"
        )
    if plan.refs is None and not plan.layout.fallback:
        refs = source.locate(plan.layout, plan.chunks)
        plan = plan_array(plan.layout, plan.selection, refs, out_shape=plan.out_shape)
    if plan.bytes_wanted == 0:
        return ReadStats()
    execution = Execution(plan, out, source=source, decoding=decoding)
    execution.prepare(allow_missing=allow_missing)
    tasks, costs = execution.tasks()
    remote = plan.refs is not None and any(map(is_url, plan.refs.paths))
    threads = 1 if executor is None else _num_threads(executor)  # counting processors takes 40 µs
    small = len(tasks) < 2 or (not remote and int(costs.sum()) < _MIN_PARALLEL)
    if executor is None or threads < 2 or small:
        return execution.run(tasks)
    return _run_shared(execution, _batches(tasks, costs, threads), executor, threads)


def _num_threads(executor: Executor) -> int:
    return int(getattr(executor, "_max_workers", 0) or os.cpu_count() or 1)


def _batches(tasks: list[Task], costs: IntArray, threads: int) -> list[list[Task]]:
    """Split the tasks into runs of about equal cost: neighbours on disk stay together."""
    total = np.cumsum(costs)
    targets = total[-1] * np.arange(1, _BATCHES_PER_THREAD * threads) / (_BATCHES_PER_THREAD * threads)
    cuts = np.unique(np.concatenate([[0], np.searchsorted(total, targets, side="right"), [len(tasks)]])).tolist()
    return [tasks[a:b] for a, b in itertools.pairwise(cuts)]


class _Shared:
    """Batches that several threads take in turn; the first error ends them all."""

    def __init__(self, execution: Execution, batches: list[list[Task]]) -> None:
        self._execution = execution
        self._batches = iter(batches)
        self._lock = threading.Lock()
        self._failed = False

    def work(self) -> ReadStats:
        stats = ReadStats()
        while not self._failed:
            with self._lock:
                batch = next(self._batches, None)
            if batch is None:
                break
            try:
                stats += self._execution.run(batch)
            except BaseException:
                self._failed = True
                raise
        return stats


def _run_shared(execution: Execution, batches: list[list[Task]], executor: Executor, threads: int) -> ReadStats:
    """Share the batches between the executor's threads and this one.

    This thread works too, and gives up helpers that never started once nothing is left: so a read from inside one of
    the executor's own threads cannot wait for itself.
    """
    shared = _Shared(execution, batches)
    helpers: list[Future[ReadStats]] = [executor.submit(shared.work) for _ in range(min(threads, len(batches)) - 1)]
    error: BaseException | None = None
    stats = ReadStats()
    try:
        stats += shared.work()
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
