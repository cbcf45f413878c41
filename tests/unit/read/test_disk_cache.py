"""The container of a cache on disk: whole entries or none, whoever dies, fills, evicts or damages it meanwhile."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scidata.read import disk_cache
from scidata.read.disk_cache import DiskCache

BIG = 1 << 30
SHAPE = (5, 3000)  # rows and their bytes


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def rows_of(number: int, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def read(cache: DiskCache, number: int, shape: tuple[int, int] = SHAPE) -> np.ndarray | None:
    out = np.zeros(shape, np.uint8)
    return out if cache.read(key_of(number), shape, [(0, out.reshape(-1).data)]) else None


def entries(cache: DiskCache) -> list[Path]:
    return sorted(Path(cache.directory).rglob("*.rows"))


def warnings(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "scidata"]


def run(code: str, *args: object) -> str:
    """Run a program that has this module's names; return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    begin = "import sys; from tests.unit.read.test_disk_cache import *\n"
    command = [sys.executable, "-c", begin + code, *map(str, args)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rows_come_back(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "new" / "cache", BIG)
    assert read(cache, 0) is None
    assert not (tmp_path / "new").exists()
    for number in range(3):
        assert cache.put(key_of(number), rows_of(number))
    for other in (cache, pickle.loads(pickle.dumps(cache)), DiskCache(tmp_path / "new/cache")):
        for number in range(3):
            assert np.array_equal(read(other, number), rows_of(number))
        some = np.zeros((3, 3000), np.uint8)
        assert other.read(key_of(1), SHAPE, [(4, some[0].data), (1, some[1:].reshape(-1).data)])
        assert np.array_equal(some, rows_of(1)[[4, 1, 2]])
        assert read(other, 3) is None
    assert cache.num_bytes() == 3 * cache.entry_nbytes(*SHAPE) == sum(p.stat().st_size for p in entries(cache))
    assert cache.put(key_of(1), rows_of(1))  # there already
    assert len(entries(cache)) == 3


def test_damage_anywhere_is_never_served(tmp_path: Path, caplog: Any) -> None:
    cache, shape = DiskCache(tmp_path, BIG), (3, 50)
    good = rows_of(7, shape)
    cache.put(key_of(7), good)
    (path,) = entries(cache)
    content, rng, served = path.read_bytes(), np.random.default_rng(0), 0
    end = disk_cache._header_nbytes(3) + good.size
    for place in range(end + 20):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        found = read(cache, 7, shape)
        assert found is None or (place >= end and np.array_equal(found, good))
        assert path.exists() == (found is not None)
        served += found is not None
    assert served == 20  # past the rows, to the end of the block
    assert len([w for w in warnings(caplog) if "it is dropped, and its data come from the source again" in w]) == 1
    for length in (0, 1, 63, 64, end - 1, len(content) - 1, len(content) + 1):
        path.write_bytes(content.ljust(length, b"\0")[:length])
        assert read(cache, 7, shape) is None
    cache.put(key_of(8), rows_of(8, shape))
    other = entries(cache)[0]
    path.parent.mkdir(exist_ok=True)
    other.rename(path)  # whole, in the place of another
    assert read(cache, 7, shape) is None
    assert cache.put(key_of(7), good)
    assert read(cache, 7, (50, 3)) is None


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    one = DiskCache(tmp_path).entry_nbytes(*SHAPE)
    cache = DiskCache(tmp_path, 20 * one)
    for number in range(20):
        assert cache.put(key_of(number), rows_of(number))
    for number in range(20):
        os.utime(cache._path(key_of(number)), (0, 10**9 + number))
    used = [0, 1]  # the oldest but for that
    assert all(read(cache, number) is not None for number in used)
    for number in range(20, 30):
        assert cache.put(key_of(number), rows_of(number))
        assert cache.num_bytes() <= 20 * one
    assert all(read(cache, number) is not None for number in [*used, *range(20, 30)])
    assert all(read(cache, number) is None for number in range(2, 12))
    assert sum(read(cache, number) is not None for number in range(12, 20)) >= 5
    assert not cache.put(key_of(99), rows_of(99, (1, 21 * one)))  # more than all of it
    assert DiskCache(tmp_path).max_bytes > 20 * one  # half of the disk


def test_other_files_stay(tmp_path: Path) -> None:
    one = DiskCache(tmp_path).entry_nbytes(*SHAPE)
    cache = DiskCache(tmp_path, 3 * one)
    cache.put(key_of(0), rows_of(0))
    folder = entries(cache)[0].parent
    own = [tmp_path / "notes.txt", folder / "notes.rows", folder / ("0" * 62), folder.parent / "model.pt"]
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder.parent / "ff").exists() or (folder.parent / "ff").symlink_to(outside)
    own.append(outside / ("1" * 62 + ".rows"))
    link = folder / ("2" * 62 + ".rows")
    for path in own:
        path.write_bytes(b"mine" * 5000)
        os.utime(path, (0, 0))
    link.symlink_to(own[0])
    for number in range(12):
        cache.put(key_of(number), rows_of(number))
    assert all(path.read_bytes() == b"mine" * 5000 for path in own)
    assert cache.num_bytes() <= 3 * one


