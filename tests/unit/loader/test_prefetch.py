from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from scidata.core.memory import ArrayPool
from scidata.core.types import BufferSpec
from scidata.errors import ConfigError
from scidata.loader.prefetch.buffers import BufferSet, Ring, buffer_ring
from scidata.loader.prefetch.copiers import HostCopier
from scidata.loader.prefetch.prefetcher import Prefetcher

SPECS = {
    "u": BufferSpec(shape=(3, 5), dtype=np.dtype(np.float32)),
    "scalar": BufferSpec(shape=(), dtype=np.dtype(np.int64)),
    "none": BufferSpec(shape=(0, 2), dtype=np.dtype(np.float64)),
}
ROWS, SHAPE = 2, (600, 1000)  # 2 rows of it are above the size at which memory is mapped
BIG = {"u": BufferSpec(shape=SHAPE, dtype=np.dtype(np.float32))}


def fill(index: int, out: dict[str, np.ndarray]) -> int:
    """Values that say which sample they are."""
    for name, array in out.items():
        array[...] = index * 10 + len(name)
    return 100


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("scidata-reader")]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    if readers():  # held by a test's own traceback, say
        gc.collect()
    assert readers() == []


# -- the ring ----------------------------------------------------------------------------------------------------------


def ring_of(specs: dict[str, BufferSpec] = SPECS, limit: int = 2, memory: ArrayPool | None = None) -> Ring[BufferSet]:
    return buffer_ring(specs, limit, ArrayPool() if memory is None else memory)


def handed_out(ring: Ring[BufferSet], rows: int = 1) -> dict[str, torch.Tensor]:
    places = ring.acquire(rows)
    ring.give_back(places)
    return places.contents()


def kept_by(make: Callable[[torch.Tensor], object]) -> tuple[bool, bool]:
    """Whether a batch's memory is out of the pool while ``make(tensor)`` lives, and back once it does not."""
    memory = ArrayPool()
    tensor = handed_out(ring_of(BIG, memory=memory), ROWS)["u"]
    held = make(tensor)
    del tensor
    while_held = memory.free_bytes == 0
    del held
    return while_held, memory.free_bytes > 0


def graph_of(tensor: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(SHAPE, requires_grad=True)
    return (tensor * weight).sum()  # the tensor is saved for backward


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: t[1:],
        lambda t: t[0, 3],
        lambda t: t.reshape(-1)[5:7],
        lambda t: t.view(torch.int32),
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: t.numpy()[1, 2:4],
        lambda t: memoryview(t.numpy())[1:],
        lambda t: t.untyped_storage(),
        torch.utils.dlpack.to_dlpack,
        np.from_dlpack,
        torch.nn.Parameter,
        lambda t: t.as_subclass(torch.nn.Parameter),
        graph_of,
    ],
)
def test_whatever_views_the_memory_keeps_it(make: Callable[[torch.Tensor], object]) -> None:
    assert kept_by(make) == (True, True)


def test_a_copy_does_not_keep_the_memory() -> None:
    assert kept_by(lambda t: t.clone())[0] is False


def test_backward_through_a_batch_that_was_let_go() -> None:
    memory = ArrayPool()
    ring = ring_of(BIG, memory=memory)
    batch = handed_out(ring)["u"]
    batch[...] = 3
    weight = torch.ones(SHAPE, requires_grad=True)
    loss = (batch[0] * weight).sum()
    del batch
    handed_out(ring)["u"][...] = 7  # other memory: the graph holds the first
    loss.backward()
    assert torch.equal(weight.grad, torch.full(SHAPE, 3.0))
    del loss
    assert memory.num_allocated == 2


def test_memory_waits_for_all_fields_of_a_batch() -> None:
    memory = ArrayPool()
    specs = BIG | {"scalar": SPECS["scalar"], "none": SPECS["none"]}
    tensors = handed_out(ring_of(specs, memory=memory), 4)
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {"u": (4, *SHAPE), "scalar": (4,), "none": (4, 0, 2)}
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors.values())  # what is saved of one, say
    del tensors["u"], tensors["none"]
    assert memory.free_bytes == 0
    del tensors
    assert memory.free_bytes > 0


