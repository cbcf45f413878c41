"""torch-harmonics: transforms on the sphere, and convolutions and attention there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_harmonics as th
from torch import nn

from tests.models.cases import Case, image

SIZE = (16, 32)


class Scaled(nn.Module):
    """A transform of scaled values, so that something is learned; complex results as real ones."""

    def __init__(self, transform: nn.Module, back: nn.Module | None = None) -> None:
        super().__init__()
        self.scale, self.transform, self.back = nn.Parameter(torch.ones(3, 1, 1)), transform, back

    def forward(self, x: torch.Tensor) -> Any:
        y = self.transform(x * self.scale)
        return y if self.back is None else self.back(y)


def cases() -> dict[str, Case]:
    made: dict[str, Callable[[], Any]] = {"RealSHT": lambda: Scaled(th.RealSHT(*SIZE))}
    for grid in ("equiangular", "legendre-gauss", "lobatto"):
        made[f"RealSHT and back, {grid}"] = lambda grid=grid: Scaled(
            th.RealSHT(*SIZE, grid=grid), th.InverseRealSHT(*SIZE, grid=grid)
        )
    made |= {
        "InverseRealSHT to a finer grid": lambda: Scaled(
            th.RealSHT(*SIZE), th.InverseRealSHT(24, 48, lmax=16, mmax=17)
        ),
        "DiscreteContinuousConvS2": lambda: th.DiscreteContinuousConvS2(3, 4, SIZE, SIZE, (3, 2)),
        "DiscreteContinuousConvS2 strided": lambda: th.DiscreteContinuousConvS2(3, 4, SIZE, (8, 16), (3, 2)),
        "DiscreteContinuousConvTransposeS2": lambda: th.DiscreteContinuousConvTransposeS2(3, 4, SIZE, (32, 64), (3, 2)),
        "AttentionS2": lambda: th.AttentionS2(4, 2, SIZE, SIZE),
        "NeighborhoodAttentionS2": lambda: th.NeighborhoodAttentionS2(4, SIZE, SIZE, num_heads=2),
        "ResampleS2": lambda: Scaled(th.ResampleS2(*SIZE, 24, 48)),
    }
    wide = {"AttentionS2", "NeighborhoodAttentionS2"}
    found = {name: image(make, 2, 4 if name in wide else 3, *SIZE) for name, make in made.items()}

    def vector() -> nn.Module:
        return Scaled(th.RealVectorSHT(*SIZE), th.InverseRealVectorSHT(*SIZE))

    found["RealVectorSHT and back"] = image(lambda: Stacked(vector()), 2, 2, *SIZE)
    return found


class Stacked(nn.Module):
    """Gives a vector transform two of what it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(torch.stack([x, x.sin(), x.cos()], 1).transpose(1, 2)).sum(1)
