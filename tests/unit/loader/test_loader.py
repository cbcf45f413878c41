from __future__ import annotations

import copy
import gc
import inspect
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from scidata.core.types import BufferSpec
from scidata.data.collate import collate
from scidata.data.sample import Sample
from scidata.errors import ConfigError, ReadTimeoutError
from scidata.loader.data_loader import DataLoader

N, SHAPE = 11, (3, 4)


class Stored(torch.utils.data.Dataset):
    """The smallest real data set of the loader's interface: one field in one file, read with ``preadv``."""

    mesh = None
    dp_axis = None

    def __init__(self, folder: Path, transform: Callable[[Sample], Sample] | None = None) -> None:
        self.path = str(folder / "u.bin")
        self.values = torch.arange(N * 12, dtype=torch.float32).reshape(N, *SHAPE) / 7
        self.values.numpy().tofile(self.path)
        self.transform = transform
        self.reads: list[tuple[int, int, str]] = []

    def __len__(self) -> int:
        return N

    def buffer_specs(self) -> dict[str, BufferSpec]:
        return {"u": BufferSpec(shape=SHAPE, dtype=np.dtype(np.float32))}

    def read_into(self, index: int, out: Mapping[str, np.ndarray]) -> SimpleNamespace:
        self.reads.append((index, os.getpid(), threading.current_thread().name))
        if not 0 <= index < N:
            raise IndexError(f"no sample {index}")
        fd = os.open(self.path, os.O_RDONLY)
        try:
            count = os.preadv(fd, [memoryview(out["u"]).cast("B")], index * 48)
        finally:
            os.close(fd)
        assert count == 48
        return SimpleNamespace(bytes_fetched=count + 2)

    def assemble(self, local: Mapping[str, torch.Tensor], *, index: int | list[int], batched: bool) -> Sample:
        assert isinstance(index, list) == batched
        return Sample(local, dims={"u": ("batch",) * batched + ("y", "x")}, index=index)


@pytest.fixture
def ds(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("scidata-reader")]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    if readers():
        gc.collect()
    assert readers() == []


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, N, 20])
def test_the_same_batches_as_torch(ds: Stored, num_workers: int, drop_last: bool, batch_size: int) -> None:
    loader = DataLoader(ds, batch_size, num_workers=num_workers, drop_last=drop_last)
    expected = list(torch.utils.data.DataLoader(range(N), batch_size, drop_last=drop_last))
    batches = list(loader)
    assert len(loader) == len(expected) == len(batches)
    for batch, indices in zip(batches, expected, strict=True):
        assert batch.index == indices.tolist()
        assert batch.dims == {"u": ("batch", "y", "x")}
        assert torch.equal(batch["u"], ds.values[indices])


def test_defaults(ds: Stored) -> None:
    loader = DataLoader(ds)
    assert isinstance(loader, torch.utils.data.DataLoader)
    expected = {"batch_size": 1, "num_workers": 2, "prefetch_factor": 2, "pin_memory": False, "drop_last": False}
    expected |= {"timeout": 0, "in_order": True, "persistent_workers": False, "device": None, "generator": None}
    assert {name: getattr(loader, name) for name in expected} == expected
    assert loader.dataset is ds
    assert isinstance(loader.sampler, SequentialSampler)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert loader.collate_fn is collate


def test_attributes_rebuild_the_loader(ds: Stored) -> None:
    """As Lightning does it: every parameter is an attribute, and the attributes are valid arguments."""
    loader = DataLoader(ds, 3, collate_fn=None, num_workers=1)
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["generator", "device", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"]
    again = DataLoader(ds, batch_sampler=loader.batch_sampler, **{name: getattr(loader, name) for name in names})
    assert [b.index for b in again] == [b.index for b in loader]


def test_every_argument_is_an_attribute(ds: Stored) -> None:
    names = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "shuffle"}  # torch keeps its sampler
    assert set(inspect.signature(torch.utils.data.DataLoader.__init__).parameters) - {"self", "shuffle"} <= names
    given: dict[str, Any] = {"batch_size": 3, "num_workers": 1, "drop_last": True, "prefetch_factor": 3, "timeout": 9.0}
    given |= {"workers": "process", "persistent_workers": True, "worker_init_fn": print, "on_error": "skip"}
    given |= {"max_prefetch_bytes": 1000, "watch": False, "generator": torch.Generator(), "sampler": [1, 2, 3, 4]}
    loader = DataLoader(ds, multiprocessing_context="forkserver", **given)
    assert {name: getattr(loader, name) for name in given} == given
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    assert all(hasattr(loader, name) for name in names)
    kept = names - {"batch_size", "sampler", "drop_last"}  # which the batch sampler is
    again = DataLoader(**{name: getattr(loader, name) for name in kept})
    assert {name: getattr(again, name) for name in kept} == {name: getattr(loader, name) for name in kept}


