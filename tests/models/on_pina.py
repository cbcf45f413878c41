"""PINA's models, on plain tensors: its own labelled ones are another kind of tensor."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import Case, image
from tests.models.on_snapshots import SINGLE, case, edges


def made(name: str, *args: Any, **how: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module("pina.model"), name)(*args, **how)


def cases() -> dict[str, Case]:
    def fno(dims: int, modes: int) -> Callable[[], nn.Module]:
        ends = lambda: (nn.Linear(3, 8), nn.Linear(8, 2))  # noqa: E731
        return lambda: import_module("pina.model").FNO(
            *ends(), modes if dims == 1 else [modes] * dims, dims, padding=2, inner_size=8
        )

    def knots(low: int, high: int, order: int = 3) -> Tensor:
        return torch.cat([torch.full((order - 1,), low), torch.linspace(low, high, 5), torch.full((order - 1,), high)])

    def deeponet() -> nn.Module:
        branch, trunk = (import_module("pina.model").FeedForward(2, 8) for _ in range(2))
        return import_module("pina.model").DeepONet(branch, trunk, [0, 1], [2, 3])  # type: ignore[no-any-return]

    def graph_operator() -> nn.Module:
        return import_module("pina.model").GraphNeuralOperator(nn.Linear(4, 8), nn.Linear(8, 2), edge_features=3, n_layers=2, internal_n_layers=1, inner_size=8)  # type: ignore[no-any-return]  # fmt: skip

    def on_graph(model: nn.Module, edge_index: Any, edge_attr: Tensor, **nodes: Tensor) -> Any:
        from torch_geometric.data import Data

        out = model(Data(edge_index=edge_index, edge_attr=edge_attr, **nodes))
        return out if isinstance(out, Tensor) else (out.x, out.pos, out.vel)

    graph = {"x": "nodes", "edge_attr": "edges", "edge_index": "index"}
    given = {"x": (24, 4), "edge_attr": (90, 3), "edge_index": lambda: edges(24, 90)}
    egno = made("EquivariantGraphNeuralOperator", 2, 4, 3, 3, 2, hidden_dim=8, time_emb_dim=4)
    rows = {"cut": {"x": (0, 1)}}
    return {
        "FNO in 1-D": image(fno(1, 4), 2, 32, 3, cut={"x": (1, 2)}, **SINGLE),
        "FNO in 2-D": image(fno(2, 4), 2, 16, 16, 3, cut={"x": (1, 2)}, **SINGLE),
        "FNO in 3-D": image(fno(3, 2), 2, 8, 8, 8, 3, cut={"x": (1, 2)}, **SINGLE),
        "FeedForward": image(made("FeedForward", 4, 2), 40, 4, **rows),
        "ResidualFeedForward": image(made("ResidualFeedForward", 4, 2), 40, 4, **rows),
        "PirateNet": image(made("PirateNet", 4, 8, 2), 40, 4, **rows),
        "KolmogorovArnoldNetwork": image(made("KolmogorovArnoldNetwork", [4, 6, 2]), 40, 4, **SINGLE, **rows),
        "Spline": image(lambda: import_module("pina.model").Spline(3, knots(0, 1), torch.rand(6)), 40, 1, **SINGLE, **rows),
        "DeepONet": image(deeponet, 40, 4, **rows),
        "GraphNeuralOperator": case(graph_operator, graph, on_graph, **given),
        "EquivariantGraphNeuralOperator": case(egno, graph | {"pos": "nodes", "vel": "nodes"}, on_graph, **given, pos=(24, 3), vel=(24, 3)),
    }  # fmt: skip
