"""The knowledge of one process about the other ranks, and its posts: the part of a board that needs no thread."""

from __future__ import annotations

import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch.distributed as dist

from scidata.device_mesh.board.events import Event, Loops, Place, events_of, in_words, latest, places_of_dead, post
from scidata.device_mesh.board.processes import ProcessId, StepSeen, StepShown
from scidata.device_mesh.board.store import Postings
from scidata.device_mesh.torch_internals import num_started

_ALIKE_SECONDS = 10.0  # between errors of one kind that ranks have met together
_NUM_LOOPS = 8  # whose places are remembered
_ANOTHER_SAYS_IT = 0.4  # s that a rank may take to tell in which step the one that it watches has died
_LOOK_SECONDS = 0.05  # between two looks at why a collective has failed


class Loop(Protocol):
    """A running loop over a loader."""

    name: str
    thread: int
    timeout: float

    @property
    def place(self) -> Place:
        """Where the loop is."""

    def tick(self) -> None:
        """Talk to the other ranks. Called by the board's thread, with each sign of life."""

    def alarm(self) -> Event | None:
        """Make the loop raise the due event, if any; return it in case the loop never gets there."""

    def end(self) -> None:
        """End as if the loop was left."""


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
        """Whether others may wait for this rank: it has begun no collective since and still has the error."""
        return self.started == num_started() and self.held() is not None


