"""A file as HDF5 reads it, whose global heaps are looked at first.

Attributes of variable length (text, and the references of dimension scales) lie in global heaps. HDF5 goes through a
heap by the sizes of its objects, and never comes to the end of one in which a size is 0 or wraps around (measured with
HDF5 2.0: one in 1,500 to 3,000 files with one to three damaged places); no signal interrupts it then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scidata.errors import CorruptDataError
from scidata.sources.access.url_file import UrlFile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_SIGNATURE = b"GCOL\x01\0\0\0"  # with version 1, the only one, and reserved bytes
_HEADER = 16  # of the heap, and of each object in it; of files whose lengths have 8 bytes, as all have in practice
_MAX_METADATA = 1 << 20  # of one read; a heap begins in a small one, and values need no search


class GuardedFile(UrlFile):
    """A local file or URL; a read that meets a damaged heap fails."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._seen: set[int] = set()

    def __repr__(self) -> str:  # HDF5 takes it for the name, which messages show
        return str(self._path)

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill ``buffer`` as far as the file goes; raises CorruptDataError at a heap that HDF5 cannot go through."""
        begin, count = self._position, super().readinto(buffer)
        if count <= _MAX_METADATA:
            data = bytes(memoryview(buffer).cast("B")[:count])
            at = data.find(_SIGNATURE)
            while at >= 0:
                self._check(begin + at)
                at = data.find(_SIGNATURE, at + 1)
        return count

    def _check(self, address: int) -> None:
        if address in self._seen or address + _HEADER > self._size:
            return
        self._seen.add(address)
        size = int.from_bytes(self.at(address + 8, 8), "little")
        if address + size > self._size:
            return  # HDF5 says so itself
        place = _HEADER
        while place + _HEADER <= size:
            head = self.at(address + place, _HEADER)
            nbytes = int.from_bytes(head[8:], "little")
            # object 0 is the free space, its own header included; others are padded to 8 bytes
            step = _HEADER + -(-nbytes // 8) * 8 if head[:2] != b"\0\0" else nbytes
            if step < _HEADER or place + step > size:
                raise CorruptDataError(
                    f"{self._path}: the global heap at byte {address} has an object of {nbytes} bytes at byte "
                    f"{address + place}, which does not fit its {size} bytes; the "
                    "file is damaged: copy or write it again"
                )
            place += step

    def at(self, offset: int, nbytes: int) -> bytes:
        """Return bytes through the blocks that are held, where HDF5 reads too."""
        here, data = self._position, bytearray(nbytes)
        self._position = offset
        super().readinto(data)
        self._position = here
        return bytes(data)
