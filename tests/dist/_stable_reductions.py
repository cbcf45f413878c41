"""Reductions, sorts, ties, pooling and integrals along a sharded dim: more entries of ``_stable_arithmetic``."""

import math

import torch
import torch.nn.functional as F

from tests.dist._stable_arithmetic import LENGTH, Formula, of_rows

_QS = (0.0, 0.3, 0.5, 1.0)
_ORDERS = (2, 1, 3, 0.5, -1, math.inf, -math.inf)
_ALONG = "sum mean nansum nanmean amax amin max min argmax argmin prod median nanmedian mode aminmax cummax cummin"
_WHOLE = "sum mean amax amin max min argmax argmin prod median nanmedian aminmax"


def _quantiles(name, x, how):
    q = torch.tensor(_QS, dtype=x.dtype)
    return getattr(torch, name)(x, q, 1, interpolation=how)


def _nines(x):
    """Lay each row out as a plane, sharded along its second dim."""
    return torch.stack([x, x.flip(1), x * 0.5], 1).unsqueeze(1)


def _tallies(x):
    """Count one row's values."""
    line, known = _wide(x.detach())[0], x.detach()[0].nan_to_num()
    return [
        torch.histc(line.nan_to_num(0, 9, -9), 4),
        *torch.histogram(line, torch.tensor([-2.0, 0, 2, 400], dtype=line.dtype)),
        torch.bincount((line.nan_to_num(0, 9, 0) > 0).long()),
        *torch.unique(known, return_inverse=True, return_counts=True),
        x[0].nansum() > 0,
        torch.tensor([line.equal(line), line.allclose(line)]),
        (x[0] > 0).nonzero(),
        x.detach()[0].masked_select(x[0] > 0),
    ]


def _pools(n):
    """Yield pooling of ``n`` dims, with places where torch says them."""
    name = f"pool{n}d"
    yield f"max_{name}", lambda x: getattr(F, f"max_{name}")(x, 3, 2, 1, return_indices=True)
    yield f"max_{name}_dilated", lambda x: getattr(F, f"max_{name}")(x, (2,) * n, 1, 1, 2)
    yield f"avg_{name}", lambda x: getattr(F, f"avg_{name}")(x, 3, 2, 1, ceil_mode=True)
    for size in (1, 2):
        yield (
            f"adaptive_max_{name}_{size}",
            lambda x, s=size: getattr(F, f"adaptive_max_{name}")(x, s, return_indices=True),
        )
        yield f"adaptive_avg_{name}_{size}", lambda x, s=size: getattr(F, f"adaptive_avg_{name}")(x, s)


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _first(x, count):
    """Take some rows, so that lines are split where no other dim has rows for each rank."""
    return x[:count]


