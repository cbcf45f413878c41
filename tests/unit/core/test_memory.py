"""Memory of samples that differ in size: used again, never while somebody sees it, and not more than is wanted."""

import gc
import mmap
import os
import pickle
import queue
import resource
import threading

import h5py
import numpy as np
import pytest
import torch
import zarr

import scidata
from scidata.core import memory
from scidata.core.memory import ArrayPool, empty
from scidata.read.codecs import Scratch

MIB = 1 << 20


def test_an_array_is_numpys():
    pool = ArrayPool(8 * MIB)
    for dtype in ("f4", "f8", "i8", "u1", "?"):
        x = pool.empty((300, 1001, 3), dtype)
        assert type(x) is np.ndarray
        assert x.shape == (300, 1001, 3)
        assert x.dtype == dtype
        assert x.flags.c_contiguous
        assert x.flags.writeable
        x[...] = 1
        assert x.sum() == x.size
    assert pool.empty((0, 5), "f4").shape == (0, 5)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        np.asarray,
        np.ascontiguousarray,
        lambda x: x.view(np.ndarray)[::2].T,
        lambda x: x.reshape(-1).view("u1"),
        torch.from_numpy,
        lambda x: torch.from_numpy(np.ascontiguousarray(x))[3:].view(-1)[5:],
        lambda x: torch.from_numpy(x).numpy()[:, 1],
        memoryview,
    ],
)
def test_memory_that_is_seen_is_not_used_again(view):
    pool = ArrayPool(8 * MIB)
    x = pool.empty((1000, 1000), "f4")
    address = x.ctypes.data
    x[...] = 7
    kept = view(x)
    seen = np.asarray(kept).copy()
    del x
    gc.collect()
    assert pool.free_bytes == 0
    other = pool.empty((1000, 1000), "f4")
    other[...] = 1
    assert other.ctypes.data != address
    np.testing.assert_array_equal(np.asarray(kept), seen)
    del kept
    assert pool.free_bytes > 0
    assert pool.empty((1000, 1000), "f4").ctypes.data == address


def test_blocks_are_taken_where_they_fit_and_make_room_where_they_do_not():
    pool = ArrayPool(100 * MIB)
    x = pool.empty((10 * MIB,), "u1")
    del x
    x = pool.empty((8 * MIB,), "u1")  # in the same block
    assert pool.num_allocated == 1
    y = pool.empty((MIB,), "u1")
    del x, y
    assert pool.free_bytes >= 11 * MIB
    x = pool.empty((95 * MIB,), "u1")  # neither is large enough; the older makes room
    assert pool.num_allocated == 3
    assert pool.free_bytes < 2 * MIB
    del x
    kept = [pool.empty((30 * MIB,), "u1") for _ in range(8)]
    del kept
    assert 0 < pool.free_bytes <= pool.max_free


def test_small_arrays_and_a_pool_that_is_gone():
    pool = ArrayPool(8 * MIB)
    del_ = pool.empty((10,), "f8")
    assert pool.num_allocated == 0
    x = pool.empty((MIB,), "f8")
    x[:] = 3
    again = pickle.loads(pickle.dumps(pool))
    assert (again.max_free, again.num_allocated) == (8 * MIB, 0)
    del pool, del_
    gc.collect()
    assert (x == 3).all()


