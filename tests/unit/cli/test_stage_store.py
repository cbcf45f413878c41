"""``scidata stage`` of partitioned stores: training with ``cache_dir`` then asks for nothing but the manifest."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.core.options import ReadOptions
from scidata.core.urls import url_of
from scidata.read.disk_cache import DiskCache
from scidata.sources.access import filesystems, mounts
from scidata.store.reading.reader import StoreReader
from tests.unit._children import Forked
from tests.unit._s3 import KEY, SECRET, serve
from tests.writers import triangulation, write_hdf5

NUM_NODES = (9000, 4000)


def run(*args: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["stage", *map(str, args)])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in args and not code else result


@pytest.fixture(scope="module")
def store(tmp_path_factory: Any) -> Path:
    """Two meshes; a field with times, one without, one of cells."""
    folder = tmp_path_factory.mktemp("stage")
    raws = []
    for i, num_nodes in enumerate(NUM_NODES):
        rng = np.random.default_rng(i)
        mesh = triangulation(rng.random((num_nodes, 2)))
        fields = {
            "node/u": rng.standard_normal((3, num_nodes, 8)),
            "node/v": rng.standard_normal(num_nodes),
            "cell/area": rng.standard_normal(len(mesh["cells"])),
        }
        raws.append(write_hdf5(folder / f"case{i}.h5", mesh | fields, {"node/u": ("time", "node", "c")}))
    scidata.partition(raws, folder / "store")
    return folder / "store"


@pytest.fixture(scope="module")
def s3(store: Path) -> Iterator[Any]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with serve() as server:
        server.url = server.put(store, "store")
        yield server


@pytest.fixture
def url(s3: Any, monkeypatch: Any) -> str:
    """The store's, and the credentials in the environment."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(filesystems, "_filesystems", filesystems.FileSystems())  # which are known by options alone
    s3.wire.forget()
    return s3.url


def check(s3: Any, store: Path, cache: Path, num_parts: int, ranks: Any, **options: Any) -> int:
    """Read all samples of ranks with the cache, compare them; return how many requests that took."""
    s3.wire.forget()
    there = url_of(s3.url, s3.options)
    kept = StoreReader(there, ReadOptions(cache_dir=cache, **options), num_parts=num_parts)
    alone = StoreReader(str(store), ReadOptions(**options), num_parts=num_parts)
    for index in range(alone.num_samples):
        for rank in ranks:
            expected, found = alone.read(index, rank).arrays(), kept.read(index, rank).arrays()
            assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    paths = [path for path, _ in s3.wire.gets] + s3.wire.heads
    return len([path for path in paths if not path.endswith("/manifest.json")])


HALO = ("--halo", "1")
HOW: dict[str, Any] = {"halo": 1, "ghosts": "disk"}


