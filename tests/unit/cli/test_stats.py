"""``scidata stats``: tables, JSON and files; what is refused, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.cli.arguments import parse_sel
from scidata.testing import make_grid


@pytest.fixture(scope="module")
def grid(tmp_path_factory: Any) -> tuple[str, dict[str, Any]]:
    path = str(tmp_path_factory.mktemp("grid") / "grid.zarr")
    return path, make_grid(path, num_times=7, packed=True)


def run(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["stats", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def test_json_file_and_table(grid: Any, tmp_path: Path) -> None:
    path, wanted = grid
    out = tmp_path / "stats.json"
    found = json.loads(run(path, "--by", "level", "--fields", "u,t", "--out", out, "--json").stdout)
    values = wanted["u"].astype("f8")
    np.testing.assert_allclose(found["fields"]["u"]["values"]["mean"], np.nanmean(values, axis=(0, 2, 3)), rtol=1e-12)
    stats = scidata.Statistics.load(out)
    assert json.loads(out.read_text()) == found
    np.testing.assert_allclose(stats["t"].std, np.nanstd(wanted["t"].astype("f8"), axis=(0, 2, 3)), rtol=1e-12)
    scidata.open_dataset(path, fields=["u", "t"]).normalise(stats)
    table = run(path, "--by", "level").stdout
    assert "7 samples, time 2020-01-01T00:00:00 to 2020-01-02T12:00:00" in table
    assert table.count("m s-1") == 6
    assert "std of steps" in table
    assert "std of steps" not in run(path, "--no-differences").stdout


def test_periods(grid: Any) -> None:
    path, wanted = grid
    chosen = ["--sel", "time=2020-01-01T06:00/2020-01-02", "--sel", "level=1000,100", "--isel", "latitude=2:9"]
    found = json.loads(run(path, "--fields", "u", *chosen, "--json", "--jobs", 2).stdout)
    values = wanted["u"][1:8][:, [0, 2], 2:9].astype("f8")
    assert found["period"]["rows"] == len(values)
    np.testing.assert_allclose(found["fields"]["u"]["values"]["std"], np.nanstd(values), rtol=1e-12)


def test_several_files(tmp_path: Path) -> None:
    parts = [
        make_grid(tmp_path / f"{k}.nc", format="netcdf4", num_times=2, first_time=2 * k)["u"].astype("f8")
        for k in range(2)
    ]
    for given in ([tmp_path / "0.nc", tmp_path / "1.nc"], [str(tmp_path / "?.nc")]):
        found = json.loads(run(*given, "--fields", "u", "--json").stdout)
        np.testing.assert_allclose(found["fields"]["u"]["values"]["mean"], np.mean(parts), rtol=1e-12)
        assert found["fields"]["u"]["differences"]["count"] == 3 * parts[0][0].size


def test_refused(grid: Any, tmp_path: Path) -> None:
    path, _ = grid
    (tmp_path / "there.json").write_text("mine")
    assert "--overwrite" in run(path, "--out", tmp_path / "there.json", code=1).stderr
    assert (tmp_path / "there.json").read_text() == "mine"
    run(path, "--out", tmp_path / "there.json", "--overwrite")
    assert scidata.Statistics.load(tmp_path / "there.json")["u"].count > 0
    assert "did you mean 'level'" in run(path, "--by", "levle", code=2).stderr
    assert "did you mean 'level'" in run(path, "--sel", "levle=3", code=2).stderr
    assert "did you mean" in run(path, "--fields", "uu", code=2).stderr
    assert "leave it out" in run(path, "--overwrite", code=2).stderr
    assert "--stored" in run(path, "--stored", code=2).stderr
    run(path, "--jobs", "0", code=2)
    run(tmp_path / "nothing.zarr", code=1)
    error = json.loads(run(path, "--by", "levle", "--json", code=2).stdout)["error"]
    assert error["type"] == "UnknownNameError"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("time=1990:2015", {"time": slice("1990", "2015")}),
        ("time=1990:", {"time": slice("1990", None)}),
        ("valid_time=2000-01-01T06:00/2000-02-01T00:00", {"valid_time": slice("2000-01-01T06:00", "2000-02-01T00:00")}),
        ("level=500", {"level": 500}),
        ("level=500,850.5", {"level": [500, 850.5]}),
        ("level=1000:500", {"level": slice(1000, 500)}),
        ("variable=2t,msl", {"variable": ["2t", "msl"]}),
    ],
)
def test_selections(text: str, wanted: dict[str, Any]) -> None:
    assert parse_sel([text]) == wanted


@pytest.mark.parametrize("values", [["time"], ["=3"], ["time="], ["a=1:2:3"], ["a=1", "a=2"]])
def test_selections_that_are_none(grid: Any, values: list[str]) -> None:
    arguments = [part for text in values for part in ("--sel", text)]
    assert "--sel" in run(grid[0], *arguments, code=2).output
