"""Graphs: ``edge_index`` or CSR, positions and fields of nodes and edges, in Zarr, HDF5 or NetCDF.

========================= ==================== ================================================================
array                     shape                meaning
========================= ==================== ================================================================
``edge_index``            (2, E) integer       source and destination of each edge, 0-based (``start_index``: an
                                               attribute, for others)
``indptr``, ``indices``   (N + 1,), (E,)       instead of it: the sources of the edges that end in node i are
                                               ``indices[indptr[i]:indptr[i + 1]]``. With the attribute ``rows =
                                               "source"`` on ``indptr``, the destinations of those that start there.
                                               ``csr/indptr``, ``csr/src`` are read too
``pos`` or ``points``     (N, 2 or 3)          optional; or the names given as ``points``. Attribute ``period``: width
                                               of the domain along each coordinate where it wraps, else 0
``node/<name>``           (N, …)               fields of nodes; also without the group
``edge/<name>``           (E, …)               fields of edges; also without the group, or ``edge_<name>``
``graph/<name>``          any                  values of the whole graph
========================= ==================== ================================================================

The number of nodes is that of the positions, of ``indptr``, of the store's attribute ``num_nodes``, of an array of that
name, or of the arrays in ``node/``; only if there are none of these is it the largest index + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from scidata.core.types import ArrayLayout, Source
from scidata.errors import FieldMismatchError
from scidata.meshes.formats.arrays import check_pointers, num_pairs, pairs_by_blocks, read_indices, read_pairs
from scidata.meshes.formats.base import Blocks, Options, RawTopology
from scidata.meshes.formats.coordinates import find_points, period_of, points_by_blocks, read_points
from scidata.meshes.geometry import Geometry
from scidata.sources.kinds import EDGE_PAIRS, common_points, edge_pointers, find_array
from scidata.sources.torch_files import ENTITY_DIMS

_NUM_NODES = "num_nodes"


@dataclass(frozen=True, kw_only=True)
class GraphTopology(RawTopology):
    """A graph; ``pairs`` or ``pointers`` name its edges."""

    pairs: str | None = None
    pointers: tuple[str, str] | None = None

    def load(self) -> Geometry:
        """Read positions and edges."""
        points = read_points(self) if self.coordinates else None
        if self.pointers is not None:
            indptr, indices = (read_indices(self.source, name, self.options) for name in self.pointers)
            check_pointers(self.source, self.pointers, indptr, len(indices), "row")
            rows = np.repeat(np.arange(len(indptr) - 1, dtype=np.int64), np.diff(indptr))
            said = str(self.source.arrays[self.pointers[0]].attributes.get("rows", "destination"))
            return Geometry(
                points=points, edge_index=np.stack([rows, indices] if said == "source" else [indices, rows])
            )
        assert self.pairs is not None
        pairs = read_pairs(self.source, self.pairs, self.options, self.sizes["node"])
        return Geometry(points=points, edge_index=pairs)

    def by_blocks(self) -> Blocks | None:
        """Describe how edges are read some at a time."""
        if self.pairs is None:
            return None
        return Blocks(
            points=partial(points_by_blocks, self) if self.coordinates else None,
            edges=partial(pairs_by_blocks, self.source, self.pairs, self.options, self.sizes["node"]),
        )


def open_topology(source: Source, options: Options) -> GraphTopology:
    """Describe the graph of a file."""
    pairs = find_array(source, EDGE_PAIRS)
    pointers = edge_pointers(source) if pairs is None else None
    if pairs is not None:
        num_edges = num_pairs(source.arrays[pairs])
        structure = {pairs}
    elif pointers is not None:
        for name in pointers:
            shape = source.arrays[name].shape
            if len(shape) != 1 or (name == pointers[0] and shape[0] < 1):
                raise FieldMismatchError(
                    f"{source.path}: field {name!r} has shape {shape}, but one dimension was expected: "
                    "(num_nodes + 1,) pointers and (num_edges,) indices"
                )
        num_edges = source.arrays[pointers[1]].shape[0]
        structure = {*pointers, "csr/edge_id"}
    else:
        raise FieldMismatchError(
            f"{source.path}: has no edges: neither edge_index (2, E) nor indptr and indices; "
            "make them from the points with edges='knn:8' or edges='radius:0.1'"
        )
    layouts, on_sphere = _positions(source, options)
    num_nodes = _num_nodes(source, layouts, pointers, options)
    if num_nodes is None:
        assert pairs is not None
        num_nodes = int(read_pairs(source, pairs, options).max(initial=-1)) + 1
    named = {name: "edge" for name in source.arrays if name.startswith("edge_")}
    entity_of_dim = dict(ENTITY_DIMS) if source.format == "torch" else {}
    entity_of_dim |= {layout.dims[0]: "node" for layout in layouts}
    if pairs is not None:
        entity_of_dim[source.arrays[pairs].dims[1]] = "edge"
    return GraphTopology(
        source=source,
        options=options,
        kind="graph",
        on_sphere=on_sphere,
        sizes={"node": num_nodes, "edge": num_edges},
        entity_of_dim=entity_of_dim,
        entity_of_name=named,
        not_fields=frozenset(structure | {_NUM_NODES} | {layout.name for layout in layouts}),
        period=period_of(layouts, on_sphere=on_sphere) if layouts else None,
        leading_only=True,
        coordinates=tuple(layout.name for layout in layouts),
        pairs=pairs,
        pointers=pointers,
    )


def _positions(source: Source, options: Options) -> tuple[list[ArrayLayout], bool]:
    # features named x and y (PyG's) are no coordinates: only one array of positions is taken without being named
    common = common_points(source) or []
    said = all({"units", "standard_name", "axis"} & set(layout.attributes) for layout in common)
    if options.points is None and len(common) > 1 and not said:
        return [], False
    return find_points(source, options) or ([], False)


def _num_nodes(
    source: Source, layouts: list[ArrayLayout], pointers: tuple[str, str] | None, options: Options
) -> int | None:
    """Return the number of nodes as far as metadata say it, checking that they agree."""
    said: dict[str, int] = {layout.name: layout.shape[0] for layout in layouts}
    if pointers is not None:
        said[pointers[0]] = source.arrays[pointers[0]].shape[0] - 1
    if "num_nodes" in source.attributes:
        said["attribute num_nodes"] = int(np.asarray(source.attributes["num_nodes"]).reshape(-1)[0])
    if _NUM_NODES in source.arrays and math.prod(source.arrays[_NUM_NODES].shape) == 1:
        said[_NUM_NODES] = int(read_indices(source, _NUM_NODES, options).reshape(-1)[0])
    in_group = {name: a.shape[0] for name, a in source.arrays.items() if name.startswith("node/") and a.shape}
    if not said and len(set(in_group.values())) == 1:
        said = in_group
    if len(set(said.values())) > 1:
        raise FieldMismatchError(f"{source.path}: disagrees on the number of nodes: {said}")
    return next(iter(said.values()), None)
