"""Every block of every page runs, in order, in a folder of its own; what pages show as output is what is printed.

Pages that are notebooks run when Sphinx builds the site: ``test_build.py``. A block that cannot run says why in a
comment above it, by one of the reasons below, and is parsed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs import commands
from tests.docs.blocks import ROOT, Block, blocks_of, differs, pages
from tests.docs.environment import hidden_modules, without
from tests.docs.surroundings import NEEDS, PLACES, SURROUNDINGS
from tests.ports import free_port
from tests.unit._s3 import Server, serve

#: Why a block is not run: ``<!-- not run: slurm -->``. It is parsed: Python by ``ast``, commands by ``bash -n``.
REASONS = {
    "slurm": "needs a cluster with SLURM",
    "cloud": "a bucket of somebody else's, on the internet",
    "dlio": "DLIO, with MPI, is no dependency; tests/unit/loader/test_dlio.py runs it where it is installed",
    "another library": "shows what a script looked like before, for a library that is no dependency",
    "other tests": "tests of the reader run the same on files of their own",
}
#: Pages whose ranks torchrun itself starts: the first that is read, as users do, and one on how processes end.
REALLY = ("README.md", "docs/howto/hang.md")
#: Languages that nothing runs, and what reads them.
_PARSED = {"json": json.loads, "text": str, "": str, "toml": str, "yaml": str}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as found:  # one, since file systems are kept by their options, which do not say where
        yield found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.set_default_dtype(torch.float32)


# programs that tests/examples run, too
@pytest.mark.slow_for("docs/howto/examples.md", "docs/howto/train_on_observations.md", "pipelines/README.md")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", pages())
def test_blocks_run(page: str, folder: Path, request: pytest.FixtureRequest) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for module in NEEDS.get(page, ()):
        pytest.importorskip(module)
    for place, here in PLACES.items():
        text = text.replace(place, here.format(port=free_port()))
    blocks = blocks_of(text)
    names: dict[str, Any] = {"__name__": "__main__", "page": page}
    names |= {fixture: partial(request.getfixturevalue, fixture) for fixture in ("server", "programs")}
    if page in REALLY:
        names["python"] = sys.executable if page == "README.md" else str(names["programs"]() / "python")
    surroundings = SURROUNDINGS.get(page)
    with surroundings(folder, names) if surroundings else commands.captured(), without(hidden_modules(text)):
        for block in blocks:
            try:
                _run(block, folder, names)
            except AssertionError as e:
                raise AssertionError(f"{page}:{block.line}: {e}") from e
            except Exception as e:
                e.add_note(f"in the block of {page}:{block.line}")
                raise


def _run(block: Block, folder: Path, names: dict[str, Any]) -> None:
    if "not run" in block.marks:
        assert block.marks["not run"] in REASONS, f"no listed reason: {block.marks['not run']!r}"
        _parse(block)
    elif block.language == "python":
        _run_python(block, folder, names)
    elif block.language in ("bash", "console"):
        _run_commands(block, folder, python=names.get("python"))
    elif not block.language.startswith("{"):  # Sphinx reads directives
        assert block.language in _PARSED, f"a block in {block.language!r}, which the tests do not know"
        assert block.language != "text" or "sketch" in block.marks, "output of nothing; <!-- sketch --> if it is none"
        _PARSED[block.language](block.text)


def _parse(block: Block) -> None:
    if block.language == "python":
        ast.parse(block.text)
    elif block.language in ("bash", "console"):
        commands.parse("".join(command + "\n" for command, _ in _session(block)))


def _run_python(block: Block, folder: Path, names: dict[str, Any]) -> None:
    code = compile(block.text, "page", "exec", dont_inherit=True)
    if block.file:
        (folder / block.file).write_text(block.text)
        return
    with commands.captured() as out:
        exec(code, names)
    _compare(out.getvalue(), block.shown, block, any_order=False)


def _run_commands(block: Block, folder: Path, *, python: str | None) -> None:
    if block.file:
        commands.parse(block.text)
        (folder / block.file).write_text(block.text)
        return
    session = _session(block)
    commands.parse("".join(command + "\n" for command, _ in session))
    for command, shown in session:
        found = [commands.run_line(line, python=python) for line in commands.shell_lines(command)]
        done = [each for each in found if each is not None]
        if done:
            printed = "".join(text for text, _ in done)
            _compare(printed, shown, block, any_order=any(several for _, several in done))


def _session(block: Block) -> list[tuple[str, str | None]]:
    """Return the commands of a block with what the page shows each to print, None where it shows nothing."""
    if block.language == "bash":
        return [(block.text, block.shown)]
    parts = re.split(r"^\$ ", block.text, flags=re.M)
    assert not parts[0], "a session begins with '$ '"
    found = []
    for part in parts[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n", part)
        assert command is not None
        found.append((command[0], part[command.end() :] or None))
    return found


def _compare(printed: str, shown: str | None, block: Block, *, any_order: bool) -> None:
    if shown is not None:
        found = differs(printed, shown, numbers_vary="numbers vary" in block.marks, any_order=any_order)
        assert found is None, found


def test_marks_are_known() -> None:
    """A comment that is spelled otherwise would be taken for none."""
    for page in pages():
        for comment in re.findall(r"^ *<!--.*-->$", (ROOT / page).read_text(encoding="utf-8"), re.M):
            assert re.match(r" *<!-- (not run: |numbers vary|sketch|shows )", comment), f"{page}: {comment}"


def test_reasons_are_used() -> None:
    used = {
        block.marks["not run"]
        for page in pages()
        for block in blocks_of((ROOT / page).read_text(encoding="utf-8"))
        if "not run" in block.marks
    }
    assert used == set(REASONS)


def test_folder_is_left(folder: Path) -> None:
    assert os.getcwd() == str(folder)
