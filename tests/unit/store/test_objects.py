"""Partitioned stores behind URLs: meshes, graphs and clouds from a real S3 server and from a plain web server."""

from __future__ import annotations

import functools
import http.server
import logging
import math
import pickle
import threading
import time

import h5py
import numpy as np
import pytest
from scipy.spatial import Delaunay

import scidata
from scidata.errors import ChecksumError, ConfigError, OutputError
from scidata.sources.access import answers, filesystems, load, retry
from scidata.sources.access import remote as requests
from scidata.store.reading.reader import StoreReader
from tests.unit._s3 import BUCKET, serve
from tests.unit.store._objects import Handler

KINDS = ("mesh", "graph", "points")
FAULTS = ("503", "reset", "cut")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    rng = np.random.default_rng(0)
    points = rng.random((900, 2))
    cells = Delaunay(points).simplices
    pairs = np.unique(np.sort(cells[:, [0, 1]], axis=1), axis=0)
    for kind in KINDS:
        with h5py.File(folder / f"{kind}.h5", "w") as file:
            file["points"] = points
            for name in ("u", "v", "w"):
                file[name] = rng.standard_normal((900, 2)).astype("f4")
            if kind == "mesh":
                file["cells"] = cells
            if kind == "graph":
                file["edge_index"] = np.concatenate([pairs, pairs[:, ::-1]]).T
        scidata.partition(str(folder / f"{kind}.h5"), str(folder / kind), kind=kind)
    return folder


class Web:
    """The plain web server, with the parts of the S3 server's that are used here."""

    options: dict | None = None

    def __init__(self, address):
        self.address, self.wire = address, Handler

    def url(self, kind):
        return f"http://{self.address}/{kind}"


class S3:
    def __init__(self, server, stores):
        self.options, self.wire = server.options, server.wire
        self.urls = {kind: server.put(stores / kind, f"stores/{kind}") for kind in KINDS}
        self.urls["points.h5"] = server.put(stores / "points.h5", "stores/points.h5")

    def url(self, kind):
        return self.urls[kind]


@pytest.fixture(scope="module")
def s3_server(stores):
    with serve() as server:
        yield S3(server, stores)


@pytest.fixture(scope="module")
def web_server(stores):
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    handler = functools.partial(Handler, root=str(stores))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Web(f"127.0.0.1:{server.server_port}")
        server.shutdown()


@pytest.fixture(params=["s3", "web"])
def server(request, monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=6, first_wait=0.001))
    found = request.getfixturevalue(f"{request.param}_server")
    yield found
    found.wire.latency, found.wire.most = 0.0, 0
    found.wire.fault = staticmethod(lambda key: None) if found.wire is Handler else lambda environ: None
    found.wire.gets = []


def fail(server, fault, times, under=""):
    """Let the first ``times`` requests of each range of each object fail."""
    seen = {}

    def answer(key):
        if isinstance(key, dict):  # WSGI's environment
            key = key["REQUEST_METHOD"], key["PATH_INFO"], key.get("HTTP_RANGE", "")
        if key[0] != "GET" or under not in key[1]:
            return None
        seen[key] = seen.get(key, 0) + 1
        return fault if seen[key] <= times else None

    server.wire.fault = staticmethod(answer) if server.wire is Handler else answer


