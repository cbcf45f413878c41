"""Shared by tests: _close, _inputs, _parts."""

import torch

from scidata.shard import ShardTensor
from scidata.shard.rows.relayout import gather_full
from tests.dist._graphs import NUM_NODES, part_of, whole_edges


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
    from scidata.interop.pyg import to_pyg

    edges, x, attr, weight = _inputs()
    part = part_of(edges, sizes, rank)
    fields = {name: values[part.nodes].clone() for name, values in {"x": x, **node}.items()}
    own = {"edge_attr": attr[part.edges].clone(), "edge_weight": weight[part.edges].clone()}
    return to_pyg(part.edge_index, part.index_map, mesh, node=fields, edge=own)
