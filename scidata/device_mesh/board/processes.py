"""Whether a process of this machine still runs, and the step that it was in when it ended."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """A process, told apart from others of all machines and times.

    Attributes
    ----------
    machine
        The running kernel and its process namespace: where the number means something.
    host
        Its name, for people.
    pid, started
        Numbers are used again; with the time it was started, in the kernel's ticks, they are not.
    """

    machine: str
    host: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessId:
        """Return this process."""
        pid = os.getpid()
        return cls(machine=_machine(), host=socket.gethostname(), pid=pid, started=_status(pid)[1])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @property
    def can_be_seen(self) -> bool:
        """Whether its state can be seen from here."""
        return self.machine == _machine() and bool(self.started)

    def has_ended(self) -> bool:
        """Whether it has certainly ended; False where that cannot be seen from here."""
        if not self.can_be_seen:
            return False
        state, started = _status(self.pid)
        return state in ("", "Z", "X") or started != self.started  # a zombie waits for its parent only

    def runs(self) -> bool | None:
        """Whether it is there, and not stopped (SIGSTOP, a debugger); None where that cannot be seen from here."""
        if not self.can_be_seen:
            return None
        state, started = _status(self.pid)
        return started == self.started and state not in ("", "Z", "X", "T", "t")

    def is_ending(self) -> bool:
        """Whether it is there, not stopped; it is until its parent has taken note. False where that cannot be seen."""
        state, started = _status(self.pid) if self.can_be_seen else ("", "")
        return started == self.started and state not in ("", "X", "T", "t")


class StepShown:
    """A number that other processes of the machine can read, also of a process that was killed meanwhile.

    It lies in memory without a name, which ends with the last process that has it: no kill leaves a file behind.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("scidata-step") if hasattr(os, "memfd_create") else -1
        self._memory: mmap.mmap | None = None
        if self.fd >= 0:
            os.ftruncate(self.fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(self.fd, mmap.PAGESIZE)

    def show(self, step: int) -> None:
        """Leave the number; costs no call of the system."""
        if self._memory is not None:
            self._memory[:8] = step.to_bytes(8, "little", signed=True)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end, os may be gone
        if self._memory is not None:
            self._memory.close()
            close(self.fd)


class StepSeen:
    """Another process's :class:`StepShown`, opened while that lives."""

    def __init__(self, process: ProcessId, fd: int) -> None:
        self._memory: mmap.mmap | None = None
        if fd >= 0 and process.runs() is not None:
            try:
                with open(f"/proc/{process.pid}/fd/{fd}", "rb") as file:
                    self._memory = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
            except (OSError, ValueError):  # it has ended, or is another user's
                pass

    def step(self) -> int | None:
        """Return what it has left last; None where that cannot be seen."""
        return None if self._memory is None else int.from_bytes(self._memory[:8], "little", signed=True)


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return socket.gethostname()


def _status(pid: int) -> tuple[str, str]:
    """Return the state, as one letter, and the start time; both empty where there is no such process (or no Linux)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the name before it may hold anything
    except OSError:
        return "", ""
    return fields[0], fields[19]
