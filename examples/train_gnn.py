"""Train a MeshGraphNet to predict fields on the nodes of meshes and graphs, on a dp × domain mesh of ranks.

    python -m pipelines.flow_graph make raw/ && python -m pipelines.flow_graph convert raw/ flow.store
    python examples/train_gnn.py --data flow.store                                         # one process
    torchrun --nproc-per-node 4 examples/train_gnn.py --data flow.store --domain 2         # 2 dp × 2 domain
    torchrun --nproc-per-node 4 examples/train_gnn.py --data flow.store --domain 2 --check --dtype float64
    torchrun --nproc-per-node 4 examples/train_gnn.py --data flow.store --domain 2 --khop  # wide halos, no exchange

The model is plain PyTorch Geometric and knows nothing of ranks, but for one line that lets an exchange run beside other
work. What is different from a script for one process: ``init_mesh``, ``open_graph(..., mesh)``, the sampler and
``parallelize``; those lines are marked ``# scidata``. Any store of ``scidata partition`` will do whose fields live on
nodes: name them with ``--inputs`` and ``--targets``.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch_geometric.nn import MessagePassing, global_mean_pool
from tqdm import tqdm

# pipelines/ is not installed: it is found beside this folder
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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


Stats = dict[str, Tensor]  # mean and std of inputs, targets and edges


def loss_of(model: Callable[..., Tensor], data: Any, edge_attr: Tensor, num_samples: int, stats: Stats) -> Tensor:
    """Mean over samples of the mean squared error over a sample's nodes, in standard deviations of the targets.

    Samples count alike whatever their size, so that the mean over dp ranks is the mean over their samples.
    """
    x = (data.x - stats["input_mean"]) / stats["input_std"]
    y = (data.y - stats["target_mean"]) / stats["target_std"]
    edge_attr = (edge_attr - stats["edge_mean"]) / stats["edge_std"]
    error = (model(x, data.edge_index, edge_attr) - y).square().mean(dim=1, keepdim=True)
    return global_mean_pool(error, data.batch, num_samples).mean()


def learning_rate(peak: float, progress: float, warmup: float) -> float:
    """Linear warm-up, then a cosine to zero. ``progress`` and ``warmup`` are parts of the whole training in [0, 1]."""
    if progress < warmup:
        return peak * progress / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def average(value: Tensor, mesh: DeviceMesh) -> float:
    """Mean of a figure over the dp ranks; all ranks of one domain hold the same one."""
    value = value.detach().double().clone()
    dist.all_reduce(value, group=mesh.get_group("dp"))
    return value.item() / mesh["dp"].size()


def whole_of(value: Tensor) -> Tensor:
    """Return the whole of what FSDP has spread over the ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


# -- checkpoints ---------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """How far training has come, in numbers that mean the same on any number of ranks."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    samples: int = 0  # taken of this epoch, by all dp ranks together

    def to_tensor(self) -> Tensor:
        """As saved."""
        return torch.tensor([self.step, self.epoch, self.samples])

    def restore(self, saved: Tensor) -> None:
        """Undo :meth:`to_tensor`."""
        self.step, self.epoch, self.samples = saved.tolist()


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    loader: scidata.DataLoader,
    stats: Stats,
) -> None:
    """Write a checkpoint, all ranks together: what is the same on all of them is written once."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "progress": progress.to_tensor(), "stats": stats, "loader": loader}
    dcp.save(state, checkpoint_id=str(folder / f"step_{progress.step:08d}"))


def load(
    path: str, model: nn.Module, optimizer: Optimizer, progress: Progress, loader: scidata.DataLoader, stats: Stats
) -> None:
    """Read a checkpoint, written on any number of ranks, into what is given."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "progress": progress.to_tensor(), "stats": stats, "loader": loader}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    progress.restore(state["progress"])


# -- training ------------------------------------------------------------------------------------------------------