REDUCTIONS: list[Formula] = [
    *of_rows({name: lambda x, n=name: getattr(torch, n)(x, dim=1) for name in _ALONG.split()}),
    *of_rows({f"{name}_all": lambda x, n=name: getattr(torch, n)(x) for name in _WHOLE.split()}, joins=True),
    *of_rows({
        "count_nonzero": lambda x: torch.count_nonzero(x, 1),
        "any": lambda x: x.any(1),
        "all": lambda x: x.all(1),
        "sort": lambda x: x.sort(1),
        "descending": lambda x: x.sort(1, descending=True),
        "argsort": lambda x: x.argsort(dim=1, stable=True),
        "unique_consecutive": lambda x: torch.unique_consecutive(x.detach().nan_to_num(), dim=1),
        "bucketize": lambda x: torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 300.0], dtype=x.dtype)),
        "searchsorted": lambda x: torch.searchsorted(x.detach().sort(1).values, x.detach()),
        "isin": lambda x: torch.isin(x.detach(), x.detach()[:, :3]),
    }),
    *of_rows({"msort": lambda x: x[0].msort(), "logsumexp_all": lambda x: x.logsumexp((0, 1))}, joins=True),
    *of_rows({f"topk_{k}_{largest}": lambda x, k=k, w=largest: x.topk(k, 1, w) for k in (1, 4, LENGTH) for largest in (True, False)}),
    *of_rows({f"kthvalue_{k}": lambda x, k=k: x.kthvalue(k, 1) for k in (1, 4, LENGTH)}),
    # in float16 torch takes powers that are beyond it, for the gradients
    *of_rows({f"norm_{p}": lambda x, p=p: torch.linalg.vector_norm(_wide(x), p, 1) for p in _ORDERS}, without=("cancelling",)),
    *of_rows({f"norm_all_{p}": lambda x, p=p: _wide(x).norm(p) for p in (2, 3, math.inf)}, joins=True),
    # torch takes a quantile of float32 and float64 alone
    *of_rows({
        f"{name}_{how}": lambda x, n=name, h=how: _quantiles(n, _wide(x), h)
        for name in ("quantile", "nanquantile") for how in ("linear", "lower", "higher", "nearest", "midpoint")
    }),
    *of_rows({"quantile_all": lambda x: _wide(x).quantile(0.37)}, joins=True),
    *of_rows({
        f"line_{name}": lambda x, f=function: f(_first(x, 1)[0]) for name, function in {
            "sort": lambda x: x.sort(stable=True),
            "topk": lambda x: [x.topk(1), x.topk(4, largest=False), x.topk(8), x.topk(3, sorted=False)],
            "kthvalue": lambda x: x.kthvalue(4),
            "median": lambda x: [x.median(0), x.nanmedian(0)],
            "mode": lambda x: x.mode(),
            "quantile": lambda x: [_wide(x).quantile(0.4, 0), _wide(x).nanquantile(0.6, 0)],
        }.items()
    }, joins=True),
    *of_rows({
        "var": lambda x: x.var(1),
        "std": lambda x: x.std(1),
        "diff": lambda x: x.diff(n=2, dim=1),
        "gradient": lambda x: torch.gradient(x, dim=1),
        "gradient_2": lambda x: torch.gradient(x, spacing=0.5, dim=1, edge_order=2),
        "gradient_at": lambda x: torch.gradient(x, spacing=(torch.arange(LENGTH) ** 2 / 3,), dim=1, edge_order=2),
        "trapezoid": lambda x: torch.trapezoid(x, dx=0.3, dim=1),
        "trapezoid_at": lambda x: torch.trapezoid(x, torch.arange(LENGTH) ** 2, dim=1),
        "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x, dx=2, dim=1),
        "cumulative_trapezoid_at": lambda x: torch.cumulative_trapezoid(x, torch.arange(LENGTH) ** 2, dim=1),
        "vecdot": lambda x: torch.linalg.vecdot(x, x, dim=1),
        "renorm": lambda x: x.renorm(2, 0, 1.0),
    }),
    *of_rows({"dist": lambda x, y: torch.dist(_wide(x), _wide(y), 3)}, operands=2, joins=True),
    *of_rows({name: lambda x, f=function: f(x[:, None]) for name, function in _pools(1)}),
    *of_rows({name: lambda x, f=function: f(_nines(x)) for name, function in _pools(2)}),
    *of_rows({
        "unpool": lambda x: F.max_unpool1d(*F.max_pool1d(x[:, None], 2, return_indices=True), 2, output_size=(LENGTH,)),
        "lp_pool1d": lambda x: F.lp_pool1d(_wide(x)[:, None], 2, 3),
    }),
    *of_rows({"tallies": _tallies, "inner": lambda x: torch.inner(x, x), "tensordot": lambda x: torch.tensordot(x, x, ([1], [1]))}, joins=True),
    Formula(name="cov", function=lambda x: torch.cov(x[0]), joins=True),
    Formula(name="var_mean", function=lambda x: torch.var_mean(x, 1), without=("cancelling",)),
]  # fmt: skip
