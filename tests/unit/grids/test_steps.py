"""Steps of a sample by field, and windows of steps over gaps in time."""

import os
import pickle

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.core.options import ReadOptions
from scidata.errors import ConfigError, UnknownNameError
from scidata.grids.reader import GridReader

NUM = 12
U, F, MASK = (np.random.default_rng(0).random(shape, np.float32) for shape in ((NUM, 7, 4), (NUM, 7, 4), (7, 4)))


def write(path, times, rows=slice(None)):
    fields = {"u": (("time", "y", "x"), U[rows]), "f": (("time", "y", "x"), F[rows]), "mask": (("y", "x"), MASK)}
    encoding = {name: {"zlib": True, "chunksizes": (3, 7, 4)} for name in "uf"}
    xr.Dataset(fields, {"time": times}).to_netcdf(path, engine="netcdf4", encoding=encoding)
    return str(path)


@pytest.mark.parametrize("more", [{}, {"pool_bytes": 1 << 20}, {"cache": True}], ids=["alone", "pool", "cache"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_steps_by_field(tmp_path, num_ranks, more):
    path = write(tmp_path / "a.nc", np.datetime64("2015-01-01", "ns") + np.arange(NUM) * np.timedelta64(6, "h"))
    steps = {"u": (-1, 0, 2), "*": (1,)}
    more = {"cache_dir": tmp_path / "kept"} if "cache" in more else more
    options = ReadOptions(shard={"y": "domain"}, steps=steps, **more)
    reader = GridReader(path, options, axis_sizes={"domain": num_ranks})
    reader = pickle.loads(pickle.dumps(reader))
    assert reader.num_samples == NUM - 3
    for _ in range(2):
        for i in range(reader.num_samples):
            parts = []
            for rank in range(num_ranks):
                here = reader.partition.coordinate(rank)
                parts.append({n: np.empty(s.shape, s.dtype) for n, s in reader.buffer_specs(here).items()})
                reader.read_into(i, parts[-1], here)
            whole = {n: np.concatenate([p[n] for p in parts], reader.dims(n).index("y")) for n in parts[0]}
            assert np.array_equal(whole["u"], U[[i, i + 1, i + 3]])
            assert np.array_equal(whole["f"], F[i + 2])
            assert np.array_equal(whole["mask"], MASK)


def test_steps_that_mean_nothing_are_refused(tmp_path):
    path = write(tmp_path / "a.nc", np.arange(NUM))
    with pytest.raises(UnknownNameError, match=r"'uu' is read.*'u'"):
        scidata.open_dataset(path, steps={"uu": (0,)})
    with pytest.raises(ConfigError, match="'mask' has no dimension 'time'"):
        scidata.open_dataset(path, steps={"mask": (0, 1)})
    with pytest.raises(ConfigError, match="gaps must be one of"):
        scidata.open_dataset(path, gaps="jump")


def test_no_window_crosses_a_gap(tmp_path):
    every = np.datetime64("2015-01-01", "ns") + np.arange(NUM + 1) * np.timedelta64(6, "h")
    times = np.delete(every, 5)
    one = write(tmp_path / "one.nc", times)
    several = [write(tmp_path / f"{k}.nc", times[rows], rows) for k, rows in enumerate((slice(5), slice(5, NUM)))]
    for path in (one, several):
        with pytest.warns(
            UserWarning, match="a gap in steps of 6 hours, from 2015-01-02T00.* to .*2015-01-02T12.*2 of 10"
        ):
            ds = scidata.open_dataset(path, fields=["u"], steps=(-1, 0, 1), sample_dim="time", coords=True)
        assert len(ds) == 8
        for sample in (ds[i] for i in range(len(ds))):
            assert (np.diff(sample.coords["time"]) == np.timedelta64(6, "h")).all()
        with pytest.raises(ConfigError, match="gap"):
            scidata.open_dataset(path, steps=(0, 1), gaps="error", sample_dim="time")
        assert len(scidata.open_dataset(path, steps=(-1, 0, 1), gaps="allow", sample_dim="time")) == 10


@pytest.mark.filterwarnings("error::UserWarning:scidata")
def test_months_are_no_gaps(tmp_path):
    path = write(tmp_path / "a.nc", np.arange("2015-01", "2016-01", dtype="M8[M]").astype("M8[ns]"))
    assert len(scidata.open_dataset(path, steps=(0, 1), sample_dim="time", gaps="error")) == NUM - 1


HOURS = np.arange(NUM) * 6


def write_calendar(path, values, calendar, units="hours since 2015-02-27"):
    """Write times as they are stored, with their calendar."""
    fields = {"u": (("time", "y", "x"), U[: len(values)])}
    times = ("time", np.asarray(values), {"units": units, "calendar": calendar})
    xr.Dataset(fields, {"time": times}).to_netcdf(path, engine="netcdf4")
    return str(path)


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "standard", "julian"])
@pytest.mark.filterwarnings("error::UserWarning:scidata")
def test_no_calendar_has_gaps_of_its_own(tmp_path, calendar):
    """From 27 February over 1 March: 29 and 30 February are days in one of them."""
    path = write_calendar(tmp_path / "a.nc", HOURS, calendar)
    assert len(scidata.open_dataset(path, steps=(0, 1), gaps="error")) == NUM - 1
    files = [
        write_calendar(tmp_path / "b.nc", HOURS[:6], calendar),
        write_calendar(tmp_path / "c.nc", HOURS[6:] - 24, calendar, "hours since 2015-02-28"),
    ]
    assert len(scidata.open_dataset(files, steps=(0, 1), gaps="error")) == NUM - 1


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "standard"])
def test_a_gap_in_any_calendar(tmp_path, calendar):
    path = write_calendar(tmp_path / "a.nc", np.delete(HOURS, 4), calendar)
    with pytest.warns(UserWarning, match=r"a gap in steps of 6 hours, from 2015-02-27.18:00:00 to 2015-02-28.06:00:00"):
        ds = scidata.open_dataset(path, steps=(0, 1))
    assert len(ds) == NUM - 3
    assert not any(torch.equal(ds[i]["u"], torch.from_numpy(U[3:5])) for i in range(len(ds)))
    report = " ".join(CliRunner().invoke(app, ["inspect", path]).output.split())
    assert "'time' has a gap in steps of 6 hours" in report
    plan = " ".join(CliRunner().invoke(app, ["plan", path, "--domain", "1", "--steps", "0,1"]).output.split())
    assert "1 of 10 samples, whose steps 0,1 reach over it, is left out" in plan


