"""All tests of this folder on an accelerator made of threads, in a process of its own: torch keeps to one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sim_device

FOLDER = Path(__file__).parent


@pytest.mark.timeout(900)
def test_on_the_stand_in() -> None:
    if os.environ.get(sim_device.CHOSEN):
        pytest.skip("this is the process that it runs in")
    try:
        sim_device.build()
    except sim_device.CannotBuildError as e:
        pytest.skip(str(e))
    command = [sys.executable, "-m", "pytest", "-p", "tests.sim_device", "-n", "0", "--durations", "10", str(FOLDER)]
    done = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
