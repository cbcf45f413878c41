"""Pipeline parallelism for ``trainer.py``: each sample of a batch is a microbatch of torch's 1F1B schedule."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Pipeline:
    """This rank's stage of a model, on the mesh's axis ``pp``."""

    def __init__(self, stage: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        self.stage, self.device, self.group = stage, device, mesh.get_group("pp")
        self.number, self.count = mesh.get_local_rank("pp"), mesh["pp"].size()
        self.schedules: dict[int, Schedule1F1B] = {}
        self.weight = 1.0

    def backward(self, x: Tensor, target: Tensor, weight: float) -> Tensor:
        """Compute the gradient of a batch's mean squared error times ``weight``; return that, on all stages."""
        count, losses = len(x), []
        self.weight = weight / count
        schedule = self.schedules.get(count)  # torch's buffers are for so many; an epoch's last batch may be smaller
        if schedule is None:
            stage = PipelineStage(self.stage, self.number, self.count, self.device, group=self.group)
            schedule = self.schedules[count] = Schedule1F1B(stage, count, self._loss, scale_grads=False)
        if self.number == self.count - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step(*((x,) if self.number == 0 else ()))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss.detach()
        dist.all_reduce(total, group=self.group)
        return total

    def _loss(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean() * self.weight
