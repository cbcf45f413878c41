"""Decoded parts on disk: bit for bit what single reads give, and never what the source no longer has."""

from __future__ import annotations

import contextlib
import http.server
import os
import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import scidata
from scidata.core.options import ReadOptions
from scidata.core.urls import Url, url_of
from scidata.errors import ConfigError, MissingChunkError, SourceChangedError
from scidata.grids.reader import GridReader
from scidata.sources.access import mounts, object_stores, retry, validators
from scidata.sources.access.files import files
from tests.unit._s3 import BUCKET, SECRET, serve
from tests.unit.grids._pool import BIG, OPTIONS, read
from tests.unit.sources._changed_objects import VERSIONED, Handler

SHAPE = (12, 10, 8)


@pytest.fixture(scope="module")
def old(stores: dict[str, Any]) -> dict[str, Any]:
    for path in stores.values():
        for each in [path] if isinstance(path, str) else path:
            settle(Path(each))
    return stores


def settle(path: Path, age: float = 3600.0) -> None:
    """Make files older, as those of archives are: what was written just now is not kept."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            os.utime(file, (time.time() - age,) * 2)


def values(version: int = 0) -> np.ndarray:
    return np.random.default_rng(version).normal(size=SHAPE).astype("f4")


def write(path: Path, version: int = 0, *, chunks: tuple[int, ...] = (4, 5, 8), **options: Any) -> None:
    group = zarr.open_group(path, mode="w")
    array = group.create_array(
        "u", shape=SHAPE, dtype="f4", chunks=chunks, dimension_names=("time", "y", "x"), **options
    )
    array[:] = values(version)
    static = group.create_array("s", shape=SHAPE[1:], dtype="f4", chunks=SHAPE[1:], dimension_names=("y", "x"))
    static[:] = values(version)[0]
    zarr.consolidate_metadata(path)
    settle(path, 3600.0 - version)


def write_hdf5(path: Path, version: int = 0) -> None:
    with h5py.File(path, "w") as file:
        data = file.create_dataset("u", data=values(version), chunks=(4, 5, 8), compression="gzip")
        for dim, label in zip(data.dims, ("time", "y", "x"), strict=True):
            dim.label = label
    settle(path, 3600.0 - version)


def opened(path: Any, cache: Any, axis_sizes: Any = None, **options: Any) -> GridReader:
    """Open as another process would, which has seen nothing of the source."""
    options = {"sample_dim": "time", "num_threads": 0} | options
    if isinstance(path, Url):
        path = Url(path.target, path.options)
    elif isinstance(path, Path):
        path = str(path)
    if cache is not None:
        options |= {"cache_dir": cache, "cache_disk_bytes": BIG}
    return GridReader(path, ReadOptions(**options), axis_sizes=axis_sizes)


def epoch(reader: GridReader, rank: int = 0) -> tuple[dict[str, np.ndarray], Any]:
    """Read all samples; return them by field, and what was read of the source."""
    samples = [read(reader, index, rank) for index in range(reader.num_samples)]
    total = sum((stats for _, stats in samples[1:]), start=samples[0][1])
    return {name: np.stack([sample[name] for sample, _ in samples]) for name in samples[0][0]}, total


def parts(cache: Path) -> list[Path]:
    return [path for path in sorted(cache.rglob("*.rows")) if not path.name.startswith(".new-")]


# -- the same values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lz4", "banded", "sharded", "files"])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize("pool_bytes", [BIG, 0])
def test_samples_are_those_of_single_reads(
    old: dict[str, Any], tmp_path: Path, name: str, options: dict[str, Any], pool_bytes: int
) -> None:
    how = {"shard": {"y": "domain"}, "axis_sizes": {"domain": 3}, "bounds": {"y": (0, 5, 5, 11)}} | options
    alone = opened(old[name], None, **how)
    for again in (False, True):
        kept = opened(old[name], tmp_path, **how, pool_bytes=pool_bytes)
        for rank in range(3):
            fetched = 0
            for index in [*range(0, alone.num_samples, 3), 1, -1]:
                expected, (found, stats) = read(alone, index, rank)[0], read(kept, index, rank)
                for field in expected:
                    assert found[field].dtype == expected[field].dtype
                    assert found[field].tobytes() == expected[field].tobytes()
                fetched += stats.bytes_fetched + stats.bytes_decoded + stats.num_reads
            assert (fetched > 0) == (not again and rank != 1)
        kept.close()
    assert parts(tmp_path)


def test_raw_local_arrays_stay_where_they_are(old: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    epoch(opened(old["raw"], tmp_path))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(mounts, "_type_of", lambda device: "nfs4")
    wanted = epoch(opened(old["raw"], None))[0]
    for again in (False, True):
        found, stats = epoch(opened(old["raw"], tmp_path))
        assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
        assert (stats.bytes_fetched == 0) == again


def test_types_of_file_systems() -> None:
    text = (
        "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
        "61 27 0:52 /x /data rw,nosuid shared:7 master:1 - nfs4 server:/x rw,vers=4.2\n"
        "62 27 0:53 / /a\\040b rw - fuse.sshfs host: rw\n"
    )
    types = [mounts.type_in(text, device) for device in ("0:21", "0:52", "0:53", "0:5")]
    assert types == ["proc", "nfs4", "fuse.sshfs", ""]
    assert [bool(mounts._ON_NETWORK.fullmatch(found)) for found in types] == [False, True, True, False]


def test_what_is_asked_for_otherwise_is_another_part(old: dict[str, Any], tmp_path: Path) -> None:
    """One folder for all: numbers of ranks, halos, fields, dtypes, crops, raw and decoded values, several sources."""
    rng = np.random.default_rng(5)
    for _ in range(40):
        options: dict[str, Any] = {
            "shard": {str(rng.choice(["y", "x"])): "domain"},
            "axis_sizes": {"domain": int(rng.integers(1, 4))},
            "halo": int(rng.integers(0, 3)),
            "fields": [["u"], ["v"], ["u", "v"]][rng.integers(3)],
            "dtype": [None, "f4", "f8"][rng.integers(3)],
            "decode": bool(rng.integers(2)),
            "steps": [(0,), (0, 1)][rng.integers(2)],
            "isel": [{}, {"level": 1}, {"x": slice(None, None, -1)}, {"y": slice(1, None, 2)}][rng.integers(4)],
            "pool_bytes": int(rng.choice([0, BIG])),
            "allow_missing": bool(rng.integers(2)),
        }
        options["periodic"] = list(options["shard"]) if rng.integers(2) else []
        name = str(rng.choice(["lz4", "files", "sharded"]))
        alone, kept = opened(old[name], None, **options), opened(old[name], tmp_path, **options)
        rank = int(rng.integers(options["axis_sizes"]["domain"]))
        for index in rng.integers(0, alone.num_samples, 4).tolist():
            expected, found = read(alone, index, rank)[0], read(kept, index, rank)[0]
            for field in expected:
                assert found[field].dtype == expected[field].dtype
                assert found[field].tobytes() == expected[field].tobytes(), (name, options)


def test_threads_pickles_and_the_loader(old: dict[str, Any], tmp_path: Path) -> None:
    wanted = epoch(opened(old["lz4"], None))[0]
    reader = opened(old["lz4"], tmp_path)
    barrier = threading.Barrier(6)

    def run(i: int) -> int:
        barrier.wait(30)
        decoded = 0
        for index in [*range(i, 37, 6), *range(37)]:
            found, stats = read(reader, index, 0)
            assert found["u"].tobytes() == wanted["u"][index].tobytes()
            decoded += stats.bytes_decoded
        return decoded

    with ThreadPoolExecutor(6) as threads:
        decoded = sum(threads.map(run, range(6)))
    once = opened(old["lz4"], None)
    assert decoded == sum(read(once, index, 0)[1].bytes_decoded for index in range(0, 37, 8))
    other = pickle.loads(pickle.dumps(reader))
    assert epoch(other)[1].bytes_decoded == 0
    for pool_bytes in (0, BIG):
        ds = scidata.open_dataset(old["lz4"], sample_dim="time", cache_dir=tmp_path, pool_bytes=pool_bytes)
        loader = scidata.DataLoader(ds, batch_size=4)
        samples = np.concatenate([batch["v"].numpy() for batch in loader])
        assert samples.tobytes() == wanted["v"].tobytes()
        assert loader.stats()["bytes_fetched"] == 0


def test_a_damaged_part_is_read_again(old: dict[str, Any], tmp_path: Path, caplog: Any) -> None:
    wanted = epoch(opened(old["lz4"], tmp_path))[0]
    rng = np.random.default_rng(0)
    for path in parts(tmp_path):
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content) // 2)] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)
    for again in (False, True):
        found, stats = epoch(opened(old["lz4"], tmp_path))
        assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
        assert (stats.bytes_fetched == 0) == again
    assert len([r for r in caplog.records if "it is dropped" in r.getMessage()]) == 1


# -- sources that change -----------------------------------------------------------------------------------------------


def chunk(path: Path) -> Path:
    return path / "u" / "c" / "1" / "0" / "0"


@pytest.mark.parametrize("options", [{}, {"chunks": (2, 5, 8), "shards": (4, 5, 8)}])
def test_a_chunk_that_is_written_again(tmp_path: Path, options: Any) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache"
    write(store, **options)
    assert np.array_equal(epoch(opened(store, cache))[0]["u"], values())
    write(tmp_path / "other", 1, **options)
    chunk(store).write_bytes(chunk(tmp_path / "other").read_bytes())
    settle(chunk(store), 10)
    expected = values()
    expected[4:8, :5] = values(1)[4:8, :5]
    found, stats = epoch(opened(store, cache))
    assert np.array_equal(found["u"], expected)
    assert 0 < stats.bytes_fetched < epoch(opened(store, None))[1].bytes_fetched / 2
    assert epoch(opened(store, cache))[1].bytes_fetched == 0


def test_times_that_are_set_back(tmp_path: Path) -> None:
    """Other bytes of the same number under the same time, as tools that copy with times leave them."""
    store, cache = tmp_path / "store", tmp_path / "cache"
    write(store)
    epoch(opened(store, cache))
    path, other = chunk(store), store / "u" / "c" / "2" / "0" / "0"
    status = path.stat()
    content = other.read_bytes()
    path.write_bytes(content)
    other.write_bytes(content.ljust(status.st_size, b"\0"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert np.array_equal(epoch(opened(store, cache, isel={"time": slice(0, 8)}))[0]["u"][4:, :5], values()[8:, :5])


@pytest.mark.parametrize("kind", ["zarr", "hdf5", "raw"])
def test_local_files_by_url(tmp_path: Path, kind: str) -> None:
    url, cache = url_of(f"file://{tmp_path}/store"), tmp_path / "cache"
    for version in (0, 1):
        if kind == "hdf5":
            write_hdf5(tmp_path / "store", version)
        else:
            write(tmp_path / "store", version, **({"compressors": None} if kind == "raw" else {}))
        files().close()
        for again in (False, True):
            found, stats = epoch(opened(url, cache, fields="u"))
            assert np.array_equal(found["u"], values(version))
            assert (stats.bytes_fetched == 0) == (again and kind != "raw")


@pytest.mark.parametrize("how", ["in place", "renamed"])
def test_a_file_that_is_replaced(tmp_path: Path, how: str) -> None:
    path, cache = tmp_path / "a.h5", tmp_path / "cache"
    write_hdf5(path)
    running = opened(path, cache)
    assert np.array_equal(epoch(running)[0]["u"], values())
    unused = opened(path, cache)
    read(unused, 0, 0)
    write_hdf5(tmp_path / "b.h5", 1)
    if how == "renamed":
        (tmp_path / "b.h5").rename(path)
    else:
        path.write_bytes((tmp_path / "b.h5").read_bytes())
        settle(path, 10)
    for again in (False, True):
        found, stats = epoch(opened(path, cache))
        assert np.array_equal(found["u"], values(1))
        assert (stats.bytes_fetched == 0) == again
    with pytest.raises(SourceChangedError):  # although what it needs of the new one is there
        read(unused, 11, 0)
    assert np.array_equal(epoch(running)[0]["u"], values())  # as it was when this one looked


def test_how_values_are_decoded(tmp_path: Path) -> None:
    """Attributes lie in other files than chunks, and raw values may have as many bytes."""
    store, cache = tmp_path / "store", tmp_path / "cache"
    array = zarr.open_group(store, mode="w").create_array(
        "u", shape=(4, 6), dtype="i4", chunks=(2, 6), dimension_names=("time", "x")
    )
    array[:] = numbers = np.arange(24, dtype="i4").reshape(4, 6)
    for scale in (0.5, 0.25):
        array.attrs["scale_factor"] = scale
        settle(store)
        for decode in (True, False):
            found = epoch(opened(store, cache, decode=decode, dtype="f4"))[0]["u"]
            assert found.dtype == ("f4" if decode else "i4")
            assert np.array_equal(found, numbers * scale if decode else numbers)


def test_absent_chunks_count(tmp_path: Path) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache"
    write(store)
    content = chunk(store).read_bytes()
    chunk(store).unlink()
    with pytest.raises(MissingChunkError):
        epoch(opened(store, cache))
    expected = values()
    expected[4:8, :5] = 0
    assert np.array_equal(epoch(opened(store, cache, allow_missing=True))[0]["u"], expected)
    assert epoch(opened(store, cache, allow_missing=True))[1].bytes_fetched == 0
    with pytest.raises(MissingChunkError):  # what was allowed there is not here
        epoch(opened(store, cache))
    chunk(store).write_bytes(content)
    settle(chunk(store))
    assert np.array_equal(epoch(opened(store, cache, allow_missing=True))[0]["u"], values())
    assert np.array_equal(epoch(opened(store, cache))[0]["u"], values())
    chunk(store).unlink()
    with pytest.raises(MissingChunkError):
        epoch(opened(store, cache))


def test_steps_that_are_added_leave_the_others(tmp_path: Path) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache"
    write(store)
    epoch(opened(store, cache, fields="u"))
    array = zarr.open_group(store, mode="a")["u"]
    array.append(values(1)[:4], axis=0)
    zarr.consolidate_metadata(store)
    settle(store / "u" / "c" / "3")
    found, stats = epoch(opened(store, cache, fields="u"))
    assert np.array_equal(found["u"], np.concatenate([values(), values(1)[:4]]))
    assert stats.bytes_decoded == 4 * 10 * 8 * 4


def test_what_was_written_just_now_is_not_kept(tmp_path: Path, monkeypatch: Any) -> None:
    """A file that is written twice within its clock's tick keeps its time."""
    store, cache = tmp_path / "store", tmp_path / "cache"
    write(store)
    settle(store, 0.5)
    reader = opened(store, cache)
    assert np.array_equal(epoch(reader)[0]["u"], values())
    assert not parts(cache)
    monkeypatch.setattr(validators, "_SETTLED", 0.0)
    epoch(reader)
    assert parts(cache)


