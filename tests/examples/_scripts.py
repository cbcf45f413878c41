"""Scripts of the examples, run on ranks of the fork server."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch.utils.tensorboard  # noqa: F401 - rank 0 of each training takes it: so the fork server has it, too

from scidata.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


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


def lines_of(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return what a training's log has of one kind."""
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]
