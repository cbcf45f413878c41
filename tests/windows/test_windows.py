"""Windows of tables: a share of the random trials, and everything of data sets on windows."""

import os
import pickle
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import xarray as xr
import zarr

import scidata
from scidata.core.options import ReadOptions
from scidata.data.facts import facts_of
from scidata.errors import ConfigError, CorruptDataError, FieldMismatchError, UnknownNameError, UnsupportedFormatError
from scidata.sources import tables
from scidata.store.format.store import verify
from scidata.store.raw_points import time_index
from scidata.store.raw_points.windows_reader import WindowsReader
from scidata.testing import run_ranks
from tests.windows.oracle import check_case
from tests.windows.tables import make_case, sort_case, write_hdf5, write_table

HOUR = 3600 * 10**9
BEGIN = pd.Timestamp("2020-02-28").as_unit("ns").value
OPTIONS = {"kind": "points", "time": "dates", "window": "6h", "positions": ("lat", "lon")}


@pytest.mark.filterwarnings("ignore:.*is late")
@pytest.mark.parametrize("seed", range(12))
def test_random_tables_are_as_pandas_has_them(seed, tmp_path):
    rng = np.random.default_rng(seed)
    case = make_case(rng, tmp_path)
    check_case(rng, case)
    if seed % 3 == 0 and case.paths:
        check_case(rng, sort_case(rng, case, tmp_path))


def table(path, times, layout="zarr2", units="datetime64[ns]", chunk=64, old=True):
    """Write a table of given times, of which ``bt`` numbers the rows."""
    num = len(times)
    columns = {
        "lat": np.linspace(-90, 90, num),
        "lon": np.linspace(0, 359, num),
        "bt": np.arange(num),
        "qc": np.arange(num) % 4,
    }
    write_table(path, layout, {k: v.astype("f4") for k, v in columns.items()}, np.asarray(times), units, chunk)
    if old:  # an index is kept of files that no clock can take for others
        for root, _, names in os.walk(path):
            for name in names:
                os.utime(os.path.join(root, name), (10**9, 10**9))
    return str(path)


@pytest.fixture
def gappy(tmp_path):
    """Two rows an hour for two days, but for the second night: 8 windows, of which one is empty."""
    times = BEGIN + np.arange(96) * HOUR // 2
    return table(tmp_path / "obs.zarr", times[(times < BEGIN + 30 * HOUR) | (times >= BEGIN + 36 * HOUR)])


def test_windows_are_samples(gappy):
    ds = scidata.open_dataset(gappy, **OPTIONS)
    assert len(ds) == 8
    assert ds.fields == ("pos", "bt", "qc", "dates")
    assert ds.counts().tolist() == [12, 12, 12, 12, 12, 0, 12, 12]
    sample = ds[6]
    assert sample["bt"].tolist() == list(range(60, 72))
    assert sample["dates"].tolist() == [1800.0 * i for i in range(12)]
    assert sample["dates"].dtype == torch.float64
    assert ds.sample_keys("dates")[6] == np.datetime64("2020-02-29T12")  # a leap day
    assert np.array_equal(ds.sample_keys("time"), ds.sample_keys("dates"))
    assert sample.source[0].rows == (60, 72)
    assert sample.source[0].time == np.datetime64("2020-02-29T12")
    assert sample.original_id("point").tolist() == list(range(60, 72))
    empty = ds[5]
    assert empty["pos"].shape == (0, 2)
    assert empty["dates"].shape == (0,)
    assert empty.source[0].rows == (0, 0)
    with pytest.raises(UnknownNameError, match="dates"):
        ds.sample_keys("date")


def test_windows_overlap_and_are_chosen_by_their_begin(gappy):
    ds = scidata.open_dataset(
        gappy, **OPTIONS | {"window": "12h"}, every="6h", sel={"dates": slice("2020-02-29", None)}
    )
    assert ds.sample_keys("dates")[0] == np.datetime64("2020-02-29")
    assert ds.counts().tolist() == [12, 12, 24, 12]
    days = scidata.open_dataset(gappy, **OPTIONS, sel={"dates": slice("2020-02", "2020-02-28")})
    assert len(days) == 4  # the text of a day holds all of it
    with pytest.raises(ConfigError, match="no window begins there"):
        scidata.open_dataset(gappy, **OPTIONS, sel={"dates": slice("2021", None)})
    with pytest.raises(ConfigError, match=r"end of sel of 'dates': '2020-13' is no time \(Month out of range"):
        scidata.open_dataset(gappy, **OPTIONS, sel={"dates": slice("2020-13", None)})


