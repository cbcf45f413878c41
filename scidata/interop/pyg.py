"""PyTorch Geometric: a ``Data`` of ShardTensors, on which its stock layers run unmodified."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scidata.core.checks import optional_module
from scidata.core.index_map import IndexMap
from scidata.errors import ConfigError, ShardLayoutError
from scidata.shard.graphs.ghosts import keep_ghosts, node_tensor
from scidata.shard.graphs.hops import hop_order
from scidata.shard.graphs.routed import edge_tensor, route_edges
from scidata.shard.tensor import ShardTensor


def to_pyg(
    edge_index: Tensor,
    index_map: IndexMap,
    device_mesh: DeviceMesh,
    *,
    node: Mapping[str, Tensor] | None = None,
    node_with_ghosts: Mapping[str, Tensor] | None = None,
    edge: Mapping[str, Tensor] | None = None,
    graph: Mapping[str, Any] | None = None,
    edge_sizes: Sequence[int] | None = None,
) -> Any:
    """Make a ``torch_geometric.data.Data`` of this rank's part of a graph. Collective.

    Gathers along its ``edge_index`` fetch ghosts by one exchange for each tensor that is gathered, and scatters go to
    owned nodes: so a layer gives what it gives on one process, and so do its gradients. The order of edges is by
    rank, also after a layer has added self-loops. What does not work raises.

    Parameters
    ----------
    edge_index
        ``(2, num_local_edges)`` int64 in local numbering: sources among owned nodes and ghosts, targets owned.
    device_mesh
        One axis, the domain.
    node
        Fields of nodes by PyG's names (``x``, ``pos``, ``batch``): ShardTensors along dim 0 by the index map's bounds,
        or their owned parts.
    node_with_ghosts
        The same for fields whose ghosts are here already (read from disk): owned rows, then ghosts,
        ``(num_local, ...)``. Layers gather from them without an exchange, unless they require grad.
    edge
        Fields of this rank's edges in the order of ``edge_index``, ``(num_local_edges, ...)``: ``edge_attr``, say.
    graph
        Anything else, the same on each rank, passed on as it is.
    edge_sizes
        Edges of each rank, where known: checked.

    Returns
    -------
    data
        ``torch_geometric.data.Data``.

    Raises
    ------
    MissingDependencyError
        torch_geometric is not installed.
    ShardLayoutError
        Parts that do not fit the index map or each other; what only one rank can see raises on every rank.
    ConfigError
        One name given twice.
    """
    data_class = _data_class()
    names = [*(node or {}), *(node_with_ghosts or {}), *(edge or {}), *(graph or {}), "edge_index"]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{', '.join(twice)}: given more than once; fields of a Data need different names")
    routed = route_edges(edge_index, index_map, device_mesh, edge_sizes=edge_sizes)
    fields: dict[str, Any] = dict(graph or {})
    for name, values in (node or {}).items():
        local = values.to_local() if isinstance(values, ShardTensor) else values
        fields[name] = node_tensor(local, index_map, device_mesh)
    for name, values in (node_with_ghosts or {}).items():
        if len(values) != index_map.num_local:
            raise ShardLayoutError(
                f"{name} has {len(values)} rows, but the index map has {index_map.num_owned} owned rows and "
                f"{index_map.num_ghost} ghosts"
            )
        fields[name] = node_tensor(values[: index_map.num_owned], index_map, device_mesh)
        keep_ghosts(fields[name], values, routed.exchange)
    for name, values in (edge or {}).items():
        local = values.to_local() if isinstance(values, ShardTensor) else values
        fields[name] = edge_tensor(local, routed)
    return data_class(edge_index=routed, **fields)


def _data_class() -> Any:
    return optional_module("torch_geometric.data", "to_pyg() needs torch_geometric", "pyg").Data


# -- whole samples -----------------------------------------------------------------------------------------------------

#: What no layer reads: the owned rows of it, where a model runs without exchange.
FOR_LOSSES = ("y", "batch")


class GraphSample(Protocol):
    """What is asked of a sample; :class:`scidata.IrregularSample` is one, layers above."""

    def __iter__(self) -> Iterator[str]:
        """Yield the names of its fields."""

    @property
    def places(self) -> Mapping[str, Any]:
        """Entity and dim of each field."""

    @property
    def graph_values(self) -> Mapping[str, Any]:
        """What belongs to the whole graph, the same on every rank."""

    @property
    def parts(self) -> Any:
        """What ``call_on_parts`` runs on; None where samples are plain."""

    @property
    def entity(self) -> str:
        """Whose local ids edges hold."""

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The domain's axis; None where samples are plain."""

    @property
    def num_nodes(self) -> int:
        """Of all ranks."""

    @property
    def edge_index(self) -> Tensor | None:
        """Edges that end at owned nodes, ``(2, num)``."""

    @property
    def edge_index_with_ghosts(self) -> Tensor | None:
        """All edges among owned nodes and ghosts, ``(2, num)``."""

    def index_map(self, entity: str) -> IndexMap:
        """Return who owns which rows."""

    def entity_of(self, name: str) -> str:
        """Return where a field lives."""

    def rows_first(self, name: str, *, entity: str | None = None) -> tuple[Tensor, bool]:
        """Return local rows along dim 0, and whether ghosts are among them."""

    def with_ghosts(self, name: str) -> Tensor:
        """Return owned rows, then ghosts."""


