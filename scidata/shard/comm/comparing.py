"""Comparing through the ranks' common store: each rank with one or two others, and all of them hear what was found.

A rank talks to the store some six times, whatever the number of ranks. No collective is called, so that it may be found
out, and raised on all ranks, that the next one would not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

_MAX_REPORTS = 8  # of ranks that differ, that are shown

#: Values by name, in parts that are compared with different ranks.
Record: TypeAlias = Mapping[str, Mapping[str, Any]]
#: By part: the two ranks, and what each of them has of what differs, ``{name: [one's, the other's]}``.
Report: TypeAlias = dict[str, dict[str, Any]]


def differing(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return what differs of what both ranks have."""
    return {name: [theirs[name], own[name]] for name in theirs if name in own and theirs[name] != own[name]}


class Comparison:
    """One comparison.

    Parameters
    ----------
    store, key
        Where ranks meet; ``past`` is the key of an earlier comparison of the same ranks, which is cleared away.
    rank, ranks
        This one's number, and all of them.
    """

    def __init__(self, store: Any, key: str, rank: int, ranks: Sequence[int], past: str = "") -> None:
        self._store, self._key, self._rank, self._ranks, self._past = store, key, rank, ranks, past
        self.has_voted = self.is_last = False

    def run(
        self,
        record: Record,
        leaders: Mapping[str, int],
        wait: Callable[[str, Sequence[int]], None],
        differ: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, list[Any]]] = differing,
    ) -> list[Report]:
        """Compare, and return what all ranks have found, the same on each.

        Parameters
        ----------
        record
            What this rank has.
        leaders
            By part: the rank that it is compared with, which has the same entry.
        wait
            Called with a key, and the ranks that are waited for; returns when it is there, or raises.
        differ
            From a part of another rank's record, and this one's, to what differs.
        """
        store, key = self._store, self._key
        store.set(f"{key}/{self._rank}", json.dumps(record))
        report: Report = {}
        for part, other in leaders.items():
            theirs = None if other == self._rank else self._get(str(other), (other,), wait)
            if theirs is not None and (found := differ(theirs[part], record[part])):
                report[part] = {"ranks": [other, self._rank], "values": found}
        self._vote(report)
        reports: list[Report] = self._get("result", self._ranks, wait)
        store.delete_key(f"{key}/{self._rank}")  # all who may read it have voted
        return reports

    def pass_by(self) -> None:
        """Vote without anything to compare, so that nobody waits for this rank."""
        self.blank()
        if not self.has_voted:
            self._vote({})

    def blank(self) -> None:
        """Have nobody compare with this rank."""
        self._store.set(f"{self._key}/{self._rank}", "null")

    def withdraw(self) -> None:
        """Leave nothing behind that others could take for what this rank has later."""
        self._store.delete_key(f"{self._key}/{self._rank}")

    def missing(self, ranks: Sequence[int]) -> list[int]:
        """Return those of some ranks that have not come; all, if that cannot be told."""
        return [rank for rank in ranks if not self._store.check([f"{self._key}/{rank}"])] or list(ranks)

    def _get(self, name: str, whose: Sequence[int], wait: Callable[[str, Sequence[int]], None]) -> Any:
        wait(f"{self._key}/{name}", whose)
        return json.loads(self._store.get(f"{self._key}/{name}"))

    def _vote(self, report: Report) -> None:
        """Say that this rank has compared, and what it has found; the last rank to do so writes the result."""
        store, key = self._store, self._key
        if report:
            store.set(f"{key}/found/{store.add(f'{key}/found', 1)}", json.dumps(report))
        votes = store.add(f"{key}/votes", 1)
        self.has_voted = True
        self.is_last = votes == len(self._ranks)
        if self.is_last:
            count = min(_MAX_REPORTS, store.add(f"{key}/found", 0))
            reports = [json.loads(store.get(f"{key}/found/{number}")) for number in range(1, count + 1)]
            for old in ("votes", "found", "result") if self._past else ():  # all have read them, and voted since
                store.delete_key(f"{self._past}/{old}")
            store.set(f"{key}/result", json.dumps(reports))