def test_a_window_costs_its_rows_and_not_the_column(gappy, monkeypatch):
    first = scidata.open_dataset(gappy, **OPTIONS)
    assert [name for name in os.listdir(Path(gappy).parent) if name.startswith(".scidata-times-")]
    read = []
    monkeypatch.setattr(time_index, "read_array", lambda *args, **kwargs: read.append(args))
    ds = scidata.open_dataset(gappy, **OPTIONS)  # by the index, which is kept
    assert not read
    assert (ds.counts() == first.counts()).all()
    plan, stats = ds.plan(0), ds.read_local(0).stats
    assert plan.exact
    assert plan.bytes_wanted == 12 * (4 * 4 + 8)
    assert plan.num_reads == 5
    assert (plan.bytes_fetched, plan.num_reads) == (stats.bytes_fetched, stats.num_reads)
    assert plan.bytes_fetched < 5 * 64 * 8  # of a chunk of each column
    assert ds.plan(5).bytes_fetched == 0


def test_an_index_is_made_again_where_it_does_not_fit(gappy, tmp_path, recwarn):
    scidata.open_dataset(gappy, **OPTIONS)
    (kept,) = tmp_path.glob(".scidata-times-*")
    kept.write_bytes(kept.read_bytes()[:-40])
    assert len(scidata.open_dataset(gappy, **OPTIONS)) == 8
    assert "made again" in str(recwarn.pop(UserWarning).message)
    table(gappy, BEGIN + np.arange(4) * HOUR)  # another table at the same place
    assert scidata.open_dataset(gappy, **OPTIONS).counts().tolist() == [4]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_hourly_index_of_weather_generator(tmp_path, side, monkeypatch):
    times = BEGIN + np.arange(0, 48 * 60, 20) * 60 * 10**9
    path = table(tmp_path / "obs.zarr", times, layout="table")
    hours = np.arange(BEGIN // HOUR + 72) * HOUR
    index = np.searchsorted(times, hours, side=side)
    made = zarr.open_group(path).create_array("idx_197001010000_1", shape=index.shape, dtype="i8", chunks=index.shape)
    made[:] = index
    blocks = []
    monkeypatch.setattr(time_index, "_block_rows", lambda table: blocks.append(table) or table.num_rows)
    ds = scidata.open_dataset(path, **OPTIONS)
    assert ds.counts().tolist() == [18] * 8
    assert ds[1]["dates"][0] == 0
    assert bool(blocks) == (side == "right")  # which counts the rows of a full hour before it: one is made


def test_faults_are_named_with_the_row(tmp_path):
    late = table(tmp_path / "late.zarr", BEGIN + np.array([0, 1, 2, 1, 3, 0]) * HOUR)
    with pytest.warns(UserWarning, match=r"row 3 is late: 'dates' is 2020-02-28T01.*, after .*T02:00:00 in row 2"):
        ds = scidata.open_dataset(late, **OPTIONS | {"window": "2h"})
    assert [ds[i]["bt"].tolist() for i in range(2)] == [[0, 1, 3, 5], [2, 4]]  # from where they lie
    assert ds[1].source[0].rows == (2, 5)
    path = table(tmp_path / "nat.zarr", BEGIN + np.arange(5) * HOUR)
    zarr.open_group(path)["dates"][3] = np.datetime64("NaT")
    with pytest.raises(CorruptDataError, match="row 3 has no time"):
        scidata.open_dataset(path, **OPTIONS)
    with pytest.raises(ConfigError, match=r"where of 'qc': .*windows are chosen by their time with sel="):
        scidata.open_dataset(late, **OPTIONS, where={"qc": slice("2020", None)})
    with pytest.raises(UnknownNameError, match=r"windows have no 'date'; did you mean 'dates'"):
        scidata.open_dataset(late, **OPTIONS, sel={"date": slice("2020", None)})
    with pytest.raises(UnknownNameError, match=r"no field 'btt'; did you mean 'bt'"):
        scidata.open_dataset(late, **OPTIONS, weights="btt")
    with pytest.raises(UnknownNameError, match=r"no field 'date'.*dates"):
        scidata.open_dataset(late, **OPTIONS | {"time": "date"})
    with pytest.raises(FieldMismatchError, match="tells no times"):
        scidata.open_dataset(late, **OPTIONS | {"time": "bt"})
    with pytest.raises(UnknownNameError, match="no field 'quality'"):
        scidata.open_dataset(late, **OPTIONS, where={"quality": 1})
    with pytest.raises(ConfigError, match=r"window=6: expected a span of time"):
        scidata.open_dataset(late, **OPTIONS | {"window": 6})
    with pytest.raises(ConfigError, match="say how long a window"):
        scidata.open_dataset(late, kind="points", time="dates")
    with pytest.raises(ConfigError, match="means nothing without time="):
        scidata.open_dataset(late, kind="points", where={"qc": 1})


@pytest.mark.parametrize("calendar", ["standard", "proleptic_gregorian"])
def test_times_may_count_from_a_date_before_those_of_numpy(calendar, tmp_path):
    times = BEGIN + np.array([0, 1, 5, 6, 30]) * HOUR
    path = table(tmp_path / "old.zarr", times, layout="zarr3", units="hours since 1900-01-01")
    dates = zarr.open_group(path)["dates"]
    julian = {"standard": 2, "proleptic_gregorian": 0}[calendar]  # days between the two calendars in the year 1
    dates[:] = dates[:] / 24 + pd.Timestamp("1900-01-01").toordinal() - 1 + julian
    dates.attrs.update(units="days since 0001-01-01", calendar=calendar)
    ds = scidata.open_dataset(path, **OPTIONS)
    assert ds.sample_keys("dates")[0] == np.datetime64("2020-02-28")
    assert [sample["bt"].tolist() for sample in ds] == [[0, 1, 2], [3], [], [], [], [4]]
    assert [round(seconds) for seconds in ds[0]["dates"].tolist()] == [0, 3600, 18000]
    dates.attrs["units"] = "days since 1300-01-01"
    with pytest.raises(CorruptDataError, match=r"row 0 has no time: .* outside of the years 1678 to 2261"):
        scidata.open_dataset(path, **OPTIONS)


@pytest.mark.parametrize("calendar", ["noleap", "360_day", "julian"])
def test_times_of_calendars_of_models(calendar, tmp_path):
    rng = np.random.default_rng(0)
    path = table(
        tmp_path / "model.zarr", BEGIN + np.arange(400), layout="zarr3", units="hours since 1900-01-01", old=False
    )
    dates = zarr.open_group(path)["dates"]
    dates[:] = np.sort(rng.integers(0, 24 * 70, 400))  # over the end of February
    dates.attrs.update(units="hours since 2004-02-28 06:00", calendar=calendar)
    times = xr.decode_cf(xr.Dataset({"t": ("t", dates[:], dict(dates.attrs))}))["t"].to_index()
    ds = scidata.open_dataset(path, **OPTIONS | {"window": "1D"})
    first = times[0].replace(hour=0)
    keys = xr.date_range(first, times[-1], freq="D", calendar=calendar, use_cftime=True)
    assert ds.sample_keys("dates").tolist() == keys.tolist()
    for sample, key in zip(ds, keys, strict=True):
        seconds = np.array([(time - key).total_seconds() for time in times])
        own = np.flatnonzero((seconds >= 0) & (seconds < 86400))
        assert sample["bt"].tolist() == own.tolist()
        assert sample["dates"].tolist() == seconds[own].tolist()
        assert sample.source[0].time == key
    ends = xr.CFTimeIndex(keys).slice_indexer("2004-03-02", "2004-03")
    chosen = scidata.open_dataset(path, **OPTIONS | {"window": "1D"}, sel={"dates": slice("2004-03-02", "2004-03")})
    assert chosen.sample_keys("dates").tolist() == keys[ends].tolist()
    joined = scidata.join({"a": ds, "b": chosen}, on="dates", at={"a": "-1D"})
    before = [(s["a"].source[0].time, s["b"].source[0].time) for s in joined]
    assert before == [(day - pd.Timedelta("1D"), day) for day in keys[ends]]
    with pytest.raises(ConfigError, match=r"sel of 'dates': .* are no times of its calendar"):
        scidata.open_dataset(path, **OPTIONS, sel={"dates": slice("soon", None)})
    with pytest.raises(ConfigError, match="no window begins there"):
        scidata.open_dataset(path, **OPTIONS, sel={"dates": slice("2010", "2011")})


def test_columns_that_lack_values(tmp_path):
    num = 40
    frame = pd.DataFrame({
        "lat": np.linspace(-90, 90, num), "lon": np.linspace(0, 359, num),
        "dates": pd.to_datetime(BEGIN + np.arange(num) * HOUR),
        "level": pd.array(np.arange(num), "Int32"), "used": pd.array(np.arange(num) % 2 == 0, "boolean"),
        "short": pd.array(np.arange(num), "Int16"), "whole": pd.array(np.arange(num), "Int64"),
    })  # fmt: skip
    frame.loc[[3, 17], "level"], frame.loc[[5], "used"], frame.loc[[9], "short"] = pd.NA, pd.NA, pd.NA
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=8)
    frame.to_feather(tmp_path / "a.arrow")
    for name in ("a.parquet", "a.arrow"):
        ds = scidata.open_dataset(tmp_path / name, **OPTIONS)
        dtypes = {"level": torch.float64, "used": torch.float32, "short": torch.float32, "whole": torch.int64}
        for column, dtype in dtypes.items():
            found = torch.cat([sample[column] for sample in ds])
            assert found.dtype == dtype
            expected = frame[column].to_numpy("f8", na_value=np.nan)
            assert np.array_equal(found.numpy().astype("f8"), expected, equal_nan=True)
        used = scidata.open_dataset(tmp_path / name, **OPTIONS, where={"used": True})
        assert int(used.counts().sum()) == num // 2
        some = scidata.open_dataset(tmp_path / name, **OPTIONS, where={"level": slice(None)})
        assert int(some.counts().sum()) == num - 2


