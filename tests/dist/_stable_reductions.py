"""Reductions, sorts, ties, pooling and integrals along a sharded dim: more entries of ``_stable_arithmetic``."""

import torch

from tests.dist._stable_arithmetic import Formula, of_rows

REDUCTIONS: list[Formula] = [
    *of_rows({
        "sum": lambda x: x.sum(1),
        "var": lambda x: x.var(1),
        "std": lambda x: x.std(1),
    }),
    Formula(name="var_mean", function=lambda x: torch.var_mean(x, 1), without=("cancelling",)),
]  # fmt: skip
