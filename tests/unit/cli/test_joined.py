"""Joins in a TOML file: what ``scidata inspect``, ``plan`` and ``bench`` say of them, and of mistakes in the file."""

import json
import re

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

from scidata.cli.app import app

TEXT = """
on = {analysis = "time", obs = "dates"}
at = {obs = "-6h"}
[parts.analysis]
path = "grid.zarr"
sel = {time = "2020-01-02:2020-01-03"}
halo = {lat = 1}
[parts.obs]
path = "obs.nc"
kind = "points"
time = "dates"
window = "6h"
positions = ["lat", "lon"]
where = {bt = "0:0.9"}
"""
WRONG = {
    "at =": ("att =", "no entry 'att'; did you mean 'at'"),
    'on = {analysis = "time", obs = "dates"}': ("", "expected on = 'time'"),
    'path = "obs.nc"': ("", "part 'obs' has no path"),
    "window": ("widow", "part 'obs': .* no argument 'widow'; did you mean 'window'"),
    '"6h"': ('"6 hoors"', "part 'obs': .*6 hoors"),
    "on =": ("on", "is no TOML file"),
    'analysis = "time"': ('analysis = "tim"', "'tim' has no value for each sample; did you mean 'time'"),
    "halo": ('dtype = "float31"\nhalo', "dtype must be a floating torch dtype.*'float31'"),
    "lat = 1": ("lt = 1", "'lt'"),
    "[parts.obs]": ("[part.obs]", "no entry 'part'; did you mean 'parts'"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng, begin = np.random.default_rng(0), np.datetime64("2020-01-01", "ns")
    times = begin + np.arange(16) * np.timedelta64(6, "h")
    grid = xr.Dataset({"t": (("time", "lat", "lon"), rng.random((16, 9, 12)))}, {"time": times, "lat": np.arange(9.0)})
    grid.to_zarr("grid.zarr", consolidated=False)
    dates = begin + np.sort(rng.integers(0, 4 * 86400, 300)) * np.timedelta64(1, "s")
    columns = {"lat": rng.random(300), "lon": rng.random(300), "bt": rng.random(300), "dates": dates}
    xr.Dataset({name: ("row", values) for name, values in columns.items()}).to_netcdf("obs.nc")
    (tmp_path / "both.toml").write_text(TEXT)
    return tmp_path


def run(*args, code=0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, result.output
    return result.stdout


def test_a_join_is_inspected_planned_and_timed(folder):
    about = json.loads(run("inspect", "both.toml", "--json"))
    assert about["num_samples"] == 8
    assert about["parts"]["obs"] == {"samples": 8, "fields": ["pos", "bt", "dates"]}
    assert "'analysis': 8 of 8 samples" in run("inspect", "both.toml")
    found = json.loads(run("plan", "both.toml", "--domain", "3", "--sample", "2", "--json"))
    assert found["key"] == "2020-01-02T12:00:00"
    cut = ["--domain", "3", "--json"]
    rows = ["--time", "dates", "--window", "6h", "--positions", "lat,lon", "--where", "bt=0:0.9"]
    assert found["parts"]["obs"] == json.loads(run("plan", "obs.nc", *rows, "--sample", "5", *cut))
    days = ["--sel", "time=2020-01-02:2020-01-03", "--halo", "lat=1"]
    assert found["parts"]["analysis"] == json.loads(run("plan", "grid.zarr", *days, "--sample", "2", *cut))
    shown = run("plan", "both.toml", "--domain", "3", "--sample", "2")
    assert "part analysis" in shown
    assert "sample 2: 2020-01-02T12:00:00" in shown
    timed = json.loads(run("bench", "both.toml", "--pipeline", "--workers", "0", "--samples", "2", "--json"))
    assert timed["rows"][0]["nbytes"] > 9 * 12 * 8
    for more in (["--fields", "t"], ["--sample", "8"]):
        run("plan", "both.toml", "--domain", "3", *more, code=2)


@pytest.mark.parametrize("right", WRONG)
def test_mistakes_are_named(right, folder):
    wrong, said = WRONG[right]
    (folder / "both.toml").write_text(TEXT.replace(right, wrong))
    result = CliRunner().invoke(app, ["plan", "both.toml", "--domain", "2", "--json"])
    assert result.exit_code == 2
    assert re.search(said, json.loads(result.stdout)["error"]["message"])
