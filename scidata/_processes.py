"""Whether a process of this machine still runs."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ProcessId"]


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

    def has_ended(self) -> bool:
        """Whether it has certainly ended; False where that cannot be seen from here."""
        if self.machine != _machine() or not self.started:
            return False
        state, started = _status(self.pid)
        return state in ("", "Z", "X") or started != self.started  # a zombie waits for its parent only


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
