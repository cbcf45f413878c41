"""What it takes to open many files, or some arrays of many: system calls and metadata, counted."""

from __future__ import annotations

import builtins
import fcntl
import os
from collections import Counter

import h5py
import numpy as np
import pytest
import zarr

import scidata
from scidata.errors import UnknownNameError
from scidata.read import arrays
from scidata.sources import open_source
from scidata.sources.access.files import files

netCDF4 = pytest.importorskip("netCDF4", reason="writes the files")  # noqa: N816
NUM_FILES = 6


def write_day(path, day, format):
    with netCDF4.Dataset(path, "w", format=format) as file:
        for dim, length in (("time", None), ("latitude", 5), ("longitude", 4)):
            file.createDimension(dim, length)
            variable = file.createVariable(dim, "f8", (dim,))
            variable[:] = np.arange(length or 3) + (3 * day if length is None else 0)
        file["time"].units = "hours since 2000-01-01"
        for name in ("t2m", "u10"):
            variable = file.createVariable(name, "f4", ("time", "latitude", "longitude"))
            variable.units = "K"
            variable[:] = day


@pytest.fixture
def calls(monkeypatch):
    """Count calls of Python by what they do and the last part of the path; those that look at no file do not count."""
    found = Counter()

    def counted(module, name, label):
        real = getattr(module, name)

        def call(path, *args, **kwargs):
            if isinstance(path, str | os.PathLike):
                found[label, os.path.basename(path)] += 1
            return real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(os, "stat", "stat")
    counted(os, "lstat", "stat")
    counted(os, "open", "open")
    counted(builtins, "open", "open")
    counted(h5py.h5f, "open", "HDF5")
    counted(h5py, "File", "HDF5")
    return found


@pytest.mark.parametrize("format", ["NETCDF4", "NETCDF3_64BIT_OFFSET"])
@pytest.mark.parametrize("max_open", [256, 2])
def test_a_file_of_a_series_takes_one_stat_and_one_open(tmp_path, calls, monkeypatch, format, max_open):
    monkeypatch.setattr(files(), "_max_open", max_open)  # of very many files, the first are closed again meanwhile
    names = [f"{day}.nc" for day in range(NUM_FILES)]
    for day, name in enumerate(names):
        write_day(tmp_path / name, day, format)
    calls.clear()
    ds = scidata.open_dataset([str(tmp_path / name) for name in names], fields=["t2m"], steps=(0, 1))
    assert {name: (calls["stat", name], calls["open", name]) for name in names} == dict.fromkeys(names, (1, 1))
    assert not any(label == "HDF5" for label, _ in calls)  # which reads through the descriptor that is open
    assert len(ds) == 3 * NUM_FILES - 1
    assert float(ds[3 * NUM_FILES - 2]["t2m"].mean()) == NUM_FILES - 1


def test_a_file_behind_a_pattern_is_not_looked_up_twice(tmp_path, calls):
    for day in range(NUM_FILES):
        write_day(tmp_path / f"{day}.nc", day, "NETCDF4")
    calls.clear()
    scidata.open_dataset(str(tmp_path / "*.nc"))
    assert max(calls["stat", f"{day}.nc"] for day in range(NUM_FILES)) == 1


def write_many(path, version, num):
    group = zarr.open_group(path, mode="w", zarr_format=version)
    shapes = {"time": (3,), "latitude": (5,), "longitude": (4,)} | {f"v{i:03}": (3, 5, 4) for i in range(num)}
    for name, shape in shapes.items():
        dims = list(shapes)[:3] if len(shape) == 3 else [name]
        values = np.arange(np.prod(shape), dtype="f4").reshape(shape)
        named = {"dimension_names": dims} if version == 3 else {"attributes": {"_ARRAY_DIMENSIONS": dims}}
        group.create_array(name, data=values, chunks=shape, **named)
    return list(shapes)


def folders_read(monkeypatch, path):
    """Return the arrays whose metadata were opened: a list that grows."""
    real, found = builtins.open, []

    def spy(name, *args, **kwargs):
        if str(name).endswith(("zarr.json", ".zarray")):
            found.append(os.path.relpath(os.path.dirname(name), path))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", spy)
    return found


@pytest.mark.parametrize("version", [2, 3])
def test_of_many_arrays_those_are_described_that_are_wanted(tmp_path, monkeypatch, version):
    names = write_many(tmp_path / "a.zarr", version, 200)
    read = folders_read(monkeypatch, tmp_path / "a.zarr")
    ds = scidata.open_dataset(str(tmp_path / "a.zarr"), fields=["v003", "v150"])
    assert set(read) - {"."} == {"v003", "v150", "time", "latitude", "longitude"}
    assert len(read) == len(set(read))
    assert ds[1]["v150"].flatten().tolist() == list(range(20, 40))
    assert len(read) <= 6  # nor does reading ask for others
    source = ds.reader.sources[0]
    assert sorted(source.arrays) == sorted(names)  # who goes through all gets all
    assert len(source.arrays) == len(names) == len(set(read) - {"."})
    assert "v004" in source.arrays
    assert "v201" not in source.arrays


@pytest.mark.parametrize("version", [2, 3])
def test_a_field_that_is_not_there_names_its_like(tmp_path, version):
    write_many(tmp_path / "a.zarr", version, 3)
    with pytest.raises(UnknownNameError, match=r"no field 'v01'.*v001"):
        scidata.open_dataset(str(tmp_path / "a.zarr"), fields=["v01"])
    source = open_source(str(tmp_path / "a.zarr"))
    assert source.arrays.get("v01") is None
    assert source.arrays.get("../a.zarr/v001") is None
    with pytest.raises(UnknownNameError, match=r"no array 'v01'.*v001"):
        source.arrays["v01"]


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_in_groups_and_arrays_left_out_are_found_alone(tmp_path, version):
    write_many(tmp_path / "a.zarr", version, 1)
    group = zarr.open_group(tmp_path / "a.zarr", zarr_format=version)
    group.create_group("inner").create_array("u", data=np.zeros(3, "f4"))
    group.create_array("text", shape=(2,), dtype="U3")
    arrays = open_source(str(tmp_path / "a.zarr")).arrays
    assert arrays["inner/u"].shape == (3,)
    for source in (open_source(str(tmp_path / "a.zarr")), open_source(str(tmp_path / "a.zarr"))):
        assert "inner/u" in source.arrays
        assert "inner" not in source.arrays
        assert "text" not in source.arrays
        assert set(source.skipped) == {"text"}
        with pytest.raises(scidata.errors.UnsupportedFormatError, match="text"):
            source.arrays["text"]


def test_a_file_whose_lock_is_held_is_refused_unless_locks_are_off(tmp_path, monkeypatch):
    path = str(tmp_path / "a.nc")
    write_day(path, 0, "NETCDF4")
    with open(path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match=r"a\.nc: is being written by another process"):
            open_source(path).arrays  # noqa: B018
        monkeypatch.setenv("HDF5_USE_FILE_LOCKING", "FALSE")
        assert "t2m" in open_source(path).arrays


@pytest.mark.parametrize("format", ["NETCDF4", "NETCDF3_64BIT_OFFSET"])
def test_a_coordinate_in_one_piece_is_read_without_a_plan(tmp_path, monkeypatch, format):
    write_day(tmp_path / "d.nc", 1, format)
    monkeypatch.delattr(arrays, "plan_array")
    source = open_source(tmp_path / "d.nc")
    for name in ("latitude", "longitude"):
        layout = source.arrays[name]
        np.testing.assert_array_equal(arrays.read_array(source, layout), np.arange(layout.shape[0]))
