"""Functions on a few real ranks, and on one pretended rank of hundreds."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from scidata import _HOME
from scidata.device_mesh.torch_internals import DYNAMO, fake_store

# Imported once by the fork server, so that each rank starts in milliseconds; names that are not there are skipped.
_PRELOAD = ["torch", "torch.distributed.tensor", DYNAMO, "pytest", "scidata.testing.ranks", *set(_HOME.values())]
# These too, where the caller has them: ranks often run functions of the caller's own module. No import of them starts a
# thread, with which a fork would not be safe.
_PRELOAD_IF_LOADED = (
    "h5py", "hypothesis", "matplotlib.pyplot", "netCDF4", "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict", "torch.utils.tensorboard", "torch_geometric", "xarray", "zarr",
)  # fmt: skip
_GRACE = 3.0  # seconds the other ranks get to report too, after one has failed
_MARGIN = 5.0  # seconds between a rank ending itself at its timeout and the parent killing it


T = TypeVar("T")
Reference: TypeAlias = tuple[str, str, str]


class RankError(RuntimeError):
    """One or more ranks failed.

    - ``rank``: the rank whose failure was heard of first; the others often fail because of it.
    - ``failures``: each failed rank's traceback, as text, in the order in which they were heard of.
    """

    def __init__(self, failures: Mapping[int, str], num_ranks: int) -> None:
        self.failures = dict(failures)
        self.rank = next(iter(self.failures))
        parts = [f"rank {rank} of {num_ranks}: {text.rstrip()}" for rank, text in self.failures.items()]
        super().__init__("\n\n".join(parts))


def run_ranks(
    fn: Callable[..., T], num_ranks: int, *args: object, timeout: float = 60, backend: str | None = "gloo"
) -> list[T]:
    """Run ``fn(rank, num_ranks, *args)`` on that many processes with a process group, and return their results.

    The processes come from a fork server that has torch loaded, so the first call of a test session takes seconds and
    each later one a fraction of a second. Each has one torch thread, and the default group is there when ``fn`` starts
    and destroyed after it; inside, ``assert`` and ``pytest.raises`` work as usual.

    Parameters
    ----------
    fn : Callable[..., object]
        A function at the top level of a module; the module is imported by name, or else from its file, in each
        process. ``args`` and the results are pickled.
    timeout : float, default 60
        Seconds until every process is ended; a collective gives up after half of it, with a traceback.
    backend : str or None, default "gloo"
        Of the default process group; None leaves it to ``fn`` to start one.
    num_ranks : int
        Processes.
    *args : object
        Handed to ``fn``.

    Raises
    ------
    RankError
        With the traceback of every rank that raised, died or hung.

    Examples
    --------
    >>> def total(rank, num_ranks):  # doctest: +SKIP
    ...     x = torch.ones(())
    ...     torch.distributed.all_reduce(x)
    ...     return x.item()
    >>> scidata.testing.run_ranks(total, 3)  # doctest: +SKIP
    [3.0, 3.0, 3.0]
    """
    __tracebackhide__ = True  # pytest: the ranks' own tracebacks are what matters
    target = reference(fn)
    payload = pickle.dumps(args)
    context = fork_server()
    with tempfile.TemporaryDirectory(prefix="scidata-ranks-") as folder:
        processes, pipes = [], {}
        try:
            for rank in range(num_ranks):
                receive, send = context.Pipe(duplex=False)
                job = (send, folder, rank, num_ranks, backend, timeout, target, payload)
                process = context.Process(target=_rank_main, args=job, name=f"rank{rank}")
                process.start()
                send.close()  # so that the end of the process is the end of the pipe
                processes.append(process)
                pipes[receive] = rank
            results, failures = _collect(pipes, time.monotonic() + timeout + _MARGIN)
        finally:
            for process in processes:
                if process.is_alive():
                    process.join(0 if sys.exc_info()[0] else 1)
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()
        for rank, text in failures.items():
            if not text:
                failures[rank] = _post_mortem(folder, rank, processes[rank].exitcode)
    if failures:
        raise RankError(failures, num_ranks)
    return [results[rank] for rank in range(num_ranks)]


def fork_server() -> ForkServerContext:
    """Return the context whose processes come from the fork server of :func:`run_ranks`, which has torch loaded."""
    context = multiprocessing.get_context("forkserver")
    loaded = [name for name in _PRELOAD_IF_LOADED if name in sys.modules]
    if "xarray" in loaded:
        loaded.append("dask.array")  # xarray imports it with its first array: 0.25 s of each rank
    context.set_forkserver_preload([*_PRELOAD, *loaded])
    return context


def reference(fn: Callable[..., object]) -> Reference:
    """Return by which module, in which file, and which name other processes find a function."""
    name = getattr(fn, "__qualname__", "<locals>")
    if "<" in name:
        raise TypeError(f"{fn!r} cannot be found by other processes; use a function defined at the top of a module")
    return fn.__module__, os.path.abspath(inspect.getfile(fn)), name


def referenced(target: Reference) -> Callable[..., Any]:
    """Return the function of a :func:`reference`, in another process."""
    module, path, name = target
    found: Any = _load(module, path)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _collect(pipes: Mapping[Connection, int], deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait for one message a rank; "" stands for a rank that said nothing before it ended or time ran out."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(pipes)
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, ""
            if succeeded:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + _GRACE)
    if not failures:
        failures.update(dict.fromkeys(waiting.values(), ""))
    return results, failures


def _post_mortem(folder: str, rank: int, exit_code: int | None) -> str:
    with contextlib.suppress(OSError), open(os.path.join(folder, f"stack{rank}"), encoding="utf-8") as file:
        stack = file.read()
        if stack:
            return f"hung until the timeout, here:\n{stack}"
    return f"ended with exit code {exit_code} and said nothing"


def _load(module: str, path: str) -> ModuleType:
    """Import by name where that gives the same file, else from the file (pytest's importlib mode has no sys.path)."""
    if module in sys.modules:
        return sys.modules[module]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is not None and found.origin is not None and os.path.realpath(found.origin) == os.path.realpath(path):
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: cannot be imported as {module}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded  # before it runs: its own classes pickle by this name
    spec.loader.exec_module(loaded)
    return loaded


def _rank_main(
    pipe: Connection,
    folder: str,
    rank: int,
    num_ranks: int,
    backend: str | None,
    timeout: float,
    target: Reference,
    payload: bytes,
) -> None:
    gc.freeze()  # a collection would look at, and so copy, all that the fork server has loaded: 0.25 s of each rank
    stack = open(os.path.join(folder, f"stack{rank}"), "w", encoding="utf-8")  # noqa: SIM115 - faulthandler holds it
    faulthandler.dump_traceback_later(timeout, exit=True, file=stack)  # also where the parent has died
    torch.set_num_threads(1)
    try:
        fn = referenced(target)
        args = pickle.loads(payload)  # after the module is there: args may be made of its classes
        if backend is not None:
            store = dist.FileStore(os.path.join(folder, "store"), num_ranks)  # type: ignore[attr-defined]
            limit = datetime.timedelta(seconds=timeout / 2)
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
            dist.barrier()  # else a rank that is done may close a connection that another still sets up
        value = fn(rank, num_ranks, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        message = pickle.dumps((True, value))  # plain pickle copies tensors; the queues of torch would share memory
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(message)
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def fake_group(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Be ``rank`` of a default process group of ``num_ranks`` whose collectives do nothing.

    For checking metadata (meshes, bounds, plans) at sizes that no test machine has; values that were communicated
    are meaningless.

    Parameters
    ----------
    num_ranks : int
        Size of the group.
    rank : int, default 0
        This process's.

    Examples
    --------
    >>> from scidata.testing import fake_group
    >>> with fake_group(512, rank=5):
    ...     scidata.init_mesh(domain=512, device="cpu").get_rank()
    5
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
