"""Events, which ranks post on the board when one of them fails, leaves, or is found dead."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from scidata.device_mesh.board.store import Postings
from scidata.errors import ConfigError, RankFailedError

ANYWHERE = "*"  # in place of a loader: whatever loop a rank is in

#: Where a loop over a loader is: iteration, step, and "reading", "done" or "left" in the middle.
Place: TypeAlias = tuple[int, int, str]
#: Of each loop of a rank, by its loader's name.
Loops: TypeAlias = Mapping[str, Place]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that other ranks should know."""

    # ``"failed"`` and ``"disagree"`` end the loop of all ranks; so does ``"ahead"``, a read that has failed ahead of
    # its use, if it comes to its use; ``"slow"`` does not. ``"left"``: the script has ended without an error.
    # ``"stop"``: a signal asks all ranks to stop, by the :class:`scidata.StopSignal` of the name ``text``. ``"met"``:
    # an operation has raised; it matters where others wait for that rank. ``"stuck"``: ranks wait for each other, and
    # for ever, or have mixed values of different operations. ``"differ"``: the rank in ``started`` should look into
    # what it has begun in the group ``text``. ``"ended"``: another rank's failure has ended
    # the process; tells nobody anything
    kind: str
    rank: int  # whose it is
    text: str  # what happened
    # by the name of a loader: iteration and step at which its loop raises it; step -1 is at once
    places: Mapping[str, Sequence[int]] = field(default_factory=dict)
    is_last: bool = False  # whether the rank's process has ended, or does not run
    # how many collectives the rank had begun in each process group
    started: Mapping[str, int] = field(default_factory=dict)
    number: int = -1  # in the row of events

    def error(self) -> Exception:
        """Return the error to raise on the other ranks."""
        return (
            ConfigError(self.text)
            if self.kind == "disagree"
            else RankFailedError(self.text, -1 if self.kind == "stuck" else self.rank)
        )

    def is_due(self, loader: str, iteration: int, step: int, over: int) -> bool:
        """Whether a loop raises it at a step; ``over`` is the loader's last iteration that has failed here."""
        if loader not in self.places:
            return ANYWHERE in self.places
        found = tuple(self.places[loader])
        if found[0] <= over or (self.kind == "ahead" and found[0] != iteration):
            return False  # others may report the failure of an iteration later
        return found <= (iteration, step)


def post(posts: Postings, event: Event) -> Event:
    """Post an event to all ranks; return it with its number."""
    return replace(event, number=posts.append("events", vars(event)))


def events_of(posts: Postings, first: int = 0) -> Iterator[Event]:
    """Yield the events that were posted, from a number on."""
    for number, value in enumerate(posts.entries("events", first), first):
        yield Event(**value | {"number": number})


def in_words(error: BaseException) -> str:
    """Format an error in one line."""
    return " ".join(line.strip() for line in traceback.format_exception_only(error))


def latest(loops: Loops) -> Place:
    """Return the position in the loop begun last; step -1 if there is none."""
    return list(loops.values())[-1] if loops else (0, -1, "")


def failed(rank: int, loops: Loops, error: BaseException) -> Event:
    """Return the event of a process that ends with an error."""
    _, step, state = latest(loops)
    where = f" in step {step}" if state == "left" else " outside of its loop" if loops else ""
    places = {name: (iteration, at if state == "left" else -1) for name, (iteration, at, state) in loops.items()}
    text = f"rank {rank} failed{where}: {in_words(error)}"
    return Event(kind="failed", rank=rank, text=text, places=places or {ANYWHERE: (0, -1)}, is_last=True)


def left(rank: int, loops: Loops, last_error: str | None) -> Event:
    """Return the event of a process that ends without an error: ranks that go on may wait for it in vain."""
    iteration, step, state = latest(loops)
    how = f"after iteration {iteration} of the loader"
    if state != "done":
        how = f"without an error, in step {step} of the loop" if loops else "without an error"
    text = f"rank {rank} has left: its script has ended{',' if state != 'done' else ''} {how}"
    if last_error is not None:
        text = f"rank {rank} has ended; the last error that it met was {last_error}"
    places = {name: (i + 1, -1) if state == "done" else (i, at + 1) for name, (i, at, state) in loops.items()}
    return Event(kind="left", rank=rank, text=text, places=places, is_last=True)


def places_of_dead(loops: Loops) -> Mapping[str, Sequence[int]]:
    """Return the steps at which other ranks learn of a rank's death: in loops that it had not finished."""
    # all ranks may have left the loop at this step; after its last loop, no rank may need it
    found = {name: (i, at + 1 if state == "left" else -1) for name, (i, at, state) in loops.items() if state != "done"}
    return found if loops else {ANYWHERE: (0, -1)}
