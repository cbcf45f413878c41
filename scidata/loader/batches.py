"""One epoch of a :class:`scidata.DataLoader`: parts that were read become batches."""

from __future__ import annotations

import dataclasses
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.utils.data
from torch.distributed.tensor import DTensor

from scidata.core import trace
from scidata.core.memory import ArrayPool
from scidata.data.adapter import DatasetAdapter
from scidata.data.collate import collate
from scidata.data.facts import facts_of, witness_of
from scidata.data.irregular_sample import IrregularSample
from scidata.data.sample import Sample, call_transform
from scidata.data.side_stream import SideStream
from scidata.device_mesh.devices import is_accelerator
from scidata.device_mesh.torch_internals import named
from scidata.loader.peers.agreement import Agreement
from scidata.loader.peers.session import Session
from scidata.loader.peers.watch import Watch
from scidata.loader.position import Position
from scidata.loader.prefetch.buffers import Batch
from scidata.loader.prefetch.prefetcher import Prefetcher
from scidata.loader.prefetch.slots import Slot
from scidata.loader.waiting import WaitWatch
from scidata.shard import ShardTensor

BatchT = TypeVar("BatchT", covariant=True)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Batches(Iterator[BatchT]):
    """Iterator of one epoch. Keeps no reference to a batch between two calls."""

    prefetcher: Prefetcher
    position: Position
    session: Session | None
    source: DatasetAdapter
    collate_fn: Callable[[Any], Any]
    batched: bool
    device: torch.device | None
    waiting: WaitWatch
    draws: tuple[int, int]
    stream: SideStream | None
    agreement: Agreement | None
    _over: bool = False
    _turn: Any = dataclasses.field(default_factory=threading.RLock)  # threads may share an epoch, batch by batch

    def __post_init__(self) -> None:
        if self.session is not None:
            self.session.wake = self.prefetcher.waker()
            weakref.finalize(self, self.session.end)

    def __next__(self) -> BatchT:
        """Return the next batch, or sample."""
        with self._turn:
            called = time.perf_counter_ns()
            try:
                if self.stream is None:
                    batch, arrived = self._read_batch()
                else:
                    with self.stream.current():
                        batch, arrived = self._read_batch()
                    self.stream.hand_over(tensor for tensor in _tensors_of(batch) if is_accelerator(tensor.device))
            except BaseException as e:
                finished = isinstance(e, StopIteration)
                if finished and not self._over:  # after an error the epoch is over, but not finished
                    self.position.finish()
                if self.session is not None and not self._over:
                    if not finished:
                        self.session.failed(self.session.at, e)
                    self.session.end(finished=finished, failed=not finished)
                self.close()
                raise
            self.position.received(self.prefetcher.taken)
            self.waiting.step(self.prefetcher.stats, called, arrived, time.perf_counter_ns())
            return batch

    def _read_batch(self) -> tuple[BatchT, int]:
        """Return the next batch, and when its parts had arrived."""
        index, local = self._read()
        arrived = time.perf_counter_ns()
        with trace.span("transform", samples=index), named("transform"):
            return self._wrap(index, local), arrived

    def _read(self) -> tuple[list[int], Batch]:
        if self.agreement is not None:
            self.agreement.begin()
        try:
            index, local = next(self.prefetcher)
        except StopIteration:
            if self.agreement is not None and not self._over:
                self.agreement.end()
            raise
        if self.agreement is not None:
            self.agreement.reached()
        return index, local

    def close(self) -> None:
        """End the epoch and its threads; dropping the iterator does the same."""
        self._over = True
        self.prefetcher.close()
        if self.session is not None:
            self.session.end()

    def _wrap(self, index: list[int], local: Batch) -> Any:
        if not self.batched:
            sample = self._sample(index[0], local, 0)
            own = self.collate_fn is not torch.utils.data.default_convert
            return self.collate_fn(sample) if own else sample
        dataset = self.source.dataset
        if dataset.transform is None and self.collate_fn is collate and isinstance(local, Mapping):
            return dataset.assemble(local, index=index, batched=True)
        return self.collate_fn([self._sample(i, local, slot) for slot, i in enumerate(index)])

    def _sample(self, index: int, local: Batch, slot: int) -> Sample:
        # a list has the parts of samples that differ in size
        part = local[slot] if isinstance(local, list) else {name: t[slot] for name, t in local.items()}
        sample = self.source.assemble(part, index=index)
        if isinstance(local, list) and self.device is not None:
            sample = sample.to(self.device, non_blocking=True)  # most is there
        sample.seed_generator(*self.draws)
        return call_transform(self.source.dataset.transform, sample)


def _tensors_of(batch: object) -> Iterator[torch.Tensor]:
    """Yield all local tensors in a batch, whatever it is made of."""
    if isinstance(batch, torch.Tensor):
        yield batch.to_local() if isinstance(batch, ShardTensor | DTensor) else batch
    elif isinstance(batch, IrregularSample):
        yield from _tensors_of([dict(batch), batch.held, batch.graph_values, batch.topology.tensors()])
    elif dataclasses.is_dataclass(batch):
        yield from _tensors_of([getattr(batch, field.name) for field in dataclasses.fields(batch)])
    elif isinstance(batch, Mapping):
        yield from _tensors_of(list(batch.values()))
    elif isinstance(batch, Iterable) and not isinstance(batch, str | bytes):
        for part in batch:
            yield from _tensors_of(part)


def items_of(order: Iterator[Any], batched: bool) -> Iterator[list[int]]:
    """Yield lists of plain ints from a batch sampler, or from a sampler one by one."""
    for entry in order:
        yield [operator.index(i) for i in entry] if batched else [operator.index(entry)]


class Announced(Iterator[list[int]]):
    """Items that are announced to the other ranks just before this rank reads them."""

    def __init__(self, items: Iterator[list[int]], session: Session) -> None:
        self._items, self._session = items, session
        self._step = 0
        self._first: list[list[int]] = []

    def look(self) -> list[int]:
        """Return the first item ahead of its turn; none if the iterator is empty."""
        with suppress(StopIteration):
            self._first = [self._next()]
        return [index for item in self._first for index in item]

    def __next__(self) -> list[int]:
        return self._first.pop() if self._first else self._next()

    def _next(self) -> list[int]:
        item = next(self._items)
        self._session.note(self._step, item)
        self._step += 1
        return item


def facts_of_data(
    dataset: object, watch: Watch, draws: tuple[int, int], position: Position, items: Announced, batches: int | None
) -> dict[str, str]:
    """Return values that ranks which share their samples must share, once the iteration has begun.

    The data set stays the same, so its own are compared in the first iteration only; the content of its files each
    time, in another sample.
    """
    facts = facts_of(dataset) if watch.iteration == 1 else {}
    facts |= {
        "the number of batches": str(batches),
        "seed and epoch of the samples' random numbers": str(draws),
        "the epoch of the data set": str(getattr(dataset, "epoch", None)),
        "the seed of torch's RandomSampler": str(getattr(position, "torch_seed", None)),
    }
    first = items.look()[:1]
    return facts | (witness_of(dataset, first[0]) if first else {})


def part_reader(source: DatasetAdapter, memory: ArrayPool) -> Callable[[int, Slot], object]:
    """Return a function that reads a sample of any size into the memory of its place."""
    read = source.reader(empty=memory.empty)  # of this epoch: threads may still read ahead when the next one is set

    def fill(index: int, out: Slot) -> object:
        part = read(index)
        out.put(part)
        return getattr(part, "stats", None)

    return fill
