"""The state of other ranks as one rank sees it: their processes, their loops, and which are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from scidata.device_mesh.board.events import ANYWHERE, Event, Loops, events_of, latest, places_of_dead, post
from scidata.device_mesh.board.processes import ProcessId, StepSeen
from scidata.device_mesh.board.store import Postings

_ANOTHER_SAYS_IT = 0.4  # s that a rank may take to tell in which step the one that it watches has died
_LOOK_SECONDS = 0.05  # between two looks at why a collective has failed


class PeerState:
    """What can be found out about the other ranks, each of which posts ``process/<r>``, ``beat/<r>``, ``ended/<r>``.

    Parameters
    ----------
    rank, ranks
        This one, and all of them.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._seen: dict[int, StepSeen] = {}
        self._processes: dict[int, ProcessId] = {}

    def process(self, rank: int, posts: Postings | None = None) -> ProcessId | None:
        """Return a rank's process, if it is known; ask the store if one is given."""
        if rank not in self._processes and posts is not None and (record := posts.find(f"process/{rank}")) is not None:
            found = self._processes[rank] = ProcessId(**record["process"])
            if not found.has_ended():  # its step can be seen as long as it lives, and after
                self._seen[rank] = StepSeen(found, record["shown"])
        return self._processes.get(rank)

    def all_know(self, posts: Postings, event: Event) -> bool:
        """Whether all ranks have heard of an event, or have ended, besides this one and the event's."""
        others = [rank for rank in self.ranks if rank not in (self.rank, event.rank)]
        return all(posts.has(f"knows/{event.number}/{rank}") or posts.has(f"ended/{rank}") for rank in others)

    def dead(self, rank: int, loops: Loops, how: str) -> Event:
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

    def lost(self, detail: str) -> Event:
        """Return the event of a store that does not answer."""
        host = self.process(0) if self.rank else None
        if host is not None and host.has_ended():
            return self.dead(0, {}, "has died, without a word")
        if host is not None and host.runs() is False:
            return self.dead(0, {}, f"has given no sign of life {detail}: its process is stopped")
        text = (
            "the ranks' common store does not answer: the process that keeps it, rank 0 or torchrun's agent, has "
            f"probably died ({detail})"
        )
        return Event(kind="failed", rank=0, text=text, places={ANYWHERE: (0, -1)}, is_last=True)

    def cause(self, posts: Postings, is_cause: Callable[[Event], bool], deadline: float) -> Event | None:
        """Return why a collective has failed: the event of another rank, or that its process has ended.

        It may take a moment until anything can be seen.
        """
        suspected = 0.0
        try:
            while time.monotonic() < deadline:
                said = next((event for event in events_of(posts) if is_cause(event)), None)
                if said is not None:
                    return said
                found = self._first(posts, ProcessId.has_ended, "has died, without a word")
                if found is not None:
                    suspected = suspected or time.monotonic()
                    if found.rank in self._seen or time.monotonic() - suspected > _ANOTHER_SAYS_IT:
                        return post(posts, found)
                elif (stopped := self.stopped(posts, "when a collective failed")) is not None:
                    return stopped
                time.sleep(_LOOK_SECONDS)
        except (dist.DistError, RuntimeError) as e:
            return self.lost(type(e).__name__)
        return None

    def stopped(self, posts: Postings, when: str) -> Event | None:
        """Tell all ranks of one whose process is seen to be stopped now, and return that."""
        how = f"has given no sign of life {when}: its process is stopped"
        found = self._first(posts, lambda process: process.runs() is False and not process.has_ended(), how)
        return None if found is None else post(posts, found)

    def _first(self, posts: Postings, is_so: Callable[[ProcessId], bool], how: str) -> Event | None:
        for rank in self.ranks:
            process = None if rank == self.rank else self.process(rank, posts)
            if process is not None and is_so(process) and not posts.has(f"ended/{rank}"):
                return self.dead(rank, self.loops(posts, rank), how)
        return None

    def loops(self, posts: Postings, rank: int) -> Loops:
        """Return the loops that a rank has last said to be in."""
        beat = posts.find(f"beat/{rank}")
        return {} if beat is None else {name: (i, at, state) for name, (i, at, state) in beat["loops"].items()}
