"""Scripts of the examples, run on ranks of the fork server."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.tensorboard  # rank 0 of each training takes it: so the fork server has it, too
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from scidata.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
#: What the names of a launcher's variables begin with.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_")


def module_of(script: str) -> Any:
    """Load a script as a module."""
    if script not in sys.modules:
        sys.path.insert(0, str(EXAMPLES))
        spec = importlib.util.spec_from_file_location(script, EXAMPLES / f"{script}.py")
        assert spec
        assert spec.loader
        sys.modules[script] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[script])
    return sys.modules[script]


def run_here(rank: int, num_ranks: int, script: str, args: tuple[object, ...]) -> tuple[Any, str]:
    """Run a script in this process; return its exit code and what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = module_of(script).main([*map(str, args)])
        except SystemExit as e:
            code = e.code
    return code, output.getvalue()


def on_ranks_of(script: str, num_ranks: int, *args: object) -> tuple[int, str]:
    """Run a script on ranks, which start faster than torchrun's; return what rank 0 did."""
    found: tuple[int, str] = run_ranks(run_here, num_ranks, script, args, timeout=150)[0]
    return found


def _in_turn(rank: int, num_ranks: int, script: str, runs: list[tuple[object, ...]]) -> list[tuple[Any, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", lambda: None)  # at the end of each run
        return [run_here(rank, num_ranks, script, args) for args in runs]


def in_turn_on_ranks_of(script: str, num_ranks: int, *runs: tuple[object, ...]) -> list[tuple[int, str]]:
    """Run a script several times on the same ranks, which then start once; return what rank 0 did in each."""
    found: list[tuple[int, str]] = run_ranks(_in_turn, num_ranks, script, runs, timeout=150)[0]
    return found


def _alone(rank: int, num_ranks: int, target: str, args: tuple[object, ...]) -> tuple[Any, str]:
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    sys.argv = [target, *map(str, args)]
    start = runpy.run_path if target.endswith(".py") else runpy.run_module
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            start(target, run_name="__main__")
        except SystemExit as e:
            return e.code, output.getvalue()
    return 0, output.getvalue()


def alone(target: str | Path, *args: object) -> tuple[int, str]:
    """Do as ``python FILE`` or ``python -m MODULE``, without a launcher, in a process that has torch loaded."""
    found: tuple[int, str] = run_ranks(_alone, 1, str(target), args, timeout=150, backend=None)[0]
    return found


def assert_equal_to_one_process(code: int, output: str, layout: str) -> None:
    """Check what ``--check`` has printed."""
    assert code == 0, f"{layout}: {output}"
    found = re.search(rf"check {layout},.* loss (\S+), gradients (\S+): ok", output)
    assert found, f"{layout}: {output}"
    assert max(float(found[1]), float(found[2])) <= 1e-12, f"{layout}: {output}"


def whole_of(checkpoint: Path) -> Path:
    """Write a checkpoint as one file."""
    whole = checkpoint.parent / f"{checkpoint.name}.pt"
    dcp_to_torch_save(str(checkpoint), str(whole))
    return whole


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint's model and progress, in one process."""
    state = torch.load(whole_of(checkpoint), weights_only=False)
    return state["model"] | {"progress": state["progress"][:3]}


def lines_of(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return what a training's log has of one kind."""
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]
