"""PyG's aggregators, norms, pools, tools and models on a graph of three uneven parts, against one process."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardTensor
from scidata.shard.torch_internals import tree_leaves
from scidata.testing import run_ranks
from tests.dist._graphs import NUM_NODES
from tests.dist._pyg import _close, _inputs, _parts

SIZES = (5, 1, 5)
BATCH = torch.tensor([0] * 4 + [1] * 5 + [2] * 2)
EDGES = torch.tensor([[1, 2, 0], [3, 9, 0]])


class Calls(nn.Module):
    """A function as a module, or a module that is called otherwise than with all that is given."""

    def __init__(self, call, inner=None):
        super().__init__()
        self.call, self.inner = call, inner

    def forward(self, *given):
        return self.call(*given) if self.inner is None else self.call(self.inner, *given)


def _aggregators(g):
    degrees = torch.tensor([2, 1, 2, 3])
    yield g.MulAggregation()
    yield g.SoftmaxAggregation(learn=True)
    yield g.PowerMeanAggregation(learn=True)
    yield g.LSTMAggregation(4, 3)
    yield g.GRUAggregation(4, 3)
    yield g.Set2Set(4, 2)
    yield g.DegreeScalerAggregation(["mean", "max"], ["identity", "amplification"], degrees)
    yield g.SortAggregation(3)
    yield g.GraphMultisetTransformer(4, 2, heads=2)
    yield g.AttentionalAggregation(nn.Linear(4, 1))
    yield g.MLPAggregation(4, 3, 5, num_layers=1)
    yield g.DeepSetsAggregation(nn.Linear(4, 5), nn.Linear(5, 3))
    yield g.SetTransformerAggregation(4, 2, heads=2)
    yield g.LCMAggregation(4, 3)
    yield g.VariancePreservingAggregation()


def _cases():
    import torch_geometric.nn as g
    import torch_geometric.utils as u

    yield from ((aggregator, "x b") for aggregator in _aggregators(g))
    yield Calls(lambda m, x, e: m(torch.stack([x, x.sin()], 1), e), g.DNAConv(4, 2)), "x e"
    yield Calls(lambda m, x, e: m(x, x[:, :3], x[:, 1:], e), g.PPFConv(nn.Linear(8, 5), nn.Linear(5, 3))), "x e"
    for norm in (
        g.GraphNorm(4),
        g.GraphSizeNorm(),
        g.PairNorm(),
        g.MeanSubtractionNorm(),
        g.InstanceNorm(4, affine=True),
    ):
        yield norm, "x b"
    yield g.DiffGroupNorm(4, 2), "x"
    conv = g.SimpleConv()
    relation = ("n", "to", "n")
    yield Calls(lambda m, x, e: m({"n": x}, {relation: e})["n"], g.HGTConv(4, 4, (["n"], [relation]))), "x e"
    yield Calls(lambda x, e: conv(x, u.add_self_loops(e)[0].remainder_(7))), "x e"
    for pool in (g.TopKPooling(4, 0.5), g.SAGPooling(4, 0.5)):
        yield Calls(lambda p, x, e, b: (lambda o: [o[0], conv(o[0], o[1])])(p(x, e, batch=b)), pool), "x e b"
        yield Calls(lambda p, x, e: (lambda o: [o[0], conv(o[0], o[1])])(p(x, e)), pool), "x e"
    yield Calls(lambda p, x, b: [*p(x, b)], g.MemPooling(4, 4, 2, 2)), "x b"
    tools = [
        (lambda x, e: conv(x, u.dropout_edge(e, 0.5)[0]), "x e"),
        (lambda x, e: conv(x, u.dropout_node(e, 0.5, num_nodes=NUM_NODES)[0]), "x e"),
        (lambda x, b: [*u.to_dense_batch(x, b)], "x b"),
        (lambda x, e: u.to_dense_adj(e, max_num_nodes=NUM_NODES) + x.sum(), "x e"),
        (lambda x, e: conv(x, u.coalesce(e)), "x e"),
        (lambda x, e, w: conv(x, *u.coalesce(e, w)), "x e w"),
        (lambda x, e: conv(x, u.sort_edge_index(e)), "x e"),
        (lambda x, e: conv(x, u.add_self_loops(u.remove_self_loops(e)[0], num_nodes=NUM_NODES)[0]), "x e"),
        (lambda x, e: [x[e], x.T[:, e], torch.arange(NUM_NODES)[e] * x.sum(), (x @ x.T)[e[0], e[1]]], "x e"),
        (lambda x, e: conv(x, torch.cat([u.add_self_loops(e)[0], EDGES], 1)), "x e"),
        (lambda x, e: conv(x, torch.cat([e, EDGES[:, :0]], 1)), "x e"),
        (lambda x, e, w: torch.cat([w, w.new_ones(3), w]).cumsum(0), "x e w"),
        (lambda x, e: conv(x, u.subgraph(torch.arange(5), e, num_nodes=NUM_NODES)[0]), "x e"),
    ]
    yield from ((Calls(tool), names) for tool, names in tools)
    for name in ("GCN", "GIN", "GAT", "EdgeCNN"):
        yield getattr(g.models, name)(4, 6, 2, 3, dropout=0.3, jk="cat", norm="graph_norm"), "x e"
    yield g.models.GCN(4, 6, 2, 3, jk="lstm"), "x e"
    yield g.models.AttentiveFP(4, 6, 3, 2, 2, 2), "x e a b"
    yield g.SAGEConv(4, 3, aggr="lstm"), "x e"
    yield g.SimpleConv(aggr=g.SetTransformerAggregation(4, 2, heads=2)), "x e"


def _run(module, given):
    for x in given:
        if x.is_floating_point():
            x.requires_grad_()
    torch.manual_seed(11)
    results = [x for x in tree_leaves(module(*given)) if x.is_floating_point()]
    torch.manual_seed(5)
    loss = sum((x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in results)
    assert type(loss) is torch.Tensor
    loss.backward()
    return results


def check_cases(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(7)
    for i, (module, names) in enumerate(_cases()):
        edges, x, attr, weight = _inputs()
        data = _parts(mesh, SIZES, rank, b=BATCH)
        whole = {"x": x, "e": edges, "a": attr, "w": weight, "b": BATCH}
        parts = {"x": data.x, "e": data.edge_index, "a": data.edge_attr, "w": data.edge_weight, "b": data.b}
        one, many = [[given[name] for name in names.split()] for given in (whole, parts)]
        twin = copy.deepcopy(module.double())
        module.zero_grad()  # one is in two cases
        try:
            expected, found = _run(module, one), _run(twin, many)
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
            raise AssertionError(f"case {i}: {module} of {names}") from error


def test_like_one_process():
    run_ranks(check_cases, 3, timeout=300)


def check_order(rank, num_ranks):
    """What goes along the edges, also those that were joined with self-loops on each rank, is as in one process."""
    import torch_geometric.utils as u

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    index, whole = _parts(mesh, (6, 5), rank).edge_index, _parts(mesh, (6, 5), rank).edge_index.full_tensor()
    loops, looped = u.add_self_loops(index)[0], u.add_self_loops(whole)[0]
    numbers = torch.arange(looped.shape[1])
    mixed, plain = loops[0] * 3 + loops[1] * numbers, looped[0] * 3 + looped[1] * numbers

    def to_loops(edges, _):  # as ClusterGCN does
        ends, _ = u.add_self_loops(u.remove_self_loops(edges)[0])
        weight = ends[0] * 3 + ends[1]
        weight[ends[0] == ends[1]] += torch.arange(NUM_NODES)
        return weight.cumsum(0)

    for function in (
        lambda e, m: u.to_undirected(e),
        lambda e, m: u.coalesce(e.flip(1)),
        lambda e, m: m.sort().values,
        lambda e, m: m.argsort(stable=True) * numbers,
        lambda e, m: m.cumsum(0) - m.flip(0) + m.roll(3),
        lambda e, m: m[numbers.flip(0)] + numbers,
        lambda e, m: m.topk(4).indices,
        lambda e, m: m[m.argsort(stable=True)] * 2 - m[m.argsort(stable=True) - len(m)],
        lambda e, m: torch.stack([m.argmax(), (m * 2).argmin()]),
        lambda e, m: torch.zeros(5, dtype=torch.int64).index_add(0, m % 5, numbers),
        lambda e, m: m.diff() * numbers[1:],
        lambda e, m: m.sort().values * 2 + m,
        lambda e, m: (m + m.sort().values * 2) * numbers,
        lambda e, m: torch.stack([m, m.sort().values, m.flip(0)], 1) * numbers[:, None],
        lambda e, m: torch.cat([m[:, None], m.flip(0)[:, None]], 1) * numbers[:, None],
        lambda e, m: torch.where(m > 3, m, m.flip(0)) * numbers,
        lambda e, m: torch.addcmul(m, m.flip(0), m.roll(1)) * numbers,
        lambda e, m: torch.cumsum(input=m, dim=0) * numbers,
        lambda e, m: torch.stack([m, m * 2, -m], 1).max(1).values.mul(numbers) + m.argmin(),
        lambda e, m: m[:, None].expand(-1, 2).argmax(0),
        lambda e, m: torch.broadcast_tensors(m[:, None], torch.stack([m.flip(0), m], 1))[0] * numbers[:, None],
        lambda e, m: torch.linalg.cross(*[torch.stack([m, m * i, -m], 1) for i in (2, 5)]) * numbers[:, None],
        lambda e, m: m.new_zeros(m.shape).scatter_add(0, e.new_zeros(m.shape[0]) + m % 4, m.flip(0)),
        lambda e, m: m[:13] * numbers[:13] + m[1:14],
        lambda e, m: torch.stack([m, -m], 1)[4:, 1:] * numbers[4:, None],
        lambda e, m: m[3:][:-2][len(m) - 9 :] * 2 + m[:0].sum(),
        lambda e, m: (m + 0)[2:5].mul_(numbers[2:5]),
        lambda e, m: m[numbers % 3 > 0] * numbers[numbers % 3 > 0],
        lambda e, m: (m[m % 2 > 0] * 2).cumsum(0) - m[m % 2 > 0].flip(0),
        lambda e, m: torch.stack([m, -m], 1)[m > 2][3:].cumsum(0),
        to_loops,
        lambda e, m: m + 0,
        lambda e, m: (
            m.redistribute(sizes={"domain": (1, len(m) - 1)}) * numbers if isinstance(m, ShardTensor) else m * numbers
        ),
        lambda e, m: m.redistribute(placements=[Replicate()]) * numbers if isinstance(m, ShardTensor) else m * numbers,
    ):
        expected, found = function(whole, plain), function(index, mixed)
        assert torch.equal(found.full_tensor() if isinstance(found, ShardTensor) else found, expected)
    counts = torch.zeros(NUM_NODES, dtype=torch.int64)
    counts.scatter_add_(0, loops[1], mixed)  # from now on it stands for a ShardTensor
    assert not counts.requires_grad
    assert counts.is_leaf
    for refused in (lambda m: m[::2], lambda m: m[0], lambda m: m.index_put_((numbers[:1],), numbers[0])):
        with pytest.raises(UnsupportedShardOp, match="their order"):
            refused(mixed)


def test_order():
    run_ranks(check_order, 2)
