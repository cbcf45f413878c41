"""Ranks that read together find out, beside their work, when one of them fails, dies or reads something else.

No rank waits for another here, and no collective is called: what ranks say to each other lies in the key-value store
that the process group was started with (TCPStore under torchrun), whatever backend the group has. While a loader is
iterated, one thread a rank looks there four times a second, over a connection of its own; the loop itself leaves a
number a step, and pays nothing else.

The protocol, below ``scidata/loader<n>/``, where n counts the loaders that a rank has iterated:

``rank/<r>``
    What rank r is at: iteration, step, a checksum over all indices so far, the last of them, its process, and a count
    that goes up while it lives. Only ``r`` writes it.
``events``, ``event/<i>``
    A row of events that only grows: a rank adds 1 to ``events``, and writes its event under the number it got. An
    event has an iteration and a step. Every rank raises it when it comes to that step, or at once where it is past
    it: so a read that fails ahead of its use ends all ranks at the same step, before they are in a collective there.

Each rank compares its checksum with that of the first rank which reads the same samples, and watches one other rank:
the next one of the mesh. On the same machine that is a look at its process; otherwise its count must go up.

A rank that is past the step already, and waits in a collective for the one that failed, is brought back by breaking
its process groups (:mod:`scidata.loader.peers.stuck`): the collective ends with an error, in whose place the failed
rank's own is raised where that can be; a line in the log says it in any case. The groups are of no use afterwards.
Where torch ends a collective because the other's process is gone, what has become of that is raised in place of torch's
word, too.

A process that ends leaves below the same name why (``ended/<r>``): after an error it waits until the others know
(``knows/<iteration>/<r>``), for a second at most; if it keeps the store, for a moment in any case.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scidata.device_mesh import groups
from scidata.errors import RankFailedError
from scidata.loader.peers import stuck
from scidata.loader.peers.events import (
    Event,
    Others,
    Store,
    common_store,
    ended_key,
    events_of,
    failure,
    has_left,
    post,
    within,
)
from scidata.loader.peers.processes import ProcessId, StepShown

__all__ = ["Event", "Session", "Watch"]

_log = logging.getLogger("scidata")

_PERIOD = 0.25  # s
_RANKS_A_PERIOD = 1024  # more ranks ask less often: one process answers them all
_SILENCE = 30.0  # s without a sign of life; a rank may hold the GIL for long
_SHORTEST_SILENCE = 1.0  # s, however short the loader's timeout is
_REMEMBERED = 1024  # steps
_JOIN_SECONDS = 5.0
_TOGETHER = 0.7  # s that a rank waits for others to know why, before it breaks groups that they share
_DUE_PERIOD = 0.05  # s, while the loop does not come back, though it should
_REASON_SECONDS = 1.0  # for another rank's end to be seen, after a collective with it has failed
_GOODBYE_SECONDS = 1.0  # that a process which has failed waits until the others know
_HOST_GOODBYE_SECONDS = 0.6  # that one which has not failed keeps the store for those who are still in their loops


class Watch:
    """What one loader knows of the other ranks that iterate it.

    Parameters
    ----------
    mesh
        Of all ranks that iterate it.
    dp_axis
        Ranks of the same place along it read the same samples.
    """

    def __init__(self, mesh: DeviceMesh, dp_axis: str | None) -> None:
        self._group = weakref.ref(dist.group.WORLD)
        self.rank = dist.get_rank()
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self.dp_rank = 0 if dp_axis is None else mesh.get_local_rank(dp_axis)
        same = mesh.mesh
        if dp_axis is not None:
            same = same.select((mesh.mesh_dim_names or ()).index(dp_axis), self.dp_rank)
        self.leader = int(same.flatten()[0])
        self.data = ("", "")  # fingerprint and name of the data set, once the thread has asked for them
        self.iteration = 0
        self.failed_in = 0  # the last iteration that an error has ended on this rank
        self._next_event = 0
        self._events: list[Event] = []
        base = common_store()
        self.prefix = f"loader{base.add(f'loaders/{self.rank}', 1)}"
        self._base = dist.PrefixStore(self.prefix, base)  # type: ignore[attr-defined]
        self.store = self.connect()
        self.shown = StepShown()
        self.others = Others(self.rank, self.ranks)
        self.session: weakref.ref[Session] | None = None
        self.place = (-1, "done")  # the last step of the latest iteration that is over, and how it has ended
        self.is_told = False  # the others, of an error that has ended the latest iteration
        self.is_lost = False  # the store
        self.is_alone = False  # the process that keeps it has ended, with a word
        _watches.add(self)

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dp_axis: str | None) -> Watch | None:
        """Return the watch of a mesh of several ranks; None where there is nobody to watch, or no way to."""
        if mesh is None or mesh.size() == 1 or not dist.is_initialized() or dist.get_backend() in ("fake", "mpi"):
            return None
        return cls(mesh, dp_axis)

    @property
    def is_over(self) -> bool:
        """Whether the process group, and the store with it, was destroyed since."""
        return dist.group.WORLD is not self._group() or dist.group.WORLD is None

    def connect(self) -> Store:
        """Return one more connection to the store, for another thread."""
        return self._base.clone()  # type: ignore[attr-defined, unused-ignore]  # torch's stubs lag behind

    @property
    def neighbour(self) -> int:
        """The rank that this one watches."""
        return self.ranks[(self.ranks.index(self.rank) + 1) % len(self.ranks)]

    def begin(self, describe: Callable[[], tuple[str, str]], timeout: float = 0.0) -> Session:
        """Begin an iteration of a data set; ``describe``, called by the thread, returns its fingerprint and name.

        ``timeout`` is how long the loop waits for its own data; nobody needs to wait longer for a rank that is silent.
        """
        self.iteration += 1
        self.is_told = False
        session = Session(self, describe, timeout)
        self.session = weakref.ref(session)
        return session

    @property
    def is_iterated(self) -> bool:
        """Whether a loop is under way."""
        session = None if self.session is None else self.session()
        return session is not None and not session.has_ended

    # -- when a collective fails, or the process ends ----------------------------------------------------------------

    def reason(self) -> Exception | None:
        """Return what to raise in place of a collective's error; None where nothing has become of another rank."""
        deadline = time.monotonic() + _REASON_SECONDS
        known = (event for event in self._events if event.iteration > self.failed_in and event.kind != "ahead")
        event = next(known, None)
        if event is None and self._is_answered:
            find = lambda: self.others.cause(self._base, self.iteration, self.failed_in, deadline)  # noqa: E731
            event = within(_REASON_SECONDS + _TOGETHER, find)
        if event is None and not self._is_answered:
            event = self.others.lost(self.iteration, "since a collective failed")
        if event is None:
            return None
        self.is_told = True
        return event.error()

    def stopped(self, when: str) -> Exception | None:
        """Return the error of a rank whose process is seen to be stopped; None where all run."""
        if self._is_answered:
            event = within(_REASON_SECONDS, lambda: self.others.stopped(self._base, self.iteration, when))
        elif self.is_alone:
            return None
        else:
            self.is_lost = True
            event = self.others.lost(self.iteration, when)
        return None if event is None else event.error()

    @property
    def _is_answered(self) -> bool:
        """Whether the store may still answer; torch prints a backtrace of its own where it is asked and does not."""
        host = self.others.host()
        return not self.is_lost and not self.is_alone and (host is None or host.runs() is not False)

    def leave(self, error: BaseException | None) -> None:
        """Say why this process ends, and give the others the time to hear of it."""
        session = None if self.session is None else self.session()
        if session is not None:
            session.end()
        if self.iteration == 0:
            return
        step, how = self.place
        is_news = error is not None and not self.is_told and not isinstance(error, RankFailedError)
        event = None if error is not None else has_left(self.rank, self.iteration, step, how != "left")
        if error is not None and is_news:
            event = failure("failed", self.rank, self.iteration, step if how == "left" else -1, error)
        waits = _HOST_GOODBYE_SECONDS if self.rank == 0 else 0.0
        if error is not None and not isinstance(error, RankFailedError):
            waits = _GOODBYE_SECONDS
        if self._is_answered:
            within(waits + _TOGETHER, lambda: self._say_goodbye(event, waits))
        if how == "left":  # what is under way would wait for ranks that will not come
            stuck.break_groups()

    def _say_goodbye(self, event: Event | None, waits: float) -> None:
        deadline = time.monotonic() + waits
        if event is not None:
            post(self._base, event)
        self._base.set(ended_key(self.rank), "")
        self.knows(self._base, self.rank)
        while time.monotonic() < deadline and not self.all_know(self._base, self.rank):
            time.sleep(_DUE_PERIOD / 5)

    def knows(self, store: Store, rank: int) -> None:
        """Say that this rank knows why the iteration ends, or has ended itself."""
        store.set(f"knows/{self.iteration}/{rank}", "")

    def all_know(self, store: Store, failed: int) -> bool:
        """Whether all do, but the one that has failed."""
        return bool(store.check([f"knows/{self.iteration}/{rank}" for rank in self.ranks if rank != failed]))

    # -- the watching thread's ---------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Tell all ranks."""
        post(self.store, event)

    def new_events(self) -> list[Event]:
        """Return what other ranks have posted since the last call, and matters now or later."""
        fresh = []
        for event in events_of(self.store, self._next_event):
            self._next_event += 1
            # an iteration that has failed here is over; others may report the same failure later
            if event.rank != self.rank and event.iteration > self.failed_in:
                fresh.append(event)
        self._events += [event for event in fresh if event.kind != "slow"]
        return fresh

    def due(self, iteration: int, step: int) -> Event | None:
        """Return the first event that is to be raised at this step."""
        for event in self._events:
            over = event.iteration <= self.failed_in or (event.kind == "ahead" and event.iteration != iteration)
            if not over and (event.iteration, event.step) <= (iteration, step):
                return event
        return None


