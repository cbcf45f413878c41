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
from tests.docs.reference import shown

NAMES = [name for name in scidata.__all__ if name != "__version__"]
NAMES += [f"metrics.{name}" for name in scidata.metrics.__all__]
OF_TWO_RANKS = [name for name in NAMES if "On each of two ranks" in (inspect.getdoc(attrgetter(name)(scidata)) or "")]
#: Their examples change this process.
ALONE = ("register_op", "set_retry")
#: Their examples are blocks that need what is no dependency.
NOT_RUN = ("from_physicsnemo", "to_physicsnemo")


def run_examples(name: str) -> int:
    """Run the examples of a name and, of a class, its methods; return how many lines of code there were.

    Examples of methods go on with the names of their class's example.
    """
    names: dict[str, Any] = {"scidata": scidata, "torch": torch}
    thing = attrgetter(name)(scidata)
    found = doctest.DocTestFinder(recurse=not inspect.ismodule(thing)).find(thing, name, module=False, globs=names)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in sorted(found, key=lambda test: len(test.name.split("."))):
        test.globs = dict(names)
        runner.run(test, out=said.append, clear_globs=False)
        if test.name == name:
            names = test.globs
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


#: numpydoc's checks: parameters are all there, under their names, each with a type; there is an example.
CHECKS = {"PR01", "PR02", "PR04", "PR10", "EX01"}
#: Examples of others say enough of these: methods that a metric of one's own overrides, and those of all data sets.
NO_EXAMPLE = (
    "pointwise",
    "of_sample",
    "of_mean",
    "HeteroSample.call_on_parts",
    "DomainDataset.",
    "NeighborLoader.set_epoch",
    "sources.FileFormat.",
)


def test_parameters_are_named_and_typed() -> None:
    validate = pytest.importorskip("numpydoc.validate").validate
    amiss = {}
    for name, thing in shown().items():
        checks = CHECKS - {"EX01"} if any(part in name for part in NO_EXAMPLE) else CHECKS
        if inspect.isclass(thing) and "Parameters\n" not in (inspect.getdoc(thing) or ""):
            checks = set()  # users do not make these
        full = f"{thing.__module__}.{thing.__qualname__}" if not inspect.isclass(thing) else name
        amiss[name] = [message for code, message in validate(full)["errors"] if code in checks]
    amiss = {name: messages for name, messages in amiss.items() if messages}
    assert not amiss, "\n".join(f"{name}: {'; '.join(messages)}" for name, messages in amiss.items())
