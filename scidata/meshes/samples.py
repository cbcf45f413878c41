"""Raw meshes, point clouds and graphs of any format as samples, which ``scidata partition`` starts from.

:func:`read_samples` looks at metadata alone; ``samples[i]`` reads the points, cells and edges of one; its fields are
read by ranges of rows when asked for. What the formats are: the modules of ``scidata.meshes.formats``. The layout to
write if none is given: ``scidata.meshes.formats.plain``, ``points`` and ``graph``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeAlias

from scidata.core.checks import names_of
from scidata.core.types import Source
from scidata.errors import ConfigError, FieldMismatchError, UnknownNameError, UnsupportedFormatError, near_matches
from scidata.meshes.build import Build, as_build, build_header
from scidata.meshes.formats import esmf, exodus, fluent, foam, graph, meshio, mpas, plain, points, ugrid, vtkhdf
from scidata.meshes.formats.base import (
    Options,
    RawField,
    RawTopology,
    base_name,
    damage_named,
    find_graph_values,
    is_wanted,
)
from scidata.meshes.formats.columns import with_columns
from scidata.meshes.formats.fields import combine_fields, find_fields, short_names
from scidata.meshes.formats.hetero import open_hetero
from scidata.meshes.formats.vtk_pieces import SUFFIXES as VTK_SUFFIXES
from scidata.meshes.order.measures import SIZES, AskedGeometry, as_geometry, surface_of_sample
from scidata.meshes.sample import KINDS, HeteroHeader, RawSample, SampleHeader, parse_edges, row_entity
from scidata.sources import open_source
from scidata.sources.collections import PARALLEL, parts_of
from scidata.sources.kinds import (
    RELATION,
    check_kind,
    check_no_mesh,
    has_cells,
    has_edges,
    has_points,
    is_esmf,
    is_exodus,
    is_mpas,
    is_ugrid,
    is_vtkhdf,
    kind_of,
)
from scidata.sources.paths import expand_paths
from scidata.sources.unfinished import check_finished

_Format: TypeAlias = tuple[Callable[[Source], bool], ModuleType]

_GRAPH: _Format = has_edges, graph
_POINTS: _Format = has_points, points
#: Formats in the order in which they are asked whether a file is theirs.
_MESHES: tuple[_Format, ...] = (
    (is_vtkhdf, vtkhdf),
    (is_ugrid, ugrid),
    (is_mpas, mpas),
    (is_exodus, exodus),
    (is_esmf, esmf),
    (has_cells, plain),
)
_OWN_COORDINATES = (vtkhdf, mpas, exodus, esmf)


class RawSamples:
    """Samples whose topology is read at ``samples[i]``, each time anew; it pickles.

    :meth:`header` reads metadata alone.
    """

    def __init__(self, names: Sequence[str], paths: Sequence[tuple[str, ...]], reading: _Reading) -> None:
        self.names = tuple(names)
        self._paths = tuple(paths)
        self._reading = reading

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> RawSample:
        return self.header(index).read()

    @property
    def files(self) -> list[str]:
        """The files of all samples, then that of the topology, where the fields are in others."""
        mesh = self._reading.mesh
        return [path for paths in self._paths for path in paths] + ([mesh] if mesh else [])

    def inputs(self, index: int) -> tuple[str, ...]:
        """Return the files that a sample is read from; nothing is opened."""
        mesh, paths = self._reading.mesh, self._paths[index]
        surface = surface_of_sample(self._reading.measures, self.names[index], paths[0])
        every = (*(() if mesh is None or mesh in paths else (mesh,)), *paths)
        pieces = (part for path in every for part in parts_of(path) if part != path)
        return (*every, *pieces, *surface)

    def header(self, index: int) -> SampleHeader | HeteroHeader:
        """Describe a sample: sizes, fields, dtypes, without reading values."""
        with damage_named(", ".join(self.inputs(index))):
            return self._reading.header(self.names[index], self._paths[index])


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """The arguments of :func:`read_samples`, checked."""

    kind: str | None
    mesh: str | None
    entity: str | None
    fields: tuple[str, ...] | None
    options: Options
    allow_external: bool
    build: Build | None = None
    measures: Mapping[str, str] | None = None
    of_files: bool = False

    def header(self, name: str, paths: tuple[str, ...]) -> SampleHeader | HeteroHeader:
        """Describe the sample that some files hold together."""
        if (several := self._hetero(name, paths)) is not None:
            return several
        topology = self._topology(self.mesh if self.mesh is not None else paths[0])
        if self.options.topology is not None and not isinstance(topology, ugrid.UGridTopology | foam.FoamTopology):
            raise ConfigError(
                f"{topology.source.path}: topology={self.options.topology!r} names one of several meshes of a UGRID "
                "file or of OpenFOAM's regions, which this is not; leave it out"
            )
        found: list[tuple[Source, dict[str, RawField]]] = []
        left_out: dict[str, str] = dict(topology.left_out)
        sources = [topology.source]
        sources += [self._open(path) for path in paths if path != topology.source.path]
        for source in sources:
            if source is topology.source and topology.fields is not None:
                fields = {n: f for n, f in topology.fields.items() if is_wanted(n, self.fields)}
            else:
                fields, reasons = find_fields(topology, source, self.fields)
                left_out.update(reasons)
            if not fields and self.fields is None and source is not topology.source:
                reasons = {n: reason for n, reason in left_out.items() if n in source.arrays}
                shown = "; ".join(f"{n} {reason}" for n, reason in list(reasons.items())[:3]) or "it has no arrays"
                raise FieldMismatchError(
                    f"{source.path}: has no field of the topology in {topology.source.path}: {shown}"
                )
            found.append((source, fields))
        # files beside the topology's own continue each other; their fields replace those in the topology's file
        every = {name for source in sources[1:] for name in source.arrays}
        every |= set(topology.source.arrays if topology.fields is None else topology.fields)
        combined = short_names({**found[0][1], **combine_fields(found[1:])}, every)
        entity = "cell" if topology.cells_are_rows else self.entity
        as_points = self.kind == "points" and topology.kind == "mesh"
        flat = topology.period is None and not (topology.on_sphere or topology.cells_are_rows)
        measures = self.measures
        if measures is None:
            measures = dict.fromkeys(SIZES if as_points and entity == "cell" and flat else (), "")
        elif surface := surface_of_sample(measures, name, paths[0]):
            measures = {**measures, "sdf": surface[0]}
        edges = self.options.edges if as_points else self._edges(topology, entity)
        reasons = {}
        if as_points:
            others = "the source's nodes; entity='cell' takes its cells" if entity is None else "its cells"
            reasons = dict.fromkeys(("node", "cell", "edge"), f"lives elsewhere than the points, which are {others}")
            del reasons[entity or "node"]
        if edges not in (None, "edge_index") and not (edges == "cells" and topology.mesh_edges):
            reasons["edge"] = f"lives on the file's edges, but edges are made ({edges})"
        if entity == "cell":
            reasons["node"] = "lives on the nodes, but rows are cells (entity='cell')"
        left_out |= {n: reasons[f.entity] for n, f in combined.items() if f.entity in reasons}
        combined = {n: f for n, f in combined.items() if f.entity not in reasons}
        values: tuple[str, ...] = ()
        if topology.leading_only:
            values, too_large = find_graph_values(topology.source, self.fields)
            left_out |= too_large
        known = every if topology.fields is None else set(map(base_name, every))
        self._check_names(combined, left_out, sources, known, values)
        return SampleHeader(
            name=name,
            topology=topology,
            entity=entity or row_entity(topology.kind),
            edges=edges,
            fields=combined,
            left_out={n: reason for n, reason in left_out.items() if n not in combined},
            paths=tuple(source.path for source in sources),
            values=values,
            as_points=as_points,
            measures=measures,
        )

    def _hetero(self, name: str, paths: tuple[str, ...]) -> HeteroHeader | None:
        """Describe a graph between several node sets; None if the file is something else."""
        if self.build is not None:
            return self._built(self.build, name, paths)
        if self.kind not in (None, "hetero") or self.mesh is not None or self.entity is not None:
            return None
        try:
            source = self._open(paths[0])
        except UnsupportedFormatError:
            if self.kind is None:
                return None  # meshio's, or OpenFOAM's
            raise
        if not any(map(RELATION.fullmatch, source.arrays)):
            if self.kind is None:
                return None
            shown = ", ".join(list(source.arrays)[:8])
            raise UnsupportedFormatError(
                f"{paths[0]}: no graph between node sets: expected edges/<source>__<name>__<target>/edge_index among "
                f"{shown}"
            )
        if self.options.edges is not None or self.options.points is not None:
            raise ConfigError(
                f"{paths[0]}: a graph between node sets has its edges and positions in groups of their own; leave out "
                f"{'edges' if self.options.edges is not None else 'points'}="
            )
        return open_hetero(source, name, self.options, self.fields)

    def _built(self, build: Build, name: str, paths: tuple[str, ...]) -> HeteroHeader:
        """Describe a graph that is built around a mesh, a cloud or a grid."""
        plain = replace(self, build=None, options=replace(self.options, edges=None))
        try:
            source = self._open(self.mesh if self.mesh is not None else paths[0])
            kind = self.kind if self.kind not in (None, "hetero") else kind_of(source)[0]
        except UnsupportedFormatError:  # meshio's
            kind, source = "mesh", None

        def header() -> SampleHeader:
            found = plain.header(name, paths)
            assert isinstance(found, SampleHeader)
            return found

        of_mesh = None if kind == "grid" else header
        return build_header(name, build, source, paths, self.fields, of_mesh, allow_missing=self.options.allow_missing)

    def _open(self, path: str) -> Source:
        if fluent.is_results(path):
            return meshio.MeshioSource(path, allow_external=self.allow_external)
        if self.kind == "points" and self.of_files and path.lower().endswith((*VTK_SUFFIXES, *PARALLEL)):
            return meshio.PointsOfMesh(path, allow_external=self.allow_external)
        source = open_source(path, allow_external=self.allow_external)
        if not self.options.allow_missing:
            check_finished(source)
        return with_columns(source) if self.kind == "points" else source

    def _check_names(
        self, found: Mapping[str, RawField], left_out: Mapping[str, str], sources: list[Source], every: set[str],
        values: tuple[str, ...],
    ) -> None:  # fmt: skip
        known = {*values} | {name for full in found for name in (full, full.rpartition("/")[2], found[full].path)}
        for name in self.fields or ():
            if name in known:
                continue
            where = ", ".join(source.path for source in sources)
            if name in left_out:
                raise UnsupportedFormatError(f"{where}: field {name!r} is not read: {left_out[name]}")
            raise UnknownNameError(f"{where}: no field {name!r}{near_matches(name, every)}")

    def _topology(self, path: str) -> RawTopology:
        kind = None if self._takes_meshes else self.kind
        if foam.is_case(path):
            return foam.open_topology(path, self.options, kind)
        by_meshio = meshio.is_known(path, kind)
        try:
            check_no_mesh(path)
            source = self._open(path)
        except UnsupportedFormatError:
            if meshio.is_known(path) and not by_meshio:
                edges = "" if self.options.edges is None else f"; nodes get edges={self.options.edges!r} all the same"
                raise UnsupportedFormatError(
                    f"{path}: is of a format of meshes, not of kind={self.kind!r}: leave out kind={edges}"
                ) from None
            if not by_meshio or os.path.isdir(path):
                raise
            return self._by_meshio(path, kind)
        if self.options.points is None and self.kind in (None, "mesh"):
            check_kind(source)
        for detects, module in self._formats():
            if detects(source):
                if self.options.points is not None and module in _OWN_COORDINATES:
                    raise ConfigError(
                        f"{path}: its format says where the nodes are, so points= has no meaning; leave it out, or use "
                        "kind='points' for a cloud"
                    )
                if module is vtkhdf and vtkhdf.lists_faces(source):
                    return self._by_meshio(path, kind)
                topology: RawTopology = module.open_topology(source, self.options)
                if module is vtkhdf and topology.kind != "mesh":
                    meshio.check_cloud(path, self.kind, self.options)
                return replace(topology, kind="graph") if self.kind == "graph" else topology
        if by_meshio:
            return self._by_meshio(path, kind)
        # none detects it: the last adapter's message names the arrays that it looks for
        if self.kind in ("points", "graph") or self.options.points is not None:
            _, module = self._formats()[-1]
            return module.open_topology(source, self.options)
        shown = ", ".join(f"{n} {a.shape}" for n, a in list(source.arrays.items())[:8]) or "no arrays"
        raise UnsupportedFormatError(
            f"{path}: no mesh, points or graph was found among {shown}; expected a UGRID, MPAS, ESMF, Exodus or VTKHDF "
            "mesh, 'points' with 'cells', coordinates (name them with points=) or 'edge_index'. Where the file has "
            "only fields, name the topology's file with mesh="
        )

    def _by_meshio(self, path: str, kind: str | None) -> RawTopology:
        external = self.allow_external
        return meshio.open_topology(path, self.options, kind, entity=self.entity, allow_external=external)

    def _formats(self) -> tuple[_Format, ...]:
        if self._takes_meshes and self.options.points is None:
            of_meshes = [each for each in _MESHES if each[1] is not plain or self.entity or self.measures]
            return (*of_meshes, *(() if self.entity == "cell" else (_POINTS,)))
        if self.kind == "points":
            return (_POINTS,)
        if self.kind == "mesh" or self.entity == "cell" or self.options.edges == "cells":
            return _MESHES
        if self.kind == "graph":
            return (*_MESHES, _POINTS if points.made_into_graph(self.options) else _GRAPH)
        return (*_MESHES, _GRAPH, _POINTS)

    @property
    def _takes_meshes(self) -> bool:
        """Whether points may be those of a mesh."""
        return self.kind == "points" and not self.of_files

    def _edges(self, topology: RawTopology, entity: str | None) -> str | None:
        """Return where the sample's edges come from."""
        asked = self.options.edges
        if topology.cells_are_rows and asked in ("cells", "edge_index"):
            raise ConfigError(
                f"{topology.source.path}: edges={asked!r} lie between nodes, but the rows of polyhedra are the cells; "
                "leave it out for edges across faces, or say 'nodes', 'knn:8' or 'radius:...'"
            )
        if entity == "cell":
            return asked or "faces"
        given = ("edge" in topology.sizes and not topology.mesh_edges) or isinstance(topology, graph.GraphTopology)
        if asked == "edge_index" and not given:
            raise UnknownNameError(f"{topology.source.path}: edges='edge_index', but the file has no edges of its own")
        if asked is not None and asked != "edge_index":
            return asked
        if given:
            return "edge_index"
        return "cells" if "cell" in topology.sizes else None


