"""Shard indexes of Zarr v3's sharding codec."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c

from scidata.core.types import IntArray
from scidata.errors import ChecksumError, ShortReadError
from scidata.sources.access.files import files
from scidata.sources.access.first_reads import read_begin, read_tail

_ABSENT = np.uint64(2**64 - 1)


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """How the index of a shard lies in its file: ``num_chunks`` pairs of (offset, nbytes), uint64, C order."""

    num_chunks: int
    at_end: bool
    endian: str
    checksum: bool

    @property
    def nbytes(self) -> int:
        """Encoded size."""
        return 16 * self.num_chunks + 4 * self.checksum


def read_index(path: str, size: int, index: ShardIndex, begin: int = 0) -> IntArray:
    """Read and check the index of one shard.

    - ``size``: bytes of the file, or of the part of it that is the shard.

    Returns ``(num_chunks, 2)``: offset in the shard and encoded size of each chunk; -1 where it is absent. Raises
    ShortReadError: the file is shorter than the index, or than the ranges that it names; ChecksumError: the index does
    not match its crc32c.
    """
    _check_room(path, size, index)  # before anything of that size is allocated
    raw = files().read(path, begin + (size - index.nbytes if index.at_end else 0), index.nbytes)
    return parse_index(path, raw, size, index)


def first_index(path: str, index: ShardIndex) -> tuple[int, IntArray]:
    """Read a shard's index, as :func:`read_index`, of an object whose size is unknown; return the size, too."""
    raw, size = (read_tail if index.at_end else read_begin)(path, index.nbytes)
    return size, parse_index(path, raw, size, index)


def parse_index(path: str, raw: bytes | bytearray, size: int, index: ShardIndex) -> IntArray:
    """Check the index of a shard of ``size`` bytes; return it as :func:`read_index` does."""
    _check_room(path, size, index)
    if index.checksum:
        (expected,) = struct.unpack("<I", raw[-4:])
        found = crc32c(raw[:-4])
        if found != expected:
            raise ChecksumError(
                f"{path}: shard index has crc32c {found:#010x}, but {expected:#010x} is stored with it; "
                "the file is truncated or damaged: copy or write it again"
            )
    table = np.frombuffer(raw, np.dtype(f"{index.endian}u8"), 2 * index.num_chunks)
    offset, nbytes = table.astype(np.uint64).reshape(-1, 2).T
    absent = (offset == _ABSENT) & (nbytes == _ABSENT)
    limit = np.uint64(size)
    beyond = ~absent & ((offset > limit) | (nbytes > limit - offset))  # no sum: it could wrap to a small number
    if beyond.any():
        chunk = int(np.flatnonzero(beyond)[0])
        raise ShortReadError(
            f"{path}: chunk {chunk} of the shard should lie at byte {offset[chunk]} with {nbytes[chunk]} bytes, but "
            f"the file has {size}; it is truncated or damaged: copy or write it again"
        )
    out = np.empty((index.num_chunks, 2), np.int64)
    out[:, 0] = np.where(absent, np.uint64(0), offset)
    out[:, 1] = np.where(absent, np.uint64(0), nbytes)
    out[absent] = -1
    return out


def _check_room(path: str, size: int, index: ShardIndex) -> None:
    if size < index.nbytes:
        raise ShortReadError(
            f"{path}: shard has {size} bytes, but its index of {index.num_chunks} chunks alone takes {index.nbytes}; "
            "the file is truncated: copy or write it again"
        )
