"""One iteration of a loader under watch: what its loop says and asks, and what a thread beside it does.

The protocol is told in :mod:`scidata.loader.peers.watch`.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from scidata.device_mesh.board import stuck
from scidata.device_mesh.board.events import Event, ended_key, failure
from scidata.device_mesh.board.processes import ProcessId
from scidata.loader.peers.watch import BREAK_SECONDS, DUE_PERIOD, Watch

_log = logging.getLogger("scidata")

_PERIOD = 0.25  # s
_RANKS_A_PERIOD = 1024  # more ranks ask less often: one process answers them all
_SILENCE = 30.0  # s without a sign of life; a rank may hold the GIL for long
_SHORTEST_SILENCE = 1.0  # s, however short the loader's timeout is
_REMEMBERED = 1024  # steps
_JOIN_SECONDS = 5.0


class Session:
    """One iteration of a loader under watch. Ends with :meth:`end`; keeps no reference to who iterates.

    Parameters
    ----------
    watch
        Of the loader.
    describe
        Called by the thread: returns the fingerprint and the name of the data set.
    timeout
        How long the loop waits for its own data; nobody needs to wait longer for a rank that is silent.
    """

    def __init__(self, watch: Watch, describe: Callable[[], tuple[str, str]], timeout: float) -> None:
        self._watch = watch
        self._timeout = timeout
        self._describe = describe
        #: Called by the thread when there is something to raise: must make a waiting loop call :meth:`check`.
        self.wake: Callable[[], object] = lambda: None
        self._checksum = 0
        self._steps: dict[int, tuple[int, list[int]]] = {}
        self._latest = (-1, 0, [])  # type: tuple[int, int, list[int]]
        self._at = -1  # the step that the loop is in
        self._beat = 0
        self._alarmed = False
        self._loop = threading.get_ident()
        self._standing = stuck.Standing()
        self._armed = 0.0
        self._is_due = self._is_broken = self._disagreed = False
        self._leaders: Mapping[str, Any] | None = None
        self._neighbours: tuple[int, float] = (-1, time.monotonic())
        # SimpleQueue: end() may be called by a collection, in the middle of anything
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended = self._heard = False
        self._reported: set[int] = set()
        self._last_word = "left"
        self._asked = 0.0  # when the thread began to ask the store; 0 while it does not
        self._observing: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._iteration = watch.begin(self)
        self._threads = [
            threading.Thread(target=run, name="scidata-watch", daemon=True) for run in (self._run, self._observe)
        ]
        for thread in self._threads:
            thread.start()

    # -- the loop's --------------------------------------------------------------------------------------------------

    @property
    def at(self) -> int:
        """The step that the loop is in."""
        return max(0, self._at)

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`end` was called."""
        return self._ended

    def note(self, step: int, indices: Sequence[int]) -> None:
        """Say which samples this rank is about to read."""
        own = list(indices)
        self._checksum = zlib.crc32(repr(own).encode(), self._checksum)
        self._steps[step] = (self._checksum, own)
        self._steps.pop(step - _REMEMBERED, None)
        self._latest = (step, self._checksum, own)

    def check(self, step: int) -> None:
        """Raise what another rank has failed with, where it concerns this step.

        Raises
        ------
        RankFailedError, ConfigError
            With the rank and its own message.
        """
        self._at, self._loop = step, threading.get_ident()
        self._watch.shown.show(step)
        if self._alarmed and (event := self._watch.due(self._iteration, step)) is not None:
            self._heard = True
            raise event.error()

    def failed(self, step: int, error: BaseException, *, ahead: bool = False) -> None:
        """Tell all ranks that this one has failed in a step, or will fail when it comes to it. Any thread."""
        kind, key = ("ahead", step) if ahead else ("failed", -1)
        if self._heard or key in self._reported:  # of another rank's failure, or told already
            return
        self._reported.add(key)
        self._watch.is_told |= not ahead
        self._inbox.put(failure(kind, self._watch.rank, self._iteration, step, error))

    def timed_out(self, step: int, error: Exception) -> Exception:
        """Return what to raise where the loop has waited too long, and tell all ranks.

        A rank that was stopped meanwhile comes first: :meth:`_look_after` finds it after the same time, and those who
        began to wait before it was stopped would be a moment faster.
        """
        stopped = self._watch.stopped(f"when rank {self._watch.rank} had waited {self._timeout:g} s for its data")
        self._heard |= stopped is not None
        self.failed(step, error)
        return stopped or error

    def slow(self, step: int, text: str) -> None:
        """Tell the first rank that this one waits for its data."""
        _log.warning("rank %d %s", self._watch.rank, text)
        self._inbox.put(self._event("slow", step, f"rank {self._watch.rank} {text}"))

    def end(self, *, finished: bool = False, failed: bool = False) -> None:
        """Stop watching, once: the loop has come to its end, or to an error of its own, or was left in its middle."""
        if self._ended:
            return
        self._ended = True
        if not finished and not failed and self._alarmed:
            failed = self._left_because()
        if failed:
            self._watch.failed_in = self._iteration
        self._last_word = "done" if finished or failed else "left"
        self._watch.place = self.at, self._last_word
        self._watch.is_told |= self._heard
        self._inbox.put(None)
        self._observing.put(None)
        for thread in self._threads:
            if threading.current_thread() not in self._threads:
                thread.join(_JOIN_SECONDS if not self._watch.is_lost else 0.0)  # it may wait for a stopped process

    def _left_because(self) -> bool:
        """Return whether another rank's failure has ended the loop, though not here, and make sure it was said."""
        event = self._watch.due(self._iteration, self._at)
        if event is not None and not self._armed:  # another rank was faster with breaking its groups
            _log.error("%s; rank %d was in a step with it", event.text, self._watch.rank)
        return event is not None

    def _event(self, kind: str, step: int, text: str) -> Event:
        return Event(kind=kind, rank=self._watch.rank, iteration=self._iteration, step=step, text=text)

    # -- the thread's ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        watch = self._watch
        period = _PERIOD * max(1.0, len(watch.ranks) / _RANKS_A_PERIOD)
        process = ProcessId.own().to_json()
        if not watch.data[1]:
            try:
                watch.data = self._describe()
            except Exception as e:  # the loop will meet it too, or does not mind
                watch.data = "", f"a data set that cannot be named ({type(e).__name__})"
        try:
            while True:
                self._asked = time.monotonic()
                self._tick(process)
                self._asked = 0.0
                try:
                    message = self._inbox.get(timeout=DUE_PERIOD if self._is_due else period)
                except queue.Empty:
                    continue
                self._asked = time.monotonic()
                if message is None:
                    self._say_last(process)
                    return
                watch.post(message)
        except Exception as e:
            self._lost(e)
        finally:
            self._asked = 0.0

    def _say_last(self, process: Mapping[str, Any]) -> None:
        if not self._watch.is_alone:
            self._publish(self._last_word, process)
            if self._heard:
                self._watch.knows(self._watch.store, self._watch.rank)

    def _observe(self) -> None:
        """See whether the store still answers the other thread, which waits for it if it takes for ever."""
        while True:
            try:
                self._observing.get(timeout=_PERIOD)
                return
            except queue.Empty:
                since, limit = self._asked, self._patience(self._watch.others.host())
            if since and time.monotonic() - since > limit and not self._ended:
                self._watch.is_lost = True
                self._raise_until_the_end(self._watch.others.lost(self._iteration, f"for {limit:g} s"))
                return

    def _patience(self, process: ProcessId | None) -> float:
        """Return how long a rank may be silent: one that is seen to run may hold the GIL for long."""
        if process is None or process.runs() or not self._timeout:
            return _SILENCE
        return min(_SILENCE, max(_SHORTEST_SILENCE, self._timeout))

    def _lost(self, error: Exception) -> None:
        if self._ended or not dist.is_initialized():
            return  # everyone leaves, and the store with them
        self._watch.is_lost = True
        detail = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        self._raise_until_the_end(self._watch.others.lost(self._iteration, detail))

    def _raise_until_the_end(self, event: Event) -> None:
        self._watch.events.append(event)
        while not self._ended:
            self._alarm()
            time.sleep(DUE_PERIOD)

    def _tick(self, process: Mapping[str, Any]) -> None:
        watch = self._watch
        self._beat += 1
        if not self._watch.is_alone:
            self._talk(process)
        if any(event.iteration > watch.failed_in for event in watch.events):
            self._alarm()

    def _talk(self, process: Mapping[str, Any]) -> None:
        watch = self._watch
        self._publish("reading", process)
        host_ends = watch.rank != 0 and watch.store.check([ended_key(0)])
        for event in watch.new_events():
            if event.kind == "slow" and watch.rank == watch.ranks[0]:
                _log.warning("%s", event.text)
        if watch.leader != watch.rank and (found := self._record(watch.leader)) is not None:
            self._compare(found)
        if (found := self._record(watch.neighbour)) is not None:
            watch.others.keep(watch.neighbour, found)
            self._look_after(found)
        if watch.rank != 0 and watch.others.host() is None and (found := self._record(0)) is not None:
            watch.others.keep(0, found)
        if host_ends:  # with a word, which is among the events; the store may end with it
            watch.is_alone = True
            watch.knows(watch.store, watch.rank)

    def _publish(self, state: str, process: Mapping[str, Any]) -> None:
        step, checksum, indices = self._latest
        record = {"state": state, "process": process, "beat": self._beat, "iteration": self._iteration, "at": self.at}
        record |= {"shown": self._watch.shown.fd, "step": step, "checksum": checksum, "indices": indices[:8]}
        record |= {"data": self._watch.data[0], "name": self._watch.data[1]}
        self._watch.store.set(f"rank/{self._watch.rank}", json.dumps(record))

    def _record(self, rank: int) -> Mapping[str, Any] | None:
        key = f"rank/{rank}"
        found: Mapping[str, Any] | None = None
        if self._watch.store.check([key]):
            found = json.loads(self._watch.store.get(key))
        return found

    def _alarm(self) -> None:
        """Let the loop raise; call it back where it does not come to that, because it waits for the failed rank."""
        self._alarmed = True
        self.wake()
        event = self._watch.due(self._iteration, self._at)
        self._is_due = event is not None
        if event is None or self._ended:
            return
        if not self._armed:
            self._arm(event)
        elif not self._is_broken and (self._all_know(event) or time.monotonic() - self._armed > BREAK_SECONDS):
            self._is_broken = True
            stuck.break_groups()

    def _arm(self, event: Event) -> None:
        """See whether the loop waits in vain; if so, have it raise as soon as it comes back.

        All ranks do that before one breaks its groups, because that ends the collectives of the others, too.
        """
        how = self._standing.look(self._loop)
        if how is None or self._ended:
            return
        self._armed = time.monotonic()
        said = f"{event.text}; rank {self._watch.rank} waited for it in a collective, which it has broken off"
        _log.error("%s: its process groups are of no more use", said)
        if how == "call":
            stuck.raise_in(self._loop, replace(event, text=said).error())
        if not self._watch.is_lost and not self._watch.is_alone:
            self._watch.knows(self._watch.store, self._watch.rank)

    def _all_know(self, event: Event) -> bool:
        if self._watch.is_lost or self._watch.is_alone:
            return False
        return self._watch.all_know(self._watch.store, event.rank)

    def _compare(self, leaders: Mapping[str, Any]) -> None:
        """Compare with the first rank that reads the same samples, at a step that both have come to."""
        if leaders["iteration"] != self._iteration or self._disagreed:
            return
        if leaders["data"] != self._watch.data[0]:
            self._disagree(leaders, leaders["step"])
            return
        self._leaders = leaders if self._leaders is None else self._leaders  # wait for it, however far it goes ahead
        step = self._leaders["step"]
        if step <= self._latest[0]:
            own = self._steps.get(step)
            if own is not None and own[0] != self._leaders["checksum"]:
                self._disagree(self._leaders, step)
            self._leaders = None

    def _disagree(self, leaders: Mapping[str, Any], step: int) -> None:
        self._disagreed = True
        own, watch = self._steps.get(step, (0, []))[1], self._watch
        first = f"sample {leaders['indices']} of {leaders['name']} ({leaders['data']})"
        second = f"sample {own[:8]} of {self._watch.data[1]} ({self._watch.data[0]})"
        where = f"in step {step}" if first != second else f"in a step before {step}, where both read {first}"
        text = (
            f"ranks {watch.leader} and {watch.rank}, which share their samples, read different ones {where}: rank "
            f"{watch.leader} {first}, rank {watch.rank} {second}; give both the same data set, and a sampler whose "
            "order does not depend on the rank, such as scidata.DistributedSampler; or watch=False, where one rank "
            "iterates by itself"
        )
        event = self._event("disagree", -1, text)
        watch.post(event)
        watch.events.append(event)

    def _look_after(self, record: Mapping[str, Any]) -> None:
        """Report the next rank where it is in its loop and gives no sign of life."""
        now, watch, state = time.monotonic(), self._watch, record["state"]
        if state == "done" or (state == "left" and record["iteration"] != self._iteration):
            return
        if record["beat"] != self._neighbours[0]:
            self._neighbours = record["beat"], now
        process = ProcessId(**record["process"])
        silence = now - self._neighbours[1]
        ended, silent = process.has_ended(), state == "reading" and silence > self._patience(process)
        again = self._record(watch.neighbour)
        if not (ended or silent) or again is None or again["state"] != state:  # it may have said so in between
            return
        if watch.store.check([ended_key(watch.neighbour)]):  # with a word: an event, which comes
            return
        how = "has died, without a word" if ended else f"has given no sign of life for {silence:.0f} s"
        if not ended and process.runs() is False:
            how += ": its process is stopped"
        how = how if state == "reading" else "has left the loop in its middle, and ended"
        text = watch.others.died(watch.neighbour, record, how)
        step = -1 if state == "reading" else record["at"] + 1  # all may have left it there
        event = Event(kind="failed", rank=watch.neighbour, iteration=self._iteration, step=step, text=text)
        if not any(e.rank == event.rank and e.kind == "failed" for e in watch.events):
            watch.post(event)
            watch.events.append(event)
