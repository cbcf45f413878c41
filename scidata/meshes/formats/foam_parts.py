"""The meshes of a case of OpenFOAM: one, or those of its processors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scidata.core.types import FloatArray, IntArray
from scidata.errors import CorruptDataError
from scidata.meshes.formats.foam_files import AGAIN, FoamFile, existing
from scidata.meshes.order.polyhedra import Faces

_PATCH = re.compile(rb"([\w.:+-]+)\s*\{([^{}]*)\}")
_ENTRY = re.compile(rb"(\w+)\s+([^;]+?)\s*;")


@dataclass(frozen=True, kw_only=True, eq=False)
class FoamPart:
    """A case, or one processor's share of it."""

    case: str
    mesh: str

    def file(self, name: str) -> FoamFile:
        """Read a file of the mesh."""
        return FoamFile.read(os.path.join(self.mesh, name))

    def sizes(self) -> tuple[int, int]:
        """Return the number of cells, and of inner faces."""
        owner = self.file("owner")
        said = dict(re.findall(r"(nCells|nInternalFaces):\s*(\d+)", owner.header.get("note", "")))
        if len(said) == 2:
            return int(said["nCells"]), int(said["nInternalFaces"])
        return int(owner.labels()[0].max(initial=-1)) + 1, int((self.file("neighbour").labels()[0] >= 0).sum())

    def faces(self, num_cells: int) -> Faces:
        """Read and check the faces."""
        offsets, nodes = self.file("faces").faces()
        owner, inner = self.file("owner").labels()[0], self.file("neighbour").labels()[0]
        if len(owner) != len(offsets) - 1 or len(inner) > len(owner):
            raise CorruptDataError(
                f"{self.mesh}: has {len(offsets) - 1} faces, {len(owner)} owners and {len(inner)} neighbours, but each "
                f"face has one owner, and inner faces have one neighbour; {AGAIN}"
            )
        neighbour = np.full(len(owner), -1, np.int64)
        neighbour[: len(inner)] = inner
        faces = Faces(offsets=offsets, nodes=nodes, owner=owner, neighbour=neighbour)
        return faces.checked(self.mesh, len(self.points), num_cells)

    @property
    def points(self) -> FloatArray:
        """The points, ``(num_points, 3)``."""
        return np.asarray(self.file("points").vectors(), np.float64)

    def patches(self) -> dict[str, dict[str, str]]:
        """Return the entries of each patch of the boundary."""
        file = self.file("boundary")
        return {
            name.decode(): {key.decode(): value.decode() for key, value in _ENTRY.findall(entries)}
            for name, entries in _PATCH.findall(file.data, file.begin)
        }


def of_processors(part: FoamPart, faces: Faces, number: int) -> Iterator[tuple[tuple[int, int], int, IntArray]]:
    """Yield, for each patch to another processor, both numbers, its place among those to it, and the cells at it."""
    seen: dict[int, int] = {}
    for name, entries in part.patches().items():
        if entries.get("type") == "processor":
            other, first, num = (int(entries.get(key, "-1")) for key in ("neighbProcNo", "startFace", "nFaces"))
            if first < 0 or num < 0 or first + num > len(faces.owner):
                raise CorruptDataError(
                    f"{part.mesh}: patch {name} is the faces {first} to {first + num} of {len(faces.owner)}; {AGAIN}"
                )
            yield (number, other), seen.setdefault(other, 0), faces.owner[first : first + num]
            seen[other] += 1


def point_numbers(parts: Sequence[FoamPart]) -> IntArray | None:
    """Return the number of each point of all parts in the case that was cut; None if a part does not say."""
    names = [os.path.join(part.mesh, "pointProcAddressing") for part in parts]
    if len(parts) == 1 or not all(map(existing, names)):
        return None
    found = [FoamFile.read(name).labels()[0] for name in names]
    for name, numbers, part in zip(names, found, parts, strict=True):
        if len(numbers) != (num := len(part.points)):
            raise CorruptDataError(f"{name}: has {len(numbers)} numbers of points, but there are {num}; {AGAIN}")
    return np.concatenate(found)
