"""``cache_dir`` of partitioned stores: the same values, no requests for what is there, never what the store is not."""

from __future__ import annotations

import functools
import http.server
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scidata
from scidata.core.options import ReadOptions
from scidata.core.urls import Url, url_of
from scidata.errors import ChecksumError, ConfigError, CorruptDataError, MissingChunkError, RefusedError, SciDataError
from scidata.read.disk_cache import DiskCache
from scidata.sources.access import filesystems, mounts, retry
from scidata.sources.access.files import files
from scidata.sources.access.kept_urls import KeptUrl
from scidata.store.format.blocks import BLOCK
from scidata.store.format.store import Store
from scidata.store.reading.reader import StoreReader
from tests.unit._children import Forked
from tests.unit._s3 import SECRET, serve
from tests.unit.store._objects import Handler
from tests.writers import triangulation, write_hdf5

BIG = 1 << 30
NUM_NODES, NUM_TIMES = 30_000, 3
KINDS = ("mesh", "graph", "points")
HOW: dict[str, dict[str, Any]] = {
    "mesh": {"halo": 1, "ghosts": "disk"},
    "graph": {"halo": 2},
    "points": {"halo": 0.004, "ghosts": "disk"},
}


def write(path: Path, kind: str = "mesh", seed: int = 0) -> Path:
    """Write a store of one sample: a field with times, of some blocks a file, one without, and positions."""
    rng = np.random.default_rng(seed)
    mesh = triangulation(rng.random((NUM_NODES, 2)))
    arrays: dict[str, Any] = {"points": mesh["points"]}
    if kind == "mesh":
        arrays["cells"] = mesh["cells"]
    if kind == "graph":
        pairs = np.unique(np.sort(np.asarray(mesh["cells"])[:, :2], axis=1), axis=0)
        arrays["edge_index"] = np.concatenate([pairs, pairs[:, ::-1]]).T
    dims = {} if kind == "points" else {"node/u": ("time", "node", "c")}
    arrays["node/u" if dims else "u"] = rng.standard_normal((NUM_TIMES, NUM_NODES, 4)[not dims :]).astype("f4")
    arrays["v"] = rng.standard_normal((NUM_NODES, 3))
    raw = write_hdf5(path.with_suffix(".h5"), arrays, dims)
    scidata.partition(raw, path, kind=kind, **({"points": "points"} if kind == "points" else {}))
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    for kind in KINDS:
        write(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def s3(stores: Path) -> Iterator[Any]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with serve() as server:
        for kind in KINDS:
            server.put(stores / kind, kind)
        yield server


class Remote:
    """A store behind a URL, and the requests for it."""

    def __init__(self, server: Any, url: str) -> None:
        self.server, self._url = server, url

    @property
    def url(self) -> Url:
        """The URL, as another process has it."""
        found = url_of(self._url, self.server.options)
        assert isinstance(found, Url)
        return found

    def requests(self) -> list[str]:
        """Return the paths that were asked for, but for the manifest's."""
        paths = [path for path, _ in self.server.wire.gets] + self.server.wire.heads
        return [path for path in paths if not path.endswith("manifest.json")]

    def forget(self) -> None:
        self.server.wire.forget()


@pytest.fixture
def remote(s3: Any, monkeypatch: Any) -> Iterator[Any]:
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=3, first_wait=0.001))
    s3.wire.forget()
    yield lambda name: Remote(s3, f"s3://bucket/{name}")
    s3.wire.latency = 0.0


def opened(path: Any, cache: Path | None, num_parts: int = 2, max_bytes: int = BIG, **options: Any) -> StoreReader:
    options = {"ghosts": "exchange"} | options
    if cache is not None:
        options |= {"cache_dir": cache, "cache_disk_bytes": max_bytes}
    return StoreReader(path, ReadOptions(**options), num_parts=num_parts)


def epoch(reader: StoreReader, number: int = 0) -> tuple[dict[Any, bytes], Any]:
    """Read all parts of all samples; return their arrays' bytes, and what was asked for."""
    found: dict[Any, bytes] = {}
    stats = []
    for index in range(reader.num_samples):
        for part in range(reader.num_parts):
            local = reader.read(index, part, epoch=number)
            stats.append(local.stats)
            for name, values in local.arrays().items():
                found[index, part, name] = values.tobytes() + str((values.dtype, values.shape)).encode()
    return found, sum(stats[1:], start=stats[0])


def entries(cache: Path) -> list[Path]:
    return [path for path in sorted(cache.rglob("*.rows")) if not path.name.startswith(".new-")]


