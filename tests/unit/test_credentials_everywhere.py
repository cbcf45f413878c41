"""The canary again: stores, plans, traces, progress, warnings, logs at DEBUG, chained errors, worker processes."""

from __future__ import annotations

import functools
import http.server
import io
import json
import logging
import pickle
import subprocess
import threading
import traceback
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import h5py
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.sources import open_source
from scidata.sources.access import retry

CANARY = "canary-51d09be2aa"
N = 300


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=3, first_wait=0.001))


class Guarded(http.server.SimpleHTTPRequestHandler):
    """Serves files to who brings the canary; fails, or sends damage, below the paths that it is told."""

    broken = damaged = None

    def send_head(self):
        given = self.path + self.headers.get("X-Secret", "") + (self.headers.get("Authorization") or "")
        if CANARY not in given and "Basic" not in given:
            self.send_error(403, explain=self.path)  # a server that repeats what it was asked
            return None
        path = urlsplit(self.path).path
        if self.broken is not None and self.broken in path:
            self.send_error(503, message=f"overloaded by {self.path}")
            return None
        self.path = path
        if self.damaged is not None and self.damaged in path:
            self.send_response(200)
            self.send_header("Content-Length", "9")
            self.end_headers()
            return io.BytesIO(b"{damaged}")
        return super().send_head()

    def list_directory(self, path):
        self.send_error(404)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    folder = tmp_path_factory.mktemp("served")
    rng = np.random.default_rng(0)
    with h5py.File(folder / "cloud.h5", "w") as file:
        file["x"], file["y"], file["p"] = rng.random((3, N))
    scidata.partition(str(folder / "cloud.h5"), str(folder / "store"), kind="points")
    group = zarr.open_group(folder / "grid.zarr", mode="w")
    group.create_array("u", data=rng.random((6, 8, 8)), chunks=(1, 8, 8), dimension_names=("time", "lat", "lon"))
    zarr.consolidate_metadata(folder / "grid.zarr")
    handler = functools.partial(Guarded, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(params=["query", "user", "options"])
def remote(request, served, monkeypatch):
    """A function from a file's name to the arguments that open it."""
    monkeypatch.setattr(Guarded, "broken", None)
    monkeypatch.setattr(Guarded, "damaged", None)
    secret = {"client_kwargs": {"headers": {"X-Secret": CANARY}}}
    return {
        "query": lambda name: (f"http://{served}/{name}?sig={CANARY}&X-Amz-Security-Token={CANARY}", None),
        "user": lambda name: (f"http://{CANARY}:{CANARY}@{served}/{name}", None),
        "options": lambda name: (f"http://{served}/{name}", secret),
    }[request.param]


def everything_of(error):
    """The traceback with all chained errors, and with the values of local variables' reprs left out, as Python's is."""
    text = "".join(traceback.format_exception(error))
    seen, todo = set(), [error]
    while todo:
        e = todo.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        todo += [e.__cause__, e.__context__]
        text += repr(e) + str(e) + repr(e.args) + repr(vars(e)) + repr(getattr(e, "filename", ""))
    return text


class Everything(logging.Handler):
    """All records of all loggers, with tracebacks, as a user's file of logs at DEBUG has them."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s %(args)s"))

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def logs():
    """Of scidata and of asyncio, at DEBUG; what aiohttp and botocore write at DEBUG is theirs."""
    handler, names = Everything(), ("scidata", "asyncio", "concurrent", "zarr", "h5py")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.DEBUG)
    yield handler.lines
    for name, level in before.items():
        logging.getLogger(name).removeHandler(handler)
        logging.getLogger(name).setLevel(level)


def states(ds):
    """What a data set, its sampler and its loader write down, and say of themselves."""
    sampler = scidata.DistributedSampler(ds, shuffle=True)
    loader = scidata.DataLoader(ds, 1, sampler=sampler, num_workers=2)
    next(iter(loader))
    plan = ds.plan(0)
    said = [repr(ds), str(ds), repr(vars(sampler)), json.dumps(loader.state_dict()), json.dumps(sampler.state_dict())]
    said += [str(loader.stats()), repr(loader.stats()), repr(plan), str(plan), json.dumps(plan.to_json()), repr(ds[0])]
    said += [pickle.dumps(plan).decode("latin-1"), repr(loader), repr(scidata.subset(ds, [0])), ds.fingerprint]
    return said


@pytest.mark.parametrize("name", ["store", "grid.zarr"])
def test_states_traces_and_warnings(tmp_path, remote, logs, name, capfd):
    url, options = remote(name)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ds = scidata.open_dataset(url, storage_options=options)
        with scidata.trace(str(tmp_path / "trace.json")):
            said = states(ds)
    said += [str(w.message) for w in warned] + logs + [*capfd.readouterr(), (tmp_path / "trace.json").read_text()]
    said += [repr(ds.reader.store.manifest)] if hasattr(ds.reader, "store") else []
    assert CANARY not in "".join(said)
    assert CANARY in pickle.dumps(ds).decode("latin-1")  # a worker must open it: nothing else may have it


@pytest.mark.parametrize(("name", "path"), [("store", "/point/p/"), ("grid.zarr", "/u/c/"), ("cloud.h5", "cloud.h5")])
@pytest.mark.parametrize("how", ["broken", "damaged"])
def test_chained_errors(remote, logs, name, path, how, monkeypatch, capfd):
    url, options = remote(name)
    kind = {"kind": "points"} if name.endswith("h5") else {}
    said = []
    if name != "cloud.h5":
        ds = scidata.open_dataset(url, storage_options=options, **kind)
        monkeypatch.setattr(Guarded, how, path)
        with pytest.raises((OSError, ValueError), match="127") as caught:
            ds[0]
        said.append(everything_of(caught.value))
        with pytest.raises((OSError, ValueError), match="127") as caught:
            list(scidata.DataLoader(ds, 1, num_workers=2))  # from a thread, with notes
        said.append(everything_of(caught.value))
        sent = pickle.dumps(caught.value)  # as a worker process sends it
        said += [sent.decode("latin-1"), everything_of(pickle.loads(sent))]
        skipping = scidata.DataLoader(ds, 1, num_workers=1, on_error="skip")
        assert list(skipping) == []
    monkeypatch.setattr(Guarded, how, name)
    with pytest.raises((OSError, ValueError)) as caught:  # metadata
        scidata.open_dataset(url, storage_options=options, **kind)[0]
    said.append(everything_of(caught.value))
    assert "127.0.0.1" in "".join(said)
    assert CANARY not in "".join(said + logs + [*capfd.readouterr()])


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(
    ("command", "file", "code"),
    [
        ("inspect", "store", 0),
        ("inspect", "grid.zarr", 0),
        ("plan --domain 2", "store", 0),
        ("plan --domain 2", "grid.zarr", 0),
        ("verify", "store", 0),
        ("bench", "store", 2),
        ("bench --pipeline", "store", 2),
    ],
)
def test_commands(served, command, file, code, flags, capfd, logs):
    name, *options = command.split()
    url = f"http://{CANARY}:{CANARY}@{served}/{file}?sig={CANARY}"
    done = CliRunner().invoke(app, [name, url, *options, *flags])
    assert done.exit_code == code, done.output + done.stderr
    assert CANARY not in done.output + done.stderr + "".join([*capfd.readouterr(), *logs])


def test_a_store_made_of_urls(tmp_path, remote, logs, capfd):
    """Its manifest, its notes and its arrays' attributes say where it comes from, and no secret."""
    url, options = remote("cloud.h5")
    if options is not None:
        pytest.skip("partition takes no storage_options")
    scidata.partition(url, str(tmp_path / "made"), kind="points")
    written = b"".join(p.read_bytes() for p in Path(tmp_path / "made").rglob("*") if p.is_file())
    assert b"cloud.h5" in written
    assert CANARY.encode() not in written
    assert CANARY not in "".join([*capfd.readouterr(), *logs])


WORKERS = """
import sys, scidata, logging, traceback
logging.basicConfig(level=logging.DEBUG)
for name in ("urllib3", "botocore", "fsspec", "aiohttp", "s3fs"):
    logging.getLogger(name).setLevel(logging.INFO)
if __name__ == "__main__":
    ds = scidata.open_dataset(sys.argv[1])
    print(len(list(scidata.DataLoader(ds, 1, num_workers=1, workers="process"))))
    scidata.set_retry(attempts=2, first_wait=0)
    ds = scidata.open_dataset(sys.argv[1])
    open(sys.argv[2], "w").close()  # from now on it breaks
    list(scidata.DataLoader(ds, 1, num_workers=1, workers="process"))
"""


def test_worker_processes(tmp_path, served, monkeypatch, programs):
    script, flag = tmp_path / "script.py", tmp_path / "flag"
    script.write_text(WORKERS)
    monkeypatch.setattr(Guarded, "broken", None)

    real = Guarded.send_head

    def send_head(self):
        self.broken = "/u/c/" if flag.exists() else None
        return real(self)

    monkeypatch.setattr(Guarded, "send_head", send_head)
    url = f"http://{CANARY}:{CANARY}@{served}/grid.zarr?sig={CANARY}"
    command = [programs / "python", str(script), url, str(flag)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=170)
    assert done.stdout == "6\n", done.stderr
    assert "in worker process 0" in done.stderr  # its traceback
    assert "tried 2 times" in done.stderr  # set_retry() reaches it
    assert CANARY not in done.stderr


def test_sources(remote):
    url, options = remote("cloud.h5")
    source = open_source(url, storage_options=options)
    said = [repr(source), str(source.path), repr(dict(source.arrays)), repr(vars(source))]
    assert CANARY not in "".join(said)
