"""An operation costs a rank what its neighbours cost: as many Python calls among 512 ranks as among two."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.shard import ShardSpec, ShardTensor
from scidata.shard.torch_internals import tree_leaves
from scidata.testing import fake_group
from tests.bench.scale_ranks import OPS, image
from tests.dist._conformance import cases

RANKS = (2, 64, 512)


def counted(function: Callable[[], Any]) -> int:
    """Return how many functions are called, of Python and of C."""
    count = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def steps(function: Callable[..., Any], operands: list[Any]) -> tuple[int, int]:
    """Return the calls of a forward and a backward pass in the steady state."""
    found: list[int] = []
    for _ in range(3):
        given = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
        results: list[Any] = []
        forward = counted(lambda given=given, results=results: results.extend(tree_leaves(function(*given))))
        local = [x.local if isinstance(x, ShardTensor) else x for x in results if isinstance(x, torch.Tensor)]
        local = [x for x in local if x.requires_grad]
        ones = [torch.ones_like(x) for x in local]
        backward = counted(lambda local=local, ones=ones: local and torch.autograd.backward(local, ones))
        found = [forward, backward]
    return found[0], found[1]


def of_images() -> dict[str, list[tuple[int, int]]]:
    """Count for operations on an image, four rows on each rank."""
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in OPS}
    for num_ranks in RANKS:
        with fake_group(num_ranks):
            mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
            for name, op in OPS.items():
                found[name].append(steps(op, [image(mesh, num_ranks)]))
    return found


def of_cases() -> dict[str, list[tuple[int, int]]]:
    """Count for the cases of the op table, with rows on the first two ranks: as much to do among any number."""
    found: dict[str, list[tuple[int, int]]] = {}
    for num_ranks in RANKS:
        with fake_group(num_ranks):
            mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
            for i, case in enumerate(cases()):
                if case.name == "put_where":  # a pretended rank counts wrongly how many elements are true
                    continue
                operands: list[Any] = []
                for dim, shape in zip(case.dims[0], case.shapes, strict=True):
                    torch.default_generator.manual_seed(0)
                    x = torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1
                    if dim is not None:
                        spec = ShardSpec.even(mesh, [Shard(dim)], shape, {0: (4, 3, *[0] * (num_ranks - 2))})
                        x = ShardTensor(x.narrow(dim, 0, 4).clone(), spec)
                    operands.append(x)
                found.setdefault(f"{case.name} {i}", []).append(steps(case.function, operands))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [of_images, of_cases])
def test_calls_do_not_grow_with_ranks(count: Callable[[], dict[str, list[tuple[int, int]]]]) -> None:
    for name, (two, some, many) in count().items():
        for way, few, more, most in zip(("forward", "backward"), two, some, many, strict=True):
            calls = f"{name}, {way}: {few}, {more} and {most} calls"
            assert most <= more + 4, calls
            # beyond two ranks, small sums are gathered; beyond four, neighbours send and receive by themselves; and
            # ranks without rows are asked about
            assert more <= 1.3 * few + 20, calls
