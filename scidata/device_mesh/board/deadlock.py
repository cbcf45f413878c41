"""Detect and name ranks that wait for each other in different operations.

A rank that has stood in a collective for some seconds posts where. The first rank, if it stands too, looks for circles
of ranks, and for ranks in one collective with different calls: neither ends but by a timeout; slow ranks are neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from scidata.device_mesh.board import stuck
from scidata.device_mesh.board.events import Event
from scidata.device_mesh.board.store import Postings
from scidata.device_mesh.torch_internals import num_started

_STOOD = 5.0  # s in one collective, before others hear of it
_MOST_NAMED = 3  # places of an error's text


@dataclass(frozen=True)
class Stand:
    """Position of a rank: the group of its collective, the line of its script, and the collectives begun so far."""

    group: str
    ranks: list[int]
    call: str
    line: str
    started: dict[str, int]

    @classmethod
    def of(cls, thread: int) -> Stand | None:
        """Return the position of a thread; None if it is in no collective of a known group."""
        found, started = stuck.collective_of(thread), num_started()
        if found is None or found[0].group_name not in started:
            return None
        group, call, line = found
        return cls(group.group_name, dist.get_process_group_ranks(group), call, line, started)

    def waits_for(self, other: Stand) -> bool:
        """Whether another rank of the group has not reached this collective, or is in another call of the same
        number.
        """
        own, theirs = self.started[self.group], other.started.get(self.group, 0)
        return theirs < own or (theirs == own and other.group == self.group and other.call != self.call)


class Deadlocks:
    """The part of a board that looks for them."""

    def __init__(self, rank: int) -> None:
        self._rank, self._stalls = rank, stuck.StallDetector()
        self._posted: Stand | None = None
        self._num_posted = -1  # by all ranks, when their stands were read
        self._seen: dict[int, Stand] = {}

    def look(self, posts: Postings, thread: int, num_ranks: int, *, reads: bool) -> Event | None:
        """Post a thread's position; the first rank returns the event of a deadlock seen twice."""
        stands = self._stalls.look(thread) is not None and self._stalls.seconds > _STOOD and not self._stalls.is_of_two
        stand = Stand.of(thread) if stands else None
        if stand != self._posted:
            self._posted = stand
            posts.post(f"stands/{self._rank}", stand and asdict(stand))
            posts.count("stands")
        if stand is None or self._rank or not reads or not (stuck_ranks := self.seen_twice(posts, num_ranks)):
            return None
        first = {s.line: f"rank {rank} is in {s.call} of {s.line}" for rank, s in reversed(stuck_ranks.items())}
        places = "; ".join([*reversed(first.values())][:_MOST_NAMED])
        text = f"ranks wait for each other in different operations: {places}"
        self._seen = {}  # told once
        return Event(kind="stuck", rank=self._rank, text=text)

    def seen_twice(self, posts: Postings, num_ranks: int) -> dict[int, Stand]:
        """Return the ranks that are in a circle as at the last call: one message, unless a rank has moved."""
        before, self._num_posted = self._num_posted, posts.count("stands", 0)
        if self._num_posted == before:
            return self._seen
        found = ((rank, posts.find(f"stands/{rank}")) for rank in range(num_ranks))
        self._seen = in_circle({rank: Stand(**values) for rank, values in found if values})
        return {}


def in_circle(stands: Mapping[int, Stand]) -> dict[int, Stand]:
    """Return the ranks that wait, directly or through others, for ranks that wait themselves without end."""
    left = dict(stands)
    while gone := [r for r, each in left.items() if not any(each.waits_for(left[o]) for o in each.ranks if o in left)]:
        left = {rank: each for rank, each in left.items() if rank not in gone}
    return left
