"""Keys of samples, beside xarray's coordinates of the same files."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import scidata
from scidata.errors import ConfigError
from scidata.testing import make_grid


def _grid(times, **more):
    values = np.zeros((len(times), 4), "f4")
    return xr.Dataset({"u": (("time", "x"), values)}, {"time": times, **more})


def test_labels_at_the_samples_own_step(tmp_path):
    times = np.datetime64("2020-02-28", "ns") + np.arange(8) * np.timedelta64(12, "h")
    _grid(times).to_netcdf(tmp_path / "a.nc")
    for steps, isel, wanted in [
        ((0,), None, times), ((-1, 0), None, times[1:]), ((0, 1), {"time": slice(0, 8, 2)}, times[:6:2]),
        ((1, 2), None, times[1:-1]),
    ]:  # fmt: skip
        ds = scidata.open_dataset(tmp_path / "a.nc", steps=steps, isel=isel)
        keys = ds.sample_keys("time")
        assert keys.dtype == np.dtype("M8[ns]")
        assert keys.tolist() == wanted.tolist()
    both = scidata.subset(scidata.concat(ds, ds), [7, -1, 0])
    assert both.sample_keys("time").tolist() == times[[2, 6, 1]].tolist()
    with pytest.raises(ConfigError, match=r"'tyme' has no value for each sample; did you mean 'time'\?"):
        both.sample_keys("tyme")


def test_files_trajectories_and_arrays_besides(tmp_path):
    init, lead = np.datetime64("2021-01-01", "ns") + np.arange(3) * np.timedelta64(1, "D"), np.arange(4) * 6
    for k in range(3):
        valid = init[k : k + 1, None] + lead * np.timedelta64(1, "h")
        xr.Dataset(
            {"u": (("init", "lead", "x"), np.zeros((1, 4, 2), "f4"))},
            {"init": init[k : k + 1], "lead": lead, "valid": (("init", "lead"), valid), "run": ("init", [f"r{k}"])},
        ).to_netcdf(tmp_path / f"f{k}.nc", encoding={"init": {"units": f"days since 2020-12-{k + 1:02}"}})
    ds = scidata.open_dataset(str(tmp_path / "f*.nc"), sample_dim=("init", "lead"), steps=(0, 1))
    assert ds.sample_keys("init").tolist() == np.repeat(init, 3).tolist()
    assert ds.sample_keys("lead").tolist() == [0, 6, 12] * 3
    assert ds.sample_keys("valid").tolist() == (init[:, None] + lead[:3] * np.timedelta64(1, "h")).reshape(-1).tolist()
    cropped = scidata.open_dataset(str(tmp_path / "f*.nc"), sample_dim=("init", "lead"), isel={"lead": [3, 1]})
    assert cropped.sample_keys("lead").tolist() == [18, 6] * 3


def test_other_calendars_and_far_years(tmp_path):
    for calendar, year in [("noleap", 2001), ("360_day", 2001), ("standard", 1000)]:
        times = xr.date_range(f"{year}-02-27", periods=4, calendar=calendar, use_cftime=True)
        _grid(times).to_netcdf(tmp_path / f"{calendar}.nc")
        keys = scidata.open_dataset(tmp_path / f"{calendar}.nc").sample_keys("time")
        wanted = xr.open_dataset(tmp_path / f"{calendar}.nc")["time"].values
        assert keys.tolist() == wanted.tolist()
    with pytest.raises(ConfigError, match=r"calendar '360_day' and .* 'noleap', which do not compare"):
        scidata.concat(*(scidata.open_dataset(tmp_path / f"{c}.nc") for c in ("noleap", "360_day"))).sample_keys("time")


def test_names_and_values_of_a_store(tmp_path):
    for k in range(3):
        points = np.random.default_rng(k).random((5 + k, 3))
        xr.Dataset({"pos": (("point", "xyz"), points), "t": ("point", points[:, 0])}).to_netcdf(tmp_path / f"c{k}.nc")
    ds = scidata.open_dataset(str(tmp_path / "c*.nc"), kind="points")
    assert ds.sample_keys("name").tolist() == ["c0", "c1", "c2"]
    scidata.partition(str(tmp_path / "c*.nc"), tmp_path / "store", kind="points")
    store = scidata.open_dataset(tmp_path / "store")
    assert store.sample_keys("name").tolist() == ["c0", "c1", "c2"]
    make_grid(tmp_path / "g.zarr", num_times=2)
    with pytest.raises(ConfigError, match="'name' has no value for each sample"):
        scidata.open_dataset(tmp_path / "g.zarr").sample_keys("name")
