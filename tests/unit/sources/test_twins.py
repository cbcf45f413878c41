"""Files that repeat another's metadata: which are described by their bytes alone, and that nothing differs for that."""

from __future__ import annotations

import builtins
import dataclasses
import fcntl
import os
import random
import sys
import time
from collections import Counter

import h5py
import numpy as np
import pytest

import scidata
from scidata.errors import FieldMismatchError, SciDataError
from scidata.read.arrays import read_array
from scidata.sources import open_source
from scidata.sources.access.files import files
from scidata.sources.index import FileIndex, KeptFile
from scidata.sources.indexed import IndexedFiles
from scidata.sources.twins import Examples

netCDF4 = pytest.importorskip("netCDF4", reason="writes the files")  # noqa: N816
NUM_FILES = 10
DIMS = {"time": 4, "latitude": 5, "longitude": 6}


def noise(day, shape=(4, 5, 6)):
    """Return values that take other numbers of bytes in each file, so that all behind them lies elsewhere."""
    values = np.zeros(shape, "f4")
    values.flat[: 7 * day] = np.random.default_rng(day).normal(size=7 * day)[: values.size]
    return values


def netcdf(path, day, *, format="NETCDF4", num=2, dtype="f4", order=tuple(DIMS), unlimited=("time",), scale=None,
           units="hours since 2000-01-01", calendar="standard", time="f8", zlib=True, coordinates=None, group=None,
           sizes=DIMS, history="written on day", **options):  # fmt: skip
    with netCDF4.Dataset(path, "w", format=format) as file:
        file.history = f"{history} {day:03}"
        for dim, size in sizes.items():
            file.createDimension(dim, None if dim in unlimited else size)
            kind = time if dim == "time" else "f8"
            variable = file.createVariable(dim, kind, (dim,), **(coordinates or {}))
            variable[:] = np.arange(size) + (4 * day if dim == "time" else 0)
        file["time"].units, file["time"].calendar = units, calendar
        for k in range(num):
            if format == "NETCDF4":
                options |= {"zlib": zlib}
            variable = (file if group is None else file.createGroup(group)).createVariable(
                f"v{k}", dtype, order, **options
            )
            variable.units, variable.long_name = "K", "a name"
            if scale is not None:
                variable.scale_factor = scale
            variable[:] = noise(day, [sizes[dim] for dim in order])


def hdf5(path, day, *, libver="earliest", num=2, **options):
    with h5py.File(path, "w", libver=libver) as file:
        file.attrs["history"] = f"written on day {day:03}"
        for dim, size in DIMS.items():
            file[dim] = np.arange(size) + (4.0 * day if dim == "time" else 0)
            file[dim].make_scale(dim)
        for k in range(num):
            dset = file.create_dataset(f"v{k}", data=noise(day), chunks=(1, 5, 6), compression="gzip", **options)
            for axis, dim in enumerate(DIMS):
                dset.dims[axis].attach_scale(file[dim])
            for a in range(10):
                dset.attrs[f"a{a}"] = a


def text(path, day):
    """Write variables of text, too, which are left out, and define all before the first value."""
    with netCDF4.Dataset(path, "w") as file:
        for dim, size in DIMS.items():
            file.createDimension(dim, size)
        names, chars = file.createVariable("names", str, ("latitude",)), file.createVariable("c", "S1", ("longitude",))
        values = file.createVariable("v0", "i2", tuple(DIMS), zlib=True, fill_value=-1)
        time = file.createVariable("time", "f8", ("time",))
        values.scale_factor = 0.5
        values[:] = 100 * noise(day)
        names[:], chars[:], time[:] = np.array(list("abcde"), object), list("uvwxyz"), np.arange(4) + 4 * day


