"""Servers that accept and do not answer, or hardly: given up within the time that scidata.set_retry says."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import contextmanager

import fsspec
import h5py
import numpy as np
import pytest

import scidata
import scidata.data.open_dataset  # whose time is not the server's
import scidata.store.reading.reader
from scidata.core.urls import url_of
from scidata.sources.access import filesystems, outcomes, remote, retry
from scidata.sources.access.files import files
from scidata.sources.access.remote import request

TOTAL = 2.0
BUSY = 10.0  # what a busy machine may add: the server stalls for ever


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=4, first_wait=0.05, total_wait=TOTAL))


class Stalling:
    """Serves one file by ranges; stalls from request number ``after`` on, in one of two ways."""

    def __init__(self, content: bytes, how: str, after: int) -> None:
        self.content, self.how, self.after = content, how, after
        self.requests, self.over = 0, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while not self.over.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                said = b""
                while not said.endswith(b"\r\n\r\n"):
                    said += (part := connection.recv(1 << 16))
                    if not part:
                        return
                self.requests += 1
                if self.requests > self.after:
                    self.stall(connection, b"X-Slow: " if said.startswith(b"HEAD") else b"\r\n")
                else:
                    connection.sendall(self.whole(said))
        except OSError:
            return

    def whole(self, said: bytes) -> bytes:
        if b"manifest.json" in said or b".z" in said or b"zarr.json" in said:
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        body, status, more = self.content, "200 OK", ""
        if found := re.search(rb"Range: bytes=(\d+)-(\d+)", said, re.I):
            begin, end = int(found[1]), int(found[2])
            body, status = body[begin : end + 1], "206 Partial Content"
            more = f"Content-Range: bytes {begin}-{begin + len(body) - 1}/{len(self.content)}\r\n"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
        return head.encode() + (b"" if said.startswith(b"HEAD") else body)

    def stall(self, connection: socket.socket, then: bytes) -> None:
        if self.how == "trickle":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n" + then)
        while not self.over.wait(0.1):
            if self.how == "trickle":
                connection.sendall(b"{")


@contextmanager
def stalling(content: bytes = b"", *, how: str = "silent", after: int = 0):
    server = Stalling(content, how, after)
    try:
        yield server
    finally:
        server.over.set()
        server.listener.close()


def prepared(url):
    """Import what a URL needs: that is not the server's time."""
    found = filesystems.current().bucket(url)
    return remote.place_of(url) if found is None else found[0].prepare()


def took(call) -> tuple[float, str]:
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"127|s3:|memory:") as caught:
        call()
    return time.monotonic() - begin, str(caught.value)


@pytest.mark.parametrize("how", ["silent", "trickle"])
@pytest.mark.parametrize("where", ["http://127.0.0.1:{port}/a.nc", "s3://bucket/a.nc"])
def test_opening(how, where):
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    pytest.importorskip("s3fs", reason="S3 needs s3fs")
    with stalling(how=how) as server:
        options = None
        if where.startswith("s3"):
            config = {"endpoint_url": f"http://127.0.0.1:{server.port}", "key": "k" * 8, "secret": "s" * 8}
            options = config | {"client_kwargs": {"region_name": "us-east-1"}}
        url = where.format(port=server.port)
        prepared(url_of(url, options))
        seconds, said = took(lambda: scidata.open_dataset(url, storage_options=options))
        assert seconds < TOTAL + BUSY
        said_seconds = float(re.search(r"tried \d+ times in (\d+\.\d) s", said)[1])
        assert TOTAL / 2 <= said_seconds <= seconds + 0.1  # the attempts count, not the waits alone


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file of HDF5 whose metadata are here and there."""
    path = tmp_path_factory.mktemp("large") / "a.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        for i in range(40):
            file.create_dataset(f"u{i}", data=np.zeros((100, 100)), chunks=(10, 100))
    return path.read_bytes()


@pytest.mark.parametrize("after", range(4, 16, 3))
@pytest.mark.parametrize("how", ["silent", "trickle"])
def test_metadata_through_h5py(large, how, after):
    """Whatever the request that is the first to hang."""
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    with stalling(large, how=how, after=after) as server:

        def read():
            ds = scidata.open_dataset(f"http://127.0.0.1:{server.port}/a.h5", kind="grid")
            for i in range(len(ds)):
                ds[i]

        seconds, said = took(read)
        assert server.requests > after
        assert seconds < 2 * TOTAL + BUSY
        assert "127.0.0.1" in said


def test_a_listing():
    pytest.importorskip("s3fs", reason="S3 needs s3fs")
    with stalling() as server:
        options = {"endpoint_url": f"http://127.0.0.1:{server.port}", "key": "k" * 8, "secret": "s" * 8}
        url = url_of("s3://bucket/folder", options)
        prepared(url)
        seconds, _ = took(lambda: request(url, "ls"))
        assert seconds < TOTAL + BUSY


def test_file_systems_that_are_not_asynchronous(monkeypatch):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/stalling/a", b"x" * 100)
    url = url_of("memory://stalling/a")
    assert files().read(url, 10, 5) == b"x" * 5
    over = threading.Event()
    monkeypatch.setattr(type(memory), "cat_file", lambda *args, **kwargs: over.wait(20))
    seconds, said = took(lambda: files().read(url, 10, 5))
    over.set()
    assert seconds < TOTAL + BUSY
    assert "no whole answer within" in said
    assert "set_retry(total_wait=)" in said


def test_large_reads_have_time_in_proportion(monkeypatch):
    url = url_of("https://host/a")
    small = outcomes.Outcome(url, "range", {"nbytes": 1000})
    large = outcomes.Outcome(url, "range", {"nbytes": 64 << 20})
    assert small.time_left() == pytest.approx(TOTAL / 2, abs=0.1)
    assert large.time_left() > 200
    monkeypatch.setattr(filesystems.current().load, "_nbytes", 64 << 20)  # others share the line
    assert outcomes.Outcome(url, "range", {"nbytes": 1000}).time_left() > 200


def test_no_wait_leaves_time_for_an_attempt(monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(total_wait=0))
    assert outcomes.Outcome(url_of("https://host/a"), "info", {}).time_left() >= 0.5


def test_the_time_that_is_said_was_spent(tmp_path):
    def failing():
        time.sleep(0.3)
        raise TimeoutError("slow")

    with pytest.raises(OSError, match=r"tried 3 times in (0\.9|1\.\d) s"):
        retry.Retry(attempts=3, first_wait=0.001).run("x", failing)
