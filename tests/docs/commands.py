"""Runs the commands that pages show, in this process where that is the same and quicker."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from scidata.cli.app import app
from scidata.shard.op_table import HANDLERS
from scidata.testing import run_ranks
from tests.docs.blocks import ROOT

#: Commands that are not run here, by how they begin, with the reason. Extras, scripts and options are checked.
NOT_RUN = {
    "pip install": "installs; what it names is compared with pyproject.toml",
    "scidata demo": "tests/examples/test_demo.py runs it",
    "pytest": "this is it",
    "python -m venv": "the tests run in one",
    "pre-commit": "runs the linters, which .ci/run does beside the tests",
    "nox": "makes environments",
    "ruff": ".ci/run runs it beside the tests",
    "bash .ci/run": "runs these tests",
    "sphinx-build": "test_build.py runs it",
    "python -m tests.": "programs of their own, of which the tests run a share",
    "python tests/bench/": "measures for minutes",
    "PYTHONPATH=. python tests/bench/": "measures for minutes",
    "torchrun … examples/": "tests/examples runs them; a page that goes on from there has them in its folder",
    "python examples/": "tests/examples runs them",
    "tensorboard": "a server that does not end",
}
#: What is smaller here than on the page, so that it takes no minutes and no GB.
SMALLER = {"num_lat=721, num_lon=1440": "num_lat=91, num_lon=144", "--times 1200": "--times 12"}


def shell_lines(text: str) -> list[str]:
    """Join continued lines, and leave comments out."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def parse(text: str) -> None:
    """Have bash parse it, without running anything."""
    found = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr


def run_line(line: str, *, python: str | None = None) -> tuple[str, bool] | None:
    """Run a line of commands joined by ``&&``; return what it prints, and whether several ranks did; None if not run.

    ``python`` runs torchrun itself, if given; else ranks are forked with the variables that it sets.
    """
    printed, of_ranks, ran = "", False, False
    for large, small in SMALLER.items():
        line = line.replace(large, small)
    for command in line.split(" && "):
        words = shlex.split(command)
        if _not_run(words):
            check_command(words)
            continue
        ran = True
        text, several = _run(words, python)
        printed, of_ranks = printed + text, of_ranks or several
    return (printed, of_ranks) if ran else None


def _not_run(words: list[str]) -> bool:
    text = " ".join(words)
    starts = text.startswith(tuple(NOT_RUN))
    script = next((word for word in words if word.startswith("examples/")), "")
    return starts or (words[0] == "torchrun" and bool(script) and not Path(script).exists())


def _run(words: list[str], python: str | None) -> tuple[str, bool]:
    if words[0] == "scidata" or words[:3] == ["python", "-m", "scidata"]:
        result = CliRunner().invoke(app, words[1 if words[0] == "scidata" else 3 :], env={"COLUMNS": "100"})
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"
        return result.stdout, False
    if words[:2] == ["python", "-c"]:
        with captured() as out:
            exec(words[2], {"__name__": "__main__"})
        return out.getvalue(), False
    if words[:2] == ["python", "-m"] and words[2].startswith("pipelines."):
        with captured() as out:
            assert importlib.import_module(words[2]).main(words[3:]) == 0
        return out.getvalue(), False
    if words[0] == "python" and words[1].endswith(".py"):
        return _script(words[1:]), False
    if words[0] == "torchrun":
        return (_torchrun(python, words[1:]) if python else _ranks(words[1:])), True
    if words[0] in ("mkdir", "cat", "mpirun", "srun", "sbatch"):
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout, words[0] in ("mpirun", "srun")
    raise AssertionError(f"a page shows a command that the tests do not know how to run: {shlex.join(words)}")


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """Collect what is printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        yield out


def _script(words: list[str]) -> str:
    """Run a script as one process does, in this one, which has torch already."""
    before, rules = (sys.argv, sys.path), dict(HANDLERS)
    sys.argv, sys.path = words, [str(Path(words[0]).parent.resolve()), *sys.path]
    try:
        with captured() as out, contextlib.suppress(SystemExit):
            runpy.run_path(str(Path(words[0]).resolve()), run_name="__main__")
    finally:
        sys.argv, sys.path = before
        for function in HANDLERS.keys() - rules.keys():
            del HANDLERS[function]
        if dist.is_initialized():
            dist.destroy_process_group()
    return out.getvalue()


def _ranks(words: list[str]) -> str:
    at = words.index("--nproc-per-node")
    # as torchrun's agent does: the store outlives the rank that is through first
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    printed = run_ranks(_script_of_rank, int(words[at + 1]), words[at + 2 :], store.port, backend=None, timeout=120)
    return "".join(printed)


def _script_of_rank(rank: int, num_ranks: int, words: list[str], port: int) -> str:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(number) for name, number in (numbers | {"MASTER_PORT": port}).items()}
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return _script(words)


def _torchrun(python: str, words: list[str]) -> str:
    """Each rank prints into a file of its own: on one pipe their lines may mix."""
    logs = Path("torchrun_logs")
    options = [*([] if "--standalone" in words else ["--standalone"]), "--redirects", "3", "--log-dir", str(logs)]
    done = subprocess.run(
        [python, "-m", "torch.distributed.run", *options, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    errors = "".join(log.read_text()[-3000:] for log in logs.rglob("stderr.log"))
    assert done.returncode == 0, f"torchrun {shlex.join(words)}\n{errors}"
    printed = [line for log in sorted(logs.rglob("stdout.log")) for line in log.read_text().splitlines(keepends=True)]
    logs.rename(f"{logs}_{len(list(Path().glob('torchrun_logs_*')))}")
    return "".join(line for line in printed if not line.startswith("[Gloo]"))  # of torch 2.10


def check_command(words: list[str]) -> None:
    """Check what can be known of a command without running it: extras, scripts, modules and their options."""
    text = " ".join(words)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for found in re.findall(r"\.\[([\w,]+)\]", text):
        assert set(found.split(",")) <= set(extras), text
    if "--" in words:  # what follows goes to another script
        at = words.index("--")
        check_command(["python", "examples/train_vit.py", *words[at + 1 :]])
        words = words[:at]
    for script in (word for word in words if word.endswith((".py", ".slurm"))):
        assert (ROOT / script).is_file(), f"{text}: there is no {script}"
        source = (ROOT / script).read_text()
        for other in re.findall(r"^from (train\w+) import", source, re.MULTILINE):
            source += (ROOT / script).with_name(f"{other}.py").read_text()
        options = [word for word in words[words.index(script) :] if word.startswith("--")]
        assert script.endswith(".slurm") or all(f'"{option}"' in source for option in options), text
    if words[:2] == ["python", "-m"] and words[2].startswith("tests."):
        assert importlib.util.find_spec(words[2]) is not None, text
        if "demo" not in text:
            pytest.importorskip(words[2].split(".")[0])
