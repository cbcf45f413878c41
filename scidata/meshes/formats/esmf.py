"""Meshes as ESMF writes them: polygons over nodes, in 1-based rows that ``numElementConn`` tells the length of.

The ESMF reference manual ("ESMF Unstructured Grid File Format") gives the names: ``nodeCoords`` (nodeCount, 2 or 3),
``elementConn`` (elementCount, maxNodePElement) with the attribute ``start_index``, 1 if it is not said, and
``numElementConn`` (elementCount). Elements are the cells.
"""

from __future__ import annotations

from scidata.core.types import Source
from scidata.errors import UnsupportedFormatError, check_known
from scidata.meshes.formats.arrays import cells_of_rows, read_counted_rows, start_of
from scidata.meshes.formats.base import Options, RawTopology
from scidata.meshes.formats.coordinates import is_angle, read_points
from scidata.meshes.geometry import Geometry

_STRUCTURE = frozenset(("nodeCoords", "elementConn", "numElementConn", "centerCoords", "origGridDims"))


class EsmfTopology(RawTopology):
    """An ESMF mesh."""

    def load(self) -> Geometry:
        """Read points and cells."""
        points = read_points(self)
        layout = self.source.arrays["elementConn"]
        start = start_of(layout) if "start_index" in layout.attributes else 1
        rows, padding = read_counted_rows(
            self.source, "elementConn", "numElementConn", self.options, counted="nodes of each element"
        )
        return Geometry(points=points, cells=cells_of_rows(rows, padding=padding, start_index=start))


def open_topology(source: Source, options: Options) -> EsmfTopology:
    """Describe the mesh of a file."""
    needed = "nodeCoords", "elementConn", "numElementConn"
    check_known(f"{source.path}: an ESMF mesh has an array", needed, source.arrays, ", which is not there")
    points, rows = source.arrays["nodeCoords"], source.arrays["elementConn"]
    if len(rows.shape) != 2 or len(points.shape) != 2 or points.shape[1] not in (2, 3):
        raise UnsupportedFormatError(
            f"{source.path}: 'elementConn' {rows.shape} and 'nodeCoords' {points.shape}: elements as rows of nodes, "
            "and two or three coordinates were expected"
        )
    return EsmfTopology(
        source=source,
        options=options,
        on_sphere=points.shape[1] == 2 and is_angle(points),
        sizes={"node": points.shape[0], "cell": rows.shape[0]},
        entity_of_dim={points.dims[0]: "node", rows.dims[0]: "cell"},
        not_fields=_STRUCTURE,
        coordinates=("nodeCoords",),
    )