def test_what_changes_while_it_is_read_is_not_kept(tmp_path: Path, monkeypatch: Any) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache"
    write(store)
    reader = opened(store, cache, fields="u")
    real = reader.chain.source.block

    def changing(*args: Any) -> Any:
        found = real(*args)
        settle(store, 1000.0)
        return found

    monkeypatch.setattr(reader.chain.source, "block", changing)
    read(reader, 0, 0)
    assert not parts(cache)


# -- over the network --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with serve() as server:
        client = server.client()
        client.create_bucket(Bucket=VERSIONED)
        client.put_bucket_versioning(Bucket=VERSIONED, VersioningConfiguration={"Status": "Enabled"})
        yield server


@pytest.fixture
def wire(s3: Any, monkeypatch: Any) -> Iterator[Any]:
    monkeypatch.setattr(retry, "RETRY", retry.Retry(attempts=3, first_wait=0.001))
    yield s3.wire
    s3.wire.fault = lambda environ: None


def of_chunks(wire: Any) -> list[str]:
    return [path for path, _ in wire.gets if "/c/" in path]


def at(s3: Any, url: str) -> str:
    return url_of(url, s3.options)


@pytest.mark.parametrize("options", [{}, {"compressors": None}, {"chunks": (2, 5, 8), "shards": (4, 5, 8)}])
@pytest.mark.parametrize("pool_bytes", [0, BIG])
def test_objects_are_fetched_once(
    tmp_path: Path, s3: Any, wire: Any, options: Any, pool_bytes: int, request: Any
) -> None:
    write(tmp_path / "store", **options)
    url = at(s3, s3.put(tmp_path / "store", f"once-{request.node.callspec.id}"))
    for again in (False, True):
        for rank in range(2):
            reader = opened(
                url,
                tmp_path / "cache",
                shard={"y": "d"},
                axis_sizes={"d": 2},
                halo=1,
                steps=(0, 1),
                pool_bytes=pool_bytes,
            )
            wire.forget()
            found, stats = epoch(reader, rank)
            rows = slice(0, 6) if rank == 0 else slice(4, 10)
            assert np.array_equal(found["u"], np.stack([values()[i : i + 2, rows] for i in range(11)]))
            assert np.array_equal(found["s"][0], values()[0][rows])
            assert (stats.bytes_fetched == 0) == again
            if again:
                assert not of_chunks(wire)
                assert not wire.heads
                assert len(wire.gets) <= 2  # of listings, which tell all versions
    for path in tmp_path.joinpath("cache").rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


