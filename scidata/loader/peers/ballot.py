"""Leaving out samples that cannot be read, on all ranks alike: what ``on_error="skip"`` is made of.

The samples of a step are left out of it as soon as one rank cannot read its part, and only when all ranks know: so
every rank says of every step, once it has read it, how that went, and the last one to do so writes down what follows.
That is two short messages a step to the process group's store, sent by the reader threads; the loop asks for the
result, which is there where reading runs ahead.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from scidata.loader.peers.session import Session
from scidata.loader.peers.watch import Watch

_log = logging.getLogger("scidata")

_POLL = 0.001, 0.02  # s, growing: all ranks ask one process
_KEPT = 512  # steps whose votes stay in the store; far more than can be in flight


class OwnBallot:
    """For one process: leaves out what it cannot read."""

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
    """For all ranks of a watch.

    A sample is left out on all ranks that read it. A step of which one dp rank has nothing left is left out on all, so
    that all take the same number of steps.
    """

    def __init__(self, watch: Watch, session: Session) -> None:
        self._rank, self._dp_rank, self._num_ranks = watch.rank, watch.dp_rank, len(watch.ranks)
        self._first = watch.rank == watch.ranks[0]
        self._session = session
        self._voting, self._asking = watch.connect(), watch.connect()
        self._prefix = f"ballot/{watch.iteration}"

    def vote(self, step: int, size: int, bad: Mapping[int, BaseException]) -> None:
        """Say which places could not be read here; the last rank to do so writes the result."""
        store, key = self._voting, f"{self._prefix}/{step}"
        if bad:
            number = store.add(f"{key}/bad", 1)
            places = {place: _text(error) for place, error in bad.items()}
            report = {"dp": self._dp_rank, "rank": self._rank, "size": size, "places": places}
            store.set(f"{key}/bad/{number}", json.dumps(report))
        if store.add(f"{key}/votes", 1) == self._num_ranks:
            count = store.add(f"{key}/bad", 0)
            reports = [json.loads(store.get(f"{key}/bad/{number}")) for number in range(1, count + 1)]
            store.set(f"{key}/result", json.dumps(_decide(reports)))
            for old in ("votes", "bad", "result"):
                store.delete_key(f"{self._prefix}/{step - _KEPT}/{old}")

    def dropped(self, step: int, size: int) -> frozenset[int]:
        """Wait until all ranks have voted, and return the places that are left out here."""
        key, pause = f"{self._prefix}/{step}/result", _POLL[0]
        while not self._asking.check([key]):
            self._session.check(step)
            time.sleep(pause)
            pause = min(2 * pause, _POLL[1])
        result = json.loads(self._asking.get(key))
        for rank, text in result["texts"]:
            if self._first or rank == self._rank:
                _log.warning("left out on all ranks: rank %d: %s", rank, text)
        places = range(size) if result["whole"] else result["places"].get(str(self._dp_rank), [])
        return frozenset(places)


def _decide(reports: list[dict[str, Any]]) -> dict[str, Any]:
    places: dict[str, list[int]] = {}
    texts, whole = [], False
    for report in reports:
        key = str(report["dp"])
        bad = {int(place) for place in report["places"]}
        places[key] = sorted(bad.union(places.get(key, [])))
        texts += [(report["rank"], text) for text in report["places"].values()]
        whole = whole or len(places[key]) == report["size"]
    return {"places": places, "whole": whole, "texts": texts}


def _text(error: BaseException) -> str:
    return ": ".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])
