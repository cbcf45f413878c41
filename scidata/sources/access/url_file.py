"""A file, or an object behind a URL, as HDF5 and zipfile read one: here and there."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import threading
from collections.abc import Iterator
from typing import Any

from scidata.core.cache import Cache
from scidata.sources.access.files import files
from scidata.sources.access.first_reads import FIRST_BYTES, read_head

_paused = 0  # reads under way, of all threads
_lock = threading.Lock()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile.

    HDF5 reads while h5py holds its lock, which the end of any of its objects wants, too. A collection on the thread
    that brings the bytes may end some, and would wait for this read, which waits for that thread.
    """
    global _paused  # noqa: PLW0603  # Python's collection is one for all threads, too
    with _lock:
        ours = _paused > 0 or gc.isenabled()
        if ours:
            _paused += 1
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            if ours:
                _paused -= 1
                if not _paused:
                    gc.enable()


_BLOCK = FIRST_BYTES
_MAX_BLOCKS = 32


class BeforeFileError(OSError):
    """A position before the begin of a file, to which a damaged zip archive leads."""


class UrlFile(io.RawIOBase):
    """A file or object that a library reads here and there, as HDF5 reads metadata: by blocks, the last ones kept."""

    def __init__(self, url: str) -> None:
        head = read_head(url, FIRST_BYTES)
        self._path, self._size, self._position = url, head.size, 0
        self._blocks: Cache[bytes] = Cache(_MAX_BLOCKS, "lru")
        self._blocks.put(0, head.data)

    def __repr__(self) -> str:  # HDF5 takes it for the name
        return f"<{self._path}>"

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position."""
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if position < 0:
            raise BeforeFileError(errno.EINVAL, "a place before the file")  # as of files, which zipfile expects
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as the object goes."""
        view = memoryview(buffer).cast("B")
        begin, end = self._position, min(self._position + len(view), self._size)
        if begin >= end:
            return 0
        at = begin % _BLOCK
        held = self._blocks.get(begin // _BLOCK) if at + end - begin <= _BLOCK else None
        if held is not None:  # nearly always: no other thread brings bytes
            view[: end - begin] = held[at : at + end - begin]
        else:
            with _no_collection():
                self._fill(view, begin, end)
        self._position = end
        return end - begin

    def _fill(self, view: memoryview, begin: int, end: int) -> None:
        first, last = begin // _BLOCK, (end - 1) // _BLOCK
        if last - first >= _MAX_BLOCKS // 2:  # values, not metadata
            files().read_into(self._path, begin, [view[: end - begin]])
        else:
            data = b"".join(self._get(first, last + 1))
            view[: end - begin] = data[begin - first * _BLOCK : end - first * _BLOCK]

    def _get(self, first: int, stop: int) -> list[bytes]:
        found = {i: block for i in range(first, stop) if (block := self._blocks.get(i)) is not None}
        missing = [i for i in range(first, stop) if i not in found]
        if missing:
            begin, end = missing[0] * _BLOCK, min((missing[-1] + 1) * _BLOCK, self._size)
            data = bytes(files().read(self._path, begin, end - begin))
            found |= {
                i: data[i * _BLOCK - begin : (i + 1) * _BLOCK - begin] for i in range(missing[0], missing[-1] + 1)
            }
        for i, block in found.items():
            self._blocks.put(i, block)
        return [found[i] for i in range(first, stop)]