WRITERS = {
    "netcdf": netcdf,
    "many variables": lambda path, day: netcdf(path, day, num=12),  # names are in a heap
    "raw": lambda path, day: netcdf(path, day, zlib=False, unlimited=()),
    "a time a chunk": lambda path, day: netcdf(path, day, coordinates={"chunksizes": (1,)}),
    "coordinates in chunks": lambda path, day: netcdf(path, day, coordinates={"chunksizes": (2,)}, unlimited=()),
    "packed coordinates": lambda path, day: netcdf(path, day, coordinates={"zlib": True}),
    "text": text,
    "hdf5": hdf5,
    "newest hdf5": lambda path, day: hdf5(path, day, libver="latest"),
    "classic": lambda path, day: netcdf(path, day, format="NETCDF3_64BIT_OFFSET"),
    "without records": lambda path, day: netcdf(path, day, format="NETCDF3_CLASSIC", unlimited=()),
}


def write(folder, name, num=NUM_FILES):
    paths = [str(folder / f"d{day}.nc") for day in range(num)]
    for day, path in enumerate(paths):
        WRITERS[name](path, day + 1)
        if name == "newest hdf5" and not day:
            time.sleep(1.1)  # its objects keep the second that they were made in
    return paths


def facts(layout):
    names = [each.name for each in dataclasses.fields(layout) if each.name != "dtype"]
    return [layout.dtype.str, *(repr(getattr(layout, name)) for name in names)]


def said(source):
    """Return all that a source says of a file, and the values of its coordinates."""
    arrays = {name: facts(layout) for name, layout in source.arrays.items()}
    values = {name: read_array(source, x).tobytes() for name, x in source.arrays.items() if x.dims == (name,)}
    attributes = {name: repr(value) for name, value in source.attributes.items()}
    return list(arrays), arrays, dict(source.skipped), attributes, values


