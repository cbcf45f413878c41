"""The end of a board: its process ends, or its process groups are destroyed."""

from __future__ import annotations

import time
from dataclasses import replace

from scidata.device_mesh.board import stuck
from scidata.device_mesh.board.board import BREAK_SECONDS, Board
from scidata.device_mesh.board.events import Event, failed, left, post
from scidata.device_mesh.board.store import call_with_timeout
from scidata.device_mesh.torch_internals import num_started
from scidata.errors import RankFailedError

_GOODBYE_SECONDS = 1.0  # that a process which has failed waits until the others know
_HOST_SECONDS = 2.0  # that the process which keeps the store waits until the others do not ask for it any more
_CULPRIT_SECONDS = 2.0  # that a process waits until the one has ended whose failure ends it
_ASK_SECONDS = 1.0
_LET_GO_SECONDS = 5.0
_LOOK_SECONDS = 0.01
_REST_SECONDS = 0.25  # for the answers that are under way


def leave(board: Board, error: BaseException | None) -> None:
    """Say why this process ends, once, and give the others the time to hear of it."""
    if board.ended.is_set():
        return
    for loop in list(board.loops):
        loop.end()
    board.is_leaving = True
    was_left = any(state == "left" for *_, state in board.places.values())
    if board.is_answered:
        waits = _HOST_SECONDS if board.rank == board.host else 0.0
        waits = _GOODBYE_SECONDS if error is not None and not isinstance(error, RankFailedError) else waits
        event = _last_word(board, error)
        if isinstance(error, RankFailedError):
            call_with_timeout(BREAK_SECONDS, lambda: board.process(error.rank, board.base))
        call_with_timeout(waits + BREAK_SECONDS, lambda: _say_goodbye(board, event, waits))
    board.stop()
    if was_left and not board.is_over:  # a collective that is under way would wait for ranks that will not come
        stuck.break_groups()
    board.join()
    if isinstance(error, RankFailedError):  # launchers name the first that ends as the cause
        process, deadline = board.process(error.rank), time.monotonic() + _CULPRIT_SECONDS
        while process is not None and process.is_there() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)


def _last_word(board: Board, error: BaseException | None) -> Event | None:
    """Return the event with which this process ends; None where another rank's failure ends it."""
    if isinstance(error, RankFailedError):
        return None
    if error is not None:
        told = board.told or failed(board.rank, board.places, error)
        return replace(told, is_last=True, number=-1)
    started, last = {} if board.is_over else num_started(), board.last_error
    words = None if last is None or last.started != started else last.words
    return replace(left(board.rank, board.places, words), started=started)


def _say_goodbye(board: Board, event: Event | None, waits: float) -> None:
    deadline = time.monotonic() + waits
    said = post(board.base, event or Event(kind="ended", rank=board.rank, text=""))
    board.read_no_more(board.base)
    while event is not None and time.monotonic() < deadline and not board.all_know(board.base, said):
        time.sleep(_LOOK_SECONDS)


def let_go(board: Board) -> None:
    """Keep the store no more, once all have destroyed their groups: no rank is to find it in place of the next."""
    board.look_again()
    board.join(only_store=True)
    is_host, deadline = board.rank == board.host, time.monotonic() + _LET_GO_SECONDS
    awaited = [f"ended/{rank}" for rank in board.ranks if rank != board.rank] if is_host else ["gone"]
    while board.host is not None and board.is_answered and time.monotonic() < deadline:
        if call_with_timeout(_ASK_SECONDS, lambda: board.posts.has(*awaited)) is not False:
            call_with_timeout(_ASK_SECONDS, lambda: board.posts.post("gone"))  # the store may be gone already
            time.sleep(_REST_SECONDS if is_host else 2 * _REST_SECONDS)
            break
        time.sleep(5 * _LOOK_SECONDS)
    board.base = board.posts
