"""Objects behind URLs: every format from a real S3 server equals the local read; failures, latency, requests."""

from __future__ import annotations

import errno
import gc
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

import scidata
from scidata.core.types import Segment
from scidata.core.urls import url_of
from scidata.errors import ChecksumError, CorruptDataError, MissingChunkError, ShortReadError, SourceChangedError
from scidata.plan import spans
from scidata.plan.array import chunks_needed, plan_array
from scidata.read import read_plan
from scidata.sources import open_source
from scidata.sources.access import load
from scidata.sources.access import retry as _retry
from scidata.sources.access.files import files
from scidata.sources.access.url_file import UrlFile
from tests.unit._s3 import BUCKET

VALUES = np.random.default_rng(0).normal(size=(4, 16, 24)).astype("f4")
OTHERS = np.arange(4 * 16 * 24, dtype="i4").reshape(4, 16, 24)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(_retry, "RETRY", _retry.Retry(attempts=6, first_wait=0.001))


@pytest.fixture
def wire(s3):
    yield s3.wire
    s3.wire.fault, s3.wire.latency = (lambda environ: None), 0.0


def write_zarr(path, **options):
    group = zarr.open_group(path, mode="w", zarr_format=options.pop("zarr_format", 3))
    shape = {"dimension_names": ("time", "lat", "lon")} if group.metadata.zarr_format == 3 else {}
    for name, values in (("u", VALUES), ("v", OTHERS)):
        array = group.create_array(name, shape=values.shape, dtype=values.dtype, **options, **shape)
        array[:] = values
        if not shape:
            array.attrs["_ARRAY_DIMENSIONS"] = ["time", "lat", "lon"]


def write_hdf5(path, **options):
    with h5py.File(path, "w") as f:
        for name, values in (("u", VALUES), ("v", OTHERS)):
            f.create_dataset(name, data=values, **options)
            for i, dim in enumerate(("time", "lat", "lon")):
                f[name].dims[i].label = dim


def write_netcdf(path, kind):
    netcdf4 = pytest.importorskip("netCDF4")
    with netcdf4.Dataset(path, "w", format=kind) as f:
        for dim, n in zip(("time", "lat", "lon"), VALUES.shape, strict=True):
            f.createDimension(dim, n)
        for name, values in (("u", VALUES), ("v", OTHERS)):
            f.createVariable(name, values.dtype, ("time", "lat", "lon"))[:] = values


