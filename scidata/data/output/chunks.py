"""Chunks of an output: the chunks of a box, padding at an array's end, and threads that encode them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from scidata.plan.owners import Box, within

_MAX_THREADS = 8


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


def encoding_threads() -> ThreadPoolExecutor:
    """Return threads of this rank's share of the cores."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ThreadPoolExecutor(max(1, min(cores, _MAX_THREADS)), thread_name_prefix="scidata-encode")


def append(file: int, data: bytes | memoryview) -> None:
    """Write all of it to a file descriptor."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
