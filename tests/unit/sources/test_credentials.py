"""A canary: secrets in a URL's user, its query and storage_options come up nowhere but in a pickle of the data set."""

from __future__ import annotations

import functools
import http.server
import json
import logging
import pickle
import threading
import traceback
from urllib.parse import urlsplit

import h5py
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.core.urls import Url, public_text, url_of
from scidata.errors import ConfigError
from scidata.sources.access import retry
from scidata.sources.access.retry import causes
from tests.unit._s3 import SECRET, serve

CANARY = "canary-7f3e9b21c4"
VALUES = np.arange(4 * 8 * 8, dtype="f4").reshape(4, 8, 8)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=3, first_wait=0.001))


class _Guarded(http.server.SimpleHTTPRequestHandler):
    """Serves files to who brings the canary, and fails where it is told to."""

    broken: str | None = None

    def send_head(self):
        if (
            CANARY not in self.path
            and CANARY not in self.headers.get("X-Secret", "")
            and not self.headers.get("Authorization")
        ):
            self.send_error(403)
            return None
        if self.broken is not None and self.broken in self.path:
            self.send_error(503)
            return None
        self.path = urlsplit(self.path).path
        return super().send_head()

    def list_directory(self, path):
        self.send_error(404)

    def log_message(self, *args):
        pass


