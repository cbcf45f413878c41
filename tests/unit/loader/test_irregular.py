"""``DataLoader`` on samples that differ in size: order, bounds, errors and threads, on real files."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.utils.data

from scidata.data.sample import Sample
from scidata.errors import ConfigError
from scidata.loader.data_loader import DataLoader

N = 11


@dataclass(frozen=True, eq=False)
class Part:
    fields: dict[str, npt.NDArray[Any]]
    stats: SimpleNamespace


class Stored(torch.utils.data.Dataset):
    """The smallest real data set of the interface: one file a sample, of as many rows as its index."""

    mesh = None
    dp_axis = None

    def __init__(self, folder: Path, transform: Callable[[Sample], Sample] | None = None) -> None:
        self.folder = folder
        self.transform = transform
        self.reads: list[tuple[int, str]] = []
        self.epoch = 0
        for index in range(N):
            values(index).tofile(folder / f"{index}.bin")

    def __len__(self) -> int:
        return N

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def read_local(self, index: int) -> Part:
        self.reads.append((index, threading.current_thread().name))
        array = np.fromfile(self.folder / f"{index}.bin", np.float32)
        return Part({"u": array}, SimpleNamespace(bytes_fetched=array.nbytes + 2))

    def assemble(self, local: Part, *, index: int) -> Sample:
        assert threading.current_thread() is threading.main_thread()
        return Sample({"u": torch.from_numpy(local.fields["u"])}, dims={"u": ("node",)}, index=index)


def values(index: int) -> npt.NDArray[np.float32]:
    return np.arange(index, dtype=np.float32) + 100 * index


def union(samples: Sequence[Sample]) -> Sample:
    u = torch.cat([sample["u"] for sample in samples])
    return Sample({"u": u}, dims={"u": ("node",)}, index=[s.index for s in samples])  # type: ignore[misc]


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


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_samples_in_order(ds: Stored, num_workers: int) -> None:
    loader = DataLoader(ds, batch_size=None, sampler=[4, 0, 2, 2, 10], num_workers=num_workers)
    for _ in range(2):
        samples = list(loader)
        assert [s.index for s in samples] == [4, 0, 2, 2, 10]
        assert all(np.array_equal(s["u"].numpy(), values(s.index)) for s in samples)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 3, N, 20])
def test_batches_are_what_collate_makes_of_their_samples(ds: Stored, num_workers: int, batch_size: int) -> None:
    loader = DataLoader(ds, batch_size, num_workers=num_workers, collate_fn=union)
    expected = list(torch.utils.data.DataLoader(range(N), batch_size))
    batches = list(loader)
    assert len(loader) == len(expected) == len(batches)
    for batch, indices in zip(batches, expected, strict=True):
        assert batch.index == indices.tolist()
        assert np.array_equal(batch["u"].numpy(), np.concatenate([values(i) for i in batch.index]))


def test_a_transform_sees_single_samples(tmp_path: Path) -> None:
    ds = Stored(tmp_path, lambda sample: sample.replace({"u": sample["u"] - 100 * sample.index}))
    (batch,) = DataLoader(ds, N, collate_fn=union)
    assert np.array_equal(batch["u"].numpy(), np.concatenate([np.arange(i) for i in range(N)]))
    assert [float(s["u"].sum()) for s in DataLoader(ds, batch_size=None)] == [i * (i - 1) / 2 for i in range(N)]


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_reads_ahead_are_bounded(ds: Stored, prefetch: int) -> None:
    for step, _ in enumerate(DataLoader(ds, 1, collate_fn=union, num_workers=4, prefetch_factor=prefetch)):
        assert len(ds.reads) <= min(N, step + 1 + prefetch)


def test_a_slow_consumer_is_read_ahead_for_and_no_further(ds: Stored) -> None:
    iterator = iter(DataLoader(ds, batch_size=None, num_workers=2, prefetch_factor=3))
    next(iterator)
    while len(ds.reads) < 4:  # three beyond the one in hand; hangs into the test's timeout if none reads ahead
        time.sleep(0.001)
    assert [index for index, _ in sorted(ds.reads)] == [0, 1, 2, 3]
    assert {name for _, name in ds.reads} <= {"scidata-reader-0", "scidata-reader-1"}
    iterator.close()
    assert len(ds.reads) == 4


def test_kept_samples_stay_valid(ds: Stored) -> None:
    kept = [s for _ in range(3) for s in DataLoader(ds, batch_size=None)]
    assert all(np.array_equal(s["u"].numpy(), values(s.index)) for s in kept)
    assert len({s["u"].data_ptr() for s in kept if s.index}) == 3 * (N - 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_names_the_sample_and_comes_in_turn(ds: Stored, num_workers: int) -> None:
    (ds.folder / "3.bin").unlink()
    iterator = iter(DataLoader(ds, 2, sampler=[0, 1, 2, 3, 4, 5], num_workers=num_workers, collate_fn=union))
    assert next(iterator).index == [0, 1]
    with pytest.raises(FileNotFoundError) as caught:
        next(iterator)
    assert "sample 3 (number 1 of batch 1)" in caught.value.__notes__[0]
    assert readers() == []
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_of_assembling_ends_the_threads(ds: Stored) -> None:
    def fails(local: Part, *, index: int) -> Sample:
        raise ZeroDivisionError

    ds.assemble = fails  # type: ignore[method-assign]
    iterator = iter(DataLoader(ds, batch_size=None))
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    assert readers() == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_an_epoch_early(ds: Stored, num_workers: int) -> None:
    loader = DataLoader(ds, batch_size=None, num_workers=num_workers)
    for _ in range(20):
        for sample in loader:
            assert sample.index == 0
            break
        assert readers() == []
    iterator = iter(loader)
    next(iterator)
    del iterator
    assert readers() == []
    assert len(list(loader)) == N


def test_stats_and_epoch(ds: Stored) -> None:
    loader = DataLoader(ds, 2, collate_fn=union)
    loader.set_epoch(3)
    assert ds.epoch == 3
    list(loader)
    stats = loader.stats()
    assert (stats["batches"], stats["samples"]) == (6, N)
    assert (stats["bytes"], stats["bytes_fetched"]) == (4 * 55, 4 * 55 + 2 * N)


def test_what_cannot_be_honoured_is_refused(ds: Stored) -> None:
    with pytest.raises(ConfigError, match=r"^pin_memory: .*differ in size"):
        DataLoader(ds, batch_size=None, pin_memory=True)
    with pytest.raises(ConfigError, match="it has no read_local, assemble"):
        DataLoader([1, 2, 3])
