"""Along a sharded dim, the very elements that torch takes where several are equal; integers that wrap; derivatives twice.

What numbers do to formulas in floating point is in ``test_stable_arithmetic``.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from scidata.shard import ShardSpec
from scidata.shard.ops import sorting
from scidata.shard.rows.redistribute import gather_full
from scidata.testing import run_ranks
from scidata.testing.oracle import assert_like_one_process, shard_of

SIZES = {2: (23, 17), 3: (21, 0, 19)}


def each(num_ranks, function, *inputs, dim=0, **how):
    """Compare with one process, the dim of 40 rows sharded."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    specs = [ShardSpec.even(mesh, [Shard(dim)], x.shape, {0: SIZES[num_ranks]}) for x in inputs]
    return assert_like_one_process(function, inputs, specs, **how)


def few(*shape, missing=False):
    """Few values, so that most are equal to others; more of them than torch sorts stably."""
    x = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(1)).double()
    if missing:
        x.view(-1)[3::9] = math.nan
    return x


TIES = {
    "topk": lambda x: [x.topk(k, 0, largest) for k in (1, 4, 31) for largest in (True, False)],
    "unsorted": lambda x: x.topk(5, 0, sorted=False),
    "kthvalue": lambda x: [x.kthvalue(k, 0) for k in (1, 17, 40)],
    "median": lambda x: [x.median(0), x.nanmedian(0), x.median(), x.nanmedian()],
    "mode": lambda x: x.mode(0),
    "quantile": lambda x: [x.quantile(0.3, 0), x.nanquantile(0.7, 0), x.quantile(0.6)],
    "max": lambda x: [x.max(0), x.min(0), x.argmax(0), x.argmin(), x.max(), x.amin(0), x.aminmax(dim=0)],
    "cummax": lambda x: [x.cummax(0), x.cummin(0)],
}


def check_ties(rank, num_ranks):
    for name, function in TIES.items():
        for shape in ((40,), (40, 2)):
            for missing in (False, True):
                try:
                    each(num_ranks, function, few(*shape, missing=missing).requires_grad_())
                except Exception as error:
                    raise AssertionError(f"{name} of {shape}, NaN: {missing}") from error
    each(num_ranks, lambda x: [x.sort(1), x.argsort(1), x.msort()], few(4, 40).requires_grad_(), dim=1)
    sorting.GATHERED = 0  # a line that is too long for torch's choice: values are the same, of equal ones the first
    for name in ("topk", "kthvalue", "median", "mode", "quantile"):
        x = few(40)
        found = each(
            num_ranks,
            lambda x, f=TIES[name]: [r if isinstance(r, torch.Tensor) else r.values for r in as_list(f(x))],
            x,
        )
        assert found
    values, places = shard_of(
        x, ShardSpec.even(init_device_mesh("cpu", (num_ranks,)), [Shard(0)], (40,), {0: SIZES[num_ranks]})
    ).topk(3)
    assert x[places.full_tensor()].tolist() == values.full_tensor().tolist() == [3, 3, 3]
    assert places.full_tensor().tolist() == (x == 3).nonzero()[:3, 0].tolist()


def as_list(found):
    return found if isinstance(found, list) else [found]


X = torch.arange(40) ** 2 // 7
INTEGERS = {
    "trapezoid": lambda x: [torch.trapezoid(x), torch.trapz(x, dx=0.3), torch.trapezoid(x, X), torch.trapezoid(x, x)],
    "cumulative": lambda x: [
        torch.cumulative_trapezoid(x), torch.cumulative_trapezoid(x, dx=2), torch.cumulative_trapezoid(x, X)
    ],
    "diff": lambda x: [x.diff(), x.diff(n=2)],
    "gradient": lambda x: [] if x.dtype == torch.uint8 else [
        torch.gradient(x, dim=1), torch.gradient(x, spacing=0.5, dim=1, edge_order=2),
        torch.gradient(x, spacing=(torch.arange(40) ** 2 / 3,), dim=1),
    ],
    "sums": lambda x: [x.sum(), x.sum(1), x.sum(1, dtype=torch.int8), x.cumsum(1), x.cumsum(1, dtype=torch.int16)],
    "products": lambda x: [x.prod(1), x.cumprod(1), x.prod(1, dtype=torch.float32)],
    "means": lambda x: [x.mean(1, dtype=torch.float32), x.logsumexp(1)],
    "cov": lambda x: [torch.cov(x), torch.cov(x, fweights=X + 1)],
    "order": lambda x: [x.amax(1), x.sort(dim=1, stable=True), x.kthvalue(3, 1), x.median(1), x.mode(1)],
}  # fmt: skip


