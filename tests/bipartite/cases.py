"""PyTorch Geometric's convolutions between two sets of nodes: how each is made and called, and tried on shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn

import scidata
from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardTensor

DIM, EDGE = 4, 3
RELATIONS = (("grid", "to", "mesh"), ("mesh", "to", "grid"))
#: Cuts of the second graph, whose mesh has two nodes; the first is cut evenly.
CUTS: dict[int, Any] = {
    1: "even",
    2: {"grid": [0, 31, 31], "mesh": [0, 0, 2]},
    3: {"grid": [0, 1, 1, 31], "mesh": [0, 0, 2, 2]},
}


@dataclass
class Given:
    """What layers are called with: of a relation, in one process or on shards."""

    x: tuple[Tensor, Tensor]
    pos: tuple[Tensor, Tensor]
    attr: Tensor  # (E, EDGE)
    weight: Tensor  # (E,), positive
    kind: Tensor  # (E,) int64 below 3
    edges: Tensor
    size: tuple[int, int]
    leaves: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Found:
    """How often calls of a layer came out how, and a note of each kind."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, note: str = "") -> None:
        self.counts[kind] += 1
        if note:
            self.notes.setdefault(kind, note[:300])


Case = tuple[Callable[[], nn.Module], Callable[[Any, Given], Any]]


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def plain(layer: Any, of: Given) -> Any:
    return layer(of.x, of.edges)


def with_attr(layer: Any, of: Given) -> Any:
    return layer(of.x, of.edges, of.attr)


def with_weight(layer: Any, of: Given) -> Any:
    return layer(of.x, of.edges, of.weight)


def with_pseudo(layer: Any, of: Given) -> Any:
    return layer(of.x, of.edges, of.attr.sigmoid())


def with_kind(layer: Any, of: Given) -> Any:
    return layer(of.x, of.edges, of.kind)


def without_target(layer: Any, of: Given) -> Any:
    return layer((of.x[0], None), of.edges, size=of.size)


def with_pos(layer: Any, of: Given) -> Any:
    return layer(of.x, of.pos, of.edges)


def with_normals(layer: Any, of: Given) -> Any:
    return layer(of.x, of.pos, of.pos, of.edges)


def with_attention(layer: Any, of: Given) -> Any:
    found, (_, weights) = layer(of.x, of.edges, of.attr, return_attention_weights=True)
    return found, weights


def signed(layer: Any, of: Given) -> Any:
    return layer(of.x, of.edges, of.edges)


