"""What ranks post for each other, and how they wait for it, on a store of this process: no rank is started."""

import dataclasses
import threading
import time
import types
from typing import Any

import pytest
import torch.distributed as dist

from scidata.device_mesh.board import processes
from scidata.device_mesh.board.board import BoardState
from scidata.device_mesh.board.deadlock import Deadlocks, Stand, in_circle
from scidata.device_mesh.board.events import Event, events_of, failed, left, post
from scidata.device_mesh.board.store import Postings, call_with_timeout
from scidata.errors import ConfigError, RankFailedError
from scidata.shard.comm.comparing import Comparison, differing


@pytest.fixture
def posts() -> Postings:
    return Postings(dist.HashStore(), "scidata")


def boards(posts: Postings, num_ranks: int = 3) -> list[BoardState]:
    """Return the boards of some ranks, as if each were in a process of its own."""
    return [BoardState(posts.below("board1"), rank, range(num_ranks), 0) for rank in range(num_ranks)]


# -- values ----------------------------------------------------------------------------------------------------------


def test_values_are_read_as_they_were_posted(posts):
    posts.post("a", {"x": [1, "ö", None]})
    assert posts.read("a") == posts.find("a") == {"x": [1, "ö", None]}
    posts.post("a", 2)
    assert posts.find("a") == 2
    assert posts.find("b") is None
    assert posts.has("a")
    assert not posts.has("a", "b")
    posts.remove("a", "never")
    assert posts.find("a") is None


def test_prefixes_and_connections_see_the_same_values(posts):
    posts.below("of").post("a", 1)
    assert posts.find("of/a") == posts.connect().find("of/a") == 1
    assert posts.find("a") is None


def test_the_first_claim_holds(posts):
    assert [posts.claim("block", each) for each in ("one", "two")] == ["one", "one"]


def test_rows_grow_and_are_read_from_a_number_on(posts):
    assert [posts.append("events", each) for each in "abc"] == [0, 1, 2]
    assert list(posts.entries("events")) == ["a", "b", "c"]
    assert list(posts.entries("events", 2)) == ["c"]
    posts.count("events")  # a rank has its number, and has not written yet
    assert list(posts.entries("events", 2)) == ["c"]


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_a_wait_ends_when_all_values_are_there(posts):
    posts.post("a")
    looks = []

    def look(waited):
        looks.append(waited)
        if len(looks) == 3:
            posts.post("b")

    assert posts.wait(["a", "b"], look=look, pauses=(0.0001, 0.001))
    assert looks == sorted(looks)
    assert len(looks) == 3


def test_a_wait_ends_at_its_deadline_and_with_what_a_look_raises(posts):
    began = time.monotonic()
    assert not posts.wait(["never"], seconds=0.05)
    assert 0.05 <= time.monotonic() - began < 5

    def look(waited):
        raise RankFailedError("rank 1 failed", 1)

    with pytest.raises(RankFailedError):
        posts.wait(["never"], look=look)


def test_a_store_that_does_not_answer_is_given_up():
    answers = threading.Event()
    assert call_with_timeout(0.05, answers.wait) is None
    answers.set()
    assert call_with_timeout(5, answers.wait) is True


# -- votes -----------------------------------------------------------------------------------------------------------


def test_the_last_voter_learns_all_findings(posts):
    assert posts.vote("step", 3) is None
    assert posts.vote("step", 3, {"bad": 4}) is None
    assert posts.vote("step", 3, "worse") == [{"bad": 4}, "worse"]
    posts.post("step/result", 1)
    posts.remove_vote("step")
    assert not posts.has("step/result")
    assert posts.vote("step", 1) == []


def test_only_so_many_findings_are_read(posts):
    assert [posts.vote("step", 3, each, most=2) for each in "abc"] == [None, None, ["a", "b"]]


def compare(posts, records, key="start/1", past="start/0"):
    """Compare records of ranks with the first one's; return the reports that each has."""
    comparisons = [Comparison(posts, key, rank, range(len(records)), differing, past) for rank in range(len(records))]
    found = {}

    def run(rank):
        found[rank] = comparisons[rank].run({"all": records[rank]}, {"all": 0}, lambda key, _: posts.wait([key]))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(records))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[rank] for rank in range(len(records))]