def test_threads_share_a_pool():
    pool, bad = ArrayPool(64 * MIB), []

    def use(number):
        for _ in range(100):
            x = pool.empty((MIB // 2,), "u1")
            x[:] = number
            if not (x == number).all():
                bad.append(number)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    assert pool.num_allocated <= 8  # the next is made before the last is let go


def resident(begin, nbytes):
    """Bytes of ``[begin, begin + nbytes)`` that the system has given memory for."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        entries = np.frombuffer(os.pread(pages.fileno(), -(-nbytes // 4096) * 8, begin // 4096 * 8), "<u8")
    return int((entries >> np.uint64(63)).sum()) * 4096


def test_blocks_are_cut_from_slabs_and_their_pages_go_back_one_by_one(monkeypatch):
    made, real = [], memory._map
    monkeypatch.setattr(memory, "_map", lambda nbytes: made.append(nbytes) or real(nbytes))
    pool = ArrayPool()
    blocks = [pool.empty((MIB - 100,), "u1") for _ in range(48)]
    assert made == [32 * MIB] * 2
    for number, block in enumerate(blocks):
        block[:] = number
    begins = [block.ctypes.data for block in blocks]
    assert len({begin // MIB for begin in begins}) == 48
    assert {begin % 4096 for begin in begins} == {0}
    begin = min(begins[:32])
    assert resident(begin, 32 * MIB) == 32 * MIB
    del block, blocks[1:32:2]  # every other one of the first slab
    assert resident(begin, 32 * MIB) == 16 * MIB
    assert all(
        (block == number).all() for number, block in zip([*range(0, 32, 2), *range(32, 48)], blocks, strict=True)
    )
    del blocks[:16]
    assert len(pool._slabs) == 1  # the second
    large = pool.empty((9 * MIB,), "u1")
    assert made[2:] == [9 * MIB]
    large[:] = 1
    begin = large.ctypes.data
    assert resident(begin, 9 * MIB) == 9 * MIB
    del large, blocks
    pool.clear()
    assert len(pool._slabs) == 0


def test_the_heap_is_trimmed_while_slabs_become_more(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "_trim", lambda: calls.append(None))
    pool = ArrayPool()
    for _ in range(200):  # each is let go before the next
        pool.empty((MIB,), "u1")
    assert not calls
    kept = [pool.empty((MIB,), "u1") for _ in range(100)]
    assert 2 <= len(calls) <= 3
    del kept


def test_the_next_thread_has_the_memory_of_one_that_ended():
    places = []

    def use():
        scratch = Scratch()
        for nbytes in (3 * MIB, 3 * MIB + 1000):  # in the same block
            places.append(scratch.get("read", nbytes).ctypes.data)

    for _ in range(3):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert len(set(places)) == 1


@pytest.fixture(scope="module")
def clouds(tmp_path_factory):
    """Clouds of 0.8 to 2.4 MB, each full of its number."""
    folder = tmp_path_factory.mktemp("clouds")
    paths = []
    for i in range(12):
        paths.append(f"{folder}/{i:02d}.h5")
        with h5py.File(paths[-1], "w") as file:
            num = 20_000 + 3_500 * i
            file["pos"] = np.zeros((num, 3))
            file["u"] = np.full((num, 10), i, "f4")
    return paths


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_reads_into_the_same_memory(clouds, tmp_path, stored, num_workers):
    path = clouds
    if stored:
        scidata.partition(clouds, tmp_path / "store", kind="points")
        path = tmp_path / "store"
    ds = scidata.open_dataset(path, kind=None if stored else "points", fields=["u"])
    loader = scidata.DataLoader(ds, None, num_workers=num_workers)
    kept = []
    for _ in range(4):
        for i, sample in enumerate(loader):
            assert (sample["u"] == i).all()
            if i % 5 == 0:
                kept.append((i, sample["u"][3:]))
    assert all((x == i).all() for i, x in kept)
    # of 48 samples, 12 of them kept and the first ones larger and larger
    assert loader._read_paths.memory.num_allocated < 36
    del kept, sample
    gc.collect()
    assert loader._read_paths.memory.free_bytes <= loader._read_paths.memory.max_free <= 2 * ds.counts().max() * 40


def test_batches_of_clouds_are_whole(clouds):
    ds = scidata.open_dataset(clouds, kind="points", fields=["u"])
    first = None
    for _ in range(2):
        for number, batch in enumerate(scidata.DataLoader(ds, batch_size=3)):
            if first is None:
                first = batch["u"]
            for place in range(3):
                assert (batch["u"][batch["batch"] == place] == 3 * number + place).all()
    assert set(first.unique().tolist()) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, (4 << 20) - 1024, 5 << 20])
def test_memory_that_files_are_read_into_begins_at_a_cache_line(tmp_path, nbytes):
    kept = [empty((nbytes // 8,), "f8") for _ in range(4)]  # at several places
    assert {x.ctypes.data % 64 for x in kept} == {0}
    assert ArrayPool().lend(nbytes).ctypes.data % 64 == 0
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    x = group.create_array("u", shape=(8, nbytes // 4), dtype="f4", chunks=(1, nbytes // 4), compressors=None)
    x[:] = 1
    ds = scidata.open_dataset(tmp_path / "x.zarr", sample_dim=0)
    assert {sample["u"].data_ptr() % 64 for sample in scidata.DataLoader(ds, None, num_workers=0)} == {0}


@pytest.mark.parametrize("nbytes", [64, MIB])
def test_bytes_that_were_given_count_until_no_array_on_them_is_left(nbytes):
    pool, back = ArrayPool(8 * MIB), queue.SimpleQueue()
    pool.awaited.add(back)
    lent = pool.lend(nbytes)
    arrays = [np.ndarray((2, 3), "f4", lent, begin) for begin in (0, 32)]
    pool.give(lent)
    del lent
    rows = [torch.from_numpy(arrays[0])[1], arrays[1][1:].view("u1")]
    del arrays
    gc.collect()
    assert list(pool.given.values()) == [nbytes]
    rows.pop()
    assert back.empty()
    rows.pop()
    assert pool.given == {}
    assert back.get_nowait() is None


def faults_of_filling(memory):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.frombuffer(memory, np.uint8)[:] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux has huge pages")
def test_a_large_array_lies_on_huge_pages_to_its_end():
    with mmap.mmap(-1, 6 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as whole:
        whole.madvise(mmap.MADV_HUGEPAGE)
        if faults_of_filling(whole) > 20:
            pytest.skip("no huge pages are free, or the kernel has none")
    pools = [ArrayPool() for _ in range(3)]  # other processes may take the last free huge page from one of them
    faults = [faults_of_filling(pool.empty((10_000_000,), np.uint8)) for pool in pools]
    assert min(faults) < 60  # 398 with small pages in the last 1.6 MB
