"""Graphs between node sets that are built: the points of a file, generated meshes, and edges found between them.

``nodes`` says where each set comes from, ``edges`` how each relation is found:

================= ==============================================================================================
``"file"``        the grid points, nodes or points of the input, with its fields
``"icosahedral:6"`` an icosahedron, refined 6 times: GraphCast's mesh
``"healpix:64"``  the pixels of HEALPix, nested (extra ``healpix``)
``"gaussian:O96"`` an octahedral reduced Gaussian grid
``"gaussian:FILE"`` a reduced one, N320 say, by its points on each latitude: of a text file, or of a data set, where
                    they are ``reduced_points`` or ``pl``; in Python also the numbers themselves
``"latlon:1.0"``  a regular grid, by its step in degrees
``"voxel:0.1"``   the means of the input's points in cubes of that side: a coarser level of a cloud
``"farthest:512"`` so many of the input's points, each the farthest from those before it
================= ==============================================================================================

================= ==============================================================================================
``"knn:3"``       to each target from its nearest sources
``"radius:1.5"``  from all sources at most so far away: on a sphere an arc in degrees, else in the points' unit
``"spacing:0.6"`` the same, in longest sides of the cells of the mesh at either end: GraphCast's way to the mesh
``"containing"``  from the corners of the source's cell that the target lies in: GraphCast's way back
``"levels"``      of a refined icosahedron to itself: the edges of all levels (``"levels:4-6"`` of some)
``"cells"``       of a set to itself: the sides of its cells, both ways
================= ==============================================================================================

Built relations have the field ``edge_attr``, ``(num_edges, 4)``: length and direction, as GraphCast has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scidata.core.types import AnyArray, ArrayLayout, FloatArray, IntArray, Source
from scidata.errors import ConfigError, UnknownNameError, UnsupportedFormatError, check_known, near_matches
from scidata.meshes.formats.base import ArrayReader, Box, RawField
from scidata.meshes.hetero import RawSet, check_set_name, relation_parts
from scidata.meshes.order.cells import edges_of_cells
from scidata.meshes.order.positions import cell_centres
from scidata.meshes.reduced_points import gaussian_of_rule, resolved_nodes
from scidata.meshes.sample import HeteroHeader, RawSample, SampleHeader
from scidata.meshes.sets.coarse import farthest, voxels
from scidata.meshes.sets.containing import containing_cell_edges
from scidata.meshes.sets.grids import healpix, lat_lon, latitude_longitude
from scidata.meshes.sets.icosahedral import icosahedral, multi_mesh_edges
from scidata.meshes.sets.neighbours import edge_features, longest_edge, nearest_edges, radius_edges
from scidata.meshes.sets.node_set import NodeSet
from scidata.read.arrays import read_array
from scidata.sources.cf import role_of
from scidata.sources.kinds import data_fields, dim_roles

_FILE = "file"
_NODES: Mapping[str, tuple[str, Callable[[str], NodeSet]]] = {
    "icosahedral": ("a level, icosahedral:6", lambda text: icosahedral(int(text))),
    "healpix": ("nside, healpix:64", lambda text: healpix(int(text))),
    "gaussian": ("a grid, gaussian:O96", gaussian_of_rule),
    "latlon": ("a step in degrees, latlon:1.0", lambda text: lat_lon(float(text))),
}
#: Made of the set that comes from the file.
_COARSE: Mapping[str, tuple[str, Callable[[NodeSet, str], NodeSet]]] = {
    "voxel": ("a side, voxel:0.1", lambda nodes, text: voxels(nodes, float(text))),
    "farthest": ("a number of points, farthest:512", lambda nodes, text: farthest(nodes, int(text))),
}
_EDGES = ("knn", "radius", "spacing", "containing", "levels", "cells")
_WITH_NUMBER = ("knn", "radius", "spacing")


@dataclass(frozen=True, kw_only=True)
class Build:
    """A graph to be built: the rule of each node set and of each relation.

    Raises ConfigError, UnknownNameError: a rule that there is not, a relation whose sets are not named, no set or
    several from the file.
    """

    nodes: Mapping[str, str]
    edges: Mapping[str, str]

    def __post_init__(self) -> None:
        for name, rule in self.nodes.items():
            check_set_name(str(name), "nodes")
            kind, _, rest = str(rule).partition(":")
            rules = {**_NODES, **_COARSE}
            if rule != _FILE and (kind not in rules or not rest):
                about = f": it takes {rules[kind][0]}" if kind in rules else near_matches(kind, [_FILE, *rules])
                raise ConfigError(f"nodes: {name!r} cannot be {rule!r}{about}")
        if list(self.nodes.values()).count(_FILE) != 1:
            raise ConfigError(f"nodes: one set is that of the file, {{'grid': 'file'}}; there are {dict(self.nodes)}")
        for relation, rule in self.edges.items():
            parts = relation_parts(str(relation))
            if parts is None:
                raise ConfigError(f"edges: {relation!r} is no relation: 'source__name__target', as 'grid__to__mesh'")
            check_known(f"edges: {relation!r}: no node set", parts[::2], self.nodes)
            _check_rule(relation, str(rule), parts, self.nodes)


def as_build(nodes: Any, edges: Any) -> Build | None:
    """Return the graph to be built; None if ``nodes`` is."""
    if nodes is None:
        return None
    if not isinstance(nodes, Mapping) or not isinstance(edges, Mapping) or not edges:
        raise ConfigError(
            "nodes and edges are given together, by set and by relation: nodes={'grid': 'file', 'mesh': "
            "'icosahedral:4'}, edges={'grid__to__mesh': 'spacing:0.6'}"
        )
    return Build(nodes=resolved_nodes(nodes), edges={str(key): rule for key, rule in edges.items()})


def _check_rule(relation: str, rule: str, parts: tuple[str, str, str], nodes: Mapping[str, str]) -> None:
    kind, colon, number = rule.partition(":")
    if kind not in _EDGES:
        raise ConfigError(f"edges: {relation!r} cannot be {rule!r}{near_matches(kind, _EDGES)}")
    if kind in _WITH_NUMBER:
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not 0 < value < np.inf or (kind == "knn" and value != int(value)):
            raise ConfigError(f"edges: {relation!r}: {rule!r} needs a number above 0, as in '{kind}:3'")
    elif colon and kind != "levels":
        raise ConfigError(f"edges: {relation!r}: {rule!r}: {kind!r} takes no number")
    if kind in ("levels", "cells") and parts[0] != parts[2]:
        raise ConfigError(f"edges: {relation!r}: {kind!r} are edges of a set to itself")
    if kind == "levels":
        if not nodes[parts[0]].startswith("icosahedral:"):
            raise ConfigError(f"edges: {relation!r}: 'levels' are those of a refined icosahedron, icosahedral:6")
        _levels(relation, number, int(nodes[parts[0]].partition(":")[2]))


def _levels(relation: str, text: str, finest: int) -> list[int]:
    first, dash, last = text.partition("-")
    try:
        low, high = (0, finest) if not text else (int(first), int(last if dash else first))
    except ValueError:
        low, high = -1, -1
    if not 0 <= low <= high <= finest:
        raise ConfigError(f"edges: {relation!r}: levels {text!r} are none of 0-{finest}; give 'levels' or 'levels:2-4'")
    return list(range(low, high + 1))


# -- one sample --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _FileSet:
    """The set that comes from the file: how its nodes are made, and their fields."""

    make: Callable[[], NodeSet]
    num_nodes: int
    on_sphere: bool
    fields: Mapping[str, RawField]
    left_out: Mapping[str, str] = field(default_factory=dict)


def build_header(
    name: str, build: Build, source: Source | None, paths: tuple[str, ...], wanted: Sequence[str] | None,
    header: Callable[[], SampleHeader] | None, *, allow_missing: bool,
) -> HeteroHeader:  # fmt: skip
    """Describe the graph that is built around a file.

    ``header``: describes the file as a mesh or a cloud; None if it is a grid.
    """
    own = next(each for each, rule in build.nodes.items() if rule == _FILE)
    if header is not None:
        of_file = _mesh_of(header(), own)
    else:
        assert source is not None  # a grid has one
        of_file = _grid_of(source, own, wanted, allow_missing)
    making = _Making(build=build, own=own, file=of_file.make)
    fields = dict(of_file.fields)
    for relation in build.edges:
        target = f"{relation}/edge_attr"
        reader = _Feature(making=making, relation=relation)
        fields[target] = RawField(
            name=target, entity=relation, dims=(relation, "feature"), shape=(-1, -1), entity_dim=0,
            dtype=np.dtype(np.float64), reader=reader, attributes={"long_name": "length, direction to the source"},
        )  # fmt: skip
    return HeteroHeader(
        name=name,
        sizes={"joint": None, own: of_file.num_nodes, **{each: None for each in build.nodes if each != own},
               **dict.fromkeys(build.edges)},
        on_sphere=of_file.on_sphere,
        fields=fields,
        left_out=of_file.left_out,
        paths=paths,
        load=making,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class _Making:
    """Makes the sets and the edges of a sample, once."""

    build: Build
    own: str
    file: Callable[[], NodeSet]

    def __getstate__(self) -> dict[str, Any]:
        return {"build": self.build, "own": self.own, "file": self.file}

    @functools.cached_property
    def sets(self) -> dict[str, NodeSet]:
        return {name: self._set(rule) for name, rule in self.build.nodes.items()}

    @functools.cached_property
    def relations(self) -> dict[str, IntArray]:
        return {name: self._edges(name, rule) for name, rule in self.build.edges.items()}

    @functools.cached_property
    def of_file(self) -> NodeSet:
        return self.file()

    def _set(self, rule: str) -> NodeSet:
        if rule == _FILE:
            return self.of_file
        kind, _, rest = rule.partition(":")
        about = {**_NODES, **_COARSE}[kind][0]
        try:
            return _COARSE[kind][1](self.of_file, rest) if kind in _COARSE else _NODES[kind][1](rest)
        except ConfigError as e:
            raise ConfigError(f"nodes: {kind}: {e}") from None
        except ValueError:
            raise ConfigError(f"nodes: {rule!r} takes {about}") from None

    def _edges(self, relation: str, rule: str) -> IntArray:
        of, _, to = relation_parts(relation) or ("", "", "")
        source, target = self.sets[of], self.sets[to]
        kind, _, number = rule.partition(":")
        if kind == "levels":
            return multi_mesh_edges(_levels(relation, number, int(self.build.nodes[of].partition(":")[2])))
        if kind == "cells":
            if source.cells is None:
                raise ConfigError(f"edges: {relation!r}: node set {of!r} has no cells")
            return edges_of_cells(source.cells, source.num_nodes)
        try:
            if kind == "containing":
                found = containing_cell_edges(source, target)
            elif kind == "knn":
                found = nearest_edges(source, target, int(float(number)) + (of == to))
            else:
                found = radius_edges(source, target, _reach(source, target, kind, float(number)))
        except ConfigError as e:
            raise ConfigError(f"edges: {relation!r}, {rule!r}: {e}") from None
        return found if of != to else found[:, found[0] != found[1]]

    def __call__(self, header: HeteroHeader) -> RawSample:
        fields = dict(header.fields)
        for name, each in fields.items():
            if isinstance(each.reader, _Feature):  # now that the edges are made
                values = each.reader.values()
                fields[name] = replace(each, shape=values.shape, reader=values.__getitem__)
        return RawSample(
            name=header.name,
            kind=header.kind,
            sets={name: RawSet(num_nodes=each.num_nodes, points=each.points) for name, each in self.sets.items()},
            relations=self.relations,
            on_sphere=header.on_sphere,
            fields=fields,
            left_out=header.left_out,
        )


def _reach(source: NodeSet, target: NodeSet, kind: str, number: float) -> float:
    """Return a radius as the search takes it."""
    if kind == "radius":
        return float(2 * np.sin(np.deg2rad(min(number, 180.0)) / 2)) if source.on_sphere else number
    meshes = [each for each in (target, source) if each.cells is not None]
    if not meshes:
        raise ConfigError("a spacing is that of a mesh, and neither set has cells; give 'radius:' or 'knn:'")
    mesh = meshes[0]
    assert mesh.cells is not None
    return number * longest_edge(mesh, edges_of_cells(mesh.cells, mesh.num_nodes))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Feature:
    """Reads the features of the edges of a relation, which are made of the sets."""

    making: _Making
    relation: str

    def values(self) -> FloatArray:
        of, _, to = relation_parts(self.relation) or ("", "", "")
        sets, pairs = self.making.sets, self.making.relations[self.relation]
        return edge_features(sets[of], sets[to], pairs)

    def __call__(self, box: Box) -> AnyArray:
        return self.values()[box]


# -- sets of files -----------------------------------------------------------------------------------------------------


def _mesh_of(header: SampleHeader, own: str) -> _FileSet:
    def make() -> NodeSet:
        raw = header.read()
        if raw.points is None:
            raise ConfigError(f"sample {raw.name}: has no positions, which edges between sets are found by")
        points, cells = raw.points, raw.cells
        if raw.entity == "cell" and cells is not None:
            points, cells = cell_centres(points, cells, on_sphere=raw.on_sphere, period=raw.period), None
        return NodeSet(points=points[:, :2] if raw.on_sphere else points, on_sphere=raw.on_sphere, cells=cells)

    fields = {
        f"{own}/{each.base}": replace(each, name=f"{own}/{each.base}", entity=own)
        for each in header.fields.values()
        if each.entity == header.entity
    }
    left_out = dict(header.left_out)
    left_out |= {
        name: f"lives on {each.entity}; of a built graph the {header.entity}s are a set"
        for name, each in header.fields.items()
        if each.entity != header.entity
    }
    num = header.topology.sizes[header.entity]
    return _FileSet(make=make, num_nodes=num, on_sphere=header.topology.on_sphere, fields=fields, left_out=left_out)


@dataclass(frozen=True, kw_only=True)
class _GridRows:
    """Reads a field of a grid with its two dimensions of space as one, row by row."""

    part: ArrayReader
    rows: int  # which dimension of the file
    columns: int
    num_columns: int

    def __call__(self, box: Box) -> AnyArray:
        layout = self.part.layout
        at = min(self.rows, self.columns)
        num_rows = layout.shape[self.rows] * self.num_columns
        wanted = range(*box[at].indices(num_rows))
        first = wanted.start // self.num_columns
        last = -(-(wanted[-1] + 1) // self.num_columns) if len(wanted) else first
        others = list(box[:at]) + list(box[at + 1 :])
        inner: list[slice] = []
        for dim in range(len(layout.shape)):
            if dim == self.rows:
                inner.append(slice(first, last))
            elif dim == self.columns:
                inner.append(slice(None))
            else:
                inner.append(others.pop(0))
        values = np.moveaxis(self.part(tuple(inner)), (self.rows, self.columns), (at, at + 1))
        flat = values.reshape(*values.shape[:at], -1, *values.shape[at + 2 :])
        start = wanted.start - first * self.num_columns
        rows = slice(start, start + wanted.step * len(wanted), wanted.step)
        return np.ascontiguousarray(flat[(slice(None),) * at + (rows,)])


def _grid_of(source: Source, own: str, wanted: Sequence[str] | None, allow_missing: bool) -> _FileSet:
    """Describe the points of a grid, and its fields by row."""
    places: dict[str, tuple[int, int]] = {}
    left_out: dict[str, str] = {}
    for name in data_fields(source):
        layout = source.arrays[name]
        roles = dim_roles(source, layout.dims)
        found = {role: layout.dims.index(dim) for dim, role in roles.items() if role in ("Y", "X")}
        if len(found) == 2:
            places[name] = found["Y"], found["X"]
        else:
            left_out[name] = "has no two dimensions of space"
    if not places:
        raise UnsupportedFormatError(f"{source.path}: no field lies on a latitude and a longitude, rows and columns")
    first = next(iter(places))
    dims = tuple(source.arrays[first].dims[i] for i in places[first])
    for name in wanted or ():
        if name not in source.arrays:
            raise UnknownNameError(f"{source.path}: no field {name!r}{near_matches(name, places)}")
    fields = {}
    for name, (rows, columns) in places.items():
        layout = source.arrays[name]
        if wanted is not None and name not in wanted:
            continue
        if (layout.dims[rows], layout.dims[columns]) != dims:
            left_out[name] = f"lies on {layout.dims[rows]} x {layout.dims[columns]}, not on {' x '.join(dims)}"
            continue
        fields[f"{own}/{name}"] = _grid_field(source, layout, own, rows, columns, allow_missing)
    shape = tuple(source.arrays[first].shape[i] for i in places[first])
    return _FileSet(
        make=_GridPoints(source=source, dims=dims, shape=shape),
        num_nodes=shape[0] * shape[1], on_sphere=True, fields=fields, left_out=left_out,
    )  # fmt: skip


def _grid_field(
    source: Source, layout: ArrayLayout, own: str, rows: int, columns: int, allow_missing: bool
) -> RawField:
    part = ArrayReader(source=source, layout=layout, allow_missing=allow_missing)
    at = min(rows, columns)

    def flat(values: Sequence[Any], one: Any) -> tuple[Any, ...]:
        kept = [value for i, value in enumerate(values) if i not in (rows, columns)]
        return (*kept[:at], one, *kept[at:])

    return RawField(
        name=f"{own}/{layout.name}",
        entity=own,
        dims=flat(layout.dims, own),
        shape=flat(layout.shape, layout.shape[rows] * layout.shape[columns]),
        entity_dim=at,
        dtype=part.dtype,
        reader=_GridRows(part=part, rows=rows, columns=columns, num_columns=layout.shape[columns]),
        attributes=layout.attributes,
    )


@dataclass(frozen=True, kw_only=True)
class _GridPoints:
    """Reads the longitude and latitude of each point of a grid, row by row."""

    source: Source
    dims: tuple[str, ...]
    shape: tuple[int, ...]

    def __call__(self) -> NodeSet:
        arrays = self.source.arrays
        single = [arrays.get(dim) for dim in self.dims]
        if all(layout is not None and layout.dims == (dim,) for layout, dim in zip(single, self.dims, strict=True)):
            lat, lon = (read_array(self.source, layout) for layout in single if layout is not None)
            return latitude_longitude(lat.astype(np.float64), lon.astype(np.float64))
        every = [layout for layout in arrays.values() if layout.dims == self.dims]
        found = {role: layout for layout in every if (role := role_of(layout)) in ("Y", "X")}
        if len(found) < 2:
            raise UnsupportedFormatError(
                f"{self.source.path}: nothing says the longitude and latitude of {' x '.join(self.dims)}, which edges "
                "between sets are found by"
            )
        points = [read_array(self.source, found[role]).astype(np.float64).reshape(-1) for role in ("X", "Y")]
        return NodeSet(points=np.stack(points, axis=1), on_sphere=True)
