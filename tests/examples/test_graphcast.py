"""The recipe of GraphCast's graph: what is in the store, and what it makes of coordinates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import scidata
from pipelines import era5_grid, graphcast
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError
from scidata.testing import make_grid, run_ranks

pytest.importorskip("torch_geometric", reason="HeteroData needs torch_geometric (extra 'pyg')")

SHAPE, LEVEL = (13, 24), 2  # a grid of 15 degrees, and a mesh that is finer than it would be


@pytest.fixture(scope="module")
def waves(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("graphcast") / "waves")
    assert graphcast.main(["make", folder, "--times", "5", "--shape", "13", "24", "--mesh-level", str(LEVEL)]) == 0
    return folder


def raw_of(folder: str) -> Any:
    return zarr.open_group(f"{folder}/raw.zarr", mode="r")


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, scidata.ShardTensor) else x


# -- the store -----------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_icosahedra(waves: str) -> None:
    sample = graphcast.open_graphcast(waves, None, dtype=torch.float64)[0]
    assert {name: sample.index_map(name).num_global for name in ("grid", "mesh")} == {"grid": 13 * 24, "mesh": 162}
    edges = {relation[0] + relation[2]: ends.shape[1] for relation, ends in sample.edge_index_dict.items()}
    assert edges["meshmesh"] == 60 + 240 + 960
    assert edges["meshgrid"] == 3 * 13 * 24
    source, target = sample.edge_index_dict["grid", "to", "mesh"]
    assert set(source.tolist()) == set(range(13 * 24))  # each grid point is heard of
    assert set(target.tolist()) == set(range(162))
    assert graphcast.place_features(sample["grid/pos"]).shape == (13 * 24, 3)
    places = {name: _places(sample[f"{name}/pos"]) for name in ("grid", "mesh")}
    chords = {
        of + to: (places[of][ends[0]] - places[to][ends[1]]).norm(dim=1)
        for (of, _, to), ends in sample.edge_index_dict.items()
    }
    finest = chords["meshmesh"][chords["meshmesh"] < 0.4].max()  # level 1 has sides of 0.55 and more
    assert 0.5 * finest < chords["gridmesh"].max() <= 0.6 * finest
    for relation in graphcast.RELATIONS:
        chord = chords[relation.replace("__to__", "")]
        length = sample[f"{relation}/edge_attr"][:, 0]
        torch.testing.assert_close(length, chord / chord.max(), rtol=1e-9, atol=1e-12)


def _places(pos: torch.Tensor) -> torch.Tensor:
    lon, lat = torch.deg2rad(pos.double()).unbind(1)
    return torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=1)


def _read(rank: int, num_ranks: int, folder: str) -> list[Any]:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = graphcast.open_graphcast(folder, mesh, fields=["u", "surface_pressure", "land"], steps=(0, 2))
    sample = ds[1]
    rows = full(sample.original_id("grid"))
    found = [rows, full(sample["grid/pos"]), *(full(sample[name]) for name in ("u", "surface_pressure", "land"))]
    return [x.numpy() for x in found]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_fields_and_places_are_those_of_the_grid(waves: str, num_ranks: int) -> None:
    raw = raw_of(waves)
    for rows, pos, u, pressure, land in run_ranks(_read, num_ranks, waves):
        assert sorted(rows) == list(range(13 * 24))
        lon, lat = np.meshgrid(raw["longitude"][:], raw["latitude"][:])
        np.testing.assert_array_equal(pos, np.stack([lon.ravel(), lat.ravel()], axis=1)[rows])
        for found, name, times in ((u, "u", [1, 3]), (pressure, "surface_pressure", [1, 3]), (land, "land", ...)):
            values = raw[name][:][times]
            np.testing.assert_array_equal(found, values.reshape(*values.shape[:-2], -1)[..., rows])


def test_files_follow_each_other_and_no_sample_goes_over_their_end(tmp_path: Path) -> None:
    for year, first, count in ((2015, 0, 4), (2016, 4, 3)):
        make_grid(tmp_path / f"{year}.nc", format="netcdf4", num_times=count, first_time=first, num_lat=13, num_lon=24)
    files = [str(tmp_path / f"{year}.nc") for year in (2015, 2016)]
    assert graphcast.main(["convert", *files, str(tmp_path / "years"), "--fields", "t", "v"]) == 0
    about = graphcast.Coordinates.load(tmp_path / "years")
    assert [len(times) for times in about.times] == [4, 3]
    ds = graphcast.open_graphcast(str(tmp_path / "years"), None, steps=(0, 1, 2), dtype=None)
    assert about.first_times((0, 1, 2)) == [0, 1, 4]
    assert len(ds) == 3
    assert "u" not in ds.fields
    whole = scidata.open_dataset(files, fields=["t"])
    for index, first in enumerate(about.first_times((0, 1, 2))):
        sample = ds[index]
        rows = sample.original_id("grid")
        assert str(whole.own_coords(first)["time"]).startswith(str(about.dates()[first]))
        torch.testing.assert_close(sample["t"][1], whole[first + 1]["t"].reshape(-1, 13 * 24)[:, rows], rtol=0, atol=0)


# -- coordinates and weights ---------------------------------------------------------------------------------------


def test_coordinates(waves: str) -> None:
    about = graphcast.Coordinates.load(waves)
    assert (about.time, about.has_dates, about.levels) == ("time", True, {"level": [200, 525, 850]})
    assert about.dates()[[0, 4]].astype(str).tolist() == ["2000-01-01T00:00:00", "2000-01-02T00:00:00"]
    assert about.latitudes == list(range(90, -91, -15))
    assert about.first_times((-1, 0, 1)) == [1, 2, 3]
    torch.testing.assert_close(about.level_weights(["level"]), torch.tensor([200, 525, 850]).double() / 525)
    assert about.level_weights([]).tolist() == [1]


def _areas(rank: int, num_ranks: int, folder: str) -> list[float]:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    about = graphcast.Coordinates.load(folder)
    pos = graphcast.open_graphcast(folder, mesh, fields=[], dtype=torch.float64)[0].to_pyg()["grid"].pos
    weights = graphcast.area_weights(about, pos)
    height = (weights * torch.deg2rad(pos[:, 1:]).sin().square()).mean()  # 1/3 on a sphere, by finer and finer rows
    return [weights.mean().item(), height.item(), full(weights).min().item() * 24 * 13]


def test_weights_are_areas(waves: str) -> None:
    cap = (1 - np.sin(np.radians(82.5))) / 2 * 13  # of the row at a pole, beside the mean of 13
    for mean, square, least in run_ranks(_areas, 3, waves):
        assert mean == pytest.approx(1, rel=1e-12)
        assert square == pytest.approx(1 / 3, rel=0.01)
        assert least == pytest.approx(cap * 24 * 13, rel=1e-9)


def test_points_of_a_curvilinear_grid_weigh_by_the_cosine() -> None:
    about = graphcast.Coordinates(time="time", times=[["0"]], has_dates=False, levels={}, latitudes=None)
    pos = torch.tensor([[0.0, 60.0], [10.0, 0.0]])
    torch.testing.assert_close(graphcast.area_weights(about, pos), torch.tensor([[0.5], [1.0]]))
    assert about.dates() is None


def test_clocks_go_by_the_local_sun() -> None:
    dates = np.array(["2001-01-01T06:00", "2001-07-02T15:00"], "datetime64[s]")
    pos = torch.tensor([[90.0, 0.0], [180.0, 10.0], [0.0, 0.0]], dtype=torch.float64)
    found = graphcast.clock_features(dates, torch.tensor([0, 0, 1]), pos)
    half = 2 * np.pi * (182 + 15 / 24) / 365.2425
    expected = [[None, None, 0, -1], [None, None, -1, 0], [np.sin(half), np.cos(half), -(0.5**0.5), -(0.5**0.5)]]
    for row, wanted in zip(found.tolist(), expected, strict=True):
        for one, other in zip(row, wanted, strict=True):
            assert other is None or one == pytest.approx(other, abs=1e-12)


@pytest.mark.parametrize(("step", "level"), [(0.25, 6), (0.75, 4), (1, 4), (5, 2), (10, 1), (40, 0), (0.01, 7)])
def test_the_mesh_is_as_fine_as_the_grid_asks_for(step: float, level: int) -> None:
    assert graphcast.mesh_level_for(step) == level


# -- bad input -----------------------------------------------------------------------------------------------------


def test_bad_input_is_named(waves: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'land'"):
        graphcast.open_graphcast(waves, None, fields=["lnad"])
    with pytest.raises(ConfigError, match="takes 9 times, but there are 5 in a row"):
        graphcast.open_graphcast(waves, None, steps=range(9))
    with pytest.raises(ConfigError, match=r"waevs: does not exist; did you mean 'waves'\?"):
        graphcast.open_graphcast(waves.replace("waves", "waevs"), None)
    with pytest.raises(ConfigError, match=r"has no coordinates\.json; give a folder"):
        graphcast.open_graphcast(str(tmp_path), None)
    with pytest.raises(FileExistsError, match="exists; remove it"):
        graphcast.make(waves)
    raw = f"{waves}/raw.zarr"
    for args, said in (
        (["convert", raw, "out", "--mesh-level", "13"], "refined 0 to 12 times, not 13"),
        (["convert", raw, "out", "--fields", "tempature"], "did you mean 'temperature'"),
        (["convert", raw, "out", "--reach", "-1"], "needs a number above 0"),
        (["convert", f"{waves}/row.zarr", "out"], "did you mean 'raw.zarr'"),
    ):
        assert graphcast.main([*args[:2], str(tmp_path / "out"), *args[3:]]) == 1
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    other = str(tmp_path / "other.zarr")
    era5_grid.make(other, num_times=2, shape=(7, 24))
    with pytest.raises(FieldMismatchError, match="differs in its latitudes from"):
        graphcast.convert([raw, other], str(tmp_path / "out"))
