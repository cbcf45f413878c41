"""Progress of a command on stderr, as a bar or a line now and then, and warnings, once each."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from scidata.cli.escaped import spoke
from scidata.cli.output import console, is_terminal

QUIET = 8.0  # seconds without a line, at most


class Pulse:
    """The present task of a command, printed every :data:`QUIET` seconds in which it prints nothing."""

    def __init__(self, task: str) -> None:
        self.task, self.unit = task, ""
        self.done, self.total = 0.0, 0.0
        self.is_drawn = False  # as a bar
        self._began = time.monotonic()

    def run(self, over: threading.Event) -> None:
        """Print lines until it is over."""
        while not over.wait(min(1.0, QUIET / 4)):
            if not self.is_drawn and time.monotonic() - spoke.at >= QUIET:
                console(stderr=True).print(self.text(), soft_wrap=True)

    def text(self) -> str:
        """Return the line."""
        done = f"{self.done:.3g} of {self.total:g}{self.unit}, " if self.total else ""
        return f"{self.task}: {done}{time.monotonic() - self._began:.0f} s"


_now: list[Pulse] = []  # of the command that runs


@contextmanager
def pulse(task: str) -> Iterator[None]:
    """Print progress while a command runs."""
    own, over = Pulse(task), threading.Event()
    thread = threading.Thread(target=own.run, args=(over,), name="scidata-pulse", daemon=True)
    _now.append(own)
    spoke.at = time.monotonic()
    thread.start()
    try:
        yield
    finally:
        _now.pop()
        over.set()
        thread.join()


@contextmanager
def progress(task: str, total: float, unit: str = "") -> Iterator[Callable[..., None]]:
    """Draw a bar on stderr, if that is a terminal; the value is called with the steps done, of ``total``."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    own = _now[-1] if _now else Pulse(task)
    before = own.task
    own.task, own.total, own.done, own.unit = task, total, 0.0, unit
    own.is_drawn = is_terminal(sys.stderr)
    shares = ".1f" if unit else ".0f"
    count = TextColumn(f"{{task.completed:{shares}}}/{{task.total:.0f}}{unit}")
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    drawn = Progress(*columns, console=console(stderr=True), transient=True)
    with drawn if own.is_drawn else nullcontext():
        bar = drawn.add_task(task, total=total)

        def tick(share: float = 1) -> None:
            own.done += share
            drawn.advance(bar, share)

        try:
            yield tick
        finally:
            own.task, own.total, own.is_drawn = before, 0.0, False


def doing(task: str) -> None:
    """Name the next task, where a command has several that take long."""
    if _now:
        _now[-1].task, _now[-1].total = task, 0.0


@contextmanager
def warnings_on_stderr(reword: Callable[[str], str]) -> Iterator[None]:
    """Print each warning, also of the log, once; at the end the number of repetitions."""
    times: Counter[str] = Counter()

    def tell(text: str) -> None:
        times[text] += 1
        if times[text] == 1:
            _print(reword(text))

    def show(message: Warning | str, *place: object) -> None:
        tell(str(message))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    handler, log = Handler(logging.WARNING), logging.getLogger("scidata")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]
            yield
    finally:
        log.removeHandler(handler)
        for text, count in times.items():
            if count > 1:
                _print(f"{reword(text)} ({count} times)")


def _print(text: str) -> None:
    line = " ".join(text.split())
    console(stderr=True).print_parts(("warning: ", "bold yellow"), (line, "yellow"))
