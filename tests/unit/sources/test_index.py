"""The index of many files: what is opened by it, when it is not used, and that nothing differs but the price."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import pickle
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest
from crc32c import crc32c
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.errors import CorruptDataError, SourceChangedError
from scidata.read.arrays import read_array
from scidata.sources import open_source, twins
from scidata.sources.access import validators
from scidata.sources.index import FileIndex
from scidata.sources.indexed import NAME, IndexedFiles

netCDF4 = pytest.importorskip("netCDF4", reason="writes the files")  # noqa: N816
FORMATS = ["NETCDF4", "NETCDF3_64BIT_OFFSET", "HDF5"]
NUM_FILES = 9


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    monkeypatch.setattr(validators, "_SETTLED", 0.0)  # files of tests are young


def write_day(path, day, format="NETCDF4", *, rows=3, value=None):
    if format == "HDF5":
        with h5py.File(path, "w") as file:
            for dim, values in (("time", np.arange(rows) + 3.0 * day), ("latitude", np.arange(5.0))):
                file[dim] = values
                file[dim].make_scale(dim)
            file["time"].attrs["units"] = "hours since 2000-01-01"
            for name in ("t2m", "u10"):
                values = np.full((rows, 5, 4), day if value is None else value, "f4")
                file.create_dataset(name, data=values, chunks=(1, 5, 4), compression="gzip", shuffle=True)
                for k, dim in enumerate(("time", "latitude")):
                    file[name].dims[k].attach_scale(file[dim])
            file.attrs["names"] = ["a", "b"]
        return
    with netCDF4.Dataset(path, "w", format=format) as file:
        for dim, length in (("time", None), ("latitude", 5), ("longitude", 4)):
            file.createDimension(dim, length)
            variable = file.createVariable(dim, "f8", (dim,))
            variable[:] = np.arange(length or rows) + (3 * day if length is None else 0)
        file["time"].units = "hours since 2000-01-01"
        file.history, file.edges = f"written of day {day}", np.array([1.5, np.nan])
        for name, dtype in (("t2m", "f4"), ("u10", "i2")):
            fill = None if name == "t2m" else -1
            dims = ("time", "latitude", "longitude")
            variable = file.createVariable(name, dtype, dims, zlib=format == "NETCDF4", fill_value=fill)
            if fill is not None:
                variable.scale_factor = 0.5 + day
            variable[:] = day if value is None else value


def write_days(folder, format, num=NUM_FILES):
    paths = [str(folder / f"d{day}.nc") for day in range(num)]
    for day, path in enumerate(paths):
        write_day(path, day, format)
    return paths


def index(paths, out=None):
    files = IndexedFiles(paths, out, open_source, to_write=True)
    files.write(read_array)
    return files.place


def kept(ds):
    return [source.kept is not None for source in ds.reader.sources]


def samples(ds):
    return [{name: ds[i][name].numpy() for name in ds.fields} for i in range(len(ds))]


def facts(layout):
    texts = [repr(getattr(layout, name.name)) for name in dataclasses.fields(layout) if name.name != "dtype"]
    return [layout.dtype.str, *texts]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for name, values in other.items():
            np.testing.assert_array_equal(one[name], values)


@pytest.fixture
def calls(monkeypatch):
    """Count looks at data files, by what they do."""
    found = Counter()

    def counted(module, name):
        real = getattr(module, name)

        def call(path, *args, **kwargs):
            found[name] += isinstance(path, str) and path.endswith(".nc")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for module, name in ((os, "stat"), (os, "lstat"), (os, "open"), (builtins, "open"), (h5py.h5f, "open")):
        counted(module, name)
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_files_open_by_a_stat_each_and_read_the_same(tmp_path, calls, format):
    paths = write_days(tmp_path, format)
    plain = scidata.open_dataset(paths, kind="grid")
    wanted, described = samples(plain), list(map(open_source, paths))
    assert index(paths) == str(tmp_path / NAME)
    calls.clear()
    ds = scidata.open_dataset(paths, kind="grid")
    assert (calls["stat"], calls["lstat"], calls["open"]) == (NUM_FILES, 0, 0)
    assert all(kept(ds))
    assert_same(samples(ds), wanted)
    assert calls["open"] == NUM_FILES  # for their values; nothing of HDF5's metadata
    for source, before in zip(ds.reader.sources, described, strict=True):
        assert repr(dict(source.attributes)) == repr(dict(before.attributes))
        assert source.skipped == before.skipped
        assert list(source.arrays) == list(before.arrays)
        for name, layout in before.arrays.items():
            assert facts(source.arrays[name]) == facts(layout)
    for steps in (0, 1), (0, -2):
        pairs = [scidata.open_dataset(p, kind="grid", steps=steps) for p in (paths, str(tmp_path / "*.nc"))]
        assert [len(pair) for pair in pairs] == [len(wanted) - max(map(abs, steps))] * 2


def test_python_calls_of_an_indexed_file_are_few(tmp_path):
    paths = write_days(tmp_path, "NETCDF4", 24)
    index(paths)

    def calls_for(num):
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            count += event == "call"

        scidata.open_dataset(paths[:num], kind="grid", fields=["t2m"], steps=(0, 1))
        sys.setprofile(trace)
        try:
            scidata.open_dataset(paths[:num], kind="grid", fields=["t2m"], steps=(0, 1))
        finally:
            sys.setprofile(None)
        return count

    assert (calls_for(24) - calls_for(12)) / 12 <= 40


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cached", [False, True], ids=["beside", "cache_dir"])
def test_a_changed_file_is_described_anew(tmp_path, format, cached):
    paths = write_days(tmp_path, format)
    out = tmp_path / "cache" if cached else None
    if out is not None:
        (out / "scidata-index").mkdir(parents=True)
    index(paths, out)
    write_day(paths[2], 2, format, value=7)  # same size or not, another time
    write_day(paths[3], 3, format, rows=2)
    os.utime(paths[4], ns=(1, 1))
    os.unlink(paths[-1])
    write_day(tmp_path / "e.nc", 20, format)
    ds = scidata.open_dataset(str(tmp_path / "*.nc"), kind="grid", cache_dir=out)
    changed = [i in (2, 3, 4, NUM_FILES - 1) for i in range(NUM_FILES)]
    assert kept(ds) == [not each for each in changed]
    assert len(ds) == 3 * NUM_FILES - 1
    assert float(ds[6]["t2m"].mean()) == 7
    with pytest.raises(FileNotFoundError, match="no such file"):
        scidata.open_dataset(paths, kind="grid", cache_dir=out)


def test_in_cache_dir_a_time_that_was_set_back_is_seen(tmp_path):
    paths = write_days(tmp_path, "NETCDF3_64BIT_OFFSET", 3)
    (tmp_path / "cache/scidata-index").mkdir(parents=True)
    index(paths, tmp_path / "cache")
    before = os.stat(paths[1])
    write_day(paths[1], 1, "NETCDF3_64BIT_OFFSET", value=7)
    os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    ds = scidata.open_dataset(paths, cache_dir=tmp_path / "cache")
    assert kept(ds) == [True, False, True]


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_changes_after_opening_is_refused(tmp_path, format):
    paths = write_days(tmp_path, format)
    index(paths)
    earlier = scidata.open_dataset(paths, kind="grid")
    assert float(earlier[4]["t2m"].mean()) == 1  # holds the file open
    os.unlink(paths[1])
    write_day(paths[1], 1, format, value=5)
    index(paths)
    assert float(scidata.open_dataset(paths, kind="grid")[4]["t2m"].mean()) == 5
    later = scidata.open_dataset(paths, kind="grid")
    os.unlink(paths[2])
    write_day(paths[2], 2, format, value=6)
    with pytest.raises(SourceChangedError, match=r"d2\.nc"):
        later[7]


@pytest.mark.parametrize("most", [twins.MOST_VALUES, 16], ids=["values", "digests"])
def test_files_of_several_kinds_are_compared(tmp_path, monkeypatch, most):
    monkeypatch.setattr(twins, "MOST_VALUES", most)
    paths = write_days(tmp_path, "NETCDF4")
    write_day(paths[1], 1, rows=1)  # shorter, as a February
    index(paths)
    ds = scidata.open_dataset(paths)
    assert (len(ds), all(kept(ds))) == (3 * NUM_FILES - 2, True)
    assert float(ds[3]["u10"].mean()) == float(scidata.open_dataset(paths[1])[0]["u10"].mean())
    for change, text in (
        (lambda file: file["latitude"].__setitem__(0, -3.0), "coordinate 'latitude' differs"),
        (lambda file: file["time"].__setitem__(0, -1.0), "begins at -1.0, not after the end"),
    ):
        write_day(paths[5], 5)
        with netCDF4.Dataset(paths[5], "a") as file:
            change(file)
        index(paths)
        with pytest.raises(scidata.errors.FieldMismatchError, match=rf"d5\.nc.*{text}"):
            scidata.open_dataset(paths)


def test_an_index_of_a_folder_serves_the_folders_in_it(tmp_path):
    for year in ("2001", "2002"):
        (tmp_path / year).mkdir()
        write_days(tmp_path / year, "NETCDF3_64BIT_OFFSET", 2)
    assert index([str(path) for path in sorted(tmp_path.glob("*/*.nc"))]) == str(tmp_path / NAME)
    assert all(kept(scidata.open_dataset(str(tmp_path / "2002/*.nc"))))
    assert kept(scidata.open_dataset(str(tmp_path / "2001/d0.nc"))) == [True]


def test_the_first_opening_with_cache_dir_writes_an_index(tmp_path, calls):
    paths = write_days(tmp_path, "NETCDF4")
    assert not any(kept(scidata.open_dataset(paths, cache_dir=tmp_path / "cache")))
    calls.clear()
    ds = scidata.open_dataset(paths, kind="grid", cache_dir=tmp_path / "cache")
    assert all(kept(ds))
    assert calls["open"] == 0
    copy = pickle.loads(pickle.dumps(ds))
    assert_same(samples(copy), samples(ds))
    assert all(kept(copy))


def test_files_that_were_changed_just_now_get_no_row(tmp_path, monkeypatch):
    paths = write_days(tmp_path, "NETCDF4")
    monkeypatch.setattr(validators, "_SETTLED", 1000.0)
    index(paths)
    assert not any(kept(scidata.open_dataset(paths)))


def unlike(data):
    """Yield names of faults, and indices with them."""
    yield "empty", b""
    yield "foreign", b"CDF\x01" + data
    yield "cut off", data[:-9]
    for place in range(8, len(data), max(1, len(data) // 40)):
        yield f"byte {place}", data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
    yield "version", resealed(data.replace(b'"format": 2', b'"format": 9', 1))
    made = FileIndex.from_bytes(data, "")
    for name, row in (("parts", -1), ("first_parts", -1), ("value_ends", 0), ("parts", 0)):
        tables = {key: table.copy() for key, table in made.tables.items()}
        tables[name][row] = 1 << 40
        yield f"table {name}", FileIndex(made.names, made.texts, tables, made.values).to_bytes()


def resealed(data):
    return data[:-4] + crc32c(data[:-4]).to_bytes(4, "little")


def test_a_damaged_or_foreign_index_is_not_used(tmp_path):
    paths = write_days(tmp_path, "NETCDF3_64BIT_OFFSET", 3)
    place = index(paths)
    data = Path(place).read_bytes()
    for name, damaged in unlike(data):
        with pytest.raises(CorruptDataError):
            FileIndex.from_bytes(damaged, name)
    with open(place, "r+b") as file:
        file.write(b"x")
    with pytest.warns(UserWarning, match=r"scidata-index: is no index.*run scidata index again"):
        assert not any(kept(scidata.open_dataset(paths)))
    os.rename(place, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", place)
    with pytest.warns(UserWarning, match="is a link"):
        scidata.open_dataset(paths)


def test_many_writers_at_once_leave_a_whole_index(tmp_path):
    paths = write_days(tmp_path, "NETCDF3_64BIT_OFFSET")
    for path in paths:
        open_source(path).arrays  # noqa: B018
    places, faults = [], []

    def look():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                places.append(index(paths))
                assert len(IndexedFiles(paths, None, open_source)) == NUM_FILES
        except Exception as e:
            faults.append(e)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert set(places) == {str(tmp_path / NAME)}
    assert all(kept(scidata.open_dataset(paths)))
    assert not list(tmp_path.glob(".tmp*"))


def run(*args):
    return CliRunner().invoke(app, ["index", *map(str, args)])


def test_the_command_writes_and_brings_up_to_date(tmp_path):
    paths = write_days(tmp_path, "NETCDF4")
    result = run(tmp_path / "*.nc", "--json")
    report = json.loads(result.stdout)
    assert report == {
        "index": str(tmp_path / NAME), "files": 9, "new": 9, "known": 0, "left_out": 0,
        "bytes": (tmp_path / NAME).stat().st_size,
    }  # fmt: skip
    write_day(paths[0], 0, value=3)
    os.unlink(paths[-1])
    result = run(tmp_path / "*.nc")
    assert "8 files" in result.stdout
    assert "1 read, 7 known already" in result.stdout
    assert all(kept(scidata.open_dataset(paths[:-1])))
    report = json.loads(run(*paths[:2], "--out", tmp_path / "cache", "--json").stdout)
    assert report["files"] == 2
    assert os.path.dirname(report["index"]) == str(tmp_path / "cache" / "scidata-index")
    os.unlink(tmp_path / NAME)
    assert kept(scidata.open_dataset(paths[:3], cache_dir=tmp_path / "cache")) == [True, True, False]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["d00.nc"], "no such file"),
        (["s3://bucket/a.nc"], "is a URL"),
        (["a.npy"], "npy; an index is of HDF5"),
        (["d0.nc", "--outt", "x"], "--out"),
        (["d0.nc", "--out", "d0.nc"], "is a file, not a folder"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, monkeypatch, args, text):
    monkeypatch.chdir(tmp_path)
    write_day("d0.nc", 0)
    np.save("a.npy", np.zeros(3))
    result = run(*args)
    assert result.exit_code in (1, 2)
    assert text in result.stderr


def test_a_missing_time_overlaps_with_nothing(tmp_path):
    for day in range(3):
        write_day(tmp_path / f"d{day}.nc", day, rows=1)
        with netCDF4.Dataset(tmp_path / f"d{day}.nc", "a") as file:
            file["time"].missing_value = 0.0
    assert len(scidata.open_dataset(str(tmp_path / "*.nc"), kind="grid")) == 3


def test_an_index_makes_no_objects_of_bytes(tmp_path):
    paths = write_days(tmp_path, "NETCDF4", 1)
    made = FileIndex.from_bytes(Path(index(paths)).read_bytes(), "")
    texts = [text.replace('"dtype": "<f8", "chunks"', '"dtype": "|O", "chunks"') for text in made.texts]
    (tmp_path / NAME).write_bytes(FileIndex(made.names, texts, made.tables, made.values).to_bytes())
    with pytest.raises(CorruptDataError, match="an array has dtype object"):
        scidata.open_dataset(paths, kind="grid", fields=["t2m"])
