"""What ``trainer.py`` is made of: schedule, optimizer, clipping, fp16 scaling, checkpoints, speed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import scidata

# -- one step ------------------------------------------------------------------------------------------------------


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


def part_of(value: Tensor) -> Tensor:
    """Return what this rank holds of it, on the same memory."""
    return value.to_local() if isinstance(value, DTensor) else value


def clip_gradients(
    parameters: Iterable[Tensor], largest: float | None, stages: dist.ProcessGroup | None = None
) -> Tensor:
    """Do as ``clip_grad_norm_``, which does not take DTensors and plain tensors together, nor stages of a pipeline.

    Returns the norm of the whole model's gradient, the same on every rank. Without ``largest`` nothing is clipped.
    """
    parameters = [p for p in parameters if p.grad is not None]
    kinds = [[p for p in parameters if isinstance(p, DTensor) == is_split] for is_split in (True, False)]
    norms = [whole_of(nn.utils.get_total_norm([p.grad for p in kind])) for kind in kinds if kind]
    norm = torch.stack(norms).norm()
    if stages is not None:
        dist.all_reduce(norm.square_(), group=stages)
        norm.sqrt_()
    for kind in kinds:
        if largest is not None:
            nn.utils.clip_grads_with_norm_(kind, largest, norm)
    return norm


def adamw(parameters: Iterable[Tensor], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Make the optimizer: one kernel for all parameters where they are all plain, or all DTensors."""
    parameters = list(parameters)
    fused = len({isinstance(p, DTensor) for p in parameters}) == 1  # a kernel takes no mixture, as under --tp
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=fused)


class Precision:
    """Automatic mixed precision: weights stay as they are, and what autocast lists is computed in 16 bits.

    fp16 has few exponents, so the loss is scaled up, as far as gradients do not overflow. Where one rank's gradients
    do, all ranks leave the step out.
    """

    def __init__(self, amp: str, device: torch.device, stages: dist.ProcessGroup | None = None) -> None:
        self.stages = stages
        self.device, self.dtype = device, {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
        self.scaler = ShardedGradScaler(device.type, enabled=amp == "fp16", process_group=None)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)

    def step(self, optimizer: Optimizer, clip: float | None) -> Tensor:
        """Unscale, clip and step. Return the gradient's norm."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # the scaler looks at gradients alone, and takes no mixture of plain tensors and DTensors: give it the parts
        parts = [SimpleNamespace(grad=part_of(p.grad)) for p in parameters if p.grad is not None]
        shown: Any = SimpleNamespace(param_groups=[{"params": parts}], step=optimizer.step)
        self.scaler.unscale_(shown)  # finds out over all ranks whether anything overflowed
        norm = clip_gradients(parameters, clip, self.stages)
        self.scaler.step(shown)
        self.scaler.update()
        return norm

    @property
    def scale(self) -> float:
        """By which losses are multiplied."""
        return self.scaler.get_scale()

    def to_tensor(self) -> Tensor:
        """As saved: scale, and steps since it was changed."""
        state = self.scaler.state_dict() or {"scale": 0.0, "_growth_tracker": 0}
        return torch.tensor([state["scale"], state["_growth_tracker"]], dtype=torch.float64)

    def restore(self, saved: Tensor) -> None:
        """Undo :meth:`to_tensor`; a training that had no scale begins with the usual one."""
        scale, steps = saved.tolist()
        if self.scaler.is_enabled() and scale > 0:
            self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": scale, "_growth_tracker": int(steps)})


# -- samples -------------------------------------------------------------------------------------------------------


def within(span: Sequence[Any], chosen: str) -> bool:
    """Whether a sample lies in ``FIRST:LAST``, both included: times as coarse as they are given, or numbers."""
    words = chosen.split(":")
    middle = len(words) // 2  # times of day have colons, too
    bounds = ":".join(words[:middle]), ":".join(words[middle:])
    for bound, is_lower in zip(bounds, (True, False), strict=True):
        if not bound:
            continue
        try:
            given = np.datetime64(bound) if np.asarray(span[0]).dtype.kind == "M" else np.asarray(float(bound))
        except ValueError:
            raise scidata.errors.ConfigError(f"{chosen}: {bound!r} is no {type(span[0]).__name__}") from None
        begin, end = (np.asarray(x).astype(given.dtype) for x in span)
        if (begin < given) if is_lower else (end > given):
            return False
    return True


# -- speed ---------------------------------------------------------------------------------------------------------


class Speed:
    """Samples a second of training, without the time that validation and checkpoints take."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.samples, self.seconds = device, 0, 0.0
        self.began: float | None = None

    def go(self) -> None:
        """Training goes on, if it does not already."""
        self.began = time.monotonic() if self.began is None else self.began

    def pause(self) -> None:
        """Something else begins; wait for what runs on the device."""
        if self.began is not None:
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self.seconds, self.began = self.seconds + time.monotonic() - self.began, None

    def take(self) -> tuple[int, float]:
        """Return the samples of all ranks and the seconds since it was asked last."""
        found = self.samples, self.seconds
        self.samples, self.seconds = 0, 0.0
        return found


# -- checkpoints ---------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """How far training has come, in numbers that mean the same on any number of ranks."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    samples: int = 0  # taken of this epoch, by all dp ranks together
    best: float = math.inf  # least loss of a validation

    def to_tensor(self) -> Tensor:
        """As saved."""
        return torch.tensor([self.step, self.epoch, self.samples, self.best], dtype=torch.float64)

    def restore(self, saved: Tensor) -> None:
        """Undo :meth:`to_tensor`."""
        *counts, self.best = saved.tolist()
        self.step, self.epoch, self.samples = map(int, counts)


@dataclass(kw_only=True)
class Checkpoint:
    """What is saved, by torch's distributed checkpoints: any number of ranks reads what any other has written.

    Beside torch's files lie ``run.json``, the script and its options, and ``stats.json``, the normalisation.
    """

    model: nn.Module
    optimizer: Optimizer
    progress: Progress
    precision: Precision
    loader: scidata.DataLoader
    stats: scidata.Statistics
    run: dict[str, Any]

    def _state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optimizer": moments, "loader": self.loader}
        return state | {"progress": self.progress.to_tensor(), "scale": self.precision.to_tensor()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint, all ranks together: what is the same on all of them is written once."""
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.json").write_text(json.dumps(self.run, indent=1))
            self.stats.save(folder / "stats.json", overwrite=True)
        dcp.save(self._state(), checkpoint_id=str(folder))  # .metadata comes last

    def save_best(self, folder: Path) -> None:
        """Write ``best``, in the place of the one before."""
        new, best = folder / "best.new", folder / "best"
        self.save(new)
        if dist.get_rank() == 0:
            remove(best)
            new.rename(best)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Read a checkpoint."""
        state = self._state()
        kept = [{**group} for group in self.optimizer.param_groups]
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, kept, strict=True):
            # which kernel runs depends on these ranks, not on those that wrote; torch keeps one stage's list of names
            group.update({key: own[key] for key in own if key in ("fused", "foreach") or key not in group})
        self.progress.restore(state["progress"])
        self.precision.restore(state["scale"])


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is there: its ``.metadata`` first, so that half of one is never taken for a whole."""
    if folder.exists():
        (folder / ".metadata").unlink(missing_ok=True)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def is_complete(folder: str | Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end."""
    return (Path(folder) / ".metadata").exists()


def described(folder: str | Path) -> dict[str, Any]:
    """Return the script and the options that a checkpoint was trained with."""
    found: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text())
    return found
