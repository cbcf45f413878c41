"""FSDP2's mixed precision on shards, with gradient accumulation, recomputing and activations on the CPU."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import scidata
from scidata.device_mesh import axis_rank, init_mesh
from scidata.testing import run_ranks
from tests.dist._training import Block, adam, part_of, sample

STEPS, MICRO = 3, 2
#: dtype of the parameters in forward and backward, how far from float64, and what saves memory.
WAYS = [
    (torch.float32, 1e-5, nullcontext, False, None),
    (torch.float32, 1e-5, save_on_cpu, True, None),
    (torch.float32, 1e-5, nullcontext, False, CPUOffloadPolicy(pin_memory=False)),
    (torch.bfloat16, 6e-2, nullcontext, True, None),
    (torch.bfloat16, 6e-2, save_on_cpu, False, None),
]


class Model(nn.Module):
    def __init__(self, seed, recompute):
        super().__init__()
        self.recompute = recompute
        self.embed, self.blocks, self.head = nn.Linear(3, 6), nn.ModuleList([Block(), Block()]), nn.Linear(6, 2)
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(0.5 * torch.randn(each.shape, generator=generator, dtype=each.dtype))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.head(x)
        return x.sum(0) + x.square().mean(0)


def train(model, samples, saving, last):
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i, x in enumerate(own := samples(step)):
            with saving():
                loss = model(x).square().sum() / len(own)
            with last(i == len(own) - 1):
                loss.backward()
        optimizer.step()
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for p in model.parameters()]


def trains(rank, num_ranks, dp, domain):
    mesh = init_mesh(dp=dp, domain=domain)
    row, each = axis_rank(mesh, "dp"), MICRO * dp
    expected = train(
        Model(0, False),
        lambda step: [sample(step * each + i) for i in range(each)],
        nullcontext,
        lambda _: nullcontext(),
    )
    for dtype, tolerance, saving, recompute, offload in WAYS:
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float64)}
        options |= {"offload_policy": offload} if offload else {}
        model = Model(rank, recompute)  # parameters of rank 0 count
        model = scidata.parallelize(model, mesh, strategy="fsdp", units=(Block,), fsdp_options=options)
        found = train(
            model,
            lambda step: [part_of(sample(step * each + m * dp + row), mesh) for m in range(MICRO)],
            saving,
            lambda is_last, model=model: nullcontext() if is_last else scidata.no_sync(model),
        )
        off = max(float((got - want).norm() / want.norm()) for got, want in zip(found, expected, strict=True))
        assert 1e-9 < off < tolerance, (dtype, saving, recompute, offload, off)


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "domain"), [(2, 2), (1, 3)])
def test_as_one_process_within_rounding(dp, domain):
    run_ranks(trains, dp * domain, dp, domain)
