"""The bytes that HDF5 reads to describe a file, block by block: other files that have the same need no HDF5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import h5py
import numpy as np

from scidata.core.types import ArrayLayout
from scidata.sources.access.files import files
from scidata.sources.hdf5.heaps import GuardedFile
from scidata.sources.hdf5.layout import Contents, leaf_of_chunks
from scidata.sources.hdf5.walk import heeds_locks, walk
from scidata.sources.twins import At, Block, Metadata, has_checksum

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: Where blocks name a B-tree's root, or a list of free space, which HDF5 does not need for reading, and headers of
#: objects the times at which they were made and changed. Others that it has not followed must be the same.
_UNUSED = {b"BTHD": slice(16, 24), b"FRHP": slice(38, 46), b"FSHD": slice(54, 62), b"OHDR": slice(6, 22)}
_HAS_TIMES = 0x20
_IN_HEAP = range(13, 22)  # where a block of a heap may have its checksum


class _RecordedFile(GuardedFile):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.size = self._size
        self.reads: list[tuple[int, int]] = []

    def readinto(self, buffer: WriteableBuffer) -> int:
        begin, count = self._position, super().readinto(buffer)
        self.reads.append((begin, count))
        return count

    def blocks(self, reads: Sequence[tuple[int, int]], objects: set[int]) -> list[Block]:
        """Return the blocks that were read, without what lies behind them; ``objects``: addresses of their headers."""
        nbytes: dict[int, int] = {}
        for begin, count in reads:
            nbytes[begin] = max(nbytes.get(begin, 0), count)
        found, rests = list[Block](), set[int]()
        for begin, count in nbytes.items():
            if begin not in rests:
                length = _length(self.at(begin, count), begin, begin in objects)
                found.append(_block(begin, self.at(begin, length)))
                if length > count:
                    rests.add(begin + count)
        return found


def _length(data: bytes, address: int, is_object: bool) -> int:
    """Return the bytes of the block that begins with what was read; of most kinds it is all that was read."""
    if data[:4] == b"OHDR":
        flags = data[5]
        at, width = 6 + 16 * bool(flags & _HAS_TIMES) + 4 * bool(flags & 0x10), 1 << (flags & 3)
        return at + width + int.from_bytes(data[at : at + width], "little") + 4
    if is_object:
        return 16 + int.from_bytes(data[8:12], "little")
    if data[:4] == b"HEAP":  # its names may be elsewhere
        follows = int.from_bytes(data[24:32], "little") == address + 32
        return 32 + int.from_bytes(data[8:16], "little") * follows
    return int.from_bytes(data[8:16], "little") if data[:4] == b"GCOL" else len(data)


def _block(address: int, data: bytes) -> Block:
    unused = _UNUSED.get(data[:4], slice(0))
    if data[:4] == b"OHDR" and not data[5] & _HAS_TIMES:
        unused = slice(0)
    places = (len(data) - 4, *_IN_HEAP)
    checksum = next((at for at in places if 0 < at <= len(data) - 4 and has_checksum(data, at)), None)
    return Block(address, data, unused, checksum)


@dataclass(frozen=True, kw_only=True)
class HDF5Metadata(Metadata):
    """Those of an HDF5 file, in which ``contents`` were found; ``alone`` are arrays of one chunk without an index."""

    contents: Contents
    alone: frozenset[str]

    def may_be_read(self, path: str) -> bool:
        """Return True if no program holds the lock of a file."""
        return not heeds_locks() or not files().is_locked(path)

    def numbers(self, name: str, address: int, at: At) -> Sequence[int] | None:
        """Return the address; of a coordinate in chunks, their places, which are in one node."""
        layout = self.contents.arrays[name]
        if name in self.alone:  # values may look like an index
            return None if layout.dims == (name,) else []
        if not self.contents.storage[name].chunked or layout.dims != (name,) or layout.fallback:
            return [address]
        index = leaf_of_chunks(at, address, layout)
        return None if index is None else index.as_numbers()

    def pieces(self, layout: ArrayLayout, numbers: Sequence[int]) -> Sequence[tuple[int, int]] | None:
        """Return place and bytes of each chunk of a coordinate; None if one is missing, or was stored otherwise."""
        if layout.fallback:
            return None
        if not self.contents.storage[layout.name].chunked:
            return [(numbers[0], layout.nbytes)] if numbers[0] >= 0 else []
        _, offsets, nbytes, masks = np.array(numbers, np.int64).reshape(4, -1).tolist()
        is_whole = len(offsets) in (0, *layout.num_chunks) and not any(masks)
        return list(zip(offsets, nbytes, strict=True)) if is_whole else None


def metadata_of(path: str, describe: Callable[[h5py.File], Contents]) -> HDF5Metadata | None:
    """Describe a file once more, and return what HDF5 reads for that; None if values are of other data sets."""
    file = _RecordedFile(path)
    with h5py.File(file, "r") as h5:
        found = describe(h5)
        reads, addresses, objects, alone = list(file.reads), dict[str, int](), set[int](), set[str]()
        names = {stored.path: name for name, stored in found.storage.items()}
        for path_in_file, node, _ in [("", h5, False), *walk(h5, allow_external=False, skipped={})]:
            objects.add(h5py.h5g.get_objinfo(node.id).objno[0])  # h5o.get_info goes through all chunks
            if not isinstance(node, h5py.Dataset):
                continue
            if node.is_virtual or node.external:
                return None
            begin, name = len(file.reads), names.get(path_in_file, f"/{path_in_file}")
            address = _address_of_values(node.id, file)
            if address is not None:
                addresses[name] = address
            if node.chunks and len(file.reads) == begin:
                alone.add(name)
    blocks = file.blocks(reads, objects)
    return HDF5Metadata(blocks=blocks, size=file.size, addresses=addresses, contents=found, alone=frozenset(alone))


def _address_of_values(dset: h5py.h5d.DatasetID, file: _RecordedFile) -> int | None:
    """Return the address of a data set's values, or of the index of its chunks; None if it has none."""
    if dset.get_create_plist().get_layout() != h5py.h5d.CHUNKED:
        return dset.get_offset() if dset.get_storage_size() else None
    begin = len(file.reads)
    only = dset.get_chunk_info_by_coord((0,) * dset.rank).byte_offset
    return file.reads[begin][0] if len(file.reads) > begin else only
