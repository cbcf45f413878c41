"""Samples whose chunks lie alike take each other's tables: the same values, plans and errors, in few calls."""

import gc
import os
import sys
from collections import Counter

import h5py
import numpy as np
import pytest
import scipy.io
import zarr

import scidata
from scidata.errors import CorruptDataError, MissingChunkError, SourceChangedError
from scidata.read import Job
from scidata.sources.access import files as access

NUM = 12
DATA = {name: np.random.default_rng(k).normal(size=(NUM, 10, 14)).astype("f4") for k, name in enumerate("uv")}


def write_zarr(path, chunks, codec, shards=None, fill=NUM):
    codecs = {"lz4": zarr.codecs.BloscCodec(cname="lz4"), "crc": zarr.codecs.Crc32cCodec(), "raw": None}
    group = zarr.open_group(path, mode="w")
    for name, values in DATA.items():
        array = group.create_array(
            name, shape=values.shape, dtype="f4", chunks=chunks, shards=shards,
            dimension_names=("time", "y", "x"), compressors=codecs[codec],
        )  # fmt: skip
        array[:fill] = values[:fill]
    return path


def write_hdf5(path, chunks, codec):
    with h5py.File(path, "w") as file:
        for name, values in DATA.items():
            options = {} if codec == "raw" else {"compression": "gzip", "shuffle": True, "fletcher32": True}
            dset = file.create_dataset(name, data=values, chunks=chunks, **options)
            dset.dims[0].label = "time"
    return path


def write_netcdf3(path, record):
    with scipy.io.netcdf_file(path, "w", version=2) as file:
        for dim, size in (("time", None if record else NUM), ("y", 10), ("x", 14)):
            file.createDimension(dim, size)
        for name, values in DATA.items():
            file.createVariable(name, "f4", ("time", "y", "x"))[:] = values
    return path


STORES = {
    "a step a chunk": lambda p: write_zarr(f"{p}.zarr", (1, 10, 14), "lz4"),
    "raw": lambda p: write_zarr(f"{p}.zarr", (1, 10, 14), "raw"),
    "checksums": lambda p: write_zarr(f"{p}.zarr", (1, 10, 14), "crc"),
    "steps": lambda p: write_zarr(f"{p}.zarr", (5, 10, 14), "lz4"),
    "raw steps": lambda p: write_zarr(f"{p}.zarr", (5, 10, 14), "raw"),
    "tiles": lambda p: write_zarr(f"{p}.zarr", (2, 4, 6), "lz4"),
    "raw tiles": lambda p: write_zarr(f"{p}.zarr", (2, 4, 6), "raw"),
    "shards": lambda p: write_zarr(f"{p}.zarr", (1, 5, 14), "lz4", shards=(4, 10, 14)),
    "hdf5": lambda p: write_hdf5(f"{p}.h5", (1, 10, 14), "gzip"),
    "raw hdf5": lambda p: write_hdf5(f"{p}.h5", (3, 10, 14), "raw"),
    "hdf5 tiles": lambda p: write_hdf5(f"{p}.h5", (1, 4, 14), "gzip"),
    "contiguous hdf5": lambda p: write_hdf5(f"{p}.h5", None, "raw"),
    "netcdf 3 records": lambda p: write_netcdf3(f"{p}.nc", record=True),
    "netcdf 3": lambda p: write_netcdf3(f"{p}.nc", record=False),
}


