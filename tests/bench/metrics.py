"""CPU time of a metric's update beside the same sums in plain torch: ``python tests/bench/metrics.py``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from scidata import metrics
from scidata.data.metrics.exact import exact_terms

SHAPE = (13, 721, 1440)
ROUNDS = 5


def main() -> None:
    """Print the least of some interleaved rounds, in seconds."""
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(0)
    prediction, target = (torch.randn(SHAPE, generator=made) for _ in range(2))
    weights = metrics.latitude_weights(np.linspace(90, -90, SHAPE[1]))
    mse = metrics.MSE(weights={"latitude": weights}, by="level", dims=("level", "latitude", "longitude"))
    squares = (prediction.double() - target.double()).square().view(SHAPE[0], -1)

    def plain(dtype: torch.dtype) -> torch.Tensor:
        error = prediction.to(dtype) - target.to(dtype)
        return (error * error * weights.to(dtype)[:, None]).mean((1, 2))

    numbers = iter(range(ROUNDS))
    ways: dict[str, Callable[[], Any]] = {
        "MSE.update": lambda: mse.update(prediction, target, index=next(numbers)),
        "plain float64": lambda: plain(torch.float64),
        "plain float32": lambda: plain(torch.float32),
        "exact_terms": lambda: exact_terms(squares),
        "Tensor.sum": lambda: squares.sum(1),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.process_time()
            way()
            best[name] = min(best[name], time.process_time() - start)
    for name, seconds in best.items():
        print(f"{name:15} {seconds:.4f}")


if __name__ == "__main__":
    main()
