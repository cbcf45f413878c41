"""Small samples: the loop reads for itself where that is faster, threads where it is not."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import scidata
from scidata.core.memory import ArrayPool
from scidata.core.types import BufferSpec
from scidata.data import grid_dataset
from scidata.loader.prefetch import own_reads
from scidata.loader.prefetch.buffers import buffer_ring
from scidata.loader.prefetch.own_reads import OwnReads
from scidata.loader.prefetch.prefetcher import Prefetcher

SPECS = {"u": BufferSpec(shape=(3,), dtype=np.dtype(np.float32))}


def run(decides: OwnReads, steps: int, *, ahead: float, own: float, read: float, loop: float = 0.0004) -> list[bool]:
    """Let steps take so many seconds, by who reads, of which the loop takes ``loop``; return who did."""
    at, who = 0.0, []
    decides.begin()
    for _ in range(steps):
        is_own = decides.now
        before, at = at, at + (own if is_own else ahead)
        decides.step(asked=before + loop, at=at, read=read, own=is_own)
        who.append(is_own)
    return who


def test_the_faster_way_is_kept_and_tried_again() -> None:
    decides = OwnReads()
    who = run(decides, 200, ahead=0.0008, own=0.0005, read=0.0004)
    assert not any(who[:7])
    assert sum(who) > 150
    who = run(decides, 2600, ahead=0.0004, own=0.0008, read=0.0004)  # the loop has something to do now
    assert not any(who[-500:])
    assert sum(who) < 1300
    who = run(decides, 1300, ahead=0.0008, own=0.0005, read=0.0004)
    assert all(who[-500:])


def test_threads_are_left_alone_where_they_are_as_good_or_samples_large() -> None:
    assert sum(run(OwnReads(), 1000, ahead=0.01, own=0.0103, read=0.0004)) < 100  # tried, and no better
    assert not any(run(OwnReads(), 1000, ahead=0.004, own=0.003, read=0.003))
    assert not any(run(OwnReads(), 1000, ahead=0.1, own=0.09, read=0.001))  # hardly matters


def test_threads_in_each_others_way_do_not_make_small_samples_large() -> None:
    who = run(OwnReads(), 200, ahead=0.0016, own=0.0008, read=0.0026, loop=0.0)
    assert sum(who) > 150


def test_what_was_slow_the_first_time_is_tried_again_soon() -> None:
    decides = OwnReads()
    run(decides, 28, ahead=0.0020, own=0.0007, read=0.0006, loop=0.0)  # threads that touch their memory first
    assert decides.now
    who = run(decides, 2000, ahead=0.0005, own=0.0007, read=0.0006, loop=0.0)
    assert all(who[:60])
    assert sum(who[70:]) < 100  # and each time later


def test_a_loop_that_waits_for_something_has_threads_beside_it_unless_they_are_slower() -> None:
    assert sum(run(OwnReads(), 1000, ahead=0.0053, own=0.0052, read=0.0004, loop=0.005)) < 100
    assert sum(run(OwnReads(), 1000, ahead=0.0053, own=0.0050, read=0.0004, loop=0.005)) > 900


def test_a_loop_that_does_nothing_needs_no_threads_that_gain_little() -> None:
    assert all(run(OwnReads(), 3000, ahead=0.00050, own=0.00054, read=0.0004, loop=0.0)[1100:2000])
    assert sum(run(OwnReads(), 1000, ahead=0.0003, own=0.0005, read=0.0004, loop=0.0)) < 100
    assert sum(run(OwnReads(), 1000, ahead=0.00250, own=0.00254, read=0.0004, loop=0.002)) < 100


def test_reads_that_become_slow_go_back_to_threads() -> None:
    decides = OwnReads()
    run(decides, 200, ahead=0.0008, own=0.0005, read=0.0004)
    assert decides.now
    who = run(decides, 100, ahead=0.02, own=0.02, read=0.02)
    assert not any(who[50:])


def test_threads_that_take_turns_count_with_both_their_steps() -> None:
    """Of two threads every other step is quick: no median of steps tells what a step takes."""
    decides, at = OwnReads(), 0.0
    for number in range(80):
        before, at = at, at + (0.0005 if decides.now else (0.0001, 0.0013)[number % 2])
        decides.step(asked=before, at=at, read=0.0004, own=decides.now)
    assert decides.now


class _Forced(OwnReads):
    """Changes sides every five items."""

    def step(self, *, asked: float, at: float, read: float, own: bool) -> None:
        self.count = getattr(self, "count", 0) + 1
        if self.count % 5 == 0:
            self.now = not self.now


def test_items_come_in_order_through_all_changes_each_read_once_and_errors_at_their_turn() -> None:
    readers: dict[int, str] = {}

    def fill(index: int, out: dict[str, np.ndarray]) -> int:
        assert index not in readers
        readers[index] = threading.current_thread().name
        if index == 57:
            raise OSError("a flipped bit")
        out["u"][...] = index
        return 1

    items = [[2 * k, 2 * k + 1] for k in range(40)]
    got = []
    prefetcher = Prefetcher(items, fill, buffer_ring(SPECS, 2, ArrayPool()), own_reads=_Forced())
    for item, tensors in itertools.islice(prefetcher, 28):
        assert tensors["u"][:, 0].tolist() == item
        got.append(item)
    with pytest.raises(OSError, match="a flipped bit") as caught:
        next(prefetcher)
    assert got == items[:28]
    assert caught.value.__notes__ == ["while reading sample 57 (number 1 of batch 28)"]
    main = {index // 2 for index, name in readers.items() if name == threading.current_thread().name}
    assert 5 < len(main) < 25
    assert all(name.startswith("scidata-reader") for index, name in readers.items() if index // 2 not in main)


def test_leaving_amid_own_reads_ends_the_threads() -> None:
    def fill(index: int, out: dict[str, np.ndarray]) -> int:
        return 1

    for count in (3, 7, 12):
        prefetcher = Prefetcher([[k] for k in range(40)], fill, buffer_ring(SPECS, 2, ArrayPool()), own_reads=_Forced())
        for _ in range(count):
            next(prefetcher)
        prefetcher.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("scidata-reader")]


@pytest.fixture
def path(tmp_path: Path) -> str:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    array = group.create_array(
        "u", shape=(300, 40, 50), dtype="f4", chunks=(1, 40, 50), dimension_names=("t", "y", "x")
    )
    array[:] = np.arange(1, 301, dtype=np.float32)[:, None, None]
    return str(tmp_path / "a.zarr")


def readers_of(
    loader: Any, seconds: float = 0.0, read: float = 0.0, *, field: str = "u"
) -> tuple[list[int], list[str]]:
    """Run an epoch; return the samples and, for each of its last quarter, the thread that read it."""
    inner, names, seen = loader.dataset.read_into, [], []

    def read_into(index: int, out: Any) -> Any:
        names.append(threading.current_thread().name.rpartition("-")[0])
        time.sleep(read)
        return inner(index, out)

    loader.dataset.read_into = read_into
    try:
        for sample in loader:
            assert float(sample[field].reshape(-1)[0]) == sample.index + 1
            seen.append(sample.index)
            if seconds:
                time.sleep(seconds)
    finally:
        del loader.dataset.read_into
    return seen, names[-75:]


def test_a_loop_without_work_reads_for_itself_and_resumes_where_it_was(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_reads, "_SMALL", 60.0)  # s: however busy the machine is
    loader = scidata.DataLoader(scidata.open_dataset(path), None)
    for _ in range(2):
        seen, _ = readers_of(loader)
        assert seen == list(range(300))
    loader._own_reads.now, loader._own_reads._wait = True, 10**6
    seen, names = readers_of(loader)
    assert seen == list(range(300))
    assert set(names) == {""}  # the main thread
    iterator = iter(loader)
    first = [next(iterator).index for _ in range(123)]
    state = loader.state_dict()
    again = scidata.DataLoader(scidata.open_dataset(path), None)
    again.load_state_dict(state)
    assert first + [sample.index for sample in again] == list(range(300))


def test_a_loop_that_threads_read_for(path: str) -> None:
    loader = scidata.DataLoader(scidata.open_dataset(path), None)
    loader._own_reads._wait = 10**6
    seen, names = readers_of(loader)
    assert seen == list(range(300))
    assert set(names) == {"scidata-reader"}


@pytest.mark.slow  # on a machine that does nothing else: the clock decides
def test_a_loop_that_waits_for_a_device_is_read_for(path: str) -> None:
    loader = scidata.DataLoader(scidata.open_dataset(path), None)
    seen, names = readers_of(loader, 0.004, 0.0015)
    assert seen == list(range(300))
    assert names.count("scidata-reader") > 50  # of 75, of which a trial takes up to 22


@pytest.mark.parametrize("what", ["timeout", "network", "process"])
def test_where_threads_must_read(path: str, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A read that hangs is told of by whoever waits for it."""
    assert scidata.DataLoader(scidata.open_dataset(path), None)._may_read(None)
    if what == "network":
        monkeypatch.setattr(grid_dataset, "is_local", lambda path: False)
    options: dict[str, dict[str, Any]] = {"timeout": {"timeout": 60}, "process": {"workers": "process"}}
    loader = scidata.DataLoader(scidata.open_dataset(path), None, **options.get(what, {}))
    assert not loader._may_read(None)
    assert iter(loader).prefetcher._own_reads is None


