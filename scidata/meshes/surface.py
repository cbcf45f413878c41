"""The surface of solid cells: the faces that lie on one cell only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scidata.core.types import IntArray
from scidata.meshes.order.faces import SOLID_FACES


@dataclass(frozen=True, kw_only=True, eq=False)
class Surface:
    """Faces with three or four corners, in order around each.

    Attributes
    ----------
    corners
        ``(num_faces, 4)`` int64 nodes; a triangle has its last corner twice.
    cell
        ``(num_faces,)`` int64: the cell that each is a face of.
    """

    corners: IntArray
    cell: IntArray

    def facing(
        self, points: npt.NDArray[np.float64], centres: npt.NDArray[np.float64], view: npt.NDArray[np.float64]
    ) -> IntArray:
        """Return the faces, as numbers, whose outer side is seen from the direction ``view``, ``(3,)``.

        ``centres`` are those of all cells, ``(num_cells, 3)``.
        """
        a, b, c = (points[self.corners[:, k]] for k in range(3))
        normal = np.cross(b - a, c - a)
        middle = points[self.corners].mean(axis=1)
        outward = np.sign(((middle - centres[self.cell]) * normal).sum(axis=1))
        return np.flatnonzero(outward * (normal @ view) > 0)


def surface_of(offsets: IntArray, connectivity: IntArray, types: npt.NDArray[np.uint8], kept: IntArray) -> Surface:
    """Return the surface of the solid cells among ``kept``, ``(num,)`` int64: outer faces, and those to cells left out.

    Cells are as VTK has them: corners of cell ``i`` at ``connectivity[offsets[i] : offsets[i + 1]]``. Other cells than
    linear and quadratic tetrahedra, hexahedra, voxels, wedges and pyramids have no faces here.
    """
    corners: list[IntArray] = [np.empty((0, 4), np.int64)]
    owners: list[IntArray] = [np.empty(0, np.int64)]
    for kind, faces in SOLID_FACES.items():
        cells = kept[types[kept] == kind]
        for face in faces if len(cells) else ():
            found = connectivity[offsets[cells][:, None] + np.array(face)]
            corners.append(found if len(face) == 4 else np.concatenate([found, found[:, -1:]], axis=1))
            owners.append(cells)
    every, cell = np.concatenate(corners).astype(np.int64), np.concatenate(owners)
    if not len(every):
        return Surface(corners=every, cell=cell)
    # a triangle has its last corner twice, which may be another from the other side: compare without it
    twice = every[:, 3] == every[:, 2]
    keys = np.where(twice[:, None], np.sort(every[:, :3], axis=1)[:, [0, 1, 2, 2]], np.sort(every, axis=1))
    _, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)
    outer = np.sort(first[counts == 1])
    return Surface(corners=every[outer], cell=cell[outer])
