"""Stock PyG layers on shards against one process: results, parameter gradients, input gradients."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scidata.data.to_pyg import pyg_of
from scidata.errors import MissingDependencyError, ShardLayoutError, UnsupportedShardOp
from scidata.shard.graphs.ghosts import halo_exchange
from scidata.shard.graphs.parts import call_on_parts
from scidata.testing import run_ranks
from tests.dist._graphs import LAYOUTS, NUM_NODES, khop_part_of, part_of, parts_of, whole_edges
from tests.dist._pyg import _close, _inputs, _parts, to_pyg

#: For what runs every layer: even, one node, none; each but the first has ghosts.
CHOSEN = {1: [(11,)], 2: [(6, 5), (10, 1)], 3: [(5, 1, 5), (6, 0, 5)], 4: [(3, 0, 1, 7)]}
#: Layers that look at edges that start at a node, or at their number.
BACKWARDS = {"GCNConv reversed", "DirGNNConv", "ChebConv"}
#: Layers that look two hops far: at the number of edges that end at the sources of edges.
DEGREES = {"GCNConv", "GCNConv weights", "GCNConv no loops"}


def _mlp(*sizes):
    layers = [nn.Linear(sizes[0], sizes[1])]
    for a, b in itertools.pairwise(sizes[1:]):
        layers += [nn.Tanh(), nn.Linear(a, b)]
    return nn.Sequential(*layers)


def _layers():
    import torch_geometric.nn as g

    degrees = torch.tensor([2, 1, 2, 3, 2, 1])
    pna = {"scalers": ["identity", "amplification", "attenuation", "linear", "inverse_linear"], "deg": degrees}
    aggregators = ["mean", "min", "max", "std", "var", "sum"]
    layers = {
        "GraphConv": (g.GraphConv(4, 3), "x e w"),
        "GraphConv mean": (g.GraphConv(4, 3, aggr="mean"), "x e"),
        "GraphConv max": (g.GraphConv(4, 3, aggr="max"), "x e w"),
        "SAGEConv": (g.SAGEConv(4, 3), "x e"),
        "SAGEConv project max": (g.SAGEConv(4, 3, aggr="max", project=True, normalize=True), "x e"),
        "GCNConv": (g.GCNConv(4, 3), "x e"),
        "GCNConv weights": (g.GCNConv(4, 3, improved=True), "x e w"),
        "GCNConv no loops": (g.GCNConv(4, 3, add_self_loops=False), "x e w"),
        "GCNConv reversed": (g.GCNConv(4, 3, flow="target_to_source"), "x e w"),
        "GATv2Conv": (g.GATv2Conv(4, 3, heads=2), "x e"),
        "GATv2Conv edges": (g.GATv2Conv(4, 3, heads=2, edge_dim=2, concat=False, residual=True), "x e a"),
        "GATv2Conv fill": (g.GATv2Conv(4, 3, edge_dim=2, fill_value=0.5, share_weights=True), "x e a"),
        "GATConv": (g.GATConv(4, 3, heads=2, edge_dim=2), "x e a"),
        "GINConv": (g.GINConv(_mlp(4, 5, 3), train_eps=True), "x e"),
        "GINEConv": (g.GINEConv(_mlp(4, 5, 3), edge_dim=2, train_eps=True), "x e a"),
        "TransformerConv": (g.TransformerConv(4, 3, heads=2, edge_dim=2, beta=True), "x e a"),
        "NNConv": (g.NNConv(4, 3, _mlp(2, 5, 12), aggr="mean"), "x e a"),
        "EdgeConv": (g.EdgeConv(_mlp(8, 5, 3)), "x e"),
        "EdgeConv sum": (g.EdgeConv(_mlp(8, 5, 3), aggr="sum"), "x e"),
        "PNAConv": (g.PNAConv(4, 4, aggregators, **pna, edge_dim=2, towers=2, pre_layers=2, post_layers=2), "x e a"),
        "PNAConv divided": (g.PNAConv(4, 4, aggregators, **pna, towers=2, divide_input=True, train_norm=True), "x e"),
    }
    layers["GATConv dropout"] = (g.GATConv(4, 3, heads=2, edge_dim=2, dropout=0.5), "x e a")
    layers["GATv2Conv dropout"] = (g.GATv2Conv(4, 3, heads=2, dropout=0.4), "x e")
    layers["TransformerConv dropout"] = (g.TransformerConv(4, 3, dropout=0.5), "x e")
    layers["GatedGraphConv"] = (g.GatedGraphConv(4, 1), "x e")
    layers["ChebConv"] = (g.ChebConv(4, 3, 2), "x e w")
    layers["DirGNNConv"] = (g.DirGNNConv(g.SAGEConv(4, 3)), "x e")
    layers["GENConv"] = (g.GENConv(4, 3, learn_t=True, edge_dim=2, norm="batch"), "x e a")
    for aggr in ("sum", "mean", "min", "max", "mul", "var", "std", "softmax", "powermean"):
        layers[f"SimpleConv {aggr}"] = (g.SimpleConv(aggr=aggr), "x e")
    several = g.MultiAggregation(["mean", g.SoftmaxAggregation(learn=True), "std", "max"], mode="cat")
    layers["SimpleConv several"] = (g.SimpleConv(aggr=several), "x e")
    layers["fused"] = (g.SimpleConv(aggr=["mean", "var", "sum", "std", "min"]), "x e")
    return layers


class Net(nn.Module):
    """Layers on layers, normalised, pooled by graph."""

    def __init__(self):
        super().__init__()
        import torch_geometric.nn as g

        self.first, self.second = g.SAGEConv(4, 6), g.GATv2Conv(6, 3, heads=2, edge_dim=2)
        self.norm, self.plain_norm = g.BatchNorm(6), nn.BatchNorm1d(6)
        self.layer_norm, self.graph_norm = g.LayerNorm(6), g.GraphNorm(6)
        self.message, self.head = g.GINEConv(_mlp(6, 6), edge_dim=2), nn.Linear(18, 2)

    def forward(self, x, edge_index, edge_attr, batch):
        import torch_geometric.nn as g

        x = F.silu(self.norm(self.first(x, edge_index)))
        x = x + self.plain_norm(self.second(x, edge_index, edge_attr)).relu()
        x = self.graph_norm(self.layer_norm(x), batch)
        x = x + self.message(x, edge_index, edge_attr)
        pooled = [g.global_mean_pool(x, batch), g.global_add_pool(x, batch), g.global_max_pool(x, batch)]
        return self.head(torch.cat(pooled, -1))


def _arguments(names, x, edge_index, attr, weight):
    return [{"x": x, "e": edge_index, "a": attr, "w": weight}[name] for name in names.split()]


def _compare(layer, whole, shards, what):
    """Results and gradients of one process and of shards; the arguments that are floats require grad."""
    leaves = [(w, s) for w, s in zip(whole, shards, strict=True) if w.is_floating_point()]
    for pair in leaves:
        for each in pair:
            each.requires_grad_()
            each.grad = None
    layer.zero_grad()
    torch.manual_seed(4)
    expected = layer(*whole)
    torch.manual_seed(5)
    seed = torch.randn_like(expected)
    (expected * seed).sum().backward()
    wanted = [p.grad.clone() if p.grad is not None else None for p in layer.parameters()]
    layer.zero_grad()
    torch.manual_seed(4)
    found = layer(*shards)
    _close(found, expected.detach(), what)
    loss = (found * seed).sum()
    assert type(loss) is torch.Tensor
    loss.backward()
    for (name, p), grad in zip(layer.named_parameters(), wanted, strict=True):
        assert (p.grad is None) == (grad is None), f"{what}: {name}.grad"
        if grad is not None:
            _close(p.grad, grad, f"{what}: {name}.grad")
    for w, s in leaves:
        _close(torch.zeros_like(s) if s.grad is None else s.grad, w.grad, f"{what}: input grad")


def check_layers(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(7)
    layers = _layers()
    for sizes in CHOSEN[num_ranks]:
        for name, (layer, names) in layers.items():
            edges, x, attr, weight = _inputs()
            data = _parts(mesh, sizes, rank)
            whole = _arguments(names, x, edges, attr, weight)
            shards = _arguments(names, data.x, data.edge_index, data.edge_attr, data.edge_weight)
            _compare(layer.double(), whole, shards, f"{name} {sizes}")


def _by_hops(layer, arguments, sizes, rank, hops, mesh):
    """Owned rows of a layer's result, without exchange, and the leaf of this rank's inputs."""
    _, x, attr, weight = _inputs()
    index_map, local_edges, held = khop_part_of(whole_edges(), sizes, rank, hops)
    own = x[slice(*index_map.owned)].clone().requires_grad_()
    with_ghosts = halo_exchange(own, index_map, dist.group.WORLD)
    given = _arguments(arguments, with_ghosts, local_edges, attr[held], weight[held])
    return call_on_parts(layer, parts_of(index_map, local_edges, hops, mesh), *given), own


def check_hops(rank, num_ranks):
    """Ghosts in place of exchanges inside a layer: as many hops of them as it needs, or it raises."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    torch.manual_seed(7)
    edges, x, attr, weight = _inputs()
    for name, (layer, names) in _layers().items():
        layer.double().eval()
        if name in BACKWARDS and num_ranks > 1:
            with pytest.raises(UnsupportedShardOp, match="edges that start at a node"):
                _by_hops(layer, names, CHOSEN[num_ranks][-1], rank, 2, mesh)
            continue
        x.requires_grad_().grad = None
        layer.zero_grad()
        expected = layer(*_arguments(names, x, edges, attr, weight))
        expected.square().sum().backward()
        wanted = [p.grad for p in layer.parameters()]
        for sizes in CHOSEN[num_ranks]:
            layer.zero_grad()
            found, own = _by_hops(layer, names, sizes, rank, 2 if name in DEGREES else 1, mesh)
            _close(found, expected.detach(), f"{name} by hops, {sizes}")
            found.square().sum().backward()
            for (which, p), grad in zip(layer.named_parameters(), wanted, strict=True):
                if grad is not None:
                    _close(p.grad, grad, f"{name} by hops, {sizes}: {which}.grad")
            _close(own.grad, x.grad[sum(sizes[:rank]) : sum(sizes[: rank + 1])], f"{name} by hops, {sizes}: input grad")


