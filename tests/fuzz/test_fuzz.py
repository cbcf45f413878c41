"""A small share of the fuzzer's cases, of every format; and that it notices each kind of fault."""

import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

ROOT = str(Path(__file__).parents[2])

# a machine that does other things, too, is no failure: both take half a minute on one core
pytestmark = pytest.mark.timeout(600)


def _run(python, *arguments):
    """Run the fuzzer in a process of its own: it forks, and this one may have threads."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [python, "-m", "tests.fuzz", *map(str, arguments)]
    options = {"cwd": ROOT, "env": environment, "timeout": 580}
    return subprocess.run(command, check=False, capture_output=True, text=True, **options)


@pytest.mark.skipif(
    h5py.version.hdf5_version_tuple < (2,), reason="HDF5 before 2.0 ends the process over some damaged files"
)
def test_damaged_files_of_every_format(programs):
    done = _run(programs / "python", "--cases", 90, "--seed", 0, "--jobs", 1)
    assert done.returncode == 0, done.stdout[done.stdout.find("FAILURE") :] + done.stderr[-2000:]
    total = re.search(r"^all +all +(\d+) +(\d+) +(\d+) +(\d+) +0$", done.stdout, re.M)
    assert total is not None, done.stdout
    cases, right, errors, different = map(int, total.groups())
    assert cases == right + errors + different == 90
    assert min(right, errors) > 15  # most bytes of most files matter, and most damage shows
    assert "store" in done.stdout


@pytest.mark.slow
def test_a_case_is_the_same_each_time():
    first, second = (_run(sys.executable, "--case", "netcdf3:3", "netcdf3:4").stdout for _ in range(2))
    assert first.count("netcdf3/") == 2
    assert first == second


@pytest.mark.slow
def test_planted_faults_are_noticed():
    done = _run(sys.executable, "--planted")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split(": ") for line in done.stdout.splitlines()]
    assert len(lines) == 14
    for name, word, said in lines:
        found = said.split(", ")
        assert word in found, f"{name}: expected {word}, found {said}"
        assert set(found) <= {word, "none"}, f"{name}: {said}"
        # of the last three not every flipped bit is in what is read, and some stores do not open at all
        assert name in ("unchecked", "other values", "unverified") or "none" not in found, f"{name}: {said}"
