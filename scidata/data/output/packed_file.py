"""One NetCDF-4 or HDF5 file of compressed chunks: ranks compress theirs, and the file is put together at the end.

How long a compressed chunk is nobody knows beforehand, so ranks cannot write it where it belongs, and HDF5 lets one
process alone add to a file. So each rank appends its chunks, as HDF5 has them, to a file of its own beside the output,
and notes where each lies; at the end the first rank copies them into the file, in the order of the arrays, without
compressing anything again. The file is the same, byte for byte, for any number of ranks and any order of steps, and
until then a run that is killed loses nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from scidata.data.output.chunks import append, chunks_of_box, encoding_threads, filled
from scidata.data.output.fields import OutputField, OutputLayout
from scidata.data.output.flat_output import FlatOutput
from scidata.data.output.places import LocalPlace, whole_steps
from scidata.errors import CorruptDataError
from scidata.plan.owners import Box

LEVEL = 1  # of zlib: of noisy float32 behind a byte shuffle 4 and 6 save nothing and take 1.2 and 1.5 times the CPU
_ENTRY = np.dtype([("field", "<u4"), ("step", "<u8"), ("chunk", "<u8"), ("offset", "<u8"), ("size", "<u8")])


class PackedFileOutput(FlatOutput):
    """A file of compressed chunks that is being written. Parameters as those of :class:`FlatOutput`."""

    def __init__(self, place: LocalPlace, layout: OutputLayout, *, kind: str) -> None:
        super().__init__(place, layout, kind=kind, zlib_level=LEVEL)
        self._numbers = {name: i for i, name in enumerate(layout.fields)}
        self._index, self._end = -1, 0
        self._threads: ThreadPoolExecutor | None = None

    def open(self, run: str) -> None:
        """Make the files that this rank appends to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._file = os.open(self._place.beside(f"chunks-{run}.bin"), flags, 0o666)
        self._index = os.open(self._place.beside(f"chunks-{run}.index"), flags, 0o666)
        self._threads = encoding_threads()

    def write(self, each: OutputField, step: int, box: Box, values: npt.NDArray[np.generic]) -> None:
        """Write a global box, of whole chunks, of some steps from ``step`` on: ``(steps, …)``, as stored."""
        assert self._threads is not None
        chunks = [max(1, size) for size in each.chunks]
        counts = [-(-size // chunk) for size, chunk in zip(each.shape, chunks, strict=True)]
        found = list(chunks_of_box(box, chunks))
        places = [int(np.ravel_multi_index(index, counts)) if index else 0 for index, _ in found]
        shape = (self._layout.step_chunk, *chunks)
        for place, packed in zip(
            places, self._threads.map(lambda each: _pack(values[:, *each[1]], shape), found), strict=True
        ):
            entry = np.array([(self._numbers[each.name], step, place, self._end, len(packed))], _ENTRY)
            append(self._file, packed)
            append(self._index, entry.tobytes())  # after what it speaks of
            self._end += len(packed)

    def finish(self) -> None:
        """Put the file together. For one process, when all have ended."""
        import h5py

        target, whole = self._place.target, self._place.beside("whole")
        shutil.copyfile(target, whole)  # a run that is killed from here on still has what it was made of
        chunks = self._written()
        with h5py.File(whole, "r+") as file, contextlib.ExitStack() as opened:
            files: dict[str, int] = {}
            for name, each in self._layout.fields.items():
                array = file[name].id
                for at, step, chunk in self._chunks_of(each):
                    try:
                        path, offset, size = chunks[self._numbers[name], step, chunk]
                    except KeyError:
                        raise CorruptDataError(
                            f"{self._place.path}: field {name!r} of step {step} has a chunk that no rank has written; "
                            "begin again with overwrite=True"
                        ) from None
                    if path not in files:
                        files[path] = os.open(path, os.O_RDONLY)
                        opened.callback(os.close, files[path])
                    packed = os.pread(files[path], size, offset)
                    if len(packed) != size:
                        raise CorruptDataError(f"{path}: is shorter than its index says")
                    array.write_direct_chunk(at, packed)
        os.replace(whole, target)

    def _chunks_of(self, each: OutputField) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yield where each chunk of a field begins, its first step, and its number among those of a step."""
        layout = self._layout
        *outer, along = layout.step_dims.values()
        if not np.prod(each.shape, dtype=np.int64):
            return
        starts = [range(0, size, max(1, chunk)) for size, chunk in zip(each.shape, each.chunks, strict=True)]
        for *before, row in itertools.product(*map(range, outer), range(0, along, layout.step_chunk)):
            step = int(np.ravel_multi_index([*before, row], tuple(layout.step_dims.values())))
            for number, at in enumerate(itertools.product(*starts)):
                yield (*before, row, *at), step, number

    def _written(self) -> dict[tuple[int, int, int], tuple[str, int, int]]:
        """Return the file, offset and size of each chunk of the steps that all ranks of a domain have written."""
        found: dict[tuple[int, int, int], tuple[str, int, int]] = {}
        for domain, steps in whole_steps(self._place).items():
            for path in self._place.all_beside(f"chunks-{domain}-", ".index"):
                with open(path, "rb") as file:
                    data = file.read()
                entries = np.frombuffer(data[: len(data) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)
                binary = path.removesuffix(".index") + ".bin"
                for field, step, chunk, offset, size in entries.tolist():
                    if step in steps:
                        found[field, step, chunk] = binary, offset, size
        return found

    def close(self) -> None:
        """Close all files."""
        super().close()
        if self._index >= 0:
            os.close(self._index)
            self._index = -1
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _pack(values: npt.NDArray[np.generic], shape: tuple[int, ...]) -> bytes:
    """Return a chunk as HDF5's filters ``shuffle`` and ``deflate`` leave it; at the array's end it is filled up."""
    raw = filled(values, shape, 0).reshape(-1).view(np.uint8)
    return zlib.compress(raw.reshape(-1, values.dtype.itemsize).T.tobytes(), LEVEL)
