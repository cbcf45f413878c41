"""Arrays handed from process to process: made once, whoever dies or stops on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scidata.read import mailbox
from scidata.read.mailbox import Mailbox

SHAPE, KIND = (300, 1000), np.dtype("f4")
NBYTES = 300 * 1000 * 4


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(mailbox, "_base", lambda: str(tmp_path))
    yield tmp_path
    mailbox._leave()


def arrays_of(base: Path) -> list[Path]:
    return [p for p in base.glob("scidata-decoded-*/*") if p.name != "alive"]


def maker(value: float, counts: list[float]) -> Callable[[Any], float]:
    def make(values: Any) -> float:
        values[:] = value
        counts.append(value)
        return value

    return make


def test_each_is_made_once_and_goes_when_all_have_it(base: Path) -> None:
    boxes = [Mailbox("a", me, 100 * NBYTES) for me in range(3)]
    made: list[float] = []
    for k in range(5):
        for box in boxes:
            taken = box.take(str(k), SHAPE, KIND, maker(k, made), takers=[0, 1, 2])
            assert taken is not None
            values, result = taken
            assert values.shape == SHAPE
            assert (values == k).all()
            assert result == (k if box is boxes[0] else None)
        assert arrays_of(base) == []
    assert made == [0, 1, 2, 3, 4]
    alone = boxes[0].take("x", SHAPE, KIND, maker(7, made), takers=[0])
    assert alone is not None
    assert alone[1] == 7
    assert arrays_of(base) == []


def test_many_threads_of_several_boxes(base: Path) -> None:
    boxes = [Mailbox("a", me, 100 * NBYTES) for me in range(4)]
    made: list[float] = []

    def slow(values: Any) -> float:
        time.sleep(0.02)
        return maker(1, made)(values)

    def run(me: int) -> None:
        for k in range(6):
            taken = boxes[me].take(str(k), SHAPE, KIND, slow, takers=range(4))
            assert taken is not None
            assert (taken[0] == 1).all()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    assert len(made) == 6
    assert arrays_of(base) == []


def test_who_does_not_wait_gets_nothing_and_who_waits_too_long_makes_it(base: Path) -> None:
    slow, quick = Mailbox("a", 0, 100 * NBYTES), Mailbox("a", 1, 100 * NBYTES)
    began, go, made = threading.Event(), threading.Event(), list[float]()

    def make(values: Any) -> float:
        began.set()
        assert go.wait(20)
        return maker(1, made)(values)

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(slow.take, "k", SHAPE, KIND, make, takers=[0, 1])
        assert began.wait(20)
        assert quick.take("k", SHAPE, KIND, maker(2, made), takers=[0, 1], wait=False) is None
        taken = quick.take("k", SHAPE, KIND, maker(2, made), takers=[0, 1])
        assert taken is not None
        assert taken[1] == 2
        go.set()
        assert first.result(20)[1] == 1
    assert made == [2, 1]


def test_errors_are_each_ones_own_and_leave_nothing(base: Path) -> None:
    boxes = [Mailbox("a", me, 100 * NBYTES) for me in range(2)]

    def fail(values: Any) -> float:
        raise ValueError("a flipped bit")

    for box in boxes:
        with pytest.raises(ValueError, match="a flipped bit"):
            box.take("k", SHAPE, KIND, fail, takers=[0, 1])
    assert arrays_of(base) == []
    taken = boxes[1].take("k", SHAPE, KIND, maker(1, []), takers=[0, 1])
    assert taken is not None
    assert taken[1] == 1


def test_the_oldest_go_where_there_are_too_many(base: Path) -> None:
    box, made = Mailbox("a", 0, 3 * (NBYTES + 4096)), list[float]()
    for k in range(10):
        assert box.take(str(k), SHAPE, KIND, maker(k, made), takers=[0, 1]) is not None
        assert sum(p.stat().st_size for p in arrays_of(base)) <= 3 * (NBYTES + 4096)
    assert len(arrays_of(base)) == 3
    other = Mailbox("a", 1, 3 * (NBYTES + 4096))
    for k in (9, 8, 7, 0):
        taken = other.take(str(k), SHAPE, KIND, maker(k, made), takers=[0, 1])
        assert taken is not None
        assert (taken[0] == k).all()
    assert made == [*range(10), 0]
    tiny = Mailbox("a", 0, NBYTES // 2)
    before = len(arrays_of(base))
    taken = tiny.take("large", SHAPE, KIND, maker(1, made), takers=[0, 1])
    assert taken is not None
    assert taken[1] == 1
    assert len(arrays_of(base)) <= before


def test_a_folder_of_somebody_else_is_not_used(base: Path) -> None:
    folder = mailbox._join("a")
    assert folder is not None
    mailbox._leave()
    assert not os.path.exists(folder)
    os.makedirs(folder)
    os.chmod(folder, 0o777)
    taken = Mailbox("a", 0, 100 * NBYTES).take("k", SHAPE, KIND, maker(1, []), takers=[0, 1])
    assert taken is not None
    assert os.listdir(folder) == []


_CHILD = """
import sys, time
import numpy as np
from scidata.read import mailbox
base, what = sys.argv[1:]
mailbox._base = lambda: base
def make(values):
    values[:] = 5
    if what != "end":
        print("making", flush=True)
        time.sleep(60)
    return 5
mailbox.Mailbox("a", 0, 1 << 30).take("k", (300, 1000), np.dtype("f4"), make, takers=[0, 1])
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
            taken = Mailbox("a", 1, 1 << 30).take("k", SHAPE, KIND, maker(1, []), takers=[0, 1])
            assert taken is not None
            assert taken[1] == 1
            assert time.monotonic() - began < 10
        finally:
            process.kill()
    published = [p for p in arrays_of(base) if not p.name.endswith((".new", ".lock"))]
    assert len(published) == (how == signal.SIGKILL)


def test_what_a_killed_job_left_is_removed_by_the_next(base: Path) -> None:
    with child(base, "end") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        assert len(arrays_of(base)) == 1
        box = Mailbox("other", 0, 1 << 30)
        assert box.take("k", SHAPE, KIND, maker(1, []), takers=[0, 1]) is not None
        assert len(list(base.iterdir())) == 2  # of a process that lives, it stays
        process.kill()
    mailbox._sweep()
    assert len(list(base.iterdir())) == 1
    with child(base, "end") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
    assert len(list(base.iterdir())) == 1  # one that ends takes its own along
