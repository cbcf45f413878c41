"""The store that the process group was started with, in which ranks leave words for each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")

Store: TypeAlias = Any


def common_store() -> Store:
    """Return the ranks' store, below a name of its own."""
    return dist.PrefixStore("scidata", dist.group.WORLD.get_group_store())  # type: ignore[attr-defined, union-attr]


def has_peers() -> bool:
    """Whether there are other ranks, and a store that they share."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() not in ("fake", "mpi")


def port_of(store: Store) -> int | None:
    """Return the port of the process that keeps the store, and ends it with its own end; None for one in a file."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store.port if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]


def call_with_timeout(seconds: float, ask: Callable[[], _T]) -> _T | None:
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
