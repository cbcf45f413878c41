"""What the training scripts beside this share: the loop, checkpoints, logs, ``--check``, and their options."""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.optim import Optimizer
from tqdm import tqdm

import scidata

Stats = dict[str, Tensor]  # mean and std of what goes into the model, and of what is compared


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
    """Return the whole of what FSDP or tensor parallelism has spread over the ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def clip_gradients(model: nn.Module, largest: float) -> None:
    """Do as ``clip_grad_norm_``, which does not take DTensors and plain tensors together."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    kinds = [[p for p in parameters if isinstance(p, DTensor) == is_split] for is_split in (True, False)]
    norms = [whole_of(nn.utils.get_total_norm([p.grad for p in kind])) for kind in kinds if kind]
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, largest, torch.stack(norms).norm())


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
    path: str,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    loader: scidata.DataLoader,
    stats: Stats,
) -> None:
    """Read a checkpoint, written on any number of ranks, into what is given."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "progress": progress.to_tensor(), "stats": stats, "loader": loader}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    progress.restore(state["progress"])


# -- training ------------------------------------------------------------------------------------------------------


class Trainer:
    """Everything one run holds, the same on every rank but for the data.

    A script says what is its own: how the data are opened, the model, the normalisation and the loss.
    """

    plan: ClassVar[dict[str, ParallelStyle]] = {}  # what tensor parallelism does to modules, by their names

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        extra = {"tp": args.tp} if args.tp > 1 else None
        self.mesh = scidata.init_mesh(dp=args.dp, domain=args.domain, extra=extra, device=args.device)  # scidata
        self.device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
        self.dtype = getattr(torch, args.dtype)
        self.num_dp = self.mesh["dp"].size()
        self.is_main, self.said = dist.get_rank() == 0, -math.inf
        self.ds = self.open(self.mesh)
        torch.manual_seed(args.seed)  # the same first weights on every rank
        self.model = self.make_model().to(self.device, self.dtype)
        self.single = copy.deepcopy(self.model) if args.check else None
        if extra:
            parallelize_module(self.model, self.mesh["tp"], self.plan)
        scidata.parallelize(self.model, self.mesh, strategy=args.strategy)  # scidata
        order = scidata.DistributedSampler(self.ds, self.mesh, seed=args.seed)  # scidata
        self.loader = self.load_from(self.ds, order, args.batch_size)
        self.progress = Progress()
        self.stats: Stats = {}

    # -- a script's own ----------------------------------------------------------------------------------------------

    def open(self, mesh: DeviceMesh | None) -> Any:
        """Open the data: this rank's part of each sample, or whole samples without a mesh."""
        raise NotImplementedError

    def make_model(self) -> nn.Module:
        """Return a plain model, its weights drawn at random."""
        raise NotImplementedError

    def blank_stats(self) -> Stats:
        """Return tensors like those of the normalisation, for a checkpoint to fill."""
        raise NotImplementedError

    def normalise(self) -> None:
        """Compute the normalisation, ``self.stats``."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of one batch: a plain tensor, the same on every rank of a domain."""
        raise NotImplementedError

    # -- what they share ---------------------------------------------------------------------------------------------

    def say(self, text: str, *, after: float = 0.0) -> None:
        """Print a line on rank 0, if nothing was said for so many seconds."""
        if self.is_main and time.monotonic() - self.said >= after:
            self.said = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def load_from(self, ds: Any, order: Any, batch_size: int) -> scidata.DataLoader:
        """Make a loader of batches on the device."""
        pin = self.device.type == "cuda"
        return scidata.DataLoader(ds, batch_size, sampler=order, pin_memory=pin, device=self.device)

    def prepare(self) -> None:
        """Make the optimizer and compute the normalisation, or resume from a checkpoint, which holds both."""
        args = self.args
        # gradients of a larger batch are less noisy by the square root of its size, and Adam normalises by their size
        self.peak_lr = args.lr * math.sqrt(self.num_dp * args.batch_size / args.lr_batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.peak_lr, weight_decay=args.weight_decay)
        if args.resume:
            self.stats = self.blank_stats()
            load(args.resume, self.model, self.optimizer, self.progress, self.loader, self.stats)
        else:
            self.say("computing the normalisation")
            self.normalise()

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
                if bar.disable:
                    self.say(f"step {progress.step} of {bar.total}", after=8)
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

    def step(self, batch: Any) -> Tensor:
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
            clip_gradients(self.model, args.clip)
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
            self.say(f"step {step} loss {loss:.6g} lr {rate:.3g}")

    def check(self) -> bool:
        """Compare loss and gradients of the first global batch with one process that reads the whole samples."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.say("checking: computing the normalisation")
        self.normalise()
        self.say("checking: a step on all ranks")
        single = self.single
        assert single is not None
        batch = next(iter(self.loader))
        loss = self.loss(self.model, batch)
        loss.backward()
        parts: list[Any] = [None] * self.num_dp
        dist.all_gather_object(parts, batch.index, group=self.mesh.get_group("dp"))
        indices = [index for part in parts for index in part]

        self.say("checking: the same step on one process, which reads whole samples")
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
            axes = f"{self.num_dp} dp x {self.mesh['domain'].size()} domain"
            axes += f" x {self.args.tp} tp" if self.args.tp > 1 else ""
            print(
                f"check {axes}, {self.args.dtype}, samples {indices}, "
                f"loss {expected.item():.12g}: max relative difference to one process: loss {losses:.2e}, "
                f"gradients {gradients:.2e}: {'ok' if passed else 'FAILED'}"
            )
        return passed


TOLERANCE = {"float64": 1e-12, "float32": 1e-4}


def parser_of(description: str | None, *, out: str, lr: float, lr_batch: int, decay: float) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripts have; a folder of results and figures are a script's own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--dp", default=-1, help="ranks with different samples; -1: what is left", **number)
    parser.add_argument("--domain", default=1, help="ranks that share a sample", **number)
    parser.set_defaults(tp=1)
    parser.add_argument("--batch-size", default=1, help="samples per dp rank", **number)
    parser.add_argument("--epochs", default=1, **number)
    parser.add_argument("--max-steps", help="stop early; the schedule still spans --epochs", **number)
    parser.add_argument("--log-every", default=10, help="steps, whose mean loss is shown", **number)
    parser.add_argument("--save-every", help="steps; a checkpoint is also written at the end of an epoch", **number)
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate at a global batch of --lr-batch")
    parser.add_argument(
        "--lr-batch", default=lr_batch, help="scaled by the square root of global batch / this", **number
    )
    parser.add_argument("--warmup", type=float, default=0.05, help="part of the training, in [0, 1)")
    parser.add_argument("--weight-decay", type=float, default=decay)
    parser.add_argument("--clip", type=float, help="largest norm of the gradient")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast; weights stay in --dtype")
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp", help="fsdp shards weights over dp ranks")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=out, help="folder of checkpoints and TensorBoard scalars")
    parser.add_argument("--resume", metavar="CHECKPOINT", help=f"folder of one checkpoint: {out}/step_…")
    parser.add_argument(
        "--check", action="store_true", help="compare the first step with one process, without AMP, and end"
    )
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, counts: Sequence[str]) -> None:
    """Check what can be checked without the data; ``counts`` are the names of the script's own numbers."""
    for name in (*counts, "batch_size", "epochs", "lr_batch", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if not 0 <= args.warmup < 1:
        parser.error(f"--warmup is a part of the training, in [0, 1), not {args.warmup}")
    if args.resume and not (Path(args.resume) / ".metadata").exists():
        parser.error(f"--resume {args.resume}: no complete checkpoint there; give one of the step_… folders")


def run(trainer: type[Trainer], parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Train, or check; return the exit code."""
    try:
        training = trainer(args)
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
