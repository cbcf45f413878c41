"""Sorts, order statistics, and results whose size values decide, along free and sharded dims, on one axis and two."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from scidata.errors import UnsupportedShardOp
from scidata.shard import ShardSpec
from scidata.shard.rows.ordered import sorted_ids
from scidata.shard.torch_internals import coo_to_csr
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
    "kthvalue": lambda x, d: [*torch.kthvalue(x, 3, d), *x.kthvalue(7, dim=d, keepdim=True)],
    "median": lambda x, d: [*torch.median(x, d), *x.nanmedian(dim=d, keepdim=True), x.median(), torch.nanmedian(x)],
    "mode": lambda x, d: [*torch.mode((x * 4).round(), d), *x.mode(d, keepdim=True)],
    "quantile": lambda x, d: [
        torch.quantile(x, 0.3, d),
        x.quantile(QS, dim=d, keepdim=True),
        x.quantile(QS, d),
        x.quantile(0.7),
    ],
    "nanquantile": lambda x, d: [
        torch.nanquantile(x, QS, d),
        x.nanquantile(0.2, d, keepdim=True),
        x.nanquantile(QS, keepdim=True),
    ],
    "interpolations": lambda x, d: [
        torch.quantile(x, QS, d, interpolation=name) for name in ("lower", "higher", "nearest", "midpoint")
    ],
}
QS = torch.tensor([0.9, 0.0, 0.37, 1.0], dtype=torch.float64)


def few(x):
    """Few values, in runs."""
    return (x.detach() * 4).round().abs()


OF_VALUES = {
    "nonzero": lambda x: [torch.nonzero(few(x)), *few(x).nonzero(as_tuple=True), (few(x) > 1).argwhere(), torch.argwhere(x)],
    "where": lambda x: [*torch.where(few(x) > 1), *torch.where(few(x)[None].mT)],
    "masked_select": lambda x: [torch.masked_select(x, few(x) > 1), x.masked_select(few(x)[..., :1] > 0), x.masked_select(x > 9)],
    "unique": lambda x: [
        torch.unique(x), *few(x).unique(return_inverse=True, return_counts=True), *torch.unique(few(x), return_counts=True),
        *torch.unique(few(x), True, True), *torch.unique(x.detach().long(), return_inverse=True, return_counts=True),
    ],
    "unique_rows": lambda x: [
        each for d in range(len(x.shape)) for each in torch.unique(few(x), dim=d, return_inverse=True, return_counts=True)
    ],
    "unique_consecutive": lambda x: [
        *torch.unique_consecutive(few(x), return_inverse=True, return_counts=True), few(x).unique_consecutive(),
        *(x > 0).unique_consecutive(return_counts=True),
        *[each for d in range(len(x.shape)) for each in few(x).unique_consecutive(True, True, d)],
    ],
}  # fmt: skip
NUMBERS = torch.tensor([[3, -1], [0, 12], [5, 8]])
WEIGHTS = torch.linspace(0.5, 2, 7, dtype=torch.float64)


def written(write):
    def function(x, *others):
        y = x * 1
        write(y, *others)
        return y

    return function


TALLIES = {
    "ends of sorted numbers": lambda x: [coo_to_csr(line(few(x)).long().sort().values, 12), coo_to_csr(line(few(x)).long().msort(), 9, out_int32=True)],
    "bincount": lambda x: [torch.bincount(line(few(x)).long(), minlength=9), line(few(x)).long().bincount(WEIGHTS[: len(x)]), torch.bincount(line(few(x)).long(), line(few(x)))],
    "histc": lambda x: [torch.histc(x.detach(), 5), x.detach().histc(4, -0.1, 0.3), (x.detach() * 0).histc(3)],
    "histogram": lambda x: [
        *torch.histogram(x.detach(), 5), *x.detach().histogram(4, range=(-0.1, 0.3), weight=few(x)),
        *torch.histogram(x.detach(), EDGES, density=True), *x.detach().histogram(3, density=True, weight=few(x)),
    ],
    "histogramdd": lambda x: [
        each for options in ({"bins": 3}, {"bins": [EDGES] * 2, "weight": line(few(x)), "density": True}, {"bins": [2, 4], "range": [-1.0, 1.0, -2.0, 0.5], "weight": WEIGHTS[: len(x)]})
        for found in [torch.histogramdd(torch.stack([line(x.detach()), line(x.detach()).square()], -1), **options)] for each in (found.hist, *found.bin_edges)
    ],
    "isin": lambda x: [torch.isin(few(x), EDGES), torch.isin(few(x), line(few(x)), invert=True), torch.isin(EDGES, few(x)), torch.isin(few(x), 1)],
    "equal": lambda x: [torch.equal(x, x * 1), x.equal(x + 1), torch.equal(x, x[None]), x.equal(x.mT.mT if len(x.shape) > 1 else x)],
    "allclose": lambda x: [torch.allclose(x, x + 1e-9), x.allclose(x + 1), torch.allclose(x / 0, x / 0, equal_nan=True), x.allclose(torch.zeros(()).double())],
    "is_nonzero": lambda x: [torch.is_nonzero(x.sum().reshape(1)), (x.flatten()[:1] * 0).is_nonzero()],
    "nanmean": lambda x: [x.nanmean(), torch.nanmean(x.where(x > 0, math.nan), 0), x.where(x > 0, math.nan).nanmean(-1, keepdim=True)],
    "aminmax": lambda x: [*torch.aminmax(x), *x.aminmax(dim=-1), *torch.aminmax(x, dim=0, keepdim=True)],
    "take": lambda x: [torch.take(x, NUMBERS), x.take(NUMBERS[0, 0]), x.take((few(x) * 3).long()), torch.take(EDGES, few(x).long())],
    "index_put": lambda x: [
        torch.index_put(x, (INDEX[:2],), line(x)[:1]), x.index_put((INDEX,), line(x)[:1], accumulate=True),
        x.index_put((few(x) > 0,), line(x)[0] * 2, True), x.index_put((few(x) > 0,), EDGES[1]),
    ],
    "index_put_": written(lambda y: [y.index_put_((INDEX,), y[0] * 2, accumulate=True), torch.index_put_(y, (INDEX[:2],), y[:2] * 3)]),
    "put": lambda x: [x.put(NUMBERS, x.flatten()[:6].reshape(3, 2)), torch.put(x, NUMBERS % 4, EDGES[:6] * 2, accumulate=True)],
    "put_": written(lambda y: y.put_(NUMBERS, EDGES[:6].reshape(2, 3)).put_((few(y).long() % 3).reshape(-1)[:7], y.flatten()[:7] * 2, accumulate=True)),
    "masked_scatter": lambda x: [
        x.masked_scatter(few(x) > 1, x * 2), torch.masked_scatter(x, few(x)[..., :1] > 0, x.mT * 3 if len(x.shape) > 1 else x),
        x.masked_scatter(few(x) > 9, EDGES), x.masked_scatter(few(x) > 0, torch.arange(200.0).double()),
    ],
    "masked_scatter_": written(lambda y: y.masked_scatter_(few(y) > 0, y * 2)),
    "plain targets": lambda x: [
        torch.zeros(9).double().put_(NUMBERS % 9, x.flatten()[:6].reshape(3, 2)), (EDGES * 1).put((few(x).flatten()[:5] % 3).long(), EDGES[:5], True),
        torch.ones(8).double().index_put_((torch.arange(5),), x.flatten()[:5]), (EDGES * 1).index_put(((few(x).flatten()[:2] % 3).long(),), EDGES[0]),
        torch.ones(tuple(x.shape)).double().masked_scatter_(few(x) > 0, torch.arange(200.0).double()),
    ],
}  # fmt: skip
INDEX = torch.tensor([0, -1, 0])
EDGES = torch.tensor([-0.5, 0.0, 0.1, 0.3, 0.5, 1.0, 2.0], dtype=torch.float64)


def drawn(shape, seed=0):
    """Numbers that all differ, so that no result depends on an order of equal ones."""
    count = math.prod(shape)
    values = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).double() / count - 0.4
    return values.view(shape).requires_grad_()


def layouts(num_ranks, shape, grid, turn):
    """Yield a layout for each dim that may be sharded, with other sizes at each turn; on a grid, two."""
    meshes = ((2, 2), ("h", "w")) if grid else ((num_ranks,), ("domain",))
    mesh = init_device_mesh("cpu", meshes[0], mesh_dim_names=meshes[1])

    def sizes(extent):
        chosen = SIZES[meshes[0][0]][turn % len(SIZES[meshes[0][0]])]
        return chosen if extent == 7 else (0,) * (len(chosen) - 1) + (extent,)

    for dim, extent in enumerate(shape):
        if not grid:
            yield ShardSpec.even(mesh, [Shard(dim)], shape, {0: sizes(extent)})
            continue
        yield ShardSpec.even(mesh, [Replicate(), Shard(dim)], shape, {1: sizes(extent)})
        if len(shape) > 1:
            second = (dim + 1) % len(shape)
            yield ShardSpec.even(
                mesh, [Shard(dim), Shard(second)], shape, {0: sizes(extent), 1: sizes(shape[second])[::-1]}
            )


def check_along(rank, num_ranks, grid):
    for turn, (name, function) in enumerate(ALONG.items()):
        for shape in ((7,), (7, 7), (7, 2), (2, 7, 7), (7, 2, 1)):
            x = drawn(shape)
            for i, spec in enumerate(layouts(num_ranks, shape, grid, turn + len(shape))):
                for dim in range(len(shape)):
                    if shape[dim] != 7 or (len(shape) == 3 and (i + dim + turn) % 2):
                        continue
                    try:
                        assert_like_one_process(lambda y, f=function, d=dim: f(y, d), [x], [spec])
                    except Exception as error:
                        raise AssertionError(f"{name} along {dim} of {spec}") from error


def check_of_values(rank, num_ranks, grid):
    for turn, (name, function) in enumerate((OF_VALUES | TALLIES).items()):
        for shape in ((7,), (7, 7), (2, 7, 7), (1, 7, 2)):
            if math.prod(shape) < 14 and name in ("take", "put", "put_"):
                continue
            x = drawn(shape)
            for spec in layouts(num_ranks, shape, grid, turn + len(shape)):
                try:
                    assert_like_one_process(function, [x.detach() if "unique" in name else x], [spec])
                except Exception as error:
                    raise AssertionError(f"{name} at {spec}") from error


@pytest.mark.slow_for("4-True", "2-False")
@pytest.mark.parametrize(("num_ranks", "grid"), [(1, False), (2, False), (3, False), (4, True)])
def test_of_values(num_ranks, grid):
    run_ranks(check_of_values, num_ranks, grid, timeout=200)


@pytest.mark.slow_for("4-True", "2-False")
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
        for spec in layouts(num_ranks, (7, 3, 7), False, sizes[0]):
            assert_like_one_process(search, [rows, values], [split, spec])
            assert_like_one_process(search, [rows, values], [whole, spec])
            half = (
                (0,) * (num_ranks - 1) + (400,)
                if sizes[0]
                else (400 // num_ranks,) * (num_ranks - 1) + (400 - 400 // num_ranks * (num_ranks - 1),)
            )
            assert_like_one_process(search, [long, values], [ShardSpec.even(mesh, [Shard(0)], (400,), {0: half}), spec])
        assert_like_one_process(search, [rows, values], [split, None])
        assert_like_one_process(
            lambda a: [
                torch.searchsorted(a, 0.1),
                torch.bucketize(0.3, a),
                torch.searchsorted(a.flip(0), 0.1, sorter=torch.arange(6, -1, -1)),
            ],
            [rows],
            [split],
        )
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


def check_strides_and_refusals(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    whole = drawn((7, 7, 2)).detach()
    for dim in (0, 1):
        x = shard_of(whole, ShardSpec.even(mesh, [Shard(dim)], whole.shape, {0: SIZES[num_ranks][-1]}))
        for function in (
            lambda y: y.nonzero(),
            lambda y: y.mT.argwhere(),
            lambda y: y.quantile(QS, 1),
            lambda y: y.unique_consecutive(dim=1),
            lambda y: torch.unique(y, dim=2),
            lambda y: y.mT.masked_select(y.mT > 0),
            lambda y: y.mT.sort(1).values,
            lambda y: y.mT.topk(2, 0).indices,
            lambda y: y.mT.cummax(1).values,
            lambda y: y.mT.masked_scatter(y.mT > 0, y),
            lambda y: y.mT.put(NUMBERS, EDGES[:6]),
        ):
            assert function(x).stride() == function(whole).stride()
        for call in (
            lambda y=x: torch.median(y, 1, out=(whole * 1, whole.long())),
            lambda y=x: torch.quantile(y, 0.5, out=whole * 1),
            lambda y=x: torch.nonzero(y, out=whole.long()),
            lambda y=x: torch.take(y, NUMBERS, out=whole * 1),
        ):
            with pytest.raises(UnsupportedShardOp, match="Remedy"):
                call()
        for call in (
            lambda y=x: y.kthvalue(8, 1),
            lambda y=x: y.topk(8, 0),
            lambda y=x: y.quantile(1.5),
            lambda y=x: y.masked_scatter(y < 9, y[:1]),
            lambda y=x: torch.bincount(y[:, 0, 0].long() - 1),
            lambda y=x: torch.histc(y / 0),
            lambda y=x: y.to(torch.complex128).sort(0),
            lambda y=x: y.put(NUMBERS, EDGES),
        ):
            with pytest.raises((RuntimeError, TypeError)):  # the latter of complex numbers, from torch 2.15 on
                call()
        with pytest.raises(IndexError):
            x.take(torch.tensor([98]))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_strides_and_refusals(num_ranks):
    run_ranks(check_strides_and_refusals, num_ranks)


def check_places(rank, num_ranks):
    """The gradient of the places that quantiles are taken at, whole or split."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    places = torch.tensor([0.31, 0.57, 0.9], dtype=torch.float64).requires_grad_()
    split = ShardSpec.even(mesh, [Shard(0)], (3,), {0: (0,) * (num_ranks - 1) + (3,)})
    for shape in ((7, 7), (7,)):
        for dim in range(len(shape)):
            spec = ShardSpec.even(mesh, [Shard(dim)], shape, {0: SIZES[num_ranks][-1]})
            for q in (None, split):
                for along in (*range(len(shape)), None):
                    assert_like_one_process(lambda x, q, d=along: x.quantile(q, d), [drawn(shape), places], [spec, q])
    assert_like_one_process(torch.quantile, [drawn((7,)), places], [None, split])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_places_of_quantiles(num_ranks):
    run_ranks(check_places, num_ranks)