def cases() -> dict[str, Case]:
    """Return the layers by name: all of ``torch_geometric.nn.conv`` that take two sets of nodes."""
    import torch_geometric.nn as g

    both = (DIM, DIM)
    no_loops = {"add_self_loops": False}
    found: dict[str, Case] = {
        "CGConv": (lambda: g.CGConv(both, EDGE), with_attr),
        "CGConv batch_norm": (lambda: g.CGConv(both, EDGE, batch_norm=True), with_attr),
        "CGConv mean": (lambda: g.CGConv(both, EDGE, aggr="mean"), with_attr),
        "EdgeConv": (lambda: g.EdgeConv(mlp(2 * DIM, 3)), plain),
        "EdgeConv mean": (lambda: g.EdgeConv(mlp(2 * DIM, 3), aggr="mean"), plain),
        "FeaStConv": (lambda: g.FeaStConv(DIM, 3, heads=2, **no_loops), plain),
        "FeaStConv self-loops": (lambda: g.FeaStConv(DIM, 3, heads=2), plain),
        "FiLMConv": (lambda: g.FiLMConv(both, 3), plain),
        "FiLMConv relations": (lambda: g.FiLMConv(both, 3, num_relations=3), with_kind),
        "GATConv": (lambda: g.GATConv(both, 3, heads=2, edge_dim=EDGE, **no_loops), with_attr),
        "GATConv mean of heads": (lambda: g.GATConv(both, 3, heads=2, concat=False, **no_loops), plain),
        "GATConv residual": (lambda: g.GATConv(both, 3, heads=2, residual=True, **no_loops), plain),
        "GATConv attention": (lambda: g.GATConv(both, 3, edge_dim=EDGE, **no_loops), with_attention),
        "GATConv no target": (lambda: g.GATConv(both, 3, **no_loops), without_target),
        "GATConv self-loops": (lambda: g.GATConv(both, 3), plain),
        "GATv2Conv": (lambda: g.GATv2Conv(both, 3, heads=2, edge_dim=EDGE, **no_loops), with_attr),
        "GATv2Conv shared": (lambda: g.GATv2Conv(both, 3, share_weights=True, **no_loops), plain),
        "GATv2Conv attention": (lambda: g.GATv2Conv(both, 3, edge_dim=EDGE, **no_loops), with_attention),
        "GATv2Conv self-loops": (lambda: g.GATv2Conv(both, 3), plain),
        "GENConv": (lambda: g.GENConv(both, 3, edge_dim=EDGE), with_attr),
        "GENConv learned": (lambda: g.GENConv(both, 3, edge_dim=EDGE, learn_t=True, learn_msg_scale=True), with_attr),
        "GENConv powermean": (lambda: g.GENConv(both, 3, aggr="powermean", learn_p=True), plain),
        "GENConv layer norm": (lambda: g.GENConv(both, 3, norm="layer"), plain),
        "GENConv no target": (lambda: g.GENConv(both, 3), without_target),
        "GINConv": (lambda: g.GINConv(mlp(DIM, 3), train_eps=True), plain),
        "GINConv no target": (lambda: g.GINConv(mlp(DIM, 3)), without_target),
        "GINEConv": (lambda: g.GINEConv(mlp(DIM, 3), train_eps=True, edge_dim=EDGE), with_attr),
        "GMMConv": (lambda: g.GMMConv(both, 3, EDGE, 3), with_attr),
        "GMMConv separate": (lambda: g.GMMConv(both, 3, EDGE, 3, separate_gaussians=True), with_attr),
        "GeneralConv": (lambda: g.GeneralConv(both, 4, EDGE), with_attr),
        "GeneralConv attention": (lambda: g.GeneralConv(both, 4, EDGE, attention=True, heads=2), with_attr),
        "GeneralConv dot product": (
            lambda: g.GeneralConv(both, 4, EDGE, attention=True, attention_type="dot_product"), with_attr
        ),
        "GeneralConv l2": (lambda: g.GeneralConv(both, 4, l2_normalize=True), plain),
        "GraphConv": (lambda: g.GraphConv(both, 3), with_weight),
        "GraphConv max": (lambda: g.GraphConv(both, 3, aggr="max"), plain),
        "GraphConv no target": (lambda: g.GraphConv(both, 3), without_target),
        "LEConv": (lambda: g.LEConv(both, 3), with_weight),
        "MFConv": (lambda: g.MFConv(both, 3, max_degree=4), plain),
        "NNConv": (lambda: g.NNConv(both, 3, mlp(EDGE, 3 * DIM)), with_attr),
        "NNConv max": (lambda: g.NNConv(both, 3, mlp(EDGE, 3 * DIM), aggr="max", root_weight=False), with_attr),
        "PPFConv": (lambda: g.PPFConv(mlp(DIM + 4, 4), mlp(4, 3), **no_loops), with_normals),
        "PointNetConv": (lambda: g.PointNetConv(mlp(DIM + 3, 4), mlp(4, 3), **no_loops), with_pos),
        "PointNetConv self-loops": (lambda: g.PointNetConv(mlp(DIM + 3, 4), mlp(4, 3)), with_pos),
        "PointTransformerConv": (lambda: g.PointTransformerConv(both, 3, **no_loops), with_pos),
        "RGCNConv": (lambda: g.RGCNConv(both, 3, 3), with_kind),
        "RGCNConv bases": (lambda: g.RGCNConv(both, 3, 3, num_bases=2, aggr="sum"), with_kind),
        "RGCNConv blocks": (lambda: g.RGCNConv(both, 4, 3, num_blocks=2), with_kind),
        "FastRGCNConv": (lambda: g.FastRGCNConv(both, 3, 3), with_kind),
        "FastRGCNConv bases": (lambda: g.FastRGCNConv(both, 3, 3, num_bases=2, aggr="sum"), with_kind),
        "ResGatedGraphConv": (lambda: g.ResGatedGraphConv(both, 3, edge_dim=EDGE), with_attr),
        "SAGEConv": (lambda: g.SAGEConv(both, 3), plain),
        "SAGEConv project, normalise": (lambda: g.SAGEConv(both, 3, project=True, normalize=True), plain),
        "SAGEConv no target": (lambda: g.SAGEConv(both, 3, root_weight=False), without_target),
        "SAGEConv lstm": (lambda: g.SAGEConv(both, 3, aggr="lstm"), plain),
        "SignedConv": (lambda: g.SignedConv(DIM, 3, first_aggr=True), signed),
        "SplineConv": (lambda: g.SplineConv(both, 3, EDGE, 3), with_pseudo),
        "TransformerConv": (lambda: g.TransformerConv(both, 3, heads=2, edge_dim=EDGE), with_attr),
        "TransformerConv beta": (lambda: g.TransformerConv(both, 3, heads=2, concat=False, beta=True), plain),
        "TransformerConv attention": (lambda: g.TransformerConv(both, 3, edge_dim=EDGE), with_attention),
        "WLConvContinuous": (g.WLConvContinuous, with_weight),
        "DynamicEdgeConv": (lambda: g.DynamicEdgeConv(mlp(2 * DIM, 3), 3), lambda layer, of: layer(of.x)),
        "GravNetConv": (lambda: g.GravNetConv(DIM, 3, 2, 3, 2), lambda layer, of: layer(of.x)),
        "SimpleConv root": (lambda: g.SimpleConv(combine_root="cat"), with_weight),
    }  # fmt: skip
    aggregations: dict[str, Any] = {
        **{name: name for name in ("sum", "mean", "max", "min", "mul", "var", "std", "median", "softmax", "powermean")},
        "several": ["mean", "max", "std"],
    }
    for name, aggr in aggregations.items():
        found[f"SimpleConv {name}"] = (lambda aggr=aggr: g.SimpleConv(aggr=aggr), plain)
        found[f"SAGEConv {name}"] = (lambda aggr=aggr: g.SAGEConv(both, 3, aggr=aggr), plain)
    return found


