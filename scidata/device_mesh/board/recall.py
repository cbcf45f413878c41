"""Calling a thread back that waits in a collective for a rank which does not come.

A walk through it, on rank 0, whose thread stands in an all-reduce that rank 1 has failed before::

    0.00 s  the board hears of rank 1's event; it is due for the thread: look again each 0.05 s
    0.30 s  the thread has stood at one place in the collective: arm it with the error, say that rank 0 knows
    0.35 s  all ranks know (or 0.7 s have gone): break the groups; the collective ends, and the thread raises the error

"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from scidata.device_mesh.board import stuck
from scidata.device_mesh.board.events import Event
from scidata.device_mesh.board.state import BoardState

_log = logging.getLogger("scidata")

BREAK_SECONDS = 0.7  # s that a rank waits for others to know why, before it breaks groups that they share
_STORE_SECONDS = 1.0  # s that breaking them may take


class Recall:
    """What a board does about events that are due here.

    Parameters
    ----------
    board
        What is known.
    give_up_store
        Called where the thread waits for an answer of the store that will not come.

    Attributes
    ----------
    is_due
        Whether there is such an event, so that it is worth looking often.
    breaks
        The event for which this process breaks its groups.
    """

    def __init__(self, board: BoardState, give_up_store: Callable[[], None]) -> None:
        self._board, self._give_up_store = board, give_up_store
        self.is_due = False
        self.breaks: Event | None = None
        self._stalls, self._armed = stuck.StallDetector(), 0.0
        self._is_broken = self._is_outside = False

    def look(self) -> None:
        """Let loops raise; call a thread back that waits in vain. By the board's thread, several times a second."""
        board = self._board
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
                self._give_up_store()
        elif how is None:
            self._armed = 0.0
            if not self._stalls.is_inside and self._is_outside and not in_loop:  # a loop comes to it by itself
                board.knows(event)
            self._is_outside = not self._stalls.is_inside
        elif not self._armed:
            # an error of an operation may be over, its rank having gone on; not where that cannot be known any more
            if event.kind != "met" or (board.is_answered and not board.posts.has(f"over/{event.number}")):
                self._arm(event, thread, how)
        elif (board.is_answered and board.peers.all_know(board.posts, event)) or (
            time.monotonic() - self._armed > BREAK_SECONDS
        ):
            self._is_broken = True
            if event.kind == "met" and board.is_answered:
                board.posts.post(f"broken/{event.number}")
            stuck.break_groups()

    def _arm(self, event: Event, thread: int, how: str) -> None:
        """Have the thread raise the reason as soon as it comes back.

        All ranks do that before one breaks its groups, because that ends the collectives of the others, too.
        """
        board = self._board
        self._armed = time.monotonic()
        said = f"{event.text}; rank {board.rank} waited for it in a collective, which it has broken off"
        _log.error("%s: its process groups are of no more use", said)
        self.breaks = replace(event, text=said)
        if how == "call":
            stuck.raise_in(thread, self.breaks.error())
        board.knows(event)


def _due(board: BoardState) -> Iterator[tuple[Event, int, bool]]:
    """Yield the events in spite of which a thread should not wait, with the thread, and whether it is in a loop."""
    for loop in board.loops:
        event = loop.alarm()
        if event is not None:
            yield event, loop.thread, True
    for event in board.events:
        if (event.is_last and event.kind != "left") or (event.kind in ("left", "met") and board.waits_for(event)):
            yield event, board.thread, False