_KILLED = """
import random, signal
folder, cache = sys.argv[1], DiskCache(sys.argv[1], 40 * DiskCache(".").entry_nbytes(*SHAPE))
random.seed(0)
filled = 0
for number in range(60):
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        for k in range(10**6):
            cache.put(key_of(1000 * number + k), rows_of(1000 * number + k))
            os.write(begins, b"1")
    if number % 2:
        os.read(begun, 1)  # a busy machine may not have run it at all
    time.sleep(random.uniform(0.001, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(begun)
    os.close(begins)
    for path in entries(cache):
        if path.name.startswith(".new-"):
            filled += 1
    total = sum(p.stat().st_size for p in entries(cache) if not p.name.startswith(".new-"))
    assert total <= cache.max_bytes, total
found = sum(read(cache, 1000 * number + k) is not None for number in range(60) for k in range(200))
names = [p for p in entries(cache) if not p.name.startswith(".new-")]
assert found == len(names) > 5, (found, len(names))
for number in range(60):
    for k in range(200):
        values = read(cache, 1000 * number + k)
        assert values is None or np.array_equal(values, rows_of(1000 * number + k))
print(filled)
"""


def test_killed_at_any_time(tmp_path: Path) -> None:
    """60 processes that fill, each killed: what is there is whole, and what they leave behind goes."""
    left = int(run(_KILLED, tmp_path))
    assert left > 0  # some were killed while they wrote
    cache = DiskCache(tmp_path, BIG)
    for path in entries(cache):
        if path.name.startswith(".new-"):
            os.utime(path, (0, time.time() - 700))
    cache.num_bytes()
    assert not [path for path in entries(cache) if path.name.startswith(".new-")]


_FILLING = """
one = DiskCache(".").entry_nbytes(*SHAPE)
cache = DiskCache(sys.argv[1], 30 * one)
rng, hits = np.random.default_rng(int(sys.argv[2])), 0
for number in rng.integers(0, 60, 800).tolist():
    values = read(cache, number)
    assert values is None or np.array_equal(values, rows_of(number)), number
    if values is None:
        cache.put(key_of(number), rows_of(number))
    hits += values is not None
assert not cache.failure, cache.failure
print(hits)
"""


def test_two_jobs_fill_and_evict_at_once(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, BIG)
    limit = 30 * cache.entry_nbytes(*SHAPE)
    cache.put(key_of(0), rows_of(0))
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(run, _FILLING, tmp_path, seed) for seed in range(2)]
        most = 0
        while not all(job.done() for job in jobs):
            with cache._counted() as (total, _):  # so that no file comes or goes while they are listed
                found = cache.num_bytes()
                assert found <= total
            most = max(most, found)
            time.sleep(0.01)
        hits = [int(job.result()) for job in jobs]
    assert limit / 2 < most <= limit
    assert min(hits) > 150


