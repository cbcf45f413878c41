"""Arrays on disk that are written once, from their first row on, and read by slices; and rows put into buckets."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from scidata.core.own_files import open_own
from scidata.core.types import AnyArray, IntArray
from scidata.errors import CorruptDataError

_CHECKED = 16 << 20  # bytes that are looked at together


class Spool:
    """Rows in a file, or in pieces in memory where ``path`` is None: read by slices, as an array is.

    ``dtype`` may have a shape, that of each row. In memory ``most`` rows may be given room at once, in one piece. No
    file is open between two calls. ``written``: rows of a file that is there, and the crc32c of its bytes. ``remove``
    takes the file's path.
    """

    def __init__(
        self, path: str | None, dtype: npt.DTypeLike, most: int = 0, *, written: tuple[int, int] | None = None,
        remove: Callable[[str], None] = os.unlink,
    ) -> None:  # fmt: skip
        self.path, self._row, (self._num, self.crc) = path, np.dtype(dtype), written or (0, 0)
        self._remove = remove
        self.dtype = self._row.base
        self._most = most if path is None else 0
        self._pieces: list[AnyArray] = [np.empty(self._most, self._row)] if self._most else []
        self._firsts = [0] if self._most else []
        if path is not None and written is None:
            os.close(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))

    @property
    def shape(self) -> tuple[int, ...]:
        """``(num_rows, ...)``."""
        return (self._num, *self._row.shape)

    def __len__(self) -> int:
        return self._num

    def append(self, values: AnyArray) -> None:
        """Write rows after those that are there."""
        if self._most:
            self._pieces[0][self._num : self._num + len(values)] = values
        elif self.path is None:
            self._firsts.append(self._num)
            self._pieces.append(np.array(values, self.dtype))  # a copy: the values may be a small part of an array
        else:
            with open(open_own(self.path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
                view = np.ascontiguousarray(values, self.dtype).view(np.uint8).reshape(-1).data
                self.crc = crc32c(view, self.crc)
                while len(view):
                    view = view[file.write(view) :]
        self._num += len(values)

    def __getitem__(self, box: slice | tuple[slice]) -> AnyArray:
        start, stop, _ = (box[0] if isinstance(box, tuple) else box).indices(self._num)
        if self.path is not None:
            with open(open_own(self.path, os.O_RDONLY), "rb") as file:
                return np.fromfile(file, self._row, max(stop - start, 0), offset=start * self._row.itemsize)
        first = max(bisect.bisect_right(self._firsts, start) - 1, 0)
        last = bisect.bisect_left(self._firsts, stop)
        found = [
            piece[max(start - begin, 0) : stop - begin]
            for begin, piece in zip(self._firsts[first:last], self._pieces[first:last], strict=True)
        ]
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self._row), *found])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> AnyArray:
        return self[:] if dtype is None else self[:].astype(dtype, copy=False)

    def at_random(self, most: int) -> AnyArray:
        """Return all rows for access at random: those of a file of more than ``most`` bytes as a map of it."""
        if self.path is None or self._num * self._row.itemsize <= most:
            return self[:]
        with open(open_own(self.path, os.O_RDONLY), "rb") as file:
            return np.asarray(np.memmap(file, self.dtype, "r", shape=self.shape))

    def check(self) -> None:
        """Raise CorruptDataError if the file is not what was written."""
        assert self.path is not None
        crc, size = 0, os.path.getsize(self.path)
        with open(open_own(self.path, os.O_RDONLY), "rb") as file:
            while data := file.read(_CHECKED):
                crc = crc32c(data, crc)
        if crc != self.crc or size != self._num * self._row.itemsize:
            raise CorruptDataError(f"{self.path}: is not what was written")

    def remove(self) -> None:
        """Remove the file, or release the memory."""
        self._pieces.clear()
        if self.path is not None:
            self._remove(self.path)


class Buckets:
    """Rows of some columns, put into files by where a number lies between bounds; each bucket is taken out once.

    ``bounds``: ``(num_buckets + 1,)`` rising: bucket ``b`` has the numbers from ``bounds[b]`` to below ``bounds[b +
    1]``.
    ``columns``: the spools of each bucket.
    """

    def __init__(self, bounds: AnyArray, columns: Sequence[Sequence[Spool]]) -> None:
        self.bounds, self.columns = bounds, columns

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def num_rows(self) -> int:
        """Rows of all buckets, by their first column."""
        return sum(len(spools[0]) for spools in self.columns)

    @property
    def most_rows(self) -> int:
        """Rows of the fullest bucket."""
        return max(len(spools[0]) for spools in self.columns)

    def split(self, numbers: AnyArray) -> tuple[IntArray, IntArray]:
        """Return the order of rows by bucket, in which those of a bucket keep theirs, and where the next ones begin."""
        which = np.searchsorted(self.bounds[1:-1], numbers, side="right").astype(np.uint16)
        order = np.argsort(which, kind="stable")  # a radix sort
        return order, np.searchsorted(which[order], np.arange(1, len(self)))

    def put(self, cuts: IntArray, *columns: AnyArray) -> None:
        """Add rows that are in the order of their buckets; ``cuts`` are the first rows of all buckets but the first."""
        firsts, lasts = [0, *cuts.tolist()], [*cuts.tolist(), len(columns[0])]
        for spools, first, last in zip(self.columns, firsts, lasts, strict=True):
            if first < last:
                for spool, column in zip(spools, columns, strict=True):
                    spool.append(column[first:last])

    def put_sorted(self, numbers: AnyArray, *columns: AnyArray) -> None:
        """Add rows whose numbers rise."""
        self.put(np.searchsorted(numbers, self.bounds[1:-1]), *columns)

    def taken(self) -> Iterator[list[AnyArray]]:
        """Yield the columns of each bucket, and remove its files."""
        for spools in self.columns:
            columns = [spool[:] for spool in spools]
            for spool in spools:
                spool.remove()
            yield columns
