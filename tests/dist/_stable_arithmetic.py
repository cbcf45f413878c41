"""Operations along a sharded dim, and the numbers on which formulas that are equal on paper give different results.

Each row of the input is of one kind: an offset, a row masked whole or in part, one NaN or infinity, ties. An operation
acts along dim 1, which is sharded, so that one call does all kinds; one that joins rows gets a kind at a time.
Reductions, sorts and pooling are in ``_stable_reductions``, the rest is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import scatter as pyg_scatter
from torch_geometric.utils import softmax as pyg_softmax

import scidata

LENGTH = 9
LAYOUTS = {2: [(5, 4), (0, 9), (8, 1)], 3: [(5, 1, 3), (0, 5, 4), (4, 0, 5)]}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INF, _NAN = math.inf, math.nan

#: Values by kind; float16 does not have all, and it alone has sums of parts that are beyond it.
_OFFSETS = {"0": 0.0, "300": 300.0, "3e4": 3e4, "1e6": 1e6, "-1e9": -1e9}
_SINGLE = {"nan": {2: _NAN}, "inf": {4: _INF}, "-inf": {6: -_INF}, "two inf": {0: _INF, 8: _INF}}
_MIXED = {"both inf": {1: _INF, 7: -_INF}, "part masked": dict.fromkeys(range(5), -_INF)}
_ROWS = {
    "masked": [-_INF] * LENGTH,
    "equal": [-1e9] * LENGTH,
    "ties": [1, 2, 0, 2, 2, 1, 0, 0, 2],
    "zeros": [0] * LENGTH,
}
KINDS = (*_OFFSETS, *_SINGLE, *_MIXED, *_ROWS, "wide", "near limit", "cancelling")
_ALONE = ("0", "3e4", "1e6", "nan", "inf", "-inf", "masked", "ties", "zeros", "near limit", "cancelling")


def _row(kind: str, noise: Tensor, seed: int) -> Tensor:
    if kind in _OFFSETS:  # those of a second operand lie apart
        return noise + _OFFSETS[kind] * (-0.5) ** seed
    if kind in _ROWS:
        return torch.tensor(_ROWS[kind], dtype=torch.float64).roll(seed)
    if kind == "wide":
        return noise * 100
    if kind == "near limit":  # of float16, once squared
        return 200 + noise
    if kind == "cancelling":  # sums of parts are beyond float16
        return noise + 3e4 * (torch.arange(LENGTH) - LENGTH // 2).sign()
    found = noise.clone()
    for place, value in (_SINGLE | _MIXED)[kind].items():
        found[place] = value
    return found


def rows(kinds: tuple[str, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return ``(kinds, LENGTH)`` numbers; the same for each call."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(kinds), LENGTH, generator=generator, dtype=torch.float64)
    return torch.stack([_row(kind, row, seed) for kind, row in zip(kinds, noise, strict=True)]).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Formula:
    """An operation along dim 1 of tensors ``(kinds, LENGTH)``.

    Attributes
    ----------
    joins
        Whether rows meet, so that each kind needs a call of its own.
    without
        Kinds that say nothing here.
    operands
        How many tensors, all sharded alike.
    grad
        Whether gradients are compared.
    fixed
        Whether float64 gives other numbers, because they are drawn or cast: then torch's result is the truth.
    """

    name: str
    function: Callable[..., Any]
    joins: bool = False
    without: tuple[str, ...] = ()
    operands: int = 1
    grad: bool = True
    fixed: bool = False

    def kinds(self, dtype: torch.dtype) -> list[tuple[str, ...]]:
        """Return the kinds of each call. Those of one row each are fewer: they cost a call each."""
        if self.joins and dtype == torch.bfloat16:
            return []
        beyond = ("1e6", "-1e9", "equal") if dtype == torch.float16 else ("cancelling",)
        asked = _ALONE if self.joins else KINDS
        chosen = tuple(kind for kind in asked if kind not in self.without and kind not in beyond)
        return [(kind,) for kind in chosen] if self.joins else [chosen]


def of_rows(functions: dict[str, Callable[..., Any]], **how: Any) -> list[Formula]:
    """Make entries that differ by name and function alone."""
    return [Formula(name=name, function=function, **how) for name, function in functions.items()]


_CLASSES = torch.tensor([3, 0, 8, 5, 6, 1, 2, 7, 4, 4, 8, 0, 3, 5, 6, 2, 1, 7, 3])


def _like(x: Any, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return plain numbers of the shape and dtype of ``x``."""
    return torch.linspace(low, high, math.prod(x.shape), dtype=x.dtype).view(tuple(x.shape))


