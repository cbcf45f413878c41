"""UGRID: unstructured meshes in NetCDF (and in HDF5 or Zarr with the same names).

http://ugrid-conventions.github.io/ugrid-conventions (version 1.0). A mesh variable (``cf_role = "mesh_topology"``)
names the arrays. Faces of a 2-D mesh and volumes of a 3-D mesh are the cells; a 1-D mesh is a graph. Fields on edges
follow ``edge_node_connectivity`` to both directions of an edge, with a field ``orientation`` that says which is the
file's; ``edges="edge_index"`` takes each of the file's edges once, in its direction. Where there is no mesh variable,
the array whose own ``cf_role`` is ``face_node_connectivity`` describes the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scidata.core.types import ArrayLayout, ByteArray, IntArray, Source
from scidata.errors import (
    ConfigError,
    FieldMismatchError,
    UnknownNameError,
    UnsupportedFormatError,
    check_known,
    near_matches,
)
from scidata.meshes.formats.arrays import (
    cells_of_rows,
    check_start,
    ragged_of_padded,
    read_indices,
    read_padded_rows,
)
from scidata.meshes.formats.base import Options, RawTopology
from scidata.meshes.formats.coordinates import coordinate_columns, is_angle, named_arrays, read_points
from scidata.meshes.geometry import Geometry, RawCells
from scidata.sources.cf import array_of, role_of
from scidata.sources.kinds import ugrid_connectivity, ugrid_meshes

_CELLS = {1: "edge", 2: "face", 3: "volume"}
#: VTK's code and number of nodes of each of UGRID's volume shapes, in the order of its flag meanings
_SHAPES = {"tetrahedron": (10, 4), "pyramid": (14, 5), "wedge": (13, 6), "hexahedron": (12, 8)}


def _entities(dimension: int) -> dict[str, str]:
    """Return the entity that each of UGRID's locations is. Faces of volumes are none that a sample has."""
    return {"node": "node", "edge": "edge", "face": "cell" if dimension == 2 else "face", "volume": "cell"}


@dataclass(frozen=True, kw_only=True)
class UGridTopology(RawTopology):
    """A UGRID mesh. ``coordinates`` and ``connectivity`` name its arrays; ``rows_first`` is False for transposed."""

    connectivity: str
    rows_first: bool
    dimension: int
    edges: str | None = None
    edge_rows_first: bool = True
    shapes: str | None = None

    def load(self) -> Geometry:
        """Read points, cells and edges."""
        points = read_points(self)
        if self.dimension == 1:
            return Geometry(points=points, edge_index=self._edges(self.connectivity, self.rows_first))
        edges = None if self.edges is None or self.mesh_edges else self.load_mesh_edges()
        return Geometry(points=points, cells=self._cells(len(points)), edge_index=edges)

    def load_mesh_edges(self) -> IntArray:
        """Read ``edge_node_connectivity``, 0-based."""
        assert self.edges is not None
        return self._edges(self.edges, self.edge_rows_first)

    def _cells(self, num_nodes: int) -> RawCells:
        rows, padding, start = read_padded_rows(
            self.source, self.connectivity, self.options, num_nodes, rows_first=self.rows_first
        )
        check_start(self.source.arrays[self.connectivity], rows[~padding], num_nodes)
        if self.dimension == 2:
            return cells_of_rows(rows, padding=padding, start_index=start)
        offsets, connectivity = ragged_of_padded(rows, padding=padding, start_index=start)
        return RawCells(offsets=offsets, connectivity=connectivity, cell_type=self._volume_types(np.diff(offsets)))

    def _volume_types(self, sizes: IntArray) -> ByteArray:
        """Return VTK's codes: by ``volume_shape_type``, else by the number of nodes."""
        where = f"{self.source.path}: field {self.connectivity!r}"
        table, flags = {size: (code, size) for code, size in _SHAPES.values()}, sizes
        if self.shapes is not None:
            table = _shape_table(self.source.arrays[self.shapes])
            flags = read_indices(self.source, self.shapes, self.options)
            if flags.shape != sizes.shape:
                raise FieldMismatchError(
                    f"{self.source.path}: field {self.shapes!r} has shape {flags.shape}, but there are {len(sizes)} "
                    "volumes; one value per volume was expected"
                )
        codes, expected = np.zeros(len(sizes), np.uint8), np.zeros(len(sizes), np.int64)
        for flag, (code, size) in table.items():
            codes[flags == flag], expected[flags == flag] = code, size
        wrong = (codes == 0) | (sizes != expected)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise UnsupportedFormatError(
                f"{where}: volume {row} has {int(sizes[row])} nodes, which is not one of the shapes that "
                f"{self.shapes or 'UGRID'} allows: tetrahedron 4, pyramid 5, wedge 6, hexahedron 8"
            )
        return codes

    def _edges(self, name: str, rows_first: bool) -> IntArray:
        rows, padding, start = read_padded_rows(
            self.source, name, self.options, self.sizes["node"], rows_first=rows_first
        )
        if rows.shape[1] != 2:
            raise FieldMismatchError(
                f"{self.source.path}: field {name!r} has {rows.shape[1]} nodes per edge, but 2 were expected"
            )
        return np.ascontiguousarray(np.where(padding, -1, rows - start).T)