def test_samples_without_a_batch(ds: Stored) -> None:
    samples = list(DataLoader(ds, batch_size=None, sampler=[4, 2, 2]))
    assert [s.index for s in samples] == [4, 2, 2]
    assert samples[1].dims == {"u": ("y", "x")}
    assert torch.equal(samples[0]["u"], ds.values[4])
    halved = DataLoader(ds, batch_size=None, collate_fn=lambda s: (s.index, s["u"] / 2))
    assert len(halved) == N
    assert torch.equal(list(halved)[3][1], ds.values[3] / 2)


def test_a_transform_sees_single_samples(tmp_path: Path) -> None:
    def plus_index(sample: Sample) -> Sample:
        assert sample.dims["u"] == ("y", "x")
        return sample.replace({"v": sample["u"] + sample.index})

    ds = Stored(tmp_path, plus_index)
    for batch in DataLoader(ds, 4):
        offset = torch.tensor(batch.index)[:, None, None]
        assert torch.equal(batch["v"], ds.values[batch.index] + offset)
        assert torch.equal(batch["u"], ds.values[batch.index])
    single = list(DataLoader(ds, batch_size=None))[5]
    assert torch.equal(single["v"], ds.values[5] + 5)


def test_a_collate_fn_gets_the_list_of_samples(ds: Stored) -> None:
    loader = DataLoader(ds, 4, collate_fn=lambda samples: torch.cat([s["u"] for s in samples]))
    assert torch.equal(torch.cat(list(loader)), ds.values.reshape(-1, 4))


def test_samplers_are_used_as_given(ds: Stored) -> None:
    order = torch.tensor([5, 0, 10, 3])
    assert [b.index for b in DataLoader(ds, 3, sampler=order)] == [[5, 0, 10], [3]]
    uneven = [[1], [2, 3, 4, 5], (np.int64(6), 7)]
    loader = DataLoader(ds, batch_sampler=uneven)
    assert len(loader) == 3
    batches = list(loader)
    assert [b.index for b in batches] == [[1], [2, 3, 4, 5], [6, 7]]
    assert all(torch.equal(b["u"], ds.values[b.index]) for b in batches)
    assert all(type(i) is int for b in batches for i in b.index)


def test_shuffle_without_a_mesh_is_torchs(ds: Stored) -> None:
    loader = DataLoader(ds, 2, True, generator=torch.Generator().manual_seed(3))
    assert isinstance(loader.sampler, RandomSampler)
    first = [i for b in loader for i in b.index]
    second = [i for b in loader for i in b.index]
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second
    again = DataLoader(ds, 2, True, generator=torch.Generator().manual_seed(3))
    assert [i for b in again for i in b.index] == first


