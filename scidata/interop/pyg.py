"""PyTorch Geometric: ``Data`` and ``HeteroData`` of ShardTensors, on which its stock layers run unmodified.

A graph has one or more node sets, each with one index map, and relations between them. A ``Data`` is that of one set
and one relation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeAlias

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.checks import optional_module
from scidata.core.index_map import IndexMap
from scidata.errors import ConfigError
from scidata.shard.graphs.ghosts import keep_ghosts, node_tensor
from scidata.shard.graphs.local_graph import Entity
from scidata.shard.graphs.routed import Relation, RoutedIndex, edge_tensor, route_relations
from scidata.shard.tensor import ShardTensor

#: By set, and by relation, fields by PyG's names.
OfSets: TypeAlias = Mapping[str, Mapping[str, Tensor]]
OfRelations: TypeAlias = Mapping[Relation, Mapping[str, Tensor]]


class Container(Protocol):
    """A ``Data`` or a ``HeteroData`` that is filled: PyG has no types for it."""

    def __getitem__(self, key: Entity, /) -> Container:
        """Return the store of a set or relation."""

    def __setitem__(self, key: str, value: object, /) -> None:
        """Keep a value."""

    def __contains__(self, key: str, /) -> bool:
        """Whether a value has this name."""


_NODES = "node"
_EDGES = (_NODES, "edge", _NODES)


def to_pyg(
    edge_index: Tensor,
    index_map: IndexMap,
    device_mesh: DeviceMesh,
    *,
    node: Mapping[str, Tensor] | None = None,
    node_with_ghosts: Mapping[str, Tensor] | None = None,
    edge: Mapping[str, Tensor] | None = None,
    graph: Mapping[str, object] | None = None,
) -> Container:
    """Make a ``torch_geometric.data.Data`` of this rank's part of a graph. Collective.

    Gathers along its ``edge_index`` fetch ghosts by one exchange for each tensor that is gathered, and scatters go to
    owned nodes: so a layer gives what it gives on one process, and so do its gradients. The order of edges is by
    rank, also after a layer has added self-loops. What does not work raises.

    Parameters
    ----------
    edge_index, index_map, device_mesh, node, node_with_ghosts, edge, graph
        As for :func:`hetero_to_pyg`, of the one set and its one relation.

    Returns
    -------
    data
        ``torch_geometric.data.Data``.

    Raises
    ------
    MissingDependencyError, ConfigError, ShardLayoutError
        As :func:`hetero_to_pyg`.
    """
    made = new_data(several=False)
    names = Counter([*(node or {}), *(node_with_ghosts or {}), *(edge or {}), *(graph or {}), "edge_index"])
    _check_once(names)
    edges, fields = sharded(
        {_EDGES: edge_index},
        {_NODES: index_map},
        device_mesh,
        node={_NODES: node or {}},
        node_with_ghosts={_NODES: node_with_ghosts or {}},
        edge={_EDGES: edge or {}},
    )
    return filled(made, {_NODES: index_map.num_global}, edges, fields, _of_whole(graph))


def hetero_to_pyg(
    relations: Mapping[Relation, Tensor],
    index_maps: Mapping[str, IndexMap],
    device_mesh: DeviceMesh,
    *,
    node: OfSets | None = None,
    node_with_ghosts: OfSets | None = None,
    edge: OfRelations | None = None,
    graph: Mapping[str, object] | None = None,
) -> Container:
    """Make a ``torch_geometric.data.HeteroData`` of this rank's part of a graph. Collective.

    Each set has one index map, whose ghosts are those of all its relations: what is gathered from a tensor along one
    relation serves the others. Who sends what is found once for each map, or for each of its keys, and kept.

    Parameters
    ----------
    relations
        By relation ``(2, num_local_edges)`` int64 in local numbering: sources among the owned nodes and ghosts of
        their set, targets owned nodes of theirs. The same relations on all ranks; a rank may have no edges.
    index_maps
        The index map of each node set.
    device_mesh
        One axis, the domain.
    node
        By set, fields by PyG's names (``x``, ``pos``, ``batch``): ShardTensors along dim 0 by the index map's bounds,
        or their owned parts.
    node_with_ghosts
        The same for fields whose ghosts are here already (read from disk): owned rows, then ghosts,
        ``(num_local, ...)``. Layers gather from them without an exchange, unless they require grad.
    edge
        By relation, fields of this rank's edges in the order of ``relations``, ``(num_local_edges, ...)``.
    graph
        Anything else, the same on each rank, passed on as it is.

    Returns
    -------
    data
        ``torch_geometric.data.HeteroData``; ``num_nodes`` of each set is that of all ranks.

    Raises
    ------
    MissingDependencyError
        torch_geometric is not installed.
    ConfigError
        A set or relation that is not given, or a name given twice.
    ShardLayoutError
        On every rank: parts of any rank that do not fit their index map or each other.
    """
    made = new_data(several=True)
    node, held, edge = node or {}, node_with_ghosts or {}, edge or {}
    asked = {name for source, _, target in relations for name in (source, target)} | {*node, *held}
    missing = sorted(asked - {*index_maps})
    if missing:
        raise ConfigError(f"no index map of the node sets {', '.join(missing)}; there are {', '.join(index_maps)}")
    unknown = sorted({*edge} - {*relations})
    if unknown:
        raise ConfigError(f"fields of edges {unknown}, which are none of the relations {sorted(relations)}")
    _check_once(Counter(f"{name}: {field}" for given in (node, held) for name, own in given.items() for field in own))
    edges, fields = sharded(relations, index_maps, device_mesh, node=node, node_with_ghosts=held, edge=edge)
    return filled(made, {name: rows.num_global for name, rows in index_maps.items()}, edges, fields, _of_whole(graph))


def _of_whole(values: Mapping[str, object] | None) -> dict[tuple[Entity | None, str], object]:
    return {(None, name): value for name, value in (values or {}).items()}


def _check_once(names: Counter[str]) -> None:
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        raise ConfigError(f"{', '.join(twice)}: given more than once; fields of one store need different names")


# -- in two steps: to shards, then into a container --------------------------------------------------------------------


def new_data(several: bool) -> Container:
    """Return an empty ``HeteroData``, or of one node set an empty ``Data``."""
    data = optional_module("torch_geometric.data", "to_pyg() needs torch_geometric", "pyg")
    made: Container = data.HeteroData() if several else data.Data()
    return made


def sharded(
    relations: Mapping[Relation, Tensor],
    index_maps: Mapping[str, IndexMap],
    device_mesh: DeviceMesh,
    *,
    node: OfSets,
    node_with_ghosts: OfSets,
    edge: OfRelations,
) -> tuple[dict[Relation, RoutedIndex], dict[Entity, dict[str, ShardTensor]]]:
    """Return edges and fields as ShardTensors, of arguments as :func:`hetero_to_pyg` takes them. Collective.

    Raises
    ------
    ShardLayoutError
        On every rank: parts of any rank that do not fit their index map or each other.
    """
    fits = list(_fits(relations, index_maps, node, node_with_ghosts, edge))
    edges, exchanges = route_relations(relations, index_maps, device_mesh, fits)
    made: dict[Entity, dict[str, ShardTensor]] = defaultdict(dict)
    for name, fields in node.items():
        for field, values in fields.items():
            made[name][field] = node_tensor(_part(values), index_maps[name], device_mesh)
    for name, fields in node_with_ghosts.items():
        rows = index_maps[name]
        for field, values in fields.items():
            made[name][field] = node_tensor(values[: rows.num_owned], rows, device_mesh)
            keep_ghosts(made[name][field], values, exchanges[name])
    for relation, fields in edge.items():
        for field, values in fields.items():
            made[relation][field] = edge_tensor(_part(values), edges[relation])
    return edges, made


def filled(
    made: Container,
    sizes: Mapping[str, int],
    relations: Mapping[Relation, Tensor],
    fields: Mapping[Entity, Mapping[str, object]],
    values: Mapping[tuple[Entity | None, str], object],
) -> Container:
    """Put edges, fields, and numbers of nodes into an empty container, then values of the whole, of sets and relations.

    A value, by entity (None: of the whole) and name, is left out where a field has its name.
    """
    several = hasattr(made, "node_types")
    for relation, edge_index in relations.items():
        (made[relation] if several else made)["edge_index"] = edge_index
    for name, size in sizes.items():
        (made[name] if several else made)["num_nodes"] = size
    for entity, named in fields.items():
        store = made[entity] if several else made
        for name, tensor in named.items():
            store[name] = tensor
    for (of, name), value in values.items():
        store = made if of is None else made[of]
        if name not in store:
            store[name] = value
    return made


def _part(values: Tensor) -> Tensor:
    return values.to_local() if isinstance(values, ShardTensor) else values


def _fits(
    relations: Mapping[Relation, Tensor],
    index_maps: Mapping[str, IndexMap],
    node: OfSets,
    node_with_ghosts: OfSets,
    edge: OfRelations,
) -> Iterator[tuple[str, bool]]:
    """Yield the fields that there are, in the same order on all ranks, and whether this rank's part has its rows."""
    given: list[tuple[str, int, Mapping[str, Tensor]]]
    given = [(f" of {name}", index_maps[name].num_owned, node[name]) for name in sorted(node)]
    given += [(f" of {name}, with ghosts", index_maps[name].num_local, node_with_ghosts[name])
              for name in sorted(node_with_ghosts)]  # fmt: skip
    given += [(f" of {' '.join(each)}", relations[each].shape[-1] if relations[each].ndim else 0, edge[each])
              for each in sorted(edge)]  # fmt: skip
    for of, num_rows, fields in given:
        for name in sorted(fields):
            local = _part(fields[name])
            yield name + of, bool(local.ndim) and len(local) == num_rows