def test_slots_are_writable_views_even_of_0d_fields() -> None:
    buffers = ring_of().acquire(2)
    fill(4, buffers.slot(1))
    assert buffers.nbytes == 2 * (3 * 5 * 4 + 8)
    assert buffers.contents()["scalar"][1] == 46
    assert (buffers.contents()["u"][1] == 41).all()


def test_acquire_waits_for_a_batch_to_be_handed_out() -> None:
    ring = ring_of()
    first = ring.acquire(1)
    ring.acquire(1)
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: got.put(ring.acquire(1)))
    thread.start()
    with pytest.raises(queue.Empty):
        got.get(timeout=0.05)
    ring.give_back(first)
    assert got.get(timeout=20) is not None
    thread.join()
    assert len(ring.busy) == 2


def test_acquire_ends_when_told() -> None:
    ring = ring_of()
    ring.acquire(1)
    ring.acquire(1)
    closed = threading.Event()
    got: queue.SimpleQueue[object] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: got.put(ring.acquire(1, closed.is_set)))
    thread.start()
    closed.set()
    ring.wake()
    assert got.get(timeout=20) is None
    thread.join()


def test_memory_follows_what_is_kept() -> None:
    memory = ArrayPool()
    ring = ring_of(BIG, memory=memory)
    kept = [handed_out(ring, ROWS) for _ in range(10)]
    assert memory.num_allocated == 10
    kept.pop()  # returned while others are kept: used again, not made again
    kept.append(handed_out(ring, ROWS))
    assert memory.num_allocated == 10
    size = ring.acquire(ROWS).nbytes
    kept.clear()
    assert memory.free_bytes <= 3 * (size + 2**16)  # the rest is freed


def test_a_dropped_ring_leaves_kept_tensors_alone() -> None:
    memory = ArrayPool()
    ring = ring_of(BIG, memory=memory)
    buffers = ring.acquire(1)
    fill(1, buffers.slot(0))
    tensors = buffers.contents()
    del ring, buffers, memory
    gc.collect()
    assert (tensors["u"] == 11).all()


def test_a_ring_needs_dtypes_of_torch() -> None:
    with pytest.raises(ConfigError, match=r"'when'.*datetime64"):
        ring_of({"when": BufferSpec(shape=(2,), dtype=np.dtype("datetime64[ns]"))})


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "c8", "c16", "?"])
def test_every_dtype_of_torch(dtype: str) -> None:
    buffers = ring_of({"x": BufferSpec(shape=(3,), dtype=np.dtype(dtype))}).acquire(2)
    buffers.slot(0)["x"][...] = 1
    buffers.slot(1)["x"][...] = 0
    tensor = buffers.contents()["x"]
    assert tensor.numpy().dtype == np.dtype(dtype)
    assert tensor.tolist() == [[1] * 3, [0] * 3]


# -- reading ahead -----------------------------------------------------------------------------------------------------


def make(items: object, fill: Callable[..., int | None] = fill, num_workers: int = 2, prefetch: int = 2) -> Prefetcher:
    return Prefetcher(items, fill, ring_of(limit=max(1, prefetch)), num_workers=num_workers, prefetch=prefetch)


