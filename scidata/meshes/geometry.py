"""Points, cells and edges of a mesh, cloud or graph in memory: formats return them, orders and checks take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scidata.core.types import AnyArray, ByteArray, FloatArray, IntArray
from scidata.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class RawCells:
    """Cells as lists of nodes, of any size each: VTK's shape."""

    # ``(num_cells + 1,)`` int64: the nodes of cell ``i`` are ``connectivity[offsets[i]:offsets[i + 1]]``
    offsets: IntArray
    # ``(sum of sizes,)`` int64, 0-based rows of the nodes, in VTK's order. Not checked here: an index that the file has
    # wrong (a hole in a cell becomes -1) is left for the checks of a sample to name
    connectivity: AnyArray
    cell_type: ByteArray  # ``(num_cells,)`` uint8: VTK's codes

    def __post_init__(self) -> None:
        offsets = self.offsets
        if len(offsets) != len(self.cell_type) + 1 or offsets[0] != 0 or offsets[-1] != len(self.connectivity):
            raise ConfigError(
                f"cells need offsets from 0 to {len(self.connectivity)} (the length of connectivity), one more than "
                f"the {len(self.cell_type)} types; there are {len(offsets)}, ending at {offsets[-1:].tolist()}"
            )
        if (np.diff(offsets) < 0).any():
            row = int(np.flatnonzero(np.diff(offsets) < 0)[0])
            raise ConfigError(f"offsets of cells must not decrease, but do after cell {row}")

    @classmethod
    def of_kind(cls, rows: IntArray, code: int) -> RawCells:
        """Return ``(num_cells, size)`` nodes as cells of one of VTK's types."""
        num_cells, size = rows.shape
        offsets = np.arange(num_cells + 1, dtype=np.int64) * size
        return cls(offsets=offsets, connectivity=rows.reshape(-1), cell_type=np.full(num_cells, code, np.uint8))

    def between(self, start: int, stop: int) -> RawCells:
        """Return some cells that follow each other; of their nodes a view."""
        offsets = self.offsets[start : stop + 1]
        return RawCells(
            offsets=offsets - offsets[0],
            connectivity=self.connectivity[offsets[0] : offsets[-1]],
            cell_type=self.cell_type[start:stop],
        )

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return len(self.cell_type)


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """Points, cells and edges, read."""

    points: FloatArray | None = None  # ``(num_nodes, 2 or 3)`` float64, or None for a graph without positions
    cells: RawCells | None = None  # None for points and graphs
    # ``(2, num_edges)`` int64: source and destination; None if edges are still to be made
    edge_index: IntArray | None = None
    # ``(2, num)`` int64, where edges of polyhedra at their nodes were asked for: a node and a row that has it, some
    # more than once
    corners: IntArray | None = None