def check_nothing(rank, num_ranks):
    """Tensors without elements, and numbers that are missing everywhere or somewhere."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    sizes = (0,) * num_ranks
    empty = torch.zeros(0, 3, dtype=torch.float64)
    spec = ShardSpec.even(mesh, [Shard(0)], empty.shape, {0: sizes})
    for function in (
        lambda x: [*x.sort(0), *x.sort(1), *x.topk(2, 1), x.median(), *x.median(1), x.nonzero(), *torch.where(x)],
        lambda x: [x.unique(), *x.unique(return_counts=True), x.unique_consecutive(), x.masked_select(x > 0)],
        lambda x: [x.histc(3), torch.equal(x, x), x.allclose(x), torch.isin(x, 1), x.masked_scatter(x > 0, x)],
        lambda x: [x[:, 0].long().bincount(minlength=2), x.nanmean(), *x.cummax(0), torch.searchsorted(EDGES, x)],
    ):
        assert_like_one_process(function, [empty], [spec])
    missing = torch.tensor([3.0, math.nan, 1.0, math.nan, 2.0, math.inf, 0.5], dtype=torch.float64)
    spec = ShardSpec.even(mesh, [Shard(0)], (7,), {0: SIZES[num_ranks][-1]})
    for function in (
        lambda x: [x.median(), x.nanmedian(), x.nanmedian(0).values, x.median(0).values, x.kthvalue(2).values],
        lambda x: [x.quantile(0.3), x.nanquantile(QS), (x * math.nan).nanquantile(0.2), (x * math.nan).nanmedian()],
        lambda x: [x.mode(0).values, x.cummax(0).values, x.cummin(0).values, x.aminmax().max, x.nanmean()],
    ):
        assert_like_one_process(function, [missing], [spec])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_nothing_and_missing(num_ranks):
    run_ranks(check_nothing, num_ranks)
