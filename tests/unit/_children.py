"""Programs that spawn processes, interrupted as a terminal does it: all of them at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["interrupted"]


def interrupted(
    command: Sequence[object], num_spawned: int, *, importing: str = "", line: str = ""
) -> tuple[int, str, list[int]]:
    """Run Python; interrupt it and what it has spawned; return its exit code, its stderr and ids of those processes.

    Parameters
    ----------
    command
        Arguments of Python. The program sets ``signal.default_int_handler``: background jobs ignore the signal.
    num_spawned, importing
        The interrupt comes once it has spawned so many processes, and each has a library of that package in memory.
    line
        What the program prints before that.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # a group of its own, for the signal
    ) as process:
        try:
            assert process.stdout is not None
            assert not line or process.stdout.readline().strip() == line
            spawned = _wait_for_spawned(process.pid, num_spawned, importing)
            os.killpg(process.pid, signal.SIGINT)
            errors = process.communicate(timeout=60)[1]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, errors, spawned


def _wait_for_spawned(pid: int, num: int, importing: str) -> list[int]:
    deadline = time.monotonic() + 60
    while len(found := [child for child in _spawned(pid) if importing in _text(child, "maps")]) != num:
        assert time.monotonic() < deadline, f"{len(found)} processes, not {num}"
        time.sleep(0.005)
    return found


def _spawned(pid: int) -> list[int]:
    processes = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    children = [process for process in processes if f"\nPPid:\t{pid}\n" in _text(process, "status")]
    return [child for child in children if "spawn_main" in _text(child, "cmdline")]


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:  # has ended
        return ""
