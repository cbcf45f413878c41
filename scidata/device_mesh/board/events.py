"""What ranks post on the board, what they say of themselves, and what can be found out about the others."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from scidata.device_mesh.board.processes import ProcessId, StepSeen
from scidata.device_mesh.board.store import Store
from scidata.errors import ConfigError, RankFailedError

_ANOTHER_SAYS_IT = 0.4  # s that a rank may take to tell in which step the one that it watches has died
ANYWHERE = "*"  # in place of a loader: whatever loop a rank is in


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that other ranks should know.

    Attributes
    ----------
    kind
        ``"failed"`` and ``"disagree"`` end the loop of all ranks; so does ``"ahead"``, a read that has failed ahead of
        its use, if it comes to its use; ``"slow"`` does not. ``"left"``: the script has ended without an error.
        ``"met"``: an operation has raised; it matters where others wait for that rank.
    rank
        Whose it is.
    text
        What happened.
    places
        By the name of a loader: iteration and step at which its loop raises it; step -1 is at once.
    is_last
        Whether the rank's process has ended, or does not run.
    started
        How many collectives the rank had begun in each process group.
    number
        In the row of events.
    """

    kind: str
    rank: int
    text: str
    places: Mapping[str, Sequence[int]] = field(default_factory=dict)
    is_last: bool = False
    started: Mapping[str, int] = field(default_factory=dict)
    number: int = -1

    def error(self) -> Exception:
        """Return what to raise on the other ranks."""
        return ConfigError(self.text) if self.kind == "disagree" else RankFailedError(self.text, self.rank)

    def is_due(self, loader: str, iteration: int, step: int, over: int) -> bool:
        """Whether a loop raises it at a step; ``over`` is the loader's last iteration that has failed here."""
        if loader not in self.places:
            return ANYWHERE in self.places
        found = tuple(self.places[loader])
        if found[0] <= over or (self.kind == "ahead" and found[0] != iteration):
            return False  # others may report the failure of an iteration later
        return found <= (iteration, step)


def post(store: Store, event: Event) -> Event:
    """Tell all ranks; return the event with its number."""
    event = replace(event, number=store.add("events", 1) - 1)
    store.set(f"event/{event.number}", json.dumps(vars(event)))
    return event


def events_of(store: Store, first: int = 0) -> Iterator[Event]:
    """Yield the events that were posted, from a number on."""
    while store.check([f"event/{first}"]):
        yield Event(**json.loads(store.get(f"event/{first}")))
        first += 1


def in_words(error: BaseException) -> str:
    """Return an error in one line."""
    return " ".join(line.strip() for line in traceback.format_exception_only(error))


# -- what ranks say of themselves ------------------------------------------------------------------------------------

#: Of each loop of a rank, by its loader's name: iteration, step, and "reading", "done" or "left" in the middle.
Loops = Mapping[str, Sequence[Any]]


def _latest(loops: Loops) -> Sequence[Any]:
    return list(loops.values())[-1] if loops else (0, -1, "")


def failed(rank: int, loops: Loops, error: BaseException) -> Event:
    """Return the event of a process that ends with an error."""
    _, step, state = _latest(loops)
    where = f" in step {step}" if state == "left" else " outside of its loop" if loops else ""
    places = {name: (iteration, at if state == "left" else -1) for name, (iteration, at, state) in loops.items()}
    text = f"rank {rank} failed{where}: {in_words(error)}"
    return Event(kind="failed", rank=rank, text=text, places=places or {ANYWHERE: (0, -1)}, is_last=True)


def left(rank: int, loops: Loops, last_error: str | None) -> Event:
    """Return the event of a process that ends without an error: whoever goes on may wait for it in vain."""
    iteration, step, state = _latest(loops)
    how = f"after iteration {iteration} of the loader"
    if state != "done":
        how = f"without an error, in step {step} of the loop" if loops else "without an error"
    text = f"rank {rank} has left: its script has ended{',' if state != 'done' else ''} {how}"
    if last_error is not None:
        text = f"rank {rank} has ended; the last error that it met was {last_error}"
    places = {name: (i + 1, -1) if state == "done" else (i, at + 1) for name, (i, at, state) in loops.items()}
    return Event(kind="left", rank=rank, text=text, places=places, is_last=True)


