"""``scidata.create`` in one process: what it takes, where it writes, and what it says to what it cannot do."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray as xr
import zarr

import scidata
from scidata.data.output.packed_file import PackedFileOutput
from scidata.data.output.places import LocalPlace
from scidata.data.output.ranks import Ranks
from scidata.data.output.routes import route_of
from scidata.errors import ConfigError, OutputError, SciDataError, UnknownNameError
from scidata.plan.owners import exchange_of
from scidata.testing import fake_group, make_grid
from tests.unit._s3 import BUCKET, SECRET, serve


@pytest.fixture
def ds(tmp_path: Path) -> Any:
    make_grid(tmp_path / "source.nc", format="netcdf4", num_times=4, num_lat=7, num_lon=8)
    return scidata.open_dataset(tmp_path / "source.nc")


def write(path: Path, ds: Any, **options: Any) -> None:
    with scidata.create(path, like=ds, **options) as writer:
        for step in writer.missing:
            writer[step] = ds[step % len(ds)]


def test_what_others_have_no_part_in_is_written_as_it_is_held() -> None:
    routes = [route_of(exchange_of((3, 20), (1, 4), (2,), [(1, np.array([0, 10, 20]))], p), (1, 4)) for p in range(2)]
    levels = slice(0, 3)
    assert routes[0].inner == ((levels, slice(0, 8)), (levels, slice(0, 8)))
    assert [box for box, _ in routes[0].edges] == [(levels, slice(8, 12))]
    assert routes[0].own == (((levels, slice(8, 10)), (levels, slice(8, 10))),)
    assert routes[0].receives == ((1, (levels, slice(10, 12)), (3, 2)),)
    assert routes[1].inner == ((levels, slice(12, 20)), (levels, slice(2, 10)))
    assert routes[1].edges == routes[1].own == routes[1].receives == ()
    assert routes[1].sends == ((0, (levels, slice(0, 2))),)


# -- steps -----------------------------------------------------------------------------------------------------------


def test_dates_are_written_in_the_units_of_the_source(ds: Any, tmp_path: Path) -> None:
    dates = np.datetime64("2020-02-28T00", "ns") + np.arange(3) * np.timedelta64(12, "h")
    write(tmp_path / "out.zarr", ds, times=dates)
    written = xr.open_dataset(tmp_path / "out.zarr")
    assert (written["time"].values == dates).all()
    source = xr.open_dataset(tmp_path / "source.nc", decode_times=False)
    raw = xr.open_dataset(tmp_path / "out.zarr", decode_times=False)
    assert source["time"].attrs["units"].startswith(raw["time"].attrs["units"])  # xarray leaves out 00:00:00


def test_dates_of_other_calendars(ds: Any, tmp_path: Path) -> None:
    cftime = pytest.importorskip("cftime")
    dates = [cftime.DatetimeNoLeap(2020, 2, 28), cftime.DatetimeNoLeap(2020, 3, 1)]
    fields: Any = {"u": None}
    with scidata.create(tmp_path / "out.nc", like=ds, fields=fields, times={"day": dates}) as writer:
        for step in range(2):
            writer[step] = {"u": ds[step]["u"]}
    written = xr.open_dataset(tmp_path / "out.nc")
    assert written["u"].dims[0] == "day"
    assert written["day"].values.tolist() == dates


@pytest.mark.filterwarnings("ignore")  # of xarray and zarr
@pytest.mark.parametrize(("source", "packed"), [("source.nc", True), ("source3.zarr", True), ("source2.zarr", False)])
def test_coordinates_mean_what_they_mean_in_the_source(source: str, packed: bool, tmp_path: Path) -> None:
    rng, days = np.random.default_rng(0), np.datetime64("2000-01-01", "ns") + np.arange(4) * np.timedelta64(6, "h")
    field, where = rng.random((4, 5, 6), np.float32), rng.random((5, 6))
    field[1, 2, 3] = where[0, 0] = where[3, 2] = np.nan
    coords = {"time": days, "lat": np.linspace(90, -90, 5), "lon": np.arange(6.0)}
    dims = ("lat", "lon")
    of_cells = {"deg": (dims, where), "deg_f": (dims, where.astype("f4")), "deg_i": (dims, where)}
    made = xr.Dataset({"u": (("time", *dims), field)}, coords | of_cells)
    encoding = {
        "time": {"dtype": "i2", "scale_factor": 0.25, "units": "days since 2000-01-01"},
        "lat": {"dtype": "i2", "scale_factor": 0.5, "add_offset": 1.0},
        "deg": {"_FillValue": -999.0},
        "deg_f": {"_FillValue": np.float32(1e20), "missing_value": np.float32(1e20)},
        "deg_i": {"dtype": "i2", "scale_factor": 0.001, "_FillValue": -32768},
        "u": {"dtype": "i2", "scale_factor": 0.001, "_FillValue": -1} if packed else {},
    }  # deg_i is NaN where the file has -32768; lon has a _FillValue of NaN, as xarray writes it
    path = tmp_path / source
    if source.endswith("nc"):
        made.to_netcdf(path, encoding=encoding)
    else:
        made.to_zarr(path, encoding=encoding, zarr_format=int(source[6]))
    given = xr.open_dataset(path, **({} if source.endswith("nc") else {"engine": "zarr"})).load()
    ds = scidata.open_dataset(path, fields=["u"], decode=not packed)
    for name, options in {
        "o.nc": {},
        "z.nc": {"codec": "zlib"},
        "o.h5": {},
        "o.zarr": {},
        "2.zarr": {"format": "zarr2", "codec": "none"},
    }.items():
        write(tmp_path / name, ds, **options)
        written = xr.open_dataset(tmp_path / name, engine="zarr" if name.endswith("zarr") else "netcdf4").load()
        for each in ("u", *coords, *of_cells):
            assert written[each].variable.equals(given[each].variable), (name, each)


@pytest.mark.filterwarnings("ignore")  # of zarr
@pytest.mark.parametrize("source", ["source.nc", "source.zarr"])
def test_names_of_rows_and_native_times(source: str, tmp_path: Path) -> None:
    days = np.datetime64("2000-01-01", "ns") + np.arange(3) * np.timedelta64(6, "h")
    dims, names = ("time", "station", "x"), ["aa", "bé", "c", "dddd"]
    made = xr.Dataset({"u": (dims, np.random.default_rng(0).random((3, 4, 2)))}, {"time": days, "station": names})
    made = made.assign_coords(coast=("station", [True, False, True, True]))
    if source.endswith("nc"):
        made.to_netcdf(tmp_path / source)
    else:
        made.drop_vars("time").to_zarr(tmp_path / source, zarr_format=3, consolidated=False)
        zarr.open_group(tmp_path / source).create_array("time", data=days, dimension_names=("time",))
    ds = scidata.open_dataset(
        tmp_path / source, kind="grid", sample_dim="time", sel={"station": ["c", "aa"]}, fields=["u"]
    )
    for name, options in {"o.nc": {}, "o.h5": {}, "o.zarr": {}, "2.zarr": {"format": "zarr2"}}.items():
        write(tmp_path / name, ds, **options)
        written = xr.open_dataset(tmp_path / name, engine="zarr" if name.endswith("zarr") else "netcdf4").load()
        for each in ("u", "time", "station", "coast"):
            assert np.array_equal(written[each], made[each].sel(station=["c", "aa"]) if each != "time" else days), each
        again = scidata.open_dataset(
            tmp_path / name, kind="grid", sample_dim="time", sel={"station": ["aa"]}, coords=True, fields=["u"]
        )
        assert "x" not in again[0].coords  # HDF5 has an array of that name, which says that there are no values
        assert np.array_equal(again[0]["u"], made["u"].sel(station=["aa"])[0])


def test_dtypes_that_a_file_has_not_are_named(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "s.zarr")
    for dtype in ("bool", "float16", "complex64"):
        group.create_array(dtype, data=np.ones((2, 3, 4), dtype), dimension_names=("time", "lat", "lon"))
    for dtype, format in (("bool", "nc"), ("float16", "nc"), ("complex64", "zarr")):
        ds = scidata.open_dataset(tmp_path / "s.zarr", fields=[dtype])
        with pytest.raises(ConfigError, match=f"create: .*{dtype}"):
            scidata.create(tmp_path / f"o.{format}", like=ds)
        assert not list(tmp_path.glob("o.*"))


def test_starts_and_lead_times(ds: Any, tmp_path: Path) -> None:
    leads = np.arange(3) * np.timedelta64(6, "h").astype("m8[ns]")
    with scidata.create(tmp_path / "out.zarr", like=ds, fields=["u"], times={"time": 2, "lead": leads}) as writer:
        assert len(writer) == 6
        for start in range(2):
            for lead in range(3):
                writer[start * 3 + lead] = {"u": ds[start]["u"] + lead}
    written = xr.open_dataset(tmp_path / "out.zarr", decode_timedelta=True)
    assert written["u"].dims == ("time", "lead", "level", "latitude", "longitude")
    assert (written["lead"].values == leads).all()
    for start in range(2):
        for lead in range(3):
            assert (written["u"][start, lead].values == (ds[start]["u"] + lead).numpy()).all()


def test_batches_and_slices(ds: Any, tmp_path: Path) -> None:
    with scidata.create(tmp_path / "out.zarr", like=ds, chunks={"time": 2}) as writer:
        writer[[1, 0]] = scidata.collate([ds[1], ds[0]])
        writer[2:] = scidata.collate([ds[2], ds[3]])
    written = scidata.open_dataset(tmp_path / "out.zarr")
    for i in range(4):
        for name, field in ds[i].items():
            assert torch.equal(written[i][name], field)
    assert zarr.open_group(tmp_path / "out.zarr")["u"].chunks[0] == 2


# -- fields ----------------------------------------------------------------------------------------------------------


def test_new_fields_and_other_packings(ds: Any, tmp_path: Path) -> None:
    fields: Any = {
        "u": {"dtype": "int16", "scale_factor": 0.01, "add_offset": 5.0, "_FillValue": -32768},
        "speed": {"like": "u", "dtype": "float64", "attributes": {"units": "m s-1", "long_name": "speed"}},
        "mask": {"dims": ("latitude", "longitude"), "dtype": "int8"},
        "scores": {"dims": ("channel",), "sizes": {"channel": 5}, "dtype": "float32"},
        "mean": {"dims": (), "dtype": "float32"},
    }
    scores = torch.arange(5.0)
    for out in ("out.zarr", "out.nc", "out.h5", "packed.h5"):
        codec = "zlib" if out == "packed.h5" else None
        with scidata.create(tmp_path / out, like=ds, fields=fields, times=1, codec=codec) as writer:
            u = ds[0]["u"].clone()
            u[0, 0, 0] = torch.nan
            made = {"u": u, "speed": ds[0]["u"].double() ** 2, "mask": ds[0]["u"][0] > 0, "scores": scores}
            writer[0] = {**made, "mask": made["mask"].to(torch.int8), "mean": u.nanmean()}
        written = xr.open_dataset(tmp_path / out, engine="netcdf4" if out != "out.zarr" else None)
        np.testing.assert_allclose(written["u"][0], u, atol=0.005 + 1e-6)
        assert np.isnan(written["u"][0, 0, 0, 0])
        assert written["speed"].dtype == np.float64 and written["speed"].attrs["units"] == "m s-1"  # noqa: PT018
        assert (written["speed"][0].values == made["speed"].numpy()).all()
        assert (written["mask"][0].values == made["mask"].numpy()).all()
        assert written["scores"][0].values.tolist() == scores.tolist()
        assert float(written["mean"][0]) == float(u.nanmean())


def test_plain_encoding_of_packed_data(tmp_path: Path) -> None:
    make_grid(tmp_path / "packed.nc", format="netcdf4", num_times=2, num_lat=5, num_lon=6, packed=True)
    ds: Any = scidata.open_dataset(tmp_path / "packed.nc")
    with scidata.create(tmp_path / "plain.zarr", like=ds, encoding="plain") as writer:
        for step in range(2):
            writer[step] = {name: field * 1000 for name, field in ds[step].items()}  # too much for int16
    written = xr.open_dataset(tmp_path / "plain.zarr", mask_and_scale=False)
    assert written["u"].dtype == np.asarray(ds[0]["u"]).dtype
    np.testing.assert_array_equal(written["u"][1].values, (ds[1]["u"] * 1000).numpy())
    assert "scale_factor" not in written["u"].attrs


def test_bfloat16_and_arrays_of_numpy(ds: Any, tmp_path: Path) -> None:
    with scidata.create(tmp_path / "out.zarr", like=ds, fields=["u", "v"], times=1) as writer:
        writer[0] = {"u": ds[0]["u"].to(torch.bfloat16), "v": ds[0]["v"].numpy()}
    written = scidata.open_dataset(tmp_path / "out.zarr")
    assert torch.equal(written[0]["u"], ds[0]["u"].to(torch.bfloat16).float())
    assert torch.equal(written[0]["v"], ds[0]["v"])


def test_default_chunks_are_the_sources_or_parts_of_them(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "big.zarr", mode="w")
    for name, shape, chunks in (("u", (2, 40, 300, 400), (2, 40, 300, 400)), ("v", (2, 300, 400), (1, 64, 400))):
        dims = ("time", "level", "latitude", "longitude") if len(shape) == 4 else ("time", "latitude", "longitude")
        group.create_array(name, shape=shape, chunks=chunks, dtype="f4", dimension_names=dims)
    big: Any = scidata.open_dataset(tmp_path / "big.zarr", fields=["u", "v"], allow_missing=True)
    with scidata.create(tmp_path / "out.zarr", like=big) as writer:
        for step in range(2):
            writer[step] = {"u": torch.ones(40, 300, 400), "v": torch.ones(300, 400)}
    made: Any = zarr.open_group(tmp_path / "out.zarr")
    assert made["v"].chunks == (1, 64, 400)
    assert made["u"].chunks == (1, 5, 300, 400)  # 2.4 MB in place of 38 MB


# -- buffers ---------------------------------------------------------------------------------------------------------


def hold(writer: Any) -> threading.Event:
    """Keep a writer's output from writing until the event is set."""
    go, write = threading.Event(), writer._output.write

    def waiting(*args: Any) -> None:
        assert go.wait(30)
        write(*args)

    writer._output.write = waiting
    return go


