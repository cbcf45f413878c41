"""Board of failures: ranks learn, beside their work, that one of them has failed, died, stopped or left.

It begins with :func:`scidata.init_mesh`, or the first ShardTensor. No rank waits for another here, and no collective
is called: ranks talk through the key-value store that the process group was started with (TCPStore under torchrun),
whatever backend the group has. Threads of each rank talk to it over connections of their own; operations and loops
pay nothing.

The process that keeps the store has little to do (docs/decisions/0008-store-traffic.md). One thread waits there for the
next event, which costs nothing until it comes, and is then heard at once; a store in a file is asked four times a
second. Another sends two or three messages a second; in jobs of more than 1,024 ranks fewer, down to every 8 s.

The protocol, below ``scidata/board<n>/``, where n counts the process groups that a rank has had:

``process/<r>``, ``on/<m>``, ``beat/<r>``
    The process of rank r; the ranks of a machine; a count that goes up with each sign of life of rank r, and the loops
    over loaders that it is in.
``events``, ``events/<i>``
    A row of events that only grows: a rank adds 1 to ``events``, and writes its event under the number it got. A
    loop raises an event of its loader when it comes to the step of that (:mod:`scidata.loader.peers.session`).
``over/<i>``, ``broken/<i>``
    Of an operation's error: its rank has gone on; others have broken their groups for it.
``knows/<i>``, ``ended``, ``ended/<r>``
    How many ranks have heard of event i, and do not wait in a collective, or are about to be called back; how many
    read no more, which are not among those; rank r is one of them.

**Who ends whom.** A rank that has ended, or is stopped, ends every rank that has been in a collective for 0.3 s. One
whose script has ended without an error ends only ranks in a collective that it had not begun; so does one with an error
in an operation on shards that has begun nothing since, and still has that error: errors that all ranks meet alike, or
that a script has caught and dropped, are not posted. The waiting thread is brought back by breaking its process groups
(:mod:`scidata.device_mesh.board.stuck`): the collective ends with an error, in place of which the failed rank's error
is raised if possible; the log has a line in any case. The groups are unusable afterwards. If torch ends a collective
because the other process is gone, the fate of that process is raised in place of torch's error, too.

**Deaths.** Each rank watches the next one: on the same machine it checks the process four times a second; otherwise
the count of that rank must increase.

**Ends.** A process that ends posts the reason. After an error it waits until the others know, for a second at most; the
process that keeps the store waits until no rank uses it. A process ended by another's failure waits until that process
is gone, so that launchers name the one that failed first.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize

from scidata.device_mesh import groups
from scidata.device_mesh.board import stuck
from scidata.device_mesh.board.board import BREAK_SECONDS, Board
from scidata.device_mesh.board.events import Event, failed, left, post
from scidata.device_mesh.board.processes import ProcessId
from scidata.device_mesh.board.store import Postings, call_with_timeout, common_postings, has_peers
from scidata.device_mesh.torch_internals import num_started
from scidata.errors import RankFailedError

__all__ = [
    "Board",
    "Postings",
    "ProcessId",
    "begin",
    "call_with_timeout",
    "common_postings",
    "forget",
    "has_peers",
    "record_error",
]


@dataclass
class _Own:
    """The board of this process: a fork inherits it, and none of its threads."""

    board: Board | None = None
    process: int = 0


_own = _Own()


def begin(timeout: float = 0.0, *, host: int | None = 0) -> Board | None:
    """Return this process's board, started if necessary; None if there are no other ranks.

    ``timeout``: seconds after which a stopped rank is reported; 0 for the default.
    ``host``: the rank whose process keeps the store, if one does.
    """
    if not has_peers():
        return None
    if _own.process != os.getpid():
        _own.process, _own.board = os.getpid(), None
        groups.end_well()
        atexit.register(_leave, os.getpid())  # runs before groups are destroyed: it is registered after that
        if multiprocessing.parent_process() is not None:  # which ends without that
            Finalize(None, _leave, (os.getpid(),), exitpriority=100)
        groups.add_explainer(_reason)
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # stderr is no file, in a notebook
            if not faulthandler.is_enabled():
                faulthandler.enable()  # where sizes do not match, gloo ends the process in a thread of C++'s
    board = _own.board
    if board is None or board.is_over:
        board = _own.board = Board(host)
    board.timeout = timeout or board.timeout
    return board


def forget() -> None:
    """Drop a board whose process groups were destroyed, since the store it keeps would serve the next ones."""
    if _own.board is not None and _own.process == os.getpid():
        let_go(_own.board)
        _own.board = None


def record_error(error: BaseException) -> None:
    """Remember an error of an operation: other ranks may be in a collective that this one does not come to."""
    if _own.board is not None:
        _own.board.record_error(error)


def _reason() -> Exception | None:
    board = _own.board
    return None if board is None or board.is_over or _own.process != os.getpid() else board.reason()


def _leave(process: int) -> None:
    if _own.board is not None and os.getpid() == process:
        error = groups.uncaught() or sys.exc_info()[1]  # of a child of multiprocessing
        leave(_own.board, None if isinstance(error, SystemExit) else error)


_GOODBYE_SECONDS = 1.0  # that a process which has failed waits until the others know
_HOST_SECONDS = 2.0  # that the process which keeps the store waits until the others do not ask for it any more
_CULPRIT_SECONDS = 2.0  # that a process waits until the one has ended whose failure ends it
_ASK_SECONDS = 1.0
_LET_GO_SECONDS = 5.0
_LOOK_SECONDS = 0.01
_REST_SECONDS = 0.25  # for the answers that are under way


def leave(board: Board, error: BaseException | None) -> None:
    """Post once why this process ends, and give the others time to read it."""
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
    """Return the event with which this process ends; None if another rank's failure ends it."""
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
    """Release the store once all ranks have destroyed their groups, so that none finds it in place of the next."""
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
