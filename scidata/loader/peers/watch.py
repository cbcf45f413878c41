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
its process groups (:mod:`scidata.device_mesh.board.stuck`): the collective ends with an error, in whose place the
failed rank's own is raised where that can be; a line in the log says it in any case. The groups are of no use then.
Where torch ends a collective because the other's process is gone, what has become of that is raised in place of torch's
word, too.

A process that ends leaves below the same name why (``ended/<r>``): after an error it waits until the others know
(``knows/<iteration>/<r>``), for a second at most; if it keeps the store, for a moment in any case, also where its
script has destroyed the groups, as long as another is in its loop.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scidata.device_mesh import groups
from scidata.device_mesh.board import stuck
from scidata.device_mesh.board.events import (
    Event,
    Others,
    Store,
    ended_key,
    events_of,
    failure,
    has_left,
    is_reading,
    is_served,
    post,
)
from scidata.device_mesh.board.processes import StepShown
from scidata.device_mesh.last_words import common_store, within
from scidata.errors import RankFailedError

BREAK_SECONDS = 0.7  # s that a rank waits for others to know why, before it breaks groups that they share
DUE_PERIOD = 0.05  # s, while the loop does not come back, though it should
_REASON_SECONDS = 1.0  # for another rank's end to be seen, after a collective with it has failed
_GOODBYE_SECONDS = 1.0  # that a process which has failed waits until the others know
_HOST_GOODBYE_SECONDS = 0.6  # that one which has not failed keeps the store for those who are still in their loops


class Iteration(Protocol):
    """What a watch asks of the loop that is under way: :class:`scidata.loader.peers.session.Session`."""

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`end` was called."""

    def end(self) -> None:
        """Stop watching, once."""


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
        self.events: list[Event] = []  # that matter now or later
        base = common_store()
        self.prefix = f"loader{base.add(f'loaders/{self.rank}', 1)}"
        self._base = dist.PrefixStore(self.prefix, base)  # type: ignore[attr-defined]
        self.store = self.connect()
        self.shown = StepShown()
        self.others = Others(self.rank, self.ranks)
        self._session: weakref.ref[Iteration] | None = None
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

    def begin(self, session: Iteration) -> int:
        """Begin an iteration; return its number, from 1."""
        self.iteration += 1
        self.is_told = False
        self._session = weakref.ref(session)
        return self.iteration

    @property
    def is_iterated(self) -> bool:
        """Whether a loop is under way."""
        session = None if self._session is None else self._session()
        return session is not None and not session.has_ended

    # -- when a collective fails, or the process ends ----------------------------------------------------------------

    def reason(self) -> Exception | None:
        """Return what to raise in place of a collective's error; None where nothing has become of another rank."""
        deadline = time.monotonic() + _REASON_SECONDS
        known = (event for event in self.events if event.iteration > self.failed_in and event.kind != "ahead")
        event = next(known, None)
        if event is None and self._is_answered:
            find = lambda: self.others.cause(self._base, self.iteration, self.failed_in, deadline)  # noqa: E731
            event = within(_REASON_SECONDS + BREAK_SECONDS, find)
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
        session = None if self._session is None else self._session()
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
            within(waits + BREAK_SECONDS, lambda: self._say_goodbye(event, waits))
        if how == "left":  # what is under way would wait for ranks that will not come
            stuck.break_groups()

    def let_go_of_store(self) -> None:
        """Wait, if this process keeps the store, until those who are in their loops know that it goes.

        For a script that has destroyed its groups itself: nobody waits for it, but loops of others would take it for
        dead.
        """
        if self.rank == 0 and self.iteration and self._is_answered and is_served(self._base):
            within(_HOST_GOODBYE_SECONDS + BREAK_SECONDS, self._take_leave_of_readers)

    def _take_leave_of_readers(self) -> None:
        deadline = time.monotonic() + _HOST_GOODBYE_SECONDS
        self._base.set(ended_key(self.rank), "")
        while time.monotonic() < deadline and any(is_reading(self._base, r) for r in self.ranks if r):
            time.sleep(DUE_PERIOD / 5)

    def _say_goodbye(self, event: Event | None, waits: float) -> None:
        deadline = time.monotonic() + waits
        if event is not None:
            post(self._base, event)
        self._base.set(ended_key(self.rank), "")
        self.knows(self._base, self.rank)
        while time.monotonic() < deadline and not self.all_know(self._base, self.rank):
            time.sleep(DUE_PERIOD / 5)

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
        self.events += [event for event in fresh if event.kind != "slow"]
        return fresh

    def due(self, iteration: int, step: int) -> Event | None:
        """Return the first event that is to be raised at this step."""
        for event in self.events:
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
            groups.add_explainer(self._reason, first=True)

    def _reason(self) -> Exception | None:
        iterated = [watch for watch in self._alive if watch.is_iterated]
        watch = iterated[0] if iterated else self._latest
        return None if watch is None or watch.is_over or self._process != os.getpid() else watch.reason()

    def _leave(self) -> None:
        for watch in list(self._alive):
            if self._process != os.getpid():
                continue
            if watch.is_over:
                watch.let_go_of_store()
            else:
                watch.leave(groups.uncaught())


_watches = _Watches()
