"""The recipe for ERA5-like grids, against NumPy and xarray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import zarr

import scidata
from pipelines import era5_grid
from scidata.testing import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def era5(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("era5") / "era5.zarr")
    era5_grid.make(path, num_times=4, num_levels=2, shape=(13, 10), rows=4)
    return path


def whole(path: str, time: int) -> np.ndarray:
    """All channels of one time, cropped to patches of 4, in the order of the data set's fields."""
    group = zarr.open_group(path, mode="r")
    names = scidata.open_dataset(path).fields
    return np.concatenate([group[n][time].reshape(-1, 13, 10)[:, :12, :8] for n in names])


def test_channels_of_a_sample_and_of_a_batch(era5: str) -> None:
    ds = era5_grid.open_era5(era5, None, patch=4)
    assert len(ds) == 3
    inputs, targets = era5_grid.stack_channels(ds[1])
    np.testing.assert_array_equal(inputs.numpy(), whole(era5, 1)[None])
    np.testing.assert_array_equal(targets.numpy(), whole(era5, 2)[None])
    batch = next(iter(scidata.DataLoader(ds, batch_size=2, sampler=[2, 0])))
    inputs, targets = era5_grid.stack_channels(batch)
    np.testing.assert_array_equal(inputs.numpy(), np.stack([whole(era5, 2), whole(era5, 0)]))
    np.testing.assert_array_equal(targets.numpy(), np.stack([whole(era5, 3), whole(era5, 1)]))
    names = era5_grid.channel_names(ds)
    assert len(names) == inputs.shape[1] == 7
    assert {"temperature[0]", "temperature[1]", "surface_pressure"} < set(names)


def test_fields_are_chosen_in_the_order_asked(era5: str) -> None:
    ds = era5_grid.open_era5(era5, None, fields=["v", "surface_pressure"])
    assert era5_grid.channel_names(ds) == ["v[0]", "v[1]", "surface_pressure"]


def test_fields_without_the_grid_are_refused_by_name(era5: str) -> None:
    with pytest.raises(ValueError, match="field 'latitude' has dims"):
        era5_grid.open_era5(era5, None, fields=["u", "latitude"])


def _normalise(rank: int, num_ranks: int, path: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    ds = era5_grid.open_era5(path, mesh, patch=4, dtype=torch.float64)
    mean, std = era5_grid.normalisation(ds)
    return mean.numpy(), std.numpy(), list(era5_grid.stack_channels(ds[0])[0].to_local().shape)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_normalisation_is_that_of_one_process(era5: str, num_ranks: int) -> None:
    samples = np.stack([whole(era5, t) for t in range(3)]).astype(np.float64)
    results = run_ranks(_normalise, num_ranks, era5)
    assert [shape[2] for _, _, shape in results] == {1: [12], 2: [8, 4], 3: [4, 4, 4]}[num_ranks]
    for mean, std, _ in results:
        np.testing.assert_allclose(mean, samples.mean(axis=(0, 2, 3), keepdims=True), rtol=1e-13)
        np.testing.assert_allclose(std, samples.std(axis=(0, 2, 3), keepdims=True), rtol=1e-12)
        np.testing.assert_array_equal(mean, results[0][0])  # bit for bit the same on every rank
        np.testing.assert_array_equal(std, results[0][1])


def test_a_constant_channel_is_not_divided_by_zero(tmp_path: Path) -> None:
    xr.Dataset({"mask": (("time", "latitude", "longitude"), np.ones((3, 4, 8), "f4"))}).to_netcdf(tmp_path / "mask.nc")
    mean, std = era5_grid.normalisation(era5_grid.open_era5(str(tmp_path / "mask.nc"), None))
    assert mean.item() == std.item() == 1


def _packed(path: Path, times: range, seed: int) -> None:
    rng = np.random.default_rng(seed)
    t2m = 280 + rng.normal(size=(len(times), 12, 8))
    t2m[0, 0, 0] = np.nan
    ds = xr.Dataset(
        {"t2m": (("time", "latitude", "longitude"), t2m, {"units": "K"})},
        coords={
            "time": ("time", list(times), {"units": "hours since 2000-01-01"}),
            "latitude": np.linspace(90, -90, 12),
        },
    )
    packing = {"dtype": "i2", "scale_factor": 0.001, "add_offset": 280.0, "_FillValue": -32768}
    ds.to_netcdf(path, encoding={"t2m": packing})


def test_converted_files_hold_what_xarray_decodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [str(tmp_path / "2000.nc"), str(tmp_path / "2001.nc")]
    _packed(Path(sources[0]), range(3), seed=0)
    _packed(Path(sources[1]), range(3, 5), seed=1)
    out = str(tmp_path / "out.zarr")
    assert era5_grid.main(["convert", *sources, out, "--rows", "4"]) == 0
    assert capsys.readouterr().out.strip() == out
    expected = np.concatenate([xr.open_dataset(path).t2m.values for path in sources]).astype("f4")
    array = zarr.open_group(out, mode="r")["t2m"]
    assert array.chunks == (1, 4, 8)
    np.testing.assert_array_equal(array[:], expected)
    ds = era5_grid.open_era5(out, None)
    np.testing.assert_array_equal(ds[3]["t2m"].numpy(), expected[3:5])
    np.testing.assert_array_equal(ds.coordinate("time"), np.arange(5))
    assert era5_grid.main(["convert", sources[0], out]) == 1  # never written over
    assert "exists" in capsys.readouterr().err


def test_files_that_do_not_agree_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _packed(tmp_path / "a.nc", range(2), seed=0)
    xr.open_dataset(tmp_path / "a.nc").isel(latitude=slice(6)).to_netcdf(tmp_path / "b.nc")
    assert era5_grid.main(["convert", str(tmp_path / "a.nc"), str(tmp_path / "b.nc"), str(tmp_path / "out.zarr")]) == 1
    assert "b.nc: field 't2m'" in capsys.readouterr().err
    assert not (tmp_path / "out.zarr").exists()
