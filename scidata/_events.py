"""What ranks that read together tell each other through the process group's store, and what they say when they end."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist

from scidata._processes import ProcessId
from scidata.errors import ConfigError, RankFailedError, SciDataError

__all__ = ["Event", "Store", "at_exit", "common_store", "died", "failure", "post"]

_log = logging.getLogger("scidata")

_VERDICT_SECONDS = 2.0  # for another rank's end to be seen, after a collective with it has failed

Store: TypeAlias = Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that other ranks should know.

    Attributes
    ----------
    kind
        ``"failed"`` and ``"disagree"`` end the iteration of all ranks; so does ``"ahead"``, a read that has failed
        ahead of its use, if it comes to its use; ``"slow"`` does not.
    rank
        Whose it is.
    iteration, step
        When it is raised: step -1 is at once.
    text
        What happened.
    """

    kind: str
    rank: int
    iteration: int
    step: int
    text: str

    def error(self) -> Exception:
        """Return what to raise on the other ranks."""
        return ConfigError(self.text) if self.kind == "disagree" else RankFailedError(self.text, self.rank)


def common_store() -> Store:
    """Return the ranks' store, below a name of its own."""
    return dist.PrefixStore("scidata", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]


def post(store: Store, event: Event) -> None:
    """Tell all ranks."""
    number = store.add("events", 1) - 1
    store.set(f"event/{number}", json.dumps(vars(event)))


def failure(kind: str, rank: int, iteration: int, step: int, error: BaseException) -> Event:
    """Return the event of an error."""
    lines = traceback.format_exception_only(error)
    text = f"rank {rank} failed in step {step}: {' '.join(line.strip() for line in lines)}"
    return Event(kind=kind, rank=rank, iteration=iteration, step=step, text=text)


def died(rank: int, record: Mapping[str, Any], how: str) -> str:
    """Say that a rank has ended, or is silent; ``record`` is what it has last said of itself."""
    process = record["process"]
    return (
        f"rank {rank} (process {process['pid']} on {process['host']}) {how}, in step {record['at']}; see its own "
        "output, and the kernel's log: was it killed for memory?"
    )


def at_exit(prefix: str, ranks: Sequence[int], rank: int, iteration: int, step: int) -> None:
    """Tell the others why a process ends that has left its loop in the middle: what the script has not caught.

    Where that is torch's word for "the other rank has gone", it says here, too, which one that was.
    """
    uncaught = getattr(sys, "last_value", None)
    if uncaught is None:
        return
    with contextlib.suppress(Exception):  # the group may be gone, too
        own = failure("failed", rank, iteration, step, uncaught)
        cause = _cause(prefix, ranks, rank, iteration) if _is_of_a_collective(uncaught) else None
        if cause is not None:
            _log.error("%s; rank %d was in a collective with it", cause.text, rank)
        post(dist.PrefixStore(prefix, common_store()), own if cause is None else cause)  # type: ignore[attr-defined]


def _is_of_a_collective(error: BaseException) -> bool:
    words = str(error).lower()
    of_torch = isinstance(error, RuntimeError) and not isinstance(error, SciDataError)
    return of_torch and any(word in words for word in ("gloo", "nccl", "peer", "pair closure"))


def _cause(prefix: str, ranks: Sequence[int], rank: int, iteration: int) -> Event | None:
    """Return what has happened to another rank; it may take a moment until that can be seen."""
    deadline = time.monotonic() + _VERDICT_SECONDS
    try:
        store = dist.PrefixStore(prefix, common_store())  # type: ignore[attr-defined]
        while time.monotonic() < deadline:
            for number in range(store.add("events", 0)):
                event = Event(**json.loads(store.get(f"event/{number}"))) if store.check([f"event/{number}"]) else None
                if event is not None and event.kind in ("failed", "disagree") and event.iteration == iteration:
                    return event
            for other in ranks:
                if other == rank or not store.check([f"rank/{other}"]):
                    continue
                record = json.loads(store.get(f"rank/{other}"))
                # one that says it has left may end for the same reason as this one
                if record["state"] == "reading" and ProcessId(**record["process"]).has_ended():
                    text = died(other, record, "has died, without a word")
                    return Event(kind="failed", rank=other, iteration=iteration, step=-1, text=text)
            time.sleep(0.1)
    except (dist.DistError, RuntimeError):
        text = "the ranks' common store does not answer: rank 0, or torchrun's agent, which keeps it, has died"
        return Event(kind="failed", rank=0, iteration=iteration, step=-1, text=text)
    return None