def test_the_loop_copies_rows_of_blocks_itself_while_threads_decode_and_once_all_are_kept(path: str) -> None:
    group = zarr.open_group(path)
    array = group.create_array(
        "v", shape=(300, 4), dtype="f4", chunks=(8, 4), dimension_names=("t", "x"), compressors=zarr.codecs.GzipCodec()
    )
    array[:] = np.arange(1, 301, dtype=np.float32)[:, None]
    loader = scidata.DataLoader(scidata.open_dataset(path, fields=["v"], pool_bytes=1 << 20), None)
    for decoding in (True, False):
        loader._own_reads.now, loader._own_reads._wait = True, 10**6
        iterator = iter(loader)
        assert [next(iterator)["v"][0].item() for _ in range(200)] == list(range(1, 201))
        threads = {t.name for t in threading.enumerate()}
        assert ("scidata-ahead-0" in threads) == decoding
        assert "scidata-reader-0" not in threads
        assert [sample.index for sample in iterator] == list(range(200, 300))


def test_where_ranks_decode_for_each_other_threads_wait_for_them(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = scidata.DataLoader(scidata.open_dataset(path), None)
    monkeypatch.setitem(loader.dataset.reader.pool.worth.__dict__, "by_node", frozenset({"u"}))
    assert not loader._may_read(None)