def _signs(x: Any) -> Any:
    return torch.where(torch.arange(math.prod(x.shape)).view(tuple(x.shape)) % 3 > 0, 1, -1).to(x.dtype)


def _attend(x: Any, bias: Any) -> Any:
    """Attend with scores that are not large, but for the bias; three heads."""
    along = torch.where(x.detach() == 0, 0, 0).unsqueeze(1).unsqueeze(-1)
    query, key, value = (
        along + n * _like(x[0]).view(1, 1, -1, 1) - torch.tensor([0.5, 0.1, 0.7]).view(1, 3, 1, 1) for n in (1, 2, 3)
    )
    return F.scaled_dot_product_attention(query.to(x.dtype), key.to(x.dtype), value.to(x.dtype), bias)


def _by(way: str, function: Callable[..., Any], x: Any) -> Any:
    with scidata.attention(way):
        return function(x)


def _scaled(x: Any) -> list[Any]:
    """Return queries and keys whose scores are large, and values that are not; three heads."""
    query, key = (
        x.unsqueeze(1).unsqueeze(-1) * torch.tensor([1.0, -0.5, 0.0]).view(3, 1, 1).to(x.dtype) * n for n in (1, 2)
    )
    return [query, key, key.sigmoid()]


def _multi_head(x: Any, needed: bool) -> Any:
    """Attend to rows of two numbers, dim 1 being the kinds."""
    weight = _like(x[0, :1], 0.5, 1).expand(6, 2)
    how = {"need_weights": needed, "training": False}
    result = F.multi_head_attention_forward(
        x, x, x, 2, 2, weight, None, None, None, False, 0.0, weight[:2], None, **how
    )
    return [each.transpose(0, 1) if i == 0 else each for i, each in enumerate(result) if each is not None]


