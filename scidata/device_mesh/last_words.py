"""Why a rank has ended, for those whose collectives fail for it, where no loader watches (``loader/peers/watch.py``).

A process that ends writes there why, under ``scidata/last_words/<rank>`` in the store that the process group was
started with: the error that nobody caught, or the last that an operation on shards met (launchers catch it). A rank
whose collective fails looks there, for a second, before it raises torch's word.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from scidata.device_mesh import groups
from scidata.errors import RankFailedError

_T = TypeVar("_T")

_SECONDS = 1.0  # for another rank's words to come, and for the others to read those of the rank that keeps the store
_LOOK = 0.05
_latest: list[str] = []  # the error that an operation has met last


def common_store() -> Any:
    """Return the ranks' store, below a name of its own."""
    return dist.PrefixStore("scidata", dist.group.WORLD.get_group_store())  # type: ignore[attr-defined, union-attr]


def within(seconds: float, ask: Callable[[], _T]) -> _T | None:
    """Return what a conversation with the common store gives; None where nobody answers in time.

    The client waits for ever for a server that is stopped, and holds the connection meanwhile.
    """
    answers: list[_T] = []

    def run() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, name="scidata-ask", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def met(error: BaseException) -> None:
    """Remember the latest error of an operation."""
    _latest[:] = [] if isinstance(error, RankFailedError) else [_in_words(error)]


def _in_words(error: BaseException) -> str:
    return " ".join(line.strip() for line in traceback.format_exception_only(error))


def leave_and_ask() -> None:
    """Have this process say why it ends, and ask the others where a collective fails. Once a process is enough."""
    groups.end_well()
    atexit.register(_leave, os.getpid())  # runs before groups are destroyed: it is registered after that
    groups.add_explainer(_reason)


def _leave(process: int) -> None:
    error = groups.uncaught()
    if os.getpid() != process or isinstance(error, RankFailedError) or not _has_peers():
        return
    if error is not None:
        words = f"failed: {_in_words(error)}"
    elif _latest:
        words = f"has ended; the last error that it met was {_latest[0]}"
    else:
        return
    store, rank = common_store(), dist.get_rank()
    within(_SECONDS, lambda: store.set(f"last_words/{rank}", f"rank {rank} {words}"))
    if rank == 0 and error is not None:  # it may keep the store: the others ask as soon as connections are broken
        groups.break_groups()
        time.sleep(_SECONDS / 2)


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() not in ("fake", "mpi")


def _reason() -> Exception | None:
    return within(2 * _SECONDS, _asked) if _has_peers() else None


def _asked() -> Exception | None:
    store, deadline = common_store(), time.monotonic() + _SECONDS
    others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    while time.monotonic() < deadline:
        for rank in others:
            if store.check([f"last_words/{rank}"]):
                return RankFailedError(store.get(f"last_words/{rank}").decode(), rank)
        time.sleep(_LOOK)
    return None
