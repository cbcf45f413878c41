"""Cells of any shape by their faces: which cells lie beside each face, and where the cells' centres are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scidata.core.bounds import owners_of
from scidata.core.types import FloatArray, IntArray
from scidata.errors import CorruptDataError
from scidata.meshes.order.ids import blocks, both_directions, undirected_keys

_BLOCK = 1 << 14  # faces at once: their points stay in the cache
_TINY = 1e-300  # volumes below it have no centre of mass


@dataclass(frozen=True, kw_only=True, eq=False)
class Faces:
    """The faces of all cells, each once.

    Attributes
    ----------
    offsets, nodes
        The nodes of face ``i``, in order around it, are ``nodes[offsets[i] : offsets[i + 1]]``; int64, as the others.
    owner
        ``(num_faces,)``: the cell that it belongs to.
    neighbour
        ``(num_faces,)``: the cell on the other side, -1 at the boundary.
    """

    offsets: IntArray
    nodes: IntArray
    owner: IntArray
    neighbour: IntArray

    def checked(self, where: str, num_nodes: int, num_cells: int) -> Faces:
        """Raise CorruptDataError for faces of fewer than three nodes, and ids of nodes and cells that there are not."""
        for ids, least, most, what in (
            (self.nodes, 0, num_nodes, "nodes"),
            (self.owner, 0, num_cells, "cells as owners"),
            (self.neighbour, -1, num_cells, "cells as neighbours"),
        ):
            wrong = np.flatnonzero((ids < least) | (ids >= most))
            if len(wrong):
                faces = owners_of(self.offsets, wrong[:3]) if ids is self.nodes else wrong[:3]
                raise CorruptDataError(
                    f"{where}: faces {faces.tolist()} name the {what} {ids[wrong[:3]].tolist()}, but there are {most} "
                    f"({len(wrong)} ids are wrong); copy it, or write it again"
                )
        small = np.flatnonzero(np.diff(self.offsets) < 3)
        if len(small):
            raise CorruptDataError(
                f"{where}: {len(small)} faces have fewer than three nodes (first: {small[:3].tolist()}); copy it, or "
                "write it again"
            )
        return self

    def edges(self, num_cells: int) -> IntArray:
        """Return the pairs of cells that share a face, both directions, each once, by (destination, source)."""
        inner = self.neighbour >= 0
        return both_directions(undirected_keys(self.owner[inner], self.neighbour[inner], num_cells), num_cells)

    def centres_and_volumes(self, points: FloatArray, num_cells: int) -> tuple[FloatArray, FloatArray]:
        """Return the centres, ``(num_cells, 3)``, and volumes of the cells, as OpenFOAM computes them.

        A face is cut into triangles around the mean of its nodes; its centre is their mean, weighted by area. A cell
        is cut into pyramids from its faces to the mean of their centres; its centre is that of these, weighted by
        volume. Of a cell without a volume it is the mean of its faces' centres.

        Source: OpenFOAM, ``primitiveMeshFaceCentresAndAreas.C`` and ``primitiveMeshCellCentresAndVols.C``.
        """
        centre, area = self._centres_and_areas(points)
        inner = np.flatnonzero(self.neighbour >= 0)
        sides: list[tuple[IntArray, IntArray | slice, float]] = [
            (self.owner, slice(None), 1.0),
            (self.neighbour[inner], inner, -1.0),
        ]
        counts = sum(np.bincount(cell, minlength=num_cells) for cell, _, _ in sides)
        middle = np.zeros((3, num_cells))
        for cell, faces, _ in sides:
            middle += _sums(cell, centre[:, faces], num_cells)
        middle /= np.maximum(counts, 1)
        volume, moment = np.zeros(num_cells), np.zeros((3, num_cells))
        for cell, faces, sign in sides:
            height = centre[:, faces] - middle[:, cell]
            pyramid = (area[:, faces] * height).sum(axis=0) * (sign / 3)
            volume += np.bincount(cell, pyramid, num_cells)
            height *= 0.75 * pyramid  # from the middle of the cell
            moment += _sums(cell, height, num_cells)
        there = np.abs(volume) > _TINY
        middle[:, there] += moment[:, there] / volume[there]
        return np.ascontiguousarray(middle.T), volume

    def _centres_and_areas(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return ``(3, num_faces)`` each; faces of as many nodes together."""
        coordinates, sizes = np.ascontiguousarray(points.T), np.diff(self.offsets)
        centre, area = np.empty((3, len(sizes))), np.empty((3, len(sizes)))
        for size in np.unique(sizes):
            every = np.flatnonzero(sizes == size)
            for block in blocks(len(every), _BLOCK):
                faces = every[block]
                here = coordinates[:, self.nodes[self.offsets[faces][:, None] + np.arange(size)]]
                mean = here.mean(axis=2, keepdims=True)
                there, inward = np.roll(here, -1, axis=2), mean - here
                x, y, z = there - here
                normal = np.stack(
                    [y * inward[2] - z * inward[1], z * inward[0] - x * inward[2], x * inward[1] - y * inward[0]]
                )
                weights = np.sqrt((normal * normal).sum(axis=0))
                total = weights.sum(axis=1)
                moment = (weights * (here + there + mean)).sum(axis=2)
                with np.errstate(divide="ignore", invalid="ignore"):
                    centre[:, faces] = np.where(total > _TINY, moment / (3 * total), mean[:, :, 0])
                area[:, faces] = normal.sum(axis=2) / 2
        return centre, area


def _sums(cell: IntArray, values: FloatArray, num_cells: int) -> FloatArray:
    """Add up the values ``(3, num)`` of each cell: ``(3, num_cells)``."""
    return np.stack([np.bincount(cell, column, num_cells) for column in values])
