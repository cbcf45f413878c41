"""Objects that are replaced while they are read: noticed at the next request for them, by no request more."""

from __future__ import annotations

import contextlib
import http.server
import pickle
import threading

import h5py
import numpy as np
import pytest
import zarr

import scidata
from scidata.core.urls import Seen, Version, url_of
from scidata.errors import SourceChangedError, UnsupportedFormatError
from scidata.sources.access import retry
from scidata.sources.access.files import files
from scidata.sources.access.remote import request
from tests.unit._s3 import BUCKET, serve
from tests.unit.sources._changed_objects import VERSIONED, Handler

SHAPE = (6, 64, 96)


def values(version):
    return (np.arange(np.prod(SHAPE), dtype="f4").reshape(SHAPE) + 1000 * version) % 9973


def write_hdf5(path, version):
    with h5py.File(path, "w") as file:
        data = file.create_dataset("u", data=values(version), chunks=(1, 32, 96))
        for dim, label in zip(data.dims, ("time", "y", "x"), strict=True):
            dim.label = label


def write_netcdf3(path, version):
    netcdf4 = pytest.importorskip("netCDF4")
    with netcdf4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
        for dim, n in zip(("time", "y", "x"), SHAPE, strict=True):
            file.createDimension(dim, n)
        file.createVariable("u", "f4", ("time", "y", "x"))[:] = values(version)


def write_zarr(path, version, **options):
    group = zarr.open_group(path, mode="w")
    array = group.create_array("u", shape=SHAPE, dtype="f4", dimension_names=("time", "y", "x"), **options)
    array[:] = values(version)
    zarr.consolidate_metadata(path)


FORMATS = {
    "hdf5": write_hdf5,
    "netcdf3": write_netcdf3,
    "zarr": lambda p, v: write_zarr(p, v, chunks=(6, 32, 96), compressors=None),
    "zarr sharded": lambda p, v: write_zarr(p, v, chunks=(1, 16, 96), shards=(6, 32, 96), compressors=None),
}


class Web:
    """A web server, and how an object is put there."""

    options = None

    def __init__(self, port):
        self.root = f"http://127.0.0.1:{port}"

    def put(self, path, name, version):
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            key = name if path.is_file() else f"{name}/{file.relative_to(path).as_posix()}"
            Handler.objects[f"/{key}"] = file.read_bytes(), version
        Handler.asked.clear()
        return f"{self.root}/{name}"

    def asked(self):
        return list(Handler.asked)


class S3:
    """A bucket of S3, with versions or without."""

    def __init__(self, server, bucket):
        self.server, self.bucket, self.options = server, bucket, server.options

    def put(self, path, name, version):
        client = self.server.client()
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            key = name if path.is_file() else f"{name}/{file.relative_to(path).as_posix()}"
            client.put_object(Bucket=self.bucket, Key=key, Body=file.read_bytes())
        self.server.wire.forget()
        return f"s3://{self.bucket}/{name}"

    def asked(self):
        wire = self.server.wire
        return [("GET", path) for path, _ in wire.gets] + [("HEAD", path) for path in wire.heads]


@pytest.fixture(scope="module")
def s3():
    with serve() as server:
        server.client().create_bucket(Bucket=VERSIONED)
        server.client().put_bucket_versioning(Bucket=VERSIONED, VersioningConfiguration={"Status": "Enabled"})
        yield server


@pytest.fixture(scope="module")
def web():
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=3, first_wait=0.001))


@pytest.fixture(params=["s3", "etag", "time"])
def place(request):
    if request.param == "s3":
        return S3(request.getfixturevalue("s3"), BUCKET)
    Handler.tells = request.param
    return Web(request.getfixturevalue("web"))


