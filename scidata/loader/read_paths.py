"""Memory and readers of a loader's samples, which are kept from one epoch to the next."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from scidata.core.memory import ArrayPool
from scidata.data.adapter import DatasetAdapter
from scidata.data.side_stream import SideStream
from scidata.loader.base import BaseLoader
from scidata.loader.batches import part_reader
from scidata.loader.peers.ballot import Ballot
from scidata.loader.peers.session import Session
from scidata.loader.prefetch.ahead import ReadAhead
from scidata.loader.prefetch.buffers import BufferRing
from scidata.loader.prefetch.copiers import Copier, DeviceCopier, HostCopier, Staging
from scidata.loader.prefetch.depth import Depth
from scidata.loader.prefetch.own_reads import OwnReads
from scidata.loader.prefetch.prefetcher import Prefetcher
from scidata.loader.prefetch.readers import Fill
from scidata.loader.prefetch.slots import SlotRing
from scidata.loader.stats import PrefetchStats
from scidata.loader.workers import WorkerPool, WorkerReader


class ReadPaths:
    """Makes the prefetcher of each epoch from what earlier ones have left: buffers, pinned memory, blocks, processes.

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

    def prefetcher(
        self, loader: BaseLoader[Any], items: Iterator[list[int]], prefetch: int, device: torch.device | None, *,
        stats: PrefetchStats, peers: Session | None, ballot: Ballot | None, ahead: ReadAhead | None,
        own_reads: OwnReads | None,
    ) -> Prefetcher:  # fmt: skip
        """Begin to read an epoch: ``prefetch`` batches ahead, to a CUDA device or the host."""
        ring: BufferRing | SlotRing
        fill: Fill | None = self._worker_reader(loader)
        nbytes, on_close, idle = 0, lambda: None, self.idle_rings
        if self._source.has_buffers:
            ring = buffers = self._ring(
                max(1, prefetch) + 1, pin_memory=loader.pin_memory and torch.cuda.is_available()
            )
            fill = fill or self._source.dataset.read_into
            nbytes = (loader.batch_size or 1) * sum(spec.nbytes for spec in buffers.specs.values())
            on_close = lambda: idle.append(buffers)  # noqa: E731
        else:
            ring = SlotRing(max(1, prefetch))
            fill = fill or part_reader(self._source, self.memory, ring)
            if device is not None and loader.pin_memory and self.staging is None:
                self.staging = Staging()
        copier: Copier = HostCopier(ring) if device is None else DeviceCopier(ring, SideStream(device), self.staging)
        return Prefetcher(
            items, fill, ring, num_workers=loader.num_workers,
            prefetch=Depth(prefetch, loader.max_prefetch_bytes, nbytes), copier=copier, stats=stats,
            on_close=on_close, timeout=loader.timeout, peers=peers, ballot=ballot, ahead=ahead, own_reads=own_reads,
        )  # fmt: skip

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
