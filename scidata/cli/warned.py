"""Warnings of a command: one line each on stderr, however often they are given."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def warnings_on_stderr(reword: Callable[[str], str]) -> Iterator[None]:
    """Print what is warned of, or logged as a warning, once; at the end, how often what came again did."""
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
    from scidata.cli.output import console

    line = " ".join(text.split())
    console(stderr=True).print_parts(("warning: ", "bold yellow"), (line, "yellow"))
