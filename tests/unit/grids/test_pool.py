"""Blocks of decoded rows that samples share give what reads of single samples give, each chunk decoded once."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from scidata.core.options import ReadOptions
from scidata.grids.blocks import pool
from scidata.grids.reader import GridReader
from scidata.plan.array import PlanFamily
from tests.unit.grids._pool import BIG, OPTIONS, ROWS, STEPS, read


@pytest.mark.parametrize("name", ["lz4", "banded", "sharded", "raw", "files"])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize("pool_bytes", [BIG, 20_000])
def test_samples_are_those_of_single_reads(
    stores: dict[str, Any], name: str, options: dict[str, Any], pool_bytes: int
) -> None:
    how: dict[str, Any] = {"sample_dim": "time", "shard": {"y": "domain"}, "bounds": {"y": (0, 5, 5, ROWS)}}
    alone, pooled = (
        GridReader(stores[name], ReadOptions(num_threads=2, **how, **options, pool_bytes=n), axis_sizes={"domain": 3})
        for n in (0, pool_bytes)
    )
    order = [*range(alone.num_samples), *np.random.default_rng(1).permutation(alone.num_samples)[:12].tolist(), -1]
    for rank in range(3):
        for index in order:
            expected, found = read(alone, index, rank)[0], read(pooled, index, rank)[0]
            for field in expected:
                assert found[field].dtype == expected[field].dtype
                assert found[field].tobytes() == expected[field].tobytes()
            assert pooled.pool.num_bytes <= pool_bytes
    assert (pooled.pool.num_bytes > 0) == (name != "raw") or pool_bytes < BIG


@pytest.mark.parametrize(("name", "size"), [("lz4", 8), ("banded", 8), ("sharded", 5)])
def test_each_chunk_is_decoded_once(stores: dict[str, Any], name: str, size: int) -> None:
    alone, pooled = (
        GridReader(stores[name], ReadOptions(sample_dim="time", num_threads=0, pool_bytes=n)) for n in (0, BIG)
    )
    once = sum(read(alone, index, 0)[1].bytes_decoded for index in range(0, STEPS, size))
    every = sum(read(alone, index, 0)[1].bytes_decoded for index in range(STEPS))
    assert every > 4 * once
    for alone_first in (2, 0):  # epochs: of each chunk a row alone, then all; memory does not grow
        decoded = sum(read(pooled, index, 0)[1].bytes_decoded for index in range(STEPS))
        assert decoded <= alone_first * once
        assert pooled.pool.num_bytes == STEPS * 2 * 3 * ROWS * 8 * 4
    windows = GridReader(
        stores[name],
        ReadOptions(sample_dim="time", steps=(0, 1, 2), num_threads=0, pool_bytes=4 * size * 6 * ROWS * 32),
    )
    decoded = [read(windows, index, 0)[1].bytes_decoded for index in range(windows.num_samples)]
    assert decoded[0] <= once
    assert sum(decoded[1:]) == once  # the first sample's chunk again, for the second needs it too


@pytest.mark.parametrize("name", ["banded", "sharded", "files"])
def test_blocks_that_are_read_again_are_not_planned_again(
    stores: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = GridReader(
        stores[name], ReadOptions(sample_dim="time", num_threads=0, pool_bytes=20_000)
    )  # a block of each field
    planned, plan = [], PlanFamily.plan

    def counted(self: PlanFamily, *given: Any) -> Any:
        planned.append(given)
        return plan(self, *given)

    monkeypatch.setattr(PlanFamily, "plan", counted)
    epochs = []
    for _ in range(2):
        decoded = sum(read(reader, index, 0)[1].bytes_decoded for index in range(STEPS))
        epochs.append((len(planned), decoded))
    assert epochs[0][0] == epochs[1][0] > 0
    assert epochs[1][1] > epochs[0][1] / 2  # read again


def test_threads_wait_for_the_one_that_reads(stores: dict[str, Any]) -> None:
    alone, pooled = (
        GridReader(stores["lz4"], ReadOptions(sample_dim="time", num_threads=2, pool_bytes=n)) for n in (0, BIG)
    )
    wanted = [read(alone, index, 0)[0]["u"].tobytes() for index in range(STEPS)]
    barrier = threading.Barrier(8)

    def run(i: int) -> int:
        barrier.wait(30)
        decoded = 0
        for index in [*range(i, STEPS, 8), *range(STEPS)]:
            values, stats = read(pooled, index, 0)
            assert values["u"].tobytes() == wanted[index]
            decoded += stats.bytes_decoded
        return decoded

    with ThreadPoolExecutor(8) as threads:
        total = sum(threads.map(run, range(8)))
    once = sum(read(alone, index, 0)[1].bytes_decoded for index in range(0, STEPS, 8))
    assert once <= total <= 2 * once


class SlowDeque(deque):
    """Another thread's turn comes between the count and what follows from it."""

    def __len__(self) -> int:
        count = super().__len__()
        time.sleep(1e-4)
        return count