def described(paths):
    found = IndexedFiles(paths, None, open_source)
    found.kinds(["v0", "time"], ["latitude", "longitude"])
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_twins_are_described_as_they_would_be_alone(tmp_path, name):
    paths = write(tmp_path, name)
    found = described(paths)
    assert len(found.opened) == 1
    assert set(found.kinds(["v0", "time"], ["latitude", "longitude"])) == {0}
    for source, path in zip(found, paths, strict=True):
        assert said(source) == said(open_source(path))
    fields = {"kind": "grid", "fields": ["v0"], "sample_dim": "time"}
    ds = scidata.open_dataset(paths, **fields)
    assert len(ds) == 4 * NUM_FILES
    alone = [scidata.open_dataset(path, **fields) for path in paths]
    for i in range(0, len(ds), 3):
        np.testing.assert_array_equal(ds[i]["v0"], alone[i // 4][i % 4]["v0"])
    np.testing.assert_array_equal(ds.reader.coordinate("time"), np.arange(4, 4 + 4 * NUM_FILES))


@pytest.mark.parametrize("name", ["netcdf", "hdf5", "raw"])
def test_chunks_of_a_twin_are_found_without_hdf5(tmp_path, monkeypatch, name):
    ds = scidata.open_dataset(write(tmp_path, name), fields=["v0"])
    monkeypatch.delattr(h5py, "File")
    for i in range(4, len(ds)):  # those of the example HDF5 has to find
        np.testing.assert_array_equal(ds[i]["v0"], noise(1 + i // 4)[i % 4])


def test_a_twin_takes_one_open_and_few_calls(tmp_path, monkeypatch):
    paths, counts = write(tmp_path, "netcdf", 24), Counter()
    scidata.open_dataset(paths[:9], fields=["v0"])

    def counted(module, name):
        real = getattr(module, name)

        def call(*args, **options):
            counts[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    for module, names in (
        (os, ("stat", "lstat", "open", "preadv", "fstat")),
        (fcntl, ("flock",)),
        (builtins, ("open",)),
        (h5py.h5f, ("open",)),
    ):
        for name in names:
            counted(module, name)

    def count(num):
        counts.clear()
        sys.setprofile(lambda frame, event, arg: counts.update(calls=event == "call"))
        try:
            scidata.open_dataset(paths[:num], fields=["v0"])
        finally:
            sys.setprofile(None)
        return counts.copy()

    few, many = count(12), count(24)
    each = {name: (many[name] - few[name]) / 12 for name in many}
    assert each.pop("calls") <= 170
    # the beginning of the file, with all metadata; a file's version before and after, its size, and its lock
    assert {name: num for name, num in each.items() if num} == {"open": 1, "preadv": 1, "fstat": 3, "flock": 2}


OTHERS = {
    "dtype": {"dtype": "f8"},
    "integers": {"dtype": "i4"},
    "byte order": {"endian": "big"},
    "chunks": {"chunksizes": (1, 5, 3)},
    "level": {"complevel": 7},
    "filters": {"zlib": False},
    "shuffle": {"shuffle": False},
    "checksums": {"fletcher32": True},
    "fill value": {"fill_value": -1.0},
    "scale": {"scale": 0.5},
    "units": {"units": "hours since 2000-01-02"},
    "calendar": {"calendar": "365_days"},
    "dtype of times": {"time": "i8"},
    "order": {"order": ("time", "longitude", "latitude")},
    "size": {"sizes": {"time": 4, "latitude": 6, "longitude": 5}},
    "number of times": {"sizes": {"time": 3, "latitude": 5, "longitude": 6}},
    "fewer variables": {"num": 1},
    "more variables": {"num": 3},
    "group": {"group": "inner"},
    "unlimited": {"unlimited": ()},
    "another unlimited": {"unlimited": ("time", "latitude")},
    "longer units": {"units": "hours since 2000-01-02 00:00:00"},
    "attribute": {"history": "written by day"},
    "longer attribute": {"history": "written on the day"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_differs_is_described_as_it_is(tmp_path, name):
    paths = write(tmp_path, "netcdf")
    for day in (3, 7):
        netcdf(paths[day], day, **OTHERS[name])
    found = described(paths)
    is_twin = name in ("attribute", "units", "calendar")  # texts as long as the others
    assert [source.path for source in found.opened] == [paths[0], *([] if is_twin else [paths[3]])]
    assert found.kinds(["v0", "time"], [])[3] == (0 if "attribute" in name else 3)
    for source, path in zip(found, paths, strict=True):
        assert said(source) == said(open_source(path))


@pytest.mark.parametrize("padding", [h5py.h5t.STR_SPACEPAD, h5py.h5t.STR_NULLPAD, h5py.h5t.STR_NULLTERM])
def test_a_shorter_text_that_is_padded_is_what_hdf5_says(tmp_path, padding):
    """Fortran pads text by spaces, which HDF5 cuts off."""
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(24)
    kind.set_strpad(padding)
    paths = write(tmp_path, "hdf5")
    for path, text in zip(paths, ["proleptic_gregorian"] * 4 + ["standard           ", "julian"] * 3, strict=True):
        with h5py.File(path, "r+") as file:
            space = h5py.h5s.create(h5py.h5s.SCALAR)
            attribute = h5py.h5a.create(file["time"].id, b"calendar", kind, space)
            attribute.write(np.array(text.ljust(24), "S24"), mtype=kind)
    for source, path in zip(described(paths), paths, strict=True):
        assert said(source) == said(open_source(path))


def test_values_that_look_like_an_index_are_values(tmp_path):
    """The newest format has no index of a single chunk."""
    leaf = b"TREE\x01\x00\x01\x00" + b"\xff" * 16 + np.array([512, 0], "<u4").tobytes() + bytes(24) + b"d" + bytes(7)
    paths = [str(tmp_path / f"{day}.h5") for day in range(NUM_FILES)]
    for day, path in enumerate(paths):
        with h5py.File(path, "w", libver="latest") as file:
            file["time"] = [float(day)]
            file["time"].make_scale("time")
            values = np.full((1, 512), day, "u1")
            values[0, : len(leaf)] = np.frombuffer(leaf, "u1")
            file.create_dataset("v", data=values, chunks=(1, 512)).dims[0].attach_scale(file["time"])
    ds = scidata.open_dataset(paths, kind="grid", fields=["v"], sample_dim="time")
    assert [ds[i]["v"].reshape(-1)[-1].item() for i in range(NUM_FILES)] == list(range(NUM_FILES))
    assert bytes(ds[5]["v"].reshape(-1)[: len(leaf)].tolist()) == leaf


def test_another_grid_is_found(tmp_path):
    paths = write(tmp_path, "netcdf")
    with netCDF4.Dataset(paths[6], "a") as file:
        file["latitude"][2] = 77
    with pytest.raises(FieldMismatchError, match=r"d6\.nc: coordinate 'latitude' differs"):
        scidata.open_dataset(paths)


def test_a_file_that_is_written_just_now_is_refused(tmp_path):
    paths = write(tmp_path, "netcdf")
    with open(paths[6], "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match=r"d6\.nc: is being written"):
            scidata.open_dataset(paths)


def test_a_file_that_is_gone_cut_off_or_unfinished_is_refused(tmp_path):
    for fault, error in ((os.remove, FileNotFoundError), (lambda path: os.truncate(path, 3000), SciDataError)):
        paths = write(tmp_path, "netcdf")
        fault(paths[6])
        with pytest.raises(error, match=r"d6\.nc"):
            scidata.open_dataset(paths)
    paths = write(tmp_path, "netcdf")
    os.rename(paths[6], paths[6] + ".unfinished")
    with pytest.raises(SciDataError, match="unfinished"):
        scidata.open_dataset([*paths[:6], paths[6] + ".unfinished", *paths[7:]])


def test_files_of_other_kinds_each_cost_few_examples(tmp_path, monkeypatch):
    made, real = [], Examples.take
    monkeypatch.setattr(Examples, "take", lambda *args: made.append(1) or real(*args))
    paths = write(tmp_path, "netcdf", 12)
    for day, path in enumerate(paths):
        netcdf(path, day, scale=day + 1.0)
    found = described(paths)
    assert len(made) == 4
    assert [source.arrays["v0"].attributes["scale_factor"] for source in found] == list(range(1, 13))


def test_a_change_between_description_and_read_is_found(tmp_path):
    paths = write(tmp_path, "netcdf")
    ds = scidata.open_dataset(paths, fields=["v0"])
    netcdf(paths[6], 9)
    with pytest.raises(scidata.errors.SourceChangedError, match=r"d6\.nc"):
        ds[4 * 6]


@pytest.mark.parametrize("name", WRITERS)
def test_of_damaged_files_none_is_taken_for_another(tmp_path, name):
    paths, rng, num_taken = write(tmp_path, name, 3), random.Random(name), 0
    source = open_source(paths[0])
    metadata = source.metadata()
    examples = Examples(list(DIMS))
    examples.take(paths[0], metadata, source.facts(look=False))
    damaged = str(tmp_path / "x.nc")
    for case in range(60):
        with open(rng.choice(paths), "rb") as file:
            data = bytearray(file.read())
        for _ in range(case and rng.choice([1, 1, 3])):
            block = rng.choice(metadata.blocks)
            at = block.address + rng.randrange(len(block.data))
            if at < len(data):
                data[at] = rng.choice([0, 255, data[at] ^ 1 << rng.randrange(8)])
        with open(damaged, "wb") as file:
            file.write(data)
        files().forget(damaged)
        row = examples.row_of(damaged)
        if row is not None:
            num_taken += 1
            twin = type(source)(damaged)
            twin.restore(KeptFile(FileIndex.of([row]), 0), row.version)
            assert said(twin) == said(open_source(damaged)), case
    assert num_taken
