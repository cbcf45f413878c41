"""The forecast example: a checkpoint run forward on any number of ranks, written and scored."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import torch
import xarray as xr
import zarr

from pipelines import era5_grid, graphcast, ugrid_mesh
from scidata import metrics
from scidata.testing import run_ranks
from tests.examples._scripts import in_turn_on_ranks_of, module_of, on_ranks_of

needs_pyg = pytest.mark.skipif(
    importlib.util.find_spec("torch_geometric") is None, reason="torch_geometric is not installed (extra 'pyg')"
)
TINY = ("--dim", "8", "--depth", "2", "--heads", "2", "--patch", "4", "--device", "cpu", "--dtype", "float64")
LEADS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of nine times, a checkpoint, and the forecasts that one process makes of it."""
    path: Path = tmp_path_factory.mktemp("forecast")
    assert (
        era5_grid.main(["make", str(path / "era5.zarr"), "--times", "9", "--shape", "25", "16", "--levels", "2"]) == 0
    )
    args = ("--data", path / "era5.zarr", "--domain", "2", "--max-steps", 8)
    code, output = on_ranks_of("train_vit", 2, *TINY, *args, "--out", path / "runs")
    assert code == 0, output
    (path / "scores1").write_text(forecast(path, "--scores", path / "one.json")[1])
    return path


def command(path: Path, domain: int, out: str, *more: Any) -> tuple[Any, ...]:
    checkpoint = max((path / "runs").glob("step_*"))
    args = ("--data", path / "era5.zarr", "--checkpoint", checkpoint, "--leads", LEADS, "--forecast", path / out)
    return (*args, "--device", "cpu", "--domain", domain, *more)


def forecast(path: Path, *more: Any) -> tuple[int, str]:
    return on_ranks_of("forecast", 1, *command(path, 1, "forecast1.zarr", *more))


def assert_same_scores(found: Path, expected: Path) -> None:
    ours, theirs = (json.loads(path.read_text()) for path in (found, expected))
    assert ours.keys() == theirs.keys()
    for kind, leads in theirs.items():
        for lead, scores in enumerate(leads):
            assert ours[kind][lead] == pytest.approx(scores, rel=1e-12), (kind, lead)


def scores_of(output: str) -> dict[tuple[str, str], list[float]]:
    found, field = {}, ""
    lines = output[output.index("RMSE") :].splitlines()[1:]
    for words in map(str.split, lines):
        field = words[0] if len(words) == LEADS + 2 else field
        found[field, words[-LEADS - 1]] = [float(word) for word in words[-LEADS:]]
    return found


@pytest.mark.slow_for("4")
@pytest.mark.parametrize(("num_ranks", "domain", "ways"), [(4, 2, [(), ("--tp", 2)]), (3, 1, [()])], ids=["4", "3"])
def test_the_same_on_any_number_of_ranks(
    folder: Path, tmp_path: Path, num_ranks: int, domain: int, ways: list[tuple[Any, ...]]
) -> None:
    runs, whole = [], xr.open_dataset(folder / "forecast1.zarr")
    for number, way in enumerate(ways):
        out = tmp_path / str(number)
        plot = ("--plot", f"{out}.png") if way == () else ()
        runs.append(command(folder, domain, f"{out}.zarr", "--scores", f"{out}.json", *way, *plot))
    found = in_turn_on_ranks_of("forecast", num_ranks, *runs)
    for number, (way, (code, output)) in enumerate(zip(ways, found, strict=True)):
        assert code == 0, f"{way}: {output}"
        assert_same_scores(tmp_path / f"{number}.json", folder / "one.json")
        ours = xr.open_dataset(tmp_path / f"{number}.zarr")
        for name, field in whole.items():
            assert field.dims[:2] == ("time", "lead")
            np.testing.assert_allclose(ours[name].values, field.values, rtol=2e-6, err_msg=str(way))  # in float32
    assert (tmp_path / "0.png").stat().st_size > 1000


