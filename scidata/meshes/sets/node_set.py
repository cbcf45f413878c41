"""A set of nodes with places: generators make them, and edges between two sets are found from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from scidata.errors import ConfigError
from scidata.meshes.geometry import RawCells
from scidata.meshes.sets.sphere import Floats, unit_vectors

#: Distances that differ by less are taken for equal, as a share of the unit sphere's radius or of the largest
#: coordinate: rounding makes 1e-15 of it, and what is equally far by symmetry must not be told apart by that.
TIED = 1e-12
# Latitudes may be beyond the poles by that many degrees: 90 in radians of float32 is 90.0000025.
_BEYOND = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeSet:
    """Nodes of one kind, with their places.

    Attributes
    ----------
    points
        ``(num_nodes, 2)`` float64 longitude and latitude in degrees where ``on_sphere``, else ``(num_nodes, 2 or 3)``
        coordinates.
    on_sphere
        True where ``points`` are longitude and latitude.
    cells
        Triangles or quads of the set, counter-clockwise seen from outside; None where it has none.
    grid_shape
        ``(num_lat, num_lon)`` of a regular grid, whose nodes are in row-major order; else None.
    fields
        Values that each node has by itself, ``(num_nodes, ...)`` float64: ``"area"`` of a grid, in steradians.

    Raises
    ------
    ConfigError
        Points of another shape, NaN or infinite, latitudes beyond the poles; cells, a grid or fields that do not fit.
    """

    points: Floats
    on_sphere: bool
    cells: RawCells | None = None
    grid_shape: tuple[int, ...] | None = None
    fields: Mapping[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = np.asarray(self.points)
        if given.ndim != 2 or given.shape[1] not in (2, 3) or given.dtype.kind not in "iuf":
            raise ConfigError(f"nodes need (num, 2) or (num, 3) real numbers, not {given.dtype} of shape {given.shape}")
        if self.on_sphere and given.shape[1] != 2:
            raise ConfigError(f"nodes on a sphere are (num, 2) longitude and latitude in degrees, not {given.shape}")
        points = given.astype(np.float64, copy=False)
        object.__setattr__(self, "points", points)
        if not np.isfinite(points.sum()):  # without an array of booleans where all are finite
            _refuse(np.flatnonzero(~np.isfinite(points).all(axis=1)), self, "have a NaN or infinite coordinate")
        if self.on_sphere and len(points) and float(np.abs(points[:, 1]).max()) > 90 + _BEYOND:
            _refuse(
                np.flatnonzero(np.abs(points[:, 1]) > 90 + _BEYOND),
                self,
                "have a latitude beyond 90 degrees (columns are longitude, latitude)",
            )
        self._check_parts()

    def _check_parts(self) -> None:
        num = len(self.points)
        if self.grid_shape is not None and prod(self.grid_shape) != num:
            raise ConfigError(f"a grid of {self.grid_shape} has {prod(self.grid_shape)} nodes, but there are {num}")
        for name, values in self.fields.items():
            if len(values) != num:
                raise ConfigError(f"field {name!r} has {len(values)} rows, but there are {num} nodes")
        nodes = None if self.cells is None else self.cells.connectivity
        if nodes is not None and len(nodes) and (int(nodes.min()) < 0 or int(nodes.max()) >= num):
            outside = int(((nodes < 0) | (nodes >= num)).sum())
            raise ConfigError(f"{outside} corners of cells are outside the {num} nodes")

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.points)

    def positions(self) -> Floats:
        """Return where distances are measured: ``(num_nodes, 3)`` on the unit sphere, or ``points`` as they are."""
        return unit_vectors(self.points) if self.on_sphere else self.points


def _refuse(rows: np.typing.NDArray[np.int64], nodes: NodeSet, what: str) -> None:
    if len(rows):  # finite values may have an infinite sum
        raise ConfigError(
            f"{len(rows)} of {len(nodes.points)} nodes {what} (first rows: {rows[:5].tolist()}): drop or mend them"
        )


def positions_of(source: NodeSet, target: NodeSet) -> tuple[Floats, Floats, float]:
    """Return the positions of two sets, and by how much distances between them may differ and count as equal.

    Raises
    ------
    ConfigError
        One is on a sphere and the other is not, or they differ in the number of coordinates.
    """
    if source.on_sphere != target.on_sphere:
        one, other = ("source", "target") if source.on_sphere else ("target", "source")
        raise ConfigError(
            f"edges join sets in one space, but the {one} is on a sphere and the {other} is not: give both as "
            "longitude and latitude, or both as coordinates"
        )
    start = source.positions()
    end = start if target is source else target.positions()
    if start.shape[1] != end.shape[1]:
        raise ConfigError(f"the source has {start.shape[1]} coordinates, the target {end.shape[1]}: give both as many")
    if source.on_sphere:
        return start, end, TIED
    largest = max((float(np.abs(each).max()) for each in (start, end) if each.size), default=0.0)
    return start, end, TIED * largest