def test_ranks_that_differ_are_known_to_all(posts):
    reports = compare(posts, [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}])
    assert reports == [[{"all": {"ranks": [0, 1], "values": {"b": ["2", "3"]}}}]] * 3
    assert compare(posts, [{"a": "1"}] * 3, "start/2", "start/1") == [[]] * 3
    assert not posts.has("start/1/result")  # cleared away


def test_a_rank_that_passes_by_is_not_waited_for(posts):
    first, second = (Comparison(posts, "start/1", rank, range(2), differing) for rank in range(2))
    assert first.first_missing(range(2)) == 0
    first.pass_by()
    assert second.first_missing(range(2)) == 1
    assert second.run({"all": {"a": "1"}}, {"all": 0}, lambda key, _: posts.wait([key])) == []


def test_the_first_rank_that_is_missing_is_found_by_few_messages(posts):
    ranks = range(100, 612)
    last = Comparison(posts, "start/1", 611, ranks, differing)
    asked: list[int] = []
    last._posts = types.SimpleNamespace(has=lambda *keys: asked.append(len(keys)) or posts.has(*keys))
    for rank in ranks[:-1]:
        if rank in (100, 101, 300, 610):
            asked.clear()
            assert last.first_missing(ranks) == rank
            assert len(asked) <= 10
        Comparison(posts, "start/1", rank, ranks, differing).blank()
    assert last.first_missing([100, 101]) == 100  # which have all come


# -- failures --------------------------------------------------------------------------------------------------------


def test_an_event_reaches_all_and_has_its_number(posts):
    zero, one, two = boards(posts)
    event = one.post(failed(1, {"loader1": (2, 7, "left")}, ValueError("bad")))
    assert event.number == 0
    heard = next(events_of(two.posts))
    assert (heard.number, heard.rank, heard.is_last) == (0, 1, True)
    assert heard.text == "rank 1 failed in step 7: ValueError: bad"
    assert isinstance(heard.error(), RankFailedError)
    assert isinstance(Event(kind="disagree", rank=1, text="").error(), ConfigError)
    due = [heard.is_due("loader1", *place, over=0) for place in ((1, 9), (2, 6), (2, 7), (3, 0))]
    assert due == [False, False, True, True]
    assert not heard.is_due("loader2", 2, 7, over=0)
    assert not heard.is_due("loader1", 2, 7, over=2)  # an error has ended that iteration here
    assert not zero.all_know(zero.posts, heard)
    two.knows(heard)
    assert zero.all_know(zero.posts, heard)  # all but itself, and the rank that failed


def test_a_rank_that_knows_and_one_that_has_ended_count_once(posts):
    zero, one, two, three = boards(posts, 4)
    event = one.post(failed(1, {}, ValueError("bad")))
    for _ in range(2):
        two.knows(event)
        one.knows(event)  # its own
    zero.knows(event)
    one.read_no_more(one.posts)
    two.read_no_more(two.posts)
    two.knows(event)
    assert not zero.all_know(zero.posts, event)
    assert not one.all_know(one.posts, event)
    three.read_no_more(three.posts)
    three.read_no_more(three.posts)
    assert zero.all_know(zero.posts, event)
    assert one.all_know(one.posts, event)
    later = zero.post(failed(0, {}, ValueError("worse")))
    assert zero.all_know(zero.posts, later)  # all others had ended before


def test_a_rank_that_has_left_is_the_cause_only_of_collectives_that_it_had_not_begun(posts, monkeypatch):
    zero, _, two = boards(posts)
    monkeypatch.setattr("scidata.device_mesh.board.state.num_started", lambda other=None: {"world": 4})
    for started, is_cause in ((3, True), (4, False)):
        event = Event(**vars(left(1, {}, None)) | {"started": {"world": started}})
        assert zero.is_cause(event) is is_cause
    assert not zero.is_cause(left(0, {}, None))  # its own
    failure = failed(1, {"loader1": (1, 3, "left")}, ValueError())
    two.over["loader1"] = 1
    assert two.is_cause(failure)  # its process has ended
    assert not two.is_cause(Event(**vars(failure) | {"is_last": False}))  # raised here already


