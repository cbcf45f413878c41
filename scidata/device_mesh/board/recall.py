"""Calling a thread back that waits in a collective for a rank which does not come."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from scidata.device_mesh.board import stuck
from scidata.device_mesh.board.events import Event
from scidata.device_mesh.torch_internals import num_started

if TYPE_CHECKING:
    from scidata.device_mesh.board.board import Board

_log = logging.getLogger("scidata")

BREAK_SECONDS = 0.7  # s that a rank waits for others to know why, before it breaks groups that they share
_STORE_SECONDS = 1.0  # s that breaking them may take
_ALIKE_SECONDS = 10.0  # between errors of one kind that ranks have met together


class Recall:
    """What a board does about events that are due here.

    Attributes
    ----------
    is_due
        Whether there is one, so that it is worth looking often.
    breaks
        For which this process breaks its groups.
    """

    def __init__(self) -> None:
        self.is_due = False
        self.breaks: Event | None = None
        self._stalls, self._armed = stuck.StallDetector(), 0.0
        self._is_broken = self._is_outside = False

    def look(self, board: Board) -> None:
        """Let loops raise; call a thread back that waits in vain. By the board's thread, several times a second."""
        event, thread, in_loop = next(_due(board), (None, 0, False))
        self.is_due = event is not None
        if event is None:
            return
        how = self._stalls.look(thread, anywhere=in_loop)
        if event.kind in ("left", "met") and self._stalls.is_of_two:  # gloo counts these as collectives
            how = None
        if self._is_broken:  # in vain, where the thread waits for a rank to join a new group
            if how == "call" and self._armed and time.monotonic() - self._armed > BREAK_SECONDS + _STORE_SECONDS:
                self._armed = 0.0
                board.hang_up()
        elif how is None:
            self._armed = 0.0
            if not self._stalls.is_inside and self._is_outside and not in_loop:  # a loop comes to it by itself
                board.knows(event)
            self._is_outside = not self._stalls.is_inside
        elif not self._armed:
            if event.kind != "met" or not board.has(f"over/{event.number}"):
                self._arm(board, event, thread, how)
        elif (board.is_answered and board.all_know(event)) or time.monotonic() - self._armed > BREAK_SECONDS:
            self._is_broken = True
            if event.kind == "met":
                board.leave_word(f"broken/{event.number}")
            stuck.break_groups()

    def _arm(self, board: Board, event: Event, thread: int, how: str) -> None:
        """Have the thread raise the reason as soon as it comes back.

        All ranks do that before one breaks its groups, because that ends the collectives of the others, too.
        """
        self._armed = time.monotonic()
        said = f"{event.text}; rank {board.rank} waited for it in a collective, which it has broken off"
        _log.error("%s: its process groups are of no more use", said)
        self.breaks = replace(event, text=said)
        if how == "call":
            stuck.raise_in(thread, self.breaks.error())
        board.knows(event)


def _due(board: Board) -> Iterator[tuple[Event, int, bool]]:
    """Yield what a thread should not wait in spite of, with the thread, and whether it is in a loop over a loader."""
    for loop in board.loops:
        event = loop.alarm()
        if event is not None:
            yield event, loop.thread, True
    for event in board.events:
        if (event.is_last and event.kind != "left") or (event.kind in ("left", "met") and waits_for(board, event)):
            yield event, board.thread, False


def waits_for(board: Board, event: Event) -> bool:
    """Whether this rank has begun a collective that the event's rank had not come to."""
    if event.kind == "met" and _has_met_alike(board, event):
        return False
    started = num_started(event.rank)
    return any(started.get(name, 0) > number for name, number in event.started.items())


def _has_met_alike(board: Board, event: Event) -> bool:
    own, words = board.last_error, event.text.partition(": ")[2]
    if own is None or time.monotonic() - own.time > _ALIKE_SECONDS:
        return False
    return own.words.partition(":")[0] == words.partition(":")[0]
