"""Files of ``torch.save``: tensors, dicts of them, PyTorch Geometric's ``Data``, and lists and data sets of those.

A process of its own reads the file, whole, compares its checksums, and runs nothing that is in it: see
``scidata/interop/torch_worker.py``.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scidata.core.cache import Cache
from scidata.core.types import ArrayLayout, ChunkRefs, Files, IntArray
from scidata.errors import CorruptDataError, UnknownNameError, UnsupportedFormatError, near_matches
from scidata.sources.access.files import Versions, version_at

_WORKER = os.path.join(os.path.dirname(__file__), "..", "interop", "torch_worker.py")

OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF"  # a pickle of torch's magic number: what torch.save wrote before 1.6

_loaded: Cache[dict[str, npt.NDArray[Any]]] = Cache(1 << 30, "lru")  # to look at a file and to open it takes it once


def _nbytes(arrays: Mapping[str, npt.NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())


class TorchSource:
    """One file of ``torch.save``. Fields of nodes and edges are ``node/<name>`` and ``edge/<name>``.

    Several samples are groups: ``0/node/x``, ``1/node/x``, ….

    Parameters
    ----------
    path
        A local file. Read at the first use, once per process.
    allow_external
        Nothing in this format is outside the file; taken so that sources are made alike.
    """

    format = "torch"
    attributes: Mapping[str, Any] = {}

    def __init__(self, path: str | os.PathLike[str], *, allow_external: bool = False) -> None:
        self.path = os.fspath(path)
        self.allow_external = allow_external
        self._versions = Versions()
        self._values: dict[str, npt.NDArray[Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_values": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every tensor.

        Raises
        ------
        UnsupportedFormatError
            The file holds other objects than tensors.
        """
        return {name: self._layout(name, values) for name, values in self._read().items()}

    def _layout(self, name: str, values: npt.NDArray[Any]) -> ArrayLayout:
        return ArrayLayout(
            store=self.path,
            name=name,
            shape=values.shape,
            dims=tuple(f"dim_{i}" for i in range(values.ndim)),
            dtype=values.dtype,
            chunks=values.shape,
            axis_order=tuple(range(values.ndim)),
            fallback=True,
        )

    def locate(self, layout: ArrayLayout, chunks: IntArray) -> ChunkRefs:
        """Say that every chunk is there; which bytes of the file it came from is not known."""
        nowhere = np.zeros(len(chunks), np.int64)
        return ChunkRefs(paths=(self.path,), path_index=nowhere, offset=nowhere, nbytes=nowhere)

    def read_box(self, layout: ArrayLayout, box: tuple[slice, ...], out: npt.NDArray[Any]) -> None:
        """Copy a box into ``out``."""
        values = self._read()
        if layout.name not in values:
            raise UnknownNameError(f"{self.path}: no field {layout.name!r}{near_matches(layout.name, values)}")
        out[...] = values[layout.name][box]

    def check_unchanged(self, layout: ArrayLayout, paths: Sequence[str]) -> None:
        """Nothing to check: the file is read whole, once."""

    def files_of(self, layout: ArrayLayout, chunks: IntArray) -> Files:
        """Name the file."""
        return Files((self.path,))

    def close(self) -> None:
        """Forget what was read; the next use reads it again."""
        self._values = None

    def _read(self) -> dict[str, npt.NDArray[Any]]:
        if self._values is None:  # two threads may both read it: they get the same
            self._versions.check((self.path,))
            key = os.path.abspath(self.path), version_at(self.path)
            self._values = _loaded.get_or_make(key, lambda: _load(self.path), _nbytes, once=True)
        return self._values


def is_torch_file(path: str) -> bool:
    """Whether a zip archive is one of ``torch.save``; those of before version 1.6 begin with ``OLD_TORCH``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, NotImplementedError, UnicodeDecodeError, struct.error):
        return False


def _load(path: str) -> dict[str, npt.NDArray[Any]]:
    with tempfile.TemporaryDirectory(prefix="scidata-torch-") as folder:
        command = [sys.executable, "-P", _WORKER, os.path.abspath(path), folder]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if os.path.exists(damage := os.path.join(folder, "damage")):
            with open(damage, encoding="utf-8") as file:
                raise CorruptDataError(f"{path}: {file.read()}; it is damaged: copy or write it again")
        if os.path.exists(error := os.path.join(folder, "error")):
            with open(error, encoding="utf-8") as file:
                raise UnsupportedFormatError(
                    f"{path}: torch.load(weights_only=True) cannot read it: {file.read()}; save tensors, dicts of "
                    "tensors, or PyTorch Geometric's Data (which must be installed)"
                )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CorruptDataError(f"{path}: the process that reads it ended: {why}")
        with open(os.path.join(folder, "arrays.json"), encoding="utf-8") as file:
            made = json.load(file)
        return {name: np.load(os.path.join(folder, each)) for name, each in made.items()}
