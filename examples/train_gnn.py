"""Train a MeshGraphNet to predict fields on the nodes of meshes and graphs, on a dp × domain mesh of ranks.

    python -m pipelines.flow_graph make raw/ && python -m pipelines.flow_graph convert raw/ flow.store
    python examples/train_gnn.py --data flow.store                                         # one process
    torchrun --nproc-per-node 4 examples/train_gnn.py --data flow.store --domain 2         # 2 dp × 2 domain
    torchrun --nproc-per-node 4 examples/train_gnn.py --data flow.store --domain 2 --check --dtype float64
    torchrun --nproc-per-node 4 examples/train_gnn.py --data flow.store --domain 2 --khop  # wide halos, no exchange

The model is plain PyTorch Geometric and knows nothing of ranks, but for one line that lets an exchange run beside other
work. What is different from a script for one process is marked ``# scidata``: ``open_graph(..., mesh)`` here,
``init_mesh``, ``parallelize`` and the sampler in ``trainer.py``. Any store of ``scidata partition`` will do whose
fields live on nodes: name them with ``--inputs`` and ``--targets``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("importing torch and torch_geometric: up to 20 s the first time …", file=sys.stderr, flush=True)

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch_geometric.nn import MessagePassing, global_mean_pool

# neither pipelines/, beside this folder, nor this folder is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer import Stats, Trainer, check_arguments, parser_of, run

import scidata
from pipelines.flow_graph import (
    INPUTS,
    TARGETS,
    edge_statistics,
    num_channels,
    num_edge_channels,
    open_graph,
    relative_positions,
    statistics,
)

# -- the model: plain PyTorch Geometric ----------------------------------------------------------------------------


def mlp(inputs: int, dim: int, outputs: int, *, norm: bool = True) -> nn.Sequential:
    """Two layers, and a norm on what goes on to other blocks."""
    layers = [nn.Linear(inputs, dim), nn.SiLU(), nn.Linear(dim, outputs)]
    return nn.Sequential(*layers, *([nn.LayerNorm(outputs)] if norm else []))


class Processor(MessagePassing):
    """One round of messages: edges learn from both of their nodes, then nodes from their edges, both as residuals.

    The first layer of the edges' network is linear in [edge, source, target], so the nodes' share of it is computed
    once a node, before the gather: a third of the work, and on a domain only that is exchanged.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(aggr="sum")
        self.edge, self.source, self.target = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.message_net = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim), nn.LayerNorm(dim))
        self.node_net = mlp(2 * dim, dim, dim)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D), (2, E), (E, D) → (N, D), (E, D)."""
        source = self.source(x)
        scidata.start_exchange(source, edge_index)  # scidata: runs beside the next line; nothing in one process
        hidden = self.edge(edge_attr) + self.target(x)[edge_index[1]]
        edge_attr = edge_attr + self.message_net(hidden + source[edge_index[0]])
        received = self.propagate(edge_index, edge_attr=edge_attr, size=(x.size(0), x.size(0)))
        return x + self.node_net(torch.cat([x, received], dim=-1)), edge_attr

    def message(self, edge_attr: Tensor) -> Tensor:
        """What each edge tells its target, (E, D)."""
        return edge_attr


class MeshGraphNet(nn.Module):
    """Encode, process, decode (Pfaff et al. 2021)."""

    def __init__(self, inputs: int, edge_inputs: int, outputs: int, *, dim: int, depth: int) -> None:
        super().__init__()
        self.encode_node, self.encode_edge = mlp(inputs, dim, dim), mlp(edge_inputs, dim, dim)
        self.rounds = nn.ModuleList(Processor(dim) for _ in range(depth))
        self.decode = mlp(dim, dim, outputs, norm=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """(N, C), (2, E), (E, edge inputs) → (N, outputs)."""
        x, edge_attr = self.encode_node(x), self.encode_edge(edge_attr)
        for layer in self.rounds:
            x, edge_attr = layer(x, edge_index, edge_attr)
        return self.decode(x)


# -- one step ------------------------------------------------------------------------------------------------------


def loss_of(model: Callable[..., Tensor], data: Any, edge_attr: Tensor, num_samples: int, stats: Stats) -> Tensor:
    """Mean over samples of the mean squared error over a sample's nodes, in standard deviations of the targets.

    Samples count alike whatever their size, so that the mean over dp ranks is the mean over their samples.
    """
    x = (data.x - stats["input_mean"]) / stats["input_std"]
    y = (data.y - stats["target_mean"]) / stats["target_std"]
    edge_attr = (edge_attr - stats["edge_mean"]) / stats["edge_std"]
    error = (model(x, data.edge_index, edge_attr) - y).square().mean(dim=1, keepdim=True)
    return global_mean_pool(error, data.batch, num_samples).mean()


# -- one run -------------------------------------------------------------------------------------------------------


class Training(Trainer):
    """What is this script's own of a run."""

    def open(self, mesh: DeviceMesh | None) -> scidata.IrregularDataset:
        """Open the data: this rank's part of each sample, or whole samples without a mesh."""
        args = self.args
        fields = list(dict.fromkeys([*args.inputs, *args.targets]))
        halo = {"halo": args.depth} if args.khop and mesh is not None else {}  # a hop for each round of messages
        return open_graph(args.data, mesh, fields=fields, dtype=self.dtype, **halo)  # scidata

    def make_model(self) -> nn.Module:
        """Return a plain model, its weights drawn at random."""
        args, ds = self.args, self.ds
        inputs, outputs = num_channels(ds, args.inputs), num_channels(ds, args.targets)
        return MeshGraphNet(inputs, num_edge_channels(ds), outputs, dim=args.dim, depth=args.depth)

    def normalise(self) -> None:
        """Take mean and standard deviation of the fields from the store; compute those of the edges."""
        mean, std = edge_statistics(self.ds)
        self.stats = self.blank_stats() | {"edge_mean": self.on_device(mean), "edge_std": self.on_device(std)}

    def blank_stats(self) -> Stats:
        """Statistics that take no reading; those of edges are there by their shape only."""
        found: Stats = {}
        for kind, names in (("input", self.args.inputs), ("target", self.args.targets)):
            mean, std = statistics(self.ds, names)
            found |= {f"{kind}_mean": self.on_device(mean), f"{kind}_std": self.on_device(std)}
        size = num_edge_channels(self.ds)
        return found | {name: self.on_device(torch.zeros(size)) for name in ("edge_mean", "edge_std")}

    def on_device(self, figures: Tensor) -> Tensor:
        """Move to where the fields are."""
        return figures.to(self.device, self.dtype)

    def loss(self, model: nn.Module, batch: scidata.IrregularSample) -> Tensor:
        """Loss of one batch; a plain tensor, the same on every rank of a domain."""
        khop = self.args.khop
        data = batch.to_pyg(x=self.args.inputs, y=self.args.targets, khop=khop)
        predict = partial(batch.call_on_parts, model) if khop else model  # scidata: ghosts are computed here, not sent
        return loss_of(predict, data, relative_positions(self.ds, data), len(batch.index), self.stats)


def main(argv: list[str] | None = None) -> int:
    """Train, or check; return the exit code."""
    parser = parser_of(__doc__, out="runs/gnn", lr=1e-3, lr_batch=4, decay=0.01)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--data", required=True, help="a store of scidata partition, of meshes or graphs")
    parser.add_argument("--inputs", nargs="+", default=INPUTS, metavar="FIELD", help="fields of nodes; default: flows'")
    parser.add_argument("--targets", nargs="+", default=TARGETS, metavar="FIELD", help="what is to be predicted")
    parser.add_argument("--dim", default=64, **number)
    parser.add_argument("--depth", default=6, help="rounds of messages", **number)
    parser.add_argument(
        "--khop", action="store_true", help="compute ghosts, --depth hops of them, and exchange nothing"
    )
    args = parser.parse_args(argv)
    check_arguments(parser, args, ("dim", "depth"))
    if args.khop and args.strategy == "fsdp":
        parser.error("--khop needs whole weights on each rank: use --strategy ddp")
    return run(Training, parser, args)


if __name__ == "__main__":
    sys.exit(main())