class BoardState:
    """The knowledge of one process about the other ranks, and its posts.

    ``base``: the values of the board, over the process group's own connection; the board's thread gets another one.
    ``host``: the rank whose process keeps the store; None if none of them does.
    ``events``: events of other ranks; none is forgotten, since it may be the reason of a later failure.
    ``over``: by a loader's name, its last iteration that an error has ended here.
    ``told``: the event that this rank has posted of an error of its own that has ended a loop.
    ``last_error``: the latest error of an operation on this rank.
    ``loops, places``: the loops that are under way; by loader, where its last one is or has ended.
    ``thread``: the thread that is looked after while no loop is under way.
    ``is_lost, is_alone``: whether the store does not answer; whether the process that keeps it has ended, with a word.
    """

    def __init__(self, base: Postings, rank: int, ranks: Sequence[int], host: int | None) -> None:
        self.base, self.posts = base, base.connect()
        self.rank, self.ranks, self.host = rank, ranks, host
        self._processes: dict[int, ProcessId] = {}
        self._seen: dict[int, StepSeen] = {}
        self.thread, self.timeout = 0, 0.0
        self.shown = StepShown()
        self.shown.show(-1)
        self.events: list[Event] = []
        self.over: dict[str, int] = {}
        self.told: Event | None = None
        self.last_error: RecordedError | None = None
        self.loops: list[Loop] = []
        self.places: dict[str, Place] = {}
        self.is_lost = self.is_alone = self._reads_no_more = False
        self._known: set[int] = set()  # events that this rank has acknowledged
        self._names: Counter[str] = Counter()

    @property
    def is_answered(self) -> bool:
        """Whether the store may still answer; torch prints a backtrace if it does not."""
        host = self.host_process()
        return not self.is_lost and not self.is_alone and (host is None or host.runs() is not False)

    def host_process(self) -> ProcessId | None:
        """Return the process that keeps the store, if it is a rank's and known."""
        return None if self.host is None else self.process(self.host)

    def name_for(self, kind: str, ranks: Sequence[int]) -> str:
        """Return a prefix for one more loader or writer of some ranks, equal on all since they count alike."""
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
        """Post that this rank has read an event, and can go on without the rank that posted it."""
        if event.number < 0 or event.rank == self.rank or event.number in self._known or self.is_lost:
            return
        if not self.is_alone or event.rank == self.host:
            self._known.add(event.number)
            if not self._reads_no_more:
                self.posts.count(f"knows/{event.number}")

    def read_no_more(self, posts: Postings) -> None:
        """Say, once, that this rank hears of nothing any more: it counts as one that knows of all events."""
        if not self._reads_no_more:
            self._reads_no_more = True
            for number in list(self._known):
                posts.count(f"knows/{number}", -1)
            posts.count("ended")
            posts.post(f"ended/{self.rank}")

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
        if event.rank == self.rank or event.kind not in ("failed", "disagree", "left", "stuck"):
            return False
        if event.kind == "left":  # one that has destroyed its groups cannot say how far it has come
            return self.waits_for(event) or not event.started
        return (
            event.is_last
            or event.kind == "stuck"
            or any(place[0] > self.over.get(name, 0) for name, place in event.places.items())
        )

    def introduce(self) -> None:
        """Post this rank's process, and that it runs on this machine."""
        own = ProcessId.own()
        self.posts.post(f"process/{self.rank}", {"process": asdict(own), "shown": self.shown.fd})
        self.posts.append(f"on/{own.machine}", self.rank)

    # -- other ranks: their processes, their loops, and which are gone -------------------------------------------------

    def process(self, rank: int, posts: Postings | None = None) -> ProcessId | None:
        """Return a rank's process, if known; ask the store if one is given."""
        if rank not in self._processes and posts is not None and (record := posts.find(f"process/{rank}")) is not None:
            found = self._processes[rank] = ProcessId(**record["process"])
            if not found.has_ended():  # its step can be seen as long as it lives, and after
                self._seen[rank] = StepSeen(found, record["shown"])
        return self._processes.get(rank)

    def all_know(self, posts: Postings, event: Event) -> bool:
        """Whether all ranks have heard of an event, or have ended, besides this one and the event's."""
        counted = posts.count(f"knows/{event.number}", 0) + posts.count("ended", 0)
        counted -= self._reads_no_more or event.number in self._known
        counted -= event.rank != self.rank and posts.has(f"ended/{event.rank}")
        return counted >= len(set(self.ranks) - {self.rank, event.rank})

    def death_of(self, rank: int, loops: Loops, how: str) -> Event:
        """Return the event of a rank that has ended, or is silent; it has last said that it was in these loops."""
        process, at = self._processes[rank], latest(loops)[1]
        seen = self._seen[rank].step() if rank in self._seen else None
        # a loop takes many steps between two beats; only a process of the same machine can see the last of them
        where = f", in step {at} or soon after it" if seen is None else f", in step {seen}"
        where = where if (at if seen is None else seen) >= 0 else ""
        text = (
            f"rank {rank} (process {process.pid} on {process.host}) {how}{where}; see its own output, and the "
            "kernel's log: was it killed for memory?"
        )
        return Event(kind="failed", rank=rank, text=text, places=places_of_dead(loops), is_last=True)

    def store_lost(self, detail: str) -> Event:
        """Return the event of a store that does not answer."""
        host = self.process(0) if self.rank else None
        if host is not None and host.has_ended():
            return self.death_of(0, {}, "has died, without a word")
        if host is not None and host.runs() is False:
            return self.death_of(0, {}, f"has given no sign of life {detail}: its process is stopped")
        text = (
            "the ranks' common store does not answer: the process that keeps it, rank 0 or torchrun's agent, has "
            f"probably died ({detail})"
        )
        return Event(kind="failed", rank=0, text=text, places=places_of_dead({}), is_last=True)

    def cause(self, posts: Postings, deadline: float) -> Event | None:
        """Return why a collective has failed: the event of another rank, or that its process has ended.

        It may take a moment until anything can be seen.
        """
        suspected = 0.0
        try:
            while time.monotonic() < deadline:
                said = next((event for event in events_of(posts) if self.is_cause(event)), None)
                if said is not None:
                    return said
                found = self._first(posts, ProcessId.has_ended, "has died, without a word")
                if found is not None:
                    suspected = suspected or time.monotonic()
                    if found.rank in self._seen or time.monotonic() - suspected > _ANOTHER_SAYS_IT:
                        return post(posts, found)
                elif (stopped := self.find_stopped(posts, "when a collective failed")) is not None:
                    return stopped
                time.sleep(_LOOK_SECONDS)
        except (dist.DistError, RuntimeError) as e:
            return self.store_lost(type(e).__name__)
        return None

    def find_stopped(self, posts: Postings, when: str) -> Event | None:
        """Post an event about a rank whose process is stopped now, and return it."""
        how = f"has given no sign of life {when}: its process is stopped"
        found = self._first(posts, lambda process: process.runs() is False and not process.has_ended(), how)
        return None if found is None else post(posts, found)

    def _first(self, posts: Postings, is_so: Callable[[ProcessId], bool], how: str) -> Event | None:
        for rank in posts.entries(f"on/{ProcessId.own().machine}"):  # of others, nothing can be seen
            process = None if rank == self.rank else self.process(rank, posts)
            if process is not None and is_so(process) and not posts.has(f"ended/{rank}"):
                return self.death_of(rank, self.loops_of(posts, rank), how)
        return None

    def loops_of(self, posts: Postings, rank: int) -> Loops:
        """Return the loops that a rank has last said to be in."""
        beat = posts.find(f"beat/{rank}")
        return {} if beat is None else {name: (i, at, state) for name, (i, at, state) in beat["loops"].items()}
