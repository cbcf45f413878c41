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

from scidata.cli.commands import demo
from scidata.cli.commands.plan import print_plan
from scidata.errors import LauncherError
from tests.docs.blocks import blocks_of, differs

ROOT = Path(__file__).parents[2]


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scidata", "demo", *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def test_ranks_train_as_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept"
    result = run("--keep", kept, "--json")
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

    again = run("--keep", kept)
    assert again.returncode == 1
    assert again.stderr.startswith("error: ")
    assert str(kept) in again.stderr


def test_a_rank_that_fails_is_reported_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    absent = str(tmp_path / "absent.zarr")
    with pytest.raises(LauncherError, match=r"absent\.zarr"):
        demo._launch(absent, str(tmp_path), ranks=1, steps=1, echo=False)


def test_difference_that_is_large_or_nan_fails() -> None:
    assert demo.agrees({"loss": 1e-16, "gradient": 1e-15})
    assert not demo.agrees({"loss": 1e-16, "gradient": 1e-11})
    assert not demo.agrees({"loss": float("nan"), "gradient": 0.0})
