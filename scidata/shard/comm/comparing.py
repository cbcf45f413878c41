"""Comparison through the ranks' common store: each rank compares with one or two others, and all learn of differences.

A rank talks to the store some six times, whatever the number of ranks. No collective is called, so that it may be found
out, and raised on all ranks, that the next one would not fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeAlias, TypedDict, TypeVar

from scidata.device_mesh.board import Postings

_MAX_REPORTS = 8  # of ranks that differ, that are shown

ValueT = TypeVar("ValueT")

#: Values by name, in parts that are compared with different ranks.
Record: TypeAlias = Mapping[str, Mapping[str, ValueT]]
#: From a part of another rank's record, and this one's, to the values that differ.
Differ: TypeAlias = Callable[[Mapping[str, ValueT], Mapping[str, ValueT]], dict[str, list[str]]]


class Difference(TypedDict):
    """The two ranks, and the values that differ between them: ``{name: [one's, the other's]}``."""

    ranks: list[int]
    values: dict[str, list[str]]


Report: TypeAlias = dict[str, Difference]  # by part


def differing(theirs: Mapping[str, str], own: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the common keys whose values differ."""
    return {name: [theirs[name], own[name]] for name in theirs if name in own and theirs[name] != own[name]}


class Comparison(Generic[ValueT]):
    """One comparison.

    ``posts, key``: where ranks meet; ``past`` is the key of an earlier comparison of the same ranks, which is cleared
    away.
    ``differ``: compares a part of a record with another rank's.
    """

    def __init__(
        self, posts: Postings, key: str, rank: int, ranks: Sequence[int], differ: Differ[ValueT], past: str = ""
    ) -> None:
        self._posts, self._key, self._rank, self._ranks, self._past = posts, key, rank, ranks, past
        self._differ = differ
        self.has_voted = self.is_last = False

    def run(
        self, record: Record[ValueT], leaders: Mapping[str, int], wait: Callable[[str, Sequence[int]], None]
    ) -> list[Report]:
        """Compare, and return the reports of all ranks, equal on each.

        ``leaders``: by part: the rank that it is compared with, which has the same entry.
        ``wait``: called with a key, and the ranks that are waited for; returns when it is there, or raises.
        """
        own = f"{self._key}/{self._rank}"
        self._posts.post(own, record)
        report: Report = {}
        for part, other in leaders.items():
            if other == self._rank:
                continue
            wait(f"{self._key}/{other}", (other,))
            theirs = self._posts.read(f"{self._key}/{other}")
            if theirs is not None and (values := self._differ(theirs[part], record[part])):
                report[part] = {"ranks": [other, self._rank], "values": values}
        self._vote(report)
        wait(f"{self._key}/result", self._ranks)
        reports: list[Report] = self._posts.read(f"{self._key}/result")
        self._posts.remove(own)  # all ranks that may read it have voted
        return reports

    def pass_by(self) -> None:
        """Vote without comparing, so that no rank waits for this one."""
        self.blank()
        if not self.has_voted:
            self._vote({})

    def blank(self) -> None:
        """Post that no rank should compare with this one."""
        self._posts.post(f"{self._key}/{self._rank}", None)

    def withdraw(self) -> None:
        """Remove this rank's values, which could be taken for those of a later comparison."""
        self._posts.remove(f"{self._key}/{self._rank}")

    def first_missing(self, ranks: Sequence[int]) -> int:
        """Return the first of some ranks that has not come, or the first of all, if that cannot be told.

        Asks the store ``log2(ranks)`` times.
        """
        keys = [f"{self._key}/{rank}" for rank in ranks]
        place = bisect_left(range(1, len(keys) + 1), True, key=lambda count: not self._posts.has(*keys[:count]))
        return ranks[place % len(ranks)]

    def _vote(self, report: Report) -> None:
        """Vote with this rank's finding; the last voter posts the result."""
        reports = self._posts.vote(self._key, len(self._ranks), report or None, most=_MAX_REPORTS)
        self.has_voted, self.is_last = True, reports is not None
        if self.is_last:
            if self._past:  # all have read it, and voted since
                self._posts.remove_vote(self._past)
            self._posts.post(f"{self._key}/result", reports)