CHUNKED = {"chunks": (1, 5, 24)}
FORMATS = {
    "zarr2": lambda p: write_zarr(p, **CHUNKED, zarr_format=2),
    "zarr3 raw": lambda p: write_zarr(p, **CHUNKED, compressors=None),
    "zarr3 zstd": lambda p: write_zarr(p, **CHUNKED),
    "zarr3 blosc": lambda p: write_zarr(p, **CHUNKED, compressors=zarr.codecs.BloscCodec(cname="lz4")),
    "zarr3 sharded": lambda p: write_zarr(p, chunks=(1, 4, 24), shards=(2, 8, 24)),
    "hdf5": lambda p: write_hdf5(p, chunks=(1, 5, 24), compression="gzip", shuffle=True),
    "hdf5 contiguous": write_hdf5,
    "hdf5 by its library": lambda p: write_hdf5(p, chunks=(1, 5, 24), compression="lzf", scaleoffset=None),
    "netcdf4": lambda p: write_netcdf(p, "NETCDF4"),
    "netcdf3": lambda p: write_netcdf(p, "NETCDF3_CLASSIC"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_equal_local_reads(tmp_path, s3, wire, kind):
    FORMATS[kind](tmp_path / "data")
    url = s3.put(tmp_path / "data", f"formats/{kind.replace(' ', '-')}")
    options = {"sample_dim": "time", "isel": {"lat": slice(13, 2, -2)}, "num_threads": 2}
    local = scidata.open_dataset(tmp_path / "data", **options)
    remote = scidata.open_dataset(url, **options, storage_options=s3.options)
    assert len(local) == len(remote) == 4
    for i in (0, 3):
        wire.forget()
        plan = remote.plan(i)
        there, here = remote[i], local[i]
        assert sorted(there) == sorted(here)
        for name in here:
            assert there[name].dtype == here[name].dtype
            assert there[name].numpy().tobytes() == here[name].numpy().tobytes()
            assert np.array_equal(here[name].numpy(), {"u": VALUES, "v": OTHERS}[name][i, 13:2:-2])
        if plan.exact and i == 3 and "sharded" not in kind:
            assert len(wire.gets) == plan.num_reads  # not one request more than planned
    assert remote.reader.fingerprint() == local.reader.fingerprint()
    again = pickle.loads(pickle.dumps(remote))  # as a spawned worker gets it
    assert np.array_equal(again[1]["u"].numpy(), VALUES[1, 13:2:-2])


def test_no_garbage_is_collected_while_hdf5_reads(tmp_path, s3, wire):
    """The end of an h5py object, on the thread that brings the bytes, would wait for the read that waits for them."""
    write_hdf5(tmp_path / "data", chunks=(1, 4, 24))
    with h5py.File(tmp_path / "data", "a") as file:
        file["w"] = np.zeros(100_000)  # more than the first read brings, which is made before HDF5 begins
    path = url_of(s3.put(tmp_path / "data", "garbage"), s3.options)
    while_read = []
    wire.fault = lambda environ: while_read.append((environ.get("HTTP_RANGE", ""), gc.isenabled())) and None
    for enabled in (True, False):
        try:
            (gc.enable if enabled else gc.disable)()
            with h5py.File(UrlFile(path), "r") as file:
                assert np.array_equal(file["u"][2], VALUES[2])
                assert not file["w"][:].any()
            assert gc.isenabled() == enabled
            with pytest.raises(OSError, match=r"unable to open|file signature"):
                h5py.File(UrlFile(url_of(s3.put(Path(__file__), "no-hdf5"), s3.options)), "r")
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert {on for span, on in while_read if span and not span.startswith("bytes=0-")} == {False}
    files().read(path, 0, 8)
    assert while_read[-1] == ("bytes=0-7", True)


def test_partitioned_store(tmp_path, s3, wire):
    rng = np.random.default_rng(1)
    with h5py.File(tmp_path / "cloud.h5", "w") as f:
        f["x"], f["y"], f["p"] = rng.normal(size=(3, 5000))
    scidata.partition(tmp_path / "cloud.h5", tmp_path / "store", kind="points")
    url = s3.put(tmp_path / "store", "store")
    local = scidata.open_dataset(tmp_path / "store")
    remote = scidata.open_dataset(url, storage_options=s3.options)
    here, there = local[0], remote[0]
    for name in here:
        assert there[name].numpy().tobytes() == here[name].numpy().tobytes()
    assert np.array_equal(there.original_id("point").numpy(), here.original_id("point").numpy())


# -- latency -----------------------------------------------------------------------------------------------------


def planned(url, options, selection, name="u"):
    source = open_source(url, storage_options=options)
    layout = source.arrays[name]
    refs = source.locate(layout, chunks_needed(layout, selection))
    shape = tuple(sum(s.count for s in dim) for dim in selection)
    return source, plan_array(layout, selection, refs, out_shape=shape)


@pytest.mark.parametrize("shards", [None, (128, 64)])
def test_many_ranges_are_in_flight_at_once(tmp_path, s3, wire, monkeypatch, shards):
    data = np.random.default_rng(0).integers(0, 99, (128, 64)).astype("u1")
    group = zarr.open_group(tmp_path / "s", mode="w")
    group.create_array("u", shape=(128, 64), chunks=(1, 64), shards=shards, dtype="u1", compressors=None)[:] = data
    url = s3.put(tmp_path / "s", f"many-{shards}")
    monkeypatch.setattr(spans, "MAX_GAP_URL", 0)  # or one read would take a small shard whole
    every_other = ((Segment(start=0, count=64, step=2),), (Segment(start=0, count=64),))
    source, plan = planned(url, s3.options, every_other)
    assert plan.num_reads == 64
    out = np.empty((64, 64), "u1")
    wire.latency = 0.3  # longer than a busy machine takes to ask
    wire.forget()
    stats = read_plan(plan, out, source=source)  # on one thread
    assert np.array_equal(out, data[::2])
    assert stats.num_reads == len(wire.gets) == 64
    assert wire.most >= 16  # a few round trips: 64 one after the other would never meet


def test_bytes_in_flight_are_bounded(tmp_path, s3, wire, monkeypatch):
    data = np.random.default_rng(0).integers(0, 99, (40, 1000)).astype("u1")
    zarr.open_group(tmp_path / "s", mode="w").create_array(
        "u", shape=data.shape, chunks=(1, 1000), dtype="u1", compressors=None
    )[:] = data
    url = s3.put(tmp_path / "s", "bounded")
    source, plan = planned(url, s3.options, ((Segment(start=0, count=40),), (Segment(start=0, count=1000),)))
    monkeypatch.setattr(load, "MAX_BYTES", 3000)
    wire.latency = 0.01
    wire.forget()
    out = np.empty(data.shape, "u1")
    read_plan(plan, out, source=source)
    assert np.array_equal(out, data)
    assert wire.most <= 3


# -- failures ----------------------------------------------------------------------------------------------------


class Failing:
    """Fails the first ``times`` GETs of every object under a path in one way."""

    def __init__(self, fault, times, under):
        self.fault, self.times, self.under, self.seen = fault, times, under, {}

    def __call__(self, environ):
        key = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE")
        if self.under not in environ["PATH_INFO"]:
            return None
        self.seen[key] = self.seen.get(key, 0) + 1
        return self.fault if self.seen[key] <= self.times else None


@pytest.mark.parametrize("fault", ["503", "slowdown", "reset", "cut"])
@pytest.mark.parametrize("kind", ["zarr3 sharded", "hdf5"])
def test_transient_failures_pass(tmp_path, s3, wire, caplog, fault, kind):
    FORMATS[kind](tmp_path / "data")
    name = f"failing/{fault}/{kind.replace(' ', '-')}"
    url = s3.put(tmp_path / "data", name)
    wire.fault = Failing(fault, 2, name)
    with caplog.at_level(logging.WARNING, "scidata"):
        ds = scidata.open_dataset(url, storage_options=s3.options)  # metadata, too
        assert np.array_equal(ds[2]["u"].numpy(), VALUES[2])
    said = [r.getMessage() for r in caplog.records if r.name == "scidata"]
    assert said
    assert all(m.startswith(url) and "attempt 1 of 6" in m for m in said)


@pytest.mark.parametrize("fault", ["503", "reset", "cut"])
def test_failures_that_last_say_how_often_it_was_tried(tmp_path, s3, wire, fault):
    FORMATS["zarr3 raw"](tmp_path / "data")
    url = s3.put(tmp_path / "data", f"lasting-{fault}")
    ds = scidata.open_dataset(url, storage_options=s3.options)
    ds.plan(0)
    wire.forget()
    wire.fault = Failing(fault, 99, "/c/")
    with pytest.raises(OSError, match=rf"{url}/[uv]/c/.*\(tried 6 times in") as caught:
        ds[0]
    assert not isinstance(caught.value, FileNotFoundError | scidata.errors.SciDataError)
    per_object = {}
    for got in wire.gets:
        per_object[got] = per_object.get(got, 0) + 1
    # nobody below retries as well, but for aiohttp, which asks once more where a kept connection was closed
    assert max(per_object.values()) in ((6, 12) if fault == "reset" else (6,))


def test_what_is_wrong_is_not_tried_again(tmp_path, s3, wire):
    FORMATS["zarr3 sharded"](tmp_path / "data")
    url = s3.put(tmp_path / "data", "wrong")
    ds = scidata.open_dataset(url, storage_options=s3.options)
    ds.plan(0)
    client = s3.client()
    key = "wrong/u/c/0/0/0"
    body = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    client.put_object(Bucket=BUCKET, Key=key, Body=body[:50])
    wire.forget()
    with pytest.raises(SourceChangedError, match=r"u/c/0/0/0: was replaced"):
        ds[0]
    assert len(wire.gets) == len(set(wire.gets))  # each range asked for once
    wire.forget()
    with pytest.raises(CorruptDataError, match=r"u/c/0/0/0: shard has 50 bytes.*truncated"):
        scidata.open_dataset(url, storage_options=s3.options)[0]
    chunks = [got for got in wire.gets if "/u/c/" in got[0]]  # of other objects there are an index and a chunk
    assert len(chunks) == len(set(chunks))

    client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(MissingChunkError, match=r"field 'u', chunk \(0, 0, 0\)"):
        ds[0]

    damaged = bytearray(body)
    damaged[-3] ^= 1  # in the index
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(damaged))
    wire.forget()
    with pytest.raises(ChecksumError):
        scidata.open_dataset(url, storage_options=s3.options)[0]

    wire.fault = Failing("403", 99, "/v/c/")
    client.put_object(Bucket=BUCKET, Key=key, Body=body)
    wire.forget()
    with pytest.raises(PermissionError, match="storage_options"):
        scidata.open_dataset(url, fields="v", storage_options=s3.options)[0]
    assert len([path for path in wire.heads if "/v/c/" in path]) <= 2  # the chunks' files, each asked for once


def test_an_outage_is_not_taken_for_absent_chunks(tmp_path, s3, wire):
    FORMATS["zarr3 raw"](tmp_path / "data")
    url = s3.put(tmp_path / "data", "outage")
    ds = scidata.open_dataset(url, storage_options=s3.options, allow_missing=True)
    wire.fault = Failing("503", 99, "/c/")
    with pytest.raises(OSError, match="tried 6 times"):
        ds[0]


# -- local files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET])
def test_local_reads_try_again_with_a_new_descriptor(tmp_path, monkeypatch, caplog, number):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(100)))
    files().forget(str(path))
    preadv, broken = os.preadv, set()

    def failing(fd, buffers, offset):
        if len(broken) < 2:
            broken.add((fd, len(broken)))
            raise OSError(number, os.strerror(number))
        return preadv(fd, buffers, offset)

    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda p, *args: opened.append(p) or real(p, *args))
    monkeypatch.setattr(os, "preadv", failing)
    assert files().read(str(path), 10, 5) == bytes(range(10, 15))
    assert opened.count(str(path)) == 3
    (record,) = [r for r in caplog.records if r.name == "scidata"]
    assert str(path) in record.getMessage()
    assert os.strerror(number) in record.getMessage()

    broken.clear()
    monkeypatch.setattr(os, "preadv", lambda *args: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    with pytest.raises(OSError, match=r"a\.bin.*tried 6 times") as caught:
        files().read(str(path), 10, 5)
    assert caught.value.errno == number


def test_local_permission_and_absence_are_final(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(FileNotFoundError):
        files().read(str(tmp_path / "nothing"), 0, 1)
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ShortReadError):
        files().read(str(tmp_path / "short"), 0, 5)
    assert not slept


def test_waits_are_bounded():
    retry = _retry.Retry(attempts=100, first_wait=0.5, max_wait=2.0, total_wait=10.0)
    attempts, waits = _retry.Attempts(retry, "x"), []
    while (wait := attempts.wait_after(OSError(errno.EIO, "broken"), "broken")) is not None:
        waits.append(wait)
    assert sum(waits) <= 10
    assert max(waits) <= 2
    assert 5 <= len(waits) < 20


def test_a_passing_failure_of_hdf5_metadata(tmp_path, monkeypatch):
    write_hdf5(tmp_path / "a.h5")
    real, failed = h5py.File, []

    def failing(*args, **kwargs):
        if len(failed) < 2:
            failed.append(args)
            raise OSError(errno.EIO, "Unable to synchronously open file (file read failed: errno = 5)")
        return real(*args, **kwargs)

    monkeypatch.setattr(h5py, "File", failing)
    assert sorted(open_source(str(tmp_path / "a.h5")).arrays) == ["u", "v"]
    assert len(failed) == 2


def test_options_of_a_local_path_are_refused(tmp_path):
    with pytest.raises(scidata.errors.ConfigError, match="storage_options"):
        url_of(str(tmp_path), {"anon": True})


_MANY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import h5py, numpy as np, os, zarr
from scidata.sources.access.files import files
from scidata.sources.access.url_file import UrlFile
from scidata.grids.series import Series
from scidata.read.arrays import read_array
from scidata.sources import open_source
source = open_source(sys.argv[1] + "/z")
values = read_array(source, source.arrays["u"])
assert np.array_equal(values, np.arange(3000) % 251), values
for _ in range(2):  # from the cache, and anew
    assert files().read(sys.argv[1] + "/z/u/c/7", 0, 1) == bytes([7])
series = Series([open_source(f"{sys.argv[1]}/h/{i:03}.h5") for i in range(150)], ["u"], "t")
for i in range(150):
    assert read_array(series.sources[i], series.sources[i].arrays["u"])[0, 0] == i
# others take the rest
spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(128 - len(os.listdir("/proc/self/fd")))]
assert files().read(sys.argv[1] + "/z/u/c/9", 0, 1) == bytes([9])
print("done")
"""


def test_thousands_of_files_under_a_low_limit(tmp_path):
    array = zarr.open_group(tmp_path / "z", mode="w").create_array(
        "u", shape=(3000,), chunks=(1,), dtype="u1", compressors=None
    )
    array[:1] = 1  # makes the folder
    for i in range(3000):
        (tmp_path / f"z/u/c/{i}").write_bytes(bytes([i % 251]))
    (tmp_path / "h").mkdir()
    for i in range(150):
        with h5py.File(tmp_path / f"h/{i:03}.h5", "w") as f:
            f["u"] = np.full((1, 4), i)
            f["u"].dims[0].label, f["u"].dims[1].label = "t", "x"
    done = subprocess.run(
        [sys.executable, "-c", _MANY, str(tmp_path)], check=False, capture_output=True, text=True, timeout=150
    )
    assert done.stdout == "done\n", done.stderr
