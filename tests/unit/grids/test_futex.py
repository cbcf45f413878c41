"""Waking whoever waits for a key, in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scidata.grids.blocks import futex as futex_module
from scidata.grids.blocks.futex import Futex

KEY, OTHER = b"\1\0\0\0key", b"\2\0\0\0key"


@pytest.mark.parametrize("has_futex", [True, False])
def test_a_ring_wakes_at_once_and_nobody_waits_for_what_was_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_futex: bool
) -> None:
    if not has_futex:
        monkeypatch.setattr(futex_module, "_NUMBERS", {})
    futex = Futex(str(tmp_path / "futex"))
    heard = futex.heard(KEY)
    futex.ring(OTHER)
    assert futex.heard(KEY) == heard
    threading.Timer(0.2, lambda: futex.ring(KEY)).start()
    began = time.monotonic()
    while futex.heard(KEY) == heard:
        assert time.monotonic() < began + 20
        futex.wait(KEY, heard, 30.0)
    assert 0.1 < time.monotonic() - began < 10
    began = time.monotonic()
    futex.wait(KEY, heard, 30.0)
    assert time.monotonic() - began < 5
    futex.wait(KEY, futex.heard(KEY), 0.05)


def test_another_process_rings(tmp_path: Path) -> None:
    path = str(tmp_path / "futex")
    futex = Futex(path)
    heard = futex.heard(KEY)
    code = f"import sys; from scidata.grids.blocks.futex import Futex; Futex({path!r}).ring({KEY!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as child:
        deadline = time.monotonic() + 30
        while futex.heard(KEY) == heard and time.monotonic() < deadline:
            futex.wait(KEY, heard, 30.0)
        assert child.wait(30) == 0
    assert futex.heard(KEY) == heard + 1
