"""Graphs between two sets of nodes on shards, against one process: layers, plain code, exchanges, and what is refused."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scidata.core.index_map import IndexMap
from scidata.errors import ShardLayoutError, UnsupportedShardOp
from scidata.shard import ShardTensor
from scidata.shard.graphs.routed import RoutedIndex, route_relations
from scidata.testing import run_ranks
from tests.dist._pyg import hetero_to_pyg

pytest.importorskip("torch_geometric", reason="HeteroData needs torch_geometric (extra 'pyg')")

COUNTS = {"grid": 13, "mesh": 2}  # the mesh has fewer nodes than three ranks
NUM_EDGES = {
    ("grid", "to", "mesh"): 20,
    ("mesh", "to", "grid"): 23,
    ("grid", "near", "grid"): 30,
    ("mesh", "near", "mesh"): 4,
}
#: Nodes of each set on each rank.
LAYOUTS = {
    1: [{"grid": (13,), "mesh": (2,)}],
    2: [{"grid": (6, 7), "mesh": (1, 1)}, {"grid": (10, 3), "mesh": (0, 2)}],
    3: [{"grid": (4, 1, 8), "mesh": (1, 0, 1)}, {"grid": (0, 7, 6), "mesh": (0, 0, 2)}],
}


def whole():
    """Fields, and edges by where they end."""
    torch.manual_seed(1)
    rng = np.random.default_rng(2)
    edges, attr = {}, {}
    for (a, name, b), count in NUM_EDGES.items():
        src, dst = rng.integers(0, COUNTS[a], count), rng.integers(0, COUNTS[b], count)
        order = np.lexsort((src, dst))
        edges[a, name, b] = torch.from_numpy(np.stack([src[order], dst[order]]))
        attr[a, name, b] = torch.randn(count, 2).double()
    return {name: torch.randn(n, 4).double() for name, n in COUNTS.items()}, edges, attr


def cut(mesh, sizes, rank):
    """Return the HeteroData of this rank's part."""
    x, edges, attr = whole()
    bounds = {name: np.r_[0, np.cumsum(each)].astype(np.int64) for name, each in sizes.items()}
    held = {}
    for relation, (_, dst) in edges.items():
        held[relation] = slice(*np.searchsorted(dst.numpy(), bounds[relation[2]][rank : rank + 2]).tolist())
    maps = {}
    for name, own in bounds.items():
        wanted = np.unique(np.concatenate([edges[r][0, held[r]].numpy() for r in edges if r[0] == name]))
        ghosts = wanted[(wanted < own[rank]) | (wanted >= own[rank + 1])]
        maps[name] = IndexMap(bounds=own, part=rank, ghosts=ghosts)
    local = {
        r: torch.from_numpy(np.stack([maps[r[0]].to_local(e[0, held[r]]), maps[r[2]].to_local(e[1, held[r]])]))
        for r, e in edges.items()
    }
    node = {name: {"x": x[name][slice(*maps[name].owned)].clone()} for name in maps}
    edge = {r: {"edge_attr": attr[r][held[r]].clone()} for r in edges}
    return hetero_to_pyg(local, maps, mesh, node=node, edge=edge, graph={"step": 3}), local, maps


class Interaction(nn.Module):
    """An encoder as GraphCast's: messages of edges, sums at the targets, plain PyTorch."""

    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(10, 6), nn.SiLU(), nn.Linear(6, 4), nn.LayerNorm(4))
        self.node = nn.Sequential(nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 4), nn.LayerNorm(4))

    def forward(self, x, edge_index, edge_attr):
        source, target = x
        messages = self.edge(torch.cat([edge_attr, source[edge_index[0]], target[edge_index[1]]], -1))
        sums = torch.zeros_like(target).index_add_(0, edge_index[1], messages.to(target.dtype))
        return target + self.node(torch.cat([target, sums], -1))


