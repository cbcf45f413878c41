"""Names that would take over a terminal reach it as escapes: in tables, JSON, errors, progress, on a pty or not."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import traceback
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.errors import ConfigError, CorruptDataError, UnknownNameError, visible

ROOT = Path(__file__).parents[3]
#: Clears the screen, renames the window, starts a link, deletes backwards, C1's CSI, a bidirectional override, a line
#: end, a line separator, and Rich's markup.
HOSTILE = "e\x1b[2J\x1b]0;pwned\x07\x1b]8;;http://x\x1b\\\b\x9b31m\u202egnp\nfeigned: ok\u2028[red][link=http://y]"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
#: What Rich itself writes on a terminal: styles, the cursor off and on and up, lines cleared.
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[\d*[AK]|\r")


def write_hdf5(path: Path) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name in ("u", f"v{HOSTILE}".replace("/", "_")):
            data = file.create_dataset(name, data=rng.random((4, 12, 6)), chunks=(1, 4, 6))
            data.attrs["units"] = f"m{HOSTILE}"
            for dim, label in zip(data.dims, ("time", f"y{HOSTILE}", "x"), strict=True):
                dim.label = label
    return path


def write_zarr(path: Path) -> Path:
    group = zarr.open_group(path, mode="w")
    dims = ("time", f"y{HOSTILE}", "x")
    array = group.create_array(
        "u", shape=(4, 12, 6), chunks=(1, 4, 6), dtype="f4", dimension_names=dims, attributes={"units": f"m{HOSTILE}"}
    )
    array[:] = 1
    coordinate = group.create_array("time", shape=(4,), dtype="i8", dimension_names=("time",))
    coordinate.attrs["units"] = HOSTILE
    coordinate[:] = np.arange(4)
    return path


def write_store(folder: Path) -> Path:
    source = folder / f"cloud{HOSTILE.replace('/', '_')}.h5"
    with h5py.File(source, "w") as file:
        file["x"], file["y"] = np.random.default_rng(0).random((2, 300))
        file[f"p{HOSTILE}".replace("/", "_").replace("\\", "_")] = np.random.default_rng(1).random(300)
    scidata.partition(str(source), str(folder / "store"), kind="points")
    return source


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    source = write_store(folder)
    odd = folder / f"odd{HOSTILE.replace('/', '_')}.h5"
    odd.write_bytes(b"no format")
    return {
        "hdf5": write_hdf5(folder / "a.h5"),
        "zarr": write_zarr(folder / "a.zarr"),
        "store": folder / "store",
        "source": source,
        "odd": odd,
        "missing": folder / f"nothing{HOSTILE.replace('/', '_')}",
        "out": folder / "out",
    }


def run(*args: object) -> tuple[int, str]:
    """Run the command; return its exit code and all it wrote."""
    done = CliRunner().invoke(app, list(map(str, args)))
    return done.exit_code, done.output


def run_in_terminal(*args: object) -> tuple[int, str]:
    """Run the command on a pty, where it draws colours and progress."""
    main, side = pty.openpty()
    command = [sys.executable, "-m", "scidata", *map(str, args)]
    known = {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=os.environ | known)
    os.close(side)
    said = b""
    while True:
        try:
            part = os.read(main, 1 << 16)
        except OSError:  # Linux: nobody holds the other side any more
            break
        if not part:
            break
        said += part
    os.close(main)
    return process.wait(timeout=60), OWN.sub("", said.decode())


COMMANDS = [
    ("inspect", "hdf5"),
    ("inspect", "zarr"),
    ("inspect", "store"),
    ("plan", "hdf5", "--domain", "2"),
    ("plan", "zarr", "--domain", "2"),
    ("plan", "store", "--domain", "2"),
    ("plan", "hdf5", "--domain", "2", "--shard", HOSTILE),
    ("plan", "hdf5", "--domain", "2", "--fields", HOSTILE),
    ("plan", "store", "--domain", "2", "--fields", HOSTILE),
    ("partition", "source", "out", "--kind", "points", "--dry-run"),
    ("partition", "odd", "out", "--kind", "points", "--dry-run"),
    ("verify", "store"),
    ("verify", "missing"),
    ("bench", "hdf5", "--repeats", "1"),
    ("inspect", "odd"),
    ("inspect", "missing"),
    ("verify", "store", HOSTILE),
    (HOSTILE,),
]


@pytest.mark.parametrize("json_too", [False, True])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c).replace(HOSTILE, "HOSTILE"))
def test_no_command_writes_what_a_terminal_obeys(made, command, json_too):
    args = [made.get(arg, arg) for arg in command]
    if json_too and command[-1] != HOSTILE:
        args.append("--json")
    code, said = run(*args)
    assert not RAW.findall(said), said
    assert not re.search(r"^feigned", said, re.M)
    assert code in (0, 1, 2)
    assert "Traceback" not in said
    if json_too and code == 0:
        content = json.dumps(json.loads(said), ensure_ascii=False)
        assert "u202e" in said or "\u202e" not in content


@pytest.mark.parametrize(
    "command", [("inspect", "zarr"), ("plan", "hdf5", "--domain", "2"), ("verify", "store"), ("inspect", "odd")]
)
def test_nor_on_a_terminal(made, command):
    _, said = run_in_terminal(*[made.get(arg, arg) for arg in command])
    assert not RAW.findall(said), said
    assert ("pwned" in said) == (command[0] != "verify")


def test_markup_in_names_is_text(made):
    _, said = run("inspect", made["hdf5"])
    assert "[red][link=http://y]" in said
    _, said = run("inspect", made["missing"])
    assert "[red][link=http:__y]" in said


def test_messages_of_errors_are_escaped():
    for kind in (ConfigError, UnknownNameError, CorruptDataError):
        said = str(kind(f"{HOSTILE}: bad"))
        assert not RAW.findall(said)
        assert "feigned" in said
        assert not RAW.findall("".join(traceback.format_exception(kind(HOSTILE))))
    assert str(ConfigError("é, 気温, two\nlines\tand tabs")) == "é, 気温, two\nlines\tand tabs"


def test_visible():
    assert visible("u 气温 é") == "u 气温 é"
    assert visible("a\x1b[0m\n\u202e\udc80\x9b") == r"a\x1b[0m\n\u202e\udc80\x9b"