def test_forcings_are_those_of_each_time(tmp_path: Path) -> None:
    """What a forcing is at the second time changes the second step from the first time, and not the first step."""
    data = str(tmp_path / "era5.zarr")
    era5_grid.make(data, num_times=5, num_levels=2, shape=(25, 16))
    fields = ("--fields", "v", "surface_pressure", "--forcings", "u", "--derived", "insolation")
    code, output = on_ranks_of(
        "train_vit", 1, *TINY, "--data", data, *fields, "--max-steps", 2, "--out", tmp_path / "runs"
    )
    assert code == 0, output
    found = []
    for name, ranks in (("before", 1), ("after", 2)):
        args = ("--data", data, "--checkpoint", tmp_path / "runs" / "step_00000002", "--leads", 3, "--domain", ranks)
        code, output = on_ranks_of("forecast", ranks, *args, "--forecast", tmp_path / f"{name}.nc", "--device", "cpu")
        assert code == 0, output
        found.append(xr.open_dataset(tmp_path / f"{name}.nc", decode_timedelta=True).load())
        zarr.open_group(data, mode="r+")["u"][1] += 5
    before, after = found
    assert set(before.data_vars) == {"v", "surface_pressure"}
    difference = abs(after.v - before.v).isel(time=0).max(("level", "latitude", "longitude")).values
    scale = float(abs(before.v).max())
    assert difference[0] < 1e-6 * scale
    assert (difference[1:] > 1e-4 * scale).all()


@needs_pyg
def test_of_meshes(tmp_path: Path) -> None:
    """Written onto the mesh of its file, with a forcing that changes with time; equal to NumPy's scores."""
    source, store = str(tmp_path / "waves.nc"), str(tmp_path / "waves.store")
    ugrid_mesh.make(source, num_nodes=150, num_times=7)
    with netCDF4.Dataset(source, "a") as file:
        wind = file.createVariable("wind", "f8", ("time", "node"))
        wind.mesh, wind.location = "mesh", "node"
        wind[:] = np.random.default_rng(0).normal(size=(7, 150))
    ugrid_mesh.convert([source], store)
    tiny = ("--dim", 8, "--depth", 2, "--device", "cpu", "--dtype", "float64", "--next", "--domain", 2)
    fields = ("--inputs", "wind", "height", "--targets", "height")
    code, output = on_ranks_of(
        "train_gnn", 2, *tiny, *fields, "--data", store, "--max-steps", 3, "--out", tmp_path / "runs"
    )
    assert code == 0, output
    args = ("--data", store, "--checkpoint", tmp_path / "runs" / "step_00000003", "--leads", LEADS, "--device", "cpu")
    args += ("--topology", source)
    whole, truth = None, xr.open_dataset(source)["height"].values
    for num_ranks, domain in ((1, 1), (4, 2)):
        out, scores = tmp_path / f"{num_ranks}{domain}.nc", tmp_path / f"{num_ranks}.json"
        code, output = on_ranks_of(
            "forecast", num_ranks, *args, "--domain", domain, "--forecast", out, "--scores", scores
        )
        assert code == 0, output
        found = xr.open_dataset(out)
        assert {"face_nodes", "lon", "lat", "depth"} <= set(found.variables)
        whole = found if whole is None else whole
        np.testing.assert_allclose(found["height"].values, whole["height"].values, rtol=1e-12)
        assert_same_scores(scores, tmp_path / "1.json")
        made = json.loads(scores.read_text())
        for lead in range(LEADS):
            later = truth[lead + 1 : lead + 5]
            said = {"model": found["height"].values[:, lead], "persistence": truth[:4], "climatology": truth.mean(0)}
            for kind, fields_of_kind in said.items():
                rmse = np.sqrt(((fields_of_kind - later) ** 2).mean())
                assert made[kind][lead]["height"] == pytest.approx(rmse, rel=1e-10), (kind, lead)

    with netCDF4.Dataset(source, "a") as file:  # what a forecast is not to know of
        file["height"][1:] += 1
    ugrid_mesh.convert([source], str(tmp_path / "other.store"))
    args = ("--data", tmp_path / "other.store", *args[2:], "--forecast", tmp_path / "other.nc")
    code, output = on_ranks_of("forecast", 1, *args)
    assert code == 0, output
    found = xr.open_dataset(tmp_path / "other.nc")
    assert whole is not None
    np.testing.assert_array_equal(found["height"].values[0], whole["height"].values[0])
    assert (found["height"].values[1] != whole["height"].values[1]).all()


