"""Objects of xarray as what to open, coordinates of samples, samples as objects of xarray."""

from pathlib import Path

import netCDF4
import numpy as np
import pytest
import torch
import xarray as xr

import scidata
from scidata.errors import ConfigError, UnknownNameError
from tests.real_layouts import make

TIMES = np.arange("2015-01-01", "2015-01-11", dtype="M8[D]").astype("M8[ns]")
LEVELS = [1000.0, 850.0, 500.0]


@pytest.fixture
def weather():
    rng = np.random.default_rng(0)
    dims = ("time", "level", "latitude", "longitude")
    ds = xr.Dataset(
        {name: (dims, rng.random((10, 3, 9, 12), np.float32), {"units": "m s-1"}) for name in ("u", "v")},
        coords={
            "time": TIMES, "level": ("level", LEVELS, {"units": "hPa"}), "latitude": np.linspace(80, -80, 9),
            "longitude": np.arange(0, 360, 30.0),
        },
    )  # fmt: skip
    ds["t"] = (dims, np.round(rng.normal(280, 5, (10, 3, 9, 12)), 1), {"units": "K"})
    ds["t"].encoding = {"dtype": "i2", "scale_factor": 0.1, "add_offset": 280.0, "_FillValue": -999}
    return ds


@pytest.fixture(params=["nc", "zarr"])
def path(request, tmp_path, weather):
    name = str(tmp_path / f"weather.{request.param}")
    weather.to_netcdf(name) if request.param == "nc" else weather.to_zarr(name, consolidated=False)
    return name


def opened(path, **options):
    return xr.open_dataset(
        path, **({"engine": "zarr", "consolidated": False} if path.endswith("zarr") else {}), **options
    )


# -- coordinates -------------------------------------------------------------------------------------------------


def test_coordinates_of_samples_windows_and_batches(path, weather):
    ds = scidata.open_dataset(path, coords=True)
    one = ds[4].coords
    assert set(one) == {"time", "level", "latitude", "longitude"}
    assert torch.equal(one["level"], torch.tensor(LEVELS, dtype=torch.float64))
    assert one["time"] == TIMES[4]
    with pytest.raises(UnknownNameError, match="no coordinate 'lat'; did you mean 'latitude'"):
        one["lat"]
    windows = scidata.open_dataset(path, coords=True, steps=(0, 2), isel={"latitude": slice(2, 8, 2), "level": 1})
    found = windows[3].coords
    assert set(found) == {"time", "latitude", "longitude"}
    assert np.array_equal(found["time"], TIMES[[3, 5]])
    assert np.array_equal(found["latitude"].numpy(), weather.latitude.values[2:8:2])
    batches = list(scidata.DataLoader(windows, batch_size=3))
    assert np.array_equal(batches[1].coords["time"], TIMES[[[3, 5], [4, 6], [5, 7]]])
    both = scidata.concat(ds, ds)
    assert both[14].index == 14
    assert both[14].coords["time"] == TIMES[4]
    collated = scidata.collate([ds[1], ds[7]])
    assert np.array_equal(collated.coords["time"], TIMES[[1, 7]])
    moved = ds[2].replace({"speed": ds[2]["u"] ** 2}).to(torch.float64)
    assert moved.coords["time"] == TIMES[2]


def test_coordinates_are_asked_for(path):
    with pytest.raises(ConfigError, match="open the data set with coords=True"):
        scidata.open_dataset(path)[0].coords  # noqa: B018
    with pytest.raises(ConfigError, match="coords='yes': expected True or False"):
        scidata.open_dataset(path, coords="yes")


@pytest.mark.parametrize("calendar", ["standard", "noleap", "360_day"])
def test_times_of_any_calendar_over_files_with_other_epochs(tmp_path, calendar):
    paths = []
    for year in (2015, 2016):
        paths.append(str(tmp_path / f"{year}.nc"))
        with netCDF4.Dataset(paths[-1], "w") as file:
            for dim, n in (("time", 4), ("y", 3), ("x", 2)):
                file.createDimension(dim, n)
            time = file.createVariable("time", "f8", ("time",))
            time.units, time.calendar = f"days since {year}-02-27", calendar
            time[:] = np.arange(4)
            file.createVariable("u", "f4", ("time", "y", "x"))[:] = np.ones((4, 3, 2))
    want = np.concatenate([xr.open_dataset(p).time.values for p in paths])
    ds = scidata.open_dataset(paths, coords=True)
    assert [ds[i].coords["time"] for i in range(8)] == list(want)
    windows = scidata.open_dataset(paths, coords=True, steps=(0, 1), gaps="allow")
    assert np.array_equal(windows[3].coords["time"], want[3:5])
    picked = scidata.open_dataset(paths, sel={"time": slice("2015-02-28", "2016-02-27")})
    assert len(picked) == 3 + 1


