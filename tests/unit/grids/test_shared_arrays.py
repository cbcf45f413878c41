"""Arrays handed from process to process: made once, whoever dies or stops on the way."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from scidata.grids.blocks import shared_arrays
from scidata.grids.blocks.shared_arrays import SharedArrays

SHAPE, KIND = (300, 1000), np.dtype("f4")
NBYTES = 300 * 1000 * 4
T = TypeVar("T")


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(shared_arrays, "_base", lambda: str(tmp_path))
    yield tmp_path
    shared_arrays._leave()


def arrays_of(base: Path) -> list[Path]:
    """The arrays that wait to be taken, and what is being made."""
    return [p for p in base.glob("scidata-decoded-*/*") if p.name not in ("alive", "free")]


def free_files(base: Path) -> list[Path]:
    return list(base.glob("scidata-decoded-*/free/*"))


def take(
    box: SharedArrays, key: str, make: Callable[[Any], T], takers: Iterable[int], *, wait: bool = True
) -> tuple[Any, T | None] | None:
    """Return a copy of an array, and what ``make`` returned; None where another makes it."""
    found: list[Any] = []
    digest = hashlib.sha256(key.encode()).digest()
    used, made = box.take(digest, SHAPE, KIND, make, lambda v: found.append(v.copy()), takers=list(takers), wait=wait)
    assert len(found) == used
    return (found[0], made) if used else None


def maker(value: float, counts: list[float]) -> Callable[[Any], float]:
    def make(values: Any) -> float:
        values[:] = value
        counts.append(value)
        return value

    return make


def test_each_is_made_once_and_goes_when_all_have_it(base: Path) -> None:
    boxes = [SharedArrays("a", me, 100 * NBYTES) for me in range(3)]
    made: list[float] = []
    for k in range(5):
        for box in boxes:
            taken = take(box, str(k), maker(k, made), [0, 1, 2])
            assert taken is not None
            values, result = taken
            assert values.shape == SHAPE
            assert (values == k).all()
            assert result == (k if box is boxes[0] else None)
        assert arrays_of(base) == []
    assert made == [0, 1, 2, 3, 4]
    alone = take(boxes[0], "x", maker(7, made), [0])
    assert alone is not None
    assert alone[1] == 7
    assert arrays_of(base) == []


def test_many_threads_of_several_boxes(base: Path) -> None:
    boxes = [SharedArrays("a", me, 100 * NBYTES) for me in range(4)]
    made: list[float] = []

    def slow(values: Any) -> float:
        time.sleep(0.02)
        return maker(1, made)(values)

    def run(me: int) -> None:
        for k in range(6):
            taken = take(boxes[me], str(k), slow, range(4))
            assert taken is not None
            assert (taken[0] == 1).all()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    assert len(made) == 6
    assert arrays_of(base) == []


def test_files_are_written_again_once_all_have_taken_what_lies_in_them(base: Path) -> None:
    boxes = [SharedArrays("a", me, 100 * NBYTES) for me in range(2)]
    for k in range(40):
        for box in boxes if k % 3 else boxes[::-1]:
            taken = take(box, str(k), maker(k, []), [0, 1])
            assert taken is not None
            assert (taken[0] == k).all()
    assert arrays_of(base) == []
    assert 1 <= len(free_files(base)) <= 4


def test_what_somebody_reads_is_not_written_over(base: Path) -> None:
    """A second thread of a rank reads what its rank, and all others, have signed for; the maker goes on meanwhile."""
    maker_box, reader_box = SharedArrays("a", 0, 100 * NBYTES), SharedArrays("a", 1, 100 * NBYTES)
    reading, go = threading.Event(), threading.Event()
    seen: list[bool] = []

    def slow_use(values: Any) -> None:
        reading.set()
        assert go.wait(20)
        seen.append(bool((values == 1).all()))

    digest = hashlib.sha256(b"1").digest()
    assert take(maker_box, "1", maker(1, []), [0, 1]) is not None
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(reader_box.take, digest, SHAPE, KIND, maker(9, []), slow_use, takers=[0, 1], wait=True)
        assert reading.wait(20)
        taken = take(reader_box, "1", maker(9, []), [0, 1])
        assert taken is not None
        assert (taken[0] == 1).all()
        for k in range(2, 6):
            for box in (maker_box, reader_box):
                assert take(box, str(k), maker(k, []), [0, 1]) is not None
        go.set()
        assert second.result(20) == (True, None)
    assert seen == [True]


def test_who_does_not_wait_gets_nothing_and_who_waits_too_long_makes_it(base: Path) -> None:
    slow, quick = SharedArrays("a", 0, 100 * NBYTES), SharedArrays("a", 1, 100 * NBYTES)
    began, go, made = threading.Event(), threading.Event(), list[float]()

    def make(values: Any) -> float:
        began.set()
        assert go.wait(20)
        return maker(1, made)(values)

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(take, slow, "k", make, [0, 1])
        assert began.wait(20)
        assert take(quick, "k", maker(2, made), [0, 1], wait=False) is None
        taken = take(quick, "k", maker(2, made), [0, 1])
        assert taken is not None
        assert taken[1] == 2
        go.set()
        assert (first.result(20) or (0, 0))[1] == 1
    assert made == [2, 1]


def test_errors_are_each_ones_own_and_leave_nothing(base: Path) -> None:
    boxes = [SharedArrays("a", me, 100 * NBYTES) for me in range(2)]

    def fail(values: Any) -> float:
        raise ValueError("a flipped bit")

    for box in boxes:
        with pytest.raises(ValueError, match="a flipped bit"):
            take(box, "k", fail, [0, 1])
    assert arrays_of(base) == []
    taken = take(boxes[1], "k", maker(1, []), [0, 1])
    assert taken is not None
    assert taken[1] == 1


def test_the_oldest_go_where_there_are_too_many(base: Path) -> None:
    box, made = SharedArrays("a", 0, 3 * (NBYTES + 4096)), list[float]()
    for k in range(10):
        assert take(box, str(k), maker(k, made), [0, 1]) is not None
        assert sum(p.stat().st_size for p in arrays_of(base)) <= 3 * (NBYTES + 4096)
    assert len(arrays_of(base)) == 3
    other = SharedArrays("a", 1, 3 * (NBYTES + 4096))
    for k in (9, 8, 7, 0):
        taken = take(other, str(k), maker(k, made), [0, 1])
        assert taken is not None
        assert (taken[0] == k).all()
    assert made == [*range(10), 0]
    tiny = SharedArrays("a", 0, NBYTES // 2)
    for file in free_files(base):
        file.unlink()  # it would be written again, which takes no more room
    taken = take(tiny, "large", maker(1, made), [0, 1])
    assert taken is not None
    assert taken[1] == 1
    assert not list(base.rglob(hashlib.sha256(b"large").hexdigest()[:32]))


def test_a_folder_of_somebody_else_is_not_used(base: Path) -> None:
    folder = shared_arrays._join("a")
    assert folder is not None
    shared_arrays._leave()
    assert not os.path.exists(folder)
    os.makedirs(folder)
    os.chmod(folder, 0o777)
    taken = take(SharedArrays("a", 0, 100 * NBYTES), "k", maker(1, []), [0, 1])
    assert taken is not None
    assert os.listdir(folder) == []
    elsewhere = base / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "alive").touch()
    link = Path(f"{folder}-link")
    link.symlink_to(elsewhere)
    shared_arrays._sweep()
    assert os.listdir(link) == ["alive"]


_CHILD = """
import hashlib, sys, time
import numpy as np
from scidata.grids.blocks import shared_arrays
base, what = sys.argv[1:]
shared_arrays._base = lambda: base
def make(values):
    values[:] = 5
    if what == "stay":
        print("making", flush=True)
        time.sleep(60)
    return 5