def test_a_rank_that_died_is_told_apart_from_one_that_said_goodbye(posts, monkeypatch):
    zero, one, two = boards(posts)
    for board in (one, two):
        process = dataclasses.asdict(processes.ProcessId.own())
        board.posts.post(f"process/{board.rank}", {"process": process | {"pid": 2**22 + 1}, "shown": -1})
        board.posts.append(f"on/{process['machine']}", board.rank)
    one.posts.post("beat/1", {"beat": 1, "loops": {"loader1": (1, 5, "reading")}})
    two.posts.post("ended/2")
    found = zero.cause(zero.posts, time.monotonic() + 5)
    assert found is not None
    assert (found.rank, found.is_last, found.number) == (1, True, 0)
    assert "rank 1 (process 4194305 on " in found.text
    assert "has died, without a word, in step 5 or soon after it" in found.text
    again = two.cause(two.posts, time.monotonic() + 5)
    assert again is not None
    assert (again.number, again.text) == (0, found.text)  # what one found, all know
    one.posts.post("ended/1")
    assert zero.find_stopped(zero.posts, "now") is None


def test_a_store_that_is_gone_is_not_asked(posts):
    zero, _, two = boards(posts)
    two.is_lost = True
    event = Event(kind="failed", rank=2, text="")
    assert two.post(event).number == -1
    two.knows(post(zero.posts, event))
    assert zero.posts.count("knows/0", 0) == 0
    assert not two.is_answered


# -- keys of an earlier run ------------------------------------------------------------------------------------------


def test_names_count_alike_and_differ_by_kind_and_ranks(posts):
    names = [
        [board.name_for(kind, ranks) for kind in ("loader", "writer") for ranks in (range(3), [0, 2], range(3))]
        for board in boards(posts)
    ]
    assert names[0] == names[1] == names[2]
    assert len(set(names[0])) == 6
    assert [names[0][i] for i in (0, 2, 3, 5)] == ["loader1", "loader2", "writer1", "writer2"]


def test_boards_of_later_process_groups_do_not_read_the_events_of_earlier_ones(posts):
    post(posts.below("board1"), failed(1, {}, ValueError()))
    assert not list(events_of(posts.below("board2")))
    assert len(list(events_of(posts.below("board1")))) == 1


# -- ranks that wait for each other ----------------------------------------------------------------------------------


def stand(group, ranks, call="all_reduce", **started):
    return Stand(group=group, ranks=ranks, call=call, line=call, started=started)


def test_only_those_who_wait_for_each_other_for_ever_are_in_a_circle():
    slow = {rank: stand("g", [0, 1, 2], g=4) for rank in range(3)}  # all have come: the network is slow
    assert not in_circle(slow)
    assert not in_circle({0: slow[0], 1: slow[1]})  # rank 2 computes
    assert not in_circle({0: stand("g", [0, 1], g=4, h=1), 1: stand("h", [1, 2], g=3, h=1), 2: stand("h", [1, 2], h=1)})
    circle = {0: stand("g", [0, 1], g=4, h=1), 1: stand("h", [0, 1], g=3, h=2)}
    assert in_circle(circle | {2: stand("k", [2, 3], k=1)}) == circle
    third = {2: stand("h", [0, 1, 2], h=2)}  # waits for one that waits in a circle
    assert in_circle(circle | third) == circle | third
    assert in_circle({0: stand("g", [0, 1], g=4), 1: stand("g", [0, 1], "barrier", g=4)})


def test_where_ranks_stand_is_read_again_only_where_it_has_changed(posts):
    asked: list[str] = []
    counted: Any = types.SimpleNamespace(
        find=lambda key: asked.append(key) or posts.find(key),
        count=lambda key, more: asked.append(key) or posts.count(key, more),
    )
    deadlocks = Deadlocks(0)
    circle = {0: stand("g", [0, 1], g=4, h=1), 1: stand("h", [0, 1], g=3, h=2)}
    for rank, each in circle.items():
        assert deadlocks.seen_twice(counted, 512) == {}
        posts.post(f"stands/{rank}", dataclasses.asdict(each))
        posts.count("stands")
    assert deadlocks.seen_twice(counted, 512) == {}  # seen once
    asked.clear()
    assert [deadlocks.seen_twice(counted, 512) for _ in range(5)] == [circle] * 5
    assert asked == ["stands"] * 5
    posts.post("stands/1", None)  # slow, and no circle
    posts.count("stands")
    assert [deadlocks.seen_twice(counted, 512) for _ in range(2)] == [{}, {}]
