"""An output has one owner: the living run that was the last to write its name beside it.

The first rank of a run writes ``owner.json`` into the folder of the progress, and a sign of life every
:data:`BEAT_S` into a file of the run's own. Whether another owner lives is seen from its process where it is of this
machine, and elsewhere from the age of that sign. A living one is refused by name; the output of a dead one is free. A
run that ``takeover=True`` has robbed finds another name there, at its next step, within a second, or at its end.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from scidata.data.output.places import LocalPlace, Place
from scidata.device_mesh.board.processes import ProcessId
from scidata.errors import OutputError

BEAT_S = 10.0  # s between two signs of life
LEASE_S = 60.0  # s without one, after which a process on another machine counts as dead
_LOOK_S = 1.0
_OWNER = "owner.json"


@dataclass(frozen=True, kw_only=True)
class Holder(ProcessId):
    """A process that writes an output, or did so."""

    run: str
    since: str

    def __str__(self) -> str:
        own = ProcessId.own()
        here = " (this one)" if (self.pid, self.machine) == (own.pid, own.machine) else ""
        return f"process {self.pid}{here} on {self.host}, since {self.since}"

    def silence(self, place: Place) -> float | None:
        """Return the seconds since its last sign of life, 0 if it is visible; None if it is dead."""
        if self.can_be_seen:
            return None if self.has_ended() else 0.0
        with contextlib.suppress(TypeError, ValueError):
            silence = time.time() - float(place.get(_beat(self.run)) or "")
            return silence if silence < LEASE_S else None
        return None


def _beat(run: str) -> str:
    return f"alive-{run}.txt"


def holder_of(place: Place) -> Holder | None:
    """Return the latest owner of an output."""
    text = place.get(_OWNER)
    try:
        return None if text is None else Holder(**json.loads(text))
    except (ValueError, TypeError):  # truncated, or of another version
        return None


def living(place: Place) -> Holder | None:
    """Return the other run that writes an output; None if there is none."""
    found = holder_of(place)
    return None if found is None or found.silence(place) is None else found


def refusal(place: Place, holder: Holder) -> OutputError:
    """Return the error for a run whose output is being written by another run."""
    silence = holder.silence(place) or 0.0
    heard = f"; it was last heard of {silence:.0f} s ago, and counts as dead after {LEASE_S:.0f} s" if silence else ""
    return OutputError(
        f"{place.path}: {holder}, writes it{heard}; wait for its end, or end it, or begin again with overwrite=True, "
        "takeover=True: then that run fails"
    )


class Owner:
    """This run's ownership of its output."""

    def __init__(self, place: Place, run: str) -> None:
        self._place, self.run = place, run
        self._every = _LOOK_S if isinstance(place, LocalPlace) else BEAT_S  # requests cost
        self._looked = time.monotonic()
        self._ends, self._finishes = threading.Event(), False
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Write this run's name, on the first rank, under :meth:`Place.locked`. OutputError: another run was faster."""
        self._place.put(_beat(self.run), str(time.time()))
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        text = json.dumps(asdict(ProcessId.own()) | {"run": self.run, "since": now})
        try:
            self._place.put(_OWNER, text, new=self._place.get(_OWNER) is None)
        except FileExistsError:
            other = living(self._place)
            self._place.drop(_beat(self.run))
            lost = OutputError(f"{self._place.path}: another run has begun it at the same time")
            raise lost if other is None else refusal(self._place, other) from None

    @property
    def files(self) -> tuple[str, ...]:
        """The files written by :meth:`take`."""
        return _OWNER, _beat(self.run)

    def watch(self, lost: Callable[[OutputError], None]) -> None:
        """On the first rank, give signs of life, and call ``lost``, from a thread, if another run takes over."""
        self._thread = threading.Thread(target=self._watch, args=(lost,), name="scidata-owner", daemon=True)
        self._thread.start()

    def _watch(self, lost: Callable[[OutputError], None]) -> None:
        beaten = time.monotonic()
        while not self._ends.wait(self._every):
            try:
                if not self._finishes:  # finishing removes the file read here
                    self.check()
                if time.monotonic() - beaten >= BEAT_S:
                    self._place.put(_beat(self.run), str(time.time()))
                    beaten = time.monotonic()
            except OutputError as e:
                if not self._finishes:
                    lost(e)
                    return
            except Exception:  # full disk or unreachable server: the next write raises
                continue

    def look(self) -> None:
        """Raise as :meth:`check`, at a rate that costs little."""
        if time.monotonic() - self._looked > (0.0 if isinstance(self._place, LocalPlace) else BEAT_S):
            self.check()

    def check(self) -> None:
        """Raise if the output now belongs to another run."""
        found = holder_of(self._place)
        self._looked = time.monotonic()
        if found is None:
            raise OutputError(
                f"{self._place.path}: this run does not write it any more: its progress is gone; another run has "
                "finished it, or somebody has removed it"
            )
        if found.run != self.run:
            raise OutputError(f"{self._place.path}: this run does not write it any more: {found}, has taken it over")

    def finish(self) -> None:
        """Rename the finished output to its final name, if this run still owns it. Raises as :meth:`check`."""
        with self._place.locked():
            self.check()
            self._finishes = True
            self._place.finish()

    def release(self) -> None:
        """Remove the name if this run still owns the output."""
        self._ends.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with contextlib.suppress(OSError, OutputError), self._place.locked():
            self._place.drop(_beat(self.run))
            self.check()
            self._place.drop(_OWNER)
