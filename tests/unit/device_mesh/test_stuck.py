"""The door to other threads and to broken process groups: who passes it, and what a look and a raised error do."""

import ast
import itertools
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import scidata
from scidata.device_mesh.board.stuck import StallDetector, raise_in
from scidata.errors import RankFailedError

ROOT = Path(scidata.__file__).parent
DOOR = ("break_groups", "collective_of", "hang_up", "raise_in", "StallDetector")


def test_who_passes_the_door():
    """One more caller than here is one more reason for groups to break: say it in the door's docstring first."""
    calls, mentions = Counter(), Counter()
    for path in ROOT.rglob("*.py"):
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
            if name in (
                "break_groups",
                "hang_up",
                "collective_of",
                "raise_in",
                "StallDetector",
                "PyThreadState_SetAsyncExc",
                "_current_frames",
            ):
                mentions[where, name] += 1
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                calls[where, name] += name in DOOR
    board, stuck = "device_mesh/board/board.py", "device_mesh/board/stuck.py"
    deadlock = "device_mesh/board/deadlock.py"
    expected = {
        (deadlock, "StallDetector"): 1,  # looks alone
        (deadlock, "collective_of"): 1,
        (board, "break_groups"): 1,  # a failure that is due
        (board, "raise_in"): 1,
        (board, "StallDetector"): 1,
        (board, "hang_up"): 1,
        ("device_mesh/board/__init__.py", "break_groups"): 1,  # the end of a process that has left a loop
        ("device_mesh/groups.py", "break_groups"): 1,  # the end of a process
    }
    assert {key: count for key, count in calls.items() if count} == expected
    assert mentions == expected | {(stuck, "PyThreadState_SetAsyncExc"): 1, (stuck, "_current_frames"): 2}


@pytest.mark.parametrize("in_python", [False, True])
def test_an_error_is_raised_in_another_thread_as_soon_as_it_runs(in_python):
    raised, begun = [], threading.Event()

    def loop():
        try:
            begun.set()
            for _ in itertools.repeat(0) if in_python else ():  # CPython catches nothing at the end of a while's round
                pass
            time.sleep(0.5)
            for _ in range(10**6):
                pass
        except Exception as e:
            raised.append(e)

    thread = threading.Thread(target=loop)
    thread.start()
    begun.wait()
    error = RankFailedError("rank 1 failed", 1)
    raise_in(thread.ident, error)
    thread.join(20)
    assert raised == [error]


def test_a_thread_that_works_is_not_seen_to_wait_and_one_that_waits_here_is_not_in_a_collective():
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    stalls = StallDetector()
    try:
        assert stalls.look(thread.ident) is None  # the first look
        time.sleep(0.5)
        assert stalls.look(thread.ident) is None  # in its own code: it may
        stalls._since -= 10
        assert stalls.look(thread.ident) == "somewhere"
        assert stalls.look(threading.get_ident()) is None  # another place
    finally:
        over.set()
        thread.join()
    assert stalls.look(-1) is None
