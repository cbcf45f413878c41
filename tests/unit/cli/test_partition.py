"""``scidata partition`` and ``scidata verify``: exit codes, tables, JSON, progress."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy.spatial import Delaunay
from typer.testing import CliRunner

from scidata.cli.app import app
from scidata.store.format.places import is_store
from scidata.store.format.store import open_store

ROOT = Path(__file__).parents[3]


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args])


def run_json(*args: object) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("raw")
    for index in range(3):
        points = np.random.default_rng(index).random((200, 2))
        with h5py.File(folder / f"case{index}.h5", "w") as file:
            file["points"] = points
            file["cells"] = Delaunay(points).simplices
            file["node/u"] = points[:, 0]
            file["time"] = np.arange(3)
    return sorted(folder.glob("*.h5"))


@pytest.fixture(scope="module")
def store(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("store") / "s"
    result = run("partition", *files, out)
    assert result.exit_code == 0, result.output
    assert "3 written of 3 samples" in result.stdout
    assert "600 nodes" in result.stdout
    assert result.stderr == ""  # no bar: it is no terminal
    return out


def test_json(files: list[Path], tmp_path: Path) -> None:
    report = run_json("partition", *files, tmp_path / "s", "--order", "rcb", "--fields", "u", "--weights", "edges")
    assert report["finished"]
    assert report["counts"]["node"] == 600
    assert open_store(tmp_path / "s").manifest.order == "rcb"


def test_glob(files: list[Path], store: Path, tmp_path: Path) -> None:
    assert run("partition", files[0].parent / "*.h5", tmp_path / "s").exit_code == 0
    assert (tmp_path / "s" / "manifest.json").read_bytes() == (store / "manifest.json").read_bytes()


def test_parts(files: list[Path], store: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    result = run("partition", *files, out, "--part", "1/2")
    assert (result.exit_code, "1 written of 3" in result.stdout) == (0, True)
    assert f"scidata partition --finalize {out}" in result.stdout
    result = run("partition", "--finalize", out)
    assert (result.exit_code, "2 of 3 samples are missing (0, 2)" in result.stderr) == (1, True)
    assert run("partition", *files, out, "--part", "0/2").exit_code == 0
    assert run_json("partition", "--finalize", out)["kept"] == [0, 1, 2]
    assert (out / "manifest.json").read_bytes() == (store / "manifest.json").read_bytes()


def test_dry_run(files: list[Path], tmp_path: Path) -> None:
    result = run("partition", *files, tmp_path / "s", "--dry-run")
    assert result.exit_code == 0
    for part in ("would write 3 of 3 samples", "case1", "200", "u: float64 (200,) on node"):
        assert part in result.stdout
    planned = run_json("partition", *files, tmp_path / "s", "--dry-run", "--edges", "knn:4", "--kind", "graph")[
        "planned"
    ]
    assert [sample["counts"]["edge"] for sample in planned] == [800, 800, 800]
    assert not (tmp_path / "s").exists()


def test_existing_output(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "s"
    assert run("partition", files[0], out).exit_code == 0
    result = run("partition", files[0], out)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--overwrite replaces it" in result.stderr
    assert "1 there already" in run("partition", files[0], out, "--resume").stdout
    assert "2 written" in run("partition", *files[:2], out, "--overwrite").stdout


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--order", "zigzag"], "none of hilbert"),
        (["--part", "3/3"], "counted from 0"),
        (["--jobs", "0"], "0 is less than 1"),
        (["--overwrite", "--resume"], "excludes --overwrite"),
        (["--finalize", "--resume"], "takes no --part"),
        (["--finalize"], "folder alone"),
    ],
)
def test_usage(files: list[Path], tmp_path: Path, args: list[str], part: str) -> None:
    result = run("partition", files[0], tmp_path / "s", *args)
    assert result.exit_code == 2, result.output
    assert part in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "s").exists()


def test_names_that_are_nearly_right(files: list[Path], store: Path, tmp_path: Path) -> None:
    for args in (["partition", files[0].with_suffix(".h4"), tmp_path / "s"], ["verify", store.with_name("ss")]):
        result = run(*args)
        assert result.exit_code == 1
        assert f"did you mean '{'case0.h5' if args[0] == 'partition' else 's'}'" in result.stderr


def test_no_output_named(files: list[Path]) -> None:
    assert run("partition", files[0]).exit_code == 2


def test_verify(store: Path, tmp_path: Path) -> None:
    result = run("verify", store)
    assert result.exit_code == 0
    assert "sound: 3 samples" in result.stdout
    assert run_json("verify", store)["fault"] is None
    assert run("verify", tmp_path).exit_code == 1
    assert "no scidata store" in run("verify", tmp_path).stderr


def test_verify_names_the_fault(files: list[Path], tmp_path: Path) -> None:
    assert run("partition", files[0], tmp_path / "s").exit_code == 0
    shard = tmp_path / "s" / "sample-000000.zarr" / "node" / "u" / "c" / "0"
    data = bytearray(shard.read_bytes())
    data[9] ^= 1
    shard.write_bytes(data)
    result = run("verify", tmp_path / "s")
    assert result.exit_code == 1
    for part in (str(tmp_path / "s"), "sample 0", "'node/u'", "checksum"):
        assert part in result.stdout
    result = run("verify", tmp_path / "s", "--json")
    assert result.exit_code == 1
    fault = json.loads(result.stdout)["fault"]
    assert (fault["sample"], fault["array"]) == (0, "node/u")


def test_faulty_input_is_one_line(files: list[Path], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        file["points"] = np.zeros((4, 2))
        file["cells"] = np.array([[0, 1, 9]])
    result = run("partition", tmp_path / "bad.h5", tmp_path / "s")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "cell_index_out_of_range" in result.stderr
    assert not is_store(tmp_path / "s")
    result = run("partition", tmp_path / "bad.h5", tmp_path / "s", "--repair", "all")
    assert (result.exit_code, "repaired cell_index_out_of_range: 1" in result.stdout) == (0, True)


def test_progress_on_a_terminal(files: list[Path], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "scidata", "partition", *map(str, files), str(tmp_path / "s"), "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # at the end, as nobody has the other side open any more
        while part := os.read(ours, 1 << 16):  # a terminal hands on a few kB at a time, and holds no more
            seen += part
    os.close(ours)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(out)["finished"]
    assert b"partitioning" in seen
    assert b"3.0/3 samples" in seen


@pytest.mark.parametrize(
    ("line", "says", "not_said"),
    [
        ("mesh_1.h5 mesh_1.store", "did you mean 'mesh_0.h5'?", "mesh_1.store"),
        ("mesh_0.h5 out --keep self_loop", "did you mean 'self_loops'?; what can", "Traceback"),
    ],
)
def test_typos_are_answered_with_what_was_meant(tmp_path, monkeypatch, line, says, not_said):
    from typer.testing import CliRunner

    from scidata.cli.app import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mesh_0.h5").touch()
    done = CliRunner().invoke(app, ["partition", *line.split()])
    assert done.exit_code
    assert says in done.output
    assert not_said not in done.output
