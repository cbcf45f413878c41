"""Reductions and losses on shards against one process: all dims, keepdim, ties, NaN, empty parts."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec, ShardTensor
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

LAYOUTS = {1: [(7,)], 2: [(4, 3), (7, 0), (1, 6)], 3: [(3, 2, 2), (0, 5, 2), (7, 0, 0)]}
SHAPE = (2, 7, 3)
DIMS = [None, 0, 1, -1, (0, 1), (1, 2), (0, 2), (0, 1, 2)]
NORMS = [2, 1, 3, 0, math.inf, -math.inf]


def mesh_of(num_ranks):
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))


def ties(dtype=torch.float64):
    """Values with many equal ones, some zero."""
    return (torch.randint(-2, 3, SHAPE).to(dtype) / 2).requires_grad_()


def reductions():
    """Yield functions of one float64 tensor."""
    names = ["sum", "mean", "nansum", "amax", "amin", "any", "all", "var", "std", "logsumexp"]
    functions = [getattr(torch, name) for name in names]
    skip_none = {torch.amax, torch.amin, torch.logsumexp}
    for function in functions:
        for dim, keepdim in itertools.product(DIMS, (False, True)):
            dims = (0, 1, 2) if dim is None and function in skip_none else dim
            yield lambda x, f=function, d=dims, k=keepdim: f(x, dim=d, keepdim=k)
    for name in [*names, "prod", "max", "min"]:
        if name != "logsumexp":
            yield lambda x, n=name: getattr(x, n)()
    for function, dim, keepdim in itertools.product((torch.prod, torch.max, torch.min), (0, 1, 2), (False, True)):
        yield lambda x, f=function, d=dim, k=keepdim: f(x, d, keepdim=k)
    for function, dim, keepdim in itertools.product((torch.argmax, torch.argmin), (None, 0, 1, -1), (False, True)):
        yield lambda x, f=function, d=dim, k=keepdim: f(x, dim=d, keepdim=k)
    for order, dim in itertools.product(NORMS, DIMS):
        yield lambda x, o=order, d=dim: torch.linalg.vector_norm(x, o, d, o == 1)
    for dim, correction in itertools.product(DIMS, (0, 2)):
        yield lambda x, d=dim, c=correction: torch.var(x, d, correction=c)
        yield lambda x, d=dim, c=correction: torch.std_mean(x, d, correction=c, keepdim=True)
    yield lambda x: x.var(unbiased=False)
    yield lambda x: torch.var(x, False)
    yield lambda x: x.std(1, False, True)
    yield lambda x: x.norm()
    yield lambda x: torch.norm(x, dim=1)
    yield lambda x: x.norm(p=1, dim=(1, 2), keepdim=True)
    yield lambda x: x.sum(axis=1, keepdims=True)
    yield lambda x: x.detach().sign().sum(1, dtype=torch.float32)
    yield lambda x: x.mean((0, 1)).sum()
    yield lambda x: torch.count_nonzero(x, 1)
    yield lambda x: x.detach().to(torch.int32).sum()
    yield lambda x: x.detach().to(torch.int32).sum(1)
    yield lambda x: x.detach().to(torch.int32).amax(1)
    yield lambda x: (x.detach() > 0).sum((0, 1))
    yield lambda x: (x.detach() > 0).amax(1)
    yield lambda x: (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, keepdim=True)
    yield lambda x: x - x.amax(dim=(1, 2), keepdim=True)


def check_reductions(rank, num_ranks, layouts):
    mesh = mesh_of(num_ranks)
    for sizes in layouts:
        torch.default_generator.manual_seed(5)
        random = torch.randn(SHAPE, dtype=torch.float64).requires_grad_()
        equal = ties().detach().reshape(7, 2, 3).requires_grad_()
        for (i, function), (dim, x) in itertools.product(enumerate(reductions()), [(1, random), (0, equal)]):
            spec = ShardSpec.even(mesh, [Shard(dim)], x.shape, {0: sizes})
            try:
                assert_like_one_process(function, [x], [spec], atol=1e-11)
            except Exception as error:
                raise AssertionError(f"reduction {i} {function.__defaults__} {sizes}") from error


@pytest.mark.slow_for("2")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_reduction_and_its_gradient(num_ranks):
    run_ranks(check_reductions, num_ranks, LAYOUTS[num_ranks][-2:])


def check_special_values(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(1)], SHAPE, {0: sizes})
        torch.default_generator.manual_seed(6)
        x = torch.randn(SHAPE, dtype=torch.float64)
        x[0, 6, 1] = math.nan
        x[1, 2, 0], x[1, 3, 0], x[0, 0, 0] = math.inf, math.inf, -math.inf
        for function in (torch.max, torch.min, torch.argmax, torch.amax, torch.amin, torch.sum, torch.nansum):
            assert_like_one_process(function, [x], [spec])
            assert_like_one_process(lambda a, f=function: f(a, dim=1), [x], [spec])
        assert_like_one_process(lambda a: a.amax((0, 1)), [x.requires_grad_()], [spec])
        half = torch.randn(SHAPE).bfloat16().requires_grad_()
        for function in (torch.sum, torch.mean, torch.amax):
            assert_like_one_process(function, [half], [spec], rtol=1e-2, atol=1e-2)
        loss = shard_of(torch.ones(SHAPE), spec).mean()
        assert type(loss) is torch.Tensor
        assert loss.item() == 1.0
        kept = shard_of(torch.ones(SHAPE), spec).sum((0, 2))
        assert isinstance(kept, ShardTensor)
        assert kept.spec.sizes == (sizes,)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_nan_infinity_and_low_precision(num_ranks):
    run_ranks(check_special_values, num_ranks)


def check_statistics_without_freedom(rank, num_ranks):
    """As many elements as ``correction``, or fewer; and no deviation, where the slope of the root has no end."""
    mesh = mesh_of(num_ranks)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(1)], SHAPE, {0: sizes})
        torch.manual_seed(8)
        x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
        for name, (dim, count) in itertools.product(("var", "std", "var_mean", "std_mean"), ((1, 7), ((1, 2), 21))):
            for correction in (count - 1, count, count + 1):
                function = lambda a, n=name, d=dim, c=correction: getattr(torch, n)(a, d, correction=c)  # noqa: E731
                assert_like_one_process(function, [x], [spec])
        same = torch.full(SHAPE, 0.5, dtype=torch.float64)
        same[0, 3, 1] = 2.0  # one column deviates
        for dim, correction in itertools.product((1, (0, 1), None), (0, 1)):
            function = lambda a, d=dim, c=correction: torch.std(a, d, correction=c)  # noqa: E731
            assert_like_one_process(function, [same.requires_grad_()], [spec])
            found = assert_like_one_process(function, [torch.ones_like(same).requires_grad_()], [spec])
            assert not (found.to_local() if isinstance(found, ShardTensor) else found).any()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_statistics_without_freedom_and_without_deviation(num_ranks):
    run_ranks(check_statistics_without_freedom, num_ranks)


def losses():
    for reduction in ("mean", "sum", "none"):
        yield lambda a, b, r=reduction: F.mse_loss(a, b, reduction=r)
        yield lambda a, b, r=reduction: F.l1_loss(a, b, reduction=r)
        yield lambda a, b, r=reduction: F.smooth_l1_loss(a, b, reduction=r, beta=0.3)
        yield lambda a, b, r=reduction: F.huber_loss(a, b, reduction=r, delta=0.3)
        yield lambda a, b, r=reduction: F.binary_cross_entropy_with_logits(a, b, reduction=r)
    yield torch.nn.MSELoss()
    yield torch.nn.HuberLoss()


def check_losses(rank, num_ranks):
    mesh = mesh_of(num_ranks)
    for sizes in LAYOUTS[num_ranks]:
        spec = ShardSpec.even(mesh, [Shard(1)], SHAPE, {0: sizes})
        for function in losses():
            inputs = [torch.rand(SHAPE, dtype=torch.float64).requires_grad_() for _ in range(2)]
            for specs in ([spec, spec], [spec, None], [None, spec]):
                torch.default_generator.manual_seed(7)
                fixed = [x.detach().copy_(torch.rand(SHAPE, dtype=torch.float64)).requires_grad_() for x in inputs]
                assert_like_one_process(function, fixed, specs)
        a = shard_of(torch.rand(SHAPE), spec)
        with pytest.raises(UnsupportedShardOp, match="Remedy"):
            torch.sum(a, 1, out=torch.zeros(()))
        nuclear = lambda a: [torch.linalg.norm(a[:, :, 0], "nuc"), a.norm(p="nuc", dim=(0, 2))]  # noqa: E731
        assert_like_one_process(nuclear, [torch.rand(SHAPE, dtype=torch.float64)], [spec])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_losses(num_ranks):
    run_ranks(check_losses, num_ranks)


def check_two_axes(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
    torch.manual_seed(8)
    x = torch.randn(2, 7, 5, dtype=torch.float64).requires_grad_()
    for rows, columns in [((4, 3), (2, 3)), ((0, 7), (1, 4))]:
        both = ShardSpec.even(mesh, [Shard(1), Shard(2)], (2, 7, 5), {"h": rows, "w": columns})
        one = ShardSpec.even(mesh, [Replicate(), Shard(1)], (2, 7, 5), {"w": rows})
        for spec in (both, one):
            for dim in DIMS:
                for function in (torch.sum, torch.mean, torch.std, torch.linalg.vector_norm):
                    assert_like_one_process(lambda a, f=function, d=dim: f(a, dim=d), [x], [spec])
                assert_like_one_process(lambda a, d=dim: a.amax(() if d is None else d), [x], [spec])
            for function in (torch.argmax, torch.max, torch.prod, lambda a: a.max(1), lambda a: a.logsumexp((1, 2))):
                assert_like_one_process(function, [x], [spec])
            for other in (spec, None):
                assert_like_one_process(F.mse_loss, [x, x.detach() ** 2], [spec, other])


def test_two_axes():
    run_ranks(check_two_axes, 4)
