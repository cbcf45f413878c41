"""Train a MeshGraphNet to predict fields on the nodes of meshes and graphs, on a dp × domain mesh of ranks.

    python -m pipelines.flow_graph make raw/ && python -m pipelines.flow_graph convert raw/ flow.store
    python examples/train_gnn.py --data flow.store                                         # one process
    torchrun --nproc-per-node 4 examples/train_gnn.py --data flow.store --domain 2         # 2 dp × 2 domain
    torchrun --nproc-per-node 4 examples/train_gnn.py --data flow.store --domain 2 --check --dtype float64
    torchrun --nproc-per-node 4 examples/train_gnn.py --data flow.store --domain 2 --khop  # wide halos, no exchange

    python -m pipelines.ugrid_mesh make waves.nc && python -m pipelines.ugrid_mesh convert waves.nc waves.store
    python examples/train_gnn.py --data waves.store --inputs height --targets height --next  # one time from the last

The model is plain PyTorch Geometric and knows nothing of ranks, but for one line that lets an exchange run beside other
work. What is different from a script for one process is marked ``# scidata``: ``open_graph(..., mesh)`` here,
``init_mesh``, ``parallelize`` and the sampler in ``trainer.py``. Any store of ``scidata partition`` will do whose
fields live on nodes: name them with ``--inputs`` and ``--targets``. With ``--next`` the targets are those of the time
after, and inputs that are no targets are forcings: ``forecast.py`` runs such a model forward.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("importing torch and torch_geometric: up to 20 s the first time …", file=sys.stderr, flush=True)

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch_geometric.nn import MessagePassing, global_mean_pool
from torch_geometric.utils import trim_to_layer

# neither pipelines/, beside this folder, nor this folder is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer import Trainer, run
from trainer_options import Parser, check_arguments, parser_of

import scidata
from pipelines.flow_graph import (
    INPUTS,
    TARGETS,
    edge_statistics,
    num_channels,
    num_edge_channels,
    open_graph,
    relative_positions,
)
from scidata import metrics

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
    """Encode, process, decode (Pfaff et al. 2021). What comes along edges is normalised here."""

    edge_mean: Tensor
    edge_std: Tensor

    def __init__(self, inputs: int, edge_inputs: int, outputs: int, *, dim: int, depth: int) -> None:
        super().__init__()
        self.register_buffer("edge_mean", torch.zeros(edge_inputs))
        self.register_buffer("edge_std", torch.ones(edge_inputs))
        self.encode_node, self.encode_edge = mlp(inputs, dim, dim), mlp(edge_inputs, dim, dim)
        self.rounds = nn.ModuleList(Processor(dim) for _ in range(depth))
        self.decode = mlp(dim, dim, outputs, norm=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, *by_hop: list[int]) -> Tensor:
        """(N, C), (2, E), (E, edge inputs) → (N, outputs). ``by_hop``: how many of both are 0, 1, … hops away."""
        x, edge_attr = self.encode_node(x), self.encode_edge((edge_attr - self.edge_mean) / self.edge_std)
        for i, layer in enumerate(self.rounds):
            if by_hop:  # leave out what is too far away to count from here on
                x, edge_index, edge_attr = trim_to_layer(i, *by_hop, x, edge_index, edge_attr)
            x, edge_attr = layer(x, edge_index, edge_attr)
        return self.decode(x)


# -- one run -------------------------------------------------------------------------------------------------------


class Training(Trainer):
    """What is this script's own of a run."""

    model_options = ("dim", "depth", "inputs", "targets", "next")

    # -- data

    def open(self, mesh: DeviceMesh | None) -> scidata.IrregularDataset:
        """Open the data: this rank's part of each sample, or whole samples without a mesh."""
        args = self.args
        self.inputs, self.predicted = tuple(args.inputs), tuple(args.targets)
        fields = list(dict.fromkeys([*args.inputs, *args.targets]))
        halo = {"halo": args.depth} if args.khop and mesh is not None else {}  # a hop for each round of messages
        steps = (0, 1) if args.next else (0,)
        ds = open_graph(args.data, mesh, fields=fields, dtype=self.dtype, steps=steps, **halo)  # scidata
        if len(ds) == 0:
            raise scidata.errors.ConfigError(f"{args.data}: has no two times that follow each other, for --next")
        return ds

    def span(self, index: int) -> tuple[int, int]:
        """Return the first and the last time of a sample, by number."""
        return index, index + int(self.args.next)

    def statistics(self, ds: scidata.CombinedDataset) -> scidata.Statistics:
        """Mean and deviation of each field, the same for all components, so that vectors keep their direction."""
        names = sorted({*self.inputs, *self.predicted})
        return scidata.statistics(ds, fields=names, differences=False)

    # -- model

    def make_model(self) -> nn.Module:
        """Return a plain model, its weights drawn at random."""
        args, ds = self.args, self.states
        inputs, outputs = num_channels(ds, self.inputs), num_channels(ds, self.predicted)
        return MeshGraphNet(inputs, num_edge_channels(ds), outputs, dim=args.dim, depth=args.depth)

    def measure(self, model: nn.Module) -> None:
        """Mean and deviation of what comes along edges."""
        mean, std = edge_statistics(self.data, among=self.train_samples)
        model.edge_mean.copy_(mean)
        model.edge_std.copy_(std)

    def columns(self, x: Tensor, names: Sequence[str], step: int) -> Tensor:
        """Take the columns of one time of what ``to_pyg`` has put side by side: each field's times, then the next's."""
        widths = [num_channels(self.states, [name]) for name in names]
        found = []
        for part, width in zip(x.split([num_channels(self.data, [n]) for n in names], dim=1), widths, strict=True):
            at = step % (part.shape[1] // width)  # 0 for a field that does not change with time
            found.append(part[:, at * width : (at + 1) * width])
        return torch.cat(found, dim=1)

    def predict(self, model: nn.Module, batch: scidata.IrregularSample) -> tuple[Tensor, Tensor]:
        """Return the targets by the model, and by the data, ``(N, C)``, in standard deviations."""
        khop = self.args.khop
        data = batch.to_pyg(x=self.inputs, y=self.predicted, khop=khop, by_hop=khop)
        call = partial(batch.call_on_parts, model) if khop else model  # scidata: ghosts are computed here, not sent
        by_hop = [data[name] for name in ("num_sampled_nodes", "num_sampled_edges") if name in data]
        x, edge_attr = self.columns(data.x, self.inputs, 0), relative_positions(self.data, data)
        found = call(x, data.edge_index, edge_attr, *by_hop)
        if self.args.next:  # the model says what they change by
            return self.columns(data.y, self.predicted, 0) + found, self.columns(data.y, self.predicted, 1)
        return found, data.y

    def loss(self, model: nn.Module, batch: scidata.IrregularSample) -> Tensor:
        """Mean over samples of the mean squared error over a sample's nodes, in standard deviations of the targets.

        Samples count alike whatever their size, so that the mean over dp ranks is the mean over their samples. A plain
        tensor, the same on every rank of a domain.
        """
        found, expected = self.predict(model, batch)
        error = (found - expected).square().mean(dim=1, keepdim=True)
        return global_mean_pool(error, batch["batch"], len(batch.index)).mean()

    # -- scores, and a forecast's steps

    def by_field(self, x: Tensor) -> dict[str, Tensor]:
        """Take columns apart: ``(N, C)`` to the dims of each field."""
        found = {}
        parts = x.split([num_channels(self.states, [name]) for name in self.predicted], dim=1)
        for name, part in zip(self.predicted, parts, strict=True):
            shape, dim = self.states.global_shape(name), self.states.place(name).dim
            found[name] = part.reshape(-1, *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)
        return found

    def error_of(self, field: str) -> metrics.Metric:
        """Root mean square over nodes and components."""
        return metrics.RMSE(mesh=self.mesh)

    def number_of(self, batch: scidata.IrregularSample) -> int:
        """Return the sample's number: batches that are scored have one."""
        return batch.index[0]

    def first_state(self, time: int) -> Tensor:
        """Return the targets at one time, ``(N, C)``."""
        return self.states[time].to(self.device).to_pyg(x=self.predicted).x

    def advance(self, state: Tensor, time: int) -> Tensor:
        """Return the state one step later."""
        data = self.states[time].to(self.device).to_pyg(x=self.inputs)
        own, now = (
            dict(zip(names, x.split([num_channels(self.states, [name]) for name in names], dim=1), strict=True))
            for names, x in ((self.inputs, data.x), (self.predicted, state))
        )
        x = torch.cat([(own | now)[name] for name in self.inputs], dim=1)
        return state + self.model(x, data.edge_index, relative_positions(self.states, data))


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Return the parser, and what it has made of the command line."""
    parser = parser_of(__doc__, out="runs/gnn", lr=1e-3, lr_batch=4, decay=0.01)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--data", required=True, help="a store of scidata partition, of meshes or graphs")
    parser.add_argument("--inputs", nargs="+", default=INPUTS, metavar="FIELD", help="fields of nodes; default: flows'")
    parser.add_argument("--targets", nargs="+", default=TARGETS, metavar="FIELD", help="what is to be predicted")
    parser.add_argument("--next", action="store_true", help="predict the targets one time later than the inputs")
    parser.add_argument("--dim", default=64, **number)
    parser.add_argument("--depth", default=6, help="rounds of messages", **number)
    parser.add_argument(
        "--khop", action="store_true", help="compute ghosts, --depth hops of them, and exchange nothing"
    )
    args = parser.parse_args(argv)
    check_arguments(parser, args, ("dim", "depth"))
    if args.khop and args.strategy == "fsdp":
        parser.error("--khop needs whole weights on each rank: use --strategy ddp")
    if args.next and not {*args.targets} <= {*args.inputs}:
        parser.error("--next: what a field will be follows from what it is: name all --targets among --inputs")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    """Train, or check; return the exit code."""
    return run(Training, *arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
