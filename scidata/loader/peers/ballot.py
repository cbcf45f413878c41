"""Leaving out samples that cannot be read, on all ranks alike, for ``on_error="skip"``.

The samples of a step are left out of it as soon as one rank cannot read its part, and only when all ranks know: so
every rank says of every step, once it has read it, how that went, and the last one to do so writes down the result.
That is two short messages a step to the process group's store, sent by the reader threads; the loop asks for the
result, which is there where reading runs ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypedDict

from scidata.loader.peers.session import Session
from scidata.loader.peers.watch import Watch

_log = logging.getLogger("scidata")

_KEPT = 512  # steps whose votes stay in the store; far more than can be in flight


class OwnBallot:
    """For one process: leaves out samples that it cannot read."""

    def __init__(self) -> None:
        self._bad: dict[int, frozenset[int]] = {}

    def vote(self, step: int, size: int, bad: Mapping[int, BaseException]) -> None:
        """Remember which places could not be read."""
        if bad:
            self._bad[step] = frozenset(bad)
            for error in bad.values():
                _log.warning("left out: %s", _text(error))

    def dropped(self, step: int, size: int) -> frozenset[int]:
        """Return them."""
        return self._bad.pop(step, frozenset())


class CommonBallot:
    """For all ranks of a watch: a sample, or step that leaves one dp rank nothing, is left out on all alike."""

    def __init__(self, watch: Watch, session: Session) -> None:
        self._rank, self._dp_rank, self._num_ranks = watch.rank, watch.dp_rank, len(watch.ranks)
        self._first = watch.rank == watch.ranks[0]
        self._session = session
        self._posts = watch.posts.below(f"ballot/{watch.iteration}")

    def vote(self, step: int, size: int, bad: Mapping[int, BaseException]) -> None:
        """Post the places that could not be read here; the last rank to vote posts the result."""
        report: _Report | None = None
        if bad:
            texts = [_text(error) for error in bad.values()]
            report = {"dp": self._dp_rank, "rank": self._rank, "size": size, "places": list(bad), "texts": texts}
        reports = self._posts.vote(f"{step}", self._num_ranks, report)
        if reports is not None:
            self._posts.post(f"{step}/result", _decide(reports))
            self._posts.remove_vote(f"{step - _KEPT}")

    def dropped(self, step: int, size: int) -> frozenset[int]:
        """Wait until all ranks have voted, and return the places that are left out here."""
        self._posts.wait([f"{step}/result"], look=lambda _: self._session.check(step), num_ranks=self._num_ranks)
        result: _Result = self._posts.read(f"{step}/result")
        for rank, text in result["texts"]:
            if self._first or rank == self._rank:
                _log.warning("left out on all ranks: rank %d: %s", rank, text)
        return frozenset(range(size) if result["whole"] else result["places"].get(str(self._dp_rank), []))


Ballot: TypeAlias = OwnBallot | CommonBallot


class _Report(TypedDict):
    dp: int
    rank: int
    size: int
    places: list[int]
    texts: list[str]


class _Result(TypedDict):
    places: dict[str, list[int]]
    whole: bool
    texts: list[tuple[int, str]]


def _decide(reports: Sequence[_Report]) -> _Result:
    places: dict[str, set[int]] = {}
    for report in reports:
        places.setdefault(str(report["dp"]), set()).update(report["places"])
    return {
        "places": {dp: sorted(bad) for dp, bad in places.items()},
        "whole": any(len(places[str(report["dp"])]) == report["size"] for report in reports),
        "texts": [(report["rank"], text) for report in reports for text in report["texts"]],
    }


def _text(error: BaseException) -> str:
    return ": ".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])
