"""Scripts of users pass mypy's strict mode and pyright, with the types that they assert; mistakes are found by both."""

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import scidata
from scidata.loader.arguments import Options

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))


def _path(tool: str) -> str | None:
    """Return where a tool is, first beside this Python."""
    return shutil.which(tool, path=str(Path(sys.executable).parent)) or shutil.which(tool)


def _mypy() -> set[tuple[str, int, str]]:
    # with the library itself, so that CI reads torch's types once
    command = [sys.executable, "-m", "mypy", "-O", "json", "scidata", *map(str, SCRIPTS)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {(Path(e["file"]).name, e["line"], e["message"]) for e in found if e["severity"] == "error"}


def _pyright() -> set[tuple[str, int, str]]:
    command = [str(_path("basedpyright"))]
    command += ["--pythonpath", sys.executable, "--outputjson"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] >= len(SCRIPTS)
    found = [e for e in report["generalDiagnostics"] if e["severity"] == "error"]
    return {(Path(e["file"]).name, e["range"]["start"]["line"] + 1, e["message"]) for e in found}


def test_the_loaders_overloads_have_its_arguments():
    own = {*inspect.signature(scidata.DataLoader.__init__).parameters}
    assert own - {"self", "dataset", "batch_size", "shuffle", "collate_fn"} == {*Options.__annotations__}


@pytest.mark.timeout(900)  # mypy's first run reads all of torch
@pytest.mark.parametrize("check", [_mypy, pytest.param(_pyright, marks=pytest.mark.slow)])
def test_scripts_of_users(check):
    if _path("mypy" if check is _mypy else "basedpyright") is None:
        pytest.skip("the extra dev is not installed")
    found = check()
    marked = {
        (script.name, number)
        for script in SCRIPTS
        for number, line in enumerate(script.read_text().splitlines(), 1)
        if line.endswith("# error")
    }
    assert marked
    where = {(name, line) for name, line, _ in found}
    assert not where - marked, sorted(e for e in found if e[:2] not in marked)
    assert not marked - where, "not found to be wrong"
