"""Turn a signal to any rank into a stop of all ranks after the same step.

Steps cost no message. When a signal comes to rank 1, which has done 6 steps::

    rank 1's handler   has its board's thread post Event(kind="stop")
    threads            each vote with the steps that their rank has done so far: 7, 6, 6
    the last voter     posts 8: no rank has done that step yet
    ranks' loops       wait for that number at the end of their next step, and go on until they have done step 8

Threads vote, not loops: a loop may wait in a collective for one that waits for the number.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from scidata.core.checks import is_int
from scidata.device_mesh import board
from scidata.device_mesh.board import Board
from scidata.errors import ConfigError

_RESULT = "step/result"
_PATIENCE = 15.0  # s for votes, which threads cast within one: a rank without any has no StopSignal


class StopSignal:
    """Stops a training loop after the same step on all ranks once a rank gets a signal. Collective.

    A scheduler sends one before the time is up: SLURM by ``--signal=USR1@120``, torchrun and Kubernetes SIGTERM. (At
    SLURM's limit itself, and by ``scancel``, ``srun`` kills its tasks.) The loop ends between two steps, so that model,
    optimizer and loader can be saved as of one step.

    Parameters
    ----------
    *numbers : int
        Signals to listen to; default SIGTERM and SIGUSR1. The end of a ``with`` block restores their handlers, which
        are not called meanwhile; only those of a :class:`StopSignal` around this one are.

    Raises
    ------
    ConfigError
        This is not the main thread, where alone Python handles signals, or a number is none of a signal with handlers.

    Examples
    --------
    >>> import signal
    >>> mesh = scidata.init_mesh()
    >>> with scidata.StopSignal() as stop:
    ...     for step in range(1000):
    ...         if step == 2:
    ...             signal.raise_signal(signal.SIGUSR1)  # from SLURM, say
    ...         if stop.reached():
    ...             break  # and save
    >>> step
    2
    """

    def __init__(self, *numbers: int) -> None:
        asked = numbers or (signal.SIGTERM, signal.SIGUSR1)
        for number in asked:
            if not is_int(number) or number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                raise ConfigError(f"StopSignal cannot listen to {number!r}; give signals such as signal.SIGUSR1")
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("Python handles signals in the main thread alone: make the StopSignal there")
        self._lock = threading.Lock()
        self._num_done, self._is_asked = 0, False
        self._last: int | None = None  # the step to stop after, once it is known
        self._board: Board | None = board.begin()
        if self._board is not None:
            self._name = self._board.name_for("stop", self._board.ranks)
            self._posts = self._board.base.below(self._name)
            self._board.stops[self._name] = self._vote
            self._board.look_again()
        self._process = os.getpid()
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        for number in dict.fromkeys(asked):
            self._previous[number] = signal.signal(number, self._ask)

    def reached(self) -> bool:
        """Count one more finished step of this rank, and return whether to stop after it, equal on all ranks.

        Call it once at the end of each step.

        Raises
        ------
        ConfigError
            This was made before ``init_mesh``, so the other ranks would not hear of a signal; or not by all ranks.
        RankFailedError
            Another rank has failed, after a signal.

        Examples
        --------
        >>> mesh = scidata.init_mesh()
        >>> with scidata.StopSignal() as stop:
        ...     stop.reached()
        False
        """
        if self._board is None and board.has_peers():
            raise ConfigError("this StopSignal does not know the other ranks: make it after init_mesh")
        with self._lock:
            self._num_done += 1
            is_asked = self._is_asked
        if not is_asked:
            return False
        if self._last is None:
            self._last = self._agreed()
        return self._last is not None and self._num_done >= self._last

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: one that is not Python's

    def _ask(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: between any two lines of the main thread, so it takes no lock."""
        if os.getpid() != self._process:  # a fork, which its beginner ends by SIGTERM; SLURM signals these, too
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if self._board is None:
            self._is_asked, self._last = True, 0
        else:
            self._board.ask_to_stop(self._name)
        outer = getattr(self._previous.get(number), "__self__", None)
        if isinstance(outer, StopSignal):
            outer._ask(number, frame)

    def _vote(self) -> None:
        """Vote with the steps done so far; the next one counts on the result. By the board's thread."""
        assert self._board is not None
        with self._lock:
            self._is_asked, done = True, self._num_done
        self._posts.post(f"voter/{self._board.rank}", done)
        found = self._posts.vote("step", len(self._board.ranks), done)
        if found is not None:
            self._posts.post(_RESULT, max(found) + 1)

    def _agreed(self) -> int | None:
        """Wait for the votes, which threads cast at once; None if a rank has ended meanwhile."""
        assert self._board is not None
        events, began = self._board.events, time.monotonic()
        while not self._posts.wait([_RESULT], seconds=1.0, num_ranks=len(self._board.ranks)):
            ended = next((event for event in events if event.is_last or event.kind == "left"), None)
            if ended is not None and ended.kind != "left":
                raise ended.error()
            if ended is not None:
                return None
            without = [rank for rank in self._board.ranks if not self._posts.has(f"voter/{rank}")]
            if time.monotonic() - began > _PATIENCE and without:
                raise ConfigError(f"asked to stop, but rank {without[0]} has no StopSignal: make one on each rank")
        return int(self._posts.read(_RESULT))
