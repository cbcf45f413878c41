"""Random chains of operations on random layouts against one process: right, or UnsupportedShardOp on every rank."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process
from tests.dist._chains import chain

CHAINS = 25


def layout_of(mesh, draw):
    """Draw a shape and how it is split, with empty parts."""
    shape = [draw.randrange(1, 8) for _ in range(draw.randrange(mesh.ndim, 5))]
    dims = draw.sample(range(len(shape)), mesh.ndim)
    sizes = {}
    for axis, dim in enumerate(dims):
        cuts = sorted(draw.randrange(shape[dim] + 1) for _ in range(mesh.size(axis) - 1))
        sizes[axis] = [b - a for a, b in zip([0, *cuts], [*cuts, shape[dim]], strict=True)]
    if mesh.ndim > 1 and draw.random() < 0.3:
        del sizes[0]
    placements = [Shard(dim) if axis in sizes else Replicate() for axis, dim in enumerate(dims)]
    return ShardSpec.even(mesh, placements, shape, sizes)


def check_chains(rank, num_ranks, grid, first):
    shape, names = ((2, 2), ("h", "w")) if grid else ((num_ranks,), ("domain",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    compared = 0
    for seed in range(first, first + CHAINS):
        spec = layout_of(mesh, random.Random(seed))
        torch.default_generator.manual_seed(seed)
        x = torch.randn(spec.global_shape, dtype=torch.float64).requires_grad_()
        try:
            assert_like_one_process(chain(seed), [x], [spec], rtol=1e-9, atol=1e-9)
        except UnsupportedShardOp:
            continue
        except BaseException as error:
            raise AssertionError(f"chain {seed} at {spec}") from error
        compared += 1
    return compared


@pytest.mark.parametrize(("num_ranks", "grid"), [(3, False), (4, True)])
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(first=st.integers(0, 10**6))
def test_chains(num_ranks, grid, first):
    compared = run_ranks(check_chains, num_ranks, grid, first)
    assert len(set(compared)) == 1
    assert compared[0] > CHAINS * 3 // 4