def check_integers(rank, num_ranks):
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        highest = min(torch.iinfo(dtype).max, 2**40)
        x = torch.randint(highest // 2, highest, (2, 40), generator=torch.Generator().manual_seed(2)).to(dtype)
        for name, function in INTEGERS.items():
            try:
                each(num_ranks, function, x, dim=1, rtol=3e-6, atol=1e-6)
            except Exception as error:
                raise AssertionError(f"{name} of {dtype}") from error
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    for dtype in (torch.bool, torch.int32):  # refused on each rank, those without rows too
        x = shard_of(
            torch.ones(40, dtype=dtype), ShardSpec.even(mesh, [Shard(0)], (40,), {0: (40,) + (0,) * (num_ranks - 1)})
        )
        refused = [
            lambda x: torch.linalg.vector_norm(x, 2),
            lambda x: x.logcumsumexp(0),
            lambda x: torch.linalg.vecdot(x, x),
        ]
        for function in refused + [torch.trapezoid, torch.cov, torch.cumulative_trapezoid] * (dtype == torch.bool):
            with pytest.raises(RuntimeError):
                function(x)


def check_pools(rank, num_ranks):
    """Masked windows at the ends, where padding is no element; of several NaN the last."""
    noise = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(3)).double()
    masked, missing = noise.where(noise > 0.8, -math.inf), noise.where(noise > -0.5, math.nan)
    masked[..., :3] = masked[..., -3:] = -math.inf
    for x in (masked, missing, missing.where(missing.isnan(), -math.inf)):
        for stride, padding, dilation, ceil in ((2, 1, 1, False), (1, 2, 3, False), (3, 2, 1, True)):
            options = {"padding": padding, "dilation": dilation, "ceil_mode": ceil}
            for places in (False, True):
                each(
                    num_ranks,
                    lambda y, s=stride, o=options, p=places: F.max_pool1d(y, 4, s, return_indices=p, **o),
                    x.clone().requires_grad_(),
                    dim=2,
                )
        for size in (1, 3, 7):
            each(
                num_ranks,
                lambda y, s=size: F.adaptive_max_pool1d(y, s, return_indices=True),
                x.clone().requires_grad_(),
                dim=2,
            )


TWICE = {
    "norm": lambda x: torch.linalg.vector_norm(x, 2, 0) + x.norm(3) + torch.linalg.vector_norm(x, 1.5),
    "extremes": lambda x: x.amax(0) ** 2 + x.max() ** 3 + x.amin() * x.norm(math.inf),
    "product": lambda x: x.prod(0) ** 2 + (x / 8).prod(),
    "with a zero": lambda x: (x * (torch.arange(40.0).double()[:, None] != 7)).prod(0),
    "logsumexp": lambda x: x.logsumexp(0) * x.logsumexp((0, 1)),
    "scans": lambda x: (x / 1.5).cumprod(0).sum(0) + x.logcumsumexp(0).mean(0),
}


def check_twice(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("domain",))
    whole = (torch.rand(40, 3, generator=torch.Generator().manual_seed(4)).double() + 0.6).requires_grad_()
    spec = ShardSpec.even(mesh, [Shard(0)], whole.shape, {0: SIZES[num_ranks]})
    for name, function in TWICE.items():
        found = []
        for x in (whole, shard_of(whole, spec).requires_grad_()):
            leaf = getattr(x, "local", x)
            result = function(x)
            (first,) = torch.autograd.grad(result.sum(), leaf, create_graph=True)
            slope = first.square().sum()
            (second,) = torch.autograd.grad(slope, leaf)
            found.append([first.detach(), second])
        for ours, theirs in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(
                gather_full(ours, spec), theirs, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )


CHECKS = {"ties": check_ties, "integers": check_integers, "pools": check_pools, "twice": check_twice}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_as_one_process(name, num_ranks):
    run_ranks(CHECKS[name], num_ranks, timeout=300)
