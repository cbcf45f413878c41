"""Chunks of an output: those of a box, threads that encode them, and a file for each.

Files of Zarr are byte for byte as zarr-python writes them, for a fraction of its time on each.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeAlias

from scidata.core.types import Array
from scidata.plan.owners import Box, within
from scidata.store.format.arrays import filled_up

_MAX_THREADS = 8
Piece: TypeAlias = bytes | memoryview


def _chunks_of_box(box: Box, chunks: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Yield the chunks that a global box consists of: the number of each along each dimension, and its box in that."""
    numbers = [range(rows.start // chunk, -(-rows.stop // chunk)) for rows, chunk in zip(box, chunks, strict=True)]
    for index in itertools.product(*numbers):
        each = zip(index, chunks, box, strict=True)
        yield index, within(tuple(slice(i * chunk, min((i + 1) * chunk, rows.stop)) for i, chunk, rows in each), box)


def encoding_threads() -> ThreadPoolExecutor:
    """Return threads of this rank's share of the cores."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ThreadPoolExecutor(max(1, min(cores, _MAX_THREADS)), thread_name_prefix="scidata-encode")


class ChunkFiles:
    """The encoded chunks of one array, a file each.

    - ``folder``: of the array.
    - ``threads``: those that encode and write.
    - ``chunks``, ``fill``: size of a chunk, and the value that fills up those at the array's end.
    - ``name_of``: returns the name of a chunk's file, by the chunk's number along each dimension.
    - ``encode``: encodes a chunk in C order; returns the content of its file, in pieces.
    """

    def __init__(
        self, folder: str, threads: ThreadPoolExecutor, *, chunks: tuple[int, ...], fill: object,
        name_of: Callable[[tuple[int, ...]], str], encode: Callable[[Array], Sequence[Piece]],
    ) -> None:  # fmt: skip
        self._folder, self._threads, self._chunks, self._fill = folder, threads, chunks, fill
        self._name_of, self._encode = name_of, encode

    def write(self, box: Box, values: Array) -> None:
        """Write a box of the array, of whole chunks."""

        def put(chunk: tuple[tuple[int, ...], Box]) -> None:
            index, at = chunk
            pieces = self._encode(filled_up(values[at], self._chunks, self._fill))
            _write_file(os.path.join(self._folder, self._name_of(index)), *pieces)

        for _ in self._threads.map(put, _chunks_of_box(box, self._chunks)):
            pass


def _write_file(path: str, *parts: Piece) -> None:
    """Write a file whole or not at all, under the name meanwhile that zarr-python would give it."""
    partial = f"{path}.{uuid.uuid4().hex}.partial"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        file = os.open(partial, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(partial, flags, 0o666)
    try:
        with open(file, "wb", buffering=0) as opened:
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[opened.write(left) :]
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
