"""ShardTensor to and from DTensor and PhysicsNeMo's ShardTensor: same memory, same values, same gradients."""

import importlib.util

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from scidata import from_dtensor, from_physicsnemo, to_dtensor, to_physicsnemo
from scidata.core.bounds import chunk_sizes
from scidata.errors import MissingDependencyError, ShardLayoutError
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import shard_of

HAS_PHYSICSNEMO = importlib.util.find_spec("physicsnemo") is not None


@pytest.mark.parametrize(("num_rows", "num_parts"), [(10, 4), (4, 3), (0, 2), (7, 7), (3, 5), (12, 1)])
def test_chunk_sizes_are_torchs(num_rows, num_parts):
    parts = [len(part) for part in torch.arange(num_rows).chunk(num_parts)] if num_rows else []
    assert chunk_sizes(num_rows, num_parts) == (*parts, *[0] * (num_parts - len(parts)))


def pair_of(mesh, placements, sizes, shape=(7, 5, 2)):
    """A shard of a leaf, and the leaf."""
    full = torch.arange(70.0, dtype=torch.float64).reshape(shape)
    spec = ShardSpec.even(mesh, placements, shape, sizes)
    leaf = shard_of(full, spec).to_local().clone().requires_grad_()
    return ShardTensor(leaf, spec), leaf, full


def check_dtensor(rank, num_ranks, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("h", "w")[: len(shape)])
    layouts = [([Shard(0), Shard(1)][: len(shape)]), [Replicate()] * len(shape), [Shard(1), Replicate()][: len(shape)]]
    for placements in layouts:
        sizes = {i: chunk_sizes((7, 5, 2)[p.dim], shape[i]) for i, p in enumerate(placements) if isinstance(p, Shard)}
        x, leaf, full = pair_of(mesh, placements, sizes)
        made = to_dtensor(x)
        assert made.shape == full.shape
        assert made.to_local().data_ptr() == leaf.data_ptr()
        assert torch.equal(made.full_tensor(), full)
        (made.to_local() ** 2).sum().backward()
        assert torch.equal(leaf.grad, 2 * leaf.detach())
        back = from_dtensor(distribute_tensor(full, mesh, placements))
        assert back.spec == x.spec
        assert torch.equal(back.full_tensor(), full)
        there = from_dtensor(to_dtensor(x))
        assert there.to_local().data_ptr() == leaf.data_ptr()
        leaf.grad = None
        (there.to_local() * 3).sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, 3))


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_dtensor(shape):
    run_ranks(check_dtensor, torch.Size(shape).numel(), shape)


def check_dtensor_refusals(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    x, _, _ = pair_of(mesh, [Shard(0)], {0: (6, 1)})
    with pytest.raises(ShardLayoutError, match=r"\(4, 3\) rows, and this tensor has \(6, 1\)"):
        to_dtensor(x)
    with pytest.raises(ShardLayoutError, match="Partial"):
        from_dtensor(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))
    with pytest.raises(ShardLayoutError, match="not Tensor"):
        from_dtensor(torch.ones(2))
    wrong = DTensor.from_local(torch.ones(3 + rank), mesh, [Shard(0)], run_check=False, shape=(7,), stride=(1,))
    with pytest.raises(ShardLayoutError, match="local part has shape"):  # torch.chunk gives 4 and 3
        from_dtensor(wrong)


def test_dtensor_refuses_what_it_cannot_say():
    run_ranks(check_dtensor_refusals, num_ranks=2)


def check_physicsnemo(rank, num_ranks, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("h", "w")[: len(shape)])
    uneven = {0: {1: (7,), 2: (6, 1), 3: (0, 5, 2)}[shape[0]], 1: (1, 4)}
    for placements in ([Shard(0), Shard(1)][: len(shape)], [Shard(0), Replicate()][: len(shape)]):
        sizes = {i: uneven[i] for i, p in enumerate(placements) if isinstance(p, Shard)}
        x, leaf, full = pair_of(mesh, placements, sizes)
        made = to_physicsnemo(x)
        assert tuple(made.shape) == tuple(full.shape)
        assert made.to_local().data_ptr() == leaf.data_ptr()
        assert torch.equal(made.full_tensor(), full)
        back = from_physicsnemo(made)
        assert back.spec == x.spec
        assert back.to_local().data_ptr() == leaf.data_ptr()
        (back * 3).to_local().sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, 3))
    with pytest.raises(ShardLayoutError, match="not Tensor"):
        from_physicsnemo(torch.ones(2))


@pytest.mark.skipif(not HAS_PHYSICSNEMO, reason="PhysicsNeMo is not installed")
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_physicsnemo(shape):
    run_ranks(check_physicsnemo, torch.Size(shape).numel(), shape, timeout=120)


@pytest.mark.skipif(HAS_PHYSICSNEMO, reason="PhysicsNeMo is installed")
def test_without_physicsnemo_the_extra_is_named():
    with pytest.raises(MissingDependencyError, match=r"pip install 'nvidia-physicsnemo"):
        from_physicsnemo(torch.ones(2))
