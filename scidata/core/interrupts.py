"""Leave signals sent to a whole process group to the process that started the others.

A terminal sends Ctrl-C to all of them, and SLURM what it sends before the time is up (see ``scidata.StopSignal``).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Block signals until the end, and in child processes until they call :func:`ignore_interrupts`.

    A process takes seconds to import its modules, and an interrupt would print a traceback meanwhile; so would the end
    of its beginner before it has sent the function to run.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        resource_tracker.ensure_running()  # keeps the mask, else SIGUSR1 would end it; SIGINT passes here
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if callable(handler):  # another thread receives the signal; Python then runs the handler in this thread
            signal.signal(signal.SIGINT, lambda number, _: came.append(number))
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if came:
            signal.raise_signal(signal.SIGINT)


def ignore_interrupts() -> None:
    """Ignore these signals in this process from the start; its parent ends it."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # for child programs
