"""The door through which scidata reaches into other threads and breaks process groups.

Purpose: a thread in a collective waits for minutes for a rank that will not come, and torch cannot cancel a gloo
collective. These functions detect the wait, make the thread raise the reason, and end the collective.

Who may pass: the board (:mod:`scidata.device_mesh.board`), where several ranks have a mesh of
:func:`scidata.init_mesh`, or ShardTensors. Nothing else calls these five;
``tests/unit/device_mesh/test_stuck.py`` counts the callers.

- :class:`StallDetector` looks, once another rank's failure is known, at where the thread is that would wait for it. It
  changes nothing.
- :func:`collective_of` finds the collective that a thread stands in, and the line of the script. It changes nothing.
- :func:`raise_in` has that thread raise the failed rank's error, and only where it is in a collective, so that the
  error takes the place of torch's.
- :func:`hang_up` closes the connections to the store, where a second after that the thread stands still: it waits there
  for a rank to join a new group.
- :func:`break_groups` ends all collectives of the process, for good: when all ranks know of the failure, or soon after
  it; and when a process ends that has left its loop in the middle, so that the others do not wait for it.

How to do without: the process group's timeout ends a wait in any case. ``DataLoader(..., watch=False)`` keeps a
loader off the board. A process that ends with an error which nobody has caught breaks its groups before its
interpreter ends (:func:`scidata.device_mesh.groups.end_well`).
"""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import socket
import sys
import time
from typing import Any

import torch.distributed as dist

from scidata.device_mesh.devices import is_started
from scidata.device_mesh.groups import break_groups
from scidata.device_mesh.torch_internals import COLLECTIVES, HANDLERS_OF_ERRORS

__all__ = ["StallDetector", "break_groups", "collective_of", "hang_up", "raise_in"]

_STUCK = 0.3  # s at one place in a collective, without work
_ANYWHERE = 3.0  # s at one place in somebody else's code; it may wait for a handle of a collective, or for the device
_IDLE = 0.2  # share of the time that may be work

_OF_TWO = ("send", "recv")
_PIPELINES = os.path.join("distributed", "pipelining", "")

_SCIDATA = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
#: Where Python code runs before an error reaches the user's frames, so that another error can take its place.
_HANDLING = (*HANDLERS_OF_ERRORS, os.path.join(_SCIDATA, "shard", ""))
_OURS = (os.path.join(_SCIDATA, ""), *COLLECTIVES)
_NO_SCRIPTS = (os.path.join(_SCIDATA, ""), os.path.join(os.path.dirname(os.path.dirname(dist.__file__)), ""))


class StallDetector:
    """Samples a thread's position several times a second."""

    is_inside = False  # whether the last look has seen it in a collective's code
    is_of_two = False  # whether that was a send or a receive, which other ranks have no part in
    seconds = 0.0  # that the thread had stood at one place when it was last seen

    def __init__(self) -> None:
        self._place: tuple[int, int, int] | None = None
        self._since = self._worked = 0.0

    def look(self, thread: int, *, anywhere: bool = True) -> str | None:
        """Return ``"call"`` or ``"somewhere"`` where the thread waits in vain; only a call can be told why.

        ``anywhere``: it may wait for a handle in code of its own; else in a function of torch's or scidata's only.
        """
        frame = sys._current_frames().get(thread)
        if frame is None:
            return None
        file, place = frame.f_code.co_filename, (thread, id(frame), frame.f_lasti)
        self.is_inside = file.startswith((*_HANDLING, *COLLECTIVES))
        self.is_of_two = file.startswith(COLLECTIVES) and (frame.f_code.co_name in _OF_TWO or _PIPELINES in file)
        while not anywhere and frame is not None:
            anywhere, frame = frame.f_code.co_filename.startswith(_OURS), frame.f_back
        del frame
        now, worked = time.monotonic(), _seconds_of_work(thread)
        if place != self._place:
            self._place, self._since, self._worked, self.seconds = place, now, worked, 0.0
            return None
        self.seconds = stood = now - self._since
        idle = worked - self._worked < _IDLE * stood
        if idle and stood > _STUCK and file.startswith(_HANDLING):
            return "call"
        if idle and stood > _STUCK and file.startswith(COLLECTIVES):
            return "somewhere"
        spins = is_started()  # the host may work while it waits for the device
        return "somewhere" if anywhere and (idle or spins) and stood > _ANYWHERE else None


def _seconds_of_work(thread: int) -> float:
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):  # not there on this system, or ended
        return 0.0


def collective_of(thread: int) -> tuple[dist.ProcessGroup, str, str] | None:
    """Return the group of the collective that a thread stands in, its name, and the line of the script; or None."""
    frame = sys._current_frames().get(thread)
    group, name = None, ""
    while frame is not None and frame.f_code.co_filename.startswith(_NO_SCRIPTS):
        if group is None and "group" in (values := frame.f_locals):
            group, name = values["group"] or dist.group.WORLD, frame.f_code.co_name
        frame = frame.f_back
    if frame is None or not isinstance(group, dist.ProcessGroup):
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    return group, name, f"`{linecache.getline(file, line).strip()[:80]}` ({os.path.basename(file)}:{line})"


def raise_in(thread: int, error: BaseException) -> None:
    """Raise an error in a thread, as soon as it runs Python code."""

    class Raised(type(error)):  # type: ignore[misc]  # only a class can be given, which is then called
        def __new__(cls, *_: Any) -> Any:
            return error

    error.__suppress_context__ = True  # of torch's error, which it may come in the middle of
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Raised))


def hang_up(port: int) -> None:
    """Close this process's connections to a port, and thereby end with an error whatever waits for an answer there."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
