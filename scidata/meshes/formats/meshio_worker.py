"""Reads a mesh by meshio in a process of its own: ``python _meshio_worker.py PATH FOLDER SECONDS``.

Imports nothing of scidata. The folder gets an array a file, and ``mesh.json``, which says what they are; or ``error``.
"""

import contextlib
import io
import json
import os
import resource
import sys
from typing import Any

import meshio
import numpy as np

_MEMORY, _RATIO = 4 << 30, 100  # bytes beside a mesh, and for each byte of its file


class _Writer:
    def __init__(self, folder: str) -> None:
        self._folder, self._number = folder, 0

    def put(self, values: Any) -> dict[str, str]:
        """Write an array, or rows of their own lengths as two, and return their files."""
        if isinstance(values, np.ndarray) and values.dtype != object:
            return {"array": self._save(values)}
        rows = [np.asarray(row) for row in values]
        lengths = np.array([len(row) for row in rows], np.int64)
        return {"rows": self._save(np.concatenate([np.empty(0, np.int64), *rows])), "lengths": self._save(lengths)}

    def _save(self, values: Any) -> str:
        name = f"{self._number}.npy"
        self._number += 1
        np.save(os.path.join(self._folder, name), values, allow_pickle=False)
        return name


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process; one that is lower stays."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(path: str, folder: str, seconds: int) -> None:
    """Read one file, within so many seconds of processor time, and memory that its size explains."""
    _limit(resource.RLIMIT_CPU, seconds)
    most = _MEMORY + _RATIO * os.path.getsize(path)
    _limit(resource.RLIMIT_DATA, most)
    writer, printed = _Writer(folder), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            mesh = meshio.read(path)
        made = {
            "points": writer.put(np.asarray(mesh.points)),
            "cells": [{"type": block.type, "data": writer.put(block.data)} for block in mesh.cells],
            "point_data": {name: writer.put(np.asarray(data)) for name, data in mesh.point_data.items()},
            "cell_data": {
                name: [writer.put(np.asarray(data)) for data in blocks] for name, blocks in mesh.cell_data.items()
            },
        }
        text, name = json.dumps(made), "mesh.json"
    except (Exception, SystemExit) as e:  # readers raise nearly anything, and some end the program
        why = " ".join(printed.getvalue().split()) if isinstance(e, SystemExit) else str(e)
        text, name = why or type(e).__name__, "error"
    with open(os.path.join(folder, name), "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
