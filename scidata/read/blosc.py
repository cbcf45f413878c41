"""Blosc 1 chunks: check the header, decode a whole chunk or some of its blocks.

A Blosc 1 chunk is a 16-byte header, a table with the start of each block (little-endian int32, from the first byte of
the chunk) and blocks that were compressed one by one. Some blocks alone are decoded by writing a smaller table and a
smaller decoded size over the old ones and giving the result to c-blosc: block starts may point anywhere in the buffer,
so no compressed byte moves. The format: https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numcodecs import blosc

from scidata.errors import CorruptDataError

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: The reader provides threads, one per chunk. zarr-python does the same; blosc's own pool would take a global lock.
blosc.use_threads = False

_HEADER = struct.Struct("<BBBBIII")
HEADER_NBYTES = _HEADER.size
_MEMCPYED = 0x2
_SHUFFLE, _DONT_SPLIT = 0x1, 0x10

_MERGED_GAP = 16 << 10  # copying this much costs less than another read


def _library() -> Callable[[int, int, int, int], int] | None:
    """Return ``blosc_decompress_ctx(source, dest, dest_size, num_threads)`` of the c-blosc inside numcodecs.

    Its Python wrapper costs about as much as decoding a few kilobytes; None if a build hides the function.
    """
    try:
        function: Any = ctypes.CDLL(blosc.__file__).blosc_decompress_ctx
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


_decompress_ctx = _library()


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """A chunk's checked header: sizes in bytes; ``stored`` if the blocks follow uncompressed."""

    nbytes: int
    blocksize: int
    stored: bool

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last one may be short."""
        return -(-self.nbytes // self.blocksize)


def read_header(data: Bytes, nbytes: int | None, *, encoded: int | None = None) -> ChunkHeader:
    """Parse the header at the start of ``data`` and check it against the size in the metadata.

    ``data``: the chunk, or its first bytes.
    ``nbytes``: decoded bytes, if that is known.
    ``encoded``: bytes of the whole chunk; default all of ``data``.
    Raises CorruptDataError: the header contradicts ``nbytes`` or ``encoded``.
    """
    return ChunkHeader(*_checked(data.data, 0, data.size, nbytes, encoded))


def _checked(
    view: memoryview, begin: int, available: int, nbytes: int | None, encoded: int | None
) -> tuple[int, int, bool]:
    """Parse and check the header at ``begin``: decoded bytes, block size, and whether blocks are uncompressed."""
    if available < _HEADER.size:
        raise CorruptDataError(f"{available} bytes are too few for a Blosc header of {_HEADER.size}")
    size = available if encoded is None else encoded
    version, _, flags, typesize, declared, blocksize, declared_size = _HEADER.unpack_from(view, begin)
    if version != 2 or typesize == 0:
        raise CorruptDataError(f"not a Blosc 1 chunk: format version {version}, type size {typesize}")
    if declared_size != size:
        raise CorruptDataError(f"its Blosc header says {declared_size} encoded bytes, but it has {size}")
    if nbytes is not None and declared != nbytes:
        raise CorruptDataError(f"its Blosc header says {declared} decoded bytes, but {nbytes} were expected")
    stored = bool(flags & _MEMCPYED)
    if declared and (blocksize == 0 or blocksize > declared):
        raise CorruptDataError(f"its Blosc header says blocks of {blocksize} bytes in {declared}")
    if stored and size != declared + _HEADER.size:
        raise CorruptDataError(f"its Blosc header says {declared} stored bytes in {size}")
    if not stored and declared and _HEADER.size + 4 * -(-declared // blocksize) > size:
        raise CorruptDataError("its Blosc block table is longer than the chunk")
    return declared, max(blocksize, 1), stored


def address(data: Bytes) -> int:
    """Return a buffer's address; ``data.ctypes.data`` takes five times as long."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(data.data))
    except (TypeError, ValueError):  # read-only, or empty
        return int(data.ctypes.data)


class Decoder:
    """Decodes whole small chunks from one buffer into another without creating objects per chunk.

    Both buffers must live as long as it does.
    """

    def __init__(self, data: Bytes, dest: Bytes) -> None:
        self._data, self._dest, self._view = data, dest, data.data
        self._from, self._to = address(data), address(dest)

    def decode(self, begin: int, end: int, to: int, nbytes: int) -> None:
        """Decode the chunk in bytes ``[begin, end)`` to the ``nbytes`` bytes from ``to`` on."""
        if not 0 <= begin <= end <= self._data.size or to < 0 or to + nbytes > self._dest.size:
            raise CorruptDataError(f"bytes {begin} to {end} of {self._data.size} make no sense")
        _checked(self._view, begin, end - begin, nbytes, None)
        if _decompress_ctx is None:
            _decompress(self._data[begin:end], self._dest[to : to + nbytes])
            return
        found = _decompress_ctx(self._from + begin, self._to + to, nbytes, 1) if nbytes else 0
        if found != nbytes:
            raise CorruptDataError(f"Blosc cannot decode it (error {found})")