def data_of(
    sample: GraphSample,
    *,
    x: Sequence[str] = (),
    y: Sequence[str] = (),
    edge_attr: Sequence[str] = (),
    khop: bool = False,
    by_hop: bool = False,
) -> Any:
    """Make what :meth:`IrregularSample.to_pyg` returns. Collective."""
    node_fields = _groups(sample, sample.entity, {"x": x, "y": y}, but={*x, *y, *edge_attr})
    edge_fields = _groups(sample, "edge", {"edge_attr": edge_attr}, but={*x, *y, *edge_attr})
    if khop and sample.parts is not None:
        return _of_parts(sample, node_fields, edge_fields, by_hop)
    entity, mesh = sample.entity, sample.device_mesh
    node: dict[str, Tensor] = {}
    node_with_ghosts: dict[str, Tensor] = {}
    edge: dict[str, Tensor] = {}
    for name, group in node_fields.items():
        columns, has_ghosts = _columns(sample, group, entity)
        (node_with_ghosts if has_ghosts else node)[name] = columns
    for name, group in edge_fields.items():
        edge[name] = _columns(sample, group, "edge")[0][: sample.index_map("edge").num_owned]
    taken = {*node, *node_with_ghosts, *edge}
    graph = {name: value for name, value in sample.graph_values.items() if name not in taken}
    graph["num_nodes"] = sample.num_nodes
    if mesh is None:
        return _plain(sample.edge_index, {**node, **node_with_ghosts, **edge, **graph})
    index = sample.edge_index
    device = next((v.device for v in (*node.values(), *node_with_ghosts.values())), torch.device("cpu"))
    data = to_pyg(
        torch.empty(2, 0, dtype=torch.int64, device=device) if index is None else index,
        sample.index_map(entity),
        mesh,
        node=node,
        node_with_ghosts=node_with_ghosts,
        edge=edge,
        graph=graph,
    )
    if index is None:
        del data.edge_index
    return data


class _Group(NamedTuple):
    """Fields that become one tensor; side by side as columns where ``flat``."""

    fields: tuple[str, ...]
    flat: bool


def _groups(
    sample: GraphSample, entity: str, given: Mapping[str, Sequence[str]], *, but: AbstractSet[str]
) -> dict[str, _Group]:
    """Say what becomes of the fields of an entity, by PyG's names; what was asked for is before a field of its name."""
    rest = [n for n in sample if n not in but and n in sample.places and sample.entity_of(n) == entity]
    asked = {name: _Group(tuple(fields), True) for name, fields in given.items() if fields}
    return {name: _Group((name,), False) for name in rest} | asked


def _of_parts(sample: GraphSample, node: Mapping[str, _Group], edge: Mapping[str, _Group], by_hop: bool) -> Any:
    """Return plain tensors of owned rows, then ghosts; with ``by_hop`` in that order, and how many these are."""
    assert sample.device_mesh is not None
    rows = sample.index_map(sample.entity)
    fields: dict[str, Any] = {**sample.graph_values, "num_nodes": rows.num_local}
    for entity, groups in ((sample.entity, node), ("edge", edge)):
        for name, (names, flat) in groups.items():
            for each in names:
                sample.rows_first(each, entity=entity)  # checked before anything is sent
            parts = [sample.with_ghosts(n).movedim(sample.places[n].dim, 0) for n in names]
            fields[name] = side_by_side(parts) if flat else parts[0]
    edge_index = sample.edge_index_with_ghosts
    if by_hop:
        assert edge_index is not None  # or there would be no parts
        order = hop_order(rows, edge_index, sample.parts.num_hops)
        fields |= {name: fields[name].index_select(0, order.rows) for name in node}
        fields |= {name: fields[name].index_select(0, order.edges) for name in edge}
        fields |= {"num_sampled_nodes": order.num_rows, "num_sampled_edges": order.num_edges}
        edge_index = order.edge_index
    for name in (fields.keys() & set(FOR_LOSSES)) - (sample.graph_values.keys() - node.keys()):
        fields[name] = node_tensor(fields[name][: rows.num_owned], rows, sample.device_mesh)
    return _plain(edge_index, fields)


def _columns(sample: GraphSample, group: _Group, entity: str) -> tuple[Tensor, bool]:
    """Return the rows of fields side by side; with ghosts where all of them have them."""
    parts = [sample.rows_first(name, entity=entity) for name in group.fields]
    has_ghosts = all(held for _, held in parts)
    num_rows = sample.index_map(entity).num_local if has_ghosts else sample.index_map(entity).num_owned
    rows = [values[:num_rows] for values, _ in parts]
    return (side_by_side(rows) if group.flat else rows[0]), has_ghosts


def side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Return the components of fields as columns, ``(num_rows, num_columns)``."""
    return torch.cat([values.reshape(len(values), math.prod(values.shape[1:])) for values in rows], dim=1)


def _plain(edge_index: Tensor | None, fields: Mapping[str, Any]) -> Any:
    return _data_class()(**({} if edge_index is None else {"edge_index": edge_index}), **fields)