def layers():
    import torch_geometric.nn as g

    mlp = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))  # noqa: E731
    plain = {"add_self_loops": False}
    return {
        "SimpleConv": (g.SimpleConv(), False),
        "SimpleConv max": (g.SimpleConv(aggr="max"), False),
        "SAGEConv": (g.SAGEConv((4, 4), 3), False),
        "SAGEConv max": (g.SAGEConv((4, 4), 3, aggr="max"), False),
        "GraphConv": (g.GraphConv((4, 4), 3), False),
        "GATConv": (g.GATConv((4, 4), 3, heads=2, edge_dim=2, **plain), True),
        "GATv2Conv": (g.GATv2Conv((4, 4), 3, heads=2, edge_dim=2, **plain), True),
        "TransformerConv": (g.TransformerConv((4, 4), 3, heads=2, edge_dim=2), True),
        "GINConv": (g.GINConv(mlp()), False),
        "GINEConv": (g.GINEConv(mlp(), edge_dim=2), True),
        "EdgeConv": (g.EdgeConv(nn.Linear(8, 3)), False),
        "NNConv": (g.NNConv((4, 4), 3, nn.Linear(2, 12)), True),
        "CGConv": (g.CGConv((4, 4), 2), True),
        "GENConv": (g.GENConv((4, 4), 3, edge_dim=2), True),
        "GMMConv": (g.GMMConv((4, 4), 3, 2, 3), True),
        "ResGatedGraphConv": (g.ResGatedGraphConv((4, 4), 3, edge_dim=2), True),
        "GeneralConv": (g.GeneralConv((4, 4), 3, 2, attention=True), True),
        "FeaStConv": (g.FeaStConv(4, 3, heads=2, add_self_loops=False), False),
        "LEConv": (g.LEConv((4, 4), 3), False),
        "MFConv": (g.MFConv((4, 4), 3, max_degree=5), False),
        "Interaction": (Interaction(), True),
    }


def models():
    import torch_geometric.nn as g

    class GNN(nn.Module):
        def __init__(self, make, **options):
            super().__init__()
            self.first, self.second = make((4, 4), 4, **options), make((4, 4), 3, **options)

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).tanh(), edge_index)

    meta = [*COUNTS], [*NUM_EDGES]
    return {
        "HeteroConv": g.HeteroConv({r: g.SAGEConv((4, 4), 3) for r in NUM_EDGES}),
        "to_hetero SAGE": g.to_hetero(GNN(g.SAGEConv), meta),
        "to_hetero GAT": g.to_hetero(GNN(g.GATConv, add_self_loops=False), meta),
        "to_hetero GraphConv": g.to_hetero(GNN(g.GraphConv), meta),
        "HGTConv": g.HGTConv(4, 4, meta, 2),
        "HANConv": g.HANConv(4, 4, meta, 2),
    }


def loss_of(found):
    total = 0.0
    for each in found if isinstance(found, tuple) else (found,):
        weight = torch.arange(1.0, each.shape[-1] + 1, dtype=torch.float64)
        total = total + (each.sin() * weight).sum() + (each * each).mean()
    return total


def compare(what, model, call, plain, shards):
    """Outputs, and gradients of parameters and inputs; the leaves are by name."""
    torch.manual_seed(4)
    wanted = call(model, plain)
    loss_of(wanted).backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(4)
    found = call(model, shards)
    loss = loss_of(found)
    assert type(loss) is torch.Tensor
    loss.backward()
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True)
    close = lambda a, b, name: torch.testing.assert_close(  # noqa: E731
        a, b, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {name}: {m}"
    )
    for ours, theirs in pairs:
        close(ours.full_tensor() if isinstance(ours, ShardTensor) else ours, theirs, "output")
    for (name, p), grad in zip(model.named_parameters(), expected, strict=True):
        assert (p.grad is None) == (grad is None), (what, name)
        if grad is not None:
            close(p.grad, grad, name)
    model.zero_grad()
    for name, leaf in shards.items():
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        theirs = torch.zeros_like(plain[name]) if plain[name].grad is None else plain[name].grad
        close(grad.full_tensor(), theirs, f"gradient of {name}")


