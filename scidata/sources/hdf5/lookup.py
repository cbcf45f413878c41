"""Where single chunks lie: HDF5 looks them up by the nodes on the way to them, where a list of all reads all nodes.

HDF5 does not tell what it finds without going through all chunks. But it reads a chunk in one piece, from the file that
it is given, and that can tell from where.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scidata.sources.access.retry import is_transient
from scidata.sources.hdf5.heaps import GuardedFile
from scidata.sources.hdf5.walk import DAMAGE

if TYPE_CHECKING:
    import h5py
    from _typeshed import WriteableBuffer


class AskedFile(GuardedFile):
    """A file that HDF5 reads metadata through; while it is asked for a place, it keeps places in place of reading."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._places: list[tuple[int, int]] | None = None

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill ``buffer`` as far as the file goes; while a place is asked for, leave it as it is."""
        if self._places is None:
            return super().readinto(buffer)
        view = memoryview(buffer).cast("B")
        view[:8] = bytes(len(view[:8]))  # HDF5 would refuse a node that begins so
        self._places.append((self._position, len(view)))
        self._position += len(view)
        return len(view)

    def places_of(self, dset: h5py.h5d.DatasetID, starts: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
        """Return offset, bytes and filter mask of the chunks that begin there, up to one that HDF5 does not find."""
        found: list[tuple[int, int, int]] = []
        for start in starts:
            places: list[tuple[int, int]] = []
            try:
                with contextlib.suppress(ValueError):  # no room for it: its nodes are read by then
                    dset.read_direct_chunk(start, out=bytearray())
                self._places = places
                mask, data = dset.read_direct_chunk(start)
            except (*DAMAGE, MemoryError) as e:
                if is_transient(e):
                    raise
                break
            finally:
                self._places = None
            if [nbytes for _, nbytes in places] != [len(data)]:
                break
            found.append((*places[0], mask))
        return found
