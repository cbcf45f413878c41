"""Sorts, order statistics, and results whose size values decide, along free and sharded dims, on one axis and two."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.shard import ShardSpec
from scidata.shard.rows.ordered import sorted_ids
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

SIZES = {
    1: [(7,)],
    2: [(4, 3), (6, 1), (0, 7), (7, 0)],
    3: [(3, 2, 2), (5, 1, 1), (0, 4, 3), (4, 0, 3)],
    4: [(2, 2, 2, 1), (0, 3, 0, 4), (4, 1, 1, 1)],
}


def both(name, *args, **options):
    return lambda x: [getattr(torch, name)(x, *args, **options), getattr(x, name)(*args, **options)]


def line(x):
    """Seven numbers, however many dims there are."""
    return x[(slice(None), *[0] * (len(x.shape) - 1))]


ALONG = {
    "sort": lambda x, d: [*torch.sort(x, d), *x.sort(dim=d, descending=True), *torch.sort(x, stable=True, dim=d)],
    "argsort": lambda x, d: [torch.argsort(x, d), x.argsort(d, True), torch.argsort(x, stable=True, dim=d)],
    "msort": lambda x, d: [x.msort(), torch.msort(x)] if d == 0 else [],
    "topk": lambda x, d: [*torch.topk(x, 3, d), *x.topk(1, dim=d, largest=False), *x.topk(7, d), *x.topk(0, d)],
    "cummax": lambda x, d: [*torch.cummax(x, d), *x.cummin(dim=d), *x.cummax(d), *torch.cummin(x, d)],
}


def drawn(shape, seed=0):
    """Numbers that all differ, so that no result depends on an order of equal ones."""
    count = math.prod(shape)
    values = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).double() / count - 0.4
    return values.view(shape).requires_grad_()


def layouts(num_ranks, shape, grid):
    if grid:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("h", "w"))
        for dim in range(len(shape)):
            second = [Shard((dim + 1) % len(shape))] if len(shape) > 1 else [Replicate()]
            sizes = {
                a: (3, shape[p.dim] - 3) if shape[p.dim] > 2 else (0, shape[p.dim])
                for a, p in enumerate([Shard(dim), *second])
                if isinstance(p, Shard)
            }
            yield ShardSpec.even(mesh, [Shard(dim), *second], shape, sizes)
            yield ShardSpec.even(mesh, [Replicate(), Shard(dim)], shape, {1: sizes[0]})
        return
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for dim, extent in enumerate(shape):
        for sizes in SIZES[num_ranks] if extent == 7 else [(0,) * (num_ranks - 1) + (extent,)]:
            yield ShardSpec.even(mesh, [Shard(dim)], shape, {0: sizes})


def check_along(rank, num_ranks, grid):
    for shape in ((7,), (7, 7), (7, 2), (2, 7, 7), (7, 2, 1)):
        x = drawn(shape)
        for spec in layouts(num_ranks, shape, grid):
            for name, function in ALONG.items():
                for dim in range(len(shape)):
                    if shape[dim] != 7:
                        continue
                    try:
                        assert_like_one_process(lambda y, f=function, d=dim: f(y, d), [x], [spec])
                    except Exception as error:
                        raise AssertionError(f"{name} along {dim} of {spec}") from error


@pytest.mark.parametrize(("num_ranks", "grid"), [(1, False), (2, False), (3, False), (4, True)])
def test_along_a_dim(num_ranks, grid):
    run_ranks(check_along, num_ranks, grid, timeout=200)


def check_many(rank, num_ranks):
    """Long rows of few values, NaN and infinities among them: what ties and samples do."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    n = 5000
    for seed, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)):
        x = torch.randn(n, generator=torch.Generator().manual_seed(seed)).mul(20).round()
        if dtype.is_floating_point:
            x[::7], x[3::11], x[5::13], x[::17], x[1::17] = float("nan"), float("inf"), -float("inf"), -0.0, 0.0
        x = (x > 0) if dtype == torch.bool else x.abs().to(dtype) if dtype == torch.uint8 else x.to(dtype)
        sizes = (0, *[n // (num_ranks - 1)] * (num_ranks - 2), n - n // (num_ranks - 1) * (num_ranks - 2))
        sharded = shard_of(x, ShardSpec.even(mesh, [Shard(0)], (n,), {0: sizes}))
        for descending in (False, True):
            wanted, places = torch.sort(x, stable=True, descending=descending)
            found = torch.sort(sharded, descending=descending)
            assert torch.equal(found.indices.full_tensor(), places)
            torch.testing.assert_close(found.values.full_tensor(), wanted, rtol=0, atol=0, equal_nan=True)
            if dtype == torch.bool:
                continue  # topk takes none
            few = sharded.topk(5, largest=descending).values.full_tensor()
            torch.testing.assert_close(few, x.topk(5, largest=descending).values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ties_and_nan(num_ranks):
    run_ranks(check_many, num_ranks)


def check_shares(rank, num_ranks):
    """No rank has to sort much more than its share, whatever repeats."""
    n = 30000
    for keys in (torch.zeros(n), torch.arange(n) % 3, torch.arange(n), torch.arange(n).flip(0) ** 3):
        _, counts = sorted_ids(
            keys.long()[rank::num_ranks], (n // num_ranks,) * num_ranks, torch.distributed.group.WORLD
        )
        assert sum(counts) == n
        assert max(counts) < 1.1 * n / num_ranks


def test_shares_are_even():
    run_ranks(check_shares, 3)


def check_searches(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    rows, values = drawn((7,)).detach().sort().values, drawn((7, 3, 7)).detach()
    many = drawn((7, 7), 3).detach().sort(1).values
    order = torch.argsort(-many, 1)
    long = torch.linspace(-0.5, 0.7, 400, dtype=torch.float64)

    def search(a, v):
        return [
            torch.searchsorted(a, v),
            torch.searchsorted(a, v, side="right", out_int32=True),
            torch.bucketize(v, a, right=True),
        ]

    for sizes in SIZES[num_ranks]:
        whole, split = None, ShardSpec.even(mesh, [Shard(0)], (7,), {0: sizes})
        for spec in layouts(num_ranks, (7, 3, 7), False):
            assert_like_one_process(search, [rows, values], [split, spec])
            assert_like_one_process(search, [rows, values], [whole, spec])
            half = (
                (0,) * (num_ranks - 1) + (400,)
                if sizes[0]
                else (400 // num_ranks,) * (num_ranks - 1) + (400 - 400 // num_ranks * (num_ranks - 1),)
            )
            assert_like_one_process(search, [long, values], [ShardSpec.even(mesh, [Shard(0)], (400,), {0: half}), spec])
        assert_like_one_process(search, [rows, values], [split, None])
        assert_like_one_process(lambda a: [torch.searchsorted(a, 0.1), torch.bucketize(0.3, a)], [rows], [split])
        for dims in ((0, 0), (1, 1), (1, 0), (0, None), (None, 0), (1, None), (None, 1)):
            specs = [None if d is None else ShardSpec.even(mesh, [Shard(d)], (7, 7), {0: sizes}) for d in dims]
            assert_like_one_process(lambda a, v: torch.searchsorted(a, v, right=True), [many, values[:, 0]], specs)
            assert_like_one_process(
                lambda a, v, s: torch.searchsorted(a, v, sorter=s),
                [-many, values[:, 0], order],
                [specs[0], specs[1], None],
            )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_searches(num_ranks):
    run_ranks(check_searches, num_ranks)
