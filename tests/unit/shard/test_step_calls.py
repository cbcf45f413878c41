"""How many Python functions an operation calls beside its kernel, and a training step: counts, at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from scidata.shard import ShardTensor
from scidata.testing import fake_group
from tests.bench.scale_ranks import OPS, image
from tests.bench.step_costs import MODELS, python_calls, step_of


def learned(name: str) -> Callable[[Any], Any]:
    """Return an operation whose parameters are learned."""
    kernel, weight, row = torch.rand(4, 4, 3, 3), torch.rand(5, 8), torch.rand(8)
    kernel, weight, row = (each.requires_grad_() for each in (kernel, weight, row))
    return {
        "conv": lambda x: F.conv2d(x, kernel, padding=1),
        "linear": lambda x: F.linear(x, weight),
        "layer norm": lambda x: F.layer_norm(x, (8,), row, row),
        "gelu": lambda x: F.gelu(x, approximate="tanh"),
    }[name]


#: Python calls forward and backward between two ranks, a tenth more than found; some 18 of backward are torch's own.
CALLS = {
    "add": (10, 22),
    "relu": (9, 22),
    "gelu, learned": (10, 22),
    "linear": (16, 22),
    "linear, learned": (29, 43),
    "layer norm": (26, 25),
    "layer norm, learned": (47, 57),
    "conv 3x3": (86, 74),
    "conv, learned": (99, 95),
    "conv, transposed": (38, 25),
    "max pool": (122, 74),
    "group norm": (91, 71),
    "cat": (132, 66),
    "permute": (25, 22),
    "reshape, rows": (82, 66),
    "x[:, :, 1:-1]": (20, 22),
    "pad": (29, 22),
}


@pytest.mark.parametrize("name", CALLS)
def test_operations(name: str) -> None:
    forward, backward = CALLS[name]
    function = OPS[name] if name in OPS else learned(name.removesuffix(", learned"))
    with fake_group(2):
        x = image(init_device_mesh("cpu", (2,), mesh_dim_names=("domain",)), 2)
        there, back = [], []
        for _ in range(4):  # the first makes plans; a garbage collection's calls may be among any turn's
            given, results = x.detach().requires_grad_(), []
            there.append(python_calls(lambda: results.append(function(given))))  # noqa: B023
            local = results[0].local if isinstance(results[0], ShardTensor) else results[0]
            ones = torch.ones_like(local)
            back.append(python_calls(lambda: torch.autograd.backward(local, ones)))  # noqa: B023
    assert min(there) <= forward
    assert min(back) <= backward


#: Python calls of a step of training at two ranks; of plain torch 130 to 310. Libraries that others load add a few.
STEPS = {"UNet": 4900, "ViT block": 1100, "FNO": 5400, "Swin": 2250, "Transolver": 2560}


@pytest.mark.parametrize("name", MODELS)
def test_steps(name: str) -> None:
    with fake_group(2):
        step = step_of(MODELS[name], "ranks", init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "domain")))
        calls = [python_calls(step) for _ in range(4)]
    assert min(calls) <= STEPS[name]