# -- the same values, and no requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_other_processes_ask_for_nothing(stores: Path, remote: Any, tmp_path: Path, kind: str, num_parts: int) -> None:
    wanted = epoch(opened(stores / kind, None, num_parts, **HOW[kind]))[0]
    there = remote(kind)
    found, stats = epoch(first := opened(there.url, tmp_path, num_parts, **HOW[kind]))
    assert found == wanted
    assert stats.bytes_fetched > 0
    asked = there.requests()
    for again in (first, opened(there.url, tmp_path, num_parts, **HOW[kind]), pickle.loads(pickle.dumps(first))):
        there.forget()
        found, stats = epoch(again)
        assert found == wanted
        assert (stats.bytes_fetched, stats.num_reads) == (0, 0)
        assert there.requests() == []
    epoch(opened(there.url, None, num_parts, **HOW[kind]))
    # blocks take no more requests than ranges, but for the size of each file, which tells where its last block ends
    assert len(asked) <= len(there.requests()) + len(set(asked))
    assert first.fingerprint() == opened(stores / kind, None, num_parts, **HOW[kind]).fingerprint()


def test_other_cuts_find_what_there_is(stores: Path, remote: Any, tmp_path: Path) -> None:
    """Blocks are of files, not of parts: another number of ranks, halo, dtype, steps or draw needs no others."""
    there = remote("mesh")
    epoch(opened(there.url, tmp_path, 3, halo=2, ghosts="disk"))
    for options in (
        {"num_parts": 1}, {"num_parts": 4, "halo": 1, "ghosts": "exchange"}, {"num_parts": 2, "dtype": "f8"},
        {"num_parts": 2, "fields": ["u"], "steps": (0, 1), "isel": {"time": slice(1, None)}},
        {"num_parts": 2, "bounds": [0, 7000, NUM_NODES]},
        {"num_parts": 2, "subsample": {"node": 500}, "subsample_seed": 1},
    ):  # fmt: skip
        there.forget()
        for number in range(2):
            found, stats = epoch(opened(there.url, tmp_path, **options), number)
            assert found == epoch(opened(stores / "mesh", None, **options), number)[0]
            assert stats.bytes_fetched == 0
        assert there.requests() == []


@pytest.mark.parametrize("block", [1, "chunk"])
def test_draws_are_kept(stores: Path, remote: Any, tmp_path: Path, block: Any) -> None:
    """Each epoch draws other rows; what was fetched for one is there for others."""
    there, draw = remote("points"), {"subsample": {"point": 2000}, "subsample_block": block}
    fetched = []
    for number in range(4):
        found, stats = epoch(opened(there.url, tmp_path, **draw), number)
        assert found == epoch(opened(stores / "points", None, **draw), number)[0]
        fetched.append(stats.bytes_fetched)
    assert fetched[0] > 0
    assert fetched[-1] == 0


def test_misses_of_a_plan_go_out_together(remote: Any, tmp_path: Path) -> None:
    there = remote("mesh")
    there.server.wire.latency = 0.05
    reader = opened(there.url, tmp_path)
    reader.partition_of(0)
    there.forget()
    reader.read(0, 0)
    assert there.server.wire.most >= 3  # pos, u, v
    spans = {}
    for path, span in there.server.wire.gets:
        first, last = map(int, span.removeprefix("bytes=").split("-"))
        assert first % BLOCK == 0
        assert (last + 1) % BLOCK == 0 or last - first < BLOCK or path in spans
        spans.setdefault(path, []).append((first, last))
    assert max(last - first for found in spans.values() for first, last in found) >= 2 * BLOCK - 1  # coalesced


def test_data_sets(stores: Path, remote: Any, tmp_path: Path) -> None:
    """``open_dataset``, the loader, its worker processes, subset, concat and mix."""
    there = remote("mesh")
    how: dict[str, Any] = {"storage_options": there.server.options, "cache_dir": tmp_path, "cache_disk_bytes": BIG}
    plain = scidata.open_dataset(stores / "mesh", fields=["u", "v"])
    ds = scidata.open_dataset(str(there.url), fields=["u", "v"], **how)
    for name in ("u", "v"):
        assert ds[1][name].equal(plain[1][name])
    list(scidata.DataLoader(ds))
    there.forget()
    both = scidata.concat(scidata.open_dataset(str(there.url), fields=["u", "v"], **how), scidata.subset(ds, [1, 2]))
    loader = scidata.DataLoader(both, num_workers=2)
    values = [batch["u"] for batch in loader]
    assert all(x.reshape(-1).equal(plain[i]["u"].reshape(-1)) for i, x in zip([0, 1, 2, 1, 2], values, strict=True))
    assert loader.stats()["bytes_fetched"] == 0
    mixed = scidata.mix([ds, ds], [1, 2])
    assert all(sample["v"].equal(plain[0]["v"]) for sample in (mixed[i] for i in range(3)))
    assert there.requests() == []


