"""What a rank asks of the common store while all is well: little, and as much in a large job as in a small one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from scidata.device_mesh.board import board, store
from scidata.device_mesh.board.events import Event, post
from scidata.device_mesh.board.processes import ProcessId
from scidata.device_mesh.torch_internals import fake_store
from scidata.loader.peers.session import Session
from scidata.loader.peers.watch import Watch

SENT: Counter[str] = Counter()


class CountingStore(dist.PrefixStore):
    """Counts what is asked of it; one below another counts once."""

    def __init__(self, prefix, below):
        super().__init__(prefix, below)
        for name in ("set", "get", "check", "compare_set", "add", "multi_get", "delete_key"):
            setattr(self, name, self.counted(name, getattr(super(), name)))

    def counted(self, name, call):
        def run(*args):
            SENT[name] += 1
            return call(*args)

        return run

    def clone(self):
        return self


@pytest.fixture(params=[2, 1024])
def rank_1(request, monkeypatch):
    """Return the board of rank 1 in a loop, without its threads, and a clock."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(board, "time", clock)
    monkeypatch.setattr(board.threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(store.dist, "PrefixStore", CountingStore)
    monkeypatch.setattr(store.Postings, "port", 1234)  # as a server's
    fake_store()
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=request.param)
    try:
        own = board.Board(0)
        for rank, machine in ((0, ProcessId.own().machine), (2 % request.param, "elsewhere")):
            process = replace(ProcessId.own(), machine=machine)
            own.posts.post(f"process/{rank}", {"process": dataclasses.asdict(process), "shown": -1})
            own.posts.post(f"beat/{rank}", {"beat": 1, "loops": {}})
        mesh = dist.init_device_mesh("cpu", (request.param,))
        watch = Watch(own, mesh, None)
        watch.posts.post("rank/0", {"iteration": 1, "step": 3, "checksum": 0, "data": "", "name": "", "total": None})
        session = Session(watch, lambda: ("", "numbers"), 0.0)
        own._inbox.get()()
        for _ in range(5):
            tick(own, clock)
        yield own, clock
        session.end()
    finally:
        dist.destroy_process_group()


def tick(own, clock):
    clock.now += 0.25
    own._tick()


def test_a_rank_sends_three_messages_a_second_in_jobs_of_any_size(rank_1):
    SENT.clear()
    for _ in range(40):
        tick(*rank_1)
    # each second: a sign of life, the first rank's reading, the next one's sign of life; seldom the number of events
    assert SENT == {"set": 10, "compare_set": 20, "add": 1}


def test_an_event_is_read_at_the_tick_that_follows_its_coming(rank_1):
    own, clock = rank_1
    post(own.posts, Event(kind="disagree", rank=0, text="gone"))
    own._has_come.set()
    SENT.clear()
    tick(own, clock)
    assert [event.text for event in own.events] == ["gone"]
    assert SENT["add"] + SENT["compare_set"] <= 4
    assert sum(SENT.values()) <= 5


def test_whether_all_know_takes_three_messages_in_jobs_of_any_size(rank_1):
    own, _ = rank_1
    event = post(own.posts, Event(kind="failed", rank=0, text="gone"))
    own.knows(event)
    SENT.clear()
    assert own.all_know(own.posts, event) is (len(own.ranks) == 2)
    assert SENT == {"add": 2, "check": 1}