class SlowBlock(pool._Block):
    """Another thread's turn comes between the look at a number and its change."""

    @property
    def left(self) -> int:
        found = self.__dict__["left"]
        time.sleep(0)
        return found

    @left.setter
    def left(self, value: int) -> None:
        self.__dict__["left"] = value


@pytest.fixture
def hasty() -> Iterator[None]:
    """Have threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_count_what_was_read_and_used(
    stores: dict[str, Any], hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_Block", SlowBlock)
    alone, pooled = (
        GridReader(stores["lz4"], ReadOptions(sample_dim="time", num_threads=0, pool_bytes=n)) for n in (0, BIG)
    )
    shared = pooled.pool
    shared._uncounted, shared.worth.wanted[0] = SlowDeque(), set()
    for index in range(STEPS):
        shared.worth.wanted[0].update(each.key for each in pooled.shared_reads(index, pooled.partition.coordinate(0)))
    barrier = threading.Barrier(8)

    def run(i: int) -> int:
        barrier.wait(30)
        decoded = 0
        for index in range(STEPS):
            for each in pooled.shared_reads(index, pooled.partition.coordinate(0)):
                shared.read_ahead(each.key)
            decoded += read(pooled, index, 0)[1].bytes_decoded
            if i == 0:
                pickle.dumps(pooled)
        return decoded

    with ThreadPoolExecutor(8) as threads:
        total = sum(threads.map(run, range(8)))
    once = sum(read(alone, index, 0)[1].bytes_decoded for index in range(0, STEPS, 8))
    assert total + sum(stats.bytes_decoded for stats in shared._uncounted) == once
    blocks = [shared._blocks.get(key) for key in shared.worth.wanted[0]]
    assert sum(8 - block.left for block in blocks) == 8 * 2 * STEPS


def test_a_block_is_read_when_a_second_sample_needs_it(stores: dict[str, Any]) -> None:
    """The pool holds two blocks, of five: samples of ever other ones are read alone, and nothing is kept."""
    reader = GridReader(stores["lz4"], ReadOptions(sample_dim="time", num_threads=0, pool_bytes=17 * 6 * ROWS * 32))
    for index in [index for k in range(8) for index in range(k, 32, 8)]:
        read(reader, index, 0)
        assert reader.pool.num_bytes == 0
    decoded = [read(reader, index, 0)[1].bytes_decoded for index in [0, 1, 2, 0, 7]]
    assert decoded[0] > 0
    assert decoded[1] == reader.pool.num_bytes == 8 * 6 * ROWS * 32
    assert decoded[2:] == [0, 0, 0]


def test_errors_come_to_all_who_wait_and_are_tried_again(stores: dict[str, Any], tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "damaged", mode="w")
    array = group.create_array("u", shape=(8, 6, 6), dtype="f4", chunks=(4, 6, 6), dimension_names=("time", "y", "x"))
    array[:] = np.arange(288).reshape(8, 6, 6)
    chunk = tmp_path / "damaged" / "u" / "c" / "1" / "0" / "0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-3])
    reader = GridReader(str(tmp_path / "damaged"), ReadOptions(sample_dim="time", num_threads=0, pool_bytes=BIG))
    assert read(reader, 3, 0)[0]["u"][0, 0] == 108
    for _ in range(2):
        with pytest.raises(Exception, match=r"u.*1[/.]0[/.]0|chunk"):
            read(reader, 4, 0)
    reader.close()
    assert reader.pool.num_bytes == 0
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.pool.max_bytes(copy.part_of({})) == BIG
    assert read(copy, 2, 0)[0]["u"][0, 0] == 72


def test_what_is_the_same_in_all_samples_is_decoded_once(tmp_path):
    path = str(tmp_path / "a.zarr")
    group = zarr.open_group(path, mode="w")
    rng = np.random.default_rng(0)
    mask, fields = rng.random((12, 8)), rng.random((6, 12, 8))
    for name, values, chunks in (("mask", mask, (12, 8)), ("u", fields, (1, 12, 8))):
        group.create_array(
            name, data=values, chunks=chunks, dimension_names=("time", "y", "x")[3 - values.ndim :],
            compressors=zarr.codecs.ZstdCodec(),
        )  # fmt: skip
    for memory, times in ((1 << 20, 1), (0, 6)):
        reader = GridReader(path, ReadOptions(shard={"y": "domain"}), axis_sizes={"domain": 3}, memory_bytes=memory)
        here = reader.partition.coordinate(1)
        decoded = 0
        for i in range(6):
            out = {n: np.empty(s.shape, s.dtype) for n, s in reader.buffer_specs(here).items()}
            decoded += reader.read_into(i, out, here).bytes_decoded
            assert np.array_equal(out["mask"], mask[4:8])
            assert np.array_equal(out["u"], fields[i, 4:8])
        assert decoded == (6 + times) * mask.nbytes
        assert reader.pool.num_bytes == (mask.nbytes // 3 if times == 1 else 0)


def test_a_block_that_has_been_used_is_not_read_ahead(tmp_path):
    """A thread that lost its core between asking and reading would decode it a second time."""
    path = str(tmp_path / "a.zarr")
    values = np.random.default_rng(0).random((6, 12, 8))
    zarr.create_array(path, data=values, chunks=(3, 12, 8), dimension_names=("t", "y", "x"))
    reader = GridReader(path, ReadOptions(shard={"y": "domain"}, pool_bytes=1 << 20), axis_sizes={"domain": 2})
    here = reader.partition.coordinate(0)
    (first,), (second,) = reader.shared_reads(0, here), reader.shared_reads(3, here)
    reader.pool.worth.wanted[1] = {second.key}
    pool = reader.pool
    assert pool.read_ahead(first.key)
    assert pool.read_ahead(second.key)
    assert (pool.is_kept(first.key), pool.is_kept(second.key)) == (False, True)
    pool.worth.wanted[1].add(first.key)
    pool.read_ahead(first.key)
    assert pool.is_kept(first.key)


def test_a_field_without_time_is_the_first_files_with_a_pool_and_without(tmp_path):
    """It is the same in all samples, so one file has it; a pool read it from each sample's own."""
    paths = [str(tmp_path / f"{k}.zarr") for k in range(2)]
    for k, path in enumerate(paths, start=1):
        group, zstd = zarr.open_group(path, mode="w"), zarr.codecs.ZstdCodec()
        for name, shape in (("u", (3, 4, 5)), ("mask", (4, 5))):
            dims = ("time", "y", "x")[3 - len(shape) :]
            group.create_array(name, data=np.full(shape, float(k)), dimension_names=dims, compressors=zstd)
    for pool_bytes in (0, 1 << 20):
        reader = GridReader(paths, ReadOptions(pool_bytes=pool_bytes, fields=["u", "mask"], shard={}))
        values = read(reader, 5, 0)[0]
        assert (values["u"][0, 0], values["mask"][0, 0]) == (2.0, 1.0)
