"""Runs killed at random moments, and resumed: byte for byte what an uninterrupted run writes.

The moments are file-system calls: an audit hook counts those on the output, in the run and in its workers, and kills
the whole process group before one of them. So the windows that last microseconds, such as the one between the last
sample and the manifest, are met as well.
"""

from __future__ import annotations

import contextlib
import filecmp
import io
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.spatial import Delaunay

from scidata.store.format.places import is_store
from scidata.store.partitioning.output import finished_samples
from scidata.store.partitioning.partition import finalize, partition
from tests.unit._children import Forked

ROOT = Path(__file__).parents[3]
NUM_SAMPLES = 3
RUN = """
import os, signal, sys
out, at, seen = os.environ["OUT"], os.environ["DIE_AT"], 0

def count(event, args):
    global seen
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
        if any(os.fspath(a).startswith(out) for a in args if isinstance(a, (str, os.PathLike))):
            seen += 1
            if str(seen) == at or (event == "os.rename" and os.path.basename(args[1]) == at):
                os.killpg(0, signal.SIGKILL)

sys.addaudithook(count)
os.fsync = lambda descriptor: None  # a killed process leaves what it wrote to the kernel
if __name__ == "__main__":
    from scidata.cli.app import app
    app(sys.argv[1:], standalone_mode=False)
    print(seen)
"""