ITEMS = [[0, 1], [7, 3], [2, 2], [9, 8], [5]]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_items_in_order_with_their_samples(num_workers: int, prefetch: int) -> None:
    prefetcher = make(ITEMS, num_workers=num_workers, prefetch=prefetch)
    seen = []
    for item, tensors in prefetcher:
        seen.append(item)
        assert tensors["scalar"].tolist() == [i * 10 + 6 for i in item]
        assert tensors["u"][:, 2, 4].tolist() == [i * 10 + 1 for i in item]
    assert seen == ITEMS
    assert not prefetcher._ring.busy
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_slow_first_item_still_comes_first() -> None:
    others = threading.Semaphore(0)

    def slow_first(index: int, out: dict[str, np.ndarray]) -> None:
        if index == 0:
            assert others.acquire(timeout=20)  # ends only when a later item has been read
        fill(index, out)
        if index == 1:
            others.release()

    assert [item for item, _ in make([[0], [1], [2]], slow_first)] == [[0], [1], [2]]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_kept_batches_stay_valid_while_buffers_are_reused(num_workers: int) -> None:
    memory, kept = ArrayPool(), []
    for epoch in range(3):
        items = [[epoch * 100 + i] for i in range(8)]
        ring = ring_of(BIG, memory=memory)
        for number, (item, tensors) in enumerate(Prefetcher(items, fill, ring, num_workers=num_workers)):
            if number % 4 == 0:
                kept.append((item[0], tensors["u"]))
            assert memory.num_allocated <= 3 + len(kept)
        del tensors
    assert len(kept) == 6
    for index, tensor in kept:
        assert (tensor == index * 10 + 1).all()
    assert memory.num_allocated < 24 // 2


def test_a_list_of_all_batches() -> None:
    batches = list(make([[i] for i in range(20)]))
    assert [t["scalar"].item() for _, t in batches] == [i * 10 + 6 for i in range(20)]


def test_no_more_than_prefetch_items_are_begun_ahead() -> None:
    begun: list[int] = []

    def counted(index: int, out: dict[str, np.ndarray]) -> None:
        begun.append(index)
        fill(index, out)

    pulled: list[int] = []

    def items() -> Iterator[list[int]]:
        for i in range(30):
            pulled.append(i)
            yield [i]

    prefetcher = make(items(), counted, num_workers=4, prefetch=2)
    assert begun == []  # nothing before it is asked for
    for step, (item, _tensors) in enumerate(prefetcher):
        assert item == [step]
        # the batch in hand, and two: one more would need the memory that the loop's variable still has
        assert len(pulled) <= step + 3
        assert len(begun) <= step + 3
        assert eventually(lambda: len(begun) == min(30, step + 3))  # noqa: B023
        assert len(prefetcher._ring.busy) <= 2


def test_the_samples_of_a_batch_are_read_by_several_threads() -> None:
    barrier = threading.Barrier(3, timeout=20)

    def together(index: int, out: dict[str, np.ndarray]) -> None:
        barrier.wait()
        fill(index, out)

    (item, tensors), *_ = make([[4, 5, 6]], together, num_workers=3)
    assert item == [4, 5, 6]
    assert tensors["scalar"].tolist() == [46, 56, 66]


