"""Every private name of torch that process groups and loaders use; each says why no public one serves.

Tried with torch 2.13 and 2.15. ``tests/unit/shard/test_torch_internals.py`` tests each. Those of tensors are in
:mod:`scidata.shard.torch_internals`. Nothing here changes the process; :mod:`scidata.device_mesh.groups` does.
"""

from __future__ import annotations

import contextlib
import logging
import os
from _thread import RLock as RLock  # threading has a function of Python
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd import profiler

# -- process groups ----------------------------------------------------------------------------------------------------


#: The description of groups for nothing but rows that some ranks send to others.
ROWS = "scidata rows"


def process_groups() -> list[Any]:
    """Return all process groups of this process, also those made by meshes and others; torch has no public list."""
    return list(dist.distributed_c10d._world.pg_map)


def num_started(other: int | None = None) -> dict[str, int]:
    """Return how many collectives this rank has begun in each group of several ranks, from torch's private counter.

    Only in those that another rank is in, where one is given: groups of other ranks may have the same name. Without
    those for :data:`ROWS`, whose numbers differ, since gloo counts each send and receive. Costs 0.2 µs a group.
    """
    return {
        group.group_name: number - _surplus.get(group, 0)
        for group in process_groups()
        if group.size() > 1
        and group.group_desc != ROWS
        and (other is None or other in dist.get_process_group_ranks(group))
        and (number := _number_of(group)) is not None
    }


def _number_of(group: Any) -> int | None:
    try:
        number: int = group._get_sequence_number_for_group()
    except RuntimeError:  # torch asks its own backends alone
        return None
    return number


#: Sends and receives of scidata's exchanges in a group, but one for each exchange.
_surplus: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def count_as_one(group: Any, num: int) -> None:
    """Count the next sends and receives as one collective, since other ranks have other numbers of them."""
    _surplus[group] = _surplus.get(group, 0) + num - 1


def timeout_of(group: Any) -> Any:
    """Return a group's timeout; only the function that begins a group knows it."""
    return max(group._get_backend(device).options._timeout for device in group._device_types)


def set_timeout(group: Any, timeout: Any) -> None:
    """Set a group's timeout: torch gives groups of a mesh 30 minutes, whatever the first group has.

    ``_set_pg_timeout`` knows NCCL and gloo alone.
    """
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # of a backend that has none
            group._get_backend(device)._set_default_timeout(timeout)


def backend_of(group: Any, kind: str) -> Any:
    """Return the backend of a group for a kind of device; ``get_backend`` came with 2.15."""
    return group._get_backend(torch.device(kind))


def bind(group: Any, device: torch.device) -> None:
    """Set a group's device, as ``init_process_group(device_id=)`` does."""
    group.bound_device_id = device
    if (backend := backend_of(group, device.type)).supports_splitting:
        backend.eager_connect_single_device(device)


def abort_together(backends: list[Any]) -> None:
    """Abort backends of accelerators, NCCL's as one: else they may wait for each other (pytorch/pytorch#119797).

    ``ProcessGroup.abort`` is public, and aborts one group.
    """
    joined = hasattr(backends[0], "_group_start")
    if joined:
        backends[0]._group_start()
    for backend in backends:
        with contextlib.suppress(RuntimeError):  # of one that cannot
            backend.abort()
    if joined:
        backends[0]._group_end()


def collectives_logger() -> logging.Logger | None:
    """Return the logger that torch tells of each error of a collective, inside its handler, in the calling thread.

    There is no public hook for that; None if torch has no such logger.
    """
    return getattr(dist.c10d_logger, "_c10d_logger", None)


_TORCH = os.path.dirname(torch.__file__)
#: Files of torch in which a thread is while it waits in a collective, to be held against the names of its frames.
COLLECTIVES = (os.path.join(_TORCH, "distributed", ""), os.path.join(_TORCH, "_ops.py"))
#: Those where Python code runs before a collective's error reaches the user's frames.
HANDLERS_OF_ERRORS = (
    os.path.join(_TORCH, "distributed", "distributed_c10d.py"),
    os.path.join(_TORCH, "distributed", "c10d_logger.py"),
    os.path.join(_TORCH, "autograd", "graph.py"),
)


# -- profilers ---------------------------------------------------------------------------------------------------------


#: Whether torch's profiler, NVTX or ITT is on, as its optimizers ask; costs no call of Python.
is_profiled: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled")


def named(name: str) -> AbstractContextManager[object]:
    """Return a profiler range ``scidata::NAME``; without a profiler a new lock, the cheapest context manager."""
    return profiler.record_function(f"scidata::{name}") if is_profiled() else RLock()


# -- loaders -----------------------------------------------------------------------------------------------------------


def set_worker_info(dataset: Any, *, number: int, num_workers: int, seed: int) -> None:
    """Make ``torch.utils.data.get_worker_info()`` answer in this process, as in torch's own workers."""
    from torch.utils.data._utils import worker

    worker._worker_info = worker.WorkerInfo(id=number, num_workers=num_workers, seed=seed, dataset=dataset)


def shared_storage(nbytes: int) -> torch.UntypedStorage:
    """Return uninitialised shared memory, as torch's workers make it; ``share_memory_()`` copies the values."""
    return torch.UntypedStorage._new_shared(nbytes, device="cpu")  # type: ignore[no-untyped-call]


def fake_store() -> Any:
    """Return the store of the ``"fake"`` backend, whose collectives do nothing; it is part of torch's tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


#: Imported by optimizers, DDP and FSDP once they are built; no public module imports it earlier.
DYNAMO = "torch._dynamo"