_MASK = (torch.arange(81).view(9, 9) % 7 > 2) & (torch.arange(9) != 4).view(9, 1)
#: What scores with an infinity among later keys come to depends on the kernel; tiny gradients in float16, too.
_ATTENTION: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "rows": (lambda x: _attend(x, x[:, None, :, None] + _like(x[0])), ()),
    "keys": (lambda x: _attend(x, x[:, None, None, :] + _like(x[0]).view(1, 1, -1, 1)), ("wide",)),
    "large": (lambda x: F.scaled_dot_product_attention(*_scaled(x)), ()),
    "causal": (lambda x: F.scaled_dot_product_attention(*_scaled(x), is_causal=True), ("inf", "-inf", "both inf")),
    "masked": (lambda x: F.scaled_dot_product_attention(*_scaled(x), _MASK), ()),
}
_LOSSES: dict[str, Callable[..., Any]] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "weighted_mse": lambda x, y, reduction: F.mse_loss(x, y, weight=_like(x), reduction=reduction),
    "soft_margin_loss": lambda x, y, reduction: F.soft_margin_loss(x, _signs(y), reduction=reduction),
    "binary_cross_entropy": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid().nan_to_num(), y.sigmoid().nan_to_num(), reduction=reduction
    ),
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "kl_div": F.kl_div,
    "kl_div_log": lambda x, y, reduction: F.kl_div(x, y, log_target=True, reduction=reduction),
    "poisson_nll_loss": F.poisson_nll_loss,
    "poisson_nll_full": lambda x, y, reduction: F.poisson_nll_loss(x, y, False, True, reduction=reduction),
    "gaussian_nll_loss": lambda x, y, reduction: F.gaussian_nll_loss(x, y, _like(x, 0.5, 2), reduction=reduction),
    "gaussian_nll_var": lambda x, y, reduction: F.gaussian_nll_loss(y, _like(x), x.square(), reduction=reduction),
    "margin_ranking": lambda x, y, reduction: F.margin_ranking_loss(x, y, _signs(x), 0.1, reduction=reduction),
    "hinge_embedding": lambda x, y, reduction: F.hinge_embedding_loss(x, _signs(x), reduction=reduction),
}
_CLASS_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda x, reduction: F.cross_entropy(
        _twice(x), _CLASSES[:2], _like(x[0], 1, 2), reduction=reduction, label_smoothing=0.1
    ),
    "cross_entropy_rows": lambda x, reduction: F.cross_entropy(_columns(x), _CLASSES[:9] % 2, reduction=reduction),
    "nll_rows": lambda x, reduction: F.nll_loss(
        _columns(x), _CLASSES[:9] % 2, _like(x[0, :2], 1, 2), reduction=reduction
    ),
    "soft": lambda x, reduction: F.cross_entropy(_twice(x), _like(_twice(x)), _like(x[0]), reduction=reduction),
    "multi_margin": lambda x, reduction: F.multi_margin_loss(_wide(_columns(x)), _CLASSES[:9] % 2, reduction=reduction),
    "multilabel_margin": lambda x, reduction: F.multilabel_margin_loss(
        _wide(x), _CLASSES[None, :9], reduction=reduction
    ),
    "ctc": lambda x, reduction: F.ctc_loss(
        _wide(_columns(x))[:, None].log_softmax(2), torch.tensor([[1, 1]]), [9], [2], reduction=reduction
    ),
}


def _wide(x: Any) -> Any:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _twice(x: Any) -> Any:
    return torch.cat([x, x * 0.5])


def _columns(x: Any) -> Any:
    """Turn one row into rows of two."""
    return torch.stack([x[0], x[0] * 0.5], 1)


