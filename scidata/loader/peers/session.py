"""Watch over one iteration of a loader: calls from its loop and from the board's thread.

The protocol is told in :mod:`scidata.loader.peers.watch`.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import TypedDict

from scidata.device_mesh.board.events import Event, Place, in_words
from scidata.loader.peers.watch import Watch

_log = logging.getLogger("scidata")

_REMEMBERED = 1024  # steps
_SHOWN = 8  # samples of a step


class _Reading(TypedDict):
    """A rank's latest step, a checksum over all samples so far, their first, and at the end the ``total`` of steps."""

    iteration: int
    step: int
    checksum: int
    indices: list[int]
    data: str
    name: str
    total: int | None


class Session:
    """One iteration of a loader under watch. Ends with :meth:`end`; keeps no reference to the iterator.

    - ``describe``: called by the thread: returns the fingerprint and the name of the data set.
    - ``timeout``: how long the loop waits for its own data; nobody needs to wait longer for a rank that is silent.
    - ``wake``: called by the board's thread when there is something to raise: must make a waiting loop call
      :meth:`check`.
    - ``is_agreed``: whether the ranks have compared their arguments: that error says more than the thread's would.
    - ``meeting``, ``is_aligned``: those of the watch, in this iteration.
    """

    def __init__(self, watch: Watch, describe: Callable[[], tuple[str, str]], timeout: float) -> None:
        self._watch, self._board = watch, watch.board
        self.name, self.timeout, self.thread = watch.name, timeout, threading.get_ident()
        self._describe = describe
        self.wake: Callable[[], object] = lambda: None
        self.leave: Callable[[], object] = lambda: None
        self.is_agreed = False
        self._checksum = 0
        self._steps: dict[int, tuple[int, list[int]]] = {}
        self._latest: tuple[int, int, list[int]] = (-1, 0, [])
        self._total: int | None = None  # number of steps, once the loop has finished
        self._at = -1  # the step that the loop is in
        self._alarmed = self._disagreed = False
        self._leaders: _Reading | None = None
        self._heard: Event | None = None
        self._reported: set[int] = set()
        self._state = "reading"
        self._iteration = watch.begin()
        self.meeting, self.is_aligned = watch.meeting, watch.is_aligned
        self._board.attach(self)

    # -- the loop's --------------------------------------------------------------------------------------------------

    @property
    def at(self) -> int:
        """The step that the loop is in."""
        return max(0, self._at)

    @property
    def place(self) -> Place:
        """Iteration, step, and ``"reading"``, ``"done"``, or ``"left"`` in the middle."""
        return self._iteration, self.at, self._state

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`end` was called."""
        return self._state != "reading"

    def note(self, step: int, indices: Sequence[int]) -> None:
        """Announce the samples that this rank is about to read."""
        own = list(indices)
        self._checksum = zlib.crc32(repr(own).encode(), self._checksum)
        self._steps[step] = (self._checksum, own)
        self._steps.pop(step - _REMEMBERED, None)
        self._latest = (step, self._checksum, own)

    def first_step(self) -> dict[str, str]:
        """Describe the samples of the first step; empty if none were noted."""
        return {"the samples of step 0": _shown(self._steps.get(0, (0, []))[1])}

    def whole_order(self) -> dict[str, str]:
        """Return the order of the epoch that the loop has come to the end of, in words."""
        step, checksum, own = self._latest
        self._total = step + 1
        facts = {"the number of steps": f"{step + 1}", "the order": f"{checksum:08x}, ending with {_shown(own)}"}
        fingerprint = self._watch.data[0]  # "" until the thread knows
        return facts | ({"the fingerprint of the data set": fingerprint} if fingerprint else {})

    def found(self, text: str, *, tell: bool) -> None:
        """Raise in the loop, at its next step or wait, that ranks disagree; ``tell``: on all, before a collective."""
        event = self._event("disagree", -1, text)
        self._board.events.append(self._board.post(event) if tell else event)

    def go_on_alone(self) -> None:
        """Stop waiting for the ranks that have not come.

        Where an iteration was left in its middle before, a first batch that this rank alone has looked at perhaps, the
        others may be in another iteration than this one, and there is nothing to compare any more.
        """
        self.meeting.is_past = True
        if self._watch.has_left:
            self.is_aligned = self._watch.is_aligned = False

    def all_know(self) -> None:
        """Do not announce the error that this rank is about to raise: the other ranks raise it, too."""
        self._reported.add(-1)

    def check(self, step: int) -> None:
        """Raise the failure of another rank, with its own message, if it concerns this step."""
        self._at, self.thread = step, threading.get_ident()
        self._board.shown.show(step)
        if self._alarmed and (event := self._due(step)) is not None:
            self._heard = event
            raise event.error()

    def failed(self, step: int, error: BaseException, *, ahead: bool = False) -> None:
        """Announce to all ranks that this rank has failed in a step, or will fail when it reaches it. Any thread."""
        kind, key = ("ahead", step) if ahead else ("failed", -1)
        if self._heard or key in self._reported:  # of another rank's failure, or told already
            return
        self._reported.add(key)
        event = self._event(kind, step, f"rank {self._watch.rank} failed in step {step}: {in_words(error)}")
        if not ahead:
            self._board.told = event
        self._board.say(event)

    def timed_out(self, step: int, error: Exception) -> Exception:
        """Return the error of a loop that has waited too long, and tell all ranks.

        A rank that was stopped meanwhile comes first: :meth:`_look_after` finds it after the same time, and ranks
        that began to wait before it was stopped would be a moment faster.
        """
        stopped = self._board.stopped(f"when rank {self._watch.rank} had waited {self.timeout:g} s for its data")
        if stopped is not None:
            self._heard = stopped
            return stopped.error()
        self.failed(step, error)
        return error

    def slow(self, step: int, text: str) -> None:
        """Tell the first rank that this rank waits for its data."""
        _log.warning("rank %d %s", self._watch.rank, text)
        self._board.say(self._event("slow", step, f"rank {self._watch.rank} {text}"))

    def end(self, *, finished: bool = False, failed: bool = False) -> None:
        """Stop watching, once: the loop has ended, failed, or was left."""
        if self._state != "reading":
            return
        if not finished and not failed and self._alarmed:
            failed = self._left_because()
        self.meeting.is_past |= not failed
        if failed:
            self._board.over[self.name] = self._iteration
        if finished:
            self._board.shown.show(-1)
        self._state = "done" if finished or failed else "left"
        self._watch.has_left |= self._state == "left"
        self._board.detach(self)

    def _left_because(self) -> bool:
        event = self._due(self._at)
        if event is not None and not self._board.has_said(event):  # another rank was faster with breaking its groups
            _log.error("%s; rank %d was in a step with it", event.text, self._watch.rank)
        return event is not None

    def _due(self, step: int) -> Event | None:
        """Return the first event that has to be raised at this step."""
        over = self._board.over.get(self.name, 0)
        due = (event for event in self._board.events if event.is_due(self.name, self._iteration, step, over))
        return next(due, None)

    def _event(self, kind: str, step: int, text: str) -> Event:
        return Event(kind=kind, rank=self._watch.rank, text=text, places={self.name: (self._iteration, step)})

    # -- the thread's ------------------------------------------------------------------------------------------------

    def alarm(self) -> Event | None:
        """Make the loop raise the due event, and return it in case the loop never gets there."""
        if not self._board.events or self._state != "reading":
            return None
        self._alarmed = True
        event = self._due(self._at)
        self.wake()
        return event

    def tick(self) -> None:
        """Post this rank's reading, or compare it with the first rank's: the board's thread, with each sign of life."""
        watch = self._watch
        if not watch.data[1]:
            try:
                watch.data = self._describe()
            except Exception as e:  # the loop will meet it too, or does not mind
                watch.data = "", f"a data set that cannot be named ({type(e).__name__})"
        if watch.leader == watch.rank:  # no rank compares with the others' readings
            self._publish()
        elif self._state == "reading" and (leaders := watch.posts.find(f"rank/{watch.leader}")) is not None:
            self._compare(leaders)
        if self._state == "left" or not self.is_aligned:
            self.leave()
        if self._state != "reading" and self._heard is not None:
            self._board.knows(self._heard)

    def _publish(self) -> None:
        step, checksum, indices = self._latest
        iteration = self._iteration if self.is_aligned else 0
        data, name = self._watch.data
        record: _Reading = {
            "iteration": iteration, "step": step, "checksum": checksum, "indices": indices[:_SHOWN], "data": data,
            "name": name, "total": self._total,
        }  # fmt: skip
        self._watch.posts.post(f"rank/{self._watch.rank}", record)

    def _compare(self, leaders: _Reading) -> None:
        """Compare with the first rank that reads the same samples, at a step that both have reached."""
        if leaders["iteration"] != self._iteration or self._disagreed or not self.is_agreed:
            return
        if leaders["data"] != self._watch.data[0]:
            self._disagree(leaders, leaders["step"])
            return
        if any(total is not None and step >= total for total, step in self._ends(leaders)):
            self._disagree(leaders, leaders["step"])
            return
        self._leaders = leaders if self._leaders is None else self._leaders  # wait for it, however far it goes ahead
        step = self._leaders["step"]
        if step <= self._latest[0]:
            own = self._steps.get(step)
            if own is not None and own[0] != self._leaders["checksum"]:
                self._disagree(self._leaders, step)
            self._leaders = None

    def _ends(self, leaders: _Reading) -> list[tuple[int | None, int]]:
        """Return how many steps each of the two ranks has finished, and the other's latest step."""
        return [(leaders["total"], self._latest[0]), (self._total, leaders["step"])]

    def _disagree(self, leaders: _Reading, step: int) -> None:
        self._disagreed = True
        own, watch = self._steps.get(step, (0, []))[1], self._watch
        first = f"sample {leaders['indices']} of {leaders['name']} ({leaders['data']})"
        second = f"sample {own[:_SHOWN]} of {self._watch.data[1]} ({self._watch.data[0]})"
        where = f"in step {step}" if first != second else f"in a step before {step}, where both read {first}"
        for total, further in self._ends(leaders):
            if total is not None and further >= total:
                where = f"after {total} steps, which are all that one of them has"
        text = (
            f"ranks {watch.leader} and {watch.rank}, which share their samples, read different ones {where}: rank "
            f"{watch.leader} {first}, rank {watch.rank} {second}; give both the same data set, and a sampler whose "
            "order does not depend on the rank, such as scidata.DistributedSampler; or watch=False, where one rank "
            "iterates by itself"
        )
        self._board.events.append(self._board.post(self._event("disagree", -1, text)))


def _shown(indices: Sequence[int]) -> str:
    shown = f"{list(indices[:_SHOWN])}"
    return shown if len(indices) <= _SHOWN else f"{shown[:-1]}, …] ({zlib.crc32(repr(indices).encode()):08x})"
