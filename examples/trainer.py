"""What the training scripts beside this share: the run, from data to checkpoints, and ``--check``.

Copy it with them, and with ``trainer_parts.py``, ``trainer_options.py`` and ``trainer_pipeline.py``.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from tqdm import tqdm
from trainer_options import check_resumed, options_of
from trainer_parts import (
    Checkpoint,
    Precision,
    Progress,
    Speed,
    adamw,
    average,
    clip_gradients,
    learning_rate,
    part_of,
    whole_of,
    within,
)
from trainer_pipeline import Pipeline

import scidata
from scidata import metrics

TOLERANCE = {"float64": 1e-12, "float32": 1e-4}


class Trainer:
    """Everything one run holds, the same on every rank but for the data.

    A script says what is its own: how the data are opened, the model, what it predicts, and the loss.
    """

    plan: ClassVar[dict[str, ParallelStyle]] = {}  # what tensor parallelism does to modules, by their names
    model_options: ClassVar[tuple[str, ...]] = ()  # that decide the model: a resumed training has the same
    history, num_times = 1, 2  # times that go into a step, and that a sample has where it is one

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        extra = {axis: size for axis, size in (("tp", args.tp), ("pp", args.pp)) if size > 1}
        self.mesh = scidata.init_mesh(dp=args.dp, domain=args.domain, extra=extra, device=args.device)  # scidata
        kind = self.mesh.device_type
        self.device = torch.device(kind, None if kind == "cpu" else torch.accelerator.current_device_index())
        self.dtype = getattr(torch, args.dtype)
        self.num_dp = self.mesh["dp"].size()
        self.is_main, self.said = dist.get_rank() == 0, -math.inf
        self.data = self.open(self.mesh)
        self.train_samples, self.val_samples = self.split()
        self.known = Path(args.resume) / "stats.json" if args.resume else args.stats  # the normalisation, if it is
        if self.known:
            self.normalise()
        self.progress = Progress()
        self.speed = Speed(self.device)
        self.writer: Any = None  # of TensorBoard, while rank 0 trains
        self.signalled: scidata.StopSignal | None = None  # that listens to SLURM's signals, if it does

    # -- a script's own ----------------------------------------------------------------------------------------------

    def open(self, mesh: DeviceMesh | None) -> Any:
        """Open the data: this rank's part of each sample, or whole samples without a mesh."""
        raise NotImplementedError

    def span(self, index: int) -> tuple[Any, Any]:
        """Return when a sample begins and ends: times, or the sample's number where it has none."""
        raise NotImplementedError

    def statistics(self, ds: Any) -> scidata.Statistics:
        """Compute the normalisation over these samples, on all ranks together."""
        raise NotImplementedError

    def make_model(self) -> nn.Module:
        """Return a plain model, its weights drawn at random."""
        raise NotImplementedError

    def measure(self, model: nn.Module) -> None:
        """Compute what the model keeps of the data that it is trained on, in buffers; checkpoints hold them."""

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return what the model makes of a batch and what it should be, normalised."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of one batch: a plain tensor, the same on every rank of a domain."""
        raise NotImplementedError

    def ends(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the first stage's input and the last one's target; the loss is the mean squared error."""
        raise NotImplementedError

    def by_field(self, x: Tensor) -> dict[str, Tensor]:
        """Return a prediction by field, with the dims that they have in the data at one time."""
        raise NotImplementedError

    def error_of(self, field: str) -> metrics.Metric:
        """Return what a field's errors are added up in."""
        raise NotImplementedError

    def first_state(self, time: int) -> Any:
        """Return what a forecast from one time of the data begins with, normalised."""
        raise NotImplementedError

    def advance(self, state: Any, time: int) -> Any:
        """Return the same one step later; ``time`` is that of the state, for its forcings."""
        raise NotImplementedError

    def moments(self) -> tuple[str, list[Any] | None]:
        """Return the name of the dim of times, and what all of the data are called there; None: they are numbered."""
        known = getattr(self.truth, "own_coords", lambda _: {})  # times of meshes are numbered
        dim = next(iter(known(0)), None)
        return ("time", None) if dim is None else (dim, [known(time)[dim] for time in range(len(self.truth))])

    def number_of(self, batch: Any) -> Any:
        """Return the samples that a metric is told of: one, or of a batch of grids a list."""
        return batch.index

    def at_one_time(self) -> Any:
        """Return what is predicted, as it is: one time a sample."""
        return self.data.view(steps=(0,), transform=self.data.transform)

    def finish(self) -> None:
        """Do what comes after the training, once it is over."""

    # -- data --------------------------------------------------------------------------------------------------------

    def split(self) -> tuple[list[int], list[int]]:
        """Return the samples for training and those held out, none of whose times is seen in training."""
        args, count = self.args, len(self.data)
        if not args.val_fraction and args.val_sel is None:
            return list(range(count)), []
        spans = [self.span(index) for index in range(count)]
        if args.val_sel is None:
            held = list(range(count - max(1, round(args.val_fraction * count)), count))
        else:
            held = [index for index, span in enumerate(spans) if within(span, args.val_sel)]
        if not held:
            raise scidata.errors.ConfigError(
                f"--val-sel {args.val_sel}: no sample is inside; they are from {spans[0][0]} to {spans[-1][1]}"
            )
        first, last = min(spans[i][0] for i in held), max(spans[i][1] for i in held)
        kept = [index for index, (begin, end) in enumerate(spans) if end < first or begin > last]
        if not kept:
            raise scidata.errors.ConfigError(
                f"nothing is left to train on: {len(held)} of {count} samples are held out"
            )
        return kept, held

    def normalised(self, ds: Any) -> Any:
        """Return the data normalised; fields that are the same everywhere, and integers, stay as they are."""
        kinds = {name: np.dtype(self.stats[name].dtype or "f4").kind for name in self.stats if name in ds.fields}
        names = [name for name, kind in kinds.items() if kind == "f" and (self.stats[name].std != 0).any()]
        return ds.normalise(self.stats, fields=names) if names else ds

    def load_from(self, ds: Any, order: Any, batch_size: int) -> scidata.DataLoader:
        """Make a loader of batches on the device."""
        pin = self.device.type != "cpu"
        return scidata.DataLoader(ds, batch_size, sampler=order, pin_memory=pin, device=self.device)

    # -- setting up --------------------------------------------------------------------------------------------------

    def say(self, text: str, *, after: float = 0.0) -> None:
        """Print a line on rank 0, if nothing was said for so many seconds."""
        if self.is_main and time.monotonic() - self.said >= after:
            self.said = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def normalise(self) -> None:
        """Take the normalisation from its file, or compute it over what is trained on."""
        if self.known:
            self.stats = scidata.Statistics.load(self.known)
        else:
            self.say("computing the normalisation (scidata stats --out FILE does it once, for --stats FILE)")
            self.stats = self.statistics(scidata.subset(self.data, self.train_samples))
        self.truth = self.at_one_time()
        self.data, self.states = self.normalised(self.data), self.normalised(self.truth)

    def physical(self, x: Any) -> dict[str, Tensor]:
        """Return a prediction, or the state of a forecast, by field, in the units of the data."""
        fields = self.by_field(x)
        return self.states.denormalise(fields) if self.states.normalising else fields

    def build(self, *, measure: bool) -> None:
        """Make the model, the same on all ranks."""
        torch.manual_seed(self.args.seed)  # the same first weights on every rank
        self.model = self.make_model().to(self.device, self.dtype)
        if measure:
            self.measure(self.model)
        self.single = copy.deepcopy(self.model) if self.args.check else None
        if self.args.pp > 1:
            self.model.keep_stage(self.mesh.get_local_rank("pp"), self.args.pp)
        if self.args.tp > 1:
            parallelize_module(self.model, self.mesh["tp"], self.plan)
        scidata.parallelize(self.model, self.mesh, strategy=self.args.strategy)  # scidata
        if self.args.compile:
            scidata.compile(self.model, backend=self.args.compile)  # scidata
        self.pipeline = Pipeline(self.model, self.mesh, self.device) if self.args.pp > 1 else None

    def prepare(self) -> None:
        """Make all that training needs, or resume from a checkpoint, which holds all of it."""
        args = self.args
        if not self.known:
            self.normalise()
        self.build(measure=not args.resume)
        is_whole = len(self.train_samples) == len(self.data)
        self.ds = self.data if is_whole else scidata.subset(self.data, self.train_samples)
        order = scidata.DistributedSampler(self.ds, self.mesh, seed=args.seed)  # scidata
        self.loader = self.load_from(self.ds, order, args.batch_size)
        # gradients of a larger batch are less noisy by the square root of its size, and Adam normalises by their size
        self.peak_lr = args.lr * math.sqrt(self.num_dp * args.batch_size * args.accumulate / args.lr_batch)
        self.optimizer = adamw(self.model.parameters(), self.peak_lr, args.weight_decay)
        self.precision = Precision(args.amp, self.device, self.pipeline and self.pipeline.group)
        run = {"script": Path(inspect.getfile(type(self))).stem, "options": options_of(args)}
        self.checkpoint = Checkpoint(
            model=self.model, optimizer=self.optimizer, progress=self.progress, precision=self.precision,
            loader=self.loader, stats=self.stats, run=run,
        )  # fmt: skip
        if args.resume:
            self.checkpoint.load(Path(args.resume))

    # -- training ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train for all epochs, or ``--max-steps``; a checkpoint at each epoch's end and where it stops."""
        args, progress = self.args, self.progress
        per_epoch = math.ceil(len(self.ds) / (self.num_dp * args.batch_size * args.accumulate))
        self.bar = tqdm(
            desc="train",
            unit="step",
            initial=progress.step,
            total=args.max_steps or progress.step + (args.epochs - progress.epoch) * per_epoch,
            disable=not (self.is_main and sys.stderr.isatty()),
        )
        self.writer = self.tensorboard()
        stopped = Path(args.out) / "stopped"  # tells the job's script to queue again
        if self.is_main:
            stopped.unlink(missing_ok=True)
        stop = self.reached()
        losses: list[Tensor] = []  # since the last report: samples differ more than a model changes in one step
        while not stop:
            self.loader.set_epoch(progress.epoch)  # a resumed epoch has the samples that are left
            self.speed.go()
            for loss in self.steps():
                losses.append(loss)
                self.bar.update()
                if self.bar.disable:
                    self.say(f"step {progress.step} of {self.bar.total}", after=8)
                if progress.step % args.log_every == 0:
                    self.report(average(torch.stack(losses).mean(), self.mesh))
                    losses.clear()
                stop = self.reached() or (self.signalled is not None and self.signalled.reached())
                self.between_steps(stop)
                if stop:
                    break
        self.bar.close()
        if self.is_main and not self.reached():
            self.say(f"a signal: stopped and saved after step {progress.step}")
            stopped.touch()
        if self.writer is not None:
            self.writer.close()

    def between_steps(self, stop: bool) -> None:
        """Validate, save and say how fast it goes, where one of them is due."""
        args, progress = self.args, self.progress
        ended = progress.samples == 0  # an epoch

        def due(every: int | None) -> bool:
            return progress.step % every == 0 if every else ended

        validates = bool(self.val_samples) and (self.reached() or due(args.validate_every))
        saves = stop or ended or due(args.save_every)
        if validates or saves:
            self.speed.pause()
        if stop or ended:
            self.report_speed()
        better = validates and self.validate()["loss"] < progress.best
        if better:
            progress.best = self.scores["loss"]
            self.checkpoint.save_best(Path(args.out))
        if saves:
            self.checkpoint.save(Path(args.out) / f"step_{progress.step:08d}")
        self.speed.go()

    def reached(self) -> bool:
        """Whether the training is over."""
        limit = self.args.max_steps
        return self.progress.epoch >= self.args.epochs or (limit is not None and self.progress.step >= limit)

    def steps(self) -> Iterator[Tensor]:
        """Take the optimizer steps of an epoch, every rank of the mesh together; yield the loss of each."""
        args, progress = self.args, self.progress
        losses: list[Tensor] = []
        share, taken = 0.0, 0  # of a global batch
        self.optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(self.loader, start=1):
            weight = len(batch.index) / args.batch_size / args.accumulate  # an epoch's last batch may be smaller
            share, taken = share + weight, taken + self.num_dp * len(batch.index)
            is_last = number % args.accumulate == 0 or progress.samples + taken >= len(self.ds)
            with nullcontext() if is_last else scidata.no_sync(self.model):
                losses.append(self.backward(batch, weight, self.precision))
            if is_last:
                self.step(share, taken)
                yield torch.stack(losses).sum() / share
                self.optimizer.zero_grad(set_to_none=True)
                losses, share, taken = [], 0.0, 0

    def backward(self, batch: Any, weight: float, precision: Precision) -> Tensor:
        """Compute the gradient of a batch's loss times ``weight``; return that."""
        if self.pipeline is not None:
            with precision.autocast():
                return self.pipeline.backward(*self.ends(batch), weight)
        with precision.autocast():
            loss = self.loss(self.model, batch) * weight
        precision.scaler.scale(loss).backward()
        return loss.detach()

    def step(self, share: float, taken: int) -> None:
        """Update the weights by the gradients of ``taken`` samples, which are ``share`` of a usual global batch."""
        args, progress = self.args, self.progress
        seen = progress.epoch * len(self.ds) + progress.samples + taken / 2  # halfway, so that no step has a rate of 0
        rate = learning_rate(self.peak_lr, min(1.0, seen / (args.epochs * len(self.ds))), args.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if share != 1:
            for p in self.model.parameters():
                if p.grad is not None:
                    part_of(p.grad).div_(share)
        self.norm = self.precision.step(self.optimizer, args.clip)
        self.speed.samples += min(taken, len(self.ds) - progress.samples)  # a sampler fills up with repeated ones
        progress.step += 1
        progress.samples += taken
        if progress.samples >= len(self.ds):
            progress.epoch, progress.samples = progress.epoch + 1, 0

    # -- validation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Score what is held out: the loss, and RMSE by field. The same for any number of ranks, each sample once.

        dp ranks may have different numbers of samples, or none: what they add up is exchanged once, at the end.
        """
        # weights that are spread over dp ranks are gathered by all of them in each step: then all take as many
        pad = self.args.strategy == "fsdp"
        held = scidata.subset(self.data, self.val_samples)
        order = scidata.DistributedSampler(held, self.mesh, shuffle=False, pad=pad)
        loss, errors = metrics.MSE(mesh=self.mesh), {name: self.error_of(name) for name in self.predicted}
        self.model.eval()
        for batch in self.load_from(held, order, 1):
            with self.precision.autocast():
                prediction, target = self.predict(self.model, batch)
            number = self.number_of(batch)
            loss.update(prediction, target, index=number)
            found, expected = self.physical(prediction), self.physical(target)
            for name, error in errors.items():
                error.update(found[name], expected[name], index=number)
        self.model.train()
        self.scores = {"loss": loss.compute().item()} | {n: error.compute().item() for n, error in errors.items()}
        shown = ", ".join(f"{name} {score:.6g}" for name, score in self.scores.items())
        self.say(f"validation after step {self.progress.step}: {shown}")
        self.log("validation", self.scores)
        return self.scores

    # -- logs --------------------------------------------------------------------------------------------------------

    def tensorboard(self) -> Any:
        """Return a writer on rank 0, None elsewhere."""
        if not self.is_main:
            return None
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only one rank writes

        return SummaryWriter(self.args.out)

    def log(self, kind: str, values: dict[str, float]) -> None:
        """Keep figures on rank 0: as scalars, and as a line of ``log.jsonl``."""
        if self.writer is None:
            return
        for name, value in values.items():
            self.writer.add_scalar(f"{kind}/{name}", value, self.progress.step)
        seen = self.progress.epoch * len(self.ds) + self.progress.samples
        with open(Path(self.args.out) / "log.jsonl", "a") as file:
            file.write(json.dumps({"kind": kind, "step": self.progress.step, "samples": seen} | values) + "\n")

    def report(self, loss: float) -> None:
        """Show mean loss and learning rate: in the progress bar or as a line."""
        step, rate = self.progress.step, self.optimizer.param_groups[0]["lr"]
        values = {"loss": loss, "lr": rate, "gradient norm": self.norm.item()}
        self.log("train", values | ({"loss scale": self.precision.scale} if self.args.amp == "fp16" else {}))
        self.bar.set_postfix(loss=loss, lr=rate)
        if self.bar.disable:
            self.say(f"step {step} loss {loss:.6g} lr {rate:.3g}")

    def report_speed(self) -> None:
        """Show how many samples a second were trained on since the epoch began, or was resumed."""
        samples, seconds = self.speed.take()
        rate = samples / max(seconds, 1e-9)
        each = rate / dist.get_world_size()
        self.log("speed", {"seconds": seconds, "samples/s": rate, "samples/s per rank": each})
        self.say(f"{samples} samples in {seconds:.3g} s: {rate:.4g} samples/s, {each:.4g} a rank")

    # -- check -------------------------------------------------------------------------------------------------------

    def check(self) -> bool:
        """Compare loss and gradients of the first global batch with one process that reads the whole samples."""
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        self.say("checking: a step on all ranks")
        single = self.single
        assert single is not None
        batch = next(iter(self.loader))
        for _ in range(3 if self.args.compile else 1):  # the first is eager, the third a graph that is used again
            self.model.zero_grad()
            loss = self.backward(batch, 1.0, Precision("none", self.device))
        parts: list[Any] = [None] * self.num_dp
        dist.all_gather_object(parts, batch.index, group=self.mesh.get_group("dp"))
        indices = [index for part in parts for index in part]

        self.say("checking: the same step on one process, which reads whole samples")
        alone = scidata.subset(self.normalised(self.open(None)), self.train_samples)
        whole = next(iter(self.load_from(alone, indices, len(indices))))
        expected = self.loss(single, whole)
        expected.backward()

        known = dict(single.named_parameters())
        pairs = [(whole_of(p.grad), known[name].grad) for name, p in self.model.named_parameters()]
        scale = torch.stack([q.grad.abs().max() for q in known.values()]).max()
        gradient_error = torch.stack([(p - q).abs().max() for p, q in pairs]).max() / scale
        loss_error = (average(loss, self.mesh) - expected.detach()).abs() / expected.detach().abs()
        norm = clip_gradients(single.parameters(), None)
        norm_error = (clip_gradients(self.model.parameters(), None, self.precision.stages) - norm).abs() / norm
        # a maximum may lose NaN
        worst = torch.stack([loss_error, norm_error, gradient_error]).double().nan_to_num(nan=torch.inf)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # not one rank may be off
        losses, norms, gradients = worst.tolist()
        passed = max(losses, norms, gradients) <= TOLERANCE[self.args.dtype]
        if self.is_main:
            axes = f"{self.num_dp} dp x {self.mesh['domain'].size()} domain"
            axes += f" x {self.args.tp} tp" if self.args.tp > 1 else ""
            axes += f" x {self.args.pp} pp" if self.args.pp > 1 else ""
            print(
                f"check {axes}, {self.args.dtype}, samples {indices}, loss {expected.item():.12g}: max relative "
                f"difference to one process: norm {norms:.2e}, loss {losses:.2e}, gradients {gradients:.2e}: "
                f"{'ok' if passed else 'FAILED'}"
            )
        return passed


def run(trainer: type[Trainer], parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Train, or check; return the exit code."""
    if args.resume:
        check_resumed(parser, args, trainer.model_options)
    try:
        training = trainer(args)
    except (scidata.errors.SciDataError, ValueError, OSError) as e:
        parser.error(str(e))  # found from metadata, before any data was read: the same on every rank
    training.prepare()
    passed = True
    if args.check:
        passed = training.check()
    else:
        with scidata.StopSignal() as training.signalled:  # SLURM's, before the time is up
            training.train()
        if training.reached():
            training.finish()
    dist.destroy_process_group()
    return 0 if passed else 1