def test_an_object_that_is_replaced_or_added(tmp_path: Path, s3: Any, wire: Any) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache"
    write(store)
    gone = chunk(store).read_bytes()
    chunk(store).unlink()
    url = at(s3, s3.put(store, "replaced"))
    expected = values()
    expected[4:8, :5] = 0
    assert np.array_equal(epoch(opened(url, cache, allow_missing=True))[0]["u"], expected)
    assert epoch(opened(url, cache, allow_missing=True))[1].bytes_fetched == 0
    s3.client().put_object(Bucket=BUCKET, Key="replaced/u/c/1/0/0", Body=gone)
    assert np.array_equal(epoch(opened(url, cache, allow_missing=True))[0]["u"], values())
    write(tmp_path / "other", 1)
    running = opened(url, cache, fields="u")
    read(running, 0, 0)
    body = (tmp_path / "other/u/c/2/1/0").read_bytes()
    s3.client().put_object(Bucket=BUCKET, Key="replaced/u/c/2/1/0", Body=body)
    expected = values()
    expected[8:, 5:] = values(1)[8:, 5:]
    assert np.array_equal(epoch(opened(url, cache, fields="u"))[0]["u"], expected)
    with contextlib.suppress(SourceChangedError):  # it has listed the old one, and has it on disk
        assert np.array_equal(read(running, 9, 0)[0]["u"], values()[9])


