"""``scidata stage``: training with ``cache_dir`` then reads nothing of the source but what tells it is the same."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from typer.testing import CliRunner

import scidata
from scidata.cli.app import app
from scidata.core.options import ReadOptions
from scidata.core.urls import url_of
from scidata.grids import staging
from scidata.grids.reader import GridReader
from scidata.read.disk_cache import DiskCache
from scidata.sources.access import filesystems
from tests.unit._children import Forked
from tests.unit._s3 import KEY, SECRET

SHAPE = (24, 13, 10)
VALUES = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype("f4")


def run(*args: object, code: int = 0, **options: Any) -> Any:
    result = CliRunner().invoke(app, ["stage", *map(str, args)], **options)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in args and not code else result


def age(path: Path) -> None:
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            os.utime(file, (time.time() - 100,) * 2)


@pytest.fixture(scope="module")
def store(tmp_path_factory: Any) -> Path:
    """Fields of whole chunks that every rank needs, and of small ones; one without time, one raw."""
    path = tmp_path_factory.mktemp("stage") / "store"
    group = zarr.open_group(path, mode="w")
    for name, chunks, more in (
        ("u", (8, 13, 10), {}),
        ("v", (1, 5, 10), {}),
        ("raw", (1, 13, 10), {"compressors": None}),
    ):
        data = VALUES[0 if name == "u" else 1]
        array = group.create_array(
            name, shape=SHAPE, dtype="f4", chunks=chunks, dimension_names=("time", "y", "x"), **more
        )
        array[:] = data
    static = group.create_array("s", shape=SHAPE[1:], dtype="f4", chunks=SHAPE[1:], dimension_names=("y", "x"))
    static[:] = VALUES[0, 0]
    age(path)
    return path


CUT = ("--sample-dim", "time", "--shard", "y", "--halo", "y=1", "--periodic", "y", "--steps", "0,2")
HOW: dict[str, Any] = {
    "sample_dim": "time", "shard": {"y": "domain"}, "halo": {"y": 1}, "periodic": ["y"], "steps": (0, 2),
}  # fmt: skip


def check(path: Any, cache: Path, num_ranks: int, ranks: Any, **more: Any) -> Any:
    """Read all samples of ranks with the cache, compare them with the arrays; return what was read of the source."""
    reader = GridReader(path, ReadOptions(**HOW, **more, cache_dir=cache), axis_sizes={"domain": num_ranks})
    total, rows = [], np.arange(13)
    for rank in ranks:
        coordinate = reader.partition.coordinate(rank)
        start, stop = reader.partition.owned_rows("y", coordinate)
        local = rows[np.arange(start - 1, stop + 1) % 13]
        specs = reader.buffer_specs(coordinate)
        for index in range(reader.num_samples):
            out = {name: np.full(spec.shape, 1e30, spec.dtype) for name, spec in specs.items()}
            total.append(reader.read_into(index, out, coordinate))
            assert np.array_equal(out["u"], VALUES[0, [index, index + 2]][:, local])
            assert np.array_equal(out["v"], VALUES[1, [index, index + 2]][:, local])
            assert np.array_equal(out["s"], VALUES[0, 0, local])
    reader.close()
    return sum(total[1:], start=total[0])


def test_then_nothing_is_read(store: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = run(store, cache, "--domain", 3, *CUT, "--rank", "0-1", "--fields", "u,v,s", "--json")
    assert (first["written"], first["there"], first["left"], first["ranks"]) == (2 * (3 + 24 + 1), 0, 0, [0, 1])
    again = run(store, cache, "--domain", 3, *CUT, "--fields", "u,v,s", "--json", "--jobs", 1)
    assert (again["written"], again["there"], again["parts"]) == (28, 56, 84)
    assert again["bytes_written"] + again["bytes_there"] == again["bytes"] == DiskCache(cache).num_bytes()
    whole = run(store, cache, "--domain", 3, *CUT, "--fields", "u,v,s")
    assert "84 of 84 parts" in whole.stdout
    assert "0 written, 84 there already; 0 B fetched" in whole.stdout
    stats = check(str(store), cache, 3, range(3), fields=["u", "v", "s"])
    assert (stats.bytes_fetched, stats.bytes_decoded, stats.num_reads) == (0, 0, 0)
    other = check(str(store), cache, 2, range(2), fields=["u", "v", "s"])
    assert other.bytes_fetched > 0  # parts of another domain


def test_the_data_set_of_a_script(store: Path, tmp_path: Path) -> None:
    run(store, tmp_path / "cache", "--domain", 1, "--sample-dim", "time", "--steps", "0,1", "--dtype", "float64")
    ds = scidata.open_dataset(
        store, sample_dim="time", steps=(0, 1), dtype=torch.float64, cache_dir=tmp_path / "cache",
        fields=["u", "v", "s"],
    )  # fmt: skip
    loader = scidata.DataLoader(ds)
    assert sum(len(batch["u"]) for batch in loader) == 23
    assert loader.stats()["bytes_fetched"] == 0
    result = run(store, tmp_path / "cache", "--domain", 1, "--sample-dim", "time")
    assert "not kept, raw on a local disk already: raw" in result.stdout


def test_chunks_that_ranks_share_are_decoded_once(store: Path, tmp_path: Path, monkeypatch: Any) -> None:
    arguments = (store, "--domain", 4, *CUT, "--fields", "u", "--json")
    found = run(arguments[0], tmp_path / "a", *arguments[1:])
    assert found["bytes_decoded"] == VALUES[0].nbytes
    monkeypatch.setattr(staging, "MAX_SHARED_BYTES", 1000)  # where memory is short: rank by rank
    alone = run(arguments[0], tmp_path / "b", *arguments[1:])
    assert alone["bytes_decoded"] == 4 * VALUES[0].nbytes
    names = [sorted(path.name for path in (tmp_path / cache).rglob("*.rows")) for cache in "ab"]
    assert names[0] == names[1]
    assert all(
        path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
        for path in (tmp_path / "a").rglob("*.rows")
    )


def test_two_dimensions_strides_and_empty_parts(store: Path, tmp_path: Path) -> None:
    cut = ("--shard", "y", "--shard", "x", "--isel", "y=12:0:-2", "--isel", "time=2:20:3", "--bounds", "y=0,1,6")
    run(store, tmp_path, "--domain", "2x3", "--sample-dim", "time", *cut, "--fields", "u,v", "--halo", "x=2")
    how: dict[str, Any] = {
        "shard": {"y": "h", "x": "w"}, "sample_dim": "time", "fields": ["u", "v"],
        "isel": {"y": slice(12, 0, -2), "time": slice(2, 20, 3)}, "bounds": {"y": [0, 1, 6]}, "halo": {"x": 2},
    }  # fmt: skip
    reader, alone = (
        GridReader(str(store), ReadOptions(**how, cache_dir=folder), axis_sizes={"h": 2, "w": 3})
        for folder in (tmp_path, None)
    )
    for rank in range(6):
        coordinate = reader.partition.coordinate(rank)
        for index in range(reader.num_samples):
            outs = [
                {name: np.empty(spec.shape, spec.dtype) for name, spec in reader.buffer_specs(coordinate).items()}
                for _ in range(2)
            ]
            assert reader.read_into(index, outs[0], coordinate).bytes_decoded == 0
            alone.read_into(index, outs[1], coordinate)
            assert all(outs[0][name].tobytes() == outs[1][name].tobytes() for name in "uv")


def test_what_does_not_fit_is_said_first(store: Path, tmp_path: Path) -> None:
    arguments = (store, tmp_path, "--domain", 2, *CUT, "--fields", "v", "--cache-bytes", "100K")
    result = run(*arguments)
    assert "do not fit in the 100 KiB" in result.stderr
    assert "give more --cache-bytes, or fewer ranks" in result.stderr
    assert DiskCache(tmp_path).num_bytes() <= 100 << 10
    report = run(*arguments, "--json")
    assert report["written"] == 0  # nothing has pushed out what came before it
    assert report["left"] + report["there"] == report["parts"] == 48
    assert report["bytes_there"] > 90 << 10


def stage(arguments: list[str]) -> None:
    app(arguments)


def test_killed_and_run_again(store: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    arguments = ["stage", store, tmp_path, "--domain", "3", *CUT, "--fields", "u,v,s", "--jobs", "2"]
    held = 0
    for _ in range(2):
        process = Forked(stage, list(map(str, arguments)))
        end = time.monotonic() + 60
        while DiskCache(tmp_path).num_bytes() <= held and process.is_alive() and time.monotonic() < end:
            time.sleep(0.001)  # until something is written
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        held = DiskCache(tmp_path).num_bytes()
    last = run(*arguments[1:], "--json")
    assert last["written"] + last["there"] == last["parts"] == 84
    assert last["there"] > 0
    assert check(str(store), tmp_path, 3, range(3), fields=["u", "v", "s"]).bytes_fetched == 0


def test_failures_and_wrong_usage(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, text in [
        ((store, tmp_path / "c", "--domain", 2, "--rank", "2"), "out of range"),
        ((store, tmp_path / "c", "--domain", 2, "--rank", "1-0"), "out of range"),
        ((store, tmp_path / "c", "--domain", 2, "--rank", "x"), "not an integer"),
        ((store, tmp_path / "c", "--domain", 2, "--cache-bytes", "many"), "no number of bytes"),
        ((store, tmp_path / "c", "--domain", 2, "--cache-bytes", "0"), "no number of bytes"),
        ((store, tmp_path / "file", "--domain", 2), "is a file, not a folder"),
        ((store, "s3://bucket/cache", "--domain", 2), "not a URL"),
        ((store, tmp_path / "c", "--domain", 2, "--fields", "w"), "no field 'w'"),
    ]:
        result = run(*arguments, code=2)
        assert text in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "c").exists()
    assert "no such file" in run(tmp_path / "no", tmp_path / "c", "--domain", 2, code=1).output
    full = run(store, tmp_path / "file" / "below", "--domain", 2, "--sample-dim", "time", code=1)
    assert "error: " in full.output
    damaged = tmp_path / "damaged"
    array = zarr.open_group(damaged, mode="w").create_array(
        "u", shape=(4, 6), chunks=(1, 6), dtype="f4", dimension_names=("time", "x")
    )
    array[:] = 1
    (damaged / "u/c/2/0").write_bytes(b"no")
    age(damaged)
    assert "chunk (2, 0)" in run(damaged, tmp_path / "c", "--domain", 1, code=1).output
    (damaged / "u/c/2/0").unlink()
    arguments = (damaged, tmp_path / "c", "--domain", 1, "--sample-dim", "time", "--json")
    assert run(*arguments, "--allow-missing")["written"] == 4


def test_source_written_just_now(tmp_path: Path) -> None:
    """The command waits until its times would tell another change."""
    array = zarr.open_group(tmp_path / "new", mode="w").create_array(
        "u", shape=(4, 6), chunks=(1, 6), dtype="f4", dimension_names=("time", "x")
    )
    array[:] = 1
    assert run(tmp_path / "new", tmp_path / "c", "--domain", 1, "--sample-dim", "time", "--json")["written"] == 4


def test_from_s3(store: Path, tmp_path: Path, s3: Any, monkeypatch: Any) -> None:
    """Staged by the command with the environment's credentials, read with those of a script."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(filesystems, "_filesystems", filesystems.FileSystems())  # which are known by options alone
    url = s3.put(store, "staged")
    report = run(url, tmp_path, "--domain", 3, *CUT, "--isel", "time=0:8", "--json")
    assert report["written"] == report["parts"] == 3 * (1 + 8 + 8 + 1)
    files = [p for p in store.rglob("c/**/*") if p.is_file()]
    assert report["bytes_fetched"] < 0.4 * sum(p.stat().st_size for p in files)  # 8 of 24 times
    s3.wire.forget()
    stats = check(url_of(url, s3.options), tmp_path, 3, range(3), isel={"time": slice(0, 8)})
    assert (stats.bytes_fetched, stats.num_reads) == (0, 0)
    assert not [path for path, _ in s3.wire.gets if "/c/" in path]
    assert not [path for path in s3.wire.heads if "/c/" in path]
