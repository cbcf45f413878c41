"""Settings for all tests."""

import gc
import linecache
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

# as many processes as cores run the tests: threads of each would wait for cores by turning in loops
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from scidata.sources import formats
from scidata.sources.access import object_stores
from tests import heavy, warm

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script, where shells ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure. Examples are the same in each run, so that a change fails by its own fault alone;
# ``--hypothesis-profile random`` draws new ones.
settings.register_profile("scidata", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("scidata")


@pytest.fixture(params=["obstore", "fsspec"])
def engine(request, monkeypatch):
    """What makes the requests to object stores. Users get obstore; what both must do runs with fsspec, too."""
    if request.param == "obstore":
        pytest.importorskip("obstore", reason="the other engine needs obstore")
    monkeypatch.setattr(object_stores, "enabled", request.param == "obstore")
    return request.param


#: Of few tests that take minutes: first, so that the others go on beside them.
FIRST = ("test_build.py", "test_typing.py", "test_fuzz.py", "test_files_of_others.py")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a case by its values, where pytest would number it: a failure says ``isel={'level': 3}``, not ``isel7``."""
    if isinstance(val, list | tuple | dict | slice | np.dtype | torch.dtype | torch.Size):
        text = re.sub(r"<class '(?:\w+\.)*(\w+)'>|<function (?:\w+\.)*(\w+) at 0x\w+>", r"\1\2", repr(val))
    elif isinstance(val, np.ndarray | torch.Tensor):
        text = f"{val.dtype}{list(val.shape)}"
    elif isinstance(val, FunctionType) and val.__name__ == "<lambda>":
        places = [place for place in val.__code__.co_positions() if place[0] == place[1] and None not in place]
        first = min((place for place in places if place[3]), default=None)
        if first is None:
            return None
        ends = [place[3] for place in places if place[0] == first[0]]
        text = linecache.getline(val.__code__.co_filename, first[0])[first[2] : max(ends)]
    else:
        return None
    if not text or " at 0x" in text or "<lambda>" in text or "\n" in text:
        return None
    return f"{argname}={text}" if len(text) <= 60 else f"{argname}={text[:57]}..."


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("slow_for"):
            assert isinstance(item, pytest.Function)
            if item.callspec.id in mark.args:
                item.add_marker("slow")
    _leave_two_ranks_to_three(items)
    if left := set(heavy.left_to_others(items)):
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: item.path.name not in FIRST)


def _leave_two_ranks_to_three(items: list[pytest.Item]) -> None:
    """Make a case on two ranks slow that runs on three as well, where more can go wrong."""
    cases: dict[tuple[str, str], dict[int, pytest.Item]] = {}
    for item in items:
        values = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        if type(num_ranks := values.pop("num_ranks", None)) is int:
            cases.setdefault((item.nodeid.partition("[")[0], repr(values)), {})[num_ranks] = item
    for case in cases.values():
        if {2, 3} <= case.keys() and not case[3].get_closest_marker("slow"):
            case[2].add_marker("slow")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note which test failed where ``.ci/run`` asks for it."""
    if report.failed and (file := os.environ.get("SCIDATA_FAILED_TESTS")):
        with open(file, "a") as failed:
            failed.write(f"{report.nodeid}\n")


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through all modules each time: 0.3 s, of which tests ask for hundreds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a ``python``, ``scidata`` and ``torchrun`` that start with torch loaded."""
    with warm.programs(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """End what a test made in this process: the next one may make its own process group, and formats of that name."""
    registered = list(formats._registered)
    yield
    formats._registered[:] = registered
    if dist.is_initialized():
        dist.destroy_process_group()
