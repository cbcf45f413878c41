"""Whether a process of this machine still runs, and the step that it was in when it ended."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """Identity of a process across machines and time."""

    machine: str  # the running kernel and its process namespace: where the number means something
    host: str  # its name, for people
    # pid, started: numbers are used again; with the time it was started, in the kernel's ticks, they are not
    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessId:
        """Return this process."""
        pid = os.getpid()
        return cls(machine=_machine(), host=socket.gethostname(), pid=pid, started=_status(pid)[1])

    @property
    def can_be_seen(self) -> bool:
        """Whether its state can be seen from here."""
        return self.machine == _machine() and bool(self.started)

    def _state(self) -> str:
        """Return Linux's one-letter process state; "" if it has ended and was reaped."""
        state, started = _status(self.pid)
        return state if started == self.started else ""

    def has_ended(self) -> bool:
        """Whether it has certainly ended; False if unknown."""
        return self.can_be_seen and self._state() in ("", "Z", "X")  # a zombie waits for its parent only

    def runs(self) -> bool | None:
        """Whether it exists and is not stopped (SIGSTOP, a debugger); None if unknown."""
        return self._state() not in ("", "Z", "X", "T", "t") if self.can_be_seen else None

    def is_there(self) -> bool:
        """Whether it runs or was not reaped yet. False if unknown."""
        return self.can_be_seen and self._state() not in ("", "X", "T", "t")


class StepShown:
    """A number that other processes of the machine can read, also of a process that was killed meanwhile.

    It lies in memory without a name, which ends with the last process that has it: no kill leaves a file behind.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("scidata-step") if hasattr(os, "memfd_create") else -1

    def show(self, step: int) -> None:
        """Leave the number."""
        if self.fd >= 0:
            os.pwrite(self.fd, step.to_bytes(8, "little", signed=True), 0)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end, os may be gone
        if self.fd >= 0:
            close(self.fd)


class StepSeen:
    """Another process's :class:`StepShown`, opened while that lives."""

    def __init__(self, process: ProcessId, fd: int) -> None:
        self._file: BinaryIO | None = None
        if fd >= 0 and process.can_be_seen:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                self._file = open(f"/proc/{process.pid}/fd/{fd}", "rb")  # noqa: SIM115

    def step(self) -> int | None:
        """Return the last step number that it posted; None if unknown."""
        return (
            None if self._file is None else int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little", signed=True)
        )


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def _status(pid: int) -> tuple[str, str]:
    """Return the one-letter state and the start time; both empty without such a process (or without Linux)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may hold anything
    except OSError:
        return "", ""
    return fields[0], fields[19]
