"""Writes one shard of Zarr v3's sharding codec: chunks that carry a crc32c, in C order, then their index.

The format leaves the order of chunks free. zarr-python writes them along a Morton curve, which scatters the chunks of
one time step over a shard that holds many steps: each would be a read of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from scidata.core.types import Array

_ABSENT = 2**64 - 1


def write_shard(
    path: str | os.PathLike[str], values: Array, *, chunk: Sequence[int], shard: Sequence[int]
) -> npt.NDArray[np.uint32]:
    """Write the file of one shard; return the crc32c of each chunk that has values, by its place in the shard.

    Parameters
    ----------
    path
        Folders on the way to it are made.
    values
        In the stored dtype, with at least one element; smaller than the shard where the array ends in it. Chunks that
        it ends in are filled up with zeros, chunks beyond are left out.
    chunk, shard
        Shapes; each of ``shard`` is a multiple of ``chunk``'s.
    """
    held = chunks_held(values.shape, chunk)
    sums = np.empty(math.prod(held), np.uint32)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as file:
        for i, corner in enumerate(np.ndindex(*held)):
            data = _filled_up(values, corner, chunk).reshape(-1).view(np.uint8).data
            sums[i] = crc32c(data)
            file.write(data)
            file.write(int(sums[i]).to_bytes(4, "little"))
        file.write(shard_index(values.shape, values.itemsize, chunk=chunk, shard=shard))
    return sums.reshape(held)


def chunks_held(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """Return how many chunks hold values of ``shape``, along each dim."""
    return tuple([-(-n // c) for n, c in zip(shape, chunk, strict=True)])


def shard_index(shape: Sequence[int], itemsize: int, *, chunk: Sequence[int], shard: Sequence[int]) -> bytes:
    """Return the index at the end of a shard that holds values of ``shape``: first byte and bytes of each chunk."""
    held, nbytes = chunks_held(shape, chunk), math.prod(chunk) * itemsize + 4
    index = np.full((*chunks_held(shard, chunk), 2), _ABSENT, "<u8")
    there = tuple(map(slice, held))
    index[..., 0][there] = np.arange(math.prod(held)).reshape(held) * nbytes
    index[..., 1][there] = nbytes
    table = index.tobytes()
    return table + crc32c(table).to_bytes(4, "little")


def _filled_up(values: Array, corner: Sequence[int], chunk: Sequence[int]) -> Array:
    """Return the values of a chunk, C-contiguous; zeros beyond the end of the array."""
    piece = np.ascontiguousarray(values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(corner, chunk, strict=True))])
    if piece.shape == tuple(chunk):
        return piece
    whole = np.zeros(chunk, values.dtype)
    whole[tuple(slice(0, n) for n in piece.shape)] = piece
    return whole