def test_years_of_either_length_are_no_gaps(tmp_path):
    """In 365 days and 366, in days since a date; in noleap all have 365."""
    days = np.cumsum([0, 365, 366, 365, 365, 365, 366])
    path = write_calendar(tmp_path / "a.nc", days, "standard", "days since 2015-01-01")
    assert len(scidata.open_dataset(path, steps=(0, 1), gaps="error")) == 6


def test_times_that_come_again_or_run_backwards(tmp_path):
    twice = write_calendar(tmp_path / "a.nc", np.insert(HOURS, 5, HOURS[4])[:NUM], "standard")
    with pytest.warns(UserWarning, match="2015-02-28T00:00:00 twice: 1 of 11 samples"):
        ds = scidata.open_dataset(twice, steps=(0, 1))
    starts = [k for i in range(len(ds)) for k in range(NUM) if torch.equal(ds[i]["u"][0], torch.from_numpy(U[k]))]
    assert starts == [0, 1, 2, 3, *range(5, NUM - 1)]
    down = write_calendar(tmp_path / "b.nc", HOURS[::-1], "standard")
    assert len(scidata.open_dataset(down, steps=(0, 1), gaps="error")) == NUM - 1  # each a step before the other
    back = write_calendar(tmp_path / "c.nc", np.concatenate([HOURS[:6], HOURS[2:8]]), "standard")
    with pytest.warns(UserWarning, match="1 of 11 samples"):
        assert len(scidata.open_dataset(back, steps=(0, 1))) == 10
    jumps = write_calendar(tmp_path / "d.nc", np.cumsum(np.arange(NUM)), "standard")
    with pytest.warns(UserWarning, match="no usual step, but steps from"):
        assert len(scidata.open_dataset(jumps, steps=(0, 1))) == NUM - 1