def _shape_table(layout: ArrayLayout) -> dict[int, tuple[int, int]]:
    """Return VTK's code and size by flag value, from ``flag_values`` and ``flag_meanings``."""
    values = np.ravel(array_of(layout.attributes.get("flag_values", ())))
    if "flag_values" not in layout.attributes and "flag_range" in layout.attributes:
        ends = np.ravel(array_of(layout.attributes["flag_range"])).tolist()
        if len(ends) == 2 and all(isinstance(end, int) for end in ends) and ends[1] - ends[0] < 256:
            values = np.arange(ends[0], ends[1] + 1)
    meanings = str(layout.attributes.get("flag_meanings", "")).lower().split()
    if len(values) != len(meanings) or not len(values) or values.dtype.kind not in "iu":
        raise FieldMismatchError(
            f"{layout.store}: field {layout.name!r} has {len(values)} flag_values and {len(meanings)} flag_meanings; "
            "as many were expected, such as 'tetrahedron pyramid wedge hexahedron'"
        )
    return {int(v): _SHAPES[m] for v, m in zip(values.tolist(), meanings, strict=True) if m in _SHAPES}


def open_topology(source: Source, options: Options) -> UGridTopology:
    """Describe the mesh of a file.

    Raises UnknownNameError: the mesh variable names an array that is not there; ConfigError: the file has several
    meshes of the highest dimension and none is chosen; FieldMismatchError: connectivity and dimensions do not fit.
    """
    meshes = ugrid_meshes(source)
    if not meshes:
        bare = ugrid_connectivity(source)
        if len(bare) > 1:
            raise ConfigError(f"{source.path}: has several connectivities {bare} and no mesh variable that chooses one")
        attributes: Mapping[str, object] = {"topology_dimension": 2, "face_node_connectivity": bare[0]}
        name = ""
    else:
        name = _choose(source, meshes, options.topology)
        attributes = meshes[name]
    return _describe(source, options, name, attributes)


def _choose(source: Source, meshes: Mapping[str, Mapping[str, object]], wanted: str | None) -> str:
    if wanted is not None:
        check_known(f"{source.path}: no mesh variable", [wanted], meshes)
        return wanted
    dimension = {name: _dimension(attributes) for name, attributes in meshes.items()}
    highest = [name for name, d in dimension.items() if d == max(dimension.values())]
    if len(highest) > 1:
        raise ConfigError(f"{source.path}: has several meshes, {highest}; choose one with topology=")
    return highest[0]


def _dimension(attributes: Mapping[str, object]) -> int:
    """Return the topological dimension: as said, else the highest that there is a connectivity for."""
    said = attributes.get("topology_dimension")
    first = "".join(map(str, array_of(said).reshape(-1)[:1].tolist()))
    if first in ("1", "2", "3"):
        return int(first)
    return max((d for d, location in _CELLS.items() if f"{location}_node_connectivity" in attributes), default=2)


def _describe(source: Source, options: Options, mesh: str, attributes: Mapping[str, object]) -> UGridTopology:
    dimension = _dimension(attributes)
    location = _CELLS[dimension]
    connectivity = _named(source, mesh, attributes, f"{location}_node_connectivity")
    layout = source.arrays[connectivity]
    if len(layout.shape) != 2:
        raise FieldMismatchError(
            f"{source.path}: field {connectivity!r} has shape {layout.shape}, but ({location}s, nodes of each) was "
            "expected"
        )
    coordinates = _coordinates(source, mesh, attributes, options)
    layouts, on_sphere = coordinate_columns([source.arrays[name] for name in coordinates])
    rows_first = _rows_first(layout, attributes.get(f"{location}_dimension"))
    own_edges = dimension > 1 and options.edges == "edge_index"
    edges = _edge_connectivity(source, mesh, attributes, wanted=own_edges) if dimension > 1 else None
    edge_rows = True if edges is None else _rows_first(source.arrays[edges], attributes.get("edge_dimension"))
    entity_of_dim = _entity_dims(source, attributes, dimension)
    sizes = {"node": layouts[0].shape[0]}
    entity_of_dim[layouts[0].dims[0]] = "node"
    entity_of_dim[layout.dims[0 if rows_first else 1]] = _entities(dimension)[location]
    sizes[_entities(dimension)[location]] = layout.shape[0 if rows_first else 1]
    if edges is not None:
        sizes["edge"] = source.arrays[edges].shape[0 if edge_rows else 1]
        entity_of_dim[source.arrays[edges].dims[0 if edge_rows else 1]] = "edge"
    meshes = ugrid_meshes(source)
    structure = _structure(source, mesh, attributes).union(*(_structure(source, n, a) for n, a in meshes.items()))
    shapes = None
    if dimension == 3 and attributes.get("volume_shape_type") is not None:
        shapes = _named(source, mesh, attributes, "volume_shape_type")
    return UGridTopology(
        source=source,
        options=options,
        kind="graph" if dimension == 1 else "mesh",
        on_sphere=on_sphere,
        sizes=sizes,
        entity_of_dim=entity_of_dim,
        entity_of_location=_entities(dimension),
        other_meshes=frozenset(meshes) - {mesh},
        not_fields=structure | {layout.name for layout in layouts},
        coordinates=tuple(layout.name for layout in layouts),
        connectivity=connectivity,
        rows_first=rows_first,
        dimension=dimension,
        edges=edges,
        edge_rows_first=edge_rows,
        shapes=shapes if dimension == 3 else None,
        mesh_edges=edges is not None and not own_edges,
    )


