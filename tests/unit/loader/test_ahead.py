"""Reading ahead of the readers: the same order, what samples share is there before them, within what its pool keeps."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
import zarr

import scidata
from scidata.grids.blocks.sizes import KEPT_BLOCKS
from scidata.loader.prefetch.ahead import ReadAhead

STEPS = 120


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead") / "store"
    group = zarr.open_group(folder, mode="w")
    for name, steps, codec in (("u", 8, zarr.codecs.ZstdCodec()), ("v", 5, zarr.codecs.BloscCodec(cname="lz4"))):
        array = group.create_array(
            name,
            shape=(STEPS, 12, 10),
            dtype="f4",
            chunks=(steps, 12, 10),
            dimension_names=("time", "y", "x"),
            compressors=codec,
        )
        array[:] = np.arange(STEPS * 120).reshape(STEPS, 12, 10) + len(name)
    return folder


def num_threads_ahead() -> int:
    return sum(thread.name.startswith("scidata-ahead") for thread in threading.enumerate())


@pytest.mark.parametrize("steps", [(0,), (-1, 0, 3)])
@pytest.mark.parametrize("blocks", [3, 9])
def test_items_are_those_of_the_order_and_what_is_held_has_room(
    path: Path, blocks: int, steps: tuple[int, ...]
) -> None:
    ds = scidata.open_dataset(path, steps=steps)
    ds = scidata.open_dataset(path, steps=steps, pool_bytes=blocks * ds.reader.block_bytes({})[1])
    order = [[i, i + 1] for i in range(0, len(ds) - 1, 2)] + [[0]]
    ahead = ReadAhead(iter(order), ds.shared_reads, in_flight=3)
    seen = []
    for item in ahead:
        seen.append(item)
        pool = ds.reader.pool
        assert sum(ahead._held.values()) <= pool.max_bytes(ds.reader.part_of({}))
        wanted = {read.key for index in item for read in ds.shared_reads(index)}
        assert (
            wanted <= pool.worth.wanted[id(ahead)] or item in order[-3:]
        )  # at the end Blosc chunks may have few uses left
    assert seen == order
    ahead.stop()
    assert not ds.reader.pool.worth.wanted


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("pool_bytes", [0, None])
def test_leaving_early_where_the_end_is_in_sight(path: Path, fails: bool, pool_bytes: int | None) -> None:
    """What ends the order is kept until its turn, and must keep nothing of the iteration."""

    def order() -> Iterator[int]:
        yield from range(2 if pool_bytes == 0 else 20)
        if fails:
            raise KeyError("no such sample")

    ds = scidata.open_dataset(path, **({} if pool_bytes is None else {"pool_bytes": pool_bytes}))
    iterator = iter(scidata.DataLoader(ds, None, sampler=Ordered(order)))
    next(iterator)
    ended = weakref.ref(iterator.prefetcher)
    del iterator
    assert ended() is None
    assert num_threads_ahead() == 0
    if fails:
        with pytest.raises(KeyError, match="no such sample") as found:
            list(scidata.DataLoader(ds, None, sampler=Ordered(order)))
        assert "in order" in found.value.__notes__[0]


class Ordered(torch.utils.data.Sampler[int]):
    """An order that a function gives."""

    def __init__(self, order: Callable[[], Iterator[int]]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return self.order()

    def __len__(self) -> int:
        return 2


def test_a_thread_that_comes_late_reads_nothing_that_is_done_with(path: Path) -> None:
    ds = scidata.open_dataset(path, fields="u")
    ahead = ReadAhead(iter([[i] for i in range(STEPS)]), ds.shared_reads, in_flight=3)
    for _ in range(STEPS // 2):  # no thread has come yet
        next(ahead)
    queued = ahead._queue.qsize()
    used = {read.key for index in range(STEPS // 2 - 4, STEPS) for read in ds.shared_reads(index)}
    ahead._queue.put(None)
    ahead.run()
    loaded = [
        key for index in range(STEPS) for read in ds.shared_reads(index) if (key := read.key) and read.pool.is_kept(key)
    ]
    assert loaded
    assert set(loaded) <= used
    assert len(set(loaded)) < queued
    ahead.stop()


def test_threads_read_blocks_before_their_samples_are_asked_for(path: Path) -> None:
    ds = scidata.open_dataset(path)
    loader = iter(scidata.DataLoader(ds, None, num_workers=2))
    next(loader)
    pool, wanted = ds.reader.pool, 2 + 2 * 4  # those of the first sample, and four times as many
    deadline = time.monotonic() + 30
    while len(pool._blocks) < wanted and time.monotonic() < deadline:  # the loop stands at its first sample
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(pool._blocks) == wanted
    assert num_threads_ahead() == 2
    del loader
    assert num_threads_ahead() == 0
    assert not pool.worth.wanted


def test_each_chunk_is_decoded_once_by_default_and_none_whole_in_a_full_shuffle_of_blosc(path: Path) -> None:
    ds = scidata.open_dataset(path)
    whole, room = STEPS * 120 * 4, KEPT_BLOCKS * ds.reader.block_bytes({})[1]  # the default where not all fits
    ds = scidata.open_dataset(path, pool_bytes=room)
    for shuffle, times in ((False, 1.1), ("blocks", 1.25)):  # v's chunks lie in two of u's
        loader = scidata.DataLoader(ds, 3, shuffle=shuffle)
        for _ in range(2):
            got = {i: float(u) for batch in loader for i, u in zip(batch.index, batch["u"][:, 0, 0], strict=True)}
            assert got == {i: i * 120 + 1 for i in range(STEPS)}
            assert 0 < ds.reader.pool.num_bytes < 2 * whole  # at the end of an epoch little is kept
        assert loader.stats()["bytes_decoded"] <= times * 4 * whole
    roomy = scidata.open_dataset(path, pool_bytes=2 * whole)
    loader = scidata.DataLoader(roomy, 3)
    for _ in range(3):
        assert len(list(loader)) == STEPS / 3
    assert loader.stats()["bytes_decoded"] == 2 * whole
    small = scidata.open_dataset(path, fields="v", pool_bytes=2 * 5 * 120 * 4)
    loader = scidata.DataLoader(small, None, shuffle=True)
    assert len(list(loader)) == STEPS
    alone = scidata.DataLoader(scidata.open_dataset(path, fields="v", pool_bytes=0), None, sampler=range(STEPS))
    assert len(list(alone)) == STEPS
    assert loader.stats()["bytes_decoded"] <= alone.stats()["bytes_decoded"]


def test_errors_of_the_order_and_of_samples_come_at_their_turn(path: Path) -> None:
    ds = scidata.open_dataset(path)

    def order() -> Any:
        yield from range(10)
        raise OSError("the list of samples has ended early")

    seen: list[int] = []
    with pytest.raises(OSError, match="ended early"):
        seen.extend(sample.index for sample in scidata.DataLoader(ds, None, sampler=order()))
    assert seen == list(range(10))
    seen.clear()
    with pytest.raises(IndexError, match="120 is out of range"):
        seen.extend(sample.index for sample in scidata.DataLoader(ds, None, sampler=[3, 4, 120, 5]))
    assert seen == [3, 4]


def test_a_damaged_chunk_fails_its_samples_and_no_others(path: Path, tmp_path: Path) -> None:
    source = zarr.open_group(path, mode="r")["u"]
    array = zarr.open_group(tmp_path / "damaged", mode="w").create_array(
        "u", shape=(40, 12, 10), dtype="f4", chunks=(8, 12, 10), dimension_names=("time", "y", "x")
    )
    array[:] = source[:40]
    chunk = tmp_path / "damaged" / "u" / "c" / "2" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-5])
    ds = scidata.open_dataset(tmp_path / "damaged")
    seen = []
    with pytest.raises(scidata.errors.SciDataError, match=r"chunk \(2, 0, 0\)"):
        seen.extend(sample.index for sample in scidata.DataLoader(ds, None))
    assert seen == list(range(16))
    loader = scidata.DataLoader(ds, None, on_error="skip")
    assert [sample.index for sample in loader] == [*range(16), *range(24, 40)]
    assert num_threads_ahead() == 0