class Two(nn.Module):
    """Two of a layer, and something between them."""

    def __init__(self, between):
        super().__init__()
        import torch_geometric.nn as g

        self.first, self.between, self.second = g.SAGEConv(4, 4), between, g.SAGEConv(4, 4)

    def forward(self, x, edge_index):
        return self.second(self.between(self.first(x, edge_index)).relu(), edge_index)


def check_too_narrow(rank, num_ranks):
    """What looks further than the ghosts go, or at all rows, raises on every rank."""
    import torch_geometric.nn as g

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    edges, sizes = whole_edges(), CHOSEN[num_ranks][-1]
    refused = {
        "more than 1 hops away": [
            (layer.double(), names, 1) for n, (layer, names) in _layers().items() if n in DEGREES
        ],
        "mixes the rows": [
            (Two(between).double(), "x e", 2) for between in (g.GraphNorm(4), g.PairNorm(), g.LayerNorm(4))
        ],
        "random numbers": [(Two(nn.Dropout(0.5)).double(), "x e", 2)],
    }
    refused["more than 1 hops away"].append((Two(nn.Identity()).double(), "x e", 1))
    for message, cases in refused.items():
        for layer, names, hops in cases:
            with pytest.raises(UnsupportedShardOp, match=message):
                _by_hops(layer, names, sizes, rank, hops, mesh)
    net = Two(g.LayerNorm(4, mode="node")).double()
    _inputs()  # seeds, as _by_hops does again
    state, random = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    found, _ = _by_hops(net, "x e", sizes, rank, 2, mesh)
    _close(found, net(_inputs()[1], edges).detach(), "two layers")
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    loss = found.square().mean() + found[:, 0].max()
    assert type(loss) is torch.Tensor


