"""What follows from time and place: against an ephemeris, closed forms, other calendars, and on any cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cftime
import numpy as np
import pytest
import torch
import xarray as xr

import scidata
from pipelines import era5_grid
from pipelines.forcings import NAMES, SOLAR_CONSTANT, clock_of, cos_zenith, forcing, insolation, sun_of
from scidata.testing import run_ranks


def place(*degrees: float) -> tuple[torch.Tensor, torch.Tensor]:
    lat, lon = torch.tensor(degrees, dtype=torch.float64).reshape(-1, 2).T
    return lat, lon


@pytest.mark.parametrize(
    ("time", "lat", "lon", "cosine", "distance"),
    # by pvlib 0.16.1: NREL's solar position algorithm (Reda and Andreas 2004) and distance
    [
        ("2020-03-20T12:00", 0, 0, 0.999485, 0.996016),
        ("2019-06-21T18:00", 51.5, -0.1, 0.316697, 1.016249),
        ("2016-12-31T23:30", -33.9, 151.2, 0.826830, 0.983339),
        ("1981-09-01T05:00", 35.7, 139.7, 0.745157, 1.009132),
        ("2009-08-24T21:20:01", 24.13259628, 59.01935516, -0.773467, None),
    ],
)
def test_the_sun_is_where_an_ephemeris_has_it(
    time: str, lat: float, lon: float, cosine: float, distance: float | None
) -> None:
    sun = sun_of(clock_of(np.datetime64(time)))
    assert cos_zenith(*place(lat, lon), sun).item() == pytest.approx(cosine, abs=2e-4)
    if distance is not None:
        assert sun.irradiance == pytest.approx(SOLAR_CONSTANT / distance**2, rel=2e-4)


def test_a_day_is_what_the_closed_form_says() -> None:
    """The mean over a day at one latitude (Milankovitch), night and day of the poles included."""
    for day in ("2015-03-21", "2015-06-21", "2015-12-21"):
        noon = sun_of(clock_of(np.datetime64(day, "h") + 12))
        lat = torch.linspace(-90, 90, 37, dtype=torch.float64)
        found = insolation(lat, torch.zeros(()), np.datetime64(day, "D") + 1, hours=24).numpy()
        phi, delta = np.radians(lat.numpy()), noon.declination
        sunset = np.arccos(np.clip(-np.tan(phi) * np.tan(delta), -1, 1))
        expected = sunset * np.sin(phi) * np.sin(delta) + np.cos(phi) * np.cos(delta) * np.sin(sunset)
        np.testing.assert_allclose(found, noon.irradiance / np.pi * expected, atol=1.5)
        area = np.cos(phi)  # over the whole earth a quarter of what a plane gets
        assert (found * area).sum() / area.sum() == pytest.approx(float(noon.irradiance) / 4, rel=2e-3)


def test_polar_night_is_dark_and_an_equinox_has_the_sun_overhead() -> None:
    hours = np.arange("2022-12-21", "2022-12-22", dtype="M8[h]")
    assert torch.equal(insolation(*place(80, 0, 70, 120, 68, 300), hours), torch.zeros(24, 3, dtype=torch.float64))
    assert (insolation(*place(-80, 0), hours) > 100).all()
    equinox = np.datetime64("2022-03-20T12:07")  # the sun is seven minutes late
    assert insolation(*place(0, 0), equinox).item() == pytest.approx(
        float(sun_of(clock_of(equinox)).irradiance), rel=1e-5
    )


def test_a_mean_over_hours_is_that_of_its_seconds() -> None:
    lat, lon = torch.linspace(90, -90, 19, dtype=torch.float64)[:, None], torch.arange(0, 360, 15, dtype=torch.float64)
    end = np.datetime64("2019-07-01T06:00:00")
    seconds = end - np.timedelta64(3600, "s") + np.arange(5, 3600, 10).astype("m8[s]")
    expected = insolation(lat, lon, seconds).mean(0)
    torch.testing.assert_close(insolation(lat, lon, end, hours=1), expected, rtol=0, atol=0.3)
    assert (insolation(lat, lon, end) - expected).abs().max() > 50


def test_time_of_day_is_that_of_the_place_and_time_of_year_that_of_the_calendar() -> None:
    lat, lon = place(10, 0, 20, 180, -30, 270)
    time = np.datetime64("2021-07-02T12:00")  # the middle of a year of 365 days
    values = {name: forcing(name, lat, lon, time) for name in NAMES}
    expected = {"cos_time_of_day": [-1, 1, 0], "sin_time_of_day": [0, 0, 1]}
    expected |= {"cos_time_of_year": [-1] * 3, "sin_time_of_year": [0] * 3}
    for name, numbers in expected.items():
        np.testing.assert_allclose(values[name].numpy(), numbers, atol=1e-12, err_msg=name)
    assert torch.equal(values["insolation"], insolation(lat, lon, time) / SOLAR_CONSTANT)
    with pytest.raises(ValueError, match="'isolation' is none of insolation, "):
        forcing("isolation", lat, lon, time)


@pytest.mark.parametrize("calendar", ["standard", "proleptic_gregorian"])
def test_objects_of_calendars_of_the_sky_are_as_numpys_times(calendar: str) -> None:
    text = ["1999-12-31T23:59:59", "2000-02-29T06:00:00", "2024-12-31T18:30:00"]
    objects = [cftime.datetime.strptime(t, "%Y-%m-%dT%H:%M:%S", calendar=calendar) for t in text]
    ours, numpys = clock_of(np.array(objects)), clock_of(np.array(text, "M8[s]"))
    np.testing.assert_allclose(ours.days, numpys.days, atol=1e-8)
    np.testing.assert_allclose(ours.day, numpys.day, atol=1e-12)
    np.testing.assert_allclose(ours.year, numpys.year, atol=1e-12)
    single = clock_of(np.array(objects[1]))
    assert single.day.shape == ()
    assert single.day == 0.25


@pytest.mark.parametrize(("calendar", "days"), [("noleap", 365), ("all_leap", 366), ("360_day", 360)])
def test_a_year_of_a_models_calendar_is_one_orbit(calendar: str, days: int) -> None:
    begin = cftime.datetime(1850, 1, 1, calendar=calendar)
    times = np.array([cftime.num2date(d, "days since 1850-01-01", calendar=calendar) for d in range(days + 1)])
    clock = clock_of(times)
    np.testing.assert_allclose(clock.year, [*np.arange(days) / days, 0], atol=1e-12)
    declination = np.degrees(sun_of(clock).declination)
    assert declination[0] == declination[-1] == pytest.approx(-23.03, abs=0.05)  # of 1 January
    assert declination.max() == pytest.approx(23.44, abs=0.01)
    (equinox,) = np.flatnonzero((declination[:-1] < 0) & (declination[1:] >= 0))
    assert (times[equinox] - begin).days / days == pytest.approx(79.3 / 366, abs=0.004)


def test_numbers_are_no_times() -> None:
    with pytest.raises(TypeError, match="is no time: give datetime64"):
        clock_of(np.array([3, 4]))


# -- samples -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def era5(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("era5") / "era5.zarr")
    era5_grid.make(path, num_times=3, num_levels=2, shape=(37, 26))
    return path


def _parts(rank: int, num_ranks: int, path: str, layouts: list[dict[str, Any]]) -> list[Any]:
    """This rank's part of each forcing, and where it lies; and that channels of them meet those of fields."""
    found = []
    for layout in layouts:
        split = dict(layout)
        axes = split.pop("axes", None)
        extra = {} if axes is None else {"extra": axes}
        mesh = scidata.init_mesh(dp=1, domain=-1, device="cpu", **extra)
        ds = era5_grid.open_era5(path, mesh, derived=NAMES, dtype=torch.float64, **split)
        sample = ds[1]
        parts = {name: sample[name].to_local().numpy() for name in NAMES}
        inputs, targets = era5_grid.stack_channels(sample)
        assert inputs.shape[1] == targets.shape[1] + len(NAMES)
        for channel, name in enumerate(NAMES, start=targets.shape[1]):
            np.testing.assert_array_equal(inputs[:, channel].to_local().numpy()[0], parts[name][0])
        found.append((parts, sample.dims["insolation"]))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_parts_are_the_whole_bit_for_bit(era5: str, num_ranks: int) -> None:
    whole = era5_grid.open_era5(era5, None, derived=NAMES, dtype=torch.float64)[1]
    layouts: list[dict[str, Any]] = [{}, {"shard": {"longitude": "domain"}}, {"halo": {"latitude": 2}}]
    if num_ranks == 4:
        layouts = [{"shard": {"latitude": "domain", "longitude": "lon"}, "axes": {"lon": 2}}]
    results = run_ranks(_parts, num_ranks, era5, layouts)
    for number, layout in enumerate(layouts):
        for name in NAMES:
            parts = [found[number][0][name] for found in results]
            if num_ranks == 4:
                together = np.block([[parts[0], parts[1]], [parts[2], parts[3]]])
            else:
                together = np.concatenate(parts, axis=-1 if "shard" in layout else -2)
            np.testing.assert_array_equal(together, whole[name].numpy(), err_msg=f"{layout} {name}")
        assert results[0][number][1] == ("time", "latitude", "longitude")


