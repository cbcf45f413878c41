"""One epoch of a :class:`scidata.DataLoader`: from what was read to batches, and what is asked of a data set."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
from torch.distributed.device_mesh import DeviceMesh

from scidata.core import trace
from scidata.core.types import BufferSpec
from scidata.data.collate import collate
from scidata.data.sample import Sample
from scidata.loader.peers.session import Session
from scidata.loader.position import Progress
from scidata.loader.prefetch.pool import BlockPool
from scidata.loader.prefetch.prefetcher import Prefetcher
from scidata.loader.prefetch.slots import Slot, SlotRing
from scidata.loader.transform_stream import TransformStream
from scidata.loader.waiting import WaitWatch
from scidata.read import ReadStats

__all__ = ["Batches", "BufferedDataset", "PartDataset", "filler", "items_of", "noted", "part_reader"]


@runtime_checkable
class BufferedDataset(Protocol):
    """What the loader needs of a data set; :class:`scidata.ShardedDataset` is one."""

    mesh: DeviceMesh | None
    dp_axis: str | None
    transform: Callable[[Sample], Sample] | None

    def __len__(self) -> int: ...

    def buffer_specs(self) -> Mapping[str, BufferSpec]:
        """Shape and dtype of this rank's part of one sample, by field."""
        ...

    def read_into(self, index: int, out: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Fill the buffers of one sample; thread-safe. What it returns may have ``bytes_fetched``."""
        ...

    def assemble(self, local: Mapping[str, torch.Tensor], *, index: int | list[int], batched: bool) -> Sample:
        """Wrap tensors shaped as the buffers, with a batch dim 0 if ``batched``."""
        ...


@runtime_checkable
class PartDataset(Protocol):
    """What the loader needs of a data set whose samples differ in size: :func:`scidata.open_dataset` of a store."""

    mesh: DeviceMesh | None
    dp_axis: str | None
    transform: Callable[[Sample], Sample] | None

    def __len__(self) -> int: ...

    def read_local(self, index: int) -> Any:
        """Read this rank's part of one sample; thread-safe. It may have ``fields`` by name, ``stats``, ``arrays()``."""
        ...

    def assemble(self, local: Any, *, index: int) -> Sample:
        """Wrap what was read; in the thread that uses it."""
        ...


class Batches(Iterator[Any]):
    """One epoch. Keeps no batch between two calls, so that the user alone decides how long one lives."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        progress: Progress,
        session: Session | None,
        dataset: BufferedDataset | PartDataset,
        collate_fn: Callable[[Any], Any],
        *,
        batched: bool,
        device: torch.device | None,
        waiting: WaitWatch,
        draws: tuple[int, int] = (0, 0),
        stream: TransformStream | None = None,
    ) -> None:
        self._draws = draws
        self._stream = stream
        self._waiting = waiting
        self._prefetcher = prefetcher
        self._progress = progress
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._batched = batched
        self._device = device
        self._over = False
        self._session = session
        if session is not None:
            session.wake = prefetcher.waker()
            weakref.finalize(self, session.end)

    def __next__(self) -> Any:
        """Return the next batch, or sample."""
        called = time.perf_counter_ns()
        try:
            with nullcontext() if self._stream is None else self._stream.own():
                index, local = next(self._prefetcher)
                arrived = time.perf_counter_ns()
                with trace.span("transform", samples=index):
                    batch = self._wrap(index, local)
            if self._stream is not None:
                self._stream.hand_over(batch)
        except BaseException as e:
            finished = isinstance(e, StopIteration)
            if finished and not self._over:  # after an error the epoch is over, but not finished
                self._progress.finish()
            if self._session is not None and not self._over:
                if not finished:
                    self._session.failed(self._session.at, e)
                self._session.end(finished=finished, failed=not finished)
            self.close()
            raise
        self._progress.received(self._prefetcher.taken)
        self._waiting.step(self._prefetcher.stats, called, arrived, time.perf_counter_ns())
        return batch

    def close(self) -> None:
        """End the epoch and its threads; dropping the iterator does the same."""
        self._over = True
        self._prefetcher.close()
        if self._session is not None:
            self._session.end()

    def _wrap(self, index: list[int], local: Any) -> Any:
        if not self._batched:
            sample = self._sample(index[0], local, 0)
            own = self._collate_fn is not torch.utils.data.default_convert
            return self._collate_fn(sample) if own else sample
        if self._dataset.transform is None and self._collate_fn is collate and isinstance(local, Mapping):
            return self._dataset.assemble(local, index=index, batched=True)  # type: ignore[call-arg, arg-type]
        return self._collate_fn([self._sample(i, local, slot) for slot, i in enumerate(index)])

    def _sample(self, index: int, local: Any, slot: int) -> Sample:
        if isinstance(local, list):  # parts of samples that differ in size
            sample = self._dataset.assemble(local[slot], index=index)  # type: ignore[call-arg]
            sample = sample if self._device is None else sample.to(self._device, non_blocking=True)  # most is there
        else:
            part = {name: t[slot] for name, t in local.items()}
            sample = self._dataset.assemble(part, index=index, batched=False)  # type: ignore[call-arg]
        sample.seed_generator(*self._draws)
        return sample if self._dataset.transform is None else self._dataset.transform(sample)


def items_of(order: Iterator[Any], batched: bool) -> Iterator[list[int]]:
    """Yield lists of plain ints from a batch sampler, or from a sampler one by one."""
    for entry in order:
        yield [operator.index(i) for i in entry] if batched else [operator.index(entry)]


def noted(items: Iterator[list[int]], session: Session | None) -> Iterator[list[int]]:
    """Tell the other ranks which samples this one is about to read."""
    if session is None:
        return items
    return (session.note(step, item) or item for step, item in enumerate(items))  # type: ignore[func-returns-value]


def filler(dataset: BufferedDataset) -> Callable[[int, Mapping[str, npt.NDArray[np.generic]]], ReadStats | int]:
    """Return what reads a sample into buffers of its size."""

    def fill(index: int, out: Mapping[str, npt.NDArray[Any]]) -> ReadStats | int:
        return _stats_of(dataset.read_into(index, out))

    return fill


def _stats_of(found: Any) -> ReadStats | int:
    return found if isinstance(found, ReadStats) else getattr(found, "bytes_fetched", 0)


def part_reader(dataset: Any, memory: BlockPool, ring: SlotRing) -> Callable[[int, Slot], ReadStats | int]:
    """Return what reads a sample of any size into the memory of its place."""
    # threads may still read ahead when the next epoch is set
    read = dataset.epoch_reader(empty=memory.empty) if hasattr(dataset, "epoch_reader") else dataset.read_local

    def fill(index: int, out: Slot) -> ReadStats | int:
        out.part = part = read(index)
        fields = part if isinstance(part, Mapping) else getattr(part, "fields", {})
        out.nbytes = sum(values.nbytes for values in fields.values())
        memory.max_free = max(memory.max_free, 2 * ring.rows * out.nbytes)  # the batch let go, and the next one's
        return _stats_of(getattr(part, "stats", None))

    return fill