def test_rows_of_other_times_are_found_out(tmp_path):
    times = BEGIN + np.arange(60) * HOUR
    path = table(tmp_path / "obs.zarr", times)
    index = np.searchsorted(times, np.arange(BEGIN // HOUR + 61) * HOUR)
    index[BEGIN // HOUR + 6] += 1  # which is none of those that are looked at
    zarr.open_group(path).create_array("idx_197001010000_1", shape=index.shape, dtype="i8", chunks=index.shape)[:] = (
        index
    )
    ds = scidata.open_dataset(path, **OPTIONS)
    assert ds[2]["bt"].tolist() == list(range(12, 18))
    with pytest.raises(CorruptDataError, match="index of times is of other rows"):
        ds[0]


def test_parts_by_weights_and_chunks(gappy):
    by_rows = scidata.open_dataset(gappy, **OPTIONS, weights=np.arange(84.0), fields=["bt"]).reader
    reader = WindowsReader(gappy, ReadOptions(**OPTIONS, weights="qc"), num_parts=2)
    assert reader.partition_of(0).bounds["point"].tolist() == [0, 7, 12]  # costs 0 1 2 3 over and over
    assert by_rows.partition_of(0).bounds["point"].tolist() == [0, 12]
    whole = WindowsReader(gappy, ReadOptions(**OPTIONS | {"window": "2d"}, bounds="chunk"), num_parts=2)
    assert whole.partition_of(0).bounds["point"].tolist() in ([0, 42, 84], [0, 64, 84])
    given = WindowsReader(gappy, ReadOptions(**OPTIONS, bounds={0: [0, 2, 12]}), num_parts=2)
    assert given.read(0, 0).fields["bt"].tolist() == [0, 1]


def test_everything_of_data_sets(gappy):
    ds = scidata.open_dataset(gappy, **OPTIONS, where={"qc": (0, 1, 2)})
    again = pickle.loads(pickle.dumps(ds))
    assert again[2]["bt"].tolist() == ds[2]["bt"].tolist()
    stats = scidata.statistics(ds, fields=["bt"])
    rows = np.arange(84)[np.arange(84) % 4 < 3]
    assert np.isclose(stats["bt"].mean, rows.mean())
    assert stats["bt"].count == len(rows)
    twice = scidata.open_dataset(gappy, **OPTIONS | {"window": "12h"}, every="6h", where={"qc": (0, 1, 2)})
    sums = scidata.statistics(twice, fields=["bt", "dates"])
    assert np.isclose(sums["bt"].mean, rows.mean())  # each row once
    assert np.isclose(sums["dates"].mean, float(torch.cat([sample["dates"] for sample in twice]).mean()))  # each window
    normal = ds.normalise(stats, fields=["bt"])
    loader = scidata.DataLoader(normal, batch_size=3, shuffle=True)
    seen = list(loader)
    total = torch.cat([batch["bt"] for batch in seen])
    assert len(total) == len(rows)
    assert abs(float(total.mean())) < 1e-5
    assert sorted(i for batch in seen for i in batch.index) == list(range(8))
    some = scidata.subset(ds, [5, 6])  # the first is empty
    (batch,) = scidata.DataLoader(some, batch_size=2)
    assert batch["bt"].tolist() == ds[6]["bt"].tolist()
    assert set(batch["batch"].tolist()) == {1}
    assert ds.fingerprint != twice.fingerprint
    assert facts_of(ds)["the windows"] != facts_of(scidata.open_dataset(gappy, **OPTIONS))["the windows"]
    assert repr(ds)
    assert ds._repr_html_()


def test_the_index_is_kept_in_cache_dir(gappy, tmp_path, monkeypatch):
    opened = OPTIONS | {"cache_dir": tmp_path / "cache", "where": {"qc": 1}}
    first = scidata.open_dataset(gappy, **opened).counts().tolist()
    assert [path.suffix for path in (tmp_path / "cache" / "scidata-index").iterdir()] == [".times"]
    assert not list(tmp_path.glob(".scidata-times-*"))
    monkeypatch.setattr(time_index, "index_table", None)  # which would read the columns
    assert scidata.open_dataset(gappy, **opened).counts().tolist() == first
    assert len(scidata.open_dataset(gappy, **opened | {"window": "12h"})) == 4  # of hours, whatever the windows


def test_windows_behind_a_url(tmp_path):
    times = BEGIN + np.arange(96) * HOUR // 2
    write_hdf5(
        tmp_path / "obs.h5", {"dates": times, "lat": np.zeros(96), "lon": np.zeros(96), "bt": np.arange(96.0)}, {}, 16
    )
    with h5py.File(tmp_path / "obs.h5", "r+") as file:
        file["dates"].attrs["units"] = "nanoseconds since 1970-01-01"
    fsspec.filesystem("memory").pipe("/windows/obs.h5", (tmp_path / "obs.h5").read_bytes())
    ds = scidata.open_dataset("memory://windows/obs.h5", **OPTIONS)
    assert ds[3]["bt"].tolist() == list(range(36, 48))
    assert ds.read_local(3).stats.num_reads <= 4 * 2  # chunks of four columns


def test_a_loader_resumes_among_windows(gappy):
    ds = scidata.open_dataset(gappy, **OPTIONS)

    def loader(batch_size):
        return scidata.DataLoader(
            ds, batch_size=batch_size, sampler=scidata.DistributedSampler(ds, shuffle=True, seed=3)
        )

    whole = [batch["bt"].tolist() for batch in loader(3)]
    begun = loader(3)
    assert next(iter(begun))["bt"].tolist() == whole[0]
    rest = loader(1)
    rest.load_state_dict(begun.state_dict())
    left = [row for batch in rest for row in batch["bt"].tolist()]
    assert left == [row for rows in whole[1:] for row in rows]


def _on_ranks(rank, num_ranks, path):
    mesh = scidata.init_mesh(domain=num_ranks)
    ds = scidata.open_dataset(path, mesh, **OPTIONS, where={"qc": (0, 1)})
    found = []
    for sample in scidata.DataLoader(ds, batch_size=None, sampler=scidata.DistributedSampler(ds, mesh, shuffle=True)):
        own = sample["bt"].to_local().tolist()
        found.append((sample.index, sample["bt"].full_tensor().tolist(), own))
    return found


def test_each_rank_reads_its_share(gappy):
    alone = scidata.open_dataset(gappy, **OPTIONS, where={"qc": (0, 1)})
    ranks = run_ranks(_on_ranks, 3, gappy)
    for found in zip(*ranks, strict=True):
        index = found[0][0]
        wanted = alone[index]["bt"].tolist()
        assert all(each[:2] == (index, wanted) for each in found)
        assert [row for each in found for row in each[2]] == wanted
        assert len({len(each[2]) for each in found}) == 1


def test_parquet_is_read_by_row_groups_and_columns(tmp_path, monkeypatch):
    read = []
    real = pq.ParquetFile.read_row_group
    note = lambda self, group, columns, **kw: read.append((group, *columns)) or real(self, group, columns=columns, **kw)  # noqa: E731
    frame = pd.DataFrame({"dates": (BEGIN + np.arange(96) * HOUR // 2).astype("M8[ns]"), "lat": 1.5, "lon": 2.5})
    frame["bt"] = np.where(np.arange(96) % 5, np.arange(96), np.nan)
    frame["name"] = "x"
    frame["count"] = pd.array(np.where(np.arange(96) == 90, None, np.arange(96)), "Int32")
    frame.to_parquet(tmp_path / "obs.parquet", row_group_size=24)
    opened = {"time": "dates", "window": "6h", "positions": ("lat", "lon")}
    ds = scidata.open_dataset(tmp_path / "obs.parquet", **opened, where={"bt": slice(None)}, fields=["bt", "dates"])
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", note)
    tables._columns.clear()
    assert ds[3]["bt"].tolist() == [i for i in range(36, 48) if i % 5]
    assert ds[2]["bt"].tolist() == [i for i in range(24, 36) if i % 5]  # of the same row group, which is kept
    assert read == [(1, "bt"), (1, "dates")]
    counts = scidata.open_dataset(tmp_path / "obs.parquet", **opened, fields=["count"])
    assert counts[0]["count"].tolist() == list(range(12))
    assert counts[7]["count"].isnan().tolist() == [i == 90 for i in range(84, 96)]
    pq.write_table(pq.read_table(tmp_path / "obs.parquet"), tmp_path / "mute.parquet", write_statistics=False)
    with pytest.raises(
        UnsupportedFormatError, match="'count' of int32 lacks values in row group 0, and the file has no"
    ):
        scidata.open_dataset(tmp_path / "mute.parquet", **opened, fields=["count"])[7]
    frame["dates"] = frame["dates"].dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")
    frame.to_parquet(tmp_path / "zone.parquet")
    zone = scidata.open_dataset(tmp_path / "zone.parquet", **opened, where={"bt": slice(None)}, fields=["bt", "dates"])
    assert zone.sample_keys("dates").tolist() == ds.sample_keys("dates").tolist()
    assert zone[3]["bt"].tolist() == ds[3]["bt"].tolist()
    assert torch.equal(zone[3]["dates"], ds[3]["dates"])
    (tmp_path / "short.parquet").write_bytes((tmp_path / "obs.parquet").read_bytes()[:-100])
    with pytest.raises(CorruptDataError, match="is no whole parquet file"):
        scidata.open_dataset(tmp_path / "short.parquet", **opened)


# -- CF's discrete sampling geometries ---------------------------------------------------------------------------------


def profiles():
    """Profiles of 0 to 4 levels, two an hour, as pandas has them: a row of each level."""
    rng = np.random.default_rng(4)
    sizes = rng.integers(0, 5, 40)
    which = np.repeat(np.arange(40), sizes)
    lat, lon = rng.uniform(-90, 90, 40), rng.uniform(0, 360, 40)
    times = BEGIN // 10**9 + np.arange(40) * 1800
    frame = pd.DataFrame({"profile": which, "time": times[which], "lat": lat[which], "lon": lon[which]})
    return sizes, (times, lat, lon), frame.assign(t=rng.normal(size=len(which)), z=rng.uniform(0, 1000, len(which)))


def ragged(path, kind):
    """Write profiles as CF has them, contiguous or indexed."""
    sizes, (times, lat, lon), frame = profiles()
    found = {
        "time": ("profile", times, {"units": "seconds since 1970-01-01"}),
        "lat": ("profile", lat, {"units": "degrees_north"}),
        "lon": ("profile", lon, {"units": "degrees_east"}),
        **{name: ("obs", frame[name].to_numpy()) for name in ("t", "z")},
    }
    if kind == "contiguous":
        found["row_size"] = "profile", sizes, {"sample_dimension": "obs"}
    else:
        found["which"] = "obs", frame.profile.to_numpy(), {"instance_dimension": "profile"}
    xr.Dataset(found, attrs={"featureType": "profile"}).to_netcdf(path)
    return frame


@pytest.mark.parametrize("kind", ["contiguous", "indexed"])
def test_profiles_as_rows_of_windows_and_as_samples(kind, tmp_path):
    frame = ragged(tmp_path / "profiles.nc", kind)
    opened = {"kind": "points", "positions": ("lat", "lon"), "fields": ["pos", "t", "time"]}
    ds = scidata.open_dataset(tmp_path / "profiles.nc", **opened, time="time", window="6h")
    for index, begin in enumerate(range(BEGIN // 10**9, BEGIN // 10**9 + 20 * 3600, 6 * 3600)):
        wanted = frame[(frame.time >= begin) & (frame.time < begin + 6 * 3600)]
        assert ds[index]["t"].tolist() == wanted.t.tolist()
        assert np.array_equal(ds[index]["pos"], wanted[["lon", "lat"]])
    each = scidata.open_dataset(
        tmp_path / "profiles.nc",
        **opened | {"fields": ["t", "z"]},
        time="profile",
        window=1,
        sel={"profile": slice(0, 39)},
    )
    assert each.sample_keys("profile").tolist() == list(range(frame.profile.min(), frame.profile.max() + 1))
    for index, number in enumerate(each.sample_keys("profile").tolist()):
        assert each[index]["z"].tolist() == frame.z[frame.profile == number].tolist()


@pytest.mark.parametrize("dims", [("station", "time"), ("time", "station")])
def test_series_of_stations(dims, tmp_path):
    rng = np.random.default_rng(5)
    values = rng.normal(size=(50, 7))
    found = {
        "t2m": (dims, values if dims[0] == "time" else values.T),
        "lat": ("station", np.linspace(-60, 60, 7), {"units": "degrees_north"}),
        "lon": ("station", np.linspace(0, 300, 7), {"units": "degrees_east"}),
        "time": ("time", BEGIN // 10**9 + np.arange(50) * 3600, {"units": "seconds since 1970-01-01"}),
    }
    xr.Dataset(found, attrs={"featureType": "timeSeries"}).to_netcdf(tmp_path / "stations.nc")
    ds = scidata.open_dataset(tmp_path / "stations.nc", kind="points", time="time", window="6h")
    assert len(ds) == 9
    assert ds.counts().tolist() == [42] * 8 + [14]
    assert np.array_equal(ds[2]["t2m"], values[12:18].reshape(-1))
    assert ds[2]["pos"][7:14, 1].tolist() == np.linspace(-60, 60, 7).tolist()
    assert ds[2]["time"][::7].tolist() == [3600.0 * i for i in range(6)]
    each = scidata.open_dataset(tmp_path / "stations.nc", kind="points", time="station", window=1, fields=["t2m"])
    assert np.array_equal(each[3]["t2m"], values[:, 3])


def test_rows_of_windows_are_drawn_anew_in_each_epoch(gappy):
    opened = ReadOptions(**OPTIONS, where={"qc": (0, 2, 3)}, subsample={"point": 5})
    reader, drawn = WindowsReader(gappy, opened, num_parts=2), []
    for epoch in range(2):
        parts = [reader.read(3, part, epoch=epoch) for part in range(2)]
        rows = np.concatenate([part.fields["bt"] for part in parts])
        ids = [reader.original_id(3, part, "point", rows=each.rows["point"]) for part, each in enumerate(parts)]
        assert np.concatenate(ids).tolist() == rows.tolist()
        assert set(rows % 4) <= {0, 2, 3}
        assert len(rows) == 5
        assert len(set(rows)) == 5
        assert rows.min() >= 36
        assert rows.max() < 48
        assert reader.plan(3, 1, epoch=epoch).bytes_fetched == parts[1].stats.bytes_fetched
        drawn.append(rows.tolist())
    assert drawn[0] != drawn[1]
    assert reader.read(5, 0).fields["bt"].shape == (0,)


def test_tables_and_profiles_are_partitioned_too(tmp_path):
    path = table(tmp_path / "obs.zarr", BEGIN + np.arange(96) * HOUR // 2, layout="table")
    scidata.partition(path, tmp_path / "obs.store", kind="points", points="lat,lon")
    sample = scidata.open_dataset(tmp_path / "obs.store")[0]
    assert sample["bt"].tolist() == sample.original_id("point").tolist()
    frame = ragged(tmp_path / "profiles.nc", "contiguous")
    scidata.partition(tmp_path / "profiles.nc", tmp_path / "profiles.store", kind="points")
    sample = scidata.open_dataset(tmp_path / "profiles.store")[0]
    assert np.array_equal(sample["t"], frame.t.to_numpy()[sample.original_id("point")])


def test_a_table_sorted_by_time_needs_times_and_points(tmp_path):
    path = table(tmp_path / "obs.zarr", BEGIN + np.arange(96)[::-1] * HOUR)
    for order, error in {
        "time:": r"order='time:': name the column of times",
        "time:date": "no field 'date'; did you mean 'dates'",
        "tiem:dates": "order must be one of .*'time'",
        "time:bt": "time 'bt' of dtype float32",
    }.items():
        with pytest.raises((ConfigError, UnknownNameError, FieldMismatchError), match=error):
            scidata.partition(path, tmp_path / "obs.store", order=order)
    with pytest.raises(ConfigError, match="order 'time:dates' is for points, not for a graph"):
        scidata.partition(path, tmp_path / "obs.store", order="time:dates", kind="graph", edges="knn:2")
    assert not (tmp_path / "obs.store" / "manifest.json").exists()
    scidata.partition(path, tmp_path / "obs.store", order="time:dates")
    ds = scidata.open_dataset(tmp_path / "obs.store", time="dates", window="6h")
    assert ds[0]["bt"].tolist() == [95, 94, 93, 92, 91, 90]
    assert ds.fields == ("pos", "bt", "qc", "dates")
    scidata.open_dataset(tmp_path / "obs.store", time="dates", window="6h", cache_dir=tmp_path / "cache")
    assert verify(str(tmp_path / "obs.store")) is None  # indexes are kept elsewhere
    _ = scidata.partition(path, tmp_path / "graph.store", edges="knn:2")
    with pytest.raises(ConfigError, match="samples are of kind graph"):
        scidata.open_dataset(tmp_path / "graph.store", time="dates", window="6h")


@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 spec")
@pytest.mark.parametrize("layout", ["parquet", "categories", "zarr", "netcdf"])
def test_rows_are_chosen_by_text(layout, tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"dates": BEGIN + np.arange(96) * HOUR, "lat": rng.random(96), "lon": rng.random(96)})
    frame["dates"] = frame.dates.astype("M8[ns]")
    name = np.array(["LGAT", "LFPG", "é"])[rng.integers(0, 3, 96)]
    if layout in ("zarr", "netcdf"):
        made = xr.Dataset(
            {key: ("row", column.to_numpy()) for key, column in frame.items()} | {"station": ("row", name)}
        )
        made.to_zarr(tmp_path / "t", consolidated=False) if layout == "zarr" else made.to_netcdf(tmp_path / "t")
    else:
        frame.assign(station=pd.Categorical(name) if layout == "categories" else name).to_parquet(tmp_path / "t")
    for wanted in ("LGAT", ["LFPG", "é"]):
        ds = scidata.open_dataset(tmp_path / "t", **OPTIONS, where={"station": wanted})
        rows = np.concatenate([ds[i].original_id("point") for i in range(len(ds))])
        assert rows.tolist() == np.flatnonzero(np.isin(name, wanted)).tolist()
    with pytest.raises(UnsupportedFormatError, match="'station'"):
        scidata.open_dataset(tmp_path / "t", **OPTIONS, where={"station": slice("A", "B")})
