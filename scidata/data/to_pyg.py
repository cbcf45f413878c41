"""Samples as PyTorch Geometric's ``Data``, or ``HeteroData`` for several node sets, for its stock layers.

A graph has one or more node sets, each with one index map, and relations between them. A ``Data`` is that of one set
and one relation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.checks import check_mapping, names_of, optional_module
from scidata.core.index_map import IndexMap
from scidata.data.topology import EdgeType, Place, Topology
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.meshes.hetero import JOINT, relation_parts
from scidata.shard.graphs.ghosts import keep_ghosts, node_tensor
from scidata.shard.graphs.local_graph import Entity, LocalGraph, hop_order
from scidata.shard.graphs.routed import RoutedIndex, edge_tensor, route_relations
from scidata.shard.tensor import ShardTensor

_Names: TypeAlias = str | Sequence[str]
#: Names of fields; of several node sets by set.
Columns: TypeAlias = _Names | Mapping[str, _Names]
#: Names of fields of edges; of several node sets by relation.
EdgeColumns: TypeAlias = _Names | Mapping[EdgeType | str, _Names]

#: Fields that no layer reads: where a model runs without exchange they are ShardTensors of the owned rows.
_FOR_LOSSES = ("y", "batch")


class _Container(Protocol):
    """A ``Data`` or a ``HeteroData`` with its stores by set and relation; PyG has no types for these."""

    def __getitem__(self, key: Entity, /) -> _Container: ...

    def __setitem__(self, key: str, value: object, /) -> None: ...

    def __contains__(self, key: str, /) -> bool: ...


class _Fields(Protocol):
    """The part of :class:`scidata.IrregularSample` that becomes PyG's containers."""

    @property
    def places(self) -> Mapping[str, Place]: ...

    @property
    def topology(self) -> Topology: ...

    @property
    def graph_values(self) -> Mapping[str, object]: ...

    @property
    def parts(self) -> LocalGraph | None: ...

    def rows_first(self, name: str, *, entity: str | None = None) -> tuple[Tensor, bool]: ...

    def with_ghosts(self, name: str) -> Tensor: ...


class _Group(NamedTuple):
    fields: tuple[str, ...]
    flat: bool


class Rows(NamedTuple):
    """This rank's rows of a field: owned rows, then ghosts if these were read."""

    values: Tensor
    has_ghosts: bool = False


def pyg_of(
    sample: _Fields, asked: Mapping[str, Columns | EdgeColumns | None], *, khop: bool, by_hop: bool
) -> _Container:
    """Return the ``Data`` or ``HeteroData`` of a sample; ``asked``: fields by PyG's ``x``, ``y``, … Collective."""
    topology = sample.topology
    several = topology.entity == JOINT
    data = optional_module("torch_geometric.data", "to_pyg() needs torch_geometric", "pyg")
    made: _Container = data.HeteroData() if several else data.Data()
    if by_hop and several:
        raise ConfigError("by_hop=True orders the ghosts of a graph of one node set, and this one has several")
    groups = _groups(sample, asked)
    graph = sample.parts if khop else None
    if graph is not None:
        sizes = {name: rows.num_local for name, rows in graph.index_maps.items()}
        return filled(made, sizes, *_on_parts(sample, groups, graph, by_hop), _values(sample))
    maps = {name: topology.index_maps[name] for name in topology.node_sets}
    sizes = {name: rows.num_global for name, rows in maps.items()}
    edges = {relation.type: relation.own for relation in topology.relations.values()}
    fields = {
        topology.relations[entity].type if entity in topology.relations else entity: {
            name: _columns(sample, group, entity) for name, group in named.items()
        }
        for entity, named in groups.items()
    }
    if topology.device_mesh is None:
        plain = {of: {name: rows.values for name, rows in named.items()} for of, named in fields.items()}
        return filled(made, sizes, edges, plain, _values(sample))
    return filled(made, sizes, *sharded(edges, maps, topology.device_mesh, fields), _values(sample))


