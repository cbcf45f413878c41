"""PhysicsNeMo's models of its package, as they are there, on plain parameters."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.models.cases import Case, image


def made(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(import_module(f"physicsnemo.models.{module}"), name)(**options)


def cases() -> dict[str, Case]:
    afno = {"inp_shape": [32, 32], "in_channels": 3, "out_channels": 2, "patch_size": [4, 4], "embed_dim": 16}
    fno = {"in_channels": 3, "out_channels": 2, "latent_channels": 8, "num_fno_layers": 2, "num_fno_modes": 4}
    unet = {"in_channels": 3, "out_channels": 2, "model_depth": 2, "feature_map_channels": (4, 4, 8, 8)}
    pangu = {"img_size": (24, 32), "embed_dim": 8, "num_heads": (1, 2, 2, 1), "window_size": (2, 3, 4)}
    found = {
        "AFNO": image(made("afno", "AFNO", **afno, depth=2, num_blocks=4), dtype=torch.float32, tolerance=1e-4),
        "FNO": image(made("fno", "FNO", **fno, padding=0)),
        "FNO padded": image(made("fno", "FNO", **fno, padding=3)),
        "Pangu": image(made("pangu", "Pangu", **pangu), 1, 72, 24, 32),
    }
    films = {
        "UNet": made("unet", "UNet", **unet, normalization_args={"num_groups": 2}),
        "UNet batch norm": made("unet", "UNet", **unet, normalization="batchnorm", gradient_checkpointing=False),
    }
    return found | {name: image(make, 1, 3, 8, 16, 16) for name, make in films.items()}
