"""The board of this process: a thread beside its work that hears of other ranks, and has them hear of this one.

The protocol is told in :mod:`scidata.device_mesh.board`.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch.distributed as dist

from scidata.device_mesh.board import stuck
from scidata.device_mesh.board.events import Event, PeerState, events_of, failed, in_words, left, post
from scidata.device_mesh.board.processes import ProcessId, StepShown
from scidata.device_mesh.board.recall import BREAK_SECONDS, Recall, waits_for
from scidata.device_mesh.board.store import Store, call_with_timeout, common_store, port_of
from scidata.device_mesh.board.told import Loop, RecordedError
from scidata.device_mesh.torch_internals import num_started
from scidata.errors import RankFailedError

_log = logging.getLogger("scidata")

_PERIOD = 0.25  # s between two looks
_RANKS_A_PERIOD = 1024  # more ranks ask less often: one process answers them all
_BEAT = 4  # looks from one sign of life to the next
_DUE_PERIOD = 0.05  # s between two looks while a rank may wait in vain
_SILENCE = 30.0  # s without a sign of life; a rank may hold the GIL for long
_GAP = 3.0  # s between two looks, after which silence says nothing
_SHORTEST_SILENCE = 1.0  # s of a stopped process, however short the timeouts are
_REASON_SECONDS = 1.0  # for another rank's end to be seen, after a collective with it has failed
_GOODBYE_SECONDS = 1.0  # that a process which has failed waits until the others know
_HOST_SECONDS = 2.0  # that one which keeps the store waits until the others do not ask for it any more
_CULPRIT_SECONDS = 2.0  # that a process which another one ends waits until that has ended
_MET_SECONDS = 0.2  # after an error of an operation, without a collective since
_JOIN_SECONDS = 5.0
_NUM_LOOPS = 8  # that are remembered


class Board:
    """What this process knows of the other ranks.

    Attributes
    ----------
    events
        Of other ranks; those of a loader are forgotten by nobody, since they may be the reason of what fails later.
    over
        By a loader's name, its last iteration that an error has ended here.
    told
        What this rank has posted of an error of its own that has ended a loop.
    last_error
        The latest error of an operation on this rank.
    loops
        That are under way.
    thread
        Which is looked after where no loop is.
    is_lost, is_alone
        Whether the store does not answer; whether the process that keeps it has ended, with a word.
    """

    def __init__(self, host: int | None) -> None:
        self._group = weakref.ref(dist.group.WORLD)
        self.rank, self.ranks = dist.get_rank(), range(dist.get_world_size())
        common = common_store()
        self._base = dist.PrefixStore(f"board{common.add(f'boards/{self.rank}', 1)}", common)  # type: ignore[attr-defined]
        self.store = self._base.clone()  # type: ignore[attr-defined, unused-ignore]  # a connection of its own
        self._port = port_of(common)
        self._host = None if self._port is None else host
        self.thread = threading.get_ident()
        self.timeout = 0.0
        self.shown = StepShown()
        self.shown.show(-1)
        self.peers = PeerState(self.rank, self.ranks)
        self.events: list[Event] = []
        self.over: dict[str, int] = {}
        self.told: Event | None = None
        self.loops: list[Loop] = []
        self._places: dict[str, tuple[int, int, str]] = {}
        self.last_error: RecordedError | None = None
        self._posted: list[RecordedError] = []  # not taken back yet
        self._own: Event | None = None  # the last of them
        self._num_read = self._count = 0
        self._num_loaders: dict[str, int] = {}
        self._looked = time.monotonic()
        self._heard = (-1, time.monotonic(), 0.0)  # the neighbour's beat, since when, and since when it is stopped
        self._recall = Recall()
        self.is_lost = self.is_alone = False
        # SimpleQueue: a loop's end() may be called by a collection, in the middle of anything
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._observing: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asked = 0.0  # when the thread began to ask the store; 0 while it does not
        self._has_ended = False
        self._threads = [
            threading.Thread(target=run, name="scidata-board", daemon=True) for run in (self._run, self._observe)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the process group, and the store with it, was destroyed since."""
        return dist.group.WORLD is None or dist.group.WORLD is not self._group()

    @cached_property
    def talks(self) -> Store:
        """A connection for all loaders of this rank: torch takes a third of a second for one."""
        return self._base.clone()  # type: ignore[attr-defined, unused-ignore]

    # -- of loops, and operations ------------------------------------------------------------------------------------

    def attach(self, loop: Loop) -> None:
        """Begin to call a loop, and to look after its thread."""
        self.told = None
        self._places.pop(loop.name, None)
        self._inbox.put(lambda: self.loops.append(loop))

    def detach(self, loop: Loop) -> None:
        """End that, once the others can know how it has ended."""
        done = threading.Event()

        def leave() -> None:
            self._remember(loop)
            self.loops = [each for each in self.loops if each is not loop]
            try:
                if not self.is_alone and not self.is_lost:
                    loop.tick()
                    self._beat()
            finally:
                done.set()

        self._inbox.put(leave)
        if threading.current_thread() not in self._threads and not self.is_lost and not self.is_over:
            done.wait(_JOIN_SECONDS)  # it may wait for a stopped process

    def say(self, event: Event) -> None:
        """Post an event soon."""
        self._inbox.put(lambda: self.post(event))

    def post(self, event: Event) -> Event:
        """Post an event now, from the board's thread."""
        return event if self.is_alone or self.is_lost else post(self.store, event)

    def record_error(self, error: BaseException) -> None:
        """Remember the latest error of an operation; the others hear of it where they wait for this rank."""
        if not isinstance(error, RankFailedError):
            held = vars(error)["_scidata_held"] = set[None]()  # errors of Python's own have no weak references
            self.last_error = RecordedError(in_words(error), num_started(), time.monotonic(), weakref.ref(held))
            self._inbox.put(lambda: None)

    def new_loader(self, ranks: Sequence[int]) -> str:
        """Return the name of one more loader of some ranks, which the others of them give to theirs that is like it."""
        of = "" if len(ranks) == len(self.ranks) else f"of{zlib.crc32(repr(ranks).encode()):08x}"
        self._num_loaders[of] = self._num_loaders.get(of, 0) + 1
        return f"loader{self._num_loaders[of]}{of}"

    def has_said(self, event: Event) -> bool:
        """Whether the log has it that a collective was broken off for an event."""
        return self._recall.breaks is not None and self._recall.breaks.number == event.number

    def knows(self, event: Event) -> None:
        """Say that this rank has heard of an event, and can do without who has posted it."""
        if event.number >= 0 and not self.is_lost and (not self.is_alone or event.rank == self._host):
            self.store.set(f"knows/{event.number}/{self.rank}", "")

    def has(self, key: str) -> bool:
        """Whether a word was left; True where that cannot be known any more. By the board's thread."""
        return not self.is_answered or bool(self.store.check([key]))

    def leave_word(self, key: str) -> None:
        """Leave a word, where the store still answers. By the board's thread."""
        if self.is_answered:
            self.store.set(key, "")

    def hang_up(self) -> None:
        """Let go of the store for good, so that this process does not wait for an answer."""
        self.is_lost = True
        if self._port is not None:
            stuck.hang_up(self._port)

    def all_know(self, event: Event, store: Store | None = None) -> bool:
        """Whether all ranks have heard of an event, or have ended, but this one and the event's."""
        asked = self.store if store is None else store
        others = [rank for rank in self.ranks if rank not in (self.rank, event.rank)]
        return all(asked.check([f"knows/{event.number}/{rank}"]) or asked.check([f"ended/{rank}"]) for rank in others)

    def _remember(self, loop: Loop) -> None:
        self._places[loop.name] = loop.place
        while len(self._places) > _NUM_LOOPS:
            del self._places[next(iter(self._places))]

    # -- the thread's ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        period = _PERIOD * max(1.0, len(self.ranks) / _RANKS_A_PERIOD)
        work: Any = self._introduce
        while work is not None:
            try:
                self._asked = time.monotonic()
                work()
                if self.is_over:
                    self._say_over()
                    return
                self._tick()
            except Exception as e:
                if self.is_over or self._has_ended:
                    return
                self._lose(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
            finally:
                self._asked = 0.0
            try:
                work = self._inbox.get(timeout=_DUE_PERIOD if self._recall.is_due else period)
            except queue.Empty:
                work = self._nothing

    def _nothing(self) -> None:
        """Look again."""

    def _introduce(self) -> None:
        record = {"process": ProcessId.own().to_json(), "shown": self.shown.fd}
        self.store.set(f"process/{self.rank}", json.dumps(record))

    def _say_over(self) -> None:
        if self.is_answered:
            post(
                self.store,
                Event(kind="left", rank=self.rank, text=f"rank {self.rank} has destroyed its process groups"),
            )
            self.store.set(f"ended/{self.rank}", "")

    def _observe(self) -> None:
        """See whether the store still answers the other thread, which waits for it if it takes for ever."""
        looked = time.monotonic()
        while True:
            try:
                self._observing.get(timeout=_PERIOD)
                return
            except queue.Empty:
                looked, before = time.monotonic(), looked
            if self.is_over:
                return
            since, limit = self._asked, self._patience(self._host_process())
            if since and looked - before > _GAP:  # this process was stopped itself
                self._asked = looked
                continue
            if since and time.monotonic() - since > limit:
                self._lose(f"for {limit:g} s")
                while not self._has_ended and not self.is_over and self._asked:
                    self._recall.look(self)
                    time.sleep(_DUE_PERIOD)
                return

    def _patience(self, process: ProcessId | None) -> float:
        """Return how long a rank may be silent: one that is seen to run may hold the GIL for long."""
        limits = [limit for limit in (self.timeout, *(loop.timeout for loop in self.loops)) if limit]
        if process is None or process.runs() is not False or not limits:
            return _SILENCE
        return min(_SILENCE, max(_SHORTEST_SILENCE, min(limits)))

    def _lose(self, detail: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.events.append(self.peers.lost(detail))

    def _tick(self) -> None:
        self._count += 1
        if not self.is_alone and not self.is_lost:
            for loop in self.loops:
                self._remember(loop)
                loop.tick()
            if self._count % _BEAT == 1:
                self._beat()
            self._hear()
            self._say_what_was_met()
            if not self.is_alone:
                self._look_after()
        self._recall.look(self)

    def _beat(self) -> None:
        self.store.set(f"beat/{self.rank}", json.dumps({"beat": self._count, "loops": self._places}))

    def _hear(self) -> None:
        for event in events_of(self.store, self._num_read):
            self._num_read += 1
            if event.rank == self.rank:
                continue
            if event.kind == "slow":
                if self.rank == self.ranks[0]:
                    _log.warning("%s", event.text)
                continue
            self.events.append(event)
            if event.rank == self._host and event.is_last:  # with a word; the store may end with it
                self.is_alone = True
                self.knows(event)
                return

    def _say_what_was_met(self) -> None:
        met, started = self.last_error, num_started()
        for old in [each for each in self._posted if each is not met or each.started != started or each.held() is None]:
            self._posted.remove(old)  # it has gone on
            if old.event is not None:
                self.store.set(f"over/{old.event.number}", "")
        if met is None or met.event or met.started != started or met.held() is None:
            return
        if time.monotonic() - met.time < _MET_SECONDS:
            return
        text = f"rank {self.rank} has met an error in an operation, and does not come to what others wait for: "
        met.event = self.post(Event(kind="met", rank=self.rank, text=text + met.words, started=met.started))
        self._posted.append(met)
        self._own = met.event

    def let_go(self) -> None:
        """Keep the store no more, once all have destroyed their groups: none is to come to it instead of the next."""
        self._inbox.put(self._nothing)
        self._threads[0].join(_JOIN_SECONDS if self.is_answered else 0.0)
        others = [f"ended/{rank}" for rank in self.ranks if rank != self.rank]
        awaited, deadline = (others if self.rank == self._host else ["gone"]), time.monotonic() + _JOIN_SECONDS
        while self._host is not None and self.is_answered and time.monotonic() < deadline:
            if call_with_timeout(_REASON_SECONDS, lambda: self.store.check(awaited)) is not False:
                call_with_timeout(_REASON_SECONDS, lambda: self.store.set("gone", ""))  # it may be gone already
                time.sleep(2 * _PERIOD if self.rank != self._host else _PERIOD)
                break
            time.sleep(_DUE_PERIOD)
        self._base = self.store

    def _look_after(self) -> None:
        """Report the next rank where it has ended without a word, or gives no sign of life."""
        neighbour, now, often = (self.rank + 1) % len(self.ranks), time.monotonic(), self._count % _BEAT == 2
        process = self.peers.process(neighbour, self.store)  # asked for until it is known
        if self._host is not None:
            self.peers.process(self._host, self.store)
        if process is None:
            return
        beat, since, stopped = self._heard
        if now - self._looked > _GAP:  # this process was stopped itself, perhaps with the other
            since, stopped = now, 0.0
        self._looked = now
        has_ended, runs = process.has_ended(), process.runs()
        stopped = (stopped or now) if runs is False else 0.0
        since = now if runs else since  # seen to run, it may hold the GIL for as long as it likes
        if often and self.store.check([f"beat/{neighbour}"]):
            found = json.loads(self.store.get(f"beat/{neighbour}"))["beat"]
            beat, since = (beat, since) if found == beat else (found, now)
        self._heard = beat, since, stopped
        silence = now - (stopped or since)
        if not has_ended and silence <= self._patience(process):
            return
        if self.store.check([f"ended/{neighbour}"]) or any(e.rank == neighbour and e.is_last for e in self.events):
            return  # with a word: an event, which comes
        how = "has died, without a word" if has_ended else f"has given no sign of life for {silence:.0f} s"
        how += ": its process is stopped" if not has_ended and runs is False else ""
        event = self.peers.dead(neighbour, self.peers.loops(self.store, neighbour), how)
        self.events.append(self.post(event))

    # -- when a collective fails -------------------------------------------------------------------------------------

    @property
    def is_answered(self) -> bool:
        """Whether the store may still answer; torch prints a backtrace of its own where it is asked and does not."""
        host = self._host_process()
        return not self.is_lost and not self.is_alone and (host is None or host.runs() is not False)

    def _host_process(self) -> ProcessId | None:
        return None if self._host is None else self.peers.process(self._host)

    def _is_cause(self, event: Event) -> bool:
        if event.rank == self.rank or event.kind not in ("failed", "disagree", "left"):
            return False
        if event.kind == "left":  # one that has destroyed its groups cannot say how far it has come
            return waits_for(self, event) or not event.started
        return event.is_last or any(place[0] > self.over.get(name, 0) for name, place in event.places.items())

    def reason(self) -> Exception | None:
        """Return what to raise in place of a collective's error; None where nothing has become of another rank."""
        event = self._recall.breaks
        if event is None and self.is_answered:
            event = call_with_timeout(_REASON_SECONDS + BREAK_SECONDS, self._find_reason)
        event = event or next(filter(self._is_cause, self.events), None)
        if event is None and not self.is_answered and not self.is_alone:
            event = self.peers.lost("since a collective failed")
        return None if event is None else event.error()

    def _find_reason(self) -> Event | None:
        deadline = time.monotonic() + _REASON_SECONDS
        for event in (*self.events, self._own):  # whose errors have had ranks break their groups, this one's as well
            if event is not None and event.kind == "met" and self._base.check([f"broken/{event.number}"]):
                return event
        known = next(filter(self._is_cause, self.events), None)
        return known or self.peers.cause(self._base, self._is_cause, deadline)

    def stopped(self, when: str) -> Event | None:
        """Tell all of a rank whose process is seen to be stopped; None where all run."""
        if self.is_answered:
            return call_with_timeout(_REASON_SECONDS, lambda: self.peers.stopped(self._base, when))
        if self.is_alone:
            return None
        self.is_lost = True
        return self.peers.lost(when)

    # -- when the process ends ---------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Say why this process ends, once, and give the others the time to hear of it."""
        if self._has_ended:
            return
        for loop in list(self.loops):
            loop.end()
        was_left = any(state == "left" for *_, state in self._places.values())
        if self.is_answered:
            waits = _HOST_SECONDS if self.rank == self._host else 0.0
            waits = _GOODBYE_SECONDS if error is not None and not isinstance(error, RankFailedError) else waits
            event = self._last_word(error)
            if isinstance(error, RankFailedError):
                call_with_timeout(BREAK_SECONDS, lambda: self.peers.process(error.rank, self._base))
            call_with_timeout(waits + BREAK_SECONDS, lambda: self._say_goodbye(event, waits))
        self._has_ended = True
        self._inbox.put(None)
        self._observing.put(None)
        if was_left and not self.is_over:  # what is under way would wait for ranks that will not come
            stuck.break_groups()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS if self.is_answered else 0.0)
        if isinstance(error, RankFailedError):
            self._outlive(error.rank)

    def _last_word(self, error: BaseException | None) -> Event | None:
        if isinstance(error, RankFailedError):
            return None
        if error is not None:
            told = self.told or failed(self.rank, self._places, error)
            return replace(told, is_last=True, number=-1)
        started = {} if self.is_over else num_started()
        has_met = self.last_error is not None and self.last_error.started == started
        event = left(self.rank, self._places, self.last_error.words if has_met and self.last_error else None)
        return replace(event, started=started)

    def _say_goodbye(self, event: Event | None, waits: float) -> None:
        deadline = time.monotonic() + waits
        if event is not None:
            event = post(self._base, event)
        self._base.set(f"ended/{self.rank}", "")
        while event is not None and time.monotonic() < deadline and not self.all_know(event, self._base):
            time.sleep(_DUE_PERIOD / 5)

    def _outlive(self, rank: int) -> None:
        """Wait until the process that has failed is gone: launchers name the first that ends as the cause."""
        process, deadline = self.peers.process(rank), time.monotonic() + _CULPRIT_SECONDS
        while process is not None and process.is_ending() and time.monotonic() < deadline:
            time.sleep(_DUE_PERIOD / 5)
