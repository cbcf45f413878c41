"""Fills a cache of a store's blocks ahead of a job: all that some ranks of a domain need of all samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from scidata.core.tasks.work import in_threads
from scidata.errors import ConfigError, OutputError
from scidata.read.context import ReadStats, Staged
from scidata.store.format.blocks import Use
from scidata.store.format.places import folder_of
from scidata.store.reading.reader import StoreReader


class StoreStaging:
    """Reads the parts of some ranks, sample by sample, through a reader's cache."""

    def __init__(self, reader: StoreReader, ranks: Sequence[int]) -> None:
        if reader.store.kept is None:
            raise ConfigError(f"{reader.path}: staging needs a reader with a cache")
        self._reader, self._ranks, self._kept = reader, tuple(ranks), reader.store.kept
        self._start = f"{self._kept.url()}/"
        self._use = Use()
        self._limit, self._is_full = self._kept.disk.max_bytes, False
        folders = map(folder_of, reader.store.manifest.samples.column("index").tolist())
        self._to_come = Counter(dict(zip(folders, np.diff(reader.numbering.firsts).tolist(), strict=True)))

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return self._reader.num_samples * len(self._ranks)

    def run(self, *, jobs: int = 4, tick: Callable[[], None] = lambda: None) -> Staged:
        """Fetch the missing blocks; call ``tick`` here for each part, a sample's of a rank.

        A part is written where anything of it was fetched. Raises OutputError: blocks cannot be written.
        """
        done, left = Counter[str](), Counter({i: len(self._ranks) for i in range(self._reader.num_samples)})

        def take(part: tuple[int, int], count: str) -> None:
            done[count] += 1
            left[part[0]] -= 1
            if not left[part[0]]:
                self._end(part[0])
            tick()

        use = self._kept.use = self._use
        try:
            in_threads(self._stage, product(range(self._reader.num_samples), self._ranks), jobs, take)
        finally:
            self._kept.use = None
        stats, before = ReadStats(bytes_fetched=use.bytes_fetched), use.nbytes - use.bytes_written
        return Staged(**done, bytes_written=use.bytes_written, bytes_there=before, stats=stats)

    def _stage(self, part: tuple[int, int]) -> str:
        if self._is_full:
            return "left"
        index, rank = part
        disk = self._kept.disk
        places, stats = self._reader.ranges(index, rank)
        missing = False
        for path, offset, nbytes in places:
            key = path.removeprefix(self._start)
            entries = self._kept.entries(key, offset, nbytes)
            sizes = {digest: disk.entry_nbytes(*shape) for digest, shape in entries.items()}
            if not self._use.add(key, sizes, limit=self._limit):
                self._is_full = True
                return "left"
            missing = missing or not entries or not all(disk.read(digest, entries[digest], []) for digest in entries)
        if missing:
            self._reader.read(index, rank)
        if disk.failure:
            raise OutputError(disk.failure)
        return "written" if missing or stats.num_reads else "there"

    def _end(self, index: int) -> None:
        folder = self._reader.sample_info(index).folder
        self._to_come[folder] -= 1
        if not self._to_come[folder]:
            self._use.forget(folder)