# -- by value ----------------------------------------------------------------------------------------------------


def test_rows_by_value_are_those_of_xarray(path, weather):
    sel = {"level": [500.0, 1000.0], "latitude": slice(60, -20), "time": slice("2015-01-03", "2015-01-05")}
    ds = scidata.open_dataset(path, fields=["u"], sel=sel)
    want = weather.u.sel(sel)
    assert len(ds) == 3
    for i in range(3):
        assert np.array_equal(ds[i]["u"].numpy(), want[i].values)
    one = scidata.open_dataset(path, fields=["u"], sel={"level": 850})
    assert np.array_equal(one[1]["u"].numpy(), weather.u.sel(level=850)[1].values)
    assert one.dims("u") == ("latitude", "longitude")


def test_what_is_not_there_is_answered_with_what_is(path):
    for sel, message in [
        ({"level": 700}, r"no label is 700.*it has 1000\.0, 850\.0, 500\.0"),
        ({"levle": 500}, "sel names dimension 'levle', which no field has; did you mean 'level'"),
        ({"latitude": slice(-20, 60)}, r"nothing lies in -20:60; it has 80\.0, 60\.0, 40.*descend: slice\(60, -20\)"),
        ({"time": "1999"}, "it has 2015-01-01T00:00:00, 2015-01-02"),
        ({"time": "never"}, "it has 2015-01-01"),
    ]:
        with pytest.raises((ConfigError, UnknownNameError), match=message):
            scidata.open_dataset(path, sel=sel)
    with pytest.raises(ConfigError, match="both choose rows of 'level'"):
        scidata.open_dataset(path, sel={"level": 500}, isel={"level": 0})
    with pytest.raises(ConfigError, match=r"rows are numbers from 0 on, labelled 1000\.0, .*sel=\{'level': 500\}"):
        scidata.open_dataset(path, isel={"level": 500})


# -- samples as objects of xarray --------------------------------------------------------------------------------


def test_a_sample_is_what_xarray_reads(path, weather):
    ds = scidata.open_dataset(path)
    found = ds[3].to_xarray()
    want = opened(path).isel(time=3)
    xr.testing.assert_equal(found, want[list(found)])
    assert found.u.attrs["units"] == "m s-1"
    assert "scale_factor" not in found.t.attrs
    assert found.level.attrs["units"] == "hPa"
    windows = scidata.open_dataset(path, steps=(0, 1), fields=["u"])
    xr.testing.assert_equal(windows[3].to_xarray(), opened(path)[["u"]].isel(time=slice(3, 5)))
    batch = next(iter(scidata.DataLoader(windows, batch_size=2))).to_xarray()
    assert batch.u.dims == ("batch", "time", "level", "latitude", "longitude")
    assert np.array_equal(batch.time_of_sample.values, TIMES[[[0, 1], [1, 2]]])
    batch.to_netcdf(path + ".out.nc")
    coarse = ds[0].replace({"u": ds[0]["u"][:, ::2]}).to_xarray if False else ds[0].replace({"w": ds[0]["u"] * 2})
    assert coarse.to_xarray().w.dims == ("level", "latitude", "longitude")
    half = scidata.open_dataset(path, fields=["u"], dtype=torch.bfloat16)[0].to_xarray()
    assert half.u.dtype == np.float32


# -- objects of xarray as what to open ---------------------------------------------------------------------------


def test_what_nobody_has_computed_with_opens(path, weather):
    for obj, options in [
        (opened(path), {}),
        (opened(path)[["u", "t"]], {}),
        (opened(path).isel(time=slice(2, 8, 2), latitude=[1, 5], level=2), {}),
        (opened(path).sel(latitude=slice(60, 0)), {"steps": (0, 1)}),
        (opened(path).t, {}),
        (opened(path, mask_and_scale=False)[["t"]], {}),
    ]:
        ds = scidata.open_dataset(obj, **options)
        whole = obj.to_dataset() if isinstance(obj, xr.DataArray) else obj
        assert set(ds.fields) == set(whole.data_vars)
        for i in range(len(ds)):
            rows = slice(i, i + 2) if options else i
            for name, values in ds[i].items():
                assert np.array_equal(values.numpy(), whole[name].isel(time=rows).values)
                assert values.numpy().dtype == whole[name].dtype
    narrowed = scidata.open_dataset(opened(path), fields=["v"], isel={"level": 0})
    assert narrowed.global_shape("v") == (9, 12)


