"""Memory and readers of a loader's samples, which are kept from one epoch to the next."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from scidata.core.memory import ArrayPool
from scidata.data.adapter import DatasetAdapter
from scidata.data.side_stream import SideStream
from scidata.loader.base import BaseLoader
from scidata.loader.batches import part_reader
from scidata.loader.prefetch.buffers import BufferRing, Ring
from scidata.loader.prefetch.copiers import DeviceCopier, HostCopier, Staging
from scidata.loader.prefetch.readers import Copier, Fill
from scidata.loader.prefetch.slots import SlotRing
from scidata.loader.workers import WorkerPool, WorkerReader


@dataclass(frozen=True, kw_only=True)
class ReadPath:
    """How the samples of an epoch are read.

    Attributes
    ----------
    ring, fill, copier
        Where samples are read to, what reads them, and what makes tensors of them.
    nbytes
        Bytes of a batch; 0 where samples differ.
    on_close
        Called when the epoch's threads have ended.
    """

    ring: Ring[Any]
    fill: Fill
    copier: Copier[Any]
    nbytes: int = 0
    on_close: Callable[[], None] = lambda: None


class ReadPaths:
    """Makes the read path of each epoch from what earlier ones have left: buffers, pinned memory, blocks, processes.

    Pickles without these, but for the blocks' limits.

    Parameters
    ----------
    source
        The data set.
    """

    def __init__(self, source: DatasetAdapter) -> None:
        self._source = source
        self.idle_rings: deque[BufferRing] = deque(maxlen=1)
        self.staging: Staging | None = None
        self.memory = ArrayPool()
        self._pool: WorkerPool | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"idle_rings": deque(maxlen=1), "staging": None, "_pool": None}

    def of(self, loader: BaseLoader[Any], prefetch: int, device: torch.device | None) -> ReadPath:
        """Return the path of an epoch: ``prefetch`` batches ahead, to a CUDA device or the host."""
        make = self._into_buffers if self._source.has_buffers else self._into_slots
        return make(loader, max(1, prefetch), device)

    def _into_buffers(self, loader: BaseLoader[Any], prefetch: int, device: torch.device | None) -> ReadPath:
        ring = self._ring(prefetch + 1, pin_memory=loader.pin_memory and torch.cuda.is_available())
        idle = self.idle_rings
        return ReadPath(
            ring=ring,
            fill=self._worker_reader(loader) or self._source.dataset.read_into,
            copier=HostCopier(ring) if device is None else DeviceCopier(ring, SideStream(device)),
            nbytes=(loader.batch_size or 1) * sum(spec.nbytes for spec in ring.specs.values()),
            on_close=lambda: idle.append(ring),
        )

    def _into_slots(self, loader: BaseLoader[Any], prefetch: int, device: torch.device | None) -> ReadPath:
        ring = SlotRing(prefetch)
        if device is not None and loader.pin_memory and self.staging is None:
            self.staging = Staging()
        return ReadPath(
            ring=ring,
            fill=self._worker_reader(loader) or part_reader(self._source, self.memory, ring),
            copier=HostCopier(ring) if device is None else DeviceCopier(ring, SideStream(device), self.staging),
        )

    def _ring(self, capacity: int, *, pin_memory: bool) -> BufferRing:
        specs = dict(self._source.dataset.buffer_specs())
        try:
            ring = self.idle_rings.pop()
        except IndexError:
            ring = None
        if ring is not None and (ring.specs, ring.pin_memory) == (specs, pin_memory):
            return ring
        return BufferRing(specs, capacity=capacity, pin_memory=pin_memory)

    def _worker_reader(self, loader: BaseLoader[Any]) -> WorkerReader | None:
        if loader.workers == "thread" or not loader.num_workers:
            return None
        pool = self._pool
        if pool is None or pool.closed:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            context = loader.multiprocessing_context
            pool = WorkerPool(self._source.dataset, loader.num_workers, context, loader.worker_init_fn, seed)
            if loader.persistent_workers:
                self._pool = pool
                weakref.finalize(loader, pool.end)
        return WorkerReader(pool, self._source.epoch, keep=loader.persistent_workers)
