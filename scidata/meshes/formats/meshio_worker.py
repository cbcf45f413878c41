"""Reads a mesh by meshio in a process of its own: ``python meshio_worker.py PATH FOLDER SECONDS``.

Imports nothing of scidata. The folder gets ``mesh``, a pickle of meshio's mesh; or ``error``, a text.
"""

import contextlib
import io
import os
import pickle
import resource
import sys

import meshio

_MEMORY, _RATIO = 4 << 30, 100  # bytes beside a mesh, and for each byte of its file


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process; one that is lower stays."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(path: str, folder: str, seconds: int) -> None:
    """Read one file, within so many seconds of processor time, and memory that its size explains."""
    _limit(resource.RLIMIT_CPU, seconds)
    most = _MEMORY + _RATIO * os.path.getsize(path)
    _limit(resource.RLIMIT_DATA, most)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            mesh = meshio.read(path)
        with open(os.path.join(folder, "mesh"), "wb") as file:
            pickle.dump(mesh, file, protocol=5)
    except (Exception, SystemExit) as e:  # readers raise nearly anything, and some end the program
        why = " ".join(printed.getvalue().split()) if isinstance(e, SystemExit) else str(e)
        with open(os.path.join(folder, "error"), "w", encoding="utf-8", errors="backslashreplace") as text:
            text.write(why or type(e).__name__)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