def test_an_object_that_was_seen_before_it_was_listed(tmp_path: Path, s3: Any, wire: Any) -> None:
    write(tmp_path / "store")
    root = at(s3, s3.put(tmp_path / "store", "seen"))
    assert isinstance(root, Url)
    url = root.at("u/c/0/0/0")
    assert files().size(url) > 0
    s3.client().put_object(Bucket=BUCKET, Key="seen/u/c/0/0/0", Body=b"other")
    with pytest.raises(SourceChangedError, match="was replaced"):
        validators.Validators(root).of([url])


def test_a_file_of_hdf5_on_s3(tmp_path: Path, s3: Any, wire: Any) -> None:
    for version in (0, 1):
        write_hdf5(tmp_path / "a.h5", version)
        url = at(s3, s3.put(tmp_path / "a.h5", "a.h5"))
        for again in (False, True):
            reader = opened(url, tmp_path / "cache")
            wire.forget()
            found, stats = epoch(reader)
            assert np.array_equal(found["u"], values(version))
            assert (stats.bytes_fetched == 0) == again
            if again:
                assert (len(wire.gets), len(wire.heads)) == (0, 1)


def test_listings_that_are_refused(tmp_path: Path, s3: Any, wire: Any) -> None:
    write(tmp_path / "store")
    url = at(s3, s3.put(tmp_path / "store", "unlisted"))
    epoch(opened(url, tmp_path / "cache"))
    wire.fault = lambda environ: "403" if "list-type" in environ["QUERY_STRING"] else None
    reader = opened(url, tmp_path / "cache")
    wire.forget()
    found, stats = epoch(reader)
    assert np.array_equal(found["u"], values())
    assert stats.bytes_fetched == 0
    assert sorted(set(wire.heads)) == sorted(wire.heads)  # each object asked for once
    assert len(wire.heads) == 7