def run(out: Path, script: Path, *args: object, die_at: int | str = "", forked: bool = True) -> tuple[int, str]:
    """Run the command line, forked or as a program; return its exit code and, where it ends, the calls that it made.

    Only of a program do the workers count: they import its script.
    """
    env = {"PYTHONPATH": str(ROOT), "OUT": str(out), "DIE_AT": str(die_at)}
    if forked:
        process = Forked(run_script, script, list(map(str, args)), env)
        code = process.wait()
        return code, "" if code else process.result().strip().rpartition("\n")[2]
    done = subprocess.run(
        [sys.executable, script, *map(str, args)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout.strip().rpartition("\n")[2]


def run_script(script: Path, args: list[str], env: dict[str, str]) -> str:
    os.setsid()
    os.environ.update(env)
    sys.argv = [str(script), *args]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def files_of(top: Path) -> dict[str, Path]:
    return {str(path.relative_to(top)): path for path in top.rglob("*") if path.is_file()}


def assert_same(left: Path, right: Path) -> None:
    a, b = files_of(left), files_of(right)
    assert a.keys() == b.keys()
    for name in a:
        assert filecmp.cmp(a[name], b[name], shallow=False), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files, the store of an uninterrupted run, and the same with its manifest still to come.

    The stores of all tests lie beside these: a manifest says where its inputs lie, as seen from the store.
    """
    top = tmp_path_factory.mktemp("killed")
    (top / "run.py").write_text(RUN)
    for index in range(NUM_SAMPLES):
        points = np.random.default_rng(index).random((150 + index, 2))
        with h5py.File(top / f"case{index}.h5", "w") as file:
            file["points"], file["cells"] = points, Delaunay(points).simplices
            file["node/u"] = points[:, 0].astype("f4")
    partition(sorted(top.glob("*.h5")), top / "whole")
    for part in range(2):
        partition(sorted(top.glob("*.h5")), top / "parts", part=(part, 2))
    return top


@pytest.fixture(scope="module")
def calls(folder: Path) -> int:
    """Return how many calls a whole run makes."""
    out = folder / "counted"
    code, num = run(out, folder / "run.py", "partition", *sorted(folder.glob("*.h5")), out, forked=False)
    assert code == 0
    assert_same(folder / "whole", out)
    return int(num)


@pytest.mark.parametrize(
    ("trial", "jobs", "first", "last"),
    [
        (0, 1, 0.0, 0.02),  # before there is anything of a sample
        (1, 1, 0.02, 0.3),
        (2, 1, 0.3, 0.6),
        (3, 1, 0.6, 0.95),
        (4, 2, 0.01, 0.2),  # of the calls of one process, and one of two makes a third of them at least
        (5, 2, 0.2, 0.33),
    ],
)
def test_killed_runs_resume(
    folder: Path, calls: int, tmp_path: Path, trial: int, jobs: int, first: float, last: float
) -> None:
    out, sources = folder / tmp_path.name, sorted(folder.glob("*.h5"))
    die_at = 1 + random.Random(trial).randrange(int(first * calls), max(int(last * calls), int(first * calls) + 1))
    args = ("partition", *sources, out, "--jobs", jobs)
    code, _ = run(out, folder / "run.py", *args, die_at=die_at, forked=jobs == 1)
    assert code == -signal.SIGKILL
    partition(sources, out, resume=True, jobs=jobs if trial == 5 else 1)
    assert_same(folder / "whole", out)


@pytest.mark.parametrize(("name", "num_whole"), [("sample-000001.zarr", 1), ("manifest.json", NUM_SAMPLES)])
def test_killed_before_a_rename(folder: Path, tmp_path: Path, name: str, num_whole: int) -> None:
    """All of a sample is written, or all samples are there, and only the name is not."""
    out, sources = folder / tmp_path.name, sorted(folder.glob("*.h5"))
    assert run(out, folder / "run.py", "partition", *sources, out, die_at=name)[0] == -signal.SIGKILL
    assert [*out.glob(f".tmp-{name}*")]
    assert not is_store(out)
    assert finished_samples(str(out)) == list(range(num_whole))
    assert partition(sources, out, resume=True).kept == tuple(range(num_whole))
    assert_same(folder / "whole", out)


@pytest.mark.parametrize("entity", [pytest.param(None, marks=pytest.mark.slow), "cell"])
def test_killed_inside_a_sample_over_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entity: str | None
) -> None:
    """It goes on after the last step that was done, unless a file or the input is another."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    raw, out, whole = tmp_path / "a.h5", tmp_path / "a.store", tmp_path / "whole.store"
    shutil.copy(folder / "case0.h5", raw)
    args = ["partition", raw, out, "--memory", "100K", "--resume", *(["--entity", entity] if entity else [])]
    partition(raw, whole, entity=entity)
    code, text = run(out, folder / "run.py", *args)
    num, rng = int(text), random.Random(0)
    assert code == 0
    assert_same(whole, out)
    shutil.rmtree(out)
    kills = [num // 3, "sample-000000.zarr"] if entity else [num // 3, rng.randrange(num // 3), "sample-000000.zarr"]
    for die_at in kills:
        assert run(out, folder / "run.py", *args, die_at=die_at)[0] == -signal.SIGKILL
        assert not is_store(out)
    stopped = tmp_path / "stopped.store"
    shutil.copytree(out, stopped)
    code, text = run(out, folder / "run.py", *args)
    assert code == 0
    assert int(text) < num // 5
    assert_same(whole, out)
    for change in ("a bit",) if entity else ("half a line", "a bit", "the input"):
        shutil.rmtree(out)
        shutil.copytree(stopped, out)
        (scratch,) = out.glob(".tmp-*.scratch")
        changed = max(scratch.glob("[0-9]*"), key=lambda path: path.stat().st_size)
        if change == "the input":
            with h5py.File(raw, "a") as file:
                file["node/u"][3] = 5.0
            shutil.rmtree(whole)
            partition(raw, whole, entity=entity)
        elif change == "half a line":
            with open(scratch / "journal", "ab") as file:
                file.write(b'{"step": "no')
        else:
            content = changed.read_bytes()
            changed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        partition(raw, out, entity=entity, memory="100K", resume=True)
        assert_same(whole, out)


@pytest.mark.parametrize("trial", range(2))
def test_killed_while_finishing(folder: Path, tmp_path: Path, trial: int) -> None:
    out = folder / tmp_path.name
    shutil.copytree(folder / "parts", out)
    code, num = run(out, folder / "run.py", "partition", "--finalize", out)
    assert code == 0
    assert_same(folder / "whole", out)
    shutil.rmtree(out)
    shutil.copytree(folder / "parts", out)
    at = 1 + random.Random(trial).randrange(int(num))
    assert run(out, folder / "run.py", "partition", "--finalize", out, die_at=at)[0] == -signal.SIGKILL
    finalize(out)
    assert_same(folder / "whole", out)