def read_samples(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    kind: str | None = None,
    mesh: str | os.PathLike[str] | None = None,
    points: str | Sequence[str] | None = None,
    entity: str | None = None,
    edges: str | Mapping[str, str] | None = None,
    fields: str | Sequence[str] | None = None,
    topology: str | None = None,
    nodes: Mapping[str, str] | None = None,
    geometry: AskedGeometry = None,
    allow_missing: bool = False,
    allow_external: bool = False,
    of_files: bool = False,
) -> RawSamples:
    """Find the samples in some files; nothing is opened yet.

    ``inputs``: a path, a glob or a list. Each file is one sample; or, with ``mesh``, all of them hold fields of one:
    those of one name are put together in their order, along time where they have it, else along a new dimension
    ``sample``.
    ``kind``: ``"mesh"``, ``"points"`` (of a mesh its nodes, or with ``entity="cell"`` its cells), ``"graph"`` or
    ``"hetero"`` (a graph between several node sets); None: as the file looks, the last one first, then in this order.
    ``mesh``: file of the topology, where the fields are in others.
    ``points``: names of the coordinates: one array ``(N, 2 or 3)``, or two or three ``(N,)``.
    ``entity``: ``"cell"``: the rows of a mesh are its cells, at the mean of their nodes (for finite volumes: fields of
    nodes are left out). None: its nodes.
    ``edges``: ``"edge_index"``: those in the file; ``"cells"``: those of the cells; ``"faces"``: between cells that
    share a face, ``"nodes"``: a node, where these are the rows; ``"knn:8"``, ``"radius:0.1"``: made from the points.
    None: the file's for a graph, those of the cells for a mesh or across its faces, none for a cloud.
    ``fields``: names; None for all that have one row per entity. What is left out is in ``left_out`` with the reason.
    ``topology``: name of the mesh variable, where a UGRID file has several.
    ``nodes``: of a graph that is built around the file: where each set comes from; then ``edges`` says how each
    relation is found. See :mod:`scidata.meshes.build`.
    ``geometry``: what of the rows' geometry are fields, too: as :func:`scidata.partition` has it.
    ``allow_missing, allow_external``: as in :func:`scidata.open_dataset`.
    ``of_files``: points are arrays of files, as they are: none are made of a mesh.
    Raises FileNotFoundError: a glob matches nothing.
    Raises ConfigError: an argument is not one of those above.
    """
    if kind is not None and kind not in (*KINDS, "hetero"):
        near = near_matches(kind, (*KINDS, "hetero"), listed=False)
        raise ConfigError(f"kind must be 'mesh', 'points', 'graph' or 'hetero', not {kind!r}{near}")
    if entity not in (None, "cell"):
        raise ConfigError(
            f"entity must be 'cell' or left out, not {entity!r}{near_matches(str(entity), ['cell'], listed=False)}"
        )
    if entity == "cell" and kind not in (None, "mesh", "points"):
        raise ConfigError(f"entity='cell': only a mesh has cells, not kind={kind!r}")
    build = as_build(nodes, edges)
    if build is not None:
        edges = None
    elif isinstance(edges, Mapping):
        raise ConfigError("edges by relation are those of a built graph; name its sets, nodes={'grid': 'file', ...}")
    if edges is not None:
        rule, _ = parse_edges(edges)
        if kind == "points" and rule not in ("knn", "radius"):
            raise ConfigError(f"edges={edges!r}: those of points are 'knn:8' or 'radius:0.1'; leave out kind='points'")
        if (entity == "cell") != (rule in ("faces", "nodes")) and rule not in ("knn", "radius"):
            raise ConfigError(
                f"edges={edges!r} and entity={entity!r} do not go together: 'faces' and 'nodes' lie between cells as "
                "rows (entity='cell'); 'cells' and 'edge_index' have edges between nodes"
            )
        if entity != "cell" and kind == "mesh" and rule in ("knn", "radius"):
            raise ConfigError(f"edges={edges!r} and kind={kind!r} do not go together; leave out kind=")
    paths = expand_paths(inputs)
    names = _sample_names(paths)
    reading = _Reading(
        kind=kind,
        mesh=None if mesh is None else os.path.expanduser(os.fspath(mesh)),
        entity=entity,
        fields=as_names("fields", fields),
        options=Options(points=as_names("points", points), edges=edges, topology=topology, allow_missing=allow_missing),
        allow_external=allow_external,
        build=build,
        measures=as_geometry(geometry),
        of_files=of_files,
    )
    if mesh is not None:
        return RawSamples(names[:1], [paths], reading)
    pairs = [(path, fluent.results_of(path)) for path in paths]
    return RawSamples(names, [tuple(path for path in pair if path is not None) for pair in pairs], reading)


def as_names(argument: str, names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names that may be given as one text with commas."""
    if names is None:
        return None
    return (
        tuple(n.strip() for n in names.split(",") if n.strip())
        if isinstance(names, str)
        else tuple(names_of(argument, names))
    )


def _sample_names(paths: Sequence[str]) -> list[str]:
    """Name samples by their files, with as much of the folders as tells them apart."""
    stems = [path.rstrip("/").removesuffix(os.path.splitext(path.rstrip("/"))[1]).split("/") for path in paths]
    for depth in range(1, max(map(len, stems)) + 1):
        names = ["_".join(part for part in stem[-depth:] if part) for stem in stems]
        if len(set(names)) == len(names):
            return names
    return [f"{i:06d}_{stem[-1]}" for i, stem in enumerate(stems)]
