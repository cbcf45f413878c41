"""What the docstrings of examples and recipes show: recipes' commands and calls run, examples' commands are checked."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import scidata
from tests.docs import commands
from tests.docs.blocks import ROOT
from tests.docs.surroundings import pipelines as data_of_pipelines
from tests.examples._scripts import module_of

PROGRAMS = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "pipelines").glob("*.py"))]
#: Does the same as another line, to a folder that is there by then; pipelines/README.md shows it as well, and is run.
NOT_RUN = "python -m pipelines.era5_grid convert"


def shown(program: Path) -> list[str]:
    """The indented lines of the docstring, continued ones as one."""
    text = (ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or "").replace("\\\n", "")
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_docstring(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_geometric", reason="graphs need the extra 'pyg'")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with data_of_pipelines(tmp_path, names):
        if program.parent.name == "pipelines":
            module = importlib.import_module(f"pipelines.{program.stem}")
            names |= {name: getattr(module, name) for name in module.__all__} | {"mesh": scidata.init_mesh()}
        for line in shown(program):
            if line.startswith(("python ", "torchrun ")):
                for command in commands.shell_lines(line):
                    if not command.startswith(NOT_RUN):
                        commands.run_line(command)
                continue
            if "batch" in line:
                names["batch"] = next(iter(scidata.DataLoader(names["ds"], batch_size=2)))
            exec(compile(line, program.name, "exec"), names)


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.slurm")), ids=lambda script: script.name)
def test_job_script(script: Path, tmp_path: Path) -> None:
    """The arguments that a job script gives are such as its example takes."""
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    job = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_NAME": "train", "SLURM_CPUS_PER_TASK": "8"}
    done = subprocess.run(
        ["bash", script, "era5", "--lr", "1e-4"], cwd=tmp_path, env=os.environ | job, capture_output=True, check=True
    )
    words = done.stdout.decode().splitlines()
    at = words.index("python")
    args = module_of(Path(words[at + 1]).stem).arguments(words[at + 2 :])[1]
    assert (args.data, args.lr, args.domain, args.epochs) == ("era5", 1e-4, 4, 50)


def test_what_there_is() -> None:
    assert sum(len(shown(program)) for program in PROGRAMS) >= 25
