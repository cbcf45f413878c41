"""Rare arguments: the value that one process gets, or torch's error."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import scidata
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of
from tests.dist._layers import mesh_of


def filled(x):
    y = x * 1
    return y.fill_diagonal_(5.0, wrap=True)


def without_rows(x):
    """Batch norm of no samples: nothing comes out, and running statistics stay."""
    mean, var = torch.full((x.shape[1],), 3.0).double(), torch.full((x.shape[1],), 2.0).double()
    return [F.batch_norm(x[:0], mean, var, mean * 2, var, training=True), mean, var]


def statistics(x):
    z = torch.complex(x, x.square())
    return [
        *[getattr(z, name)(dim) for name in ("var", "std") for dim in (0, 1)],
        *[z.var(), z.std((0, 1), keepdim=True), z.var(1, correction=0), torch.std(z, 0, unbiased=False)],
        *[part for found in (torch.var_mean(z, 0), torch.std_mean(z)) for part in (found[0], found[1].abs())],
    ]


CASES = [
    (filled, (9, 2), 0),
    (filled, (9, 2), 1),
    (filled, (2, 9), 1),
    (filled, (4, 4, 4), 1),
    (without_rows, (7, 3, 2), 0),
    (without_rows, (7, 3, 2), 2),
    (statistics, (7, 5), 0),
    (lambda x: F.grid_sample(x[:, :0], x.detach()[:, 0, :, :2, None].expand(-1, -1, -1, 2)), (2, 3, 7, 5), 2),
]


def check_cases(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    for number, (function, shape, dim) in enumerate(CASES):
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        rest = shape[dim] - 1
        for sizes in {1: [(rest + 1,)], 2: [(rest, 1)], 3: [(rest, 0, 1), (0, rest + 1, 0)]}[num_ranks]:
            try:
                assert_like_one_process(function, [x], [ShardSpec.even(mesh, [Shard(dim)], shape, {0: sizes})])
            except Exception as error:
                raise AssertionError(f"case {number} in {sizes}") from error
    x = shard_of(torch.arange(6.0) % 4, ShardSpec.even(mesh, [Shard(0)], (6,))).requires_grad_()
    for function in (torch.unique, torch.unique_consecutive, lambda x: x.unique(dim=0, return_counts=True)[0]):
        found = function(x * 1)
        assert found.requires_grad
        local = found.local if isinstance(found, ShardTensor) else found
        with pytest.raises(NotImplementedError, match="derivative"):
            local.sum().backward()
        assert not function(x.detach()).requires_grad
    numbers = shard_of(torch.arange(24).view(2, 3, 4), ShardSpec.even(mesh, [Shard(2)], (2, 3, 4)))
    for norm in (lambda x: F.layer_norm(x, (4,)), lambda x: F.group_norm(x, 3), lambda x: F.instance_norm(x)):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            norm(numbers)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_like_one_process(num_ranks):
    run_ranks(check_cases, num_ranks)


#: Functions of an image whose backward needs it as it was; each rank may have a copy of it, with other ranks' rows.
NEEDY = [
    lambda y: F.conv2d(y, torch.ones(2, 3, 3, 3, dtype=y.dtype), padding=1),
    lambda y: F.conv_transpose2d(y, torch.ones(3, 2, 2, 2, dtype=y.dtype)),
    lambda y: F.layer_norm(y, (6,)),
    lambda y: F.batch_norm(y, None, None, training=True),
    lambda y: F.group_norm(y, 3),
    lambda y: F.max_pool2d(y, 2),
    lambda y: F.avg_pool2d(y, 2),
    lambda y: F.scaled_dot_product_attention(y, y, y),
    lambda y: y.amax((1, 2)),
    lambda y: y.cumprod(2),
]


def check_written(rank, num_ranks):
    whole = torch.rand(2, 3, 6, 6, dtype=torch.float64)
    spec = ShardSpec.even(mesh_of(num_ranks), [Shard(2)], whole.shape)
    for needy in NEEDY:
        for x in (whole.clone().requires_grad_(), shard_of(whole, spec).requires_grad_()):
            for written in (True, False):
                y = x * 1
                loss = (needy(y) * 2).sum()
                if written:
                    y.add_(1)
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        loss.backward()
                else:
                    y = y.square()
                    loss.backward()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_writes_to_what_backward_needs(num_ranks):
    run_ranks(check_written, num_ranks)


class Expanded(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("ones", torch.full((1, 3), float(value)).expand(4, 3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight * self.ones[0]


def check_expanded(rank, num_ranks):
    """A buffer whose elements are one in memory gets the first rank's value, and stays so."""
    mesh = scidata.init_mesh(domain=num_ranks)
    module = Expanded(rank)
    model = scidata.parallelize(module, mesh)
    assert torch.equal(model.ones, torch.zeros(4, 3))
    assert model.ones.stride()[0] == 0
    model.ones[:1].add_(1)  # of all rows: changed buffers are sent with the next gradients
    x = shard_of(torch.ones(6, 3), ShardSpec.even(mesh["domain"], [Shard(0)], (6, 3)))
    model(x).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((3,), 6.0))
    assert torch.equal(model.ones, torch.ones(4, 3))


def test_an_expanded_buffer():
    run_ranks(check_expanded, 2)