def test_by_a_plain_web_server(stores: Path, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("aiohttp", reason="fsspec needs aiohttp to read http://")
    monkeypatch.setattr(Handler, "latency", 0.0)
    monkeypatch.setattr(Handler, "gets", [])
    handler = functools.partial(Handler, root=str(stores))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/graph"
        for again in (False, True):
            Handler.gets.clear()
            found, stats = epoch(opened(url_of(url), tmp_path))
            assert found == epoch(opened(stores / "graph", None))[0]
            assert (stats.bytes_fetched == 0) == again
            assert any("sample-" in path for path, _ in Handler.gets) != again
        server.shutdown()


def test_secrets_are_no_part_of_keys_or_files(remote: Any, tmp_path: Path) -> None:
    there = remote("graph")
    reader = opened(there.url, tmp_path)
    epoch(reader)
    other = Url(there.url.target, there.url.options | {"use_listings_cache": False})  # reached in another way
    assert epoch(opened(other, tmp_path))[1].bytes_fetched == 0
    assert SECRET not in f"{reader.store.kept!r} {reader.store.source(0)!r} {reader.path!r}"
    assert not any(SECRET.encode() in path.read_bytes() for path in entries(tmp_path))


# -- folders of network file systems -----------------------------------------------------------------------------------


def test_local_disks_are_read_in_place(stores: Path, tmp_path: Path, monkeypatch: Any) -> None:
    reader = opened(stores / "mesh", tmp_path)
    assert reader.store.kept is None
    wanted = epoch(reader)[0]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(mounts, "_type_of", lambda device: "nfs4")
    for again in (False, True):
        found, stats = epoch(opened(stores / "mesh", tmp_path))
        assert found == wanted
        assert (stats.bytes_fetched == 0) == again
    by_url = url_of(f"file://{stores / 'mesh'}")
    assert epoch(opened(by_url, tmp_path))[1].bytes_fetched == 0  # the same folder


def test_links_out_of_a_folder_are_refused(stores: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(mounts, "_type_of", lambda device: "lustre")
    shutil.copytree(stores / "graph", tmp_path / "store")
    file = tmp_path / "store/sample-000000.zarr/node/v/c/0/0"
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(RefusedError, match="out of the store"):
        epoch(opened(tmp_path / "store", tmp_path / "cache"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(RefusedError, match="not a regular file"):
        epoch(opened(tmp_path / "store", tmp_path / "cache"))
    file.unlink()
    with pytest.raises(MissingChunkError):
        epoch(opened(tmp_path / "store", tmp_path / "cache"))
    (tmp_path / "outside").rename(file)
    assert epoch(opened(tmp_path / "store", tmp_path / "cache"))[0] == epoch(opened(stores / "graph", None))[0]


# -- what can happen ---------------------------------------------------------------------------------------------------


def test_a_store_that_is_written_again(tmp_path: Path, remote: Any) -> None:
    there, cache = remote("again"), tmp_path / "cache"
    for seed in (1, 2):
        path = write(tmp_path / f"store{seed}", seed=seed)
        there.server.put(path, "again")
        for again in (False, True):
            found, stats = epoch(opened(there.url, cache))
            assert found == epoch(opened(path, None))[0]
            assert (stats.bytes_fetched == 0) == again


def copied(there: Any, stores: Path, tmp_path: Path) -> Path:
    """Put a copy of the mesh behind a URL of its own; return a shard of it."""
    shutil.copytree(stores / "mesh", tmp_path / "store")
    there.server.put(tmp_path / "store", str(there.url).removeprefix("s3://bucket/"))
    return tmp_path / "store/sample-000000.zarr/node/v/c/0/0"


def test_a_file_that_is_replaced(stores: Path, tmp_path: Path, remote: Any) -> None:
    """Under the same manifest: what the manifest is not about is refused, and what it is about is read once more."""
    there, cache = remote("replaced"), tmp_path / "cache"
    shard = copied(there, stores, tmp_path)
    wanted = epoch(opened(stores / "mesh", None))[0]
    name = f"replaced/{shard.relative_to(tmp_path / 'store')}"
    content, other = shard.read_bytes(), bytearray(shard.read_bytes())
    other[BLOCK + 100] ^= 1
    shard.write_bytes(other)
    there.server.put(shard, name)
    for _ in range(2):
        reader = opened(there.url, cache)
        with pytest.raises(ChecksumError, match="node/v"):
            epoch(reader)
    shard.write_bytes(content)
    there.server.put(shard, name)
    reader = opened(there.url, cache)  # other processes find nothing that was wrong
    assert epoch(reader)[0] == wanted
    shard.write_bytes(other)
    there.server.put(shard, name)
    assert epoch(opened(there.url, cache))[0] == wanted  # all of it is kept, and right
    assert epoch(opened(there.url, cache))[1].bytes_fetched == 0


@pytest.mark.parametrize("name", ["checksums/c/0", "csr/indptr/c/0", "node/pos/c/0/0"])
def test_what_was_kept_of_a_damaged_store_is_not_kept_for_good(
    stores: Path, tmp_path: Path, monkeypatch: Any, name: str
) -> None:
    """Blocks that are sound, of files that were damaged when they were read, or half copied."""
    monkeypatch.setattr(mounts, "_type_of", lambda device: "nfs4")
    store, cache = tmp_path / "store", tmp_path / "cache"
    shutil.copytree(stores / "mesh", store)
    file = store / "sample-000000.zarr" / name
    content = file.read_bytes()
    damaged = bytearray(content)
    for place in range(50, len(damaged), 1000):
        damaged[place : place + 8] = bytes(8)
    file.write_bytes(damaged)
    kept = opened(store, cache)
    for reader in (kept, opened(store, cache)):
        with pytest.raises(SciDataError):
            epoch(reader)
    # what a process kept that met the damage and could say nothing of it, as one that read other rows
    monkeypatch.setattr(Store, "doubt", lambda self, index: False)
    with pytest.raises(SciDataError):
        epoch(opened(store, cache))
    monkeypatch.undo()
    monkeypatch.setattr(mounts, "_type_of", lambda device: "nfs4")
    file.write_bytes(content)
    files().close()
    wanted = epoch(opened(stores / "mesh", None))[0]
    assert epoch(kept)[0] == wanted  # in the same process
    found, stats = epoch(opened(store, cache))
    assert found == wanted
    assert stats.bytes_fetched == 0 or epoch(opened(store, cache))[1].bytes_fetched == 0


def test_a_flipped_bit_in_each_entry(stores: Path, remote: Any, tmp_path: Path, caplog: Any) -> None:
    there, wanted = remote("mesh"), epoch(opened(stores / "mesh", None))[0]
    epoch(opened(there.url, tmp_path))
    rng = np.random.default_rng(0)
    for path in entries(tmp_path):
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "scidata"):
        found, stats = epoch(opened(there.url, tmp_path))
    assert found == wanted
    assert stats.bytes_fetched > 0
    assert len([r for r in caplog.records if "it is dropped" in r.getMessage()]) == 1
    assert epoch(opened(there.url, tmp_path))[0] == wanted


def test_so_many_bytes_and_no_more(stores: Path, remote: Any, tmp_path: Path) -> None:
    there, wanted, limit = remote("mesh"), epoch(opened(stores / "mesh", None))[0], 4 * (BLOCK + 8192)
    reader = opened(there.url, tmp_path, max_bytes=limit)
    for _ in range(2):
        found, stats = epoch(reader)
        assert found == wanted
        assert stats.bytes_fetched > 0
        assert limit // 2 < DiskCache(tmp_path).num_bytes() <= limit


def test_a_folder_that_cannot_be_written(stores: Path, remote: Any, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "scidata"):
        found = epoch(opened(remote("mesh").url, tmp_path / "file" / "cache"))[0]
    assert found == epoch(opened(stores / "mesh", None))[0]
    assert len([r for r in caplog.records if "nothing more is kept" in r.getMessage()]) == 1


def job(store: Path, cache: Path, kind: str, seed: int) -> str | None:
    """Read all parts in some orders, compare them, and return why nothing more is kept."""
    mounts._type_of = lambda device: "nfs4"  # type: ignore[assignment]
    if kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    wanted = epoch(opened(store, None))[0]
    for k in range(1000 if kind == "killed" else 3):
        reader = opened(store, cache, max_bytes=(40 if kind == "small" else 4000) * BLOCK)
        order = np.random.default_rng([seed, k]).permutation(reader.num_samples * 2).tolist()
        for number in order:
            found = reader.read(number // 2, number % 2).arrays()
            for name, values in found.items():
                assert wanted[number // 2, number % 2, name].startswith(values.tobytes())
        if kind == "killed":
            shutil.rmtree(cache, ignore_errors=True)
    assert reader.store.kept is not None
    return reader.store.kept.disk.failure


def test_two_jobs_fill_and_evict_at_once(stores: Path, tmp_path: Path) -> None:
    for kind in ("small", "large"):
        jobs = [Forked(job, stores / "mesh", tmp_path / kind, kind, seed) for seed in range(2)]
        for each in jobs:
            assert "cannot be written" not in str(each.result())


def test_a_disk_that_is_full(stores: Path, tmp_path: Path) -> None:
    assert "cannot be written" in str(Forked(job, stores / "mesh", tmp_path, "full", 0).result())


def test_killed_at_any_time(stores: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Jobs that fill, killed: what is there is whole, and the next one goes on with it."""
    rng = random.Random(0)
    begun = 0
    for number in range(6):
        cache = tmp_path / f"cache{number}"
        process = Forked(job, stores / "mesh", cache, "killed", number)
        end = time.monotonic() + 120
        while not entries(cache) and process.is_alive() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        assert process.kill() == -signal.SIGKILL
        begun += bool(entries(cache))
        with monkeypatch.context() as context:
            context.setattr(mounts, "_type_of", lambda device: "nfs4")
            assert epoch(opened(stores / "mesh", cache))[0] == epoch(opened(stores / "mesh", None))[0]
            assert epoch(opened(stores / "mesh", cache))[1].bytes_fetched == 0
    assert begun >= 3


def test_threads_of_one_reader(stores: Path, remote: Any, tmp_path: Path) -> None:
    there, wanted = remote("mesh"), epoch(opened(stores / "mesh", None))[0]
    reader = opened(there.url, tmp_path, cache_bytes=0)
    reader.partition_of(0)
    there.server.wire.latency = 0.05
    there.forget()
    with ThreadPoolExecutor(6) as threads:
        assert all(found[0] == wanted for found in threads.map(lambda _: epoch(reader), range(6)))
    spans = [get for get in there.server.wire.gets if "/c/" in get[0]]
    assert len(spans) == len(set(spans))  # of threads that want a block, one fetches it
    ours = filesystems.current().load
    assert (ours._requests, ours._nbytes) == (0, 0)


def test_threads_whose_fetch_fails(stores: Path, remote: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Those that waited for another thread's fetch do it themselves."""
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=1))
    there = remote("mesh")
    reader = opened(there.url, tmp_path, 1, fields=["v"])
    reader.read(0, 0)
    shutil.rmtree(tmp_path)
    failed: list[str] = []

    def once(environ: dict[str, Any]) -> str | None:
        if "/node/v/c" in environ["PATH_INFO"] and not failed:
            failed.append(environ["PATH_INFO"])
            return "503"
        return None

    there.server.wire.latency, there.server.wire.fault = 0.1, once
    try:
        with ThreadPoolExecutor(4) as threads:
            results = [threads.submit(reader.read, 0, 0) for _ in range(4)]
            errors = [each.exception() for each in results]
    finally:
        there.server.wire.fault = lambda environ: None
    assert sum(error is not None for error in errors) == 1
    wanted = opened(stores / "mesh", None, 1).read(0, 0).fields["v"]
    for each in results:
        assert each.exception() or np.array_equal(each.result().fields["v"], wanted)


def test_servers_that_fail(stores: Path, remote: Any, tmp_path: Path) -> None:
    """A request that fails is no answer that is kept; the others' are."""
    there = remote("mesh")
    wire = there.server.wire
    wire.fault = lambda environ: "503" if "/node/v/c/" in environ["PATH_INFO"] else None
    try:
        with pytest.raises(OSError, match=r"/node/v/.*tried 3 times"):
            epoch(opened(there.url, tmp_path))
    finally:
        wire.fault = lambda environ: None
    there.forget()
    assert epoch(opened(there.url, tmp_path))[0] == epoch(opened(stores / "mesh", None))[0]
    assert not any("/csr/indptr/" in path for path in there.requests())
    ours = filesystems.current().load
    assert (ours._requests, ours._nbytes) == (0, 0)


def test_after_a_fork(stores: Path, remote: Any, tmp_path: Path) -> None:
    there = remote("mesh")
    reader = opened(there.url, tmp_path)
    wanted = epoch(reader)[0]
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if epoch(reader)[0] == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_raw_points_say_what_to_do(stores: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache_dir: keeps grids and partitioned stores.*scidata partition"):
        scidata.open_dataset(stores / "points.h5", kind="points", cache_dir=tmp_path)


def test_urls_pickle_with_what_keeps_them(remote: Any, tmp_path: Path) -> None:
    reader = opened(remote("mesh").url, tmp_path)
    source = pickle.loads(pickle.dumps(reader.store.source(0)))
    assert isinstance(source.path, KeptUrl)
    assert source.path.key == "sample-000000.zarr"
    assert isinstance(CorruptDataError("x"), OSError)