def assert_same(there, here):
    assert sorted(there) == sorted(here)
    for name in here:
        assert there[name].dtype == here[name].dtype
        assert there[name].numpy().tobytes() == here[name].numpy().tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_equal_local_ones(stores, server, kind):
    local = StoreReader(str(stores / kind), num_parts=3)
    url = scidata.open_dataset(server.url(kind), storage_options=server.options).reader.path
    remote = pickle.loads(pickle.dumps(StoreReader(url, num_parts=3)))  # as a worker gets it
    assert remote.fingerprint() == local.fingerprint()
    for part in range(3):
        here, there = local.read(0, part), remote.read(0, part)
        for name, values in here.arrays().items():
            assert there.arrays()[name].tobytes() == values.tobytes()
        assert here.arrays().keys() == there.arrays().keys()
        assert there.stats.bytes_fetched == here.stats.bytes_fetched


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_failures_that_pass(stores, server, kind, fault, caplog):
    fail(server, fault, 2)
    with caplog.at_level(logging.WARNING, "scidata"):
        remote = scidata.open_dataset(server.url(kind), storage_options=server.options)
        assert_same(remote[0], scidata.open_dataset(str(stores / kind))[0])
    assert any("attempt 1 of 6" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("fault", FAULTS)
def test_failures_that_last(server, fault):
    remote = scidata.open_dataset(server.url("mesh"), storage_options=server.options)
    fail(server, fault, 99, "/node/v/")
    with pytest.raises(OSError, match=r"/node/v/.*\(tried 6 times in"):
        remote[0]


def test_damage_is_found(stores, server, monkeypatch):
    """A wrong byte on the way, which no status tells of."""
    remote = scidata.open_dataset(server.url("mesh"), fields="u", storage_options=server.options)
    real, spoiled = answers.checked, []

    def spoil(data, url, offset, nbytes, size):
        body = bytearray(real(data, url, offset, nbytes, size))
        if "/node/u/c/" in url and offset == 0:
            spoiled.append(url)
            body[7] ^= 1
        return bytes(body)

    monkeypatch.setattr(requests, "checked", spoil)
    with pytest.raises(ChecksumError, match="node/u"):
        remote[0]
    assert spoiled


@pytest.mark.parametrize("kind", ["mesh", "graph", "points", "points.h5"])
def test_fields_are_read_side_by_side(stores, server, kind, monkeypatch):
    options = {"kind": "points"} if kind.endswith("h5") else {}
    remote = scidata.open_dataset(server.url(kind), storage_options=server.options, **options)
    remote[0]  # metadata, indexes of the shards, edges
    server.wire.latency, server.wire.most, server.wire.gets = 0.2, 0, []
    assert_same(remote[0], scidata.open_dataset(str(stores / kind), **options)[0])
    assert server.wire.most >= 4  # pos, u, v, w

    monkeypatch.setattr(filesystems.current().load, "_most", 2.0)
    monkeypatch.setattr(load, "MAX_BYTES", 1)
    server.wire.latency, server.wire.most = 0.02, 0
    threads = [threading.Thread(target=remote.__getitem__, args=(0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.wire.most <= 2 * 4 + 2  # one of each field of each thread, come what may
    ours = filesystems.current().load
    assert (ours._requests, ours._nbytes) == (0, 0)


def test_nothing_is_left_counted_after_an_error(server):
    remote = scidata.open_dataset(server.url("graph"), storage_options=server.options)
    fail(server, "503", 99, "/c/")
    with pytest.raises(OSError, match="tried 6 times"):
        remote[0]
    ours = filesystems.current().load
    deadline = time.monotonic() + 10
    while ours._requests and time.monotonic() < deadline:  # what was cancelled
        time.sleep(0.01)
    assert (ours._requests, ours._nbytes) == (0, 0)


def test_opening_lists_no_folder(server):
    """Two round trips of metadata for a sample, and a web server has no lists."""
    remote = scidata.open_dataset(server.url("mesh"), storage_options=server.options)
    server.wire.gets = []
    assert remote.reader.store.array(0, "node/u").shape == (900, 2)
    metadata = [path for path, _ in server.wire.gets]
    assert all(path.endswith("zarr.json") for path in metadata)
    assert len(metadata) == len(set(metadata))


# -- how patient reads are -------------------------------------------------------------------------------------------


def test_patience_is_the_users(server, monkeypatch):
    remote = scidata.open_dataset(server.url("mesh"), storage_options=server.options)
    fail(server, "503", 99, "/node/v/")
    scidata.set_retry(attempts=2, first_wait=0)
    with pytest.raises(OSError, match=r"tried 2 times in \d\.\d s"):
        remote[0]
    scidata.set_retry(attempts=1)
    with pytest.raises(OSError, match=r"/node/v/(?!.*tried)"):
        remote[0]


@pytest.mark.parametrize(
    "wrong", [{"attempts": 0}, {"attempts": 1.5}, {"attempts": True}, {"total_wait": -1}, {"max_wait": float("inf")}]
)
def test_wrong_patience(wrong):
    before = retry.RETRY
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        scidata.set_retry(**wrong)
    assert retry.RETRY is before


def test_a_store_is_sent_once_it_is_whole(tmp_path):
    """The same as a local one; the manifest last; another is replaced whole, other objects never."""
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["edge_index"], file["pos"] = np.array([[0, 1], [1, 0]]), np.random.default_rng(number).random((9, 2))
    with serve() as server:
        url, options = f"s3://{BUCKET}/sent/two.store", {"storage_options": server.options}
        report = scidata.partition([tmp_path / "0.h5", tmp_path / "1.h5"], url, **options)
        assert (report.out, report.finished) == (url, True)
        scidata.partition([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "two.store")
        sent = scidata.open_dataset(url, **options)
        assert sent.fingerprint == scidata.open_dataset(tmp_path / "two.store").fingerprint
        every = lambda: server.client().list_objects_v2(Bucket=BUCKET, Prefix="sent/")["Contents"]  # noqa: E731
        with pytest.raises(OutputError, match="a store is there"):
            scidata.partition(tmp_path / "1.h5", url, **options)
        with pytest.raises(OutputError, match="a store is there"):
            scidata.partition(tmp_path / "1.h5", url, dry_run=True, **options)
        with pytest.raises(ConfigError, match="resume: means nothing for s3"):
            scidata.partition(tmp_path / "1.h5", url, resume=True, **options)
        scidata.partition(tmp_path / "1.h5", url, overwrite=True, **options)
        assert len(scidata.open_dataset(url, **options)) == 1
        assert not [each for each in every() if "sample-000001" in each["Key"]]
        with pytest.raises(OutputError, match="which is no part of a scidata store"):
            scidata.partition(tmp_path / "1.h5", f"s3://{BUCKET}/sent", overwrite=True, **options)
        ticks = []
        # what is sent in part does not open, and what it was to replace does
        for to, puts, beside in (
            (url, 5, "two.store.unfinished/"),
            (f"s3://{BUCKET}/sent/new.store", 3, "new.store/"),
        ):
            server.wire.puts = puts
            with pytest.raises(PermissionError, match=f"{to}/sample-00.*access was refused"):
                scidata.partition([tmp_path / "0.h5", tmp_path / "1.h5"], to, overwrite=True, **options)
            server.wire.puts = math.inf
            left = [each["Key"] for each in every() if beside in each["Key"]]
            assert left
            assert not [each for each in left if each.endswith("manifest.json")]
        with pytest.raises(OSError, match=r"new\.store"):
            scidata.open_dataset(f"s3://{BUCKET}/sent/new.store", **options)
        assert len(scidata.open_dataset(f"s3://{BUCKET}/sent/two.store", **options)) == 1
        for name in ("new.store", "two.store"):
            url = f"s3://{BUCKET}/sent/{name}"
            scidata.partition([tmp_path / "0.h5", tmp_path / "1.h5"], url, overwrite=True, **options)
            assert scidata.open_dataset(url, **options).fingerprint == sent.fingerprint
        assert not [each for each in every() if ".unfinished" in each["Key"]]
        known, typo = server.options, {**server.options, "secert": "x"}
        for to, access, error, text in (
            ("s3://nowhere/x.store", known, FileNotFoundError, "nowhere.*no such bucket"),
            (f"s3://{BUCKET}/x.store", typo, ConfigError, "'secert' for s3://; did you mean 'secret'"),
            (f"s4://{BUCKET}/x.store", known, ConfigError, "nothing reads s4://"),
            ("https://127.0.0.1:1/x.store", {}, ConfigError, "web servers take no stores"),
        ):
            with pytest.raises(error, match=text):
                scidata.partition(tmp_path / "1.h5", to, tick=ticks.append, storage_options=access)
        assert not ticks  # refused before any work
