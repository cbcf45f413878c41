"""The forecast example: a checkpoint run forward on any number of ranks, written and scored."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from pipelines import era5_grid
from scidata.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ("--dim", "8", "--depth", "2", "--heads", "2", "--patch", "4", "--device", "cpu", "--dtype", "float64")
LEADS = 3


def _rank(rank: int, num_ranks: int, script: str, args: tuple[Any, ...]) -> tuple[int, str]:
    """Run a script of the examples in this process; return its exit code and what it printed."""
    spec = importlib.util.spec_from_file_location(script, EXAMPLES / f"{script}.py")
    assert spec
    assert spec.loader
    sys.modules[script] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = module.main([*TINY, *map(str, args)])
        except SystemExit as e:
            code = e.code
    return code, output.getvalue()


def on_ranks(num_ranks: int, script: str, *args: Any) -> tuple[int, str]:
    found: tuple[int, str] = run_ranks(_rank, num_ranks, script, args, timeout=150)[0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of nine times, a checkpoint, and the forecasts that one process makes of it."""
    path: Path = tmp_path_factory.mktemp("forecast")
    assert (
        era5_grid.main(["make", str(path / "era5.zarr"), "--times", "9", "--shape", "25", "16", "--levels", "2"]) == 0
    )
    code, output = on_ranks(2, "train_vit", "--data", path / "era5.zarr", "--domain", "2", "--out", path / "runs")
    assert code == 0, output
    (path / "scores1").write_text(forecast(path, 1, 1)[1])
    return path


def forecast(path: Path, num_ranks: int, domain: int, *more: Any) -> tuple[int, str]:
    checkpoint = max((path / "runs").glob("step_*"))
    out = path / f"forecast{num_ranks}{domain}.zarr"
    args = ("--data", path / "era5.zarr", "--checkpoint", checkpoint, "--leads", LEADS, "--forecast", out)
    return on_ranks(num_ranks, "forecast", *args, "--domain", domain, *more)


def scores_of(output: str) -> dict[tuple[str, str], list[float]]:
    found, field = {}, ""
    lines = output[output.index("RMSE") :].splitlines()[1:]
    for words in map(str.split, lines):
        field = words[0] if len(words) == LEADS + 2 else field
        found[field, words[-LEADS - 1]] = [float(word) for word in words[-LEADS:]]
    return found


@pytest.mark.parametrize(("num_ranks", "domain"), [(2, 2), (2, 1), (3, 3)])
def test_the_same_on_any_number_of_ranks(folder: Path, num_ranks: int, domain: int) -> None:
    code, output = forecast(folder, num_ranks, domain, "--plot", folder / "scores.png")
    assert code == 0, output
    expected, found = scores_of((folder / "scores1").read_text()), scores_of(output)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-5)  # as printed
    ours = xr.open_dataset(folder / f"forecast{num_ranks}{domain}.zarr")
    whole = xr.open_dataset(folder / "forecast11.zarr")
    for name, field in whole.items():
        assert field.dims[:2] == ("time", "lead")
        np.testing.assert_allclose(ours[name].values, field.values, rtol=2e-6)  # stored in float32
    assert (folder / "scores.png").stat().st_size > 1000


def test_scores_are_what_xarray_says(folder: Path) -> None:
    truth = xr.open_dataset(folder / "era5.zarr", consolidated=False).isel(latitude=slice(0, 24)).astype("f8")
    whole = xr.open_dataset(folder / "forecast11.zarr", decode_timedelta=True).astype("f8")
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
    code, output = forecast(folder, 1, 1)
    assert code == 2
    assert "is there already" in output
    code, output = forecast(folder, 1, 1, "--again")  # finished: scored again
    assert code == 0, output
    assert scores_of(output) == scores_of((folder / "scores1").read_text())


@pytest.mark.parametrize(
    ("args", "said"),
    [(("--leads", 20), "the data have 9 times"), (("--checkpoint", "nowhere"), "no complete checkpoint there")],
)
def test_mistakes(folder: Path, args: tuple[Any, ...], said: str) -> None:
    code, output = forecast(folder, 1, 1, *args)
    assert code == 2
    assert said in output
