"""Values that are kept: what goes when there is no more room, threads, forks, pickles."""

import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from scidata.core.cache import Cache


@pytest.mark.parametrize(
    ("evict", "left"),
    [("oldest", "bcd"), ("lru", "acd"), ("none", "abc")],
)
def test_what_goes_when_there_is_no_more_room(evict, left):
    cache = Cache(3, evict)
    for key in "abc":
        assert cache.put(key, key.upper()) == key.upper()
    assert cache.get("a") == "A"
    assert cache.get_or_make("d", lambda: "D") == "D"
    assert [key for key in "abcd" if cache.get(key) is not None] == list(left)
    assert (len(cache), cache.size, cache.max_size) == (3, 3, 3)


@pytest.mark.parametrize(("evict", "left"), [("oldest", "cd"), ("lru", "cd"), ("none", "ac")])
def test_sizes_are_summed(evict, left):
    cache = Cache(10, evict)
    for key, size in (("a", 4), ("b", 7), ("c", 6), ("d", 1), ("e", 11)):
        cache.put(key, key, size)
        assert cache.size <= 10
    assert [key for key in "abcde" if cache.get(key)] == list(left)
    assert cache.size == {"cd": 7, "ac": 10}["".join(left)]
    cache.clear()
    assert (len(cache), cache.size) == (0, 0)
    cache.put("f", "f", 10)
    assert cache.get("f") == "f"


def test_those_without_a_use_in_sight_go_first_the_earliest_before_the_others():
    cache = Cache(4, "lru")
    for key in "abcd":
        cache.put(key, key)
    for key in "dbcb":
        cache.demote(key)
    assert cache.get("b") == "b"  # a use came: it is the last to go again
    cache.demote("nothing")
    for key, left in (("e", "abce"), ("f", "abef"), ("g", "befg")):
        cache.put(key, key)
        assert sorted(cache._entries) == list(left)
    assert not cache._demoted


def test_a_value_takes_the_place_of_the_keys_earlier_one():
    cache = Cache(10)
    for size in (3, 1, 10, 4):
        cache.put("a", size, size)
        assert (cache.get("a"), cache.size) == (size, size)
    cache.put("b", "b", 5)
    cache.put("a", "newer", 4)
    cache.put("c", "c", 5)
    assert [cache.get(key) for key in "abc"] == ["newer", None, "c"]  # put anew, it is younger than "b"
    assert cache.put("a", "large", 11) == "large"  # what was there is out of date
    assert cache.get("a") is None
    assert cache.size == 5


def test_no_room_at_all():
    cache = Cache(0)
    assert cache.put("a", 1) == 1
    assert cache.get_or_make("a", lambda: 2, once=True) == 2
    assert cache.get_or_make("a", lambda: 3, lambda _: 1) == 3
    assert len(cache) == 0


def test_it_pickles_empty():
    cache = Cache(10, "none")
    cache.put("a", 1, 4)
    again = pickle.loads(pickle.dumps(cache))
    assert (len(again), again.size, again.max_size, again.evict) == (0, 0, 10, "none")
    again.put("a", "A", 10)
    again.put("b", "B", 1)
    assert (again.get("a"), again.get("b")) == ("A", None)
    assert cache.get("a") == 1


def test_sizes_of_what_was_made():
    cache = Cache(10, "lru")
    for key in "abac":
        assert cache.get_or_make(key, key.upper, lambda _: 4, once=key == "b") == key.upper()
    made = []
    for key in "acb":
        cache.get_or_make(key, lambda key=key: made.append(key) or key.upper(), lambda _: 4)
    assert made == ["b"]
    assert cache.size == 8


def test_threads_make_a_value_once_and_all_see_its_failure():
    cache, gate, made = Cache(10, "lru"), threading.Barrier(4), []

    def make(value):
        made.append(value)
        time.sleep(0.05)
        if value is None:
            raise OSError("lost")
        return value

    def want(value):
        gate.wait()
        if value is not None:
            return cache.get_or_make("b", lambda: make(value), once=True)
        with pytest.raises(OSError, match="lost"):
            cache.get_or_make("a", lambda: make(None), once=True)
        return None

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(want, [None] * 4)) == {None}
        assert len(made) == 1
        made.clear()
        assert set(pool.map(want, range(4))) == {made[0]}
    assert len(made) == 1
    assert cache.get_or_make("a", lambda: 7, once=True) == 7  # a failure is not kept
    assert cache._making == {}


def test_threads_that_each_make_a_value_get_the_same_one():
    cache, gate = Cache(10), threading.Barrier(4)

    def make():
        gate.wait()  # all four have found nothing
        return object()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: cache.get_or_make("a", make), range(4)))) == 1
    assert cache.size == 1


def test_threads_leave_the_size_right():
    cache = Cache(50, "lru")

    def work(seed):
        for i in range(3000):
            cache.put((seed * i) % 40, i + 1, 1 + i % 7)
            cache.get(i % 40)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (1, 3, 7, 9)))
    assert cache.size == sum(cache._sizes.get(key, 1) for key in cache._entries) <= 50
    assert set(cache._sizes) <= set(cache._entries)


class SlowKey:
    """Is looked at for a while: whoever does that under a lock holds it."""

    looked_at = threading.Event()

    def __hash__(self):
        self.looked_at.set()
        time.sleep(0.2)
        return 1


def in_child(check):
    """Whether ``check()`` is true in a fork of this process, which may take three seconds."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(3)
        os._exit(0 if check() else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_a_fork_while_another_thread_changes_a_cache():
    cache = Cache(2, "lru")
    cache.put("a", 1)
    thread = threading.Thread(target=cache.put, args=(SlowKey(), 2))
    thread.start()
    SlowKey.looked_at.wait()

    def check():
        other = Cache(1)
        other.put("b", 3)
        return cache.get("a") == 1 and cache.put("c", 4) == cache.get("c") and cache.size == len(cache) == 2

    assert in_child(check)
    thread.join()
    assert cache.size == len(cache) == 2


def test_a_fork_while_another_thread_makes_a_value():
    cache, begun, end = Cache(2, "lru"), threading.Event(), threading.Event()

    def make():
        begun.set()
        return "parent's" if end.wait(10) else None

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(cache.get_or_make, "a", make, once=True)
        begun.wait()
        assert in_child(lambda: cache.get_or_make("a", lambda: "child's", once=True) == "child's" == cache.get("a"))
        end.set()
        assert found.result() == cache.get("a") == "parent's"
