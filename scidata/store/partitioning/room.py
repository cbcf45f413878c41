"""Memory and scratch files of a sample that is put in order in passes: how much one block or bucket may take."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from scidata.core.own_files import open_own
from scidata.core.types import AnyArray
from scidata.store.format.spools import Buckets, Spool

_PROGRAM = 384 << 20  # what scidata and its libraries take, and the shards on their way to disk
_MOST_BUCKETS = 256
_PARTS = 32  # buckets that would fill the memory; sorting one takes some times its size, and they differ in size
_MOST_IN_BLOCK = 4 << 20  # entries: larger blocks are not faster


def room_of(memory: int) -> int:
    """Return how much of the memory that a process may take is left for the arrays of a sample."""
    return max(memory - _PROGRAM, memory // 2)


class Room:
    """A folder for buckets and spools, or none, and the memory that one of them at a time may take."""

    def __init__(self, folder: str | None, nbytes: int) -> None:
        self.folder, self.nbytes, self._num = folder, max(nbytes, 1), 0

    def block(self, entry: int) -> int:
        """Return how many entries of so many bytes make a block."""
        return min(max(self.nbytes // (2 * entry), 1), _MOST_IN_BLOCK)

    def spool(self, dtype: npt.DTypeLike, most: int = 0) -> Spool:
        """Return an empty spool; in memory ``most`` rows may be given room at once."""
        return Spool(self._path(), dtype, most)

    def buckets(
        self, num: int, nbytes: float, dtypes: list[npt.DTypeLike], shift: int = 0, some: AnyArray | None = None
    ) -> Buckets:
        """Return buckets for ``nbytes`` of rows, by numbers below ``num << shift``.

        As many numbers go to each, or as many of ``some`` of them, which are sorted.
        """
        most = _MOST_BUCKETS if some is not None else min(_MOST_BUCKETS, max(1, num))
        num_buckets = min(most, int(nbytes * _PARTS / self.nbytes) + 1)
        bounds = [num * i // num_buckets << shift for i in range(num_buckets)] + [min(num << shift, 2**64 - 1)]
        if some is not None:
            inner = {int(some[len(some) * i // num_buckets]) for i in range(1, num_buckets)}
            bounds = [0, *sorted(inner - {0}), bounds[-1]]
        return Buckets(self._path(), np.array(bounds, np.uint64 if shift else np.int64), dtypes)

    def array(self, num: int, dtype: npt.DTypeLike) -> AnyArray:
        """Return room for a number of each row, in memory or as a map of a file that has no name any more."""
        path, nbytes = self._path(), num * np.dtype(dtype).itemsize
        if path is None or nbytes <= self.nbytes:
            return np.empty(num, dtype)
        with open(open_own(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "r+b") as file:
            os.unlink(path)
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk ends it here
            return np.asarray(np.memmap(file, dtype, "r+", shape=(num,)))

    def _path(self) -> str | None:
        self._num += 1
        return None if self.folder is None else os.path.join(self.folder, str(self._num))