@pytest.mark.parametrize("steps", [(0,), (0, 1), (0, 3), (-1, 0, 1, 2)])
@pytest.mark.parametrize("store", STORES)
def test_the_same_values_and_plans(store, steps, tmp_path):
    path = STORES[store](tmp_path / "x")
    options = {
        "sample_dim": "time",
        "steps": steps,
        "pool_bytes": 0,
        "isel": {1: slice(1, 9), 2: slice(None, None, -2)},
    }
    ds, alone = (scidata.open_dataset(path, **options) for _ in range(2))
    for order in (range(len(ds)), [5, 0, 3, 3, len(ds) - 1]):
        for i in order:
            sample, first = ds[i], i - min(0, *steps)
            for name, values in DATA.items():
                expected = values[[first + step for step in steps], 1:9, ::-2]
                np.testing.assert_array_equal(sample[name], expected if len(steps) > 1 else expected[0])
    for i in range(len(ds)):  # of which none was read
        assert repr(ds.plan(i)) == repr(alone.plan(i))
        for mine, others in zip(ds.plan(i).fields.values(), alone.plan(i).fields.values(), strict=True):
            assert [plan.to_json() for plan in mine] == [plan.to_json() for plan in others]


def moved(monkeypatch):
    """Count the reads whose tables were another's."""
    found, own = [], Job.moved

    def counted(self, *args):
        job = own(self, *args)
        found.append(job is not None)
        return job

    monkeypatch.setattr(Job, "moved", counted)
    return found


@pytest.mark.parametrize("store", [name for name in STORES if name not in ("shards", "hdf5 tiles")])
def test_all_but_the_first_of_a_kind_are_like_others(store, tmp_path, monkeypatch):
    found, path = moved(monkeypatch), STORES[store](tmp_path / "x")
    ds = scidata.open_dataset(path, sample_dim="time", pool_bytes=0)
    for i in range(len(ds)):
        ds[i]
    kinds = {"steps": 5, "tiles": 2}.get(store, 1)
    assert sum(found) == len(found) == 2 * NUM - kinds  # the second field is like the first