def check_net(rank, num_ranks, mode):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    batch = torch.tensor([0] * 4 + [1] * 5 + [3] * 2)  # graph 2 has no node
    for sizes in LAYOUTS[num_ranks]:
        torch.manual_seed(7)
        net = Net().double().train(mode == "train")
        twin = Net().double().train(mode == "train")
        twin.load_state_dict(net.state_dict())
        edges, x, attr, _ = _inputs()
        data = _parts(mesh, sizes, rank, batch=batch)
        for step in range(2):  # running statistics, too
            net.zero_grad()
            twin.zero_grad()
            expected, found = net(x, edges, attr, batch), twin(data.x, data.edge_index, data.edge_attr, data.batch)
            assert type(found) is torch.Tensor
            what = f"{mode}, step {step}, {sizes}"
            _close(found, expected, what)
            expected.square().sum().backward()
            found.square().sum().backward()
            for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
                _close(q.grad, p.grad, f"{what}: {name}.grad")
        for (name, b), c in zip(net.named_buffers(), twin.buffers(), strict=True):
            _close(c, b, f"{mode}, {sizes}: {name}")


def check_data(rank, num_ranks):
    """What the Data says of itself, and that gathers use what is here."""
    import torch_geometric.nn as g
    from torch_geometric.utils import add_self_loops, contains_self_loops, degree

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    edges, x, _, _ = _inputs()
    sizes = (6, 5)
    data = _parts(mesh, sizes, rank)
    assert (data.num_nodes, data.num_edges, data.num_node_features) == (NUM_NODES, edges.shape[1], 4)
    assert contains_self_loops(data.edge_index)
    _close(degree(data.edge_index[1], NUM_NODES, torch.float64), degree(edges[1], NUM_NODES, torch.float64), "degree")
    _close(degree(data.edge_index[0], dtype=torch.int64), degree(edges[0], dtype=torch.int64), "of sources")
    moved = data.clone().to("cpu").contiguous()
    conv = g.SAGEConv(4, 3).double()
    _close(conv(moved.x, moved.edge_index), conv(x, edges).detach(), "after clone and to")
    cached, plain = g.GCNConv(4, 3, cached=True).double(), g.GCNConv(4, 3).double()
    plain.load_state_dict(cached.state_dict())
    for _ in range(2):
        _close(cached(data.x, data.edge_index), plain(x, edges).detach(), "cached")
    part = part_of(edges, sizes, rank)
    held = torch.cat([x[part.nodes], x[part.index_map.ghosts]])
    data = to_pyg(part.edge_index, part.index_map, mesh, node_with_ghosts={"x": held}, graph={"y": 3})
    assert data.y == 3
    calls, function = [], dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs)
    _close(conv(data.x, data.edge_index), conv(x, edges).detach(), "ghosts from disk")
    assert not calls
    _close(conv(data.x.requires_grad_(), data.edge_index), conv(x, edges).detach(), "ghosts that need gradients")
    assert calls
    dist.all_to_all_single = function
    with pytest.raises(ShardLayoutError, match="owned rows and"):
        to_pyg(part.edge_index, part.index_map, mesh, node_with_ghosts={"x": held[1:]})
    for value, pool in itertools.product((-1, 3), (g.global_mean_pool, g.global_add_pool, g.global_max_pool)):
        batch = torch.zeros(NUM_NODES, dtype=torch.int64)
        batch[-1] = value  # of one rank, but all of them raise
        wrong = _parts(mesh, sizes, rank, batch=batch)
        with pytest.raises(IndexError, match="for 3 rows" if rank == 1 else "of another rank are out of range"):
            pool(wrong.x, wrong.batch, 3)
    for refused in (g.SimpleConv(aggr="max", flow="target_to_source"),):
        with pytest.raises(UnsupportedShardOp):
            refused(data.x, data.edge_index)
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(1))
    for move in (lambda e: e.flip(1), lambda e: e[:, order], lambda e: e[:, e[0].argsort()], lambda e: e[[1, 0], 3:25]):
        _close(conv(data.x, move(data.edge_index)), conv(x, move(edges)).detach(), "edges on other ranks")
    with pytest.raises(UnsupportedShardOp, match="no order for random numbers"):
        row = add_self_loops(data.edge_index)[0][0]
        F.dropout(data.x[row[row > 0]], 0.5)
    joined = torch.cat([data.edge_index, edges.flip(0)], 1)
    _close(conv(data.x, joined), conv(x, torch.cat([edges, edges.flip(0)], 1)).detach(), "edges with others")


def check_everything(rank, num_ranks):
    check_layers(rank, num_ranks)
    check_net(rank, num_ranks, "train")
    check_net(rank, num_ranks, "eval")
    check_hops(rank, num_ranks)
    if num_ranks > 1:
        check_too_narrow(rank, num_ranks)
    if num_ranks == 2:
        check_data(rank, num_ranks)


@pytest.mark.slow_for("4", "2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_stock_layers_give_what_one_process_gives(num_ranks):
    run_ranks(check_everything, num_ranks, timeout=300)


def test_without_torch_geometric(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    sample = SimpleNamespace(topology=SimpleNamespace(entity="node"))
    with pytest.raises(MissingDependencyError, match=r"pip install 'torch-geometric>="):
        pyg_of(sample, {}, khop=False, by_hop=False)
