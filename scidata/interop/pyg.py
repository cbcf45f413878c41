"""PyTorch Geometric: a ``Data`` of ShardTensors, on which its stock layers run unmodified."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scidata.errors import ConfigError, MissingDependencyError, ShardLayoutError
from scidata.index_map import IndexMap
from scidata.shard.graph import keep_ghosts, node_tensor
from scidata.shard.routed import edge_tensor, route_edges
from scidata.shard.tensor import ShardTensor

__all__ = ["to_pyg"]


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
    try:
        data = importlib.import_module("torch_geometric.data")
    except ImportError as e:
        raise MissingDependencyError("to_pyg() needs torch_geometric; pip install 'scidata[pyg]'") from e
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
    return data.Data(edge_index=routed, **fields)