def layers_of_pyg() -> set[str]:
    """Return the names of the convolutions whose ``forward`` takes two sets of nodes."""
    import inspect

    import torch_geometric.nn.conv as conv

    found = set()
    for name in conv.__all__:
        shown = inspect.signature(getattr(conv, name).forward).parameters
        if any("Tuple" in str(shown[each].annotation) or "PairTensor" in str(shown[each].annotation)
               for each in ("x", "pos") if each in shown):  # fmt: skip
            found.add(name)
    return found


# -- the graphs ------------------------------------------------------------------------------------------------------


def write_store(folder: Path) -> str:
    """Write a store of two graphs between a grid and a mesh."""
    for number, sizes in enumerate(({"grid": 50, "mesh": 17}, {"grid": 31, "mesh": 2})):
        random = np.random.default_rng(number)
        with h5py.File(folder / f"{number}.h5", "w") as file:
            for name, num in sizes.items():
                file[f"nodes/{name}/pos"] = random.random((num, 3))
                file[f"nodes/{name}/x"] = random.normal(size=(num, DIM))
            for source, name, target in RELATIONS:
                pairs = random.integers(0, [[sizes[source]], [sizes[target]]], (2, 120))
                pairs = np.unique(pairs, axis=1)
                group = f"edges/{source}__{name}__{target}"
                file[f"{group}/edge_index"] = pairs
                file[f"{group}/attr"] = random.normal(size=(pairs.shape[1], EDGE))
                file[f"{group}/weight"] = random.uniform(0.5, 1.5, pairs.shape[1])
                file[f"{group}/kind"] = random.integers(0, 3, pairs.shape[1])
    scidata.partition([folder / "0.h5", folder / "1.h5"], folder / "store")
    return str(folder / "store")