def test_what_was_changed_is_refused_with_the_reason(path, weather):
    lazy = opened(path)[["u"]]
    for obj, why in [
        (opened(path)[["u"]] + 1, "'u' was loaded or computed"),
        (opened(path)[["u"]].load(), "'u' was loaded or computed"),
        (weather, "'u' was loaded or computed"),
        (lazy.rename(u="w"), "'w' is 'u' there"),
        (lazy.transpose("level", ...), "'u' was transposed"),
        (lazy.rename(latitude="lat"), "has dims time, level, latitude, longitude there, and time, level, lat,"),
        (lazy.drop_vars("u"), "no data variables"),
        (lazy.assign_coords(longitude=lazy.longitude + 1), "'longitude' has other labels there"),
        (lazy.isel(time=[0, 2]).assign_coords(time=lazy.time.values[:2]), "'time' has other labels there"),
        (
            lazy.isel(time=[0]).drop_vars("time").merge(opened(path)[["v"]].isel(time=[1]).drop_vars("time")),
            "of 'time'",
        ),
    ]:
        with pytest.raises(ConfigError, match=why):
            scidata.open_dataset(obj)
    with pytest.raises(ConfigError, match="cropped already, of time; do it once"):
        scidata.open_dataset(lazy.isel(time=[1, 2]), isel={"level": 0})
    with pytest.raises(UnknownNameError, match=r"no field 'uu'.*'u'"):
        scidata.open_dataset(lazy, fields=["uu"])


def test_a_group_of_a_file(tmp_path, weather):
    path = str(tmp_path / "a.nc")
    weather[["u"]].to_netcdf(path)
    weather[["v"]].to_netcdf(path, mode="a", group="wind")
    ds = scidata.open_dataset(xr.open_dataset(path, group="wind"))
    assert np.array_equal(ds[2]["v"].numpy(), weather.v[2].values)


def test_dask_arrays_of_files_open_and_computed_ones_do_not(path, weather):
    pytest.importorskip("dask")
    obj = opened(path, chunks={})
    assert np.array_equal(scidata.open_dataset(obj)[2]["u"].numpy(), weather.u[2].values)
    with pytest.raises(ConfigError, match="is computed by dask"):
        scidata.open_dataset(obj + 1)


def test_a_sample_of_a_mesh_has_dims_by_entity(tmp_path):
    make.mesh_graph_nets(tmp_path / "a.h5")
    scidata.partition(f"{tmp_path}/a.h5/*", str(tmp_path / "out"))
    sample = scidata.open_dataset(str(tmp_path / "out"))[2]
    found = sample.to_xarray()
    assert found.velocity.dims == ("dim_0", "node", "velocity_dim_2")  # dim_2 has other lengths elsewhere
    assert found.pos.dims[0] == found.node_type.dims[0] == "node"
    for name in sample:
        assert np.array_equal(found[name].values, sample[name].numpy())
    with pytest.raises(ConfigError, match="only those of grids have"):
        sample.coords  # noqa: B018


def test_a_file_of_ecmwf():
    """Packed as the archive packs it: crops, labels, coordinates and samples are those of xarray."""
    path = Path(__file__).parents[4] / "shared" / "data" / "eraint_uvz.nc"
    if not path.exists():
        pytest.skip("the sample files are not beside the repo")
    whole = xr.open_dataset(path)
    sel = {"latitude": slice(60, -30), "level": [850, 500]}
    ds = scidata.open_dataset(path, sel=sel, coords=True)
    for i in range(len(ds)):
        want = whole.sel(sel).isel({ds.reader.sample_dim: i})
        found = ds[i].to_xarray()
        xr.testing.assert_equal(found, want[list(found)])
        assert np.array_equal(ds[i].coords["latitude"].numpy(), want.latitude.values)
    lazy = xr.open_dataset(path).isel(longitude=slice(10, 400, 3))[["u"]]
    assert np.array_equal(scidata.open_dataset(lazy)[1]["u"].numpy(), whole.u[1, ..., 10:400:3].values)
