"""Writes one shard of Zarr v3's sharding codec: chunks that carry a crc32c, in C order, then their index.

The format leaves the order of chunks free. zarr-python writes them along a Morton curve, which scatters the chunks of
one time step over a shard that holds many steps: each would be a read of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

__all__ = ["write_shard"]

_ABSENT = 2**64 - 1


def write_shard(
    path: str | os.PathLike[str],
    values: npt.NDArray[Any],
    *,
    chunk: Sequence[int],
    shard: Sequence[int],
) -> None:
    """Write the file of one shard.

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
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        at = 0
        for number, piece in _chunks(values, chunk, grid):
            data = piece.reshape(-1).view(np.uint8)
            index[number] = at, data.size + 4
            at += file.write(data.data) + file.write(_checksum(data))
        table = index.tobytes()
        file.write(table + _checksum(table))


def _checksum(data: Any) -> bytes:
    return crc32c(data).to_bytes(4, "little")


def _chunks(
    values: npt.NDArray[Any], chunk: Sequence[int], grid: Sequence[int]
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the number in the shard of each chunk that has values, and these, C-contiguous and filled up."""
    held = tuple(-(-n // c) for n, c in zip(values.shape, chunk, strict=True))
    for corner in np.ndindex(*held):
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(corner, chunk, strict=True))
        piece = np.ascontiguousarray(values[box])
        if piece.shape != tuple(chunk):
            whole = np.zeros(chunk, values.dtype)
            whole[tuple(slice(0, n) for n in piece.shape)] = piece
            piece = whole
        yield int(np.ravel_multi_index(corner, grid)), piece
