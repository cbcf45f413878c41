"""PyTorch Geometric: a ``HeteroData`` of ShardTensors, graphs between several sets of nodes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.checks import optional_module
from scidata.core.index_map import IndexMap
from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard.graphs.ghosts import ghost_exchange, graph_axis, keep_ghosts, node_tensor
from scidata.shard.graphs.routed import EDGE_FAULTS, agree, edge_fault, edge_tensor, routed_edges
from scidata.shard.tensor import ShardTensor

#: Set of the sources, name, set of the targets.
Relation: TypeAlias = tuple[str, str, str]

_ROWS = max(EDGE_FAULTS) + 1  # the fault of a field whose rows do not fit


def hetero_to_pyg(
    relations: Mapping[Relation, Tensor],
    index_maps: Mapping[str, IndexMap],
    device_mesh: DeviceMesh,
    *,
    node: Mapping[str, Mapping[str, Tensor]] | None = None,
    node_with_ghosts: Mapping[str, Mapping[str, Tensor]] | None = None,
    edge: Mapping[Relation, Mapping[str, Tensor]] | None = None,
    graph: Mapping[str, Any] | None = None,
) -> Any:
    """Make a ``torch_geometric.data.HeteroData`` of this rank's part of a graph. Collective.

    Each set has one index map, whose ghosts are those of all its relations: what is gathered from a tensor along one
    relation serves the others. Who sends what is found once for each map, or for each of its keys, and kept.

    Parameters
    ----------
    relations
        By relation ``(2, num_local_edges)`` int64 in local numbering: sources among the owned nodes and ghosts of
        their set, targets owned nodes of theirs. The same relations on all ranks; a rank may have no edges.
    index_maps
        Of each set of nodes.
    device_mesh
        One axis, the domain.
    node
        By set, fields by PyG's names: ShardTensors along dim 0 by the index map's bounds, or their owned parts.
    node_with_ghosts
        The same for fields whose ghosts are here already: owned rows, then ghosts, ``(num_local, ...)``.
    edge
        By relation, fields of this rank's edges in the order of ``relations``.
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
    made = _new_data()
    axis = graph_axis(device_mesh)
    node, held, edge = node or {}, node_with_ghosts or {}, edge or {}
    _check_names(relations, index_maps, node, held, edge)
    exchanges = {name: ghost_exchange(index_maps[name], axis.group) for name in sorted(index_maps)}
    ordered = sorted(relations)
    faults = list(_faults(ordered, relations, index_maps, node, held, edge))
    place, fault = next(((i, code) for i, (_, code) in enumerate(faults) if code), (0, 0))
    named = zlib.crc32(repr((ordered, [what for what, _ in faults])).encode())
    counts = [relations[each].shape[-1] if relations[each].ndim else 0 for each in ordered]
    table = agree([named, place, fault, *counts], axis)
    if len({row[0] for row in table}) > 1:
        raise ShardLayoutError("the ranks give different relations or fields; give all of them on each rank")
    for rank, (_, at, code, *_) in enumerate(table):
        if code:
            text = EDGE_FAULTS.get(code, "its rows are not as many as those of its index map or edge_index")
            raise ShardLayoutError(f"rank {rank}: {faults[at][0]}: {text}")
    for name, value in (graph or {}).items():
        made[name] = value
    for name, rows in index_maps.items():
        made[name].num_nodes = rows.num_global
        for field, values in node.get(name, {}).items():
            made[name][field] = node_tensor(_part(values), rows, device_mesh)
        for field, values in held.get(name, {}).items():
            tensor = node_tensor(values[: rows.num_owned], rows, device_mesh)
            keep_ghosts(tensor, values, exchanges[name])
            made[name][field] = tensor
    for relation, edges in relations.items():
        sizes = tuple(row[3 + ordered.index(relation)] for row in table)
        routed = routed_edges(edges, exchanges[relation[0]], exchanges[relation[2]], sizes, device_mesh)
        made[relation].edge_index = routed
        for field, values in edge.get(relation, {}).items():
            made[relation][field] = edge_tensor(_part(values), routed)
    return made


def plain_hetero(
    sizes: Mapping[str, int],
    node: Mapping[str, Mapping[str, Tensor]],
    relations: Mapping[Relation, Tensor],
    edge: Mapping[Relation, Mapping[str, Tensor]],
) -> Any:
    """Make a ``torch_geometric.data.HeteroData`` of tensors as they are: nodes, and fields, by set and by relation."""
    made = _new_data()
    for name, size in sizes.items():
        made[name].num_nodes = size
        for field, values in node[name].items():
            made[name][field] = values
    for relation, pairs in relations.items():
        made[relation].edge_index = pairs
        for field, values in edge[relation].items():
            made[relation][field] = values
    return made


def _new_data() -> Any:
    return optional_module("torch_geometric.data", "to_pyg() needs torch_geometric", "pyg").HeteroData()


def _part(values: Tensor) -> Tensor:
    return values.to_local() if isinstance(values, ShardTensor) else values


def _check_names(
    relations: Mapping[Relation, Tensor],
    index_maps: Mapping[str, IndexMap],
    node: Mapping[str, Mapping[str, Tensor]],
    held: Mapping[str, Mapping[str, Tensor]],
    edge: Mapping[Relation, Mapping[str, Tensor]],
) -> None:
    """Raise for what is missing or given twice; the same on all ranks."""
    asked = {name for source, _, target in relations for name in (source, target)} | {*node, *held}
    missing = sorted(asked - {*index_maps})
    if missing:
        raise ConfigError(f"no index map of the node sets {', '.join(missing)}; there are {', '.join(index_maps)}")
    unknown = sorted({*edge} - {*relations})
    if unknown:
        raise ConfigError(f"fields of edges {unknown}, which are none of the relations {sorted(relations)}")
    twice = sorted(f"{name}: {field}" for name in node for field in {*node[name]} & {*held.get(name, {})})
    if twice:
        raise ConfigError(f"{', '.join(twice)}: given more than once")


def _faults(
    ordered: list[Relation],
    relations: Mapping[Relation, Tensor],
    index_maps: Mapping[str, IndexMap],
    node: Mapping[str, Mapping[str, Tensor]],
    held: Mapping[str, Mapping[str, Tensor]],
    edge: Mapping[Relation, Mapping[str, Tensor]],
) -> Iterator[tuple[str, int]]:
    """Yield what there is, in the same order on all ranks, and what is wrong with this rank's part; 0 for nothing."""
    for relation in ordered:
        source, _, target = relation
        edges = relations[relation]
        yield " ".join(relation), edge_fault(edges, index_maps[source], index_maps[target])
        for field, values in sorted(edge.get(relation, {}).items()):
            yield f"{field} of {' '.join(relation)}", _row_fault(_part(values), edges.shape[-1] if edges.ndim else 0)
    for name in sorted(index_maps):
        rows = index_maps[name]
        for field, values in sorted(node.get(name, {}).items()):
            yield f"{field} of {name}", _row_fault(_part(values), rows.num_owned)
        for field, values in sorted(held.get(name, {}).items()):
            yield f"{field} of {name}, with ghosts", _row_fault(values, rows.num_local)


def _row_fault(values: Tensor, num_rows: int) -> int:
    return 0 if values.ndim and len(values) == num_rows else _ROWS
