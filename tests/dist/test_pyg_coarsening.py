"""PyG's layers that sample edges, coarsen graphs in Python or by sparse matrices, or free their inputs' memory."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scidata.shard import ShardTensor
from scidata.testing import run_ranks
from tests.dist._graphs import NUM_NODES
from tests.dist._pyg import _close, _inputs, _parts
from tests.dist.test_pyg_more import BATCH, Calls, _run

LAYOUTS = {1: [(11,)], 2: [(6, 5), (0, 11)], 3: [(5, 1, 5), (6, 0, 5)], 4: [(10, 1)]}


def attention(layer, *given):
    """What the layer returns, and the loss of its attention to edges that are there and to others."""
    return layer(*given), layer.get_attention_loss()


def reversible(inner, x, edges):
    """Layers that free their input's memory, and compute it again in backward."""
    first = x * 2
    result = inner(first, edges).sin() * 3
    part = first.to_local() if isinstance(first, ShardTensor) else first
    assert not part.untyped_storage().nbytes()
    return result


def unpooled(pool, x, edges, batch):
    pooled, new_edges, _, info = pool(x, edges, batch)
    return pooled, new_edges * 1.0, pool.unpool(pooled.cos(), info)[0]


class Stack(nn.Module):
    """Reversible layers one behind the other."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *given):
        for layer in self.layers:
            x = layer(x, *given)
        return x


def _cases():
    import torch_geometric.nn as g
    import torch_geometric.utils as u

    for options in ({}, {"edge_sample_ratio": 0.7, "dropout": 0.3}, {"attention_type": "SD", "is_undirected": True}):
        yield Calls(attention, g.SuperGATConv(4, 3, heads=2, **options)), "x e"
    yield Calls(lambda m, x, e, b: attention(m, x, e, None, b), g.SuperGATConv(4, 3, add_self_loops=False)), "x e b"
    for sample in (
        lambda e: u.negative_sampling(e, NUM_NODES),
        lambda e: u.negative_sampling(e, NUM_NODES, method="dense", force_undirected=True),
        lambda e: u.structured_negative_sampling(e, NUM_NODES)[2],
    ):
        yield Calls(lambda x, e, sample=sample: x[sample(e)]), "x e"
    # scores without ties, which torch sorts in any order: dropout makes some, and softmax where an edge ends alone
    softmax, pool = g.EdgePooling.compute_edge_score_softmax, g.EdgePooling
    for score in (lambda raw, *given: softmax(raw, *given) + raw.sin() / 99, pool.compute_edge_score_sigmoid):
        yield Calls(unpooled, g.EdgePooling(4, edge_score_method=score)), "x e b"
    for method in ("tanh", "sigmoid", "log_softmax"):
        yield Calls(lambda p, *given: p(*given)[:1], g.ClusterPooling(4, method, dropout=0.2)), "x e b"
    for options in ({}, {"GNN": g.GraphConv, "add_self_loops": True, "dropout": 0.2}):
        pool = g.ASAPooling(4, 0.5, **options)
        yield Calls(lambda p, x, e, w: p(x, e, w)[:2], pool), "x e w"
        yield Calls(lambda p, x, e, b: p(x, e, batch=b)[:1], pool), "x e b"
    yield g.GraphUNet(4, 6, 3, 2), "x e b"
    yield g.GraphUNet(4, 6, 3, 3, pool_ratios=0.8, sum_res=False), "x e"
    seed = g.SAGEConv(2, 2)
    yield Calls(reversible, g.GroupAddRev(seed, num_groups=2)), "x e"
    yield Calls(reversible, Stack(*[g.GroupAddRev(g.GCNConv(2, 2), num_groups=2) for _ in range(3)])), "x e"
    yield Calls(lambda m, x, e: m.inverse(m(x * 1, e).sin(), e) * 2, g.GroupAddRev(seed, num_groups=2)), "x e"


def check(rank, num_ranks):
    mesh = init_device_mesh(
        "cpu", (2, 2) if num_ranks == 4 else (num_ranks,), mesh_dim_names=("domain", "b")[: 1 + num_ranks // 4]
    )
    torch.set_default_dtype(torch.float64)
    for sizes in LAYOUTS[num_ranks]:
        torch.manual_seed(7)
        for i, (module, names) in enumerate(_cases()):
            edges, x, _, weight = _inputs()
            data = _parts(mesh["domain"], sizes, mesh.get_local_rank("domain"), b=BATCH)
            whole = {"x": x, "e": edges, "w": weight, "b": BATCH}
            parts = {"x": data.x, "e": data.edge_index, "w": data.edge_weight, "b": data.b}
            one, many = [[given[name] for name in names.split()] for given in (whole, parts)]
            module.double().zero_grad()
            twin = copy.deepcopy(module)
            try:
                random.seed(1)
                expected = _run(module, one)
                random.seed(1)
                found = _run(twin, many)
                for theirs, ours in zip(expected, found, strict=True):
                    _close(ours, theirs, "result")
                for (name, theirs), ours in zip(module.named_parameters(), twin.parameters(), strict=True):
                    assert (theirs.grad is None) == (ours.grad is None), name
                    if theirs.grad is not None:
                        _close(ours.grad, theirs.grad, name)
                for theirs, ours in zip(one, many, strict=True):
                    if theirs.grad is not None:
                        _close(ours.grad, theirs.grad, "input grad")
            except Exception as error:
                raise AssertionError(f"case {i}: {module} of {names} at {sizes}") from error


@pytest.mark.slow_for("4")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore")
def test_like_one_process(num_ranks):
    run_ranks(check, num_ranks, timeout=170)
