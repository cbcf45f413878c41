"""``scidata demo``, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zarr
from typer.testing import CliRunner

from scidata.cli.app import app
from scidata.cli.commands import demo, demo_rank
from scidata.cli.commands.plan import print_plan
from scidata.errors import LauncherError
from scidata.testing import run_ranks
from tests.docs.blocks import blocks_of, differs

ROOT = Path(__file__).parents[2]


def test_ranks_train_as_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "scidata", "demo", "--keep", str(kept), "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["agrees"]
    assert found["relative_difference"]["loss"] < 1e-12
    assert found["relative_difference"]["gradient"] < 1e-12
    assert found["losses"][-1] < found["losses"][0]
    # 121 rows cropped to 120, in patches of 8 rows: 15 over 2 ranks
    assert [rank["rows"] for rank in found["ranks"]] == [[0, 64], [64, 120]]
    # chunks end at row 64: each rank reads its own, together what one process reads, also of steps that samples share
    steps = {step for sample in found["samples"] for step in (sample, sample + 1)}
    assert len(steps) < 2 * len(found["samples"])
    assert sum(rank["bytes_read"] for rank in found["ranks"]) == found["bytes_whole"]
    assert all(rank["samples_read"] == 5 for rank in found["ranks"])
    assert zarr.open_group(str(kept / "weather.zarr"), mode="r")["u"].shape == (16, 3, 121, 240)

    path = str(kept / "weather.zarr")
    print_plan(demo._plan(path, 2), path, every_rank=True)
    demo._print(found, None)
    shown = capsys.readouterr().out
    assert "\\" not in shown  # a line end inside a text is shown as an escape
    blocks = blocks_of((ROOT / "README.md").read_text())
    (readme,) = (block.shown for block in blocks if block.text == "pip install . && scidata demo\n")
    rounding = re.compile(r"\d\.\de-1\d")
    assert not differs(rounding.sub("", shown), rounding.sub("", readme)), shown

    again = CliRunner().invoke(app, ["demo", "--keep", str(kept)])
    assert again.exit_code == 1
    assert again.stderr.startswith("error: ")
    assert str(kept) in again.stderr


@pytest.mark.slow
def test_a_rank_that_fails_under_torchrun_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    absent = str(tmp_path / "absent.zarr")
    with pytest.raises(LauncherError, match=r"absent\.zarr"):
        demo._launch(absent, str(tmp_path), ranks=1, steps=1, echo=False)


def _fail(rank: int, num_ranks: int, *args: str) -> None:
    sys.argv = ["demo_rank", *args]
    with pytest.raises(OSError, match=r"absent\.zarr"):
        demo_rank.main()


def test_a_rank_that_fails_is_reported_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank leaves the reason; then comes a launcher that says no more than its exit code."""
    absent = str(tmp_path / "absent.zarr")
    run_ranks(_fail, 1, absent, str(tmp_path), "1", "1", backend=None)
    launcher = tmp_path / "launcher"
    launcher.write_text("#!/bin/sh\nexit 3\n")
    launcher.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(launcher))
    with pytest.raises(LauncherError, match=r"exit code 3.*absent\.zarr"):
        demo._launch(absent, str(tmp_path), ranks=1, steps=1, echo=False)


def test_difference_that_is_large_or_nan_fails() -> None:
    assert demo.agrees({"loss": 1e-16, "gradient": 1e-15})
    assert not demo.agrees({"loss": 1e-16, "gradient": 1e-11})
    assert not demo.agrees({"loss": float("nan"), "gradient": 0.0})
