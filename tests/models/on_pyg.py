"""PyTorch Geometric's layers and models on a graph with an isolated node, a node without in-edges and a double edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as g
from torch import nn

from tests.models.cases import Case

NUM_NODES, WIDTH = 23, 4
#: Where each input lives.
CUT = {"x": "nodes", "pos": "nodes", "batch": "nodes", "kind": "nodes", "edge_attr": "edges", "edge_weight": "edges",
       "edge_type": "edges", "edge_index": "index"}  # fmt: skip


def graph(*, sym: bool = False) -> dict[str, torch.Tensor]:
    """Return all fields of the graph; edges in the order of where they end."""
    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, NUM_NODES, (2, 90))
    keep = (src != 3) & (dst != 3) & (dst != 8) & (src != dst)
    src, dst = np.r_[src[keep], 5, 5], np.r_[dst[keep], 0, 0]
    if sym:
        pairs = np.unique(np.stack([np.r_[src, dst], np.r_[dst, src]]), axis=1)
        src, dst = pairs
    order = np.lexsort((src, dst))
    num = len(order)
    return {
        "x": torch.rand(NUM_NODES, WIDTH) + 0.1,
        "pos": torch.rand(NUM_NODES, 3),
        "batch": torch.tensor([0] * 9 + [1] * 6 + [2] * 8),
        "kind": torch.arange(NUM_NODES) % 3,
        "edge_attr": torch.rand(num, 2),
        "edge_weight": torch.rand(num) + 0.5,
        "edge_type": torch.arange(num) % 2,
        "edge_index": torch.from_numpy(np.stack([src[order], dst[order]])),
    }


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
    for a, b in pairwise(widths[1:]):
        layers += [nn.Tanh(), nn.Linear(a, b)]
    return nn.Sequential(*layers)


def on_graph(
    build: Callable[[], nn.Module], fields: str, call: Callable[..., Any] | None = None, **options: Any
) -> Case:
    """Return a case that gives a model these fields, in this order."""
    names = fields.split()
    sym = options.pop("sym", False)
    return Case(
        build=build,
        inputs=lambda: {name: x for name, x in graph(sym=sym).items() if name in names},
        cut={name: CUT[name] for name in names},
        call=call or (lambda model, **given: model(*(given[name] for name in names))),
        **options,
    )


def cases() -> dict[str, Case]:
    found = {}
    for family in (convolutions, aggregators, norms, pools, models):
        for name, case in family().items():
            found[f"{family.__name__}: {name}"] = case
    return found


XE, XEA, XEW = "x edge_index", "x edge_index edge_attr", "x edge_index edge_weight"


def convolutions() -> dict[str, Case]:
    degrees = torch.tensor([2, 1, 2, 3, 2, 1])
    scalers = ["identity", "amplification", "attenuation", "linear"]
    normals = lambda model, x, pos, edge_index: model(x, pos, pos.sin(), edge_index)  # noqa: E731
    made: dict[str, tuple[Callable[[], nn.Module], str]] = {
        "SimpleConv": (g.SimpleConv, XE),
        "GCNConv": (lambda: g.GCNConv(4, 3), XEW),
        "ChebConv": (lambda: g.ChebConv(4, 3, 3), XEW),
        "SAGEConv": (lambda: g.SAGEConv(4, 3), XE),
        "SAGEConv lstm": (lambda: g.SAGEConv(4, 3, aggr="lstm"), XE),
        "GraphConv": (lambda: g.GraphConv(4, 3), XEW),
        "GravNetConv": (lambda: g.GravNetConv(4, 3, 3, 3, 4), "x batch"),
        "GatedGraphConv": (lambda: g.GatedGraphConv(5, 2), XEW),
        "ResGatedGraphConv": (lambda: g.ResGatedGraphConv(4, 3, edge_dim=2), XEA),
        "GATConv": (lambda: g.GATConv(4, 3, heads=2, edge_dim=2), XEA),
        "GATConv dropout": (lambda: g.GATConv(4, 3, heads=2, dropout=0.4), XE),
        "GATv2Conv": (lambda: g.GATv2Conv(4, 3, heads=2, edge_dim=2), XEA),
        "GATv2Conv dropout": (lambda: g.GATv2Conv(4, 3, heads=2, dropout=0.4), XE),
        "TransformerConv": (lambda: g.TransformerConv(4, 3, heads=2, edge_dim=2), XEA),
        "TransformerConv dropout": (lambda: g.TransformerConv(4, 3, heads=2, dropout=0.3), XE),
        "AGNNConv": (g.AGNNConv, XE),
        "TAGConv": (lambda: g.TAGConv(4, 3), XEW),
        "GINConv": (lambda: g.GINConv(mlp(4, 5, 3), train_eps=True), XE),
        "GINEConv": (lambda: g.GINEConv(mlp(4, 5, 3), edge_dim=2), XEA),
        "ARMAConv": (lambda: g.ARMAConv(4, 3, num_stacks=2, num_layers=2), XEW),
        "SGConv": (lambda: g.SGConv(4, 3, K=2), XEW),
        "SSGConv": (lambda: g.SSGConv(4, 3, alpha=0.3, K=2), XEW),
        "APPNP": (lambda: g.APPNP(3, 0.2), XEW),
        "APPNP dropout": (lambda: g.APPNP(3, 0.2, dropout=0.3), XE),
        "MFConv": (lambda: g.MFConv(4, 3, max_degree=5), XE),
        "RGCNConv": (lambda: g.RGCNConv(4, 3, 2), "x edge_index edge_type"),
        "RGCNConv bases": (lambda: g.RGCNConv(4, 3, 2, num_bases=2), "x edge_index edge_type"),
        "RGCNConv blocks": (lambda: g.RGCNConv(4, 4, 2, num_blocks=2), "x edge_index edge_type"),
        "FastRGCNConv": (lambda: g.FastRGCNConv(4, 3, 2), "x edge_index edge_type"),
        "RGATConv": (lambda: g.RGATConv(4, 3, 2), "x edge_index edge_type"),
        "DNAConv": (lambda: g.DNAConv(4, 2), XE),
        "PointNetConv": (lambda: g.PointNetConv(mlp(7, 5), mlp(5, 3)), "x pos edge_index"),
        "GMMConv": (lambda: g.GMMConv(4, 3, 2, 3), XEA),
        "NNConv": (lambda: g.NNConv(4, 3, mlp(2, 5, 12)), XEA),
        "CGConv": (lambda: g.CGConv(4, 2, batch_norm=True), XEA),
        "EdgeConv": (lambda: g.EdgeConv(mlp(8, 5, 3)), XE),
        "DynamicEdgeConv": (lambda: g.DynamicEdgeConv(mlp(8, 5, 3), 3), "x batch"),
        "XConv": (lambda: g.XConv(4, 3, 3, 3, 2), "x pos batch"),
        "PPFConv": (lambda: g.PPFConv(mlp(8, 5), mlp(5, 3)), "x pos edge_index"),
        "FeaStConv": (lambda: g.FeaStConv(4, 3, heads=2), XE),
        "PointTransformerConv": (lambda: g.PointTransformerConv(4, 3), "x pos edge_index"),
        "HypergraphConv": (lambda: g.HypergraphConv(4, 3), XE),
        "LEConv": (lambda: g.LEConv(4, 3), XEW),
        "PNAConv": (
            lambda: g.PNAConv(4, 4, ["mean", "min", "max", "std"], scalers, degrees, edge_dim=2, towers=2),
            XEA,
        ),
        "ClusterGCNConv": (lambda: g.ClusterGCNConv(4, 3, diag_lambda=0.1), XE),
        "GENConv": (lambda: g.GENConv(4, 3, learn_t=True, edge_dim=2), XEA),
        "GENConv powermean": (lambda: g.GENConv(4, 3, aggr="powermean", learn_p=True, edge_dim=2), XEA),
        "GCN2Conv": (lambda: g.GCN2Conv(4, 0.1, 0.5, 1), XEW),
        "WLConvContinuous": (g.WLConvContinuous, XEW),
        "FiLMConv": (lambda: g.FiLMConv(4, 3, 2), "x edge_index edge_type"),
        "SuperGATConv": (lambda: g.SuperGATConv(4, 3, heads=2), XE),
        "FAConv": (lambda: g.FAConv(4), "x edge_index"),
        "EGConv": (lambda: g.EGConv(4, 4, num_heads=2, aggregators=["sum", "mean", "max", "std"]), XE),
        "PDNConv": (lambda: g.PDNConv(4, 3, 2, 4), XEA),
        "GeneralConv": (lambda: g.GeneralConv(4, 3, 2, heads=2, attention=True), XEA),
        "HEATConv": (lambda: g.HEATConv(4, 3, 3, 2, 2, 2, 2, 2), "x edge_index kind edge_type edge_attr"),
        "LGConv": (g.LGConv, XEW),
        "PointGNNConv": (lambda: g.PointGNNConv(mlp(4, 3), mlp(7, 5), mlp(5, 4)), "x pos edge_index"),
        "GPSConv": (lambda: g.GPSConv(4, g.GCNConv(4, 4), heads=2), "x edge_index batch"),
        "GPSConv dropout": (lambda: g.GPSConv(4, g.GCNConv(4, 4), heads=2, dropout=0.3), "x edge_index batch"),
        "GPSConv performer": (
            lambda: g.GPSConv(4, g.GCNConv(4, 4), heads=2, attn_type="performer"),
            "x edge_index batch",
        ),
        "AntiSymmetricConv": (lambda: g.AntiSymmetricConv(4), XE),
        "DirGNNConv": (lambda: g.DirGNNConv(g.SAGEConv(4, 3)), XE),
        "MixHopConv": (lambda: g.MixHopConv(4, 3, [0, 1, 2]), XEW),
        "SignedConv": (lambda: g.SignedConv(4, 3, True), XE),
        "DeepGCNLayer": (lambda: g.DeepGCNLayer(g.GENConv(4, 4), g.LayerNorm(4), nn.ReLU(), dropout=0.2), XE),
    }
    found = {name: on_graph(build, fields) for name, (build, fields) in made.items()}

    def with_first(model: nn.Module, x: torch.Tensor, edge_index: torch.Tensor, **rest: torch.Tensor) -> Any:
        return model(x, x.flip(-1), edge_index, **rest)

    def several(model: nn.Module, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        return model(torch.stack([x, x.sin(), x.cos()], 1), edge_index)

    def searching(model: nn.Module, edge_index: torch.Tensor, **given: torch.Tensor) -> Any:
        return model(*given.values())

    def signed(model: nn.Module, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        return model(x, edge_index, edge_index)

    def typed(model: nn.Module, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        return model({"a": x}, {("a", "to", "a"): edge_index})

    for name in ("GravNetConv", "DynamicEdgeConv", "XConv"):  # these find their edges themselves
        build, fields = made[name]
        found[name] = on_graph(build, f"{fields} edge_index", searching)
    found["PPFConv"] = on_graph(made["PPFConv"][0], made["PPFConv"][1], normals)
    found["GCN2Conv"] = on_graph(lambda: g.GCN2Conv(4, 0.1, 0.5, 1), XEW, with_first)
    found["FAConv"] = on_graph(lambda: g.FAConv(4), XE, with_first)
    found["FAConv dropout"] = on_graph(lambda: g.FAConv(4, dropout=0.3), XE, with_first)
    found["DNAConv"] = on_graph(lambda: g.DNAConv(4, 2), XE, several)
    found["SignedConv"] = on_graph(lambda: g.SignedConv(4, 3, True), XE, signed)
    meta = (["a"], [("a", "to", "a")])
    found["HGTConv"] = on_graph(lambda: g.HGTConv(4, 4, meta, 2), XE, typed)
    found["HANConv"] = on_graph(lambda: g.HANConv(4, 4, meta, 2), XE, typed)
    found["HANConv dropout"] = on_graph(lambda: g.HANConv(4, 4, meta, 2, dropout=0.3), XE, typed)
    found["HeteroConv"] = on_graph(lambda: g.HeteroConv({("a", "to", "a"): g.SAGEConv(4, 3)}), XE, typed)
    return found


def aggregators() -> dict[str, Case]:
    """Of nodes by graph, and as the aggregation of a convolution."""
    deg = torch.tensor([2, 1, 2, 3, 2, 1])
    made: dict[str, Callable[[], nn.Module]] = {
        "Sum": g.SumAggregation,
        "Mean": g.MeanAggregation,
        "Max": g.MaxAggregation,
        "Min": g.MinAggregation,
        "Mul": g.MulAggregation,
        "Var": g.VarAggregation,
        "Std": g.StdAggregation,
        "Softmax": lambda: g.SoftmaxAggregation(learn=True),
        "PowerMean": lambda: g.PowerMeanAggregation(learn=True),
        "Median": g.MedianAggregation,
        "Quantile": lambda: g.QuantileAggregation([0.2, 0.5]),
        "LSTM": lambda: g.LSTMAggregation(4, 4),
        "GRU": lambda: g.GRUAggregation(4, 4),
        "Set2Set": lambda: g.Set2Set(4, 2),
        "DegreeScaler": lambda: g.DegreeScalerAggregation("mean", "linear", deg),
        "Sort": lambda: g.SortAggregation(3),
        "GraphMultisetTransformer": lambda: g.GraphMultisetTransformer(4, 3, heads=2),
        "Attentional": lambda: g.AttentionalAggregation(mlp(4, 1)),
        "Equilibrium": lambda: g.EquilibriumAggregation(4, 4, [8], grad_iter=2),
        "MLP": lambda: g.MLPAggregation(4, 4, 12, num_layers=1),
        "DeepSets": lambda: g.DeepSetsAggregation(mlp(4, 4), mlp(4, 4)),
        "SetTransformer": lambda: g.SetTransformerAggregation(4, heads=2),
        "LCM": lambda: g.LCMAggregation(4, 4),
        "VariancePreserving": g.VariancePreservingAggregation,
        "PatchTransformer": lambda: g.PatchTransformerAggregation(4, 4, 3, 8, heads=2),
        "Multi": lambda: g.MultiAggregation(["mean", "std", "max"]),
        "Multi attention": lambda: g.MultiAggregation(
            ["mean", "std"], mode="attn", mode_kwargs={"in_channels": 4, "out_channels": 4, "num_heads": 2}
        ),
    }
    found = {
        name: on_graph(build, "x batch edge_index", lambda model, x, batch, edge_index: model(x, batch))
        for name, build in made.items()
    }
    narrow = {
        "DegreeScaler",
        "GraphMultisetTransformer",
        "MLP",
        "PatchTransformer",
        "Equilibrium",
    }  # large, or of graphs
    for name, build in made.items():
        if name not in narrow:
            found[f"{name} of neighbours"] = on_graph(lambda build=build: g.SimpleConv(aggr=build()), XE)
    found["Equilibrium"] = replace(found["Equilibrium"], tolerance=1e-6)  # it starts from zeros in single precision
    return found


def norms() -> dict[str, Case]:
    def alone(model: nn.Module, x: torch.Tensor, **_: Any) -> Any:
        return model(x)

    def batched(model: nn.Module, x: torch.Tensor, batch: torch.Tensor, **_: Any) -> Any:
        return model(x, batch)

    made: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "BatchNorm": (lambda: g.BatchNorm(4), alone),
        "InstanceNorm": (lambda: g.InstanceNorm(4, affine=True), batched),
        "InstanceNorm running": (lambda: g.InstanceNorm(4, track_running_stats=True), batched),
        "LayerNorm graph": (lambda: g.LayerNorm(4), batched),
        "LayerNorm all": (lambda: g.LayerNorm(4), alone),
        "LayerNorm node": (lambda: g.LayerNorm(4, mode="node"), alone),
        "GraphNorm": (lambda: g.GraphNorm(4), batched),
        "GraphSizeNorm": (g.GraphSizeNorm, batched),
        "PairNorm": (g.PairNorm, batched),
        "PairNorm all": (lambda: g.PairNorm(scale_individually=True), alone),
        "MeanSubtractionNorm": (g.MeanSubtractionNorm, batched),
        "MessageNorm": (lambda: g.MessageNorm(True), lambda model, x, **_: model(x, x.cos())),
        "DiffGroupNorm": (lambda: g.DiffGroupNorm(4, 3), alone),
        "HeteroBatchNorm": (lambda: g.HeteroBatchNorm(4, 3), lambda model, x, kind, **_: model(x, kind)),
        "HeteroLayerNorm": (lambda: g.HeteroLayerNorm(4, 3), lambda model, x, kind, **_: model(x, kind)),
    }
    return {name: on_graph(build, "x batch kind edge_index", call) for name, (build, call) in made.items()}


class Apply(nn.Module):
    """A function behind a layer, so that something is learned."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor, **given: torch.Tensor) -> Any:
        return self.function(self.first(x).tanh(), **given)


