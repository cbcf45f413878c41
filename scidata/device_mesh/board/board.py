"""The board of this process: a thread beside its work that hears of other ranks, and has them hear of this one.

The protocol is told in :mod:`scidata.device_mesh.board`.

A walk through a failure, on three ranks that share a loop; rank 1 meets an error in step 7::

    rank 1's loop     say(event): Event(kind="failed", rank=1, places={"loader1": (1, 7)}, text="rank 1 failed ...")
    rank 1's thread   posts it as events/0
    rank 0's thread   is woken, reads events/0, and asks its loops: the event is due in step 7 of iteration 1
    rank 0's loop     comes to step 7, and raises RankFailedError("rank 1 failed in step 7: ...")

If the thread of rank 0 stands in an all-reduce of step 7 already, it is called back::

    0.00 s  the board hears of rank 1's event; it is due for the thread: look again each 0.05 s
    0.30 s  the thread has stood at one place in the collective: arm it with the error, say that rank 0 knows
    0.35 s  all ranks know (or 0.7 s have gone): break the groups; the collective ends, and the thread raises the error
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch.distributed as dist

from scidata.device_mesh.board import calls, stuck
from scidata.device_mesh.board.deadlock import Deadlocks
from scidata.device_mesh.board.events import Event, events_of, post
from scidata.device_mesh.board.processes import ProcessId
from scidata.device_mesh.board.state import BoardState, Loop, RecordedError
from scidata.device_mesh.board.store import call_with_timeout, common_postings
from scidata.errors import RankFailedError

_log = logging.getLogger("scidata")

_PERIOD = 0.25  # s between two looks
_RANKS_A_SECOND = 1024  # that give a sign of life, and ask for others'; more do so less often: one process answers all
_LONGEST_REST = 1.0  # s between two times that the server is asked for events: one that keeps the store waits for 2 s
_LONGEST_BEAT = 8.0  # s from one sign of life to the next; well below _SILENCE
_BEATS_A_COMPARISON = 2  # of collectives
_BEATS_A_QUESTION = 8  # for events, of a rank that listens: a firewall may have dropped the connection
_DUE_PERIOD = 0.05  # s between two looks while a rank may wait in vain
_SILENCE = 30.0  # s without a sign of life; a rank may hold the GIL for long
_GAP = 3.0  # s between two looks, after which silence proves nothing
_SHORTEST_SILENCE = 1.0  # s of a stopped process, however short the timeouts are
BREAK_SECONDS = 0.7  # s that a rank waits for others to know why, before it breaks groups that they share
_STORE_SECONDS = 1.0  # s that breaking them may take
_REASON_SECONDS = 1.0  # for another rank's end to be seen, after a collective with it has failed
_ERROR_SECONDS = 0.2  # after an error of an operation, without a collective since
_JOIN_SECONDS = 5.0


class Board(BoardState):
    """The state of a board, with the threads that keep it up to date; attributes as there."""

    def __init__(self, host: int | None) -> None:
        self._group = weakref.ref(dist.group.WORLD)
        common, rank = common_postings(), dist.get_rank()
        base = common.below(f"board{common.count(f'boards/{rank}')}")
        super().__init__(base, rank, range(dist.get_world_size()), None if common.port is None else host)
        self._port = common.port
        self.thread = threading.get_ident()
        self._posted: list[RecordedError] = []  # not taken back yet
        self._own: Event | None = None  # of the last of them
        self._num_read = self._count = 0
        self._next_beat, self._beat_seconds = 0.0, min(_LONGEST_BEAT, max(1.0, len(self.ranks) / _RANKS_A_SECOND))
        self._has_come, self._listens, self.is_leaving = threading.Event(), self._port is not None, False
        self._looked = time.monotonic()
        self._heard = (-1, time.monotonic(), 0.0)  # the neighbour's beat, since when, and since when it is stopped
        self._is_due = False  # an event that a thread should not wait in spite of: worth looking often
        self._breaks: Event | None = None  # for which this process breaks its groups
        self._stalls, self._armed = stuck.StallDetector(), 0.0
        self._deadlocks, self._calls = Deadlocks(self.rank), calls.Calls(self.rank)
        self._is_broken = self._is_outside = False
        # SimpleQueue: a loop's end() may be called by a collection, in the middle of anything
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.stops: dict[str, Callable[[], object]] = {}  # votes on where to stop, by the name of a StopSignal
        self._stops_asked: set[str] = set()
        self.ended = threading.Event()
        self._asked = 0.0  # when the thread began to ask the store; 0 while it does not
        runs = (self._run, self._observe) if self._port is None else (self._run, self._listen, self._observe)
        self._threads = [threading.Thread(target=run, name="scidata-board", daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the process group, and the store with it, was destroyed since."""
        return dist.group.WORLD is None or dist.group.WORLD is not self._group()

    # -- of loops, and operations ------------------------------------------------------------------------------------

    def attach(self, loop: Loop) -> None:
        """Begin to call a loop, and to look after its thread."""
        self.told = None
        self.places.pop(loop.name, None)
        self._inbox.put(lambda: self.loops.append(loop))

    def detach(self, loop: Loop) -> None:
        """Stop calling a loop, once the others can know how it ended."""
        done = threading.Event()

        def leave() -> None:
            self.remember(loop)
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

    def ask_to_stop(self, name: str) -> None:
        """Make all ranks vote on the step to stop after; takes no lock."""

        def ask() -> None:
            if name not in self._stops_asked:
                self._stops_asked.add(name)
                self.post(Event(kind="stop", rank=self.rank, text=name))

        self._inbox.put(ask)

    def record_error(self, error: BaseException) -> None:
        """Record the latest error of an operation; the others read it if they wait for this rank."""
        if not isinstance(error, RankFailedError):
            self.last_error = RecordedError.of(error)
            self.look_again()

    def has_said(self, event: Event) -> bool:
        """Whether the log already reports that a collective was broken off for an event."""
        return self._breaks is not None and self._breaks.number == event.number

    def look_again(self) -> None:
        """Make the board's thread look now."""
        self._inbox.put(_nothing)

    def stop(self) -> None:
        """Stop the threads."""
        self.ended.set()
        self._inbox.put(None)

    def join(self, *, only_store: bool = False) -> None:
        """Join the threads, unless the store blocks them."""
        for thread in self._threads[: -1 if only_store else None]:
            thread.join(_JOIN_SECONDS if self.is_answered else 0.0)

    # -- the threads' ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        work: Callable[[], object] | None = self.introduce
        while work is not None:
            try:
                self._asked = time.monotonic()
                work()
                if self.is_over:
                    self._say_over()
                    return
                self._tick()
            except Exception as e:
                if self.is_over or self.ended.is_set():
                    return
                self._lose(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
            finally:
                self._asked = 0.0
            try:
                work = self._inbox.get(timeout=_DUE_PERIOD if self._is_due else _PERIOD)
            except queue.Empty:
                work = _nothing

    def _listen(self) -> None:
        """Wait at the server for the next event, at no cost to the server.

        Who ends posts one last event, which ends this wait: a thread that torch holds must not see Python's end.
        """
        rest = min(_LONGEST_REST, _PERIOD * max(1.0, len(self.ranks) / _RANKS_A_SECOND))
        with contextlib.suppress(dist.DistError, RuntimeError):
            posts = self.base.connect()
            while True:
                number = self._num_read  # first: what is posted after the next line has at least this number
                if self.is_leaving or self.is_over or self.is_alone or self.is_lost:
                    return
                posts.wait_for_entry("events", number)
                self._has_come.set()
                self.look_again()
                self.ended.wait(rest)  # at a job's end, all ranks post one
        self._listens = False

    def _say_over(self) -> None:
        if self.is_answered:
            text = f"rank {self.rank} has destroyed its process groups"
            self.post(Event(kind="left", rank=self.rank, text=text))
            self.read_no_more(self.posts)

    def _observe(self) -> None:
        """See whether the store still answers the other thread, which waits for it if it takes for ever."""
        looked = time.monotonic()
        while not self.ended.wait(_PERIOD) and not self.is_over:
            looked, before = time.monotonic(), looked
            since, limit = self._asked, self._patience(self.host_process())
            if since and looked - before > _GAP:  # this process was stopped itself
                self._asked = looked
                continue
            if since and time.monotonic() - since > limit:
                self._lose(f"for {limit:g} s")
                while not self.ended.is_set() and not self.is_over and self._asked:
                    self._recall()
                    time.sleep(_DUE_PERIOD)
                return

    def _patience(self, process: ProcessId | None) -> float:
        """Return how long a rank may be silent: a rank that is seen running may hold the GIL for long."""
        limits = [limit for limit in (self.timeout, *(loop.timeout for loop in self.loops)) if limit]
        if process is None or process.runs() is not False or not limits:
            return _SILENCE
        return min(_SILENCE, max(_SHORTEST_SILENCE, min(limits)))

    def _lose(self, detail: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.events.append(self.store_lost(detail))

    def _tick(self) -> None:
        if not self.is_alone and not self.is_lost:
            talks = time.monotonic() >= self._next_beat
            for loop in self.loops:
                self.remember(loop)
                if talks:
                    loop.tick()
            if talks:
                self._next_beat = time.monotonic() + self._beat_seconds
                self._beat()
                if self._count % _BEATS_A_COMPARISON == 0 and (differ := self._calls.look(self.posts)) is not None:
                    self.post(differ)
            if self._has_come.is_set() or not self._listens or (talks and self._count % _BEATS_A_QUESTION == 0):
                self._has_come.clear()
                self._hear()
            for name in self._stops_asked.intersection(self.stops):
                self.stops.pop(name)()
            self._post_errors()
            if not self.is_alone:
                self._look_after(talks)
                self._look_for_deadlocks(talks)
        self._recall()

    def _beat(self) -> None:
        self._count += 1
        self.posts.post(f"beat/{self.rank}", {"beat": self._count, "loops": self.places, "calls": self._calls.latest()})

    def _hear(self) -> None:
        for event in events_of(self.posts, self._num_read):
            self._num_read += 1
            if event.rank == self.rank or event.kind == "ended":
                continue
            if event.kind == "stop":
                self._stops_asked.add(event.text)
                continue
            if event.kind == "differ":
                self._tell(self._calls.difference(self.posts, event))
                continue
            if event.kind == "slow":
                if self.rank == self.ranks[0]:
                    _log.warning("%s", event.text)
                continue
            self._take(event)
            if event.rank == self.host and event.is_last:  # with a word; the store may end with it
                self.is_alone = True
                self.knows(event)
                return

    def _post_errors(self) -> None:
        """Post the latest error of an operation, if others may wait for this rank; withdraw errors that are over."""
        last = self.last_error
        for old in [each for each in self._posted if each is not last or not each.holds_up()]:
            self._posted.remove(old)
            if old.event is not None:
                self.posts.post(f"over/{old.event.number}")
        if last is None or last.event or not last.holds_up() or time.monotonic() - last.time < _ERROR_SECONDS:
            return
        text = f"rank {self.rank} has met an error in an operation, and does not come to what others wait for: "
        last.event = self.post(Event(kind="met", rank=self.rank, text=text + last.words, started=last.started))
        self._posted.append(last)
        self._own = last.event

    def _look_after(self, talks: bool) -> None:
        """Report the next rank if it ended without posting an event, or gives no sign of life."""
        neighbour, now = (self.rank + 1) % len(self.ranks), time.monotonic()
        process = self.process(neighbour, self.posts)  # asked for until it is known
        if self.host is not None:
            self.process(self.host, self.posts)
        if process is None:
            return
        beat, since, stopped = self._heard
        if now - self._looked > _GAP:  # this process was stopped itself, perhaps with the other
            since, stopped = now, 0.0
        self._looked = now
        has_ended, runs = process.has_ended(), process.runs()
        stopped = (stopped or now) if runs is False else 0.0
        since = now if runs else since  # seen to run, it may hold the GIL for as long as it likes
        if (
            talks
            and runs is None
            and (found := self.posts.find(f"beat/{neighbour}")) is not None
            and found["beat"] != beat
        ):
            beat, since = found["beat"], now
        self._heard = beat, since, stopped
        silence = now - (stopped or since)
        if not has_ended and silence <= self._patience(process):
            return
        if self.posts.has(f"ended/{neighbour}") or any(e.rank == neighbour and e.is_last for e in self.events):
            return  # with a word: an event, which comes
        how = "has died, without a word" if has_ended else f"has given no sign of life for {silence:.0f} s"
        how += ": its process is stopped" if not has_ended and runs is False else ""
        event = self.death_of(neighbour, self.loops_of(self.posts, neighbour), how)
        self.events.append(self.post(event))

    def _look_for_deadlocks(self, talks: bool) -> None:
        thread = self.loops[-1].thread if self.loops else self.thread
        self._tell(self._deadlocks.look(self.posts, thread, len(self.ranks), reads=talks and not self._is_due))

    def _tell(self, event: Event | None) -> None:
        if event is not None:
            self._take(self.post(event))

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "stuck":  # ranks that wait are called back; the others raise in their next collective
            calls.found.append(event)

    # -- calling a thread back that waits in a collective for a rank which does not come -----------------------------

    def _recall(self) -> None:
        """Let loops raise; call a thread back that waits in vain. By the board's threads, several times a second."""
        event, thread, in_loop = next(self._due(), (None, 0, False))
        self._is_due = event is not None
        if event is None:
            return
        how = self._stalls.look(thread, anywhere=in_loop)
        if event.kind in ("left", "met") and self._stalls.is_of_two:  # gloo counts these as collectives
            how = None
        if self._is_broken:  # no effect if the thread waits for a rank to join a new group
            if how == "call" and self._armed and time.monotonic() - self._armed > BREAK_SECONDS + _STORE_SECONDS:
                self._armed, self.is_lost = 0.0, True
                if self._port is not None:  # drop the store for good: it does not answer the thread
                    stuck.hang_up(self._port)
        elif how is None:
            self._armed = 0.0
            if not self._stalls.is_inside and self._is_outside and not in_loop:  # a loop comes to it by itself
                self.knows(event)
            self._is_outside = not self._stalls.is_inside
        elif not self._armed:
            # an error of an operation may be over, its rank having gone on; not where that cannot be known any more
            if event.kind != "met" or (self.is_answered and not self.posts.has(f"over/{event.number}")):
                self._arm(event, thread, how)
        elif (self.is_answered and self.all_know(self.posts, event)) or (
            time.monotonic() - self._armed > BREAK_SECONDS
        ):
            self._is_broken = True
            if event.kind == "met" and self.is_answered:
                self.posts.post(f"broken/{event.number}")
            stuck.break_groups()

    def _arm(self, event: Event, thread: int, how: str) -> None:
        """Make the thread raise the reason as soon as it returns to Python.

        All ranks do that before one breaks its groups, because that ends the collectives of the others, too.
        """
        self._armed = time.monotonic()
        said = f"{event.text}; rank {self.rank} waited for it in a collective, which it has broken off"
        _log.error("%s: its process groups are of no more use", said)
        self._breaks = replace(event, text=said)
        if how == "call":
            stuck.raise_in(thread, self._breaks.error())
        self.knows(event)

    def _due(self) -> Iterator[tuple[Event, int, bool]]:
        """Yield the events for which a thread should stop waiting, the thread, and whether it is in a loop."""
        for loop in self.loops:
            event = loop.alarm()
            if event is not None:
                yield event, loop.thread, True
        for event in self.events:
            if (event.is_last and event.kind != "left") or (event.kind in ("left", "met") and self.waits_for(event)):
                yield event, self.thread, False
            if event.kind == "stuck":
                yield event, self.loops[-1].thread if self.loops else self.thread, False

    # -- when a collective fails -------------------------------------------------------------------------------------

    def reason(self) -> Exception | None:
        """Return the error to raise in place of a collective's; None if no other rank has failed."""
        event = self._breaks
        if event is None and self.is_answered:
            event = call_with_timeout(_REASON_SECONDS + BREAK_SECONDS, self._find_reason)
        event = event or next(filter(self.is_cause, self.events), None)
        waits = self._asked and time.monotonic() - self._asked > _REASON_SECONDS  # for a network that is down, perhaps
        if event is None and not self.is_alone and (waits or not self.is_answered):
            event = self.store_lost("since a collective failed")
        return None if event is None else event.error()

    def _find_reason(self) -> Event | None:
        deadline = time.monotonic() + _REASON_SECONDS
        for event in (*self.events, self._own):  # whose errors have had ranks break their groups, this one's as well
            if event is not None and event.kind == "met" and self.base.has(f"broken/{event.number}"):
                return event
        known = next(filter(self.is_cause, self.events), None)
        return known or self.cause(self.base, deadline) or self._overdue()

    def _overdue(self) -> Event | None:
        """Post an event about the next rank if it is on another machine and missed three signs of life."""
        neighbour, silence = (self.rank + 1) % len(self.ranks), time.monotonic() - self._heard[1]
        process = self.process(neighbour)
        if process is None or process.can_be_seen or silence < 3 * self._beat_seconds:
            return None
        how = f"has given no sign of life for {silence:.0f} s: its host, or the network, may be down"
        return post(self.base, self.death_of(neighbour, self.loops_of(self.base, neighbour), how))

    def stopped(self, when: str) -> Event | None:
        """Post an event about a rank whose process is stopped; None if all run."""
        if self.is_answered:
            return call_with_timeout(_REASON_SECONDS, lambda: self.find_stopped(self.base, when))
        if self.is_alone:
            return None
        self.is_lost = True
        return self.store_lost(when)


def _nothing() -> None:
    """Do nothing; the thread looks again."""
