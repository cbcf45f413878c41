"""Descriptors that are shared, evicted and used again, and files that are replaced while they are read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scidata.device_mesh.board import processes
from scidata.errors import SourceChangedError
from scidata.sources.access import files
from scidata.sources.access.files import FileCache, Versions
from tests.faults.descriptors import data_sets, run_apart


def test_a_descriptor_stays_open_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between look-up and read another thread evicts the handle, and opens a file that may get its number."""
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 8)
    cache, reached, evicted = FileCache(max_open=1), threading.Event(), threading.Event()
    preadv = os.preadv

    def late(descriptor: int, views: list[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            evicted.wait(10)
        return preadv(descriptor, views, offset)

    def read(method: str) -> bytes:
        buffer, path = bytearray(8), str(tmp_path / "a")
        if method == "read_at_once":
            assert cache.read_at_once(path, 0, memoryview(buffer))
        elif method == "read_each":
            assert cache.read_each(path, [0], [memoryview(buffer)]) == 1
        else:
            cache.read_into(path, 0, [buffer])
        return bytes(buffer)

    monkeypatch.setattr(files.os, "preadv", late)
    with ThreadPoolExecutor(1) as pool:
        for method in ("read_at_once", "read_each", "read_into"):
            reached.clear()
            evicted.clear()
            reading = pool.submit(read, method)
            assert reached.wait(10)
            assert bytes(cache.read(str(tmp_path / "b"), 0, 8)) == b"b" * 8
            evicted.set()
            assert reading.result() == b"a" * 8, method
            cache.close()


@pytest.mark.slow_for("layouts=('crc32c', 'zstd_crc32c', 'gzip', 'zstd')", "layouts=('sharded', 'hdf5')")
@pytest.mark.parametrize("layouts", [("raw", "blosc"), ("crc32c", "zstd_crc32c", "gzip", "zstd"), ("sharded", "hdf5")])
def test_every_value_under_a_low_limit_of_open_files(layouts: tuple[str, ...]) -> None:
    with data_sets(layouts) as folder:
        code, said = run_apart(folder, limit=64, num_readers=8, seconds=1, layouts=layouts)
    assert code == 0, said


def test_readers_wait_for_a_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All descriptors are in use for a moment."""
    (tmp_path / "a").write_bytes(b"a")
    tries, opened = [], os.open

    def scarce(path: str, *args: int) -> int:
        tries.append(path)
        if len(tries) < 4:
            raise OSError(24, "Too many open files", path)
        return opened(path, *args)

    monkeypatch.setattr(files.os, "open", scarce)
    assert bytes(FileCache().read(str(tmp_path / "a"), 0, 1)) == b"a"
    assert len(tries) == 4


@pytest.mark.parametrize("most", [100, 1 << 30])
def test_room_for_many_descriptors_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    made, fcntl = [], files.fcntl.fcntl

    def counted(descriptor: int, command: int, number: int) -> int:
        made.append(number)
        return fcntl(descriptor, command, number)

    monkeypatch.setattr(files.fcntl, "fcntl", counted)
    cache = FileCache(max_open=most)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        (tmp_path / str(number)).write_bytes(b"a")
        assert bytes(cache.read(str(tmp_path / str(number)), 0, 1)) == b"a"
        assert len(made) == (number >= 15)  # a few files need none
        if number == 20:
            cache.close()
    assert made[0] > most  # also where the process may not have so many
    cache.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("module", [files, processes])
def test_descriptors_close_when_the_interpreter_has_cleared_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    (tmp_path / "a").write_bytes(b"a")
    before = len(os.listdir("/proc/self/fd"))
    kept = [files._Handle(str(tmp_path / "a")) if module is files else processes.StepShown()]
    assert len(os.listdir("/proc/self/fd")) > before
    monkeypatch.setattr(module, "os", None)
    kept.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def _at_once(*calls: Callable[[], object]) -> list[object]:
    """Return what calls on threads of their own return, or raise, with a barrier that each may wait at."""

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except SourceChangedError as error:
            return type(error)

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


def test_two_threads_that_meet_a_file_first_take_it_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(2)

    class Slow(dict[str, Any]):
        def get(self, *key: Any) -> Any:
            found = super().get(*key)
            barrier.wait(30)
            return found

    versions = Versions()
    versions._seen = Slow()
    found = _at_once(lambda: versions.note("f", (1, 2, 3)), lambda: versions.note("f", (1, 2, 4)))
    assert sorted(map(str, found)) == sorted(map(str, [None, SourceChangedError]))

    (tmp_path / "f").write_bytes(b"1")
    cache, opened = FileCache(), files._Handle

    def slow(path: str, real: str) -> Any:
        barrier.wait(30)
        return opened(path, real)

    monkeypatch.setattr(files, "_Handle", slow)
    first, second = _at_once(*[lambda: cache._handle(str(tmp_path / "f"))] * 2)
    assert first is second