class Training:
    """Everything one run holds, the same on every rank but for the data."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.mesh = scidata.init_mesh(dp=args.dp, domain=args.domain, device=args.device)  # scidata
        self.device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
        self.dtype = getattr(torch, args.dtype)
        self.num_dp = self.mesh["dp"].size()
        self.is_main = dist.get_rank() == 0
        self.ds = self.open(self.mesh)
        torch.manual_seed(args.seed)  # the same first weights on every rank
        inputs, outputs = num_channels(self.ds, args.inputs), num_channels(self.ds, args.targets)
        model = MeshGraphNet(inputs, num_edge_channels(self.ds), outputs, dim=args.dim, depth=args.depth)
        self.model = model.to(self.device, self.dtype)
        self.single = copy.deepcopy(self.model) if args.check else None
        scidata.parallelize(self.model, self.mesh, strategy=args.strategy)  # scidata
        order = scidata.DistributedSampler(self.ds, self.mesh, seed=args.seed)  # scidata
        self.loader = self.load_from(self.ds, order, args.batch_size)
        self.progress = Progress()
        self.stats: Stats = {}

    def open(self, mesh: DeviceMesh | None) -> scidata.IrregularDataset:
        """Open the data: this rank's part of each sample, or whole samples without a mesh."""
        args = self.args
        fields = list(dict.fromkeys([*args.inputs, *args.targets]))
        halo = {"halo": args.depth} if args.khop and mesh is not None else {}  # a hop for each round of messages
        return open_graph(args.data, mesh, fields=fields, dtype=self.dtype, **halo)  # scidata

    def load_from(self, ds: scidata.IrregularDataset, order: Any, batch_size: int) -> scidata.DataLoader:
        """Make a loader of batches, disjoint unions of samples, on the device."""
        return scidata.DataLoader(
            ds, batch_size, sampler=order, device=self.device, pin_memory=self.args.device == "cuda"
        )

    def prepare(self) -> None:
        """Make the optimizer and compute the normalisation, or resume from a checkpoint, which holds both."""
        args = self.args
        # gradients of a larger batch are less noisy by the square root of its size, and Adam normalises by their size
        self.peak_lr = args.lr * math.sqrt(self.num_dp * args.batch_size / args.lr_batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.peak_lr, weight_decay=args.weight_decay)
        if args.resume:
            self.stats = {name: torch.empty_like(figures) for name, figures in self.figures().items()}
            load(args.resume, self.model, self.optimizer, self.progress, self.loader, self.stats)
        else:
            self.normalise()

    def normalise(self) -> None:
        """Take mean and standard deviation of the fields from the store; compute those of the edges."""
        mean, std = edge_statistics(self.ds)
        self.stats = self.figures() | {"edge_mean": self.on_device(mean), "edge_std": self.on_device(std)}

    def figures(self) -> Stats:
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

    def train(self) -> None:
        """Train for all epochs, or ``--max-steps``; a checkpoint at each epoch's end and where it stops."""
        args, progress = self.args, self.progress
        bar = tqdm(
            desc="train",
            unit="step",
            initial=progress.step,
            total=args.max_steps or progress.step + (args.epochs - progress.epoch) * len(self.loader),
            disable=not (self.is_main and sys.stderr.isatty()),
        )
        writer = self.tensorboard()
        stop = self.reached()
        losses: list[Tensor] = []  # since the last report: samples differ more than a model changes in one step
        while not stop:
            self.loader.set_epoch(progress.epoch)  # a resumed epoch has the samples that are left
            for batch in self.loader:
                losses.append(self.step(batch).detach())
                bar.update()
                if progress.step % args.log_every == 0:
                    self.report(writer, bar, average(torch.stack(losses).mean(), self.mesh))
                    losses.clear()
                stop = self.reached()
                if stop or progress.samples == 0 or (args.save_every and progress.step % args.save_every == 0):
                    save(Path(args.out), self.model, self.optimizer, progress, self.loader, self.stats)
                if stop:
                    break
        bar.close()
        if writer is not None:
            writer.close()

    def reached(self) -> bool:
        """Whether the training is over."""
        limit = self.args.max_steps
        return self.progress.epoch >= self.args.epochs or (limit is not None and self.progress.step >= limit)

    def step(self, batch: scidata.IrregularSample) -> Tensor:
        """One optimizer step; every rank of the mesh takes it together."""
        args, progress = self.args, self.progress
        taken = self.num_dp * len(batch.index)
        seen = progress.epoch * len(self.ds) + progress.samples + taken / 2  # halfway, so that no step has a rate of 0
        rate = learning_rate(self.peak_lr, min(1.0, seen / (args.epochs * len(self.ds))), args.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        amp = torch.autocast(args.device, torch.bfloat16) if args.amp else nullcontext()
        with amp:
            loss = self.loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if args.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
        self.optimizer.step()
        progress.step += 1
        progress.samples += taken
        if progress.samples >= len(self.ds):
            progress.epoch, progress.samples = progress.epoch + 1, 0
        return loss

    def tensorboard(self) -> Any:
        """Return a writer on rank 0, None elsewhere."""
        if not self.is_main:
            return None
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only one rank writes

        return SummaryWriter(self.args.out)

    def report(self, writer: Any, bar: Any, loss: float) -> None:
        """Show mean loss and learning rate on rank 0: as scalars, and in the progress bar or as a line."""
        if writer is None:
            return
        step, rate = self.progress.step, self.optimizer.param_groups[0]["lr"]
        writer.add_scalar("loss", loss, step)
        writer.add_scalar("lr", rate, step)
        bar.set_postfix(loss=loss, lr=rate)
        if bar.disable:
            print(f"step {step} loss {loss:.6g} lr {rate:.3g}", file=sys.stderr)

    def check(self) -> bool:
        """Compare loss and gradients of the first global batch with one process that reads the whole samples."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.normalise()
        single = self.single
        assert single is not None
        batch = next(iter(self.loader))
        loss = self.loss(self.model, batch)
        loss.backward()
        parts: list[Any] = [None] * self.num_dp
        dist.all_gather_object(parts, batch.index, group=self.mesh.get_group("dp"))
        indices = [index for part in parts for index in part]

        whole = next(iter(self.load_from(self.open(None), indices, len(indices))))
        expected = self.loss(single, whole)
        expected.backward()

        pairs = [(whole_of(p.grad), q.grad) for p, q in zip(self.model.parameters(), single.parameters(), strict=True)]
        scale = torch.stack([q.abs().max() for _, q in pairs]).max()
        gradient_error = torch.stack([(p - q).abs().max() for p, q in pairs]).max() / scale
        loss_error = (average(loss, self.mesh) - expected.detach()).abs() / expected.detach().abs()
        worst = torch.stack([loss_error, gradient_error]).double().nan_to_num(nan=torch.inf)  # a maximum may lose NaN
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # not one rank may be off
        losses, gradients = worst.tolist()
        passed = max(losses, gradients) <= TOLERANCE[self.args.dtype]
        if self.is_main:
            print(
                f"check {self.num_dp} dp x {self.mesh['domain'].size()} domain, {self.args.dtype}, samples {indices}, "
                f"loss {expected.item():.12g}: max relative difference to one process: loss {losses:.2e}, "
                f"gradients {gradients:.2e}: {'ok' if passed else 'FAILED'}"
            )
        return passed


TOLERANCE = {"float64": 1e-12, "float32": 1e-4}


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Read the command line; what can be checked without the data is checked here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--data", required=True, help="a store of scidata partition, of meshes or graphs")
    parser.add_argument("--inputs", nargs="+", default=INPUTS, metavar="FIELD", help="fields of nodes; default: flows'")
    parser.add_argument("--targets", nargs="+", default=TARGETS, metavar="FIELD", help="what is to be predicted")
    parser.add_argument("--dp", default=-1, help="ranks with different samples; -1: what is left", **number)
    parser.add_argument("--domain", default=1, help="ranks that share a sample", **number)
    parser.add_argument("--dim", default=64, **number)
    parser.add_argument("--depth", default=6, help="rounds of messages", **number)
    parser.add_argument(
        "--khop", action="store_true", help="compute ghosts, --depth hops of them, and exchange nothing"
    )
    parser.add_argument("--batch-size", default=1, help="samples per dp rank", **number)
    parser.add_argument("--epochs", default=1, **number)
    parser.add_argument("--max-steps", help="stop early; the schedule still spans --epochs", **number)
    parser.add_argument("--log-every", default=10, help="steps, whose mean loss is shown", **number)
    parser.add_argument("--save-every", help="steps; a checkpoint is also written at the end of an epoch", **number)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate at a global batch of --lr-batch")
    parser.add_argument("--lr-batch", default=4, help="scaled by the square root of global batch / this", **number)
    parser.add_argument("--warmup", type=float, default=0.05, help="part of the training, in [0, 1)")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip", type=float, help="largest norm of the gradient")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast; weights stay in --dtype")
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp", help="fsdp shards weights over dp ranks")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs/gnn", help="folder of checkpoints and TensorBoard scalars")
    parser.add_argument("--resume", metavar="CHECKPOINT", help="folder of one checkpoint: runs/gnn/step_…")
    parser.add_argument(
        "--check", action="store_true", help="compare the first step with one process, without AMP, and end"
    )
    args = parser.parse_args(argv)
    for name in ("dim", "depth", "batch_size", "epochs", "lr_batch", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if not 0 <= args.warmup < 1:
        parser.error(f"--warmup is a part of the training, in [0, 1), not {args.warmup}")
    if args.khop and args.strategy == "fsdp":
        parser.error("--khop needs whole weights on each rank: use --strategy ddp")
    if args.resume and not (Path(args.resume) / ".metadata").exists():
        parser.error(f"--resume {args.resume}: no complete checkpoint there; give one of the step_… folders")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    """Train, or check; return the exit code."""
    parser, args = parse(argv)
    try:
        training = Training(args)
    except (scidata.errors.SciDataError, ValueError, OSError) as e:
        parser.error(str(e))  # found from metadata, before any data was read: the same on every rank
    passed = True
    if args.check:
        passed = training.check()
    else:
        training.prepare()
        training.train()
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