@pytest.fixture
def web(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    monkeypatch.setattr(_Guarded, "broken", None)
    group = zarr.open_group(tmp_path, mode="w")
    array = group.create_array(
        "u", shape=VALUES.shape, chunks=(1, 8, 8), dtype="f4", dimension_names=("time", "lat", "lon"), compressors=None
    )
    array[:] = VALUES
    zarr.consolidate_metadata(tmp_path)
    handler = functools.partial(_Guarded, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def everything_of(error):
    """All that an error shows: it, what caused it, its tracebacks."""
    return "".join(traceback.format_exception(error)) + "".join(repr(e) + str(vars(e)) for e in causes(error))


def shown(ds, index=0):
    """All that a data set says of itself and writes down."""
    loader = scidata.DataLoader(ds, batch_size=2, shuffle=True, num_workers=1)
    batches = iter(loader)
    next(batches)
    plan = ds.plan(index)
    said = [repr(ds), repr(ds.reader.paths), json.dumps(loader.state_dict()), ds.reader.fingerprint()]
    said += [repr(ds.reader.sources), json.dumps(plan.to_json()), repr(plan), repr(ds[index])]
    said += [pickle.dumps(plan).decode("latin-1"), pickle.dumps(ds.reader.layout("u")).decode("latin-1")]
    return "".join(said)


@pytest.mark.parametrize("place", ["query", "user", "options"])
def test_no_secret_is_shown(web, place, caplog, capfd, monkeypatch):
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "scidata")
    url, options = {
        "query": (f"http://{web}?X-Amz-Signature={CANARY}&X-Amz-Credential={CANARY}", None),
        "user": (f"http://me:{CANARY}@{web}", None),
        "options": (f"http://{web}", {"client_kwargs": {"headers": {"X-Secret": CANARY}}}),
    }[place]
    ds = scidata.open_dataset(url, storage_options=options)
    assert np.array_equal(ds[3]["u"].numpy(), VALUES[3])  # it was let in
    said = shown(ds)
    monkeypatch.setattr(_Guarded, "broken", "/u/c/")
    with pytest.raises(OSError, match="tried 3 times") as caught:
        pickle.loads(pickle.dumps(ds))[0]
    said += everything_of(caught.value)
    with pytest.raises(FileNotFoundError) as caught:
        scidata.open_dataset(str(ds.reader.paths[0].target).replace(web, f"{web}/nothing.nc"), storage_options=options)
    said += everything_of(caught.value)
    with pytest.raises(scidata.errors.UnknownNameError) as caught:
        scidata.open_dataset(url, storage_options=options, fields="w")
    said += everything_of(caught.value)
    out, err = capfd.readouterr()
    said += out + err + "".join(record.getMessage() for record in caplog.records)
    assert "attempt 1 of 3" in said
    assert CANARY not in said
    assert CANARY in pickle.dumps(ds).decode("latin-1")  # a worker must open it


def test_refused_by_the_server(web):
    for url, options in [(f"http://{web}", {"client_kwargs": {"headers": {"X-Secret": "wrong-" + CANARY[:10]}}})]:
        with pytest.raises(PermissionError, match="storage_options") as caught:
            scidata.open_dataset(url, storage_options=options)
        assert CANARY[:10] not in everything_of(caught.value)


def test_options_of_s3(tmp_path, caplog, capfd):
    with serve() as s3:
        array = zarr.open_group(tmp_path / "s", mode="w").create_array(
            "u", data=VALUES, dimension_names=("time", "y", "x")
        )
        del array
        url = s3.put(tmp_path / "s", "s")
        ds = scidata.open_dataset(url, storage_options=s3.options)
        said = shown(ds)
        s3.wire.fault = lambda environ: "503"
        with pytest.raises(OSError, match="tried 3 times") as caught:
            pickle.loads(pickle.dumps(ds))[0]
        said += everything_of(caught.value)
        s3.wire.fault = lambda environ: "403"
        with pytest.raises(PermissionError) as caught:
            scidata.open_dataset(url + "2", storage_options=s3.options)
        said += everything_of(caught.value)
    said += "".join(capfd.readouterr()) + "".join(record.getMessage() for record in caplog.records)
    assert SECRET not in said


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (f"https://u:{CANARY}@host/a.h5?sig={CANARY}#x", "https://host/a.h5?..."),
        (f"https://u:{CANARY}/{CANARY}@host/a.h5", "https://host/a.h5"),
        (f"https://u:12/{CANARY}@host/a.h5", "https://host/a.h5"),
        (f"https://u:{CANARY}@{CANARY}@host/a.h5", "https://host/a.h5"),
        (f"https://u:p@{CANARY}/{CANARY}@host/a.h5", "https://host/a.h5"),
        (f"https://u:{CANARY}#{CANARY}@host/a.h5", "https://host/a.h5"),
        (f"https://u:{CANARY}?{CANARY}@host/a.h5", "https://host/a.h5"),
        (f"https://host/a.h5?token={CANARY}::{CANARY}", "https://host/a.h5?..."),
        (f"https://u:p@host/a.h5#frag={CANARY}", "https://host/a.h5#..."),
        (f"simplecache::https://u:{CANARY}/x@host/a.h5#{CANARY}", "simplecache::https://host/a.h5#..."),
        (f"zip://a.h5::simplecache::https://u:{CANARY}@host/b.zip", "zip://a.h5::simplecache::https://host/b.zip"),
        (f"s3://KEY:{CANARY}/{CANARY}@bucket/a.h5", "s3://bucket/a.h5"),
        ("s3://bucket/a#1@2.h5", "s3://bucket/a#1@2.h5"),
        ("https://data.org:443/v@1/a.h5", "https://data.org:443/v@1/a.h5"),
        ("http://[::1]:80/a.h5", "http://[::1]:80/a.h5"),
        (f"simplecache::https://u:p@{CANARY}@host/ab?x={CANARY}", "simplecache::https://host/ab?..."),
        ("s3://bucket/store.zarr/", "s3://bucket/store.zarr"),
        ("memory://", "memory://"),
    ],
)
def test_text_of_a_url(url, text):
    found = url_of(url)
    assert found == text
    assert isinstance(found, Url)
    again = pickle.loads(pickle.dumps(found))
    assert (again, again.target) == (found, found.target)
    below = found.at("u/c/0")
    assert found.bound(str(below)).target == below.target
    assert CANARY not in public_text(f"reading {url} failed")
    assert CANARY not in found.public(f"the server says {CANARY} of {url}" if CANARY in url else "")


