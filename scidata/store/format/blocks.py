"""Blocks of files that are kept: where they begin and end, and how many of them some work has needed."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping
from typing import NamedTuple

#: As much as a request to an object store takes in CPU time (tests/bench/README.md): bytes that are read too many at
#: the ends of a range cost no more than another request would.
BLOCK = 256 << 10
ROW = 64 << 10  # of a block: the bytes that are read and checked at once


class Use:
    """Counts entries that some work needed, each once, those not there before, and the bytes requested of the store."""

    def __init__(self) -> None:
        self.nbytes = self.bytes_written = self.bytes_fetched = 0
        self._seen: dict[str, set[bytes]] = {}
        self._written: dict[str, set[bytes]] = {}
        self._lock = threading.Lock()

    def add(self, key: str, entries: Mapping[bytes, int], *, limit: float = math.inf, is_new: bool = False) -> bool:
        """Count entries of a file, bytes by digest, if all work together needs no more than ``limit`` then."""
        with self._lock:
            seen = self._seen.setdefault(folder_of(key), set())
            more = _sum_without(entries, seen)
            if self.nbytes + more > limit:
                return False
            self.nbytes += more
            seen.update(digest[:8] for digest in entries)
            if is_new:
                written = self._written.setdefault(folder_of(key), set())
                self.bytes_written += _sum_without(entries, written)
                written.update(digest[:8] for digest in entries)
        return True

    def fetched(self, nbytes: int) -> None:
        """Count bytes that were fetched."""
        with self._lock:
            self.bytes_fetched += nbytes

    def forget(self, folder: str) -> None:
        """Forget the entries of a folder: no more of them will come."""
        with self._lock:
            self._seen.pop(folder, None)
            self._written.pop(folder, None)


def _sum_without(entries: Mapping[bytes, int], known: Collection[bytes]) -> int:
    return sum(nbytes for digest, nbytes in entries.items() if digest[:8] not in known)


def folder_of(key: str) -> str:
    """Return the folder of a store that a file lies in: a sample's."""
    return key.partition("/")[0]


class File(NamedTuple):
    """A file whose blocks are kept: its name, which the keys of its blocks begin with, and its size."""

    name: bytes
    size: int

    def extent(self, i: int) -> tuple[int, int]:
        """Return the first byte of a block, and the one after its last."""
        return i * BLOCK, min(i * BLOCK + BLOCK, self.size)

    def shape(self, i: int) -> tuple[int, int]:
        """Return rows and bytes of a row of a block: the last one of a file is one row, if it is shorter."""
        begin, end = self.extent(i)
        return (BLOCK // ROW, ROW) if end - begin == BLOCK else (1, end - begin)

    def widened(self, offset: int, end: int) -> tuple[int, int]:
        """Return the rows that a range lies in: where the first begins and the last ends."""
        first, last = offset // BLOCK, (end - 1) // BLOCK
        begin = offset // ROW * ROW if self.shape(first)[0] > 1 else first * BLOCK
        return begin, -(-end // ROW) * ROW if self.shape(last)[0] > 1 else self.extent(last)[1]


def blocks_in(offset: int, end: int) -> range:
    """Return the numbers of the blocks that a range lies in."""
    return range(offset // BLOCK, -(-end // BLOCK))
