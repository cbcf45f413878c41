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

    def __init__(self, transform: nn.Module, back: nn.Module | None = None, channels: int = 3) -> None:
        super().__init__()
        self.scale, self.transform, self.back = nn.Parameter(torch.ones(channels, 1, 1)), transform, back

    def forward(self, x: torch.Tensor) -> Any:
        y = self.transform(x * self.scale)
        return y if self.back is None else self.back(y)


class FromAnother(nn.Module):
    """Attention of the points of another grid."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size, self.attention = size, th.NeighborhoodAttentionS2(4, SIZE, size)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(nn.functional.interpolate(x, self.size), x, x)


def cases() -> dict[str, Case]:
    made: dict[str, Callable[[], Any]] = {"RealSHT": lambda: Scaled(th.RealSHT(*SIZE))}
    for grid in ("equiangular", "legendre-gauss", "lobatto"):
        made[f"RealSHT and back, {grid}"] = lambda grid=grid: Scaled(
            th.RealSHT(*SIZE, grid=grid), th.InverseRealSHT(*SIZE, grid=grid)
        )
    made |= {
        "InverseRealSHT to a finer grid": lambda: Scaled(
            (to := th.RealSHT(*SIZE)), th.InverseRealSHT(24, 48, lmax=to.lmax, mmax=to.mmax)
        ),
        "RealVectorSHT and back": lambda: Scaled(th.RealVectorSHT(*SIZE), th.InverseRealVectorSHT(*SIZE), 2),
        "DiscreteContinuousConvS2": lambda: th.DiscreteContinuousConvS2(3, 4, SIZE, SIZE, (3, 2)),
        "DiscreteContinuousConvS2 strided": lambda: th.DiscreteContinuousConvS2(3, 4, SIZE, (8, 16), (3, 2)),
        "DiscreteContinuousConvS2 in one": lambda: th.DiscreteContinuousConvS2(3, 4, SIZE, SIZE, (3, 2), fused=True),
        "DiscreteContinuousConvS2 to fewer channels": lambda: th.DiscreteContinuousConvS2(3, 1, SIZE, SIZE, (3, 2)),
        "DiscreteContinuousConvTransposeS2": lambda: th.DiscreteContinuousConvTransposeS2(3, 4, SIZE, (32, 64), (3, 2)),
        "AttentionS2": lambda: th.AttentionS2(4, 2, SIZE, SIZE),
        "NeighborhoodAttentionS2": lambda: th.NeighborhoodAttentionS2(4, SIZE, SIZE, num_heads=2),
        "NeighborhoodAttentionS2 to a coarser grid": lambda: FromAnother((8, 16)),
        "NeighborhoodAttentionS2 to a finer grid": lambda: FromAnother((32, 64)),
        "ResampleS2": lambda: Scaled(th.ResampleS2(*SIZE, 24, 48)),
    }
    single = {"dtype": torch.float32, "tolerance": 1e-4}  # of kernels for the CPU that know no other
    return {
        name: image(
            make,
            *(2, 4 if "Attention" in name else 2 if "Vector" in name else 3, *SIZE),
            **single if "Neighborhood" in name else {},
        )
        for name, make in made.items()
    }