def test_an_outage_is_no_reason_to_trust_the_cache(tmp_path: Path, s3: Any, wire: Any) -> None:
    write(tmp_path / "store")
    url = at(s3, s3.put(tmp_path / "store", "outage"))
    epoch(opened(url, tmp_path / "cache"))
    reader = opened(url, tmp_path / "cache")
    wire.fault = lambda environ: "503"
    with pytest.raises(OSError, match="tried 3 times"):
        read(reader, 0, 0)


def test_long_listings(tmp_path: Path, s3: Any, wire: Any, monkeypatch: Any) -> None:
    """Of 120 objects, in any order: a page of 40 for each 40 or so, not a request for each."""
    monkeypatch.setattr(object_stores, "MAX_LISTED", 40)
    array = zarr.open_group(tmp_path / "store", mode="w").create_array(
        "u", shape=(120, 4), dtype="f4", chunks=(1, 4), dimension_names=("time", "x")
    )
    array[:] = numbers = np.arange(480, dtype="f4").reshape(120, 4)
    url = at(s3, s3.put(tmp_path / "store", "long"))
    indices = np.random.default_rng(0).permutation(120)[:60].tolist()
    for again in (False, True):
        reader = opened(url, tmp_path / "cache")
        wire.forget()
        for index in indices:
            assert np.array_equal(read(reader, index, 0)[0]["u"], numbers[index])
        assert bool(of_chunks(wire)) != again
    assert not wire.heads
    assert len(wire.gets) <= 8