def opened(url, place):
    return scidata.open_dataset(url, sample_dim="time", storage_options=place.options, num_threads=1)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_replaced_object_is_an_error_and_never_a_mixture(tmp_path, place, kind, request):
    name = f"replaced-{kind.replace(' ', '-')}-{request.node.callspec.params['place']}"
    FORMATS[kind](tmp_path / "old", 0)
    FORMATS[kind](tmp_path / "new", 1)
    url = place.put(tmp_path / "old", name, 0)
    ds = opened(url, place)
    assert np.array_equal(ds[0]["u"].numpy(), values(0)[0])
    before = place.asked()
    assert np.array_equal(ds[1]["u"].numpy(), values(0)[1])
    sent = pickle.dumps(ds)  # as a worker gets it
    place.put(tmp_path / "new", name, 1)
    for index in (2, 0):
        with pytest.raises(SourceChangedError, match=r"was replaced while it was read.*open the data set again"):
            ds[index]
    assert len(place.asked()) <= 2 * len(before)  # not tried again
    with pytest.raises(SourceChangedError, match="was replaced"):
        pickle.loads(sent)[3]
    assert np.array_equal(opened(url, place)[2]["u"].numpy(), values(1)[2])


@pytest.mark.parametrize("kind", FORMATS)
def test_no_request_more(tmp_path, place, kind, request):
    """An epoch asks for each range once, and for nothing else but what opening found out."""
    FORMATS[kind](tmp_path / "data", 0)
    name = f"counted-{kind.replace(' ', '-')}-{request.node.callspec.params['place']}"
    ds = opened(place.put(tmp_path / "data", name, 0), place)
    ds[0]
    plans = [ds.plan(index) for index in range(1, 6)]
    place.put(tmp_path / "data", name, 0)  # the same content: no error, and the count begins
    for index in range(1, 6):
        assert np.array_equal(ds[index]["u"].numpy(), values(0)[index])
    asked = place.asked()
    assert not [path for method, path in asked if method == "HEAD"]
    if kind != "zarr sharded":
        assert len(asked) == sum(plan.num_reads for plan in plans)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_versioned_bucket_goes_on_with_the_version_that_was_seen(tmp_path, s3, kind):
    place, name = S3(s3, VERSIONED), f"pinned-{kind.replace(' ', '-')}"
    FORMATS[kind](tmp_path / "old", 0)
    FORMATS[kind](tmp_path / "new", 1)
    url = place.put(tmp_path / "old", name, 0)
    ds = opened(url, place)
    ds[0]
    ds[1]
    place.put(tmp_path / "new", name, 1)
    for index in (2, 0, 5):
        assert np.array_equal(ds[index]["u"].numpy(), values(0)[index])
    assert np.array_equal(pickle.loads(pickle.dumps(ds))[3]["u"].numpy(), values(0)[3])
    assert np.array_equal(opened(url, place)[2]["u"].numpy(), values(1)[2])
    client = s3.client()
    for old in client.list_object_versions(Bucket=VERSIONED, Prefix=name)["Versions"]:
        if not old["IsLatest"]:
            client.delete_object(Bucket=VERSIONED, Key=old["Key"], VersionId=old["VersionId"])
    with pytest.raises(SourceChangedError, match="seen first, cannot be read"):
        ds[4]


def test_a_shorter_object_was_replaced_and_is_not_truncated(tmp_path, place, request):
    FORMATS["zarr"](tmp_path / "data", 0)
    name = f"shorter-{request.node.callspec.params['place']}"
    url = place.put(tmp_path / "data", name, 0)
    ds = opened(url, place)
    ds[0]
    for file in (tmp_path / "data/u/c").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:100])
    place.put(tmp_path / "data", name, 1)
    with pytest.raises(SourceChangedError, match="was replaced"):
        ds[5]


