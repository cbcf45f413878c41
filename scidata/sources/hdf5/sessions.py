"""The HDF5 files that this process has open: how many, and of which version."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scidata.sources.access.files import Version, most_open

if TYPE_CHECKING:
    import h5py

_LONGEST_CALL = 10.0  # seconds that another thread may be inside HDF5


@dataclass(eq=False)
class Session:
    """What belongs to one process: its lock, and its file once opened."""

    path: str
    lock: threading.RLock = field(default_factory=threading.RLock)
    h5: h5py.File | None = None
    version: Version | None = None  # of the file that is open

    def close(self) -> None:
        """Close the file; the lock is held."""
        if self.h5 is not None:
            self.h5.close()
            self.h5 = None


class OpenSessions:
    """The sessions of this process whose files are open, least recently used first: a bounded number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: OrderedDict[int, weakref.ref[Session]] = OrderedDict()
        self._pid = os.getpid()

    def use(self, session: Session) -> None:
        """Count a session as used just now, and close others where there are too many."""
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]
        with self._lock:
            self._sessions[id(session)] = weakref.ref(session)
            self._sessions.move_to_end(id(session))
            excess = len(self._sessions) - most_open() // 4
            old = [self._sessions.popitem(last=False)[1]() for _ in range(excess)]
        for other in old:
            if other is not None:
                _close(other, wait=0)  # one that is being used closes another time

    def close_older(self, path: str, version: Version) -> None:
        """Close earlier versions of a file, which HDF5 would take for the one that is opened anew in its place."""
        if self._pid != os.getpid():  # they are the parent's
            return
        with self._lock:
            sessions = [found for ref in self._sessions.values() if (found := ref()) is not None]
        for other in sessions:
            if other.h5 is not None and other.path == path and other.version != version:
                _close(other, wait=_LONGEST_CALL)


def _close(session: Session, *, wait: float) -> None:
    if session.lock.acquire(timeout=wait):
        try:
            session.close()
        finally:
            session.lock.release()


open_sessions = OpenSessions()