def test_values_are_those_of_each_samples_times(era5: str) -> None:
    ds = era5_grid.open_era5(era5, None, derived=["insolation", "cos_time_of_day"])
    assert era5_grid.normalisation(ds)[0].shape[1] == len(era5_grid.channel_names(ds)) == 7
    batch = next(iter(scidata.DataLoader(ds, batch_size=2, sampler=[1, 0])))
    inputs, targets = era5_grid.stack_channels(batch)
    assert (inputs.shape, targets.shape) == ((2, 9, 37, 26), (2, 7, 37, 26))
    group = xr.open_dataset(era5, consolidated=False)
    lat, lon = (torch.tensor(group[dim].values).double() for dim in ("latitude", "longitude"))
    for row, index in enumerate((1, 0)):
        expected = insolation(lat[:, None], lon, group.time.values[index]) / SOLAR_CONSTANT
        assert torch.equal(inputs[row, 7], expected.float())
    assert not torch.equal(inputs[0, 7], inputs[1, 7])


def test_of_a_models_calendar(tmp_path: Path) -> None:
    values = np.ones((2, 3, 4), "f4")
    coords = {
        "time": ("time", [59.0, 59.25], {"units": "days since 2001-01-01", "calendar": "noleap"}),
        "lat": ("lat", [45.0, 0.0, -45.0], {"units": "degrees_north"}),
        "lon": ("lon", [0.0, 90.0, 180.0, 270.0], {"units": "degrees_east"}),
    }
    xr.Dataset({"t": (("time", "lat", "lon"), values)}, coords).to_netcdf(tmp_path / "noleap.nc")
    ds = era5_grid.open_era5(str(tmp_path / "noleap.nc"), None, derived=["sin_time_of_year", "insolation"])
    found = ds[0]
    np.testing.assert_allclose(found["sin_time_of_year"][1], np.sin(2 * np.pi * 59.25 / 365), rtol=1e-6)
    assert found["insolation"][0, :, 0].eq(0).all()  # midnight in Greenwich
    assert found["insolation"][0, 1].argmax() == 2  # noon at the other side


def test_no_times_no_forcings(tmp_path: Path) -> None:
    values = xr.DataArray(np.ones((2, 3, 4), "f4"), dims=("step", "lat", "lon"), coords={"lat": [1.0, 0.0, -1.0]})
    values.to_dataset(name="t").to_netcdf(tmp_path / "steps.nc")
    with pytest.raises(ValueError, match="no coordinate of the sample is a time; there are lat"):
        era5_grid.open_era5(str(tmp_path / "steps.nc"), None, derived=["insolation"])[0]
