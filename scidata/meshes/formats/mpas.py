"""MPAS meshes: Voronoi cells over vertices, 1-based and padded with zeros (or anything, behind ``nEdgesOnCell``).

The MPAS mesh specification (version 1.0) gives the names. MPAS cells are the cells, its vertices the nodes. Fields on
its edges follow to both directions of the edge between two vertices; a signed field (``normalVelocity``) times the
field ``orientation`` is then the flow to the right of the way from source to destination. ``edges="edge_index"`` takes
each edge once, from its first vertex to its second. Positions are longitude and latitude in degrees on a sphere, else
x and y.
"""

from __future__ import annotations

import re

import numpy as np

from scidata.core.types import IntArray, Source
from scidata.errors import FieldMismatchError, UnknownNameError
from scidata.meshes.formats.arrays import cells_of_rows, read_counted_rows, read_indices
from scidata.meshes.formats.base import Options, RawTopology, read_values
from scidata.meshes.geometry import Geometry
from scidata.sources.cf import array_of

_ENTITIES = {"nCells": "cell", "nVertices": "node", "nEdges": "edge"}
_STRUCTURE = re.compile(
    r"(lat|lon|x|y|z)(Cell|Edge|Vertex)|indexTo(Cell|Edge|Vertex)ID|"
    r"(cells|edges|vertices|nEdges|nCells|weights)On(Cell|Edge|Vertex)"
)


class MPASTopology(RawTopology):
    """An MPAS mesh."""

    def load(self) -> Geometry:
        """Read points, cells and edges."""
        names = ("lonVertex", "latVertex") if self.on_sphere else ("xVertex", "yVertex")
        columns = [read_values(self.source, name, self.options).astype(np.float64) for name in names]
        points = np.stack(columns, axis=1)
        rows, padding = read_counted_rows(
            self.source, "verticesOnCell", "nEdgesOnCell", self.options, counted="vertices of each cell"
        )
        cells = cells_of_rows(rows, padding=padding, start_index=1)
        edges = self.load_mesh_edges() if "edge" in self.sizes and not self.mesh_edges else None
        return Geometry(points=np.degrees(points) if self.on_sphere else points, cells=cells, edge_index=edges)

    def load_mesh_edges(self) -> IntArray:
        """Read ``verticesOnEdge``, 0-based."""
        return np.ascontiguousarray(read_indices(self.source, "verticesOnEdge", self.options).T) - 1


def open_topology(source: Source, options: Options) -> MPASTopology:
    """Describe the mesh of a file."""
    on_sphere = str(source.attributes.get("on_a_sphere", "NO")).strip().upper().startswith("Y")
    needed = ["lonVertex", "latVertex"] if on_sphere else ["xVertex", "yVertex"]
    own_edges = options.edges == "edge_index"
    for name in needed + (["verticesOnEdge"] if own_edges else []):
        if name not in source.arrays:
            where = "on a sphere" if on_sphere else "on a plane"
            raise UnknownNameError(f"{source.path}: an MPAS mesh {where} has an array {name!r}, which is not there")
    arrays = source.arrays
    sizes = {"node": arrays[needed[0]].shape[0], "cell": arrays["verticesOnCell"].shape[0]}
    has_edges = "verticesOnEdge" in arrays and arrays["verticesOnEdge"].shape[1:] == (2,)
    if has_edges:
        sizes["edge"] = arrays["verticesOnEdge"].shape[0]
    return MPASTopology(
        source=source,
        options=options,
        on_sphere=on_sphere,
        sizes=sizes,
        entity_of_dim={
            **_ENTITIES,
            arrays[needed[0]].dims[0]: "node",
            arrays["verticesOnCell"].dims[0]: "cell",
        },
        not_fields=frozenset(name for name in arrays if _STRUCTURE.fullmatch(name)),
        period=_period(source, on_sphere=on_sphere),
        mesh_edges=has_edges and not own_edges,
    )


def _period(source: Source, *, on_sphere: bool) -> tuple[float, ...] | None:
    if on_sphere or not str(source.attributes.get("is_periodic", "NO")).strip().upper().startswith("Y"):
        return None
    period = tuple(_width(source, f"{axis}_period") for axis in "xy")
    return period if any(period) else None


def _width(source: Source, name: str) -> float:
    said = array_of(source.attributes.get(name, 0.0)).reshape(-1)
    try:
        return float(said[0])
    except (IndexError, ValueError, TypeError, OverflowError) as e:
        raise FieldMismatchError(
            f"{source.path}: attribute {name} is {source.attributes[name]!r}, but a width was expected"
        ) from e
