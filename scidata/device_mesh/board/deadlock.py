"""Ranks that wait for each other in different operations: found by what each has begun, and named.

Each rank that has stood in a collective for some seconds posts where it stands. The first rank, where it stands too,
reads what the others have posted, and looks for ranks that wait for each other in a circle, or have met in one
collective of a group with different calls. Both end by nothing but a timeout, so slow ranks are never taken for them.
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


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where a rank stands: in a collective of a group, the line of its script, and what it had begun by then."""

    group: str
    ranks: list[int]
    call: str
    line: str
    started: dict[str, int]

    @classmethod
    def of(cls, thread: int) -> Stand | None:
        """Return where a thread stands; None where that is no collective of a group that is known."""
        found, started = stuck.collective_of(thread), num_started()
        if found is None or found[0].group_name not in started:
            return None
        group, call, line = found
        return cls(
            group=group.group_name, ranks=dist.get_process_group_ranks(group), call=call, line=line, started=started
        )

    def waits_for(self, other: Stand) -> bool:
        """Whether another rank of the group has not come to this collective, or to another call of the same number."""
        own, theirs = self.started[self.group], other.started.get(self.group, 0)
        return theirs < own or (theirs == own and other.group == self.group and other.call != self.call)


class Deadlocks:
    """The part of a board that looks for them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stalls = stuck.StallDetector()
        self._posted: Stand | None = None
        self._seen: Mapping[int, Stand] = {}

    def look(self, posts: Postings, thread: int, num_ranks: int, *, reads: bool) -> Event | None:
        """Post where a thread stands; the first rank returns the event of a deadlock that it has seen twice."""
        how = self._stalls.look(thread)
        stands = how is not None and self._stalls.seconds > _STOOD and not self._stalls.is_of_two
        stand = Stand.of(thread) if stands else None
        if stand != self._posted:
            self._posted = stand
            posts.post(f"stands/{self._rank}", stand and asdict(stand))
        if stand is None or self._rank or not reads:
            return None
        found = ((rank, posts.find(f"stands/{rank}")) for rank in range(num_ranks))
        before, self._seen = self._seen, in_circle({rank: Stand(**values) for rank, values in found if values})
        if not self._seen or self._seen != before:
            return None
        first: dict[str, str] = {}
        for rank, each in self._seen.items():
            first.setdefault(each.line, f"rank {rank} is in {each.call} of {each.line}")
        places = "; ".join(list(first.values())[:_MOST_NAMED])
        text = f"ranks wait for each other in different operations: {places}"
        return Event(kind="stuck", rank=self._rank, text=text)


def in_circle(stands: Mapping[int, Stand]) -> dict[int, Stand]:
    """Return the ranks that wait for a rank which waits itself: each of those that have no end."""
    left = dict(stands)
    while True:
        waiting = {
            rank: each
            for rank, each in left.items()
            if any(other != rank and other in left and each.waits_for(left[other]) for other in each.ranks)
        }
        if len(waiting) == len(left):
            return left
        left = waiting
