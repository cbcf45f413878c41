"""Process groups when something fails: why a collective has, how to end one that waits in vain, and the process's end.

torch cannot call a gloo collective off: ``abort()`` does nothing there. But gloo breaks all connections of a group when
a receive on it runs out of time, and whoever waits on them gets an error; so a receive of one millisecond, from another
thread, ends all that wait. NCCL's communicators are aborted, which is made for it.

And the end of a process that has groups. A thread of gloo's keeps the tensors of a collective until a moment after that
has ended. Where it lets go of one that Python has let go of before, it waits for the GIL; if the interpreter begins to
end meanwhile, that ends the thread, and C++ then the process, with SIGABRT (seen with torch 2.13;
``tests/faults/torch_alone.py`` shows it without scidata; pytorch/pytorch#190489). So nothing may be under way in those
threads when the interpreter begins to end: :func:`end_well` sees to that, just before.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from scidata.device_mesh.devices import kind_of
from scidata.device_mesh.torch_internals import abort_together, backend_of, collectives_logger, process_groups
from scidata.errors import SciDataError

_TAGS = range(0x5C1DA7A, 0x5C1DA7A + 8)  # gloo has a context for each network interface, and takes them by the tag
_MOMENT = datetime.timedelta(milliseconds=1)
_BREAK_SECONDS = 1.0  # for the threads that break groups, when the process ends; they take milliseconds
_SETTLE_SECONDS = 1.0  # s to wait for gloo's threads when the process ends
_LOOKS, _LOOK = 3, 0.002  # in a row at which they must rest, and s between two


def break_groups() -> None:
    """End all collectives of this process with an error, now and later: its process groups are of no more use.

    Who may call it, and when, says :mod:`scidata.device_mesh.board.stuck`. Does not wait for that. Other ranks'
    collectives with this one end, too.
    """
    groups = [group for group in process_groups() if group.size() > 1]
    for group in groups:
        backends = dist.get_backend_config(group)
        if "gloo" in backends:
            threading.Thread(target=break_group, args=(group,), name="scidata-break", daemon=True).start()
    own = [backend_of(group, kind) for group in groups if (kind := kind_of(group)) != "cpu"]
    if own:
        threading.Thread(target=abort_together, args=(own,), name="scidata-break", daemon=True).start()


def break_group(group: Any) -> None:
    """Make everything that waits on a gloo group, here and on other ranks, raise; the group is unusable afterwards."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    for tag in _TAGS:
        for other in others:  # one that has ended fails at once, and breaks nothing; once broken, all do
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], other, tag).wait(_MOMENT)


# -- in place of torch's word ----------------------------------------------------------------------------------------


@dataclass
class _Process:
    """State of this process, for callbacks of torch and of the interpreter."""

    explainers: list[Callable[[], Exception | None]] = field(default_factory=list)
    own_world: weakref.ref[Any] | None = None
    registered: int = 0  # its number: a fork inherits all of this, and none of the threads
    fails: bool = False


_process = _Process()


def _raise_reason(record: logging.LogRecord) -> bool:
    """Logging filter that raises the reason in place of a collective's error."""
    error = sys.exc_info()[1]
    try:
        reason = None if error is None else explained(error)
    except SciDataError as e:  # by raise_in(), meanwhile
        reason = e
    if reason is not None:
        raise reason from None
    return True


def add_explainer(explain: Callable[[], Exception | None], *, first: bool = False) -> None:
    """From now on, have the functions of ``torch.distributed`` raise the returned error, when they fail for a peer.

    ``explain`` is called when a function has failed, and returns None if it knows no reason; then the next one is
    called. Work that bypasses torch's Python functions (``Work.wait``, the end of DDP's backward) keeps torch's error;
    if that is not caught, the printed traceback is the reason's.
    """
    _process.explainers.insert(0 if first else len(_process.explainers), explain)
    logger = collectives_logger()
    if logger is not None:
        logger.addFilter(_raise_reason)  # once: a logger has a filter only once
    if not isinstance(sys.excepthook, _Excepthook):
        sys.excepthook = _Excepthook(sys.excepthook)


class _Excepthook:
    """Prints the traceback of the reason if a collective failed for one."""

    def __init__(self, previous: Callable[..., object]) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        reason = explained(error)
        if reason is not None:
            sys.last_value = error = reason.with_traceback(trace)
            kind, error.__suppress_context__ = type(error), True
        self._previous(kind, error, trace)


def explained(error: BaseException) -> Exception | None:
    """Return the error to raise in place of a collective's own, if a peer is its reason."""
    found = (explain() for explain in _process.explainers if _is_of_a_collective(error))
    return next((reason for reason in found if reason is not None), None)


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Raise the reason in place of a collective's error in calls that torch's logger does not see."""
    try:
        yield
    except RuntimeError as error:
        reason = explained(error)
        if reason is None:
            raise
        raise reason from None


def _is_of_a_collective(error: BaseException) -> bool:
    words = str(error).lower()
    of_torch = isinstance(error, RuntimeError) and not isinstance(error, SciDataError)
    return of_torch and any(word in words for word in ("gloo", "nccl", "peer", "pair closure"))


# -- the end of the process ------------------------------------------------------------------------------------------


def own_groups() -> None:
    """Note that scidata began the process group and destroys it at exit."""
    _process.own_world = weakref.ref(dist.group.WORLD)
    end_well()


def end_well() -> None:
    """Finish all work in threads of process groups before the interpreter ends.

    Acts after functions that the script has registered with ``atexit`` since. After an uncaught error, collectives
    under way are ended with an error of their own. Groups are destroyed only where scidata has begun them.
    """
    if _process.registered != os.getpid():
        _process.registered = os.getpid()
        atexit.register(_end, _process.registered)


def fail_at_end() -> None:
    """Make the ending process exit with code 1."""
    _process.fails = True


def uncaught() -> BaseException | None:
    """Return the error that ends the process, once the interpreter has printed it."""
    return getattr(sys, "last_value", None)


def _end(process: int) -> None:
    if os.getpid() != process:  # a fork has none of the threads
        return
    _end_groups()
    if _process.fails:  # the interpreter has its exit code by now
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)


def _end_groups() -> None:
    if uncaught() is not None and dist.is_initialized():
        break_groups()
    deadline = time.monotonic() + _BREAK_SECONDS
    for thread in threading.enumerate():
        if thread.name == "scidata-break":
            thread.join(max(0.0, deadline - time.monotonic()))
    _settle()  # also where the script has destroyed its groups: a mesh may hold them
    if not dist.is_initialized():
        return
    configs = [str(dist.get_backend_config(group)) for group in process_groups()]
    own = _process.own_world is not None and _process.own_world() is dist.group.WORLD
    if own and all(part.endswith(":gloo") for config in configs for part in config.split(",")):
        dist.destroy_process_group()  # waits for the threads; NCCL's may wait for other ranks, and torch ends it


def _settle() -> None:
    """Sleep, so that the threads of gloo get the GIL, until none of them has anything to do."""
    deadline, rested = time.monotonic() + _SETTLE_SECONDS, 0
    while rested < _LOOKS and time.monotonic() < deadline:
        rested = 0 if _gloo_runs() else rested + 1
        time.sleep(_LOOK)


def _gloo_runs() -> bool:
    """Whether a thread of gloo is running or runnable. False if unknown."""
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/stat", encoding="utf-8") as file:
                head, _, rest = file.read().rpartition(")")
                if "gloo" in head and rest.split()[0] != "S":
                    return True
    return False
