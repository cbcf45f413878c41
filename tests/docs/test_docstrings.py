"""The examples of public docstrings run, and print what they show; those of two ranks run on two, each in a folder."""

from __future__ import annotations

import doctest
import inspect
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import scidata
from scidata.testing import run_ranks

NAMES = [name for name in scidata.__all__ if name != "__version__"]
NAMES += [f"metrics.{name}" for name in scidata.metrics.__all__]
OF_TWO_RANKS = [name for name in NAMES if "On each of two ranks" in (inspect.getdoc(attrgetter(name)(scidata)) or "")]
#: Their examples change this process.
ALONE = ("register_op", "set_retry")
#: Their examples are blocks that need what is no dependency.
NOT_RUN = ("from_physicsnemo", "to_physicsnemo")


def run_examples(name: str) -> int:
    """Run the examples of a name and, of a class, its methods; return how many lines of code there were."""
    names: dict[str, Any] = {"scidata": scidata, "torch": torch}
    thing = attrgetter(name)(scidata)
    found = doctest.DocTestFinder(recurse=not inspect.ismodule(thing)).find(thing, name, module=False, globs=names)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in found:
        runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
    return sum(len(test.examples) for test in found)


def on_a_rank(rank: int, num_ranks: int, name: str, folder: str) -> int:
    os.makedirs(f"{folder}/{rank}")
    os.chdir(f"{folder}/{rank}")
    return run_examples(name)


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NOT_RUN:
        assert "Examples\n--------" in (inspect.getdoc(getattr(scidata, name)) or "")
        return
    if name in OF_TWO_RANKS:
        if name == "start_exchange":
            pytest.importorskip("torch_geometric")
        done = run_ranks(on_a_rank, 2, name, str(tmp_path))[0]
    elif name in ALONE:
        (done,) = run_ranks(on_a_rank, 1, name, str(tmp_path))
    else:
        monkeypatch.chdir(tmp_path)
        done = run_examples(name)
    assert done > 0, f"scidata.{name} has no example"


def test_every_name_is_in_the_reference() -> None:
    pages = (Path(__file__).parents[2] / "docs" / "reference").glob("*.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert not [name for name in NAMES if f":: scidata.{name}\n" not in text]
