"""The processes that a program has begun, seen from outside."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["wait_for_spawned"]


def wait_for_spawned(pid: int, num: int, *, importing: str = "") -> list[int]:
    """Return the ids of the processes that ``multiprocessing`` has spawned for a program, once they are ``num``.

    With ``importing``, once each has a library of that package in its memory.
    """
    deadline = time.monotonic() + 60
    while len(found := [child for child in _spawned(pid) if importing in _text(child, "maps")]) != num:
        assert time.monotonic() < deadline, f"{len(found)} processes, not {num}"
        time.sleep(0.001)
    return found


def _spawned(pid: int) -> list[int]:
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [child for child in children if "spawn_main" in _text(child, "cmdline")]


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:  # has ended
        return ""
