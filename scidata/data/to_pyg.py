"""Samples as PyTorch Geometric's ``Data``, or ``HeteroData`` of several node sets: which field goes where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from scidata.core.checks import check_mapping
from scidata.data.topology import EdgeType, Place, Topology
from scidata.errors import ConfigError, UnknownNameError, near_matches
from scidata.interop.pyg import Container, filled, new_data, sharded
from scidata.meshes.hetero import JOINT, relation_parts
from scidata.shard.graphs.ghosts import node_tensor
from scidata.shard.graphs.hops import hop_order
from scidata.shard.graphs.local_graph import Entity, LocalGraph

_Names: TypeAlias = str | Sequence[str]
#: Names of fields; of several node sets by set.
Columns: TypeAlias = _Names | Mapping[str, _Names]
#: Names of fields of edges; of several node sets by relation.
EdgeColumns: TypeAlias = _Names | Mapping[EdgeType | str, _Names]

#: Fields that no layer reads: where a model runs without exchange they are ShardTensors of the owned rows.
_FOR_LOSSES = ("y", "batch")


class Fields(Protocol):
    """The part of a sample that is turned into PyG's containers; :class:`scidata.IrregularSample` has it."""

    def __iter__(self) -> Iterator[str]:
        """Yield the names of its fields."""

    @property
    def places(self) -> Mapping[str, Place]:
        """Entity and dim of each field."""

    @property
    def topology(self) -> Topology:
        """Edges and index maps."""

    @property
    def graph_values(self) -> Mapping[str, object]:
        """Values of the whole graph, of a set or of a relation."""

    @property
    def parts(self) -> LocalGraph | None:
        """The graph to compute on without exchange; None where samples are plain."""

    def rows_first(self, name: str, *, entity: str | None = None) -> tuple[Tensor, bool]:
        """Return local rows along dim 0, and whether ghosts are among them."""

    def with_ghosts(self, name: str) -> Tensor:
        """Return owned rows, then ghosts."""


class _Group(NamedTuple):
    """Fields that become one tensor; side by side as columns where ``flat``."""

    fields: tuple[str, ...]
    flat: bool


def pyg_of(sample: Fields, asked: Mapping[str, Columns | EdgeColumns | None], *, khop: bool, by_hop: bool) -> Container:
    """Return the ``Data`` or ``HeteroData`` of a sample; see :meth:`scidata.IrregularSample.to_pyg`. Collective.

    Parameters
    ----------
    asked
        By PyG's names ``x``, ``y``, ``edge_attr``: the fields that are put side by side.
    """
    topology = sample.topology
    several = topology.entity == JOINT
    made = new_data(several)
    if by_hop and several:
        raise ConfigError("by_hop=True orders the ghosts of a graph of one node set, and this one has several")
    groups = _groups(sample, asked)
    graph = sample.parts if khop else None
    if graph is not None:
        sizes = {name: rows.num_local for name, rows in graph.index_maps.items()}
        return filled(made, sizes, *_on_parts(sample, groups, graph, by_hop), _values(sample))
    node: dict[str, dict[str, Tensor]] = {name: {} for name in topology.node_sets}
    held: dict[str, dict[str, Tensor]] = {name: {} for name in topology.node_sets}
    edge: dict[EdgeType, dict[str, Tensor]] = {}
    for entity, named in groups.items():
        for name, group in named.items():
            values, has_ghosts = _columns(sample, group, entity)
            if entity in topology.relations:
                edge.setdefault(topology.relations[entity].type, {})[name] = values
            else:
                (held if has_ghosts else node)[entity][name] = values
    maps = {name: topology.index_maps[name] for name in node}
    sizes = {name: rows.num_global for name, rows in maps.items()}
    edges = {relation.type: relation.own for relation in topology.relations.values()}
    if topology.device_mesh is None:
        plain: dict[Entity, Mapping[str, Tensor]] = {name: node[name] | held[name] for name in node}
        plain.update(edge.items())
        return filled(made, sizes, edges, plain, _values(sample))
    shards = sharded(edges, maps, topology.device_mesh, node=node, node_with_ghosts=held, edge=edge)
    return filled(made, sizes, *shards, _values(sample))


def _values(sample: Fields) -> dict[tuple[Entity | None, str], object]:
    """Return the values of the whole graph, of its sets and of its relations, by entity and name."""
    if sample.topology.entity != JOINT:
        return {(None, name): value for name, value in sample.graph_values.items()}
    parts = [(*name.rpartition("/")[::2], value) for name, value in sample.graph_values.items()]
    return {(relation_parts(of) or of or None, base): value for of, base, value in parts}


def _groups(sample: Fields, asked: Mapping[str, Columns | EdgeColumns | None]) -> dict[str, dict[str, _Group]]:
    """Group the fields of each set and relation under PyG's names.

    A group that was asked for replaces a field of its name, and the fields in it do not come under their own names.
    """
    topology = sample.topology
    chosen: dict[str, dict[str, _Group]] = {name: {} for name in (*topology.node_sets, *topology.relations)}
    for key, given in asked.items():
        edges = key == "edge_attr"
        by_entity = given
        if topology.entity != JOINT and given is not None and not isinstance(given, Mapping):
            by_entity = {"edge" if edges else topology.entity: given}
        check_mapping(key, by_entity, "{('grid', 'to', 'mesh'): 'length'}" if edges else "{'grid': 'u'}")
        for entity, names in by_entity.items() if isinstance(by_entity, Mapping) else ():
            fields = (names,) if isinstance(names, str) else tuple(names)
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
    sample: Fields, groups: Mapping[str, Mapping[str, _Group]], graph: LocalGraph, by_hop: bool
) -> tuple[Mapping[EdgeType, Tensor], dict[Entity, dict[str, object]]]:
    """Return edges and fields as plain tensors: rows owned, then ghosts; with ``by_hop`` in that order."""
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


def _columns(sample: Fields, group: _Group, entity: str) -> tuple[Tensor, bool]:
    """Return the rows of fields side by side; with ghosts where all of them have them, but not those of edges."""
    parts = [sample.rows_first(name, entity=entity) for name in group.fields]
    rows = sample.topology.index_maps[entity]
    has_ghosts = all(held for _, held in parts) and entity not in sample.topology.relations
    here = [values[: rows.num_local if has_ghosts else rows.num_owned] for values, _ in parts]
    return (_side_by_side(here) if group.flat else here[0]), has_ghosts


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Return the components of fields as columns, ``(num_rows, num_columns)``."""
    return torch.cat([values.reshape(len(values), math.prod(values.shape[1:])) for values in rows], dim=1)


def entity_named(topology: Topology, given: object, *, edges: bool) -> str:
    """Return the set or relation of a name, or of the three names of a relation.

    Raises
    ------
    UnknownNameError
        There is none.
    """
    known = list(topology.relations) if edges else list(topology.node_sets)
    name = "__".join(map(str, given)) if isinstance(given, tuple) else str(given)
    if name not in known:
        what = "relation" if edges else "node set"
        raise UnknownNameError(f"the sample has no {what} {given!r}{near_matches(name, known)}")
    return name
