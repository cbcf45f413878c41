"""One raw mesh, cloud or graph of one or more node sets: by its metadata, and with its topology in memory.

Made by ``samples``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scidata.core.types import IntArray
from scidata.errors import ConfigError, CorruptDataError, near_matches
from scidata.meshes.formats.base import RawField, RawTopology, damage_named, read_graph_values
from scidata.meshes.geometry import Geometry
from scidata.meshes.hetero import JOINT, RawSet, relation_ends

KINDS = ("mesh", "points", "graph")
_EDGE_RULES = ("edge_index", "cells", "faces", "nodes", "knn", "radius")


@dataclass(frozen=True, kw_only=True, eq=False)
class RawSample(Geometry):
    """One mesh, cloud or graph: topology in memory, fields not read yet.

    Most samples have one node set, whose positions and edges are ``points`` and ``edge_index``. A graph between
    several sets, of kind ``"hetero"``, has ``sets`` and ``relations`` in their place.

    ``points``: ``(N, 2 or 3)`` float64, the nodes (or points); None for a graph without positions. On a sphere:
    longitude and latitude in degrees (and height, where there is a third).
    ``cells``: cells of a mesh, or None.
    ``edge_index``: ``(2, E)`` int64, source and destination of the edges that the file has; None if there are none
    or where ``edges`` says how they are made. Fields of edges are in this order.
    """

    name: str  # unlike that of any other sample
    kind: str  # ``"mesh"``, ``"points"``, ``"graph"`` or ``"hetero"``
    on_sphere: bool = False  # True if ``points`` are longitude and latitude
    # the rows of a sample: ``"node"`` (``"point"`` of a cloud), or ``"cell"``: then it has fields of cells alone;
    # ``"joint"`` of several sets
    entity: str = ""
    # ``"edge_index"``, ``"cells"``, ``"faces"``, ``"nodes"``, ``"knn:8"``, ``"radius:0.1"`` or None (a cloud): where
    # edges come from. With ``"nodes"``, ``edge_index`` has those across the faces of polyhedra
    edges: str | None = None
    # by name. A name that two entities have is ``node/<name>`` and ``cell/<name>``
    fields: Mapping[str, RawField] = field(default_factory=dict)
    # ``(2, num_mesh_edges)`` int64: nodes of the file's undirected edges, where ``edges`` are made of the cells and
    # fields live on the file's; else None
    mesh_edges: IntArray | None = None
    num_nodes: int = -1  # nodes or points; needs saying only if ``points`` is None
    # width of the domain along each coordinate in which it wraps, 0 if it does not; None if it does in none
    period: tuple[float, ...] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)  # arrays that are no field of this sample, and why
    # of the whole sample: arrays of any shape, or anything that JSON has. Of several sets, ``<set>/<name>`` and
    # ``<relation>/<name>`` are of one
    values: Mapping[str, Any] = field(default_factory=dict)
    # sets, relations: of several sets, by name; of a relation ``(2, num_edges)`` int64, rows of its source set and of
    # its target set
    sets: Mapping[str, RawSet] = field(default_factory=dict)
    relations: Mapping[str, IntArray] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)  # of each entity, if they are not in memory
    # True if the rows of a mesh are stored as points: of a cloud, or, with edges, as nodes of a graph
    as_points: bool = False
    # geometry of the rows that is stored, too, by name; of ``sdf`` its surface
    measures: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind == "hetero":
            object.__setattr__(self, "entity", JOINT)
            for relation in self.relations:
                source, target = relation_ends(relation)
                for end in (source, target):
                    if end not in self.sets:
                        raise CorruptDataError(
                            f"sample {self.name}: relation {relation!r} joins {source!r} and {target!r}, but there is "
                            f"no node set {end!r}; there are {', '.join(self.sets)}"
                        )
            return
        if self.kind not in KINDS:
            raise ConfigError(f"sample {self.name!r}: kind must be one of {KINDS}, not {self.kind!r}")
        if not self.entity:
            object.__setattr__(self, "entity", row_entity(self.kind))
        if self.points is not None and self.num_nodes in (-1, len(self.points)):
            object.__setattr__(self, "num_nodes", len(self.points))
        elif self.points is not None or self.num_nodes < 0:
            found = "no points" if self.points is None else f"{len(self.points)} points"
            raise ConfigError(
                f"sample {self.name!r}: has {found} and num_nodes {self.num_nodes}; say the number of nodes"
            )

    @property
    def stored_as(self) -> tuple[str, str]:
        """The kind, and the entity of the rows, in the store."""
        return stored_kind(self.as_points, self.edges) or (self.kind, self.entity)

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each entity that is known yet."""
        if self.counts:
            return dict(self.counts)
        if self.sets:
            sets = {name: each.num_nodes for name, each in self.sets.items()}
            return {JOINT: sum(sets.values()), **sets, **{name: x.shape[1] for name, x in self.relations.items()}}
        rows_are_cells = self.entity == "cell" and self.cells is None
        sizes = {self.entity: self.num_nodes} if self.entity != "cell" or rows_are_cells else {}
        if self.cells is not None:
            sizes["cell"] = self.cells.num_cells
        own = self.edge_index if self.edge_index is not None else self.mesh_edges
        if own is not None and self.edges != "nodes":
            sizes["edge"] = own.shape[1]
        return sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleHeader:
    """One sample by its metadata; :meth:`read` reads its topology. Pickles."""

    name: str  # unlike that of any other sample
    topology: RawTopology  # where points, cells and edges are found, and how many there are: ``topology.sizes``
    # entity, edges, fields, left_out: as in :class:`RawSample`
    entity: str
    edges: str | None
    fields: Mapping[str, RawField]
    left_out: Mapping[str, str]
    paths: tuple[str, ...]  # the files it is read from
    values: tuple[str, ...] = ()  # names of the values of the whole sample
    # as_points, measures: as in :class:`RawSample`
    as_points: bool = False
    measures: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """``"mesh"``, ``"points"`` or ``"graph"``."""
        return (stored_kind(self.as_points, self.edges) or (self.topology.kind,))[0]

    def read(self) -> RawSample:
        """Read points, cells and edges.

        Raises CorruptDataError, FieldMismatchError, UnsupportedFormatError: arrays of the topology do not fit together,
        or hold something that is not read.
        """
        with damage_named(self.topology.source.path):
            geometry = self.topology.load()
            mesh_edges = self.topology.load_mesh_edges() if self.on_mesh_edges else None
        return self.described(
            points=geometry.points,
            cells=geometry.cells,
            edge_index=geometry.edge_index if self._edges in ("edge_index", "nodes") else None,
            corners=geometry.corners,
            mesh_edges=mesh_edges,
        )

    @property
    def on_mesh_edges(self) -> bool:
        """Whether fields live on mesh edges, and follow to the edges that are made of the cells."""
        return self.edges == "cells" and any(f.entity == "edge" for f in self.fields.values())

    @property
    def _edges(self) -> str | None:
        return "edge_index" if self.topology.cells_are_rows and self.edges == "faces" else self.edges

    def described(self, **geometry: Any) -> RawSample:
        """Return the sample, with the points, cells and edges that are given, and the values of the whole."""
        with damage_named(self.topology.source.path):
            values = read_graph_values(self.topology.source, self.values, self.topology.options)
        if self.as_points and self.entity == "node" and not self.measures:
            geometry["cells"] = None
        return RawSample(
            **geometry,
            name=self.name,
            kind=self.topology.kind,
            on_sphere=self.topology.on_sphere,
            entity=self.entity,
            edges=self._edges,
            fields=self.fields,
            num_nodes=self.topology.sizes["cell" if self.topology.cells_are_rows else row_entity(self.topology.kind)],
            period=self.topology.period,
            left_out=self.left_out,
            values=values,
            as_points=self.as_points,
            measures=self.measures,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class HeteroHeader:
    """One graph between several node sets by its metadata; :meth:`read` reads its topology. Pickles."""

    name: str
    sizes: Mapping[str, int | None]  # rows of each entity; None if edges are made, and not counted yet
    on_sphere: bool
    # fields, left_out, paths: as in :class:`SampleHeader`
    fields: Mapping[str, RawField]
    left_out: Mapping[str, str]
    paths: tuple[str, ...]
    # reads, or makes, the sets and relations, and the fields that are made of these
    load: Callable[[HeteroHeader], RawSample]

    kind = "hetero"
    entity = JOINT

    def read(self) -> RawSample:
        """Read points and edges. Raises the errors of :meth:`SampleHeader.read`."""
        with damage_named(", ".join(self.paths)):
            return self.load(self)


def stored_kind(as_points: bool, edges: str | None) -> tuple[str, str] | None:
    """Return the kind and the rows' entity of a mesh that is stored as points; None of one that is not."""
    if not as_points:
        return None
    return ("points", "point") if edges is None else ("graph", "node")


def row_entity(kind: str) -> str:
    """Return the entity of the rows of a sample of some kind, where these are not its cells."""
    return "point" if kind == "points" else "node"


def parse_edges(edges: str) -> tuple[str, float]:
    """Take ``"knn:8"`` apart into ``("knn", 8)``; rules without a number give 0."""
    rule, _, number = str(edges).partition(":")
    if rule in _EDGE_RULES[:4] and not number:
        return rule, 0.0
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if rule not in ("knn", "radius") or not np.isfinite(value) or value <= 0 or (rule == "knn" and value != int(value)):
        hint = "" if rule in _EDGE_RULES else near_matches(rule, _EDGE_RULES, listed=False)
        if joined := re.fullmatch(r"(knn|radius)[^\w.:]*([\d.]+)", str(edges)):
            hint = f"; did you mean '{joined[1]}:{joined[2]}'?"
        raise ConfigError(
            f"edges={edges!r}: expected 'edge_index', 'cells', 'faces', 'nodes', 'knn:8' (neighbours) or 'radius:0.1' "
            f"(in the unit of the points){hint}"
        )
    return rule, value