def given(data: Any, relation: tuple[str, str, str], dtype: torch.dtype = torch.float64) -> Given:
    """Take what layers are called with from a ``HeteroData``; floating tensors are leaves."""
    source, _, target = relation
    edge = data[relation]

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype).clone().requires_grad_()

    leaves = {
        "source": leaf(data[source].x), "target": leaf(data[target].x),
        "attr": leaf(edge.attr), "weight": leaf(edge.weight),
        "pos of source": leaf(data[source].pos), "pos of target": leaf(data[target].pos),
    }  # fmt: skip
    return Given(
        x=(leaves["source"], leaves["target"]),
        pos=(leaves["pos of source"], leaves["pos of target"]),
        attr=leaves["attr"],
        weight=leaves["weight"],
        kind=edge.kind,
        edges=edge.edge_index,
        size=(data[source].num_nodes, data[target].num_nodes),
        leaves=leaves,
    )


# -- trying ----------------------------------------------------------------------------------------------------------


def ran(case: Case, of: Given, *, amp: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return outputs, and gradients of parameters, buffers and inputs, whole; ``amp``: under autocast to bfloat16."""
    torch.manual_seed(0)
    layer = case[0]().to(of.x[0].dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        found = case[1](layer, of)
    outputs = list(found) if isinstance(found, tuple) else [found]
    loss: Any = 0.0
    for each in outputs:
        weight = torch.arange(1.0, each.shape[-1] + 1, dtype=each.dtype)
        loss = loss + (each.sin() * weight).sum() + (each * each).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    gradients |= dict(layer.named_buffers())
    gradients |= {f"input {name}": leaf.grad for name, leaf in of.leaves.items() if leaf.grad is not None}
    return [whole(x) for x in outputs], {name: whole(x) for name, x in gradients.items()}


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, ShardTensor) else x).detach()


def judge(found: Any, expected: Any, tolerance: float) -> tuple[str, str]:
    """Compare outputs and gradients; a gradient that is not there counts as zeros."""
    (outputs, gradients), (theirs, wanted) = found, expected
    pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(outputs, theirs, strict=True))]
    for name in {*gradients, *wanted}:
        one, other = gradients.get(name), wanted.get(name)
        known = one if other is None else other
        assert known is not None
        pairs.append(
            (name, torch.zeros_like(known) if one is None else one, torch.zeros_like(known) if other is None else other)
        )
    for name, a, b in pairs:
        scale = max(1.0, float(b.abs().max())) if b.numel() and b.is_floating_point() else 1.0
        if a.dtype != b.dtype:
            return "wrong", f"{name}: {a.dtype} and {b.dtype}"
        if a.shape != b.shape or not torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            far = float((a - b).abs().max()) if a.shape == b.shape else float("nan")
            return "wrong", f"{name}: {tuple(a.shape)} and {tuple(b.shape)}, {far:.1e} apart"
    return "right", ""


def on_ranks(rank: int, num_ranks: int, store: str, names: list[str], amp: bool = False) -> list[Found]:
    """Try layers on stored graphs that are cut, against the whole ones; every rank says the same.

    ``amp``: in single precision, under autocast to bfloat16.
    """
    dtype, tolerance = (torch.float32, 0.05) if amp else (torch.float64, 1e-10)
    mesh = scidata.init_mesh(domain=num_ranks, device="cpu")
    both: list[tuple[Any, Any]] = []
    for number in (0, 1):
        cut: Any = scidata.open_dataset(store, mesh, bounds={0: "even", 1: CUTS[num_ranks]})
        alone: Any = scidata.open_dataset(store)
        both.append((cut[number].to_pyg(), alone[number].to_pyg()))
    results = []
    every = cases()
    for name in names:
        found = Found(name)
        for parts, one in both:
            for relation in RELATIONS:
                try:
                    expected = ran(every[name], given(one, relation, dtype), amp=amp)
                except Exception as e:  # one process cannot, either
                    found.add("not run", f"{type(e).__name__}: {e}")
                    continue
                try:
                    kind, note = judge(ran(every[name], given(parts, relation, dtype), amp=amp), expected, tolerance)
                except UnsupportedShardOp as e:
                    kind, note = "refused", str(e)
                found.add(kind, note)
        results.append(found)
    return results