def test_a_bucket_with_versions_never_mixes_them(tmp_path: Path, s3: Any, wire: Any) -> None:
    client, cache = s3.client(), tmp_path / "cache"

    def put(version: int) -> str:
        write(tmp_path / "store", version)
        for file in sorted(p for p in (tmp_path / "store").rglob("*") if p.is_file()):
            key = f"v/{file.relative_to(tmp_path / 'store').as_posix()}"
            client.put_object(Bucket=VERSIONED, Key=key, Body=file.read_bytes())
        return at(s3, f"s3://{VERSIONED}/v")

    running = opened(put(0), cache, fields="u")
    assert np.array_equal(read(running, 0, 0)[0]["u"], values()[0])
    url = put(1)
    assert np.array_equal(epoch(opened(url, cache, fields="u"))[0]["u"], values(1))
    for index in (1, 5, 11):
        with contextlib.suppress(SourceChangedError):
            assert np.array_equal(read(running, index, 0)[0]["u"], values()[index])


@pytest.mark.parametrize("tells", ["etag", "time", "nothing"])
def test_web_servers(tmp_path: Path, monkeypatch: Any, caplog: Any, tells: str) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(Handler, "tells", tells)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = url_of(f"http://127.0.0.1:{server.server_port}/web-{tells}?signature=secret")
        for version in (0, 1):
            write(tmp_path / "store", version)
            for file in [p for p in (tmp_path / "store").rglob("*") if p.is_file()]:
                key = f"/web-{tells}/{file.relative_to(tmp_path / 'store').as_posix()}"
                Handler.objects[key] = file.read_bytes(), version
            for again in (False, True):
                reader = opened(url, tmp_path / "cache")
                Handler.asked.clear()
                found, stats = epoch(reader)
                assert np.array_equal(found["u"], values(version))
                assert (stats.bytes_fetched == 0) == (again and tells != "nothing")
                if again and tells != "nothing":
                    assert len([a for a in Handler.asked if a[0] == "HEAD" and "/c/" in a[1]]) == 7
                    assert not [a for a in Handler.asked if a[0] == "GET" and "/c/" in a[1]]
        server.shutdown()
    said = [r.getMessage() for r in caplog.records if "nothing tells a change of its objects" in r.getMessage()]
    assert len(said) == (4 if tells == "nothing" else 0)  # once for each reader
    assert not any("secret" in text for text in said)
    assert bool(parts(tmp_path / "cache")) == (tells != "nothing")