def broken(index: int, out: dict[str, np.ndarray]) -> None:
    if index == 13:
        raise OSError("disk on fire")
    fill(index, out)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_an_error_comes_at_its_items_turn(num_workers: int) -> None:
    prefetcher = make([[1], [2, 13], [3], [4]], broken, num_workers=num_workers)
    assert next(prefetcher)[0] == [1]
    with pytest.raises(OSError, match="disk on fire") as caught:
        next(prefetcher)
    assert caught.value.__notes__ == ["while reading sample 13 (number 1 of batch 1)"]
    assert any(frame.name == "broken" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert readers() == []
    assert list(prefetcher) == []
    assert not prefetcher._ring.busy


def test_the_first_of_a_batchs_errors_is_raised() -> None:
    barrier = threading.Barrier(2, timeout=20)

    def fails(index: int, out: dict[str, np.ndarray]) -> None:
        barrier.wait()
        raise ValueError(index)

    for _ in range(5):
        with pytest.raises(ValueError, match=r"^20"):
            next(make([[20, 10]], fails))


def test_stop_iteration_in_a_read_does_not_end_the_epoch_silently() -> None:
    def stops(index: int, out: dict[str, np.ndarray]) -> None:
        next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(make([[0]], stops))


def test_no_memory_for_a_buffer_is_raised_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(ArrayPool, "lend", full)
    for num_workers in (0, 2):
        with pytest.raises(MemoryError, match="more than can be allocated"):
            next(make([[0], [1]], num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_sampler_comes_after_the_items_before_it(num_workers: int) -> None:
    def items() -> Iterator[list[int]]:
        yield [0]
        yield [1]
        raise LookupError("sampler")

    prefetcher = make(items(), num_workers=num_workers, prefetch=2 if num_workers else 0)
    assert [next(prefetcher)[0], next(prefetcher)[0]] == [[0], [1]]
    with pytest.raises(LookupError, match="sampler"):
        next(prefetcher)


def test_an_empty_item_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch 1 has no samples"):
        list(make([[0], [], [1]]))


# -- ending ------------------------------------------------------------------------------------------------------------


def test_threads_begin_with_the_first_next_and_end_with_the_last() -> None:
    prefetcher = make(ITEMS)
    assert readers() == []
    next(prefetcher)
    assert len(readers()) == 2
    assert all(t.daemon for t in readers())
    list(prefetcher)
    assert readers() == []


def test_leaving_early() -> None:
    for _ in make([[i] for i in range(1000)]):
        break
    assert readers() == []

    prefetcher = make([[i] for i in range(1000)])
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert readers() == []
    assert list(prefetcher) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_loop_ends_the_threads(error: type[BaseException]) -> None:
    def train() -> None:
        for _ in make([[i] for i in range(1000)]):
            raise error

    with pytest.raises(error):
        train()
    assert readers() == []


def test_ctrl_c_while_waiting_for_a_read() -> None:
    begun, over = threading.Event(), threading.Event()

    def stuck(index: int, out: dict[str, np.ndarray]) -> None:
        begun.set()
        over.wait(20)

    def interrupt() -> None:
        begun.wait(20)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        over.set()  # only now, so that it was not the read's end that woke the consumer

    prefetcher = make([[0], [1]], stuck)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        next(prefetcher)
    thread.join()
    assert readers() == []
    assert list(prefetcher) == []


@pytest.mark.parametrize("runs", [False, True])
def test_ctrl_c_while_a_thread_begins(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    class Interrupted(threading.Thread):
        def start(self) -> None:
            if runs:
                monkeypatch.setattr(self._started, "wait", interrupt)
                super().start()
            interrupt()

    def interrupt() -> None:
        raise KeyboardInterrupt

    prefetcher = make([[0], [1]], fill)
    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(prefetcher)
    assert readers() == []
    assert list(prefetcher) == []


def test_a_read_that_hangs_does_not_hang_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scidata.loader.prefetch.readers._JOIN_SECONDS", 0.05)
    begun, over = threading.Event(), threading.Event()

    def stuck(index: int, out: dict[str, np.ndarray]) -> None:
        if index:
            begun.set()
            over.wait(20)

    prefetcher = make([[0], [1]], stuck)
    next(prefetcher)
    assert begun.wait(20)
    prefetcher.close()
    assert len(readers()) == 1
    assert prefetcher._ring.busy  # the read still writes to its buffer
    over.set()
    assert eventually(lambda: readers() == [])


def test_leaving_the_interpreter_in_mid_epoch() -> None:
    code = """
import numpy as np
from scidata.core.memory import ArrayPool
from scidata.loader.prefetch.buffers import buffer_ring
from scidata.loader.prefetch.prefetcher import Prefetcher
from scidata.core.types import BufferSpec
ring = buffer_ring({"u": BufferSpec(shape=(4,), dtype=np.dtype("f4"))}, 2, ArrayPool())
prefetcher = Prefetcher([[i] for i in range(99)], lambda i, out: out["u"].fill(i), ring)
kept = [next(prefetcher) for _ in range(4)]
print(kept[-1][1]["u"].tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[[3.0, 3.0, 3.0, 3.0]]\n", "")


def test_garbage_collection_ends_the_threads() -> None:
    prefetcher = make([[i] for i in range(1000)])
    next(prefetcher)
    cycle: list[object] = [prefetcher]
    cycle.append(cycle)
    del prefetcher, cycle
    assert len(readers()) == 2
    gc.collect()
    assert readers() == []


def test_closing_wakes_readers_that_wait_for_places() -> None:
    prefetcher = make([[i] for i in range(1000)], num_workers=3)
    batch = next(prefetcher)
    second = next(prefetcher)
    ring = prefetcher._ring
    assert eventually(lambda: len(ring.busy) == 1)  # the user has two of three: a reader waits
    prefetcher.close()
    assert readers() == []
    assert (batch[0], second[0]) == ([0], [1])


def test_a_closed_iteration_leaves_its_memory_to_the_next() -> None:
    memory = ArrayPool()
    for _ in range(50):
        ring = ring_of(BIG, memory=memory)
        prefetcher = Prefetcher(([i] for i in range(9)), lambda index, out: None, ring)
        next(prefetcher)
        next(prefetcher)
        prefetcher.close()
        assert not ring.busy
    assert memory.num_allocated <= 3


def test_a_failed_read_does_not_keep_its_buffers_in_a_cycle() -> None:
    gc.disable()
    try:
        prefetcher = make([[13]], broken)
        with pytest.raises(OSError, match="fire"):
            next(prefetcher)
        state = prefetcher._readers
        assert not prefetcher._pending
        assert not state.ring.busy
    finally:
        gc.enable()


# -- copying ahead -----------------------------------------------------------------------------------------------------


class RecordingCopier(HostCopier):
    """The host's twin of the CUDA copier, which says what it was asked for."""

    def __init__(self, ring: Ring[BufferSet]) -> None:
        super().__init__(ring)
        self.started: list[int] = []
        self.finished: list[int] = []

    def start(self, buffers: object) -> object:
        self.started.append(int(buffers.slot(0)["scalar"]))
        return buffers

    def finish(self, ticket: object) -> dict[str, torch.Tensor]:
        self.finished.append(int(ticket.slot(0)["scalar"]))
        return super().finish(ticket)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_next_copy_begins_ahead_of_its_use_and_only_that(num_workers: int) -> None:
    ring = ring_of(limit=5)
    copier = RecordingCopier(ring)
    prefetcher = Prefetcher([[i] for i in range(12)], fill, ring, num_workers=num_workers, prefetch=5, copier=copier)
    for step, _ in enumerate(prefetcher):
        assert len(copier.finished) == step + 1
        assert eventually(lambda: len(copier.started) == min(12, step + 2))  # noqa: B023
    assert sorted(copier.started) == copier.finished == [i * 10 + 6 for i in range(12)]


def test_a_copy_that_cannot_begin_is_raised_at_its_turn() -> None:
    class Failing(RecordingCopier):
        def start(self, buffers: object) -> object:
            if len(self.started) == 1:
                raise RuntimeError("CUDA error")
            return super().start(buffers)

    ring = ring_of()
    prefetcher = Prefetcher([[0], [1], [2]], fill, ring, num_workers=1, copier=Failing(ring))
    assert next(prefetcher)[0] == [0]
    with pytest.raises(RuntimeError, match="CUDA error"):
        next(prefetcher)
    assert not ring.busy


# -- counts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_counts(num_workers: int) -> None:
    def slow(index: int, out: dict[str, np.ndarray]) -> int:
        time.sleep(0.002)
        return fill(index, out)

    prefetcher = make(ITEMS, slow, num_workers=num_workers)
    list(prefetcher)
    stats = prefetcher.stats
    assert (stats.batches, stats.samples, stats.bytes, stats.bytes_fetched) == (5, 9, 9 * (3 * 5 * 4 + 8), 900)
    assert stats.read_seconds >= 9 * 0.002
    assert stats.wait_seconds > 0