def test_then_nothing_is_asked_for(s3: Any, url: str, store: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = run(url, cache, "--domain", 3, *HALO, "--rank", "0-1", "--json")
    assert (first["left"], first["ranks"]) == (0, [0, 1])
    assert first["parts"] == first["written"] + first["there"] == 12  # three times of each mesh, two ranks
    assert first["written"] >= 4  # blocks of several times and ranks are fetched once
    assert first["bytes"] == first["bytes_written"] == DiskCache(cache).num_bytes()
    assert first["bytes_fetched"] <= sum(p.stat().st_size for p in store.rglob("*") if p.is_file())
    again = run(url, cache, "--domain", 3, *HALO, "--json", "--jobs", 1)
    assert again["written"] + again["there"] == again["parts"] == 18
    assert again["there"] >= 12
    assert again["bytes_written"] + again["bytes_there"] == again["bytes"] == DiskCache(cache).num_bytes()
    whole = run(url, cache, "--domain", 3, *HALO)
    assert "18 of 18 parts" in whole.stdout
    assert "0 written, 18 there already; 0 B fetched" in whole.stdout
    assert check(s3, store, cache, 3, range(3), **HOW) == 0
    assert check(s3, store, cache, 2, range(2), ghosts="exchange") == 0  # blocks are not those of a cut
    s3.wire.forget()
    ds = scidata.open_dataset(url, storage_options=s3.options, cache_dir=cache)
    loader = scidata.DataLoader(ds)
    assert len(list(loader)) == 6
    assert loader.stats()["bytes_fetched"] == 0
    assert {path for path, _ in s3.wire.gets} == {"/bucket/store/manifest.json"}


def test_only_what_ranks_need(s3: Any, url: str, store: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("scidata.store.format.blocks.BLOCK", 1 << 12)
    for module in ("blocks", "kept"):
        monkeypatch.setattr(f"scidata.store.format.{module}.ROW", 1 << 10)
    one = run(url, tmp_path / "one", "--domain", 4, "--rank", 2, "--fields", "u", "--isel", "time=1", "--json")
    every = run(url, tmp_path / "every", "--domain", 4, "--json")
    assert one["parts"] == 2
    assert every["parts"] == 24
    assert one["bytes_fetched"] < 0.35 * every["bytes_fetched"]
    assert check(s3, store, tmp_path / "one", 4, [2], fields=["u"], isel={"time": 1}) == 0
    assert check(s3, store, tmp_path / "one", 4, [1], fields=["u"], isel={"time": 1}) > 0


def test_what_does_not_fit(s3: Any, url: str, store: Path, tmp_path: Path) -> None:
    arguments = (url, tmp_path, "--domain", 1, "--cache-bytes", "4M", "--jobs", 1)
    result = run(*arguments)
    assert f"4.0 MiB of {tmp_path} are full: the last" in result.stderr
    assert "parts are left out; give more --cache-bytes" in result.stderr
    assert DiskCache(tmp_path).num_bytes() <= 4 << 20
    report = run(*arguments, "--json")
    assert 0 < report["left"] < report["parts"] == 6
    assert report["there"] + report["written"] + report["left"] == 6
    assert report["bytes"] <= 4 << 20
    assert report["bytes_fetched"] == 0  # nothing has pushed out what came before it


def stage(arguments: list[str]) -> None:
    mounts._type_of = lambda device: "nfs4"  # type: ignore[assignment]
    app(arguments)


def test_killed_and_run_again(store: Path, tmp_path: Path, monkeypatch: Any) -> None:
    rng = random.Random(0)
    arguments = ["stage", store, tmp_path, "--domain", "3", *HALO, "--jobs", "2"]
    held = 0
    for _ in range(3):
        process = Forked(stage, list(map(str, arguments)))
        end = time.monotonic() + 60
        while DiskCache(tmp_path).num_bytes() <= held and process.is_alive() and time.monotonic() < end:
            time.sleep(0.001)  # until something is written
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        held = DiskCache(tmp_path).num_bytes()
    monkeypatch.setattr(mounts, "_type_of", lambda device: "nfs4")
    last = run(*arguments[1:], "--json")
    assert last["written"] + last["there"] == last["parts"] == 18
    assert last["bytes_there"] > 0
    kept = StoreReader(str(store), ReadOptions(cache_dir=tmp_path, **HOW), num_parts=3)
    alone = StoreReader(str(store), ReadOptions(**HOW), num_parts=3)
    for index in range(6):
        for rank in range(3):
            local, expected = kept.read(index, rank), alone.read(index, rank).arrays()
            assert local.stats.bytes_fetched == 0
            assert all(values.tobytes() == expected[name].tobytes() for name, values in local.arrays().items())


def test_failures_and_wrong_usage(s3: Any, url: str, store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = tmp_path / "c"
    for arguments, text in [
        ((url, cache, "--domain", 2, "--rank", "2"), "out of range"),
        ((url, cache, "--domain", "2x2"), "cut in one: --domain 4"),
        ((url, cache, "--domain", 2, "--shard", "y"), "means nothing for"),
        ((url, cache, "--domain", 2, "--allow-missing"), "means nothing for"),
        ((url, cache, "--domain", 2, "--ghosts", "all"), "disk"),
        ((url, cache, "--domain", 2, "--weights", "edges", "--bounds", "0,5,13000"), "weights decide the bounds"),
        ((url, cache, "--domain", 2, "--fields", "w"), "no field 'w'"),
        ((url, tmp_path / "file", "--domain", 2), "is a file, not a folder"),
        ((url, "s3://bucket/cache", "--domain", 2), "not a URL"),
    ]:
        assert text in " ".join(run(*arguments, code=2).output.replace("│", " ").split())
    assert not cache.exists()
    assert "not a directory" in run(url, tmp_path / "file" / "below", "--domain", 2, code=1).output
    s3.wire.fault = lambda environ: "403" if "/node/v/c" in environ["PATH_INFO"] else None
    try:
        assert "/node/v/c" in run(url, cache, "--domain", 1, code=1).output
    finally:
        s3.wire.fault = lambda environ: None
    local = run(store, cache, "--domain", 2)
    assert "not kept, raw on a local disk already: pos, area, u, v" in local.stdout.replace("\n", " ")
    refused = run(tmp_path / "no.zarr", cache, "--domain", 2, "--ghosts", "disk", code=2)
    assert "always read from disk" in " ".join(refused.output.replace("│", " ").split())