def test_a_store_of_scidata(tmp_path, place, request):
    name = f"store-{request.node.callspec.params['place']}"
    for version in (0, 1):
        rng = np.random.default_rng(version)
        with h5py.File(tmp_path / "cloud.h5", "w") as file:
            file["x"], file["y"], file["p"] = rng.normal(size=(3, 5000))
        scidata.partition(tmp_path / "cloud.h5", tmp_path / f"store-{version}", kind="points")
    url = place.put(tmp_path / "store-0", name, 0)
    ds = scidata.open_dataset(url, storage_options=place.options)
    first = ds[0]
    place.put(tmp_path / "store-1", name, 1)
    with pytest.raises(SourceChangedError, match="was replaced"):
        ds[0]
    again = scidata.open_dataset(url, storage_options=place.options)[0]
    assert not np.array_equal(again["p"].numpy(), first["p"].numpy())


def test_a_server_that_says_nothing_is_known_by_sizes(tmp_path, web, monkeypatch):
    monkeypatch.setattr(Handler, "tells", "nothing")
    place = Web(web)
    FORMATS["zarr"](tmp_path / "data", 0)
    ds = opened(place.put(tmp_path / "data", "silent", 0), place)
    assert np.array_equal(ds[0]["u"].numpy(), values(0)[0])
    chunk = tmp_path / "data/u/c/0/0/0"
    chunk.write_bytes(chunk.read_bytes() + b"more")
    place.put(tmp_path / "data", "silent", 1)
    with pytest.raises(SourceChangedError, match="size was"):
        ds[1]


def test_a_whole_body_cut_short_is_asked_for_again(web, monkeypatch):
    """By a proxy that ends the body and connection, and says no length: the object's was seen before."""
    Handler.objects["/cut.json"] = b"{" + b" " * 998 + b"}", 0
    monkeypatch.setattr(Handler, "tells", "etag")
    url = url_of(f"http://127.0.0.1:{web}/cut.json")
    assert files().size(url) == 1000
    answer, cut = Handler.answer, []

    def cutting(self, *, body):
        if len(cut) == 2:
            answer(self, body=body)
            return
        cut.append(self.path)
        self.send_response(200)
        self.send_header("ETag", '"0"')
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"{         ")

    monkeypatch.setattr(Handler, "answer", cutting)
    assert request(url, "document", most=1000) == Handler.objects["/cut.json"][0]
    assert len(cut) == 2


@pytest.mark.parametrize("says_length", [True, False])
def test_a_document_that_is_too_large_is_not_read(web, monkeypatch, says_length):
    """As its header says before its body comes, or as soon as more than the limit has come; by one request."""
    Handler.objects["/large.json"] = b" " * 3_000_000, 0
    url = url_of(f"http://127.0.0.1:{web}/large.json")
    answered = []

    def endless(self, *, body):
        answered.append(self.command)
        self.send_response(200)
        if says_length:
            self.send_header("Content-Length", str(1 << 40))
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):  # the reader has gone
            for _ in range(1000):
                self.wfile.write(b" " * 100_000)

    monkeypatch.setattr(Handler, "answer", endless)
    with pytest.raises(
        UnsupportedFormatError, match=r"large\.json: has \d+ bytes, but at most 1000000 of one metadata"
    ):
        request(url, "document", most=1_000_000)
    assert answered == ["GET"]


def test_versions():
    known = Version(size=10, etag='"a"', version="1")
    assert known.differs(Version(size=10, etag='"b"', version="2")) == 'etag was "a" and is "b"'
    assert not known.differs(Version(size=10, etag='"a"', version="2"))  # the same bytes, written again
    assert Version(size=10).differs(Version(size=9, modified="x")) == "size was 10 and is 9"
    seen = Seen()
    assert not seen.changed("x", Version(size=10))
    assert not seen.changed("x", known)
    assert seen.changed("x", Version(size=10, etag='"b"'))  # noticed although the first answer had no ETag
    for i in range(Seen.MAX + 5):
        seen.changed(f"chunk {i}", known)
    assert seen.get("x") is None
    assert seen.get("chunk 5") is not None
    assert len(pickle.dumps(seen)) < 100_000