def test_tensors_may_change_once_they_were_given(ds: Any, tmp_path: Path) -> None:
    with scidata.create(tmp_path / "out.zarr", like=ds, fields=["u"], times=2) as writer:
        go, u = hold(writer), ds[0]["u"].clone()
        writer[0] = {"u": u}
        u.zero_()
        writer[1] = {"u": u}
        go.set()
    written = scidata.open_dataset(tmp_path / "out.zarr")
    assert torch.equal(written[0]["u"], ds[0]["u"])
    assert not written[1]["u"].any()


def test_without_copies_a_change_in_place_raises(ds: Any, tmp_path: Path) -> None:
    writer = scidata.create(tmp_path / "out.zarr", like=ds, fields=["u"], times=2, copy=False)
    go, u = hold(writer), ds[0]["u"].clone()
    writer[0] = {"u": u}
    u.zero_()
    go.set()
    with pytest.raises(ConfigError, match="changed in place before it was written"):
        writer.flush()
    with pytest.raises(ConfigError, match="changed in place"):
        writer.close()
    assert not (tmp_path / "out.zarr").exists()


def test_the_loop_waits_where_the_disk_does_not_keep_up(ds: Any, tmp_path: Path) -> None:
    with scidata.create(tmp_path / "out.zarr", like=ds, times=4, in_flight=2) as writer:
        go, given = hold(writer), []

        def give() -> None:
            for step in range(4):
                writer[step] = ds[step]
                given.append(step)

        thread = threading.Thread(target=give)
        thread.start()
        time.sleep(0.3)
        assert given == [0, 1]
        assert not any(writer._staging._free.values())
        go.set()
        thread.join()
    assert sum(map(len, writer._staging._free.values())) <= 3 * 3  # buffers of three steps, used again


