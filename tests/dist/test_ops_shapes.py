"""Views, reshapes, indexing and joining on shards against one process."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import HaloDim, ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

LAYOUTS = {1: [(7,)], 2: [(4, 3), (7, 0), (1, 6)], 3: [(3, 2, 2), (0, 5, 2), (7, 0, 0)]}

#: Functions of a (2, 7, 6) tensor sharded on dim 1.
RIGHT = [
    lambda x: x.permute(2, 0, 1),
    lambda x: torch.permute(x, (1, 2, 0)),
    lambda x: x.permute([0, 2, 1]),
    lambda x: x.permute(dims=(2, 1, 0)),
    lambda x: x.transpose(1, -1),
    lambda x: torch.transpose(x, dim0=0, dim1=1),
    lambda x: x.swapaxes(axis0=0, axis1=1),
    lambda x: x.movedim(1, 0),
    lambda x: x.movedim(destination=0, source=1),
    lambda x: torch.movedim(x, (0, 1), (2, 0)),
    lambda x: x.mT,
    lambda x: x[0].T,
    lambda x: x[0].t(),
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: x.unsqueeze(-1).squeeze(),
    lambda x: x.unsqueeze(0).unsqueeze(2).squeeze((0, 2)),
    lambda x: x.squeeze(1),
    lambda x: x[:, None, :, None, ...],
    lambda x: x[0],
    lambda x: x[-1, :, 2:5],
    lambda x: x[..., ::2],
    lambda x: x[:, :, -1],
    lambda x: x[:, 0:7, 1],
    lambda x: x[:, -7:, 1],
    lambda x: x[0, ..., 3],
    lambda x: x[:, :, torch.tensor([0, 5, 5, 1])],
    lambda x: x[:, :, [3, 0]],
    lambda x: x[torch.tensor([[1, 0], [0, 0]])],
    lambda x: x.select(0, 1),
    lambda x: torch.select(x, 2, -2),
    lambda x: torch.narrow(x, 2, 1, 3),
    lambda x: x.index_select(2, torch.tensor([4, 0, 0])),
    lambda x: list(x.unbind(0)),
    list,
    lambda x: x.unbind(-1)[3],
    lambda x: x.chunk(4, -1),
    lambda x: x.split(4, dim=2),
    lambda x: torch.split(x, [1, 2, 3], 2),
    lambda x: x.tensor_split(3, dim=2),
    lambda x: x.split_with_sizes([2, 4], 2),
    lambda x: x.reshape(2, 7, 2, 3),
    lambda x: x.reshape(2, -1, 3, 2),
    lambda x: x.view(2, 7, 6, 1),
    lambda x: x.view(2, 1, 7, 1, 6),
    lambda x: x.view((2, 42)),
    lambda x: [x.view(torch.int16), x.view(torch.complex128)],
    lambda x: x.view(np.int64(2), torch.tensor(42)),
    lambda x: x.flatten(1),
    lambda x: x.flatten(1).unflatten(1, (7, 6)),
    lambda x: x.flatten(-2, -1).reshape(2, 7, -1),
    lambda x: x.flatten(1).view(2, 14, 3),
    lambda x: x.unflatten(-1, (2, -1)),
    lambda x: x.transpose(0, 1).reshape(7, 12),
    lambda x: x.transpose(0, 1).reshape(84),
    lambda x: x.transpose(0, 1).flatten().reshape(14, 6),
    lambda x: x.permute(1, 0, 2).contiguous().view(-1, 3),
    lambda x: x.reshape_as(torch.zeros(2, 42)),
    lambda x: x.unsqueeze(0).expand(5, -1, 7, 6),
    lambda x: x[:, :, :1].expand(2, 7, 4),
    lambda x: x[:, :, :1].expand_as(x),
    lambda x: x.repeat(3, 1, 2),
    lambda x: x.repeat(2, 2, 1, 1),
    lambda x: x.roll(2, 2),
    lambda x: torch.roll(x, (1, -1), (0, -1)),
    lambda x: x.flip(0, 2),
    lambda x: torch.flip(x, [2]),
    lambda x: F.pad(x, (1, 2)),
    lambda x: F.pad(x, (1, 2, 0, 0, 3, 0), value=2.0),
    lambda x: torch.cat([x, x * 2], 2),
    lambda x: torch.cat([x, torch.ones(3, 7, 6, dtype=torch.float64)]),
    lambda x: torch.cat((torch.ones(2, 7, 1, dtype=torch.float64), x), dim=-1),
    lambda x: torch.stack([x, x.sin()]),
    lambda x: torch.stack([x, torch.ones(2, 7, 6, dtype=torch.float64)], -1),
    lambda x: torch.stack([x, x], dim=1),
    lambda x: torch.zeros_like(x) + torch.ones_like(x) * torch.full_like(x, 3.0),
    lambda x: x.new_zeros((2, 7, 6)) + x.new_full((6,), 2.0),
    lambda x: x.clone().detach(),
    lambda x: x.contiguous().double(),
    lambda x: x.float().to(torch.float64),
    lambda x: x.to(torch.ones((), dtype=torch.float32)),
    lambda x: x.type_as(torch.zeros((), dtype=torch.float64)),
    lambda x: x.shape,
    lambda x: [x.size(), x.size(1), x.dim(), x.ndim, x.numel(), len(x), x.dtype, x.is_floating_point(), x.nbytes],
    lambda x: [x.stride(), x.stride(1), x.is_contiguous(), x.mT.stride(), x.mT.is_contiguous(), x[:, 1:3].stride()],
]
#: Functions of a (2, 7, 6) tensor sharded on dim 1 that have to raise.
REFUSED = [
    lambda x: x.mT.view(torch.float16),
    lambda x: x.as_strided((2, 2), (1, 1), 1),
    lambda x: x.data_ptr(),
    lambda x: x.__dlpack__(),
    lambda x: x.__cuda_array_interface__,
    lambda x: x.untyped_storage().data_ptr(),
    lambda x: x.item(),
    bool,
    lambda x: x.share_memory_(),
    lambda x: x.resize_(3),
    lambda x: x.set_(torch.zeros(3)),
    lambda x: torch.linalg.tensorsolve(x[0], x[1]),
    lambda x: torch.nonzero_static(x[0], size=2),
]


def mesh_of(num_ranks):
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))


def check_right(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    torch.manual_seed(9)
    x = torch.randn(2, 7, 6, dtype=torch.float64).requires_grad_()
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(1)], x.shape, {0: sizes})
        for i, function in enumerate(RIGHT):
            try:
                assert_like_one_process(function, [x], [spec])
            except Exception as error:
                raise AssertionError(f"function {i} of RIGHT at {sizes}") from error


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_values_and_gradients(num_ranks):
    run_ranks(check_right, num_ranks)


def check_refused(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    for sizes in LAYOUTS[num_ranks]:
        x = shard_of(torch.randn(2, 7, 6), ShardSpec.even(mesh, [Shard(1)], (2, 7, 6), {0: sizes}))
        for function in REFUSED:
            with pytest.raises(UnsupportedShardOp, match=r"Layout: Shard\(\d\) on 'domain' sizes.*Remedy: "):
                function(x)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_has_no_rule_raises_on_every_rank(num_ranks):
    run_ranks(check_refused, num_ranks)


#: What torch reads as a tuple of indices, and what it reads as one index tensor; some are too many.
LISTS = [
    [[0, 1], [1, 2]],
    [[[0, 1], [1, 0]]],
    [torch.tensor([0, 1]), torch.tensor([1, 2])],
    [torch.tensor(0), torch.tensor(1)],
    [torch.tensor([0, 1]), slice(1, 4)],
    [slice(0, 2), slice(0, 2)],
    [slice(0, 2), 1],
    [None, 0],
    [..., 0],
    [(0, 1), (1, 2)],
    [np.array([0, 1]), np.array([1, 2])],
    [np.array([0, 1]), 1],
    [0, [1, 2]],
    [range(2), range(2)],
    [[True, False], [True, False, True, True, False, False, True]],
    [[]],
    [0, 1, 1],
    [True, False],
    [[0, 1]] * 4,
    [[0]] * 31,
    [[0]] * 32,
    [[0.5]],
    range(2),
    np.array([[0, 1], [1, 1]]),
    np.array(1),
    np.array([1.0, 0.0]),
    torch.tensor([1.0, 0.0]),
]


def check_index_lists(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    whole = torch.arange(84.0).reshape(2, 7, 6)
    warnings.simplefilter("ignore")  # torch's own, that some day it may be one index tensor
    for dim, sizes in [(0, {1: (2,), 2: (0, 2), 3: (1, 0, 1)}[num_ranks]), (1, LAYOUTS[num_ranks][-1])]:
        x = shard_of(whole, ShardSpec.even(mesh, [Shard(dim)], whole.shape, {0: sizes}))
        for index in LISTS:
            taken, other = (_outcome(lambda x, index=index: x[index], given) for given in (whole, x))
            assert _same(taken, other), (dim, index, taken, other)
            put, other = (_outcome(_written, given.clone(), index) for given in (whole, x))
            assert _same(put, other), (dim, index, put, other)


def _written(x, index):
    x[index] = -1.0
    return x


def _outcome(function, *args):
    try:
        result = function(*args)
    except (IndexError, RuntimeError) as error:
        return type(error)
    return result.full_tensor() if isinstance(result, ShardTensor) else result


def _same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sequences_as_indices(num_ranks):
    run_ranks(check_index_lists, num_ranks)


#: Functions of tensors without elements, which are plain once they are flat.
OF_NOTHING = [
    lambda x: x.roll(3),
    lambda x: x.roll(2, 1),
    lambda x: x.repeat_interleave(2),
    lambda x: x.repeat_interleave(torch.arange(0)),
    lambda x: [x.reshape(-1), x.unique(), x.flip(0, 1), x.sort(1), x.cumsum(0), x[:, :0].flatten().nonzero()],
]


def check_nothing(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    for shape in [(0, 7), (7, 0), (0, 0)]:
        for dim in (0, 1):
            sizes = [0] * (num_ranks - 1) + [shape[dim]]
            spec = ShardSpec.even(mesh, [Shard(dim)], shape, {0: sizes})
            for function in OF_NOTHING:
                assert_like_one_process(function, [torch.randn(shape, dtype=torch.float64)], [spec])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_tensors_without_elements(num_ranks):
    run_ranks(check_nothing, num_ranks)


def check_windows(rank, num_ranks):
    """Windows of an image and back: no rank is left without rows where there are enough for all."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    x = torch.randn(2, 16, 16, 4, dtype=torch.float64).requires_grad_()
    spec = ShardSpec.even(mesh, [Shard(1)], x.shape)
    windows = lambda x: x.view(2, 4, 4, 4, 4, 4).transpose(2, 3).reshape(-1, 4, 4, 4)  # noqa: E731
    back = lambda x: windows(x).view(2, 4, 4, 4, 4, 4).transpose(2, 3).reshape(2, 16, 16, 4)  # noqa: E731
    for function in (windows, back):
        found = assert_like_one_process(function, [x], [spec])
        shares = [shape.numel() * num_ranks / found.numel() for shape in found.sharding_shapes()[0]]
        assert max(shares) <= 1.5, found.spec
        assert min(shares) >= 0.5, found.spec


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_windows_stay_balanced(num_ranks):
    run_ranks(check_windows, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.manual_seed(10)
    x = torch.randn(2, 3, 6, 4, dtype=torch.float64).requires_grad_()
    for rows, columns in [((4, 2), (2, 2)), ((0, 6), (4, 0))]:
        spec = ShardSpec.even(mesh, [Shard(2), Shard(3)], x.shape, {"h": rows, "w": columns})
        for function in (
            lambda x: x.permute(3, 0, 2, 1),
            lambda x: x.transpose(0, 3),
            lambda x: x.unflatten(2, (3, 2)).unflatten(4, (2, 2)).permute(0, 2, 4, 3, 5, 1),
            lambda x: x.unflatten(2, (3, 2)).permute(0, 1, 2, 4, 3),
            lambda x: torch.cat([x, x]) + torch.stack([x, x])[0, :1],
            lambda x: x[:, 1, None],
        ):
            assert_like_one_process(function, [x], [spec])
        image = torch.arange(24).reshape(6, 4) % 3 == 0
        for function in (
            lambda x: x.flatten(2).transpose(1, 2),
            lambda x: x.reshape(2, 3, 4, 6).reshape(-1),
            lambda x: x.permute(0, 2, 3, 1).reshape(48, 3).unflatten(0, (2, 6, 4)),
            lambda x, image=image: x[:, :, image],
            lambda x: x[:, :, torch.tensor([5, 0, 5]), torch.tensor([1, 3, 0])],
            lambda x: x[:, :, :1].reshape(2, 3, 4),
        ):
            assert_like_one_process(function, [x], [spec])
        base = shard_of(x, spec)
        flat = base.flatten(2)
        assert flat.placements == (Shard(2), Replicate())
        assert flat.spec.sizes == (tuple(4 * n for n in rows), None)
        flat.neg_()
        assert torch.equal(base.full_tensor(), -x)
        only = ShardSpec.even(mesh, [Shard(2), Replicate()], x.shape, {"h": rows})
        assert_like_one_process(lambda x: x.flatten(2).transpose(1, 2), [x], [only])
        assert_like_one_process(lambda x, y: torch.cat([x, y], 3)[..., 1], [x, x], [spec, only])


def test_two_axes():
    run_ranks(check_two_axes, 4)


def check_views(rank, num_ranks):
    """Writing through a view reaches the original."""
    mesh = mesh_of(num_ranks)
    full = torch.arange(24.0).reshape(2, 6, 2)
    spec = ShardSpec.even(mesh, [Shard(1)], full.shape, {0: (4, 2)})
    x, y = shard_of(full, spec), full.clone()
    for a in (x, y):
        a[1].mul_(2)
        a.transpose(0, 1)[:, 0] += 5
        a.view(2, 12).neg_()
        a.unbind(0)[0].fill_(3)
        a[:, :, 1:] = torch.arange(6.0)[:, None]
        a[0] = a[1]
    assert torch.equal(x.full_tensor(), y)
    start = max(0, spec.offsets[1] - 1)
    padded = full[:, start : start + spec.local_shape[1] + 1].clone()
    held = ShardTensor.from_padded(padded, spec, {1: HaloDim(lo=1, hi=1)})
    held.view(2, 12).clone().neg_()
    assert torch.equal(held.full_tensor(), full)
    held.view(2, 12).neg_()
    assert torch.equal(held.full_tensor(), -full)
    held.flatten(1)[0].zero_()
    assert torch.equal(held.full_tensor(), torch.stack([torch.zeros(6, 2), -full[1]]))


def test_writing_through_views():
    run_ranks(check_views, 2)