_FULL = """
import resource
sys.dont_write_bytecode = True  # a cut .pyc would be there for all that import the module after this
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
cache = DiskCache(sys.argv[1], 1 << 30)
for number in range(3):
    assert not cache.put(key_of(number), rows_of(number))
    assert read(cache, number) is None
assert cache.put(key_of(5), rows_of(5, (1, 900))) is False  # not tried again for a while
assert "cannot be written" in cache.failure
assert not entries(cache)
"""


def test_files_that_may_not_be_so_large(tmp_path: Path) -> None:
    run(_FULL, tmp_path)


_NO_SPACE = """
import logging
logging.basicConfig()
cache = DiskCache(sys.argv[1], 1 << 30)
done = [cache.put(key_of(number), rows_of(number, (4, 50_000))) for number in range(12)]
assert done == sorted(done, reverse=True) and True in done and False in done, done
assert "No space left" in cache.failure
good = done.count(True)
for number in range(12):
    values = read(cache, number, (4, 50_000))
    assert (values is not None) == (number < good)
    assert values is None or np.array_equal(values, rows_of(number, (4, 50_000)))
disk_cache._QUIET = cache._quiet_until = 0
os.unlink(entries(cache)[0])
assert cache.put(key_of(30), rows_of(30, (4, 50_000)))  # room again
print(len(entries(cache)))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A file system of 1 MiB of its own, where a process may mount one."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no mounts of one's own here")
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    code = "from tests.unit.read.test_disk_cache import *\nimport sys\n" + _NO_SPACE
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} || exit 77; exec "$0" -c "$1" "$2"', sys.executable, code, tmp_path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("tmpfs may not be mounted here")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nothing more is kept there for now") == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache", BIG)
    for number in range(3):
        assert read(cache, number) is None
        assert not cache.put(key_of(number), rows_of(number))
    assert len(warnings(caplog)) == 2  # of reading and of writing


def test_whoever_holds_the_lock_stops_nobody(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    cache = DiskCache(tmp_path, BIG)
    assert cache.put(key_of(0), rows_of(0))
    monkeypatch.setattr(disk_cache, "_PATIENCE", 2.0)
    with open(tmp_path / "scidata-parts" / "total", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begin = time.monotonic()
        assert not any(cache.put(key_of(number), rows_of(number)) for number in range(1, 9))
        assert time.monotonic() - begin < 10  # waited once, not eight times
        assert np.array_equal(read(cache, 0), rows_of(0))
    assert len(warnings(caplog)) == 1
    cache._quiet_until = 0.0
    assert cache.put(key_of(1), rows_of(1))


@pytest.mark.parametrize("content", [b"", b"\xff" * 12, b"\0" * 12, b"123"])
def test_a_wrong_total_is_counted_anew(tmp_path: Path, content: bytes) -> None:
    one = DiskCache(tmp_path).entry_nbytes(*SHAPE)
    cache = DiskCache(tmp_path, 10 * one)
    for number in range(10):
        cache.put(key_of(number), rows_of(number))
    (tmp_path / "scidata-parts" / "total").write_bytes(content)
    for number in range(10, 15):
        assert cache.put(key_of(number), rows_of(number))
        assert cache.num_bytes() <= 10 * one


def test_threads(tmp_path: Path, caplog: Any) -> None:
    cache = DiskCache(tmp_path, 12 * DiskCache(tmp_path).entry_nbytes(*SHAPE))

    def work(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, 20, 100).tolist():
            values = read(cache, number)
            assert values is None or np.array_equal(values, rows_of(number))
            if values is None:
                cache.put(key_of(number), rows_of(number))

    with caplog.at_level(logging.WARNING, "scidata"), ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not warnings(caplog)
