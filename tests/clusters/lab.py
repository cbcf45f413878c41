"""Everything that a scenario needs: hosts, SLURM on them, data, and ways to look at what a training did."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clusters.hosts import ROOT, Host
from tests.clusters.slurm import Slurm

NUM_SAMPLES = 16


@dataclass(kw_only=True)
class Lab:
    """Hosts, with SLURM on them, and a folder of data that all of them see."""

    folder: Path
    controller: Host
    nodes: list[Host]
    slurm: Slurm
    _num: dict[str, int] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """A grid of 16 times; a chunk is one time."""
        return self.folder / "era5.zarr"

    def new(self, name: str) -> Path:
        """Return a new folder."""
        self._num[name] = self._num.get(name, 0) + 1
        path = self.folder / f"{name}-{self._num[name]}"
        path.mkdir()
        return path

    def training(self, out: Path, **options: object) -> list[str]:
        """Return the words that run a training."""
        return [sys.executable, str(ROOT / "tests/clusters/training.py"), str(self.data), str(out), json.dumps(options)]


def result_of(out: Path) -> dict[str, Any]:
    """Return what a training that has come to its end has left."""
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def assert_all_once(out: Path, *, repeated: int = 0) -> None:
    """Assert that every sample was taken once, though a sampler may fill up the last step with repeated ones."""
    seen = result_of(out)["seen"]
    assert set(seen) == set(range(NUM_SAMPLES)), f"samples that are missing: {set(range(NUM_SAMPLES)) - set(seen)}"
    assert len(seen) <= NUM_SAMPLES + repeated, f"samples were taken twice: {sorted(seen)}"


def steps_of(out: Path) -> int:
    """Return how many samples the last complete checkpoint has seen."""
    return max((int(path.parent.name.removeprefix("step_")) for path in out.glob("step_*/.metadata")), default=0)


def wait_until(what: str, is_so: Callable[[], object], timeout: float = 90) -> float:
    """Wait until something is so; return the seconds."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < timeout, f"not within {timeout} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - began