def test_a_chain_of_file_systems_is_not_trusted(tmp_path: Path, caplog: Any) -> None:
    """simplecache never looks whether what it holds is what the server has."""
    write(tmp_path / "store")
    url = url_of(f"simplecache::file://{tmp_path}/store", {"simplecache": {"cache_storage": str(tmp_path / "simple")}})
    reader = opened(url, tmp_path / "cache")
    assert np.array_equal(epoch(reader)[0]["u"], values())
    assert not parts(tmp_path / "cache")
    assert len([r for r in caplog.records if "a chain of file systems" in r.getMessage()]) == 1


def test_a_file_system_of_fsspec_that_is_not_asynchronous(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for version in (0, 1):
        write(tmp_path / "store", version)
        for file in [p for p in (tmp_path / "store").rglob("*") if p.is_file()]:
            memory.pipe_file(f"/kept-store/{file.relative_to(tmp_path / 'store').as_posix()}", file.read_bytes())
        for again in (False, True):
            found, stats = epoch(opened(url_of("memory://kept-store"), tmp_path / "cache"))
            assert np.array_equal(found["u"], values(version))
            assert (stats.bytes_fetched == 0) == again


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments(tmp_path: Path) -> None:
    write(tmp_path / "store")
    (tmp_path / "file").write_text("")
    for options, text in [
        ({"cache_dir": 3}, "cache_dir=3: expected a path"),
        ({"cache_dir": ""}, "expected a path"),
        ({"cache_dir": tmp_path / "file"}, "is a file"),
        ({"cache_dir": "s3://user:secret@bucket/x"}, "not a URL"),
        ({"cache_dir": tmp_path, "cache_disk_bytes": 0}, "cache_disk_bytes must be at least 1"),
        ({"cache_dir": tmp_path, "cache_disk_bytes": 1e9}, "cache_disk_bytes=1000000000.0: expected an integer"),
        ({"cache_disk_bytes": 10}, "cache_disk_bytes: means nothing without cache_dir"),
    ]:
        with pytest.raises(ConfigError, match=text) as caught:
            scidata.open_dataset(tmp_path / "store", sample_dim="time", **options)
        assert "secret" not in str(caught.value)
    with h5py.File(tmp_path / "cloud.h5", "w") as file:
        file["x"], file["y"], file["p"] = np.random.default_rng(0).normal(size=(3, 500))
    with pytest.raises(ConfigError, match=r"cache_dir: keeps grids and partitioned stores, not raw points"):
        scidata.open_dataset(tmp_path / "cloud.h5", cache_dir=tmp_path / "cache")
    ds = scidata.open_dataset(
        tmp_path / "store", sample_dim="time", cache_dir=str(tmp_path / "c"), cache_disk_bytes=BIG
    )
    assert np.array_equal(ds[3]["u"].numpy(), values()[3])
    shutil.rmtree(tmp_path / "c")  # it may be emptied at any time
    assert np.array_equal(ds[3]["u"].numpy(), values()[3])
    assert parts(tmp_path / "c")
