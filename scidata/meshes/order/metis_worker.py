"""Runs METIS in a process of its own: ``python _metis_worker.py FOLDER NUM_PARTS``. Imports nothing of scidata."""

import os
import sys
from typing import Any

import numpy as np
import pymetis


def main(folder: str, num_parts: int) -> None:
    """Read ``indptr.npy`` and ``indices.npy`` of a symmetric graph, write ``parts.npy``."""
    indptr = np.load(os.path.join(folder, "indptr.npy"), mmap_mode="r")
    indices = np.load(os.path.join(folder, "indices.npy"), mmap_mode="r")
    options = pymetis.Options(seed=1)
    # recursive: parts [0, k / 2) are one side of the first bisection, and so on: cuts at fewer parts nest
    graph: dict[str, Any]
    if hasattr(pymetis, "CSRAdjacency"):  # from 2025.2 on; the arguments of before go away in 2027
        graph = {"adjacency": pymetis.CSRAdjacency(indptr, indices)}
    else:
        graph = {"xadj": indptr, "adjncy": indices}
    _, parts = pymetis.part_graph(num_parts, **graph, recursive=True, options=options)
    np.save(os.path.join(folder, "parts.npy"), np.asarray(parts, dtype=np.int32))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
