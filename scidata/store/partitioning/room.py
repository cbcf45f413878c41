"""Memory and scratch files of a sample that is put in order in passes: how much one block or bucket may take."""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt

from scidata.core.own_files import open_own
from scidata.core.types import AnyArray
from scidata.meshes.sample import HeteroHeader, SampleHeader
from scidata.store.format.journal import Journal
from scidata.store.format.spools import Buckets, Spool

_PROGRAM = 384 << 20  # what scidata and its libraries take, and the shards on their way to disk
_MOST_BUCKETS = 256
_PARTS = 32  # buckets that would fill the memory; sorting one takes some times its size, and they differ in size
_AT_NODES = 66  # other cells that share a node with a tetrahedron
_CORNERS = ("cells", "connectivity", "cells_connectivity")  # names of arrays of the nodes of cells
_MOST_IN_BLOCK = 4 << 20  # entries: larger blocks are not faster


def room_of(memory: int) -> int:
    """Return how much of the memory that a process may take is left for the arrays of a sample."""
    return max(memory - _PROGRAM, memory // 2)


class Room:
    """A journal's folder for buckets and spools, or none, and the memory that one of them at a time may take."""

    def __init__(self, journal: Journal, nbytes: int) -> None:
        self.journal, self.folder, self.nbytes = journal, journal.folder, max(nbytes, 1)

    def block(self, entry: int) -> int:
        """Return how many entries of so many bytes make a block."""
        return min(max(self.nbytes // (2 * entry), 1), _MOST_IN_BLOCK)

    def spool(self, dtype: npt.DTypeLike, most: int = 0) -> Spool:
        """Return an empty spool; in memory ``most`` rows may be given room at once."""
        return Spool(self.journal.path(), dtype, most, remove=self.journal.remove)

    def buckets(
        self, num: int, nbytes: float, dtypes: list[npt.DTypeLike], shift: int = 0, some: AnyArray | None = None
    ) -> Buckets:
        """Return buckets for ``nbytes`` of rows, by numbers below ``num << shift``.

        As many numbers go to each, or as many of ``some`` of them, which are sorted.
        """
        most = _MOST_BUCKETS if some is not None else min(_MOST_BUCKETS, max(1, num))
        num_buckets = min(most, int(nbytes * _PARTS / self.nbytes) + 1)
        bounds = [num * i // num_buckets << shift for i in range(num_buckets)] + [min(num << shift, 2**64 - 1)]
        if some is not None:
            inner = {int(some[len(some) * i // num_buckets]) for i in range(1, num_buckets)}
            bounds = [0, *sorted(inner - {0}), bounds[-1]]
        columns = [[self.spool(dtype) for dtype in dtypes] for _ in bounds[1:]]
        return Buckets(np.array(bounds, np.uint64 if shift else np.int64), columns)

    def array(self, num: int, dtype: npt.DTypeLike) -> AnyArray:
        """Return room for a number of each row, in memory or as a map of a file that has no name any more."""
        path, nbytes = self.journal.path(), num * np.dtype(dtype).itemsize
        if path is None or nbytes <= self.nbytes:
            return np.empty(num, dtype)
        with open(open_own(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "r+b") as file:
            os.unlink(path)
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk ends it here
            return np.asarray(np.memmap(file, dtype, "r+", shape=(num,)))


def bytes_in_memory(header: SampleHeader | HeteroHeader, order: str) -> int:
    """Estimate the memory that the arrays of a sample take when it is put in order in memory.

    By ``tests/bench/partition_memory.py`` 50 bytes for each node of a cell, as many for each edge of the source.
    """
    if isinstance(header, HeteroHeader):
        return 50 * sum(num or 0 for num in header.sizes.values())
    sizes = header.topology.sizes
    edges = sizes.get("edge", 0) if header.edges == "edge_index" else 0
    edges += _AT_NODES * sizes.get("cell", 0) if header.edges == "nodes" else 0
    arrays = header.topology.source.arrays
    corners = [
        math.prod(layout.shape) for name, layout in arrays.items() if name.rpartition("/")[2].lower() in _CORNERS
    ]
    corners.append(4 * sizes.get("cell", 0))
    rows = sizes.get(header.entity, 0) * {"hilbert": 64, "rcb": 80}.get(order, 40)
    return rows + 50 * (edges + (max(corners) if "cell" in sizes else 0))


def why_not(header: SampleHeader | HeteroHeader, order: str) -> str | None:
    """Return why a sample cannot be put in order in passes; None if it can."""
    if isinstance(header, HeteroHeader) or header.topology.cells_are_rows:
        return "its node sets, or faces, are read whole"
    if order == "metis":
        return "order 'metis' needs all edges at once; use hilbert or rcb"
    if header.edges not in ((None, "faces") if header.entity == "cell" else (None, "cells", "edge_index")):
        return f"edges={header.edges!r} are made of all rows at once"
    return "fields live on mesh edges; leave them out with fields=" if header.on_mesh_edges else None
