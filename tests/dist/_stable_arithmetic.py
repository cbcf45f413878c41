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

LENGTH = 9
LAYOUTS = {2: [(5, 4), (0, 9), (8, 1)], 3: [(5, 1, 3), (0, 5, 4), (4, 0, 5)]}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INF, _NAN = math.inf, math.nan

#: Values by kind; of several in a row, those that float16 does not have are left out there.
_OFFSETS = {"0": 0.0, "300": 300.0, "3e4": 3e4, "1e6": 1e6, "-1e9": -1e9}
_SINGLE = {"nan": {2: _NAN}, "inf": {4: _INF}, "-inf": {6: -_INF}, "two inf": {0: _INF, 8: _INF}}
_MIXED = {"both inf": {1: _INF, 7: -_INF}, "part masked": dict.fromkeys(range(5), -_INF)}
_ROWS = {"masked": [-_INF] * LENGTH, "equal": [-1e9] * LENGTH, "ties": [1, 2, 0, 2, 2, 1, 0, 0, 2]}
KINDS = (*_OFFSETS, *_SINGLE, *_MIXED, *_ROWS, "wide", "near limit")


def _row(kind: str, noise: Tensor, seed: int) -> Tensor:
    if kind in _OFFSETS:
        return noise + _OFFSETS[kind]
    if kind in _ROWS:
        return torch.tensor(_ROWS[kind], dtype=torch.float64).roll(seed)
    if kind == "wide":
        return noise * 100
    if kind == "near limit":  # of float16, once squared
        return 200 + noise
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
        """Return the kinds of each call."""
        beyond = ("1e6", "-1e9", "equal") if dtype == torch.float16 else ()
        chosen = tuple(kind for kind in KINDS if kind not in self.without and kind not in beyond)
        return [(kind,) for kind in chosen] if self.joins else [chosen]


def of_rows(functions: dict[str, Callable[..., Any]], **how: Any) -> list[Formula]:
    """Make entries that differ by name and function alone."""
    return [Formula(name=name, function=function, **how) for name, function in functions.items()]


_CLASSES = torch.tensor([3, 0, 8, 5, 6, 1, 2, 7, 4, 4, 8, 0, 3, 5, 6, 2])


def _like(x: Any, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return plain numbers of the shape and dtype of ``x``."""
    return torch.linspace(low, high, math.prod(x.shape), dtype=x.dtype).view(tuple(x.shape))


FORMULAS: list[Formula] = [
    *of_rows({
        "softmax": lambda x: x.softmax(1),
        "softmin": lambda x: F.softmin(x, 1),
        "softmax_float32": lambda x: x.softmax(1, dtype=torch.promote_types(x.dtype, torch.float32)),
        "log_softmax": lambda x: x.log_softmax(1),
        "cumsum": lambda x: x.cumsum(1),
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
        "gumbel_softmax": lambda x: F.gumbel_softmax(x, 2.0, dim=1),
    }, fixed=True, without=("wide",)),
    *of_rows({"cosine_similarity": lambda x, y: F.cosine_similarity(x, y, 1)}, operands=2, without=("-1e9", "equal")),
]  # fmt: skip