def test_set_epoch_reaches_the_sampler(ds: Stored) -> None:
    class Shifted:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.epoch, self.epoch + 3))

    batched = DataLoader(ds, 2, sampler=Shifted())
    plain = DataLoader(ds, batch_size=None, sampler=Shifted())
    nested = DataLoader(ds, batch_sampler=BatchSampler(Shifted(), 2, False))
    for epoch in (0, 4, 1):
        for loader in (batched, plain, nested):
            loader.set_epoch(epoch)
        flat = [epoch, epoch + 1, epoch + 2]
        assert [i for b in batched for i in b.index] == flat
        assert [i for b in nested for i in b.index] == flat
        assert [s.index for s in plain] == flat
    DataLoader(ds).set_epoch(1)  # nothing that wants to know


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the smallest arrays come from the pool that counts them."""
    monkeypatch.setattr("scidata.core.memory._SMALL", 0)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(("num_workers", "sets"), [(0, 2), (1, 3), (3, 3)])
def test_memory_is_reused_over_epochs_while_kept_batches_stay_valid(ds: Stored, num_workers: int, sets: int) -> None:
    loader = DataLoader(ds, 2, num_workers=num_workers)
    kept = []
    for _ in range(3):
        for step, batch in enumerate(loader):
            if step == 1:
                kept.append((batch.index, batch["u"][1:]))
        del batch
    for index, view in kept:
        assert torch.equal(view, ds.values[index][1:])
    memory = loader._read_paths.memory
    assert memory.num_allocated <= sets + len(kept)
    kept.clear()
    del view, index
    allocated = memory.num_allocated
    for _ in range(3):
        for _batch in loader:
            pass
        del _batch
    assert memory.num_allocated == allocated


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_memory_is_bounded_by_prefetch_plus_one(ds: Stored, prefetch: int) -> None:
    loader = DataLoader(ds, 1, num_workers=3, prefetch_factor=prefetch)
    for _ in range(3):
        for _batch in loader:
            pass
    del _batch
    assert loader._read_paths.memory.num_allocated == prefetch + 1


def test_reads_ahead_are_bounded(ds: Stored) -> None:
    for step, _ in enumerate(DataLoader(ds, 1, num_workers=4, prefetch_factor=3)):
        assert len(ds.reads) <= min(N, step + 1 + 3)


def test_no_process_is_started(ds: Stored) -> None:
    for _ in DataLoader(ds, 2, num_workers=2):
        assert multiprocessing.active_children() == []
    assert {pid for _, pid, _ in ds.reads} == {os.getpid()}
    assert {name for _, _, name in ds.reads} <= {"scidata-reader-0", "scidata-reader-1"}
    ds.reads.clear()
    list(DataLoader(ds, 2, num_workers=0))
    assert {name for _, _, name in ds.reads} == {threading.current_thread().name}


def test_two_iterators_at_once(ds: Stored) -> None:
    loader = DataLoader(ds, 2)
    pairs = list(zip(loader, loader, strict=True))
    assert [a.index for a, _ in pairs] == [b.index for _, b in pairs]
    for a, b in pairs:
        assert torch.equal(a["u"], ds.values[a.index])
        assert torch.equal(a["u"], b["u"])
        assert a["u"].data_ptr() != b["u"].data_ptr()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_threads_share_an_iterator(ds: Stored, num_workers: int) -> None:
    iterator, got = iter(DataLoader(ds, 1, num_workers=num_workers)), []

    def take() -> None:
        got.extend(batch.index[0] for batch in iterator)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(got) == list(range(len(ds)))
    assert readers() == []


# -- ending ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_an_epoch_early(ds: Stored, num_workers: int) -> None:
    loader = DataLoader(ds, 2, num_workers=num_workers)
    for _ in range(20):
        for batch in loader:
            assert batch.index == [0, 1]
            break
        assert readers() == []
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert readers() == []
    assert list(iterator) == []
    iterator = iter(loader)
    next(iterator)
    del iterator
    assert readers() == []
    del batch
    assert len(list(loader)) == 6


def test_dropping_loader_and_iterator_ends_the_threads_but_not_the_batch(ds: Stored) -> None:
    loader = DataLoader(ds, 2)
    iterator = iter(loader)
    batch = next(iterator)
    del loader, iterator
    assert readers() == []
    assert torch.equal(batch["u"], ds.values[:2])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_names_the_sample_and_comes_in_turn(ds: Stored, num_workers: int) -> None:
    loader = DataLoader(ds, 2, sampler=[0, 1, 2, 99, 4, 5], num_workers=num_workers)
    iterator = iter(loader)
    assert next(iterator).index == [0, 1]
    with pytest.raises(IndexError, match="no sample 99") as caught:
        next(iterator)
    assert "sample 99" in caught.value.__notes__[0]
    assert readers() == []
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_of_the_transform_ends_the_threads(tmp_path: Path) -> None:
    def fails(sample: Sample) -> Sample:
        raise ZeroDivisionError

    iterator = iter(DataLoader(Stored(tmp_path, fails), 2))
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    assert readers() == []


def test_pickling_and_copying_leave_the_buffers(ds: Stored) -> None:
    loader = DataLoader(ds, 2, drop_last=True)
    expected = [b.index for b in loader]
    for twin in (pickle.loads(pickle.dumps(loader)), copy.copy(loader), copy.deepcopy(loader)):
        assert [b.index for b in twin] == expected
    again = [b.index for b in loader]
    assert again == expected


def test_stats(ds: Stored) -> None:
    loader = DataLoader(ds, 2)
    assert set(loader.stats().values()) == {0}
    list(loader)
    list(loader)
    stats = loader.stats()
    assert (stats["batches"], stats["samples"]) == (12, 22)
    assert (stats["bytes"], stats["bytes_fetched"]) == (22 * 48, 22 * 50)
    assert stats["read_seconds"] > 0
    assert stats["wait_seconds"] > 0


# -- arguments ---------------------------------------------------------------------------------------------------------

TORCHS: list[dict[str, Any]] = [
    {"num_workers": -1},
    {"timeout": -1},
    {"num_workers": 0, "prefetch_factor": 2},
    {"prefetch_factor": -1},
    {"num_workers": 0, "persistent_workers": True},
    {"sampler": [1], "shuffle": True},
    {"batch_sampler": [[1]], "batch_size": 2},
    {"batch_sampler": [[1]], "shuffle": True},
    {"batch_sampler": [[1]], "sampler": [1]},
    {"batch_sampler": [[1]], "drop_last": True},
    {"batch_size": None, "drop_last": True},
    {"batch_size": 0},
    {"num_workers": 0, "multiprocessing_context": "spawn"},
    {"num_workers": 1, "multiprocessing_context": "nonsense"},
]


@pytest.mark.parametrize("arguments", TORCHS, ids=str)
def test_the_same_errors_as_torch(ds: Stored, arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as torchs:
        torch.utils.data.DataLoader(ds, **({"num_workers": 2} | arguments))
    with pytest.raises(torchs.type) as ours:
        DataLoader(ds, **arguments)
    assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker_init_fn", print),
        ("multiprocessing_context", "spawn"),
        ("persistent_workers", True),
        ("on_error", "ignore"),
        ("in_order", False),
        ("pin_memory_device", "cuda"),
        ("device", "meta"),
    ],
)
def test_what_cannot_be_honoured_is_refused(ds: Stored, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}"):
        DataLoader(ds, **{name: value})


def test_other_data_sets_are_refused() -> None:
    class Endless(torch.utils.data.IterableDataset):
        buffer_specs = read_into = assemble = __len__ = __iter__ = lambda self: None

    for dataset in ([1, 2, 3], torch.utils.data.TensorDataset(torch.ones(3)), Endless()):
        with pytest.raises(ConfigError, match=r"use torch\.utils\.data\.DataLoader"):
            DataLoader(dataset)


def test_an_attribute_that_torch_protects_stays_protected(ds: Stored) -> None:
    loader = DataLoader(ds)
    with pytest.raises(ValueError, match="should not be set"):
        loader.batch_size = 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_without_cuda(ds: Stored) -> None:
    loader = DataLoader(ds, 2, device="cuda", pin_memory=True)  # built anywhere, say on a login node
    with pytest.raises(ConfigError, match="no such device"):
        iter(loader)
    assert len(list(DataLoader(ds, 2, pin_memory=True))) == 6
    assert next(iter(DataLoader(ds, 2, device="cpu")))["u"].device.type == "cpu"


# -- reads that fail, or take too long -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipping_what_cannot_be_read(ds: Stored, num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    order = [0, 99, 2, 3, 77, 88, 6]
    loader = DataLoader(ds, 2, sampler=order, num_workers=num_workers, on_error="skip")
    batches = list(loader)
    assert [b.index for b in batches] == [[0], [2, 3], [6]]  # the third batch had nothing left
    for batch in batches:
        assert torch.equal(batch["u"], ds.values[batch.index])
    stats = loader.stats()
    assert (stats["skipped"], stats["samples"], stats["batches"]) == (3, 4, 3)
    assert "left out: IndexError: no sample 77" in caplog.text
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["sampler"]["received"] == 2
    singles = DataLoader(ds, None, sampler=order, num_workers=num_workers, on_error="skip")
    assert [s.index for s in singles] == [0, 2, 3, 6]


def test_skipping_leaves_other_errors(ds: Stored) -> None:
    ds.transform = lambda sample: 1 / 0
    with pytest.raises(ZeroDivisionError):
        list(DataLoader(ds, on_error="skip"))


def test_timeout_names_the_sample_and_leaves_the_read(ds: Stored, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    read = ds.read_into

    def stuck(index: int, out: Mapping[str, np.ndarray]) -> SimpleNamespace:
        if index == 3:
            release.wait(60)
        return read(index, out)

    ds.read_into = stuck  # type: ignore[method-assign]
    iterator = iter(DataLoader(ds, 1, timeout=0.2, num_workers=1))
    try:
        for index in range(3):
            assert next(iterator).index == [index]
        with pytest.raises(ReadTimeoutError, match=r"waited 0.2 s for sample \[3\] \(step 3\).*timeout=0.2") as caught:
            next(iterator)
        assert isinstance(caught.value, TimeoutError | RuntimeError)
        assert "has waited 0.1 s for sample [3]" in caplog.text
    finally:
        release.set()
    while readers():  # it ends when its read does
        pass
    with pytest.raises(ConfigError, match=r"^timeout: .*num_workers=0"):
        DataLoader(ds, timeout=1, num_workers=0)
