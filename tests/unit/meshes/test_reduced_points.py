"""Reduced Gaussian grids by their points on each latitude: from text, arrays and numbers, and what is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.errors import ConfigError
from scidata.meshes.reduced_points import gaussian_of_rule, resolved_nodes
from scidata.meshes.sets.grids import reduced_gaussian
from scidata.testing import make_grid
from tests.unit.meshes.sets._node_sets import N32

WHOLE = N32 + N32[::-1]


def files(folder: Path) -> dict[str, Path]:
    """Write the table of N32 in each form."""
    made = {name: folder / name for name in ("half.txt", "whole.csv", "pl.npy", "data.nc", "data.zarr", "one.h5")}
    made["half.txt"].write_text("# N32\n" + "\n".join(map(str, N32)) + "\n")
    made["whole.csv"].write_text("[" + ", ".join(map(str, WHOLE)) + "]")
    np.save(made["pl.npy"], np.array(WHOLE, np.int32))
    with h5py.File(made["data.nc"], "w") as file:
        file["reduced_points"], file["other"] = np.array(WHOLE, np.int32), np.arange(4)
        file["t"] = np.zeros(sum(WHOLE))
    group = zarr.open_group(made["data.zarr"], mode="w")
    group.create_array("pl", data=np.array(WHOLE))
    with h5py.File(made["one.h5"], "w") as file:
        file["points"] = np.array(N32)
    return made


def test_every_form_is_the_same_grid(tmp_path: Path) -> None:
    expected = reduced_gaussian("N32", WHOLE)
    rule = "gaussian:" + ",".join(map(str, WHOLE))
    forms: list[Any] = [N32, tuple(WHOLE), np.array(N32)]
    for path in files(tmp_path).values():
        forms += [f"gaussian:{path}", f"gaussian:N32:{path}"]
    for form in forms:
        assert resolved_nodes({"mesh": form}) == {"mesh": rule}
    others = {"mesh": rule, "a": "gaussian:O96", "b": "file", "c": "gaussian:X96"}  # the last is none, said later
    assert resolved_nodes(others) == others
    found = gaussian_of_rule(rule.partition(":")[2])
    assert np.array_equal(found.points, expected.points)


def test_a_store_around_a_file(tmp_path: Path) -> None:
    make_grid(str(tmp_path / "grid.nc"), format="netcdf4", num_times=1, num_lat=13, num_lon=24)
    table = files(tmp_path)["half.txt"]
    edges = {"mesh__to__grid": "knn:3"}
    made = [
        scidata.partition(
            tmp_path / "grid.nc", tmp_path / f"{i}.store", nodes={"grid": "file", "mesh": mesh}, edges=edges
        )
        for i, mesh in enumerate((f"gaussian:{table}", N32))
    ]
    rules = ["--nodes", f"grid=file,mesh=gaussian:{table}", "--edges", "mesh__to__grid=knn:3"]
    result = CliRunner().invoke(app, ["partition", str(tmp_path / "grid.nc"), str(tmp_path / "2.store"), *rules])
    assert result.exit_code == 0, result.output
    assert f"{sum(WHOLE)} mesh" in result.output
    assert made[0].counts == made[1].counts
    assert made[0].counts["mesh"] == sum(WHOLE)
    sample: Any = scidata.open_dataset(tmp_path / "0.store")[0]
    places = sample["mesh/pos"].numpy()[np.argsort(sample.original_id("mesh").numpy())]
    assert np.allclose(places, reduced_gaussian("N32", WHOLE).points)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("20 27 abc", "found 'abc' among them"),
        ("20 27 -3", "found '-3' among them"),
        ("20 0 20", "positive whole numbers"),
        ("20", "positive whole numbers"),
        ("20 27 20", "an even number of them, not 3"),
        ("27 20", "latitude 1 has 20 points, fewer than the one before it, 27"),
        ("20 27 36 36 27 21", "latitude 4 has 27 points"),
        ([20.0, 27.0], "not float64"),
        ([[20, 27]], "of shape (1, 2)"),
    ],
)
def test_what_is_no_table(tmp_path: Path, given: Any, said: str) -> None:
    rule = given
    if isinstance(given, str):
        (tmp_path / "pl.txt").write_text(given)
        rule = f"gaussian:{tmp_path / 'pl.txt'}"
    with pytest.raises(ConfigError) as caught:
        resolved_nodes({"mesh": rule})
    assert said in str(caught.value)


def test_files_without_a_table(tmp_path: Path) -> None:
    made = files(tmp_path)
    with pytest.raises(ConfigError, match="has 64 latitudes, but N80 has 160"):
        resolved_nodes({"mesh": f"gaussian:N80:{made['pl.npy']}"})
    with h5py.File(made["one.h5"], "a") as file:
        file["more"] = np.arange(3)
    with pytest.raises(ConfigError, match=r"has no array 'reduced_points' or 'pl', .* 2 that could be it"):
        resolved_nodes({"mesh": f"gaussian:{made['one.h5']}"})
    with pytest.raises(FileNotFoundError, match=r"nowhere\.nc"):
        resolved_nodes({"mesh": f"gaussian:{tmp_path / 'nowhere.nc'}"})
    make_grid(str(tmp_path / "grid.nc"), format="netcdf4", num_times=1, num_lat=13, num_lon=24)
    nodes = {"grid": "file", "mesh": "gaussian:N32"}
    with pytest.raises(ConfigError, match="gaussian:FILE"):
        scidata.partition(tmp_path / "grid.nc", tmp_path / "out", nodes=nodes, edges={"mesh__to__grid": "knn:3"})
