"""One NetCDF-4 or HDF5 file of compressed chunks: ranks compress their chunks, and the file is assembled at the end.

The size of a compressed chunk is unknown beforehand, so ranks cannot write it in place, and HDF5 lets only one process
append to a file. So each rank writes its chunks, encoded for HDF5, to separate files beside the output; at the end the
first rank copies them into the file, in the order of the arrays, without compressing them again. The file is the same,
byte for byte, for any number of ranks and any order of steps, and a run that is killed before the end loses nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from scidata.core.types import Array
from scidata.data.output.chunks import ChunkFiles, encoding_threads
from scidata.data.output.fields import OutputField, OutputLayout
from scidata.data.output.flat_output import FlatOutput
from scidata.data.output.places import LocalPlace, begun_at
from scidata.errors import CorruptDataError
from scidata.plan.owners import Box

LEVEL = 1  # of zlib: of noisy float32 behind a byte shuffle 4 and 6 save nothing and take 1.2 and 1.5 times the CPU


class PackedFileOutput(FlatOutput):
    """A file of compressed chunks under construction. Parameters are those of :class:`FlatOutput`."""

    def __init__(self, place: LocalPlace, layout: OutputLayout, *, kind: str) -> None:
        super().__init__(place, layout, kind=kind, zlib_level=LEVEL)
        self._files: dict[str, ChunkFiles] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._whole = ""

    def resume(self) -> None:
        """Remove files that killed runs left half-assembled. For one process, while none writes."""
        self._place.drop(*(name for name in self._place.names() if name.startswith("whole-")))

    def open(self, run: str) -> None:
        """Prepare to write chunks to the folders of a run."""
        self._threads = encoding_threads()
        self._whole = self._place.beside(f"whole-{run}")  # one per run, as the chunks' folders
        for name, each in self._layout.fields.items():
            self._files[name] = ChunkFiles(
                self._folder(run, name), self._threads, chunks=self._layout.chunks_of(each), fill=0, name_of=_name_of,
                encode=_pack,
            )  # fmt: skip

    def _folder(self, run: str, name: str) -> str:
        """Return the folder of a field's chunks: one per run, since a run may take over from a living one."""
        return self._place.beside(os.path.join(f"chunks-{run}", str(list(self._layout.fields).index(name))))

    def write(self, each: OutputField, at: Box, values: Array) -> None:
        """Write a box of whole chunks of the array of all steps, as stored values."""
        self._files[each.name].write(at, values)

    def finish(self) -> None:
        """Assemble the file. For one process, after all have ended."""
        import h5py

        target, whole = self._place.target, self._whole
        shutil.copyfile(target, whole)  # a run killed from here on keeps all its parts
        begun = begun_at(self._place)
        with h5py.File(whole, "r+") as file:
            for name, each in self._layout.fields.items():
                array, chunks = file[name].id, self._layout.chunks_of(each)
                folders = [self._folder(run, name) for run in reversed(() if begun is None else begun.runs)]
                for at in itertools.product(*map(range, (0,) * array.rank, array.shape, chunks)):
                    index = tuple(start // chunk for start, chunk in zip(at, chunks, strict=True))
                    array.write_direct_chunk(at, self._read(folders, index, name))
        os.replace(whole, target)

    def _read(self, folders: list[str], index: tuple[int, ...], name: str) -> bytes:
        for folder in folders:
            with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, _name_of(index)), "rb") as file:
                if packed := file.read():
                    return packed
        raise CorruptDataError(
            f"{self._place.path}: no rank has written chunk {list(index)} of field {name!r}; begin again with "
            "overwrite=True"
        )

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _name_of(index: tuple[int, ...]) -> str:
    return ".".join(map(str, index))


def _pack(chunk: Array) -> list[bytes]:
    """Encode a chunk by HDF5's filters ``shuffle`` and ``deflate``."""
    raw = chunk.reshape(-1).view(np.uint8)
    return [zlib.compress(raw.reshape(-1, chunk.dtype.itemsize).T.tobytes(), LEVEL)]
