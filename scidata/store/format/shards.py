"""Writes one shard of Zarr v3's sharding codec: chunks that carry a crc32c, in C order, then their index.

The format leaves the order of chunks free. zarr-python writes them along a Morton curve, which scatters the chunks of
one time step over a shard that holds many steps: each would be a read of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

_ABSENT = 2**64 - 1


def write_shard(
    path: str | os.PathLike[str],
    values: npt.NDArray[np.generic],
    *,
    chunk: Sequence[int],
    shard: Sequence[int],
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
    grid = tuple(s // c for s, c in zip(shard, chunk, strict=True))
    index = np.full((math.prod(grid), 2), _ABSENT, "<u8")
    held = chunks_held(values.shape, chunk)
    sums = np.empty(math.prod(held), np.uint32)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as file:
        at = 0
        for i, (number, piece) in enumerate(_chunks(values, chunk, grid)):
            data = piece.reshape(-1).view(np.uint8)
            index[number] = at, data.size + 4
            sums[i] = crc32c(data.data)
            at += file.write(data.data) + file.write(int(sums[i]).to_bytes(4, "little"))
        table = index.tobytes()
        file.write(table + crc32c(table).to_bytes(4, "little"))
    return sums.reshape(held)


def chunks_held(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """Return how many chunks hold values of ``shape``, along each dim."""
    return tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def shard_index(shape: Sequence[int], itemsize: int, *, chunk: Sequence[int], shard: Sequence[int]) -> bytes:
    """Return the index that :func:`write_shard` writes at the end of a shard that holds values of ``shape``."""
    grid = chunks_held(shard, chunk)
    index = np.full((math.prod(grid), 2), _ABSENT, "<u8")
    corners = np.indices(chunks_held(shape, chunk)).reshape(len(grid), -1)
    nbytes = math.prod(chunk) * itemsize + 4
    index[np.ravel_multi_index(tuple(corners), grid), 0] = np.arange(corners.shape[1]) * nbytes
    index[np.ravel_multi_index(tuple(corners), grid), 1] = nbytes
    table = index.tobytes()
    return table + crc32c(table).to_bytes(4, "little")


def _chunks(
    values: npt.NDArray[np.generic], chunk: Sequence[int], grid: Sequence[int]
) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
    """Yield the number in the shard of each chunk that has values, and these, C-contiguous and filled up."""
    for corner in np.ndindex(*chunks_held(values.shape, chunk)):
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(corner, chunk, strict=True))
        piece = np.ascontiguousarray(values[box])
        if piece.shape != tuple(chunk):
            whole = np.zeros(chunk, values.dtype)
            whole[tuple(slice(0, n) for n in piece.shape)] = piece
            piece = whole
        yield int(np.ravel_multi_index(corner, grid)), piece
