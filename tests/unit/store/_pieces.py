"""Pieces of work for spawned processes, which import this module; so it imports little."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def killed(index: int, tick: Callable[[float], None]) -> None:
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def halves(index: int, tick: Callable[[float], None]) -> None:
    tick(0.5)
    tick(0.5)


class Unpicklable(Exception):  # noqa: N818
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def unpicklable(index: int, tick: Callable[[float], None]) -> None:
    if index == 1:
        raise Unpicklable("at", str(index))