def leaves(x, attr):
    named = {**x, **{"__".join(r): each for r, each in attr.items()}}
    return {name: each.detach().clone().requires_grad_() for name, each in named.items()}


def check(rank, num_ranks, every):
    device_mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x, edges, attr = whole()
    for place, sizes in enumerate(LAYOUTS[num_ranks]):
        data, local, maps = cut(device_mesh, sizes, rank)
        assert {name: data[name].num_nodes for name in COUNTS} == COUNTS
        assert data.step == 3
        assert data.validate()
        for relation, e in edges.items():
            routed = data[relation].edge_index
            assert isinstance(routed, RoutedIndex)
            assert torch.equal(routed.full_tensor(), e)
        ours = lambda data=data: leaves(data.x_dict, data.edge_attr_dict)  # noqa: E731
        torch.manual_seed(0)
        for name, (layer, with_attr) in layers().items() if every or place == 0 else ():
            for a, kind, b in list(edges)[:2]:
                r, index = "__".join((a, kind, b)), {True: edges[a, kind, b], False: data[a, kind, b].edge_index}

                def call(model, given, index=index, a=a, b=b, r=r, with_attr=with_attr):
                    e = index[not isinstance(given[a], ShardTensor)]
                    return model((given[a], given[b]), e, given[r]) if with_attr else model((given[a], given[b]), e)

                compare(f"{name} {a} {b} {sizes}", layer.double(), call, leaves(x, attr), ours())
        for name, model in models().items():

            def call(model, given, data=data):
                shards = isinstance(given["grid"], ShardTensor)
                e = data.edge_index_dict if shards else edges
                found = model({each: given[each] for each in COUNTS}, e)
                return tuple(found[each] for each in COUNTS)

            compare(f"{name} {sizes}", model.double(), call, leaves(x, attr), ours())
    check_exchanges(data, num_ranks)
    check_refused(data, local, maps, device_mesh, rank, num_ranks)


def check_exchanges(data, num_ranks):
    """Relations from one set share what was exchanged for a tensor."""
    import torch_geometric.nn as g

    calls, function = [], dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs)
    try:
        grid = data["grid"].x * 2
        for relation in (("grid", "to", "mesh"), ("grid", "near", "grid")):
            g.SimpleConv()((grid, data[relation[2]].x), data[relation].edge_index)
    finally:
        dist.all_to_all_single = function
    assert len(calls) == (num_ranks > 1)


def check_refused(data, local, maps, device_mesh, rank, num_ranks):
    import torch_geometric.nn as g

    relation = ("grid", "to", "mesh")
    index = data[relation].edge_index
    if num_ranks > 1:
        with pytest.raises(UnsupportedShardOp, match="add_self_loops=False"):
            g.GATConv((4, 4), 3).double()((data["grid"].x, data["mesh"].x), index)
        bad = {r: e.clone() for r, e in local.items()}
        if rank == 1:
            bad[relation] = torch.tensor([[0], [99]])
        for make in (
            lambda: hetero_to_pyg(bad, maps, device_mesh),
            lambda: route_relations(bad, maps, device_mesh),
        ):
            with pytest.raises(ShardLayoutError, match=r"rank 1: .*targets that are not owned"):
                make()
        rows = maps["mesh"].num_owned + (rank == 1)
        with pytest.raises(ShardLayoutError, match="rank 1: x of mesh"):
            hetero_to_pyg(local, maps, device_mesh, node={"mesh": {"x": torch.zeros(rows, 2)}})
    turned = index.flip(0)
    assert turned[0].exchange is index[1].exchange
    assert index[[1, 0]][1].exchange is index[0].exchange
    with pytest.raises(UnsupportedShardOp, match="ids of two sets"):
        index.exchange  # noqa: B018


@pytest.mark.slow_for("2-True", "3-True")
@pytest.mark.parametrize(("num_ranks", "every"), [(1, True), (2, True), (3, False), (3, True)])
def test_as_in_one_process(num_ranks, every):
    """All models in all layouts, layers in the first, or in ``every`` one."""
    run_ranks(check, num_ranks, every, timeout=240)