def test_dates_that_anemoi_names_as_missing(tmp_path):
    """They are stored, and hold nothing."""
    dates = np.datetime64("2020-01-01T00", "s") + np.arange(NUM) * np.timedelta64(6, "h")
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2)
    values = np.random.default_rng(0).random((NUM, 2, 1, 5), np.float32)
    group.create_array("data", data=values, chunks=(1, 2, 1, 5)).attrs["_ARRAY_DIMENSIONS"] = [
        "time", "variable", "ensemble", "cell",
    ]  # fmt: skip
    for name, own, along in (
        ("dates", dates, "time"),
        *((f"{axis}itudes", np.arange(5.0), "cell") for axis in ("lat", "long")),
    ):
        group.create_array(name, data=own).attrs["_ARRAY_DIMENSIONS"] = [along]
    group.attrs.update({"variables": ["2t", "msl"], "missing_dates": [f"{dates[3]}", f"{dates[4]}Z"]})
    path = str(tmp_path / "a.zarr")
    with pytest.warns(UserWarning, match="2 missing dates, the first 2020-01-01T18:00:00"):
        ds = scidata.open_dataset(path, steps={"data": (-1, 0, 1)})
    want = [t for t in range(1, NUM - 1) if not {t - 1, t, t + 1} & {3, 4}]
    assert [values[t - 1 : t + 2].tolist() for t in want] == [ds[i]["data"].tolist() for i in range(len(ds))]
    with pytest.warns(UserWarning, match="missing dates"):
        assert len(scidata.open_dataset(path)) == NUM - 2
    with pytest.raises(ConfigError, match="2 missing dates"):
        scidata.open_dataset(path, gaps="error")
    assert len(scidata.open_dataset(path, gaps="allow")) == NUM
    assert "2 missing dates" in " ".join(CliRunner().invoke(app, ["inspect", path]).output.split())


def test_staged_steps_by_field_are_read_from_there(tmp_path):
    times = np.datetime64("2015-01-01", "ns") + np.arange(NUM) * np.timedelta64(6, "h")
    path, cache = write(tmp_path / "a.nc", times), str(tmp_path / "cache")
    steps = ["--steps", "u=-1,0,2", "--steps", "*=1"]
    os.utime(path, (1e9, 1e9))
    found = CliRunner().invoke(app, ["stage", path, cache, "--domain", "2", "--shard", "y", "--fields", "u,f", *steps])
    assert found.exit_code == 0, found.output
    options = ReadOptions(fields=["u", "f"], shard={"y": "domain"}, steps={"u": (-1, 0, 2), "*": (1,)}, cache_dir=cache)
    reader = GridReader(path, options, axis_sizes={"domain": 2})
    for i in range(reader.num_samples):
        here = reader.partition.coordinate(i % 2)
        out = {n: np.empty(s.shape, s.dtype) for n, s in reader.buffer_specs(here).items()}
        assert reader.read_into(i, out, here).bytes_decoded == 0
        rows = slice(*reader.partition.owned_rows("y", here))
        assert np.array_equal(out["u"], U[[i, i + 1, i + 3], rows])
        assert np.array_equal(out["f"], F[i + 2, rows])


def test_coordinates_of_fields_with_other_steps(tmp_path):
    """Also where one field alone has several, or times are in a calendar of a model."""
    path = write(
        tmp_path / "a.nc", xr.date_range("2015-02-27", periods=NUM, freq="6h", calendar="noleap", use_cftime=True)
    )
    times = xr.open_dataset(path)["time"].values
    ds = scidata.open_dataset(path, sample_dim="time", steps={"u": (-1, 0), "f": (3,)}, coords=True)
    sample = ds[4]  # whose own row is the fifth
    assert sample.coords["u_time"].tolist() == times[[4, 5]].tolist()
    assert sample.coords["f_time"] == times[8]
    assert sample.coords["time"].tolist() == times[[4, 5, 8]].tolist()
    made = sample.to_xarray()
    assert made["u"].dims == ("u_time", "y", "x")
    assert made["u_time"].values.tolist() == times[[4, 5]].tolist()
    assert made["f_time"].item() == times[8]
    assert set(made.dims) == {"u_time", "y", "x"}
    alike = scidata.open_dataset(path, sample_dim="time", steps={"u": (0, 1), "f": (0, 1)}, coords=True)[0]
    assert alike.to_xarray()["u"].dims == ("time", "y", "x")
    assert "u_time" not in alike.coords