def _places_of_dead(loops: Loops) -> Mapping[str, Sequence[int]]:
    # all may have left a loop where it did; nobody may need it after its last one
    found = {name: (i, at + 1 if state == "left" else -1) for name, (i, at, state) in loops.items() if state != "done"}
    return found if loops else {ANYWHERE: (0, -1)}


# -- what can be found out about others ------------------------------------------------------------------------------


class PeerState:
    """What can be found out about the other ranks; below ``store`` each has ``process/<r>`` and ``beat/<r>``."""

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._seen: dict[int, StepSeen] = {}
        self._processes: dict[int, ProcessId] = {}

    def process(self, rank: int, store: Store | None = None) -> ProcessId | None:
        """Return a rank's process, where it is known; ask the store where one is given."""
        if rank not in self._processes and store is not None and store.check([f"process/{rank}"]):
            record = json.loads(store.get(f"process/{rank}"))
            found = self._processes[rank] = ProcessId(**record["process"])
            if not found.has_ended():  # its step can be seen as long as it lives, and after
                self._seen[rank] = StepSeen(found, record["shown"])
        return self._processes.get(rank)

    def dead(self, rank: int, loops: Loops, how: str) -> Event:
        """Return the event of a rank that has ended, or is silent; it has last said that it was in these loops."""
        process, at = self._processes[rank], _latest(loops)[1]
        seen = self._seen[rank].step() if rank in self._seen else None
        # a loop takes many steps between two beats; only a process of the same machine can see the last of them
        where = f", in step {at} or soon after it" if seen is None else f", in step {seen}"
        where = where if (at if seen is None else seen) >= 0 else ""
        text = (
            f"rank {rank} (process {process.pid} on {process.host}) {how}{where}; see its own output, and the "
            "kernel's log: was it killed for memory?"
        )
        return Event(kind="failed", rank=rank, text=text, places=_places_of_dead(loops), is_last=True)

    def lost(self, detail: str) -> Event:
        """Return the event of a store that does not answer."""
        host, how = (self.process(0) if self.rank else None), ""
        if host is not None and host.has_ended():
            how = "has died, without a word"
        elif host is not None and host.runs() is False:
            how = f"has given no sign of life {detail}: its process is stopped"
        if how:
            return Event(**vars(self.dead(0, {}, how)) | {"places": {ANYWHERE: (0, -1)}})
        text = (
            "the ranks' common store does not answer: the process that keeps it, rank 0 or torchrun's agent, has "
            f"probably died ({detail})"
        )
        return Event(kind="failed", rank=0, text=text, places={ANYWHERE: (0, -1)}, is_last=True)

    def cause(self, store: Store, is_cause: Callable[[Event], bool], deadline: float) -> Event | None:
        """Return why a collective has failed: what another rank has said, or that its process has ended.

        It may take a moment until anything can be seen.
        """
        suspected = 0.0
        try:
            while time.monotonic() < deadline:
                said = next((event for event in events_of(store) if is_cause(event)), None)
                if said is not None:
                    return said
                found = self._first(store, ProcessId.has_ended, "has died, without a word")
                if found is not None:
                    suspected = suspected or time.monotonic()
                    if found.rank in self._seen or time.monotonic() - suspected > _ANOTHER_SAYS_IT:
                        return post(store, found)
                elif (stopped := self.stopped(store, "when a collective failed")) is not None:
                    return stopped
                time.sleep(0.05)
        except (dist.DistError, RuntimeError) as e:
            return self.lost(type(e).__name__)
        return None

    def stopped(self, store: Store, when: str) -> Event | None:
        """Tell all ranks of one whose process is seen to be stopped now, and return that."""
        how = f"has given no sign of life {when}: its process is stopped"
        found = self._first(store, lambda process: process.runs() is False and not process.has_ended(), how)
        return None if found is None else post(store, found)

    def _first(self, store: Store, is_so: Callable[[ProcessId], bool], how: str) -> Event | None:
        for rank in self.ranks:
            process = None if rank == self.rank else self.process(rank, store)
            if process is not None and is_so(process) and not store.check([f"ended/{rank}"]):
                return self.dead(rank, self.loops(store, rank), how)
        return None

    def loops(self, store: Store, rank: int) -> Loops:
        """Return the loops that a rank has last said to be in."""
        return json.loads(store.get(f"beat/{rank}"))["loops"] if store.check([f"beat/{rank}"]) else {}