class _Watches:
    """Those of this process: asked when a collective fails, and when the process ends."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._latest: Watch | None = None  # also when its loader is gone: a collective may fail after the loop
        self._process = 0

    def add(self, watch: Watch) -> None:
        self._alive.add(watch)
        self._latest = watch
        if self._process != os.getpid():
            self._process = os.getpid()
            groups.end_well()
            atexit.register(self._leave)  # runs before groups are destroyed: it is registered after that
            groups.set_explainer(self._reason)

    def _reason(self) -> Exception | None:
        iterated = [watch for watch in self._alive if watch.is_iterated]
        watch = iterated[0] if iterated else self._latest
        return None if watch is None or watch.is_over or self._process != os.getpid() else watch.reason()

    def _leave(self) -> None:
        for watch in list(self._alive):
            if self._process == os.getpid() and not watch.is_over:
                watch.leave(groups.uncaught())


_watches = _Watches()


class Session:
    """One iteration of a loader under watch. Ends with :meth:`end`; keeps no reference to who iterates."""

    def __init__(self, watch: Watch, describe: Callable[[], tuple[str, str]], timeout: float) -> None:
        self._watch = watch
        self._timeout = timeout
        self._iteration = watch.iteration
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
                    message = self._inbox.get(timeout=_DUE_PERIOD if self._is_due else period)
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
        self._watch._events.append(event)
        while not self._ended:
            self._sound()
            time.sleep(_DUE_PERIOD)

    def _tick(self, process: Mapping[str, Any]) -> None:
        watch = self._watch
        self._beat += 1
        if not self._watch.is_alone:
            self._talk(process)
        if any(event.iteration > watch.failed_in for event in watch._events):
            self._sound()

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

    def _sound(self) -> None:
        """Let the loop raise; call it back where it does not come to that, because it waits for the failed rank."""
        self._alarmed = True
        self.wake()
        event = self._watch.due(self._iteration, self._at)
        self._is_due = event is not None
        if event is None or self._ended:
            return
        if not self._armed:
            self._arm(event)
        elif not self._is_broken and (self._all_know(event) or time.monotonic() - self._armed > _TOGETHER):
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
        watch._events.append(event)

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
        if not any(e.rank == event.rank and e.kind == "failed" for e in watch._events):
            watch.post(event)
            watch._events.append(event)
