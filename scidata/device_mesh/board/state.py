"""The knowledge of one process about the other ranks, and its posts: the part of a board that needs no thread."""

from __future__ import annotations

import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scidata.device_mesh.board.events import Event, Place, in_words, post
from scidata.device_mesh.board.peers import PeerState
from scidata.device_mesh.board.processes import ProcessId, StepShown
from scidata.device_mesh.board.store import Postings
from scidata.device_mesh.torch_internals import num_started

_ALIKE_SECONDS = 10.0  # between errors of one kind that ranks have met together
_NUM_LOOPS = 8  # whose places are remembered


class Loop(Protocol):
    """A loop over a loader that is under way."""

    name: str
    thread: int
    timeout: float

    @property
    def place(self) -> Place:
        """Where the loop is."""

    def tick(self) -> None:
        """Talk to the other ranks. Called by the board's thread, several times a second."""

    def alarm(self) -> Event | None:
        """Have the loop raise the event that is due, if there is one; return it, as the loop may not come to that."""

    def end(self) -> None:
        """End as a loop does that is left."""


@dataclass
class RecordedError:
    """An error of an operation, and how many collectives the rank had begun in each group by then.

    ``held`` returns None once the error is gone: one that the script has caught, and is done with, holds up nobody.
    """

    words: str
    started: dict[str, int]
    time: float
    held: Callable[[], object]
    event: Event | None = None

    @classmethod
    def of(cls, error: BaseException) -> RecordedError:
        """Record an error that has just been raised."""
        held = vars(error)["_scidata_held"] = set[None]()  # errors of Python's own have no weak references
        return cls(in_words(error), num_started(), time.monotonic(), weakref.ref(held))

    def holds_up(self) -> bool:
        """Whether others may wait for this rank: it has begun no collective since, and still has the error."""
        return self.started == num_started() and self.held() is not None


class BoardState:
    """The knowledge of one process about the other ranks, and its posts.

    Parameters
    ----------
    base
        The values of the board, over the process group's own connection; the board's thread gets another one.
    rank, ranks
        This one, and all of them.
    host
        The rank whose process keeps the store; None where none of them does.

    Attributes
    ----------
    events
        Events of other ranks; none is forgotten, since it may be the reason of a later failure.
    over
        By a loader's name, its last iteration that an error has ended here.
    told
        The event that this rank has posted of an error of its own that has ended a loop.
    last_error
        The latest error of an operation on this rank.
    loops, places
        The loops that are under way; by loader, where its last one is or has ended.
    thread
        The thread that is looked after while no loop is under way.
    is_lost, is_alone
        Whether the store does not answer; whether the process that keeps it has ended, with a word.
    """

    def __init__(self, base: Postings, rank: int, ranks: Sequence[int], host: int | None) -> None:
        self.base, self.posts = base, base.connect()
        self.rank, self.ranks, self.host = rank, ranks, host
        self.peers = PeerState(rank, ranks)
        self.thread, self.timeout = 0, 0.0
        self.shown = StepShown()
        self.shown.show(-1)
        self.events: list[Event] = []
        self.over: dict[str, int] = {}
        self.told: Event | None = None
        self.last_error: RecordedError | None = None
        self.loops: list[Loop] = []
        self.places: dict[str, Place] = {}
        self.is_lost = self.is_alone = False
        self._names: Counter[str] = Counter()

    @property
    def is_answered(self) -> bool:
        """Whether the store may still answer; torch prints a backtrace of its own where it is asked and does not."""
        host = self.host_process()
        return not self.is_lost and not self.is_alone and (host is None or host.runs() is not False)

    def host_process(self) -> ProcessId | None:
        """Return the process that keeps the store, if it is a rank's, and known."""
        return None if self.host is None else self.peers.process(self.host)

    def name_for(self, kind: str, ranks: Sequence[int]) -> str:
        """Return a prefix for one more loader, or writer, of some ranks: the same on all, as they count alike."""
        of = "" if len(ranks) == len(self.ranks) else f"of{zlib.crc32(repr(list(ranks)).encode()):08x}"
        self._names[kind + of] += 1
        return f"{kind}{self._names[kind + of]}{of}"

    def remember(self, loop: Loop) -> None:
        """Keep the place of a loop, also after its end."""
        self.places[loop.name] = loop.place
        while len(self.places) > _NUM_LOOPS:
            del self.places[next(iter(self.places))]

    def post(self, event: Event) -> Event:
        """Post an event now, if anybody can read it; return it with its number. By the board's thread."""
        return event if self.is_alone or self.is_lost else post(self.posts, event)

    def knows(self, event: Event) -> None:
        """Say that this rank has heard of an event, and can do without the rank that has posted it."""
        if event.number >= 0 and not self.is_lost and (not self.is_alone or event.rank == self.host):
            self.posts.post(f"knows/{event.number}/{self.rank}")

    def waits_for(self, event: Event) -> bool:
        """Whether this rank has begun a collective that the event's rank had not come to."""
        own, words = self.last_error, event.text.partition(": ")[2]
        is_alike = own is not None and own.words.partition(":")[0] == words.partition(":")[0]
        if event.kind == "met" and own is not None and is_alike and time.monotonic() - own.time <= _ALIKE_SECONDS:
            return False  # all ranks meet it
        started = num_started(event.rank)
        return any(started.get(name, 0) > number for name, number in event.started.items())

    def is_cause(self, event: Event) -> bool:
        """Whether an event may be the reason of a collective's failure."""
        if event.rank == self.rank or event.kind not in ("failed", "disagree", "left"):
            return False
        if event.kind == "left":  # one that has destroyed its groups cannot say how far it has come
            return self.waits_for(event) or not event.started
        return event.is_last or any(place[0] > self.over.get(name, 0) for name, place in event.places.items())
