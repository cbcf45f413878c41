"""Shared by tests: to_pyg, hetero_to_pyg, _close, _inputs, _parts."""

import torch

from scidata.data.to_pyg import Rows, filled, sharded
from scidata.shard import ShardTensor
from scidata.shard.rows.redistribute import gather_full
from tests.dist._graphs import NUM_NODES, part_of, whole_edges


def hetero_to_pyg(
    relations, index_maps, mesh, *, node=None, node_with_ghosts=None, edge=None, graph=None, several=True
):
    """Make a ``HeteroData`` of this rank's part of a graph that lies in no store; of one set a ``Data``."""
    import torch_geometric.data as data

    fields = {name: {} for name in index_maps}
    for given, has_ghosts in ((node, False), (edge, False), (node_with_ghosts, True)):
        for entity, named in (given or {}).items():
            rows = {name: Rows(values, has_ghosts) for name, values in named.items()}
            fields[entity] = fields.get(entity, {}) | rows
    sizes = {name: rows.num_global for name, rows in index_maps.items()}
    values = {(None, name): value for name, value in (graph or {}).items()}
    made = data.HeteroData() if several else data.Data()
    return filled(made, sizes, *sharded(relations, index_maps, mesh, fields), values)


def to_pyg(edge_index, index_map, mesh, *, node=None, node_with_ghosts=None, edge=None, graph=None):
    """Make a ``Data`` of one node set and its edges."""
    given = {"node": {"node": node or {}}, "node_with_ghosts": {"node": node_with_ghosts or {}}}
    given["edge"] = {("node", "edge", "node"): edge or {}}
    relations = {("node", "edge", "node"): edge_index}
    return hetero_to_pyg(relations, {"node": index_map}, mesh, **given, graph=graph, several=False)


def _close(found, expected, what):
    full = gather_full(found.local, found.spec) if isinstance(found, ShardTensor) else found
    assert full.shape == expected.shape, f"{what}: {tuple(full.shape)} is not {tuple(expected.shape)}"
    torch.testing.assert_close(full, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


def _inputs(dtype=torch.float64):
    torch.manual_seed(3)
    edges = whole_edges()
    x = torch.rand(NUM_NODES, 4, dtype=dtype) + 0.1
    attr = torch.randn(edges.shape[1], 2, dtype=dtype)
    weight = torch.rand(edges.shape[1], dtype=dtype) + 0.5
    return edges, x, attr, weight


def _parts(mesh, sizes, rank, **node):
    edges, x, attr, weight = _inputs()
    part = part_of(edges, sizes, rank)
    fields = {name: values[part.nodes].clone() for name, values in {"x": x, **node}.items()}
    own = {"edge_attr": attr[part.edges].clone(), "edge_weight": weight[part.edges].clone()}
    return to_pyg(part.edge_index, part.index_map, mesh, node=fields, edge=own)
