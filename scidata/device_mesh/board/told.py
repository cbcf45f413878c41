"""What a board is told of: loops that are under way, and errors of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scidata.device_mesh.board.events import Event


class Loop(Protocol):
    """A loop over a loader that is under way."""

    name: str
    thread: int
    timeout: float

    @property
    def place(self) -> tuple[int, int, str]:
        """Iteration, step, and ``"reading"``, ``"done"``, or ``"left"`` in the middle."""

    def tick(self) -> None:
        """Talk to the other ranks. Called by the board's thread, several times a second."""

    def alarm(self) -> Event | None:
        """Have the loop raise what is due; return that, which the loop may not come to."""

    def end(self) -> None:
        """End as a loop does that is left."""


@dataclass
class RecordedError:
    """An error of an operation, and how many collectives the rank had begun in each group by then.

    ``held`` is there as long as the error is: one that the script has caught, and done with, holds up nobody.
    """

    words: str
    started: dict[str, int]
    time: float
    held: Callable[[], object]
    event: Event | None = None