GLOBE = ("--dim", "8", "--depth", "1", "--device", "cpu", "--dtype", "float64", "--history", "2", "--rollout", "2")


def _two_steps(rank: int, num_ranks: int, *args: Any) -> list[tuple[float, ...]]:
    """Return how far two steps of a forecast are from what training predicts of the same times, and how large it is."""
    script = module_of("train_graphcast")
    made = script.Training(script.arguments([*GLOBE, "--domain", str(num_ranks), *map(str, args)])[1])
    made.prepare()
    found = []
    with torch.no_grad():
        for batch in made.loader:
            first = batch.index[0] + made.history - 1
            state = made.first_state(first)
            for time in (first, first + 1):
                state = made.advance(state, time)
            forecast, (expected, _) = state[0][-1], made.predict(made.model, batch)
            assert forecast.shape == expected.shape
            found.append((batch.index[0], float((forecast - expected).abs().max()), float(expected.abs().max())))
    return found


@needs_pyg
def test_of_graphcast(tmp_path: Path) -> None:
    """From two times, as many steps as asked for, whatever the training took; equal to NumPy's scores."""
    globe, run = tmp_path / "globe", tmp_path / "runs"
    graphcast.make(str(globe), num_times=7, num_levels=2, shape=(19, 36))
    code, output = on_ranks_of(
        "train_graphcast", 2, *GLOBE, "--data", globe, "--domain", 2, "--max-steps", 2, "--out", run
    )
    assert code == 0, output
    checkpoint = run / "step_00000002"
    for num_ranks in (1, 2):
        found = run_ranks(_two_steps, num_ranks, "--data", globe, "--resume", checkpoint)[0]
        assert len(found) == 2  # of 4 samples, 2 have been trained on
        assert all(difference <= 1e-12 * scale for _, difference, scale in found)

    args = ("--data", globe, "--checkpoint", checkpoint, "--leads", LEADS, "--device", "cpu")
    whole, raw = None, xr.open_dataset(globe / "raw.zarr", consolidated=False)
    edges = np.sin(np.radians(np.r_[-90, np.arange(-85, 90, 10), 90]))
    areas = np.repeat(np.diff(edges)[::-1], 36)
    areas /= areas.sum()
    for num_ranks, domain in ((1, 1), (4, 2)):
        out, scores = tmp_path / f"{num_ranks}{domain}.zarr", tmp_path / f"{num_ranks}.json"
        code, output = on_ranks_of(
            "forecast", num_ranks, *args, "--domain", domain, "--forecast", out, "--scores", scores
        )
        assert code == 0, output
        found = xr.open_dataset(out, decode_timedelta=True)
        whole = found if whole is None else whole
        assert found["time"].values.tolist() == raw["time"].values[1:4].tolist()  # the first has one before it
        assert (found["lead"].values == np.arange(1, 4) * np.timedelta64(6, "h")).all()
        assert_same_scores(scores, tmp_path / "1.json")
        made = json.loads(scores.read_text())
        for name in ("temperature", "u", "v", "surface_pressure"):
            np.testing.assert_allclose(found[name].values, whole[name].values, rtol=2e-6, atol=1e-30)
            truth = raw[name].values.astype("f8").reshape(7, -1, 19 * 36)
            forecasts = found[name].values.astype("f8").reshape(3, LEADS, *truth.shape[1:])
            for lead in range(LEADS):
                later = truth[lead + 2 : lead + 5]
                said = {"model": forecasts[:, lead], "persistence": truth[1:4], "climatology": truth.mean(0)}
                for kind, fields_of_kind in said.items():
                    rmse = np.sqrt((((fields_of_kind - later) ** 2).mean((0, 1)) * areas).sum())
                    rel = 1e-5 if kind == "model" else 1e-10  # it is stored in float32
                    assert made[kind][lead][name] == pytest.approx(rmse, rel=rel), (kind, lead, name)

    group = zarr.open_group(str(globe / "raw.zarr"), mode="r+")
    group["u"][2:] = np.asarray(group["u"][2:]) + 1  # what the first forecast is not to know of
    graphcast.convert([str(globe / "raw.zarr")], str(tmp_path / "other"))
    args = ("--data", tmp_path / "other", *args[2:], "--forecast", tmp_path / "other.zarr")
    (code, output), refused = in_turn_on_ranks_of("forecast", 1, args, (*args, "--overwrite", "--leads", 6))
    assert code == 0, output
    other = xr.open_dataset(tmp_path / "other.zarr")
    assert whole is not None
    for name in ("temperature", "u", "surface_pressure"):
        np.testing.assert_array_equal(other[name].values[0], whole[name].values[0])
        assert (other[name].values[1] != whole[name].values[1]).any()

    assert refused[0] == 2
    assert "the data have 7 times, of which 2 go into a step, so give 1 to 5" in refused[1]