@pytest.mark.parametrize("command", ["inspect", "plan --domain 2", "verify", "bench", "partition", "partition to"])
def test_commands_show_no_secret(tmp_path, command, capfd, caplog):
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    url = f"http://me:{CANARY}@127.0.0.1:9/x.zarr?sig={CANARY}"  # nobody listens there
    name, *options = command.split()
    arguments = {"partition": [url, str(tmp_path / "out")], "partition to": [str(tmp_path / "a.h5"), url]}
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["x"], f["y"] = np.random.default_rng(0).normal(size=(2, 50))
    done = CliRunner().invoke(app, [name, *arguments.get(command, [url, *options])])
    out, err = capfd.readouterr()
    said = done.output + done.stderr + out + err + "".join(record.getMessage() for record in caplog.records)
    is_refused = command in ("bench", "partition to")  # no URL, or none of a web server
    assert done.exit_code == (2 if is_refused else 1)
    assert "127.0.0.1:9/x.zarr" in said
    assert CANARY not in said
    if name not in ("bench", "partition"):
        assert "Connect" in said  # the reason, and not that the object is not there


def test_a_store_that_is_not_taken_shows_no_secret(web, tmp_path, capfd):
    """Web servers take no stores; half of an address is taken by the client; a server of S3 refuses the key."""
    pytest.importorskip("s3fs", reason="writes s3://")
    with h5py.File(tmp_path / "a.h5", "w") as f:
        f["x"], f["y"] = np.random.default_rng(0).normal(size=(2, 50))
    said, access = "", {"key": "me", "secret": CANARY, "token": CANARY, "endpoint_url": f"http://{web}"}
    for url, options, kind, shown in (
        (f"http://me:{CANARY}@{web}/s?sig={CANARY}", {}, ConfigError, f"{web}/s"),
        (f"http://me:p/{CANARY}@{web}/s", {}, ConfigError, f"{web}/s"),
        ("s3://bucket/s", {"storage_options": access}, OSError, "s3://bucket/s"),
    ):
        with pytest.raises(kind, match=shown) as caught:
            scidata.partition(tmp_path / "a.h5", url, kind="points", **options)
        said += everything_of(caught.value)
    assert CANARY not in said + "".join(capfd.readouterr())


def test_two_urls_that_look_the_same_are_refused():
    with pytest.raises(ConfigError, match="differ only"):
        scidata.open_dataset(["https://host/get?file=a.nc", "https://host/get?file=b.nc"])


SPOILT = {
    "slash": f"u:{CANARY}/{CANARY}@{{}}",
    "at": f"u:{CANARY}@{CANARY}@{{}}",
    "hash": f"u:{CANARY}#{CANARY}@{{}}",
    "question": f"u:{CANARY}?{CANARY}@{{}}",
    "short": "u:p4/w0rd@{}",
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("chain", ["", "simplecache::"])
@pytest.mark.parametrize("after", ["", f"?token={CANARY}", f"#frag={CANARY}"])
def test_passwords_that_are_not_escaped(web, how, chain, after, caplog, capfd):
    """Refused before a client takes half of one for a port, and repeats it; or read; but never shown."""
    url = f"{chain}http://{SPOILT[how].format(web)}/nothing.nc{after}"
    said = ""
    with pytest.raises((ConfigError, OSError)) as caught:
        scidata.open_dataset(url)
    said += everything_of(caught.value)
    if how != "at":
        assert isinstance(caught.value, ConfigError)
        assert "%2F" in said
    for command in (["inspect"], ["plan", "--domain", "2"], ["verify"], ["bench"]):
        done = CliRunner().invoke(app, [command[0], url, *command[1:]])
        assert done.exit_code in (1, 2)
        said += done.output
    said += "".join(capfd.readouterr()) + "".join(record.getMessage() for record in caplog.records)
    assert "127.0.0.1" in said
    for secret in (CANARY, "p4", "w0rd"):
        assert secret not in said


def test_a_fragment_is_not_sent_and_not_shown(web, capfd):
    ds = scidata.open_dataset(f"http://u:{CANARY}@{web}#frag={CANARY}")
    assert np.array_equal(ds[1]["u"].numpy(), VALUES[1])
    assert CANARY not in shown(ds)
    assert CANARY not in "".join(capfd.readouterr())
