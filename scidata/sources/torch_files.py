"""Files of ``torch.save``: tensors, dicts of them, PyTorch Geometric's ``Data``, lists and data sets of those; of DGL.

A process of its own reads the file, whole, compares its checksums, and runs nothing that is in it: see
``scidata/interop/torch_worker.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scidata.core.cache import Cache
from scidata.core.types import Array, ArrayLayout
from scidata.errors import CorruptDataError, UnsupportedFormatError
from scidata.sources.access.files import version_at
from scidata.sources.file_source import WholeFileSource, layout_in_memory

_WORKER = os.path.join(os.path.dirname(__file__), "..", "interop", "torch_worker.py")

OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF"  # a pickle of torch's magic number, as torch.save wrote before 1.6

DGL = bytes.fromhex("3fa1b446f04f2edd")  # what its save_graphs begins with

#: Entity of each dim that PyTorch Geometric says counts nodes or edges.
ENTITY_DIMS: Mapping[str, str] = {"node": "node", "edge": "edge"}


@dataclass(frozen=True, kw_only=True)
class _Contents:
    values: dict[str, Array]
    layouts: dict[str, ArrayLayout]
    left_out: dict[str, str]


_loaded: Cache[_Contents] = Cache(1 << 30, "lru")  # to look at a file and to open it takes it once


def _nbytes(contents: _Contents) -> int:
    return sum(array.nbytes for array in contents.values.values())


class TorchSource(WholeFileSource[_Contents]):
    """One file of ``torch.save``. Fields of nodes and edges are ``node/<name>`` and ``edge/<name>``.

    Of a ``Data`` PyTorch Geometric's own rules say which are fields (``is_node_attr``, ``__cat_dim__``); its other
    values are ``graph/<name>``.
    Several samples are groups: ``0/node/x``, ``1/node/x``, ….
    """

    format = "torch"

    @property
    def arrays(self) -> Mapping[str, ArrayLayout]:
        """Every tensor."""
        return self._read().layouts

    @property
    def skipped(self) -> Mapping[str, str]:
        """Reasons why some entries of the file are not among the arrays, by name."""
        return self._read().left_out

    def _values(self) -> Mapping[str, Array]:
        return self._read().values

    def _parse(self) -> _Contents:
        key = self.path, version_at(self.path)
        return _loaded.get_or_make(key, lambda: _load(self.path), _nbytes, once=True)


def _run_worker(path: str, folder: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", _WORKER, path, folder]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def _load(path: str) -> _Contents:
    with tempfile.TemporaryDirectory(prefix="scidata-torch-") as folder:
        done = _run_worker(os.path.abspath(path), folder)
        if os.path.exists(damage := os.path.join(folder, "damage")):
            with open(damage, encoding="utf-8") as file:
                raise CorruptDataError(f"{path}: {file.read()}; it is damaged: copy or write it again")
        if os.path.exists(error := os.path.join(folder, "error")):
            with open(error, encoding="utf-8") as file:
                raise UnsupportedFormatError(
                    f"{path}: torch.load(weights_only=True), or DGL, cannot read it: {file.read()}; save tensors, "
                    "dicts of tensors, or PyTorch Geometric's Data (which must be installed)"
                )
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CorruptDataError(f"{path}: the process that reads it ended: {why}")
        with open(os.path.join(folder, "arrays.json"), encoding="utf-8") as file:
            made = json.load(file)
        with open(os.path.join(folder, "arrays.npy"), "rb") as arrays:
            values = {name: np.load(arrays) for name in made["arrays"]}
    layouts = {}
    for name, each in made["arrays"].items():
        dims = [f"dim_{i}" for i in range(values[name].ndim)]
        if each["entity"]:
            dims[each["dim"]] = each["entity"]
        attributes = {"json": 1} if each["is_json"] else {}
        layouts[name] = layout_in_memory(path, name, values[name], tuple(dims), attributes)
    return _Contents(values=values, layouts=layouts, left_out=made["left_out"])
