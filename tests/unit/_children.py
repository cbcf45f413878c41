"""Processes that tests begin: forked ones, which start at once, and programs, interrupted as a terminal does it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from scidata.interop import torch_worker
from scidata.sources import torch_files
from scidata.testing.ranks import fork_server

__all__ = ["Forked", "forked_torch_worker", "interrupted"]


class Forked:
    """``fn(*args)`` in a process of the fork server, which has torch loaded: it starts in milliseconds.

    Parameters
    ----------
    fn
        At the top of a module. It gets plain arguments, and what it returns is pickled.
    """

    def __init__(self, fn: Callable[..., object], *args: object) -> None:
        context = fork_server()
        self._results, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_forked, args=(theirs, fn, args))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        return self._process.is_alive()

    def kill(self) -> int:
        """Kill it; return its exit code: -9, where it had not ended."""
        self._process.kill()
        return self.wait()

    def wait(self, timeout: float = 120) -> int:
        """Wait for its end; return its exit code."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            raise AssertionError("a forked process did not end")
        assert self._process.exitcode is not None
        return self._process.exitcode

    def result(self, timeout: float = 120) -> Any:
        """Return what the function returned; fail with its traceback where it raised."""
        assert self._results.poll(timeout), "a forked process gave no result"
        try:
            succeeded, value = self._results.recv()
        except EOFError:
            succeeded, value = False, f"ended with exit code {self.wait()}"
        assert succeeded, value
        self.wait()
        return value


@pytest.fixture
def forked_torch_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files of ``torch.save`` in processes that have torch loaded, which takes seconds else."""
    fork_torch_worker(monkeypatch)


def fork_torch_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do so for as long as a patch holds."""

    def run(path: str, folder: str) -> subprocess.CompletedProcess[str]:
        Forked(torch_worker.main, path, folder).result()
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(torch_files, "_run_worker", run)


def _forked(results: Connection, fn: Callable[..., object], args: Sequence[object]) -> None:
    gc.freeze()  # as ranks do
    try:
        results.send((True, fn(*args)))
    except Exception:
        results.send((False, traceback.format_exc()))


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
