"""Shared by tests: Readable."""

from __future__ import annotations

import numpy as np
import torch

from tests.unit.loader._resume import Numbers


class Readable(Numbers):
    """As the data sets that can be combined."""

    fields = ("x",)

    def read_local(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([index])}

    def blocks(self) -> np.ndarray:
        return np.arange(len(self)) // 3

    def stretches(self) -> np.ndarray:
        return np.arange(len(self)) // 6