def pools() -> dict[str, Case]:
    def apply(fields: str, function: Callable[..., Any], **options: Any) -> Case:
        return on_graph(lambda: Apply(function), fields, lambda model, **given: model(**given), **options)

    def knn(x: torch.Tensor, pos: torch.Tensor, batch: torch.Tensor, edge_index: Any = None) -> Any:
        edges = g.knn_graph(pos, 3, batch)
        return (x[edges[0]] - x[edges[1]]).square()

    def radius(x: torch.Tensor, pos: torch.Tensor, batch: torch.Tensor, edge_index: Any = None) -> Any:
        edges = g.radius_graph(pos, 0.4, batch)
        return (x[edges[0]] - x[edges[1]]).square()

    def fps(x: torch.Tensor, pos: torch.Tensor, batch: torch.Tensor, edge_index: Any = None) -> Any:
        return x[g.fps(pos, batch, 0.5, random_start=False)]

    pooled = "x edge_index batch"
    found = {
        "TopKPooling": on_graph(lambda: g.TopKPooling(4, 0.5), pooled, lambda m, x, edge_index, batch: m(x, edge_index, batch=batch)),
        "TopKPooling min score": on_graph(
            lambda: g.TopKPooling(4, min_score=0.2), pooled, lambda m, x, edge_index, batch: m(x, edge_index, batch=batch)
        ),
        "SAGPooling": on_graph(lambda: g.SAGPooling(4, 0.5), pooled, lambda m, x, edge_index, batch: m(x, edge_index, batch=batch)),
        "EdgePooling": on_graph(lambda: g.EdgePooling(4), pooled),
        "ClusterPooling": on_graph(lambda: g.ClusterPooling(4), pooled),
        "ASAPooling": on_graph(lambda: g.ASAPooling(4, 0.5), pooled, lambda m, x, edge_index, batch: m(x, edge_index, batch=batch)),
        "MemPooling": on_graph(lambda: g.MemPooling(4, 3, 2, 2), "x batch edge_index", lambda m, x, batch, **_: m(x, batch)),
        "knn_graph": apply("x pos batch edge_index", knn),
        "radius_graph": apply("x pos batch edge_index", radius),
        "fps": apply("x pos batch edge_index", fps),
        "global_add_pool": apply("x batch edge_index", lambda x, batch, **_: g.global_add_pool(x, batch)),
        "global_mean_pool": apply("x batch edge_index", lambda x, batch, **_: g.global_mean_pool(x, batch)),
        "global_max_pool": apply("x batch edge_index", lambda x, batch, **_: g.global_max_pool(x, batch)),
        "max_pool_x": apply("x batch edge_index", lambda x, batch, **_: g.max_pool_x(torch.arange(NUM_NODES) // 3, x, batch)[0]),
        "avg_pool_x": apply("x batch edge_index", lambda x, batch, **_: g.avg_pool_x(torch.arange(NUM_NODES) // 3, x, batch)[0]),
        "knn_interpolate": apply(
            "x pos batch edge_index", lambda x, pos, batch, **_: g.knn_interpolate(x, pos, pos + 0.1, batch, batch, k=3)),
    }  # fmt: skip
    dense = {
        "dense_diff_pool": lambda x, adj: g.dense_diff_pool(x[None], adj, x[None, :, :3])[0],
        "dense_mincut_pool": lambda x, adj: g.dense_mincut_pool(x[None], adj, x[None, :, :3])[:3],
    }
    for name, function in dense.items():
        found[name] = apply(
            "x edge_index", lambda x, edge_index, function=function: function(x, torch.ones(1, NUM_NODES, NUM_NODES))
        )
    return found


def models() -> dict[str, Case]:
    degrees = torch.tensor([2, 1, 2, 3, 2, 1])
    pna = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "deg": degrees}
    made: dict[str, tuple[Callable[[], nn.Module], str]] = {
        "MLP": (lambda: g.MLP([4, 8, 3], dropout=0.2), "x"),
        "GCN": (lambda: g.GCN(4, 6, 2, 3), XEW),
        "GCN dropout": (lambda: g.GCN(4, 6, 2, 3, dropout=0.3, norm="batch", jk="cat"), XE),
        "GCN jk lstm": (lambda: g.GCN(4, 6, 3, 3, jk="lstm"), XE),
        "GraphSAGE": (lambda: g.GraphSAGE(4, 6, 2, 3, norm="graph_norm"), XE),
        "GIN": (lambda: g.GIN(4, 6, 2, 3, jk="max"), XE),
        "GAT": (lambda: g.GAT(4, 6, 2, 4, heads=2), XE),
        "GAT v2 dropout": (lambda: g.GAT(4, 6, 2, 4, heads=2, v2=True, dropout=0.2), XE),
        "PNA": (lambda: g.PNA(4, 6, 2, 3, **pna), XE),
        "EdgeCNN": (lambda: g.EdgeCNN(4, 6, 2, 3), XE),
        "DeepGraphInfomax": (
            lambda: g.DeepGraphInfomax(6, g.GCNConv(4, 6), lambda z, *_: z.mean(0), lambda x, e: (x.flip(0), e)),
            XE,
        ),
        "GraphUNet": (lambda: g.GraphUNet(4, 6, 3, 2), "x edge_index batch"),
        "AttentiveFP": (lambda: g.AttentiveFP(4, 6, 3, 2, 2, 2), "x edge_index edge_attr batch"),
        "RECT_L": (lambda: g.RECT_L(4, 6), XEW),
        "LINKX": (lambda: g.LINKX(NUM_NODES, 4, 6, 3, 1), XE),
        "GNNFF": (lambda: g.GNNFF(4, 4, 2), "kind pos batch"),
        "PMLP": (lambda: g.PMLP(4, 6, 3, 2), XE),
        "NeuralFingerprint": (lambda: g.NeuralFingerprint(4, 6, 3, 2), "x edge_index batch"),
        "SchNet": (lambda: g.SchNet(8, 8, 2, 8, cutoff=0.6), "kind pos batch"),
        "DimeNet": (lambda: g.DimeNet(8, 3, 2, 2, 3, 2, cutoff=0.6), "kind pos batch"),
        "DimeNetPlusPlus": (lambda: g.DimeNetPlusPlus(8, 3, 2, 4, 4, 8, 3, 2, cutoff=0.6), "kind pos batch"),
        "ViSNet": (
            lambda: g.ViSNet(lmax=1, num_heads=2, num_layers=2, hidden_channels=8, num_rbf=4, cutoff=0.6),
            "kind pos batch",
        ),
        "SGFormer": (lambda: g.SGFormer(4, 6, 3), "x edge_index batch"),
        "Polynormer": (lambda: g.Polynormer(4, 6, 3, local_layers=2, global_layers=1), "x edge_index batch"),
        "GroupAddRev": (lambda: g.GroupAddRev(g.SAGEConv(2, 2), num_groups=2), XE),
    }
    found = {name: on_graph(build, fields) for name, (build, fields) in made.items()}
    only = lambda names: lambda model, **given: model(*(given[name] for name in names.split()))  # noqa: E731
    for name in ("GNNFF", "SchNet", "DimeNet", "DimeNetPlusPlus", "ViSNet"):
        build, fields = made[name]
        found[name] = on_graph(build, f"{fields} edge_index", only(fields))

    def encode(model: Any, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        z = model.encode(x, edge_index)
        return z, model.decode(z, edge_index)

    found["GAE"] = on_graph(lambda: g.GAE(g.GCNConv(4, 3)), XE, encode)
    found["MLP"] = on_graph(lambda: g.MLP([4, 8, 3], dropout=0.2), XE, lambda m, x, edge_index: m(x))
    found["JumpingKnowledge lstm"] = on_graph(
        lambda: g.JumpingKnowledge("lstm", 4, 2), XE, lambda m, x, edge_index: m([x, x.sin(), x.cos()])
    )
    return found