def _edge_connectivity(source: Source, mesh: str, attributes: Mapping[str, object], *, wanted: bool) -> str | None:
    """Return the array of the mesh's edges; None if there is none and the user does not ask for it."""
    try:
        name = _named(source, mesh, attributes, "edge_node_connectivity")
    except UnknownNameError:
        if wanted:
            raise
        return None
    layout = source.arrays[name]
    return name if wanted or (len(layout.shape) == 2 and 2 in layout.shape) else None


def _named(source: Source, mesh: str, attributes: Mapping[str, object], key: str) -> str:
    if key not in attributes:
        raise UnknownNameError(
            f"{source.path}: mesh variable {mesh!r} has no attribute {key}, which names the array that is needed here"
        )
    group = mesh.rpartition("/")[0]
    name = str(attributes[key]).strip()
    for candidate in (f"{group}/{name}" if group else name, name):
        if candidate in source.arrays:
            return candidate
    raise UnknownNameError(
        f"{source.path}: mesh variable {mesh!r} names {name!r} as its {key}, which is not in the file"
        f"{near_matches(name, source.arrays)}"
    )


def _rows_first(layout: ArrayLayout, said: object) -> bool:
    """Say whether the first dimension counts the cells. The mesh variable's word holds; without it, UGRID's order."""
    if said is None or layout.dims[0] == said:
        return True
    if layout.dims[1] == said:
        return False
    if layout.dims[0].startswith("dim_"):
        return True  # written without names of dimensions
    raise FieldMismatchError(
        f"{layout.store}: field {layout.name!r} has dimensions {layout.dims}, none of which is {said!r}, as the mesh "
        "variable says; correct the one or the other"
    )


def _coordinates(source: Source, mesh: str, attributes: Mapping[str, object], options: Options) -> list[str]:
    if options.points is not None:
        return [layout.name for layout in named_arrays(source, options.points)]
    if "node_coordinates" in attributes:
        names = str(attributes["node_coordinates"]).split()
        if len(names) in (2, 3):
            return [_named(source, mesh, {"node_coordinates": name}, "node_coordinates") for name in names]
        raise FieldMismatchError(
            f"{source.path}: mesh variable {mesh!r} has node_coordinates {names}, but 2 or 3 names were expected"
        )
    others = _structure(source, mesh, attributes)
    node_dim = attributes.get("node_dimension")
    by_dim: dict[str, dict[str, str]] = {}
    for name, layout in source.arrays.items():
        if name in others or len(layout.dims) != 1 or (node_dim is not None and layout.dims[0] != node_dim):
            continue
        role = role_of(layout)
        if role in ("X", "Y") and is_angle(layout):
            by_dim.setdefault(layout.dims[0], {}).setdefault(role, name)
    found = [roles for roles in by_dim.values() if len(roles) == 2]
    if len(found) != 1:
        raise FieldMismatchError(
            f"{source.path}: mesh variable {mesh!r} has no node_coordinates, and {len(found)} pairs of arrays are "
            "longitude and latitude by their units; name the nodes' coordinates with points="
        )
    return [found[0]["X"], found[0]["Y"]]


def _entity_dims(source: Source, attributes: Mapping[str, object], dimension: int) -> dict[str, str]:
    """Return the entity of each dimension that the mesh variable names or that its connectivities have."""
    entity_of_dim: dict[str, str] = {}
    for location, entity in _entities(dimension).items():
        said = attributes.get(f"{location}_dimension")
        connectivity = source.arrays.get(str(attributes.get(f"{location}_node_connectivity")))
        if said is not None:
            entity_of_dim[str(said)] = entity
        elif connectivity is not None:
            entity_of_dim[connectivity.dims[0]] = entity
    return entity_of_dim


def _structure(source: Source, mesh: str, attributes: Mapping[str, object]) -> frozenset[str]:
    names = {mesh}
    group = mesh.rpartition("/")[0]
    for key, value in attributes.items():
        if key.endswith(("_connectivity", "_coordinates", "_shape_type")):
            names |= {name for word in str(value).split() for name in (word, f"{group}/{word}")}
    for name in list(names):
        bounds = source.arrays[name].attributes.get("bounds") if name in source.arrays else None
        if bounds is not None:
            names.add(str(bounds))
    return frozenset(names)
