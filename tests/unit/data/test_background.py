"""The thread that writes."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from scidata.data.output.background import Background


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_it_lets_the_loop_go_first() -> None:
    """It alone, and the threads that it starts."""
    found: list[int] = []

    def look(job: int) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if job:
            thread = threading.Thread(target=look, args=(0,))
            thread.start()
            thread.join()

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    background = Background(look, lambda error: None, max_waiting=1)
    background.put(1)
    background.wait()
    background.stop()
    assert found == [min(own + 10, 19)] * 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_the_loop_gets_on_before_it_begins() -> None:
    began: list[float] = []
    background = Background(lambda job: began.append(time.monotonic()), lambda error: None, max_waiting=1)
    put = time.monotonic()
    background.put(0)
    background.wait()
    background.stop()
    assert began[0] - put >= 0.003