def _decompress(data: Bytes, dest: Bytes) -> None:
    """Decode ``data``, whose header was checked, into all of ``dest``. c-blosc takes the size from the header."""
    if _decompress_ctx is not None:
        found = _decompress_ctx(address(data), address(dest), dest.size, 1)
        if found != dest.size:
            raise CorruptDataError(f"Blosc cannot decode it (error {found})")
        return
    try:
        blosc.decompress(data, dest)
    except (RuntimeError, ValueError) as e:
        raise CorruptDataError(f"Blosc cannot decode it ({e})") from e


def decode(data: Bytes, dest: Bytes) -> None:
    """Decode a whole chunk into ``dest``, which has the decoded size."""
    read_header(data, dest.size)
    if dest.size:
        _decompress(data, dest)


def table_nbytes(header: ChunkHeader) -> int:
    """Return the bytes of header and block table, which precede the blocks."""
    return _HEADER.size + (0 if header.stored else 4 * header.num_blocks)


def add_neighbour(needed: npt.NDArray[np.bool_], header: ChunkHeader) -> None:
    """Also mark the block before a needed short last block: c-blosc refuses a chunk of one short block."""
    if header.num_blocks > 1 and header.nbytes % header.blocksize:
        needed[-2] |= needed[-1]


def block_ranges(data: Bytes, header: ChunkHeader, needed: npt.NDArray[np.bool_], encoded: int) -> list[list[int]]:
    """Return the byte ranges ``[first byte, end]`` of the ``needed`` blocks in the chunk, ascending.

    Ranges that lie close are one. ``data`` holds at least :func:`table_nbytes` of the chunk of ``encoded`` bytes.
    """
    blocks = np.flatnonzero(needed)
    if header.stored:
        starts = _HEADER.size + blocks * header.blocksize
        stops = np.minimum(starts + header.blocksize, encoded)
    else:
        table = data[_HEADER.size : table_nbytes(header)].view("<i4").astype(np.int64)
        if table.min() < table_nbytes(header) or table.max() >= encoded:
            raise CorruptDataError("its Blosc block table points out of the chunk")
        ends = np.append(np.sort(table), encoded)  # blocks are in any order: threads wrote them as they finished
        starts = np.sort(table[blocks])
        stops = ends[np.searchsorted(ends, starts, side="right")]
    ranges = [[int(starts[0]), int(stops[0])]]
    for start, stop in zip(starts[1:].tolist(), stops[1:].tolist(), strict=True):
        if start - ranges[-1][1] <= _MERGED_GAP:
            ranges[-1][1] = stop
        else:
            ranges.append([start, stop])
    return ranges


def decode_blocks(data: Bytes, header: ChunkHeader, needed: npt.NDArray[np.bool_], dest: Bytes) -> int:
    """Decode the ``needed`` blocks into place in ``dest``; leave the rest of ``dest`` unchanged.

    Returns the bytes decoded.

    ``data``: the encoded chunk, writable: its header and block table are overwritten. Only they and the bytes of the
    blocks needed are looked at.
    ``header``: from :func:`read_header` of the same chunk.
    ``needed``: ``(num_blocks,)`` bool, after :func:`add_neighbour`.
    ``dest``: room for the whole decoded chunk.
    """
    edges = np.flatnonzero(np.diff(needed, prepend=False, append=False)).tolist()
    decoded = 0
    table = data[_HEADER.size : table_nbytes(header)].copy()
    for first, stop in zip(edges[::2], edges[1::2], strict=True):
        begin, end = first * header.blocksize, min(stop * header.blocksize, header.nbytes)
        if header.stored:
            dest[begin:end] = data[_HEADER.size + begin : _HEADER.size + end]
        else:
            # Rewriting in place is safe for the next run of blocks too: compressed blocks follow the table.
            struct.pack_into("<I", data.data, 4, end - begin)
            data[_HEADER.size : _HEADER.size + 4 * (stop - first)] = table[4 * first : 4 * stop]
            _decompress(data, dest[begin:end])
        decoded += end - begin
    return decoded


#: Larger shuffled chunks would exceed c-blosc's largest block.
_MAX_UNSHUFFLE = 1 << 28


def unshuffle(framed: Bytes, itemsize: int, dest: Bytes) -> None:
    """Undo the byte shuffle of HDF5 and numcodecs with c-blosc's vector code, without the GIL.

    ``framed`` holds :data:`FRAME` spare bytes and then the shuffled bytes. Those bytes are framed as a Blosc chunk of
    one block that did not compress, so decoding is the unshuffle alone: 4 GB/s, against 1.2 of numcodecs' shuffle
    which also keeps the GIL (measured on 1 MiB).
    """
    size = dest.size
    if itemsize == 1 or size < itemsize:
        dest[:] = framed[FRAME:]
        return
    if itemsize > 255 or size > _MAX_UNSHUFFLE:
        whole = size // itemsize * itemsize
        dest[:whole].reshape(-1, itemsize)[...] = framed[FRAME : FRAME + whole].reshape(itemsize, -1).T
        dest[whole:] = framed[FRAME + whole :]
        return
    _HEADER.pack_into(framed.data, 0, 2, 1, _SHUFFLE | _DONT_SPLIT, itemsize, size, size, size + FRAME)
    struct.pack_into("<Ii", framed.data, _HEADER.size, FRAME - 4, size)
    _decompress(framed, dest)


#: Bytes of header, one-entry block table and block length before the shuffled bytes.
FRAME = _HEADER.size + 8