def sharded(
    relations: Mapping[EdgeType, Tensor],
    index_maps: Mapping[str, IndexMap],
    device_mesh: DeviceMesh,
    fields: Mapping[Entity, Mapping[str, Rows]],
) -> tuple[dict[EdgeType, RoutedIndex], dict[Entity, dict[str, ShardTensor]]]:
    """Return edges and fields of a graph as ShardTensors. Collective.

    A layer that gathers along such edges fetches ghosts by one exchange for each tensor, unless they are there and the
    tensor requires no grad; it scatters to owned nodes. So it gives the values and gradients of one process.

    - ``relations``: ``(2, num_local_edges)`` int64 in local numbering: sources among the owned nodes and ghosts of
      their set, targets owned nodes of theirs. The same relations on all ranks.
    - ``index_maps``: of each node set, with the ghosts of all relations: rows that one relation fetches serve the
      others.
    - ``fields``: by set, and by relation in the order of its edges.

    Raises ShardLayoutError: on every rank: parts of any rank that do not fit their index map or each other.
    """
    edges, exchanges = route_relations(relations, index_maps, device_mesh, list(_fits(relations, index_maps, fields)))
    made: dict[Entity, dict[str, ShardTensor]] = defaultdict(dict)
    for entity, named in fields.items():
        for name, (values, has_ghosts) in named.items():
            if isinstance(entity, tuple):
                made[entity][name] = edge_tensor(values, edges[entity])
                continue
            rows = index_maps[entity]
            made[entity][name] = node_tensor(values[: rows.num_owned] if has_ghosts else values, rows, device_mesh)
            if has_ghosts:
                keep_ghosts(made[entity][name], values, exchanges[entity])
    return edges, made


def _fits(
    relations: Mapping[EdgeType, Tensor],
    index_maps: Mapping[str, IndexMap],
    fields: Mapping[Entity, Mapping[str, Rows]],
) -> Iterator[tuple[str, bool]]:
    """Yield the existing fields, in the same order on all ranks, and whether this rank's part has their rows."""
    for entity in sorted(fields, key=lambda entity: (isinstance(entity, tuple), entity)):
        for name, (values, has_ghosts) in sorted(fields[entity].items(), key=lambda field: field[0]):
            if isinstance(entity, tuple):
                of, num_rows = " ".join(entity), relations[entity].shape[-1] if relations[entity].ndim else 0
            else:
                rows = index_maps[entity]
                of, num_rows = entity, rows.num_local if has_ghosts else rows.num_owned
            yield (
                f"{name} of {of}{', with ghosts' if has_ghosts else ''}",
                bool(values.ndim) and len(values) == num_rows,
            )


def filled(
    made: _Container,
    sizes: Mapping[str, int],
    relations: Mapping[EdgeType, Tensor],
    fields: Mapping[Entity, Mapping[str, object]],
    values: Mapping[tuple[Entity | None, str], object],
) -> _Container:
    """Fill an empty container: edges, fields, numbers of nodes, and graph-level values whose names no field has."""
    several = hasattr(made, "node_types")
    own: dict[Entity, dict[str, object]] = defaultdict(dict)
    for relation, edge_index in relations.items():
        own[relation]["edge_index"] = edge_index
    for name, size in sizes.items():
        own[name]["num_nodes"] = size
    for entity, named in [*own.items(), *fields.items()]:
        store = made[entity] if several else made
        for name, value in named.items():
            store[name] = value
    for (of, name), value in values.items():
        store = made if of is None else made[of]
        if name not in store:
            store[name] = value
    return made


def _values(sample: _Fields) -> dict[tuple[Entity | None, str], object]:
    if sample.topology.entity != JOINT:
        return {(None, name): value for name, value in sample.graph_values.items()}
    parts = [(*name.rpartition("/")[::2], value) for name, value in sample.graph_values.items()]
    return {(relation_parts(of) or of or None, base): value for of, base, value in parts}