def test_scores_are_what_xarray_says(folder: Path) -> None:
    truth = xr.open_dataset(folder / "era5.zarr", consolidated=False).isel(latitude=slice(0, 24)).astype("f8")
    whole = xr.open_dataset(folder / "forecast1.zarr", decode_timedelta=True).astype("f8")
    found = scores_of((folder / "scores1").read_text())
    latitudes = np.deg2rad(truth["latitude"])
    middles = (latitudes.values[1:] + latitudes.values[:-1]) / 2
    edges = [np.pi / 2, *middles, -np.pi / 2]  # as WeatherBench 2's: the outer cells reach the poles
    area = xr.DataArray(np.abs(np.diff(np.sin(edges))), dims="latitude", coords={"latitude": truth["latitude"]})
    num_starts = truth.sizes["time"] - LEADS
    for lead in range(LEADS):
        later = truth.isel(time=slice(lead + 1, lead + 1 + num_starts)).drop_vars("time")
        first = truth.isel(time=slice(0, num_starts)).drop_vars("time")
        model = whole.isel(lead=lead).drop_vars(("time", "lead"))
        for name in truth.data_vars:
            for kind, made in (("persistence", first), ("model", model)):
                error = (made[name] - later[name]) ** 2
                rmse = float(np.sqrt(error.weighted(area).mean()))
                assert found[str(name), kind][lead] == pytest.approx(rmse, rel=1e-4), (name, kind, lead)


def test_what_is_there_is_not_written_over(folder: Path) -> None:
    code, output = forecast(folder)
    assert code == 2
    assert "is there already" in output
    code, output = forecast(folder, "--again")  # finished: scored again
    assert code == 0, output
    assert scores_of(output) == scores_of((folder / "scores1").read_text())


def test_only_times_that_are_chosen(folder: Path) -> None:
    out, scores = folder / "late.zarr", folder / "late.json"
    code, output = forecast(folder, "--sel", "2000-01-02:", "--forecast", out, "--scores", scores)
    assert code == 0, output
    late = xr.open_dataset(out, decode_timedelta=True)
    assert late["time"].values.tolist() == xr.open_dataset(folder / "forecast1.zarr")["time"].values[4:].tolist()
    truth = xr.open_dataset(folder / "era5.zarr", consolidated=False).isel(latitude=slice(0, 24)).astype("f8")
    usual, area = truth["v"].isel(time=slice(4)).mean("time"), metrics.latitude_weights(truth.latitude.values).numpy()
    error = ((usual - truth["v"].isel(time=slice(5, 7))) ** 2).mean(("time", "level", "longitude")).values
    found = json.loads(scores.read_text())["climatology"][0]["v"]
    assert found == pytest.approx(np.sqrt((error * area).mean()), rel=1e-10)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--leads", 20), "the data have 9 times"),
        (("--checkpoint", "nowhere"), "no complete checkpoint there"),
        (("--sel", "2000-01-02T12:2000-01-02T18"), "no 3 steps are inside"),
        (("--sel", "2000"), "--sel 2000: give FIRST:LAST"),
        (("--overwrite", "--again"), "give one of them"),
        (("--domian", 2), "did you mean --domain"),
    ],
)
def test_mistakes(folder: Path, args: tuple[Any, ...], said: str) -> None:
    code, output = forecast(folder, *args)
    assert code == 2
    assert said in output
