"""The board of failures: ranks find out, beside their work, when one of them fails, dies, stops or leaves.

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

**Who ends whom.** A rank that has ended, or is stopped, ends every rank that stands in a collective for 0.3 s. One
whose script has ended without an error ends those only that have begun a collective which it had not; so does one that
has met an error in an operation on shards, has begun nothing since, and still has that error: nobody hears of errors
that all ranks meet alike, or that a script has caught and is done with. The thread that waits is brought back by
breaking its process groups (:mod:`scidata.device_mesh.board.stuck`): the collective ends with an error, in whose place
the failed rank's own is raised where that can be; a line in the log says it in any case. The groups are of no use then.
Where torch ends a collective because the other's process is gone, the fate of that process is raised in place of
torch's error, too.

**Deaths.** Each rank watches one other, the next one: on the same machine that is a look at its process, four times a
second; otherwise its count must go up.

**Ends.** A process that ends posts why. After an error it waits until the others know, for a second at most; one that
keeps the store waits until nobody asks for it. One that another's failure has ended waits until that process is gone,
so that launchers name the one that has failed first.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.util import Finalize

from scidata.device_mesh import groups
from scidata.device_mesh.board.board import Board
from scidata.device_mesh.board.leaving import leave, let_go
from scidata.device_mesh.board.processes import ProcessId
from scidata.device_mesh.board.store import Postings, call_with_timeout, common_postings, has_peers

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
    """Return the board of this process, begun where there is none yet; None where a rank has no others.

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
    board = _own.board
    if board is None or board.is_over:
        board = _own.board = Board(host)
    board.timeout = timeout or board.timeout
    return board


def forget() -> None:
    """Let go of a board whose process groups were destroyed: the store that it keeps would be that of the next ones."""
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