# -- ends ------------------------------------------------------------------------------------------------------------


def test_what_is_unfinished_says_so(ds: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out.zarr"
    with scidata.create(out, like=ds) as writer:
        writer[0] = ds[0]
        writer[2] = ds[2]
    assert "2 of 4 steps were not written (1, 3)" in caplog.text
    assert not out.exists()
    with pytest.raises(OutputError, match=r"unfinished.*allow_missing=True"):
        scidata.open_dataset(f"{out}.unfinished")
    looked_at: Any = scidata.open_dataset(f"{out}.unfinished", allow_missing=True)
    assert torch.equal(looked_at[2]["u"], ds[2]["u"])
    with pytest.raises(OutputError, match="resume=True"):
        scidata.create(out, like=ds)
    with pytest.raises(OutputError, match="another output was begun"):
        scidata.create(out, like=ds, resume=True, chunks={"latitude": 2})
    with scidata.create(out, like=ds, resume=True) as writer:
        assert writer.missing == [1, 3]
        with pytest.raises(OutputError, match="step 2 is written already"):
            writer[2] = ds[2]
        for step in writer.missing:
            writer[step] = ds[step]
    xr.testing.assert_identical(xr.open_dataset(out).load(), xr.open_dataset(tmp_path / "source.nc").load())
    assert not list(tmp_path.glob("out.zarr.*"))


def test_what_is_replaced_stays_until_the_end(ds: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.nc"
    write(out, ds)
    with pytest.raises(OutputError, match="is there already; give overwrite=True"):
        scidata.create(out, like=ds)
    before = out.read_bytes()
    with scidata.create(out, like=ds, fields=["u"], overwrite=True) as writer:
        for step in range(4):
            assert out.read_bytes() == before
            writer[step] = {"u": ds[step]["u"]}
    assert list(xr.open_dataset(out).data_vars) == ["u"]


def test_an_error_in_the_loop_leaves_nothing_that_looks_finished(ds: Any, tmp_path: Path) -> None:
    def loop(writer: scidata.Writer) -> None:
        with writer:
            writer[0] = ds[0]
            raise ZeroDivisionError

    writer = scidata.create(tmp_path / "out.h5", like=ds)
    with pytest.raises(ZeroDivisionError):
        loop(writer)
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.h5.progress", "out.h5.unfinished"]
    with pytest.raises(OutputError, match="the writer is closed"):
        writer[1] = ds[1]
    with h5py.File(tmp_path / "out.h5.unfinished") as file:  # a whole file all the same
        assert file["u"].shape == (4, 3, 7, 8)


@pytest.mark.parametrize(("out", "replaces"), [("out.nc", False), ("out.h5", True)])
@pytest.mark.parametrize(
    ("cls", "name", "num"),
    [
        (LocalPlace, "sync", 0), (PackedFileOutput, "_read", 50), (PackedFileOutput, "finish", 1),
        (LocalPlace, "finish", 0), (LocalPlace, "forget_progress", 0),
    ],
)  # fmt: skip
def test_a_packed_file_that_is_cut_off_at_its_end(
    ds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: Any, name: str, num: int, out: str, replaces: bool
) -> None:
    options: Any = {"codec": "zlib", "chunks": {"latitude": 2, "longitude": 3, "time": 3}}
    write(tmp_path / f"whole-{out}", ds, **options)
    path, whole = tmp_path / out, (tmp_path / f"whole-{out}").read_bytes()
    count, call = itertools.count(), getattr(cls, name)
    if replaces:
        write(path, ds)

    def cut_off(*given: Any) -> Any:
        found = call(*given) if next(count) < num else None
        if found is None:
            raise KeyboardInterrupt
        return found

    with scidata.create(path, like=ds, overwrite=replaces, **options) as writer:
        writer[[0, 1, 2]] = scidata.collate([ds[0], ds[1], ds[2]])
    writer = scidata.create(path, like=ds, resume=True, **options)
    assert writer.missing == [3]
    writer[3] = ds[3]
    writer.flush()
    monkeypatch.setattr(cls, name, cut_off)
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    monkeypatch.undo()
    with scidata.create(path, like=ds, resume=True, **options) as writer:
        assert writer.missing == []
        assert not list(tmp_path.glob("*/whole-*"))
    assert path.read_bytes() == whole
    assert not list(tmp_path.glob(f"{out}.*"))


# -- object stores ---------------------------------------------------------------------------------------------------


@pytest.mark.slow_for("zarr2")
@pytest.mark.parametrize("format", ["zarr", "zarr2"])
def test_to_an_object_store(ds: Any, tmp_path: Path, format: Any) -> None:
    pytest.importorskip("moto")
    with serve() as server:
        url = f"s3://{BUCKET}/runs/{format}.zarr"
        options: Any = {"like": ds, "format": format, "storage_options": server.options}
        with scidata.create(url, **options) as writer:
            writer[0] = ds[0]
            writer[1] = ds[1]
        with pytest.raises(OutputError, match="unfinished"):
            scidata.open_dataset(url, storage_options=server.options)
        with pytest.raises(OutputError, match=r"begun and is unfinished") as caught:
            scidata.create(url, **options)
        assert SECRET not in str(caught.value)
        with scidata.create(url, resume=True, **options) as writer:
            for step in writer.missing:
                writer[step] = ds[step]
        written: Any = scidata.open_dataset(url, storage_options=server.options)
        for i in range(4):
            assert torch.equal(written[i]["t"], ds[i]["t"])
        names = [each["Key"] for each in server.client().list_objects_v2(Bucket=BUCKET)["Contents"]]
        assert not [name for name in names if "progress" in name]
        with pytest.raises(OutputError, match="is there already"):
            scidata.create(url, **options)
        with pytest.raises(ConfigError, match="write Zarr to an object store"):
            scidata.create(f"s3://{BUCKET}/a.nc", like=ds, storage_options=server.options)


# -- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"fields": ["uu"]}, UnknownNameError, "did you mean 'u'"),
        ({"fields": {"w": {}}}, UnknownNameError, "'dims': ('level', 'latitude', 'longitude')"),
        ({"fields": {"w": {"like": "uv"}}}, UnknownNameError, "did you mean"),
        ({"fields": {"u": {"dtpye": "f4"}}}, UnknownNameError, "did you mean 'dtype'"),
        ({"fields": {"w": {"dims": ("lattitude",), "dtype": "f4"}}}, UnknownNameError, "did you mean 'latitude'"),
        ({"fields": {"w": {"dims": ("time",), "dtype": "f4"}}}, SciDataError, "'time'"),
        ({"fields": {"u": {"dtype": "int16", "scale_factor": 0}}}, ConfigError, "scale_factor is 0"),
        ({"fields": {"u": {"dtype": "int8", "_FillValue": 300}}}, ConfigError, "_FillValue 300"),
        ({"fields": {"u": {"dtype": "complex64"}}}, ConfigError, "complex64"),
        ({"fields": []}, ConfigError, "fields names none"),
        ({"chunks": {"lat": 4}}, UnknownNameError, "did you mean 'latitude'"),
        ({"chunks": {"latitude": 0}}, ConfigError, "at least 1"),
        ({"chunks": [4]}, ConfigError, "must name dimensions"),
        ({"chunks": {"latitude": 3}, "shards": {"latitude": 5}}, ConfigError, "give a multiple"),
        ({"codec": "blosk"}, ConfigError, "did you mean 'blosc'"),
        ({"format": "netcfd"}, ConfigError, "did you mean 'netcdf'"),
        ({"encoding": "sauce"}, ConfigError, "did you mean 'source'"),
        ({"format": "netcdf", "chunks": {"latitude": 4}}, ConfigError, "contiguously"),
        ({"format": "netcdf", "codec": "blosc"}, ConfigError, "'zlib' or 'none'"),
        ({"format": "hdf5", "codec": "zlib", "shards": {"latitude": 7}}, ConfigError, "hdf5 files have none"),
        ({"codec": "zlib"}, ConfigError, "none that Zarr is written with"),
        ({"format": "zarr2", "shards": {"latitude": 7}}, ConfigError, "v2 has no shards"),
        ({"times": []}, ConfigError, "no steps"),
        ({"times": {"latitude": [1]}}, ConfigError, "one sample lies"),
        ({"times": ["monday"]}, ConfigError, "datetime64"),
        ({"times": np.zeros((2, 2))}, ConfigError, "shape"),
        ({"in_flight": 0}, ConfigError, "in_flight"),
        ({"resume": True, "overwrite": True}, ConfigError, "one of them"),
        ({"like": "era5.zarr"}, ConfigError, "open_dataset"),
        ({"overwrit": True}, TypeError, "did you mean 'overwrite'"),
    ],
)
def test_arguments_that_cannot_be_honoured(
    ds: Any, tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        scidata.create(tmp_path / "out.zarr", **{"like": ds, **options})
    assert said in str(caught.value)
    assert not list(tmp_path.glob("out*"))


def test_a_path_below_a_file(ds: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("file/out.zarr", "file/a/out.nc"):
        with pytest.raises(ConfigError, match=r"file' is a file, and must be a folder"):
            scidata.create(tmp_path / name, like=ds)


def test_a_name_without_a_format(ds: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give format="):
        scidata.create(tmp_path / "out", like=ds)


@pytest.mark.parametrize(
    ("step", "change", "error", "said"),
    [
        (0, {"w": torch.zeros(3)}, UnknownNameError, "was not declared"),
        (0, {"u": None}, ConfigError, "lacks 'u'"),
        (0, {"u": torch.zeros(3, 7, 9)}, ConfigError, r"has shape \(3, 7, 9\), but \(3, 7, 8\) is written"),
        (0, {"u": [1.0]}, ConfigError, "must be a tensor"),
        (4, {}, IndexError, "there are 4 steps"),
        (-1, {}, IndexError, "out of range"),
        (1, {}, OutputError, "written already"),
        (1.0, {}, TypeError, "steps are numbers"),
        (True, {}, TypeError, "steps are numbers"),
        ([2, 3], {}, ConfigError, r"has shape \(3, 7, 8\), but \(2, 3, 7, 8\)"),
    ],
)
def test_steps_that_cannot_be_written(
    ds: Any, tmp_path: Path, step: Any, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    with scidata.create(tmp_path / "out.zarr", like=ds) as writer:
        writer[1] = ds[1]
        values = {**ds[0], **change}
        with pytest.raises(error, match=said):
            writer[step] = {name: value for name, value in values.items() if value is not None}
        for good in (0, 2, 3):  # it goes on
            writer[good] = ds[good]
    assert len(scidata.open_dataset(tmp_path / "out.zarr")) == 4


def test_no_sample_at_all(ds: Any, tmp_path: Path) -> None:
    with scidata.create(tmp_path / "out.zarr", like=ds) as writer, pytest.raises(ConfigError, match="takes a sample"):
        writer[0] = ds[0]["u"]  # type: ignore[assignment]


def test_fields_that_have_the_steps_dim(tmp_path: Path) -> None:
    make_grid(tmp_path / "source.zarr", num_times=4, num_lat=7, num_lon=8)
    pairs: Any = scidata.open_dataset(tmp_path / "source.zarr", steps=(0, 1))
    with pytest.raises(ConfigError, match=r"with times=\["):
        scidata.create(tmp_path / "out.zarr", like=pairs)
    with scidata.create(tmp_path / "out.zarr", like=pairs, times=3) as writer:
        for i in range(3):
            writer[i] = {name: field[1] for name, field in pairs[i].items()}
    again: Any = scidata.open_dataset(tmp_path / "out.zarr")
    assert torch.equal(again[2]["u"], pairs[2]["u"][1])


def test_ranks_without_a_common_store_are_refused() -> None:
    with fake_group(2), pytest.raises(OutputError, match="no store to agree through"):
        Ranks(scidata.init_mesh(domain=2), ["domain"], "dp")
