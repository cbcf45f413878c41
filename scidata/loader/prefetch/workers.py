"""Processes that read and transform samples for the reader threads of a :class:`scidata.DataLoader`.

Each thread hands a sample's index to a process that has nothing to do, and waits for this rank's part, which comes in
shared memory. So order, buffers, copies and errors are the threads', as without processes.

Processes are spawned, never forked: a fork copies the locks of threads that hold them. One that is told to end does so
between two of Python's steps, when no piece of shared memory is between its making and its unlinking; one that finds
its parent gone ends too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import random
import signal
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from scidata.core import trace
from scidata.core.interrupts import ignore_interrupts, interrupts_held
from scidata.core.types import Array, BufferSpec
from scidata.data.adapter import DatasetAdapter
from scidata.device_mesh.torch_internals import set_worker_info, shared_storage
from scidata.errors import WorkerDiedError
from scidata.loader.prefetch.slots import HasArrays, Slot
from scidata.sources.access import retry as _retry

_POLL = 0.05  # s between two looks at whether the epoch is over
_END_SECONDS = 2.0  # for a process that ends
_END = signal.SIGRTMIN + 1  # tells a process to end; SIGTERM, which SLURM sends to all of a job, it ignores


class WorkerPool:
    """Processes that each hold a copy of the data set. Begins them; does not wait for them to be ready.

    - ``init_fn``, ``seed``: as torch's loader: ``init_fn(worker_id)`` is called in each process, whose seeds are ``seed
      + worker_id``.
    """

    def __init__(
        self,
        dataset: object,
        num_workers: int,
        context: SpawnContext | None,
        init_fn: Callable[[int], None] | None,
        seed: int,
    ) -> None:
        context = torch.multiprocessing.get_context("spawn") if context is None else context
        if context.get_start_method() == "forkserver":
            forkserver.ensure_running()  # begun with signals held, it would hold them from all that it ever forks
        self.closed = False
        self._processes: list[BaseProcess] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for number in range(num_workers):
                here, there = context.Pipe()
                arguments = (there, dataset, number, num_workers, seed + number, init_fn, _retry.RETRY)
                process = context.Process(target=_main, args=arguments, name=f"scidata-worker-{number}", daemon=True)
                with interrupts_held():
                    process.start()
                there.close()  # so that its end is the pipe's
                self._processes.append(process)
                self._idle.put(_Worker(here, process))
        except BaseException:
            self.end()
            raise

    def read(self, index: int, epoch: object, over: Callable[[], bool]) -> tuple[Any, object]:
        """Return this rank's part of a sample and the read's statistics. Called by as many threads as there are
        processes.

        Raises WorkerDiedError: the process has ended. Errors of reading are raised as they are, with the process's
        traceback as a note.
        """
        done = lambda: over() or self.closed  # noqa: E731
        worker = self._take(done)
        try:
            return worker.read(index, epoch, done)
        except WorkerDiedError:
            self.stop()
            raise
        finally:
            self._idle.put(worker)

    def _take(self, over: Callable[[], bool]) -> _Worker:
        while True:
            try:
                return self._idle.get(timeout=_POLL)
            except queue.Empty:
                if over():
                    raise _OverError from None

    def stop(self) -> None:
        """Stop the processes; takes no lock."""
        self.closed = True
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(process.pid, _END)

    def end(self) -> None:
        """End the processes, and wait for that."""
        self.stop()
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.is_alive():  # in a call that is not Python's
                process.kill()
            process.join()


class WorkerReader:
    """Reads samples of one epoch through a pool; its calls fill a slot, or buffers."""

    def __init__(self, pool: WorkerPool, epoch: object, *, keep: bool) -> None:
        self._pool, self._epoch, self._keep = pool, epoch, keep
        self._over = False

    def __call__(self, index: int, out: Slot | Mapping[str, Array]) -> object:
        """Fill a slot, or buffers; return the statistics of the read."""
        part, stats = self._pool.read(index, self._epoch, lambda: self._over)
        if isinstance(out, Slot):
            out.put(part)
        else:
            for name, array in out.items():
                np.copyto(array, part[name].numpy())
        return stats

    def stop(self) -> None:
        """Let waiting threads go, and the processes end if they are not kept; takes no lock."""
        self._over = True
        if not self._keep:
            self._pool.stop()

    def end(self) -> None:
        """Wait for the processes that were stopped."""
        if not self._keep:
            self._pool.end()


class _OverError(Exception):
    """The epoch is over, so the sample is not needed."""


class _Worker:
    def __init__(self, connection: Connection, process: BaseProcess) -> None:
        self._connection, self._process = connection, process
        self._number = 0

    def read(self, index: int, epoch: object, over: Callable[[], bool]) -> tuple[Any, object]:
        self._number += 1
        recorder, failed = trace.active, None
        try:
            self._connection.send((self._number, index, epoch, recorder is not None))
            while True:
                while not self._connection.poll(_POLL):
                    if over():
                        raise _OverError
                number, error, answer, events = self._connection.recv()
                if number == self._number:  # and not a sample of an epoch that was left
                    break
        except (EOFError, OSError) as e:
            # its frames hold a memoryview, which must not end up in a cycle: collected there, CPython complains
            failed = e.with_traceback(None)
        if failed is not None:
            if over():
                raise _OverError
            self._process.join(_END_SECONDS)
            raise WorkerDiedError(
                f"worker process {self._process.name} (pid {self._process.pid}) ended with code "
                f"{self._process.exitcode} while it read sample {index}; see what it printed. Where it never began: a "
                "script that uses workers='process' needs its main part below if __name__ == '__main__'"
            ) from failed
        if recorder is not None and events is not None:
            recorder.add_packed(events)
        if error is not None:
            raise error
        part, stats = answer
        return (part.with_arrays(part.arrays()) if isinstance(part, HasArrays) else part), stats  # NumPy's arrays


# -- in the process --------------------------------------------------------------------------------------------------


def _main(
    connection: Connection,
    dataset: object,
    number: int,
    num_workers: int,
    seed: int,
    init_fn: Callable[[int], None] | None,
    retry: _retry.Retry,
) -> None:
    _retry.set_retry(**vars(retry))
    ignore_interrupts()
    signal.signal(_END, lambda number, frame: os._exit(0))
    torch.set_num_threads(1)
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # as torch's workers do, for those who use it
    set_worker_info(dataset, number=number, num_workers=num_workers, seed=seed)
    source, failed = DatasetAdapter(dataset), None
    try:
        if init_fn is not None:
            init_fn(number)
    except Exception as e:  # raised by each read
        failed = _portable(e, number)
    try:
        while True:
            task, index, epoch, traced = connection.recv()
            answer, error = None, failed
            with trace.recorded_apart(index, wanted=traced) as recorder:
                if error is None:
                    try:
                        answer = _read(source, index, epoch)
                    except Exception as e:
                        error = _portable(e, number)
            connection.send((task, error, answer, None if recorder is None else recorder.packed()))
            del answer
    except (EOFError, OSError):  # the parent has gone
        pass


def _read(source: DatasetAdapter, index: int, epoch: object) -> tuple[Any, object]:
    if source.has_buffers:
        part = {name: _shared(spec) for name, spec in source.dataset.buffer_specs().items()}
        stats = source.filler(epoch)(index, {name: tensor.numpy() for name, tensor in part.items()})
        return part, stats
    part = source.reader(epoch)(index)
    stats = getattr(part, "stats", None)
    if isinstance(part, HasArrays):
        part = part.with_arrays({name: torch.from_numpy(array) for name, array in part.arrays().items()})
    return part, stats


def _shared(spec: BufferSpec) -> torch.Tensor:
    """Return a tensor allocated in shared memory, which saves a copy."""
    dtype = torch.from_numpy(np.empty(0, spec.dtype)).dtype
    storage = shared_storage(max(1, spec.nbytes))
    return torch.empty(0, dtype=dtype).set_(storage)[: spec.nbytes // dtype.itemsize].view(spec.shape)


def _portable(error: BaseException, number: int) -> BaseException:
    """Return an error that can be sent, with its traceback as a note."""
    note = f"in worker process {number}:\n{''.join(traceback.format_exception(error))}"
    try:
        sent: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    sent.add_note(note)
    return sent
