"""Errors as JSON, in the words of options; warnings once each; a sign of life; completion."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import warnings

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from scidata.cli import progress
from scidata.cli.app import app
from scidata.cli.escaped import spoke
from scidata.cli.output import console
from scidata.cli.progress import warnings_on_stderr
from scidata.testing import make_grid


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("failures")
    make_grid(path / "era5.zarr", chunks=(1, 3, 7, 24))
    for number in range(3):
        with h5py.File(path / f"mesh_{number}.h5", "w") as file:
            file["points"] = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1], [2, 0], [9, 9]])
            file["cells"] = np.array([[0, 1, 2], [0, 2, 3], [1, 4, 2], [1, 4, 4]])
            file["u"] = np.arange(6.0)
    return path


@pytest.mark.parametrize(
    ("line", "kind", "says", "code"),
    [
        ("inspect absent.zarr --json", "FileNotFoundError", "absent.zarr: there is no such file", 1),
        ("plan era5.zarr --json --domain 2 --fields uu", "UnknownNameError", "did you mean 'u'", 2),
        ("plan era5.zarr --json --domain x", "BadParameter", "Invalid value for '--domain'", 2),
        ("plan era5.zarr --json", "MissingParameter", "'--domain'", 2),
        ("plan era5.zarr --domain 2 --json --hallo 2", "NoSuchOption", "--halo", 2),
        ("paln era5.zarr --json", "UsageError", "paln", 2),
        ("verify era5.zarr --json", "", "no scidata store", 1),
        ("partition mesh_0.h5 out --json --mesh absent.nc", "FileNotFoundError", "absent.nc", 1),
    ],
)
def test_errors_as_json(folder, monkeypatch, line, kind, says, code):
    monkeypatch.chdir(folder)
    result = run(*line.split())
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == error["exit_code"] == code
    assert kind in error["type"]
    assert says in error["message"]
    assert result.stderr, "the line for people stays"
    assert result.stdout.count('"error"') == 1


def test_without_json_stdout_is_empty(folder):
    assert run("inspect", folder / "absent.zarr").stdout == ""
    # what follows -- is a name
    assert run("inspect", "--", "--json").stdout == ""


@pytest.mark.parametrize(
    ("line", "says", "never"),
    [
        ("plan era5.zarr --domain 2 --align 5", "--align 5", "align="),
        ("partition mesh_0.h5 out --edges faces", "--edges faces and no --entity do not go together", "edges="),
        ("partition era5.zarr out", "--points", "points="),
        (
            "partition mesh_0.h5 out --kind graph --entity cell",
            "--entity cell: only a mesh has cells, not --kind graph",
            "entity=",
        ),
    ],
)
def test_errors_name_options(folder, monkeypatch, line, says, never):
    monkeypatch.chdir(folder)
    result = run(*line.split())
    assert result.exit_code
    words = " ".join(result.stderr.replace("│", " ").split())
    assert says in words
    assert never not in words


def test_equal_warnings_are_one_line(capsys):
    with warnings_on_stderr(lambda text: text.replace("halo=", "--halo ")):
        warnings.simplefilter("always")
        for _ in range(1000):
            warnings.warn("halo=2 is wide", stacklevel=1)
        logging.getLogger("scidata").warning("tried %s", "again")
    assert capsys.readouterr().err.splitlines() == [
        "warning: --halo 2 is wide",
        "warning: tried again",
        "warning: --halo 2 is wide (1000 times)",
    ]


def test_equal_notes_of_many_samples_are_one_line(folder, tmp_path):
    result = run("partition", *(folder / f"mesh_{i}.h5" for i in range(3)), tmp_path / "out", "--repair", "all")
    assert result.exit_code == 0, result.output
    notes = [line for line in result.stdout.splitlines() if line.startswith("note: ")]
    assert notes
    assert all(re.match(r"note: mesh_0 and 2 more: ", line) for line in notes)
    shown = [line for line in run("inspect", tmp_path / "out").stdout.splitlines() if "2 more: " in line]
    assert len(shown) == len(notes)


def test_a_sign_of_life(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET", 0.1)

    def told():
        """Wait for a line."""
        until, text = time.monotonic() + 30, ""
        while "\n" not in text and time.monotonic() < until:
            time.sleep(0.02)
            text += capsys.readouterr().err
        return text

    with progress.pulse("at work"):
        assert re.match(r"at work: \d+ s\n", told())
        with progress.progress("planning", 8) as tick:
            tick()
            capsys.readouterr()
            assert re.match(r"planning: 1 of 8, \d+ s\n", told())
        before = spoke.at
        console().print("step")  # what prints needs no other sign
        assert spoke.at > before
    assert "scidata-pulse" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("path", ["era5.zarr", "mesh.store"])
def test_a_picture_without_matplotlib_is_refused_before_any_work(folder, monkeypatch, path, tmp_path):
    run("partition", folder / "mesh_0.h5", tmp_path / "mesh.store", "--repair", "all")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    source = tmp_path / path if path == "mesh.store" else folder / path
    monkeypatch.setattr("scidata.cli.commands.plan.plan_grid", None)
    monkeypatch.setattr("scidata.cli.commands.plan.plan_store", None)
    result = run("plan", source, "--domain", "2", "--plot", tmp_path / "a.png")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: pictures need matplotlib; pip install 'matplotlib>=")


def test_completion(tmp_path):
    environ = os.environ | {"_SCIDATA_COMPLETE": "complete_bash"}
    command = [sys.executable, "-m", "scidata"]
    for typed, place, found in (("scidata pl", "1", "plan"), ("scidata plan --ha", "2", "--halo")):
        environ |= {"COMP_WORDS": typed, "COMP_CWORD": place}
        completed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert completed.stdout.split() == [found]
    shown = subprocess.run([*command, "--show-completion", "bash"], capture_output=True, text=True, check=False)
    assert "scidata" in shown.stdout + run("--help").stdout
