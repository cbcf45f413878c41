"""The example of observations: loss, gradients, resuming and written analyses, as one process has them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr

from pipelines import observations
from tests.examples._scripts import (
    LAUNCHER,
    assert_equal_to_one_process,
    in_turn_on_ranks_of,
    lines_of,
    module_of,
    weights,
)

TINY = ("--dim", "8", "--depth", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def weather(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small grid, and twelve analyses that have twelve hours of observations before them."""
    path = str(tmp_path_factory.mktemp("weather") / "weather")
    observations.make(path, days=3.5, shape=(20, 12), density=0.1)
    return path


# 20 latitudes make five rows of cells: two ranks share them as 3 + 2, three as 2 + 2 + 1
@pytest.mark.parametrize(
    ("num_ranks", "domain", "runs"),
    [
        (1, 1, [("--batch-size", 2)]),
        (2, 2, [("--batch-size", 2), ("--instruments", "radiosondes")]),
        (3, 3, [("--batch-size", 2)]),
        (4, 2, [("--batch-size", 2)]),
        pytest.param(2, 2, [("--compile", "aot_eager")], marks=pytest.mark.slow),
        pytest.param(4, 2, [("--strategy", "fsdp")], marks=pytest.mark.slow),
    ],
    ids=["1", "2", "3", "2x2", "compiled", "fsdp"],
)
def test_loss_and_gradients_are_those_of_one_process(
    weather: str, num_ranks: int, domain: int, runs: list[tuple[object, ...]]
) -> None:
    every = (*TINY, "--data", weather, "--domain", domain, "--dtype", "float64", "--check")
    found = in_turn_on_ranks_of("train_obs", num_ranks, *((*every, *args) for args in runs))
    for args, (code, output) in zip(runs, found, strict=True):
        assert_equal_to_one_process(code, f"{args}: {output}", f"{num_ranks // domain} dp x {domain} domain")


def test_a_place_is_in_the_cell_of_the_row_before_it() -> None:
    example = module_of("train_obs")
    for lat in (np.linspace(80, -80, 9), np.linspace(-80, 80, 9)):  # rows of 20 degrees
        grid = example.Grid(lat, np.arange(12) * 30.0, 3, torch.device("cpu"))
        north = lat[0] > 0
        pos = torch.tensor([[0.0, 89], [359, 60.1], [-1, 0], [100, -89], [45, 20]])
        cell, inside = grid.cells(pos)
        row = [0, 0, 1, 2, 0] if north else [2, 2, 1, 0, 1]  # a place on a row lies north of it
        assert cell[:, 0].tolist() == row
        assert cell[:, 1].tolist() == [0, 3, 3, 1, 0]
        y = [-0.15, 0.33, 0.33, 0.82, 1.0] if north else [0.82, 0.335, 0.33, -0.15, 0.67]
        np.testing.assert_allclose(inside[:, 0], y, atol=0.01)
        np.testing.assert_allclose(inside[:, 1], [0, 0.99, 0.99, 0.11, 0.5], atol=0.01)


def test_a_domain_goes_on_with_what_dp_ranks_began_and_writes_the_same(weather: str, tmp_path: Path) -> None:
    """Two epochs of four samples on two dp ranks; the second again on a domain of two, from the middle."""
    every = (*TINY, "--data", weather, "--dtype", "float64", "--epochs", 2, "--val-fraction", 0.3, "--log-every", 1)
    ends = [("--out", tmp_path / name, "--write", tmp_path / f"{name}.zarr") for name in ("dp", "domain")]
    resumed = ("--domain", 2, "--batch-size", 2, "--resume", tmp_path / "dp" / "step_00000001")
    first, second = in_turn_on_ranks_of(
        "train_obs", 2, (*every, "--save-every", 1, *ends[0]), (*every, *resumed, *ends[1])
    )
    assert first[0] == second[0] == 0, f"{first[1]} {second[1]}"
    (last,) = sorted((tmp_path / "domain").glob("step_*[0-9]"))[-1:]
    expected, found = (weights(tmp_path / name / last.name) for name in ("dp", "domain"))
    assert expected["progress"].tolist() == found["progress"].tolist()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-8, msg=name)
    scores = [lines_of(tmp_path / name, "validation")[-1] for name in ("dp", "domain")]
    assert scores[0]["t2m"] == pytest.approx(scores[1]["t2m"], rel=1e-6)
    written = [xr.open_zarr(tmp_path / f"{name}.zarr", consolidated=False) for name in ("dp", "domain")]
    truth = xr.open_zarr(f"{weather}/analysis.zarr", consolidated=False).sel(time=written[0].time)
    area = np.cos(np.radians(truth.lat))
    for name in truth:
        np.testing.assert_allclose(written[0][name], written[1][name], rtol=1e-5, atol=1e-5)
        rmse = float(np.sqrt(((written[0][name] - truth[name]) ** 2).weighted(area).mean()))
        assert rmse == pytest.approx(scores[0][str(name)], rel=1e-4)  # as written: float32


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--depth", "0"], "--depth must be at least 1, not 0"),
        (["--instruments", "station"], "did you mean 'stations.zarr'"),
        (["--fields", "t2"], "'t2m'"),
        (["--write", "."], "--write .: exists"),
    ],
)
def test_bad_arguments_exit_with_2(
    weather: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        monkeypatch.delenv(name)
    try:
        with pytest.raises(SystemExit) as stop:
            module_of("train_obs").main([*TINY, "--data", weather, *args])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
