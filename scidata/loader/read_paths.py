"""Memory and readers of a loader's samples, which are kept from one epoch to the next."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from scidata.core.memory import ArrayPool
from scidata.data.adapter import DatasetAdapter
from scidata.data.side_stream import SideStream
from scidata.device_mesh.devices import accelerator
from scidata.loader.base import BaseLoader
from scidata.loader.batches import part_reader
from scidata.loader.peers.ballot import Ballot
from scidata.loader.peers.session import Session
from scidata.loader.prefetch.ahead import ReadAhead
from scidata.loader.prefetch.buffers import Ring, buffer_ring
from scidata.loader.prefetch.copiers import Copier, DeviceCopier, HostCopier
from scidata.loader.prefetch.depth import Depth
from scidata.loader.prefetch.own_reads import OwnReads
from scidata.loader.prefetch.prefetcher import Prefetcher
from scidata.loader.prefetch.readers import Fill
from scidata.loader.prefetch.slots import SlotSet
from scidata.loader.prefetch.workers import WorkerPool, WorkerReader
from scidata.loader.stats import PrefetchStats


class ReadPaths:
    """Makes the prefetcher of each epoch, with memory and processes of earlier ones. Pickles without these."""

    def __init__(self, source: DatasetAdapter) -> None:
        self._source = source
        self.memory = ArrayPool()
        self._pool: WorkerPool | None = None
        self._cut: object = None  # the reader that the processes have copies of

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_pool": None, "_cut": None}

    def prefetcher(
        self, loader: BaseLoader[Any], items: Iterator[list[int]], prefetch: int, device: torch.device | None, *,
        stats: PrefetchStats, peers: Session | None, ballot: Ballot | None, ahead: ReadAhead | None,
        own_reads: OwnReads | None,
    ) -> Prefetcher:  # fmt: skip
        """Begin to read an epoch: ``prefetch`` batches ahead, to an accelerator or the host."""
        fill: Fill | None = self._worker_reader(loader)
        nbytes, limit = 0, max(1, prefetch)
        ring: Ring[Any]
        if self._source.has_buffers:
            specs = dict(self._source.dataset.buffer_specs())
            ring = buffer_ring(specs, limit, self.memory, pin_memory=loader.pin_memory and accelerator() is not None)
            fill = fill or self._source.filler()
            nbytes = (loader.batch_size or 1) * sum(spec.nbytes for spec in specs.values())
        else:
            ring = Ring(partial(SlotSet, pin=loader.pin_memory and device is not None), limit, self.memory)
            fill = fill or part_reader(self._source, self.memory)
        copier: Copier = HostCopier(ring) if device is None else DeviceCopier(ring, SideStream(device))
        return Prefetcher(
            items, fill, ring, num_workers=loader.num_workers,
            prefetch=Depth(prefetch, loader.max_prefetch_bytes, nbytes), copier=copier, stats=stats,
            timeout=loader.timeout, peers=peers, ballot=ballot, ahead=ahead, own_reads=own_reads,
        )  # fmt: skip

    def _worker_reader(self, loader: BaseLoader[Any]) -> WorkerReader | None:
        if loader.workers == "thread" or not loader.num_workers:
            return None
        pool, reader = self._pool, getattr(self._source.dataset, "reader", None)
        if pool is not None and reader is not self._cut:  # cut by other costs
            pool.end()
        if pool is None or pool.closed:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            context = loader.multiprocessing_context
            pool = WorkerPool(self._source.dataset, loader.num_workers, context, loader.worker_init_fn, seed)
            if loader.persistent_workers:
                self._pool, self._cut = pool, reader
                weakref.finalize(loader, pool.end)
        return WorkerReader(pool, self._source.epoch, keep=loader.persistent_workers)