def _groups(sample: _Fields, asked: Mapping[str, Columns | EdgeColumns | None]) -> dict[str, dict[str, _Group]]:
    """Group fields under PyG's names; a requested group takes its fields and replaces a field of its name."""
    topology = sample.topology
    chosen: dict[str, dict[str, _Group]] = {name: {} for name in (*topology.node_sets, *topology.relations)}
    for key, given in asked.items():
        edges = key == "edge_attr"
        by_entity = given
        if topology.entity != JOINT and given is not None and not isinstance(given, Mapping):
            by_entity = {"edge" if edges else topology.entity: given}
        check_mapping(key, by_entity, "{('grid', 'to', 'mesh'): 'length'}" if edges else "{'grid': 'u'}")
        for entity, names in by_entity.items() if isinstance(by_entity, Mapping) else ():
            fields = tuple(names_of(key, names))
            known = entity_named(topology, entity, edges=edges)
            for name in fields:
                sample.rows_first(name, entity=known)  # checked before anything is sent
            if fields:
                chosen[known][key] = _Group(fields, True)
    used = {name for groups in chosen.values() for group in groups.values() for name in group.fields}
    made = {}
    for entity, groups in chosen.items():
        own = [n for n, place in sample.places.items() if place.entity == entity and n not in used]
        made[entity] = {name.removeprefix(f"{entity}/"): _Group((name,), False) for name in own} | groups
    return made


def _on_parts(
    sample: _Fields, groups: Mapping[str, Mapping[str, _Group]], graph: LocalGraph, by_hop: bool
) -> tuple[Mapping[EdgeType, Tensor], dict[Entity, dict[str, object]]]:
    """Return edges and fields as plain tensors: owned rows, then ghosts; ``by_hop``: sorted by hop."""
    topology, order = sample.topology, None
    edges: Mapping[EdgeType, Tensor] = graph.edges
    fields: dict[Entity, dict[str, object]] = {}
    if by_hop and graph.only is not None:
        rows, pairs = graph.only
        order = hop_order(rows, pairs, len(graph.layers))
        edges = dict.fromkeys(edges, order.edge_index)
        fields[topology.entity] = {"num_sampled_nodes": order.num_rows, "num_sampled_edges": order.num_edges}
    for entity, named in groups.items():
        is_relation = entity in topology.relations
        made = fields.setdefault(topology.relations[entity].type if is_relation else entity, {})
        for name, group in named.items():
            tensors = [sample.with_ghosts(each).movedim(sample.places[each].dim, 0) for each in group.fields]
            values = _side_by_side(tensors) if group.flat else tensors[0]
            if order is not None:
                values = values.index_select(0, order.edges if is_relation else order.rows)
            if name in _FOR_LOSSES and not is_relation:
                rows = graph.index_maps[entity]
                values = node_tensor(values[: rows.num_owned], rows, graph.device_mesh)
            made[name] = values
    return edges, fields


def _columns(sample: _Fields, group: _Group, entity: str) -> Rows:
    """Return the fields' rows side by side; with ghosts if all have them, but never for edges."""
    parts = [sample.rows_first(name, entity=entity) for name in group.fields]
    rows = sample.topology.index_maps[entity]
    has_ghosts = all(held for _, held in parts) and entity not in sample.topology.relations
    here = [values[: rows.num_local if has_ghosts else rows.num_owned] for values, _ in parts]
    return Rows(_side_by_side(here) if group.flat else here[0], has_ghosts)


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([values.reshape(len(values), math.prod(values.shape[1:])) for values in rows], dim=1)


def entity_named(topology: Topology, given: object, *, edges: bool) -> str:
    """Return the set or relation with a name, or the relation with three names; raise if it is missing."""
    known = list(topology.relations) if edges else list(topology.node_sets)
    name = "__".join(map(str, given)) if isinstance(given, tuple) else str(given)
    if name not in known:
        noun = "relation" if edges else "node set"
        raise UnknownNameError(f"the sample has no {noun} {given!r}{near_matches(name, known)}")
    return name
