"""Graphs that are built around a file: GraphCast's grid and mesh of real weather data, cut for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.errors import ConfigError, UnknownNameError
from scidata.store.format.store import open_store, verify
from scidata.testing import make_grid, run_ranks

NODES = {"grid": "file", "mesh": "icosahedral:2"}
EDGES = {"grid__to__mesh": "spacing:0.6", "mesh__near__mesh": "levels", "mesh__to__grid": "containing"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("built")
    make_grid(path / "era5.nc", format="netcdf4", num_times=3, num_levels=2, num_lat=19, num_lon=36)
    report = scidata.partition(path / "era5.nc", path / "era5.store", nodes=NODES, edges=EDGES)
    assert report.counts["mesh"] == 162
    assert report.counts["mesh__near__mesh"] == 60 * (1 + 4 + 16)
    assert report.counts["mesh__to__grid"] == 3 * 19 * 36
    assert verify(str(path / "era5.store")) is None
    return path


def read(rank: int, num_ranks: int, folder: str) -> list[int]:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    source = xr.open_dataset(f"{folder}/era5.nc").load()
    ds: Any = scidata.open_dataset(f"{folder}/era5.store", mesh, fields=["u", "grid/pos", "mesh/pos"])
    assert len(ds) == 3
    for time in range(3):
        sample = ds[time]
        rows = sample.original_id("grid").to_local().numpy()
        expected = source["u"].isel(time=time).values.reshape(2, -1)[:, rows]
        assert np.array_equal(sample["u"].to_local().numpy(), expected)
        lon, lat = sample["grid/pos"].to_local().numpy().T
        assert np.array_equal(lat, source["latitude"].values[rows // 36])
        assert np.array_equal(lon, source["longitude"].values[rows % 36])
    grid, nodes = (sample.with_ghosts(f"{name}/pos") for name in ("grid", "mesh"))
    of, to = sample.edge_index_dict["grid", "to", "mesh"]
    away = (on_sphere(grid[of]) - on_sphere(nodes[to])).norm(dim=1)
    counts = torch.bincount(to, minlength=sample.index_map("mesh").num_owned)
    return [len(of), int(sample.index_map("grid").num_ghost), int(counts.sum()), int(1000 * away.max())]


def on_sphere(points: torch.Tensor) -> torch.Tensor:
    lon, lat = torch.deg2rad(points).T
    return torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=1)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_grid_and_its_mesh(folder: Path, num_ranks: int) -> None:
    found = np.array(run_ranks(read, num_ranks, str(folder)))
    whole: Any = scidata.open_dataset(folder / "era5.store")[0]
    of, to = whole.edge_index_dict["grid", "to", "mesh"]
    assert found[:, 0].sum() == len(of)
    # the same edges by brute force: 0.6 times the longest side of the finest faces
    grid, nodes = on_sphere(whole["grid/pos"]), on_sphere(whole["mesh/pos"])
    finest = whole.edge_index_dict["mesh", "near", "mesh"]
    sides = (nodes[finest[0]] - nodes[finest[1]]).norm(dim=1)
    longest = sides.sort().values[: 60 * 16].max()  # the finest level's are the shortest
    near = torch.cdist(grid, nodes) <= 0.6 * longest + 1e-9
    assert int(near.sum()) == len(of)
    assert bool(near[of, to].all())
    assert found[:, 3].max() <= 1000 * 0.6 * longest
    if num_ranks > 1:
        assert (found[:, 1] < 19 * 36 // 2).all()  # parts are near in space


def test_real_weather(tmp_path: Path) -> None:
    path = Path(__file__).parents[3] / "shared/data/eraint_uvz.nc"
    if not path.exists():
        pytest.skip("the shared data are not here")
    scidata.partition(path, tmp_path / "era.store", nodes=NODES, edges=EDGES, fields=["u", "v"])
    source = xr.open_dataset(path)
    ds: Any = scidata.open_dataset(tmp_path / "era.store")
    sample = ds[0]
    rows = sample.original_id("grid").numpy()
    assert len(rows) == source["u"].shape[-1] * source["u"].shape[-2]
    found = sample["u"].numpy()
    values = source["u"].isel(month=0).values.reshape(*found.shape[:-1], -1)[..., rows]
    assert np.array_equal(found, values.astype(found.dtype), equal_nan=True)


def test_a_cloud_and_its_neighbours(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.savez(tmp_path / "cloud.npz", pos=random.random((40, 2)), heat=random.random(40))
    scidata.partition(
        tmp_path / "cloud.npz", tmp_path / "cloud.store", nodes={"cloud": "file"}, edges={"cloud__near__cloud": "knn:3"}
    )
    sample: Any = scidata.open_dataset(tmp_path / "cloud.store")[0]
    of, to = sample.edge_index_dict["cloud", "near", "cloud"]
    apart = torch.cdist(sample["pos"], sample["pos"]).fill_diagonal_(torch.inf)
    nearest = apart.topk(3, largest=False).indices.sort(dim=1).values
    assert torch.equal(of.reshape(40, 3).sort(dim=1).values, nearest)
    assert torch.equal(to, torch.arange(40).repeat_interleave(3))
    assert torch.allclose(sample["edge_attr"][:, 0].max(), torch.tensor(1.0, dtype=torch.float64))


def test_the_command_line(folder: Path, tmp_path: Path) -> None:
    rules = [",".join(f"{name}={rule}" for name, rule in each.items()) for each in (NODES, EDGES)]
    store = tmp_path / "out.store"
    command = ["partition", str(folder / "era5.nc"), str(store), "--nodes", rules[0], "--edges", rules[1]]
    for more, said in (["--dry-run"], "made of its edges"), ([], "162 mesh"):
        result = CliRunner().invoke(app, [*command, *more])
        assert result.exit_code == 0, result.output
        assert said in result.output
    first, other = (open_store(path).manifest.samples[0].arrays for path in (folder / "era5.store", store))
    assert {path: each.digest for path, each in first.items()} == {path: each.digest for path, each in other.items()}
    wrong = CliRunner().invoke(app, [*command[:3], "--nodes", "grid", "--edges", rules[1]])
    assert wrong.exit_code == 2
    assert "--nodes" in wrong.output


@pytest.mark.parametrize(
    ("nodes", "edges", "error", "said"),
    [
        ({"grid": "file"}, None, ConfigError, "given together"),
        ({"grid": "fiel"}, EDGES, ConfigError, "did you mean 'file'"),
        ({"grid": "file", "mesh": "icosahedron:2"}, EDGES, ConfigError, "did you mean 'icosahedral'"),
        ({"grid": "file", "mesh": "icosahedral"}, EDGES, ConfigError, "a level, icosahedral:6"),
        ({"mesh": "icosahedral:2"}, EDGES, ConfigError, "one set is that of the file"),
        (NODES, {"grid__to__mehs": "knn:3"}, UnknownNameError, "did you mean 'mesh'"),
        (NODES, {"grid_to_mesh": "knn:3"}, ConfigError, "no relation"),
        (NODES, {"grid__to__mesh": "kn:3"}, ConfigError, "did you mean 'knn'"),
        (NODES, {"grid__to__mesh": "knn"}, ConfigError, "needs a number above 0"),
        (NODES, {"grid__to__mesh": "levels"}, ConfigError, "of a set to itself"),
        (NODES, {"mesh__near__mesh": "levels:1-7"}, ConfigError, "none of 0-2"),
        (NODES, {"mesh__to__grid": "radius:0.001"}, ConfigError, "no source lies within the radius"),
    ],
)
def test_rules_that_cannot_be(
    folder: Path, tmp_path: Path, nodes: Any, edges: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        scidata.partition(folder / "era5.nc", tmp_path / "out.store", nodes=nodes, edges=edges)
    assert said in str(caught.value)