def use(values):
    if what == "use":
        print("using", flush=True)
        time.sleep(60)
key = hashlib.sha256(b"k").digest()
shared_arrays.SharedArrays("a", 0, 1 << 30).take(key, (300, 1000), np.dtype("f4"), make, use, takers=[0, 1], wait=True)
print("made", flush=True)
if what == "end":
    sys.stdin.read()
"""


def child(base: Path, what: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(base), what],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_stops_while_it_makes_one(base: Path, how: signal.Signals) -> None:
    with child(base, "stay") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "making\n"
            process.send_signal(how)
            if how == signal.SIGKILL:
                process.wait(20)
            began = time.monotonic()
            taken = take(SharedArrays("a", 1, 1 << 30), "k", maker(1, []), [0, 1])
            assert taken is not None
            assert taken[1] == 1
            assert time.monotonic() - began < 10
        finally:
            process.kill()
    published = [p for p in arrays_of(base) if not p.name.endswith((".new", ".lock"))]
    assert len(published) == (how == signal.SIGKILL)


def test_a_process_that_is_killed_while_another_waits_for_it(base: Path) -> None:
    with child(base, "stay") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "making\n"
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(take, SharedArrays("a", 1, 1 << 30), "k", maker(1, []), [0, 1])
            time.sleep(0.1)
            began = time.monotonic()
            process.kill()
            taken = waiting.result(20)
        assert taken is not None
        assert taken[1] == 1
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_stops_while_it_takes_one(base: Path, how: signal.Signals) -> None:
    box = SharedArrays("a", 1, 1 << 30)
    assert take(box, "first", maker(1, []), [0, 1]) is not None
    with child(base, "use") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "using\n"
            process.send_signal(how)
            if how == signal.SIGKILL:
                process.wait(20)
            taken = take(box, "k", maker(1, []), [0, 1])
            assert taken is not None
            assert taken[1] is None
            assert (taken[0] == 5).all()
            for k in range(3):
                assert take(box, str(k), maker(k, []), [0, 1]) is not None
        finally:
            process.kill()


def test_what_a_killed_job_left_is_removed_by_the_next(base: Path) -> None:
    with child(base, "end") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        assert len(arrays_of(base)) == 1
        box = SharedArrays("other", 0, 1 << 30)
        assert take(box, "k", maker(1, []), [0, 1]) is not None
        assert len(list(base.iterdir())) == 2  # of a process that lives, it stays
        process.kill()
    shared_arrays._sweep()
    assert len(list(base.iterdir())) == 1
    with child(base, "end") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
    assert len(list(base.iterdir())) == 1  # one that ends takes its own along


def test_two_that_sweep_at_once_remove_nothing_that_is_in_use(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with child(base, "end") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        process.kill()
    (folder,) = base.iterdir()
    lock, used = fcntl.flock, []

    def after_another_one(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        shared_arrays._sweep()
        assert not any(base.iterdir())
        folder.mkdir(0o700)  # the same name again, in use
        used.append(os.open(folder / "alive", os.O_RDWR | os.O_CREAT))
        lock(used[0], fcntl.LOCK_SH)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", after_another_one)
    shared_arrays._sweep()
    assert [p.name for p in folder.iterdir()] == ["alive"]
    os.close(used[0])
