"""Values that ranks post for each other in the store that the process group was started with.

This module alone talks to torch's store: it owns keys, encodings, waits and votes. Its users (the board, the agreement
and the ballot of loaders, the writer's ranks, the notes of samples) name the values that they post and await.

A vote of three ranks, of which rank 1 has found something::

    rank 0: vote("step/5", 3)            None            wait(["step/5/result"]) ... read("step/5/result")
    rank 1: vote("step/5", 3, "bad")     None            wait(["step/5/result"]) ... read("step/5/result")
    rank 2: vote("step/5", 3)            ["bad"]         post("step/5/result", ...)

Each rank sends a message or two, whatever the number of ranks. Whoever votes last learns all findings, and decides.

Keys of an earlier run, or of process groups that were destroyed, stay in the store. So each user has a prefix with a
number that all of its ranks count alike: ``board<n>`` of a process group, and in it ``loader<n>`` and ``writer<n>``.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")
#: Seconds between two questions of a wait: in the beginning, and in the end; pauses grow from one to the other.
_PAUSES = 0.001, 0.02
_RANKS_A_POLL = 64
_ABSENT = "-"  # no JSON
_FOR_EVER = datetime.timedelta(days=24)  # torch counts milliseconds in 32 bits; it prints two lines where a wait ends


class Postings:
    """Values by key below one prefix of torch's store, as JSON.

    ``store``: one of torch's stores, which torch exports no type of.
    """

    def __init__(self, store: Any, prefix: str = "") -> None:
        self._store: Any = dist.PrefixStore(prefix, store) if prefix else store  # type: ignore[attr-defined]

    def below(self, prefix: str) -> Postings:
        """Return the postings under a longer prefix, over the same connection."""
        return Postings(self._store, prefix)

    def connect(self) -> Postings:
        """Return the same postings over a new connection."""
        return Postings(self._store.clone())

    def post(self, key: str, value: object = "") -> None:
        """Post a value, in place of an earlier one."""
        self._store.set(key, json.dumps(value))

    def has(self, *keys: str) -> bool:
        """Whether all of the keys have values."""
        return bool(self._store.check(list(keys)))

    def read(self, key: str) -> Any:
        """Return a value that exists."""
        # one message; torch's get() needs two and waits for a missing value
        return json.loads(self._store.compare_set(key, _ABSENT, _ABSENT))

    def read_all(self, keys: Sequence[str]) -> list[Any]:
        """Return values that are known to be there; one message to the store."""
        return [json.loads(value) for value in self._store.multi_get(list(keys))]

    def find(self, key: str) -> Any:
        """Return a value, or None if it was not posted; one message to the store."""
        found = self._store.compare_set(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else json.loads(found)

    def claim(self, key: str, value: str) -> str:
        """Post a value unless the key has one; return the key's value."""
        return json.loads(self._store.compare_set(key, "", json.dumps(value)))

    def count(self, key: str, more: int = 1) -> int:
        """Add to a counter, which begins with 0, and return it."""
        return int(self._store.add(key, more))

    def remove(self, *keys: str) -> None:
        """Remove values and counters."""
        for key in keys:
            self._store.delete_key(key)

    @property
    def port(self) -> int | None:
        """The port of the process that keeps the store, and ends it with its own end; None for a store in a file."""
        store = self._store
        while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
            store = store.underlying_store
        return store.port if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]

    @property
    def timeout(self) -> float:
        """Seconds that torch waits for a value."""
        return float(self._store.timeout.total_seconds())

    # -- rows --------------------------------------------------------------------------------------------------------

    def append(self, row: str, value: object) -> int:
        """Add a value to a row that only grows; return its number, from 0."""
        number = self.count(row) - 1
        self.post(f"{row}/{number}", value)
        return number

    def entries(self, row: str, first: int = 0) -> Iterator[Any]:
        """Yield the values of a row from a number on; stop at the first missing value."""
        keys = [f"{row}/{number}" for number in range(first, self.count(row, 0))]
        if len(keys) > 1 and self.has(*keys):  # all at once: when a job ends, every rank posts something
            yield from self.read_all(keys)
            return
        for key in keys:
            if (value := self.find(key)) is None:
                return
            yield value

    def wait_for_entry(self, row: str, number: int) -> None:
        """Wait at the store until a row has a value under a number, over a connection of its own."""
        self._store.wait([f"{row}/{number}"], _FOR_EVER)

    # -- waiting, and voting -----------------------------------------------------------------------------------------

    def wait(
        self, keys: Iterable[str], *, seconds: float = float("inf"), look: Callable[[float], object] | None = None,
        pauses: tuple[float, float] = _PAUSES, num_ranks: int = 1,
    ) -> bool:  # fmt: skip
        """Wait until all keys have values; return False if some have none after ``seconds``.

        ``look``: called with the seconds waited so far, between two questions; may raise, to end the wait.
        ``pauses``: seconds between two questions, in the beginning and in the end.
        ``num_ranks``: how many wait alike: many ask less often, as one process answers them all.
        """
        wanted, pause, began = list(keys), pauses[0], time.monotonic()
        longest = pauses[1] * max(1.0, num_ranks / _RANKS_A_POLL)
        while not self.has(*wanted):
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            if look is not None:
                look(waited)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def vote(self, key: str, num_voters: int, finding: object = None, *, most: int | None = None) -> list[Any] | None:
        """Vote once, with or without a finding; return all findings to the last voter, None to the others."""
        if finding is not None:
            self.append(f"{key}/found", finding)
        if self.count(f"{key}/votes") != num_voters:
            return None
        found = self.count(f"{key}/found", 0)
        return [self.read(f"{key}/found/{number}") for number in range(found if most is None else min(found, most))]

    def remove_vote(self, key: str) -> None:
        """Remove a vote and its result, which all voters have read."""
        self.remove(f"{key}/votes", f"{key}/found", f"{key}/result")


def common_postings() -> Postings:
    """Return the values that all ranks of the process group share, over the group's own connection."""
    return Postings(dist.group.WORLD.get_group_store(), "scidata")  # type: ignore[union-attr]


def has_peers() -> bool:
    """Whether there are other ranks with a common store."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() not in ("fake", "mpi")


def call_with_timeout(seconds: float, ask: Callable[[], _T]) -> _T | None:
    """Return the result of a call to the store; None if it does not answer in time.

    torch's client waits for ever for a server that is stopped, and holds the connection meanwhile.
    """
    answers: list[_T] = []

    def run() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, name="scidata-ask", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