FORMULAS: list[Formula] = [
    *of_rows({
        "softmax": lambda x: x.softmax(1),
        "softmin": lambda x: F.softmin(x, 1),
        "softmax_float32": lambda x: x.softmax(1, dtype=torch.promote_types(x.dtype, torch.float32)),
        "log_softmax": lambda x: x.log_softmax(1),
        "cumsum": lambda x: x.cumsum(1),
        "cumprod": lambda x: x.cumprod(1),
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "normalize": lambda x: F.normalize(x, dim=1),
        "normalize_1": lambda x: F.normalize(x, 1.0, 1),
        "cross_entropy": lambda x: F.cross_entropy(x, _CLASSES[: len(x)], reduction="none"),
        "cross_entropy_smooth": lambda x: F.cross_entropy(x, _CLASSES[: len(x)], reduction="none", label_smoothing=0.1),
        "cross_entropy_soft": lambda x: F.cross_entropy(x, _like(x), reduction="none"),
        "nll_loss": lambda x: F.nll_loss(x, _CLASSES[: len(x)], reduction="none"),
        "batch_norm": lambda x: F.batch_norm(x[None], None, None, training=True),
        "batch_norm_eval": lambda x: F.batch_norm(x[None], _like(x[:, 0]), _like(x[:, 0], 1, 2)),
        "instance_norm": lambda x: F.instance_norm(x[None]),
        "group_norm": lambda x: F.group_norm(x[:, None], 1),
        "layer_norm": lambda x: F.layer_norm(x, (LENGTH,), _like(x[0]), _like(x[0])),
        "rms_norm": lambda x: F.rms_norm(x, (LENGTH,), _like(x[0])),
    }),
    *of_rows({
        "linear": lambda x: F.linear(x, _like(x[0], -1, 1).expand(2, -1), _like(x[0, :2])),
        "einsum": lambda x: torch.einsum("kl,lm->km", x, _like(x[0], -1, 1).view(-1, 1)),
        "scatter_add": lambda x: x.scatter_add(1, _CLASSES[:9].expand(len(x), -1), x),
        "scatter_mean": lambda x: x.scatter_reduce(1, _CLASSES[:9].expand(len(x), -1), x, "mean"),
        "scatter_amax": lambda x: x.scatter_reduce(1, _CLASSES[:9].expand(len(x), -1), x, "amax"),
        "index_add": lambda x: x.index_add(1, _CLASSES[:9] % 3, x),
        "segments": lambda x: pyg_softmax(x, _CLASSES[:9] % 3, dim=1),
        "segment_sums": lambda x: pyg_scatter(x, _CLASSES[:9] % 3, 1, reduce="sum"),
        "segment_means": lambda x: pyg_scatter(x, _CLASSES[:9] % 3, 1, reduce="mean"),
        "segment_maxima": lambda x: pyg_scatter(x, _CLASSES[:9] % 3, 1, reduce="max"),
        "interpolate": lambda x: F.interpolate(x[:, None], 13, mode="linear"),
        "diff": lambda x: x.diff(dim=1),
        "fft": lambda x: torch.fft.rfft(_wide(x), dim=1).abs(),
    }),
    Formula(  # infinities next to which products are added up depend on the kernel
        name="conv", function=lambda x: F.conv1d(x[:, None], _like(x[0, :3], -1, 2).view(1, 1, 3), padding=1),
        without=tuple(_SINGLE | _MIXED),
    ),
    *of_rows({
        "gumbel_softmax": lambda x: F.gumbel_softmax(x, 2.0, dim=1),
    }, fixed=True, without=("wide",)),
    *of_rows({"cosine_similarity": lambda x, y: F.cosine_similarity(x, y, 1)}, operands=2, without=("-1e9", "equal")),
    *of_rows({"triplet": lambda x, y: F.triplet_margin_loss(x, y, y * 0.5, reduction="none")}, operands=2, without=("1e6",)),
    Formula(
        name="cosine_embedding",
        function=lambda x, y: F.cosine_embedding_loss(x, y, _signs(x[:, 0]), reduction="none"),
        operands=2, without=("cancelling",),
    ),
    *of_rows({
        "pairwise_distance": lambda x, y: F.pairwise_distance(x, y),
        "multilabel_soft_margin": lambda x, y: F.multilabel_soft_margin_loss(x, _signs(y), reduction="none"),
        "product": lambda x, y: (x.unsqueeze(1) @ y.unsqueeze(2)).flatten(),
    }, operands=2),
    *of_rows({
        f"{name}_{how}": lambda x, y, f=function, h=how: f(x, y, reduction=h)
        for name, function in _LOSSES.items() for how in (("mean", "sum") if name == "mse_loss" else ("mean",))
    }, operands=2, joins=True),
    *[
        Formula(
            name=f"{name}_{how}", function=lambda x, f=function, h=how: f(x, reduction=h), joins=True,
            # torch on a CPU takes the sum before the mean in float16
            without=("3e4", "cancelling") if name == "nll_rows" else (),
        )
        for name, function in _CLASS_LOSSES.items() for how in (("mean", "sum") if name == "cross_entropy" else ("mean",))
    ],
    *[
        Formula(name=f"{way}_{name}", function=lambda x, w=way, f=function: _by(w, f, x), without=without)
        for name, (function, without) in _ATTENTION.items() for way in ("gather", "ring", "heads")
    ],
    *of_rows({
        f"multi_head_{needed}": lambda x, n=needed: _multi_head(x.T.unsqueeze(-1) * _like(x[0, :2], 0.5, 1), n)
        for needed in (False, True)
    }),
]  # fmt: skip