def test_errors_name_the_chunk(tmp_path):
    path = write_zarr(f"{tmp_path}/x.zarr", (1, 10, 14), "lz4", fill=NUM - 1)
    ds = scidata.open_dataset(path, pool_bytes=0)
    for i in (0, 1):
        ds[i]
    with open(f"{path}/u/c/3/0/0", "r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 8)
    os.truncate(f"{path}/u/c/4/0/0", 9)
    os.remove(f"{path}/u/c/5/0/0")
    with pytest.raises(CorruptDataError, match=r"field 'u', chunk \(3, 0, 0\)"):
        ds[3]
    with pytest.raises(CorruptDataError, match=r"chunk \(4, 0, 0\)"):
        ds[4]
    for i in (5, NUM - 1):
        with pytest.raises(MissingChunkError, match=rf"field 'u', chunk \({i}, 0, 0\)"):
            ds[i]
    ds[6]
    write_zarr(path, (1, 10, 14), "raw")
    with pytest.raises(SourceChangedError):
        ds[7]


@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_fields_are_not_like_one_whose_first_chunk_is_damaged(codec, tmp_path):
    path = write_zarr(f"{tmp_path}/x.zarr", (1, 10, 14), codec)
    with open(f"{path}/u/c/0/0/0", "r+b") as file:
        file.truncate(os.path.getsize(file.name) + 200_000)
    ds = scidata.open_dataset(path, pool_bytes=0)
    for _ in range(2):
        with pytest.raises(CorruptDataError, match="'u'"):
            ds[0]
        for i in range(1, NUM):
            for name, values in DATA.items():
                np.testing.assert_array_equal(ds[i][name], values[i])


def test_reader_threads_that_plan_the_first_samples_at_once(tmp_path):
    path = write_zarr(f"{tmp_path}/x.zarr", (1, 10, 14), "lz4")
    for _ in range(20):
        ds = scidata.open_dataset(path, pool_bytes=0)
        for sample in scidata.DataLoader(ds, None, num_workers=4, prefetch_factor=8):
            for name, values in DATA.items():
                np.testing.assert_array_equal(sample[name], values[sample.index])


@pytest.fixture(params=["links refused by the system", "by an older one's word"])
def linux(request, monkeypatch):
    if request.param != "links refused by the system":
        monkeypatch.setattr(access, "_syscall", None)


def test_links_out_of_the_store_are_refused(tmp_path, linux):
    path = write_zarr(f"{tmp_path}/x.zarr", (1, 10, 14), "raw")
    for chunk, folder in ((4, ""), (5, "/0"), (6, "/0/0")):
        place, other = f"{path}/u/c/{chunk}{folder}", f"{tmp_path}/other{chunk}"
        os.rename(place, other)
        os.symlink(other, place)
    ds = scidata.open_dataset(path, pool_bytes=0)
    for i in range(4):
        ds[i]
    for i in (4, 5, 6):
        with pytest.raises(scidata.errors.RefusedError, match="out of the store"):
            ds[i]
    os.remove(f"{path}/u/c/7/0/0")
    os.mkfifo(f"{path}/u/c/7/0/0")
    with pytest.raises(scidata.errors.RefusedError, match="not a regular file"):
        ds[7]


def test_links_inside_the_store_are_read(tmp_path, linux):
    path = write_zarr(f"{tmp_path}/x.zarr", (1, 10, 14), "raw")
    for chunk, folder in ((4, ""), (5, "/0"), (6, "/0/0")):
        place, other = f"{path}/u/c/{chunk}{folder}", f"{path}/u/other{chunk}"
        os.rename(place, other)
        os.symlink(other, place)
    os.symlink(path, f"{tmp_path}/link.zarr")
    for store in (path, f"{tmp_path}/link.zarr"):
        ds = scidata.open_dataset(store, pool_bytes=0)
        for i in range(NUM):
            np.testing.assert_array_equal(ds[i]["u"], DATA["u"][i])


def test_a_chunk_that_is_changed_after_its_first_read_began_is_noticed(tmp_path, monkeypatch):
    path = write_zarr(f"{tmp_path}/x.zarr", (1, 10, 14), "raw")
    ds = scidata.open_dataset(path, pool_bytes=0)
    for i in range(2):
        ds[i]
    own = access.FileCache.read_at_once

    def read(self, name, *args):
        if name.endswith("u/c/3/0/0"):
            os.utime(name, (1, 1))
        return own(self, name, *args)

    monkeypatch.setattr(access.FileCache, "read_at_once", read)
    ds[3]  # as it was when it was opened
    with pytest.raises(SourceChangedError, match="u/c/3/0/0"):
        ds[3]


def test_system_calls_of_first_and_later_epochs(tmp_path, monkeypatch):
    ds = scidata.open_dataset(STORES["a step a chunk"](tmp_path / "x"), pool_bytes=0, num_threads=1)
    buffers = {name: np.empty(spec.shape, spec.dtype) for name, spec in ds.buffer_specs().items()}
    for i in range(3):  # the tables are made
        ds.read_into(i, buffers)
    found = Counter()

    def counted(name, own):
        def call(*args, **options):
            found[name] += 1
            return own(*args, **options)

        return call

    for name in ("open", "preadv", "stat", "lstat", "fstat", "readlink", "scandir"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    monkeypatch.setattr(access, "open_unlinked", counted("open_unlinked", access.open_unlinked))
    ds.read_into(5, buffers)  # of each chunk: stat is that of its array's metadata
    assert found == {"open_unlinked": 2, "fstat": 2, "preadv": 2, "stat": 2}
    found.clear()
    ds.read_into(5, buffers)
    assert found == {"preadv": 2, "fstat": 2}


def test_reads_of_a_file_that_is_described_by_the_bytes_of_another(tmp_path, monkeypatch):
    paths = [f"{tmp_path}/{k}.h5" for k in range(8)]
    for path in paths:
        write_hdf5(path, (1, 10, 14), "gzip")
    ds = scidata.open_dataset(paths, sample_dim="time", pool_bytes=0, num_threads=1)
    ds[0], ds[2 * NUM]
    found, own = Counter(), os.preadv

    def preadv(*args):
        found["preadv"] += 1
        return own(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    ds[3 * NUM]  # of each field: the index of its chunks, and one of them
    assert found["preadv"] == 4
    ds[3 * NUM + 1]
    assert found["preadv"] == 6


def calls(function):
    """Count calls of Python that a function makes in this thread, but for those of destructors."""
    found = Counter()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_name != "__del__":  # of files that other tests have opened
            found[frame.f_code] += 1

    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found.total()


@pytest.mark.parametrize(
    ("store", "opening", "first", "later"),  # calls a sample of two fields
    [
        ("a step a chunk", 610, 109, 71),
        ("raw", 640, 77, 39),
        ("steps", 740, 119, 79),
        ("shards", 1215, 245, 75),
        ("hdf5", 740, 126, 104),
        ("hdf5 tiles", 1115, 344, 206),
        ("contiguous hdf5", 540, 56, 34),
        ("netcdf 3 records", 565, 90, 70),
    ],
)
def test_calls_of_first_and_later_epochs(store, opening, first, later, tmp_path):
    path = STORES[store](tmp_path / "x")
    for _ in range(2):  # what a process does once comes before
        ds = scidata.open_dataset(path, sample_dim="time", pool_bytes=0, num_threads=1)
        buffers = {name: np.empty(spec.shape, spec.dtype) for name, spec in ds.buffer_specs().items()}
        took = [[calls(lambda i=i, ds=ds, out=buffers: ds.read_into(i, out)) for i in range(NUM)] for _ in range(3)]
    usual = sorted(took[0])[NUM // 2]  # of the first samples, and of those that begin a shard, tables are made
    assert took[0][0] <= opening
    assert usual <= first
    assert max(took[1] + took[2]) <= later
    loader = scidata.DataLoader(ds, None, num_workers=0)  # which adds its own, as many to any sample
    assert len(list(loader)) == NUM
    samples = iter(loader)
    assert sorted([calls(lambda: next(samples)) for _ in range(NUM)])[NUM // 2] <= later + 72


def test_files_of_a_series_are_alike_but_for_those_that_are_packed_or_cut_otherwise(tmp_path, monkeypatch):
    found, values = moved(monkeypatch), DATA["u"]
    for i, day in enumerate(values):
        with h5py.File(f"{tmp_path}/{i:02d}.h5", "w") as file:
            options = {"compression": "gzip", "compression_opts": 1 + (i == 7)}
            scale = 0.5 if i in (4, 5) else 0.25
            packed = np.round(day[None] / scale).astype("i2")
            dset = file.create_dataset("u", data=packed, chunks=(1, 5 if i == 9 else 10, 14), **options)
            dset.attrs["scale_factor"] = np.float32(scale)
            dset.dims[0].label = "time"
    ds = scidata.open_dataset(f"{tmp_path}/*.h5", sample_dim="time", pool_bytes=0)
    for i in [*range(NUM), *reversed(range(NUM))]:
        scale = 0.5 if i in (4, 5) else 0.25
        np.testing.assert_array_equal(ds[i]["u"], np.round(values[i] / scale).astype("i2") * np.float32(scale))
    assert (sum(found), len(found)) == (NUM - 4, NUM - 4)


def test_an_archive_beyond_the_plans_that_are_kept_keeps_no_more_and_is_read_in_few_calls(tmp_path):
    ds = scidata.open_dataset(STORES["a step a chunk"](tmp_path / "x"), pool_bytes=0, num_threads=1)
    jobs = ds.reader.planner._jobs
    jobs.max_size = 15_000  # of some of the samples
    buffers = {name: np.empty(spec.shape, spec.dtype) for name, spec in ds.buffer_specs().items()}
    took = [[calls(lambda i=i, ds=ds, out=buffers: ds.read_into(i, out)) for i in range(NUM)] for _ in range(2)]
    assert 2 < len(jobs) < NUM
    assert jobs.size <= jobs.max_size
    assert len(ds.reader.planner.part_of({}).firsts) == 1
    assert took[1][0] < took[1][-1] <= 100
