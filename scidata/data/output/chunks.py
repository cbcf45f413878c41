"""Chunks of an output: those of a box, threads that encode them, and files of Zarr v3.

The files are byte for byte as zarr-python writes them, for a fraction of its time on each.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from scidata.plan.owners import Box, within

_MAX_THREADS = 8
Encode = Callable[[npt.NDArray[np.generic]], Any]


def chunks_of_box(box: Box, chunks: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Yield the chunks that a global box consists of: the number of each along each dimension, and its box in that."""
    numbers = [range(rows.start // chunk, -(-rows.stop // chunk)) for rows, chunk in zip(box, chunks, strict=True)]
    for index in itertools.product(*numbers):
        yield (
            index,
            within(
                tuple(
                    slice(i * chunk, min((i + 1) * chunk, rows.stop))
                    for i, chunk, rows in zip(index, chunks, box, strict=True)
                ),
                box,
            ),
        )


def filled(values: npt.NDArray[np.generic], shape: Sequence[int], fill: object) -> npt.NDArray[np.generic]:
    """Return a chunk of this shape in C order: at an array's end it is filled up."""
    if values.shape == tuple(shape):
        return np.ascontiguousarray(values)
    found = np.full(shape, fill, values.dtype)
    found[tuple(slice(size) for size in values.shape)] = values
    return found


def as_bytes(chunk: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """Return a chunk as the bytes that it consists of."""
    return chunk.reshape(-1).view(np.uint8)


def encoding_threads() -> ThreadPoolExecutor:
    """Return threads of this rank's share of the cores."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ThreadPoolExecutor(max(1, min(cores, _MAX_THREADS)), thread_name_prefix="scidata-encode")


def append(file: int, data: bytes | memoryview) -> None:
    """Write all of it to a file descriptor."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


# -- of Zarr ---------------------------------------------------------------------------------------------------------


class ChunkFiles:
    """The chunks of one array of Zarr v3, a file each: not in shards, and with a crc32c at the end.

    Parameters
    ----------
    folder
        Of the array.
    array
        The ``zarr.Array``.
    threads
        Those that encode and write.
    encode
        Encodes a chunk in C order, as the array's codecs do.
    """

    def __init__(self, folder: str, array: Any, threads: ThreadPoolExecutor, encode: Encode) -> None:
        self._folder, self._array, self._threads, self._encode = folder, array, threads, encode

    def write(self, box: Box, values: npt.NDArray[np.generic]) -> None:
        """Write a box of the array, of whole chunks."""
        chunks: tuple[int, ...] = self._array.chunks

        def put(index: tuple[int, ...], at: Box) -> None:
            chunk = filled(values[at], chunks, self._array.fill_value)
            body = memoryview(self._encode(chunk)).cast("B")
            path = os.path.join(self._folder, self._array.metadata.encode_chunk_key(index))
            _write_file(path, body, crc32c(body).to_bytes(4, "little"))

        for _ in self._threads.map(lambda each: put(*each), chunks_of_box(box, chunks)):
            pass


def _write_file(path: str, *parts: bytes | memoryview) -> None:
    """Write a file whole or not at all, under the name meanwhile that zarr-python would give it."""
    partial = f"{path}.{uuid.uuid4().hex}.partial"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(partial, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(partial, flags, 0o666)
    try:
        try:
            for part in parts:
                append(file, part)
        finally:
            os.close(file)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
