"""What ranks that read together tell each other through the process group's store, and what they say when they end."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist

from scidata.device_mesh.board.processes import ProcessId, StepSeen
from scidata.errors import ConfigError, RankFailedError

_ANOTHER_SAYS_IT = 0.4  # s that a rank may take to tell in which step the one that it watches has died

Store: TypeAlias = Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that other ranks should know.

    Attributes
    ----------
    kind
        ``"failed"`` and ``"disagree"`` end the iteration of all ranks; so does ``"ahead"``, a read that has failed
        ahead of its use, if it comes to its use; ``"slow"`` does not.
    rank
        Whose it is.
    iteration, step
        When it is raised: step -1 is at once.
    text
        What happened.
    """

    kind: str
    rank: int
    iteration: int
    step: int
    text: str

    def error(self) -> Exception:
        """Return what to raise on the other ranks."""
        return ConfigError(self.text) if self.kind == "disagree" else RankFailedError(self.text, self.rank)


def post(store: Store, event: Event) -> None:
    """Tell all ranks."""
    number = store.add("events", 1) - 1
    store.set(f"event/{number}", json.dumps(vars(event)))


def failure(kind: str, rank: int, iteration: int, step: int, error: BaseException) -> Event:
    """Return the event of an error."""
    lines = traceback.format_exception_only(error)
    where = f"in step {step}" if step >= 0 else "outside of its loop"
    text = f"rank {rank} failed {where}: {' '.join(line.strip() for line in lines)}"
    return Event(kind=kind, rank=rank, iteration=iteration, step=step, text=text)


def died(rank: int, record: Mapping[str, Any], how: str, step: int | None = None) -> str:
    """Say that a rank has ended, or is silent, in a step; ``record`` is what it has last said of itself."""
    process = record["process"]
    # a loop takes many steps between two records; only a process of the same machine can see the last of them
    where = f"in step {record['at']} or soon after it" if step is None else f"in step {max(0, step)}"
    return (
        f"rank {rank} (process {process['pid']} on {process['host']}) {how}, {where}; see its own "
        "output, and the kernel's log: was it killed for memory?"
    )


def has_left(rank: int, iteration: int, step: int, finished: bool) -> Event:
    """Return the event of a process that ends without an error: whoever goes on will wait for it in vain."""
    if finished:
        text = f"rank {rank} has left: its script has ended after iteration {iteration} of the loader"
        return Event(kind="failed", rank=rank, iteration=iteration + 1, step=-1, text=text)
    text = f"rank {rank} has left: its script has ended, without an error, in step {step} of the loop"
    return Event(kind="failed", rank=rank, iteration=iteration, step=step + 1, text=text)


def ended_key(rank: int) -> str:
    """Return where, below a loader's name, the store has why a process has ended."""
    return f"ended/{rank}"


def is_served(store: Store) -> bool:
    """Whether a process keeps the store, and ends it with its own end; others lie in a file."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]


def is_reading(store: Store, rank: int) -> bool:
    """Whether a rank was last heard of in its loop, and has not said since that it knows of an end."""
    if not store.check([f"rank/{rank}"]):
        return False
    record = json.loads(store.get(f"rank/{rank}"))
    return record["state"] == "reading" and not store.check([f"knows/{record['iteration']}/{rank}"])


def events_of(store: Store, first: int = 0) -> Iterator[Event]:
    """Yield the events that were posted, from a number on."""
    while store.check([f"event/{first}"]):
        yield Event(**json.loads(store.get(f"event/{first}")))
        first += 1


class Others:
    """What can be found out about the other ranks of a loader, below whose name ``store`` is."""

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._records: dict[int, Mapping[str, Any]] = {}
        self._seen: dict[int, StepSeen] = {}

    def keep(self, rank: int, record: Mapping[str, Any]) -> None:
        """Remember what a rank has said, and have a look at its step as long as it lives, and after."""
        self._records[rank] = record
        if rank not in self._seen:
            self._seen[rank] = StepSeen(ProcessId(**record["process"]), record["shown"])

    def died(self, rank: int, record: Mapping[str, Any], how: str) -> str:
        """Say that a rank has ended, or is silent."""
        return died(rank, record, how, self._seen[rank].step() if rank in self._seen else None)

    def host(self) -> ProcessId | None:
        """Return the process of rank 0, which keeps the store where no launcher does; None where it is not known."""
        return ProcessId(**self._records[0]["process"]) if 0 in self._records else None

    def lost(self, iteration: int, detail: str) -> Event:
        """Return the event of a store that does not answer."""
        host = self.host()
        if host is not None and self.rank != 0 and host.has_ended():
            text = self.died(0, self._records[0], "has died, without a word")
        elif host is not None and self.rank != 0 and host.runs() is False:
            text = self.died(0, self._records[0], f"has given no sign of life {detail}: its process is stopped")
        else:
            text = (
                "the ranks' common store does not answer: the process that keeps it, rank 0 or torchrun's agent, has "
                f"probably died ({detail})"
            )
        return Event(kind="failed", rank=0, iteration=iteration, step=-1, text=text)

    def cause(self, store: Store, iteration: int, over: int, deadline: float) -> Event | None:
        """Return why a collective has failed: what another rank has said, or that its process has ended.

        ``over`` is the last iteration whose failures are the past. It may take a moment until anything can be seen.
        """
        suspected = 0.0
        try:
            while time.monotonic() < deadline:
                said = self._said(store, over)
                if said is not None:
                    return said
                found = self._dead(store, iteration)
                if found is not None:
                    suspected = suspected or time.monotonic()
                    if found.rank in self._seen or time.monotonic() - suspected > _ANOTHER_SAYS_IT:
                        post(store, found)
                        return found
                time.sleep(0.05)
        except (dist.DistError, RuntimeError) as e:
            return self.lost(iteration, type(e).__name__)
        return None

    def _said(self, store: Store, over: int) -> Event | None:
        for event in events_of(store):
            if event.kind in ("failed", "disagree") and event.rank != self.rank and event.iteration > over:
                return event
        return None

    def stopped(self, store: Store, iteration: int, when: str) -> Event | None:
        """Tell all ranks of one whose process is seen to be stopped now, and return that."""
        how = f"has given no sign of life {when}: its process is stopped"
        is_stopped = lambda process: process.runs() is False and not process.has_ended()  # noqa: E731
        found = self._first(store, iteration, is_stopped, how)
        if found is not None:
            post(store, found)
        return found

    def _dead(self, store: Store, iteration: int) -> Event | None:
        return self._first(store, iteration, ProcessId.has_ended, "has died, without a word")

    def _first(self, store: Store, iteration: int, is_so: Callable[[ProcessId], bool], how: str) -> Event | None:
        for rank in self.ranks:
            if rank == self.rank or not store.check([f"rank/{rank}"]) or store.check([ended_key(rank)]):
                continue
            record = json.loads(store.get(f"rank/{rank}"))
            process = ProcessId(**record["process"])
            if is_so(process):
                if not process.has_ended():
                    self.keep(rank, record)
                text = self.died(rank, record, how)
                return Event(kind="failed", rank=rank, iteration=iteration, step=-1, text=text)
        return None
