"""Train GraphCast's kind of model, grid → mesh → grid, to predict the next step of weather, on dp × domain ranks.

    python -m pipelines.graphcast make waves                       # small made-up data, and their store
    python examples/train_graphcast.py --data waves                                            # one process
    torchrun --nproc-per-node 4 examples/train_graphcast.py --data waves --domain 2            # 2 dp × 2 domain
    torchrun --nproc-per-node 3 examples/train_graphcast.py --data waves --domain 3 --dtype float64 --check
    torchrun --nproc-per-node 2 examples/train_graphcast.py --data waves --domain 2 --rollout 3 --recompute --amp bf16

    python -m pipelines.graphcast convert 2015.nc 2016.nc era5      # raw files: NetCDF, HDF5, Zarr

The model is plain PyTorch and PyTorch Geometric (after Lam et al. 2023, "Learning skillful medium-range global weather
forecasting"): an encoder from grid points to the nodes of a refined icosahedron, rounds of messages along the edges of
all its levels, a decoder back. It says by how much each field changes. It knows nothing of ranks, but for one line that
lets an exchange run beside other work. What is different from a script for one process is marked ``# scidata``:
``open_graphcast(..., mesh)`` here, ``init_mesh``, ``parallelize`` and the sampler in ``trainer.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("importing torch and torch_geometric: up to 20 s the first time …", file=sys.stderr, flush=True)

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import HeteroData
from torch_geometric.nn import MessagePassing

# neither pipelines/, beside this folder, nor this folder is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer import Trainer, run
from trainer_options import Parser, check_arguments, parser_of, shown
from trainer_parts import described, is_complete

import scidata
from pipelines.graphcast import (
    Coordinates,
    area_weights,
    clock_features,
    num_channels,
    open_graphcast,
    place_features,
    stack_channels,
)
from scidata import metrics

IN, ON, OUT = ("grid", "to", "mesh"), ("mesh", "to", "mesh"), ("mesh", "to", "grid")
PLACE, EDGE, CLOCK = 3, 4, 4  # features of a node's place, of an edge, of the time


# -- the model: plain PyTorch and PyTorch Geometric ----------------------------------------------------------------


def mlp(inputs: int, dim: int, outputs: int, *, norm: bool = True) -> nn.Sequential:
    """Two layers, and a norm on what goes on to other blocks."""
    layers = [nn.Linear(inputs, dim), nn.SiLU(), nn.Linear(dim, outputs)]
    return nn.Sequential(*layers, *([nn.LayerNorm(outputs)] if norm else []))


class Interaction(MessagePassing):
    """One round of messages from one set of nodes to another, or to itself: edges learn, then their targets.

    The first layer of the edges' network is linear in [edge, source, target], so the nodes' share of it is computed
    once a node, before the gather: on a domain only the sources' is exchanged, once for each round.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(aggr="sum")
        self.edge, self.source, self.target = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.message_net = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim), nn.LayerNorm(dim))
        self.node_net = mlp(2 * dim, dim, dim)

    def forward(self, x: Tensor, y: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        """Sources (S, D), targets (T, D), (2, E), (E, D) → new targets (T, D), new edges (E, D)."""
        source = self.source(x)
        scidata.start_exchange(source, edge_index)  # scidata: runs beside the next line; nothing in one process
        hidden = self.edge(edge_attr) + self.target(y)[edge_index[1]]
        told = self.message_net(hidden + source[edge_index[0]])
        received = self.propagate(edge_index, told=told, size=(x.size(0), y.size(0)))
        return y + self.node_net(torch.cat([y, received], dim=-1)), edge_attr + told

    def message(self, told: Tensor) -> Tensor:
        """What each edge tells its target, (E, D)."""
        return told


class GraphCast(nn.Module):
    """Encode, process, decode, and again from what was predicted, for as many steps as are asked for."""

    def __init__(
        self, states: int, forcings: int, *, history: int, dim: int, depth: int, change: Tensor, recompute: bool
    ) -> None:
        super().__init__()
        self.history, self.recompute = history, recompute
        self.register_buffer("change", change)  # by how much channels usually change, in the unit of states
        inputs = history * states + (history + 1) * forcings + PLACE
        self.embed_grid, self.embed_mesh = mlp(inputs, dim, dim), mlp(PLACE, dim, dim)
        self.embed_edges = nn.ModuleList(mlp(EDGE, dim, dim) for _ in (IN, ON, OUT))
        self.encode, self.decode = Interaction(dim), Interaction(dim)
        self.keep = mlp(dim, dim, dim)  # what grid points know after the encoder, which sends them nothing
        self.rounds = nn.ModuleList(Interaction(dim) for _ in range(depth))
        self.output = mlp(dim, dim, states, norm=False)

    def forward(self, states: Sequence[Tensor], forcings: Sequence[Tensor], graph: HeteroData) -> list[Tensor]:
        """``history`` states (N, C), forcings of their times and of all that follow (N, F) → those states (N, C)."""
        states = list(states)
        places = {name: place_features(graph[name].pos) for name in ("grid", "mesh")}
        fixed = (
            self.embed_mesh(places["mesh"]),
            *(
                embed(graph[relation].edge_attr)
                for embed, relation in zip(self.embed_edges, (IN, ON, OUT), strict=True)
            ),
        )
        for step in range(self.history, len(forcings)):
            past = slice(step - self.history, step)
            x = torch.cat([*states[past], *forcings[past], forcings[step], places["grid"]], dim=-1)
            states.append(states[-1] + self.change * self.step(x, graph, *fixed))
        return states[self.history :]

    def step(self, x: Tensor, graph: HeteroData, mesh: Tensor, into: Tensor, on: Tensor, back: Tensor) -> Tensor:
        """What grid points know (N, inputs), and the mesh and the edges, embedded → by how much states change."""
        grid = self.call(self.embed_grid, x)
        mesh, _ = self.call(self.encode, grid, mesh, graph[IN].edge_index, into)
        grid = grid + self.call(self.keep, grid)
        for layer in self.rounds:
            mesh, on = self.call(layer, mesh, mesh, graph[ON].edge_index, on)
        grid, _ = self.call(self.decode, mesh, grid, graph[OUT].edge_index, back)
        return self.output(grid)

    def call(self, block: nn.Module, *inputs: Tensor) -> Any:
        """Run a block; with ``recompute`` only its inputs are kept for the backward pass, and it runs again there."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)


# -- one run -------------------------------------------------------------------------------------------------------


class Training(Trainer):
    """What is this script's own of a run."""

    model_options = ("dim", "depth", "history", "rollout", "fields", "forcings")

    def __init__(self, args: argparse.Namespace) -> None:
        if args.weights and not args.resume:
            args.stats = str(Path(args.weights) / "stats.json")  # weights mean nothing without their normalisation
        super().__init__(args)

    # -- data

    def open(self, mesh: DeviceMesh | None) -> scidata.IrregularDataset:
        """Open the data: this rank's part of each sample, or whole samples without a mesh."""
        args = self.args
        self.about = Coordinates.load(args.data)
        self.window = range(args.history + args.rollout)  # of a sample: times that go in, and those that follow
        self.history, self.num_times = args.history, len(self.window)
        if len(self.window) > (longest := max(map(len, self.about.times))):
            raise scidata.errors.ConfigError(
                f"--history {args.history} --rollout {args.rollout}: a sample takes {len(self.window)} times, and "
                f"{args.data} has {longest} in a row"
            )
        asked = None if args.fields is None else [*args.fields, *args.forcings]
        ds = open_graphcast(args.data, mesh, fields=asked, dtype=self.dtype, steps=self.window)  # scidata
        fields = [name for name in ds.fields if ds.place(name).entity == "grid" and name != "grid/pos"]
        self.fixed = {name for name in fields if self.about.time not in ds.reader.info(name).dims}
        for name in args.forcings:
            if name not in fields:
                near = scidata.errors.near_matches(name, fields)
                raise scidata.errors.UnknownNameError(
                    f"--forcings: {args.data} has no field {name!r} on the grid{near}"
                )
        for name in args.fields or ():
            if name in args.forcings or name in self.fixed:
                why = "is among --forcings, too" if name in args.forcings else "does not change with time"
                raise scidata.errors.ConfigError(f"--fields: {name!r} {why}, so it is nothing to predict")
        self.predicted = tuple(name for name in fields if name not in {*args.forcings, *self.fixed})
        self.forcings = tuple(name for name in fields if name not in self.predicted)
        if not self.predicted:
            raise scidata.errors.ConfigError(f"{args.data}: no field is left to predict that changes with time")
        return ds

    def span(self, index: int) -> tuple[Any, Any]:
        """Return the first and the last time of a sample, or their numbers where they are no dates."""
        dates, first = self.about.dates(), self.about.first_times(self.window)[index]
        last = first + len(self.window) - 1
        return (first, last) if dates is None else (dates[first], dates[last])

    def statistics(self, ds: scidata.CombinedDataset) -> scidata.Statistics:
        """Mean and deviation of each field, of each of its levels, and of its change from one time to the next."""
        names = [*self.predicted, *self.forcings]
        levels = {dim for name in names for dim in self.levels_of(name)}
        return scidata.statistics(ds, fields=names, by=sorted(levels))

    def levels_of(self, name: str) -> tuple[str, ...]:
        """Return the dims of a field that become channels."""
        info = self.data.reader.info(name)
        return tuple(dim for i, dim in enumerate(info.dims) if i != info.entity_dim and dim != self.about.time)

    def normalise(self) -> None:
        """Take the normalisation from its file, or compute it; the model's output is scaled by changes."""
        super().normalise()
        if any(self.stats[name].differences is None for name in self.predicted):
            raise scidata.errors.ConfigError(
                f"{self.known}: has no differences from one time to the next, which this model predicts; write it with "
                f"scidata stats {self.args.data}/graph.store --by level"
            )

    # -- model

    def make_model(self) -> nn.Module:
        """Return a plain model, its weights drawn at random."""
        args = self.args
        channels, forcings = num_channels(self.states, self.predicted), num_channels(self.states, self.forcings)
        forcings += CLOCK if self.about.has_dates else 0
        return GraphCast(
            channels, forcings, history=args.history, dim=args.dim, depth=args.depth,
            change=self.of_channels(lambda name: self.stats[name].difference_std / self.stats[name].std),
            recompute=args.recompute,
        )  # fmt: skip

    def of_channels(self, figures: Callable[[str], Any]) -> Tensor:
        """Put figures by field, of all levels or of each, side by side: ``(C,)``; 1 where a field does not change."""
        parts = []
        for name in self.predicted:
            values = torch.as_tensor(figures(name), dtype=torch.float64).reshape(-1)
            parts.append(values.broadcast_to(num_channels(self.states, [name])))
        found = torch.cat(parts)
        return torch.where(found.isfinite() & (found > 0), found, 1.0)

    def prepare(self) -> None:
        """Make all that training needs; with ``--weights`` it begins with those of another training."""
        super().prepare()
        if self.args.weights and not self.args.resume:
            for model in filter(None, (self.model, self.single)):
                state = {"model": get_model_state_dict(model)}
                dcp.load(state, checkpoint_id=self.args.weights)
                set_model_state_dict(model, state["model"])

    # -- loss

    def roll_out(self, model: nn.Module, batch: scidata.HeteroSample) -> tuple[list[Tensor], list[Tensor], HeteroData]:
        """Return the states that follow by the model, and by the data, in standard deviations."""
        graph = batch.to_pyg()
        grid = graph["grid"]
        states = [stack_channels(grid, self.predicted, step) for step in self.window]
        firsts = [self.about.first_times(self.window)[index] for index in batch.index]
        forcings = [self.given(grid, [first + step for first in firsts], step) for step in self.window]
        return model(states[: self.history], forcings, graph), states[self.history :], graph

    def given(self, grid: Any, times: Sequence[int], step: int | None = None) -> Tensor:
        """Return what the model is told and does not predict, ``(N, F)``, of a time for each sample of a batch.

        ``step``: which of the samples' times that is; None where they have one.
        """
        parts = [stack_channels(grid, [name], None if name in self.fixed else step) for name in self.forcings]
        if self.about.has_dates:
            sample = grid.batch if "batch" in grid else torch.zeros_like(grid.pos[:, 0], dtype=torch.long)
            parts.append(clock_features(self.about.dates()[list(times)], sample, grid.pos))
        return torch.cat(parts, dim=1) if parts else grid.pos[:, :0]

    def loss(self, model: nn.Module, batch: scidata.HeteroSample) -> Tensor:
        """Mean squared error over all steps, fields, levels and the sphere, in what fields usually change by in a step.

        Levels count in proportion to their pressure, fields without levels ``--surface-weight`` as much as others,
        grid points by area. A plain tensor, the same on every rank of a domain.
        """
        found, expected, graph = self.roll_out(model, batch)
        areas = area_weights(self.about, graph["grid"].pos)
        weights = self.channel_weights.to(areas.device, areas.dtype) / model.change.square()
        errors = [((x - y).square() * weights).sum(dim=1, keepdim=True) for x, y in zip(found, expected, strict=True)]
        return (areas * torch.cat(errors, dim=1)).mean() / areas.mean()

    @cached_property
    def channel_weights(self) -> Tensor:
        """Return how much each channel counts, ``(C,)``, 1 altogether."""
        parts = []
        for name in self.predicted:
            levels = self.about.level_weights(self.levels_of(name))
            num = num_channels(self.states, [name])
            share = 1.0 if self.levels_of(name) else self.args.surface_weight
            parts.append(share * levels.broadcast_to(num) / num)
        weights = torch.cat(parts)
        return weights / weights.sum()

    # -- scores

    def predict(self, model: nn.Module, batch: scidata.HeteroSample) -> tuple[Tensor, Tensor]:
        """Return the last state by the model, and by the data, ``(N, C)``."""
        found, expected, _ = self.roll_out(model, batch)
        return found[-1], expected[-1]

    def by_field(self, x: Tensor) -> dict[str, Tensor]:
        """Take channels apart: ``(N, C)`` to ``(L, N)`` or ``(N,)`` by field."""
        found = {}
        parts = x.split([num_channels(self.states, [name]) for name in self.predicted], dim=1)
        for name, part in zip(self.predicted, parts, strict=True):
            shape, dim = self.states.global_shape(name), self.states.place(name).dim
            found[name] = part.reshape(-1, *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)
        return found

    def error_of(self, field: str) -> metrics.Metric:
        """Root mean square over levels and the sphere, by area."""
        return metrics.RMSE(weights={"grid": self.areas}, dims=self.states.dims(field), mesh=self.mesh)

    @cached_property
    def areas(self) -> Tensor:
        """Return the weight of each point of the whole grid, in the store's order, ``(N,)``."""
        weights = area_weights(self.about, self.truth[0].to(self.device).to_pyg()["grid"].pos)[:, 0]
        return (weights.full_tensor() if isinstance(weights, scidata.ShardTensor) else weights).double().cpu()

    def number_of(self, batch: scidata.HeteroSample) -> int:
        """Return the sample's number: batches that are scored have one."""
        return batch.index[0]

    # -- forecasts

    def moments(self) -> tuple[str, list[Any] | None]:
        """Return the dim of times, and the data's dates; None where they are none."""
        dates = self.about.dates()
        return self.about.time, None if dates is None else list(dates)

    def first_state(self, time: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return states ``(N, C)`` and forcings ``(N, F)`` of the times that go into a step."""
        times = range(time - self.history + 1, time + 1)
        grids = [self.states[each].to(self.device).to_pyg()["grid"] for each in times]
        given = [self.given(grid, [each]) for grid, each in zip(grids, times, strict=True)]
        return [stack_channels(grid, self.predicted) for grid in grids], given

    def advance(self, state: tuple[list[Tensor], list[Tensor]], time: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return those one step later."""
        states, forcings = state
        graph = self.states[time + 1].to(self.device).to_pyg()
        forcings = [*forcings, self.given(graph["grid"], [time + 1])]
        return [*states[1:], *self.model(states, forcings, graph)], forcings[1:]

    def physical(self, x: Any) -> dict[str, Tensor]:
        """Return a prediction, or the last state of a forecast, by field, in the units of the data."""
        return super().physical(x[0][-1] if isinstance(x, tuple) else x)


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace]:
    """Return the parser, and what it has made of the command line."""
    parser = parser_of(__doc__, out="runs/graphcast", lr=1e-3, lr_batch=8, decay=0.1)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--data", required=True, help="a folder of python -m pipelines.graphcast make, or convert")
    parser.add_argument("--fields", nargs="+", help="to be predicted; default: all that change with time")
    parser.add_argument("--forcings", nargs="+", default=[], help="given at each time, not predicted")
    parser.add_argument("--history", default=2, help="times that go in", **number)
    parser.add_argument(
        "--rollout", default=1, help="steps of a sample, each from the one before, with a loss", **number
    )
    parser.add_argument("--dim", default=64, **number)
    parser.add_argument("--depth", default=6, help="rounds of messages on the mesh", **number)
    parser.add_argument("--surface-weight", type=float, default=0.1, metavar="W", help="of fields without levels")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing: less memory, more time")
    parser.add_argument(
        "--weights", metavar="CHECKPOINT", help="begin with those of another training, of less --rollout"
    )
    args = parser.parse_args(argv)
    check_arguments(parser, args, ("history", "rollout", "dim", "depth"))
    if not args.surface_weight > 0:
        parser.error(f"--surface-weight must be above 0, not {args.surface_weight}")
    if args.weights:
        check_weights(parser, args)
    return parser, args


def check_weights(parser: Parser, args: argparse.Namespace) -> None:
    """Check that ``--weights`` are of such a model."""
    if not is_complete(args.weights):
        parser.error(f"--weights {args.weights}: no complete checkpoint there; give one of the step_… folders")
    before = described(args.weights)["options"]
    for name in ("dim", "depth", "history", "fields", "forcings"):
        if before.get(name) != getattr(args, name):
            was, now = shown(before.get(name)), shown(getattr(args, name))
            parser.error(f"--weights {args.weights}: are of --{name} {was}, and this has {now}")


def main(argv: list[str] | None = None) -> int:
    """Train, or check; return the exit code."""
    return run(Training, *arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
